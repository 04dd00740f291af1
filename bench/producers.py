"""Goal 2: insert one event and add it to its aggregate row, one transaction each, every acknowledgement durable.

32 producers, threads or tasks of one program, share one appender with ``each``, and each of them has up to 1,000 events
in flight: up to 32,000 outstanding. A producer calls ``Appender.append`` with one event at a time and asks every single
future for its commit timestamp: 500 events are appended while the 500 before them are on their way. Events are dicts of
Python values that exist before the clock starts.

PostgreSQL does the same by its row trigger (``peers.postgres``): with 1, 8, 32 and 64 clients that have one transaction
outstanding each, and with pipelines of 10 and of 100 transactions a client, by pgbench and by psycopg. So it has up to
6,400 outstanding. Pipelines of 400 were tried, and gained it nothing: the row that all events are added to is locked
until the commit before is on disk, and on WIDE 32 clients without pipelines keep both cores busy.

*One transaction* is the same on both sides: the event's row and what it adds to its aggregate row, whole or not at all,
durable when it is acknowledged, and in a place of its own in the order of commits. That is counted on both sides before
a rate counts: as many distinct commit timestamps at kivi, and transaction ids at PostgreSQL, as events. And kivi is
read back at a sample of its timestamps, in a pass of its own on an aggregate with history (``_prefixes``): each of them
must hold exactly the events up to it, and what these add up to.

Wanted: on the hot row 97 times the row trigger with 32 clients, the headline of the paper, and 60 times PostgreSQL's
best of all of the above; on WIDE 30 times its best. With threads and with tasks.

The rows *one transaction per batch* are the same producers where whatever has gathered commits as one transaction, up
to 10,000 events of it: what it costs that each event is a transaction. No bar hangs on them.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bench import tables
from bench.context import Context
from bench.data import Pool
from bench.peers import postgres
from bench.sheet import Figures, Ratio, Sheet, best
from bench.together import in_tasks, in_threads, run
from bench.verify import WrongTotals, each_own

__all__ = ["sheet", "take"]

PRODUCERS: Final = 32
IN_FLIGHT: Final = 1_000  # events of one producer
_PART: Final = IN_FLIGHT // 2
_PARTS: Final = 20  # of one producer; sent in turn
_PREFIXES_S: Final = 0.1  # as every timestamp of them can be read at, and some are
_HOW: Final = ("threads", "tasks")
_BEST_AT_LEAST: Final = {"hot": 60.0, "wide": 30.0}

Event = dict[str, Any]


def sheet() -> Sheet:
    ratios = []
    for kind, how in itertools.product(_BEST_AT_LEAST, _HOW):
        case, singles = _case(kind, how), postgres.singles_of(kind)

        def against_32(figures: Figures, case: str = case, kind: str = kind) -> float:
            return figures["kivi", case] / figures["postgres", f"{kind}, row trigger, 32 clients"]

        def against_best(figures: Figures, case: str = case, singles: list[str] = singles) -> float:
            return figures["kivi", case] / best(figures, "postgres", *singles)

        of_paper = 97.0 if kind == "hot" else None
        ratios.append(Ratio(f"{case}: kivi / postgres, row trigger, 32 clients", against_32, at_least=of_paper))
        ratios.append(
            Ratio(f"{case}: kivi / postgres, row trigger, its best", against_best, at_least=_BEST_AT_LEAST[kind])
        )
    return Sheet(
        "goal2", "One event, one transaction: insert it and add it to its aggregate row, events a second", ratios
    )


def _case(kind: str, how: str, each: bool = True) -> str:
    case = f"{kind}, {PRODUCERS} {how} x {IN_FLIGHT:,}"
    return case if each else f"{case}, one transaction per batch"


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    for kind in _BEST_AT_LEAST:
        pool = context.pool(kind, PRODUCERS * _PARTS * _PART)
        with _prepared(pool) as producers:
            for how in _HOW:
                _prefixes(context, pool, producers, kind, how)
                _measure(context, sheet, pool, producers, kind, how, each=True)
            for how in _HOW if kind == "hot" else ():
                _measure(context, sheet, pool, producers, kind, how, each=False)
        postgres.singles(context, sheet, kind)


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


@contextmanager
def _prepared(pool: Pool) -> Iterator[list[_Producer]]:
    """The first batch of the pool as events of each producer, in parts."""
    columns = (pool.endpoint.tolist(), pool.ts_us.tolist(), pool.resp_us.tolist())
    names = ("endpoint_id", "ts", "resp_time_us")
    events = iter([dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)])
    parts = [[list(itertools.islice(events, _PART)) for _ in range(_PARTS)] for _ in range(PRODUCERS)]
    gc.collect()
    gc.freeze()  # a program that makes its events as it goes would not carry all of them through each collection
    try:
        yield [_Producer(of_one) for of_one in parts]
    finally:
        gc.unfreeze()


def _measure(
    context: Context, sheet: Sheet, pool: Pool, producers: list[_Producer], kind: str, how: str, *, each: bool
) -> None:
    with context.server() as server, server.connect() as db:
        tables.create(db)
        seconds = _sent(server, db, producers, how, context.seconds, each=each)
        events = _check(db, pool, producers, f"kivi, {_case(kind, how, each)}", each=each)
        commits = len(np.unique(_stamps(producers)))
        sheet.record(
            "kivi",
            _case(kind, how, each),
            events / seconds,
            "events/s",
            events=events,
            events_per_commit=events / commits,
            outstanding=PRODUCERS * IN_FLIGHT,
        )


def _prefixes(context: Context, pool: Pool, producers: list[_Producer], kind: str, how: str) -> None:
    """Sends some events to an aggregate with history, and reads it and them at a sample of their timestamps."""
    who = f"kivi, {_case(kind, how)}, with history"
    with context.server() as server, server.connect() as db:
        tables.create(db, history="1d")
        _sent(server, db, producers, how, _PREFIXES_S, each=True)
        _check(db, pool, producers, who, each=True)
        stamps, events = _stamps(producers), np.concatenate([_places(i, each) for i, each in enumerate(producers)])
        order = np.argsort(stamps)
        tables.check_prefixes(db, pool.taken(events[order]), stamps[order], who)


def _stamps(producers: list[_Producer]) -> Any:
    """All commit timestamps that futures were resolved with: of each producer in the order of its events."""
    return np.fromiter(itertools.chain.from_iterable(c for p in producers for c in p.commits), np.int64)


def _places(i: int, producer: _Producer) -> Any:
    """Which event of the pool each event is that producer ``i`` appended, in order."""
    turns = np.arange(sum(producer.sent))
    starts = (i * _PARTS + turns % _PARTS) * _PART
    return (starts[:, None] + np.arange(_PART)).ravel()


def _sent(server: Any, db: Any, producers: list[_Producer], how: str, seconds: float, *, each: bool) -> float:
    """All producers send for so long; the seconds until the last of their events was acknowledged."""
    for producer in producers:
        producer.begin()
    return (
        _threads(db, producers, seconds, each)
        if how == "threads"
        else run(_tasks(server.endpoint, producers, seconds, each))
    )


def _threads(db: Any, producers: list[_Producer], seconds: float, each: bool) -> float:
    with db.appender(tables.EVENTS, each=each) as appender:
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


async def _tasks(endpoint: str, producers: list[_Producer], seconds: float, each: bool) -> float:
    import kivi.aio

    async with (
        await kivi.aio.connect(endpoint, timeout=120.0) as db,
        db.appender(tables.EVENTS, each=each) as appender,
    ):
        append = appender.append

        def job(producer: _Producer) -> Any:
            async def once() -> None:
                flying = [append(**event) for event in producer.next()]
                producer.commits.append([await future for future in producer.flying])
                producer.flying = flying

            return once

        began = time.perf_counter()
        await in_tasks([job(producer) for producer in producers], seconds)
        for producer in producers:
            producer.commits.append([await future for future in producer.flying])
        return time.perf_counter() - began


def _check(db: Any, pool: Pool, producers: list[_Producer], who: str, *, each: bool) -> int:
    """The events that were acknowledged. Raises WrongTotals: a future without a commit, sums that differ, or with
    ``each`` two events of one timestamp."""
    sent = sum(sum(producer.sent) for producer in producers) * _PART
    stamps = _stamps(producers)
    if len(stamps) != sent or stamps.min() <= 0:
        raise WrongTotals(f"{who}: {sent:,} events, {(stamps > 0).sum():,} futures with a commit timestamp")
    if each:
        each_own(who, stamps, sent)
    times = [n for producer in producers for n in producer.sent]
    used = slice(len(times) * _PART)  # the pool may go on
    parts = Pool(pool.name, _PART, pool.endpoint[used], pool.ts_us[used], pool.resp_us[used])
    tables.check(db, parts.expected(times), who)
    return sent
