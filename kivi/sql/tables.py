"""What a statement may read, before it runs: the tables that it names, and functions that read no file.

DuckDB is told which files it may open (``allowed_paths``), to read and to write. A text could name one of these by
itself, past the conditions of its table; and what selects may copy into a file on the way (``with x as (copy ...)``).
So every part of a statement is one that reads (``_READING``), the only functions that stand for tables are
``_TABLE_FUNCTIONS``, of which none reads a file or runs a text, and a name that is no table's is refused if it could be
a file's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kivi.errors import InvalidArgument, NotFound
from kivi.model.event_files import EventFiles

__all__ = [
    "check_no_file",
    "check_reads",
    "is_of_snapshot",
    "lists_tables",
    "nodes",
    "quoted_name",
    "quoted_text",
    "table_names",
    "view_of",
]

_TABLE_FUNCTIONS: Final = frozenset(
    [
        *("range", "generate_series", "unnest", "repeat", "repeat_row", "json_each", "json_tree"),
        *("duckdb_columns", "duckdb_functions", "duckdb_keywords", "duckdb_settings", "duckdb_tables", "duckdb_types"),
        *("icu_calendar_names", "pg_timezone_names"),
    ]
)
_READING: Final = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
"""Of the parts that a statement is made of those that change nothing: others insert, update, delete or copy."""
_SCHEMAS: Final = frozenset({"", "main", "temp", "memory", "system", "information_schema", "pg_catalog"})
_OWN: Final = frozenset({("", ""), ("", "main"), ("", "memory"), ("memory", "main")})
"""As ``information_schema`` has it: the catalog is ``memory``, and its schema ``main``."""
_CATALOGS: Final = frozenset({"information_schema", "pg_catalog"})
_LISTS: Final = frozenset({"duckdb_columns", "duckdb_tables"})
_IN_A_PATH: Final = re.compile(r"[/\\.:*?\[]")


def table_names(tree: Any) -> Iterator[tuple[str, str, str]]:
    """Of a statement as DuckDB serializes it: catalog, schema and name of what is read, wherever it stands."""
    for node in nodes(tree):
        if node.get("type") == "BASE_TABLE":
            yield node.get("catalog_name") or "", node.get("schema_name") or "", node["table_name"]


def check_reads(tree: Any) -> None:
    """Raises InvalidArgument for a statement with a part that does not read, or with a function in the place of a
    table, other than some that read no file."""
    if tree.get("error"):
        raise InvalidArgument(f"this is no statement that reads: {tree.get('error_message')}")
    for node in nodes(tree):
        kind = str(node.get("type"))
        if (kind.endswith("_NODE") and kind not in _READING) or "info_type" in node:
            raise InvalidArgument("only a statement that reads is answered: this one changes something on the way")
        if kind == "TABLE_FUNCTION":
            name = str(node["function"].get("function_name", "")).lower()
            if name not in _TABLE_FUNCTIONS:
                raise InvalidArgument(f"{name}() may not be asked for rows: select from tables of the snapshot")


def lists_tables(tree: Any) -> bool:
    """Whether the statement asks which tables or columns there are."""
    return any(
        node.get("show_type") == "SHOW_SPECIAL"
        or (node.get("type") == "BASE_TABLE" and node.get("schema_name") in _CATALOGS)
        or (node.get("type") == "TABLE_FUNCTION" and node["function"].get("function_name") in _LISTS)
        for node in nodes(tree)
    )


def is_of_snapshot(catalog: str, schema: str) -> bool:
    """Whether what stands before a name, if anything, is where the tables of the snapshot are."""
    return (catalog.lower(), schema.lower()) in _OWN


def check_no_file(catalog: str, schema: str, name: str) -> None:
    """Raises NotFound for a name, of no table, that DuckDB could take for a file's."""
    if catalog not in _SCHEMAS or schema not in _SCHEMAS or _IN_A_PATH.search(name):
        full = ".".join(filter(None, (catalog, schema, name)))
        raise NotFound(f"there is no table {full!r}", table=full)


def nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """The parts of a statement."""
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            yield node
            left += node.values()
        elif isinstance(node, list):
            left += node


def view_of(name: str, rest: str, columns: Sequence[str], files: Sequence[EventFiles], stamped: str) -> str:
    """A statement that makes a view of ``rest`` and the rows of files. ``stamped``: the column that shows the CTS.

    Columns that files do not have yet are null, of the type that they have in ``rest``.
    """
    parts = [f"select {', '.join(map(quoted_name, columns))} from {quoted_name(rest)}"]
    for each in files:
        shown = {column: quoted_name(column) for column in each.columns}
        shown = {stamped: f"{quoted_name(each.stamps)} as {quoted_name(stamped)}"} | shown
        conditions = []
        if each.upto is not None:
            conditions.append(f"{quoted_name(each.stamps)} <= {each.upto}")
        if each.floor_us is not None:
            conditions.append(f"{quoted_name(each.event_time)} >= make_timestamptz({each.floor_us})")
        paths = ", ".join(map(quoted_text, each.paths))
        where = f" where {' and '.join(conditions)}" if conditions else ""
        parts.append(
            f"select {', '.join(shown.get(column, 'null') for column in columns)} "
            f"from read_parquet([{paths}], hive_partitioning = false){where}"
        )
    return f"create view {quoted_name(name)} as {' union all '.join(parts)}"


def quoted_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def quoted_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
