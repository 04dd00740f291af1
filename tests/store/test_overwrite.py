"""Overwriting: before the commit timestamp every reader has the old content, from it on only the new."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.embedded.database import Database
from kivi.encoding.keyspaces import Space, table_prefix
from kivi.errors import Conflict, InvalidArgument, NotFound, SnapshotTooOld
from tests.golden.driver import EmbeddedDriver

MINUTE = 60_000_000


@pytest.fixture(params=["memory", "disk"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedDriver]:
    path = None if request.param == "memory" else str(tmp_path / "data")
    made = EmbeddedDriver(path, consolidate_rows=4, block_rows=16)
    tables(made.db)
    yield made
    made.close()


def tables(db: Any) -> None:
    db.create_event_table("e", event_time="ts", columns={"a": "int64", "ts": "timestamp", "x": "int64"})
    measures = {"total": kivi.sum("x"), "n": kivi.count(), "most": kivi.max("x")}
    db.create_aggregate("by_a", source="e", group_by=["a"], measures=measures)
    db.create_aggregate("all", source="e", group_by=[kivi.time_slot("ts", "1h", name="slot")], measures=measures)
    db.create_table("t", key={"id": "int64"}, columns={"s": "string", "n": kivi.sum("int64")})


def events(tag: int, count: int) -> list[dict[str, int]]:
    return [{"a": i % 3, "ts": i * MINUTE, "x": tag} for i in range(count)]


def fill(db: Any, tag: int, count: int = 40) -> int:
    """Overwrites both tables with content that bears the tag."""
    with db.transaction() as tx:
        for table in ("e", "t"):
            tx.overwrite(table)
        tx.append("e", events(tag, count))
        for i in range(tag, tag + 5):
            tx.put("t", (i,), s=str(tag))
            tx.delta("t", (i,), n=tag)
    return int(tx.commit_ts)


def seen(reader: Any) -> tuple[int, int]:
    """(tag, events) of what a reader has, after all of it was compared with all of the rest."""
    found = [(row["a"], row["x"]) for row in reader.scan("e")]
    tags = {x for _, x in found}
    assert len(tags) <= 1, f"a mixture: {tags}"
    tag = tags.pop() if tags else 0
    sums = {a: (sum(x for b, x in found if b == a), sum(b == a for b, _ in found), tag) for a in {a for a, _ in found}}
    assert {row["a"]: (row["total"], row["n"], row["most"]) for row in reader.scan("by_a")} == sums
    assert sum(row["n"] for row in reader.scan("all")) == len(found)
    rows = [(row["id"], row["s"], row["n"]) for row in reader.scan("t")]
    assert rows == ([(i, str(tag), tag) for i in range(tag, tag + 5)] if found else [])
    return tag, len(found)


def now(db: Any) -> tuple[int, int]:
    with db.snapshot() as snap:
        return seen(snap)


def settle(driver: EmbeddedDriver) -> None:
    driver.db.consolidate()
    for _ in range(100):
        driver.store.housekeeping.step()


def stored(driver: EmbeddedDriver, table: int) -> int:
    return sum(
        1
        for space in (Space.ROW, Space.VERSION, Space.EVENT, Space.EVENT_DATA)
        for _ in driver.store.engine.scan(table_prefix(space, table), table_prefix(space, table + 1))
    )


def test_the_old_content_is_there_for_whoever_began_before_and_gone_after(driver: EmbeddedDriver) -> None:
    db = driver.db
    fill(db, 1)
    old = [driver.store.table(name).id for name in ("e", "by_a", "all", "t")]
    settle(driver)
    before = db.snapshot()
    running = before.scan("e")
    assert next(running)["x"] == 1
    fill(db, 2, count=7)
    for _ in range(2):
        assert seen(before) == (1, 40)
        assert now(db) == (2, 7)
        settle(driver)
    assert [row["x"] for row in running] == [1] * 39, "a scan goes on where it was"
    assert before.get("t", (1,))["s"] == "1" and before.get("t", (2,))["n"] == 1
    assert all(stored(driver, table) for table in old)
    began = before.ts
    before.close()
    settle(driver)
    assert not any(stored(driver, table) for table in old), "nothing is left of it"
    for table in ("e", "by_a", "t"):
        with db.snapshot(as_of=began) as late, pytest.raises(SnapshotTooOld, match="overwritten"):
            list(late.scan(table))
    assert now(db) == (2, 7)


def test_only_snapshots_that_see_a_generation_keep_it(driver: EmbeddedDriver) -> None:
    db = driver.db
    fill(db, 1)
    held = db.snapshot()
    for tag in range(2, 6):
        fill(db, tag)
        settle(driver)
    assert len(driver.store.catalog.visible.replaced) == 4, "the first one, and its aggregates"
    assert seen(held) == (1, 40)
    held.close()
    settle(driver)
    assert not driver.store.catalog.visible.replaced


def test_between_its_timestamp_and_the_watermark_readers_have_the_old_content(driver: EmbeddedDriver) -> None:
    """A commit before it is held up: the overwrite is durable and applied, and nobody may see it."""
    db, committer = driver.db, driver.store.committer
    fill(db, 1)
    db.create_table("gate", key={"id": "int64"}, columns={"v": "int64"})
    gate = driver.store.table("gate").id
    committer.hold = lambda commit: any(table == gate for table, _, _ in commit.rows)

    def commit(tx: Any) -> list[Any]:
        done: list[Any] = []
        driver.store.commit(tx._txn, done=done.append)
        return done

    first, second = db.transaction(), db.transaction()
    first.put("gate", (1,), v=1)
    for table in ("e", "t"):
        second.overwrite(table)
    second.append("e", events(2, 3))
    for i in range(2, 7):
        second.put("t", (i,), s="2")
        second.delta("t", (i,), n=2)
    commit(first)
    outcome = commit(second)
    deadline = threading.Event()
    while driver.store.catalog.visible.by_name["e"].id != driver.store.catalog.entered.by_name["e"].id:
        assert not deadline.wait(0.01)
    assert not outcome
    for _ in range(2):
        assert now(db) == (1, 40)
        settle(driver)
    late = db.transaction()
    late.append("e", events(1, 1))
    with pytest.raises(Conflict):
        late.commit()
    committer.hold = None
    committer.finish_held(committer.held[0])
    for _ in range(2):
        assert now(db) == (2, 3)
        settle(driver)
    assert outcome[0].commit_ts == db.watermark()


def test_concurrent_writers_conflict_or_come_before(driver: EmbeddedDriver) -> None:
    db = driver.db
    fill(db, 1)
    writers = [db.transaction() for _ in range(3)]
    writers[0].append("e", events(1, 1))
    writers[1].delta("t", (1,), n=5)
    writers[2].get("by_a", (0,))
    writers[2].guard("by_a", (0,))
    overwriting = db.transaction()
    overwriting.overwrite("e")
    overwriting.append("e", events(2, 5))
    db.append("e", events(1, 1))  # enters first: it is overwritten with the rest
    overwriting.commit()
    with db.snapshot() as snap:
        assert [row["x"] for row in snap.scan("e")] == [2] * 5
    for i in (0, 2):
        with pytest.raises(Conflict) as raised:
            writers[i].commit()
        assert raised.value.commit_ts == overwriting.commit_ts and raised.value.table in ("e", "by_a")
    writers[1].commit()  # of another table


@pytest.mark.parametrize("look", [lambda tx: list(tx.scan("e", limit=1)), lambda tx: tx.guard("t", (1,)), None])
def test_one_that_has_read_conflicts_with_what_it_has_not_seen(driver: EmbeddedDriver, look: Any) -> None:
    db = driver.db
    fill(db, 1)
    tx = db.transaction()
    if look is not None:
        look(tx)
    else:
        tx.put("t", (9,), s="elsewhere")
    db.append("e", events(1, 1))
    tx.overwrite("e")
    with pytest.raises(Conflict):
        tx.commit()
    with db.snapshot() as snap:
        assert len(list(snap.scan("e"))) == 41
    with db.transaction() as again:
        assert len(list(again.scan("e"))) == 41
        again.overwrite("e")
    with db.snapshot() as snap:
        assert not list(snap.scan("e")) and not list(snap.scan("by_a"))


def test_two_at_once_and_the_last_one_stays(driver: EmbeddedDriver) -> None:
    db = driver.db
    one, two = db.transaction(), db.transaction()
    for tx, tag in ((one, 1), (two, 2)):
        tx.overwrite("e")
        tx.append("e", events(tag, 3 * tag))
    two.commit()
    one.commit()
    with db.snapshot() as snap:
        assert [row["x"] for row in snap.scan("e")] == [1] * 3
        assert sum(row["n"] for row in snap.scan("by_a")) == 3
    assert len({schema.id for schema in driver.store.tables()}) == 4


def test_own_reads_see_own_writes_only(driver: EmbeddedDriver) -> None:
    db = driver.db
    fill(db, 1)
    db.consolidate()
    with db.transaction() as tx:
        tx.put("t", (1,), s="before it")
        tx.append("e", events(7, 1))
        tx.overwrite("t")
        tx.overwrite("e")
        assert list(tx.scan("t")) == [] and tx.get("t", (1,)) is None
        assert list(tx.scan("e")) == [] == list(tx.scan("by_a")) and tx.get("by_a", (0,)) is None
        tx.insert("t", (1,), s="new")
        with pytest.raises(kivi.RowExists):
            tx.insert("t", (1,), s="twice")
        tx.delta("t", (2,), n=3)
        tx.delete("t", (2,))
        tx.delta("t", (3,), n=3)
        tx.append("e", events(5, 2))
        assert list(tx.scan("t", reverse=True)) == [{"id": 3, "s": None, "n": 3}, {"id": 1, "s": "new", "n": 0}]
        assert [row["x"] for row in tx.scan("e")] == [5, 5]
        assert tx.get("by_a", (1,)) == {"a": 1, "total": 5, "n": 1, "most": 5}
        expected = [list(tx.scan(table)) for table in ("t", "e", "by_a", "all")]
    with db.snapshot() as snap:
        assert [list(snap.scan(table)) for table in ("t", "e", "by_a", "all")] == expected


def test_tokens_and_stages_outlive_it(driver: EmbeddedDriver) -> None:
    db = driver.db
    fill(db, 1)
    stage, other = db.stage("e", events(3, 50)), db.stage("t", [{"id": 3, "s": "3", "n": 3}])
    late = db.stage("e", events(3, 1))
    fill(db, 2)
    with db.transaction(batch=("job", 0)) as tx:
        for table, one in (("e", stage), ("t", other)):
            tx.overwrite(table)
            tx.append_stages(table, [one])
    driver.crash()
    db = driver.db
    with db.transaction(batch=("job", 0)) as again:
        again.overwrite("e")
    assert again.commit_ts == tx.commit_ts, "a repeat does nothing"
    with db.snapshot() as snap:
        assert [row["x"] for row in snap.scan("e")] == [3] * 50
        assert list(snap.scan("t")) == [{"id": 3, "s": "3", "n": 3}]
    with pytest.raises(NotFound), db.transaction() as tx:
        tx.overwrite("e")
        tx.append_stages("e", [stage])
    with db.transaction() as tx:
        tx.append_stages("e", [late])
    with db.transaction(token="mine") as tx:
        tx.overwrite("t")
        tx.delta("t", (1,), n=1)
    with db.transaction(token="mine") as again:
        again.overwrite("t")
        again.delta("t", (1,), n=1)
    assert again.commit_ts == tx.commit_ts
    with pytest.raises(InvalidArgument), db.transaction(token="mine") as another:
        another.delta("t", (1,), n=1)
    with db.snapshot() as snap:
        assert len(list(snap.scan("e"))) == 51
        assert snap.get("t", (1,))["n"] == 1


def test_definitions_after_it(driver: EmbeddedDriver) -> None:
    """What is declared, dropped and created on a table that was overwritten; ids are never used twice."""
    db = driver.db
    described = db.describe("e")
    fill(db, 1)
    assert db.describe("e")["id"] == described["id"] and db.describe("e")["created_ts"] > described["created_ts"]
    db.create_aggregate("later", source="e", group_by=["a"], measures={"n": kivi.count()})
    ids = {schema.id for schema in driver.store.tables()}
    driver.crash()
    db = driver.db
    fill(db, 2, count=9)
    with db.snapshot() as snap:
        assert {row["a"]: row["n"] for row in snap.scan("later")} == {0: 3, 1: 3, 2: 3}
    assert ids.isdisjoint(schema.id for schema in driver.store.tables())
    with pytest.raises(InvalidArgument, match="drop these first"):
        db.drop("e")
    for name in ("later", "by_a", "all", "e"):
        db.drop(name)
    tables_of = {schema.name for schema in driver.store.tables()}
    assert tables_of == {"t"}
    settle(driver)
    driver.reopen()
    db = driver.db
    db.create_event_table("e", event_time="ts", columns={"ts": "timestamp"})
    assert driver.store.table("e").id > max(ids)
    with pytest.raises(InvalidArgument, match="overwrite 'e'"), db.transaction() as tx:
        db.create_aggregate("n", source="e", group_by=["ts"], measures={"n": kivi.count()})
        tx.overwrite("n")


def test_an_aggregate_that_is_being_built_is_whole_at_once(driver: EmbeddedDriver) -> None:
    db = driver.db
    fill(db, 1, count=200)
    overwrote: list[int] = []

    def progress(done: int, total: int) -> None:
        if not overwrote:
            overwrote.append(fill(db, 2, count=11))

    db.create_aggregate("late", source="e", group_by=["a"], measures={"n": kivi.count()}, progress=progress)
    assert overwrote and db.describe("late")["state"] == "ready"
    with db.snapshot() as snap:
        assert sum(row["n"] for row in snap.scan("late")) == 11


def test_retention_begins_anew() -> None:
    driver = EmbeddedDriver()
    driver.db.create_event_table("e", event_time="ts", retention="1h", columns={"ts": "timestamp"})
    driver.db.append("e", [{"ts": 600 * MINUTE}])
    driver.store.retention.set_floor(driver.store.table("e"), 590 * MINUTE)
    with pytest.raises(InvalidArgument, match="retention floor"):
        driver.db.append("e", [{"ts": 1}])
    with driver.db.transaction() as tx:
        tx.overwrite("e")
        tx.append("e", [{"ts": 1}])
    for step in (lambda: None, driver.db.consolidate, driver.crash):
        step()
        with driver.db.snapshot() as snap:
            assert len(list(snap.scan("e"))) == 1
    driver.close()


def test_while_others_read_and_write(tmp_path: Path) -> None:
    """Readers, appenders and consolidation go on: every snapshot is of one generation, source and aggregates agree."""
    with kivi.open(
        tmp_path / "data", consolidate_every_s=0.002, fold_every_s=0.01, block_rows=64, flush_bytes=50_000
    ) as db:
        tables(db)
        fill(db, 1)
        stop, failures, reads = threading.Event(), list[BaseException](), [0]
        rng = random.Random(4)

        def guarded(work: Any) -> None:
            try:
                while not stop.is_set():
                    work()
            except BaseException as error:
                failures.append(error)
                stop.set()

        def read() -> None:
            with db.snapshot() as snap:
                try:
                    found = [(row["a"], row["x"]) for row in snap.scan("e")]
                    rows = {row["a"]: (row["n"], row["total"]) for row in snap.scan("by_a")}
                    ids = [row["s"] for row in snap.scan("t")]
                except SnapshotTooOld:
                    raise AssertionError("an open snapshot keeps what it sees") from None
            assert len({x for _, x in found}) == 1 and len(set(ids)) == 1 and ids == [str(found[0][1])] * 5
            counts = {a: sum(b == a for b, _ in found) for a, _ in found}
            assert rows == {a: (n, n * found[0][1]) for a, n in counts.items()}
            reads[0] += 1

        def write() -> None:
            try:
                with db.transaction() as tx:
                    tag = next(iter(tx.scan("e", limit=1)))["x"]
                    tx.append("e", events(tag, rng.choice((1, 50))))
            except Conflict:
                pass

        threads = [threading.Thread(target=guarded, args=(work,)) for work in (read, read, write)]
        for thread in threads:
            thread.start()
        for tag in range(2, 60):
            fill(db, tag, count=rng.choice((1, 30, 200)))
        stop.set()
        for thread in threads:
            thread.join()
        assert not failures, failures
        assert reads[0] > 20


CHILD = """
import sys, kivi
from kivi.runtime.imports import do_without_pandas
from tests.store.test_overwrite import fill
do_without_pandas()
db = kivi.open(sys.argv[1], consolidate_every_s=0.003, fold_every_s=0.01, flush_bytes=20_000, block_rows=64)
for tag in range(int(sys.argv[2]), 10_000):
    fill(db, tag, count=3 + tag % 50)
    print(tag, flush=True)
"""


def test_kill_9_leaves_one_generation_whole(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with kivi.open(path) as db:
        tables(db)
        fill(db, 1)
    last = 1
    for lines in (3, 17, 40, 25):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), str(last + 1)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for line in child.stdout:
            last = int(line)
            lines -= 1
            if not lines:
                child.kill()
                break
        last = max([last, *(int(line) for line in child.stdout if line.endswith("\n"))])
        child.wait()
        child.stdout.close()
        with kivi.open(path, background=False) as db:
            assert isinstance(db, Database)
            tag, count = now(db)
            assert tag in (last, last + 1) and count == 3 + tag % 50
            db.consolidate()
            for _ in range(500):
                db.store.housekeeping.step()
            assert now(db) == (tag, count)
            known = {schema.id for schema in db.store.tables()}
            assert not db.store.catalog.visible.replaced
            assert not set(db.store.housekeeping._orphans()) - known, "what was overwritten is erased"
            last = tag
