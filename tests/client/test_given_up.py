"""Requests that somebody no longer waits for: cancelled, out of time, or of a client that is closed.

What travelled in them is never forgotten in silence, and what they began does not stay open.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import kivi
import kivi.aio
from tests.serverproc import ServerProcess
from tests.waiting import until, wait_until


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("alone") / "data") as server:
        with server.connect() as db:
            db.create_table("t", key={"id": "int64"}, columns={"n": "int64"})
        yield server


@pytest.fixture
def alone(shared: ServerProcess) -> Iterator[ServerProcess]:
    """A server that the test may stop, with one row, and nobody else's transactions."""
    with shared.connect() as db, db.transaction() as tx:
        tx.put("t", (1,), n=1)
    assert none_is_left(shared)
    try:
        yield shared
    finally:
        with contextlib.suppress(ProcessLookupError):
            shared.signal(signal.SIGCONT)
        if shared.process is None or shared.process.poll() is not None:
            shared.start()


def stored(server: ServerProcess) -> int:
    with server.connect() as db:
        n: int = db.get("t", (1,))["n"]
        return n


def open_ones(db: Any) -> tuple[float, ...]:
    stats = db.stats()
    return stats["server_open_transactions"], stats["leases"], stats["server_shared_snapshots"]


def none_is_left(server: ServerProcess) -> bool:
    """Of what was asked for; so the client that did is to have an answer first to what it asked for last."""
    with server.connect() as db:
        wait_until(lambda: not any(open_ones(db)), reason=lambda: open_ones(db))
        return True


# -- writes ------------------------------------------------------------------------------------------


def test_a_call_that_meets_the_closing_of_its_client_is_told_so(alone: ServerProcess) -> None:
    """Another thread closes it between the look whether it is open and the call."""
    db = alone.connect()
    start = db._transport.calls.start

    def closed_first(effect: Any) -> Any:
        db.close()
        return start(effect)

    db._transport.calls.start = closed_first
    with pytest.raises(kivi.Unavailable, match="this client is closed"):
        db.watermark()


@pytest.mark.parametrize("awaited", [False, True], ids=["threads", "asyncio"])
def test_an_append_whose_client_is_closed_may_have_committed_and_says_so(alone: ServerProcess, awaited: bool) -> None:
    """It had been sent: "this client is closed" alone would say that nothing was applied (R16)."""
    events, table = [{"ts": 1, "n": 1}], f"events_{awaited}"
    first, second = f"the first of {awaited}", f"the second of {awaited}"
    with alone.connect() as db:
        db.create_event_table(table, event_time="ts", columns={"ts": "timestamp", "n": "int64"})

    def with_threads() -> None:
        db = alone.connect()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            db.append(table, events, token=first)
            alone.signal(signal.SIGSTOP)
            appended = pool.submit(db.append, table, events, token=second)
            wait_until(lambda: db._transport.open().is_awaited, reason="it was not sent")
            db.close()
            appended.result()

    async def with_tasks() -> None:
        db = await kivi.aio.connect(alone.endpoint)
        await db.append(table, events, token=first)
        alone.signal(signal.SIGSTOP)
        appended = asyncio.create_task(db.append(table, events, token=second))
        await until(lambda: db._transport.open().is_awaited, reason="it was not sent")
        await db.close()
        await appended

    try:
        with pytest.raises(kivi.CommitUnknown) as unknown:
            asyncio.run(with_tasks()) if awaited else with_threads()
    finally:
        alone.signal(signal.SIGCONT)
    assert unknown.value.token == second
    with alone.connect() as db:
        committed = db.outcome(second) is not kivi.ABORTED  # first: this is what makes it final
        with db.snapshot() as snap:
            assert len(list(snap.scan(table))) == (2 if committed else 1)


def test_the_writes_of_a_cancelled_read_are_committed_with_the_rest(alone: ServerProcess) -> None:
    async def test() -> None:
        async with await kivi.aio.connect(alone.endpoint) as db, db.transaction() as tx:
            await tx.put("t", (1,), n=2)
            alone.signal(signal.SIGSTOP)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(tx.get("t", (1,)), 0.2)
            alone.signal(signal.SIGCONT)

    asyncio.run(test())
    assert stored(alone) == 2


def test_the_writes_of_a_cancelled_read_are_not_forgotten_when_the_connection_is_lost(alone: ServerProcess) -> None:
    async def test() -> None:
        async with await kivi.aio.connect(alone.endpoint) as db:
            with pytest.raises(kivi.errors.Disconnected, match="nothing was applied"):
                async with db.transaction() as tx:
                    await tx.put("t", (1,), n=2)
                    alone.signal(signal.SIGSTOP)
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(tx.get("t", (1,)), 0.2)
                    await asyncio.to_thread(alone.restart)

    asyncio.run(test())
    assert stored(alone) == 1


