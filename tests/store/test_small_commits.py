"""A commit pays for what it brings (decision 0083), and a row for its values (0090): what a thread calls is counted,
and is the same each time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import kivi
from kivi.embedded.database import Database
from kivi.model.scans import Scan
from kivi.runtime.settings import Settings
from kivi.store.facade import Store

OF_EVENTS = {"kivi.store.judging", "kivi.store.late_deltas", "kivi.store.retention", "kivi.delta.derive"}
OF_OTHERS = {"kivi.store.retraction", "kivi.store.patterns", "kivi.store.lateness", "kivi.store.spanning"}
CALLS_MAX = 200
"""Of functions in Python, by the thread that commits one delta: 184 when this was written, 251 before."""

CALLS_OF_A_ROW_MAX = 12
"""For each row of a scan of few rows: 11 when this was written, 16 before."""


@pytest.fixture
def db() -> Iterator[Database]:
    with Database(Store.open(None, settings=Settings(background=False))) as opened:
        opened.create_table("counters", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        opened.create_event_table("events", event_time="at", columns={"at": "timestamp", "value": "int64"})
        opened.create_aggregate(
            "sums", source="events", group_by=[kivi.time_slot("at", "5m")], measures={"total": kivi.sum("value")}
        )
        yield opened


def called(work: Callable[[], object]) -> Counter[str]:
    """The modules whose functions ``work`` calls in its thread, and how often, once it has been done before."""
    work()
    found = Counter[str]()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found[str(frame.f_globals.get("__name__"))] += 1

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def test_a_delta_calls_nothing_that_events_or_others_need(db: Database) -> None:
    def increment() -> None:
        with db.transaction() as tx:
            tx.delta("counters", (1,), n=1)

    found = called(increment)
    assert not (OF_EVENTS | OF_OTHERS) & found.keys() and not any(name.startswith("kivi.arrow") for name in found)
    assert found["kivi.store.transaction"] and found.total() <= CALLS_MAX, found.most_common()


def test_events_are_judged_where_there_is_a_rule(db: Database) -> None:
    def append() -> None:
        db.append("events", [{"at": 1_700_000_000_000_000, "value": 5}])

    assert "kivi.store.judging" not in called(append)
    db.create_event_table("large", event_time="at", columns={"at": "timestamp", "value": "int64"})
    db.create_rule("large", source="events", where=kivi.col("value") > 3, into="large")
    assert called(append)["kivi.store.judging"]


def test_a_row_of_a_scan_asks_nothing_that_its_table_has_told(db: Database) -> None:
    db.append("events", [{"at": 1_700_000_000_000_000 + i * 300_000_000, "value": i} for i in range(24)])
    db.consolidate()
    schema = db.store.table("sums")

    def scan(rows: int) -> int:
        with db.snapshot() as snap:
            return called(lambda: db.store.few_rows(snap._lease, schema, Scan(limit=rows, reverse=True))).total()

    assert scan(24) - scan(12) <= 12 * CALLS_OF_A_ROW_MAX
