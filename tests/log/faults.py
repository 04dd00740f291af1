"""Files whose N-th call fails, and a log that is easy to drive; for the tests of the local log."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kivi.log import Entry, Kind, LogFailed, Ticket
from kivi.log.files import Files
from kivi.log.segmented import SegmentedLog
from tests.waiting import wait_until

STORE = b"0123456789abcdef"
CHANGING = (
    "allocate", "truncate", "pwritev", "fdatasync", "sync of the mark", "fsync", "sync_directory", "rename", "unlink",
)  # fmt: skip


class FaultyFiles(Files):
    """Counts the calls that change something and asks ``fault(name, number)`` before each; it may raise."""

    def __init__(self, fault: Callable[[str, int], None] = lambda name, number: None) -> None:
        self.fault = fault
        self.calls: list[str] = []
        self.lock_ = threading.Lock()

    def _call(self, name: str) -> None:
        with self.lock_:
            self.calls.append(name)
            number = len(self.calls)
        self.fault(name, number)

    def allocate(self, fd: int, size: int) -> None:
        self._call("allocate")
        super().allocate(fd, size)

    def truncate(self, fd: int, size: int) -> None:
        self._call("truncate")
        super().truncate(fd, size)

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        self._call("pwritev")
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._call("sync of the mark" if is_now_and_then() else "fdatasync")
        super().fdatasync(fd)

    def fsync(self, fd: int) -> None:
        self._call("fsync")
        super().fsync(fd)

    def sync_directory(self, path: str) -> None:
        self._call("sync_directory")
        super().sync_directory(path)

    def rename(self, source: str, target: str) -> None:
        self._call("rename")
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._call("unlink")
        super().unlink(path)


def is_now_and_then() -> bool:
    """Whether this is the thread that syncs the mark once a second, whatever happens meanwhile."""
    return threading.current_thread().name == "kivi-log-room"


class Crash(BaseException):
    """Not an error that anything handles: the process is gone."""


def fail_at(number: int, error: BaseException | None = None) -> Callable[[str, int], None]:
    """A fault for the call of that number and every later one: a disk that went away."""

    def fault(name: str, now: int) -> None:
        if now >= number:
            raise error or OSError(errno.EIO, "injected")

    return fault


def open_log(path: Path, files: Files | None = None, **options: Any) -> SegmentedLog:
    options.setdefault("segment_bytes", 16 * 1024)
    return SegmentedLog(str(path), store_id=STORE, files=files, **options)


def settled(log: SegmentedLog) -> None:
    """Waits until nothing is in the air: a ``done`` is called a moment before that."""
    wait_until(lambda: not (log._taken or log._queue), pause_s=0.001)


def append(log: SegmentedLog, *bodies: bytes, leading: bool = False) -> tuple[Ticket, BaseException | None]:
    """Append one group and wait: its ticket and what its done() got."""
    event = threading.Event()
    outcome: list[BaseException | None] = []

    def done(error: BaseException | None) -> None:
        outcome.append(error)
        event.set()

    with log.leading() if leading else nullcontext():
        ticket = log.append([Entry(Kind.COMMIT, [body]) for body in bodies], done)
    assert event.wait(30)
    assert outcome[0] is None or isinstance(outcome[0], LogFailed)
    return ticket, outcome[0]


def body(i: int) -> bytes:
    return b"<%d>" % i * (1 + i % 60)


def image(path: Path) -> dict[str, bytes]:
    """The directory's contents, by file name."""
    return {name: (path / name).read_bytes() for name in sorted(os.listdir(path))}


def restore(path: Path, files: dict[str, bytes]) -> None:
    """Make the directory have exactly these contents."""
    path.mkdir(exist_ok=True)
    for name in os.listdir(path):
        (path / name).unlink()
    for name, data in files.items():
        (path / name).write_bytes(data)


def contents(log: SegmentedLog, after: int = 0) -> list[bytes]:
    return [bytes(record.body) for record in log.replay(after)]
