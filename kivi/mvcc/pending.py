"""Pending: committed operations that are not in base yet, in memory, indexed by row.

Everything here is also in the commit log, from which it is rebuilt at open. An entry is invisible until the
watermark passes its CTS: readers ask for operations up to their S, and S <= W.

    rows     per table, key -> [(cts, RowOp), ...] in CTS order: small operations
    runs     per table, immutable delta runs, in CTS order: what bulk appends derived, or what was combined of it
    events   per table, Arrow record batches, each of one commit or of several that follow each other, in CTS order
    retracted  per table, the names of events that a retraction removed, in CTS order

**Readers take no lock** unless disturbed. A key's list is copied by one C call (``tuple(list)``); runs and events are
immutable tuples that are replaced. Scans take the mutex to list the keys of a range. Commits may be applied out of CTS
order (one was held up between its CTS and its finish), so inserting keeps the order; whatever is inserted late is above
every S that a reader can have, since W had not passed it. Where operations of a row become part of a run, both change
in one step: ``changes`` is odd while that is so and another number after it, and who saw either looks again.

**Capture order**: readers look here first and at base second; consolidation writes base first and drops from here
second. So an operation is seen in at least one of the two, and one that is seen in both is inert (R1).

``nbytes`` is what the budget counts: an estimate of the memory held. Writers wait for it in ``commit``.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter, itemgetter
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sortedcontainers import SortedDict

from kivi.arrow.dictionaries import held_bytes
from kivi.delta.ops import RowOp
from kivi.delta.runs import Array, DeltaRun
from kivi.mvcc.applied import ROW_BYTES, Applied, PendingEvents, Retracted
from kivi.mvcc.feed import Committed, Feed, Tap

__all__ = ["Pending", "TablePending"]

_FEED_BYTES = 64 << 20
"""So much may wait for followers, besides what is pending anyway: a fraction of a second of the fastest appends."""


def _row_bytes(key: bytes, op: RowOp) -> int:
    return ROW_BYTES + len(key) + op.varying_bytes


def _events_bytes(events: Iterable[PendingEvents]) -> int:
    return sum(held_bytes(item.batch) for item in events)


class TablePending:
    """The pending operations of one table. ``index`` is sorted by key. ``changed``: the newest CTS, also of those that
    were folded since."""

    __slots__ = ("changed", "changes", "events", "index", "retracted", "runs")

    def __init__(self) -> None:
        self.changed = 0
        self.changes = 0
        self.index: SortedDict[bytes, list[tuple[int, RowOp]]] = SortedDict()
        self.runs: tuple[DeltaRun, ...] = ()
        self.events: tuple[PendingEvents, ...] = ()
        self.retracted: tuple[Retracted, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.index or self.runs or self.events or self.retracted)

    def keep(self, key: bytes, ops: list[tuple[int, RowOp]]) -> None:
        """These are all that the row has from now on."""
        if ops:
            self.index[key] = ops
        else:
            del self.index[key]


_NOTHING = TablePending()
"""A table of which nothing is pending is read as this one."""


class Taps(Protocol):
    """Who is told of what is applied: a ``Tap``, for one."""

    def add(self, last: int, applied: Applied) -> None: ...


class Pending:
    """Thread safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._room = threading.Condition(self._mutex)
        self._tables: dict[int, TablePending] = {}
        self.nbytes = 0
        self.operations = 0
        self.applied_bytes = 0  # ever
        self.feed = Feed(_FEED_BYTES)
        self._taps: tuple[Taps, ...] = ()

    # -- commits --------------------------------------------------------------------------------

    def apply(self, last: int, applied: Applied) -> None:
        """The commits up to ``last`` that entered together are durable."""
        with self._mutex:
            index, of = None, 0
            for cts, table, key, op in applied.rows:
                if index is None or table != of:
                    index, of = self._table(table, last).index, table
                ops = index.get(key)
                if ops is None:
                    index[key] = [(cts, op)]
                elif ops[-1][0] < cts:  # readers look at the lists without the mutex: one that is in order only grows
                    ops.append((cts, op))
                else:
                    copied = list(ops)
                    insort(copied, (cts, op), key=_cts)
                    index[key] = copied
            if applied.events or applied.runs or applied.retracted:
                self._apply_columns(last, applied)
            nbytes = applied.nbytes
            self.nbytes += nbytes
            self.applied_bytes += nbytes
            self.operations += sum(map(len, applied))
            taps = self._taps
        for tap in taps:
            tap.add(last, applied)
        if self.feed.on:
            parts = applied.rows, applied.runs, applied.events, applied.retracted
            self.feed.add(Committed(last, *parts, nbytes))

    def _apply_columns(self, last: int, applied: Applied) -> None:
        for table, events in _by_table(applied.events):
            pending = self._table(table, last)
            pending.events = _in_order(pending.events, events, attrgetter("last"))
        for table, runs in _by_table(applied.runs):
            pending = self._table(table, last)
            pending.runs = _in_order(pending.runs, runs, _last_cts)
        for table, retracted in _by_table(applied.retracted):
            pending = self._table(table, last)
            pending.retracted = _in_order(pending.retracted, retracted, _cts)

    @contextmanager
    def tapped(self) -> Iterator[Tap]:
        """What is applied from now on, until it is closed."""
        tap = Tap()
        self.attach(tap)
        try:
            yield tap
        finally:
            self.detach(tap)

    def attach(self, tap: Taps) -> None:
        """``tap`` is told of what is applied from now on, by whoever applies it: it must be quick."""
        with self._mutex:
            self._taps = (*self._taps, tap)

    def detach(self, tap: Taps) -> None:
        with self._mutex:
            self._taps = tuple(other for other in self._taps if other is not tap)

    def wait_for_room(self, limit: int, timeout_s: float) -> bool:
        """Blocks while ``nbytes`` is over ``limit``. False when the time is up first."""
        if self.nbytes <= limit:
            return True
        with self._mutex:
            return self._room.wait_for(lambda: self.nbytes <= limit, timeout_s)

    def _table(self, table: int, last: int) -> TablePending:
        """Where to put what commits up to ``last`` do to it."""
        pending = self._tables.get(table)
        if pending is None:
            pending = self._tables[table] = TablePending()
        if pending.changed < last:
            pending.changed = last
        return pending

    # -- readers --------------------------------------------------------------------------------

    def changed_at(self, table: int) -> int:
        """No commit that was ever applied here, and is newer than that, changed the table."""
        return self._tables.get(table, _NOTHING).changed

    def ops(self, table: int, key: bytes, upto: int) -> list[tuple[int, RowOp]]:
        """The operations on one row with cts <= upto, in CTS order."""
        pending = self._tables.get(table)
        if pending is None:
            return []
        changes = pending.changes
        listed = tuple(pending.index.get(key) or ())
        runs = pending.runs
        if changes & 1 or changes != pending.changes:
            with self._mutex:
                listed = tuple(pending.index.get(key) or ())
                runs = pending.runs
        out = [*listed[: bisect_right(listed, upto, key=_cts)]]
        found = [
            (cts, RowOp(run.barrier, {}, run.deltas_at(i)))
            for run in runs
            for i in run.find(key)
            if (cts := run.cts_at(i)) <= upto
        ]
        if found:
            out = sorted([*out, *found], key=lambda item: item[0])
        return out

    def has_any(self, table: int, keys: pa.LargeBinaryArray) -> Array:
        """Of each of many rows, whether an operation on it is pending."""
        pending = self._tables.get(table, _NOTHING)
        found = np.zeros(len(keys), np.bool_)
        while True:
            changes = pending.changes
            index, runs = pending.index, pending.runs
            if len(index):
                found |= np.fromiter((key in index for key in keys.to_pylist()), np.bool_, len(keys))
            for run in runs:
                found |= pc.is_in(keys, value_set=run.keys).to_numpy(zero_copy_only=False)
            if not changes & 1 and changes == pending.changes:
                return found

    def runs_of(self, table: int) -> int:
        """How many delta runs a read of one of its rows searches."""
        return len(self._tables.get(table, _NOTHING).runs)

    def runs_above(self, table: int, cts: int) -> int:
        """How many delta runs are of later commits only."""
        return sum(run.first_cts > cts for run in self._tables.get(table, _NOTHING).runs)

    def newest(self, table: int, key: bytes) -> int:
        """The CTS of the newest operation on a row, visible or not; 0 if none is pending."""
        ops = self.ops(table, key, 2**63)
        return ops[-1][0] if ops else 0

    def capture(
        self, table: int, start: bytes | None, end: bytes | None, upto: int
    ) -> tuple[list[tuple[bytes, tuple[tuple[int, RowOp], ...]]], tuple[DeltaRun, ...]]:
        """For a scan of [start, end): the rows of the index in key order, and the runs as they are now."""
        pending = self._tables.get(table, _NOTHING)
        with self._mutex:
            keys = pending.index.irange(start, end, inclusive=(True, False))
            rows = [(key, tuple(pending.index[key])) for key in keys]
            runs = pending.runs
        return [(key, ops) for key, ops in rows if ops[0][0] <= upto], runs

    def events(self, table: int, upto: int) -> list[PendingEvents]:
        """The pending events of a table with cts <= upto, in commit order."""
        events = self._tables.get(table, _NOTHING).events
        return [cut for item in events if (cut := item.upto(upto)) is not None]

    def event_rows(self, table: int) -> int:
        """How many events are pending, visible or not."""
        return sum([item.batch.num_rows for item in self._tables.get(table, _NOTHING).events])

    def retracted(self, table: int, upto: int) -> list[Retracted]:
        """The pending retractions of a table with cts <= upto, in commit order."""
        return [one for one in self._tables.get(table, _NOTHING).retracted if one.cts <= upto]

    # -- consolidation --------------------------------------------------------------------------

    def tables(self) -> list[int]:
        with self._mutex:
            return [table for table, pending in self._tables.items() if not pending.empty]

    def dirty(self, table: int, upto: int) -> tuple[list[bytes], tuple[DeltaRun, ...]]:
        """The keys in the index with an operation at or below ``upto``, in key order, and the runs with one."""
        pending = self._tables.get(table, _NOTHING)
        with self._mutex:
            keys = [key for key, ops in pending.index.items() if ops[0][0] <= upto]
            return keys, tuple(run for run in pending.runs if run.first_cts <= upto)

    def row_ops(self, table: int, key: bytes) -> tuple[tuple[int, RowOp], ...]:
        return tuple(self._tables.get(table, _NOTHING).index.get(key, ()))

    def replace(
        self, table: int, runs: Sequence[DeltaRun], rows: Sequence[tuple[bytes, int, RowOp]], by: DeltaRun
    ) -> None:
        """These runs and operations (key, cts, op) are one run from now on, for every reader at once."""
        with self._mutex:
            pending = self._tables.get(table)
            if pending is None:  # dropped meanwhile
                return
            gone = set(map(id, runs))
            kept = tuple(run for run in pending.runs if id(run) not in gone)
            pending.changes += 1
            for key, cts, _ in rows:
                pending.keep(key, [item for item in pending.index[key] if item[0] != cts])
            pending.runs = _in_order(kept, [by], _last_cts)
            pending.changes += 1
            freed = sum(run.nbytes for run in runs) + sum(_row_bytes(key, op) for key, _, op in rows)
            self._release(freed - by.nbytes, len(runs) + len(rows) - 1)

    def drop_rows(self, table: int, keys: Iterable[bytes], upto: int) -> None:
        """Base has everything at or below ``upto`` for these keys."""
        with self._mutex:
            pending = self._tables.get(table, _NOTHING)
            for key in keys:
                ops = pending.index.get(key)
                if ops is None:
                    continue
                end = bisect_right(ops, upto, key=_cts)
                pending.keep(key, ops[end:])
                sizes: dict[int, int] = {}  # of those that many commits share, once
                nbytes = end * (ROW_BYTES + len(key))
                for _, op in ops[:end]:
                    size = sizes.get(id(op))
                    if size is None:
                        size = sizes[id(op)] = op.varying_bytes
                    nbytes += size
                self._release(nbytes, end)

    def drop_runs(self, table: int, upto: int) -> None:
        """Base has every run whose last CTS is at or below ``upto``."""
        with self._mutex:
            pending = self._tables.get(table, _NOTHING)
            gone = [run for run in pending.runs if run.last_cts <= upto]
            pending.runs = tuple(run for run in pending.runs if run.last_cts > upto)
            self._release(sum(run.nbytes for run in gone), len(gone))

    def drop_events(self, table: int, upto: int) -> None:
        """Blocks hold every event at or below ``upto``."""
        with self._mutex:
            pending = self._tables.get(table, _NOTHING)
            gone = [item for item in pending.events if item.first <= upto]
            left = [cut for item in gone if (cut := item.after(upto)) is not None]  # of those that it cuts
            pending.events = tuple(cut for item in pending.events if (cut := item.after(upto)) is not None)
            self._release(_events_bytes(gone) - _events_bytes(left), len(gone) - len(left))

    def drop_retracted(self, table: int, upto: int) -> None:
        """Blocks know of every retraction at or below ``upto``."""
        with self._mutex:
            pending = self._tables.get(table, _NOTHING)
            gone = [one for one in pending.retracted if one.cts <= upto]
            pending.retracted = tuple(one for one in pending.retracted if one.cts > upto)
            self._release(sum(one.names.nbytes for one in gone), len(gone))

    def drop_table(self, table: int) -> None:
        """The table is gone; so is what was pending for it."""
        with self._mutex:
            pending = self._tables.pop(table, None)
            if pending is not None:
                size = sum(_row_bytes(key, op) for key, ops in pending.index.items() for _, op in ops)
                size += sum(run.nbytes for run in pending.runs) + _events_bytes(pending.events)
                size += sum(one.names.nbytes for one in pending.retracted)
                count = sum(len(ops) for ops in pending.index.values()) + len(pending.runs) + len(pending.events)
                count += len(pending.retracted)
                self._release(size, count)

    def discard(self, cts: int) -> None:
        """The commit at ``cts`` turned out to have aborted (found while replaying); nobody has seen it."""
        with self._mutex:
            for pending in self._tables.values():
                for key, ops in tuple(pending.index.items()):
                    dropped = [op for at, op in ops if at == cts]
                    if dropped:
                        pending.keep(key, [item for item in ops if item[0] != cts])
                        self._release(sum(_row_bytes(key, op) for op in dropped), len(dropped))
                gone = [run for run in pending.runs if run.last_cts == cts]
                pending.runs = tuple(run for run in pending.runs if run.last_cts != cts)
                events = [item for item in pending.events if item.last == cts]
                pending.events = tuple(item for item in pending.events if item.last != cts)
                retracted = [one for one in pending.retracted if one.cts == cts]
                pending.retracted = tuple(one for one in pending.retracted if one.cts != cts)
                self._release(
                    sum(run.nbytes for run in gone)
                    + _events_bytes(events)
                    + sum(one.names.nbytes for one in retracted),
                    len(gone) + len(events) + len(retracted),
                )

    def _release(self, nbytes: int, operations: int) -> None:
        self.nbytes -= nbytes
        self.operations -= operations
        if nbytes > 0:
            self._room.notify_all()


_last_cts = attrgetter("last_cts")
_cts = itemgetter(0)


def _by_table(items: Iterable[tuple[int, Any]]) -> Iterable[tuple[int, list[Any]]]:
    """A commit may name tens of thousands of stages of one table: they are added at once."""
    found: dict[int, list[Any]] = {}
    for table, item in items:
        found.setdefault(table, []).append(item)
    return found.items()


def _in_order(items: tuple[Any, ...], added: list[Any], cts_of: Any) -> tuple[Any, ...]:
    """``added`` are in order."""
    if not items or cts_of(items[-1]) <= cts_of(added[0]):
        return (*items, *added)
    return tuple(sorted((*items, *added), key=cts_of))
