"""Expressions as plain data, which JSON can hold: for catalogs and stored subscriptions.

A node is a list: ["col", name], ["lit", value, type], [op, column, value] of one column beside literals, and [op,
value, operand, ...] for all others but "and", "or" and "not", which are [op, operand, ...]; the value of "isin",
"within_km", "quad", "part", "under" and "covers" is a list. A literal that JSON has no
form for is a dict of one entry: {"decimal": "1.50"}, {"bytes": base64}, {"timestamp": microseconds}.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import decimal
import math
from typing import Any, Final

from kivi.errors import InvalidArgument, OutOfRange
from kivi.model.expressions.nodes import ARITHMETIC, BESIDE, OF_COLUMNS, TUPLES, Expr, Value, check_shape
from kivi.model.types import ColumnType, is_float, shown

__all__ = ["from_plain", "to_plain"]

_LOGIC: Final = frozenset({"and", "or", "not"})
_VALUES: Final = ARITHMETIC | {"neg", "coalesce", "case", "part", "quad"}
_DEPTH_MAX: Final = 100
_TIME: Final = ColumnType("timestamp")


def to_plain(expr: Expr) -> list[Any]:
    """The expression as lists, strings and numbers.

    Of a bound one, the literals in stored form: what ``from_plain`` makes of it is bound again with
    ``bind(..., stored=...)``, as its values have forgotten their types.
    """
    if expr.op == "col":
        return ["col", expr.column]
    if expr.op == "lit":
        return ["lit", _literal(expr.value), *([str(expr.type)] if expr.type is not None else [])]
    if expr.op in _LOGIC:
        return [expr.op, *map(to_plain, expr.args)]
    value = list(map(_literal, expr.value)) if expr.op in TUPLES else _literal(expr.value)
    return [expr.op, expr.column, value] if expr.column else [expr.op, value, *map(to_plain, expr.args)]


def from_plain(data: Any) -> Expr:
    """The inverse. Raises InvalidArgument for what ``to_plain`` does not make."""
    return _node(data, 0)


def _node(data: Any, depth: int) -> Expr:
    if not isinstance(data, (list, tuple)) or not data or not isinstance(data[0], str) or depth > _DEPTH_MAX:
        raise InvalidArgument(f"{shown(data)} is not the plain form of an expression")
    op, *rest = data
    kind = Value if op in _VALUES or op in ("col", "lit", *BESIDE) else Expr
    if op in _LOGIC:
        found = Expr(op, args=tuple(_node(arg, depth + 1) for arg in rest))
    elif op == "lit" and len(rest) in (1, 2):
        found = Value(op, value=_from_literal(rest[0]), type=ColumnType.parse(rest[1]) if len(rest) == 2 else None)
    elif op == "col" and len(rest) == 1 and isinstance(rest[0], str):
        found = Value(op, rest[0])
    elif len(rest) == 2 and isinstance(rest[0], str) and rest[0] and op in OF_COLUMNS and _is_literal(op, rest[1]):
        found = kind(op, rest[0], _values(op, rest[1]))
    elif len(rest) > 1:
        found = kind(op, value=_values(op, rest[0]), args=tuple(_node(arg, depth + 1) for arg in rest[1:]))
    else:
        raise InvalidArgument(f"{shown(data)} is not the plain form of an expression")
    check_shape(found)
    return found


def _is_literal(op: str, value: Any) -> bool:
    """Not an operand: ["contains", "a", "b"] is of the column a, and ["contains", "a", ["col", "b"]] of b."""
    return op in TUPLES or not isinstance(value, (list, tuple))


def _values(op: str, value: Any) -> Any:
    if op not in TUPLES:
        return _from_literal(value)
    if not isinstance(value, (list, tuple)):
        raise InvalidArgument(f"{shown(value)} is not a list of values")
    return tuple(map(_from_literal, value))


def _literal(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, decimal.Decimal):
        return {"decimal": str(value)}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, dt.datetime):
        return {"timestamp": _TIME.to_stored(value)}
    if is_float(value) and math.isfinite(value):
        return float(value)
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    if hasattr(value, "__index__") and not isinstance(value, float):
        return int(value)
    raise InvalidArgument(f"{shown(value)} ({type(value).__name__}) is not a literal")


def _from_literal(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    try:
        match value:
            case {"decimal": str(text)} if len(value) == 1:
                return decimal.Decimal(text)
            case {"bytes": str(text)} if len(value) == 1:
                return base64.b64decode(text, validate=True)
            case {"timestamp": int(moment)} if len(value) == 1:
                return _TIME.from_stored(moment)
    except (decimal.InvalidOperation, binascii.Error, ValueError, OutOfRange):
        pass
    raise InvalidArgument(f"{shown(value)} is not the plain form of a literal")
