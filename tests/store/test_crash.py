"""What a crash may take and what it may not: R12, R13, R16, and that a second recovery changes nothing.

In memory the log loses what was in flight and the engine any number of its last batches since the last flush: every
combination is tried at every point of a history. On disk a process is killed with SIGKILL while it commits, and what it
had acknowledged is kept outside of it.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.embedded.database import Database
from kivi.engine.memory import MemoryEngine
from kivi.log.memory import MemoryLog
from kivi.model.outcomes import ABORTED
from kivi.runtime.settings import Settings
from kivi.store.facade import Store
from tests.oracle import Attempt, Op, Oracle, Read
from tests.proof.workloads import TABLES, make_tables, micros

SETTINGS = Settings.of({"background": False, "consolidate_rows": 2, "block_rows": 8})


class Crashing:
    """A store in memory, a history of commits, and the replay they must add up to."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.engine, self.log = MemoryEngine(), MemoryLog()
        self.oracle = Oracle(TABLES)
        self.flying: list[tuple[Attempt, list[Any]]] = []
        self.made = 0
        self.open()
        make_tables(self.db)

    def open(self) -> None:
        self.store = Store.open(None, settings=SETTINGS, engine=self.engine, log=self.log)
        self.db = Database(self.store)

    def ops(self) -> list[Op]:
        rng, out = self.random, []
        if not self.log.hold and rng.random() < 0.15:
            out.append(Op("overwrite", rng.choice(("t", "e"))))
        for _ in range(rng.randint(1, 3)):
            key = (rng.randrange(3),)
            match rng.randrange(2 if self.log.hold else 0, 5):  # what is in flight together must not conflict
                case 0:
                    values: dict[str, Any] = {"v": rng.randrange(9), "s": "x" * rng.randrange(9)}
                    out.append(Op("put", "t", key, values))
                case 1:
                    out.append(Op("delete", "t", key))
                case 2:
                    count = rng.choice((1, 3, 40))
                    events = [{"a": rng.randrange(3), "b": "y", "ts": i, "x": rng.randrange(99)} for i in range(count)]
                    out.append(Op("append", "e", events=events))
                case _:
                    out.append(
                        Op("delta", "t", key, {"n": rng.randrange(9), "f": rng.random(), "hi": rng.randrange(9)})
                    )
        return out

    def commit(self) -> None:
        self.made += 1
        token, ops = f"token {self.made}", self.ops()
        tx = self.db.transaction(token=token)
        for op in ops:
            match op.kind:
                case "put":
                    tx.put(op.table, op.key, **op.values)
                case "delta":
                    tx.delta(op.table, op.key, **op.values)
                case "delete":
                    tx.delete(op.table, op.key)
                case "overwrite":
                    tx.overwrite(op.table)
                case _:
                    tx.append(op.table, list(op.events))
        attempt = Attempt(tx.start_ts, ops, "unknown", token=token)
        outcomes: list[Any] = []
        assert tx._txn is not None
        self.store.commit(tx._txn, done=outcomes.append, token=token)
        if self.log.hold:
            self.flying.append((attempt, outcomes))
        else:
            self.log.release()
            attempt.outcome, attempt.commit_ts = "committed", outcomes[0].commit_ts
        self.oracle.attempt(attempt)

    def step(self, i: int) -> None:
        self.commit()
        if i % 4 == 1:
            self.db.consolidate()
        if i % 3:
            self.store.consolidator.run_light()
        if i % 6 == 3:
            self.store.consolidator.flush()
            self.store.consolidator.sweep()
            self.store.consolidator.compact()

    def contents(self) -> dict[str, Any]:
        with self.db.snapshot() as snap:
            found: dict[str, Any] = {table: list(snap.scan(table)) for table in ("t", "by_a", "by_b")}
            found["e"] = [{**row, "ts": micros(row["ts"])} for row in snap.scan("e")]
        return found

    def crash(self, *, batches: int, records: int) -> None:
        self.store.crash()
        self.engine.crash(batches)
        self.log.hold = False
        self.log.crash(records)
        self.open()


def check(world: Crashing, acknowledged: int) -> None:
    """After a crash: nothing acknowledged is lost, nothing doubled, and a second recovery finds the same."""

    def outcome(token: str) -> int | None:
        found = world.db.outcome(token)
        assert isinstance(found, int) or found is ABORTED
        return found if isinstance(found, int) else None

    found = world.contents()
    assert world.db.watermark() >= acknowledged
    world.oracle.resolve(outcome)
    ts = world.db.watermark()
    for table, rows in found.items():
        world.oracle.read(Read(ts, table, None, rows, who="after the crash"))
    world.oracle.check()
    highest = world.log.last
    world.crash(batches=0, records=0)
    assert world.contents() == found
    world.db.consolidate()
    assert world.contents() == found
    world.crash(batches=100, records=0)
    assert world.contents() == found
    with world.db.transaction() as tx:
        tx.delta("t", (0,), n=1)
    assert (tx.commit_ts or 0) > highest, "R13"


@pytest.mark.parametrize("stop", [2, 5, 6, 9, 10, 14])
def test_r12_at_every_point_with_any_batches_lost(stop: int) -> None:
    """The engine keeps any prefix of its batches since the last flush, and the log everything acknowledged."""
    keep = 0
    while True:
        world = Crashing(seed=stop)
        for i in range(stop):
            world.step(i)
        unflushed = world.engine.stats()["unflushed_batches"]
        world.crash(batches=keep, records=0)
        check(world, acknowledged=max(a.commit_ts or 0 for a in world.oracle.attempts))
        world.store.crash()
        keep += 1
        if keep > unflushed:
            break


