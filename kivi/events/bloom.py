"""Bloom filters of Parquet: whether a row group may have a value. Pure; pyarrow writes them, and does not read them.

A *split block* filter is 2**n blocks of 256 bits. A value's hash is the XXH64 of its bytes as Parquet writes them
plainly, text without its length. The upper 32 bits choose a block, the lower ones a bit in each of its eight words.
The format: "Parquet Bloom Filter" and "XXH64 digest", of which this follows the text.
"""

from __future__ import annotations

import struct
from typing import Any, Final

__all__ = ["BLOCK_BYTES", "block_of", "digest", "has", "plain_bytes"]

BLOCK_BYTES: Final = 32
_SALT: Final = (
    0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31,
)  # fmt: skip
_P1: Final = 0x9E3779B185EBCA87
_P2: Final = 0xC2B2AE3D27D4EB4F
_P3: Final = 0x165667B19E3779F9
_P4: Final = 0x85EBCA77C2B2AE63
_P5: Final = 0x27D4EB2F165667C5
_MASK: Final = 2**64 - 1


def plain_bytes(value: Any) -> bytes | None:
    """An integer of 64 bits, a text or bytes as Parquet writes it; None for another value."""
    if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
        return struct.pack("<q", value)
    return (
        value.encode(errors="surrogatepass") if isinstance(value, str) else value if isinstance(value, bytes) else None
    )


def block_of(digest: int, blocks: int) -> int:
    """The number of the block that tells of a value with this digest, among so many."""
    return ((digest >> 32) * blocks) >> 32


def has(block: bytes, digest: int) -> bool:
    """False: nothing with this digest was ever put into the block."""
    words = struct.unpack("<8I", block)
    key = digest & 0xFFFFFFFF
    return all(word >> ((key * salt & 0xFFFFFFFF) >> 27) & 1 for word, salt in zip(words, _SALT, strict=True))


def digest(data: bytes) -> int:
    """XXH64 with seed 0."""
    at, size = 0, len(data)
    if size >= 32:
        lanes = [(_P1 + _P2) & _MASK, _P2, 0, -_P1 & _MASK]
        while at + 32 <= size:
            lanes = [_round(lane, word) for lane, word in zip(lanes, struct.unpack_from("<4Q", data, at), strict=True)]
            at += 32
        found = sum(_rotated(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
        for lane in lanes:
            found = ((found ^ _round(0, lane)) * _P1 + _P4) & _MASK
    else:
        found = _P5
    found = (found + size) & _MASK
    while at + 8 <= size:
        (word,) = struct.unpack_from("<Q", data, at)
        found = (_rotated(found ^ _round(0, word), 27) * _P1 + _P4) & _MASK
        at += 8
    if at + 4 <= size:
        (word,) = struct.unpack_from("<I", data, at)
        found = (_rotated(found ^ (word * _P1 & _MASK), 23) * _P2 + _P3) & _MASK
        at += 4
    for byte in data[at:]:
        found = _rotated(found ^ (byte * _P5 & _MASK), 11) * _P1 & _MASK
    found = (found ^ (found >> 33)) * _P2 & _MASK
    found = (found ^ (found >> 29)) * _P3 & _MASK
    return found ^ (found >> 32)


def _round(lane: int, word: int) -> int:
    return _rotated((lane + word * _P2) & _MASK, 31) * _P1 & _MASK


def _rotated(value: int, by: int) -> int:
    return (value << by | value >> (64 - by)) & _MASK
