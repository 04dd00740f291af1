"""The messages of a session's stream: a small header, then bodies as they are (``session.proto`` draws them).

A header is made of *packets* that were encoded on their own: joining encoded messages of protobuf joins their repeated
fields. Every body begins at a multiple of eight bytes, where Arrow reads it without a copy.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kivi.errors import InvalidArgument, ResourceExhausted
from kivi.wire.v1 import session_pb2

__all__ = ["KEPT_MAX", "NONE", "Bodies", "Packet", "header_bytes", "joined", "padded", "split"]

KEPT_MAX: Final = 8
"""What is read where it lies keeps its whole frame, and is copied where that is more than so many times as large."""
_LENGTH: Final = struct.Struct("<I")
_ALIGNED: Final = 8
_REQUESTS: Final = session_pb2.ClientFrame.DESCRIPTOR.fields_by_name["requests"].number
_RESPONSES: Final = session_pb2.ServerFrame.DESCRIPTOR.fields_by_name["responses"].number
_FILLED: Final = tuple(bytes(i) for i in range(_ALIGNED))


@functools.lru_cache(4_096)
def _before(number: int, size: int) -> bytes:
    """What stands before a field that is a message of so many bytes: its tag, and their number as a varint."""
    out = bytearray([number << 3 | 2])
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*out, size])


def padded(size: int) -> int:
    """The size of a body with what fills it up."""
    return size + -size % _ALIGNED


class Packet:
    """An encoded ClientFrame or ServerFrame, and the bodies that it mentions. Its length is what it adds to a frame."""

    __slots__ = ("_size", "bodies", "header")

    def __init__(self, header: bytes, bodies: Sequence[Any] = ()) -> None:
        self.header = header
        self.bodies = bodies
        self._size = len(header) + (sum([padded(memoryview(body).nbytes) for body in bodies]) if bodies else 0)

    def __len__(self) -> int:
        return self._size

    @staticmethod
    def request(message: session_pb2.Request, bodies: Sequence[Any] = ()) -> Packet:
        """A ClientFrame of one request, which is not copied into one: that would take 2 us."""
        data = message.SerializeToString()
        return Packet(_before(_REQUESTS, len(data)) + data, bodies)

    @staticmethod
    def response(message: session_pb2.Response, bodies: Sequence[Any] = ()) -> Packet:
        """A ServerFrame of one response."""
        data = message.SerializeToString()
        return Packet(_before(_RESPONSES, len(data)) + data, bodies)


def joined(packets: Iterable[Packet]) -> bytes:
    """A frame of them."""
    packets = list(packets)
    headers = [packet.header for packet in packets]
    parts: list[Any] = [_LENGTH.pack(sum(map(len, headers))), *headers]
    if bodies := [body for packet in packets for body in packet.bodies]:
        parts.append(_FILLED[-sum(map(len, parts)) % _ALIGNED])
        for body in bodies:
            parts += (body, _FILLED[-memoryview(body).nbytes % _ALIGNED])
    return b"".join(parts)


class Bodies:
    """Bodies one behind the other, taken in their order."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def __len__(self) -> int:
        """The bytes that are left."""
        return len(self._data) - self._at

    def take(self, size: int) -> memoryview:
        """The next one. Raises InvalidArgument if there is not so much."""
        if size > len(self):
            raise InvalidArgument(f"a body of {size} bytes is announced, and {len(self)} bytes are there")
        taken = self._data[self._at : self._at + size]
        self._at += padded(size)
        return taken


NONE: Final = Bodies(memoryview(b""))


def header_bytes(frame: bytes) -> int:
    """The length of the header, as the frame says it; 0 for what is no frame."""
    return int(_LENGTH.unpack_from(frame)[0]) if len(frame) >= _LENGTH.size else 0


def split(frame: bytes, header_bytes_max: int | None = None) -> tuple[bytes, Bodies]:
    """The header and the bodies. Raises InvalidArgument for what is no frame, ResourceExhausted for a large header."""
    if len(frame) < _LENGTH.size or (size := _LENGTH.unpack_from(frame)[0]) > len(frame) - _LENGTH.size:
        raise InvalidArgument("this is not a frame: its header is longer than it is itself")
    if header_bytes_max is not None and size > header_bytes_max:
        raise ResourceExhausted(
            f"bytes of a header: {size:,} is beyond the limit header_bytes_max = {header_bytes_max:,}: send less",
            limit="header_bytes_max",
            maximum=header_bytes_max,
        )
    end = _LENGTH.size + size
    if end == len(frame):
        return frame[_LENGTH.size :], NONE
    return frame[_LENGTH.size : end], Bodies(memoryview(frame)[padded(end) :])
