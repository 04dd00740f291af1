"""The caller's time: until when a thread's work is of use to whoever asked for it.

A server sets it for the thread that answers a request; whatever waits for something slow there, as an object store is,
waits no longer than that.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator

__all__ = ["left_s", "until"]

_thread = threading.local()


@contextlib.contextmanager
def until(moment: float | None) -> Iterator[None]:
    """Within this block the thread's work ends at ``moment`` of ``time.monotonic``; None: whenever it does."""
    before = getattr(_thread, "until", None)
    _thread.until = moment
    try:
        yield
    finally:
        _thread.until = before


def left_s() -> float:
    """Seconds that are left, never below 0; infinite where nobody said."""
    moment = getattr(_thread, "until", None)
    return math.inf if moment is None else max(0.0, moment - time.monotonic())
