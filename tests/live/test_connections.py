"""Clients and their server at awkward moments: who stops waiting, closes, or goes; what the store is told, and when."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
import kivi.aio
from kivi.api import subscription as subscribing
from kivi.errors import InvalidArgument, NotFound, Unavailable
from tests.serverproc import ServerProcess
from tests.waiting import until, wait_until

T0 = 1_750_000_000_000_000
COLUMNS = {"seq": "int64", "ts": "timestamp"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("moments") / "store") as server:
        with server.connect() as db:
            db.create_event_table("calls", event_time="ts", columns=COLUMNS)
            db.create_table("rows", key={"id": "int64"}, columns={"n": "int64", "text": "string"})
        yield server


def test_what_came_after_a_task_stopped_waiting_is_not_delivered(server: ServerProcess) -> None:
    """It is given to whoever asks next, and not told to the store before."""

    async def run() -> None:
        async with await kivi.aio.connect(server.endpoint) as client:
            async with client.subscribe("calls", name="task", interval_ms=0, heartbeat_ms=50) as live:
                assert await live.next(0.3) is None
                await client.append("calls", [{"seq": 1, "ts": T0}])
                await asyncio.sleep(1.0)
            async with client.subscribe("calls", name="task", interval_ms=0) as live:
                update = await live.next(60.0)
                assert update is not None
                assert [change.row["seq"] for change in update.changes if change.row is not None] == [1]
            live = client.subscribe("calls", since=0, where=kivi.col("seq") < 0, interval_ms=0)
            waiting = asyncio.create_task(live.next())
            await asyncio.sleep(0.3)
            await live.close()
            assert await asyncio.wait_for(waiting, 60.0) is None

    asyncio.run(run())


def test_a_thread_that_waits_learns_that_it_is_closed(server: ServerProcess) -> None:
    with server.connect() as db:
        for _ in range(20):
            live = db.subscribe("calls", where=kivi.col("seq") < 0, heartbeat_ms=3_600_000)
            given: list[Any] = []
            thread = threading.Thread(target=lambda: given.append(live.next()), daemon=True)  # noqa: B023
            thread.start()
            time.sleep(0.01)
            live.close()
            thread.join(60.0)
            assert given == [None]


def test_an_update_is_not_lost_with_an_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come is given, whatever becomes of the telling; that is said the next time."""
    with kivi.open(None) as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        monkeypatch.setattr(subscribing, "_TELL_S", 60.0)
        live: Any = db.subscribe("calls", name="a", interval_ms=0, heartbeat_ms=20)
        db.append("calls", [{"seq": 1, "ts": T0}])
        while not (update := live.next(60.0)).changes:
            pass
        assert live.next(0.1) is None
        take = live._next

        def late(timeout_s: float | None) -> Any:
            said = take(timeout_s)
            if said is not None and said.changes:
                live._follower._told_at -= 100  # a while later
            return said

        db.unsubscribe("a")
        monkeypatch.setattr(live, "_next", late)
        live._follower.tell(live._follower._told)  # just now
        db.append("calls", [{"seq": 2, "ts": T0}])
        update = live.next(60.0)
        while not update.changes:
            update = live.next(60.0)
        assert [change.row["seq"] for change in update.changes] == [2]
        with pytest.raises(NotFound, match="no durable subscription"):
            live.next(60.0)
        live.close()


def test_going_on_from_a_timestamp(server: ServerProcess) -> None:
    """With the rows that it had, and for one who follows changes; what another store named begins anew, at once."""

    def write(db: Any, **values: Any) -> None:
        with db.transaction() as tx:
            tx.put("goes_on", (1,), **values)

    async def run(ts: int, had: list[dict[str, Any]]) -> None:
        client = await kivi.aio.connect(server.endpoint)
        async with client, client.subscribe("goes_on", since=ts, rows=had) as live:
            update = await live.next(60.0)
            assert update is not None
            assert not update.reset
            assert live.rows == [{"id": 1, "n": 2}]

    with server.connect() as db:
        db.create_table("goes_on", key={"id": "int64"}, columns={"n": "int64"}, history="1h")
        write(db, n=1)
        with db.subscribe("goes_on", interval_ms=0) as live:
            live.next(60.0)
            had, ts = live.rows, live.ts
        write(db, n=2)
        with db.subscribe("goes_on", since=ts) as live:
            update = live.next(60.0)
            assert update is not None
            assert [(change.kind, change.row) for change in update.changes] == [("change", {"id": 1, "n": 2})]
            with pytest.raises(InvalidArgument, match="rows="):
                _ = live.rows
        asyncio.run(run(ts, had))
        began = time.monotonic()
        for _ in range(12):  # more than the server has threads for reads
            with db.subscribe("goes_on", since=2**62, rows=had) as live:
                update = live.next(60.0)
                assert update is not None
                assert update.reset
                assert live.rows == [{"id": 1, "n": 2}]
        assert time.monotonic() - began < 120


