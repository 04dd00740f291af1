"""Subscriptions of a client to a cluster: spread over its nodes, matched by shard, and one stream for who asked.

Three real servers over a real nats-server: two of them hold the low half of the shards, one the high half.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import kivi
import kivi.aio
from kivi.encoding.shards import shard_of
from kivi.log.shards import SHARDS
from kivi.model.declarations import event_table_schema
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.story

COLUMNS = {"ts": "timestamp", "user": "string", "us": "int64"}
EVENTS = event_table_schema("calls", "ts", COLUMNS, shard_by=["user"])
USERS = [f"user {i}" for i in range(40)]
LOW, HIGH = (next(user for user in USERS if (shard_of(EVENTS, (user,), SHARDS) < 32) is low) for low in (True, False))
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Which hold the shards 0-31, 0-31 and 32-63."""
    require("nats-server")
    path = tmp_path_factory.mktemp("grid")
    with contextlib.ExitStack() as opened:
        nats = opened.enter_context(NatsCluster(path, 1))
        how = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB")
        high = opened.enter_context(ServerProcess(path / "high", *how))
        with high.connect() as db:
            db.create_table("names", key={"id": "int64"}, columns={"name": "string"})
            db.create_event_table("calls", event_time="ts", columns=COLUMNS, shard_by=["user"])
            measures = {"us": kivi.sum("us"), "n": kivi.count()}
            db.create_aggregate("sums", source="calls", group_by=["user"], measures=measures)
            db.append("calls", [{"ts": 0, "user": user, "us": i} for i, user in enumerate(USERS[:20])])
            for name in ("low 0", "low 1"):
                db.checkpoint(path / name)
        low = [
            opened.enter_context(ServerProcess(path / name, *how, "--shards", "0-31")) for name in ("low 0", "low 1")
        ]
        high.stop()
        high.arguments += ["--shards", "32-63"]
        high.start()
        nodes = [*low, high]
        for node in nodes:
            with node.connect() as db:
                wanted = {(one.endpoint, one.arguments[-1]) for one in nodes}
                wait_until(partial(knows, db, wanted), reason=partial(told_of, db))
        yield nodes


def told_of(db: kivi.client.Database) -> set[tuple[str, str]]:
    return {(one["address"], one["shards"]) for one in db.cluster_status()["nodes"]}


def knows(db: kivi.client.Database, wanted: set[tuple[str, str]]) -> bool:
    return told_of(db) >= wanted


def everywhere(nodes: list[ServerProcess]) -> str:
    return ",".join(node.endpoint for node in nodes)


def counts(nodes: list[ServerProcess]) -> list[int]:
    """How many subscriptions each node has."""
    found = []
    for node in nodes:
        with node.connect() as db:
            found.append(int(db.stats()["subscriptions"]))
    return found


def test_they_are_spread_over_nodes_and_go_on_at_others_where_one_is_lost(nodes: list[ServerProcess]) -> None:
    with kivi.connect(everywhere(nodes)) as db, contextlib.ExitStack() as opened:
        lives = [opened.enter_context(db.subscribe("names", prefix=(i,), interval_ms=0)) for i in range(12)]
        assert [live.rows for live in lives if live.next(PATIENCE_S)] == [[]] * 12
        assert counts(nodes) == [4, 4, 4]
        nodes[0].kill()
        with db.transaction() as tx:
            for i in range(12):
                tx.put("names", (i,), name=f"name {i}")
        for i, live in enumerate(lives):
            assert live.next(PATIENCE_S) is not None
            assert (live.rows, live.ts >= (tx.commit_ts or 0)) == ([{"id": i, "name": f"name {i}"}], True)
        assert counts(nodes[1:]) == [6, 6]
        nodes[0].start()


def test_one_of_a_shard_is_placed_where_that_is(nodes: list[ServerProcess]) -> None:
    async def over_asyncio() -> None:
        async with await kivi.aio.connect(nodes[0].endpoint) as db, db.subscribe("sums", prefix=(HIGH,)) as live:
            assert await live.next(PATIENCE_S)
            assert [row["n"] for row in live.rows] == [1]

    with nodes[0].connect() as db:
        for user in (LOW, HIGH):
            with (
                db.subscribe("sums", prefix=(user,)) as live,
                db.subscribe("calls", where=kivi.col("user") == user) as events,
            ):
                assert live.next(PATIENCE_S) is not None
                assert [row["user"] for row in live.rows] == [user]
                update = events.next(PATIENCE_S)
                assert update is not None
                assert [change.row["user"] for change in update.changes if change.row] == [user]
        asyncio.run(over_asyncio())


