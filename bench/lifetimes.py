"""Goal 11: events that go: by retention, while others come, and by a correction.

*A simulated week*: the append stream, wide, batches of 100,000, whose event times go through seven days, in a table and
an aggregate that keep one day (*retention*), and in ones that keep everything. The directory is looked at twice a
second: once a day is full, disk is to be steady, which is the greatest size in the last third of the stream beside that
in the middle third. What retention costs is the rate with it beside the rate without.

*Retraction*: 20 million events are loaded, and the events of some endpoints, 1 % of all, are retracted in one
transaction: of an aggregate of a sum and a count, whose inverse is added, and of one that has quantiles and distinct
counts as well, of which the latter must be computed again.

Before a figure is believed: of the week every event of a slot past the floor is counted and summed in the aggregate;
after a retraction every row is as if the events had never been.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import kivi
from bench import measures, tables
from bench.context import Context
from bench.data import SLOT_US, START_US, Pool, Totals, make
from bench.server import Server, disk_bytes
from bench.sheet import Figures, Ratio, Sheet
from bench.streaming import WARM_UP, Streamed, in_flight, stream
from bench.verify import same

__all__ = ["sheet", "take"]

BATCH: Final = 100_000
_RETENTION: Final = "1d"
_WEEK_US: Final = 7 * 86_400_000_000
_BATCHES_MIN: Final = 3 * WARM_UP
_LOADED: Final = 20_000_000
_RETRACTED: Final = 0.01
_SAMPLE_S: Final = 0.5
_PATIENCE_S: Final = 120.0
_STEADY: Final = "a week, disk, last third / middle third"


def sheet() -> Sheet:
    def cost(figures: Figures) -> float:
        return figures["kivi", "a week, retention"] / figures["kivi", "a week, everything kept"]

    ratios = [
        Ratio("a week with retention: disk, last third / middle third", lambda f: f["kivi", _STEADY], at_most=1.1),
        Ratio("a week: ingest with retention / without", cost, at_least=0.95),
    ]
    for case in ("sums", "measures"):

        def quicker(figures: Figures, case: str = case) -> float:
            return figures["kivi", f"retraction, {case}"] / figures["kivi", f"loading, {case}"]

        ratios.append(Ratio(f"{case}: retracting 1 % / loading everything, time", quicker, at_most=1.0))
    return Sheet("goal11", "Lifetimes: retention over a simulated week, and retraction", ratios)


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    _week(context, sheet, "a week, retention", _RETENTION)
    _week(context, sheet, "a week, everything kept", None)
    for case in ("sums", "measures"):
        _retract(context, sheet, case)


# -- a week ----------------------------------------------------------------------------------------


class _Week(Sequence[Any]):
    """The batches of a pool, whose times are within an hour, again and again, each later than the one before."""

    def __init__(self, pool: Pool, batches: int) -> None:
        self.pool = pool
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def times(self, i: int) -> Any:
        """The event times of batch ``i``, in microseconds."""
        return self.pool.cut(self.pool.ts_us, i % len(self.pool)) + _WEEK_US * i // self.batches

    @overload
    def __getitem__(self, i: int) -> Any: ...
    @overload
    def __getitem__(self, i: slice) -> Any: ...
    def __getitem__(self, i: Any) -> Any:
        batch = self.pool.batches[i % len(self.pool)]
        return batch.set_column(1, batch.schema.field(1), pa.array(self.times(i)).cast(batch.schema.field(1).type))


def _week(context: Context, sheet: Sheet, case: str, retention: str | None) -> None:
    week = _Week(context.pool("wide", BATCH), max(_BATCHES_MIN, context.events // (2 * BATCH)))
    with context.server() as server, server.connect() as db:
        tables.create(db, retention=retention)
        with _looked_at(server) as samples:
            done = stream(db, tables.EVENTS, week, in_flight(BATCH), count=len(week) - WARM_UP)
        sheet.record("kivi", case, done.rate, "events/s", events=done.events)
        db.consolidate()
        floor_us, held = _from_floor(db) if retention else (START_US, tables.held(db))
        _check(held, week, done, floor_us, case)
        sheet.record("kivi", f"{case}, at rest", disk_bytes(server.data) / 2**20, "MiB")
    sheet.series[-1][case] = {name: [sample[name] for sample in samples] for name in ("at_s", "disk_gib")}
    third = len(samples) // 3
    if retention and third:
        middle, last = (
            max(sample["disk_gib"] for sample in part) for part in (samples[third : 2 * third], samples[2 * third :])
        )
        sheet.record("kivi", _STEADY, last / middle, "")


@contextmanager
def _looked_at(server: Server) -> Iterator[list[dict[str, float]]]:
    samples: list[dict[str, float]] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(_SAMPLE_S):
            samples.append({"at_s": time.monotonic(), "disk_gib": disk_bytes(server.data) / 2**30})

    looking = threading.Thread(target=look, name="bench-disk", daemon=True)
    looking.start()
    try:
        yield samples
    finally:
        over.set()
        looking.join()


def _from_floor(db: Any) -> tuple[int, Any]:
    """The aggregate's floor, which a server moves every few seconds, and its rows while it stood still."""

    def floor_us() -> Any:
        return db.describe(tables.AGGREGATE)["statistics"].get("floor_us")

    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        before, held = floor_us(), tables.held(db)
        if before is not None and floor_us() == before:
            return before, held
        time.sleep(_SAMPLE_S)
    raise RuntimeError("the server has set no retention floor, or moves it all the time")


