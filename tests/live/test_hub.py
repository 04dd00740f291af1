"""``kivi serve --hub``: subscriptions in a process of their own, which may be killed, as may the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.errors import InvalidArgument, PermissionDenied
from kivi.store.catalog import EARLIER_SUBSCRIPTIONS
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

T0 = 1_750_000_000_000_000


def hub_of(server: ServerProcess) -> int:
    """The process id of its hub; 0 while there is none."""
    for children in Path(f"/proc/{server.pid}/task").glob("*/children"):
        for pid in children.read_text().split():
            with contextlib.suppress(OSError):  # it has ended since
                if "kivi_server.process.follower" in Path(f"/proc/{pid}/cmdline").read_text():
                    return int(pid)
    return 0


def is_up(db: Any) -> bool:
    return bool(db.stats()["hub_listens"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("hub")
    tokens = path / "tokens"
    tokens.write_text(
        "root-token-0123456789 admin\nreader-token-0123456789 read tables=rows\n"
        "acme-token-0123456789 reader rows=customer:acme\n"
    )
    with ServerProcess(path / "data", "--hub", "localhost:0", "--token-file", str(tokens)) as server:
        with server.connect(access_token="root-token-0123456789") as db:
            db.create_table("rows", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
            db.create_event_table("calls", event_time="ts", columns={"seq": "int64", "ts": "timestamp"})
            wait_until(lambda: is_up(db), 60)
        yield server


def root(server: ServerProcess) -> Any:
    return server.connect(access_token="root-token-0123456789", timeout=60.0)


@pytest.mark.story
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
            os.kill(wait_until(lambda: hub_of(server)), signal.SIGKILL)  # 0 would be all processes of the tests
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


def test_its_port_tells_of_subscriptions_of_an_earlier_version(tmp_path: Path) -> None:
    """The server takes them over before there is a hub."""
    with kivi.open(tmp_path / "data") as db:
        db.create_event_table("calls", event_time="ts", columns={"seq": "int64", "ts": "timestamp"})
        row = {"table": db.store.table("calls").origin, "name_of_table": "calls", "since": 0, "ts": 0, "skip": 0}
        query = '{"start":null,"end":null,"where":null,"columns":["seq","ts"]}'
        txn = db.store.transaction()
        txn.put(EARLIER_SUBSCRIPTIONS, ("u", "0"), row | {"query": query, "ttl_us": 10**12, "expires_us": 4 * 10**15})
        db.store.commits.commit_wait(txn)
    with ServerProcess(tmp_path / "data", "--hub", "localhost:0") as server, server.connect() as db:
        wait_until(lambda: is_up(db), 60)
        with db.subscribe("calls") as live:
            live.next(0.1)
            endpoint = db._core.subscriptions_at
        assert endpoint
        with kivi.connect(endpoint) as beside:
            assert [one["name"] for one in beside.subscriptions("u")] == ["0"]


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


def test_a_token_that_is_bound_to_rows_is_told_of_these_alone(server: ServerProcess) -> None:
    """By the hub, to which its subscriptions go, and by what its port reads."""

    def orders(*customers: str) -> list[dict[str, Any]]:
        return [
            {"customer": customer, "ts": T0, "cents": 10**17 if customer != "acme" else 1} for customer in customers
        ]

    with root(server) as db:
        columns = {"customer": "string", "ts": "timestamp", "cents": "int64"}
        db.create_event_table("orders", event_time="ts", columns=columns)
        db.create_aggregate("by_customer", source="orders", group_by=["customer"], measures={"n": kivi.count()})
        first = db.append("orders", orders("acme", "beta"))
        with server.connect(access_token="acme-token-0123456789", timeout=60.0) as acme:
            big = kivi.col("cents") * 100 > 5  # which overflows for what others have
            with (
                acme.subscribe("orders", since=first - 1, interval_ms=0, where=big) as events,
                acme.subscribe("by_customer") as rows,
            ):
                db.append("orders", orders("beta", "acme", "gamma"))
                db.append("orders", orders("beta"))
                db.append("orders", orders("acme"))
                found: list[str] = []
                counts: dict[str, int] = {}
                while len(found) < 3 or counts != {"acme": 3}:
                    if (update := events.next(0.2)) is not None:
                        found += [change.row["customer"] for change in update.changes]
                    if (update := rows.next(0.2)) is not None:
                        counts |= {change.row["customer"]: change.row["n"] for change in update.changes}
                assert found == ["acme"] * 3
            endpoint = acme._core.subscriptions_at
    with (
        kivi.connect(endpoint, access_token="acme-token-0123456789") as beside,
        beside.snapshot(max_staleness=0) as snap,
    ):
        assert [row["customer"] for row in snap.scan("orders")] == ["acme"] * 3
        assert [*snap.scan("by_customer")] == [{"customer": "acme", "n": 3}]
        assert snap.get("by_customer", ("beta",)) is None
        for refused in (lambda: list(snap.scan("rows")), beside.stats):
            with pytest.raises(PermissionDenied):
                refused()


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
