"""The blocks of each event table, opened when they are first asked for."""

from __future__ import annotations

import threading

from kivi.engine import Engine
from kivi.events.store import EventStore
from kivi.store.catalog import Catalog

__all__ = ["EventTables"]


class EventTables:
    """Thread safe."""

    def __init__(self, engine: Engine, catalog: Catalog, block_rows: int) -> None:
        self._engine, self._catalog, self._block_rows = engine, catalog, block_rows
        self._open: dict[int, EventStore] = {}
        self._mutex = threading.Lock()

    def of(self, table: int) -> EventStore | None:
        """The blocks of an event table; None if there is no such table, or it has no events."""
        found = self._open.get(table)
        schema = self._catalog.schema_of(table)
        if found is not None:
            if schema is not None and schema is not found.schema:
                found.redefine(schema)
        else:
            if schema is None or schema.kind != "event":
                return None
            with self._mutex:
                found = self._open.get(table)
                if found is None:
                    found = self._open[table] = EventStore(self._engine, schema, block_rows=self._block_rows)
        return found

    def in_use(self, table: int) -> bool:
        """Whether somebody still reads the events of a table, which may have been dropped."""
        found = self._open.get(table)
        return found is not None and found.open_views > 0

    def forget(self, table: int) -> None:
        """The table was dropped and its events are deleted."""
        self._open.pop(table, None)
