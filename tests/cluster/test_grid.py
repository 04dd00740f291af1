"""Subscriptions of a client to a cluster: spread over its nodes, matched by shard, and one stream for who asked.

Three real servers over a real nats-server: two of them hold the low half of the shards, one the high half.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

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
        with kivi.connect(high.endpoint) as db:
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
            with kivi.connect(node.endpoint) as db:
                wanted = {(one.endpoint, one.arguments[-1]) for one in nodes}
                wait_until(lambda db=db: told_of(db) >= wanted, reason=lambda db=db: told_of(db))  # type: ignore[misc]
        yield nodes


def told_of(db: kivi.client.Database) -> set[tuple[str, str]]:
    return {(one["address"], one["shards"]) for one in db.cluster_status()["nodes"]}


def everywhere(nodes: list[ServerProcess]) -> str:
    return ",".join(node.endpoint for node in nodes)


def counts(nodes: list[ServerProcess]) -> list[int]:
    """How many subscriptions each node has."""
    found = []
    for node in nodes:
        with kivi.connect(node.endpoint) as db:
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
        async with await kivi.aio.connect(nodes[0].endpoint) as db:
            async with db.subscribe("sums", prefix=(HIGH,)) as live:
                assert await live.next(PATIENCE_S)
                assert [row["n"] for row in live.rows] == [1]

    with kivi.connect(nodes[0].endpoint) as db:
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
