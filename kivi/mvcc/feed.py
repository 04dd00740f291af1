"""The feed: what was committed lately, for those who follow the commit log in this process (``kivi.live``).

It is the log's newest part as pending got it: the same immutable operations, runs and batches, by reference. Entries
arrive before the watermark passes their CTS, so whoever takes those up to W has every commit up to W since the feed was
switched on: ``start`` says from where on that is so.

Nobody waits for a follower. One that does not take its entries in time loses them, all of them and knowingly, and
reads again what it follows: ``take`` says how far. The commit path pays one append to a list for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, NamedTuple

from kivi.delta.ops import RowOp
from kivi.delta.runs import DeltaRun
from kivi.mvcc.applied import Applied, PendingEvents, Retracted

__all__ = ["Committed", "Feed", "Tap"]

_ROWS_BYTES: Final = 200


class Committed(NamedTuple):
    """Commits that entered together, the last at ``cts``, by their parts (``applied.Applied``)."""

    cts: int
    rows: Sequence[tuple[int, int, bytes, RowOp]]
    runs: Sequence[tuple[int, DeltaRun]]
    events: Sequence[tuple[int, PendingEvents]]
    retracted: Sequence[tuple[int, Retracted]]
    nbytes: int
    """The memory that keeping it takes."""


class Feed:
    """Thread safe. Holds at most ``max_bytes``, and nothing while it is off."""

    def __init__(self, max_bytes: int) -> None:
        self._mutex = threading.Lock()
        self._entries: list[Committed] = []
        self._nbytes = 0
        self._max_bytes = max_bytes
        self._lost = 0
        self.on = False

    def start(self) -> None:
        """Keeps the commits that are applied from now on."""
        with self._mutex:
            self.on = True

    def stop(self) -> None:
        with self._mutex:
            self.on, self._lost = False, 0
            self._entries, self._nbytes = [], 0

    def add(self, committed: Committed) -> None:
        """Called before the watermark passes any of them, which it does at once."""
        with self._mutex:
            if not self.on:
                return
            self._entries.append(committed)
            self._nbytes += committed.nbytes + _ROWS_BYTES * (1 + len(committed.rows))
            if self._nbytes > self._max_bytes:
                self._lost = max(self._lost, max(one.cts for one in self._entries))
                self._entries, self._nbytes = [], 0

    def first_at(self, least: int) -> int | None:
        """The least CTS from ``least`` on at which commits that entered together end; None: there are none."""
        with self._mutex:
            return min((one.cts for one in self._entries if one.cts >= least), default=None)

    @property
    def fills(self) -> bool:
        """Whether half of the room is taken: whoever follows had better take what there is."""
        return self._nbytes > self._max_bytes // 2

    def take(self, upto: int) -> tuple[list[Committed], int]:
        """The commits at or below ``upto``, in no order, each once; and the newest CTS that was lost, 0 if none was.

        After a loss only what is read at a snapshot that has that CTS is up to date.
        """
        with self._mutex:
            taken = [one for one in self._entries if one.cts <= upto]
            if len(taken) == len(self._entries):
                self._entries, self._nbytes = [], 0
            elif taken:
                self._entries = [one for one in self._entries if one.cts > upto]
                self._nbytes = sum(one.nbytes + _ROWS_BYTES * (1 + len(one.rows)) for one in self._entries)
            lost, self._lost = self._lost, 0
            return taken, lost


class Tap:
    """Everything that is applied while it is open (``Pending.tapped``): for one who misses nothing, and takes it often.

    What it holds would mostly be in memory anyway.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held: list[tuple[int, Applied]] = []

    def add(self, last: int, applied: Applied) -> None:
        with self._mutex:
            self._held.append((last, applied))

    def take(self, upto: int) -> dict[int, Applied]:
        """What entered together, the last of it at or below ``upto``, each once, by the CTS of the last."""
        with self._mutex:
            taken = {last: applied for last, applied in self._held if last <= upto}
            self._held = [one for one in self._held if one[0] > upto]
        return taken
