"""Aggregates that the store keeps: R1, R3, R7, R10 for derived deltas, backfill, schema changes, stages."""

from __future__ import annotations

import datetime as dt
import itertools
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kivi
from kivi.delta.combine import Combining
from kivi.errors import AlreadyExists, Conflict, InvalidArgument, NotFound, ResourceExhausted, SchemaError
from kivi.model.declarations import aggregate_schema
from kivi.model.types import INT64_MAX, INT64_MIN
from kivi.store import backfill
from kivi.store.catalog import TABLES
from kivi.store.staging import Staging
from kivi.store.tables import Tables
from tests.golden.driver import EmbeddedDriver
from tests.mvcc.holding import hold
from tests.waiting import wait_until

EVENT = {
    "customer": "string",
    "endpoint": "int64",
    "ts": "timestamp",
    "resp": "int64",
    "load": "float64",
    "cost": "decimal(12,2)",
}
FIVE_MINUTES_US = 300_000_000


@pytest.fixture(name="driver", params=["memory", "disk"])
def _driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedDriver]:
    path = str(tmp_path / "store") if request.param == "disk" else None
    driver = EmbeddedDriver(path, block_rows=256, consolidate_rows=8)
    driver.db.create_event_table("inv", event_time="ts", columns=EVENT)
    yield driver
    driver.close()


def aggregates(db: Any) -> None:
    db.create_aggregate(
        "by_endpoint",
        source="inv",
        group_by=["endpoint", kivi.time_slot("ts", "5m", name="slot")],
        measures={
            "total": kivi.sum("resp"),
            "calls": kivi.count(),
            "slowest": kivi.max("resp"),
            "fastest": kivi.min("resp"),
            "load": kivi.sum("load"),
            "cost": kivi.sum("cost"),
            "known": kivi.count("resp"),
        },
        derived={"avg": "total / known"},
    )
    db.create_aggregate(
        "by_customer",
        source="inv",
        group_by=["customer"],
        measures={"total": kivi.sum("resp"), "calls": kivi.count(), "last": kivi.max("ts")},
    )


def event(rng: random.Random) -> dict[str, Any]:
    return {
        "customer": rng.choice(("acme", "globex", "")),
        "endpoint": rng.randrange(4),
        "ts": rng.randrange(3 * FIVE_MINUTES_US),
        "resp": rng.choice((None, rng.randrange(-1000, 1000))),
        "load": rng.choice((None, rng.randrange(100) / 4)),  # exact in any order
        "cost": rng.choice((None, Decimal(rng.randrange(10_000)) / 100)),
    }


def micros(moment: Any) -> int:
    return (moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)


def recount(events: list[dict[str, Any]]) -> dict[str, dict[Any, dict[str, Any]]]:
    """Both aggregates from the events, in plain Python."""
    groups: dict[str, dict[Any, list[dict[str, Any]]]] = {
        "by_endpoint": defaultdict(list),
        "by_customer": defaultdict(list),
    }
    for e in events:
        slot = micros(e["ts"]) // FIVE_MINUTES_US * FIVE_MINUTES_US
        groups["by_endpoint"][e["endpoint"], slot].append(e)
        groups["by_customer"][e["customer"]].append(e)
    out: dict[str, dict[Any, dict[str, Any]]] = {"by_endpoint": {}, "by_customer": {}}
    for key, group in groups["by_endpoint"].items():
        resp = [e["resp"] for e in group if e["resp"] is not None]
        out["by_endpoint"][key] = {
            "total": sum(resp),
            "calls": len(group),
            "slowest": max(resp, default=None),
            "fastest": min(resp, default=None),
            "load": sum((e["load"] for e in group if e["load"] is not None), 0.0),
            "cost": sum((e["cost"] for e in group if e["cost"] is not None), Decimal("0.00")),
            "known": len(resp),
            "avg": sum(resp) / len(resp) if resp else None,
        }
    for key, group in groups["by_customer"].items():
        resp = [e["resp"] for e in group if e["resp"] is not None]
        out["by_customer"][key] = {"total": sum(resp), "calls": len(group), "last": max(e["ts"] for e in group)}
    return out


