"""Reads as callers ask for them: rows by key, and scans as Arrow record batches.

What lies on other nodes of a cluster comes from there (``kivi.store.spanning``). What a snapshot sees is decided in
``mvcc.snapshot``; here ranges of keys are made, a transaction's own writes laid over what it reads, and batches put
together. What a row becomes is ``kivi.encoding.projection``: a predicate is always evaluated here, next to the rows.
Tables whose rows are of fixed width (all aggregates) are scanned in columns, but for scans of a few rows, backwards,
and over own writes.

Event tables: commit order; ``start`` and ``end`` bound the event time. Pending events are captured first, then the
block view, whose ``events_upto`` says which pending events it already has.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa

from kivi.arrow.columns import rows_batch
from kivi.arrow.dictionaries import gathered
from kivi.arrow.ordering import first_rows
from kivi.delta.ops import RowOp
from kivi.delta.overlay import FixedRows
from kivi.encoding.base_rows import RowLayout, Version
from kivi.encoding.key_slots import KeySlot
from kivi.encoding.projection import Projection
from kivi.errors import DataLoss, InvalidArgument, NotFound
from kivi.events.store import EventStore
from kivi.events.views import EventView, later_of
from kivi.log.shards import EVERY
from kivi.model.expressions import names
from kivi.model.questions import question_of, seen_schema
from kivi.model.rollups import rolled_outputs
from kivi.model.scans import Scan
from kivi.model.schema import OperatorCall, TableSchema
from kivi.mvcc.applied import PendingEvents
from kivi.mvcc.leases import Lease, Leases
from kivi.mvcc.pending import Pending
from kivi.mvcc.snapshot import Reader
from kivi.query.answers import Answer, Explain
from kivi.store.catalog import Catalog
from kivi.store.event_parts import event_times, pieces, trimmer
from kivi.store.event_selection import Captured, shown_events
from kivi.store.event_tables import EventTables
from kivi.store.key_ranges import key_range
from kivi.store.patterns import Patterns
from kivi.store.plans import GetPlan
from kivi.store.questions import Questions
from kivi.store.retention import Retention
from kivi.store.rollups import Rollups, rolled_batches
from kivi.store.shards import Shards, asked_shards, check_of_shards
from kivi.store.shared_events import SharedEvents
from kivi.store.snapshots import Snapshots
from kivi.store.spanning import SpannedView, Spanning
from kivi.store.transaction import Txn, encoded_key, merged

__all__ = ["Reads", "limited"]

BATCH_ROWS: Final = 4_096
BATCH_BYTES: Final = 4 << 20
FEW_ROWS: Final = 24
"""Up to so many rows are read one by one: columns cost as much as 30 rows do, and little for each row."""
COLUMNS_ROWS: Final = 16_384
_TOGETHER: Final = 64
_CHECKED_ROWS: Final = 1_024
_WIDE: Final = frozenset({"string", "bytes"})


@dataclass(slots=True)
class Reads:
    """Thread safe. ``txn``: the transaction whose own writes are laid over what is read."""

    catalog: Catalog
    reader: Reader
    pending: Pending
    leases: Leases
    retention: Retention
    event_tables: EventTables
    questions: Questions
    shards: Shards
    snapshots: Snapshots
    check_open: Callable[[], None]
    spanning: Spanning = field(init=False)

    def __post_init__(self) -> None:
        self.spanning = Spanning(self, self.snapshots, self.shards)

    def check_visible(self, lease: Lease, schema: TableSchema, shards: int = EVERY) -> None:
        """Raises unless a snapshot sees the table, and this store has all of these shards of it."""
        self.shards.check(schema, shards, lease.ts)
        self._check_seen(lease, schema)

    def missing(self, lease: Lease, schema: TableSchema, shards: int) -> int:
        """``check_visible`` for reads that may span owners: of the shards those that others are asked for."""
        self._check_seen(lease, schema)
        return self.spanning.missing(schema, shards, lease.ts)

    def _check_seen(self, lease: Lease, schema: TableSchema) -> None:
        lease.used = True
        self.catalog.check_seen(schema, lease.ts)
        if schema.state != "ready":
            of = "rows" if schema.kind == "view" else "events"
            raise NotFound(f"{schema.kind} {schema.name!r} is still being built from existing {of}", table=schema.name)

    def get(
        self,
        lease: Lease,
        schema: TableSchema,
        keys: Sequence[tuple[Any, ...]],
        columns: Sequence[str] | None = None,
        txn: Txn | None = None,
    ) -> list[dict[str, Any] | None]:
        """Rows by key at the snapshot, in stored form, derived columns included; None where there is no row."""
        self.check_open()
        raw = [encoded_key(schema, key) for key in keys]
        missing = self.missing(lease, schema, self.shards.of_keys(schema, raw))
        projection = Projection.of(schema, columns)
        versions: list[Version | None] = [None] * len(raw)
        if raw and not (txn is not None and txn.sees_none(schema)):
            versions = (
                self.spanning.get(lease, schema, raw, missing) if missing else self.reader.get(lease, schema, raw)
            )
        if txn is not None:
            own = self._own(lease, schema, txn)
            if own:
                versions = [txn.overlay(schema, v, own.get(key)) for key, v in zip(raw, versions, strict=True)]
        if (tenant := lease.tenant) is not None:
            versions = [v if tenant.is_key(schema, key) else None for key, v in zip(keys, versions, strict=True)]
        found = [(key, version) for key, version in zip(raw, versions, strict=True) if version is not None]
        rows = map(projection.narrowed, projection.selected(found, len(found)))
        return [None if version is None else next(rows) for version in versions]

    def _own(self, lease: Lease, schema: TableSchema, txn: Txn) -> dict[bytes, RowOp]:
        """The transaction's own operations, without those on rows below the retention floor that it sees."""
        own = txn.own_ops(schema)
        floor_us = self.retention.row_floor(schema, lease.ts) if own and schema.forgets_rows else None
        if floor_us is None or txn.sees_none(schema):
            return own
        slot = KeySlot.of(schema)
        return {key: op for key, op in own.items() if not slot.is_below(key, floor_us)}

    def maybe_there(self, lease: Lease, schema: TableSchema, keys: pa.LargeBinaryArray) -> Any:
        """Places of the rows that may be there; of the others the transaction knows that they are not."""
        self.check_open()
        lease.used = True
        return self.reader.maybe_there(lease, schema, keys)

    def has_rows(self, lease: Lease, schema: TableSchema, keys: list[bytes], txn: Txn) -> list[bool]:
        """Whether the transaction sees a row at each of these encoded keys."""
        versions: list[Version | None] = [None] * len(keys)
        if not txn.sees_none(schema):
            lease.used = True
            versions = self.reader.get(lease, schema, keys)
        return [
            txn.overlay(schema, version, txn.rows.get((schema.id, key))) is not None
            for key, version in zip(keys, versions, strict=True)
        ]

    def has_bounded_rows(self, name: str) -> bool:
        """Whether there is such a table, its rows are of fixed width, and all of them are here."""
        schema = self.catalog.visible.by_name.get(name)
        plan = GetPlan.of(schema, None) if schema is not None and not self.shards.is_partial(schema) else None
        return plan is not None and plan.is_bounded

    def get_each(
        self, plan: GetPlan, wanted: Sequence[tuple[Lease, bytes]]
    ) -> tuple[Sequence[int], Sequence[Sequence[Any]]]:
        """Rows by encoded key, each at a snapshot of its own, which is no tenant's: the places of those that are not
        there, and of the others the plan's columns, if there are any. Sums may have outgrown their types."""
        self.check_open()
        schema = plan.schema
        asked = self.shards.of_keys(schema, [key for _, key in wanted])
        for lease in {lease for lease, _ in wanted}:
            self.check_visible(lease, schema, asked)
        versions = self.reader.get_each(schema, wanted)
        found = [(key, version) for (_, key), version in zip(wanted, versions, strict=True) if version is not None]
        missing = [i for i, version in enumerate(versions) if version is None] if len(found) < len(wanted) else []
        return missing, Projection.of(schema, plan.columns).columns(found) if found else []

    def scan(self, lease: Lease, schema: TableSchema, wanted: Scan, txn: Txn | None = None) -> Iterator[pa.RecordBatch]:
        """Record batches of bounded size, in key order (events: in commit order, or as they lie: ``any_order``, then
        ``StoredGroup`` among them if ``stored_bytes`` allows it).

        Arguments are checked and the snapshot is captured at the call.
        """
        self.check_open()
        asked = asked_shards(schema, wanted)
        missing = self.missing(lease, schema, asked)
        if wanted.changes is not None:
            raise InvalidArgument("changes are read in a snapshot, not in a transaction")
        if wanted.shards is not None:
            check_of_shards(schema, wanted)
            if txn is not None:
                raise InvalidArgument("shards are read in a snapshot, not in a transaction")
        if wanted.limit is not None and wanted.limit < 0:
            raise InvalidArgument(f"limit must not be negative: {wanted.limit}")
        if wanted.is_answered:
            return self.answer(lease, schema, wanted, txn)
        if wanted.order:
            return self._ordered(lease, schema, wanted, txn)
        if wanted.offset:
            limit = None if wanted.limit is None else wanted.limit + wanted.offset
            rows = self.scan(lease, schema, replace(wanted, limit=limit, offset=0, any_order=False), txn)
            return skipped(rows, wanted.offset)
        if schema.kind == "event":
            return limited(self._events(lease, schema, wanted, txn), wanted.limit)
        start, end = key_range(schema, wanted)
        if wanted.where is None:
            projection = Projection.of(schema, wanted.columns)
        else:
            projection = Projection(schema, wanted.columns, wanted.where)
        own = self._own(lease, schema, txn) if txn is not None else {}
        none = txn is not None and txn.sees_none(schema)
        limit = wanted.limit if wanted.where is None else None  # of rows that are read
        one_by_one = own or none or wanted.reverse or (limit is not None and limit <= FEW_ROWS)
        if projection.in_columns and not one_by_one:
            first_rows = BATCH_ROWS if limit is None else min(BATCH_ROWS, limit)
            scan = functools.partial(
                self.reader.scan_portions, lease, schema, start, end, first_rows=first_rows, rows=COLUMNS_ROWS
            )
            portions: Iterable[FixedRows | list[tuple[bytes, Version]]]
            if missing or wanted.shards is not None:
                portions = self.spanning.rows(lease, schema, asked, (start, end), here=functools.partial(scan, few=0))
            else:
                portions = scan(few=FEW_ROWS)
            return gathered(projection.batches(portions, wanted.limit), BATCH_ROWS)
        pairs: Iterator[tuple[bytes, Version]] = iter(())
        if (missing or wanted.shards is not None) and not none:
            pairs = self.spanning.pairs(lease, schema, asked, (start, end), reverse=wanted.reverse)
        elif not none:
            every = _CHECKED_ROWS if limit is None else min(_CHECKED_ROWS, limit + 1)
            pairs = self.reader.scan(lease, schema, start, end, reverse=wanted.reverse, check_every=every)
        if own and txn is not None:
            inside = {k: op for k, op in own.items() if (start is None or k >= start) and (end is None or k < end)}
            pairs = merged(pairs, inside, schema, txn, reverse=wanted.reverse)
        rows_of = projection.selected(pairs, _at_once(wanted))
        return _batched(schema, projection, itertools.islice(rows_of, wanted.limit))

    def extreme_time(self, lease: Lease, schema: TableSchema, which: str, after_us: int | None = None) -> int | None:
        """The newest event time ("max") or the oldest ("min") of those later than a moment; None: there is none."""
        start = None if after_us is None else after_us + 1
        measures = {"moment": OperatorCall(which, schema.event_time)}
        wanted = Scan(question=question_of(schema, measures=measures, start=start))
        moments = [batch.column(0).cast(pa.int64())[0].as_py() for batch in self.scan(lease, schema, wanted)]
        return moments[0] if moments else None

    def _ordered(self, lease: Lease, schema: TableSchema, wanted: Scan, txn: Txn | None) -> Iterator[pa.RecordBatch]:
        """A scan in another order. The snapshot is captured at the call; rows are read when the first is asked for."""
        outputs = (schema if wanted.columns is None else seen_schema(schema)).output_columns(wanted.columns)
        needed = tuple(dict.fromkeys((*outputs, *(name for name, _ in wanted.order))))
        rows = self.scan(
            lease, schema, replace(wanted, columns=needed, order=(), limit=None, offset=0, any_order=False), txn
        )
        count = None if wanted.limit is None else wanted.limit + wanted.offset

        def made() -> Iterator[pa.RecordBatch]:
            table = first_rows(rows, wanted.order, count, self.questions.check_order_bytes)
            if table is not None:
                yield from table.slice(min(wanted.offset, table.num_rows)).select(list(outputs)).to_batches(BATCH_ROWS)

        return made()

    def answer(self, lease: Lease, schema: TableSchema, wanted: Scan, txn: Txn | None = None) -> Answer:
        """A rollup, or what a question is about. Arguments are checked at the call; it is made when it is read."""
        self.check_open()
        self.missing(lease, schema, asked_shards(schema, wanted))
        if txn is not None and schema.kind != "event":
            raise InvalidArgument("rollups and questions of aggregates are for snapshots, not for transactions")
        if wanted.rollup is not None:
            return self._rollup(lease, schema, wanted)
        if txn is not None and wanted.match is not None:
            raise InvalidArgument("patterns are for snapshots, not for transactions")
        return self._question(lease, schema, wanted, txn)

    def _rollup(self, lease: Lease, schema: TableSchema, wanted: Scan) -> Answer:
        """The rows that a scan would give, combined."""
        assert wanted.rollup is not None
        outputs = rolled_outputs(schema, wanted.rollup)
        complete_since_us = later_of(self.retention.row_floor(schema, lease.ts), schema.complete_since_us)

        bounds = key_range(schema, wanted)

        def ask() -> tuple[Iterator[pa.RecordBatch], Explain]:
            rolled = self.rollups_of(asked_shards(schema, wanted)).roll(lease, schema, wanted, bounds)
            return rolled_batches(rolled.schema, rolled.rows, outputs, wanted.limit), lambda _: rolled.explanation

        return Answer(ask, complete_since_us)

    @property
    def rollups(self) -> Rollups:
        return self.rollups_of(EVERY)

    def rollups_of(self, asked: int) -> Rollups:
        """Of rows of these shards alone."""
        return Rollups(self.reader, self.pending, self.spanning, self.questions.timeline, asked)

    def few_rows(self, lease: Lease, schema: TableSchema, wanted: Scan) -> tuple[int, Sequence[Sequence[Any]]] | None:
        """A scan of some dozen rows of fixed width: how many there are, and their columns, if there are any, whose sums
        may have outgrown their types; None: it is not that, call ``scan``."""
        self.check_open()
        if schema.kind == "event" or wanted.where is not None or wanted.limit is None or wanted.limit > FEW_ROWS:
            return None
        if lease.tenant is not None:  # who has a predicate
            return None
        if wanted.changes is not None or wanted.is_answered:
            return None
        if wanted.order or wanted.offset or wanted.shards is not None:
            return None
        if not RowLayout.of(schema).in_columns:
            return None
        if self.missing(lease, schema, asked_shards(schema, wanted)):
            return None
        projection = Projection.of(schema, wanted.columns)
        start, end = key_range(schema, wanted)
        limit = wanted.limit
        rows = self.reader.scan(lease, schema, start, end, reverse=wanted.reverse, check_every=max(1, limit))
        found = [*itertools.islice(rows, limit)]
        return len(found), projection.columns(found) if found else ()

    def _events(self, lease: Lease, schema: TableSchema, wanted: Scan, txn: Txn | None) -> Iterator[pa.RecordBatch]:
        times = event_times(schema, wanted)
        seen = schema if wanted.columns is None else seen_schema(schema)
        outputs = list(seen.output_columns(wanted.columns))
        hidden = {*outputs, *(names(wanted.where) if wanted.where is not None else ())} - schema.by_name.keys()
        if hidden and wanted.reverse:
            raise InvalidArgument(f"{min(hidden)} is read in commit order: leave reverse out")
        if hidden and txn is not None and txn.events_of(schema.id):
            raise InvalidArgument(
                f"{min(hidden)} is of committed events, and this transaction appends to {schema.name!r}: read it "
                "before they are appended, or in a snapshot"
            )
        captured = self.captured(lease, schema, txn, asked_shards(schema, wanted), only=wanted.shards is not None)
        view, waiting, own = captured.view, captured.recent, captured.own
        if hidden:
            captured = Captured(schema, view, waiting)
            shown = shown_events(
                self.questions.timeline, captured, wanted.where, outputs, times, ordered=wanted.is_ordered
            )
            return self.watched(lease, schema, view, shown)
        trim = trimmer(schema, wanted.where, times, view.floor_us, outputs)
        tail = [*((part.kept(), True) for part in waiting), *((batch, False) for batch in own)]
        memory = (trim(batch, committed) for batch, committed in (reversed(tail) if wanted.reverse else tail))
        stored = view.scan(
            time_from=times[0],
            time_to=times[1],
            where=wanted.where,
            columns=outputs,
            reverse=wanted.reverse,
            ordered=wanted.is_ordered,
            stored_bytes=wanted.stored_bytes,
        )
        if not wanted.reverse:
            return self.watched(lease, schema, view, itertools.chain(stored, pieces(memory)))
        backwards = (batch.take(pa.array(range(batch.num_rows - 1, -1, -1), pa.int64())) for batch in memory)
        return self.watched(lease, schema, view, itertools.chain(pieces(backwards), stored))

    def _viewed(
        self, lease: Lease, schema: TableSchema, events: EventStore, txn: Txn | None, upto: int | None = None
    ) -> tuple[EventView, list[PendingEvents], list[pa.RecordBatch]]:
        """What a reader sees of events: those in blocks, those in memory, and its own."""
        upto = 0 if txn is not None and txn.sees_none(schema) else lease.ts if upto is None else upto
        take = functools.partial(events.view, upto, floor_at=lease.ts)
        retracted = txn.retracted.get(schema.id) if txn is not None else None
        view, waiting = self.retention.captured(self.pending, schema.id, upto, take, floor_at=lease.ts, own=retracted)
        self.leases.check(lease)
        return view, waiting, txn.events_of(schema.id) if txn is not None else []

    def captured(
        self,
        lease: Lease,
        schema: TableSchema,
        txn: Txn | None = None,
        asked: int | None = None,
        upto: int | None = None,
        *,
        only: bool = False,
    ) -> Captured:
        """What a reader sees of events, of whomever: of the shards ``asked`` at least, or of them ``only``. None: those
        that are here. ``upto``: only those that were committed at or below it, with the floor of the snapshot."""
        events = self.event_tables.of(schema.id)
        if events is None:
            raise self.catalog.missing(schema)
        is_own = txn is not None and txn.sees_none(schema)
        # before the view is taken, which has nothing of shards that this node takes afterwards
        missing = 0 if asked is None or is_own else self.spanning.missing(schema, asked, lease.ts)
        view, waiting, own = self._viewed(lease, schema, events, txn, upto)
        captured = Captured(schema, view, waiting, own, txn is not None)
        if asked is None or not (missing or only):
            return captured
        spanned = SpannedView(self.spanning, lease, replace(captured, own=()), asked, missing)
        return replace(captured, view=spanned, recent=())

    def hidden_upto(self, captured: Captured) -> int:
        """The newest commit of an event that these do not show since the retention floor hides it or it was dropped;
        0: there is none."""
        schema, floor_us, upto = captured.schema, captured.view.floor_us, captured.view.upto
        if (events := self.event_tables.of(schema.id)) is None:
            raise self.catalog.missing(schema)
        return max(events.hidden_upto(upto, floor_us), captured.hidden_in_memory())

    def shared_events(self, lease: Lease) -> SharedEvents:
        """The event tables of a snapshot, for a reader of settled files. Close it: files wait for it."""

        def take(schema: TableSchema) -> tuple[Captured, Callable[[], None]]:
            self.check_open()
            self._check_seen(lease, schema)
            return self.captured(lease, schema, None, EVERY), functools.partial(self.reader.check_events, lease, schema)

        return SharedEvents(take, self.questions.timeline)

    def _question(self, lease: Lease, schema: TableSchema, wanted: Scan, txn: Txn | None) -> Answer:
        """Events are captured at the call."""
        asked = asked_shards(schema, wanted)
        if schema.kind != "event":
            return self.questions.of_rows(self.rollups_of(asked), lease, schema, wanted)
        captured = self.captured(lease, schema, txn, asked)
        if wanted.match is not None:
            answer = Patterns(self.questions.timeline, self.questions.bytes_max).of_events(lease, captured, wanted)
        else:
            answer = self.questions.of_events(self.rollups, lease, captured, wanted)

        def ask() -> tuple[Iterator[pa.RecordBatch], Explain]:
            try:
                batches = list(answer)
            except DataLoss:
                self.reader.check_events(lease, schema)  # a dropped table's blocks are no damage
                raise
            self.reader.check_events(lease, schema)
            return iter(batches), answer.explanation

        return Answer(ask, answer.complete_since_us)

    def watched(
        self, lease: Lease, schema: TableSchema, view: Any, batches: Iterator[pa.RecordBatch]
    ) -> Generator[pa.RecordBatch, None, None]:
        """Passes on the batches that have rows, each read wholly while the lease held; closes the view at the end."""
        with view:
            try:
                for batch in batches:
                    self.reader.check_events(lease, schema)
                    if batch.num_rows:
                        yield batch
            except DataLoss:
                self.reader.check_events(lease, schema)  # a dropped table's blocks are no damage
                raise


