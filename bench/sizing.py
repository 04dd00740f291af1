"""Goal 8: what to plan for. Sizes, not rates, so another load on the machine changes nothing about them.

An event costs disk as long as its table keeps it; a row of an aggregate, for ever. Both are measured at rest: after a
graceful stop everything is in base, the log has given back what it had in advance, and only the engine's files count.
A row is what a store takes more with an aggregate of a million rows than the same events take without.

Every total is read back before its size is believed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from bench import tables
from bench.context import Context
from bench.data import Pool, make
from bench.server import Server, disk_bytes
from bench.sheet import Sheet

__all__ = ["kept_bytes", "sheet", "take"]

BATCH: Final = 100_000
_ROWS: Final = 1_000_000


def sheet() -> Sheet:
    return Sheet("goal8", "Sizing: an event and an aggregate row on disk, an idle server in memory", [])


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    wide = make("wide", BATCH, context.pool_events)
    rows = _ROWS // 10 if context.quick else _ROWS
    even = make(f"even-{rows}", BATCH, rows)
    with context.directory() as path:
        idle = Server(path / "idle")
        with idle:
            sheet.record("kivi", "memory, idle and empty", idle.rss_bytes / 2**20, "MiB")
            idle.stop()
        for case, named in (("three integers", False), ("three integers, three strings", True)):
            sent = wide.strings() if named else wide.batches
            nbytes = kept_bytes(path / case, wide, sent, named=named)
            events = BATCH * len(sent)
            sheet.record("kivi", f"an event of {case}", nbytes / events, "bytes", events=events)
        without = kept_bytes(path / "without", even, even.batches, aggregated=False)
        nbytes = kept_bytes(path / "with", even, even.batches)
        sheet.record(
            "kivi", "a row of an aggregate, two keys and two sums", (nbytes - without) / rows, "bytes", rows=rows
        )


def kept_bytes(
    path: Path,
    pool: Pool,
    sent: list[Any],
    *,
    named: bool = False,
    aggregated: bool = True,
    measures: dict[str, Any] | None = None,
) -> int:
    """Bytes of the engine's files at rest, with these events in them. ``measures``: more of the aggregate's."""
    server = Server(path)
    with server:
        with server.connect() as db:
            tables.create(db, named=named, keyed=("endpoint_id",), measures=measures)
            if not aggregated:
                db.drop(tables.AGGREGATE)
            for batch in sent:
                db.append(tables.EVENTS, batch)
            db.consolidate()
            if aggregated:
                tables.check(db, pool.expected([1] * len(sent)), "kivi")
        if server.stop() != 0:
            raise RuntimeError("the server did not stop in order: " + "".join(server.output))
    return disk_bytes(path / "engine")
