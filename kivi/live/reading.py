"""Reading what a query gives, at a snapshot: the state that a subscription begins with, and begins again with.

A row of a row table or an aggregate is told from others by its encoded key. An event has none: it is told by its
commit's timestamp and its place among those of the commit that the query selects, which stay the same as long as it is
there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import stored_rows
from kivi.live.matching import Array, BatchColumns, Columns
from kivi.live.rollups import rolled_window
from kivi.live.windows import Window
from kivi.model.changes import COMMIT_TS, Changes
from kivi.model.expressions import all_of, between
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Query
from kivi.model.types import INT64_MAX, ColumnType
from kivi.mvcc.leases import Lease
from kivi.store.facade import Store
from kivi.store.transaction import encoded_key

__all__ = ["event_key", "floor_of", "promising", "read_window", "types_of"]

_EVENT_KEY: Final = struct.Struct(">QI")
_FLOAT: Final = ColumnType("float64")


def event_key(cts: int, place: int) -> bytes:
    return _EVENT_KEY.pack(cts, place)


def types_of(schema: TableSchema) -> dict[str, ColumnType]:
    """The types of all columns that a read may return."""
    return _Types((name, column.type) for name, column in schema.by_name.items())


class _Types(dict[str, ColumnType]):
    """What is no column is derived: declared, or an expression that a query names by its text."""

    def __missing__(self, name: str) -> ColumnType:
        return _FLOAT


def floor_of(store: Store, schema: TableSchema, ts: int) -> int | None:
    """The event time below which a snapshot at ``ts`` has forgotten the table's events."""
    return store.retention.seen_at(schema.id, ts)


def read_window(store: Store, lease: Lease, schema: TableSchema, query: Query) -> Window:
    """Raises what a scan raises, and ResourceExhausted for more rows than a window holds."""
    if query.scan.rollup is not None:
        return rolled_window(store, lease, schema, query)
    return _of_events(store, lease, schema, query) if schema.kind == "event" else _of_rows(store, lease, schema, query)


def _of_rows(store: Store, lease: Lease, schema: TableSchema, query: Query) -> Window:
    window = Window(query)
    limit = None
    if not query.order and query.shown is not None:  # key order is the order of a scan
        limit = query.shown + window.slack
    columns = tuple(dict.fromkeys((*schema.key_names, *query.needed)))
    count = 0
    for batch in store.scan(lease, schema, replace(query.scan, columns=columns, limit=limit)):
        count += batch.num_rows
        for row in stored_rows(_promising(batch, window, query, types_of(schema))):
            window.put(encoded_key(schema, tuple(row[name] for name in schema.key_names)), row)
        if not (window.whole or query.order):  # what follows lies beyond its last
            break
    if limit is not None and count == limit:
        window.whole = False
    window.dropped.clear()
    return window


def _of_events(store: Store, lease: Lease, schema: TableSchema, query: Query) -> Window:
    window = Window(query)
    where = all_of(query.where, between(schema.event_time or "", floor_of(store, schema, lease.ts), None))
    scan = replace(query.scan, columns=query.needed, where=where, changes=Changes(0, commit_ts=True, partial=True))
    for keys, batch in numbered(store.scan(lease, schema, scan)):
        places = batch.append_column("", pa.array(np.arange(batch.num_rows)))
        for row in stored_rows(_promising(places, window, query, types_of(schema))):
            window.put(keys[row.pop("")], row)
    window.dropped.clear()
    return window


def numbered(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[list[bytes], pa.RecordBatch]]:
    """Batches of a tail with ``COMMIT_TS``, without it, and the keys of their events."""
    last = place = 0
    for batch in batches:
        keys = []
        for cts in batch.column(COMMIT_TS).to_pylist():
            place = place + 1 if cts == last else 0
            last = cts
            keys.append(event_key(cts, place))
        yield keys, batch.drop_columns([COMMIT_TS])


def _promising(batch: pa.RecordBatch, window: Window, query: Query, types: dict[str, ColumnType]) -> pa.RecordBatch:
    keep = promising(BatchColumns(batch), window, query, types)
    return batch if keep is None or keep.all() else batch.filter(pa.array(keep))


def promising(columns: Columns, window: Window, query: Query, types: Mapping[str, ColumnType]) -> Array | None:
    """Which rows may come before the window's last, as far as the first column of the order tells by numbers.

    None: all.
    Beyond the last row of a window nothing is known, and nothing of interest: to be put there is to be left out, and a
    held row that is not put is taken out. The last only comes nearer while rows are put.
    """
    last = window.last
    if last is None or not query.order:
        return None
    (name, down), bound = query.order[0], last[0]
    if len(bound) == 1 or types[name].name in ("string", "bytes", "bool"):
        return None
    values, known = columns.numbers(name, types[name])
    # ``values`` end at 64 bits, which a sum may have left.
    most = bound[1] if values.dtype == np.float64 else min(max(bound[1], -INT64_MAX), INT64_MAX)
    keep: Array = (-values if down else values) <= most
    return keep if known is None else keep & known