def _at_once(wanted: Scan) -> int:
    """Rows that are looked at together; no more than are asked for where every one is in the answer."""
    return _TOGETHER if wanted.limit is None else max(1, min(wanted.limit, _TOGETHER))


def _batched(schema: TableSchema, projection: Projection, rows: Iterator[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    outputs = list(projection.outputs)
    wide = [name for name in outputs if (c := schema.by_name.get(name)) is not None and c.type.name in _WIDE]
    for portion in _portions(rows, wide):
        yield rows_batch(schema, outputs, portion)


def _portions(rows: Iterator[dict[str, Any]], wide: list[str]) -> Iterator[list[dict[str, Any]]]:
    """Some thousand rows at a time, fewer where their text and bytes are long: so much is in memory at once."""
    portion: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        portion.append(row)
        for name in wide:
            size += len(row[name] or "")
        if len(portion) == BATCH_ROWS or size >= BATCH_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def skipped(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Without the first rows."""
    for batch in batches:
        if rows < batch.num_rows:
            yield batch.slice(rows)
        rows = max(0, rows - batch.num_rows)


def limited(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    if limit is None:
        yield from batches
        return
    left = limit
    while left > 0 and (batch := next(batches, None)) is not None:
        yield batch.slice(0, left)
        left -= min(left, batch.num_rows)
