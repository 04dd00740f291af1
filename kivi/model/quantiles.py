"""Quantiles: log-spaced buckets of exact counts, and what is read from them.

The buckets are those of OpenTelemetry's exponential histograms: with g = 2**(2**-scale), bucket i holds the values in
(g**(i-1), g**i]. The value given for a bucket, 2 g**i / (g + 1), is within (g - 1) / (g + 1) of every value in it,
relative to that value. ``scale_of(0.01)`` is 6, whose g is 1.0109 and whose error is 0.54 %.

A value becomes one integer, its *code*, which orders as the values do: 0 for zero, i + bias + 1 for a positive value in
bucket i, and the negative of that for its negative. ``bias`` makes room for the buckets below 1, down to the least
positive float64, so codes begin at 1. An integer is put into the bucket of the float64 nearest to it.

The state is the counts by code, those that are zero left out: a commutative group under addition, so neither batching
nor order nor when it was consolidated changes a bit of it (R20), and removing an event is adding -1.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kivi.errors import DataLoss, InvalidArgument
from kivi.model import varints
from kivi.model.given import shown

__all__ = ["SCALE_MAX", "Quantiles", "accuracy_of", "codes_of", "quantile_of", "scale_of", "upper_bounds"]

Array = npt.NDArray[Any]
SCALE_MAX: Final = 16
_SCALE_MIN: Final = -4
_MANTISSA: Final = 52
_LOWEST_EXPONENT: Final = -1075
"""Below the exponent of every positive float64, subnormal ones included."""


def accuracy_of(scale: int) -> float:
    """The relative error of a bucket's value: (g - 1) / (g + 1)."""
    g = 2.0**2.0**-scale
    return float((g - 1) / (g + 1))


def scale_of(accuracy: float) -> int:
    """The least scale whose buckets are that accurate. Raises InvalidArgument."""
    if (
        not isinstance(accuracy, (int, float))
        or isinstance(accuracy, bool)
        or not accuracy_of(SCALE_MAX) <= accuracy < 1
    ):
        raise InvalidArgument(
            f"accuracy {shown(accuracy)} is not a relative error from {accuracy_of(SCALE_MAX):.1e} to below 1, such as "
            "0.01"
        )
    return next(s for s in range(_SCALE_MIN, SCALE_MAX + 1) if accuracy_of(s) <= accuracy)


def bias_of(scale: int) -> int:
    """What makes the number of the lowest bucket 0."""
    return -math.floor(_LOWEST_EXPONENT * 2.0**scale)


_TABLED_FROM: Final = 4_096
"""Fewer values are not worth a table."""
_TABLED_SCALE_MAX: Final = 7
_AT_ONCE: Final = 16_384
"""Values of which what is computed on the way to their codes stays in a processor's cache: 9 ns each, and not 23."""


@lru_cache(maxsize=SCALE_MAX + 1)
def _cells(scale: int) -> tuple[Array, Array]:
    """For each value of a mantissa's first ``scale + 1`` bits: how many bounds lie below its cell, and the mantissa of
    the one bound that may lie in it. Bounds are 2**(j / 2**scale), rounded once."""
    with localcontext() as context:
        context.prec = 60
        ratio = Decimal(2) ** (Decimal(1) / Decimal(2**scale))
        bounds, bound = [], Decimal(1)
        for _ in range(2**scale):
            bounds.append(int(((bound - 1) * 2**_MANTISSA).to_integral_value(rounding="ROUND_FLOOR")))
            bound *= ratio
    mantissas = np.array(bounds, np.int64)
    width = 1 << (_MANTISSA - scale - 1)
    starts = np.arange(2 ** (scale + 1), dtype=np.int64) * width
    before = np.searchsorted(mantissas, starts)
    ends = np.append(mantissas, np.iinfo(np.int64).max)[before]
    return before.astype(np.int64), np.where(ends < starts + width, ends, np.iinfo(np.int64).max)


def codes_of(values: Array, scale: int) -> Array:
    """The code of each of some finite float64: int32."""
    codes = np.empty(len(values), np.int32)
    is_tabled = len(values) >= _TABLED_FROM and 0 <= scale <= _TABLED_SCALE_MAX and _are_plain(values)
    for at in range(0, len(values), _AT_ONCE):
        part = slice(at, at + _AT_ONCE)
        codes[part] = _tabled(values[part], scale) if is_tabled else _codes_of(values[part], scale)
    return codes


def _are_plain(values: Array) -> bool:
    """Whether they are positive and not subnormal, or 0.0."""
    tiny, least = np.finfo(np.float64).tiny, values.min()
    if least == 0.0:
        least = values.min(initial=np.inf, where=values.view(np.int64) != 0)  # not -0.0 either
    return bool(least >= tiny)


def _tabled(values: Array, scale: int) -> Array:
    bits = values.view(np.int64)
    lowest, bounds, shift = _table(scale)
    top = bits >> shift
    codes: Array = lowest[top]
    codes += bits > bounds[top]
    return codes


