"""Text in, text out: values as they are typed, predicates, and rows as tables, JSON or CSV."""

from __future__ import annotations

import ast
import csv
import datetime as dt
import decimal
import io
import json
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TextIO

from kivi.errors import InvalidArgument, SchemaError
from kivi.expr import Expr, col

__all__ = ["assignments", "parse_value", "print_rows", "print_value", "type_names", "where"]

_WIDTHS_FROM: Final = 500  # a table's column widths are those of its first rows, so that rows appear as they come


# -- values -----------------------------------------------------------------------------------------


def type_names(description: Mapping[str, Any]) -> dict[str, str]:
    """Each column's plain type: ``sum(int64)`` is int64."""
    out: dict[str, str] = {}
    for name, declared in {**description["key"], **description["columns"]}.items():
        match = re.fullmatch(r"(?:sum|min|max)\((.*)\)", declared)
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
    """What was typed, as a value of the column's type. ``null`` is null; ``'null'`` in quotes is the text."""
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


def assignments(description: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """``column=value`` words as values."""
    types, out = type_names(description), {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise InvalidArgument(f"{word!r} is not column=value")
        if name not in types:
            raise SchemaError(f"table {description['name']!r} has no column {name!r}; it has {', '.join(types)}")
        out[name] = parse_value(types[name], text, f"column {name!r}")
    return out


# -- predicates -------------------------------------------------------------------------------------

_WORDS: Final = {"&": " and ", "|": " or ", "~": " not "}
_COMPARE: Final[dict[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: lambda column, value: column == value,
    ast.NotEq: lambda column, value: column != value,
    ast.Lt: lambda column, value: column < value,
    ast.LtE: lambda column, value: column <= value,
    ast.Gt: lambda column, value: column > value,
    ast.GtE: lambda column, value: column >= value,
    ast.Is: lambda column, value: column == value,
    ast.IsNot: lambda column, value: column != value,
}
_MIRROR: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
    ast.Eq: ast.Eq,
    ast.NotEq: ast.NotEq,
}


def _spelled(text: str) -> str:
    """``&``, ``|`` and ``~`` as ``and``, ``or`` and ``not``, which bind weaker than comparisons."""
    out = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER, tokenize.INDENT, tokenize.DEDENT):
                continue
            out.append(_WORDS.get(token.string, token.string) if token.type == tokenize.OP else token.string)
    except (tokenize.TokenError, SyntaxError):
        raise InvalidArgument(f"--where {text!r} is not a predicate") from None
    return " ".join(out).strip()


def where(text: str, types: Mapping[str, str]) -> Expr:
    """``endpoint_id == 251 & slot >= '2023-11-16T18:00:00Z'`` as a predicate; only comparisons, nothing is run."""
    if len(text) > 10_000:
        raise InvalidArgument("--where has more than 10,000 characters")
    try:
        tree = ast.parse(_spelled(text), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InvalidArgument(
            f"--where {text!r} is not a predicate: write it like endpoint_id == 251 & slot >= '2023-11-16T18:00:00Z'"
        ) from None

    def literal(node: ast.expr, name: str) -> Any:
        if isinstance(node, ast.Name) and node.id in ("null", "true", "false"):
            return {"null": None, "true": True, "false": False}[node.id]
        try:
            value = ast.literal_eval(node)
        except (ValueError, SyntaxError, TypeError):
            raise InvalidArgument(f"--where compares {name!r} with {ast.unparse(node)!r}, which is no value") from None
        if isinstance(value, str) and types[name] not in ("string",):
            return parse_value(types[name], value, f"--where {name}")
        if isinstance(value, float) and types[name].startswith("decimal"):
            return decimal.Decimal(str(value))
        return value

    def column(node: ast.expr) -> str:
        if not isinstance(node, ast.Name):
            raise InvalidArgument(f"--where: {ast.unparse(node)!r} is not a column")
        if node.id not in types:
            raise SchemaError(f"--where: there is no column {node.id!r}; there are {', '.join(types)}")
        return node.id

    def compare(left: ast.expr, op: ast.cmpop, right: ast.expr) -> Expr:
        kind = type(op)
        if not isinstance(left, ast.Name) and isinstance(right, ast.Name) and kind in _MIRROR:
            left, right, kind = right, left, _MIRROR[kind]
        name = column(left)
        if isinstance(op, (ast.In, ast.NotIn)):
            if not isinstance(right, (ast.List, ast.Tuple, ast.Set)):
                raise InvalidArgument(f"--where: {name} in [...] takes a list of values")
            found = col(name).isin([literal(item, name) for item in right.elts])
            return ~found if isinstance(op, ast.NotIn) else found
        if kind not in _COMPARE:
            raise InvalidArgument(f"--where: {ast.unparse(left)} cannot be compared like that")
        result = _COMPARE[kind](col(name), literal(right, name))
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
        raise InvalidArgument(f"--where: {ast.unparse(node)!r} is not a comparison")

    return build(tree)


# -- output -----------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return "0x" + bytes(value).hex()
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def shown(value: Any) -> str:
    value = plain(value)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    return str(value)


def print_rows(rows: Iterable[Mapping[str, Any]], names: Sequence[str], style: str, out: TextIO | None = None) -> int:
    """Prints rows as they come, and returns their number. JSON is one object a line."""
    out = out or sys.stdout
    count = 0
    if style == "json":
        for row in rows:
            print(json.dumps(plain(row), ensure_ascii=False), file=out)
            count += 1
        return count
    if style == "csv":
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(names)
        for row in rows:
            writer.writerow([shown(row.get(name)) for name in names])
            count += 1
        return count
    waiting: list[list[str]] = []
    widths: list[int] = []
    numeric: list[bool] = []

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    def flush() -> None:
        if not widths:
            for i, name in enumerate(names):
                widths.append(max([len(name), *(len(cells[i]) for cells in waiting)]))
                cells = [cells[i] for cells in waiting if cells[i]]
                numeric.append(bool(cells) and all(re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", cell) for cell in cells))
            print(line(list(names)), file=out)
            print("  ".join("-" * width for width in widths), file=out)
        for cells in waiting:
            print(line(cells), file=out)
        waiting.clear()

    for row in rows:
        waiting.append([shown(row.get(name)) for name in names])
        count += 1
        if len(waiting) >= _WIDTHS_FROM:
            flush()
    flush()
    return count


def print_value(value: Mapping[str, Any], style: str, out: TextIO | None = None) -> None:
    """One thing with named parts: a row of two columns per part, or a JSON document."""
    out = out or sys.stdout
    if style == "json":
        print(json.dumps(plain(value), indent=2, ensure_ascii=False), file=out)
        return
    print_rows([{"name": name, "value": inner} for name, inner in value.items()], ["name", "value"], style, out)
