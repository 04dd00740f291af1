"""R2, R4, R5, R8: which pairs of concurrent operations on one row may both commit."""

from __future__ import annotations

from typing import Any

import pytest

import kivi
from kivi.delta.ops import Barrier, RowOp
from kivi.embedded.database import Database
from kivi.errors import Conflict, SnapshotTooOld
from kivi.log.memory import MemoryLog
from kivi.mvcc.verdict import EXISTENCE, Collision, Facts, Footprint, Guard
from kivi.runtime.settings import Settings
from kivi.store.facade import Store
from tests.golden.driver import EmbeddedDriver

# The table of R5, with its last sentence ("guard(E) conflicts with every concurrent write of the row") as a row and a
# column of their own. "-" may both commit, "X" conflict. It is symmetric: who enters first does not matter.
KINDS = ["delta(c)", "put(c)", "put(c')", "insert", "delete", "guard(c)", "guard(E)"]
TABLE = """
delta(c)   -  X  -  X  X  X  X
put(c)     X  X  -  X  X  X  X
put(c')    -  -  X  X  X  -  X
insert     X  X  X  X  X  X  X
delete     X  X  X  X  X  X  X
guard(c)   X  X  -  X  X  -  -
guard(E)   X  X  X  X  X  -  -
"""
EXPECTED = {
    (line.split()[0], column): mark == "X"
    for line in TABLE.strip().splitlines()
    for column, mark in zip(KINDS, line.split()[1:], strict=True)
}
T, KEY, C, OTHER = 16, b"key", 0, 1


def footprint(kind: str, start: int) -> Footprint:
    rows = {
        "delta(c)": RowOp(Barrier.PATCH, {}, {C: 1}),
        "put(c)": RowOp(Barrier.PATCH, {C: 1}, {}),
        "put(c')": RowOp(Barrier.PATCH, {OTHER: 1}, {}),
        "insert": RowOp(Barrier.RESTART, {OTHER: 1}, {}),
        "delete": RowOp(Barrier.DELETE, {}, {}),
    }
    guards = {"guard(c)": Guard(T, KEY, C), "guard(E)": Guard(T, KEY, EXISTENCE)}
    return Footprint(start, [(T, KEY, rows[kind])] if kind in rows else [], [guards[kind]] if kind in guards else [])


def no_aggregate(table: int, key: bytes) -> int | None:
    return None


def facts(floor: int = 0, *, entries: int = 1000, window_us: int = 10**9) -> Facts:
    return Facts(floor, window_us=window_us, entries=entries)


def test_the_table_is_symmetric() -> None:
    assert len(EXPECTED) == 49
    assert all(EXPECTED[a, b] == EXPECTED[b, a] for a, b in EXPECTED)


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_r5_pair_in_the_facts(first: str, second: str) -> None:
    known = facts()
    known.note(footprint(first, 0), 1, 0)
    hit = known.check(footprint(second, 0), no_aggregate)
    assert (hit is not None) == EXPECTED[first, second]
    if hit is not None:
        assert (hit.table, hit.key, hit.commit_ts) == (T, KEY, 1)
    assert known.check(footprint(second, 1), no_aggregate) is None, "it began after the first: not concurrent"


@pytest.fixture(scope="module")
def driver() -> Any:
    made = EmbeddedDriver()
    made.db.create_table("t", key={"id": "int64"}, columns={"c": kivi.sum("int64"), "d": "int64"})
    yield made
    made.close()


def act(tx: Any, kind: str, key: tuple[int]) -> None:
    match kind:
        case "delta(c)":
            tx.delta("t", key, c=1)
        case "put(c)":
            tx.put("t", key, c=1)
        case "put(c')":
            tx.put("t", key, d=1)
        case "insert":
            tx.insert("t", key, d=1)
        case "delete":
            tx.delete("t", key)
        case "guard(c)":
            tx.guard("t", key, "c")
        case "guard(E)":
            tx.guard("t", key)


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_r5_pair_in_the_store(driver: EmbeddedDriver, first: str, second: str) -> None:
    """Through the public interface; on an absent row, since guards and deltas work there too."""
    key = (KINDS.index(first) * 10 + KINDS.index(second),)
    one, two = driver.db.transaction(), driver.db.transaction()
    assert one.start_ts == two.start_ts
    act(one, first, key)
    act(two, second, key)
    winner = one.commit()
    if not EXPECTED[first, second]:
        assert two.commit() > winner
        return
    with pytest.raises(Conflict) as caught:
        two.commit()
    error = caught.value
    assert (error.table, error.key, error.start_ts, error.commit_ts) == ("t", key, two.start_ts, winner)


