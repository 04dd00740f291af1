"""Writes at a steady pace: each begins when its time has come, whether those before it are answered or not.

So what somebody waits for is not hidden by a writer that waits too ("coordinated omission"). Writes begin in bursts:
those whose time has come within ``_WAKE_S``, as from several programs that share a client.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["Written", "at_a_pace"]

_IN_FLIGHT_MAX: Final = 20_000
_WAKE_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class Written:
    """``began_ns[i]``: when the call of write i began (CLOCK_MONOTONIC). ``seconds``: to the last acknowledgement.

    ``took_s``: how long each call took, in the order of their ends.
    """

    began_ns: array[int]
    took_s: list[float]
    seconds: float

    @property
    def rate(self) -> float:
        return len(self.began_ns) / self.seconds


async def at_a_pace(once: Callable[[int], Awaitable[None]], rate: float, seconds: float) -> Written:
    """``once(i)`` for i from 0 on, ``rate`` a second. It ends early when too many are not answered."""
    total = max(1, round(rate * seconds))
    began = array("q")
    took: list[float] = []
    flying: set[asyncio.Task[None]] = set()

    async def timed(i: int) -> None:
        at = time.monotonic_ns()
        began.append(at)  # tasks start in the order in which they were made
        await once(i)
        took.append((time.monotonic_ns() - at) / 1e9)

    start = time.monotonic()
    sent = 0
    async with asyncio.TaskGroup() as group:
        while sent < total and len(flying) < _IN_FLIGHT_MAX:
            for i in range(sent, min(total, int((time.monotonic() - start) * rate) + 1)):
                task = group.create_task(timed(i))
                flying.add(task)
                task.add_done_callback(flying.discard)
                sent = i + 1
            await asyncio.sleep(_WAKE_S)
    return Written(began, took, time.monotonic() - start)
