"""The tables of a question in SQL: what a process that answers it is told of them, and may read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kivi_server import limits
from kivi_server.auth import Access, Grant
from kivi_server.sql.workers import Question
from kivi_server.translate import Translator

from kivi.model.event_files import encode_files
from kivi.sql import resolve
from kivi.store.facade import Lease, SharedEvents
from kivi.wire.codec import to_table
from kivi.wire.v1 import types_pb2

__all__ = ["SqlTables"]


class SqlTables:
    """At one snapshot, those that ``access`` may read, as it is when each is asked for."""

    def __init__(self, translator: Translator, access: Callable[[], Grant], lease: Lease, shared: SharedEvents) -> None:
        self._translator, self._store = translator, translator.store
        self._access, self._lease, self._shared = access, lease, shared

    def question(self, text: str, parameters: bytes) -> Question:
        """``parameters``: an Arrow IPC stream, or nothing."""
        return Question(text, parameters, self._table, self._tables, self._files, self._scan)

    def _tables(self) -> list[str]:
        access = self._access()
        return [table.name for table in self._store.tables() if access.sees(table)]

    def _table(self, name: str) -> bytes | None:
        """What a name in a question means; None: there is no such table."""
        known = resolve(name, self._tables())
        self._access().require(Access.READ, "reading", known or name)
        return None if known is None else to_table(self._translator.schema(known, 0, self._lease)).SerializeToString()

    def _files(self, name: str) -> bytes:
        self._access().require(Access.READ, "reading", name)
        if self._lease.tenant is not None:  # files have the rows of all: each scan gives the tenant's
            return encode_files(())
        return encode_files(self._shared.of(self._translator.schema(name, 0, self._lease)).files)

    def _scan(self, spec: bytes) -> Iterator[Any]:
        asked = types_pb2.ScanSpec.FromString(spec)
        self._access().require(Access.READ, "reading", asked.table)
        schema = self._translator.schema(asked.table, asked.table_id, self._lease)
        wanted, table = self._translator.scan(schema, asked, reads=True), self._shared.get(schema.name)
        batches = self._store.scan(self._lease, schema, wanted) if table is None else table.scan(wanted)
        return (data for data, _ in self._translator.pages(batches, limits.PAGE_ROWS_MAX))
