"""What ``kivi verify`` says of views."""

from __future__ import annotations

from pathlib import Path

import pytest

import kivi
from kivi.cli.offline import examine
from kivi.delta.ops import Barrier, RowOp
from kivi.encoding.keys import encode_key
from kivi.errors import DataLoss


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    with kivi.open(tmp_path / "data") as db:
        db.create_table("t", key={"id": "int64"}, columns={"name": "string", "n": kivi.sum("int64")})
        with db.transaction() as tx:
            for i in range(50):
                tx.put("t", (i,), name=None if i == 7 else f"n{i % 3}")
        db.create_view("by_name", source="t", key=["name", "id"])
    return tmp_path / "data"


def test_verify_compares_views_with_their_sources(path: Path) -> None:
    report = examine(str(path))
    assert report["by_name"] == "49 rows, the same as in t"
    assert report["result"] == "good"


@pytest.mark.parametrize(
    ("name", "op", "what"),
    [
        ("n1", RowOp(Barrier.DELETE, {}, {}), "which its source gives, is not there"),
        ("n1", RowOp(Barrier.PATCH, {}, {0: 5}), "which its source has otherwise"),
        ("n2", RowOp(Barrier.RESTART, {}, {}), "of 1 which its source does not give"),
    ],
)
def test_verify_names_a_row_of_a_view_that_is_wrong(path: Path, name: str, op: RowOp, what: str) -> None:
    with kivi.open(path) as db:
        view = db.store.table("by_name")
        txn = db.store.transaction()
        txn.rows[view.id, encode_key([column.type for column in view.key], (name, 1))] = op
        txn.schemas[view.id] = view
        db.store.commit_wait(txn)
    with pytest.raises(DataLoss, match=f"view 'by_name' has the row .*{what}"):
        examine(str(path))
