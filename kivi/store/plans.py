"""Plans: small requests of known shape are held to their tables' columns by what is made once for each table.

They are the deltas and puts of transactions that have read nothing (``kivi.mvcc.groups.Writes``), and reads by key. A
plan gives None for whatever is not of that shape; such a request is translated like any other,
which accepts it or says what is wrong with it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from kivi.delta.ops import Barrier, RowOp
from kivi.encoding.base_rows import RowLayout
from kivi.encoding.keys import encode_key
from kivi.model.schema import TableSchema
from kivi.model.types import MOMENT_MAX_US, MOMENT_MIN_US, ColumnType
from kivi.store.catalog import schema_guard

__all__ = ["GetPlan", "WritePlan"]

_SIGN: Final = 1 << 63
_NOTHING: Final[dict[int, Any]] = {}
_KEY_CHARACTERS_MAX: Final = 256  # longer keys are measured on the general way, and so is longer text
_TEXT_CHARACTERS_MAX: Final = 1_024
_KINDS: Final[dict[str, Any]] = {"int64": int, "timestamp": int, "decimal": int, "float64": float, "string": str}


class WritePlan:
    """Reads deltas and puts of one row table. Values are in stored form."""

    __slots__ = ("_columns", "_text_max", "guard", "id", "key", "origin")

    def __init__(self, schema: TableSchema, max_value_bytes: int) -> None:
        self.id, self.origin = schema.id, schema.origin
        self.guard = schema_guard(schema.id)
        self._text_max = min(_TEXT_CHARACTERS_MAX, max_value_bytes // 4)
        self._columns: dict[str, tuple[int, ColumnType, Any, bool]] = {
            column.name: (i, column.type, _KINDS[column.type.name], column.operator is not None)
            for i, column in enumerate(schema.columns)
            if column.type.name in _KINDS
        }
        encode = _key_of([column.type for column in schema.key])
        self.key: Callable[[Sequence[Any]], bytes | None] = (
            _written(schema, encode) if schema.has_time_in_key else encode
        )

    def deltas(self, names: Iterable[str], values: Sequence[Any]) -> RowOp | None:
        """One delta for each of some columns."""
        found = self._cells(names, values, deltas=True)
        return RowOp(Barrier.PATCH, _NOTHING, found) if found else None

    def puts(self, names: Iterable[str], values: Sequence[Any]) -> RowOp | None:
        """The new values of some columns."""
        found = self._cells(names, values, deltas=False)
        return RowOp(Barrier.PATCH, found, _NOTHING) if found else None

    def _cells(self, names: Iterable[str], values: Sequence[Any], *, deltas: bool) -> dict[int, Any] | None:
        found: dict[int, Any] = {}
        value: Any
        for name, value in zip(names, values, strict=True):
            column = self._columns.get(name)
            if column is None:
                return None
            i, type_, kind, has_operator = column
            if kind is not type(value) or i in found or (deltas and not has_operator):
                return None
            if kind is float:
                if not math.isfinite(value):
                    return None
                value += 0.0  # -0.0 + 0.0 is 0.0
            elif kind is str:
                if len(value) > self._text_max:
                    return None
            elif type_.name in ("decimal", "timestamp") and not type_.stored_min <= value <= type_.stored_max:
                return None
            found[i] = value
        return found


class GetPlan:
    """A read of rows by key from one table: ``columns``. ``is_bounded``: its rows are of fixed width, so that thousands
    fit a message."""

    __slots__ = ("columns", "is_bounded", "key", "schema")

    def __init__(self, schema: TableSchema, columns: tuple[str, ...]) -> None:
        self.schema = schema
        self.columns = columns
        self.is_bounded = RowLayout.of(schema).fixed
        self.key: Callable[[Sequence[Any]], bytes | None] = _key_of([column.type for column in schema.key])

    @staticmethod
    def of(schema: TableSchema, columns: Sequence[str] | None) -> GetPlan | None:
        """None if it has no rows by key."""
        if schema.kind == "event":
            return None
        wanted = schema.output_names if columns is None else tuple(columns)
        return schema.remembered((GetPlan, wanted), lambda: GetPlan(schema, wanted))


def _written(schema: TableSchema, encode: Callable[[Sequence[Any]], bytes | None]) -> Callable[..., bytes | None]:
    """``encode`` of keys whose times are such as a datetime holds, as those of rows that are written have to be."""
    times = [i for i, column in enumerate(schema.key) if column.type.name == "timestamp"]

    def encoded(values: Sequence[Any]) -> bytes | None:
        key = encode(values)
        return key if key is not None and all(MOMENT_MIN_US <= values[i] <= MOMENT_MAX_US for i in times) else None

    return encoded


def _key_of(types: list[ColumnType]) -> Callable[[Sequence[Any]], bytes | None]:
    """Encodes complete keys in stored form; None for what is not just so."""
    kinds = [_KINDS.get(type_.name) for type_ in types]
    if any(type_.name not in ("int64", "timestamp", "string") for type_ in types):
        return lambda values: None
    if kinds == [int]:
        return lambda values: (values[0] + _SIGN).to_bytes(8, "big") if [*map(type, values)] == kinds else None
    if kinds == [int] * len(kinds):
        pack = struct.Struct(f">{len(kinds)}Q").pack
        return lambda values: pack(*[v + _SIGN for v in values]) if [*map(type, values)] == kinds else None

    def encoded(values: Sequence[Any]) -> bytes | None:
        if [*map(type, values)] != kinds:
            return None
        if sum(len(value) for value in values if type(value) is str) > _KEY_CHARACTERS_MAX:
            return None
        return encode_key(types, values)

    return encoded
