"""The verdict: may this transaction commit? First committer wins, per cell (R2, R4, R5, R8).

``Facts`` is a pure function of the commit records in log order: for each row written lately, the newest CTS of
each kind of write. A transaction with start timestamp S conflicts if a fact newer than S does not commute with
what it does::

    concurrent, same row   delta(c)   put(c)    put(c')   insert    delete    guard(c)   guard(E)
    delta(c)               ok         conflict  ok        conflict  conflict  conflict   conflict
    put(c)                 conflict   conflict  ok        conflict  conflict  conflict   conflict
    insert, delete         conflict   conflict  conflict  conflict  conflict  conflict   conflict
    guard(c)               conflict   conflict  ok        conflict  conflict  ok         ok
    guard(E)               conflict   conflict  conflict  conflict  conflict  ok         ok

Facts are kept in two generations. When the young one is full or old (by the records' own commit times, never a
clock), the old one is dropped and ``floor`` rises to the last CTS it knew; a transaction that began below the
floor cannot be judged and gets SnapshotTooOld, blind writes too. Rotation costs O(1), so no commit ever waits
for a sweep, and it is decided by the log alone, so a replica decides the same.

Every commit also guards the schema cell of each table that it names, so dropping a table conflicts with writers.
Rows of aggregates have no facts: nothing but deltas is ever written there, and a guard on one is checked
against the row's newest operation (``newest``), which is log state too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from kivi.delta.ops import Barrier, RowOp

__all__ = ["EXISTENCE", "Collision", "Facts", "Footprint", "Generations", "Guard"]

EXISTENCE: Final = -1
"""The column of a guard on the row's existence."""


class Guard(NamedTuple):
    table: int
    key: bytes
    column: int


class Footprint(NamedTuple):
    """The part of a transaction that a verdict looks at: its row operations and guards, implied ones included."""

    start_ts: int
    rows: Iterable[tuple[int, bytes, RowOp]]
    guards: Iterable[Guard]


class Generations(NamedTuple):
    """Facts up to ``floor`` are gone, those up to ``old_upto`` go next; which was decided at a time of the log."""

    floor: int
    old_upto: int
    rotated_us: int


class Collision(NamedTuple):
    table: int
    key: bytes
    column: int | None
    commit_ts: int


@dataclass(slots=True)
class _RowFacts:
    """Newest CTS of: insert or delete; any write at all; a guard on E; any guard; and per column."""

    restart: int = 0
    write: int = 0
    guard_row: int = 0
    guard_any: int = 0
    puts: dict[int, int] | None = None
    deltas: dict[int, int] | None = None
    guards: dict[int, int] | None = None

    def copy(self) -> _RowFacts:
        return _RowFacts(
            self.restart,
            self.write,
            self.guard_row,
            self.guard_any,
            dict(self.puts) if self.puts else None,
            dict(self.deltas) if self.deltas else None,
            dict(self.guards) if self.guards else None,
        )


_Row = tuple[int, bytes]


