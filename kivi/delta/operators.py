"""Operators of delta columns. Their ids are permanent: they are written to disk and never reused.

Each is a triple (identity, combine, id). ``combine`` skips nulls, because a null is *no observation*:
combine(null, d) = d. The identity of SUM is 0, so a row that a delta created reads 0 in the columns that
it did not touch; MIN and MAX have none, so they read null until there is an observation (R6).

Integers are Python's, so a scalar fold is exact at any width. A float sum may leave the finite numbers:
the cell then holds inf or nan, and *reading* it is OUT_OF_RANGE (R10).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kivi.errors import FormatTooNew
from kivi.model.schema import Column, TableSchema

__all__ = ["MAX", "MIN", "SUM", "Operator", "check_ids", "identity_cells", "operator_of"]


@dataclass(frozen=True, slots=True)
class Operator:
    """``id`` is on disk. ``apply(a, b)`` combines two non-null stored values."""

    id: int
    name: str
    apply: Callable[[Any, Any], Any]

    def combine(self, cell: Any, delta: Any) -> Any:
        if delta is None:
            return cell
        return delta if cell is None else self.apply(cell, delta)

    def identity(self, column: Column) -> Any:
        """The value of a cell before its first delta, in stored form."""
        if self is SUM:
            return 0.0 if column.type.name == "float64" else 0
        return None


SUM: Final = Operator(1, "sum", lambda a, b: a + b)
MIN: Final = Operator(2, "min", lambda a, b: b if b < a else a)
MAX: Final = Operator(3, "max", lambda a, b: b if b > a else a)
_BY_NAME: Final = {op.name: op for op in (SUM, MIN, MAX)}


def operator_of(column: Column) -> Operator:
    """The operator of a delta column. KeyError for a value column."""
    return _BY_NAME[column.operator or ""]


def identity_cells(schema: TableSchema) -> tuple[Any, ...]:
    """The cells of a row that exists and that nothing has been written to: identities, else null."""

    def cells() -> tuple[Any, ...]:
        return tuple(b"" if c.state else operator_of(c).identity(c) if c.operator else None for c in schema.columns)

    return schema.remembered(identity_cells, cells)


def ids() -> dict[str, int]:
    """Name -> id of every operator, as recorded in a store when it is made."""
    return {name: op.id for name, op in _BY_NAME.items()}


def check_ids(recorded: dict[str, int]) -> None:
    """Refuses a store whose operators are not ours: folding with another operator is a wrong number."""
    for name, id_ in recorded.items():
        ours = _BY_NAME.get(name)
        if ours is None or ours.id != id_:
            raise FormatTooNew(f"the store uses operator {name!r} with id {id_}, which this version does not know")
