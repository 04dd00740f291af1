"""Zeros ahead of small records: where nobody has written yet, never over a record, and not for large ones."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kivi.log.output import _AHEAD_BYTES_MAX, _AHEAD_BYTES_MIN
from kivi.log.records import BLOCK_BYTES, HEADER_BYTES
from tests.log.faults import FaultyFiles, append, contents, open_log


class Watched(FaultyFiles):
    """Notes, of the files it is a log of, what is written where: (offset, bytes), and of what zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.zeros: list[tuple[int, int]] = []
        self.records: list[tuple[int, int]] = []
        self._ends: dict[int, int] = {}  # of each file how far records go
        self.written: dict[int, int] = {}  # and how far anything does
        self.inside = 0  # bytes of records that went where something was written before

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        size = sum(memoryview(part).nbytes for part in buffers)
        path = os.fstat(fd).st_ino
        if offset >= BLOCK_BYTES and bytes(buffers[0])[:2] != b"ma":  # not a header, nor the mark
            if len(buffers) == 1 and not any(bytes(buffers[0])):
                assert offset % BLOCK_BYTES == 0 and offset >= self._ends.get(path, 0), "over a record"
                self.zeros.append((offset, size))
            else:
                self.records.append((offset, size))
                self.inside += max(0, min(offset + size, self.written.get(path, 0)) - offset)
                self._ends[path] = max(self._ends.get(path, 0), offset + size)
            self.written[path] = max(self.written.get(path, 0), offset + size)
        return super().pwritev(fd, buffers, offset)


@pytest.mark.parametrize("leading", [False, True])
def test_small_records_go_where_zeros_were_written(tmp_path: Path, leading: bool) -> None:
    files, random_ = Watched(), random.Random(1)
    log = open_log(tmp_path / "log", files, segment_bytes=4 << 20)
    sent = [random_.randbytes(random_.randrange(1, 12_000)) for _ in range(500)]
    for body in sent:
        assert append(log, body, leading=leading)[1] is None
    assert contents(log) == sent
    total = sum(map(len, sent)) + HEADER_BYTES * len(sent)
    assert files.inside > 0.8 * total
    assert len(files.zeros) < 60 and sum(size for _, size in files.zeros) < total + _AHEAD_BYTES_MAX
    log.close()
    log = open_log(tmp_path / "log")
    assert contents(log) == sent
    log.close()


def test_large_records_are_not_written_twice(tmp_path: Path) -> None:
    files = Watched()
    log = open_log(tmp_path / "log", files, segment_bytes=16 << 20)
    sent = [random.Random(i).randbytes(_AHEAD_BYTES_MAX // 2 + i) for i in range(100)]
    for body in sent:
        assert append(log, body)[1] is None
    assert not files.zeros
    sent.append(b"small")
    append(log, sent[-1])
    assert [size for _, size in files.zeros] == [_AHEAD_BYTES_MIN], "little, as what comes next may be large again"
    assert contents(log) == sent
    log.close()


def test_zeros_end_with_the_segment(tmp_path: Path) -> None:
    files = Watched()
    log = open_log(tmp_path / "log", files, segment_bytes=64 << 10)
    sent = [bytes([i % 251 + 1]) * 999 for i in range(400)]
    for body in sent:
        assert append(log, body)[1] is None
    assert contents(log) == sent and files.zeros
    assert max(offset + size for offset, size in files.zeros) <= 64 << 10
    log.close()


def test_no_zeros_go_past_a_segment_whose_last_block_is_not_whole(tmp_path: Path) -> None:
    """What is preallocated is room for sure, what is behind it is not."""
    capacity = 6 * BLOCK_BYTES + 100
    files = Watched()
    log = open_log(tmp_path / "log", files, segment_bytes=capacity)
    sent = [b"x" * 60] * 1_500
    for body in sent:
        assert append(log, body)[1] is None
    assert contents(log) == sent and log.stats()["rolls"] > 3
    assert max(offset + size for offset, size in files.zeros) <= capacity
    log.close()


def test_nobody_writes_zeros_over_what_another_has_written(tmp_path: Path) -> None:
    """Two writers, and threads that lead, in turns; small records and large ones."""
    files = Watched()
    log = open_log(tmp_path / "log", files, segment_bytes=2 << 20)
    sent: list[bytes] = []
    lock = threading.Lock()

    def work(seed: int) -> None:
        random_ = random.Random(seed)
        for i in range(60):
            size = random_.randrange(1, 3_000) if random_.random() < 0.9 else random_.randrange(1, 200_000)
            body = f"{seed} {i} ".encode() + random_.randbytes(size)
            assert append(log, body, leading=bool(seed % 2))[1] is None
            with lock:
                sent.append(body)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(contents(log)) == sorted(sent)
    log.close()
    log = open_log(tmp_path / "log")
    assert sorted(contents(log)) == sorted(sent)
    log.close()


def test_what_a_kill_leaves_are_zeros_behind_the_last_record(tmp_path: Path) -> None:
    """They are no torn record: nothing is cut off, and nothing is reported."""
    log = open_log(tmp_path / "log", segment_bytes=1 << 20)
    sent = [b"x" * 500] * 40
    for body in sent:
        append(log, body)
    log.abandon()
    log = open_log(tmp_path / "log")
    assert contents(log) == sent and not log.recovered.cut
    log.close()
