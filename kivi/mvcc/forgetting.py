"""Forgetting: rows of aggregates that lie below a retention floor are erased from base, a bounded step at a time.

Nobody needs them once base includes every commit up to the floor's CTS (no later one has a delta for them), no snapshot
from before it is open, and the table's history does not reach below it. That these rows are hidden does not depend on
it: they may stay for as long as they like.

Keys begin with the group, so rows of old slots lie all over the table. A *walk* goes from group to group by seeks
(``kivi.mvcc.slot_walk``), through the versions and then through the rows. It costs a seek for each group, so it
begins only when there is something to gain: when a tenth of the retention is to be erased. And it stays as much behind
the newest floor, so that readers of changes have time to learn which rows a floor took away. So a table is at most a
fifth larger than what it shows.

The rows of a group that go are neighbours, so they go as one range, however many they are. When a walk ends, the engine
is asked to give back what they took (decision 0038).

How far a walk has come is not remembered, but that it has not ended is: after a restart it begins again at the first
group and finds what is left, though no floor may ever move again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, table_prefix
from kivi.engine import Engine, WriteBatch
from kivi.model.schema import TableSchema
from kivi.mvcc.leases import Leases
from kivi.mvcc.row_floors import Floor, RowFloors
from kivi.mvcc.slot_walk import Spans, keys_between, keys_of
from kivi.mvcc.sweep import Sweeper

__all__ = ["ERASED_BEHIND", "Forgetting"]

_ROWS: Final = 1_024
_SEEKS: Final = 256
ERASED_BEHIND: Final = 10
"""A walk is due for this part of the retention, and stays as much behind."""
_SPACES: Final = (Space.VERSION, Space.ROW)


@dataclass(slots=True)
class _Walk:
    floor: Floor
    space: int
    at: bytes
    begun: bool = False


class Forgetting:
    """Called with the consolidator's mutex held."""

    def __init__(self, engine: Engine, leases: Leases, floors: RowFloors, sweeper: Sweeper) -> None:
        self._engine, self._leases, self._floors, self._sweeper = engine, leases, floors, sweeper
        self._walks: dict[int, _Walk] = {}
        self.erased = 0  # keys and ranges

    def step(self, schema: TableSchema, position: int, *, slack: bool = True) -> bool:
        """One bounded step in an aggregate with ``retention``. Base includes all up to ``position``.

        Whether there is more to do. Without ``slack`` it erases up to the newest floor that nobody needs rows from
        below.
        """
        walk = self._walks.get(schema.id)
        if walk is None:
            floor = self._floors.unfinished(schema.id) or self._due(schema, position, slack)
            if floor is None:
                return False
            walk = self._walks[schema.id] = _Walk(floor, 0, table_prefix(_SPACES[0], schema.id))
        self._advance(schema, walk)
        return schema.id in self._walks

    def _due(self, schema: TableSchema, position: int, slack: bool) -> Floor | None:
        newest = self._floors.seen_at(schema.id, 2**63)
        if newest is None or schema.retention_us is None:
            return None
        part = schema.retention_us // ERASED_BEHIND if slack else 0
        limit, oldest = position, self._leases.oldest()
        if oldest is not None:
            limit = min(limit, oldest)
        erased = self._floors.erased(schema.id)
        floor = self._floors.reached(schema.id, limit, newest - part)
        if floor is None or (erased is not None and floor.time_us - erased.time_us < max(1, part)):
            return None
        if schema.history_us is not None and self._sweeper.raise_history_floor(schema) < floor.cts:
            return None  # its history reaches below the floor
        return floor

    def _advance(self, schema: TableSchema, walk: _Walk) -> None:
        space, spans = _SPACES[walk.space], Spans()
        end = prefix_end(table_prefix(space, schema.id))
        found, at = keys_between(
            self._engine, schema, space, walk.at, end,
            lists=keys_of, low_us=None, floor_us=walk.floor.time_us, rows=_ROWS, seeks=_SEEKS,
            spans=None if space is Space.VERSION else spans,  # whose bytes are counted
        )  # fmt: skip
        batch = WriteBatch()
        if not walk.begun:
            self._floors.begin_erasing(batch, schema.id, walk.floor)
        for name in found:
            batch.delete(name)
        for span in spans:
            batch.delete_range(*span)
        prefix = table_prefix(space, schema.id)
        batch.owe(prefix, prefix_end(prefix))
        if at is None and space is _SPACES[-1]:
            self._floors.end_erasing(batch, schema.id)
        versions = []
        if space is Space.VERSION:
            stored = zip(found, self._engine.get_many(found), strict=True)
            versions = [(schema, schema.id, len(name) + len(data or b"")) for name, data in stored]
        self._sweeper.write_swept(batch, versions)
        walk.begun = True
        if space is Space.ROW:
            self.erased += len(found) + len(spans)
        if at is not None:
            walk.at = at
        elif walk.space + 1 < len(_SPACES):
            walk.space += 1
            walk.at = table_prefix(_SPACES[walk.space], schema.id)
        else:
            del self._walks[schema.id]
            for space in _SPACES:
                prefix = table_prefix(space, schema.id)
                self._engine.give_back(prefix, prefix_end(prefix))

    def tables(self) -> list[int]:
        """The tables of which floors are kept."""
        return self._floors.tables()

    def forget(self, batch: WriteBatch, table: int) -> None:
        """The table was dropped and is erased whole."""
        self._walks.pop(table, None)
        self._floors.forget(batch, table)
