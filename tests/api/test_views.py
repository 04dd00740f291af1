"""``create_view`` over every database: reads of a view, writes of its source, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import kivi
from kivi.errors import AlreadyExists, Conflict, InvalidArgument, NotFound, RowExists, SchemaError
from tests.waiting import wait_until


def filled(db: Any) -> None:
    db.create_table(
        "accounts",
        key={"id": "int64"},
        columns={"name": "string", "email": "string", "balance": kivi.sum("int64")},
        history="1d",
    )
    with db.transaction() as tx:
        for i, name in enumerate(("ada", "bob", "ada", None)):
            tx.put("accounts", (i,), name=name, email=f"{i}@x")
    db.create_view("by_name", source="accounts", key=["name", "id"], columns=["balance"])
    db.create_view("by_email", source="accounts", key=["email"], unique=True)


def test_views_are_read_like_tables(db: Any) -> None:
    filled(db)
    with db.transaction() as tx:
        tx.delta("accounts", (0,), balance=5)
        tx.put("accounts", (1,), name="eve")
        tx.delete("accounts", (2,))
        assert [row["id"] for row in tx.scan("by_name", prefix=("ada",))] == [0]
        assert tx.get("by_name", ("eve", 1)) == {"name": "eve", "id": 1, "balance": 0}
    before = tx.start_ts
    with db.transaction() as tx:
        tx.delta("accounts", (0,), balance=5)
    with db.snapshot() as snap:
        assert list(snap.scan("by_name")) == [
            {"name": "ada", "id": 0, "balance": 10},
            {"name": "eve", "id": 1, "balance": 0},
        ]
        assert snap.get_many("by_email", [("0@x",), ("2@x",)]) == [
            {"email": "0@x", "id": 0, "name": "ada", "balance": 10},
            None,
        ]
        assert snap.to_arrow("by_name", where=kivi.col("balance") > 5, columns=["id"]).to_pydict() == {"id": [0]}
    with db.snapshot(as_of=before) as snap:
        assert [row["id"] for row in snap.scan("by_name", prefix=("ada",))] == [0, 2]
    described = db.describe("by_name")
    assert described["kind"] == "view" and described["source"] == "accounts" and described["unique"] is False
    assert described["key"] == {"name": "string", "id": "int64"} and described["state"] == "ready"
    assert db.describe("by_email")["unique"] is True
    assert {"by_name", "by_email"} < set(db.tables())


def test_a_row_that_is_not_unique_is_refused(db: Any) -> None:
    filled(db)
    with pytest.raises(RowExists) as refused, db.transaction() as tx:
        tx.put("accounts", (7,), email="1@x")
    assert (refused.value.table, tuple(refused.value.key)) == ("by_email", ("1@x",))
    assert db.get("accounts", (7,)) is None
    with pytest.raises(RowExists):
        db.create_view("names", source="accounts", key=["name"], unique=True)
    assert "names" not in db.tables()


def test_deltas_of_a_view_do_not_conflict(db: Any) -> None:
    filled(db)
    one, two = db.transaction(), db.transaction()
    for tx in (one, two):
        assert tx.get("accounts", (0,), columns=["balance"]) is not None
        tx.delta("accounts", (0,), balance=1)
    one.commit(), two.commit()
    assert db.get("by_name", ("ada", 0))["balance"] == 2
    three, four = db.transaction(), db.transaction()
    for tx in (three, four):
        tx.get("accounts", (0,))
    three.delta("accounts", (0,), balance=1)
    four.put("accounts", (0,), name="moved")
    three.commit()
    with pytest.raises(Conflict):
        four.commit()


def test_blind_writes_of_one_row_are_all_committed(db: Any) -> None:
    filled(db)
    for i in range(20):
        with db.transaction() as tx:
            tx.put("accounts", (0,), name=f"n{i}")
            tx.delta("accounts", (1,), balance=1)
    with db.snapshot() as snap:
        assert [row["name"] for row in snap.scan("by_name") if row["id"] == 0] == ["n19"]
        assert snap.get("by_name", ("bob", 1))["balance"] == 20


def test_a_view_is_followed(db: Any) -> None:
    filled(db)
    with db.subscribe("by_name", where=kivi.col("name") == "ada", interval_ms=0) as live:
        live.next(timeout_s=60.0)
        assert {row["id"] for row in live.rows} == {0, 2}
        with db.transaction() as tx:
            tx.put("accounts", (0,), name="eve")
        wait_until(lambda: live.next(timeout_s=60.0) and {row["id"] for row in live.rows} == {2})


def test_what_is_refused(db: Any) -> None:
    filled(db)
    for call, error in (
        (lambda: db.create_view("v", source="accounts", key=["name"]), SchemaError),
        (lambda: db.create_view("v", source="accounts", key=["balance", "id"]), SchemaError),
        (lambda: db.create_view("v", source="accounts", key="name"), SchemaError),
        (lambda: db.create_view("v", source="accounts", key=["name", "id"], columns=["none"]), SchemaError),
        (lambda: db.create_view("v", source="by_name", key=["name", "id"]), SchemaError),
        (lambda: db.create_view("v", source="none", key=["name", "id"]), NotFound),
        (lambda: db.create_view("by_name", source="accounts", key=["name", "id"]), AlreadyExists),
        (lambda: db.drop("accounts"), InvalidArgument),
        (lambda: db.alter_table("by_name", {"c": "int64"}), InvalidArgument),
        (lambda: db.append("by_name", [{"name": "x"}]), InvalidArgument),
        (lambda: db.stage("by_name", [{"name": "x", "id": 1}]), InvalidArgument),
    ):
        with pytest.raises(error):
            call()
    for write in (
        lambda tx: tx.put("by_name", ("x", 1), balance=1),
        lambda tx: tx.delta("by_name", ("x", 1), balance=1),
        lambda tx: tx.insert("by_name", ("x", 1)),
        lambda tx: tx.delete("by_name", ("x", 1)),
        lambda tx: tx.overwrite("by_name"),
    ):
        with pytest.raises(InvalidArgument), db.transaction() as tx:
            write(tx)
    db.drop("by_name")
    db.drop("by_email")
    db.drop("accounts")
