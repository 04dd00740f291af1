"""Bad input gets a clear, typed error and changes nothing: not the log, not a row, not the transaction it came in."""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kivi
from kivi.embedded.database import Database
from kivi.errors import (
    AlreadyExists,
    DataLoss,
    FormatTooNew,
    InvalidArgument,
    KiviError,
    NotAStore,
    NotFound,
    OutOfRange,
    ResourceExhausted,
    RowExists,
    SchemaError,
    StoreInUse,
    Unavailable,
)
from kivi.runtime.settings import Settings
from kivi.store.facade import Store

Call = Callable[[Any], object]
T, E = "t", "e"
GOOD = {"ts": 0, "x": 1, "f": 0.5, "d": "1.25", "s": "a", "b": b"b"}


@pytest.fixture(name="db", scope="module")
def _db() -> Iterator[Database]:
    limits = {"max_value_bytes": 1000, "max_transaction_bytes": 20_000, "max_transaction_operations": 50}
    db = Database(Store.open(None, settings=Settings.of({"background": False, "max_append_rows": 100, **limits})))
    columns = {
        "n": kivi.sum("int64"),
        "f": kivi.sum("float64"),
        "d": kivi.sum("decimal(6,2)"),
        "v": "int64",
        "s": "string",
        "b": "bytes",
        "when": "timestamp",
        "flag": "bool",
    }
    db.create_table(T, key={"id": "int64", "name": "string"}, columns=columns)
    db.create_event_table(
        E,
        event_time="ts",
        columns={"ts": "timestamp", "x": "int64", "f": "float64", "d": "decimal(6,2)", "s": "string", "b": "bytes"},
    )
    db.create_aggregate("agg", source=E, group_by=["s"], measures={"x": kivi.sum("x"), "f": kivi.sum("f")})
    with db.transaction() as tx:
        tx.put(T, (1, "a"), n=1, v=1)
        tx.append(E, [GOOD])
    yield db
    db.close()


def contents(db: Any) -> Any:
    with db.snapshot() as snap:
        return [list(snap.scan(table)) for table in (T, E, "agg")]


def put(**values: Any) -> Call:
    return lambda tx: tx.put(T, (1, "a"), **values)


def delta(**values: Any) -> Call:
    return lambda tx: tx.delta(T, (1, "a"), **values)


def append(records: Any) -> Call:
    return lambda tx: tx.append(E, records)


def arrow(**columns: Any) -> Any:
    base: dict[str, Any] = {name: [value] for name, value in GOOD.items()}
    base["ts"] = pa.array([0], pa.timestamp("us", "UTC"))
    base["d"] = pa.array([Decimal("1.25")], pa.decimal128(6, 2))
    return pa.table({**base, **columns})


