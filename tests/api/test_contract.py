"""The public surface, as outside programs are written against it: every name of it, on every kind of database."""

from __future__ import annotations

import asyncio
import datetime as dt
import decimal
import functools
import importlib
import operator
import time
import uuid
from collections import Counter

import pyarrow as pa
import pytest

import kivi
from kivi import errors
from tests.waiting import wait_until

UTC = dt.UTC
AT = dt.datetime(2023, 11, 16, 17, 52, tzinfo=UTC)
SLOT = dt.datetime(2023, 11, 16, 17, 50, tzinfo=UTC)
HOUR = dt.timedelta(hours=1)


@pytest.fixture
def accounts(db):
    db.create_table(
        "accounts",
        key={"id": "int64"},
        columns={"name": "string", "balance": kivi.sum("int64"), "peak": kivi.max("int64"), "low": kivi.min("float64")},
    )
    return db


@pytest.fixture
def invocations(db):
    db.create_event_table(
        "invocations",
        event_time="ts",
        retention="30d",
        columns={
            "customer": "string",
            "application": "string",
            "server": "string",
            "endpoint_id": "int64",
            "ts": "timestamp",
            "resp_time_us": "int64",
        },
    )
    db.create_aggregate(
        "endpoint_5m",
        source="invocations",
        group_by=["endpoint_id", kivi.time_slot("ts", "5m", name="slot")],
        measures={
            "sum_resp_time": kivi.sum("resp_time_us"),
            "invocations": kivi.count(),
            "slowest": kivi.max("resp_time_us"),
        },
        derived={"avg_resp_time": "sum_resp_time / invocations"},
    )
    return db


def event(endpoint=251, us=10_000, ts=AT, **more):
    return {
        "customer": "acme", "application": "shop", "server": "s1", "endpoint_id": endpoint, "ts": ts,
        "resp_time_us": us, **more,
    }  # fmt: skip


# -- rows --------------------------------------------------------------------------------------------------


def test_a_transaction_commits_on_success_and_reads_its_own_writes(accounts):
    with accounts.transaction() as tx:
        tx.put("accounts", (1,), name="ada")
        tx.delta("accounts", (1,), balance=+21, peak=21)
        tx.insert("accounts", (2,), name="bob")
        assert tx.get("accounts", (1,)) == {"id": 1, "name": "ada", "balance": 21, "peak": 21, "low": None}
        assert [row["id"] for row in tx.scan("accounts")] == [1, 2]
        start = tx.start_ts
    assert tx.commit_ts > start
    with accounts.snapshot() as snap:
        assert snap.ts >= tx.commit_ts
        assert snap.get("accounts", (2,))["balance"] == 0
        assert snap.get("accounts", (3,)) is None
        rows = snap.get_many("accounts", [(2,), (9,), (1,)])
        assert [row and row["name"] for row in rows] == ["bob", None, "ada"]


def test_a_row_is_read_by_itself(accounts):
    """Without a transaction: the newest, whatever its table's rows are like."""
    accounts.create_table("sums", key={"id": "int64", "at": "timestamp"}, columns={"n": kivi.sum("int64")})
    with accounts.transaction() as tx:
        tx.put("accounts", (1,), name="ada")
        tx.delta("sums", (1, AT), n=5)
    assert accounts.get("accounts", (1,)) == {"id": 1, "name": "ada", "balance": 0, "peak": None, "low": None}
    assert accounts.get("accounts", (2,)) is None
    assert accounts.get("sums", (1, AT)) == {"id": 1, "at": AT, "n": 5}
    with accounts.transaction() as tx:
        tx.delta("sums", (1, AT), n=1)
        assert accounts.get("sums", (1, AT), columns=["n"]) == {"n": 5}  # not this transaction's
    assert accounts.get("sums", (1, AT), ["n"]) == {"n": 6}
    rows = accounts.get_many("accounts", [(2,), (1,), (1,)], columns=["name"])
    assert rows == [None, {"name": "ada"}, {"name": "ada"}]
    assert accounts.get_many("accounts", []) == []
    accounts.drop("sums")
    accounts.create_table("sums", key={"id": "int64", "at": "timestamp"}, columns={"other": kivi.sum("int64")})
    assert accounts.get("sums", (1, AT)) is None
    with pytest.raises(kivi.NotFound):
        accounts.get("nothing", (1,))
    with pytest.raises(kivi.SchemaError):
        accounts.get("sums", (1,))
    with pytest.raises(kivi.SchemaError):
        accounts.get("sums", (1, AT), columns=["n"])
    with pytest.raises(kivi.InvalidArgument):
        accounts.get("sums", (None, AT))
    wait_until(lambda: accounts.stats()["leases"] == 0)  # settling has one of its own for a while


def test_an_exception_rolls_back(accounts):
    with pytest.raises(ZeroDivisionError), accounts.transaction() as tx:
        tx.put("accounts", (1,), name="ada")
        _ = 1 // 0
    with accounts.snapshot() as snap:
        assert snap.get("accounts", (1,)) is None


def test_scans_in_key_order_with_bounds_predicates_columns_and_limit(db):
    db.create_table("points", key={"a": "int64", "b": "string"}, columns={"v": "int64"})
    with db.transaction() as tx:
        for a in (2, 1, 3):
            for b in ("y", "x"):
                tx.put("points", (a, b), v=a * 10 + (b == "y"))
    with db.snapshot() as snap:
        keys = [(row["a"], row["b"]) for row in snap.scan("points")]
        assert keys == [(a, b) for a in (1, 2, 3) for b in ("x", "y")]
        assert [row["v"] for row in snap.scan("points", prefix=(2,))] == [20, 21]
        assert [row["v"] for row in snap.scan("points", start=(1, "y"), end=(3,))] == [11, 20, 21]
        assert [row["v"] for row in snap.scan("points", reverse=True, limit=2)] == [31, 30]
        where = (kivi.col("v") > 10) & (kivi.col("b") == "x") | kivi.col("a").isin([3])
        assert [row["v"] for row in snap.scan("points", where=where)] == [20, 30, 31]
        assert list(snap.scan("points", where=~(kivi.col("a") <= 2), columns=["v"])) == [{"v": 30}, {"v": 31}]
        table = snap.to_arrow("points", prefix=(1,), columns=["b", "v"])
        assert table.to_pydict() == {"b": ["x", "y"], "v": [10, 11]}
        assert snap.to_arrow("points", prefix=(7,)).num_rows == 0


