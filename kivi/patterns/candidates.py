"""Which rows can be left out: those that are not near a candidate of some symbol that each match has.

A match has a row of each mandatory symbol, and all its rows lie within ``within`` of that one, in its partition. So of
one such symbol, whose definition says something of single rows, the *candidates* are read first, and then what is near
them. What it says of rows beside is weakened: ``x - prev(x) >= 100`` is true of no row whose ``x`` is not 100 more
than the least one that there is, which statistics know: of all rows, and of those near each row group.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.dictionaries import is_coded
from kivi.model.expressions import Expr, never_fails
from kivi.model.expressions.nodes import BESIDE
from kivi.model.pattern_text import chain, lengths
from kivi.model.patterns import Match, rows_beside, sees_inside
from kivi.model.types import INT64_MAX, INT64_MIN, ColumnType
from kivi.patterns.rows import Rows

__all__ = ["FAR_US", "Bounds", "Candidates", "Extent", "Near", "candidates", "reach_rows", "reach_us"]

Array = npt.NDArray[Any]
Bounds = Callable[[str], tuple[Any, Any] | None]
"""The least and the greatest value that rows beside may have in a column of numbers or timestamps, in stored form, or
beyond them; None: that is not known, or there is none."""
Extent = tuple[int, int]
FAR_US: Final = INT64_MAX
"""A reach that is anywhere in the partition."""
_WIDER: Final = 32
_TABLE_MAX: Final = 1 << 20


def candidates(match: Match, bounds: Bounds) -> list[tuple[str, Expr]]:
    """Predicates over columns of single rows of which each match has a row that they select; and the symbols' names."""
    define, found = dict(match.define), dict[str, Expr]()
    for names in chain(match.pattern.tree):
        ordered = sorted(names)
        needed = [_needed(define[name], bounds) if name in define else None for name in ordered]
        some = [each for each in needed if each is not None]
        if len(some) == len(needed):
            found[" | ".join(ordered)] = functools.reduce(operator.or_, some)
    return list(found.items())


def _needed(expr: Expr, bounds: Bounds) -> Expr | None:
    """What is true of each row that a definition is true of, and never fails; None: nothing is known."""
    if never_fails(expr):
        return expr
    if expr.op in ("and", "or"):
        needed = [_needed(arg, bounds) for arg in expr.args]
        some = [each for each in needed if each is not None]
        if not some or (expr.op == "or" and len(some) < len(needed)):
            return None
        return functools.reduce(operator.and_ if expr.op == "and" else operator.or_, some)
    return _compared(expr, bounds) if expr.op in _SIDES and sum(map(_columns, expr.args)) == 1 else None


class _Range(NamedTuple):
    """What a value is at least and at most, exactly."""

    low: Fraction
    high: Fraction


def _compared(expr: Expr, bounds: Bounds) -> Expr | None:
    """Of a comparison of values of which one is of a column, what follows for that."""
    found, is_left = [], bool(_columns(expr.args[0]))
    own, beside = expr.args if is_left else reversed(expr.args)
    if (other := _range(beside, bounds)) is None:
        return None
    for side in _SIDES[expr.op]:
        sign = 1 if (side[0] == ">") is is_left else -1
        known = _solved(own, sign, -_most(other, -sign), len(side) == 1, bounds)
        found += [] if known is None else [known]
    return functools.reduce(operator.and_, found) if found else None


def _solved(expr: Expr, sign: int, least: Fraction, strict: bool, bounds: Bounds) -> Expr | None:
    """What is true of the column in a value, if ``sign`` times that is at least so much, or more than it (``strict``).

    A sum of floats is rounded: if it is so much, it was more than the number below that.
    """
    if expr.op == "col":
        return _at_least(expr, sign, least, strict)
    if expr.op == "neg":
        return _solved(expr.args[0], -sign, least, strict, bounds)
    if expr.op not in ("+", "-") or not _is_exact(expr):
        return None
    if _is_float(expr):
        if (nearest := _nearest(least)) is None or nearest == -sys.float_info.max:
            return None
        least, strict = Fraction(math.nextafter(nearest, -math.inf)), False
    signed = [(expr.args[0], sign), (expr.args[1], sign if expr.op == "+" else -sign)]
    (own, of_own), (beside, of_beside) = signed if _columns(expr.args[0]) else reversed(signed)
    if (other := _range(beside, bounds)) is None:
        return None
    return _solved(own, of_own, least - _most(other, of_beside), strict, bounds)


def _most(of: _Range, sign: int) -> Fraction:
    """What ``sign`` times the value is at most."""
    return of.high if sign > 0 else -of.low


