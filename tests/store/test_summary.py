"""Summaries: the same as a recount at the same snapshot, and blocks are opened only where headers are not enough."""

from __future__ import annotations

import datetime as dt
import decimal
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi import col
from kivi.errors import InvalidArgument, OutOfRange, SchemaError
from tests.golden.driver import EmbeddedDriver
from tests.seeds import AT_NIGHT

MINUTE = 60_000_000
COLUMNS = {"ts": "timestamp", "a": "int64", "f": "float64", "p": "decimal(9,2)", "s": "string", "b": "bool"}
KNOWN = {
    "n": kivi.count(), "some": kivi.count("a"), "total": kivi.sum("a"), "least": kivi.min("a"), "most": kivi.max("a"),
    "first": kivi.min("ts"), "last": kivi.max("ts"), "paid": kivi.sum("p"), "low": kivi.min("f"), "dear": kivi.max("p"),
}  # fmt: skip
READ = {**KNOWN, "real": kivi.sum("f"), "named": kivi.count("s"), "told": kivi.count("b")}


def event(rng: random.Random, minute: int) -> dict[str, Any]:
    def maybe(value: Any) -> Any:
        return None if rng.random() < 0.2 else value

    return {
        "ts": minute * MINUTE + rng.randrange(MINUTE), "a": maybe(rng.randrange(-(2**60), 2**60) // 64),
        "f": maybe(rng.uniform(-1e9, 1e-9)), "p": maybe(decimal.Decimal(rng.randrange(-(10**6), 10**6)).scaleb(-2)),
        "s": maybe("x"), "b": maybe(rng.random() < 0.5),
    }  # fmt: skip


@pytest.fixture(params=["memory", "disk"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedDriver]:
    path = None if request.param == "memory" else str(tmp_path / "data")
    made = EmbeddedDriver(path, block_rows=50)
    made.db.create_event_table("e", event_time="ts", retention="1h", columns=COLUMNS)
    yield made
    made.close()


def recount(rows: Sequence[Any], measures: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, call in measures.items():
        values: Any = [row[call.argument] for row in rows if row[call.argument] is not None] if call.argument else rows
        match call.operator:
            case "count":
                out[name] = len(values)
            case "sum":
                total: Any = 0.0 if call.argument == "f" else decimal.Decimal(0) if call.argument == "p" else 0
                for value in values:
                    total = total + value
                out[name] = total
            case "min":
                out[name] = min(values, default=None)
            case _:
                out[name] = max(values, default=None)
    return out


def blocks(driver: EmbeddedDriver) -> tuple[int, int]:
    stats = driver.db.stats()
    return int(stats["summary_blocks_known"]), int(stats["summary_blocks_read"])


@pytest.mark.parametrize("asked", [4, *([pytest.param(100, marks=pytest.mark.hypothesis)] if AT_NIGHT else [])])
def test_any_summary_equals_a_recount(driver: EmbeddedDriver, asked: int) -> None:
    """Bounds, predicates, floors, snapshots inside blocks, what is pending, own events; compared bit by bit."""
    db, rng = driver.db, random.Random(11)
    snaps = []
    for i in range(60):
        db.append("e", [event(rng, i + rng.randrange(3)) for _ in range(rng.choice((1, 7, 40)))])
        if i % 7 == 0:
            snaps.append(db.snapshot(ttl_s=3_600))
        if i % 9 == 4:
            db.consolidate()
        if i == 40:
            driver.store.retention.set_floor(driver.store.table("e"), 8 * MINUTE + 12_345)
    snaps.append(db.snapshot(ttl_s=3_600))
    wheres = [
        None, col("a") > 0, (col("a") >= -(2**60)) & (col("ts") >= 0), ~col("a").is_null(), col("s") == "x",
        col("f").is_null() | (col("b") == True), (col("a") < 0) & ~(col("p") > decimal.Decimal("0.5")),  # noqa: E712
    ]  # fmt: skip
    for step in (lambda: None, db.consolidate, lambda: driver.store.consolidator.compact()):
        step()
        for snap in snaps:
            for _ in range(asked):
                low, high = sorted(rng.randrange(70 * MINUTE) for _ in range(2))
                bounds: dict[str, Any] = {
                    "start": rng.choice((None, low, (low,))), "end": rng.choice((None, high)),
                    "where": rng.choice(wheres),
                }  # fmt: skip
                measures = rng.choice((KNOWN, READ, {"n": kivi.count()}))
                rows = list(snap.scan("e", **bounds))
                assert snap.summary("e", measures, **bounds) == recount(rows, measures)
    with db.transaction() as tx:
        tx.append("e", [event(rng, 60) for _ in range(20)])
        assert tx.summary("e", READ, start=50 * MINUTE) == recount(list(tx.scan("e", start=50 * MINUTE)), READ)
        tx.overwrite("e")
        tx.append("e", [event(rng, 1) for _ in range(20)])
        assert tx.summary("e", READ) == recount(list(tx.scan("e")), READ)


def test_blocks_are_read_only_where_a_header_is_not_enough(driver: EmbeddedDriver) -> None:
    db, rng = driver.db, random.Random(5)
    for minute in range(20):
        db.append("e", [{**event(rng, minute), "a": minute} for _ in range(50)])
    db.consolidate()
    middle = dt.datetime.fromtimestamp(5.5 * 60, dt.UTC)
    with db.snapshot() as snap, db.snapshot(as_of=snap.ts - 3) as earlier:
        for read, known, ask in (
            (0, 20, lambda: snap.summary("e", KNOWN)),
            (0, 17, lambda: earlier.summary("e", KNOWN)),
            (0, 10, lambda: snap.summary("e", KNOWN, start=10 * MINUTE)),
            (1, 14, lambda: snap.summary("e", KNOWN, start=middle)),
            (0, 7, lambda: snap.summary("e", KNOWN, where=col("a") >= 13)),
            (0, 3, lambda: snap.summary("e", {"n": kivi.count()}, where=col("a").isin([1, 4, 9]))),
            (0, 0, lambda: snap.summary("e", {"real": kivi.sum("f")})),
            (0, 0, lambda: snap.summary("e", {"named": kivi.count("s")})),
        ):
            before = blocks(driver)
            ask()
            after = blocks(driver)
            assert (after[1] - before[1], after[0] - before[0]) == (read, known)
    driver.store.retention.set_floor(driver.store.table("e"), 2 * MINUTE + MINUTE // 2)
    before = blocks(driver)
    with db.snapshot() as snap:
        assert snap.summary("e", {"n": kivi.count()})["n"] == len(list(snap.scan("e", columns=["ts"]))) < 18 * 50
    assert (blocks(driver)[0] - before[0], blocks(driver)[1] - before[1]) == (17, 1)


def test_nothing_to_sum_and_what_cannot_be(driver: EmbeddedDriver) -> None:
    db = driver.db
    with db.snapshot() as snap:
        empty = snap.summary("e", READ)
        assert (empty["n"], empty["total"], empty["real"], empty["least"], empty["last"]) == (0, 0, 0.0, None, None)
        assert empty["paid"] == 0
    db.append("e", [{"ts": 1, "a": 2**63 - 1}, {"ts": 2, "a": 1}])
    for _ in range(2):
        with db.snapshot() as snap, pytest.raises(OutOfRange, match="total"):
            snap.summary("e", KNOWN)
        db.consolidate()
    with db.snapshot() as snap:
        assert snap.summary("e", {"most": kivi.max("a")}, where=col("a") > 1) == {"most": 2**63 - 1}
        for error, measures in (
            (SchemaError, {"x": kivi.sum("nowhere")}),
            (SchemaError, {"x": kivi.sum("ts")}),
            (SchemaError, {"x": kivi.max("s")}),
            (SchemaError, {"x": "count()"}),
            (SchemaError, {}),
            (SchemaError, ["count()"]),
        ):
            with pytest.raises(error):
                snap.summary("e", measures)
    db.create_table("t", key={"id": "int64"}, columns={"v": "int64"})
    with db.snapshot() as snap, pytest.raises(InvalidArgument, match="no event table"):
        snap.summary("t", {"n": kivi.count()})