def test_the_writes_of_a_read_cancelled_between_two_sessions_are_not_forgotten(alone: ServerProcess) -> None:
    async def test() -> None:
        async with await kivi.aio.connect(alone.endpoint) as db:
            with pytest.raises(kivi.errors.Disconnected, match="nothing was applied"):
                async with db.transaction() as tx:
                    await tx.put("t", (1,), n=2)
                    alone.kill()
                    with _refusing(alone.port), pytest.raises(TimeoutError):
                        await asyncio.wait_for(tx.get("t", (1,)), 1)
                    await asyncio.to_thread(alone.start)

    asyncio.run(test())
    assert stored(alone) == 1


def test_the_writes_of_a_read_that_was_refused_until_its_time_was_up_are_not_forgotten(alone: ServerProcess) -> None:
    refused = pytest.raises(kivi.errors.Disconnected, match="nothing was applied")
    with alone.connect() as db, refused, db.transaction() as tx:
        tx.put("t", (1,), n=2)
        alone.kill()
        db._core.timeout_s = 1.0
        with _refusing(alone.port), pytest.raises(kivi.errors.Unavailable):
            tx.get("t", (1,))
        db._core.timeout_s = 60.0
        alone.start()
    assert stored(alone) == 1


@contextlib.contextmanager
def _refusing(port: int) -> Iterator[None]:
    """What a proxy says whose backend is away."""

    class Refuse(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return grpc.stream_stream_rpc_method_handler(
                lambda requests, context: context.abort(grpc.StatusCode.UNAVAILABLE, "no upstream")
            )

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((Refuse(),))
    assert server.add_insecure_port(f"localhost:{port}")
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()


# -- definitions -------------------------------------------------------------------------------------


def test_each_task_that_waits_for_a_definition_has_its_own_time(alone: ServerProcess) -> None:
    """They wait for one answer, and who asked first has no say in how long the others do."""

    async def test() -> None:
        async with await kivi.aio.connect(alone.endpoint, timeout=60) as db:

            async def begun(timeout_s: float) -> asyncio.Task[Any]:
                db._core.timeout_s = timeout_s
                task = asyncio.create_task(db._run(db._core.fetch("t")))
                await asyncio.sleep(0)
                return task

            alone.signal(signal.SIGSTOP)
            hasty, patient = await begun(0.2), await begun(60)
            cancelled, late, last = await begun(60), await begun(0.4), await begun(60)
            assert len(db._transport._lookups) == 1
            cancelled.cancel()
            for task in (hasty, late):
                with pytest.raises(kivi.errors.Unavailable, match="no answer"):
                    await asyncio.wait_for(task, 30)
            assert not patient.done() and not last.done()
            alone.signal(signal.SIGCONT)
            assert [(await task).name for task in (patient, last)] == ["t", "t"]
            assert cancelled.cancelled() and not db._transport._lookups

    asyncio.run(test())


def test_a_definition_for_which_nobody_waits_any_more_is_not_handed_to_who_asks_next(alone: ServerProcess) -> None:
    async def test() -> None:
        async with await kivi.aio.connect(alone.endpoint, timeout=60) as db:
            alone.signal(signal.SIGSTOP)
            tasks = [asyncio.create_task(db._run(db._core.fetch("t"))) for _ in range(3)]
            await asyncio.sleep(0)
            (lookup,) = db._transport._lookups.values()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            next_one = asyncio.create_task(db._run(db._core.fetch("t")))
            await asyncio.wait([lookup.call], timeout=30)
            assert lookup.call.cancelled()
            alone.signal(signal.SIGCONT)
            assert (await next_one).name == "t"

    asyncio.run(test())


# -- snapshots ---------------------------------------------------------------------------------------

SNAPSHOTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"ttl_s": 3600},
    "of a commit": {"as_of": 1},
    "shared": {"shared": True, "ttl_s": 3600},
}


@pytest.mark.parametrize("kind", SNAPSHOTS)
def test_a_snapshot_whose_beginning_was_cancelled_is_let_go_of(alone: ServerProcess, kind: str) -> None:
    async def test() -> None:
        async with await kivi.aio.connect(alone.endpoint) as db:
            await db.get("t", (1,))
            first = await db.watermark()
            arguments = {**SNAPSHOTS[kind], **({"as_of": first} if "as_of" in SNAPSHOTS[kind] else {})}

            async def reads() -> None:
                async with db.snapshot(**arguments) as snap:
                    await snap.get("t", (1,))

            for turns in range(120):
                task = asyncio.ensure_future(reads())
                for _ in range(turns % 24):
                    await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await reads()
            assert await asyncio.to_thread(none_is_left, alone)

    asyncio.run(test())