def _check(held: Any, week: _Week, done: Streamed, floor_us: int, case: str) -> None:
    """Raises WrongTotals unless the rows from the floor on hold the events that belong there, and none is below it."""
    keys = set()
    count = total = 0
    for i, times in enumerate(done.sent):
        at = week.times(i)
        kept = np.flatnonzero(at // SLOT_US * SLOT_US >= floor_us)
        if not len(kept):
            continue
        endpoints = week.pool.cut(week.pool.endpoint, i % len(week.pool))[kept]
        keys.add((endpoints << 40 | (at[kept] - START_US) // SLOT_US).tobytes())
        count += times * len(kept)
        total += times * int(week.pool.cut(week.pool.resp_us, i % len(week.pool))[kept].sum())
    rows = len(np.unique(np.frombuffer(b"".join(keys), np.int64)))
    same(
        f"kivi, {case}",
        Totals(len(held), pc.sum(held["n"]).as_py(), pc.sum(held["total"]).as_py()),
        Totals(rows, count, total),
    )


# -- retraction ------------------------------------------------------------------------------------


def _retract(context: Context, sheet: Sheet, case: str) -> None:
    pool = make("wide", BATCH, context.pool_events if context.quick else _LOADED)
    gone = _some(pool)
    is_gone = np.isin(pool.endpoint, gone)
    more: dict[str, Any] = {"measures": measures.MEASURES, "derived": measures.P99} if case == "measures" else {}
    with context.server() as server, server.connect() as db:
        tables.create(db, **more)
        once = [1] * len(pool)
        done = stream(db, tables.EVENTS, pool.batches, in_flight(BATCH), warm_up=0, count=len(pool))
        db.consolidate()
        (measures.check if more else _sums)(db, pool, once, f"kivi, {case}, loaded")
        began = time.perf_counter()
        with db.transaction() as tx:
            count = tx.retract(tables.EVENTS, where=kivi.col("endpoint_id").isin(gone))
        took = time.perf_counter() - began
        left = pool.taken(np.flatnonzero(~is_gone))
        same(f"kivi, {case}, retracted", Totals(0, count, 0), Totals(0, int(is_gone.sum()), 0))
        (measures.check if more else _sums)(db, left, [1], f"kivi, {case}, after the retraction")
    sheet.record("kivi", f"loading, {case}", done.seconds, "s", events=len(pool.endpoint))
    sheet.record("kivi", f"retraction, {case}", took, "s", events=count)


def _sums(db: Any, pool: Pool, sent: list[int], who: str) -> None:
    tables.check(db, pool.expected(sent), who)


def _some(pool: Pool) -> list[int]:
    """Endpoints with about 1 % of the events: ones that are neither frequent nor rare, from place 100 on."""
    counts = np.bincount(pool.endpoint)
    ordered = np.argsort(-counts, kind="stable")[100:]
    upto = int(np.searchsorted(np.cumsum(counts[ordered]), _RETRACTED * len(pool.endpoint)))
    return ordered[: max(1, upto)].tolist()  # type: ignore[no-any-return]
