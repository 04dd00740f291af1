"""The tables under test, made on whatever ``db`` is: a client or a store in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import kivi
from bench.data import Expected
from bench.verify import every_row

__all__ = ["AGGREGATE", "EVENTS", "NAMED", "check", "create", "held", "settled_s"]

EVENTS: Final = "events"
AGGREGATE: Final = "endpoint_5m"
NAMED: Final = ("customer", "application", "server")
_PATIENCE_S: Final = 600.0  # to read everything back, with a backlog before it: that is not what is measured
_MEASURES: Final = {"total": kivi.sum("resp_time_us"), "n": kivi.count()}


def create(
    db: Any,
    events: str = EVENTS,
    aggregate: str = AGGREGATE,
    named: bool = False,
    keyed: Sequence[str] | None = None,
    more: dict[str, Any] | None = None,
) -> None:
    """An event table of three columns of integers and its aggregate by (endpoint_id, slot of five minutes).

    ``named``: three columns of strings as well, which are in the aggregate's key too unless ``keyed`` says what is.
    ``more``: further aggregates, by name: what each is grouped by.
    """
    strings = NAMED if named else ()
    columns = dict.fromkeys(strings, "string")
    columns |= {"endpoint_id": "int64", "ts": "timestamp", "resp_time_us": "int64"}
    db.create_event_table(events, event_time="ts", columns=columns)
    keys = [*strings, "endpoint_id"] if keyed is None else keyed
    groups = {aggregate: [*keys, kivi.time_slot("ts", "5m", name="slot")], **(more or {})}
    for name, group_by in groups.items():
        db.create_aggregate(name, source=events, group_by=group_by, measures=_MEASURES)


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
