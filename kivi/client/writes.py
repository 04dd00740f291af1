"""Writes of rows as the bytes of their messages: an application that counts sends the same ones again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from kivi.model.schema import TableSchema
from kivi.model.types import INT64_MAX, INT64_MIN
from kivi.wire.codec import fill_values
from kivi.wire.v1 import session_pb2

__all__ = ["KINDS", "encoded_delta", "encoded_write"]

Operation = session_pb2.Operation
KINDS: Final = {
    "put": Operation.KIND_PUT,
    "delta": Operation.KIND_DELTA,
    "insert": Operation.KIND_INSERT,
    "delete": Operation.KIND_DELETE,
    "guard": Operation.KIND_GUARD,
}
_REMEMBERED: Final = 1_024


def encoded_write(
    schema: TableSchema, kind: str, key: Iterable[Any], values: Mapping[str, Any], columns: Iterable[str], bodies: Any
) -> bytes:
    """A write in stored form, as an encoded Writes; its long values are appended to ``bodies``.

    ``columns``: the names of what ``values`` has, or of what is guarded.
    """
    writes = session_pb2.Writes()
    operation = writes.operations.add(kind=KINDS[kind], table=schema.name, table_id=schema.id, columns=columns)
    fill_values(operation.key, key)
    fill_values(operation.values, values.values(), bodies)
    return writes.SerializeToString()


def encoded_delta(schema: TableSchema, key: Any, values: Mapping[str, Any]) -> bytes | None:
    """A delta that a caller wrote, as ``encoded_write`` of it in stored form; None: it is not of integers alone.

    Integers are their own stored form, if their columns are of int64 and they fit, which is all there is to check.
    What comes again is encoded once: that takes 0.5 us, and 3.5 us otherwise.
    """
    encode = schema.memo.get(encoded_delta)
    if encode is None:
        encode = schema.remembered(encoded_delta, lambda: _of_integers(schema))
    if type(key) is not tuple or len(key) != len(schema.key):
        return None
    try:
        encoded: bytes | None = encode((*values,), *key, *values.values())
        return encoded
    except TypeError:  # it cannot be looked up
        return None


def _of_integers(schema: TableSchema) -> Callable[..., bytes | None]:
    """Encodes deltas, given the names of their columns, and their key and values one after the other."""
    keys = len(schema.key)
    takes = {column.name for column in schema.columns if column.type.name == "int64" and column.operator is not None}

    @lru_cache(_REMEMBERED, typed=True)
    def encode(names: tuple[str, ...], *cells: object) -> bytes | None:
        if not (names and takes.issuperset(names) and schema.kind == "row" and schema.counted):
            return None
        if any(type(cell) is not int or not INT64_MIN <= cell <= INT64_MAX for cell in cells):
            return None
        return encoded_write(schema, "delta", cells[:keys], dict(zip(names, cells[keys:], strict=True)), names, None)

    return encode