@pytest.mark.story
def test_a_client_that_goes_while_its_subscription_is_made(server: ServerProcess) -> None:
    with server.connect() as db:
        with db.transaction() as tx:
            for i in range(20_000):
                tx.put("rows", (i,), n=-i, text="x" * 20)
        for i in range(10):
            with server.connect() as short:
                short.describe("rows")
                short._core.timeout_s = 0.01
                with pytest.raises(Unavailable):
                    short.subscribe("rows", order_by="n", limit=20_000 - i)  # each another window, which has to be read
        wait_until(lambda: not db.stats()["subscriptions"])


def test_a_subscription_that_is_forgotten_leaves_nothing_behind(server: ServerProcess) -> None:
    """Nobody closed it: neither here nor at the server is there anything of it."""

    def gone(db: Any) -> None:
        gc.collect()
        wait_until(lambda: not db.stats()["subscriptions"])

    async def run() -> None:
        async with await kivi.aio.connect(server.endpoint) as client:
            async for _ in client.subscribe("rows", limit=1, interval_ms=0):
                break
            gc.collect()

            async def none_is_left() -> bool:
                return not (await client.stats())["subscriptions"]

            await until(none_is_left, pause_s=0.05)

    with server.connect() as db:
        for update in db.subscribe("rows", limit=1, interval_ms=0):
            assert update.reset
            break
        gone(db)
        asyncio.run(run())


def test_the_server_goes_while_nobody_waits(tmp_path: Path) -> None:
    """A task that stopped waiting while it was away; then it is lost again."""

    async def run(server: ServerProcess) -> None:
        async with await kivi.aio.connect(server.endpoint, timeout=60.0) as client:
            live = client.subscribe("rows", interval_ms=0, heartbeat_ms=20)
            assert await live.next(60.0) is not None
            for i in range(3):
                await asyncio.to_thread(server.kill)
                assert await live.next(0.2) is None  # notices, and begins again
                await asyncio.to_thread(server.start)
                await asyncio.sleep(1.0)  # it is there again, and nobody has asked
                await client.append("calls", [{"seq": i, "ts": T0}])
                async with client.transaction() as tx:
                    await tx.put("rows", (i,), n=i, text="")
                update = await live.next(60.0)
                while update is not None and all(row["id"] != i for row in live.rows):
                    update = await live.next(60.0)
                assert live.rows[-1]["id"] == i
            await live.close()

    with ServerProcess(tmp_path / "store") as server:
        with server.connect() as db:
            db.create_event_table("calls", event_time="ts", columns=COLUMNS)
            db.create_table("rows", key={"id": "int64"}, columns={"n": "int64", "text": "string"})
        asyncio.run(run(server))


def test_a_thread_that_waits_for_the_server_learns_that_it_is_closed(tmp_path: Path) -> None:
    """Closed by another thread while it is taken up again, at whatever moment of that."""

    def waits(live: Any, given: list[Any]) -> None:
        given.append(live.next())

    with ServerProcess(tmp_path / "store") as server, server.connect(timeout=60.0) as db:
        db.create_table("rows", key={"id": "int64"}, columns={"n": "int64"})
        for away_s in (0.0, 0.06, 0.09):
            lives = [db.subscribe("rows", heartbeat_ms=20, interval_ms=0) for _ in range(12)]
            for live in lives:
                assert live.next(60.0) is not None
            given: list[Any] = []
            threads = [threading.Thread(target=waits, args=(live, given), daemon=True) for live in lives]
            for thread in threads:
                thread.start()
            server.kill()
            time.sleep(away_s)
            server.start()
            for live in lives:
                live.close()
                time.sleep(0.02)
            for thread in threads:
                thread.join(60.0)
            assert given == [None] * len(lives)
