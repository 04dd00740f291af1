"""Goal 16: a pattern over ten days of events, by how rare its rarest symbol is, beside reading all of them.

Rises of an endpoint that end with a status: ``A B* C`` within a quarter of an hour, of 1,000 endpoints. The status of
``C`` is that of one event in a million, up to one in a hundred. The same pattern is asked in turn as it is, and written
so that nothing is known of its symbols beforehand (``coalesce(status, 0)``): then all events are read and matched. No
time is believed before both give the same rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

import kivi
from bench.context import Context
from bench.past import DAY_US, START_US
from bench.sheet import Figures, Ratio, Sheet
from bench.verify import WrongTotals

__all__ = ["sheet", "take"]

_EVENTS: Final = 10_000_000
_QUICK_EVENTS: Final = 500_000
_BATCH_ROWS: Final = 100_000
_TIMES: Final = 5
_RARE: Final = {504: 1e-6, 503: 1e-5, 502: 1e-4, 501: 1e-3, 500: 1e-2}
_COLUMNS: Final = {"ts": "timestamp", "endpoint_id": "int64", "host": "string", "status": "int64", "us": "int64"}


def sheet() -> Sheet:
    ratios = []
    for part in _RARE.values():
        least = 5.0 if part <= 1e-4 else 1 / 1.2
        ratios.append(Ratio(f"{part:g}: reading all / as it is, time", _faster(part), least))
    return Sheet("goal16", "Patterns: rare symbols, beside reading all events", ratios)


def _faster(part: float) -> Any:
    def value(figures: Figures) -> float:
        return figures["kivi", f"{part:g}, all"] / figures["kivi", f"{part:g}"]

    return value


def _batches(events: int) -> Iterator[pa.Table]:
    rng = np.random.default_rng(16)
    for first in range(0, events, _BATCH_ROWS):
        rows = min(_BATCH_ROWS, events - first)
        times = START_US + np.arange(first, first + rows) * (10 * DAY_US) // events
        status, drawn, below = np.full(rows, 200), rng.random(rows), 0.0
        for code, part in _RARE.items():
            status[(drawn >= below) & (drawn < below + part)] = code
            below += part
        yield pa.table(
            {
                "ts": pa.array(np.sort(times + rng.integers(0, 10_000_000, rows)), pa.timestamp("us", "UTC")),
                "endpoint_id": rng.integers(0, 1_000, rows),
                "host": pa.array(np.char.add("h", rng.integers(0, 50, rows).astype(str))),
                "status": status,
                "us": rng.integers(1, 10_000, rows),
            }
        )


def _pattern(code: int, known: bool) -> Any:
    us, status = kivi.col("us"), kivi.col("status")
    if not known:
        us, status = kivi.coalesce(us, 0), kivi.coalesce(status, 0)
    return kivi.pattern(
        "A B* C",
        partition_by=["endpoint_id"],
        within="15m",
        define={"A": us < 5_000, "B": kivi.col("us") > kivi.prev("us"), "C": status == code},
        measures={"began": kivi.first("A.ts"), "rises": kivi.count("B")},
    )


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    events = _QUICK_EVENTS if context.quick else min(_EVENTS, context.events)
    with context.directory() as path, kivi.open(path / "data", query_bytes=4 << 30) as db:
        db.create_event_table("calls", event_time="ts", columns=_COLUMNS)
        for batch in _batches(events):
            db.append("calls", batch)
        db.consolidate()
        db.store.settle()
        with db.snapshot(ttl_s=3600) as snap:
            for code, part in _RARE.items():
                took: dict[bool, list[float]] = {True: [], False: []}
                for again in range((1 if context.quick else _TIMES) + 1):
                    found = {}
                    for known in took:
                        began = time.perf_counter()
                        found[known] = snap.match("calls", _pattern(code, known))
                        if again:  # the first one fills caches
                            took[known].append(time.perf_counter() - began)
                    if not found[True].to_arrow().equals(found[False].to_arrow()):
                        raise WrongTotals(f"{part:g}: what is near candidates has other matches than all events")
                for known, case in ((True, f"{part:g}"), (False, f"{part:g}, all")):
                    told = found[known].explain().split("\n")[1:]
                    sheet.record("kivi", case, statistics.median(took[known]) * 1e3, "ms", explained=told)
