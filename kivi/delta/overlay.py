"""Base rows with pending operations over them, in columns: what a scan of a table with rows of fixed width sees.

``Gathered.fold`` starts from the rows that have deltas and asks for their base; a scan starts from base, where most
rows have none. So the keys of a portion of base and of the delta rows in its range are sorted together, once::

    base     a  b     d        Waiting.below(stop)       a  b  b+  c+  d  d+  d+     stable: base first, then CTS order
    runs        b+ c+ d+ d+   ------------------------>  fold each key's deltas over its base row, or over nothing

The fold itself is the one of consolidation (``kivi.delta.gather.new_rows``), to the last bit.

Pure: no I/O and no clock; timestamps are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from kivi.delta.gather import barriers_of, cells_of, cut_at_barriers, in_cts_order, new_rows, stamps_of
from kivi.delta.order import Window, sorted_keys
from kivi.delta.runs import Array, DeltaRun
from kivi.encoding.base_rows import RowLayout, Version

__all__ = ["FixedRows", "Waiting", "Window", "fold_over", "put_over"]


class FixedRows(NamedTuple):
    """Rows in key order: distinct ``keys`` (a LargeBinaryArray) and ``rows`` of their ``RowLayout.dtype``.

    A row of zeros is no row, as one of flags 0 is a tombstone: CTS begin at 1.
    """

    keys: Any
    rows: Array

    @staticmethod
    def none(layout: RowLayout) -> FixedRows:
        return FixedRows(pa.array([], pa.large_binary()), np.zeros(0, layout.dtype))

    @staticmethod
    def of_versions(layout: RowLayout, pairs: Sequence[tuple[bytes, Version]]) -> FixedRows:
        """Of rows that may be of a later definition of the table: without the columns that the layout does not know."""
        known = len(layout.columns)
        rows = [layout.encode(version._replace(cells=version.cells[:known])) for _, version in pairs]
        return FixedRows(pa.array([key for key, _ in pairs], pa.large_binary()), layout.rows_of(rows))

    def split(self, key: bytes) -> tuple[FixedRows, FixedRows]:
        """The rows below ``key`` and the others."""
        at = DeltaRun(self.keys, 0, ()).lower(key)
        return FixedRows(self.keys.slice(0, at), self.rows[:at]), FixedRows(self.keys.slice(at), self.rows[at:])

    def alive(self) -> FixedRows:
        """Without tombstones."""
        alive = self.rows["flags"] & 1
        if alive.all():
            return self
        kept = np.flatnonzero(alive)
        return FixedRows(self.keys.take(pa.array(kept)), self.rows[kept])


class Waiting:
    """Windows over the same keys, taken from the front, some of all of them at a time."""

    def __init__(self, windows: Sequence[Window], rows_max: int) -> None:
        self._left = list(windows)
        self._rows_max = rows_max

    def below(self, stop: bytes | None) -> tuple[list[Window], bytes | None]:
        """Takes what lies below ``stop`` (None: all), and says up to where: less far if that is much more than
        ``rows_max`` rows. Then ask again."""
        found = [(run, self._until(run, rows, stop)) for run, rows in self._left]
        if sum(len(rows) for _, rows in found) > self._rows_max:
            share = self._rows_max // len(found)
            # Behind that key and not at it: a run may have many rows of one key.
            stop = min(run.key_at(rows.start + share) for run, rows in found if len(rows) > share) + b"\0"
            found = [(run, self._until(run, rows, stop)) for run, rows in found]
        left = [(run, range(taken.stop, rows.stop)) for (run, taken), (_, rows) in zip(found, self._left, strict=True)]
        self._left = [window for window in left if window[1]]
        return [window for window in found if window[1]], stop

    @staticmethod
    def _until(run: DeltaRun, rows: range, stop: bytes | None) -> range:
        return rows if stop is None else range(rows.start, max(rows.start, min(rows.stop, run.lower(stop))))

    def __bool__(self) -> bool:
        return bool(self._left)


def fold_over(layout: RowLayout, base: FixedRows, windows: Sequence[Window], upto: int) -> FixedRows:
    """``base`` with the deltas at or below ``upto`` that it does not include, and the rows that they make."""
    count = len(base.rows)
    parts = [(DeltaRun(base.keys, 0, ()), range(count)), *windows] if count else windows
    found = sorted_keys(parts)
    group = np.cumsum(found.first) - 1
    is_delta = found.order >= count
    place, group_of = found.order[is_delta] - count, group[is_delta]
    old = np.zeros(int(group[-1]) + 1, layout.dtype)
    old[group[~is_delta]] = base.rows  # each is the first of its key, and they are in order
    stamps = stamps_of(windows)[place]
    after = (stamps <= upto) & (stamps > old["cts"][group_of])
    if not after.all():
        place, group_of, stamps = place[after], group_of[after], stamps[after]
    group_of, place, stamps = in_cts_order(group_of, place, stamps)
    if len(place) and (barriers := barriers_of(windows)) is not None:
        counts, anew = cut_at_barriers(group_of, barriers[place])
        old[anew] = np.zeros(1, layout.dtype)[0]
        group_of, place, stamps = group_of[counts], place[counts], stamps[counts]
    if len(place):
        columns = cells_of(windows, place)
        target, new = new_rows(layout, old, old["flags"] & 1 == 1, group_of, stamps, columns)
        old[target] = new
    return FixedRows(found.array(found.order[found.first]), old)


def put_over(base: FixedRows, changed: FixedRows) -> FixedRows:
    """``base`` with the rows of ``changed`` in place of those with the same key."""
    if not len(base.rows) or not len(changed.rows):
        return base if len(base.rows) else changed
    sides = [DeltaRun(side.keys, 0, ()) for side in (base, changed)]
    found = sorted_keys([(side, range(side.rows)) for side in sides])
    last = np.append(found.first[1:], True)
    chosen = found.order[last]
    return FixedRows(found.array(chosen), np.concatenate([base.rows, changed.rows])[chosen])
