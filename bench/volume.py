"""Goal 6: 200 million events, three columns of integers, wide. What grows, and what a crash at the end costs.

An appending process streams batches of 100,000 while this one looks at the server twice a second: its resident memory
as the system counts it, and the blocks of its files on disk. When the last batch is acknowledged the server is killed
(SIGKILL) as it is, and started again: *open* is the time until it listens, with whatever it has to replay. Then every
row of the aggregate is compared with what was sent.

A scan is worth measuring on many rows, and the wide aggregate has 120,000: a second table is filled, after all that,
with a million endpoints, and its aggregate of a million rows is streamed by ``scan_batches``.

The same 4 million events are sent again and again. That does not flatter the size on disk: a block is compressed by
itself, and is much smaller than the events before they repeat.

Wanted: memory under 1.5 GiB throughout, at most 12 bytes an event on disk (when the last batch is acknowledged; the
commit log of what is not in blocks yet is part of it), open under 5 s, the rate of the last tenth within 20% of the
first, 2 M rows a second.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

from bench import tables, verify
from bench.appending import Order, started
from bench.context import Context
from bench.data import make
from bench.server import Server, disk_bytes
from bench.sheet import Figures, Ratio, Sheet
from bench.streaming import Streamed

__all__ = ["sheet", "take"]

BATCH: Final = 100_000
_SAMPLE_S: Final = 0.5
_ROWS: Final = 1_000_000
_MANY, _MANY_AGGREGATE = "many", "many_5m"
_MEMORY = "memory, peak"
_DISK = "on disk, at the end"
_OPEN = "open after kill -9"
_SCAN = f"scan of {_ROWS:,} aggregate rows"


def _figure(case: str) -> Callable[[Figures], float]:
    return lambda figures: figures["kivi", case]


def _steady(figures: Figures) -> float:
    return figures["kivi", "append stream, last tenth"] / figures["kivi", "append stream, first tenth"]


def sheet() -> Sheet:
    ratios = [
        Ratio("memory of the server, peak, GiB", _figure(_MEMORY), at_most=1.5),
        Ratio("bytes an event on disk", _figure(_DISK), at_most=12.0),
        Ratio("open after kill -9, seconds", _figure(_OPEN), at_most=5.0),
        Ratio("rate of the last tenth / the first", _steady, at_least=0.8),
        Ratio("scan, million rows a second", lambda figures: figures["kivi", _SCAN] / 1e6, at_least=2.0),
    ]
    return Sheet("goal6", "Many events: memory, disk, open after a kill, and a full scan", ratios)


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    pool = context.pool("wide", BATCH)
    batches = max(20, context.events // BATCH)
    with context.directory() as path:
        server = Server(path / "data")
        with server:
            with server.connect() as db:
                tables.create(db)
            order = Order(server.endpoint, pool.name, BATCH, context.pool_events, batches=batches)
            with started(order) as appending:
                samples = _watched(server, appending.running)
                done = appending.streamed()
            _stream_figures(sheet, server, samples, done)
            sheet.record("kivi", _OPEN, server.reopened_s(), "s")
            with server.connect() as db:
                tables.check(db, pool.expected(done.sent), "kivi after kill -9")
                db.consolidate()
                events = pool.events(done.sent)
                sheet.record("kivi", "on disk, consolidated", disk_bytes(server.data) / events, "bytes/event")
                _scan(sheet, db)
            peak = max(sheet.runs[-1]["kivi", _MEMORY], server.peak_rss_bytes / 2**30)
            sheet.record("kivi", _MEMORY, peak, "GiB")
    sheet.series[-1]["volume"] = {
        **_by_second(done),
        **{name: [sample[name] for sample in samples] for name in ("at_s", "rss_gib", "disk_gib")},
    }


def _watched(server: Server, running: Callable[[], bool]) -> list[dict[str, float]]:
    samples = []
    while running():
        sample = {"at_s": time.monotonic(), "rss_gib": server.rss_bytes / 2**30}
        samples.append({**sample, "disk_gib": disk_bytes(server.data) / 2**30})
        time.sleep(_SAMPLE_S)
    return samples


def _stream_figures(sheet: Sheet, server: Server, samples: list[dict[str, float]], done: Streamed) -> None:
    events = sum(done.sent) * BATCH
    tenth = max(1, len(done.at_s) // 10)
    moments = [done.began_s, *done.at_s]
    first, last = (tenth * BATCH / (moments[i + tenth] - moments[i]) for i in (0, len(done.at_s) - tenth))
    record = sheet.record
    record("kivi", "append stream", done.rate, "events/s", events=events)
    record("kivi", "append stream, first tenth", first, "events/s")
    record("kivi", "append stream, last tenth", last, "events/s")
    record("kivi", _MEMORY, server.peak_rss_bytes / 2**30, "GiB")
    record("kivi", "memory, at the end", samples[-1]["rss_gib"], "GiB")
    record("kivi", _DISK, disk_bytes(server.data) / events, "bytes/event")


def _scan(sheet: Sheet, db: Any) -> None:
    """The whole of an aggregate of a million rows, batch by batch; the median of three."""
    pool = make(f"even-{_ROWS}", BATCH, _ROWS)
    tables.create(db, _MANY, _MANY_AGGREGATE)
    for batch in pool.batches:
        db.append(_MANY, batch)
    db.consolidate()
    took = []
    for _ in range(3):
        began = time.perf_counter()
        with db.snapshot(ttl_s=600) as snapshot:
            batches = list(snapshot.scan_batches(_MANY_AGGREGATE))
        took.append(time.perf_counter() - began)
        verify.every_row("kivi, scanned", pa.Table.from_batches(batches), pool.expected([1] * len(pool)))
    sheet.record("kivi", _SCAN, _ROWS / sorted(took)[1], "rows/s")


def _by_second(done: Streamed) -> dict[str, list[float]]:
    """Events acknowledged in each whole second of the stream."""
    began = done.began_s
    counted = {second: len(list(group)) for second, group in itertools.groupby(int(at - began) for at in done.at_s)}
    seconds = range(int(done.at_s[-1] - began))
    return {"second": list(seconds), "events": [counted.get(second, 0) * BATCH for second in seconds]}
