"""R13: timestamps never regress, whatever dies in between; and the timeline of ``as_of`` a moment."""

from __future__ import annotations

import datetime as dt
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.embedded import Database
from kivi.engine import WriteBatch
from kivi.engine.memory import MemoryEngine
from kivi.errors import InvalidArgument, SnapshotTooOld
from kivi.log import Kind
from kivi.log.files import Files
from kivi.log.memory import MemoryLog
from kivi.mvcc.timeline import STEP_US, Timeline
from kivi.settings import Settings
from kivi.store import Store
from tests.golden.driver import EmbeddedDriver
from tests.mvcc.holding import hold


def table(driver: EmbeddedDriver, **options: Any) -> None:
    driver.db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "v": "int64"}, **options)


def add(driver: EmbeddedDriver) -> int:
    with driver.db.transaction() as tx:
        tx.delta("t", (1,), n=1)
    assert tx.commit_ts is not None
    return int(tx.commit_ts)


def test_r13_a_timestamp_that_was_in_flight_at_a_crash_is_not_handed_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is on the disk: the largest number there is not enough."""
    driver = EmbeddedDriver(str(tmp_path / "store"))
    table(driver)
    add(driver)
    writes = threading.Event()
    real = Files.pwritev

    def pwritev(self: Files, *args: Any) -> int:
        assert writes.wait(20)
        return real(self, *args)

    monkeypatch.setattr(Files, "pwritev", pwritev)
    tx = driver.db.transaction()
    tx.delta("t", (1,), n=1)
    assert tx._txn is not None
    driver.store.commit(tx._txn, done=lambda outcome: None)
    in_flight = driver.store.log.last
    shutil.copytree(tmp_path / "store", tmp_path / "crashed")
    writes.set()
    driver.close()
    crashed = EmbeddedDriver(str(tmp_path / "crashed"))
    with crashed.db.snapshot() as snap:
        assert snap.get("t", (1,)) == {"id": 1, "n": 1, "v": None}
    assert add(crashed) > in_flight
    crashed.close()


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("folded", [False, True])
def test_r13_an_aborted_timestamp_is_not_handed_out_again(where: str, folded: bool, tmp_path: Path) -> None:
    """CTS 7 aborts, a reader got S = 7, crash, restart: the next CTS is above it."""
    driver = EmbeddedDriver(str(tmp_path / "store") if where == "disk" else None)
    try:
        table(driver)
        highest = 0
        for _ in range(4):
            add(driver)
            tx = driver.db.transaction()
            tx.delta("t", (1,), n=1)
            cts, _ = hold(driver.store, tx)
            driver.store.committer.abort_held(cts)
            with driver.db.snapshot() as snap:
                assert snap.ts >= cts
                highest = max(highest, snap.ts)
            if folded:
                driver.db.consolidate()
                driver.store.consolidator.flush()
            driver.crash()
            with driver.db.snapshot() as snap:
                assert snap.ts >= highest
            assert add(driver) > highest
        with driver.db.snapshot() as snap:
            assert snap.get("t", (1,), columns=["n"]) == {"n": 8}
    finally:
        driver.close()


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_r13_restarts_of_every_kind(where: str, tmp_path: Path) -> None:
    driver = EmbeddedDriver(str(tmp_path / "store") if where == "disk" else None)
    try:
        table(driver)
        seen = [driver.db.watermark()]
        for round_ in range(12):
            seen.append(add(driver))
            if round_ % 3 == 0:
                driver.db.consolidate()
                driver.store.consolidator.flush()
            seen.append(driver.db.transaction().start_ts)
            (driver.reopen if round_ % 2 else driver.crash)()
            assert driver.db.watermark() >= max(seen)
            following = add(driver)
            assert following > max(seen)
            seen.append(following)
    finally:
        driver.close()


def test_r13_a_lost_record_does_not_give_its_number_away() -> None:
    """It was lost in the crash before anybody was told, but its owner may have been told its number by a conflict."""
    engine, log = MemoryEngine(), MemoryLog()
    store = Store.open(None, settings=Settings(background=False), engine=engine, log=log)
    store.close()
    log.hold = True
    store = Store.open(None, settings=Settings(background=False), engine=engine, log=log)
    ticket = log.append([(Kind.FLOOR, [b"lost"])], lambda error: None)
    store.crash()
    engine.crash()
    log.hold = False
    log.crash(keep=0)
    again = log.append([(Kind.FLOOR, [b"next"])], lambda error: None)
    assert again.first > ticket.last


def test_r12_unknown_freezes_the_watermark_until_the_restart() -> None:
    """A failed sync: the outcome is UNKNOWN, later commits are not acknowledged either, and the log decides."""
    engine, log = MemoryEngine(), MemoryLog()
    store = Store.open(None, settings=Settings(background=False, commit_timeout_s=5), engine=engine, log=log)
    db = Database(store)
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    before = store.watermark()
    log.hold = True
    tx = db.transaction(token="torn")
    tx.delta("t", (1,), n=1)
    outcomes: list[Any] = []
    assert tx._txn is not None
    store.commit(tx._txn, done=outcomes.append, token="torn")
    log.fail()
    deadline = time.monotonic() + 5
    while not outcomes and time.monotonic() < deadline:
        time.sleep(0.001)
    assert isinstance(outcomes[0].error, kivi.CommitUnknown)
    assert outcomes[0].error.token == "torn"
    assert store.watermark() == before
    again = db.transaction(token="torn")
    again.delta("t", (1,), n=1)
    with pytest.raises(kivi.CommitUnknown):
        again.commit()  # at once: nobody will ever tell
    assert db.outcome("torn") is kivi.UNKNOWN
    later = db.transaction()
    later.delta("t", (1,), n=1)
    with pytest.raises((kivi.Unavailable, kivi.CommitUnknown)):
        later.commit()
    assert store.consolidate() == before
    with db.snapshot() as snap:
        assert snap.ts == before
        assert snap.get("t", (1,)) is None
    store.crash()


# -- the timeline ---------------------------------------------------------------------------------------


def test_the_timeline_is_exact_while_it_is_in_memory() -> None:
    timeline = Timeline(MemoryEngine())
    for cts, time_us in ((5, 1_000_000), (6, 1_000_000), (9, 1_000_003), (12, 5_000_000)):
        timeline.note(cts, time_us)
    assert [timeline.at(t) for t in (1_000_000, 1_000_002, 1_000_003, 4_999_999, 5_000_000, 10**12)] == [
        6, 6, 9, 9, 12, 12
    ]  # fmt: skip
    with pytest.raises(SnapshotTooOld):
        timeline.at(999_999)


def test_an_old_moment_resolves_to_a_state_before_it_never_after() -> None:
    """Saved in steps of 10 ms: at most one step early."""
    engine = MemoryEngine()
    timeline = Timeline(engine)
    times = {cts: 1_000_000_000 + cts * 3_700 for cts in range(1, 400)}
    for cts, time_us in times.items():
        timeline.note(cts, time_us)
    batch = WriteBatch()
    for key, value in timeline.take(399):
        batch.put(key, value)
    engine.write(batch)
    reopened = Timeline(engine)
    for cts, time_us in list(times.items())[10:]:
        found = reopened.at(time_us)
        assert found <= cts
        exact_before = max(c for c, t in times.items() if t <= time_us - 2 * STEP_US)
        assert found >= exact_before


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_as_of_a_moment(where: str, tmp_path: Path) -> None:
    driver = EmbeddedDriver(str(tmp_path / "store") if where == "disk" else None)
    try:
        table(driver, history="1h")
        moments = []
        for n in range(3):
            with driver.db.transaction() as tx:
                tx.put("t", (1,), v=n)
            time.sleep(0.03)
            moments.append(dt.datetime.now(dt.UTC))
            time.sleep(0.03)
        for restart in (lambda: None, driver.db.consolidate, driver.reopen, driver.crash):
            restart()
            for n, moment in enumerate(moments):
                with driver.db.snapshot(as_of=moment) as snap:
                    assert snap.get("t", (1,), columns=["v"]) == {"v": n}
        with driver.db.snapshot(as_of=dt.datetime.now(dt.UTC) + dt.timedelta(days=1)) as snap:
            assert snap.ts == driver.db.watermark()
        with pytest.raises(InvalidArgument):
            driver.db.snapshot(as_of=driver.db.watermark() + 1)
    finally:
        driver.close()
