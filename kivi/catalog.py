"""The catalog: which tables there are. It is kept in rows of the store itself, in three system tables.

    1 tables     (id)    -> name, definition (JSON)     the definitions; a drop deletes the row
    2 names      (name)  -> id                          two creators of one name conflict here
    3 counters   (name)  -> value                       the last table id; ids are never reused (generations)

A commit that names a table implies a guard on its definition cell, so it conflicts with a concurrent drop. Creating an
aggregate touches only the aggregate's own row: writers of the source are not disturbed; those that enter the log after
it must have derived with it (``version`` is compared under the entry lock).

Two views: *entered* (what the next commit must be derived with) changes when a catalog commit enters the log;
*visible* (what readers see) when it has been applied. A definition's ``created_ts`` is the CTS of its newest catalog
commit: a snapshot below it does not see the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from kivi.delta.ops import Barrier, RowOp
from kivi.errors import NotFound
from kivi.keys import decode_key, encode_key
from kivi.mvcc.verdict import Guard
from kivi.schema import Column, TableSchema
from kivi.types import ColumnType

__all__ = ["COUNTERS", "NAMES", "SYSTEM", "TABLES", "Catalog", "View", "schema_guard"]

_INT: Final = ColumnType("int64")
_TEXT: Final = ColumnType("string")
TABLES: Final = TableSchema(
    "kivi.tables", "row", (Column("id", _INT),), (Column("name", _TEXT), Column("definition", _TEXT)), id=1
)
NAMES: Final = TableSchema("kivi.names", "row", (Column("name", _TEXT),), (Column("id", _INT),), id=2)
COUNTERS: Final = TableSchema("kivi.counters", "row", (Column("name", _TEXT),), (Column("value", _INT),), id=3)
SYSTEM: Final = {schema.id: schema for schema in (TABLES, NAMES, COUNTERS)}
FIRST_ID: Final = 16
_DEFINITION: Final = 1


def table_key(table_id: int) -> bytes:
    return encode_key((_INT,), (table_id,))


def schema_guard(table_id: int) -> Guard:
    """The guard that every commit naming the table implies."""
    return Guard(TABLES.id, table_key(table_id), _DEFINITION)


@dataclass(frozen=True, slots=True)
class View:
    """One immutable state of the catalog."""

    version: int = 0
    by_id: dict[int, TableSchema] = field(default_factory=dict)
    by_name: dict[str, TableSchema] = field(default_factory=dict)
    aggregates: dict[int, tuple[TableSchema, ...]] = field(default_factory=dict)

    def table(self, name: str) -> TableSchema:
        try:
            return self.by_name[name]
        except (KeyError, TypeError):
            known = ", ".join(sorted(self.by_name)) or "none yet"
            raise NotFound(f"there is no table {name!r}; tables are: {known}", table=str(name)) from None

    def with_rows(self, rows: Iterable[tuple[int, RowOp]], cts: int) -> View:
        """After operations on the tables table: (table id, operation)."""
        by_id = dict(self.by_id)
        for table_id, op in rows:
            if op.barrier is Barrier.DELETE:
                by_id.pop(table_id, None)
            elif _DEFINITION in op.puts:
                by_id[table_id] = replace(TableSchema.from_json(op.puts[_DEFINITION].encode()), created_ts=cts)
        sources: dict[int, tuple[TableSchema, ...]] = {}
        for schema in by_id.values():
            if schema.kind == "aggregate":
                sources[schema.source_id] = (*sources.get(schema.source_id, ()), schema)
        return View(self.version + 1, by_id, {schema.name: schema for schema in by_id.values()}, sources)


class Catalog:
    """Both views. ``enter`` is called under the entry lock, ``apply`` before the watermark passes the commit."""

    def __init__(self) -> None:
        self.entered = View()
        self.visible = View()

    def enter(self, rows: list[tuple[int, RowOp]], cts: int) -> None:
        self.entered = self.entered.with_rows(rows, cts)

    def apply(self, rows: list[tuple[int, RowOp]], cts: int) -> None:
        self.visible = self.visible.with_rows(rows, cts)

    def load(self, rows: list[tuple[int, RowOp]], cts: int) -> None:
        """One definition found in base at open, or in a replayed record."""
        self.enter(rows, cts)
        self.apply(rows, cts)

    def is_visible(self, table_id: int) -> bool:
        """Whether readers still see the table: its rows are erased only after this has become False."""
        return table_id in SYSTEM or table_id in self.visible.by_id

    def schema_of(self, table_id: int) -> TableSchema | None:
        """System tables included. The entered view, since what is in flight must be foldable as soon as it is applied;
        and the visible one, since a table whose drop is not durable yet is still there: its rows must be kept."""
        return SYSTEM.get(table_id) or self.entered.by_id.get(table_id) or self.visible.by_id.get(table_id)


def changes(rows: Iterable[tuple[int, bytes, RowOp]]) -> list[tuple[int, RowOp]]:
    """The operations of a commit on the tables table, as (table id, operation)."""
    return [(decode_key((_INT,), key)[0], op) for table, key, op in rows if table == TABLES.id]
