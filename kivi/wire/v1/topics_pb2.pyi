from kivi.wire.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Asked(_message.Message):
    __slots__ = ("where", "texts")
    WHERE_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    where: _types_pb2.Expr
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, where: _Optional[_Union[_types_pb2.Expr, _Mapping]] = ..., texts: _Optional[_Iterable[str]] = ...) -> None: ...

class StoreSubscriptionsRequest(_message.Message):
    __slots__ = ("table", "users", "names", "wheres", "at", "ttl_us", "since")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    WHERES_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    TTL_US_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    table: str
    users: _containers.RepeatedScalarFieldContainer[str]
    names: _containers.RepeatedScalarFieldContainer[str]
    wheres: _containers.RepeatedCompositeFieldContainer[Asked]
    at: _containers.RepeatedScalarFieldContainer[int]
    ttl_us: int
    since: int
    def __init__(self, table: _Optional[str] = ..., users: _Optional[_Iterable[str]] = ..., names: _Optional[_Iterable[str]] = ..., wheres: _Optional[_Iterable[_Union[Asked, _Mapping]]] = ..., at: _Optional[_Iterable[int]] = ..., ttl_us: _Optional[int] = ..., since: _Optional[int] = ...) -> None: ...

class StoreSubscriptionsResponse(_message.Message):
    __slots__ = ("commit_ts",)
    COMMIT_TS_FIELD_NUMBER: _ClassVar[int]
    commit_ts: int
    def __init__(self, commit_ts: _Optional[int] = ...) -> None: ...

class ReachedRequest(_message.Message):
    __slots__ = ("table", "ts", "since")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    TS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    table: str
    ts: int
    since: int
    def __init__(self, table: _Optional[str] = ..., ts: _Optional[int] = ..., since: _Optional[int] = ...) -> None: ...

class ReachedResponse(_message.Message):
    __slots__ = ("counts",)
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, counts: _Optional[_Iterable[int]] = ...) -> None: ...

class SubscribersRequest(_message.Message):
    __slots__ = ("table", "ts", "place", "limit")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    TS_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    table: str
    ts: int
    place: int
    limit: int
    def __init__(self, table: _Optional[str] = ..., ts: _Optional[int] = ..., place: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class SubscribersResponse(_message.Message):
    __slots__ = ("users", "names")
    USERS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    users: _containers.RepeatedScalarFieldContainer[str]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, users: _Optional[_Iterable[str]] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...
