"""Retention of aggregates: rows below a logged floor are gone for later snapshots, and what comes for them is counted.

*The model* is a list of commits and a list of floors for each aggregate. An event enters an aggregate unless its time
lies before the newest floor that was logged before its commit; a row is there at S unless its slot begins before the
newest floor at or below S. Nothing of it is shared with the store.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest

import kivi
from kivi.delta.derive import Derivation
from kivi.encoding.key_slots import KeySlot
from kivi.encoding.keys import encode_key
from kivi.errors import InvalidArgument, SchemaError, SnapshotTooOld
from kivi.model.declarations import aggregate_schema, event_table_schema
from tests.golden.driver import EmbeddedDriver

MINUTE = 60_000_000
Row = dict[str, Any]

AGGREGATES: dict[str, tuple[list[str], int, str | None]] = {
    "fine": (["a", "slot"], 1, "10m"),
    "coarse": (["slot", "a"], 5, "60m"),
    "between": (["t", "slot", "u"], 1, "10m"),
    "kept": (["a", "slot"], 1, None),
    "history": (["t", "slot"], 1, "10m"),
}
COLUMNS = {"ts": "timestamp", "a": "int64", "t": "string", "u": "string", "x": "int64", "f": "float64"}


def declare(db: Any, **aggregates: Any) -> None:
    db.create_event_table("e", event_time="ts", columns=COLUMNS)
    for name, (key, minutes, retention) in (aggregates or AGGREGATES).items():
        slot = kivi.time_slot("ts", minutes * MINUTE)
        db.create_aggregate(
            name,
            source="e",
            group_by=[slot if column == "slot" else column for column in key],
            measures={"total": kivi.sum("x"), "calls": kivi.count(), "least": kivi.min("x"), "sum": kivi.sum("f")},
            derived={"mean": "total / calls"},
            history="1h" if name == "history" else None,
            retention=retention,
        )


@pytest.fixture(name="driver", params=["memory", "disk"])
def _driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedDriver]:
    driver = EmbeddedDriver(str(tmp_path / "store") if request.param == "disk" else None, block_rows=10)
    declare(driver.db)
    yield driver
    driver.close()


def events(minutes: range, a: int = 1) -> list[Row]:
    return [
        {"ts": minute * MINUTE + 7, "a": a, "t": f"t{a % 2}", "u": "u" * (a % 3), "x": minute, "f": minute / 8}
        for minute in minutes
    ]


def set_floor(driver: EmbeddedDriver, table: str, minute: int) -> int:
    return driver.store.retention.set_floor(driver.store.table(table), minute * MINUTE)


def slots(reader: Any, table: str) -> list[int]:
    return sorted({int(row["slot"].timestamp()) // 60 for row in reader.scan(table)})


def seen(driver: EmbeddedDriver, table: str) -> list[int]:
    with driver.db.snapshot() as snap:
        return slots(snap, table)


def erase(driver: EmbeddedDriver) -> None:
    """Erases all that nobody needs, however little it is."""
    store = driver.store
    for schema in store.tables():
        while schema.forgets_rows and store.forgetting.step(schema, store.consolidator.position, slack=False):
            pass


def stored(driver: EmbeddedDriver, table: str) -> int:
    """Rows and versions of the table in base."""
    schema = driver.store.table(table)
    prefixes = [bytes([space]) + schema.id.to_bytes(4, "big") for space in (3, 4)]
    return sum(1 for key, _ in driver.store.engine.scan(b"", None) if key[:5] in prefixes)


# -- a seeded history against the model -------------------------------------------------------------------------


class Model:
    def __init__(self) -> None:
        self.commits: list[tuple[int, list[Row]]] = []
        self.floors: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def floor(self, table: str, upto: int) -> int | None:
        return max((time_us for cts, time_us in self.floors[table] if cts <= upto), default=None)

    def rows(self, table: str, upto: int) -> tuple[dict[tuple[Any, ...], Row], int]:
        """The rows at ``upto`` by key, and how many events were late by then."""
        key, minutes, _ = AGGREGATES[table]
        found: dict[tuple[Any, ...], Row] = {}
        late = 0
        for cts, brought in self.commits:
            if cts > upto:
                continue
            floor, floats = self.floor(table, cts - 1), defaultdict[tuple[Any, ...], float](float)
            for event in brought:
                if floor is not None and event["ts"] < floor:
                    late += 1
                    continue
                slot = event["ts"] // (minutes * MINUTE) * minutes * MINUTE
                at = tuple(slot if column == "slot" else event[column] for column in key)
                row = found.setdefault(at, {"total": 0, "calls": 0, "least": event["x"], "sum": 0.0})
                row["total"] += event["x"]
                row["calls"] += 1
                row["least"] = min(row["least"], event["x"])
                floats[at] += event["f"]
            for at, value in floats.items():
                found[at]["sum"] += value
        floor, place = self.floor(table, upto), key.index("slot")
        return {at: row for at, row in found.items() if floor is None or at[place] >= floor}, late


def by_key(table: str, rows: Any) -> dict[tuple[Any, ...], Row]:
    key = AGGREGATES[table][0]
    out = {}
    for row in rows:
        row["slot"] = int(row["slot"].timestamp()) * 1_000_000
        at = tuple(row.pop(name) for name in key)
        assert row.pop("mean") == row["total"] / row["calls"]
        out[at] = row
    return out


class World:
    """A store and the model of it. After each step every open snapshot is as the model says."""

    def __init__(self, seed: int, path: Path | None) -> None:
        self.random = random.Random(seed)
        self.driver = EmbeddedDriver(str(path) if path else None, block_rows=16, consolidate_rows=8)
        declare(self.driver.db)
        self.first = self.driver.db.watermark()
        self.model = Model()
        self.snapshots: list[Any] = []
        self.minute = 100
        self.erased = self.erased_between = 0

    def brought(self, most: int) -> list[Row]:
        out = []
        for _ in range(self.random.randint(1, most)):
            minute = max(0, self.minute - int(self.random.expovariate(0.08)))
            out += events(range(minute, minute + 1), self.random.randint(0, 4))
        self.minute += self.random.choice([0, 0, 1, 2, 5])
        return out

    def small(self) -> None:
        some = self.brought(6)
        self.model.commits.append((self.driver.db.append("e", some), some))

    def bulk(self) -> None:
        some = self.brought(80)
        self.model.commits.append((self.driver.db.append("e", some), some))

    def each(self) -> None:
        some = self.brought(20)
        with self.driver.db.appender("e", each=True, linger_ms=20, max_events=1_000) as app:
            futures = [app.append(**event) for event in some]
        for future, event in zip(futures, some, strict=True):
            self.model.commits.append((future.result(60), [event]))
        self.model.commits.sort(key=lambda commit: commit[0])

    def transaction(self) -> None:
        """Reads its own events, but for those that lie below the floor."""
        some = self.brought(self.random.choice([5, 60]))
        with self.driver.db.transaction() as tx:
            start = tx.start_ts
            tx.append("e", some)
            own = Model()
            own.floors = self.model.floors
            own.commits = [*(commit for commit in self.model.commits if commit[0] <= start), (start + 1, some)]
            for table in AGGREGATES:
                rows, _ = own.rows(table, start + 1)
                assert by_key(table, tx.scan(table)) == rows, (table, "own writes")
        self.model.commits.append((tx.commit_ts, some))

    @contextmanager
    def floors_noted(self) -> Iterator[None]:
        retention = self.driver.store.retention
        whole = retention.set_floor

        def set_floor(schema: Any, time_us: int) -> int:
            cts = whole(schema, time_us)
            self.model.floors[schema.name].append((cts, time_us))
            return cts

        with patch.object(retention, "set_floor", set_floor):
            yield

    def move(self) -> None:
        with self.floors_noted():
            self.driver.db.consolidate()  # which keeps house itself where it takes long
            self.driver.store.housekeeping.move_floors()
        for table, (_, minutes, retention) in AGGREGATES.items():
            floor = self.model.floor(table, 2**62)
            if retention is None or floor is None:
                assert floor is None
                continue
            newest = max(event["ts"] for _, some in self.model.commits for event in some)
            keeps, width = int(retention[:-1]) * MINUTE, minutes * MINUTE
            assert floor % width == 0
            assert (newest - keeps) // width * width - keeps // 100 <= floor <= newest - keeps

    def consolidate(self) -> None:
        """As with the background, which keeps house between the steps of a pass too; here between all of them."""
        with (
            self.floors_noted(),
            patch.object(self.driver.store.consolidator, "_also", self.between),
            patch("kivi.mvcc.consolidate._HOUSEKEEPING_S", 0.0),
        ):
            self.driver.db.consolidate()

    def between(self) -> None:
        if self.random.random() < 0.2:
            self.driver.store.housekeeping.move_floors()
        before = self.driver.store.forgetting.erased
        erase(self.driver)
        self.erased_between += self.driver.store.forgetting.erased - before

    def light(self) -> None:
        self.driver.store.consolidator.run_light()

    def erase(self) -> None:
        before = self.driver.store.forgetting.erased
        erase(self.driver)
        self.driver.store.consolidator.sweep()
        self.erased += self.driver.store.forgetting.erased - before

    def step_of_the_background(self) -> None:
        with self.floors_noted():
            self.driver.store.housekeeping.step()

    def crash(self) -> None:
        self.snapshots.clear()
        self.driver.crash()

    def reopen(self) -> None:
        self.snapshots.clear()
        self.driver.reopen()

    def begin(self) -> None:
        snap = self.driver.db.snapshot()
        snap.__enter__()
        self.snapshots.append(snap)

    def end(self) -> None:
        if self.snapshots:
            self.snapshots.pop(self.random.randrange(len(self.snapshots))).close()

    def check(self) -> None:
        with self.driver.db.snapshot() as now:
            for snap in (*self.snapshots, now):
                for table in AGGREGATES:
                    rows, late = self.model.rows(table, snap.ts)
                    assert by_key(table, snap.scan(table)) == rows, (table, snap.ts)
                    if snap is now and AGGREGATES[table][2] is not None:
                        statistics = self.driver.db.describe(table)["statistics"]
                        assert statistics["late_dropped"] == late
                        assert statistics.get("floor_us") == self.model.floor(table, snap.ts)
                table = self.random.choice(list(AGGREGATES))
                self.check_some(snap, table)

    def check_some(self, snap: Any, table: str) -> None:
        """Keys, scans of a few rows, backwards, and of ranges."""
        ever = sorted(Unfloored(self.model).rows(table, snap.ts)[0])
        rows = self.model.rows(table, snap.ts)[0]
        asked = self.random.sample(ever, min(8, len(ever)))
        assert [row is not None for row in snap.get_many(table, asked)] == [at in rows for at in asked]
        assert by_key(table, snap.scan(table, reverse=True)) == rows
        few = by_key(table, snap.scan(table, limit=5))
        assert list(few) == sorted(rows)[:5]
        if asked:
            inside = by_key(table, snap.scan(table, start=asked[0]))
            assert list(inside) == [at for at in sorted(rows) if at >= asked[0]]

    def check_history(self) -> None:
        """The aggregate with history, as of any moment that it still answers."""
        with self.driver.db.snapshot() as now:
            for ts in self.random.sample(range(self.first, now.ts + 1), min(4, now.ts + 1 - self.first)):
                with self.driver.db.snapshot(as_of=ts) as snap:
                    try:
                        found = by_key("history", snap.scan("history"))
                    except SnapshotTooOld:
                        continue
                    assert found == self.model.rows("history", ts)[0], ts

    def check_changes(self) -> None:
        """What changed since some moment, told with what was there then, gives what is there now."""
        with self.driver.db.snapshot() as now:
            for table in AGGREGATES:
                since = self.random.randint(self.first, now.ts)
                state = self.model.rows(table, since)[0]
                try:
                    changed = list(now.changes(table, since=since, removed=True, commit_ts=False))
                except SnapshotTooOld:
                    continue
                key = AGGREGATES[table][0]
                for row in changed:
                    row["slot"] = int(row["slot"].timestamp()) * 1_000_000
                    at = tuple(row.pop(name) for name in key)
                    row.pop("mean")
                    if row.pop("_removed"):
                        assert set(row.values()) == {None}
                        state.pop(at, None)
                    else:
                        state[at] = row
                assert state == self.model.rows(table, now.ts)[0], (table, since)


class Unfloored(Model):
    """The same without floors: every row that could ever have been."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.commits = model.commits


