"""No thread outlives its client: one that gRPC's lock died with would hang the interpreter's end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import kivi
import kivi.aio
from tests.serverproc import ServerProcess


@pytest.fixture(scope="module")
def events(server: ServerProcess) -> str:
    with server.connect() as db:
        db.create_event_table("threads_seen", event_time="ts", columns={"ts": "timestamp", "v": "int64"})
    return "threads_seen"


def test_closing_leaves_no_thread_behind(server, events):
    """With a stream read to its end, one left halfway, and a subscriber whom nobody reads."""
    for _ in range(20):
        before = _threads()
        with server.connect() as db:
            live = db.subscribe(events)
            db.append(events, [{"ts": 0, "v": 0}])
            assert live.next(60) is not None
            db.create_aggregate("threads_sum", events, ["v"], {"n": kivi.count()})
            db.drop("threads_sum")
            for i in range(5):
                db.append(events, [{"ts": i, "v": i}])
            assert not _threads() <= before
        assert _threads() <= before  # one that an earlier test has left may end meanwhile


def _threads() -> set[threading.Thread]:
    """But for gRPC's one for asyncio, which ends some time after the last client of another test."""
    return {thread for thread in threading.enumerate() if "_poll_wrapper" not in thread.name}


def test_connecting_that_is_interrupted_leaves_nothing_behind():
    """Nobody has the client, so nobody can close it."""
    with socket.create_server(("localhost", 0)) as silent:
        endpoint = f"localhost:{silent.getsockname()[1]}"
        before = _threads()
        with pytest.raises(KeyboardInterrupt), interrupted():
            kivi.connect(endpoint)
        assert _threads() <= before

        async def cancelled() -> set[Any]:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(kivi.aio.connect(endpoint), 0.1)
            return asyncio.all_tasks() - {asyncio.current_task()}

        assert asyncio.run(cancelled()) == set()


@pytest.mark.parametrize("what", ["commit", "get"])
def test_a_request_that_is_interrupted_before_it_left_keeps_nobody_waiting(server, what, monkeypatch):
    """Where it waits because much is queued, if it does: the requests of others may rely on what it queues."""
    monkeypatch.setattr("kivi.client.transport._COMPANY_S", 1.0)  # a Begin is still there when its transaction commits
    with server.connect() as db:
        table = f"interrupted_{what}"
        db.create_table(table, key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        with db.transaction() as tx, monkeypatch.context() as patch:
            tx.delta(table, (1,), n=1)
            patch.setattr("kivi.client.transport._QUEUED_MAX", -1)
            with contextlib.suppress(KeyboardInterrupt), interrupted():
                tx.commit() if what == "commit" else db.get(table, (1,))
            patch.undo()
        with db.transaction() as tx:
            tx.delta(table, (1,), n=1)
        assert db.get(table, (1,))["n"] in (1, 2)
        assert not db._transport.open()._waiters
        db.drop(table)


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """Soon, as by a key."""
    main = threading.main_thread().ident
    assert main is not None
    signal.siginterrupt(signal.SIGINT, True)  # Polars lets waits go on, once an earlier test has used it
    timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def test_updates_read_ahead_are_not_lost_when_the_client_closes(server, events):
    """What had arrived is handed out, without a gap; then the error."""
    with server.connect() as db:
        live = db.subscribe(events, where=kivi.col("v") > 100)
        for i in range(101, 140):
            db.append(events, [{"ts": i, "v": i}])
        first = live.next(60)
        assert first is not None
    seen = [change.row["v"] for change in first.changes]
    with pytest.raises(kivi.Unavailable, match="closed"):
        while (update := live.next(60)) is not None:
            seen += [change.row["v"] for change in update.changes]
    assert seen == list(range(101, 101 + len(seen)))


PROGRAM = """
import atexit, os, sys, threading
import kivi

class Watch:
    unclosed = len(sys.argv) > 3

    def __del__(self):
        print(*(t.name for t in threading.enumerate() if t.daemon), flush=True)
        os._exit(3) if self.unclosed else None

db = kivi.connect(sys.argv[1])
live = db.subscribe(sys.argv[2])
db.append(sys.argv[2], [{"ts": 1, "v": 1}])
atexit._clear() if Watch.unclosed else None
watch = Watch()  # collected when the interpreter ends
"""


def test_a_program_that_never_closes_ends_without_them(server, events):
    """By the time that the interpreter ends; and the watch does see them where nothing closes the client."""
    program = [sys.executable, "-c", PROGRAM, server.endpoint, events]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", "\n")
    ran = subprocess.run([*program, "unclosed"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 3
    assert "kivi-session" in ran.stdout
