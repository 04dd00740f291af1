"""The bytes of a segment file: a header block, then records one after the other.

All integers are little-endian. A segment is named after its first sequence number, 20 digits and ``.log``::

    header block, 4096 bytes                         record, 32 bytes and its body
    at   size                                        at   size
     0    8   "kivi-log"                              0    4   checksum (of 4..end, see below)
     8    4   format version                          4    2   magic 0x6b52
    12    4   crc32 of bytes 0-11 and 16-63           6    1   kind
    16   16   store id                                7    1   zero
    32    8   first sequence number                   8    5   length of the body in bytes
    40    8   last sequence number before it         13    3   how many sequence numbers it has, less one
    48    8   time_us of the last record before it   16    8   its first sequence number
    56    4   checksum of the last record before it  24    8   time_us
    60    4   zero                                   32        body
    64        zeros

Each record's checksum is ``crc32`` of the rest of its header and its body, *started from the checksum of the
record before it*, which may be in the segment before; the first of all starts from 0. So a valid record
proves everything in front of it, in order and complete, and the numbers need not be dense to prove it (they
skip between segments, never inside one). Behind the last record a segment is zeros, because it is
preallocated, or ends. The chain is the only judge: a length or a number is never believed before the checksum
that covers it.

`walk` is the one reader; recovery, replay and inspection all use it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kivi.log import Entry, Kind, Record
from kivi.log.files import Files
from kivi.runtime.checksum import crc32

__all__ = [
    "BLOCK_BYTES",
    "HEADER_BYTES",
    "VERSION",
    "End",
    "Found",
    "SegmentHeader",
    "is_segment_name",
    "pack_records",
    "segment_name",
    "walk",
]

VERSION = 1
BLOCK_BYTES = 4096
HEADER_BYTES = 32
SUFFIX = ".log"

_BLOCK_MAGIC = b"kivi-log"
_BLOCK = struct.Struct("<8sII16sQQQII")
_RECORD = struct.Struct("<IHBBQQQ")
_RECORD_REST = struct.Struct("<HBBQQQ")
_CHECKSUM = struct.Struct("<I")
_RECORD_MAGIC = 0x6B52
_WINDOW_BYTES = 4 << 20
_COPIED_BYTES = 4 << 10
_LENGTH_BITS = 40
_LENGTH = (1 << _LENGTH_BITS) - 1
_NO_RECORD = bytes(HEADER_BYTES)
_KINDS = {kind.value: kind for kind in Kind}


def segment_name(first: int) -> str:
    """The file name of the segment that begins with this sequence number."""
    return f"{first:020d}{SUFFIX}"


def is_segment_name(name: str) -> bool:
    """Whether a directory entry is a segment, by its name."""
    return name.endswith(SUFFIX) and len(name) == 20 + len(SUFFIX) and name[:20].isdigit()


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The header block: which store, and what the log looked like right before this segment."""

    store_id: bytes
    first: int
    previous: int
    previous_time_us: int
    chain: int
    version: int = VERSION

    def pack(self) -> bytes:
        """The header block's 4096 bytes."""
        fields = (self.store_id, self.first, self.previous, self.previous_time_us, self.chain, 0)
        bare = _BLOCK.pack(_BLOCK_MAGIC, self.version, 0, *fields)
        checksum = crc32(bare[16:], crc32(bare[:12]))
        return _BLOCK.pack(_BLOCK_MAGIC, self.version, checksum, *fields).ljust(BLOCK_BYTES, b"\0")

    @staticmethod
    def parse(block: bytes) -> SegmentHeader | str:
        """The header, or what is wrong with it. A newer version parses: look at ``version`` first."""
        if len(block) < BLOCK_BYTES:
            return f"the header block is cut off after {len(block)} bytes"
        bare = block[: _BLOCK.size]
        magic, version, checksum, store_id, first, previous, time_us, chain, _ = _BLOCK.unpack(bare)
        if magic != _BLOCK_MAGIC:
            return "this is not a segment of a kivi log"
        if checksum != crc32(bare[16:], crc32(bare[:12])):
            return "the header block's checksum is wrong"
        if version <= VERSION and block[_BLOCK.size :].strip(b"\0"):
            return "the header block's padding is not zero"
        return SegmentHeader(store_id, first, previous, time_us, chain, version)


