"""A read that a node cannot answer goes on where it says; and a snapshot has one timestamp, whoever reads it (R1)."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

import kivi
import kivi.aio
from kivi.api.arguments import GetArguments
from kivi.client.placing import Trail
from kivi.client.steps import Ask, Steps
from kivi.client.transaction import SharedSnapshotArguments, TransactionCore
from kivi.encoding.shards import shard_of
from kivi.log.shards import SHARDS
from kivi.model.declarations import event_table_schema
from tests.cluster.inprocess import BOUND_S, Loop, Served
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.waiting import until, wait_until

COLUMNS = {"ts": "timestamp", "user": "string", "n": "int64"}
EVENTS = event_table_schema("calls", "ts", COLUMNS, shard_by=["user"])
USER = next(user for user in map("user-{}".format, range(99)) if shard_of(EVENTS, (user,), SHARDS) < 32)
BOUND = dt.timedelta(seconds=BOUND_S)


class Cluster:
    """``one`` holds everything, ``part`` and ``two`` the same half of the shards."""

    def __init__(self, one: Served, two: Served, part: Served, loop: Loop) -> None:
        self.one, self.two, self.part, self.loop = one, two, part, loop
        self.nodes = (one, two, part)
        self.events = 0

    def append(self, by: Served | None = None) -> int:
        """One more event, by ``one``."""
        with kivi.connect((by or self.one).endpoint) as db:
            self.events += 1
            return db.append("calls", [{"ts": self.events, "user": USER, "n": 1}])

    def has_come(self, ts: int) -> None:
        for node in self.nodes:
            wait_until(partial(self._has, node, ts))

    @staticmethod
    def _has(node: Served, ts: int) -> bool:
        return node.node.store.watermark() >= ts


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require("nats-server")
    path = tmp_path_factory.mktemp("elsewhere")
    with contextlib.ExitStack() as opened:
        nats = opened.enter_context(NatsCluster(path, 1))
        loop = opened.enter_context(Loop())
        one = opened.enter_context(Served(path / "one", nats, loop))
        with one.connect() as db:
            db.create_event_table("calls", event_time="ts", columns=COLUMNS, shard_by=["user"])
            db.create_aggregate("totals", source="calls", group_by=["user"], measures={"n": kivi.count()})
            for name in ("two", "part"):
                db.checkpoint(path / name)
        two = opened.enter_context(Served(path / "two", nats, loop, "0-31"))
        part = opened.enter_context(Served(path / "part", nats, loop, "0-31"))
        cluster = Cluster(one, two, part, loop)
        wait_until(lambda: all(node.knows >= {each.endpoint for each in cluster.nodes} for node in cluster.nodes))
        yield cluster


@pytest.fixture
def cluster(made: Cluster) -> Cluster:
    """Nobody reads there any more: what the test before has closed is given back in its own time."""
    made.has_come(made.append())
    wait_until(lambda: not any(node.leases for node in made.nodes), reason=lambda: [node.leases for node in made.nodes])
    return made


def n_of(row: dict[str, Any] | None) -> int:
    assert row is not None
    return int(row["n"])


def counted(snap: Any) -> int:
    """By the node where the snapshot is: its user's events are there."""
    return n_of(snap.get("totals", (USER,)))


def listed(snap: Any) -> int:
    """By a node that holds all shards."""
    return len(list(snap.changes("calls", since=0)))


async def listed_by_tasks(snap: Any) -> int:
    return len([change async for change in snap.changes("calls", since=0)])


class Held:
    """Who asks first sees the last of so many answers to it only after ``go_on``, though it is ``there``."""

    def __init__(self, db: Any, answers: int = 1) -> None:
        self.there, self.go_on = threading.Event(), threading.Event()
        self._left, self._perform = answers, db._transport.perform
        self._thread: threading.Thread | None = None
        db._transport.perform = self._held

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *exc: object) -> None:
        self.go_on.set()

    def _held(self, effect: Any) -> Any:
        answer = self._perform(effect)
        if isinstance(effect, Ask) and self._thread in (None, threading.current_thread()):
            self._thread = threading.current_thread()
            self._left -= 1
            if not self._left:
                self.there.set()
                assert self.go_on.wait(60)
        return answer


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@contextlib.contextmanager
def one_is_ahead(cluster: Cluster) -> Iterator[None]:
    """Of ``part``, which another commit does not come to; it says that ``one`` has what it lacks."""
    holders = patch.object(cluster.part.node.store.shards, "holders", lambda shards: [cluster.one.endpoint])
    with holders, cluster.part.behind(cluster.one):
        cluster.append()
        yield


