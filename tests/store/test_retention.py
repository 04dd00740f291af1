"""Retention: a floor in the log decides what is forgotten, and the same for every reader of a snapshot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import kivi
from kivi.errors import InvalidArgument, SnapshotTooOld
from kivi.model.declarations import aggregate_schema
from kivi.store.backfill import Backfill
from kivi.store.facade import Store
from tests.golden.driver import EmbeddedDriver

MINUTE = 60_000_000


@pytest.fixture(name="driver", params=["memory", "disk"])
def _driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedDriver]:
    driver = EmbeddedDriver(str(tmp_path / "store") if request.param == "disk" else None, block_rows=10)
    columns = {"ts": "timestamp", "a": "int64", "x": "int64"}
    driver.db.create_event_table("e", event_time="ts", retention="10m", columns=columns)
    yield driver
    driver.close()


def append(driver: EmbeddedDriver, minutes: range, a: int = 1) -> None:
    driver.db.append("e", [{"ts": minute * MINUTE, "a": a, "x": minute} for minute in minutes])


def minutes(reader: Any) -> list[int]:
    return sorted(row["x"] for row in reader.scan("e"))


def seen(driver: EmbeddedDriver) -> list[int]:
    with driver.db.snapshot() as snap:
        return minutes(snap)


def floor(driver: EmbeddedDriver, minute: int) -> int:
    return driver.store.retention.set_floor(driver.store.table("e"), minute * MINUTE)


def steps(driver: EmbeddedDriver) -> list[Callable[[], object]]:
    """What must change no answer."""
    return [
        lambda: None,
        lambda: driver.db.consolidate(),
        driver.crash,
        lambda: driver.db.consolidate(),
        lambda: driver.store.settle(),
        driver.reopen,
        lambda: driver.store.housekeeping.move_floors(),
    ]


def test_the_floor_follows_the_newest_event_and_keeps_what_the_retention_promises(driver: EmbeddedDriver) -> None:
    append(driver, range(30))
    driver.db.consolidate()
    driver.store.housekeeping.move_floors()
    assert seen(driver) == list(range(19, 30))
    for step in steps(driver):
        step()
        assert seen(driver) == list(range(19, 30))
    append(driver, range(20, 31), a=2)  # late, and above the floor
    assert seen(driver) == sorted([*range(19, 30), *range(20, 31)])


def test_statistics_count_what_is_remembered(driver: EmbeddedDriver) -> None:
    append(driver, range(30))
    floor(driver, 20)
    for step in steps(driver):
        step()
        statistics = driver.db.describe("e")["statistics"]
        assert (statistics["rows"], statistics["complete_since_us"]) == (10, 20 * MINUTE)


def test_a_snapshot_from_before_the_floor_reads_on(driver: EmbeddedDriver) -> None:
    append(driver, range(30))
    driver.db.consolidate()
    before = driver.db.snapshot()
    floor(driver, 25)
    for _ in range(3):
        driver.db.consolidate()
        driver.store.housekeeping.move_floors()
        assert minutes(before) == list(range(30))
        assert seen(driver) == list(range(25, 30))
    old = before.ts
    before.close()
    driver.store.housekeeping.move_floors()
    with pytest.raises(SnapshotTooOld), driver.db.snapshot(as_of=old) as snap:
        minutes(snap)
    assert seen(driver) == list(range(25, 30))


def test_late_events_are_refused_with_their_number_and_the_floor(driver: EmbeddedDriver) -> None:
    append(driver, range(30))
    floor(driver, 20)
    for step in steps(driver):
        step()
        with pytest.raises(InvalidArgument, match=f"3 events lie before.*'e'.*{20 * MINUTE}") as caught:
            append(driver, range(17, 40))
        assert caught.value.details["late"] == 3
        assert caught.value.details["floor_us"] == 20 * MINUTE
        with pytest.raises(InvalidArgument, match="1 events"):
            append(driver, range(19, 20))
        assert seen(driver) == list(range(20, 30))
    append(driver, range(20, 21))
    assert seen(driver) == [20, *range(20, 30)]


def test_aggregates_never_change_by_it(driver: EmbeddedDriver) -> None:
    measures = {"total": kivi.sum("x"), "calls": kivi.count()}
    driver.db.create_aggregate("agg", source="e", group_by=["a"], measures=measures)
    append(driver, range(30))
    for step in (lambda: floor(driver, 20), *steps(driver)):
        step()
        with driver.db.snapshot() as snap:
            assert list(snap.scan("agg")) == [{"a": 1, "total": sum(range(30)), "calls": 30}]


@pytest.mark.parametrize("consolidated", [False, True])
def test_an_aggregate_made_later_says_since_when_it_is_complete(driver: EmbeddedDriver, consolidated: bool) -> None:
    append(driver, range(30))
    floor(driver, 20)
    if consolidated:
        driver.db.consolidate()
        driver.store.housekeeping.move_floors()
    append(driver, range(20, 25), a=2)
    driver.db.create_aggregate("agg", source="e", group_by=["a"], measures={"total": kivi.sum("x")})
    for step in steps(driver):
        step()
        with driver.db.snapshot() as snap:
            assert {row["a"]: row["total"] for row in snap.scan("agg")} == {
                1: sum(range(20, 30)),
                2: sum(range(20, 25)),
            }
        assert driver.store.table("agg").complete_since_us == 20 * MINUTE


def test_a_backfill_that_resumes_after_a_floor_leaves_out_what_is_forgotten(driver: EmbeddedDriver) -> None:
    """The floor came after the aggregate's catalog commit, and blocks from below it are gone by the time it resumes."""
    append(driver, range(30))
    driver.db.consolidate()
    building = aggregate_schema(
        "agg", source=driver.store.table("e"), group_by=["a"], measures={"total": kivi.sum("x")}, derived=None
    )
    with patch.object(Backfill, "build", lambda self, schema, progress: schema):  # dies right after the catalog commit
        driver.store.create(building)
    append(driver, range(26, 28), a=2)
    floor(driver, 25)
    driver.db.consolidate()
    driver.store.housekeeping.move_floors()
    driver.crash()
    resumed = driver.store._resumed
    assert resumed is not None
    resumed.join(60)
    with driver.db.snapshot() as snap:
        assert {row["a"]: row["total"] for row in snap.scan("agg")} == {1: sum(range(25, 30)), 2: 26 + 27}
    assert driver.store.table("agg").complete_since_us == 25 * MINUTE


