"""Rows as patterns see them: partition after partition, in each by (event time, CTS, position), and classified."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kivi.arrow.columns import picked, stored_array
from kivi.arrow.dictionaries import is_coded, together
from kivi.arrow.predicates import attempted
from kivi.encoding.event_names import POSITION, STAMP
from kivi.model.expressions import Expr, names
from kivi.model.patterns import Match
from kivi.model.types import INT64_MAX, ColumnType
from kivi.patterns.automaton import Automaton

__all__ = ["Rows", "columns_of"]

_MOMENT: Final = ColumnType("timestamp")

Array = npt.NDArray[Any]


def columns_of(match: Match) -> set[str]:
    """The columns that it looks at, besides the event time."""
    used = {name for name, _ in match.partition_by}
    used |= {name for _, definition in match.define for name in names(definition)}
    return used | {measure.column for measure in match.measures if measure.column}


@dataclass(frozen=True, slots=True)
class Rows:
    """``events`` in the order of partitions; ``partitions``: ascending numbers; ``times`` in microseconds."""

    events: Any
    partitions: Array
    times: Array

    @staticmethod
    def of(batches: Sequence[Any], match: Match, event_time: str) -> Rows:
        """Events in any order, with their names, the event time, and the columns that the match looks at."""
        events = together(batches)
        numbers = _numbers([events.column(name) for name, _ in match.partition_by], events.num_rows)
        times = stored_array(_MOMENT, events.column(event_time))
        order = np.argsort(times, kind="stable")  # quick, as files are in this order
        is_next = times[order[1:]] == times[order[:-1]]
        if len(tied := np.flatnonzero(np.append(is_next, False) | np.append(False, is_next))):  # few of many are
            rows = order[tied]
            stamps, positions = (events.column(name).to_numpy()[rows] for name in (STAMP, POSITION))
            order[tied] = rows[np.lexsort((positions, stamps, times[rows]))]
        grouped = numbers[order]
        if len(grouped) and int(grouped.max()) < 65_536:
            grouped = grouped.astype(np.uint16)  # which is sorted by counting
        order = order[np.argsort(grouped, kind="stable")]
        return Rows(picked(events, order), numbers[order], times[order])

    def __len__(self) -> int:
        return len(self.times)

    def limits(self, begins: Array, within_us: int | None) -> Array:
        """For each row, the first row behind it that is in another partition, or too late for a match from it on."""
        if within_us is None:
            return np.searchsorted(self.partitions, self.partitions[begins], "right")
        if not len(begins):
            return begins
        dense = np.append(0, np.cumsum(self.partitions[1:] != self.partitions[:-1]))
        earliest = int(self.times.min())
        step = int(self.times.max()) - earliest + within_us + 1
        if step * (int(dense[-1]) + 1) <= INT64_MAX:  # partitions after each other, further apart than a match is long
            places = dense * step + (self.times - earliest)
            found: Array = np.searchsorted(places, places[begins] + within_us, "right")
            return found
        moments = np.unique(self.times)
        first = self.times[begins]
        latest = np.where(first > INT64_MAX - within_us, INT64_MAX, first + within_us)
        beyond = len(moments) + 1
        places = self.partitions * beyond + np.searchsorted(moments, self.times)
        last = self.partitions[begins] * beyond + np.searchsorted(moments, latest, "right") - 1
        return np.searchsorted(places, last, "right")

    def classes(self, match: Match, automaton: Automaton, types: dict[str, ColumnType]) -> Array:
        """Of each row which defined symbols it may be, as a class of the automaton."""
        words, seen, types = np.zeros(len(self), np.int64), self.events, dict(types)
        for i, (_, definition) in enumerate(match.define):
            for node in _beside(definition):
                if (name := _name(node)) not in types:
                    by = -node.value if node.op == "prev" else node.value
                    seen = seen.append_column(name, self._shifted(seen.column(node.column), by))
                    types[name] = types[node.column]
            truth, _ = attempted(seen, _plain(definition), types)
            words |= np.asarray(truth.fill_null(False)).astype(np.int64) << i
        return automaton.classes_of(words)

    def _shifted(self, column: Any, by: int) -> Any:
        """The value of the row so far behind each, in its partition."""
        wanted = np.arange(len(self)) + by
        there = (wanted >= 0) & (wanted < len(self))
        wanted[~there] = 0
        there &= self.partitions[wanted] == self.partitions
        return column.take(pa.array(wanted, mask=~there))


def _numbers(columns: Sequence[Any], rows: int) -> Array:
    """Of each row a number that is the same where all columns are."""
    found, count = np.zeros(rows, np.int64), 1
    for column in columns:
        coded = column if is_coded(column) else column.dictionary_encode()
        values = len(coded.dictionary)
        codes = coded.indices.cast(pa.int64()).fill_null(values).to_numpy()
        if count * (values + 1) >= 2**31:
            distinct, found = np.unique(found, return_inverse=True)
            count = len(distinct)
        found, count = found * (values + 1) + codes, count * (values + 1)
    if count >= 2**31:
        _, found = np.unique(found, return_inverse=True)
    return found


def _beside(expr: Expr) -> Iterable[Expr]:
    if expr.op in ("prev", "next"):
        yield expr
    for arg in expr.args:
        yield from _beside(arg)


def _name(node: Expr) -> str:
    return f"\0{node.op} {node.value} {node.column}"


def _plain(expr: Expr) -> Expr:
    """The definition over columns alone, those of rows beside it among them."""
    if expr.op in ("prev", "next"):
        return Expr("col", _name(expr), type=expr.type)
    return replace(expr, args=tuple(map(_plain, expr.args))) if expr.args else expr
