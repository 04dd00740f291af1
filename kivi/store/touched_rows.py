"""The rows of one aggregate that a retraction touches: found, computed again, completed (``kivi.store.retraction``).

What it costs follows the events that are removed and those of the rows that they touch: each chunk of the other events
is grouped, and the rest is done for the events of touched rows only. Chunks share their grouping among the aggregates.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.dictionaries import is_coded, plain, together
from kivi.delta.combine import Combining, combine, is_combinable
from kivi.delta.derive import Derivation, derive_all, run_from_rows
from kivi.delta.grouping import Events
from kivi.delta.ops import Barrier
from kivi.delta.runs import Array, Cells, DeltaRun, RunColumn, fitted, joined_columns, neutral_column, with_cts
from kivi.delta.sources import Order, columns_used
from kivi.delta.states import States
from kivi.encoding.base_rows import Version, is_wide
from kivi.encoding.event_names import POSITION, STAMP
from kivi.encoding.key_slots import KeySlot
from kivi.encoding.keys import key_width, large_binary
from kivi.model.schema import Column, GroupKey, TableSchema
from kivi.model.types import ColumnType
from kivi.mvcc.applied import Applied
from kivi.mvcc.groups import Single
from kivi.states.hashing import hashed
from kivi.states.registry import kind_of

__all__ = ["TouchedRows", "complete", "keep", "lean", "touch"]

_INT: Final = ColumnType("int64")
_FEW_ROWS: Final = 10_000
_MOST: Final = 2
"""A chunk is derived as it is if more than one event in two belongs to touched rows."""


class _Keys:
    """Distinct encoded keys. To look for others costs what those are, however many these are."""

    def __init__(self, keys: Any) -> None:
        self.keys = keys
        hashes = hashed(keys)
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]

    def positions(self, keys: Any) -> Array:
        """The place of each among these keys; -1: it is none of them."""
        found = np.full(len(keys), -1, np.int64)
        if not len(self._order):
            return found
        hashes, left = hashed(keys), np.arange(len(keys))
        at = np.searchsorted(self._hashes, hashes)
        while len(left):  # once, but for keys with the same hash
            alike = (at < len(self._hashes)) & (self._hashes[np.minimum(at, len(self._hashes) - 1)] == hashes[left])
            left, at = left[alike], at[alike]
            places = self._order[at]
            same = pc.equal(keys.take(pa.array(left)), self.keys.take(pa.array(places)))
            same = same.to_numpy(zero_copy_only=False)
            found[left[same]] = places[same]
            left, at = left[~same], at[~same] + 1
        return found

    def have(self, keys: Any) -> Array:
        """Whether each is one of these."""
        return self.positions(keys) >= 0

    def select(self, run: DeltaRun) -> DeltaRun:
        """The rows of a run with one of these keys."""
        inside = self.have(run.keys)
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


class TouchedRows:
    """The rows of one aggregate that a retraction touches. Call ``touch``, ``begin``, then ``see`` or ``keep`` and
    ``hold``, ``close``, ``add`` and ``runs``, in this order.

    ``portion``: so many events are derived at once.
    """

    def __init__(self, aggregate: TableSchema, source: TableSchema, floor_us: int | None, portion: int) -> None:
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
        self._starts: Array = np.zeros(0, np.int64)
        self._keys = _Keys(pa.array([], pa.large_binary()))
        self._seen = np.zeros(0, np.bool_)
        self._count = _count_of(aggregate)
        self._is_known = False
        self._state = Combining(aggregate, _FEW_ROWS)
        self._portion = portion
        self._held: list[pa.RecordBatch] = []
        self._held_rows = 0
        self._columns = [*columns_used([aggregate], source), STAMP, POSITION]

    # The events that are removed.

    def touch(self, chunk: pa.RecordBatch, events: Events, run: DeltaRun | None) -> None:
        """These are removed; ``run`` is what they derive, if it ``is_exact``."""
        times = chunk.column(self._time).cast(pa.int64()).to_numpy()
        if self._slot is not None:
            self._starts = np.union1d(self._starts, self._slot.starts(times))
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
            spared = Events(chunk.filter(pa.array(reaches)), are_stored=True)
            self._spared.append(spared.groups(self.aggregate).keys)
        self.is_blocked |= bool(reaches.any()) and not self.is_exact

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The event times (from, before) of all events of these rows; None: any."""
        if self._slot is None or not len(self._starts):
            return None
        return int(self._starts[0]), self._slot.end(int(self._starts[-1]))

    def may_have(self, first_us: int, last_us: int) -> bool:
        """Whether events of these rows may lie between two event times."""
        if self._slot is None:
            return True
        at = int(np.searchsorted(self._starts, self._slot.start(first_us)))
        return at < len(self._starts) and bool(self._starts[at] <= last_us)

    # The events that remain.

    def begin(self, floor_us: int | None) -> None:
        """All that are removed are known. Rows below the aggregate's own floor are left alone: nobody sees them."""
        keys = pc.unique(pa.chunked_array(self._touched, pa.large_binary()))
        if self.is_exact and (minus := self._removed.result()) is not None:
            self._minus, keys = minus, minus.keys
        visible = None
        if floor_us is not None and len(keys):
            visible = ~KeySlot.of(self.aggregate).below(keys, floor_us)
            keys = keys.filter(pa.array(visible))
        self._keys = _Keys(keys)
        if visible is not None and self._minus is not None:
            self._minus = self._keys.select(self._minus)
        self._seen = np.zeros(len(keys), np.bool_)
        for spared in self._spared:
            self._saw(spared)

    @property
    def few_keys(self) -> list[bytes] | None:
        """The keys of these rows, if the rows themselves say how many events they have, and reading them is quicker
        than reading the events: 10 us for each, where a block of a million events takes 100 ms."""
        if self._count is None or not self.is_exact or not 0 < len(self._keys.keys) <= _FEW_ROWS:
            return None
        keys: list[bytes] = self._keys.keys.to_pylist()
        return keys

    def know(self, rows: Sequence[Version | None]) -> None:
        """These are the rows of ``few_keys``: those that have more events than are removed have some that remain."""
        assert self._count is not None and self._minus is not None
        removed = self._minus.columns[self._count]
        assert isinstance(removed, Cells)
        low, high = removed.limbs()  # in the order of the keys
        held = [0 if row is None else row.cells[self._count] for row in rows]
        self._seen |= np.array(held, np.int64) > low + (high << 32)
        self._is_known = True

    @property
    def is_open(self) -> bool:
        """Whether it has to look at more events."""
        return not (self._is_known or (self.is_exact and bool(self._seen.all())))

    def see(self, events: Events) -> None:
        """These remain, of an aggregate that ``is_exact``."""
        self._saw(events.groups(self.aggregate).keys)

    def _saw(self, keys: Any) -> None:
        positions = self._keys.positions(keys)
        self._seen[positions[positions >= 0]] = True

    def mine(self, events: Events) -> Array:
        """Which of these events belong to the rows."""
        groups = events.groups(self.aggregate)
        return self._keys.have(groups.keys)[groups.group_of]

    def hold(self, chunk: pa.RecordBatch, mine: Array) -> None:
        """The next of these events, whole commits, of which so many belong to the rows that they are derived alone."""
        part = chunk.select(self._columns)
        self._held.append(lean(part if mine.all() else part.filter(pa.array(mine))))
        self._held_rows += self._held[-1].num_rows
        if self._held_rows >= self._portion:
            self._derive_held()

    def _derive_held(self) -> None:
        if self._held_rows:
            events = together(self._held)
            stamps = events.column(STAMP)
            if self.by_commit and stamps[0] != stamps[-1]:
                run = _by_commit(self.aggregate, events)
            else:
                (run,) = _derived([self.aggregate], events, _derivation(events))
            self._state.add(run)
        self._held, self._held_rows = [], 0

    def keep(self, run: DeltaRun) -> None:
        """What the next events derive, of these rows and of others."""
        self._state.add(self._keys.select(run))

    def close(self) -> None:
        """There are no more: ``_keys`` are from here on those of the rows that begin anew."""
        self._derive_held()
        if self.is_exact:
            seen, minus = self._seen, self._minus
            self._keys = _Keys(self._keys.keys.filter(pa.array(~seen)))
            self._minus = None if minus is None or not seen.any() else _negated(minus, np.flatnonzero(seen))

    # What is added meanwhile.

    def add(self, applied: dict[int, Applied]) -> int:
        """Adds the next commits. Returns how many rows of deltas that took."""
        runs = _added(self.aggregate, self._keys, applied)
        for run in runs:
            self._state.add(with_cts(run, 0))
        return sum(run.rows for run in runs)

    def runs(self) -> list[DeltaRun]:
        """What the commit does to the rows."""
        found = [] if self._minus is None else [self._minus]
        ended, state = self._keys.keys, self._state.result()
        if state is not None and state.rows:
            found.append(DeltaRun(state.keys, 0, state.columns, barrier=Barrier.RESTART))
            ended = ended.filter(pc.invert(pc.is_in(ended, value_set=state.keys)))
        if len(ended):
            ended = ended.take(pc.array_sort_indices(ended))
            cells = tuple(neutral_column(column, len(ended)) for column in self.aggregate.columns)
            found.append(DeltaRun(ended, 0, cells, barrier=Barrier.DELETE))
        return found