def test_batches_of_a_scan_are_its_rows_and_take_its_arguments(invocations):
    db = invocations
    db.create_table("points", key={"a": "int64", "b": "string"}, columns={"v": "int64"})
    with db.transaction() as tx:
        for i in range(9_000):
            tx.put("points", (i // 3, "xyz"[i % 3]), v=i)
        own = list(tx.scan_batches("points", prefix=(7,)))
        assert pa.Table.from_batches(own)["v"].to_pylist() == [21, 22, 23]  # own writes included
    for i in range(3):
        db.append("invocations", [event(us=i) for _ in range(40_000)])
    for _ in range(2):
        with db.snapshot() as snap:
            for table, count in (("points", 9_000), ("invocations", 120_000)):
                batches = list(snap.scan_batches(table))
                assert len(batches) > 1
                assert all(isinstance(b, pa.RecordBatch) and 0 < b.num_rows <= 65_536 for b in batches)
                whole = pa.Table.from_batches(batches)
                assert whole.num_rows == count
                assert whole == snap.to_arrow(table)
            for arguments in (
                {"prefix": (5,), "columns": ["v", "a"]},
                {"start": (5, "y"), "end": (9,), "reverse": True},
                {"where": kivi.col("v") >= 8_000, "limit": 600},
            ):
                batches = snap.scan_batches("points", **arguments)
                assert [row for batch in batches for row in batch.to_pylist()] == list(snap.scan("points", **arguments))
            assert list(snap.scan_batches("points", prefix=(10_000,))) == []
            assert list(snap.scan_batches("points", limit=0)) == []
            with pytest.raises(kivi.SchemaError):
                list(snap.scan_batches("points", columns=["nope"]))
        db.consolidate()


def test_batches_of_wide_rows_have_fewer_rows(db):
    """What is in memory at once is bounded by bytes too, in process as at a server."""
    db.create_table("wide", key={"id": "int64"}, columns={"x": "bytes", "s": "string"})
    with db.transaction() as tx:
        for i in range(24):
            tx.put("wide", (i,), x=bytes(1 << 20))
        tx.put("wide", (24,), s="short")
    with db.snapshot() as snap:
        batches = list(snap.scan_batches("wide"))
        assert max(batch.nbytes for batch in batches) < 6 << 20
        assert [i for batch in batches for i in batch["id"].to_pylist()] == list(range(25))
        assert len(list(snap.scan_batches("wide", columns=["id", "s"]))) == 1


def test_a_scan_given_up_in_the_middle_leaves_its_snapshot_whole(invocations):
    db = invocations
    db.append("invocations", [event(us=i) for i in range(100_000)])
    with db.snapshot() as snap:
        for _ in range(3):
            batches = snap.scan_batches("invocations", columns=["resp_time_us"])
            assert next(batches)["resp_time_us"][0].as_py() == 0
            batches.close()
        assert sum(batch.num_rows for batch in snap.scan_batches("invocations")) == 100_000


def test_every_type_comes_back_as_it_was_put(db):
    db.create_table(
        "types",
        key={"b": "bool", "t": "timestamp", "d": "decimal(9,2)", "f": "float64", "s": "string", "x": "bytes"},
        columns={
            "i": "int64", "f2": "float64", "d2": "decimal(18,3)", "s2": "string", "x2": "bytes", "b2": "bool",
            "t2": "timestamp", "total": kivi.sum("decimal(12,2)"), "mean": kivi.sum("float64"),
            "first": kivi.min("timestamp"),
        },
    )  # fmt: skip
    key = (True, AT, decimal.Decimal("-12.50"), -0.5, "\x00käse", b"\x00\xff")
    values = {
        "i": -(2**63), "f2": 1e300, "d2": decimal.Decimal("1.125"), "s2": "", "x2": b"", "b2": False, "t2": AT,
    }  # fmt: skip
    with db.transaction() as tx:
        tx.put("types", key, **values)
        tx.delta("types", key, total=decimal.Decimal("0.10"), mean=0.5, first=AT)
        tx.delta("types", key, total=decimal.Decimal("0.20"), mean=0.25, first=AT - dt.timedelta(days=1))
    expected = {
        **dict(zip(("b", "t", "d", "f", "s", "x"), key, strict=True)), **values,
        "total": decimal.Decimal("0.30"), "mean": 0.75, "first": AT - dt.timedelta(days=1),
    }  # fmt: skip
    with db.snapshot() as snap:
        assert snap.get("types", key) == expected
        assert list(snap.scan("types")) == [expected]
        assert snap.to_arrow("types").to_pylist() == [expected]
    db.consolidate()
    with db.snapshot() as snap:
        assert snap.get("types", key) == expected


def test_deltas_never_conflict_and_puts_do(accounts):
    first, second = accounts.transaction(), accounts.transaction()
    with first, second:
        assert first.start_ts == second.start_ts
        first.delta("accounts", (1,), balance=1)
        second.delta("accounts", (1,), balance=2)
    with accounts.snapshot() as snap:
        assert snap.get("accounts", (1,))["balance"] == 3
    one, two = accounts.transaction(), accounts.transaction()
    with pytest.raises(kivi.Conflict) as caught:  # noqa: SIM117 - the order in which they end is the point
        with two:
            with one:
                start = (one.start_ts, two.start_ts)
                one.put("accounts", (1,), balance=10)
                two.put("accounts", (1,), balance=20)
    conflict = caught.value
    assert (conflict.table, conflict.key) == ("accounts", (1,))
    assert conflict.start_ts == start[1]
    assert conflict.commit_ts == one.commit_ts


def test_insert_is_strict_and_delete_is_not(accounts):
    with accounts.transaction() as tx:
        tx.insert("accounts", (1,), name="ada")
        with pytest.raises(kivi.RowExists):
            tx.insert("accounts", (1,), name="eve")
        tx.delete("accounts", (7,))
    with accounts.transaction() as tx:
        with pytest.raises(kivi.RowExists):
            tx.insert("accounts", (1,))
        tx.delete("accounts", (1,))
        tx.insert("accounts", (1,), name="new")
    with accounts.snapshot() as snap:
        assert snap.get("accounts", (1,))["name"] == "new"


def test_a_deferred_insert_fails_at_the_commit_at_the_latest(accounts):
    with accounts.transaction(deferred=True) as tx:
        tx.insert("accounts", (1,), name="ada")
        tx.write("accounts", [{"id": 2, "name": "bob"}], insert=True)
        assert tx.get("accounts", (2,))["name"] == "bob"
        tx.insert("accounts", (3,), name="eve")

    def insert(tx):
        tx.put("accounts", (5,), name="before")
        tx.insert("accounts", (3,), name="again")
        tx.put("accounts", (6,), name="behind")

    for ask in (lambda tx: None, lambda tx: tx.get("accounts", (1,)), lambda tx: tx.insert("accounts", (3,))):
        tx = accounts.transaction(deferred=True).__enter__()
        insert(tx)
        ask(tx)
        assert tx.get("accounts", (3,))["name"] in ("again", None)  # its own
        tx.put("accounts", (7,), name="on")
        with pytest.raises(kivi.RowExists) as refused:
            tx.commit()
        assert refused.value.key == (3,)
    with pytest.raises(kivi.RowExists):
        accounts.run(insert, deferred=True)
    with accounts.snapshot() as snap:
        assert [row["id"] for row in snap.scan("accounts")] == [1, 2, 3]
        assert snap.get("accounts", (3,))["name"] == "eve"


def test_r16_deferred_inserts_that_come_again_under_their_token_are_answered_as_the_first_time(accounts):
    mine, another, third = (str(uuid.uuid4()) for _ in range(3))

    def insert(key, **values):
        with accounts.transaction(token=mine, deferred=True) as tx:
            tx.insert("accounts", (key,), **values)
            tx.delta("accounts", (9,), balance=1)
        return tx.commit_ts

    first = insert(1, name="ada")
    assert insert(1, name="ada") == first
    with pytest.raises(kivi.InvalidArgument, match="another payload"):
        insert(1, name="eve")
    written = accounts.write("accounts", [{"id": 2, "name": "bob"}], insert=True, token=another)
    assert accounts.write("accounts", [{"id": 2, "name": "bob"}], insert=True, token=another) == written
    with pytest.raises(kivi.RowExists):
        accounts.write("accounts", [{"id": 2, "name": "bob"}], insert=True, token=third)
    with accounts.snapshot() as snap:
        assert [(row["id"], row["name"], row["balance"]) for row in snap.scan("accounts")] == [
            (1, "ada", 0),
            (2, "bob", 0),
            (9, None, 1),
        ]


@pytest.mark.parametrize("how", ["a read behind", "a read before", "more than fit one request"])
def test_r16_deferred_inserts_in_several_requests_that_come_again_are_answered_as_the_first_time(accounts, how):
    def insert(token):
        with accounts.transaction(token=token, deferred=True) as tx:
            if how == "a read before":
                tx.get("accounts", (2,))
            for i in range(5_000 if how.startswith("more") else 1):
                tx.insert("accounts", (10 + i,), name="ada")
            if how == "a read behind":
                assert tx.get("accounts", (10,))["name"] == "ada"
                assert tx.get("accounts", (2,)) is None
        return tx.commit_ts

    mine = str(uuid.uuid4())
    first = insert(mine)
    assert insert(mine) == first
    for another in (None, str(uuid.uuid4())):
        with pytest.raises(kivi.RowExists) as refused:
            insert(another)
        assert refused.value.key == (10,)


def test_deferred_inserts_of_one_row_that_meet_conflict(accounts):
    with pytest.raises(kivi.Conflict), accounts.transaction(deferred=True) as tx:
        assert tx.get("accounts", (1,)) is None
        tx.insert("accounts", (1,), name="second")
        with accounts.transaction(deferred=True) as other:
            other.insert("accounts", (1,), name="first")
    with accounts.snapshot() as snap:
        assert snap.get("accounts", (1,))["name"] == "first"


def test_run_reruns_on_a_new_snapshot_after_a_conflict(accounts):
    with accounts.transaction() as tx:
        tx.put("accounts", (1,), balance=100)
    seen: list[int] = []

    def withdraw(tx):
        balance = tx.get("accounts", (1,))["balance"]
        if not seen:
            seen.append(balance)
            interfering()
        tx.put("accounts", (1,), balance=balance - 10)
        return balance

    other = {}

    def interfering():
        other["done"] = True

    # the conflict comes from a transaction that began before and commits in between
    rival = accounts.transaction()
    with rival:
        rival.put("accounts", (1,), balance=50)
    assert accounts.run(withdraw) == 50
    with accounts.snapshot() as snap:
        assert snap.get("accounts", (1,))["balance"] == 40
    assert other == {"done": True}


def test_guard_makes_write_skew_conflict(accounts):
    with accounts.transaction() as tx:
        tx.put("accounts", (1,), balance=10)
        tx.put("accounts", (2,), balance=10)
    one, two = accounts.transaction(), accounts.transaction()
    with pytest.raises(kivi.Conflict), two:  # noqa: SIM117
        with one:
            assert one.get("accounts", (2,))["balance"] == two.get("accounts", (2,))["balance"] == 10
            one.guard("accounts", (2,), "balance")
            two.guard("accounts", (1,), "balance")
            one.delta("accounts", (1,), balance=-10)
            two.delta("accounts", (2,), balance=-10)


def test_snapshots_as_of_a_timestamp_and_a_moment(db):
    db.create_table("kept", key={"id": "int64"}, columns={"n": kivi.sum("int64")}, history="1h")
    stamps, moments = [], []
    for _ in range(3):
        with db.transaction() as tx:
            tx.delta("kept", (1,), n=1)
        stamps.append(tx.commit_ts)
        time.sleep(0.03)
        moments.append(dt.datetime.now(UTC))
        time.sleep(0.03)
    for _ in range(2):
        for i in range(3):
            with db.snapshot(as_of=stamps[i]) as snap:
                assert snap.get("kept", (1,))["n"] == i + 1
            with db.snapshot(as_of=moments[i]) as snap:
                assert snap.get("kept", (1,))["n"] == i + 1
                assert [row["n"] for row in snap.scan("kept")] == [i + 1]
        db.consolidate()
    with db.snapshot(min_snapshot=stamps[-1]) as snap:
        assert snap.ts >= stamps[-1]


# -- events and aggregates -----------------------------------------------------------------------------------


def test_the_papers_event_and_its_aggregate_in_one_transaction(invocations):
    db = invocations
    db.create_table(
        "own", key={"endpoint_id": "int64", "slot": "timestamp"}, columns={"s": kivi.sum("int64"), "n": kivi.count()}
    )
    with db.transaction() as tx:
        tx.append("invocations", [event(us=21)])
        tx.delta("own", (251, SLOT), s=21, n=1)
        assert tx.get("endpoint_5m", (251, SLOT))["sum_resp_time"] == 21
    with db.snapshot() as snap:
        assert snap.get("own", (251, SLOT)) == {"endpoint_id": 251, "slot": SLOT, "s": 21, "n": 1}
        assert snap.get("endpoint_5m", (251, SLOT)) == {
            "endpoint_id": 251, "slot": SLOT, "sum_resp_time": 21, "invocations": 1, "slowest": 21,
            "avg_resp_time": 21.0,
        }  # fmt: skip


def test_appends_of_dicts_tables_and_batches_are_one_transaction_each(invocations):
    db = invocations
    first = db.append("invocations", [event(us=10), event(us=20)])
    table = pa.Table.from_pylist([event(us=30), event(endpoint=252, us=5)])
    second = db.append("invocations", table)
    third = db.append("invocations", table.to_batches()[0])
    assert first < second < third
    with db.snapshot() as snap:
        assert snap.get("endpoint_5m", (251, SLOT))["sum_resp_time"] == 90
        assert [row["resp_time_us"] for row in snap.scan("invocations")] == [10, 20, 30, 5, 30, 5]
        assert snap.to_arrow("invocations", where=kivi.col("endpoint_id") == 252).num_rows == 2
    db.consolidate()
    with db.snapshot() as snap:
        assert snap.to_arrow("invocations", columns=["resp_time_us"])["resp_time_us"].to_pylist() == [
            10,
            20,
            30,
            5,
            30,
            5,
        ]
        assert snap.to_arrow("endpoint_5m", prefix=(251,))["avg_resp_time"].to_pylist() == [22.5]


def test_an_aggregate_created_later_has_everything(invocations):
    db = invocations
    for i in range(5):
        db.append("invocations", [event(endpoint=i, us=10 * i)])
    db.consolidate()
    db.append("invocations", [event(endpoint=7, us=1)])
    db.create_aggregate(
        "customer_1h",
        source="invocations",
        group_by=["customer", kivi.time_slot("ts", "1h", name="slot")],
        measures={"total": kivi.sum("resp_time_us"), "n": kivi.count("resp_time_us")},
    )
    db.append("invocations", [event(endpoint=8, us=2)])
    with db.snapshot() as snap:
        assert [(row["customer"], row["total"], row["n"]) for row in snap.scan("customer_1h")] == [("acme", 103, 7)]


def test_the_appender_resolves_each_future_with_the_commit(invocations):
    if hasattr(invocations, "_target"):

        async def appended():
            async with invocations._target.appender("invocations", linger_ms=2, max_events=100) as app:
                futures = [app.append(**event(us=i)) for i in range(250)]
            return [await future for future in futures]

        stamps = invocations._loop.run_until_complete(appended())
    else:
        with invocations.appender("invocations", linger_ms=2, max_events=100) as app:
            futures = [app.append(**event(us=i)) for i in range(250)]
        stamps = [future.result() for future in futures]
    assert stamps == sorted(stamps)
    assert len(set(stamps)) >= 3
    with invocations.snapshot() as snap:
        assert snap.ts >= max(stamps)
        assert snap.get("endpoint_5m", (251, SLOT))["invocations"] == 250


def test_renewing_a_transaction_keeps_what_it_has_written(accounts):
    db = accounts
    with db.transaction() as tx:
        tx.put("accounts", (1,), name="buffered")  # what was written before is kept, sent or not
        tx.renew(30)
        assert tx.get("accounts", (1,))["name"] == "buffered"
    assert tx.commit_ts
    with pytest.raises(kivi.InvalidArgument):
        tx.renew(30)
    with db.snapshot() as snap:
        assert snap.get("accounts", (1,))["name"] == "buffered"


def test_a_long_chain_of_alternatives(accounts):
    db = accounts
    with db.transaction() as tx:
        for i in range(300):
            tx.put("accounts", (i,), name=str(i))
    wanted = functools.reduce(operator.or_, [kivi.col("id") == i for i in range(0, 300, 2)])
    with db.snapshot() as snap:
        assert [row["id"] for row in snap.scan("accounts", where=wanted)] == list(range(0, 300, 2))


def test_stages_are_invisible_until_a_batch_token_commits_them_once(invocations):
    db = invocations
    scope = f"spark/app-{time.time_ns()}"
    ids = [db.stage("invocations", [event(us=5)], owner="t") for _ in range(2)]
    with db.snapshot() as snap:
        assert list(snap.scan("invocations")) == []
    with db.transaction(batch=(scope, 0)) as tx:
        tx.append_stages("invocations", ids)
    again = db.stage("invocations", [event(us=500)], owner="t")
    with db.transaction(batch=(scope, 0)) as repeat:
        repeat.append_stages("invocations", [again])
    assert repeat.commit_ts == tx.commit_ts
    with pytest.raises(errors.OutOfSequence), db.transaction(batch=(scope, 2)) as gap:
        gap.append("invocations", [event()])
    with db.snapshot() as snap:
        assert snap.get("endpoint_5m", (251, SLOT))["sum_resp_time"] == 10


def test_tokens_tell_the_outcome_and_commit_once(invocations):
    db = invocations
    token = f"mine-{time.time_ns()}"
    first = db.append("invocations", [event(us=5)], token=token)
    assert db.append("invocations", [event(us=5)], token=token) == first
    with pytest.raises(kivi.InvalidArgument):
        db.append("invocations", [event(us=6)], token=token)
    assert db.outcome(token) == first
    never = f"never-{time.time_ns()}"
    assert db.outcome(never) is kivi.ABORTED
    with pytest.raises(errors.Retryable):  # it did nothing, everywhere; under another token it may run again
        db.append("invocations", [event(us=6)], token=never)
    with db.snapshot() as snap:
        assert snap.get("endpoint_5m", (251, SLOT))["sum_resp_time"] == 5


# -- schema and operation --------------------------------------------------------------------------------------


def test_tables_describe_and_drop(invocations):
    db = invocations
    assert db.tables() == ["endpoint_5m", "invocations"]
    described = db.describe("endpoint_5m")
    assert described["kind"] == "aggregate"
    assert described["source"] == "invocations"
    with pytest.raises(kivi.InvalidArgument):
        db.drop("invocations")
    db.drop("endpoint_5m")
    assert db.tables() == ["invocations"]
    with pytest.raises(kivi.NotFound):
        db.describe("endpoint_5m")
    with pytest.raises(kivi.NotFound), db.snapshot() as snap:
        snap.get("endpoint_5m", (251, SLOT))
    with pytest.raises(kivi.AlreadyExists):
        db.create_table("invocations", key={"id": "int64"}, columns={})


def test_watermark_stats_consolidate_and_checkpoint(accounts, tmp_path):
    with accounts.transaction() as tx:
        tx.delta("accounts", (1,), balance=5)
    assert accounts.watermark() >= tx.commit_ts
    accounts.consolidate()
    stats = accounts.stats()
    assert stats["consolidated_upto"] >= tx.commit_ts
    assert stats["pending_operations"] == 0
    if stats.get("log_segments"):  # in memory there is nothing to copy
        accounts.checkpoint(str(tmp_path / "copy"))
        with kivi.open(tmp_path / "copy") as copy, copy.snapshot() as snap:
            row = snap.get("accounts", (1,))
            assert row is not None
            assert row["balance"] == 5


# -- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda tx: tx.put("nope", (1,), name="x"), kivi.NotFound),
        (lambda tx: tx.put("accounts", (1,), nope="x"), kivi.SchemaError),
        (lambda tx: tx.put("accounts", (1,), name=5), kivi.SchemaError),
        (lambda tx: tx.put("accounts", ("one",), name="x"), kivi.SchemaError),
        (lambda tx: tx.put("accounts", (1, 2), name="x"), kivi.SchemaError),
        (lambda tx: tx.put("accounts", (None,), name="x"), kivi.InvalidArgument),
        (lambda tx: tx.delta("accounts", (1,), name="x"), kivi.SchemaError),
        (lambda tx: tx.delta("accounts", (1,), balance=1.5), kivi.SchemaError),
        (lambda tx: tx.delta("accounts", (1,), balance=2**63), kivi.InvalidArgument),
        (lambda tx: tx.delta("accounts", (1,), low=float("nan")), kivi.InvalidArgument),
        (lambda tx: tx.delta("accounts", (1,), low=float("inf")), kivi.InvalidArgument),
        (lambda tx: tx.delta("endpoint_5m", (251, SLOT), invocations=1), kivi.InvalidArgument),
        (lambda tx: tx.put("invocations", (1,), resp_time_us=1), kivi.KiviError),
        (lambda tx: tx.append("accounts", [{"id": 1}]), kivi.InvalidArgument),
        (lambda tx: tx.append("invocations", [event(nope=1)]), kivi.SchemaError),
        (lambda tx: tx.append("invocations", [event(us="slow")]), kivi.SchemaError),
        (lambda tx: tx.append("invocations", [event(us=2**63)]), kivi.InvalidArgument),
        (lambda tx: tx.append("invocations", [event(ts=None)]), kivi.InvalidArgument),
        (lambda tx: tx.append("invocations", [event(ts=AT.replace(tzinfo=None))]), kivi.InvalidArgument),
        (lambda tx: tx.append("invocations", 5), kivi.InvalidArgument),
        (lambda tx: list(tx.scan("accounts", where=kivi.col("nope") == 1)), kivi.SchemaError),
        (lambda tx: list(tx.scan("accounts", where=kivi.col("balance") == "x")), kivi.SchemaError),
        (lambda tx: list(tx.scan("accounts", columns=["nope"])), kivi.SchemaError),
        (lambda tx: list(tx.scan("accounts", columns=[])), kivi.InvalidArgument),
        (lambda tx: list(tx.scan("accounts", limit=-1)), kivi.InvalidArgument),
        (lambda tx: tx.get("accounts", (1,), columns=[]), kivi.InvalidArgument),
        (lambda tx: tx.guard("accounts", (1,), "nope"), kivi.SchemaError),
    ],
)
def test_bad_input_is_a_typed_error_at_the_call_and_changes_nothing(accounts, invocations, call, error):
    with pytest.raises(error) as caught, accounts.transaction() as tx:
        tx.put("accounts", (5,), name="not to be seen")
        call(tx)
    assert str(caught.value)
    with accounts.snapshot() as snap:
        assert list(snap.scan("accounts")) == []
        assert list(snap.scan("invocations")) == []
        assert list(snap.scan("endpoint_5m")) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda db: db.snapshot(as_of=-1),
        lambda db: db.snapshot(as_of=True),
        lambda db: db.snapshot(min_snapshot="now"),
        lambda db: db.transaction(token=""),
        lambda db: db.transaction(batch=("scope", -1)),
        lambda db: db.transaction(batch=["scope", 1]),
        lambda db: db.create_aggregate("a", "invocations", [5], {"n": kivi.count()}),
        lambda db: db.create_aggregate("a", "invocations", "customer", {"n": "count"}),
    ],
)
def test_arguments_are_refused_where_they_are_written(invocations, call):
    """Before anything is begun: not when the snapshot is entered, or the transaction commits."""
    with pytest.raises(kivi.InvalidArgument):
        call(invocations)
    assert invocations.tables() == ["endpoint_5m", "invocations"]