@pytest.mark.parametrize("kind", ["plain", "kept", "shared"])
def test_a_snapshot_whose_beginning_took_too_long_is_let_go_of(alone: ServerProcess, kind: str) -> None:
    async def test() -> None:
        async with await kivi.aio.connect(alone.endpoint) as db:

            async def reads() -> None:
                async with db.snapshot(**SNAPSHOTS[kind]) as snap:
                    await snap.get("t", (1,))

            await reads()
            db._core.timeout_s = 0.5
            alone.signal(signal.SIGSTOP)
            outcomes = await asyncio.gather(*[reads() for _ in range(20)], return_exceptions=True)
            alone.signal(signal.SIGCONT)
            assert {type(outcome).__mro__[1] for outcome in outcomes} == {kivi.errors.Unavailable}
            db._core.timeout_s = 30
            assert await db.get("t", (1,))
            assert await asyncio.to_thread(none_is_left, alone)

    asyncio.run(test())


def test_a_shared_snapshot_whose_beginning_took_too_long_for_a_thread_is_let_go_of(alone: ServerProcess) -> None:
    with alone.connect() as db:
        db._core.timeout_s = 0.5
        alone.signal(signal.SIGSTOP)
        with pytest.raises(kivi.errors.Unavailable):
            db.snapshot(shared=True, ttl_s=3600).__enter__()
        alone.signal(signal.SIGCONT)
        db._core.timeout_s = 30
        assert db.get("t", (1,))
        assert none_is_left(alone)


def test_snapshots_that_could_not_leave_in_time_hold_up_no_later_ones(alone: ServerProcess) -> None:
    """Their message is still queued when others gather."""

    async def test() -> None:
        async with await kivi.aio.connect(alone.endpoint) as db:

            async def reads() -> int:
                async with db.snapshot() as snap:
                    row = await snap.get("t", (1,))
                    return row["n"] if row is not None else 0

            assert await reads() == 1
            alone.kill()
            db._core.timeout_s = 1.0
            assert isinstance((await asyncio.gather(reads(), return_exceptions=True))[0], kivi.errors.Unavailable)
            await asyncio.to_thread(alone.start)

            async def all_read() -> bool:
                with contextlib.suppress(kivi.errors.Unavailable):
                    assert await asyncio.gather(*[reads() for _ in range(3)]) == [1, 1, 1]
                    return True
                return False

            await until(all_read, reason="no snapshot since", pause_s=0.2)
            assert await asyncio.to_thread(none_is_left, alone)

    asyncio.run(test())


def test_transactions_that_were_cancelled_on_their_way_are_let_go_of(alone: ServerProcess) -> None:
    """Each begins in the request that was cancelled, which leaves after the releases of those before it."""

    async def test() -> None:
        async with await kivi.aio.connect(alone.endpoint) as db:
            await db.get("t", (1,))

            async def reads() -> None:
                async with db.transaction() as tx:
                    await tx.get("t", (1,))

            for turns in range(600):
                task = asyncio.ensure_future(reads())
                for _ in range(turns % 6):
                    await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            assert await db.get("t", (1,))
            assert await asyncio.to_thread(none_is_left, alone)

    asyncio.run(test())


# -- clients that are closed -------------------------------------------------------------------------


def test_a_task_of_a_client_that_is_closed_is_told_so_and_not_cancelled(alone: ServerProcess) -> None:
    async def test() -> None:
        db = await kivi.aio.connect(alone.endpoint)
        other = await kivi.aio.connect(alone.endpoint)
        alone.signal(signal.SIGSTOP)
        calls = [
            asyncio.ensure_future(call)
            for call in (
                db.tables(),
                db.describe("t"),
                db.watermark(),
                db.append("t", [{"id": 1, "n": 1}]),
                db.get("t", (1,)),
                db.consolidate(),
                db.create_table("u", key={"id": "int64"}, columns={"n": "int64"}),
            )
        ]
        cancelled = asyncio.ensure_future(other.watermark())
        await asyncio.sleep(0.2)
        cancelled.cancel()
        await asyncio.gather(db.close(), *calls, return_exceptions=True)
        alone.signal(signal.SIGCONT)
        for call in calls:
            assert not call.cancelled()
            with pytest.raises(kivi.errors.Unavailable, match="closed"):
                call.result()
        with contextlib.suppress(asyncio.CancelledError):
            await cancelled
        assert cancelled.cancelled()  # by its own, while the client was open
        await other.close()

    asyncio.run(test())
