"""A scan in columns answers what a scan row by row does, and what a plain replay does.

Two tables, an aggregate and a row table of which every column is of fixed width, with whatever may lie in the way:
commits in the index, in runs, combined, folded; snapshots whose versions are kept; sums beyond 64 bits, floats beyond
the finite numbers, nulls, tombstones; portions of every size from one row up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kivi
from kivi.api.arguments import ScanArguments, type_of
from kivi.delta.overlay import FixedRows
from kivi.embedded.database import Database, Snapshot
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, row_key, table_prefix
from kivi.encoding.projection import Projection
from kivi.engine import WriteBatch
from kivi.errors import DataLoss, KiviError, NotFound, OutOfRange, SnapshotTooOld
from kivi.model.types import MOMENT_MAX_US, MOMENT_MIN_US
from kivi.mvcc import snapshot as snapshots
from kivi.runtime.settings import Settings
from kivi.store import reads as scans
from kivi.store import transaction as transactions
from kivi.store.facade import Store
from kivi.wire.columns import column_writer
from kivi.wire.v1 import session_pb2

BIG = 2**62
EVENT = {"name": "string", "id": "int64", "ts": "timestamp", "x": "int64", "f": "float64", "c": "decimal(18,3)"}
MEASURES: dict[str, Any] = {
    "total": kivi.sum("x"),
    "n": kivi.count(),
    "known": kivi.count("x"),
    "low": kivi.min("x"),
    "high": kivi.max("f"),
    "load": kivi.sum("f"),
    "cost": kivi.sum("c"),
    "dear": kivi.max("c"),
    "last": kivi.max("ts"),
}
DERIVED = {
    "mean": "total / known",
    "odd": "-(low - high) * 2.5 + cost / (n - 2)",
    "keyed": "id * load",
    "steep": "high * high * 1e200",
    "dearest": "dear + 0",
}
NAMES = ("", "a", "a\0", "b", "é")
INTS = st.none() | st.integers(-3, 3) | st.sampled_from([BIG, -BIG, 2**63 - 1, -(2**63)])
FLOATS = st.none() | st.sampled_from([0.0, -1.5, 0.1, 0.2, 0.3, 1e16, 1e150, 1.7e308])
COSTS = st.none() | st.sampled_from([Decimal("0.001"), Decimal("-7"), Decimal("999999999999999.999"), Decimal("9e12")])
KEYS = st.tuples(st.sampled_from(NAMES), st.integers(-2, 2))
EVENTS = st.lists(st.tuples(KEYS, st.integers(0, 2), INTS, FLOATS, COSTS), min_size=1, max_size=8)
CHANGE = st.fixed_dictionaries({}, optional={"n": INTS, "f": FLOATS, "hi": INTS, "v": INTS, "ok": st.booleans()})
ROW_WRITES = st.lists(
    st.tuples(st.sampled_from(["put", "delta", "delta", "delete"]), st.integers(0, 9), CHANGE), min_size=1, max_size=6
)
STEPS = st.lists(
    st.tuples(st.just("append"), EVENTS)
    | st.tuples(st.just("append"), EVENTS)
    | st.tuples(st.just("rows"), ROW_WRITES)
    | st.tuples(st.sampled_from(["fold", "light", "snapshot", "snapshot"]), st.none()),
    min_size=1,
    max_size=12,
)
SIZES = st.fixed_dictionaries(
    {
        "FEW_ROWS": st.integers(0, 5),
        "BATCH_ROWS": st.integers(4, 40),
        "COLUMNS_ROWS": st.integers(1, 9) | st.just(1_000),
        "_CHUNK_ROWS": st.integers(1, 5) | st.just(1_000),
        "_OLDER_RANGE_KEYS": st.integers(1, 4),
        "_OLDER_RANGE_FACTOR": st.integers(1, 3),
    }
)


@contextmanager
def sizes(**chosen: int) -> Iterator[None]:
    with ExitStack() as stack:
        for name, value in chosen.items():
            stack.enter_context(patch.object(snapshots if name.startswith("_") else scans, name, value))
        yield


def opened(**chosen: Any) -> Database:
    db = Database(Store.open(None, settings=Settings.of({"background": False, "consolidate_rows": 3, **chosen})))
    db.create_event_table("ev", event_time="ts", columns=EVENT)
    groups: list[Any] = ["name", "id", kivi.time_slot("ts", "1ms", name="slot")]
    db.create_aggregate("agg", source="ev", group_by=groups, measures=MEASURES, derived=DERIVED)
    exact = {name: call for name, call in MEASURES.items() if name != "load"}
    db.create_aggregate("exact", source="ev", group_by=["id"], measures=exact, derived={"mean": "total / known"})
    columns = {"n": kivi.sum("int64"), "f": kivi.sum("float64"), "hi": kivi.max("int64"), "v": "int64", "ok": "bool"}
    db.create_table("t", key={"id": "int64"}, columns=columns)
    return db


def append(db: Database, events: list[Any]) -> None:
    names = list(EVENT)
    db.append("ev", [dict(zip(names, (*key, slot * 1000, *values), strict=True)) for key, slot, *values in events])


def write(db: Database, changes: list[Any]) -> None:
    with db.transaction() as tx:
        for kind, key, values in changes:
            if kind == "delete":
                tx.delete("t", (key,))
            elif kind == "put":
                tx.put("t", (key,), **values)
            elif delta := {name: value for name, value in values.items() if name in ("n", "f", "hi")}:
                tx.delta("t", (key,), **delta)


def answer(snap: Snapshot, table: str, **wanted: Any) -> tuple[str, Any]:
    """All rows, or the error; with every bit of every float."""
    try:
        batches = list(snap.scan_batches(table, **wanted))
    except KiviError as error:
        return type(error).__name__, None  # of several that are out of range, portions say which is met first
    for batch in batches:
        batch.validate(full=True)
    assert all(batch.num_rows for batch in batches)
    return "rows", (
        batches[0].schema if batches else None,
        [repr(row) for batch in batches for row in batch.to_pylist()],
    )


def both(snap: Snapshot, table: str, chosen: dict[str, int], **wanted: Any) -> tuple[str, Any]:
    with patch.object(Projection, "in_columns", False):
        expected = answer(snap, table, **wanted)
    with sizes(**chosen):
        assert answer(snap, table, **wanted) == expected, (table, wanted)
    return expected


def first_rows(snap: Snapshot, table: str, **wanted: Any) -> tuple[str, Any]:
    """``Store.few_rows``, as callers see rows."""
    store = snap._db.store
    schema = store.table(table)
    scan = ScanArguments(table, **wanted).bound(schema)
    try:
        found = store.few_rows(snap._lease, schema, scan)
        assert found is not None
        names = schema.output_columns(scan.columns)
        count, columns = found
        rows = [*zip(*columns, strict=True)]
        assert len(rows) == count
        seen = [tuple(type_of(schema, n).from_stored(v, n) for n, v in zip(names, row, strict=True)) for row in rows]
    except KiviError as error:
        return type(error).__name__, None
    return "rows", [repr(dict(zip(names, row, strict=True))) for row in seen]


def few(snap: Snapshot, table: str, **wanted: Any) -> None:
    """The first rows are those of a scan."""
    expected = first_rows(snap, table, **wanted)
    scanned: tuple[str, Any]
    try:
        scanned = "rows", [repr(row) for row in snap.scan(table, **wanted)]
    except KiviError as error:
        scanned = type(error).__name__, None
    assert scanned == expected, (table, wanted)
    every = {name: value for name, value in wanted.items() if name not in ("limit", "reverse")}
    with suppress(OutOfRange):  # in a row beyond the limit
        rows = [repr(row) for row in snap.scan(table, **every)]
        assert expected == ("rows", (rows[::-1] if wanted["reverse"] else rows)[: wanted["limit"]])


def added(cell: Any, delta: Any) -> Any:
    return delta if cell is None else cell if delta is None else cell + delta


def replayed(commits: list[list[Any]]) -> dict[Any, dict[str, Any]]:
    """The aggregate of these commits, by plain Python; a commit's floats are added up before they are added."""
    rows: dict[Any, dict[str, Any]] = {}
    for events in commits:
        loads: dict[Any, float] = {}
        for (name, id_), slot, x, f, c in events:
            key = (name, id_, slot)
            row = rows.setdefault(
                key, {"total": 0, "n": 0, "known": 0, "low": None, "high": None, "load": 0.0, "cost": Decimal(0)}
            )
            row["n"] += 1
            if x is not None:
                row["total"], row["known"] = row["total"] + x, row["known"] + 1
                row["low"] = x if row["low"] is None else min(x, row["low"])
            if f is not None:
                row["high"] = f if row["high"] is None else max(f, row["high"])
            row["cost"] = row["cost"] + (c or 0)
            loads[key] = loads.get(key, 0.0) + (f or 0.0)
        for key, load in loads.items():
            rows[key]["load"] += load
    return rows


