"""Writes of rows as the bytes of their messages, without the messages: an application that counts sends little else.

What is the same in all writes of one kind to the same columns of a table is encoded once, and so are small integers
that come again. A delta of one column took 3.1 us to be filled into a message and encoded with it, and takes 1.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from kivi.model.schema import TableSchema
from kivi.model.types import INT64_MAX, INT64_MIN
from kivi.wire.codec import delimited, fill_values, prefix, tag
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
_OPERATIONS: Final = tag(session_pb2.Request, "operations")
_KEY: Final = tag(Operation, "key")
_VALUES: Final = tag(Operation, "values")
_REMEMBERED: Final = 1_024
_CHOICES: Final = 64  # of columns of a table


def encoded_write(
    schema: TableSchema, kind: str, key: Iterable[Any], values: Mapping[str, Any], columns: tuple[str, ...]
) -> bytes:
    """A write in stored form, as one of a request's ``operations``.

    ``columns``: the names of what ``values`` has, or of what is guarded.
    """
    head, names = schema.remembered((encoded_write, kind, columns), lambda: _form(schema, kind, columns))
    body = b"".join((head, _fields(_KEY, key), names, _fields(_VALUES, values.values())))
    return delimited(_OPERATIONS, body)


def encoded_delta(schema: TableSchema, key: Any, values: Mapping[str, Any]) -> bytes | None:
    """A delta that a caller wrote, as ``encoded_write`` of it in stored form; None: it is not of integers alone.

    Integers are their own stored form, if their columns are of int64 and they fit, which is all there is to check.
    """
    encode = schema.memo.get(encoded_delta)
    if encode is None:
        encode = schema.remembered(encoded_delta, lambda: _of_integers(schema))
    if type(key) is not tuple or len(key) != len(schema.key):
        return None
    try:
        encoded: bytes = encode((*values,), *key, *values.values())
        return encoded
    except _OtherForm:
        return None


class _OtherForm(Exception):
    pass


def _of_integers(schema: TableSchema) -> Callable[..., bytes]:
    """Encodes deltas, given the names of their columns, and their key and values one after the other; what comes
    again, once.

    Raises _OtherForm if the columns or the key are of other types, or take none.
    """
    keys = len(schema.key)

    @lru_cache(_CHOICES)
    def form(names: tuple[str, ...]) -> tuple[bytes, bytes] | None:
        columns = [schema.columns[schema.index_of[name]] for name in names if name in schema.index_of]
        fits = [column.type.name == "int64" and column.operator is not None for column in columns]
        if not (names and len(columns) == len(names) and all(fits) and schema.kind == "row" and schema.counted):
            return None
        return _form(schema, "delta", names)

    @lru_cache(_REMEMBERED, typed=True)
    def encode(names: tuple[str, ...], *cells: object) -> bytes:
        found = form(names)
        if found is None or any(type(cell) is not int or not INT64_MIN <= cell <= INT64_MAX for cell in cells):
            raise _OtherForm
        head, between = found
        body = b"".join((head, _fields(_KEY, cells[:keys]), between, _fields(_VALUES, cells[keys:])))
        return delimited(_OPERATIONS, body)

    return encode


def _form(schema: TableSchema, kind: str, columns: Iterable[str]) -> tuple[bytes, bytes]:
    """What stands before the key, and what between that and the values."""
    head = Operation(kind=KINDS[kind], table=schema.name, table_id=schema.id)
    return head.SerializeToString(), Operation(columns=columns).SerializeToString()


def _fields(tag: bytes, values: Iterable[Any]) -> bytes:
    return b"".join([_integer(tag, value) if type(value) is int else _other(tag, value) for value in values])


@lru_cache(_REMEMBERED)
def _integer(tag: bytes, value: int) -> bytes:
    return _other(tag, value)


def _other(tag: bytes, value: Any) -> bytes:
    filled = Operation()
    fill_values(filled.values, (value,))
    encoded = filled.values[0].SerializeToString()
    return prefix(tag, len(encoded)) + encoded
