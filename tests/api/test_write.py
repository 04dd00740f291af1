"""``write``: rows as Arrow columns, over every database, against the same statements one by one."""

from __future__ import annotations

import contextlib
import random
import secrets
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import kivi
from kivi.errors import Conflict, InvalidArgument, KiviError, OutOfRange, RowExists, SchemaError

COLUMNS = {"name": "string", "fee": "decimal(9,2)", "n": kivi.sum("int64"), "x": kivi.sum("float64")}


@pytest.fixture(name="t")
def _t(db: Any) -> Any:
    for name in ("t", "twin"):
        db.create_table(name, key={"a": "int64", "b": "string"}, columns=COLUMNS)
    db.create_view("by_name", source="t", key=["name", "b", "a"])
    return db


def test_rows_are_written_as_by_single_statements(t: Any) -> None:
    rng = random.Random(1)
    for _ in range(6):
        rows: list[dict[str, Any]] = [
            {
                "a": rng.randrange(3),
                "b": rng.choice("xy"),
                "name": rng.choice(["p", None, "q"]),
                "fee": rng.choice([None, Decimal("1.25")]),
                "n": rng.choice([None, 1, 2]),
                "x": rng.choice([None, 0.5]),
                "gone": rng.choice([True, False, False, None]),
            }
            for _ in range(12)
        ]
        names = ["a", "b", "gone", *rng.sample(["name", "fee", "n", "x"], rng.randrange(5))]
        data = pa.table({name: [row[name] for row in rows] for name in names})
        data = data.set_column(2, "gone", data["gone"].cast(pa.bool_()))
        with t.transaction() as tx:
            tx.write("t", data, deletes="gone")
            assert list(tx.scan("t")) is not None
        with t.transaction() as tx:
            for row in rows:
                key = (row["a"], row["b"])
                put = {name: row[name] for name in ("name", "fee") if name in names}
                delta = {name: row[name] for name in ("n", "x") if name in names and row[name] is not None}
                if row["gone"]:
                    tx.delete("twin", key)
                    continue
                if put or not {"n", "x"} & {*names}:
                    tx.put("twin", key, **put)
                if delta:
                    tx.delta("twin", key, **delta)
        with t.snapshot() as snap:
            written = list(snap.scan("t"))
            assert written == list(snap.scan("twin"))
            named = sorted((row["name"], row["b"], row["a"]) for row in written if row["name"] is not None)
            assert [(row["name"], row["b"], row["a"]) for row in snap.scan("by_name")] == named


def test_one_call_is_one_transaction_under_a_token(t: Any) -> None:
    rows = [{"a": i, "b": "x", "name": "p", "n": 1} for i in range(3_000)]
    token = f"rows-{secrets.token_hex(8)}"
    first = t.write("t", rows, token=token)
    assert t.write("t", rows, token=token) == first
    with t.snapshot() as snap:
        assert snap.to_arrow("t", columns=["n"])["n"].to_pylist() == [1] * 3_000
    with pytest.raises(InvalidArgument, match="another payload"):
        t.write("t", [{**row, "gone": True} for row in rows], deletes="gone", token=token)
    t.write("t", pa.table({"a": [0, 1], "b": ["x", "x"], "gone": [True, True]}), deletes="gone")
    assert t.get("t", (1, "x")) is None and t.get("t", (2, "x")) is not None


def test_strict_inserts(t: Any) -> None:
    t.write("t", [{"a": 1, "b": "x", "n": 5}], insert=True)
    assert t.get("t", (1, "x"))["n"] == 5
    for rows in ([{"a": 0, "b": "x"}, {"a": 1, "b": "x"}], [{"a": 7, "b": "x"}, {"a": 7, "b": "x"}]):
        with pytest.raises(RowExists) as refused:
            t.write("t", rows, insert=True)
        assert tuple(refused.value.key) == (rows[1]["a"], "x")
    assert t.get("t", (0, "x")) is None
    with pytest.raises(Conflict), t.transaction() as tx:
        tx.write("t", [{"a": 9, "b": "x"}], insert=True)
        t.write("t", [{"a": 9, "b": "x", "name": "first"}])
    with t.transaction() as tx:
        tx.delete("t", (1, "x"))
        tx.write("t", [{"a": 1, "b": "x", "name": "again"}, {"a": 9, "b": "x", "gone": True}][:1], insert=True)
    assert t.get("t", (1, "x"))["n"] == 0