@pytest.mark.parametrize("arrived", range(5))
@pytest.mark.parametrize("batches", [0, 3, 100])
def test_r16_commits_in_flight_are_there_whole_or_not_at_all(arrived: int, batches: int) -> None:
    """Of four commits on their way the first ``arrived`` reached the disk; their tokens say which."""
    world = Crashing(seed=arrived)
    for i in range(7):
        world.step(i)
    acknowledged = max(a.commit_ts or 0 for a in world.oracle.attempts)
    world.log.hold = True
    for _ in range(4):
        world.commit()
    assert all(outcomes == [] for _, outcomes in world.flying)
    world.crash(batches=batches, records=arrived)
    check(world, acknowledged)
    assert [attempt.outcome for attempt, _ in world.flying] == ["committed"] * arrived + ["aborted"] * (4 - arrived)


def test_r12_a_crash_between_any_two_batches_of_a_pass() -> None:
    """Consolidation writes many small batches, the position last: the crash comes after each of them in turn."""
    world = Crashing(seed=3)
    for _ in range(10):
        world.commit()
    world.db.consolidate()
    total = world.engine.stats()["unflushed_batches"]
    assert total > 5
    expected = world.contents()
    for keep in range(total + 1):
        again = Crashing(seed=3)
        for _ in range(10):
            again.commit()
        again.db.consolidate()
        again.crash(batches=keep, records=0)
        assert again.contents() == expected, f"{keep} of {total} batches"
        again.db.consolidate()
        assert again.contents() == expected, f"{keep} of {total} batches, folded again"
        again.store.crash()


# -- on disk --------------------------------------------------------------------------------------------


CHILD = """
import sys, kivi
from kivi.runtime.imports import do_without_pandas
do_without_pandas()
db = kivi.open(
    sys.argv[1], consolidate_every_s=0.003, fold_every_s=0.01, flush_bytes=20_000, block_rows=64, segment_bytes=262144
)
first = int(sys.argv[2])
for i in range(first, first + 100_000):
    with db.transaction(token=f"token {i}") as tx:
        tx.delta("t", (i % 7,), n=1, hi=i)
        tx.append("e", [{"a": i % 5, "b": "x", "ts": i, "x": i}] * (40 if i % 10 == 0 else 1))
    print(i, tx.commit_ts, flush=True)
"""


def killed(path: Path, first: int, lines: int) -> Iterator[tuple[int, int]]:
    """Starts a process that commits from number ``first`` on, and kills it after so many acknowledgements."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), str(first)], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert child.stdout is not None
    try:
        for count, line in enumerate(child.stdout, 1):
            if line.endswith("\n"):
                number, commit_ts = line.split()
                yield int(number), int(commit_ts)
            if count == lines:
                child.kill()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_r12_kill_9_loses_nothing_acknowledged_and_doubles_nothing(tmp_path: Path) -> None:
    """Every acknowledged commit is there once; of the others their token knows; aggregates equal a recount."""
    path = tmp_path / "store"
    with kivi.open(path) as db:
        make_tables(db)
    acknowledged: dict[int, int] = {}
    first = 0
    for lines in (60, 150, 90):
        acknowledged.update(killed(path, first, lines))
        reached = max(acknowledged)
        with kivi.open(path, background=False) as db:
            committed = {}
            for number in range(reached + 20):
                found = db.outcome(f"token {number}")
                if isinstance(found, int):
                    committed[number] = found
            assert committed.items() >= acknowledged.items()
            assert len(set(committed.values())) == len(committed)
            with db.snapshot() as snap:
                counts = {row["id"]: row["n"] for row in snap.scan("t")}
                events = list(snap.scan("e"))
                total = {row["a"]: (row["total"], row["calls"], row["slow"]) for row in snap.scan("by_a")}
            for key in range(7):
                assert counts[key] == sum(number % 7 == key for number in committed)
            assert sorted({row["x"] for row in events}) == sorted(committed)
            assert len(events) == sum(40 if number % 10 == 0 else 1 for number in committed)
            for a, found_row in total.items():
                mine = [row["x"] for row in events if row["a"] == a]
                assert found_row == (sum(mine), len(mine), max(mine))
            assert db.watermark() >= max(acknowledged.values())
        first = reached + 20


def test_a_close_and_an_open_change_nothing(tmp_path: Path) -> None:
    """RocksDB and the segmented log, reopened in every state: everything pending, half folded, all folded."""
    path = tmp_path / "store"
    db = kivi.open(path, background=False)
    make_tables(db)
    world = random.Random(1)
    for i in range(40):
        with db.transaction() as tx:
            tx.delta("t", (world.randrange(4),), n=i, f=0.1 * i, hi=i)
            tx.append("e", [{"a": i % 3, "b": "z", "ts": i, "x": i}] * world.choice((1, 50)))
        if i % 5 == 0:
            with db.transaction() as tx:
                tx.delete("t", (world.randrange(4),))
        if i in (10, 30):
            db.consolidate()
        if i % 8 == 0:
            before = [[*snap.scan(t)] for t in ("t", "e", "by_a", "by_b") for snap in [db.snapshot()]]
            if i % 16:
                db.close()
            else:
                db.store.crash()
            db = kivi.open(path, background=False)
            after = [[*snap.scan(t)] for t in ("t", "e", "by_a", "by_b") for snap in [db.snapshot()]]
            assert after == before
    db.close()
