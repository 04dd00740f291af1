"""The effects of commits that entered together: data without methods that change it, for pending and its followers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from kivi.arrow.dictionaries import held_bytes
from kivi.delta.ops import RowOp
from kivi.delta.runs import Array, DeltaRun
from kivi.encoding.event_names import EventNames

__all__ = ["ROW_BYTES", "Applied", "PendingEvents", "Retracted"]

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
    erased: Array | None = None
    """Rows that a reader leaves out as retracted, in order. What is pending has all of them."""

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

    def kept(self) -> pa.RecordBatch:
        """The events without the retracted ones."""
        return self.slice(0, self.batch.num_rows)[0]

    def slice(self, low: int, high: int) -> tuple[pa.RecordBatch, Array]:
        """Of the events from ``low`` to ``high`` those that are left, and their CTS."""
        if self.erased is None:
            return self.batch.slice(low, high - low), self.cts_of_each()[low:high]
        left = np.ones(self.batch.num_rows, np.bool_)
        left[self.erased] = False
        rows = low + np.flatnonzero(left[low:high])
        return self.batch.take(pa.array(rows)), self.cts_of_each()[rows]

    def commits(self) -> tuple[Array, Array]:
        """The CTS of its commits that brought an event, and how many each brought."""
        if self.stamps is None:
            return np.array([self.first], np.uint64), np.array([self.batch.num_rows], np.int64)
        before = self.stamps[:1] + np.uint64(1)  # which is another one
        begins = np.flatnonzero(np.diff(self.stamps, prepend=before))  # rules may raise several events for one commit
        return self.stamps[begins], np.diff(begins, append=len(self.stamps))


class Retracted(NamedTuple):
    """The events that the retraction at ``cts`` removed from a table."""

    cts: int
    names: EventNames


class Applied(NamedTuple):
    """The effects of commits that entered together: (CTS, table, key, operation), and (table, events, run or names)."""

    rows: Sequence[tuple[int, int, bytes, RowOp]] = ()
    events: Sequence[tuple[int, PendingEvents]] = ()
    runs: Sequence[tuple[int, DeltaRun]] = ()
    retracted: Sequence[tuple[int, Retracted]] = ()

    @property
    def nbytes(self) -> int:
        nbytes = ROW_BYTES * len(self.rows)
        varying: dict[int, int] = {}
        for _, _, key, op in self.rows:
            if id(op) not in varying:  # many commits may share one
                varying[id(op)] = op.varying_bytes
            nbytes += len(key) + varying[id(op)]
        for _, events in self.events:
            nbytes += held_bytes(events.batch)
        for _, run in self.runs:
            nbytes += run.nbytes
        for _, one in self.retracted:
            nbytes += one.names.nbytes
        return nbytes
