"""``match`` at every door: what it gives, what it refuses, and in which words."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest

import kivi
from kivi import col, next, prev

S = 1_000_000
T0 = 1_774_000_000 * S
COLUMNS = {"host": "string", "ts": "timestamp", "us": "int64", "price": "decimal(6,2)"}


def moment(second: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(T0 // S + second, dt.UTC)


@pytest.fixture
def calls(db: Any) -> Any:
    db.create_event_table("calls", event_time="ts", columns=COLUMNS)
    times = [100, 120, 150, 90, 100, 180, 60, 60]
    db.append("calls", [{"host": "a", "ts": T0 + i * S, "us": us, "price": "1.10"} for i, us in enumerate(times)])
    db.append("calls", [{"host": None, "ts": T0 + i * S, "us": us} for i, us in enumerate([5, 7, 6])])
    return db


RISES = kivi.pattern(
    "A B+ C",
    partition_by=["host"],
    within="15m",
    define={"B": col("us") > prev("us"), "C": col("us") < prev("us", 1)},
    measures={
        "began": kivi.first("A.ts"), "rises": kivi.count("B"), "top": kivi.max("us"), "sum": kivi.sum("B.us"),
        "mean": kivi.avg("us"), "end": kivi.last("us"), "rows": kivi.count(), "paid": kivi.sum("price"),
        "priced": kivi.count("C.price"), "least": kivi.min("A.us"),
    },
)  # fmt: skip


def test_a_match_is_one_row(calls: Any) -> None:
    with calls.snapshot() as snap:
        result = snap.match("calls", RISES)
        table = result.to_arrow()
        first, second, third = list(result)
        assert first == {
            "host": "a", "began": moment(0), "rises": 2, "top": 150, "sum": 270, "mean": 115.0, "end": 90, "rows": 4,
            "paid": 4 * Decimal("1.10"), "priced": 1, "least": 100,
        }  # fmt: skip
        assert (second["host"], second["began"], second["paid"], second["priced"]) == (None, moment(0), None, 0)
        assert (third["began"], third["rises"], third["end"]) == (moment(4), 1, 60)
        assert str(table.schema.field("paid").type) == "decimal128(18, 2)"
        assert str(table.schema.field("began").type) == "timestamp[us, tz=UTC]"
        assert "read: 11 events, of which 11 were" in result.explain()
        assert [row["end"] for row in snap.match("calls", RISES, limit=1)] == [90]
        assert [row["end"] for row in snap.match("calls", RISES, end=moment(4))] == [90, 6]
        assert [row["end"] for row in snap.match("calls", RISES, start=moment(1))] == [90, 60]
        assert [row["rises"] for row in snap.match("calls", RISES, where=col("us") != 120)] == [1, 1, 1]
        none = snap.match("calls", RISES, where=col("host") == "b")
        assert list(none) == []
        assert none.to_arrow().schema == table.schema


def test_rows_beside_and_hidden_columns(calls: Any) -> None:
    """By any number, before the match and behind it; a definition without a column of the table."""
    last = kivi.pattern("X", define={"X": next("us").is_null()}, partition_by="host", measures={"us": kivi.last("us")})
    later = kivi.pattern("X", define={"X": col("us") - prev("us", 5) > 70}, measures={"us": kivi.first("X.us")})
    with calls.snapshot() as snap:
        assert [row["us"] for row in snap.match("calls", last)] == [6, 60]
        assert [row["us"] for row in snap.match("calls", later, where=col("host") == "a")] == [180]
        newest = snap.query("calls", measures={"newest": kivi.max("_commit_ts")}).to_arrow()["newest"][0].as_py()
        second = kivi.pattern("A+", define={"A": col("_commit_ts") == newest}, measures={"n": kivi.count("A")})
        assert list(snap.match("calls", second, where=col("_commit_ts") >= newest)) == [{"n": 3}]


@pytest.mark.parametrize(
    ("text", "more", "says"),
    [
        ("", {}, "character 1: a symbol, like A, is missing"),
        ("A B)", {}, "character 4: '\\)' is no part of a pattern"),
        ("(A B", {}, "character 5: a \\) is missing"),
        ("A | ", {}, "a symbol, like A, is missing"),
        ("A ^ B", {}, "character 3"),
        ("A*", {}, "matches where there is no row at all"),
        ("(A? B*)+ C", {}, "repeats without an end what may match no row"),
        ("A{3,2}", {}, "no range"),
        ("A{0}", {}, "no range"),
        ("A{2}{3}", {}, "behind another one"),
        ("A{1001}", {}, "at most 1,000 symbols"),
        ("(A{50} B){20}", {}, "at most 1,000 symbols"),
        ("A{99999999999}", {}, "at most 1,000 symbols"),
        ("(" * 60 + "A" + ")" * 60, {}, "more than 50 deep"),
        (7, {}, "a pattern is a text"),
        ("A", {"within": "0s"}, "greater than zero"),
        ("A", {"define": {"B": col("us") > 1}}, "'B' is defined, and no symbol"),
        ("A", {"define": {"A": 5}}, "is a predicate like"),
        ("A", {"measures": {}}, "no column"),
        ("A", {"measures": {"x": 5}}, "measure 'x' is kivi.first"),
        ("A", {"partition_by": ["host", "host"]}, "twice"),
        ("A B", {"skip": "to_first B C"}, "skip="),
        ("A B", {"skip": "to_first C"}, "is no symbol"),
        ("A B?", {"skip": "to_last B"}, "not each match"),
        ("A+ B", {"skip": "to_last A"}, "may be the first row"),
        ("(A | C) B", {"skip": "to_first A"}, "not each match"),
    ],
)
def test_a_bad_pattern_is_refused_as_it_is_made(text: Any, more: dict[str, Any], says: str) -> None:
    with pytest.raises((kivi.InvalidArgument, kivi.SchemaError), match=says):
        kivi.pattern(text, **{"measures": {"n": kivi.count()}, **more})


UNFIT: list[tuple[Any, Any, str]] = [
    (col("us") > col("A.us"), kivi.count(), "does not see the rows of other symbols"),
    (col("none") > 5, kivi.count(), "none"),
    (prev("none") > 5, kivi.count(), "none"),
    (col("us") > "x", kivi.count(), "us"),
    (prev("us"), kivi.count(), "not a predicate"),
    (col("host").under("a"), kivi.count(), "of reads"),
    (col("us") > 1, kivi.first("X.us"), "'X' is no symbol"),
    (col("us") > 1, kivi.first("A.none"), "none"),
    (col("us") > 1, kivi.sum("A.host"), "sum is of"),
    (col("us") > 1, kivi.quantiles("us"), "is not of matches"),
    (col("us") > 1, kivi.sum(col("us") * 2), "without an expression"),
    (col("us") > 1, kivi.count(where=col("us") > 1), "without where="),
]


def test_a_pattern_that_does_not_fit_the_table_is_refused(calls: Any) -> None:
    with calls.snapshot() as snap:
        for define, measure, says in UNFIT:
            asked = kivi.pattern("A B", define={"B": define}, measures={"m": measure})
            with pytest.raises((kivi.SchemaError, kivi.InvalidArgument), match=says):
                snap.match("calls", asked)


def test_what_is_refused(calls: Any) -> None:
    calls.create_table("rows", key={"id": "int64"}, columns={"us": "int64"})
    one = kivi.pattern("A", measures={"n": kivi.count()})
    with calls.snapshot() as snap:
        with pytest.raises(kivi.InvalidArgument, match="no event table"):
            snap.match("rows", one)
        with pytest.raises(kivi.InvalidArgument, match="made by kivi.pattern"):
            snap.match("calls", "A")
        with pytest.raises(kivi.InvalidArgument, match="number of rows"):
            snap.match("calls", one, limit=-1)
        with pytest.raises(kivi.InvalidArgument, match="prev and next are for the definitions"):
            list(snap.scan("calls", where=prev("us") > 5))
        huge = kivi.pattern("A+", measures={"n": kivi.sum("us")})
        calls.append("calls", [{"ts": T0 + i, "us": 2**62} for i in range(3)])
    with calls.snapshot() as snap, pytest.raises(kivi.OutOfRange, match="n of a match does not fit"):
        list(snap.match("calls", huge))
    for n in (-1, 1001, True, 1.5):
        with pytest.raises(kivi.InvalidArgument, match="by 0 to 1,000 rows"):
            prev("us", n)  # type: ignore[arg-type]
