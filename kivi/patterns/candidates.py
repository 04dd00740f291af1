"""Which rows can be left out: those that are not near a candidate of some symbol that each match has.

A match has a row of each mandatory symbol, and all its rows lie within ``within`` of that one, in its partition. So of
one such symbol, whose definition is about single rows, the *candidates* are read first, and then what is near them.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.dictionaries import is_coded
from kivi.model.expressions import Expr, never_fails
from kivi.model.pattern_text import chain
from kivi.model.patterns import Match, sees_inside
from kivi.model.types import INT64_MAX, INT64_MIN

__all__ = ["Near", "candidates", "reach_us"]

Array = npt.NDArray[Any]
_TABLE_MAX: Final = 1 << 20


def candidates(match: Match) -> list[tuple[str, Expr]]:
    """Predicates over columns of single rows of which each match has a row that they select; and the symbols' names."""
    define, found = dict(match.define), dict[str, Expr]()
    for names in chain(match.pattern.tree):
        if all(name in define and never_fails(define[name]) for name in names):
            ordered = sorted(names)
            found[" | ".join(ordered)] = functools.reduce(operator.or_, (define[name] for name in ordered))
    return list(found.items())


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
