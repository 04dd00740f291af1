"""Retraction (R22) against brute force: whatever consolidation, compaction, snapshots and restarts do meanwhile.

The model keeps every commit with its events, and for each retraction the events that it removed. What a snapshot at S
should answer follows from the events that are left at S: their order, exact sums, extremes, and for float sums the bits
of: each commit's delta, its events added left to right from 0.0, and these folded in the order of the commits.
"""

from __future__ import annotations

import itertools
import random
import struct
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kivi
from kivi.api.arguments import ScanArguments
from kivi.arrow.records import event_batch
from kivi.embedded.database import Database
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, table_prefix
from kivi.model.declarations import aggregate_schema
from kivi.mvcc.groups import Outcome
from kivi.runtime.settings import Settings
from kivi.store.facade import Store
from tests.waiting import wait_until

SLOT_US = 300_000_000
BEGIN_US = 1_700_000_100_000_000
AGGREGATES: dict[str, tuple[bool, dict[str, Any], str | None]] = {
    "exact": (True, {"calls": kivi.count(), "us": kivi.sum("us")}, None),
    "uncounted": (True, {"us": kivi.sum("us")}, None),
    "mixed": (True, {"calls": kivi.count(), "load": kivi.sum("load"), "least": kivi.min("us")}, None),
    "extremes": (False, {"least": kivi.min("us"), "most": kivi.max("load"), "calls": kivi.count()}, None),
    "kept": (True, {"load": kivi.sum("load"), "us": kivi.sum("us")}, "1d"),
}


def declare(db: Database) -> None:
    columns = {"k": "int64", "ts": "timestamp", "us": "int64", "load": "float64", "name": "string"}
    db.create_event_table("calls", event_time="ts", columns=columns)
    for name, (slotted, measures, history) in AGGREGATES.items():
        group_by: list[Any] = ["k", *([kivi.time_slot("ts", "5m", name="slot")] if slotted else [])]
        db.create_aggregate(name, source="calls", group_by=group_by, measures=measures, history=history)


class Model:
    """Events by (CTS, position); ``removed``: at which CTS each was retracted."""

    def __init__(self) -> None:
        self.events: dict[tuple[int, int], dict[str, Any]] = {}
        self.removed: dict[tuple[int, int], int] = {}

    def add(self, cts: int, events: list[dict[str, Any]]) -> None:
        self.events |= {(cts, i): event for i, event in enumerate(events)}

    def left(self, ts: int) -> list[tuple[int, dict[str, Any]]]:
        never = 2**63
        found = sorted(name for name in self.events if name[0] <= ts < self.removed.get(name, never))
        return [(name[0], self.events[name]) for name in found]

    def rows(self, aggregate: str, ts: int) -> dict[tuple[Any, ...], dict[str, Any]]:
        slotted, measures, _ = AGGREGATES[aggregate]
        groups: dict[tuple[Any, ...], list[tuple[int, dict[str, Any]]]] = {}
        for cts, event in self.left(ts):
            slot = event["ts"] // SLOT_US * SLOT_US
            groups.setdefault((event["k"], slot) if slotted else (event["k"],), []).append((cts, event))
        return {key: {name: measured(call, group) for name, call in measures.items()} for key, group in groups.items()}


def measured(call: Any, group: list[tuple[int, dict[str, Any]]]) -> Any:
    values = [(cts, event[call.argument]) for cts, event in group] if call.argument else []
    match call.operator:
        case "count":
            return len(group)
        case "min":
            return min(value for _, value in values)
        case "max":
            return max(value for _, value in values)
    total: Any = 0.0 if call.argument == "load" else 0
    for cts in dict.fromkeys(cts for cts, _ in values):
        delta = type(total)(0)
        for of, value in values:
            delta = delta + value if of == cts else delta
        total += delta
    return total


