"""``alter_table`` and ``alter_aggregate`` over every database, beside others that know the table as it was."""

from __future__ import annotations

from typing import Any

import pytest

import kivi
from kivi.errors import InvalidArgument, NotFound, SchemaError, Unavailable
from kivi.model.declarations import with_columns


def filled(db: Any) -> None:
    db.create_table("t", key={"id": "int64"}, columns={"v": "string", "n": kivi.sum("int64")})
    db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "a": "int64", "x": "int64"})
    db.create_aggregate("agg", source="e", group_by=["a"], measures={"n": kivi.count()}, derived={"twice": "n * 2"})
    with db.transaction() as tx:
        tx.put("t", (1,), v="old")
        tx.append("e", [{"ts": i, "a": 0, "x": i} for i in range(100)])


def test_columns_and_measures_are_added(db: Any) -> None:
    filled(db)
    db.alter_table("t", add_columns={"m": kivi.max("float64"), "calls": kivi.count(), "w": "decimal(9,2)"})
    db.alter_table("e", {"s": "string"})
    assert list(db.describe("t")["columns"].values()) == [
        "string", "sum(int64)", "max(float64)", "sum(int64)", "decimal(9,2)",
    ]  # fmt: skip
    told: list[tuple[int, int]] = []
    db.alter_aggregate(
        "agg",
        add_measures={"sx": kivi.sum("x"), "ns": kivi.count("s")},
        derived={"avg": "sx / n"},
        progress=lambda done, total: told.append((done, total)),
    )
    assert told[-1] == (100, 100)
    db.alter_aggregate("agg", add_measures={"later": kivi.max("x")}, backfill=False)
    db.append("e", [{"ts": 5, "a": 0, "x": 7, "s": "s"}])
    with db.transaction() as tx:
        tx.delta("t", (1,), m=2.5, calls=1)
        tx.put("t", (2,), w=1)
    with db.snapshot() as snap:
        assert list(snap.scan("t")) == [
            {"id": 1, "v": "old", "n": 0, "m": 2.5, "calls": 1, "w": None},
            {"id": 2, "v": None, "n": 0, "m": None, "calls": 0, "w": 1},
        ]
        row = {"a": 0, "n": 101, "sx": 4957, "ns": 1, "later": 7, "twice": 202.0, "avg": 4957 / 101}
        assert snap.get("agg", (0,)) == row and list(snap.scan("agg")) == [row]
        assert [event["s"] for event in snap.scan("e")] == [None] * 100 + ["s"]
    described = db.describe("agg")
    since = described["measures_since"]
    assert since.pop("later").keys() == {"commit_ts"}
    assert since == {"n": None, "sx": None, "ns": None}
    assert described["derived"] == {"twice": "n * 2", "avg": "sx / n"}


def test_errors_are_typed(db: Any) -> None:
    filled(db)
    for call, error in (
        (lambda: db.alter_table("none", {"c": "int64"}), NotFound),
        (lambda: db.alter_aggregate("none", {"c": kivi.count()}), NotFound),
        (lambda: db.alter_table("t", {"v": "int64"}), SchemaError),
        (lambda: db.alter_table("e", {"c": kivi.sum("int64")}), SchemaError),
        (lambda: db.alter_table("t", {}), SchemaError),
        (lambda: db.alter_table("t", 5), SchemaError),
        (lambda: db.alter_table("agg", {"c": "int64"}), InvalidArgument),
        (lambda: db.alter_aggregate("t", {"c": kivi.count()}), InvalidArgument),
        (lambda: db.alter_aggregate("agg", {"twice": kivi.count()}), SchemaError),
        (lambda: db.alter_aggregate("agg", {"c": "count"}), SchemaError),
        (lambda: db.alter_aggregate("agg", {}), SchemaError),
    ):
        with pytest.raises(error):
            call()
    assert db.describe("t")["columns"] == {"v": "string", "n": "sum(int64)"}


def test_a_role_is_described_and_changes_nothing_else(db: Any) -> None:
    filled(db)
    columns = {"ts": "timestamp", "trace_id": "bytes", "x": "int64"}
    db.create_event_table("spans", event_time="ts", columns=columns)
    slots = ["x", kivi.time_slot("ts", "5m")]
    db.create_aggregate("slots", source="spans", group_by=slots, measures={"n": kivi.count()}, history="1h")
    before = {name: db.describe(name) for name in ("spans", "slots", "t")}
    with db.snapshot() as snap:
        db.alter_table("spans", role="traces")
        db.alter_table("slots", role="endpoints")
        db.alter_table("slots", role="services")
        assert list(snap.scan("slots")) == []  # the table was there at that snapshot, and is
    assert db.describe("spans") == before["spans"] | {"role": "traces"}
    assert db.describe("slots") == before["slots"] | {"role": "services"}
    db.alter_table("slots", role="")
    assert db.describe("slots") == before["slots"]
    db.alter_table("spans", {"y": "int64"}, role="")
    assert "role" not in db.describe("spans") and "y" in db.describe("spans")["columns"]
    for name, wanted, error, text in (
        ("slots", {"role": "rooms"}, InvalidArgument, "a role is services"),
        ("slots", {}, InvalidArgument, "nothing to alter"),
        ("slots", {"role": "traces"}, SchemaError, "has no traces"),
        ("e", {"role": "traces"}, SchemaError, "has no traces"),
        ("agg", {"role": "names"}, SchemaError, "a row table of one key column"),
        ("slots", {"role": "anomalies"}, SchemaError, "has no anomalies"),
        ("slots", {"role": "costs"}, SchemaError, "a measure .cost."),
        ("agg", {"role": "models"}, SchemaError, "aggregate's with a time slot"),
        ("t", {"role": "services"}, SchemaError, "aggregate's with a time slot"),
    ):
        with pytest.raises(error, match=text):
            db.alter_table(name, **wanted)
    assert db.describe("t") == before["t"]


