"""Alerts, from wherever: what they are told of, how they are shown, and what is refused."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pytest

import kivi
from kivi.errors import AlreadyExists, InvalidArgument, NotFound, SchemaError
from tests.waiting import wait_until

BEGIN = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
MINUTE = dt.timedelta(minutes=1)


@pytest.fixture
def calls(db: Any) -> Iterator[Any]:
    columns = {"ts": "timestamp", "app": "string", "shard": "int64", "us": "int64"}
    db.create_event_table("calls", event_time="ts", columns=columns)
    db.create_aggregate(
        "calls_5m",
        source="calls",
        group_by=["app", kivi.time_slot("ts", "5m"), "shard"],
        measures={"calls": kivi.count(), "latency": kivi.quantiles("us", accuracy=0.01)},
        derived={"p99_us": "quantile(latency, 0.99)"},
    )
    yield db
    for name in {one["name"] for one in db.alerts()}:
        db.drop_alert(name)


def append(db: Any, minute: float, app: str, us: int = 1) -> None:
    db.append("calls", [{"ts": BEGIN + minute * MINUTE, "app": app, "shard": 7, "us": us}])


def test_an_instance_goes_through_its_states(calls: Any) -> None:
    append(calls, 0, "shop")
    calls.create_alert("p99", on="calls_5m", where=kivi.col("p99_us") > 1_000, for_="2m", lateness="30s")
    nothing = {
        "name": "p99",
        "on": "calls_5m",
        "key": None,
        "state": "inactive",
        "since": None,
        "value": None,
        "last_change": None,
        "silenced_until": None,
        "notify": None,
        "error": None,
    }
    assert calls.alerts() == [nothing]

    def comes(state: str) -> dict[str, Any]:
        (one,) = wait_until(
            lambda: [one for one in calls.alerts() if one["state"] == state], reason=lambda: calls.alerts()
        )
        return dict(one)

    append(calls, 1, "shop", 5_000)
    append(calls, 5.6, "other")
    one = comes("pending")
    assert one["key"] == {"app": "shop", "shard": 7}
    assert one["since"] == BEGIN + 5 * MINUTE
    assert one["value"]["p99_us"] == pytest.approx(5_000, rel=0.01)
    assert abs(dt.datetime.now(dt.UTC) - one["last_change"]) < 2 * MINUTE
    append(calls, 7.6, "other")
    assert comes("firing")["since"] == BEGIN + 7 * MINUTE
    append(calls, 10.6, "other")  # of the shop there is nothing any more
    assert comes("resolved")["since"] == BEGIN + 10 * MINUTE

    until = BEGIN + dt.timedelta(days=90_000)
    calls.silence("p99", until=until)
    assert calls.alerts()[0]["silenced_until"] == until
    calls.silence("p99", until=None)
    assert calls.alerts()[0]["silenced_until"] is None
    calls.drop_alert("p99")
    assert calls.alerts() == []


@pytest.mark.parametrize("begin", [BEGIN, dt.datetime(1969, 7, 20, 20, tzinfo=dt.UTC)])
def test_all_of_a_load_is_judged_whenever_it_came(calls: Any, begin: dt.datetime) -> None:
    """Slot by slot, though it came in one commit, whatever time it is of."""
    calls.create_alert("p99", on="calls_5m", where=kivi.col("p99_us") > 1_000, for_="12m", notify="http://localhost:1")
    events = [{"ts": begin + i * MINUTE, "app": "a", "shard": 1, "us": 5_000 if i < 20 else 1} for i in range(28)]
    events += [{"ts": begin + i * MINUTE, "app": "b", "shard": 1, "us": 5_000} for i in range(8, 28)]
    calls.append("calls", events)
    wait_until(lambda: len(calls.alerts()) == 2, reason=lambda: calls.alerts())
    found = [(one["key"]["app"], one["state"], (one["since"] - begin) // MINUTE) for one in calls.alerts()]
    assert found == [("a", "resolved", 25), ("b", "firing", 22)]


def test_a_lateness_may_be_as_long_as_a_duration_is(calls: Any) -> None:
    """By the week, whose slots a calendar counts; and with an event of the first moment that there is."""
    calls.create_aggregate(
        "calls_1w", source="calls", group_by=["app", kivi.time_slot("ts", "1w")], measures={"calls": kivi.count()}
    )
    for _ in range(2):
        calls.create_alert("long", on="calls_1w", where=kivi.col("calls") > 0, lateness=2**62)
        assert [one["state"] for one in calls.alerts()] == ["inactive"]
        calls.drop_alert("long")
        calls.append("calls", [{"ts": dt.datetime(1, 1, 1, tzinfo=dt.UTC), "app": "a", "shard": 1, "us": 1}])


WHERE = kivi.col("calls") > 1


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"name": ""}, InvalidArgument, "the name of an alert"),
        ({"on": "nowhere"}, NotFound, "nowhere"),
        ({"on": "calls"}, InvalidArgument, "time_slot in their key"),
        ({"where": kivi.col("latency") > 1}, SchemaError, "quantile"),
        ({"where": kivi.col("nothing") > 1}, SchemaError, "nothing"),
        ({"where": "calls > 1"}, InvalidArgument, "where is the condition"),
        ({"where": WHERE & kivi.col("app").under("shop")}, InvalidArgument, "of reads"),
        ({"for_": "soon"}, InvalidArgument, "for_"),
        ({"lateness": -1}, InvalidArgument, "lateness"),
        ({"notify": "ftp://host/x"}, InvalidArgument, "http://"),
        ({"notify": "https:///x"}, InvalidArgument, "names no host"),
        ({"notify": "https://user:secret@host/x"}, InvalidArgument, "use secret"),
        ({"notify": {"url": "https://host/", "secrets": "x"}}, InvalidArgument, "url and, if wanted, secret"),
        ({"notify": {"url": "https://host/", "labels": {"a b": "c"}}}, InvalidArgument, "label"),
    ],
)
def test_what_is_no_alert_is_refused(calls: Any, arguments: dict[str, Any], error: type, match: str) -> None:
    wanted = {"name": "alert", "on": "calls_5m", "where": WHERE, **arguments}
    with pytest.raises(error, match=match) as raised:
        calls.create_alert(wanted.pop("name"), **wanted)
    assert "secret@" not in str(raised.value)
    assert calls.alerts() == []


@pytest.mark.parametrize("until", [2**62, -(2**62), 2**63, "2h", 1.5])
def test_a_silence_ends_at_a_moment(calls: Any, until: Any) -> None:
    calls.create_alert("alert", on="calls_5m", where=WHERE)
    with pytest.raises((InvalidArgument, SchemaError), match="until is"):
        calls.silence("alert", until=until)
    assert calls.alerts()[0]["silenced_until"] is None


def test_names_are_those_of_alerts(calls: Any) -> None:
    calls.create_alert("an alert: 100 %", on="calls_5m", where=WHERE)
    with pytest.raises(AlreadyExists, match="100 %"):
        calls.create_alert("an alert: 100 %", on="calls_5m", where=WHERE)
    for missing in (lambda: calls.drop_alert("other"), lambda: calls.silence("other", until=None)):
        with pytest.raises(NotFound, match="alerts are: 'an alert: 100 %'"):
            missing()


def test_an_alert_whose_table_is_gone_says_so(calls: Any) -> None:
    calls.create_alert("p99", on="calls_5m", where=WHERE)
    calls.drop("calls_5m")
    wait_until(lambda: "calls_5m" in (calls.alerts()[0]["error"] or ""), reason=lambda: calls.alerts())