@lru_cache(maxsize=2)
def _table(scale: int) -> tuple[Array, Array, int]:
    """By the first bits of a float64 from 0.0 on: its code if it is not above the one bound that may lie among those
    that begin so, that bound, and how many bits are left out. 3 ns a value where ``_codes_of`` takes 10; 3 MB."""
    before, bound = _cells(scale)
    top = np.arange(0x7FF << (scale + 1))
    exponent, cell = top >> (scale + 1), top & ((2 << scale) - 1)
    codes = ((exponent - 1023) << scale) + before[cell] + (bias_of(scale) + 1)
    codes[0] = 0
    never = np.iinfo(np.int64).max
    bounds = np.where(bound[cell] == never, never, (exponent << _MANTISSA) | bound[cell])
    bounds[0] = never
    return codes.astype(np.int32), bounds, _MANTISSA - scale - 1


def _codes_of(values: Array, scale: int) -> Array:
    size = np.abs(values)
    small = size < np.finfo(np.float64).tiny  # subnormal, or zero
    raised = bool(small.any())
    if raised:
        size = np.where(small, np.where(small, size, 0) * 2.0**64, size)
    bits = size.view(np.int64)
    exponent = (bits >> _MANTISSA) - 1023
    if raised:
        exponent = np.where(small, exponent - 64, exponent)
    mantissa = bits & ((1 << _MANTISSA) - 1)
    fine = max(scale, 0)
    before, bound = _cells(fine)
    cell = mantissa >> (_MANTISSA - fine - 1)
    buckets = (exponent << fine) + before[cell] + (mantissa > bound[cell])
    if scale < 0:
        buckets = -(-buckets >> -scale)  # rounded up: a bucket's upper bound belongs to it
    codes = buckets + (bias_of(scale) + 1)
    codes = np.where(values < 0, -codes, codes)
    return np.where(values == 0, 0, codes) if raised else codes


def coarser(codes: Array, scale: int, to: int) -> Array:
    """Codes of ``scale`` as those of a smaller one: exactly the codes that the values have there."""
    buckets = np.abs(codes) - (bias_of(scale) + 1)
    raised = -(-buckets >> (scale - to)) + (bias_of(to) + 1)
    return np.where(codes == 0, 0, np.where(codes < 0, -raised, raised))


class Quantiles:
    """The distribution of a measure's values, as it is read: ``row["latency"]``.

    ``count`` is how many values there were (nulls are none). Answers are within ``accuracy``, relative to the value.
    """

    __slots__ = ("_codes", "_counts", "accuracy", "count", "scale")

    def __init__(self, scale: int, codes: Iterable[int] | Array, counts: Iterable[int] | Array) -> None:
        self.scale = scale
        self.accuracy = accuracy_of(scale)
        self._codes = np.asarray(codes, np.int64)  # ascending
        self._counts = np.asarray(counts, np.int64)
        self.count = int(self._counts.sum())

    @staticmethod
    def from_state(scale: int, state: bytes) -> Quantiles:
        """From the stored form: the first code, its count, the distance to the next code, its count ..."""
        return Quantiles.from_states(scale, [state])[0]

    @staticmethod
    def from_states(scale: int, states: Sequence[bytes]) -> list[Quantiles]:
        """``from_state`` of each; of a dozen at once in a fifth of the time. Raises DataLoss."""
        numbers, offsets = varints.decode(states)
        if (offsets & 1).any():
            raise DataLoss("a state of quantiles has a bucket without a count: run kivi verify")
        signed = varints.unzigzag(numbers)
        bounds = itertools.pairwise(offsets.tolist())
        return [Quantiles(scale, np.cumsum(signed[a:b:2]), signed[a + 1 : b : 2]) for a, b in bounds]

    @staticmethod
    def combined(parts: Iterable[Quantiles]) -> Quantiles | None:
        """The distribution of all their values, exactly as if they had been observed together; None of no parts.

        Raises InvalidArgument unless all have one accuracy.
        """
        listed = list(parts)
        if len(listed) < 2:
            return listed[0] if listed else None
        if len({part.scale for part in listed}) > 1:
            raise InvalidArgument("distributions of different accuracies cannot be combined")
        codes, which = np.unique(np.concatenate([part._codes for part in listed]), return_inverse=True)
        counts = np.zeros(len(codes), np.int64)
        np.add.at(counts, which, np.concatenate([part._counts for part in listed]))
        kept = counts != 0
        return Quantiles(listed[0].scale, codes[kept], counts[kept])

    def quantile(self, q: float) -> float | None:
        """The value at the nearest rank, ceil(q * count), at least the first; None if there were no values.

        Raises InvalidArgument unless 0 <= q <= 1.
        """
        if isinstance(q, bool) or not isinstance(q, (int, float)) or not 0 <= q <= 1:
            raise InvalidArgument(f"a quantile is a fraction from 0 to 1, such as 0.99, not {q!r}")
        if self.count <= 0:
            return None
        rank = rank_of(q, self.count)
        return value_of(int(self._codes[np.searchsorted(np.cumsum(self._counts), rank)]), self.scale)

    def fraction_below(self, value: float) -> float | None:
        """The exact fraction of values below some bound that is within ``accuracy`` of ``value``; None without values.

        The bound is the nearer end of the value's bucket, so that an end that is asked for is met exactly.
        """
        try:
            fits = not isinstance(value, bool) and isinstance(value, (int, float, Decimal)) and math.isfinite(value)
        except OverflowError:  # an int beyond float64
            fits = False
        if not fits:
            raise InvalidArgument(f"fraction_below takes a finite number, not {value!r}")
        if self.count <= 0:
            return None
        number = float(value)
        code = int(codes_of(np.array([number]), self.scale)[0])
        inclusive = code != 0 and number >= _middle(code, self.scale)
        below = int(np.searchsorted(self._codes, code, "right" if inclusive else "left"))
        return int(self._counts[:below].sum()) / self.count

    @property
    def codes(self) -> Array:
        """Of each bucket that has any values, in their order."""
        return self._codes

    def counts_up_to(self, codes: Array) -> list[int]:
        """How many values are in the buckets up to each of some codes, itself included."""
        ends = np.concatenate([np.zeros(1, np.int64), self._counts.cumsum()])
        found: list[int] = ends[self._codes.searchsorted(codes, "right")].tolist()
        return found

    def buckets(self) -> list[tuple[int, int]]:
        """(code, count) of every bucket that has any, in the order of the values."""
        return list(zip(self._codes.tolist(), self._counts.tolist(), strict=True))

    def to_plain(self) -> dict[str, float | None]:
        """What a line of text or JSON shows of it: ``{"count": 1000, "p50": ..., "p95": ..., "p99": ...}``."""
        return {"count": self.count, **{f"p{q}": self.quantile(q / 100) for q in (50, 95, 99)}}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quantiles) and self.scale == other.scale and self.buckets() == other.buckets()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = {name: "null" if value is None else f"{value:.6g}" for name, value in self.to_plain().items()}
        return f"Quantiles({', '.join(f'{name}={value}' for name, value in shown.items())})"


