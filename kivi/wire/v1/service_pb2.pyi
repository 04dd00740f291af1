from kivi.wire.v1 import alerts_pb2 as _alerts_pb2
from kivi.wire.v1 import topics_pb2 as _topics_pb2
from kivi.wire.v1 import session_pb2 as _session_pb2
from kivi.wire.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChangeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHANGE_KIND_UNSPECIFIED: _ClassVar[ChangeKind]
    CHANGE_KIND_ADD: _ClassVar[ChangeKind]
    CHANGE_KIND_REMOVE: _ClassVar[ChangeKind]
    CHANGE_KIND_MOVE: _ClassVar[ChangeKind]
    CHANGE_KIND_CHANGE: _ClassVar[ChangeKind]
CHANGE_KIND_UNSPECIFIED: ChangeKind
CHANGE_KIND_ADD: ChangeKind
CHANGE_KIND_REMOVE: ChangeKind
CHANGE_KIND_MOVE: ChangeKind
CHANGE_KIND_CHANGE: ChangeKind

class StageRequest(_message.Message):
    __slots__ = ("table", "table_id", "owner", "arrow")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ARROW_FIELD_NUMBER: _ClassVar[int]
    table: str
    table_id: int
    owner: str
    arrow: bytes
    def __init__(self, table: _Optional[str] = ..., table_id: _Optional[int] = ..., owner: _Optional[str] = ..., arrow: _Optional[bytes] = ...) -> None: ...

class StageResponse(_message.Message):
    __slots__ = ("stage",)
    STAGE_FIELD_NUMBER: _ClassVar[int]
    stage: bytes
    def __init__(self, stage: _Optional[bytes] = ...) -> None: ...

class DiscardStagesRequest(_message.Message):
    __slots__ = ("stages",)
    STAGES_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, stages: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DiscardStagesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListBatchScopesRequest(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    def __init__(self, prefix: _Optional[str] = ...) -> None: ...

class ListBatchScopesResponse(_message.Message):
    __slots__ = ("scopes",)
    SCOPES_FIELD_NUMBER: _ClassVar[int]
    scopes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, scopes: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateTableRequest(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: _types_pb2.Table
    def __init__(self, table: _Optional[_Union[_types_pb2.Table, _Mapping]] = ...) -> None: ...

class CreateTableResponse(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: _types_pb2.Table
    def __init__(self, table: _Optional[_Union[_types_pb2.Table, _Mapping]] = ...) -> None: ...

class CreateAggregateRequest(_message.Message):
    __slots__ = ("name", "source", "group_by", "measures", "derived", "history_us", "retention_us")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_FIELD_NUMBER: _ClassVar[int]
    MEASURES_FIELD_NUMBER: _ClassVar[int]
    DERIVED_FIELD_NUMBER: _ClassVar[int]
    HISTORY_US_FIELD_NUMBER: _ClassVar[int]
    RETENTION_US_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    group_by: _containers.RepeatedCompositeFieldContainer[_types_pb2.GroupKey]
    measures: _containers.RepeatedCompositeFieldContainer[_types_pb2.Measure]
    derived: _containers.RepeatedCompositeFieldContainer[_types_pb2.Derived]
    history_us: int
    retention_us: int
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., group_by: _Optional[_Iterable[_Union[_types_pb2.GroupKey, _Mapping]]] = ..., measures: _Optional[_Iterable[_Union[_types_pb2.Measure, _Mapping]]] = ..., derived: _Optional[_Iterable[_Union[_types_pb2.Derived, _Mapping]]] = ..., history_us: _Optional[int] = ..., retention_us: _Optional[int] = ...) -> None: ...

class CreateAggregateResponse(_message.Message):
    __slots__ = ("done_rows", "total_rows", "table")
    DONE_ROWS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_ROWS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    done_rows: int
    total_rows: int
    table: _types_pb2.Table
    def __init__(self, done_rows: _Optional[int] = ..., total_rows: _Optional[int] = ..., table: _Optional[_Union[_types_pb2.Table, _Mapping]] = ...) -> None: ...

class Level(_message.Message):
    __slots__ = ("columns",)
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    columns: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, columns: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateAggregatesRequest(_message.Message):
    __slots__ = ("name", "source", "levels", "slots", "measures", "derived", "history_us", "tz", "retention_us", "slot_retention_us")
    class SlotRetentionUsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    MEASURES_FIELD_NUMBER: _ClassVar[int]
    DERIVED_FIELD_NUMBER: _ClassVar[int]
    HISTORY_US_FIELD_NUMBER: _ClassVar[int]
    TZ_FIELD_NUMBER: _ClassVar[int]
    RETENTION_US_FIELD_NUMBER: _ClassVar[int]
    SLOT_RETENTION_US_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    levels: _containers.RepeatedCompositeFieldContainer[Level]
    slots: _containers.RepeatedScalarFieldContainer[str]
    measures: _containers.RepeatedCompositeFieldContainer[_types_pb2.Measure]
    derived: _containers.RepeatedCompositeFieldContainer[_types_pb2.Derived]
    history_us: int
    tz: str
    retention_us: int
    slot_retention_us: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., levels: _Optional[_Iterable[_Union[Level, _Mapping]]] = ..., slots: _Optional[_Iterable[str]] = ..., measures: _Optional[_Iterable[_Union[_types_pb2.Measure, _Mapping]]] = ..., derived: _Optional[_Iterable[_Union[_types_pb2.Derived, _Mapping]]] = ..., history_us: _Optional[int] = ..., tz: _Optional[str] = ..., retention_us: _Optional[int] = ..., slot_retention_us: _Optional[_Mapping[str, int]] = ...) -> None: ...

class CreateAggregatesResponse(_message.Message):
    __slots__ = ("done_rows", "total_rows", "tables")
    DONE_ROWS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_ROWS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    done_rows: int
    total_rows: int
    tables: _containers.RepeatedCompositeFieldContainer[_types_pb2.Table]
    def __init__(self, done_rows: _Optional[int] = ..., total_rows: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[_types_pb2.Table, _Mapping]]] = ...) -> None: ...

