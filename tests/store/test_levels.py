"""Aggregates over aggregates, and levels created together: R21, and all or none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kivi
from kivi.delta.combine import Combining
from kivi.delta.derive import derive_all
from kivi.errors import AlreadyExists, InvalidArgument, NotFound, SchemaError
from kivi.store import backfill
from kivi.store.tables import Tables
from tests.golden.driver import EmbeddedDriver

COLUMNS = {"app": "string", "endpoint": "int64", "ts": "timestamp", "resp": "int64", "load": "float64"}
MEASURES = {
    "calls": kivi.count(),
    "known": kivi.count("resp"),
    "total": kivi.sum("resp"),
    "fastest": kivi.min("resp"),
    "slowest": kivi.max("resp"),
    "load": kivi.sum("load"),
    "latency": kivi.quantiles("resp"),
    "losses": kivi.count(where=kivi.col("resp") < 0),
    "newest": kivi.last("endpoint"),
    "mean": kivi.avg(kivi.col("load") * 2),
}
HOUR_US = 3_600_000_000
FROM_US = 1_774_600_000_000_000  # two days before Madrid's clock is set forward, in March 2026


@pytest.fixture(name="driver")
def _driver() -> Iterator[EmbeddedDriver]:
    driver = EmbeddedDriver(None, block_rows=64, consolidate_rows=8)
    driver.db.create_event_table("inv", event_time="ts", columns=COLUMNS)
    yield driver
    driver.close()


def events(rng: random.Random, count: int) -> list[dict[str, Any]]:
    return [
        {
            "app": rng.choice("ab"),
            "endpoint": rng.randrange(4),
            "ts": FROM_US + rng.randrange(100 * HOUR_US),
            "resp": rng.choice((None, rng.randrange(-(2**62), 2**62))),
            "load": rng.choice((None, rng.uniform(-1, 1))),
        }
        for _ in range(count)
    ]


def by_endpoint(db: Any, **options: Any) -> None:
    groups = ["app", "endpoint", kivi.time_slot("ts", "15m", name="begin")]
    db.create_aggregate("fine", source="inv", group_by=groups, measures=MEASURES, **options)


def day(column: str) -> Any:
    return kivi.time_slot(column, "1d", tz="Europe/Madrid", name="day")


def rows(db: Any, name: str) -> list[dict[str, Any]]:
    """Read narrow where sums fit: those that do not are told by their error."""
    with db.snapshot() as snap:
        found = []
        for key in [tuple(row.values()) for row in snap.scan(name, columns=db_keys(db, name))]:
            row: dict[str, Any] = {}
            for column in db.describe(name)["columns"]:
                try:
                    row[column] = snap.get(name, key, columns=[column])[column]
                except kivi.OutOfRange as error:
                    row[column] = str(error).replace(name, "it")
            found.append({"key": key, **row})
        return found


def db_keys(db: Any, name: str) -> list[str]:
    return list(db.describe(name)["key"])


# -- over an aggregate ----------------------------------------------------------------------------


def test_r21_an_aggregate_over_an_aggregate_is_one_over_the_events(driver: EmbeddedDriver) -> None:
    """Bit for bit: float sums, and sums that have outgrown 64 bits; before, after, folded, opened again."""
    db, rng = driver.db, random.Random(5)
    by_endpoint(db)
    db.append("inv", events(rng, 150))
    combined = {name: kivi.combine(name) for name in MEASURES}
    own = {"calls": kivi.sum("calls"), "known": kivi.combine("known"), "slowest": kivi.max("slowest")}
    for name, source, column, measures in (("over", "fine", "begin", combined), ("direct", "inv", "ts", MEASURES)):
        db.create_aggregate(name, source=source, group_by=["app", day(column)], measures=measures)
    db.create_aggregate("own", source="fine", group_by=["app", day("begin")], measures=own)
    db.create_aggregate("all", source="over", group_by=["day"])  # over one that is over one, and all of its measures
    for i in range(6):
        db.append("inv", events(rng, rng.choice((1, 2, 40))))
        if i == 2:
            db.consolidate()
        if i == 4:
            driver.crash()
            db = driver.db
    assert rows(db, "over") == rows(db, "direct")
    assert any(isinstance(row["total"], str) for row in rows(db, "over"))  # outgrown
    assert len(rows(db, "over")) >= 8
    picked = [{name: row[name] for name in ("key", *own)} for row in rows(db, "direct")]
    assert rows(db, "own") == picked
    with db.snapshot() as snap:
        assert sum(row["calls"] for row in snap.scan("all", columns=["calls"])) == len(list(snap.scan("inv")))
    described = db.describe("all")
    assert (described["source"], described["declared_source"]) == ("inv", "over")
    assert described["group_by"] == [{"name": "day", "source": "ts", "slot": "1d", "tz": "Europe/Madrid"}]
    assert "declared_source" not in db.describe("direct")


def test_a_slot_column_may_be_kept_as_it_is(driver: EmbeddedDriver) -> None:
    db = driver.db
    by_endpoint(db)
    db.create_aggregate("same", source="fine", group_by=["begin"], measures={"n": kivi.sum("calls")})
    db.append("inv", events(random.Random(2), 50))
    with db.snapshot() as snap:
        fine = {row["begin"] for row in snap.scan("fine", columns=["begin"])}
        assert {row["begin"]: row["n"] for row in snap.scan("same")}.keys() == fine


@pytest.mark.parametrize(
    ("group_by", "measures", "words"),
    [
        ([kivi.time_slot("begin", "20m")], None, "slots of 20m are not made of whole slots of 'fine', which are 15m"),
        ([kivi.time_slot("begin", "5m")], None, "multiples of 15m fit"),
        ([kivi.time_slot("begin", "1d", tz="Asia/Kathmandu"), "resp"], None, "'resp' is no key column"),
        (["ts"], None, "app, endpoint, begin"),
        ([kivi.time_slot("app", "1h")], None, "needs a timestamp"),
        (["app"], {"x": kivi.sum("slowest")}, r"kivi.combine\('slowest'\)"),
        (["app"], {"x": kivi.max("total")}, "is a sum"),
        (["app"], {"x": kivi.min("slowest")}, "is a max"),
        (["app"], {"x": kivi.count()}, "write kivi.combine"),
        (["app"], {"x": kivi.combine("resp")}, "no measure of its source 'fine': it has calls, known"),
        (["app"], {"app": kivi.combine("calls")}, "twice"),
    ],
)
def test_what_cannot_be_made_of_a_source_is_refused(
    driver: EmbeddedDriver, group_by: Any, measures: Any, words: str
) -> None:
    by_endpoint(driver.db)
    with pytest.raises(SchemaError, match=words):
        driver.db.create_aggregate("x", source="fine", group_by=group_by, measures=measures)
    assert driver.db.tables() == ["fine", "inv"]


def test_combine_is_only_for_aggregates_over_aggregates(driver: EmbeddedDriver) -> None:
    db = driver.db
    for call in (
        lambda: db.create_aggregate("x", source="inv", group_by=["app"], measures={"n": kivi.combine("resp")}),
        lambda: db.create_aggregate("x", source="inv", group_by=["app"]),
        lambda: db.create_table("x", key={"id": "int64"}, columns={"n": kivi.combine("int64")}),
    ):
        with pytest.raises(SchemaError, match=r"combine|at least one"):
            call()


def test_a_source_is_not_dropped_before_what_is_declared_over_it(driver: EmbeddedDriver) -> None:
    db = driver.db
    by_endpoint(db)
    db.create_aggregate("over", source="fine", group_by=["app"], measures={"n": kivi.sum("calls")})
    driver.reopen()
    db = driver.db
    with pytest.raises(InvalidArgument, match="'fine' is the source of over: drop these first"):
        db.drop("fine")
    with pytest.raises(NotFound):
        db.create_aggregate("x", source="gone", group_by=["app"])
    db.append("inv", events(random.Random(1), 10))
    db.drop("over")
    db.drop("fine")
    db.drop("inv")
    assert db.tables() == []


def test_nothing_is_declared_over_what_is_being_built(driver: EmbeddedDriver) -> None:
    db = driver.db
    db.append("inv", events(random.Random(1), 100))

    def progress(done: int, total: int) -> None:
        with pytest.raises(InvalidArgument, match="still being built"):
            db.create_aggregate("over", source="fine", group_by=["app"])

    by_endpoint(db, progress=progress)
    assert db.tables() == ["fine", "inv"]


# -- levels ---------------------------------------------------------------------------------------


def levels(db: Any, name: str = "calls", **more: Any) -> list[str]:
    measures = {"n": kivi.count(), "most": kivi.max("resp")}
    options = {"source": "inv", "levels": ["app", ["app", "endpoint"]], "slots": ["1h", "1month"], "measures": measures}
    return db.create_aggregates(name, **{**options, "tz": "Europe/Madrid", **more})


NAMES = ["calls_app_1h", "calls_app_1month", "calls_app_endpoint_1h", "calls_app_endpoint_1month"]


def test_levels_are_what_each_of_them_would_be(driver: EmbeddedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    db, rng = driver.db, random.Random(4)
    db.append("inv", events(rng, 200))
    derived: list[int] = []

    def counting(schemas: Any, *args: Any, **kwargs: Any) -> Any:
        derived.append(len(schemas))
        return derive_all(schemas, *args, **kwargs)

    told: list[tuple[int, int]] = []
    with monkeypatch.context() as patched:
        patched.setattr(backfill, "derive_all", counting)
        made = levels(db, derived={"double": "n + n"}, progress=lambda *rows: told.append(rows))
    assert made == NAMES
    assert derived == [4] * 4 and told[-1] == (200, 200)  # one pass over four chunks
    assert len({db.describe(name)["created_ts"] for name in made}) == 1
    db.append("inv", events(rng, 60))
    measures = {"n": kivi.count(), "most": kivi.max("resp")}
    for name, columns in zip(made, (["app"], ["app"], ["app", "endpoint"], ["app", "endpoint"]), strict=True):
        slot = kivi.time_slot("ts", name.rpartition("_")[2], tz="Europe/Madrid")
        db.create_aggregate(f"{name}_alone", source="inv", group_by=[*columns, slot], measures=measures)
        assert rows(db, name) == rows(db, f"{name}_alone")
        with db.snapshot() as snap:
            assert all(row["double"] == 2 * row["n"] for row in snap.scan(name))


def test_levels_over_an_aggregate_take_its_slots(driver: EmbeddedDriver) -> None:
    db = driver.db
    by_endpoint(db)
    db.append("inv", events(random.Random(1), 50))
    made = db.create_aggregates("up", source="fine", levels=["app"], slots=["1d"], tz="Europe/Madrid")
    assert made == ["up_app_1d"] and db.describe("up_app_1d")["declared_source"] == "fine"
    with db.snapshot() as snap:
        assert sum(row["calls"] for row in snap.scan("up_app_1d", columns=["calls"])) == 50
    db.create_aggregate("flat", source="fine", group_by=["app"])
    with pytest.raises(SchemaError, match="grouped by 0 time slots"):
        db.create_aggregates("up", source="flat", levels=["app"], slots=["1d"])


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"levels": ["app", "nothing"]}, SchemaError, "nothing"),
        ({"levels": ["app", "app"]}, SchemaError, "'calls_app_1h' twice"),
        ({"levels": "app"}, SchemaError, "levels is a list"),
        ({"levels": []}, SchemaError, "at least one"),
        ({"levels": [[]]}, SchemaError, "a level is a column"),
        ({"levels": [1]}, SchemaError, "a level is a column"),
        ({"slots": ["1h", "1fortnight"]}, InvalidArgument, "1fortnight"),
        ({"slots": None}, SchemaError, "slots is a list"),
        ({"slots": ["7h"]}, SchemaError, "divides 24 hours"),
        ({"tz": "Europe/Nowhere"}, SchemaError, "no time zone"),
        ({"measures": {"n": 1}}, SchemaError, "measure 'n'"),
        ({"measures": None}, SchemaError, "at least one"),
        ({"source": "gone"}, NotFound, "gone"),
    ],
)
def test_levels_that_cannot_be(driver: EmbeddedDriver, more: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        levels(driver.db, **more)
    assert driver.db.tables() == ["inv"]


def test_a_name_that_is_taken_makes_none_of_them(driver: EmbeddedDriver) -> None:
    db = driver.db
    db.create_aggregate("calls_app_endpoint_1h", source="inv", group_by=["app"], measures={"n": kivi.count()})
    with pytest.raises(AlreadyExists, match="calls_app_endpoint_1h"):
        levels(db)
    assert db.tables() == ["calls_app_endpoint_1h", "inv"]


def test_levels_of_which_one_cannot_be_built_are_dropped_together(driver: EmbeddedDriver) -> None:
    db = driver.db
    db.create_event_table("some", event_time="ts", columns=COLUMNS)
    db.append("some", [{**event, "endpoint": None} for event in events(random.Random(1), 30)])
    with pytest.raises(InvalidArgument, match="'endpoint' is null"):
        levels(db, source="some")
    assert db.tables() == ["inv", "some"]
    driver.crash()
    assert driver.store._resumed is None and driver.db.tables() == ["inv", "some"]
    assert levels(driver.db, source="some", levels=["app"]) == NAMES[:2]


class Dead(BaseException):
    """The process is killed here: nothing is cleaned up."""


def killed(driver: EmbeddedDriver, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    def die(*_: Any, **__: Any) -> Any:
        raise Dead

    with monkeypatch.context() as patched:
        progress: Callable[..., None] | None = None
        if point == "redefine":
            patched.setattr(Tables, "redefine", die)
        elif point == "combine":
            patched.setattr(Combining, "result", die)
        else:
            progress = die
        with pytest.raises(Dead):
            levels(driver.db, progress=progress)


@pytest.mark.parametrize("point", ["progress", "combine", "redefine"])
def test_after_a_crash_all_of_them_are_built_together(
    driver: EmbeddedDriver, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    rng = random.Random(6)
    driver.db.append("inv", events(rng, 150))
    killed(driver, monkeypatch, point)
    assert {driver.db.describe(name)["state"] for name in NAMES} == {"building"}
    driver.db.append("inv", events(rng, 20))  # which derives for them already
    driver.crash()
    assert driver.store._resumed is not None
    driver.store._resumed.join(60)
    assert len({driver.db.describe(name)["created_ts"] for name in NAMES}) == 1
    with driver.db.snapshot() as snap:
        for name in NAMES:
            assert sum(row["n"] for row in snap.scan(name)) == 170


def test_after_a_crash_one_that_cannot_be_built_drops_them_all(
    driver: EmbeddedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.db.append("inv", events(random.Random(6), 150))
    killed(driver, monkeypatch, "progress")

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(backfill, "derive_all", fail)
        driver.crash()
        assert driver.store._resumed is not None
        driver.store._resumed.join(60)
    assert driver.db.tables() == ["inv"]


def test_levels_survive_an_overwrite_of_their_source(driver: EmbeddedDriver) -> None:
    db, rng = driver.db, random.Random(8)
    db.append("inv", events(rng, 40))
    levels(db)
    with db.transaction() as tx:
        tx.overwrite("inv")
        tx.append("inv", events(rng, 9))
    with db.snapshot() as snap:
        assert [sum(row["n"] for row in snap.scan(name)) for name in NAMES] == [9] * 4
