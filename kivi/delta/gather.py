"""Gathering: the delta rows of many runs by key, folded into base rows in columns or handed out one by one.

``gather`` and ``Gathered.fold`` are consolidation's path, with no Python statement per delta; ``merged_items`` is a
scan's, lazy and row by row. They give what ``kivi.delta.ops.fold`` gives, to the last bit:

* Integers and decimals: folding splits deltas into limbs of 32 bits, which 2**31 rows cannot overflow, sums each
  limb by itself, and carries into the 128 bits of the base row.
* Floats are added strictly left to right, in CTS order starting from base, and deltas of two commits are never
  combined with each other. ``np.add.at`` adds in that order; ``np.add.reduceat`` does not. So the bits of a sum do
  not depend on how often consolidation ran.
* A fold that leaves the finite numbers stays inf or nan in base, and reading it is OutOfRange.

Pure: no I/O and no clock; timestamps are given.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, Final

import numpy as np

from kivi.delta.ops import Barrier, RowOp
from kivi.delta.order import Window, sorted_keys
from kivi.delta.runs import LIMB, LOW, Array, Cells, DeltaRun, RunColumn, joined_columns, neutral_of, ufunc_of
from kivi.delta.states import States
from kivi.encoding.base_rows import FieldRows, RowLayout, Rows, Version, is_wide
from kivi.model.schema import Column
from kivi.states.kinds import stretches

__all__ = [
    "Gathered",
    "barriers_of",
    "cells_of",
    "cut_at_barriers",
    "gather",
    "in_cts_order",
    "merged_items",
    "new_rows",
    "stamps_of",
]

_ITEMS_AT_ONCE: Final = 1_024
_COMMITS: Final = 16
"""So many commits of each row are folded in one step where every state is wanted."""
_first: Final = itemgetter(0)


# -- consolidation: runs -> base rows -------------------------------------------------------------


def gather(runs: Sequence[DeltaRun], start: bytes | None, limit: int, upto: int) -> Gathered:
    """The delta rows with cts <= ``upto`` of the first ``limit`` distinct keys >= ``start`` over all runs.

    Looks at as many rows of each run as are likely to be needed. Only keys below every run's first row that was
    not looked at are complete; if they are too few, it looks at more.
    """
    live = [run for run in runs if run.rows and run.first_cts <= upto]
    begins = [0 if start is None else run.lower(start) for run in live]
    look = max(64, 2 * limit // max(1, len(live)))
    while True:
        cuts = [run.key_at(at + look) for run, at in zip(live, begins, strict=True) if at + look < run.rows]
        stop = min(cuts, default=None)
        windows = [
            (run, range(at, run.lower(stop) if stop is not None else run.rows))
            for run, at in zip(live, begins, strict=True)
        ]
        keys, group_of, rows, stamps = _ordered([window for window in windows if window[1]], upto)
        if stop is None or len(keys) >= limit:
            break
        look *= 2 if len(keys) > limit // 2 else 4
    next_start = stop
    if len(keys) > limit:
        next_start = keys[limit]
        count = int(np.searchsorted(group_of, limit))
        keys, group_of, rows, stamps = keys[:limit], group_of[:count], rows[:count], stamps[:count]
    windows = [window for window in windows if window[1]]
    barriers = barriers_of(windows)
    return Gathered(
        keys, next_start, group_of, stamps, cells_of(windows, rows), None if barriers is None else barriers[rows]
    )


def _ordered(windows: Sequence[Window], upto: int) -> tuple[list[bytes], Array, Array, Array]:
    """The windows' rows with cts <= upto in (key, cts) order.

    Gives the distinct keys, and for each row the number of its key, its place among the rows of the windows one
    after the other, and its CTS.
    """
    empty = np.zeros(0, np.int64)
    if not windows:
        return [], empty, empty, np.zeros(0, np.uint64)
    stamps = stamps_of(windows)
    found = sorted_keys(windows)
    order, first = found.order, found.first
    keep = stamps[order] <= upto
    if not keep.all():
        number = np.cumsum(first)[keep]
        order = order[keep]
        first = np.ones(len(order), np.bool_)
        np.not_equal(number[1:], number[:-1], out=first[1:])
    if not len(order):
        return [], empty, empty, np.zeros(0, np.uint64)
    keys = found.listed(order[first])
    group_of, order, stamps = in_cts_order(np.cumsum(first) - 1, order, stamps[order])
    return keys, group_of, order, stamps


def in_cts_order(group_of: Array, order: Array, stamps: Array) -> tuple[Array, Array, Array]:
    """Rows in a stable order of their groups, with their stamps, in that of (group, CTS).

    They are already, unless the runs that they are from were not in CTS order.
    """
    if ((stamps[1:] < stamps[:-1]) & (group_of[1:] == group_of[:-1])).any():
        by_cts = np.lexsort((stamps, group_of))
        order, stamps = order[by_cts], stamps[by_cts]
    return group_of, order, stamps


def cells_of(windows: Sequence[Window], rows: Array) -> tuple[RunColumn, ...]:
    """The columns of some of the windows' rows, which are numbered one window after the other."""
    parts = zip(*([cells.take(slice(r.start, r.stop)) for cells in run.columns] for run, r in windows), strict=True)
    return tuple(joined_columns(part).take(rows) for part in parts)


