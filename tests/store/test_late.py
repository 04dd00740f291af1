"""Late events that a commit leaves out: exactly once, whatever floors, crashes and repeats do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.arrow.records import event_batch
from kivi.errors import InvalidArgument
from tests.golden.driver import EmbeddedDriver

MINUTE = 60_000_000


@pytest.fixture(params=["memory", "disk"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedDriver]:
    made = EmbeddedDriver(None if request.param == "memory" else str(tmp_path / "data"), block_rows=16)
    made.db.create_event_table("e", event_time="ts", retention="1h", columns={"ts": "timestamp", "x": "int64"})
    made.db.create_aggregate("by_x", source="e", group_by=["x"], measures={"n": kivi.count(), "last": kivi.max("ts")})
    yield made
    made.close()


def events(first: int, last: int) -> list[dict[str, int]]:
    return [{"ts": i * MINUTE, "x": i % 3} for i in range(first, last)]


def floor(driver: EmbeddedDriver, minute: int) -> None:
    driver.store.retention.set_floor(driver.store.table("e"), minute * MINUTE)


def check(driver: EmbeddedDriver, minutes: range, dropped: int) -> None:
    """The events of these minutes, their sums, and the count; folded, and after crashes of every kind."""
    steps = (
        lambda: None,
        lambda: driver.db.consolidate(),
        driver.crash,
        lambda: driver.db.consolidate(),
        driver.reopen,
    )
    for step in steps:
        step()
        db = driver.db
        with db.snapshot() as snap:
            found = [row["x"] for row in snap.scan("e")]
            assert sorted(found) == sorted(i % 3 for i in minutes)
            assert [row["x"] for row in snap.changes("e", since=0)] == found  # of a tail no floor hides anything
            assert {row["x"]: row["n"] for row in snap.scan("by_x")} == {x: found.count(x) for x in set(found)}
            assert snap.summary("e", {"n": kivi.count()}) == {"n": len(minutes)}
        statistics = db.describe("e")["statistics"]
        assert (statistics["rows"], statistics.get("late_dropped", 0)) == (len(minutes), dropped)
    db.create_aggregate("again", source="e", group_by=["x"], measures={"n": kivi.count()})
    with db.snapshot() as snap:
        assert sum(row["n"] for row in snap.scan("again")) == len(minutes)


@pytest.mark.parametrize("count", [20, 200])
def test_they_are_left_out_and_counted_once(driver: EmbeddedDriver, count: int) -> None:
    db = driver.db
    floor(driver, 10)
    stages = [db.stage("e", events(0, 5)), db.stage("e", events(5, count))]
    with pytest.raises(InvalidArgument, match="retention floor") as raised, db.transaction(batch=("job", 0)) as tx:
        tx.append_stages("e", stages)
    assert raised.value.details["late"] == 10
    with db.transaction(batch=("job", 0)) as tx:
        tx.append_stages("e", stages, late="drop")
        assert len(list(tx.scan("e"))) == count - 10 == sum(row["n"] for row in tx.scan("by_x"))
    assert db.stats()["late_dropped"] == 10
    driver.crash()
    again = driver.db.stage("e", events(0, 50))
    with driver.db.transaction(batch=("job", 0)) as repeat:
        repeat.append_stages("e", [again], late="drop")
    assert repeat.commit_ts == tx.commit_ts
    check(driver, range(10, count), dropped=10)


@pytest.mark.parametrize("count", [20, 200, 3_000])
def test_an_append_leaves_them_out_and_applies_the_others(driver: EmbeddedDriver, count: int) -> None:
    db = driver.db
    floor(driver, 10)
    with pytest.raises(InvalidArgument, match="retention floor") as raised:
        db.append("e", events(5, count))
    assert (raised.value.details["late"], raised.value.details["floor_us"]) == (5, 10 * MINUTE)
    assert db.append("e", events(5, count), late="drop") == db.watermark()
    with db.transaction() as tx:
        tx.append("e", events(8, 11), late="drop")
        assert [row["ts"].minute for row in tx.scan("e")][-1:] == [10]
        assert sum(row["n"] for row in tx.scan("by_x")) == count - 9
    assert db.stats()["late_dropped"] == 7
    with pytest.raises(InvalidArgument, match="retention floor") as raised, db.transaction() as tx:
        tx.append("e", events(0, 4), late="drop")
        tx.append("e", events(8, 11))  # each append has a choice of its own
    assert raised.value.details["late"] == 2
    with db.transaction() as tx:
        tx.append("e", events(0, 1), late="drop")
        tx.overwrite("e")
        tx.append("e", events(1, 30), late="drop")
    check(driver, range(1, 30), dropped=7)


def test_a_repeat_counts_nothing_twice(driver: EmbeddedDriver) -> None:
    """The digest of a token is over what the caller sent, wherever the floor was and whatever was late."""
    floor(driver, 10)
    text = [{**event, "name": "abc"[event["x"]]} for event in events(5, 3_000)]  # is in codes
    columns = {"ts": "timestamp", "x": "int64", "name": "string"}
    driver.db.create_event_table("f", event_time="ts", retention="1h", columns=columns)
    driver.store.retention.set_floor(driver.store.table("f"), 10 * MINUTE)
    sends = {
        "some": ("e", events(5, 40)),
        "all": ("e", events(0, 3)),
        "none": ("e", events(40, 50)),
        "much": ("f", text),
    }
    first = {token: driver.db.append(*sent, token=token, late="drop") for token, sent in sends.items()}
    assert driver.db.outcome("all") == first["all"]
    for minute, go_on in (
        (20, driver.crash),
        (45, lambda: driver.db.consolidate()),
        (60, driver.reopen),
        (3_000, None),
    ):
        floor(driver, minute)
        driver.store.retention.set_floor(driver.store.table("f"), minute * MINUTE)
        if go_on is not None:
            go_on()
        for late in ("drop", "fail"):
            for token, sent in sends.items():
                assert driver.db.append(*sent, token=token, late=late) == first[token]
        with pytest.raises(InvalidArgument, match="another payload"):
            driver.db.append("e", events(6, 40), token="some", late="drop")
        with pytest.raises(InvalidArgument, match="another payload"):
            driver.db.append("e", events(0, 4), token="all", late="drop")
    assert driver.db.describe("e")["statistics"]["late_dropped"] == 5 + 3
    assert driver.db.describe("f")["statistics"]["late_dropped"] == 5


def test_a_retry_joins_the_attempt_that_is_in_flight(driver: EmbeddedDriver) -> None:
    """The floor has moved between the two, and the first one counts alone."""
    floor(driver, 10)
    committer, outcomes = driver.store.committer, list[Any]()
    schema = driver.store.table("e")
    committer.hold = lambda commit: True
    for _ in range(2):
        txn = driver.store.blind_transaction()
        txn.append(schema, event_batch(schema, events(5, 40)), drop_late=True)
        driver.store.commit(txn, token="t", done=outcomes.append)
        driver.store.retention.set_floor(schema, 20 * MINUTE)  # is durable after what entered the log before it
    committer.hold = None
    (held,) = committer.held
    committer.finish_held(held)
    assert [outcome.commit_ts for outcome in outcomes] == [held, held]
    assert driver.db.describe("e")["statistics"]["late_dropped"] == 5


@pytest.mark.parametrize("staged", [False, True])
def test_the_floor_moves_while_the_commit_is_on_its_way(driver: EmbeddedDriver, monkeypatch: Any, staged: bool) -> None:
    db, committer = driver.db, driver.store.committer
    floor(driver, 3)
    stage = db.stage("e", events(0, 60))
    submit, floors = committer.submit, [20, 30]

    def late(*arguments: Any, **how: Any) -> Any:
        if floors:
            floor(driver, floors.pop(0))
        return submit(*arguments, **how)

    tx = db.transaction()
    if staged:
        tx.append_stages("e", [stage], late="drop")
    else:
        tx.append("e", events(0, 60), late="drop")
    floor(driver, 10)
    with monkeypatch.context() as patch:
        patch.setattr(committer, "submit", late)
        tx.commit()
    assert not floors
    check(driver, range(30, 60), dropped=30)


def test_all_of_a_commit_may_be_late(driver: EmbeddedDriver) -> None:
    floor(driver, 100)
    with driver.db.transaction() as tx:
        tx.append_stages("e", [driver.db.stage("e", events(0, 40))], late="drop")
    driver.db.append("e", events(0, 40), late="drop")
    assert driver.db.append("e", events(0, 2), late="drop") == driver.db.watermark()
    check(driver, range(0), dropped=82)
    with pytest.raises(InvalidArgument, match='"fail" or "drop"'), driver.db.transaction() as tx:
        tx.append_stages("e", [driver.db.stage("e", events(200, 201))], late="ignore")


def test_an_overwrite_has_no_floor(driver: EmbeddedDriver) -> None:
    floor(driver, 100)
    with driver.db.transaction() as tx:
        tx.overwrite("e")
        tx.append_stages("e", [driver.db.stage("e", events(0, 40))], late="drop")
    check(driver, range(40), dropped=0)
