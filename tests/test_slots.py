"""Slots by calendar and in time zones, against datetime and zoneinfo; and what is derived by them."""

from __future__ import annotations

import datetime as dt
import itertools
import random
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest.mock import patch
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest

from kivi.delta import grouping
from kivi.delta.derive import derive, derive_all, derive_small
from kivi.errors import InvalidArgument, SchemaError
from kivi.model.declarations import aggregate_schema, event_table_schema, time_slot
from kivi.model.schema import GroupKey, OperatorCall, TableSchema
from kivi.model.slots import Slot
from kivi.model.types import INT64_MAX, INT64_MIN

ZONES = ("Europe/Madrid", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe")
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
US = dt.timedelta(microseconds=1)
MINUTE = 60_000_000
HOUR = 60 * MINUTE


def micros(moment: dt.datetime) -> int:
    return (moment - EPOCH) // US


def at(moment: int, zone: str = "UTC") -> dt.datetime:
    return (EPOCH + moment * US).astimezone(ZoneInfo(zone))


def wall(moment: int, zone: str) -> int:
    """What the local clock shows, as microseconds from when it showed 1970."""
    return micros(at(moment, zone).replace(tzinfo=dt.UTC))


@cache
def changes(zone: str) -> list[int]:
    """When the clock was changed, to the minute, from 1970 to 2100: looked for day by day, unlike in ``Slot``."""
    found = []
    for day in range(0, micros(dt.datetime(2100, 1, 1, tzinfo=dt.UTC)), 24 * HOUR):
        if wall(day, zone) - day != wall(day + 24 * HOUR, zone) - day - 24 * HOUR:
            low, high = day, day + 24 * HOUR
            while high - low > MINUTE:
                middle = (low + high) // 2 // MINUTE * MINUTE
                low, high = (middle, high) if wall(middle, zone) - middle == wall(low, zone) - low else (low, middle)
            found.append(high)
    return found


def moments(zone: str, seed: int, around: int = 15, anywhere: int = 100) -> list[int]:
    """Random ones, and those around both kinds of changes of the clock."""
    rng = random.Random(seed)
    found = [rng.randrange(0, micros(dt.datetime(2100, 1, 1, tzinfo=dt.UTC))) for _ in range(anywhere)]
    for change in rng.sample(changes(zone), min(around, len(changes(zone)))):
        found += [
            change + d * MINUTE // 2 + us for d in (-360, -121, -61, -60, 0, 60, 61, 120, 121, 900) for us in (-1, 0)
        ]
        found.append(change + rng.randrange(-12 * HOUR, 12 * HOUR))
    return found


def calendar_start(moment: int, count: int, unit: str, zone: str) -> int:
    """The calendar by ``datetime``."""
    day = at(moment, zone).replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    if unit in ("d", "w"):
        since, days = (dt.date(1970, 1, 1), count) if unit == "d" else (dt.date(1969, 12, 29), 7 * count)
        return micros(day - dt.timedelta(days=(day.date() - since).days % days))
    months = (day.year - 1970) * 12 + day.month - 1
    months -= months % (count * {"month": 1, "quarter": 3, "year": 12}[unit])
    return micros(day.replace(year=1970 + months // 12, month=months % 12 + 1, day=1))


def clock_start(moment: int, width: int, zone: str) -> int:
    """Back minute by minute until the clock shows a multiple of the width, or has just been set forward past one."""
    minute = moment // MINUTE * MINUTE
    while True:
        now, before = wall(minute, zone), wall(minute - MINUTE, zone) + MINUTE
        if now % width == 0 or (now > before and now // width * width >= before):
            return minute
        minute -= MINUTE


@pytest.mark.parametrize("zone", ZONES)
def test_the_test_knows_both_kinds_of_changes(zone: str) -> None:
    longer = {(wall(c, zone) - wall(c - MINUTE, zone)) // MINUTE > 1 for c in changes(zone)}
    assert longer == (set() if zone == "Asia/Kolkata" else {False, True})


@pytest.mark.parametrize("zone", [*ZONES, "UTC"])
@pytest.mark.parametrize(
    ("count", "unit"),
    [(1, "d"), (2, "d"), (1, "w"), (3, "w"), (1, "month"), (5, "month"), (1, "quarter"), (1, "year"), (10, "year")],
)
def test_calendar_slots_begin_at_local_midnight(zone: str, count: int, unit: str) -> None:
    slot = Slot.parse(f"{count}{unit}", zone)
    asked = moments(zone if zone != "UTC" else "Europe/Madrid", count)
    assert slot.starts(np.array(asked)).tolist() == [calendar_start(moment, count, unit, zone) for moment in asked]


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("minutes", [15, 60, 120, 360])
def test_hours_of_a_zone_begin_with_its_clock(zone: str, minutes: int) -> None:
    slot = Slot.parse(f"{minutes}m", zone)
    asked = moments(zone, minutes, around=4, anywhere=20)
    assert slot.starts(np.array(asked)).tolist() == [clock_start(m, minutes * MINUTE, zone) for m in asked]


@pytest.mark.parametrize(
    "slot",
    [
        *(Slot.parse(width, zone) for zone in ZONES for width in ("15m", "1h", "6h", "1d", "2w", "1month")),
        *(Slot.parse(width, "America/Havana") for width in ("1h", "6h", "1d")),  # midnight comes twice
        *(Slot.parse(width, "America/Sao_Paulo") for width in ("1h", "6h", "1d", "1w")),  # and was left out
        *(Slot.parse(width, "Pacific/Apia") for width in ("1h", "1d", "1month")),  # and a whole day was
        *map(Slot.parse, ("7m", "90m", "1w", "1quarter")),
    ],
    ids=str,
)
def test_every_slot_ends_where_the_next_begins(slot: Slot) -> None:
    zone = slot.zone or "Europe/Madrid"
    asked = moments(zone, 7, 5) if zone in ZONES else [micros(dt.datetime(2011, 12, 20, tzinfo=dt.UTC))]
    if zone not in ZONES:
        asked += [asked[0] + hours * HOUR for hours in range(0, 24 * 400, 31)]
    for moment in asked:
        start = slot.start(moment)
        end = slot.end(start)
        assert start <= moment < end
        assert [slot.start(m) for m in (start, end - 1, end)] == [start, start, end]
        assert slot.starts(np.array([start - 1, start, end - 1, end]))[1:].tolist() == [start, start, end]


def test_days_of_23_and_25_hours_and_the_repeated_hour() -> None:
    madrid = ZoneInfo("Europe/Madrid")
    day, hour = Slot.parse("1d", "Europe/Madrid"), Slot.parse("1h", "Europe/Madrid")
    for date, hours in ((dt.date(2026, 3, 29), 23), (dt.date(2026, 10, 25), 25), (dt.date(2026, 6, 1), 24)):
        start = micros(dt.datetime(date.year, date.month, date.day, tzinfo=madrid))
        assert day.start(start) == start and day.end(start) == start + hours * HOUR
        assert len({hour.start(start + half * HOUR // 2) for half in range(2 * hours)}) == hours
    first = dt.datetime(2026, 10, 25, 2, 30, tzinfo=madrid)
    assert hour.start(micros(first.replace(fold=1))) - hour.start(micros(first)) == HOUR
    howe = Slot.parse("1h", "Australia/Lord_Howe")  # set back from 2:00 to 1:30
    start = micros(dt.datetime(2026, 4, 5, 1, tzinfo=ZoneInfo("Australia/Lord_Howe")))
    assert howe.end(start) - start == 90 * MINUTE
    kolkata = Slot.parse("1h", "Asia/Kolkata")
    assert kolkata.start(micros(dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC))) % HOUR == HOUR // 2


def test_without_a_zone_fixed_widths_are_what_they_were() -> None:
    rng = random.Random(3)
    asked = [rng.randrange(-(2**62), 2**62) for _ in range(200)]
    for width in ("7m", "1h", "30d", 12_345):
        for slot in (Slot.parse(width), Slot.parse(width, "UTC") if width in ("1h", 12_345_000) else Slot.parse(width)):
            assert slot.is_fixed
            assert slot.starts(np.array(asked)).tolist() == [m - m % slot.count for m in asked]
            assert [slot.start(m) for m in asked] == [m - m % slot.count for m in asked]
    assert Slot.parse("5h").start(7 * HOUR) == 5 * HOUR


# -- nesting --------------------------------------------------------------------------------------

WIDTHS = ("7m", "15m", "1h", "6h", "1d", "2d", "7d", "1w", "2w", "1month", "2month", "1quarter", "1year")


def slots_of(zone: str | None) -> list[Slot]:
    return [Slot.parse(width, zone) for width in WIDTHS if zone is None or width != "7m"]


def test_nesting_is_what_the_slots_do() -> None:
    """Whatever is said to nest does; and, within one zone or in UTC, whatever does is said to."""
    everything = [*slots_of(None), *slots_of("Europe/Madrid"), *slots_of("Asia/Kolkata")]
    asked = np.array(sorted(moments("Europe/Madrid", 5, 20)))
    for finer, coarser in itertools.product(everything, everything):
        begins = np.unique(coarser.starts(asked))
        nests = bool((finer.starts(begins) == begins).all())  # no slot goes on where a coarser one begins
        if finer.nests_in(coarser):
            assert nests, (str(finer), str(coarser))
        elif finer.zone == coarser.zone or finer.is_fixed:
            assert not nests, (str(finer), str(coarser))


# -- what is declared -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "tz", "error", "words"),
    [
        ("1fortnight", None, InvalidArgument, "'1month'"),
        ("0month", None, InvalidArgument, "greater than zero"),
        ("0d", "Europe/Madrid", InvalidArgument, "greater than zero"),
        ("1001year", None, InvalidArgument, "1,000 years"),
        ("400000d", "Europe/Madrid", InvalidArgument, "1,000 years"),
        ("7h", "Europe/Madrid", SchemaError, "divides 24 hours"),
        ("36h", "Europe/Madrid", SchemaError, "divides 24 hours"),
        ("1h", "Europe/Nowhere", SchemaError, "no time zone 'Europe/Nowhere'"),
        ("1h", "Europe", SchemaError, "IANA"),
        ("1h", "../../etc/passwd", SchemaError, "IANA"),
        ("1h", "", SchemaError, "IANA"),
        ("1h", 1, SchemaError, "IANA"),
        (None, "UTC", InvalidArgument, "not a duration"),
    ],
)
def test_what_is_no_slot(width: Any, tz: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        time_slot("ts", width, tz=tz)


def test_widths_are_told_as_they_are_declared() -> None:
    for slot in (*slots_of(None), *slots_of("Europe/Madrid")):
        assert Slot.parse(slot.width, slot.zone or None) == slot
    assert Slot.parse("18mo").width == "6quarter"
    assert str(Slot.parse(dt.timedelta(days=2), "Asia/Kolkata")) == "2d in Asia/Kolkata"


EVENTS = event_table_schema("e", "ts", {"k": "int64", "ts": "timestamp", "n": "int64", "x": "float64"})
MEASURES = {"n": OperatorCall("count"), "s": OperatorCall("sum", "n"), "x": OperatorCall("sum", "x")}


def aggregate(*groups: Any) -> TableSchema:
    return aggregate_schema("a", EVENTS, groups, MEASURES)


def test_the_catalog_keeps_both_forms() -> None:
    fixed, calendar = aggregate("k", time_slot("ts", "5m")), aggregate(time_slot("ts", "1month", tz="Europe/Madrid"))
    for schema in (fixed, calendar):
        assert TableSchema.from_json(schema.to_json()) == schema
    assert b'"group_by":[["k","k",0],["slot","ts",300000000]]' in fixed.to_json()  # as before there were calendars
    assert calendar.description()["group_by"] == [
        {"name": "slot", "source": "ts", "slot": "1month", "tz": "Europe/Madrid"}
    ]
    assert fixed.group_by[1] == GroupKey("slot", "ts", 300_000_000)


@pytest.fixture(scope="module", autouse=True, params=[0, grouping._FEW], ids=["by kernels", "in Python"])
def how_few_are_grouped(request: pytest.FixtureRequest) -> Iterator[None]:
    with patch.object(grouping, "_FEW", request.param):
        yield


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    columns = {"k": pa.int64(), "ts": pa.timestamp("us", "UTC"), "n": pa.int64(), "x": pa.float64()}
    return pa.RecordBatch.from_pydict({n: pa.array([row[n] for row in rows], t) for n, t in columns.items()})


def test_derived_alone_together_and_row_by_row() -> None:
    """Rolled up from finer slots or not, columns or rows: the same keys, and the same bits."""
    rng = random.Random(9)
    rows: list[dict[str, Any]] = [
        {"k": rng.randrange(3), "ts": ts, "n": rng.randrange(-9, 9), "x": rng.random()}
        for ts in moments("Europe/Madrid", 1, 20)
    ]
    slots = [("7m", None), ("15m", None), *((w, "Europe/Madrid") for w in ("1h", "1d", "1w", "1month", "1year"))]
    schemas = [aggregate("k", time_slot("ts", width, tz=tz)) for width, tz in slots]
    for schema, run in zip(schemas, derive_all(schemas, batch_of(rows), 7), strict=True):
        assert run.to_buffers() == derive(schema, batch_of(rows), 7).to_buffers()
        small = derive_small(schema, rows)
        assert [(run.key_at(i), run.deltas_at(i)) for i in range(run.rows)] == small
        (slot,) = (group.slot for group in schema.group_by if group.slot is not None)
        assert len(small) == len({(row["k"], slot.start(row["ts"])) for row in rows})


def test_moments_beyond_the_calendar_are_refused() -> None:
    schema = aggregate(time_slot("ts", "1month", tz="Europe/Madrid"))
    for ts in (INT64_MIN, INT64_MAX):
        rows = [{"k": 1, "ts": 0, "n": 1, "x": 0.0}, {"k": 1, "ts": ts, "n": 1, "x": 0.0}]
        for call in (lambda rows=rows: derive(schema, batch_of(rows)), lambda rows=rows: derive_small(schema, rows)):
            with pytest.raises(InvalidArgument, match="'ts' is a time whose slot of 1month in Europe/Madrid"):
                call()