def complete(part: Single, schema_of: Callable[[int], TableSchema | None], applied: dict[int, Applied]) -> None:
    """Adds to the rows that begin anew, or end, in a retraction what other commits have added to them: deltas to come
    after those, at the same CTS, one after the other, since float sums are not combined."""
    begun: dict[int, list[Any]] = {}
    for table, run in part.runs:
        if run.barrier is not Barrier.PATCH:
            begun.setdefault(table, []).append(run.keys)
    for table, keys in begun.items():
        aggregate = schema_of(table)
        if aggregate is not None and (runs := _added(aggregate, _Keys(pa.concat_arrays(keys)), applied)):
            part.runs.append((table, _one_after_the_other(runs)))


def _one_after_the_other(runs: Sequence[DeltaRun]) -> DeltaRun:
    keys = pa.concat_arrays([run.keys for run in runs])
    order = pc.array_sort_indices(keys).to_numpy()  # stable
    columns = zip(*(run.columns for run in runs), strict=True)
    cells = tuple(joined_columns(parts).take(order) for parts in columns)
    return DeltaRun(keys.take(pa.array(order)), np.zeros(len(order), np.uint64), cells)


def _added(aggregate: TableSchema, keys: _Keys, applied: dict[int, Applied]) -> list[DeltaRun]:
    """The deltas of rows with these keys, in the order of their commits."""
    table, found = aggregate.id, list[DeltaRun]()
    for _, one in sorted(applied.items(), key=lambda item: item[0]):
        runs = [run for of, run in one.runs if of == table]
        if rows := [(key, cts, dict(op.deltas)) for cts, of, key, op in one.rows if of == table]:
            runs.append(run_from_rows(aggregate, rows))
        for run in runs:
            mine = keys.select(fitted(run, aggregate))
            if mine.rows:  # whose states are to know the commit that they are of
                cells = tuple(c.stamped(mine.cts) if isinstance(c, States) else c for c in mine.columns)
                found.append(DeltaRun(mine.keys, mine.cts, cells, distinct=mine.distinct))
    return found


