"""Late deltas: events that lie below an aggregate's own retention floor, while other aggregates still count them.

A floor lies where a slot begins, so such an event is one whose time is before the floor: it is left out before anything
is grouped. Commits with late events are few. Without one nothing is copied, and aggregates share what they share
(``kivi.delta.grouping``).

``floors``: by id of each aggregate with a retention, the floor that the commit is derived for, in microseconds; it is
derived again if that is another by the time it enters (``kivi.store.retention``). ``Runs`` are by id as well;
``Counts`` say, by origin of the aggregates of which something was left out, how many events that were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.delta.derive import Derivation, derive_each, derive_few
from kivi.delta.finite import overflowing
from kivi.delta.runs import Array, DeltaRun
from kivi.model.lifetimes import retention_slot
from kivi.model.schema import TableSchema

__all__ = ["Counts", "Floors", "Runs", "beyond", "each_in_time", "few_in_time", "runs_in_time"]

Floors = Mapping[int, int | None]
Runs = list[tuple[int, DeltaRun]]
Counts = dict[int, int]
Rows = list[tuple[bytes, dict[int, Any]]]
T = TypeVar("T")


def runs_in_time(aggregates: Sequence[TableSchema], floors: Floors, events: Derivation) -> tuple[Runs, Counts]:
    """The delta runs of one commit's events, but for those without an event, and the counts."""

    def derived(of: Sequence[TableSchema], kept: Array | None) -> list[DeltaRun]:
        return (events if kept is None else events.taken(kept)).runs(of)

    return _derived(aggregates, floors, events.batch, derived)


def few_in_time(
    aggregates: Sequence[TableSchema], floors: Floors, batch: pa.RecordBatch
) -> tuple[list[tuple[int, Rows]], Counts]:
    """The same of a few events, row by row (``derive_few``)."""

    def derived(of: Sequence[TableSchema], kept: Array | None) -> list[Rows]:
        return derive_few(of, batch if kept is None else batch.take(pa.array(kept)))

    return _derived(aggregates, floors, batch, derived)


def each_in_time(aggregates: Sequence[TableSchema], floors: Floors, events: Derivation) -> tuple[Runs, Counts]:
    """The same of events that several commits bring (``derive_each``)."""

    def derived(of: Sequence[TableSchema], kept: Array | None) -> list[DeltaRun]:
        return derive_each(of, events if kept is None else events.taken(kept))

    return _derived(aggregates, floors, events.batch, derived)


def beyond(aggregates: Sequence[TableSchema], floors: Floors, events: Derivation, given: int = 0) -> Array:
    """Which of the events some aggregate cannot have: those that it can never have, and, in the order of the events,
    each of the others that its sums of floats cannot have besides those before it that they can
    (``kivi.delta.finite``). The first ``given`` are there already, and can be derived from."""
    out = np.zeros(events.rows, np.bool_)
    for alone in (Derivation.beyond, Derivation.refused):
        rest = np.flatnonzero(~out)
        for aggregate, part, at in _parts(aggregates, floors, events.taken(rest)):
            out[rest[at]] |= alone(part, aggregate)
    rest = np.flatnonzero(~out)
    parts = _parts(aggregates, floors, events.taken(rest))
    measures = [
        found._replace(events=at[found.events]) for aggregate, part, at in parts for found in part.addends(aggregate)
    ]
    out[rest] = overflowing(measures, len(rest), given)
    return out


def _parts(
    aggregates: Sequence[TableSchema], floors: Floors, events: Derivation
) -> Iterator[tuple[TableSchema, Derivation, Array]]:
    """Of each aggregate the events that are not late, and their places."""
    for aggregate in aggregates:
        kept = _in_time(aggregate, floors, events.batch)
        yield aggregate, *((events, np.arange(events.rows)) if kept is None else (events.taken(kept), kept))


def _derived(
    aggregates: Sequence[TableSchema],
    floors: Floors,
    batch: pa.RecordBatch,
    derive: Callable[[Sequence[TableSchema], Array | None], list[T]],
) -> tuple[list[tuple[int, T]], Counts]:
    if not floors:
        return list(zip([aggregate.id for aggregate in aggregates], derive(aggregates, None), strict=True)), {}
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
