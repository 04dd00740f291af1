"""The acknowledged mark: what the log has promised, kept outside the log.

It is a file of two slots, 4096 bytes apart, which are written alternately; each carries a generation and a
checksum, so a torn write loses at most one of them, and the newest whole one counts::

    at   size                               at   size
     0    4   "mark"                        32    8   start: the first number this opening may use
     4    4   crc32 of bytes 8-71           40    8   first: the first segment that belongs to the log
     8    8   generation                    48    4   checksum of that last record
    16    8   last acknowledged number      52    4   flags: 1 = numbers past it may be in use
    24    8   its time_us                   56   16   store id

It is written (into the page cache) before every acknowledgement, so it survives a kill; it is synced at every
segment roll and once a second, so after a **power cut** it may be up to a second old. Damage to records in
that window, which were synced, would then be taken for a torn tail: that is the window to publish. The mark
is never ahead of what is synced in the log, so it never refuses a log that is whole.

``start`` and the flag keep numbers unique across crashes. The first record of an opening is preceded by a
synced mark with the flag; at most `INFLIGHT_RECORDS_MAX` numbers are ever in flight. So the next opening, if
the flag is still there, begins that far past the last number it found, and no number in flight at the crash
comes again.
"""

from __future__ import annotations

import os
import struct
import threading
from contextlib import ExitStack
from typing import Any, NamedTuple

from kivi.errors import DataLoss, StoreInUse
from kivi.log.files import Files
from kivi.log.records import is_segment_name
from kivi.runtime.checksum import crc32

__all__ = ["INFLIGHT_RECORDS_MAX", "MARK_NAME", "Mark", "MarkFile", "open_mark", "parse_mark"]

MARK_NAME = "acknowledged"
INFLIGHT_RECORDS_MAX = 1 << 20

_SLOT = struct.Struct("<4sIQQQQQII16s")
_SLOT_BYTES = 4096
_MAGIC = b"mark"


class Mark(NamedTuple):
    """The contents of a slot, in the order in which they lie there."""

    generation: int = 0
    sequence: int = 0
    time_us: int = 0
    start: int = 1
    first: int = 0
    chain: int = 0
    in_use: bool = False
    store_id: bytes = b""

    def pack(self) -> bytes:
        bare = _SLOT.pack(_MAGIC, 0, *self)
        return bare[:4] + struct.pack("<I", crc32(bare[8:])) + bare[8:]


def _parse_slot(data: bytes) -> Mark | None:
    if len(data) < _SLOT.size:
        return None
    magic, checksum, *fields = _SLOT.unpack(data)
    if magic != _MAGIC or checksum != crc32(data[8:]):
        return None
    mark = Mark(*fields)
    return mark._replace(in_use=bool(mark.in_use & 1))


def parse_mark(files: Files, fd: int) -> Mark | None:
    """The newest whole slot of an open mark file, or None if there is none."""
    slots = [_parse_slot(files.pread(fd, _SLOT.size, i * _SLOT_BYTES)) for i in range(2)]
    return max((mark for mark in slots if mark is not None), key=lambda mark: mark.generation, default=None)


class MarkFile:
    """The open mark file. `put` and `sync` may be called by any thread; ``current`` is the newest written."""

    def __init__(self, files: Files, path: str, fd: int, current: Mark) -> None:
        self.path = path
        self.current = current
        self._files = files
        self._fd = fd
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._synced_generation = -1

    @staticmethod
    def create(files: Files, directory: str, mark: Mark) -> None:
        """Make the file, whole and durable, or not at all: both slots, renamed into place."""
        path = os.path.join(directory, MARK_NAME)
        fd = files.open(path + ".tmp", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            files.pwritev(fd, [mark.pack().ljust(_SLOT_BYTES, b"\0"), mark._replace(generation=1).pack()], 0)
            files.fsync(fd)
        finally:
            files.close(fd)
        files.rename(path + ".tmp", path)
        files.sync_directory(directory)

    def put(self, *, begins: int = 0, **changes: Any) -> None:
        """Write a slot with these fields of the mark changed. Raises ``OSError``.

        ``begins`` is ``first`` for a log that has no segment yet, and nothing for another: a roll must not bring back a
        segment that a truncation at the same moment has just given up.
        """
        with self._lock:
            old = self.current
            changes.setdefault("first", old.first or begins)
            new = old._replace(generation=old.generation + 1, **changes)
            data = new.pack()
            if self._files.pwritev(self._fd, [data], (new.generation % 2) * _SLOT_BYTES) != len(data):
                raise OSError(f"short write to {self.path}")
            self.current = new

    def sync(self) -> None:
        """Make what was written so far durable, if it is not. Raises ``OSError``."""
        with self._sync_lock:
            generation = self.current.generation
            if generation != self._synced_generation:
                self._files.fdatasync(self._fd)
                self._synced_generation = generation

    def close(self) -> None:
        self._files.close(self._fd)


def open_mark(files: Files, directory: str, store_id: bytes) -> MarkFile:
    """The mark of the log in ``directory``, locked; made, and the directory with it, if there is no log yet.

    Raises StoreInUse, and DataLoss if it is missing beside segments, damaged, or of another store.
    """
    path = os.path.join(directory, MARK_NAME)
    files.makedirs(directory)
    names = files.listdir(directory)
    if MARK_NAME not in names:
        if found := sorted(filter(is_segment_name, names)):
            raise DataLoss(
                f"{path} is missing, but {found[0]} is there: what was acknowledged is unknown; "
                "restore the data directory from a checkpoint",
                path=path,
                offset=0,
            )
        MarkFile.create(files, directory, Mark(store_id=store_id))
        files.sync_directory(os.path.dirname(os.path.abspath(directory)))
    fd = files.open(path, os.O_RDWR)
    with ExitStack() as undo:
        undo.callback(files.close, fd)
        if not files.lock(fd):
            raise StoreInUse(f"{directory} is open in another process: stop that one first", path=directory)
        mark = parse_mark(files, fd)
        if mark is None or mark.store_id != store_id:
            why = "both slots are damaged" if mark is None else "it belongs to another store"
            raise DataLoss(f"{path}: {why}; restore the data directory from a checkpoint", path=path, offset=0)
        for name in files.listdir(directory):
            if name.endswith(".tmp"):
                files.unlink(os.path.join(directory, name))
        undo.pop_all()
        return MarkFile(files, path, fd, mark)
