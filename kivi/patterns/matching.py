"""Matches of rows: which rows begin one, where each ends, where it goes on behind it; and the answer's rows of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kivi.errors import ResourceExhausted
from kivi.model.pattern_text import chain, firsts
from kivi.model.patterns import Match, looks_ahead
from kivi.model.types import INT64_MAX, ColumnType
from kivi.patterns.automaton import Automaton
from kivi.patterns.rows import Rows

__all__ = ["Decided", "Found", "Matcher"]

Array = npt.NDArray[Any]
ROWS_MAX: Final = 20_000_000
"""Rows of all matches together, which measures are computed of."""
READ_MAX: Final = 300_000_000
"""Rows that runs longer than 64 rows read, some ten seconds."""


@dataclass(frozen=True, slots=True)
class Found:
    """Matches, by row: ``begins`` ascending, ``ends`` exclusive. ``symbols``: by match, of each of its rows the place
    of its symbol in ``names``; empty where nobody asks."""

    begins: Array
    ends: Array
    symbols: list[list[int]]
    names: list[str]


@dataclass(frozen=True, slots=True)
class Decided:
    """Matches, and of each the moment of event time after which, once every event up to it is there, nothing that comes
    changes it, or the matches before it in its partition."""

    found: Found
    over_us: Array

    def where(self, kept: Array) -> Decided:
        """Some of them."""
        symbols = [of for of, stays in zip(self.found.symbols, kept.tolist(), strict=True) if stays]
        found = Found(self.found.begins[kept], self.found.ends[kept], symbols, self.found.names)
        return Decided(found, self.over_us[kept])


class Matcher:
    """Of one pattern. Not thread safe. ``types``: of the columns."""

    def __init__(self, match: Match, types: dict[str, ColumnType]) -> None:
        self.match, self._types = match, types
        self._tree = match.pattern.tree
        self._automaton = Automaton(self._tree, [name for name, _ in match.define])

    def found(self, rows: Rows) -> Found:
        """The matches."""
        classes = rows.classes(self.match, self._automaton, self._types)
        begins = np.flatnonzero(self._may_be(firsts(self._tree), classes))
        limits = rows.limits(begins, self.match.pattern.within_us)
        possible = self._possible(classes, begins, limits)
        begins, limits = begins[possible], limits[possible]
        ends, is_open, _ = self._automaton.ends(classes, begins, limits)
        kept = is_open | (ends >= 0)
        return self._one_after_the_other(classes, begins[kept], limits[kept], ends[kept], is_open[kept])

    def decided(self, rows: Rows, low_us: int | None, from_us: int) -> Decided | None:
        """The matches that begin at ``from_us`` or later, and from when on each can change no more; of a pattern that
        has a ``within`` and looks at no row beside its match. ``rows``: all from ``low_us`` on, None: there are no
        others. None: which matches there are depends on rows before these.
        """
        within = self.match.pattern.within_us
        assert within is not None
        classes = rows.classes(self.match, self._automaton, self._types)
        begins = np.flatnonzero(self._may_be(firsts(self._tree), classes))
        limits = rows.limits(begins, within)
        ends, is_open, stops = self._automaton.ends(classes, begins, limits)
        numbers = np.cumsum(np.append(0, rows.partitions[1:] != rows.partitions[:-1])) if len(rows) else begins
        starts = np.searchsorted(numbers, np.arange(int(numbers[-1]) + 1 if len(rows) else 0))
        free = starts
        if low_us is not None:
            free = self._free(rows, starts, begins, np.where(is_open, limits, ends), low_us + within)
            wanted = _first_of(np.flatnonzero(rows.times >= from_us), starts, len(rows))
            if ((wanted < len(rows)) & (free > wanted)).any():
                return None
        over = _no_later(rows.times[begins], within)
        if not any(looks_ahead(definition) for _, definition in self.match.define):
            over = np.where(stops < 0, over, np.minimum(over, rows.times[np.maximum(stops, 1) - 1]))
        over = _so_far(numbers[begins], over)
        kept = (is_open | (ends >= 0)) & (begins >= free[numbers[begins]])
        found = self._one_after_the_other(classes, begins[kept], limits[kept], ends[kept], is_open[kept])
        over = over[np.searchsorted(begins, found.begins)]
        return Decided(found, over).where(rows.times[found.begins] >= from_us)

    def _free(self, rows: Rows, starts: Array, begins: Array, reaches: Array, from_us: int) -> Array:
        """Of each partition the first row from a moment on that no match from a row before it may reach over: from
        there on, what is before it does not matter."""
        reach = np.zeros(len(rows) + 1, np.int64)
        reach[begins + 1] = reaches
        is_free = np.maximum.accumulate(reach)[:-1] <= np.arange(len(rows))
        return _first_of(np.flatnonzero(is_free & (rows.times >= from_us)), starts, len(rows))

    def _may_be(self, names: set[str] | frozenset[str], classes: Array) -> Array:
        return self._automaton.may_be(frozenset(names))[classes]

    def _possible(self, classes: Array, begins: Array, limits: Array) -> Array:
        """Of which beginnings the rows up to the limit have what each match has, in the order in which it has it."""
        at, known = begins, dict[frozenset[str], Array]()
        rows = len(classes)
        for names in chain(self._tree)[1:]:
            if names not in known:
                places = np.where(self._may_be(names, classes), np.arange(rows), rows)
                known[names] = np.append(np.minimum.accumulate(places[::-1])[::-1], [rows, rows])
            at = known[names][at + 1]
        return at < limits

    def _one_after_the_other(self, classes: Array, begins: Array, limits: Array, ends: Array, is_open: Array) -> Found:
        skip, needs = self.match.pattern.skip, self.match.needs_symbols
        sought = self._automaton.names.index(skip.symbol) if skip.symbol else -1
        kept_begins, kept_ends, symbols, go_on, rows = list[int](), list[int](), list[list[int]](), 0, 0
        for begin, limit, end, undecided in zip(
            begins.tolist(), limits.tolist(), ends.tolist(), is_open.tolist(), strict=True
        ):
            if begin < go_on:
                continue
            if undecided and (end := self._automaton.end(classes, begin, limit)) < 0:
                self._check(0)
                continue
            self._check(rows := rows + end - begin)
            kept_begins.append(begin)
            kept_ends.append(end)
            of = self._automaton.symbols_of(classes, begin, end) if needs else []
            symbols.append(of)
            match skip.to:
                case "past_last_row":
                    go_on = end
                case "to_next_row":
                    go_on = begin + 1
                case "to_first":
                    go_on = begin + of.index(sought)
                case _:
                    go_on = end - 1 - of[::-1].index(sought)
        return Found(np.array(kept_begins, np.int64), np.array(kept_ends, np.int64), symbols, self._automaton.names)

    def _check(self, rows: int) -> None:
        """``rows``: of the matches so far. Raises ResourceExhausted."""
        read = self._automaton.rows_read
        for count, most, what in ((rows, ROWS_MAX, "the matches have"), (read, READ_MAX, "matching has read")):
            if count > most:
                raise ResourceExhausted(
                    f"{what} more than {most:,} rows, those in several of them counted each time: bound matches by a "
                    "(shorter) within, or go on behind them by skip='past_last_row'",
                    limit="rows of matches",
                    maximum=most,
                )


def _first_of(rows: Array, starts: Array, count: int) -> Array:
    """Of each partition the first of some rows, ascending; ``count`` where it has none."""
    places = np.searchsorted(rows, starts)
    first = np.append(rows, count)[places]
    return np.where(first < np.append(starts, count)[1:], first, count)


def _no_later(times: Array, within_us: int) -> Array:
    return np.where(times > INT64_MAX - within_us, INT64_MAX, times + within_us)


def _so_far(partitions: Array, moments: Array) -> Array:
    """Of each row the latest moment of its and of those before it in its partition."""
    known, ranks = np.unique(moments, return_inverse=True)
    width = max(1, len(known))
    latest: Array = known[np.maximum.accumulate(partitions * width + ranks) % width] if len(moments) else moments
    return latest
