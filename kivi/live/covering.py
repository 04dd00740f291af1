"""The part of a table's keys that anybody follows: rows outside of it are not read when they change.

A dashboard's subscriptions look at a few subtrees of an aggregate of which a batch of events changes thousands of rows.
Their key ranges are put together once, and a run's keys, which are sorted, are cut to them by bisection.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from kivi.delta.runs import DeltaRun

__all__ = ["Cover"]

Range = tuple[bytes | None, bytes | None]


class Cover:
    """A union of ranges start <= key < end, None being no bound. Immutable."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self._starts: list[bytes] = []
        self._ends: list[bytes | None] = []
        for start, end in sorted(((start or b"", end) for start, end in ranges), key=lambda found: found[0]):
            if end is not None and end <= start:
                continue
            if self._ends and (self._ends[-1] is None or start <= self._ends[-1]):
                if self._ends[-1] is not None and (end is None or end > self._ends[-1]):
                    self._ends[-1] = end
            else:
                self._starts.append(start)
                self._ends.append(end)
        self.everything = self._starts == [b""] and self._ends == [None]

    def __contains__(self, key: bytes) -> bool:
        at = bisect_right(self._starts, key) - 1
        return at >= 0 and ((end := self._ends[at]) is None or key < end)

    def keys(self, run: DeltaRun) -> list[bytes]:
        """The run's keys that are in it; with those of several commits one may come more than once."""
        if not self.everything and len(self._starts) < run.rows // 16:  # a bisection costs as much as so many keys
            found: list[bytes] = []
            for start, end in zip(self._starts, self._ends, strict=True):
                found += run.listed(run.slice_range(start, end))
            return found
        keys = run.listed(range(run.rows))
        return keys if self.everything else [key for key in keys if key in self]