STEPS = [
    *("small", "small", "bulk", "bulk", "each", "transaction", "move", "move", "consolidate", "light", "erase"),
    *("step_of_the_background", "begin", "end", "check_history", "check_changes", "check_changes"),
]


@pytest.mark.parametrize(("seed", "forced"), [(1, False), (2, True), (4, True), (5, None)])
def test_a_history_is_the_replay_of_it(seed: int, forced: bool | None, tmp_path: Path) -> None:
    world = World(seed, tmp_path / "store" if forced is None else None)
    for i in range(45):
        step = world.random.choice([*STEPS, "crash", "reopen"] if i % 9 == 8 else STEPS)
        if forced is False and step in ("consolidate", "light"):
            step = "small"
        getattr(world, step)()
        if forced:
            world.consolidate()
        if i % 4 == 3:
            world.check()
    world.check()
    while world.snapshots:
        world.end()
    world.move()
    world.erase()
    world.check()
    assert world.erased + world.erased_between > 0
    assert world.erased_between > 0 or not forced
    assert any(world.model.rows(table, 2**62)[1] for table in ("fine", "between"))
    world.driver.close()


# -- rule by rule -----------------------------------------------------------------------------------------------


def steps(driver: EmbeddedDriver) -> list[Callable[[], object]]:
    """What must change no answer."""
    return [
        lambda: None,
        lambda: driver.db.consolidate(),
        lambda: erase(driver),
        driver.crash,
        lambda: driver.db.consolidate(),
        driver.reopen,
        lambda: erase(driver),
        driver.crash,
    ]


