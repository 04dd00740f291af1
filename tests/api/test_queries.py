"""Questions through every driver: what they take, what they give, and what they refuse."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import kivi
from kivi import col

T0 = dt.datetime(2026, 3, 20, 10, tzinfo=dt.UTC)
MEASURES = {"n": kivi.count(), "total": kivi.sum("us"), "latency": kivi.quantiles("us", accuracy=0.01)}


def minute(number: float) -> dt.datetime:
    return T0 + dt.timedelta(minutes=number)


def created(db: Any) -> Any:
    db.create_event_table(
        "calls",
        event_time="ts",
        columns={"app": "string", "endpoint": "int64", "ts": "timestamp", "us": "int64", "user": "string"},
    )
    slots = kivi.time_slot("ts", "5m", name="slot")
    derived = {"mean": "total / n", "p50": "quantile(latency, 0.5)"}
    db.create_aggregate("by_app", source="calls", group_by=["app", slots], measures=MEASURES, derived=derived)
    for i, app in enumerate(["shop", "pay"]):
        db.append(
            "calls",
            [
                {
                    "app": app,
                    "endpoint": m % 3,
                    "ts": minute(m),
                    "us": 100 * m + i,
                    "user": None if m % 4 == 3 else "ana",
                }
                for m in range(12)
            ],
        )
    return db


def test_questions_everywhere(db: Any) -> None:
    created(db)
    with db.snapshot() as snap:
        result = snap.query(
            "calls",
            minute(1),
            (minute(9),),
            col("endpoint") != 2,
            ["app", ("long", col("us") >= 500)],
            MEASURES,
            col("n") > 1,
            ["-mean", "app"],
            3,
            1,
            derived={"mean": "total / n", "p50": "quantile(latency, 0.5)"},
            columns=["mean", "app", "n"],
        )
        assert list(result) == [
            {"mean": 650.0, "app": "shop", "n": 2},
            {"mean": 803 / 3, "app": "pay", "n": 3},
            {"mean": 800 / 3, "app": "shop", "n": 3},
        ]
        assert result.to_arrow().schema == pa.schema([("mean", pa.float64()), ("app", pa.string()), ("n", pa.int64())])
        assert "events" in result.explain()
        assert result.complete_since is None
        assert list(snap.query("calls", where=col("us") < 0, measures={"n": kivi.count(), "most": kivi.max("us")})) == [
            {"n": 0, "most": None}
        ]
        nulls = snap.query("calls", group_by=["user"], measures={"n": kivi.count()}, order_by="n")
        assert list(nulls) == [{"user": None, "n": 6}, {"user": "ana", "n": 18}]
        assert list(snap.query("calls", group_by="user", measures={"n": kivi.count()}))[-1]["user"] is None
        late = snap.query("calls", where=col("_commit_ts") >= snap.ts, group_by=["app"], measures={"n": kivi.count()})
        assert list(late) == [{"app": "pay", "n": 12}]
        recent = snap.query(
            "calls",
            where=col("_commit_time") > dt.datetime.now(dt.UTC) - dt.timedelta(hours=1),
            group_by=["_commit_ts"],
            measures={"n": kivi.count(), "at": kivi.max("_commit_time")},
        )
        assert [row["n"] for row in recent] == [12, 12]
        assert all(dt.datetime.now(dt.UTC) - row["at"] < dt.timedelta(hours=1) for row in recent)


def test_one_column_orders_an_answer_from_the_largest_down(db: Any) -> None:
    created(db)
    db.append("calls", [{"app": "pay", "endpoint": 9, "ts": minute(1), "us": None, "user": "bob"}])
    asked = {"measures": {"latency": kivi.quantiles("us")}, "derived": {"p99": "quantile(latency, 0.99)"}}

    def ordered(rows: list[dict[str, Any]], name: str, *, largest: bool) -> list[dict[str, Any]]:
        known = sorted((row for row in rows if row[name] is not None), key=lambda row: row[name], reverse=largest)
        return known + [row for row in rows if row[name] is None]

    with db.snapshot() as snap:
        for ask in (
            lambda **order: list(snap.query("calls", group_by=["app", "endpoint"], **asked, **order)),
            lambda **order: list(snap.windows("calls", size="4m", group_by=["endpoint"], **asked, **order)),
            lambda **order: list(
                snap.query("calls", group_by=["endpoint"], columns=["endpoint", "p99"], **asked, **order)
            ),
        ):
            rows = ask()
            assert rows[-1]["p99"] is None or any(row["p99"] is None for row in rows)
            assert len({row["p99"] for row in rows}) > 2
            for order, largest in (("-p99", True), ("p99", False)):
                expected = ordered(rows, "p99", largest=largest)
                if len({row["p99"] for row in rows}) == len(rows):
                    assert ask(order_by=order) == ask(order_by=[order]) == expected
                    assert ask(order_by=order, offset=1, limit=2) == expected[1:3]
                assert [row["p99"] for row in ask(order_by=order)] == [row["p99"] for row in expected]
        rows = list(snap.scan("by_app"))
        assert list(snap.scan("by_app", order_by="-p50")) == ordered(rows, "p50", largest=True)
        with pytest.raises(kivi.SchemaError, match="quantile"):
            snap.query("calls", group_by=["app"], **asked, order_by="-latency")


def test_windows_everywhere(db: Any) -> None:
    created(db)
    with db.snapshot() as snap:
        sliding = snap.windows(
            "calls", "10m", "5m", group_by=["app"], measures={"n": kivi.count()}, where=col("app") == "pay"
        )
        assert [(row["window_start"], row["window_end"], row["n"]) for row in sliding] == [
            (minute(-5), minute(5), 5),
            (minute(0), minute(10), 10),
            (minute(5), minute(15), 7),
            (minute(10), minute(20), 2),
        ]
        assert "rows of by_app" in sliding.explain()
        days = snap.windows("calls", "1d", tz="Europe/Madrid", measures={"n": kivi.count()}, order_by="window_end")
        midnight = dt.datetime(2026, 3, 19, 23, tzinfo=dt.UTC)
        assert list(days) == [{"window_start": midnight, "window_end": midnight + dt.timedelta(days=1), "n": 24}]
        parts = snap.windows(
            "calls", session="2m", where=~col("endpoint").isin([0]) | (col("us") < 300), measures={"n": kivi.count()}
        )
        assert [(row["window_start"], row["window_end"], row["n"]) for row in parts] == [(minute(0), minute(11), 18)]
        gaps = snap.windows(
            "calls", session="2m", where=col("endpoint") == 0, group_by=["app"], measures={"n": kivi.count()}
        )
        assert len(gaps) == 8
        of_rows = snap.windows("by_app", "10m", measures={"calls": kivi.combine("n")}, having=col("calls") < 5)
        assert list(of_rows) == [{"window_start": minute(10), "window_end": minute(20), "calls": 4}]


def test_aggregates_are_asked_too(db: Any) -> None:
    created(db)
    db.create_table("rows", key={"id": "int64"}, columns={"v": "int64"})
    with db.snapshot() as snap:
        everything = list(snap.query("by_app", order_by="-slot", limit=2, group_by=["app", "slot"]))
        assert [(row["app"], row["slot"], row["n"]) for row in everything] == [
            ("pay", minute(10), 2),
            ("shop", minute(10), 2),
        ]
        assert list(everything[0]) == ["app", "slot", "n", "total", "latency", "mean", "p50"]
        rolled = list(snap.rollup("by_app", by=["app"], step="15m", measures=["n", "mean"]))
        asked = snap.query(
            "by_app",
            group_by=["app", kivi.time_slot("slot", "15m", name="slot")],
            measures={"n": kivi.combine("n"), "all": kivi.sum("total")},
            derived={"mean": "all / n"},
            columns=["app", "slot", "n", "mean"],
        )
        assert list(asked) == rolled
        few = snap.query("by_app", start=minute(5), end=minute(10), where=(col("app") == "pay") & (col("n") > 1))
        assert [row["n"] for row in few] == [5]
    with pytest.raises(kivi.InvalidArgument, match="scan its rows"), db.snapshot() as snap:
        snap.query("rows", measures={"n": kivi.count()})
    db.create_view("by_value", source="rows", key=["v", "id"])
    with pytest.raises(kivi.InvalidArgument, match="scan its rows"), db.snapshot() as snap:
        snap.query("by_value", measures={"n": kivi.count()})


def test_scans_in_an_order(db: Any) -> None:
    created(db)
    db.create_table("rows", key={"id": "int64"}, columns={"v": "int64", "on": "bool", "name": "string"})
    values = [(i, None if i % 5 == 4 else i * 7 % 11, i % 3 == 0, f"n{i % 4}") for i in range(30)]
    with db.transaction() as tx:
        for i, v, on, name in values[:20]:
            tx.put("rows", (i,), v=v, on=on, name=name)
    with db.transaction() as tx:
        for i, v, on, name in values[20:]:
            tx.put("rows", (i,), v=v, on=on, name=name)
        own = list(tx.scan("rows", order_by=["-v", "name"], limit=5, offset=2))  # own writes included
    by_value = sorted(values, key=lambda row: (row[1] is None, -(row[1] or 0), row[3]))
    assert [row["id"] for row in own] == [row[0] for row in by_value[2:7]]
    with db.snapshot() as snap:
        assert [row["id"] for row in snap.scan("rows", order_by=["-v", "name"])] == [row[0] for row in by_value]
        down = sorted(values, key=lambda row: (row[2], row[3]), reverse=True)
        down.sort(key=lambda row: (not row[2], [-ord(c) for c in row[3]]))
        assert [row["id"] for row in snap.scan("rows", order_by=["-on", "-name"], limit=9)] == [
            row[0] for row in down[:9]
        ]
        assert [row["id"] for row in snap.scan("rows", offset=27)] == [27, 28, 29]
        assert [row["id"] for row in snap.scan("rows", offset=2, limit=3, reverse=True)] == [27, 26, 25]
        assert list(snap.scan("rows", offset=30, order_by="id")) == list(snap.scan("rows", offset=2**62)) == []
        few = snap.to_arrow("rows", where=col("v") > 3, columns=["name"], order_by="-id", limit=2)
        assert few.to_pydict() == {
            "name": [f"n{i % 4}" for i, v, *_ in reversed(values) if v is not None and v > 3][:2]
        }
        events = snap.to_arrow("calls", columns=["app"], order_by=["-us", "app"], limit=3, offset=1)
        assert events["app"].to_pylist() == ["shop", "pay", "shop"]
        slots = snap.scan("by_app", columns=["slot"], order_by=["-quantile(latency, 0.9)"], limit=1)
        assert [row["slot"] for row in slots] == [minute(10)]
        assert sum(batch.num_rows for batch in snap.scan_batches("calls", order_by="user")) == 24
        for wrong, says in (({"order_by": "nowhere"}, "no column"), ({"order_by": ["v", "-v"]}, "twice")):
            with pytest.raises(kivi.KiviError, match=says):
                list(snap.scan("rows", **wrong))
        with pytest.raises(kivi.SchemaError, match="has no order"):
            list(snap.scan("by_app", order_by="latency"))
        with pytest.raises(kivi.InvalidArgument, match="reverse"):
            snap.scan("rows", order_by="v", reverse=True)


@pytest.fixture
def memory() -> Iterator[Any]:
    with kivi.open() as db:
        yield created(db)


COUNT = {"measures": {"n": kivi.count()}}


@pytest.mark.parametrize(
    ("table", "arguments", "error", "says"),
    [
        ("calls", {}, kivi.SchemaError, "at least one measure"),
        ("calls", {"measures": {"n": 3}}, kivi.SchemaError, "measure 'n'"),
        ("calls", {"measures": {"n": kivi.sum("app")}}, kivi.SchemaError, "needs int64"),
        ("calls", {**COUNT, "group_by": ["nowhere"]}, kivi.SchemaError, "no column 'nowhere'"),
        ("calls", {**COUNT, "group_by": [col("us")]}, kivi.SchemaError, "pairs like"),
        ("calls", {**COUNT, "group_by": ["app", "app"]}, kivi.SchemaError, "twice"),
        ("calls", {**COUNT, "group_by": [("n", col("us"))]}, kivi.SchemaError, "twice"),
        ("calls", {**COUNT, "group_by": [kivi.time_slot("us", "5m")]}, kivi.SchemaError, "needs a timestamp"),
        ("calls", {**COUNT, "order_by": "-us"}, kivi.SchemaError, "no column 'us'"),
        ("calls", {**COUNT, "order_by": ["n", "-n"]}, kivi.InvalidArgument, "twice"),
        ("calls", {**COUNT, "order_by": [3]}, kivi.InvalidArgument, "order_by names columns"),
        ("calls", {"measures": MEASURES, "order_by": "latency"}, kivi.SchemaError, "has no order"),
        ("calls", {**COUNT, "having": col("us") > 1}, kivi.SchemaError, "no column 'us'"),
        ("calls", {**COUNT, "columns": ["us"]}, kivi.SchemaError, "no column 'us'"),
        ("calls", {**COUNT, "derived": {"x": "us / n"}}, kivi.SchemaError, "not a numeric column"),
        ("calls", {**COUNT, "where": col("nowhere") > 1}, kivi.SchemaError, "no column"),
        ("calls", {**COUNT, "start": "soon"}, kivi.SchemaError, "timestamp"),
        ("calls", {**COUNT, "limit": -1}, kivi.InvalidArgument, "limit"),
        ("calls", {**COUNT, "offset": "a"}, kivi.InvalidArgument, "offset"),
        ("by_app", {**COUNT}, kivi.SchemaError, "kivi.combine"),
        ("by_app", {"group_by": ["endpoint"]}, kivi.SchemaError, "no key column"),
        ("by_app", {"group_by": [kivi.time_slot("slot", "7m")]}, kivi.InvalidArgument, "whole slots"),
        ("by_app", {"start": minute(1)}, kivi.InvalidArgument, "within a slot"),
    ],
)
def test_refused(memory: Any, table: str, arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with memory.snapshot() as snap, pytest.raises(error, match=says):
        list(snap.query(table, **arguments))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "have a size"),
        ({"size": "5m", "session": "5m"}, "have a size"),
        ({"session": "5m", "slide": "1m"}, "slide and tz"),
        ({"size": "1month", "slide": "1d"}, "cannot slide"),
        ({"size": "5m", "slide": "6m"}, "in no window"),
        ({"size": "soon"}, "not a duration"),
    ],
)
def test_windows_refused(memory: Any, arguments: dict[str, Any], says: str) -> None:
    with memory.snapshot() as snap, pytest.raises(kivi.InvalidArgument, match=says):
        snap.windows("calls", **arguments, **COUNT)


def test_too_many_groups_are_refused() -> None:
    with kivi.open(query_bytes=100_000) as db:
        created(db)
        db.append("calls", [{"app": "x", "endpoint": i, "ts": minute(i / 100), "us": i} for i in range(5_000)])
        with db.snapshot() as snap:
            with pytest.raises(kivi.ResourceExhausted, match="query_bytes") as failed:
                snap.query("calls", group_by=["us"], measures=MEASURES)
            assert failed.value.details["limit"] == "query_bytes"
            with pytest.raises(kivi.ResourceExhausted, match="query_bytes"):
                snap.windows("calls", "10m", "1s", measures={"n": kivi.count()})
            with pytest.raises(kivi.ResourceExhausted, match="give a limit"):
                list(snap.scan("calls", order_by="us"))
            assert [row["us"] for row in snap.scan("calls", order_by="-us", limit=2)] == [4_999, 4_998]
            assert len(snap.query("calls", group_by=["app"], measures=MEASURES)) == 3


def test_a_sum_that_fits_nowhere_fails_no_question_that_leaves_it_out(db: Any) -> None:
    """R10: it is OutOfRange where it is asked for, or decides."""
    columns = {"ts": "timestamp", "g": "int64", "x": "int64"}
    db.create_event_table("wide", event_time="ts", columns=columns)
    rows = [(1, 2**62), (1, 2**62), (2, 5), (None, 7), (None, 2**62)]
    db.append("wide", [{"ts": T0, "g": g, "x": x} for g, x in rows])
    g, total = kivi.col("g"), kivi.col("total")
    asked = {"group_by": ["g"], "measures": {"total": kivi.sum("x")}, "derived": {"half": "total / 2"}}
    with db.snapshot() as snap:
        for having in (g == 2, (g == 2) & (total > 0), (total > 0) & (g == 2), (kivi.col("half") > 0) & (g == 2)):
            assert list(snap.query("wide", **asked, having=having)) == [{"g": 2, "total": 5, "half": 2.5}]
            found = snap.windows("wide", size="5m", **asked, having=having, columns=["g", "total"])
            assert list(found) == [{"g": 2, "total": 5}]
        assert list(snap.query("wide", **asked, having=g == 3)) == []
        for failing in (None, total > 0, (g == 2) | (total > 0)):
            with pytest.raises(kivi.OutOfRange, match="total"):
                list(snap.query("wide", **asked, having=failing))
