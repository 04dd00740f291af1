"""Threads that compute say so to the system; those that answer do not, and nobody is told twice."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kivi_server.sessions import Sessions

import kivi
from kivi.runtime.scheduling import use_batch_scheduling
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has batch threads")


def policy_after(*steps: Any) -> int:
    """Of a thread that does these."""
    with ThreadPoolExecutor(1) as thread:
        for step in steps:
            thread.submit(step).result()
        return thread.submit(os.sched_getscheduler, 0).result()


def test_a_thread_that_computes_is_a_batch_thread() -> None:
    assert policy_after(use_batch_scheduling) == os.SCHED_BATCH
    assert policy_after() == os.SCHED_OTHER == os.sched_getscheduler(0)


def test_what_somebody_else_has_said_stays() -> None:
    assert (
        policy_after(lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)), use_batch_scheduling)
        == os.SCHED_IDLE
    )


def test_a_sandbox_that_forbids_it_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    assert policy_after(use_batch_scheduling) == os.SCHED_OTHER


def test_which_threads_of_a_store_and_its_server_compute(tmp_path: Path) -> None:
    with contextlib.closing(kivi.open(str(tmp_path / "data"))) as db:
        db.create_table("t", key={"id": "int64"}, columns={"n": "int64"})
        sessions = Sessions(db.store, "test")
        for pool in (sessions.writes, sessions.scans):
            assert pool.submit(os.sched_getscheduler, 0).result() == os.SCHED_BATCH
        for pool in (sessions.reads, sessions.full, sessions.outcomes):
            assert pool.submit(os.sched_getscheduler, 0).result() == os.SCHED_OTHER
        own = [t for t in threading.enumerate() if t.name.startswith(("kivi-consolidate", "kivi-log-writer"))]
        assert own
        # Each says it first of all when it runs.
        wait_until(lambda: {os.sched_getscheduler(t.native_id or 0) for t in own} == {os.SCHED_BATCH})
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
        sessions.close()
