"""The client for threads, against a real server."""

from __future__ import annotations

import asyncio
import concurrent.futures
import datetime as dt
import random
import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kivi
import kivi.aio
from kivi.api.tokens import new_token
from kivi.client.transport import _Session, _Waiter, _wake
from kivi.wire.v1 import session_pb2
from tests.client.proxy import Proxy
from tests.serverproc import ServerProcess
from tests.waiting import Pulse, wait_until


def balance(db, key: int = 1) -> int | None:
    with db.snapshot() as snap:
        row = snap.get("accounts", (key,))
    return None if row is None else row["balance"]


def test_64_threads_add_to_one_row_without_aborts(db, accounts):
    """Each commit with its own timestamp; the total is exact."""
    stamps: list[int] = []

    def add() -> None:
        for _ in range(20):
            with db.transaction() as tx:
                tx.delta(accounts, (1,), balance=1)
            stamps.append(tx.commit_ts)

    threads = [threading.Thread(target=add) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(stamps)) == len(stamps) == 64 * 20
    assert balance(db) == 64 * 20


@given(st.data())
def test_threads_that_wake_each_other_are_all_woken_whoever_leaves(data):
    """Of threads that are answered together some give up, before, while or after they are woken."""
    session: Any = _Session.__new__(_Session)
    count = data.draw(st.integers(1, 8))
    session._waiters = {number: _Waiter() for number in range(count)}
    waiting = dict(session._waiters)
    done: set[int] = set()

    def leaves(number: int) -> None:
        done.add(number)
        session._leave(number, waiting[number])

    for number in data.draw(st.sets(st.sampled_from(range(count)))):
        leaves(number)
    session._hand_out([(number, session_pb2.Response(id=number)) for number in range(count)])
    while len(done) < count:
        number = data.draw(st.sampled_from([n for n in range(count) if n not in done]))
        if data.draw(st.booleans()):
            leaves(number)
        else:
            awake = [n for n in range(count) if n not in done and waiting[n].gate.acquire(blocking=False)]
            assert awake or len(done) == count, "nobody is awake, and some still wait"
            for n in awake:
                done.add(n)
                _wake(waiting[n].others)


def test_of_two_concurrent_puts_one_gets_a_conflict_that_names_key_and_timestamps(db, accounts):
    with db.transaction() as first, db.transaction() as second:
        first.put(accounts, (1,), name="a")
        second.put(accounts, (1,), name="b")
        first.commit()
        with pytest.raises(kivi.Conflict) as caught:
            second.commit()
    error = caught.value
    assert (error.table, error.key, error.column) == (accounts, (1,), "name")
    assert (error.start_ts, error.commit_ts) == (first.start_ts, first.commit_ts)


def test_a_snapshot_is_that_of_begin_not_of_the_first_read(server, db, accounts):
    with db.transaction() as tx:
        assert tx.start_ts  # what another client sees as begun
        with server.connect() as other, other.transaction() as writer:
            writer.put(accounts, (1,), name="late")
        assert tx.get(accounts, (1,)) is None


def test_threads_that_are_the_first_to_read_a_snapshot_wait_for_the_one_that_begins_it(db, accounts, monkeypatch):
    """It begins in the request of whoever reads first, which may leave behind the request of another."""
    monkeypatch.setattr("kivi.client.transport._COMPANY_S", 1.0)  # its Begin has not left when that one takes it along
    with db.transaction() as tx:
        tx.delta(accounts, (1,), balance=1)
    perform, there, go_on = db._transport.perform, threading.Event(), threading.Event()

    def late(effect: Any) -> Any:
        if not there.is_set():
            there.set()
            assert go_on.wait(60)
        return perform(effect)

    with concurrent.futures.ThreadPoolExecutor() as threads, db.snapshot() as snap:
        db._transport.perform = late
        first = threads.submit(snap.get, accounts, (1,))
        try:
            assert there.wait(60)
            db._core.timeout_s = 0.3
            with pytest.raises(kivi.Unavailable, match=r"no answer from .* within 0.3 s"):
                snap.get(accounts, (1,))
            db._core.timeout_s = 10
            second = threads.submit(snap.get, accounts, (1,))
        finally:
            go_on.set()
        assert first.result()["balance"] == second.result()["balance"] == 1


