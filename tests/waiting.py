"""How tests wait for what another thread, process or program does: they ask until it holds, and never for ever.

A test sleeps only where time itself is tested, or where something is slow on purpose.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["until", "wait_until"]

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
