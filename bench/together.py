"""Many at once: each thread or task does its thing again and again until the time is up.

The clock ends when the last one has its answer, so a rate counts nothing that was not paid for.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

__all__ = ["in_tasks", "in_threads", "run"]

T = TypeVar("T")


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs it on the one event loop of this process: gRPC's asyncio half belongs to the first loop it meets."""
    return _runner().run(work)


def in_threads(
    jobs: Sequence[Callable[[], None]], seconds: float, turns: Iterator[Any] | None = None
) -> tuple[int, float]:
    """Each job in a thread of its own. How often any of them was done, and in how many seconds.

    ``turns``: ends them all when it is used up, if the time is not up before. The first exception is raised when all
    have ended; it stops the others at their next turn.
    """
    shared = itertools.repeat(None) if turns is None else turns
    done = [0] * len(jobs)
    failures: list[BaseException] = []
    ready = threading.Barrier(len(jobs) + 1)

    def work(i: int, job: Callable[[], None]) -> None:
        count = 0
        ready.wait()
        try:
            for _ in shared:
                if time.perf_counter() >= until or failures:
                    break
                job()
                count += 1
        except BaseException as error:
            failures.append(error)
        done[i] = count

    threads = [threading.Thread(target=work, args=(i, job)) for i, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    until = began + seconds
    ready.wait()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    if failures:
        raise failures[0]
    return sum(done), took


async def in_tasks(jobs: Sequence[Callable[[], Awaitable[None]]], seconds: float) -> tuple[int, float]:
    """The same with tasks of this event loop."""
    began = time.perf_counter()
    until = began + seconds

    async def work(job: Callable[[], Awaitable[None]]) -> int:
        count = 0
        while time.perf_counter() < until:
            await job()
            count += 1
        return count

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work(job)) for job in jobs]
    return sum(task.result() for task in tasks), time.perf_counter() - began
