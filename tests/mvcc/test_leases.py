"""R14, R15: open snapshots under a simulated clock, and what consolidation must keep for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kivi
from kivi.embedded.database import Database
from kivi.errors import InvalidArgument, ResourceExhausted, SnapshotTooOld, Unavailable
from kivi.mvcc.leases import Leases
from kivi.mvcc.watermark import Watermark
from kivi.runtime.settings import Settings
from kivi.store.facade import Store
from tests.golden.driver import EmbeddedDriver


class Simulated:
    """Leases on a watermark at 10, and a clock that only the test moves."""

    def __init__(self, max_leases: int = 100, lock: Any = None) -> None:
        self.now = 0.0
        lock = lock or threading.RLock()
        self.watermark = Watermark(10, lock)
        self.leases = Leases(
            self.watermark, lock, clock=lambda: self.now, ttl_s=60, ttl_max_s=3600, max_leases=max_leases
        )

    def advance(self, to: int) -> None:
        self.watermark.enter(to)
        self.watermark.finish(to)


def test_r15_a_lease_ends_at_its_limit_and_not_before() -> None:
    world = Simulated()
    lease = world.leases.open()
    world.now = 59.9
    world.leases.check(lease)
    world.now = 60
    with pytest.raises(SnapshotTooOld, match="time limit"):
        world.leases.check(lease)
    with pytest.raises(SnapshotTooOld):
        world.leases.find(lease.id)
    with pytest.raises(SnapshotTooOld):
        world.leases.renew(lease)
    assert len(world.leases) == 0


def test_r15_renewing_extends_and_never_shortens() -> None:
    world = Simulated()
    lease = world.leases.open(ttl_s=600)
    world.now = 50
    world.leases.renew(lease)  # 60 s from now would be sooner than what it has
    world.now = 599
    world.leases.check(lease)
    world.leases.renew(lease)
    world.now = 658
    world.leases.check(lease)
    for wrong in (0, -1, 3601):
        with pytest.raises(InvalidArgument):
            world.leases.renew(lease, wrong)


def test_r15_a_snapshot_idle_for_an_hour_keeps_nothing() -> None:
    """Nobody asked for it in that time: the limit alone must end it."""
    world = Simulated()
    world.leases.open()
    world.advance(20)
    assert world.leases.boundaries() == (20, [10])
    world.now = 3600
    assert world.leases.boundaries() == (20, [])
    assert world.leases.oldest() is None


def test_snapshots_of_other_nodes_are_kept_as_if_they_had_been_opened_here() -> None:
    world, other = Simulated(), Simulated()
    other.advance(14)
    opened = other.leases.open(12)
    assert other.leases.told() == (14, [12])
    world.advance(20)
    world.leases.hold(14, {12})
    assert world.leases.boundaries() == (14, [12]), "the other one may open 14 or 15 next"
    assert world.leases.may_read(14, 15)
    assert not world.leases.may_read(13, 14)
    assert [world.leases.open(ts).historical for ts in (12, 13, 14, 15)] == [False, True, False, False]
    for lease in [*world.leases._open.values()]:
        if not lease.pinned:
            world.leases.release(lease)
    other.leases.release(opened)
    other.advance(18)
    world.leases.hold(*((told := other.leases.told())[0], set(told[1])))
    assert world.leases.boundaries() == (18, [])
    assert world.leases.oldest() == 18
    world.leases.has_no_room = lambda: True
    assert world.leases.boundaries() == (20, [])
    world.leases.hold(17, {17})
    assert world.leases.open(17).historical, "it was too late"
    world.leases.hold(None, set())
    assert world.leases.oldest() == 17


def test_r14_boundaries_are_the_open_snapshots_below_the_watermark() -> None:
    world = Simulated()
    first, second = world.leases.open(), world.leases.open()
    world.advance(12)
    third = world.leases.open()
    world.advance(15)
    assert world.leases.boundaries() == (15, [10, 12])
    world.leases.release(first)
    assert world.leases.boundaries() == (15, [10, 12])
    world.leases.release(second)
    assert world.leases.released_below_horizon
    assert world.leases.boundaries() == (15, [12])
    world.leases.release(third)
    world.leases.release(third)
    assert world.leases.boundaries() == (15, [])


def test_r14_registering_is_atomic_with_reading_the_watermark() -> None:
    """Whatever a boundary call leaves out has S at or above it: nobody is registered unnoticed below F."""
    world = Simulated()
    stop = threading.Event()
    wrong: list[str] = []

    def read() -> None:
        while not stop.is_set():
            lease = world.leases.open()
            upto, keep = world.leases.boundaries()
            if lease.ts < upto and lease.ts not in keep:
                wrong.append(f"{lease.ts} below {upto} is not in {keep}")
            if lease.historical:
                wrong.append(f"{lease.ts} was taken for a past timestamp")
            world.leases.release(lease)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for to in range(11, 600):
        world.advance(to)
        world.leases.boundaries()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


class Interrupted:
    """A lock; before it is taken ``meanwhile`` happens, once: the worst moment that a thread can be stopped at."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.meanwhile: Callable[[], object] | None = None

    def acquire(self, *args: Any) -> bool:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return self._lock.acquire(*args)

    def release(self) -> None:
        self._lock.release()

    def __getattr__(self, name: str) -> Any:  # what a Condition asks of its lock
        return getattr(self._lock, name)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_r14_whoever_begins_while_consolidation_takes_its_boundary_is_at_or_above_it() -> None:
    lock = Interrupted()
    world = Simulated(lock=lock)

    def meanwhile() -> None:
        world.advance(20)
        assert world.leases.boundaries() == (20, [])

    lock.meanwhile = meanwhile
    lease = world.leases.open()
    assert (lease.ts, lease.historical) == (20, False)


