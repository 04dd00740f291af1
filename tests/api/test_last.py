"""The ``last`` time: it ends with the newest slot that is not of the future, in reads and in what is followed.

*The model*: the slots of the rows that are selected at a snapshot, and that snapshot's commit time. Those that begin
more than 10 minutes after it are of a wrong clock, unless there are no others.
"""

from __future__ import annotations

import datetime as dt
import random
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

import kivi
from tests.seeds import seeds
from tests.server.test_http import base
from tests.serverproc import ServerProcess

MINUTE: Final = 60_000_000
LONG_AGO: Final = 1_577_836_800_000_000  # 2020-01-01
NOW: Final = 1_893_456_000_000_000  # 2030-01-01: times of a log never fall
FAR: Final = 4_070_908_800_000_000  # 2099-01-01
AHEAD: Final = 10 * MINUTE
LAST: Final = 15 * MINUTE


def created(db: Any, slot: str = "5m", name: str = "calls") -> None:
    columns: dict[str, Any] = {"app": "string", "ts": "timestamp", "n": "int64"}
    db.create_event_table(name, event_time="ts", columns=columns)
    measures = {"n": kivi.sum("n"), "calls": kivi.count()}
    group_by = ["app", kivi.time_slot("ts", slot, name="slot")]
    db.create_aggregate(f"{name}_{slot}", source=name, group_by=group_by, measures=measures, history="30d")


