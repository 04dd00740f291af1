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

**A row without events is absent.** Every touched row is looked for among the remaining events, and one that is not
found there ends; deltas that entered meanwhile make it again. Where a row may have counted events that retention has
forgotten since, it stays.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.dictionaries import together
from kivi.delta.combine import Combining, combine, is_combinable
from kivi.delta.derive import derive_all, run_from_rows
from kivi.delta.grouping import Events
from kivi.delta.ops import Barrier
from kivi.delta.runs import Array, Cells, DeltaRun, RunColumn, fitted, joined_columns, neutral_column, with_cts
from kivi.delta.sources import Order
from kivi.delta.states import States
from kivi.encoding.base_rows import is_wide
from kivi.encoding.event_names import POSITION, STAMP, EventNames
from kivi.encoding.key_slots import KeySlot
from kivi.encoding.keys import key_width, large_binary
from kivi.errors import InvalidArgument, Unavailable
from kivi.events.views import EventView
from kivi.model.scans import Scan
from kivi.model.schema import Column, GroupKey, TableSchema
from kivi.model.types import ColumnType
from kivi.mvcc.applied import Applied, PendingEvents
from kivi.mvcc.feed import Tap
from kivi.mvcc.groups import Part, Single, Writes
from kivi.mvcc.record import Bulk
from kivi.mvcc.turns import Turns
from kivi.runtime.settings import Settings
from kivi.states.registry import kind_of
from kivi.store.catalog import View
from kivi.store.reads import Reads, event_times, trimmer
from kivi.store.retention import first_positions, remembered
from kivi.store.transaction import Txn

__all__ = ["Retractions"]

_INT: Final = ColumnType("int64")
_FEW_ROWS: Final = 10_000
"""So many rows of deltas may be left for the entry lock: a millisecond or two."""
_ROUNDS: Final = 8
_MANY: Final = 4
_ENTERED_TIMEOUT_S: Final = 30.0


