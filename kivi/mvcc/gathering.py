"""What commits add to aggregates while a retraction is on its way through a log that orders.

::

    GATHER       a record: from here on, what commits add to these aggregates is kept, by every node
    ...          its gateway computes the rows that begin anew as of that record (``kivi.store.retraction``)
    retraction   names the record: each node adds what it has kept since, in the order of the log, and lets go of it

Where one process orders by itself (``kivi.mvcc.commit``) the last deltas are added under the lock that makes the order.
Here nobody knows, before it comes back, what comes before a commit: so it is added where it comes back, by every node
alike. What is kept is a function of the log's prefix: of the records since, whatever a node has folded or forgotten
meanwhile. With the position it is saved as of the position (``kivi.mvcc.prefix``).

A retraction that comes more than ``GATHERED_US`` behind its GATHER, by the log's time, is stale, and so is a second one
with the same GATHER: its gateway computes the rows again. So what was kept for one that never comes is let go of.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from kivi.mvcc.applied import Applied

__all__ = ["GATHERED_US", "Gathering", "Window"]

GATHERED_US: Final = 60_000_000


class Window(NamedTuple):
    """Since ``number``, which came at a time of the log, what is added to ``tables`` is kept."""

    number: int
    time_us: int
    tables: tuple[int, ...]


class Gathering:
    """Not thread safe: lives under the entry lock."""

    def __init__(self) -> None:
        self.windows: dict[int, Window] = {}
        self._kept: deque[tuple[int, Applied]] = deque()

    def restore(self, window: Window) -> None:
        self.windows[window.number] = window

    def keep(self, last: int, applied: Applied) -> Applied | None:
        """Of what entered together, the last at this CTS, the part that is kept; None if nothing is."""
        tables = {table for window in self.windows.values() for table in window.tables}
        rows = [row for row in applied.rows if row[1] in tables]
        runs = [(table, run) for table, run in applied.runs if table in tables]
        if not rows and not runs:
            return None
        self._kept.append((last, kept := Applied(rows, (), runs)))
        return kept

    def since(self, number: int, now_us: int) -> dict[int, Applied] | None:
        """All that was kept since a GATHER, by the last CTS of each; None if that is not there, or too long ago."""
        window = self.windows.get(number)
        if window is None or now_us - window.time_us > GATHERED_US:
            return None
        return {last: applied for last, applied in self._kept if last > number}

    def over(self, now_us: int) -> list[int]:
        """The windows whose time is over."""
        return [window.number for window in self.windows.values() if now_us - window.time_us > GATHERED_US]

    def end(self, number: int) -> None:
        """Lets go of what is kept for one retraction, and for no other."""
        self.windows.pop(number, None)
        first = min(self.windows, default=None)
        while self._kept and (first is None or self._kept[0][0] < first):
            self._kept.popleft()
