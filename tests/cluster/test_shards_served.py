"""Clients of a cluster whose nodes hold a part of the shards each: any node answers, with what others hold."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
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
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.story

COLUMNS = {"ts": "timestamp", "user": "string", "us": "int64"}
EVENTS = event_table_schema("calls", "ts", COLUMNS, shard_by=["user"])
LOW, HIGH = (
    next(user for user in map("user-{}".format, range(99)) if (shard_of(EVENTS, (user,), SHARDS) < 32) is low)
    for low in (True, False)
)


def test_a_read_goes_where_its_rows_are(tmp_path: Path) -> None:
    require("nats-server")
    with contextlib.ExitStack() as opened:
        nats = opened.enter_context(NatsCluster(tmp_path, 1))
        how = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB")
        high = opened.enter_context(ServerProcess(tmp_path / "high", *how))
        with high.connect() as db:
            db.create_event_table("calls", event_time="ts", columns=COLUMNS, shard_by=["user"])
            db.create_aggregate("sums", source="calls", group_by=["user"], measures={"us": kivi.sum("us")})
            db.append("calls", [{"ts": i, "user": user, "us": i} for i in range(100) for user in (LOW, HIGH)])
            db.checkpoint(tmp_path / "low")
        low = opened.enter_context(ServerProcess(tmp_path / "low", *how, "--shards", "0-31"))
        high.stop()
        high.arguments += ["--shards", "32-63"]
        high.start()
        with low.connect() as db:
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
                    assert sorted(row["user"] for row in snap.scan("sums")) == sorted((LOW, HIGH))
            with db.snapshot(shared=True) as snap:
                db.append("calls", [{"ts": 0, "user": user, "us": 7} for user in (LOW, HIGH)])
                for user in (LOW, HIGH):
                    row = snap.get("sums", (user,))
                    assert row is not None
                    assert row["us"] == 5_000, "every node keeps its timestamp"
                    with db.snapshot(lease=snap.lease) as again:
                        assert again.get("sums", (user,)) == row
            db.append("calls", [{"ts": 0, "user": user, "us": -7} for user in (LOW, HIGH)])
            with db.transaction() as tx:
                tx.append("calls", [{"ts": 0, "user": user, "us": 9} for user in (LOW, HIGH)])
                for user in (LOW, HIGH):
                    row = tx.get("sums", (user,))
                    assert row is not None
                    assert row["us"] == 5_009, "its own writes lie over what came from elsewhere"
                assert len(list(tx.scan("calls"))) == 208
                tx.rollback()
        asyncio.run(over_asyncio(low.endpoint))


USERS = [f"user {i}" for i in range(60)]
HELD = {"a": "0-41", "b": "22-63", "c": "0-21,42-63"}


def everything(db: Any, shared: Any) -> list[Any]:
    """All that the shared snapshot says of the tables in each way of reading, at a node that may have to hear of it."""
    with db.snapshot(lease=shared.lease, min_snapshot=shared.ts) as snap:
        return [
            snap.ts,
            list(snap.scan("calls")),
            list(snap.scan("calls", reverse=True, limit=70, columns=["user", "us"])),
            list(snap.scan("calls", where=kivi.col("us") > 90, order_by=["us", "user"], limit=9)),
            list(snap.scan("sums")),
            list(snap.scan("sums", reverse=True, limit=7)),
            list(snap.scan("sums", start=("user 3",), end=("user 5",), where=kivi.col("us") > 0)),
            snap.get_many("sums", [(user,) for user in USERS]),
            list(snap.rollup("sums", by=[])),
            list(snap.rollup("sums", prefix=("user 7",))),
            list(snap.query("calls", group_by=["user"], measures=MEASURES)),
            list(snap.query("calls", measures=MEASURES, where=kivi.col("us") < 50)),
            snap.sql("SELECT user, sum(us) AS us FROM calls GROUP BY user ORDER BY user").to_pylist(),
            snap.sql("SELECT count(*) AS n, sum(us) AS us FROM sums").to_pylist(),
            list(snap.match("calls", RISES)),
        ]


RISES = kivi.pattern(
    "A B",
    partition_by=["user"],
    define={"A": kivi.col("us") == 0, "B": kivi.col("us") == kivi.prev("us") + 1},
    measures={"ends": kivi.last("us")},
)
MEASURES = {"n": kivi.count(), "us": kivi.sum("us"), "mean": kivi.avg(kivi.col("us") / 7), "last": kivi.last("us")}


def test_any_node_answers_for_all_of_which_none_holds_all(tmp_path: Path) -> None:
    require("nats-server")
    with contextlib.ExitStack() as opened:
        nats = opened.enter_context(NatsCluster(tmp_path, 1))
        how = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB")
        nodes = {"a": opened.enter_context(ServerProcess(tmp_path / "a", *how))}
        with kivi.connect(nodes["a"].endpoint) as db:
            db.create_event_table("calls", event_time="ts", columns=COLUMNS, shard_by=["user"])
            db.create_aggregate("sums", source="calls", group_by=["user"], measures=MEASURES)
            for other in ("b", "c"):
                db.checkpoint(tmp_path / other)
        for other in ("b", "c"):
            nodes[other] = opened.enter_context(ServerProcess(tmp_path / other, *how, "--shards", HELD[other]))
        nodes["a"].stop()
        nodes["a"].arguments += ["--shards", HELD["a"]]
        nodes["a"].start()
        at_all = [opened.enter_context(kivi.connect(node.endpoint, timeout=PATIENCE_S)) for node in nodes.values()]
        for i in range(8):  # by any, in commits that are cut and in such that are not
            users = USERS if i % 2 else USERS[i : i + 7]
            at_all[i % 3].append(
                "calls", [{"ts": i * 100 + j, "user": u, "us": j} for u in users for j in range(3 * i)]
            )
        snap = opened.enter_context(at_all[0].snapshot(shared=True, min_snapshot=max(db.watermark() for db in at_all)))
        answers = [everything(db, snap) for db in at_all]
        assert len(answers[0][1]) == 3_132
        assert all(answer == answers[0] for answer in answers)
        nodes["c"].kill()
        at_all[1].append("calls", [{"ts": 1, "user": user, "us": 1_000} for user in USERS])
        assert [everything(db, snap) for db in at_all[:2]] == answers[:2]
        with at_all[0].snapshot(min_snapshot=at_all[1].watermark()) as newer:
            (row,) = newer.query("calls", measures={"us": kivi.sum("us")}, where=kivi.col("us") == 1_000)
            assert row["us"] == 60_000
        nodes["b"].kill()
        with pytest.raises(kivi.Unavailable, match="no other node"), at_all[0].snapshot() as alone:
            list(alone.scan("sums"))


def test_a_token_that_is_bound_to_rows_reads_those_of_all_nodes_and_no_others(tmp_path: Path) -> None:
    require("nats-server")
    root, some, own = "root-token-0123456789", "some-token-0123456789", "own-token-0123456789"
    (tmp_path / "tokens").write_text(f"{root} admin\n{some} reader rows=us:5\n{own} reader rows=user:{HIGH}\n")
    with contextlib.ExitStack() as opened:
        nats = opened.enter_context(NatsCluster(tmp_path, 1))
        cluster = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB")
        how = (*cluster, "--token-file", str(tmp_path / "tokens"))
        high = opened.enter_context(ServerProcess(tmp_path / "high", *how))
        with kivi.connect(high.endpoint, access_token=root) as db:
            db.create_event_table("calls", event_time="ts", columns=COLUMNS, shard_by=["user"])
            db.create_aggregate("sums", source="calls", group_by=["user"], measures={"us": kivi.sum("us")})
            db.append("calls", [{"ts": i, "user": user, "us": i} for i in range(10) for user in (LOW, HIGH)])
            db.checkpoint(tmp_path / "low")
        low = opened.enter_context(ServerProcess(tmp_path / "low", *how, "--shards", "0-31"))
        high.stop()
        high.arguments += ["--shards", "32-63"]
        high.start()
        for node in (low, high):
            with kivi.connect(node.endpoint, access_token=some) as db, db.snapshot() as snap:
                assert sorted((row["user"], row["us"]) for row in snap.scan("calls")) == [(LOW, 5), (HIGH, 5)]
                (counted,) = snap.query("calls", measures={"n": kivi.count()}, where=kivi.col("us") != 5)
                assert counted["n"] == 0
                for refused in (lambda: list(snap.scan("sums")), db.stats, db.cluster_status):
                    with pytest.raises(kivi.PermissionDenied):
                        refused()
            with kivi.connect(node.endpoint, access_token=own) as db, db.snapshot() as snap:
                assert [*snap.scan("sums")] == [{"user": HIGH, "us": 45}]
                assert db.get_many("sums", [(HIGH,), (LOW,)]) == [{"user": HIGH, "us": 45}, None]
                assert len(list(snap.scan("calls"))) == 10


def test_alerts_and_matches_where_no_node_has_all_shards(tmp_path: Path) -> None:
    """Alerts of other tables go on, and of a sharded one it is said what is missing. Matches are told by any node."""
    require("nats-server")
    with contextlib.ExitStack() as opened:
        nats = opened.enter_context(NatsCluster(tmp_path, 1))
        how = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB")
        high = opened.enter_context(ServerProcess(tmp_path / "high", *how))
        with high.connect() as db:
            db.create_event_table("calls", event_time="ts", columns=COLUMNS, shard_by=["user"])
            db.create_event_table("plain", event_time="ts", columns=COLUMNS)
            for of in ("calls", "plain"):
                db.create_aggregate(f"{of}_1h", source=of, group_by=["user", kivi.time_slot("ts", "1h")],
                                    measures={"n": kivi.count()})  # fmt: skip
            db.checkpoint(tmp_path / "low")
            db.checkpoint(tmp_path / "all")
        low = opened.enter_context(ServerProcess(tmp_path / "low", *how, "--shards", "0-31"))
        high.stop()
        high.arguments += ["--shards", "32-63"]
        high.start()
        low_db, high_db = (opened.enter_context(node.connect()) for node in (low, high))
        for of in ("calls", "plain"):
            low_db.create_alert(of, on=f"{of}_1h", where=kivi.col("n") > 0)

        def errors() -> dict[str, str | None]:
            return {one["name"]: one["error"] for one in low_db.alerts()}

        across = kivi.pattern("A B", within="1m", measures={"us": kivi.last("us")})
        with (
            kivi.connect(low.endpoint, timeout=5.0) as db,
            pytest.raises(kivi.Unavailable, match="may have rows of the shards"),
        ):
            db.subscribe_matches("calls", across, since=0)
        wanted = {"user": "ada", "name": "low", "where": kivi.col("user") == LOW}
        with pytest.raises(kivi.Unavailable, match="ask a node that holds them: there is none, start one"):
            low_db.store_subscriptions("calls", [wanted])
        with pytest.raises(kivi.InvalidArgument, match="in a cluster its events are not retracted"):
            low_db.run(lambda tx: tx.retract("calls"))
        wait_until(lambda: errors()["calls"] is not None)
        assert "a node that holds all shards, of which none was heard lately" in str(errors()["calls"])
        follow_by_user(low_db, high_db)
        now_us = time.time_ns() // 1_000
        for one in ("calls", "plain"):  # in a slot that is over, and in the one that will be
            times = (now_us - 3_600_000_000, now_us)
            low_db.append(one, [{"ts": ts, "user": user, "us": 0} for ts in times for user in (LOW, HIGH)])
        wait_until(lambda: any(one["state"] == "firing" for one in high_db.alerts()))
        assert {one["name"] for one in high_db.alerts() if one["state"] == "firing"} == {"plain"}
        assert errors()["plain"] is None
        opened.enter_context(ServerProcess(tmp_path / "all", *how))
        wait_until(lambda: {one["name"] for one in low_db.alerts() if one["state"] == "firing"} == {"calls", "plain"})
        assert set(errors().values()) == {None}


def follow_by_user(low: Any, high: Any) -> None:
    """Matches of whole partitions, each at one node, are the same whoever tells them; others are refused."""
    events = [{"ts": i * 1_000, "user": user, "us": us} for i, us in enumerate((0, 1, 5, 6)) for user in (LOW, HIGH)]
    last = max(low.append("calls", events[:4]), high.append("calls", events[4:]))
    rises = kivi.pattern(
        "A B", partition_by=["user"], within="1m", define=dict(RISES.define), measures={"us": kivi.last("us")}
    )
    for db in (low, high):
        with db.snapshot(min_snapshot=last) as snap:
            found = [(row["user"], row["us"]) for row in snap.match("calls", rises)]
        assert sorted(found) == sorted([(LOW, 1), (HIGH, 1)])
        for users in ([LOW, HIGH], [LOW], [HIGH]):
            where = None if len(users) > 1 else kivi.col("user") == users[0]
            with db.subscribe_matches("calls", rises, since=0, lateness="0s", where=where) as live:
                update = live.next(timeout_s=PATIENCE_S)
                assert sorted(change.row["user"] for change in update.changes) == sorted(users)


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


def test_who_reads_at_a_node_that_is_lost_goes_on_at_another(tmp_path: Path) -> None:
    """Of a node that holds a part of the shards, changes are asked of one that holds all; there are two."""
    require("nats-server")
    with contextlib.ExitStack() as opened:
        nats = opened.enter_context(NatsCluster(tmp_path, 1))
        how = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB")
        one = opened.enter_context(ServerProcess(tmp_path / "one", *how))
        with one.connect() as db:
            db.create_event_table("calls", event_time="ts", columns=COLUMNS, shard_by=["user"])
            db.append("calls", [{"ts": i, "user": f"user {i}", "us": i} for i in range(100)])
            for name in ("two", "part"):
                db.checkpoint(tmp_path / name)
        two = opened.enter_context(ServerProcess(tmp_path / "two", *how))
        part = opened.enter_context(ServerProcess(tmp_path / "part", *how, "--shards", "0-31"))

        def count(db: Any) -> int:
            with db.snapshot() as snap:
                return len(list(snap.changes("calls", since=0)))

        async def counts(clients: int) -> list[int]:
            found = []
            for _ in range(clients):
                async with await kivi.aio.connect(part.endpoint) as db, db.snapshot() as snap:
                    found.append(len([change async for change in snap.changes("calls", since=0)]))
            return found

        with part.connect() as db:
            wait_until(
                lambda: {node["address"] for node in db.cluster_status()["nodes"]} >= {one.endpoint, two.endpoint}
            )
            assert count(db) == 100
            lost = one if one.endpoint in db._others else two
            lost.kill()
            assert [count(db) for _ in range(3)] == [100] * 3
            for _ in range(6):
                with part.connect() as other:
                    assert count(other) == 100
            assert asyncio.run(counts(6)) == [100] * 6


@pytest.mark.parametrize("reverse", [False, True])
def test_who_answers_alone_may_be_killed_in_the_middle(tmp_path: Path, reverse: bool) -> None:
    """Another one that has all goes on at the same snapshot, within a commit, too."""
    require("nats-server")
    with contextlib.ExitStack() as opened:
        nats = opened.enter_context(NatsCluster(tmp_path, 1))
        how = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB")
        whole = opened.enter_context(ServerProcess(tmp_path / "whole", *how))
        columns = {**COLUMNS, "text": "string"}
        with whole.connect() as db:
            db.create_event_table("calls", event_time="ts", columns=columns, shard_by=["user"])
            for name in ("low", "other"):
                db.checkpoint(tmp_path / name)
        low = opened.enter_context(ServerProcess(tmp_path / "low", *how, "--shards", "0-31"))
        other = opened.enter_context(ServerProcess(tmp_path / "other", *how))
        with kivi.connect(low.endpoint, timeout=PATIENCE_S) as db:
            three = {node.endpoint for node in (whole, low, other)}
            wait_until(lambda: {one["address"] for one in db.cluster_status()["nodes"]} >= three)
            number = {one["address"]: int(one["node"], 16) for one in db.cluster_status()["nodes"]}
            asked = min((whole, other), key=lambda node: (number[node.endpoint] - number[low.endpoint]) % 2**64)
            for commit in range(8):
                events = [{"ts": i, "user": USERS[i % 60], "us": 5_000 * commit + i} for i in range(5_000)]
                db.append("calls", [{**event, "text": f"{event['us']:0500}"} for event in events])
            with db.snapshot() as snap:
                scanned = snap.scan("calls", columns=["us", "text"], reverse=reverse)
                found = [next(scanned)["us"] for _ in range(7)]
                db.append("calls", [{"ts": 0, "user": USERS[0], "us": -1, "text": ""}])
                asked.kill()
                found += [row["us"] for row in scanned]
        commits = [us // 5_000 for us in found]
        assert commits == sorted(commits, reverse=reverse)
        assert sorted(found) == list(range(40_000)), "each once"
