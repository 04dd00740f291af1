"""What is told of a retraction: the rows that it touched, cut commits of subscriptions, copies that still hold it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.embedded.database import Database
from kivi.live import tails
from kivi.runtime.settings import Settings
from kivi.store.facade import Store
from tests.store.test_retraction import BEGIN_US, History, declare, micros, remove, retract


def named(snapshot: Any, aggregate: str, since: int, keys: list[str], **asked: Any) -> dict[tuple[Any, ...], bool]:
    rows = snapshot.changes(aggregate, since=since, removed=True, **asked)
    found = [(tuple(micros(row[key]) for key in keys), row["_removed"]) for row in rows]
    assert [key for key, _ in found] == sorted({key for key, _ in found})  # in order, each once
    return dict(found)


@pytest.mark.parametrize("seed", range(2))
def test_changes_name_touched_rows(tmp_path: Path, seed: int) -> None:
    """Those of events that came after ``since`` and of events up to it that went; ended rows as removed ones."""
    history = History(tmp_path / "data", 20 + seed)
    model, db = history.model, history.db
    marks = list[int]()
    pick = random.Random(seed)
    for i in range(12):
        marks.append(db.watermark())
        pick.choice([history.append, history.append_each, history.retract, history.retract])()
        if i % 5 == 3:
            db.store.consolidator.run()  # which seals, and makes nothing blank
        with db.snapshot() as now:
            for since in {marks[0], pick.choice(marks), marks[-1]}:
                for aggregate, keys in {"exact": ["k", "slot"], "extremes": ["k"]}.items():
                    before, after = model.rows(aggregate, since), model.rows(aggregate, now.ts)
                    touched = {
                        (event["k"], event["ts"] // 300_000_000 * 300_000_000)[: len(keys)]
                        for (cts, place), event in model.events.items()
                        if (since < cts <= now.ts and model.removed.get((cts, place), 2**63) > now.ts)
                        or (cts <= since < model.removed.get((cts, place), 2**63) <= now.ts)
                    }
                    found = named(now, aggregate, since, keys)
                    assert found == {key: key not in after for key in touched}, (aggregate, since)
                    assert {key for key in before if before[key] != after.get(key)} <= found.keys()
    db.close()


def test_changes_when_the_values_are_gone(tmp_path: Path) -> None:
    with kivi.open(tmp_path / "data", background=False) as db:
        declare(db)
        event = {"ts": BEGIN_US, "us": 1, "load": 1.0, "name": ""}
        since = db.append("calls", [{"k": k, **event} for k in range(3)])
        db.consolidate()
        cts = retract(db, where=kivi.col("k") == 1)
        with db.snapshot() as now:
            assert named(now, "extremes", since, ["k"]) == {(1,): True}
        db.store.consolidator.close()
        for _ in range(20):
            db.store.consolidator.compact()
        assert db.describe("calls")["statistics"]["retracted_in_blocks"] == 0
        with db.snapshot() as now:
            with pytest.raises(kivi.SnapshotTooOld, match="read the table again") as told:
                named(now, "extremes", since, ["k"])
            assert told.value.details["kept_since"] == cts
            assert named(now, "extremes", cts, ["k"]) == {}
            assert [row["k"] for row in now.changes("extremes", since=since)] == [0, 2]
            assert named(now, "extremes", since, ["k"], partial=True) == {(0,): False, (2,): False}


def test_a_cut_commit_that_is_retracted_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subscriber who was told a part of it is not told the wrong rest."""
    monkeypatch.setattr(tails, "_PAGE_ROWS", 10)
    with kivi.open(background=False, block_rows=64) as db:
        declare(db)
        rows = [{"k": k % 2, "ts": BEGIN_US, "us": k, "load": 0.0, "name": ""} for k in range(200)]
        cts = db.append("calls", rows)
        db.consolidate()

        def begin(since: int, skip: int = 0) -> Any:
            return db.subscribe("calls", since=since, skip=skip, retractions="ignore", interval_ms=0)

        with begin(0) as live:
            update = live.next(60.0)
            told = [change.row["us"] for change in update.changes]
            since, skip = live.ts, live.skip
        assert (since, skip) == (cts - 1, len(told))
        assert 10 <= len(told) < 200
        at = retract(db, where=kivi.col("k") == 1)
        with pytest.raises(kivi.EventsRetracted, match="told a part") as met, begin(since, skip) as live:
            live.next(60.0)
        assert met.value.details["retracted_at"] == at
        left = list[int]()
        with begin(since) as live:  # from the commit's beginning
            while len(left) < 100:
                left += [change.row["us"] for change in live.next(60.0).changes]
        assert left == list(range(0, 200, 2))


def test_copies_that_hold_what_was_retracted(tmp_path: Path) -> None:
    history = History(tmp_path / "data", 30)
    db, first, second = history.db, tmp_path / "first", tmp_path / "second"

    def holding() -> list[str]:
        found: list[str] = db.describe("calls")["retracted_in_backups"]
        return found

    db.checkpoint(str(tmp_path / "empty"))
    history.append(90)
    db.checkpoint(str(first))
    made = db.backup(str(tmp_path / "backups"))["path"]
    assert holding() == []
    retract(db, where=kivi.col("k") == 1)
    db.checkpoint(str(second))  # holds none of it
    assert holding() == sorted([str(first), made])
    retract(db, where=kivi.col("k") == 2)
    assert holding() == sorted([str(first), made, str(second)])
    db.consolidate()
    db.close()
    db = history.db = history._opened()
    assert holding() == sorted([str(first), made, str(second)])
    shutil.rmtree(first)
    assert holding() == sorted([made, str(second)])
    db.close()
    store = Store.open(str(second))
    store.close()


