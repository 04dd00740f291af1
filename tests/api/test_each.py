"""``appender(each=True)``: every event a transaction of its own, with its own commit timestamp and outcome (R19)."""

from __future__ import annotations

import random
from typing import Any

import pytest

import kivi
from kivi.errors import InvalidArgument

SLOT_US = 300_000_000
EVENTS = 1_000


@pytest.fixture
def calls(db: Any) -> Any:
    db.create_event_table(
        "calls", event_time="ts", columns={"k": "int64", "ts": "timestamp", "us": "int64", "f": "float64"}
    )
    for name, history in (("kept", "1d"), ("plain", None)):
        db.create_aggregate(
            name,
            source="calls",
            group_by=["k", kivi.time_slot("ts", "5m", name="slot")],
            measures={
                "total": kivi.sum("us"),
                "calls": kivi.count(),
                "slowest": kivi.max("us"),
                "f": kivi.sum("f"),
            },
            history=history,
        )
    return db


def events(count: int, seed: int = 1) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {
            "k": draw.randrange(4),
            "ts": 1_700_000_000_000_000 + draw.randrange(4 * SLOT_US),
            "us": draw.randrange(1_000),
            "f": draw.random(),
        }
        for _ in range(count)
    ]


def appended(db: Any, rows: list[dict[str, Any]], **options: Any) -> list[Any]:
    """The futures of the events, which are settled."""
    options = {"linger_ms": 2, "max_events": 300, "each": True} | options
    if not hasattr(db, "_target"):
        with db.appender("calls", **options) as app:
            return [app.append(**row) for row in rows]

    async def run() -> list[Any]:
        async with db._target.appender("calls", **options) as app:
            return [app.append(**row) for row in rows]

    futures: list[Any] = db._loop.run_until_complete(run())
    return futures


def sums(rows: list[dict[str, Any]]) -> dict[tuple[int, int], list[Any]]:
    """What an aggregate holds after these events, added in their order."""
    found: dict[tuple[int, int], list[Any]] = {}
    for row in rows:
        cells = found.setdefault((row["k"], row["ts"] // SLOT_US * SLOT_US), [0, 0, None, 0.0])
        cells[0] += row["us"]
        cells[1] += 1
        cells[2] = row["us"] if cells[2] is None else max(cells[2], row["us"])
        cells[3] += row["f"]
    return found


def rows_of(snap: Any, table: str) -> dict[tuple[int, int], list[Any]]:
    return {
        (row["k"], round(row["slot"].timestamp() * 1_000_000)): [row["total"], row["calls"], row["slowest"], row["f"]]
        for row in snap.scan(table)
    }


def read_back(snap: Any) -> list[tuple[Any, ...]]:
    table = snap.to_arrow("calls")
    return list(zip(*(table.column(name).to_pylist() for name in ("k", "us", "f")), strict=True))


def check_prefixes(db: Any, rows: list[dict[str, Any]], stamps: list[int], tables: list[str]) -> None:
    """At each of some of the timestamps exactly the events up to it are there, and in the aggregates."""
    for place in (0, 1, 17, 299, 300, 301, 640, len(rows) - 2, len(rows) - 1):
        with db.snapshot(as_of=stamps[place]) as snap:
            assert read_back(snap) == [(row["k"], row["us"], row["f"]) for row in rows[: place + 1]]
            for table in tables:
                assert rows_of(snap, table) == sums(rows[: place + 1]), (table, place)


def test_r19_every_event_has_its_own_timestamp_and_each_of_them_reads_its_prefix(calls: Any) -> None:
    rows = events(EVENTS)
    futures = appended(calls, rows)
    stamps = [future.result() for future in futures]
    assert len(set(stamps)) == EVENTS and stamps == sorted(stamps)
    check_prefixes(calls, rows, stamps, ["kept"])
    calls.consolidate()
    check_prefixes(calls, rows, stamps, ["kept"])
    with calls.snapshot() as snap:
        assert rows_of(snap, "plain") == sums(rows)


def test_r19_a_future_carries_token_and_place_and_the_outcome_is_asked_by_both(calls: Any) -> None:
    futures = appended(calls, events(EVENTS))
    assert len({future.token for future in futures}) >= 4
    assert len({(future.token, future.place) for future in futures}) == EVENTS
    for when in ("in memory", "in base"):
        for future in futures[::97]:
            assert calls.outcome(future.token, future.place) == future.result(), when
        assert calls.outcome(futures[0].token) == futures[0].result()
        with pytest.raises(InvalidArgument, match="places 0 to"):
            calls.outcome(futures[0].token, 5_000)
        calls.consolidate()
    for place in (-1, True, "0", 2**32):
        with pytest.raises(InvalidArgument):
            calls.outcome(futures[0].token, place)


def test_a_tail_tells_the_timestamp_of_each(calls: Any) -> None:
    rows = events(EVENTS, seed=2)
    stamps = [future.result() for future in appended(calls, rows)]
    for _ in ("in memory", "in base"):
        with calls.snapshot() as snap:
            for since in (0, stamps[0], stamps[431]):
                found = snap.changes("calls", since=since, commit_ts=True)
                seen = [(row["_commit_ts"], row["us"]) for row in found]
                assert seen == [(cts, row["us"]) for cts, row in zip(stamps, rows, strict=True) if cts > since]
        points = calls.tail_points("calls", since=0, rows=100)
        assert sum(rows for _, rows in points.points) == EVENTS and points.last == stamps[-1]
        calls.consolidate()


def test_one_that_is_refused_fails_alone(calls: Any) -> None:
    rows = events(40, seed=3)
    rows[7]["k"] = rows[23]["k"] = None  # a group key of the aggregates
    futures = appended(calls, rows, linger_ms=60_000)
    good = [i for i in range(40) if i not in (7, 23)]
    stamps = [futures[i].result() for i in good]
    assert len(set(stamps)) == 38 and stamps == sorted(stamps)
    for i in (7, 23):
        with pytest.raises(InvalidArgument, match="null"):
            futures[i].result()
        assert calls.outcome(futures[i].token, futures[i].place) is kivi.ABORTED
    with calls.snapshot() as snap:
        assert rows_of(snap, "plain") == sums([rows[i] for i in good])


def test_a_conflict_with_the_appended_is_told_of_the_table_that_was_dropped(calls: Any) -> None:
    (future,) = appended(calls, events(1))
    for name in ("kept", "plain", "calls"):
        calls.drop(name)
    assert calls.outcome(future.token, 0) == future.result()


def test_without_each_all_of_a_batch_have_one_timestamp_and_no_place(calls: Any) -> None:
    futures = appended(calls, events(50), each=False, linger_ms=60_000)
    assert len({future.result() for future in futures}) == 1
    assert {future.place for future in futures} == {None}
    assert calls.outcome(futures[0].token) == futures[0].result()
