"""Subscriptions at awkward moments: commits that are held up, floors that move, tables that are made again."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest

import kivi
from kivi.embedded.database import Database
from kivi.errors import NotFound, OutOfRange, ResourceExhausted
from kivi.live import schedule, windows
from kivi.live.lives import Live
from kivi.log.memory import MemoryLog
from kivi.model.scans import Scan
from kivi.model.subscriptions import Query, Terms, Update
from kivi.runtime.settings import Settings
from kivi.store.facade import Store
from tests.live.test_durable import drain
from tests.mvcc.holding import hold
from tests.waiting import Pulse, wait_until

T0 = 1_750_000_000_000_000
COLUMNS = {"seq": "int64", "ts": "timestamp"}


class Clock:
    """By which moments are over: its time goes on when a test says so, however long the machine takes until then."""

    now_us = 1_760_000_000_000_000


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def db(clock: Clock) -> Iterator[Any]:
    log = MemoryLog(clock=lambda: clock.now_us * 1_000)
    settings = Settings.of({"background": False})
    with Database(Store.open(settings=settings, log=log, clock=lambda: clock.now_us / 1e6)) as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        db.create_table("rows", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "v": "int64"}, history="1h")
        yield db


def add(db: Any, *numbers: int) -> None:
    db.append("calls", [{"seq": n, "ts": T0 + n} for n in numbers])


def put(db: Any, key: int, **values: Any) -> None:
    with db.transaction() as tx:
        tx.put("rows", (key,), **values)


def at(db: Any, ts: int) -> list[dict[str, Any]]:
    with db.snapshot(as_of=ts) as snapshot:
        return list(snapshot.scan("rows"))


# -- the end, the interval, the heartbeat ------------------------------------------------------------------


def test_heartbeats_of_many_are_spread_over_their_interval(db: Any) -> None:
    """Those that began together are not told together, and none waits for longer than its interval."""
    heard: dict[int, list[tuple[float, float]]] = {i: [] for i in range(100)}
    """When it was due, and when it was told."""
    hub = db.hub
    lives: list[Any] = []
    query = Query.of(db.store.table("rows"), Scan(), (), None, 0)

    def told(i: int, said: Any) -> None:
        if isinstance(said, Update):
            heard[i].append((lives[i].beat, time.monotonic()))
            hub.ask(lives[i], functools.partial(told, i))

    with Pulse() as pulse:
        for i in heard:
            lives.append(hub.subscribe("rows", lambda _: query, Terms(False, 0.0, 1.0)))
            hub.ask(lives[i], functools.partial(told, i))
        wait_until(lambda: min(map(len, heard.values())) >= 3, pause_s=0.05)  # the first is the state
    first = sorted(due for _, (due, _), *_ in heard.values())
    assert first[-1] - first[0] > 0.4
    assert first[89] - first[10] > 0.3  # not all but a few
    every = sorted(at for each in heard.values() for _, at in each)
    silent_s = max(after - before for before, after in itertools.pairwise(every))  # as of a busy machine
    assert max(due - before for _, (_, before), (due, _), *_ in heard.values()) < 1.0 + silent_s
    # The hub does not excuse itself: twice the interval besides, and what the machine kept another thread waiting.
    assert max(after - before for _, (_, before), (_, after), *_ in heard.values()) < 3.0 + pulse.late_s


def test_what_does_not_change_is_told_of_at_the_snapshots_of_what_does(db: Any) -> None:
    """If both are told something in each interval: a page shows the states of both at one snapshot."""
    hub, said = db.hub, dict[str, list[int]](hot=[], cold=[])
    lives: dict[str, Any] = {}

    def told(name: str, update: Any) -> None:
        if isinstance(update, Update):
            said[name].append(update.ts)
            hub.ask(lives[name], functools.partial(told, name))

    put(db, 1, n=0)
    put(db, 2, n=0)
    for name, key in (("hot", 1), ("cold", 2)):
        query = Query.of(db.store.table("rows"), Scan(prefix=(key,)), (), None, 0)
        lives[name] = hub.subscribe("rows", lambda _, query=query: query, Terms(False, 0.2, 0.2))
        hub.ask(lives[name], functools.partial(told, name))
    numbered = itertools.count()

    def many() -> bool:
        put(db, 1, n=next(numbered))
        return len(said["hot"]) >= 12

    wait_until(many)
    for live in lives.values():
        hub.close(live)
    assert {*said["hot"][3:-1]} <= {*said["cold"]}  # the first change comes at once, and not with an interval


def _unbound(schema: Any) -> Query:
    raise AssertionError("nobody reads it")


def test_those_who_are_told_at_even_intervals_and_at_odd_ones_come_together() -> None:
    """However long the hub pauses, and whenever; and none of them waits for more than two intervals."""
    for pause_ms, begin_ms in itertools.product(range(100, 1_300, 10), range(0, 1_000, 20)):
        lives = [Live("rows", _unbound, Terms(False, 0.5, 0.5)) for _ in range(2)]
        lives[0].due, lives[1].due = 10.0, 10.5
        together = list[int]()
        for i in range(100):
            now = 10.0 + (begin_ms + pause_ms * i) / 1_000
            told = [live for live in lives if live.due <= now]
            for live in told:
                live.told_at(now, now - pause_ms / 1_000)
                assert live.due - now < 2 * 0.5
            together.append(len(told))
        assert 1 not in together[-20:], (pause_ms, begin_ms)


@pytest.mark.parametrize("part", [0.05, 0.2, 0.45, 0.55, 0.7, 0.95])
@pytest.mark.parametrize("even", [0, 1])
def test_after_a_rest_a_change_waits_for_two_intervals_at_most_and_no_heartbeat_for_more_than_one_and_a_half(
    db: Any, even: int, part: float
) -> None:
    """In whichever part of an interval the rest ends: it is seconds long, and the hub is not so late."""
    now = time.monotonic()
    interval_s = now / (2 * (now // 20) + even + part)
    with db.subscribe("rows", interval_ms=interval_s * 1_000, heartbeat_ms=interval_s * 1_000) as live:
        assert live.next(60.0) is not None
        with db.hub._lock:
            live._live.due = now - interval_s
        put(db, 1, v=1)
        assert live.next(60.0) is not None
        told = live._live.said_at
        assert told - now < interval_s / 2
        assert interval_s <= live._live.due - told + 0.5 * interval_s
        assert live._live.due - told <= 2 * interval_s
        live.next(0.01)  # it asks for more
        wait_until(lambda: live._live.then is not None)
        assert 0.0 < live._live.beat - told <= 1.5 * interval_s


def test_its_moment_is_over_while_a_commit_is_held_up(db: Any, clock: Clock) -> None:
    """It waits for that commit, others do not wait for it, and it ends behind it."""
    add(db, 0)
    with db.subscribe("calls", interval_ms=0) as live:
        assert drain(live, 1) == [0]  # and all that is needed for it is loaded
    until, since = clock.now_us + 3_000_000, db.watermark()
    with (
        db.subscribe("calls", since=since, until_time=until, interval_ms=0, heartbeat_ms=60_000) as live,
        db.subscribe("rows", interval_ms=0, heartbeat_ms=20) as other,
    ):
        other.next(30.0)
        tx = db.transaction()
        tx.append("calls", [{"seq": 1, "ts": T0}])
        cts, _ = hold(db.store, tx)
        clock.now_us = until  # its last microsecond, in which more may be committed
        assert live.next(3.4) is None
        clock.now_us += 1
        assert live.next(0.4) is None
        assert other.next(0.1) is None
        assert other.silent_s < 2.5  # it is longer that the commit is held up
        db.store.committer.finish_held(cts)
        assert drain(live, 1, 30.0) == [1]
        assert live.ended
        put(db, 1, v=1)
        assert other.next(30.0) is not None


def test_a_commit_that_finishes_as_its_moment_is_over(db: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the hub's snapshot was taken, and before it looks which commits are within: that is the next tick's."""
    add(db, 0)
    find = db.hub._find_end
    held: list[int] = []

    def late(live: Any) -> None:
        if held and clock.now_us > live.until_us:
            db.store.committer.finish_held(held.pop())
        find(live)

    monkeypatch.setattr(db.hub, "_find_end", late)
    until, since = clock.now_us + 500_000, db.watermark()
    with db.subscribe("calls", since=since, until_time=until, interval_ms=0, heartbeat_ms=60_000) as live:
        tx = db.transaction()
        tx.append("calls", [{"seq": 1, "ts": T0}])
        held.append(hold(db.store, tx)[0])
        clock.now_us = until + 1
        assert drain(live, 1, 30.0) == [1]
        assert live.ended


