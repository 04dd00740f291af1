"""Values at the edges of their types: every door takes what every reader gives back, and refuses anything else whole.

A timestamp is a moment that a ``datetime`` holds, of the years 1 to 9999, in whole microseconds.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import kivi
from kivi.errors import InvalidArgument, KiviError, OutOfRange
from kivi.model.types import MOMENT_MAX_US, MOMENT_MIN_US

FIRST, LAST = dt.datetime(1, 1, 1, tzinfo=dt.UTC), dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC)
FINE = pd.Timestamp(1, unit="ns", tz="UTC")
TABLES = ("rows", "times", "events")
SECOND_US = 1_000_000


@pytest.fixture(name="made")
def _made(db: Any) -> Any:
    columns = {"at": "timestamp", "newest": kivi.max("timestamp"), "n": "int64"}
    db.create_table("rows", key={"id": "int64"}, columns=columns)
    db.create_table("times", key={"at": "timestamp", "id": "int64"}, columns={"n": "int64", "total": kivi.sum("int64")})
    db.create_event_table("events", event_time="ts", columns={"ts": "timestamp", "at": "timestamp", "n": "int64"})
    return db


def contents(db: Any) -> Any:
    with db.snapshot() as snap:
        return [list(snap.scan(table)) for table in TABLES]


def write(call: Callable[[Any], Callable[[Any], object]]) -> Callable[[Any, Any], object]:
    def written(db: Any, time: Any) -> None:
        with db.transaction() as tx:
            call(tx)(time)

    return written


def appended(db: Any, events: list[dict[str, Any]]) -> list[Any]:
    """By one appender, in one commit: of each event its commit timestamp or its error."""

    def offered(app: Any) -> list[Any]:
        found = list[Any]()
        for event in events:
            try:
                found.append(app.append(**event))
            except KiviError as error:
                found.append(error)
        return found

    if not hasattr(db, "_loop"):
        with db.appender("events", linger_ms=60_000) as app:
            futures = offered(app)
        return [each if isinstance(each, KiviError) else each.exception() or each.result() for each in futures]

    async def wait() -> list[Any]:
        async with db._target.appender("events", linger_ms=60_000) as app:
            futures = offered(app)
        waited = [each for each in futures if not isinstance(each, KiviError)]
        outcomes = iter(await asyncio.gather(*waited, return_exceptions=True))
        return [each if isinstance(each, KiviError) else next(outcomes) for each in futures]

    outcomes: list[Any] = db._loop.run_until_complete(wait())
    return outcomes


def append_each(db: Any, time: Any) -> None:
    for outcome in appended(db, [{"ts": 0, "at": time}]):
        if isinstance(outcome, Exception):
            raise outcome


def arrow(**columns: Any) -> Any:
    return pa.table(columns)


US = pa.timestamp("us", "UTC")
DOORS: dict[str, Callable[[Any, Any], object]] = {
    "put": write(lambda tx: lambda time: tx.put("rows", (1,), at=time)),
    "put, in a key": write(lambda tx: lambda time: tx.put("times", (time, 1), n=1)),
    "insert": write(lambda tx: lambda time: tx.insert("rows", (1,), at=time)),
    "insert, in a key": write(lambda tx: lambda time: tx.insert("times", (time, 1), n=1)),
    "delta": write(lambda tx: lambda time: tx.delta("rows", (1,), newest=time)),
    "delta, in a key": write(lambda tx: lambda time: tx.delta("times", (time, 1), total=1)),
    "append": lambda db, time: db.append("events", [{"ts": 0}, {"ts": 0, "at": time}]),
    "append, the event's time": lambda db, time: db.append("events", [{"ts": 0}, {"ts": time}]),
    "appender": append_each,
}
OF_INTEGERS: dict[str, Callable[[Any, int], object]] = {
    "Arrow": lambda db, time: db.append("events", arrow(ts=pa.array([0, 0], US), at=pa.array([None, time], US))),
    "Arrow, integers": lambda db, time: db.append("events", arrow(ts=[0, 0], at=[None, time])),
    "Arrow, the event's time": lambda db, time: db.append("events", arrow(ts=pa.array([0, time], US))),
    "Arrow, codes": lambda db, time: db.append(
        "events", arrow(ts=[0], at=pa.array([time], pa.int64()).cast(US).dictionary_encode())
    ),
    "Arrow, rows": write(lambda tx: lambda time: tx.write("rows", arrow(id=[1], at=pa.array([time], US)))),
    "Arrow, rows, deltas": write(lambda tx: lambda time: tx.write("rows", arrow(id=[1], newest=pa.array([time], US)))),
    "Arrow, rows, in a key": write(lambda tx: lambda time: tx.write("times", arrow(at=[time], id=[1], n=[1]))),
}


@pytest.mark.parametrize("door", [*DOORS, *OF_INTEGERS])
def test_a_time_outside_the_years_is_refused_by_every_door_and_its_neighbours_are_read_back(
    made: Any, door: str
) -> None:
    call = (DOORS | OF_INTEGERS)[door]
    before = contents(made)
    for time in (MOMENT_MIN_US - 1, MOMENT_MAX_US + 1, 1_780_000_000 * 10**9, -(2**63), 2**63 - 1):
        with pytest.raises(InvalidArgument, match=rf"is {time} us, outside the years 1 to 9999: give a datetime"):
            call(made, time)
    assert contents(made) == before
    for time, moment in ((MOMENT_MIN_US, FIRST), (MOMENT_MAX_US, LAST)):
        call(made, time)
        found = [value for table in contents(made) for row in table for value in row.values()]
        assert moment in found
        with made.snapshot() as snap:
            for table in TABLES:
                assert snap.to_arrow(table).to_pylist() == list(snap.scan(table))
        if "insert" in door:
            with made.transaction() as tx:
                tx.delete("rows", (1,))


def test_the_refusal_names_the_record_and_the_column(made: Any) -> None:
    for records in ([{"ts": 0}, {"ts": 0, "at": 2**62}], arrow(ts=[0, 0], at=[0, 2**62])):
        with pytest.raises(InvalidArgument, match=r"records\[1\]\['at'\] is"):
            made.append("events", records)
    with made.transaction() as tx:
        with pytest.raises(InvalidArgument, match="key column 'at' is"):
            tx.put("times", (2**62, 1), n=1)
        tx.rollback()


def test_of_events_that_one_appender_sends_only_that_one_is_refused(made: Any) -> None:
    outcomes = appended(made, [{"ts": 0, "n": 0}, {"ts": 0, "at": 2**62}, {"ts": 0, "n": 1}])
    assert [type(outcome) for outcome in outcomes] == [int, InvalidArgument, int]
    assert [row["n"] for row in contents(made)[2]] == [0, 1]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("value", [FINE, pd.NaT, dt.datetime(2026, 1, 1)])  # noqa: DTZ001
def test_a_moment_that_is_no_whole_number_of_microseconds_is_refused(made: Any, door: str, value: Any) -> None:
    before = contents(made)
    with pytest.raises(InvalidArgument, match="not a whole number of microseconds|is no moment|without a time zone"):
        DOORS[door](made, value)
    assert contents(made) == before
    DOORS[door](made, FINE.floor("us"))


READS: dict[str, Callable[[Any, Any], object]] = {
    "where": lambda snap, value: list(snap.scan("events", where=kivi.col("ts") >= value)),
    "where, computed": lambda snap, value: list(snap.scan("events", where=kivi.col("ts") + 0 >= value)),
    "isin": lambda snap, value: list(snap.scan("events", where=kivi.col("ts").isin([value]))),
    "start": lambda snap, value: list(snap.scan("events", start=value)),
    "end": lambda snap, value: list(snap.scan("events", end=(value,))),
    "prefix": lambda snap, value: list(snap.scan("times", prefix=(value,))),
    "get": lambda snap, value: snap.get("times", (value, 1)),
    "query": lambda snap, value: list(snap.query("events", start=value, measures={"n": kivi.count()})),
    "windows": lambda snap, value: list(snap.windows("events", size="1h", start=value, measures={"n": kivi.count()})),
    "sql": lambda snap, value: snap.sql("select ts from events where ts >= ?", [value]),
}


@pytest.mark.parametrize("reader", READS)
def test_a_bound_is_not_rounded_either(made: Any, reader: str) -> None:
    made.append("events", [{"ts": 0}])
    with made.snapshot() as snap:
        with pytest.raises(InvalidArgument, match="whole number of microseconds"):
            READS[reader](snap, FINE)
        READS[reader](snap, FINE.floor("us"))


def test_neither_is_a_duration(made: Any) -> None:
    fine = pd.Timedelta(1_001, unit="ns")
    with pytest.raises(InvalidArgument, match="not a whole number of microseconds"):
        kivi.col("ts") - kivi.col("at") > fine  # noqa: B015
    with pytest.raises(InvalidArgument, match="not a whole number of microseconds"):
        kivi.time_slot("ts", fine)
    with made.snapshot() as snap:
        for value in (fine, np.datetime64(1, "ns"), np.timedelta64(1, "ns")):
            with pytest.raises(InvalidArgument, match="whole (number of )?microseconds"):
                snap.sql("select ? as x", [value])


UNITS: dict[str, tuple[Any, bool]] = {
    "s": (pa.array([3], pa.timestamp("s", "UTC")), True),
    "ms": (pa.array([3_000], pa.timestamp("ms")), True),
    "ns, whole": (pa.array([3 * 10**9], pa.timestamp("ns", "Asia/Tokyo")), True),
    "ns": (pa.array([3 * 10**9 + 1], pa.timestamp("ns", "UTC")), False),
    "s, beyond the years": (pa.array([253_402_300_800], pa.timestamp("s")), False),
    "s, beyond 64 bits": (pa.array([2**62], pa.timestamp("s")), False),
    "days": (pa.array([0], pa.date32()), True),
    "days, beyond the years": (pa.array([2_932_897], pa.date32()), False),
    "durations": (pa.array([3 * SECOND_US], pa.duration("us")), False),
    "floats": (pa.array([3.0e6]), False),
}


@pytest.mark.parametrize("unit", UNITS)
def test_other_units_of_arrow_are_taken_where_they_are_exact(made: Any, unit: str) -> None:
    array, is_taken = UNITS[unit]
    calls = (
        lambda: made.append("events", arrow(ts=array)),
        lambda: made.append("events", arrow(ts=[0], at=array)),
        lambda: made.write("rows", arrow(id=[1], at=array)),
        lambda: made.write("times", arrow(at=array, id=[1])),
    )
    for call in calls:
        if is_taken:
            call()
        else:
            with pytest.raises(KiviError, match="column '(ts|at)'|records.0...(ts|at)"):
                call()
    wanted = dt.datetime(1970, 1, 1, 0, 0, 0 if unit == "days" else 3, tzinfo=dt.UTC)
    found = {value for table in contents(made) for row in table for name, value in row.items() if name in ("ts", "at")}
    assert found - {None, dt.datetime(1970, 1, 1, tzinfo=dt.UTC)} <= {wanted}
    assert [len(table) for table in contents(made)] == ([1, 1, 2] if is_taken else [0, 0, 0])


# -- slots ------------------------------------------------------------------------------------------

EARLY = dt.datetime(1, 1, 1, 0, 30, tzinfo=dt.UTC)
BEFORE_TIME = [("1d", "Asia/Tokyo"), ("1d", "America/New_York"), ("1month", "Asia/Tokyo"), ("7d", None)]


@pytest.mark.parametrize(("width", "zone"), BEFORE_TIME)
def test_an_event_whose_slot_would_begin_before_the_year_1_is_refused(db: Any, width: str, zone: str | None) -> None:
    def declare(name: str) -> None:
        slot = kivi.time_slot("ts", width, name="slot", tz=zone)
        db.create_aggregate(name, source="e", group_by=["n", slot], measures={"calls": kivi.count()})

    db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "n": "int64"})
    declare("a")
    for few in (1, 200):
        with pytest.raises(InvalidArgument, match="'ts' is a time whose slot of .* would begin outside the years"):
            db.append("e", [{"ts": EARLY, "n": 1}] * few)
    db.append("e", [{"ts": dt.datetime(2, 1, 1, tzinfo=dt.UTC), "n": 1}])
    with db.snapshot() as snap:
        assert [row["calls"] for row in snap.scan("a")] == [1]
        assert len(list(snap.scan("e"))) == 1
    db.drop("a")
    db.append("e", [{"ts": EARLY, "n": 1}])
    with pytest.raises(InvalidArgument, match="would begin outside the years"):
        declare("b")
    assert db.tables() == ["e"]
    with db.snapshot() as snap, pytest.raises(InvalidArgument, match="would begin outside the years"):
        slot = kivi.time_slot("ts", width, name="slot", tz=zone)
        list(snap.query("e", group_by=[slot], measures={"calls": kivi.count()}))
    with db.transaction() as tx:
        assert tx.retract("e", where=kivi.col("ts") == EARLY) == 1
    declare("b")


def test_slots_that_begin_with_the_year_1_are_read(db: Any) -> None:
    db.create_event_table("e", event_time="ts", columns={"ts": "timestamp"})
    widths: dict[str, tuple[str, str | None]] = {
        "d": ("1d", None),
        "w": ("1w", None),
        "m": ("1month", None),
        "y": ("1year", None),
    }
    widths["h"] = ("1h", "Asia/Tokyo")
    for name, (width, zone) in widths.items():
        slot = kivi.time_slot("ts", width, name="slot", tz=zone)
        db.create_aggregate(name, source="e", group_by=[slot], measures={"calls": kivi.count()})
    db.append("e", [{"ts": EARLY}, {"ts": LAST}])
    with db.snapshot() as snap:
        for name in widths:
            rows = list(snap.scan(name))
            assert rows[0]["slot"] == FIRST and len(rows) == 2
        with pytest.raises(InvalidArgument, match="start is .* us, where there are no slots"):
            list(snap.rollup("d", step="1w", start=-(2**63)))
        for name, bound, near in (("d", LAST, "9999-12-31T00:00:00"), ("h", EARLY, "0001-01-01T00:00:00")):
            with pytest.raises(InvalidArgument, match=rf"start lies within a slot of .* it is {near}"):
                list(snap.rollup(name, step="1w", start=bound))
        with pytest.raises(InvalidArgument, match="within a slot of 'd'.* it is one in the years 1 to 9999"):
            list(snap.rollup("d", step="1w", start=2**61))


# -- computed times ---------------------------------------------------------------------------------


def test_a_computed_time_outside_the_years_is_out_of_range(made: Any) -> None:
    later = kivi.col("ts") + kivi.col("n")
    made.create_aggregate("latest", source="events", group_by=["at"], measures={"newest": kivi.max(later)})
    before = contents(made)
    with pytest.raises(OutOfRange, match=r"\(ts \+ n\) leaves the range of timestamp"):
        made.append("events", [{"ts": 0, "at": 0, "n": 1}, {"ts": LAST, "at": 0, "n": 1}])
    assert contents(made) == before
    made.append("events", [{"ts": LAST, "at": 0, "n": 0}])
    with made.snapshot() as snap:
        assert [row["newest"] for row in snap.scan("latest")] == [LAST]
        with pytest.raises(OutOfRange):
            list(snap.scan("events", where=kivi.col("ts") + 1 > kivi.col("ts")))