def kept(reader: Any) -> dict[str, dict[Any, dict[str, Any]]]:
    out: dict[str, dict[Any, dict[str, Any]]] = {"by_endpoint": {}, "by_customer": {}}
    for row in reader.scan("by_endpoint"):
        out["by_endpoint"][row.pop("endpoint"), micros(row.pop("slot"))] = row
    for row in reader.scan("by_customer"):
        out["by_customer"][row.pop("customer")] = row
    return out


def agree(reader: Any) -> int:
    """All levels equal a recount of the events at this snapshot. The number of events."""
    events = list(reader.scan("inv"))
    assert kept(reader) == recount(events)
    return len(events)


# -- at every snapshot ------------------------------------------------------------------------------------


def test_r1_all_levels_agree_at_every_snapshot(driver: EmbeddedDriver) -> None:
    """Small appends and bulk ones, open snapshots, consolidation, restarts."""
    db, rng = driver.db, random.Random(7)
    aggregates(db)
    snapshots: list[tuple[Any, int]] = []
    appended = 0
    for i in range(40):
        count = rng.choice((1, 2, 31, 32, 33, 200))
        db.append("inv", [event(rng) for _ in range(count)])
        appended += count
        if i % 6 == 0:
            snapshots.append((db.snapshot(), appended))
        if i % 7 == 3:
            db.consolidate()
            driver.store.consolidator.compact()
            driver.store.consolidator.sweep()
        if i % 9 == 8:
            for snap, count in snapshots:
                assert agree(snap) == count
            snapshots.clear()
            (driver.crash if i % 2 else driver.reopen)()
            db = driver.db
        with db.snapshot() as snap:
            assert agree(snap) == appended


@pytest.mark.parametrize("ids", [[INT64_MIN, *range(300), INT64_MAX], [INT64_MIN, INT64_MAX], [0, 1, INT64_MAX]])
def test_r1_rows_by_the_ends_of_the_integers(tmp_path: Path, ids: list[int]) -> None:
    """Whoever uses an integer that means "none" or "all" as an id: what varies in the keys needs all of 64 bits."""
    path = str(tmp_path / "store")
    driver = EmbeddedDriver(path)
    driver.db.create_event_table("inv", event_time="ts", columns=EVENT)
    measures = {"total": kivi.sum("resp"), "calls": kivi.count()}
    for name, group_by in (("behind", ["cost", "endpoint"]), ("before", ["endpoint", "cost"])):
        driver.db.create_aggregate(name, source="inv", group_by=group_by, measures=measures)
    events = [{"customer": "acme", "endpoint": i, "ts": 1, "resp": 3, "load": None, "cost": 7} for i in ids]
    for _ in range(2):
        for _ in range(12):
            driver.db.append("inv", events)
        time.sleep(0.3)  # some are combined meanwhile, and the others by who reads or opens
        with driver.db.snapshot() as snapshot:
            found = [[(r["endpoint"], r["total"], r["calls"]) for r in snapshot.scan(n)] for n in ("behind", "before")]
        driver.close()
        driver = EmbeddedDriver(path)
    driver.db.consolidate()
    assert found == [[(i, 3 * 24, 24) for i in sorted(ids)]] * 2
    driver.close()


def test_r3_threads_that_append_never_conflict(driver: EmbeddedDriver) -> None:
    aggregates(driver.db)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(15):
            driver.db.append("inv", [event(rng) for _ in range(rng.choice((1, 5, 60)))])

    run_threads([partial(work, seed) for seed in range(6)])
    assert driver.db.stats()["aborts_conflict"] == 0
    driver.db.consolidate()
    with driver.db.snapshot() as snap:
        agree(snap)


def run_threads(calls: list[Callable[[], None]]) -> None:
    failures: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_r7_own_appends_read_back_inside_the_transaction(driver: EmbeddedDriver) -> None:
    """Derived deltas included, small and bulk; nobody else sees them."""
    db, rng = driver.db, random.Random(3)
    aggregates(db)
    db.append("inv", [event(rng) for _ in range(10)])
    with db.transaction() as tx:
        total = 10
        for count in (1, 20, 100):
            tx.append("inv", [event(rng) for _ in range(count)])
            total += count
            assert agree(tx) == total
            one = next(iter(tx.scan("by_customer")))
            assert tx.get("by_customer", (one["customer"],)) == one
            with db.snapshot() as snap:
                assert agree(snap) == 10
        tx.rollback()
    with db.snapshot() as snap:
        assert agree(snap) == 10


