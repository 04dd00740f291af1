"""Messages to the store's arguments and back. What a stranger sent is checked against the schema here.

The store takes stored-form values on trust; a client in another language may send an int where a
string belongs, a float that is not finite, a decimal with too many digits, or a schema of yesterday.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from kivi_server import limits
from kivi_server.asked import LITTLE_BYTES
from kivi_server.commits import CommitReader
from kivi_server.pages import Page, followed
from kivi_server.row_groups import encoded

from kivi.api.arguments import type_of
from kivi.arrow.ipc import decode_ipc, encode_ipc
from kivi.arrow.records import row_batch, table_batch
from kivi.errors import InvalidArgument, NotFound, SchemaError
from kivi.model.changes import Changes, check_retractions
from kivi.model.declarations import TimeSlot, event_table_schema, row_table_schema
from kivi.model.expressions import Expr, bind
from kivi.model.levels import declared_schema, level_schemas
from kivi.model.orders import order_of
from kivi.model.questions import Question, question_of, seen_schema
from kivi.model.schema import OperatorCall, TableSchema
from kivi.model.slots import Slot
from kivi.model.tenants import Tenant
from kivi.model.types import ColumnType, check_moment
from kivi.model.views import view_schema
from kivi.store.facade import Lease, Scan, Store, Txn
from kivi.wire.codec import OPERATOR_NAMES, from_expr, from_measures, from_question, from_rollup, from_values
from kivi.wire.columns import column_writer
from kivi.wire.frames import KEPT_MAX, Bodies
from kivi.wire.patterns import from_match
from kivi.wire.v1 import service_pb2, session_pb2, types_pb2

__all__ = ["Translator"]

Kind = session_pb2.Operation
_PYTHON: Final[dict[str, type]] = {
    "bool": bool,
    "int64": int,
    "decimal": int,
    "timestamp": int,
    "float64": float,
    "string": str,
    "bytes": bytes,
}
_TIME: Final = ColumnType("timestamp")


def _changes(sent: types_pb2.Changes) -> Changes:
    return Changes(
        sent.since,
        sent.commit_ts,
        sent.skip,
        sent.take if sent.HasField("take") else None,
        sent.remembered_at if sent.HasField("remembered_at") else None,
        sent.partial,
        sent.removed,
        check_retractions(sent.retractions or "fail"),
    )


class Translator:
    """Bound to one store: its schemas and its limits."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._value_bytes_max = store.settings.max_value_bytes
        self._rows_max = store.settings.max_append_rows
        self.commits = CommitReader(store)

    def schema(self, name: str, table_id: int, lease: Lease | None = None, tenant: Tenant | None = None) -> TableSchema:
        """The table, at a snapshot if one is given, if it still is the one the client means (0: whichever is there)."""
        try:
            schema = self.store.table(name, lease, tenant)
        except NotFound as error:
            if table_id:
                error.details["stale"] = True
            raise
        if table_id not in (0, schema.origin):
            raise NotFound(
                f"table {name!r} was dropped and created again since this client read its schema",
                table=name,
                stale=True,
            )
        return schema

    # -- values ---------------------------------------------------------------------------------

    def _value(self, type_: ColumnType, value: Any, what: str) -> Any:
        if value is None:
            return None
        kind = type(value)
        if kind is not _PYTHON[type_.name]:
            raise SchemaError(f"{what} was sent as {kind.__name__}, which is not the stored form of {type_}")
        if kind is int:
            if type_.name == "decimal" and not type_.stored_min <= value <= type_.stored_max:
                raise InvalidArgument(f"{what} does not fit in {type_}")
        elif kind is float:
            if not math.isfinite(value):
                raise InvalidArgument(f"{what} is {value!r}: NaN and infinities are not accepted")
            return value + 0.0
        elif kind is not bool and len(value) > self._value_bytes_max // 4:
            size = len(value.encode()) if kind is str else len(value)
            if size > self._value_bytes_max:
                raise limits.exceeded("value_bytes_max", self._value_bytes_max, size, what)
        return value

    def key(self, schema: TableSchema, values: Iterable[types_pb2.Value], partial: bool = False) -> tuple[Any, ...]:
        found = from_values(values)
        if len(found) != len(schema.key) and not (partial and len(found) <= len(schema.key)):
            raise SchemaError(f"a key of {schema.name!r} has {len(schema.key)} columns, not {len(found)}")
        for i, (column, value) in enumerate(zip(schema.key, found, strict=False)):
            if value is None:
                raise InvalidArgument(f"key column {column.name!r} of {schema.name!r} must not be null")
            found[i] = self._value(column.type, value, f"key column {column.name!r}")
        return tuple(found)

    def _values(
        self, schema: TableSchema, operation: session_pb2.Operation, bodies: Bodies, *, delta: bool
    ) -> dict[str, Any]:
        names = operation.columns
        if len(names) != len(operation.values):
            raise InvalidArgument(f"{len(names)} columns and {len(operation.values)} values")
        out: dict[str, Any] = {}
        for name, value in zip(names, from_values(operation.values, bodies), strict=True):
            column = schema.column(name)
            if column in schema.key:
                raise SchemaError(f"{name!r} is a key column of {schema.name!r}")
            if delta:
                if column.operator is None:
                    raise SchemaError(f"{name!r} of {schema.name!r} is a value column without an operator")
                if value is None:
                    continue
            out[name] = self._value(column.type, value, f"column {name!r}")
            if column.type.name == "timestamp" and value is not None:
                check_moment(value, f"column {name!r}")
        return out

    # -- writes ---------------------------------------------------------------------------------

    def apply(self, txn: Txn, operation: session_pb2.Operation, bodies: Bodies) -> None:
        """``bodies`` are those of this operation and of what follows in its request."""
        schema = self.schema(operation.table, operation.table_id, txn.lease)
        kind = operation.kind
        if kind == Kind.KIND_OVERWRITE:
            txn.overwrite(schema)
            return
        if kind == Kind.KIND_APPEND:
            batch = self.batch(schema, bodies.take(operation.arrow_bytes))
            txn.append(schema, batch, drop_late=operation.drop_late)
            return
        if kind == Kind.KIND_WRITE:
            batch = row_batch(schema, self.decoded(bodies.take(operation.arrow_bytes)), validated=True)
            txn.write(schema, batch, insert=operation.insert)
            return
        if kind == Kind.KIND_APPEND_STAGES:
            txn.append_stages(schema, list(operation.stages), drop_late=operation.drop_late)
            return
        if schema.kind != "row" and kind != Kind.KIND_GUARD:
            kind_of = "a view" if schema.kind == "view" else f"an {schema.kind} table"
            raise InvalidArgument(f"{schema.name!r} is {kind_of}: its rows are not written one by one")
        key = self.key(schema, operation.key)
        if kind not in (Kind.KIND_DELETE, Kind.KIND_GUARD):
            schema.check_written_key(key)
        match kind:
            case Kind.KIND_DELTA:
                txn.delta(schema, key, self._values(schema, operation, bodies, delta=True))
            case Kind.KIND_PUT:
                txn.put(schema, key, self._values(schema, operation, bodies, delta=False))
            case Kind.KIND_INSERT:
                txn.insert(schema, key, self._values(schema, operation, bodies, delta=False))
            case Kind.KIND_DELETE:
                txn.delete(schema, key)
            case Kind.KIND_GUARD:
                if len(operation.columns) > 1:
                    raise InvalidArgument("a guard names one column, or none for the row's existence")
                column = operation.columns[0] if operation.columns else None
                schema.check_guardable(column)
                txn.guard(schema, key, column)
            case _:
                raise InvalidArgument(f"{kind} is not a kind of operation")

    def batch(self, schema: TableSchema, data: bytes | memoryview, *, rows: bool = False) -> pa.RecordBatch:
        """Events, or with ``rows`` those of a row table, from an Arrow IPC stream: decoded as from a stranger, then
        held to the table's columns. They refer to ``data``, and to all that it is a part of, unless that is much larger
        than they are: a transaction or a stage keeps them, and is accounted for them alone."""
        if schema.kind != "event" and not (rows and schema.kind == "row"):
            raise InvalidArgument(f"{schema.name!r} is not an event table")
        batch = table_batch(schema, self.decoded(data), validated=True)
        kept = memoryview(memoryview(data).obj).nbytes
        if kept <= LITTLE_BYTES or kept <= KEPT_MAX * batch.nbytes:
            return batch
        with pa.ipc.open_stream(encode_ipc(batch)) as reader:
            return reader.read_next_batch()

    def decoded(self, data: bytes | memoryview) -> pa.Table:
        """An Arrow IPC stream, as from a stranger."""
        return decode_ipc(data, max_bytes=limits.BATCH_BYTES_MAX, max_rows=self._rows_max, codes=True)

    # -- reads ----------------------------------------------------------------------------------

    def columns(self, schema: TableSchema, names: Sequence[str], known: int) -> tuple[str, ...] | None:
        """Those that are asked for; None: all. ``known``: so many columns the client knows, 0: which is not said."""
        if not names and known:
            return schema.first_outputs(known)
        return schema.output_columns(names) if names else None

    def rows(
        self, schema: TableSchema, columns: Sequence[str] | None, rows: Sequence[dict[str, Any] | None]
    ) -> session_pb2.GetReply:
        names = schema.output_names if columns is None else columns
        found = [row for row in rows if row is not None]
        reply = session_pb2.GetReply(keys=len(rows), missing=[i for i, row in enumerate(rows) if row is None])
        if found:
            column_writer(schema, names)(reply.columns, [[row[name] for row in found] for name in names])
        return reply

    def few_rows(
        self, schema: TableSchema, columns: Sequence[str] | None, rows: int, values: Sequence[Sequence[Any]]
    ) -> session_pb2.ScanPage:
        """A scan's only page, of so many rows."""
        names = schema.output_names if columns is None else columns
        page = session_pb2.ScanPage(rows_in_columns=rows)
        if rows:
            column_writer(schema, names)(page.columns, values)
        return page

    def where(self, schema: TableSchema, expr: types_pb2.Expr) -> Expr:
        """A predicate over the rows of a table."""
        return self._where(schema, from_expr(expr))

    def _where(self, schema: TableSchema, expr: Expr) -> Expr:
        """The predicate as ``bind`` gives it, its literals checked: they are in stored form already."""
        return bind(expr, lambda name: type_of(schema, name), self._value)

    def _bound(self, schema: TableSchema, key: types_pb2.Key) -> tuple[Any, ...]:
        """A key's first columns; for event tables, which are bounded by event time, one timestamp."""
        if schema.kind != "event":
            return self.key(schema, key.values, partial=True)
        values = from_values(key.values)
        if len(values) > 1 or None in values:
            raise SchemaError(f"a scan of event table {schema.name!r} is bounded by one event time, not {values!r}")
        return tuple(self._value(_TIME, value, "a bound of the event time") for value in values)

    def scan(self, schema: TableSchema, spec: types_pb2.ScanSpec, *, reads: bool = False) -> Scan:
        """``reads``: of a request for rows, which may name the hidden columns of events, as a question may."""
        is_plain = reads and not spec.HasField("changes")
        seen = seen_schema(schema) if is_plain or spec.HasField("question") or spec.HasField("match") else schema
        return Scan(
            prefix=self._bound(schema, spec.prefix) if spec.prefix.values else (),
            start=self._bound(schema, spec.start) if spec.HasField("start") else None,
            end=self._bound(schema, spec.end) if spec.HasField("end") else None,
            where=self._where(seen, from_expr(spec.where)) if spec.HasField("where") else None,
            columns=self.columns(seen if spec.columns else schema, spec.columns, spec.known_columns),
            limit=spec.limit if spec.HasField("limit") else None,
            reverse=spec.reverse,
            changes=_changes(spec.changes) if spec.HasField("changes") else None,
            rollup=from_rollup(schema, spec.rollup) if spec.HasField("rollup") else None,
            question=self._question(schema, spec),
            match=from_match(schema, spec.match, self._value) if spec.HasField("match") else None,
            order=order_of(spec.order_by, seen.output_type) if spec.order_by else (),
            offset=spec.offset,
            any_order=spec.any_order,
            shards=spec.shards or None if reads else None,
        )

    def _question(self, schema: TableSchema, spec: types_pb2.ScanSpec) -> Question | None:
        if spec.HasField("question"):
            return from_question(schema, spec.question, self._value)
        if not spec.measures:
            return None
        self._unique(schema.name, [measure.name for measure in spec.measures])
        return question_of(schema, measures={m.name: m.call for m in from_measures(spec.measures)})

    def pages(self, batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[Page]:
        """Encoded pages of at most ``rows`` rows, and for each whether another follows."""
        return followed(encoded(batches, rows))

    # -- definitions ----------------------------------------------------------------------------

    def new_table(self, table: types_pb2.Table) -> TableSchema:
        """A definition built anew from what was sent, so that it has passed every check of the schema room."""
        history = table.history_us if table.HasField("history_us") else None
        if table.kind == types_pb2.Table.KIND_EVENT:
            retention = table.retention_us if table.HasField("retention_us") else None
            columns = {c.name: c.type for c in table.columns}
            self._unique(table.name, [c.name for c in table.columns])
            local = table.local_us if table.HasField("local_us") else None
            cold = table.cold if table.HasField("cold") else None
            expires = table.expires if table.HasField("expires") else None
            named = list(table.index), list(table.shard_by)
            return event_table_schema(table.name, table.event_time, columns, retention, local, cold, *named, expires)
        if table.kind != types_pb2.Table.KIND_ROW:
            raise InvalidArgument("CreateTable makes row tables and event tables; use CreateAggregate for aggregates")
        self._unique(table.name, [c.name for c in (*table.key, *table.columns)])
        declared = self.new_columns(table.name, table.columns)
        return row_table_schema(table.name, {c.name: c.type for c in table.key}, declared, history)

    def new_columns(self, table: str, columns: Sequence[types_pb2.Column]) -> dict[str, object]:
        """As a caller declares them."""
        self._unique(table, [c.name for c in columns])
        declared: dict[str, object] = {}
        for c in columns:
            operator = OPERATOR_NAMES.get(c.operator)
            declared[c.name] = OperatorCall(operator, c.type) if operator else c.type
        return declared

    def new_measures(
        self,
        request: service_pb2.CreateAggregateRequest
        | service_pb2.CreateAggregatesRequest
        | service_pb2.AlterAggregateRequest,
    ) -> tuple[dict[str, OperatorCall], dict[str, str]]:
        """Measures and derived columns, as a caller declares them."""
        self._unique(request.name, [m.name for m in request.measures])
        measures = {m.name: m.call for m in from_measures(request.measures)}
        return measures, {d.name: d.expression for d in request.derived}

    def _unique(self, table: str, names: list[str]) -> None:
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise SchemaError(f"table {table!r} names the column {twice!r} twice")

    def new_view(self, request: service_pb2.CreateViewRequest) -> TableSchema:
        columns = list(request.columns) if request.named_columns else None
        return view_schema(request.name, self.store.table(request.source), list(request.key), columns, request.unique)

    def new_aggregate(self, request: service_pb2.CreateAggregateRequest) -> TableSchema:
        groups: list[str | TimeSlot] = []
        for group in request.group_by:
            slotted = bool(group.slot_us or group.width)
            if group.slot_us < 0 or (not slotted and group.name not in ("", group.source)):
                raise SchemaError(f"group key {group.name!r}: only time slots have a name of their own")
            slot = Slot.parse(group.width or group.slot_us, group.tz or None) if slotted else None
            groups.append(TimeSlot(group.source, slot, group.name) if slot is not None else group.source)
        return declared_schema(self.store.table, request.name, request.source, groups, *self._contents(request))

    def new_aggregates(self, request: service_pb2.CreateAggregatesRequest) -> list[TableSchema]:
        if not request.levels or not request.slots:
            raise SchemaError("CreateAggregates needs at least one level and one slot")
        levels = [list(level.columns) for level in request.levels]
        measures, derived, history, retention = self._contents(request)
        kept = dict(request.slot_retention_us) or retention
        return level_schemas(
            self.store.table, request.name, request.source, levels, request.slots, measures, derived, history, kept,
            request.tz or None,
        )  # fmt: skip

    def _contents(
        self, request: service_pb2.CreateAggregateRequest | service_pb2.CreateAggregatesRequest
    ) -> tuple[dict[str, OperatorCall], dict[str, str], int | None, int | None]:
        """Measures, derived columns, history and retention."""
        return (
            *self.new_measures(request),
            request.history_us if request.HasField("history_us") else None,
            request.retention_us if request.HasField("retention_us") else None,
        )
