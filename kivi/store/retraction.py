"""Retraction: events are removed, and aggregates answer as if they had never been (R22).

::

    retract    the events that match at S are named: (CTS, position); the names are all that the transaction keeps
    prepare    without a lock: which rows of aggregates the events touch, and these rows again, as of some W1 >= S,
               from the events that remain; then, over and over, what commits above W1 have added to them
    entry      under the lock: what has been added since, which by now is little; then the record gets its CTS
    record     the names; and for aggregates runs of deltas, of rows that begin anew, and of rows that are gone

So appends never wait for a retraction, nor do they abort, and neither does it for them: the rows that begin anew have
every delta that entered the log before the record, and those that enter after it come on top. What the record holds is
all there is to replay. (What entered before it is taken as committed, as it will be, or the store stops.) Two
retractions of one table conflict with each other, by a row that both put.

**Which bits.** A row is what it would be if the events had never been in their commits: for each commit, in CTS order,
the delta that its remaining events derive, left to right in the order of the record. That decides the bits of float
sums, of aggregates that a backfill made too, and is the same however the work was cut.

**Exact sums need no other event.** Where all measures are sums and counts of integers and decimals, the inverse of
what the events had added is one more delta. Everything else (MIN, MAX, float sums, states) is computed again, which
takes the events that remain of these rows: if some of them may lie below the retention floor, the retraction is
refused, and names the aggregates.

**A row without events is absent.** Every touched row is looked for among the remaining events, or says by its own count
how many it has; one that has none ends, and deltas that entered meanwhile make it again. Where a row may have counted
events that retention has forgotten since, it stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa

from kivi.arrow.dictionaries import together
from kivi.delta.sources import columns_used
from kivi.encoding.event_names import POSITION, STAMP, EventNames
from kivi.errors import InvalidArgument, Unavailable
from kivi.events.views import EventView
from kivi.model.expressions import names as names_in
from kivi.model.questions import seen_schema
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.mvcc.applied import Applied, PendingEvents
from kivi.mvcc.feed import Tap
from kivi.mvcc.groups import Beginning, Single
from kivi.mvcc.leases import Lease
from kivi.mvcc.record import Bulk
from kivi.mvcc.turns import Turns
from kivi.runtime.settings import Settings
from kivi.store.catalog import View, schema_guards
from kivi.store.event_parts import event_times
from kivi.store.event_selection import Captured, SelectedEvents, pushed
from kivi.store.reads import Reads
from kivi.store.retention import first_positions, remembered
from kivi.store.touched_rows import TouchedRows, complete, keep, lean, touch
from kivi.store.transaction import Txn

__all__ = ["Retractions"]

_FEW_ROWS: Final = 10_000
"""So many rows of deltas may be left for the entry lock: a millisecond or two."""
_ROUNDS: Final = 8
_CHUNKS: Final = 4
"""Batches of a quarter of a block are looked at as they come: to join them would cost more than it saves."""
_ENTERED_TIMEOUT_S: Final = 30.0


@dataclass(slots=True)
class Retractions:
    """Thread safe."""

    reads: Reads
    computing: Turns
    settings: Settings
    watermark: Callable[[], int]
    wait_for_entered: Callable[[float], bool]
    is_ordered_elsewhere: bool
    """Whether a commit is completed where it comes back from the log, by every node (``kivi.mvcc.gathering``)."""

    # -- at S -------------------------------------------------------------------------------------

    def find(self, txn: Txn, schema: TableSchema, wanted: Scan) -> EventNames:
        """The names of the events of a scan, without those that the transaction has retracted already."""
        times, (stored, hidden) = event_times(schema, wanted), pushed(schema, wanted.where)
        self.reads.check_open()
        self.reads.shards.check_named(schema)
        self.reads.check_visible(txn.lease, schema)
        used = sorted(names_in(hidden)) if hidden is not None else []
        types = {column.name: column.type for column in seen_schema(schema).columns}
        with self._events(schema, txn.lease.ts, txn.lease.ts, txn.retracted.get(schema.id)) as (view, waiting):
            captured = Captured(schema, view, waiting)
            events = SelectedEvents(self.reads.questions.timeline, captured, used, stored, hidden, types)
            names = EventNames.of_columns(events.of(times, events.after(), named=True, ordered=True))
        self.reads.reader.check_events(txn.lease, schema)
        return names

    @contextmanager
    def _events(
        self, schema: TableSchema, upto: int, seen_at: int, own: EventNames | None
    ) -> Iterator[tuple[EventView, list[PendingEvents]]]:
        events = self.reads.event_tables.of(schema.id)
        if events is None:
            raise self.reads.catalog.missing(schema)
        take = partial(events.view, upto, floor_at=seen_at)
        view, waiting = self.reads.retention.captured(
            self.reads.pending, schema.id, upto, take, floor_at=seen_at, own=own
        )
        with view:
            yield view, waiting

    # -- at commit --------------------------------------------------------------------------------

    def prepare(self, part: Single, txn: Txn, view: View, opened: ExitStack) -> None:
        """Adds to a prepared commit what its retractions do. ``opened`` is closed once it has entered, or will not;
        or, in a cluster, is proposed.

        Raises InvalidArgument where it needs events that retention has forgotten, Unavailable while an aggregate is
        being built.
        """
        for table, names in sorted(txn.retracted.items()):
            part.retracted.append((table, names))
            part.commit.retractions.append(Bulk(table, 0, [names.encode()]))
            for aggregate in view.aggregates.get(table, ()):
                if aggregate.is_building:
                    raise Unavailable(
                        f"aggregate {aggregate.name!r} is still being built from the events: nothing was retracted; "
                        "try again when it is complete"
                    )
        part.schema_guards = schema_guards(part.commit, lambda table: view.by_id.get(table) or txn.schemas.get(table))
        held = opened.enter_context(ExitStack())
        tap = held.enter_context(self.reads.pending.tapped())
        if not self.wait_for_entered(_ENTERED_TIMEOUT_S):
            raise Unavailable("commits that entered the log are not finished: nothing was retracted; try again")
        lease = self.reads.leases.open()  # and the tap has everything above it
        held.callback(self.reads.leases.release, lease)
        tap.take(lease.ts)  # what it has at or below is among the events that are read
        every: list[TouchedRows] = []
        for table, names in sorted(txn.retracted.items()):
            if aggregates := view.aggregates.get(table):
                every += self._computed(txn, txn.schemas[table], aggregates, names, lease)
        for _ in range(_ROUNDS):
            applied = tap.take(self.watermark())
            with self.computing:
                added = sum(rows.add(applied) for rows in every)
            if added <= _FEW_ROWS:
                break
        known = {rows.aggregate.id: rows.aggregate for rows in every}.get
        if not every:  # there is nothing to complete, and in a cluster ``opened`` is closed when it enters
            self._begin(part, every)
            return
        if not self.is_ordered_elsewhere:
            self._begin(part, every)
            part.on_entry = partial(_complete, part, known, tap)
            return
        held = held.pop_all()  # longer than ``opened``

        def at(number: int) -> None:
            with held:
                part.commit.gathered_since = number
                applied = tap.take(number)
                with self.computing:
                    for rows in every:
                        rows.add(applied)
                self._begin(part, every)

        part.on_entry = partial(complete, part, known)
        part.begins = Beginning(tuple(sorted({rows.aggregate.id for rows in every})), at, held.close)

    def _begin(self, part: Single, every: Sequence[TouchedRows]) -> None:
        """The rows as far as they are known now."""
        with self.computing:
            runs = [(rows.aggregate.id, run) for rows in every for run in rows.runs()]
            part.runs += runs
            part.commit.runs += [Bulk(table, 0, run.to_buffers()) for table, run in runs]
        part.body = part.commit.encode()

    def _computed(
        self, txn: Txn, schema: TableSchema, aggregates: Sequence[TableSchema], names: EventNames, lease: Lease
    ) -> list[TouchedRows]:
        """The touched rows of each aggregate, as of a lease: from the events that a snapshot there remembers at S."""
        start_ts, upto, columns = txn.start_ts, lease.ts, columns_used(aggregates, schema)
        with self._events(schema, start_ts, start_ts, None) as (view, waiting):
            every = [TouchedRows(one, schema, view.floor_us, self.settings.block_rows) for one in aggregates]
            memory = (
                batch.take(pa.array(at))
                for part, first in zip(waiting, first_positions(waiting), strict=True)
                if len(at := names.rows_in(*part.commits(), first))
                for batch in [_with_names(part, first, columns)]
            )
            removed = map(lean, itertools.chain(view.picked(names, columns), memory))
            for chunk in _whole_commits(removed, self.settings.block_rows):
                with self.computing:
                    touch(every, chunk)
        blocked = [rows.aggregate.name for rows in every if rows.is_blocked]
        if blocked:
            raise InvalidArgument(
                f"rows of {', '.join(blocked)} would have to be computed again from events that {schema.name!r} has "
                f"forgotten: nothing was retracted; leave out events whose rows reach below {view.floor_us} us, or "
                "drop these aggregates",
                table=schema.name,
                aggregates=", ".join(blocked),
                floor_us=view.floor_us,
            )
        for one in every:
            forgets = one.aggregate.forgets_rows
            one.begin(self.reads.retention.row_floor(one.aggregate, upto) if forgets else None)
            if one.few_keys is not None:
                one.know(self.reads.reader.get(lease, one.aggregate, one.few_keys))
        low, high = _bounds([rows.bounds for rows in every if rows.is_open])

        def may_have(first_us: int, last_us: int) -> bool:
            return any(rows.may_have(first_us, last_us) for rows in every if rows.is_open)

        with self._events(schema, upto, start_ts, names) as (view, waiting):
            stored = view.scan(
                time_from=low, time_to=high, columns=columns, naming=[STAMP, POSITION], may_have=may_have
            )
            memory = (
                remembered(_left((part, _with_names(part, first, columns))), schema, view.floor_us)
                for part, first in zip(waiting, first_positions(waiting), strict=True)
            )
            for chunk in _whole_commits(itertools.chain(stored, memory), self.settings.block_rows // _CHUNKS):
                if not any(rows.is_open for rows in every):
                    break
                with self.computing:
                    keep(every, chunk)
        self.reads.reader.check_events(txn.lease, schema)
        for one in every:
            one.close()
        return every


def _complete(part: Single, known: Callable[[int], TableSchema | None], tap: Tap, entered: dict[int, Applied]) -> None:
    """Under the entry lock: the deltas that are not in the rows yet, of what is or will be applied before this."""
    before = len(part.runs)
    complete(part, known, tap.take(2**63) | entered)
    part.commit.runs += [Bulk(table, 0, run.to_buffers()) for table, run in part.runs[before:]]
    part.body = part.commit.encode()


def _bounds(bounds: Sequence[tuple[int, int] | None]) -> tuple[int | None, int | None]:
    known = [one for one in bounds if one is not None]
    if len(known) < len(bounds) or not known:
        return None, None
    return min(low for low, _ in known), max(high for _, high in known)


# -- batches with names -------------------------------------------------------------------------------


def _with_names(part: PendingEvents, first: int, columns: Sequence[str]) -> pa.RecordBatch:
    names = EventNames.of_rows(*part.commits(), first)
    batch = part.batch.select(list(columns)).append_column(STAMP, pa.array(names.stamps))
    return batch.append_column(POSITION, pa.array(names.positions))


def _left(named: tuple[PendingEvents, pa.RecordBatch]) -> pa.RecordBatch:
    """The events of a batch that are not retracted."""
    part, batch = named
    return part._replace(batch=batch).kept()


def _whole_commits(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The same events in batches of about so many, of which none ends inside a commit."""
    held: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        if count >= rows:
            whole, cut = together(held), count
            stamps = whole.column(STAMP)
            if stamps[-1] == batch.column(STAMP)[0]:
                cut = int(np.searchsorted(stamps.to_numpy(), stamps[-1].as_py()))
            if cut:
                yield whole.slice(0, cut)
            held, count = ([whole.slice(cut)], count - cut) if cut < count else ([], 0)
        held.append(batch)
        count += batch.num_rows
    if count:
        yield together(held)