def lean(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same, its text written out if it has fewer rows than that has values: to join those takes longer."""
    most = max((len(column.dictionary) for column in batch.columns if is_coded(column)), default=0)
    return plain(batch) if batch.num_rows < most else batch


def touch(every: Sequence[TouchedRows], chunk: pa.RecordBatch) -> None:
    """These events are removed."""
    events, exact = _derivation(chunk), [rows for rows in every if rows.is_exact]
    runs = dict(zip(exact, _derived([rows.aggregate for rows in exact], chunk, events), strict=True))
    for rows in every:
        rows.touch(chunk, events, runs.get(rows))


def keep(every: Sequence[TouchedRows], chunk: pa.RecordBatch) -> None:
    """These events remain: whole commits, in order.

    Where most of them belong to touched rows, all are derived: aggregates share the work.
    """
    events, most = _derivation(chunk), list[TouchedRows]()
    for rows in every:
        if rows.is_exact:
            if rows.is_open:
                rows.see(events)
            continue
        mine = rows.mine(events)
        count = np.count_nonzero(mine)
        if not rows.by_commit and _MOST * count > len(mine):
            most.append(rows)
        elif count:
            rows.hold(chunk, mine)
    runs = _derived([rows.aggregate for rows in most], chunk, events)
    for rows, run in zip(most, runs, strict=True):
        rows.keep(run)


def _count_of(aggregate: TableSchema) -> int | None:
    """The column that has counted every event of a row since the aggregate was created; None: there is none."""
    first = aggregate.measures[: aggregate.alterations[0].columns] if aggregate.alterations else aggregate.measures
    counts = (i for i, one in enumerate(first) if (one.operator, one.source, one.where) == ("count", None, None))
    return next(counts, None)


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


def _derivation(chunk: pa.RecordBatch) -> Derivation:
    return Derivation(chunk, _order(chunk), are_stored=True)


def _order(chunk: pa.RecordBatch) -> Order:
    return Order(*(chunk.column(name).to_numpy().astype(np.uint64, copy=False) for name in (STAMP, POSITION)))


def _derived(aggregates: Sequence[TableSchema], chunk: pa.RecordBatch, events: Derivation) -> list[DeltaRun]:
    """What the events of a chunk are for the aggregates: for measures that only have later events, nothing."""
    order = _order(chunk)
    stamps = order.stamps
    late = [one.cts for aggregate in aggregates for one in aggregate.alterations if not one.backfilled]
    if not aggregates or not late or int(stamps[0]) > max(late):
        return events.runs(aggregates)
    cuts = [0, *np.searchsorted(stamps, np.array(sorted(set(late)), np.uint64), "right").tolist(), len(stamps)]
    parts: list[list[DeltaRun]] = []
    for low, high in itertools.pairwise(cuts):
        if low < high:
            then, whole = _before(aggregates, int(stamps[low])), Order(*(part[low:high] for part in order))
            runs = derive_all(then, chunk.slice(low, high - low), order=whole, are_stored=True)
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
    stamped = chunk.set_column(at, STAMP, chunk.column(at).cast(pa.int64()))
    (run,) = _derived([by], stamped, _derivation(stamped))
    width = key_width([_INT]) or 0
    offsets = np.frombuffer(run.keys.buffers()[1], np.int64, run.rows + 1, 8 * run.keys.offset)
    lengths = np.diff(offsets)
    data = np.frombuffer(run.keys.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
    within = np.arange(len(data)) - np.repeat(offsets[:-1] - offsets[0], lengths)
    short = np.zeros(run.rows + 1, np.int64)
    np.cumsum(lengths - width, out=short[1:])
    keys = large_binary(short, data[within < np.repeat(lengths - width, lengths)])
    return with_cts(DeltaRun(keys, np.zeros(run.rows, np.uint64), run.columns), 0)
