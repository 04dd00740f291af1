"""Derived columns: arithmetic over an aggregate's columns, done when a row is read and never stored.

An average is ``"sum_resp_time / invocations"``: what is stored stays exact, only the quotient is a float64. The text
comes from a caller and is evaluated for every row, so it is parsed into Python's own syntax tree, held to a short list
of nodes, and bounded in length and depth. A null operand makes the result null, and so does a divisor of 0.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any, Final

from kivi.errors import SchemaError
from kivi.types import shown

__all__ = ["evaluate_expression", "parse_expression"]

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


def evaluate_expression(node: ast.expr, row: Mapping[str, Any]) -> float | None:
    """The expression over one row of caller-form values: a float, or None when an operand is null or a divisor 0.

    Raises OverflowError for what leaves the finite numbers, on the way or at the end.
    """
    match node:
        case ast.Constant(value=value):
            return float(value)  # type: ignore[arg-type]
        case ast.Name(id=name):
            value = row[name]
            return None if value is None else float(value)
        case ast.UnaryOp(op=op, operand=operand):
            inner = evaluate_expression(operand, row)
            return None if inner is None else (-inner if isinstance(op, ast.USub) else inner)
        case ast.BinOp(left=left_node, op=op, right=right_node):
            left, right = evaluate_expression(left_node, row), evaluate_expression(right_node, row)
            if left is None or right is None:
                return None
            match op:
                case ast.Add():
                    result = left + right
                case ast.Sub():
                    result = left - right
                case ast.Mult():
                    result = left * right
                case _:
                    if right == 0:
                        return None
                    result = left / right
            if not math.isfinite(result):
                raise OverflowError("the result is too large for a float64")
            return result
    raise SchemaError("not an arithmetic expression")
