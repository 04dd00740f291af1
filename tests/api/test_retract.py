"""Retraction over each kind of database: what users see of it (R22). Whether it is right: ``tests/store``."""

from __future__ import annotations

from typing import Any

import pytest

import kivi

TS = 1_700_000_100_000_000


def fill(db: Any) -> list[int]:
    db.create_event_table("calls", event_time="ts", columns={"user": "string", "ts": "timestamp", "us": "int64"})
    group_by = ["user", kivi.time_slot("ts", "5m", name="slot")]
    measures = {"calls": kivi.count(), "us": kivi.sum("us"), "most": kivi.max("us")}
    db.create_aggregate("by_user", source="calls", group_by=group_by, measures=measures)
    db.create_aggregate("totals", source="calls", group_by=["user"], measures={"us": kivi.sum("us")})
    return [
        db.append("calls", [event("ana", 1), event("bob", 2), event("ana", 3)]),
        db.append("calls", [event("bob", 40, 700)]),
    ]


def event(user: str, us: int, second: int = 0) -> dict[str, Any]:
    return {"user": user, "ts": TS + second * 1_000_000, "us": us}


def users(reads: Any, table: str = "by_user") -> list[tuple[Any, ...]]:
    return [(row["user"], row["us"], *([row["most"]] if "most" in row else [])) for row in reads.scan(table)]


def events(reads: Any) -> list[int]:
    return [row["us"] for row in reads.scan("calls")]


def test_retract(db: Any) -> None:
    fill(db)
    with db.snapshot() as before, db.transaction() as tx:
        assert tx.retract("calls", where=kivi.col("user") == "ana") == 2
        assert tx.retract("calls", where=kivi.col("us") < 3) == 1  # the other one was retracted above
        assert events(tx) == [40]
        db.append("calls", [event("ana", 9)])
        tx.commit()
        assert events(before) == [1, 2, 3, 40]
        assert users(before) == [("ana", 4, 3), ("bob", 2, 2), ("bob", 40, 40)]
    with db.snapshot() as now:
        assert events(now) == [40, 9]
        assert users(now) == [("ana", 9, 9), ("bob", 40, 40)]
        assert users(now, "totals") == [("ana", 9), ("bob", 40)]
        assert now.summary("calls", {"n": kivi.count(), "least": kivi.min("us")}) == {"n": 2, "least": 9}
        assert now.get("totals", ("bob",)) == {"user": "bob", "us": 40}


@pytest.mark.parametrize("where", ["hot", "settled"])
def test_what_one_commit_brought_is_retracted_by_its_hidden_columns(db: Any, where: str) -> None:
    first, second = fill(db)
    if where == "settled":
        db.consolidate()
        if hasattr(db, "store"):
            db.store.settle()
    with db.transaction() as tx:
        assert tx.retract("calls", where=(kivi.col("_commit_ts") == first) & (kivi.col("user") == "ana")) == 2
        assert tx.retract("calls", where=kivi.col("_commit_ts") == first) == 1
        assert tx.retract("calls", where=kivi.col("_commit_time") < 0) == 0
    with db.snapshot() as now:
        assert events(now) == [40]
        assert users(now, "totals") == [("bob", 40)]
        assert [row["_commit_ts"] for row in now.scan("calls", columns=["_commit_ts"])] == [second]


def test_a_row_without_events_is_absent(db: Any) -> None:
    fill(db)
    with db.transaction() as tx:
        assert tx.retract("calls", start=(TS,), end=(TS + 1,)) == 3
    with db.snapshot() as now:
        assert users(now) == [("bob", 40, 40)]
        assert now.get("totals", ("ana",)) is None
    db.append("calls", [event("ana", 5)])
    with db.snapshot() as now:
        assert now.get("totals", ("ana",)) == {"user": "ana", "us": 5}