# -- one timestamp ------------------------------------------------------------------------------------


def test_a_snapshot_has_one_timestamp_for_all_threads(cluster: Cluster, threads: ThreadPoolExecutor) -> None:
    """Where the first answer is on its way, and another thread is refused by that node, which names another one."""
    with kivi.connect(cluster.part.endpoint, timeout=60) as db:
        db.get("totals", (USER,))
        with db.snapshot() as snap, Held(db) as held:
            first = threads.submit(counted, snap)
            assert held.there.wait(60)
            with one_is_ahead(cluster):
                db._core.timeout_s = 0.5
                waited = threads.submit(listed, snap).exception()  # for that answer, as long as it waits for any
                assert re.match(r"no answer from .* within 0.5 s", str(waited))
                db._core.timeout_s = 60
                second = threads.submit(listed, snap)
                held.go_on.set()
                assert {first.result(), second.result(), listed(snap)} == {cluster.events - 1}


def test_nobody_waits_for_a_thread_once_it_has_an_answer(cluster: Cluster, threads: ThreadPoolExecutor) -> None:
    """It may read on for long; and where the snapshot is then read, it is at that timestamp."""

    def at_length(core: TransactionCore) -> Steps[int]:
        yield from core.started()
        (row,) = yield from core.get_many(GetArguments("totals", [(USER,)]))
        return n_of(row)

    with kivi.connect(cluster.part.endpoint, timeout=60) as db:
        db.get("totals", (USER,))
        with Held(db, answers=2) as held, db.snapshot() as snap, one_is_ahead(cluster):
            first = threads.submit(snap._read, at_length)
            assert held.there.wait(60)
            found = {threads.submit(reads, snap).result(30) for reads in (listed, counted, listed)}
            assert not first.done()
            held.go_on.set()
            assert found == {first.result()[1]} == {cluster.events - 1}


def test_one_that_fails_before_it_has_an_answer_leaves_it_to_the_next(
    cluster: Cluster, threads: ThreadPoolExecutor
) -> None:
    with kivi.connect(cluster.part.endpoint, timeout=60) as db, db.snapshot() as snap:
        for _ in range(2):
            with pytest.raises(kivi.NotFound):
                snap.get("there is none", (1,))
        assert {threads.submit(reads, snap).result(30) for reads in (counted, listed)} == {cluster.events}


def test_threads_that_go_elsewhere_at_once_open_one_snapshot_there(
    cluster: Cluster, threads: ThreadPoolExecutor
) -> None:
    with cluster.part.connect() as db, one_is_ahead(cluster):
        both, at = threading.Barrier(2), SharedSnapshotArguments.at

        def found(*arguments: Any) -> Any:
            both.wait(60)
            return at(*arguments)

        with db.snapshot() as snap, patch.object(SharedSnapshotArguments, "at", staticmethod(found)):
            assert snap.ts
            each = [threads.submit(listed, snap) for _ in range(2)]
            assert {one.result() for one in each} == {cluster.events - 1}
            wait_until(lambda: cluster.one.leases == 1)
        wait_until(lambda: not cluster.one.leases)


def test_tasks_that_go_elsewhere_at_once_open_one_snapshot_there(cluster: Cluster) -> None:
    async def test() -> None:
        async with await kivi.aio.connect(cluster.part.endpoint) as db:
            both, other = asyncio.Barrier(2), db._other

            async def found(*arguments: Any) -> Any:
                there = await other(*arguments)
                await both.wait()
                return there

            async with db.snapshot() as snap:
                with patch.object(db, "_other", found):
                    assert [cluster.events - 1] * 2 == await asyncio.gather(*(listed_by_tasks(snap) for _ in range(2)))
                await until(lambda: cluster.one.leases == 1)
            await until(lambda: not cluster.one.leases)

    with one_is_ahead(cluster):
        cluster.loop.run(test())


