"""Large appends, cut out of their frame before it is parsed.

protobuf copies the bytes of a field into the parsed message, and again for whoever asks for them. For 100,000 events
that is some megabytes each time, into memory that the system has to clear first, and no other thread can run Python
meanwhile. So what is large is found in the frame's own bytes, and only the rest is parsed. With the same for the client
(``kivi.client.calls.encoded``): 10 % more events a second where they are integers, 15 % where they are text.

Only the most common kind of request is taken apart: one operation, that appends events. A frame of very many parts,
which are small then, is left to the parser, and so is one that is not quite what the format says: to be refused.

*Whose events these are* is said by their request's place in the frame, which no client chooses: the numbers of requests
are a client's, and one that uses a number again would get the events of another request. *Memory*: what is read where
it lies keeps its whole frame. So it is copied where the frame is more than ``KEPT_MAX`` times as large: what waits to
be read takes so many times what is counted for it, and no more. (A stream may be larger than its events, too: these,
which an open transaction keeps, ``Translator.batch`` copies by the same rule.)
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from kivi.wire.codec import prefix, tag
from kivi.wire.v1 import session_pb2

__all__ = ["KEPT_MAX", "LARGE_BYTES", "OtherForm", "cut", "varint"]

LARGE_BYTES: Final = 64 << 10
KEPT_MAX: Final = 8
_ALIGNED: Final = 8
_FIELDS_MAX: Final = 1_000
_SHORT: Final = 5  # bytes of a varint of 32 bits
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_FIXED: Final = {_FIXED64: 8, _FIXED32: 4}
_REQUESTS: Final = tag(session_pb2.ClientFrame, "requests")
_OPERATIONS: Final = tag(session_pb2.Request, "operations")
_RELEASE: Final = session_pb2.Request.DESCRIPTOR.fields_by_name["release"].number
_ID: Final = session_pb2.Request.DESCRIPTOR.fields_by_name["id"].number
_KIND: Final = session_pb2.Operation.DESCRIPTOR.fields_by_name["kind"].number
_ARROW: Final = session_pb2.Operation.DESCRIPTOR.fields_by_name["arrow"].number
_OF_REQUEST: Final = session_pb2.Request.DESCRIPTOR.fields_by_name["operations"].number
_OF_FRAME: Final = session_pb2.ClientFrame.DESCRIPTOR.fields_by_name["requests"].number
_APPENDS: Final = (session_pb2.Operation.KIND_APPEND, session_pb2.Operation.KIND_APPEND_EACH)
_Field = tuple[int, int, int, int, int]
"""Number and wire type; where its tag begins, where its bytes do (of a varint: its value), and where it ends."""


class OtherForm(Exception):
    """Not what the format says, or of more parts than are looked at."""


def cut(frame: bytes) -> tuple[bytes, dict[int, memoryview]]:
    """The frame without the events of its large appends, and these by the place of their request among its requests."""
    try:
        return _cut(frame)
    except (OtherForm, IndexError):
        return frame, {}


def _cut(frame: bytes) -> tuple[bytes, dict[int, memoryview]]:
    view, kept, payloads = memoryview(frame), list[bytes](), dict[int, memoryview]()
    place = -1
    for number, kind, begin, value, end in _fields(frame, 0, len(frame)):
        if number == _OF_FRAME and kind == _BYTES:
            place += 1
            if end - value >= LARGE_BYTES and (found := _append(frame, value, end)) is not None:
                first, last, without = found
                payloads[place] = _readable(view[first:last], len(frame))
                kept += (prefix(_REQUESTS, len(without)), without)
                continue
        kept.append(frame[begin:end])
    return (b"".join(kept), payloads) if payloads else (frame, {})


def _append(frame: bytes, at: int, end: int) -> tuple[int, int, bytes] | None:
    """Of such a request where its events are, and what it is without them.

    One that nobody waits for, or that lets go of its transaction, is none: the events of what is never answered would
    be kept as long as its session.
    """
    answered, kept, operations = 0, list[bytes](), list[_Field]()
    for field in _fields(frame, at, end):
        number, kind, begin, value, stop = field
        if number == _OF_REQUEST:
            operations.append(field)
            continue
        if number == _RELEASE:
            return None
        if number == _ID and kind == _VARINT:
            answered = value
        kept.append(frame[begin:stop])
    if not answered or len(operations) != 1 or operations[0][1] != _BYTES:
        return None
    appends, parts, arrow = False, list[bytes](), list[_Field]()
    for field in _fields(frame, *operations[0][3:]):
        number, kind, begin, value, stop = field
        if number == _ARROW:
            arrow.append(field)
            continue
        if number == _KIND and kind == _VARINT:
            appends = value in _APPENDS
        parts.append(frame[begin:stop])
    if not appends or len(arrow) != 1 or arrow[0][1] != _BYTES or arrow[0][4] - arrow[0][3] < LARGE_BYTES:
        return None
    operation = b"".join(parts)
    kept += (prefix(_OPERATIONS, len(operation)), operation)
    return arrow[0][3], arrow[0][4], b"".join(kept)


def _fields(data: bytes, at: int, end: int) -> list[_Field]:
    """Raises OtherForm, IndexError."""
    fields: list[_Field] = []
    while at < end:
        begin = at
        key, at = varint(data, at, _SHORT)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = varint(data, at)
        elif kind == _BYTES:
            size, value = varint(data, at, _SHORT)
            at = value + size
        elif kind in _FIXED:
            value, at = at, at + _FIXED[kind]
        else:
            raise OtherForm
        if at > end or not number or len(fields) == _FIELDS_MAX:
            raise OtherForm
        fields.append((number, kind, begin, value, at))
    return fields


def varint(data: bytes, at: int, most: int = 10) -> tuple[int, int]:
    """``most``: so many bytes. The parser refuses tags and sizes of more, and what does not fit."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift == 7 * most:
            raise OtherForm
    if value >> (64 if most > _SHORT else 32):
        raise OtherForm
    return value, at


def _readable(payload: memoryview, frame_bytes: int) -> memoryview:
    """Arrow reads words where they lie: a client that does not see to that (``Request.padding``) costs a copy."""
    in_place = pa.py_buffer(payload).address % _ALIGNED == 0 and frame_bytes <= KEPT_MAX * payload.nbytes
    return payload if in_place else memoryview(bytes(payload))
