"""Clients of a cluster whose nodes hold a part of the shards each: a read goes where its rows are."""

from __future__ import annotations

import asyncio
import contextlib
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
LOW, HIGH = (
    next(user for user in map("user {}".format, range(99)) if (shard_of(EVENTS, (user,), SHARDS) < 32) is low)
    for low in (True, False)
)


def test_a_read_goes_where_its_rows_are(tmp_path: Path) -> None:
    require("nats-server")
    with contextlib.ExitStack() as opened:
        nats = opened.enter_context(NatsCluster(tmp_path, 1))
        how = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB")
        high = opened.enter_context(ServerProcess(tmp_path / "high", *how))
        with kivi.connect(high.endpoint) as db:
            db.create_event_table("calls", event_time="ts", columns=COLUMNS, shard_by=["user"])
            db.create_aggregate("sums", source="calls", group_by=["user"], measures={"us": kivi.sum("us")})
            db.append("calls", [{"ts": i, "user": user, "us": i} for i in range(100) for user in (LOW, HIGH)])
            db.checkpoint(tmp_path / "low")
        low = opened.enter_context(ServerProcess(tmp_path / "low", *how, "--shards", "0-31"))
        high.stop()
        high.arguments += ["--shards", "32-63"]
        high.start()
        with kivi.connect(low.endpoint) as db:
            wait_until(
                lambda: {one["address"] for one in db.cluster_status()["nodes"]} >= {low.endpoint, high.endpoint}
            )
            db.append("calls", [{"ts": 100, "user": user, "us": 50} for user in (LOW, HIGH)])
            assert [row and row["us"] for row in db.get_many("sums", [(HIGH,)])] == [5_000]
            for first, second in ((LOW, HIGH), (HIGH, LOW)):
                with db.snapshot() as snap:
                    row = snap.get("sums", (first,))
                    assert row is not None
                    assert row["us"] == 5_000
                    ts = snap.ts
                    events = list(snap.scan("calls", where=kivi.col("user") == second))
                    assert sum(event["us"] for event in events) == 5_000
                    assert len(events) == len(snap.to_arrow("calls", where=kivi.col("user") == first))
                    for user in (first, second):
                        (asked,) = snap.query("calls", measures={"us": kivi.sum("us")}, where=kivi.col("user") == user)
                        (rolled,) = snap.rollup("sums", prefix=(user,))
                        assert asked["us"] == rolled["us"] == 5_000
                    assert snap.ts == ts
                    with pytest.raises(kivi.Unavailable, match="there is none"):
                        list(snap.scan("sums"))
            with db.snapshot(shared=True) as snap:
                db.append("calls", [{"ts": 0, "user": user, "us": 7} for user in (LOW, HIGH)])
                for user in (LOW, HIGH):
                    row = snap.get("sums", (user,))
                    assert row is not None
                    assert row["us"] == 5_000, "every node keeps its timestamp"
                    with db.snapshot(lease=snap.lease) as again:
                        assert again.get("sums", (user,)) == row
            db.append("calls", [{"ts": 0, "user": user, "us": -7} for user in (LOW, HIGH)])
            with db.transaction() as tx, pytest.raises(kivi.Unavailable, match="ask a node that holds them"):
                tx.get("sums", (HIGH,))
        asyncio.run(over_asyncio(low.endpoint))


async def over_asyncio(endpoint: str) -> None:
    async with await kivi.aio.connect(endpoint) as db:
        assert [row and row["us"] for row in await db.get_many("sums", [(HIGH,)])] == [5_000]
        row = await db.get("sums", (HIGH,))
        assert row is not None
        async with db.snapshot() as snap:
            events = [event async for event in snap.scan("calls", where=kivi.col("user") == HIGH)]
            assert sum(event["us"] for event in events) == 5_000
            row = await snap.get("sums", (LOW,))
            assert row is not None
            assert row["us"] == 5_000
            (rolled,) = await snap.rollup("sums", prefix=(HIGH,))
            assert rolled["us"] == 5_000
            assert len(await snap.to_arrow("calls", where=kivi.col("user") == LOW)) == len(events)
