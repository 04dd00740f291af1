"""States of measures in a statement: ``quantile(latency, 0.99)`` over an aggregate, which DuckDB knows nothing of.

To DuckDB a state is its bytes: it would compare them, and take a quantile of them. A table gives what a function makes
of a state as a column, under the text of the call, as everywhere in kivi. So a call becomes that column before DuckDB
binds the statement, and each ``*`` leaves it out again; whatever else would look into the bytes is refused.

Whether a name stands for a state is found as DuckDB finds what it stands for: among the tables of its SELECT, then of
those around it, through subqueries, common table expressions and aliases. What is not certain counts as a state, and
is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn, Protocol

import pyarrow as pa

from kivi.errors import InvalidArgument
from kivi.sql.tables import is_of_snapshot

__all__ = ["StateTable", "write_columns"]

_FUNCTIONS: Final = ("quantile", "fraction_below")
_OF_ROWS: Final = frozenset({"count", "count_star"})
"""Functions that look at no value."""
_WORDS: Final = {"CAST": "a cast", "COMPARISON": "a comparison", "BETWEEN": "a comparison", "COLLATE": "a collation"}

Node = dict[str, Any]
"""A part of a statement, as DuckDB serializes it."""


class StateTable(Protocol):
    """A table of the snapshot."""

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def states(self) -> Mapping[str, str]:
        """Its columns that are states of measures, and what to name in their place."""
        ...

    def compute(self, columns: Sequence[str]) -> None:
        """Adds columns, each the text of a function of a state. Raises SchemaError."""
        ...


def write_columns(tree: Node, tables: Mapping[str, StateTable]) -> bool:
    """Puts columns in the place of calls, and lets the tables compute these; whether there are any.

    ``tables``: by their names, in small letters. Raises InvalidArgument for what looks into a state, and SchemaError.
    """
    if not any(table.states for table in tables.values()):
        return False
    reader = _Reader(tables)
    for statement in tree["statements"]:
        reader.query(statement["node"], None, {})
    return reader.compute()


@dataclass(frozen=True, slots=True)
class _State:
    """``table``: which computes functions of it; None where it has come out of a subquery."""

    column: str
    advice: str
    table: StateTable | None

    def refuse(self, what: str, instead: str = "") -> NoReturn:
        instead = instead or f"{self.advice}; snap.rollup combines the states of rows"
        raise InvalidArgument(f"{self.column!r} is the state of a measure, of which {what} knows nothing: {instead}")


_Columns = list[tuple[str, _State | None]]


@dataclass(slots=True)
class _Relation:
    """Something in a FROM. ``is_known``: whether it has no other columns. ``joined``: those that ``*`` has already."""

    name: str
    columns: dict[str, _State | None]
    table: StateTable | None = None
    is_known: bool = True
    joined: frozenset[str] = frozenset()

    @property
    def state(self) -> _State | None:
        return next(filter(None, self.columns.values()), None)


@dataclass(slots=True)
class _Scope:
    """What names stand for, in a SELECT. ``prefers_aliases``: to columns of its tables."""

    around: _Scope | None
    queries: Mapping[str, _Columns]
    """The common table expressions."""
    relations: list[_Relation] = field(default_factory=list)
    aliases: dict[str, _State | None] = field(default_factory=dict)
    prefers_aliases: bool = False

    @property
    def state(self) -> _State | None:
        return next(filter(None, (each.state for each in self.relations)), None)

    def find(self, path: Sequence[str]) -> _State | None:
        """The state that a name stands for, after those of its table, schema and catalog; None: it is none."""
        *qualifiers, name = (part.lower() for part in path)
        if self.prefers_aliases and not qualifiers and name in self.aliases:
            return self.aliases[name]
        relations = [each for each in self.relations if not qualifiers or each.name == qualifiers[-1]]
        found = [each.columns[name] for each in relations if name in each.columns]
        states = [state for state in found if state is not None]
        if states and len(states) < len(found):
            states[0].refuse("another table", f"both have {name!r}, so write of which it is, like table.{name}")
        if found:
            return states[0] if states else None
        if not qualifiers and name in self.aliases:
            return self.aliases[name]
        for each in self.relations:
            if not qualifiers and each.name == name and each.state is not None:
                raise InvalidArgument(
                    f"{name!r} stands for whole rows, and {each.state.column!r} in them is the state of a measure: "
                    "name the columns that are wanted"
                )
        is_certain = all(each.is_known for each in relations)
        if self.around is None or (qualifiers and not is_certain):
            return None
        outer = self.around.find(path)
        return outer if outer is None or is_certain else replace(outer, table=None)


class _Reader:
    """Reads a statement from the inside out, and notes which columns its tables have to compute."""

    def __init__(self, tables: Mapping[str, StateTable]) -> None:
        self._tables = tables
        self._calls = list[tuple[StateTable, str]]()
        self._stars = list[tuple[Node, list[_Relation]]]()

    def compute(self) -> bool:
        for table in self._tables.values():
            if calls := [call for of, call in self._calls if of is table]:
                table.compute(list(dict.fromkeys(calls)))
        for star, relations in self._stars:
            extra = (call for each in relations for of, call in self._calls if of is each.table)
            star["exclude_list"] = list(dict.fromkeys([*(star.get("exclude_list") or ()), *extra]))
        return bool(self._calls)

    # -- queries ----------------------------------------------------------------------------------

    def query(
        self, node: Node, around: _Scope | None, queries: Mapping[str, _Columns], aliases: Sequence[str] = ()
    ) -> _Columns:
        """The columns of its answer. ``aliases``: what they are called instead, from the first one on."""
        queries = dict(queries)
        for each in (node.get("cte_map") or {}).get("map", ()):
            named = each["value"]
            queries[each["key"].lower()] = self.query(named["query_node"], around, queries, named.get("aliases") or ())
        scope = _Scope(around, queries)
        match node["type"]:
            case "SELECT_NODE":
                columns = self._select(node, scope)
            case "SET_OPERATION_NODE":
                columns = _united([self.query(each, around, queries) for each in node["children"]])
            case "RECURSIVE_CTE_NODE":
                columns = self.query(node["left"], around, queries, aliases)
                for _ in range(2):  # what the second part adds is what it reads
                    queries[node["cte_name"].lower()] = columns
                    columns = _united([columns, self.query(node["right"], around, queries, aliases)])
            case other:
                raise InvalidArgument(f"a statement with a {other} may not name a table with states of measures")
        scope.aliases |= {name.lower(): state for name, state in columns}
        self._modifiers(node, scope, columns)
        return _renamed([(name, state and replace(state, table=None)) for name, state in columns], aliases)

    def _select(self, node: Node, scope: _Scope) -> _Columns:
        self._from(node.get("from_table") or {}, scope)
        columns: _Columns = []
        for each in node["select_list"]:
            if each["class"] == "STAR":
                columns += self._star(each, scope)
                continue
            name = each.get("alias") or (each.get("column_names") or [""])[-1]
            columns.append((name, self._state(each, scope)))
            if each.get("alias"):
                scope.aliases.setdefault(name.lower(), columns[-1][1])
        for part in ("where_clause", "group_expressions", "qualify"):
            self._states(node.get(part), scope)
        self._states(node.get("having"), replace(scope, prefers_aliases=True))
        return columns

    def _modifiers(self, node: Node, scope: _Scope, columns: _Columns) -> None:
        """Orders, limits and DISTINCT ON. A name that is ordered by is first one of the answer's columns."""
        for modifier in node.get("modifiers") or ():
            self._states([part for name, part in modifier.items() if name != "orders"], scope)
            for each in (order["expression"] for order in modifier.get("orders") or ()):
                if each["class"] == "STAR":  # order by all
                    continue
                is_name = each["class"] == "COLUMN_REF"
                state = self._state(each, replace(scope, prefers_aliases=is_name))
                place = (each.get("literal") or {}).get("text", "")
                if place.isdecimal() and 0 < int(place) <= len(columns):
                    state = columns[int(place) - 1][1]
                if state is not None:
                    state.refuse("an order")

    # -- what stands in a FROM --------------------------------------------------------------------

    def _from(self, node: Node, scope: _Scope) -> None:
        columns, table, is_known = _Columns(), None, True
        match node.get("type"):
            case None | "EMPTY":
                return
            case "JOIN":
                return self._join(node, scope)
            case "BASE_TABLE":
                columns, table, is_known = self._table(node, scope)
            case "SUBQUERY":
                columns = self.query(node["subquery"]["node"], scope, scope.queries)
            case "EXPRESSION_LIST":
                rows = [[("", self._state(each, scope)) for each in row] for row in node["values"]]
                columns = [(f"col{i}", state) for i, (_, state) in enumerate(_united(rows))]
            case "SHOW_REF" if node.get("query"):
                shown = self.query(node["query"], scope, scope.queries)
                if node.get("show_type") == "SUMMARY" and (
                    states := [state for _, state in shown if state is not None]
                ):
                    states[0].refuse("summarize")
                is_known = False
            case "PIVOT":
                self._pivot(node, scope)
                is_known = False
            case _:
                self._states(node, scope)
                is_known = False
        found = dict[str, _State | None]()
        for name, state in _renamed(columns, node.get("column_name_alias") or ()):
            found[name.lower()] = found.get(name.lower()) or state  # which may be there twice
        called = str(node.get("alias") or node.get("table_name") or "").lower()
        scope.relations.append(_Relation(called, found, table, is_known))

    def _table(self, node: Node, scope: _Scope) -> tuple[_Columns, StateTable | None, bool]:
        catalog, schema, name = (node.get(part) or "" for part in ("catalog_name", "schema_name", "table_name"))
        if not (catalog or schema) and name.lower() in scope.queries:
            return scope.queries[name.lower()], None, True
        table = self._tables.get(name.lower()) if is_of_snapshot(catalog, schema) else None
        if table is None:
            return [], None, False
        states = {column: _State(column, advice, table) for column, advice in table.states.items()}
        return [(column, states.get(column)) for column in table.schema.names], table, True

    def _join(self, node: Node, scope: _Scope) -> None:
        self._from(node["left"], scope)
        right = replace(scope, relations=[*scope.relations])
        self._from(node["right"], right)
        left, scope.relations = scope.relations, right.relations
        joined = {name.lower() for name in node.get("using_columns") or ()}
        if node.get("ref_type") == "NATURAL":
            joined = {name for each in left for name in each.columns}
        for relation in scope.relations[len(left) :]:
            relation.joined |= joined & relation.columns.keys()
            for name in relation.joined:
                if (state := scope.find([name])) is not None:
                    state.refuse("a join")
        self._states(node.get("condition"), scope)

    def _pivot(self, node: Node, scope: _Scope) -> None:
        inner = _Scope(scope, scope.queries)
        self._from(node["source"], inner)
        if inner.state is not None:
            inner.state.refuse("a pivot", "it groups by all columns that it does not name, so select the others first")
        self._states({name: part for name, part in node.items() if name != "source"}, inner)

    def _star(self, node: Node, scope: _Scope) -> _Columns:
        of = str(node.get("relation_name") or "").lower()
        relations = [each for each in scope.relations if not of or each.name == of]
        states = [each.state for each in relations if each.state is not None]
        if node.get("expr") and states:
            states[0].refuse("COLUMNS()", "name the columns one by one")
        self._stars.append((node, relations))
        left_out = {str(name).lower() for name in node.get("exclude_list") or ()}
        left_out |= {each["column"].lower() for each in node.get("qualified_exclude_list") or ()}
        replaced = {each["key"].lower(): self._state(each["value"], scope) for each in node.get("replace_list") or ()}
        renamed = {each["key"]["column"].lower(): each["value"] for each in node.get("rename_list") or ()}
        return [
            (renamed.get(name, name), replaced.get(name, state))
            for each in relations
            for name, state in each.columns.items()
            if name not in left_out and (of or name not in each.joined)
        ]

    # -- expressions ------------------------------------------------------------------------------

    def _states(self, part: Any, scope: _Scope) -> list[_State]:
        """Of the expressions next below."""
        return [state for each in _expressions(part) if (state := self._state(each, scope)) is not None]

    def _state(self, node: Node, scope: _Scope) -> _State | None:
        """The state that an expression gives; None: it gives none. Raises InvalidArgument for what looks into one."""
        match node["class"]:
            case "COLUMN_REF":
                return scope.find(node["column_names"])
            case "STAR":
                return next(filter(None, (state for _, state in self._star(node, scope))), None)
            case "POSITIONAL_REFERENCE":
                return scope.state
            case "SUBQUERY":
                columns = self.query(node["subquery"]["node"], scope, scope.queries)
                found = [*filter(None, (state for _, state in columns)), *self._states(node.get("child"), scope)]
                if found and node.get("subquery_type") == "ANY":
                    found[0].refuse("a comparison")
                return found[0] if found and node.get("subquery_type") == "SCALAR" else None
            case "LAMBDA":
                own = {each["column_names"][-1].lower(): None for each in _column_refs(node["lhs"])}
                return self._state(node["expr"], _Scope(scope, scope.queries, [_Relation("", dict[str, Any](own))]))
            case "FUNCTION" | "WINDOW":
                self._function(node, replace(scope, prefers_aliases=False))
                return None
        found = self._states([part for name, part in node.items() if name != "type_expr"], scope)
        if node["type"] in ("OPERATOR_IS_NULL", "OPERATOR_IS_NOT_NULL") or not found:
            return None
        if node["class"] != "CASE" and node["type"] != "OPERATOR_COALESCE":
            found[0].refuse(_WORDS.get(node["class"], "an operator"))
        if any(each["class"] == "STAR" for each in _expressions(list(node.values()))):
            found[0].refuse("a choice of columns", "name them one by one")
        return found[0]

    def _function(self, node: Node, scope: _Scope) -> None:
        name = str(node.get("function_name", "")).lower()
        arguments = [each["expression"] for each in node.get("arguments") or ()]
        others = [part for kind, part in node.items() if kind != "arguments"]  # FILTER, ORDER BY, a window
        for other in self._states(others, scope):
            other.refuse(f"{name}()")
        of = (node.get("qualified_name") or {}).get("path", [])[:-1]  # latency.quantile(0.99)
        given = [*([scope.find(of)] if of else []), *(self._state(each, scope) for each in arguments)]
        state = next(filter(None, given), None)
        if state is None or (name in _OF_ROWS and not node.get("distinct")):
            return
        if name not in _FUNCTIONS:
            state.refuse(f"{name}()")
        number = (arguments[1].get("literal") or {}) if len(arguments) == 2 else {}
        is_column = not of and number.get("kind") in ("INTEGER", "NUMERIC") and arguments[0]["class"] == "COLUMN_REF"
        if not is_column or given[0] is None:
            state.refuse(
                f"such a {name}()",
                f"it takes the column and a number that is written there, {name}({state.column}, 0.5)",
            )
        call = f"{name}({state.column}, {number['text']})"
        if node["class"] == "WINDOW" or node.get("distinct") or any(_expressions(others)):
            raise InvalidArgument(
                f"{call} is a number of each row, and FILTER, DISTINCT, ORDER BY and OVER are for aggregates: ask for "
                f"one of these numbers, like max({call}) filter (...)"
            )
        if state.table is None:
            raise InvalidArgument(
                f"{state.column!r} comes out of a subquery here: let that select {call} under a name of its own, and "
                "take that name"
            )
        self._calls.append((state.table, call))
        path = [*arguments[0]["column_names"][:-1], call]
        kept = {part: node.get(part) for part in ("alias", "query_location", "query_location_length")}
        node.clear()
        node.update(kept, type="COLUMN_REF", column_names=path, **{"class": "COLUMN_REF"})


def _expressions(part: Any) -> Iterator[Node]:
    """Those next below a part that is none."""
    if isinstance(part, dict) and "class" in part:
        yield part
    elif isinstance(part, (dict, list)):
        for each in part.values() if isinstance(part, dict) else part:
            yield from _expressions(each)


def _column_refs(part: Node) -> Iterator[Node]:
    """The names in a list of parameters."""
    if part["class"] == "COLUMN_REF":
        yield part
    for each in _expressions(list(part.values())):
        yield from _column_refs(each)


def _united(parts: Sequence[_Columns]) -> _Columns:
    """The columns of what has rows of all of these, which are put together by their places, or by their names: states
    where one of these has one, either way."""
    by_name = {name.lower(): state for part in parts for name, state in part if name and state is not None}
    longest: _Columns = max(parts, key=len) if parts else []
    places = [
        (name, next(filter(None, (part[i][1] for part in parts if i < len(part))), by_name.pop(name.lower(), None)))
        for i, (name, _) in enumerate(longest)
    ]
    return [*places, *by_name.items()]


def _renamed(columns: _Columns, aliases: Sequence[str]) -> _Columns:
    return [(aliases[i] if i < len(aliases) else name, state) for i, (name, state) in enumerate(columns)]
