"""Every measure on data that nobody tuned it for (R20): skewed, constant, negative, null-heavy, out of order, tiny.

One aggregate has every kind of measure, another one by hour besides, a third is declared when half of the events are
there. Events come one by one, in batches, from an appender and as events that are each a transaction. What is read at
several snapshots, before and after consolidation and a restart, must be what plain Python makes of the events
(``tests.measures``); and the promises of what is approximate are held to the raw values.
"""

from __future__ import annotations

import datetime as dt
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import kivi
from tests.measures import Distinct, Extremes, Moments, Quantiles, Top, Winner
from tests.oracle import Aggregate, Attempt, EventTable, Op, Oracle, Read, Table
from tests.serverproc import ServerProcess

HOUR_US = 3_600_000_000
EVENTS = 50  # of each set of data
COLUMNS = {
    "k": "string", "ts": "timestamp", "n": "int64", "f": "float64", "d": "decimal(18,2)", "s": "string", "q": "int64",
}  # fmt: skip
SMALL = (kivi.col("f") > -1e6) & (kivi.col("f") < 1e6)
MEASURES: dict[str, tuple[Any, str | Any, Any]] = {
    "events": (kivi.count(), "sum", lambda e: 1),
    "known": (kivi.count("n"), "sum", lambda e: int(e["n"] is not None)),
    "above": (kivi.count(where=kivi.col("n") > 0), "sum", lambda e: int(e["n"] is not None and e["n"] > 0)),
    "cost": (kivi.sum(kivi.col("q") * kivi.col("d")), "sum", lambda e: e["q"] * (e["d"] or Decimal("0.00"))),
    "n_spread": (kivi.quantiles("n", 0.01), Quantiles(6), lambda e: e["n"]),
    "f_spread": (kivi.quantiles("f", 0.05), Quantiles(3), lambda e: e["f"]),
    "d_spread": (kivi.quantiles("d", 0.4), Quantiles(0), lambda e: e["d"]),
    "n_distinct": (kivi.distinct("n", 0.01), Distinct(14), lambda e: e["n"]),
    "s_distinct": (kivi.distinct("s", 0.1), Distinct(7), lambda e: e["s"]),
    "f_distinct": (kivi.distinct("f", 0.05), Distinct(9), lambda e: e["f"]),
    "n_avg": (kivi.avg("n"), Moments("avg"), lambda e: e["n"]),
    "d_avg": (kivi.avg("d"), Moments("avg"), lambda e: e["d"]),
    "n_var": (kivi.var("n"), Moments("var"), lambda e: e["n"]),
    "d_all": (kivi.stddev("d", population=True), Moments("stddev", population=True), lambda e: e["d"]),
    "f_avg": (kivi.avg("f"), Moments("avg"), lambda e: e["f"]),
    "f_dev": (kivi.stddev("f", where=SMALL), Moments("stddev"), lambda e: e["f"] if is_small(e["f"]) else None),
    "f_sum": (kivi.sum("f"), "fsum", lambda e: e["f"]),
    "first": (kivi.first("n"), Winner("first"), lambda e: e["n"]),
    "last": (kivi.last("s"), Winner("last"), lambda e: e["s"]),
    "at_most": (kivi.argmax("s", by="n"), Winner("argmax"), lambda e: (e["s"], e["n"])),
    "at_least": (kivi.argmin("d", by="f"), Winner("argmin"), lambda e: (e["d"], e["f"])),
    "largest": (kivi.largest("n", 3), Extremes("largest", 3), lambda e: e["n"]),
    "smallest": (kivi.smallest("f", 4), Extremes("smallest", 4), lambda e: e["f"]),
    "often": (kivi.top("s", 3, most=20), Top(3, most=20), lambda e: e["s"]),
    "often_n": (kivi.top("n", 2), Top(2), lambda e: e["n"]),
}  # fmt: skip
"""Name -> how it is declared, the oracle's operator, and what it observes."""

ORDERED = ("f_avg", "f_dev", "f_sum")  # sums of floats: backfill adds them in one go
BY_SLOT = ("f_avg", "f_sum", "events", "n_spread", "s_distinct", "n_var", "last", "at_least", "largest", "often")