def test_own_writes_are_read_back_and_insert_answers_at_once(db, accounts):
    with db.transaction() as tx:
        tx.put(accounts, (1,), name="ada")
        tx.delta(accounts, (1,), balance=21, peak=21)
        assert tx.get(accounts, (1,)) == {"id": 1, "name": "ada", "balance": 21, "peak": 21}
        with pytest.raises(kivi.RowExists) as caught:
            tx.insert(accounts, (1,), name="again")
        assert (caught.value.table, caught.value.key) == (accounts, (1,))
        tx.insert(accounts, (2,), name="bob")
        assert [row["id"] for row in tx.scan(accounts)] == [1, 2]
        tx.delete(accounts, (1,))
        assert tx.get(accounts, (1,)) is None
    with db.snapshot() as snap:
        assert snap.get_many(accounts, [(1,), (2,)], ["name"]) == [None, {"name": "bob"}]


def test_an_exception_rolls_back(db, accounts):
    with pytest.raises(ZeroDivisionError), db.transaction() as tx:
        tx.put(accounts, (1,), name="never")
        raise ZeroDivisionError
    assert balance(db) is None


def test_run_reruns_on_a_new_snapshot_and_never_replays_a_stale_write(db, accounts):
    with db.transaction() as tx:
        tx.put(accounts, (1,), name="0")
    runs = []

    def increment(tx) -> None:
        runs.append(1)
        value = int(tx.get(accounts, (1,))["name"])
        tx.put(accounts, (1,), name=str(value + 1))

    threads = [threading.Thread(target=lambda: [db.run(increment, timeout=60) for _ in range(5)]) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with db.snapshot() as snap:
        assert snap.get(accounts, (1,))["name"] == "30"
    assert len(runs) >= 30


def test_bad_input_is_refused_at_the_call(db, accounts):
    with db.transaction() as tx:
        for bad, error in [
            (lambda: tx.put("nothing", (1,), name="x"), kivi.NotFound),
            (lambda: tx.put(accounts, (1,), nonsense=1), kivi.SchemaError),
            (lambda: tx.put(accounts, (1,), name=5), kivi.SchemaError),
            (lambda: tx.put(accounts, ("x",), name="x"), kivi.SchemaError),
            (lambda: tx.put(accounts, (1, 2), name="x"), kivi.SchemaError),
            (lambda: tx.put(accounts, (None,), name="x"), kivi.InvalidArgument),
            (lambda: tx.delta(accounts, (1,), name="x"), kivi.SchemaError),
            (lambda: tx.delta(accounts, (1,), balance=2**63), kivi.InvalidArgument),
            (lambda: tx.scan(accounts, where=kivi.col("nonsense") == 1), kivi.SchemaError),
            (lambda: tx.scan(accounts, columns=["nonsense"]), kivi.SchemaError),
            (lambda: tx.append(accounts, [{"id": 1}]), kivi.InvalidArgument),
        ]:
            with pytest.raises(error):
                bad()
    assert db.watermark() == tx.start_ts


def test_a_sum_that_does_not_fit_is_out_of_range_and_recovers(db, accounts):
    for amount in (2**63 - 1, 1):
        with db.transaction() as tx:
            tx.delta(accounts, (1,), balance=amount)
    with db.snapshot() as snap:
        with pytest.raises(kivi.OutOfRange):
            snap.get(accounts, (1,))
        assert snap.get(accounts, (1,), ["name"]) == {"name": None}
    with db.transaction() as tx:
        tx.delta(accounts, (1,), balance=-1)
    assert balance(db) == 2**63 - 1


def test_scans_in_pages_with_everything_they_take(db, accounts):
    with db.transaction() as tx:
        for i in range(10_000):
            tx.put(accounts, (i,), name="even" if i % 2 == 0 else "odd")
    with db.snapshot() as snap:
        assert [row["id"] for row in snap.scan(accounts)] == list(range(10_000))
        assert [row["id"] for row in snap.scan(accounts, start=(5,), end=(8,))] == [5, 6, 7]
        assert [row["id"] for row in snap.scan(accounts, reverse=True, limit=2)] == [9_999, 9_998]
        odd = (kivi.col("name") == "odd") & (kivi.col("id") < 6)
        assert list(snap.scan(accounts, where=odd, columns=["id"])) == [{"id": 1}, {"id": 3}, {"id": 5}]
        many = kivi.col("id").isin(range(0, 10_000, 1_000)) | (kivi.col("id") == 1) | ~(kivi.col("id") < 9_999)
        assert len(list(snap.scan(accounts, where=many))) == 12
        table = snap.to_arrow(accounts)
        assert table["id"].to_pylist() == list(range(10_000))
        assert snap.to_arrow(accounts, prefix=(7,), columns=["name"]).to_pylist() == [{"name": "odd"}]
        empty = snap.to_arrow(accounts, start=(10_000,))
        assert (empty.num_rows, empty.column_names) == (0, ["id", "name", "balance", "peak"])
        rows = snap.scan(accounts)
        next(rows)
        rows.close()  # given up in the middle: the server forgets it


def test_a_chain_of_many_predicates_is_not_deep(db, accounts):
    with db.transaction() as tx:
        tx.put(accounts, (5,), name="x")
    where = kivi.col("id") == 0
    for i in range(1, 90):
        where = where | (kivi.col("id") == i)
    with db.snapshot() as snap:
        assert [row["id"] for row in snap.scan(accounts, where=where)] == [5]


def test_a_large_transaction_travels_in_parts(db, accounts):
    with db.transaction() as tx:
        for i in range(20_000):
            tx.delta(accounts, (i % 100,), balance=1)
        assert tx.get(accounts, (0,))["balance"] == 200
    assert balance(db, 99) == 200


@pytest.fixture
def events(db):
    for name in ("by_e", "ev"):
        if name in db.tables():
            db.drop(name)
    columns = {"e": "int64", "ts": "timestamp", "v": "int64", "price": "decimal(9,2)", "s": "string"}
    db.create_event_table("ev", event_time="ts", columns=columns)
    db.create_aggregate(
        "by_e",
        source="ev",
        group_by=["e", kivi.time_slot("ts", "5m", name="slot")],
        measures={"total": kivi.sum("v"), "n": kivi.count(), "paid": kivi.sum("price")},
        derived={"avg": "total / n"},
    )
    return "ev"


NOW = dt.datetime(2023, 11, 16, 17, 52, tzinfo=dt.UTC)


def test_batches_travel_when_they_are_asked_for(server, db, events):
    numbers = pa.array(range(200_000))
    stamps = pa.array([NOW] * len(numbers), pa.timestamp("us", "UTC"))
    for _ in range(4):
        db.append("ev", pa.table({"e": numbers, "ts": stamps, "v": numbers}))
    with Proxy(server.port) as proxy, proxy.connect() as through, through.snapshot() as snap:
        batches = snap.scan_batches("ev", columns=["v"])
        rows = next(batches).num_rows
        time.sleep(0.3)
        assert rows * 8 <= proxy.replied < 2 * rows * 8  # nothing is sent ahead
        assert rows + sum(batch.num_rows for batch in batches) == 800_000
        assert proxy.replied >= 800_000 * 8


def test_wide_rows_are_scanned_in_more_and_smaller_messages(server, db):
    """80 MiB in rows of 1 MiB: one page of rows would be more than a message may hold."""
    db.create_table("wide", key={"id": "int64"}, columns={"x": "bytes"})
    for i in range(80):
        with db.transaction() as tx:
            tx.put("wide", (i,), x=bytes([i]) * (1 << 20))
    with db.snapshot() as snap:
        assert [row["x"][:1] for row in snap.scan("wide")] == [bytes([i]) for i in range(80)]
        assert max(batch.nbytes for batch in snap.scan_batches("wide")) < 8 << 20
        assert snap.to_arrow("wide", columns=["id"])["id"].to_pylist() == list(range(80))
        assert snap.to_arrow("wide").nbytes > 80 << 20
        with pytest.raises(kivi.ResourceExhausted, match="message_bytes_max"):
            snap.get_many("wide", [(i,) for i in range(80)])
        assert snap.get("wide", (5,))["x"][:1] == b"\x05"  # the session, and what else is in it, goes on
    db.drop("wide")


def test_describe_tells_everything(db, events):
    found = db.describe("by_e")
    assert found["source"] == "ev"
    assert found["derived"] == {"avg": "total / n"}
    assert found["columns"]["paid"] == "sum(decimal(18,2))"
    assert db.describe("ev")["event_time"] == "ts"
    with pytest.raises(kivi.AlreadyExists):
        db.create_event_table("ev", event_time="ts", columns={"ts": "timestamp"})
    with pytest.raises(kivi.InvalidArgument):
        db.drop("ev")  # an aggregate depends on it


def test_appends_and_the_article_in_one_transaction(db, events, accounts):
    with db.transaction() as tx:
        tx.append("ev", [{"e": 251, "ts": NOW, "v": 21}])
        tx.delta(accounts, (251,), balance=21)
        slot = dt.datetime(2023, 11, 16, 17, 50, tzinfo=dt.UTC)
        assert tx.get("by_e", (251, slot))["total"] == 21
    stamp = db.append("ev", [{"e": 251, "ts": NOW, "v": 16, "price": "1.50"}])
    assert stamp > tx.commit_ts
    with db.snapshot() as snap:
        (row,) = snap.scan("by_e", prefix=(251,))
    assert (row["total"], row["n"], row["avg"], str(row["paid"])) == (37, 2, 18.5, "1.50")


def test_an_append_is_repeated_under_its_token_once(db, events):
    token = new_token()
    stamps = {db.append("ev", [{"e": 1, "ts": NOW, "v": 1}], token=token) for _ in range(3)}
    assert len(stamps) == 1
    assert db.outcome(token) == stamps.pop()
    assert db.outcome(new_token()) is kivi.ABORTED
    with pytest.raises(kivi.InvalidArgument):
        db.append("ev", [{"e": 1, "ts": NOW, "v": 2}], token=token)


def test_batch_tokens_and_stages(db, events):
    stage = db.stage("ev", [{"e": 9, "ts": NOW, "v": 7}], owner="task 1")
    spare = db.stage("ev", [{"e": 9, "ts": NOW, "v": 7}], owner="task 1, again")
    stamps = []
    for staged in (stage, spare):
        with db.transaction(batch=("query", 0)) as tx:
            tx.append_stages("ev", [staged])
        stamps.append(tx.commit_ts)
    assert stamps[0] == stamps[1]  # the second brought other contents and is dropped
    assert "query" in db.batch_scopes("qu")
    with pytest.raises(kivi.errors.OutOfSequence), db.transaction(batch=("query", 5)) as tx:
        tx.append("ev", [{"e": 9, "ts": NOW, "v": 7}])
    db.discard_stages([spare])
    with db.snapshot() as snap:
        assert [row["v"] for row in snap.scan("ev", where=kivi.col("e") == 9)] == [7]


def test_appender_futures_tell_each_events_commit(db, events):
    with db.appender("ev", linger_ms=2, max_events=100) as app:
        futures = [app.append(e=i % 3, ts=NOW, v=i) for i in range(1_000)]
        with pytest.raises(kivi.SchemaError):
            app.append(e="x", ts=NOW, v=1)
        with pytest.raises(kivi.SchemaError):
            app.append(e=1, nonsense=1)
        assert futures[0].result(timeout=60) <= futures[-1].result(timeout=60)
        called = threading.Event()
        futures[-1].add_done_callback(lambda future: called.set())
        assert called.wait(60)
    with db.snapshot() as snap:
        assert sum(row["total"] for row in snap.scan("by_e")) == sum(range(1_000))
        assert [row["v"] for row in snap.scan("ev")] == list(range(1_000))  # in order


def test_an_appends_future_is_a_future_like_any_other(db, events):
    with db.appender("ev", linger_ms=60_000) as app:  # nothing leaves before it is flushed
        futures = [app.append(e=1, ts=NOW, v=i) for i in range(100)]
        first = futures[0]
        heard: list[object] = []

        def raises(future):
            raise RuntimeError("of the caller's")

        first.add_done_callback(raises)
        first.add_done_callback(heard.append)
        assert not first.cancel() and first.running() and not first.done()
        app.flush()
        done, not_done = concurrent.futures.wait(futures, timeout=60)
        assert done == set(futures) and not not_done
        wait_until(lambda: heard == [first])
        assert {future.result() for future in concurrent.futures.as_completed(futures)} == {first.result()}
        assert concurrent.futures.wait([app.append(e=1, ts=NOW, v=1)], timeout=0).not_done

        async def awaited():
            future = asyncio.wrap_future(app.append(e=1, ts=NOW, v=1))
            await asyncio.to_thread(app.flush)
            return await future

        assert asyncio.run(awaited()) > first.result()


def test_an_appenders_event_that_is_too_large_concerns_no_other(db):
    db.create_event_table("large", event_time="ts", columns={"ts": "timestamp", "text": "string", "raw": "bytes"})
    with db.appender("large", linger_ms=1_000) as app:
        futures = [app.append(ts=NOW, text="a")]
        for bad in ({"text": "x" * ((16 << 20) + 1)}, {"text": "\u00e9" * (9 << 20)}, {"raw": bytes((16 << 20) + 1)}):
            with pytest.raises(kivi.ResourceExhausted, match="16777216"):
                app.append(ts=NOW, **bad)
        futures.append(app.append(ts=NOW, text="b"))
        futures += [
            app.append(ts=NOW, text=f"{i:05}" + "y" * 8_000) for i in range(9_000)
        ]  # 72 MB: no message holds it
    assert len({future.result(timeout=60) for future in futures}) > 4
    with db.snapshot() as snap:
        texts = [row["text"] for row in snap.scan("large")]
    assert [text[:5] for text in texts] == ["a", "b", *(f"{i:05}" for i in range(9_000))]
    db.drop("large")


def test_run_finds_a_table_that_another_client_has_made_anew(server, db, accounts):
    db.run(lambda tx: tx.put(accounts, (1,), name="before"))
    with server.connect() as other:
        other.drop(accounts)
        other.create_table(accounts, key={"id": "int64"}, columns={"name": "string"})
    db.run(lambda tx: tx.put(accounts, (1,), name="after"))
    with db.snapshot() as snap:
        assert snap.get(accounts, (1,)) == {"id": 1, "name": "after"}


def test_a_table_made_anew_is_noticed(server, db, accounts):
    with server.connect() as other:
        other.drop(accounts)
        with pytest.raises(kivi.NotFound), db.transaction() as tx:
            tx.put(accounts, (1,), name="x")
        other.create_table(accounts, key={"id": "string"}, columns={"v": "int64"})
    with db.snapshot() as snap:
        assert snap.get(accounts, ("a",)) is None
    with db.transaction() as tx:
        tx.put(accounts, ("a",), v=1)


def test_shared_snapshots_outlive_their_session(server, db, accounts):
    with db.transaction() as tx:
        tx.put(accounts, (1,), name="then")
    with Proxy(server.port) as proxy, proxy.connect() as job:
        with job.snapshot(shared=True, ttl_s=60) as shared:
            with db.transaction() as tx:
                tx.put(accounts, (1,), name="now")
            sessions = db.stats()["server_sessions"]
            proxy.cut()
            wait_until(lambda: db.stats()["server_sessions"] < sessions)
            for _ in range(2):  # a task that is done leaves it to the others
                with server.connect() as task, task.snapshot(lease=shared.lease) as view:
                    view.renew(60)
                    assert view.get(accounts, (1,))["name"] == "then"
                    assert view.to_arrow(accounts)["name"].to_pylist() == ["then"]
            assert shared.get(accounts, (1,))["name"] == "then"
            lease = shared.lease
        with pytest.raises(kivi.SnapshotTooOld), db.snapshot(lease=lease) as gone:  # its maker has closed it
            gone.get(accounts, (1,))
        with db.snapshot(shared=True) as shared:
            lease = shared.lease
        with pytest.raises(kivi.SnapshotTooOld), db.snapshot(lease=lease) as gone:
            gone.get(accounts, (1,))


def shared_snapshots(db: Any) -> int:
    return int(db.stats()["server_shared_snapshots"])


def test_who_closes_a_shared_snapshot_and_then_the_client_has_ended_it(server, db):
    wait_until(lambda: shared_snapshots(db) == 0)  # those that other tests have left end by their time limit
    for _ in range(20):
        with server.connect() as job, job.snapshot(shared=True, ttl_s=3600):
            assert shared_snapshots(db) == 1
        assert shared_snapshots(db) == 0


def test_a_shared_snapshot_is_ended_on_whatever_connection_there_is(server, db):
    """Closed without having been read since it was lost, and while there is none; by threads and by tasks."""
    wait_until(lambda: shared_snapshots(db) == 0)  # those that other tests have left end by their time limit
    with Proxy(server.port) as proxy, proxy.connect() as job:
        with job.snapshot(shared=True, ttl_s=3600):
            proxy.cut_noticed_by(job)
        assert shared_snapshots(db) == 0
        with job.snapshot(shared=True, ttl_s=3600):
            proxy.refuse = True
            proxy.cut_noticed_by(job)
            again = threading.Timer(1.0, setattr, (proxy, "refuse", False))
            again.start()
        assert shared_snapshots(db) == 0
        again.join()

        async def test() -> None:
            async with await kivi.aio.connect(proxy.endpoint) as job:
                async with job.snapshot(shared=True, ttl_s=3600):
                    await asyncio.to_thread(proxy.cut_noticed_by, job)
                assert shared_snapshots(db) == 0

        asyncio.run(test())


def test_closing_a_shared_snapshot_of_a_server_that_is_gone_is_no_error(server):
    with Pulse() as pulse, Proxy(server.port) as proxy, proxy.connect() as job:
        snap = job.snapshot(shared=True, ttl_s=5).__enter__()
        proxy.refuse = True
        proxy.cut_noticed_by(job)
        job._core.timeout_s, began = 2.0, time.monotonic()
        snap.close()
        assert time.monotonic() - began < 4 + 10 * pulse.late_s
        snap.close()


@pytest.mark.parametrize("wanted", [{"lease": "x"}, {"lease": 5}, {"shared": "yes"}, {"shared": 1}])
def test_what_is_no_shared_snapshot(db, wanted):
    with pytest.raises(kivi.InvalidArgument, match=next(iter(wanted))):
        db.snapshot(**wanted)


def test_nothing_listens_there():
    with pytest.raises(kivi.Unavailable, match="cannot reach localhost:1"):
        kivi.connect("localhost:1", timeout=2)


# -- lost connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "timeout", "what"),
    [
        ("localhost:99999", 1, "a port is a number from 1 to 65,535"),
        ("a:7420,[::1]:0", 1, "a port is a number from 1 to 65,535"),
        ("localhost", 1, "name its port too, as in 'localhost:7420'"),
        ("http://localhost:7420", 1, "but a URL"),
        ("localhost:7420", -1, "timeout is a number of seconds greater than zero"),
    ],
)
def test_what_is_no_endpoint_is_refused_before_anything_is_tried(endpoint: str, timeout: float, what: str) -> None:
    with pytest.raises(kivi.InvalidArgument, match=what):
        kivi.connect(endpoint, timeout=timeout)
    with pytest.raises(kivi.InvalidArgument, match=what):
        asyncio.run(kivi.aio.connect(endpoint, timeout=timeout))


