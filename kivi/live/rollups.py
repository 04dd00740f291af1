"""Subscriptions to rollups: the rows of the result that changed rows of the table belong to are made again.

::

    changed rows of the table --by, step--> keys of the result --> these rows, of partial results or read --> window

So a window is what ``snap.rollup`` gives at the same snapshot, to the last bit. The rows of the result are made of
partial results that are kept in memory (``kivi.live.partials``), or where these cannot be had, or would be too large,
of the table's rows (``Rollups.roll(only=...)``).

A range of the ``last`` time begins where it did as long as the newest slot of the result is the same. When that moves,
partial results of slots before it are let go of; where there are none all of the range is read again. Rows of the
future do not belong to it (``kivi.model.rollups``): where there are some, all of it is read again when another slot may
have come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.columns import stored_rows
from kivi.delta.overlay import FixedRows
from kivi.delta.rolling import Rolling
from kivi.encoding.key_slots import KeySlot
from kivi.live.partials import WINDOW_BYTES, partials_of
from kivi.live.windows import Window
from kivi.model.rollups import Ends, Rollup, range_of_last, rolled_schema, stored_slot
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Query
from kivi.mvcc.leases import Lease
from kivi.store.facade import Store, rolled_batches
from kivi.store.key_ranges import key_range
from kivi.store.rollups import TooManyRows
from kivi.store.shards import asked_shards

if TYPE_CHECKING:
    from kivi.live.shared import Shared

__all__ = ["moved", "rolled_again", "rolled_on", "rolled_window"]


def moved(store: Store, lease: Lease, schema: TableSchema, shared: Shared) -> bool:
    """Whether a range of the ``last`` time has rows of the future, of which some may have come at a snapshot. If there
    are none, it may end with later slots from then on."""
    rollup = shared.query.scan.rollup
    if rollup is None or rollup.last_us is None:
        return False
    known, high = shared.window.partials or shared.window, store.reads.rollups.ends_before(lease.ts, schema)
    if known.ends.beyond:
        return high != known.ends.high_us
    known.ends = Ends(high)
    return False


def rolled_window(store: Store, lease: Lease, schema: TableSchema, query: Query) -> Window:
    """The whole result. Raises what a rollup raises, and ResourceExhausted for more rows than a window holds."""
    window, partials = Window(query), partials_of(schema, query.scan)
    reads = store.reads.rollups_of(asked_shards(schema, query.scan))
    if partials is not None:
        try:
            last, most = query.scan.rollup, WINDOW_BYTES
            rolled = reads.roll(lease, schema, partials.wanted, partials.bounds, last=last, bytes_max=most)
        except TooManyRows:
            pass
        else:
            partials.begin(rolled, _floor(store, schema, lease))
            _put(query, schema, partials.rows(), window)
            window.partials = partials
            _bounded(window)
            return window
    rolled = reads.roll(lease, schema, query.scan, key_range(schema, query.scan))
    _put(query, schema, rolled.rows, window)
    window.low_us, window.ends = rolled.low_us, rolled.ends
    return window


def rolled_on(store: Store, lease: Lease, schema: TableSchema, shared: Shared) -> bool:
    """Brings a window with partial results, which have been told what changed, to a snapshot.

    False: it has to be read again. Raises what a rollup raises.
    """
    window, query = shared.window, shared.query
    partials = window.partials
    assert partials is not None
    reads = store.reads.rollups_of(asked_shards(schema, query.scan))

    def read(only: pa.LargeBinaryArray) -> FixedRows:
        wanted, low_us, high_us = partials.wanted, partials.low_us, partials.ends.bound_us
        return reads.roll(lease, schema, wanted, partials.bounds, only=only, low_us=low_us, high_us=high_us).rows

    touched = partials.advance(_floor(store, schema, lease), read)
    if touched is None:
        return False
    if touched:
        _put(query, schema, partials.rows(touched), window, touched)
    if window.short:
        fresh = Window(query)
        _put(query, schema, partials.rows(), fresh)
        fresh.partials = partials
        shared.take_over(fresh)
    _bounded(shared.window)
    return True


def _floor(store: Store, schema: TableSchema, lease: Lease) -> int | None:
    return store.retention.seen_at(schema.id, lease.ts) if schema.forgets_rows else None


def _bounded(window: Window) -> None:
    """Lets go of partial results that take too much; what changes from then on is read again."""
    partials = window.partials
    if partials is not None and partials.nbytes > WINDOW_BYTES:
        window.let_go_of_partials()


def rolled_again(store: Store, lease: Lease, schema: TableSchema, shared: Shared, keys: list[bytes]) -> bool:
    """Brings a window without partial results to a snapshot, given the rows of the table, in order, that changed since
    the one before.

    False: it has to be read again. Raises what a rollup raises.
    """
    query, rollup = shared.query, shared.query.scan.rollup
    assert rollup is not None
    low, high = shared.range
    found = pa.array(
        [key for key in keys if (low is None or key >= low) and (high is None or key < high)], pa.large_binary()
    )
    window = shared.window
    if rollup.last_us is not None and len(found) and (ends := window.ends.high_us) is not None:
        early = KeySlot.of(schema).slots(found) < ends
        if window.ends.alone and early.any():
            return False
        if not window.ends.alone and not early.all():
            found, window.ends = found.filter(pa.array(early)), Ends(ends, beyond=True)
            if window.low_us is None:  # they may be alone
                return False
    newest = _newest_slot(schema, found, rollup)
    begins = None if newest is None else range_of_last(schema, rollup, newest)
    if begins is not None and (window.low_us is None or begins > window.low_us):
        return False  # unless ``where`` does not select it, which the reading finds out
    found = _within(schema, rollup, window.low_us, found)
    if not len(found):
        return True
    only = pc.unique(Rolling.by_names(schema, rolled_schema(schema, rollup), rollup.step).keys(found))
    rolled = store.reads.rollups_of(asked_shards(schema, query.scan)).roll(
        lease, schema, query.scan, shared.range, only=only.take(pc.array_sort_indices(only)), low_us=window.low_us,
        high_us=window.ends.bound_us,
    )  # fmt: skip
    _put(query, schema, rolled.rows, window, {*only.to_pylist()})
    if begins is None or begins != window.low_us:
        return True
    # A row of the newest slot changed: it is there still, or the range may end earlier now.
    return rolled.newest_us is not None and range_of_last(schema, rollup, rolled.newest_us) == window.low_us


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
    query: Query, schema: TableSchema, rolled: FixedRows, window: Window, touched: set[bytes] | None = None
) -> None:
    """Puts rows of the result into a window; of those that were touched, the others are gone."""
    rollup = query.scan.rollup
    assert rollup is not None
    keys = rolled.keys.to_pylist()
    at = 0
    for batch in rolled_batches(rolled_schema(schema, rollup), rolled, query.needed, None):
        for row in stored_rows(batch):
            window.put(keys[at], row)
            at += 1
    if touched is not None:
        for key in touched.difference(keys):
            window.remove(key)
    window.dropped.clear()
