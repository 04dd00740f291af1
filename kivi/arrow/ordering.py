"""Rows in an order (``kivi.model.orders``), and the first of them in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.model.orders import Order

__all__ = ["first_rows", "sorted_table"]

_WAITING_BYTES: Final = 16 << 20
"""So much is looked at together, or as much as is kept, before rows beyond the part that is asked for are let go."""


def sorted_table(table: Any, order: Order) -> Any:
    """A table by some of its columns; rows that are equal by these stay in their order."""
    if not order:
        return table
    keys = {name: _sortable(table.column(name)) for name, _ in order}
    sort_keys = [(name, "descending" if down else "ascending") for name, down in order]
    return table.take(pc.sort_indices(pa.table(keys), sort_keys=sort_keys))


def _sortable(column: Any) -> Any:
    return column.cast(pa.int8()) if pa.types.is_boolean(column.type) else column


def first_rows(batches: Iterable[Any], order: Order, count: int | None, check: Callable[[int], None]) -> Any:
    """The first ``count`` rows of the batches in this order, as a table; None: all. No batch: None.

    ``check`` is told how many bytes these take, and raises if that is too much.
    """
    held: list[Any] = []
    waiting = kept_bytes = 0
    for batch in batches:
        held.append(pa.Table.from_batches([batch]))
        waiting += batch.nbytes
        if count is None:
            check(waiting)
        elif waiting > max(_WAITING_BYTES, kept_bytes):
            held, waiting = [_first(held, order, count)], 0
            kept_bytes = held[0].nbytes
            check(kept_bytes)
    if not held:
        return None
    found = _first(held, order, count)
    check(found.nbytes)
    return found


def _first(tables: Sequence[Any], order: Order, count: int | None) -> Any:
    table = sorted_table(pa.concat_tables(tables), order)
    # A slice would keep the rows behind it.
    return table if count is None or count >= table.num_rows else table.take(pa.array(np.arange(count)))