def is_small(value: float | None) -> bool:
    return value is not None and -1e6 < value < 1e6


def hour(event: dict[str, Any]) -> dt.datetime:
    return dt.datetime.fromtimestamp(event["ts"] // HOUR_US * 3_600, dt.UTC)


def measured(*names: str) -> dict[str, Any]:
    return {name: MEASURES[name][1:] for name in names}


TABLES: dict[str, Table] = {
    "e": EventTable(),
    "by_kind": Aggregate("e", ("k",), lambda e: (e["k"],), measured(*MEASURES)),
    "by_slot": Aggregate("e", ("k", "slot"), lambda e: (e["k"], hour(e)), measured(*BY_SLOT)),
    "by_day": Aggregate("e", ("k", "slot"), lambda e: (e["k"], hour(e).replace(hour=0)), measured(*BY_SLOT)),
    "later": Aggregate("e", ("k",), lambda e: (e["k"],), measured(*(name for name in MEASURES if name not in ORDERED))),
}


def declared(db: Any, name: str, group_by: list[Any]) -> None:
    spec = TABLES[name]
    assert isinstance(spec, Aggregate)
    db.create_aggregate(name, source="e", group_by=group_by, measures={m: MEASURES[m][0] for m in spec.measures})


def data(rng: random.Random) -> list[dict[str, Any]]:
    """The sets of data, shuffled together. Few moments and some repeated values, so that the order decides."""

    def event(k: str, n: int | None, f: float | None, d: Decimal | None, s: str | None) -> dict[str, Any]:
        ts = rng.choice((7, HOUR_US // 2, HOUR_US + 5, 3 * HOUR_US, 40 * HOUR_US))
        return {"k": k, "ts": ts, "n": n, "f": f, "d": d, "s": s, "q": rng.randrange(-9, 9)}

    def cents(n: int) -> Decimal:
        return Decimal(n).scaleb(-2)

    tiny = (5e-324, 2.5e-310, 2.2250738585072014e-308, 1e-200, 0.0, -0.0, -5e-324)
    huge = (2**63 - 1, -(2**63), 2**62, 2**53 + 1, 2**60 + 7, -(2**55) - 1)
    bounds = (1, 2, 3, 4, 1024, 2**40, 2**40 + 1)  # on and beside the ends of buckets
    made = []
    for i in range(EVENTS):
        skewed = rng.lognormvariate(5, 2)
        user = f"user {int(rng.paretovariate(0.7)) % 60}"
        made.append(event("skewed", int(skewed), skewed, cents(int(skewed)), user))
        made.append(event("constant", 42, 0.1, Decimal("7.00"), "same"))
        minus = cents(-rng.randrange(10**6))
        made.append(event("negative", -rng.randrange(1, 90), -rng.random(), minus, rng.choice("äöü") * i))
        kept: list[Any] = [value if rng.random() < 0.1 else None for value in (i, i / 7, cents(i), f"x{i}")]
        made.append(event("nulls", *kept))
        made.append(event("tiny", rng.choice((0, 1, -1)), rng.choice(tiny), cents(rng.choice((0, 1, -1))), ""))
        wide = rng.choice((1e300, -1e300, 3e299, 1e17))
        made.append(event("huge", rng.choice(huge), wide, cents(rng.randrange(10**14)), "y" * 40))
        power = rng.choice(bounds)
        made.append(event("bounds", power, 2.0 ** rng.randrange(-9, 9), cents(power), str(power)))
    rng.shuffle(made)
    return made


@contextmanager
def database(where: str, path: Path) -> Iterator[Any]:
    """A database, and how to restart what is behind it."""
    if where == "server":
        with ServerProcess(path) as server:
            db = server.connect()
            yield db, server.restart
            db.close()
        return
    with kivi.open() as db:
        yield db, lambda: None


def appended(db: Any, oracle: Oracle, events: list[dict[str, Any]], rng: random.Random) -> None:
    """All of them, in all ways."""

    def entered(commit_ts: int, part: list[dict[str, Any]]) -> None:
        oracle.attempt(Attempt(None, [Op("append", "e", events=part)], "committed", commit_ts))

    at = 0
    while at < len(events):
        how = rng.choice(("one", "few", "many", "each", "twice"))
        part = events[at : at + {"one": 1, "few": 5, "many": 150, "each": 12, "twice": 8}[how]]
        at += len(part)
        match how:
            case "each":
                with db.appender("e", each=True) as app:
                    futures = [app.append(**event) for event in part]
                for future, event in zip(futures, part, strict=True):
                    entered(future.result(), [event])
            case "twice":
                with db.transaction() as tx:
                    tx.append("e", part[:4])
                    tx.append("e", part[4:])
                    own = (Op("append", "e", events=part),)
                    oracle.read(Read(tx.start_ts, "by_kind", None, list(tx.scan("by_kind")), own))
                entered(tx.commit_ts, part)
            case _:
                entered(db.append("e", part), part)


def looked(oracle: Oracle, snap: Any, *tables: str) -> None:
    for table in tables:
        oracle.read(Read(snap.ts, table, None, list(snap.scan(table))))


@pytest.mark.parametrize("where", ["embedded", "server"])
def test_r20_every_measure_is_what_plain_python_makes_of_the_events(where: str, tmp_path: Path) -> None:
    """R20, R10: at every snapshot, whatever the batches, and whenever it was consolidated or declared."""
    rng = random.Random(20)
    events = data(rng)
    oracle = Oracle(TABLES)
    with database(where, tmp_path / "store") as (db, restart):
        db.create_event_table("e", event_time="ts", columns=COLUMNS)
        declared(db, "by_kind", ["k"])
        declared(db, "by_slot", ["k", kivi.time_slot("ts", "1h")])
        declared(db, "by_day", ["k", kivi.time_slot("ts", "1d")])  # derived from the slots, where that is exact
        half = len(events) // 2
        appended(db, oracle, events[:half], rng)
        with db.snapshot() as early:
            looked(oracle, early, "by_kind", "by_slot")
            declared(db, "later", ["k"])
            db.consolidate()
            appended(db, oracle, events[half:], rng)
            looked(oracle, early, "by_kind", "by_slot")
        with db.snapshot() as late:
            looked(oracle, late, "by_kind", "by_slot", "by_day", "later")
            db.consolidate()
            looked(oracle, late, "by_kind", "by_slot", "by_day", "later")
        restart()
        with db.snapshot() as again:
            looked(oracle, again, "by_kind", "by_slot", "by_day", "later")
            rows = {row["k"]: row for row in again.scan("by_kind")}
    assert oracle.check().reads > 10
    for k, row in rows.items():
        promised([event for event in events if event["k"] == k], row)


def promised(events: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """What is approximate is within what it promises of the raw values."""
    for column in "nfd":
        spread = row[f"{column}_spread"]
        values = sorted(event[column] for event in events if event[column] is not None)
        assert spread.count == len(values)
        for q in (0, 0.5, 0.9, 0.99, 0.999, 1):
            exact = Fraction(values[max(0, math.ceil(Fraction(str(q)) * len(values)) - 1)])
            found = Fraction(spread.quantile(q))
            off = abs(found - exact)
            assert off <= Fraction(spread.accuracy) * abs(exact) * (1 + Fraction(1, 10**12)) or abs(exact) < 1e-305, q
        for bound in values[:: len(values) // 5 or 1]:
            low, high = sorted(float(bound) * (1 + sign * spread.accuracy * 1.000001) for sign in (-1, 1))
            least, most = sum(value < low for value in values), sum(value <= high for value in values)
            assert least <= round(spread.fraction_below(bound) * len(values)) <= most or abs(bound) < 1e-305, bound
    for name, error in (("n", 0.01), ("s", 0.1), ("f", 0.05)):
        count = len({event[name] for event in events if event[name] is not None})
        assert abs(row[f"{name}_distinct"] - count) <= max(3 * error * count, 1), name  # two of few may collide
