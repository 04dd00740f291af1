"""Opening a local log: prove what is there, cut what was never promised, refuse what is damaged.

The rules, and why each is safe:

1. Every segment but the newest was synced, whole, before the next one's header was (the roll does that). So
   each must reach exactly the state that the next header describes; anything less is `DataLoss`.
2. The newest segment may have a torn tail. Up to the acknowledged mark everything must be valid and the
   checksum of the marked record must be the mark's; otherwise `DataLoss`. What is not valid behind it was
   never acknowledged: it is cut off and reported in `Recovery.cut`.
3. Valid records of the newest segment behind the mark were never acknowledged either, and what we read of
   them may be in the page cache only (a failed sync marks pages clean). They are copied to a fresh file,
   which is synced and renamed into place under the number of the first of them, and only then cut from the
   old one.
4. Then the mark is raised to the last record.

A crash between any two steps leaves something that these rules bring to the same result: a fresh file that
was not renamed is deleted; one that was renamed makes the old file's tail an overlap, which is cut at rule 1;
rules 2 and 3 begin again from the same mark. A second recovery finds nothing to do and writes nothing.

What verifying costs, by the size of records: decision 0008.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from kivi.errors import DataLoss, FormatTooNew
from kivi.log.files import Files, write_all
from kivi.log.mark import INFLIGHT_RECORDS_MAX, MARK_NAME, Mark, MarkFile
from kivi.log.records import (
    BLOCK_BYTES,
    VERSION,
    End,
    Found,
    SegmentHeader,
    is_segment_name,
    segment_name,
    walk,
)

__all__ = ["NUMBERS_MAX", "Cut", "Recovery", "Segment", "read_header", "recover"]

NUMBERS_MAX = 1 << 32
"""A segment spans no more numbers. A record may have many in few bytes: one whose events were all late has none."""
_COPY_BYTES = 4 << 20
_RESTORE = "restore the data directory from a checkpoint; `kivi verify` shows what is readable"


@dataclass(frozen=True, slots=True)
class Cut:
    """Bytes that were never acknowledged and were cut off."""

    path: str
    offset: int
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Recovery:
    """The result of opening the log: what it found, and what it cut off."""

    clean: bool
    segments: int = 0
    records: int = 0
    bytes: int = 0
    rewritten: int = 0
    cut: tuple[Cut, ...] = ()
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Segment:
    """A segment file in memory: record ``i`` begins at ``offsets[i]``, its numbers at ``header.first + numbers[i]``.

    ``last`` is the last number in it, or the one before it if it is empty.
    ``end`` is behind the last record.
    ``fd`` is open while the segment is written (else -1), and ``direct`` where direct writes are possible. ``capacity``
    is what is preallocated.
    """

    path: str
    header: SegmentHeader
    end: int = BLOCK_BYTES
    capacity: int = 0
    offsets: array[int] = field(default_factory=lambda: array("I"))
    numbers: array[int] = field(default_factory=lambda: array("I"))
    last: int = 0
    fd: int = -1
    direct: int = -1

    def __post_init__(self) -> None:
        self.last = self.header.previous

    def enter(self, offset: int, first: int, last: int) -> None:
        """A record begins at ``offset``, and has these numbers."""
        self.offsets.append(offset)
        self.numbers.append(first - self.header.first)
        self.last = last

    def extend(self, offsets: Iterable[int], firsts: Iterable[int], last: int) -> None:
        """``enter`` for records that follow each other, of which ``last`` is the last number."""
        base = self.header.first
        self.offsets.extend(offsets)
        self.numbers.extend([first - base for first in firsts])
        self.last = last

    def start(self) -> End:
        """The state of the chain at its first record."""
        head = self.header
        return End(BLOCK_BYTES, head.first - 1, head.previous_time_us, head.chain, None)


def recover(files: Files, directory: str, mark_file: MarkFile) -> tuple[list[Segment], End, Recovery]:
    """Apply the rules above. Gives the segments, the end of the newest record, and what was found.

    Raises `DataLoss`, `FormatTooNew`, or ``OSError`` from the files.
    """
    began = time.perf_counter()
    mark = mark_file.current
    segments = _headers(files, directory, mark)
    cut: list[Cut] = []
    # Without a segment the log is new, or begins empty behind a number that was acknowledged elsewhere.
    end, rewritten = End(BLOCK_BYTES, mark.sequence, mark.time_us, mark.chain, None), 0
    for i, segment in enumerate(segments):
        following = segments[i + 1].header if i + 1 < len(segments) else None
        fd = files.open(segment.path, os.O_RDWR)
        try:
            size = files.size(fd)
            end, known = _verify(files, fd, size, segment, following, mark)
            if following is None:
                cut += _torn(files, fd, size, segment, end)
                if end.sequence > known.sequence and segment.offsets:
                    rewritten = end.sequence - known.sequence
                    segments[i:] = _rewrite(files, directory, fd, segment, known, end, mark)
                    break
            if size > end.offset:
                _truncate(files, fd, end.offset)
        finally:
            files.close(fd)
    _raise_mark(mark_file, segments, end)
    recovery = Recovery(
        clean=not mark.in_use,
        segments=len(segments),
        records=sum(len(segment.offsets) for segment in segments),
        bytes=sum(segment.end for segment in segments),
        rewritten=rewritten,
        cut=tuple(cut),
        seconds=time.perf_counter() - began,
    )
    return segments, end, recovery


def read_header(files: Files, path: str, mark: Mark) -> SegmentHeader | str:
    """The header of a segment, or what is wrong with it. Of a newer version nothing more is known than that it is."""
    fd = files.open(path, os.O_RDONLY)
    try:
        header = SegmentHeader.parse(files.pread(fd, BLOCK_BYTES, 0))
    finally:
        files.close(fd)
    if isinstance(header, SegmentHeader) and header.version <= VERSION:
        if segment_name(header.first) != os.path.basename(path) or header.previous >= header.first:
            return f"the header block is that of segment {header.first}"
        if mark.store_id and header.store_id != mark.store_id:
            return "the segment belongs to another store"
    return header


def _headers(files: Files, directory: str, mark: Mark) -> list[Segment]:
    """The segments that belong to the log, oldest first, with valid headers."""
    names = sorted(name for name in files.listdir(directory) if is_segment_name(name))
    for name in list(names):
        if int(name[:20]) < mark.first:  # a crash came between the mark of a truncation and its unlink
            files.unlink(os.path.join(directory, name))
            names.remove(name)
    if mark.first and (not names or int(names[0][:20]) != mark.first):
        path = os.path.join(directory, segment_name(mark.first))
        raise DataLoss(f"{path}, the first segment of the log, is missing: {_RESTORE}", path=path, offset=0)
    segments = []
    for name in names:
        path = os.path.join(directory, name)
        header = read_header(files, path, mark)
        if isinstance(header, str):
            raise DataLoss(f"{path}, offset 0: {header}; {_RESTORE}", path=path, offset=0)
        if header.version > VERSION:
            raise FormatTooNew(f"{path} has format {header.version}, this kivi reads {VERSION}: use a newer one")
        segments.append(Segment(path, header))
    if segments and segments[0].header.previous > mark.sequence:
        path = os.path.join(directory, MARK_NAME)
        message = f"{path}: the mark is at {mark.sequence}, but the log begins at {segments[0].header.first}"
        raise DataLoss(f"{message}: {_RESTORE}", path=path, offset=0)
    return segments


def _verify(
    files: Files, fd: int, size: int, segment: Segment, following: SegmentHeader | None, mark: Mark
) -> tuple[End, End]:
    """Walk one segment: its end (where the next one takes over), and the end of what is surely synced."""
    head = segment.header
    # An empty segment may begin after a gap in the numbers: until there is a record, the last one is
    # `previous`.
    end = known = End(BLOCK_BYTES, head.previous, head.previous_time_us, head.chain, None)
    _check_mark(segment.path, end, mark)
    limit = None if following is None else following.previous
    if limit != end.sequence:
        newest: Found | None = None
        damage: str | None = None
        marked = mark.sequence
        for item in walk(files, fd, size, segment.start(), bodies=False):
            if isinstance(item, End):
                damage = item.damage
                break
            newest = item
            segment.enter(item.offset, item.sequence, item.last)
            if item.last == marked:
                known = _after(item)
                _check_mark(segment.path, known, mark)
            if item.last == limit:
                break
        end = replace(end if newest is None else _after(newest), damage=damage)
        if end.sequence < marked:
            known = end
    segment.end = end.offset
    promised = limit if limit is not None else mark.sequence
    if end.sequence < promised:
        why = end.damage or "the log ends here"
        missing = f"but record {promised} was {'synced' if limit is not None else 'acknowledged'}"
        raise DataLoss(
            f"{segment.path}, offset {end.offset}: {why}, {missing}; {_RESTORE}",
            path=segment.path,
            offset=end.offset,
        )
    if following is not None and (end.sequence, end.chain) != (following.previous, following.chain):
        raise DataLoss(
            f"{segment.path}, offset {end.offset}: segment {following.first} does not continue record"
            f" {end.sequence} but {following.previous}: a segment is missing or was replaced; {_RESTORE}",
            path=segment.path,
            offset=end.offset,
        )
    return end, known


def _after(found: Found) -> End:
    return End(found.end, found.last, found.time_us, found.checksum, None)


def _check_mark(path: str, end: End, mark: Mark) -> None:
    if end.sequence == mark.sequence and end.chain != mark.chain:
        raise DataLoss(
            f"{path}, offset {end.offset}: record {end.sequence} is not the acknowledged one; {_RESTORE}",
            path=path,
            offset=end.offset,
        )


def _torn(files: Files, fd: int, size: int, segment: Segment, end: End) -> list[Cut]:
    """The bytes behind the last valid record, if they are more than preallocated zeros."""
    last = 0
    offset: int | None = end.offset
    while offset is not None and offset < size and (offset := files.next_data(fd, offset)) is not None:
        data = files.pread(fd, _COPY_BYTES, offset)
        if data.count(0) != len(data):
            last = offset + len(data.rstrip(b"\0"))
        offset += len(data)
    if not last and end.damage is None:
        return []
    reason = end.damage or "there are bytes behind the end of the log"
    return [Cut(segment.path, end.offset, max(last - end.offset, 0), reason)]


def _rewrite(
    files: Files, directory: str, fd: int, segment: Segment, known: End, end: End, mark: Mark
) -> list[Segment]:
    """Rule 3: what replaces the newest segment: the part before ``known``, if any, and the fresh file."""
    first = segment.header.first if known.offset == BLOCK_BYTES else known.sequence + 1
    header = SegmentHeader(mark.store_id, first, known.sequence, known.time_us, known.chain)
    fresh = Segment(os.path.join(directory, segment_name(first)), header)
    temporary = fresh.path + ".tmp"
    target = files.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(files, target, [header.pack()], 0)
        offset = known.offset
        while offset < end.offset:
            data = files.pread(fd, min(_COPY_BYTES, end.offset - offset), offset)
            if not data:
                raise OSError(f"{segment.path} ended at {offset} while it was read")
            write_all(files, target, [data], BLOCK_BYTES + offset - known.offset)
            offset += len(data)
        files.fsync(target)
    finally:
        files.close(target)
    files.rename(temporary, fresh.path)
    files.sync_directory(directory)
    kept = sum(1 for offset in segment.offsets if offset < known.offset)
    fresh.offsets = array("I", (offset - known.offset + BLOCK_BYTES for offset in segment.offsets[kept:]))
    fresh.numbers = array("I", (number + segment.header.first - first for number in segment.numbers[kept:]))
    fresh.last = end.sequence
    fresh.end = end.offset - known.offset + BLOCK_BYTES
    if fresh.path == segment.path:
        return [fresh]
    _truncate(files, fd, known.offset)
    del segment.offsets[kept:], segment.numbers[kept:]
    segment.last = known.sequence
    segment.end = known.offset
    return [segment, fresh]


def _raise_mark(mark_file: MarkFile, segments: list[Segment], end: End) -> None:
    """Rule 4. Decides also which number the next record may have; see `kivi.log.mark`."""
    mark = mark_file.current
    start = max(end.sequence + 1, mark.start)
    if mark.in_use:
        start += INFLIGHT_RECORDS_MAX
    changes: dict[str, Any] = {
        "sequence": end.sequence,
        "time_us": end.time_us,
        "chain": end.chain,
        "start": start,
        "first": segments[0].header.first if segments else 0,
        "in_use": False,
    }
    if mark._replace(**changes) != mark:
        mark_file.put(**changes)
    mark_file.sync()


def _truncate(files: Files, fd: int, size: int) -> None:
    files.truncate(fd, size)
    files.fsync(fd)
