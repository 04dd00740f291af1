"""Rows of sums that are looked at again and again, in memory, as they are at the newest snapshot.

Rules look at rows of aggregates, and publications at how many subscriptions ask for what (``kivi.live.index``).

A stream asks for the rows of the same endpoints' previous slots with every commit, thousands at a time. Reading each
from pending and base takes some 10 us, many times as long as appending the event. So they stay here, in columns, and
follow the commits: what is applied to their aggregate is added by the fold of consolidation
(``kivi.delta.gather.new_rows``), so they are what a read would give, to the last bit.

**The invariant.** At ``ts`` each row that is known is what a read at ``ts`` gives; of an aggregate that is known whole
there are no others. Rows come in by reads; whatever is applied after ``ts`` is held (``add``) from before the first
read on, and folded in CTS order when a newer snapshot is asked for (``advance``). What was applied before anything was
held had entered the log by then, so nothing is taken from a snapshot that may not have all of it (``after``). When rows
begin anew, as after a retraction, all are forgotten.

An aggregate of up to ``_ROWS_MAX`` rows is known whole, from one scan; of a larger one only what was asked for. A
snapshot older than ``ts`` is answered by reading. What is held and known is bounded: beyond that it is forgotten.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kivi.delta.derive import run_from_rows
from kivi.delta.gather import cells_of, new_rows, stamps_of
from kivi.delta.key_index import KeyIndex
from kivi.delta.ops import Barrier
from kivi.delta.overlay import FixedRows
from kivi.delta.runs import DeltaRun, fitted
from kivi.encoding.base_rows import RowLayout, Version
from kivi.model.schema import TableSchema
from kivi.mvcc.applied import Applied
from kivi.mvcc.leases import Lease
from kivi.mvcc.pending import Pending
from kivi.mvcc.snapshot import Reader

__all__ = ["KnownRows", "add_run"]

Array = Any
_KEYS_MIN: Final = 64
"""Fewer rows than that are read, unless the aggregate is followed already."""
_ROWS_MAX: Final = 1 << 18
"""About 60 MB."""
_INDEX_BYTES_MAX: Final = 1 << 26
"""That many rows with keys of 200 bytes."""
_HELD_ROWS_MAX: Final = 1 << 21
_PORTION: Final = 16_384


class KnownRows:
    """Thread safe. ``lock`` is held from opening a snapshot on until its rows were asked for, so that snapshots do not
    overtake each other. ``last``: the last CTS that has entered the log."""

    def __init__(self, pending: Pending, reader: Reader, last: Callable[[], int], most: int = _ROWS_MAX) -> None:
        """``most``: about so many rows of a table are known at a time, and up to twice as many for a moment."""
        self.lock = threading.Lock()
        self._pending, self._reader, self._last, self._most = pending, reader, last, most
        self._followed: dict[int, _Followed] = {}

    def rows(self, lease: Lease, schema: TableSchema, keys: pa.LargeBinaryArray) -> Array:
        """Rows of ``RowLayout.dtype`` at the snapshot, which the caller may change; zeros where there is none. ``keys``
        are distinct."""
        layout = RowLayout.of(schema)
        followed = self._followed_of(schema, len(keys))
        if followed is None or not followed.advance(lease.ts):
            return _read(self._reader, lease, schema, layout, keys.to_pylist())
        if not followed.index.last and not followed.is_large:
            followed.fill(
                self._reader.scan_portions(lease, schema, None, None, few=0, first_rows=_PORTION, rows=_PORTION)
            )
        if followed.index.last + len(keys) > 2 * self._most or followed.index.nbytes > _INDEX_BYTES_MAX:
            followed.forget()
        at = followed.index.find(keys)
        if not followed.whole and len(missing := np.flatnonzero(at == 0)):
            wanted = keys.take(pa.array(missing))
            at[missing] = followed.put(wanted, _read(self._reader, lease, schema, layout, wanted.to_pylist()))
        return layout.taken(followed.rows, at)

    def _followed_of(self, schema: TableSchema, keys: int) -> _Followed | None:
        found = self._followed.get(schema.id)
        if found is not None and (found.overflowed or found.schema.columns != schema.columns):
            self._pending.detach(found)
            del self._followed[schema.id]
            found = None
        if found is None and keys >= _KEYS_MIN and all(c.operator or c.state for c in schema.columns):
            found = self._followed[schema.id] = _Followed(schema, self._most)
            self._pending.attach(found)
            found.after = self._last()
        return found


def _read(reader: Reader, lease: Lease, schema: TableSchema, layout: RowLayout, keys: list[bytes]) -> Array:
    blank, columns = bytes(layout.width), len(layout.columns)
    versions = reader.get(lease, schema, keys)
    return layout.rows_of(
        [blank if v is None else layout.encode(v._replace(cells=v.cells[:columns])) for v in versions]
    ).copy()


class _Followed:
    """One aggregate. ``add`` is called by whoever applies commits; all else under the lock of ``KnownRows``."""

    def __init__(self, schema: TableSchema, most: int) -> None:
        self.schema, self._most = schema, most
        self.layout = RowLayout.of(schema)
        self.after = 0
        self.overflowed = False
        self.ts = 0
        self.whole = self.is_large = False
        self.index = KeyIndex()
        self.rows = np.zeros(1_024, self.layout.dtype)
        """The first is no row: that of the keys that are not in ``index``."""
        self._mutex = threading.Lock()
        self._held: list[tuple[int, list[Any], list[DeltaRun]]] = []
        self._held_rows = 0

    def add(self, last: int, applied: Applied) -> None:
        table = self.schema.id
        rows = [(cts, key, op) for cts, of, key, op in applied.rows if of == table]
        runs = [run for of, run in applied.runs if of == table]
        if (rows or runs) and not self.overflowed:
            with self._mutex:
                self._held.append((last, rows, runs))
                self._held_rows += len(rows) + sum(run.rows for run in runs)
                if self._held_rows > min(_HELD_ROWS_MAX, 8 * self._most):
                    self.overflowed = True
                    self._held = []

    def forget(self) -> None:
        self.whole = False
        self.index = KeyIndex()
        self.rows = np.zeros(1_024, self.layout.dtype)

    def fill(self, portions: Iterator[FixedRows | list[tuple[bytes, Version]]]) -> None:
        """All rows as of ``ts``, unless they are too many."""
        for portion in portions:
            if isinstance(portion, list):
                encoded = [self.layout.encode(version) for _, version in portion]
                keys = pa.array([key for key, _ in portion], pa.large_binary())
                self.put(keys, self.layout.rows_of(encoded))
            else:
                self.put(portion.keys, portion.rows)
            if self.index.last > self._most or self.index.nbytes > _INDEX_BYTES_MAX:
                self.forget()
                self.is_large = True
                return
        self.whole = True

    def put(self, keys: pa.LargeBinaryArray, rows: Array) -> Array:
        """Rows as of ``ts`` of keys that are not known; where they are."""
        at = self._added(keys)
        self.rows[at] = rows
        return at

    def _added(self, keys: pa.LargeBinaryArray) -> Array:
        """Where the rows of these keys are; one that is not known has none yet."""
        at = self.index.add(keys)
        if self.index.last >= len(self.rows):
            grown = np.zeros(max(self.index.last + 1, 2 * len(self.rows)), self.layout.dtype)
            grown[: len(self.rows)] = self.rows
            self.rows = grown
        return at

    def advance(self, ts: int) -> bool:
        """Brings what is known to ``ts``. False if that snapshot has to be read."""
        if ts < self.ts or ts < self.after:
            return False
        with self._mutex:
            due = sorted((one for one in self._held if one[0] <= ts), key=lambda one: one[0])
            self._held = [one for one in self._held if one[0] > ts]
            self._held_rows -= sum(len(rows) + sum(run.rows for run in runs) for _, rows, runs in due)
        if self.overflowed:
            return False
        for _, rows, runs in due:
            for run in runs:
                if run.barrier is Barrier.PATCH:
                    self._add(fitted(run, self.schema))
                else:
                    self.forget()
            if any(op.barrier is not Barrier.PATCH or op.puts for _, _, op in rows):
                self.forget()
            elif rows:
                self._add(run_from_rows(self.schema, [(key, cts, dict(op.deltas)) for cts, key, op in rows]))
        self.ts = ts
        return True

    def _add(self, run: DeltaRun) -> None:
        at = self._added(run.keys) if self.whole else self.index.find(run.keys)  # may make room for more rows
        _fold(self.layout, self.rows, at, run)


def add_run(layout: RowLayout, rows: Array, index: KeyIndex, run: DeltaRun) -> None:
    """Folds a run's deltas over those of the rows that have a number in ``index``, where the first has 1, in their CTS
    order."""
    _fold(layout, rows, index.find(run.keys), run, 1)


def _fold(layout: RowLayout, rows: Array, at: Array, run: DeltaRun, first: int = 0) -> None:
    """``at``: where each delta's row is, counted from ``first``; 0: nowhere."""
    known = np.flatnonzero(at)
    if not len(known):
        return
    windows = [(run, range(run.rows))]
    stamps, places = stamps_of(windows), at - first
    every = len(known) == run.rows
    if not every:
        stamps, places = stamps[known], places[known]
    group_of = np.arange(len(known))
    if not run.distinct:
        order = np.lexsort((stamps, places))
        known, stamps, target_of = known[order], stamps[order], places[order]
        is_first = np.ones(len(known), np.bool_)
        np.not_equal(target_of[1:], target_of[:-1], out=is_first[1:])
        places, group_of, every = target_of[is_first], np.cumsum(is_first) - 1, False
    old = layout.taken(rows, places)
    cells = run.columns if every else cells_of(windows, known)
    _, new = new_rows(layout, old, old["flags"] & 1 == 1, group_of, stamps, cells)
    layout.put(rows, places, new)
