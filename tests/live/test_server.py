"""Subscriptions over gRPC: both clients, a server that dies, clients that do not read, tokens that are withdrawn."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
import kivi.aio
from kivi.api.arguments import SubscribeArguments
from kivi.api.subscription import Follower
from kivi.client.merging import Merged
from kivi.errors import PermissionDenied, SchemaError, Unauthenticated, Unavailable
from tests.live.test_states import QUERIES, Judge, change, create, until_quiet
from tests.serverproc import ServerProcess
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("live") / "store") as server:
        with server.connect() as db:
            create(db)
        yield server


@pytest.fixture
def db(server: ServerProcess) -> Iterator[Any]:
    with server.connect() as db:
        yield db


@pytest.mark.parametrize("name", ["page", "text", "averages", "one endpoint", "all"])
def test_states_for_threads(db: Any, name: str) -> None:
    table, wanted, keep = QUERIES[name]
    rng = random.Random(name)
    judge = Judge(db, table, keep, **wanted)
    with db.subscribe(table, interval_ms=0, heartbeat_ms=10, **wanted) as live:
        for _ in range(25):
            change(db, rng)
            until_quiet(live, db.watermark(), judge)


def test_states_for_tasks(server: ServerProcess, db: Any) -> None:
    """Several at once in one event loop."""
    rng = random.Random(4)

    async def follow(client: Any, name: str, began: asyncio.Semaphore, upto: asyncio.Future[int]) -> int:
        table, wanted, keep = QUERIES[name]
        judge = Judge(db, table, keep, **wanted)
        seen = 0
        async with client.subscribe(table, interval_ms=10, heartbeat_ms=20, **wanted) as live:
            async for update in live:
                seen += 1
                assert live.rows == await asyncio.to_thread(judge, update.ts)
                assert live.silent_s < 5
                began.release()
                if upto.done() and live.ts >= upto.result():
                    break
        return seen

    async def run() -> list[int]:
        async with await kivi.aio.connect(server.endpoint) as client:
            upto: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            began = [asyncio.Semaphore(0) for _ in range(3)]
            named = zip(("top", "slow ones", "prefix"), began, strict=True)
            followers = [asyncio.create_task(follow(client, name, of, upto)) for name, of in named]
            for of in began:
                await of.acquire()
            for _ in range(40):
                await asyncio.to_thread(change, db, rng)
            upto.set_result(db.watermark())
            while not all(task.done() for task in followers):  # until each has something to show
                await asyncio.to_thread(change, db, rng)
                await asyncio.sleep(0.01)
            return [task.result() for task in followers]

    assert min(asyncio.run(run())) >= 2


def test_equal_queries_of_several_clients_share_a_window(server: ServerProcess, db: Any) -> None:
    table, wanted, keep = QUERIES["page of keys"]
    judge = Judge(db, table, keep, **wanted)

    def shown() -> tuple[int, int]:
        stats = db.stats()
        return stats["subscriptions"], stats["subscription_windows"]

    with server.connect() as other, db.subscribe(table, interval_ms=0, heartbeat_ms=10, **wanted) as first:
        with other.subscribe(table, interval_ms=20, heartbeat_ms=10, **wanted) as second:
            wait_until(lambda: shown() == (2, 1), reason=shown)
            for i in range(5):
                change(db, random.Random(i))
                for live in (first, second):
                    until_quiet(live, db.watermark(), judge)
        with other.subscribe(table, prefix=(1,), heartbeat_ms=10) as second:
            assert second.next(30.0) is not None
            wait_until(lambda: shown() == (2, 2), reason=shown)


def test_a_state_of_many_rows_comes_in_several_messages(db: Any) -> None:
    with db.transaction() as tx:
        for i in range(9_000):
            tx.put("rows", (100 + i % 7, f"{i:05}"), text="x" * 20)
    judge = Judge(db, "rows", lambda row: row["part"] >= 100)
    with db.subscribe("rows", start=(100,), interval_ms=0) as live:
        update = live.next(60.0)
        assert len(update.changes) == 9_000
        assert live.rows == judge(live.ts)
    with db.transaction() as tx:
        for i in range(9_000):
            tx.delete("rows", (100 + i % 7, f"{i:05}"))


def test_parts_of_a_table_that_is_altered_are_put_together_as_of_one_definition(server: ServerProcess) -> None:
    """As a client does it where no node of a cluster has all shards: here both parts are the same server's."""
    with server.connect() as db:
        columns = {"ts": "timestamp", "user": "string", "us": "int64"}
        db.create_event_table("shared", event_time="ts", columns=columns, shard_by=["user"])
        measures = {"us": kivi.sum("us"), "n": kivi.count()}
        db.create_aggregate("sums", source="shared", group_by=["user"], measures=measures, history="1h")
        wanted = SubscribeArguments("sums", order_by=["-us"], limit=12, interval_ms=0, heartbeat_ms=20)
        core, schema, inbox = db._core, db._run(db._core.fetch("sums")), queue.SimpleQueue[Any]()
        follower = Follower(wanted, schema)
        merged = Merged(core, schema, wanted, follower, None)
        port, low = server.endpoint.rpartition(":")[2], (1 << 32) - 1
        merged.begin([(f"localhost:{port}", low), (f"127.0.0.1:{port}", low << 32)], inbox.put)
        rng, updates = random.Random(2), 0

        def append(**more: Any) -> None:
            db.append("shared", [{"ts": 0, "user": f"{rng.randrange(30)}", "us": rng.randrange(99)} | more] * 2)

        for i in range(12):
            for _ in range(rng.choice((1, 3))):
                append()
            if i % 4 == 3:
                measures = {f"most{i}": kivi.max("us"), f"at{i}": kivi.max("ts")}
                db.alter_aggregate("sums", add_measures=measures, derived={f"mean{i}": "us / n"})
                append()
            last = db.watermark()
            while follower.ts < last:
                update = merged.read(inbox.get(timeout=60.0))
                if update is not None and follower.hear(update) is not None:
                    updates += 1
                    with db.snapshot(as_of=update.ts) as snap:
                        found = list(snap.scan("sums", order_by="-us", limit=12))
                    assert [[*row.items()] for row in follower.rows] == [[*row.items()] for row in found]
        assert updates >= 12 and "mean11" in follower.rows[0]
        merged.end()


