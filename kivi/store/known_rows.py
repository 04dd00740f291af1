"""Rows of sums that are looked at again and again, in memory, as they are at the newest snapshot.

Rules look at rows of aggregates, and publications at how many subscriptions ask for what (``kivi.live.index``).

A stream asks for the rows of the same endpoints' previous slots with every commit, thousands at a time. Reading each
from pending and base takes some 10 us, many times as long as appending the event. So they stay here, in columns, and
follow the commits: what is applied to their aggregate is added by the fold of consolidation
(``kivi.delta.gather.new_rows``), so they are what a read would give, to the last bit.

**The invariant.** At ``ts`` each row that is known is what a read at ``ts`` gives; of slots from ``whole_from`` on
there are no others. Rows come in by reads; whatever is applied after ``ts`` is held (``add``) from before the first
read on, and folded in CTS order when a newer snapshot is asked for (``advance``). What was applied before anything was
held had entered the log by then, so nothing is taken from a snapshot that may not have all of it (``after``). When rows
begin anew, as after a retraction, all are forgotten.

Keys are taken apart (``_Grid``): a *name* is a key without its slot. All rows come in by one scan. Where they take more
than twice ``_ROWS_MAX`` places, or come to it, those of the oldest slots are forgotten: events are mostly of the newest
slots, and what they look up is of those just before. So whoever looks at old slots reads, and a stream may go on for
ever. Where there are no slots, or too many rows in one of them, or more rows to scan than ``_SCANNED_MAX``, only what
was asked for is known. A snapshot older than ``ts`` is answered by reading. What is held and known is bounded.

Rows of a slot that stand (``Standing``) are a copy of those in the grid: what changes one of them lets go of all
(``_change``), and so does what numbers names anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from kivi.delta.derive import run_from_rows
from kivi.delta.gather import cells_of, new_rows, stamps_of
from kivi.delta.key_index import KeyIndex
from kivi.delta.ops import Barrier
from kivi.delta.overlay import FixedRows
from kivi.delta.runs import DeltaRun, fitted
from kivi.encoding.base_rows import FieldRows, RowLayout, Version
from kivi.encoding.key_slots import KeySlot
from kivi.model.lifetimes import slot_index
from kivi.model.schema import TableSchema
from kivi.mvcc.applied import Applied
from kivi.mvcc.leases import Lease
from kivi.mvcc.pending import Pending
from kivi.mvcc.snapshot import Reader

__all__ = ["KnownRows", "Standing", "add_run", "field_rows", "of_slots"]

Array = Any
_KEYS_MIN: Final = 64
"""Fewer rows than that are read, unless the aggregate is followed already."""
_ROWS_MAX: Final = 1 << 18
"""Places for slots of names. About 30 MB."""
_SCANNED_MAX: Final = 1 << 20
"""Rows that are looked through for those of the newest slots."""
_INDEX_BYTES_MAX: Final = 1 << 26
"""That many rows with keys of 200 bytes."""
_HELD_ROWS_MAX: Final = 1 << 21
_PORTION: Final = 16_384
_EVERY: Final = -(2**63)
"""No slot begins before it."""
_LATELY_MAX: Final = 8
"""Arrays of keys of which names and numbers are remembered: those of commits that are on their way."""
_STANDING_MAX: Final = 8
"""Slots whose rows stand: rules look at the one before, and some at a few further back."""


class KnownRows:
    """Thread safe. ``lock`` is held from opening a snapshot on until its rows were asked for, so that snapshots do not
    overtake each other. ``last``: the last CTS that has entered the log."""

    def __init__(self, pending: Pending, reader: Reader, last: Callable[[], int], most: int | None = None) -> None:
        """``most``: about so many places for rows of a table there are at a time, and up to twice as many for a moment;
        None: ``_ROWS_MAX``."""
        self.lock = threading.Lock()
        self._pending, self._reader, self._last, self._most = pending, reader, last, most or _ROWS_MAX
        self._followed: dict[int, _Followed] = {}

    def rows(
        self, lease: Lease, schema: TableSchema, keys: pa.LargeBinaryArray, slots: Array | None = None
    ) -> FieldRows:
        """Rows at the snapshot, which the caller may change; zeros where there is none. ``keys`` are distinct.

        ``slots``: where those slots begin of which the rows are, instead of the keys' own; one of each, or one of all.
        Who asks for others with the keys of a commit asks with that very array: what is found out about it serves once
        more when the commit is followed.
        """
        layout = RowLayout.of(schema)
        followed = self._advanced(lease, schema, len(keys))
        if followed is None:
            return _read(self._reader, lease, schema, layout, of_slots(schema, keys, slots))
        at, unknown = followed.find(keys, slots)
        if len(unknown) and followed.has_grown_by(len(unknown)):
            followed.keep_newest()
            at, unknown = followed.find(keys, slots)
        if len(unknown):
            own = slots if slots is None or len(slots) < len(keys) else slots[unknown]
            wanted = of_slots(schema, keys.take(pa.array(unknown)), own)
            read = _read(self._reader, lease, schema, layout, wanted)
            if not followed.has_room(wanted):
                found = followed.grid.rows.take(at)
                found.put(unknown, read)
                return found
            followed.put(wanted, read)
            at, _ = followed.find(keys, slots)  # anew: places move where the grid grows
        return followed.grid.rows.take(at)

    def standing(
        self, lease: Lease, schema: TableSchema, keys: pa.LargeBinaryArray, slots: Array | None = None
    ) -> tuple[Standing, Array] | None:
        """The same where all are of one slot, and none of its rows has changed lately: these rows, and the number that
        each key has there, which may be beyond them. None: ask for ``rows``."""
        followed = self._advanced(lease, schema, len(keys))
        return None if followed is None else followed.standing_of(keys, slots)

    def _advanced(self, lease: Lease, schema: TableSchema, keys: int) -> _Followed | None:
        """What is known at the snapshot; None if that has to be read."""
        followed = self._followed_of(schema, keys)
        if followed is None or not followed.advance(lease.ts):
            return None
        if not followed.grid.cells and not followed.is_large:
            followed.fill(
                self._reader.scan_portions(lease, schema, None, None, few=0, first_rows=_PORTION, rows=_PORTION)
            )
        return followed

    def _followed_of(self, schema: TableSchema, keys: int) -> _Followed | None:
        found = self._followed.get(schema.id)
        if found is not None and (found.overflowed or found.schema.columns != schema.columns):
            self.forget(schema)
            found = None
        if found is None and keys >= _KEYS_MIN and all(c.operator or c.state for c in schema.columns):
            found = self._followed[schema.id] = _Followed(schema, self._most)
            self._pending.attach(found)
            found.after = self._last()
        return found

    def forget(self, schema: TableSchema) -> None:
        """What is known of a table: there are rows now that no commit has brought."""
        if (found := self._followed.pop(schema.id, None)) is not None:
            self._pending.detach(found)


def of_slots(schema: TableSchema, keys: pa.LargeBinaryArray, slots: Array | None) -> pa.LargeBinaryArray:
    """The keys of the same rows of other slots; None: of their own."""
    return keys if slots is None else KeySlot.of(schema).moved(keys, slots)


def _read(reader: Reader, lease: Lease, schema: TableSchema, layout: RowLayout, keys: pa.LargeBinaryArray) -> FieldRows:
    return field_rows(layout, reader.get(lease, schema, keys.to_pylist()))


def field_rows(layout: RowLayout, versions: Sequence[Version | None]) -> FieldRows:
    """Zeros where there is none."""
    blank, columns = bytes(layout.width), len(layout.columns)
    rows = [blank if v is None else layout.encode(v._replace(cells=v.cells[:columns])) for v in versions]
    return FieldRows.of(layout.rows_of(rows))


class Standing:
    """All rows of one slot, by the numbers of their names, where 0 is none. ``made``: what was worked out of them; it
    serves until one of them changes."""

    def __init__(self, rows: FieldRows) -> None:
        self.rows = rows
        self.made: dict[Any, Any] = {}


class _Named(NamedTuple):
    """Keys, what they are without their slots, these (of each, or one of all), and the number of each name; 0 where it
    had none when ``last`` was the last one."""

    keys: pa.LargeBinaryArray
    names: pa.LargeBinaryArray
    slots: Array
    numbers: Array
    last: int


class _Followed:
    """One aggregate. ``add`` is called by whoever applies commits; all else under the lock of ``KnownRows``."""

    def __init__(self, schema: TableSchema, most: int) -> None:
        self.schema, self._most = schema, most
        self.layout = RowLayout.of(schema)
        self.after = 0
        self.overflowed = False
        self.ts = 0
        self.whole_from: int | None = None
        """Where the slots begin that are known whole; None: none are."""
        self.is_large = False
        self.grid = _Grid(self.layout)
        self._lately: dict[int, _Named] = {}
        self._standing: dict[int, Standing | int] = {}
        """By slot; a number says how many of its rows were asked for since one of them changed."""
        self._slot = KeySlot.of(schema) if slot_index(schema.group_by) is not None else None
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
        self.whole_from = None
        self.grid = _Grid(self.layout)
        self._lately.clear()
        self._standing.clear()

    def named(self, keys: pa.LargeBinaryArray, *, add: bool = False) -> _Named:
        """``add``: each name has a number then."""
        index = self.grid.index
        found = self._lately.pop(id(keys), None)
        if found is None or (not found.numbers.all() and (add or found.last < index.last)):
            names, slots = (found.names, found.slots) if found is not None else self._split(keys)
            found = _Named(keys, names, slots, (index.add if add else index.find)(names), index.last)
        if len(self._lately) >= _LATELY_MAX:
            del self._lately[next(iter(self._lately))]
        self._lately[id(keys)] = found
        return found

    def _split(self, keys: pa.LargeBinaryArray) -> tuple[pa.LargeBinaryArray, Array]:
        if self._slot is None:
            return keys, np.zeros(1, np.int64)
        slots = self._slot.slots(keys)
        return self._slot.without(keys), slots[:1] if (slots == slots[:1]).all() else slots

    def find(self, keys: pa.LargeBinaryArray, slots: Array | None) -> tuple[Array, Array]:
        """Where in the grid the rows of keys, or of other ``slots``, are, and which of them have to be read."""
        of = self.named(keys)
        if slots is None:
            slots = of.slots
        at = self.grid.places(of.numbers, slots)
        if self.whole_from == _EVERY:
            return at, at[:0]
        unknown = ~self.grid.is_known[at]
        if self.whole_from is not None:
            unknown &= slots < self.whole_from
        return at, np.flatnonzero(unknown)

    def put(self, keys: pa.LargeBinaryArray, rows: FieldRows) -> None:
        """Rows that are known from now on."""
        of = self.named(keys, add=True)
        at = self.grid.added(of.numbers, of.slots)
        self.grid.rows.put(at, rows)
        self.grid.is_known[at] = True
        self._change(of.slots)

    def standing_of(self, keys: pa.LargeBinaryArray, slots: Array | None) -> tuple[Standing, Array] | None:
        """They are put together once as many rows were asked for as there are, so that it is done for no more rows than
        are asked for, however often they change."""
        of = self.named(keys)
        if slots is None:
            slots = of.slots
        if len(slots) != 1 or self.whole_from is None or slots[0] < self.whole_from:
            return None
        slot, names = int(slots[0]), self.grid.index.last
        found = self._standing.get(slot, 0)
        if isinstance(found, int):
            if slot not in self._standing and len(self._standing) >= _STANDING_MAX:
                del self._standing[next(iter(self._standing))]
            found += len(keys)
            self._standing[slot] = found
            if found < names:
                return None
            found = self._standing[slot] = Standing(self.grid.rows.take(self.grid.places(np.arange(names + 1), slots)))
        return found, of.numbers

    def _change(self, slots: Array) -> None:
        """Rows of these slots change."""
        for slot in [slot for slot in self._standing if (slots == slot).any()]:
            del self._standing[slot]

    def has_room(self, keys: pa.LargeBinaryArray, since: int = _EVERY) -> bool:
        """Whether the grid with those of these keys whose slots begin at ``since`` or later is no larger than it may
        be: keys of many names and many slots may be few and need very many places."""
        of, grid = self.named(keys), self.grid
        if of.numbers.all() and grid.has(of.slots):
            return True
        mine = np.broadcast_to(of.slots >= since, len(keys))
        slots = len(np.union1d(grid.slots, of.slots[of.slots >= since]))
        new = mine & (of.numbers == 0)
        if slots * (grid.index.last + int(new.sum())) <= 2 * self._most:
            return True
        names = len(np.unique(KeyIndex().add(of.names.filter(pa.array(new)))))
        return slots * (grid.index.last + names) <= 2 * self._most

    def narrow(self, keys: pa.LargeBinaryArray) -> None:
        """Makes what is known whole begin later, until there is room for these keys from there on; or forgets all."""
        while self.whole_from is not None and not self.has_room(keys, self.whole_from):
            own = self.named(keys).slots
            slots = np.unique(own[own >= self.whole_from])
            if not len(slots):
                return
            later = int(slots[len(slots) // 2])
            if later == self.whole_from:
                self.is_large = True
                self.forget()
                return
            self.whole_from = later
            self.grid.keep_from(later)
            if self.grid.cells:
                self.keep_newest()

    def has_grown_by(self, names: int) -> bool:
        """Whether it is too large, with so many keys more."""
        grid = self.grid
        cells = len(grid.slots) * (grid.index.last + names)
        return cells > 2 * self._most or grid.index.nbytes > _INDEX_BYTES_MAX

    def keep_newest(self) -> None:
        """Forgets the older slots; all if the newest is too large by itself."""
        least = self.grid.keep_newest(self._most) if self._slot is not None else None
        if least is None:
            self.is_large = self.is_large or self.whole_from is not None
            self.forget()
        elif self.whole_from is not None:
            self.whole_from = max(self.whole_from, least)
        self._lately.clear()
        self._standing.clear()

    def fill(self, portions: Iterator[FixedRows | list[tuple[bytes, Version]]]) -> None:
        """All rows as of ``ts``, or those of the newest slots."""
        self.whole_from, scanned = _EVERY, 0
        for portion in portions:
            keys, rows = FixedRows.of_versions(self.layout, portion) if isinstance(portion, list) else portion
            scanned += len(keys)
            if self._slot is not None and (older := self._slot.below(keys, self.whole_from)).any():
                keys, rows = keys.filter(pa.array(~older)), rows[~older]
            self.narrow(keys)
            if self.whole_from is not None and self._slot is not None:
                newer = ~self._slot.below(keys, self.whole_from)
                if not newer.all():
                    keys, rows = keys.filter(pa.array(newer)), rows[newer]
            if self.whole_from is not None:
                self.put(keys, FieldRows.of(rows))
            if self.has_grown_by(0):
                self.keep_newest()
            if self.whole_from is None or scanned > _SCANNED_MAX:
                self.forget()
                self.is_large = True
                return

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
        self.narrow(run.keys)
        of = self.named(run.keys, add=self.whole_from is not None)
        if self.whole_from is not None and (of.slots >= self.whole_from).all():
            at = self.grid.added(of.numbers, of.slots)
        else:
            whole: Array = np.zeros(len(of.numbers), np.bool_)
            if (
                self.whole_from is not None
                and (whole := np.broadcast_to(of.slots >= self.whole_from, len(whole))).any()
            ):
                self.grid.added(of.numbers[whole], of.slots[whole])  # before the others: places move where it grows
            at = self.grid.places(of.numbers, of.slots)
            at[~(self.grid.is_known[at] | whole)] = 0
        _fold(self.layout, self.grid.rows, at, run)
        self._change(of.slots)
        if self.has_grown_by(0):
            self.keep_newest()


class _Grid:
    """Rows by slot and by name, which is what a key is without its slot. Who streams events has the same names in each
    slot: they are looked for, and numbered, once for all of them. A row's place is ``block * width + number``::

        number      0    1  2  3 ...       block 0 is that of the slot that came first; ``slots`` are in order
        block 0     no   a  b  c           number 0 is no name, and what is there is no row
        block 1     no   a  b  c
    """

    def __init__(self, layout: RowLayout) -> None:
        self.index = KeyIndex()
        """The numbers of the names."""
        self.slots: Array = np.zeros(0, np.int64)
        self.rows = FieldRows.none(layout.dtype, 0)
        self.is_known: Array = np.zeros(0, np.bool_)
        """Which places have been asked for, of slots that are not known whole."""
        self._layout = layout
        self._blocks: Array = self.slots  # of each slot
        self._width = 0
        self._make_room(self.slots, self.slots, 2, 1)

    @property
    def cells(self) -> int:
        """Places of the slots and names that there are."""
        return len(self.slots) * self.index.last

    def places(self, numbers: Array, slots: Array) -> Array:
        """Where the rows are; 0 where there is no place. ``slots``: of each, or one of all."""
        of, there = self._found(slots)
        if not len(self.slots):
            return np.zeros(len(numbers), np.int64)
        at = self._blocks[of] * self._width + numbers
        there = there & (numbers > 0) & (numbers < self._width)  # a name may have a number and no place yet
        if not there.all():
            at[~there] = 0
        return at

    def has(self, slots: Array) -> bool:
        """Whether there are all of these."""
        return bool(self._found(slots)[1].all())

    def added(self, numbers: Array, slots: Array) -> Array:
        """The same, where there is a place for each of them."""
        new = np.unique(slots[~self._found(slots)[1]])
        blocks, room, width = len(self.slots) + len(new), len(self.is_known) // self._width, self._width
        if self.index.last >= width or blocks > room:
            if self.index.last >= width:
                width = max(self.index.last + 1, width * 3 // 2)
            if blocks > room:
                room = max(blocks, room * 2)
            self._make_room(np.arange(len(self.slots)), np.arange(1, self._width), width, room)
        if len(new):
            by_block = np.concatenate([self.slots, new])
            of_slots = np.concatenate([self._blocks, np.arange(len(self.slots), blocks)])
            order = np.argsort(by_block)
            self.slots, self._blocks = by_block[order], of_slots[order]
        return self.places(numbers, slots)

    def _found(self, slots: Array) -> tuple[Array, Array]:
        """Which of ``self.slots`` these are, and which of them there are."""
        of = self.slots.searchsorted(slots)
        there = of < len(self.slots)
        of[~there] = 0
        there[there] = self.slots[of[there]] == slots[there]
        return of, there

    def keep_from(self, least: int) -> None:
        """Forgets the slots that begin before."""
        kept = np.flatnonzero(self.slots >= least)
        if len(kept) < len(self.slots):
            self._make_room(kept, np.arange(1, self._width), self._width, len(kept) + 1)

    def keep_newest(self, most: int) -> int | None:
        """Forgets slots, and names that are in none of the others, so that at most so many cells are left: where those
        slots begin that stay. None: there would be none."""
        last = min(self.index.last, self._width - 1)  # a name may have a number and no place yet
        at = self._blocks[::-1, None] * self._width + np.arange(1, last + 1)
        there = self.is_known[at] | (self.rows["flags"][at] != 0)
        first = np.where(there.any(0), there.argmax(0), len(at))  # which of the slots, the newest first, has the name
        names = np.cumsum(np.bincount(first, minlength=len(at) + 1)[:-1])
        kept = int(np.count_nonzero(names * np.arange(1, len(at) + 1) <= most))
        if not kept:
            return None
        numbers = np.flatnonzero(first < kept) + 1
        self._make_room(np.arange(len(self.slots) - kept, len(self.slots)), numbers, len(numbers) + 1, 2 * kept)
        self.index = self.index.taken(numbers)
        return int(self.slots[0])

    def _make_room(self, kept: Array, numbers: Array, width: int, blocks: int) -> None:
        """For so many ``blocks`` of ``width``; of the slots at ``kept`` the rows of these ``numbers`` are moved there,
        and numbered anew."""
        before = (self._blocks[kept][:, None] * self._width + numbers).ravel()
        after = (np.arange(len(kept))[:, None] * width + np.arange(1, len(numbers) + 1)).ravel()
        rows = FieldRows.none(self._layout.dtype, blocks * width)
        is_known: Array = np.zeros(blocks * width, np.bool_)
        if len(before):
            rows.put(after, self.rows.take(before))
            is_known[after] = self.is_known[before]
        self.rows, self.is_known, self._width = rows, is_known, width
        self.slots, self._blocks = self.slots[kept], np.arange(len(kept))


def add_run(layout: RowLayout, rows: FieldRows, index: KeyIndex, run: DeltaRun) -> None:
    """Folds a run's deltas over those of the rows that have a number in ``index``, where the first has 1, in their CTS
    order."""
    _fold(layout, rows, index.find(run.keys), run, 1)


def _fold(layout: RowLayout, rows: FieldRows, at: Array, run: DeltaRun, first: int = 0) -> None:
    """``at``: where each delta's row is, counted from ``first``; 0: nowhere."""
    windows = [(run, range(run.rows))]
    stamps, places, columns = stamps_of(windows), at - first, run.columns
    if not at.all() or not run.distinct:
        known = np.flatnonzero(at)
        if not len(known):
            return
        if not run.distinct:
            known = known[np.lexsort((stamps[known], places[known]))]
        stamps, places, columns = stamps[known], places[known], cells_of(windows, known)
    if len(places):
        rows.put(*new_rows(layout, rows, None, places, stamps, columns))
