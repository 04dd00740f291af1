"""Retention of aggregates, by every way into a store: declared, described, and its rows gone."""

from __future__ import annotations

from typing import Any

import pytest

import kivi
from kivi.embedded.database import Database
from kivi.errors import SchemaError
from tests.waiting import wait_until

MINUTE = 60_000_000


def events(minutes: range) -> list[dict[str, Any]]:
    return [{"ts": minute * MINUTE, "a": 1, "x": minute} for minute in minutes]


def test_an_aggregate_forgets_and_another_does_not(db: Any) -> None:
    db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "a": "int64", "x": "int64"})
    measures = {"calls": kivi.count()}
    with pytest.raises(SchemaError, match="no time slot"):
        db.create_aggregate("none", source="e", group_by=["a"], measures=measures, retention="10m")
    group_by = ["a", kivi.time_slot("ts", "1m")]
    db.create_aggregate("fine", source="e", group_by=group_by, measures=measures, retention="10m")
    db.create_aggregate("kept", source="e", group_by=group_by, measures=measures)
    assert db.describe("fine")["retention_us"] == 10 * MINUTE
    assert db.describe("kept")["retention_us"] is None
    assert db.describe("fine")["statistics"] == {"late_dropped": 0}
    db.append("e", events(range(60)))
    since = db.watermark()
    db.consolidate()
    if isinstance(db, Database):  # the embedded one: a server sets floors every few seconds
        db.store.housekeeping.move_floors()
    wait_until(lambda: "floor_us" in db.describe("fine")["statistics"], reason="no floor was set")
    db.append("e", events(range(45, 61)))
    found = db.describe("fine")
    assert found["statistics"]["late_dropped"] == 4
    assert found["statistics"]["floor_us"] == found["complete_since_us"] == 49 * MINUTE
    with db.snapshot() as snap:
        assert [(row["slot"].minute, row["calls"]) for row in snap.scan("fine", limit=2)] == [(49, 2), (50, 2)]
        assert len(list(snap.scan("fine"))) == snap.to_arrow("fine").num_rows == 12
        assert snap.get("fine", (1, 48 * MINUTE)) is None
        assert len(list(snap.scan("kept"))) == 61
        rows = list(snap.changes("fine", since=since, removed=True))
        assert [row["slot"].minute for row in rows if row["_removed"]] == list(range(49))
        assert [row["calls"] for row in rows if not row["_removed"]] == [2] * 11 + [1]
        batches = list(snap.change_batches("fine", since=since, removed=True, columns=["slot"]))
        assert sum(batch.num_rows for batch in batches) == 61
        assert batches[0].schema.names == ["slot", "_commit_ts", "_removed"]
