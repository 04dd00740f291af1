"""Every measure, by every way to the store: its values against brute force, however and whenever they are read."""

from __future__ import annotations

import datetime as dt
import math
import random
from collections import Counter
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.model.quantiles import Quantiles
from kivi.model.values import Top

col = kivi.col
T0 = dt.datetime(2026, 7, 1, tzinfo=dt.UTC)
COLUMNS = {
    "g": "int64", "ts": "timestamp", "x": "int64", "price": "decimal(9,2)", "load": "float64",
    "status": "int64", "user": "string", "route": "string", "trace": "string",
}  # fmt: skip
MEASURES = {
    "n": kivi.count(),
    "errors": kivi.count(where=col("status") >= 500),
    "cost": kivi.sum(col("x") * col("price")),
    "latency": kivi.quantiles("x", 0.01),
    "healthy": kivi.quantiles("x", accuracy=0.05, where=col("status") < 500),
    "users": kivi.distinct("user", error=0.01),
    "mean": kivi.avg("x"),
    "mean_load": kivi.avg("load"),
    "spread": kivi.stddev("x"),
    "variance": kivi.var("price", population=True),
    "first_status": kivi.first("status"),
    "last_trace": kivi.last("trace"),
    "slowest": kivi.argmax("trace", by="x"),
    "cheapest": kivi.argmin("status", by="price"),
    "worst": kivi.largest("x", 3),
    "least": kivi.smallest("price", 2),
    "routes": kivi.top("route", 2),
}
DERIVED = {
    "p99": "quantile(latency, 0.99)",
    "calm": "fraction_below(latency, 500)",
    "error_rate": "errors / n",
}
GROUPS = 4


def events(count: int, seed: int) -> list[dict[str, Any]]:
    """Skewed, with nulls, negative values, ties of x and of times, and out of order; group 3 has nulls only."""
    chance = random.Random(seed)
    out = []
    for i in range(count):
        g = chance.randrange(GROUPS)
        absent = g == 3 or chance.random() < 0.1
        out.append(
            {
                "g": g,
                "ts": T0 + dt.timedelta(seconds=chance.randrange(100)),
                "x": None if absent else int(chance.lognormvariate(5, 1)) - 20,
                "price": None if absent else Decimal(chance.randrange(-500, 5_000)).scaleb(-2),
                "load": None if absent else chance.randrange(1_000) / 8,  # sums are exact in any order
                "status": None if g == 3 else chance.choice([200, 200, 200, 404, 500, 503]),
                "user": None if g == 3 else f"user {chance.randrange(200)}",
                "route": None if g == 3 else f"/{min(int(chance.paretovariate(1)), 30)}",
                "trace": f"{seed}-{i}",
            }
        )
    return out


# -- brute force --------------------------------------------------------------------------------------------


def rank(values: list[int], q: float) -> int:
    return sorted(values)[max(1, math.ceil(Fraction(str(q)) * len(values))) - 1]


def variance_of(values: list[Any], less: int) -> float | None:
    if len(values) <= less:
        return None
    mean = Fraction(sum(map(Fraction, values))) / len(values)
    return float(sum((Fraction(v) - mean) ** 2 for v in values) / (len(values) - less))


def mean_of(values: list[Any]) -> float | None:
    return float(sum(map(Fraction, values)) / len(values)) if values else None


