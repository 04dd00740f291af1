"""Housekeeping: the background gives up what nobody needs any more, in bounded steps."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, space_prefix, table_prefix
from kivi.engine import WriteBatch
from kivi.errors import KiviError
from kivi.events.store import destroy
from kivi.model.lifetimes import retention_slot, slot_start
from kivi.model.schema import TableSchema
from kivi.mvcc.forgetting import ERASED_BEHIND
from kivi.store.host import Running

__all__ = ["Housekeeping"]

_log = logging.getLogger("kivi.store")
_FLOORS_EVERY_S: Final = 1.0
_FORGETTING_S: Final = 0.02  # of a round, for each aggregate
_STEP_PARTS: Final = 100
"""A retention floor moves in steps of a hundredth of the retention, so floors stay few."""


class Housekeeping:
    """Bounded steps beside consolidation: stages past their time limit, rows of dropped and overwritten tables."""

    _SPACES: Final = (Space.ROW, Space.VERSION, Space.EVENT)
    _ROWS: Final = 1_024

    def __init__(self, store: Running) -> None:
        self._store = store
        self._stepping = threading.Lock()
        self._rounds = 0
        self._floors_due_at = time.monotonic() + _FLOORS_EVERY_S
        self._moving: Counter[int] = Counter()
        """Floors on their way, by table."""
        self._counting = threading.Lock()
        self._catalog_version = -1
        self._dropped: list[int] = []

    def step(self) -> None:
        """One bounded step of each. Nothing while another thread takes one: the background, or a pass of anybody's."""
        if self._stepping.acquire(blocking=False):
            try:
                self._step()
            finally:
                self._stepping.release()

    def _step(self) -> None:
        store = self._store
        self._rounds += 1
        if self._rounds % 20 == 0 and not store.log.is_followed:
            limit = store.committer.now_us() - int(store.settings.stage_ttl_s * 1_000_000)
            with store.committer.entry_lock:
                expired = store.staging.index.expired(limit)
            store.staging.drop(expired)
        if time.monotonic() >= self._floors_due_at:  # rounds are long while much is appended
            self.move_floors(wait=False)  # this may be between two steps of a pass, for which the log waits in turn
            self._floors_due_at = time.monotonic() + _FLOORS_EVERY_S
        self._forget_rows()
        self._release_replaced()
        version = store.catalog.visible.version
        if version != self._catalog_version and not self._waiting():
            self._dropped = self._orphans()
            self._catalog_version = version
        for table in self._dropped:
            if not store.event_tables.in_use(table):
                with store.consolidator.mutex:
                    self._erase(table)
                break

    def move_floors(self, *, wait: bool = True) -> None:
        """Moves the retention floors that are due, and drops what lies wholly below old ones. ``wait``: until they are
        in force."""
        store = self._store
        for schema in list(store.catalog.visible.by_id.values()):
            if schema.retention_us is None or schema.state != "ready":
                continue
            if not self._moving[schema.id] and not store.log.is_followed:
                self._move_floor(schema, schema.retention_us, self._set_floor if wait else self._log_floor)
            events = store.event_tables.of(schema.id)
            if events is not None:
                oldest = store.leases.oldest()
                upto = store.consolidator.position if oldest is None else min(store.consolidator.position, oldest)
                with store.consolidator.mutex:
                    events.drop_below_floor(upto)

    def _move_floor(self, schema: TableSchema, retention_us: int, move: Callable[[TableSchema, int], object]) -> None:
        store = self._store
        of_rows = schema.kind == "aggregate"
        events = store.event_tables.of(schema.source_id if of_rows else schema.id)
        held = None if events is None else events.time_range_us()
        if held is None:
            return
        target = min(held[1], store.committer.now_us()) - retention_us
        with store.committer.entry_lock:
            floor = store.retention.newest(schema.id)
            older = of_rows and (floor is not None or store.retention.newest(schema.source_id) is not None)
        if of_rows:
            target = slot_start(retention_slot(schema), target)
        due = floor is None or target >= floor + max(1, retention_us // _STEP_PARTS)
        if due and (held[0] < target or older):  # an aggregate has rows of events that its source has forgotten
            behind = target - retention_us // ERASED_BEHIND
            if of_rows and (floor is None or floor < behind):  # what is erased stays behind the newest floor
                move(schema, slot_start(retention_slot(schema), behind))
            move(schema, target)

    def _set_floor(self, schema: TableSchema, time_us: int) -> None:
        self._store.retention.set_floor(schema, time_us)

    def _log_floor(self, schema: TableSchema, time_us: int) -> None:
        def done(error: BaseException | None, _: int) -> None:
            with self._counting:
                self._moving[schema.id] -= 1
            if error is not None:
                _log.debug("a floor of %s was not moved: %s", schema.name, error)

        with self._counting:
            self._moving[schema.id] += 1
        try:
            self._store.retention.log_floor(schema, time_us, done)
        except KiviError as error:
            done(error, 0)
            raise

    def _forget_rows(self) -> None:
        """Some bounded steps in each aggregate that has rows to erase."""
        store = self._store
        for schema in store.catalog.visible.by_id.values():
            if schema.forgets_rows:
                until = time.monotonic() + _FORGETTING_S
                goes_on = True
                while goes_on and time.monotonic() < until:
                    with store.consolidator.mutex:
                        goes_on = store.forgetting.step(schema, store.consolidator.position)

    def _release_replaced(self) -> None:
        """Releases overwritten generations that no open snapshot sees."""
        store = self._store
        old = store.catalog.visible.replaced
        unseen = [table for table, it in old.items() if not store.leases.may_read(it.schema.created_ts, it.cts)]
        if unseen:
            store.catalog.release(unseen)
            self._catalog_version = -1

    def _waiting(self) -> bool:
        """Whether something is pending for a dropped table: the next pass lets go of it."""
        return any(self._store.catalog.schema_of(table) is None for table in self._store.pending.tables())

    def _orphans(self) -> list[int]:
        """Ids of tables that have rows and no definition: one seek per table and key space."""
        schema_of = self._store.catalog.schema_of
        found = {table for table in self._store.forgetting.tables() if schema_of(table) is None}
        for space in self._SPACES:
            at: bytes | None = space_prefix(space)
            end = prefix_end(space_prefix(space))
            while at is not None and (first := next(iter(self._store.engine.scan(at, end)), None)):
                table = int.from_bytes(first[0][1:5], "big")
                if schema_of(table) is None:
                    found.add(table)
                at = prefix_end(table_prefix(space, table))
        return sorted(found)

    def _erase(self, table: int) -> None:
        """One bounded step, with the consolidator's mutex held. Rows first, so a table is done when its events are."""
        engine = self._store.engine
        batch = WriteBatch()
        for space in (Space.ROW, Space.VERSION):
            prefix = table_prefix(space, table)
            rows = itertools.islice(engine.scan(prefix, prefix_end(prefix)), self._ROWS - len(batch))
            for key, _ in rows:
                batch.delete(key)
        if not len(batch):
            batch = next(destroy(engine, table), batch)
        prefixes = [table_prefix(space, table) for space in (*self._SPACES, Space.EVENT_DATA)]
        if len(batch):
            for prefix in prefixes:
                batch.owe(prefix, prefix_end(prefix))
            engine.write(batch)
        else:
            self._store.forgetting.forget(batch, table)
            if len(batch):
                engine.write(batch)
            self._store.consolidator.sweeper.forget_versions(table)
            self._store.event_tables.forget(table)
            self._dropped.remove(table)
            for prefix in prefixes:
                engine.give_back(prefix, prefix_end(prefix))
