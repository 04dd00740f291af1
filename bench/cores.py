"""Which process runs on which core: "on one core" means that the server has one, and nobody else works there.

Threads inherit the cores of the one that starts them, and processes likewise: a server that is started within
``pinned`` has that core for its event loop, its commits, its compactions and its live queries together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["pinned", "shared_out"]


def shared_out() -> tuple[set[int], set[int]]:
    """(the server's core, the cores of its clients); the same one twice on a machine that has no other."""
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}


@contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    """All threads of this process, and what they start, run on these cores only until this is left."""
    before = os.sched_getaffinity(0)
    _set(cores)
    try:
        yield
    finally:
        _set(before)


def _set(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(int(thread), cores)
