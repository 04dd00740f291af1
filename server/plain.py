"""Reading plain commits: one-shot transactions of deltas, as ``kivi.mvcc.plain`` takes them.

A request is plain if it is a Commit without a transaction, under a request token, whose operations are deltas of row
tables, each of another row, written as the table's columns ask for. Anything else is for the translator, which says
what is wrong with it, if something is. What has to be known of a table is looked up once for each state of the catalog.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Final

from kivi.catalog import schema_guard
from kivi.delta.ops import Barrier, RowOp
from kivi.keys import encode_key
from kivi.mvcc.verdict import Guard
from kivi.schema import TableSchema
from kivi.store import Plain, Store
from kivi.types import ColumnType
from kivi.wire.v1 import session_pb2

__all__ = ["PlainReader"]

_OPERATIONS_MAX: Final = 16
_SIGN: Final = 1 << 63
_DELTA: Final = session_pb2.Operation.KIND_DELTA
_PATCH: Final = Barrier.PATCH
_NOTHING: Final[dict[int, Any]] = {}
_KIND: Final = {"int64": "int_value", "timestamp": "int_value", "decimal": "int_value", "float64": "float_value"}

Tagged = tuple[session_pb2.Request, float]


class _Plan:
    """What deltas of one table may be."""

    __slots__ = ("columns", "guard", "id", "key_of")

    def __init__(self, schema: TableSchema) -> None:
        self.id = schema.id
        self.guard: Guard = schema_guard(schema.id)
        self.columns: dict[str, tuple[int, ColumnType, str]] = {
            column.name: (i, column.type, _KIND[column.type.name])
            for i, column in enumerate(schema.columns)
            if column.operator is not None and column.type.name in _KIND
        }
        types = [column.type for column in schema.key]
        self.key_of: Callable[[Any], bytes | None]
        if len(types) == 1 and types[0].name in ("int64", "timestamp"):
            self.key_of = _int_key
        else:
            self.key_of = lambda values: _any_key(types, values)


def _int_key(values: Any) -> bytes | None:
    if len(values) != 1 or values[0].WhichOneof("kind") != "int_value":
        return None
    return (values[0].int_value + _SIGN).to_bytes(8, "big")  # type: ignore[no-any-return]


def _any_key(types: list[ColumnType], values: Any) -> bytes | None:
    if len(values) != len(types):
        return None
    stored = []
    for type_, value in zip(types, values, strict=True):
        if value.WhichOneof("kind") != ("string_value" if type_.name == "string" else _KIND.get(type_.name)):
            return None
        if type_.name == "decimal" or type_.name == "float64":  # have ranges: rare in keys, so not known here
            return None
        stored.append(value.string_value if type_.name == "string" else value.int_value)
    if sum(len(value) for value in stored if isinstance(value, str)) > 256:  # the limit of keys is not known here
        return None
    return encode_key(types, stored)


class PlainReader:
    """Bound to one store. Used by many threads, which may each make a plan anew."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._plans: tuple[int, dict[str, _Plan]] = (-1, {})

    def version(self) -> int:
        """Of the catalog that requests are read by from now on."""
        view = self._store.catalog.entered
        if self._plans[0] != view.version:
            plans = {}
            if view is self._store.catalog.visible or view.version == self._store.catalog.visible.version:
                plans = {name: _Plan(schema) for name, schema in view.by_name.items() if schema.kind == "row"}
            self._plans = (view.version, plans)
        return self._plans[0]

    def read(self, tagged: Tagged) -> Plain | None:
        """The transaction, or None if it is not plain."""
        request = tagged[0]
        if request.txn or not request.id or not request.HasField("commit"):
            return None
        commit = request.commit
        token, operations = commit.token, request.operations
        if request.timeout_ms and time.monotonic() - tagged[1] > request.timeout_ms / 1000:
            return None
        if not token or len(token) > 256 or commit.HasField("batch") or not 0 < len(operations) <= _OPERATIONS_MAX:
            return None
        plans = self._plans[1]
        rows: dict[tuple[int, bytes], RowOp] = {}
        guards: list[Guard] = []
        for operation in operations:
            plan = plans.get(operation.table)
            if operation.kind != _DELTA or plan is None or operation.table_id not in (0, plan.id):
                return None
            key = plan.key_of(operation.key)
            deltas = _deltas(plan, operation)
            if key is None or deltas is None or (plan.id, key) in rows:
                return None
            rows[plan.id, key] = RowOp(_PATCH, _NOTHING, deltas)
            if plan.guard not in guards:
                guards.append(plan.guard)
        ordered = [(table, key, op) for (table, key), op in rows.items()]
        if len(ordered) > 1:
            ordered.sort(key=lambda row: row[:2])
        return Plain(self._store.leases.blind(), ordered, guards, token, tagged)


def _deltas(plan: _Plan, operation: session_pb2.Operation) -> dict[int, Any] | None:
    values = operation.values
    if len(operation.columns) != len(values) or not values:
        return None
    out: dict[int, Any] = {}
    for name, value in zip(operation.columns, values, strict=True):
        column = plan.columns.get(name)
        if column is None:
            return None
        i, type_, kind = column
        if value.WhichOneof("kind") != kind or i in out:
            return None
        if kind == "int_value":
            number = value.int_value
            if type_.name == "decimal" and not type_.stored_min <= number <= type_.stored_max:
                return None
            out[i] = number
        else:
            if not math.isfinite(value.float_value):
                return None
            out[i] = value.float_value + 0.0
    return out
