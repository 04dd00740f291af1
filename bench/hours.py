"""Goal 14: what readers and writers wait for, second by second, while nothing is at rest, and when all comes at once.

*A steady hour*: 500,000 events a second, 5 % of them late by a minute on average, in a table and an aggregate of half
minutes that both keep ten minutes. So events settle, files are combined, floors move, rows are erased and their space
is given back, all the while. Of each second: the 99th percentile of a read of an endpoint's last 12 slots, and of an
append of 50,000 events, from when it was due. Wanted: the worst second within 15 times the median one, and the last
third of the hour as the first.

*An hour of trouble*, twice: a third of it steady, a sixth at the full rate, of whose second half 15 % are late, then a
valley of 50,000 a second. The second time somebody asks SQL questions about all events throughout, one after the other.
Wanted: the full rate keeps 0.7, reads take at most 3 times as long, and a minute into the valley either is as it was at
the beginning.

Before a figure is believed, every slot from the floor on has the count and the sum of the events that were sent.

An hour is 720 times ``--seconds``: 3,600 s by default.
"""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import kivi
from bench.context import Context
from bench.data import ENDPOINTS, SLOTS, Totals
from bench.paced import BATCH, Course, Phase, Ran, course
from bench.server import Server, disk_bytes
from bench.sheet import Figures, Ratio, Sheet, percentile
from bench.verify import WrongTotals, same

__all__ = ["sheet", "take"]

EVENTS: Final = "events"
AGGREGATE: Final = "endpoint_30s"
_SLOT_US: Final = 30_000_000
_RETENTION: Final = "10m"
_RATE: Final = 500_000.0
_VALLEY: Final = 50_000.0
_LATE, _TROUBLED_LATE = 0.05, 0.15
_HOUR: Final = 720  # times ``seconds``
_QUICK_S: Final = 12.0
_SAMPLE_S: Final = 1.0
_CALMED: Final = 60 / 3600  # of the hour, into the valley
_QUESTION: Final = f"""
    select endpoint_id % 100 as g, count(*) as n, sum(resp_time_us) as total, quantile_cont(resp_time_us, 0.99) as p99
    from {EVENTS} group by all
"""
_STEADY, _ALONE, _ASKED = "a steady hour", "trouble", "trouble, and SQL"

Timed = tuple[float, float]


def sheet() -> Sheet:
    def over(case: str, of: str, than: str) -> Callable[[Figures], float]:
        return lambda figures: figures["kivi", f"{case}: {of}"] / figures["kivi", f"{case}: {than}"]

    def beside(of: str) -> Callable[[Figures], float]:
        return lambda figures: figures["kivi", f"{_ASKED}: {of}"] / figures["kivi", f"{_ALONE}: {of}"]

    ratios = []
    for what in ("reads", "appends"):
        worst = over(_STEADY, f"{what}, p99, worst second", f"{what}, p99, median second")
        ratios.append(Ratio(f"{_STEADY}: {what}, p99, worst second / median second", worst, at_most=15.0))
        trend = over(_STEADY, f"{what}, p99, last third", f"{what}, p99, first third")
        ratios.append(Ratio(f"{_STEADY}: {what}, p99, last third / first third", trend, at_most=1.25))
    ratios.append(Ratio("the full rate with SQL / without", beside("rate, burst"), at_least=0.7))
    ratios.append(Ratio("reads, p99, with SQL / without", beside("reads, p99"), at_most=3.0))
    for case in (_ALONE, _ASKED):
        calm = over(case, "reads, p99, after a minute of valley", "reads, p99, before the burst")
        ratios.append(Ratio(f"{case}: reads, p99, a minute into the valley / before", calm, at_most=1.5))
    return Sheet("goal14", "Hours: a steady one, and one of trouble", ratios)


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    hour = _QUICK_S if context.quick else _HOUR * context.seconds
    _hour(context, sheet, _STEADY, [Phase(hour, _RATE, _LATE)])
    trouble = [
        Phase(hour / 3, _RATE, _LATE),
        Phase(hour / 12, None, _LATE),
        Phase(hour / 12, None, _TROUBLED_LATE),
        Phase(hour / 2, _VALLEY, _LATE),
    ]
    _hour(context, sheet, _ALONE, trouble)
    _hour(context, sheet, _ASKED, trouble, asked=True)


