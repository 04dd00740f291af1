"""Sweeping: what was kept for open snapshots and is needed no more goes, a bounded step at a time.

A *version* is garbage when no open S lies between it and the next newer state, and no table's history reaches it. A
*tombstone* goes once the recorded position that includes it is durable and no open S is below it, together with every
version of its key: a dead version must not be found by a reader after the row is created again. Old tokens and moments
go with them.

The *history floor* of a table is the oldest S it still answers. It is raised before anything below it is deleted, and
is in the batch that deletes: after a restart too, what is gone must not be answered.

Versions that are kept for open snapshots have a budget; beyond it the oldest snapshots end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Final

from kivi.encoding.base_rows import RowLayout
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import (
    Space,
    meta_key,
    row_key,
    space_prefix,
    split_tombstone_key,
    split_version_key,
    table_prefix,
    version_prefix,
)
from kivi.engine import Engine, WriteBatch
from kivi.errors import SnapshotTooOld
from kivi.log import CommitLog
from kivi.model.schema import TableSchema
from kivi.mvcc.leases import Leases
from kivi.mvcc.timeline import Timeline
from kivi.mvcc.tokens import Tokens
from kivi.runtime.settings import Settings

__all__ = ["Sweeper"]

_ROWS: Final = 512
_FLOOR: Final = "history/"
"""META rows: the oldest S that a table with history still answers (u64 little endian), by table id."""

_Gone = tuple[TableSchema | None, int, int]  # of a version: its table, that one's id, and its bytes


@dataclass(eq=False)
class Sweeper:
    """Consolidation's, and called with its mutex held. ``write`` writes a batch to base."""

    engine: Engine
    leases: Leases
    tokens: Tokens
    timeline: Timeline
    settings: Settings
    _: KW_ONLY
    schema_of: Callable[[int], TableSchema | None]
    schemas: Callable[[], list[TableSchema]]
    clock: Callable[[], float]
    log: CommitLog
    write: Callable[[WriteBatch], None]

    def __post_init__(self) -> None:
        self._version_cursor: bytes | None = None
        self._tombstone_cursor: bytes | None = None
        self._versions_dirty = True
        self._version_bytes = self._load_version_bytes()
        self.history_floors = _load_floors(self.engine)
        self._floors_saved = dict(self.history_floors)

    def step(self, durable_position: int, *, trim: bool) -> None:
        """One bounded step: tombstones, versions; with ``trim`` also old tokens and moments."""
        self._sweep_tombstones(durable_position)
        if self.leases.released_below_horizon:
            self.leases.released_below_horizon = False
            self._versions_dirty = True
        if self._versions_dirty:
            self._sweep_versions()
        if trim:
            now_us = int(self.clock() * 1_000_000)
            for trimmed in (
                # Not before the log has come as far: whoever brings such a token is refused by what it says, also when
                # the clock was ahead and is set right.
                self.tokens.trim(min(now_us, self.log.last_time_us), _ROWS),
                self.timeline.trim(now_us - self._longest_history_us(), _ROWS),
            ):
                if trimmed is not None:
                    self.write(trimmed)
        if self.versions_bytes > self.settings.version_budget_bytes:
            self.leases.cut_oldest("the versions kept for it cost more than version_budget_bytes")

    def kept(self, schema: TableSchema, nbytes: int) -> None:
        """Versions of so many bytes were written, or none."""
        self._count_version(schema, schema.id, nbytes)
        self._versions_dirty |= nbytes > 0

    # The budget of versions. What a table with history keeps is its own choice, which cutting a snapshot would not
    # change, so only the versions of other tables count: exactly, from what lies in base when the store is opened.

    @property
    def versions_bytes(self) -> int:
        """Bytes of the versions that are kept for open snapshots."""
        return sum(tuple(self._version_bytes.values()))

    def _count_version(self, schema: TableSchema | None, table: int, nbytes: int) -> None:
        if schema is None or schema.history_us is None:
            self._version_bytes[table] = self._version_bytes.get(table, 0) + nbytes

    def _load_version_bytes(self) -> dict[int, int]:
        out = {}
        for schema in self.schemas():
            if schema.kind != "event" and schema.history_us is None:
                prefix = table_prefix(Space.VERSION, schema.id)
                out[schema.id] = sum(len(k) + len(v) for k, v in self.engine.scan(prefix, prefix_end(prefix)))
        return out

    def forget_versions(self, table: int) -> None:
        """Every version of a dropped table is deleted. Called with the mutex held."""
        self._version_bytes.pop(table, None)

    # -- one step ---------------------------------------------------------------------------------

    def _longest_history_us(self) -> int:
        return max([24 * 3_600_000_000, *(s.history_us for s in self.schemas() if s.history_us is not None)])

    def _sweep_tombstones(self, durable_position: int) -> None:
        oldest = self.leases.oldest()
        limit = min(durable_position, oldest if oldest is not None else durable_position)
        prefix = space_prefix(Space.TOMBSTONE)
        batch, gone = WriteBatch(), list[_Gone]()
        resume: bytes | None = None
        for seen, (key, _) in enumerate(self.engine.scan(self._tombstone_cursor or prefix, prefix_end(prefix))):
            cts, table, row = split_tombstone_key(key)
            schema = self.schema_of(table)
            if cts > limit:
                break
            if seen >= _ROWS:
                resume = key
                break
            if schema is not None and schema.history_us is not None and cts > self.raise_history_floor(schema):
                continue
            raw = self.engine.get(row_key(table, row))
            if raw is not None and RowLayout.stamp_of(raw) == cts:
                batch.delete(row_key(table, row))
                versions = version_prefix(table, row)
                for version, data in self.engine.scan(versions, prefix_end(versions)):
                    batch.delete(version)
                    gone.append((schema, table, len(version) + len(data)))
            batch.delete(key)
        self.write_swept(batch, gone)
        self._tombstone_cursor = resume

    def write_swept(self, batch: WriteBatch, gone: Iterable[_Gone]) -> None:
        """Deletes, in one batch with the floors that say so: after a restart too, what is gone must not be answered."""
        floors = dict(self.history_floors) if len(batch) else self._floors_saved
        for table, floor in floors.items():
            if self._floors_saved.get(table) != floor:
                batch.put(meta_key(f"{_FLOOR}{table}"), floor.to_bytes(8, "little"))
        self.write(batch)
        self._floors_saved = floors  # not before: base may refuse them, and a later batch must bring them then
        for schema, table, nbytes in gone:
            self._count_version(schema, table, -nbytes)

    def raise_history_floor(self, schema: TableSchema) -> int:
        """The oldest S that a table with history answers; raised before anything below it is deleted."""
        floor = self.history_floors.get(schema.id, 0)
        if schema.history_us is not None:
            moment = int(self.clock() * 1_000_000) - schema.history_us
            try:
                reached = self.timeline.at(moment)
            except SnapshotTooOld:  # nothing that old is known: everything is kept
                reached = 0
            oldest = self.leases.oldest()
            floor = max(floor, min(reached, oldest if oldest is not None else reached))
            self.history_floors[schema.id] = floor
        return floor

    def history_floor_of(self, schema: TableSchema) -> int | None:
        """The oldest S that the table answers to a snapshot that was not open all along; None: it keeps no history."""
        if schema.history_us is None:
            return None
        return max(self.history_floors.get(schema.id, 0), schema.created_ts)

    def _sweep_versions(self) -> None:
        space = space_prefix(Space.VERSION)
        end = prefix_end(space)
        with_floor: dict[int, int | None] = {}
        _, boundaries = self.leases.boundaries()
        batch, gone = WriteBatch(), list[_Gone]()
        newer_of: tuple[int, bytes] | None = None
        newer = 0
        cursor = self._version_cursor or space
        resume: bytes | None = None
        for seen, (key, value) in enumerate(self.engine.scan(cursor, end)):
            table, row, cts = split_version_key(key)
            if newer_of != (table, row):
                if seen >= _ROWS:
                    resume = version_prefix(table, row)
                    break
                newer_of = (table, row)
                raw = self.engine.get(row_key(table, row))
                newer = RowLayout.stamp_of(raw) if raw is not None else 2**63
            schema = self.schema_of(table)
            if table not in with_floor:
                with_floor[table] = (
                    self.raise_history_floor(schema) if schema is not None and schema.history_us is not None else None
                )
            floor = with_floor[table]
            open_between = bisect_left(boundaries, newer) > bisect_left(boundaries, cts)
            kept_by_history = floor is not None and newer > floor
            if schema is None or not (open_between or kept_by_history):
                batch.delete(key)
                gone.append((schema, table, len(key) + len(value)))
            newer = cts
        self.write_swept(batch, gone)
        self._version_cursor = resume
        if resume is None and not len(batch):
            self._versions_dirty = any(floor is not None for floor in with_floor.values())


def _load_floors(engine: Engine) -> dict[int, int]:
    prefix = meta_key(_FLOOR)
    return {
        int(key[len(prefix) :]): int.from_bytes(value, "little")
        for key, value in engine.scan(prefix, prefix_end(prefix))
    }
