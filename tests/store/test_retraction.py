"""Retraction (R22) against brute force: whatever consolidation, compaction, snapshots and restarts do meanwhile.

The model keeps every commit with its events, and for each retraction the events that it removed. What a snapshot at S
should answer follows from the events that are left at S: their order, exact sums, extremes, and for float sums the bits
of: each commit's delta, its events added left to right from 0.0, and these folded in the order of the commits.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.embedded.database import Database
from kivi.mvcc.groups import Outcome

SLOT_US = 300_000_000
BEGIN_US = 1_700_000_100_000_000
AGGREGATES = {
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
        group_by = ["k", *([kivi.time_slot("ts", "5m", name="slot")] if slotted else [])]
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
        events = self.some(count or self.random.choice([1, 3, 40, 90]))
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
        self.random.choice(
            [
                self.append, self.append, self.append, self.append_each, self.retract, self.retract, self.reopen,
                consolidator.run, consolidator.run_light, consolidator.compact, consolidator.sweep,
                lambda: self.snapshots.append(self.db.snapshot()), self.close_snapshots,
            ]
        )()  # fmt: skip

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


@pytest.mark.parametrize("seed", range(4))
def test_history(tmp_path: Path, seed: int) -> None:
    history = History(tmp_path / "data", seed)
    history.append(90)
    for i in range(60):
        history.step()
        if i % 3 == 0:
            history.check()
    history.check()
    history.db.close()
