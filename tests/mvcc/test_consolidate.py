"""R14: what consolidation keeps, what it sweeps, and that nobody can see when it ran. And the budget of pending."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest

import kivi
from kivi.delta.ops import Barrier, RowOp
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, space_prefix
from kivi.encoding.pretty import table_of
from kivi.engine import WriteBatch
from kivi.engine.memory import MemoryEngine
from kivi.errors import ResourceExhausted, SnapshotTooOld
from kivi.mvcc import folding
from kivi.mvcc.applied import Applied, PendingEvents
from kivi.mvcc.pending import Pending
from tests.golden.driver import EmbeddedDriver
from tests.mvcc.holding import hold

Make = Callable[..., EmbeddedDriver]


@pytest.fixture(name="make")
def _make() -> Iterator[Make]:
    made: list[EmbeddedDriver] = []

    def make(history: str | None = None, **settings: Any) -> EmbeddedDriver:
        driver = EmbeddedDriver(**settings)
        made.append(driver)
        columns: dict[str, Any] = {"n": kivi.sum("int64"), "f": kivi.sum("float64"), "s": "string"}
        driver.db.create_table("t", key={"id": "int64"}, columns=columns, history=history)
        return driver

    yield make
    for driver in made:
        driver.close()


def put(driver: EmbeddedDriver, key: int, **values: Any) -> int:
    with driver.db.transaction() as tx:
        tx.put("t", (key,), **values)
    return int(tx.commit_ts or 0)


def delete(driver: EmbeddedDriver, key: int) -> None:
    with driver.db.transaction() as tx:
        tx.delete("t", (key,))


def stored(driver: EmbeddedDriver, space: Space) -> int:
    prefix = space_prefix(space)
    table = driver.store.table("t").id
    return sum(table_of(key) == table for key, _ in driver.store.engine.scan(prefix, prefix_end(prefix)))


def cell(snap: Any, column: str, key: int = 1) -> Any:
    return snap.get("t", (key,))[column]


def fold(driver: EmbeddedDriver, sweeps: int = 3) -> None:
    driver.db.consolidate()
    driver.store.consolidator.flush()
    for _ in range(sweeps):
        driver.store.consolidator.sweep()


# -- versions and tombstones ----------------------------------------------------------------------------


def test_r14_one_version_per_boundary_that_somebody_needs(make: Make) -> None:
    """Of a hundred states the two open snapshots need two; with the snapshots goes the last of them."""
    driver = make()
    snaps = []
    for n in range(100):
        put(driver, 1, n=n)
        if n in (30, 60):
            snaps.append(driver.db.snapshot())
    fold(driver)
    assert stored(driver, Space.VERSION) == 2
    assert [cell(snap, "n") for snap in snaps] == [30, 60]
    snaps[0].close()
    fold(driver)
    assert stored(driver, Space.VERSION) == 1
    assert cell(snaps[1], "n") == 60
    snaps[1].close()
    fold(driver)
    assert stored(driver, Space.VERSION) == 0
    assert driver.db.stats()["version_bytes"] == 0


def test_r14_snapshots_between_the_same_two_states_share_a_version(make: Make) -> None:
    driver = make()
    put(driver, 1, n=1)
    put(driver, 2, n=1)
    snaps = []
    for n in range(5):
        put(driver, 2, n=n)
        snaps.append(driver.db.snapshot())
    put(driver, 1, n=2)
    put(driver, 2, n=9)
    fold(driver)
    assert stored(driver, Space.VERSION) == 1 + 5
    for n, snap in enumerate(snaps):
        assert [row["n"] for row in snap.scan("t")] == [1, n]


def test_r14_what_a_snapshot_reads_stays_while_another_node_is_behind_it(make: Make) -> None:
    """A node that comes back tells of a watermark below what was folded while it was away, and asks for no snapshot
    that is open here."""
    driver = make()
    behind = put(driver, 1, n=1)
    put(driver, 1, n=2)
    with driver.db.snapshot() as snap:
        put(driver, 1, n=3)
        fold(driver, sweeps=0)
        driver.store.leases.hold(behind, set())
        fold(driver)
        assert [row["n"] for row in snap.scan("t")] == [2] and cell(snap, "n") == 2
    driver.store.leases.hold(None, set())
    fold(driver)
    assert stored(driver, Space.VERSION) == 0


def test_r14_versions_are_swept_in_bounded_steps(make: Make) -> None:
    driver = make()
    for i in range(1500):
        put(driver, i, n=1)
    snap = driver.db.snapshot()
    for i in range(1500):
        put(driver, i, n=2)
    driver.db.consolidate()
    assert stored(driver, Space.VERSION) == 1500
    snap.close()
    left = [1500]
    for _ in range(6):
        driver.store.consolidator.sweep()
        left.append(stored(driver, Space.VERSION))
    assert left[-1] == 0
    assert all(before - after <= 600 for before, after in itertools.pairwise(left))


def test_r14_a_tombstone_waits_for_the_durable_position_and_for_readers(make: Make) -> None:
    driver = make()
    put(driver, 1, n=5)
    fold(driver)
    snap = driver.db.snapshot()
    delete(driver, 1)
    driver.db.consolidate()
    driver.store.consolidator.sweep()
    assert stored(driver, Space.ROW) == 1, "the position that includes the delete is not durable yet"
    driver.store.consolidator.flush()
    driver.store.consolidator.sweep()
    assert stored(driver, Space.ROW) == 1, "a reader from before is open"
    assert cell(snap, "n") == 5
    snap.close()
    driver.store.consolidator.sweep()
    assert (stored(driver, Space.ROW), stored(driver, Space.TOMBSTONE), stored(driver, Space.VERSION)) == (0, 0, 0)


def test_r14_a_dead_version_is_not_found_when_the_row_comes_back(make: Make) -> None:
    """A reader from between the delete and the new row must see no row."""
    driver = make()
    put(driver, 1, s="first life")
    old = driver.db.snapshot()
    delete(driver, 1)
    between = driver.db.snapshot()
    put(driver, 1, s="second life")
    for _ in range(3):
        fold(driver)
        assert cell(old, "s") == "first life"
        assert between.get("t", (1,)) is None
        assert list(between.scan("t")) == []
        put(driver, 1, s="second life")
    old.close()
    fold(driver)
    assert between.get("t", (1,)) is None


def test_r14_replay_after_a_swept_tombstone_does_not_bring_the_row_back(make: Make) -> None:
    """The engine loses its last batches; what replay finds must still be inert, or wholly gone."""
    for keep in range(12):
        driver = make()
        put(driver, 1, n=5)
        fold(driver)
        delete(driver, 1)
        put(driver, 2, n=1)
        driver.db.consolidate()
        driver.store.consolidator.flush()
        driver.store.consolidator.sweep()
        driver.store.crash()
        driver._engine.crash(keep)  # type: ignore[union-attr]
        driver._log.crash()  # type: ignore[union-attr]
        driver._open()
        with driver.db.snapshot() as snap:
            assert [row["id"] for row in snap.scan("t")] == [2]


def test_r14_history_keeps_every_version_for_its_time_and_no_longer(make: Make) -> None:
    driver = make(history="1h")
    stamps = [put(driver, 1, n=n) for n in range(10)]
    fold(driver)
    assert stored(driver, Space.VERSION) == 9
    for n, ts in enumerate(stamps):
        with driver.db.snapshot(as_of=ts) as snap:
            assert cell(snap, "n") == n
    driver.wait(3700)
    held = driver.db.snapshot(as_of=stamps[4])
    assert cell(held, "n") == 4
    fold(driver)
    assert cell(held, "n") == 4, "an open snapshot keeps what it reads"
    held.close()
    put(driver, 1, n=99)
    fold(driver)
    assert stored(driver, Space.VERSION) <= 1
    for restart in (lambda: None, driver.reopen, driver.crash):
        restart()
        for ts in stamps[:-1]:
            with driver.db.snapshot(as_of=ts) as snap:
                with pytest.raises(SnapshotTooOld):
                    snap.get("t", (1,))
                with pytest.raises(SnapshotTooOld):
                    list(snap.scan("t"))


def test_r14_what_a_history_keeps_is_looked_through_now_and_then_in_bounded_steps(make: Make) -> None:
    """Of one row, too. What is young cannot be garbage yet, and it may be most of what there is."""
    driver = make(history="1h")
    for n in range(1_200):
        put(driver, 1, n=n)
    driver.db.consolidate()
    driver.store.consolidator.flush()
    sweeper, looked = driver.store.consolidator.sweeper, 0
    scan = sweeper.engine.scan

    def counted(*bounds: Any, **how: Any) -> Iterator[tuple[bytes, bytes]]:
        nonlocal looked
        for key, value in scan(*bounds, **how):
            looked += key.startswith(space_prefix(Space.VERSION))
            yield key, value

    with patch.object(sweeper.engine, "scan", counted):
        steps = []
        for wait_s in (0, 0, 0, 0, 0, 100, 300, 0, 0):
            driver.wait(wait_s)
            looked = 0
            driver.store.consolidator.sweep()
            steps.append(looked)
    assert max(steps) <= 513, "a step begins where the last one ended, within a row"
    assert sum(steps[:6]) <= 1, "they are young, and passed over"
    assert sum(steps[6:]) >= 1_199, "a part of the history is over"
    assert stored(driver, Space.VERSION) == 1_199
    driver.wait(3_700)
    fold(driver, sweeps=4)
    assert stored(driver, Space.VERSION) == 0


def test_r15_a_swept_history_stays_swept_however_many_batches_a_crash_takes(make: Make) -> None:
    """Whatever prefix of the sweep is left: the old state is read exactly, or refused."""
    for keep in range(8):
        driver = make(history="1h")
        stamps = [put(driver, 1, n=n) for n in range(4)]
        driver.db.consolidate()
        driver.store.consolidator.flush()
        driver.wait(3700)
        put(driver, 1, n=99)
        driver.db.consolidate()
        delete(driver, 1)
        driver.db.consolidate()
        driver.store.consolidator.sweep()
        driver.store.crash()
        driver._engine.crash(keep)  # type: ignore[union-attr]
        driver._log.crash()  # type: ignore[union-attr]
        driver._open()
        for n, ts in enumerate(stamps):
            with driver.db.snapshot(as_of=ts) as snap:
                try:
                    assert cell(snap, "n") == n
                except SnapshotTooOld:
                    assert keep > 0


def test_r1_what_base_may_have_already_is_not_combined_with_what_came_later(make: Make) -> None:
    """A fold's rows are in base and its position is not: what is replayed is inert, unless it becomes part of a row
    with a later stamp (``mvcc.combine``)."""
    for keep in range(10):
        driver = make()
        driver.db.create_event_table("ev", event_time="ts", columns={"ts": "timestamp", "k": "int64"})
        driver.db.create_aggregate("sums", source="ev", group_by=["k"], measures={"n": kivi.count()})
        driver.store.consolidator.flush()
        driver.db.append("ev", [{"ts": 0, "k": k} for k in range(3)])
        driver.db.consolidate()
        driver.store.crash()
        driver._engine.crash(keep)  # type: ignore[union-attr]
        driver._log.crash()  # type: ignore[union-attr]
        driver._open()
        driver.db.append("ev", [{"ts": 0, "k": k} for k in range(3)])
        for step in (lambda: None, driver.store.consolidator.run_light, driver.db.consolidate):
            step()
            with driver.db.snapshot() as snap:
                assert [row["n"] for row in snap.scan("sums")] == [2, 2, 2], keep


@pytest.mark.parametrize("keep", [0, 5, 20, 1_000])
@pytest.mark.parametrize("every", [None, 1, 5])
def test_r14_what_comes_in_during_a_pass_is_combined_before_it_ends(
    make: Make, monkeypatch: pytest.MonkeyPatch, every: int | None, keep: int
) -> None:
    """Readers never have many runs to search; and whoever begins meanwhile, or after a crash, sees what was there.

    ``every``: a snapshot is begun after so many appends. ``keep``: so many of the engine's writes outlive the crash.
    """
    driver = make(consolidate_rows=4)
    db, store = driver.db, driver.store
    db.create_event_table("ev", event_time="ts", columns={"ts": "timestamp", "k": "int64"})
    db.create_aggregate("sums", source="ev", group_by=["k"], measures={"n": kivi.count()})
    table, choice = store.table("sums").id, random.Random(keep)
    counts: Counter[int] = Counter()
    seen: list[tuple[Any, Counter[int]]] = []
    runs: list[int] = []

    def append() -> None:
        keys = [choice.randrange(200) for _ in range(40)]
        db.append("ev", [{"ts": 0, "k": key} for key in keys])
        counts.update(keys)

    combine = store.consolidator._combine_meanwhile

    def meanwhile() -> None:
        append()
        if every and len(runs) % every == 0:
            seen.append((db.snapshot(), Counter(counts)))
        combine()
        runs.append(store.pending.runs_above(table, store.consolidator._whole_upto))

    monkeypatch.setattr(store.consolidator, "_combine_meanwhile", meanwhile)
    for _ in range(20):
        append()
    db.consolidate()
    assert len(runs) > 30
    if not every:
        assert max(runs) <= 20
    seen.append((db.snapshot(), Counter(counts)))
    for snap, expected in seen:
        assert {row["k"]: row["n"] for row in snap.scan("sums")} == expected
        snap.close()
    store.crash()
    driver._engine.crash(keep)  # type: ignore[union-attr]
    driver._log.crash()  # type: ignore[union-attr]
    driver._open()
    for step in (lambda: None, driver.store.consolidator.run_light, driver.db.consolidate):
        step()
        with driver.db.snapshot() as snap:
            assert {row["k"]: row["n"] for row in snap.scan("sums")} == counts


def test_r14_a_stalled_commit_stops_consolidation_below_it(make: Make) -> None:
    """CTS 5 stalls, 6..100 finish: consolidation stops at 4."""
    driver = make()
    for _ in range(4):
        before = put(driver, 1, n=1)
    tx = driver.db.transaction()
    tx.put("t", (2,), n=1)
    cts, _ = hold(driver.store, tx)
    assert cts == before + 1
    outcomes: list[Any] = []
    for i in range(95):
        other = driver.db.transaction()
        other.put("t", (3 + i,), n=1)
        assert other._txn is not None
        driver.store.commit(other._txn, done=outcomes.append)
    driver.store.log.release()  # type: ignore[attr-defined]
    assert driver.store.consolidate() == before
    assert driver.store.consolidator.position == before
    assert stored(driver, Space.ROW) == 1
    assert outcomes == []
    driver.store.committer.finish_held(cts)
    assert len(outcomes) == 95
    assert driver.store.consolidate() == cts + 95
    assert stored(driver, Space.ROW) == 97


def test_r10_when_consolidation_ran_changes_no_bit_of_a_float_sum(make: Make) -> None:
    """Float deltas fold strictly left to right in commit order."""
    drivers = [make(consolidate_rows=1), make(), make()]
    rng = random.Random(5)
    deltas = [rng.uniform(-1e6, 1e6) * 10 ** rng.randint(-12, 3) for _ in range(300)]
    expected = 0.0
    for i, delta in enumerate(deltas):
        expected += delta
        for driver in drivers:
            with driver.db.transaction() as tx:
                tx.delta("t", (1,), f=delta)
        drivers[0].db.consolidate()
        if i % 7 == 0:
            drivers[1].db.consolidate()
        if i % 50 == 0:
            drivers[1].crash()
    for driver in drivers:
        with driver.db.snapshot() as snap:
            assert cell(snap, "f") == expected


def test_r10_a_float_sum_that_leaves_the_finite_numbers(make: Make) -> None:
    driver = make()
    for _ in range(2):
        with driver.db.transaction() as tx:
            tx.delta("t", (1,), f=1.7e308, n=1)
    for step in (lambda: None, lambda: driver.db.consolidate(), lambda: driver.crash()):
        step()
        with driver.db.snapshot() as snap:
            with pytest.raises(kivi.OutOfRange):
                snap.get("t", (1,))
            assert snap.get("t", (1,), columns=["n"]) == {"n": 2}
    with driver.db.transaction() as tx:
        tx.put("t", (1,), f=1.0)
    with driver.db.snapshot() as snap:
        assert cell(snap, "f") == 1.0


# -- pending ----------------------------------------------------------------------------------------------


PATCH = RowOp(Barrier.PATCH, {0: 1}, {})


def applied(cts: int, *keys: bytes, events: Any = ()) -> Applied:
    found = [(table, PendingEvents(cts, cts, batch)) for table, batch in events]
    return Applied([(cts, 16, key, PATCH) for key in keys], found)


def test_pending_keeps_commit_order_whatever_order_commits_finish_in() -> None:
    pending = Pending()
    for cts in (5, 2, 9, 7):
        pending.apply(cts, applied(cts, b"k"))
    assert [cts for cts, _ in pending.ops(16, b"k", 100)] == [2, 5, 7, 9]
    assert [cts for cts, _ in pending.ops(16, b"k", 6)] == [2, 5]
    assert pending.newest(16, b"k") == 9
    rows, _ = pending.capture(16, None, None, 4)
    assert [key for key, _ in rows] == [b"k"]
    assert pending.capture(16, None, None, 1) == ([], ())


def test_pending_counts_down_to_nothing() -> None:
    pending = Pending()
    batch = pa.record_batch({"x": [1, 2, 3]})
    for cts in range(1, 6):
        pending.apply(cts, applied(cts, b"a", b"b", events=[(17, batch)]))
    assert pending.operations == 15
    pending.discard(3)
    pending.drop_rows(16, [b"a", b"b", b"absent"], 4)
    pending.drop_events(17, 4)
    assert [cts for cts, _ in pending.ops(16, b"a", 100)] == [5]
    pending.drop_table(16)
    pending.drop_table(99)
    pending.drop_events(17, 100)
    assert (pending.nbytes, pending.operations, pending.tables()) == (0, 0, [])


@pytest.mark.parametrize("events", [4, 4_000])
def test_pending_counts_a_group_that_is_dropped_in_parts_once(events: int) -> None:
    """Two halves of a batch may take more than the whole: what goes is what it took less what is left."""
    pending = Pending()
    batch = pa.record_batch({"x": [f"{i}" for i in range(events)]})
    group = PendingEvents(1, events, batch, np.arange(1, events + 1, dtype=np.uint64))
    pending.apply(events, Applied((), [(17, group)]))
    for upto in (2, events // 2 + 1, events):
        assert pending.nbytes > 0 and pending.operations == 1
        pending.drop_events(17, upto)
    assert (pending.nbytes, pending.operations, pending.tables()) == (0, 0, [])


def test_a_capture_is_not_changed_by_what_comes_later() -> None:
    pending = Pending()
    pending.apply(1, applied(1, b"a"))
    rows, _ = pending.capture(16, None, None, 10)
    ops = pending.ops(16, b"a", 10)
    pending.apply(2, applied(2, b"a", b"b"))
    pending.drop_rows(16, [b"a"], 2)
    assert [(key, [cts for cts, _ in found]) for key, found in rows] == [(b"a", [1])]
    assert [cts for cts, _ in ops] == [1]


def test_pending_is_bounded_writers_slow_down(make: Make) -> None:
    """At the hard limit a writer waits for consolidation, and goes on when there is room; memory does not grow."""
    driver = make(pending_soft_bytes=20_000, pending_hard_bytes=40_000)
    highest = 0
    stop = threading.Event()

    def consolidate() -> None:
        while not stop.is_set():
            driver.db.consolidate()
            time.sleep(0.02)

    thread = threading.Thread(target=consolidate)
    thread.start()
    for i in range(600):
        put(driver, i, n=1)
        highest = max(highest, int(driver.db.stats()["pending_bytes"]))
    stop.set()
    thread.join()
    assert highest < 45_000
    with driver.db.snapshot() as snap:
        assert len(list(snap.scan("t"))) == 600


def test_pending_over_its_limit_is_a_definite_refusal(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """If consolidation does not come, the writer is told that nothing was applied."""
    monkeypatch.setattr("kivi.mvcc.commit._ADMISSION_TIMEOUT_S", 0.05)
    driver = make(pending_soft_bytes=1_000, pending_hard_bytes=2_000)
    with pytest.raises(ResourceExhausted):
        for i in range(20):
            put(driver, i, n=1)
    before = driver.store.log.last
    with pytest.raises(ResourceExhausted):
        put(driver, 99, n=1)
    assert driver.store.log.last == before
    driver.db.consolidate()
    put(driver, 99, n=1)


def test_a_writer_waits_for_room_for_as_long_as_consolidation_gets_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a pass takes."""
    monkeypatch.setattr("kivi.mvcc.commit._ADMISSION_TIMEOUT_S", 0.8)  # for a step, on a busy machine too
    driver = make(pending_soft_bytes=1_000, pending_hard_bytes=2_000, consolidate_rows=1)
    with driver.db.transaction() as tx:
        for i in range(50):
            tx.put("t", (i,), n=1)
    assert driver.store.committer.is_full
    fetch = MemoryEngine.get_many

    def slow(engine: MemoryEngine, keys: Sequence[bytes]) -> list[bytes | None]:
        time.sleep(0.04)
        return fetch(engine, keys)

    monkeypatch.setattr(MemoryEngine, "get_many", slow)
    began = time.monotonic()
    consolidating = threading.Thread(target=driver.db.consolidate)
    consolidating.start()
    put(driver, 99, n=1)
    assert time.monotonic() - began > 0.8
    consolidating.join()
    with driver.db.snapshot() as snap:
        assert len(list(snap.scan("t"))) == 51