WRITES: dict[str, tuple[Call, type[KiviError]]] = {
    "an event's time in nanoseconds": (append([GOOD, GOOD | {"ts": 1_780_000_000 * 10**9}]), InvalidArgument),
    "an event's time in nanoseconds, as Arrow": (
        lambda tx: tx.append(E, arrow(ts=pa.array([1_780_000_000 * 10**9], pa.timestamp("us", "UTC")))),
        InvalidArgument,
    ),
    "an event before the year 1": (append([GOOD | {"ts": -(2**62)}]), InvalidArgument),
    "unknown table": (lambda tx: tx.put("nowhere", (1,), v=1), NotFound),
    "unknown column": (put(nothing=1), SchemaError),
    "a key column as a value": (put(id=2), SchemaError),
    "text for an integer": (put(v="1"), SchemaError),
    "a float for an integer": (put(v=1.0), SchemaError),
    "a bool for an integer": (put(v=True), SchemaError),
    "an integer for a bool": (put(flag=1), SchemaError),
    "bytes for text": (put(s=b"x"), SchemaError),
    "text for bytes": (put(b="x"), SchemaError),
    "half a surrogate pair": (put(s="\ud800"), InvalidArgument),
    "65 bits": (put(v=2**63), InvalidArgument),
    "65 bits, negative": (delta(n=-(2**63) - 1), InvalidArgument),
    "NaN": (delta(f=math.nan), InvalidArgument),
    "infinity": (put(f=math.inf), InvalidArgument),
    "an integer too large for a float": (delta(f=10**400), InvalidArgument),
    "NaN in a decimal": (delta(d=Decimal("NaN")), InvalidArgument),
    "a decimal with too many digits": (delta(d=Decimal("0.001")), InvalidArgument),
    "a decimal out of range": (delta(d=Decimal("10000")), InvalidArgument),
    "a moment without a zone": (put(when=dt.datetime(2024, 1, 1)), InvalidArgument),  # noqa: DTZ001
    "a delta on a value column": (delta(v=1), SchemaError),
    "a delta of nothing": (delta(), InvalidArgument),
    "a short key": (lambda tx: tx.put(T, (1,), v=1), SchemaError),
    "a long key": (lambda tx: tx.put(T, (1, "a", 2), v=1), SchemaError),
    "a key that is no tuple": (lambda tx: tx.put(T, 1, v=1), SchemaError),
    "null in a key": (lambda tx: tx.put(T, (1, None), v=1), InvalidArgument),
    "a key of another type": (lambda tx: tx.put(T, ("1", "a"), v=1), SchemaError),
    "a key over 64 KiB": (lambda tx: tx.put(T, (1, "x" * 70_000), v=1), ResourceExhausted),
    "a value over the limit": (put(s="x" * 1001), ResourceExhausted),
    "a guard on an unknown column": (lambda tx: tx.guard(T, (1, "a"), "nothing"), SchemaError),
    "a guard on events": (lambda tx: tx.guard(E, (1,)), InvalidArgument),
    "insert of a row that is there": (lambda tx: tx.insert(T, (1, "a"), v=2), RowExists),
    "put on events": (lambda tx: tx.put(E, (1,), x=1), InvalidArgument),
    "put on an aggregate": (lambda tx: tx.put("agg", ("a",), x=1), InvalidArgument),
    "append to a row table": (lambda tx: tx.append(T, [{"v": 1}]), InvalidArgument),
    "events: an unknown column": (append([{**GOOD, "nothing": 1}]), SchemaError),
    "events: a wrong type": (append([{**GOOD, "x": "1"}]), SchemaError),
    "events: the second is wrong": (append([GOOD, {**GOOD, "x": 1.5}]), SchemaError),
    "events: no time": (append([{**GOOD, "ts": None}]), InvalidArgument),
    "events: NaN": (append([{**GOOD, "f": math.nan}]), InvalidArgument),
    "events: not records": (append([1, 2, 3]), InvalidArgument),
    "events: not even a list": (append(7), InvalidArgument),
    "events: too many": (append([GOOD] * 101), ResourceExhausted),
    "events: a value over the limit": (append([{**GOOD, "s": "x" * (16 * 2**20 + 1)}]), ResourceExhausted),
    "arrow: NaN": (append(arrow(f=[math.nan])), InvalidArgument),
    "arrow: infinity": (append(arrow(f=[-math.inf])), InvalidArgument),
    "arrow: a wrong type": (append(arrow(x=["1"])), SchemaError),
    "arrow: an unknown column": (append(arrow(nothing=[1])), SchemaError),
    "arrow: no time": (append(arrow(ts=pa.array([None], pa.timestamp("us", "UTC")))), InvalidArgument),
    "arrow: a decimal that does not fit": (append(arrow(d=pa.array([Decimal("1.255")]))), InvalidArgument),
    "arrow: unsigned over 63 bits": (append(arrow(x=pa.array([2**63], pa.uint64()))), InvalidArgument),
    "arrow: bad UTF-8": (
        append(arrow(s=pa.Array.from_buffers(pa.string(), 1, [None, *pa.array([b"\xff"]).buffers()[1:]]))),
        InvalidArgument,
    ),
}


@pytest.mark.parametrize("case", WRITES)
def test_a_bad_write_changes_nothing_and_the_transaction_may_go_on(db: Database, case: str) -> None:
    call, error = WRITES[case]
    before, last = contents(db), db.store.log.last
    tx = db.transaction()
    tx.put(T, (9, "own"), v=9)
    own = list(tx.scan(T))
    with pytest.raises(error) as caught:
        call(tx)
    assert str(caught.value), "every error has a sentence"
    assert isinstance(caught.value.details, dict)
    assert list(tx.scan(T)) == own
    assert list(tx.scan(E)) == before[1]
    tx.rollback()
    assert contents(db) == before
    assert db.store.log.last == last


