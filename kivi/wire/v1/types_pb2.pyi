from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Value(_message.Message):
    __slots__ = ("bool_value", "int_value", "float_value", "string_value", "bytes_value", "string_body", "bytes_body")
    BOOL_VALUE_FIELD_NUMBER: _ClassVar[int]
    INT_VALUE_FIELD_NUMBER: _ClassVar[int]
    FLOAT_VALUE_FIELD_NUMBER: _ClassVar[int]
    STRING_VALUE_FIELD_NUMBER: _ClassVar[int]
    BYTES_VALUE_FIELD_NUMBER: _ClassVar[int]
    STRING_BODY_FIELD_NUMBER: _ClassVar[int]
    BYTES_BODY_FIELD_NUMBER: _ClassVar[int]
    bool_value: bool
    int_value: int
    float_value: float
    string_value: str
    bytes_value: bytes
    string_body: int
    bytes_body: int
    def __init__(self, bool_value: _Optional[bool] = ..., int_value: _Optional[int] = ..., float_value: _Optional[float] = ..., string_value: _Optional[str] = ..., bytes_value: _Optional[bytes] = ..., string_body: _Optional[int] = ..., bytes_body: _Optional[int] = ...) -> None: ...

class Key(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class ColumnValues(_message.Message):
    __slots__ = ("bools", "ints", "floats", "strings", "blobs", "nulls")
    BOOLS_FIELD_NUMBER: _ClassVar[int]
    INTS_FIELD_NUMBER: _ClassVar[int]
    FLOATS_FIELD_NUMBER: _ClassVar[int]
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    NULLS_FIELD_NUMBER: _ClassVar[int]
    bools: _containers.RepeatedScalarFieldContainer[bool]
    ints: _containers.RepeatedScalarFieldContainer[int]
    floats: _containers.RepeatedScalarFieldContainer[float]
    strings: _containers.RepeatedScalarFieldContainer[str]
    blobs: _containers.RepeatedScalarFieldContainer[bytes]
    nulls: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, bools: _Optional[_Iterable[bool]] = ..., ints: _Optional[_Iterable[int]] = ..., floats: _Optional[_Iterable[float]] = ..., strings: _Optional[_Iterable[str]] = ..., blobs: _Optional[_Iterable[bytes]] = ..., nulls: _Optional[_Iterable[int]] = ...) -> None: ...

