"""Durable subscriptions that are stored, counted, listed and taken up by name, by every way to the store."""

from __future__ import annotations

from typing import Any

import pytest

import kivi
from kivi.errors import InvalidArgument, NotFound, ResourceExhausted, SchemaError

col = kivi.col
T0 = 1_750_000_000_000_000


@pytest.fixture
def news(db: Any) -> Any:
    db.create_event_table("news", event_time="ts", columns={"ts": "timestamp", "topic": "string", "n": "int64"})
    return db


def add(db: Any, *topics: str) -> int:
    ts: int = db.append("news", [{"ts": T0, "topic": topic, "n": i} for i, topic in enumerate(topics)])
    return ts


def test_stored_found_and_taken_up(news: Any) -> None:
    first = add(news, "a", "b")
    wanted = [{"user": f"u{i}", "name": "mine", "where": col("topic") == "ab"[i % 2]} for i in range(10)]
    wanted += [{"name": "some", "where": (col("topic") == "a") & (col("n") > 1)}, {"name": "all"}]
    at = news.store_subscriptions("news", wanted)
    assert at > first
    ts = add(news, "a", "b", "a", "c")
    assert news.reached("news", ts) == [6, 6, 7, 1]
    assert news.reached("news", first) == [0, 0]  # there was none
    assert news.reached("news", ts, since=0) == [6, 6, 6, 6, 7, 1]
    found = [(one["user"], one["name"]) for one in news.subscribers("news", ts, place=1)]
    assert sorted(found) == [("", "all"), *((f"u{i}", "mine") for i in (1, 3, 5, 7, 9))]
    assert len(news.subscribers("news", ts, limit=2)) == 2
    assert [(one["name"], one["table"]) for one in news.subscriptions("u3")] == [("mine", "news")]
    with news.subscribe("news", name="mine", user="u3", interval_ms=0) as live:  # by its name alone
        assert [change.row["topic"] for change in live.next(60.0).changes] == ["b", "b"]
        later = add(news, "a", "b")
        assert [change.row["topic"] for change in live.next(60.0).changes] == ["b"]
    assert news.reached("news", later) == [6, 6]
    news.store_subscriptions("news", wanted)  # they are there: nothing is counted twice
    news.unsubscribe("mine", "u3")
    assert news.reached("news", add(news, "b")) == [5]
    assert news.reached("news", later) == [6, 6]  # as it was then


def test_what_is_refused(news: Any) -> None:
    news.create_table("plain", key={"id": "int64"}, columns={"v": "int64"})
    ts = add(news, "a")
    news.store_subscriptions("news", [{"name": "one", "where": col("topic") == "a"}])
    with pytest.raises(InvalidArgument, match=r"another query.*unsubscribe\('one'\)"):
        news.store_subscriptions("news", [{"name": "two"}, {"name": "one", "where": col("topic") == "b"}])
    assert "two" not in [one["name"] for one in news.subscriptions()]  # all or none
    with pytest.raises(InvalidArgument, match="named twice"):
        news.store_subscriptions("news", [{"name": "x"}, {"name": "x"}])
    with pytest.raises(InvalidArgument, match="has a name"):
        news.store_subscriptions("news", [{"user": "x"}])
    with pytest.raises(InvalidArgument, match="past the watermark"):
        news.store_subscriptions("news", [{"name": "x"}], since=2**60)
    with pytest.raises(ResourceExhausted, match="20,001"):
        news.store_subscriptions("news", [{"name": f"{i}"} for i in range(20_001)])
    with pytest.raises(InvalidArgument, match="events"):
        news.store_subscriptions("plain", [{"name": "x"}])
    with pytest.raises(SchemaError, match="no event table"):
        news.reached("plain", ts)
    with pytest.raises(SchemaError, match="hierarchy"):
        news.store_subscriptions("news", [{"name": "x", "where": col("topic").under("a")}])
    with pytest.raises(NotFound, match="place 1"):
        news.subscribers("news", ts, place=1)
    with pytest.raises(NotFound):
        news.reached("nowhere", ts)


def test_predicates_that_differ_in_a_text_alone(news: Any) -> None:
    topic, ts, n = col("topic"), col("ts"), col("n")
    wheres = [topic == "a", topic == "b", topic == "a", topic != "a", topic.startswith("a"), topic.startswith("b")]
    wheres += [ts >= T0, ts > T0, n == 1, n == 0]
    wanted = [{"user": f"u{i}", "name": "mine", "where": where} for i, where in enumerate(wheres)]
    news.store_subscriptions("news", wanted)
    ts_of_a = add(news, "a", "b", "c")
    assert news.reached("news", ts_of_a) == [5, 5, 2]
    whose = [{one["user"] for one in news.subscribers("news", ts_of_a, place=i)} for i in range(3)]
    assert whose == [{"u0", "u2", "u4", "u6", "u9"}, {"u1", "u3", "u5", "u6", "u8"}, {"u3", "u6"}]
    with pytest.raises(InvalidArgument, match="text"):
        news.store_subscriptions("news", [{"name": "x", "where": topic == "\ud800"}])
    with pytest.raises(InvalidArgument, match="user of a durable"):
        news.store_subscriptions("news", [{"name": "x", "user": "u" * 257}])
    with pytest.raises(InvalidArgument, match="name of a durable"):
        news.store_subscriptions("news", [{"name": "x"}, {"name": 7}])


def test_texts_that_are_numbers_are_read_as_such(db: Any) -> None:
    db.create_event_table("sales", event_time="ts", columns={"ts": "timestamp", "price": "decimal(9,2)"})
    wanted = [{"name": f"{i}", "where": col("price") == text} for i, text in enumerate(("1.5", "2.50", "2.5"))]
    db.store_subscriptions("sales", wanted)
    ts = db.append("sales", [{"ts": T0, "price": "1.5"}, {"ts": T0, "price": "2.5"}])
    assert db.reached("sales", ts) == [1, 2]


@pytest.mark.parametrize("events", [3, 40])
def test_an_event_that_a_predicate_cannot_be_asked_about_leaves_the_others_of_its_commit(db: Any, events: int) -> None:
    """It is out of range there, so it does not select that one."""
    db.create_event_table("sales", event_time="ts", columns={"ts": "timestamp", "n": "int64"})
    db.store_subscriptions("sales", [{"name": "large", "where": col("n") + 2**62 > 2**62}])
    ts = db.append("sales", [{"ts": T0, "n": 2**62 if at == 1 else at} for at in range(events)])
    assert db.reached("sales", ts) == [int(at > 1) for at in range(events)]
    assert [len(db.subscribers("sales", ts, place=at)) for at in range(3)] == [0, 0, 1]