def test_floors_set_while_others_are_saved_are_not_lost(driver: EmbeddedDriver) -> None:
    append(driver, range(30))
    stop = threading.Event()

    def consolidate() -> None:
        while not stop.is_set():
            driver.db.consolidate()

    thread = threading.Thread(target=consolidate)
    thread.start()
    try:
        for minute in range(1, 29):
            for part in range(20):
                driver.store.retention.set_floor(driver.store.table("e"), minute * MINUTE + part)
            assert seen(driver) == list(range(minute + 1, 30))
    finally:
        stop.set()
        thread.join()
    driver.crash()
    assert seen(driver) == [29]


def test_the_stages_of_a_checkpoint_are_not_those_of_its_store(tmp_path: Path) -> None:
    driver = EmbeddedDriver(str(tmp_path / "store"))
    driver.db.create_event_table("e", event_time="ts", columns={"ts": "timestamp"})
    stage = driver.db.stage("e", [{"ts": 1}])
    driver.db.checkpoint(str(tmp_path / "copy"))
    copy = Store.open(str(tmp_path / "copy"))
    assert copy.stats()["stages"] == 0
    with pytest.raises(kivi.NotFound):
        copy.load_stages(copy.table("e"), [stage])
    copy.close()
    with driver.db.transaction() as tx:
        tx.append_stages("e", [stage])
    with driver.db.snapshot() as snap:
        assert len(list(snap.scan("e"))) == 1
    driver.close()
