from kivi.wire.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClientFrame(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[Request]
    def __init__(self, requests: _Optional[_Iterable[_Union[Request, _Mapping]]] = ...) -> None: ...

class ServerFrame(_message.Message):
    __slots__ = ("hello", "responses")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    responses: _containers.RepeatedCompositeFieldContainer[Response]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., responses: _Optional[_Iterable[_Union[Response, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "limits", "instance")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    version: str
    limits: _types_pb2.Limits
    instance: str
    def __init__(self, version: _Optional[str] = ..., limits: _Optional[_Union[_types_pb2.Limits, _Mapping]] = ..., instance: _Optional[str] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "txn", "operations", "timeout_ms", "first", "body_bytes", "begin", "get", "scan_open", "scan_next", "apply", "commit", "release", "renew", "outcome", "commit_each", "retract", "sql", "define")
    ID_FIELD_NUMBER: _ClassVar[int]
    TXN_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    GET_FIELD_NUMBER: _ClassVar[int]
    SCAN_OPEN_FIELD_NUMBER: _ClassVar[int]
    SCAN_NEXT_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    COMMIT_EACH_FIELD_NUMBER: _ClassVar[int]
    RETRACT_FIELD_NUMBER: _ClassVar[int]
    SQL_FIELD_NUMBER: _ClassVar[int]
    DEFINE_FIELD_NUMBER: _ClassVar[int]
    id: int
    txn: int
    operations: _containers.RepeatedCompositeFieldContainer[Operation]
    timeout_ms: int
    first: Begin
    body_bytes: int
    begin: Begin
    get: Get
    scan_open: ScanOpen
    scan_next: ScanNext
    apply: Apply
    commit: Commit
    release: Release
    renew: Renew
    outcome: Outcome
    commit_each: CommitEach
    retract: Retract
    sql: Sql
    define: Define
    def __init__(self, id: _Optional[int] = ..., txn: _Optional[int] = ..., operations: _Optional[_Iterable[_Union[Operation, _Mapping]]] = ..., timeout_ms: _Optional[int] = ..., first: _Optional[_Union[Begin, _Mapping]] = ..., body_bytes: _Optional[int] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., get: _Optional[_Union[Get, _Mapping]] = ..., scan_open: _Optional[_Union[ScanOpen, _Mapping]] = ..., scan_next: _Optional[_Union[ScanNext, _Mapping]] = ..., apply: _Optional[_Union[Apply, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., commit_each: _Optional[_Union[CommitEach, _Mapping]] = ..., retract: _Optional[_Union[Retract, _Mapping]] = ..., sql: _Optional[_Union[Sql, _Mapping]] = ..., define: _Optional[_Union[Define, _Mapping]] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("kind", "table", "table_id", "key", "columns", "values", "arrow_bytes", "stages", "drop_late", "insert")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Operation.Kind]
        KIND_PUT: _ClassVar[Operation.Kind]
        KIND_DELTA: _ClassVar[Operation.Kind]
        KIND_INSERT: _ClassVar[Operation.Kind]
        KIND_DELETE: _ClassVar[Operation.Kind]
        KIND_GUARD: _ClassVar[Operation.Kind]
        KIND_APPEND: _ClassVar[Operation.Kind]
        KIND_APPEND_STAGES: _ClassVar[Operation.Kind]
        KIND_OVERWRITE: _ClassVar[Operation.Kind]
        KIND_APPEND_EACH: _ClassVar[Operation.Kind]
        KIND_WRITE: _ClassVar[Operation.Kind]
    KIND_UNSPECIFIED: Operation.Kind
    KIND_PUT: Operation.Kind
    KIND_DELTA: Operation.Kind
    KIND_INSERT: Operation.Kind
    KIND_DELETE: Operation.Kind
    KIND_GUARD: Operation.Kind
    KIND_APPEND: Operation.Kind
    KIND_APPEND_STAGES: Operation.Kind
    KIND_OVERWRITE: Operation.Kind
    KIND_APPEND_EACH: Operation.Kind
    KIND_WRITE: Operation.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    ARROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    DROP_LATE_FIELD_NUMBER: _ClassVar[int]
    INSERT_FIELD_NUMBER: _ClassVar[int]
    kind: Operation.Kind
    table: str
    table_id: int
    key: _containers.RepeatedCompositeFieldContainer[_types_pb2.Value]
    columns: _containers.RepeatedScalarFieldContainer[str]
    values: _containers.RepeatedCompositeFieldContainer[_types_pb2.Value]
    arrow_bytes: int
    stages: _containers.RepeatedScalarFieldContainer[bytes]
    drop_late: bool
    insert: bool
    def __init__(self, kind: _Optional[_Union[Operation.Kind, str]] = ..., table: _Optional[str] = ..., table_id: _Optional[int] = ..., key: _Optional[_Iterable[_Union[_types_pb2.Value, _Mapping]]] = ..., columns: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[_Union[_types_pb2.Value, _Mapping]]] = ..., arrow_bytes: _Optional[int] = ..., stages: _Optional[_Iterable[bytes]] = ..., drop_late: _Optional[bool] = ..., insert: _Optional[bool] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("as_of_ts", "as_of_us", "min_snapshot", "ttl_ms", "shared", "lease", "max_staleness_us", "fresh", "deferred")
    AS_OF_TS_FIELD_NUMBER: _ClassVar[int]
    AS_OF_US_FIELD_NUMBER: _ClassVar[int]
    MIN_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_US_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_FIELD_NUMBER: _ClassVar[int]
    as_of_ts: int
    as_of_us: int
    min_snapshot: int
    ttl_ms: int
    shared: bool
    lease: bytes
    max_staleness_us: int
    fresh: bool
    deferred: bool
    def __init__(self, as_of_ts: _Optional[int] = ..., as_of_us: _Optional[int] = ..., min_snapshot: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., shared: _Optional[bool] = ..., lease: _Optional[bytes] = ..., max_staleness_us: _Optional[int] = ..., fresh: _Optional[bool] = ..., deferred: _Optional[bool] = ...) -> None: ...

class Get(_message.Message):
    __slots__ = ("table", "table_id", "keys", "columns", "known_columns")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    table: str
    table_id: int
    keys: _containers.RepeatedCompositeFieldContainer[_types_pb2.Key]
    columns: _containers.RepeatedScalarFieldContainer[str]
    known_columns: int
    def __init__(self, table: _Optional[str] = ..., table_id: _Optional[int] = ..., keys: _Optional[_Iterable[_Union[_types_pb2.Key, _Mapping]]] = ..., columns: _Optional[_Iterable[str]] = ..., known_columns: _Optional[int] = ...) -> None: ...

class ScanOpen(_message.Message):
    __slots__ = ("spec", "page_rows", "rows", "row_groups")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PAGE_ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROW_GROUPS_FIELD_NUMBER: _ClassVar[int]
    spec: _types_pb2.ScanSpec
    page_rows: int
    rows: bool
    row_groups: bool
    def __init__(self, spec: _Optional[_Union[_types_pb2.ScanSpec, _Mapping]] = ..., page_rows: _Optional[int] = ..., rows: _Optional[bool] = ..., row_groups: _Optional[bool] = ...) -> None: ...

class Retract(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: _types_pb2.ScanSpec
    def __init__(self, spec: _Optional[_Union[_types_pb2.ScanSpec, _Mapping]] = ...) -> None: ...

class Sql(_message.Message):
    __slots__ = ("text", "parameters")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    text: str
    parameters: bytes
    def __init__(self, text: _Optional[str] = ..., parameters: _Optional[bytes] = ...) -> None: ...

class Define(_message.Message):
    __slots__ = ("table", "table_id")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    table: str
    table_id: int
    def __init__(self, table: _Optional[str] = ..., table_id: _Optional[int] = ...) -> None: ...

class ScanNext(_message.Message):
    __slots__ = ("scan", "close")
    SCAN_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    scan: int
    close: bool
    def __init__(self, scan: _Optional[int] = ..., close: _Optional[bool] = ...) -> None: ...

class Apply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Commit(_message.Message):
    __slots__ = ("token", "batch")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    token: str
    batch: BatchToken
    def __init__(self, token: _Optional[str] = ..., batch: _Optional[_Union[BatchToken, _Mapping]] = ...) -> None: ...

class CommitEach(_message.Message):
    __slots__ = ("writes", "does", "tokens", "ids")
    WRITES_FIELD_NUMBER: _ClassVar[int]
    DOES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    writes: _containers.RepeatedScalarFieldContainer[bytes]
    does: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[str]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, writes: _Optional[_Iterable[bytes]] = ..., does: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[str]] = ..., ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Writes(_message.Message):
    __slots__ = ("operations",)
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    operations: _containers.RepeatedCompositeFieldContainer[Operation]
    def __init__(self, operations: _Optional[_Iterable[_Union[Operation, _Mapping]]] = ...) -> None: ...

class BatchToken(_message.Message):
    __slots__ = ("scope", "sequence")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    scope: str
    sequence: int
    def __init__(self, scope: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("txns", "leases")
    TXNS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    txns: _containers.RepeatedScalarFieldContainer[int]
    leases: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, txns: _Optional[_Iterable[int]] = ..., leases: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("ttl_ms",)
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ttl_ms: int
    def __init__(self, ttl_ms: _Optional[int] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("token", "place")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    token: str
    place: int
    def __init__(self, token: _Optional[str] = ..., place: _Optional[int] = ...) -> None: ...

class Response(_message.Message):
    __slots__ = ("id", "start_ts", "error", "begin", "get", "page", "commit", "outcome", "commit_each", "retract", "table", "body_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    START_TS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    GET_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    COMMIT_EACH_FIELD_NUMBER: _ClassVar[int]
    RETRACT_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: int
    start_ts: int
    error: _types_pb2.Error
    begin: BeginReply
    get: GetReply
    page: ScanPage
    commit: CommitReply
    outcome: OutcomeReply
    commit_each: CommitEachReply
    retract: RetractReply
    table: _types_pb2.Table
    body_bytes: int
    def __init__(self, id: _Optional[int] = ..., start_ts: _Optional[int] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., begin: _Optional[_Union[BeginReply, _Mapping]] = ..., get: _Optional[_Union[GetReply, _Mapping]] = ..., page: _Optional[_Union[ScanPage, _Mapping]] = ..., commit: _Optional[_Union[CommitReply, _Mapping]] = ..., outcome: _Optional[_Union[OutcomeReply, _Mapping]] = ..., commit_each: _Optional[_Union[CommitEachReply, _Mapping]] = ..., retract: _Optional[_Union[RetractReply, _Mapping]] = ..., table: _Optional[_Union[_types_pb2.Table, _Mapping]] = ..., body_bytes: _Optional[int] = ...) -> None: ...

class BeginReply(_message.Message):
    __slots__ = ("lease", "ids")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease: _Optional[bytes] = ..., ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetReply(_message.Message):
    __slots__ = ("ids", "start_ts", "counts", "keys", "missing", "columns")
    IDS_FIELD_NUMBER: _ClassVar[int]
    START_TS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    start_ts: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    keys: int
    missing: _containers.RepeatedScalarFieldContainer[int]
    columns: _containers.RepeatedCompositeFieldContainer[_types_pb2.ColumnValues]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., start_ts: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., keys: _Optional[int] = ..., missing: _Optional[_Iterable[int]] = ..., columns: _Optional[_Iterable[_Union[_types_pb2.ColumnValues, _Mapping]]] = ...) -> None: ...

class ScanPage(_message.Message):
    __slots__ = ("scan", "rows_in_columns", "columns", "explanation", "complete_since_us", "row_groups", "shards")
    SCAN_FIELD_NUMBER: _ClassVar[int]
    ROWS_IN_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_SINCE_US_FIELD_NUMBER: _ClassVar[int]
    ROW_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    scan: int
    rows_in_columns: int
    columns: _containers.RepeatedCompositeFieldContainer[_types_pb2.ColumnValues]
    explanation: str
    complete_since_us: int
    row_groups: _containers.RepeatedCompositeFieldContainer[RowGroup]
    shards: int
    def __init__(self, scan: _Optional[int] = ..., rows_in_columns: _Optional[int] = ..., columns: _Optional[_Iterable[_Union[_types_pb2.ColumnValues, _Mapping]]] = ..., explanation: _Optional[str] = ..., complete_since_us: _Optional[int] = ..., row_groups: _Optional[_Iterable[_Union[RowGroup, _Mapping]]] = ..., shards: _Optional[int] = ...) -> None: ...

class RowGroup(_message.Message):
    __slots__ = ("name", "file_bytes", "footer_bytes", "index", "rows", "columns", "chunk_offsets", "chunk_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FOOTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    file_bytes: int
    footer_bytes: int
    index: int
    rows: int
    columns: _containers.RepeatedScalarFieldContainer[int]
    chunk_offsets: _containers.RepeatedScalarFieldContainer[int]
    chunk_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., file_bytes: _Optional[int] = ..., footer_bytes: _Optional[int] = ..., index: _Optional[int] = ..., rows: _Optional[int] = ..., columns: _Optional[_Iterable[int]] = ..., chunk_offsets: _Optional[_Iterable[int]] = ..., chunk_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class RetractReply(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: int
    def __init__(self, events: _Optional[int] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("commit_ts",)
    COMMIT_TS_FIELD_NUMBER: _ClassVar[int]
    commit_ts: int
    def __init__(self, commit_ts: _Optional[int] = ...) -> None: ...

class CommitEachReply(_message.Message):
    __slots__ = ("ids", "commit_ts", "blind")
    IDS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_TS_FIELD_NUMBER: _ClassVar[int]
    BLIND_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    commit_ts: int
    blind: bool
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., commit_ts: _Optional[int] = ..., blind: _Optional[bool] = ...) -> None: ...

class OutcomeReply(_message.Message):
    __slots__ = ("state", "commit_ts")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[OutcomeReply.State]
        STATE_COMMITTED: _ClassVar[OutcomeReply.State]
        STATE_ABORTED: _ClassVar[OutcomeReply.State]
        STATE_UNKNOWN: _ClassVar[OutcomeReply.State]
    STATE_UNSPECIFIED: OutcomeReply.State
    STATE_COMMITTED: OutcomeReply.State
    STATE_ABORTED: OutcomeReply.State
    STATE_UNKNOWN: OutcomeReply.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_TS_FIELD_NUMBER: _ClassVar[int]
    state: OutcomeReply.State
    commit_ts: int
    def __init__(self, state: _Optional[_Union[OutcomeReply.State, str]] = ..., commit_ts: _Optional[int] = ...) -> None: ...
