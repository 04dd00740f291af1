"""Subscriptions to matches, at every door: what they are told, where they go on, and what is refused."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from typing import Any

import pytest

import kivi
from kivi import col, prev
from kivi.errors import InvalidArgument

T0 = 1_774_000_000
RISES = kivi.pattern(
    "A B+ C",
    partition_by=["host"],
    within="1m",
    define={"B": col("us") > prev("us"), "C": col("us") < prev("us")},
    measures={"began": kivi.first("A.ts"), "rises": kivi.count("B"), "mean": kivi.avg("us"), "paid": kivi.sum("price")},
)
COLUMNS = {"host": "string", "ts": "timestamp", "us": "int64", "price": "decimal(6,2)"}
WAIT_S = 60.0


def moment(second: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(T0 + second, dt.UTC)


def call(second: float, us: int, host: str | None = "a") -> dict[str, Any]:
    return {"host": host, "ts": moment(second), "us": us, "price": "1.10"}


def told(live: Any) -> tuple[list[tuple[str, dict[str, Any]]], Any]:
    update = live.next(WAIT_S)
    assert update is not None
    return [(change.kind, change.row) for change in update.changes], update


@pytest.fixture
def calls(db: Any) -> Any:
    db.create_event_table("calls", event_time="ts", columns=COLUMNS)
    return db


def matches(db: Any) -> list[dict[str, Any]]:
    with db.snapshot() as snap:
        return list(snap.match("calls", RISES))


def test_matches_come_once_they_are_decided_and_go_with_what_is_late(calls: Any) -> None:
    calls.append("calls", [call(second - 1_000, us) for second, us in enumerate([1, 2, 1])])  # before it begins
    calls.append("calls", [call(60, 1)])
    with calls.subscribe_matches("calls", RISES, lateness="10m", interval_ms=10, heartbeat_ms=50) as live:
        assert live.next(0.1) is None
        calls.append("calls", [call(61, 2), call(62, 3), call(64, 1), call(61, 9, None), call(60, 8, None)])
        calls.append("calls", [call(63, 4)])  # in time
        calls.append("calls", [call(1_000, 1), call(62, 1, None)])
        found, update = told(live)
        if len(found) == 1:  # a snapshot in between
            more, update = told(live)
            found += more
        first, second = sorted(found, key=lambda each: each[1]["host"] is None)
        assert first == (
            "add",
            {"host": "a", "began": moment(60), "rises": 3, "mean": 2.2, "paid": matches(calls)[1]["paid"]},
        )
        assert second[1]["began"] == moment(60)
        assert (live.ts, live.skip) == (update.ts, update.skip)
        since = {"since": live.ts, "skip": live.skip}
        calls.append("calls", [call(60.5, 0)])  # too late: it is matched all the same
        found, _ = told(live)
        assert [kind for kind, _ in found] == ["remove", "add"]
        assert found[0][1] == first[1]
        assert found[1][1]["began"] == moment(60.5)
        with pytest.raises(InvalidArgument, match="keeps none"):
            _ = live.rows
    with calls.subscribe_matches("calls", RISES, lateness="10m", interval_ms=10, **since) as again:
        assert told(again)[0] == found
    with calls.subscribe_matches("calls", RISES, lateness="10m", interval_ms=10, since=0) as every:
        assert Counter(repr(row) for _, row in told(every)[0]) == Counter(map(repr, matches(calls)))
    with calls.subscribe_matches("calls", RISES, where=col("host") == "b", since=0, interval_ms=10) as others:
        assert others.next(0.1) is None
        calls.append("calls", [call(1_100 + second, us, "b") for second, us in enumerate([1, 2, 1])])
        assert [row["host"] for _, row in told(others)[0]] == ["b"]  # though no later event comes


def test_auto_is_the_lateness_that_there_was(calls: Any) -> None:
    """Everything came a long time after it happened: nothing is sure."""
    calls.append("calls", [call(second, us) for second, us in enumerate([1, 2, 1, 5])])
    with calls.subscribe_matches("calls", RISES, lateness="auto", since=0, interval_ms=10, heartbeat_ms=20) as live:
        assert live.next(0.3) is None
    with calls.subscribe_matches("calls", RISES, since=0, interval_ms=10) as live:
        assert len(told(live)[0]) == 1


def test_what_is_refused(calls: Any) -> None:
    measures = {"n": kivi.count()}
    far = kivi.pattern("A", within="1m", define={"A": col("us") > prev("us")}, measures=measures)

    def begin(*args: Any, **kwargs: Any) -> None:
        with calls.subscribe_matches("calls", *args, **kwargs) as live:
            live.next(0.0)

    for pattern, says in (
        (kivi.pattern("A", measures=measures), "give it a within"),
        (far, "rows of the match alone"),
        ("A B", "made by kivi.pattern"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            begin(pattern)
    for wrong in ({"lateness": 1.5}, {"lateness": "soon"}, {"since": -1}, {"since": 10**9}):
        with pytest.raises(InvalidArgument):
            begin(RISES, **wrong)
    calls.create_hierarchy("hosts")
    with pytest.raises(InvalidArgument, match="no hierarchy"):
        begin(RISES, where=col("host").under("b"))
    calls.create_table("rows", key={"k": "int64"}, columns={"v": "int64"})
    with pytest.raises(InvalidArgument, match="no event table"), calls.subscribe_matches("rows", RISES):
        pass