def test_a_past_timestamp_is_historical_unless_somebody_holds_it() -> None:
    world = Simulated()
    held = world.leases.open()
    world.advance(20)
    world.leases.boundaries()
    assert world.leases.open(as_of=5).historical
    assert not world.leases.open(as_of=10).historical
    assert not world.leases.open(as_of=20).historical
    world.leases.release(held)
    for wrong in (21, -1):
        with pytest.raises(InvalidArgument):
            world.leases.open(as_of=wrong)


def test_a_historical_lease_does_not_vouch_for_another_one() -> None:
    """Two leases on one past timestamp: the first one keeps nothing alive, so the second is historical too."""
    world = Simulated()
    world.advance(20)
    world.leases.boundaries()
    first = world.leases.open(as_of=15)
    assert first.historical
    assert world.leases.open(as_of=15).historical


def test_the_number_of_leases_is_bounded_and_expired_ones_make_room() -> None:
    world = Simulated(max_leases=3)
    for _ in range(3):
        world.leases.open()
    with pytest.raises(ResourceExhausted):
        world.leases.open()
    world.now = 60
    world.leases.open()
    assert len(world.leases) == 1


def test_r15_the_oldest_is_cut_and_only_if_it_costs_anything() -> None:
    world = Simulated()
    old, also_old = world.leases.open(), world.leases.open()
    assert not world.leases.cut_oldest("over budget")
    world.advance(20)
    young = world.leases.open()
    world.leases.boundaries()
    assert world.leases.cut_oldest("over budget")
    for lease in (old, also_old):
        with pytest.raises(SnapshotTooOld, match="over budget"):
            world.leases.check(lease)
    world.leases.check(young)
    assert world.leases.cut == 2
    assert not world.leases.cut_oldest("over budget")


# -- in a store ---------------------------------------------------------------------------------------


Make = Callable[..., EmbeddedDriver]


@pytest.fixture(name="make")
def _make() -> Iterator[Make]:
    made: list[EmbeddedDriver] = []

    def make(**settings: Any) -> EmbeddedDriver:
        driver = EmbeddedDriver(**settings)
        made.append(driver)
        driver.db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "s": "string"})
        return driver

    yield make
    for driver in made:
        driver.close()


def test_r15_an_ended_lease_refuses_reads_and_commits_blind_ones_too(make: Make) -> None:
    driver = make()
    snap, tx = driver.db.snapshot(), driver.db.transaction()
    tx.delta("t", (1,), n=1)
    driver.wait(61)
    with pytest.raises(SnapshotTooOld):
        snap.get("t", (1,))
    with pytest.raises(SnapshotTooOld):
        list(snap.scan("t"))
    before = driver.store.log.last
    with pytest.raises(SnapshotTooOld):
        tx.commit()
    assert driver.store.log.last == before
    assert driver.db.stats()["aborts_too_old"] == 1