def test_r10_an_aggregate_sum_that_outgrows_its_column_recovers(driver: EmbeddedDriver) -> None:
    aggregates(driver.db)
    big = 2**63 - 1
    base = {"customer": "acme", "endpoint": 1, "ts": 0, "load": None, "cost": None}
    driver.db.append("inv", [{**base, "resp": big}] * 3)
    for step in (lambda: None, lambda: driver.db.consolidate(), lambda: driver.crash()):
        step()
        with driver.db.snapshot() as snap:
            with pytest.raises(kivi.OutOfRange):
                snap.get("by_customer", ("acme",))
            assert snap.get("by_customer", ("acme",), columns=["calls"]) == {"calls": 3}
    driver.db.append("inv", [{**base, "resp": -big}] * 50)
    driver.db.append("inv", [{**base, "resp": big}] * 48)
    with driver.db.snapshot() as snap:
        assert snap.get("by_customer", ("acme",), columns=["total"]) == {"total": big}


# -- creating one on a table with data ------------------------------------------------------------------------


def test_backfill_is_exact_while_writers_append(driver: EmbeddedDriver) -> None:
    """No write lock, nothing lost or counted twice; until it is complete it cannot be read."""
    db = driver.db
    rng = random.Random(1)
    for _ in range(10):
        db.append("inv", [event(rng) for _ in range(120)])
    db.consolidate()
    stop = threading.Event()
    appended = [0] * 4

    def write(number: int) -> None:
        mine = random.Random(number)
        while not stop.is_set():
            db.append("inv", [event(mine) for _ in range(mine.choice((1, 3, 50)))])
            appended[number] += 1

    def consolidate() -> None:
        while not stop.is_set():
            db.consolidate()
            driver.store.consolidator.compact()
            time.sleep(0.005)

    def create() -> None:
        try:
            wait_until(lambda: min(appended) >= 3, 60)
            aggregates(db)
            before = sum(appended)
            wait_until(lambda: sum(appended) >= before + 8, 60)
        finally:
            stop.set()

    run_threads([create, consolidate, *(partial(write, number) for number in range(4))])
    for step in (lambda: None, lambda: driver.db.consolidate(), lambda: driver.crash()):
        step()
        with driver.db.snapshot() as snap:
            assert agree(snap) > 1200
    assert driver.db.stats()["aborts_conflict"] == 0


class Dead(BaseException):
    """The process died here."""


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_a_crash_during_backfill(driver: EmbeddedDriver, chunk: int) -> None:
    """What it leaves is BUILDING and unreadable; opening builds it again, from its own start."""
    db, rng = driver.db, random.Random(2)
    for _ in range(5):
        db.append("inv", [event(rng) for _ in range(300)])  # a chunk each
        if rng.random() < 0.5:
            db.consolidate()
    chunks = []

    def progress(done: int, total: int) -> None:
        chunks.append((done, total))
        db.append("inv", [event(rng)])
        if len(chunks) == chunk:
            raise Dead

    def create(progress: Callable[[int, int], None] | None) -> None:
        measures = {"total": kivi.sum("resp"), "calls": kivi.count()}
        driver.db.create_aggregate("agg", source="inv", group_by=["customer"], measures=measures, progress=progress)

    with pytest.raises(Dead):
        create(progress)
    assert db.describe("agg")["state"] == "building"
    with db.snapshot() as snap, pytest.raises(NotFound, match="built"):
        list(snap.scan("agg"))
    driver.crash()
    resumed = driver.store._resumed
    assert resumed is not None
    resumed.join(60)
    driver.db.append("inv", [event(rng)])
    for step in (lambda: None, lambda: driver.db.consolidate(), lambda: driver.crash()):
        step()
        with driver.db.snapshot() as snap:
            found = {row["customer"]: (row["total"], row["calls"]) for row in snap.scan("agg")}
            expected = {
                key: (row["total"], row["calls"]) for key, row in recount(list(snap.scan("inv")))["by_customer"].items()
            }
            assert found == expected


