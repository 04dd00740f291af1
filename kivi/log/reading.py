"""Reading durable records back from segment files, verified by the chain, wherever one begins.

A reader opens files by path for itself and shares nothing with the writers, so truncation may remove a file
under it: an open file stays readable, and one that is gone is reported as `DataLoss`, never as the end of the
log.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from kivi.errors import DataLoss
from kivi.log import Record
from kivi.log.files import Files
from kivi.log.records import End, walk
from kivi.log.recovery import Segment

__all__ = ["Piece", "pieces", "read_pieces"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of records of one segment, with the numbers ``first`` to ``last``, at ``offset`` to ``end``.

    The checksum before them is at ``chain_offset`` in the file, or is the segment's own ``chain`` if that is
    None.
    """

    path: str
    first: int
    last: int
    offset: int
    end: int
    chain: int
    chain_offset: int | None


def pieces(segments: list[Segment], after: int, upto: int) -> list[Piece]:
    """The runs of the records that have a number in (after, upto]. Call it under the log's lock."""
    found = []
    for segment in segments:
        base, numbers = segment.header.first, segment.numbers
        low, high = max(after + 1, base), min(upto, segment.last)
        if low > high:
            continue
        i, j = bisect_right(numbers, low - base) - 1, bisect_right(numbers, high - base)
        end, last = (segment.offsets[j], base + numbers[j] - 1) if j < len(numbers) else (segment.end, segment.last)
        before = segment.offsets[i - 1] if i else None
        first = base + numbers[i]
        found.append(Piece(segment.path, first, last, segment.offsets[i], end, segment.header.chain, before))
    return found


def read_pieces(files: Files, found: list[Piece]) -> Iterator[Record]:
    """The records of the runs, in order. Raises `DataLoss` naming file and offset at the first bad one."""
    for piece in found:
        try:
            fd = files.open(piece.path, os.O_RDONLY)
        except FileNotFoundError:
            message = f"{piece.path}: record {piece.first} was truncated away while it was to be read"
            raise DataLoss(message, path=piece.path, offset=piece.offset) from None
        try:
            chain = piece.chain
            if piece.chain_offset is not None:
                chain = int.from_bytes(files.pread(fd, 4, piece.chain_offset), "little")
            start = End(piece.offset, piece.first - 1, 0, chain, None)
            for item in walk(files, fd, piece.end, start):
                if not isinstance(item, End):
                    yield item.record()
                elif item.sequence != piece.last:
                    why = item.damage or "there are zeros"
                    raise DataLoss(
                        f"{piece.path}, offset {item.offset}: {why} where record {item.sequence + 1} was; "
                        "stop, and restore the data directory from a checkpoint",
                        path=piece.path,
                        offset=item.offset,
                    )
        finally:
            files.close(fd)
