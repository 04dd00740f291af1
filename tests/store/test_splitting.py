"""Points at which a table is cut for many readers: the parts are of about the size asked for, and make the whole."""

from __future__ import annotations

import datetime as dt
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kivi

START_US = 1_750_000_000_000_000


@pytest.fixture(params=["memory", "disk"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    with kivi.open(None if request.param == "memory" else tmp_path / "data") as database:
        yield database


def parts(db: Any, table: str, rows: int) -> list[list[dict[str, Any]]]:
    points = db.split_points(table, rows)
    assert points == sorted(set(points))
    bounds = [None, *points, None]
    with db.snapshot() as snap:
        return [list(snap.scan(table, start=a, end=b)) for a, b in itertools.pairwise(bounds)]


def append(db: Any, moments: list[int]) -> None:
    times = pa.array(moments, pa.int64()).cast(pa.timestamp("us", "UTC"))
    db.append("events", pa.table({"ts": times, "n": pa.array(range(len(moments)))}))


@pytest.fixture
def events(db: Any) -> Any:
    db.create_event_table("events", event_time="ts", columns={"ts": "timestamp", "n": "int64"})
    return db


def test_rows_are_cut_by_their_keys(db):
    db.create_table("t", key={"name": "string", "id": "int64"}, columns={"n": kivi.sum("int64")})
    for at in range(0, 30_000, 10_000):
        with db.transaction() as tx:
            for i in range(at, at + 10_000):
                tx.delta("t", (f"name {i % 7}", i), n=i)
    db.consolidate()
    found = parts(db, "t", 10_000)
    assert sum(map(len, found)) == 30_000
    assert len({row["id"] for part in found for row in part}) == 30_000
    assert len(found) in (3, 4) and max(map(len, found)) < 16_000
    assert len(parts(db, "t", 1_000)) == 30
    assert db.split_points("t", 40_000) == []


def test_events_are_cut_by_their_time(events):
    moments = list(range(START_US, START_US + 60_000))
    random.Random(1).shuffle(moments)
    for at in range(0, 60_000, 20_000):
        append(events, moments[at : at + 20_000])
    for _ in range(2):  # pending, and in blocks
        found = parts(events, "events", 10_000)
        assert sorted(row["ts"] for part in found for row in part) == sorted(
            dt.datetime.fromtimestamp(0, dt.UTC) + dt.timedelta(microseconds=us) for us in moments
        )
        assert len(found) == 6 and all(9_000 < len(part) < 11_000 for part in found)
        events.consolidate()


def test_events_of_few_moments_and_of_none(events):
    assert events.split_points("events", 1) == []
    append(events, [START_US] * 1_000)
    assert events.split_points("events", 100) == []  # there is nothing between one moment and itself
    append(events, [START_US + 1] * 1_000)
    assert len(events.split_points("events", 100)) <= 1
    assert sum(map(len, parts(events, "events", 100))) == 2_000


def test_moments_that_no_datetime_holds_are_not_where_it_is_cut(events, monkeypatch):
    """Earlier stores may have them; and one of them must not keep a job from reading the others."""
    monkeypatch.setattr("kivi.arrow.records.check_moment", lambda value, what: value)
    append(events, [2**62 + i * 2**40 for i in range(2_000)])
    for at in range(0, 2_000, 200):
        append(events, [START_US + (at + i) * 1_000_000 for i in range(200)])
    for fewest in (3, 0):  # once they are one block, its events are taken to be spread evenly
        points = events.split_points("events", 500)
        assert len(points) >= fewest and all(isinstance(moment, dt.datetime) for (moment,) in points)
        bounds = [None, *points, None]
        with events.snapshot() as snap:
            counts = [
                sum(batch.num_rows for batch in snap.scan_batches("events", start=a, end=b))
                for a, b in itertools.pairwise(bounds)
            ]
        assert sum(counts) == 4_000
        events.consolidate()


def test_what_cannot_be_split(events):
    for rows in (0, -1, True, 1.5, "9"):
        with pytest.raises(kivi.InvalidArgument, match="rows is a number of rows"):
            events.split_points("events", rows)
    with pytest.raises(kivi.NotFound):
        events.split_points("nowhere", 1)
