"""Hierarchies, once for all databases: a row table and a view of it, as ``kivi.model.hierarchies`` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kivi.api.arguments import ViewArguments
from kivi.model.declarations import row_table_schema
from kivi.model.hierarchies import hierarchy_view, new_hierarchy, view_name
from kivi.model.names import check_name
from kivi.model.schema import TableSchema

__all__ = ["HierarchyArguments"]

_HISTORY: Final = "1h"
"""For so long it can be asked whom an event reached by the hierarchy as it was then."""


@dataclass(slots=True)
class HierarchyArguments:
    """Of ``create_hierarchy``. A table that is there has the last word."""

    name: str
    parent: str = "parent"

    def __post_init__(self) -> None:
        self.name = check_name(self.name, "hierarchy")
        self.parent = check_name(self.parent, "column")
        check_name(view_name(self.name, self.parent), "view")  # before the table is made

    @property
    def table(self) -> TableSchema:
        """The one to make where there is none of that name."""
        return row_table_schema(self.name, *new_hierarchy(self.parent), history=_HISTORY)

    def view(self, table: TableSchema) -> ViewArguments:
        """The view to make. Raises SchemaError for a table that is no hierarchy."""
        name, key = hierarchy_view(table, self.parent)
        return ViewArguments(name, table.name, key, columns=())