class Expr(_message.Message):
    __slots__ = ("op", "column", "values", "args", "type")
    class Op(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OP_UNSPECIFIED: _ClassVar[Expr.Op]
        OP_EQ: _ClassVar[Expr.Op]
        OP_NE: _ClassVar[Expr.Op]
        OP_LT: _ClassVar[Expr.Op]
        OP_LE: _ClassVar[Expr.Op]
        OP_GT: _ClassVar[Expr.Op]
        OP_GE: _ClassVar[Expr.Op]
        OP_IS_IN: _ClassVar[Expr.Op]
        OP_IS_NULL: _ClassVar[Expr.Op]
        OP_AND: _ClassVar[Expr.Op]
        OP_OR: _ClassVar[Expr.Op]
        OP_NOT: _ClassVar[Expr.Op]
        OP_COLUMN: _ClassVar[Expr.Op]
        OP_LITERAL: _ClassVar[Expr.Op]
        OP_ADD: _ClassVar[Expr.Op]
        OP_SUBTRACT: _ClassVar[Expr.Op]
        OP_MULTIPLY: _ClassVar[Expr.Op]
        OP_DIVIDE: _ClassVar[Expr.Op]
        OP_NEGATE: _ClassVar[Expr.Op]
        OP_COALESCE: _ClassVar[Expr.Op]
        OP_CASE: _ClassVar[Expr.Op]
        OP_STARTS_WITH: _ClassVar[Expr.Op]
        OP_CONTAINS: _ClassVar[Expr.Op]
        OP_MATCHES: _ClassVar[Expr.Op]
        OP_WITHIN_KM: _ClassVar[Expr.Op]
        OP_TIME_PART: _ClassVar[Expr.Op]
        OP_UNDER: _ClassVar[Expr.Op]
        OP_COVERS: _ClassVar[Expr.Op]
        OP_QUAD: _ClassVar[Expr.Op]
        OP_PREV: _ClassVar[Expr.Op]
        OP_NEXT: _ClassVar[Expr.Op]
    OP_UNSPECIFIED: Expr.Op
    OP_EQ: Expr.Op
    OP_NE: Expr.Op
    OP_LT: Expr.Op
    OP_LE: Expr.Op
    OP_GT: Expr.Op
    OP_GE: Expr.Op
    OP_IS_IN: Expr.Op
    OP_IS_NULL: Expr.Op
    OP_AND: Expr.Op
    OP_OR: Expr.Op
    OP_NOT: Expr.Op
    OP_COLUMN: Expr.Op
    OP_LITERAL: Expr.Op
    OP_ADD: Expr.Op
    OP_SUBTRACT: Expr.Op
    OP_MULTIPLY: Expr.Op
    OP_DIVIDE: Expr.Op
    OP_NEGATE: Expr.Op
    OP_COALESCE: Expr.Op
    OP_CASE: Expr.Op
    OP_STARTS_WITH: Expr.Op
    OP_CONTAINS: Expr.Op
    OP_MATCHES: Expr.Op
    OP_WITHIN_KM: Expr.Op
    OP_TIME_PART: Expr.Op
    OP_UNDER: Expr.Op
    OP_COVERS: Expr.Op
    OP_QUAD: Expr.Op
    OP_PREV: Expr.Op
    OP_NEXT: Expr.Op
    OP_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    op: Expr.Op
    column: str
    values: _containers.RepeatedCompositeFieldContainer[Value]
    args: _containers.RepeatedCompositeFieldContainer[Expr]
    type: str
    def __init__(self, op: _Optional[_Union[Expr.Op, str]] = ..., column: _Optional[str] = ..., values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., args: _Optional[_Iterable[_Union[Expr, _Mapping]]] = ..., type: _Optional[str] = ...) -> None: ...

class ScanSpec(_message.Message):
    __slots__ = ("table", "table_id", "prefix", "start", "end", "where", "columns", "limit", "reverse", "measures", "changes", "known_columns", "rollup", "question", "order_by", "offset", "any_order", "shards", "match")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    REVERSE_FIELD_NUMBER: _ClassVar[int]
    MEASURES_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    KNOWN_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ROLLUP_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    ORDER_BY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ANY_ORDER_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    table: str
    table_id: int
    prefix: Key
    start: Key
    end: Key
    where: Expr
    columns: _containers.RepeatedScalarFieldContainer[str]
    limit: int
    reverse: bool
    measures: _containers.RepeatedCompositeFieldContainer[Measure]
    changes: Changes
    known_columns: int
    rollup: Rollup
    question: Question
    order_by: _containers.RepeatedScalarFieldContainer[str]
    offset: int
    any_order: bool
    shards: int
    match: Match
    def __init__(self, table: _Optional[str] = ..., table_id: _Optional[int] = ..., prefix: _Optional[_Union[Key, _Mapping]] = ..., start: _Optional[_Union[Key, _Mapping]] = ..., end: _Optional[_Union[Key, _Mapping]] = ..., where: _Optional[_Union[Expr, _Mapping]] = ..., columns: _Optional[_Iterable[str]] = ..., limit: _Optional[int] = ..., reverse: _Optional[bool] = ..., measures: _Optional[_Iterable[_Union[Measure, _Mapping]]] = ..., changes: _Optional[_Union[Changes, _Mapping]] = ..., known_columns: _Optional[int] = ..., rollup: _Optional[_Union[Rollup, _Mapping]] = ..., question: _Optional[_Union[Question, _Mapping]] = ..., order_by: _Optional[_Iterable[str]] = ..., offset: _Optional[int] = ..., any_order: _Optional[bool] = ..., shards: _Optional[int] = ..., match: _Optional[_Union[Match, _Mapping]] = ...) -> None: ...

class Match(_message.Message):
    __slots__ = ("pattern", "partition_by", "within_us", "definitions", "measures", "skip", "start_us", "end_us")
    class Definition(_message.Message):
        __slots__ = ("symbol", "condition")
        SYMBOL_FIELD_NUMBER: _ClassVar[int]
        CONDITION_FIELD_NUMBER: _ClassVar[int]
        symbol: str
        condition: Expr
        def __init__(self, symbol: _Optional[str] = ..., condition: _Optional[_Union[Expr, _Mapping]] = ...) -> None: ...
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    PARTITION_BY_FIELD_NUMBER: _ClassVar[int]
    WITHIN_US_FIELD_NUMBER: _ClassVar[int]
    DEFINITIONS_FIELD_NUMBER: _ClassVar[int]
    MEASURES_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    START_US_FIELD_NUMBER: _ClassVar[int]
    END_US_FIELD_NUMBER: _ClassVar[int]
    pattern: str
    partition_by: _containers.RepeatedScalarFieldContainer[str]
    within_us: int
    definitions: _containers.RepeatedCompositeFieldContainer[Match.Definition]
    measures: _containers.RepeatedCompositeFieldContainer[Measure]
    skip: str
    start_us: int
    end_us: int
    def __init__(self, pattern: _Optional[str] = ..., partition_by: _Optional[_Iterable[str]] = ..., within_us: _Optional[int] = ..., definitions: _Optional[_Iterable[_Union[Match.Definition, _Mapping]]] = ..., measures: _Optional[_Iterable[_Union[Measure, _Mapping]]] = ..., skip: _Optional[str] = ..., start_us: _Optional[int] = ..., end_us: _Optional[int] = ...) -> None: ...

class Question(_message.Message):
    __slots__ = ("groups", "measures", "derived", "start_us", "end_us", "having", "order_by", "offset", "columns", "windows")
    class Group(_message.Message):
        __slots__ = ("name", "source", "slot", "tz", "expression")
        NAME_FIELD_NUMBER: _ClassVar[int]
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        SLOT_FIELD_NUMBER: _ClassVar[int]
        TZ_FIELD_NUMBER: _ClassVar[int]
        EXPRESSION_FIELD_NUMBER: _ClassVar[int]
        name: str
        source: str
        slot: str
        tz: str
        expression: Expr
        def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., slot: _Optional[str] = ..., tz: _Optional[str] = ..., expression: _Optional[_Union[Expr, _Mapping]] = ...) -> None: ...
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    MEASURES_FIELD_NUMBER: _ClassVar[int]
    DERIVED_FIELD_NUMBER: _ClassVar[int]
    START_US_FIELD_NUMBER: _ClassVar[int]
    END_US_FIELD_NUMBER: _ClassVar[int]
    HAVING_FIELD_NUMBER: _ClassVar[int]
    ORDER_BY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[Question.Group]
    measures: _containers.RepeatedCompositeFieldContainer[Measure]
    derived: _containers.RepeatedCompositeFieldContainer[Derived]
    start_us: int
    end_us: int
    having: Expr
    order_by: _containers.RepeatedScalarFieldContainer[str]
    offset: int
    columns: _containers.RepeatedScalarFieldContainer[str]
    windows: Windows
    def __init__(self, groups: _Optional[_Iterable[_Union[Question.Group, _Mapping]]] = ..., measures: _Optional[_Iterable[_Union[Measure, _Mapping]]] = ..., derived: _Optional[_Iterable[_Union[Derived, _Mapping]]] = ..., start_us: _Optional[int] = ..., end_us: _Optional[int] = ..., having: _Optional[_Union[Expr, _Mapping]] = ..., order_by: _Optional[_Iterable[str]] = ..., offset: _Optional[int] = ..., columns: _Optional[_Iterable[str]] = ..., windows: _Optional[_Union[Windows, _Mapping]] = ...) -> None: ...