def test_the_floor_follows_the_newest_event_and_keeps_what_the_retention_promises(driver: EmbeddedDriver) -> None:
    driver.db.append("e", events(range(100)))
    driver.db.consolidate()
    driver.store.housekeeping.move_floors()
    for step in steps(driver):
        step()
        assert seen(driver, "fine") == list(range(89, 100))
        assert seen(driver, "coarse") == list(range(35, 100, 5))
        assert seen(driver, "kept") == list(range(100))
        found = driver.db.describe("fine")
        assert found["retention_us"] == 10 * MINUTE
        assert found["complete_since_us"] == 89 * MINUTE
        assert found["statistics"] == {"late_dropped": 0, "floor_us": 89 * MINUTE, "complete_since_us": 89 * MINUTE}


def test_what_leaves_a_fine_level_still_counts_in_the_coarse_one(driver: EmbeddedDriver) -> None:
    driver.db.append("e", events(range(60)))
    set_floor(driver, "fine", 50)
    driver.db.append("e", events(range(42, 52), a=2))  # derived row by row
    driver.db.append("e", events(range(12, 52), a=2))  # derived in columns
    with driver.db.appender("e", each=True) as app:
        for event in events(range(48, 52), a=2):
            app.append(**event)
    for step in steps(driver):
        step()
        with driver.db.snapshot() as snap:
            assert [(row["slot"].minute, row["calls"]) for row in snap.scan("fine", prefix=(2,))] == [(50, 3), (51, 3)]
            assert sum(row["calls"] for row in snap.scan("coarse") if row["a"] == 2) == 10 + 40 + 4
            assert sum(row["calls"] for row in snap.scan("kept", prefix=(2,))) == 10 + 40 + 4
        assert driver.db.describe("fine")["statistics"]["late_dropped"] == 8 + 38 + 2
        assert driver.db.describe("coarse")["statistics"]["late_dropped"] == 0