def test_one_group_key_may_stand_alone_and_iterators_are_read_once(invocations):
    db = invocations
    db.create_aggregate("by_customer", "invocations", "customer", {"n": kivi.count()})
    db.append("invocations", [event(), event(customer="b")])
    with db.snapshot() as snap:
        columns = (name for name in ("n", "customer"))
        assert snap.get_many("by_customer", (key for key in [("b",), ("c",)]), columns) == [
            {"n": 1, "customer": "b"},
            None,
        ]
        columns = (name for name in ("n",))
        assert list(snap.scan("by_customer", columns=columns)) == [{"n": 1}, {"n": 1}]


SURFACE = {
    "kivi": "open connect aio spark polars testing client transactional sum count max min avg var stddev quantiles "
    "distinct first last argmax argmin largest smallest top combine col case coalesce within_km ref "
    "previous_slot lookup time_slot register_measure "
    "ABORTED KiviError Conflict CommitUnknown SnapshotTooOld RowExists NotFound SchemaError InvalidArgument OutOfRange "
    "ResourceExhausted Unauthenticated PermissionDenied Unavailable DataLoss StoreInUse NotAStore FormatTooNew",
    "kivi.aio": "connect",
    "kivi.testing": "check_measure",
    "kivi.spark": "session",
    "Database": "create_table create_event_table create_aggregate create_aggregates create_view create_hierarchy "
    "alter_table tables "
    "alter_aggregate describe drop transaction run snapshot append appender outcome subscribe write watermark "
    "consolidate stats checkpoint close create_rule rules drop_rule",
    "Snapshot": "get get_many scan to_arrow to_pandas to_polars changes rollup query windows sql ts",
    "Transaction": "put delta insert delete get scan guard append retract write start_ts commit_ts",
}
"""What programs outside are written against; what is yet to come is not here."""


