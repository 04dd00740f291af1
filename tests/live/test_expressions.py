"""Subscriptions whose predicates calculate: the same rows as a scan, and one that fails ends alone."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from tests.waiting import wait_until

col = kivi.col
T0 = dt.datetime(2026, 7, 1, tzinfo=dt.UTC)
LARGE = 2**62


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Any]:
    with kivi.open(tmp_path / "store") as db:
        db.create_table("rows", key={"id": "int64"}, columns={"a": "int64", "b": "int64"})
        db.create_event_table("events", event_time="ts", columns={"id": "int64", "a": "int64", "ts": "timestamp"})
        yield db


def shown(live: Any) -> list[int]:
    live.next(0.05)
    return sorted(row["id"] for row in live.rows)


def test_rows_follow_a_predicate_of_two_columns(db: Any) -> None:
    where = (col("a") > col("b")) | (kivi.coalesce(col("a"), col("b")) * 2 == 10)
    with db.subscribe("rows", where=where, interval_ms=1) as live:
        for step in range(30):
            with db.transaction() as tx:
                tx.put("rows", (step % 7,), a=None if step % 5 == 0 else step % 11, b=step % 6)
        with db.snapshot() as snap:
            wanted = sorted(row["id"] for row in snap.scan("rows", where=where))
            every = list(snap.scan("rows"))
        assert wanted == [
            row["id"]
            for row in every
            if (row["a"] is not None and row["a"] > row["b"]) or (row["b"] if row["a"] is None else row["a"]) == 5
        ]
        wait_until(lambda: shown(live) == wanted)


@pytest.mark.parametrize("table", ["rows", "events"])
def test_one_that_leaves_its_range_ends_and_the_others_go_on(db: Any, table: str) -> None:
    def write(i: int, a: int) -> None:
        with db.transaction() as tx:
            if table == "rows":
                tx.put("rows", (i,), a=a)
            else:
                tx.append("events", [{"id": i, "a": a, "ts": T0}])

    arguments: dict[str, Any] = {"order_by": ["id"], "interval_ms": 1}
    with (
        db.subscribe(table, where=col("a") * 4 > 0, **arguments) as failing,
        db.subscribe(table, where=(col("a") * 4 > 0) & (col("a") < LARGE), **arguments) as guarded,
        db.subscribe(table, where=col("a") > 0, **arguments) as plain,
    ):
        write(1, 5)
        for live in (failing, guarded, plain):
            wait_until(lambda live=live: shown(live) == [1])  # type: ignore[misc]
        write(2, LARGE)
        write(3, 6)
        wait_until(lambda: shown(plain) == [1, 2, 3])
        wait_until(lambda: shown(guarded) == [1, 3])
        with pytest.raises(kivi.OutOfRange, match=r"\(a \* 4\) leaves the range of int64"):
            while True:
                failing.next(1.0)


def test_a_durable_subscription_keeps_its_predicate(db: Any) -> None:
    where = col("a") + col("id") > kivi.case((col("id") > 1, 5), otherwise=0)
    arguments: dict[str, Any] = {"where": where, "user": "ada", "interval_ms": 1, "since": 0}
    db.append("events", [{"id": i, "a": i, "ts": T0} for i in range(5)])
    with db.subscribe("events", name="first", **arguments) as live:
        assert ids(live, 3) == [1, 3, 4]
    others = {"where": col("id") >= 0, "user": "ada", "interval_ms": 1, "since": 0, "unseen": True}
    with db.subscribe("events", name="second", **others) as live:
        assert 2 in ids(live, 2)


def ids(live: Any, count: int) -> list[int]:
    """Of the first so many events, or some more."""
    found: list[int] = []

    def complete() -> bool:
        update = live.next(0.05)
        if update is not None:
            found.extend(change.row["id"] for change in update.changes)
        return len(found) >= count

    wait_until(complete)
    return found