def test_what_is_refused(db: Any) -> None:
    fill(db)
    db.create_table("rows", key={"k": "int64"}, columns={"v": "int64"})
    with pytest.raises(kivi.InvalidArgument, match="only events"), db.transaction() as tx:
        tx.retract("rows")
    with pytest.raises(kivi.InvalidArgument, match="in a transaction of its own"), db.transaction() as tx:
        tx.append("calls", [event("ana", 5)])
        tx.retract("calls")
    with pytest.raises(kivi.InvalidArgument, match="in another one"), db.transaction() as tx:
        assert tx.retract("calls") == 4
        tx.append("calls", [event("ana", 5)])
        tx.commit()
    with pytest.raises(kivi.InvalidArgument, match="computed again"), db.transaction() as tx:
        assert tx.retract("calls") == 4
        users(tx)
    with pytest.raises(kivi.SchemaError), db.transaction() as tx:
        tx.retract("calls", where=kivi.col("nobody") == 1)
    with db.snapshot() as now:
        assert events(now) == [1, 2, 3, 40]


def test_two_of_one_table_conflict(db: Any) -> None:
    fill(db)
    with db.transaction() as first, pytest.raises(kivi.Conflict) as refused, db.transaction() as second:
        assert first.retract("calls", where=kivi.col("user") == "ana") == 2
        assert second.retract("calls", where=kivi.col("user") == "bob") == 2
        first.commit()
        second.commit()
    assert refused.value.table == "calls"
    with db.snapshot() as now:
        assert events(now) == [2, 40]


def test_nothing_matches(db: Any) -> None:
    fill(db)
    with db.transaction() as tx:
        assert tx.retract("calls", where=kivi.col("user") == "eve") == 0
    with db.snapshot() as now:
        assert events(now) == [1, 2, 3, 40]


def test_a_tail_delivers_what_each_retraction_removed_where_that_was_committed(db: Any) -> None:
    first, _ = fill(db)

    def retracted(user: str) -> int:
        with db.transaction() as tx:
            tx.retract("calls", where=kivi.col("user") == user)
        return int(tx.commit_ts)

    ana = retracted("ana")
    between = db.append("calls", [event("ana", 9)])
    bob = retracted("bob")
    after = db.append("calls", [event("bob", 10)])
    with db.snapshot() as now:
        tail = [
            (row["us"], row["_commit_ts"], row["_retracted"])
            for row in now.changes("calls", since=first, retractions="deliver")
        ]
        assert tail == [(1, ana, True), (3, ana, True), (9, between, False), (2, bob, True), (10, after, False)]


def test_tails(db: Any) -> None:
    first, second = fill(db)
    with db.transaction() as tx:
        tx.retract("calls", where=kivi.col("user") == "bob")
    at = tx.commit_ts
    third = db.append("calls", [event("ana", 9)])
    with db.snapshot() as now:

        def tail(since: int, retractions: str = "fail") -> list[tuple[Any, ...]]:
            rows = now.changes("calls", since=since, retractions=retractions)
            return [
                (row["us"], row["_commit_ts"], *([row["_retracted"]] if "_retracted" in row else [])) for row in rows
            ]

        assert tail(0) == [(1, first), (3, first), (9, third)]  # it has read none of them before
        for since in (first, second):
            with pytest.raises(kivi.EventsRetracted, match="retracted") as met:
                tail(since)
            assert met.value.details["retracted_at"] == at
        ana, bob = (kivi.col("user") == name for name in ("ana", "bob"))
        assert [row["us"] for row in now.changes("calls", since=second, where=ana)] == [9]  # it has read none of them
        for where in bob, kivi.col("us") == 40, kivi.col("us") > 0:
            with pytest.raises(kivi.EventsRetracted):
                list(now.changes("calls", since=second, where=where))
        assert tail(at) == [(9, third)]
        assert tail(first, "ignore") == [(9, third)]
        assert tail(first, "deliver") == [(2, at, True), (9, third, False)]
        assert tail(second, "deliver") == [(2, at, True), (40, at, True), (9, third, False)]
        assert tail(at, "deliver") == [(9, third, False)]
        delivered = now.changes("calls", since=second, where=ana, retractions="deliver", commit_ts=False)
        assert [(row["us"], row["_retracted"]) for row in delivered] == [(9, False)]
        with pytest.raises(kivi.InvalidArgument, match="skip and take"):
            list(now.changes("calls", since=first, retractions="deliver", skip=1))
        with pytest.raises(kivi.InvalidArgument, match="fail"):
            tail(first, "perhaps")
        rows = [(row["user"], row["us"]) for row in now.changes("by_user", since=second)]
        assert rows == [("ana", 13), ("bob", None), ("bob", None)]  # in two slots
        told = [(row["user"], row["_removed"]) for row in now.changes("by_user", since=second, removed=True)]
        assert told == [("ana", False), ("bob", True), ("bob", True)]


