"""Orders: by which columns rows come, as callers write them: ``["-slowest", "endpoint_id"]``.

Nulls are last in either direction. Rows that are equal by all columns stay as they were: in key order, events in commit
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.types import ColumnType

__all__ = ["Order", "order_of"]

Order = tuple[tuple[str, bool], ...]
"""Columns, and whether from the largest down."""


def order_of(order_by: str | Iterable[str], type_of: Callable[[str], ColumnType]) -> Order:
    """``type_of`` gives a column's type, or raises SchemaError. Raises SchemaError, InvalidArgument."""
    order = []
    for term in (order_by,) if isinstance(order_by, str) else order_by:
        name = term.removeprefix("-")
        type_ = type_of(name)
        if type_.is_state:
            raise SchemaError(f"order_by names {name!r}, a {type_}, which has no order: {type_.advice(name)}")
        order.append((name, term.startswith("-")))
    if len({name for name, _ in order}) != len(order):
        raise InvalidArgument(f"order_by names a column twice: {', '.join(name for name, _ in order)}")
    return tuple(order)