def test_a_lost_reply_is_found_by_its_token(server, db, accounts):
    """Every tenth commit's reply is lost: each is applied once, and the client says when."""
    with Proxy(server.port) as proxy, proxy.connect(timeout=60) as through:
        for i in range(30):
            with through.transaction() as tx:
                tx.delta(accounts, (1,), balance=1)
                assert tx.start_ts
                if i % 10 == 0:
                    proxy.lose_the_reply_of_a_commit(db)
            assert tx.commit_ts
        for _ in range(5):
            proxy.lose_the_reply_of_a_commit(db)
            with through.transaction() as tx:
                tx.delta(accounts, (2,), balance=1)
    assert balance(db, 1) == 30
    assert balance(db, 2) == 5


def test_a_large_append_is_sent_again_whole(server, db):
    """Its reply is lost, and then the server hears all of it again: once in the table, and in all its events."""
    db.create_event_table("again", event_time="ts", columns={"ts": "timestamp", "n": "int64"})
    with Proxy(server.port) as proxy, proxy.connect(timeout=60) as through:
        stamps = []
        for i in range(3):
            numbers = np.arange(50_000 + i)
            proxy.mute = True  # gRPC's own windows, too: the first time it may not arrive whole
            timer = threading.Timer(0.2, proxy.lose)
            timer.start()
            stamps.append(
                through.append("again", pa.table({"ts": pa.array(numbers, pa.timestamp("us", "UTC")), "n": numbers}))
            )
    with db.snapshot() as snap:
        table = snap.to_arrow("again")
    assert sorted(stamps) == stamps and len(set(stamps)) == 3
    assert len(table) == 150_003
    assert sum(table["n"].to_pylist()) == sum((50_000 + i) * (49_999 + i) // 2 for i in range(3))


def test_a_server_that_is_far_or_busy_is_waited_for(server, db, accounts):
    """A handshake of more than a second is no failure, neither at first nor when a connection was lost."""
    with Proxy(server.port) as proxy:
        proxy.far_s = 1.5
        with proxy.connect() as through:
            through.get(accounts, (1,))
            proxy.cut_noticed_by(through)
            through.get(accounts, (1,))


def test_a_read_by_itself_outlives_a_connection(server, db, accounts):
    """What it read before the connection was lost is read anew, and never older than what this client has seen."""
    with Proxy(server.port) as proxy, proxy.connect(timeout=60) as through:
        for i in range(4):
            with through.transaction() as tx:
                tx.delta(accounts, (1,), balance=1)
            proxy.mute = True
            timer = threading.Timer(0.2, proxy.lose)
            timer.start()
            assert through.get(accounts, (1,))["balance"] == i + 1
    with Proxy(server.port) as proxy, proxy.connect() as through:
        assert through.get(accounts, (1,))
        proxy.mute, through._core.timeout_s = True, 0.5
        with pytest.raises(kivi.Unavailable, match=r"no answer from localhost:\d+ within 0.5 s"):
            through.get(accounts, (1,))


@pytest.mark.parametrize("more", [{}, {"name": "string"}], ids=["rows of fixed width", "others"])
def test_rows_that_are_read_together_are_of_one_moment(server, db, more):
    """Threads that move money and threads that count it, each read in no transaction; what was seen stays seen."""
    if "moved" in db.tables():
        db.drop("moved")
    db.create_table("moved", key={"id": "int64"}, columns={"balance": kivi.sum("int64"), **more})
    keys, stop, faults = [(i,) for i in range(4)], threading.Event(), []

    def move(db: Any, seed: int) -> None:
        moves = random.Random(seed)
        while not stop.is_set():
            a, b = moves.sample(keys, 2)
            with db.transaction() as tx:
                tx.delta("moved", a, balance=-1)
                tx.delta("moved", b, balance=1)
                tx.delta("moved", (9,), balance=1)

    def count(db: Any) -> None:
        seen = 0
        while not stop.is_set():
            rows = db.get_many("moved", [*keys, (9,)], ["balance"])
            *held, moved = (row["balance"] if row else 0 for row in rows)
            if sum(held) or moved < seen:
                faults.append((held, moved, seen))
            seen = moved

    with server.connect() as one, server.connect() as other:
        threads = [threading.Thread(target=move, args=(one, seed)) for seed in range(4)]
        threads += [threading.Thread(target=count, args=(db,)) for db in (one, other) for _ in range(6)]
        for thread in threads:
            thread.start()
        try:
            time.sleep(3)  # and on a busy machine for as long as it takes to move enough
            wait_until(lambda: faults or (one.get("moved", (9,)) or {"balance": 0})["balance"] > 100, pause_s=0.1)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not faults


def test_a_reply_that_never_comes_is_commit_unknown(server, db, accounts):
    with Proxy(server.port) as proxy, proxy.connect() as through:
        with pytest.raises(kivi.CommitUnknown) as caught, through.transaction() as tx:
            tx.delta(accounts, (1,), balance=1)
            assert tx.start_ts
            proxy.mute, through._core.timeout_s = True, 1.0
        assert db.outcome(caught.value.token) == db.watermark()  # it did commit, and the token tells
    assert balance(db) == 1


def test_a_stage_that_is_not_answered_is_unavailable_when_the_time_is_up(server, events):
    with Proxy(server.port) as proxy, proxy.connect() as through:
        assert through.stage("ev", [{"e": 1, "ts": NOW, "v": 1}])
        proxy.mute, through._core.timeout_s = True, 1.0
        began = time.monotonic()
        with pytest.raises(kivi.Unavailable, match="no answer from localhost:[0-9]+ within 1 s"):
            through.stage("ev", [{"e": 1, "ts": NOW, "v": 1}])
        assert 0.9 < time.monotonic() - began < 30


def test_a_snapshot_lost_with_its_connection(server, db, accounts):
    with db.transaction() as tx:
        tx.put(accounts, (1,), name="a")
    with Proxy(server.port) as proxy, proxy.connect() as through:
        with through.snapshot() as snap:
            first = snap.get(accounts, (1,))
            proxy.cut_noticed_by(through)
            assert snap.get(accounts, (1,)) == first  # nothing has changed: opened again at the same timestamp
        with pytest.raises((kivi.SnapshotTooOld, kivi.Unavailable)), through.transaction() as tx:
            tx.get(accounts, (1,))
            proxy.cut_noticed_by(through)
            tx.put(accounts, (1,), name="from a read that is lost")
        attempts = []

        def change(tx) -> None:
            attempts.append(1)
            name = tx.get(accounts, (1,))["name"]
            if len(attempts) == 1:
                proxy.cut_noticed_by(through)
            tx.put(accounts, (1,), name=name + "!")

        through.run(change)
        assert len(attempts) == 2
    with db.snapshot() as snap:
        assert snap.get(accounts, (1,))["name"] == "a!"


def test_a_restart_is_ridden_out(tmp_path):
    with ServerProcess(tmp_path / "data") as server, server.connect(timeout=30) as db:
        db.create_table("t", key={"id": "int64"}, columns={"v": kivi.sum("int64")})
        with db.transaction() as tx:
            tx.delta("t", (1,), v=1)
        seen = tx.commit_ts
        server.restart()
        with db.snapshot() as snap:
            assert snap.ts >= seen  # R17
            assert snap.get("t", (1,))["v"] == 1
        with db.transaction() as tx:
            tx.delta("t", (1,), v=1)
        assert tx.commit_ts > seen  # R13


@pytest.mark.parametrize("seen", ["a row that is there", "a sum that does not fit"])
def test_writes_before_an_error_are_not_lost_with_the_connection(server, db, accounts, seen):
    """The server has them, and the client has heard an error: it may not begin again without them."""
    with db.transaction() as tx:
        tx.put(accounts, (1,), name="there", balance=2**63 - 1)
    with db.transaction() as tx:
        tx.delta(accounts, (1,), balance=1)
    with Proxy(server.port) as proxy, proxy.connect() as through:
        tx = through.transaction()
        tx.put(accounts, (2,), name="must not vanish")
        if seen == "a row that is there":
            with pytest.raises(kivi.RowExists):
                tx.insert(accounts, (1,), name="again")
        else:
            with pytest.raises(kivi.OutOfRange):
                tx.get(accounts, (1,))
        proxy.cut_noticed_by(through)
        tx.put(accounts, (3,), name="alone")
        with pytest.raises(kivi.Disconnected):
            tx.commit()
    with db.snapshot() as snap:
        assert snap.get_many(accounts, [(2,), (3,)], ["name"]) == [None, None]


def test_a_request_that_no_message_can_hold_takes_its_transaction_along(db, accounts):
    """What was buffered with it is gone, so nothing of the transaction may commit."""
    db.create_table("long_rows", key={"id": "int64"}, columns=dict.fromkeys("abcde", "string"))
    tx = db.transaction()
    tx.put(accounts, (7,), name="small")
    with pytest.raises(kivi.ResourceExhausted, match="message_bytes_max"):
        tx.put("long_rows", (1,), **dict.fromkeys("abcde", "x" * (15 << 20)))
    with pytest.raises(kivi.ResourceExhausted, match="message_bytes_max"):
        tx.commit()
    with db.snapshot() as snap:
        assert snap.get(accounts, (7,)) is None
        assert snap.get("long_rows", (1,)) is None


def test_commits_at_the_same_time_have_their_own_outcomes(db, accounts):
    stamps: list[int] = []

    def work(i: int) -> None:
        for n in range(20):
            with db.transaction() as tx:
                tx.delta(accounts, (100 + n % 2,), balance=1)
                if i % 2:
                    tx.put(accounts, (200 + i,), balance=n)
            stamps.append(tx.commit_ts)
            assert tx.start_ts < tx.commit_ts

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stamps) == len(set(stamps)) == 240
    with db.snapshot() as snap:
        assert [row["balance"] for row in snap.get_many(accounts, [(100,), (101,)])] == [120, 120]
        assert {snap.get(accounts, (200 + i,))["balance"] for i in range(1, 12, 2)} == {19}


