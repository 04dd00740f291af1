from kivi.wire.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateAlertRequest(_message.Message):
    __slots__ = ("name", "on", "where", "for_us", "lateness_us", "notify")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ON_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    FOR_US_FIELD_NUMBER: _ClassVar[int]
    LATENESS_US_FIELD_NUMBER: _ClassVar[int]
    NOTIFY_FIELD_NUMBER: _ClassVar[int]
    name: str
    on: str
    where: _types_pb2.Expr
    for_us: int
    lateness_us: int
    notify: Notify
    def __init__(self, name: _Optional[str] = ..., on: _Optional[str] = ..., where: _Optional[_Union[_types_pb2.Expr, _Mapping]] = ..., for_us: _Optional[int] = ..., lateness_us: _Optional[int] = ..., notify: _Optional[_Union[Notify, _Mapping]] = ...) -> None: ...

class Notify(_message.Message):
    __slots__ = ("url", "secret", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    URL_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    url: str
    secret: str
    labels: _containers.ScalarMap[str, str]
    def __init__(self, url: _Optional[str] = ..., secret: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CreateAlertResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAlertsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NamedValue(_message.Message):
    __slots__ = ("name", "type", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: str
    value: _types_pb2.Value
    def __init__(self, name: _Optional[str] = ..., type: _Optional[str] = ..., value: _Optional[_Union[_types_pb2.Value, _Mapping]] = ...) -> None: ...

class AlertStatus(_message.Message):
    __slots__ = ("name", "on", "notify", "is_instance", "key", "state", "since_us", "value", "changed_us", "silenced_us", "error")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ON_FIELD_NUMBER: _ClassVar[int]
    NOTIFY_FIELD_NUMBER: _ClassVar[int]
    IS_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SINCE_US_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    CHANGED_US_FIELD_NUMBER: _ClassVar[int]
    SILENCED_US_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    name: str
    on: str
    notify: str
    is_instance: bool
    key: _containers.RepeatedCompositeFieldContainer[NamedValue]
    state: str
    since_us: int
    value: _containers.RepeatedCompositeFieldContainer[NamedValue]
    changed_us: int
    silenced_us: int
    error: str
    def __init__(self, name: _Optional[str] = ..., on: _Optional[str] = ..., notify: _Optional[str] = ..., is_instance: _Optional[bool] = ..., key: _Optional[_Iterable[_Union[NamedValue, _Mapping]]] = ..., state: _Optional[str] = ..., since_us: _Optional[int] = ..., value: _Optional[_Iterable[_Union[NamedValue, _Mapping]]] = ..., changed_us: _Optional[int] = ..., silenced_us: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class ListAlertsResponse(_message.Message):
    __slots__ = ("alerts",)
    ALERTS_FIELD_NUMBER: _ClassVar[int]
    alerts: _containers.RepeatedCompositeFieldContainer[AlertStatus]
    def __init__(self, alerts: _Optional[_Iterable[_Union[AlertStatus, _Mapping]]] = ...) -> None: ...

class SilenceAlertRequest(_message.Message):
    __slots__ = ("name", "until_us")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UNTIL_US_FIELD_NUMBER: _ClassVar[int]
    name: str
    until_us: int
    def __init__(self, name: _Optional[str] = ..., until_us: _Optional[int] = ...) -> None: ...

class SilenceAlertResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropAlertRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DropAlertResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