def float_sums(events: list[dict[str, Any]], chunk_rows: list[int]) -> dict[str, float]:
    """What a backfill adds up, in plain Python: each chunk from 0.0, then the chunks, all from left to right."""
    out: dict[str, float] = {}
    at = 0
    for rows in chunk_rows:
        sums: dict[str, float] = {}
        for e in events[at : at + rows]:
            sums[e["customer"]] = sums.get(e["customer"], 0.0) + e["load"]
        for key, value in sums.items():
            out[key] = out.get(key, 0.0) + value
        at += rows
    assert at == len(events)
    return out


def test_backfill_stages_what_its_chunks_add_up_to_in_pieces(
    driver: EmbeddedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R10: one delta a row, whatever the number of chunks; floats strictly from left to right."""
    monkeypatch.setattr(backfill, "_PIECE_ROWS", 2)
    db, rng = driver.db, random.Random(8)
    sizes = [300, 1, 1, 299, 100, 100, 56, 256, 9]
    events = [{**event(rng), "load": rng.uniform(-1e9, 1e9), "endpoint": i % 7} for i in range(sum(sizes))]
    at = 0
    for i, size in enumerate(sizes):
        db.append("inv", events[at : at + size])
        at += size
        if i in (1, 4):
            db.consolidate()
    staged: list[int] = []
    log_stage = Staging.log_stage

    def counted(self: Staging, kind: Any, table: int, rows: int, *args: Any) -> None:
        staged.append(rows)
        log_stage(self, kind, table, rows, *args)

    monkeypatch.setattr(Staging, "log_stage", counted)
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))

    measures = {"load": kivi.sum("load"), "calls": kivi.count(), "slowest": kivi.max("resp")}
    for name, group_by in (("one", ["customer"]), ("two", ["customer", "endpoint"])):
        db.create_aggregate(name, source="inv", group_by=group_by, measures=measures, progress=progress)
    half = len(seen) // 2
    assert seen[:half] == seen[half:]
    assert seen[-1] == (len(events), len(events))
    chunks = [b - a for (a, _), (b, _) in itertools.pairwise([(0, 0), *seen[:half]])]
    assert len(chunks) >= 3 and min(chunks[:-1]) >= 256, "commits of a few events are gathered"
    assert staged == [2, 1] + [2] * 10 + [1], "3 and 21 rows, two to a piece"
    expected = float_sums(events, chunks)
    for step in (lambda: None, lambda: driver.crash(), lambda: driver.db.consolidate(), lambda: driver.reopen()):
        step()
        with driver.db.snapshot() as snap:
            assert {row["customer"]: row["load"] for row in snap.scan("one")} == expected
            assert sum(row["calls"] for row in snap.scan("two")) == len(events)
    assert driver.store.stages.live_bytes == 0


def test_r10_when_consolidation_ran_changes_no_bit_of_a_backfill(tmp_path: Path) -> None:
    found = set()
    for every in (1, 3, 7, 100):
        rng = random.Random(5)
        driver = EmbeddedDriver(str(tmp_path / f"every_{every}"), block_rows=256, consolidate_rows=8)
        db = driver.db
        db.create_event_table("ev", event_time="ts", columns={"ts": "timestamp", "who": "int64", "load": "float64"})
        for i in range(40):
            db.append("ev", [{"ts": 1, "who": n % 3, "load": rng.uniform(-1e9, 1e9)} for n in range(97)])
            if i % every == every - 1:
                db.consolidate()
        db.create_aggregate("sums", source="ev", group_by=["who"], measures={"load": kivi.sum("load")})
        with db.snapshot() as snap:
            found.add(tuple(row["load"] for row in snap.scan("sums")))
        driver.close()
    assert len(found) == 1


def test_backfill_holds_as_many_rows_as_the_aggregate_has(
    driver: EmbeddedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as many as the events: chunks that touch the same rows are combined before the next ones are summed."""
    monkeypatch.setattr(backfill, "_PIECE_ROWS", 4)
    held: list[int] = []
    add = Combining.add

    def noted(self: Combining, run: Any) -> None:
        add(self, run)
        held.append(sum(each.rows for each in self._runs))

    monkeypatch.setattr(Combining, "add", noted)
    rng = random.Random(9)
    for _ in range(12):
        driver.db.append("inv", [{**event(rng), "endpoint": rng.randrange(4)} for _ in range(256)])
    measures = {"calls": kivi.count()}
    driver.db.create_aggregate("agg", source="inv", group_by=["endpoint"], measures=measures)
    assert len(held) == 12
    assert max(held) <= 8


@pytest.mark.parametrize("error", [MemoryError, pa.ArrowInvalid, ZeroDivisionError])
@pytest.mark.parametrize("where", ["derive", "progress", "stage"])
def test_whatever_goes_wrong_in_a_backfill_leaves_no_aggregate(
    driver: EmbeddedDriver, monkeypatch: pytest.MonkeyPatch, error: type[Exception], where: str
) -> None:
    """Not BUILDING for ever, which nobody could read or create again."""
    db, rng = driver.db, random.Random(1)
    db.append("inv", [event(rng) for _ in range(300)])
    armed = True

    def fail(*_: Any, **__: Any) -> Any:
        raise error("no")

    def progress(done: int, total: int) -> None:
        if armed and where == "progress":
            fail()

    def create() -> None:
        measures = {"calls": kivi.count()}
        db.create_aggregate("agg", source="inv", group_by=["customer"], measures=measures, progress=progress)

    with monkeypatch.context() as patched:
        if where == "derive":
            patched.setattr(backfill, "derive_all", fail)
        elif where == "stage":
            patched.setattr(Staging, "log_stage", fail)
        with pytest.raises(error, match="no"):
            create()
    armed = False
    assert db.tables() == ["inv"]
    driver.crash()
    db = driver.db
    assert driver.store._resumed is None
    db.append("inv", [event(rng)])
    create()
    with db.snapshot() as snap:
        assert sum(row["calls"] for row in snap.scan("agg")) == 301


# -- what a backfill that goes on after a restart tells ---------------------------------------------------------


def left_building(driver: EmbeddedDriver, rng: random.Random) -> None:
    """The process died in the middle of creating an aggregate."""
    for _ in range(3):
        driver.db.append("inv", [event(rng) for _ in range(300)])

    def progress(done: int, total: int) -> None:
        raise Dead

    with pytest.raises(Dead):
        driver.db.create_aggregate(
            "agg", source="inv", group_by=["customer"], measures={"calls": kivi.count()}, progress=progress
        )


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "kivi.store"]


