"""The session stream as any language sees it: frames of requests, each with its own outcome."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import kivi
from kivi.api.tokens import new_token
from kivi.arrow.ipc import encode_ipc
from kivi.client.messages import read_batches
from kivi.wire.columns import rows_of
from kivi.wire.v1 import session_pb2, types_pb2
from tests.server.rawsession import RawSession, Sent, rows
from tests.waiting import wait_until

pb = session_pb2


def operation(table_id: int, key: int, **balance: int) -> pb.Operation:
    out = pb.Operation(kind=pb.Operation.KIND_DELTA, table="accounts", table_id=table_id)
    out.key.add(int_value=key)
    for name, value in balance.items():
        out.columns.append(name)
        out.values.add(int_value=value)
    return out


@pytest.fixture
def table_id(db, accounts) -> int:
    return db.describe(accounts)["id"]


def test_the_first_frame_tells_limits_and_names_the_server(raw):
    assert raw.hello.limits.message_bytes_max == 64 << 20
    assert raw.hello.limits.transaction_operations_max == 1_000_000
    assert len(raw.hello.instance) == 16 and raw.hello.version == kivi.__version__


def test_one_frame_carries_a_whole_transaction_and_each_request_has_its_outcome(raw, table_id):
    raw.send(
        pb.Request(txn=1, begin=pb.Begin()),
        pb.Request(id=1, txn=1, operations=[operation(table_id, 7, balance=5)], get=get(table_id, 7)),
        pb.Request(id=2, txn=1, commit=pb.Commit(token=new_token())),
        pb.Request(id=3, txn=2, get=get(table_id, 7)),
    )
    assert (cells(raw.reply(1))[0] or [])[:1] == [7]
    commit = raw.reply(2)
    assert commit.commit.commit_ts > commit.start_ts
    assert raw.reply(3).error.reason == "SnapshotTooOld"  # transaction 2 was never begun


def get(table_id: int, *keys: int) -> pb.Get:
    return pb.Get(
        table="accounts",
        table_id=table_id,
        keys=[types_pb2.Key(values=[types_pb2.Value(int_value=key)]) for key in keys],
    )


def test_a_transactions_requests_keep_their_order_behind_a_slow_one(raw, table_id, db):
    scan = types_pb2.ScanSpec(table="accounts", table_id=table_id)  # a scan of everything runs aside
    raw.send(
        pb.Request(txn=1, begin=pb.Begin()),
        pb.Request(id=1, txn=1, scan_open=pb.ScanOpen(spec=scan)),
        pb.Request(id=2, txn=1, operations=[operation(table_id, 1, balance=1)], commit=pb.Commit(token=new_token())),
        pb.Request(id=3, txn=1, get=get(table_id, 1)),
    )
    assert raw.reply(1).HasField("page") and not raw.pages[1]  # read before the write that came after it
    assert raw.reply(2).commit.commit_ts
    assert raw.reply(3).error.reason == "SnapshotTooOld"  # it has ended


def test_the_same_commit_sent_again_is_answered_with_the_same_timestamp(raw, table_id, db):
    request = pb.Request(operations=[operation(table_id, 3, balance=1)], commit=pb.Commit(token=new_token()))
    stamps = set()
    for number in range(1, 101):  # R16: drop the reply 100 times, +1 exactly
        request.id = number
        raw.send(request)
        stamps.add(raw.reply(number).commit.commit_ts)
    assert len(stamps) == 1
    with db.snapshot() as snap:
        assert snap.get("accounts", (3,))["balance"] == 1
    request.id, request.operations[0].values[0].int_value = 200, 2
    raw.send(request)
    assert raw.reply(200).error.reason == "InvalidArgument"  # the same token, another payload


def test_the_same_commit_is_answered_after_its_table_was_dropped(raw, db):
    db.create_table("fleeting", key={"id": "int64"}, columns={"balance": kivi.sum("int64")})
    write = operation(db.describe("fleeting")["id"], 1, balance=1)
    write.table = "fleeting"
    commit = pb.Commit(token=new_token())
    raw.send(pb.Request(id=1, operations=[write], commit=commit))
    first = raw.reply(1).commit.commit_ts
    db.drop("fleeting")
    raw.send(
        pb.Request(id=2, operations=[write], commit=commit),
        pb.Request(id=3, operations=[write], commit=pb.Commit(token=new_token())),
    )
    assert raw.reply(2).commit.commit_ts == first > 0
    assert raw.reply(3).error.reason == "NotFound"


def test_what_a_stranger_sends_is_checked(raw, table_id):
    wrong_type = operation(table_id, 1)
    wrong_type.columns.append("balance")
    wrong_type.values.add(string_value="5")
    not_finite = operation(table_id, 1)
    not_finite.columns.append("balance")
    not_finite.values.add(float_value=float("nan"))
    short_key = pb.Operation(kind=pb.Operation.KIND_PUT, table="accounts", table_id=table_id)
    unknown_column = operation(table_id, 1, nonsense=1)
    stale = operation(table_id + 1_000, 1, balance=1)
    arrow = pb.Operation(kind=pb.Operation.KIND_APPEND, table="accounts", table_id=table_id, arrow_bytes=4)
    nothing = pb.Operation(table="accounts", table_id=table_id)
    expected = {
        1: ("SchemaError", wrong_type),
        2: ("SchemaError", not_finite),
        3: ("SchemaError", short_key),
        4: ("SchemaError", unknown_column),
        5: ("NotFound", stale),
        6: ("InvalidArgument", arrow),
        7: ("SchemaError", nothing),
    }
    for number, (_, bad) in expected.items():
        raw.send((pb.Request(id=number, operations=[bad], commit=pb.Commit()), b"junk"))
    for number, (reason, _) in expected.items():
        error = raw.reply(number).error
        assert error.reason == reason, (number, error)
    assert raw.replies == []


@pytest.mark.parametrize("kind", ["KIND_PUT", "KIND_INSERT", "KIND_DELTA", "KIND_DELETE"])
def test_a_stranger_writes_no_time_that_no_datetime_holds(raw, db, kind):
    """On neither of the ways that a small commit takes; a row that has one from before can be deleted."""
    db.create_table("timed", key={"at": "timestamp"}, columns={"seen": "timestamp", "newest": kivi.max("timestamp")})
    column = "newest" if kind == "KIND_DELTA" else "seen"
    number = 0
    for key, value, names in ((2**62, 0, "key column 'at'"), (0, 2**62, f"column '{column}'"), (0, 0, None)):
        for begun in (False, True):
            number += 1
            write = pb.Operation(kind=kind, table="timed", table_id=db.describe("timed")["id"])
            write.key.add(int_value=key + begun)
            if kind != "KIND_DELETE":
                write.columns.append(column)
                write.values.add(int_value=value)
            if begun:
                raw.send(pb.Request(txn=number, begin=pb.Begin()))
            raw.send(
                pb.Request(
                    id=number, txn=number if begun else 0, operations=[write], commit=pb.Commit(token=new_token())
                )
            )
            reply = raw.reply(number)
            if names is None or kind == "KIND_DELETE":
                assert reply.commit.commit_ts
            else:
                assert reply.error.reason == "InvalidArgument"
                assert f"{names} is {2**62 + (begun and key > 0)} us, outside the years" in reply.error.message
    with db.snapshot() as snap:
        assert len(list(snap.scan("timed"))) == (0 if kind == "KIND_DELETE" else 2)
    db.drop("timed")


def test_a_failed_operation_ends_its_transaction(raw, table_id):
    raw.send(
        pb.Request(txn=1, begin=pb.Begin()),
        pb.Request(txn=1, operations=[operation(table_id, 1, nonsense=1)], apply=pb.Apply()),  # id 0: no answer
        pb.Request(id=1, txn=1, commit=pb.Commit(token=new_token())),
    )
    assert raw.reply(1).error.reason == "SchemaError"


def test_a_frame_that_is_none_and_a_request_without_a_body(raw):
    raw.frames.put(b"\xff\xff\xff")
    raw.send(pb.Request(id=5))
    assert raw.reply(5).error.reason == "InvalidArgument"


def test_a_request_whose_time_ran_out_is_not_begun(raw, table_id):
    raw.send(
        pb.Request(id=1, txn=1, begin=pb.Begin(min_snapshot=10**12), timeout_ms=50),
        pb.Request(id=2, txn=1, get=get(table_id, 1), timeout_ms=1),
    )
    assert raw.reply(1).error.reason == "Unavailable"  # R17: never an older snapshot
    assert raw.reply(2).error.reason == "Unavailable"


def test_an_ended_stream_gives_up_its_snapshots(server, db, accounts, table_id):
    before = db.stats()["leases"]
    session = RawSession(server.endpoint)
    session.send(
        *(pb.Request(txn=i, begin=pb.Begin()) for i in range(1, 51)), pb.Request(id=1, txn=50, apply=pb.Apply())
    )
    session.reply(1)
    assert db.stats()["leases"] >= 50
    session.close()
    wait_until(lambda: db.stats()["leases"] <= before)


def test_a_half_closed_stream_is_answered_first(server, table_id):
    session = RawSession(server.endpoint)
    session.send(pb.Request(id=1, operations=[operation(table_id, 9, balance=1)], commit=pb.Commit()))
    session.frames.put(None)
    assert session.reply(1).commit.commit_ts
    with pytest.raises(StopIteration):
        next(session.call)
    session.channel.close()


def test_refused_transactions_are_forgotten_by_the_server(raw, table_id, db):
    before = db.stats()["server_open_transactions"]
    for number in range(1, 21):  # begun in the future: refused when the time is up, and the commit with it
        raw.send(
            pb.Request(txn=number, begin=pb.Begin(as_of_ts=10**15)),
            pb.Request(id=number, txn=number, operations=[operation(table_id, 1, balance=1)], commit=pb.Commit()),
        )
        assert raw.reply(number).error.reason == "InvalidArgument"
    wait_until(lambda: db.stats()["server_open_transactions"] <= before)


# -- reads that arrive together -----------------------------------------------------------------------


@pytest.fixture
def sums(db) -> int:
    """A table with rows of fixed width: 1 to 9 hold their key; 10 holds more than an int64."""
    if "sums" in db.tables():
        db.drop("sums")
    db.create_table("sums", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "hi": kivi.max("int64")})
    for key in range(1, 10):
        with db.transaction() as tx:
            tx.delta("sums", (key,), n=key)
    for _ in range(2):
        with db.transaction() as tx:
            tx.delta("sums", (10,), n=2**62)
    db.consolidate()
    with db.transaction() as tx:
        tx.delta("sums", (9,), hi=3)
    return int(db.describe("sums")["id"])


def reading(number: int, *keys: int, table_id: int, txn: int | None = None, **begin: Any) -> pb.Request:
    wanted = get(table_id, *keys)
    wanted.table = "sums"
    return pb.Request(id=number, txn=txn or number, first=pb.Begin(**begin), get=wanted)


def cells(response: pb.Response) -> list[list[Any] | None]:
    return rows(response.get)


def test_reads_that_arrive_together_are_each_answered_in_a_snapshot_of_their_own(raw, sums, db):
    raw.send(*(reading(key, key, 77, table_id=sums) for key in range(1, 10)))
    for key in range(1, 10):
        response = raw.reply(key)
        assert response.start_ts == db.watermark()
        assert cells(response) == [[key, key, 3 if key == 9 else None], None]
    with db.transaction() as tx:
        tx.delta("sums", (1,), n=100)
    again = reading(20, 1, table_id=sums, txn=1)
    again.ClearField("first")
    ended = reading(22, 1, table_id=sums, txn=2)
    ended.ClearField("first")
    raw.send(
        again,  # in the snapshot of the first
        reading(21, 1, table_id=sums),
        pb.Request(txn=2, release=pb.Release()),
        ended,
        reading(23, 3, table_id=sums, min_snapshot=tx.commit_ts),
    )
    assert cells(raw.reply(20)) == [[1, 1, None]]
    assert cells(raw.reply(21)) == [[1, 101, None]]
    assert raw.reply(22).error.reason == "SnapshotTooOld"
    assert raw.reply(23).start_ts >= tx.commit_ts
    open_now = db.stats()["server_open_transactions"]
    raw.send(*(pb.Request(txn=number, release=pb.Release()) for number in (1, *range(3, 10), 21, 23)))
    wait_until(lambda: db.stats()["server_open_transactions"] <= open_now - 10)


def test_a_snapshot_may_be_asked_for_by_itself_among_reads(raw, sums, db):
    raw.send(
        reading(1, 1, table_id=sums),
        pb.Request(id=2, txn=2, first=pb.Begin(), apply=pb.Apply()),
        pb.Request(id=3, txn=1, apply=pb.Apply()),
        reading(4, 4, table_id=sums),
        pb.Request(id=5, txn=77, apply=pb.Apply()),
        pb.Request(id=6, txn=2, first=pb.Begin(), apply=pb.Apply()),
    )
    assert cells(raw.reply(1)) == [[1, 1, None]]
    assert [raw.reply(number).start_ts for number in (2, 3, 4)] == [db.watermark()] * 3
    assert raw.reply(5).error.reason == "SnapshotTooOld"  # never begun
    assert raw.reply(6).error.reason == "InvalidArgument"  # there already
    with db.transaction() as tx:
        tx.delta("sums", (2,), n=5)
    later = reading(7, 2, table_id=sums, txn=2)
    later.ClearField("first")
    raw.send(later)
    assert cells(raw.reply(7)) == [[2, 2, None]]


def test_one_read_that_fails_takes_no_other_along(raw, sums):
    stale = reading(3, 1, table_id=sums + 1)
    other_table = reading(5, 1, table_id=sums)
    other_table.get.table = "nothing"
    raw.send(
        reading(1, 1, table_id=sums),
        reading(2, 10, table_id=sums),  # does not fit
        stale,
        reading(4, 4, 5, table_id=sums),
        other_table,
        reading(6, 6, table_id=sums, txn=1),  # transaction 1 is there already
        reading(8, 8, table_id=sums),
    )
    assert cells(raw.reply(1)) == [[1, 1, None]]
    assert raw.reply(2).error.reason == "OutOfRange"
    assert raw.reply(3).error.reason == "NotFound"
    assert cells(raw.reply(4)) == [[4, 4, None], [5, 5, None]]
    assert raw.reply(5).error.reason == "NotFound"
    assert raw.reply(6).error.reason == "InvalidArgument"
    assert cells(raw.reply(8)) == [[8, 8, None]]


def alone(number: int, *keys: int, table_id: int, table: str = "sums", **begin: Any) -> pb.Request:
    request = reading(number, *keys, table_id=table_id, **begin)
    request.txn, request.get.table = 0, table
    return request


def test_reads_without_a_transaction_are_of_a_snapshot_that_ends_with_the_answer(raw, sums, db):
    """Alone, together, among others, and of rows that go the general way."""
    raw.send(alone(1, 1, 77, table_id=sums))
    assert cells(raw.reply(1)) == [[1, 1, None], None]
    bare = alone(8, 8, table_id=sums)
    bare.ClearField("first")
    raw.send(
        *(alone(key, key, table_id=sums) for key in range(2, 6)),
        reading(6, 6, table_id=sums),
        alone(7, 10, table_id=sums),  # does not fit
        bare,
        alone(9, *range(1, 18), table_id=sums),  # more keys than are read together
    )
    for key in (2, 3, 4, 5, 6, 8):
        response = raw.reply(key)
        assert cells(response) == [[key, key, None]]
        assert response.start_ts == db.watermark()
    assert raw.reply(7).error.reason == "OutOfRange"
    assert raw.reply(9).error.reason == "OutOfRange"  # the tenth of these
    wait_until(
        lambda: db.stats()["leases"] == 1
    )  # that of 6, which is a transaction's; settling has its own for a while


@pytest.mark.parametrize("ask", [reading, alone])
def test_a_read_waits_for_the_snapshot_it_asked_for(raw, sums, db, ask):
    """Whether it begins a transaction or has none."""
    late = ask(1, 1, table_id=sums, min_snapshot=db.watermark() + 1)
    late.timeout_ms = 5_000
    raw.send(late, ask(2, 2, table_id=sums))
    assert cells(raw.reply(2)) == [[2, 2, None]]
    with db.transaction() as tx:
        tx.delta("sums", (1,), n=10)
    response = raw.reply(1)
    assert response.start_ts >= tx.commit_ts
    assert cells(response) == [[1, 11, None]]
    never = ask(3, 1, table_id=sums, min_snapshot=2**40)
    never.timeout_ms = 100
    raw.send(never)
    assert raw.reply(3).error.reason == "Unavailable"
    wait_until(lambda: db.stats()["leases"] == (2 if ask is reading else 0))


def test_a_snapshot_that_is_read_and_then_released_in_one_frame_is_read_first(raw, sums):
    def again(number: int, txn: int) -> pb.Request:
        request = reading(number, txn, table_id=sums, txn=txn)
        request.ClearField("first")
        return request

    raw.send(reading(1, 1, table_id=sums), reading(2, 2, table_id=sums))
    assert cells(raw.reply(1)) and cells(raw.reply(2))
    raw.send(
        again(3, 1),
        pb.Request(txn=1, release=pb.Release()),
        again(4, 2),
        alone(5, 5, table_id=sums),
        pb.Request(release=pb.Release(txns=[2])),
        alone(6, 6, table_id=sums),
        again(7, 2),
    )
    assert [cells(raw.reply(number)) for number in range(3, 7)] == [[[key, key, None]] for key in (1, 2, 5, 6)]
    assert raw.reply(7).error.reason == "SnapshotTooOld"


@pytest.mark.parametrize("count", [1, 20])
def test_a_read_without_a_transaction_has_nothing_that_needs_one(raw, sums, table_id, db, count):
    """One at a time, as the event loop reads them, and many."""
    writing = alone(1, 1, table_id=sums)
    writing.operations.append(operation(table_id, 1, balance=1))
    for wrong in (
        writing,
        alone(2, 1, table_id=sums, as_of_ts=1),
        alone(3, 1, table_id=sums, ttl_ms=5),
        alone(4, 1, table_id=sums, shared=True),
    ):
        raw.send(wrong, *(alone(100 + i, 1, table_id=sums) for i in range(count - 1)))
        assert raw.reply(wrong.id).error.reason == "InvalidArgument"
        assert all(cells(raw.reply(100 + i)) == [[1, 1, None]] for i in range(count - 1))
    assert db.get("accounts", (1,)) is None
    wait_until(lambda: db.stats()["leases"] == 0)


def test_operations_come_with_what_belongs_to_a_transaction(raw, table_id, db):
    raw.send(
        pb.Request(id=1, txn=1, begin=pb.Begin(), operations=[operation(table_id, 1, balance=1)]),
        pb.Request(id=2, txn=2, begin=pb.Begin()),
        pb.Request(id=3, txn=2, renew=pb.Renew(), operations=[operation(table_id, 2, balance=1)]),
        pb.Request(id=4, txn=2, commit=pb.Commit(token=new_token())),
        pb.Request(id=5, txn=3, begin=pb.Begin()),
        pb.Request(id=6, txn=3, outcome=pb.Outcome(token="mine"), operations=[operation(table_id, 3, balance=1)]),
    )
    assert raw.reply(1).error.reason == raw.reply(6).error.reason == "InvalidArgument"
    assert raw.reply(4).commit.commit_ts
    assert db.get("accounts", (1,)) is None
    assert db.get("accounts", (2,))["balance"] == 1


def scanning(number: int, table_id: int, limit: int | None, **spec: Any) -> pb.Request:
    wanted = types_pb2.ScanSpec(table="sums", table_id=table_id, limit=limit, **spec)
    return pb.Request(id=number, txn=number, first=pb.Begin(), scan_open=pb.ScanOpen(spec=wanted, rows=True))


def test_few_rows_come_as_rows_only_if_they_were_asked_for(raw, sums):
    arrow = scanning(2, sums, 3)
    arrow.scan_open.rows = False
    raw.send(scanning(1, sums, 3, reverse=False), arrow, scanning(3, sums, 0), scanning(4, sums, None))
    page = raw.reply(1).page
    assert [row[:2] for row in rows_of(page.columns)] == [(1, 1), (2, 2), (3, 3)] and page.rows_in_columns == 3
    assert not raw.pages[1]
    page = raw.reply(2).page
    assert not page.columns
    assert read_batches(raw.pages[2])[0].column(0).to_pylist() == [1, 2, 3]
    page = raw.reply(3).page
    assert not (page.columns or raw.pages[3] or page.scan)
    assert raw.reply(4).error.reason == "OutOfRange"  # all ten, as Arrow


def test_rows_come_in_columns_with_their_nulls_and_without_those_that_are_missing(raw, sums):
    got, alone_ = reading(1, 9, 8, 77, table_id=sums), reading(2, 1, table_id=sums)
    alone_.get.columns.extend(["n", "id"])
    start = types_pb2.Key(values=[types_pb2.Value(int_value=8)])
    scanned = scanning(3, sums, 3, start=start, columns=["id", "n"])
    raw.send(got, alone_, scanned, reading(4, *range(1, 18), table_id=sums, txn=9))
    reply = raw.reply(1).get
    assert rows(reply) == [[9, 9, 3], [8, 8, None], None]
    assert [*reply.missing] == [2] and [*reply.columns[2].nulls] == [1]
    assert rows(raw.reply(2).get) == [[1, 1]]
    assert raw.reply(3).error.reason == "OutOfRange"  # row 10
    assert raw.reply(4).error.reason == "OutOfRange"  # of which there are more than are read together
    scanned.scan_open.spec.limit = 2
    scanned.id = scanned.txn = 5
    raw.send(scanned, reading(6, *[9] * 17, table_id=sums, txn=6))
    assert rows_of(raw.reply(5).page.columns) == [(8, 8), (9, 9)]
    assert rows(raw.reply(6).get) == [[9, 9, 3]] * 17


def test_a_scan_of_few_rows_says_what_does_not_fit(raw, sums):
    raw.send(scanning(1, sums, 2, reverse=True), scanning(2, sums, 1, columns=["id", "hi"], reverse=True))
    assert raw.reply(1).error.reason == "OutOfRange"
    assert rows_of(raw.reply(2).page.columns) == [(10, None)]


def later(request: int, key: int, table_id: int, txn: int) -> pb.Request:
    out = reading(request, key, table_id=table_id, txn=txn)
    out.ClearField("first")
    return out


def test_a_release_of_many_waits_for_those_that_are_busy(raw, sums, db):
    """A Begin that waits for a snapshot to come is released when it has ended, not before, and then for good."""
    held = db.stats()["server_open_transactions"]
    raw.send(
        pb.Request(id=1, txn=1, begin=pb.Begin(min_snapshot=2**60), timeout_ms=300),
        pb.Request(release=pb.Release(txns=[1])),
    )
    assert raw.reply(1).error.reason == "Unavailable"
    wait_until(lambda: db.stats()["server_open_transactions"] <= held)


# -- large appends, whose events are cut out of their frame -------------------------------------------

EVENTS = 6_000  # so many are large


@pytest.fixture
def events(db) -> dict[str, int]:
    """Tables of events, by name their numbers."""
    made = {}
    for name in ("first", "second"):
        if name in db.tables():
            db.drop(name)
        db.create_event_table(name, event_time="at", columns={"at": "timestamp", "n": "int64", "i": "int64"})
        made[name] = int(db.describe(name)["id"])
    return made


def append(number: int, tables: dict[str, int], table: str, n: int, count: int, **more: Any) -> Sent:
    batch = pa.RecordBatch.from_pydict(
        {
            "at": pa.array([1_700_000_000_000_000] * count, pa.timestamp("us", "UTC")),
            "n": pa.array([n] * count, pa.int64()),
            "i": pa.array(range(count), pa.int64()),
        }
    )
    data = bytes(encode_ipc(batch))
    request = pb.Request(id=number, **more)
    request.operations.add(kind=pb.Operation.KIND_APPEND, table=table, table_id=tables[table], arrow_bytes=len(data))
    return request, data


def commit() -> pb.Commit:
    return pb.Commit(token=new_token())


def held(db, table: str) -> dict[int, int]:
    """How many events there are of each ``n``."""
    with db.snapshot() as snap:
        return dict(collections.Counter(row["n"] for row in snap.scan(table)))


def begin_late(raw, db, accounts) -> Callable[[], None]:
    """Transaction 1, which waits for a snapshot until what is returned is called."""
    raw.send(pb.Request(id=1, txn=1, begin=pb.Begin(min_snapshot=db.watermark() + 3), timeout_ms=110_000))

    def go_on() -> None:
        for _ in range(4):
            with db.transaction() as tx:
                tx.delta(accounts, (1,), balance=1)
        assert not raw.reply(1).HasField("error")

    return go_on


def test_a_number_that_is_used_again_while_its_append_waits(raw, db, accounts, events):
    """Each request's events go where it says, whatever the numbers: a large one waits, a small one passes it."""
    go_on = begin_late(raw, db, accounts)
    raw.send(append(7, events, "first", 1, EVENTS, txn=1, commit=commit()))
    raw.send(append(7, events, "second", 2, 5, commit=commit()))
    assert raw.reply(7).commit.commit_ts
    raw.send(append(7, events, "second", 3, EVENTS + 1, commit=commit()))
    assert raw.reply(7).commit.commit_ts
    go_on()
    assert raw.reply(7).commit.commit_ts
    assert held(db, "first") == {1: EVENTS}
    assert held(db, "second") == {2: 5, 3: EVENTS + 1}


