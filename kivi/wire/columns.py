"""Rows in a message, by columns: the shape in which they reach clients, but for Arrow's batches of many.

What a value costs in Python is paid once for a column: twelve rows of six columns are encoded in 25 us, and in 90 as a
message for each value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from kivi.model.schema import TableSchema
from kivi.model.types import STATES, ColumnType
from kivi.wire.v1 import types_pb2 as pb

__all__ = ["column_writer", "rows_of", "rows_reader"]

_FLOAT: Final = ColumnType("float64")  # a derived column's
_MEMBER: Final[dict[str, str]] = {
    "bool": "bools",
    "int64": "ints",
    "decimal": "ints",
    "timestamp": "ints",
    "float64": "floats",
    "string": "strings",
    "bytes": "blobs",
    **dict.fromkeys(STATES, "blobs"),
}
_CONVERTED: Final = frozenset({"decimal", "timestamp", *STATES})
_ABSENT: Final[dict[str, Any]] = {"bools": False, "ints": 0, "floats": 0.0, "strings": "", "blobs": b""}


def column_writer(schema: TableSchema, names: Sequence[str]) -> Callable[[Any, Iterable[Sequence[Any]]], None]:
    """Adds columns in stored form, of at least one row, to a repeated ColumnValues field; made once for each choice.

    What it gives raises OutOfRange for a sum that has outgrown its column.
    """
    return schema.remembered((column_writer, names), lambda: _column_writer(schema, names))


def _column_writer(schema: TableSchema, names: Sequence[str]) -> Callable[[Any, Iterable[Sequence[Any]]], None]:
    plan = []
    for name in names:
        column = schema.by_name.get(name)
        type_ = _FLOAT if column is None else column.type
        member = _MEMBER[type_.name]
        sums = column is not None and column.operator is not None and not type_.is_state
        plan.append((member, _ABSENT[member], _checked(type_, name) if sums else None))

    def write(target: Any, columns: Iterable[Sequence[Any]]) -> None:
        for (member, absent, check), values in zip(plan, columns, strict=True):
            packed = target.add()
            if None in values:
                packed.nulls.extend([i for i, value in enumerate(values) if value is None])
                values = [absent if value is None else value for value in values]
            if check is not None:
                check(values)
            getattr(packed, member).extend(values)

    return write


def _checked(type_: ColumnType, name: str) -> Callable[[Sequence[Any]], None] | None:
    low, high = type_.stored_min, type_.stored_max

    def integers(values: Sequence[int]) -> None:
        if min(values) < low or high < max(values):
            each(values)

    def each(values: Sequence[Any]) -> None:
        for value in values:
            type_.from_stored(value, name)

    return integers if type_.is_integer else each


def _values(column: pb.ColumnValues) -> list[Any]:
    """In stored form, whatever its type is."""
    values = [*(column.ints or column.floats or column.strings or column.bools or column.blobs)]
    for i in column.nulls:
        values[i] = None
    return values


def rows_of(columns: Iterable[pb.ColumnValues]) -> list[tuple[Any, ...]]:
    """The rows, each as its values in stored form."""
    return [*zip(*map(_values, columns), strict=True)]


def rows_reader(schema: TableSchema, names: Sequence[str]) -> Callable[[Sequence[Sequence[Any]]], list[dict[str, Any]]]:
    """Makes of ``rows_of`` what callers see; made once for each choice of columns."""
    return schema.remembered((rows_reader, names), lambda: _rows_reader(schema, names))


def _rows_reader(
    schema: TableSchema, names: Sequence[str]
) -> Callable[[Sequence[Sequence[Any]]], list[dict[str, Any]]]:
    types = [(i, name, schema.by_name[name].type) for i, name in enumerate(names) if name in schema.by_name]
    converted = [(i, name, type_.from_stored_all) for i, name, type_ in types if type_.name in _CONVERTED]

    def read(rows: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
        if converted and rows:
            columns: list[Sequence[Any]] = [*zip(*rows, strict=True)]
            for i, name, as_seen in converted:
                columns[i] = as_seen(columns[i], name)
            rows = [*zip(*columns, strict=True)]
        return [dict(zip(names, values, strict=True)) for values in rows]

    return read