def test_large_writes_are_sent_ahead_one_by_one(db, accounts):
    """Together they would be too much for a message; and memory is that of one of them."""
    with db.transaction() as tx:
        for key in range(20, 25):
            tx.put(accounts, (key,), name=str(key) * (6 << 20))
    with db.snapshot() as snap:
        found = snap.get_many(accounts, [(key,) for key in range(20, 25)], ["name"])
    assert [row and (row["name"][:2], len(row["name"])) for row in found] == [(str(k), 12 << 20) for k in range(20, 25)]


def test_a_guard_on_an_aggregate_row(db):
    db.create_event_table("guarded", event_time="ts", columns={"ts": "timestamp", "a": "int64"})
    db.create_aggregate("guarded_by_a", source="guarded", group_by=["a"], measures={"calls": kivi.count()})
    tx = db.transaction()
    assert tx.get("guarded_by_a", (1,)) is None
    tx.guard("guarded_by_a", (1,), "calls")
    db.append("guarded", [{"ts": 1, "a": 1}])
    with pytest.raises(kivi.Conflict) as caught:
        tx.commit()
    assert (caught.value.table, caught.value.key) == ("guarded_by_a", (1,))


def test_what_is_read_as_of_a_commit_that_was_seen_elsewhere_waits_for_it(server, db, accounts):
    """C6: another node has told this client of a commit that the one it is connected to now has not applied yet."""
    with server.connect() as other, concurrent.futures.ThreadPoolExecutor(1) as pool:
        told = db.watermark() + 3
        with pytest.raises(kivi.InvalidArgument, match="past the watermark"), db.snapshot(as_of=told) as snap:
            snap.get(accounts, (1,))
        db._core.saw(told)

        def ts() -> int:
            with db.snapshot(as_of=told) as snap:
                snap.get(accounts, (1,))
                return int(snap.ts)

        found = pool.submit(ts)
        while other.watermark() < told:
            with other.transaction() as tx:
                tx.delta(accounts, (1,), balance=1)
        assert found.result(timeout=60) == told


def test_what_a_client_is_told_of_as_the_watermark_has_what_it_has_seen(server: ServerProcess) -> None:
    """Also at a node of a cluster that is behind, to which it has come from another one."""
    with server.connect() as db, server.connect() as other, concurrent.futures.ThreadPoolExecutor() as threads:
        db.create_table("seen", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        db._core.saw(db.watermark() + 1)  # as of a node that is ahead by a commit
        told = threads.submit(db.watermark)
        with pytest.raises(TimeoutError):
            told.result(0.3)
        with other.transaction() as tx:
            tx.delta("seen", (1,), n=1)
        assert told.result(60) >= (tx.commit_ts or 0) > 0