def test_an_answer_to_another_request_of_its_number_takes_nothing_from_an_append(raw, db, accounts, events):
    go_on = begin_late(raw, db, accounts)
    raw.send(append(9, events, "first", 5, EVENTS, txn=1, commit=commit()))
    raw.send(pb.Request(id=9, outcome=pb.Outcome(token=new_token())))
    assert raw.reply(9).HasField("outcome")
    go_on()
    assert raw.reply(9).commit.commit_ts
    assert held(db, "first") == {5: EVENTS}


def test_events_of_an_append_that_is_never_answered_go_nowhere(raw, db, events):
    raw.send(append(5, events, "first", 6, EVENTS, txn=77, release=pb.Release()))
    raw.send(append(5, events, "second", 8, 3, commit=commit()))
    assert raw.reply(5).commit.commit_ts
    assert held(db, "first") == {}
    assert held(db, "second") == {8: 3}


def test_two_large_appends_of_one_number_in_one_frame(raw, db, events):
    raw.send(
        append(4, events, "first", 3, EVENTS, commit=commit()), append(4, events, "second", 4, EVENTS, commit=commit())
    )
    assert raw.reply(4).commit.commit_ts
    assert raw.reply(4).commit.commit_ts
    assert held(db, "first") == {3: EVENTS}
    assert held(db, "second") == {4: EVENTS}


