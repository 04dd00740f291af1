"""The effects of commits that entered together: data without methods that change it, for pending and its followers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from kivi.delta.ops import RowOp
from kivi.delta.runs import Array, DeltaRun

__all__ = ["ROW_BYTES", "Applied", "PendingEvents"]

ROW_BYTES: Final = 400
"""Memory of a pending row operation, besides its key: measured, one key, its list, a tuple, a RowOp and two small
dictionaries."""


class PendingEvents(NamedTuple):
    """Events of the commits ``first`` to ``last``. ``stamps``: the CTS of each, ascending; None: all are of
    ``first``."""

    first: int
    last: int
    batch: pa.RecordBatch
    stamps: Array | None = None

    def upto(self, cts: int) -> PendingEvents | None:
        """The events at or below ``cts``."""
        if self.last <= cts:
            return self
        if self.first > cts or self.stamps is None:
            return None
        end = int(np.searchsorted(self.stamps, np.uint64(cts), "right"))
        return PendingEvents(self.first, cts, self.batch.slice(0, end), self.stamps[:end])

    def after(self, cts: int) -> PendingEvents | None:
        """The events above ``cts``."""
        if self.first > cts:
            return self
        if self.last <= cts or self.stamps is None:
            return None
        begin = int(np.searchsorted(self.stamps, np.uint64(max(cts, 0)), "right"))
        return PendingEvents(cts + 1, self.last, self.batch.slice(begin), self.stamps[begin:])

    def cts_of_each(self) -> Array:
        """The CTS of each event."""
        return np.full(self.batch.num_rows, self.first, np.uint64) if self.stamps is None else self.stamps

    def commits(self) -> tuple[Array, Array]:
        """The CTS of its commits that brought an event, and how many each brought."""
        if self.stamps is None:
            return np.array([self.first], np.uint64), np.array([self.batch.num_rows], np.int64)
        return self.stamps, np.ones(len(self.stamps), np.int64)


class Applied(NamedTuple):
    """The effects of commits that entered together: (CTS, table, key, operation), and (table, events or run)."""

    rows: Sequence[tuple[int, int, bytes, RowOp]] = ()
    events: Sequence[tuple[int, PendingEvents]] = ()
    runs: Sequence[tuple[int, DeltaRun]] = ()

    @property
    def nbytes(self) -> int:
        distinct = {id(op): op for _, _, _, op in self.rows}  # many commits may share one
        varying = {name: op.varying_bytes for name, op in distinct.items()}
        return (
            sum([ROW_BYTES + len(key) + varying[id(op)] for _, _, key, op in self.rows])
            + sum(int(events.batch.nbytes) for _, events in self.events)
            + sum(run.nbytes for _, run in self.runs)
        )