@pytest.mark.parametrize("db", ["memory", "sync"], indirect=True)
@pytest.mark.parametrize("retractions", ["fail", "ignore", "deliver"])
def test_subscriptions_to_events(db: Any, retractions: str) -> None:
    fill(db)
    with db.subscribe("calls", since=0, retractions=retractions, interval_ms=0) as live:
        updates = iter(live)
        told: list[tuple[str, int]] = []
        while len(told) < 4:
            told += [(change.kind, change.row["us"]) for change in next(updates).changes]
        assert told == [("add", 1), ("add", 2), ("add", 3), ("add", 40)]
        with db.transaction() as tx:
            tx.retract("calls", where=kivi.col("user") == "bob")
        db.append("calls", [event("ana", 9)])
        if retractions == "fail":
            with pytest.raises(kivi.EventsRetracted):
                while True:
                    next(updates)
            return
        removed = [("remove", 2), ("remove", 40)] if retractions == "deliver" else []
        told.clear()
        while len(told) < len(removed) + 1:
            told += [(change.kind, change.row["us"]) for change in next(updates).changes]
        assert told == [*removed, ("add", 9)]


@pytest.mark.parametrize("db", ["memory", "sync"], indirect=True)
def test_subscriptions_go_on_when_others_events_are_retracted(db: Any) -> None:
    """Than those that they select, which are all that they were told of: of events, and of matches."""
    fill(db)
    where = kivi.col("user") == "ana"
    pattern = kivi.pattern("A", define={}, measures={"us": kivi.first("us")}, within="1s")
    with (
        db.subscribe("calls", since=0, where=where, interval_ms=0) as events,
        db.subscribe_matches("calls", pattern, since=0, where=where, lateness="0s", interval_ms=0) as matches,
    ):
        follow = [(iter(live), list[int]()) for live in (events, matches)]

        def told(*numbers: int) -> None:
            for updates, found in follow:
                while not set(numbers) <= set(found):
                    found += [change.row["us"] for change in next(updates).changes]

        told(1, 3)
        with db.transaction() as tx:
            tx.retract("calls", where=kivi.col("user") == "bob")
        db.append("calls", [event("ana", 9)])
        told(9)
        assert {us for _, found in follow for us in found} == {1, 3, 9}
        with db.transaction() as tx:
            tx.retract("calls", where=kivi.col("us") == 3)
        for updates, _ in follow:
            with pytest.raises(kivi.EventsRetracted):
                while True:
                    next(updates)


@pytest.mark.parametrize("db", ["memory", "sync"], indirect=True)
def test_subscriptions_to_states(db: Any) -> None:
    fill(db)
    with (
        db.subscribe("by_user", interval_ms=0) as rows,
        db.subscribe("calls", order_by="us", interval_ms=0) as newest,
    ):
        of_rows, of_events = iter(rows), iter(newest)
        assert next(of_rows).reset and next(of_events).reset
        with db.transaction() as tx:
            tx.retract("calls", where=kivi.col("us").isin([1, 2]))
        while [(row["user"], row["us"]) for row in rows.rows] != [("ana", 3), ("bob", 40)]:
            next(of_rows)
        while [row["us"] for row in newest.rows] != [3, 40]:
            next(of_events)


def test_what_is_left_of_them_goes(db: Any) -> None:
    fill(db)
    statistics = db.describe("calls")["statistics"]
    assert (statistics["retracted_in_log"], statistics["retracted_in_blocks"]) == (0, 0)
    with db.transaction() as tx:
        tx.retract("calls", where=kivi.col("user") == "bob")
    statistics = db.describe("calls")["statistics"]
    assert (statistics["rows"], statistics["retracted_in_log"], statistics["retracted_in_blocks"]) == (2, 2, 2)
