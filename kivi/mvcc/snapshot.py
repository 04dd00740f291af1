"""Reading at a snapshot. Never writes.

::

    read(row, S):   ops  = pending operations on the row with cts <= S          captured first
                    base = the base row; if stamped above S, the newest version at or below S
                    fold(base, ops)                                             ops at or below the stamp are inert
                    check that the lease still holds                            else SnapshotTooOld, never a guess

Why pending first: consolidation writes base, then drops pending. Looking in the other order, an operation could
move from pending into base between the two looks and be seen in neither.

A snapshot that was registered before the horizon reached it finds its versions kept. A *historical* one (``as_of`` a
past timestamp) can read only tables that keep history that far back; every other table refuses it.

Rows of an aggregate that lie below the retention floor that S sees are left out, whether or not they are still there.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from operator import itemgetter
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa

from kivi.delta.gather import merged_items
from kivi.delta.ops import RowOp, fold
from kivi.delta.overlay import FixedRows
from kivi.delta.runs import Array, DeltaRun
from kivi.encoding.base_rows import RowLayout, Version
from kivi.encoding.key_slots import KeySlot
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, row_key, split_version_key, table_prefix, version_key, version_prefix
from kivi.engine import Engine
from kivi.errors import KiviError, SnapshotTooOld
from kivi.model.schema import TableSchema
from kivi.mvcc.columns import at_snapshot, base_rows, chunks_of, overlaid, pairs_of
from kivi.mvcc.leases import Lease, Leases
from kivi.mvcc.pending import Pending
from kivi.runtime.histogram import COUNTS, Histogram

__all__ = ["Reader"]

_CHUNK_ROWS: Final = 1_024
"""Rows that are read from the engine at once, while nothing else runs: 0.3 ms."""

_OLDER_RANGE_KEYS: Final = 32
_OLDER_RANGE_FACTOR: Final = 8

_first: Final = itemgetter(0)
Rows = TypeVar("Rows", bound=FixedRows | list[tuple[bytes, Version]])
"""A portion of rows, in columns or one by one."""


@dataclass(eq=False)
class Reader:
    """Rows at a snapshot. ``history_floor(schema)`` is the oldest S that a table with history still answers,
    ``row_floor(schema, S)`` the retention floor of an aggregate that S sees."""

    engine: Engine
    pending: Pending
    leases: Leases
    history_floor: Callable[[TableSchema], int | None]
    _: KW_ONLY
    row_floor: Callable[[TableSchema, int], int | None]
    schema_of: Callable[[int], TableSchema | None]
    exists: Callable[[int], bool]
    missing: Callable[[TableSchema], KiviError]

    def __post_init__(self) -> None:
        self.runs_searched = Histogram(COUNTS)  # delta runs, for each row that was read by its key

    def check(self, lease: Lease, schema: TableSchema) -> None:
        """Raises SnapshotTooOld if ``lease`` cannot (any longer) read ``schema``'s rows, ``missing`` if it has gone.

        A dropped table's rows are erased only after ``exists`` has become False: what was read before this check
        passes was all there.
        """
        self.check_events(lease, schema)
        if lease.historical:
            floor = self.history_floor(schema)
            if floor is None or lease.ts < floor:
                kept = "keeps no history" if floor is None else f"keeps history from {floor} on"
                raise SnapshotTooOld(f"table {schema.name!r} {kept}, and cannot be read as of {lease.ts}")

    def check_events(self, lease: Lease, schema: TableSchema) -> None:
        """``check`` for an event table, which keeps its history by itself."""
        self.leases.check(lease)
        if not self.exists(schema.id):
            raise self.missing(schema)

    def get(self, lease: Lease, schema: TableSchema, keys: list[bytes]) -> list[Version | None]:
        """Each row at the lease's snapshot, or None. Tombstones count as None."""
        return self.get_each(schema, [(lease, key) for key in keys])

    def get_each(self, schema: TableSchema, wanted: Sequence[tuple[Lease, bytes]]) -> list[Version | None]:
        """Rows at a snapshot each, or None. Tombstones count as None, and so do rows below a retention floor."""
        table = schema.id
        slot = KeySlot.of(schema) if schema.forgets_rows else None
        self.runs_searched.observe(self.pending.runs_of(table), len(wanted))
        ops = [self.pending.ops(table, key, lease.ts) for lease, key in wanted]
        if len(wanted) == 1:
            raws = [self.engine.get(row_key(table, wanted[0][1]))]
        else:
            raws = self.engine.get_many([row_key(table, key) for _, key in wanted])
        schema = self._latest(schema)
        layout = RowLayout.of(schema)
        out: list[Version | None] = []
        for (lease, key), raw, row_ops in zip(wanted, raws, ops, strict=True):
            version = None if raw is None else self._base(schema, layout, key, raw, lease.ts)
            if row_ops:
                version = fold(schema, version, row_ops, lease.ts)
            if version is not None and slot is not None:
                floor_us = self.row_floor(schema, lease.ts)
                version = None if floor_us is not None and slot.is_below(key, floor_us) else version
            out.append(version if version is not None and version.alive else None)
        for lease in {lease for lease, _ in wanted}:
            self.check(lease, schema)
        return out

    def maybe_there(self, lease: Lease, schema: TableSchema, keys: pa.LargeBinaryArray) -> Array:
        """Which of many rows may be there: those of which something is pending, or a version is in base."""
        found = self.pending.has_any(schema.id, keys)  # first, as ever
        raws = self.engine.get_many([row_key(schema.id, key) for key in keys.to_pylist()])
        found |= np.fromiter((raw is not None for raw in raws), np.bool_, len(raws))
        self.check(lease, schema)
        return np.flatnonzero(found)

    def newest(self, schema: TableSchema, key: bytes) -> int:
        """The CTS of the newest operation on a row, visible or not: for the verdict on guards."""
        pending = self.pending.newest(schema.id, key)
        raw = self.engine.get(row_key(schema.id, key))
        return max(pending, RowLayout.stamp_of(raw) if raw else 0)

    def scan(
        self,
        lease: Lease,
        schema: TableSchema,
        start: bytes | None,
        end: bytes | None,
        *,
        reverse: bool = False,
        check_every: int = 1_024,
    ) -> Iterator[tuple[bytes, Version]]:
        """Live rows of [start, end) in key order. Everything is captured at the call, not at the first next()."""
        # Pending first and base second: what is folded meanwhile is in both, and both say the same.
        indexed, runs = self.pending.capture(schema.id, start, end, lease.ts)
        base = self.engine.scan(*_range(schema, start, end), reverse=reverse)
        schema = self._latest(schema)
        self.check(lease, schema)
        changed = _joined(indexed, runs, start, end, lease.ts, reverse)
        rows = self._kept(schema, self._rows(schema, base, changed, lease.ts, reverse), lease.ts)
        portions = iter(lambda: list(itertools.islice(rows, check_every)), [])
        return itertools.chain.from_iterable(self._held(portions, lease, schema))

    def _rows(
        self,
        schema: TableSchema,
        base: Iterator[tuple[bytes, bytes]],
        changed: Iterator[tuple[bytes, list[tuple[int, RowOp]]]],
        upto: int,
        reverse: bool,
    ) -> Iterator[tuple[bytes, Version]]:
        layout = RowLayout.of(schema)
        for key, raw, ops in _merged(schema.id, base, changed, reverse):
            version = None if raw is None else self._base(schema, layout, key, raw, upto)
            if ops:
                version = fold(schema, version, ops, upto)
            if version is not None and version.alive:
                yield key, version

    def _kept(
        self, schema: TableSchema, rows: Iterator[tuple[bytes, Version]], upto: int
    ) -> Iterator[tuple[bytes, Version]]:
        """Without those below the retention floor."""
        floor_us = self.row_floor(schema, upto) if schema.forgets_rows else None
        if floor_us is None:
            return rows
        slot = KeySlot.of(schema)
        return (row for row in rows if not slot.is_below(row[0], floor_us))

    def scan_portions(
        self,
        lease: Lease,
        schema: TableSchema,
        start: bytes | None,
        end: bytes | None,
        *,
        few: int,
        first_rows: int,
        rows: int,
    ) -> Iterator[FixedRows | list[tuple[bytes, Version]]]:
        """``scan`` of a table read in columns (``RowLayout.in_columns``), forward, in portions; none is empty.

        Up to ``few`` rows, base and pending together, are one list. More are in columns, about ``rows`` in each
        portion and ``first_rows`` in the first. Everything is captured at the call, not at the first next().
        """
        upto = lease.ts
        indexed, runs = self.pending.capture(schema.id, start, end, upto)
        size = -(-first_rows // -(-first_rows // _CHUNK_ROWS))
        layout = RowLayout.of(schema)
        chunks = chunks_of(self.engine, schema, *_range(schema, start, end), size, layout)
        self.check(lease, schema)
        if len(self._latest(schema).columns) != len(schema.columns):  # it was altered a moment ago
            found = self.scan(lease, schema, start, end)
            return iter(lambda: list(itertools.islice(found, first_rows)), [])

        def portions() -> Iterator[FixedRows | list[tuple[bytes, Version]]]:
            first = next(chunks, [])
            ranges = [(run, found) for run in runs if (found := run.slice_range(start, end))]
            count = len(first)
            if count < size and count + len(indexed) + sum(len(found) for _, found in ranges) <= few:
                changed = _joined(indexed, tuple(run for run, _ in ranges), start, end, upto, False)
                few_rows = self._rows(schema, pairs_of(first, schema, layout), changed, upto, False)
                yield list(self._kept(schema, few_rows, upto))
                return
            every = itertools.chain([first] if first else [], chunks)
            base = base_rows(every, schema, layout, itertools.chain([first_rows], itertools.repeat(rows)))
            versions = at_snapshot(base, layout, upto, lambda keys: self._older(schema, keys, upto))
            floor_us = self.row_floor(schema, upto) if schema.forgets_rows else None
            for portion in overlaid(schema, layout, versions, indexed, ranges, upto, rows):
                yield portion if floor_us is None else _above(schema, portion, floor_us)

        return self._held(portions(), lease, schema)

    def _held(self, portions: Iterator[Rows], lease: Lease, schema: TableSchema) -> Iterator[Rows]:
        """Portions that were read wholly while the lease held. That there are no more is such an answer too."""
        for portion in portions:
            self.check(lease, schema)
            if len(portion.rows if isinstance(portion, FixedRows) else portion):
                yield portion
        self.check(lease, schema)

    def _older(self, schema: TableSchema, keys: list[bytes], upto: int) -> list[bytes | None]:
        """``_version`` of each; ``keys`` are in order. Of many, their range of versions is read in one go, at a tenth
        of the cost, unless other versions are most of it."""
        found: dict[bytes, bytes] = {}
        reached: bytes | None = b""  # below it ``found`` says all; None: everywhere
        if len(keys) >= _OLDER_RANGE_KEYS:
            low, high = version_prefix(schema.id, keys[0]), prefix_end(version_prefix(schema.id, keys[-1]))
            versions, left = self.engine.scan(low, high), _OLDER_RANGE_FACTOR * len(keys)
            for stored, data in versions:
                _, key, cts = split_version_key(stored)
                if cts <= upto:
                    found.setdefault(key, data)
                if not (left := left - 1):
                    reached = key
                    break
            else:
                reached = None
        layout = RowLayout.of(schema)
        rows = (found.get(k) if reached is None or k < reached else self._version(schema, k, upto) for k in keys)
        return [self._known(schema, row) if row and layout.is_later(row) else row for row in rows]

    def _known(self, schema: TableSchema, raw: bytes) -> bytes:
        """A row that was written after ``schema`` was altered, without the columns that it does not know."""
        return RowLayout.of(schema).cut(raw, RowLayout.of(self._latest(schema)))

    def _latest(self, schema: TableSchema) -> TableSchema:
        """The definition as it is now, which every row that has been written knows. Columns keep their places."""
        return self.schema_of(schema.id) or schema

    def _base(self, schema: TableSchema, layout: RowLayout, key: bytes, raw: bytes, upto: int) -> Version | None:
        version = layout.decode(self._known(schema, raw) if layout.is_later(raw) else raw)
        if version.cts > upto:
            older = self._version(schema, key, upto)
            return None if older is None else self._base(schema, layout, key, older, upto)
        return version

    def _version(self, schema: TableSchema, key: bytes, upto: int) -> bytes | None:
        """The newest older version at or below ``upto``, as bytes."""
        prefix = version_prefix(schema.id, key)
        for _, older in self.engine.scan(version_key(schema.id, key, upto), prefix_end(prefix)):
            return older
        return None


def _above(schema: TableSchema, portion: FixedRows, floor_us: int) -> FixedRows:
    """Without the rows below the retention floor."""
    below = KeySlot.of(schema).below(portion.keys, floor_us)
    if not below.any():
        return portion
    kept = np.flatnonzero(~below)
    return FixedRows(portion.keys.take(pa.array(kept)), portion.rows[kept])


def _range(schema: TableSchema, start: bytes | None, end: bytes | None) -> tuple[bytes, bytes | None]:
    """Where the rows of [start, end) lie in the engine."""
    space = table_prefix(Space.ROW, schema.id)
    return space + (start or b""), prefix_end(space) if end is None else space + end


def _merged(
    table: int,
    base: Iterator[tuple[bytes, bytes]],
    changed: Iterator[tuple[bytes, list[tuple[int, RowOp]]]],
    reverse: bool,
) -> Iterator[tuple[bytes, bytes | None, list[tuple[int, RowOp]]]]:
    """(key, its row in base, what is pending for it) of every row that either knows."""
    head = len(row_key(table, b""))
    delta = next(changed, None)
    for name, raw in base:
        key = name[head:]
        while delta is not None and delta[0] != key and (delta[0] < key) != reverse:
            yield delta[0], None, delta[1]
            delta = next(changed, None)
        if delta is not None and delta[0] == key:
            yield key, raw, delta[1]
            delta = next(changed, None)
        else:
            yield key, raw, []
    if delta is not None:
        yield delta[0], None, delta[1]
        yield from ((key, None, ops) for key, ops in changed)


def _joined(
    indexed: list[tuple[bytes, tuple[tuple[int, RowOp], ...]]],
    runs: tuple[DeltaRun, ...],
    start: bytes | None,
    end: bytes | None,
    upto: int,
    reverse: bool,
) -> Iterator[tuple[bytes, list[tuple[int, RowOp]]]]:
    """Pending operations of both kinds by key, each in CTS order."""
    listed = ((key, list(ops)) for key, ops in (reversed(indexed) if reverse else indexed))
    if not runs:  # a fifth of the time
        yield from listed
        return
    columnar: Iterable[tuple[bytes, list[tuple[int, RowOp]]]] = merged_items(runs, start, end, upto)
    if reverse:
        columnar = list(columnar)[::-1]
    for key, found in itertools.groupby(heapq.merge(listed, columnar, key=_first, reverse=reverse), _first):
        yield key, sorted([item for _, ops in found for item in ops], key=_first)
