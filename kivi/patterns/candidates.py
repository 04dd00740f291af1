"""Which rows can be left out: those that are not near a candidate of some symbol that each match has.

A match has a row of each mandatory symbol, and all its rows lie within ``within`` of that one, in its partition. So of
one such symbol, whose definition says something of single rows, the *candidates* are read first, and then what is near
them. What it says of rows beside is weakened: ``x - prev(x) >= 100`` is true of no row whose ``x`` is not 100 more
than the least one that there is, which statistics know.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.dictionaries import is_coded
from kivi.model.expressions import Expr, never_fails
from kivi.model.expressions.nodes import BESIDE
from kivi.model.pattern_text import chain
from kivi.model.patterns import Match, sees_inside
from kivi.model.types import INT64_MAX, INT64_MIN

__all__ = ["Bounds", "Near", "candidates", "reach_us"]

Array = npt.NDArray[Any]
Bounds = Callable[[str], tuple[int, int] | None]
"""The least and the greatest value of a column of integers or timestamps, in stored form, or beyond them; None: that is
not known, or there is none."""
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
    if expr.op in _SIDES and expr.args:
        difference = _sum(Expr("-", args=expr.args), bounds)
        if difference is not None and difference.column:
            return _compared(expr.op, difference)
    return None


class _Sum(NamedTuple):
    """An integer: ``sign`` times a column, and something from ``low`` to ``high``."""

    column: str
    sign: int
    low: int
    high: int


def _sum(expr: Expr, bounds: Bounds) -> _Sum | None:
    if expr.op in ("+", "-", "neg"):
        parts = [_sum(arg, bounds) for arg in expr.args]
        if None in parts:
            return None
        found = [part for part in parts if part is not None]
        if expr.op != "+":
            last = found[-1]
            found[-1] = _Sum(last.column, -last.sign, -last.high, -last.low)
        columns = [part for part in found if part.column]
        if len(columns) > 1:
            return None
        column, sign = (columns[0].column, columns[0].sign) if columns else ("", 0)
        return _Sum(column, sign, sum(part.low for part in found), sum(part.high for part in found))
    if expr.type is None or expr.type.name not in ("int64", "timestamp"):
        return None
    if expr.op == "lit":
        return _Sum("", 0, expr.value, expr.value)
    if expr.op == "col":
        return _Sum(expr.column, 1, 0, 0)
    known = bounds(expr.column) if expr.op in BESIDE else None
    return None if known is None else _Sum("", 0, *known)


def _compared(op: str, of: _Sum) -> Expr | None:
    """What follows for the column where ``of`` compares with 0."""
    found = []
    for side in _SIDES[op]:
        bound = -of.high if side[0] == ">" else -of.low
        if of.sign < 0:
            side, bound = side.translate(_TURNED), -bound
        if INT64_MIN <= bound <= INT64_MAX:
            found.append(Expr(side, of.column, bound))
    return functools.reduce(operator.and_, found) if found else None


_SIDES: Final = {">": (">",), ">=": (">=",), "<": ("<",), "<=": ("<=",), "==": (">=", "<=")}
_TURNED: Final = str.maketrans("<>", "><")


def reach_us(match: Match) -> int | None:
    """How far from a row of a match its other rows are at most. None: anywhere in the partition, or what they are
    depends on rows that may lie anywhere."""
    return match.pattern.within_us if sees_inside(match) else None


@dataclass(frozen=True, slots=True)
class Near:
    """``values``: of the candidates in the first column of the partition, None without one. ``of``, ``begins`` and
    ``ends``: stretches of event time in order, which do not meet, and of which value; ends inclusive. ``every``:
    begins and ends of all of them, whatever the value."""

    values: Any
    of: Array
    begins: Array
    ends: Array
    every: tuple[Array, Array]

    @staticmethod
    def to(times: Array, column: Any, reach: int | None) -> Near:
        """The rows near candidates, at these times and of these values."""
        values, of = None, np.zeros(len(times), np.int64)
        if column is not None:
            coded = pc.dictionary_encode(column, null_encoding="encode")
            values, of = coded.dictionary, coded.indices.to_numpy().astype(np.int64)
        if reach is None:
            begins, ends = np.full(len(times), INT64_MIN), np.full(len(times), INT64_MAX)
        else:
            begins = np.where(times < INT64_MIN + reach, INT64_MIN, times - reach)
            ends = np.where(times > INT64_MAX - reach, INT64_MAX, times + reach)
        return Near(values, *_joined(of, begins, ends), _joined(np.zeros_like(of), begins, ends)[1:])

    def meets(self, low: int, high: int) -> bool:
        """Whether rows between these times may be near."""
        begins, ends = self.every
        at = int(np.searchsorted(ends, low))
        return at < len(ends) and bool(begins[at] <= high)

    def rows(self, times: Array, column: Any) -> Array:
        """Which rows are near, by number."""
        of, rows = np.zeros(len(times), np.int64), np.arange(len(times))
        if self.values is not None:
            of = _places(column, self.values)
            rows = np.flatnonzero(of >= 0)
            of, times = of[rows], times[rows]
        moments = np.unique(self.begins)
        width = len(moments) + 1
        keys = self.of * width + np.searchsorted(moments, self.begins) + 1
        at = np.searchsorted(keys, of * width + np.searchsorted(moments, times, "right"), "right") - 1
        near: Array = rows[(at >= 0) & (self.of[at] == of) & (times <= self.ends[at])]
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
    """Stretches in order, those that meet as one. All of them are equally long, or without ends."""
    order = np.lexsort((begins, of))
    of, begins, ends = of[order], begins[order], ends[order]
    apart = np.ones(len(of), np.bool_)
    apart[1:] = (of[1:] != of[:-1]) | (begins[1:] > ends[:-1])
    first = np.flatnonzero(apart)
    last = np.append(first, len(of))[1:] - 1
    return of[first], begins[first], ends[last]