class History:
    """A database, its model, and the snapshots that are open."""

    def __init__(self, path: Path, seed: int) -> None:
        self.random, self.path, self.model = random.Random(seed), path, Model()
        self.snapshots: list[Any] = []
        self.db = self._opened()
        declare(self.db)

    def _opened(self) -> Database:
        return kivi.open(self.path, background=False, block_rows=256)

    def some(self, count: int) -> list[dict[str, Any]]:
        pick = self.random.randrange
        return [
            {
                "k": pick(6),
                "ts": BEGIN_US + pick(1_500) * 1_000_000,
                "us": pick(2**40) - 2**39,
                "load": self.random.uniform(-1, 1) * 10.0 ** pick(9),
                "name": f"user {pick(9)}",
            }
            for _ in range(count)
        ]

    def append(self, count: int | None = None) -> None:
        events = self.some(count or self.random.choice([1, 3, 40, 90, 400]))
        self.model.add(self.db.append("calls", events), events)

    def append_each(self) -> None:
        events = self.some(self.random.choice([1, 50]))
        with self.db.appender("calls", each=True) as appender:
            futures = [appender.append(**event) for event in events]
        for future, event in zip(futures, events, strict=True):
            self.model.add(future.result(), [event])

    def retract(self) -> None:
        pick = self.random.randrange
        low = BEGIN_US + pick(1_500) * 1_000_000 if pick(2) else None
        where, chosen = self.random.choice(
            [
                (kivi.col("k") == 3, lambda event: event["k"] == 3),
                (kivi.col("us") > 2**38, lambda event: event["us"] > 2**38),
                (kivi.col("name") == "user 4", lambda event: event["name"] == "user 4"),
                (kivi.col("us") > 2**41, lambda event: False),
            ]
        )
        with self.db.transaction() as tx:
            start = None if low is None else (low,)
            found = tx.retract("calls", where=where, start=start)
            seen = self.model.left(tx.start_ts)
            matching = [e for _, e in seen if chosen(e) and (low is None or e["ts"] >= low)]
            assert found == len(matching)
            assert self.random.choice([True, False]) or tx.retract("calls", where=where, start=start) == 0
            assert events_of(tx) == [e for _, e in seen if not any(e is other for other in matching)]
            for _ in range(pick(3)):
                self.append()
        gone = {id(event) for event in matching}
        assert tx.commit_ts is not None
        for name, event in self.model.events.items():
            if id(event) in gone:
                self.model.removed[name] = tx.commit_ts

    def reopen(self) -> None:
        self.close_snapshots()
        self.random.choice([self.db.close, self.db.store.crash])()
        self.db = self._opened()

    def close_snapshots(self) -> None:
        while self.snapshots:
            self.snapshots.pop().close()

    def step(self) -> None:
        consolidator = self.db.store.consolidator
        steps: list[Callable[[], object]] = (
            [
                self.append, self.append, self.append, self.append_each, self.retract, self.retract, self.reopen,
                consolidator.run, consolidator.run_light, consolidator.compact, consolidator.sweep,
                partial(self.db.store.settle, self.random.choice([16, 64, 1 << 20])),
                lambda: self.snapshots.append(self.db.snapshot()), self.close_snapshots,
            ]
        )  # fmt: skip
        self.random.choice(steps)()

    def check(self) -> None:
        with self.db.snapshot() as now:
            for snapshot in (now, *self.snapshots):
                self.check_at(snapshot)

    def check_at(self, snapshot: Any) -> None:
        ts, db = snapshot.ts, self.db
        left = self.model.left(ts)
        assert events_of(snapshot) == [event for _, event in left], ts
        total = snapshot.summary("calls", {"n": kivi.count(), "us": kivi.sum("us"), "most": kivi.max("load")})
        assert total["n"] == len(left)
        assert total["most"] == max((event["load"] for _, event in left), default=None)
        for name in AGGREGATES:
            expected = self.model.rows(name, ts)
            schema = db.store.table(name)
            found = {}
            for row in snapshot.scan(name):
                key = tuple(micros(row.pop(column)) for column in schema.key_names)
                found[key] = row
            assert found.keys() == expected.keys(), (name, ts)
            for key, row in found.items():
                assert row == expected[key], (name, key, ts)
            key = self.random.choice([*expected, (77,) * len(schema.key_names)])
            row = snapshot.get(name, key, [*AGGREGATES[name][1]])
            assert row == expected.get(key), (name, key, ts)


def micros(value: Any) -> Any:
    return value if isinstance(value, int) else round(value.timestamp() * 1_000_000)


def events_of(reads: Any) -> list[dict[str, Any]]:
    return [{**row, "ts": micros(row["ts"])} for row in reads.scan("calls")]


