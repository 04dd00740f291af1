"""What no call takes is said in a typed error, the same wherever the store is."""

from __future__ import annotations

import asyncio
import collections
import datetime as dt
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest

import kivi
import kivi.aio
from kivi.errors import InvalidArgument, NotFound, SchemaError


def reading(ask: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(db: Any) -> None:
        with db.snapshot() as snap:
            answer = ask(snap)
            if hasattr(answer, "__next__"):
                next(answer, None)

    return call


def writing(ask: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(db: Any) -> None:
        with db.transaction() as tx:
            ask(tx)

    return call


def within(values: Any) -> Callable[[Any], Any]:
    return reading(lambda snap: snap.scan("t", where=kivi.col("id").isin(values)))


N = {"n": kivi.count()}
NO_LISTS: list[Any] = [5, None]
NO_YEAR = [
    at.replace(tzinfo=dt.timezone(dt.timedelta(hours=hours)))
    for at, hours in ((dt.datetime.min, 5), (dt.datetime.max, -5))  # noqa: DTZ901
]
"""Moments that are of no year in UTC."""


REFUSED: list[Callable[[Any], Any]] = [
    reading(lambda snap: snap.get(["t"], (1,))),
    reading(lambda snap: snap.get(None, (1,))),
    reading(lambda snap: snap.get_many("t", None)),
    reading(lambda snap: snap.get_many("t", 5)),
    reading(lambda snap: snap.get_many("t", "ab")),
    reading(lambda snap: snap.get("t", (1,), 5)),
    reading(lambda snap: snap.get("t", (1,), [[]])),
    reading(lambda snap: snap.scan({})),
    reading(lambda snap: snap.scan("t", columns=5)),
    reading(lambda snap: snap.scan("t", columns=[["n"]])),
    reading(lambda snap: snap.to_arrow({})),
    writing(lambda tx: tx.put(["t"], (1,), n=1)),
    writing(lambda tx: tx.guard("t", (1,), ["n"])),
    lambda db: db.create_aggregate("a", source=5, group_by=["x"], measures={"n": kivi.count()}),
    lambda db: db.create_aggregate("a", source="ev", group_by=5, measures={"n": kivi.count()}),
    lambda db: db.create_aggregate("a", source="ev", group_by=["x"], measures=5),
    lambda db: db.subscriptions(5),
    lambda db: db.batch_scopes(5),
    lambda db: db.stage("ev", [{"ts": 1, "x": 1}], owner=5),
    lambda db: db.create_event_table("new", event_time="ts", columns=5),
    lambda db: db.create_event_table("new", event_time=["ts"], columns={"ts": "timestamp"}),
    lambda db: db.create_event_table("new", event_time="ts", columns={"ts": "timestamp"}, expires=["ts"]),
    lambda db: db.create_aggregate(5, source="ev", group_by=["x"], measures={"n": kivi.count()}),
    lambda db: db.create_aggregate("a", source="ev", group_by=["x"], measures={"n": kivi.count()}, derived="n"),
    lambda db: db.create_aggregate("a", source="ev", group_by=["x"], measures={"n": kivi.count()}, derived={"m": 1}),
    lambda db: db.create_aggregates("a", "ev", ["x"], ["5m"], {"n": kivi.count()}, derived=5),
    lambda db: db.store_subscriptions("ev", [{"name": "n"}], since=2**70),
    lambda db: db.reached("ev", 2**70),
    lambda db: db.reached("ev", 1, since=2**70),
    lambda db: db.subscribers("ev", 2**70),
    *(reading(operator.methodcaller("scan", "t", prefix=prefix)) for prefix in (0, 0.0, "", False, 1, "a")),
    reading(lambda snap: snap.changes("ev", since=0, prefix="")),
    lambda db: db.subscribe("t", prefix=0).__enter__(),
    lambda db: db.subscribe("ev", prefix=0).__enter__(),
    *(operator.methodcaller("appender", "ev", linger_ms=ms) for ms in (2**63, 10**5_000, 3_600_001, math.inf)),
    *(kind(lambda one: one.renew(10**5_000)) for kind in (reading, writing)),
    lambda db: db.create_table("new", key=10**5_000, columns={"n": "int64"}),
    lambda db: db.create_event_table("new", event_time=10**5_000, columns={"ts": "timestamp"}),
    lambda db: db.alter_table("t", add_columns=10**5_000),
    lambda db: db.alter_table("t", role=10**5_000),
    lambda db: db.alter_aggregate("ag", add_measures=10**5_000),
    reading(lambda snap: snap.query("ev", measures=N, derived=10**5_000)),
    *map(within, NO_LISTS),
    lambda db: db.create_aggregate("a", "ev", ["x"], N, progress=5),
    lambda db: db.create_aggregates("a", "ev", ["x"], ["5m"], N, progress="n"),
    *(reading(operator.methodcaller("sql", "select ?", [at])) for at in NO_YEAR),
    reading(lambda snap: snap.sql("select ?", b"x")),  # whose letters are numbers
    lambda db: db.cancel_move(5),
    lambda db: db.forget_node(5),
    lambda db: db.checkpoint("/nowhere/\0"),
    lambda db: db.snapshot(ttl_s=1e308).__enter__().renew(),
    *(
        kind(operator.methodcaller("renew", ttl))
        for kind in (reading, writing)
        for ttl in ("", "x", [1], math.nan, math.inf, -1, True)
    ),
]


HALF = "half \ud800"
"""Of a character: a string that Python has, and no text."""
NO_TEXT: dict[str, Callable[[Any], Any]] = {
    "sql": reading(lambda snap: snap.sql(f"select '{HALF}'")),
    "parameter": reading(lambda snap: snap.sql("select ?", [HALF])),
    "nested parameter": reading(lambda snap: snap.sql("select ?", [[HALF]])),
    "name of a parameter": reading(lambda snap: snap.sql("select 1", {HALF: 1})),
    "scan": reading(lambda snap: snap.scan(HALF)),
    "get": reading(lambda snap: snap.get(HALF, (1,))),
    "get columns": reading(lambda snap: snap.get("t", (1,), columns=[HALF])),
    "to_arrow": reading(lambda snap: snap.to_arrow(HALF)),
    "where": reading(lambda snap: snap.scan("ev", where=kivi.col("x") == HALF)),
    "isin": reading(lambda snap: snap.scan("ev", where=kivi.col("x").isin([HALF]))),
    "column": reading(lambda snap: snap.scan("ev", where=kivi.col(HALF) == 1)),
    "order_by": reading(lambda snap: snap.scan("t", order_by=f"-{HALF}")),
    "changes": reading(lambda snap: snap.changes(HALF, since=0)),
    "summary": reading(lambda snap: snap.summary("ev", {HALF: kivi.count()})),
    "query": reading(lambda snap: snap.query("ev", measures={HALF: kivi.count()})),
    "having": reading(lambda snap: snap.query("ev", group_by=["x"], measures=N, having=kivi.col("x") == HALF)),
    "derived": reading(lambda snap: snap.query("ev", measures=N, derived={"d": HALF})),
    "windows": reading(lambda snap: snap.windows("ev", size=HALF, measures=N)),
    "put": writing(lambda tx: tx.put(HALF, (1,), n=1)),
    "guard": writing(lambda tx: tx.guard("t", (1,), HALF)),
    "delete": writing(lambda tx: tx.delete(HALF, (1,))),
    "retract": writing(lambda tx: tx.retract(HALF)),
    "append": lambda db: db.append(HALF, [{"ts": 1}]),
    "value": lambda db: db.append("ev", [{"ts": 1, "x": HALF}]),
    "deletes": lambda db: db.write("t", [{"id": 1, "gone": True}], deletes=HALF),
    "describe": lambda db: db.describe(HALF),
    "drop": lambda db: db.drop(HALF),
    "create_table": lambda db: db.create_table("new", key={HALF: "int64"}, columns={}),
    "aggregate": lambda db: db.create_aggregate("a", source="ev", group_by=[HALF], measures=N),
    "measure": lambda db: db.create_aggregate("a", source="ev", group_by=["x"], measures={HALF: kivi.count()}),
    "view": lambda db: db.create_view("v", source="t", key=[HALF, "id"]),
    "appender": lambda db: db.appender(HALF).__enter__(),
    "unsubscribe": lambda db: db.unsubscribe(HALF),
    "user": lambda db: db.subscriptions(HALF),
    "path": lambda db: db.checkpoint(f"/nowhere/{HALF}"),
}


def test_a_time_as_text_is_told_how_times_are_given(db: Any) -> None:
    db.create_event_table("ev", event_time="ts", columns={"ts": "timestamp", "x": "string"})
    text = "2026-07-01T12:00:00Z"
    for call in (
        lambda: db.append("ev", [{"ts": text}]),
        lambda: reading(lambda snap: snap.query("ev", start=text, measures=N))(db),
        lambda: reading(lambda snap: snap.scan("ev", where=kivi.col("ts") > text))(db),
    ):
        with pytest.raises(
            SchemaError, match="not a timestamp: give an aware datetime, or whole microseconds since 1970"
        ):
            call()


@pytest.mark.parametrize("what", NO_TEXT)
def test_a_lone_surrogate_is_no_text(db: Any, what: str) -> None:
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    db.create_event_table("ev", event_time="ts", columns={"ts": "timestamp", "x": "string"})
    with pytest.raises((InvalidArgument, NotFound, SchemaError)) as refused:
        NO_TEXT[what](db)
    assert str(refused.value).encode()  # which can be written into a log
    db.append("ev", [{"ts": 1, "x": "half"}])


MEASURE_NAMES = ["", "app", "a b", "x" * 129, "ü", "1a", 5, None, "n.m", "_commit_ts"]


@pytest.mark.parametrize("name", MEASURE_NAMES, ids=str)
def test_measures_of_questions_are_named_as_columns_are(db: Any, name: Any) -> None:
    declared(db)
    with db.snapshot() as snap:
        for ask in (
            lambda: snap.query("ev", group_by=["app"], measures={name: kivi.count()}),
            lambda: snap.windows("ev", size="5m", group_by=["app"], measures={name: kivi.count()}),
            lambda: snap.query("ag", group_by=["app"], measures={name: kivi.combine("n")}),
            lambda: snap.query("ev", group_by=["app"], measures={"n": kivi.count()}, derived={name: "n"}),
            lambda: db.create_aggregate("new", source="ev", group_by=["app"], measures={name: kivi.count()}),
        ):
            with pytest.raises(SchemaError, match="name"):
                ask()
        if name in ("", 5, None):
            with pytest.raises(InvalidArgument, match="named by a text"):
                snap.summary("ev", {name: kivi.count()})
        elif name != "_commit_ts":  # whose row has no other columns
            both = {name: kivi.count(), "m0": kivi.sum("a")}
            assert snap.summary("ev", both) == {name: 1, "m0": 1}
        assert list(snap.query("ev", group_by=["app"], measures={"_": kivi.count()})) == [{"app": "q", "_": 1}]


def declared(db: Any) -> None:
    columns = {"ts": "timestamp", "app": "string", "a": "int64", "p": "int64"}
    db.create_event_table("ev", event_time="ts", columns=columns)
    slot = kivi.time_slot("ts", "5m", name="slot")
    db.create_aggregate("ag", source="ev", group_by=["app", "a", "p", slot], measures={"n": kivi.count()})
    db.create_table("t", key={"id": "int64"}, columns={"app": "string", "a": "int64", "p": "int64"})
    db.append("ev", [{"ts": 1, "app": "q", "a": 1, "p": 2}])


@pytest.mark.parametrize("names", ["ap", b"ap", 5, [["a"]], ["a", 5], [None]], ids=repr)
def test_a_list_of_names_is_a_list_of_names(db: Any, names: Any) -> None:
    """A text is one name, also where each of its letters is a name."""
    declared(db)
    asked = {"group_by": ["app", "a", "p"], "measures": N}
    with db.snapshot() as snap:
        for ask in (
            lambda: snap.get("t", (1,), columns=names),
            lambda: snap.get_many("t", [(1,)], columns=names),
            lambda: list(snap.scan("t", columns=names)),
            lambda: list(snap.scan_batches("t", columns=names)),
            lambda: list(snap.changes("ev", since=0, columns=names)),
            lambda: snap.to_arrow("ev", columns=names),
            lambda: snap.query("ev", **asked, columns=names),
            lambda: snap.windows("ev", size="5m", **asked, columns=names),
            lambda: snap.query("ag", group_by=["app", "a", "p"], columns=names),
            lambda: snap.rollup("ag", by=names),
            lambda: snap.rollup("ag", measures=names),
            lambda: db.subscribe("t", columns=names).__enter__(),
            lambda: db.subscribe("ag", rollup={"by": names}).__enter__(),
            lambda: db.create_view("v", source="t", key=names),
            lambda: db.create_view("v", source="t", key=["app", "id"], columns=names),
            lambda: db.create_aggregates("l", source="ev", levels=["app"], slots=names, measures=N),
            lambda: db.create_event_table("i", event_time="ts", columns={"ts": "timestamp", "a": "int64"}, index=names),
        ):
            with pytest.raises((InvalidArgument, SchemaError)):
                pytest.fail(f"{ask()!r}")
    assert sorted(table["name"] if isinstance(table, dict) else table for table in db.tables()) == ["ag", "ev", "t"]


@pytest.mark.parametrize("call", REFUSED, ids=map(str, range(len(REFUSED))))
def test_no_such_argument(db: Any, call: Callable[[Any], Any]) -> None:
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    db.create_event_table("ev", event_time="ts", columns={"ts": "timestamp", "x": "int64"})
    with pytest.raises(InvalidArgument):
        call(db)
    assert db.tables() == ["ev", "t"]


@pytest.mark.parametrize("long", [10**5_000, -(10**5_000), "x" * 50_000, b"x" * 50_000, [1] * 50_000], ids=type)
def test_a_long_argument_makes_no_long_sentence(db: Any, long: Any) -> None:
    count = {"n": kivi.count()}
    calls: list[Callable[[Any], Any]] = [
        reading(lambda snap: snap.get(long, (1,))),
        reading(lambda snap: snap.get("t", (long,))),
        reading(lambda snap: snap.scan("t", columns=long)),
        reading(lambda snap: snap.scan("t", limit=long)),
        reading(lambda snap: snap.changes("t", since=long)),
        reading(lambda snap: snap.query("ev", measures={"n": long})),
        reading(lambda snap: snap.query("ev", measures=count, group_by=[long])),
        reading(lambda snap: snap.query("ev", measures=count, order_by=long)),
        lambda db: db.snapshot(as_of=long),
        lambda db: db.append("ev", [long]),
        lambda db: db.append("ev", long),
        lambda db: db.subscribe("t", interval_ms=long),
    ]
    for call in calls:
        with pytest.raises(kivi.KiviError) as caught:
            call(db)
        assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("timeout", ["x", math.nan, True, [1]])
def test_no_such_timeout(db: Any, timeout: Any) -> None:
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    with db.subscribe("t") as live, pytest.raises(InvalidArgument, match="timeout_s is a number of seconds"):
        live.next(timeout_s=timeout)


def test_for_ever_is_no_end(db: Any) -> None:
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    with db.subscribe("t") as live:
        assert live.next(timeout_s=math.inf) is not None
        assert live.next(timeout_s=0) is None


CONNECTING: list[dict[str, Any]] = [
    {"endpoint": None},
    {"endpoint": 5},
    {"endpoint": ""},
    {"timeout": "x"},
    {"timeout": math.nan},
    {"tls": 5},
]


@pytest.mark.parametrize("arguments", CONNECTING, ids=map(str, range(len(CONNECTING))))
def test_nowhere_to_connect(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        kivi.connect(**{"endpoint": "localhost:1", **arguments})
    with pytest.raises(InvalidArgument):
        asyncio.run(kivi.aio.connect(**{"endpoint": "localhost:1", **arguments}))


def test_longer_than_any_clock_is_long() -> None:
    with kivi.open() as db:
        assert db.run(lambda tx: 5, timeout=10**400) == 5


def test_what_runs_in_a_transaction_is_a_function() -> None:
    nothing: Any = None
    text: Any = "x"
    with kivi.open() as db:
        with pytest.raises(InvalidArgument):
            db.run(nothing)
        with pytest.raises(InvalidArgument):
            db.run(lambda tx: 1, timeout=text)

        async def later(tx: Any) -> None:
            tx.put("t", (1,), v=1)

        async_one: Any = later
        db.create_table("t", key={"k": "int64"}, columns={"v": "int64"})
        with pytest.raises(InvalidArgument, match="not async"):  # it would have done nothing, and nobody had said so
            db.run(async_one)
        assert db.get("t", (1,)) is None
    with pytest.raises(InvalidArgument):
        kivi.open(5)


def test_a_row_table_takes_no_events_and_says_so_alike(db: Any) -> None:
    db.create_table("t", key={"id": "int64"}, columns={"n": "int64"})
    for call in (lambda db: db.append("t", [{"id": 1}]), writing(lambda tx: tx.append("t", [{"id": 1}]))):
        with pytest.raises(InvalidArgument, match="'t' is a row table: events are appended to event tables"):
            call(db)


def test_the_key_of_a_view_is_any_sequence(db: Any) -> None:
    db.create_table("t", key={"id": "int64"}, columns={"n": "int64"})
    db.create_view("v", source="t", key=collections.deque(["n", "id"]))
    with pytest.raises(SchemaError, match="twice"):
        db.create_view("w", source="t", key=collections.deque(["n", "n"]))
    assert list(db.describe("v")["key"]) == ["n", "id"]
