"""Events that count once, whatever node they reach: the ids of those that were taken lately, in a log that orders.

A commit may say of its events that they count *once* (``record.Once``): their ids are the bytes of some columns. Where
it comes back, every node looks for them among those of the commits before it, within the window by the log's time: if
one is there, nothing of the commit is applied, and its gateway, which has applied the other one by then, tries again
without what was taken. So of two gateways that get the same events at the same moment one stores them.

What is known is a function of the log's prefix: with the position it is saved as of the position
(``kivi.mvcc.prefix``), also the ids of events that were retracted or forgotten since. It costs 24 bytes for each event
on disk until the window is over, and 32 in memory. A window is of a table and a length, so gateways that give another
length do not see each other's: they are to be given the same.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from kivi.arrow.id_window import ID, SLOTS, Ids, Window, first_ones, ids_of
from kivi.mvcc.groups import Single
from kivi.mvcc.record import Once

__all__ = ["Deduplication", "Taken"]

_NO_LIMIT: Final = 2**62


class Taken(NamedTuple):
    """The ids of one commit, which came at a time of the log."""

    cts: int
    time_us: int
    once: Once
    ids: Ids

    @property
    def is_over_at_us(self) -> int:
        """From this time on nobody looks for them."""
        return self.time_us + self.once.window_us + self.once.window_us // SLOTS


class Deduplication:
    """Not thread safe: lives under the entry lock."""

    def __init__(self) -> None:
        self._windows: dict[Once, Window] = {}
        self._now_us = 0

    def known(self, once: Once, ids: Ids, now_us: int) -> np.typing.NDArray[np.bool_]:
        """Which of these were taken within the window, at this time of the log."""
        window = self._windows.get(once)
        if window is None:
            return np.zeros(len(ids), bool)
        self._now_us = now_us
        window.expire()
        return window.known(ids)

    def has_some(self, part: Single, now_us: int) -> bool:
        """Whether events of the part were taken before, or twice in it."""
        if (once := part.commit.once) is None:
            return False
        ids = _ids(part, once)
        return not first_ones(ids).all() or bool(self.known(once, ids, now_us).any())

    def take(self, part: Single, time_us: int) -> Taken | None:
        """The part has entered at a time of the log."""
        if (once := part.commit.once) is None:
            return None
        taken = Taken(part.first, time_us, once, _ids(part, once))
        self.restore(taken)
        return taken

    def restore(self, taken: Taken) -> None:
        """In the order of the log."""
        window = self._windows.get(taken.once)
        if window is None:
            clock = lambda: self._now_us / 1_000_000  # noqa: E731
            window = self._windows[taken.once] = Window(taken.once.window_us / 1_000_000, _NO_LIMIT, clock)
        self._now_us = taken.time_us
        window.add(taken.ids)

    def window(self, once: Once) -> Window | None:
        """None: nothing was taken."""
        return self._windows.get(once)


def _ids(part: Single, once: Once) -> Ids:
    found = [ids_of(batch, once.columns) for table, batch in part.events if table == once.table]
    return np.concatenate(found) if found else np.zeros(0, ID)