def test_a_long_heartbeat_does_not_put_off_the_end(db: Any, clock: Clock) -> None:
    began, until = time.monotonic(), clock.now_us + 500_000
    with db.subscribe("calls", until_time=until, interval_ms=0, heartbeat_ms=3_600_000) as live:
        assert live.next(0.1) is None
        add(db, 1)
        clock.now_us = until + 1
        assert drain(live, 1, 30.0) == [1]
        assert live.ended
        assert time.monotonic() - began < 60


def test_a_heartbeat_between_updates_names_the_state_that_it_has(db: Any) -> None:
    """``ts`` does not run ahead of ``rows`` while changes wait for the interval, and it is heard of all the same."""
    with db.subscribe("rows", interval_ms=4_000, heartbeat_ms=20) as live:
        live.next(60.0)
        put(db, 1, v=0)
        assert live.next(60.0) is not None
        put(db, 1, v=1)
        beats = set[Any]()
        while len(beats) <= 5:
            assert live.next(0.02) is None
            beats.add(live._follower.heard_at)
            assert live.rows == at(db, live.ts)
        assert live.next(60.0) is not None
        assert live.rows == [{"id": 1, "n": 0, "v": 1}]


def test_events_come_at_most_once_in_an_interval(db: Any) -> None:
    with Pulse() as pulse, db.subscribe("calls", since=0, interval_ms=1_500, heartbeat_ms=20) as live:
        began, sent, updates, found = time.monotonic(), 0, 0, 0
        while found < 20:
            if sent < 20:
                add(db, sent)
                sent += 1
            update = live.next(0.05)
            if update is not None:
                updates += 1
                found += len(update.changes)
            assert live.silent_s < 1.4 + pulse.late_s  # less than the interval
        assert updates <= (time.monotonic() - began) / 1.5 + 1


