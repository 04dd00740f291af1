"""Topics: what lies under and over a value, and until when, by every way to the store."""

from __future__ import annotations

import datetime as dt
import random
import time
from typing import Any

import pytest

import kivi
from tests.waiting import wait_until

col = kivi.col
T0 = dt.datetime(2026, 7, 1, tzinfo=dt.UTC)
NAMES = [f"t{i}" for i in range(12)]


@pytest.fixture
def news(db: Any) -> Any:
    db.create_table("topics", key={"name": "string"}, columns={"parent": "string"}, history="1d")
    db.create_hierarchy("topics", parent="parent")
    db.create_event_table("news", event_time="ts", columns={"ts": "timestamp", "topic": "string"})
    db.append("news", [{"ts": T0, "topic": name} for name in [*NAMES, "elsewhere", None]])
    return db


def put(tx: Any, parents: dict[str, str | None]) -> None:
    for name, parent in parents.items():
        tx.put("topics", (name,), parent=parent)


def above(parents: dict[str, str | None], name: str) -> set[str]:
    found: set[str] = set()
    at: str | None = name
    while at is not None and at not in found:
        found.add(at)
        at = parents.get(at)
    return found


def topics(reader: Any, where: Any) -> set[str]:
    rows = [row["topic"] for row in reader.scan("news", where=where)]
    assert len(rows) == len(set(rows))
    return set(rows)


def test_random_hierarchies_are_walked_as_at_each_snapshot(news: Any) -> None:
    """Cycles and values that no row is of included; inside a transaction with what that has written."""
    rng, seen = random.Random(7), []
    parents: dict[str, str | None] = {}
    for _ in range(4):
        with news.transaction() as tx:
            changed = {name: rng.choice([None, *NAMES]) for name in rng.sample(NAMES, 8)}
            put(tx, changed)
            parents |= changed
            check(tx, parents)
        seen.append((tx.commit_ts, dict(parents)))
    for ts, then in seen:
        with news.snapshot(as_of=ts) as snap:
            check(snap, then)


def check(reader: Any, parents: dict[str, str | None]) -> None:
    ups = {name: above(parents, name) for name in [*NAMES, "elsewhere"]}
    for name in ("t0", "t7", "elsewhere"):
        assert topics(reader, col("topic").covers(name)) == ups[name]
        below = {other for other, up in ups.items() if name in up}
        assert topics(reader, col("topic").under(name)) == below
        beside = topics(reader, ~kivi.coalesce(col("topic"), "t0").under(name))  # of values, and of one that is null
        assert beside == (ups.keys() | {None}) - below - ({None} if "t0" in below else set())


def test_questions_retractions_and_subscriptions_follow(news: Any) -> None:
    with news.transaction() as tx:
        put(tx, {"t1": "t0", "t2": "t1", "t3": None})
    where = col("topic").under("t0", hierarchy="topics")
    with news.snapshot() as snap:
        assert snap.query("news", where=where, measures={"n": kivi.count()}).to_arrow()["n"].to_pylist() == [3]
    with news.subscribe("news", where=where) as told:
        news.append("news", [{"ts": T0, "topic": topic} for topic in ("t2", "t3", "t0")])
        rows: list[str] = []
        while len(rows) < 5:
            update = told.next(timeout_s=10)
            rows += [change.row["topic"] for change in update.changes]
    assert rows == ["t0", "t1", "t2", "t2", "t0"]
    with news.transaction() as tx:
        assert tx.retract("news", where=where) == 5
    with news.snapshot() as snap:
        assert not list(snap.scan("news", where=where))


