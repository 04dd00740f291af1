"""Plain commits on the event loop: which are done there, with whom they share a sync, and what the worker gets."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import Any

import pytest
from kivi_server import leading
from kivi_server.auth import Access, Allowance, Grant
from kivi_server.sessions import Sessions

from tests.server.peers import Peer, hits, log_of, quick, run
from tests.waiting import until


def test_a_frame_of_plain_commits_is_done_in_the_next_turn_by_the_event_loop_itself(tmp_path):
    async def story(sessions: Sessions) -> None:
        peer, store = Peer(sessions), sessions.store
        syncs = store.log.stats()["syncs"]
        assert peer.here(*[peer.commit(hits=n) for n in range(1, 6)])
        assert peer.answers == []
        await asyncio.sleep(0)
        assert [answer.id for answer in peer.replies] == [1, 2, 3, 4, 5]
        stamps = [answer.commit.commit_ts for answer in peer.replies]
        assert stamps == list(range(stamps[0], stamps[0] + 5)) and store.watermark() == stamps[-1]
        assert peer.threads == {threading.get_ident()}
        assert hits(store) == 15
        assert store.log.stats()["syncs"] == syncs + 1
        assert peer.session._bytes_handled > 0 and sessions.commits_in_flight == 0

    run(story, tmp_path)


def test_frames_of_several_sessions_share_a_sync(tmp_path):
    async def story(sessions: Sessions) -> None:
        peers = [Peer(sessions) for _ in range(8)]
        syncs = sessions.store.log.stats()["syncs"]
        for peer in peers:
            assert peer.here(peer.commit(), peer.commit())
        await asyncio.sleep(0)
        assert all(len(peer.replies) == 2 for peer in peers)
        assert sessions.store.log.stats()["syncs"] == syncs + 1
        assert hits(sessions.store) == 16

    run(story, tmp_path)


@pytest.mark.parametrize(("limit", "most"), [("_AT_ONCE", 3), ("_AT_ONCE_BYTES", 300)])
def test_what_is_too_much_for_a_turn_is_done_in_the_next(tmp_path, monkeypatch, limit, most):
    monkeypatch.setattr(leading, limit, most)

    async def story(sessions: Sessions) -> None:
        peers = [Peer(sessions) for _ in range(4)]
        for peer in peers:
            assert peer.here(peer.commit(), peer.commit())
        turns = []
        while not all(peer.answers for peer in peers):
            await asyncio.sleep(0)
            turns.append(sum(len(peer.replies) for peer in peers))
        assert [*dict.fromkeys(turns)] == [4, 8]
        assert hits(sessions.store) == 8

    run(story, tmp_path)


def test_a_fault_in_one_frame_does_not_keep_the_others_waiting(tmp_path, monkeypatch):
    async def story(sessions: Sessions) -> None:
        bad, good = Peer(sessions), Peer(sessions)
        heard: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context))

        def fault(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(bad.session, "commit_here", fault)
        assert bad.here(bad.commit()) and good.here(good.commit())
        await until(lambda: good.answers)
        assert len(heard) == 1 and hits(sessions.store) == 1

    run(story, tmp_path)


def test_a_frame_with_anything_else_in_it_is_the_workers_as_a_whole(tmp_path):
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        unknown = peer.commit()
        unknown.operations[0].table = "nowhere"
        within = peer.commit()
        within.txn = 77
        for other in (peer.read(), unknown, within):
            assert not peer.here(peer.commit(), peer.commit(), peer.commit(), other)
        many = [peer.commit() for _ in range(257)]
        assert not peer.here(*many)
        await asyncio.sleep(0.01)
        assert peer.answers == [] and hits(sessions.store) is None

    run(story, tmp_path)


def test_a_retry_and_one_that_is_misused_are_told_by_the_worker(tmp_path):
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        assert peer.here(peer.commit(token="a"), peer.commit(token="b"))
        await asyncio.sleep(0)
        first = {answer.id: answer.commit.commit_ts for answer in peer.replies}
        await quick(sessions.store)
        assert peer.here(peer.commit(token="a"), peer.commit(token="c"), peer.commit(hits=7, token="b"))
        await until(lambda: len(peer.replies) == 5)
        answers = {answer.id: answer for answer in peer.replies}
        assert answers[3].commit.commit_ts == first[1]
        assert answers[4].commit.commit_ts == first[2] + 1
        assert "another payload" in answers[5].error.message
        assert hits(sessions.store) == 3
        await until(lambda: sessions.commits_in_flight == 0)

    run(story, tmp_path)


def test_while_syncs_are_slow_or_the_log_is_busy_commits_are_the_workers(tmp_path):
    async def story(sessions: Sessions) -> None:
        peer, log = Peer(sessions), log_of(sessions.store)
        log._sync_s = 0.1
        assert not peer.here(peer.commit())
        await quick(sessions.store)
        sessions.took(1.0, 0)
        assert not peer.here(peer.commit())
        sessions._slow_until = 0.0
        assert peer.here(peer.commit())
        await asyncio.sleep(0)
        assert hits(sessions.store) == 1

    run(story, tmp_path)


def test_a_disk_that_stalls_is_felt_once(tmp_path, monkeypatch):
    """And what the log's threads then sync makes it quick again."""

    async def story(sessions: Sessions) -> None:
        peer, log = Peer(sessions), log_of(sessions.store)
        sync = log._files.fdatasync

        def stalls(fd: int) -> None:
            time.sleep(0.3)
            sync(fd)

        monkeypatch.setattr(log._files, "fdatasync", stalls)
        assert peer.here(peer.commit())
        await asyncio.sleep(0)
        assert len(peer.replies) == 1
        monkeypatch.setattr(log._files, "fdatasync", sync)
        assert not log.is_quick() and not sessions.is_quick()
        assert not peer.here(peer.commit())
        for n in range(100):
            peer.by_the_worker(peer.commit())
            await until(partial(peer.has, n + 2))
        await until(lambda: log._sync_s < 0.1)

    run(story, tmp_path)


def test_who_may_not_write_is_told_so_and_who_has_a_rate_is_the_workers(tmp_path):
    async def story(sessions: Sessions) -> None:
        reader = Peer(sessions, Grant(Access.READ, name="reader"))
        assert reader.here(reader.commit())
        await asyncio.sleep(0)
        assert reader.replies[0].error.message and hits(sessions.store) is None
        limited = Peer(sessions)
        limited.session.client.allowance = Allowance(rate=1.0)
        assert not limited.here(limited.commit())

    run(story, tmp_path)


def test_once_the_server_stops_nothing_new_begins(tmp_path):
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        assert peer.here(peer.commit())
        sessions.stopping = True
        await asyncio.sleep(0)
        assert "stopping" in peer.replies[0].error.message and hits(sessions.store) is None

    run(story, tmp_path)