def test_intervals_are_told_of_the_same_snapshots(db: Any) -> None:
    """Whenever they began: what several queries give can be put together, although all of it changes all the time."""
    intervals_ms = (0, 40, 120, 40, 120)  # the first has all that is committed told at once
    told: list[set[int]] = [set() for _ in intervals_ms]
    with contextlib.ExitStack() as stack:
        lives: list[Any] = [stack.enter_context(db.subscribe("rows", interval_ms=ms)) for ms in intervals_ms]
        for n in itertools.count():
            if n >= 600 and len(told[1]) > 30 and len(told[2]) > 10:
                break
            put(db, 1, v=n)
            time.sleep(0.005)
            for i, live in enumerate(lives):
                while n > 7 * i and (update := live.next(0.0)) is not None:  # each takes its first at another moment
                    told[i].add(update.ts)
    _, often, seldom, also_often, also_seldom = told
    for one, other in ((often, also_often), (seldom, also_seldom), (seldom, also_often), (also_seldom, often)):
        assert len(one & other) >= len(one) * 2 / 3


def test_an_interval_holds_up_nothing_of_what_is_there(db: Any) -> None:
    """It gathers what comes; it does not say how much may be read in a time."""
    for at in range(0, 15_000, 5_000):
        add(db, *range(at, at + 5_000))
    with db.subscribe("calls", since=0, interval_ms=60_000) as live:
        found: list[int] = []
        while len(found) < 15_000:
            update = live.next(60.0)
            assert update is not None
            found += [change.row["seq"] for change in update.changes]
    assert found == list(range(15_000))


def test_no_interval_ends_the_subscriptions_of_others(db: Any) -> None:
    with db.subscribe("rows", interval_ms=1e-305) as odd, db.subscribe("rows", interval_ms=7.3) as other:
        for n in range(5):
            put(db, n, v=n)
            for live in (odd, other):
                while live.ts < db.watermark():
                    live.next(60.0)
                assert live.rows == at(db, live.ts)


def test_one_that_is_forgotten_is_not_kept_up(db: Any) -> None:
    for _ in range(20):
        db.subscribe("rows").next(30.0)
    gc.collect()
    wait_until(lambda: not db.hub.count)


