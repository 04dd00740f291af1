"""Rows that changed, as they are at a snapshot: by key where they are few, by a scan where they are many.

A row by its key costs many times what a row costs in a scan in columns, above all with some dozen delta runs pending,
of which each is bisected (decision 0022). So many changed rows that lie close together are scanned for, and those in
between are dropped; as soon as these turn out to be too many the rest is read by key after all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.columns import stored_rows
from kivi.encoding.projection import Projection
from kivi.errors import OutOfRange
from kivi.live.matching import BatchColumns, Columns, RowColumns
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Row
from kivi.mvcc.leases import Lease
from kivi.store.facade import Store

__all__ = ["Changed", "changed_rows"]

_KEYS: Final = 1_024
_SCAN_KEYS: Final = 512
"""Fewer are read by key in any case."""
_SCAN_FACTOR: Final = 64
_SCAN_ROWS: Final = 16_384


class Changed(NamedTuple):
    """``asked``: keys, in order; ``keys``: those of them that have a row; ``columns``: these rows, to be matched;
    ``rows`` makes some of them, by position."""

    asked: Sequence[bytes]
    keys: Sequence[bytes]
    columns: Columns
    rows: Callable[[list[int]], dict[int, Row]]


def changed_rows(
    store: Store, lease: Lease, schema: TableSchema, keys: list[bytes], also: Iterable[str] = ()
) -> Iterator[Changed]:
    """All of ``keys``, which are sorted, in portions; all columns, and the derived ones ``also``.

    Raises OutOfRange for a derived column that is too large.
    """
    added = sorted({*also} - {*schema.output_names})
    projection = Projection.of(schema, [*schema.output_names, *added] if added else None)
    done = 0
    if len(keys) >= _SCAN_KEYS and projection.in_columns:
        for found in _scanned(store, lease, schema, projection, keys):
            yield found
            done += len(found.asked)
    for begin in range(done, len(keys), _KEYS):
        yield _by_key(store, lease, schema, projection, keys[begin : begin + _KEYS])


def _by_key(store: Store, lease: Lease, schema: TableSchema, projection: Projection, asked: list[bytes]) -> Changed:
    keys: list[bytes] = []
    rows: list[Row] = []
    for key, version in zip(asked, store.reader.get(lease, schema, asked), strict=True):
        row = None if version is None else projection.row(key, version)
        if row is not None:
            keys.append(key)
            rows.append(row)
    return Changed(asked, keys, RowColumns(rows), lambda wanted: {i: rows[i] for i in wanted})


def _scanned(
    store: Store, lease: Lease, schema: TableSchema, projection: Projection, keys: list[bytes]
) -> Iterator[Changed]:
    """As far as it pays: what is not in its portions is left to be read by key."""
    wanted = pa.array(keys, pa.large_binary())
    done = scanned = 0
    portions = store.reader.scan_portions(
        lease, schema, keys[0], keys[-1] + b"\0", few=0, first_rows=_SCAN_ROWS, rows=_SCAN_ROWS
    )
    for portion in portions:
        if isinstance(portion, list):
            return
        scanned += len(portion.rows)
        try:
            (batch,) = projection.batches([portion], None)
        except OutOfRange:  # a sum that has left its column for now: exact by key
            return
        last = bisect_right(keys, portion.keys[-1].as_py())
        chosen = pc.is_in(portion.keys, value_set=wanted.slice(done, last - done))
        yield _in_columns(keys[done:last], portion.keys.filter(chosen).to_pylist(), batch.filter(chosen))
        done = last
        if scanned > _SCAN_FACTOR * max(done, _SCAN_KEYS):
            return


def _in_columns(asked: list[bytes], keys: list[bytes], batch: Any) -> Changed:
    def rows(wanted: list[int]) -> dict[int, Row]:
        return dict(zip(wanted, stored_rows(batch.take(pa.array(wanted, pa.int64()))), strict=True))

    return Changed(asked, keys, BatchColumns(batch), rows)