def kept_for(node: Served) -> float:
    """How much longer each snapshot is kept there, of those that it is not for ever."""
    leases = node.node.store.snapshots.leases
    return min(lease.expires_at for lease in list(leases._open.values())) - leases.clock()


def test_a_snapshot_is_renewed_wherever_it_is_read(cluster: Cluster) -> None:
    async def test() -> None:
        async with await kivi.aio.connect(cluster.part.endpoint) as db, db.snapshot(ttl_s=60) as snap:
            assert await listed_by_tasks(snap) == cluster.events
            assert kept_for(cluster.one) < 100
            await snap.renew(3600)
            assert kept_for(cluster.part) > 1000
            await until(lambda: kept_for(cluster.one) > 1000)

    with cluster.part.connect() as db, db.snapshot(ttl_s=60) as snap:
        assert (counted(snap), listed(snap)) == (cluster.events,) * 2
        assert kept_for(cluster.one) < 100
        snap.renew(3600)
        assert kept_for(cluster.part) > 1000
        wait_until(lambda: kept_for(cluster.one) > 1000)
    wait_until(lambda: not cluster.one.leases)
    cluster.loop.run(test())


def held_elsewhere(db: Any, close: Callable[[], Any]) -> None:
    """It is closed when another node has been found for what it reads."""
    other = db._other

    def found(*arguments: Any) -> Any:
        there = other(*arguments)
        close()
        return there

    async def found_by_tasks(*arguments: Any) -> Any:
        there = await other(*arguments)
        await close()
        return there

    db._other = found_by_tasks if asyncio.iscoroutinefunction(other) else found


@pytest.mark.parametrize("is_read", [False, True], ids=["before its first answer", "later"])
def test_one_that_is_closed_on_its_way_elsewhere_leaves_nothing(cluster: Cluster, is_read: bool) -> None:
    def nothing_is_left() -> bool:
        return not any(node.leases for node in cluster.nodes)

    async def test() -> None:
        async with await kivi.aio.connect(cluster.part.endpoint) as db:
            snap = await db.snapshot().__aenter__()
            held_elsewhere(db, snap.close)
            with pytest.raises(kivi.InvalidArgument, match="has ended"):
                await listed_by_tasks(snap)
            await until(nothing_is_left)

    with cluster.part.connect() as db:
        snap = db.snapshot().__enter__()
        if is_read:
            assert snap.ts
        held_elsewhere(db, snap.close)
        with pytest.raises(kivi.InvalidArgument, match="has ended"):
            listed(snap)
        wait_until(nothing_is_left)
    cluster.loop.run(test())


def test_a_renewal_counts_where_it_is_first_read_after_that(cluster: Cluster) -> None:
    with cluster.part.connect() as db, db.snapshot(ttl_s=60) as snap:
        assert counted(snap) == cluster.events
        snap.renew(3600)
        snap.renew(60)
        assert listed(snap) == cluster.events
        assert min(map(kept_for, (cluster.part, cluster.one))) > 1000


@pytest.mark.parametrize("of", ["threads", "tasks"])
def test_a_node_that_is_gone_keeps_no_renewal_back(cluster: Cluster, of: str) -> None:
    async def test() -> None:
        async with await kivi.aio.connect(cluster.part.endpoint) as db, db.snapshot(ttl_s=60) as snap:
            assert await listed_by_tasks(snap) == cluster.events
            silence(snap)
            await asyncio.wait_for(snap.renew(3600), 10)
            assert kept_for(cluster.part) > 1000

    def silence(snap: Any) -> None:
        """Its session at the other node is a new one that never comes to be, as of a node that is gone."""
        (there,) = snap._others.values()
        transport = there.core.transport
        transport._current.end(kivi.Unavailable("the node is gone"))
        with socket.create_server(("localhost", 0)) as free:
            address = f"localhost:{free.getsockname()[1]}"
        transport.calls = transport._calls_at(address)
        there.begin()

    if of == "tasks":
        return cluster.loop.run(test())
    with kivi.connect(cluster.part.endpoint, timeout=30) as db, db.snapshot(ttl_s=60) as snap:
        assert listed(snap) == cluster.events
        silence(snap)
        began = time.monotonic()
        for _ in range(2):
            snap.renew(3600)
        assert time.monotonic() - began < 10
        assert kept_for(cluster.part) > 1000


