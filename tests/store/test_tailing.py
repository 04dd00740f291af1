"""The tail of an event table at the store: nothing is missed, nothing comes twice, nothing changes afterwards."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.errors import SnapshotTooOld
from tests.golden.driver import EmbeddedDriver
from tests.waiting import wait_until

MINUTE = 60_000_000


@pytest.fixture(name="driver", params=["memory", "disk"])
def _driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedDriver]:
    driver = EmbeddedDriver(str(tmp_path / "store") if request.param == "disk" else None, block_rows=100)
    columns = {"ts": "timestamp", "x": "int64"}
    driver.db.create_event_table("e", event_time="ts", retention="10m", columns=columns)
    yield driver
    driver.close()


def append(driver: EmbeddedDriver, minutes: list[int]) -> int:
    return driver.db.append("e", [{"ts": minute * MINUTE, "x": minute} for minute in minutes])


def tail(driver: EmbeddedDriver, since: int, upto: int | None = None, **more: Any) -> list[tuple[int, int]]:
    with driver.db.snapshot(as_of=upto) as snap:
        return [(row["_commit_ts"], row["x"]) for row in snap.changes("e", since=since, **more)]


def floor(driver: EmbeddedDriver, minute: int) -> int:
    return driver.store.retention.set_floor(driver.store.table("e"), minute * MINUTE)


def drop_below(driver: EmbeddedDriver) -> None:
    driver.db.consolidate()
    driver.store.housekeeping.move_floors()


# -- what is in flight ------------------------------------------------------------------------------------


def held(driver: EmbeddedDriver, minutes: list[int]) -> tuple[int, threading.Thread]:
    """An append that has its commit timestamp, is durable and not finished."""
    committer = driver.store.committer
    before = set(committer.held)
    committer.hold = lambda commit: True
    thread = threading.Thread(target=append, args=(driver, minutes), daemon=True)
    thread.start()
    new = wait_until(lambda: set(committer.held) - before, pause_s=0.001)
    committer.hold = None
    return new.pop(), thread


def test_a_commit_that_finishes_late_is_not_missed(driver: EmbeddedDriver) -> None:
    """The earlier of two finishes second: a follower that went by the newest commit would pass over it."""
    since = append(driver, [1])
    first, one = held(driver, [2])
    second, two = held(driver, [3])
    assert since < first < second
    driver.store.committer.finish_held(second)
    waiting = driver.db.tail_points("e", since)
    assert (waiting.points, waiting.last, waiting.watermark) == ((), since, first - 1)
    assert tail(driver, since) == []
    driver.store.committer.finish_held(first)
    for thread in (one, two):
        thread.join()
    assert driver.db.tail_points("e", since, 1).points == ((first, 1), (second, 1))
    assert tail(driver, since) == [(first, 2), (second, 3)]


def test_a_follower_of_held_commits_sees_each_once(driver: EmbeddedDriver) -> None:
    """Commits finish in random order while a follower goes from watermark to watermark, consolidation in between."""
    draw, followed, at, appended = random.Random(7), [], driver.db.watermark(), []
    for turn in range(20):
        batch = [held(driver, [100 * turn + i]) for i in range(4)]
        appended += [(cts, 100 * turn + i) for i, (cts, _) in enumerate(batch)]
        for cts, _ in sorted(batch, key=lambda _: draw.random()):
            driver.store.committer.finish_held(cts)
            if draw.random() < 0.3:
                driver.db.consolidate()
            with driver.db.snapshot() as snap:
                followed += [(row["_commit_ts"], row["x"]) for row in snap.changes("e", since=at)]
                at = snap.ts
        for _, thread in batch:
            thread.join()
    assert followed == appended


# -- what happens to it afterwards ------------------------------------------------------------------------


def test_a_range_stays_as_it_is(driver: EmbeddedDriver) -> None:
    """Through sealing, compaction, a crash and a restart; and wherever it is cut."""
    draw, commits, expected = random.Random(3), [], []
    for turn in range(30):
        minutes = [30 + draw.randrange(9) for _ in range(draw.choice((1, 4, 90, 130)))]
        at = append(driver, minutes)
        commits.append(at)
        expected += [(at, minute) for minute in minutes]
        if turn % 7 == 0:
            driver.db.consolidate()
    steps = ("nothing", "crash", "consolidate", "compact", "reopen", "consolidate", "compact")
    for step in steps:
        {
            "nothing": lambda: None,
            "crash": driver.crash,
            "consolidate": driver.db.consolidate,
            "compact": driver.store.consolidator.compact,
            "reopen": driver.reopen,
        }[step]()
        for _ in range(6):
            a, b = sorted(draw.choices([0, *commits], k=2))
            wanted = [item for item in expected if a < item[0] <= b]
            assert tail(driver, a, b) == wanted
            at, size = draw.randrange(200), draw.randrange(1, 300)
            assert tail(driver, a, b, skip=at, take=size) == wanted[at : at + size]
            check_points(driver, commits, expected, a, b, draw.choice((1, 10, 99, 100, 101, 500, 10**6)))


def check_points(driver: EmbeddedDriver, commits: list[int], expected: Any, a: int, b: int, rows: int) -> None:
    sizes = {at: sum(1 for cts, _ in expected if cts == at) for at in commits if a < at <= b}
    cut: list[tuple[int, int]] = []
    for at, size in sizes.items():
        if cut and cut[-1][1] + size <= rows:
            cut[-1] = (at, cut[-1][1] + size)
        else:
            cut.append((at, size))
    found = driver.db.tail_points("e", a, rows, upto=b)
    assert found.points == tuple(cut)
    assert found.last == max(sizes, default=a)
    for most in (0, 1, 2):
        assert driver.db.tail_points("e", a, rows, upto=b, most=most).points == tuple(cut[:most])


# -- retention --------------------------------------------------------------------------------------------


def test_a_floor_hides_nothing_of_a_tail_while_it_is_there(driver: EmbeddedDriver) -> None:
    first = append(driver, [1, 2, 30])
    second = append(driver, [3, 31])
    floor(driver, 20)
    third = append(driver, [40])
    everything = [(first, 1), (first, 2), (first, 30), (second, 3), (second, 31), (third, 40)]
    for step in (lambda: None, driver.db.consolidate, driver.crash, driver.reopen):
        step()
        assert tail(driver, 0) == everything
        assert tail(driver, first) == everything[3:]
        with driver.db.snapshot() as snap:
            now = snap.ts
            assert sorted(row["x"] for row in snap.scan("e")) == [30, 31, 40]
        assert tail(driver, 0, remembered_at=now) == [(first, 30), (second, 31), (third, 40)]
        assert tail(driver, 0, second, remembered_at=second) == everything[:5]  # before there was a floor


def test_events_that_were_dropped_are_missed_aloud(driver: EmbeddedDriver) -> None:
    kept = append(driver, [50] * 60)
    driver.db.consolidate()
    lost = append(driver, [1] * 100)
    driver.db.consolidate()
    after = append(driver, [51])
    at = floor(driver, 20)
    drop_below(driver)
    for step in (lambda: None, driver.db.consolidate, driver.reopen):
        step()
        assert driver.db.tail_points("e", 0).kept_since == lost
        for since in (0, kept, lost - 1):
            with pytest.raises(SnapshotTooOld, match=f"after {lost} are still there") as caught:
                tail(driver, since)
            assert caught.value.details["kept_since"] == lost
        assert tail(driver, lost) == [(after, 51)]
        assert tail(driver, kept, partial=True) == [(after, 51)]
        assert tail(driver, 0, partial=True) == [(kept, 50)] * 60 + [(after, 51)]
        now = driver.db.watermark()
        assert now >= at
        assert tail(driver, 0, remembered_at=now) == [(kept, 50)] * 60 + [(after, 51)]
        with pytest.raises(SnapshotTooOld):
            tail(driver, 0, kept, remembered_at=kept)


def test_after_a_crash_a_tail_is_whole_or_says_that_it_is_not(driver: EmbeddedDriver) -> None:
    """A crash may bring back what was dropped last: then it is all there."""
    first = append(driver, [1] * 100)
    driver.db.consolidate()
    second = append(driver, [50])
    floor(driver, 20)
    drop_below(driver)
    driver.crash()
    for _ in range(2):
        if driver.db.tail_points("e", 0).kept_since:
            with pytest.raises(SnapshotTooOld):
                tail(driver, 0)
        else:
            assert tail(driver, 0) == [(first, 1)] * 100 + [(second, 50)]
        assert tail(driver, first) == [(second, 50)]
        drop_below(driver)


def test_changed_rows_of_events_that_were_dropped(driver: EmbeddedDriver) -> None:
    """They cannot be told any more; with ``partial`` all rows are given, among which they are."""
    driver.db.create_aggregate("agg", source="e", group_by=["x"], measures={"n": kivi.count()})
    start = driver.db.watermark()
    append(driver, [1] * 100)
    driver.db.consolidate()
    last = append(driver, [50, 51])
    floor(driver, 20)
    drop_below(driver)
    with driver.db.snapshot() as snap:
        with pytest.raises(SnapshotTooOld) as caught:
            list(snap.changes("agg", since=start))
        kept_since = caught.value.details["kept_since"]
        assert [(row["x"], row["n"]) for row in snap.changes("agg", since=kept_since)] == [(50, 1), (51, 1)]
        rows = [(row["x"], row["n"], row["_commit_ts"]) for row in snap.changes("agg", since=start, partial=True)]
        assert rows == [(1, 100, last), (50, 1, last), (51, 1, last)]


def test_the_last_change_of_an_aggregate_is_remembered_when_its_events_are_not(driver: EmbeddedDriver) -> None:
    driver.db.create_aggregate("agg", source="e", group_by=["x"], measures={"n": kivi.count()})
    append(driver, [50])
    driver.db.consolidate()
    last = append(driver, [1] * 100)
    floor(driver, 20)
    drop_below(driver)
    found = driver.db.tail_points("agg")
    assert found.last < last == found.kept_since == found.changed_at(found.watermark)
    with driver.db.snapshot() as snap:
        rows = [(row["x"], row["n"], row["_commit_ts"]) for row in snap.changes("agg", since=0)]
    assert rows == [(1, 100, last), (50, 1, last)]


def test_changed_rows_at_a_past_snapshot_need_history(driver: EmbeddedDriver) -> None:
    measures = {"n": kivi.count()}
    driver.db.create_aggregate("plain", source="e", group_by=["x"], measures=measures)
    driver.db.create_aggregate("kept", source="e", group_by=["x"], measures=measures, history="1h")
    start = driver.db.watermark()
    first = append(driver, [1, 2])
    held_open = driver.db.snapshot()
    append(driver, [2, 3])
    driver.db.consolidate()
    for snap in (held_open, driver.db.snapshot(as_of=first)):
        with snap:
            assert [(row["x"], row["n"]) for row in snap.changes("kept", since=start)] == [(1, 1), (2, 1)]
            assert [(row["x"], row["n"]) for row in snap.changes("plain", since=start)] == [(1, 1), (2, 1)]
    driver.db.consolidate()
    with driver.db.snapshot(as_of=first) as snap:
        assert [(row["x"], row["n"]) for row in snap.changes("kept", since=start)] == [(1, 1), (2, 1)]
        with pytest.raises(SnapshotTooOld):
            list(snap.changes("plain", since=start))
