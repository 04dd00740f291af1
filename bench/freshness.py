"""Goal 19: what it is worth that an answer may be old, beside an append stream on one server.

Each with a bound of 0, 1, 5 and 15 seconds and without any, in turn: an endpoint's last 12 slots by one thread, and a
rollup of an hour of all endpoints to one row a slot by another. Wanted: 5 s halve the 99th percentile.

How *old* an answer is: for how long the first commit that it lacks had been acknowledged when it was asked for. Before
a figure is believed, no answer is older than its bound, none without a bound is old at all, and every row of the
aggregate is as sent.
"""

from __future__ import annotations

import random
import threading
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from bench import tables
from bench.context import Context
from bench.data import ENDPOINTS, SLOTS
from bench.sheet import Figures, Ratio, Sheet, percentile
from bench.streaming import Streamed, in_flight, stream
from bench.verify import WrongTotals

__all__ = ["sheet", "take"]

_ROWS: Final = 100_000
_SECONDS: Final = 4  # times ``seconds``
_NEWEST: Final = "newest"
_BOUNDS: Final = {_NEWEST: 0.0, "0s": 0.0, "1s": 1.0, "5s": 5.0, "15s": 15.0}  # in seconds


@dataclass(frozen=True, slots=True)
class _Read:
    """``ts``: the commit timestamp of its snapshot. Times are of CLOCK_MONOTONIC."""

    began_s: float
    took_s: float
    ts: int


def sheet() -> Sheet:
    def halved(what: str) -> Callable[[Figures], float]:
        return lambda figures: figures["kivi", f"{what}, 5s, p99"] / figures["kivi", f"{what}, {_NEWEST}, p99"]

    return Sheet(
        "goal19",
        "What it is worth that an answer may be old",
        [Ratio(f"{what} that may be 5 s old / newest, p99", halved(what), at_most=0.5) for what in _READS],
    )


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    pool = context.pool("wide", _ROWS)
    reads: dict[tuple[str, str], list[_Read]] = {(what, bound): [] for what in _READS for bound in _BOUNDS}
    with context.server() as server, server.connect() as db, server.connect() as reader:
        tables.create(db)
        ended, failures = threading.Event(), list[BaseException]()

        def read(what: str) -> None:
            endpoints = random.Random(1)
            try:
                while not ended.is_set():
                    for bound in _BOUNDS:
                        allowed = {} if bound == _NEWEST else {"max_staleness": bound}
                        began = time.monotonic()
                        with reader.snapshot(**allowed) as snapshot:
                            _READS[what](snapshot, endpoints.randrange(ENDPOINTS))
                            reads[what, bound].append(_Read(began, time.monotonic() - began, snapshot.ts))
            except BaseException as error:
                failures.append(error)

        reading = [threading.Thread(target=read, args=(what,)) for what in _READS]
        for thread in reading:
            thread.start()
        try:
            done = stream(db, tables.EVENTS, pool.batches, in_flight(_ROWS), _SECONDS * context.seconds)
        finally:
            ended.set()
            for thread in reading:
                thread.join()
        if failures:
            raise failures[0]
        tables.check(db, pool.expected(done.sent), "kivi, reads beside")
    sheet.record("kivi", "append stream", done.rate, "events/s")
    for (what, bound), each in reads.items():
        taken = [read for read in each if done.began_s <= read.began_s <= done.at_s[-1]]
        old = _ages(taken, done)
        if (worst := max(old)) > _BOUNDS[bound]:
            raise WrongTotals(f"kivi: one of the {what} with a bound of {bound} was {worst:.3f} s old")
        for name, percent in (("p50", 50), ("p99", 99)):
            took = percentile([read.took_s for read in taken], percent)
            sheet.record("kivi", f"{what}, {bound}, {name}", took * 1e3, "ms", reads=len(taken))
        sheet.record("kivi", f"{what}, {bound}: old, at most", worst, "s")
    for what in _READS:
        sheet.series[-1][what] = _by_second({bound: reads[what, bound] for bound in _BOUNDS}, done)


def _last_slots(snapshot: Any, endpoint: int) -> None:
    list(snapshot.scan(tables.AGGREGATE, prefix=(endpoint,), limit=SLOTS, reverse=True))


def _rollup(snapshot: Any, endpoint: int) -> None:
    snapshot.rollup(tables.AGGREGATE, step="5m", last="1h").to_arrow()


_READS: Final[dict[str, Callable[[Any, int], None]]] = {"12 slots": _last_slots, "rollups": _rollup}


def _ages(reads: list[_Read], done: Streamed) -> list[float]:
    """Of each answer, in seconds; 0 where it has everything that had been acknowledged when it was asked for."""
    commits = sorted(done.commits)
    stamps = [ts for ts, _ in commits]
    told, first = [0.0] * len(commits), float("inf")  # the earliest of this commit and those above it
    for i in range(len(commits) - 1, -1, -1):
        told[i] = first = min(first, commits[i][1])
    ages = []
    for read in reads:
        lacks = bisect_right(stamps, read.ts)
        ages.append(max(0.0, read.began_s - told[lacks]) if lacks < len(commits) else 0.0)
    return ages


def _by_second(reads: dict[str, list[_Read]], done: Streamed) -> dict[str, list[float]]:
    """Every whole second of the stream in which each bound has a read: the 99th percentiles, and the oldest answers."""
    events = Counter(int(at - done.began_s) for at in done.at_s)
    took: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    old: defaultdict[tuple[str, int], float] = defaultdict(float)
    for bound, taken in reads.items():
        for read, age in zip(taken, _ages(taken, done), strict=True):
            second = int((read.began_s - done.began_s) // 1)
            took[bound, second].append(read.took_s)
            old[bound, second] = max(old[bound, second], age)
    whole = [s for s in range(int(done.at_s[-1] - done.began_s)) if all((bound, s) in took for bound in reads)]
    return {
        "second": [float(second) for second in whole],
        "events": [float(events[second] * _ROWS) for second in whole],
        **{f"{bound}_p50_ms": [percentile(took[bound, s], 50) * 1e3 for s in whole] for bound in reads},
        **{f"{bound}_p99_ms": [percentile(took[bound, s], 99) * 1e3 for s in whole] for bound in reads},
        **{f"{bound}_old_s": [old[bound, s] for s in whole] for bound in reads},
    }
