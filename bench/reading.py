"""Goal 4: what a reader waits for while the append stream runs at full speed, second by second.

The stream is a process of its own (``appending``); this one reads the last 12 slots of one endpoint after the other, in
one thread, each from a snapshot of its own. Three processes share the cores, as they would on such a machine.

Wanted: a p99 under 10 ms, and the worst second within 3 times the median second (of each second's p99). Every read is
checked against the reads before it: what one endpoint has counted never goes back.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, defaultdict
from typing import Any, Final

from bench import tables
from bench.appending import Order, started
from bench.context import Context
from bench.data import ENDPOINTS, SLOTS
from bench.sheet import Figures, Ratio, Sheet, percentile
from bench.streaming import Streamed
from bench.verify import WrongTotals

__all__ = ["sheet", "take"]

BATCHES: Final = (100_000, 10_000)
_FACTOR: Final = 12  # longer than a rate is measured elsewhere: a minute, by default


def sheet() -> Sheet:
    ratios = []
    for rows in BATCHES:

        def p99(figures: Figures, rows: int = rows) -> float:
            return figures["kivi", f"read, p99, {rows:,}"]

        def waves(figures: Figures, rows: int = rows) -> float:
            return (
                figures["kivi", f"read, p99 of the worst second, {rows:,}"]
                / figures["kivi", f"read, p99 of the median second, {rows:,}"]
            )

        ratios.append(Ratio(f"batches of {rows:,}: read, p99 in ms", p99, at_most=10.0))
        ratios.append(Ratio(f"batches of {rows:,}: read, p99, worst second / median second", waves, at_most=3.0))
    return Sheet("goal4", f"The last {SLOTS} slots of an endpoint, read while the append stream runs", ratios)


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    for rows in BATCHES:
        _measure(context, sheet, rows)


def _measure(context: Context, sheet: Sheet, rows: int) -> None:
    pool = context.pool("wide", rows)
    with context.server() as server, server.connect() as db:
        tables.create(db)
        order = Order(server.endpoint, pool.name, rows, context.pool_events, seconds=_FACTOR * context.seconds)
        with started(order) as appending:
            reads = _reads(db, appending.running)
            done = appending.streamed()
        tables.settled_s(db)
        tables.check(db, pool.expected(done.sent), "kivi")
    seconds = _by_second(reads, done, rows)
    if not seconds:
        raise RuntimeError("not one whole second was measured")
    p99s, rates = [second["p99_ms"] for second in seconds], [second["events"] for second in seconds]
    inside = [took for at, took in reads if done.began_s <= at <= done.at_s[-1]]
    record = sheet.record
    record("kivi", f"append stream, {rows:,}", done.rate, "events/s")
    record("kivi", f"append stream, worst second, {rows:,}", min(rates), "events/s")
    record("kivi", f"reads, {rows:,}", len(inside) / (done.at_s[-1] - done.began_s), "reads/s")
    record("kivi", f"read, p50, {rows:,}", percentile(inside, 50) * 1e3, "ms")
    record("kivi", f"read, p99, {rows:,}", percentile(inside, 99) * 1e3, "ms", worst_ms=max(inside) * 1e3)
    record("kivi", f"read, p99 of the median second, {rows:,}", statistics.median(p99s), "ms")
    record("kivi", f"read, p99 of the worst second, {rows:,}", max(p99s), "ms")
    sheet.series[-1][f"batches of {rows:,}"] = {
        name: [second[name] for second in seconds] for name in ("second", "events", "reads", "p50_ms", "p99_ms")
    }


def _reads(db: Any, running: Any) -> list[tuple[float, float]]:
    """(when it began, how long it took, both in seconds) of each read until the stream ends."""
    reads: list[tuple[float, float]] = []
    seen: Counter[int] = Counter()
    endpoints = random.Random(1)
    while running():
        endpoint = endpoints.randrange(ENDPOINTS)
        began = time.monotonic()
        with db.snapshot() as snapshot:
            rows = list(snapshot.scan(tables.AGGREGATE, prefix=(endpoint,), limit=SLOTS, reverse=True))
        reads.append((began, time.monotonic() - began))
        count = sum(row["n"] for row in rows)
        if count < seen[endpoint]:
            raise WrongTotals(f"kivi: endpoint {endpoint} had counted {seen[endpoint]:,}, and now {count:,}")
        seen[endpoint] = count
    return reads


def _by_second(reads: list[tuple[float, float]], done: Streamed, rows: int) -> list[dict[str, float]]:
    """Every whole second of the stream that has a read in it."""
    began = done.began_s
    events = Counter(int(at - began) for at in done.at_s)
    took: defaultdict[int, list[float]] = defaultdict(list)
    for at, seconds in reads:
        took[int((at - began) // 1)].append(seconds)
    return [
        {
            "second": second,
            "events": events[second] * rows,
            "reads": len(took[second]),
            "p50_ms": percentile(took[second], 50) * 1e3,
            "p99_ms": percentile(took[second], 99) * 1e3,
        }
        for second in range(int(done.at_s[-1] - began))
        if took[second]
    ]
