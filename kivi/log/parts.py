"""Frames that come in parts, until the last of each has come.

Which parts have come, and where, is a function of the log's prefix; their bytes are kept for as long as they are not
too many, and read again otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from kivi.errors import DataLoss
from kivi.log.frames import FrameId, FramePart

__all__ = ["PARTS_BYTES", "Parts"]

PARTS_BYTES: Final = 256 << 20


@dataclass(slots=True)
class _Incomplete:
    of: int
    at: dict[int, int] = field(default_factory=dict)
    data: dict[int, bytes | memoryview] = field(default_factory=dict)


class Parts:
    """Not thread safe; ``saved`` is what ``encode`` gave."""

    def __init__(self, saved: list[Any] | None = None) -> None:
        self._of = {
            FrameId(*id_): _Incomplete(of, {int(place): at for place, at in where.items()})
            for id_, of, where in saved or []
        }
        self._nbytes = 0

    def note(self, part: FramePart, sequence: int, *, keep: bool = False) -> None:
        """A part has come. The first message that brings it is the one that counts."""
        held = self._of.setdefault(part.id, _Incomplete(part.of))
        if held.of != part.of or not 0 <= part.place < part.of:
            raise DataLoss(f"message {sequence} is part {part.place} of {part.of} of a frame of {held.of} parts")
        held.at.setdefault(part.place, sequence)
        if keep and part.place not in held.data and self._nbytes + len(part.data) <= PARTS_BYTES:
            held.data[part.place] = part.data
            self._nbytes += len(part.data)

    def joined(self, id_: FrameId, read: Callable[[int], FramePart]) -> bytes | None:
        """The encoded frame, once all of it is there. ``read`` gives the part that a message holds."""
        held = self._of[id_]
        if len(held.at) < held.of:
            return None
        return b"".join(held.data.get(place) or read(held.at[place]).data for place in range(held.of))

    def sequences(self, id_: FrameId) -> tuple[int, ...]:
        """Of the messages that hold a frame that is complete, in order of the parts."""
        held = self._of[id_]
        return tuple(held.at[place] for place in range(held.of))

    def forget(self, is_over: Callable[[FrameId], bool]) -> list[FrameId]:
        """Lets go of those that have come, or never will: which."""
        gone = [id_ for id_ in self._of if is_over(id_)]
        for id_ in gone:
            self._nbytes -= sum(map(len, self._of.pop(id_).data.values()))
        return gone

    def first(self) -> int | None:
        """The first message that has a part of what is not complete."""
        return min((at for held in self._of.values() for at in held.at.values()), default=None)

    def encode(self) -> list[Any]:
        """For ``saved``."""
        return [(list(id_), held.of, held.at) for id_, held in self._of.items()]