def test_a_snapshot_of_before_sees_the_tables_as_they_were(db: Any) -> None:
    filled(db)
    with db.snapshot() as before:
        assert list(before.scan("t")) == [{"id": 1, "v": "old", "n": 0}]
        db.alter_table("t", {"w": "int64"})
        db.alter_aggregate("agg", {"sx": kivi.sum("x")}, derived={"avg": "sx / n"})
        with db.transaction() as tx:
            tx.put("t", (1,), w=5)
        assert list(before.scan("t")) == [{"id": 1, "v": "old", "n": 0}]
        assert before.get("agg", (0,)) == {"a": 0, "n": 100, "twice": 200.0}
    with db.snapshot() as now:
        assert list(now.scan("t")) == [{"id": 1, "v": "old", "n": 0, "w": 5}]


def test_clients_that_described_the_table_before_go_on(server: Any) -> None:
    """They send and get the columns that they know, until they ask for others, or a subscription tells them of some."""
    with (
        server.connect() as db,
        server.connect() as other,
        server.connect() as told,
    ):
        for name in sorted(db.tables(), key=lambda name: db.describe(name)["kind"]):
            db.drop(name)
        filled(db)
        row = {"id": 1, "v": "old", "n": 0}
        with other.snapshot() as snap:
            assert list(snap.scan("t")) == [row]
            assert snap.get("agg", (0,)) == {"a": 0, "n": 100, "twice": 200.0}
            assert len(list(snap.scan("e"))) == 100
        with told.subscribe("t") as rows, told.subscribe("e") as tail:
            changes, events = iter(rows), iter(tail)

            def followed(count: int) -> list[dict[str, Any]]:
                found: list[dict[str, Any]] = []
                while len(found) < count:
                    found += [change.row for change in next(events).changes if change.row is not None]
                return found

            assert [change.row for change in next(changes).changes] == [row]
            assert [one.keys() for one in followed(100)] == [{"ts", "a", "x"}] * 100
            db.alter_table("t", {"w": "int64"})
            db.alter_table("e", {"s": "string"})
            db.alter_aggregate("agg", {"sx": kivi.sum("x")})
            with db.transaction() as tx:
                tx.put("t", (1,), w=5)
                tx.put("t", (2,), v="new")
                tx.append("e", [{"ts": 1, "a": 0, "x": 0, "s": "s"}])
            seen: dict[int, Any] = {}
            while 2 not in seen:
                seen |= {change.row["id"]: change.row for change in next(changes).changes if change.row}
            assert seen[2] == {"id": 2, "v": "new", "n": 0, "w": None}
            [event] = followed(1)
            assert event.keys() == {"ts", "a", "x", "s"}
            assert event["s"] == "s"
        other.append("e", [{"ts": 1, "a": 0, "x": 1}] * 50)
        with other.transaction() as tx:
            tx.delta("t", (1,), n=1)
        with other.snapshot() as snap:
            assert snap.get("t", (1,)) == {"id": 1, "v": "old", "n": 1}
            assert snap.to_arrow("t").to_pylist()[0] == {"id": 1, "v": "old", "n": 1}
            assert list(snap.scan("agg")) == [{"a": 0, "n": 151, "twice": 302.0}]
            assert snap.get("agg", (0,), columns=["sx"]) == {"sx": 5000}
            assert snap.get("t", (1,)) == {"id": 1, "v": "old", "n": 1}
        assert other.get("t", (1,)) in ({"id": 1, "v": "old", "n": 1}, {"id": 1, "v": "old", "n": 1, "w": 5})
        other.describe("t")
        assert other.get("t", (1,)) == {"id": 1, "v": "old", "n": 1, "w": 5}


def test_a_subscription_waits_for_a_node_that_does_not_know_the_columns_yet(server: Any) -> None:
    with server.connect() as db:
        for name in sorted(db.tables(), key=lambda name: db.describe(name)["kind"]):
            db.drop(name)
        filled(db)
        db._core.schemas["t"] = with_columns(db._core.schemas["t"], {"later": "int64"})  # as another node told it
        db._core.timeout_s = 0.5
        with pytest.raises(Unavailable, match="was altered"):
            db.subscribe("t")
