"""Derived columns: arithmetic over an aggregate's columns, done when a row is read and never stored.

An average is ``"sum_resp_time / invocations"``: what is stored stays exact, only the quotient is a float64. The text
comes from a caller and is evaluated for every row, so it is parsed into Python's own syntax tree, held to a short list
of nodes, and bounded in length and depth. A null operand makes the result null, and so does a divisor of 0.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from kivi.errors import SchemaError
from kivi.model.types import shown

__all__ = ["evaluator", "parse_expression"]

_ALLOWED_NODES: Final = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult, ast.Div,
    ast.USub, ast.UAdd, ast.Name, ast.Load, ast.Constant,
)  # fmt: skip
_EXPRESSION_DEPTH_MAX: Final = 100


def parse_expression(text: str, names: set[str]) -> ast.expr:
    """``"sum_resp_time / invocations"`` -> its syntax tree: + - * /, parentheses, numbers and ``names`` only.

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
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED_NODES):
            raise SchemaError(f"{text!r}: only + - * /, numbers and columns are allowed")
        if isinstance(node, ast.Constant) and (
            isinstance(node.value, bool) or not isinstance(node.value, (int, float))
        ):
            raise SchemaError(f"{text!r}: {node.value!r} is not a number")
        if isinstance(node, ast.Constant) and not _is_float64(node.value):
            raise SchemaError(f"{text!r}: a number in it is too large for a float64")
        if isinstance(node, ast.Name) and node.id not in names:
            raise SchemaError(f"{text!r} names {node.id!r}, which is not a numeric column; known are {sorted(names)}")
    return tree.body


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

    Functions instead of nodes, at a third of the cost of walking a tree. They raise OverflowError for what leaves the
    finite numbers, on the way or at the end.
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
