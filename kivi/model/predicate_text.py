"""Values and predicates as people type them: ``endpoint_id == 251 & slot >= '2023-11-16T18:00:00Z'``."""

from __future__ import annotations

import ast
import contextlib
import datetime as dt
import decimal
import functools
import itertools
import operator
import re
import tokenize
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.derived_columns import FUNCTIONS
from kivi.model.expressions import (
    HIERARCHY,
    TEXT,
    TIME_PARTS,
    Expr,
    Value,
    bind,
    bind_value,
    case,
    coalesce,
    col,
    lit,
    quad,
    within_km,
)
from kivi.model.types import ColumnType, shown

__all__ = ["expression", "parse_moment", "parse_value", "split_names", "type_names", "where"]


_MEASURED: Final = re.compile(r"(?!(?:decimal|list|top|quantiles)\()\w+\((.*)\)")
"""The operator of a column, or the kind of its measure, around its type."""


def type_names(description: Mapping[str, Any]) -> dict[str, str]:
    """Each column's plain type: ``sum(int64)`` is int64."""
    out: dict[str, str] = {}
    for name, declared in {**description["key"], **description["columns"]}.items():
        match = _MEASURED.fullmatch(declared)
        out[name] = match[1] if match else declared
    return out | dict.fromkeys(description.get("derived", {}), "float64")


def split_names(text: str) -> list[str]:
    """``endpoint_id, quantile(latency, 0.99)`` -> the names of columns, of which some may be expressions."""
    return [name.strip() for name in re.split(r",(?![^()]*\))", text)]


def parse_moment(text: str, what: str) -> dt.datetime:
    """ISO 8601; without an offset it is UTC."""
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(f"{what}: {shown(text)} is not a time like 2023-11-16T18:00:00Z") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)


_DAY: Final = r"(19\d\d|20\d\d)(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])"
"""Of 1900 to 2099, without signs between its parts."""


def parse_value(type_name: str, text: str, what: str = "value") -> Any:
    """The typed text as a value of the column's type. ``null`` is null; ``'null'`` in quotes is the text."""
    if text == "null":
        return None
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    try:
        if "_" in text and type_name.startswith(("int64", "float64", "decimal")):
            raise ValueError  # Python's way to write a thousand, which nobody else reads as one
        if type_name == "int64":
            return int(text)
        if type_name == "float64":
            return float(text)
        if type_name.startswith("decimal"):
            return decimal.Decimal(text)
    except (ValueError, decimal.InvalidOperation):
        raise InvalidArgument(f"{what}: {shown(text)} is not a {type_name}") from None
    if type_name == "bool":
        if text.lower() not in ("true", "false"):
            raise InvalidArgument(f"{what}: {shown(text)} is not true or false")
        return text.lower() == "true"
    if type_name == "timestamp":
        if day := re.fullmatch(_DAY, text):
            raise InvalidArgument(
                f"{what}: {text} would be a moment of 1970, in microseconds: write the day as {'-'.join(day.groups())}"
            )
        return int(text) if re.fullmatch(r"-?\d{1,20}", text) else parse_moment(text, what)
    if type_name == "bytes":
        try:
            return bytes.fromhex(text[2:]) if text.startswith("0x") else text.encode()
        except ValueError:
            raise InvalidArgument(f"{what}: {shown(text)} is not hexadecimal") from None
    return text


# -- predicates -------------------------------------------------------------------------------------

_WORDS: Final = {"&": " and ", "|": " or ", "~": " not "}
_CALCULATE: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
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
    """``&``, ``|`` and ``~`` as ``and``, ``or`` and ``not``, which bind weaker than comparisons.

    Two texts side by side, which are one to Python, are refused: ``'O''Brien'`` is one with a quote in it to SQL.
    """
    out, before = list[str](), tokenize.ENCODING
    try:
        lines = re.findall(r"[^\n]*\n|[^\n]+", text)  # not splitlines, for which more characters end a line
        for token in tokenize.generate_tokens(iter(lines).__next__):
            if token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER, tokenize.INDENT, tokenize.DEDENT):
                continue
            if token.type == tokenize.ERRORTOKEN:  # a literal that its line does not end, before Python 3.12
                raise SyntaxError
            if before == token.type == tokenize.STRING:
                raise InvalidArgument(
                    f"{what} {shown(text)} has two texts side by side: write a quote within a text with a backslash "
                    "before it, or put the text into quotes of the other kind"
                )
            before = token.type
            out.append(_WORDS.get(token.string, token.string) if token.type == tokenize.OP else token.string)
    except tokenize.TokenError:
        raise SyntaxError from None
    return " ".join(out).strip()


