"""Results of questions: rows that were computed, for whoever asked.

::

    result = snap.rollup("server_5m", by=["application"], step="1h")
    for row in result: ...                 # dicts, in order, as often as wanted
    result.to_arrow()                      # a pyarrow Table
    print(result.explain())                # what was read for it, and how
    result.complete_since                  # from this moment on nothing is missing; None: nothing is
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kivi.arrow.columns import rows_from_batch
from kivi.model.types import ColumnType

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Result"]

_MOMENT = ColumnType("timestamp")


class Result:
    """Rows of one snapshot. It is the same for every database, and the caller's to keep."""

    def __init__(
        self, schema: pa.Schema, batches: Sequence[pa.RecordBatch], explanation: str, complete_since_us: int | None
    ) -> None:
        self._schema, self._batches, self._explanation = schema, batches, explanation
        self._complete_since_us = complete_since_us

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._batches:
            yield from rows_from_batch(batch)

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self._batches)

    def to_arrow(self) -> pa.Table:
        """The rows as one Arrow table."""
        import pyarrow as pa

        return pa.Table.from_batches(self._batches, self._schema)

    def explain(self) -> str:
        """How it was made, for people: which table, what was read of it, what was combined."""
        return self._explanation

    @property
    def complete_since(self) -> dt.datetime | None:
        """From which slot on no row is missing: later than the first event's where retention took rows away, or where
        the aggregate was made after events had been forgotten. None: all are there."""
        since: dt.datetime | None = _MOMENT.from_stored(self._complete_since_us)
        return since
