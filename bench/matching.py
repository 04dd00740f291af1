"""The matcher of live queries by itself: many ranges against many rows, in this process, on one core."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa

import kivi
from bench.context import Context
from bench.sheet import Sheet
from bench.verify import WrongTotals
from kivi.live.matching import BatchColumns, Columns, Matcher, RowColumns
from kivi.model.types import ColumnType

__all__ = ["Ranges", "take"]

DOMAIN: Final = 1 << 31
SHARE: Final = 50_000  # one value in so many is selected by a query
_QUERIES: Final = 1_500
_ROWS: Final = (20, 1_000)  # at a time: what gathers in a tick at 1,000 writes a second, and when more come


class Ranges:
    """``low[q] <= value < high[q]``, uniform, from a seed."""

    def __init__(self, count: int, seed: int = 8, share: int = SHARE) -> None:
        self.low = np.random.default_rng(seed).integers(0, DOMAIN - DOMAIN // share, count)
        self.high = self.low + DOMAIN // share

    def selected(self, values: Any, queries: int) -> tuple[Any, Any]:
        """(query, position in ``values``) of every hit of the first ``queries``."""
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        begin = np.searchsorted(ordered, self.low[:queries])
        counts = np.searchsorted(ordered, self.high[:queries]) - begin
        query = np.repeat(np.arange(queries), counts)
        within = np.arange(len(query)) - np.repeat(np.cumsum(counts) - counts, counts)
        return query, order[np.repeat(begin, counts) + within]


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    ranges, column = Ranges(_QUERIES), kivi.col("value")
    matcher: Matcher[int] = Matcher({"value": ColumnType("int64")})
    for q in range(_QUERIES):
        matcher.add(q, (column >= int(ranges.low[q])) & (column < int(ranges.high[q])))
    values = np.random.default_rng(1).integers(0, DOMAIN, 100_000)
    for rows in _ROWS:
        parts = [values[i : i + rows] for i in range(0, len(values), rows)]
        dicts = [[{"value": value} for value in part.tolist()] for part in parts]
        batches = [pa.record_batch({"value": part}) for part in parts]
        cases: dict[str, Callable[[int], Columns]] = {
            "events": lambda i, batches=batches: BatchColumns(batches[i]),  # type: ignore[misc]
            "rows": lambda i, dicts=dicts: RowColumns(dicts[i]),  # type: ignore[misc]
        }
        for kind, columns in cases.items():
            matched, seconds = _measured(matcher, columns, len(parts), context.seconds, ranges, values, rows)
            case = f"matcher alone, {kind}, {rows:,} at a time"
            sheet.record("kivi", case, matched / seconds, "matches/s", queries=_QUERIES)


def _measured(
    matcher: Matcher[int],
    columns: Callable[[int], Columns],
    parts: int,
    seconds: float,
    ranges: Ranges,
    values: Any,
    rows: int,
) -> tuple[int, float]:
    """Comparisons, and in how many seconds. Raises WrongTotals: every part's hits are looked at once."""
    found = set[tuple[int, int]]()
    for i in range(parts):
        for query, at in matcher.selected(columns(i)):
            assert isinstance(at, list)  # and no error: these predicates calculate nothing
            found.update((query, i * rows + row) for row in at)
    if found != set(zip(*(side.tolist() for side in ranges.selected(values, _QUERIES)), strict=True)):
        raise WrongTotals("the matcher selects other rows than its queries")
    done, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        for _ in matcher.selected(columns(done % parts)):
            pass
        done += 1
    return done * rows * len(matcher), took
