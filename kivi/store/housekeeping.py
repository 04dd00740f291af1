"""Housekeeping: the background gives up what nobody needs any more, in bounded steps."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Final

from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, space_prefix, table_prefix
from kivi.engine import WriteBatch
from kivi.events.store import destroy
from kivi.store.host import Running

__all__ = ["Housekeeping"]


class Housekeeping:
    """Bounded steps beside consolidation: stages past their time limit, rows of dropped and overwritten tables."""

    _SPACES: Final = (Space.ROW, Space.VERSION, Space.EVENT)
    _ROWS: Final = 1_024

    def __init__(self, store: Running) -> None:
        self._store = store
        self._rounds = 0
        self._catalog_version = -1
        self._dropped: list[int] = []

    def step(self) -> None:
        store = self._store
        self._rounds += 1
        if self._rounds % 20 == 0:
            limit = int((store.clock() - store.settings.stage_ttl_s) * 1_000_000)
            with store.committer.entry_lock:
                expired = store.staging.index.expired(limit)
            if expired:
                store.staging.drop(expired)
        if self._rounds % 100 == 0:
            store.retention.step()
        self._release_replaced()
        version = store.catalog.visible.version
        if version != self._catalog_version and not self._waiting():
            self._dropped = self._orphans()
            self._catalog_version = version
        for table in self._dropped:
            if not store.event_tables.in_use(table):
                store.consolidator.with_mutex(partial(self._erase, table))
                break

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
        found: set[int] = set()
        for space in self._SPACES:
            at = space_prefix(space)
            end = prefix_end(at)
            while at is not None:
                first = next(iter(self._store.engine.scan(at, end)), None)
                if first is None:
                    break
                table = int.from_bytes(first[0][1:5], "big")
                if self._store.catalog.schema_of(table) is None:
                    found.add(table)
                if table == 2**32 - 1:
                    break
                at = table_prefix(space, table + 1)
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
        if len(batch):
            engine.write(batch)
        else:
            self._store.consolidator.sweeper.forget_versions(table)
            self._store.event_tables.forget(table)
            self._dropped.remove(table)
