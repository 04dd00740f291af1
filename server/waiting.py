"""Requests that ask for a snapshot that is to come: one thread waits for all of them.

Whoever was told of a commit may ask for the state after it (``min_snapshot``), and one that asks for what never comes
is told so when its time is up, which its client sets. None of them holds a thread meanwhile: when its snapshot is
there, its time is up, or the server stops, it goes on in its session's event loop. What waits for a session that
has ended is forgotten.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from kivi.store.facade import Store

__all__ = ["Waiting"]

_LOOK_S: Final = 0.05
"""How late one may be told that its time is up, or the server stops."""
_NEVER: Final = 1 << 64


class _Waiter(NamedTuple):
    """``ts``, and the order in which they came; when its time is up; whether anybody wants it still; what goes on."""

    ts: int
    place: int
    until: float
    is_wanted: Callable[[], bool]
    go_on: Callable[[], None]


class Waiting:
    """Of one store. Thread safe."""

    def __init__(self, store: Store, is_stopping: Callable[[], bool]) -> None:
        self._store = store
        self._is_stopping = is_stopping
        self._changed = threading.Condition()  # its lock guards the heap
        self._heap: list[_Waiter] = []
        self._least = _NEVER  # of what they wait for
        self._places = itertools.count()
        self._looked_at = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kivi-waiting", daemon=True)
        self._thread.start()

    def add(self, ts: int, until: float, is_wanted: Callable[[], bool], go_on: Callable[[], None]) -> None:
        """Calls ``go_on`` once, from another thread, when ``ts`` can be read or not be waited for any longer."""
        with self._changed:
            heapq.heappush(self._heap, _Waiter(ts, next(self._places), until, is_wanted, go_on))
            self._least = self._heap[0].ts
            self._changed.notify()
        self._store.moved.nudge()

    def close(self) -> None:
        """What waits still goes on at once."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._store.moved.nudge()
        self._thread.join()

    def _is_due(self) -> bool:
        return self._closed or self._least <= self._store.watermark()

    def _work(self) -> None:
        closed = False
        while not closed:
            with self._changed:
                while not self._heap and not self._closed:
                    self._changed.wait()
            self._store.moved.wait_until(self._is_due, _LOOK_S)
            closed = self._closed  # looked at first: then what waited is among these
            for waiter in self._done():
                waiter.go_on()

    def _done(self) -> list[_Waiter]:
        """Takes those out that have waited long enough."""
        now, upto = time.monotonic(), self._store.watermark()
        all_of_them = self._closed or self._is_stopping()
        with self._changed:
            heap, done = self._heap, list[_Waiter]()
            while heap and (all_of_them or heap[0].ts <= upto):
                done.append(heapq.heappop(heap))
            if now - self._looked_at >= _LOOK_S:  # at all of them, and not each time that a commit is there
                self._looked_at = now
                done += [waiter for waiter in heap if waiter.until <= now]
                heap = [waiter for waiter in heap if waiter.until > now and waiter.is_wanted()]
                heapq.heapify(heap)
                self._heap = heap
            self._least = heap[0].ts if heap else _NEVER
        return [waiter for waiter in done if waiter.is_wanted()]
