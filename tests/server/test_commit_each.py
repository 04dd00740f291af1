"""R19: of commits in columns each is a transaction of its own, whatever becomes of the others."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kivi_server import limits
from kivi_server.asked import Asked
from kivi_server.auth import Access, Allowance, Grant
from kivi_server.commits import each_of
from kivi_server.sessions import Sessions

import kivi
from kivi.api.tokens import new_token
from kivi.client.calls import Commits, leaving, received
from kivi.model.declarations import row_table_schema
from kivi.wire.frames import Packet, joined
from kivi.wire.v1 import session_pb2
from tests.server.peers import Peer, hits, quick, run, slow
from tests.waiting import until

PUT = session_pb2.Operation.KIND_PUT
HOW = pytest.mark.parametrize("leads", [True, False], ids=["written by the event loop", "by the log's threads"])


async def done(peer: Peer, request: session_pb2.Request, leads: bool, count: int) -> dict[int, int | str]:
    """What becomes of it."""
    if leads:
        await quick(peer.session.store)
    else:
        slow(peer.session.store)
    await peer.ask(request)
    await until(lambda: len(peer.outcomes()) == count)
    return peer.outcomes()


@HOW
@pytest.mark.parametrize("same", [True, False])
def test_each_has_its_own_timestamp_and_one_message_answers_all(tmp_path: Path, leads: bool, same: bool) -> None:
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        commits = [peer.commit(hits=1 if same else n) for n in range(1, 101)]
        syncs = sessions.store.log.stats()["syncs"]
        found = await done(peer, peer.commit_each(*commits, same=same), leads, 100)
        (answer,) = peer.answers
        assert [*found] == [commit.id for commit in commits]
        assert [*found.values()] == [*range(answer.commit_each.commit_ts, answer.commit_each.commit_ts + 100)]
        assert answer.start_ts == answer.commit_each.commit_ts - 1
        assert sessions.store.watermark() == max(found.values())
        assert hits(sessions.store) == (100 if same else 5050)
        assert sessions.store.log.stats()["syncs"] == syncs + 1
        for commit in commits:
            assert sessions.store.outcome(commit.commit.token)[1] == found[commit.id]
        assert peer.session._asked == 100
        await until(lambda: sessions.commits_in_flight == 0)

    run(story, tmp_path)


@HOW
def test_those_that_are_not_regular_are_answered_each_by_itself(tmp_path: Path, leads: bool) -> None:
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        first = await done(peer, peer.commit_each(peer.commit(token="a"), peer.commit(token="b")), leads, 2)
        again = [peer.commit(token="a"), peer.commit(), peer.commit(hits=7, token="b"), peer.commit()]
        found = await done(peer, peer.commit_each(*again), leads, 6)
        assert found[3] == first[1]
        assert (found[4], found[6]) == (first[2] + 1, first[2] + 2)  # type: ignore[operator]
        assert "another payload" in str(found[5])
        assert hits(sessions.store) == 4
        await until(lambda: sessions.commits_in_flight == 0)

    run(story, tmp_path)


@HOW
def test_a_put_and_a_delta_of_one_cell_in_one_group_both_commit_in_its_order(tmp_path: Path, leads: bool) -> None:
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        put, delta, other = peer.commit(hits=10), peer.commit(hits=1), peer.commit(row=2)
        put.operations[0].kind = PUT
        found = await done(peer, peer.commit_each(put, delta, other), leads, 3)
        first = found[1]
        assert isinstance(first, int) and found == {1: first, 2: first + 1, 3: first + 2}
        assert hits(sessions.store) == 11

    run(story, tmp_path)


def test_one_that_is_not_plain_takes_the_general_way_with_all_that_came_with_it(tmp_path: Path) -> None:
    """An unknown table among them, an insert, a delete; in their order, and before what is behind them."""

    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        unknown, insert, twice = peer.commit(), peer.commit(row=3), peer.commit(row=3)
        unknown.operations[0].table = "nowhere"
        insert.operations[0].kind = twice.operations[0].kind = session_pb2.Operation.KIND_INSERT
        fine, behind = peer.commit(), peer.commit()
        frame = (peer.commit_each(fine, unknown, insert, twice), peer.commit_each(behind))
        await peer.ask(*frame)
        await until(lambda: len(peer.outcomes()) == 5)
        found = peer.outcomes()
        assert isinstance(found[fine.id], int) and isinstance(found[insert.id], int)
        assert "nowhere" in str(found[unknown.id]) and "counters(3,) was written by" in str(found[twice.id])
        assert isinstance(found[behind.id], int) and found[behind.id] > found[insert.id]  # type: ignore[operator]
        assert hits(sessions.store) == 2 and hits(sessions.store, 3) == 1

    run(story, tmp_path)


def bad(what: str) -> session_pb2.Request:
    """One that is not as the protocol says."""
    operation = session_pb2.Operation(kind=session_pb2.Operation.KIND_DELTA, table="counters", columns=["hits"])
    operation.key.add(int_value=1)
    operation.values.add(int_value=1)
    writes = session_pb2.Writes(operations=[operation]).SerializeToString()
    request = session_pb2.Request()
    each = request.commit_each
    each.ids.extend([1, 2])
    each.tokens.extend(["a", "b"])
    each.writes.append(writes)
    match what:
        case "fewer tokens":
            del each.tokens[1]
        case "an empty token":
            each.tokens[1] = ""
        case "a number that is 0":
            each.ids[0] = 0
        case "fewer places":
            each.does.append(0)
        case "a place that is not there":
            each.does.extend([0, 1])
        case "nothing done":
            del each.writes[:]
        case "no message":
            each.writes[0] = b"\xff"
        case "a number of its own":
            request.id = 9
        case "a transaction":
            request.txn = 9
        case "operations of its own":
            request.operations.append(operation)
        case "too long":
            operation.table = "x" * 5_000
            each.writes[0] = session_pb2.Writes(operations=[operation]).SerializeToString()
        case "too many operations":
            each.writes[0] = b"\x1a\x00" * (limits.COMMIT_EACH_OPERATIONS_MAX + 1)
        case "too many":
            each.ids.extend(range(3, 300))
            each.tokens.extend(map(str, range(3, 300)))
    return request


BAD = (
    "fewer tokens", "an empty token", "a number that is 0", "fewer places", "a place that is not there", "nothing done",
    "no message", "a number of its own", "a transaction", "operations of its own", "too long",
    "too many operations", "too many",
)  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_one_that_is_not_as_it_should_be_commits_nothing_and_says_so(tmp_path: Path, what: str) -> None:
    async def story(sessions: Sessions) -> None:
        peer, request = Peer(sessions), bad(what)
        await peer.ask(request)
        wanted = {9} if what == "a number of its own" else {number for number in request.commit_each.ids if number}
        await until(lambda: set(peer.outcomes()) == wanted)
        assert all(isinstance(why, str) and why for why in peer.outcomes().values()), peer.outcomes()
        if what == "too many operations":
            assert "commit_each_operations_max" in str(peer.outcomes()[1])
        assert hits(sessions.store) is None
        assert len(peer.replies) == peer.session._asked
        fine = peer.commit()
        fine.id = 1_000
        await peer.ask(peer.commit_each(fine))
        await until(lambda: 1_000 in peer.outcomes())
        assert hits(sessions.store) == 1

    run(story, tmp_path)


def test_who_may_not_write_is_told_so_for_each(tmp_path: Path) -> None:
    async def story(sessions: Sessions) -> None:
        reader = Peer(sessions, Grant(Access.READ, name="reader"))
        elsewhere = Peer(sessions, Grant(Access.WRITE, ("others",), name="elsewhere"))
        for peer in (reader, elsewhere):
            for _ in range(2):  # the second time what it does is known by its bytes
                peer.forget()
                request = peer.commit_each(peer.commit(), peer.commit(), same=True)
                await peer.ask(request)
                await until(partial(peer.has, 2))
                assert [answer.error.code for answer in peer.answers] == [
                    grpc.StatusCode.PERMISSION_DENIED.value[0]
                ] * 2
        assert hits(sessions.store) is None
        fine = Peer(sessions, Grant(Access.WRITE, ("counters",), name="fine"))
        await done(fine, fine.commit_each(fine.commit(), fine.commit(), same=True), True, 2)
        assert hits(sessions.store) == 2

    run(story, tmp_path)


def test_nothing_is_taken_apart_for_who_may_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def apart(asked: Asked) -> list[Asked]:
        raise AssertionError("done for a reader")

    monkeypatch.setattr("kivi_server.session.each_of", apart)

    async def story(sessions: Sessions) -> None:
        reader, request = Peer(sessions, Grant(Access.READ, name="reader")), bad("nothing done")
        await reader.ask(request)
        await until(lambda: len(reader.answers) == 2)
        assert {answer.error.code for answer in reader.answers} == {grpc.StatusCode.PERMISSION_DENIED.value[0]}

    run(story, tmp_path)


def test_a_frame_of_very_many_transactions_ends_its_session_unanswered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One CommitEach of a million numbers is a megabyte; a million answers are 200, and took 6 s."""

    async def story(sessions: Sessions) -> None:
        peer, dropped = Peer(sessions), list[Any]()
        monkeypatch.setattr(peer.session, "drop", dropped.append)
        request = session_pb2.Request()
        request.commit_each.ids.extend([1] * (limits.FRAME_REQUESTS_MAX + 1))
        await peer.ask(request)
        await until(lambda: dropped)
        assert dropped[0].details["limit"] == "frame_requests_max" and not peer.answers
        assert peer.session._asked == 0
        fine = peer.commit()
        await peer.ask(peer.commit_each(fine))
        await until(lambda: fine.id in peer.outcomes())

    run(story, tmp_path)


