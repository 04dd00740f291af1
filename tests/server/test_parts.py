"""What a frame may be made of: it is counted before the parser makes some hundred bytes out of two."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest
from kivi_server import limits, parts
from kivi_server.sessions import Sessions

import kivi
from kivi.api import writes
from kivi.api.arguments import TransactionArguments
from kivi.api.tokens import new_token
from kivi.arrow.ipc import encode_ipc
from kivi.client.core import Core
from kivi.client.transaction import TransactionCore
from kivi.errors import ResourceExhausted
from kivi.model.declarations import row_table_schema
from kivi.wire.codec import delimited, tag, to_expr
from kivi.wire.v1 import service_pb2, session_pb2, types_pb2
from tests.server.peers import Peer, run
from tests.server.rawsession import RawSession
from tests.serverproc import ServerProcess
from tests.waiting import until

pb = session_pb2
MIB = 1 << 20
REQUESTS = tag(pb.ClientFrame, "requests")
OPERATIONS = tag(pb.Request, "operations")
GET = tag(pb.Request, "get")
RELEASE = tag(pb.Request, "release")
GROUP = b"\xa3\x06", b"\xa4\x06"  # of an unknown field, around what is parsed all the same


def request(body: bytes) -> bytes:
    return delimited(REQUESTS, body)


def empty(field: bytes, size: int) -> bytes:
    one = field + b"\x00"
    return one * (size // len(one))


BOMBS = {
    "requests": empty(REQUESTS, 4 * MIB),
    "requests behind a group": GROUP[0] + GROUP[1] + empty(REQUESTS, 4 * MIB),
    "operations": request(empty(OPERATIONS, 6 * MIB)),
    "values": request(delimited(OPERATIONS, empty(tag(pb.Operation, "values"), 6 * MIB))),
    "columns": request(delimited(OPERATIONS, empty(tag(pb.Operation, "columns"), 6 * MIB))),
    "keys": request(delimited(GET, empty(tag(pb.Get, "keys"), 6 * MIB))),
    "numbers": request(delimited(RELEASE, delimited(tag(pb.Release, "txns"), b"\x01" * 4 * MIB))),
    "operations of many requests": b"".join(request(empty(OPERATIONS, 60_000)) for _ in range(100)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_frame_of_too_many_parts_is_refused_by_its_limit(name):
    with pytest.raises(ResourceExhausted, match="beyond the limit frame_"):
        parts.check(BOMBS[name])


def operation(i: int) -> pb.Operation:
    out = pb.Operation(kind=pb.Operation.KIND_DELTA, table="accounts", table_id=7)
    out.key.add(int_value=i)
    out.columns.extend(["balance", "peak"])
    out.values.add(int_value=i)
    out.values.add(int_value=-i)
    return out


def test_what_clients_send_is_not_too_much():
    many = pb.Request(operations=[operation(i) for i in range(100_000)])
    large = pb.Request(id=1)
    batch = pa.RecordBatch.from_pydict({"n": list(range(1_000_000))})
    large.operations.add(kind=pb.Operation.KIND_APPEND, arrow=bytes(encode_ipc(batch)))
    expression = to_expr((kivi.col("a") == 1) & (kivi.col("b") < "x"))
    scans = [pb.Request(scan_open=pb.ScanOpen(spec=types_pb2.ScanSpec(where=expression))) for _ in range(20_000)]
    for frame in (
        pb.ClientFrame(requests=[many]),
        pb.ClientFrame(requests=[large]),
        pb.ClientFrame(requests=scans),
        pb.ClientFrame(requests=[pb.Request(id=i, operations=[operation(i)]) for i in range(20_000)]),
        pb.ClientFrame(requests=[pb.Request(release=pb.Release(txns=range(200_000)))]),
    ):
        parts.check(frame.SerializeToString())


def test_rows_of_very_many_columns_are_not_too_much_either():
    """A client sends what it has buffered before it is: 64 of these are four million parts, and no ten megabytes."""
    columns: dict[str, Any] = {f"c{i}": "int64" for i in range(32_000)}
    schema = row_table_schema("wide", key={"id": "int64"}, columns=columns)
    transaction = TransactionCore(Core("nowhere", None), TransactionArguments())
    write = writes.put((1,), dict.fromkeys(columns, 1))(schema)
    count = 1
    while not transaction.write(schema, write):
        count += 1
    request = transaction._take()
    assert len(request.operations) == count > 1
    parts.check(pb.ClientFrame(requests=[request]).SerializeToString())
    while len(request.operations) < 64:
        request.operations.append(request.operations[0])
    with pytest.raises(ResourceExhausted, match="frame_parts_max"):
        parts.check(pb.ClientFrame(requests=[request]).SerializeToString())


@pytest.mark.parametrize("name", BOMBS)
def test_no_damage_makes_it_fail_otherwise(name):
    """Whatever is not quite the format is the parser's to refuse."""
    frame = bytearray(BOMBS[name][: MIB + 1_000])
    for at in (0, 1, 2, 3, 5, len(frame) - 1):
        for byte in (0x00, 0x7F, 0x80, 0xFF):
            damaged = frame.copy()
            damaged[at] = byte
            try:
                parts.check(bytes(damaged))
            except ResourceExhausted:
                continue


def test_a_session_that_sends_one_is_ended_and_others_go_on(server, db, accounts):
    for name, frame in BOMBS.items():
        stranger = RawSession(server.endpoint)
        stranger.frames.put(frame)
        stranger.send(pb.Request(id=1, commit=pb.Commit()))
        with pytest.raises(grpc.RpcError) as ended:
            stranger.reply(1)
        assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, name
        assert "beyond the limit frame_" in (ended.value.details() or ""), name
        stranger.close()
        with db.transaction() as tx:
            tx.delta(accounts, (1,), balance=1)
    assert db.get(accounts, (1,))["balance"] == len(BOMBS)