def test_a_commit_of_nothing_but_late_events(driver: EmbeddedDriver) -> None:
    driver.db.append("e", events(range(60)))
    set_floor(driver, "fine", 55)
    driver.db.append("e", events(range(10), a=3))
    driver.db.append("e", events(range(50), a=3))
    with driver.db.appender("e", each=True) as app:
        app.append(**events(range(1), a=3)[0])
    for step in steps(driver):
        step()
        with driver.db.snapshot() as snap:
            assert not list(snap.scan("fine", prefix=(3,)))
            assert sum(row["calls"] for row in snap.scan("kept", prefix=(3,))) == 61


def test_a_snapshot_from_before_the_floor_keeps_its_answer(driver: EmbeddedDriver) -> None:
    driver.db.append("e", events(range(60)))
    driver.db.consolidate()
    before = driver.db.snapshot()
    before.__enter__()
    rows = {table: list(before.scan(table)) for table in AGGREGATES}
    held = stored(driver, "fine")
    set_floor(driver, "fine", 50)
    driver.db.append("e", events(range(45, 60)))
    for _ in range(3):
        driver.db.consolidate()
        erase(driver)
        assert {table: list(before.scan(table)) for table in AGGREGATES} == rows
        assert seen(driver, "fine") == list(range(50, 60))
        assert stored(driver, "fine") >= held
    before.close()
    driver.db.consolidate()
    erase(driver)
    driver.store.consolidator.sweep()
    assert stored(driver, "fine") == 10


