"""Events that expire: none before its moment, all once a pass has found them, and their disk is given back (R22)."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.embedded.database import Database
from kivi.runtime.settings import Settings
from kivi.store.facade import Store

COLUMNS = {"ts": "timestamp", "until": "timestamp", "n": "int64", "k": "int64"}
SECOND = 1_000_000


class Clocked:
    """A store whose clock the test moves; passes are made by hand."""

    def __init__(self, path: Path | None) -> None:
        self.now = 1_780_000_000
        settings = Settings.of({"background": False, "block_rows": 64})
        self.store = Store.open(None if path is None else str(path), settings=settings, clock=lambda: float(self.now))
        self.db = Database(self.store)

    def append(self, rng: random.Random, count: int, first: int) -> list[dict[str, Any]]:
        untils = [rng.choice([None, rng.randint(-3, 30)]) for _ in range(count)]
        events = [
            {
                "ts": self.now * SECOND + i,
                "until": u if u is None else (self.now + u) * SECOND,
                "n": first + i,
                "k": i % 3,
            }
            for i, u in enumerate(untils)
        ]
        self.db.append("posts", events)
        return events


@pytest.fixture
def clocked(tmp_path: Path) -> Any:
    made = Clocked(tmp_path / "data")
    made.db.create_event_table("posts", event_time="ts", columns=COLUMNS, expires="until")
    made.db.create_aggregate(
        "by_k", source="posts", group_by=["k"], measures={"n": kivi.count(), "most": kivi.max("n")}
    )
    yield made
    made.db.close()


def shown(db: Any, as_of: int | None = None) -> list[int]:
    with db.snapshot(as_of=as_of) as snap:
        return sorted(row["n"] for row in snap.scan("posts"))


def aggregated(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[int, list[int]] = {}
    for event in events:
        groups.setdefault(event["k"], []).append(event["n"])
    return [{"k": k, "n": len(found), "most": max(found)} for k, found in sorted(groups.items())]


def test_what_is_seen_is_what_has_not_expired(clocked: Clocked) -> None:
    """Random moments, some of them over when their events come; in blocks and in settled files, whose rows go."""
    rng, db, store = random.Random(5), clocked.db, clocked.store
    there: list[dict[str, Any]] = []
    for turn in range(12):
        there += clocked.append(rng, rng.randrange(120), 1_000 * turn)
        since = db.watermark()
        assert shown(db) == [event["n"] for event in there]  # none before a pass, which alone moves them
        clocked.now += rng.randrange(4)
        gone = [e for e in there if e["until"] is not None and e["until"] <= clocked.now * SECOND]
        with db.snapshot() as before:
            assert store.expiry.run() == len(gone)
            assert len(list(before.scan("posts"))) == len(there)  # a snapshot keeps what it has
        there = [event for event in there if event not in gone]
        assert shown(db) == [event["n"] for event in there]
        with db.snapshot() as snap:
            assert list(snap.scan("by_k")) == aggregated(there)
            tail = [row["n"] for row in snap.changes("posts", since=max(0, since - 1))]
            assert set(tail) <= {event["n"] for event in there}  # it passes over what is gone
        assert store.expiry.run() == 0
        if turn % 3 == 2:
            store.consolidate()
            store.consolidator.flush()
            store.settle()
            store.settle()
            events = store.event_tables.of(store.table("posts").id)
            assert events is not None
            assert sum(file.rows for file in events.files()) + events.hot_rows() == len(there)


def test_a_pass_beside_writers_and_another_retraction(clocked: Clocked) -> None:
    rng, db = random.Random(6), clocked.db
    events = [event for turn in range(6) for event in clocked.append(rng, 50, 1_000 * turn)]
    clocked.now += 10
    more: list[list[dict[str, Any]]] = []
    writer = threading.Thread(target=lambda: more.extend(clocked.append(rng, 20, 10_000 + 100 * i) for i in range(20)))
    writer.start()

    def retract(tx: Any) -> None:
        tx.retract("posts", where=kivi.col("k") == 1)

    found = 0
    while writer.is_alive() or not more:
        found += clocked.store.expiry.run()
    writer.join()
    db.run(retract)
    clocked.store.expiry.run()
    events += [event for part in more for event in part]
    kept = [e for e in events if (e["until"] is None or e["until"] > clocked.now * SECOND) and e["k"] != 1]
    assert found
    assert shown(db) == sorted(event["n"] for event in kept)
    with db.snapshot() as snap:
        assert list(snap.scan("by_k")) == aggregated(kept)


def test_the_store_does_it_by_itself() -> None:
    with kivi.open() as db:
        db.create_event_table("posts", event_time="ts", columns=COLUMNS, expires="until")
        with db.subscribe("posts") as told:
            db.append("posts", [{"ts": 1, "until": 2, "n": 1}, {"ts": 1, "until": None, "n": 2}])
            assert told_of(told) == [1, 2]
            gone = threading.Event()
            for _ in range(300):
                if shown(db) == [2]:
                    break
                gone.wait(0.1)
            assert shown(db) == [2]
            db.append("posts", [{"ts": 2, "until": None, "n": 3}])  # and its subscribers go on
            assert told_of(told) == [3]


def told_of(subscription: Any) -> list[int]:
    update = subscription.next(timeout_s=10)
    return [change.row["n"] for change in update.changes]