def check_replay(snap: Snapshot, commits: list[list[Any]], chosen: dict[str, int]) -> None:
    expected = sorted((tuple(key), row) for key, row in replayed(commits).items())
    for name in ("total", "n", "known", "low", "high", "load", "cost"):
        values = [row[name] for _, row in expected]
        beyond = any(
            v is not None
            and (not math.isfinite(v) if name in ("high", "load") else name == "total" and abs(v) >= 2**63)
            for v in values
        ) or (name == "cost" and any(abs(v) >= 10**15 for v in values))
        if name == "total" and any(v == -(2**63) for v in values):
            continue
        with sizes(**chosen):
            if beyond:
                with pytest.raises(OutOfRange):
                    snap.to_arrow("agg", columns=[name])
                continue
            found = snap.to_arrow("agg", columns=["name", "id", name]).to_pylist()
        assert [(row["name"], row["id"]) for row in found] == [key[:2] for key, _ in expected]
        assert list(map(repr, (row[name] for row in found))) == list(map(repr, values)) or name == "cost"
        if name == "cost":
            assert [row[name] for row in found] == values


WHERE = st.sampled_from(
    [
        kivi.col("n") > 1,
        kivi.col("low").is_null(),
        ~(kivi.col("low") < 0) & (kivi.col("id") >= 0),
        (kivi.col("mean") > 0.5) | kivi.col("name").isin(["a", "b"]),
        kivi.col("total") > 2**62,
        (kivi.col("cost") >= Decimal("0.5")) | (kivi.col("high") < 0.3),
        kivi.col("slot") == 1000,
        kivi.col("n") < 0,
    ]
)
COLUMNS = st.none() | st.lists(
    st.sampled_from(["name", "id", "slot", *MEASURES, *DERIVED]), min_size=1, max_size=5, unique=True
)
RANGES: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {}, {"prefix": ("a",)}, {"start": ("a", 0), "end": ("b",)}, {"prefix": ("a", 1)}, {"start": ("b",)}]
)


