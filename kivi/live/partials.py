"""Partial results: what a rollup that is subscribed to is kept up from.

::

    deltas of commits --add_deltas--> partial results, in memory --those of touched rows--> rows of the result
    rows to be read again ---roll---/                    |
                                     slots that leave the range are let go

So a tick works for what its commits changed, and for the partial results of the rows of the result that this belongs
to, however many rows of the table these are made of. The *level* of the partial results is the coarsest one from which
the result can be had exactly:

* that of the result, whose rows are states that combine (R20): a delta of a row of the table is one of that row;
* with its slots besides, where slots leave: at the end of the ``last`` time, and below a retention floor. A state like
  a maximum cannot be subtracted, so those that stay are combined again;
* the rows of the table, where a sum of floats has to be added in the order of their keys, or where a predicate asks
  about measures, so that a row may come and go.

**Invariants.** After ``advance`` to a snapshot S the partial results are what a rollup to their level gives at S. A
delta is added once: those of the commits after the snapshot that they were read at, and no others (``Group``). What
deltas do not say (a retraction; rows that changed while this was being read) is read again, which may be done twice. A
row is added to by its deltas in CTS order, as folding does it, so sums of floats have the same bits.

**Memory.** About ``_ROW_BYTES`` and the row itself, with its states, for each partial result; ``WINDOW_BYTES`` of one
subscription's query, ``TABLE_BYTES`` of all of a table's. Where that does not suffice nothing is kept, and the rows of
the result that changed are read again (``kivi.live.rollups``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.delta.combine import is_combinable
from kivi.delta.derive import run_from_rows
from kivi.delta.gather import cells_of, in_cts_order, stamps_of
from kivi.delta.ops import Barrier, are_deltas
from kivi.delta.order import sorted_keys
from kivi.delta.overlay import FixedRows
from kivi.delta.rolling import Rolling
from kivi.delta.runs import Array, DeltaRun, fitted
from kivi.encoding.base_rows import RowLayout
from kivi.encoding.key_slots import KeySlot
from kivi.errors import KiviError
from kivi.model.expressions import Expr, all_of, names, terms_of
from kivi.model.rollups import Ends, range_of_last, rolled_schema, stored_slot
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.mvcc.feed import Committed
from kivi.store.key_ranges import key_range
from kivi.store.rollups import RolledUp, Selection

__all__ = ["TABLE_BYTES", "WINDOW_BYTES", "Partials", "deltas_of", "partials_of"]

WINDOW_BYTES: Final = 128 << 20
TABLE_BYTES: Final = 256 << 20
_ROW_BYTES: Final = 500
"""Of a partial result, besides its row: its key twice, and its places in dictionaries and sets."""
_PLACES_MIN: Final = 64


def deltas_of(schema: TableSchema, commits: Iterable[Committed]) -> tuple[DeltaRun | None, set[bytes]]:
    """What commits added to the rows of an aggregate, in order of (key, CTS), and the rows of which that is not all."""
    rows, runs, others = [], [], set()
    for commit in commits:
        plain = not commit.retracted  # what a retraction leaves empty is gone
        for cts, of, key, op in commit.rows:
            if of == schema.id:
                if plain and are_deltas((op,)):
                    rows.append((key, cts, dict(op.deltas)))
                else:
                    others.add(key)
        for of, run in commit.runs:
            if of == schema.id:
                if plain and run.barrier is Barrier.PATCH:
                    runs.append(fitted(run, schema))
                else:
                    others.update(run.listed(range(run.rows)))
    if rows:
        runs.append(run_from_rows(schema, rows))
    windows = [(run, range(run.rows)) for run in runs if run.rows]
    if not windows:
        return None, others
    found = sorted_keys(windows)
    _, order, stamps = in_cts_order(np.cumsum(found.first) - 1, found.order, stamps_of(windows)[found.order])
    return DeltaRun(found.array(found.order), stamps, cells_of(windows, order)), others


def partials_of(schema: TableSchema, scan: Scan) -> Partials | None:
    """None: the result has to be read from the table's rows, whatever changes."""
    rollup, slot = scan.rollup, stored_slot(schema)
    assert rollup is not None
    terms = terms_of(scan.where)
    judged = all_of(*(term for term in terms if not names(term) <= {*schema.key_names}))
    level = rollup
    if rollup.step is None and slot is not None and (rollup.last_us is not None or schema.forgets_rows):
        level = replace(rollup, step=slot[2])
    if judged is not None or not is_combinable(rolled_schema(schema, rollup)):
        by = tuple(group.name for group in schema.group_by if group.slot is None)
        is_in_order = len(by) == len(schema.key) if slot is None else len(by) == slot[0] == len(schema.key) - 1
        if not is_in_order or (judged is not None and rollup.last_us is not None):
            return None  # the latter ends with the newest slot that has a row which is selected
        read = set() if judged is None else names(judged) - {*schema.key_names}
        measures = tuple(dict.fromkeys((*rollup.measures, *sorted(read))))
        level = replace(rollup, by=by, step=None if slot is None else slot[2], measures=measures)
    known = all_of(*(term for term in terms if names(term) <= {*schema.key_names}))
    return Partials(schema, scan, replace(scan, where=known, rollup=level), judged)


