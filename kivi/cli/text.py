"""Text in, text out: values as they are typed, predicates, and rows as tables, JSON or CSV."""

from __future__ import annotations

import argparse
import datetime as dt
import decimal
import itertools
import json
import math
import re
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TextIO

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.csv_texts import csv_line
from kivi.model.predicate_text import parse_value, split_names, type_names
from kivi.model.quantiles import Quantiles
from kivi.model.types import check_unit
from kivi.model.values import Top

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "assignments",
    "key_of",
    "objects",
    "outputs",
    "plain",
    "print_columns",
    "print_result",
    "print_rows",
    "print_value",
    "shown",
    "time_of",
    "times_of",
]

_NUMBER_OR_NOTHING: Final = re.compile(r"(-?[\d.]+(e[+-]?\d+)?)?")
_WIDTHS_FROM: Final = 500  # a table's column widths are those of its first rows, so that rows appear as they come


# -- values -----------------------------------------------------------------------------------------


def times_of(args: argparse.Namespace) -> dict[str, Any]:
    """``--start`` and ``--end``; None where one is not given."""
    given = {"start": args.start, "end": args.end}
    return {name: time_of(text, f"--{name}") if text else None for name, text in given.items()}


def time_of(text: str, option: str) -> Any:
    """A moment as it is typed. Raises InvalidArgument, too, for one that must be in seconds or milliseconds."""
    moment = parse_value("timestamp", text, option)
    check_unit([moment], option)
    return moment


def assignments(description: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """``column=value`` words as values."""
    types, out = type_names(description), {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise InvalidArgument(f"{word!r} is not column=value")
        if name not in types:
            raise SchemaError(f"table {description['name']!r} has no column {name!r}; it has {', '.join(types)}")
        if name in out:
            raise InvalidArgument(f"column {name!r} is named twice: which of the values is it?")
        out[name] = parse_value(types[name], text, f"column {name!r}")
        if types[name] == "timestamp":
            check_unit([out[name]], f"column {name!r}")
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
        return split_names(chosen)
    return [*description["key"], *description["columns"], *description.get("derived", {})]


# -- output -----------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, dt.datetime):
        moment = value if value.tzinfo is None else value.astimezone(dt.UTC)  # SQL has moments of no time zone
        return moment.isoformat().replace("+00:00", "Z")
    if isinstance(value, decimal.Decimal):
        return f"{value:f}"
    if isinstance(value, (bytes, bytearray)):
        return "0x" + bytes(value).hex()
    if isinstance(value, (dt.date, dt.time, dt.timedelta, uuid.UUID)):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (Quantiles, Top)):
        return plain(value.to_plain())
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def shown(value: Any) -> str:
    """A value as a cell of a table or of CSV: of quantiles ``count=1000 p50=344.812 p95=651.006 p99=689.624``."""
    if isinstance(value, Quantiles):
        return repr(value).removeprefix("Quantiles(").rstrip(")").replace(",", "")
    value = plain(value)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def print_rows(rows: Iterable[Mapping[str, Any]], names: Sequence[str], style: str, out: TextIO | None = None) -> None:
    """Prints rows as they come. JSON is one object a line."""
    if style == "json":
        _print_objects(rows, out)
    else:
        _print_cells(([row.get(name) for name in names] for row in rows), names, style, out)


def print_result(result: Any, args: argparse.Namespace) -> None:
    """Prints the answer of a question, and with ``--explain`` how it was found."""
    if args.explain:
        print(result.explain(), file=sys.stderr)
    print_rows(result, result.to_arrow().column_names, args.output)


def print_columns(table: pa.Table, style: str) -> None:
    """Prints a table of Arrow, of which several columns may have one name."""
    if style == "json":
        _print_objects(objects(table), None)
    else:
        _print_cells(_rows(table), table.column_names, style, None)


def objects(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Its rows, as they come: of columns with one name the later ones are called ``name_1``, ``name_2``."""
    from kivi.arrow.columns import distinct_names

    names = distinct_names(table.column_names)
    return (dict(zip(names, row, strict=True)) for row in _rows(table))


def _rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    return (row for batch in table.to_batches() for row in zip(*map(_values, batch.columns), strict=True))


def _print_objects(rows: Iterable[Mapping[str, Any]], out: TextIO | None) -> None:
    for row in rows:
        print(json.dumps(plain(row), ensure_ascii=False, allow_nan=False), file=out or sys.stdout)


def _print_cells(rows: Iterable[Sequence[Any]], names: Sequence[str], style: str, out: TextIO | None) -> None:
    out = out or sys.stdout
    if style == "csv":
        print(csv_line(names), file=out)
        for row in rows:
            print(csv_line(None if value is None else shown(value) for value in row), file=out)
        return
    cells = (list(map(shown, row)) for row in rows)
    first = list(itertools.islice(cells, _WIDTHS_FROM))
    columns = list(zip(names, *first, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [any(found) and all(map(_NUMBER_OR_NOTHING.fullmatch, found)) for _, *found in columns]
    for line in itertools.chain([names, ["-" * width for width in widths]], first, cells):
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ]
        print("  ".join(padded).rstrip(), file=out)


def _values(column: pa.Array) -> list[Any]:
    from kivi.arrow.columns import is_hugeint

    if is_hugeint(column.type):
        return [None if value is None else int(value) for value in column.to_pylist()]
    try:
        if str(column.type) != "timestamp[ns]":  # whose infinite moments are some of pandas
            return column.to_pylist()  # type: ignore[no-any-return]
    except (ValueError, OverflowError):  # moments and days that Python has none of
        pass
    return list(map(_value, column))


def _value(scalar: pa.Scalar) -> Any:
    """As ``as_py``, but moments and days beyond Python's as text; DuckDB's infinite ones are the ends of the range."""
    import pyarrow as pa

    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.MapScalar):
        return [(_value(each["key"]), _value(each["value"])) for each in scalar.values]
    if isinstance(scalar, pa.StructScalar):
        return {name: _value(scalar[name]) for name in scalar}
    if isinstance(scalar, (pa.ListScalar, pa.LargeListScalar, pa.FixedSizeListScalar)):
        return list(map(_value, scalar.values))
    is_moment = isinstance(scalar, (pa.TimestampScalar, pa.Date32Scalar))
    if is_moment and abs(scalar.value) == 2 ** (scalar.type.bit_width - 1) - 1:
        return "infinity" if scalar.value > 0 else "-infinity"
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        return str(scalar.cast(pa.string()))


def print_value(value: Mapping[str, Any], style: str) -> None:
    """One thing with named parts: a row of two columns per part, or a JSON document."""
    if style == "json":
        print(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False))
        return
    print_rows([{"name": name, "value": inner} for name, inner in value.items()], ["name", "value"], style)