def stamps_of(windows: Sequence[Window]) -> Array:
    """The CTS of each row of the windows, one window after the other."""
    return np.concatenate(
        [
            np.full(len(rows), run.cts, np.uint64) if isinstance(run.cts, int) else run.cts[rows.start : rows.stop]
            for run, rows in windows
        ]
    )


def barriers_of(windows: Sequence[Window]) -> Array | None:
    """The barrier of each row of the windows, one window after the other; None: no run has one."""
    if all(run.barrier is Barrier.PATCH for run, _ in windows):
        return None
    return np.concatenate([np.full(len(rows), run.barrier, np.uint8) for run, rows in windows])


def cut_at_barriers(group_of: Array, barriers: Array) -> tuple[Array, Array]:
    """Of rows in order of (group, CTS): which of them count, and which groups begin anew or are gone.

    Before the last barrier of a group nothing counts. A group that begins anew and of which no row counts is gone.
    """
    at = np.flatnonzero(barriers)
    last = np.zeros(int(group_of[-1]) + 1 if len(group_of) else 0, np.int64)
    last[group_of[at]] = at + 1
    counts = np.arange(len(group_of)) + 1 >= last[group_of]
    counts &= barriers != Barrier.DELETE
    return counts, np.flatnonzero(last)


def _numbered(changes: Array) -> Array:
    numbers = np.zeros(len(changes) + 1, np.int64)
    np.cumsum(changes, out=numbers[1:])
    return numbers


