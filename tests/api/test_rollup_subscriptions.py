"""Subscriptions to rollups: whatever is delivered is what ``snap.rollup`` gives at that snapshot."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import kivi

T0 = 1_767_225_600_000_000
MINUTE = 60_000_000
ROLLUPS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"by": ["app"], "step": "10m"}, {}),
    ({"by": ["app"], "step": "1m", "measures": ["n", "floats"]}, {"last": "5m"}),
    ({"by": ["endpoint"]}, {"last": "3m"}),
    ({"by": ["app"], "step": "5m", "measures": ["n"]}, {"last": "2m"}),
    ({}, {}),
    ({"by": ["endpoint", "app"], "step": "5m", "measures": ["p90"]}, {"order_by": ["-p90"], "limit": 3}),
    ({"by": ["app"], "step": "1m", "where": kivi.col("n") > 1}, {"last": "4m"}),
    ({"by": ["app"], "prefix": ("shop",), "start": T0 + 5 * MINUTE, "end": T0 + 20 * MINUTE, "step": "5m"}, {}),
]


def created(db: Any, **more: Any) -> Any:
    columns = {"app": "string", "endpoint": "int64", "ts": "timestamp", "x": "int64", "f": "float64"}
    db.create_event_table("calls", event_time="ts", columns=columns)
    db.create_aggregate(
        "fine",
        source="calls",
        group_by=["app", "endpoint", kivi.time_slot("ts", "1m")],
        measures={"n": kivi.count(), "floats": kivi.sum("f"), "latency": kivi.quantiles("x"), "peak": kivi.max("x")},
        derived={"p90": "quantile(latency, 0.9)"},
        **more,
    )
    return db


def events(rng: random.Random, count: int, minute: int) -> list[dict[str, Any]]:
    return [
        {
            "app": rng.choice(["shop", "mail"]),
            "endpoint": rng.randrange(3),
            "ts": T0 + (minute - rng.choice([0, 0, 0, 1, 7])) * MINUTE + rng.randrange(MINUTE),
            "x": rng.randrange(1_000),
            "f": rng.random(),
        }
        for _ in range(count)
    ]


def rolled(snap: Any, rollup: dict[str, Any], more: dict[str, Any]) -> list[dict[str, Any]]:
    last = {"last": more["last"]} if "last" in more else {}
    rows = list(snap.rollup("fine", **rollup, **last))
    if "order_by" in more:
        rows = sorted(rows, key=lambda row: -row["p90"])[: more["limit"]]
    return rows


def follow(db: Any, lives: list[Any], wanted: list[Any], cts: int) -> None:
    """Until every subscription has seen ``cts``; nothing else is committed meanwhile."""
    for live, (rollup, more) in zip(lives, wanted, strict=True):
        while live.ts < cts:
            live.next(timeout_s=0.05)  # heartbeats move ``ts`` too, and are not returned
        with db.snapshot() as snap:
            assert snap.ts == live.ts
            assert live.rows == rolled(snap, rollup, more), (rollup, more)


def subscribed(db: Any, wanted: list[Any]) -> list[Any]:
    return [
        db.subscribe("fine", rollup=rollup, interval_ms=0, heartbeat_ms=50, **more).__enter__()
        for rollup, more in wanted
    ]


def test_states_equal_rollups(db: Any) -> None:
    created(db)
    rng, wanted = random.Random(4), ROLLUPS[:2]
    db.append("calls", events(rng, 20, 0))
    lives = subscribed(db, wanted)
    for minute in (0, 1, 9):
        follow(db, lives, wanted, db.append("calls", events(rng, 5, minute)))
    for live in lives:
        live.close()


@pytest.fixture
def memory() -> Iterator[Any]:
    """Floors move when a test moves them, and not once a second."""
    with kivi.open(background=False) as db:
        yield db


def test_histories_with_every_kind_of_rollup(memory: Any) -> None:
    created(memory, retention="10m")
    rng, minute, floors = random.Random(8), 3, 0
    memory.append("calls", events(rng, 30, minute))
    lives = subscribed(memory, ROLLUPS)
    for i in range(12):
        minute += rng.choice([0, 0, 1, 6])
        found = events(rng, rng.choice([1, 4, 20]), minute)
        cts = memory.append("calls", found, late="drop")
        if i in (4, 8):
            memory.consolidate()
        follow(memory, lives, ROLLUPS, cts)
        if i in (2, 5, 9):
            memory.store.housekeeping.move_floors()
            floors += memory.watermark() > cts
            follow(memory, lives, ROLLUPS, memory.watermark())
    assert floors
    assert any(live.rows for live in lives)


def test_rows_that_leave_the_range_are_removed(memory: Any) -> None:
    created(memory)
    rng = random.Random(1)
    memory.append("calls", [{"app": "shop", "endpoint": 1, "ts": T0, "x": 1, "f": 0.5}])
    with memory.subscribe("fine", rollup={"step": "1m", "measures": ["n"]}, last="2m", heartbeat_ms=10) as live:
        live.next(timeout_s=60.0)
        assert [row["n"] for row in live.rows] == [1]
        cts = memory.append("calls", events(rng, 1, 30))
        kinds: list[str] = []
        while live.ts < cts:
            update = live.next(timeout_s=0.05)
            kinds += [change.kind for change in update.changes] if update is not None else []
        assert sorted(kinds) == ["add", "remove"]


def test_order_by_a_quantile_that_is_named_by_its_text(memory: Any) -> None:
    created(memory)
    text = "quantile(latency, 0.5)"
    memory.append("calls", events(random.Random(2), 60, 3))
    with memory.snapshot() as snap:
        whole = sorted(snap.rollup("fine", by=["endpoint"]), key=lambda row: -row["latency"].quantile(0.5))
        named = [{**row, text: row["latency"].quantile(0.5)} for row in whole]
    for arguments, expected in (
        ({"rollup": {"by": ["endpoint"]}}, whole),
        (
            {"rollup": {"by": ["endpoint"], "measures": [text]}},
            [{k: row[k] for k in ("endpoint", text)} for row in named],
        ),
    ):
        with memory.subscribe("fine", order_by="-" + text, limit=2, **arguments) as live:
            live.next(timeout_s=60.0)
            assert live.rows == expected[:2]
    with memory.subscribe("fine", order_by="-" + text, limit=1) as live:
        live.next(timeout_s=60.0)
        assert text not in live.rows[0]  # as over a connection: what it is ordered by is not shown unless asked for


def test_refused(memory: Any) -> None:
    created(memory)
    for arguments, says in (
        ({"last": "5m"}, "give rollup"),
        ({"rollup": ["app"]}, "is a dict"),
        ({"rollup": {"limit": 1}}, "no 'limit'"),
        ({"rollup": {}, "where": kivi.col("n") > 1}, "given in rollup"),
        ({"rollup": {"last": "5m"}, "last": "5m"}, "twice"),
        ({"rollup": {"step": "7s"}}, "whole slots"),
        ({"rollup": {"by": ["app"]}, "order_by": ["endpoint"]}, "no column"),
    ):
        with pytest.raises(kivi.KiviError, match=says):
            memory.subscribe("fine", **arguments)
    with pytest.raises(kivi.InvalidArgument, match="no aggregate"):
        memory.subscribe("calls", rollup={})
