"""R16: how a commit is recognised when it comes again."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kivi
from kivi.engine import WriteBatch
from kivi.engine.memory import MemoryEngine
from kivi.errors import InvalidArgument, OutOfSequence, SnapshotTooOld, Unavailable
from kivi.model.outcomes import ABORTED, UNKNOWN
from kivi.mvcc import consolidate
from kivi.mvcc.commit import Aborted
from kivi.mvcc.groups import Outcome
from kivi.mvcc.tokens import FENCED, Remembered, Tokens, issued_at_us
from tests.golden.driver import EmbeddedDriver
from tests.mvcc.holding import hold
from tests.waiting import wait_until

DAY_S = 24 * 3600


@pytest.fixture(name="driver", params=["memory", "disk"])
def _driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedDriver]:
    driver = EmbeddedDriver(str(tmp_path / "store") if request.param == "disk" else None)
    driver.db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "v": "int64"})
    yield driver
    driver.close()


def add(driver: EmbeddedDriver, amount: int = 1, **token: Any) -> int:
    tx = driver.db.transaction(**token)
    tx.delta("t", (1,), n=amount)
    commit_ts = tx.commit()
    assert isinstance(commit_ts, int)
    return commit_ts


def total(driver: EmbeddedDriver) -> int:
    with driver.db.snapshot() as snap:
        row = snap.get("t", (1,))
    return 0 if row is None else int(row["n"])


def test_r16_a_hundred_dropped_replies_add_one_exactly(driver: EmbeddedDriver) -> None:
    """Whatever happens between the attempts: nothing, other commits, consolidation, a restart, a crash."""
    stamps = set()
    for i in range(100):
        stamps.add(add(driver, token="the one"))
        match i % 20:
            case 3:
                add(driver, 0)
            case 7:
                driver.db.consolidate()
            case 11:
                driver.reopen()
            case 15:
                driver.crash()
    assert len(stamps) == 1
    assert total(driver) == 1
    assert driver.db.outcome("the one") == stamps.pop()
    assert driver.db.stats()["token_hits"] > 0


def test_r16_attempts_in_flight_at_once_share_one_commit(driver: EmbeddedDriver) -> None:
    store = driver.store

    def attempt() -> Any:
        tx = driver.db.transaction(token="together")
        tx.delta("t", (1,), n=1)
        return tx

    cts, outcomes = hold(store, attempt(), token="together")
    for _ in range(99):
        store.commit(attempt()._txn, done=outcomes.append, token="together")
    assert outcomes == []
    store.committer.finish_held(cts)
    assert len(outcomes) == 100
    assert len({outcome.commit_ts for outcome in outcomes}) == 1
    assert [outcome.repeated for outcome in outcomes].count(False) == 1
    assert total(driver) == 1


@pytest.mark.parametrize("token", [{"token": "again"}, {"batch": ("job", 0)}], ids=["request", "batch"])
def test_r17_a_repeat_is_not_acknowledged_before_the_watermark_is_there(driver: EmbeddedDriver, token: Any) -> None:
    """The first attempt is durable and applied, and stands above a commit in flight: nobody can read it yet."""
    store = driver.store
    stalled = driver.db.transaction()
    stalled.delta("t", (2,), n=1)
    below, _ = hold(store, stalled)
    tx = driver.db.transaction()
    tx.delta("t", (1,), n=1)
    cts, first = hold(store, tx, **token)
    store.committer.finish_held(cts)
    assert first == []
    again = driver.db.transaction()
    again.delta("t", (1,), n=1)
    second: list[Outcome] = []
    assert again._txn is not None
    store.commit(again._txn, done=second.append, **token)
    assert second == [], "R17: acknowledged, and a begin would not see it"
    store.committer.finish_held(below)
    assert [outcome.commit_ts for outcome in (*first, *second)] == [cts, cts]
    assert total(driver) == 1


def test_r16_another_payload_under_the_same_token_applies_nothing(driver: EmbeddedDriver) -> None:
    add(driver, token="mine")
    for forget in (lambda: None, lambda: driver.db.consolidate(), driver.crash):
        forget()
        before = driver.store.log.last
        with pytest.raises(InvalidArgument, match="another payload"):
            add(driver, 2, token="mine")
        assert driver.store.log.last == before
    assert total(driver) == 1


def test_r16_the_snapshot_is_no_part_of_the_payload(driver: EmbeddedDriver) -> None:
    first = add(driver, token="a")
    add(driver, 10)
    assert add(driver, token="a") == first
    assert total(driver) == 11


def test_r16_the_token_is_looked_up_before_the_lease_is_checked(driver: EmbeddedDriver) -> None:
    """A retry that comes late must learn that it had committed, not that its snapshot is too old."""
    first = add(driver, token="late")
    tx = driver.db.transaction(token="late")
    tx.delta("t", (1,), n=1)
    unnamed = driver.db.transaction()
    unnamed.delta("t", (1,), n=1)
    driver.wait(61)
    assert tx.commit() == first
    with pytest.raises(SnapshotTooOld):
        unnamed.commit()
    assert total(driver) == 1


def test_r16_a_refused_attempt_leaves_no_trace(driver: EmbeddedDriver) -> None:
    """A conflict before the record: the token is free, and the retry on a new snapshot commits."""
    tx = driver.db.transaction(token="retry")
    tx.put("t", (1,), v=1)
    add(driver)
    with driver.db.transaction() as other:
        other.put("t", (1,), v=2)
    with pytest.raises(kivi.Conflict):
        tx.commit()
    again = driver.db.transaction(token="retry")
    again.put("t", (1,), v=1)
    assert again.commit() == driver.db.outcome("retry")


# -- fencing ------------------------------------------------------------------------------------------


def test_r16_not_found_is_aborted_only_once_it_is_fenced(driver: EmbeddedDriver) -> None:
    tx = driver.db.transaction(token="slow")
    tx.delta("t", (1,), n=1)
    before = driver.store.log.last
    assert driver.db.outcome("slow") is ABORTED
    assert driver.store.log.last > before, "the fence is in the log"
    with pytest.raises(Aborted):
        tx.commit()
    for forget in (lambda: None, lambda: driver.db.consolidate(), driver.reopen, driver.crash):
        forget()
        with pytest.raises(Aborted):
            add(driver, token="slow")
        assert driver.db.outcome("slow") is ABORTED
    assert total(driver) == 0


def test_r16_nobody_hears_of_a_fence_before_it_is_durable() -> None:
    """A crash could take it, and the attempt that was said to have aborted would commit after all."""
    driver = EmbeddedDriver()
    driver.db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    store, log = driver.store, driver._log
    assert log is not None
    log.hold = True
    said: list[Any] = []
    threads = [threading.Thread(target=lambda: said.append(store.outcome("slow"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: store.committer._fencing)
    tx = driver.db.transaction()
    tx.delta("t", (1,), n=1)
    outcomes: list[Outcome] = []
    assert tx._txn is not None
    store.commit(tx._txn, done=outcomes.append, token="slow")
    time.sleep(0.05)
    assert (said, outcomes) == ([], [])
    log.hold = False
    log.release()
    for thread in threads:
        thread.join(60)
    assert said == [("aborted", None)] * 3
    assert isinstance(outcomes[0].error, Aborted)
    assert total(driver) == 0
    driver.close()


def test_r11_who_fences_and_is_interrupted_does_not_hold_the_watermark_up() -> None:
    driver = EmbeddedDriver()
    driver.db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    committer, log = driver.store.committer, driver._log
    assert log is not None
    log.hold = True

    signal.siginterrupt(signal.SIGINT, True)  # Polars lets waits go on, once an earlier test has used it
    ended = threading.Event()

    def interrupt() -> None:
        wait_until(lambda: committer.watermark.in_flight)
        pause_s = 0.05
        while not ended.wait(pause_s):  # one that comes just before a thread waits is heard when it has waited
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            pause_s = 30.0

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        committer.fence("slow")
    ended.set()
    interrupting.join()
    log.hold = False
    log.release()
    add(driver, token="later")
    assert total(driver) == 1
    with pytest.raises(Aborted):
        add(driver, token="slow")
    driver.close()


def test_r16_the_outcome_of_an_attempt_in_flight_waits_for_it(driver: EmbeddedDriver) -> None:
    store = driver.store
    tx = driver.db.transaction(token="flying")
    tx.delta("t", (1,), n=1)
    cts, _ = hold(store, tx, token="flying")
    assert store.outcome("flying", timeout_s=0.02) == ("unknown", None)
    store.committer.finish_held(cts)
    assert store.outcome("flying") == ("committed", cts)


def test_r16_an_abort_after_the_timestamp_fences_the_token_for_good(driver: EmbeddedDriver) -> None:
    store = driver.store
    tx = driver.db.transaction(token="gone")
    tx.delta("t", (1,), n=1)
    cts, _ = hold(store, tx, token="gone")
    store.committer.abort_held(cts)
    for forget in (lambda: None, driver.crash, lambda: driver.db.consolidate(), driver.reopen):
        forget()
        assert driver.db.outcome("gone") is ABORTED
        with pytest.raises(Aborted):
            add(driver, token="gone")
    assert total(driver) == 0


# -- how long -----------------------------------------------------------------------------------------


def library_token(age_s: float = 0) -> str:
    return f"k1-{int((time.time() - age_s) * 1_000_000):016d}-abc"


def trim(driver: EmbeddedDriver) -> None:
    driver.db.consolidate()
    driver.store.consolidator.passes = 64
    driver.store.consolidator.sweep()


def test_r16_a_library_token_too_old_to_be_remembered_is_refused(driver: EmbeddedDriver) -> None:
    """It is never applied again: forgetting it and refusing it go by the same limit."""
    token = library_token()
    first = add(driver, token=token)
    driver.wait(DAY_S / 2)
    trim(driver)
    assert add(driver, token=token) == first
    driver.wait(DAY_S)
    log: Any = driver.store.log
    log._clock = lambda: int(driver._now() * 1e9)
    add(driver)  # the log comes as far, and then what is older goes
    trim(driver)
    before = driver.store.log.last
    with pytest.raises(InvalidArgument, match="too long ago"):
        add(driver, token=token)
    assert driver.db.outcome(token) is UNKNOWN
    assert driver.store.log.last == before
    assert total(driver) == 2


def test_r16_a_clock_that_was_ahead_makes_no_token_forgotten_that_is_still_taken(driver: EmbeddedDriver) -> None:
    """Of an idle store, which is swept meanwhile: no commit has told the log of that time."""
    token = library_token()
    first = add(driver, token=token)
    driver.wait(2 * DAY_S)
    trim(driver)
    driver.wait(-2 * DAY_S)
    assert add(driver, token=token) == first
    assert total(driver) == 1


def test_r16_a_callers_own_token_is_kept_for_ever(driver: EmbeddedDriver) -> None:
    first = add(driver, token="order 4711")
    driver.wait(400 * DAY_S)
    trim(driver)
    driver.crash()
    assert add(driver, token="order 4711") == first
    assert total(driver) == 1


def test_what_a_library_token_says() -> None:
    assert issued_at_us("k1-0000000000000042-abc") == 42
    for text in ("order 4711", "k1-", "k1-abc-", "k1--5-x", "k2-0000000000000042-abc", "k1-" + "9" * 30 + "-x"):
        assert issued_at_us(text) is None


@pytest.mark.parametrize("token", ["", "x" * 1025])
def test_a_token_has_1_to_1024_bytes(driver: EmbeddedDriver, token: str) -> None:
    with pytest.raises(InvalidArgument):
        add(driver, token=token)
    assert total(driver) == 0


# -- batch tokens -------------------------------------------------------------------------------------


def test_r16_a_repeated_batch_gets_its_first_timestamp_whatever_it_holds(driver: EmbeddedDriver) -> None:
    stamps = [add(driver, batch=("job", n)) for n in range(5)]
    for forget in (lambda: None, lambda: driver.db.consolidate(), driver.reopen, driver.crash):
        forget()
        for n in range(5):
            assert add(driver, 1000, batch=("job", n)) == stamps[n]
        with driver.db.transaction(batch=("job", 2)) as tx:
            pass
        assert tx.commit_ts == stamps[2]
    assert total(driver) == 5


def test_r16_a_gap_is_refused_and_the_mark_is_kept(driver: EmbeddedDriver) -> None:
    add(driver, batch=("job", 7))  # a scope may begin anywhere: the job may be older than the store
    for forget in (lambda: None, lambda: driver.db.consolidate(), driver.crash):
        forget()
        with pytest.raises(OutOfSequence) as caught:
            add(driver, batch=("job", 9))
        assert caught.value.details["expected"] == 8
        with pytest.raises(OutOfSequence):
            add(driver, batch=("job", 6))
    assert add(driver, batch=("job", 8)) > 0
    assert add(driver, batch=("other", 0)) > 0
    assert driver.db.batch_scopes() == ["job", "other"]
    assert total(driver) == 3


def test_r16_an_empty_batch_counts(driver: EmbeddedDriver) -> None:
    """A streaming job has batches without events: the sequence must not tear."""
    with driver.db.transaction(batch=("job", 0)) as tx:
        pass
    first = tx.commit_ts
    driver.crash()
    with driver.db.transaction(batch=("job", 0)) as tx:
        tx.delta("t", (1,), n=1)
    assert tx.commit_ts == first
    assert total(driver) == 0
    add(driver, batch=("job", 1))
    assert total(driver) == 1


def test_r16_a_batch_that_aborted_after_its_timestamp_may_come_again(driver: EmbeddedDriver) -> None:
    store = driver.store
    add(driver, batch=("job", 0))
    tx = driver.db.transaction(batch=("job", 1))
    tx.delta("t", (1,), n=1)
    cts, _ = hold(store, tx, batch=("job", 1))
    store.committer.abort_held(cts)
    driver.crash()
    add(driver, batch=("job", 1))
    assert add(driver, batch=("job", 0)) < add(driver, batch=("job", 1))
    assert total(driver) == 2


# -- how they come into the engine ----------------------------------------------------------------


@pytest.fixture
def tokens() -> Tokens:
    return Tokens(MemoryEngine(), ttl_us=10**12)


def written(tokens: Tokens, upto: int) -> list[tuple[str, int]]:
    return [(key[1:].decode(), Remembered.decode(value).cts) for key, value in tokens.rows(upto)]


def test_none_above_the_position_is_saved_and_none_is_left_behind(tokens: Tokens) -> None:
    for cts in (5, 10, 7, 12, 9):
        tokens.remember(f"t{cts}", cts, bytes(16))
    tokens.cut()
    assert written(tokens, 8) == [("t5", 5), ("t7", 7)]
    tokens.drop(8, threading.Lock())
    assert tokens.unsaved == 3
    tokens.cut()
    assert sorted(cts for _, cts in written(tokens, 12)) == [9, 10, 12]


def test_a_fence_is_the_last_word_whatever_was_set_aside_when(tokens: Tokens) -> None:
    tokens.remember("before", 1, bytes(16))
    tokens.remember("between", 2, bytes(16))
    tokens.remember("later", 3, bytes(16))
    tokens.forget("before")
    tokens.cut()
    assert sorted(written(tokens, 2)) == [("before", FENCED), ("between", 2)]
    tokens.forget("between")
    tokens.forget("later")
    tokens.drop(2, threading.Lock())
    for name in ("between", "later"):
        found = tokens.find(name)
        assert found is not None and found.cts == FENCED, "fenced since"
    tokens.cut()
    assert sorted(written(tokens, 3)) == [("between", FENCED), ("later", FENCED)]


def test_what_could_not_be_written_is_set_aside_again(tokens: Tokens) -> None:
    for cts in range(1, 6):
        tokens.remember(f"t{cts}", cts, bytes(16))
        tokens.cut()
    tokens.forget("t2")
    tokens.cut()
    assert sorted(cts for _, cts in written(tokens, 5)) == [FENCED, 1, 3, 4, 5]


def test_r16_while_many_tokens_are_written_others_commit_and_none_is_lost(
    driver: EmbeddedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the engine takes nothing at first, and if the process dies in between."""
    monkeypatch.setattr(consolidate, "_TOKENS_AT_ONCE", 4)
    stamps = {f"t{i}": add(driver, token=f"t{i}") for i in range(30)}
    write = driver.store.engine.write
    failures = 2

    def commit() -> None:
        name = f"t{len(stamps)}"
        thread = threading.Thread(target=lambda: stamps.update({name: add(driver, token=name)}))
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "a commit waits for consolidation"

    def rows(self: Tokens, upto: int) -> Iterator[tuple[bytes, bytes]]:
        commit()
        yield from of_pass(self, upto)
        commit()

    def failing(batch: Any) -> None:
        nonlocal failures
        if failures and any(key == consolidate.POSITION for key, _ in batch):
            failures -= 1
            raise Unavailable("the engine takes nothing")
        write(batch)

    of_pass = Tokens.rows
    monkeypatch.setattr(Tokens, "rows", rows)
    monkeypatch.setattr(driver.store.engine, "write", failing)
    for _ in range(2):
        with pytest.raises(Unavailable):
            driver.db.consolidate()
    driver.db.consolidate()
    assert len(stamps) == 36 and not failures
    assert driver.db.stats()["tokens_unsaved"] < 20
    driver.crash()
    before = total(driver)
    assert before == len(stamps)
    assert {token: add(driver, token=token) for token in stamps} == stamps
    assert total(driver) == before


