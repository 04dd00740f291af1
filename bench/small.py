"""Goal 3: small calls, beside what gRPC itself does. One-delta transactions on one hot row, and reads of few rows.

*Together*: 64 threads, or 64 tasks, of one client, each with its own transactions, timestamps and outcomes; beside 64
threads and 64 tasks of an echo client. *Alone*: one call after the other, the median of their times. Wanted:

* together, 5 times the echo of the same kind of client, and 10 times PostgreSQL's best for ``UPDATE ... + 1`` of a row;
* alone, a commit within 2 times (an echo and one sync);
* one aggregate row read within 1.6 times an echo; the last 12 slots of an endpoint within 2 times;
* 64 readers of one aggregate row together: 4 times the echo's rate. *Reads of a row* open a snapshot and read it;
  *gets of a row* (``db.get``) have a snapshot for that read alone, and need one message there and back.

*Threads on one core*: the same 64 threads, of a client that the system keeps on one of the cores (``taskset``), and
so the echo's. Threads of one interpreter run one at a time, and to hand it over to another core costs more than the
call: a read took 54 us of the client's threads on two virtual cores, and 24 us on one. The first core: the other one
serves the disk's interrupts on the machine of these figures, and commits were 13 to 16 thousand a second there, not 26
to 30. On a machine where the first one serves them the figures of commits are to be read with that in mind.

Every read is a snapshot of its own: what is read is what was committed when the call was made.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from typing import Any, Final

from bench import echo, tables
from bench.context import Context
from bench.cores import pinned
from bench.data import SLOTS, Expected, Pool
from bench.machine import sync_p50_s
from bench.peers import postgres
from bench.sheet import Figures, Ratio, Sheet, best, percentile
from bench.together import in_tasks, in_threads, run
from bench.verify import WrongTotals, each_own

__all__ = ["sheet", "take"]

TOGETHER: Final = 64
_ON_ONE: Final = "threads on one core"
_HOW: Final = ("threads", _ON_ONE, "tasks")
_COUNTER: Final = "counters"
_KEY: Final = (1,)


def _together(figures: Figures, what: str, how: str) -> float:
    return figures["kivi", f"{what}, {TOGETHER} {how}"] / figures["echo", f"{TOGETHER} {how}"]


def _alone(figures: Figures, what: str) -> float:
    return figures["kivi", f"{what}, alone, p50"] / figures["echo", "alone, p50"]


def _commit(figures: Figures) -> float:
    return figures["kivi", "commit, alone, p50"] / (figures["echo", "alone, p50"] + figures["disk", "one sync, p50"])


def sheet() -> Sheet:
    ratios = []
    for how in _HOW:
        counters = [f"one row, {clients} clients" for clients in postgres.COUNTER_CLIENTS]

        def against_postgres(figures: Figures, how: str = how, counters: list[str] = counters) -> float:
            return figures["kivi", f"commits, {TOGETHER} {how}"] / best(figures, "postgres", *counters)

        ratios += [
            Ratio(f"commits, {TOGETHER} {how}: kivi / echo", _of(_together, "commits", how), at_least=5.0),
            Ratio(f"commits, {TOGETHER} {how}: kivi / postgres, its best", against_postgres, at_least=10.0),
        ]
        ratios += [
            Ratio(f"{what}, {TOGETHER} {how}: kivi / echo", _of(_together, what, how), at_least=4.0)
            for what in ("reads of a row", "gets of a row")
        ]
    ratios += [
        Ratio("commit, alone, p50: kivi / (echo + one sync)", _commit, at_most=2.0),
        Ratio("one row, alone, p50: kivi / echo", _of(_alone, "one row"), at_most=1.6),
        Ratio(f"last {SLOTS} slots, alone, p50: kivi / echo", _of(_alone, f"last {SLOTS} slots"), at_most=2.0),
    ]
    return Sheet("goal3", "Small calls: transactions of one delta, and reads of few rows", ratios)


def _of(function: Callable[..., float], *arguments: str) -> Callable[[Figures], float]:
    return lambda figures: function(figures, *arguments)


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    with echo.served() as endpoint:
        for how, cores in _of_threads():
            with pinned(cores):
                rate = echo.threads_rate(endpoint, TOGETHER, context.seconds)
            sheet.record("echo", f"{TOGETHER} {how}", rate, "calls/s")
        sheet.record("echo", "64 tasks", echo.tasks_rate(endpoint, TOGETHER, context.seconds), "calls/s")
        sheet.record("echo", "alone, p50", percentile(echo.alone(endpoint, context.seconds), 50) * 1e6, "us")
    sheet.record("disk", "one sync, p50", sync_p50_s(context.disk) * 1e6, "us")
    _commits(context, sheet)
    _reads(context, sheet)
    postgres.counters(context, sheet)


def _of_threads() -> list[tuple[str, set[int]]]:
    """How threads are measured, and on which cores the client is then."""
    return [("threads", os.sched_getaffinity(0)), (_ON_ONE, {min(os.sched_getaffinity(0))})]


def _commits(context: Context, sheet: Sheet) -> None:
    with context.server() as server, server.connect() as db:
        import kivi

        db.create_table(_COUNTER, key={"id": "int64"}, columns={"hits": kivi.sum("int64")})
        stamps: list[int] = []

        def increment() -> None:
            with db.transaction() as tx:
                tx.delta(_COUNTER, _KEY, hits=1)
            stamps.append(tx.commit_ts)

        for _ in range(100):
            increment()
        took = _timed(increment, context.seconds)
        sheet.record("kivi", "commit, alone, p50", percentile(took, 50) * 1e6, "us", p99_us=percentile(took, 99) * 1e6)
        for how, cores in _of_threads():
            with pinned(cores):
                count, seconds = in_threads([increment] * TOGETHER, context.seconds)
            _counted(db, stamps, how)
            sheet.record("kivi", f"commits, {TOGETHER} {how}", count / seconds, "transactions/s")
        count, seconds = run(_commits_of_tasks(server, context.seconds, stamps))
        _counted(db, stamps, "tasks")
        sheet.record("kivi", f"commits, {TOGETHER} tasks", count / seconds, "transactions/s")


async def _commits_of_tasks(server: Any, seconds: float, stamps: list[int]) -> tuple[int, float]:
    import kivi.aio

    async with await kivi.aio.connect(server.endpoint, timeout=120.0) as db:

        async def increment() -> None:
            async with db.transaction() as tx:
                await tx.delta(_COUNTER, _KEY, hits=1)
            stamps.append(tx.commit_ts or 0)

        await increment()
        return await in_tasks([increment] * TOGETHER, seconds)


def _counted(db: Any, stamps: list[int], who: str) -> None:
    """The row holds as many as were acknowledged, each at a time of its own."""
    each_own(f"kivi, {TOGETHER} {who}", stamps, len(stamps))
    with db.snapshot() as snapshot:
        hits = snapshot.get(_COUNTER, _KEY)["hits"]
    if hits != len(stamps):
        raise WrongTotals(f"kivi, {TOGETHER} {who}: the row holds {hits:,}, {len(stamps):,} were acknowledged")


class _Reading:
    """What is read: a row, or the last slots, of endpoints in any order; and what the answers must be."""

    def __init__(self, expected: Expected) -> None:
        moments = zip(expected.endpoint.tolist(), expected.slot_us.tolist(), strict=True)
        sums = zip(expected.total.tolist(), expected.count.tolist(), strict=True)
        self.rows = dict(zip(moments, sums, strict=True))
        self.keys = itertools.cycle(random.Random(1).sample(list(self.rows), len(self.rows)))
        self.slots: dict[int, list[tuple[int, int]]] = {}
        for (endpoint, _), values in reversed(self.rows.items()):
            self.slots.setdefault(endpoint, []).append(values)
        self.endpoints = itertools.cycle(random.Random(1).sample(list(self.slots), len(self.slots)))

    def right(self, key: tuple[int, int], row: Any) -> None:
        if row is None or (row["total"], row["n"]) != self.rows[key]:
            raise WrongTotals(f"kivi: row {key} reads {row}, and {self.rows[key]} was sent")

    def right_slots(self, endpoint: int, rows: list[Any]) -> None:
        if [(row["total"], row["n"]) for row in rows] != self.slots[endpoint][:SLOTS]:
            raise WrongTotals(f"kivi: the last slots of {endpoint} read {rows}, not {self.slots[endpoint][:SLOTS]}")


def _reads(context: Context, sheet: Sheet) -> None:
    pool: Pool = context.pool("wide", 10_000)
    reading = _Reading(pool.expected([1] * len(pool)))
    with context.server() as server, context.loaded(server, pool) as db:

        def one_row() -> None:
            key = next(reading.keys)
            with db.snapshot() as snapshot:
                row = snapshot.get(tables.AGGREGATE, key)
            reading.right(key, row)

        def one_get() -> None:
            key = next(reading.keys)
            reading.right(key, db.get(tables.AGGREGATE, key))

        def last_slots() -> None:
            endpoint = next(reading.endpoints)
            with db.snapshot() as snapshot:
                rows = list(snapshot.scan(tables.AGGREGATE, prefix=(endpoint,), limit=SLOTS, reverse=True))
            reading.right_slots(endpoint, rows)

        for case, read in (("one row", one_row), (f"last {SLOTS} slots", last_slots)):
            _timed(read, 0.2)
            took = _timed(read, context.seconds)
            case = f"{case}, alone, p50"
            sheet.record("kivi", case, percentile(took, 50) * 1e6, "us", p99_us=percentile(took, 99) * 1e6)
        for what, read in (("reads of a row", one_row), ("gets of a row", one_get)):
            for how, cores in _of_threads():
                with pinned(cores):
                    count, seconds = in_threads([read] * TOGETHER, context.seconds)
                sheet.record("kivi", f"{what}, {TOGETHER} {how}", count / seconds, "reads/s")
            count, seconds = run(_reads_of_tasks(server, reading, what, context.seconds))
            sheet.record("kivi", f"{what}, {TOGETHER} tasks", count / seconds, "reads/s")


async def _reads_of_tasks(server: Any, reading: _Reading, what: str, seconds: float) -> tuple[int, float]:
    import kivi.aio

    async with await kivi.aio.connect(server.endpoint, timeout=120.0) as db:

        async def one_row() -> None:
            key = next(reading.keys)
            async with db.snapshot() as snapshot:
                row = await snapshot.get(tables.AGGREGATE, key)
            reading.right(key, row)

        async def one_get() -> None:
            key = next(reading.keys)
            reading.right(key, await db.get(tables.AGGREGATE, key))

        read = one_row if what == "reads of a row" else one_get
        await read()
        return await in_tasks([read] * TOGETHER, seconds)


def _timed(once: Callable[[], None], seconds: float) -> list[float]:
    """Seconds of each call, one after the other."""
    took = []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        once()
        took.append(time.perf_counter() - began)
    return took
