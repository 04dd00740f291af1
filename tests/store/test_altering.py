"""Tables and aggregates that are altered while they are used, against a replay of what was written.

The replay knows which column came when: rows and events of before have nulls, or identities, in it. It is compared with
the whole of every table, at the newest snapshot and at those of before, from memory, after folds, restarts and crashes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.arrow.columns import rows_from_batch
from kivi.encoding.base_rows import RowLayout, Version
from kivi.errors import InvalidArgument, NotFound, OutOfRange, ResourceExhausted, SchemaError
from kivi.model.declarations import row_table_schema, with_columns
from kivi.model.rollups import rollup_of
from kivi.model.scans import Scan
from kivi.model.schema import ALTERATIONS_MAX, Column, TableSchema
from kivi.store.staging import Staging
from kivi.store.tables import Tables
from tests.golden.driver import EmbeddedDriver
from tests.mvcc.holding import hold
from tests.waiting import wait_until

VALUES = {
    "int64": lambda rng: rng.randrange(-9, 9),
    "string": lambda rng: rng.choice(("", "a", "longer")),
    "bool": lambda rng: rng.random() < 0.5,
}
CALLS = {
    "count": kivi.count,
    "sum": lambda: kivi.sum("x"),
    "min": lambda: kivi.min("x"),
    "max": lambda: kivi.max("x"),
    "known": lambda: kivi.count("x"),
    "avg": lambda: kivi.avg("x"),
    "largest": lambda: kivi.largest("x", 2),
    "above": lambda: kivi.count(where=kivi.col("x") > 10),
}


def measured(call: str, events: list[dict[str, Any]]) -> Any:
    """A measure of these events, by brute force."""
    known = [event["x"] for event in events if event.get("x") is not None]
    match call:
        case "count":
            return len(events)
        case "sum":
            return sum(known)
        case "known":
            return len(known)
        case "above":
            return sum(x > 10 for x in known)
        case "avg":
            return sum(known) / len(known) if known else None
        case "largest":
            return sorted(known, reverse=True)[:2]
    return {"min": min, "max": max}[call](known, default=None)


@pytest.fixture(name="driver", params=["memory", "disk"])
def _driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedDriver]:
    path = str(tmp_path / "store") if request.param == "disk" else None
    driver = EmbeddedDriver(path, block_rows=64, consolidate_rows=8)
    yield driver
    driver.close()


class Model:
    """What the tables hold, written down as it was written."""

    def __init__(self) -> None:
        self.events: list[tuple[int, dict[str, Any]]] = []
        self.event_columns = {"ts": "int64", "a": "int64", "x": "int64"}
        self.rows: dict[int, dict[str, Any]] = {}
        self.row_columns: dict[str, str] = {"v": "int64", "n": "sum"}
        self.measures: dict[str, tuple[str, int]] = {"calls": ("count", 0)}
        """The call, and the commit after which it has events."""

    def e(self) -> list[dict[str, Any]]:
        return [{name: event.get(name) for name in self.event_columns} for _, event in self.events]

    def t(self) -> dict[int, dict[str, Any]]:
        blank = {name: 0 if kind == "sum" else None for name, kind in self.row_columns.items()}
        return {key: {"id": key, **blank, **row} for key, row in sorted(self.rows.items())}

    def agg(self) -> dict[int, dict[str, Any]]:
        out: dict[int, dict[str, Any]] = {}
        for a in sorted({event["a"] for _, event in self.events}):
            mine = [(cts, event) for cts, event in self.events if event["a"] == a]
            out[a] = {"a": a} | {
                name: measured(call, [event for cts, event in mine if cts > since])
                for name, (call, since) in self.measures.items()
            }
        return out

    def all(self) -> list[Any]:
        return [self.e(), list(self.t().values()), list(self.agg().values())]


def found(snap: Any) -> list[Any]:
    events = [{**row, "ts": int(row["ts"].timestamp() * 1e6 + 0.5)} for row in snap.scan("e")]
    return [events, list(snap.scan("t")), list(snap.scan("agg"))]


def check(db: Any, model: Model, rng: random.Random) -> None:
    expected = model.all()
    with db.snapshot() as snap:
        assert found(snap) == expected
        some = [rng.randrange(12) for _ in range(3)]
        assert snap.get_many("t", [(key,) for key in some]) == [model.t().get(key) for key in some]
        assert snap.get_many("agg", [(key,) for key in some]) == [model.agg().get(key) for key in some]
        numbers = ["a", *(name for name, (call, _) in model.measures.items() if call != "largest")]
        narrow = [{name: row[name] for name in numbers} for row in expected[2]]
        assert snap.to_arrow("agg", columns=numbers).to_pylist() == narrow
        assert list(snap.scan("t", reverse=True)) == expected[1][::-1]
        name = rng.choice([*model.row_columns])
        unknown = [row for row in expected[1] if row[name] is None]
        assert list(snap.scan("t", where=kivi.col(name).is_null())) == unknown


def append(db: Any, model: Model, rng: random.Random) -> None:
    events = []
    for _ in range(rng.choice((1, 5, 40))):
        event = {"ts": rng.randrange(10**6), "a": rng.randrange(6), "x": rng.choice((None, rng.randrange(-99, 99)))}
        for name in [*model.event_columns][3:]:
            if rng.random() < 0.5:
                event[name] = VALUES[model.event_columns[name]](rng)
        events.append(event)
    cts = db.append("e", events)
    model.events += [(cts, event) for event in events]


def write(db: Any, model: Model, rng: random.Random) -> None:
    with db.transaction() as tx:
        for key in rng.sample(range(12), rng.randrange(1, 4)):
            blank = {name: 0 if kind == "sum" else None for name, kind in model.row_columns.items()}
            if rng.random() < 0.15:
                tx.delete("t", (key,))
                model.rows.pop(key, None)
                continue
            row = model.rows.setdefault(key, {})
            for name in rng.sample([*model.row_columns], rng.randrange(1, 1 + len(model.row_columns))):
                kind = model.row_columns[name]
                if kind in VALUES:
                    row[name] = VALUES[kind](rng)
                    tx.put("t", (key,), **{name: row[name]})
                else:
                    delta = rng.randrange(-5, 9)
                    old: Any = row.get(name, blank[name])
                    tx.delta("t", (key,), **{name: delta})
                    row[name] = old + delta if kind == "sum" else delta if old is None else max(old, delta)
            # what was put must not turn up where the row was deleted and made again
            assert tx.get("t", (key,)) == {"id": key, **blank, **row}


def alter(db: Any, model: Model, rng: random.Random) -> None:
    match rng.randrange(3):
        case 0:
            name, kind = f"e{len(model.event_columns)}", rng.choice([*VALUES])
            db.alter_table("e", add_columns={name: kind})
            model.event_columns[name] = kind
        case 1:
            name, kind = f"t{len(model.row_columns)}", rng.choice([*VALUES, "sum", "max"])
            declared = kind if kind in VALUES else getattr(kivi, kind)("int64")
            db.alter_table("t", add_columns={name: declared})
            model.row_columns[name] = kind
        case 2:
            calls = {f"m{len(model.measures) + i}": rng.choice([*CALLS]) for i in range(rng.randrange(1, 3))}
            backfill = rng.random() < 0.6
            db.alter_aggregate("agg", add_measures={n: CALLS[c]() for n, c in calls.items()}, backfill=backfill)
            since = db.describe("agg")["measures_since"]
            for name, call in calls.items():
                assert (since[name] is None) == backfill
                model.measures[name] = (call, 0 if backfill else since[name]["commit_ts"])


@pytest.mark.parametrize("seed", range(3))
def test_a_history_with_alterations(driver: EmbeddedDriver, seed: int) -> None:
    rng, model = random.Random(seed), Model()
    driver.db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "a": "int64", "x": "int64"})
    driver.db.create_table("t", key={"id": "int64"}, columns={"v": "int64", "n": kivi.sum("int64")})
    driver.db.create_aggregate("agg", source="e", group_by=["a"], measures={"calls": kivi.count()})
    before: list[tuple[Any, list[Any]]] = []
    for _ in range(40):
        db = driver.db
        step = rng.choices((append, write, alter, None), (6, 6, 3, 5))[0]
        if step is not None:
            step(db, model, rng)
        else:
            match rng.randrange(5):
                case 0 | 1:
                    db.consolidate()
                case 2:
                    driver.store.consolidator.run_light()
                case 3:
                    before.append((db.snapshot(), model.all()))
                case 4:
                    before.clear()
                    rng.choice((driver.reopen, driver.crash))()
        check(driver.db, model, rng)
        for snap, seen in before:
            assert found(snap) == seen, "a snapshot sees the tables as they were"


def test_a_table_with_history_is_read_as_it_was(driver: EmbeddedDriver) -> None:
    db = driver.db
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")}, history="1h")
    points = []
    for i in range(6):
        with db.transaction() as tx:
            tx.delta("t", (1,), **{"n": 1, **{f"c{j}": 10 for j in range(i)}})
        points.append((tx.commit_ts, {"id": 1, "n": i + 1, **{f"c{j}": 10 * (i - j) for j in range(i)}}))
        if i % 2:
            db.consolidate()
        db.alter_table("t", add_columns={f"c{i}": kivi.sum("int64")})
    for step in (lambda: None, lambda: driver.db.consolidate(), lambda: driver.crash(), lambda: driver.reopen()):
        step()
        for cts, row in points:
            with driver.db.snapshot(as_of=cts) as snap:
                assert snap.get("t", (1,)) == row
                assert list(snap.scan("t")) == [row]


def test_writers_go_on_while_measures_are_added(driver: EmbeddedDriver) -> None:
    """Nobody is refused: neither appends, nor transactions that began before an alteration."""
    db = driver.db
    db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "a": "int64", "x": "int64"})
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    db.create_aggregate("agg", source="e", group_by=["a"], measures={"calls": kivi.count()})
    stop, errors, appended = threading.Event(), list[BaseException](), [0, 0]

    def writer(number: int) -> None:
        rng = random.Random(number)
        try:
            while not stop.is_set():
                with db.transaction() as tx:
                    tx.get("t", (number,))
                    tx.append("e", [{"ts": 5, "a": rng.randrange(3), "x": 2}] * rng.choice((1, 50)))
                    tx.delta("t", (number,), n=1)
                appended[number] += 1
        except BaseException as error:
            errors.append(error)

    def written(more_than: int) -> None:
        wait_until(lambda: errors or min(appended) > more_than)

    def folder() -> None:
        while not stop.is_set():
            db.consolidate()
            driver.store.consolidator.run_light()

    threads = [threading.Thread(target=writer, args=(i,)) for i in range(2)] + [threading.Thread(target=folder)]
    for thread in threads:
        thread.start()
    for i in range(5):
        written(4 * i)
        db.alter_table("e", add_columns={f"y{i}": "string"})
        db.alter_table("t", add_columns={f"y{i}": "string" if i else "int64"})
        db.alter_aggregate("agg", add_measures={f"s{i}": kivi.sum("x"), f"n{i}": kivi.count(f"y{i}")})
        with db.snapshot() as snap:
            for row in snap.scan("agg"):
                assert row[f"s{i}"] == 2 * row["calls"] and row[f"n{i}"] == 0
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    for step in (lambda: None, lambda: driver.db.consolidate(), lambda: driver.crash()):
        step()
        with driver.db.snapshot() as snap:
            rows = list(snap.scan("agg"))
            assert sum(row["calls"] for row in rows) == sum(1 for _ in snap.scan("e"))
            assert all(row[f"s{i}"] == 2 * row["calls"] for row in rows for i in range(5))
            assert [row["n"] for row in snap.scan("t")] == appended


def test_who_read_the_definition_before_goes_on_with_it(driver: EmbeddedDriver) -> None:
    """It was altered between the look at its definition and the read, which may meet rows and runs of the new one."""
    _filled(driver)
    db, store = driver.db, driver.store
    db.create_table("t", key={"id": "int64"}, columns={"n": "int64"})
    with db.transaction() as tx:
        for i in range(100):
            tx.put("t", (i,), n=i)
    db.consolidate()
    old = {name: store.table(name) for name in ("e", "t", "agg")}
    seen = db.snapshot()
    for kind in ("int64", "string", "float64"):
        db.alter_table("t", add_columns={f"{kind}_": kind})
        db.alter_table("e", add_columns={f"{kind}_": kind})
        db.alter_aggregate("agg", add_measures={f"{kind}_": kivi.sum("x"), f"{kind}_n": kivi.count()})
        with db.transaction() as tx:
            tx.put("t", (5,), n=-5)
            tx.put("t", (1_000,), n=1)
            tx.append("e", [{"ts": 1, "a": 1, "x": 1.0}] * 40)
        for step in (lambda: None, store.consolidator.run_light, db.consolidate):
            step()
            with db.snapshot() as snap:
                for name, schema in old.items():
                    now = [{n: row[n] for n in schema.output_names} for row in snap.scan(name)]
                    batches = store.scan(snap._lease, schema, Scan())
                    assert [row for batch in batches for row in rows_from_batch(batch)] == now
                    some = store.scan(snap._lease, schema, Scan(limit=3))
                    assert [row for batch in some for row in rows_from_batch(batch)] == now[:3]
                rolled = store.answer(snap._lease, old["agg"], Scan(rollup=rollup_of(old["agg"])))
                calls = sum(row["calls"] for row in snap.scan("agg"))
                assert [row for batch in rolled for row in rows_from_batch(batch)] == [{"calls": calls}]
                assert store.get(snap._lease, old["t"], [(5,)]) == [{"id": 5, "n": -5}]
            assert [row["n"] for row in seen.scan("t")] == [*range(100)]
            read = store.scan(seen._lease, old["t"], Scan())
            assert [row["n"] for batch in read for row in rows_from_batch(batch)] == [*range(100)]


class Dead(BaseException):
    """The process dies here."""


def _filled(driver: EmbeddedDriver) -> None:
    driver.db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "a": "int64", "x": "float64"})
    driver.db.create_aggregate("agg", source="e", group_by=["a"], measures={"calls": kivi.count()})
    driver.db.append("e", [{"ts": i, "a": i % 3, "x": 1.5} for i in range(200)])


def _dies(*_: Any) -> Any:
    raise Dead


def test_a_crash_while_measures_are_built_goes_on_at_the_next_opening(driver: EmbeddedDriver) -> None:
    _filled(driver)
    with pytest.raises(Dead):
        driver.db.alter_aggregate(
            "agg", add_measures={"s": kivi.sum("x")}, derived={"avg": "s / calls"}, progress=_dies
        )
    with pytest.raises(InvalidArgument, match="being added"):
        driver.db.alter_aggregate("agg", add_measures={"m": kivi.max("x")})
    with driver.db.snapshot() as snap:  # nobody sees them yet, and the others go on
        assert next(iter(snap.scan("agg"))) == {"a": 0, "calls": 67}
        with pytest.raises(SchemaError, match="no column 's'"):
            list(snap.scan("agg", columns=["s"]))
    assert "s" not in driver.db.describe("agg")["columns"]
    driver.db.append("e", [{"ts": 1, "a": 0, "x": 0.25}])
    driver.crash()
    wait_until(lambda: "s" in driver.db.describe("agg")["columns"])
    for step in (lambda: None, lambda: driver.db.consolidate(), lambda: driver.reopen()):
        step()
        with driver.db.snapshot() as snap:
            assert list(snap.scan("agg", limit=1)) == [{"a": 0, "calls": 68, "s": 100.75, "avg": 100.75 / 68}]
        assert driver.db.describe("agg")["measures_since"] == {"calls": None, "s": None}


@pytest.mark.parametrize("where", ["sum", "stage"])
def test_measures_that_cannot_be_built_are_given_up(
    driver: EmbeddedDriver, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _filled(driver)
    error: type[Exception] = OSError
    if where == "sum":
        driver.db.append("e", [{"ts": 1, "a": 1, "x": 1.7e308}])
        driver.db.append("e", [{"ts": 1, "a": 1, "x": 1.7e308}])
        error = OutOfRange

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no")

    with monkeypatch.context() as patched:
        if where == "stage":
            patched.setattr(Staging, "log_stage", fails)
        with pytest.raises(error):
            added = {"s": kivi.sum("x"), "last": kivi.last("x"), "m": kivi.argmax("ts", by="x")}
            driver.db.alter_aggregate("agg", add_measures=added, derived={"avg": "s / calls"})
    for step in (lambda: None, lambda: driver.db.consolidate(), lambda: driver.crash()):
        step()
        db = driver.db
        assert db.describe("agg")["measures"] == {"calls": "count()"} and db.describe("agg")["derived"] == {}
        db.append("e", [{"ts": 1, "a": 1, "x": 1.7e308}])
        db.append("e", [{"ts": 1, "a": 5, "x": 1.0}] * 40)  # in columns, too
    db.alter_aggregate("agg", add_measures={"s": kivi.max("x")}, derived={"avg": "s / calls"})
    for step in (lambda: None, lambda: driver.db.consolidate(), lambda: driver.crash()):
        step()
        with driver.db.snapshot() as snap:
            assert snap.get("agg", (0,)) == {"a": 0, "calls": 67, "s": 1.5, "avg": 1.5 / 67}
            assert snap.get("agg", (5,)) == {"a": 5, "calls": 120, "s": 1.0, "avg": 1.0 / 120}


def test_who_tidies_up_after_one_alteration_leaves_the_stages_of_the_next(
    driver: EmbeddedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    _filled(driver)
    real, next_one, is_tidy = Tables.alter, threading.Event(), threading.Event()
    second: list[Future[Any]] = []

    def alter(self: Tables, name: str, altered: Any, commit_runs: Sequence[int] = ()) -> TableSchema:
        if commit_runs and second:  # the next one, before it is there
            next_one.set()
            assert is_tidy.wait(60)
        found = real(self, name, altered, commit_runs)
        if commit_runs and not second:  # the first one, before it drops its stages
            second.append(pool.submit(driver.db.alter_aggregate, "agg", add_measures={"most": kivi.max("x")}))
            assert next_one.wait(60)
        return found

    with ThreadPoolExecutor() as pool:
        monkeypatch.setattr(Tables, "alter", alter)
        driver.db.alter_aggregate("agg", add_measures={"least": kivi.min("x")})
        is_tidy.set()
        second[0].result()
    with driver.db.snapshot() as snap:
        assert {"least", "most"} < snap.get("agg", (0,)).keys()
    assert not driver.store.stages.live()


def _read(db: Any) -> list[Any]:
    with db.snapshot() as snap:
        return [
            list(snap.scan("agg")),
            snap.to_arrow("agg").to_pylist(),
            snap.rollup("agg", by=["a"]).to_arrow().to_pylist(),
            snap.query("agg", group_by=["a"]).to_arrow().to_pylist(),
            snap.dataset("agg").to_table().to_pylist(),
        ]


def test_nobody_reads_measures_that_are_being_built_or_were_given_up(driver: EmbeddedDriver) -> None:
    _filled(driver)
    db, found = driver.db, list[Any]()
    before = _read(db)

    def look(*_: Any) -> None:
        found.append(_read(db))
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        added = {"s": kivi.sum("x"), "mean": kivi.avg("x")}
        db.alter_aggregate("agg", add_measures=added, derived={"avg": "s / calls"}, progress=look)
    assert found == [before]
    for step in (lambda: None, lambda: driver.db.consolidate(), lambda: driver.reopen()):
        step()
        assert _read(driver.db) == before
    added = {"s": kivi.min("x"), "mean": kivi.avg("x")}  # under their names of before
    driver.db.alter_aggregate("agg", add_measures=added, derived={"avg": "s / calls"})
    now = [row | {"s": 1.5, "mean": 1.5, "avg": 1.5 / row["calls"]} for row in before[0]]
    assert _read(driver.db) == [now] * 5


def test_forgotten_events_are_told(driver: EmbeddedDriver) -> None:
    minute = 60_000_000
    db = driver.db
    db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "a": "int64"}, retention="1h")
    db.create_aggregate("agg", source="e", group_by=["a"], measures={"calls": kivi.count()})
    db.append("e", [{"ts": i * minute, "a": 0} for i in range(100)])
    driver.store.retention.set_floor(driver.store.table("e"), 40 * minute)
    db.alter_aggregate("agg", add_measures={"n": kivi.count()})
    assert db.describe("agg")["measures_since"] == {"calls": None, "n": {"event_time_us": 40 * minute}}
    db.append("e", [{"ts": 50 * minute, "a": 0}], late="drop")
    with db.snapshot() as snap:
        assert snap.get("agg", (0,)) == {"a": 0, "calls": 101, "n": 61}


def test_an_overwritten_source_makes_added_measures_complete(driver: EmbeddedDriver) -> None:
    _filled(driver)
    driver.db.alter_aggregate("agg", add_measures={"s": kivi.sum("x")}, backfill=False)
    overwritten = False

    def overwrite(*_: Any) -> None:
        nonlocal overwritten
        if not overwritten:
            overwritten = True
            with driver.db.transaction() as tx:
                tx.overwrite("e")
                tx.append("e", [{"ts": 1, "a": 7, "x": 2.5}] * 2)

    driver.db.alter_aggregate("agg", add_measures={"m": kivi.max("x")}, derived={"twice": "m * 2"}, progress=overwrite)
    for step in (lambda: None, lambda: driver.db.consolidate(), lambda: driver.crash()):
        step()
        with driver.db.snapshot() as snap:
            assert list(snap.scan("agg")) == [{"a": 7, "calls": 2, "s": 5.0, "m": 2.5, "twice": 5.0}]
        assert set(driver.db.describe("agg")["measures_since"].values()) == {None}


def test_a_repeated_append_is_the_same_before_and_after(driver: EmbeddedDriver) -> None:
    """R16: the digest of a token covers what the caller sent, whichever columns the table has by then."""
    _filled(driver)
    events = [{"ts": 1, "a": 1, "x": 2.0}] * 3
    first = driver.db.append("e", events, token="mine")
    schema = driver.store.table("e")
    each = driver.db._append("e", events, "each", "fail", each=True)
    driver.db.alter_table("e", add_columns={"s": "string", "z": "int64"})
    assert driver.db.append("e", events, token="mine") == first
    assert driver.db._append("e", events, "each", "fail", each=True) == each
    with pytest.raises(InvalidArgument, match="another"):
        driver.db.append("e", [{**event, "z": 0} for event in events], token="mine")
    assert schema != driver.store.table("e")
    with driver.db.snapshot() as snap:
        assert sum(1 for _ in snap.scan("e")) == 206


def test_staged_events_of_before_are_committed_after(driver: EmbeddedDriver) -> None:
    _filled(driver)
    old = driver.db.stage("e", [{"ts": 1, "a": 9, "x": 2.0}] * 40)
    driver.db.alter_table("e", add_columns={"s": "string"})
    driver.db.alter_aggregate("agg", add_measures={"n": kivi.count("s")})
    new = driver.db.stage("e", [{"ts": 1, "a": 9, "x": 2.0, "s": ""}] * 2)
    with driver.db.transaction() as tx:
        tx.append_stages("e", [old, new])
    for step in (lambda: None, lambda: driver.crash(), lambda: driver.db.consolidate()):
        step()
        with driver.db.snapshot() as snap:
            assert snap.get("agg", (9,)) == {"a": 9, "calls": 42, "n": 2}
            assert [row["s"] for row in snap.scan("e", where=kivi.col("a") == 9)] == [None] * 40 + [""] * 2


def test_a_commit_in_flight_that_knows_the_older_definition(driver: EmbeddedDriver) -> None:
    """It entered the log before the alteration, and is finished after it."""
    _filled(driver)
    tx = driver.db.transaction()
    tx.append("e", [{"ts": 1, "a": 9, "x": 2.0}])
    cts, outcomes = hold(driver.store, tx)
    done = threading.Thread(target=driver.db.alter_aggregate, args=("agg", {"s": kivi.sum("x")}))
    done.start()
    version = driver.store.changed_at
    wait_until(lambda: driver.store.changed_at != version or driver.store.catalog.entered.version > 2)
    driver.store.committer.finish_held(cts)
    done.join(60)
    assert not done.is_alive() and outcomes[0].commit_ts == cts
    with driver.db.snapshot() as snap:
        assert snap.get("agg", (9,)) == {"a": 9, "calls": 1, "s": 2.0}


def test_what_is_refused(driver: EmbeddedDriver) -> None:
    _filled(driver)
    db = driver.db
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    for call in (
        lambda: db.alter_table("agg", add_columns={"c": "int64"}),
        lambda: db.alter_table("t", add_columns={}),
        lambda: db.alter_table("t", add_columns=["c"]),
        lambda: db.alter_table("t", add_columns={"id": "int64"}),
        lambda: db.alter_table("t", add_columns={"n": "int64"}),
        lambda: db.alter_table("t", add_columns={"c": "integer"}),
        lambda: db.alter_table("t", add_columns={"not a name": "int64"}),
        lambda: db.alter_table("e", add_columns={"c": kivi.sum("int64")}),
        lambda: db.alter_aggregate("t", add_measures={"c": kivi.count()}),
        lambda: db.alter_aggregate("agg", add_measures={}),
        lambda: db.alter_aggregate("agg", add_measures={"c": "count"}),
        lambda: db.alter_aggregate("agg", add_measures={"calls": kivi.count()}),
        lambda: db.alter_aggregate("agg", add_measures={"c": kivi.sum("nothing")}),
        lambda: db.alter_aggregate("agg", add_measures={"c": kivi.count()}, derived={"c": "calls + 1"}),
        lambda: db.alter_aggregate("agg", add_measures={"c": kivi.count()}, derived={"d": "nothing + 1"}),
        lambda: db.alter_aggregate("agg", add_measures={"c": kivi.count()}, derived=["d"]),
    ):
        with pytest.raises((InvalidArgument, SchemaError)):
            call()
    for call in (
        lambda: db.alter_table("none", add_columns={"c": "int64"}),
        lambda: db.alter_aggregate("none", add_measures={"c": kivi.count()}),
    ):
        with pytest.raises(NotFound):
            call()
    assert driver.store.table("agg").alterations == driver.store.table("t").alterations == ()


# -- layouts ----------------------------------------------------------------------------------------------------


def _layouts() -> list[TableSchema]:
    schemas = [row_table_schema("t", {"id": "int64"}, {"n": kivi.sum("int64")})]
    for i in range(20):
        kind = ("int64", "string", kivi.max("float64"), "bool", kivi.sum("decimal(9,2)"), kivi.sum("float64"))[i % 6]
        schemas.append(with_columns(schemas[-1], {f"c{i}": kind}))
    return schemas


def test_rows_of_every_earlier_layout_are_read() -> None:
    """Among them are those where the bytes of nulls become one more, and those that get their first text."""
    schemas = _layouts()
    layouts = [RowLayout.of(schema) for schema in schemas]
    for i, earlier in enumerate(layouts):
        cells = tuple(None if j % 5 == 4 else _some(column) for j, column in enumerate(earlier.columns))
        for version in (Version(5, True, cells), Version(6, False, ())):
            data = earlier.encode(version)
            for later in layouts[i:]:
                identities = tuple(
                    (0.0 if c.type.name == "float64" else 0) if c.operator == "sum" else None
                    for c in later.columns[len(cells) :]
                )
                expected = version._replace(cells=version.cells + identities if version.alive else ())
                assert later.decode(data) == expected
                assert later.current(data) == later.encode(expected)
                assert later.current(data + b"behind") == later.encode(expected) + b"behind"
                assert earlier.cut(later.current(data), later) == data


def _some(column: Column) -> Any:
    if column.operator == "sum" and column.type.is_integer:
        return -(2**70)
    return {"string": "text", "bool": True, "float64": 1.5}.get(column.type.name, 7)


def test_there_is_a_limit_of_alterations() -> None:
    schema = row_table_schema("t", {"id": "int64"}, {"n": "int64"})
    for i in range(ALTERATIONS_MAX):
        schema = with_columns(schema, {f"c{i}": "int64"})
    data = RowLayout.of(schema).encode(Version(1, True, (3,) * len(schema.columns)))
    assert RowLayout.of(schema).decode(data).cells == (3,) * len(schema.columns)
    with pytest.raises(ResourceExhausted, match="alterations_max"):
        with_columns(schema, {"more": "int64"})
    assert TableSchema.from_json(schema.to_json()) == schema