# -- aggregates that were altered, or forget rows ------------------------------------------------------


def test_measures_without_earlier_events(tmp_path: Path) -> None:
    """Measures that were added with backfill=False have later events only, before and after a retraction."""
    history = History(tmp_path / "data", 40)
    db, model = history.db, history.model
    history.append(90)
    added = {"late_most": kivi.max("us"), "late_n": kivi.count(), "late_load": kivi.sum("load")}
    db.alter_aggregate("mixed", add_measures=added, backfill=False)
    since = db.watermark()
    for i in range(3):
        history.append(60)
        history.append(30)
        with db.transaction() as tx:
            tx.retract("calls", where=kivi.col("name") == f"user {i}")
        remove(model, tx.commit_ts or 0, tx.start_ts, lambda event, i=i: event["name"] == f"user {i}")
        (db.consolidate if i % 2 else history.reopen)()
        db = history.db
        expected = model.rows("mixed", db.watermark())
        late: dict[Any, list[tuple[int, Any]]] = {key: [] for key in expected}
        for cts, event in model.left(db.watermark()):
            if cts > since:
                late[event["k"], event["ts"] // 300_000_000 * 300_000_000].append((cts, event))
        found = {}
        with db.snapshot() as now:
            for row in now.scan("mixed"):
                found[row.pop("k"), micros(row.pop("slot"))] = row
        assert found.keys() == expected.keys()
        for key, row in found.items():
            events = [event for _, event in late[key]]
            assert row["late_n"] == len(events), key
            assert row["late_most"] == max((event["us"] for event in events), default=None), key
            total = 0.0
            for cts in dict.fromkeys(cts for cts, _ in late[key]):
                of_commit = 0.0
                for at, event in late[key]:
                    of_commit = of_commit + event["load"] if at == cts else of_commit
                total += of_commit
            assert row["late_load"] == total, key
            assert {name: row[name] for name in expected[key]} == expected[key]
    db.close()


def test_aggregates_that_forget_rows(tmp_path: Path) -> None:
    """Rows below an aggregate's floor stay away; those above are those of what remains."""
    clock = [BEGIN_US / 1e6]
    store = Store.open(str(tmp_path / "data"), settings=Settings(background=False), clock=lambda: clock[0])
    db = Database(store)
    db.create_event_table("calls", event_time="ts", columns={"k": "int64", "ts": "timestamp", "us": "int64"})
    group_by: list[Any] = ["k", kivi.time_slot("ts", "5m", name="slot")]
    measures = {"n": kivi.count(), "most": kivi.max("us"), "us": kivi.sum("us")}
    db.create_aggregate("short", source="calls", group_by=group_by, measures=measures, retention="1h")
    pick, events = random.Random(1), list[tuple[int, int, int]]()
    for _ in range(3):
        new = [(pick.randrange(4), BEGIN_US + pick.randrange(7_200) * 1_000_000, pick.randrange(99)) for _ in range(80)]
        db.append("calls", [{"k": k, "ts": ts, "us": us} for k, ts, us in new], late="drop")
        events += new
    clock[0] += 7_200
    db.consolidate()
    store.housekeeping.move_floors()
    floor = db.describe("short")["statistics"]["floor_us"]
    assert floor > BEGIN_US
    for least in (80, 60):
        retract(db, where=kivi.col("us") >= least)
        expected: dict[tuple[int, int], list[int]] = {}
        for k, ts, us in events:
            if us < least and ts // 300_000_000 * 300_000_000 >= floor:
                expected.setdefault((k, ts // 300_000_000 * 300_000_000), []).append(us)
        for step in (lambda: None, db.consolidate):
            step()
            with db.snapshot() as now:
                rows = {(r["k"], micros(r["slot"])): (r["n"], r["most"], r["us"]) for r in now.scan("short")}
            assert rows == {key: (len(us), max(us), sum(us)) for key, us in expected.items()}
    store.close()


@pytest.mark.parametrize("is_pending", [True, False])
def test_events_of_before_an_alteration_are_delivered_with_the_columns_of_now(is_pending: bool) -> None:
    with kivi.open(background=False) as db:
        declare(db)
        event = {"ts": BEGIN_US, "us": 1, "load": 1.0, "name": ""}
        since = db.append("calls", [{"k": k, **event} for k in range(3)])
        if not is_pending:
            db.consolidate()
        db.alter_table("calls", add_columns={"z": "int64"})
        first = retract(db, where=kivi.col("k") == 1)
        db.append("calls", [{"k": 7, **event, "z": 5}])
        second = retract(db, where=kivi.col("k") == 2)
        with db.snapshot() as now:
            tail = now.changes("calls", since=since, columns=["k", "z"], retractions="deliver")
            found = [(row["k"], row["z"], row["_commit_ts"], row["_retracted"]) for row in tail]
            assert found == [(1, None, first, True), (7, 5, second - 1, False), (2, None, second, True)]
            assert len(list(now.changes("calls", since=since, retractions="deliver"))) == 3
            assert named(now, "extremes", since, ["k"]) == {(1,): True, (2,): True, (7,): False}