STATES = {
    "p90": kivi.quantiles("load"),
    "users": kivi.distinct("name"),
    "mean": kivi.avg("us"),
    "first": kivi.first("name"),
    "last": kivi.last("us"),
    "slowest": kivi.argmax("name", by="us"),
    "largest": kivi.largest("us", 2),
    "plus": kivi.sum("us", where=kivi.col("us") > 0),
}


INVERSE = {name: STATES[name] for name in ("p90", "mean", "plus")}
"""Measures that a retraction takes away by one more delta."""


def states_of(db: Database) -> list[dict[str, Any]]:
    with db.snapshot() as now:
        rows = itertools.chain(now.scan("states"), now.scan("inverse"))
        return [{**row, "p90": row["p90"].quantile(0.9), "n": row["p90"].count} for row in rows]


def declare_states(db: Database) -> None:
    group_by: list[Any] = ["k", kivi.time_slot("ts", "1d", tz="Europe/Madrid", name="day")]
    db.create_aggregate("states", source="calls", group_by=group_by, measures=STATES)
    db.create_aggregate("inverse", source="calls", group_by=group_by, measures=INVERSE)


@pytest.mark.parametrize("seed", range(1))
def test_states_are_those_of_what_remains(tmp_path: Path, seed: int) -> None:
    """Equal to those of a store that got nothing but the remaining events, in the same commits."""
    history = History(tmp_path / "data", 10 + seed)
    declare_states(history.db)
    for i in range(4):
        history.append(90)
        history.append_each()
        history.retract()
        (history.db.consolidate if i % 2 else history.reopen)()
    history.retract()
    with kivi.open(background=False) as fresh:
        declare(fresh)
        declare_states(fresh)
        left = history.model.left(2**62)
        for cts in dict.fromkeys(cts for cts, _ in left):
            fresh.append("calls", [event for of, event in left if of == cts])
        assert states_of(history.db) == states_of(fresh)
        history.db.consolidate()
        assert states_of(history.db) == states_of(fresh)
    history.db.close()


@pytest.mark.parametrize("seed", range(3))
def test_history(tmp_path: Path, seed: int) -> None:
    history = History(tmp_path / "data", seed)
    history.append(90)
    for i in range(36):
        history.step()
        if i % 4 == 0:
            history.check()
    history.check()
    history.db.close()


def test_what_a_retraction_computed_again_is_a_boundary_of_what_is_combined(tmp_path: Path) -> None:
    history = History(tmp_path / "data", 1)
    for _ in range(4):
        for step in (history.append, history.append, history.retract, history.append, history.append):
            step()
        history.db.store.consolidator.run_light()
        history.check()
        history.db.consolidate()
    history.db.close()


# -- what a history does not bring about -----------------------------------------------------------------


def retract(db: Database, **wanted: Any) -> int:
    with db.transaction() as tx:
        tx.retract("calls", **wanted)
    assert tx.commit_ts is not None
    return tx.commit_ts


def remove(model: Model, cts: int, start_ts: int, chosen: Any) -> None:
    for name, event in model.events.items():
        if name[0] <= start_ts and chosen(event):
            model.removed.setdefault(name, cts)


@pytest.mark.parametrize("each", [False, True])
def test_what_is_in_flight_where_it_enters_is_in_it(tmp_path: Path, each: bool) -> None:
    """Two appends are durable and not applied when the retraction enters: one is finished before it, one after."""
    history = History(tmp_path / "data", 1)
    history.append(90)
    db, store = history.db, history.db.store
    txn = store.transaction()
    schema = store.table("calls")
    txn.retract(schema, ScanArguments("calls", where=kivi.col("k") < 4).bound(schema))
    held: list[tuple[int, list[dict[str, Any]]]] = []
    retractions = store.commits.retractions

    def with_appends(*args: Any) -> None:
        retractions.prepare(*args)
        store.committer.hold = lambda commit: True
        for _ in range(2):
            events = history.some(3 if not each else 40)
            other = store.blind_transaction()
            other.append(schema, event_batch(schema, events))
            store.commit(other, done=lambda outcome: None)
            wait_until(lambda: len(store.committer.held) == len(held) + 1)
            held.append((store.committer.held[-1], events))
        store.committer.hold = lambda commit: False

    store.commits.retractions = SimpleNamespace(prepare=with_appends)  # type: ignore[assignment]
    done: list[Outcome] = []
    store.commit(txn, done=done.append)
    store.commits.retractions = retractions
    for cts, events in held:
        history.model.add(cts, events)
        store.committer.finish_held(cts)
    wait_until(lambda: bool(done))
    assert done[0].commit_ts is not None and done[0].commit_ts > held[-1][0]
    remove(history.model, done[0].commit_ts, txn.start_ts, lambda event: event["k"] < 4)
    for step in (lambda: None, db.consolidate, history.reopen):
        step()
        history.check()
    history.db.close()


