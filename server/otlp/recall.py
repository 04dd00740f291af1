"""The window as it was, read from the table: the ids of the events that were committed within it.

Retention may have dropped some of them. If those came again they would be below its floor, and left out as late.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.id_window import ID, SLOTS, Ids, Window, first_ones
from kivi.errors import SnapshotTooOld
from kivi.model.changes import Changes
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.store.facade import Store

__all__ = ["recall"]

_WIDTHS: Final = (16, 8)


def recall(store: Store, table: TableSchema, window: Window, ids: tuple[str, str] = ("trace_id", "span_id")) -> None:
    """Makes ``window`` that of ``table``. Commits are as old as the end of their eighth of it: kept rather too long."""
    window.clear()
    now_us = store.committer.now_us()
    slot_us = int(window.seconds * 1_000_000) // SLOTS + 1
    begins = [_last_commit_at(store, now_us - back * slot_us) for back in range(SLOTS, 0, -1)]
    slots: list[list[Ids]] = [[] for _ in begins]
    lease = store.begin()
    try:
        wanted = Scan(columns=ids, changes=Changes(begins[0], commit_ts=True, partial=True, retractions="ignore"))
        for batch in store.scan(lease, table, wanted):
            found, commits = _ids_of(batch)
            slot = np.searchsorted(begins, commits) - 1
            for each in np.unique(slot):
                slots[each].append(found[slot == each])
    finally:
        store.release(lease)
    for back, parts in zip(range(SLOTS - 1, -1, -1), slots, strict=True):
        if parts:
            found = np.concatenate(parts)
            found = found[first_ones(found)]  # by other means somebody may have appended one twice
            window.add(found[~window.known(found)], back * slot_us / 1e6)


def _last_commit_at(store: Store, moment_us: int) -> int:
    """0 if there was none by then."""
    try:
        lease = store.begin(as_of_us=moment_us)
    except SnapshotTooOld:
        return 0
    store.release(lease)
    return lease.ts


def _ids_of(batch: pa.RecordBatch) -> tuple[Ids, npt.NDArray[Any]]:
    """Of events, and the commits they are from. Those without proper ids came by other means, and have no say."""
    proper = [pc.equal(pc.binary_length(batch.column(i)), width) for i, width in enumerate(_WIDTHS)]
    batch = batch.filter(pc.fill_null(pc.and_(*proper), False))
    ids = pc.binary_join_element_wise(batch.column(0), batch.column(1), b"")
    return np.frombuffer(ids.buffers()[2], ID, len(ids)), batch.column(2).to_numpy()
