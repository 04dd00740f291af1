"""Rows that are staged: durable and invisible, then written by one commit, once, as a transaction writes rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kivi
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

COLUMNS = {"name": "string", "balance": kivi.sum("int64"), "peak": kivi.max("int64")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("stages") / "data") as running:
        yield running


@pytest.fixture(params=["memory", "disk", "server"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "server":
        with request.getfixturevalue("server").connect() as client:
            yield client
            for name in sorted(client.tables(), key=lambda name: client.describe(name)["kind"] != "aggregate"):
                client.drop(name)
        return
    with kivi.open(None if request.param == "memory" else tmp_path / "data") as database:
        yield database


@pytest.fixture
def accounts(db: Any) -> Any:
    db.create_table("accounts", key={"id": "int64"}, columns=COLUMNS)
    with db.transaction() as tx:
        tx.put("accounts", (1,), name="ada")
        tx.delta("accounts", (1,), balance=100, peak=7)
    return db


def rows(db: Any) -> list[tuple[Any, ...]]:
    with db.snapshot() as snap:
        return [tuple(row.values()) for row in snap.scan("accounts")]


def write(db: Any, *records: Any) -> int:
    stages = [db.stage("accounts", part) for part in records]
    with db.transaction() as tx:
        tx.append_stages("accounts", stages)
    return int(tx.commit_ts)


def test_they_are_invisible_until_they_are_committed_and_then_in_one_step(accounts):
    stage = accounts.stage("accounts", [{"id": 2, "name": "bob", "balance": 5}, {"id": 1, "name": "eve", "balance": 1}])
    assert rows(accounts) == [(1, "ada", 100, 7)]
    with accounts.transaction() as tx:
        tx.append_stages("accounts", [stage])
        assert tx.get("accounts", (2,))["name"] == "bob"
        assert rows(accounts) == [(1, "ada", 100, 7)]
    assert rows(accounts) == [(1, "eve", 101, 7), (2, "bob", 5, None)]
    with pytest.raises(kivi.NotFound), accounts.transaction() as tx:
        tx.append_stages("accounts", [stage])
    assert rows(accounts)[0][2] == 101


def test_a_column_that_is_not_named_stays_and_a_null_delta_is_none(accounts):
    write(accounts, pa.table({"balance": pa.array([1, None]), "id": pa.array([1, 2]), "peak": pa.array([None, 3])}))
    assert rows(accounts) == [(1, "ada", 101, 7), (2, None, 0, 3)]
    write(accounts, [{"id": 1, "name": None}])
    assert rows(accounts)[0] == (1, None, 101, 7)
    write(accounts, [{"id": 9}])
    assert rows(accounts)[-1] == (9, None, 0, None)


def test_what_a_repeated_batch_brings_is_dropped(accounts):
    """R16: the first commit timestamp comes back, and the stages of the repeat are not kept until they expire."""
    commits = []
    for balance in (5, 6):
        stage = accounts.stage("accounts", [{"id": 1, "balance": balance}])
        with accounts.transaction(batch=("app", 0)) as tx:
            tx.append_stages("accounts", [stage])
        commits.append(tx.commit_ts)
    assert rows(accounts) == [(1, "ada", 105, 7)]
    assert commits[0] == commits[1]
    wait_until(lambda: accounts.stats()["stage_bytes"] == 0)  # the answer does not wait for that


def test_deltas_of_one_key_add_up_whichever_stage_they_are_in(accounts):
    write(accounts, [{"id": 1, "balance": i} for i in range(100)], [{"id": 1, "balance": 1, "peak": 99}])
    assert rows(accounts) == [(1, "ada", 100 + 4950 + 1, 99)]


def test_puts_of_staged_rows_conflict_like_any_others_and_deltas_do_not(accounts):
    stage = accounts.stage("accounts", [{"id": 1, "name": "late"}])
    tx = accounts.transaction()
    with pytest.raises(kivi.Conflict), tx:
        assert tx.get("accounts", (1,))
        with accounts.transaction() as other:
            other.put("accounts", (1,), name="sooner")
        tx.append_stages("accounts", [stage])
    with accounts.transaction() as tx:  # the stage was not used up
        tx.append_stages("accounts", [stage])
    assert rows(accounts)[0][1] == "late"


@pytest.mark.parametrize(
    ("records", "what"),
    [
        ([{"name": "no key"}], "needs its key column 'id'"),
        (pa.table({"id": pa.array([None], pa.int64())}), "needs its key column 'id'"),
        ([{"id": 1, "other": 2}], "no column 'other'"),
        ([{"id": 1, "name": "a"}, {"id": 2}], r"records\[1\] does not name the columns"),
        ([{"id": "one"}], "id"),
    ],
)
def test_what_is_no_row(accounts, records, what):
    with pytest.raises((kivi.InvalidArgument, kivi.SchemaError), match=what):
        accounts.stage("accounts", records)


def test_a_batch_that_comes_again_is_dropped(accounts):
    for _ in range(2):
        stage = accounts.stage("accounts", [{"id": 1, "balance": 1}])
        with accounts.transaction(batch=("job", 0)) as tx:
            tx.append_stages("accounts", [stage])
    assert rows(accounts) == [(1, "ada", 101, 7)]


def test_crashes_before_and_after_the_commit(tmp_path):
    with ServerProcess(tmp_path / "data") as server:
        with server.connect() as db:
            db.create_table("accounts", key={"id": "int64"}, columns=COLUMNS)
            stage = db.stage("accounts", [{"id": i, "name": f"n{i}", "balance": i} for i in range(1_000)])
        server.kill()
        server.start()
        with server.connect() as db:
            assert rows(db) == []
            with db.transaction() as tx:
                tx.append_stages("accounts", [stage])
        server.kill()
        server.start()
        with server.connect() as db:
            assert rows(db) == [(i, f"n{i}", i, None) for i in range(1_000)]
            db.consolidate()
            with pytest.raises(kivi.NotFound), db.transaction() as tx:
                tx.append_stages("accounts", [stage])
