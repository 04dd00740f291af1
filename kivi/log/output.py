"""Writing to a segment: large records past the page cache, small ones where zeros were written before."""

from __future__ import annotations

from typing import Final

from kivi.log.direct import Direct, is_large, split
from kivi.log.files import Files
from kivi.log.records import BLOCK_BYTES
from kivi.log.recovery import Segment

__all__ = ["Output"]

_IOV_MAX: Final = 1024
_AHEAD_BYTES_MIN: Final = 16 << 10
_AHEAD_BYTES_MAX: Final = 128 << 10
_ZEROS: Final = memoryview(bytes(_AHEAD_BYTES_MAX))


class Output:
    """Used by one thread at a time, whichever has taken the queue. ``me``: which of a segment's open files is its."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._direct = Direct()
        self._ahead_bytes = _AHEAD_BYTES_MIN

    def put(self, segment: Segment, me: int, buffers: list[bytes | memoryview], offset: int) -> None:
        """Write all of the buffers, however many calls it takes; large ones as far as possible past the page cache."""
        if not buffers:
            return
        fd, direct = segment.fds[me], segment.direct
        self._write_ahead(segment, fd, offset + sum(map(len, buffers)), offset)
        if direct is not None and not self._direct.refused and is_large(buffers):
            begun, buffers = split(buffers, -offset % BLOCK_BYTES)
            self._put_all(fd, begun, offset)
            offset += sum(map(len, begun))
            written, buffers = self._direct.put(self._files, direct, buffers, offset)
            offset += written
        self._put_all(fd, buffers, offset)

    def _write_ahead(self, segment: Segment, fd: int, end: int, offset: int) -> None:
        """Puts zeros behind what small records are about to be written, once they pass what was written before.

        The blocks of a preallocated file that nothing was put into yet are noted as such by its file system. A sync of
        records in those has to change that note, of others not. Nobody else writes now, and what lies behind ``end`` is
        written after this.
        """
        if end <= segment.written:
            return
        segment.written = end
        if end - offset >= _AHEAD_BYTES_MAX // 2:  # a stream of large ones would only be written twice
            self._ahead_bytes = _AHEAD_BYTES_MIN
            return
        begin = -(-end // BLOCK_BYTES) * BLOCK_BYTES
        zeros = _ZEROS[: max(0, min(self._ahead_bytes, segment.capacity - begin))]  # its last block may not be whole
        if zeros:
            self._put_all(fd, [zeros], begin)
            segment.written = begin + len(zeros)
            self._ahead_bytes = min(2 * self._ahead_bytes, _AHEAD_BYTES_MAX)

    def _put_all(self, fd: int, buffers: list[bytes | memoryview], offset: int) -> None:
        pwritev = self._files.pwritev
        for i in range(0, len(buffers), _IOV_MAX):
            part = buffers[i : i + _IOV_MAX]
            while part:
                written = pwritev(fd, part, offset)
                if written <= 0:
                    raise OSError(f"nothing was written at {offset}")
                offset += written
                while part and written >= len(part[0]):
                    written -= len(part.pop(0))
                if written:
                    part[0] = memoryview(part[0])[written:]
