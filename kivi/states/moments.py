"""Moments: avg, var and stddev. An item is the count, the sum and, for the latter two, the sum of squares.

Of integers and decimals they are exact: sums are in limbs of 32 bits (three for a sum, five for a sum of squares, the
last one signed), each in an int64, so that limbs of 2**30 items are added before they are carried; and they become a
float64 once, when they are read: the one nearest to the exact value. Of float64 they are float64, added strictly left
to right in commit order, as SUM does (R10).

var and stddev are of the sample (n - 1), null of fewer than two values, as in SQL; ``population`` divides by n.

A finite float may have a square that is not, beyond about 1e154. Such an event is accepted, as nothing else that is
measured of it is wrong; the sum of squares is infinite from then on, and var and stddev are OutOfRange when they are
read (R10). To scale squares would need the scale in the state, and all numbers of a column to be of one.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np

from kivi.errors import OutOfRange
from kivi.model import varints
from kivi.model.states import State
from kivi.states.kinds import Array, Items, Kind, Observed, check_lengths, offsets_of

__all__ = ["moments_kind"]

_LIMB: Final = 32
_LOW: Final = 2**32 - 1
_SUM: Final = 3
_SQUARES: Final = 5
_PLAIN_MAX: Final = 2**62


def moments_kind(state: State) -> Kind:
    """Exact sums, or those of floats."""
    return FloatMoments(state) if state.value.name == "float64" else ExactMoments(state)


class _Moments(Kind):
    @property
    def squares(self) -> bool:
        return self.state.kind != "avg"

    def grouped(self, seen: Observed, group_of: Array, groups: int) -> tuple[Items, Array] | None:
        """One item for each group that has any."""
        items = tuple(_added(part, group_of, groups) for part in self.of_events(seen))
        kept = np.flatnonzero(items[0])
        self.check(items)
        items = self.carried(tuple(part[kept] for part in items))
        return items, offsets_of(np.bincount(kept, minlength=groups))

    def reduce(self, items: Items, offsets: Array) -> tuple[Items, Array]:
        lengths = np.diff(offsets)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        added = self.carried(tuple(_added(part, rows, len(lengths)) for part in items))
        kept = np.flatnonzero(lengths if self.ordered else np.logical_or.reduce([part != 0 for part in added]))
        return tuple(part[kept] for part in added), offsets_of(np.bincount(kept, minlength=len(lengths)))

    def values(self, states: Sequence[bytes]) -> list[Any]:
        items, offsets = self.decode(states)
        listed = [part.tolist() for part in items]
        found: list[Any] = [None] * len(states)
        for i, row in zip(np.flatnonzero(np.diff(offsets)).tolist(), zip(*listed, strict=True), strict=True):
            found[i] = self._value(row)
        return found

    @abstractmethod
    def _value(self, row: tuple[Any, ...]) -> float | None:
        """What is read of one item."""

    def carried(self, items: Items) -> Items:
        return items

    def check(self, items: Items) -> None:
        """Raises OutOfRange for a sum of one commit's values that has left the finite numbers."""


