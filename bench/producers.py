"""Goal 2: one event per acknowledgement. 32 producers, each with up to 1,000 events in flight, on one hot row.

A producer calls ``Appender.append`` with one event at a time and asks every single future for its commit timestamp: 500
events are appended while the 500 before them are on their way. Events are dicts of Python values that exist before the
clock starts; all producers share one appender, as the threads or tasks of one program would.

Wanted: 97 times PostgreSQL's row trigger with 32 clients, the headline of the paper. The ratio to PostgreSQL's best
number of clients is shown beside it.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bench import tables
from bench.context import Context
from bench.data import Pool
from bench.peers import postgres
from bench.sheet import Figures, Ratio, Sheet, best
from bench.together import in_tasks, in_threads, run
from bench.verify import WrongTotals

__all__ = ["sheet", "take"]

PRODUCERS: Final = 32
IN_FLIGHT: Final = 1_000  # events of one producer
_PART: Final = IN_FLIGHT // 2
_PARTS: Final = 20  # of one producer; sent in turn
_HOW: Final = ("threads", "tasks")

Event = dict[str, Any]


def sheet() -> Sheet:
    singles = [f"hot, row trigger, {clients} clients" for clients in postgres.SINGLE_CLIENTS]
    ratios = []
    for how in _HOW:

        def against_32(figures: Figures, how: str = how) -> float:
            return figures["kivi", _case(how)] / figures["postgres", singles[postgres.SINGLE_CLIENTS.index(32)]]

        def against_best(figures: Figures, how: str = how) -> float:
            return figures["kivi", _case(how)] / best(figures, "postgres", *singles)

        ratios.append(Ratio(f"{_case(how)}: kivi / postgres, row trigger, 32 clients", against_32, at_least=97.0))
        ratios.append(Ratio(f"{_case(how)}: kivi / postgres, row trigger, its best", against_best))
    return Sheet("goal2", "One event per acknowledgement, events a second", ratios)


def _case(how: str) -> str:
    return f"hot, {PRODUCERS} {how}"


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    pool = context.pool("hot", PRODUCERS * _PARTS * _PART)
    producers = [_Producer(parts) for parts in _prepared(pool)]
    gc.collect()
    gc.freeze()  # a program that makes its events as it goes would not carry all of them through each collection
    try:
        for how in _HOW:
            _measure(context, sheet, pool, producers, how)
    finally:
        gc.unfreeze()
    postgres.singles(context, sheet, "hot")


@dataclass
class _Producer:
    """Parts of 500 events that it appends in turn, and the commit timestamps its futures were resolved with."""

    parts: Sequence[Sequence[Event]]

    def begin(self) -> None:
        self.commits: list[list[int]] = []
        self.turn = itertools.cycle(range(len(self.parts)))
        self.sent = [0] * len(self.parts)
        self.flying: list[Any] = []

    def next(self) -> Sequence[Event]:
        i = next(self.turn)
        self.sent[i] += 1
        return self.parts[i]


def _prepared(pool: Pool) -> list[list[list[Event]]]:
    """The first batch of the pool as events of each producer, in parts."""
    columns = (pool.endpoint.tolist(), pool.ts_us.tolist(), pool.resp_us.tolist())
    names = ("endpoint_id", "ts", "resp_time_us")
    events = iter([dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)])
    return [[list(itertools.islice(events, _PART)) for _ in range(_PARTS)] for _ in range(PRODUCERS)]


def _measure(context: Context, sheet: Sheet, pool: Pool, producers: list[_Producer], how: str) -> None:
    with context.server() as server, server.connect() as db:
        tables.create(db)
        for producer in producers:
            producer.begin()
        seconds = _threads(db, producers, context.seconds) if how == "threads" else _tasks(server, producers, context)
        events = _check(db, pool, producers, f"kivi, {_case(how)}")
        commits = len(np.unique(np.concatenate([c for p in producers for c in p.commits])))
        sheet.record(
            "kivi", _case(how), events / seconds, "events/s", events=events, events_per_commit=events / commits
        )


def _threads(db: Any, producers: list[_Producer], seconds: float) -> float:
    with db.appender(tables.EVENTS) as appender:
        append = appender.append

        def job(producer: _Producer) -> Any:
            def once() -> None:
                flying = [append(**event) for event in producer.next()]
                producer.commits.append([future.result() for future in producer.flying])
                producer.flying = flying

            return once

        began = time.perf_counter()
        in_threads([job(producer) for producer in producers], seconds)
        for producer in producers:
            producer.commits.append([future.result() for future in producer.flying])
        return time.perf_counter() - began


def _tasks(server: Any, producers: list[_Producer], context: Context) -> float:
    import kivi.aio

    async def measured() -> float:
        async with (
            await kivi.aio.connect(server.endpoint, timeout=120.0) as db,
            db.appender(tables.EVENTS) as appender,
        ):
            append = appender.append

            def job(producer: _Producer) -> Any:
                async def once() -> None:
                    flying = [append(**event) for event in producer.next()]
                    producer.commits.append([await future for future in producer.flying])
                    producer.flying = flying

                return once

            began = time.perf_counter()
            await in_tasks([job(producer) for producer in producers], context.seconds)
            for producer in producers:
                producer.commits.append([await future for future in producer.flying])
            return time.perf_counter() - began

    return run(measured())


def _check(db: Any, pool: Pool, producers: list[_Producer], who: str) -> int:
    """The events that were acknowledged. Raises WrongTotals: a future without a commit, or sums that differ."""
    sent = sum(sum(producer.sent) for producer in producers) * _PART
    answered = np.fromiter(itertools.chain.from_iterable(c for p in producers for c in p.commits), np.int64)
    if len(answered) != sent or answered.min() <= 0:
        raise WrongTotals(f"{who}: {sent:,} events, {(answered > 0).sum():,} futures with a commit timestamp")
    times = [n for producer in producers for n in producer.sent]
    used = slice(len(times) * _PART)  # the pool may go on
    parts = Pool(pool.name, _PART, pool.endpoint[used], pool.ts_us[used], pool.resp_us[used])
    tables.check(db, parts.expected(times), who)
    return sent