def check(row: Any, group: list[dict[str, Any]], only: Iterable[str] = ()) -> None:
    """``group``: the events of the row, in commit order."""

    def seen(name: str) -> list[Any]:
        return [event[name] for event in group if event[name] is not None]

    def best(name: str, by: str, sign: int) -> Any:
        ranked = [e for e in in_order if e[name] is not None and e[by] is not None]
        return min(ranked, key=lambda e: sign * e[by])[name] if ranked else None

    in_order = sorted(group, key=lambda event: event["ts"])
    statuses = [e["status"] for e in in_order if e["status"] is not None]
    x = seen("x")
    spread = variance_of(x, 1)
    assert row["n"] == len(group)
    assert row["errors"] == sum(status >= 500 for status in statuses)
    assert row["cost"] == sum((e["x"] * e["price"] for e in group if e["x"] is not None), Decimal(0))
    assert row["mean"] == mean_of(x)
    assert row["mean_load"] == mean_of(seen("load"))
    assert row["spread"] == (None if spread is None else pytest.approx(math.sqrt(spread), rel=1e-14))
    assert row["variance"] == variance_of(seen("price"), 0)
    assert row["first_status"] == (statuses[0] if statuses else None)
    assert row["last_trace"] == in_order[-1]["trace"]
    assert row["slowest"] == best("trace", "x", -1)
    assert row["cheapest"] == best("status", "price", 1)
    assert row["worst"] == sorted(x, reverse=True)[:3]
    assert row["least"] == sorted(seen("price"))[:2]
    assert abs(row["users"] - len(set(seen("user")))) <= 3
    counted = sorted(Counter(seen("route")).items(), key=lambda item: (-item[1], item[0]))
    assert isinstance(row["routes"], Top)
    assert list(row["routes"]) == counted[:2]
    assert (row["routes"].count, row["routes"].exact) == (len(seen("route")), True)
    for name, values in (
        ("latency", x),
        ("healthy", [e["x"] for e in group if e["x"] is not None and (e["status"] or 0) < 500]),
    ):
        found = row[name]
        assert isinstance(found, Quantiles)
        assert found.count == len(values)
        for q in (0, 0.5, 0.9, 0.99, 1):
            if not values:
                assert found.quantile(q) is None
            else:
                assert found.quantile(q) == pytest.approx(rank(values, q), rel=found.accuracy * (1 + 1e-9))
    assert row["p99"] == row["latency"].quantile(0.99)
    assert row["calm"] == row["latency"].fraction_below(500)
    assert row["error_rate"] == row["errors"] / row["n"]


def check_all(rows: Iterable[Any], known: list[dict[str, Any]]) -> None:
    listed = list(rows)
    assert [row["g"] for row in listed] == list(range(GROUPS))
    for row in listed:
        check(row, [event for event in known if event["g"] == row["g"]])


# -- the tests ----------------------------------------------------------------------------------------------


def create(db: Any, name: str = "by_group") -> None:
    db.create_aggregate(name, source="events", group_by=["g"], measures=MEASURES, derived=DERIVED)


@pytest.fixture
def aggregate(db: Any) -> Any:
    db.create_event_table("events", event_time="ts", columns=COLUMNS)
    create(db)
    return db


def test_values_are_those_of_brute_force_pending_consolidated_and_backfilled(aggregate: Any) -> None:
    db, known = aggregate, []
    for seed in range(3):
        known += (batch := events(60, seed))
        db.append("events", batch)
        if seed == 1:
            db.consolidate()  # base rows below pending deltas
    with db.snapshot() as snap:
        pending = list(snap.scan("by_group"))
        check_all(pending, known)
    db.consolidate()
    create(db, "later")
    with db.snapshot() as snap:
        for table in ("by_group", "later"):
            assert list(snap.scan(table)) == pending
            assert snap.get_many(table, [(g,) for g in range(GROUPS)]) == pending
            assert snap.get(table, (1,)) == pending[1]
            for row in pending:
                assert snap.get(table, (row["g"],), columns=["p99", "latency"]) == {
                    "p99": row["p99"],
                    "latency": row["latency"],
                }
    with db.transaction() as tx:  # own events included
        tx.append("events", batch := events(20, 9))
        check_all(tx.scan("by_group"), known + batch)
        tx.rollback()


def test_arrow_has_states_as_binary_that_say_what_they_are(aggregate: Any) -> None:
    db, known = aggregate, events(80, 1)
    db.append("events", known)
    for _ in range(2):
        with db.snapshot() as snap:
            table = snap.to_arrow("by_group")
            rows = list(snap.scan("by_group"))
        types = {field.name: (str(field.type), field.metadata) for field in table.schema}
        assert types["latency"] == ("binary", {b"kivi.type": b"quantiles(6)"})
        assert types["worst"] == ("binary", {b"kivi.type": b"list(int64)"})
        assert types["routes"] == ("binary", {b"kivi.type": b"top(string, 2)"})
        for name in ("users", "mean", "p99", "slowest", "cost", "error_rate", "variance"):
            assert table[name].to_pylist() == [row[name] for row in rows]
        assert [Quantiles.from_state(6, state) for state in table["latency"].to_pylist()] == [
            r["latency"] for r in rows
        ]
        db.consolidate()