def test_a_server_that_is_killed(tmp_path: Path) -> None:
    """Rows go on from the state that the client has, events from the last one it got: no loss, no repeat."""
    with ServerProcess(tmp_path / "store") as server, server.connect(timeout=30.0) as db:
        create(db)
        rng = random.Random(9)
        stop = threading.Event()
        sent: list[int] = []

        def append() -> None:
            while not stop.is_set():
                seq = len(sent)
                db.append("calls", [{"endpoint": seq, "service": "x", "ts": 1_750_000_000_000_000 + seq, "us": seq}])
                sent.append(seq)
                time.sleep(0.002)

        thread = threading.Thread(target=append)
        with (
            db.subscribe("calls", interval_ms=0, heartbeat_ms=50, columns=["us"]) as events,
            db.subscribe("calls_5m", order_by="-total", limit=10, interval_ms=0, heartbeat_ms=50) as rows,
        ):
            thread.start()
            judge = Judge(db, "calls_5m", lambda row: True, order_by=["-total"], limit=10)
            found: list[int] = []
            resets = 0
            for _ in range(2):
                deadline = time.monotonic() + 1.0
                while time.monotonic() < deadline:
                    update = events.next(0.05)
                    found += [c.row["us"] for c in update.changes] if update is not None else []
                    update = rows.next(0.05)
                    if update is not None:
                        resets += update.reset
                        assert rows.rows == judge(rows.ts)
                server.kill()
                time.sleep(rng.random() / 4)
                server.start()
            stop.set()
            thread.join()

            def all_came() -> bool:
                if len(found) < len(sent) and (update := events.next(1.0)) is not None:
                    found.extend(c.row["us"] for c in update.changes)
                return len(found) >= len(sent)

            wait_until(all_came, pause_s=0)
            assert found == sent
            until_quiet(rows, db.watermark(), judge)
            assert resets == 1  # the first state; it went on from where it was after that


def test_a_client_that_does_not_read(server: ServerProcess, db: Any) -> None:
    """The server's memory does not grow by it, nobody waits for it, and what it then reads is a state, not history."""
    with db.subscribe("rows", prefix=(50,), interval_ms=0, heartbeat_ms=20) as live:
        live.next(60.0)
        rng = random.Random(1)
        text = "y" * 100_000
        began = time.monotonic()
        for _ in range(400):  # 40 MB of changes
            with db.transaction() as tx:
                tx.put("rows", (50, rng.choice("abc")), text=text + str(rng.random()))
        assert time.monotonic() - began < 120
        judge = Judge(db, "rows", lambda row: row["part"] == 50)
        seen = until_quiet(live, db.watermark(), judge)
        assert seen < 350  # most were passed over


def test_errors_reach_the_caller(server: ServerProcess, db: Any) -> None:
    with pytest.raises(SchemaError, match="no column 'x'"):
        db.subscribe("rows", order_by="x")
    with pytest.raises(SchemaError, match="no column 'x'"):
        db.subscribe("rows", where=kivi.col("x") == 1)

    async def run() -> None:
        async with await kivi.aio.connect(server.endpoint) as client:
            with pytest.raises(SchemaError, match="no column 'x'"):
                await client.subscribe("rows", order_by="x").next()
            live = client.subscribe("rows", limit=1, interval_ms=0)
            assert await live.next(60.0) is not None
            assert await live.next(0.05) is None
            await live.close()
            assert await live.next() is None

    asyncio.run(run())


def test_tokens(tmp_path: Path) -> None:
    """A subscription needs what a scan needs, and ends when its token does."""
    tokens = tmp_path / "tokens"
    tokens.write_text("root-token-0123456789 admin\nreader-token-0123456789 reader tables=calls*\n")
    tokens.chmod(0o600)
    with ServerProcess(tmp_path / "store", "--token-file", str(tokens)) as server:
        with server.connect(access_token="root-token-0123456789") as root:
            create(root)
        with server.connect(access_token="reader-token-0123456789", timeout=60.0) as reader:
            with pytest.raises(PermissionDenied):
                reader.subscribe("rows")
            with reader.subscribe("calls_5m", heartbeat_ms=50) as live:
                assert live.next(60.0) is not None
                tokens.write_text("root-token-0123456789 admin\n")
                with pytest.raises((Unauthenticated, PermissionDenied)):
                    while True:
                        live.next(1.0)


def test_a_server_that_stops(tmp_path: Path) -> None:
    """It stops at once, whoever subscribes; who waits is told when it stays away."""
    with ServerProcess(tmp_path / "store") as server, server.connect() as db:
        create(db)
        with db.subscribe("rows") as live:
            assert live.next(60.0) is not None
            db._core.timeout_s = 1.0
            began = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - began < 30
            with pytest.raises(Unavailable):
                live.next(60.0)
