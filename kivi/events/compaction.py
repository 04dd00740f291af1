"""Compaction: which blocks to merge next. Pure; ``EventStore.compact`` does it.

Neighbours become one block, so that commit order stays; eight of a size at a time, so that an event is rewritten about
once per factor of eight that its table grows by.
"""

from __future__ import annotations

import math
from typing import Final

from kivi.events.blocks import Block

__all__ = ["mergeable", "unchanging"]

_FAN_IN: Final = 8


def mergeable(blocks: list[Block], max_rows: int, max_bytes: int) -> list[Block]:
    """Neighbours to merge now, oldest first; empty if there is nothing to do.

    A block of more than half of a limit is *full* and stays. Between full blocks lie segments. The last one still
    grows: eight neighbours of its largest tier are merged (with smaller ones that lie between them), of the next tier
    behind those, and so on, the last of these first. The others grow no more, so what is left there becomes as few
    blocks as will hold it.
    """
    segments: list[list[Block]] = [[]]
    for block in blocks:
        if _is_full(block, max_rows, max_bytes):
            segments.append([])
        else:
            segments[-1].append(block)
    for segment in segments[:-1]:
        if len(segment) > 1:
            return _fitting(segment, max_rows, max_bytes)
    chosen: list[Block] = []
    tail = segments[-1]
    while tail:
        tiers = [int(math.log(max(block.rows, 1), _FAN_IN) + 1e-9) for block in tail]
        last = max(i for i, tier in enumerate(tiers) if tier == max(tiers))
        if last + 1 >= _FAN_IN:
            chosen = tail[: last + 1]  # a later one is of a smaller tier, and goes first
        tail = tail[last + 1 :]
    return _fitting(chosen, max_rows, max_bytes)


def unchanging(blocks: list[Block], max_rows: int, max_bytes: int) -> Block | None:
    """The block from which to look the next time, once there was nothing to merge: what is before it stays as it is.

    That is the last full one. None: there is none.
    """
    return next((block for block in reversed(blocks) if _is_full(block, max_rows, max_bytes)), None)


def _is_full(block: Block, max_rows: int, max_bytes: int) -> bool:
    return 2 * block.rows > max_rows or 2 * block.raw_bytes > max_bytes


def _fitting(blocks: list[Block], max_rows: int, max_bytes: int) -> list[Block]:
    """The first blocks, at most eight, that fit together into one."""
    rows = nbytes = 0
    for i, block in enumerate(blocks[:_FAN_IN]):
        rows += block.rows
        nbytes += block.raw_bytes
        if rows > max_rows or nbytes > max_bytes:
            return blocks[:i]
    return blocks[:_FAN_IN]
