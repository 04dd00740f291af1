"""RowOp: the net effect of one transaction on one row.

A transaction's statements on a row compose in program order (R7) into one of three shapes:

    PATCH     puts on some cells, deltas on others; the rest of the row is untouched
    DELETE    the row is gone
    RESTART   delete or strict insert, then puts: cells that are not put hold their identity

    put   then delta  = put(v (+) d)            delta then put    = put
    delta then delete = delete                  delete then delta = put(identity (+) d)

``apply_op`` is one fold step; ``write_set`` of a RowOp is what the verdict looks at (R5).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from kivi.delta.operators import identity_cells, operator_of
from kivi.encoding.base_rows import Version
from kivi.errors import OutOfRange
from kivi.model.schema import TableSchema
from kivi.states.registry import kind_of

__all__ = ["Barrier", "RowOp", "apply_op", "are_deltas", "fold", "then_delete", "then_delta", "then_insert", "then_put"]


class Barrier(IntEnum):
    """The effect of an operation on everything before it in its row. The values are on disk."""

    PATCH = 0
    DELETE = 1
    RESTART = 2


class RowOp(NamedTuple):
    """``puts`` and ``deltas``: column index -> stored form; their keys are disjoint."""

    barrier: Barrier
    puts: Mapping[int, Any]
    deltas: Mapping[int, Any]

    @property
    def varying_bytes(self) -> int:
        """The length of its strings and bytes: the part of its size that one operation does not share with another."""
        size = 0
        for cells in (self.puts, self.deltas):
            for value in cells.values():
                if isinstance(value, (str, bytes)):
                    size += len(value)
        return size


def are_deltas(ops: Iterable[RowOp]) -> bool:
    """Whether they are nothing else, so that they may be folded in columns."""
    return not any(op.barrier or op.puts for op in ops)


_NOTHING = RowOp(Barrier.PATCH, {}, {})


def then_put(op: RowOp | None, values: Mapping[int, Any]) -> RowOp:
    op = op or _NOTHING
    barrier = Barrier.RESTART if op.barrier is Barrier.DELETE else op.barrier
    return RowOp(barrier, {**op.puts, **values}, {i: d for i, d in op.deltas.items() if i not in values})


def then_delta(schema: TableSchema, op: RowOp | None, values: Mapping[int, Any]) -> RowOp:
    """Raises OutOfRange if a float leaves the finite numbers: its cell would never be readable again."""
    op = op or _NOTHING
    puts, deltas = dict(op.puts), dict(op.deltas)
    for i, delta in values.items():
        column = schema.columns[i]
        operator = operator_of(column)
        if i in puts:
            combined = puts[i] = operator.combine(puts[i], delta)
        elif op.barrier is not Barrier.PATCH:
            combined = puts[i] = operator.combine(operator.identity(column), delta)
        else:
            combined = deltas[i] = operator.combine(deltas.get(i), delta)
        if isinstance(combined, float) and not math.isfinite(combined):
            raise OutOfRange(
                f"the deltas of this transaction add up to more than a float64 holds in {schema.name!r}.{column.name}; "
                "nothing was applied",
                column=column.name,
            )
    barrier = Barrier.RESTART if op.barrier is Barrier.DELETE else op.barrier
    return RowOp(barrier, puts, deltas)


def then_delete() -> RowOp:
    return RowOp(Barrier.DELETE, {}, {})


def then_insert(values: Mapping[int, Any]) -> RowOp:
    """The caller has checked that the row is not there."""
    return RowOp(Barrier.RESTART, dict(values), {})


def apply_op(schema: TableSchema, base: Version | None, cts: int, op: RowOp) -> Version:
    """One fold step: the row after ``op`` committed at ``cts`` on top of ``base``."""
    if op.barrier is Barrier.DELETE:
        return Version(cts, False, ())
    if base is None or not base.alive or op.barrier is Barrier.RESTART:
        cells = list(identity_cells(schema))
    else:
        cells = list(base.cells)
    for i, value in op.puts.items():
        cells[i] = value
    for i, delta in op.deltas.items():
        column = schema.columns[i]
        if column.state is not None:
            cells[i] = kind_of(column.state).combined([(0, cells[i]), (cts, delta)])
        else:
            cells[i] = operator_of(column).combine(cells[i], delta)
    return Version(cts, True, tuple(cells))


def fold(schema: TableSchema, base: Version | None, ops: Sequence[tuple[int, RowOp]], upto: int) -> Version | None:
    """The row at ``upto``: ``base`` and the operations with base.cts < cts <= upto, which are in CTS order.

    Operations of one CTS (a backfill commits several runs) are compared with the stamp of the base that was read,
    not with each other.
    """
    stamp = base.cts if base is not None else 0
    last = 0
    cells: list[Any] | None = list(base.cells) if base is not None and base.alive else None
    columns = schema.columns
    states: dict[int, list[tuple[int, bytes]]] = {}  # combined at the end, all at once
    for cts, op in ops:  # as ``apply_op``, without a Version for each: a hot row may have thousands
        if cts > upto:
            break
        if cts <= stamp:
            continue
        last = cts
        barrier, puts, deltas = op
        if barrier is Barrier.DELETE:
            cells = None
            states.clear()
            continue
        if cells is None or barrier is Barrier.RESTART:
            cells = list(identity_cells(schema))
            states.clear()
        for i, value in puts.items():
            cells[i] = value
            states.pop(i, None)
        for i, delta in deltas.items():
            if columns[i].state is not None:
                states.setdefault(i, []).append((cts, delta))
            else:
                cells[i] = operator_of(columns[i]).combine(cells[i], delta)
    if not last:
        return base
    if cells is not None:
        for i, parts in states.items():
            state = columns[i].state
            assert state is not None
            cells[i] = kind_of(state).combined([(0, cells[i]), *parts])
    return Version(last, False, ()) if cells is None else Version(last, True, tuple(cells))
