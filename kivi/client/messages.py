"""Messages of kivi.v1 made of what a caller wrote, and read: pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from kivi.api.tokens import new_token
from kivi.errors import InvalidArgument
from kivi.model.declarations import TimeSlot, declared_columns, parse_duration_us
from kivi.model.schema import GroupKey, OperatorCall
from kivi.wire.codec import fill_values, to_columns, to_expr, to_groups, to_measures, to_order, to_question, to_rollup
from kivi.wire.columns import rows_reader
from kivi.wire.patterns import to_match
from kivi.wire.v1 import service_pb2, session_pb2, types_pb2

if TYPE_CHECKING:
    import pyarrow as pa

    from kivi.api.arguments import (
        AggregateArguments,
        AlterAggregateArguments,
        AlterTableArguments,
        GetArguments,
        LevelsArguments,
        ViewArguments,
    )
    from kivi.client.steps import Rows
    from kivi.model.scans import Scan
    from kivi.model.schema import TableSchema

__all__ = [
    "append_parts",
    "commit",
    "encoding",
    "get",
    "got",
    "new_aggregate",
    "new_aggregates",
    "new_columns",
    "new_measures",
    "number",
    "read_batches",
    "request_token",
    "scan_spec",
]

_APPEND_BYTES: Final = 24 << 20  # a larger append travels in several messages of one transaction


def request_token(token: str | None, batch: tuple[str, int] | None) -> str:
    """The request token of a commit. A batch token is one already: a repeat is answered with its first timestamp."""
    return token or ("" if batch is not None else new_token())


def commit(token: str, batch: tuple[str, int] | None) -> session_pb2.Commit:
    if batch is None:
        return session_pb2.Commit(token=token)
    return session_pb2.Commit(token=token, batch=session_pb2.BatchToken(scope=batch[0], sequence=batch[1]))


def get(schema: TableSchema, wanted: GetArguments) -> session_pb2.Request:
    """Rows by key. Raises SchemaError, InvalidArgument."""
    keys, names = wanted.bound(schema)
    request = session_pb2.Request()
    get = request.get
    get.table, get.table_id = schema.name, schema.id
    if wanted.columns is not None:
        get.columns.extend(names)
    else:
        get.known_columns = len(names)
    for key in keys:
        fill_values(get.keys.add().values, key)
    return request


def got(schema: TableSchema, wanted: GetArguments, reply: Rows) -> list[dict[str, Any] | None]:
    """What answers it."""
    read = rows_reader(schema, schema.output_columns(wanted.columns))
    found = read([row for row in reply.rows if row is not None])
    if len(found) == len(reply.rows):
        return [*found]
    left = iter(found)
    return [None if row is None else next(left) for row in reply.rows]


def number(value: float) -> int | float:
    return int(value) if abs(value) < 2**63 and value == int(value) else value  # NaN is not below anything


def append_parts(schema: TableSchema, records: Any, *, rows: bool = False, deletes: str | None = None) -> list[Any]:
    """Records as Arrow IPC streams (pa.Buffer), each small enough for a message. ``rows``: of a row table, too;
    ``deletes`` is as of ``kivi.arrow.records.row_batch``. Events come without columns that were added and are null: a
    transaction may not see these yet."""
    from kivi.arrow.columns import trimmed
    from kivi.arrow.ipc import encode_ipc
    from kivi.arrow.records import table_batch

    if schema.kind != "event" and not (rows and schema.kind == "row"):
        raise InvalidArgument(f"{schema.name!r} is a {schema.kind} table: events are appended to event tables")
    batch = table_batch(schema, records, deletes=deletes)
    if schema.kind == "event":
        batch = trimmed(batch, schema)
    data = encode_ipc(batch)
    if len(data) <= _APPEND_BYTES or batch.num_rows <= 1:
        return [data]
    rows = max(1, batch.num_rows // (-(-len(data) // _APPEND_BYTES)))
    return [encode_ipc(batch.slice(i, rows)) for i in range(0, batch.num_rows, rows)]


def encoding(
    records: Any, encode: Callable[[TableSchema, Any], list[Any]]
) -> Callable[[TableSchema], tuple[TableSchema, list[Any]]]:
    """For ``Core.use`` and ``Core.asked``: the schema, and the records encoded for it. These ask for it again where the
    table turns out to be another, and an iterator has nothing left by then."""

    def bind(schema: TableSchema) -> tuple[TableSchema, list[Any]]:
        from kivi.arrow.records import lasting

        nonlocal records
        records = lasting(records)
        return schema, encode(schema, records)

    return bind


def write_parts(schema: TableSchema, records: Any, deletes: str | None) -> list[Any]:
    """``append_parts`` of rows of a row table. Raises InvalidArgument for another one."""
    if schema.kind != "row":
        kind = "view" if schema.kind == "view" else f"{schema.kind} table"
        raise InvalidArgument(f"{schema.name!r} is a {kind}: rows are written to row tables")
    return append_parts(schema, records, rows=True, deletes=deletes)


def read_batches(data: bytes | memoryview) -> list[pa.RecordBatch]:
    if not data:
        return []
    import pyarrow as pa

    with pa.ipc.open_stream(data) as reader:
        return list(reader)


def scan_spec(schema: TableSchema, wanted: Scan) -> types_pb2.ScanSpec:
    """A scan that is bound to the schema."""
    spec = types_pb2.ScanSpec(
        table=schema.name,
        table_id=schema.id,
        reverse=wanted.reverse,
        limit=wanted.limit,
        order_by=to_order(wanted.order),
        offset=wanted.offset,
        any_order=wanted.any_order,
        shards=wanted.shards or 0,
    )
    fill_values(spec.prefix.values, wanted.prefix)
    for name, bound in (("start", wanted.start), ("end", wanted.end)):
        if bound is not None:
            key = getattr(spec, name)
            key.SetInParent()
            fill_values(key.values, bound)
    if wanted.where is not None:
        spec.where.CopyFrom(to_expr(wanted.where))
    if wanted.columns:
        spec.columns.extend(wanted.columns)
    else:
        spec.known_columns = len(schema.output_names)
    if wanted.rollup is not None:
        spec.rollup.CopyFrom(to_rollup(wanted.rollup))
    if wanted.question is not None:
        spec.question.CopyFrom(to_question(wanted.question))
    if wanted.match is not None:
        spec.match.CopyFrom(to_match(wanted.match))
    if wanted.changes is not None:
        spec.changes.CopyFrom(types_pb2.Changes(**asdict(wanted.changes)))
    return spec


def new_columns(wanted: AlterTableArguments) -> service_pb2.AlterTableRequest:
    columns = to_columns(declared_columns(wanted.add_columns or {}))
    return service_pb2.AlterTableRequest(name=wanted.name, columns=columns, role=wanted.role)


def new_measures(wanted: AlterAggregateArguments) -> service_pb2.AlterAggregateRequest:
    return service_pb2.AlterAggregateRequest(
        name=wanted.name,
        measures=_measures(wanted.add_measures),
        derived=_derived(wanted.derived),
        only_later=not wanted.backfill,
    )


def _measures(calls: Mapping[str, OperatorCall]) -> list[types_pb2.Measure]:
    return to_measures([call.as_measure(name) for name, call in calls.items()])


def _derived(derived: Mapping[str, str] | None) -> list[types_pb2.Derived]:
    return [types_pb2.Derived(name=name, expression=text) for name, text in (derived or {}).items()]


def new_aggregate(wanted: AggregateArguments) -> service_pb2.CreateAggregateRequest:
    groups = [
        GroupKey.of_slot(item.name, item.column, item.slot) if isinstance(item, TimeSlot) else GroupKey(item, item)
        for item in wanted.group_by
    ]
    return service_pb2.CreateAggregateRequest(
        name=wanted.name,
        source=wanted.source,
        group_by=to_groups(groups),
        **_contents(wanted),
    )


def new_view(wanted: ViewArguments) -> service_pb2.CreateViewRequest:
    return service_pb2.CreateViewRequest(
        name=wanted.name,
        source=wanted.source,
        key=wanted.key,
        columns=wanted.columns or (),
        named_columns=wanted.columns is not None,
        unique=wanted.unique,
    )


def new_aggregates(wanted: LevelsArguments) -> service_pb2.CreateAggregatesRequest:
    return service_pb2.CreateAggregatesRequest(
        name=wanted.name,
        source=wanted.source,
        levels=[service_pb2.Level(columns=columns) for columns in wanted.levels],
        slots=wanted.slots,
        tz=wanted.tz or "",
        slot_retention_us=_by_slot(wanted),
        **_contents(wanted),
    )


def _by_slot(wanted: LevelsArguments) -> dict[str, int]:
    by_slot = wanted.retention if isinstance(wanted.retention, Mapping) else {}
    return {slot: parse_duration_us(kept, "retention") for slot, kept in by_slot.items()}


def _contents(wanted: AggregateArguments | LevelsArguments) -> dict[str, Any]:
    kept = wanted.retention
    return {
        "measures": _measures(wanted.measures or {}),
        "derived": _derived(wanted.derived),
        "history_us": None if wanted.history is None else parse_duration_us(wanted.history, "history"),
        "retention_us": None if kept is None or isinstance(kept, Mapping) else parse_duration_us(kept, "retention"),
    }