def _at_least(column: Expr, sign: int, least: Fraction, strict: bool) -> Expr | None:
    type_ = column.type
    assert type_ is not None
    op = ">" if strict else ">="
    if type_.name == "float64":
        if (bound := _nearest(least)) is None or bound == -sys.float_info.max:
            return None
        if Fraction(bound) != least:
            op = ">="
            bound = math.nextafter(bound, -math.inf) if Fraction(bound) > least else bound
        return Expr(op, column.column, bound) if sign > 0 else Expr(op.translate(_TURNED), column.column, 0.0 - bound)
    scaled = least * 10**type_.scale
    whole = math.floor(scaled) if strict else math.ceil(scaled)
    if abs(whole) > INT64_MAX:
        return None
    return Expr(op, column.column, whole) if sign > 0 else Expr(op.translate(_TURNED), column.column, -whole)


def _range(expr: Expr, bounds: Bounds) -> _Range | None:
    """Of a value without columns of its own row; None: that is not known."""
    if expr.type is None or expr.type.name not in _NUMBERS:
        return None
    if expr.op == "lit":
        return None if expr.value is None else _Range(*[_exact(expr.value, expr.type)] * 2)
    if expr.op in BESIDE:
        known = bounds(expr.column)
        return None if known is None else _Range(*(_exact(value, expr.type) for value in known))
    if expr.op not in ("+", "-", "neg") or not _is_exact(expr):
        return None
    parts = [_range(arg, bounds) for arg in expr.args]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    if expr.op != "+":
        found[-1] = _Range(-found[-1].high, -found[-1].low)
    low, high = sum((part.low for part in found), Fraction()), sum((part.high for part in found), Fraction())
    if _is_float(expr):
        rounded = _nearest(low), _nearest(high)
        return None if None in rounded else _Range(*(Fraction(each) for each in rounded if each is not None))
    return _Range(low, high)


def _columns(expr: Expr) -> int:
    """How many columns of its own row a value is made of."""
    return (expr.op == "col") + sum(map(_columns, expr.args))


def _is_float(expr: Expr) -> bool:
    return expr.type is not None and expr.type.name == "float64"


def _is_exact(expr: Expr) -> bool:
    """Whether operands of a sum are made floats, where it is one, without rounding."""
    return not _is_float(expr) or all(_is_float(arg) or _is_small(arg) for arg in expr.args)


def _is_small(expr: Expr) -> bool:
    """Whether it is an integer that a float holds."""
    return expr.op == "lit" and expr.type is not None and expr.type.name == "int64" and abs(expr.value or 0) <= 2**53


def _exact(value: Any, type_: ColumnType) -> Fraction:
    return Fraction(value) / Fraction(10**type_.scale)


def _nearest(value: Fraction) -> float | None:
    """None: beyond the finite numbers."""
    try:
        return float(value)
    except OverflowError:
        return None


_NUMBERS: Final = ("int64", "decimal", "timestamp", "float64")
_SIDES: Final = {">": (">",), ">=": (">=",), "<": ("<",), "<=": ("<=",), "==": (">=", "<=")}
_TURNED: Final = str.maketrans("<>", "><")


def reach_us(match: Match) -> int | None:
    """How far from a row of a match its other rows are at most. None: anywhere in the partition, or what they are
    depends on rows that may lie anywhere."""
    return match.pattern.within_us if sees_inside(match) else None


def reach_rows(match: Match) -> int | None:
    """How many rows before and behind a row of a match, in its partition, say what its other rows are. None: any number
    of them."""
    longest = lengths(match.pattern.tree)[1]
    return None if longest is None else longest - 1 + rows_beside(match)


@dataclass(frozen=True, slots=True)
class Candidates:
    """When they are, and the values in the first column of the partition, None without one: of each its place there."""

    times: Array
    values: Any
    of: Array

    @staticmethod
    def at(times: Array, column: Any) -> Candidates:
        if column is None:
            return Candidates(times, None, np.zeros(len(times), np.int64))
        coded = pc.dictionary_encode(column, null_encoding="encode")
        return Candidates(times, coded.dictionary, coded.indices.to_numpy().astype(np.int64))

    def only(self, places: Array) -> Candidates:
        """Those of some values, by ascending places."""
        some = np.isin(self.of, places)
        values = None if self.values is None else self.values.take(pa.array(places))
        return Candidates(self.times[some], values, np.searchsorted(places, self.of[some]))

    def others(self, column: Any) -> Array:
        """Which rows are of none of their values, by number."""
        return np.flatnonzero(_places(column, self.values) < 0)

    @property
    def places(self) -> int:
        """How many values there are; without a column one."""
        return 1 if self.values is None else len(self.values)


