"""Threads that compute give way to those that answer: what the system knows of a real server's threads."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from kivi.priority import NICE, give_way

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a weight for each thread")


def weight(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def test_what_computes_gives_way_and_what_answers_does_not(server, db):
    """Folding, deriving and matching, in this order of their beginning."""
    own = weight(os.getpid())
    db.create_event_table("computed", event_time="ts", columns={"ts": "timestamp", "n": "int64"})
    with db.subscribe("computed") as live:
        db.append("computed", [{"ts": i, "n": i} for i in range(10_000)])  # few are no work for a thread of their own
        assert live.next(10.0) is not None
        threads = [weight(int(task.name)) for task in Path(f"/proc/{server.pid}/task").iterdir()]
    db.drop("computed")
    assert weight(server.pid) == own
    assert sum(each == max(own, NICE) for each in threads) >= 3
    assert sum(each == own for each in threads) > len(threads) // 2


def test_a_thread_that_has_less_weight_already_keeps_it():
    found = []

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE + 4)
        give_way()
        found.append(weight(threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [NICE + 4]
