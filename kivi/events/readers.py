"""Readers of Parquet files that lie in memory, of which only those chunks are there that were just filled in.

To touch new memory takes ten times as long as to read into it, and to open a file as long as to decode a column of one
row group. So a few readers are kept for whoever reads next, with their memory and the file that they opened last.

They are of no thread: DuckDB and Arrow call from threads that end without Python, where a reader cannot be let go of.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kivi.arrow.parquet import StoredFile

__all__ = ["Reader", "new_memory", "reader_for"]

_KEPT: Final = 4
_KEPT_BYTES: Final = 16 << 20
"""Memory for larger files is not kept."""


def new_memory(nbytes: int) -> mmap.mmap:
    """What is not touched of it costs nothing. Without these flags it is shared memory, which takes longer to touch."""
    return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Reader:
    """One user at a time. ``memory``: where chunks are put before they are decoded."""

    __slots__ = ("_codes", "_footer", "_opened", "memory")

    def __init__(self, nbytes: int) -> None:
        self.memory = new_memory(nbytes)
        self._footer: Any = None
        self._codes: Sequence[str] = ()
        self._opened: StoredFile | None = None

    def opened(self, nbytes: int, footer: Any, codes: Sequence[str]) -> StoredFile:
        """The file with this footer and so many bytes; ``codes``: columns that come in codes."""
        if self._opened is None or self._footer is not footer or self._codes != codes:
            self._opened = StoredFile(memoryview(self.memory)[:nbytes], footer, codes)
            self._footer, self._codes = footer, codes
        return self._opened


_kept: Final = deque[Reader](maxlen=_KEPT)


@contextlib.contextmanager
def reader_for(nbytes: int) -> Iterator[Reader]:
    """A reader for a file of so many bytes. What it decodes must be a copy, as all is that was compressed."""
    try:
        reader = _kept.pop()
    except IndexError:
        reader = Reader(nbytes)
    if len(reader.memory) < nbytes:
        reader = Reader(nbytes)
    yield reader  # an error leaves it to nobody
    if len(reader.memory) <= _KEPT_BYTES:
        _kept.append(reader)
