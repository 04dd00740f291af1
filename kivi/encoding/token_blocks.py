"""The bytes of a block of request tokens: what became of commits under tokens that the client library made.

Many commit between two passes of consolidation, each under a token of its own. In blocks no Python statement is for one
token only, and a token takes a quarter of the time and of the bytes that an engine row for each takes (decision 0011).

Only *regular* tokens are in blocks, ``k1-<16 digits: issue time, us>-<24 hexadecimal digits>``. A caller's own have a
row each (``kivi.mvcc.tokens``), and so have those that were fenced.

A block holds up to ``BLOCK_TOKENS_MAX`` tokens, sorted by the time they were issued, from ``SPAN_US_MAX`` at most. Its
key says between which times that was, the newest first, and the least commit timestamp (``spaces.token_block_key``).
So a search for a token that was issued at t looks at the blocks whose newest token is of t to t + SPAN_US_MAX,
and into those whose oldest is not after t: seldom more than one or two. It is two rows, one small, that is looked at,
and one with the data, which is looked into::

    offset  size     field
    0       4        n: how many tokens
    4       1        a: bytes of a commit timestamp, 0, 1, 2, 4 or 8
    5       2        d: how many different digests
    7       n * 12   what is behind the times, as bytes: what a token is found by
    ..      n * 4    the times, microseconds after the oldest
    ..      n * a    the commit timestamps, from the least on
    ..      n * 2    if d > 1: of each the place of its digest
    ..      d * 16   the digests

All integers are little endian.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from kivi.encoding.keyspaces import split_token_block_key, token_block_key, token_data_key
from kivi.errors import DataLoss

__all__ = [
    "BLOCK_TOKENS_MAX",
    "SPAN_US_MAX",
    "Saved",
    "are_regular",
    "block_times",
    "decode_block",
    "encode_blocks",
    "find_in_block",
    "issued_us",
]

BLOCK_TOKENS_MAX: Final = 2_048
SPAN_US_MAX: Final = 1_000_000

_CHARACTERS: Final = 44
_REGULAR: Final = re.compile(r"(?:k1-[0-9]{16}-[0-9a-f]{24})+")
_HEAD: Final = struct.Struct("<IBH")
_RANDOM: Final = 12
_TENS: Final = np.array([10**i for i in reversed(range(16))], np.uint64)
_SPAN: Final = np.uint64(SPAN_US_MAX)
_DIGEST: Final = 16
_WIDTHS: Final = (0, 1, 2, 4, 8)


class Saved(NamedTuple):
    """A token, the timestamp of its commit, and the digest of what that did."""

    token: str
    cts: int
    digest: bytes


def are_regular(tokens: Sequence[str]) -> bool:
    """Whether all of them are, and there is one."""
    return set(map(len, tokens)) == {_CHARACTERS} and _REGULAR.fullmatch("".join(tokens)) is not None


def issued_us(token: str) -> int:
    """The time at which a regular token was issued, in microseconds since 1970 UTC."""
    return int(token[3:19])


def encode_blocks(
    tokens: Sequence[str], stamps: Sequence[int], digests: Sequence[bytes]
) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) of each row: of regular tokens, their commits' timestamps, and 16 bytes of digest each."""
    if not tokens:
        return
    text = np.frombuffer("".join(tokens).encode(), np.uint8).reshape(len(tokens), _CHARACTERS)
    times = (text[:, 3:19] - ord("0")).astype(np.uint64) @ _TENS
    order = np.argsort(times, kind="stable")
    times = times[order]
    random = np.frombuffer(bytes.fromhex(text[order, 20:].tobytes().decode()), np.uint8).reshape(-1, _RANDOM)
    commits = np.array(stamps, np.uint64)[order]
    places = {digest: i for i, digest in enumerate(dict.fromkeys(digests))}
    words = np.frombuffer(b"".join(places), f"V{_DIGEST}")
    digested = np.zeros(len(tokens), np.int64)
    if len(places) > 1:
        digested = np.array([places[digest] for digest in digests])[order]
    at = 0
    while at < len(tokens):
        end = min(at + BLOCK_TOKENS_MAX, int(np.searchsorted(times, times[at] + _SPAN, "right")))
        part = slice(at, end)
        key, value = _encoded(times[part], random[part], commits[part], digested[part], words)
        yield key, b""
        yield token_data_key(key), value
        at = end