def test_r2_a_commit_in_flight_counts(driver: EmbeddedDriver) -> None:
    """The conflict names no commit timestamp while the winner is in flight."""
    store, key = driver.store, (1000,)
    one, two = driver.db.transaction(), driver.db.transaction()
    one.put("t", key, d=1)
    two.put("t", key, d=2)
    done: list[Any] = []
    store.committer.hold = lambda commit: True
    assert one._txn is not None
    store.commit(one._txn, done=done.append)
    store.log.release()  # type: ignore[attr-defined]
    store.committer.hold = None
    with pytest.raises(Conflict) as caught:
        two.commit()
    assert caught.value.commit_ts is None
    assert done == []
    store.committer.finish_held(store.committer.held[0])
    assert done[0].commit_ts is not None


def test_r4_both_orders_on_different_rows_commute() -> None:
    known = facts()
    known.note(footprint("delete", 0), 1, 0)
    other = Footprint(0, [(T, b"other", RowOp(Barrier.DELETE, {}, {}))], [])
    assert known.check(other, no_aggregate) is None
    elsewhere = Footprint(0, [(T + 1, KEY, RowOp(Barrier.DELETE, {}, {}))], [])
    assert known.check(elsewhere, no_aggregate) is None


def test_the_verdict_is_a_function_of_the_records() -> None:
    """Two replicas that note the same records give the same verdict, and rotate at the same record."""
    replicas = [facts(entries=4), facts(entries=4)]
    for cts in range(1, 40):
        kind = KINDS[cts * 5 % 7]
        verdicts = [known.check(footprint(kind, cts - 2), no_aggregate) for known in replicas]
        assert verdicts[0] == verdicts[1]
        for known in replicas:
            known.note(footprint(kind, cts - 2), cts, cts * 10)
        assert replicas[0].floor == replicas[1].floor


def test_r15_below_the_floor_nothing_can_be_judged() -> None:
    """Facts are dropped by number and by age; the floor says below which snapshot nothing is known any more."""
    known = facts(entries=4)
    for cts in range(1, 8):
        known.note(Footprint(0, [(T, b"%d" % cts, RowOp(Barrier.DELETE, {}, {}))], []), cts, 0)
    assert 0 < known.floor < 7
    assert len(known) <= 4
    aged = facts(window_us=100)
    for cts in range(1, 5):
        aged.note(footprint("put(c)", 0), cts, cts * 60)
    assert aged.floor > 0
    for start in range(aged.floor, 4):
        assert aged.check(footprint("put(c)", start), no_aggregate) is not None


# -- how long facts are kept ------------------------------------------------------------------------------

WINDOW_US = 1_000


def put_of(cts: int, start: int) -> Footprint:
    """A put of the row that only the commit at ``cts`` writes."""
    return Footprint(start, [(T, b"%d" % cts, RowOp(Barrier.PATCH, {C: 1}, {}))], [])


