"""Totals first, rates after: what a system holds must be what was sent to it, or there is no rate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from bench.data import Expected, Totals

__all__ = ["WrongTotals", "each_own", "every_row", "same"]


class WrongTotals(AssertionError):
    """The system that was measured does not hold what was sent to it: no figure of it counts."""


def same(who: str, found: Totals, expected: Totals) -> None:
    """Raises WrongTotals that says what differs."""
    if found != expected:
        raise WrongTotals(f"{who} holds {found}, but was sent {expected}")


def every_row(who: str, found: Any, expected: Expected) -> None:
    """``found``: an Arrow table with endpoint_id, slot, total and n, one row an aggregate row, in any order.

    Raises WrongTotals; the first row that differs is named.
    """
    columns = [_integers(found, name) for name in ("endpoint_id", "slot", "n", "total")]
    same(who, Totals(len(columns[0]), int(columns[2].sum()), int(columns[3].sum())), expected.totals)
    order = np.lexsort((columns[1], columns[0]))
    for name, column, right in zip(
        ("endpoint", "slot", "count", "sum"),
        columns,
        (expected.endpoint, expected.slot_us, expected.count, expected.total),
        strict=True,
    ):
        wrong = np.flatnonzero(column[order] != right)
        if len(wrong):
            at = wrong[0]
            raise WrongTotals(
                f"{who}: {len(wrong):,} rows have a wrong {name}; the first is endpoint {expected.endpoint[at]}, "
                f"slot {expected.slot_us[at]}: {column[order][at]} where {right[at]} was sent"
            )


def each_own(who: str, commit_ts: Any, transactions: int) -> None:
    """Every transaction was told a commit timestamp, and no two the same. Raises WrongTotals."""
    stamps = np.asarray(commit_ts, np.int64)
    if len(stamps) != transactions or (len(stamps) and int(stamps.min()) <= 0):
        raise WrongTotals(f"{who}: {transactions:,} transactions, {(stamps > 0).sum():,} commit timestamps")
    if len(np.unique(stamps)) != transactions:
        raise WrongTotals(f"{who}: {transactions:,} transactions share {len(np.unique(stamps)):,} timestamps")


def _integers(table: Any, name: str) -> Any:
    column = table.column(name)
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    return column.to_numpy()
