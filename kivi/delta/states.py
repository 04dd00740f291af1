"""The states of one column of a delta run: items of all rows in arrays, and where each row's begin.

The twin of ``Cells`` for measures that are no single number (``kivi.states``). What a transaction does to a row's state
is a bag of items; deltas are combined by putting bags together, and reduced where that is worth its time: so nothing
is computed for a row and a batch that folding computes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kivi.states.kinds import Array, ByGroup, Items, Kind, joined, offsets_of, stretches, taken

__all__ = ["States"]

_TIMES: Final = 2
"""Bags of so many times the items of a busy row's state (``Kind.items_max``), on average, are reduced when they are
combined. At 64 items, whatever the kind, combining reduced what folding reduced again: two thirds of its time."""


class States:
    """``offsets`` begin at 0 and have an entry more than there are rows. Immutable."""

    __slots__ = ("_encoded", "items", "kind", "offsets")

    def __init__(self, kind: Kind, offsets: Array, items: Items) -> None:
        self.kind = kind
        self.offsets = offsets
        self.items = items
        self._encoded: list[bytes] | None = None  # aggregates of a few events may share these states

    @staticmethod
    def none(kind: Kind, rows: int) -> States:
        """Empty states."""
        return States(kind, np.zeros(rows + 1, np.int64), kind.empty())

    @staticmethod
    def of_groups(kind: Kind, items: Items, by: ByGroup) -> States:
        """Items in any order, grouped by the row that each is of; those of one row stay in theirs."""
        return States(kind, by.offsets, items if by.order is None else taken(items, by.order))

    @staticmethod
    def decoded(kind: Kind, states: Sequence[bytes]) -> States:
        items, offsets = kind.decode(states)
        return States(kind, offsets, items)

    def encoded(self) -> list[bytes]:
        """The reduced states as bytes."""
        if self._encoded is None:
            self._encoded = self.kind.encode(*self.kind.reduce(self.items, self.offsets))
        return self._encoded

    def at(self, i: int) -> bytes | None:
        """Row ``i`` as bytes, None if it has no items."""
        first, last = int(self.offsets[i]), int(self.offsets[i + 1])
        if first == last:
            return None
        part = self._slice(first, last)
        return self.kind.encode(*self.kind.reduce(part, np.array([0, last - first])))[0]

    def listed(self, rows: range) -> list[Any]:
        part = self if len(rows) == len(self) else self.take(slice(rows.start, rows.stop))
        return [state or None for state in part.encoded()]

    def _slice(self, first: int, last: int) -> Items:
        return tuple(
            None
            if part is None
            else part.slice(first, last - first)
            if isinstance(part, pa.Array)
            else part[first:last]
            for part in self.items
        )

    def take(self, index: Any) -> States:
        """Some rows: a slice of them, or an array of their numbers."""
        if isinstance(index, slice):
            offsets = self.offsets[index.start or 0 : (len(self) if index.stop is None else index.stop) + 1]
            if not len(offsets):
                return States.none(self.kind, 0)
            return States(self.kind, offsets - offsets[0], self._slice(int(offsets[0]), int(offsets[-1])))
        index = np.flatnonzero(index) if index.dtype == np.bool_ else index
        starts, lengths = self.offsets[:-1][index], np.diff(self.offsets)[index]
        offsets = offsets_of(lengths)
        return States(self.kind, offsets, taken(self.items, stretches(starts, lengths)))

    def grouped(self, by: ByGroup) -> States:
        """The rows of each group combined."""
        if self.kind.ordered or int(self.offsets[-1]) > _TIMES * self.kind.items_max * by.groups:
            items = np.repeat(by.group_of, np.diff(self.offsets))
            reduced, offsets = self.kind.reduce_groups(self.items, items, by.groups)
            return States(self.kind, offsets, reduced)
        if by.order is None:
            return States(self.kind, self.offsets[by.offsets], self.items)
        offsets, index = by.moved(self.offsets)
        return States(self.kind, offsets[by.offsets], taken(self.items, index))

    def followed_by(self, other: States) -> States:
        """Of each row its items, and then those of the same row of ``other``."""
        count, more = int(self.offsets[-1]), int(other.offsets[-1])
        if not count or not more:
            return self if count else other
        index = np.empty(count + more, np.int64)
        index[np.arange(count) + np.repeat(other.offsets[:-1], np.diff(self.offsets))] = np.arange(count)
        index[np.arange(more) + np.repeat(self.offsets[1:], np.diff(other.offsets))] = np.arange(count, count + more)
        items = taken(joined([self.items, other.items]), index)
        return States(self.kind, self.offsets + other.offsets, items)

    def stamped(self, stamps: Array | int) -> States:
        """Items that do not know their CTS yet with that of their row."""
        if not self.kind.stamped:
            return self
        each = np.full(len(self), stamps, np.uint64) if isinstance(stamps, int) else stamps
        return States(self.kind, self.offsets, self.kind.stamped_by(self.items, np.repeat(each, np.diff(self.offsets))))

    def inverted(self) -> States:
        """What takes away what this adds."""
        return States(self.kind, self.offsets, self.kind.inverted(self.items))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        return int(self.offsets.nbytes) + sum(int(part.nbytes) for part in self.items if part is not None)

    @staticmethod
    def joined(parts: Sequence[States]) -> States:
        """One after the other."""
        if len(parts) == 1:
            return parts[0]
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        return States(parts[0].kind, offsets_of(lengths), joined([part.items for part in parts]))

    # -- the form in the commit log ----------------------------------------------------------------

    def to_arrow(self) -> Any:
        """A list of structs: ``i0``, ``i1`` ... by their places; a column of ones is left out."""
        named = {f"i{i}": _arrow(part) for i, part in enumerate(self.items) if part is not None}
        return pa.LargeListArray.from_arrays(
            pa.array(self.offsets), pa.StructArray.from_arrays(list(named.values()), list(named))
        )

    @staticmethod
    def from_arrow(kind: Kind, array: Any) -> States:
        """What ``to_arrow`` wrote, without copying. Raises ValueError for what does not fit."""
        if not pa.types.is_large_list(array.type) or array.null_count:
            raise ValueError(f"a column of states is {array.type} with {array.null_count} nulls")
        first = array.offset
        offsets = (
            np.frombuffer(array.buffers()[1], np.int64, first + len(array) + 1)[first:]
            if len(array)
            else np.zeros(1, np.int64)
        )
        items = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        names = [field.name for field in items.type]
        fields = dict(zip(names, items.flatten(), strict=True))
        parts = tuple(_numpy(fields.pop(f"i{i}", None), name, i) for i, name in enumerate(kind.columns))
        if fields:
            raise ValueError(f"states of {kind.state.kind} have the columns {names}")
        return States(kind, offsets - offsets[0], parts)


def _arrow(part: Any) -> Any:
    if isinstance(part, pa.Array):
        return part
    if part.dtype.kind == "V":
        return pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(part.dtype.itemsize), len(part), [None, pa.py_buffer(np.ascontiguousarray(part).tobytes())]
        )
    return pa.array(part)


def _numpy(array: Any, name: str, i: int) -> Any:
    if array is None:
        if i == 0 or name != "int64":
            raise ValueError(f"states have no column i{i}")
        return None
    if array.null_count:
        raise ValueError("an item of a state is null")
    if name == "binary":
        if array.type != pa.large_binary():
            raise ValueError(f"a column of states is {array.type}, not text")
        return array
    if name.startswith("void"):
        width = int(name[4:])
        if array.type != pa.binary(width):
            raise ValueError(f"a column of states is {array.type}, not of {width} bytes")
        if not len(array):
            return np.zeros(0, f"V{width}")
        return np.frombuffer(array.buffers()[1], f"V{width}", len(array), width * array.offset)
    if array.type != pa.from_numpy_dtype(np.dtype(name)):
        raise ValueError(f"a column of states is {array.type}, not {name}")
    return array.to_numpy()