@pytest.mark.parametrize("owner", SURFACE)
def test_every_name_of_the_surface_is_there(owner):
    owners = (
        [importlib.import_module(owner)]
        if "kivi" in owner
        else [
            getattr(importlib.import_module(f"kivi.{room}"), owner)
            for room in ("api.interface", "embedded.database", "client.database", "aio.database")
            if hasattr(importlib.import_module(f"kivi.{room}"), owner)
        ]
    )
    assert owners
    for one in owners:
        assert [name for name in SURFACE[owner].split() if not hasattr(one, name)] == []


def test_a_null_group_key_is_refused_with_the_whole_append(invocations):
    with pytest.raises(kivi.InvalidArgument):
        invocations.append("invocations", [event(), event(endpoint=None)])
    with invocations.snapshot() as snap:
        assert list(snap.scan("invocations")) == []


def test_an_int64_overflow_is_out_of_range_on_read_and_recovers(accounts):
    db = accounts
    for _ in range(2):
        with db.transaction() as tx:
            tx.delta("accounts", (1,), balance=2**63 - 1)
    for _ in range(2):
        with db.snapshot() as snap:
            with pytest.raises(kivi.OutOfRange):
                snap.get("accounts", (1,))
            with pytest.raises(kivi.OutOfRange):
                list(snap.scan("accounts"))
            assert snap.get("accounts", (1,), columns=["id", "peak"]) == {"id": 1, "peak": None}
        db.consolidate()
    with db.transaction() as tx:
        tx.delta("accounts", (1,), balance=-(2**63 - 1))
    with db.snapshot() as snap:
        assert snap.get("accounts", (1,))["balance"] == 2**63 - 1


