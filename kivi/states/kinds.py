"""Kinds of states: the contract.

*Items* are a tuple of columns of one length (NumPy arrays, or an Arrow LargeBinaryArray for text), one item a row. None
for a column of counts means that each is 1: most items of a fresh delta are single observations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kivi.errors import DataLoss
from kivi.model.states import State

__all__ = [
    "Array",
    "ByGroup",
    "Items",
    "Kind",
    "Observed",
    "check_lengths",
    "joined",
    "offsets_of",
    "stretches",
    "taken",
]

Array = npt.NDArray[Any]
Items = tuple[Any, ...]


class Observed(NamedTuple):
    """What a measure sees of events: those that it counts, in their order.

    ``values`` of its source, in stored form (text: an Arrow array), without nulls; ``by`` likewise for argmax,
    argmin and weights; ``times`` the event times and ``places`` the places in their commit, for kinds that use the
    order.
    ``stamps``: the CTS of each, where events of several commits are derived together; None: that of the run.
    """

    values: Any
    by: Array | None = None
    times: Array | None = None
    places: Array | None = None
    stamps: Array | None = None


class ByGroup:
    """Rows in the order of their groups, and those of one group in their own order.

    Found when it is first asked for, and then shared by the columns of states of the same rows.
    """

    def __init__(self, group_of: Array, groups: int) -> None:
        self.group_of = group_of
        self.groups = groups
        self._moved: tuple[Array, Array, Array] | None = None

    @cached_property
    def order(self) -> Array | None:
        """The rows, or None if they are in that order already.

        NumPy sorts numbers of 16 bits by counting, in 2.5 ns a row. Of more groups, a row's number and its place are
        sorted as one integer: a tenth of the time of a stable sort by the number. That sort is the stable one all the
        same: where several runs are combined the rows are a few stretches in order, which it finds.
        """
        group_of, rows = self.group_of, len(self.group_of)
        if not (group_of[1:] < group_of[:-1]).any():
            return None
        place_bits = rows.bit_length()
        if self.groups <= 2**16 or self.groups.bit_length() + place_bits > 63:
            return np.argsort(group_of.astype(np.uint16) if self.groups <= 2**16 else group_of, kind="stable")
        packed = group_of << place_bits
        packed |= np.arange(rows)
        packed.sort(kind="stable")
        packed &= (1 << place_bits) - 1
        return packed

    @cached_property
    def offsets(self) -> Array:
        """Where the rows of each group begin, and where the last ones end."""
        return offsets_of(np.bincount(self.group_of, minlength=self.groups))

    def moved(self, offsets: Array) -> tuple[Array, Array]:
        """Of rows with items, by where each row's begin: the same of the rows in ``order``, and the items' old places.

        Columns that observe the same events have the same offsets: those of the last call are remembered.
        """
        if self._moved is None or not np.array_equal(self._moved[0], offsets):
            starts, lengths = offsets[:-1][self.order], np.diff(offsets)[self.order]
            self._moved = offsets, offsets_of(lengths), stretches(starts, lengths)
        return self._moved[1:]


class Kind(ABC):
    """One kind of state with its parameters. Immutable; what it is given, it does not change."""

    columns: ClassVar[tuple[str, ...]]
    """The types of an item's columns: "int32", "int64", "uint64", "float64", "binary", or "void" and its bytes."""
    ordered: bool = False
    """Whether it must be reduced in commit order, and never across commits before it is folded (sums of floats)."""
    stamped: bool = False
    """Whether its items hold the CTS of their event, in the column ``stamp_column``, 0 until it is known."""
    stamp_column: ClassVar[int] = 1
    invertible: bool = False
    """Whether ``inverted`` items take away what the items added."""
    items_max: int = 32
    """About how many items the states of busy rows have when they are reduced."""
    timed: bool = False
    """Whether ``of_events`` needs times and places."""

    def __init__(self, state: State) -> None:
        self.state = state

    @abstractmethod
    def of_events(self, seen: Observed) -> Items:
        """One item for each event, in their order."""

    def grouped(self, seen: Observed, group_of: Array, groups: int) -> tuple[Items, Array] | None:
        """(items, offsets) of events by the number of their group, where that is quicker than an item for each."""
        return None

    def refused(self, seen: Observed) -> Array:
        """The places of the events that ``of_events`` raises about, each whatever stands beside it."""
        return np.zeros(0, np.int64)

    @abstractmethod
    def reduce(self, items: Items, offsets: Array) -> tuple[Items, Array]:
        """The canonical bags: items in a kind's own order within each state. ``offsets`` begin at 0."""

    def reduce_groups(self, items: Items, group_of: Array, groups: int) -> tuple[Items, Array]:
        """``reduce`` of items that are in no order of their states: each has the number of its own."""
        by = ByGroup(group_of, groups)
        return self.reduce(items if by.order is None else taken(items, by.order), by.offsets)

    @abstractmethod
    def encode(self, items: Items, offsets: Array) -> list[bytes]:
        """Reduced states as bytes; the empty bag is b""."""

    @abstractmethod
    def decode(self, states: Sequence[bytes]) -> tuple[Items, Array]:
        """``encode`` backwards. Raises DataLoss."""

    @abstractmethod
    def values(self, states: Sequence[bytes]) -> list[Any]:
        """What is read of each, in the stored form of the column's type; None is null."""

    def inverted(self, items: Items) -> Items:
        """Items that take these away."""
        raise NotImplementedError

    # -- what follows ------------------------------------------------------------------------------

    def empty(self) -> Items:
        """No items."""
        return tuple(_blank(name) for name in self.columns)

    def combined(self, parts: Sequence[tuple[int, bytes]]) -> bytes:
        """One state of encoded ones, which are in commit order, each with the CTS of its commit."""
        filled = [part for part in parts if part[1]]
        items, offsets = self.decode([data for _, data in filled])
        if self.stamped:
            lengths = np.diff(offsets)
            items = self.stamped_by(items, np.repeat(np.array([cts for cts, _ in filled], np.uint64), lengths))
        count = len(items[0])
        return self.encode(*self.reduce(items, np.array([0, count])))[0]

    def stamped_by(self, items: Items, stamps: Array) -> Items:
        """The items, those that do not know their CTS yet with the one given for each."""
        known = items[self.stamp_column]
        if known.all():
            return items
        listed = list(items)
        listed[self.stamp_column] = np.where(known == 0, stamps, known)
        return tuple(listed)


