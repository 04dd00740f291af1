"""Retention: how an event table forgets, exactly and in the log.

A *floor* (CTS, event time) is a record in the commit log. Events before the time are invisible to every snapshot at or
past the CTS, whatever block holds them. An append that enters the log after it and brings such an event is refused, and
its ``InvalidArgument`` says where the floor is and how many events lie below it; or, if the append asked for that
(``late="drop"``), the commit leaves them out and counts them, in the same record, so exactly once. Events that were
appended directly never enter the log then. Stages still hold theirs, in the log and then in blocks, where the floor
hides them from every snapshot that sees the commit; what is derived from the commit, for aggregates, leaves them out.
Should the floor move between deriving and entering, the commit is derived again. Nothing is decided by a clock at read
time, so the same snapshot gives the same answer for ever, on every copy of the log.

The floor follows the newest event time, not the wall clock, so that replaying an old trace keeps what the table's
``retention`` promises about *it*; an event from the future moves it no further than now. Aggregates never change by
it: one created after events had been forgotten says since when it is complete (``complete_since_us``).

A floor lives here from its record until consolidation has written it beside the blocks; then blocks that lie wholly
below it are dropped, once no snapshot from before it is open.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from kivi.engine import Engine, WriteBatch
from kivi.errors import DataLoss, InvalidArgument
from kivi.events.views import later_of
from kivi.log import Kind
from kivi.model.schema import TableSchema
from kivi.mvcc.commit import Committer
from kivi.mvcc.consolidate import Consolidator
from kivi.mvcc.leases import Leases
from kivi.store.catalog import Catalog
from kivi.store.event_tables import EventTables

__all__ = ["Retention", "earliest_times", "is_late", "remembered"]

_BODY: Final = struct.Struct("<BIq")
_VERSION: Final = 1
_STEP_PARTS: Final = 100
"""The floor moves in steps of a hundredth of the retention, so floors stay few."""


class Host(Protocol):
    """The part of a store that retention uses."""

    engine: Engine
    clock: Callable[[], float]
    catalog: Catalog
    committer: Committer
    consolidator: Consolidator
    leases: Leases
    event_tables: EventTables


class Retention:
    """The floors of all event tables. ``enter`` and ``check`` run under the committer's entry lock."""

    def __init__(self, store: Host) -> None:
        self._store = store
        self._unsaved: list[tuple[int, int, int]] = []
        self._entered: dict[int, int | None] = {}

    # -- floors -----------------------------------------------------------------------------------

    def enter(self, table: int, cts: int, time_us: int) -> None:
        """A floor record entered the log, or was replayed."""
        self._unsaved = [*self._unsaved, (cts, table, time_us)]
        self._entered[table] = max(time_us, self._entered.get(table) or time_us)

    def replay(self, cts: int, body: bytes | memoryview) -> None:
        version, table, time_us = _BODY.unpack(body)
        if version != _VERSION:
            raise DataLoss(f"a floor record has version {version}; this program knows {_VERSION}")
        self.enter(table, cts, time_us)

    def unsaved_at(self, table: int, upto: int) -> int | None:
        """The floor that a snapshot at ``upto`` sees, of those that are not saved to base yet.

        Ask here first and look in base second, as with pending: ``save`` writes to base before it forgets.
        """
        return later_of(*(time_us for cts, of, time_us in self._unsaved if of == table and cts <= upto))

    def seen_at(self, table: int, upto: int) -> int | None:
        """The floor that a snapshot at ``upto`` sees; None, too, if the table is gone."""
        unsaved, events = self.unsaved_at(table, upto), self._store.event_tables.of(table)
        return None if events is None else later_of(unsaved, events.complete_since(upto))

    def newest(self, table: int) -> int | None:
        """The floor that the next commit meets."""
        if table not in self._entered:
            events = self._store.event_tables.of(table)
            if events is None:
                return None
            in_base = events.complete_since(2**63)
            self._entered.setdefault(table, in_base)
        return self._entered[table]

    def check(self, earliest: dict[int, tuple[int, list[pa.RecordBatch]]]) -> None:
        """Refuses a commit whose events lie below the floor. ``earliest``: table -> (least event time, its batches)."""
        for table, (time_us, batches) in earliest.items():
            floor = self.newest(table)
            if floor is not None and time_us < floor:
                schema = self._store.catalog.schema_of(table)
                late = sum(is_late(batch, schema, floor).true_count for batch in batches) if schema is not None else 0
                name = schema.name if schema is not None else str(table)
                raise InvalidArgument(
                    f"{late} events lie before the retention floor of {name!r}, which is at {floor} us; "
                    'nothing was applied: leave them out, or append with late="drop", which does so and counts them',
                    table=name,
                    floor_us=floor,
                    late=late,
                )

    # -- in the background --------------------------------------------------------------------------

    def set_floor(self, schema: TableSchema, time_us: int) -> int:
        """Logs a floor. Returns its CTS; it is durable and in force when this returns."""
        settled: Future[BaseException | None] = Future()
        cts = self._store.committer.log_other(
            Kind.FLOOR,
            [_BODY.pack(_VERSION, schema.id, time_us)],
            settled.set_result,
            lambda sequence: self.enter(schema.id, sequence, time_us),
        )
        if (failure := settled.result()) is not None:
            raise failure
        return cts

    def step(self) -> None:
        """Moves the floors that are due, and drops what lies wholly below old ones."""
        store = self._store
        for schema in list(store.catalog.visible.by_id.values()):
            if schema.kind != "event" or schema.retention_us is None:
                continue
            events = store.event_tables.of(schema.id)
            if events is None:
                continue
            held = events.time_range_us()
            if held is not None:
                target = min(held[1], int(store.clock() * 1_000_000)) - schema.retention_us
                floor = self.newest(schema.id)
                due = floor is None or target >= floor + schema.retention_us // _STEP_PARTS
                if due and held[0] < target:
                    self.set_floor(schema, target)
            oldest = store.leases.oldest()
            store.consolidator.with_mutex(
                lambda events=events, oldest=oldest: events.drop_below_floor(  # type: ignore[misc]
                    min(store.consolidator.position, oldest if oldest is not None else 2**63)
                )
            )

    def save(self, upto: int) -> None:
        """Writes floors at or below ``upto`` beside their blocks, before the position passes them."""
        due = [floor for floor in self._unsaved if floor[0] <= upto]
        for cts, table, time_us in due:
            events = self._store.event_tables.of(table)
            if events is not None:
                batch = WriteBatch()
                events.set_floor(batch, cts, time_us)
                if len(batch):
                    self._store.engine.write(batch)
        if due:
            with self._store.committer.entry_lock:
                self._unsaved = [floor for floor in self._unsaved if floor[0] > upto]


def earliest_times(
    events: Iterable[tuple[TableSchema, list[pa.RecordBatch]]],
) -> dict[int, tuple[int, list[pa.RecordBatch]]]:
    """For the tables with a retention: the least event time that a commit brings."""
    out = {}
    for schema, batches in events:
        if schema.retention_us is not None and schema.event_time is not None:
            held = [batch for batch in batches if batch.num_rows]
            times = [pc.min(batch.column(schema.event_time).cast(pa.int64())).as_py() for batch in held]
            if times:
                out[schema.id] = (min(times), held)
    return out


def remembered(batch: pa.RecordBatch, schema: TableSchema, floor_us: int | None) -> pa.RecordBatch:
    """The events of a batch at or above a floor."""
    if floor_us is None:
        return batch
    late = is_late(batch, schema, floor_us)
    return batch.filter(pc.invert(late)) if late.true_count else batch


def is_late(events: pa.RecordBatch | pa.Table, schema: TableSchema, floor_us: int) -> pa.BooleanArray:
    """Whether each event lies below a floor: one boolean for each (for a table's, a chunked array)."""
    return pc.less(events.column(schema.event_time or "").cast(pa.int64()), floor_us)