# -- which of them are looked for in the engine ----------------------------------------------------


class Asked(MemoryEngine):
    """Knows what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bytes] = []

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.asked += keys
        return super().get_many(keys)


NOW = 1_800_000_000_000_000
STAMPS = itertools.count(1)


def library(issued_us: int, name: str = "x") -> str:
    return f"k1-{issued_us}-{name}"


def save(tokens: Tokens, engine: MemoryEngine, *names: str) -> None:
    """As a pass does."""
    for name in names:
        tokens.remember(name, next(STAMPS), bytes(16))
    tokens.cut()
    batch = WriteBatch()
    for key, value in tokens.rows(1 << 60):
        batch.put(key, value)
    engine.write(batch)
    tokens.drop(1 << 60, threading.Lock())


@given(st.data())
def test_r16_a_token_that_was_saved_is_always_found_whoever_made_it(data: st.DataObject) -> None:
    """Clocks of clients differ, and callers make tokens that look like the library's."""
    times = st.integers(NOW - 50, NOW + 50) | st.sampled_from([0, 7, 10**15, 10**16 - 1, 10**16, 9 * 10**18])
    regular = st.builds(lambda us, n: f"k1-{us % 10**16:016d}-{n:024x}", times, st.integers(0, 3))
    made = (
        regular
        | st.builds(library, times, st.sampled_from(["x", "y", ""]))
        | st.sampled_from(
            [
                "k1-",
                "k1-12",
                "mine",
                "k1--",
                "k1-\u0663" + "1" * 15 + "-x",
                "k1-" + "9" * 15 + "a-",
                "k2-1800000000000000-x",
            ]
        )
    )
    engine = MemoryEngine()
    tokens = Tokens(engine, ttl_us=1 << 62)
    known: set[str] = set()
    for group in data.draw(st.lists(st.lists(made, max_size=6, unique=True), max_size=8)):
        assert tokens.known(group, NOW) == known & set(group)
        match data.draw(st.sampled_from(["save", "reopen", "remember"])):
            case "save":
                save(tokens, engine, *(token for token in group if token not in known))
            case "reopen":
                save(tokens, engine, *(token for token in group if token not in known))
                tokens = Tokens(engine, ttl_us=1 << 62)
            case _:
                for token in group:
                    if token not in known:
                        tokens.remember(token, next(STAMPS), bytes(16))
        known |= set(group)
        assert tokens.known(sorted(known), NOW) == known