@pytest.mark.parametrize("how", ["plain", "shared", "named"])
def test_a_node_that_is_behind_is_waited_for(cluster: Cluster, threads: ThreadPoolExecutor, how: str) -> None:
    """The connection is lost, and the node that is there then has not come to the snapshot's timestamp."""
    one, two = cluster.one, cluster.two
    with contextlib.ExitStack() as opened:
        db = opened.enter_context(kivi.connect(one.endpoint, timeout=60))
        behind = contextlib.ExitStack()
        behind.enter_context(two.behind(one))
        opened.enter_context(behind)
        cluster.append()
        lease = opened.enter_context(db.snapshot(shared=True)).lease if how == "named" else None
        with db.snapshot(shared=how == "shared", lease=lease) as snap:
            first = snap.ts, counted(snap)
            transport = db._transport
            transport.calls = transport._calls_at(two.endpoint)
            transport.open().end(kivi.Unavailable("cut by the test"))
            db._core.timeout_s = 0.5
            for _ in range(2):
                with pytest.raises(kivi.Unavailable):
                    counted(snap)
            db._core.timeout_s = 60
            later = threads.submit(counted, snap)
            time.sleep(0.2)
            assert not later.done()
            behind.close()
            assert (snap.ts, later.result(60)) == first == (snap.ts, cluster.events)


def test_a_table_that_a_snapshot_sees_is_waited_for(cluster: Cluster, threads: ThreadPoolExecutor) -> None:
    """Its node has not heard of the definition yet, and its client of nothing but the timestamp."""
    one, two = cluster.one, cluster.two
    with contextlib.ExitStack() as opened:
        db = opened.enter_context(one.connect())
        other = opened.enter_context(kivi.connect(two.endpoint, timeout=60))
        behind = opened.enter_context(contextlib.ExitStack())
        behind.enter_context(two.behind(one))
        db.create_table("later", key={"id": "int64"}, columns={"v": "int64"})
        with db.transaction() as tx:
            tx.put("later", (1,), v=7)
        with other.snapshot(min_snapshot=db.watermark()) as snap:
            found = threads.submit(snap.get, "later", (1,))
            time.sleep(0.2)
            assert not found.done()
            behind.close()
            assert found.result(60) == {"id": 1, "v": 7}
        db.drop("later")


def _followed(live: Any, ts: int) -> int:
    """What is told behind ``ts``."""
    with live:
        update = live.next(2)
        assert update is None or not update.reset
        assert live.ts >= ts
        return 0 if update is None else len(update.changes)


TOLD_OF: dict[str, Callable[[Any, int, int], int]] = {
    "events": lambda db, ts, n: _followed(db.subscribe("calls", since=ts, interval_ms=0), ts),
    "rows": lambda db, ts, n: _followed(
        db.subscribe("totals", since=ts, rows=[{"user": USER, "n": n}], interval_ms=0), ts
    ),
    "stored": lambda db, ts, n: int(db.store_subscriptions("calls", [{"name": "told of"}], since=ts) <= ts),
    "tail": lambda db, ts, n: db.tail_points("calls", since=ts).last - ts,
    "as of": lambda db, ts, n: _as_of(db, ts) - n,
}


def _as_of(db: Any, ts: int) -> int:
    with db.snapshot(as_of=ts) as snap:
        assert snap.ts == ts
        return counted(snap)


