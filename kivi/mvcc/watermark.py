"""The watermark: the largest t such that every sequence number <= t is finished (R11).

::

    entered    1  2  3  4          W = 0: 1 is not finished
    finished   .  x  .  x
    finish(1)  x  x  .  x          W = 2
    finish(3)  x  x  x  x          W = 4

Numbers are entered in increasing order and finished in any order. A number that its log record proves to have
aborted is finished like any other (W passes it); one whose outcome is unknown is never finished, and W stays
below it until the process restarts (R12). Numbers may skip: what was never entered is no gap.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import itemgetter

__all__ = ["Watermark", "call_all"]


def call_all(callbacks: Iterable[Callable[[], None]]) -> None:
    """Calls each, whatever another raises: they belong to different callers, who each wait for their own.

    What one raises is a bug of that callback; it is logged, for there is nobody on the log's thread to tell.
    """
    for callback in callbacks:
        try:
            callback()
        except Exception:
            logging.getLogger(__name__).exception("a callback of a commit raised")


class Watermark:
    """Thread safe. ``lock`` is shared with the leases: registering a snapshot must be atomic with reading W."""

    def __init__(self, value: int, lock: threading.RLock) -> None:
        self._value = value
        self._lock = lock
        self._moved = threading.Condition(lock)
        self._entered: deque[tuple[int, int]] = deque()  # the last of those that were entered together, and how many
        self._in_flight = 0
        self._finished: set[int] = set()
        self._gathering = False
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    @property
    def value(self) -> int:
        return self._value

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def enter(self, first: int, last: int | None = None) -> None:
        """A number is in flight, or all up to ``last``, which finish together: ``finish(last)`` finishes them all.

        Called in increasing order, before anybody can finish them.
        """
        last = first if last is None else last
        count = last - first + 1
        with self._lock:
            self._entered.append((last, count))
            self._in_flight += count

    def finish(self, sequence: int, then: Callable[[], None] | None = None) -> None:
        """``sequence`` is durable and applied, or durably aborted. ``then`` runs once W has passed it (R17).

        Callbacks run on the thread that moved W past them, outside the lock, in sequence order.
        """
        ready: list[Callable[[], None]] = []
        with self._lock:
            self._finished.add(sequence)
            if then is not None:
                self._waiting.append((sequence, then))
            if not self._gathering:
                ready = self._advance()
        call_all(ready)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """W moves in one step past all that finishes meanwhile, as this is left."""
        with self._lock:
            self._gathering = True
        try:
            yield
        finally:
            with self._lock:
                self._gathering = False
                ready = self._advance()
            call_all(ready)

    def _advance(self) -> list[Callable[[], None]]:
        """Moves W over what is finished. What is to be called then, outside the lock."""
        before = self._value
        while self._entered and self._entered[0][0] in self._finished:
            self._value, count = self._entered.popleft()
            self._in_flight -= count
            self._finished.discard(self._value)
        if self._value == before:
            return []
        self._moved.notify_all()
        passed = [item for item in self._waiting if item[0] <= self._value]
        if len(passed) == len(self._waiting):
            self._waiting.clear()
        elif passed:
            self._waiting = deque([item for item in self._waiting if item[0] > self._value])
        return [callback for _, callback in sorted(passed, key=itemgetter(0))]

    def when(self, sequence: int, then: Callable[[], None]) -> None:
        """Runs ``then`` once W has passed ``sequence``: now, if it has (R17)."""
        with self._lock:
            waits = self._value < sequence
            if waits:
                self._waiting.append((sequence, then))
        if not waits:
            then()

    def wait_until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Blocks until ``ready()``, which is asked whenever W moves or somebody nudges. False when the time is up."""
        with self._lock:
            return self._moved.wait_for(ready, timeout_s)

    def nudge(self) -> None:
        """Wakes the threads in ``wait_until``, which look again."""
        with self._lock:
            self._moved.notify_all()

    def wait_for(self, sequence: int, timeout_s: float | None) -> bool:
        """Blocks until W >= sequence. False when the time is up first."""
        with self._lock:
            return self._moved.wait_for(lambda: self._value >= sequence, timeout_s)
