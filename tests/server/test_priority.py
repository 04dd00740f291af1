"""Threads that compute give way to those that answer: what the system knows of a real server's threads."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from kivi.priority import give_way

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")


def how(thread: int) -> tuple[int, int]:
    return os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)


def test_what_computes_gives_way_and_what_answers_does_not(server, db):
    db.create_event_table("computed", event_time="ts", columns={"ts": "timestamp", "n": "int64"})
    db.append("computed", [{"ts": i, "n": i} for i in range(10_000)])  # few are no work for a thread of their own
    db.drop("computed")
    pid = server.pid
    threads = [how(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()]
    assert how(pid) == (os.SCHED_OTHER, os.getpriority(os.PRIO_PROCESS, os.getpid()))
    assert sum(policy == os.SCHED_BATCH and nice >= 3 for policy, nice in threads) >= 2  # folding, and deriving


def test_a_thread_that_has_less_weight_already_keeps_it():
    found = []

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 7)
        give_way()
        found.append(how(threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(os.SCHED_BATCH, 7)]
