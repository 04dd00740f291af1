"""The append stream: batches to one table from a few threads or tasks of one client, again and again in turn.

Shared by the goals that need one. Several appends are in flight, since the network, the server's work on columns and
the disk take turns otherwise; what a user would write is just this: a few threads that call ``db.append``, or tasks
that await it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.together import in_tasks, in_threads, run

__all__ = ["IN_FLIGHT", "WARM_UP", "Streamed", "in_flight", "stream", "stream_aio"]

IN_FLIGHT: Final = {10_000: 16, 100_000: 4}  # appends at a time, by the rows of a batch
WARM_UP: Final = 32  # batches before the clock, by all threads or tasks


def in_flight(batch_rows: int) -> int:
    return IN_FLIGHT.get(batch_rows, 8)


@dataclass(frozen=True, slots=True)
class Streamed:
    """``sent[i]``: how often batch i was acknowledged, the warm-up too; ``events`` and ``seconds`` without it.

    ``began_s``, and ``commits``: the commit timestamp of each batch, the warm-up too, and when it was acknowledged; by
    the clock that all processes of a machine share (CLOCK_MONOTONIC).
    """

    sent: list[int]
    events: int
    seconds: float
    began_s: float
    commits: list[tuple[int, float]]

    @property
    def at_s(self) -> list[float]:
        """When each batch after the warm-up was acknowledged, in order."""
        return sorted(at for _, at in self.commits if at >= self.began_s)

    @property
    def rate(self) -> float:
        return self.events / self.seconds


class _Turns:
    """Which batch is next, and which were acknowledged."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches
        self.acknowledged: list[tuple[int, int, float]] = []  # which, its commit timestamp, and when
        self._next = itertools.count()  # its next() is one C call: threads share it without a lock

    def take(self) -> int:
        return next(self._next) % len(self.batches)

    def acknowledge(self, i: int, commit_ts: int) -> None:
        if commit_ts <= 0:
            raise AssertionError("an append was answered without a commit timestamp")
        self.acknowledged.append((i, commit_ts, time.monotonic()))

    def streamed(self, before: int, seconds: float, began_s: float) -> Streamed:
        sent = [0] * len(self.batches)
        for i, _, _ in self.acknowledged:
            sent[i] += 1
        events = sum(self.batches[i].num_rows for i, _, _ in self.acknowledged[before:])
        return Streamed(sent, events, seconds, began_s, [(ts, at) for _, ts, at in self.acknowledged])


def stream(
    db: Any,
    table: str,
    batches: Sequence[Any],
    threads: int,
    seconds: float = float("inf"),
    warm_up: int = WARM_UP,
    count: int | None = None,
) -> Streamed:
    """Appends from threads of this process until the time is up and everything is acknowledged.

    ``count``: so many batches after the warm-up, however long they take.
    """
    turns = _Turns(batches)
    left = None if count is None else iter(range(count))

    def once() -> None:
        i = turns.take()
        turns.acknowledge(i, db.append(table, batches[i]))

    in_threads([once] * threads, float("inf"), iter(range(warm_up)))
    began_s = time.monotonic()
    _, took = in_threads([once] * threads, seconds, left)
    return turns.streamed(warm_up, took, began_s)


def stream_aio(
    endpoint: str, table: str, batches: Sequence[Any], tasks: int, seconds: float, warm_up: int = WARM_UP
) -> Streamed:
    """The same with tasks of the client for asyncio."""
    import kivi.aio

    async def measured() -> Streamed:
        async with await kivi.aio.connect(endpoint, timeout=120.0) as db:
            turns = _Turns(batches)

            async def once() -> None:
                i = turns.take()
                turns.acknowledge(i, await db.append(table, batches[i]))

            await asyncio.gather(*(once() for _ in range(warm_up)))
            began_s = time.monotonic()
            _, took = await in_tasks([once] * tasks, seconds)
            return turns.streamed(warm_up, took, began_s)

    return run(measured())