def test_an_oversized_batch_is_refused_and_changes_nothing(invocations):
    wide = pa.table({"ts": pa.array([AT] * 5, pa.timestamp("us", tz="UTC")), "customer": ["x" * 20_000_000] * 5})
    with pytest.raises(kivi.KiviError) as caught:
        invocations.append("invocations", wide)
    assert isinstance(caught.value, (kivi.ResourceExhausted, kivi.InvalidArgument))
    with invocations.snapshot() as snap:
        assert list(snap.scan("invocations")) == []


def test_a_snapshot_that_was_closed_or_is_past_what_is_kept(accounts):
    db = accounts
    snap = db.snapshot()
    with snap:
        before = snap.ts
    with pytest.raises(kivi.KiviError):
        snap.get("accounts", (1,))
    for i in range(3):
        with db.transaction() as tx:
            tx.delta("accounts", (1,), balance=i)
        db.consolidate()
    with pytest.raises(kivi.SnapshotTooOld), db.snapshot(as_of=before) as old:
        old.get("accounts", (1,))
    with pytest.raises(kivi.KiviError), db.snapshot(as_of=10**15) as future:
        future.get("accounts", (1,))


def test_the_decorator_joins_a_transaction_or_begins_one(db):
    if not hasattr(db, "_target"):
        db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})

        @kivi.transactional
        def add(tx, n):
            tx.delta("t", (1,), n=n)
            return n

        assert add(db, 2) == 2
        with db.transaction() as tx:
            add(tx, 3)
        with db.snapshot() as snap:
            assert snap.get("t", (1,))["n"] == 5


