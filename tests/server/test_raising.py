"""A rule whose judgement is a pattern (R26), on a real server that is killed: it raises what matches, each once."""

from __future__ import annotations

import datetime as dt
import time
from collections import Counter
from pathlib import Path
from typing import Any

import kivi
from kivi import col, prev
from tests.server.killed import written_under_kills
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

BEGIN = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
RISES = kivi.pattern(
    "A B+ C",
    partition_by="endpoint",
    within="20s",
    define={"B": col("us") > prev("us"), "C": col("us") < prev("us")},
    measures={"ts": kivi.last("ts"), "began": kivi.first("ts"), "worst": kivi.max("us"), "rows": kivi.count()},
)
"""Each rise of the saw that ``calls`` are."""


def make_rule(db: Any) -> None:
    """Lateness is of event time, and by far more than any server is away: nothing comes too late."""
    db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "endpoint": "int64", "us": "int64"})
    columns = {"ts": "timestamp", "endpoint": "int64", "began": "timestamp", "worst": "int64", "rows": "int64"}
    db.create_event_table("rises", event_time="ts", columns=columns)
    db.create_rule("rises", source="calls", into="rises", match=RISES, lateness="10m")


def calls(number: int) -> list[dict[str, Any]]:
    """A minute of them, of three endpoints: every second one, each minute."""
    at = BEGIN + dt.timedelta(minutes=number)
    return [
        {"ts": at + dt.timedelta(seconds=i), "endpoint": i % 3, "us": (i // 3 * 7 + number + i % 3) % 5}
        for i in range(60)
    ]


def all_are_raised(db: Any, written: int) -> None:
    """All matches of so many minutes are, once event time has passed them by the lateness."""
    db.append("calls", [{"ts": BEGIN + dt.timedelta(minutes=written + 30), "endpoint": 9, "us": 0}], "the end")
    ended_us = int((BEGIN + dt.timedelta(minutes=written + 1)).timestamp() * 1_000_000)
    wait_until(lambda: db.rules()[0]["judged_us"] > ended_us, timeout_s=90, reason=db.rules)
    with db.snapshot() as snap:
        raised, matched = snap.scan("rises"), snap.match("calls", RISES)
        found, wanted = (Counter(repr(sorted(row.items())) for row in rows) for rows in (raised, matched))
    assert found == wanted
    assert set(found.values()) == {1}
    assert len(found) > 5 * written
    (rule,) = db.rules()
    assert (rule["judged"], rule["raised"], rule["late"], rule["error"]) == (len(found), len(found), 0, "")


def test_kill_9_in_mid_stream_raises_every_match_once(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        with server.connect() as db:
            make_rule(db)

        def write(db: Any, number: int) -> None:
            db.append("calls", calls(number), f"token-{number}")
            time.sleep(0.02)

        written = written_under_kills(server, write, kills=4, pause_s=1.2)
        with server.connect() as db:
            all_are_raised(db, written)
            db.drop_rule("rises")
            db.drop("rises")