class Gathered:
    """Delta rows of some keys, ready to be folded into their base rows.

    ``keys`` are distinct and sorted; ``next_start`` is where to gather from next, None at the end.
    """

    __slots__ = ("_barriers", "_columns", "_group_of", "_stamps", "keys", "next_start")

    def __init__(
        self,
        keys: list[bytes],
        next_start: bytes | None,
        group_of: Array,
        stamps: Array,
        columns: tuple[RunColumn, ...],
        barriers: Array | None = None,
    ) -> None:
        self.keys = keys
        self.next_start = next_start
        self._group_of = group_of  # number of the key, ascending
        self._stamps = stamps  # ascending within a key
        self._columns = columns
        self._barriers = barriers  # None: there are none

    @property
    def rows(self) -> int:
        """How many delta rows of the keys there are."""
        return len(self._stamps)

    @property
    def may_end_rows(self) -> bool:
        """Whether folding may give tombstones."""
        return self._barriers is not None

    def changed(self, base: Sequence[bytes | None]) -> list[int]:
        """Which keys may have had another state before: those of all but the rows that are new, and were written
        once."""
        several = np.bincount(self._group_of, minlength=len(base)) > 1
        several |= np.array([row is not None for row in base], np.bool_)
        return np.flatnonzero(several).tolist()

    def fold(self, layout: RowLayout, base: Sequence[bytes | None], upto: int) -> list[bytes | None]:
        """New base rows: ``base`` (one per key; None or a tombstone is the identity) and its later deltas.

        A row is stamped with the newest CTS that was folded into it; None where there was nothing to fold; a tombstone
        where a barrier ended it. It takes a
        17th of the time of ``merged_items`` and ``ops.fold`` (decision 0014).
        """
        old, alive, rows = self._unfolded(layout, base, upto)
        target, new, ended = self._folded(layout, old, alive, self._group_of[rows], rows)
        if len(target) == len(base):
            return [*layout.bytes_of(new)]
        out: list[bytes | None] = [None] * len(base)
        for i, row in itertools.chain(zip(target.tolist(), layout.bytes_of(new), strict=True), ended):
            out[i] = row
        return out

    def states(self, layout: RowLayout, base: Sequence[bytes | None]) -> Iterator[tuple[list[int], list[bytes]]]:
        """Every state of the rows after ``base``, a key's oldest first: the keys' numbers, and the states.

        Of each key some commits at a time, all keys together. Folding the first of them, the first two and so on is
        quadratic in how many, but one step: 500 commits to 25 rows take 39 ms instead of 304 (decision 0014).
        """
        old, alive, rows = self._unfolded(layout, base, int(self._stamps.max(initial=0)))
        old = old.copy()
        group_of, stamps = self._group_of[rows], self._stamps[rows]
        commits = np.ones(len(rows), np.bool_)
        commits[1:] = (group_of[1:] != group_of[:-1]) | (stamps[1:] != stamps[:-1])
        begins = np.flatnonzero(commits)  # of each commit of a key: its first row
        ends = np.append(begins[1:], len(rows))
        key_of = group_of[begins]
        place = np.arange(len(begins)) - np.searchsorted(key_of, key_of)
        step_of = place // _COMMITS
        steps = np.argsort(step_of, kind="stable")  # not looked for in each step: a row may have very many commits
        for step, now in enumerate(np.split(steps, np.cumsum(np.bincount(step_of))[:-1]) if len(steps) else ()):
            since = begins[now - place[now] + step * _COMMITS]
            lengths = ends[now] - since
            several = np.repeat(np.arange(len(now)), lengths)
            states, is_alive = layout.taken(old, key_of[now]), alive[key_of[now]]
            target, new, ended = self._folded(layout, states, is_alive, several, rows[stretches(since, lengths)])
            encoded = dict(ended)
            encoded.update(zip(target.tolist(), layout.bytes_of(new), strict=True))
            yield key_of[now].tolist(), [encoded[i] for i in range(len(now))]
            layout.put(states, target, new)
            is_alive[target] = True
            last = np.append(np.flatnonzero(np.diff(key_of[now])), len(now) - 1)
            layout.put(old, key_of[now][last], states[last])
            alive[key_of[now][last]] = is_alive[last]

    def _unfolded(self, layout: RowLayout, base: Sequence[bytes | None], upto: int) -> tuple[Array, Array, Array]:
        """Base rows in columns, which of them are alive, and which delta rows up to ``upto`` they do not have yet."""
        old, present = _decoded(layout, base)
        alive = present & (old["flags"] & 1 == 1)
        after = self._stamps <= upto
        after &= (self._stamps > old["cts"][self._group_of]) | ~present[self._group_of]
        return old, alive, np.flatnonzero(after)

    def _folded(
        self, layout: RowLayout, old: Array, alive: Array, group_of: Array, rows: Array
    ) -> tuple[Array, Array, list[tuple[int, bytes]]]:
        """Some delta rows folded into ``old``, each into the one that ``group_of`` numbers: which have a new row, those
        rows, and the tombstones of others.

        What begins anew is not ``alive`` from here on.
        """
        ended = list[tuple[int, bytes]]()
        if self._barriers is not None and len(rows):
            counts, anew = cut_at_barriers(group_of, self._barriers[rows])
            alive[anew] = False
            gone = np.setdiff1d(anew, group_of[counts])
            stamps = self._stamps[rows[np.searchsorted(group_of, gone, "right") - 1]]
            pairs = zip(gone.tolist(), stamps.tolist(), strict=True)
            ended = [(i, layout.encode(Version(stamp, False, ()))) for i, stamp in pairs]
            group_of, rows = group_of[counts], rows[counts]
        if not len(rows):
            return rows, old[:0], ended
        columns = (
            self._columns
            if len(rows) == self.rows and np.array_equal(rows, np.arange(self.rows))
            else tuple(cells.take(rows) for cells in self._columns)
        )
        target, new = new_rows(layout, old, alive, group_of, self._stamps[rows], columns)
        return target, new, ended


def new_rows(
    layout: RowLayout, old: Rows, alive: Array | None, group_of: Array, stamps: Array, columns: Sequence[RunColumn]
) -> tuple[Array, Rows]:
    """Delta rows folded over ``old``, the base rows of their groups: which groups have any, and their new rows.

    At least one delta row; those of a group one after the other, in order of their ``stamps``; all of them count. A row
    that is not ``alive`` is the identity; None: those are alive whose flags say so.
    """
    steps = _Steps(group_of[1:] != group_of[:-1])
    target = group_of[steps.starts]
    new = layout.taken(old, target)
    was_alive = new["flags"] & 1 == 1 if alive is None else alive[target]
    if not was_alive.all():
        layout.clear(new, ~was_alive)
    new["cts"] = stamps[steps.ends]
    new["flags"] = layout.alive
    for i, column in enumerate(layout.columns):
        nulls, bit, cells = new["nulls"][:, i >> 3], i & 7, columns[i]
        was_null = nulls & 1 << bit
        nulls ^= was_null
        if isinstance(cells, States):
            _fold_states(new, i, steps, cells.stamped(stamps))
        elif is_wide(column):
            _fold_exact(new, i, steps, cells)
        elif column.operator == "sum":
            _fold_floats(new, i, steps, cells)
        else:
            seen = _fold_extremes(new, i, column, steps, cells, was_alive & (was_null == 0))
            nulls |= (~seen).astype(np.uint8) << bit
    return target, new


