"""Rollups at a snapshot: an aggregate's rows read in columns, selected, and combined as they come.

::

    key ranges of the time (slot_ranges) --scan_portions--> rows of S --where--> selected --Rolling--> result

The rows are those that a scan at the snapshot gives, retention floors included; what a rollup of them is, ``kivi.model.
rollups`` says. With ``only``, the keys of some rows of the result, just these are made: whoever keeps a result up reads
what has changed (``kivi.live.rollups``). Both add floats in the same order, so they are equal to the last bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.predicates import mask
from kivi.delta.overlay import FixedRows
from kivi.delta.rolling import Rolling
from kivi.delta.runs import Array
from kivi.encoding.base_rows import RowLayout
from kivi.encoding.key_slots import KeySlot
from kivi.encoding.keys import decode_key_columns, prefix_end
from kivi.encoding.projection import Projection
from kivi.log.shards import EVERY
from kivi.model.expressions import Expr, names
from kivi.model.rollups import Ends, Rollup, ends_before, range_of_last, rolled_schema, stored_slot
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.mvcc.leases import Lease
from kivi.store.shards import asked_shards
from kivi.store.slot_ranges import KeyRange, Places, Times

if TYPE_CHECKING:
    from kivi.mvcc.pending import Pending
    from kivi.mvcc.snapshot import Reader
    from kivi.mvcc.timeline import Timeline
    from kivi.store.spanning import Spanning

__all__ = ["RolledUp", "Rollups", "RowsRead", "Selection", "TooManyRows", "rolled_batches"]

_PORTION_ROWS: Final = 16_384
_BATCH_ROWS: Final = 4_096
_GATHERED_ROWS: Final = 2_048
_NARROWED_MAX: Final = 64


class TooManyRows(Exception):
    """A result takes more memory than it may."""


class RolledUp(NamedTuple):
    """A result. ``rows`` are of the table ``schema``; ``explanation`` is text for people."""

    schema: TableSchema
    rows: FixedRows
    explanation: str
    low_us: int | None
    """With ``last``: where it begins; None: it has no rows."""
    newest_us: int | None
    """With ``last``: the newest slot of the rows that it was made of."""
    ends: Ends
    """With ``last``: which slots it may end with."""


@dataclass(slots=True)
class RowsRead:
    """Which rows were read for a result. ``newest``: the newest slot of a selected row."""

    ranges: int = 0
    filtered: bool = False
    rows: int = 0
    selected: int = 0
    newest: int | None = None


@dataclass(frozen=True, slots=True)
class Rollups:
    """Thread safe. ``asked``: of which shards the rows may be, as far as the key says."""

    reader: Reader
    pending: Pending
    spanning: Spanning
    timeline: Timeline
    asked: int = EVERY

    def roll(
        self,
        lease: Lease,
        schema: TableSchema,
        wanted: Scan,
        bounds: KeyRange,
        *,
        only: Any = None,
        low_us: int | None = None,
        high_us: int | None = None,
        last: Rollup | None = None,
        bytes_max: int | None = None,
    ) -> RolledUp:
        """The rollup of the rows of a range of keys. ``only``: a sorted LargeBinaryArray of keys of the result, and
        ``low_us`` and ``high_us`` where the ``last`` time then begins and ends. ``last``: the rollup whose ``last``
        time it is of; None: itself.

        Raises what a scan raises, OutOfRange for a sum of floats that is not finite, and TooManyRows for a result of
        more than ``bytes_max``.
        """
        rollup = wanted.rollup
        assert rollup is not None
        target, ends = rolled_schema(schema, rollup), Ends()
        if rollup.last_us is not None and only is None:
            rows, read, low_us, ends = self._of_last(lease, schema, wanted, bounds, last or rollup, bytes_max)
        else:
            times = (rollup.start_us, rollup.end_us) if rollup.last_us is None else (low_us, high_us)
            parts = [(bounds, times)] if only is None else _narrowed(schema, rollup, bounds, times, only)
            rows, read = self._combined(lease, schema, wanted, parts, only, bytes_max)
        explanation = _explained(schema, target, rollup, lease, read, len(rows.rows))
        return RolledUp(target, rows, explanation, low_us, read.newest, ends)

    def ends_before(self, ts: int, schema: TableSchema) -> int | None:
        """Before which slots of an aggregate begin that are not of the future at a snapshot; None: it is not known."""
        time_us = self.timeline.time_of(ts)
        return None if time_us is None else ends_before(schema, time_us)

    def _of_last(
        self, lease: Lease, schema: TableSchema, wanted: Scan, bounds: KeyRange, rollup: Rollup, bytes_max: int | None
    ) -> tuple[FixedRows, RowsRead, int | None, Ends]:
        places, high = self._places(lease, schema, bounds), self.ends_before(lease.ts, schema)
        newest = places.newest(*bounds)
        asked = self.asked & asked_shards(schema, Scan(where=wanted.where))
        is_beyond = newest is not None and high is not None and newest >= high
        beyond = high is not None and (is_beyond or bool(self.spanning.missing(schema, asked, lease.ts)))
        if beyond:
            before = places.newest(*bounds, high)
            rows, read, low = self._ending(lease, schema, wanted, bounds, rollup, bytes_max, before, high)
            if read.newest is not None:
                return rows, read, low, Ends(high, beyond)
        rows, read, low = self._ending(lease, schema, wanted, bounds, rollup, bytes_max, newest, None)
        return rows, read, low, Ends(high, beyond, alone=beyond)

    def _ending(
        self,
        lease: Lease,
        schema: TableSchema,
        wanted: Scan,
        bounds: KeyRange,
        rollup: Rollup,
        bytes_max: int | None,
        newest: int | None,
        high: int | None,
    ) -> tuple[FixedRows, RowsRead, int | None]:
        """With the newest slot before ``high``, which is known when its rows are read: what is read first ends at the
        newest that there may be."""
        low = None if newest is None else range_of_last(schema, rollup, newest)
        while True:
            rows, read = self._combined(lease, schema, wanted, [(bounds, (low, high))], None, bytes_max)
            if read.newest is None and low is None:
                return rows, read, None
            begins = None if read.newest is None else range_of_last(schema, rollup, read.newest)
            if begins == low:
                return rows, read, low
            low = begins

    def _places(self, lease: Lease, schema: TableSchema, bounds: KeyRange) -> Places:
        indexed, runs = self.pending.capture(schema.id, *bounds, lease.ts)
        return Places(self.reader.engine, schema, runs, [key for key, _ in indexed])

    def _combined(
        self,
        lease: Lease,
        schema: TableSchema,
        wanted: Scan,
        parts: Sequence[tuple[KeyRange, Times]],
        only: Any,
        bytes_max: int | None,
    ) -> tuple[FixedRows, RowsRead]:
        rollup, read = wanted.rollup, RowsRead()
        assert rollup is not None
        rolling = Rolling.by_names(schema, rolled_schema(schema, rollup), rollup.step)
        slot = KeySlot.of(schema) if stored_slot(schema) is not None else None
        for bounds, times in parts:
            for kept in self.selected(lease, schema, wanted.where, bounds, times, read):
                keys = rolling.keys(kept.keys)
                if only is not None:
                    chosen = pc.is_in(keys, value_set=only)
                    keys, kept = keys.filter(chosen), _taken(kept, chosen.to_numpy(zero_copy_only=False))
                if not len(kept.rows):
                    continue
                read.selected += len(kept.rows)
                if rollup.last_us is not None and slot is not None:
                    newest = int(slot.slots(kept.keys).max())
                    read.newest = newest if read.newest is None else max(newest, read.newest)
                rolling.add(keys, kept.rows)
                if bytes_max is not None and rolling.nbytes > bytes_max:
                    raise TooManyRows
        return rolling.result(), read

    def selected(
        self, lease: Lease, schema: TableSchema, where: Expr | None, bounds: KeyRange, times: Times, read: RowsRead
    ) -> Iterator[FixedRows]:
        """Portions of the rows of a range of keys whose slots begin in ``times``, and which a predicate selects."""

        def here() -> Iterator[FixedRows]:
            return self.selected_here(lease, schema, where, bounds, times, read)

        asked = self.asked & asked_shards(schema, Scan(where=where))
        if not self.spanning.missing(schema, asked, lease.ts):
            return here()
        rows = self.spanning.rows(lease, schema, asked, bounds, here=here, where=where, times=times)
        return _counted(rows, read)

    def selected_here(
        self,
        lease: Lease,
        schema: TableSchema,
        where: Expr | None,
        bounds: KeyRange,
        times: Times,
        read: RowsRead | None = None,
    ) -> Iterator[FixedRows]:
        """Those of this store, and perhaps of shards that it does not hold."""
        read = read or RowsRead()
        predicate = None if where is None else Selection(schema, where)
        slot = KeySlot.of(schema) if stored_slot(schema) is not None else None
        ranges: list[KeyRange] | None = [bounds]
        if slot is not None and times != (None, None):
            ranges = self._places(lease, schema, bounds).ranges(*bounds, times)
        read.ranges += 1 if ranges is None else len(ranges)
        read.filtered = read.filtered or ranges is None
        for portion in self._portions(lease, schema, [bounds] if ranges is None else ranges):
            read.rows += len(portion.rows)
            kept = portion if ranges is not None or slot is None else _of_times(portion, slot, times)
            yield kept if predicate is None else predicate.selected(kept)

    def _portions(self, lease: Lease, schema: TableSchema, ranges: Sequence[KeyRange]) -> Iterator[FixedRows]:
        """The rows of the ranges, those of short ones together: what is done to a portion costs as much as 500 rows."""
        held: list[FixedRows] = []
        count = 0
        for start, end in ranges:
            for portion in self.reader.scan_portions(
                lease, schema, start, end, few=0, first_rows=_PORTION_ROWS, rows=_PORTION_ROWS
            ):
                if isinstance(portion, list):  # the table was altered after this snapshot read its definition
                    portion = FixedRows.of_versions(RowLayout.of(schema), portion)
                held.append(portion)
                count += len(portion.rows)
                if count >= _GATHERED_ROWS:
                    yield _together(held)
                    held, count = [], 0
        if held:
            yield _together(held)


def _counted(portions: Iterator[FixedRows], read: RowsRead) -> Iterator[FixedRows]:
    """``read.rows`` are those that came: what other nodes looked at for them they know themselves."""
    before = read.rows
    count = 0
    for portion in portions:
        count += len(portion.rows)
        read.rows = max(read.rows, before + count)
        yield portion


def _together(portions: Sequence[FixedRows]) -> FixedRows:
    if len(portions) == 1:
        return portions[0]
    keys = pa.concat_arrays([portion.keys for portion in portions])
    return FixedRows(keys, np.concatenate([portion.rows for portion in portions]))


class Selection:
    """Selects rows by what a read of them would give."""

    def __init__(self, schema: TableSchema, where: Expr) -> None:
        self._schema, self._where = schema, where
        self._columns = Projection(schema, sorted(names(where)) or schema.output_names[:1], None)
        self._types = {name: schema.output_type(name) for name in names(where)}

    def selected(self, portion: FixedRows) -> FixedRows:
        if not len(portion.rows):
            return portion
        return _taken(portion, self._chosen(portion))

    def of_keys(self, keys: Any) -> Array:
        """Of keys of rows, which those are that it selects; for a predicate that asks about nothing else."""
        layout = RowLayout.of(self._schema)
        rows = np.zeros(len(keys), layout.dtype)
        rows["flags"] = layout.alive
        return self._chosen(FixedRows(keys, rows))

    def _chosen(self, portion: FixedRows) -> Array:
        (batch,) = self._columns.batches([portion], None)
        chosen: Array = mask(batch, self._where, self._types).fill_null(False).to_numpy(zero_copy_only=False)
        return chosen


def _taken(portion: FixedRows, kept: Array) -> FixedRows:
    if kept.all():
        return portion
    index = np.flatnonzero(kept)
    return FixedRows(portion.keys.take(pa.array(index)), portion.rows[index])


def _of_times(portion: FixedRows, slot: KeySlot, times: Times) -> FixedRows:
    low, high = times
    slots = slot.slots(portion.keys)
    kept = np.ones(len(slots), np.bool_) if low is None else slots >= low
    return _taken(portion, kept if high is None else kept & (slots < high))


def _narrowed(
    schema: TableSchema, rollup: Rollup, bounds: KeyRange, within: Times, only: Any
) -> list[tuple[KeyRange, Times]]:
    """Where the rows lie that some rows of the result are made of: parts of the range of keys, and times."""
    key = rolled_schema(schema, rollup).key
    times = [within]
    decoded = decode_key_columns([column.type for column in key], only) if key else []
    if rollup.step is not None:
        times = [_within(each, within) for each in _spans(rollup, decoded[-1].cast(pa.int64()).to_numpy())]
    ranges = [bounds]
    if rollup.by and rollup.by == schema.key_names[: len(rollup.by)]:
        width = 8 if rollup.step is not None else 0
        heads = sorted({each[: len(each) - width] for each in only.to_pylist()})
        ranges = [_cut((head, prefix_end(head)), bounds) for head in heads]
    if len(times) * len(ranges) > _NARROWED_MAX:
        lows, highs = [low for low, _ in times if low is not None], [high for _, high in times if high is not None]
        times = [(min(lows) if len(lows) == len(times) else None, max(highs) if len(highs) == len(times) else None)]
    if len(ranges) > _NARROWED_MAX:
        ranges = [(ranges[0][0], ranges[-1][1])]
    return list(itertools.product(ranges, times))


def _spans(rollup: Rollup, slots: Array) -> Iterator[Times]:
    """Neighbouring slots together."""
    assert rollup.step is not None
    low = high = None
    for start in np.unique(slots).tolist():
        if start != high:
            if low is not None:
                yield low, high
            low = start
        high = rollup.step.end(start)
    if low is not None:
        yield low, high


def _within(times: Times, bounds: Times) -> Times:
    low, high = times
    return (
        low if bounds[0] is None or low is None else max(low, bounds[0]),
        high if bounds[1] is None or high is None else min(high, bounds[1]),
    )


def _cut(part: KeyRange, bounds: KeyRange) -> KeyRange:
    start, end = max(part[0] or b"", bounds[0] or b""), part[1]
    if bounds[1] is not None:
        end = bounds[1] if end is None else min(end, bounds[1])
    return start, end if end is None else max(start, end)


def rolled_batches(
    schema: TableSchema, rolled: FixedRows, outputs: Sequence[str], limit: int | None
) -> Iterator[pa.RecordBatch]:
    """Rows of a result as record batches. Raises OutOfRange for a value that its column cannot hold."""
    keys, rows = rolled
    parts = (
        FixedRows(keys.slice(at, _BATCH_ROWS), rows[at : at + _BATCH_ROWS]) for at in range(0, len(rows), _BATCH_ROWS)
    )
    return Projection(schema, outputs, None).batches(parts, limit)


# -- in words ---------------------------------------------------------------------------------------


def _explained(
    schema: TableSchema, target: TableSchema, rollup: Rollup, lease: Lease, read: RowsRead, rows: int
) -> str:
    by = ", ".join(rollup.by) or "nothing: one row"
    slots = f", slots of {rollup.step}" if rollup.step is not None else ""
    how = "all of them looked at, and filtered by their slots" if read.filtered else "no others looked at"
    return "\n".join(
        (
            f"rollup of {schema.name} at {lease.ts}, by {by}{slots}",
            f"read: {read.rows:,} rows of {read.ranges:,} ranges of keys, in columns; {how}",
            f"selected: {read.selected:,} rows",
            f"combined: {rows:,} rows of {', '.join(column.name for column in target.columns)}",
        )
    )
