"""Pins: snapshots that every node of a cluster keeps, for those that read one state by several nodes.

A pin is a record of the log, and its S is the record's own number: so every node that has applied it can read S, and
none has folded past S before. Each keeps it like an open snapshot until its time is over, by the log's time, or a
record ends it; another record prolongs it. Nothing that a node lacks room for cuts it: a read at a pin is never too
old (C1). Which pins there are is a function of the log's prefix, and saved with the position (``kivi.mvcc.prefix``).

Whoever knows a pin's name may read at it, prolong it and end it.
"""

from __future__ import annotations

from typing import NamedTuple

from kivi.errors import SnapshotTooOld
from kivi.mvcc.leases import Lease, Leases
from kivi.mvcc.record import Pin

__all__ = ["Held", "Pins"]


class Held(NamedTuple):
    """A pin: its number, and until when it is held, by the log's time."""

    name: bytes
    number: int
    until_us: int


class Pins:
    """Changes under the entry lock; `find` may be called without."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._held: dict[bytes, tuple[Held, Lease]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def enter(self, pin: Pin, number: int, time_us: int) -> Held | None:
        """A record at a time of the log: what is held now, None if nothing."""
        until_us = time_us + pin.ttl_us
        held = self._held.get(pin.name)
        if pin.ttl_us == 0:
            self.end(pin.name)
        elif held is not None:
            self._held[pin.name] = held[0]._replace(until_us=max(until_us, held[0].until_us)), held[1]
        elif pin.is_new:
            self.restore(Held(pin.name, number, until_us))
        return self._held[pin.name][0] if pin.name in self._held else None

    def restore(self, held: Held) -> None:
        """Before anything is folded past it."""
        self._held[held.name] = held, self._leases.pin(held.number)

    def over(self, now_us: int) -> list[bytes]:
        """The names of those whose time is over."""
        return [name for name, (held, _) in self._held.items() if held.until_us < now_us]

    def newest(self, begins: bytes) -> Held | None:
        """The one with the largest number whose name begins so."""
        found = [held for name, (held, _) in list(self._held.items()) if name.startswith(begins)]
        return max(found, key=lambda held: held.number, default=None)

    def end(self, name: bytes) -> None:
        if (found := self._held.pop(name, None)) is not None:
            self._leases.release(found[1])

    def find(self, name: bytes) -> Lease:
        """Raises SnapshotTooOld if it is not held (any more)."""
        found = self._held.get(name)
        if found is None:
            raise SnapshotTooOld("this shared snapshot has been released, or its time is over: begin again")
        return found[1]
