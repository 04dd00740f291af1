"""Which shards a node holds: sets of the numbers 0 to 63, each an integer with a bit for every shard in it.

The number is the same for all tables and for the life of a cluster, so that nodes can be added without moving what is
not theirs: a node holds a set of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from kivi.errors import InvalidArgument

__all__ = ["EVERY", "SHARDS", "parse_shards", "refined", "shards_in", "shown_shards"]

SHARDS: Final = 64
EVERY: Final = (1 << SHARDS) - 1
"""The set of all shards."""
_NONE: Final = "none"
_RANGE: Final = re.compile(r"([0-9]{1,2})(?:-([0-9]{1,2}))?")


def parse_shards(text: str) -> int:
    """``"0-15,40"``, or ``"none"``. Raises InvalidArgument."""
    held = 0
    if text == _NONE:
        return held
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        low, high = (0, SHARDS) if found is None else (int(found[1]), int(found[2] or found[1]))
        if not low <= high < SHARDS:
            raise InvalidArgument(
                f"{text!r} is no set of shards: these are numbers from 0 to {SHARDS - 1} and ranges, like 0-15,40"
            )
        for shard in range(low, high + 1):
            held |= 1 << shard
    return held


def shards_in(held: int) -> Iterator[int]:
    """Their numbers, ascending."""
    return (shard for shard in range(SHARDS) if held >> shard & 1)


def shown_shards(held: int) -> str:
    """The inverse of ``parse_shards``."""
    ranges: list[list[int]] = []
    for shard in shards_in(held):
        if ranges and ranges[-1][1] == shard - 1:
            ranges[-1][1] = shard
        else:
            ranges.append([shard, shard])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges) or _NONE


def refined(sets: Iterable[int]) -> tuple[int, ...]:
    """The coarsest partition of all shards of which each of the sets is a union; (EVERY,) if all of them are whole."""
    parts = [EVERY]
    for held in sets:
        parts = [piece for part in parts for piece in (part & held, part & ~held) if piece]
    return tuple(sorted(parts))