@dataclass(slots=True)
class Retractions:
    """Thread safe."""

    reads: Reads
    computing: Turns
    settings: Settings
    watermark: Callable[[], int]
    wait_for_entered: Callable[[float], bool]

    # -- at S -------------------------------------------------------------------------------------

    def find(self, txn: Txn, schema: TableSchema, wanted: Scan) -> EventNames:
        """The names of the events of a scan, without those that the transaction has retracted already."""
        where, times = wanted.where, event_times(schema, wanted)
        self.reads.check_open()
        self.reads.check_visible(txn.lease, schema)
        outputs = [schema.event_time or "", STAMP, POSITION]
        with self._events(schema, txn.lease.ts, txn.lease.ts, txn.retracted.get(schema.id)) as (view, waiting):
            trim = trimmer(schema, where, times, view.floor_us, outputs)
            stored = view.scan(
                time_from=times[0], time_to=times[1], where=where, columns=outputs[:1], naming=outputs[1:]
            )
            memory = (
                trim(_left((part, _with_names(part, first, part.batch.schema.names))), True)
                for part, first in zip(waiting, first_positions(waiting), strict=True)
            )
            names = EventNames.of_columns(itertools.chain(stored, memory))
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
        """Adds to a prepared commit what its retractions do. ``opened`` is closed once it has entered, or will not.

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
        tap = opened.enter_context(self.reads.pending.tapped())
        if not self.wait_for_entered(_ENTERED_TIMEOUT_S):
            raise Unavailable("commits that entered the log are not finished: nothing was retracted; try again")
        upto = self.watermark()  # and the tap has everything above it
        tap.take(upto)  # what it has at or below is among the events that are read
        every: list[_Rows] = []
        for table, names in sorted(txn.retracted.items()):
            if aggregates := view.aggregates.get(table):
                every += self._computed(txn, txn.schemas[table], aggregates, names, upto)
        for _ in range(_ROUNDS):
            applied = tap.take(self.watermark())
            with self.computing:
                added = sum(rows.add(applied) for rows in every)
            if added <= _FEW_ROWS:
                break
        with self.computing:
            runs = [(rows.aggregate.id, run) for rows in every for run in rows.runs()]
            part.runs += runs
            part.commit.runs += [Bulk(table, 0, run.to_buffers()) for table, run in runs]
        part.on_entry = partial(_complete, part, every, tap)

    def _computed(
        self, txn: Txn, schema: TableSchema, aggregates: Sequence[TableSchema], names: EventNames, upto: int
    ) -> list[_Rows]:
        """The touched rows of each aggregate, as of ``upto``: from the events that a snapshot there remembers at S."""
        start_ts, columns = txn.start_ts, [column.name for column in schema.columns]
        with self._events(schema, start_ts, start_ts, None) as (view, waiting):
            every = [_Rows(one, schema, view.floor_us) for one in aggregates]
            memory = (
                batch.take(pa.array(at))
                for part, first in zip(waiting, first_positions(waiting), strict=True)
                if len(at := names.rows_in(*part.commits(), first))
                for batch in [_with_names(part, first, columns)]
            )
            for chunk in _whole_commits(itertools.chain(view.picked(names, columns), memory), self.settings.block_rows):
                with self.computing:
                    _touch(every, chunk)
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
        low, high = _bounds([rows.bounds for rows in every if rows.is_open])
        with self._events(schema, upto, start_ts, names) as (view, waiting):
            stored = view.scan(time_from=low, time_to=high, columns=columns, naming=[STAMP, POSITION])
            memory = (
                remembered(_left((part, _with_names(part, first, columns))), schema, view.floor_us)
                for part, first in zip(waiting, first_positions(waiting), strict=True)
            )
            for chunk in _whole_commits(itertools.chain(stored, memory), self.settings.block_rows):
                if not any(rows.is_open for rows in every):
                    break
                with self.computing:
                    _keep(every, chunk)
        self.reads.reader.check_events(txn.lease, schema)
        for one in every:
            one.close()
        return every


def _complete(part: Single, every: list[_Rows], tap: Tap, entered: Iterable[Part]) -> None:
    """Under the entry lock: the deltas that are not in the rows yet, of what is or will be applied before this."""
    applied = tap.take(2**63)
    applied |= {other.last: other.applied() for other in entered if not isinstance(other, Writes)}
    runs = [(rows.aggregate.id, run) for rows in every if (run := rows.completion(applied)) is not None]
    part.runs += runs
    part.commit.runs += [Bulk(table, 0, run.to_buffers()) for table, run in runs]
    part.body = part.commit.encode()


class _Rows:
    """The rows of one aggregate that a retraction touches. Call ``touch``, ``begin``, ``keep`` or ``see``, ``close``,
    ``add``, ``runs`` and ``completion``, in this order."""

    def __init__(self, aggregate: TableSchema, source: TableSchema, floor_us: int | None) -> None:
        self.aggregate = aggregate
        self.is_blocked = False
        self.by_commit = not is_combinable(aggregate)
        self.is_exact = all(map(_has_inverse, aggregate.columns))
        self._time = source.event_time or ""
        slots = [group.slot for group in aggregate.group_by if group.source == source.event_time and group.slot]
        self._slot = max(slots, key=lambda slot: slot.nominal_us) if slots else None
        since = aggregate.complete_since_us
        self._forgotten = floor_us if since is None or (floor_us is not None and since < floor_us) else None
        self._removed = Combining(aggregate, _FEW_ROWS)
        self._minus: DeltaRun | None = None
        self._touched: list[Any] = []
        self._spared: list[Any] = []
        self._times: list[tuple[int, int]] = []
        self._keys: Any = pa.array([], pa.large_binary())
        self._seen = np.zeros(0, np.bool_)
        self._state = Combining(aggregate, _FEW_ROWS)

    # The events that are removed.

    def touch(self, chunk: pa.RecordBatch, events: Events, run: DeltaRun | None) -> None:
        """These are removed; ``run`` is what they derive, if it ``is_exact``."""
        times = chunk.column(self._time).cast(pa.int64()).to_numpy()
        self._times.append((int(times.min()), int(times.max())))
        if run is not None:
            self._removed.add(run)
        else:
            self._touched.append(events.groups(self.aggregate).keys)
        if self._forgotten is None:
            return
        # Of a row that reaches below the floor there may have been other events.
        reaches = np.ones(len(times), np.bool_)
        if self._slot is not None:
            reaches = self._slot.starts(times) < self._forgotten
        if reaches.any() and self.is_exact:
            self._spared.append(Events(chunk.filter(pa.array(reaches))).groups(self.aggregate).keys)
        self.is_blocked |= bool(reaches.any()) and not self.is_exact

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The event times (from, before) of all events of these rows; None: any."""
        slot = self._slot
        if slot is None:
            return None
        low, high = min(low for low, _ in self._times), max(high for _, high in self._times)
        return slot.start(low), slot.end(slot.start(high))

    # The events that remain.

    def begin(self, floor_us: int | None) -> None:
        """All that are removed are known. Rows below the aggregate's own floor are left alone: nobody sees them."""
        if self.is_exact:
            self._minus = self._removed.result()
            self._keys = self._keys if self._minus is None else self._minus.keys
        else:
            self._keys = pc.unique(pa.chunked_array(self._touched, pa.large_binary()))
        if floor_us is not None and len(self._keys):
            self._keys = self._keys.filter(pa.array(~KeySlot.of(self.aggregate).below(self._keys, floor_us)))
            self._minus = None if self._minus is None else _selected(self._minus, self._keys)
        self._seen = np.zeros(len(self._keys), np.bool_)
        for keys in self._spared:
            self._seen |= _is_in(self._keys, keys)

    @property
    def is_open(self) -> bool:
        """Whether it has to look at more events."""
        return not (self.is_exact and bool(self._seen.all()))

    def see(self, events: Events) -> None:
        """These remain, of an aggregate that ``is_exact``."""
        self._seen |= _is_in(self._keys, events.groups(self.aggregate).keys)

    def mine(self, events: Events) -> Array:
        """Which of these events belong to the rows."""
        groups = events.groups(self.aggregate)
        return _is_in(groups.keys, self._keys)[groups.group_of]

    def keep(self, run: DeltaRun) -> None:
        """What the next events derive, of these rows and perhaps of others."""
        self._state.add(_selected(run, self._keys))

    def close(self) -> None:
        """There are no more: ``_keys`` are from here on those of the rows that begin anew."""
        if self.is_exact:
            keys, seen, minus = self._keys, self._seen, self._minus
            self._keys = keys.filter(pa.array(~seen))
            self._minus = None if minus is None or not seen.any() else _negated(minus, np.flatnonzero(seen))

    # What is added meanwhile.

    def _added(self, applied: dict[int, Applied]) -> list[DeltaRun]:
        """The deltas of the rows that begin anew, in the order of their commits."""
        table, found = self.aggregate.id, list[DeltaRun]()
        for _, one in sorted(applied.items(), key=lambda item: item[0]):
            runs = [run for of, run in one.runs if of == table]
            if rows := [(key, cts, dict(op.deltas)) for cts, of, key, op in one.rows if of == table]:
                runs.append(run_from_rows(self.aggregate, rows))
            for run in runs:
                mine = _selected(fitted(run, self.aggregate), self._keys)
                if mine.rows:  # whose states are to know the commit that they are of
                    cells = tuple(c.stamped(mine.cts) if isinstance(c, States) else c for c in mine.columns)
                    found.append(DeltaRun(mine.keys, mine.cts, cells, distinct=mine.distinct))
        return found

    def add(self, applied: dict[int, Applied]) -> int:
        """Adds the next commits. Returns how many rows of deltas that took."""
        runs = self._added(applied)
        for run in runs:
            self._state.add(with_cts(run, 0))
        return sum(run.rows for run in runs)

    def completion(self, applied: dict[int, Applied]) -> DeltaRun | None:
        """Deltas to come after ``runs``, at the same CTS: one after the other, since float sums are not combined."""
        runs = self._added(applied)
        if not runs:
            return None
        keys = pa.concat_arrays([run.keys for run in runs])
        order = pc.array_sort_indices(keys).to_numpy()  # stable
        columns = zip(*(run.columns for run in runs), strict=True)
        cells = tuple(joined_columns(parts).take(order) for parts in columns)
        return DeltaRun(keys.take(pa.array(order)), np.zeros(len(order), np.uint64), cells)

    def runs(self) -> list[DeltaRun]:
        """What the commit does to the rows."""
        found = [] if self._minus is None else [self._minus]
        ended, state = self._keys, self._state.result()
        if state is not None and state.rows:
            found.append(DeltaRun(state.keys, 0, state.columns, barrier=Barrier.RESTART))
            ended = ended.filter(pa.array(~_is_in(ended, state.keys)))
        if len(ended):
            ended = ended.take(pc.array_sort_indices(ended))
            cells = tuple(neutral_column(column, len(ended)) for column in self.aggregate.columns)
            found.append(DeltaRun(ended, 0, cells, barrier=Barrier.DELETE))
        return found