class Windows(_message.Message):
    __slots__ = ("size", "tz", "slide_us", "session_us")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    TZ_FIELD_NUMBER: _ClassVar[int]
    SLIDE_US_FIELD_NUMBER: _ClassVar[int]
    SESSION_US_FIELD_NUMBER: _ClassVar[int]
    size: str
    tz: str
    slide_us: int
    session_us: int
    def __init__(self, size: _Optional[str] = ..., tz: _Optional[str] = ..., slide_us: _Optional[int] = ..., session_us: _Optional[int] = ...) -> None: ...

class Rollup(_message.Message):
    __slots__ = ("by", "step", "tz", "start_us", "end_us", "last_us", "measures")
    BY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TZ_FIELD_NUMBER: _ClassVar[int]
    START_US_FIELD_NUMBER: _ClassVar[int]
    END_US_FIELD_NUMBER: _ClassVar[int]
    LAST_US_FIELD_NUMBER: _ClassVar[int]
    MEASURES_FIELD_NUMBER: _ClassVar[int]
    by: _containers.RepeatedScalarFieldContainer[str]
    step: str
    tz: str
    start_us: int
    end_us: int
    last_us: int
    measures: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, by: _Optional[_Iterable[str]] = ..., step: _Optional[str] = ..., tz: _Optional[str] = ..., start_us: _Optional[int] = ..., end_us: _Optional[int] = ..., last_us: _Optional[int] = ..., measures: _Optional[_Iterable[str]] = ...) -> None: ...