@pytest.mark.parametrize("gap_us", [1, 7, 99, 499, 500, 999, 1_000, 1_001])
@pytest.mark.parametrize("start_us", [0, 10**15])
def test_r15_facts_live_for_their_window_and_not_for_ever(gap_us: int, start_us: int) -> None:
    """Whenever a transaction began, it can be judged, and rightly, at every commit until its window is over."""
    known = facts(window_us=WINDOW_US, entries=10**6)
    time_of = {cts: start_us + cts * gap_us for cts in range(1, 5 * WINDOW_US // gap_us + 5)}
    oldest = forgotten = 1
    for now, now_us in time_of.items():
        known.note(put_of(now, now - 1), now, now_us)
        while now_us - time_of[oldest] > WINDOW_US:
            oldest += 1
        for cts in {oldest, (oldest + now) // 2, now}:  # a transaction that began right before it, and overlaps it
            assert cts - 1 >= known.floor, f"began {now_us - time_of[cts]} us ago, and cannot be judged"
            assert known.check(put_of(cts, cts - 1), no_aggregate) == Collision(T, b"%d" % cts, C, cts)
        while now_us - time_of[forgotten + 1] > 2 * WINDOW_US + 2 * gap_us:
            forgotten += 1
        assert known.floor >= forgotten - 1
    assert len(known) < 2 * (WINDOW_US // gap_us + 2)


def test_r15_facts_rotate_by_the_times_of_their_records() -> None:
    """The same records at a tenth of the pace keep a tenth as many facts; how long the test takes has no part in it."""

    def floor(gap_us: int) -> int:
        known = facts(window_us=WINDOW_US)
        for cts in range(1, 101):
            known.note(put_of(cts, cts - 1), cts, 10**15 + cts * gap_us)
        return known.floor

    assert 75 <= floor(100) <= 90
    assert (floor(10), floor(0)) == (0, 0)


class Records:
    """A log's clock, and the store's: both moved by the test."""

    def __init__(self) -> None:
        self.now_us = 1_700_000_000_000_000
        self.log = MemoryLog(clock=lambda: self.now_us * 1_000)
        chosen = Settings(background=False, conflict_window_s=300, lease_ttl_s=10_000)
        self.store = Store.open(None, settings=chosen, log=self.log, clock=lambda: self.now_us / 1e6)
        self.db = Database(self.store)
        self.db.create_table("t", key={"id": "int64"}, columns={"c": kivi.sum("int64"), "d": "int64"})

    def put(self, key: int) -> int:
        with self.db.transaction() as tx:
            tx.put("t", (key,), d=1)
        return int(tx.commit_ts or 0)

    def commits_for(self, seconds: float) -> None:
        """A commit every 7 s, of rows that nobody else writes."""
        end_us = self.now_us + int(seconds * 1_000_000)
        while self.now_us + 7_000_000 < end_us:
            self.now_us += 7_000_000
            self.put(self.now_us)
        self.now_us = end_us


@pytest.fixture(name="records")
def _records() -> Any:
    made = Records()
    yield made
    made.store.close()


@pytest.mark.parametrize("before_s", [0, 1, 100, 299, 300, 301, 450])
def test_r15_a_transaction_just_within_the_window_commits_or_conflicts(records: Records, before_s: int) -> None:
    """conflict_window_s says how long a transaction may be open, wherever in a generation of facts it began."""
    records.commits_for(before_s)
    blind, first, late = (records.db.transaction() for _ in range(3))
    blind.put("t", (1,), d=1)
    first.put("t", (2,), d=1)
    late.put("t", (3,), d=1)
    records.now_us += 1
    winner = records.put(2)
    records.commits_for(299.9)
    blind.commit()
    with pytest.raises(Conflict) as caught:
        first.commit()
    assert (caught.value.key, caught.value.commit_ts) == ((2,), winner)
    records.commits_for(2 * 300 + 20)
    before = records.log.last
    with pytest.raises(SnapshotTooOld, match="conflicts are only known from"):
        late.commit()
    assert records.log.last == before
    with records.db.snapshot() as snap:
        assert snap.get("t", (3,)) is None


def test_r15_a_blind_write_from_below_the_floor_is_refused() -> None:
    """The store says SNAPSHOT_TOO_OLD, never a guess: also for a delta that would conflict with nothing."""
    driver = EmbeddedDriver(conflict_entries=8)
    try:
        driver.db.create_table("t", key={"id": "int64"}, columns={"c": kivi.sum("int64")})
        old = driver.db.transaction()
        old.delta("t", (1,), c=1)
        for i in range(20):
            with driver.db.transaction() as tx:
                tx.delta("t", (100 + i,), c=1)
        before = driver.store.log.last
        with pytest.raises(SnapshotTooOld):
            old.commit()
        assert driver.store.log.last == before
        with driver.db.snapshot() as snap:
            assert snap.get("t", (1,)) is None
    finally:
        driver.close()


@pytest.mark.parametrize("events", [1, 100])
@pytest.mark.parametrize("column", [None, "total"])
def test_r8_a_guard_on_an_aggregate_conflicts_with_appends(events: int, column: str | None) -> None:
    """In both orders, for small appends and for bulk ones; other rows of the aggregate are not touched."""
    driver = EmbeddedDriver()
    try:
        db: Database = driver.db
        db.create_event_table("e", event_time="ts", columns={"a": "int64", "ts": "timestamp", "x": "int64"})
        db.create_aggregate("agg", source="e", group_by=["a"], measures={"total": kivi.sum("x")})
        batch = [{"a": 1 + i % 2, "ts": 0, "x": 1} for i in range(events)]
        one, two, three = db.transaction(), db.transaction(), db.transaction()
        one.guard("agg", (1,), column)
        two.append("e", batch)
        three.guard("agg", (7,), column)
        one.commit()
        with pytest.raises(Conflict) as caught:
            two.commit()
        assert (caught.value.table, caught.value.key) == ("agg", (1,))
        three.commit()
        one, two = db.transaction(), db.transaction()
        one.append("e", batch)
        two.guard("agg", (1,), column)
        one.commit()
        with pytest.raises(Conflict):
            two.commit()
    finally:
        driver.close()


def test_a_collision_says_where() -> None:
    known = facts()
    known.note(footprint("put(c)", 0), 5, 0)
    assert known.check(footprint("delta(c)", 4), no_aggregate) == Collision(T, KEY, C, 5)
    assert known.check(footprint("delete", 4), no_aggregate) == Collision(T, KEY, None, 5)
