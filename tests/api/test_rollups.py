"""Rollups: rows combined when they are read equal an aggregate that was declared at that level (R21), everywhere."""

from __future__ import annotations

import datetime as dt
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any
from zoneinfo import ZoneInfo

import pytest

import kivi

MEASURES = {
    "n": kivi.count(),
    "total": kivi.sum("x"),
    "price": kivi.sum("price"),
    "most": kivi.max("x"),
    "least": kivi.min("f"),
    "floats": kivi.sum("f"),
    "late": kivi.count(where=kivi.col("x") > 900),
    "latency": kivi.quantiles("x", accuracy=0.01),
    "users": kivi.distinct("user", error=0.05),
    "mean": kivi.avg("x"),
    "spread": kivi.stddev("x"),
    "squares": kivi.var("price"),
    "began": kivi.first("trace"),
    "ended": kivi.last("trace"),
    "slowest": kivi.argmax("trace", by="x"),
    "fastest": kivi.argmin("trace", by="x"),
    "largest": kivi.largest("x", 3),
    "smallest": kivi.smallest("x", 3),
    "often": kivi.top("user", 3, most=6),
}
DERIVED = {"p99": "quantile(latency, 0.99)", "average": "total / n"}
FLOATS = ("floats",)  # whose sums are equal up to the order of addition
T0 = int(dt.datetime(2026, 3, 28, 20, tzinfo=dt.UTC).timestamp() * 1e6)  # Madrid's clock is set forward the night after
MINUTE = 60_000_000


def events(rng: random.Random, count: int, hours: int = 8) -> list[dict[str, Any]]:
    from decimal import Decimal

    return [
        {
            "app": rng.choice(["shop", "", "a\0b"]),
            "endpoint": rng.randrange(4),
            "ts": T0 + rng.randrange(hours * 60 * MINUTE),
            "x": rng.choice([None, 0, rng.randrange(-50, 1_000), int(rng.lognormvariate(6, 2))]),
            "f": rng.choice([None, rng.random()]),
            "price": rng.choice([None, Decimal(rng.randrange(10_000)) / 100]),
            "user": rng.choice([None, f"u{rng.randrange(12)}"]),
            "trace": f"t{rng.randrange(10**6)}",
        }
        for _ in range(count)
    ]


def create(db: Any, name: str, group_by: Iterable[Any], derived: dict[str, str] | None = None, **more: Any) -> None:
    db.create_aggregate(name, source="calls", group_by=list(group_by), measures=MEASURES, derived=derived, **more)


def created(db: Any, **more: Any) -> Any:
    db.create_event_table(
        "calls",
        event_time="ts",
        columns={"app": "string", "endpoint": "int64", "ts": "timestamp", "x": "int64", "f": "float64",
                 "price": "decimal(18,2)", "user": "string", "trace": "string"},
    )  # fmt: skip
    create(db, "fine", ["app", "endpoint", kivi.time_slot("ts", "5m")], DERIVED | {"each": "n / endpoint"}, **more)
    return db


LEVELS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "app_1h": (["app", kivi.time_slot("ts", "1h")], {"by": ["app"], "step": "1h"}),
    "by_endpoint": (["endpoint", "app"], {"by": ["endpoint", "app"]}),
    "all_15m": ([kivi.time_slot("ts", "15m")], {"step": "15m"}),
    "day": (
        ["endpoint", kivi.time_slot("ts", "1d", tz="Europe/Madrid")],
        {"by": ["endpoint"], "step": "1d", "tz": "Europe/Madrid"},
    ),
}


def same(rolled: Any, declared: Any) -> None:
    """The same columns, row by row and bit for bit, but for sums of floats."""
    assert rolled.schema.equals(declared.schema)
    for name in declared.column_names:
        if name in FLOATS:
            assert rolled[name].to_pylist() == pytest.approx(declared[name].to_pylist(), rel=1e-12)
        else:
            assert rolled[name].combine_chunks().equals(declared[name].combine_chunks()), name


def check_levels(snap: Any) -> None:
    for name, (_, rollup) in LEVELS.items():
        result = snap.rollup("fine", **rollup, measures=[*MEASURES, *DERIVED])
        same(result.to_arrow(), snap.to_arrow(name))
        objects = [row | dict.fromkeys(FLOATS) for row in result]
        assert objects == [row | dict.fromkeys(FLOATS) for row in snap.scan(name)]
        assert len(result) == len(objects)


