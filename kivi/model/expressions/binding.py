"""Binding: an expression checked against a schema, its literals in stored form, and the type of each value.

A literal that stands beside a value takes the value's type if that holds it, else its own. What reads no column is
computed here, once. A comparison of one column with a literal of its type becomes the one node that every reader knows
(``Expr(op, column, value)``), however it was written.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Callable, Sequence
from typing import Any, Final

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.expressions.nodes import (
    ARITHMETIC,
    BESIDE,
    COMPARISONS,
    HIERARCHY,
    ROWS_BESIDE_MAX,
    TEXT,
    Expr,
    check_shape,
)
from kivi.model.expressions.positions import checked_circle
from kivi.model.expressions.quads import checked_depth
from kivi.model.expressions.rows import value_of
from kivi.model.expressions.texts import check_pattern
from kivi.model.expressions.time_parts import checked_part
from kivi.model.types import ColumnType, is_float, shown

__all__ = ["bind", "bind_value"]

_MAX_NODES: Final = 10_000
_MAX_DEPTH: Final = 50  # protobuf reads messages nested 100 deep, and the predicate lies within some
_BOOL, _INT, _FLOAT, _TIME = (ColumnType(name) for name in ("bool", "int64", "float64", "timestamp"))
_TEXT: Final = ColumnType("string")
_NUMBERS: Final = frozenset({"int64", "float64", "decimal"})
_DIGITS: Final = 18
_MIRRORED: Final = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}

TypeOf = Callable[[str], ColumnType]
Stored = Callable[[ColumnType, Any, str], Any]
"""(type, literal, how errors call it) -> the literal in stored form. Raises SchemaError, InvalidArgument."""


def bind(expr: Expr, type_of: TypeOf, stored: Stored = ColumnType.to_stored, *, beside: bool = False) -> Expr:
    """The same predicate with literals in stored form. Raises SchemaError for what does not fit the columns.

    ``type_of`` gives a column's type or raises SchemaError. Predicates deeper than 50 or larger than 10,000 nodes are
    refused, so that a stranger's predicate cannot exhaust the stack. An expression that was bound before, and has come
    over the wire or from a catalog, is bound again with a ``stored`` that checks stored forms instead of making them.
    ``beside``: whether there are rows beside it, of which ``prev`` and ``next`` are.
    """
    if not isinstance(expr, Expr):
        raise InvalidArgument(f"{shown(expr)} is not a predicate: compare kivi.col(name) with a value first")
    return _Binder(type_of, stored, beside).predicate(expr, 0)


def bind_value(
    expr: Expr, type_of: TypeOf, stored: Stored = ColumnType.to_stored, *, beside: bool = False
) -> tuple[Expr, ColumnType]:
    """A value expression with literals in stored form, and its type; a predicate is a bool. As ``bind``."""
    if not isinstance(expr, Expr):
        raise InvalidArgument(f"{shown(expr)} is not an expression: begin with kivi.col(name)")
    bound = _Binder(type_of, stored, beside).value(expr, 0)
    return bound, _type(bound)


def _type(bound: Expr) -> ColumnType:
    return bound.type or _BOOL


class _Binder:
    def __init__(self, type_of: TypeOf, stored: Stored, beside: bool = False) -> None:
        self._type_of, self._stored, self._beside_rows = type_of, stored, beside
        self._budget = _MAX_NODES

    def predicate(self, node: Expr, depth: int) -> Expr:
        bound = self.value(node, depth)
        if _type(bound) != _BOOL:
            raise SchemaError(f"{bound} is not a predicate but a value of type {bound.type}: compare it with another")
        return Expr("==", bound.column, True) if bound.op == "col" else bound

    def value(self, node: Expr, depth: int) -> Expr:
        bound = self._bound(node, depth)
        if bound.op == "lit" and bound.type is None:
            bound = self._own(bound.value)
        if bound.args and bound.op not in HIERARCHY and all(arg.op == "lit" for arg in bound.args):
            return Expr("lit", value=value_of(bound, {}), type=_type(bound))
        return bound

    def _bound(self, node: Expr, depth: int) -> Expr:
        """The node bound; a literal that has no type yet stays as it is, since what stands beside it says which."""
        check_shape(node)
        self._budget -= 1 + (len(node.value) if node.op == "isin" else 0)
        if depth > _MAX_DEPTH or self._budget < 0:
            raise InvalidArgument(f"the predicate is too large: at most {_MAX_NODES} nodes and {_MAX_DEPTH} deep")
        if node.column:
            return self._of_column(node)
        if node.op == "lit":
            if node.type is None or node.value is None:
                return Expr("lit", value=node.value, type=node.type)
            return Expr("lit", value=self._stored(node.type, node.value, "a literal"), type=node.type)
        if node.op in ("and", "or", "not"):
            return Expr(node.op, args=tuple(self.predicate(arg, depth + 1) for arg in node.args))
        if node.op in ("is_null", "isin"):
            arg = self.value(node.args[0], depth + 1)
            return Expr(node.op, value=self._literals(node, _type(arg), str(arg)), args=(arg,))
        if node.op in TEXT:
            arg = self.value(node.args[0], depth + 1)
            return Expr(node.op, value=self._text(node, _type(arg), str(arg)), args=(arg,))
        if node.op in HIERARCHY:
            arg = self.value(node.args[0], depth + 1)
            return Expr(node.op, value=self._placed(node, _type(arg), str(arg)), args=(arg,))
        if node.op in ("within_km", "quad"):
            args = [self.value(arg, depth + 1) for arg in node.args]
            for arg in args:
                if _type(arg).name not in _NUMBERS:
                    raise SchemaError(f"{arg} is a {_type(arg)}: {node.op} takes degrees, which are numbers")
            if node.op == "quad":
                return Expr(node.op, value=(checked_depth(node.value),), args=tuple(args), type=_TEXT)
            return Expr(node.op, value=checked_circle(node.value), args=tuple(args))
        if node.op == "part":
            arg = self.value(node.args[0], depth + 1)
            part = checked_part(node.value)
            if _type(arg) != _TIME:
                raise SchemaError(f"{arg} is a {_type(arg)}, and only a timestamp has a {part[0]}")
            return Expr(node.op, value=part, args=(arg,), type=_INT)
        if node.op in ("coalesce", "case"):
            return self._alternatives(node, depth)
        args = [self._bound(arg, depth + 1) if arg.op == "lit" else self.value(arg, depth + 1) for arg in node.args]
        if node.op in COMPARISONS:
            return self._compared(node.op, *self._beside(args, node.op))
        if node.op in ARITHMETIC:
            left, right = self._beside(args, node.op)
            return Expr(node.op, args=(left, right), type=_calculated(node.op, left, right))
        value = self._own(args[0].value) if args[0].type is None and args[0].op == "lit" else args[0]
        if _type(value).name not in _NUMBERS:
            raise SchemaError(f"{value} is a {_type(value)}, and only a number has a negative")
        return Expr("neg", args=(value,), type=value.type)

    def _of_column(self, node: Expr) -> Expr:
        type_ = self._type_of(node.column)
        if node.op == "is_null":
            return Expr("is_null", node.column)
        if type_.is_state:
            raise SchemaError(
                f"{node.column!r} is a {type_}, which is compared with nothing: {type_.advice(node.column)}"
            )
        if node.op == "col":
            return Expr("col", node.column, type=type_)
        if node.op in BESIDE:
            if not self._beside_rows:
                raise InvalidArgument(f"{node}: prev and next are for the definitions of a pattern, kivi.pattern(...)")
            if type(node.value) is not int or not 0 <= node.value <= ROWS_BESIDE_MAX:
                raise InvalidArgument(
                    f"{node.op}({node.column!r}, {shown(node.value)}): by 0 to {ROWS_BESIDE_MAX:,} rows"
                )
            return Expr(node.op, node.column, node.value, type=type_)
        if node.op == "isin":
            return Expr("isin", node.column, self._literals(node, type_, node.column))
        if node.op in TEXT:
            return Expr(node.op, node.column, self._text(node, type_, node.column))
        if node.op in HIERARCHY:
            return Expr(node.op, node.column, self._placed(node, type_, node.column))
        return Expr(node.op, node.column, self._comparable(type_, node.value, node.column))

    def _placed(self, node: Expr, type_: ColumnType, what: str) -> tuple[Any, str]:
        """Of "under" and "covers": the value, and the name of a hierarchy."""
        if len(node.value) != 2 or not isinstance(node.value[1], str):
            raise InvalidArgument(f"{node.op} takes a value, and the name of a hierarchy, not {shown(node.value)}")
        return self._comparable(type_, node.value[0], what), node.value[1]

    def _text(self, node: Expr, type_: ColumnType, what: str) -> Any:
        """Of an operator of TEXT: its literal."""
        if type_.name not in ("string", "bytes")[: 1 + (node.op != "matches")]:
            known = "a string has" if node.op == "matches" else "a string and bytes have"
            raise SchemaError(f"{what!r} is a {type_}, and only {known} {node.op}()")
        value = self._comparable(type_, node.value, what)
        if node.op == "matches":
            check_pattern(value)
        return value

    # -- literals -----------------------------------------------------------------------------------

    def _comparable(self, type_: ColumnType, value: object, what: str) -> Any:
        if value is None:
            raise SchemaError(f"compare {what!r} with null by is_null()")
        return self._stored(type_, value, f"the value compared with {what!r}")

    def _literals(self, node: Expr, type_: ColumnType, what: str) -> Any:
        """Of "isin"; "is_null" has none."""
        return tuple(self._comparable(type_, v, what) for v in node.value) if node.op == "isin" else None

    def _beside(self, args: Sequence[Expr], op: str) -> list[Expr]:
        """Two operands, a literal among them in the type that the other one asks for."""
        typed = next((arg for arg in args if arg.op != "lit" or arg.type is not None), None)
        out = []
        for arg in args:
            if arg.op == "lit" and arg.type is None:
                if arg.value is None:
                    raise SchemaError(f"null {op} anything is null: use is_null() or coalesce()")
                arg = (
                    self._own(arg.value) if typed is None else self._literal(arg.value, _type(typed), op in COMPARISONS)
                )
            out.append(arg)
        return out

    def _literal(self, value: object, type_: ColumnType, same: bool = True) -> Expr:
        """In this type, if it holds the value, else in its own. Not ``same``: only a decimal to a float, rounded."""
        if type_.name == "float64" and isinstance(value, decimal.Decimal) and not value.is_nan():
            number = float(value)
            if number == value or not same:
                return Expr("lit", value=self._stored(type_, number, "a literal"), type=type_)
        if same:
            try:
                return Expr("lit", value=self._stored(type_, value, "a literal"), type=type_)
            except InvalidArgument:  # SchemaError too
                pass
        return self._own(value)

    def _own(self, value: object) -> Expr:
        type_ = _own_type(value)
        return Expr("lit", value=self._stored(type_, value, "a literal"), type=type_)

    # -- operators ------------------------------------------------------------------------------------

    def _compared(self, op: str, left: Expr, right: Expr) -> Expr:
        a, b = _type(left), _type(right)
        if not {a.name, b.name} <= _NUMBERS and (a.name != b.name or a.is_state):
            raise SchemaError(f"({left} {op} {right}) compares {a} with {b}: both must be numbers, or of one type")
        if a == b and "col" in (left.op, right.op) and "lit" in (left.op, right.op):
            column, literal = (left, right) if left.op == "col" else (right, left)
            if literal.value is not None:
                return Expr(op if left.op == "col" else _MIRRORED[op], column.column, literal.value)
        return Expr(op, args=(left, right))

    def _alternatives(self, node: Expr, depth: int) -> Expr:
        """``case`` and ``coalesce``: their values have one type, which the ones that are no literals say."""
        bound: list[Expr] = []
        values = range(len(node.args)) if node.op == "coalesce" else (*range(1, len(node.args), 2), len(node.args) - 1)
        for i, arg in enumerate(node.args):
            if i not in values:
                bound.append(self.predicate(arg, depth + 1))
            else:
                bound.append(self._bound(arg, depth + 1) if arg.op == "lit" else self.value(arg, depth + 1))
        of = [bound[i] for i in values]
        types = [_type(arg) for arg in of if arg.op != "lit" or arg.type is not None]
        common = _common(types, node) if types else None
        for i in values:
            if bound[i].op == "lit" and bound[i].type is None and bound[i].value is not None:
                literal = bound[i].value
                bound[i] = self._own(literal) if common is None else self._literal(literal, common)
        types += [_type(bound[i]) for i in values if bound[i].value is not None and bound[i].op == "lit"]
        if not types:
            raise SchemaError(f"{node} is null whatever the row: give it a value that has a type")
        common = _common(types, node)
        for i in values:
            if bound[i].op == "lit" and bound[i].type is None:
                bound[i] = Expr("lit", type=common)
        return Expr(node.op, args=tuple(bound), type=common)


def _own_type(value: object) -> ColumnType:
    if isinstance(value, decimal.Decimal) and value.is_finite() and abs(value.adjusted()) <= 2 * _DIGITS:
        exponent = value.normalize(decimal.Context(prec=60)).as_tuple().exponent
        assert isinstance(exponent, int)
        return ColumnType("decimal", _DIGITS, min(max(-exponent, 0), _DIGITS))
    for kinds, type_ in _OWN:
        if isinstance(value, kinds):
            return type_
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return _BOOL
    if is_float(value):
        return _FLOAT
    if hasattr(value, "__index__"):  # NumPy's integers
        return _INT
    raise SchemaError(f"{shown(value)} ({type(value).__name__}) is not a value that a column may have")


_OWN: Final[tuple[tuple[Any, ColumnType], ...]] = (
    (bool, _BOOL),
    (int, _INT),
    (float, _FLOAT),
    (decimal.Decimal, ColumnType("decimal", _DIGITS, 0)),  # infinite or out of range: refused as such
    (str, ColumnType("string")),
    ((bytes, bytearray, memoryview), ColumnType("bytes")),
    (dt.datetime, _TIME),
)


def _common(types: Sequence[ColumnType], node: Expr) -> ColumnType:
    if all(type_ == types[0] for type_ in types):
        return types[0]
    names = {type_.name for type_ in types}
    if not names <= _NUMBERS:
        raise SchemaError(f"{node} gives values of {', '.join(dict.fromkeys(map(str, types)))}: use values of one type")
    return _FLOAT if "float64" in names else ColumnType("decimal", _DIGITS, max(type_.scale for type_ in types))


def _calculated(op: str, left: Expr, right: Expr) -> ColumnType:
    """The type of an operator's result. Raises SchemaError if it has none."""
    a, b = _type(left), _type(right)
    if {a.name, b.name} <= _NUMBERS:
        if op == "/" or "float64" in (a.name, b.name):
            return _FLOAT
        if a.name == b.name == "int64":
            return _INT
        scale = a.scale + b.scale if op == "*" else max(a.scale, b.scale)
        if scale > _DIGITS:
            raise SchemaError(f"({left} * {right}) would have {scale} digits after the point: at most {_DIGITS}")
        return ColumnType("decimal", _DIGITS, scale)
    if op == "-" and a == b == _TIME:
        return _INT
    if (op in ("+", "-") and a == _TIME and b == _INT) or (op == "+" and a == _INT and b == _TIME):
        return _TIME
    raise SchemaError(f"({left} {op} {right}): there is no {a} {op} {b}")