def test_rows_are_not_erased_before_base_has_what_came_before_the_floor(driver: EmbeddedDriver) -> None:
    """Else a fold would bring back a part of them."""
    driver.db.append("e", events(range(60)))
    driver.db.consolidate()
    driver.db.append("e", events(range(60)))
    set_floor(driver, "fine", 50)
    erase(driver)
    assert stored(driver, "fine") == 60
    driver.db.consolidate()
    erase(driver)
    assert stored(driver, "fine") == 10


def test_erasing_waits_until_it_is_worth_a_walk_and_is_done_in_steps(driver: EmbeddedDriver) -> None:
    for a in range(10):
        driver.db.append("e", events(range(100), a))
    for minute in range(60, 90, 3):
        set_floor(driver, "fine", minute)
        driver.db.consolidate()
        for _ in range(6):
            driver.store.housekeeping._forget_rows()
        shown = 10 * (100 - minute)
        assert shown <= stored(driver, "fine") <= shown + 10 * 4 + (10 * 60 if minute == 60 else 0)
        assert seen(driver, "fine") == list(range(minute, 100))
    with patch("kivi.mvcc.forgetting._ROWS", 7), patch("kivi.mvcc.forgetting._SEEKS", 3):
        schema = driver.store.table("fine")
        taken = 0
        while driver.store.forgetting.step(schema, driver.store.consolidator.position, slack=False):
            taken += 1
    assert taken >= 3
    assert stored(driver, "fine") == 10 * 13


@pytest.mark.parametrize("end", ["crash", "reopen"])
def test_a_walk_that_a_restart_ended_is_finished_though_no_floor_moves_any_more(
    driver: EmbeddedDriver, end: str
) -> None:
    for a in range(10):
        driver.db.append("e", events(range(100), a))
    for minute in (60, 61):
        set_floor(driver, "fine", minute)
    driver.db.consolidate()
    with patch("kivi.mvcc.forgetting._ROWS", 7), patch("kivi.mvcc.forgetting._SEEKS", 3):
        schema = driver.store.table("fine")
        while stored(driver, "fine") == 10 * 100:
            assert driver.store.forgetting.step(schema, driver.store.consolidator.position)
    assert stored(driver, "fine") > 10 * 40
    driver.store.engine.flush()
    getattr(driver, end)()
    for _ in range(4):
        driver.store.housekeeping._forget_rows()
    assert stored(driver, "fine") == 10 * 40
    assert seen(driver, "fine") == list(range(61, 100))
    assert not driver.store.forgetting.step(driver.store.table("fine"), driver.store.consolidator.position)


def test_a_floor_that_moves_between_deriving_and_entering_is_met(driver: EmbeddedDriver) -> None:
    """The commit is derived again."""
    driver.db.append("e", events(range(60)))

    def each() -> None:
        with driver.db.appender("e", each=True) as app:
            for event in events(range(45, 60), a=5):
                app.append(**event)

    def small() -> None:
        driver.db.append("e", events(range(45, 60), a=5))

    def bulk() -> None:
        driver.db.append("e", events(range(15, 60), a=5))

    for append in (small, bulk, each):
        minute = 46 + driver.store.committer.counters.rederived
        moved = threading.Event()
        whole = driver.store.retention.newest_of

        def newest_of(aggregates: Any, *, minute: int = minute, moved: Any = moved, whole: Any = whole) -> Any:
            found = whole(aggregates)
            if not moved.is_set():
                moved.set()
                set_floor(driver, "fine", minute)
            return found

        before = driver.db.describe("fine")["statistics"]["late_dropped"]
        with patch.object(driver.store.retention, "newest_of", newest_of):
            append()
        with driver.db.snapshot() as snap:
            assert min(row["slot"].minute for row in snap.scan("fine", prefix=(5,))) == minute
        assert driver.db.describe("fine")["statistics"]["late_dropped"] > before
    assert driver.store.committer.counters.rederived >= 3


