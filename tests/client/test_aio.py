"""The client for asyncio, against a real server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import kivi
import kivi.aio
import kivi.client.database
import kivi.polars
from kivi.client.calls import _GATHERED_MAX, Commits
from tests.client.proxy import Proxy
from tests.serverproc import ServerProcess
from tests.waiting import until

NOW = 1_700_000_000_000_000


def run(endpoint: str, test: Callable[[Any], Awaitable[None]], **arguments: Any) -> None:
    async def main() -> None:
        async with await kivi.aio.connect(endpoint, **arguments) as db:
            await test(db)

    asyncio.run(main())


def test_the_same_methods_as_for_threads():
    def names(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert names(kivi.client.Database) <= names(kivi.aio.Database)
    assert names(kivi.client.Transaction) <= names(kivi.aio.Transaction)
    assert names(kivi.client.Snapshot) <= names(kivi.aio.Snapshot)


def test_it_is_made_of_tasks_not_threads(server, accounts):
    async def test(db: Any) -> None:
        before = threading.active_count()
        await asyncio.gather(*(db.run(lambda tx: tx.delta(accounts, (1,), balance=1)) for _ in range(200)))
        assert threading.active_count() <= before
        async with db.snapshot() as snap:
            assert (await snap.get(accounts, (1,)))["balance"] == 200

    run(server.endpoint, test)


def test_a_transaction(server, accounts):
    async def test(db: Any) -> None:
        async with db.transaction() as tx:
            with pytest.raises(kivi.InvalidArgument):
                tx.start_ts  # noqa: B018 (not told yet)
            await tx.put(accounts, (1,), name="ada")
            await tx.delta(accounts, (1,), balance=21, peak=21)
            assert await tx.get(accounts, (1,)) == {"id": 1, "name": "ada", "balance": 21, "peak": 21}
            assert tx.start_ts == await tx.started()
            with pytest.raises(kivi.RowExists):
                await tx.insert(accounts, (1,), name="x")
            await tx.insert(accounts, (2,), name="bob")
            await tx.guard(accounts, (2,), "name")
            assert [row["id"] async for row in tx.scan(accounts)] == [1, 2]
            await tx.delete(accounts, (2,))
        assert tx.commit_ts > tx.start_ts
        async with db.snapshot(as_of=tx.commit_ts) as snap:
            assert await snap.get_many(accounts, [(1,), (2,)], ["name"]) == [{"name": "ada"}, None]
            assert (await snap.to_arrow(accounts)).num_rows == 1
        with pytest.raises(ZeroDivisionError):
            async with db.transaction() as tx:
                await tx.put(accounts, (9,), name="never")
                raise ZeroDivisionError
        async with db.snapshot() as snap:
            assert await snap.get(accounts, (9,)) is None

    run(server.endpoint, test)


def test_very_many_tasks_that_commit_at_once_have_an_outcome_each(server, accounts, monkeypatch):
    """More than may gather for a message; and, some of them cancelled while they wait, all the others."""
    gathered: list[int] = []
    message = Commits._message

    def counted(commits: Commits, taken: list[tuple[int, bytes, str]]) -> Any:
        gathered.append(len(taken))
        return message(commits, taken)

    monkeypatch.setattr(Commits, "_message", counted)

    async def test(db: Any) -> None:
        # A task that does not know the table waits for its definition: its Begin leaves meanwhile, and it gathers not.
        await db.run(lambda tx: tx.delta(accounts, (9,), balance=1))
        gathered.clear()
        stamps: list[int] = []

        async def add(i: int) -> None:
            async with db.transaction() as tx:
                await tx.delta(accounts, (i % 3,), balance=1)
            stamps.append(tx.commit_ts)

        tasks = [asyncio.ensure_future(add(i)) for i in range(2_500)]
        await asyncio.sleep(0)
        for task in tasks[::100]:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(one, asyncio.CancelledError) for one in ended) == 25
        assert len(stamps) == len(set(stamps)) == 2_475
        assert gathered == [_GATHERED_MAX]  # and the others, which found it full, went alone
        async with db.snapshot(min_snapshot=max(stamps)) as snap:
            total = sum([row["balance"] async for row in snap.scan(accounts) if row["id"] < 3])
        assert 2_475 <= total <= 2_500  # what was cancelled may have left before

    run(server.endpoint, test, timeout=60.0)


def test_conflicts_have_the_same_attributes(server, accounts):
    async def test(db: Any) -> None:
        async with db.transaction() as first, db.transaction() as second:
            await first.put(accounts, (1,), name="a")
            await second.put(accounts, (1,), name="b")
            await first.commit()
            with pytest.raises(kivi.Conflict) as caught:
                await second.commit()
        error = caught.value
        assert (error.table, error.key, error.column) == (accounts, (1,), "name")
        assert (error.start_ts, error.commit_ts) == (first.start_ts, first.commit_ts)

        async def increment(tx: Any) -> None:
            row = await tx.get(accounts, (2,))
            await tx.put(accounts, (2,), name=str(int(row["name"] if row else 0) + 1))

        await asyncio.gather(*(db.run(increment, timeout=60) for _ in range(20)))
        async with db.snapshot() as snap:
            assert (await snap.get(accounts, (2,)))["name"] == "20"

    run(server.endpoint, test)


def test_scans_are_read_page_by_page(server, accounts):
    async def test(db: Any) -> None:
        async with db.transaction() as tx:
            for i in range(10_000):
                await tx.put(accounts, (i,), name="x")
        async with db.snapshot() as snap:
            assert [row["id"] async for row in snap.scan(accounts)] == list(range(10_000))
            where = kivi.col("id") >= 9_998
            assert [row["id"] async for row in snap.scan(accounts, where=where, reverse=True)] == [9_999, 9_998]
            assert (await snap.to_arrow(accounts)).num_rows == 10_000

    run(server.endpoint, test)


def test_events_aggregates_stages_and_the_appender(server):
    async def test(db: Any) -> None:
        await db.create_event_table("aev", event_time="ts", columns={"e": "int64", "ts": "timestamp", "v": "int64"})
        progress: list[tuple[int, int]] = []
        stamp = await db.append("aev", [{"e": 1, "ts": NOW, "v": 1}])
        await db.create_aggregate(
            "aby_e", "aev", ["e"], {"s": kivi.sum("v"), "n": kivi.count()}, progress=lambda *n: progress.append(n)
        )
        assert {"aev", "aby_e"} <= set(await db.tables())
        assert (await db.describe("aby_e"))["source"] == "aev"
        async with db.appender("aev", linger_ms=2) as app:
            stamps = await asyncio.gather(*(app.append(e=1, ts=NOW, v=1) for _ in range(500)))
            with pytest.raises(kivi.SchemaError):
                app.append(e="x", ts=NOW)
            last = app.append(e=1, ts=NOW, v=1)
        assert min(stamps) > stamp
        assert last.done()
        stage = await db.stage("aev", [{"e": 2, "ts": NOW, "v": 5}], owner="me")
        async with db.transaction(batch=("aio", 0)) as tx:
            await tx.append_stages("aev", [stage])
            await tx.append("aev", [{"e": 2, "ts": NOW, "v": 5}])
        assert await db.batch_scopes("aio") == ["aio"]
        await db.discard_stages([])
        await db.consolidate()
        async with db.snapshot() as snap:
            rows = {row["e"]: (row["s"], row["n"]) async for row in snap.scan("aby_e")}
        assert rows == {1: (502, 502), 2: (10, 2)}
        assert (await db.stats())["commits"] > 0
        assert await db.watermark() >= tx.commit_ts
        await db.drop("aby_e")
        await db.drop("aev")

    run(server.endpoint, test)


def test_a_function_that_is_not_async_is_not_run_as_one(server, accounts):
    async def test(db: Any) -> None:
        before = await db.watermark()
        with pytest.raises(kivi.InvalidArgument, match="takes an async function"):
            await db.run(lambda tx: None)
        assert await db.watermark() == before

    run(server.endpoint, test)


def test_cancelling_a_task_that_waits_leaves_the_client_whole(server, accounts):
    async def test(db: Any) -> None:
        task = asyncio.create_task(db.run(lambda tx: tx.get(accounts, (1,))))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with db.transaction() as tx:
            await tx.delta(accounts, (1,), balance=1)
        assert tx.commit_ts

    run(server.endpoint, test)


def test_snapshots_of_many_tasks_are_begun_together(server, accounts):
    async def test(db: Any) -> None:
        async with db.transaction() as tx:
            await tx.delta(accounts, (1,), balance=1)
        before = await db.stats()

        async def read() -> int:
            async with db.snapshot() as snap:
                row = await snap.get(accounts, (1,))
                assert row["balance"] == 1
                return int(snap.ts)

        seen = await asyncio.gather(*(read() for _ in range(200)))
        assert min(seen) >= tx.commit_ts
        after = await db.stats()
        assert after["server_frames_in"] - before["server_frames_in"] < 100  # of 200 Begins, 200 reads and 200 Releases
        await _none_is_open(db)

    run(server.endpoint, test)


def test_a_transaction_of_deferred_inserts_is_one_request(server, accounts):
    async def test(db: Any) -> None:
        await db.create_event_table("brought", event_time="ts", columns={"ts": "timestamp", "n": "int64"})

        async def bring(tx: kivi.aio.Transaction) -> None:
            await tx.insert(accounts, (1,), name="ada")
            await tx.append("brought", [{"ts": NOW, "n": 1}])
            await tx.write(accounts, [{"id": 2, "name": "bob"}], insert=True)

        await db.get(accounts, (1,))
        await db.append("brought", [{"ts": NOW, "n": 0}])  # it knows both tables
        await _none_is_open(db)  # nor does a release of a test before count
        before = await db.stats()
        await db.run(bring, deferred=True)
        with pytest.raises(kivi.RowExists) as refused:
            await db.run(bring, deferred=True)
        after = await db.stats()
        assert refused.value.key == (1,)
        assert after["server_requests"] - before["server_requests"] == 2
        async with db.snapshot() as snap:
            assert [row["n"] async for row in snap.scan("brought")] == [0, 1]
        await _none_is_open(db)

    run(server.endpoint, test)


def test_a_definition_that_many_tasks_want_at_once_is_asked_for_once(server, accounts):
    async def test(client: Any) -> None:
        called, methods = client._transport._called, []

        async def noted(effect: Any) -> Any:
            methods.append(effect.method)
            return await called(effect)

        client._transport._called = noted
        assert await asyncio.gather(*(client.get(accounts, (i,)) for i in range(50))) == [None] * 50
        assert methods == ["Describe"]
        tasks = [asyncio.create_task(client.append("not there", [{"n": n}])) for n in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()  # who asked first
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in ended] == [asyncio.CancelledError, kivi.NotFound, kivi.NotFound]
        assert not client._transport._lookups
        waiting = asyncio.create_task(client.append("not there", [{"n": 1}]))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(kivi.KiviError):
            await waiting

    run(server.endpoint, test)


def test_commits_of_events_leave_together_while_others_are_on_their_way(server, accounts):
    async def test(db: Any) -> None:
        await db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "n": "int64"})
        rows = [{"ts": NOW, "n": n} for n in range(200)]
        await db.append("e", rows[:1])
        before = await db.stats()

        async def bring(row: dict[str, int]) -> None:
            async with db.transaction() as tx:
                await tx.get(accounts, (1,))
                await tx.append("e", [row])

        await asyncio.gather(*map(bring, rows[1:100]), *(db.append("e", [row]) for row in rows[100:]))
        after = await db.stats()
        assert after["commits_grouped"] - before["commits_grouped"] > 150  # of 199
        async with db.snapshot() as snap:
            assert sorted([row["n"] async for row in snap.scan("e")]) == [*range(200)]
        session = db._transport._current
        assert not session._held and not session._entering
        began = asyncio.get_running_loop().time()
        session._entering.add(-1)  # one that is never answered
        await asyncio.gather(*(db.append("e", [row]) for row in rows[:2]))
        assert asyncio.get_running_loop().time() - began >= 0.02
        await _none_is_open(db)

    run(server.endpoint, test)


def test_a_snapshot_whose_task_is_cancelled_while_it_begins_is_let_go_of(server, accounts):
    async def test(db: Any) -> None:
        entered: list[int] = []

        async def enter() -> None:
            async with db.snapshot() as snap:
                entered.append(snap.ts)
                await asyncio.sleep(0.2)

        tasks = [asyncio.create_task(enter()) for _ in range(20)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(entered) == 10
        await _none_is_open(db)

    run(server.endpoint, test)


def test_snapshots_that_begin_while_the_connection_is_lost(server, db, accounts):
    with db.transaction() as tx:
        tx.delta(accounts, (1,), balance=1)

    async def test(client: Any) -> None:
        async def read() -> int:
            async with client.snapshot() as snap:
                return int((await snap.get(accounts, (1,)))["balance"])

        assert await read() == 1
        proxy.mute = True
        asyncio.get_running_loop().call_later(0.2, proxy.lose)
        assert await asyncio.gather(*(read() for _ in range(10))) == [1] * 10
        await _none_is_open(client)

    with Proxy(server.port) as proxy:
        run(proxy.endpoint, test, timeout=60)


async def _none_is_open(db: Any) -> None:
    async def closed() -> bool:
        return bool((await db.stats())["server_open_transactions"] == 0)

    await until(closed, reason="snapshots are left open", pause_s=0.01)


def test_lost_replies_and_connections(server, db, accounts):
    with Proxy(server.port) as proxy:

        async def test(through: Any) -> None:
            for i in range(4):
                async with through.transaction() as tx:
                    await tx.delta(accounts, (1,), balance=1)
                    await tx.started()
                    if i % 2 == 0:
                        proxy.lose_the_reply_of_a_commit(db)
                assert tx.commit_ts
            for i in (5, 6):  # the row that is there when it comes again is its own
                proxy.lose_the_reply_of_a_commit(db)
                await through.write(accounts, [{"id": i}], insert=True)

        run(proxy.endpoint, test, timeout=60)
    with db.snapshot() as snap:
        assert snap.get(accounts, (1,))["balance"] == 4


def test_a_stage_that_is_not_answered_is_unavailable_when_the_time_is_up(server):
    with Proxy(server.port) as proxy:

        async def test(through: Any) -> None:
            await through.create_event_table("staged", event_time="ts", columns={"ts": "timestamp"})
            assert await through.stage("staged", [{"ts": NOW}])
            proxy.mute, through._core.timeout_s = True, 1.0
            async with asyncio.timeout(60):
                with pytest.raises(kivi.Unavailable, match="no answer from localhost:[0-9]+ within 1 s"):
                    await through.stage("staged", [{"ts": NOW}])

        run(proxy.endpoint, test)


def test_nothing_listens_there():
    async def test(db: Any) -> None:
        raise AssertionError("unreachable")

    with pytest.raises(kivi.Unavailable, match="cannot reach"):
        run("localhost:1", test, timeout=2)


def test_lazy_tables_are_read_beside_the_loop_and_never_wait_for_it(server, accounts, monkeypatch):
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    monkeypatch.setattr("kivi.aio.database.LOOP_PATIENCE_S", 0.3)

    async def test(db: Any) -> None:
        async with db.transaction() as tx:
            for i in range(5):
                await tx.put(accounts, (i,), name=f"n{i}")
        async with db.snapshot() as snap:
            with duckdb.connect() as connection:
                relation = (await snap.relation(accounts, connection)).filter("id > 2").project("id, name")
                assert await asyncio.to_thread(relation.fetchall) == [(3, "n3"), (4, "n4")]
                with pytest.raises(duckdb.InvalidInputException, match=r"InvalidArgument.*asyncio\.to_thread"):
                    relation.fetchall()
                assert await asyncio.to_thread(relation.fetchall) == [(3, "n3"), (4, "n4")]
            frame = (await kivi.polars.scan(snap, accounts)).filter(polars.col("id") < 2).select("name")
            assert (await asyncio.to_thread(frame.collect))["name"].to_list() == ["n0", "n1"]
            with pytest.raises(kivi.InvalidArgument, match="asyncio.to_thread"):
                frame.collect()
            dataset = await snap.dataset(accounts)
            with pytest.raises(kivi.InvalidArgument, match="this thread runs the event loop"):
                dataset.to_table()
            with pytest.raises(kivi.NotFound):
                await kivi.polars.scan(snap, "nowhere")
            assert await snap.get(accounts, (1,), columns=["name"]) == {"name": "n1"}

    run(server.endpoint, test)


def test_a_snapshot_of_nothing_has_a_timestamp(tmp_path: Any) -> None:
    async def ask(endpoint: str) -> list[int]:
        found = []
        async with await kivi.aio.connect(endpoint) as db:
            for snapshot in (db.snapshot(), db.snapshot(as_of=0), db.snapshot(ttl_s=5)):
                async with snapshot as snap:
                    found.append(snap.ts)
        return found

    with ServerProcess(tmp_path / "data") as server:
        assert asyncio.run(ask(server.endpoint)) == [0, 0, 0]