def test_commits_are_entered_by_the_catalog_that_they_were_read_by(tmp_path: Path) -> None:
    """One thread looks at the catalog anew, and is late: another has read it since, after a table was made again."""

    async def story(sessions: Sessions) -> None:
        store, reader, peer = sessions.store, sessions.translator.commits, Peer(sessions)
        old, request = store.write_plans(), peer.commit_each(peer.commit())
        writes = session_pb2.Writes.FromString(request.commit_each.writes[0])
        writes.operations[0].table_id = store.table("counters").id
        request.commit_each.writes[0] = writes.SerializeToString()
        store.drop("counters")
        store.create(row_table_schema("counters", key={"id": "int64"}, columns={"hits": kivi.sum("int64")}))
        current = reader._current

        def late() -> Any:
            current()
            reader._read_by = type(reader._read_by)(*old, {})  # what the late thread puts there
            return reader._read_by

        reader._current = late  # type: ignore[method-assign]
        commits = reader.each(Asked(request, 0.0), peer.session._may_write)
        assert commits is not None and commits.derived_at == old[0]
        assert len(peer.session._write(commits)) == 1 and hits(store) is None
        reader._current = current  # type: ignore[method-assign]
        await peer.ask(request)
        await until(lambda: peer.outcomes())
        assert "counters" in str(peer.outcomes()[1]) and hits(store) is None

    run(story, tmp_path)