NAMED = "quantile(latency, 0.99)"


def test_predicates_and_columns_name_what_is_derived(aggregate: Any) -> None:
    db, known = aggregate, events(200, 2)
    db.append("events", known)
    for _ in range(2):
        with db.snapshot() as snap:
            rows = list(snap.scan("by_group"))
            middle = sorted(row["p99"] for row in rows if row["p99"] is not None)[1]
            selected = [row["g"] for row in rows if row["p99"] is not None and row["p99"] >= middle]
            assert 0 < len(selected) < GROUPS
            for name in ("p99", NAMED):
                found = list(snap.scan("by_group", where=col(name) >= middle, columns=["g"]))
                assert [row["g"] for row in found] == selected
            both = ["g", NAMED, "count(latency) / n"]
            told = [{"g": r["g"], NAMED: r["p99"], both[2]: r["latency"].count / r["n"]} for r in rows]
            assert list(snap.scan("by_group", columns=both)) == told
            assert snap.to_arrow("by_group", columns=both).to_pylist() == told
            assert snap.get("by_group", (0,), columns=both) == told[0]
            assert snap.get_many("by_group", [(0,), (1,)], columns=both) == told[:2]
            for wrong in ("quantile(mean, 0.5)", "quantile(latency, 2)", "exec(n)", "n +", "nothing"):
                with pytest.raises(kivi.SchemaError):
                    list(snap.scan("by_group", columns=[wrong]))
        db.consolidate()


@pytest.mark.parametrize("name", ["p99", NAMED])
def test_subscriptions_carry_filter_and_order_by_quantiles(aggregate: Any, name: str) -> None:
    db, known = aggregate, events(40, 3)
    db.append("events", known)
    wanted = {"where": col(name) > 0, "order_by": [f"-{name}"], "columns": ["g", name, "latency", "routes", "worst"]}

    def expected() -> list[dict[str, Any]]:
        with db.snapshot() as snap:
            rows = [row for row in snap.scan("by_group") if row["p99"] is not None and row["p99"] > 0]
        rows.sort(key=lambda row: -row["p99"])
        return [
            {"g": r["g"], name: r["p99"], "latency": r["latency"], "routes": r["routes"], "worst": r["worst"]}
            for r in rows
        ]

    with db.subscribe("by_group", interval_ms=0, **wanted) as live:
        update = live.next(60)
        assert [change.row for change in update.changes] == expected()
        for seed in range(4, 8):
            ts = db.append("events", events(15, seed))
            while live.ts < ts:
                assert live.next(60) is not None
            assert live.rows == expected()
        assert all(isinstance(row["latency"], Quantiles) for row in live.rows)


def test_what_was_reopened_reads_as_before(tmp_path: Path) -> None:
    known = []
    with kivi.open(tmp_path / "data") as db:
        db.create_event_table("events", event_time="ts", columns=COLUMNS)
        create(db)
        for seed in range(3):
            known += (batch := events(50, seed))
            db.append("events", batch)
        with db.snapshot() as snap:
            before = list(snap.scan("by_group"))
    for _ in range(2):  # replayed from the log, then from base rows
        with kivi.open(tmp_path / "data") as db:
            with db.snapshot() as snap:
                assert list(snap.scan("by_group")) == before
            db.consolidate()
    check_all(before, known)


def test_r20_order_and_batches_change_no_state(tmp_path: Path) -> None:
    """Bit for bit, as states in Arrow; the total order of events is by time, so each event has its own here."""
    known = [event | {"ts": T0 + dt.timedelta(microseconds=i)} for i, event in enumerate(events(120, 5))]
    tables = []
    for seed, size in ((None, 120), (1, 7), (2, 40)):
        shuffled = list(known)
        if seed is not None:
            random.Random(seed).shuffle(shuffled)
        with kivi.open() as db:
            db.create_event_table("events", event_time="ts", columns=COLUMNS)
            create(db)
            for begin in range(0, len(shuffled), size):
                db.append("events", shuffled[begin : begin + size])
            with db.snapshot() as snap:
                tables.append(snap.to_arrow("by_group"))
    assert tables[0].equals(tables[1])
    assert tables[0].equals(tables[2])