def test_strict_inserts_come_in_their_turn(t: Any) -> None:
    t.write("t", [{"a": 1, "b": "x", "name": "old"}])
    moved = [{"a": a, "b": "x", "name": name, "gone": gone} for a, name, gone in (
        (1, None, True), (1, "new", False), (2, "first", False), (2, None, True), (2, "second", False)
    )]  # fmt: skip
    t.write("t", moved, deletes="gone", insert=True)
    with t.snapshot() as snap:
        assert [(row["a"], row["name"]) for row in snap.scan("t")] == [(1, "new"), (2, "second")]
    with pytest.raises(RowExists):
        t.write("t", moved[::-1], deletes="gone", insert=True)  # it is deleted too late


def test_records_of_no_rows(t: Any) -> None:
    empty = pa.table({"a": pa.array([], pa.int64()), "b": pa.array([], pa.string())})
    assert t.write("t", empty) > 0
    assert t.write("t", []) > 0
    assert t.write("t", [], deletes="gone", insert=True) > 0
    with t.snapshot() as snap:
        assert list(snap.scan("t")) == []


def test_rows_that_add_up_to_too_much_are_not_written_in_part(t: Any) -> None:
    rows = [{"a": a, "b": "x", "x": 1e308} for a in (1, 2, 2)]
    tx = t.transaction()
    with contextlib.suppress(KiviError), tx:
        with contextlib.suppress(OutOfRange):
            tx.write("t", rows)
        tx.commit()
    with t.snapshot() as snap:
        assert list(snap.scan("t")) == []
    with pytest.raises(OutOfRange):
        t.write("t", rows)


def test_staged_rows_may_delete(t: Any) -> None:
    t.write("t", [{"a": i, "b": "x", "name": "p"} for i in range(4)])
    rows = [{"a": 1, "b": "x", "name": None, "gone": True}, {"a": 2, "b": "x", "name": "q", "gone": False}]
    stage = t.stage("t", rows, deletes="gone")
    with t.transaction() as tx:
        tx.append_stages("t", [stage])
    with t.snapshot() as snap:
        assert [(row["a"], row["name"]) for row in snap.scan("t")] == [(0, "p"), (2, "q"), (3, "p")]
        assert [(row["name"], row["a"]) for row in snap.scan("by_name")] == [("p", 0), ("p", 3), ("q", 2)]


def test_what_is_refused(t: Any) -> None:
    t.create_event_table("e", event_time="ts", columns={"ts": "timestamp"})
    row = {"a": 1, "b": "x"}
    for table, rows, options, error in (
        ("e", [{"ts": 1}], {}, InvalidArgument),
        ("by_name", [row], {}, InvalidArgument),
        ("t", [{**row, "none": 1}], {}, SchemaError),
        ("t", [row], {"deletes": "gone"}, SchemaError),
        ("t", [{**row, "name": "p"}], {"deletes": "name"}, SchemaError),
        ("t", [{**row, "gone": "yes"}], {"deletes": "gone"}, SchemaError),
        ("t", pa.table({"a": [1], "b": ["x"], "gone": [1]}), {"deletes": "gone"}, SchemaError),
        ("t", pa.table({"a": [1], "b": ["x"]}), {"deletes": "gone"}, SchemaError),
        (
            "t",
            pa.table([[1], ["x"], [True], [True]], names=["a", "b", "gone", "gone"]),
            {"deletes": "gone"},
            SchemaError,
        ),
        ("t", [{"a": 1}], {}, InvalidArgument),
        ("t", pa.table({"a": [1], "b": ["x" * 70_000]}), {}, kivi.ResourceExhausted),
    ):
        with pytest.raises(error):
            t.write(table, rows, **options)
        with pytest.raises(error), t.transaction() as tx:
            tx.write(table, rows, **options)
    with t.snapshot() as snap:
        assert list(snap.scan("t")) == []
