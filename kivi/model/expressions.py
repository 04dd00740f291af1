"""Predicates over columns: ``(kivi.col("endpoint_id") == 251) & kivi.col("slot").isin([...])``.

A predicate is built by the caller, travels as plain data and is evaluated where the rows are, on
single rows (``matches``) or on Arrow batches (``kivi.arrow.predicates``). Both follow SQL's three
values: a comparison with null is unknown, ``~unknown`` is unknown, and only *true* selects a row.

A ``Scan`` is a predicate with a range of keys, columns and a limit: what to read.

``bind`` checks a predicate against a schema and brings its literals to the column's stored form.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.changes import Changes
from kivi.model.schema import Measure
from kivi.model.types import ColumnType

__all__ = ["Expr", "Scan", "all_of", "between", "bind", "col", "matches", "names"]

_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "==": lambda a, b: bool(a == b),
    "!=": lambda a, b: bool(a != b),
    "<": lambda a, b: bool(a < b),
    "<=": lambda a, b: bool(a <= b),
    ">": lambda a, b: bool(a > b),
    ">=": lambda a, b: bool(a >= b),
}
_MAX_NODES: Final = 10_000
_MAX_DEPTH: Final = 50  # protobuf reads messages nested 100 deep, and the predicate lies within some


@dataclass(frozen=True, slots=True, eq=False)
class Expr:
    """One node. ``op``: a comparison, "isin", "is_null" (both with ``column``), "and", "or", "not" (with ``args``).

    "and" and "or" have one or more arguments: ``a & b & c`` is one node, so long chains nest no deeper than short ones.
    """

    op: str
    column: str = ""
    value: Any = None
    args: tuple[Expr, ...] = ()

    def __and__(self, other: Expr) -> Expr:
        return Expr("and", args=(*_operands(self, "and"), *_operands(other, "and")))

    def __or__(self, other: Expr) -> Expr:
        return Expr("or", args=(*_operands(self, "or"), *_operands(other, "or")))

    def __invert__(self) -> Expr:
        return Expr("not", args=(self,))

    def __bool__(self) -> bool:
        raise InvalidArgument("combine predicates with & | ~ and parentheses, not with and, or, not")

    def __str__(self) -> str:
        match self.op:
            case "and" | "or":
                return f"({(' & ' if self.op == 'and' else ' | ').join(map(str, self.args))})"
            case "not":
                return f"~{self.args[0]}"
            case "isin":
                return f"{self.column}.isin({list(self.value)!r})"
            case "is_null":
                return f"{self.column}.is_null()"
            case _:
                return f"({self.column} {self.op} {self.value!r})"


def _expr(value: object) -> Expr:
    if not isinstance(value, Expr):
        raise InvalidArgument(f"{value!r} is not a predicate: compare kivi.col(name) with a value first")
    return value


def _operands(value: object, op: str) -> tuple[Expr, ...]:
    """Side by side, where an operand is a chain of the same operator."""
    expr = _expr(value)
    return expr.args if expr.op == op else (expr,)


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    name: str

    def __eq__(self, value: object) -> Expr:  # type: ignore[override]
        return Expr("is_null", self.name) if value is None else Expr("==", self.name, _literal(value))

    def __ne__(self, value: object) -> Expr:  # type: ignore[override]
        return ~Expr("is_null", self.name) if value is None else Expr("!=", self.name, _literal(value))

    def __lt__(self, value: object) -> Expr:
        return Expr("<", self.name, _literal(value))

    def __le__(self, value: object) -> Expr:
        return Expr("<=", self.name, _literal(value))

    def __gt__(self, value: object) -> Expr:
        return Expr(">", self.name, _literal(value))

    def __ge__(self, value: object) -> Expr:
        return Expr(">=", self.name, _literal(value))

    __hash__ = None  # type: ignore[assignment]

    def isin(self, values: Iterable[object]) -> Expr:
        """True where the column equals one of ``values``."""
        return Expr("isin", self.name, tuple(_literal(v) for v in values))

    def is_null(self) -> Expr:
        return Expr("is_null", self.name)


def _literal(value: object) -> object:
    if isinstance(value, (_Column, Expr)):
        raise InvalidArgument("a column is compared with a value, not with another column or predicate")
    return value


def col(name: str) -> _Column:
    """A column to compare: ``kivi.col("resp_time_us") > 120_000``."""
    return _Column(name)


def all_of(*terms: Expr | None) -> Expr | None:
    """The terms that there are, joined by "and"; None if there are none."""
    there = [term for term in terms if term is not None]
    return functools.reduce(operator.and_, there) if there else None


def between(column: str, low: Any, beyond: Any) -> Expr | None:
    """low <= column < beyond, in stored form, None being no bound."""
    return all_of(
        None if low is None else Expr(">=", column, low), None if beyond is None else Expr("<", column, beyond)
    )


def names(expr: Expr) -> set[str]:
    """The columns a predicate reads."""
    return {expr.column} if expr.column else set().union(*(names(arg) for arg in expr.args))


@dataclass(frozen=True, slots=True)
class Scan:
    """A scan. ``prefix``, ``start`` (inclusive) and ``end`` (exclusive) are keys or their first columns, in
    stored form; ``where`` is bound; ``limit`` counts rows that match. ``changes``: only what is new since then."""

    prefix: tuple[Any, ...] = ()
    start: tuple[Any, ...] | None = None
    end: tuple[Any, ...] | None = None
    where: Expr | None = None
    columns: Sequence[str] | None = None
    limit: int | None = None
    reverse: bool = False
    measures: tuple[Measure, ...] = ()
    """Of events: one row with these, instead of the rows."""
    changes: Changes | None = None

    @property
    def times(self) -> tuple[Any, Any]:
        """Of events: the moment from which on and the one before which they lie; None is no bound."""
        return self.start[0] if self.start else None, self.end[0] if self.end else None


def bind(expr: Expr, type_of: Callable[[str], ColumnType]) -> Expr:
    """The same predicate with literals in stored form. Raises SchemaError for what the columns cannot be compared with.

    ``type_of`` gives a column's type or raises SchemaError. Predicates deeper than 50 or larger than
    10,000 nodes are refused, so that a stranger's predicate cannot exhaust the stack.
    """
    budget = [_MAX_NODES]

    def walk(node: Expr, depth: int) -> Expr:
        budget[0] -= 1 + (len(node.value) if node.op == "isin" else 0)
        if depth > _MAX_DEPTH or budget[0] < 0:
            raise InvalidArgument(f"the predicate is too large: at most {_MAX_NODES} nodes and {_MAX_DEPTH} deep")
        if node.op in ("and", "or", "not"):
            if not node.args or (node.op == "not" and len(node.args) > 1):
                raise InvalidArgument(
                    f"{node.op!r} of {len(node.args)} predicates: not takes one, the others at least one"
                )
            return Expr(node.op, args=tuple(walk(arg, depth + 1) for arg in node.args))
        type_ = type_of(node.column)
        if node.op == "is_null":
            return node
        if node.op == "isin":
            return Expr("isin", node.column, tuple(_comparable(type_, v, node.column) for v in node.value))
        if node.op not in _COMPARE:
            raise InvalidArgument(f"{node.op!r} is not an operator of a predicate")
        return Expr(node.op, node.column, _comparable(type_, node.value, node.column))

    return walk(_expr(expr), 0)


def _comparable(type_: ColumnType, value: object, column: str) -> object:
    if value is None:
        raise SchemaError(f"compare {column!r} with null by is_null()")
    return type_.to_stored(value, f"the value compared with {column!r}")


def matches(expr: Expr, row: Mapping[str, Any]) -> bool:
    """True if a *bound* predicate selects a row of stored-form values."""
    return _truth(expr, row) is True


def _truth(expr: Expr, row: Mapping[str, Any]) -> bool | None:
    match expr.op:
        case "and" | "or":
            decides = expr.op == "or"  # one operand that is true decides "or", one that is false "and"
            unknown = False
            for arg in expr.args:
                truth = _truth(arg, row)
                if truth is decides:
                    return decides
                unknown = unknown or truth is None
            return None if unknown else not decides
        case "not":
            inner = _truth(expr.args[0], row)
            return None if inner is None else not inner
    value = row[expr.column]
    if expr.op == "is_null":
        return value is None
    if value is None:
        return None
    if expr.op == "isin":
        return value in expr.value
    return _COMPARE[expr.op](value, expr.value)
