"""Subscriptions to rollups: the rows of the result that changed rows of the table belong to are combined again.

::

    changed rows of the table --by, step--> keys of the result --Rollups.roll(only=...)--> these rows --> window

So a window is what ``snap.rollup`` gives at the same snapshot, to the last bit. A range of the ``last`` time begins
where it did as long as the newest slot of the result is the same; when that moves, all of the range is read again, once
for each slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.columns import stored_rows
from kivi.delta.rolling import Rolling
from kivi.encoding.key_slots import KeySlot
from kivi.live.windows import Window
from kivi.model.rollups import Rollup, range_of_last, rolled_schema, stored_slot
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Query
from kivi.mvcc.leases import Lease
from kivi.store.facade import Store, rolled_batches
from kivi.store.key_ranges import key_range
from kivi.store.shards import asked_shards

if TYPE_CHECKING:
    from kivi.live.lives import RowsLive

__all__ = ["rolled_again", "rolled_window"]


def rolled_window(store: Store, lease: Lease, schema: TableSchema, query: Query) -> Window:
    """The whole result. Raises what a rollup raises, and ResourceExhausted for more rows than a window holds."""
    window = Window(query)
    _put(store, lease, schema, query, window, None)
    return window


def rolled_again(store: Store, lease: Lease, schema: TableSchema, live: RowsLive, keys: list[bytes]) -> bool:
    """Brings the window to a snapshot, given the rows of the table, in order, that changed since the one before.

    False: it has to be read again. Raises what a rollup raises.
    """
    rollup = live.query.scan.rollup
    assert rollup is not None
    low, high = live.range
    found = pa.array(
        [key for key in keys if (low is None or key >= low) and (high is None or key < high)], pa.large_binary()
    )
    window, newest = live.window, _newest_slot(schema, found, rollup)
    begins = None if newest is None else range_of_last(schema, rollup, newest)
    if begins is not None and (window.low_us is None or begins > window.low_us):
        return False  # unless ``where`` does not select it, which the reading finds out
    found = _within(schema, rollup, window.low_us, found)
    if not len(found):
        return True
    only = pc.unique(Rolling.by_names(schema, rolled_schema(schema, rollup), rollup.step).keys(found))
    newest_us = _put(store, lease, schema, live.query, window, only.take(pc.array_sort_indices(only)))
    if begins is None or begins != window.low_us:
        return True
    # A row of the newest slot changed: it is there still, or the range may end earlier now.
    return newest_us is not None and range_of_last(schema, rollup, newest_us) == window.low_us


def _newest_slot(schema: TableSchema, keys: pa.LargeBinaryArray, rollup: Rollup) -> int | None:
    if rollup.last_us is None or not len(keys):
        return None
    return int(KeySlot.of(schema).slots(keys).max())


def _within(schema: TableSchema, rollup: Rollup, low_us: int | None, keys: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    """The keys whose slots belong to the rollup."""
    low, high = (rollup.start_us, rollup.end_us) if rollup.last_us is None else (low_us, None)
    if stored_slot(schema) is None or (low is None and high is None):
        return keys
    slots = KeySlot.of(schema).slots(keys)
    kept = np.ones(len(slots), np.bool_) if low is None else slots >= low
    return keys.filter(pa.array(kept if high is None else kept & (slots < high)))


def _put(
    store: Store, lease: Lease, schema: TableSchema, query: Query, window: Window, only: pa.LargeBinaryArray | None
) -> int | None:
    """Puts the result, or ``only`` these rows of it, into the window. The newest slot that was read for it."""
    scan = query.scan
    assert scan.rollup is not None
    bounds = key_range(schema, scan)
    rolled = store.reads.rollups_of(asked_shards(schema, scan)).roll(
        lease, schema, scan, bounds, only=only, low_us=window.low_us
    )
    keys = rolled.rows.keys.to_pylist()
    outputs, at = query.needed, 0
    for batch in rolled_batches(rolled, outputs, None):
        for row in stored_rows(batch):
            window.put(keys[at], row)
            at += 1
    if only is None:
        window.low_us = rolled.low_us
    else:
        for key in set(only.to_pylist()).difference(keys):
            window.remove(key)
    window.dropped.clear()
    return rolled.newest_us
