"""Expressions in ``where``, by every way to the store: what they select, and that they fail typed."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest

import kivi

col = kivi.col
T0 = dt.datetime(2026, 7, 1, tzinfo=dt.UTC)
ROWS: list[dict[str, Any]] = [
    {"id": i, "a": a, "b": b, "price": price, "ok": ok, "ts": T0 + dt.timedelta(seconds=i)}
    | {"route": route, "lat": lat, "lon": lon}
    for i, (a, b, price, ok, route, lat, lon) in enumerate(
        [
            (3, 2, Decimal("1.50"), True, "/v1/a", 48.85, 2.35),
            (2, 3, Decimal("0.10"), False, "/v2/a", 48.80, 2.13),
            (None, 1, Decimal("2.00"), True, None, None, 2.35),
            (4, 0, None, None, "/v1/b", 52.52, 13.40),
            (2**62, 4, Decimal("9.99"), False, "/x", 48.86, 2.36),
        ]
    )
]
SELECTED = [
    (col("a") > col("b"), [0, 3, 4]),
    (col("a") - col("b") == 1, [0]),
    ((col("a") / col("b")).is_null(), [2, 3]),
    (col("price") * col("b") >= Decimal("3.0"), [0, 4]),
    (col("price") / 2 > 0.5, [0, 2, 4]),
    (col("b") < col("price"), [2, 4]),
    (kivi.coalesce(col("a"), 7) == 7, [2]),
    (kivi.case((col("ok"), "yes"), otherwise="no") == "yes", [0, 2]),
    (col("ok"), [0, 2]),
    (~col("ok"), [1, 4]),
    (col("ok") & (col("a") > 0), [0]),
    (col("ts") - T0 >= dt.timedelta(seconds=3), [3, 4]),
    (col("ts") + 1_000_000 == T0 + dt.timedelta(seconds=2), [1]),
    ((col("a") + 1).isin([3, 4]), [0, 1]),
    (col("route").startswith("/v1/"), [0, 3]),
    (~col("route").contains("v1"), [1, 4]),
    (col("route").matches("^/v[12]/a$") | col("route").is_null(), [0, 1, 2]),
    (kivi.within_km("lat", "lon", 48.8566, 2.3522, 10), [0, 4]),
    (~kivi.within_km("lat", "lon", 48.8566, 2.3522, 100), [3]),
    (col("ts").second() + 24 * col("ts").hour(tz="Asia/Kathmandu") == 24 * 5 + 3, [3]),
    (col("ts").weekday() == 2, [0, 1, 2, 3, 4]),
    ((col("a") * 4 > 0) & (col("id") < 4), [0, 1, 3]),  # where the product is out of range, the other decides
]


@pytest.fixture
def tables(db: Any) -> Any:
    columns = {"a": "int64", "b": "int64", "price": "decimal(9,2)", "ok": "bool", "ts": "timestamp"}
    columns |= {"route": "string", "lat": "float64", "lon": "float64"}
    db.create_table("rows", key={"id": "int64"}, columns=columns)
    db.create_event_table("events", event_time="ts", columns={"id": "int64", **columns})
    with db.transaction() as tx:
        for row in ROWS:
            tx.put("rows", (row["id"],), **{name: value for name, value in row.items() if name != "id"})
        tx.append("events", ROWS)
    return db


def test_scans_of_rows_and_events_select_the_same(tables: Any) -> None:
    for consolidated in (False, True):  # pending rows are read one by one, base rows in columns
        with tables.snapshot() as snap:
            for where, ids in SELECTED:
                for table in ("rows", "events"):
                    assert [row["id"] for row in snap.scan(table, where=where)] == ids, (str(where), consolidated)
                    assert snap.to_arrow(table, where=where, columns=["id"])["id"].to_pylist() == ids
        tables.consolidate()


def test_a_row_out_of_range_fails_the_scan_that_asks_for_it(tables: Any) -> None:
    where = col("a") * 4 > 0
    for table in ("rows", "events"):
        with pytest.raises(kivi.OutOfRange, match=r"\(a \* 4\) leaves the range of int64"):
            tables.snapshot().__enter__().to_arrow(table, where=where)
    with tables.snapshot() as snap:
        assert [row["id"] for row in snap.scan("events", where=where, end=(T0 + dt.timedelta(seconds=4),))] == [0, 1, 3]


def test_a_derived_column_out_of_range_fails_the_scan_that_selects_or_needs_it(db: Any) -> None:
    """What others count does not fit, and they are not asked for."""
    columns = {"who": "string", "ts": "timestamp", "a": "int64"}
    db.create_event_table("events", event_time="ts", columns=columns)
    db.create_aggregate(
        "sums", source="events", group_by=["who"], measures={"n": kivi.count(), "total": kivi.sum("a")},
        derived={"mean": "total / n", "twice": "n * 2"},
    )  # fmt: skip
    own = {"who": "me", "n": 3, "total": 6, "mean": 2.0, "twice": 6.0}
    db.append(
        "events", [{"who": who, "ts": T0, "a": a} for who, a in (("me", 2), ("other", 1 << 62)) for _ in range(3)]
    )
    me = col("who") == "me"
    for consolidated in (False, True):
        with db.snapshot() as snap:
            for where in (
                me,
                me & (col("mean") > 1),
                (col("mean") > 1) & me,
                me & ((col("twice") > 1) | (col("mean") > 5)),
            ):
                assert list(snap.scan("sums", where=where)) == [own], (str(where), consolidated)
                assert list(snap.scan("sums", where=where, order_by="-mean", limit=1)) == [own]
            assert list(snap.scan("sums", where=col("mean").is_null() & me)) == []
            assert list(snap.scan("sums", columns=["who"], where=(col("n") > 1) | (col("mean") > 1))) == [
                {"who": "me"}, {"who": "other"}
            ]  # fmt: skip
            assert list(snap.scan("sums", columns=["twice"])) == [{"twice": 6.0}, {"twice": 6.0}]
            for wanted in ({"where": col("mean") > 1}, {"columns": ["mean"]}, {"where": ~me}):
                with pytest.raises(kivi.OutOfRange, match="total is"):
                    list(snap.scan("sums", **wanted))
        db.consolidate()


@pytest.mark.parametrize("name", [None, "", 5, b"a"])
def test_what_is_no_name_is_no_column(name: Any) -> None:
    with pytest.raises(kivi.InvalidArgument, match="kivi.col takes the name of a column, not"):
        col(name)


@pytest.mark.parametrize("text", ["/v1/a", b"/v1/a"])
def test_a_text_is_no_list_of_letters(text: Any) -> None:
    with pytest.raises(kivi.InvalidArgument, match=r"isin takes a list of values, .* write isin\(\[b?'/v1/a'\]\)"):
        col("route").isin(text)


def test_what_does_not_fit_the_columns_is_refused(tables: Any) -> None:
    with tables.snapshot() as snap:
        for where in (col("a") == col("ok"), col("a") + col("ts") * 2 > 1, col("a") + 1, col("nothing") + 1 > 2):
            with pytest.raises(kivi.SchemaError):
                list(snap.scan("rows", where=where))