def test_what_is_applied_just_before_it_reads_counts_once(tmp_path: Path) -> None:
    """An append is applied after a retraction began to follow commits, and before it took its watermark."""
    history = History(tmp_path / "data", 4)
    history.append(90)
    retractions = history.db.store.commits.retractions
    wait_for_entered, at = retractions.wait_for_entered, 0

    def with_append(timeout_s: float) -> bool:
        nonlocal at
        history.append(40)
        at = history.db.watermark()
        return wait_for_entered(timeout_s)

    retractions.wait_for_entered = with_append
    with history.db.transaction() as tx:
        tx.retract("calls", where=kivi.col("k") < 4)
    retractions.wait_for_entered = wait_for_entered
    assert tx.commit_ts is not None and tx.start_ts < at < tx.commit_ts
    remove(history.model, tx.commit_ts, tx.start_ts, lambda event: event["k"] < 4)
    history.check()
    history.db.close()


def test_appends_beside_it(tmp_path: Path) -> None:
    """Writers go on while one event in five is retracted, again and again: nobody waits, and nothing is lost."""
    history = History(tmp_path / "data", 2)
    db = history.db
    db.close()
    history.db = db = kivi.open(tmp_path / "data", consolidate_every_s=0.002, fold_every_s=0.05, block_rows=512)
    stop, lock = threading.Event(), threading.Lock()
    pick = random.Random(5)

    def append() -> None:
        while not stop.is_set():
            with lock:
                events = history.some(pick.choice([1, 40]))
            cts = db.append("calls", events)
            with lock:
                history.model.add(cts, events)

    threads = [threading.Thread(target=append) for _ in range(2)]
    for thread in threads:
        thread.start()
    retractions = []
    for name in [f"user {i}" for i in range(5)]:
        with db.transaction() as tx:
            tx.retract("calls", where=kivi.col("name") == name)
        assert tx.commit_ts is not None
        retractions.append((tx.commit_ts, tx.start_ts, name))
    stop.set()
    for thread in threads:
        thread.join()
    for cts, start_ts, name in retractions:
        remove(history.model, cts, start_ts, lambda event, name=name: event["name"] == name)
    history.check()
    db.consolidate()
    history.check()
    db.close()


def test_what_it_needs_below_a_floor_refuses_it(tmp_path: Path) -> None:
    clock = [BEGIN_US / 1e6]
    store = Store.open(str(tmp_path / "data"), settings=Settings(background=False), clock=lambda: clock[0])
    db = Database(store)
    columns = {"k": "int64", "ts": "timestamp", "us": "int64"}
    db.create_event_table("calls", event_time="ts", columns=columns, retention="1h")
    five_minutes: list[Any] = ["k", kivi.time_slot("ts", "5m", name="slot")]
    db.create_aggregate("sums", source="calls", group_by=["k"], measures={"us": kivi.sum("us")})
    db.create_aggregate("slots", source="calls", group_by=five_minutes, measures={"most": kivi.max("us")})

    def add(*events: tuple[int, int, int]) -> None:
        db.append("calls", [{"k": k, "ts": BEGIN_US + s * 1_000_000, "us": us} for k, s, us in events])

    add((1, 0, 5), (1, 10, 7), (2, 10, 3))
    add((1, 7_000, 11), (1, 7_001, 13), (2, 7_000, 17), (3, 7_000, 19))
    db.consolidate()
    clock[0] += 7_001
    store.housekeeping.move_floors()
    db.create_aggregate("most", source="calls", group_by=["k"], measures={"most": kivi.max("us")})  # of what is left
    retract(db, where=(kivi.col("us") == 11) | (kivi.col("us") == 17))
    with db.snapshot() as now:
        assert {row["k"]: row["us"] for row in now.scan("sums")} == {1: 25, 2: 3, 3: 19}  # 2 may have forgotten events
        assert {row["k"]: row["most"] for row in now.scan("most")} == {1: 13, 3: 19}
    db.drop("most")
    add((1, 3_500, 23), (1, 3_700, 29))
    retract(db, where=kivi.col("us") == 29)
    with pytest.raises(kivi.InvalidArgument, match="slots") as refused:
        retract(db, where=kivi.col("us") == 23)
    assert refused.value.details["aggregates"] == "slots"
    with db.snapshot() as now:
        assert {row["k"]: row["us"] for row in now.scan("sums")} == {1: 48, 2: 3, 3: 19}
        assert len(list(now.scan("calls"))) == 3
    store.close()