def test_what_is_told_before_the_catalog_is_found_changed_is_not_told_again(tmp_path: Path) -> None:
    """Of those that come again by the general way, none was answered: each is answered once."""

    async def story(sessions: Sessions) -> None:
        store, reader, peer = sessions.store, sessions.translator.commits, Peer(sessions)
        await peer.ask(peer.commit_each(peer.commit(token="known")))
        await until(lambda: len(peer.outcomes()) == 1)
        by = reader._current()
        store.create(row_table_schema("another", key={"id": "int64"}, columns={"hits": kivi.sum("int64")}))
        reader._current = lambda: by  # type: ignore[method-assign]
        await peer.ask(peer.commit_each(peer.commit(token="known"), peer.commit()))
        await until(lambda: len(peer.outcomes()) == 3)
        await until(lambda: not sessions.commits_in_flight)
        found = peer.outcomes()
        assert found[2] == found[1] != found[3]
        assert peer.counted == len(peer.answers) == 3 and hits(store) == 2

    run(story, tmp_path)


def test_who_asks_for_more_than_its_rate_is_refused_each(tmp_path: Path) -> None:
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        await peer.ask(peer.commit_each(*[peer.commit() for _ in range(10)]))
        await until(lambda: len(peer.outcomes()) == 10)
        await peer.ask(peer.commit_each(peer.commit(), peer.commit()))
        await until(lambda: len(peer.outcomes()) == 12)
        assert all("slow down" in str(why) for number, why in peer.outcomes().items() if number > 10)
        assert hits(sessions.store) == 10

    run(story, tmp_path, Allowance(rate=1.0))  # ten seconds are gone by its first message


