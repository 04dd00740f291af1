"""Threads that compute make way for threads that answer, where the system can tell them apart.

What computes in columns lets go of the interpreter's lock at each kernel, and asks for it again some microseconds
later: it wakes thousands of times a second. Linux takes who wakes for somebody whose answer is wanted, and lets it run
at once, before whoever is running: a thread that reads requests, often enough. A *batch* thread waits for its turn. It
gets no less of the processor (unlike one of lower priority, which may hold the interpreter's lock for seconds while
other processes run), so nothing that waits for it waits longer.

What it is worth: decision 0013.
"""

from __future__ import annotations

import contextlib
import os
import sys

__all__ = ["computes"]


def computes() -> None:
    """The calling thread computes, and answers nobody itself. What it starts is told so as well.

    Nothing happens where that cannot be said, or where somebody has already said something else of this process.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox that allows no such call
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
