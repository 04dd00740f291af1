"""Calls that run ahead of whoever takes their results: in order, a few at a time, in threads of the process.

What decodes columns lets go of the interpreter's lock, so as many row groups are read at a time as there are
processors. The first call runs where it is asked for: most questions need no other, and one that ends early has paid
for nothing else. All callers share the threads; calls must not wait for each other.

What it is worth: decision 0046.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from kivi.runtime.forks import register_fork_handler
from kivi.runtime.scheduling import use_batch_scheduling

__all__ = ["AT_ONCE", "begin", "in_order"]

P = TypeVar("P")
T = TypeVar("T")
AT_ONCE: Final = min(4, os.cpu_count() or 1)
"""Threads, and for each caller calls whose results it has not taken."""


class _Pool:
    """Threads that begin when they are first needed, in a forked child anew."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        register_fork_handler(self)

    def forked(self) -> None:
        self._threads = None

    def submit(self, call: Callable[[], T]) -> Future[T]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(AT_ONCE, "kivi-ahead", initializer=use_batch_scheduling)
        return self._threads.submit(call)


_pool: Final = _Pool()


def begin(call: Callable[[], T]) -> Future[T]:
    """Runs ``call``, which waits for no network, in one of the threads. Whoever gives up on it cancels it."""
    return _pool.submit(call)


def in_order(parts: Iterator[P], call: Callable[[P], T], waits: Callable[[P], bool] | None = None) -> Iterator[T]:
    """``call`` of each part, in their order; at most ``AT_ONCE`` of them have begun and are not taken yet.

    ``parts`` is asked for the next one by the caller's thread. What ``waits`` is true of runs there too, when it is its
    turn: an object store that does not answer keeps nobody else waiting, and a deadline is that of the caller. Raises
    what a call raises, in its turn. When it ends early, what has not begun never does; what runs is not waited for, as
    this may be a garbage collection, within any lock.
    """
    if (first := next(parts, None)) is None:
        return
    yield call(first)
    begun = deque[Callable[[], T]]()
    running = deque[Future[T]]()
    try:
        for part in parts:
            if waits is not None and waits(part):
                begun.append(partial(call, part))
            else:
                running.append(_pool.submit(partial(call, part)))
                begun.append(running[-1].result)
            if len(begun) == AT_ONCE:
                yield begun.popleft()()
                while running and running[0].done():
                    running.popleft()
        while begun:
            yield begun.popleft()()
    finally:
        for future in running:
            future.cancel()