def _hour(context: Context, sheet: Sheet, case: str, phases: list[Phase], *, asked: bool = False) -> None:
    with context.server() as server, server.connect() as db:
        _create(db)
        with (
            course(Course(server.endpoint, EVENTS, _SLOT_US, phases)) as appending,
            _looked_at(server) as samples,
            _questions(server, asked) as took,
        ):
            reads = _reads(db, appending.running)
            ran = appending.streamed()
        db.consolidate()
        _check(db, ran, case)
    seconds = _by_second(ran, reads)
    record = sheet.record
    for what in ("reads", "appends"):
        p99s = [second[f"{what}_p99_ms"] for second in seconds]
        record("kivi", f"{case}: {what}, p99, median second", statistics.median(p99s), "ms")
        record("kivi", f"{case}: {what}, p99, worst second", max(p99s), "ms")
        third = len(p99s) // 3
        record("kivi", f"{case}: {what}, p99, first third", statistics.median(p99s[:third]), "ms")
        record("kivi", f"{case}: {what}, p99, last third", statistics.median(p99s[-third:]), "ms")
    record("kivi", f"{case}: reads, p99", percentile([t for _, t in reads], 99) * 1e3, "ms", reads=len(reads))
    for name, most in (("unsettled", "events"), ("depth", "files"), ("rss_gib", "GiB"), ("disk_gib", "GiB")):
        record("kivi", f"{case}: {name}, at most", max(sample[name] for sample in samples), most)
    if len(phases) > 1:
        _phases(sheet, case, ran, reads, phases)
    if asked:
        record("kivi", f"{case}: a question", statistics.median(took), "s", questions=len(took))
    sheet.series[-1][case] = {name: [second[name] for second in seconds] for name in seconds[0]} | {
        name: [sample[name] for sample in samples] for name in samples[0]
    }


def _phases(sheet: Sheet, case: str, ran: Ran, reads: list[Timed], phases: list[Phase]) -> None:
    calm, burst, _, valley = (phase.seconds for phase in phases)
    begins = ran.began_s + calm
    ends = begins + 2 * burst
    appended = sum(begins <= due + took < ends for due, took in ran.appends) * BATCH
    sheet.record("kivi", f"{case}: rate, burst", appended / (2 * burst), "events/s")
    after = ends + sum(phase.seconds for phase in phases) * _CALMED
    for name, low, high in (
        ("before the burst", ran.began_s, begins),
        ("in the burst", begins, ends),
        ("after a minute of valley", after, ends + valley),
    ):
        inside = [took for at, took in reads if low <= at < high]
        sheet.record("kivi", f"{case}: reads, p99, {name}", percentile(inside, 99) * 1e3, "ms", reads=len(inside))


def _create(db: Any) -> None:
    columns = {"endpoint_id": "int64", "ts": "timestamp", "resp_time_us": "int64"}
    db.create_event_table(EVENTS, event_time="ts", columns=columns, retention=_RETENTION)
    db.create_aggregate(
        AGGREGATE,
        source=EVENTS,
        group_by=["endpoint_id", kivi.time_slot("ts", "30s", name="slot")],
        measures={"total": kivi.sum("resp_time_us"), "n": kivi.count()},
        retention=_RETENTION,
    )


def _reads(db: Any, running: Callable[[], bool]) -> list[Timed]:
    """(when it began, how long it took, both in seconds) of each read until the stream ends."""
    reads: list[Timed] = []
    endpoints = random.Random(1)
    while running():
        began = time.monotonic()
        with db.snapshot() as snapshot:
            prefix = (endpoints.randrange(ENDPOINTS),)
            rows = list(snapshot.scan(AGGREGATE, prefix=prefix, limit=SLOTS, reverse=True))
        reads.append((began, time.monotonic() - began))
        if any(newer["slot"] <= older["slot"] for newer, older in itertools.pairwise(rows)):
            raise WrongTotals("kivi: the slots of a read are in no order")
    return reads


