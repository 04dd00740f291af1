"""Subscriptions to matches over gRPC while the server dies: what was told, taken together, is what ``match`` gives."""

from __future__ import annotations

import datetime as dt
import random
from collections import Counter
from pathlib import Path

import kivi
from kivi import col, prev
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
RISES = kivi.pattern(
    "A B+ C",
    partition_by=["host"],
    within="1m",
    define={"B": col("us") > prev("us"), "C": col("us") < prev("us")},
    measures={"began": kivi.first("A.ts"), "rises": kivi.count("B")},
)


def test_no_match_is_lost_or_told_twice_over_kills(tmp_path: Path) -> None:
    """Events come in disorder within the lateness and, some, beyond it."""
    rng = random.Random(3)
    with ServerProcess(tmp_path / "store") as server, server.connect(timeout=60.0) as db:
        columns = {"host": "int64", "ts": "timestamp", "us": "int64"}
        db.create_event_table("calls", event_time="ts", columns=columns)
        has = Counter[str]()
        kinds = Counter[str]()
        with db.subscribe_matches("calls", RISES, lateness="10s", since=0, interval_ms=0, heartbeat_ms=20) as live:

            def hear() -> None:
                while (update := live.next(0.02)) is not None:
                    for change in update.changes:
                        kinds[change.kind] += 1
                        has[repr(change.row)] += 1 if change.kind == "add" else -1
                    assert min(has.values()) >= 0

            for step in range(24):
                at = [20 * step - rng.choice([0, 0, 5, 60]) + rng.random() * 20 for _ in range(20)]
                rows = [
                    {"host": rng.randrange(3), "ts": T0 + s * dt.timedelta(seconds=1), "us": rng.randrange(9)}
                    for s in at
                ]
                db.append("calls", rows)
                hear()
                if step in (8, 16):
                    server.kill()
                    server.start()
            db.append("calls", [{"host": 9, "ts": T0 + dt.timedelta(days=1), "us": 0}])

            def all_came() -> bool:
                hear()
                with db.snapshot() as snap:
                    return +has == Counter(repr(row) for row in snap.match("calls", RISES))

            wait_until(all_came, pause_s=0)
        assert kinds["remove"] > 0