class CreateViewRequest(_message.Message):
    __slots__ = ("name", "source", "key", "columns", "named_columns", "unique")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    NAMED_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    key: _containers.RepeatedScalarFieldContainer[str]
    columns: _containers.RepeatedScalarFieldContainer[str]
    named_columns: bool
    unique: bool
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., key: _Optional[_Iterable[str]] = ..., columns: _Optional[_Iterable[str]] = ..., named_columns: _Optional[bool] = ..., unique: _Optional[bool] = ...) -> None: ...

class CreateViewResponse(_message.Message):
    __slots__ = ("done_rows", "table")
    DONE_ROWS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    done_rows: int
    table: _types_pb2.Table
    def __init__(self, done_rows: _Optional[int] = ..., table: _Optional[_Union[_types_pb2.Table, _Mapping]] = ...) -> None: ...

class CreateRuleRequest(_message.Message):
    __slots__ = ("definition", "backfill")
    DEFINITION_FIELD_NUMBER: _ClassVar[int]
    BACKFILL_FIELD_NUMBER: _ClassVar[int]
    definition: str
    backfill: bool
    def __init__(self, definition: _Optional[str] = ..., backfill: _Optional[bool] = ...) -> None: ...

class CreateRuleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRulesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRulesResponse(_message.Message):
    __slots__ = ("rules",)
    RULES_FIELD_NUMBER: _ClassVar[int]
    rules: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rules: _Optional[_Iterable[str]] = ...) -> None: ...

class DropRuleRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DropRuleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AlterTableRequest(_message.Message):
    __slots__ = ("name", "columns", "role")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    columns: _containers.RepeatedCompositeFieldContainer[_types_pb2.Column]
    role: str
    def __init__(self, name: _Optional[str] = ..., columns: _Optional[_Iterable[_Union[_types_pb2.Column, _Mapping]]] = ..., role: _Optional[str] = ...) -> None: ...

