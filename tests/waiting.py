"""How tests wait for what another thread, process or program does: they ask until it holds, and never for ever.

A test sleeps only where time itself is tested, or where something is slow on purpose.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Pulse", "until", "wait_until"]

PATIENCE_S = 60.0
T = TypeVar("T")
Reason = str | Callable[[], object]


def _said(reason: Reason) -> object:
    return reason if isinstance(reason, str) else reason()


def wait_until(
    holds: Callable[[], T],
    timeout_s: float = PATIENCE_S,
    *,
    reason: Reason = "it did not come about in time",
    pause_s: float = 0.01,
) -> T:
    """The first true answer of ``holds``. AssertionError once the time is up, with ``reason`` or what that returns."""
    deadline = time.monotonic() + timeout_s
    while not (answer := holds()):
        assert time.monotonic() < deadline, _said(reason)
        time.sleep(pause_s)
    return answer


async def until(
    holds: Callable[[], object],
    timeout_s: float = PATIENCE_S,
    *,
    reason: Reason = "it did not come about in time",
    pause_s: float = 0.001,
) -> None:
    """The same in a task, while others run; what ``holds`` returns may have to be awaited."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = holds()
        if await answer if inspect.isawaitable(answer) else answer:
            return
        assert time.monotonic() < deadline, _said(reason)
        await asyncio.sleep(pause_s)


class Pulse(threading.Thread):
    """Asks for no more than to be woken a hundred times a second while it is entered; ``late_s`` is how much later than
    that it was at most. So much a busy machine, or a busy interpreter, may add to a bound of time: it is measured by
    nothing that the bound is for.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.late_s = 0.0
        self._ending = threading.Event()

    def run(self) -> None:
        due = time.monotonic() + 0.01
        while not self._ending.wait(due - time.monotonic()):
            now = time.monotonic()
            self.late_s, due = max(self.late_s, now - due), now + 0.01

    def __enter__(self) -> Pulse:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ending.set()
        self.join()