class Partials:
    """Not thread safe."""

    def __init__(self, schema: TableSchema, scan: Scan, wanted: Scan, judged: Expr | None) -> None:
        rollup, level = scan.rollup, wanted.rollup
        assert rollup is not None
        assert level is not None
        self.wanted = wanted
        """What they are, as one reads it."""
        self.low_us: int | None = None
        """With ``last``: where that begins."""
        self.ends = Ends()
        """With ``last``: which slots it may end with."""
        self.bounds = key_range(schema, scan)
        self._schema, self._rollup = schema, rollup
        self.target, self.result = rolled_schema(schema, level), rolled_schema(schema, rollup)
        self._is_result = level == rollup and judged is None
        self._judged = None if judged is None else Selection(self.target, judged)
        self._in = Rolling.by_names(schema, self.target, level.step)
        self._out = Rolling.by_names(self.target, self.result, rollup.step)
        self._columns = [schema.index_of[column.name] for column in self.target.columns]
        leave = rollup.last_us is not None or schema.forgets_rows
        self._slot = KeySlot.of(self.target) if leave else None
        self._layout = RowLayout.of(self.target)
        self._rows = np.zeros(_PLACES_MIN, self._layout.dtype)
        self._places: dict[bytes, int] = {}
        self._free = list(range(_PLACES_MIN))
        self._slots: dict[int, set[bytes]] = {}
        """By their slots, where these leave."""
        self._members: dict[bytes, set[bytes]] = {}
        """By keys of the result."""
        self._states_bytes = 0
        self._touched: set[bytes] = set()
        """Keys of the result."""
        self._again: set[bytes] = set()
        """Keys of partial results that are to be read again."""
        self._failed = False
        self._floor: int | None = None

    @property
    def nbytes(self) -> int:
        return len(self._places) * (_ROW_BYTES + self._rows.itemsize) + self._states_bytes

    # -- what comes in ---------------------------------------------------------------------------------------

    def begin(self, rolled: RolledUp, floor: int | None) -> None:
        """As they were read, at a snapshot that sees what is above the floor."""
        self.low_us, self.ends, self._floor = rolled.low_us, rolled.ends, floor
        self._put(rolled.rows)
        self._touched.clear()

    def add(self, run: DeltaRun) -> None:
        """What commits added, as ``deltas_of`` gives it."""
        rows = run.slice_range(*self.bounds)
        if not rows or self._failed:
            return
        keys = run.keys.slice(rows.start, len(rows))
        at = np.flatnonzero(self._of_mine(keys))
        if not len(at):
            return
        keys, at = keys.take(pa.array(at)), at + rows.start
        assert not isinstance(run.cts, int)
        deltas = DeltaRun(keys, run.cts[at], tuple(run.columns[i].take(at) for i in self._columns))
        keys = self._in.keys(keys)
        known = [key for key in pc.unique(keys).to_pylist() if key in self._places]
        rolling = Rolling.by_names(self.target, self.target, None)
        try:
            rolling.add(pa.array(known, pa.large_binary()), self._rows[[self._places[key] for key in known]])
            rolling.add_deltas(keys, deltas)
            self._put(rolling.result())
        except KiviError:  # a sum of floats: whoever reads it again learns that
            self._failed = True

    def read_again(self, keys: Iterable[bytes]) -> None:
        """Rows of the table, in any order, of which it is not known what became of them."""
        low, high = self.bounds
        inside = [key for key in keys if (low is None or key >= low) and (high is None or key < high)]
        if inside:
            found = pa.array(inside, pa.large_binary())
            self._again.update(self._in.keys(found.filter(pa.array(self._of_mine(found)))).to_pylist())

    def _of_mine(self, keys: Any) -> Array:
        """Which keys of the table, within the bounds, belong to it: by their slots and by what is asked of keys."""
        mine = np.ones(len(keys), np.bool_)
        if stored_slot(self._schema) is not None:
            slots = KeySlot.of(self._schema).slots(keys)
            for low in (self._rollup.start_us, None if self.ends.alone else self.low_us, self._floor):
                mine &= True if low is None else slots >= low
            mine &= True if self._rollup.end_us is None else slots < self._rollup.end_us
        if self.wanted.where is not None and mine.any():
            mine &= Selection(self._schema, self.wanted.where).of_keys(keys)
        if self._rollup.last_us is not None:
            mine[mine] = self._of_now(KeySlot.of(self._schema).slots(keys)[mine])
        return mine

    def _of_now(self, slots: Array) -> Array:
        """Which slots are not of the future, or all where there are no others; and whether that is so still."""
        if (high := self.ends.high_us) is None:
            return np.ones(len(slots), np.bool_)
        early: Array = slots < high
        if self.ends.alone:
            self._failed = self._failed or bool(early.any())
            return ~early if self.low_us is None else slots >= self.low_us
        if not early.all():
            self.ends = Ends(high, beyond=True)
        return early

    # -- to a snapshot ---------------------------------------------------------------------------------------

    def advance(self, floor: int | None, read: Any) -> set[bytes] | None:
        """To a snapshot that sees what is above the floor: which keys of the result are touched.

        ``read``: reads some partial results there, given their keys in order. None: the whole has to be read again.
        """
        if floor != self._floor:
            self._below(floor, self._floor)
            self._floor = floor
        if self._again and not self._failed:
            again, self._again = sorted(self._again), set()
            rows = read(pa.array(again, pa.large_binary()))
            self._remove(set(again).difference(rows.keys.to_pylist()))
            self._put(rows)
        if self._failed or not self._in_last():
            return None
        touched, self._touched = self._touched, set()
        return touched

    def _below(self, floor: int | None, before: int | None) -> None:
        """Lets go of slots below the floor; those of the slot that it lies in are read again."""
        step = None if self.wanted.rollup is None else self.wanted.rollup.step
        if floor is None or step is None or (before is not None and floor < before):  # the retention was altered
            self._failed = True
            return
        for slot in [slot for slot in self._slots if slot < floor]:
            if step.end(slot) <= floor:
                self._remove(tuple(self._slots[slot]))
            else:
                self._again |= self._slots[slot]

    def _in_last(self) -> bool:
        """Lets go of slots before the ``last`` time. False: it begins earlier than before, or nothing is left."""
        if self._rollup.last_us is None:
            return True
        if not self._slots:
            return self.low_us is None and (not self.ends.beyond or self.ends.alone)
        begins = range_of_last(self._schema, self._rollup, max(self._slots))
        if self.low_us is not None and begins < self.low_us:
            return False
        self.low_us = begins
        for slot in [slot for slot in self._slots if slot < begins]:
            self._remove(tuple(self._slots[slot]))
        return True

    # -- what goes out ---------------------------------------------------------------------------------------

    def rows(self, touched: Iterable[bytes] | None = None) -> FixedRows:
        """The rows of the result that are touched, or all, in order."""
        if self._is_result:
            keys = sorted(self._places if touched is None else self._places.keys() & {*touched})
            return self._stored(keys)
        groups: Iterable[bytes] = self._members if touched is None else touched
        found = self._stored(sorted(key for group in groups for key in self._members.get(group, ())))
        if self._judged is not None:
            found = self._judged.selected(found)
        rolling = Rolling.by_names(self.target, self.result, self._rollup.step)
        rolling.add(rolling.keys(found.keys), found.rows)
        return rolling.result()

    # -- what is kept ----------------------------------------------------------------------------------------

    def _stored(self, keys: Sequence[bytes]) -> FixedRows:
        return FixedRows(pa.array(keys, pa.large_binary()), self._rows[[self._places[key] for key in keys]])

    def _put(self, found: FixedRows) -> None:
        keys: list[bytes] = found.keys.to_pylist()
        groups = keys if self._is_result else self._out.keys(found.keys).to_pylist()
        self._touched.update(groups)
        new = [i for i, key in enumerate(keys) if key not in self._places]
        if len(new) > len(self._free):
            self._grow(len(new))
        slots = self._slot.slots(found.keys).tolist() if self._slot is not None and new else []
        for i in new:
            self._places[keys[i]] = self._free.pop()
            if slots:
                self._slots.setdefault(slots[i], set()).add(keys[i])
            if not self._is_result:
                self._members.setdefault(groups[i], set()).add(keys[i])
        at = [self._places[key] for key in keys]
        self._states_bytes += self._bytes_of(found.rows) - self._bytes_of(self._rows[at])
        self._rows[at] = found.rows

    def _remove(self, keys: Iterable[bytes]) -> None:
        gone = [key for key in keys if key in self._places]
        if not gone:
            return
        array = pa.array(gone, pa.large_binary())
        groups = gone if self._is_result else self._out.keys(array).to_pylist()
        self._touched.update(groups)
        slots = self._slot.slots(array).tolist() if self._slot is not None else []
        at = [self._places.pop(key) for key in gone]
        for i, key in enumerate(gone):
            if slots:
                _take_out(self._slots, slots[i], key)
            if not self._is_result:
                _take_out(self._members, groups[i], key)
        self._states_bytes -= self._bytes_of(self._rows[at])
        self._rows[at] = np.zeros(1, self._layout.dtype)
        self._free += at

    def _grow(self, more: int) -> None:
        rows = np.zeros(max(2 * len(self._rows), len(self._rows) + more), self._layout.dtype)
        rows[: len(self._rows)] = self._rows
        self._free += range(len(self._rows), len(rows))
        self._rows = rows

    def _bytes_of(self, rows: Array) -> int:
        return sum(len(state or b"") for i in self._layout.states for state in rows[f"c{i}"].tolist())


def _take_out(sets: dict[Any, set[bytes]], of: Any, key: bytes) -> None:
    sets[of].discard(key)
    if not sets[of]:
        del sets[of]