def test_once_the_server_stops_each_is_told_so(tmp_path: Path) -> None:
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        peer.hand_in(peer.commit_each(peer.commit(), peer.commit()))
        sessions.stopping = True
        await asyncio.sleep(0)
        assert all("stopping" in str(why) for why in peer.outcomes().values()) and len(peer.answers) == 2
        assert hits(sessions.store) is None

    run(story, tmp_path)


WRITES = [b"first", b"second", b"a third"]


@given(st.lists(st.sampled_from(WRITES), min_size=1, max_size=20), st.integers(1, 8))
def test_what_a_client_gathers_is_what_was_committed_in_its_order(given_: list[bytes], most: int) -> None:
    queued: list[Any] = []
    gathered, expected = Commits(queued.append), []
    gathered.most = most
    for number, writes in enumerate(given_, 1):
        token = new_token()
        expected.append((number, token, writes))
        gathered.add((number, writes, token))
    (message,) = queued
    frame = session_pb2.ClientFrame.FromString(leaving(message).header)
    found: list[tuple[int, str, bytes]] = []
    for request in frame.requests:
        each = request.commit_each
        assert 0 < len(each.ids) <= most and len(set(each.writes)) == len(each.writes)
        places = each.does or [0] * len(each.ids)
        found += zip(each.ids, each.tokens, [each.writes[place] for place in places], strict=True)
    assert found == expected
    assert not leaving(message) and len(gathered) == 0
    gathered.add((1, b"x", "t"))
    assert len(queued) == 2


def test_a_session_that_has_not_said_yet_what_it_takes_is_told_one_by_one() -> None:
    """The client may have learnt of it from the session before, whose Hello came late."""
    queued: list[Any] = []
    gathered = Commits(queued.append)
    gathered.add((1, b"x", "t"))
    gathered.add((2, b"x", "u"))
    (message,) = queued
    frame = session_pb2.ClientFrame.FromString(leaving(message).header)
    assert [[*request.commit_each.ids] for request in frame.requests] == [[1], [2]]


def test_a_message_that_was_overtaken_is_none() -> None:
    """Threads that add while it is made: the next message finds nothing left."""
    queued: list[Any] = []
    gathered = Commits(queued.append)
    gathered.most = 10
    gathered.add((1, b"x", "t"))
    assert leaving(queued.pop())
    gathered.add((2, b"x", "t"))
    (second,) = queued
    gathered._waiting.clear()
    assert not leaving(second)


def test_what_is_taken_apart_is_what_was_put_together(tmp_path: Path) -> None:
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        commits = [peer.commit(hits=n % 3) for n in range(10)]
        assert [each.request for each in each_of(Asked(peer.commit_each(*commits), 0.0))] == commits
        same = [peer.commit() for _ in range(limits.COMMIT_EACH_MAX)]
        assert [each.request for each in each_of(Asked(peer.commit_each(*same, same=True), 0.0))] == same

    run(story, tmp_path)


def test_answers_of_both_kinds_are_handed_out() -> None:
    frame = session_pb2.ServerFrame()
    frame.responses.add(id=5).commit.commit_ts = 77
    each = frame.responses.add(start_ts=40).commit_each
    each.ids.extend([3, 9, 2])
    each.commit_ts = 50
    _, found = received(joined([Packet(frame.SerializeToString())]))
    assert found == [(5, frame.responses[0]), (3, (50, 40)), (9, (51, 40)), (2, (52, 40))]


def test_the_bytes_of_writes_are_those_of_a_requests_operations() -> None:
    request = session_pb2.Request()
    request.operations.add(kind=PUT, table="t")
    writes = session_pb2.Writes(operations=request.operations).SerializeToString()
    assert writes == request.SerializeToString()
