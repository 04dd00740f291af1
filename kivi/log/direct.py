"""Large writes past the page cache (O_DIRECT): what the disk takes need not be copied into fresh pages first.

A page cache is of little use to a log: what is written is not read again before the next start (staged batches are,
once). For bulk it costs more than all else that a writer does (decision 0007).

The system wants whole blocks, at block boundaries, from memory that begins at one. So the bytes are gathered into a
buffer that does (``Direct``; NumPy copies without the interpreter's lock), and what comes before the first boundary and
behind the last is the caller's to write as ever. Both ways may be used on one file: they never touch the same block,
since records follow each other without a gap and a block that was begun is finished through the cache.

**What is promised does not change.** A direct write has reached the device when it returns, but perhaps not what the
device keeps, nor the file's note that these blocks are written; a sync follows, as for any other write. An error of it
is an error of the log, but for one: EINVAL says that this file system, or this disk, does not take such writes, and
that nothing was written. Then ``put`` says so, and everything goes through the cache.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Sequence
from typing import Final

import numpy as np

from kivi.log.files import Files, write_all
from kivi.log.records import BLOCK_BYTES
from kivi.log.recovery import Segment

__all__ = ["Direct", "is_large", "open_direct", "split"]

_LARGE_BYTES: Final = 256 << 10
_PART_BYTES: Final = 4 << 10
_BUFFER_BYTES: Final = 4 << 20
_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)


def open_direct(files: Files, path: str) -> int:
    """The file for direct writes; -1 where there is no such thing. Raises ``OSError`` for any other failure."""
    if not _O_DIRECT:
        return -1
    try:
        return files.open(path, os.O_WRONLY | _O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return -1
        raise


def is_large(buffers: Sequence[bytes | memoryview]) -> bool:
    """Whether it pays: for much, in few parts, as each of them is a step of Python."""
    size = sum(map(len, buffers))
    return size >= _LARGE_BYTES and size >= _PART_BYTES * len(buffers)


def split(
    buffers: Sequence[bytes | memoryview], count: int
) -> tuple[list[bytes | memoryview], list[bytes | memoryview]]:
    """The first ``count`` bytes of them, and the rest."""
    first: list[bytes | memoryview] = []
    rest: list[bytes | memoryview] = []
    for part in buffers:
        if count >= len(part):
            first.append(part)
            count -= len(part)
        elif count:
            first.append(memoryview(part)[:count])
            rest.append(memoryview(part)[count:])
            count = 0
        else:
            rest.append(part)
    return first, rest


class Direct:
    """The buffer, for one writer at a time; made when it is first needed."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self.refused = False
        """Not possible after all: the file system takes none."""

    def write(self, files: Files, segment: Segment, buffers: list[bytes | memoryview], offset: int) -> None:
        """Write all of the buffers; large ones as far as possible past the page cache. Raises ``OSError``."""
        if segment.direct >= 0 and not self.refused and is_large(buffers):
            begun, buffers = split(buffers, -offset % BLOCK_BYTES)
            write_all(files, segment.fd, begun, offset)
            offset += sum(map(len, begun))
            written, buffers = self.put(files, segment.direct, buffers, offset)
            offset += written
        write_all(files, segment.fd, buffers, offset)

    def put(
        self, files: Files, fd: int, buffers: Sequence[bytes | memoryview], offset: int
    ) -> tuple[int, list[bytes | memoryview]]:
        """Writes the whole blocks of ``buffers`` to ``offset``, a multiple of a block.

        Returns how much has been written, and what is left: most often less than a block. Raises ``OSError``.
        """
        if self._memory is None:
            try:
                self._memory = mmap.mmap(-1, _BUFFER_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # begins at a page
            except OSError as error:  # no memory for it, and nothing was written
                self._refuse(error)
                return 0, list(buffers)
        view, space = memoryview(self._memory), np.frombuffer(self._memory, np.uint8)
        done = 0
        rest = list(buffers)
        while True:
            taken, rest = split(rest, _BUFFER_BYTES)
            filled = 0
            for part in taken:
                space[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
                filled += len(part)
            whole = filled - filled % BLOCK_BYTES
            written = self._written(files, fd, view[:whole], offset + done) if whole else 0
            done += written
            if written < whole or whole < _BUFFER_BYTES:
                left = bytes(view[written:filled])  # a copy: the next call fills the buffer anew
                return done, [left, *rest] if left else rest

    def _written(self, files: Files, fd: int, blocks: memoryview, offset: int) -> int:
        """How much of it, which may be less than all."""
        try:
            return files.pwritev(fd, [blocks], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._refuse(error)
            return 0

    def _refuse(self, error: OSError) -> None:
        logging.getLogger("kivi.log").info("large records are not written past the page cache: %s", error)
        self.refused = True