def _touch(every: Sequence[_Rows], chunk: pa.RecordBatch) -> None:
    """These events are removed."""
    events, exact = Events(chunk), [rows for rows in every if rows.is_exact]
    runs = dict(zip(exact, _derived([rows.aggregate for rows in exact], chunk), strict=True))
    for rows in every:
        rows.touch(chunk, events, runs.get(rows))


def _keep(every: Sequence[_Rows], chunk: pa.RecordBatch) -> None:
    """These events remain: whole commits, in order.

    Where many of them belong to touched rows, it is less work to derive all than to look for those; and all aggregates
    share it.
    """
    events, together_from = Events(chunk), list[_Rows]()
    stamps = chunk.column(STAMP)
    several = stamps[0] != stamps[-1]
    for rows in every:
        if rows.is_exact:
            if rows.is_open:
                rows.see(events)
            continue
        mine = rows.mine(events)
        count = np.count_nonzero(mine)
        by_commit = rows.by_commit and several
        if by_commit or _MANY * count < len(mine):
            if count:
                part = chunk if count == len(mine) else chunk.filter(pa.array(mine))
                rows.keep(_by_commit(rows.aggregate, part) if by_commit else _derived([rows.aggregate], part)[0])
        else:
            together_from.append(rows)
    runs = _derived([rows.aggregate for rows in together_from], chunk)
    for rows, run in zip(together_from, runs, strict=True):
        rows.keep(run)


