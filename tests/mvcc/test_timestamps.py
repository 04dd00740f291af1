"""R13: timestamps never regress, whatever dies in between; and the timeline of ``as_of`` a moment."""

from __future__ import annotations

import datetime as dt
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kivi
from kivi.embedded.database import Database
from kivi.encoding.commit_times import MOMENTS_MAX, decode_moments
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, space_prefix, time_key
from kivi.engine import WriteBatch
from kivi.engine.memory import MemoryEngine
from kivi.errors import DataLoss, InvalidArgument, SnapshotTooOld
from kivi.log import Entry, Kind
from kivi.log.files import Files
from kivi.log.memory import MemoryLog
from kivi.mvcc.timeline import Timeline
from kivi.runtime.settings import Settings
from kivi.store.facade import Store
from tests.golden.driver import EmbeddedDriver
from tests.mvcc.holding import hold
from tests.waiting import wait_until


def table(driver: EmbeddedDriver, **options: Any) -> None:
    driver.db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "v": "int64"}, **options)


def add(driver: EmbeddedDriver) -> int:
    with driver.db.transaction() as tx:
        tx.delta("t", (1,), n=1)
    assert tx.commit_ts is not None
    return int(tx.commit_ts)


def test_r13_a_timestamp_that_was_in_flight_at_a_crash_is_not_handed_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is on the disk: the largest number there is not enough."""
    driver = EmbeddedDriver(str(tmp_path / "store"))
    table(driver)
    add(driver)
    writes = threading.Event()
    real = Files.pwritev

    def pwritev(self: Files, *args: Any) -> int:
        assert writes.wait(60)
        return real(self, *args)

    monkeypatch.setattr(Files, "pwritev", pwritev)
    tx = driver.db.transaction()
    tx.delta("t", (1,), n=1)
    assert tx._txn is not None
    driver.store.commit(tx._txn, done=lambda outcome: None)
    in_flight = driver.store.log.last
    shutil.copytree(tmp_path / "store", tmp_path / "crashed")
    writes.set()
    driver.close()
    crashed = EmbeddedDriver(str(tmp_path / "crashed"))
    with crashed.db.snapshot() as snap:
        assert snap.get("t", (1,)) == {"id": 1, "n": 1, "v": None}
    assert add(crashed) > in_flight
    crashed.close()


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("folded", [False, True])
def test_r13_an_aborted_timestamp_is_not_handed_out_again(where: str, folded: bool, tmp_path: Path) -> None:
    """CTS 7 aborts, a reader got S = 7, crash, restart: the next CTS is above it."""
    driver = EmbeddedDriver(str(tmp_path / "store") if where == "disk" else None)
    try:
        table(driver)
        highest = 0
        for _ in range(4):
            add(driver)
            tx = driver.db.transaction()
            tx.delta("t", (1,), n=1)
            cts, _ = hold(driver.store, tx)
            driver.store.committer.abort_held(cts)
            with driver.db.snapshot() as snap:
                assert snap.ts >= cts
                highest = max(highest, snap.ts)
            if folded:
                driver.db.consolidate()
                driver.store.consolidator.flush()
            driver.crash()
            with driver.db.snapshot() as snap:
                assert snap.ts >= highest
            assert add(driver) > highest
        with driver.db.snapshot() as snap:
            assert snap.get("t", (1,), columns=["n"]) == {"n": 8}
    finally:
        driver.close()


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_r13_restarts_of_every_kind(where: str, tmp_path: Path) -> None:
    driver = EmbeddedDriver(str(tmp_path / "store") if where == "disk" else None)
    try:
        table(driver)
        seen = [driver.db.watermark()]
        for round_ in range(12):
            seen.append(add(driver))
            if round_ % 3 == 0:
                driver.db.consolidate()
                driver.store.consolidator.flush()
            seen.append(driver.db.transaction().start_ts)
            (driver.reopen if round_ % 2 else driver.crash)()
            assert driver.db.watermark() >= max(seen)
            following = add(driver)
            assert following > max(seen)
            seen.append(following)
    finally:
        driver.close()


def test_r13_a_lost_record_does_not_give_its_number_away() -> None:
    """It was lost in the crash before anybody was told, but its owner may have been told its number by a conflict."""
    engine, log = MemoryEngine(), MemoryLog()
    store = Store.open(None, settings=Settings(background=False), engine=engine, log=log)
    store.close()
    log.hold = True
    store = Store.open(None, settings=Settings(background=False), engine=engine, log=log)
    ticket = log.append([Entry(Kind.FLOOR, [b"lost"])], lambda error: None)
    store.crash()
    engine.crash()
    log.hold = False
    log.crash(keep=0)
    again = log.append([Entry(Kind.FLOOR, [b"next"])], lambda error: None)
    assert again.first > ticket.last


def test_r12_unknown_freezes_the_watermark_until_the_restart() -> None:
    """A failed sync: the outcome is UNKNOWN, later commits are not acknowledged either, and the log decides."""
    engine, log = MemoryEngine(), MemoryLog()
    store = Store.open(None, settings=Settings(background=False, commit_timeout_s=5), engine=engine, log=log)
    db = Database(store)
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    before = store.watermark()
    log.hold = True
    tx = db.transaction(token="torn")
    tx.delta("t", (1,), n=1)
    outcomes: list[Any] = []
    assert tx._txn is not None
    store.commit(tx._txn, done=outcomes.append, token="torn")
    log.fail()
    wait_until(lambda: outcomes, pause_s=0.001)
    assert isinstance(outcomes[0].error, kivi.CommitUnknown)
    assert outcomes[0].error.token == "torn"
    assert store.watermark() == before
    again = db.transaction(token="torn")
    again.delta("t", (1,), n=1)
    with pytest.raises(kivi.CommitUnknown):
        again.commit()  # at once: nobody will ever tell
    assert db.outcome("torn") is kivi.UNKNOWN
    later = db.transaction()
    later.delta("t", (1,), n=1)
    with pytest.raises((kivi.Unavailable, kivi.CommitUnknown)):
        later.commit()
    assert store.consolidate() == before
    with db.snapshot() as snap:
        assert snap.ts == before
        assert snap.get("t", (1,)) is None
    store.crash()


# -- the timeline ---------------------------------------------------------------------------------------


def test_the_timeline_is_exact_while_it_is_in_memory() -> None:
    timeline = Timeline(MemoryEngine())
    for cts, time_us in ((5, 1_000_000), (6, 1_000_000), (9, 1_000_003), (12, 5_000_000)):
        timeline.note(cts, time_us)
    assert [timeline.at(t) for t in (1_000_000, 1_000_002, 1_000_003, 4_999_999, 5_000_000, 10**12)] == [
        6, 6, 9, 9, 12, 12
    ]  # fmt: skip
    with pytest.raises(SnapshotTooOld):
        timeline.at(999_999)


def save(timeline: Timeline, engine: MemoryEngine, upto: int) -> int:
    """What a pass does. How many rows it wrote."""
    batch = WriteBatch()
    for key, value in timeline.take(upto):
        batch.put(key, value)
    engine.write(batch)
    timeline.forget(upto)
    return len(batch)


def rows(engine: MemoryEngine) -> list[bytes]:
    prefix = space_prefix(Space.TIME)
    return [key for key, _ in engine.scan(prefix, prefix_end(prefix))]


def expected(commits: list[tuple[int, int]], time_us: int) -> int | None:
    """The model: the last commit at or before the moment."""
    return max((cts for cts, at in commits if at <= time_us), default=None)


def found(timeline: Timeline, time_us: int) -> int | None:
    try:
        return timeline.at(time_us)
    except SnapshotTooOld:
        return None


STEPS = st.tuples(
    st.integers(1, 3) | st.sampled_from([255, 256, 70_000]), st.sampled_from([0, 0, 1, 2, 300, 70_000, 2**33])
)


@given(
    st.lists(st.tuples(STEPS, st.sampled_from(["", "", "pass", "part", "reopen"])), max_size=60), st.integers(0, 2**50)
)
def test_a_moment_has_one_answer_wherever_its_commits_are(history: Any, start_us: int) -> None:
    """In memory, in rows of any size, and after a crash that loses what no pass has saved and replays it."""
    engine = MemoryEngine()
    timeline = Timeline(engine)
    commits: list[tuple[int, int]] = []
    cts, time_us, saved = 0, start_us, 0
    for (cts_step, time_step), then in history:
        cts, time_us = cts + cts_step, time_us + time_step
        commits.append((cts, time_us))
        timeline.note(cts, time_us)
        if then in ("pass", "part"):  # the watermark is at the last commit, or a few before it
            saved = max(saved, cts if then == "pass" else commits[max(0, len(commits) - 3)][0])
            save(timeline, engine, saved)
        elif then == "reopen":
            timeline = Timeline(engine)
            for replayed in commits:
                if replayed[0] > saved:
                    timeline.note(*replayed)
    for _, moment in commits:
        for asked in (moment - 1, moment, moment + 1):
            assert found(timeline, asked) == expected(commits, asked)
    for cts, moment in commits:
        if moment > commits[0][1]:  # of those in the first microsecond the last one is known, and maybe others
            assert timeline.time_of(cts) == moment
    in_engine = [moment for cts, moment in commits if cts <= saved]
    assert len({*in_engine}) <= timeline.check() <= len(in_engine)


def test_the_commit_time_of_an_old_snapshot_is_sought_and_not_read_up_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass writes a row, twenty times a second: of a day there are more than a million."""
    engine = MemoryEngine()
    timeline = Timeline(engine)
    commits = [(2 * i, 1_000_000 + 50_000 * i) for i in range(1, 4_001)]
    for cts, time_us in commits:
        timeline.note(cts, time_us)
        save(timeline, engine, cts)
    assert len(rows(engine)) == len(commits)
    decoded = list[int]()

    def counted(*row: bytes) -> Any:
        decoded.append(1)
        return decode_moments(*row)

    monkeypatch.setattr(f"{Timeline.__module__}.decode_moments", counted)
    for cts, time_us in [*random.Random(1).sample(commits, 40), commits[0], commits[-1]]:
        decoded.clear()
        assert timeline.time_of(cts) == time_us
        assert len(decoded) < 64
        assert timeline.time_of(cts - 1) in (time_us, None)  # of no commit: the next one's
    assert timeline.time_of(1) is None


