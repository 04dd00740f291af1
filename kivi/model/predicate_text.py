"""Values and predicates as people type them: ``endpoint_id == 251 & slot >= '2023-11-16T18:00:00Z'``."""

from __future__ import annotations

import ast
import datetime as dt
import decimal
import operator
import re
import tokenize
from collections.abc import Callable, Mapping
from typing import Any, Final

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.expressions import Expr, col

__all__ = ["parse_moment", "parse_value", "type_names", "where"]


_MEASURED: Final = re.compile(r"(?!(?:decimal|list|top|quantiles)\()\w+\((.*)\)")
"""The operator of a column, or the kind of its measure, around its type."""


def type_names(description: Mapping[str, Any]) -> dict[str, str]:
    """Each column's plain type: ``sum(int64)`` is int64."""
    out: dict[str, str] = {}
    for name, declared in {**description["key"], **description["columns"]}.items():
        match = _MEASURED.fullmatch(declared)
        out[name] = match[1] if match else declared
    return out | dict.fromkeys(description.get("derived", {}), "float64")


def parse_moment(text: str, what: str) -> dt.datetime:
    """ISO 8601; without an offset it is UTC."""
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(f"{what}: {text!r} is not a time like 2023-11-16T18:00:00Z") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)


def parse_value(type_name: str, text: str, what: str = "value") -> Any:
    """The typed text as a value of the column's type. ``null`` is null; ``'null'`` in quotes is the text."""
    if text == "null":
        return None
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    try:
        if type_name == "int64":
            return int(text)
        if type_name == "float64":
            return float(text)
        if type_name.startswith("decimal"):
            return decimal.Decimal(text)
    except (ValueError, decimal.InvalidOperation):
        raise InvalidArgument(f"{what}: {text!r} is not a {type_name}") from None
    if type_name == "bool":
        if text.lower() not in ("true", "false"):
            raise InvalidArgument(f"{what}: {text!r} is not true or false")
        return text.lower() == "true"
    if type_name == "timestamp":
        return int(text) if re.fullmatch(r"-?\d+", text) else parse_moment(text, what)
    if type_name == "bytes":
        try:
            return bytes.fromhex(text[2:]) if text.startswith("0x") else text.encode()
        except ValueError:
            raise InvalidArgument(f"{what}: {text!r} is not hexadecimal") from None
    return text


# -- predicates -------------------------------------------------------------------------------------

_WORDS: Final = {"&": " and ", "|": " or ", "~": " not "}
_COMPARE: Final[dict[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.eq,
    ast.IsNot: operator.ne,
}


def _spelled(text: str, what: str) -> str:
    """``&``, ``|`` and ``~`` as ``and``, ``or`` and ``not``, which bind weaker than comparisons."""
    out = []
    try:
        for token in tokenize.generate_tokens(iter(text.splitlines(keepends=True)).__next__):
            if token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER, tokenize.INDENT, tokenize.DEDENT):
                continue
            out.append(_WORDS.get(token.string, token.string) if token.type == tokenize.OP else token.string)
    except (tokenize.TokenError, SyntaxError):
        raise InvalidArgument(f"{what} {text!r} is not a predicate") from None
    return " ".join(out).strip()


def where(text: str, types: Mapping[str, str], what: str = "--where") -> Expr:
    """``endpoint_id == 251 & slot >= '2023-11-16T18:00:00Z'`` as a predicate; only comparisons, nothing is run.

    ``what`` is how errors call it.
    """
    if len(text) > 10_000:
        raise InvalidArgument(f"{what} has more than 10,000 characters")
    try:
        tree = ast.parse(_spelled(text, what), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InvalidArgument(
            f"{what} {text!r} is not a predicate: write it like endpoint_id == 251 & slot >= '2023-11-16T18:00:00Z'"
        ) from None

    def literal(node: ast.expr, name: str) -> Any:
        if isinstance(node, ast.Name) and node.id in ("null", "true", "false"):
            return {"null": None, "true": True, "false": False}[node.id]
        try:
            value = ast.literal_eval(node)
        except (ValueError, SyntaxError, TypeError):
            raise InvalidArgument(f"{what} compares {name!r} with {ast.unparse(node)!r}, which is no value") from None
        if isinstance(value, str) and types[name] not in ("string",):
            return parse_value(types[name], value, f"{what} {name}")
        if isinstance(value, float) and types[name].startswith("decimal"):
            return decimal.Decimal(str(value))
        return value

    def column(node: ast.expr) -> str:
        if not isinstance(node, ast.Name):
            raise InvalidArgument(f"{what}: {ast.unparse(node)!r} is not a column")
        if node.id not in types:
            raise SchemaError(f"{what}: there is no column {node.id!r}; there are {', '.join(types)}")
        return node.id

    def compare(left: ast.expr, op: ast.cmpop, right: ast.expr) -> Expr:
        kind = type(op)
        mirrored = not isinstance(left, ast.Name) and isinstance(right, ast.Name) and kind in _COMPARE
        if mirrored:
            left, right = right, left
        name = column(left)
        if isinstance(op, (ast.In, ast.NotIn)):
            if not isinstance(right, (ast.List, ast.Tuple, ast.Set)):
                raise InvalidArgument(f"{what}: {name} in [...] takes a list of values")
            found = col(name).isin([literal(item, name) for item in right.elts])
            return ~found if isinstance(op, ast.NotIn) else found
        if kind not in _COMPARE:
            raise InvalidArgument(f"{what}: {ast.unparse(left)} cannot be compared like that")
        named, value = col(name), literal(right, name)
        result = _COMPARE[kind](value, named) if mirrored else _COMPARE[kind](named, value)
        assert isinstance(result, Expr)
        return result

    def build(node: ast.expr) -> Expr:
        if isinstance(node, ast.BoolOp):
            parts = [build(value) for value in node.values]
            out = parts[0]
            for part in parts[1:]:
                out = out & part if isinstance(node.op, ast.And) else out | part
            return out
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~build(node.operand)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            out = compare(sides[0], node.ops[0], sides[1])
            for i, op in enumerate(node.ops[1:], 1):
                out = out & compare(sides[i], op, sides[i + 1])
            return out
        if isinstance(node, ast.Name):
            return compare(node, ast.Eq(), ast.Constant(True))
        raise InvalidArgument(f"{what}: {ast.unparse(node)!r} is not a comparison")

    return build(tree)