READS: dict[str, tuple[Call, type[KiviError]]] = {
    "unknown table": (lambda s: s.get("nowhere", (1,)), NotFound),
    "a table that is no name": (lambda s: s.get(None, (1,)), InvalidArgument),
    "get on events": (lambda s: s.get(E, (1,)), SchemaError),
    "unknown column": (lambda s: s.get(T, (1, "a"), columns=["nothing"]), SchemaError),
    "several columns as one text": (lambda s: s.get(T, (1, "a"), columns="v,w"), SchemaError),
    "short key": (lambda s: s.get(T, (1,)), SchemaError),
    "a prefix of another type": (lambda s: list(s.scan(T, prefix=("x",))), SchemaError),
    "a prefix too long": (lambda s: list(s.scan(T, prefix=(1, "a", 2))), SchemaError),
    "a prefix on events": (lambda s: list(s.scan(E, prefix=(1,))), InvalidArgument),
    "a bound of another type": (lambda s: list(s.scan(T, start=("x",))), SchemaError),
    "a bound without time": (lambda s: list(s.scan(E, start=("x",))), SchemaError),
    "where on an unknown column": (lambda s: list(s.scan(T, where=kivi.col("nothing") == 1)), SchemaError),
    "where with another type": (lambda s: list(s.scan(T, where=kivi.col("v") == "x")), InvalidArgument),
    "where that is no expression": (lambda s: list(s.scan(T, where="v == 1")), InvalidArgument),
    "a negative limit": (lambda s: list(s.scan(T, limit=-1)), InvalidArgument),
    "a limit that is no number": (lambda s: list(s.scan(T, limit=True)), InvalidArgument),
}


@pytest.mark.parametrize("case", READS)
@pytest.mark.parametrize("reader", ["snapshot", "transaction"])
def test_a_bad_read(db: Database, case: str, reader: str) -> None:
    call, error = READS[case]
    with getattr(db, reader)() as handle:
        with pytest.raises(error):
            call(handle)
        assert handle.get(T, (1, "a"))["n"] == 1


SCHEMAS: dict[str, tuple[Call, type[KiviError]]] = {
    "a name that is there": (lambda db: db.create_table(T, key={"id": "int64"}, columns={}), AlreadyExists),
    "a name with a blank": (lambda db: db.create_table("a b", key={"id": "int64"}, columns={}), SchemaError),
    "an empty name": (lambda db: db.create_table("", key={"id": "int64"}, columns={}), SchemaError),
    "no key": (lambda db: db.create_table("x", key={}, columns={"v": "int64"}), SchemaError),
    "an unknown type": (lambda db: db.create_table("x", key={"id": "int65"}, columns={}), SchemaError),
    "an operator on text": (
        lambda db: db.create_table("x", key={"id": "int64"}, columns={"s": kivi.sum("string")}),
        SchemaError,
    ),
    "an operator in the key": (lambda db: db.create_table("x", key={"id": kivi.sum("int64")}, columns={}), SchemaError),
    "one name twice": (lambda db: db.create_table("x", key={"v": "int64"}, columns={"v": "int64"}), SchemaError),
    "history of nothing": (
        lambda db: db.create_table("x", key={"id": "int64"}, columns={}, history="0s"),
        InvalidArgument,
    ),
    "no event time": (lambda db: db.create_event_table("x", event_time="ts", columns={"v": "int64"}), SchemaError),
    "event time of another type": (
        lambda db: db.create_event_table("x", event_time="v", columns={"v": "int64"}),
        SchemaError,
    ),
    "drop of nothing": (lambda db: db.drop("nowhere"), NotFound),
    "an expression that is a call": (
        lambda db: db.create_aggregate(
            "x", source=E, group_by=["s"], measures={"n": kivi.count()}, derived={"y": "__import__('os')"}
        ),
        SchemaError,
    ),
    "a measure's condition on a table's column": (
        lambda db: db.create_table(
            "x", key={"id": "int64"}, columns={"v": kivi.sum("int64", where=kivi.col("id") > 1)}
        ),
        SchemaError,
    ),
    "an expression as the type of a column": (
        lambda db: db.create_table("x", key={"id": "int64"}, columns={"v": kivi.sum(kivi.col("id") * 2)}),
        SchemaError,
    ),
    "a snapshot from the future": (lambda db: db.snapshot(as_of=10**12), InvalidArgument),
    "a snapshot from before time": (lambda db: db.snapshot(as_of=-1), InvalidArgument),
    "a snapshot at a text": (lambda db: db.snapshot(as_of="now"), InvalidArgument),
    "a snapshot for ever": (lambda db: db.snapshot(ttl_s=1e9), InvalidArgument),
    "a batch token that is none": (lambda db: db.append(E, [GOOD], batch=("", 0)), InvalidArgument),
    "a batch number that is none": (lambda db: db.append(E, [GOOD], batch=("a", -1)), InvalidArgument),
    "an unknown setting": (lambda db: kivi.open(None, nothing=1), InvalidArgument),
    "a setting of another type": (lambda db: kivi.open(None, segment_bytes="big"), InvalidArgument),
}


