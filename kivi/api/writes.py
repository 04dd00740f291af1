"""Writes of rows: what a caller wrote, checked against the table's schema, in stored form.

Each function takes what the method of its name takes and returns a ``Bind``, which a transaction applies to the schema:
a client may do that twice, when the schema that it remembers turns out to be old.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from kivi.model.schema import TableSchema

__all__ = ["Bind", "Write", "delete", "delta", "guard", "insert", "put"]

_NOTHING: Final[Mapping[str, Any]] = {}


class Write(NamedTuple):
    """One write. ``column`` is that of a guard; None guards the row's existence."""

    kind: Literal["put", "delta", "insert", "delete", "guard"]
    key: tuple[Any, ...]
    values: Mapping[str, Any] = _NOTHING
    column: str | None = None


Bind = Callable[[TableSchema], Write]


def put(key: Sequence[Any], values: Mapping[str, Any]) -> Bind:
    return lambda schema: Write("put", schema.stored_key(key), schema.stored_put(values))


def delta(key: Sequence[Any], values: Mapping[str, Any]) -> Bind:
    return lambda schema: Write("delta", schema.stored_key(key), schema.stored_delta(values))


def insert(key: Sequence[Any], values: Mapping[str, Any]) -> Bind:
    return lambda schema: Write("insert", schema.stored_key(key), schema.stored_put(values))


def delete(key: Sequence[Any]) -> Bind:
    def bind(schema: TableSchema) -> Write:
        schema.stored_put({})  # refuses event and aggregate tables
        return Write("delete", schema.stored_key(key))

    return bind


def guard(key: Sequence[Any], column: str | None) -> Bind:
    def bind(schema: TableSchema) -> Write:
        schema.check_guardable(column)
        return Write("guard", schema.stored_key(key), column=column)

    return bind
