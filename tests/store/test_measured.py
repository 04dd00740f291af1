"""What a measure observes of events that ``where=`` leaves out, and what an aggregate source refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kivi
from kivi.cli.recount import compare
from kivi.encoding.base_rows import RowLayout, Version
from kivi.encoding.keys import encode_key
from kivi.encoding.projection import Projection
from kivi.model.states import State
from kivi.model.types import ColumnType
from kivi.states.registry import kind_of

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
    with pytest.raises(kivi.OutOfRange, match=r"\(i \* j\) leaves the range .* measure 's' of 'sums'"):
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


def test_floats_whose_squares_are_infinite_are_accepted(tmp_path: Path) -> None:
    with kivi.open(tmp_path / "data", background=False) as db:
        db.create_event_table("loads", event_time="ts", columns={"g": "int64", "ts": "timestamp", "x": "float64"})
        measures = {"n": kivi.count(), "mean": kivi.avg("x"), "v": kivi.var("x"), "s": kivi.stddev("x")}
        db.create_aggregate("spread", source="loads", group_by=["g"], measures=measures)
        for x in (1e200, -1e200, 3.0):
            db.append("loads", [{"g": 1, "ts": T0, "x": x}, {"g": 2, "ts": T0, "x": x / 1e200}])
        for _ in range(2):
            with db.snapshot() as snap:
                known = [(row["g"], row["n"], row["mean"]) for row in snap.scan("spread", columns=["g", "n", "mean"])]
                assert known == [(1, 3, 1.0), (2, 3, 1e-200)]
                assert (snap.get("spread", (2,)) or {})["s"] == pytest.approx(1.0)
                for column in ("v", "s"):
                    with pytest.raises(kivi.OutOfRange, match=f"{column} has left the finite numbers"):
                        list(snap.scan("spread", columns=[column]))
                    with pytest.raises(kivi.OutOfRange, match=f"{column} has left the finite numbers"):
                        snap.to_arrow("spread", columns=[column])
            db.consolidate()


@pytest.mark.parametrize(
    ("measure", "columns", "damaged"),
    [
        (kivi.avg("i"), ["m"], b"\x02\x04"),
        (kivi.distinct("i"), ["m"], b"\x85"),
        (kivi.argmax("g", by="i"), ["m"], b"\x02\x02\x02"),
        (kivi.last("g"), ["m"], b"\x04\0\x02\0\0\xff"),
        (kivi.quantiles("i"), ["p50"], b"\x02"),
    ],
    ids=str,
)
def test_a_damaged_state_is_named(db: Any, measure: Any, columns: list[str], damaged: bytes) -> None:
    text = {"p50": "quantile(m, 0.5)"} if columns == ["p50"] else None
    db.create_aggregate("a", source="calls", group_by=["g"], measures={"m": measure}, derived=text)
    schema = db.store.table("a")
    key, layout = encode_key([schema.key[0].type], ("shop",)), RowLayout.of(schema)
    whole, row = Version(3, True, (b"",)), Version(3, True, (damaged,))
    projection = Projection.of(schema, columns)
    named = r"table 'a', row \('shop',\), column 'm': its state is damaged"
    with pytest.raises(kivi.DataLoss, match=named):
        projection.rows([(key[:-1], whole), (key, row)])
    keys, rows = pa.array([key[:-1], key], pa.large_binary()), layout.rows_of([layout.encode(r) for r in (whole, row)])
    with pytest.raises(kivi.DataLoss, match=named):
        list(projection.batches([(keys, rows)], None))


def test_states_that_lack_what_the_next_has_are_damaged_both() -> None:
    for number, kind, item in ((6, "avg", 4), (4, "quantiles", 2)):
        state = State(number, kind, ColumnType("int64"), None, 6)
        with pytest.raises(kivi.DataLoss, match="not made of items"):
            kind_of(state).decode([b"\x02" * (item - 1), b"\x02" * (item + 1)])


def test_what_subscriptions_to_rows_do_not_take(db: Any) -> None:
    db.create_aggregate("sums", source="calls", group_by=["g"], measures={"s": kivi.sum("i")})
    with pytest.raises(kivi.InvalidArgument, match="events as they come"):
        db.subscribe("sums", retractions="ignore")
    with pytest.raises(TypeError, match=r"^subscribe\(\) got an unexpected keyword argument 'every'"):
        db.subscribe("sums", every=1)


def test_positions_in_a_commit_stay_when_events_of_it_are_retracted(db: Any) -> None:
    """Built from what remains or computed again: the states are the same, byte for byte."""
    db.create_aggregate("live", source="calls", group_by=["g"], measures={"last": kivi.last("i"), "n": kivi.count()})
    db.append("calls", [call(i, 0) for i in range(6)])
    with db.transaction() as tx:
        assert tx.retract("calls", where=col("i").isin([0, 3])) == 2
    for step in (lambda: None, db.consolidate):
        step()
        assert compare(db.store, db.store.table("live"), "") == "equal to a recount of the events"
