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

__all__ = ["use_batch_scheduling"]


def use_batch_scheduling() -> None:
    """For threads that no request waits for: the system lets others run first. Threads that it starts inherit that.

    It has no effect where the system has no such class, or where another class was chosen for this process before.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox that allows no such call
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