def where(text: str, types: Mapping[str, str], what: str = "--where") -> Expr:
    """``tokens * price > 100 & slot >= '2023-11-16T18:00:00Z'`` as a predicate; nothing is run.

    Comparisons of columns, values and arithmetic, ``in [...]``, ``is null``, ``coalesce(a, 0)``, ``case((a > 1, 'x'),
    otherwise='y')``, ``route.startswith('/v1')``, ``.contains``, ``.matches``, ``topic.under('us politics')``,
    ``.covers``, ``ts.hour()`` and the other parts of a time, and ``within_km(lat, lon, 48.9, 2.4, 5)``, joined by
    ``&``, ``|``, ``~`` or by words; in definitions of patterns ``prev(a)`` and ``next(a, 2)``, too. A quoted text
    beside a column or value of another type is read as one of that type, such as a time. A number with a point is a
    decimal if its digits fit in one, and a float64 beside a column of float64.
    ``what`` is how errors call it. Raises InvalidArgument, SchemaError.
    """
    if len(text) > 10_000:
        raise InvalidArgument(f"{what} has more than 10,000 characters")
    try:
        return _Reader(types, what).predicate(ast.parse(_spelled(text, what), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InvalidArgument(
            f"{what} {shown(text)} is not a predicate: write it like endpoint_id == 251 & slot >= "
            "'2023-11-16T18:00:00Z'"
        ) from None


def expression(text: str, types: Mapping[str, str], what: str) -> Value:
    """``tokens * price`` as an expression; as ``where``."""
    try:
        return _Reader(types, what).value(ast.parse(_spelled(text, what), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InvalidArgument(f"{what} {shown(text)} is not an expression: write it like tokens * price") from None


class _Reader:
    """Makes expressions of a syntax tree. ``types``: the names of the columns' types."""

    def __init__(self, types: Mapping[str, str], what: str) -> None:
        self._types, self._what = types, what

    def predicate(self, node: ast.expr) -> Expr:
        match node:
            case ast.BoolOp(op=op, values=values):
                join = operator.and_ if isinstance(op, ast.And) else operator.or_
                return functools.reduce(join, map(self.predicate, values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ~self.predicate(operand)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                sides = itertools.pairwise([left, *comparators])
                parts = [self._compared(a, op, b) for (a, b), op in zip(sides, ops, strict=True)]
                return functools.reduce(operator.and_, parts)
            case ast.Name() if not _is_literal(node):
                return col(self._column(node)) == True  # noqa: E712
            case ast.Call() | ast.Name() | ast.Constant(value=bool()):
                return self.value(node)
        raise InvalidArgument(f"{self._what}: {shown(ast.unparse(node))} is not a comparison")

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Expr:
        if isinstance(op, (ast.In, ast.NotIn)):
            if not isinstance(right, (ast.List, ast.Tuple, ast.Set)):
                raise InvalidArgument(f"{self._what}: {ast.unparse(left)} in [...] takes a list of values")
            of = self.value(left)
            found = of.isin([self._literal(item, of) for item in right.elts])
            return ~found if isinstance(op, ast.NotIn) else found
        if type(op) not in _COMPARE:
            raise InvalidArgument(f"{self._what}: {ast.unparse(left)} cannot be compared like that")
        first, second = self._together([left, right])
        if not isinstance(op, _ORDERS) and (_is_null(first) or _is_null(second)):
            null = (second if _is_null(first) else first).is_null()
            return null if isinstance(op, (ast.Eq, ast.Is)) else ~null
        compared: Expr = _COMPARE[type(op)](first, second)
        if compared.args:  # of a column and a literal it is checked where the schema is known
            bind(compared, self._type_of, beside=True)
        return compared

    def value(self, node: ast.expr) -> Value:
        """A value expression; a literal as one by itself."""
        match node:
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _CALCULATE:
                first, second = self._together([left, right])
                calculated: Value = _CALCULATE[type(op)](first, second)
                return calculated
            case ast.UnaryOp(op=ast.USub(), operand=operand) if not _is_literal(node):
                return -self.value(operand)
            case ast.Call(func=ast.Name(id="coalesce"), args=[_, *_] as args, keywords=[]):
                return coalesce(*self._together(args))
            case ast.Call(func=ast.Name(id="within_km"), args=[lat, lon, *circle], keywords=[]) if len(circle) == 3:
                return _as_value(self._within(lat, lon, circle))
            case ast.Call(func=ast.Name(id="quad"), args=[lat, lon], keywords=[ast.keyword("depth", depth)]):
                return quad(self.value(lat), self.value(lon), self._literal(depth, None))
            case ast.Call(func=ast.Attribute(value=of, attr=name), args=args, keywords=keywords):
                return _as_value(self._method(node, self.value(of), name, [*args, *(word.value for word in keywords)]))
            case ast.Call(func=ast.Name(id="case"), args=[_, *_] as pairs, keywords=keywords):
                return self._case(node, pairs, keywords)
            case ast.Call(func=ast.Name(id=name), args=[ast.Name(), *_], keywords=[]) if name in FUNCTIONS:
                return col(ast.unparse(node))  # a derived column that goes by its text
            case ast.Call(func=ast.Name(id="prev" | "next" as op), args=[ast.Name() as name, *by], keywords=[]):
                rows = [self._literal(each, None) for each in by] or [1]
                if len(rows) == 1:  # of how many is checked where it is bound
                    return Value(op, self._column(name), rows[0])
            case ast.Name() if not _is_literal(node):
                return col(self._column(node))
        return lit(self._literal(node, None))

    def _case(self, node: ast.expr, pairs: list[ast.expr], keywords: list[ast.keyword]) -> Value:
        found = [pair.elts for pair in pairs if isinstance(pair, ast.Tuple) and len(pair.elts) == 2]
        if len(found) < len(pairs) or [word.arg for word in keywords] not in ([], ["otherwise"]):
            raise InvalidArgument(
                f"{self._what}: {shown(ast.unparse(node))}: write case((condition, value), ..., otherwise=value)"
            )
        values = self._together([value for _, value in found] + [word.value for word in keywords])
        conditions = [self.predicate(condition) for condition, _ in found]
        return case(*zip(conditions, values, strict=False), otherwise=values[-1] if keywords else None)

    def _within(self, lat: ast.expr, lon: ast.expr, circle: Sequence[ast.expr]) -> Expr:
        numbers = [self._literal(each, None) for each in circle]
        at_lat, at_lon, km = (float(each) if isinstance(each, decimal.Decimal) else each for each in numbers)
        return within_km(self.value(lat), self.value(lon), at_lat, at_lon, km)

    def _method(self, node: ast.expr, of: Value, name: str, args: Sequence[ast.expr]) -> Expr:
        most = 2 if name in HIERARCHY else 1
        if (name in TEXT or name in HIERARCHY or name in TIME_PARTS) and (name not in TIME_PARTS) <= len(args) <= most:
            beside = None if name in TIME_PARTS else of
            literals = [self._literal(arg, None if i else beside) for i, arg in enumerate(args)]
            made: Expr = getattr(of, name)(*literals)
            bind_value(made, self._type_of, beside=True)
            return made
        raise InvalidArgument(
            f"{self._what}: {shown(ast.unparse(node))}: write text.startswith('a'), .contains('a'), .matches('^a'), "
            f"topic.under('a'), .covers('a'), or time.hour('Europe/Paris'), of {', '.join(TIME_PARTS)}"
        )

    def _together(self, nodes: Sequence[ast.expr]) -> list[Value]:
        """Operands that stand beside each other: a column or what is calculated says what the literals mean."""
        out = [None if _is_literal(node) else self.value(node) for node in nodes]
        beside = next((value for value in out if value is not None), None)
        return [
            lit(self._literal(node, beside)) if value is None else value for node, value in zip(nodes, out, strict=True)
        ]

    # -- names, types and literals ------------------------------------------------------------------

    def _column(self, node: ast.Name) -> str:
        if node.id not in self._types:
            raise SchemaError(f"{self._what}: there is no column {shown(node.id)}; there are {', '.join(self._types)}")
        return node.id

    def _type_of(self, name: str) -> ColumnType:
        return ColumnType.read(self._type_name(name))

    def _type_name(self, name: str) -> str:
        return self._types.get(name, "float64")  # of what is derived, by its text

    def _type(self, value: Value) -> str:
        return (
            self._type_name(value.column)
            if value.op == "col"
            else str(bind_value(value, self._type_of, beside=True)[1])
        )

    def _literal(self, node: ast.expr, beside: Value | None) -> Any:
        """``beside``: a value that it is compared with or added to, if there is such a one."""
        if isinstance(node, ast.Name) and _is_literal(node):
            return _CONSTANTS[node.id]
        try:
            value = ast.literal_eval(node)
        except (ValueError, SyntaxError, TypeError):
            raise InvalidArgument(f"{self._what}: {shown(ast.unparse(node))} is neither a column nor a value") from None
        if beside is not None and isinstance(value, str) and (type_name := self._type(beside)) != "string":
            return parse_value(type_name, value, f"{self._what} {beside}")
        if isinstance(value, float) and (
            beside is None
            or "decimal" in (type_name := self._type(beside))
            or (not beside.column and type_name != "float64")
        ):
            exact = decimal.Decimal(repr(value))
            with contextlib.suppress(InvalidArgument):  # it has more digits than a decimal
                bind_value(lit(exact), self._type_of)
                return exact
        return value


_ORDERS: Final = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def _as_value(expr: Expr) -> Value:
    """A predicate may stand beside others, as a value of bool."""
    return expr if isinstance(expr, Value) else Value(expr.op, expr.column, expr.value, expr.args)


def _is_null(value: Value) -> bool:
    return value.op == "lit" and value.value is None


_CONSTANTS: Final = {"null": None, "true": True, "false": False}


def _is_literal(node: ast.expr) -> bool:
    """Numbers, texts, null, true, false, and what is written like none of the rest, to be refused as a literal."""
    match node:
        case ast.Name(id=name):
            return name in _CONSTANTS
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant()):
            return True
        case ast.BinOp() | ast.Call() | ast.UnaryOp():
            return False
    return True
