"""The bytes of a block of request tokens, as stores of older versions hold them: read, and not written any more.

A block holds up to 2,048 tokens ``k1-<16 digits: issue time, us>-<24 hexadecimal digits>``, sorted by the time they
were issued. It is two rows, one without a value, and one with the data; the key of either says between which times
that was, the newest first, and the least commit timestamp::

    offset  size     field
    0       4        n: how many tokens
    4       1        a: bytes of a commit timestamp, 0, 1, 2, 4 or 8
    5       2        d: how many different digests
    7       n * 12   what is behind the times, as bytes
    ..      n * 4    the times, microseconds after the oldest
    ..      n * a    the commit timestamps, from the least on
    ..      n * 2    if d > 1: of each the place of its digest
    ..      d * 16   the digests

All integers are little endian.
"""

from __future__ import annotations

import struct
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from kivi.encoding.keyspaces import split_token_block_key
from kivi.errors import DataLoss

__all__ = ["Saved", "decode_block"]

_HEAD: Final = struct.Struct("<IBH")
_RANDOM: Final = 12
_DIGEST: Final = 16


class Saved(NamedTuple):
    """A token, the timestamp of its commit, and the digest of what that did."""

    token: str
    cts: int
    digest: bytes


def decode_block(key: bytes, value: bytes) -> list[Saved]:
    """All that is in it, in order; by either row's key. Raises DataLoss."""
    try:
        newest, oldest, first = split_token_block_key(key)
        count, width, digests = _HEAD.unpack_from(value)
        sizes = [_RANDOM * count, 4 * count, width * count, 2 * count if digests > 1 else 0, _DIGEST * digests]
        bounds = [*accumulate(sizes, initial=_HEAD.size)]
        if bounds[-1] != len(value) or not count:
            raise ValueError("another length")
        random, times, stamps, places, words = (value[begin:end] for begin, end in pairwise(bounds))
        issued = [oldest + step for step in struct.unpack(f"<{count}I", times)]
        if issued != sorted(issued) or (issued[0], issued[-1]) != (oldest, newest):
            raise ValueError("other times")
        of_each = struct.unpack(f"<{count}H", places) if places else [0] * count
        kinds = [words[_DIGEST * i :][:_DIGEST] for i in range(digests)]
        return [
            Saved(
                f"k1-{issued[i]:016d}-{random[_RANDOM * i :][:_RANDOM].hex()}",
                first + int.from_bytes(stamps[width * i :][:width], "little"),
                kinds[of_each[i]],
            )
            for i in range(count)
        ]
    except (struct.error, ValueError, IndexError):
        raise DataLoss(
            f"the tokens at key 0x{key.hex()} ({len(value)} bytes) are damaged, or of another version of kivi: "
            "restore a backup"
        ) from None