class Changes(_message.Message):
    __slots__ = ("since", "commit_ts", "skip", "take", "remembered_at", "partial", "removed", "retractions")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_TS_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    TAKE_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_AT_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    RETRACTIONS_FIELD_NUMBER: _ClassVar[int]
    since: int
    commit_ts: bool
    skip: int
    take: int
    remembered_at: int
    partial: bool
    removed: bool
    retractions: str
    def __init__(self, since: _Optional[int] = ..., commit_ts: _Optional[bool] = ..., skip: _Optional[int] = ..., take: _Optional[int] = ..., remembered_at: _Optional[int] = ..., partial: _Optional[bool] = ..., removed: _Optional[bool] = ..., retractions: _Optional[str] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "reason", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    reason: str
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., reason: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Column(_message.Message):
    __slots__ = ("name", "type", "operator", "state")
    class Operator(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OPERATOR_UNSPECIFIED: _ClassVar[Column.Operator]
        OPERATOR_SUM: _ClassVar[Column.Operator]
        OPERATOR_MIN: _ClassVar[Column.Operator]
        OPERATOR_MAX: _ClassVar[Column.Operator]
    OPERATOR_UNSPECIFIED: Column.Operator
    OPERATOR_SUM: Column.Operator
    OPERATOR_MIN: Column.Operator
    OPERATOR_MAX: Column.Operator
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: str
    operator: Column.Operator
    state: str
    def __init__(self, name: _Optional[str] = ..., type: _Optional[str] = ..., operator: _Optional[_Union[Column.Operator, str]] = ..., state: _Optional[str] = ...) -> None: ...

class GroupKey(_message.Message):
    __slots__ = ("name", "source", "slot_us", "width", "tz")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SLOT_US_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    TZ_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    slot_us: int
    width: str
    tz: str
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., slot_us: _Optional[int] = ..., width: _Optional[str] = ..., tz: _Optional[str] = ...) -> None: ...

class Measure(_message.Message):
    __slots__ = ("name", "kind", "source", "operator", "expression", "where", "options")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Measure.Kind]
        KIND_SUM: _ClassVar[Measure.Kind]
        KIND_COUNT: _ClassVar[Measure.Kind]
        KIND_MIN: _ClassVar[Measure.Kind]
        KIND_MAX: _ClassVar[Measure.Kind]
        KIND_OTHER: _ClassVar[Measure.Kind]
    KIND_UNSPECIFIED: Measure.Kind
    KIND_SUM: Measure.Kind
    KIND_COUNT: Measure.Kind
    KIND_MIN: Measure.Kind
    KIND_MAX: Measure.Kind
    KIND_OTHER: Measure.Kind
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    EXPRESSION_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: Measure.Kind
    source: str
    operator: str
    expression: str
    where: str
    options: str
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[Measure.Kind, str]] = ..., source: _Optional[str] = ..., operator: _Optional[str] = ..., expression: _Optional[str] = ..., where: _Optional[str] = ..., options: _Optional[str] = ...) -> None: ...

