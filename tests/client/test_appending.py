"""The appenders over a database that is nothing but a list: order, bounds, closing, and what their futures do."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

import kivi
import kivi.aio
import kivi.aio.appender
import kivi.api.appender
from kivi.api.arguments import AppenderArguments
from kivi.api.gathering import BATCH_BYTES, BYTES_BUFFERED_MAX, EVENTS_BUFFERED_MAX, AppendFuture
from kivi.errors import CommitUnknown, InvalidArgument, ResourceExhausted, SchemaError, Unavailable
from kivi.model.declarations import event_table_schema
from tests.serverproc import ServerProcess
from tests.waiting import until, wait_until

INTS = {"ts": "timestamp", "who": "int64", "i": "int64"}


class Fake:
    """Commits batch n at n once ``gate`` is open, and fails the batches whose numbers are in ``failing``."""

    def __init__(self, **columns: str) -> None:
        self.schema = event_table_schema("ev", event_time="ts", columns=columns or INTS)
        self.batches: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failing: set[int] = set()
        self._value_bytes_max = 16 << 20

    def _schema(self, table: str) -> Any:
        return self.schema

    def _append(self, table: str, events: Any, token: str, late: str, *, each: bool) -> int:
        self.batches.append(events.batch)
        number = len(self.batches)
        self.gate.wait()
        if number in self.failing:
            raise Unavailable(f"batch {number} is lost")
        return number

    def rows(self) -> list[dict[str, Any]]:
        return [row for batch in self.batches for row in batch.to_pylist()]


class AioFake(Fake):
    async def _schema(self, table: str) -> Any:
        return self.schema

    async def _append(self, table: str, events: Any, token: str, late: str, *, each: bool) -> int:  # type: ignore[override]
        self.batches.append(events.batch)
        number = len(self.batches)
        await until(self.gate.is_set)
        await asyncio.sleep(0)
        if number in self.failing:
            raise Unavailable(f"batch {number} is lost")
        return number


@pytest.fixture(params=[None, 1e-6], ids=["", "switching"])
def switching(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once as it is, once with threads that are stopped between any two instructions."""
    before = sys.getswitchinterval()
    if request.param is not None:
        sys.setswitchinterval(request.param)
    yield
    sys.setswitchinterval(before)


@contextlib.contextmanager
def appender(db: Fake, linger_ms: float = 0, max_events: int = 10_000) -> Iterator[kivi.api.appender.Appender]:
    app = kivi.api.appender.Appender(db, AppenderArguments("ev", linger_ms, max_events))
    try:
        yield app
    finally:
        db.gate.set()
        app.close()


