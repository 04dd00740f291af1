"""Patterns over more events than may be in memory: in slices of time, of which one is held at once.

A slice [a, b) has the matches that begin in it. Their rows end ``within`` later at most, and whether one may begin at a
row depends on the matches before it, as far as it is not clear that none of these reaches so far: so a slice reads from
some time before it, and from further back as long as that does not tell (``Matcher.decided``). Slices are halves of
what was too much, by the number of events, until they are shorter than ``within``. The matches of all of them, one
after the other, are those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from kivi.errors import ResourceExhausted
from kivi.events.pruning import outside
from kivi.events.views import EventView
from kivi.model.patterns import Match, sees_inside
from kivi.model.types import ColumnType
from kivi.patterns.answers import answered
from kivi.patterns.matching import Matcher
from kivi.patterns.rows import Rows
from kivi.query.planning import Times

__all__ = ["Sliced", "may_be_sliced"]


def may_be_sliced(match: Match) -> bool:
    return match.pattern.within_us is not None and sees_inside(match)


@dataclass(slots=True)
class Sliced:
    """``read``: the events of a range of time, of the partitions that may have a match."""

    match: Match
    types: dict[str, ColumnType]
    event_time: str
    view: EventView
    read: Callable[[Times], list[Any]]
    count: int = 0

    def answers(self, low: int, high: int) -> Iterator[pa.RecordBatch]:
        """Of the matches that begin in a range of time, in order."""
        try:
            answer = self._answer(low, high)
        except ResourceExhausted as error:
            if error.details.get("limit") != "query_bytes" or high - low <= (self.match.pattern.within_us or 0):
                raise
            middle = self._middle(low, high)
            yield from self.answers(low, middle)
            yield from self.answers(middle, high)
            return
        self.count += 1
        if answer is not None:
            yield answer

    def _answer(self, low: int, high: int) -> pa.RecordBatch | None:
        within, (start, end) = self.match.pattern.within_us or 0, (self.match.start_us, self.match.end_us)
        back = 2 * within
        last = high + within + 1 if end is None else min(high + within + 1, end)
        while True:
            first = low - back if start is None else max(low - back, start)
            is_whole = first == start or not self.view.rows_between(start, first)
            held = self.read((start if is_whole else first, last))
            if not held:
                return None
            rows = Rows.of(held, self.match, self.event_time)
            decided = Matcher(self.match, self.types).decided(rows, None if is_whole else first, low)
            if decided is not None:
                decided = decided.where(rows.times[decided.found.begins] < high)
                return answered(self.match, rows, decided.found)
            back *= 4

    def _middle(self, low: int, high: int) -> int:
        """Cuts a range of time where about half of its events are before."""
        parts = sorted((part.time_min, part.rows) for part in self.view.parts() if not outside(part, low, high))
        if parts:
            rows = np.cumsum([rows for _, rows in parts])
            middle = parts[int(np.searchsorted(rows, rows[-1] // 2))][0]
            if low < middle < high:
                return middle
        return (low + high) // 2
