"""Expressions on single rows of stored-form values: what the live matcher and reads by key use.

Integers here have no width, so each operator is the plain one, and only results are held to their types' ranges. A
result out of range is handed on as the error that it will be raised as (see the room's contract).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from kivi.errors import InvalidArgument, OutOfRange
from kivi.model.expressions.nodes import HIERARCHY, TEXT, Expr
from kivi.model.expressions.positions import is_within
from kivi.model.expressions.quads import quad_of
from kivi.model.expressions.texts import HAS
from kivi.model.expressions.time_parts import part_of
from kivi.model.types import ColumnType

__all__ = ["matches", "out_of_range", "unresolved", "value_of"]

_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "==": lambda a, b: bool(a == b),
    "!=": lambda a, b: bool(a != b),
    "<": lambda a, b: bool(a < b),
    "<=": lambda a, b: bool(a <= b),
    ">": lambda a, b: bool(a > b),
    ">=": lambda a, b: bool(a >= b),
}
_CALCULATE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if b else None,
}


def matches(expr: Expr, row: Mapping[str, Any]) -> bool:
    """True if a *bound* predicate selects a row of stored-form values. Raises OutOfRange."""
    truth = _evaluate(expr, row)
    if truth is True:
        return True
    if isinstance(truth, OutOfRange):
        raise truth
    return False


def value_of(expr: Expr, row: Mapping[str, Any]) -> Any:
    """A *bound* expression's value of a row of stored-form values, in stored form; None is null. Raises OutOfRange."""
    value = _evaluate(expr, row)
    if isinstance(value, OutOfRange):
        raise value
    return value


def out_of_range(expr: Expr) -> OutOfRange:
    """The error of a bound node whose result does not fit in its type."""
    return OutOfRange(f"{expr} leaves the range of {expr.type} in one row or more")


def unresolved(expr: Expr) -> InvalidArgument:
    """The error of a hierarchy where there is no snapshot that it could be of."""
    return InvalidArgument(
        f"{expr}: under() and covers() are for where= of reads, questions, subscriptions and retractions, not for "
        "having= or groups: give where=, or group by the column itself"
    )


def _evaluate(expr: Expr, row: Mapping[str, Any]) -> Any:
    op = expr.op
    if op in HIERARCHY:
        raise unresolved(expr)
    if expr.column:
        value = row[expr.column]
        if isinstance(value, OutOfRange):  # of a derived column
            return value
        if op == "is_null":
            return value is None
        if value is None or op == "col":
            return value
        if op in TEXT:
            return HAS[op](value, expr.value)
        return value in expr.value if op == "isin" else _COMPARE[op](value, expr.value)
    if op == "and" or op == "or":
        decides = op == "or"  # one operand that is true decides "or", one that is false "and"
        held: Any = not decides  # or else an error, or else unknown
        for arg in expr.args:
            truth = _evaluate(arg, row)
            if truth is decides:
                return decides
            if truth is None:
                held = None if held is True or held is False else held
            elif truth is not True and truth is not False:
                held = truth
        return held
    match op:
        case "lit":
            return expr.value
        case "coalesce":
            found = (converted(_evaluate(arg, row), arg, expr) for arg in expr.args)
            return next((value for value in found if value is not None), None)
        case "case":
            return _chosen(expr, row)
    values = [_evaluate(arg, row) for arg in expr.args]
    for value in values:
        if isinstance(value, OutOfRange):
            return value
    if op == "is_null":
        return values[0] is None
    if None in values:
        return None
    if op == "not":
        return not values[0]
    if op == "isin":
        return values[0] in expr.value
    if op in TEXT:
        return HAS[op](values[0], expr.value)
    if op == "part":
        name, zone = expr.value
        return part_of(name, zone, values[0])
    if op in ("within_km", "quad"):
        lat, lon = (_as_float(value, arg.type) for value, arg in zip(values, expr.args, strict=True))
        return is_within(lat, lon, expr.value) if op == "within_km" else quad_of(lat, lon, *expr.value)
    if op in _COMPARE:
        return _COMPARE[op](*_aligned(values, expr.args))
    return _calculated(expr, values)


def _chosen(expr: Expr, row: Mapping[str, Any]) -> Any:
    chosen = expr.args[-1]
    for condition, value in zip(expr.args[::2], expr.args[1::2], strict=False):
        truth = _evaluate(condition, row)
        if isinstance(truth, OutOfRange):
            return truth
        if truth:
            chosen = value
            break
    return converted(_evaluate(chosen, row), chosen, expr)


# -- numbers ----------------------------------------------------------------------------------------------


def _calculated(expr: Expr, values: list[Any]) -> Any:
    """Of values that are there."""
    type_ = expr.type
    assert type_ is not None
    if type_.name == "float64":
        values = [_as_float(value, arg.type) for value, arg in zip(values, expr.args, strict=True)]
    elif expr.op in ("+", "-"):
        values = [value * _power(type_, arg.type) for value, arg in zip(values, expr.args, strict=True)]
    result = -values[0] if expr.op == "neg" else _CALCULATE[expr.op](*values)
    if type_.name == "float64":
        if result is None:
            return None
        return result + 0.0 if math.isfinite(result) else out_of_range(expr)  # -0.0 + 0.0 is 0.0
    return result if type_.stored_min <= result <= type_.stored_max else out_of_range(expr)


def converted(value: Any, arg: Expr, of: Expr) -> Any:
    """An operand's value as its ``case`` or ``coalesce`` gives it, whose type may be a wider one."""
    type_ = of.type
    if value is None or type_ is None or type_ == arg.type or isinstance(value, OutOfRange):
        return value
    if type_.name == "float64":
        return _as_float(value, arg.type)
    if type_.name == "decimal":
        value *= _power(type_, arg.type)
        return value if type_.stored_min <= value <= type_.stored_max else out_of_range(of)
    return value


def _power(to: ColumnType, of: ColumnType | None) -> int:
    """What brings an unscaled value to another scale."""
    power: int = 10 ** (to.scale - (of.scale if of is not None else 0))
    return power


def _as_float(value: Any, type_: ColumnType | None) -> float:
    if type_ is not None and type_.scale:
        return float(value) / 10.0**type_.scale
    return float(value)


def _aligned(values: list[Any], args: tuple[Expr, ...]) -> tuple[Any, Any]:
    """Two values as Python compares them exactly: integers of one scale, where they are not of one type."""
    left, right = values
    left_type, right_type = args[0].type, args[1].type
    if left_type == right_type or left_type is None or right_type is None:
        return left, right
    if left_type.name == "float64":
        right, left = _beside_float(right, right_type.scale, left)
    elif right_type.name == "float64":
        left, right = _beside_float(left, left_type.scale, right)
    else:
        scale = max(left_type.scale, right_type.scale)
        left, right = left * 10 ** (scale - left_type.scale), right * 10 ** (scale - right_type.scale)
    return left, right


def _beside_float(unscaled: int, scale: int, number: float) -> tuple[Any, Any]:
    if not math.isfinite(number):  # a sum of floats that has left the finite numbers for now
        return 0, number
    numerator, denominator = number.as_integer_ratio()
    return unscaled * denominator, numerator * 10**scale
