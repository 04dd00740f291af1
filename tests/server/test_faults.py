"""A fault of the server, or a pool that takes no work, leaves nothing unanswered, and answers nothing twice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kivi_server.auth import Tokens
from kivi_server.service import Service
from kivi_server.sessions import Sessions

from kivi.api.tokens import new_token
from kivi.wire.status import from_error
from kivi.wire.v1 import service_pb2, session_pb2
from tests.server.peers import Peer, hits, run
from tests.server.rawsession import Sent
from tests.server.test_appends import append, found, make_events
from tests.waiting import until

EACH = session_pb2.Operation.KIND_APPEND_EACH
FIRST, WAITING = False, True
"""Which call of the store fails: the one that may not wait for room, or the one that may."""


def small(peer: Peer) -> Sent:
    return peer.commit()


def large(peer: Peer) -> Sent:
    """Done by a pool, which hands it on to another of its threads."""
    request = peer.commit()
    request.operations.extend([request.operations[0]] * 300)
    return request


def plain(peer: Peer) -> Sent:
    return peer.commit_each(peer.commit(), peer.commit())


def each(peer: Peer) -> Sent:
    sent = append(1, 7)
    assert isinstance(sent, tuple)
    sent[0].operations[0].kind = EACH
    return sent


def told(peer: Peer) -> list[tuple[int, str, Any]]:
    """Of each answer its number, what it is, and the token that it names."""
    errors = [(reply.id, from_error(reply.error)) for reply in peer.replies]
    return [(number, type(error).__name__, getattr(error, "token", None)) for number, error in errors]


def tokens_of(sent: Sent) -> dict[int, str]:
    request = sent[0] if isinstance(sent, tuple) else sent
    asked = request.commit_each
    return dict(zip(asked.ids, asked.tokens, strict=True)) or {request.id: request.commit.token}


@pytest.mark.parametrize("enters", [False, True])
@pytest.mark.parametrize("fails", [FIRST, WAITING])
@pytest.mark.parametrize("make", [small, large, each])
def test_a_fault_in_a_commit_is_told_once_and_that_it_may_have_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Peer], Sent], fails: bool, enters: bool
) -> None:
    """By the event loop, by a pool, and by that of commits that wait for room; before it enters, and after it."""

    async def story(sessions: Sessions) -> None:
        make_events(sessions)
        peer, store = Peer(sessions), sessions.store
        name = "append_each" if make is each else "commit_together"
        real = getattr(store, name)

        def fault(commits: Any, *arguments: Any, may_wait: bool = True, **named: Any) -> Any:
            if not may_wait and fails is WAITING:
                return False if make is each else commits
            if enters:
                real(commits, *arguments, **named)
            raise ZeroDivisionError

        monkeypatch.setattr(store, name, fault)
        sent = make(peer)
        await peer.ask(sent)
        await until(lambda: peer.answers and not sessions.commits_in_flight)
        store.commits.wait_for_entered(10)
        await asyncio.sleep(0.1)  # for what would be a second answer
        ((number, token),) = tokens_of(sent).items()
        (reply,) = peer.replies
        if reply.HasField("error"):
            assert told(peer) == [(number, "CommitUnknown", token)]
            assert "the server failed" in reply.error.message and "outcome()" in reply.error.message
        else:  # the log was quicker than the fault
            assert enters
        assert peer.counted == 1 and sessions.commits_in_flight == 0 and len(store.leases) == 0
        assert bool(found(sessions) if make is each else hits(store)) == enters

    run(story, tmp_path)


@pytest.mark.parametrize("enters", [False, True])
def test_a_fault_in_plain_commits_is_told_once_to_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enters: bool
) -> None:
    async def story(sessions: Sessions) -> None:
        peer, store = Peer(sessions), sessions.store
        real = store.write

        def fault(*arguments: Any) -> Any:
            if enters:
                real(*arguments)
            raise ZeroDivisionError

        monkeypatch.setattr(store, "write", fault)
        sent = plain(peer)
        await peer.ask(sent)
        await until(lambda: peer.has(2) and not sessions.commits_in_flight)
        store.commits.wait_for_entered(10)
        await asyncio.sleep(0.1)
        assert told(peer) == [(number, "CommitUnknown", token) for number, token in tokens_of(sent).items()]
        assert peer.counted == 2 and sessions.commits_in_flight == 0
        assert hits(store) == (2 if enters else None)

    run(story, tmp_path)


def test_plain_commits_that_were_told_before_a_fault_are_not_told_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(sessions: Sessions) -> None:
        peer, store = Peer(sessions), sessions.store
        await peer.ask(peer.commit_each(peer.commit(token="known")))
        await until(lambda: peer.has(1))
        monkeypatch.setattr(store.log, "append", lambda *_: 1 / 0)
        await peer.ask(peer.commit_each(peer.commit(token="known"), peer.commit(token="new")))
        await until(lambda: peer.has(3) and not sessions.commits_in_flight)
        first, repeated, failed = sorted(peer.replies, key=lambda reply: reply.id)
        assert repeated.commit.commit_ts == first.commit.commit_ts
        error = from_error(failed.error)
        assert type(error).__name__ == "CommitUnknown" and error.details["token"] == "new"
        monkeypatch.undo()

    run(story, tmp_path)


@pytest.mark.parametrize("make", [small, large, each])
def test_a_pool_that_takes_no_commit_that_waits_leaves_it_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Peer], Sent]
) -> None:
    async def story(sessions: Sessions) -> None:
        make_events(sessions)
        peer, store = Peer(sessions), sessions.store
        monkeypatch.setattr(store, "commit_together", lambda commits, **_: commits)
        monkeypatch.setattr(store, "append_each", lambda *_, **__: False)
        sessions.full.shutdown()
        sent = make(peer)
        await peer.ask(sent)
        await until(lambda: peer.answers)
        ((number, token),) = tokens_of(sent).items()
        assert told(peer) == [(number, "CommitUnknown", token)]
        assert peer.counted == 1 and sessions.commits_in_flight == 0 and len(store.leases) == 0

    run(story, tmp_path)


def test_a_pool_that_takes_no_large_commit_leaves_it_answered_and_the_others_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose operations came before, so that the event loop begins it."""

    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        operations = large(peer)
        assert isinstance(operations, session_pb2.Request)
        many = [session_pb2.Request(id=n, txn=9, operations=operations.operations[:150]) for n in (11, 12)]
        for request in many:
            request.apply.SetInParent()
        many[0].first.SetInParent()
        await peer.ask(*many)
        await until(lambda: peer.has(2))
        sessions.writes.shutdown()
        commit = session_pb2.Request(id=13, txn=9, commit=session_pb2.Commit(token=new_token()))
        await peer.ask(commit, peer.commit())
        await until(lambda: peer.has(4))
        outcomes = {number: kind for number, kind, _ in told(peer) if number == 13}
        assert outcomes == {13: "CommitUnknown"}
        assert sessions.commits_in_flight == 0 and len(sessions.store.leases) == 0 and not peer.session.txns
        assert hits(sessions.store) == 1

    run(story, tmp_path)