@dataclass(frozen=True, slots=True)
class Near:
    """What lies near candidates: ``reach``, of each of their values, in microseconds; ``FAR_US`` is anywhere. ``of``,
    ``begins`` and ``ends``: stretches of event time in order, which do not meet, and of which value; ends inclusive.
    ``every``: begins and ends of all of them, whatever the value."""

    values: Any
    reach: Array
    of: Array
    begins: Array
    ends: Array
    every: tuple[Array, Array]

    @staticmethod
    def to(found: Candidates, reach: Array) -> Near:
        of, times, each = found.of, found.times, reach[found.of]
        begins = np.where(times < INT64_MIN + each, INT64_MIN, times - each)
        ends = np.where(times > INT64_MAX - each, INT64_MAX, times + each)
        every = _joined(np.zeros_like(of), begins, ends)
        return Near(found.values, reach, *_joined(of, begins, ends), every[1:])

    def further(self, rows: Rows, at: Array, column: Any, count: int, extent: Extent) -> tuple[Array, Array]:
        """The places of the values of which a candidate has not ``count`` rows of its partition near it on each side,
        though there may be more; and a further reach for each of them.

        ``rows``: what is near; ``at``: which of them are candidates, ``column``: of what values. ``extent``: the times
        between which all events are.
        """
        of = np.zeros(len(at), np.int64) if column is None else _places(column, self.values)
        times, partitions, reach, (first, last) = rows.times, rows.partitions, self.reach[of], extent
        before, behind = np.maximum(at - count, 0), np.minimum(at + count, len(rows) - 1)
        is_before = (at >= count) & (partitions[before] == partitions[at]) & (times[at] - times[before] <= reach)
        is_behind = (at + count < len(rows)) & (partitions[behind] == partitions[at])
        is_behind &= times[behind] - times[at] <= reach
        is_whole = (is_before | (times[at] - first <= reach)) & (is_behind | (last - times[at] <= reach))
        short = np.unique(of[~is_whole])
        reach = self.reach[short]
        return short, np.where(reach <= (last - first) // _WIDER, reach * _WIDER, FAR_US)

    def meets(self, low: int, high: int) -> bool:
        """Whether rows between these times may be near."""
        begins, ends = self.every
        at = int(np.searchsorted(ends, low))
        return at < len(ends) and bool(begins[at] <= high)

    def rows(self, times: Array, column: Any) -> Array:
        """Which rows are near, by number."""
        here = (self.begins <= times.max(initial=INT64_MIN)) & (self.ends >= times.min(initial=INT64_MAX))
        if not here.any():
            return np.empty(0, np.int64)
        known, begins, ends = self.of[here], self.begins[here], self.ends[here]
        of, rows = np.zeros(len(times), np.int64), np.arange(len(times))
        if self.values is not None:  # of one batch few values have a candidate near, and most rows are of others
            of = _places(column, self.values)
            is_known = np.zeros(len(self.values) + 1, np.bool_)  # the last one is that of -1
            is_known[known] = True
            rows = np.flatnonzero(is_known[of])
            rows = rows[
                np.argsort(of[rows].astype(np.uint16 if len(self.values) < 1 << 16 else np.int64), kind="stable")
            ]
            of, times = of[rows], times[rows]
        # Rows of one value are beside each other, and mostly in order: so searches for them go through what is at hand.
        moments = np.unique(begins)
        width = len(moments) + 1
        keys = known * width + np.searchsorted(moments, begins) + 1
        at = np.searchsorted(keys, of * width + np.searchsorted(moments, times, "right"), "right") - 1
        near: Array = np.sort(rows[(at >= 0) & (known[at] == of) & (times <= ends[at])])
        return near


def _places(column: Any, values: Any) -> Array:
    """Of each row the place of its value, -1: it is none of these."""
    if is_coded(column):
        places = np.append(_places(column.dictionary, values), _places(pa.nulls(1, column.dictionary.type), values))
        codes = column.indices.cast(pa.int64()).fill_null(len(column.dictionary)).to_numpy()
        of: Array = places[codes]
        return of
    if column.type == pa.int64() and not column.null_count and not values.null_count and len(values):
        known, given = values.to_numpy(), column.to_numpy()
        least, span = int(known.min()), int(known.max()) - int(known.min())
        if span < _TABLE_MAX:  # a table, which takes a fifth of the time of a hash
            places = np.full(span + 2, -1)
            places[known - least] = np.arange(len(known))
            inside = (given >= least) & (given <= least + span)
            return places[np.where(inside, given - least, span + 1)]
    found = pc.index_in(column, value_set=values)
    found_places: Array = found.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return found_places


def _joined(of: Array, begins: Array, ends: Array) -> tuple[Array, Array, Array]:
    """Stretches in order, those that meet as one. Those of one value are equally long, or it is the only one."""
    order = np.lexsort((begins, of))
    of, begins, ends = of[order], begins[order], ends[order]
    if len(of) and of[0] == of[-1]:
        ends = np.maximum.accumulate(ends)
    apart = np.ones(len(of), np.bool_)
    apart[1:] = (of[1:] != of[:-1]) | (begins[1:] > ends[:-1])
    first = np.flatnonzero(apart)
    last = np.append(first, len(of))[1:] - 1
    return of[first], begins[first], ends[last]