def test_what_is_scheduled_stays_few(db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the interval and the heartbeat, and however many come and go."""
    monkeypatch.setattr(schedule, "_SPARE", 8)
    with db.subscribe("rows", interval_ms=3_600_000, heartbeat_ms=3_600_000) as live:
        live.next(60.0)
        put(db, 0, v=0)
        assert live.next(60.0) is not None
        for i in range(30):
            put(db, 0, v=i)
            live.next(0.01)
        for i in range(30):
            with db.subscribe("rows", interval_ms=0, heartbeat_ms=3_600_000) as short:
                short.next(30.0)
                short.next(0.02)
            assert len(db.hub._schedule) <= 12, i


# -- tables that are made again, and limits ---------------------------------------------------------------


def test_a_table_made_again_is_another(db: Any) -> None:
    """Those of the old one end; whoever comes then gets the new one, whether or not the others have looked."""
    put(db, 1, v=1)
    old = db.subscribe("rows", interval_ms=0)
    old.next(30.0)
    ts = old.ts
    db.drop("rows")
    db.create_table("rows", key={"id": "int64"}, columns={"w": "int64"})
    with db.transaction() as tx:
        tx.put("rows", (5,), w=5)
    with db.subscribe("rows", interval_ms=0, since=ts) as live:  # what it had was of another table
        update = live.next(60.0)
        assert update is not None
        assert update.reset
        assert live.rows == [{"id": 5, "w": 5}]
        with pytest.raises(NotFound):
            old.next(30.0)
        with db.transaction() as tx:
            tx.put("rows", (6,), w=6)
        assert live.next(60.0) is not None
        assert len(live.rows) == 2


def test_a_limit_does_not_lift_the_limit(db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "ROWS_MAX", 30)
    for i in range(40):
        put(db, i, v=i)
    with pytest.raises(ResourceExhausted, match="prefix or a predicate"):
        db.subscribe("rows", limit=1_000)
    with db.subscribe("rows", limit=30, order_by="v", interval_ms=0) as live:
        assert len(live.next(60.0).changes) == 30


def test_a_sum_beyond_its_column_ends_it(db: Any) -> None:
    with db.subscribe("rows", interval_ms=0) as live:
        live.next(60.0)
        for _ in range(2):
            with db.transaction() as tx:
                tx.delta("rows", (1,), n=2**63 - 1)
        with pytest.raises(OutOfRange):
            while live.next(60.0) is not None:
                pass
        assert live.ended
        assert live.next(0.1) is None


def test_a_sum_beyond_its_column_that_is_only_asked_about(db: Any) -> None:
    """As in a scan, that is no reason to refuse."""
    for _ in range(2):
        with db.transaction() as tx:
            tx.delta("rows", (1,), n=2**63 - 1)
    with db.subscribe("rows", where=kivi.col("n") > 5, columns=["id"], interval_ms=0) as live:
        assert live.next(60.0) is not None
        assert live.rows == [{"id": 1}]


def test_one_that_fails_as_it_joins_leaves_nothing(db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "ROWS_MAX", 3)
    with db.subscribe("rows", where=kivi.col("v") == 100, interval_ms=0) as other:
        other.next(30.0)
        join = db.hub._join

        def late(*args: Any) -> None:
            for i in range(10):
                put(db, i, v=i)
            join(*args)

        monkeypatch.setattr(db.hub, "_join", late)
        with pytest.raises(ResourceExhausted):
            db.subscribe("rows")
        group = db.hub._groups["rows"]
        assert not group._holders


def test_a_floor_that_moves_as_it_joins(db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add(db, 1, 2, 3)
    join = db.hub._join

    def late(*args: Any) -> None:
        db.store.retention.set_floor(db.store.table("calls"), T0 + 3)
        join(*args)

    monkeypatch.setattr(db.hub, "_join", late)
    with db.subscribe("calls", limit=5, interval_ms=0) as live:
        live.next(60.0)
        assert [row["seq"] for row in live.rows] == [3]


def test_a_floor_that_moves_and_nothing_is_committed(db: Any) -> None:
    add(db, 1, 2, 3)
    with db.subscribe("calls", limit=5, interval_ms=0, heartbeat_ms=20) as live:
        live.next(60.0)
        cts = db.store.retention.set_floor(db.store.table("calls"), T0 + 2)
        while live.ts < cts:
            live.next(0.05)
        assert [row["seq"] for row in live.rows] == [2, 3]


# -- who is asked, who asks, who goes --------------------------------------------------------------------


def test_an_ask_is_not_swallowed_by_one_that_had_ended(db: Any) -> None:
    with db.subscribe("rows", interval_ms=0) as live:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with db.hub._lock:
            db.hub._asked.append((live._live, answers.put))
            db.hub._answer_ended()  # which one whose thread had ended asks for, a moment too late
        assert answers.get(timeout=60.0).reset


def test_one_that_lost_its_connection_gets_what_it_was_handed_again(db: Any) -> None:
    """Another of its user passed over these events because it was handed them; it did not get to work on them."""
    first = db.subscribe("calls", name="a", user="u", unseen=True, interval_ms=0)
    second = db.subscribe("calls", name="b", user="u", unseen=True, interval_ms=0)
    add(db, 1, 2)
    assert [c.row["seq"] for c in first.next(30.0).changes] == [1, 2]
    assert drain(second, 0) == []
    second.acknowledge()
    first.close()  # without a word
    with db.subscribe("calls", name="a", user="u", unseen=True, interval_ms=0) as again:
        assert drain(again, 2) == [1, 2]
    assert drain(second, 0) == []
    add(db, 3)
    assert drain(second, 1) == [3]
    with db.subscribe("calls", name="a", user="u", unseen=True, interval_ms=0) as again:
        assert drain(again, 0) == []
    second.close()
