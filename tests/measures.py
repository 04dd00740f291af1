"""The states of measures in plain Python, for the replay oracle: what every reader must find (R20).

Each is written from its definition, over exact Python numbers, and shares nothing with ``kivi.states``:

``Quantiles``  bucket i holds (g**(i-1), g**i] with g = 2**(2**-scale), so v is in it where v**(2**scale) <= 2**i: whole
               numbers decide that
``Distinct``   the documented hash in integers modulo 2**64, the greatest rank of each register, Ertl's estimator
``Moments``    Fractions; of floats the sums in commit order (R10)
``Winner``     the least or greatest (by, time, CTS, position)
``Extremes``   sorting
``Top``        counting everything; beyond ``most`` distinct values those with the least hashes are told apart

A ``Cell`` is one state of one measure, immutable. ``plain`` makes of what a reader found what ``Cell.shown`` is.
"""

from __future__ import annotations

import datetime as dt
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

from kivi.model import quantiles as kivi_quantiles
from kivi.model import values

__all__ = ["Cell", "Distinct", "Extremes", "Measure", "Moments", "Quantiles", "Seen", "Top", "Winner", "plain"]

_STATES = (kivi_quantiles.Quantiles, values.Top)
_WORD = 2**64


@dataclass(frozen=True, slots=True)
class Seen:
    """One observation: its value, what argmax compares, and its place in the total order of events."""

    value: Any
    by: Any = None
    time: int = 0
    cts: float = 0
    place: int = 0


class Measure(ABC):
    """``one`` observation as a state, ``both`` states as one, and what is ``read`` of a state (None: of nothing)."""

    @abstractmethod
    def one(self, seen: Seen) -> Any: ...

    @abstractmethod
    def both(self, a: Any, b: Any) -> Any: ...

    @abstractmethod
    def read(self, state: Any) -> Any: ...

    def observed(self, what: Any, time: int, cts: float, place: int) -> Cell | None:
        """The state of one event, of which ``what`` is observed: a value, (value, by), or None."""
        value, by = what if isinstance(what, tuple) else (what, None)
        if value is None or (isinstance(what, tuple) and by is None):
            return None
        return Cell(self, self.one(Seen(value, by, time, cts, place)))


class Cell:
    """A state, and what is read of it, which is worked out once."""

    def __init__(self, measure: Measure, state: Any = None) -> None:
        self.measure = measure
        self.state = state

    @cached_property
    def shown(self) -> Any:
        return self.measure.read(self.state)

    def combined(self, other: Cell) -> Cell:
        if self.state is None or other.state is None:
            return other if self.state is None else self
        return Cell(self.measure, self.measure.both(self.state, other.state))


def plain(found: Any) -> Any:
    """A row, rows or a value as the oracle compares them: quantiles by their buckets, a top by what it lists."""
    if isinstance(found, list):
        like = found and found[0]  # all rows of a table have the same columns
        changes = not isinstance(like, Mapping) or any(isinstance(value, _STATES) for value in like.values())
        return [plain(each) for each in found] if changes else found
    if isinstance(found, Mapping):
        return {name: plain(value) if isinstance(value, _STATES) else value for name, value in found.items()}
    if isinstance(found, kivi_quantiles.Quantiles):
        return (found.scale, *found.buckets())
    if isinstance(found, values.Top):
        return (*found.items, ("others", found.others))
    return found


def _added(a: Mapping[Any, int], b: Mapping[Any, int]) -> dict[Any, int]:
    out = dict(a)
    for key, count in b.items():
        out[key] = out.get(key, 0) + count
    return out


class Quantiles(Measure):
    def __init__(self, scale: int) -> None:
        self.scale = scale

    def one(self, seen: Seen) -> Any:
        return {code(float(seen.value), self.scale): 1}

    def both(self, a: Any, b: Any) -> Any:
        return _added(a, b)

    def read(self, state: Any) -> Any:
        return (self.scale, *sorted((state or {}).items()))


@lru_cache(maxsize=100_000)
def code(value: float, scale: int) -> int:
    """0 for zero; the number of the bucket, counted from below the least float64, with the sign of the value."""
    if not value:
        return 0
    top, bottom = abs(Fraction(value)).as_integer_ratio()  # the bottom is a power of 2
    bottom = bottom.bit_length() - 1
    fine = 2 ** max(scale, 0)
    bucket = (top**fine - 1).bit_length() - bottom * fine  # the least i with v**fine <= 2**i
    coarse = Fraction(2) ** min(scale, 0)
    number = math.ceil(bucket * coarse) + math.ceil(1075 * fine * coarse) + 1
    return number if value > 0 else -number


@lru_cache(maxsize=100_000)
def hash_of(data: bytes) -> int:
    """As ``kivi.states.hashing`` documents it."""
    h = 0x9E3779B97F4A7C15 ^ len(data)
    for at in range(0, len(data), 8):
        h ^= int.from_bytes(data[at : at + 8], "little")
        h ^= h >> 30
        h = h * 0xBF58476D1CE4E5B9 % _WORD
        h ^= h >> 27
        h = h * 0x94D049BB133111EB % _WORD
        h ^= h >> 31
    return h