def test_new_tokens_are_not_looked_for_in_the_engine_and_all_others_are() -> None:
    engine = Asked()
    tokens = Tokens(engine, ttl_us=10**12)
    assert tokens.known([library(NOW), library(NOW + 1)], NOW) == set() and engine.asked == []
    save(tokens, engine, library(NOW + 5), library(NOW))
    assert tokens.known([library(NOW + 6), library(NOW + 9)], NOW) == set() and engine.asked == []
    again = [library(NOW + 5), library(NOW + 5, "a"), library(NOW), "mine"]
    assert tokens.known(again, NOW) == {again[0], again[2]}
    assert len(engine.asked) == 4


def test_a_token_past_its_time_limit_is_told_also_where_none_was_saved() -> None:
    tokens = Tokens(MemoryEngine(), ttl_us=1_000)
    assert tokens.known([library(NOW - 1_001), library(NOW - 999)], NOW) == {library(NOW - 1_001)}


def test_where_many_tokens_only_look_like_the_librarys_all_are_looked_for() -> None:
    engine = Asked()
    tokens = Tokens(engine, ttl_us=10**12)
    save(tokens, engine, library(NOW), *(f"k1-zz{i}" for i in range(200)))
    tokens = Tokens(engine, ttl_us=10**12)
    assert tokens.known([library(NOW), library(NOW + 9)], NOW) == {library(NOW)}
    assert len(engine.asked) == 2
