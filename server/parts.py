"""What a frame is made of, counted before it is parsed.

A message within a message may be two bytes long and takes the parser some hundred: a frame of 64 MiB could be made to
take some gigabytes. So what is large is looked through first, by the descriptors of what it says it is, at 0.3 us a
part; a frame of a few kilobytes is not, as it cannot hold many.
"""

from __future__ import annotations

from typing import Any, Final

from kivi_server import limits
from kivi_server.payloads import OtherForm, varint

from kivi.wire.v1 import session_pb2

__all__ = ["check"]

_REQUESTS_BYTES: Final = 64 << 10  # a frame of less has not so many requests as to be counted
_DEEP_BYTES: Final = 1 << 20  # nor one of less so many parts; clients fill frames up to this
_VARINT, _BYTES = 0, 2  # wire types
_FIXED: Final = {1: 8, 5: 4}
_GROUP: Final = frozenset({3, 4})  # a tag before it and one behind: what is between them is counted as if it were not
_Known = dict[int, "_Known | None"]
"""A message's fields by number: of those that are messages theirs, of repeated strings none, of packed numbers None."""
_NONE: Final[_Known] = {}


def _known(descriptor: Any, seen: dict[str, _Known]) -> _Known:
    known = seen.get(descriptor.full_name)
    if known is None:
        known = seen[descriptor.full_name] = {}
        for field in descriptor.fields:
            if field.message_type is not None:
                known[field.number] = _known(field.message_type, seen)
            elif field.is_repeated:
                known[field.number] = _NONE if field.cpp_type == field.CPPTYPE_STRING else None
    return known


_FRAME: Final = _known(session_pb2.ClientFrame.DESCRIPTOR, {})


def check(frame: bytes) -> None:
    """Raises ResourceExhausted if it has too many requests, or parts; what is malformed is the parser's to refuse."""
    if len(frame) < _REQUESTS_BYTES:
        return
    requests = _count(frame, _NONE, limits.FRAME_REQUESTS_MAX)
    if requests > limits.FRAME_REQUESTS_MAX:
        raise limits.exceeded("frame_requests_max", limits.FRAME_REQUESTS_MAX, requests, "requests of one frame")
    if len(frame) < _DEEP_BYTES:
        return
    parts = _count(frame, _FRAME, limits.FRAME_PARTS_MAX)
    if parts > limits.FRAME_PARTS_MAX:
        raise limits.exceeded("frame_parts_max", limits.FRAME_PARTS_MAX, parts, "messages and strings of one frame")


def _count(data: bytes, known: _Known, most: int) -> int:
    """How many fields with a length there are, in messages at any depth; beyond ``most`` nobody goes on counting."""
    count, at, end = 0, 0, len(data)
    outer: list[tuple[_Known, int]] = []  # where it goes on behind a message
    try:
        while True:
            while at >= end:
                if not outer:
                    return count
                known, end = outer.pop()
            key = data[at]
            at += 1
            if key >= 0x80:
                key, at = varint(data, at - 1)
            kind = key & 7
            if kind == _BYTES:
                size = data[at]
                at += 1
                if size >= 0x80:
                    size, at = varint(data, at - 1)
                inner = known.get(key >> 3, _NONE)
                count += 1 if inner is not None else size  # of packed numbers there may be one a byte
                if count > most:
                    return count
                if inner and at + size <= end:
                    outer.append((known, end))
                    known, end = inner, at + size
                else:
                    at += size
            elif kind == _VARINT:
                while data[at] >= 0x80:
                    at += 1
                at += 1
            elif kind in _FIXED:
                at += _FIXED[kind]
            elif kind not in _GROUP:
                return count
    except (IndexError, OtherForm):
        return count
