"""What memory and disk are spent on is counted as it is spent, so that the budgets bound what they say they bound."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest

import kivi
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, space_prefix, table_prefix
from kivi.engine import WriteBatch
from kivi.engine.memory import MemoryEngine
from kivi.errors import DiskFull, OutOfRange, ResourceExhausted
from kivi.mvcc import commit as committing
from tests.golden.driver import EmbeddedDriver
from tests.waiting import wait_until

MIB = 1 << 20


@pytest.fixture(name="driver", params=["memory", "disk"])
def _driver(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    driver = EmbeddedDriver(str(tmp_path / "store") if request.param == "disk" else None)
    driver.db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "s": "string", "b": "bytes"})
    yield driver
    driver.close()


def put(driver: EmbeddedDriver, key: int, **values: Any) -> None:
    with driver.db.transaction() as tx:
        tx.put("t", (key,), **values)


def in_space(driver: EmbeddedDriver, space: Space, table: str | None = None) -> int:
    prefix = space_prefix(space) if table is None else table_prefix(space, driver.store.table(table).id)
    return sum(len(key) + len(value) for key, value in driver.store.engine.scan(prefix, prefix_end(prefix)))


# -- pending ----------------------------------------------------------------------------------------


def test_pending_counts_text_and_bytes(driver: EmbeddedDriver) -> None:
    driver.db.consolidate()
    assert driver.store.pending.nbytes == 0
    put(driver, 1, s="x" * MIB)
    put(driver, 1, b=b"y" * MIB)
    put(driver, 2, n=1)
    assert 2 * MIB < driver.store.pending.nbytes < 2 * MIB + 10_000
    driver.reopen()
    driver.db.consolidate()
    assert driver.store.pending.nbytes == 0
    assert driver.store.pending.operations == 0


def test_pending_is_even_again_after_a_drop(driver: EmbeddedDriver) -> None:
    driver.db.consolidate()
    put(driver, 1, s="x" * MIB)
    driver.db.drop("t")
    driver.db.consolidate()
    assert (driver.store.pending.nbytes, driver.store.pending.operations) == (0, 0)


def test_large_values_are_folded_in_bounded_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = EmbeddedDriver(None, consolidate_rows=2048)
    driver.db.create_table("t", key={"id": "int64"}, columns={"b": "bytes"})
    written: list[int] = []
    write = MemoryEngine.write

    def counted(engine: MemoryEngine, batch: WriteBatch) -> None:
        written.append(batch.size_bytes)
        write(engine, batch)

    monkeypatch.setattr(MemoryEngine, "write", counted)
    for round_ in (b"a", b"b"):  # the second time base has large rows as well
        for start in range(0, 200, 50):
            with driver.db.transaction() as tx:
                for key in range(start, start + 50):
                    tx.put("t", (key,), b=round_ * (MIB // 4))
        driver.db.consolidate()
    assert sum(written) > 100 * MIB
    assert max(written) <= 64 * (MIB // 4 + 100)
    with driver.db.snapshot() as snap:
        assert all(row["b"] == b"b" * (MIB // 4) for row in snap.scan("t"))
    driver.close()


def test_r16_a_retry_is_answered_while_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committing, "_ADMISSION_TIMEOUT_S", 0.01)
    driver = EmbeddedDriver(None, pending_soft_bytes=0, pending_hard_bytes=1 << 19)
    driver.db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "s": "string"})

    def attempt(token: str) -> Any:
        tx = driver.db.transaction(token=token)
        tx.put("t", (1,), s="x" * MIB)
        return tx

    first = attempt("one").commit()
    with pytest.raises(ResourceExhausted):
        attempt("two").commit()
    assert attempt("one").commit() == first
    driver.close()


# -- versions ---------------------------------------------------------------------------------------


def test_the_bytes_of_versions_are_those_in_the_engine(driver: EmbeddedDriver) -> None:
    """Several snapshots that need one version, deletes, a restart, a drop: the count is always what is there."""
    db = driver.db
    db.create_table("kept", key={"id": "int64"}, columns={"n": kivi.sum("int64")}, history="1h")
    db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "a": "int64"})
    db.create_aggregate("agg", source="e", group_by=["a"], measures={"calls": kivi.count()})
    for key in range(50):
        put(driver, key, s="x" * 100)
    db.append("e", [{"ts": 0, "a": i % 50} for i in range(100)])
    db.consolidate()

    def counted() -> int:
        consolidator = driver.store.consolidator
        there = in_space(driver, Space.VERSION) - in_space(driver, Space.VERSION, "kept")
        assert consolidator.sweeper.versions_bytes == there
        return there

    snapshots = [db.snapshot() for _ in range(3)]
    with db.transaction() as tx:  # another S that needs the same versions
        tx.put("kept", (1,), n=1)
    snapshots.append(db.snapshot())
    for key in range(50):
        with db.transaction() as tx:
            if key % 2:
                tx.delete("t", (key,))
            else:
                tx.put("t", (key,), s="y" * 100)
            tx.put("kept", (1,), n=key)
    db.append("e", [{"ts": 0, "a": i % 50} for i in range(100)])
    db.consolidate()
    full = counted()
    assert full > 50 * 100
    driver.reopen()
    db = driver.db
    assert counted() == full
    put(driver, 0, s="z" * 100)
    with db.snapshot():
        put(driver, 0, s="w" * 100)
        db.consolidate()
        counted()
    for _ in range(20):
        driver.store.consolidator.sweep()
    assert counted() == 0
    del snapshots


@pytest.mark.parametrize("what", ["row", "deleted", "aggregate"])
def test_versions_that_base_does_not_take_are_not_counted(
    driver: EmbeddedDriver, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Nor do those go from the count that it does not give up: the same is tried again, and would count twice."""
    db, store = driver.db, driver.store
    db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "a": "int64"})
    db.create_aggregate("agg", source="e", group_by=["a"], measures={"calls": kivi.count()})

    def change() -> None:
        if what == "aggregate":
            db.append("e", [{"ts": 0, "a": i} for i in range(50)])
        elif what == "deleted" and db.get("t", (1,)):
            with db.transaction() as tx:
                tx.delete("t", (1,))
        else:
            put(driver, 1, s="x" * 100)

    def refused(call: Callable[[], object]) -> None:
        def full(batch: WriteBatch) -> None:
            raise DiskFull("injected")

        before = store.consolidator.sweeper.versions_bytes
        with monkeypatch.context() as patch, pytest.raises(DiskFull):
            patch.setattr(store.engine, "write", full)
            call()
        assert store.consolidator.sweeper.versions_bytes == before == in_space(driver, Space.VERSION)

    change()
    db.consolidate()
    snapshot = db.snapshot()
    change()
    refused(db.consolidate)
    db.consolidate()
    assert store.consolidator.sweeper.versions_bytes == in_space(driver, Space.VERSION) > 0
    snapshot.close()
    store.consolidator.flush()
    refused(store.consolidator.sweep)
    store.consolidator.sweep()
    assert store.consolidator.sweeper.versions_bytes == in_space(driver, Space.VERSION) == 0