def test_a_subscription_keeps_its_hierarchy_and_one_that_comes_back_has_that_of_then(news: Any) -> None:
    """Whatever its table gets meanwhile. What was told of another hierarchy is nothing to go on from."""

    def write(**places: str) -> int:
        with news.transaction() as tx:
            for name, topic in places.items():
                tx.put("places", (name,), topic=topic)
        return news.append("news", [{"ts": T0, "topic": topic} for topic in places.values()])

    def follow(live: Any, ts: int) -> list[str]:
        wait_until(lambda: live.next(0.05) is None and live.ts >= ts, pause_s=0)
        return sorted(row["name"] for row in live.rows)

    news.create_table("places", key={"name": "string"}, columns={"topic": "string"}, history="1d")
    with news.transaction() as tx:
        put(tx, {"t0": None, "t1": "t0", "t2": None})
    where, ts = col("topic").under("t0"), write(a="t0", b="t1", c="t2")
    with news.subscribe("places", where=where) as live, news.subscribe("news", where=where, since=ts) as told:
        assert follow(live, ts) == ["a", "b"]
        with news.transaction() as tx:
            put(tx, {"t1": None, "t2": "t0"})
        for name in ("places", "news"):
            news.alter_table(name, add_columns={"more": "int64"})
        assert follow(live, write(d="t1", e="t2")) == ["a", "b", "d"]
        assert [change.row["topic"] for change in told.next(10).changes] == ["t1"]
        since, rows = live.ts, live.rows
    with news.subscribe("places", where=where, since=since, rows=rows) as live:
        assert follow(live, write(f="t2")) == ["a", "c", "e", "f"]


def test_what_has_no_answer_is_refused(news: Any) -> None:
    news.create_table("places", key={"id": "int64"}, columns={"inside": "int64", "name": "string"})
    with news.snapshot() as snap:
        for where in (col("topic").under("a", "nothing"), col("topic").under("a", "news"), col("ts").covers(T0)):
            with pytest.raises(kivi.SchemaError, match="there is no hierarchy"):
                list(snap.scan("news", where=where))
        with pytest.raises(kivi.SchemaError):
            list(snap.scan("news", where=col("topic").under(7)))
    for name, parent in (("places", "name"), ("places", "id"), ("news", "topic")):
        with pytest.raises(kivi.SchemaError, match=f"hierarchy '{name}'"):
            news.create_hierarchy(name, parent=parent)
    with pytest.raises(kivi.AlreadyExists):
        news.create_hierarchy("topics")
    news.create_hierarchy("places", parent="inside")  # of other keys, so that each is still the only one of its type
    with news.snapshot() as snap:
        assert topics(snap, col("topic").under("t5")) == {"t5"}
        with pytest.raises(kivi.SchemaError, match="the keys of hierarchy 'places' are no string"):
            list(snap.scan("news", where=col("topic").under("t5", "places")))
    with pytest.raises(kivi.SchemaError, match="a measure observes events once, whatever"):
        news.create_aggregate(
            "under", source="news", group_by=["topic"], measures={"n": kivi.count(where=col("topic").under("t0"))}
        )
    news.create_hierarchy("others")
    with news.snapshot() as snap, pytest.raises(kivi.SchemaError, match="there are the hierarchies others, topics"):
        list(snap.scan("news", where=col("topic").under("t5")))


def test_a_table_whose_events_expire_says_so(db: Any) -> None:
    columns = {"ts": "timestamp", "until": "timestamp", "n": "int64"}
    db.create_event_table("posts", event_time="ts", columns=columns, expires="until")
    assert db.describe("posts")["expires"] == "until"
    for column in ("n", "nothing"):
        with pytest.raises(kivi.SchemaError, match="expires must name one of its timestamp columns"):
            db.create_event_table("others", event_time="ts", columns=columns, expires=column)
    db.append("posts", [{"ts": T0, "until": T0, "n": 1}, {"ts": T0, "until": None, "n": 2}])
    rows: list[Any] = []
    for _ in range(600):
        with db.snapshot() as snap:
            rows = [row["n"] for row in snap.scan("posts")]
        if rows == [2]:
            break
        time.sleep(0.05)
    assert rows == [2]