@contextmanager
def _looked_at(server: Server) -> Iterator[list[dict[str, float]]]:
    """Once a second: what is unsettled, how many files have one moment at most, memory and disk."""
    samples: list[dict[str, float]] = []
    over = threading.Event()

    def look() -> None:
        with server.connect() as db:
            while True:
                stats = db.stats()
                samples.append(
                    {
                        "at_s": time.monotonic(),
                        "unsettled": stats["settling"],
                        "depth": stats["settled_depth"],
                        "rss_gib": server.rss_bytes / 2**30,
                        "disk_gib": disk_bytes(server.data) / 2**30,
                    }
                )
                if over.wait(_SAMPLE_S):
                    return

    with _beside(look, over):
        yield samples


@contextmanager
def _questions(server: Server, asked: bool) -> Iterator[list[float]]:
    """Questions about all events, one after the other; how long each took, in seconds."""
    took: list[float] = []
    over = threading.Event()

    def ask() -> None:
        with server.connect() as db:
            while asked and not over.is_set():
                began = time.monotonic()
                with db.snapshot() as snapshot:
                    groups = snapshot.sql(_QUESTION)
                if groups.num_rows > 100:
                    raise WrongTotals(f"kivi: {groups.num_rows} groups of 100")
                took.append(time.monotonic() - began)

    with _beside(ask, over):
        yield took


@contextmanager
def _beside(work: Callable[[], None], over: threading.Event) -> Iterator[None]:
    """The work in a thread, until the block is left. What it raises is raised then."""
    failures: list[BaseException] = []

    def caught() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=caught, name="bench-beside", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failures:
        raise failures[0]


def _check(db: Any, ran: Ran, case: str) -> None:
    """Raises WrongTotals unless every slot that the aggregate shows, and all of those past its floor, are as sent."""
    with db.snapshot(ttl_s=600) as snapshot:
        held = snapshot.to_arrow(AGGREGATE, columns=["slot", "n", "total"])
        floor_us = db.describe(AGGREGATE)["statistics"].get("floor_us") or 0
    found = held.group_by("slot").aggregate([("n", "sum"), ("total", "sum")]).to_pylist()
    shown = {int(row["slot"].timestamp() * 1_000_000): (row["n_sum"], row["total_sum"]) for row in found}
    sent = {int(slot): tuple(totals) for slot, totals in ran.slots.items()}
    if missing := [slot for slot in sent if slot >= floor_us and slot not in shown]:
        raise WrongTotals(f"kivi, {case}: {len(missing)} slots past the floor are not there")
    rows = len(shown)
    same(
        f"kivi, {case}",
        Totals(rows, sum(n for n, _ in shown.values()), sum(total for _, total in shown.values())),
        Totals(rows, sum(sent[slot][0] for slot in shown), sum(sent[slot][1] for slot in shown)),
    )


def _by_second(ran: Ran, reads: list[Timed]) -> list[dict[str, float]]:
    """Every whole second in which something was read and something appended."""
    events = Counter(int(due + took - ran.began_s) for due, took in ran.appends)
    took: dict[str, defaultdict[int, list[float]]] = {"reads": defaultdict(list), "appends": defaultdict(list)}
    for what, timed in (("reads", reads), ("appends", ran.appends)):
        for at, seconds in timed:
            took[what][int((at - ran.began_s) // 1)].append(seconds)
    return [
        {
            "second": second,
            "events": events[second] * BATCH,
            **{f"{what}_p99_ms": percentile(took[what][second], 99) * 1e3 for what in took},
        }
        for second in sorted(took["reads"].keys() & took["appends"].keys())
    ]