@pytest.mark.parametrize("how", TOLD_OF)
def test_a_timestamp_that_another_program_was_told_is_waited_for(
    cluster: Cluster, threads: ThreadPoolExecutor, how: str
) -> None:
    """It goes on from there by a node that has not come so far, and whose client has heard of nothing yet (C6)."""
    one, two = cluster.one, cluster.two
    with contextlib.ExitStack() as opened:
        db = opened.enter_context(kivi.connect(one.endpoint, timeout=60))
        behind = opened.enter_context(contextlib.ExitStack())
        behind.enter_context(one.behind(two))
        ts = cluster.append(two)
        later = threads.submit(TOLD_OF[how], db, ts, cluster.events)
        time.sleep(0.2)
        assert not later.done()
        behind.close()
        assert later.result(60) == 0


# -- machines that do not answer ----------------------------------------------------------------------


@contextlib.contextmanager
def deaf() -> Iterator[socket.socket]:
    """A machine that takes connections and says nothing."""
    with socket.create_server(("localhost", 0)) as listening:
        listening.settimeout(60)
        yield listening


def address_of(listening: socket.socket) -> str:
    return f"localhost:{listening.getsockname()[1]}"


def named(cluster: Cluster, *addresses: str) -> Any:
    """``part`` names those for what it does not hold."""
    return patch.object(cluster.part.node.store.shards, "holders", lambda shards: list(addresses))


def listed_anew(db: Any) -> int:
    with db.snapshot() as snap:
        return listed(snap)


@pytest.mark.story
def test_nobody_waits_for_a_machine_that_another_thread_is_sent_to(
    cluster: Cluster, threads: ThreadPoolExecutor
) -> None:
    with deaf() as gone, kivi.connect(cluster.part.endpoint, timeout=8) as db:
        with named(cluster, address_of(gone)):
            began = time.monotonic()
            first = threads.submit(listed_anew, db)
            accepted, _ = gone.accept()
        with accepted, named(cluster, cluster.one.endpoint):
            assert {threads.submit(listed_anew, db).result(60) for _ in range(2)} == {cluster.events}
            assert not first.done()
            with named(cluster, address_of(gone)):
                time.sleep(2)
                second, at = threads.submit(listed_anew, db), time.monotonic()
                for waiting, since in ((first, began), (second, at)):  # each has a time of its own
                    assert re.match("no answer from", str(waiting.exception(60)))
                    assert 8 <= time.monotonic() - since < 13


def test_no_task_waits_for_a_machine_that_another_is_sent_to(cluster: Cluster) -> None:
    async def listed_anew(db: Any) -> int:
        async with db.snapshot() as snap:
            return await listed_by_tasks(snap)

    async def test() -> None:
        with deaf() as gone:
            async with await kivi.aio.connect(cluster.part.endpoint, timeout=8) as db:
                with named(cluster, address_of(gone)):
                    first = asyncio.ensure_future(listed_anew(db))
                    accepted, _ = await asyncio.to_thread(gone.accept)
                with accepted, named(cluster, cluster.one.endpoint):
                    assert await listed_anew(db) == cluster.events
                    assert not first.done()
                    with pytest.raises(kivi.Unavailable, match="no answer from"):
                        await first

    cluster.loop.run(test())


@pytest.mark.story
def test_a_machine_that_does_not_answer_leaves_time_to_the_next(cluster: Cluster) -> None:
    """Whichever is tried first, which is left to chance."""

    async def by_tasks() -> None:
        async with await kivi.aio.connect(cluster.part.endpoint, timeout=8) as db, db.snapshot() as snap:
            assert await listed_by_tasks(snap) == cluster.events

    with deaf() as gone, named(cluster, address_of(gone), cluster.one.endpoint):
        for _ in range(3):
            with kivi.connect(cluster.part.endpoint, timeout=8) as db:
                assert listed_anew(db) == cluster.events
            cluster.loop.run(by_tasks())