def test_commits_of_one_microsecond_that_a_crash_parts() -> None:
    """Of two commits at one time the first was folded; the second was lost, or was not: nobody had been told of it."""
    for kept in (False, True):
        engine = MemoryEngine()
        timeline = Timeline(engine)
        timeline.note(5, 100)
        timeline.note(6, 100)
        save(timeline, engine, 5)
        timeline = Timeline(engine)
        if kept:
            timeline.note(6, 100)
            save(timeline, engine, 6)
        assert timeline.at(100) == (6 if kept else 5)
        assert len(rows(engine)) == 1


def test_a_moment_has_one_answer_while_passes_save_it() -> None:
    """What leaves memory between a reader's two looks is in the engine by then."""
    engine = MemoryEngine()
    timeline = Timeline(engine)
    last = 0
    stop = threading.Event()
    wrong: list[tuple[int, int]] = []

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            if last:
                asked = rng.randint(max(1, last - 40), last)
                if (answer := timeline.at(1_000 * asked + rng.randrange(1_000))) != asked:
                    wrong.append((asked, answer))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for cts in range(1, 6_001):
        timeline.note(cts, 1_000 * cts)
        last = cts - 1
        if cts % 3 == 0:
            save(timeline, engine, cts)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_row_of_commit_times_is_bounded() -> None:
    engine = MemoryEngine()
    timeline = Timeline(engine)
    commits = [(cts, 10**15 + 7 * cts) for cts in range(1, 3 * MOMENTS_MAX)]
    for commit in commits:
        timeline.note(*commit)
    assert save(timeline, engine, 10**9) == 3
    assert timeline.check() == len(commits)
    for cts, time_us in commits[:: MOMENTS_MAX // 16]:
        assert timeline.at(time_us) == cts
        assert found(timeline, time_us - 1) == (cts - 1 or None)


def test_what_is_trimmed_is_refused_and_the_rest_stays_exact() -> None:
    """The newest row before the limit stays: it answers for the moments from the limit to the next row."""
    engine = MemoryEngine()
    timeline = Timeline(engine)
    commits = [(cts, 1_000 * cts) for cts in range(1, 101)]
    for commit in commits:
        timeline.note(*commit)
        if commit[0] % 10 == 0:
            save(timeline, engine, commit[0])
    for limit_us in (55_500, 61_000, 70_999):
        while (batch := timeline.trim(limit_us, 2)) is not None:
            engine.write(batch)
        first_us = int.from_bytes(rows(engine)[0][1:], "big")
        assert first_us <= limit_us
        assert len(rows(engine)) == 10 - first_us // 10_000
        for asked in range(500, 101_000, 500):
            assert found(timeline, asked) == (expected(commits, asked) if asked >= first_us else None)
    assert timeline.trim(70_999, 2) is None


@pytest.mark.parametrize("value", [b"", (7).to_bytes(8, "little"), bytes(10), b"\1\1" + bytes(9), b"\3\1" + bytes(12)])
def test_commit_times_that_do_not_decode_are_data_loss_by_name(value: bytes) -> None:
    """Eight bytes are what another version wrote: never a timestamp by accident."""
    engine = MemoryEngine()
    batch = WriteBatch()
    batch.put(time_key(1_000), value)
    engine.write(batch)
    for call in (lambda: Timeline(engine).at(2_000), Timeline(engine).check):
        with pytest.raises(DataLoss, match="commit times"):
            call()


HOUR_US = 3_600_000_000


class Ticking:
    """A log's clock that only the test moves."""

    def __init__(self) -> None:
        self.us = time.time_ns() // 1_000 + 60_000_000  # the table was made before

    def __call__(self) -> int:
        return self.us * 1_000


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_as_of_a_moment_between_two_commits_is_after_precisely_the_first(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after restarts, crashes, consolidation and the trimming of what is older."""
    driver = EmbeddedDriver(str(tmp_path / "store") if where == "disk" else None)
    clock = Ticking()

    def tick() -> None:
        monkeypatch.setattr(driver.store.log, "_clock", clock)

    try:
        table(driver, history="1h")
        tick()
        commits: list[tuple[int, int]] = []
        for n in range(40):
            clock.us += 25 * HOUR_US if n == 20 else (1, 3, 1_000, 20_000)[n % 4]
            with driver.db.transaction() as tx:
                tx.put("t", (1,), v=n)
            commits.append((int(tx.commit_ts or 0), clock.us))
            if n in (11, 12, 25):
                driver.db.consolidate()
        moments = sorted({time_us + step for _, time_us in commits for step in (0, 1, 999)})
        driver.wait(clock.us / 1e6 - time.time() + 60)
        forgotten = 0
        fold = lambda: driver.db.consolidate()  # noqa: E731
        for restart in (lambda: None, driver.crash, fold, driver.reopen, driver.crash, fold, driver.reopen):
            restart()
            for _ in range(3):
                driver.store.consolidator.sweep()
            for moment in moments:
                cts = expected(commits, moment)
                try:
                    with driver.db.snapshot(as_of=_at(moment)) as snap:
                        assert snap.ts == cts
                        assert snap.get("t", (1,), columns=["v"]) == {"v": [c for c, _ in commits].index(snap.ts)}
                except SnapshotTooOld:
                    assert moment < commits[20][1] - HOUR_US, "the history of an hour is kept"
                    forgotten += 1
        assert forgotten, "what is older than the history is swept, and older than a day trimmed"
    finally:
        driver.close()


def _at(time_us: int) -> dt.datetime:
    return dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=time_us)


def test_as_of_a_moment_that_is_over_waits_for_the_commits_in_flight() -> None:
    """Without them the same question would have another answer a moment later."""
    driver = EmbeddedDriver()
    try:
        table(driver)
        before = add(driver)
        tx = driver.db.transaction()
        tx.delta("t", (1,), n=1)
        cts, _ = hold(driver.store, tx)
        time.sleep(0.002)
        moment = driver.store.committer.now_us() - 1
        with pytest.raises(kivi.Unavailable):
            driver.store.begin(as_of_us=moment, timeout_s=0.02)
        assert driver.store.begin(as_of_us=moment + 10**9, timeout_s=0.02).ts == before, (
            "what is yet to come: as of now"
        )
        threading.Timer(0.02, driver.store.committer.finish_held, [cts]).start()
        assert driver.store.begin(as_of_us=moment, timeout_s=10).ts == cts
    finally:
        driver.close()


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_as_of_a_moment(where: str, tmp_path: Path) -> None:
    driver = EmbeddedDriver(str(tmp_path / "store") if where == "disk" else None)
    try:
        table(driver, history="1h")
        moments = []
        for n in range(3):
            with driver.db.transaction() as tx:
                tx.put("t", (1,), v=n)
            time.sleep(0.03)
            moments.append(dt.datetime.now(dt.UTC))
            time.sleep(0.03)
        for restart in (lambda: None, driver.db.consolidate, driver.reopen, driver.crash):
            restart()
            for n, moment in enumerate(moments):
                with driver.db.snapshot(as_of=moment) as snap:
                    assert snap.get("t", (1,), columns=["v"]) == {"v": n}
        with driver.db.snapshot(as_of=dt.datetime.now(dt.UTC) + dt.timedelta(days=1)) as snap:
            assert snap.ts == driver.db.watermark()
        with pytest.raises(InvalidArgument):
            driver.db.snapshot(as_of=driver.db.watermark() + 1)
    finally:
        driver.close()
