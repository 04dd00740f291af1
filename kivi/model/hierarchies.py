"""Hierarchies: row tables whose rows name their parents, for ``under`` and ``covers`` (``kivi.model.expressions``).

A hierarchy is a row table of one key column and a value column that holds the key of the parent, null at the top, with
a secondary view by the parent, which is called ``TABLE_by_PARENT``. There is nothing else to it: rows are written and
read as any others, the view is written in the same commits, and both are exact at every snapshot.
"""

from __future__ import annotations

from typing import Final

from kivi.errors import SchemaError
from kivi.model.schema import TableSchema

__all__ = ["hierarchy_view", "is_hierarchy", "new_hierarchy", "view_name"]

_TEXT: Final = "string"


def new_hierarchy(parent: str) -> tuple[dict[str, object], dict[str, object]]:
    """The key and the columns of the table that is made where there is none of the hierarchy's name."""
    return {"name": _TEXT}, {parent: _TEXT}


def view_name(table: str, parent: str) -> str:
    return f"{table}_by_{parent}"


def hierarchy_view(table: TableSchema, parent: str) -> tuple[str, list[str]]:
    """The name and the key of the view that makes a table a hierarchy. Raises SchemaError for one that cannot be."""
    what = f"hierarchy {table.name!r}"
    if table.kind != "row" or len(table.key) != 1:
        raise SchemaError(f"{what} is a row table with one key column, which the rows below it name as their parent")
    key, column = table.key[0], table.column(parent)
    if column is key or column.operator is not None or column.type != key.type:
        raise SchemaError(f"{what}: {parent!r} is not a value column of type {key.type}, which {key.name!r} has")
    return view_name(table.name, parent), [parent, key.name]


def is_hierarchy(view: TableSchema, table: TableSchema) -> bool:
    """Whether this view makes the table a hierarchy."""
    if view.kind != "view" or view.source_id != table.id or len(view.key) != 2 or len(table.key) != 1:
        return False
    parent, key = view.key
    return view.name == view_name(table.name, parent.name) and key.name == table.key[0].name and parent.type == key.type
