"""Which frames the event loop handles itself: not after one that waited for a disk, whatever else made one wait."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kivi_server import sessions as module
from kivi_server.sessions import Sessions, disk_reads

from kivi.store.facade import Store


@pytest.fixture
def sessions() -> Iterator[Sessions]:
    store = Store.open()
    made = Sessions(store, "test")
    yield made
    made.close()
    store.close()


@pytest.mark.parametrize(
    ("seconds", "reads", "quick"),
    [(0.001, 5, True), (0.02, 0, True), (0.02, 1, False), (0.2, 0, False)],
)
def test_what_a_slow_frame_decides(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, seconds: float, reads: int, quick: bool
) -> None:
    monkeypatch.setattr(module, "_SLOW_S", 0.2)
    sessions.took(seconds, reads)
    assert sessions.is_quick() == quick
    time.sleep(0.2)
    assert sessions.is_quick()


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="this system does not count a thread's reads")
def test_reads_from_a_disk_are_counted_and_those_from_memory_are_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        before = disk_reads()
        os.pread(fd, 1 << 20, 0)
        cold = disk_reads()
        os.pread(fd, 1 << 20, 0)
        warm = disk_reads()
    finally:
        os.close(fd)
    if cold == before:
        pytest.skip("this file system keeps its files in memory")
    assert warm == cold


def test_where_reads_are_not_counted_each_slow_frame_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_THREAD", None)
    assert disk_reads() < disk_reads()
