"""``kivi serve --hub``: subscriptions in a process of their own, which may be killed, as may the server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.errors import InvalidArgument, PermissionDenied
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

T0 = 1_750_000_000_000_000


def hub_of(server: ServerProcess) -> int:
    """The process id of its hub; 0 while there is none."""
    for children in Path(f"/proc/{server.pid}/task").glob("*/children"):
        for pid in children.read_text().split():
            if "kivi_server.process.follower" in Path(f"/proc/{pid}/cmdline").read_text():
                return int(pid)
    return 0


def is_up(db: Any) -> bool:
    return bool(db.stats()["hub_listens"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("hub")
    tokens = path / "tokens"
    tokens.write_text("root-token-0123456789 admin\nreader-token-0123456789 read tables=rows\n")
    with ServerProcess(path / "data", "--hub", "localhost:0", "--token-file", str(tokens)) as server:
        with server.connect(access_token="root-token-0123456789") as db:
            db.create_table("rows", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
            db.create_event_table("calls", event_time="ts", columns={"seq": "int64", "ts": "timestamp"})
            wait_until(lambda: is_up(db), 60)
        yield server


def root(server: ServerProcess) -> Any:
    return server.connect(access_token="root-token-0123456789", timeout=60.0)


def test_each_event_comes_once_whatever_is_killed(server: ServerProcess) -> None:
    """And a state is what it is at the snapshot that the update names."""
    got: list[int] = []
    with root(server) as db, db.subscribe("calls", interval_ms=0) as events, db.subscribe("rows") as rows:
        state: dict[int, int] = {}
        sent = 0

        def add(count: int) -> None:
            nonlocal sent
            for _ in range(count):
                db.append("calls", [{"seq": sent, "ts": T0 + sent}])
                with db.transaction() as tx:
                    tx.delta("rows", (sent % 3,), n=sent)
                sent += 1

        def read(upto: int) -> None:
            while len(got) < upto:
                update = events.next(60.0)
                assert update is not None
                got.extend(change.row["seq"] for change in update.changes)

        add(20)
        read(20)
        wait_until(lambda: db.stats()["subscriptions"] >= 1, 20)  # it says so each second
        for _ in range(2):
            os.kill(hub_of(server), signal.SIGKILL)
            add(10)
            read(sent)
        server.restart()  # the hub of the one before ends with it
        add(10)
        read(sent)
        assert got == list(range(sent))
        with db.snapshot() as snap:
            wanted = {row["id"]: row["n"] for row in snap.scan("rows")}

        def is_there() -> bool:
            update = rows.next(1.0)
            if update is not None:
                state.clear()
                state.update({row["id"]: row["n"] for row in rows.rows})
            return state == wanted

        wait_until(is_there, 60)


def test_what_this_client_committed_is_in_what_it_is_shown_first(server: ServerProcess) -> None:
    async def run() -> None:
        async with await kivi.aio.connect(server.endpoint, access_token="root-token-0123456789", timeout=60.0) as db:
            for i in range(30):
                async with db.transaction() as tx:
                    await tx.put("rows", (1_000,), n=i)
                async with db.subscribe("rows", prefix=(1_000,)) as live:
                    update = await live.next(60.0)
                    assert update is not None and [(change.row or {})["n"] for change in update.changes] == [i]

    asyncio.run(run())


def test_durable_subscriptions_stay_with_the_server(server: ServerProcess) -> None:
    with root(server) as db:
        first = db.append("calls", [{"seq": 1_000_000, "ts": T0}])
        with db.subscribe("calls", name="mine", user="u", since=first - 1, interval_ms=0) as live:
            update = live.next(60.0)
            assert [change.row["seq"] for change in update.changes] == [1_000_000]
        assert [one["name"] for one in db.subscriptions("u")] == ["mine"]
        db.unsubscribe("mine", user="u")


def test_its_port_reads_and_does_not_commit(server: ServerProcess) -> None:
    with root(server) as db:
        db.run(lambda tx: tx.put("rows", (2_000,), n=5))
        with db.subscribe("rows", prefix=(2_000,)) as live:
            assert live.next(60.0) is not None
            endpoint = db._core.subscriptions_at
        assert endpoint
        with kivi.connect(endpoint, access_token="root-token-0123456789") as beside:
            with beside.snapshot(max_staleness=0) as snap:
                assert snap.get("rows", (2_000,)) == {"id": 2_000, "n": 5}
            with pytest.raises(InvalidArgument, match="commit at the server that owns it"):
                beside.run(lambda tx: tx.put("rows", (2_000,), n=6))
        with kivi.connect(endpoint, access_token="reader-token-0123456789") as reader:
            with reader.subscribe("rows", prefix=(2_000,)) as live:
                assert live.next(60.0) is not None
            with pytest.raises(PermissionDenied), reader.subscribe("calls") as live:
                live.next(60.0)


def test_it_ends_with_its_server_and_leaves_no_copy(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", "--hub", "localhost:0") as server:
        with server.connect() as db:
            wait_until(lambda: is_up(db), 60)
        hub = hub_of(server)
        assert (tmp_path / "data" / "hub").is_dir()
        assert server.stop() == 0
        assert not (tmp_path / "data" / "hub").exists()
        wait_until(lambda: not os.path.exists(f"/proc/{hub}"), 20)
    with kivi.open(tmp_path / "data") as db:
        assert db.tables() == []