@pytest.mark.story
@pytest.mark.timeout(300)
@given(STEPS, SIZES, st.data())
@settings(suppress_health_check=list(HealthCheck))
def test_columns_answer_what_rows_do(steps: list[Any], chosen: dict[str, int], data: st.DataObject) -> None:
    db = opened()
    try:
        with patch.object(transactions, "SMALL_EVENTS", 3):
            run(db, steps, chosen, data)
    finally:
        db.store.crash()


def run(db: Database, steps: list[Any], chosen: dict[str, int], data: st.DataObject) -> None:
    commits: list[list[Any]] = []
    seen: list[tuple[Snapshot, int]] = []
    for step, what in steps:
        match step:
            case "append":
                with suppress(OutOfRange):  # one commit's floats leave the finite numbers
                    append(db, what)
                    commits.append(what)
            case "rows":
                with suppress(OutOfRange):
                    write(db, what)
            case "fold":
                db.consolidate()
            case "light":
                db.store.consolidator.run_light()
            case _:
                seen.append((db.snapshot(), len(commits)))
    seen.append((db.snapshot(), len(commits)))
    wanted: dict[str, Any] = {"columns": data.draw(COLUMNS), "where": data.draw(st.none() | WHERE)}
    wanted |= {"limit": data.draw(st.none() | st.integers(0, 12)), **data.draw(RANGES)}
    row_where = data.draw(st.sampled_from([None, kivi.col("n") > 0, kivi.col("v").is_null()]))
    for snap, count in seen:
        both(snap, "agg", chosen, **wanted)
        check_replay(snap, commits[:count], chosen)
        both(snap, "exact", chosen, columns=["id", "total", "last"])
        both(snap, "exact", chosen)
        both(snap, "t", chosen, where=row_where, limit=wanted["limit"])
        both(snap, "t", chosen, columns=["f"], start=(2,), end=(8,))
        reverse, limit = data.draw(st.booleans()), data.draw(st.integers(0, 24))
        few(snap, "agg", limit=limit, reverse=reverse, columns=wanted["columns"])
        few(snap, "exact", limit=limit, reverse=reverse)
        few(snap, "exact", limit=limit, reverse=reverse, columns=["n", "mean", "id"], start=(-1,), end=(2,))
        few(snap, "t", limit=limit, reverse=reverse)
        few(snap, "t", limit=limit, reverse=reverse, columns=["n", "ok"])