def _encoded(times: Any, random: Any, commits: Any, digested: Any, words: Any) -> tuple[bytes, bytes]:
    first, oldest = commits.min(), times[0]
    width = next(width for width in _WIDTHS if commits.max() - first < 256**width)
    kinds, places = np.unique(digested, return_inverse=True)
    parts = [
        _HEAD.pack(len(times), width, len(kinds)),
        random.tobytes(),
        (times - oldest).astype("<u4").tobytes(),
        (commits - first).astype(f"<u{width}").tobytes() if width else b"",
        places.astype("<u2").tobytes() if len(kinds) > 1 else b"",
        words[kinds].tobytes(),
    ]
    return token_block_key(int(times[-1]), int(oldest), int(first)), b"".join(parts)


def block_times(key: bytes) -> tuple[int, int, int]:
    """Of either row's key: when its newest and its oldest token were issued, and the least CTS. Raises DataLoss."""
    try:
        return split_token_block_key(key)
    except struct.error:
        raise _damaged(key, b"") from None


class _Block:
    """The places of a value's fields."""

    def __init__(self, key: bytes, value: bytes) -> None:
        self.newest, self.oldest, self.first = block_times(key)
        try:
            self.count, self.width, self.digests = _HEAD.unpack_from(value)
        except struct.error:
            raise _damaged(key, value) from None
        self.random = _HEAD.size
        self.times = self.random + _RANDOM * self.count
        self.stamps = self.times + 4 * self.count
        self.places = self.stamps + self.width * self.count
        self.words = self.places + (2 * self.count if self.digests > 1 else 0)
        whole = self.words + _DIGEST * self.digests == len(value)
        if not whole or not 0 < self.count <= BLOCK_TOKENS_MAX or not self.digests or self.width not in _WIDTHS:
            raise _damaged(key, value)
        self.key, self.value = key, value

    def cts(self, i: int) -> int:
        at = self.stamps + self.width * i
        return self.first + int.from_bytes(self.value[at : at + self.width], "little")

    def time_us(self, i: int) -> int:
        at = self.times + 4 * i
        return self.oldest + int.from_bytes(self.value[at : at + 4], "little")

    def digest(self, i: int) -> bytes:
        place = int.from_bytes(self.value[self.places + 2 * i :][:2], "little") if self.digests > 1 else 0
        if place >= self.digests:
            raise _damaged(self.key, self.value)
        at = self.words + _DIGEST * place
        return self.value[at : at + _DIGEST]


def find_in_block(key: bytes, value: bytes, tokens: Iterable[str]) -> dict[str, tuple[int, bytes]]:
    """(commit timestamp, digest) of those that are there, of regular tokens. By either row's key. Raises DataLoss."""
    block = _Block(key, value)
    found: dict[str, tuple[int, bytes]] = {}
    for token in tokens:
        issued, random = issued_us(token), bytes.fromhex(token[20:])
        at = value.find(random, block.random, block.times)
        while at >= 0:
            i, beside = divmod(at - block.random, _RANDOM)
            if not beside and block.time_us(i) == issued:
                found[token] = block.cts(i), block.digest(i)
                break
            at = value.find(random, at + 1, block.times)
    return found


def decode_block(key: bytes, value: bytes) -> list[Saved]:
    """All that is in it, in order. Raises DataLoss."""
    block = _Block(key, value)
    found: list[Saved] = []
    random: Any = value[block.random : block.times].hex()
    for i in range(block.count):
        token = f"k1-{block.time_us(i):016d}-{random[2 * _RANDOM * i :][: 2 * _RANDOM]}"
        found.append(Saved(token, block.cts(i), block.digest(i)))
        if i and block.time_us(i) < block.time_us(i - 1):
            raise _damaged(key, value)
    if issued_us(found[-1].token) != block.newest or issued_us(found[0].token) != block.oldest:
        raise _damaged(key, value)
    return found


def _damaged(key: bytes, value: bytes) -> DataLoss:
    return DataLoss(
        f"the tokens at key 0x{key.hex()} ({len(value)} bytes) are damaged, or of another version of kivi: "
        "restore a backup"
    )