def test_changes_name_the_rows_that_a_floor_took_away(driver: EmbeddedDriver) -> None:
    driver.db.append("e", events(range(50), a=1))
    driver.db.consolidate()
    driver.db.append("e", events(range(40, 60), a=2))
    since = driver.db.watermark()
    set_floor(driver, "fine", 45)
    driver.db.append("e", events(range(58, 59), a=1))
    for step in (lambda: None, lambda: driver.db.consolidate(), driver.crash):
        step()
        with driver.db.snapshot() as snap:
            rows = list(snap.changes("fine", since=since, removed=True))
            gone = [(row["a"], row["slot"].minute) for row in rows if row["_removed"]]
            assert gone == [*((1, minute) for minute in range(45)), *((2, minute) for minute in range(40, 45))]
            assert [row["calls"] for row in rows if not row["_removed"]] == [1]
            assert all(row["total"] is None and row["mean"] is None for row in rows if row["_removed"])
            some = list(snap.changes("fine", since=since, start=(1, 40 * MINUTE), end=(2, 42 * MINUTE)))
            assert [(row["a"], row["slot"].minute) for row in some] == [
                *((1, minute) for minute in (*range(40, 45), 58)),
                *((2, minute) for minute in (40, 41)),
            ]
            where = (kivi.col("a") == 2) | (kivi.col("calls") > 0)
            assert len(list(snap.changes("fine", since=since, where=where))) == 5 + 1
    points = driver.db.tail_points("fine", since=since)
    assert points.changed_at(driver.db.watermark()) == driver.db.watermark()


def test_changes_from_before_what_was_erased_are_refused(driver: EmbeddedDriver) -> None:
    driver.db.append("e", events(range(50)))
    since = driver.db.watermark()
    floor = set_floor(driver, "fine", 45)
    driver.db.append("e", events(range(50, 52)))
    driver.db.consolidate()
    erase(driver)
    driver.store.consolidator.flush()
    for step in (lambda: None, driver.crash):
        step()
        with driver.db.snapshot() as snap:
            with pytest.raises(SnapshotTooOld) as caught:
                list(snap.changes("fine", since=since))
            assert caught.value.details["kept_since"] == floor
            assert [row["slot"].minute for row in snap.changes("fine", since=floor)] == [50, 51]
            every = [row["slot"].minute for row in snap.changes("fine", since=since, partial=True)]
            assert every == list(range(45, 52))
            assert driver.db.tail_points("fine", since=since).kept_since == floor


def test_subscribers_are_told_that_rows_are_gone(driver: EmbeddedDriver) -> None:
    driver.db.append("e", events(range(30)))
    with driver.db.subscribe("fine", order_by=["-slot"], limit=20) as live:
        updates = iter(live)
        assert len(next(updates).changes) == 20
        set_floor(driver, "fine", 25)
        told = next(update for update in updates if update.changes)
        assert [change.kind for change in told.changes] == ["remove"] * 15
        assert [row["slot"].minute for row in live.rows] == list(range(29, 24, -1))


def test_a_dropped_aggregate_leaves_nothing_of_its_floors(driver: EmbeddedDriver) -> None:
    driver.db.append("e", events(range(30)))
    set_floor(driver, "fine", 20)
    driver.db.consolidate()
    driver.db.drop("fine")
    driver.db.consolidate()
    for _ in range(20):
        driver.store.housekeeping.step()
    assert driver.store.row_floors.tables() == []
    declare_again = {"fine": AGGREGATES["fine"]}
    key, minutes, retention = declare_again["fine"]
    assert (key, minutes, retention) == (["a", "slot"], 1, "10m")
    driver.db.create_aggregate(
        "fine",
        source="e",
        group_by=["a", kivi.time_slot("ts", "1m")],
        measures={"calls": kivi.count()},
        retention="10m",
    )
    assert seen(driver, "fine") == list(range(30))


