"""What a measure observes of events that ``where=`` leaves out, and what an aggregate source refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi

T0 = 1_700_000_000_000_000
col = kivi.col


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Any]:
    with kivi.open(tmp_path / "data", background=False) as db:
        columns = {"g": "string", "ts": "timestamp", "i": "int64", "j": "int64"}
        db.create_event_table("calls", event_time="ts", columns=columns)
        yield db


def call(i: int, j: int) -> dict[str, Any]:
    return {"g": "a", "ts": T0, "i": i, "j": j}


def test_an_expression_out_of_range_of_an_event_that_is_not_observed(db: Any) -> None:
    product = col("i") * col("j")
    measures = {
        "n": kivi.count(),
        "s": kivi.sum(product, where=col("i") < 10),
        "m": kivi.max(product, where=col("i") < 5),
    }
    db.create_aggregate("sums", source="calls", group_by=["g"], measures=measures)
    db.append("calls", [call(2**62, 4), call(7, 4), call(3, 5)])
    assert db.get("sums", ("a",)) == {"g": "a", "n": 3, "s": 43, "m": 15}
    with pytest.raises(kivi.OutOfRange):
        db.append("calls", [call(9, 2**62)])  # s observes it
    db.append("calls", [call(2**62, 4)])
    assert db.get("sums", ("a",)) == {"g": "a", "n": 4, "s": 43, "m": 15}


def test_an_expression_over_an_aggregate_is_refused(db: Any) -> None:
    db.create_aggregate("sums", source="calls", group_by=["g"], measures={"s": kivi.sum("i")})
    for call_ in (kivi.sum(col("s") + 1), kivi.sum("s", where=col("s") > 1)):
        with pytest.raises(kivi.SchemaError, match="made of all its events already"):
            db.create_aggregate("more", source="sums", group_by=["g"], measures={"s": call_})


def test_a_fraction_below_what_no_float64_holds(db: Any) -> None:
    db.create_aggregate("spread", source="calls", group_by=["g"], measures={"q": kivi.quantiles("i")})
    db.append("calls", [call(1, 1)])
    with pytest.raises(kivi.InvalidArgument, match="finite"):
        db.get("spread", ("a",))["q"].fraction_below(10**400)