@pytest.mark.parametrize("case", SCHEMAS)
def test_a_bad_definition_or_call_changes_nothing(db: Database, case: str) -> None:
    call, error = SCHEMAS[case]
    before, last, tables = contents(db), db.store.log.last, db.tables()
    with pytest.raises(error):
        call(db)
    assert db.tables() == tables
    assert contents(db) == before
    assert db.store.log.last == last


def test_a_transaction_over_its_limits_is_refused_at_the_operation(db: Database) -> None:
    last = db.store.log.last
    with db.transaction() as tx:
        with pytest.raises(ResourceExhausted, match="50 operations"):
            for i in range(60):
                tx.delta(T, (i, "x"), n=1)
        tx.rollback()
    with db.transaction() as tx:
        with pytest.raises(ResourceExhausted, match="20000 bytes"):
            for i in range(40):
                tx.put(T, (i, "x"), s="x" * 900)
        tx.rollback()
    assert db.store.log.last == last


def test_a_transaction_that_is_over(db: Database) -> None:
    with db.transaction() as tx:
        tx.guard(T, (1, "a"))
    for call in (tx.commit, lambda: tx.get(T, (1, "a")), lambda: tx.put(T, (1, "a"), v=1)):
        with pytest.raises(InvalidArgument, match="over"):
            call()
    tx.rollback()


def test_r10_a_sum_that_does_not_fit_says_so_only_to_who_asks_for_it(db: Database) -> None:
    """OUT_OF_RANGE names the column; nothing is lost, and it recovers."""
    for _ in range(2):
        with db.transaction() as tx:
            tx.delta(T, (5, "big"), n=2**63 - 1, d=Decimal("9999.99"))
    with db.snapshot() as snap:
        for column in ("n", "d"):
            with pytest.raises(OutOfRange) as caught:
                snap.get(T, (5, "big"), columns=[column])
            assert caught.value.details["column"] == column
        assert snap.get(T, (5, "big"), columns=["v", "f"]) == {"v": None, "f": 0.0}
        with pytest.raises(OutOfRange):
            snap.to_arrow(T)
    with db.transaction() as tx:
        tx.delta(T, (5, "big"), n=-(2**63 - 1), d=Decimal("-9999.99"))
    with db.snapshot() as snap:
        assert snap.get(T, (5, "big"), columns=["n", "d"]) == {"n": 2**63 - 1, "d": Decimal("9999.99")}
    with db.transaction() as tx:
        tx.delete(T, (5, "big"))