def _selected(run: DeltaRun, keys: Any) -> DeltaRun:
    """The rows of a run with one of these keys."""
    inside = _is_in(run.keys, keys)
    if inside.all():
        return run
    at = np.flatnonzero(inside)
    mine = DeltaRun(
        run.keys.take(pa.array(at)),
        run.cts if isinstance(run.cts, int) else run.cts[at],
        tuple(column.take(at) for column in run.columns),
    )
    mine.distinct = run.distinct
    return mine


def _is_in(keys: Any, among: Any) -> Array:
    return pc.is_in(keys, value_set=among).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _has_inverse(column: Column) -> bool:
    """Whether what events added to it is taken away by one more delta."""
    return is_wide(column) or (column.state is not None and kind_of(column.state).invertible)


def _inverse(column: RunColumn) -> RunColumn:
    if isinstance(column, States):
        return column.inverted()
    low, high = column.limbs()
    return Cells.of_limbs(-low, -high)


def _negated(run: DeltaRun, rows: Array) -> DeltaRun:
    """The inverse of some rows, of columns that have one."""
    return DeltaRun(run.keys.take(pa.array(rows)), 0, tuple(_inverse(column.take(rows)) for column in run.columns))


def _derived(aggregates: Sequence[TableSchema], chunk: pa.RecordBatch) -> list[DeltaRun]:
    """What these events are for the aggregates: for measures that only have later events, nothing."""
    stamps = chunk.column(STAMP).to_numpy()
    order = Order(stamps, chunk.column(POSITION).to_numpy().astype(np.uint64))
    late = [one.cts for aggregate in aggregates for one in aggregate.alterations if not one.backfilled]
    if not aggregates or not late or int(stamps[0]) > max(late):
        return derive_all(aggregates, chunk, order=order) if aggregates else []
    cuts = [0, *np.searchsorted(stamps, np.array(sorted(set(late)), np.uint64), "right").tolist(), len(stamps)]
    parts: list[list[DeltaRun]] = []
    for low, high in itertools.pairwise(cuts):
        if low < high:
            then, whole = _before(aggregates, int(stamps[low])), Order(*(part[low:high] for part in order))
            runs = derive_all(then, chunk.slice(low, high - low), order=whole)
            parts.append([fitted(run, one) for run, one in zip(runs, aggregates, strict=True)])
    return [combine(one, [runs[i] for runs in parts]) for i, one in enumerate(aggregates)]


def _before(aggregates: Sequence[TableSchema], cts: int) -> list[TableSchema]:
    """The aggregates with those measures that have events of the commit at ``cts``."""
    found = []
    for one in aggregates:
        cut = next((added.columns for added in one.alterations if not added.backfilled and cts <= added.cts), None)
        if cut is not None:
            one = dataclasses.replace(
                one, columns=one.columns[:cut], measures=one.measures[:cut], derived=(), alterations=()
            )
        found.append(one)
    return found


def _by_commit(aggregate: TableSchema, chunk: pa.RecordBatch) -> DeltaRun:
    """A row for each key and commit, in that order: what these commits derive, each by itself.

    They are grouped by one more key column, the CTS, which is then cut off the keys.
    """
    by = dataclasses.replace(
        aggregate,
        key=(*aggregate.key, Column(STAMP, _INT)),
        group_by=(*aggregate.group_by, GroupKey(STAMP, STAMP)),
    )
    at = chunk.schema.get_field_index(STAMP)
    order = Order(chunk.column(STAMP).to_numpy(), chunk.column(POSITION).to_numpy().astype(np.uint64))
    (run,) = derive_all([by], chunk.set_column(at, STAMP, chunk.column(at).cast(pa.int64())), order=order)
    width = key_width([_INT]) or 0
    offsets = np.frombuffer(run.keys.buffers()[1], np.int64, run.rows + 1, 8 * run.keys.offset)
    lengths = np.diff(offsets)
    data = np.frombuffer(run.keys.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
    within = np.arange(len(data)) - np.repeat(offsets[:-1] - offsets[0], lengths)
    short = np.zeros(run.rows + 1, np.int64)
    np.cumsum(lengths - width, out=short[1:])
    keys = large_binary(short, data[within < np.repeat(lengths - width, lengths)])
    return with_cts(DeltaRun(keys, np.zeros(run.rows, np.uint64), run.columns), 0)


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
        held.append(batch)
        count += batch.num_rows
        if count >= rows:
            whole = together(held)
            stamps = whole.column(STAMP).to_numpy()
            cut = int(np.searchsorted(stamps, stamps[-1]))
            if cut:
                yield whole.slice(0, cut)
            held = [whole.slice(cut)]
            count = held[0].num_rows
    if count:
        yield together(held)