def pack_records(
    records: Iterable[Entry], lengths: Iterable[int], first: int, time_us: int, chain: int
) -> tuple[list[bytes | memoryview], int]:
    """Consecutive records as they lie in the file, in parts, and the chain behind them. ``lengths`` of the bodies.

    Small bodies are copied sooner than each is written by itself.
    """
    parts: list[bytes | memoryview] = []
    small: list[bytes] = []
    rest, checksum, sequence = _RECORD_REST.pack, _CHECKSUM.pack, first
    for (kind, body, numbers, _), length in zip(records, lengths, strict=True):
        head = rest(_RECORD_MAGIC, kind, 0, length | (numbers - 1) << _LENGTH_BITS, sequence, time_us)
        sequence += numbers
        if length <= _COPIED_BYTES:
            data = b"".join((head, *body))
            chain = crc32(data, chain)
            small += checksum(chain), data
            continue
        chain = crc32(head, chain)
        for part in body:
            chain = crc32(part, chain)
        parts.append(b"".join((*small, checksum(chain), head)))
        small = []
        parts += [memoryview(part).cast("B") for part in body if memoryview(part).nbytes]
    if small:
        parts.append(b"".join(small))
    return parts, chain


class Found(NamedTuple):
    """One valid record and where it was: ``end`` is the offset behind it, ``last`` the last of its numbers."""

    offset: int
    end: int
    checksum: int
    sequence: int
    last: int
    time_us: int
    kind: int
    body: bytes | memoryview

    def record(self) -> Record:
        """The record, as everybody above knows it."""
        return Record(self.sequence, self.time_us, _KINDS[self.kind], self.body, self.last - self.sequence + 1)


@dataclass(frozen=True, slots=True)
class End:
    """The end of the valid records of a segment, the last number there, and the state of the chain.

    ``damage`` is None if nothing but zeros follows at this place, otherwise what is wrong with what does.
    """

    offset: int
    sequence: int
    time_us: int
    chain: int
    damage: str | None


def walk(
    files: Files, fd: int, size: int, start: End, *, bodies: bool = True, window: int = _WINDOW_BYTES
) -> Iterator[Found | End]:
    """The valid records from ``start`` on, and the `End` as the last item.

    ``start.sequence`` is the number before the first record (so a segment's first number minus one), and
    ``size`` where to stop. Without ``bodies`` the records come with empty ones (verified all the same). ``window``: how
    many bytes are read at a time, about.
    Bodies never keep the read buffer alive. Raises ``OSError`` if reading fails.
    """
    offset, sequence, time_us, chain = start.offset, start.sequence, start.time_us, start.chain
    base, read = offset, memoryview(b"")
    unpack, new = _RECORD.unpack_from, tuple.__new__
    while True:
        at = offset - base
        if at + HEADER_BYTES > len(read):
            base, at = offset, 0
            read = memoryview(files.pread(fd, min(window, max(size - offset, 0)), offset))
            if len(read) < HEADER_BYTES:
                damage = f"a record header is cut off after {len(read)} bytes" if any(read) else None
                yield End(offset, sequence, time_us, chain, damage)
                return
        checksum, magic, kind, zero, packed, number, when = unpack(read, at)
        length, more = packed & _LENGTH, packed >> _LENGTH_BITS
        damage = None
        if magic != _RECORD_MAGIC or zero or kind not in _KINDS:
            if read[at : at + HEADER_BYTES] != _NO_RECORD:
                damage = "the record header is not one"
            yield End(offset, sequence, time_us, chain, damage)
            return
        end = at + HEADER_BYTES + length
        if number != sequence + 1:
            damage = f"the record says it is number {number}, where {sequence + 1} belongs"
        elif when < time_us:
            damage = "the record's time is before that of the one before it"
        elif offset + HEADER_BYTES + length > size:
            damage = f"the record's length, {length} bytes, reaches past the end of the file"
        if damage is None and end > len(read):
            base, at, end = offset, 0, HEADER_BYTES + length
            count = min(max(window, end), size - offset)
            read = memoryview(files.pread(fd, end if end > window else count, offset))
            if len(read) < end:
                damage = f"the record is cut off after {len(read)} of {end} bytes"
        if damage is None and crc32(read[at + 4 : end], chain) != checksum:
            damage = "the record's checksum is wrong"
        if damage is not None:
            yield End(offset, sequence, time_us, chain, damage)
            return
        body: bytes | memoryview = b""
        if bodies:
            part = read[at + HEADER_BYTES : end]
            body = part if len(read) == end - at else bytes(part)
        following = offset + end - at
        sequence = number + more
        yield new(Found, (offset, following, checksum, number, sequence, when, kind, body))
        offset = following
        time_us, chain = when, checksum
