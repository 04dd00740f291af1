"""Writes of rows: what a caller wrote, and the same checked against the table's schema, in stored form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from kivi.model.schema import TableSchema

__all__ = ["Write"]

_NOTHING: Final[Mapping[str, Any]] = {}


class Write(NamedTuple):
    """One write. ``column`` is that of a guard; None guards the row's existence."""

    kind: Literal["put", "delta", "insert", "delete", "guard"]
    key: Sequence[Any]
    values: Mapping[str, Any] = _NOTHING
    column: str | None = None

    def bound(self, schema: TableSchema) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The key and the values in stored form. Raises SchemaError, InvalidArgument.

        A client may ask twice, when the schema that it remembers turns out to be old.
        """
        match self.kind:
            case "guard":
                schema.check_guardable(self.column)
            case "delete":
                schema.stored_put(_NOTHING)  # refuses event and aggregate tables
        key, values = schema.stored_key(self.key), self.values
        if self.kind in ("put", "insert", "delta"):
            schema.check_written_key(key)
            values = schema.stored_delta(values) if self.kind == "delta" else schema.stored_put(values)
        return key, values
