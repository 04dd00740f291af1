"""Threads that compute give way to threads that answer.

What decodes, derives, combines, folds and matches takes a processor whenever there is one. What answers needs one for
some microseconds, at once: a read crosses four threads, and where two processors have three threads that compute, it
waits for each of them. So the threads that compute have a little less weight for Linux (nice 3). A much smaller weight
would be wrong: while such a thread holds the interpreter's lock, others wait for it.

On two cores. Reads of 12 slots beside an append stream at full speed: 99 of 100 within 8.7 ms, not 11.6, in batches
of 10,000, within 15.5 instead of 23 in batches of 100,000; the stream by itself was as fast as before. Nice 6: 7.5 and
17 ms, for a tenth less of the stream. A batch's policy (SCHED_BATCH: one that wakes up takes no processor from a thread
that runs) made the stream a tenth faster as long as nobody else wanted the processors, and slower than without it
beside a thousand subscribers: 0.75 of its rate, where nice 3 alone keeps 0.95.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Final

__all__ = ["NICE", "give_way"]

NICE: Final = 3


def give_way() -> None:
    """Called by a thread that computes, for itself. Where threads have no weight of their own, nothing happens."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), NICE))
