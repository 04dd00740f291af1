"""Sweeping: what was kept for open snapshots and is needed no more goes, a bounded step at a time.

A *version* is garbage when no open S lies between it and the next newer state, and no table's history reaches it. It
is none while that newer state lies above F, below which alone the leases say what is open: F may go back below what has
been folded (another node comes back, and is behind), and lies below what base may have while a log is judged again. A
*tombstone* goes once the recorded position that includes it is durable and no open S is below it, together with every
version of its key: a dead version must not be found by a reader after the row is created again. Old tokens and moments
go with them.

The *history floor* of a table is the oldest S it still answers. It is raised before anything below it is deleted, and
is in the batch that deletes: after a restart too, what is gone must not be answered.

Versions that are kept for open snapshots have a budget; beyond it the oldest snapshots end. Those that a history keeps
are garbage one by one, all the time: they are looked through when a part of that history is over, and between, whatever
else is swept passes over them. They may be most of what there is: when each step looked at them, 148,000 versions were
read while 2,500 subscriptions were stored, which was two thirds of what consolidation computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
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
_PARTS: Final = 16
"""A table's versions are looked through so many times in the course of its history; so much longer some stay."""
_FLOOR: Final = "history/"
"""META rows: the oldest S that a table with history still answers (u64 little endian), by table id."""

_Cursor = tuple[bytes, tuple[int, bytes] | None, int]
"""The first version to look at, whose table and row the one before it is of, and that one's CTS."""
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
    now_us: Callable[[], int]
    log: CommitLog
    write: Callable[[WriteBatch], None]

    def __post_init__(self) -> None:
        self._version_cursor: _Cursor | None = None
        self._tombstone_cursor: bytes | None = None
        self._versions_dirty = True
        """Something may be garbage that was kept for a snapshot; when a store is opened, anything."""
        self._due_us: dict[int, int] = {}
        """When the versions that a table's history keeps are looked through again."""
        self._passed_over: set[int] = set()
        self._held_back: set[int] = set()
        """Tables whose history would reach less far if an open snapshot did not need it."""
        self._version_bytes = self._load_version_bytes()
        self.history_floors = _load_floors(self.engine)
        self._floors_saved = dict(self.history_floors)

    def step(self, durable_position: int, *, trim: bool) -> None:
        """One bounded step: tombstones, versions; with ``trim`` also old tokens and moments."""
        self._sweep_tombstones(durable_position)
        if self.leases.released_below_horizon:
            self.leases.released_below_horizon = False
            self._versions_dirty = True
            self._due_us.update(dict.fromkeys(self._held_back, 0))
            self._held_back.clear()
        now_us = self.now_us()
        if self._versions_dirty or self._version_cursor or min(self._due_us.values(), default=now_us + 1) <= now_us:
            self._sweep_versions(now_us)
        if trim:
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
        if schema.history_us is None:
            self._versions_dirty |= nbytes > 0
        elif nbytes:
            self._kept_by_history(schema, self.now_us())

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
            moment = self.now_us() - schema.history_us
            try:
                reached = self.timeline.at(moment)
            except SnapshotTooOld:  # nothing that old is known: everything is kept
                reached = 0
            oldest = self.leases.oldest()
            if oldest is not None and oldest < reached:
                self._held_back.add(schema.id)
                reached = oldest
            floor = max(floor, reached)
            self.history_floors[schema.id] = floor
        return floor

    def history_floor_of(self, schema: TableSchema) -> int | None:
        """The oldest S that the table answers to a snapshot that was not open all along; None: it keeps no history."""
        if schema.history_us is None:
            return None
        return max(self.history_floors.get(schema.id, 0), schema.created_ts)

    def _kept_by_history(self, schema: TableSchema, now_us: int) -> None:
        assert schema.history_us is not None
        self._due_us.setdefault(schema.id, now_us + schema.history_us // _PARTS)

    def _versions(self, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        """From there on, without those of tables that are passed over."""
        end = prefix_end(space_prefix(Space.VERSION))
        at: bytes | None = start
        while at is not None:
            begin, at = at, None
            for key, value in self.engine.scan(begin, end):
                table, _, _ = split_version_key(key)
                if table in self._passed_over:
                    at = prefix_end(table_prefix(Space.VERSION, table))
                    break
                yield key, value

    def _sweep_versions(self, now_us: int) -> None:
        if self._version_cursor is None:  # what becomes garbage from here on may have been passed already
            self._versions_dirty = False
            self._passed_over = {table for table, due_us in self._due_us.items() if due_us > now_us}
            self._due_us = {table: self._due_us[table] for table in self._passed_over}
        with_floor: dict[int, int | None] = {}
        upto, boundaries = self.leases.boundaries()
        batch, gone = WriteBatch(), list[_Gone]()
        began = self._version_cursor
        cursor, newer_of, newer = began or (space_prefix(Space.VERSION), None, 0)
        self._version_cursor = None
        for seen, (key, value) in enumerate(self._versions(cursor)):
            if seen >= _ROWS:
                self._version_cursor = key, newer_of, newer
                break
            table, row, cts = split_version_key(key)
            if newer_of != (table, row):
                newer_of = (table, row)
                raw = self.engine.get(row_key(table, row))
                newer = RowLayout.stamp_of(raw) if raw is not None else upto
            schema = self.schema_of(table)
            if table not in with_floor:
                with_floor[table] = (
                    self.raise_history_floor(schema) if schema is not None and schema.history_us is not None else None
                )
            floor = with_floor[table]
            open_between = newer > upto or bisect_left(boundaries, newer) > bisect_left(boundaries, cts)
            self._versions_dirty |= newer > upto
            kept_by_history = floor is not None and newer > floor
            if schema is None or not (open_between or kept_by_history):
                batch.delete(key)
                gone.append((schema, table, len(key) + len(value)))
            elif floor is not None:
                self._kept_by_history(schema, now_us)
            newer = cts
        try:
            self.write_swept(batch, gone)
        except BaseException:  # base did not take it: all of this is to be done again
            self._version_cursor, self._versions_dirty = began, True
            raise


def _load_floors(engine: Engine) -> dict[int, int]:
    prefix = meta_key(_FLOOR)
    return {
        int(key[len(prefix) :]): int.from_bytes(value, "little")
        for key, value in engine.scan(prefix, prefix_end(prefix))
    }
