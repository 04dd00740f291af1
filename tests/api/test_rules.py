"""Rules, wherever the database is (R25): what is raised, from which events, and what is refused."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import pytest

import kivi

SLOT_US = 300_000_000
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@pytest.fixture
def calls(db: Any) -> Any:
    db.create_event_table(
        "calls",
        event_time="ts",
        columns={"endpoint": "int64", "ts": "timestamp", "took_us": "int64", "model": "string", "tokens": "int64"},
    )
    db.create_aggregate(
        "by_slot",
        source="calls",
        group_by=["endpoint", kivi.time_slot("ts", "5m", name="slot")],
        measures={"total": kivi.sum("took_us"), "calls": kivi.count(), "spread": kivi.stddev("took_us")},
        derived={"avg_us": "total / calls"},
    )
    db.create_event_table(
        "anomalies",
        event_time="ts",
        columns={"endpoint": "int64", "ts": "timestamp", "took_us": "int64", "avg_us": "float64"},
    )
    return db


def call(endpoint: int, slot: int, took_us: int, **more: Any) -> dict[str, Any]:
    return {
        "endpoint": endpoint,
        "ts": EPOCH + dt.timedelta(microseconds=slot * SLOT_US + 1),
        "took_us": took_us,
        **more,
    }


def events(db: Any, table: str) -> list[dict[str, Any]]:
    with db.snapshot() as snapshot:
        found: list[dict[str, Any]] = snapshot.to_arrow(table).to_pylist()
        return found


def append_each(db: Any, rows: list[dict[str, Any]]) -> list[int]:
    """Each event as a commit of its own; their timestamps."""
    if hasattr(db, "_target"):

        async def go() -> list[int]:
            async with db._target.appender("calls", each=True) as app:
                futures = [app.append(**row) for row in rows]
            return [await future for future in futures]

        return db._loop.run_until_complete(go())
    with db.appender("calls", each=True) as app:
        futures = [app.append(**row) for row in rows]
    return [future.result() for future in futures]


def create(db: Any, name: str = "slow", **other: Any) -> None:
    wanted = {
        "source": "calls",
        "against": kivi.previous_slot("by_slot", by=["endpoint"]),
        "where": kivi.col("took_us") > 2 * kivi.ref("avg_us"),
        "into": "anomalies",
        "select": {"avg_us": kivi.ref("avg_us")},
    }
    db.create_rule(name, **{**wanted, **other})


def test_events_are_raised_in_their_own_commit_and_counted(calls: Any) -> None:
    create(calls)
    calls.append("calls", [call(251, 0, 10_000), call(251, 0, 20_000)])
    assert events(calls, "anomalies") == []
    commit_ts = calls.append("calls", [call(251, 1, 121_000), call(251, 1, 30_000), call(252, 1, 900_000)])
    raised = [{"endpoint": 251, "ts": call(251, 1, 0)["ts"], "took_us": 121_000, "avg_us": 15_000.0}]
    assert events(calls, "anomalies") == raised
    with calls.snapshot(as_of=commit_ts) as now, calls.snapshot(as_of=commit_ts - 1) as before:
        assert [len(list(each.scan("anomalies"))) for each in (before, now)] == [0, 1]
        assert [len(list(each.scan("calls"))) for each in (before, now)] == [2, 5]
    (rule,) = calls.rules()
    assert (rule["judged"], rule["raised"], rule["missing"], rule["failed"], rule["late"]) == (5, 1, 3, 0, 0)
    assert rule["where"] == "(took_us > (2 * ref(avg_us)))"
    assert rule["against"] == "previous_slot('by_slot', by=['endpoint'])"
    stats = calls.stats()
    assert stats["rules"] == 1
    assert stats["rules_raised"] >= 1
    calls.drop_rule("slow")
    calls.append("calls", [call(251, 1, 121_000)])
    assert calls.rules() == []
    assert events(calls, "anomalies") == raised


def test_each_event_of_an_appender_raises_in_its_own_commit(calls: Any) -> None:
    create(calls)
    calls.create_aggregate("per_endpoint", source="anomalies", group_by=["endpoint"], measures={"n": kivi.count()})
    calls.append("calls", [call(1, 0, 10)])
    for i, commit_ts in enumerate(append_each(calls, [call(1, 1, took_us) for took_us in (5, 21, 20, 22)])):
        with calls.snapshot(as_of=commit_ts) as snapshot:
            assert snapshot.to_arrow("anomalies").num_rows == (0, 1, 1, 2)[i]
    with calls.snapshot() as snapshot:
        assert list(snapshot.scan("per_endpoint")) == [{"endpoint": 1, "n": 2}]


def test_own_events_count_with_the_commit_that_brings_them(calls: Any) -> None:
    create(calls)
    create(calls, "with_own", own_events=True)
    calls.append("calls", [call(1, 0, 10), call(1, 1, 21)])
    assert [event["avg_us"] for event in events(calls, "anomalies")] == [10.0]  # of the second rule only
    calls.append("calls", [call(1, 0, 30), call(1, 1, 41)])
    assert [event["avg_us"] for event in events(calls, "anomalies")] == [10.0, 10.0, 20.0]


def test_a_backfill_has_own_events_in_their_slots_already(calls: Any) -> None:
    calls.append("calls", [call(1, 0, 10), call(1, 0, 30), call(1, 1, 41)])
    calls.create_event_table("usual", event_time="ts", columns={"endpoint": "int64", "ts": "timestamp", "n": "int64"})
    calls.create_rule(
        "usual", source="calls", into="usual", own_events=True, backfill=True,
        against=kivi.previous_slot("by_slot", by=["endpoint"]),
        where=kivi.col("took_us") > kivi.ref("avg_us"), select={"n": kivi.ref("calls")},
    )  # fmt: skip
    assert [event["n"] for event in events(calls, "usual")] == [2]


def test_own_events_are_not_added_to_rows_that_are_looked_up(calls: Any) -> None:
    """One that is a row, and one of another table's events, which are not this commit's."""
    calls.create_table("limits", key={"endpoint": "int64"}, columns={"us": "int64", "hits": kivi.sum("int64")})
    calls.create_event_table("other", event_time="ts", columns={"endpoint": "int64", "ts": "timestamp"})
    calls.create_aggregate("others", source="other", group_by=["endpoint"], measures={"n": kivi.count()})
    columns = {"endpoint": "int64", "ts": "timestamp", "us": "int64", "calls": "int64", "n": "int64"}
    calls.create_event_table("over", event_time="ts", columns=columns)
    calls.append("other", [{"endpoint": 1, "ts": EPOCH}] * 3)
    with calls.transaction() as tx:
        tx.put("limits", (1,), us=50)
    calls.create_rule(
        "over", source="calls", into="over", own_events=True,
        against={
            "before": kivi.previous_slot("by_slot", by=["endpoint"]), "limit": kivi.lookup("limits", by=["endpoint"]),
            "others": kivi.lookup("others", by=["endpoint"]),
        },
        where=kivi.col("took_us") > kivi.ref("limit.us"),
        select={"us": kivi.ref("limit.us"), "calls": kivi.ref("before.calls"), "n": kivi.ref("others.n")},
    )  # fmt: skip
    calls.append("calls", [call(1, 4, 10), call(1, 5, 60), call(1, 5, 40)])
    (over,) = events(calls, "over")
    assert (over["us"], over["calls"], over["n"]) == (50, 1, 3)


def test_prices_are_looked_up_and_costs_computed(calls: Any) -> None:
    calls.create_table("prices", key={"model": "string"}, columns={"price": "decimal(9,4)", "note": "string"})
    calls.create_event_table(
        "costs",
        event_time="ts",
        columns={"ts": "timestamp", "model": "string", "cost": "decimal(18,4)", "kind": "string"},
    )
    calls.create_rule(
        "cost",
        source="calls",
        against={
            "prices": kivi.lookup("prices", by=["model"]),
            "before": kivi.previous_slot("by_slot", by=["endpoint"]),
        },
        where=kivi.ref("before.calls") > 0,
        into="costs",
        select={"cost": kivi.col("tokens") * kivi.ref("prices.price"), "kind": "call"},
    )
    with calls.transaction() as tx:
        tx.put("prices", ("large",), price=decimal.Decimal("0.25"))
        tx.put("prices", ("free",), price=None)
    calls.append("calls", [call(1, 0, 1)])
    calls.append(
        "calls",
        [call(1, 1, 1, model=model, tokens=tokens) for model, tokens in
         (("large", 3), ("free", 3), ("unknown", 3), (None, 3), ("large", None), ("large", 2**62))],
    )  # fmt: skip
    assert [event["cost"] for event in events(calls, "costs")] == [decimal.Decimal("0.7500"), None, None]
    assert {event["kind"] for event in events(calls, "costs")} == {"call"}
    (rule,) = calls.rules()
    assert (rule["judged"], rule["raised"], rule["missing"], rule["failed"]) == (7, 3, 3, 1)


def test_slots_are_combined_and_may_lie_back(calls: Any) -> None:
    create(
        calls,
        against=kivi.previous_slot("by_slot", by=["endpoint"], back="10m", slots=3),
        where=kivi.col("took_us") > kivi.ref("avg_us") + 3 * kivi.ref("spread"),
    )
    calls.append("calls", [call(1, slot, took) for slot, took in ((0, 900), (1, 10), (2, 20), (4, 9_999))])
    calls.append("calls", [call(1, 5, 36), call(1, 5, 37)])  # slots 1, 2, 3: 15 on average, 7.07 either way
    assert [(event["took_us"], event["avg_us"]) for event in events(calls, "anomalies")] == [(37, 15.0)]


def test_rules_that_say_the_same_of_other_rows_share_nothing(calls: Any) -> None:
    """Expressions that look alike are worked out once for all rules, if they read the same row."""
    calls.create_aggregate(
        "by_hour",
        source="calls",
        group_by=["endpoint", kivi.time_slot("ts", "1h", name="slot")],
        measures={"total": kivi.sum("took_us"), "calls": kivi.count()},
        derived={"avg_us": "total / calls"},
    )
    create(calls)
    create(calls, "hourly", against=kivi.previous_slot("by_hour", by=["endpoint"]))
    create(
        calls,
        "both",
        against={
            "hour": kivi.previous_slot("by_hour", by=["endpoint"]),
            "slot": kivi.previous_slot("by_slot", by=["endpoint"]),
        },
        where=kivi.col("took_us") > 2 * kivi.ref("hour.avg_us") + kivi.ref("slot.avg_us"),
        select={"avg_us": kivi.ref("hour.avg_us") + 1.0 * kivi.ref("slot.calls")},
    )
    calls.append("calls", [call(1, 10, 10), call(1, 11, 30)])
    calls.append("calls", [call(1, 12, 61), call(1, 12, 71), call(1, 11, 21), call(1, 12, 40)])
    raised = [(event["took_us"], event["avg_us"]) for event in events(calls, "anomalies")]
    assert sorted(raised) == [(21, 10.0), (61, 20.0), (61, 30.0), (71, 20.0), (71, 21.0), (71, 30.0)]
    counted = {rule["name"]: (rule["judged"], rule["missing"], rule["raised"]) for rule in calls.rules()}
    assert counted == {"slow": (6, 2, 3), "hourly": (6, 3, 2), "both": (6, 3, 1)}


def test_what_was_there_before_is_judged_once_if_asked(calls: Any) -> None:
    calls.append("calls", [call(1, 0, 10), call(1, 1, 21), call(1, 1, 20)])
    create(calls, "later")
    create(calls, backfill=True)
    assert [(event["took_us"], event["avg_us"]) for event in events(calls, "anomalies")] == [(21, 10.0)]
    with pytest.raises(kivi.AlreadyExists):
        create(calls, backfill=True)
    later, slow = calls.rules()
    assert (slow["backfilled"], slow["judged"], slow["raised"], slow["missing"]) == (True, 3, 1, 1)
    assert (later["backfilled"], later["judged"]) == (False, 0)
    create(calls, "later", backfill=True)  # as after a crash: it is there, and not yet finished
    assert len(events(calls, "anomalies")) == 2
    calls.append("calls", [call(1, 1, 22)])
    assert len(events(calls, "anomalies")) == 4
    assert [rule["judged"] for rule in calls.rules()] == [4, 4]


def test_rules_follow_each_other_and_not_in_a_circle(calls: Any) -> None:
    create(calls)
    calls.create_event_table("alarms", event_time="ts", columns={"ts": "timestamp", "endpoint": "int64"})
    calls.create_rule("alarm", source="anomalies", where=kivi.col("took_us") > 1_000, into="alarms")
    with pytest.raises(kivi.InvalidArgument, match="circle"):
        calls.create_rule("back", source="alarms", into="calls", select={"took_us": 1})
    calls.append("calls", [call(1, 0, 100)])
    calls.append("calls", [call(1, 1, 201), call(1, 1, 1_001)])
    assert [len(events(calls, name)) for name in ("anomalies", "alarms")] == [2, 1]
    first, _ = append_each(calls, [call(1, 1, took_us) for took_us in (50, 5_000)])
    with calls.snapshot(as_of=first) as snapshot:
        assert snapshot.to_arrow("alarms").num_rows == 1
    assert len(events(calls, "alarms")) == 2


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"source": "prices"}, kivi.NotFound, "prices"),
        ({"into": "by_slot"}, kivi.SchemaError, "aggregate"),
        ({"into": "calls"}, kivi.SchemaError, "into itself"),
        ({"against": kivi.lookup("calls", by=["endpoint"])}, kivi.SchemaError, "no rows to look up"),
        ({"against": kivi.previous_slot("by_slot", by=[])}, kivi.SchemaError, "by names 1 columns"),
        ({"against": kivi.previous_slot("by_slot", by=["model"])}, kivi.SchemaError, "a string"),
        ({"against": None}, kivi.SchemaError, "no against="),
        ({"against": {"a": kivi.previous_slot("by_slot", by=["endpoint"])}}, kivi.SchemaError, "NAME.column"),
        ({"where": kivi.col("took_us") > kivi.ref("nothing")}, kivi.SchemaError, "nothing"),
        ({"where": kivi.col("took_us")}, kivi.SchemaError, "not a predicate"),
        ({"select": {"avg_us": kivi.col("took_us")}}, kivi.SchemaError, "declare the column as int64"),
        ({"select": {"other": 1}}, kivi.SchemaError, "other"),
        ({"where": 1}, kivi.InvalidArgument, "where is a predicate"),
        ({"where": kivi.col("model").under("a") | (kivi.col("took_us") > 1)}, kivi.InvalidArgument, "of reads"),
        ({"select": {"avg_us": kivi.case((kivi.col("model").covers("a"), 1.0))}}, kivi.InvalidArgument, "of reads"),
    ],
)
def test_what_does_not_fit_the_tables_is_refused(calls: Any, wrong: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        create(calls, **wrong)
    assert calls.rules() == []


def test_a_name_is_taken_once_and_tables_stay_while_rules_name_them(calls: Any) -> None:
    create(calls, "calls")  # names of rules are apart from those of tables
    with pytest.raises(kivi.AlreadyExists):
        create(calls, "calls")
    for table in ("anomalies", "by_slot"):
        with pytest.raises(kivi.InvalidArgument, match="rules calls"):
            calls.drop(table)
    with pytest.raises(kivi.NotFound, match="no rule 'slow'"):
        calls.drop_rule("slow")
    calls.drop_rule("calls")
    calls.drop("anomalies")