def test_a_backfill_that_goes_on_tells_the_log(
    driver: EmbeddedDriver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_building(driver, random.Random(3))
    for every_s, lines in ((1_000.0, 0), (0.0, 4)):
        caplog.clear()
        monkeypatch.setattr(backfill, "_TELL_EVERY_S", every_s)
        with monkeypatch.context() as patched, caplog.at_level("INFO", "kivi.store"):
            if lines == 0:
                patched.setattr(Tables, "redefine", _unavailable)
            driver.crash()
            assert driver.store._resumed is not None
            driver.store._resumed.join(60)
        first, *between, last = told(caplog)
        assert first == ("INFO", "aggregate 'agg' was left building: it is built again, from the beginning")
        assert between == [
            ("INFO", f"aggregate 'agg': {done} of 900 events are summed") for done in (256, 512, 768, 900)[:lines]
        ]
        if lines == 0:
            assert last[0] == "ERROR"
            assert "'agg' could not be built (no space): it stays building" in last[1]
            assert driver.db.describe("agg")["state"] == "building"
    assert last[0] == "INFO"
    assert last[1].startswith("aggregate 'agg' is complete: 900 events in ")
    assert driver.db.describe("agg")["state"] == "ready"


def _unavailable(*_: Any) -> Any:
    raise ResourceExhausted("no space")


def test_a_backfill_that_cannot_go_on_is_an_error_in_the_log(
    driver: EmbeddedDriver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_building(driver, random.Random(3))

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("no memory")

    with monkeypatch.context() as patched, caplog.at_level("INFO", "kivi.store"):
        patched.setattr(backfill, "derive_all", fail)
        driver.crash()
        assert driver.store._resumed is not None
        driver.store._resumed.join(60)
    assert [level for level, _ in told(caplog)] == ["INFO", "ERROR"]
    assert told(caplog)[1][1] == "aggregate 'agg' could not be built (no memory): it is dropped; create it again"
    assert driver.db.tables() == ["inv"]


def test_a_snapshot_from_before_the_aggregate_does_not_see_it(driver: EmbeddedDriver) -> None:
    db = driver.db
    db.append("inv", [event(random.Random(1))])
    before = db.snapshot()
    aggregates(db)
    with pytest.raises(NotFound):
        list(before.scan("by_customer"))
    with db.snapshot() as snap:
        agree(snap)


def test_backfill_of_events_that_cannot_be_grouped_leaves_no_aggregate(driver: EmbeddedDriver) -> None:
    """A null group key is a typed error: at the append if the aggregate is there, else at its creation."""
    db, rng = driver.db, random.Random(1)
    nameless = {**event(rng), "customer": None}
    db.append("inv", [event(rng), nameless])
    with pytest.raises(InvalidArgument):
        aggregates(db)
    assert "by_customer" not in db.tables()
    db.append("inv", [event(rng)])
    assert "by_endpoint" in db.tables()
    with db.snapshot() as snap:
        assert sum(row["calls"] for row in snap.scan("by_endpoint")) == 3


@pytest.mark.parametrize("count", [1, 100])
def test_a_null_group_key_is_refused_and_nothing_changes(driver: EmbeddedDriver, count: int) -> None:
    db, rng = driver.db, random.Random(1)
    aggregates(db)
    before = driver.store.log.last
    with pytest.raises(InvalidArgument):
        db.append("inv", [{**event(rng), "customer": None}] * count)
    assert driver.store.log.last == before
    with db.snapshot() as snap:
        assert agree(snap) == 0


# -- schema changes --------------------------------------------------------------------------------------------


def test_dropping_a_table_conflicts_with_its_writers(driver: EmbeddedDriver) -> None:
    db = driver.db
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    tx = db.transaction()
    tx.delta("t", (1,), n=1)
    blind = db.transaction()
    assert blind.start_ts == tx.start_ts
    db.drop("t")
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    with pytest.raises((Conflict, NotFound)) as caught:
        tx.commit()
    assert "t" in str(caught.value)
    with db.snapshot() as snap:
        assert list(snap.scan("t")) == []
    with pytest.raises(NotFound):
        blind.get("t", (1,))
    for step in (lambda: driver.db.consolidate(), lambda: driver.crash()):
        step()
        with driver.db.snapshot() as snap:
            assert list(snap.scan("t")) == []


def test_a_drop_waits_for_no_writer_and_loses_to_those_in_flight(driver: EmbeddedDriver) -> None:
    db = driver.db
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    tx = db.transaction()
    tx.delta("t", (1,), n=1)
    cts, outcomes = hold(driver.store, tx)
    thread = threading.Thread(target=db.drop, args=("t",))
    thread.start()
    time.sleep(0.05)
    driver.store.committer.finish_held(cts)
    thread.join(60)
    assert not thread.is_alive()
    assert outcomes[0].commit_ts == cts
    assert db.tables() == ["inv"]


def test_an_aggregate_that_is_dropped_while_its_backfill_commits_is_not_found(driver: EmbeddedDriver) -> None:
    """The drop is in the log and not yet applied: to readers it is there, to the commit it is gone."""
    db, committer = driver.db, driver.store.committer
    before, made = db.tables(), threading.Event()
    db.append("inv", [{"customer": "acme", "endpoint": 1, "ts": 1, "resp": 1, "load": 1.0, "cost": Decimal(1)}])

    def progress(done: int, total: int) -> None:
        if made.is_set():
            return
        made.set()
        committer.hold = lambda commit: any(table == TABLES.id for table, _, _ in commit.rows)
        dropping.start()
        wait_until(lambda: committer.held, pause_s=0.001)
        committer.hold = None
        later.start()

    def finish() -> None:
        for cts in list(committer.held):
            committer.finish_held(cts)

    dropping = threading.Thread(target=db.drop, args=("hourly",))
    later = threading.Timer(0.3, finish)
    with pytest.raises(NotFound, match="dropped meanwhile"):
        db.create_aggregate("hourly", "inv", ["customer"], {"n": kivi.count()}, progress=progress)
    dropping.join(60)
    later.join(60)
    assert db.tables() == before


def test_threads_that_create_one_name_make_one_table(driver: EmbeddedDriver) -> None:
    made: list[str] = []

    def create(number: int) -> None:
        try:
            driver.db.create_table("t", key={"id": "int64"}, columns={f"c{number}": "int64"})
            made.append(f"c{number}")
        except AlreadyExists:
            pass

    run_threads([partial(create, number) for number in range(6)])
    assert list(driver.db.describe("t")["columns"]) == made
    assert len(made) == 1


def test_an_aggregate_is_not_written_to_and_its_source_not_dropped(driver: EmbeddedDriver) -> None:
    db = driver.db
    aggregates(db)
    before = driver.store.log.last
    with db.transaction() as tx:
        for write in (
            lambda: tx.put("by_customer", ("acme",), total=1),
            lambda: tx.insert("by_customer", ("acme",), total=1),
            lambda: tx.delta("by_customer", ("acme",), total=1),
            lambda: tx.delete("by_customer", ("acme",)),
            lambda: tx.append("by_customer", []),
        ):
            with pytest.raises(InvalidArgument):
                write()
    with pytest.raises(InvalidArgument, match="by_endpoint"):
        db.drop("inv")
    assert driver.store.log.last == before
    db.drop("by_endpoint")
    db.drop("by_customer")
    db.drop("inv")
    assert db.tables() == []


def test_an_aggregate_dropped_while_writers_append(driver: EmbeddedDriver) -> None:
    """The other levels stay exact, and nobody is turned away."""
    db, rng = driver.db, random.Random(4)
    aggregates(db)
    tx = db.transaction()
    tx.append("inv", [event(rng) for _ in range(40)])
    db.drop("by_endpoint")
    tx.commit()
    db.append("inv", [event(rng)])
    for step in (lambda: None, lambda: driver.db.consolidate(), lambda: driver.crash()):
        step()
        with driver.db.snapshot() as snap:
            assert sum(row["calls"] for row in snap.scan("by_customer")) == 41


@pytest.mark.parametrize("wrong", ["source", "measure", "group", "operator"])
def test_an_aggregate_that_does_not_fit_its_source_is_refused(driver: EmbeddedDriver, wrong: str) -> None:
    before = driver.store.log.last
    column = {"measure": "nothing", "operator": "customer"}.get(wrong, "resp")
    with pytest.raises((SchemaError, NotFound, InvalidArgument)):
        driver.db.create_aggregate(
            "agg",
            source="nowhere" if wrong == "source" else "inv",
            group_by=["nothing" if wrong == "group" else "customer"],
            measures={"x": kivi.sum(column)},
        )
    assert driver.store.log.last == before
    assert driver.db.tables() == ["inv"]


# -- stages -----------------------------------------------------------------------------------------------------


def settle(driver: EmbeddedDriver) -> None:
    """Nobody waits for the record that drops a stage; a crash may take it, and the stage then expires later."""
    if driver._log is not None:
        driver._log.release()


def test_r16_staged_events_are_committed_once(driver: EmbeddedDriver) -> None:
    """Invisible until a commit names them; the same stage is not committed twice; it survives a crash before."""
    db, rng = driver.db, random.Random(5)
    aggregates(db)
    stages = [db.stage("inv", [event(rng) for _ in range(n)], owner="task") for n in (3, 80)]
    with db.snapshot() as snap:
        assert agree(snap) == 0
    driver.db.consolidate()
    driver.crash()
    db = driver.db
    with db.transaction(batch=("job", 0)) as tx:
        tx.append_stages("inv", stages)
        tx.append("inv", [event(rng)])
        assert agree(tx) == 84
    first = tx.commit_ts
    for step in (lambda: None, lambda: driver.db.consolidate(), lambda: driver.crash(), lambda: driver.reopen()):
        step()
        with driver.db.snapshot() as snap:
            assert agree(snap) == 84
        with pytest.raises(NotFound), driver.db.transaction() as tx:
            tx.append_stages("inv", stages[:1])
        again = driver.db.stage("inv", [event(rng)], owner="task, restarted")
        with driver.db.transaction(batch=("job", 0)) as tx:
            tx.append_stages("inv", [again])
        assert tx.commit_ts == first, "a repeat gets the first timestamp"
        assert driver.store.stages.live_bytes == 0, "and drops what it brought"
        settle(driver)


def test_two_commits_that_name_one_stage(driver: EmbeddedDriver) -> None:
    db, rng = driver.db, random.Random(5)
    aggregates(db)
    stage = db.stage("inv", [event(rng) for _ in range(50)])
    one, two = db.transaction(), db.transaction()
    one.append_stages("inv", [stage])
    two.append_stages("inv", [stage])
    one.commit()
    with pytest.raises(NotFound):
        two.commit()
    with pytest.raises(InvalidArgument), db.transaction() as tx:
        tx.append_stages("inv", [stage, stage])
    with db.snapshot() as snap:
        assert agree(snap) == 50


def test_a_stage_outlives_a_conflict(driver: EmbeddedDriver) -> None:
    db, rng = driver.db, random.Random(5)
    db.create_table("t", key={"id": "int64"}, columns={"v": "int64"})
    stage = db.stage("inv", [event(rng)])
    for attempt in range(2):
        tx = db.transaction()
        tx.append_stages("inv", [stage])
        tx.put("t", (1,), v=attempt)
        if attempt == 0:
            with db.transaction() as other:
                other.put("t", (1,), v=9)
            with pytest.raises(Conflict):
                tx.commit()
        else:
            tx.commit()
    with db.snapshot() as snap:
        assert len(list(snap.scan("inv"))) == 1


def test_stages_expire_and_their_log_can_be_dropped(driver: EmbeddedDriver) -> None:
    db, rng = driver.db, random.Random(5)
    stage = db.stage("inv", [event(rng)])
    kept_stage = db.stage("inv", [event(rng)])
    db.discard_stages([kept_stage])
    db.discard_stages([kept_stage])
    driver.wait(24 * 3600 + 60)
    for _ in range(25):
        driver.store.housekeeping.step()
    with pytest.raises(NotFound), db.transaction() as tx:
        tx.append_stages("inv", [stage])
    assert len(driver.store.stages) == 0
    settle(driver)
    driver.crash()
    assert len(driver.store.stages) == 0


def test_a_stage_that_is_waited_for_keeps_its_log(driver: EmbeddedDriver) -> None:
    """Base has passed it long ago; its data are only in the log."""
    db, rng = driver.db, random.Random(5)
    aggregates(db)
    stage = db.stage("inv", [event(rng) for _ in range(60)])
    for _ in range(5):
        db.append("inv", [event(rng)])
        db.consolidate()
        driver.store.consolidator.flush()
    driver.crash()
    with driver.db.transaction() as tx:
        tx.append_stages("inv", [stage])
    driver.crash()
    driver.db.consolidate()
    driver.store.consolidator.flush()
    driver.crash()
    with driver.db.snapshot() as snap:
        assert agree(snap) == 65


def test_stages_have_a_quota_and_strangers_are_not_stages(driver: EmbeddedDriver) -> None:
    db, rng = driver.db, random.Random(5)
    driver.store.stages._max_bytes = 10_000
    with pytest.raises(ResourceExhausted):
        for _ in range(10):
            db.stage("inv", [event(rng) for _ in range(100)])
    db.create_table("t", key={"id": "int64"}, columns={"v": "int64"})
    db.create_event_table("other", event_time="ts", columns=EVENT)
    stage = db.stage("inv", [event(rng)])
    for wrong in (b"", b"x" * 16, b"\x00" * 16, stage[:-1] + bytes([stage[-1] ^ 1])):
        with pytest.raises(NotFound), db.transaction() as tx:
            tx.append_stages("inv", [wrong])
    with pytest.raises(NotFound), db.transaction() as tx:
        tx.append_stages("other", [stage])
    with pytest.raises(InvalidArgument):
        db.stage("t", [{"v": 1}])


def test_an_arrow_table_is_appended_as_it_is(driver: EmbeddedDriver) -> None:
    db = driver.db
    aggregates(db)
    table = pa.table(
        {
            "resp": pa.array([1, 2, None] * 100, pa.int64()),
            "customer": pa.array(["acme", "globex", "acme"] * 100).dictionary_encode(),
            "endpoint": pa.array([1, 2, 3] * 100, pa.int32()),
            "ts": pa.array([0, 1, 2] * 100, pa.timestamp("ms", "UTC")),
            "load": pa.array([0.5, 0.25, 1.0] * 100, pa.float32()),
            "cost": pa.array([Decimal("1.25"), None, Decimal("0.01")] * 100, pa.decimal128(10, 2)),
        }
    )
    db.append("inv", table)
    db.append("inv", table.slice(5, 100))
    with db.snapshot() as snap:
        assert agree(snap) == 400
    assert aggregate_schema("x", driver.store.table("inv"), ["customer"], {"n": kivi.count()}).kind == "aggregate"