def peak_mib(server: ServerProcess) -> int:
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


def test_the_server_holds_little_for_frames_of_many_parts(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server, server.connect() as db:
        db.create_table("accounts", key={"id": "int64"}, columns={"balance": kivi.sum("int64")})
        before = peak_mib(server)
        for frame in BOMBS.values():
            stranger = RawSession(server.endpoint)
            stranger.frames.put(frame)
            with pytest.raises(grpc.RpcError):
                stranger.reply(1)
            stranger.close()
        assert peak_mib(server) - before < 100  # one of these took 700


# -- what goes on in one session is not felt in another -----------------------------------------------


def test_a_session_of_many_requests_lets_others_have_their_turn(tmp_path):
    async def story(sessions: Sessions) -> None:
        greedy = Peer(sessions)
        greedy.session._frames += [
            pb.ClientFrame(
                requests=[pb.Request(id=f * 30_000 + i, txn=9) for i in range(1, 30_001)]
            ).SerializeToString()
            for f in range(2)
        ]
        modest = Peer(sessions)
        modest.session._jobs = greedy.session._jobs  # of the same worker
        greedy.session._want_turn()
        modest.session._frames.append(pb.ClientFrame(requests=[modest.commit()]).SerializeToString())
        modest.session._want_turn()
        await until(lambda: modest.has(1))
        assert not greedy.has(60_000)
        await until(lambda: greedy.has(60_000))
        assert [answer.id for answer in greedy.answers] == list(range(1, 60_001))
        await until(lambda: not greedy.session._has_turn)

    run(story, tmp_path)


def test_what_a_session_that_has_ended_had_sent_is_not_begun(tmp_path):
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        peer.session._frames += [
            pb.ClientFrame(requests=[peer.read() for _ in range(20_000)]).SerializeToString() for _ in range(2)
        ]
        peer.session._want_turn()
        await until(lambda: peer.answers)
        peer.session._closed = True
        peer.session._jobs.put(peer.session._release_all)
        await until(lambda: not peer.session._has_turn)
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
    assert db.stats()["leases"] == 1
    raw.send(pb.Request(id=4, txn=1, release=pb.Release()))
    raw.reply(4)
    assert db.stats()["leases"] == 0


def test_of_transactions_beyond_the_limit_few_are_remembered(raw, db, accounts):
    most = limits.SESSION_TRANSACTIONS_MAX
    for first in range(1, 6 * most, most):
        raw.send(*[pb.Request(txn=number, begin=pb.Begin()) for number in range(first, first + most)])
    raw.send(*[pb.Request(id=i, txn=txn, apply=pb.Apply()) for i, txn in enumerate((1, most, most + 1, 6 * most), 1)])
    assert not raw.reply(1).HasField("error") and not raw.reply(2).HasField("error")
    assert raw.reply(3).error.reason == "ResourceExhausted"
    assert raw.reply(4).error.reason == "SnapshotTooOld"
    stats = db.stats()
    assert stats["leases"] == most and stats["server_open_transactions"] <= 2 * most


# -- batches of few events ----------------------------------------------------------------------------


def events_of(count: int) -> bytes:
    times = pa.array([1_700_000_000_000_000] * count, pa.timestamp("us", "UTC"))
    return bytes(encode_ipc(pa.RecordBatch.from_arrays([times, pa.array(range(count), pa.int64())], ["at", "n"])))


def test_a_transaction_of_very_many_small_appends_takes_little_more_than_its_events(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server, server.connect(timeout=60) as db:
        db.create_event_table("e", event_time="at", columns={"at": "timestamp", "n": "int64"})
        one = pb.Operation(kind=pb.Operation.KIND_APPEND, table="e", arrow=events_of(1))
        raw, before = RawSession(server.endpoint), peak_mib(server)
        raw.send(pb.Request(txn=1, begin=pb.Begin()))
        for i in range(1, 41):
            raw.send(pb.Request(id=i, txn=1, operations=[one] * 1_000, apply=pb.Apply()))
        for i in range(1, 41):
            assert not raw.reply(i).HasField("error")
        assert peak_mib(server) - before < 60  # 160 as 40,000 batches
        raw.send(pb.Request(id=50, txn=1, commit=pb.Commit(token=new_token())))
        assert raw.reply(50).commit.commit_ts
        with db.snapshot() as snap:
            assert snap.to_arrow("e").num_rows == 40_000
        raw.close()


def test_a_stage_of_very_many_batches_of_nothing_takes_little(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server, server.connect(timeout=60) as db:
        db.create_event_table("e", event_time="at", columns={"at": "timestamp", "n": "int64"})
        before, nothing = peak_mib(server), events_of(0)
        channel = grpc.insecure_channel(server.endpoint)
        stage = channel.stream_unary(
            "/kivi.v1.Kivi/Stage",
            request_serializer=service_pb2.StageRequest.SerializeToString,
            response_deserializer=service_pb2.StageResponse.FromString,
        )
        batches = [nothing] * 15_000 + [events_of(3)]
        with channel:
            named = stage(service_pb2.StageRequest(table="e", arrow=batch) for batch in batches).stage
        grown = peak_mib(server) - before
        with db.transaction() as tx:
            tx.append_stages("e", [named])
        with db.snapshot() as snap:
            assert snap.to_arrow("e").num_rows == 3
        assert grown < 30  # 41 as 15,000 batches
