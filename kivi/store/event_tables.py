"""The events of each event table, opened when they are first asked for."""

from __future__ import annotations

import os
import shutil
import threading

from kivi.encoding.keyspaces import event_meta_key
from kivi.engine import Engine
from kivi.events.cold_tier import ColdObject, ColdTier
from kivi.events.manifest import cold_objects
from kivi.events.places import Directory, file_name
from kivi.events.store import EventStore
from kivi.store.catalog import Catalog

__all__ = ["EventTables"]


class EventTables:
    """Thread safe. ``root``: the store's directory; None: its settled files are in the engine."""

    def __init__(self, engine: Engine, catalog: Catalog, block_rows: int, root: str | None, cold: ColdTier) -> None:
        self._cold = cold
        self._engine, self._catalog, self._block_rows = engine, catalog, block_rows
        self._root = root
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
                    place = None if self._root is None else Directory(self._root, table)
                    found = EventStore(self._engine, schema, block_rows=self._block_rows, place=place, cold=self._cold)
                    self._open[table] = found
        return found

    def in_use(self, table: int) -> bool:
        """Whether somebody still reads the events of a table, which may have been dropped."""
        found = self._open.get(table)
        return found is not None and found.open_views > 0

    def objects_in_use(self) -> set[ColdObject]:
        """The objects that a manifest names, of whatever table, or that a view may still need."""
        waiting = {one for events in list(self._open.values()) for one in events.waiting_objects()}
        return waiting | set(cold_objects(self._engine))

    def forget(self, table: int) -> None:
        """The table was dropped and its events are deleted."""
        self._open.pop(table, None)
        self._cold.has_garbage = True
        if self._root is not None:
            shutil.rmtree(os.path.dirname(os.path.join(self._root, file_name(table, 0))), ignore_errors=True)

    def forget_unknown(self) -> None:
        """Deletes the settled files of tables that the engine knows nothing of: what a crash left."""
        folder = os.path.dirname(os.path.dirname(os.path.join(self._root or "", file_name(0, 0))))
        if self._root is not None and os.path.isdir(folder):
            for name in os.listdir(folder):
                if name.isdigit() and self._engine.get(event_meta_key(int(name))) is None:
                    shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
