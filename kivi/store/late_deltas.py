"""Late deltas: events that lie below an aggregate's own retention floor, while other aggregates still count them.

A floor lies where a slot begins, so such an event is one whose time is before the floor: it is left out before anything
is grouped. Commits with late events are few. Without one nothing is copied, and aggregates share what they share
(``kivi.delta.grouping``).

``floors``: by id of each aggregate with a retention, the floor that the commit is derived for, in microseconds; it is
derived again if that is another by the time it enters (``kivi.store.retention``). ``Runs`` are by id as well;
``Counts`` say, by origin of the aggregates of which something was left out, how many events that were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.delta.derive import Derivation, derive_all, derive_each, derive_few
from kivi.delta.runs import Array, DeltaRun
from kivi.model.lifetimes import retention_slot
from kivi.model.schema import TableSchema

__all__ = ["each_in_time", "few_in_time", "runs_in_time"]

Floors = Mapping[int, int | None]
Runs = list[tuple[int, DeltaRun]]
Counts = dict[int, int]
Rows = list[tuple[bytes, dict[int, Any]]]
T = TypeVar("T")


def runs_in_time(aggregates: Sequence[TableSchema], floors: Floors, events: Derivation) -> tuple[Runs, Counts]:
    """The delta runs of one commit's events, but for those without an event, and the counts."""

    def derived(of: Sequence[TableSchema], kept: Array | None) -> list[DeltaRun]:
        return events.runs(of) if kept is None else derive_all(of, events.batch.take(pa.array(kept)))

    return _derived(aggregates, floors, events.batch, derived)


def few_in_time(
    aggregates: Sequence[TableSchema], floors: Floors, batch: pa.RecordBatch
) -> tuple[list[tuple[int, Rows]], Counts]:
    """The same of a few events, row by row (``derive_few``)."""

    def derived(of: Sequence[TableSchema], kept: Array | None) -> list[Rows]:
        return derive_few(of, batch if kept is None else batch.take(pa.array(kept)))

    return _derived(aggregates, floors, batch, derived)


def each_in_time(
    aggregates: Sequence[TableSchema], floors: Floors, events: Derivation, places: Array | None
) -> tuple[Runs, Counts]:
    """The same of events that are each a commit of their own, at these ``places`` among them."""

    def derived(of: Sequence[TableSchema], kept: Array | None) -> list[DeltaRun]:
        if kept is None:
            return derive_each(of, events, places)
        in_time = Derivation(events.batch.take(pa.array(kept)))
        return derive_each(of, in_time, kept.astype(np.uint64) if places is None else places[kept])

    return _derived(aggregates, floors, events.batch, derived)


def _derived(
    aggregates: Sequence[TableSchema],
    floors: Floors,
    batch: pa.RecordBatch,
    derive: Callable[[Sequence[TableSchema], Array | None], list[T]],
) -> tuple[list[tuple[int, T]], Counts]:
    kept = {aggregate.id: _in_time(aggregate, floors, batch) for aggregate in aggregates}
    whole = [aggregate for aggregate in aggregates if kept[aggregate.id] is None]
    runs = dict(zip((aggregate.id for aggregate in whole), derive(whole, None), strict=True))
    late: Counts = {}
    for aggregate in aggregates:
        if (of := kept[aggregate.id]) is not None:
            late[aggregate.origin] = batch.num_rows - len(of)
            if len(of):
                runs[aggregate.id] = derive([aggregate], of)[0]
    return [(aggregate.id, runs[aggregate.id]) for aggregate in aggregates if aggregate.id in runs], late


def _in_time(aggregate: TableSchema, floors: Floors, batch: pa.RecordBatch) -> Array | None:
    """The places of the events that are not late; None: of all. A null is for deriving to refuse."""
    floor_us = floors.get(aggregate.id)
    if floor_us is None or not batch.num_rows:
        return None
    times = batch.column(retention_slot(aggregate).source).cast(pa.int64())
    least = pc.min(times).as_py()
    if least is None or least >= floor_us:
        return None
    in_time = pc.fill_null(pc.greater_equal(times, floor_us), True)
    return np.flatnonzero(in_time.to_numpy(zero_copy_only=False))
