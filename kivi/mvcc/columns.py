"""A scan in columns: base rows of fixed width by thousands, with what is pending over them.

The rules are those of a scan row by row (``mvcc.snapshot``), which also captures what is read here, and checks the
lease after each portion. No Python statement runs for a row, but where a row is stamped above S (its older version
is looked up) and for the operations on row tables, which are few at any time.

    engine chunks --FixedRows--> rows of S --Waiting.below--> with deltas folded over them, or changed rows put in
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kivi.delta.derive import run_from_rows
from kivi.delta.ops import RowOp, fold
from kivi.delta.overlay import FixedRows, Waiting, Window, fold_over, put_over
from kivi.delta.runs import Array, DeltaRun
from kivi.errors import DataLoss
from kivi.keys import key_width
from kivi.rows import RowLayout
from kivi.schema import TableSchema
from kivi.spaces import Space, table_prefix

__all__ = ["Indexed", "Older", "at_snapshot", "base_rows", "overlaid"]

Indexed = list[tuple[bytes, tuple[tuple[int, RowOp], ...]]]
Older = Callable[[list[bytes]], list[bytes | None]]
"""The newest versions at or below S of rows that are stamped above it, as bytes; None where there is none."""

_PORTION_BYTES: Final = 4 << 20


def base_rows(
    chunks: Iterator[list[bytes]], schema: TableSchema, layout: RowLayout, sizes: Iterator[int]
) -> Iterator[FixedRows]:
    """An engine's chunks of base rows in portions of about so many rows, and of not much more than 4 MiB.

    Where keys are of one width too, a chunk is one join of everything, and the table's prefix before each key proves
    that all of it is as wide as it should be: 0.1 us a row less than joining keys and rows apart and asking each for
    its length. Raises DataLoss for a row of another width.
    """
    prefix = table_prefix(Space.ROW, schema.id)
    width = key_width([column.type for column in schema.key])
    record = None
    if width:
        record = np.dtype([("prefix", f"V{len(prefix)}"), ("key", f"V{width}"), ("row", layout.dtype)])
    expected = np.void(prefix)
    for size in sizes:
        parts: list[list[bytes]] = []
        joined: list[bytes] = []
        rows = nbytes = 0
        while rows < size and nbytes < _PORTION_BYTES and (chunk := next(chunks, None)) is not None:
            parts.append(chunk)
            joined.append(b"".join(chunk))
            rows += len(chunk) // 2
            nbytes += len(joined[-1])
        if not parts:
            return
        if record is not None and nbytes == rows * record.itemsize:
            records = np.frombuffer(b"".join(joined), record)
            if (records["prefix"] == expected).all():
                data = np.ascontiguousarray(records["key"])
                yield FixedRows(_binary(np.full(rows, width), data), records["row"])
                continue
        yield _each(list(itertools.chain.from_iterable(parts)), layout, len(prefix))


def _each(flat: list[bytes], layout: RowLayout, skip: int) -> FixedRows:
    """The same for keys of any width, and where something is wrong."""
    keys, rows = flat[::2], flat[1::2]
    if set(map(len, rows)) != {layout.width}:
        raise DataLoss(f"a base row does not have the {layout.width} bytes of its table's rows: run kivi verify")
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    joined = np.frombuffer(b"".join(keys), np.uint8)
    kept = np.ones(len(joined), np.bool_)  # by NumPy: Arrow's binary_slice fails on some large_binary arrays (26.0)
    kept[((np.cumsum(lengths) - lengths)[:, None] + np.arange(skip)).reshape(-1)] = False
    return FixedRows(_binary(lengths - skip, joined[kept]), np.frombuffer(b"".join(rows), layout.dtype))


def _binary(lengths: Array, data: Array) -> Any:
    """A LargeBinaryArray."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return pa.Array.from_buffers(pa.large_binary(), len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


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
