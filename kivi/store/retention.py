"""Retention: how event tables and aggregates forget, exactly and in the log.

A *floor* (CTS, event time) is a record in the commit log. Events before the time are invisible to every snapshot at or
past the CTS, whatever block holds them. An append that enters the log after it and brings such an event is refused, and
its ``InvalidArgument`` says where the floor is and how many events lie below it; or, if the append asked for that
(``late="drop"``), the commit leaves them out and counts them, in the same record, so exactly once. Events that were
appended directly never enter the log then. Stages still hold theirs in the log: whoever takes a commit from there, a
replay or another node, leaves out what lay below the floor at its CTS (``staged``), as the process did that made it. So
the positions of events in their commit, by which a retraction names them, are the same wherever they are read, and so
are tails, which no floor hides anything from. Should the floor move between deriving and entering, the commit is
derived again. Nothing is decided by a clock at read time, so the same snapshot gives the same answer for ever, on every
copy of the log.

The floor follows the newest event time, not the wall clock, so that replaying an old trace keeps what the table's
``retention`` promises about *it*; an event from the future moves it no further than now. Aggregates never change by
the floor of their source: one created after events had been forgotten says since when it is complete
(``complete_since_us``).

An aggregate with a ``retention`` has floors of its own, and forgets rows. Its floor lies where a slot begins; rows of
slots before it are invisible to every snapshot at or past its CTS. The newest event time of the source moves it too. A
delta for such a row is left out of that aggregate when it is derived, and its events are counted, while other
aggregates get theirs (``kivi.store.late_deltas``); and if the floor moves between deriving and entering, the commit is
derived again. So from the floor's CTS on nothing happens to these rows::

    events    17:02 17:59 | 18:01                      endpoint_5m, retention 1h: floor 18:00
    5m rows   17:00 17:55 | 18:00                      gone, at and past the floor's CTS
    1h rows   17:00         18:00                      endpoint_1h, retention 400d: all three events

A floor lives here from its record until consolidation has written it beside the blocks or among the row floors; then
blocks that lie wholly below it are dropped, and rows erased (``kivi.mvcc.forgetting``), once no snapshot from before it
is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.columns import padded
from kivi.encoding.event_names import EventNames
from kivi.engine import Engine, WriteBatch
from kivi.errors import InvalidArgument
from kivi.events.views import EventView, later_of
from kivi.model.schema import TableSchema
from kivi.mvcc.applied import PendingEvents
from kivi.mvcc.commit import Committer
from kivi.mvcc.pending import Pending
from kivi.mvcc.record import NewFloor
from kivi.mvcc.row_floors import Floor, RowFloors
from kivi.store.event_tables import EventTables

__all__ = ["Retention", "earliest_times", "first_positions", "is_late", "remembered"]

Earliest = tuple[TableSchema, int, list[pa.RecordBatch]]
"""A table, the least event time that a commit brings for it, and the batches that it brings."""


class Retention:
    """The floors of all event tables and aggregates. ``enter`` and ``check`` run under the committer's entry lock."""

    def __init__(
        self,
        engine: Engine,
        event_tables: EventTables,
        row_floors: RowFloors,
        committer: Committer,
        schema_of: Callable[[int], TableSchema | None],
        changed: Callable[[int, int], None],
    ) -> None:
        self._engine, self._event_tables, self._committer = engine, event_tables, committer
        self._row_floors, self._schema_of, self._changed = row_floors, schema_of, changed
        self._unsaved: list[tuple[int, int, int]] = []
        self._entered: dict[int, int | None] = {}

    # -- floors -----------------------------------------------------------------------------------

    def enter(self, table: int, cts: int, time_us: int) -> None:
        """A floor record entered the log, or was replayed."""
        self._unsaved = [*self._unsaved, (cts, table, time_us)]
        self._entered[table] = max(time_us, self._entered.get(table) or time_us)
        self._changed(table, cts)

    def unsaved_at(self, table: int, upto: int) -> int | None:
        """The floor that a snapshot at ``upto`` sees, of those that are not saved to base yet.

        Ask here first and look in base second, as with pending: ``save`` writes to base before it forgets.
        """
        return later_of(*(time_us for cts, of, time_us in self._unsaved if of == table and cts <= upto))

    def seen_at(self, table: int, upto: int) -> int | None:
        """The floor that a snapshot at ``upto`` sees; None, too, if the table is gone."""
        unsaved = self.unsaved_at(table, upto)
        schema = self._schema_of(table)
        return None if schema is None else later_of(unsaved, self._saved_at(schema, upto))

    def staged(self, schema: TableSchema, batches: Iterable[pa.RecordBatch], cts: int) -> list[pa.RecordBatch]:
        """Of events that the log holds as a stage, those that the commit at ``cts`` brings."""
        floor_us = self.seen_at(schema.id, cts)
        return [remembered(batch, schema, floor_us) for batch in batches]

    def row_floor(self, aggregate: TableSchema, upto: int) -> int | None:
        """``seen_at`` of an aggregate, which may be one that was overwritten."""
        unsaved = self.unsaved_at(aggregate.id, upto)
        return later_of(unsaved, self._row_floors.seen_at(aggregate.id, upto))

    def moved_at(self, aggregate: int, upto: int) -> int | None:
        """The CTS of the newest floor of an aggregate at or below ``upto``; None if there is none."""
        unsaved = (cts for cts, of, _ in self._unsaved if of == aggregate and cts <= upto)
        return max((*unsaved, *self._row_floors.stamps(aggregate, upto)), default=None)

    def _saved_at(self, schema: TableSchema, upto: int) -> int | None:
        if schema.kind == "aggregate":
            return self._row_floors.seen_at(schema.id, upto)
        events = self._event_tables.of(schema.id)
        return None if events is None else events.complete_since(upto)

    def captured(
        self,
        pending: Pending,
        table: int,
        upto: int,
        take: Callable[[], EventView],
        *,
        floor_at: int | None = None,
        since: int = 0,
        own: EventNames | None = None,
    ) -> tuple[EventView, list[PendingEvents]]:
        """A view of a table's blocks, as ``take`` gives it, and what of (since, upto] is pending and not in them.

        Events, floors and retractions move from memory into base, so memory is looked at first. ``floor_at``: the
        timestamp of which the view has the floor. ``own``: events to leave out, besides those that were retracted.
        """
        waiting = pending.events(table, upto)
        retracted = pending.retracted(table, 2**63)
        unsaved = None if floor_at is None else self.unsaved_at(table, floor_at)
        view = take()
        view.floor_us = later_of(unsaved, view.floor_us)
        least = max(since, view.events_upto)
        view.pending = {one.cts: one.names for one in retracted if view.erased_upto < one.cts <= view.erased_at}
        view.names = EventNames.union([*view.pending.values(), *([] if own is None else [own])])
        parts = [part for item in waiting if (part := item.after(least)) is not None]
        if view.names.size:
            parts = [
                part._replace(erased=rows) if len(rows := view.names.rows_in(*part.commits(), first)) else part
                for part, first in zip(parts, first_positions(parts), strict=True)
            ]
        if (events := self._event_tables.of(table)) is not None:
            parts = [part._replace(batch=padded(part.batch, events.schema)) for part in parts]
        return view, parts

    def newest(self, table: int) -> int | None:
        """The floor that the next commit meets."""
        if table not in self._entered:
            schema = self._schema_of(table)
            if schema is None:
                return None
            self._entered.setdefault(table, self._saved_at(schema, 2**63))
        return self._entered[table]

    def newest_of(self, aggregates: Iterable[TableSchema]) -> dict[int, int | None]:
        """The floors that the next commit meets in these aggregates; of those with a retention."""
        found = [aggregate.id for aggregate in aggregates if aggregate.forgets_rows]
        if not found:
            return {}
        with self._committer.entry_lock:
            return {table: self.newest(table) for table in found}

    def check(self, earliest: Iterable[Earliest]) -> None:
        """Refuses a commit whose events lie below the floor."""
        for schema, time_us, batches in earliest:
            floor = self.newest(schema.id)
            if floor is not None and time_us < floor:
                late = sum(is_late(batch, schema, floor).true_count for batch in batches)
                raise InvalidArgument(
                    f"{late} events lie before the retention floor of {schema.name!r}, which is at {floor} us; "
                    'nothing was applied: leave them out, or append with late="drop", which does so and counts them',
                    table=schema.name,
                    floor_us=floor,
                    late=late,
                )

    def set_floor(self, schema: TableSchema, time_us: int) -> int:
        """Logs a floor. Returns its CTS; it is durable and in force when this returns."""
        settled: Future[tuple[BaseException | None, int]] = Future()
        self.log_floor(schema, time_us, lambda *told: settled.set_result(told))
        failure, cts = settled.result()
        if failure is not None:
            raise failure
        return cts

    def log_floor(self, schema: TableSchema, time_us: int, done: Callable[[BaseException | None, int], None]) -> None:
        """Does not wait: ``done`` is told what kept it from the log, or its CTS."""
        self._committer.log_other(NewFloor(schema.id, time_us), done)

    def save(self, upto: int) -> None:
        """Writes floors at or below ``upto`` to base, before the position passes them."""
        due = [floor for floor in self._unsaved if floor[0] <= upto]
        for cts, table, time_us in due:
            schema, events, batch = self._schema_of(table), self._event_tables.of(table), WriteBatch()
            if events is not None:
                events.set_floor(batch, cts, time_us)
            elif schema is not None and schema.kind == "aggregate":
                self._row_floors.add(batch, table, Floor(cts, time_us))
            if len(batch):
                self._engine.write(batch)
        if due:
            with self._committer.entry_lock:
                self._unsaved = [floor for floor in self._unsaved if floor[0] > upto]


def first_positions(parts: Sequence[PendingEvents]) -> list[int]:
    """The position of the first event of each in its commit, which may have brought its events in several parts."""
    found, cts, brought = list[int](), 0, 0
    for part in parts:
        brought = brought if part.first == cts else 0
        found.append(brought)
        cts, brought = (part.first, brought + part.batch.num_rows) if part.stamps is None else (0, 0)
    return found


def earliest_times(events: Iterable[tuple[TableSchema, list[pa.RecordBatch]]]) -> list[Earliest]:
    """For the tables with a retention: the least event time that a commit brings."""
    out = []
    for schema, batches in events:
        if schema.retention_us is not None and schema.event_time is not None:
            held = [batch for batch in batches if batch.num_rows]
            times = [int(batch.column(schema.event_time).view(pa.int64()).to_numpy().min()) for batch in held]
            if times:
                out.append((schema, min(times), held))
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