def _blank(name: str) -> Any:
    if name == "binary":
        return pa.array([], pa.large_binary())
    return np.zeros(0, f"V{name[4:]}" if name.startswith("void") else name)


def taken(items: Items, index: Array) -> Items:
    """Some of the items."""
    return tuple(
        None if part is None else part.take(pa.array(index)) if isinstance(part, pa.Array) else part.take(index)
        for part in items
    )


def joined(parts: Sequence[Items]) -> Items:
    """Items one after the other."""
    if len(parts) == 1:
        return parts[0]
    return tuple(_joined(columns, parts) for columns in zip(*parts, strict=True))


def _joined(columns: tuple[Any, ...], parts: Sequence[Items]) -> Any:
    if all(column is None for column in columns):
        return None
    if isinstance(columns[0], pa.Array):
        return pa.concat_arrays(columns)
    filled = [np.ones(len(part[0]), np.int64) if c is None else c for c, part in zip(columns, parts, strict=True)]
    return np.concatenate(filled)


def check_lengths(state: State, lengths: Array, each: int) -> None:
    """Raises DataLoss unless each state has so many numbers (or bytes) an item: what one lacks, the next would lose."""
    if (lengths % each).any():
        raise DataLoss(f"a state of {state.kind} is not made of items of {each}: run kivi verify")


def offsets_of(lengths: Array) -> Array:
    """Where each state begins, and where the last ends."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def stretches(starts: Array, lengths: Array) -> Array:
    """The numbers from each start on, so many of each, one stretch after the other."""
    if not lengths.all():
        filled = np.flatnonzero(lengths)
        starts, lengths = starts[filled], lengths[filled]
    if not len(starts):
        return starts
    ends = np.cumsum(lengths)
    steps = np.ones(int(ends[-1]), np.int64)
    steps[0] = starts[0]
    steps[ends[:-1]] = starts[1:] - starts[:-1] - lengths[:-1] + 1
    return np.cumsum(steps, out=steps)