def _added(part: Array, group_of: Array, groups: int) -> Array:
    """Sums by group; ``np.add.at`` adds strictly left to right."""
    sums = np.zeros(groups, part.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        np.add.at(sums, group_of, part)
    return sums


class ExactMoments(_Moments):
    invertible = True

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.columns = ("int64",) * (1 + _SUM + (_SQUARES if self.squares else 0))  # type: ignore[misc]

    def of_events(self, seen: Observed) -> Items:
        values = seen.values.astype(np.int64, copy=False)
        out = [np.ones(len(values), np.int64), values & _LOW, values >> _LIMB, np.zeros(len(values), np.int64)]
        if self.squares:
            out += _squared(values)
        return tuple(out)

    def grouped(self, seen: Observed, group_of: Array, groups: int) -> tuple[Items, Array] | None:
        values = seen.values.astype(np.int64, copy=False)
        most = max(-int(values.min()), int(values.max())) if len(values) else 0
        if most * (most if self.squares else 1) * len(values) >= _PLAIN_MAX:
            return super().grouped(seen, group_of, groups)
        counts = np.bincount(group_of, minlength=groups)  # everything fits 64 bits: three sums instead of nine
        kept = np.flatnonzero(counts)
        items = [counts[kept].astype(np.int64, copy=False), *_limbs(_added(values, group_of, groups)[kept], _SUM)]
        if self.squares:
            items += _limbs(_added(values * values, group_of, groups)[kept], _SQUARES)
        return tuple(items), offsets_of(counts > 0)

    def carried(self, items: Items) -> Items:
        out = [items[0]]
        for start, count in ((1, _SUM), (1 + _SUM, _SQUARES))[: 1 + self.squares]:
            carry: Any = 0
            for i in range(start, start + count):
                limb = items[i] + carry
                if i < start + count - 1:
                    carry, limb = limb >> _LIMB, limb & _LOW
                out.append(limb)
        return tuple(out)

    def encode(self, items: Items, offsets: Array) -> list[bytes]:
        numbers = np.stack(items, axis=1).ravel() if len(items[0]) else np.zeros(0, np.int64)
        return varints.encode(varints.zigzag(numbers), offsets * len(items))

    def decode(self, states: Sequence[bytes]) -> tuple[Items, Array]:
        numbers, offsets = varints.decode(states)
        check_lengths(self.state, np.diff(offsets), len(self.columns))
        table = varints.unzigzag(numbers).reshape(-1, len(self.columns))
        return tuple(np.ascontiguousarray(table[:, i]) for i in range(table.shape[1])), offsets // len(self.columns)

    def inverted(self, items: Items) -> Items:
        return self.carried(tuple(-part for part in items))

    def _value(self, row: tuple[int, ...]) -> float | None:
        count, total = row[0], _whole(row[1 : 1 + _SUM])
        unit = 10**self.state.value.scale
        if count <= 0:
            return None
        if not self.squares:
            return float(total / (count * unit))
        below = count if self.state.size else count - 1
        if not below:
            return None
        spread = count * _whole(row[1 + _SUM :]) - total * total
        variance = Fraction(spread, count * below * unit * unit)
        return _root(variance) if self.state.kind == "stddev" else float(variance)


def _root(value: Fraction) -> float:
    """The float64 nearest to the square root of an exact number, whatever its size.

    Of 64 bits, and of one more that says whether there is anything below them: without it what lies just above the
    middle of two floats is taken for it.
    """
    top, bottom = value.numerator, value.denominator
    shift = max(0, 130 - (top.bit_length() - bottom.bit_length())) // 2
    root = math.isqrt((top << 2 * shift) // bottom)
    return float(Fraction(2 * root + (root * root * bottom != top << 2 * shift), 2 << shift))


def _whole(limbs: Sequence[int]) -> int:
    return sum(limb << (_LIMB * i) for i, limb in enumerate(limbs))


def _limbs(values: Array, count: int) -> list[Array]:
    """An int64 as limbs, the last one signed."""
    rest = values >> 63
    return [values & _LOW, (values >> _LIMB) & _LOW, *[rest & _LOW] * (count - 3), rest]


def _squared(values: Array) -> list[Array]:
    """The squares of int64 in five limbs that are not carried yet: each is below 2**34."""
    size = np.abs(values).view(np.uint64)  # of -2**63 too
    high, low = size >> np.uint64(_LIMB), size & np.uint64(_LOW)
    mask, shift = np.uint64(_LOW), np.uint64(_LIMB)
    least, middle, most = low * low, high * low * np.uint64(2), high * high
    limbs = [least & mask, (least >> shift) + (middle & mask), (middle >> shift) + (most & mask), most >> shift]
    return [*(limb.view(np.int64) for limb in limbs), np.zeros(len(values), np.int64)]


class FloatMoments(_Moments):
    ordered = True

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.columns = ("int64", "float64", "float64") if self.squares else ("int64", "float64")  # type: ignore[misc]

    def of_events(self, seen: Observed) -> Items:
        values = seen.values + 0.0  # -0.0 + 0.0 is 0.0
        ones = np.ones(len(values), np.int64)
        with np.errstate(over="ignore"):
            return (ones, values, values * values) if self.squares else (ones, values)

    def check(self, items: Items) -> None:
        if not np.isfinite(items[1]).all():
            raise OutOfRange(
                f"these events add up to more than a float64 holds in a {self.state.kind}", column=self.state.kind
            )

    def encode(self, items: Items, offsets: Array) -> list[bytes]:
        data = np.stack([part.view(np.int64) for part in items], axis=1).astype("<i8").tobytes()
        width = 8 * len(items)
        bounds = (offsets * width).tolist()
        return [data[a:b] for a, b in itertools.pairwise(bounds)]

    def decode(self, states: Sequence[bytes]) -> tuple[Items, Array]:
        width = len(self.columns)
        lengths = np.fromiter(map(len, states), np.int64, len(states))
        check_lengths(self.state, lengths, 8 * width)
        table = np.frombuffer(b"".join(states), "<i8").reshape(-1, width)
        parts = [np.ascontiguousarray(table[:, i]) for i in range(width)]
        return (parts[0], *(part.view(np.float64) for part in parts[1:])), offsets_of(lengths // (8 * width))

    def _value(self, row: tuple[Any, ...]) -> float | None:
        count, total = row[0], row[1]
        if not self.squares:
            return float(total / count)
        below = count if self.state.size else count - 1
        if not below:
            return None
        if not math.isfinite(total) or not math.isfinite(row[2]):
            return math.nan
        exact = Fraction(row[2]) - Fraction(total) ** 2 / count  # of the sums as they were rounded
        variance = max(0.0, float(exact / below))
        return math.sqrt(variance) if self.state.kind == "stddev" else variance
