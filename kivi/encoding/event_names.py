"""Names of events: (CTS of the commit, position among the events that the commit brought to the table).

An event keeps its name for as long as it is there, wherever it lies: in pending, in a block, in a block that compaction
made of others. So a retraction says in the log which events it removes by naming them (R22), as ranges of positions::

    IPC stream, lz4      cts u64     first u32    rows u32         the events first to first + rows - 1 of that commit

The events of a block or of a pending batch lie in *runs*: (CTS, how many events), in commit order. Of the first commit
a block may have but a part, which then begins at the position ``first``.

Pure: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kivi.arrow.ipc import encode_ipc, own_batches
from kivi.errors import DataLoss

__all__ = ["POSITION", "STAMP", "EventNames"]

STAMP: Final = "\0cts"
POSITION: Final = "\0position"
"""The columns that a scan adds for the names of its events: no column of a table may be called so."""

Array = npt.NDArray[Any]


class EventNames(NamedTuple):
    """Distinct names in order. ``stamps`` uint64, ``positions`` int64."""

    stamps: Array
    positions: Array

    @staticmethod
    def none() -> EventNames:
        return EventNames(np.zeros(0, np.uint64), np.zeros(0, np.int64))

    @staticmethod
    def of_columns(batches: Iterable[pa.RecordBatch]) -> EventNames:
        """The names of events that come in commit order, with the columns ``STAMP`` and ``POSITION``."""
        found = [EventNames(*(batch.column(name).to_numpy() for name in (STAMP, POSITION))) for batch in batches]
        return EventNames(*map(np.concatenate, zip(*found, strict=True))) if found else EventNames.none()

    @staticmethod
    def of_rows(stamps: Array, rows: Array, first: int) -> EventNames:
        """The names of all events that lie in runs."""
        starts = np.cumsum(rows) - rows
        positions = np.arange(int(rows.sum())) - np.repeat(starts, rows)
        if len(rows):
            positions[: rows[0]] += first
        return EventNames(np.repeat(stamps, rows), positions)

    @property
    def size(self) -> int:
        return len(self.stamps)

    @property
    def nbytes(self) -> int:
        return int(self.stamps.nbytes + self.positions.nbytes)

    @staticmethod
    def union(parts: Iterable[EventNames]) -> EventNames:
        """Those that are in any of them."""
        kept = [part for part in parts if len(part.stamps)]
        if len(kept) < 2:
            return kept[0] if kept else EventNames.none()
        stamps, positions = map(np.concatenate, zip(*kept, strict=True))
        order = np.lexsort((positions, stamps))
        stamps, positions = stamps[order], positions[order]
        new = np.ones(len(stamps), np.bool_)
        new[1:] = (stamps[1:] != stamps[:-1]) | (positions[1:] != positions[:-1])
        return EventNames(stamps[new], positions[new])

    def rows_in(self, stamps: Array, rows: Array, first: int) -> Array:
        """Which of the events in these runs they name: ascending numbers of rows."""
        low = high = 0
        if len(stamps):
            low = int(np.searchsorted(self.stamps, stamps[0], "left"))
            high = int(np.searchsorted(self.stamps, stamps[-1], "right"))
        if low == high:
            return np.zeros(0, np.int64)
        named, positions = self.stamps[low:high], self.positions[low:high]
        run = np.minimum(np.searchsorted(stamps, named), len(stamps) - 1)
        positions = np.where(run == 0, positions - first, positions)
        inside = (stamps[run] == named) & (positions >= 0) & (positions < rows[run])
        found: Array = ((np.cumsum(rows) - rows)[run] + positions)[inside]
        return found

    def rows_among(self, stamps: Array, positions: Array) -> Array:
        """Which of some events, in any order, they name: ascending numbers of rows."""
        low = high = 0
        if len(stamps):
            low = int(np.searchsorted(self.stamps, stamps.min(), "left"))
            high = int(np.searchsorted(self.stamps, stamps.max(), "right"))
        if low == high:
            return np.zeros(0, np.int64)
        distinct, commit = np.unique(self.stamps[low:high], return_inverse=True)
        at = np.minimum(np.searchsorted(distinct, stamps), len(distinct) - 1)
        near = np.flatnonzero(distinct[at] == stamps)
        codes = (commit << 32) + self.positions[low:high]
        asked = (at[near] << 32) + positions[near]
        found: Array = near[codes[np.minimum(np.searchsorted(codes, asked), len(codes) - 1)] == asked]
        return found

    def encode(self) -> bytes:
        """See the top of this page."""
        begins = np.ones(len(self.stamps), np.bool_)
        begins[1:] = (self.stamps[1:] != self.stamps[:-1]) | (self.positions[1:] != self.positions[:-1] + 1)
        at = np.flatnonzero(begins)
        columns = {
            "cts": pa.array(self.stamps[at]),
            "first": pa.array(self.positions[at].astype(np.uint32)),
            "rows": pa.array(np.diff(at, append=len(self.stamps)).astype(np.uint32)),
        }
        return encode_ipc(pa.RecordBatch.from_pydict(columns), "lz4").to_pybytes()  # type: ignore[no-any-return]

    @staticmethod
    def decode(data: Any) -> EventNames:
        """Raises DataLoss for anything but what ``encode`` gives."""
        try:
            (batch,) = own_batches(data)
            stamps, first, rows = (batch.column(name).to_numpy() for name in ("cts", "first", "rows"))
        except (pa.ArrowException, OSError, ValueError, KeyError, StopIteration) as error:
            raise DataLoss(f"the names of retracted events are damaged ({error}): run kivi verify") from None
        rows = rows.astype(np.int64)
        starts = np.cumsum(rows) - rows
        within = np.arange(int(rows.sum())) - np.repeat(starts, rows)
        return EventNames(np.repeat(stamps.astype(np.uint64), rows), np.repeat(first.astype(np.int64), rows) + within)