ACCOUNTS = {
    "n": kivi.sum("int64"),
    "c": kivi.sum("decimal(5,2)"),
    "f": kivi.sum("float64"),
    "hi": kivi.max("int64"),
    "at": kivi.max("timestamp"),
}
WHOLE = st.fixed_dictionaries(
    {
        "n": st.integers(-3, 3) | st.sampled_from([BIG, -BIG]),
        "c": st.sampled_from([Decimal("0.01"), Decimal("-7"), Decimal("999.99")]),
        "f": st.sampled_from([0.1, -1.5, 1.7e308]),
        "hi": st.integers(-3, 3),
        "at": st.sampled_from([0, 1_700_000_000_000_000, MOMENT_MAX_US, MOMENT_MIN_US]),
    }
)
CHANGES = st.lists(
    st.tuples(st.sampled_from(["delta", "delta", "delta", "delete"]), st.integers(-4, 4), WHOLE), min_size=1, max_size=4
)


@given(
    st.lists(st.tuples(st.sampled_from(["write", "write", "fold", "snapshot"]), CHANGES), max_size=12),
    st.integers(0, 10),
    st.booleans(),
    st.sampled_from([None, ["n"], ["id", "hi"], ["c", "id"], ["f", "n"], ["at"]]),
)
@settings(suppress_health_check=list(HealthCheck))
def test_the_first_rows_are_those_of_a_scan(
    steps: list[Any], limit: int, reverse: bool, columns: list[str] | None
) -> None:
    """Rows without nulls, which are read as they are stored, and whatever else may be true of them."""
    db = Database(Store.open(None, settings=Settings.of({"background": False})))
    try:
        db.create_table("t", key={"id": "int64"}, columns=ACCOUNTS)
        seen = []
        for step, changes in steps:
            if step == "fold":
                db.consolidate()
            elif step == "snapshot":
                seen.append(db.snapshot())
            else:
                with suppress(OutOfRange), db.transaction() as tx:
                    for kind, key, values in changes:
                        tx.delete("t", (key,)) if kind == "delete" else tx.delta("t", (key,), **values)
        for snap in [*seen, db.snapshot()]:
            few(snap, "t", limit=limit, reverse=reverse, columns=columns)
            few(snap, "t", limit=limit, reverse=reverse, columns=columns, start=(-2,), end=(3,))
            keys = [(key,) for key in range(-4, 5)]
            assert each(snap, keys, columns) == got(snap, keys, columns)
    finally:
        db.store.crash()