def test_times_of_an_earlier_version_are_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside the years 1 to 9999: they are found, read as Arrow, left out, put right and removed, and nothing new is
    written beside them."""
    times, at = (2**62, -(2**62)), dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    with monkeypatch.context() as earlier, kivi.open(tmp_path / "store") as db:
        for module in ("kivi.arrow.records", "kivi.model.schema", "kivi.model.types"):
            earlier.setattr(f"{module}.check_moment", lambda value, what: value)
        db.create_table("rows", key={"id": "int64"}, columns={"at": "timestamp", "n": "int64"})
        db.create_table("keys", key={"at": "timestamp"}, columns={"n": "int64"})
        db.create_event_table("events", event_time="ts", columns={"ts": "timestamp", "n": "int64"})
        for n, time in enumerate((*times, at)):
            with db.transaction() as tx:
                tx.put("rows", (n,), at=time, n=n)
                tx.put("keys", (time,), n=n)
                tx.append("events", [{"ts": time, "n": n}])
    tables = {"rows": "at", "keys": "at", "events": "ts"}
    with kivi.open(tmp_path / "store") as db:
        with db.snapshot() as snap:
            for table, name in tables.items():
                with pytest.raises(OutOfRange, match=r"outside the years 1 to 9999: read it with to_arrow\(\)"):
                    list(snap.scan(table))
                assert sorted(row["n"] for row in snap.scan(table, columns=["n"])) == [0, 1, 2]
                assert set(snap.to_arrow(table)[name].cast(pa.int64()).to_pylist()) > {*times}
                beyond = (kivi.col(name) > 253_402_300_799_999_999) | (kivi.col(name) < -62_135_596_800_000_000)
                assert sorted(row["n"] for row in snap.scan(table, where=beyond, columns=["n"])) == [0, 1]
                assert [row[name] for row in snap.scan(table, where=~beyond)] == [at]
            assert snap.get("rows", (0,), columns=["n"]) == {"n": 0}
            assert snap.get("keys", (times[0],), columns=["n"]) == {"n": 0}
            (found,) = snap.scan("keys", start=(at,), end=(times[0],))
            assert found["at"] == at
        with db.transaction() as tx:
            tx.put("rows", (0,), at=at)
            tx.delete("rows", (1,))
            for time in times:
                tx.delete("keys", (time,))
                with pytest.raises(InvalidArgument, match="key column 'at' is"):
                    tx.put("keys", (time,), n=1)
            assert tx.retract("events", where=kivi.col("n") < 2) == 2
        with db.snapshot() as snap:
            left = [[row[name] for row in snap.scan(table)] for table, name in tables.items()]
            assert left == [[at, at], [at], [at]]


@pytest.mark.parametrize("each", [3, 200])
def test_slots_of_an_earlier_version_that_begin_before_the_year_1_are_computed_again_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each: int
) -> None:
    """Their rows are told as Arrow; measures are added to them, and their events are retracted, some and then all."""
    early, late = dt.datetime(1, 1, 1, 0, 30, tzinfo=dt.UTC), dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    widths: dict[str, tuple[str, str | None]] = {
        "fixed": ("7d", None), "local": ("1d", "Asia/Tokyo"), "months": ("1month", "Asia/Tokyo")
    }  # fmt: skip
    events = [{"ts": ts, "n": n % 3} for n in range(each) for ts in (early, late)]
    with monkeypatch.context() as earlier, kivi.open(tmp_path / "store") as db:
        for module in ("grouping", "derive"):
            earlier.setattr(f"kivi.delta.{module}.MOMENT_MIN_US", -(2**63))
        db.create_event_table("events", event_time="ts", columns={"ts": "timestamp", "n": "int64"})
        for name, (width, zone) in widths.items():
            group_by = [kivi.time_slot("ts", width, name="slot", tz=zone)]
            measures = {"calls": kivi.count(), "most": kivi.max("n"), "last": kivi.last("n")}
            db.create_aggregate(name, source="events", group_by=group_by, measures=measures)
        db.append("events", events)
    ones = sum(event["n"] == 1 for event in events) // 2

    def calls(snap: Any, name: str) -> Any:
        return snap.to_arrow(name, columns=["calls"])["calls"].to_pylist()

    with kivi.open(tmp_path / "store") as db:
        for name in widths:
            db.alter_aggregate(name, add_measures={"least": kivi.min("n")}, backfill=True)
            with db.snapshot() as snap:
                assert snap.to_arrow(name)["least"].to_pylist() == [0, 0]
        with pytest.raises(InvalidArgument, match="would begin outside the years"):
            db.append("events", [{"ts": early, "n": 7}])
        for where, left in ((kivi.col("n") == 1, each - ones), (kivi.col("ts") == early, 0)):
            with db.transaction() as tx:
                assert tx.retract("events", where=where & (kivi.col("ts") < late)) > 0
            with db.snapshot() as snap:
                assert [calls(snap, name) for name in widths] == [[*([left] if left else []), each]] * 3
        with db.snapshot() as snap:
            assert all(row["slot"] > early and row["slot"] <= late for name in widths for row in snap.scan(name))


# -- directories --------------------------------------------------------------------------------------------


def listing(path: Path) -> list[tuple[str, bytes]]:
    return sorted((str(file.relative_to(path)), file.read_bytes()) for file in path.rglob("*") if file.is_file())


@pytest.fixture(name="closed")
def _closed(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    with kivi.open(path) as db:
        db.create_table(T, key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        for _ in range(5):
            with db.transaction() as tx:
                tx.delta(T, (1,), n=1)
    return path


def test_a_directory_that_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear diary")
    before = listing(tmp_path)
    with pytest.raises(NotAStore, match=r"letter\.txt"):
        kivi.open(tmp_path)
    assert listing(tmp_path) == before
    with pytest.raises(NotAStore):
        kivi.open(tmp_path / "letter.txt")


def test_a_store_of_a_newer_format(closed: Path) -> None:
    marker = closed / "KIVI"
    content = json.loads(marker.read_text())
    marker.write_text(json.dumps({**content, "format": 99}))
    before = listing(closed)
    with pytest.raises(FormatTooNew, match="99"):
        kivi.open(closed)
    assert listing(closed) == before
    marker.write_text(json.dumps({**content, "operators": {**content["operators"], "median": 77}}))
    with pytest.raises(FormatTooNew, match="median"):
        kivi.open(closed)
    marker.write_text(json.dumps(content))
    kivi.open(closed).close()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 1}', '{"format": "1", "store_id": "zz", "operators": {}}']
)
def test_a_damaged_marker_names_the_file(closed: Path, content: str) -> None:
    (closed / "KIVI").write_text(content)
    with pytest.raises((DataLoss, FormatTooNew)) as caught:
        kivi.open(closed)
    assert "KIVI" in str(caught.value) or "format" in str(caught.value)


def test_a_directory_in_use(closed: Path) -> None:
    """By this process or another one; and free again once that one is gone, however it went."""
    program = "import sys, kivi; db = kivi.open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(closed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdin is not None
    try:
        assert child.stdout.readline() == "open\n"
        with pytest.raises(StoreInUse, match=str(closed)):
            kivi.open(closed)
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    with kivi.open(closed) as db:
        with pytest.raises(StoreInUse):
            kivi.open(closed)
        with db.snapshot() as snap:
            assert snap.get(T, (1,)) == {"id": 1, "n": 5}


def test_a_log_that_is_missing_is_noticed(closed: Path) -> None:
    """Base is there and says what it includes: an empty log does not fit it."""
    shutil.move(closed / "log", closed.parent / "log")
    with pytest.raises(DataLoss):
        kivi.open(closed)
    shutil.rmtree(closed / "log", ignore_errors=True)
    shutil.move(closed.parent / "log", closed / "log")
    with kivi.open(closed) as db, db.snapshot() as snap:
        assert snap.get(T, (1,)) == {"id": 1, "n": 5}


def test_an_engine_that_is_missing_is_noticed(closed: Path) -> None:
    """The log no longer reaches back to the beginning, so an empty base is not taken for a new one."""
    with kivi.open(closed, segment_bytes=65536) as db:
        db.create_table("filler", key={"id": "int64"}, columns={"s": "string"})
        for i in range(60):
            with db.transaction() as tx:
                tx.put("filler", (i,), s="x" * 20_000)
            if i % 10 == 0:
                db.consolidate()
                db.store.consolidator.flush()
    shutil.rmtree(closed / "engine")
    with pytest.raises(DataLoss):
        kivi.open(closed)


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    db = kivi.open(tmp_path / "s")
    db.create_table(T, key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    snap, tx = db.snapshot(), db.transaction()
    tx.delta(T, (1,), n=1)
    db.close()
    db.close()
    for call in (lambda: snap.get(T, (1,)), tx.commit, db.snapshot, db.tables, db.consolidate):
        with pytest.raises(Unavailable):
            call()
    assert os.path.exists(tmp_path / "s" / "KIVI")
