"""The caller's time: until when a thread's work is of use to whoever asked for it.

A server sets it for the thread that answers a request; whatever waits for something slow there, as an object store is,
waits no longer than that.
"""

from __future__ import annotations

import math
import threading
import time

__all__ = ["left_s", "until"]

_thread = threading.local()


class until:
    """Within this block the thread's work ends at ``moment`` of ``time.monotonic``; None: whenever it does."""

    __slots__ = ("_before", "_moment")

    def __init__(self, moment: float | None) -> None:
        self._moment = moment

    def __enter__(self) -> None:
        self._before: float | None = getattr(_thread, "until", None)
        _thread.until = self._moment

    def __exit__(self, *_: object) -> None:
        _thread.until = self._before


def left_s() -> float:
    """Seconds that are left, never below 0; infinite where nobody said."""
    moment = getattr(_thread, "until", None)
    return math.inf if moment is None else max(0.0, moment - time.monotonic())
