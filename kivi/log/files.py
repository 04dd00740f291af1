"""The system calls that the log makes, in one thin class, so that a test can make the N-th one fail.

Every byte that the local log reads or writes passes through here and nothing else does. All methods raise
``OSError`` as the system does; what an error means is decided by the caller.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence

from kivi.runtime.files import sync_directory

__all__ = ["Files", "write_all"]

_IOV_MAX = 1024


class Files:
    """The real thing. Subclass it and override a method to inject a fault."""

    def makedirs(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def listdir(self, path: str) -> list[str]:
        return os.listdir(path)

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o644)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def lock(self, fd: int) -> bool:
        """Take the exclusive lock of the open file; False if somebody else has it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def allocate(self, fd: int, size: int) -> None:
        """Reserve disk space for the first ``size`` bytes and make the file that long."""
        os.posix_fallocate(fd, 0, size)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        """Up to ``count`` bytes; fewer only at the end of the file."""
        data = os.pread(fd, count, offset)
        if not data or len(data) == count:
            return data
        parts = [data]
        done = len(data)
        while done < count and (data := os.pread(fd, count - done, offset + done)):
            parts.append(data)
            done += len(data)
        return b"".join(parts)

    def next_data(self, fd: int, offset: int) -> int | None:
        """The place of the next bytes that were ever written (preallocated space is a hole), or None."""
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            raise

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        """May write less than all; returns how much. At most IOV_MAX (1024) buffers."""
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def sync_directory(self, path: str) -> None:
        sync_directory(path)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)


def write_all(files: Files, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
    """Write all of the buffers, however many calls it takes. Raises ``OSError``."""
    for i in range(0, len(buffers), _IOV_MAX):
        part = list(buffers[i : i + _IOV_MAX])
        while part:
            written = files.pwritev(fd, part, offset)
            if written <= 0:
                raise OSError(f"nothing was written at {offset}")
            offset += written
            while part and written >= len(part[0]):
                written -= len(part.pop(0))
            if written:
                part[0] = memoryview(part[0])[written:]