@pytest.mark.story
def test_what_waits_for_its_turn_counts_as_much_as_what_is_not_read(raw, db, accounts, events):
    """A client that goes on sending behind a request that waits is not read for a while: memory has a limit."""
    go_on = begin_late(raw, db, accounts)
    count, rows = 48, 200_000  # of 4.8 MB each
    for i in range(count):
        raw.send(append(10 + i, events, "first", i, rows, txn=1, apply=pb.Apply()))
        if i % 10 == 0:
            raw.send(pb.Request(id=10_000 + i, txn=1, renew=pb.Renew()))
    time.sleep(3)
    assert count + 5 - raw.frames.qsize() < 36  # 64 MiB are taken, which are 14, and 4 to 8 are on their way
    go_on()
    answers = [raw.reply(10 + i).error.reason for i in range(count)]
    assert answers[:13] == [""] * 13  # a transaction has 64 MiB, too
    assert set(answers[14:]) == {"ResourceExhausted"}
    raw.send(append(9, events, "second", 1, EVENTS, commit=commit()))
    assert raw.reply(9).commit.commit_ts


def test_parameters_of_sql_that_are_no_stream_are_the_callers_mistake(raw):
    two = pa.record_batch({"a": [1, 2]})
    raw.send(pb.Request(txn=1, begin=pb.Begin()))
    for i, parameters in enumerate((b"\0", b"\xff" * 8, b"\x01\0\0\0junk", bytes(encode_ipc(two))), start=1):
        raw.send(pb.Request(id=i, txn=1, sql=pb.Sql(text="select ?", parameters=parameters)))
        error = raw.reply(i).error
        assert error.reason == "InvalidArgument" and "parameters" in error.message, error
