"""What is told of storage that takes no more: when it began, what was refused, that it is over; once each."""

from __future__ import annotations

import logging

import pytest

from kivi.errors import DiskFull, Unavailable
from kivi.mvcc.shortage import BASE, LOG, Shortage


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.__dict__["event"] for record in caplog.records]
    caplog.clear()
    return found


def test_a_time_without_space_begins_with_the_first_part_and_ends_with_the_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kivi.store")
    clock = Clock()
    shortage = Shortage(clock)
    shortage.works(LOG)
    shortage.refused()
    assert told(caplog) == [] and not any(shortage.stats().values())
    for _ in range(3):
        shortage.failed(LOG, DiskFull("full"))
    clock.now = 101
    for _ in range(3):
        shortage.failed(BASE, DiskFull("full"))
    shortage.refused()
    shortage.refused()
    assert told(caplog) == ["disk_full", "disk_full"]
    found = shortage.stats()
    assert (found["disk_full"], found["disk_full_times"], found["disk_full_refused"]) == (1, 1, 2)
    assert (found["disk_full_began_at_s"], found["disk_full_ended_at_s"]) == (100, 0)
    clock.now = 103
    shortage.works(LOG)
    assert told(caplog) == ["storage_works"] and shortage.stats()["disk_full"] == 1
    shortage.works(BASE)
    shortage.works(BASE)
    (over,) = caplog.records
    assert (over.__dict__["event"], over.__dict__["refused"]) == ("disk_space", 2)
    found = shortage.stats()
    assert (found["disk_full"], found["disk_full_ended_at_s"], found["disk_full_refused"]) == (0, 103, 2)
    shortage.failed(BASE, DiskFull("again"))
    assert shortage.stats()["disk_full_refused"] == 0 and shortage.stats()["disk_full_times"] == 2


def test_what_is_no_matter_of_space_is_told_as_such(caplog: pytest.LogCaptureFixture) -> None:
    """Also where it follows upon one: RocksDB has given up."""
    caplog.set_level(logging.INFO, "kivi.store")
    shortage = Shortage(Clock())
    shortage.failed(BASE, DiskFull("full"))
    shortage.failed(BASE, Unavailable("an I/O error"))
    assert told(caplog) == ["disk_full", "storage_failing"]
    found = shortage.stats()
    assert (found["disk_full"], found["storage_failing"]) == (0, 1)
    assert isinstance(shortage.why(BASE), Unavailable) and shortage.why(LOG) is None
    shortage.works(BASE)
    assert told(caplog) == ["storage_works"] and shortage.stats()["storage_failing"] == 0
