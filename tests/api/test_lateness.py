"""How late events come, as ``describe`` says it at every door, and what "auto" makes of it."""

from __future__ import annotations

import datetime as dt
import math
import random
from collections import defaultdict
from typing import Any

import pytest

import kivi
from kivi.errors import InvalidArgument
from tests.waiting import wait_until

DAY_US = 86_400_000_000


def brute_force(db: Any, table: str) -> dict[str, list[int]]:
    """Of each day of commits, how late each event was, from the hidden columns of a scan."""
    found = defaultdict(list)
    with db.snapshot() as snap:
        rows = snap.to_arrow(table, columns=["ts", "_commit_time"]).to_pylist()
    for row in rows:
        late = (row["_commit_time"] - row["ts"]) // dt.timedelta(microseconds=1)
        found[row["_commit_time"].date().isoformat()].append(max(0, late))
    return found


def test_each_event_counts_once_whenever_it_is_asked_for(db: Any) -> None:
    """As events come, are consolidated and come again; within 1 % of the nearest rank."""
    db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "us": "int64"})
    assert db.describe("calls")["lateness"] == {}
    chosen = random.Random(7)
    for step in range(4):
        now = dt.datetime.now(dt.UTC)
        ages = [10 ** chosen.uniform(-3, 6) * chosen.choice([1, 1, 1, -1]) for _ in range(1_500)]
        db.append("calls", [{"ts": now - dt.timedelta(seconds=age), "us": 1} for age in ages])
        if step == 2:
            db.consolidate()
        told, expected = db.describe("calls")["lateness"], brute_force(db, "calls")
        assert told.keys() == expected.keys()
        for day, late in expected.items():
            late.sort()
            assert (told[day]["events"], told[day]["max_us"]) == (len(late), late[-1])
            for name, q in (("p50_us", 0.5), ("p99_us", 0.99), ("p999_us", 0.999)):
                exact = late[math.ceil(q * len(late)) - 1]
                assert told[day][name] == pytest.approx(exact, rel=0.0101, abs=1)
    db.create_aggregate("calls_1h", source="calls", group_by=[kivi.time_slot("ts", "1h")], measures={"n": kivi.count()})
    assert "lateness" not in db.describe("calls_1h")


def test_auto_is_what_most_events_kept_to(db: Any) -> None:
    """All events are an hour late. What was half an hour before the newest one is over at once, or not for an hour."""
    db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp"})
    db.create_aggregate("calls_1m", source="calls", group_by=[kivi.time_slot("ts", "1m")], measures={"n": kivi.count()})
    newest = dt.datetime.now(dt.UTC) - dt.timedelta(hours=1)
    db.append("calls", [{"ts": newest - dt.timedelta(minutes=age)} for age in range(30)])
    is_many = kivi.col("n") > 0
    for name, lateness in (("late", "auto"), ("at once", 0)):
        db.create_alert(name, on="calls_1m", where=is_many, lateness=lateness)
    db.append("calls", [{"ts": newest + dt.timedelta(minutes=2 + more)} for more in range(5)])
    wait_until(
        lambda: [one for one in db.alerts() if one["name"] == "at once" and one["state"] != "inactive"],
        reason=db.alerts,
    )
    assert [one["state"] for one in db.alerts() if one["name"] == "late"] == ["inactive"]
    for name in ("late", "at once"):
        db.drop_alert(name)
    with pytest.raises(InvalidArgument, match="a duration like '5s', or 'auto'"):
        db.create_alert("no", on="calls_1m", where=is_many, lateness=1.5)


def test_a_time_may_be_as_far_off_as_it_can_be(db: Any) -> None:
    db.create_event_table("far", event_time="ts", columns={"ts": "timestamp"})
    db.append("far", [{"ts": dt.datetime.min.replace(tzinfo=dt.UTC)}, {"ts": 0}])
    (day,) = db.describe("far")["lateness"].values()
    assert day["events"] == 2 and day["max_us"] > 2_000 * 365 * 86_400 * 10**6
