"""Slots by calendar, aggregates over aggregates and levels, through every database."""

from __future__ import annotations

import datetime as dt
from typing import Any
from zoneinfo import ZoneInfo

import pytest

import kivi

MADRID = ZoneInfo("Europe/Madrid")
COLUMNS = {"app": "string", "endpoint": "int64", "ts": "timestamp", "us": "int64"}


@pytest.fixture(name="calls")
def _calls(db: Any) -> Any:
    """An event an hour, from the day before the clock is set forward."""
    db.create_event_table("calls", event_time="ts", columns=COLUMNS)
    begin = dt.datetime(2026, 3, 28, tzinfo=MADRID).astimezone(dt.UTC)
    db.append(
        "calls",
        [{"app": "ab"[i % 2], "endpoint": i % 3, "ts": begin + dt.timedelta(hours=i), "us": i} for i in range(120)],
    )
    return db


def test_months_and_days_of_a_zone(calls: Any) -> None:
    slot = kivi.time_slot("ts", "1month", tz="Europe/Madrid", name="month")
    calls.create_aggregate("monthly", source="calls", group_by=["app", slot], measures={"n": kivi.count()})
    day = kivi.time_slot("ts", "1d", tz="Europe/Madrid")
    calls.create_aggregate("daily", source="calls", group_by=day, measures={"n": kivi.count()})
    assert calls.describe("monthly")["group_by"] == [
        "app",
        {"name": "month", "source": "ts", "slot": "1month", "tz": "Europe/Madrid"},
    ]
    with calls.snapshot() as snap:
        found = [(row["app"], row["month"].astimezone(MADRID), row["n"]) for row in snap.scan("monthly")]
        months = {month: dt.datetime(2026, month, 1, tzinfo=MADRID) for month in (3, 4)}
        assert found == [("a", months[3], 48), ("a", months[4], 12), ("b", months[3], 47), ("b", months[4], 13)]
        assert [row["n"] for row in snap.scan("daily")] == [24, 23, 24, 24, 24, 1]
        assert snap.get("daily", (dt.datetime(2026, 3, 29, tzinfo=MADRID).astimezone(dt.UTC),))["n"] == 23


def test_aggregates_over_aggregates(calls: Any) -> None:
    measures = {"n": kivi.count(), "total": kivi.sum("us"), "slowest": kivi.max("us")}
    groups = ["app", "endpoint", kivi.time_slot("ts", "5m")]
    calls.create_aggregate("fine", source="calls", group_by=groups, measures=measures)
    group_by = ["app", kivi.time_slot("slot", "1h")]
    more = {"total": kivi.combine("total"), "calls": kivi.sum("n"), "slowest": kivi.max("slowest")}
    calls.create_aggregate("app_1h", source="fine", group_by=group_by, measures=more, derived={"mean": "total / calls"})
    calls.create_aggregate("apps", source="app_1h", group_by=["app"])
    described = calls.describe("apps")
    assert (described["source"], described["declared_source"]) == ("calls", "app_1h")
    assert described["measures"] == {"total": "sum(us)", "calls": "count()", "slowest": "max(us)"}
    with calls.snapshot() as snap:
        assert list(snap.scan("apps")) == [
            {"app": app, "total": sum(range(i, 120, 2)), "calls": 60, "slowest": 118 + i} for i, app in enumerate("ab")
        ]
        assert next(iter(snap.scan("app_1h")))["mean"] == 0.0
    with pytest.raises(kivi.SchemaError, match="7m"):
        calls.create_aggregate("x", source="fine", group_by=[kivi.time_slot("slot", "7m")])
    with pytest.raises(kivi.SchemaError, match="kivi.combine"):
        calls.create_aggregate("x", source="fine", group_by=["app"], measures={"x": kivi.sum("slowest")})
    with pytest.raises(kivi.InvalidArgument, match="source of app_1h"):
        calls.drop("fine")


def test_measures_are_added_to_an_aggregate_over_an_aggregate(calls: Any) -> None:
    groups = ["app", "endpoint", kivi.time_slot("ts", "5m")]
    measures = {"n": kivi.count(), "slowest": kivi.max("us")}
    calls.create_aggregate("fine", source="calls", group_by=groups, measures=measures)
    calls.create_aggregate("apps", source="fine", group_by=["app"], measures={"n": kivi.combine("n")})
    calls.alter_aggregate("fine", add_measures={"latency": kivi.quantiles("us")})
    added = {"latency": kivi.combine("latency"), "slowest": kivi.combine("slowest")}
    calls.alter_aggregate("apps", add_measures=added, derived={"p99": "quantile(latency, 0.99)"})
    calls.create_aggregate("declared", source="calls", group_by=["app"], measures={"latency": kivi.quantiles("us")})
    row, declared = calls.get("apps", ("b",)), calls.get("declared", ("b",))
    assert (row["slowest"], row["latency"], row["p99"]) == (
        119,
        declared["latency"],
        declared["latency"].quantile(0.99),
    )
    for call, says in (
        (kivi.combine("us"), "is no measure of its source 'fine'"),
        (kivi.quantiles("us"), "write kivi.combine"),
        (kivi.sum("us"), "is no measure of its source 'fine'"),
    ):
        with pytest.raises(kivi.SchemaError, match=says):
            calls.alter_aggregate("apps", add_measures={"more": call})


def test_levels_together(calls: Any) -> None:
    told: list[tuple[int, int]] = []
    names = calls.create_aggregates(
        "calls",
        source="calls",
        levels=["app", ["app", "endpoint"]],
        slots=["5m", dt.timedelta(days=1)],
        measures={"n": kivi.count()},
        derived={"twice": "n * 2"},
        history="1h",
        tz="Europe/Madrid",
        progress=lambda *rows: told.append(rows),
    )
    assert names == ["calls_app_5m", "calls_app_1d", "calls_app_endpoint_5m", "calls_app_endpoint_1d"]
    assert calls.tables() == sorted(["calls", *names]) and told[-1] == (120, 120)
    assert calls.describe("calls_app_1d")["history_us"] == 3_600_000_000
    with calls.snapshot() as snap:
        assert [sum(row["twice"] for row in snap.scan(name)) for name in names] == [240] * 4
        assert len(list(snap.scan("calls_app_1d"))) == 11
    with pytest.raises(kivi.AlreadyExists):
        calls.create_aggregates(
            "calls", source="calls", levels=["endpoint", "app"], slots=["5m"], measures={"n": kivi.count()}
        )
    with pytest.raises(kivi.SchemaError, match="twice"):
        calls.create_aggregates("c", source="calls", levels=["app", "app"], slots=["5m"], measures={"n": kivi.count()})
    assert len(calls.tables()) == 5


def test_retention_by_the_widths_of_slots(calls: Any) -> None:
    kept = {"1h": "30d", "1d": dt.timedelta(days=400)}
    names = calls.create_aggregates(
        "kept", source="calls", levels=["app"], slots=["5m", "1h", "1d"], measures={"n": kivi.count()}, retention=kept
    )
    assert [calls.describe(name)["retention_us"] for name in names] == [None, 30 * 86_400_000_000, 400 * 86_400_000_000]
    for wrong in ({"2h": "30d"}, {"1h": "soon"}, {"app": "30d"}):
        with pytest.raises(kivi.InvalidArgument):
            calls.create_aggregates(
                "wrong", source="calls", levels=["app"], slots=["1h"], measures={"n": kivi.count()}, retention=wrong
            )
