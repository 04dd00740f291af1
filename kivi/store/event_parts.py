"""Events as a reader wants them: those in memory trimmed to what a scan of blocks gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa

from kivi.arrow.dictionaries import plain
from kivi.arrow.predicates import filter_batch
from kivi.encoding.event_names import POSITION, STAMP, EventNames
from kivi.errors import InvalidArgument
from kivi.events.views import later_of
from kivi.model.expressions import Expr, all_of, between, names
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.mvcc.applied import PendingEvents

__all__ = ["event_times", "named_events", "pieces", "trimmer"]


def pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same events in batches of at most 65,536 rows."""
    for batch in batches:
        for at in range(0, batch.num_rows, 65_536):
            yield batch.slice(at, 65_536)


def event_times(schema: TableSchema, wanted: Scan) -> tuple[Any, Any]:
    """From which moment on, and before which, a scan wants events. Raises InvalidArgument for one by keys."""
    if wanted.prefix:
        raise InvalidArgument(f"event table {schema.name!r} has no row keys: use where, or start and end for its time")
    return wanted.times


def trimmer(
    schema: TableSchema, where: Expr | None, times: tuple[Any, Any], floor_us: int | None, outputs: list[str]
) -> Callable[[pa.RecordBatch, bool], pa.RecordBatch]:
    """Does to batches in memory what the block scan does to stored ones: time range, floor, predicate, columns."""
    time_column, (low, beyond) = schema.event_time or "", times
    committed_filter = all_of(where, between(time_column, later_of(low, floor_us), beyond))
    own_filter = all_of(where, between(time_column, low, beyond))
    types = {c.name: c.type for c in schema.columns}

    def trim(batch: pa.RecordBatch, committed: bool) -> pa.RecordBatch:
        predicate = committed_filter if committed else own_filter
        if predicate is not None:
            batch = filter_batch(plain(batch.select(sorted({*outputs, *names(predicate)}))), predicate, types)
        return plain(batch.select(outputs))

    return trim


def named_events(part: PendingEvents, first: int) -> pa.RecordBatch:
    """Those that are left, with their names, as a scan of blocks gives them; ``first``: the position of the first."""
    known = EventNames.of_rows(*part.commits(), first)
    batch = part.batch.append_column(STAMP, pa.array(known.stamps)).append_column(POSITION, pa.array(known.positions))
    return part._replace(batch=batch).kept()
