"""A hundred thousand durable subscriptions beside ten thousand events a second: what they cost, and what they get.

They are made over gRPC, one commit each, and nobody is connected. Then events come as before they were there, in
batches of a hundred, each at its moment; and while more come, some hundred of the subscribers return. Each is to get
the events of its topic, no others and none twice: those of before it was made, and all that came while it was away.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any, Final

import pyarrow as pa

import kivi
import kivi.aio
from bench.context import Context
from bench.server import Server
from bench.sheet import Sheet, percentile
from bench.verify import WrongTotals
from bench.writing import Written, at_a_pace

__all__ = ["EVENTS_S", "STORED", "take"]

EVENTS_S: Final = 10_000
STORED: Final = "durable subscriptions stored"
_SUBSCRIPTIONS: Final = 100_000
_SUBSCRIPTIONS_QUICK: Final = 1_000
_USERS: Final = 1_000
_TOPICS: Final = 1_000
_RETURN: Final = 200
_BATCH: Final = 100
_MADE_AT_ONCE: Final = 64
_READ_AT_ONCE: Final = 16
_PATIENCE_S: Final = 60.0
_ENDED_S: Final = 10.0
_TABLE: Final = "notices"


class _Stream:
    """Events with ascending numbers; the topic follows from the number."""

    def __init__(self, db: Any) -> None:
        self._db = db
        self.sent = 0
        self.acknowledged: set[int] = set()

    async def append(self, seconds: float) -> Written:
        first = self.sent // _BATCH
        written = await at_a_pace(lambda i: self._batch(first + i), EVENTS_S / _BATCH, seconds)
        self.sent += _BATCH * len(written.began_ns)
        return written

    async def _batch(self, number: int) -> None:
        seq = range(_BATCH * number, _BATCH * (number + 1))
        now = pa.scalar(time.time_ns() // 1_000, pa.int64()).cast(pa.timestamp("us", "UTC"))
        await self._db.append(
            _TABLE,
            pa.record_batch(
                {
                    "seq": pa.array(seq, pa.int64()),
                    "topic": pa.array([n * 7_919 % _TOPICS for n in seq], pa.int64()),
                    "ts": pa.repeat(now, _BATCH),
                }
            ),
        )
        self.acknowledged.update(seq)

    def of_topic(self, topic: int) -> set[int]:
        """Those that are acknowledged by now."""
        return {n for n in self.acknowledged if n * 7_919 % _TOPICS == topic}


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    count = _SUBSCRIPTIONS_QUICK if context.quick else _SUBSCRIPTIONS
    with context.server() as server:
        asyncio.run(_measure(context, sheet, server, count))


async def _measure(context: Context, sheet: Sheet, server: Server, count: int) -> None:
    seconds = max(2.0, 2 * context.seconds)
    async with await kivi.aio.connect(server.endpoint, timeout=120.0) as db:
        await db.create_event_table(
            _TABLE, event_time="ts", columns={"seq": "int64", "topic": "int64", "ts": "timestamp"}
        )
        events = _Stream(db)
        await events.append(1.0)
        _record(sheet, f"{EVENTS_S:,} events/s, alone", await events.append(seconds))
        before = server.rss_bytes
        began = time.monotonic()
        await _made(db, count)
        sheet.record("kivi", "durable subscriptions made", count / (time.monotonic() - began), "1/s", count=count)
        await db.consolidate()
        grown = server.rss_bytes - before
        sheet.record("kivi", f"{STORED}: memory, more than before", grown / 2**20, "MiB")
        await _nobody_connected(db)
        _record(sheet, f"{EVENTS_S:,} events/s, {STORED}", await events.append(seconds))
        returning = random.Random(3).sample(range(count), min(_RETURN, count))
        appending = asyncio.create_task(events.append(seconds))
        limit = asyncio.Semaphore(_READ_AT_ONCE)
        took = await asyncio.gather(*(_return(db, events, number, limit) for number in returning))
        await appending
        sheet.record("kivi", "a subscriber returns: first event, p50", percentile(took, 50) * 1e3, "ms")
        sheet.record("kivi", "a subscriber returns: first event, p99", percentile(took, 99) * 1e3, "ms")


def _record(sheet: Sheet, case: str, written: Written) -> None:
    sheet.record("kivi", case, written.rate * _BATCH, "events/s")
    sheet.record("kivi", f"{case}: append, p99", percentile(written.took_s, 99) * 1e3, "ms")


def _named(number: int) -> dict[str, Any]:
    return {
        "name": f"s{number}",
        "user": f"u{number % _USERS}",
        "where": kivi.col("topic") == number % _TOPICS,
        "columns": ["seq"],
        "interval_ms": 0,
    }


async def _made(db: Any, count: int) -> None:
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            live = db.subscribe(_TABLE, **_named(number))
            await live.__aenter__()
            await live.close()

    await asyncio.gather(*(some() for _ in range(_MADE_AT_ONCE)))


async def _nobody_connected(db: Any) -> None:
    """The server learns that a stream has ended when it has ended; soon after none may be left. Raises WrongTotals."""
    until = time.monotonic() + _ENDED_S
    while (live := (await db.stats())["subscriptions"]) != 0:
        if time.monotonic() > until:
            raise WrongTotals(f"{live} subscriptions are live, and nobody is connected")
        await asyncio.sleep(0.1)


async def _return(db: Any, events: _Stream, number: int, limit: asyncio.Semaphore) -> float:
    """Seconds to its first event. Reads all that came before it returned. Raises WrongTotals."""
    got: list[int] = []
    first_s = 0.0
    topic = number % _TOPICS
    async with limit:
        wanted = events.of_topic(topic)
        began = time.monotonic()
        async with db.subscribe(_TABLE, **_named(number)) as live:
            while not wanted <= set(got):
                update = await live.next(_PATIENCE_S)
                if update is None:
                    raise WrongTotals(f"subscription {number} got {len(got)} events, not all of {len(wanted)}")
                first_s = first_s or time.monotonic() - began
                got += [change.row["seq"] for change in update.changes if change.row is not None]
    if len(set(got)) != len(got) or any(n * 7_919 % _TOPICS != topic for n in got):
        raise WrongTotals(f"subscription {number} got events twice, or of another topic")
    return first_s
