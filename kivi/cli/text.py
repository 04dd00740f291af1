"""Text in, text out: values as they are typed, predicates, and rows as tables, JSON or CSV."""

from __future__ import annotations

import csv
import datetime as dt
import decimal
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TextIO

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.predicate_text import parse_value, type_names, where

__all__ = [
    "assignments",
    "key_of",
    "outputs",
    "parse_value",
    "print_rows",
    "print_value",
    "type_names",
    "where",
]

_WIDTHS_FROM: Final = 500  # a table's column widths are those of its first rows, so that rows appear as they come


# -- values -----------------------------------------------------------------------------------------


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


def key_of(description: Mapping[str, Any], words: Sequence[str], *, partial: bool = False) -> tuple[Any, ...]:
    """Words as a key, or as its first columns."""
    names = list(description["key"])
    if len(words) > len(names) or (len(words) < len(names) and not partial):
        raise InvalidArgument(
            f"a key of {description['name']!r} is {' '.join(names) or 'nothing: it is an event table'}; "
            f"{len(words)} values were given"
        )
    return tuple(
        parse_value(description["key"][name], word, f"key column {name!r}")
        for name, word in zip(names, words, strict=False)
    )


def outputs(description: Mapping[str, Any], chosen: str | None) -> list[str]:
    if chosen:
        return [name.strip() for name in chosen.split(",")]
    return [*description["key"], *description["columns"], *description.get("derived", {})]


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
