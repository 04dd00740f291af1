"""Appends that come together: one sync for them, and one answer to whoever hears of them all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kivi.log import Entry, Kind, segmented
from kivi.log.memory import MemoryLog
from kivi.log.segmented import SegmentedLog


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SegmentedLog]:
    made = SegmentedLog(str(tmp_path / "log"), store_id=bytes(16), segment_bytes=1 << 20)
    yield made
    made.close()


def several(log: SegmentedLog, count: int) -> threading.Event:
    """Appended one by one; set when the last is durable."""
    durable = threading.Event()
    left = iter(range(count - 1, -1, -1))

    def done(error: BaseException | None) -> None:
        if not next(left):
            durable.set()

    for _ in range(count):
        log.append([Entry(Kind.COMMIT, [b"x"])], done)
        time.sleep(0.01)  # a writer that does not wait syncs meanwhile
    return durable


def test_what_is_appended_together_is_synced_once(log, monkeypatch):
    monkeypatch.setattr(segmented, "_GATHER_S", 10.0)
    before = log.stats()["syncs"]
    with log.together():
        durable = several(log, 5)
        assert not durable.is_set()
    assert durable.wait(5)
    assert log.stats()["syncs"] == before + 1
    assert several(log, 5).wait(5)
    assert log.stats()["syncs"] > before + 2


def test_nobody_is_held_up_by_somebody_who_never_leaves(log):
    """It is a hint: the others' appends and its own are durable after a moment."""
    with log.together():
        assert several(log, 3).wait(5)
    assert several(log, 1).wait(5)


def test_what_is_to_follow_is_called_once_all_that_were_synced_together_are_done(log, monkeypatch):
    monkeypatch.setattr(segmented, "_GATHER_S", 10.0)
    heard: list[str] = []
    followed = threading.Event()

    def done(error: object, name: str) -> None:
        heard.append(name)
        assert log.afterwards(lambda: heard.append(f"after {name}"))
        if name == "a":
            raise RuntimeError("which stops nothing")

    with log.together():
        for name in "abc":
            log.append([Entry(Kind.COMMIT, [b"x"])], lambda error, name=name: done(error, name))
        log.append([Entry(Kind.COMMIT, [b"x"])], lambda error: log.afterwards(followed.set))
    assert followed.wait(5)
    assert heard == ["a", "b", "c", "after a", "after b", "after c"]
    assert not log.afterwards(lambda: heard.append("never"))


def test_alone_there_is_nothing_to_wait_for(log):
    said: list[bool] = []
    durable = threading.Event()

    def done(error: object) -> None:
        said.append(log.afterwards(lambda: said.append(True)))
        durable.set()

    log.append([Entry(Kind.COMMIT, [b"x"])], done)
    assert durable.wait(5)
    assert said == [False]


def test_a_log_in_memory_takes_the_hint_too():
    log = MemoryLog()
    with log.together():
        assert not log.afterwards(lambda: None)