@pytest.mark.parametrize(
    "call",
    [
        lambda db: db.describe(5),
        lambda db: db.drop(5),
        lambda db: db.outcome(None),
        lambda db: db.outcome(""),
        lambda db: db.append("invocations", [event()], token=5),
        lambda db: db.append("invocations", [event()], batch=["scope", 1]),
        lambda db: db.snapshot(ttl_s="5"),
        lambda db: db.snapshot(ttl_s=float("nan")),
        lambda db: db.snapshot(ttl_s=0),
        lambda db: db.checkpoint(None),
        lambda db: db.checkpoint(""),
        lambda db: db.backup(""),
        lambda db: db.backup("backups", keep=0),
        lambda db: db.create_table("t", key={"id": "int64"}, columns=None),
        lambda db: db.discard_stages("a stage"),
        lambda db: db.discard_stages(["a stage"]),
        lambda db: db.appender("invocations", max_events="x"),
        lambda db: db.appender("invocations", linger_ms=None),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused_by_name(invocations, call):
    """Never as Python's own error, and never taken for something else."""
    before = invocations.tables()
    with pytest.raises(kivi.InvalidArgument):
        call(invocations)
    assert invocations.tables() == before


def test_a_database_that_was_closed_says_so_at_once(accounts):
    db = accounts
    db.close()
    db.close()

    def write() -> None:
        with db.transaction() as tx:
            tx.put("accounts", (1,), name="late")

    began = time.monotonic()
    for use in (db.tables, db.watermark, db.stats, lambda: db.describe("accounts"), write):
        with pytest.raises(kivi.Unavailable, match="closed"):
            use()
    assert time.monotonic() - began < 20  # a client waits for 30 s


# -- overwriting ---------------------------------------------------------------------------------------------


def test_an_overwrite_replaces_everything_in_one_step(invocations):
    db = invocations
    db.append("invocations", [event(us=1), event(endpoint=7, us=2)])
    with db.snapshot() as before, db.transaction() as tx:
        tx.overwrite("invocations")
        assert list(tx.scan("invocations")) == [] == list(tx.scan("endpoint_5m"))
        tx.append("invocations", [event(us=10), event(us=30)])
        tx.append_stages("invocations", [db.stage("invocations", [event(us=50)])])
        assert tx.get("endpoint_5m", (251, SLOT))["sum_resp_time"] == 90
        tx.commit()
        assert sorted(row["resp_time_us"] for row in before.scan("invocations")) == [1, 2]
        assert before.get("endpoint_5m", (7, SLOT))["invocations"] == 1
        with db.snapshot() as after:
            assert after.ts >= tx.commit_ts
            assert [row["resp_time_us"] for row in after.scan("invocations")] == [10, 30, 50]
            assert after.to_arrow("endpoint_5m").to_pylist() == [
                {
                    "endpoint_id": 251, "slot": SLOT, "sum_resp_time": 90, "invocations": 3, "slowest": 50,
                    "avg_resp_time": 30.0,
                }
            ]  # fmt: skip
    db.append("invocations", [event(us=7)])
    assert db.describe("invocations")["statistics"]["rows"] == 4


def test_rows_are_overwritten_and_a_writer_of_the_old_ones_conflicts(accounts):
    with accounts.transaction() as tx:
        tx.put("accounts", (1,), name="ada")
        tx.delta("accounts", (1,), balance=5)
    late = accounts.transaction()
    with late:
        late.get("accounts", (1,))
        with accounts.transaction() as tx:
            tx.delta("accounts", (1,), balance=1)
            tx.overwrite("accounts")
            tx.delta("accounts", (2,), balance=3)
        late.delta("accounts", (1,), balance=100)
        with pytest.raises(errors.Conflict):
            late.commit()
    with accounts.snapshot() as snap:
        assert list(snap.scan("accounts")) == [{"id": 2, "name": None, "balance": 3, "peak": None, "low": None}]

    def add(tx):
        tx.delta("accounts", (2,), balance=1)

    accounts.run(add)
    with accounts.snapshot() as snap:
        assert snap.get("accounts", (2,))["balance"] == 4


def test_what_cannot_be_overwritten(invocations):
    db = invocations
    with pytest.raises(errors.InvalidArgument, match="overwrite 'invocations'"), db.transaction() as tx:
        tx.overwrite("endpoint_5m")
    with pytest.raises(errors.NotFound), db.transaction() as tx:
        tx.overwrite("nowhere")


# -- summaries -----------------------------------------------------------------------------------------------


def test_a_summary_is_one_row_of_measures(invocations):
    db = invocations
    db.append("invocations", [event(us=us, ts=AT + dt.timedelta(minutes=us)) for us in range(1, 101)])
    db.append("invocations", [event(endpoint=7, us=None)])
    db.consolidate()
    db.append("invocations", [event(us=1000)])
    measures = {
        "n": kivi.count(), "timed": kivi.count("resp_time_us"), "total sum": kivi.sum("resp_time_us"),
        "first": kivi.min("ts"), "slowest": kivi.max("resp_time_us"),
    }  # fmt: skip
    with db.snapshot() as snap:
        assert snap.summary("invocations", measures) == {
            "n": 102, "timed": 101, "total sum": 6050, "first": AT, "slowest": 1000
        }  # fmt: skip
        later = AT + dt.timedelta(minutes=51)
        found = snap.summary("invocations", measures, start=later, end=(later + dt.timedelta(minutes=10),))
        assert found == {"n": 10, "timed": 10, "total sum": sum(range(51, 61)), "first": later, "slowest": 60}
        assert snap.summary("invocations", {"n": kivi.count()}, where=kivi.col("endpoint_id") == 7) == {"n": 1}
        with pytest.raises(errors.SchemaError):
            snap.summary("invocations", {"x": kivi.sum("customer")})
        with pytest.raises(errors.InvalidArgument):
            snap.summary("endpoint_5m", {"n": kivi.count()})
        with pytest.raises(errors.NotFound):
            snap.summary("nowhere", {"n": kivi.count()})
    with db.transaction() as tx:
        tx.append("invocations", [event(us=5000)])
        assert tx.summary("invocations", measures)["slowest"] == 5000


@pytest.fixture
def forgetful(db):
    """A table whose floor is an hour before ``AT``; its aggregate remembers an event from before the floor."""
    db.create_event_table("kept", event_time="ts", retention="1h", columns={"ts": "timestamp", "x": "int64"})
    db.create_aggregate("by_x", source="kept", group_by=["x"], measures={"n": kivi.count()})
    db.append("kept", [{"ts": AT - 3 * HOUR, "x": -1}, {"ts": AT, "x": -1}])
    db.consolidate()
    wait_until(
        lambda: "complete_since_us" in db.describe("kept")["statistics"], reason="the floor does not move", pause_s=0.05
    )
    return db


def mixed(late, good):
    """So many late events, with numbers below zero, each between two that are not."""
    some = [{"ts": AT - 2 * HOUR, "x": -2 - i} for i in range(late)]
    return sorted(some + [{"ts": AT, "x": i} for i in range(good)], key=lambda event: abs(event["x"]))


def check_late(db, good, dropped):
    """The table has these many events of ``mixed``, its aggregate their sums, and it has counted the others."""
    with db.snapshot() as snap:
        assert sorted(row["x"] for row in snap.scan("kept") if row["x"] != -1) == good
        assert {row["x"]: row["n"] for row in snap.scan("by_x")} == {-1: 2} | Counter(good)
    assert db.describe("kept")["statistics"].get("late_dropped", 0) == dropped


@pytest.mark.parametrize("large", [False, True])
def test_late_events_fail_an_append_or_are_dropped_and_counted(forgetful, large, monkeypatch):
    db, good = forgetful, 8_000 if large else 8
    records = mixed(3, good)
    for refused in ({}, {"late": "fail"}):
        with pytest.raises(errors.InvalidArgument, match="3 events lie before the retention floor of 'kept'") as raised:
            db.append("kept", records, **refused)
        assert raised.value.details["late"] == 3
    check_late(db, [], 0)
    token = f"token-{uuid.uuid4()}"
    at = db.append("kept", records, token, late="drop")
    check_late(db, [*range(good)], 3)
    assert at == db.outcome(token) == db.append("kept", records, token, late="drop")
    counted = db.append("kept", mixed(2, 0), batch=(token, 0), late="drop")  # of the commit that counted them
    assert db.watermark() >= counted > at
    assert db.append("kept", mixed(2, 5), batch=(token, 0), late="drop") == counted
    check_late(db, [*range(good)], 5)
    with monkeypatch.context() as patch:
        patch.setattr("kivi.client.messages._APPEND_BYTES", 2_000)  # in several messages
        db.append("kept", pa.Table.from_pylist(records), late="drop")
    check_late(db, sorted([*range(good)] * 2), 8)


def test_a_transaction_says_of_each_append_what_becomes_of_late_events(forgetful):
    db = forgetful
    stage = db.stage("kept", mixed(1, 3))
    with db.transaction() as tx:
        tx.append("kept", mixed(2, 2), late="drop")
        tx.append_stages("kept", [stage], late="drop")
        tx.append("kept", [{"ts": AT, "x": 9}])
        assert sorted(row["x"] for row in tx.scan("kept")) == [-1, 0, 0, 1, 1, 2, 9]
        assert tx.get("by_x", (-2,)) is None and tx.get("by_x", (1,))["n"] == 2
    check_late(db, [0, 0, 1, 1, 2, 9], 3)
    with pytest.raises(errors.InvalidArgument, match="1 events lie before"), db.transaction() as tx:
        tx.append("kept", mixed(2, 2), late="drop")
        tx.append("kept", mixed(1, 2), late="fail")
    check_late(db, [0, 0, 1, 1, 2, 9], 3)


@pytest.mark.parametrize("late", ["fail", "drop"])
def test_an_appender_loses_no_event_to_one_that_is_late(forgetful, late):
    """With "fail" a late event fails alone; with "drop" its future has the timestamp of the commit that counted it."""
    db, records = forgetful, mixed(3, 200)
    if hasattr(db, "_target"):

        async def appended():
            async with db._target.appender("kept", 60_000, 1_000, late=late) as app:
                futures = [app.append(**record) for record in records]
            return await asyncio.gather(*futures, return_exceptions=True)

        outcomes = db._loop.run_until_complete(appended())
    else:
        with db.appender("kept", 60_000, 1_000, late=late) as app:
            futures = [app.append(**record) for record in records]
        outcomes = [future.exception() or future.result() for future in futures]
    check_late(db, [*range(200)], 3 if late == "drop" else 0)
    failed = [record["x"] for record, said in zip(records, outcomes, strict=True) if not isinstance(said, int)]
    if late == "drop":
        assert failed == [] and len(set(outcomes)) == 1
    else:
        assert failed == [-2, -3, -4]
        assert all(said.details["late"] == 1 for said in outcomes if not isinstance(said, int))


def test_what_becomes_of_late_events_is_said_in_two_words(invocations):
    db = invocations
    stage = db.stage("invocations", [event(us=5)])
    for late in ("ignore", None, True, 5):
        for append in (
            lambda late=late: db.append("invocations", [event()], late=late),
            lambda late=late: db.appender("invocations", late=late),
            lambda late=late: db.run(lambda tx: tx.append("invocations", [event()], late=late)),
            lambda late=late: db.run(lambda tx: tx.append_stages("invocations", [stage], late=late)),
        ):
            with pytest.raises(errors.InvalidArgument, match='late is "fail" or "drop", not '):
                append()
    with db.transaction() as tx:
        tx.append_stages("invocations", [stage], late="drop")
    assert "late_dropped" not in db.describe("invocations")["statistics"]
    with db.snapshot() as snap:
        assert len(list(snap.scan("invocations"))) == 1
