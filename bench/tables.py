"""The tables under test, made on whatever ``db`` is: a client or a store in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

import kivi
from bench.data import Expected, Ints, Pool
from bench.verify import WrongTotals, every_row

__all__ = ["AGGREGATE", "EVENTS", "NAMED", "check", "check_prefixes", "create", "held", "settled_s"]

EVENTS: Final = "events"
AGGREGATE: Final = "endpoint_5m"
NAMED: Final = ("customer", "application", "server")
_PATIENCE_S: Final = 600.0  # to read everything back, with a backlog before it: that is not what is measured
_PREFIXES: Final = 24  # of which each is read
_MEASURES: Final = {"total": kivi.sum("resp_time_us"), "n": kivi.count()}


def create(
    db: Any,
    events: str = EVENTS,
    aggregate: str = AGGREGATE,
    named: bool = False,
    keyed: Sequence[str] | None = None,
    more: dict[str, Any] | None = None,
    history: str | None = None,
    measures: dict[str, Any] | None = None,
    derived: dict[str, str] | None = None,
    retention: str | None = None,
) -> None:
    """An event table of three columns of integers and its aggregate by (endpoint_id, slot of five minutes).

    ``named``: three columns of strings as well, which are in the aggregate's key too unless ``keyed`` says what is.
    ``more``: further aggregates, by name: what each is grouped by. ``history``, ``measures``
    (besides the sum and the count), ``derived`` columns and ``retention``: of all aggregates, the latter of events too.
    """
    strings = NAMED if named else ()
    columns = dict.fromkeys(strings, "string")
    columns |= {"endpoint_id": "int64", "ts": "timestamp", "resp_time_us": "int64"}
    db.create_event_table(events, event_time="ts", columns=columns, retention=retention)
    keys = [*strings, "endpoint_id"] if keyed is None else keyed
    groups = {aggregate: [*keys, kivi.time_slot("ts", "5m", name="slot")], **(more or {})}
    for name, group_by in groups.items():
        db.create_aggregate(
            name,
            source=events,
            group_by=group_by,
            measures={**_MEASURES, **(measures or {})},
            derived=derived,
            history=history,
            retention=retention,
        )


def settled_s(db: Any) -> float:
    """Folds what waits, and says how many seconds that took: what a stream left behind when its clock stopped."""
    began = time.perf_counter()
    db.consolidate()
    return time.perf_counter() - began


def held(db: Any, aggregate: str = AGGREGATE) -> Any:
    """All rows of an aggregate, as one Arrow table of its key columns, ``total`` and ``n``."""
    with db.snapshot(ttl_s=_PATIENCE_S) as snapshot:
        return snapshot.to_arrow(aggregate)


def check(db: Any, expected: Expected, who: str, aggregate: str = AGGREGATE) -> None:
    """Raises WrongTotals unless every row of the aggregate is as expected."""
    every_row(who, held(db, aggregate), expected)


def check_prefixes(db: Any, events: Pool, stamps: Ints, who: str) -> None:
    """``events`` in the order of their commit timestamps, ``stamps``. At a sample of these, the first and the last
    among them, a snapshot must hold the events up to it, in their order, and the aggregate of exactly these: while
    deltas wait, and once they are folded. Raises WrongTotals."""
    sample = np.unique(np.linspace(0, len(stamps) - 1, _PREFIXES).astype(int))
    for folded in (False, True):
        if folded:
            db.consolidate()
        for last in sample.tolist():
            prefix, at = events.taken(np.arange(last + 1)), f"{who}, as of event {last:,} of {len(stamps):,}"
            with db.snapshot(as_of=int(stamps[last]), ttl_s=_PATIENCE_S) as snapshot:
                found, rows = snapshot.to_arrow(EVENTS), snapshot.to_arrow(AGGREGATE)
            every_row(at, rows, prefix.expected([1]))
            for name, wanted in (
                ("endpoint_id", prefix.endpoint),
                ("ts", prefix.ts_us),
                ("resp_time_us", prefix.resp_us),
            ):
                if not np.array_equal(found.column(name).cast(pa.int64()).to_numpy(), wanted):
                    raise WrongTotals(
                        f"{at}: {found.num_rows:,} events are there that are not the {last + 1:,} before it"
                    )
