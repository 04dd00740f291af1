"""Threads against one store, judged by the replay oracle: R1 to R8, R10, R11, R14, R17.

Eight threads run random transactions on a few hot rows while consolidation runs every few milliseconds, keep snapshots
open and read them again and again. They stop once the stated minima are reached; if the time is up first, the run
proves nothing and fails as such.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.embedded import Database
from kivi.errors import Conflict, RowExists
from kivi.settings import Settings
from kivi.store import Store
from tests.oracle import Aggregate, Attempt, EventTable, Op, Oracle, Read, RowTable, Table

THREADS = 8
SECONDS_MAX = 20.0
MINIMA = {"commits": 600, "reads": 1_500, "aborts": 50, "consolidations": 50}
KEYS = 10
COLUMNS: dict[str, Any] = {
    "n": kivi.sum("int64"),
    "f": kivi.sum("float64"),
    "hi": kivi.max("int64"),
    "v": "int64",
    "s": "string",
}
TABLES: dict[str, Table] = {
    "t": RowTable(("id",), {"n": "sum", "f": "fsum", "hi": "max", "v": None, "s": None}),
    "e": EventTable(),
    "by_a": Aggregate(
        "e",
        ("a",),
        lambda event: (event["a"],),
        {"total": ("sum", lambda e: e["x"]), "calls": ("sum", lambda e: 1), "slow": ("max", lambda e: e["x"])},
    ),
    "by_b": Aggregate(
        "e",
        ("b",),
        lambda event: (event["b"],),
        {"total": ("sum", lambda e: e["x"]), "fast": ("min", lambda e: e["x"])},
    ),
}
EVENT = {"a": "int64", "b": "string", "ts": "timestamp", "x": "int64"}


def make_tables(db: Any) -> None:
    db.create_table("t", key={"id": "int64"}, columns=COLUMNS)
    db.create_event_table("e", event_time="ts", columns=EVENT)
    measures = {"total": kivi.sum("x"), "calls": kivi.count(), "slow": kivi.max("x")}
    db.create_aggregate("by_a", source="e", group_by=["a"], measures=measures)
    db.create_aggregate("by_b", source="e", group_by=["b"], measures={"total": kivi.sum("x"), "fast": kivi.min("x")})


class Worker:
    """One thread's transactions. Everything it does and sees goes into the oracle."""

    def __init__(self, db: Any, oracle: Oracle, seed: int) -> None:
        self.db = db
        self.oracle = oracle
        self.random = random.Random(seed)
        self.name = f"worker {seed}"
        self.acknowledged = 0
        self.snapshots: list[Any] = []
        self.failure: BaseException | None = None

    def run(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                self.transaction()
                if self.random.random() < 0.3:
                    self.look()
        except BaseException as error:
            self.failure = error
        finally:
            for snap in self.snapshots:
                snap.close()

    # -- writing --------------------------------------------------------------------------------

    def transaction(self) -> None:
        tx = self.db.transaction()
        assert tx.start_ts >= self.acknowledged, "R17: an acknowledged commit is visible to every later begin"
        ops: list[Op] = []
        for _ in range(self.random.choice((1, 1, 2, 3))):
            if self.random.random() < 0.4:
                self.read_in(tx, ops)
            self.step(tx, ops)
        if self.random.random() < 0.3:
            self.read_in(tx, ops)
        if self.random.random() < 0.03:
            tx.rollback()
            return
        try:
            commit_ts = tx.commit()
        except Conflict:
            self.oracle.attempt(Attempt(tx.start_ts, ops, "aborted", who=self.name))
            return
        self.acknowledged = max(self.acknowledged, commit_ts)
        self.oracle.attempt(Attempt(tx.start_ts, ops, "committed", commit_ts, who=self.name))

    def step(self, tx: Any, ops: list[Op]) -> None:
        rng = self.random
        key = (rng.randrange(KEYS),)
        values: dict[str, Any]
        kind = rng.choices(
            ("delta", "put", "put_sum", "insert", "delete", "guard", "append", "bulk"), (40, 12, 4, 6, 6, 10, 12, 2)
        )[0]
        match kind:
            case "delta":
                values = {"n": rng.randrange(-50, 50)}
                if rng.random() < 0.5:
                    values |= {"f": rng.uniform(-1, 1), "hi": rng.randrange(1000)}
                tx.delta("t", key, **values)
                ops.append(Op("delta", "t", key, values))
            case "put":
                values = {"v": rng.randrange(100), "s": f"s{rng.randrange(100)}"}
                tx.put("t", key, **values)
                ops.append(Op("put", "t", key, values))
            case "put_sum":
                tx.put("t", key, n=7)
                ops.append(Op("put", "t", key, {"n": 7}))
            case "insert":
                try:
                    tx.insert("t", key, v=1)
                    ops.append(Op("insert", "t", key, {"v": 1}))
                except RowExists:
                    pass
            case "delete":
                tx.delete("t", key)
                ops.append(Op("delete", "t", key))
            case "guard":
                column = rng.choice(("n", "v", None))
                tx.guard("t", key, column)
                ops.append(Op("guard", "t", key, {} if column is None else {column: None}))
            case _:
                count = 50 if kind == "bulk" else rng.randrange(1, 4)
                events = [
                    {"a": rng.randrange(5), "b": rng.choice("xyz"), "ts": rng.randrange(10**6), "x": rng.randrange(999)}
                    for _ in range(count)
                ]
                tx.append("e", events)
                ops.append(Op("append", "e", events=events))

    # -- reading --------------------------------------------------------------------------------

    def read_in(self, tx: Any, ops: list[Op]) -> None:
        table = self.random.choice(("t", "t", "by_a", "by_b"))
        own = tuple(op for op in ops if op.kind != "guard")
        key: tuple[Any, ...] | None
        if self.random.random() < 0.7:
            key = self.key_of(table)
            found: Any = tx.get(table, key)
        else:
            key, found = None, list(tx.scan(table))
        self.oracle.read(Read(tx.start_ts, table, key, found, own, self.name))

    def key_of(self, table: str) -> tuple[Any, ...]:
        return (self.random.choice("xyz") if table == "by_b" else self.random.randrange(KEYS),)

    def look(self) -> None:
        """Opens a snapshot, or reads one again that has been open for a while, or closes one."""
        if len(self.snapshots) < 3:
            self.snapshots.append(self.db.snapshot(min_snapshot=self.acknowledged))
        snap = self.random.choice(self.snapshots)
        for table in ("t", "by_a", "by_b") if self.random.random() < 0.5 else ("e",):
            rows = list(snap.scan(table))
            if table == "e":
                rows = [{**row, "ts": micros(row["ts"])} for row in rows]
            self.oracle.read(Read(snap.ts, table, None, rows, who=self.name))
        if self.random.random() < 0.2:
            self.snapshots.remove(snap)
            snap.close()


def micros(moment: Any) -> int:
    return round(moment.timestamp() * 1_000_000)


def counted(store: Store, oracle: Oracle) -> dict[str, int]:
    outcomes = [attempt.outcome for attempt in oracle.attempts]
    return {
        "commits": outcomes.count("committed"),
        "reads": len(oracle.reads),
        "aborts": outcomes.count("aborted"),
        "consolidations": store.consolidator.passes,
    }


def race(store: Store, oracle: Oracle, workers: list[Worker]) -> None:
    """Runs the workers until the minima are reached, somebody fails or the time is up."""
    stop = threading.Event()
    threads = [threading.Thread(target=worker.run, args=(stop,)) for worker in workers]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + SECONDS_MAX
    while time.monotonic() < deadline and not any(worker.failure for worker in workers):
        time.sleep(0.05)
        found = counted(store, oracle)
        if all(found[name] >= least for name, least in MINIMA.items()):
            break
    stop.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_threads_against_the_replay_oracle(where: str, tmp_path: Path) -> None:
    """R1 to R8, R11, R14, R17: every read of every thread is the replay of CTS <= S."""
    settings = Settings.of({"consolidate_every_s": 0.004, "consolidate_rows": 4, "block_rows": 64})
    store = Store.open(str(tmp_path / "store") if where == "disk" else None, settings=settings)
    with Database(store) as db:
        make_tables(db)
        oracle = Oracle(TABLES)
        workers = [Worker(db, oracle, seed) for seed in range(THREADS)]
        race(store, oracle, workers)
        for worker in workers:
            if worker.failure is not None:
                raise worker.failure
        assert store.consolidator.failure is None
        with db.snapshot() as last:
            for table in ("t", "by_a", "by_b"):
                oracle.read(Read(last.ts, table, None, list(last.scan(table)), who="last"))
            db.consolidate()
            for table in ("t", "by_a", "by_b"):
                oracle.read(Read(last.ts, table, None, list(last.scan(table)), who="last"))
    found = counted(store, oracle)
    short = {name: (found[name], least) for name, least in MINIMA.items() if found[name] < least}
    oracle.check()
    assert not short, f"not run: {short}"