def scan(number: int, txn: int, **more: Any) -> session_pb2.Request:
    request = session_pb2.Request(id=number, txn=txn, **more)
    request.scan_open.spec.table = "counters"
    return request


def test_a_pool_that_takes_no_request_leaves_each_answered_and_no_transaction_busy(tmp_path: Path) -> None:
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        sessions.reads.shutdown()
        sessions.writes.shutdown()
        alone = large(peer)
        assert isinstance(alone, session_pb2.Request)
        ended = session_pb2.Request(id=24, txn=9, commit=session_pb2.Commit(token=new_token()))
        await peer.ask(scan(21, 9, first=session_pb2.Begin()), scan(22, 9), scan(23, 9), ended, alone)
        await until(lambda: peer.has(5))
        assert sorted(number for number, *_ in told(peer)) == sorted([21, 22, 23, 24, alone.id])
        assert all("the server failed" in reply.error.message for reply in peer.replies)
        assert peer.counted == 5 and not peer.session.txns and peer.session._bytes_waiting == 0
        assert len(sessions.store.leases) == 0 and hits(sessions.store) is None

    run(story, tmp_path)


@pytest.mark.parametrize("make", [large, lambda peer: scan(1, 9, first=session_pb2.Begin())])
def test_what_a_pool_refuses_for_want_of_a_thread_and_does_all_the_same_is_answered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Peer], Sent]
) -> None:
    """An executor that can start no thread has queued the work before it raises: a thread that it has does it."""

    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        for pool in (sessions.reads, sessions.writes):
            submit = pool.submit

            def refuse(*arguments: Any, submit: Any = submit) -> Any:
                queued = submit(*arguments)
                if threading.current_thread() is threading.main_thread():  # else by a thread of the same pool
                    queued.result(60)
                raise RuntimeError("can't start new thread")

            monkeypatch.setattr(pool, "submit", refuse)
        await peer.ask(make(peer))
        await until(lambda: peer.answers and not sessions.commits_in_flight)
        await asyncio.sleep(0.1)
        assert len(peer.replies) == peer.counted == 1 and peer.session._bytes_waiting == 0

    run(story, tmp_path)


def test_administration_that_takes_long_delays_no_call_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of it than any pool has threads."""

    async def story(sessions: Sessions) -> None:
        service, go_on = Service(sessions, Tokens(), dict), threading.Event()
        context: Any = SimpleNamespace(
            invocation_metadata=tuple, peer=lambda: "ipv4:127.0.0.1:1", write=lambda _: asyncio.sleep(0)
        )
        monkeypatch.setattr(sessions.store, "consolidate", go_on.wait)
        monkeypatch.setattr(sessions.store, "create", lambda *_, **__: go_on.wait() and 1 / 0)
        monkeypatch.setattr(sessions.translator, "new_aggregate", lambda request: request)
        long = [service.unary("Consolidate", service_pb2.ConsolidateRequest(), context) for _ in range(64)]
        long += [service.CreateAggregate(service_pb2.CreateAggregateRequest(), context) for _ in range(64)]
        running = asyncio.gather(*long, return_exceptions=True)
        try:
            await asyncio.sleep(0.1)
            async with asyncio.timeout(60):
                reply = await service.unary("Watermark", service_pb2.WatermarkRequest(), context)
            assert reply.watermark == sessions.store.watermark()
        finally:
            go_on.set()
            await running

    run(story, tmp_path)