class AlterTableResponse(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: _types_pb2.Table
    def __init__(self, table: _Optional[_Union[_types_pb2.Table, _Mapping]] = ...) -> None: ...

class AlterAggregateRequest(_message.Message):
    __slots__ = ("name", "measures", "derived", "only_later")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEASURES_FIELD_NUMBER: _ClassVar[int]
    DERIVED_FIELD_NUMBER: _ClassVar[int]
    ONLY_LATER_FIELD_NUMBER: _ClassVar[int]
    name: str
    measures: _containers.RepeatedCompositeFieldContainer[_types_pb2.Measure]
    derived: _containers.RepeatedCompositeFieldContainer[_types_pb2.Derived]
    only_later: bool
    def __init__(self, name: _Optional[str] = ..., measures: _Optional[_Iterable[_Union[_types_pb2.Measure, _Mapping]]] = ..., derived: _Optional[_Iterable[_Union[_types_pb2.Derived, _Mapping]]] = ..., only_later: _Optional[bool] = ...) -> None: ...

class AlterAggregateResponse(_message.Message):
    __slots__ = ("done_rows", "total_rows", "table")
    DONE_ROWS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_ROWS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    done_rows: int
    total_rows: int
    table: _types_pb2.Table
    def __init__(self, done_rows: _Optional[int] = ..., total_rows: _Optional[int] = ..., table: _Optional[_Union[_types_pb2.Table, _Mapping]] = ...) -> None: ...

class DropTableRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DropTableResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTablesRequest(_message.Message):
    __slots__ = ("min_snapshot", "fresh")
    MIN_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    min_snapshot: int
    fresh: bool
    def __init__(self, min_snapshot: _Optional[int] = ..., fresh: _Optional[bool] = ...) -> None: ...

class ListTablesResponse(_message.Message):
    __slots__ = ("tables",)
    TABLES_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[_types_pb2.Table]
    def __init__(self, tables: _Optional[_Iterable[_Union[_types_pb2.Table, _Mapping]]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("name", "lateness", "min_snapshot", "fresh")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LATENESS_FIELD_NUMBER: _ClassVar[int]
    MIN_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    name: str
    lateness: bool
    min_snapshot: int
    fresh: bool
    def __init__(self, name: _Optional[str] = ..., lateness: _Optional[bool] = ..., min_snapshot: _Optional[int] = ..., fresh: _Optional[bool] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("table", "statistics", "retracted_in_backups", "lateness")
    class StatisticsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TABLE_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    RETRACTED_IN_BACKUPS_FIELD_NUMBER: _ClassVar[int]
    LATENESS_FIELD_NUMBER: _ClassVar[int]
    table: _types_pb2.Table
    statistics: _containers.ScalarMap[str, float]
    retracted_in_backups: _containers.RepeatedScalarFieldContainer[str]
    lateness: _containers.RepeatedCompositeFieldContainer[LatenessDay]
    def __init__(self, table: _Optional[_Union[_types_pb2.Table, _Mapping]] = ..., statistics: _Optional[_Mapping[str, float]] = ..., retracted_in_backups: _Optional[_Iterable[str]] = ..., lateness: _Optional[_Iterable[_Union[LatenessDay, _Mapping]]] = ...) -> None: ...

class LatenessDay(_message.Message):
    __slots__ = ("day", "events", "p50_us", "p99_us", "p999_us", "max_us")
    DAY_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    P50_US_FIELD_NUMBER: _ClassVar[int]
    P99_US_FIELD_NUMBER: _ClassVar[int]
    P999_US_FIELD_NUMBER: _ClassVar[int]
    MAX_US_FIELD_NUMBER: _ClassVar[int]
    day: int
    events: int
    p50_us: int
    p99_us: int
    p999_us: int
    max_us: int
    def __init__(self, day: _Optional[int] = ..., events: _Optional[int] = ..., p50_us: _Optional[int] = ..., p99_us: _Optional[int] = ..., p999_us: _Optional[int] = ..., max_us: _Optional[int] = ...) -> None: ...

class SplitTableRequest(_message.Message):
    __slots__ = ("name", "rows")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    name: str
    rows: int
    def __init__(self, name: _Optional[str] = ..., rows: _Optional[int] = ...) -> None: ...

class SplitTableResponse(_message.Message):
    __slots__ = ("points",)
    POINTS_FIELD_NUMBER: _ClassVar[int]
    points: _containers.RepeatedCompositeFieldContainer[_types_pb2.Key]
    def __init__(self, points: _Optional[_Iterable[_Union[_types_pb2.Key, _Mapping]]] = ...) -> None: ...

class WatermarkRequest(_message.Message):
    __slots__ = ("min_snapshot", "fresh")
    MIN_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    min_snapshot: int
    fresh: bool
    def __init__(self, min_snapshot: _Optional[int] = ..., fresh: _Optional[bool] = ...) -> None: ...

class WatermarkResponse(_message.Message):
    __slots__ = ("watermark",)
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    watermark: int
    def __init__(self, watermark: _Optional[int] = ...) -> None: ...

class ConsolidateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConsolidateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, float]
    def __init__(self, values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ClusterStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClusterStatusResponse(_message.Message):
    __slots__ = ("cluster", "node", "floor", "nodes", "log", "failed", "problems", "moves", "features", "copies_wanted", "growing", "content", "kept")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    COPIES_WANTED_FIELD_NUMBER: _ClassVar[int]
    GROWING_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    node: str
    floor: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    log: LogStatus
    failed: str
    problems: _containers.RepeatedScalarFieldContainer[str]
    moves: _containers.RepeatedCompositeFieldContainer[MoveStatus]
    features: _containers.RepeatedCompositeFieldContainer[FeatureStatus]
    copies_wanted: int
    growing: str
    content: _containers.RepeatedCompositeFieldContainer[ContentStatus]
    kept: str
    def __init__(self, cluster: _Optional[str] = ..., node: _Optional[str] = ..., floor: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., log: _Optional[_Union[LogStatus, _Mapping]] = ..., failed: _Optional[str] = ..., problems: _Optional[_Iterable[str]] = ..., moves: _Optional[_Iterable[_Union[MoveStatus, _Mapping]]] = ..., features: _Optional[_Iterable[_Union[FeatureStatus, _Mapping]]] = ..., copies_wanted: _Optional[int] = ..., growing: _Optional[str] = ..., content: _Optional[_Iterable[_Union[ContentStatus, _Mapping]]] = ..., kept: _Optional[str] = ...) -> None: ...

class FeatureStatus(_message.Message):
    __slots__ = ("name", "what", "is_on", "lack")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    IS_ON_FIELD_NUMBER: _ClassVar[int]
    LACK_FIELD_NUMBER: _ClassVar[int]
    name: str
    what: str
    is_on: bool
    lack: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., what: _Optional[str] = ..., is_on: _Optional[bool] = ..., lack: _Optional[_Iterable[str]] = ...) -> None: ...

class ContentStatus(_message.Message):
    __slots__ = ("shards", "ts", "state", "nodes")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    shards: str
    ts: int
    state: str
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, shards: _Optional[str] = ..., ts: _Optional[int] = ..., state: _Optional[str] = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class VerifyClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyClusterResponse(_message.Message):
    __slots__ = ("ts",)
    TS_FIELD_NUMBER: _ClassVar[int]
    ts: int
    def __init__(self, ts: _Optional[int] = ...) -> None: ...

class MoveStatus(_message.Message):
    __slots__ = ("id", "shards", "to", "source", "since", "problem")
    ID_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    id: str
    shards: str
    to: str
    source: str
    since: int
    problem: str
    def __init__(self, id: _Optional[str] = ..., shards: _Optional[str] = ..., to: _Optional[str] = ..., source: _Optional[str] = ..., since: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class MoveShardsRequest(_message.Message):
    __slots__ = ("shards", "to", "source", "copy")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    shards: str
    to: str
    source: str
    copy: bool
    def __init__(self, shards: _Optional[str] = ..., to: _Optional[str] = ..., source: _Optional[str] = ..., copy: _Optional[bool] = ...) -> None: ...

class MoveShardsResponse(_message.Message):
    __slots__ = ("move",)
    MOVE_FIELD_NUMBER: _ClassVar[int]
    move: str
    def __init__(self, move: _Optional[str] = ...) -> None: ...

class CancelMoveRequest(_message.Message):
    __slots__ = ("move",)
    MOVE_FIELD_NUMBER: _ClassVar[int]
    move: str
    def __init__(self, move: _Optional[str] = ...) -> None: ...

class CancelMoveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RebalanceShardsRequest(_message.Message):
    __slots__ = ("copies", "away_from", "keep", "keeps", "dry_run")
    COPIES_FIELD_NUMBER: _ClassVar[int]
    AWAY_FROM_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    copies: int
    away_from: _containers.RepeatedScalarFieldContainer[str]
    keep: _containers.RepeatedScalarFieldContainer[str]
    keeps: bool
    dry_run: bool
    def __init__(self, copies: _Optional[int] = ..., away_from: _Optional[_Iterable[str]] = ..., keep: _Optional[_Iterable[str]] = ..., keeps: _Optional[bool] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class RebalanceShardsResponse(_message.Message):
    __slots__ = ("moves",)
    MOVES_FIELD_NUMBER: _ClassVar[int]
    moves: _containers.RepeatedCompositeFieldContainer[PlannedMove]
    def __init__(self, moves: _Optional[_Iterable[_Union[PlannedMove, _Mapping]]] = ...) -> None: ...

class PlannedMove(_message.Message):
    __slots__ = ("move", "shards", "to", "source")
    MOVE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    move: str
    shards: str
    to: str
    source: str
    def __init__(self, move: _Optional[str] = ..., shards: _Optional[str] = ..., to: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class ForgetNodeRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class ForgetNodeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node", "state", "address", "version", "watermark", "applied", "behind", "behind_s", "needed", "silent_s", "disk_free_bytes", "disk_bytes", "agrees", "server_problem", "server_restarts", "shards", "server", "needs")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    BEHIND_S_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGREES_FIELD_NUMBER: _ClassVar[int]
    SERVER_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    SERVER_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    node: str
    state: str
    address: str
    version: str
    watermark: int
    applied: int
    behind: int
    behind_s: float
    needed: int
    silent_s: float
    disk_free_bytes: int
    disk_bytes: int
    agrees: bool
    server_problem: str
    server_restarts: int
    shards: str
    server: str
    needs: str
    def __init__(self, node: _Optional[str] = ..., state: _Optional[str] = ..., address: _Optional[str] = ..., version: _Optional[str] = ..., watermark: _Optional[int] = ..., applied: _Optional[int] = ..., behind: _Optional[int] = ..., behind_s: _Optional[float] = ..., needed: _Optional[int] = ..., silent_s: _Optional[float] = ..., disk_free_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., agrees: _Optional[bool] = ..., server_problem: _Optional[str] = ..., server_restarts: _Optional[int] = ..., shards: _Optional[str] = ..., server: _Optional[str] = ..., needs: _Optional[str] = ...) -> None: ...

class LogStatus(_message.Message):
    __slots__ = ("stream", "leader", "first", "last", "nbytes", "limit_bytes", "copies")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    stream: str
    leader: str
    first: int
    last: int
    nbytes: int
    limit_bytes: int
    copies: _containers.RepeatedCompositeFieldContainer[LogCopy]
    def __init__(self, stream: _Optional[str] = ..., leader: _Optional[str] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., nbytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., copies: _Optional[_Iterable[_Union[LogCopy, _Mapping]]] = ...) -> None: ...

class LogCopy(_message.Message):
    __slots__ = ("server", "leads", "current", "away", "behind")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    server: str
    leads: bool
    current: bool
    away: bool
    behind: int
    def __init__(self, server: _Optional[str] = ..., leads: _Optional[bool] = ..., current: _Optional[bool] = ..., away: _Optional[bool] = ..., behind: _Optional[int] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class CheckpointResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TailPointsRequest(_message.Message):
    __slots__ = ("table", "since", "upto", "rows", "most", "shards")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UPTO_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    table: str
    since: int
    upto: int
    rows: int
    most: int
    shards: int
    def __init__(self, table: _Optional[str] = ..., since: _Optional[int] = ..., upto: _Optional[int] = ..., rows: _Optional[int] = ..., most: _Optional[int] = ..., shards: _Optional[int] = ...) -> None: ...

class TailPoint(_message.Message):
    __slots__ = ("commit_ts", "rows")
    COMMIT_TS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    commit_ts: int
    rows: int
    def __init__(self, commit_ts: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class TailPointsResponse(_message.Message):
    __slots__ = ("points", "last", "watermark", "kept_since", "table_id", "created_ts", "store")
    POINTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    KEPT_SINCE_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_TS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    points: _containers.RepeatedCompositeFieldContainer[TailPoint]
    last: int
    watermark: int
    kept_since: int
    table_id: int
    created_ts: int
    store: str
    def __init__(self, points: _Optional[_Iterable[_Union[TailPoint, _Mapping]]] = ..., last: _Optional[int] = ..., watermark: _Optional[int] = ..., kept_since: _Optional[int] = ..., table_id: _Optional[int] = ..., created_ts: _Optional[int] = ..., store: _Optional[str] = ...) -> None: ...

class BackupRequest(_message.Message):
    __slots__ = ("repository", "keep")
    REPOSITORY_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    repository: str
    keep: int
    def __init__(self, repository: _Optional[str] = ..., keep: _Optional[int] = ...) -> None: ...

class BackupResponse(_message.Message):
    __slots__ = ("name", "path", "watermark", "files", "copied_bytes", "shared_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    watermark: int
    files: int
    copied_bytes: int
    shared_bytes: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., watermark: _Optional[int] = ..., files: _Optional[int] = ..., copied_bytes: _Optional[int] = ..., shared_bytes: _Optional[int] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("begin", "taken", "end", "seek")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SEEK_FIELD_NUMBER: _ClassVar[int]
    begin: _containers.RepeatedCompositeFieldContainer[BeginSubscription]
    taken: _containers.RepeatedScalarFieldContainer[int]
    end: _containers.RepeatedScalarFieldContainer[int]
    seek: _containers.RepeatedCompositeFieldContainer[SoughtSnapshot]
    def __init__(self, begin: _Optional[_Iterable[_Union[BeginSubscription, _Mapping]]] = ..., taken: _Optional[_Iterable[int]] = ..., end: _Optional[_Iterable[int]] = ..., seek: _Optional[_Iterable[_Union[SoughtSnapshot, _Mapping]]] = ...) -> None: ...

class SoughtSnapshot(_message.Message):
    __slots__ = ("number", "ts")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TS_FIELD_NUMBER: _ClassVar[int]
    number: int
    ts: int
    def __init__(self, number: _Optional[int] = ..., ts: _Optional[int] = ...) -> None: ...

class BeginSubscription(_message.Message):
    __slots__ = ("number", "room", "spec", "order_by", "offset", "interval_ms", "heartbeat_ms", "since", "skip", "until_us", "durable", "retractions", "min_snapshot", "shards", "lateness_us", "all_columns_of")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ORDER_BY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    UNTIL_US_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    RETRACTIONS_FIELD_NUMBER: _ClassVar[int]
    MIN_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    LATENESS_US_FIELD_NUMBER: _ClassVar[int]
    ALL_COLUMNS_OF_FIELD_NUMBER: _ClassVar[int]
    number: int
    room: int
    spec: _types_pb2.ScanSpec
    order_by: _containers.RepeatedScalarFieldContainer[str]
    offset: int
    interval_ms: int
    heartbeat_ms: int
    since: int
    skip: int
    until_us: int
    durable: DurableSubscription
    retractions: str
    min_snapshot: int
    shards: int
    lateness_us: int
    all_columns_of: int
    def __init__(self, number: _Optional[int] = ..., room: _Optional[int] = ..., spec: _Optional[_Union[_types_pb2.ScanSpec, _Mapping]] = ..., order_by: _Optional[_Iterable[str]] = ..., offset: _Optional[int] = ..., interval_ms: _Optional[int] = ..., heartbeat_ms: _Optional[int] = ..., since: _Optional[int] = ..., skip: _Optional[int] = ..., until_us: _Optional[int] = ..., durable: _Optional[_Union[DurableSubscription, _Mapping]] = ..., retractions: _Optional[str] = ..., min_snapshot: _Optional[int] = ..., shards: _Optional[int] = ..., lateness_us: _Optional[int] = ..., all_columns_of: _Optional[int] = ...) -> None: ...

class DurableSubscription(_message.Message):
    __slots__ = ("user", "name", "ttl_us", "unseen")
    USER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TTL_US_FIELD_NUMBER: _ClassVar[int]
    UNSEEN_FIELD_NUMBER: _ClassVar[int]
    user: str
    name: str
    ttl_us: int
    unseen: bool
    def __init__(self, user: _Optional[str] = ..., name: _Optional[str] = ..., ttl_us: _Optional[int] = ..., unseen: _Optional[bool] = ...) -> None: ...

class AcknowledgeSubscriptionRequest(_message.Message):
    __slots__ = ("user", "name", "table", "ts", "skip")
    USER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    TS_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    user: str
    name: str
    table: str
    ts: int
    skip: int
    def __init__(self, user: _Optional[str] = ..., name: _Optional[str] = ..., table: _Optional[str] = ..., ts: _Optional[int] = ..., skip: _Optional[int] = ...) -> None: ...

class AcknowledgeSubscriptionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSubscriptionsRequest(_message.Message):
    __slots__ = ("user",)
    USER_FIELD_NUMBER: _ClassVar[int]
    user: str
    def __init__(self, user: _Optional[str] = ...) -> None: ...

class StoredSubscription(_message.Message):
    __slots__ = ("name", "table", "ts", "skip", "expires_us")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    TS_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_US_FIELD_NUMBER: _ClassVar[int]
    name: str
    table: str
    ts: int
    skip: int
    expires_us: int
    def __init__(self, name: _Optional[str] = ..., table: _Optional[str] = ..., ts: _Optional[int] = ..., skip: _Optional[int] = ..., expires_us: _Optional[int] = ...) -> None: ...

class ListSubscriptionsResponse(_message.Message):
    __slots__ = ("subscriptions",)
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    subscriptions: _containers.RepeatedCompositeFieldContainer[StoredSubscription]
    def __init__(self, subscriptions: _Optional[_Iterable[_Union[StoredSubscription, _Mapping]]] = ...) -> None: ...

class DropSubscriptionRequest(_message.Message):
    __slots__ = ("user", "name")
    USER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    user: str
    name: str
    def __init__(self, user: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class DropSubscriptionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("updates",)
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    updates: _containers.RepeatedCompositeFieldContainer[SubscriptionUpdate]
    def __init__(self, updates: _Optional[_Iterable[_Union[SubscriptionUpdate, _Mapping]]] = ...) -> None: ...

class SubscriptionUpdate(_message.Message):
    __slots__ = ("number", "accepted", "error", "ts", "kinds", "old", "new", "columns", "reset", "skip", "ended", "more", "moved_to_port", "from_ts", "altered")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    OLD_FIELD_NUMBER: _ClassVar[int]
    NEW_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    MOVED_TO_PORT_FIELD_NUMBER: _ClassVar[int]
    FROM_TS_FIELD_NUMBER: _ClassVar[int]
    ALTERED_FIELD_NUMBER: _ClassVar[int]
    number: int
    accepted: bool
    error: _types_pb2.Error
    ts: int
    kinds: _containers.RepeatedScalarFieldContainer[ChangeKind]
    old: _containers.RepeatedScalarFieldContainer[int]
    new: _containers.RepeatedScalarFieldContainer[int]
    columns: _containers.RepeatedCompositeFieldContainer[_types_pb2.ColumnValues]
    reset: bool
    skip: int
    ended: bool
    more: bool
    moved_to_port: int
    from_ts: int
    altered: _types_pb2.Table
    def __init__(self, number: _Optional[int] = ..., accepted: _Optional[bool] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., ts: _Optional[int] = ..., kinds: _Optional[_Iterable[_Union[ChangeKind, str]]] = ..., old: _Optional[_Iterable[int]] = ..., new: _Optional[_Iterable[int]] = ..., columns: _Optional[_Iterable[_Union[_types_pb2.ColumnValues, _Mapping]]] = ..., reset: _Optional[bool] = ..., skip: _Optional[int] = ..., ended: _Optional[bool] = ..., more: _Optional[bool] = ..., moved_to_port: _Optional[int] = ..., from_ts: _Optional[int] = ..., altered: _Optional[_Union[_types_pb2.Table, _Mapping]] = ...) -> None: ...