class Alteration(_message.Message):
    __slots__ = ("columns", "derived", "commit_ts", "only_later", "event_time_us")
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    DERIVED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_TS_FIELD_NUMBER: _ClassVar[int]
    ONLY_LATER_FIELD_NUMBER: _ClassVar[int]
    EVENT_TIME_US_FIELD_NUMBER: _ClassVar[int]
    columns: int
    derived: int
    commit_ts: int
    only_later: bool
    event_time_us: int
    def __init__(self, columns: _Optional[int] = ..., derived: _Optional[int] = ..., commit_ts: _Optional[int] = ..., only_later: _Optional[bool] = ..., event_time_us: _Optional[int] = ...) -> None: ...

class Derived(_message.Message):
    __slots__ = ("name", "expression")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPRESSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    expression: str
    def __init__(self, name: _Optional[str] = ..., expression: _Optional[str] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("name", "kind", "id", "state", "created_ts", "key", "columns", "history_us", "event_time", "retention_us", "source", "source_id", "group_by", "measures", "derived", "complete_since_us", "declared_source", "alterations", "unique", "local_us", "cold", "index", "expires", "shard_by", "role")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Table.Kind]
        KIND_ROW: _ClassVar[Table.Kind]
        KIND_EVENT: _ClassVar[Table.Kind]
        KIND_AGGREGATE: _ClassVar[Table.Kind]
        KIND_VIEW: _ClassVar[Table.Kind]
    KIND_UNSPECIFIED: Table.Kind
    KIND_ROW: Table.Kind
    KIND_EVENT: Table.Kind
    KIND_AGGREGATE: Table.Kind
    KIND_VIEW: Table.Kind
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Table.State]
        STATE_READY: _ClassVar[Table.State]
        STATE_BUILDING: _ClassVar[Table.State]
    STATE_UNSPECIFIED: Table.State
    STATE_READY: Table.State
    STATE_BUILDING: Table.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CREATED_TS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_US_FIELD_NUMBER: _ClassVar[int]
    EVENT_TIME_FIELD_NUMBER: _ClassVar[int]
    RETENTION_US_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_FIELD_NUMBER: _ClassVar[int]
    MEASURES_FIELD_NUMBER: _ClassVar[int]
    DERIVED_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_SINCE_US_FIELD_NUMBER: _ClassVar[int]
    DECLARED_SOURCE_FIELD_NUMBER: _ClassVar[int]
    ALTERATIONS_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_US_FIELD_NUMBER: _ClassVar[int]
    COLD_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    SHARD_BY_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: Table.Kind
    id: int
    state: Table.State
    created_ts: int
    key: _containers.RepeatedCompositeFieldContainer[Column]
    columns: _containers.RepeatedCompositeFieldContainer[Column]
    history_us: int
    event_time: str
    retention_us: int
    source: str
    source_id: int
    group_by: _containers.RepeatedCompositeFieldContainer[GroupKey]
    measures: _containers.RepeatedCompositeFieldContainer[Measure]
    derived: _containers.RepeatedCompositeFieldContainer[Derived]
    complete_since_us: int
    declared_source: str
    alterations: _containers.RepeatedCompositeFieldContainer[Alteration]
    unique: bool
    local_us: int
    cold: str
    index: _containers.RepeatedScalarFieldContainer[str]
    expires: str
    shard_by: _containers.RepeatedScalarFieldContainer[str]
    role: str
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[Table.Kind, str]] = ..., id: _Optional[int] = ..., state: _Optional[_Union[Table.State, str]] = ..., created_ts: _Optional[int] = ..., key: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., history_us: _Optional[int] = ..., event_time: _Optional[str] = ..., retention_us: _Optional[int] = ..., source: _Optional[str] = ..., source_id: _Optional[int] = ..., group_by: _Optional[_Iterable[_Union[GroupKey, _Mapping]]] = ..., measures: _Optional[_Iterable[_Union[Measure, _Mapping]]] = ..., derived: _Optional[_Iterable[_Union[Derived, _Mapping]]] = ..., complete_since_us: _Optional[int] = ..., declared_source: _Optional[str] = ..., alterations: _Optional[_Iterable[_Union[Alteration, _Mapping]]] = ..., unique: _Optional[bool] = ..., local_us: _Optional[int] = ..., cold: _Optional[str] = ..., index: _Optional[_Iterable[str]] = ..., expires: _Optional[str] = ..., shard_by: _Optional[_Iterable[str]] = ..., role: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("message_bytes_max", "key_bytes_max", "value_bytes_max", "transaction_operations_max", "batch_rows_max", "batch_bytes_max", "session_transactions_max", "session_scans_max", "session_requests_max", "get_keys_max", "frame_requests_max", "commit_each_max", "commit_each_bytes_max", "commit_each_operations_max", "header_bytes_max")
    MESSAGE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    VALUE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    TRANSACTION_OPERATIONS_MAX_FIELD_NUMBER: _ClassVar[int]
    BATCH_ROWS_MAX_FIELD_NUMBER: _ClassVar[int]
    BATCH_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    SESSION_TRANSACTIONS_MAX_FIELD_NUMBER: _ClassVar[int]
    SESSION_SCANS_MAX_FIELD_NUMBER: _ClassVar[int]
    SESSION_REQUESTS_MAX_FIELD_NUMBER: _ClassVar[int]
    GET_KEYS_MAX_FIELD_NUMBER: _ClassVar[int]
    FRAME_REQUESTS_MAX_FIELD_NUMBER: _ClassVar[int]
    COMMIT_EACH_MAX_FIELD_NUMBER: _ClassVar[int]
    COMMIT_EACH_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    COMMIT_EACH_OPERATIONS_MAX_FIELD_NUMBER: _ClassVar[int]
    HEADER_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    message_bytes_max: int
    key_bytes_max: int
    value_bytes_max: int
    transaction_operations_max: int
    batch_rows_max: int
    batch_bytes_max: int
    session_transactions_max: int
    session_scans_max: int
    session_requests_max: int
    get_keys_max: int
    frame_requests_max: int
    commit_each_max: int
    commit_each_bytes_max: int
    commit_each_operations_max: int
    header_bytes_max: int
    def __init__(self, message_bytes_max: _Optional[int] = ..., key_bytes_max: _Optional[int] = ..., value_bytes_max: _Optional[int] = ..., transaction_operations_max: _Optional[int] = ..., batch_rows_max: _Optional[int] = ..., batch_bytes_max: _Optional[int] = ..., session_transactions_max: _Optional[int] = ..., session_scans_max: _Optional[int] = ..., session_requests_max: _Optional[int] = ..., get_keys_max: _Optional[int] = ..., frame_requests_max: _Optional[int] = ..., commit_each_max: _Optional[int] = ..., commit_each_bytes_max: _Optional[int] = ..., commit_each_operations_max: _Optional[int] = ..., header_bytes_max: _Optional[int] = ...) -> None: ...
