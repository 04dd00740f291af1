"""Functions of states in a statement: ``quantile(latency, 0.99)`` over an aggregate, which DuckDB knows nothing of.

To DuckDB the state of a measure is its bytes. A table gives what a function makes of a state as a column, under the
text of the call, as everywhere in kivi; so the call is written as that column before DuckDB binds the statement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kivi.errors import InvalidArgument
from kivi.sql.tables import nodes, quoted_name

__all__ = ["with_columns"]

_FUNCTIONS: Final = ("quantile", "fraction_below")
_OF_ROWS: Final = frozenset({"count", "count_star"})
"""Functions that look at no value."""


def with_columns(text: str, tree: Any, states: Mapping[str, str]) -> tuple[str, list[str]]:
    """The statement with columns in place of the calls, and which columns these are.

    ``states``: the names of columns that are states, and what to name in their place. Raises InvalidArgument for any
    other function of such a column.
    """
    spelled = {name.lower(): name for name in states}
    for alias in _aliases(tree):
        spelled.pop(alias.lower(), None)  # whatever has this name in the statement, it may be no state
    raw, found = text.encode(), dict[tuple[int, int], tuple[str, str]]()
    for node in nodes(tree) if spelled else ():
        if node.get("class") != "FUNCTION":
            continue
        arguments = [argument.get("expression") or {} for argument in node.get("arguments", ())]
        path = (arguments[0].get("column_names") or [""]) if arguments else [""]
        column = spelled.get(path[-1].lower())
        function = str(node.get("function_name", "")).lower()
        if column is None or function in _OF_ROWS:
            continue
        number = (arguments[1].get("literal") or {}).get("text") if len(arguments) == 2 else None
        if function not in _FUNCTIONS or number is None:
            raise InvalidArgument(
                f"{column!r} is the state of a measure, of which {function}() knows nothing: {states[column]}; "
                "snap.rollup combines the states of rows"
            )
        call = f"{function}({column}, {number})"
        at = int(node["query_location"])
        found[at, at + int(node["query_location_length"])] = call, ".".join(map(quoted_name, (*path[:-1], call)))
    for (at, end), (_, written) in sorted(found.items(), reverse=True):
        raw = raw[:at] + written.encode() + raw[end:]
    return raw.decode(), [call for call, _ in found.values()]


def _aliases(tree: Any) -> Iterator[str]:
    for node in nodes(tree):
        yield str(node.get("alias") or "")
        yield from (str(name) for name in node.get("column_name_alias") or () if isinstance(name, str))
        yield from (str(name) for name in node.get("aliases") or () if isinstance(name, str))