def test_a_long_reader_never_makes_writers_wait(make: Make) -> None:
    """R15: an hour-old snapshot costs versions in base, not pending memory."""
    driver = make(pending_soft_bytes=20_000, pending_hard_bytes=40_000)
    put(driver, 1, n=0)
    snap = driver.db.snapshot()
    for n in range(300):
        put(driver, 1, n=n)
        if n % 30 == 0:
            driver.db.consolidate()
    driver.db.consolidate()
    assert driver.db.stats()["pending_operations"] == 0
    assert cell(snap, "n") == 0
    assert stored(driver, Space.VERSION) == 1


def test_the_states_of_rows_with_history_are_written_in_portions(tmp_path: Any) -> None:
    """However many commits each row had: what is made of them, and written, at once has a bound."""
    sizes = list[int]()
    with kivi.open(tmp_path / "db", background=False) as db, patch.object(folding, "_STATES", 512):
        db.create_event_table("e", event_time="ts", columns={"k": "int64", "ts": "timestamp"})
        db.create_aggregate("a", source="e", group_by=["k"], measures={"n": kivi.count()}, history="1h")
        for _ in range(20):
            db.append("e", [{"k": k, "ts": 1} for k in range(500)])
        write = db.store.consolidator._folding.write

        def noted(batch: WriteBatch) -> None:
            sizes.append(len(list(batch)))
            write(batch)

        db.store.consolidator._folding.write = noted
        db.store.consolidate()
        with db.snapshot() as snapshot:
            assert [row["n"] for row in snapshot.scan("a")] == [20] * 500
    assert sum(sizes) >= 10_000 and max(sizes) <= 64 * 20
