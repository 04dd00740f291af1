"""Frames: what a gateway publishes to a log that many nodes read, each one message of it, or several.

A frame is one group of entries. All integers are little-endian::

    at   size                                              at   size
     0    4   crc32 of all that follows                    48    8   derived at: see kivi.store.catalog
     4    4   "kfr2"                                       56    8   the gateway's clock, microseconds since 1970
     8   16   generation of the log                        64    8   sequence that the gateway had applied
    24    8   node of the gateway                          72   16   its running hash there
    32    8   boot: of the node's starts, a later          88    4   how many entries
              one has a larger number                      92        entries
    40    8   n: the gateway's count of frames, from 1

    entry: u8 kind, u24 how many numbers, u64 length, the body, padded to 8

**Parts.** A frame that is larger than a message may be comes in parts, and counts where the last of them arrives::

    0    4   crc32 of all that follows                     48    4   which part it is, from 0
    4    4   "kfp1"                                        52    4   how many there are
    8   40   generation, node, boot, n: of the frame       56        bytes

**The id** of a frame is (node, boot, n): a frame that is published twice has one id, and is applied once. A node keeps
for each other one the newest boot that it has seen, of that the largest n, and which n below it are missing; so a frame
that comes after its successor is neither lost nor taken twice. A newer boot ends the older ones: what comes of those
later is void, since nobody waits for it and nobody would count its numbers.

**The running hash** is over all messages of the log up to a sequence, each with the last number that was given by then.
A node that has applied what another one has not been told (a log that lost what it had acknowledged, a copy with other
bytes), or that has come to another verdict, finds out by its next frame.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Final, NamedTuple

from kivi.errors import DataLoss, FormatTooNew
from kivi.log import Entry, Kind
from kivi.log.direct import split
from kivi.runtime.checksum import crc32

__all__ = [
    "NO_HASH",
    "Frame",
    "FrameId",
    "FrameIds",
    "FramePart",
    "decode_frame",
    "decode_message",
    "messages_of",
    "running_hash",
]

_MAGIC: Final = b"kfr2"
_PART_MAGIC: Final = b"kfp1"
_HEAD: Final = struct.Struct("<4s16sQQQQQQ16sI")
_PART_HEAD: Final = struct.Struct("<4s16sQQQII")
_CHECKSUM: Final = struct.Struct("<I")
_ENTRY: Final = struct.Struct("<II4xQ")  # kind and numbers, padding, length
_KINDS: Final = {kind.value: kind for kind in Kind}
_COPIED_BYTES: Final = 64 << 10
NO_HASH: Final = bytes(16)
"""The running hash of a log without messages."""


class FrameId(NamedTuple):
    node: int
    boot: int
    n: int


@dataclass(frozen=True, slots=True)
class Frame:
    """Entries that were published together. ``applied``, ``hash``: how far the gateway was, and its running hash."""

    generation: bytes
    id: FrameId
    derived_at: int
    clock_us: int
    applied: int
    hash: bytes
    entries: Sequence[Entry] = field(default=())

    def encode(self) -> bytes:
        """The message, if it is one."""
        return b"".join(self.pieces())

    def pieces(self) -> list[bytes | memoryview]:
        """What it is encoded as, one behind the other: what is large is not copied before its message is made."""
        pieces: list[bytes | memoryview] = [
            _HEAD.pack(
                _MAGIC,
                self.generation,
                *self.id,
                self.derived_at,
                self.clock_us,
                self.applied,
                self.hash,
                len(self.entries),
            )
        ]
        for kind, body, numbers, _ in self.entries:
            parts = [part if isinstance(part, bytes) else memoryview(part).cast("B") for part in body]
            size = sum(map(len, parts))
            pieces += [_ENTRY.pack(kind, numbers, size), *parts, bytes(-size % 8)]
        return _checked(pieces)


@dataclass(frozen=True, slots=True)
class FramePart:
    """``data`` are bytes of an encoded frame."""

    generation: bytes
    id: FrameId
    place: int
    of: int
    data: bytes | memoryview

    def encode(self) -> bytes:
        """The message."""
        return self.with_data([self.data])

    def with_data(self, pieces: Sequence[bytes | memoryview]) -> bytes:
        """The message, with these bytes in place of ``data``."""
        head = _PART_HEAD.pack(_PART_MAGIC, self.generation, *self.id, self.place, self.of)
        return b"".join(_checked([head, *pieces]))


def messages_of(frame: Frame, max_bytes: int) -> list[bytes]:
    """The messages that a frame is published as, each of at most so many bytes."""
    pieces = frame.pieces()
    nbytes = sum(map(len, pieces))
    if nbytes <= max_bytes:
        return [b"".join(pieces)]
    size = max_bytes - _CHECKSUM.size - _PART_HEAD.size
    of = -(-nbytes // size)
    messages = []
    for place in range(of):
        cut, pieces = split(pieces, size)
        messages.append(FramePart(frame.generation, frame.id, place, of, b"").with_data(cut))
    return messages


def _checked(pieces: list[bytes | memoryview]) -> list[bytes | memoryview]:
    """With their checksum in front. What is small is copied sooner than each is a step of its own."""
    if sum(map(len, pieces)) <= _COPIED_BYTES:
        pieces = [b"".join(pieces)]
    return [_CHECKSUM.pack(reduce(_crc32_behind, pieces, 0)), *pieces]


def _crc32_behind(before: int, piece: bytes | memoryview) -> int:
    return crc32(piece, before)


def decode_message(data: bytes | memoryview) -> Frame | FramePart:
    """What a message holds. Raises DataLoss for one that is not as it was published, FormatTooNew for one of a later
    version of kivi."""
    view = memoryview(data)
    at = _CHECKSUM.size + _PART_HEAD.size
    if bytes(view[_CHECKSUM.size : _CHECKSUM.size + len(_PART_MAGIC)]) != _PART_MAGIC or len(view) < at:
        return decode_frame(data)
    _check(view)
    _, generation, node, boot, n, place, of = _PART_HEAD.unpack(view[_CHECKSUM.size : at])
    return FramePart(generation, FrameId(node, boot, n), place, of, view[at:])


def _check(view: memoryview) -> None:
    if _CHECKSUM.unpack(view[: _CHECKSUM.size])[0] != crc32(view[_CHECKSUM.size :]):
        raise DataLoss("the checksum of a frame is wrong")


def decode_frame(data: bytes | memoryview) -> Frame:
    """The inverse of ``Frame.encode``. Raises as ``decode_message``."""
    view = memoryview(data)
    at = _CHECKSUM.size + _HEAD.size
    if len(view) < at:
        raise DataLoss("a frame is cut off")
    _check(view)
    magic, generation, node, boot, n, derived_at, clock_us, applied, hash_, count = _HEAD.unpack(
        view[_CHECKSUM.size : at]
    )
    if magic != _MAGIC:
        raise FormatTooNew(f"it is of the form {magic!r}, which this version of kivi does not know: use a newer one")
    entries = []
    for _ in range(count):
        if len(view) < at + _ENTRY.size:
            raise DataLoss("a frame has fewer entries than it says")
        kind, numbers, size = _ENTRY.unpack(view[at : at + _ENTRY.size])
        at += _ENTRY.size
        if len(view) < at + size:
            raise DataLoss("a frame has an entry that is cut off")
        if kind not in _KINDS:
            raise FormatTooNew(f"it has an entry of kind {kind}, which this version does not know: use a newer one")
        entries.append(Entry(_KINDS[kind], (view[at : at + size],), numbers))
        at += size + -size % 8
    return Frame(generation, FrameId(node, boot, n), derived_at, clock_us, applied, hash_, entries)


def running_hash(before: bytes, number: int, data: bytes | memoryview) -> bytes:
    """Of a log one message longer, with the last number that was given by then."""
    found = hashlib.blake2b(b"%d " % number, key=before, digest_size=16)
    found.update(data)
    return found.digest()


@dataclass(slots=True)
class _Seen:
    boot: int
    high: int = 0
    missing: set[int] = field(default_factory=set)


class FrameIds:
    """Which frames were seen. It is a function of the log's prefix."""

    def __init__(self, saved: bytes | None = None) -> None:
        self._of: dict[int, _Seen] = {}
        for node, (boot, high, missing) in json.loads(saved or b"{}").items():
            self._of[int(node)] = _Seen(boot, high, set(missing))

    def is_new(self, id_: FrameId) -> bool:
        """Whether a frame counts: it is the first of its id, and its boot is not over."""
        seen = self._of.get(id_.node)
        if seen is None or id_.boot != seen.boot:
            return seen is None or id_.boot > seen.boot
        return id_.n > seen.high or id_.n in seen.missing

    def boot_of(self, node: int) -> int:
        """The newest start of a node that is known; 0: none is."""
        seen = self._of.get(node)
        return 0 if seen is None else seen.boot

    def see(self, id_: FrameId) -> None:
        """Notes that the frame has come."""
        if not self.is_new(id_):
            return
        seen = self._of.get(id_.node)
        if seen is None or id_.boot > seen.boot:
            seen = self._of[id_.node] = _Seen(id_.boot)
        if id_.n > seen.high:
            seen.missing.update(range(seen.high + 1, id_.n))
            seen.high = id_.n
        seen.missing.discard(id_.n)

    def encode(self) -> bytes:
        """For ``saved``."""
        return json.dumps({node: (s.boot, s.high, sorted(s.missing)) for node, s in self._of.items()}).encode()
