"""Secondary views as they are declared: the rows of a row table under another key.

A view's key columns are columns of its source: any value columns, and columns of the source's own key. Where no two
rows can have the same of them (the source's whole key is among them, or the view is ``unique``), a row of the source
is one row of the view. A row with a null in one of these columns is not in the view, as it would match no comparison
in SQL either; so rows of a unique view that are null there never collide.

The view carries the source's other key columns always, so that its rows name theirs, and of the other columns those
that it was declared with. Delta columns stay delta columns: their deltas flow to the view. They cannot be part of its
key, since every delta would then move the row.
"""

from __future__ import annotations

from collections.abc import Sequence

from kivi.errors import SchemaError
from kivi.model.names import check_name, column_names
from kivi.model.schema import Column, TableSchema

__all__ = ["view_schema"]


def view_schema(
    name: str, source: TableSchema, key: Sequence[str], columns: Sequence[str] | None = None, unique: bool = False
) -> TableSchema:
    """The schema of a view of the row table ``source``. ``columns`` None: all that the source has now.

    Raises SchemaError.
    """
    what = f"view {name!r}"
    if source.kind != "row":
        raise SchemaError(f"{what}: its source {source.name!r} is a {source.kind} table, not a row table")
    key = column_names(what, "key", key)
    if not key:
        raise SchemaError(f"{what} needs at least one key column")
    for column in map(source.column, key):
        if column.operator is not None:
            raise SchemaError(
                f"{what}: {column.name!r} is {column.describe()}, and every delta would move the row: a view's key is "
                "made of value columns and of the source's key"
            )
    rest = [column for column in source.key if column.name not in key]
    if rest and not unique:
        names = ", ".join(repr(column.name) for column in rest)
        raise SchemaError(
            f"{what}: two rows of {source.name!r} may have the same {', '.join(key)}: add {names} to its key, or "
            "declare it unique=True"
        )
    shown = {column.name: column for column in source.shown_columns}
    wanted = shown.keys() if columns is None else column_names(what, "columns", columns)
    for column_name in wanted:
        if column_name not in shown:
            source.column(column_name)
            raise SchemaError(f"{what}: {column_name!r} is a key column of {source.name!r}, which a view always has")
    carried = [column for column in shown.values() if column.name in wanted and column.name not in key]
    return TableSchema(
        name=check_name(name, "view"),
        kind="view",
        key=tuple(Column(each, source.column(each).type) for each in key),
        columns=(*rest, *carried),
        history_us=source.history_us,
        source=source.name,
        source_id=source.id,
        unique=unique,
    )
