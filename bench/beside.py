"""What a thousand subscribers cost those who commit: the same commits with them and without, in turn.

On a server that has them itself, and on one that has a hub, a process of its own for them.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import kivi
import kivi.aio
from bench import subscribers, tables
from bench.context import Context
from bench.server import Server
from bench.sheet import Sheet
from bench.streaming import in_flight, stream
from bench.together import in_tasks, run
from bench.verify import WrongTotals, each_own

__all__ = ["CASES", "HUB", "WITH", "take"]

_SUBSCRIBERS: Final = 1_000
_INTERVAL_MS: Final = 1_000.0
WITH: Final = "1,000 subscribers"
HUB: Final = ", hub"
_BATCHES: Final = (10_000, 100_000)
_TASKS: Final = 64
_TRANSACTIONS: Final = f"transactions of one delta, {_TASKS} tasks"
CASES: Final = (*(f"append stream, {rows:,}" for rows in _BATCHES), _TRANSACTIONS)
_COUNTER: Final = "counters"
_TURNS: Final = 3  # with and without, alternately
_PATIENCE_S: Final = 60.0


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    for hub in ("", HUB):
        for rows in _BATCHES:
            _appends(context, sheet, rows, hub)
        _transactions(context, sheet, hub)


@contextlib.contextmanager
def _server(context: Context, hub: str) -> Iterator[tuple[Server, Any]]:
    with context.server(*(["--hub", "localhost:0"] if hub else [])) as server, server.connect() as db:
        while hub and not db.stats()["hub_listens"]:
            time.sleep(0.1)
        yield server, db


def _appends(context: Context, sheet: Sheet, rows: int, hub: str) -> None:
    """Each subscriber follows the rows of one of the first thousand endpoints, the busiest ones."""
    pool = context.pool("wide", rows)
    with _server(context, hub) as (server, db):
        tables.create(db)
        sent = [0] * len(pool)

        def measured() -> float:
            done = stream(db, tables.EVENTS, pool.batches, in_flight(rows), context.seconds)
            sent[:] = [a + b for a, b in zip(sent, done.sent, strict=True)]
            return done.rate

        measured()  # the rows exist, and what is compiled, mapped or allocated once is
        order = subscribers.Order(server.endpoint, tables.AGGREGATE, "n", _INTERVAL_MS, _INTERVAL_MS)
        name = f"append stream, {rows:,}{hub}"
        _in_turn(sheet, name, "events/s", server, order, range(_SUBSCRIBERS), measured, lambda: _rows(db, pool))
        tables.check(db, pool.expected(sent), f"kivi, {name}")


def _rows(db: Any, pool: Any) -> list[list[int]]:
    """What each subscriber must have at the end."""
    held = tables.held(db)
    found: list[list[int]] = [[] for _ in range(_SUBSCRIBERS)]
    ordered = held.sort_by([("endpoint_id", "ascending"), ("slot", "ascending")])
    for endpoint, n in zip(ordered["endpoint_id"].to_pylist(), ordered["n"].to_pylist(), strict=True):
        if endpoint < _SUBSCRIBERS:
            found[endpoint].append(n)
    return found


def _transactions(context: Context, sheet: Sheet, hub: str) -> None:
    """All follow the hot row: a state a second of a row that changes thousands of times a second."""
    with _server(context, hub) as (server, db):
        db.create_table(_COUNTER, key={"id": "int64"}, columns={"hits": kivi.sum("int64")})
        stamps: list[int] = []

        def measured() -> float:
            count, seconds = run(_increments(server, context.seconds, stamps))
            return count / seconds

        def rows() -> list[list[int]]:
            with db.snapshot() as snapshot:
                hits = snapshot.get(_COUNTER, (1,))["hits"]
            return [[hits]] * _SUBSCRIBERS

        measured()
        order = subscribers.Order(server.endpoint, _COUNTER, "hits", _INTERVAL_MS, _INTERVAL_MS)
        of_one = itertools.repeat(1, _SUBSCRIBERS)
        _in_turn(sheet, f"{_TRANSACTIONS}{hub}", "transactions/s", server, order, of_one, measured, rows)
        each_own(f"kivi, {_TRANSACTIONS}", stamps, len(stamps))
        if rows()[0] != [len(stamps)]:
            raise WrongTotals(f"kivi: the row holds {rows()[0]}, and {len(stamps):,} were acknowledged")


async def _increments(server: Server, seconds: float, stamps: list[int]) -> tuple[int, float]:
    async with await kivi.aio.connect(server.endpoint, timeout=120.0) as db:

        async def increment() -> None:
            async with db.transaction() as tx:
                await tx.delta(_COUNTER, (1,), hits=1)
            stamps.append(tx.commit_ts or 0)

        await increment()
        return await in_tasks([increment] * _TASKS, seconds)


def _in_turn(
    sheet: Sheet,
    name: str,
    unit: str,
    server: Server,
    order: subscribers.Order,
    prefixes: Any,
    measured: Callable[[], float],
    right: Callable[[], list[list[int]]],
) -> None:
    prefixes = list(prefixes)
    alone, beside, told, cpu = [], [], [], dict[str, list[float]]({"alone": [], WITH: []})

    def timed(what: str) -> tuple[float, float]:
        """The rate, and how long it took."""
        before, began = server.cpu_s, time.monotonic()
        rate = measured()
        took = time.monotonic() - began
        cpu[what].append((server.cpu_s - before) / (rate * took) * 1e6)
        return rate, took

    with subscribers.started(order) as crowd:
        for _ in range(_TURNS):
            alone.append(timed("alone")[0])
            crowd.prefixes(prefixes)
            crowd.told()
            rate, took_s = timed(WITH)
            beside.append(rate)
            told.append(_verified(crowd, name, took_s, right) / took_s)
            crowd.keep(0)
    sheet.record("kivi", f"{name}, alone", statistics.median(alone), unit, turns=alone)
    sheet.record("kivi", f"{name}, {WITH}", statistics.median(beside), unit, turns=beside)
    sheet.record("kivi", f"{name}, {WITH}, told", statistics.median(told), "states/s")
    for what, found in cpu.items():
        sheet.record("kivi", f"{name}, {what}, processor time of who commits", statistics.median(found), "us each")


def _verified(crowd: subscribers.Subscribers, name: str, took_s: float, right: Callable[[], list[list[int]]]) -> int:
    """How many states they were told. Raises WrongTotals: too often, or another state than there is at the end."""
    updates = crowd.told().update_number
    often, most = max(Counter(updates).values(), default=0), int(took_s * 1e3 / _INTERVAL_MS) + 2
    if often > most:
        raise WrongTotals(
            f"{name}: a subscriber was told {often} states in {took_s:.1f} s, at most {most} was asked for"
        )
    wanted, until = right(), time.monotonic() + _PATIENCE_S
    while (states := crowd.states()) != wanted:
        if time.monotonic() > until:
            wrong = sum(a != b for a, b in zip(states, wanted, strict=True))
            raise WrongTotals(f"{name}: {wrong:,} of {len(states):,} subscribers have another state than there is")
        time.sleep(0.2)
    return len(updates)