def test_a_table_with_history_does_not_cut_snapshots(driver: EmbeddedDriver) -> None:
    driver.close()
    driver = EmbeddedDriver(None, version_budget_bytes=1_000)
    driver.db.create_table("kept", key={"id": "int64"}, columns={"n": kivi.sum("int64")}, history="1h")
    with driver.db.snapshot() as snap:
        before = snap.get("kept", (1,))
        for n in range(200):
            with driver.db.transaction() as tx:
                tx.put("kept", (1,), n=n)
        driver.db.consolidate()
        driver.store.consolidator.sweep()
        assert snap.get("kept", (1,)) == before
    assert driver.store.leases.cut == 0


# -- dropped tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reading", [False, True])
def test_a_dropped_table_is_erased_while_others_are_written(driver: EmbeddedDriver, reading: bool) -> None:
    db = driver.db
    db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "a": "int64"})
    table = driver.store.table("e").id
    for i in range(20):
        db.append("e", [{"ts": i, "a": i}] * 1_000)
        db.consolidate()
    events = driver.store.event_tables.of(table)
    assert events is not None
    view = events.view(db.watermark()) if reading else None
    db.drop("e")
    db.consolidate()
    for i in range(200):
        put(driver, i, n=1)  # something is always pending
        driver.store.housekeeping.step()

    def left() -> int:
        out = 0
        for space in (Space.EVENT, Space.EVENT_DATA):
            prefix = table_prefix(space, table)
            out += sum(1 for _ in driver.store.engine.scan(prefix, prefix_end(prefix)))
        return out

    if view is not None:
        assert left() > 20
        view.close()
        for _ in range(10):
            driver.store.housekeeping.step()
    assert left() == 0


