"""Appends that came in one frame enter as a group, each a transaction of its own; and none is parsed twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow as pa
import pytest
from kivi_server.sessions import Sessions

from kivi.api.tokens import new_token
from kivi.arrow.ipc import encode_ipc
from kivi.model.declarations import event_table_schema
from kivi.store.facade import Scan
from kivi.wire.v1 import session_pb2
from tests.server.peers import Peer, hits, quick, run
from tests.server.rawsession import Sent
from tests.waiting import until


def append(number: int, *values: int, table: str = "e", token: str | None = None, short: int = 0) -> Sent:
    times = pa.array([1_700_000_000_000_000] * len(values), pa.timestamp("us", "UTC"))
    data = bytes(encode_ipc(pa.RecordBatch.from_arrays([times, pa.array(values, pa.int64())], ["at", "n"])))
    request = session_pb2.Request(id=number, commit=session_pb2.Commit(token=token or new_token()))
    request.operations.add(kind=session_pb2.Operation.KIND_APPEND, table=table, arrow_bytes=len(data) - short)
    return request, data


def make_events(sessions: Sessions) -> None:
    sessions.store.create(event_table_schema("e", "at", {"at": "timestamp", "n": "int64"}))


def found(sessions: Sessions) -> list[int]:
    store = sessions.store
    lease = store.begin()
    try:
        batches = store.scan(lease, store.table("e"), Scan())
        return [n for batch in batches for n in batch.column("n").to_pylist()]
    finally:
        store.release(lease)


def test_each_fails_alone_and_the_others_enter_as_a_group(tmp_path: Path) -> None:
    async def story(sessions: Sessions) -> None:
        make_events(sessions)
        peer, counters = Peer(sessions), sessions.store.committer.counters
        grouped, syncs = counters.commits_grouped, sessions.store.log.stats()["syncs"]
        await peer.ask(
            append(1, 10, token="a"),
            append(2, 20, table="nowhere"),
            append(3, 30, short=100),
            append(4, 40),
            append(5, 50, token="a"),
            append(6, 10, token="a"),
            append(7, 70),
        )
        await until(lambda: peer.has(7))
        outcomes = peer.outcomes()
        first = outcomes[1]
        assert isinstance(first, int)
        assert [outcomes[number] for number in (1, 4, 7)] == [first, first + 1, first + 2]
        assert outcomes[6] == first and "another payload" in str(outcomes[5])
        assert "nowhere" in str(outcomes[2]) and isinstance(outcomes[3], str)
        assert found(sessions) == [10, 40, 70]
        assert counters.commits_grouped == grouped + 3
        assert sessions.store.log.stats()["syncs"] == syncs + 1
        assert sessions.commits_in_flight == 0 and len(sessions.store.leases) == 0

    run(story, tmp_path)


def test_appends_and_other_commits_of_a_frame_keep_their_order(tmp_path: Path) -> None:
    async def story(sessions: Sessions) -> None:
        make_events(sessions)
        peer = Peer(sessions)
        await peer.ask(append(101, 1), peer.commit(), peer.commit(), append(102, 2), append(103, 3), peer.commit())
        await until(lambda: peer.has(6))
        stamps = [peer.outcomes()[number] for number in (101, 1, 2, 102, 103, 3)]
        assert stamps == list(range(int(stamps[0]), int(stamps[0]) + 6))
        assert found(sessions) == [1, 2, 3] and hits(sessions.store) == 3

    run(story, tmp_path)


def test_transactions_that_have_read_enter_with_the_others_and_pass_reads(tmp_path: Path) -> None:
    """Each once, though its commit comes twice; a read of one that is not theirs is passed, and answered."""

    def get(number: int, txn: int) -> session_pb2.Request:
        request = session_pb2.Request(id=number, txn=txn, first=session_pb2.Begin())
        request.get.table = "counters"
        request.get.keys.add().values.add(int_value=1)
        return request

    def commit(number: int, value: int, txn: int) -> Sent:
        sent = append(number, value)
        assert isinstance(sent, tuple)
        sent[0].txn = txn
        return sent

    async def story(sessions: Sessions) -> None:
        make_events(sessions)
        peer, counters = Peer(sessions), sessions.store.committer.counters
        await peer.ask(get(1, 1), get(2, 2), get(3, 3))
        await until(lambda: peer.has(3))
        peer.forget()
        grouped, syncs = counters.commits_grouped, sessions.store.log.stats()["syncs"]
        again = commit(7, 10, 1)
        await peer.ask(commit(4, 10, 1), get(5, 4), commit(6, 20, 2), again, append(8, 30), commit(9, 40, 3))
        await until(lambda: peer.has(6))
        outcomes = peer.outcomes()
        first = outcomes[4]
        assert [outcomes[number] for number in (6, 8, 9)] == [first + 1, first + 2, first + 3]  # type: ignore[operator]
        assert "transaction 1 has ended" in str(outcomes[7])
        assert found(sessions) == [10, 20, 30, 40]
        assert counters.commits_grouped == grouped + 4
        assert sessions.store.log.stats()["syncs"] <= syncs + 2
        assert len(sessions.store.leases) == 1 and [*peer.session.txns] == [4]

    run(story, tmp_path)


def test_appends_of_several_sessions_enter_as_a_group_and_those_of_each_in_its_order(tmp_path: Path) -> None:
    async def story(sessions: Sessions) -> None:
        make_events(sessions)
        await quick(sessions.store)
        one, other = Peer(sessions), Peer(sessions)
        counters, log = sessions.store.committer.counters, sessions.store.log
        grouped, syncs = counters.commits_grouped, log.stats()["syncs"]
        await asyncio.gather(one.ask(append(1, 10), append(2, 20)), other.ask(append(1, 30)))
        await until(lambda: one.has(2) and other.has(1))
        assert counters.commits_grouped == grouped + 3 and log.stats()["syncs"] == syncs + 1
        assert found(sessions) == [10, 20, 30]
        one.forget()
        other.forget()
        counted = one.commit_each(one.commit(), one.commit())
        await asyncio.gather(other.ask(append(1, 40)), one.ask(append(101, 50), counted, append(102, 60)))
        await until(lambda: one.has(4) and other.has(1))
        stamps = [other.outcomes()[1], *(one.outcomes()[number] for number in (101, 1, 2, 102))]
        assert stamps == [*range(int(stamps[0]), int(stamps[0]) + 5)]
        assert sessions.commits_in_flight == 0 and len(sessions.store.leases) == 0

    run(story, tmp_path)


def test_a_fault_of_the_server_is_told_to_each_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(sessions: Sessions) -> None:
        make_events(sessions)
        peer = Peer(sessions)

        def fault(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(sessions.store, "commit_together", fault)
        await peer.ask(append(1, 1), append(2, 2))
        await until(lambda: peer.has(2))
        assert all("the server failed" in str(why) for why in peer.outcomes().values())
        assert sessions.commits_in_flight == 0

    run(story, tmp_path)