def each(snap: Snapshot, keys: list[Any], columns: list[str] | None) -> Any:
    store = snap._db.store
    plan = store.get_plan(store.table("t"), columns)
    assert plan is not None
    try:
        missing, values = store.get_each(plan, [(snap._lease, plan.key(key)) for key in keys])  # type: ignore[misc]
        if values:
            column_writer(plan.schema, plan.columns)(session_pb2.GetReply().columns, values)
        rows = zip(*values, strict=True)
        return [repr(None if i in missing else next(rows)) for i in range(len(keys))]
    except KiviError as error:
        return type(error).__name__


def got(snap: Snapshot, keys: list[Any], columns: list[str] | None) -> Any:
    store = snap._db.store
    try:
        found = store.get(snap._lease, store.table("t"), keys, columns)
        return [repr(None if row is None else tuple(row.values())) for row in found]
    except KiviError as error:
        return type(error).__name__


# -- one by one -------------------------------------------------------------------------------------

SMALL = {"FEW_ROWS": 0, "BATCH_ROWS": 4, "COLUMNS_ROWS": 3, "_CHUNK_ROWS": 2}


def event(id_: int, x: int | None = 1, f: float | None = 0.5) -> Any:
    return (("a", id_), 0, x, f, None)


@pytest.fixture(name="db")
def _db() -> Iterator[Database]:
    db = opened()
    yield db
    db.store.crash()


def test_a_sum_beyond_its_type_is_out_of_range_only_where_it_is_asked_for(db: Database) -> None:
    """R10."""
    append(db, [event(i, BIG) for i in range(10)])
    append(db, [event(7, BIG)])
    db.consolidate()
    with db.snapshot() as snap, sizes(**SMALL):
        assert snap.to_arrow("exact", columns=["n"])["n"].to_pylist() == [1] * 7 + [2] + [1] * 2
        with pytest.raises(OutOfRange, match=str(2 * BIG)) as raised:
            snap.to_arrow("exact", columns=["id", "total"])
        assert raised.value.details["column"] == "total"
        inside = snap.to_arrow("exact", columns=["id", "total"], where=kivi.col("id") < 7)
        assert inside["total"].to_pylist() == [BIG] * 7
        beyond = snap.to_arrow("exact", columns=["id"], where=kivi.col("total") > BIG)
        assert beyond["id"].to_pylist() == [7]
        assert snap.to_arrow("exact", columns=["total"], limit=7)["total"].to_pylist() == [BIG] * 7


def test_rows_that_only_pending_has_come_in_portions(db: Database) -> None:
    """Nothing in base: the runs alone are as long as a table may be."""
    for at in range(4):
        append(db, [event(i) for i in range(at, 400, 2)])
    with db.snapshot() as snap, sizes(**SMALL | {"COLUMNS_ROWS": 16}):
        lengths = [
            len(portion.rows)
            for portion in db.store.reader.scan_portions(
                snap._lease, db.store.table("exact"), None, None, few=0, first_rows=8, rows=16
            )
            if isinstance(portion, FixedRows)
        ]
        assert sum(lengths) == 400 and max(lengths) <= 2 * 16
        assert snap.to_arrow("exact", columns=["id", "n"]).to_pylist() == [
            {"id": i, "n": len([at for at in range(4) if i >= at and (i - at) % 2 == 0])} for i in range(400)
        ]


def test_base_between_pending_rows_is_cut_where_they_are(db: Database) -> None:
    append(db, [event(i) for i in (100, 200, 300, 1_000)])
    db.consolidate()
    append(db, [event(i) for i in range(0, 600, 3)])
    with db.snapshot() as snap:
        kind, (_, rows) = both(snap, "exact", SMALL, columns=["id", "n"])
    assert kind == "rows" and len(rows) == 203