class _Steps:
    """Rows sorted by target: where each target's rows start and which is its last. ``changes``: whether each row but
    the first is of another target than the one before it."""

    __slots__ = ("_changes", "ends", "starts")

    def __init__(self, changes: Array) -> None:
        self._changes = changes
        self.starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
        self.ends = np.append(self.starts[1:], len(changes) + 1) - 1

    @property
    def target_of(self) -> Array:
        """The number of each row's target."""
        return _numbered(self._changes)


def _decoded(layout: RowLayout, base: Sequence[bytes | None]) -> tuple[Array, Array]:
    """Base rows as one structured array, zeros where there is none, and which there are."""
    if not layout.in_columns or any(column.operator is None for column in layout.columns):
        raise TypeError("only rows of delta columns alone are folded in columns")
    blank = bytes(layout.width)
    if layout.number:  # there may be rows of before an alteration
        base = [row if row is None else layout.current(row) for row in base]
    return layout.rows_of([blank if row is None else row for row in base]), np.array(
        [r is not None for r in base], np.bool_
    )


def _fold_states(new: Array | FieldRows, i: int, steps: _Steps, cells: States) -> None:
    """The bag of the base row, then those of the deltas in CTS order, reduced together."""
    base = States.decoded(cells.kind, [state or b"" for state in new[f"c{i}"].tolist()])
    added = States(cells.kind, cells.offsets[np.append(steps.starts, len(cells))], cells.items)
    new[f"c{i}"] = np.fromiter(base.followed_by(added).encoded(), object, len(base))


def _fold_exact(new: Array | FieldRows, i: int, steps: _Steps, cells: Cells) -> None:
    """128 bits += limbs. Each limb is summed by itself, below 2**63; then low, middle and top are added with carry."""
    before = new[f"c{i}_lo"]
    if cells.high is None and len(steps.starts) == len(cells.values):  # each is an int64, and alone
        after = before + cells.values.view(np.uint64)
        new[f"c{i}_hi"] += (cells.values >> 63) + (after < before)
        new[f"c{i}_lo"] = after
        return
    low, high = cells.limbs()
    low_sum = np.add.reduceat(low, steps.starts).view(np.uint64)
    mid_sum = np.add.reduceat(high & LOW, steps.starts).view(np.uint64)
    top = np.add.reduceat(high >> LIMB, steps.starts)
    shift = np.uint64(LIMB)
    first = before + low_sum
    after = first + (mid_sum << shift)
    carry = (first < before).astype(np.int64) + (after < first) + (mid_sum >> shift).view(np.int64)
    new[f"c{i}_lo"] = after
    new[f"c{i}_hi"] += top + carry


def _fold_floats(new: Array | FieldRows, i: int, steps: _Steps, cells: Cells) -> None:
    sums = new[f"c{i}"].copy()
    with np.errstate(over="ignore", invalid="ignore"):
        np.add.at(sums, steps.target_of, cells.values)
    new[f"c{i}"] = sums


def _fold_extremes(new: Array | FieldRows, i: int, column: Column, steps: _Steps, cells: Cells, had: Array) -> Array:
    """Which rows have a value now."""
    pick, neutral, values = ufunc_of(column), neutral_of(column), cells.values
    seen = had
    if cells.valid is None:
        seen = np.ones(len(had), np.bool_)
    else:
        values = np.where(cells.valid, values, neutral)
        seen = had | np.logical_or.reduceat(cells.valid, steps.starts)
    best = pick(np.where(had, new[f"c{i}"], neutral), pick.reduceat(values, steps.starts))
    new[f"c{i}"] = np.where(seen, best, 0)
    return seen


# -- scans ----------------------------------------------------------------------------------------


def merged_items(
    runs: Sequence[DeltaRun], start: bytes | None, end: bytes | None, upto: int
) -> Iterator[tuple[bytes, list[tuple[int, RowOp]]]]:
    """(key, [(cts, operation), ...]) of start <= key < end in key order, operations with cts <= upto in CTS order.

    Lazy: it looks at no more rows than are asked for, and some more of each run.
    """
    live = [run for run in runs if not isinstance(run.cts, int) or run.cts <= upto]
    streams = [_stream(run, number, run.slice_range(start, end), upto) for number, run in enumerate(live)]
    for key, found in itertools.groupby(heapq.merge(*streams), _first):
        yield key, [(cts, RowOp(live[number].barrier, {}, deltas)) for _, cts, number, deltas in found]


def _stream(run: DeltaRun, number: int, rows: range, upto: int) -> Iterator[tuple[bytes, int, int, dict[int, Any]]]:
    """``number`` keeps the merge from ever comparing deltas."""
    for at in range(rows.start, rows.stop, _ITEMS_AT_ONCE):
        for key, cts, deltas in run.items(range(at, min(at + _ITEMS_AT_ONCE, rows.stop))):
            if cts <= upto:
                yield key, cts, number, deltas
