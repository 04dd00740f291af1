"""A scan in columns: base rows of fixed width by thousands, with what is pending over them.

The rules are those of a scan row by row (``mvcc.snapshot``), which also captures what is read here, and checks the
lease after each portion. No Python statement runs for a row, but where a row is stamped above S (its older version
is looked up) and for the operations on row tables, which are few at any time.

    engine chunks --FixedRows--> rows of S --Waiting.below--> with deltas folded over them, or changed rows put in
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kivi.delta.derive import run_from_rows
from kivi.delta.ops import RowOp, fold
from kivi.delta.overlay import FixedRows, Waiting, Window, fold_over, put_over
from kivi.delta.runs import DeltaRun
from kivi.errors import DataLoss
from kivi.rows import RowLayout
from kivi.schema import TableSchema

__all__ = ["Indexed", "Older", "at_snapshot", "base_rows", "overlaid"]

Indexed = list[tuple[bytes, tuple[tuple[int, RowOp], ...]]]
Older = Callable[[list[bytes]], list[bytes | None]]
"""The newest versions at or below S of rows that are stamped above it, as bytes; None where there is none."""

_PORTION_BYTES: Final = 4 << 20


def base_rows(
    chunks: Iterator[tuple[list[bytes], list[bytes]]], layout: RowLayout, skip: int, sizes: Iterator[int]
) -> Iterator[FixedRows]:
    """An engine's chunks in portions of about so many rows, and of not much more than 4 MiB.

    ``skip``: bytes before the row key in an engine key. Raises DataLoss for a row of another width.
    """
    width = layout.width
    for size in sizes:
        keys: list[bytes] = []
        joined: list[bytes] = []
        rows: list[bytes] = []
        nbytes = 0
        while len(keys) < size and nbytes < _PORTION_BYTES and (chunk := next(chunks, None)) is not None:
            if set(map(len, chunk[1])) != {width}:
                raise DataLoss(f"a base row does not have the {width} bytes of its table's rows: run kivi verify")
            keys += chunk[0]
            joined.append(b"".join(chunk[0]))
            rows.append(b"".join(chunk[1]))
            nbytes += len(joined[-1]) + len(rows[-1])
        if not keys:
            return
        yield FixedRows(_binary(keys, b"".join(joined), skip), np.frombuffer(b"".join(rows), layout.dtype))


def _binary(keys: list[bytes], data: bytes, skip: int) -> Any:
    """Byte strings, ``data`` joined, without their first ``skip`` bytes as a LargeBinaryArray."""
    joined = np.frombuffer(data, np.uint8)
    width = len(keys[0])
    if set(map(len, keys)) == {width}:
        rest = np.ascontiguousarray(joined.reshape(len(keys), width)[:, skip:]).reshape(-1)
        offsets = np.arange(len(keys) + 1, dtype=np.int64) * (width - skip)
        return pa.Array.from_buffers(pa.large_binary(), len(keys), [None, pa.py_buffer(offsets), pa.py_buffer(rest)])
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    kept = np.ones(len(joined), np.bool_)  # by NumPy: Arrow's binary_slice fails on some large_binary arrays (26.0)
    kept[((np.cumsum(lengths) - lengths)[:, None] + np.arange(skip)).reshape(-1)] = False
    offsets = np.zeros(len(keys) + 1, np.int64)
    np.cumsum(lengths - skip, out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(joined[kept])]
    return pa.Array.from_buffers(pa.large_binary(), len(keys), buffers)


def at_snapshot(portions: Iterator[FixedRows], layout: RowLayout, upto: int, older: Older) -> Iterator[FixedRows]:
    """Each row that is stamped above ``upto`` in its older version; zeros, which are no row, if it has none."""
    blank = bytes(layout.width)
    for keys, rows in portions:
        late = np.flatnonzero(rows["cts"] > upto)
        if len(late):
            versions = [blank if row is None else row for row in older(keys.take(pa.array(late)).to_pylist())]
            if set(map(len, versions)) != {layout.width}:
                raise DataLoss(f"a version does not have the {layout.width} bytes of its table's rows: run kivi verify")
            rows = rows.copy()
            rows[late] = np.frombuffer(b"".join(versions), layout.dtype)
        yield FixedRows(keys, rows)


def overlaid(
    schema: TableSchema,
    layout: RowLayout,
    portions: Iterator[FixedRows],
    indexed: Indexed,
    runs: Sequence[DeltaRun],
    bounds: tuple[bytes | None, bytes | None],
    upto: int,
    rows_max: int,
) -> Iterator[FixedRows]:
    """Live rows at ``upto``: ``portions`` are in base, ``indexed`` and ``runs`` are pending in ``bounds``."""
    if schema.kind == "aggregate":
        if indexed:
            listed = [(key, cts, dict(op.deltas)) for key, ops in indexed for cts, op in ops if cts <= upto]
            runs = [*runs, run_from_rows(schema, listed)]
        waiting = Waiting(runs, *bounds, rows_max)
    else:  # all of whose operations are in the index
        waiting = Waiting(
            [DeltaRun(pa.array([key for key, _ in indexed], pa.large_binary()), 0, ())], *bounds, rows_max
        )

    def over(base: FixedRows, windows: list[Window]) -> FixedRows:
        if not windows:
            return base
        if schema.kind == "aggregate":
            return fold_over(layout, base, windows, upto)
        changes = [indexed[i] for _, rows in windows for i in rows]
        return put_over(base, _changed(schema, layout, base, changes, upto))

    for portion in portions:
        stop: bytes | None = portion.keys[-1].as_py() + b"\0"
        while waiting:
            windows, reached = waiting.below(stop)
            if reached == stop:
                portion = over(portion, windows)
                break
            assert reached is not None
            first, portion = portion.split(reached)
            yield over(first, windows).alive()
        yield portion.alive()
    nothing = FixedRows.none(layout)
    while waiting:
        yield over(nothing, waiting.below(None)[0]).alive()


def _changed(schema: TableSchema, layout: RowLayout, base: FixedRows, changes: Indexed, upto: int) -> FixedRows:
    """The rows that these operations make of ``base``, tombstones included."""
    places = DeltaRun(base.keys, 0, ())
    keys, rows = [], []
    for key, ops in changes:
        at = places.find(key)
        before = layout.decode(base.rows[at.start].tobytes()) if at else None
        after = fold(schema, before, ops, upto)
        if after is not None:
            keys.append(key)
            rows.append(layout.encode(after))
    if not keys:
        return FixedRows.none(layout)
    return FixedRows(pa.array(keys, pa.large_binary()), np.frombuffer(b"".join(rows), layout.dtype))
