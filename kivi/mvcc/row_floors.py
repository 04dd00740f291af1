"""Floors of aggregates with ``retention``: from which slot on their rows are there, for each snapshot.

A floor (CTS, time) is a record of the commit log (``kivi.store.retention``). Rows of slots before the time are
invisible to every snapshot at or past the CTS; no delta for them enters after it. Here are those floors that base
includes, in one row of META for each table; newer ones are in the log and in ``Retention``'s memory.

``erased``: the floor below which rows were erased from base, or are being erased. It is recorded in the batch that
erases the first of them, so nobody who needs these rows is answered without them. ``unfinished`` goes in the batch that
erases the last of them: so a restart in between is known, and what is left is erased then.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import meta_key
from kivi.engine import Engine, WriteBatch

__all__ = ["Floor", "RowFloors"]

_FLOORS: Final = "floors/"
"""META rows: {"floors": [[cts, time]], "erased": [cts, time], "unfinished": bool}, by id of the aggregate (JSON)."""


class Floor(NamedTuple):
    """Rows of slots before ``time_us`` are invisible to snapshots at or past ``cts``."""

    cts: int
    time_us: int


class _Table(NamedTuple):
    floors: tuple[Floor, ...] = ()  # ascending in both
    erased: Floor | None = None
    unfinished: bool = False


_NONE: Final = _Table()


class RowFloors:
    """Reading is thread safe. Writing is for one at a time: with the consolidator's mutex."""

    def __init__(self, engine: Engine) -> None:
        prefix = meta_key(_FLOORS)
        self._of = {int(key[len(prefix) :]): _decoded(value) for key, value in engine.scan(prefix, prefix_end(prefix))}

    def seen_at(self, table: int, upto: int) -> int | None:
        """The floor's time that a snapshot at ``upto`` sees; None if it sees none."""
        return max((floor.time_us for floor in self._of.get(table, _NONE).floors if floor.cts <= upto), default=None)

    def stamps(self, table: int, upto: int) -> list[int]:
        """The CTS of the floors at or below ``upto``."""
        return [floor.cts for floor in self._of.get(table, _NONE).floors if floor.cts <= upto]

    def reached(self, table: int, upto: int, time_us: int) -> Floor | None:
        """The latest floor at or below ``time_us`` that every snapshot from ``upto`` on sees."""
        found = [floor for floor in self._of.get(table, _NONE).floors if floor.cts <= upto and floor.time_us <= time_us]
        return found[-1] if found else None

    def erased(self, table: int) -> Floor | None:
        """The floor below which rows are erased: of a snapshot below its CTS some may be missing."""
        return self._of.get(table, _NONE).erased

    def unfinished(self, table: int) -> Floor | None:
        """The floor below which not all rows are erased, though some may be."""
        known = self._of.get(table, _NONE)
        return known.erased if known.unfinished else None

    def tables(self) -> list[int]:
        return list(self._of)

    def add(self, batch: WriteBatch, table: int, floor: Floor) -> None:
        """Adds a floor. Idempotent; one that an earlier one covers changes nothing."""
        old = self._of.get(table, _NONE)
        covered = any(at <= floor.cts and time_us >= floor.time_us for at, time_us in old.floors)
        if not covered and (old.erased is None or floor.cts >= old.erased.cts):
            self._set(batch, table, old._replace(floors=tuple(sorted((*old.floors, floor)))))

    def begin_erasing(self, batch: WriteBatch, table: int, floor: Floor) -> None:
        """Rows below ``floor`` may be missing from here on; what came before it is not asked for any more."""
        kept = tuple(one for one in self._of.get(table, _NONE).floors if one.cts >= floor.cts)
        self._set(batch, table, _Table(kept, floor, True))

    def end_erasing(self, batch: WriteBatch, table: int) -> None:
        """All rows below the floor are erased with this batch."""
        self._set(batch, table, self._of[table]._replace(unfinished=False))

    def forget(self, batch: WriteBatch, table: int) -> None:
        """The table was dropped."""
        if self._of.pop(table, None) is not None:
            batch.delete(meta_key(f"{_FLOORS}{table}"))

    def _set(self, batch: WriteBatch, table: int, new: _Table) -> None:
        self._of[table] = new
        batch.put(meta_key(f"{_FLOORS}{table}"), json.dumps(new._asdict(), separators=(",", ":")).encode())


def _decoded(data: bytes) -> _Table:
    known = json.loads(data)
    floors, erased = tuple(Floor(*floor) for floor in known["floors"]), known["erased"] and Floor(*known["erased"])
    return _Table(floors, erased, known.get("unfinished", False))