def canonical(value: Any) -> bytes:
    """The encoding of a value that is hashed."""
    match value:
        case str():
            return value.encode()
        case bytes():
            return value
        case float():
            return struct.pack("<d", value + 0.0)
        case _:
            return struct.pack("<q", stored(value))


def stored(value: Any) -> int:
    """A whole number for an int, a bool, a moment (microseconds) or a decimal (unscaled)."""
    if isinstance(value, Decimal):
        return int(value.scaleb(-int(value.as_tuple().exponent)))
    if isinstance(value, dt.datetime):
        return (value - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)
    return int(value)


class Distinct(Measure):
    def __init__(self, bits: int) -> None:
        self.bits = bits

    def one(self, seen: Seen) -> Any:
        h, rest = hash_of(canonical(seen.value)), 64 - self.bits
        return {h >> rest: rest - (h % 2**rest).bit_length() + 1}

    def both(self, a: Any, b: Any) -> Any:
        return {register: max(a.get(register, 0), b.get(register, 0)) for register in a.keys() | b.keys()}

    def read(self, state: Any) -> Any:
        ranks, registers = list((state or {}).values()), 2**self.bits
        if not ranks:
            return 0
        most = 64 - self.bits
        z = registers * _tau(1 - ranks.count(most + 1) / registers)
        for rank in range(most, 0, -1):
            z = (z + ranks.count(rank)) / 2
        z += registers * _sigma(1 - len(ranks) / registers)
        return round(registers**2 / (2 * math.log(2) * z))


def _sigma(x: float) -> float:
    return math.inf if x == 1 else x + math.fsum(x ** (2**k) * 2.0 ** (k - 1) for k in range(1, 64))


def _tau(x: float) -> float:
    return (1 - x - math.fsum((1 - x ** (2.0**-k)) ** 2 * 2.0**-k for k in range(1, 64))) / 3 if 0 < x < 1 else 0.0


class Moments(Measure):
    """``kind``: avg, var or stddev. The state is (count, sum, sum of squares)."""

    def __init__(self, kind: str, *, population: bool = False) -> None:
        self.kind = kind
        self.population = population

    def one(self, seen: Seen) -> Any:
        value = seen.value if isinstance(seen.value, float) else Fraction(seen.value)
        return 1, value, value * value

    def both(self, a: Any, b: Any) -> Any:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    def read(self, state: Any) -> Any:
        count, total, squares = state or (0, 0, 0)
        below = count - (not self.population)
        if not count or (self.kind != "avg" and not below):
            return None
        if self.kind == "avg":
            return float(total / count)
        spread = (Fraction(squares) - Fraction(total) ** 2 / count) / below
        if isinstance(total, float):  # of sums that are rounded, and may say less than 0
            spread = Fraction(max(0.0, float(spread)))
        return _root(spread) if self.kind == "stddev" else float(spread)


def _root(value: Fraction) -> float:
    with localcontext() as context:
        context.prec = 60
        return float((Decimal(value.numerator) / Decimal(value.denominator)).sqrt())


class Winner(Measure):
    """``kind``: first, last, argmax or argmin. The state is the best so far, in an order of its own."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def one(self, seen: Seen) -> Any:
        return seen

    def both(self, a: Any, b: Any) -> Any:
        return min(a, b, key=self.rank)

    def rank(self, seen: Seen) -> Any:
        order = (seen.time, seen.cts, seen.place)
        match self.kind:
            case "first":
                return order
            case "last":
                return tuple(-part for part in order)
            case _:
                by = seen.by if isinstance(seen.by, (float, Decimal)) else stored(seen.by)
                return (-by if self.kind == "argmax" else by, *order)

    def read(self, state: Any) -> Any:
        return None if state is None else state.value


class Extremes(Measure):
    """The ``n`` largest or smallest values, the best first."""

    def __init__(self, kind: str, n: int) -> None:
        self.largest = kind == "largest"
        self.n = n

    def one(self, seen: Seen) -> Any:
        return [seen.value]

    def both(self, a: Any, b: Any) -> Any:
        return sorted(a + b, reverse=self.largest)[: self.n]

    def read(self, state: Any) -> Any:
        return state or []


class Top(Measure):
    """The state is the count of every value that there was."""

    def __init__(self, k: int, most: int = 1_000) -> None:
        self.k = k
        self.most = most

    def one(self, seen: Seen) -> Any:
        return {seen.value: 1}

    def both(self, a: Any, b: Any) -> Any:
        return _added(a, b)

    def read(self, state: Any) -> Any:
        counts = state or {}
        kept = sorted(counts, key=lambda value: hash_of(_listed(value)))[: self.most]
        shown = sorted(((value, counts[value]) for value in kept), key=lambda item: (-item[1], item[0]))
        return (*shown[: self.k], ("others", sum(counts.values()) - sum(counts[value] for value in kept)))


def _listed(value: Any) -> bytes:
    """A float as the whole number that orders as it does; all else as it is hashed."""
    if not isinstance(value, float):
        return canonical(value)
    bits = struct.unpack("<q", canonical(value))[0]
    return struct.pack("<q", bits if bits >= 0 else bits ^ (2**63 - 1))
