"""Derived columns: arithmetic over an aggregate's columns, done when a row is read and never stored.

``quantile(latency, 0.99)`` and ``fraction_below(latency, 500000)`` read a quantiles measure; ``count(latency)`` is how
many values it has. An average is ``"sum_resp_time / invocations"``: what is stored stays exact, only the quotient is a
float64. The text comes from a caller and is evaluated for every row, so it is parsed into Python's own syntax tree,
held to a short list of nodes, and bounded in length and depth. A null operand makes the result null, and so does a
divisor of 0."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.quantiles import Quantiles
from kivi.model.types import ColumnType, shown

__all__ = ["FUNCTIONS", "calls_of", "evaluator", "inputs_of", "literal", "parse_expression"]

_ALLOWED_NODES: Final = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult, ast.Div,
    ast.USub, ast.UAdd, ast.Name, ast.Load, ast.Constant, ast.Call,
)  # fmt: skip
FUNCTIONS: Final[dict[str, Callable[..., float | None]]] = {
    "quantile": Quantiles.quantile,
    "fraction_below": Quantiles.fraction_below,
    "count": lambda quantiles: quantiles.count,
}
"""What a derived column may call: of a quantiles measure, and but for ``count`` of a number."""
_EXPRESSION_DEPTH_MAX: Final = 100


def parse_expression(text: str, columns: Mapping[str, ColumnType]) -> ast.expr:
    """``"sum_resp_time / invocations"`` -> its syntax tree: + - * /, parentheses, numbers, functions of quantiles, and
    those of the ``columns`` that are numbers, only.

    At most 1,000 characters and 100 operations deep, so that evaluating it never exhausts the stack. SchemaError.
    """
    if not isinstance(text, str) or len(text) > 1_000:
        raise SchemaError(f"a derived column is an expression of at most 1000 characters, not {shown(text)}")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise SchemaError(f"{text!r} is not an arithmetic expression") from None
    if _depth(tree.body) > _EXPRESSION_DEPTH_MAX:
        raise SchemaError(f"{text!r} is nested too deeply: at most {_EXPRESSION_DEPTH_MAX} operations")
    names = {name for name, type_ in columns.items() if type_.name in ("int64", "float64", "decimal")}
    called: set[int] = set()
    for node in ast.walk(tree):
        if id(node) in called:
            continue
        if isinstance(node, ast.Call):
            _check_call(node, text, columns)
            called |= {id(part) for part in (node.func, node.args[0])}
            continue
        if not isinstance(node, _ALLOWED_NODES):
            raise SchemaError(f"{text!r}: only + - * /, numbers and columns are allowed")
        if isinstance(node, ast.Constant) and (
            isinstance(node.value, bool) or not isinstance(node.value, (int, float))
        ):
            raise SchemaError(f"{text!r}: {node.value!r} is not a number")
        if isinstance(node, ast.Constant) and not _is_float64(node.value):
            raise SchemaError(f"{text!r}: a number in it is too large for a float64")
        if isinstance(node, ast.Name) and node.id not in names:
            if (type_ := columns.get(node.id)) is not None and type_.name == "quantiles":
                raise SchemaError(f"{text!r} names {node.id!r}, a {type_}: {type_.advice(node.id)}")
            raise SchemaError(f"{text!r} names {node.id!r}, which is not a numeric column; known are {sorted(names)}")
    return tree.body


def _check_call(node: ast.Call, text: str, columns: Mapping[str, ColumnType]) -> None:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name not in FUNCTIONS:
        raise SchemaError(f"{text!r}: the functions are {', '.join(FUNCTIONS)}")
    wanted = 1 if name == "count" else 2
    column = node.args[0].id if node.args and isinstance(node.args[0], ast.Name) else ""
    if len(node.args) != wanted or node.keywords or column not in columns or columns[column].name != "quantiles":
        example = {"quantile": ", 0.99", "fraction_below": ", 500000"}.get(name, "")
        known = sorted(name for name, type_ in columns.items() if type_.name == "quantiles")
        raise SchemaError(f"{text!r}: write {name}(column{example}) of a quantiles measure; there are {known}")
    if wanted == 2:
        try:
            number = literal(node.args[1])
            FUNCTIONS[name](Quantiles(0, [0], [1]), number)
        except (InvalidArgument, ValueError) as error:
            raise SchemaError(f"{text!r}: {error}") from None


def inputs_of(tree: ast.expr) -> set[str]:
    """The columns that a parsed expression reads."""
    found: list[str] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Name):
            found.append(node.id)
        children = node.args if isinstance(node, ast.Call) else ast.iter_child_nodes(node)
        stack += [child for child in children if isinstance(child, ast.expr)]
    return set(found)


def calls_of(tree: ast.expr) -> dict[str, ast.expr]:
    """The calls of functions in a parsed expression, by their text."""
    return {ast.unparse(node): node for node in ast.walk(tree) if isinstance(node, ast.Call)}


def literal(node: ast.expr) -> float:
    """The number that an argument is. Raises ValueError."""
    number = ast.literal_eval(node)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ValueError(f"{ast.unparse(node)} is not a number")
    return number


def _depth(tree: ast.AST) -> int:
    """Level by level: a tree that is too deep cannot be measured by recursion."""
    level, depth = [tree], 0
    while level := [child for node in level for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]:
        depth += 1
    return depth


def _is_float64(number: Any) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


Evaluator = Callable[[Mapping[str, Any]], float | None]


def evaluator(node: ast.expr) -> Evaluator:
    """The expression over rows of caller-form values: a float, or None when an operand is null or a divisor 0.

    What a call of a function (``calls_of``) gives is an operand, under the call's own text. Functions instead of nodes,
    at a third of the cost of walking a tree. They raise OverflowError for what leaves the finite numbers, on the way or
    at the end.
    """
    match node:
        case ast.Constant(value=number):
            constant = float(number)  # type: ignore[arg-type]
            return lambda row: constant
        case ast.Name(id=name):

            def named(row: Mapping[str, Any]) -> float | None:
                value = row[name]
                return None if value is None else float(value)

            return named
        case ast.Call():
            return evaluator(ast.Name(ast.unparse(node)))  # states are read for many rows at once, before
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return evaluator(operand)
        case ast.UnaryOp(operand=operand):
            inner = evaluator(operand)

            def negated(row: Mapping[str, Any]) -> float | None:
                value = inner(row)
                return None if value is None else -value

            return negated
        case ast.BinOp(left=left_node, op=op, right=right_node):
            left, right, apply = evaluator(left_node), evaluator(right_node), _BINARY[type(op)]

            def combined(row: Mapping[str, Any]) -> float | None:
                a, b = left(row), right(row)
                if a is None or b is None:
                    return None
                if b == 0 and apply is operator.truediv:
                    return None
                result: float = apply(a, b)
                if not math.isfinite(result):
                    raise OverflowError("the result is too large for a float64")
                return result

            return combined
    raise SchemaError("not an arithmetic expression")


_BINARY: Final[dict[type[ast.operator], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