def test_an_overwritten_source_begins_without_a_floor(driver: EmbeddedDriver) -> None:
    driver.db.append("e", events(range(30)))
    set_floor(driver, "fine", 20)
    with driver.db.snapshot() as before:
        with driver.db.transaction() as tx:
            tx.overwrite("e")
            tx.append("e", events(range(5, 15)))
        for _ in range(2):
            assert slots(before, "fine") == list(range(20, 30))
            assert seen(driver, "fine") == list(range(5, 15))
            driver.db.consolidate()
            erase(driver)


def test_a_checkpoint_has_the_floors(tmp_path: Path) -> None:
    driver = EmbeddedDriver(str(tmp_path / "store"))
    declare(driver.db)
    driver.db.append("e", events(range(30)))
    set_floor(driver, "fine", 20)
    driver.db.append("e", events(range(18, 22)))
    driver.db.checkpoint(str(tmp_path / "copy"))
    with kivi.open(tmp_path / "copy") as copy, copy.snapshot() as snap:
        assert slots(snap, "fine") == list(range(20, 30))
        assert copy.describe("fine")["statistics"]["late_dropped"] == 2
    driver.close()


@pytest.mark.parametrize("retention", ["10m", 600_000_000])
def test_only_aggregates_with_a_time_slot_have_retention(retention: Any) -> None:
    source = event_table_schema("e", "ts", COLUMNS)
    measures = {"calls": kivi.count()}
    with pytest.raises(SchemaError, match="no time slot in its key"):
        aggregate_schema("agg", source, ["a", "ts"], measures, retention=retention)
    with pytest.raises(InvalidArgument, match="retention"):
        aggregate_schema("agg", source, [kivi.time_slot("ts", "1m")], measures, retention="soon")
    group_by: list[Any] = [kivi.time_slot("ts", "1h", "hour"), "a", kivi.time_slot("ts", "1m"), "t"]
    made = aggregate_schema("agg", source, group_by, measures, retention=retention)
    assert made.retention_us == 10 * MINUTE
    assert type(made).from_json(made.to_json()) == made
    assert KeySlot.of(made).index == 2


@pytest.mark.parametrize("group_by", [["slot"], ["a", "slot"], ["slot", "t"], ["t", "slot", "u"], ["t", "slot", "a"]])
def test_the_slot_is_found_in_keys(group_by: list[str]) -> None:
    source = event_table_schema("e", "ts", COLUMNS)
    groups: list[Any] = [kivi.time_slot("ts", "1m") if name == "slot" else name for name in group_by]
    made = aggregate_schema("agg", source, groups, {"calls": kivi.count()}, retention="1h")
    slot, chosen = KeySlot.of(made), random.Random(5)
    made_up: dict[str, Callable[[], Any]] = {
        "slot": lambda: chosen.randint(-(10**15), 10**15),
        "a": lambda: chosen.randint(-9, 9),
        "t": lambda: "x\0" * chosen.randint(0, 3),
        "u": lambda: "u",
    }
    values = [tuple(made_up[name]() for name in group_by) for _ in range(300)]
    keys = [encode_key([column.type for column in made.key], value) for value in values]
    for floor in (-(10**15), 0, 12_345, values[0][group_by.index("slot")]):
        expected = [value[group_by.index("slot")] < floor for value in values]
        assert [slot.is_below(key, floor) for key in keys] == expected
        array = pa.array(keys, pa.large_binary())
        assert slot.below(array, floor).tolist() == expected
        assert slot.below(array.slice(7, 100), floor).tolist() == expected[7:107]


def test_nothing_is_copied_where_nothing_is_late(driver: EmbeddedDriver) -> None:
    driver.db.append("e", events(range(60)))
    set_floor(driver, "fine", 20)
    derived: list[int] = []
    whole_runs = Derivation.runs

    def runs(events: Derivation, aggregates: Any, cts: int = 0) -> Any:
        derived.append(len(aggregates))
        return whole_runs(events, aggregates, cts)

    with patch.object(Derivation, "runs", runs):
        driver.db.append("e", events(range(20, 60)))
        driver.db.append("e", events(range(19, 59)))
    assert derived == [len(AGGREGATES), len(AGGREGATES) - 1, 1]
