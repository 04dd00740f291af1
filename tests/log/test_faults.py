"""A file operation that fails: at append, at sync, at a roll, in recovery; each of them in turn."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kivi.errors import DiskFull, KiviError, ResourceExhausted
from kivi.log import Entry, Kind, LogFailed
from kivi.log.files import Files
from kivi.log.segmented import SegmentedLog
from tests.log.faults import FaultyFiles, append, body, contents, fail_at, image, open_log, restore, settled
from tests.log.test_damage import written
from tests.waiting import wait_until


class Full(FaultyFiles):
    """A disk without space for another segment while ``full``."""

    full = False

    def allocate(self, fd: int, size: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "injected")
        super().allocate(fd, size)


def test_no_space_is_a_definite_abort_and_service_resumes(tmp_path: Path) -> None:
    files = Full()
    log = open_log(tmp_path / "log", files)
    tickets = [append(log, bytes(3000))[0]]
    settled(log)
    files.full = True

    def never(error: BaseException | None) -> None:
        raise AssertionError

    kept = 1
    with pytest.raises(ResourceExhausted):
        while kept < 100:
            tickets.append(append(log, bytes(3000))[0])
            kept += 1
    for _ in range(3):
        with pytest.raises(ResourceExhausted):
            log.append([Entry(Kind.COMMIT, [bytes(3000)])], never)
    assert len(contents(log)) == kept
    assert append(log, b"a small one still fits")[1] is None
    files.full = False
    ticket, error = append(log, bytes(3000))
    assert (ticket.first, error) == (kept + 2, None)  # the refused ones took no numbers
    log.close()
    log = open_log(tmp_path / "log")
    assert len(contents(log)) == kept + 2
    log.close()


def test_no_space_at_all_from_the_beginning(tmp_path: Path) -> None:
    files = Full()
    files.full = True
    log = open_log(tmp_path / "log", files)
    with pytest.raises(ResourceExhausted):
        append(log, b"x")
    files.full = False
    assert append(log, b"x")[0].first == 1
    log.close()


def test_that_there_is_space_again_is_told_also_while_nobody_writes(tmp_path: Path) -> None:
    files = Full()
    files.full = True
    log = open_log(tmp_path / "log", files)
    told: list[KiviError | None] = []
    log.on_room = told.append
    with pytest.raises(DiskFull):
        append(log, b"x")
    assert told and all(isinstance(error, DiskFull) for error in told)
    told.clear()
    files.full = False
    wait_until(lambda: told and told[-1] is None)
    log.close()


def test_a_group_bigger_than_a_segment_gets_one_of_its_size(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    sizes = [10, 100_000, 20, 15_000, 3_000_000, 30, 30]
    for size in sizes:
        append(log, b"x" * size, b"y")
    assert [len(data) for data in contents(log)] == [n for size in sizes for n in (size, 1)]
    log.close()
    log = open_log(tmp_path / "log")
    assert [len(data) for data in contents(log)] == [n for size in sizes for n in (size, 1)]
    log.close()


class Short(Files):
    """Writes at most seven bytes at a time."""

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        joined = b"".join(bytes(part) for part in buffers)
        whole = len(joined) == 4096 or len(joined) == 72 or offset == 0
        return super().pwritev(fd, [joined if whole else joined[:7]], offset)


def test_short_writes_are_continued(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log", Short())
    for i in range(100):
        assert append(log, body(i), b"", body(i + 1))[1] is None
    expected = contents(log)
    log.close()
    log = open_log(tmp_path / "log")
    assert contents(log) == expected
    assert len(expected) == 300
    log.close()


@pytest.mark.parametrize("leading", [False, True])
def test_a_failed_sync_fails_the_log_for_good_and_is_not_retried(tmp_path: Path, leading: bool) -> None:
    failing = threading.Event()

    def fault(name: str, number: int) -> None:
        if failing.is_set() and name in ("fdatasync", "pwritev"):
            if name == "fdatasync":
                raise OSError(errno.EIO, "injected")
            after.append(name)

    after: list[str] = []
    files = FaultyFiles(fault)
    log = open_log(tmp_path / "log", files)
    assert append(log, b"good")[1] is None
    failing.set()
    _, error = append(log, b"unknown", leading=leading)
    assert isinstance(error, LogFailed)
    assert log.durable == 1
    failing.clear()
    written_calls = len(files.calls)
    for _ in range(3):
        with pytest.raises(LogFailed):
            log.append([Entry(Kind.COMMIT, [b"x"])], lambda error: None)
    with pytest.raises(LogFailed):
        log.truncate(1)
    time.sleep(1.3)  # the timer does not sync the mark of a failed log either
    assert files.calls[written_calls:] == []
    assert contents(log) == [b"good"]
    log.close()
    log = open_log(tmp_path / "log")
    assert contents(log) in ([b"good"], [b"good", b"unknown"])
    log.close()


def test_every_group_in_flight_at_a_failed_sync_is_told(tmp_path: Path) -> None:
    """The sync is slow and fails; what came meanwhile must not be acknowledged, though the mark was synced by then."""
    armed, inside, meanwhile, go = (threading.Event() for _ in range(4))

    def fault(name: str, number: int) -> None:
        if name == "fdatasync" and armed.is_set():
            inside.set()
            assert go.wait(60)
            raise OSError(errno.EIO, "injected")
        if name == "sync of the mark" and inside.is_set():
            meanwhile.set()

    log = open_log(tmp_path / "log", FaultyFiles(fault))
    append(log, b"good")
    armed.set()
    outcomes: list[BaseException | None] = []
    log.append([Entry(Kind.COMMIT, [b"first"])], outcomes.append)
    assert inside.wait(60)
    for _ in range(5):
        log.append([Entry(Kind.COMMIT, [b"later"])], outcomes.append)
    log._mark.put()  # what there is to sync
    assert meanwhile.wait(60)
    assert outcomes == []
    go.set()
    log.close()
    assert len(outcomes) == 6
    assert all(isinstance(error, LogFailed) for error in outcomes)
    assert log.durable == 1


def test_a_later_sync_that_fails_first_fails_the_earlier_group_too(tmp_path: Path) -> None:
    """The later one is the mark's."""
    armed, first, second = threading.Event(), threading.Event(), threading.Event()

    def fault(name: str, number: int) -> None:
        if name == "fdatasync" and armed.is_set():
            first.set()
            assert second.wait(60)
            wait_until(lambda: log._failed is not None)
        if name == "sync of the mark" and first.is_set():
            second.set()
            raise OSError(errno.EIO, "injected")

    log = open_log(tmp_path / "log", FaultyFiles(fault))
    append(log, b"good")
    armed.set()
    outcomes: list[BaseException | None] = []
    log.append([Entry(Kind.COMMIT, [b"first"])], outcomes.append)
    assert first.wait(60)
    log.append([Entry(Kind.COMMIT, [b"second"])], outcomes.append)
    log._mark.put()  # what there is to sync
    log.close()
    assert [type(error) for error in outcomes] == [LogFailed, LogFailed]