def test_sums_beyond_64_bits(tmp_path: Path) -> None:
    with kivi.open(tmp_path / "data", background=False) as db:
        db.create_event_table("calls", event_time="ts", columns={"k": "int64", "ts": "timestamp", "us": "int64"})
        db.create_aggregate("sums", source="calls", group_by=["k"], measures={"us": kivi.sum("us")})
        least, most = -(2**63), 2**63 - 1
        db.append("calls", [{"k": k, "ts": BEGIN_US, "us": us} for k in range(50) for us in (least, least, most, 5)])
        retract(db, where=kivi.col("us") == least)
        with pytest.raises(kivi.OutOfRange):
            db.get("sums", (1,))
        db.consolidate()
        retract(db, where=kivi.col("us") == most)
        assert db.get("sums", (1,)) == {"k": 1, "us": 5}
        retract(db)
        db.consolidate()
        with db.snapshot() as now:
            assert list(now.scan("sums")) == list(now.scan("calls")) == []


def test_no_value_stays_in_blocks(tmp_path: Path) -> None:
    history = History(tmp_path / "data", 3)
    history.append(600)
    db, store = history.db, history.db.store
    db.consolidate()
    old = db.snapshot()
    cts = retract(db, where=kivi.col("name") == "user 4")
    marks = [b"user 4"]
    marks += [struct.pack("<d", e["load"]) for e in history.model.events.values() if e["name"] == "user 4"]
    assert len(stored(db, marks)) > len(marks) // 2
    remove(history.model, cts, old.ts, lambda event: event["name"] == "user 4")
    gone = sum(event["name"] == "user 4" for event in history.model.events.values())
    store.consolidator.close()
    for _ in range(20):
        store.consolidator.compact()
    assert statistics(db)["retracted_in_blocks"] == gone  # the snapshot still sees them
    history.check_at(old)
    old.close()
    store.consolidator.close()  # which flushes
    for _ in range(300):  # of which few look for what a snapshot had held back
        store.consolidator.compact()
    assert statistics(db)["retracted_in_blocks"] == 0
    assert not stored(db, marks)
    history.check()
    with db.snapshot(as_of=cts - 1) as before, pytest.raises(kivi.SnapshotTooOld, match="retracted"):
        list(before.scan("calls"))
    assert statistics(db)["retracted_in_log"] == gone
    store.consolidator.flush()
    history.append(1)
    assert statistics(db)["retracted_in_log"] in (0, gone)  # a segment goes as a whole
    history.reopen()
    history.check()
    history.db.close()


def stored(db: Database, marks: list[bytes]) -> list[bytes]:
    prefix = table_prefix(Space.EVENT_DATA, db.store.table("calls").id)
    blocks = [value for _, value in db.store.engine.scan(prefix, prefix_end(prefix))]
    return [mark for mark in marks if any(mark in block for block in blocks)]


def statistics(db: Database) -> dict[str, int]:
    found: dict[str, int] = db.describe("calls")["statistics"]
    return found


def test_it_waits_for_a_backfill(tmp_path: Path) -> None:
    history = History(tmp_path / "data", 4)
    history.append(90)
    db, store = history.db, history.db.store
    schema = aggregate_schema("late", store.table("calls"), ["k"], {"most": kivi.max("us")}, None, None)
    (building,) = store._tables.create([schema])
    with pytest.raises(kivi.Unavailable, match="built"):
        retract(db, where=kivi.col("k") == 1)
    store.backfill.build([building], None)
    retract(db, where=kivi.col("k") == 1)
    assert db.get("late", (1,)) is None
    db.close()