def test_rollup_equals_declared(db: Any) -> None:
    created(db, history="1h")
    for name, (group_by, _) in LEVELS.items():
        create(db, name, group_by, DERIVED, history="1h")
    rng = random.Random(7)
    for _ in range(2):
        db.append("calls", events(rng, 25, 3))
    db.consolidate()
    with db.snapshot() as old:
        check_levels(old)  # consolidated
        before = list(old.rollup("fine", by=["app"], step="1h"))
        db.append("calls", events(rng, 25, 3))
        with db.snapshot() as snap:
            check_levels(snap)  # partly pending
        db.append("calls", events(rng, 3))
        db.consolidate()
        with db.snapshot() as snap:
            check_levels(snap)
        assert list(old.rollup("fine", by=["app"], step="1h")) == before
        check_levels(old)
    with pytest.raises(kivi.InvalidArgument), db.snapshot() as snap:
        list(snap.rollup("calls"))


@pytest.fixture
def memory() -> Iterator[Any]:
    with kivi.open() as db:
        yield created(db)


def moment(minutes: int) -> dt.datetime:
    return dt.datetime.fromtimestamp((T0 + minutes * MINUTE) / 1e6, dt.UTC)


def test_values_by_brute_force(memory: Any) -> None:
    rng = random.Random(3)
    appended = [events(rng, 200) for _ in range(3)]
    for i, batch in enumerate(appended):
        memory.append("calls", batch)
        if i == 1:
            memory.consolidate()
    start, end = moment(65), moment(300)
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in (event for batch in appended for event in batch):
        if event["endpoint"] != 2 and T0 + 65 * MINUTE <= event["ts"] < T0 + 300 * MINUTE and event["app"] == "shop":
            groups[event["endpoint"], event["ts"] // (30 * MINUTE)].append(event)
    with memory.snapshot() as snap:
        where = kivi.col("endpoint") != 2
        rows = list(
            snap.rollup("fine", ["endpoint"], "30m", start, end, ("shop",), where, ["n", "total", "latency", "average"])
        )
    assert len(rows) == len(groups) > 10
    for row, (key, found) in zip(rows, sorted(groups.items()), strict=True):
        values = sorted(event["x"] for event in found if event["x"] is not None)
        assert (row["endpoint"], int(row["slot"].timestamp() * 1e6) // (30 * MINUTE)) == key
        assert (row["n"], row["total"], row["latency"].count) == (len(found), sum(values), len(values))
        assert row["average"] == sum(values) / len(found)
        assert list(row) == ["endpoint", "slot", "n", "total", "latency", "average"]
        for q in (0.0, 0.5, 0.99, 1.0):
            exact = values[max(0, -(-int(q * 1_000) * len(values) // 1_000) - 1)] if values else None
            assert row["latency"].quantile(q) == (None if exact is None else pytest.approx(exact, rel=0.0101))


def test_order_by_and_measures(memory: Any) -> None:
    memory.append("calls", events(random.Random(1), 100))
    with memory.snapshot() as snap:
        assert list(snap.rollup("fine", measures=["n"])) == [{"n": 100}]
        result = snap.rollup("fine", by=["endpoint", "app"], step="8h", measures=["each", "p99"])
        rows = list(result)
        assert list(rows[0]) == ["endpoint", "app", "slot", "each", "p99"]
        assert rows == sorted(rows, key=lambda row: (row["endpoint"], row["app"], row["slot"]))
        assert rows[0]["each"] is None  # n / 0
        assert "each" not in next(iter(snap.rollup("fine", by=["app"])))  # which needs the endpoint
        assert result.to_arrow().to_pylist()[0]["endpoint"] == 0
        assert result.complete_since is None
        assert "rollup of fine" in result.explain()
        assert "combined: " in result.explain()
        assert list(snap.rollup("fine", start=moment(10_000))) == []
        median = "quantile(latency, 0.5)"
        named = snap.rollup("fine", by=["app"], measures=["n", median])
        whole = [(row["app"], row["n"], row["latency"].quantile(0.5)) for row in snap.rollup("fine", by=["app"])]
        assert [tuple(row.values()) for row in named] == whole
        assert named.to_arrow().column_names == ["app", "n", median]
        slow = [row for row in snap.scan("fine") if (row["latency"].quantile(0.5) or 0) > 900]
        assert 0 < len(slow) < len(list(snap.scan("fine")))  # of the stored rows, by what is asked here alone
        picked = snap.rollup("fine", where=kivi.col(median) > 900, measures=["n"])
        assert list(picked) == [{"n": sum(row["n"] for row in slow)}]
        picked = snap.windows("fine", size="600m", where=kivi.col(median) > 900, measures={"n": kivi.combine("n")})
        assert sum(row["n"] for row in picked) == sum(row["n"] for row in slow)


def test_last_ends_with_the_newest_slot(memory: Any) -> None:
    memory.append("calls", events(random.Random(1), 200))
    memory.append("calls", [events(random.Random(2), 1)[0] | {"ts": T0 + 599 * MINUTE}])
    with memory.snapshot() as snap:
        rows = list(snap.rollup("fine", step="30m", last="3h", measures=["n"]))
        assert rows == list(snap.rollup("fine", step="30m", start=moment(420), measures=["n"]))
        assert rows[-1]["slot"] == moment(570)
        selected = kivi.col("endpoint") == 9  # of no row
        assert list(snap.rollup("fine", step="30m", last="3h", where=selected)) == []
        few = kivi.col("slot") < moment(200)  # the newest that is selected is older than the newest there is
        found = list(snap.rollup("fine", by=["app"], last="1h", where=few, measures=["n"]))
        assert found == list(snap.rollup("fine", by=["app"], start=moment(140), end=moment(200), measures=["n"]))


@pytest.mark.parametrize(
    ("stored", "step", "last", "at", "begins"),
    [
        ("1h", None, "30m", "2026-01-31T12:10", "2026-01-31T12:00"),
        ("1m", "1h", "20m", "2026-01-31T12:10", "2026-01-31T12:00"),
        ("1m", "1h", "90m", "2026-01-31T12:10", "2026-01-31T11:00"),
        ("1m", "1h", "2h", "2026-01-31T12:10", "2026-01-31T11:00"),
        ("1month", None, "30d", "2026-01-31T12:10", "2026-01-01T00:00"),
        ("1month", None, "31d", "2026-02-11T12:10", "2026-02-01T00:00"),
        ("1d", "1month", "365d", "2024-12-31T12:10", "2024-01-01T00:00"),
        ("1year", None, "36500000d", "2026-01-31T12:10", "1970-01-01T00:00"),
    ],
)
def test_last_is_of_whole_slots(db: Any, stored: str, step: str | None, last: str, at: str, begins: str) -> None:
    rolls_last(db, stored, step, last, at, begins, "UTC")


@pytest.mark.parametrize(
    ("at", "begins"), [("2026-03-31T12:00", "2026-03-25T00:00"), ("2026-10-28T12:00", "2026-10-22T00:00")]
)
@pytest.mark.parametrize(("stored", "step"), [("1d", None), ("1h", "1d")])
def test_last_days_are_those_of_the_clock(stored: str, step: str | None, at: str, begins: str) -> None:
    with kivi.open() as db:
        rolls_last(db, stored, step, "7d", at, begins, "Europe/Paris")


def rolls_last(db: Any, stored: str, step: str | None, last: str, at: str, begins: str, tz: str) -> None:
    """The rollup of the last time is that from ``begins`` on. Both are times of the zone's clock."""
    newest, first = (dt.datetime.fromisoformat(each).replace(tzinfo=ZoneInfo(tz)) for each in (at, begins))
    db.create_event_table("e", event_time="ts", columns={"ts": "timestamp"})
    slot = kivi.time_slot("ts", stored, name="slot", tz=tz)
    db.create_aggregate("kept", source="e", group_by=[slot], measures={"n": kivi.count()})
    times = [newest - dt.timedelta(hours=i) for i in range(24 * 20)]
    db.append("e", [{"ts": ts.astimezone(dt.UTC)} for ts in [*times, *(ts - dt.timedelta(days=400) for ts in times)]])
    with db.snapshot() as snap:
        assert list(snap.rollup("kept", step=step, last=last)) == list(snap.rollup("kept", step=step, start=first))


@pytest.mark.parametrize("groups", [3, 400])
def test_times_by_seeking_and_by_filtering(groups: int) -> None:
    """Few groups with many slots are sought one by one; many with few are read and filtered. Both give the same."""
    rng = random.Random(groups)
    with kivi.open() as db:
        db.create_event_table("e", event_time="ts", columns={"g": "string", "h": "string", "ts": "timestamp"})
        measures = {"n": kivi.count()}
        for name, keys in (("last", ["g", "h", "s"]), ("middle", ["g", "s", "h"]), ("first", ["s", "g", "h"])):
            named: dict[str, Any] = {"g": "g", "h": "h", "s": kivi.time_slot("ts", "1s", name="s")}
            db.create_aggregate(name, source="e", group_by=[named[key] for key in keys], measures=measures)
        slots = 3_000 // groups + 1
        for i in range(4):
            rows = [
                {"g": f"g{rng.randrange(groups)}", "h": "x" * rng.randrange(2), "ts": rng.randrange(slots) * 1_000_000}
                for _ in range(1_500)
            ]
            db.append("e", rows)
            if i == 2:
                db.consolidate()
        with db.snapshot() as snap:
            start, end = slots // 2 * 1_000_000, (slots - 1) * 1_000_000
            for name in ("last", "middle", "first"):
                counted: dict[str, int] = defaultdict(int)
                for row in snap.scan(name, where=(kivi.col("s") >= start) & (kivi.col("s") < end)):
                    counted[row["g"]] += row["n"]
                result = snap.rollup(name, by=["g"], start=start, end=end)
                assert {row["g"]: row["n"] for row in result} == counted
                if name == "last":
                    assert ("filtered" in result.explain()) is (groups == 400)
                    newest = snap.rollup(name, step="1s", last="2s")
                    assert [row["s"].timestamp() for row in newest] == [slots - 2, slots - 1]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"by": ["slot"]}, kivi.SchemaError, "is a time slot"),
        ({"by": ["x"]}, kivi.SchemaError, "app, endpoint"),
        ({"by": 7}, kivi.InvalidArgument, "by is a list of names"),
        ({"by": "app,endpoint"}, kivi.SchemaError, "app, endpoint"),
        ({"by": ["app", "app"]}, kivi.InvalidArgument, "twice"),
        ({"step": "7m"}, kivi.InvalidArgument, "multiple of 5m"),
        ({"tz": "Europe/Madrid"}, kivi.InvalidArgument, "give that too"),
        ({"start": T0 + 1}, kivi.InvalidArgument, "within a slot"),
        ({"end": T0 + 61_000_000}, kivi.InvalidArgument, "within a slot"),
        ({"start": T0, "last": "1h"}, kivi.InvalidArgument, "last is a range"),
        ({"measures": ["x"]}, kivi.SchemaError, "no measure"),
        ({"measures": ["quantile(n, 0.5)"]}, kivi.SchemaError, "of a quantiles measure"),
        ({"measures": ["n / endpoint"]}, kivi.SchemaError, "add it to by"),
        ({"measures": []}, kivi.InvalidArgument, "leave it out"),
        ({"measures": ["each"]}, kivi.SchemaError, "add it to by"),
    ],
)
def test_refused(memory: Any, arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with memory.snapshot() as snap, pytest.raises(error, match=says):
        snap.rollup("fine", **arguments)


def test_one_name_is_a_list_of_one(db: Any) -> None:
    """Of key columns, measures and columns alike, also a name of one letter each of which is another column's."""
    columns = {"ts": "timestamp", "k": "string", "kk": "string", "n": "int64"}
    db.create_event_table("e", event_time="ts", columns=columns, index="k")
    db.create_aggregate("a", source="e", group_by=["k", "kk"], measures={"n": kivi.sum("n"), "m": kivi.count()})
    db.append("e", [{"ts": T0 + i, "k": f"k{i % 2}", "kk": f"kk{i % 3}", "n": i} for i in range(12)])
    assert db.describe("e")["index"] == ["k"]
    with db.snapshot() as snap:
        for name in ("k", "kk"):
            assert list(snap.rollup("a", by=name, measures="n")) == list(snap.rollup("a", by=[name], measures=["n"]))
            assert list(snap.scan("a", columns=name)) == list(snap.scan("a", columns=[name]))
            asked: dict[str, Any] = {"group_by": name, "measures": {"n": kivi.count()}, "order_by": f"-{name}"}
            assert list(snap.query("e", **asked, columns=name)) == list(snap.query("e", **asked, columns=[name]))
        with db.subscribe("a", rollup={"by": "kk", "measures": "n"}) as live:
            live.next(timeout_s=30)
            assert live.rows == list(snap.rollup("a", by=["kk"], measures=["n"]))


def test_without_slots_there_are_no_times(memory: Any) -> None:
    create(memory, "plain", ["app", "endpoint"])
    with memory.snapshot() as snap:
        for arguments in ({"step": "1h"}, {"start": T0}, {"last": "1h"}):
            with pytest.raises(kivi.InvalidArgument, match="has none"):
                snap.rollup("plain", **arguments)
        assert list(snap.rollup("plain", by=["app"])) == []
