"""What connections hold between their sockets and the application: parts of requests, and answers that nobody takes.

**Invariant.** All of it together is at most ``HELD_BYTES_MAX``, but for what one more connection has just brought.
Where it would be more, connections are given up: of those that hold at least half of the mean, whoever has held
something for the longest. So ten thousand clients that stop in the middle do not take the memory, and a client that
holds little, or for a moment, is not the one that pays for them.
"""

from __future__ import annotations

from typing import Final, Protocol

__all__ = ["HELD_BYTES_MAX", "Held", "Holder"]

HELD_BYTES_MAX: Final = 256 << 20
_LEFT: Final = 0.75
"""Of the limit, when all of them were looked at: that is for many bytes, not for each."""


class Holder(Protocol):
    def holds(self) -> int:
        """Bytes, as of now."""

    def give_up(self) -> None:
        """From then on it holds nothing."""


class Held:
    """Of one listener; its event loop's."""

    def __init__(self, bytes_max: int = HELD_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._by: dict[Holder, int] = {}  # in the order in which they came to hold something
        self.nbytes = 0
        self.given_up = 0

    def look(self, holder: Holder) -> None:
        """Whatever has changed what it holds has happened."""
        self._note(holder, holder.holds())
        if self.nbytes > self._bytes_max:
            self._make_room()

    def forget(self, holder: Holder) -> None:
        self._note(holder, 0)

    def _note(self, holder: Holder, nbytes: int) -> None:
        self.nbytes += nbytes - self._by.get(holder, 0)
        if nbytes:
            self._by[holder] = nbytes
        else:
            self._by.pop(holder, None)

    def _make_room(self) -> None:
        for holder in list(self._by):  # what was taken or read since then nobody has told
            self._note(holder, holder.holds())
        while self.nbytes > self._bytes_max * _LEFT:
            much = self.nbytes / len(self._by) / 2
            for holder in [holder for holder, nbytes in self._by.items() if nbytes >= much]:
                if self.nbytes <= self._bytes_max * _LEFT:
                    break
                self.forget(holder)
                self.given_up += 1
                holder.give_up()
