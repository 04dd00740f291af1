"""Matches of rows: which rows begin one, where each ends, where it goes on behind it; and the answer's rows of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kivi.errors import ResourceExhausted
from kivi.model.pattern_text import chain, firsts
from kivi.model.patterns import Match
from kivi.model.types import ColumnType
from kivi.patterns.automaton import Automaton
from kivi.patterns.rows import Rows

__all__ = ["Found", "Matcher"]

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


class Matcher:
    """Of one pattern. Not thread safe. ``types``: of the columns."""

    def __init__(self, match: Match, types: dict[str, ColumnType]) -> None:
        self.match, self._types = match, types
        self._tree = match.pattern.tree
        self._automaton = Automaton(self._tree, [name for name, _ in match.define])

    def found(self, rows: Rows, may_begin: Array | None = None) -> Found:
        """The matches. ``may_begin``: at which rows; None: at any."""
        classes = rows.classes(self.match, self._automaton, self._types)
        begins = self._may_be(firsts(self._tree), classes)
        if may_begin is not None:
            begins &= may_begin
        begins = np.flatnonzero(begins)
        limits = rows.limits(begins, self.match.pattern.within_us)
        possible = self._possible(classes, begins, limits)
        begins, limits = begins[possible], limits[possible]
        ends, is_open = self._automaton.ends(classes, begins, limits)
        kept = is_open | (ends >= 0)
        return self._one_after_the_other(classes, begins[kept], limits[kept], ends[kept], is_open[kept])

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
