"""The event loop's turns: what is done in one, who shares a sync, and when it does not read or write itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from kivi_server import scheduler
from kivi_server.auth import Access, Grant
from kivi_server.scheduler import Scheduler, disk_reads
from kivi_server.sessions import Sessions

from kivi.store.facade import Store
from tests.server.peers import Peer, hits, log_of, quick, run, slow
from tests.waiting import until


def test_a_frame_of_plain_commits_is_done_in_the_next_turn_by_the_event_loop_itself(tmp_path):
    async def story(sessions: Sessions) -> None:
        peer, store = Peer(sessions), sessions.store
        syncs = store.log.stats()["syncs"]
        peer.hand_in(*[peer.commit(hits=n) for n in range(1, 6)])
        assert peer.answers == []
        await asyncio.sleep(0)
        assert [answer.id for answer in peer.replies] == [1, 2, 3, 4, 5]
        stamps = [answer.commit.commit_ts for answer in peer.replies]
        assert stamps == list(range(stamps[0], stamps[0] + 5)) and store.watermark() == stamps[-1]
        assert peer.threads == {threading.get_ident()}
        assert hits(store) == 15
        assert store.log.stats()["syncs"] == syncs + 1
        assert sessions.commits_in_flight == 0

    run(story, tmp_path)


def test_frames_of_several_sessions_share_a_sync(tmp_path):
    async def story(sessions: Sessions) -> None:
        peers = [Peer(sessions) for _ in range(8)]
        syncs = sessions.store.log.stats()["syncs"]
        for peer in peers:
            peer.hand_in(peer.commit(), peer.commit())
        await asyncio.sleep(0)
        assert all(len(peer.replies) == 2 for peer in peers)
        assert sessions.store.log.stats()["syncs"] == syncs + 1
        assert hits(sessions.store) == 16

    run(story, tmp_path)


def test_what_is_too_much_for_a_turn_is_done_in_the_next(tmp_path):
    async def story(sessions: Sessions) -> None:
        peers = [Peer(sessions) for _ in range(4)]
        with patch.object(scheduler, "_TURN_S", 0.0):
            for peer in peers:
                peer.hand_in(peer.commit(), peer.commit())
            assert not any(peer.answers for peer in peers)
            await asyncio.sleep(0)
            assert not all(peer.answers for peer in peers)
        await until(lambda: all(len(peer.replies) == 2 for peer in peers))
        assert hits(sessions.store) == 8

    run(story, tmp_path)


def test_a_fault_in_one_frame_does_not_keep_the_others_waiting(tmp_path, monkeypatch):
    async def story(sessions: Sessions) -> None:
        bad, good = Peer(sessions), Peer(sessions)
        heard: list[BaseException] = []

        def fault(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(bad.session, "_commit_group", fault)
        monkeypatch.setattr(bad.session, "drop", heard.append)
        bad.hand_in(bad.commit())
        good.hand_in(good.commit())
        await until(lambda: good.answers)
        assert len(heard) == 1 and hits(sessions.store) == 1

    run(story, tmp_path)


def test_a_retry_and_one_that_is_misused_are_told(tmp_path):
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        peer.hand_in(peer.commit(token="a"), peer.commit(token="b"))
        await asyncio.sleep(0)
        first = {answer.id: answer.commit.commit_ts for answer in peer.replies}
        await quick(sessions.store)
        peer.hand_in(peer.commit(token="a"), peer.commit(token="c"), peer.commit(hits=7, token="b"))
        await until(lambda: len(peer.replies) == 5)
        answers = {answer.id: answer for answer in peer.replies}
        assert answers[3].commit.commit_ts == first[1]
        assert answers[4].commit.commit_ts == first[2] + 1
        assert "another payload" in answers[5].error.message
        assert hits(sessions.store) == 3
        await until(lambda: sessions.commits_in_flight == 0)

    run(story, tmp_path)


def test_while_syncs_are_slow_commits_are_written_by_the_logs_threads(tmp_path):
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        slow(sessions.store)
        await peer.ask(peer.commit(), peer.commit())
        await until(lambda: peer.has(2))
        assert threading.get_ident() not in peer.threads and hits(sessions.store) == 2

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
        peer.hand_in(peer.commit())
        await asyncio.sleep(0)
        assert len(peer.replies) == 1
        monkeypatch.setattr(log._files, "fdatasync", sync)
        assert not log.is_quick()
        for n in range(100):
            await peer.ask(peer.commit())
            await until(partial(peer.has, n + 2))
        await until(lambda: log._sync_s < 0.1)

    run(story, tmp_path)


def test_who_may_not_write_is_told_so(tmp_path):
    async def story(sessions: Sessions) -> None:
        reader = Peer(sessions, Grant(Access.READ, name="reader"))
        reader.hand_in(reader.commit())
        await asyncio.sleep(0)
        assert reader.replies[0].error.message and hits(sessions.store) is None

    run(story, tmp_path)


def test_once_the_server_stops_nothing_new_begins(tmp_path):
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        peer.hand_in(peer.commit())
        sessions.stopping = True
        await asyncio.sleep(0)
        assert "stopping" in peer.replies[0].error.message and hits(sessions.store) is None

    run(story, tmp_path)


# -- who reads ----------------------------------------------------------------------------------------


@pytest.fixture
def made() -> Iterator[Scheduler]:
    with contextlib.closing(Store.open()) as store, contextlib.closing(asyncio.new_event_loop()) as loop:
        yield Scheduler(store, loop)


@pytest.mark.parametrize(
    ("seconds", "reads", "quick"),
    [(0.001, 5, True), (0.02, 0, True), (0.02, 1, False), (0.2, 0, False)],
)
def test_what_a_slow_frame_decides(
    made: Scheduler, monkeypatch: pytest.MonkeyPatch, seconds: float, reads: int, quick: bool
) -> None:
    now = 100.0
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: now))
    made.took(seconds, reads)
    assert made.is_quick() == quick
    now += 1.1
    assert made.is_quick()


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="this system does not count a thread's reads")
def test_reads_from_a_disk_are_counted_and_those_from_memory_are_not(on_disk: Path) -> None:
    path = on_disk / "file"
    path.write_bytes(os.urandom(1 << 20))
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        before = disk_reads()
        os.pread(fd, 1 << 20, 0)
        cold = disk_reads()
        os.pread(fd, 1 << 20, 0)
        warm = disk_reads()
    finally:
        os.close(fd)
    if cold == before:
        pytest.skip("this file system keeps its files in memory")
    assert warm == cold


def test_where_reads_are_not_counted_each_slow_frame_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_THREAD", None)
    assert disk_reads() < disk_reads()
