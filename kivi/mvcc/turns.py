"""Turns: so many threads at a time, in the order in which they came.

A semaphore of ``threading`` goes to whoever asks first once it is free, and a thread that gives it back and asks again
is always first: the one that waits has to wake up before it can ask. Folding a million rows, a turn for each 2,048 of
them, kept appends waiting for one to two seconds that way, every few seconds. Here a turn is handed to the one that has
waited longest.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType

__all__ = ["Turns"]


class Turns:
    """``with turns:`` waits for a turn. Not reentrant."""

    def __init__(self, count: int) -> None:
        self._mutex = threading.Lock()
        self._free = count
        self._waiting: deque[threading.Lock] = deque()  # held until it is its turn

    def __enter__(self) -> None:
        with self._mutex:
            if self._free:
                self._free -= 1
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        try:
            gate.acquire()
        except BaseException:  # an interrupt, of a caller in this process
            with self._mutex:
                if gate in self._waiting:
                    self._waiting.remove(gate)
                    raise
            self.__exit__(None, None, None)  # its turn had come
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1