class Facts:
    """Not thread safe: lives under the committer's entry lock."""

    def __init__(self, floor: int, *, window_us: int, entries: int) -> None:
        self._window_us = window_us
        self._entries = entries
        self._young: dict[_Row, _RowFacts] = {}
        self._old: dict[_Row, _RowFacts] = {}
        self.generations = Generations(floor, floor, 0)
        self._last = floor
        self._aggregates: set[int] = set()
        self._aggregate_guards: dict[_Row, int] = {}

    def is_aggregate(self, table: int) -> None:
        """Rows of ``table`` take nothing but deltas derived from appends: guards on them are also kept apart."""
        self._aggregates.add(table)

    @property
    def floor(self) -> int:
        return self.generations.floor

    def restore(self, generations: Generations, noted: Iterable[tuple[int, Footprint]]) -> None:
        """Takes back what was noted above the floor of ``generations``: (CTS, what), ascending."""
        self.generations, self._last = generations, generations.floor
        for cts, footprint in noted:
            if cts > generations.old_upto and self._last <= generations.old_upto:
                self._old, self._young = self._young, {}
            self._note(footprint, cts)
        if self._last <= generations.old_upto:
            self._old, self._young = self._young, {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def check(self, footprint: Footprint, newest: Callable[[int, bytes], int | None]) -> Collision | None:
        """The first collision, or None. ``newest(table, key)`` is the CTS of an aggregate row's newest operation,
        or None if ``table`` is no aggregate. The caller has compared ``start_ts`` with ``floor``."""
        start, rows, guards = footprint
        young, old = self._young, self._old
        for table, key, op in rows:
            row = table, key
            facts = young.get(row) or old.get(row)
            if facts is not None and (hit := _write_collision(facts, op, start)) is not None:
                return Collision(table, key, *hit)
        for table, key, column in guards:
            stamp = newest(table, key)
            if stamp is not None and stamp > start:
                return Collision(table, key, None if column == EXISTENCE else column, stamp)
            facts = self._find((table, key))
            if facts is not None and (hit := _guard_collision(facts, column, start)) is not None:
                return Collision(table, key, *hit)
        return None

    def guarded(self, table: int, key: bytes) -> int:
        """The newest guard of any kind on a row: what a delta derived from an append is checked against."""
        facts = self._find((table, key))
        return facts.guard_any if facts else 0

    def guarded_rows(self, table: int, since: int) -> list[tuple[bytes, int]]:
        """The rows of one aggregate with a guard newer than ``since``: few, and looked up in a bulk run."""
        newest: dict[bytes, int] = {}
        for (guarded, key), stamp in self._aggregate_guards.items():
            if guarded == table and stamp > since:
                newest[key] = stamp
        return list(newest.items())

    def note(self, footprint: Footprint, cts: int, time_us: int) -> None:
        """A transaction entered the log at ``cts``; of several that write the same cells, the last is enough."""
        if len(self._young) >= self._entries // 2 or time_us - self.generations.rotated_us > self._window_us:
            self._rotate(time_us)
        self._note(footprint, cts)

    def _note(self, footprint: Footprint, cts: int) -> None:
        self._last = cts
        young = self._young
        for table, key, op in footprint.rows:
            row = table, key
            facts = young.get(row) or self._own(row)
            facts.write = cts
            if op.barrier is not Barrier.PATCH:
                facts.restart = cts
            else:
                _note_cells(facts, op, cts)
        for table, key, column in footprint.guards:
            facts = self._own((table, key))
            facts.guard_any = cts
            if table in self._aggregates:
                self._aggregate_guards[table, key] = cts
            if column == EXISTENCE:
                facts.guard_row = cts
            else:
                if facts.guards is None:
                    facts.guards = {}
                facts.guards[column] = cts

    def _rotate(self, time_us: int) -> None:
        self.generations = Generations(self.generations.old_upto, self._last, time_us)
        self._old, self._young = self._young, {}
        self._aggregate_guards = {row: cts for row, cts in self._aggregate_guards.items() if cts > self.floor}

    def _find(self, row: _Row) -> _RowFacts | None:
        return self._young.get(row) or self._old.get(row)

    def _own(self, row: _Row) -> _RowFacts:
        facts = self._young.get(row)
        if facts is None:
            old = self._old.get(row)
            facts = self._young[row] = old.copy() if old else _RowFacts()
        return facts


def _note_cells(facts: _RowFacts, op: RowOp, cts: int) -> None:
    """The cells that a PATCH writes."""
    if op.puts:
        if facts.puts is None:
            facts.puts = {}
        for column in op.puts:
            facts.puts[column] = cts
    if op.deltas:
        if facts.deltas is None:
            facts.deltas = {}
        for column in op.deltas:
            facts.deltas[column] = cts


def _write_collision(facts: _RowFacts, op: RowOp, start: int) -> tuple[int | None, int] | None:
    if op.barrier is not Barrier.PATCH:
        newest = max(facts.write, facts.guard_any)
        return (None, newest) if newest > start else None
    if facts.restart > start:
        return None, facts.restart
    if facts.guard_row > start:
        return None, facts.guard_row
    puts, deltas, guards = facts.puts or {}, facts.deltas or {}, facts.guards or {}
    for column in op.puts:
        newest = max(puts.get(column, 0), deltas.get(column, 0), guards.get(column, 0))
        if newest > start:
            return column, newest
    for column in op.deltas:
        newest = max(puts.get(column, 0), guards.get(column, 0))
        if newest > start:
            return column, newest
    return None


def _guard_collision(facts: _RowFacts, column: int, start: int) -> tuple[int | None, int] | None:
    if column == EXISTENCE:
        return (None, facts.write) if facts.write > start else None
    if facts.restart > start:
        return None, facts.restart
    newest = max((facts.puts or {}).get(column, 0), (facts.deltas or {}).get(column, 0))
    return (column, newest) if newest > start else None