def expected(events: Iterable[tuple[str, int, int]], now: int, width: int = 5 * MINUTE) -> dict[str, int]:
    """The sum of ``n`` by app in the last 15 minutes."""
    slots = {ts // width * width for _, ts, _ in events}
    newest = max((slot for slot in slots if slot <= now + AHEAD), default=max(slots, default=0))
    found: dict[str, int] = defaultdict(int)
    for app, ts, n in events:
        if newest + width - LAST <= ts // width * width <= newest:
            found[app] += n
    return dict(found)


def sums(rows: Iterable[Any]) -> dict[str, int]:
    return {row["app"]: row["n"] for row in rows}


class Clock:
    """Of the log of a store in this process, in microseconds."""

    def __init__(self, db: Any) -> None:
        self.us = NOW
        db.store.log._clock = lambda: self.us * 1_000


@pytest.mark.parametrize("seed", seeds(0, 2, night=8))
@pytest.mark.parametrize(
    "where", [None, kivi.col("app") != "c", kivi.col("n") > 0], ids=["all", "by key", "by measure"]
)
def test_a_range_is_that_of_the_model_whatever_clocks_say(seed: int, where: Any) -> None:
    """Read at each snapshot, then and later; and followed, over time that passes, retractions and consolidation."""
    rng = random.Random(seed)
    events = list[tuple[str, int, int]]()
    history = list[tuple[int, dict[str, int]]]()
    with kivi.open(background=False) as db:
        clock = Clock(db)
        created(db)
        rollup: dict[str, Any] = {"by": ["app"], "measures": ["n"], "where": where}
        with db.subscribe("calls_5m", rollup=rollup, last="15m", interval_ms=0, heartbeat_ms=10) as live:
            for _ in range(60):
                clock.us += rng.choice([0, 1_000_000, 3 * MINUTE, 11 * MINUTE, 40 * MINUTE])
                kind = rng.choice(["now", "now", "past", "near", "future", "far", "retract", "consolidate"])
                offset = {"now": 0, "past": -9 * MINUTE, "near": 8 * MINUTE, "future": rng.randrange(60) * MINUTE}
                if kind == "retract":
                    since = rng.choice([clock.us - LAST, clock.us + AHEAD, FAR, 0])
                    with db.transaction() as tx:
                        tx.retract("calls", start=since)
                    events = [event for event in events if event[1] < since]
                elif kind == "consolidate":
                    db.consolidate()
                else:
                    at = FAR if kind == "far" else clock.us + offset[kind]
                    event = rng.choice("abc"), at // 1_000_000 * 1_000_000, rng.randrange(1, 9)
                    db.append("calls", [dict(zip(("app", "ts", "n"), event, strict=True))])
                    events.append(event)
                with db.snapshot() as snap:
                    chosen = [event for event in events if where is None or "n" in str(where) or event[0] != "c"]
                    model = expected(chosen, clock_of(db, snap.ts))
                    assert sums(snap.rollup("calls_5m", **rollup, last="15m")) == model
                    history.append((snap.ts, model))
                    while live.ts is None or live.ts < snap.ts:
                        live.next(timeout_s=0.05)
                    assert sums(live.rows) == model
        for ts, model in history:
            with db.snapshot(as_of=ts) as snap:
                assert sums(snap.rollup("calls_5m", **rollup, last="15m")) == model


def clock_of(db: Any, ts: int) -> int:
    """The commit time of a snapshot, as the hidden column of its last event has it, or else the store."""
    found = db.store.timeline.time_of(ts)
    assert found is not None
    return int(found)


def test_an_event_of_a_wrong_clock_leaves_everybody_elses_last_hour_as_it_is(tmp_path: Path) -> None:
    """Over HTTP and gRPC, read and followed; and data of long ago ends with its own newest slot."""
    now = dt.datetime.now(dt.UTC)
    right = {"app": "shop", "ts": int(now.timestamp() * 1_000_000), "n": 3}
    wrong = {"app": "shop", "ts": FAR, "n": 100}
    with ServerProcess(tmp_path / "data", "--http", "localhost:0") as server, server.connect() as db:
        created(db)
        db.append("calls", [{"app": "shop", "ts": LONG_AGO, "n": 1}])
        with httpx.Client(base_url=base(server), timeout=60) as http:

            def said(**asked: str) -> dict[str, int]:
                asked = {"by": "app", "last": "15m", **asked}
                rows = sums(http.get("/v1/tables/calls_5m/rows", params=asked).json()["rows"])
                with db.snapshot(as_of=int(asked["as_of"]) if "as_of" in asked else None) as snap:
                    assert sums(snap.rollup("calls_5m", by=["app"], last="15m")) == rows
                if "as_of" not in asked:
                    with db.subscribe("calls_5m", rollup={"by": ["app"]}, last="15m") as live:
                        live.next(timeout_s=30)
                        assert sums(live.rows) == rows
                return rows

            assert said() == {"shop": 1}  # of years ago, replayed
            before = db.append("calls", [right])
            assert said() == {"shop": 3}
            assert http.post("/v1/tables/calls/append", json=[wrong]).status_code == 200
            assert said() == {"shop": 3}
            assert said(as_of=str(before)) == {"shop": 3}
            assert said(step="5m") == {"shop": 3}
            # What comes soon belongs to it once it may have come, if only others have committed since.
            created(db, "1s", "soon")
            asked = {"by": "app", "last": "1s"}
            db.append("soon", [{**right, "n": 1}])
            soon = time.time() + 608
            db.append("soon", [{**right, "ts": int(soon) * 1_000_000, "n": 2}])
            before_it = http.get("/v1/tables/soon_1s/rows", params=asked)
            with db.subscribe("soon_1s", rollup={"by": ["app"]}, last="1s", heartbeat_ms=50) as live:
                live.next(timeout_s=30)
                assert sums(before_it.json()["rows"]) == sums(live.rows) == {"shop": 1}
                time.sleep(max(0.0, soon - 599 - time.time()))
                db.append("calls", [right])
                tag = {"If-None-Match": before_it.headers["ETag"]}
                assert sums(http.get("/v1/tables/soon_1s/rows", params=asked, headers=tag).json()["rows"]) == {
                    "shop": 2
                }
                while sums(live.rows) != {"shop": 2}:
                    live.next(timeout_s=30)
            with db.snapshot() as snap:  # it is there, for who asks for its time
                assert sums(snap.rollup("calls_5m", by=["app"], start=FAR)) == {"shop": 100}
