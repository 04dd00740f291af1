"""Cutting a table into parts of about as many rows, for jobs that read it with many readers at once.

The points are bounds of scans: keys of rows, and moments of event tables. They say nothing about what is in the table:
whichever they are, the parts together are the whole, at any snapshot. So they may be estimates, and are:

* Rows: of the keys in base every n-th, found by walking over them. What is pending alone is not counted.
* Events: headers know from when to when the events of a block are. Within a block these are taken to be spread evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import stored_array
from kivi.encoding.keys import decode_key, prefix_end
from kivi.encoding.keyspaces import Space, table_prefix
from kivi.engine import Engine
from kivi.events.pruning import Known
from kivi.model.schema import TableSchema

__all__ = ["event_points", "row_points"]

_STEP: Final = 4_096
_POINTS_MAX: Final = 10_000


def row_points(engine: Engine, schema: TableSchema, rows: int) -> Iterator[tuple[Any, ...]]:
    """The key, in stored form, of every ``rows``-th row or so."""
    step = min(rows, _STEP)
    prefix = table_prefix(Space.ROW, schema.id)
    types = [column.type for column in schema.key]
    passed = points = 0
    for key in engine.every(prefix, prefix_end(prefix), step):
        passed += step
        if passed >= rows:
            passed = 0
            points += 1
            yield tuple(decode_key(types, key[len(prefix) :]))
            if points == _POINTS_MAX:
                return


def event_points(
    schema: TableSchema, blocks: Sequence[Known], recent: Sequence[pa.RecordBatch], rows: int
) -> Iterator[tuple[int]]:
    """Moments (microseconds) with about ``rows`` events between each and the next."""
    spans = [(block.time_min, block.time_max, block.rows) for block in blocks]
    for batch in recent:
        if batch.num_rows:
            times = stored_array(schema.column(schema.event_time or "").type, batch.column(schema.event_time))
            spans.append((int(times.min()), int(times.max()), batch.num_rows))
    if not spans:
        return
    low, high, count = (np.array(column, np.float64) for column in zip(*spans, strict=True))
    first, beyond = min(span[0] for span in spans), max(span[1] for span in spans) + 1
    low, high = low - first, high - first + 1  # of moments since the first, which a float64 holds well enough
    moments = np.unique(np.concatenate([low, high]))
    before = np.zeros(len(moments))
    for begins, ends, many in zip(low, high, count, strict=True):
        before += many * np.clip((moments - begins) / (ends - begins), 0.0, 1.0)
    wanted = np.arange(rows, before[-1], rows)[:_POINTS_MAX]
    last = first
    for moment in np.interp(wanted, before, moments):
        point = first + int(moment)
        if last < point < beyond:
            last = point
            yield (point,)