def run(log: SegmentedLog, count: int, leading: bool) -> list[bytes]:
    """Append until it fails; returns what was acknowledged."""
    acknowledged: list[bytes] = []
    for i in range(count):
        try:
            _, error = append(log, body(i) * 20, leading=leading)
        except KiviError:
            return acknowledged
        if error is not None:
            return acknowledged
        acknowledged.append(body(i) * 20)
        if i == count // 2:
            try:
                log.truncate(log.last - 3)
            except KiviError:
                return acknowledged
    return acknowledged


@pytest.mark.timeout(300)
@pytest.mark.parametrize("leading", [False, True])
def test_every_call_fails_once_and_nothing_acknowledged_is_lost(tmp_path: Path, leading: bool) -> None:
    number, finished = 0, False
    while not finished:
        number += 1
        path = tmp_path / str(number)
        files = FaultyFiles(fail_at(number))
        acknowledged: list[bytes] = []
        try:
            log = open_log(path, files)
        except KiviError:
            pass
        else:
            acknowledged = run(log, 40, leading)
            finished = len(files.calls) < number
            log.abandon()
        log = open_log(path)
        kept = log.first - 1 if log.first <= log.last else log.last
        found = [bytes(record.body) for record in log.replay(kept)]
        everything = [body(i) * 20 for i in range(40)]
        upto = log.last
        assert found == everything[upto - len(found) : upto]
        assert upto >= len(acknowledged)
        log.close()
    assert number > 100


@pytest.mark.timeout(300)
def test_a_crash_at_every_call_of_recovery_changes_nothing_in_the_result(tmp_path: Path) -> None:
    """Twice: with a torn tail only, and with valid records behind the mark and a torn one after them."""
    for unmarked in (1, 4, 8):
        made = written(tmp_path / f"made{unmarked}", unmarked=unmarked)
        (name,) = [name for name in made if name.endswith(".log")]
        torn = {**made, name: made[name].rstrip(b"\0")[:-1].ljust(len(made[name]), b"\0")}
        path = tmp_path / f"log{unmarked}"
        results = set()
        number = 0
        while True:
            number += 1
            restore(path, torn)
            files = FaultyFiles(fail_at(number))
            try:
                open_log(path, files).abandon()
                done = len([call for call in files.calls if call != "allocate"]) < number
            except KiviError:
                done = False
            log = open_log(path)
            assert contents(log) == [body(i) for i in range(7)]
            log.abandon()
            results.add(tuple((n, d) for n, d in image(path).items() if n.endswith(".log")))
            if done:
                break
        assert number > 2
        assert len(results) == 1