def test_two_threads_keep_house_and_each_step_is_taken_by_one(driver: EmbeddedDriver) -> None:
    """The background's, and within a pass that somebody waits for."""
    store = driver.store
    driver.db.create_table("gone", key={"id": "int64"}, columns={"n": "int64"})
    with driver.db.transaction() as tx:
        tx.put("gone", (1,), n=1)
    driver.db.consolidate()
    driver.db.drop("gone")
    driver.db.consolidate()
    inside, go_on, failures = threading.Event(), threading.Event(), list[BaseException]()
    in_use = store.event_tables.in_use

    def waits(table: int) -> bool:
        inside.set()
        assert go_on.wait(60)
        return in_use(table)

    def step() -> None:
        try:
            store.housekeeping.step()
        except BaseException as error:
            failures.append(error)

    with patch.object(store.event_tables, "in_use", waits):
        background = threading.Thread(target=step)
        background.start()
        assert inside.wait(60)
    for _ in range(6):
        store.housekeeping.step()
    go_on.set()
    background.join()
    for _ in range(6):
        store.housekeeping.step()
    assert not failures
    assert not store.housekeeping._orphans()


# -- values -------------------------------------------------------------------------------------------


def test_a_value_of_an_event_has_the_published_limit() -> None:
    driver = EmbeddedDriver(None, max_value_bytes=1_000)
    driver.db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "s": "string", "b": "bytes"})
    good = {"ts": 0, "s": "x" * 1_000, "b": b"y" * 1_000}
    driver.db.append("e", [good] * 100)
    for bad in ({"s": "x" * 1_001}, {"b": b"y" * 1_001}, {"s": "é" * 501}):
        with pytest.raises(ResourceExhausted, match=f"'{next(iter(bad))}'"):
            driver.db.append("e", [good, good | bad])
        with pytest.raises(ResourceExhausted):
            driver.db.stage("e", [good, good | bad])
    with driver.db.snapshot() as snap:
        assert len(list(snap.scan("e"))) == 100
    driver.close()


@pytest.mark.parametrize("first", ["delta", "put", "delete"])
def test_r10_floats_of_one_transaction_that_leave_the_finite_numbers_are_refused(first: str) -> None:
    driver = EmbeddedDriver(None)
    driver.db.create_table("t", key={"id": "int64"}, columns={"f": kivi.sum("float64")})
    with driver.db.transaction() as tx:
        tx.delta("t", (1,), f=1.0)
    with pytest.raises(OutOfRange, match="'t'.f"), driver.db.transaction() as tx:
        if first == "delete":
            tx.delete("t", (1,))
            tx.delta("t", (1,), f=1.7e308)
        else:
            getattr(tx, first)("t", (1,), f=1.7e308)
        tx.delta("t", (1,), f=1.7e308)
    with driver.db.snapshot() as snap:
        assert snap.get("t", (1,)) == {"id": 1, "f": 1.0}
    driver.close()


def test_a_dropped_table_gives_its_space_back(tmp_path: Path) -> None:
    db = kivi.open(str(tmp_path))
    db.create_table("t", key={"id": "int64"}, columns={"b": "bytes"})
    db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "b": "bytes"})
    ids = range(20_000)
    with db.transaction() as tx:
        tx.write("t", pa.table({"id": ids, "b": [random.Random(i).randbytes(200) for i in ids]}))
    db.append(
        "e", pa.table({"ts": pa.array(ids, pa.timestamp("us")), "b": [random.Random(i).randbytes(200) for i in ids]})
    )
    db.consolidate()
    engine = db.store.engine

    def held() -> int:
        engine.flush()
        return engine.stats()["sst_bytes"] + engine.stats()["blob_bytes"]

    assert held() > 8_000_000
    db.drop("t")
    db.drop("e")
    wait_until(lambda: held() < 500_000, timeout_s=60)
    db.close()