@pytest.mark.parametrize("rows", [1, 1024, 3000])
def test_r15_a_scan_whose_lease_ends_on_the_way_never_ends_early(make: Make, rows: int) -> None:
    """The versions it would still have read are swept: what comes after must be an error, not silence."""
    driver = make()
    for i in range(rows):
        with driver.db.transaction() as tx:
            tx.put("t", (i,), s="old")
    snap = driver.db.snapshot()
    for i in range(rows):
        with driver.db.transaction() as tx:
            tx.put("t", (i,), s="new")
    driver.db.consolidate()
    scan = driver.store.reader.scan(snap._lease, driver.store.table("t"), None, None)
    taken = [next(scan) for _ in range(rows // 2)]
    driver.wait(61)
    for _ in range(2 * rows // 512 + 3):
        driver.store.consolidator.sweep()
    with pytest.raises(SnapshotTooOld):
        for pair in scan:
            taken.append(pair)
    assert all(version.cells[1] == "old" for _, version in taken)


def test_r15_readers_over_budget_are_cut_and_writers_go_on(make: Make) -> None:
    driver = make(version_budget_bytes=20_000)
    for i in range(50):
        with driver.db.transaction() as tx:
            tx.put("t", (i,), s="x" * 500)
    snap = driver.db.snapshot()
    for i in range(50):
        with driver.db.transaction() as tx:
            tx.put("t", (i,), s="y" * 500)
    driver.db.consolidate()
    assert driver.db.stats()["version_bytes"] > 20_000
    driver.store.consolidator.sweep()
    with pytest.raises(SnapshotTooOld, match="version_budget_bytes"):
        snap.get("t", (1,))
    with driver.db.transaction() as tx:
        tx.put("t", (1,), s="z")
    for _ in range(3):
        driver.store.consolidator.sweep()
    assert driver.db.stats()["version_bytes"] == 0


def test_r15_a_snapshot_from_before_a_restart_is_refused(make: Make) -> None:
    driver = make()
    store = driver.store
    lease = store.begin()
    driver.reopen()
    with pytest.raises(SnapshotTooOld):
        driver.store.renew(lease.id)
    with pytest.raises(Unavailable):
        store.get(lease, driver.store.table("t"), [(1,)])
    old = driver.store.begin(as_of_ts=lease.ts)
    with driver.db.transaction() as tx:
        tx.put("t", (1,), s="new")
    txn = driver.store.transaction(old)
    txn.put(driver.store.table("t"), (1,), {"s": "stale"})
    driver.db.consolidate()
    driver.store.release(old)
    with pytest.raises(SnapshotTooOld):
        driver.store.commit_wait(txn)


class Clocks:
    """A wall clock that somebody sets, and a monotonic one: in place of the module ``time`` where a store is opened."""

    def __init__(self) -> None:
        self.wall_s, self.monotonic_s = 1_700_000_000.0, 50.0
        self.time = lambda: self.wall_s
        self.monotonic = lambda: self.monotonic_s


@pytest.mark.parametrize("set_by_s", [-7 * 86_400, -30, 30, 7 * 86_400])
def test_r15_a_wall_clock_that_is_set_neither_cuts_nor_revives_a_lease(
    set_by_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks()
    monkeypatch.setattr("kivi.store.wiring.time", clocks)
    store = Store.open(None, settings=Settings(background=False, lease_ttl_s=60), clock=clocks.time)
    try:
        db = Database(store)
        db.create_table("t", key={"id": "int64"}, columns={"n": "int64"})
        snap, tx = db.snapshot(), db.transaction()
        tx.put("t", (1,), n=1)
        clocks.wall_s += set_by_s
        clocks.monotonic_s += 59
        assert list(snap.scan("t")) == []
        tx.commit()
        clocks.monotonic_s += 2
        clocks.wall_s -= set_by_s + 61  # back to when it was opened
        for _ in range(2):
            with pytest.raises(SnapshotTooOld, match="time limit"):
                list(snap.scan("t"))
            clocks.wall_s -= 3600
        assert store.stats()["leases"] == 0
    finally:
        store.close()


def test_r17_min_snapshot_waits_until_its_deadline_then_unavailable(make: Make) -> None:
    driver = make()
    store = driver.store
    tx = driver.db.transaction()
    tx.delta("t", (1,), n=1)
    store.committer.hold = lambda commit: True
    store.commit(tx._txn, done=lambda outcome: None)
    store.log.release()  # type: ignore[attr-defined]
    store.committer.hold = None
    (cts,) = store.committer.held
    with pytest.raises(Unavailable):
        store.begin(min_snapshot=cts, timeout_s=0.02)
    with pytest.raises(Unavailable):
        store.begin(min_snapshot=cts + 1000, timeout_s=0.02)  # nothing of that number is on its way yet
    threading.Timer(0.02, store.committer.finish_held, [cts]).start()
    assert store.begin(min_snapshot=cts, timeout_s=10).ts >= cts