class Writers:
    """Two threads that append until this is left, each by another node; what they were acknowledged."""

    def __init__(self, nodes: list[ServerProcess]) -> None:
        self.endpoints = everywhere(nodes)
        self.appended: list[tuple[int, list[dict[str, Any]]]] = []
        self.failures: list[BaseException] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in (1, 2)]

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        try:
            with kivi.connect(self.endpoints, timeout=PATIENCE_S) as db:
                while not self._ended.is_set():
                    events = [
                        {"ts": 0, "user": rng.choice(USERS), "us": rng.randrange(-50, 100)}
                        for _ in range(rng.randrange(1, 4))
                    ]
                    self.appended.append((db.append("calls", events), events))
                    time.sleep(rng.choice((0.0, 0.002, 0.02)))
        except BaseException as error:
            self.failures.append(error)

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        assert self.failures == []


class Seen:
    """The state after each update, in this process."""

    def __init__(self, live: Any, order_by: str, limit: int | None, offset: int) -> None:
        self.live, self.states = live, dict[int, list[dict[str, Any]]]()
        self._by, self._down = order_by.lstrip("-"), order_by.startswith("-")
        self._part = slice(offset, None if limit is None else offset + limit)

    def take(self) -> None:
        if self.live.next(PATIENCE_S) is not None:
            assert self.live.ts > max(self.states, default=-1)
            self.states[self.live.ts] = [dict(row) for row in self.live.rows]

    def check(self, appended: list[tuple[int, list[dict[str, Any]]]]) -> None:
        """Each is what the events give that were committed by then."""
        events = deque(sorted(appended, key=lambda each: each[0]))
        sums = dict[str, list[int]]()
        for ts, rows in sorted(self.states.items()):
            while events and events[0][0] <= ts:
                for event in events.popleft()[1]:
                    us, n = sums.get(event["user"], (0, 0))
                    sums[event["user"]] = [us + event["us"], n + 1]
            wanted: list[dict[str, Any]] = [{"user": user, "us": us, "n": n} for user, (us, n) in sorted(sums.items())]
            if self._by:
                wanted.sort(key=lambda row: -row[self._by] if self._down else row[self._by])
            assert rows == wanted[self._part], ts


def take_more(every: list[Seen]) -> None:
    before = [len(one.states) for one in every]
    while any(len(one.states) < count + 8 for one, count in zip(every, before, strict=True)):
        for one in every:
            one.take()


FIRST = [(0, [{"user": user, "us": i} for i, user in enumerate(USERS[:20])])]


def test_a_window_over_shards_of_several_nodes_is_exact_while_one_is_killed(nodes: list[ServerProcess]) -> None:
    """Every update is a state of the log's replay, nothing is lost or doubled, and it goes on at the other node."""
    with kivi.connect(everywhere(nodes), timeout=PATIENCE_S) as db, contextlib.ExitStack() as opened:
        every = []
        for order_by, limit, offset in (("-us", 7, 2), ("us", 5, 0), ("", 6, 1), ("", None, 0)):
            wanted: dict[str, Any] = {"order_by": order_by or (), "limit": limit, "offset": offset}
            wanted["interval_ms"] = 0 if limit else 50
            every.append(Seen(opened.enter_context(db.subscribe("sums", **wanted)), order_by, limit, offset))
        with Writers(nodes) as writers:
            take_more(every)
            low = nodes[0] if counts(nodes)[0] else nodes[1]
            low.kill()
            take_more(every)  # of the other one that holds its shards
            nodes[2].kill()
            nodes[2].start()  # nobody else holds these
            take_more(every)
            low.start()
        last = max(ts for ts, _ in writers.appended)
        for one in every:
            while one.live.ts < last:
                one.live.next(0.1)
            one.states[one.live.ts] = [dict(row) for row in one.live.rows]
            one.check([*FIRST, *writers.appended])
