"""What a frame may be made of: its header is bounded before the parser makes some hundred bytes out of two."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest
from kivi_server import limits, scheduler
from kivi_server.asked import parsed
from kivi_server.sessions import Sessions

import kivi
from bench.server import Server
from kivi.api.arguments import TransactionArguments
from kivi.api.tokens import new_token
from kivi.api.writes import Write
from kivi.arrow.ipc import encode_ipc
from kivi.client.calls import encoded
from kivi.client.core import Core
from kivi.client.transaction import TransactionCore
from kivi.errors import ResourceExhausted
from kivi.model.declarations import row_table_schema
from kivi.wire.codec import to_expr
from kivi.wire.frames import Packet, joined
from kivi.wire.v1 import service_pb2, session_pb2
from tests.server.peers import Peer, run
from tests.server.rawsession import RawSession
from tests.waiting import until, wait_until

pb = session_pb2
MIB = 1 << 20
LENGTH = struct.Struct("<I")


def empty(message: Any, field: str, size: int) -> bytes:
    """So many bytes of that field without anything in it, as often as it goes."""
    one = bytes([message.DESCRIPTOR.fields_by_name[field].number << 3 | 2, 0])
    return one * (size // len(one))


def within(inner: bytes) -> pb.Request:
    """A request whose operation is that, if it is read as one."""
    return pb.Request(operations=[pb.Operation.FromString(inner)])


BOMBS: dict[str, Callable[[], Any]] = {
    "requests": lambda: empty(pb.ClientFrame, "requests", 6 * MIB),
    "operations": lambda: pb.ClientFrame(requests=[pb.Request.FromString(empty(pb.Request, "operations", 6 * MIB))]),
    "values": lambda: pb.ClientFrame(requests=[within(empty(pb.Operation, "values", 6 * MIB))]),
    "columns": lambda: pb.ClientFrame(requests=[within(empty(pb.Operation, "columns", 6 * MIB))]),
    "keys": lambda: pb.ClientFrame(requests=[pb.Request(get=pb.Get.FromString(empty(pb.Get, "keys", 6 * MIB)))]),
    "numbers": lambda: pb.ClientFrame(requests=[pb.Request(release=pb.Release(txns=[1] * 6 * MIB))]),
}
"""They are made when they are asked for: each takes hundreds of megabytes until it is encoded."""


@cache
def encoded_bomb(name: str) -> bytes:
    bomb = BOMBS[name]()
    data: bytes = bomb if isinstance(bomb, bytes) else bomb.SerializeToString()
    return LENGTH.pack(len(data)) + data


@pytest.mark.parametrize("name", BOMBS)
def test_a_large_header_is_refused_by_its_limit_before_it_is_parsed(name, monkeypatch):
    bomb = encoded_bomb(name)
    monkeypatch.setattr("kivi_server.asked.session_pb2", None)
    with pytest.raises(ResourceExhausted, match="beyond the limit header_bytes_max"):
        parsed(bomb)


def test_one_message_of_very_many_requests_is_refused_by_their_number(server, db, accounts):
    stranger = RawSession(server.endpoint)
    stranger.send(*[pb.Request(id=1)] * 100_001)
    with pytest.raises(grpc.RpcError) as ended:
        stranger.reply(1)
    assert "beyond the limit frame_requests_max" in (ended.value.details() or "")
    stranger.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x01\x00\x00",
        b"\x02\x00\x00\x00\x0a",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x00",
        b"\x00\x00\x00\x00\x00\x00\x00\x00abcdefgh",
        joined([Packet(pb.ClientFrame(requests=[pb.Request(body_bytes=9)]).SerializeToString(), [b"12345678"])]),
        joined([Packet(pb.ClientFrame(requests=[pb.Request(body_bytes=1 << 63)]).SerializeToString())]),
    ],
)
def test_what_is_no_frame_is_refused_and_the_session_goes_on(raw, sent):
    raw.frames.put(sent)
    raw.send(pb.Request(id=5))
    assert raw.reply(5).error.reason == "InvalidArgument"


def test_rows_of_very_many_columns_are_sent_before_they_are_too_much():
    columns: dict[str, Any] = {f"c{i}": "int64" for i in range(32_000)}
    schema = row_table_schema("wide", key={"id": "int64"}, columns=columns)
    transaction = TransactionCore(Core("nowhere", None), TransactionArguments())
    write = Write("put", (1,), dict.fromkeys(columns, 1))
    count = 1
    while not transaction._buffer(schema, write):
        count += 1
    request, _ = transaction._take()
    assert len(request.operations) == count > 1
    (asked,) = parsed(joined([encoded(request)]))
    assert asked.request == request
    while request.ByteSize() < 4 * MIB:
        request.operations.append(request.operations[0])
    with pytest.raises(ResourceExhausted, match="header_bytes_max"):
        encoded(request)


def test_a_session_that_sends_one_is_ended_and_others_go_on(server, db, accounts):
    for name in BOMBS:
        stranger = RawSession(server.endpoint)
        stranger.frames.put(encoded_bomb(name))
        stranger.send(pb.Request(id=1, commit=pb.Commit()))
        with pytest.raises(grpc.RpcError) as ended:
            stranger.reply(1)
        assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, name
        assert "beyond the limit header_bytes_max" in (ended.value.details() or ""), name
        stranger.close()
        with db.transaction() as tx:
            tx.delta(accounts, (1,), balance=1)
    assert db.get(accounts, (1,))["balance"] == len(BOMBS)


def test_the_server_holds_little_for_frames_of_many_parts(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server, server.connect() as db:
        db.create_table("accounts", key={"id": "int64"}, columns={"balance": kivi.sum("int64")})
        before = server.peak_rss_bytes
        for name in BOMBS:
            stranger = RawSession(server.endpoint)
            stranger.frames.put(encoded_bomb(name))
            with pytest.raises(grpc.RpcError):
                stranger.reply(1)
            stranger.close()
        assert server.peak_rss_bytes - before < 100 * MIB  # one of these took 700


# -- what goes on in one session is not felt in another -----------------------------------------------


def test_a_session_of_many_requests_lets_others_have_their_turn(tmp_path, monkeypatch):
    turn_s = scheduler._TURN_S

    async def story(sessions: Sessions) -> None:
        monkeypatch.setattr(scheduler, "_TURN_S", turn_s)  # turns end here, on however busy a machine
        greedy = Peer(sessions)
        for f in range(2):
            greedy.hand_in(*[pb.Request(id=f * 8_000 + i, txn=9) for i in range(1, 8_001)])
        modest = Peer(sessions)
        modest.hand_in(modest.commit())
        await until(lambda: modest.has(1))
        assert not greedy.has(16_000)
        await until(lambda: greedy.has(16_000))
        assert [answer.id for answer in greedy.answers] == list(range(1, 16_001))
        await until(lambda: not greedy.session._scheduled)

    run(story, tmp_path)


def test_what_a_session_that_has_ended_had_sent_is_not_begun(tmp_path):
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        for _ in range(2):
            peer.hand_in(*[peer.read() for _ in range(4_000)])
        await until(lambda: peer.answers)
        peer.session._closed = True
        peer.session._release_all()
        await until(lambda: not peer.session._scheduled)
        await asyncio.sleep(0.1)
        assert not peer.session.txns and len(sessions.store.leases) == 0

    run(story, tmp_path)


# -- transactions that are not to be ------------------------------------------------------------------


def test_a_transaction_that_is_busy_is_not_begun_again(raw, db, accounts):
    """Its snapshot would be another one, and the first would stay open for as long as it was asked for."""
    with db.transaction() as tx:
        for i in range(2_000):
            tx.put(accounts, (i,), name="x" * 50)
    slow = pb.Request(id=2, txn=1)
    slow.scan_open.spec.table = accounts
    slow.scan_open.spec.where.CopyFrom(to_expr(kivi.col("name") == "y"))
    day_ms = 24 * 3600 * 1000
    again = [pb.Request(id=100 + i, txn=1, begin=pb.Begin(ttl_ms=day_ms)) for i in range(20)]
    silent = [pb.Request(txn=1, begin=pb.Begin(ttl_ms=day_ms)) for _ in range(20)]
    raw.send(
        pb.Request(id=1, txn=1, begin=pb.Begin()), slow, *again, *silent, pb.Request(id=3, txn=1, apply=pb.Apply())
    )
    begun = raw.reply(1).start_ts
    for i in range(20):
        assert raw.reply(100 + i).error.reason == "InvalidArgument"
    assert raw.reply(3).start_ts == begun
    wait_until(lambda: db.stats()["leases"] == 1)
    raw.send(pb.Request(id=4, txn=1, release=pb.Release()))
    raw.reply(4)
    wait_until(lambda: db.stats()["leases"] == 0)


def test_of_transactions_beyond_the_limit_few_are_remembered(raw, db, accounts):
    most = limits.SESSION_TRANSACTIONS_MAX
    for first in range(1, 6 * most, most):
        raw.send(*[pb.Request(txn=number, begin=pb.Begin()) for number in range(first, first + most)])
    raw.send(*[pb.Request(id=i, txn=txn, apply=pb.Apply()) for i, txn in enumerate((1, most, most + 1, 6 * most), 1)])
    assert not raw.reply(1).HasField("error") and not raw.reply(2).HasField("error")
    assert raw.reply(3).error.reason == "ResourceExhausted"
    assert raw.reply(4).error.reason == "SnapshotTooOld"
    wait_until(lambda: db.stats()["leases"] == most)
    assert db.stats()["server_open_transactions"] <= 2 * most


# -- batches of few events ----------------------------------------------------------------------------


def events_of(count: int) -> bytes:
    times = pa.array([1_700_000_000_000_000] * count, pa.timestamp("us", "UTC"))
    return bytes(encode_ipc(pa.RecordBatch.from_arrays([times, pa.array(range(count), pa.int64())], ["at", "n"])))


@pytest.mark.story
@pytest.mark.timeout(300)
def test_a_transaction_of_very_many_small_appends_takes_little_more_than_its_events(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server, server.connect(timeout=60) as db:
        db.create_event_table("e", event_time="at", columns={"at": "timestamp", "n": "int64"})
        event = events_of(1)
        one = pb.Operation(kind=pb.Operation.KIND_APPEND, table="e", arrow_bytes=len(event))
        body = (event + bytes(-len(event) % 8)) * 1_000
        raw, before = RawSession(server.endpoint, timeout_s=240), server.peak_rss_bytes  # it is about memory
        raw.send(pb.Request(txn=1, begin=pb.Begin(ttl_ms=600_000)))
        for i in range(1, 41):
            raw.send((pb.Request(id=i, txn=1, operations=[one] * 1_000, apply=pb.Apply()), body))
        for i in range(1, 41):
            assert not raw.reply(i).HasField("error")
        assert server.peak_rss_bytes - before < 60 * MIB  # 160 as 40,000 batches
        raw.send(pb.Request(id=50, txn=1, commit=pb.Commit(token=new_token())))
        assert raw.reply(50).commit.commit_ts
        with db.snapshot() as snap:
            assert snap.to_arrow("e").num_rows == 40_000
        raw.close()


@pytest.mark.story
@pytest.mark.timeout(300)
def test_a_stage_of_very_many_batches_of_nothing_takes_little(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server, server.connect(timeout=60) as db:
        db.create_event_table("e", event_time="at", columns={"at": "timestamp", "n": "int64"})
        before, nothing = server.peak_rss_bytes, events_of(0)
        channel = grpc.insecure_channel(server.endpoint)
        stage = channel.stream_unary(
            "/kivi.v1.Kivi/Stage",
            request_serializer=service_pb2.StageRequest.SerializeToString,
            response_deserializer=service_pb2.StageResponse.FromString,
        )
        batches = [nothing] * 15_000 + [events_of(3)]
        with channel:
            named = stage(service_pb2.StageRequest(table="e", arrow=batch) for batch in batches).stage
        grown = server.peak_rss_bytes - before
        with db.transaction() as tx:
            tx.append_stages("e", [named])
        with db.snapshot() as snap:
            assert snap.to_arrow("e").num_rows == 3
        assert grown < 30 * MIB  # 41 as 15,000 batches