def rank_of(q: float, count: int) -> int:
    """The nearest rank: ceil(q * count), from 1 to ``count``; q as it is written, so that 0.9 of 10 is the ninth."""
    part, whole = _as_written(float(q))
    return min(count, max(1, -(-part * count // whole)))


@lru_cache(maxsize=64)
def _as_written(q: float) -> tuple[int, int]:
    return Fraction(repr(q)).as_integer_ratio()


@lru_cache(maxsize=SCALE_MAX + 5)
def _values(scale: int) -> Array:
    """What is given for the buckets of one octave, 2**(j / 2**scale) * 2 / (g + 1); of a negative scale, of the one."""
    g = 2.0**2.0**-scale
    return np.array([2.0 ** (j / 2.0**scale) * 2.0 / (g + 1) for j in range(2 ** max(scale, 0))])


def values_of(codes: Array, scale: int) -> Array:
    """What is given for the values in each bucket: float64."""
    buckets = np.abs(codes) - (bias_of(scale) + 1)
    fine = max(scale, 0)
    with np.errstate(over="ignore"):
        sizes = np.ldexp(_values(scale)[buckets & (2**fine - 1)], (buckets >> fine) << max(-scale, 0))
    sizes = np.minimum(sizes, np.finfo(np.float64).max)
    return np.where(codes == 0, 0.0, np.where(codes < 0, -sizes, sizes))


def value_of(code: int, scale: int) -> float:
    """``values_of`` one."""
    if code == 0:
        return 0.0
    bucket, fine = abs(code) - (bias_of(scale) + 1), max(scale, 0)
    try:
        size = math.ldexp(float(_values(scale)[bucket & (2**fine - 1)]), (bucket >> fine) << max(-scale, 0))
    except OverflowError:
        size = sys.float_info.max
    return -size if code < 0 else size


def upper_bounds(codes: Array, scale: int) -> Array:
    """Where each bucket ends, towards the larger values: float64. It is the bucket's own, but for a negative one."""
    g = 2.0**2.0**-scale
    sizes = np.abs(values_of(codes, scale)) * (g + 1) / 2
    bounds: Array = np.where(codes < 0, -sizes / g, sizes)
    return bounds


def _middle(code: int, scale: int) -> float:
    """Halfway between a bucket's ends: from there on the farther one from zero is within the accuracy, before it the
    other one. ``value_of``, whose distance to both is the same relative to them, lies below it."""
    g = 2.0**2.0**-scale
    return float(value_of(code, scale) * ((g + 1) ** 2 / (4 * g)))


def quantile_of(codes: Array, counts: Array, offsets: Array, scale: int, q: float) -> tuple[Array, Array]:
    """``Quantiles.quantile`` of many states: (values, which of them have any)."""
    ends = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=ends[1:])
    before = ends[offsets[:-1]]
    totals = ends[offsets[1:]] - before
    listed = totals.tolist()
    rank = {n: rank_of(q, n) if n > 0 else 0 for n in set(listed)}
    found = ends[1:].searchsorted(before + np.array([rank[n] for n in listed], np.int64))
    known = totals > 0
    values = np.zeros(len(totals))
    values[known] = values_of(codes[found[known]].astype(np.int64), scale)
    return values, known