def test_a_damaged_row_is_data_loss(db: Database) -> None:
    append(db, [event(i) for i in range(10)])
    db.consolidate()
    schema = db.store.table("exact")
    raw = next(iter(db.store.engine.scan(row_key(schema.id, b""), None)))[0]
    batch = WriteBatch()
    batch.put(raw, b"too short for a row")
    db.store.engine.write(batch)
    with db.snapshot() as snap, sizes(**SMALL), pytest.raises(DataLoss, match="kivi verify"):
        snap.to_arrow("exact")


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("key", ["int64", "string"])
@pytest.mark.parametrize("by", [-26, -1, 1, 26])
def test_rows_of_another_width_are_data_loss_wherever_they_are_read(
    db: Database, key: str, by: int, few: bool, tmp_path: Path
) -> None:
    """By a scan, in columns or a few, and by consolidation, which else would fold deltas over nothing. One row is as
    much too long as another is too short."""
    for name, store in (("memory", db), ("disk", kivi.open(tmp_path / "data", background=False))):
        store.create_event_table("odd", event_time="ts", columns={"ts": "timestamp", "k": key})
        store.create_aggregate("by_k", source="odd", group_by=["k"], measures={"n": kivi.count()})
        count = 10 if few else 3_000
        events = [{"ts": i, "k": i if key == "int64" else f"{i:05}"} for i in range(count)]
        store.append("odd", events)
        store.consolidate()
        inside = store.store
        prefix = table_prefix(Space.ROW, inside.table("by_k").id)
        rows = list(inside.engine.scan(prefix, prefix_end(prefix)))
        batch = WriteBatch()
        for at, more in ((count // 3, by), (count // 3 + 5, -by)):
            batch.put(rows[at][0], (rows[at][1] + bytes(26))[: len(rows[at][1]) + more])
        inside.engine.write(batch)
        for read in (
            lambda store=store: store.snapshot().to_arrow("by_k"),
            lambda store=store: list(store.snapshot().scan("by_k")),
        ):
            with pytest.raises(DataLoss, match="kivi verify"):
                read()
        store.append("odd", events)
        with pytest.raises(DataLoss, match="kivi verify"):
            store.consolidate()
        assert [inside.engine.get(damaged) for damaged, _ in batch] == [data for _, data in batch], name
        with suppress(DataLoss):
            store.close()


def test_a_snapshot_that_ends_during_a_scan_is_noticed(db: Database) -> None:
    """R15, and nothing is returned that was read after the end."""
    append(db, [event(i) for i in range(40)])
    db.consolidate()
    snap = db.snapshot()
    with sizes(**SMALL):
        batches = snap.scan_batches("exact")
        next(batches)
        snap.close()
        with pytest.raises(SnapshotTooOld):
            for _ in range(2):
                next(batches)


def test_a_table_that_is_dropped_during_a_scan_is_noticed(db: Database) -> None:
    append(db, [event(i) for i in range(40)])
    db.consolidate()
    with db.snapshot() as snap, sizes(**SMALL):
        batches = snap.scan_batches("exact")
        next(batches)
        db.drop("exact")
        with pytest.raises(NotFound):
            list(batches)


def test_a_scan_in_columns_is_of_its_snapshot_while_commits_and_folds_go_on(db: Database) -> None:
    """R1: portions that are read later see rows that were folded above S in their older versions."""
    append(db, [event(i) for i in range(60)])
    for folded in (True, False):
        if folded:
            db.consolidate()
        with db.snapshot() as snap, sizes(**SMALL):
            expected = snap.to_arrow("exact", columns=["id", "n", "total"])
            batches = snap.scan_batches("exact", columns=["id", "n", "total"])
            parts = []
            for number, part in enumerate(batches):
                parts.append(part)
                append(db, [event(i) for i in range(number, 60, 2)])
                if number % 2:
                    db.consolidate()
            assert pa.Table.from_batches(parts).equals(expected)


def test_batches_are_gathered(db: Database) -> None:
    """A predicate that selects few rows does not make a batch of each portion."""
    append(db, [event(i) for i in range(300)])
    db.consolidate()
    with db.snapshot() as snap, sizes(FEW_ROWS=2, BATCH_ROWS=20, COLUMNS_ROWS=10, _CHUNK_ROWS=5):
        few = list(snap.scan_batches("exact", where=kivi.col("id").isin(list(range(0, 300, 7)))))
        assert len(few) == 3 and sum(batch.num_rows for batch in few) == 43
        whole = list(snap.scan_batches("exact"))
        assert whole[0].num_rows == 20 and sum(batch.num_rows for batch in whole) == 300
