"""No call lasts longer than its timeout, when its connection breaks late and the next one says nothing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kivi
import kivi.aio
from tests.client.proxy import Proxy
from tests.serverproc import ServerProcess
from tests.waiting import Pulse, wait_until

TIMEOUT_S = 4.0
BREAKS_S = 3.0
SLACK_S = 2.5  # one that began its time anew took 3 more

Call = Callable[[], object]


@contextlib.contextmanager
def broken_late(proxy: Proxy) -> Iterator[None]:
    """From now on nothing is answered, and the connection ends in a while."""
    proxy.mute = True
    breaking = threading.Timer(BREAKS_S, proxy.cut)
    breaking.start()
    try:
        yield
    finally:
        breaking.join()
        proxy.mute = False


def commits(db: Any, table: str) -> Call:
    tx = db.transaction().__enter__()
    tx.delta(table, (1,), balance=1)
    return tx.commit


def commits_what_it_read(db: Any, table: str) -> Call:
    tx = db.transaction().__enter__()
    tx.get(table, (1,))
    tx.put(table, (2,), balance=1)
    return tx.commit


def reads_again(db: Any, table: str) -> Call:
    snap = db.snapshot().__enter__()
    assert snap.ts
    return lambda: snap.get(table, (1,))


CALLS: dict[str, Callable[[Any, str], Call]] = {
    "get": lambda db, table: lambda: db.get(table, (1,)),
    "tables": lambda db, table: db.tables,
    "describe": lambda db, table: lambda: db.describe(table),
    "outcome": lambda db, table: lambda: db.outcome("a token"),
    "write": lambda db, table: lambda: db.write(table, [{"id": 3, "balance": 1}]),
    "commit": commits,
    "commit of what was read": commits_what_it_read,
    "read of a snapshot": reads_again,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_a_thread_ends_in_time(server: ServerProcess, accounts: str, name: str) -> None:
    with Proxy(server.port) as proxy, proxy.connect(timeout=TIMEOUT_S) as db:
        db.write(accounts, [{"id": 4, "balance": 1}])  # with all that is loaded for it
        call = CALLS[name](db, accounts)
        with Pulse() as pulse, broken_late(proxy):
            began = time.monotonic()
            with pytest.raises((kivi.Unavailable, kivi.CommitUnknown)):
                call()
            assert BREAKS_S < time.monotonic() - began < TIMEOUT_S + SLACK_S + pulse.late_s


def test_a_commit_of_a_task_ends_in_time(server: ServerProcess, accounts: str) -> None:
    async def test(proxy: Proxy) -> None:
        async with await kivi.aio.connect(proxy.endpoint, timeout=TIMEOUT_S) as db:
            await db.get(accounts, (1,))
            with Pulse() as pulse, broken_late(proxy):
                began = time.monotonic()
                with pytest.raises(kivi.CommitUnknown):
                    async with db.transaction() as tx:
                        await tx.delta(accounts, (1,), balance=1)
                assert BREAKS_S < time.monotonic() - began < TIMEOUT_S + SLACK_S + pulse.late_s

    with Proxy(server.port) as proxy:
        asyncio.run(test(proxy))


def test_a_subscription_gives_nothing_for_no_longer_than_it_is_waited_for(
    server: ServerProcess, db: Any, accounts: str
) -> None:
    """While it is taken up again; and what comes then, it gives."""
    with Proxy(server.port) as proxy, proxy.connect(timeout=60) as client, client.subscribe(accounts) as live:
        assert live.next(30) is not None
        proxy.mute = True
        proxy.cut()
        wait_until(lambda: live.silent_s > 0 and client._transport._current.broken is not None)
        for _ in range(4):
            with Pulse() as pulse:
                began = time.monotonic()
                assert live.next(0.5) is None
                assert time.monotonic() - began < 0.5 + SLACK_S + pulse.late_s
        with db.transaction() as tx:
            tx.put(accounts, (9,), balance=1)
        proxy.lose()
        until = time.monotonic() + 50
        while (update := live.next(0.5)) is None or not update.changes:
            assert time.monotonic() < until
        assert [row["id"] for row in live.rows] == [9]
