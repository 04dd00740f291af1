"""Requests for a snapshot that is to come hold up nobody: not others' requests, nor the end of the server."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from kivi_server.waiting import Waiting

import kivi
from kivi.api.tokens import new_token
from kivi.wire.v1 import session_pb2
from tests.server.rawsession import RawSession
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

pb = session_pb2
NEVER = 2**60
LONG_MS = 2**32 - 1


def beginning(number: int, min_snapshot: int, timeout_ms: int = LONG_MS) -> pb.Request:
    return pb.Request(id=number, txn=number, begin=pb.Begin(min_snapshot=min_snapshot), timeout_ms=timeout_ms)


def getting(number: int, min_snapshot: int, timeout_ms: int = LONG_MS) -> pb.Request:
    request = pb.Request(id=number, first=pb.Begin(min_snapshot=min_snapshot), timeout_ms=timeout_ms)
    request.get.table = "accounts"
    request.get.keys.add().values.add(int_value=1)
    return request


def add(db: Any) -> int:
    with db.transaction() as tx:
        tx.delta("accounts", (1,), balance=1)
    return int(tx.commit_ts)


@pytest.mark.parametrize("ask", [beginning, getting])
@pytest.mark.parametrize("leaves", [False, True])
def test_hundreds_that_wait_hold_up_no_outcome_and_no_commit(server, db, accounts, ask, leaves):
    stranger = RawSession(server.endpoint)
    stranger.send(*[ask(number, NEVER) for number in range(1, 401)], pb.Request(id=500, commit=pb.Commit()))
    stranger.reply(500)
    if leaves:
        stranger.close()
    with server.connect(timeout=60) as other:
        for _ in range(20):
            assert other.outcome(new_token()) is kivi.ABORTED
            add(other)
            with other.snapshot(min_snapshot=other.watermark()) as snap:
                assert snap.get("accounts", (1,))
    if not leaves:
        stranger.send(pb.Request(id=501, outcome=pb.Outcome(token=new_token())))
        assert stranger.reply(501).outcome.state == pb.OutcomeReply.STATE_ABORTED
        stranger.close()
    wait_until(lambda: not (stats := db.stats())["server_open_transactions"] and not stats["leases"])


@pytest.mark.parametrize("ask", [beginning, getting])
def test_each_goes_on_when_its_snapshot_is_there_and_is_told_when_its_time_is_up(raw, db, accounts, ask):
    now = add(db)
    raw.send(
        ask(1, now + 3),
        ask(2, now + 1),
        ask(3, NEVER, timeout_ms=150),
        ask(4, now + 2),
        ask(5, NEVER, timeout_ms=1),
    )
    for number in (5, 3):
        error = raw.reply(number).error
        assert error.reason == "Unavailable" and f"the snapshot {NEVER} is not readable yet" in error.message
    for number, ts in ((2, now + 1), (4, now + 2), (1, now + 3)):
        while db.watermark() < ts:
            add(db)
        assert raw.reply(number).start_ts >= ts


def test_a_read_behind_a_beginning_that_waits_waits_with_it(raw, db, accounts):
    now = add(db)
    read = getting(2, 0)
    read.txn = 1
    read.ClearField("first")
    raw.send(beginning(1, now + 1), read)
    add(db)
    assert raw.reply(2).start_ts == raw.reply(1).start_ts > now


def test_a_server_that_is_told_to_stop_waits_for_none_of_them(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server, server.connect(timeout=300) as db:
        db.create_table("accounts", key={"id": "int64"}, columns={"balance": kivi.sum("int64")})
        stranger = RawSession(server.endpoint)
        stranger.send(*[beginning(number, NEVER) for number in range(1, 40)], getting(40, NEVER))
        failed: list[str] = []

        def wait() -> None:
            with pytest.raises(kivi.errors.Unavailable) as told, db.snapshot(min_snapshot=NEVER) as snap:
                snap.get("accounts", (1,))
            failed.append(str(told.value))

        waits = threading.Thread(target=wait)
        waits.start()
        wait_until(lambda: db.stats()["server_open_transactions"] >= 40)
        assert server.stop(60) == 0
        waits.join(60)
        assert failed and "stopping" in failed[0]
        stranger.close()


def test_what_is_wanted_no_more_is_forgotten(tmp_path: Path) -> None:
    """Of a session that has ended, however long it would have waited; the others go on."""
    with contextlib.closing(kivi.open(str(tmp_path / "data"))) as db:
        db.create_table("accounts", key={"id": "int64"}, columns={"balance": kivi.sum("int64")})
        waiting = Waiting(db.store, lambda: False)
        gone, went = threading.Event(), list[int]()
        later = time.monotonic() + 3600
        for i in range(1_000):
            waiting.add(NEVER + i % 7, later, lambda: not gone.is_set(), lambda: went.append(-1))
        due = threading.Event()
        waiting.add(db.watermark() + 1, later, lambda: True, due.set)
        gone.set()
        wait_until(lambda: len(waiting._heap) <= 1)
        assert len(waiting._heap) == 1
        add(db)
        assert due.wait(60)
        waiting.add(NEVER, later, lambda: True, lambda: went.append(1))
        waiting.close()  # whoever waits still is to say that the server stops
        assert went == [1]
