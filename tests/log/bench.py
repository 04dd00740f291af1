"""Figures for the docstrings of `kivi.log`: ``python -m tests.log.bench [directory]``. Not a test."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from kivi.log import Entry, Kind
from tests.log.faults import append, open_log

SEGMENT = 64 << 20


def raw(path: Path, size: int, count: int) -> float:
    """Seconds a record, one after the other, in a preallocated file: what the system alone takes."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, size * (count + 1))
    os.fsync(fd)
    data = os.urandom(size)
    began = time.perf_counter()
    for i in range(count):
        os.pwritev(fd, [data], i * size)
        os.fdatasync(fd)
    took = time.perf_counter() - began
    os.close(fd)
    path.unlink()
    return took / count


def one_by_one(path: Path, size: int, count: int) -> float:
    log = open_log(path, segment_bytes=SEGMENT)
    data = os.urandom(size)
    append(log, data)
    began = time.perf_counter()
    for _ in range(count):
        append(log, data)
    took = time.perf_counter() - began
    log.close()
    return took / count


def in_flight(path: Path, size: int, count: int) -> tuple[float, float]:
    """Seconds a record when nobody waits; and records a sync."""
    log = open_log(path, segment_bytes=SEGMENT)
    data = os.urandom(size)
    append(log, data)
    finished = threading.Semaphore(0)
    began = time.perf_counter()
    for _ in range(count):
        log.append([Entry(Kind.COMMIT, [data])], lambda error: finished.release())
    for _ in range(count):
        finished.acquire()
    took = time.perf_counter() - began
    syncs = log.stats()["syncs"]
    log.close()
    return took / count, count / syncs


def longest_pause(work: Callable[[], object]) -> float:
    """The longest time that another thread stood still while ``work`` ran."""
    stop, longest = threading.Event(), [0.0]

    def spin() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            now = time.perf_counter()
            longest[0] = max(longest[0], now - last)
            last = now

    thread = threading.Thread(target=spin)
    thread.start()
    work()
    stop.set()
    thread.join()
    return longest[0]


def opening(path: Path, size: int, total: int) -> tuple[float, float]:
    """Bytes a second: verified at open, and read by replay."""
    log = open_log(path, segment_bytes=SEGMENT)
    data = os.urandom(size)
    per = max(1, min(1000, (1 << 20) // size))
    for _ in range(total // size // per):
        append(log, *[data] * per)
    log.close()
    began = time.perf_counter()
    log = open_log(path, segment_bytes=SEGMENT)
    opened = time.perf_counter()
    size = sum(len(record.body) for record in log.replay(0))
    read = time.perf_counter()
    log.close()
    return size / (opened - began), size / (read - opened)


def main(directory: str) -> None:
    for size, count in ((300, 1000), (100_000, 300), (1 << 20, 100)):
        base = raw(Path(directory) / "raw", size, count)
        with tempfile.TemporaryDirectory(dir=directory) as path:
            waited = one_by_one(Path(path), size, count)
        with tempfile.TemporaryDirectory(dir=directory) as path:
            flying, group = in_flight(Path(path), size, count * 5)
        print(f"{size:8} bytes: raw {base * 1e6:7.0f} us, waited {waited / base:5.2f}", end="")
        print(f", in flight {flying / base:6.3f} ({group:.1f} records a sync)")
    with tempfile.TemporaryDirectory(dir=directory) as path:
        pause = longest_pause(lambda: one_by_one(Path(path), 100_000, 300))
        print(f"longest pause of another thread during 300 synced records of 100 kB: {pause * 1e3:.1f} ms")
    data = os.urandom(64 << 20)
    began = time.perf_counter()
    zlib.crc32(data)
    crc = len(data) / (time.perf_counter() - began)
    print(f"crc32 {crc / 1e6:.0f} MB/s")
    for size in (200, 2000, 100_000):
        with tempfile.TemporaryDirectory(dir=directory) as path:
            opened, read = opening(Path(path), size, 64 << 20 if size < 1000 else 256 << 20)
        print(f"{size:8} bytes: open {opened / 1e6:.0f} MB/s, replay {read / 1e6:.0f} MB/s")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())
