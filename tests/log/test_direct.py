"""Large records go past the page cache, in whole blocks, and nothing else changes: not the bytes, not what fails."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kivi.log import LogFailed
from kivi.log.direct import _BUFFER_BYTES, _LARGE_BYTES, Direct, is_large, open_direct, split
from kivi.log.files import Files
from kivi.log.records import BLOCK_BYTES, HEADER_BYTES
from tests.log.faults import FaultyFiles, append, contents, open_log

LARGE = 1 << 20


def takes_direct_writes(path: Path) -> bool:
    (path / "probe").write_bytes(b"")
    fd = open_direct(Files(), str(path / "probe"))
    if fd >= 0:
        os.close(fd)
    return fd >= 0


@pytest.fixture
def tmp_path(on_disk: Path) -> Path:
    return on_disk


@pytest.fixture(autouse=True)
def _a_disk_that_can(tmp_path: Path) -> None:
    if not takes_direct_writes(tmp_path):
        pytest.skip("the file system of temporary files takes no direct writes (tmpfs does not)")


class Watched(FaultyFiles):
    """Notes what is written past the page cache: (offset, bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.direct: list[tuple[int, int]] = []
        self._fds: set[int] = set()

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        (self._fds.add if flags & os.O_DIRECT else self._fds.discard)(fd)
        return fd

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        if fd not in self._fds:
            return super().pwritev(fd, buffers, offset)
        (data,) = buffers
        assert offset % BLOCK_BYTES == len(data) % BLOCK_BYTES == 0
        written = super().pwritev(fd, buffers, offset)
        self.direct.append((offset, written))
        return written


@pytest.mark.parametrize("leading", [False, True])
def test_records_of_every_size_and_place_are_read_back(tmp_path: Path, leading: bool) -> None:
    files, random_ = Watched(), random.Random(1)
    log = open_log(tmp_path / "log", files, segment_bytes=32 << 20)
    sent: list[bytes] = []
    for size in [
        *(_LARGE_BYTES + i for i in range(-HEADER_BYTES - 1, 3)),
        *(_BUFFER_BYTES + i for i in range(-HEADER_BYTES - 1, 3)),
        *(random_.randrange(1, 2 * LARGE) for _ in range(30)),
        3 * _BUFFER_BYTES,
    ]:
        bodies = [random_.randbytes(size), random_.randbytes(random_.randrange(3))]
        assert append(log, *bodies, leading=leading)[1] is None
        sent += bodies
    assert contents(log) == sent
    assert sum(size for _, size in files.direct) > 0.9 * sum(map(len, sent))
    log.close()
    log = open_log(tmp_path / "log")
    assert contents(log) == sent
    log.close()


def test_a_record_that_ends_with_a_block_leaves_nothing_to_write(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log", segment_bytes=32 << 20)  # records begin behind the header, which is one block
    for _ in range(3):
        assert append(log, bytes(LARGE - HEADER_BYTES))[1] is None
    assert [len(data) for data in contents(log)] == [LARGE - HEADER_BYTES] * 3
    log.close()


def test_small_ones_are_left_to_the_cache(tmp_path: Path) -> None:
    files = Watched()
    log = open_log(tmp_path / "log", files)
    for i in range(20):
        assert append(log, b"x" * i)[1] is None
    assert files.direct == []
    log.close()
    assert is_large([bytes(LARGE)])
    assert not is_large([bytes(LARGE // 4096)] * 4096)  # much, but in many parts


@pytest.mark.parametrize("when", ["open", "write"])
def test_a_disk_that_refuses_gets_all_through_the_cache(tmp_path: Path, when: str) -> None:
    class Refusing(Watched):
        def open(self, path: str, flags: int) -> int:
            if when == "open" and flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "injected")
            return super().open(path, flags)

        def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
            if fd in self._fds:
                refused.append(offset)
                raise OSError(errno.EINVAL, "injected")
            return super().pwritev(fd, buffers, offset)

    refused: list[int] = []
    log = open_log(tmp_path / "log", Refusing(), segment_bytes=32 << 20)
    sent = [bytes([i]) * LARGE for i in range(6)]
    for data in sent:
        assert append(log, data)[1] is None
    assert contents(log) == sent
    assert len(refused) == (0 if when == "open" else 1)
    log.close()
    log = open_log(tmp_path / "log")
    assert contents(log) == sent
    log.close()


def test_a_short_direct_write_is_continued(tmp_path: Path) -> None:
    class Short(Watched):
        def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
            if fd in self._fds:
                return super().pwritev(fd, [buffers[0][: 3 * BLOCK_BYTES]], offset)
            return super().pwritev(fd, buffers, offset)

    log = open_log(tmp_path / "log", Short(), segment_bytes=32 << 20)
    sent = [random.Random(i).randbytes(LARGE + i) for i in range(6)]
    for data in sent:
        assert append(log, data)[1] is None
    assert contents(log) == sent
    log.close()


def test_any_other_error_fails_the_log(tmp_path: Path) -> None:
    class Failing(Watched):
        def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
            if fd in self._fds:
                raise OSError(errno.EIO, "injected")
            return super().pwritev(fd, buffers, offset)

    log = open_log(tmp_path / "log", Failing(), segment_bytes=32 << 20)
    assert append(log, b"small")[1] is None
    assert isinstance(append(log, bytes(LARGE))[1], LogFailed)
    assert log.durable == 1
    with pytest.raises(LogFailed):
        append(log, b"small")
    log.close()


def test_split_and_put_by_themselves(tmp_path: Path) -> None:
    parts: list[bytes | memoryview] = [b"abc", b"", memoryview(b"defgh"), b"i"]
    for count in range(10):
        first, rest = split(parts, count)
        assert b"".join(first) + b"".join(rest) == b"abcdefghi"
        assert sum(map(len, first)) == count
    path, random_ = tmp_path / "file", random.Random(2)
    for size in (0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 5 * BLOCK_BYTES + 7, 2 * _BUFFER_BYTES, 2 * _BUFFER_BYTES + 1):
        path.write_bytes(b"")
        fd = open_direct(Files(), str(path))
        assert fd >= 0
        data = random_.randbytes(size)
        written, rest = Direct().put(Files(), fd, [data[: size // 3], data[size // 3 :]], 0)
        os.close(fd)
        assert written == size - size % BLOCK_BYTES
        assert path.read_bytes() + b"".join(rest) == data
        assert all(rest)
