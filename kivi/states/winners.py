"""Winners: first, last, argmax, argmin, largest and smallest. A state is the best items, one or n, in an order.

The total order of events is (event time, CTS, position in the commit), R20. It decides first and last, and among the
events with an equal ``by`` the first of them wins argmax and argmin. largest and smallest keep values only, each as
often as it was observed, and need no order.

An item of the former is (rank, CTS, position, time, value): ``rank`` is what is compared first, an ``ordered`` integer
that is least for the best. The CTS is 0 until it is known: that of the run or the record that holds the item.

The stored form of a winner is varints (rank, CTS, position, time, and an integer value, zigzag but for the CTS), behind
their length in one byte, then a value that is text. Of largest and smallest: ``kivi.model.values``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import flat
from kivi.errors import DataLoss
from kivi.model import varints
from kivi.model.states import State
from kivi.model.values import ordered, unordered
from kivi.states.kinds import Array, Items, Kind, Observed, offsets_of, taken

__all__ = ["ExtremesKind", "WinnerKind"]

_TEXT: Final = frozenset({"string", "bytes"})


class WinnerKind(Kind):
    """first, last, argmax, argmin: the value of one event."""

    stamped = True
    timed = True

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.text = state.value.name in _TEXT
        self.columns = ("int64", "uint64", "int64", "int64", "binary" if self.text else "int64")  # type: ignore[misc]

    def of_events(self, seen: Observed) -> Items:
        assert seen.times is not None
        assert seen.places is not None
        times, places = seen.times, seen.places
        stamps = np.zeros(len(times), np.uint64) if seen.stamps is None else seen.stamps
        value = flat(seen.values).cast(pa.large_binary()) if self.text else ordered(seen.values)
        match self.state.kind:
            case "first" | "last":
                rank = times
            case _:
                assert seen.by is not None
                rank = ordered(seen.by)
        return rank if self.state.kind in ("first", "argmin") else ~rank, stamps, places, times, value

    def reduce(self, items: Items, offsets: Array) -> tuple[Items, Array]:
        lengths = np.diff(offsets)
        filled = np.flatnonzero(lengths)
        if len(items[0]) == len(filled):
            return items, offsets
        rows = np.repeat(np.arange(len(lengths)), lengths)
        starts = offsets[:-1][filled]
        place = np.zeros(len(lengths), np.int64)
        best = np.zeros(len(lengths), np.int64)
        best[filled] = np.minimum.reduceat(items[0], starts)
        index = np.flatnonzero(items[0] == best[rows])
        if len(index) > len(filled):  # equals: the rest of the order decides
            _rank, stamps, places, times, _ = (
                part.take(pa.array(index)) if isinstance(part, pa.Array) else part[index] for part in items
            )
            later = self.state.kind == "last"
            keys = (~places if later else places, ~stamps if later else stamps, times, rows[index])
            index = index[np.lexsort(keys)]
            first = np.ones(len(index), np.bool_)
            np.not_equal(rows[index][1:], rows[index][:-1], out=first[1:])
            index = index[first]
        place[filled] = index
        return taken(items, place[filled]), offsets_of(lengths > 0)

    def encode(self, items: Items, offsets: Array) -> list[bytes]:
        rank, stamps, places, times, value = items
        numbers = [varints.zigzag(rank), stamps, varints.zigzag(places), varints.zigzag(times)]
        if not self.text:
            numbers.append(varints.zigzag(value))
        table = np.stack(numbers, axis=1).ravel() if len(rank) else np.zeros(0, np.uint64)
        heads = varints.encode(table, np.arange(len(rank) + 1) * len(numbers))
        texts = value.to_pylist() if self.text else [b""] * len(rank)
        states = [len(head).to_bytes(1, "little") + head + text for head, text in zip(heads, texts, strict=True)]
        if len(states) == len(offsets) - 1:
            return states
        out = [b""] * (len(offsets) - 1)
        for i, state in zip(np.flatnonzero(np.diff(offsets)).tolist(), states, strict=True):
            out[i] = state
        return out

    def decode(self, states: Sequence[bytes]) -> tuple[Items, Array]:
        filled = [state for state in states if state]
        numbers, ends = varints.decode([state[1 : 1 + state[0]] for state in filled])
        width = 4 if self.text else 5
        if len(ends) > 1 and (np.diff(ends) != width).any():
            raise DataLoss(f"a state of {self.state.kind} does not have {width} numbers: run kivi verify")
        table = numbers.reshape(-1, width)
        signed = [varints.unzigzag(np.ascontiguousarray(table[:, i])) for i in range(width)]
        texts = pa.array([state[1 + state[0] :] for state in filled], pa.large_binary()) if self.text else signed[4]
        stamps = np.ascontiguousarray(table[:, 1])
        return (signed[0], stamps, signed[2], signed[3], texts), offsets_of(
            np.array([bool(s) for s in states], np.int64)
        )

    def values(self, states: Sequence[bytes]) -> list[Any]:
        items, offsets = self.decode(states)
        type_ = self.state.value
        if self.text:
            found = items[4].cast(pa.large_string() if type_.name == "string" else pa.large_binary()).to_pylist()
        else:
            found = unordered(type_.name, items[4]).tolist()
        each = iter(found)
        return [next(each) if length else None for length in np.diff(offsets).tolist()]


class ExtremesKind(Kind):
    """largest, smallest: the n best values."""

    columns = ("int64",)

    def of_events(self, seen: Observed) -> Items:
        values = ordered(seen.values)
        return (values if self.state.kind == "smallest" else ~values,)

    def reduce(self, items: Items, offsets: Array) -> tuple[Items, Array]:
        lengths = np.diff(offsets)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        order = np.lexsort((items[0], rows))
        rank = np.arange(len(order)) - np.repeat(offsets[:-1], lengths)
        kept = order[rank < self.state.size]
        return (items[0][kept],), offsets_of(np.minimum(lengths, self.state.size))

    def encode(self, items: Items, offsets: Array) -> list[bytes]:
        values = items[0] if self.state.kind == "smallest" else ~items[0]
        return varints.encode(varints.zigzag(varints.gaps_of(values, offsets)), offsets)

    def decode(self, states: Sequence[bytes]) -> tuple[Items, Array]:
        numbers, offsets = varints.decode(states)
        values = varints.summed_gaps(varints.unzigzag(numbers), offsets)
        return (values if self.state.kind == "smallest" else ~values,), offsets

    def values(self, states: Sequence[bytes]) -> list[Any]:
        return list(states)
