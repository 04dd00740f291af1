"""Cooling: settled files of old events move to the cold tier, one at a time.

::

    upload    without a lock: the bytes, whose checksums are right, become an object, which is read back and compared
    swap      under the caller's lock: one engine batch has the manifest row say where the file is now
    delete    the file here, once the last view that may read it has closed, and after a flush, since a crash may bring
              back the row of before

So at any moment, and after a crash at any moment, the row of a file names bytes that are there. What a crash leaves is
an object that no row names, which a sweep deletes, or a file here that no row needs, which is deleted when the table is
opened. Retractions and late events bring files back: what is made of them is another file, here, until it moves again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from kivi.engine import WriteBatch
from kivi.errors import DataLoss
from kivi.events.blocks import Meta
from kivi.events.settled_files import SettledFile
from kivi.events.settling import Lock, Parts

__all__ = ["Cooling"]


class Owner(Protocol):
    """The event table, as far as this uses it."""

    @property
    def parts(self) -> Parts: ...

    def enter(self) -> int: ...

    def leave(self, ticket: int) -> None: ...

    def retire(self, meta: Meta, data: list[int], files: list[SettledFile], batch: WriteBatch) -> None: ...


class Cooling:
    """One step at a time."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._damaged: set[int] = set()

    def waiting(self, before_us: int) -> list[SettledFile]:
        """The files to move, the oldest first: those here whose events are all of before ``before_us``."""
        files = self._owner.parts[1].read()[2]
        due = [
            one for one in files if one.cold is None and one.time_max < before_us and one.number not in self._damaged
        ]
        return sorted(due, key=lambda file: file.time_max)

    def step(self, lock: Lock, url: str, before_us: int) -> bool:
        """Moves one file to the object store at ``url``; False: there was none to move.

        Raises Unavailable and DiskFull, if the object store cannot take it now; DataLoss for a file that is damaged,
        which stays where it is and is passed over from then on. Whatever it raises, the file is still here.
        """
        ticket = self._owner.enter()  # what is uploaded stays until the swap
        try:
            if not (due := self.waiting(before_us)):
                return False
            base, manifest, settled = self._owner.parts
            assert settled.cold is not None, "a table with a cold tier is opened with it"
            number = due[0].number
            try:
                data = settled.whole(due[0])
            except DataLoss:
                self._damaged.add(number)
                raise
            with settled.cold.uploaded(url, base.schema.id, number, data) as where, lock:
                meta, _, files = manifest.read()
                now = next((file for file in files if file.number == number and file.cold is None), None)
                if now is None:  # it became another meanwhile, or was dropped
                    settled.cold.has_garbage = True
                else:
                    batch = WriteBatch()
                    manifest.put(batch, replace(now, cold=where))
                    meta.manifest += 1
                    self._owner.retire(meta, [], [now], batch)
            return True
        finally:
            self._owner.leave(ticket)
