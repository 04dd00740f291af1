"""No thread outlives its client: one that gRPC's lock died with would hang the interpreter's end."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

import kivi
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
            assert live.next(5) is not None
            db.create_aggregate("threads_sum", events, ["v"], {"n": kivi.count()})
            db.drop("threads_sum")
            for i in range(5):
                db.append(events, [{"ts": i, "v": i}])
            assert _threads() > before
        assert _threads() == before


def _threads() -> set[threading.Thread]:
    """But for gRPC's one for asyncio, which ends some time after the last client of another test."""
    return {thread for thread in threading.enumerate() if "_poll_wrapper" not in thread.name}


def test_updates_read_ahead_are_not_lost_when_the_client_closes(server, events):
    """What had arrived is handed out, without a gap; then the error."""
    with server.connect() as db:
        live = db.subscribe(events, where=kivi.col("v") > 100)
        for i in range(101, 140):
            db.append(events, [{"ts": i, "v": i}])
        first = live.next(5)
        assert first is not None
    seen = [change.row["v"] for change in first.changes]
    with pytest.raises(kivi.Unavailable, match="closed"):
        while (update := live.next(5)) is not None:
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