@pytest.mark.parametrize("max_events", [1, 2, 7, 1_000])
def test_every_event_of_every_thread_is_in_the_batch_its_future_tells(switching, max_events):
    db = Fake()
    told: dict[tuple[int, int], int] = {}
    count = min(750, 150 * max_events)  # a batch of one event costs as much as one of a thousand

    def produce(who: int, app: Any) -> None:
        futures: deque[tuple[int, AppendFuture]] = deque()
        for i in range(count):
            if len(futures) >= 50:
                at, oldest = futures.popleft()
                told[who, at] = oldest.result(60)
            futures.append((i, app.append(who=who, ts=i, i=i)))
        for at, future in futures:
            told[who, at] = future.result(60)

    with appender(db, 0, max_events) as app:
        threads = [threading.Thread(target=produce, args=(who, app)) for who in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = {(row["who"], row["i"]): number for number, batch in enumerate(db.batches, 1) for row in batch.to_pylist()}
    assert found == told and len(found) == 8 * count
    assert max(batch.num_rows for batch in db.batches) <= max_events + 8
    for who in range(8):
        assert [row["i"] for row in db.rows() if row["who"] == who] == list(range(count))


class Slow(list[Any]):
    """A batch's rows, in the instants that decide whether a row is early or late."""

    def __init__(self, app: Any, moment: str) -> None:
        super().__init__(app._batch.rows)
        self.app, self.moment = app, moment
        self.came, self.go = threading.Event(), threading.Event()

    def append(self, row: Any) -> None:
        self.came.set()
        assert self.go.wait(60)
        super().append(row)

    def __len__(self) -> int:
        count = super().__len__()
        another_gathers = self.app._batch.rows is not self
        if self.moment == "while the batch is sealed" and another_gathers and not self.go.is_set():
            self.go.set()  # the row comes when the batch has been counted
            time.sleep(0.2)
        return count


@pytest.mark.parametrize("moment", ["while the batch is sealed", "when it is sealed", "when it is answered"])
def test_a_row_that_comes_too_late_joins_the_next_batch(moment):
    db = Fake()
    with appender(db, linger_ms=60_000) as app:
        early = [app.append(ts=1, who=1, i=i) for i in range(3)]
        rows = app._batch.rows = Slow(app, moment)
        late: list[AppendFuture] = []
        thread = threading.Thread(target=lambda: late.append(app.append(ts=1, who=1, i=3)))
        thread.start()
        assert rows.came.wait(60)  # it has read which batch gathers
        if moment == "when it is sealed":
            db.gate.clear()
            with app._changed:
                app._seal()
            rows.go.set()
        else:
            app.flush()
            rows.go.set()
        thread.join(60)
        db.gate.set()
        assert not early[0].exception()
    assert [batch.num_rows for batch in db.batches] == [3, 1]
    assert [future.result() for future in early + late] == [1, 1, 1, 2]
    assert [row["i"] for row in db.rows()] == [0, 1, 2, 3]


@pytest.mark.parametrize("text", [False, True])
def test_closing_while_threads_append_loses_and_doubles_nothing(switching, text):
    for _ in range(20):
        db = Fake(ts="timestamp", who="int64", i="int64", **({"s": "string"} if text else {}))
        app = kivi.api.appender.Appender(db, AppenderArguments("ev", 0, 20))
        accepted: dict[tuple[int, int], AppendFuture] = {}
        started = threading.Barrier(5)
        extra = {"s": "x" * 300} if text else {}  # a large event

        def produce(who: int, app=app, accepted=accepted, started=started, extra=extra) -> None:
            started.wait()
            for i in range(100_000):
                try:
                    accepted[who, i] = app.append(who=who, i=i, ts=i, **(extra if i % 2 else {}))
                except Unavailable:
                    return
            raise AssertionError("it never closed")

        threads = [threading.Thread(target=produce, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        started.wait()
        time.sleep(0.002)
        app.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        stored = sorted((row["who"], row["i"]) for row in db.rows())
        assert stored == sorted(accepted)
        assert all(future.done() and future.result() for future in accepted.values())


def test_append_waits_when_so_many_events_are_not_durable():
    db = Fake()
    db.gate.clear()
    with appender(db) as app:
        futures = [app.append(ts=i, who=1, i=i) for i in range(EVENTS_BUFFERED_MAX - 1)]
        blocked = threading.Thread(target=lambda: futures.append(app.append(ts=1, who=1, i=EVENTS_BUFFERED_MAX)))
        blocked.start()
        blocked.join(0.2)
        assert blocked.is_alive() and not futures[0].done()
        db.gate.set()
        blocked.join(60)
        assert not blocked.is_alive()
    assert len(db.rows()) == len(futures) == EVENTS_BUFFERED_MAX


@pytest.mark.parametrize("threads", [1, 16])
def test_large_events_of_many_threads_stay_within_the_bytes(threads):
    db = Fake(ts="timestamp", s="string")
    db.gate.clear()
    text, accepted = "x" * 500_000, []
    with appender(db) as app:

        def produce() -> None:
            for i in range(320 // threads):
                accepted.append(app.append(ts=i, s=text))

        producing = [threading.Thread(target=produce) for _ in range(threads)]
        for thread in producing:
            thread.start()
        for thread in producing:
            thread.join(0.5 / threads)
        assert len(accepted) * 500_000 <= BYTES_BUFFERED_MAX + BATCH_BYTES + 1_000_000
        db.gate.set()
        for thread in producing:
            thread.join(60)
    assert len(db.rows()) == 320
    assert all(batch.nbytes <= BATCH_BYTES + 1_000_000 for batch in db.batches)


def test_a_batch_leaves_after_its_linger_and_flush_does_not_wait_for_it():
    db = Fake()
    with appender(db, linger_ms=60_000) as app:
        first = app.append(ts=1, who=1, i=1)
        time.sleep(0.05)
        assert not db.batches and not first.done()
        app.flush()
        assert first.done() and len(db.batches) == 1
        app.flush()
        last = app.append(ts=1, who=1, i=2)
        assert not last.done()
    assert last.result() == 2
    with pytest.raises(Unavailable, match="closed"):
        app.append(ts=1, who=1, i=3)
    app.flush()  # waits for no event that was refused
    app.close()


def test_flush_ends_while_others_go_on_appending():
    db, stop = Fake(), threading.Event()
    with appender(db, linger_ms=1) as app:

        def produce() -> None:
            while not stop.is_set():
                app.append(ts=1, who=1, i=1)

        thread = threading.Thread(target=produce)
        thread.start()
        mine = [app.append(ts=1, who=2, i=i) for i in range(100)]
        app.flush()
        assert all(future.done() for future in mine)
        stop.set()
        thread.join()


def test_bounds_do_not_wait_for_a_long_linger():
    db = Fake()
    with appender(db, linger_ms=600_000, max_events=10**9) as app:
        futures = [app.append(ts=1, who=1, i=i) for i in range(EVENTS_BUFFERED_MAX + 10)]
        assert futures[0].result(60) == 1


def test_a_failed_batch_fails_its_own_events_only():
    db = Fake()
    db.failing = {2}
    with appender(db, 60_000, 10) as app:
        batches = [[app.append(ts=1, who=1, i=i) for i in range(10)] for _ in range(3)]
        app.flush()
    numbers = [{future.result() for future in futures} for futures in batches[::2]]
    assert numbers == [{1}, {3}]
    for future in batches[1]:
        with pytest.raises(Unavailable, match="batch 2 is lost") as raised:
            future.result()
        assert future.exception() is raised.value
    assert len(traceback.extract_tb(raised.tb)) < 8  # it has not grown with each raise
    assert concurrent.futures.wait(batches[1], 1).not_done == set()
    assert repr(batches[0][0]) == "<AppendFuture: 1>" and "lost" in repr(batches[1][0])


def test_a_bad_event_concerns_no_other():
    db = Fake()
    with appender(db, linger_ms=60_000) as app:
        futures = [app.append(ts=1, who=1, i=1)]
        for bad in ({"i": True}, {"i": 2**63}, {"i": "1"}, {"ts": None}, {"j": 1}):
            with pytest.raises((SchemaError, kivi.InvalidArgument)):
                app.append(**{"ts": 1, "who": 1, "i": 1} | bad)
        with pytest.raises(TypeError):
            app.append({"ts": 1})  # type: ignore[call-arg]
        futures.append(app.append(ts=2, who=1))
        futures.append(kivi.api.appender.Appender.append(app, ts=3, i=3))
    assert {future.result() for future in futures} == {1}
    assert [(row["who"], row["i"]) for row in db.rows()] == [(1, 1), (1, None), (None, 3)]


# -- futures ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ServerProcess(tmp_path_factory.mktemp("appending") / "store") as server:
        yield server


def mixed(bad: set[int]) -> list[dict[str, Any]]:
    """Events of which some are bad, as only the table's aggregate knows."""
    return [{"ts": 1_700_000_000_000_000 + i, "who": None if i in bad else i % 7, "i": i} for i in range(1_000)]


def aggregated(db: Any, name: str) -> str:
    db.create_event_table(name, event_time="ts", columns=INTS)
    db.create_aggregate(f"{name}_by_who", source=name, group_by=["who"], measures={"n": kivi.count()})
    return name


@contextlib.contextmanager
def opened(where: str, server: ServerProcess) -> Iterator[Any]:
    with kivi.open() if where == "embedded" else server.connect() as db:
        yield db


@pytest.mark.parametrize("where", ["embedded", "server"])
@pytest.mark.parametrize("bad", [{0}, {999}, {17, 18, 500}, set(range(0, 1_000, 100))], ids=len)
def test_an_event_that_an_aggregate_refuses_concerns_no_other(where, bad, server):
    with opened(where, server) as db:
        table = aggregated(db, f"refused_{len(bad)}_{min(bad)}")
        with db.appender(table, linger_ms=60_000, max_events=1_000) as app:
            futures = [app.append(**event) for event in mixed(bad)]
            app.flush()
        assert {i for i, future in enumerate(futures) if future.exception() is not None} == bad
        for i in bad:
            with pytest.raises(InvalidArgument, match="is null in an event"):
                futures[i].result()
            assert "InvalidArgument" in repr(futures[i])
        waited = concurrent.futures.wait(futures, timeout=5)
        assert not waited.not_done
        with db.snapshot() as snapshot:
            stored = {row["i"]: row["_commit_ts"] for row in snapshot.changes(table, since=0)}
            assert sum(row["n"] for row in snapshot.scan(f"{table}_by_who")) == 1_000 - len(bad)
        assert stored == {i: futures[i].result() for i in range(1_000) if i not in bad}


def test_asyncio_an_event_that_an_aggregate_refuses_concerns_no_other(server):
    async def run(table: str) -> None:
        async with await kivi.aio.connect(server.endpoint) as db:
            async with db.appender(table, linger_ms=60_000, max_events=1_000) as app:
                futures = [app.append(**event) for event in mixed({3, 700})]
                await app.flush()
            outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert {i for i, outcome in enumerate(outcomes) if isinstance(outcome, InvalidArgument)} == {3, 700}

    with server.connect() as db:
        table = aggregated(db, "refused_asyncio")
        asyncio.run(run(table))
        with db.snapshot() as snapshot:
            assert sorted(row["i"] for row in snapshot.scan(table)) == [i for i in range(1_000) if i not in (3, 700)]


def test_asyncio_token_and_place_of_each_event_are_those_of_its_commit_also_where_nobody_waits_for_it(server):
    """Nor do they need a result to be told by: one that was given up, and one that is refused, have a place as well."""

    async def run(table: str) -> None:
        async with await kivi.aio.connect(server.endpoint) as db:
            async with db.appender(table, linger_ms=60_000, max_events=10, each=True) as app:
                futures = [app.append(ts=1, who=None if i == 27 else i, i=i) for i in range(30)]
                futures[13].cancel()
                await app.flush()
            assert futures[13].cancelled() and isinstance(futures[27].exception(), InvalidArgument)
            assert [future.place for future in futures[:20]] == [*range(10), *range(10)]
            assert [len({future.token for future in futures[at : at + 10]}) for at in (0, 10)] == [1, 1]
            for i, future in enumerate(futures):
                committed = futures[12].result() + 1 if i == 13 else kivi.ABORTED if i == 27 else future.result()
                assert future.token and await db.outcome(future.token, future.place) == committed

    with server.connect() as db:
        asyncio.run(run(aggregated(db, "places_asyncio")))


def test_a_batch_that_is_bad_throughout_is_not_tried_for_ever():
    with kivi.open() as db:
        table = aggregated(db, "bad")
        with db.appender(table, linger_ms=60_000, max_events=1_000) as app:
            futures = [app.append(**event) for event in mixed(set(range(1_000)))]
            app.flush()
        assert all(isinstance(future.exception(), InvalidArgument) for future in futures)


def test_an_appends_future_is_one_to_whoever_asks():
    db = Fake()
    db.gate.clear()
    with appender(db, 60_000, 2) as app:
        future, other = app.append(ts=1, who=1, i=1), app.append(ts=1, who=1, i=2)
        assert isinstance(future, concurrent.futures.Future)
        assert future != other and len({future, other}) == 2 and weakref.ref(future)() is future
        assert not future.done() and future.running() and not future.cancelled() and not future.cancel()
        for timeout in (0, 0.01, -1):
            with pytest.raises(TimeoutError):
                future.result(timeout)
            with pytest.raises(TimeoutError):
                future.exception(timeout)
        with pytest.raises(AttributeError):
            future.nonsense  # noqa: B018
        waited = concurrent.futures.wait([future, other], timeout=0)
        assert waited.not_done == {future, other}
        heard: list[Any] = []
        future.add_done_callback(heard.append)
        threading.Timer(0.05, db.gate.set).start()
        first, _ = concurrent.futures.wait([future], timeout=10)
        assert first == {future}
        assert {done.result() for done in concurrent.futures.as_completed([future, other], 10)} == {1}
        assert future.result() == 1 and future.exception() is None and future.done() and not future.running()
        wait_until(lambda: heard == [future])
        future.add_done_callback(heard.append)
        assert heard == [future, future]

        async def awaited() -> int:
            mine, _ = app.append(ts=1, who=1, i=1), app.append(ts=1, who=1, i=2)
            return await asyncio.wrap_future(mine)

        assert asyncio.run(awaited()) == 2


def test_many_threads_wait_for_one_batch():
    db = Fake()
    db.gate.clear()
    with appender(db, 60_000, 40) as app:
        futures = [app.append(ts=1, who=1, i=i) for i in range(40)]
        answers: list[Any] = []

        def ask(k: int) -> None:
            if k % 2:
                answers.append(futures[k].result(60))
            else:  # the parts of a whole Future are made by all of them at once
                done, _ = concurrent.futures.wait(futures, timeout=20)
                answers.append(1 if done == set(futures) else done)

        threads = [threading.Thread(target=ask, args=(k,)) for k in range(40)]
        for thread in threads:
            thread.start()
        db.gate.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert answers == [1] * 40


def test_a_future_keeps_no_events():
    db = Fake(ts="timestamp", s="string")
    with appender(db) as app:
        kept = [app.append(ts=1, s="x" * 1_000_000) for _ in range(10)]
        app.flush()
        wait_until(lambda: not kept[0]._pending.rows)


# -- asyncio --------------------------------------------------------------------------------------------


def run(test: Any, db: AioFake, linger_ms: float = 0, max_events: int = 10_000) -> None:
    async def main() -> None:
        async with kivi.aio.appender.Appender(db, AppenderArguments("ev", linger_ms, max_events)) as app:
            await asyncio.wait_for(test(app), 60)

    asyncio.run(main())
    gc.collect()  # a future whose exception nobody asked for would say so here


def test_an_awaitable_of_asyncio_is_one_like_any_other():
    db = AioFake()
    db.gate.clear()

    async def test(app: Any) -> None:
        futures = [app.append(ts=1, who=1, i=i) for i in range(10)]
        first = futures[0]
        heard: list[Any] = []
        first.add_done_callback(heard.append)
        assert not first.done() and asyncio.isfuture(first)
        with pytest.raises(asyncio.InvalidStateError):
            first.result()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(first), 0.01)
        waiters = [asyncio.ensure_future(asyncio.wait([first])) for _ in range(3)]
        await asyncio.sleep(0)
        waiters[0].cancel()
        futures[1].cancel()  # nobody waits for it any more; the event is on its way
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(futures[2], 0.01)
        db.gate.set()
        assert await asyncio.gather(first, *futures[3:]) == [1] * 8
        assert await first == await first == first.result() == 1 and first.exception() is None
        assert [await waiter for waiter in waiters[1:]] == [({first}, set())] * 2
        assert waiters[0].cancelled() and futures[1].cancelled() and futures[2].cancelled()
        assert heard == [first]
        done, _ = await asyncio.wait([app.append(ts=1, who=1, i=10), app.append(ts=1, who=1, i=11)])
        assert {future.result() for future in done} == {2}

    run(test, db)
    assert [row["i"] for row in db.rows()] == list(range(12))


def test_asyncio_order_failures_and_flush():
    db = AioFake()
    db.failing = {2}

    async def test(app: Any) -> None:
        futures = [app.append(ts=1, who=1, i=i) for i in range(35)]
        with pytest.raises(SchemaError):
            app.append(ts=1, i=True)
        await app.flush()
        found = await asyncio.gather(*futures, return_exceptions=True)
        assert found[:10] == [1] * 10 and found[20:] == [3] * 10 + [4] * 5
        assert {type(error) for error in found[10:20]} == {Unavailable}
        last = app.append(ts=1, who=1, i=35)
        await app.close()
        assert await last == 5
        with pytest.raises(Unavailable, match="closed"):
            app.append(ts=1, who=1, i=1)

    run(test, db, linger_ms=60_000, max_events=10)
    assert [row["i"] for row in db.rows()] == list(range(36))


def test_asyncio_a_closing_that_is_cancelled_takes_no_outcome_from_what_was_appended():
    """Nor does one whose time is up: it waits no longer, and the batches go on."""
    db = AioFake()
    db.gate.clear()

    async def test(app: Any) -> None:
        futures = [app.append(ts=1, who=1, i=i) for i in range(25)]
        await until(lambda: db.batches)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(app.close(), 0.01)
        with pytest.raises(Unavailable, match="closed"):
            app.append(ts=1, who=1, i=25)
        db.gate.set()
        assert await asyncio.gather(*futures) == [1] * 10 + [2] * 10 + [3] * 5
        assert [len({future.token for future in futures[i : i + 10]} - {None}) for i in (0, 10, 20)] == [1] * 3
        await app.close()

    run(test, db, linger_ms=60_000, max_events=10)
    assert [row["i"] for row in db.rows()] == list(range(25))


@pytest.mark.parametrize("each", [False, True])
def test_asyncio_an_appender_whose_tasks_are_cancelled_settles_every_future(each):
    """As a program does that ends: what was sent has its token, and what was not is refused."""
    db = AioFake()
    db.gate.clear()

    async def main() -> list[Any]:
        wanted = AppenderArguments("ev", 60_000, 10, each=each)
        app = await kivi.aio.appender.Appender(db, wanted).__aenter__()
        futures = [app.append(ts=1, who=1, i=i) for i in range(25)]
        await until(lambda: db.batches)
        flushing = asyncio.create_task(app.flush())
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task(), flushing}:
            task.cancel()
        await asyncio.wait_for(flushing, 60)
        with pytest.raises(Unavailable, match="closed"):
            app.append(ts=1, who=1, i=25)
        return [(future.token, future.place, future.exception()) for future in futures]

    found = asyncio.run(main())
    token = found[0][0]
    for i, (told, place, error) in enumerate(found[:10]):
        assert isinstance(error, CommitUnknown)
        assert told == error.token == token and place == error.place == (i if each else None)
    for told, _, error in found[10:]:
        assert type(error) is Unavailable and told not in (None, token)
    assert len(db.batches) == 1


def test_asyncio_refuses_beyond_its_bounds_until_there_is_room():
    db = AioFake()
    db.gate.clear()

    async def test(app: Any) -> None:
        futures = [app.append(ts=1, who=1, i=i) for i in range(EVENTS_BUFFERED_MAX)]
        with pytest.raises(ResourceExhausted, match="100,000 events"):
            app.append(ts=1, who=1, i=1)
        db.gate.set()
        await app.room()
        futures.append(app.append(ts=1, who=1, i=1))
        await asyncio.gather(*futures)

    run(test, db)
    assert len(db.rows()) == EVENTS_BUFFERED_MAX + 1


def test_asyncio_refuses_beyond_its_bytes():
    db = AioFake(ts="timestamp", s="string")
    db.gate.clear()

    async def test(app: Any) -> None:
        count = 0
        with pytest.raises(ResourceExhausted, match="67,108,864 bytes"):
            while True:
                app.append(ts=1, s="x" * 1_000_000)
                count += 1
        assert BYTES_BUFFERED_MAX <= count * 1_000_000 <= BYTES_BUFFERED_MAX + BATCH_BYTES
        db.gate.set()
        await app.room()
        await app.append(ts=1, s="")

    run(test, db)
    assert all(batch.nbytes <= BATCH_BYTES + 1_000_000 for batch in db.batches)


def test_asyncio_before_it_is_entered():
    app = kivi.aio.appender.Appender(AioFake(), AppenderArguments("ev", 5, 100))
    with pytest.raises(Unavailable, match="closed"):
        app.append(ts=1)