def test_a_client_that_is_closed_meanwhile_leaves_no_other(cluster: Cluster, threads: ThreadPoolExecutor) -> None:
    with deaf() as gone, kivi.connect(cluster.part.endpoint, timeout=30) as db, named(cluster, address_of(gone)):
        waiting = threads.submit(listed_anew, db)
        accepted, _ = gone.accept()
        with accepted:
            db.close()
            assert isinstance(waiting.exception(10), kivi.Unavailable)
            assert not any(other._transport.is_reached for other in db._others.values())


# -- from node to node --------------------------------------------------------------------------------


def taken(db: Any, how: str) -> int:
    """By a read that is bounded."""
    if how == "get":
        return n_of(db.get("totals", (USER,), max_staleness=BOUND))
    with db.snapshot(max_staleness=BOUND, shared=how == "shared") as snap:
        assert bool(snap.lease) is (how == "shared")
        ts, n = snap.ts, counted(snap)
        assert (snap.ts, listed(snap)) == (ts, n)
        return n


async def taken_by_tasks(endpoint: str, how: str) -> int:
    async with await kivi.aio.connect(endpoint) as db:
        if how == "get":
            return n_of(await db.get("totals", (USER,), max_staleness=BOUND))
        async with db.snapshot(max_staleness=BOUND, shared=how == "shared") as snap:
            assert bool(snap.lease) is (how == "shared")
            ts, n = snap.ts, n_of(await snap.get("totals", (USER,)))
            assert (snap.ts, await listed_by_tasks(snap)) == (ts, n)
            return n


@pytest.mark.parametrize("how", ["get", "snapshot", "shared"])
def test_a_node_that_is_named_may_name_another_one(cluster: Cluster, how: str) -> None:
    part, two, one = cluster.part, cluster.two, cluster.one
    with part.connect() as db, part.behind(two), two.behind(one), one.proven():
        ts = cluster.append()
        assert taken(db, how) == cluster.events
        assert db._core.seen_ts >= ts, "what it has seen is not unseen at its own node (R17)"
        assert cluster.loop.run(taken_by_tasks(part.endpoint, how)) == cluster.events


@pytest.mark.parametrize("how", ["get", "snapshot", "shared"])
def test_nodes_that_name_one_another_are_asked_once_each(cluster: Cluster, how: str) -> None:
    part, two = cluster.part, cluster.two
    said = rf"may be \d+\.\d s old, .*; asked in turn: {part.endpoint}, {two.endpoint}, and it names none that was not"
    with kivi.connect(part.endpoint, timeout=10) as db, part.behind(two), two.behind(part):
        cluster.append()
        with pytest.raises(kivi.Unavailable, match=said):
            taken(db, how)
        with pytest.raises(kivi.Unavailable, match=said):
            cluster.loop.run(taken_by_tasks(part.endpoint, how))


def test_no_node_is_asked_once_the_time_is_up(cluster: Cluster) -> None:
    refused = kivi.Unavailable("ask another", addresses=[cluster.one.endpoint])
    trail = Trail(cluster.part.endpoint, time.monotonic())
    with pytest.raises(kivi.Unavailable, match=f"asked in turn: {cluster.part.endpoint}, and the time is up"):
        trail.named_by(refused)


def test_a_subscription_goes_from_node_to_node(cluster: Cluster) -> None:
    """Two nodes hold a part of the shards, and the first one takes the second one for one that holds all."""
    part, two = cluster.part, cluster.two
    there = patch.object(part.node.store.shards, "holders", lambda shards: [two.endpoint])
    with there, part.connect() as db:
        with db.subscribe("calls", since=0) as live:
            update = live.next(30)
            assert update is not None and len(update.changes) > 0
        with db.snapshot() as snap:
            assert (counted(snap), listed(snap)) == (cluster.events,) * 2
        asked = f"asked in turn: {part.endpoint}, {two.endpoint}, and it names none that was not"
        with patch.object(two.node.store.shards, "holders", lambda shards: [part.endpoint]):
            with pytest.raises(kivi.Unavailable, match=asked), db.snapshot() as snap:
                listed(snap)
            db._core.timeout_s = 2  # for so long a subscription is tried again
            with pytest.raises(kivi.Unavailable, match=asked):
                db.subscribe("calls", since=0)
