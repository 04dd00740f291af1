"""What is read at a snapshot goes by the definitions that it sees, whatever was altered since: every way to read, over
every alteration, through every database. A new method that reads has to be named here, or the first test fails.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pyarrow as pa
import pytest

import kivi
import kivi.aio
from kivi.api import interface
from kivi.errors import InvalidArgument, SchemaError, SnapshotTooOld
from tests.seeds import AT_NIGHT, stories
from tests.waiting import PATIENCE_S

MINUTE = 60_000_000
TABLES = ("t", "e", "agg", "v")
MEASURES = {"n": kivi.count(), "sx": kivi.sum("x"), "p": kivi.quantiles("x")}
RISING = kivi.pattern(
    "A B+",
    partition_by=["a"],
    within="20m",
    define={"B": kivi.col("x") > kivi.prev("x")},
    measures={"began": kivi.first("A.ts"), "most": kivi.max("x"), "rows": kivi.count()},
)
SLOWER = ("slower", kivi.col("x") > 50)


def filled(db: Any) -> None:
    db.create_table("t", key={"id": "int64"}, columns={"v": "string", "n": kivi.sum("int64")}, history="1d")
    db.create_view("v", source="t", key=["v", "id"])
    db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "a": "int64", "x": "int64"})
    db.create_aggregate(
        "agg",
        source="e",
        group_by=["a", kivi.time_slot("ts", "5m", name="slot")],
        measures={"n": kivi.count(), "p": kivi.quantiles("x")},
        derived={"p50": "quantile(p, 0.5)"},
        history="1d",
    )
    written(db, 100)
    db.consolidate()
    written(db, 7)


def written(db: Any, count: int, **more: Any) -> None:
    with db.transaction() as tx:
        for i in range(0, count, 5):
            tx.put("t", (i,), v=f"v{i % 3}")
            tx.delta("t", (i,), n=i)
        tx.append("e", [{"ts": i * MINUTE, "a": i % 3, "x": i} | more for i in range(count)])


# -- every way to read ----------------------------------------------------------------------------------------------


def listed(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Rows with their columns in order; the order of rows is not what this is about."""
    return sorted(repr([*row.items()]) for row in rows)


def table(found: pa.Table) -> tuple[str, list[str]]:
    return str(found.schema.remove_metadata()), listed(found.to_pylist())


def batches(found: Iterable[pa.RecordBatch]) -> tuple[str, list[str]]:
    return table(pa.Table.from_batches(found))


def off_the_loop(db: Any, work: Callable[[], Any]) -> Any:
    """Of the client for asyncio the loop runs meanwhile, as it does in a program."""
    return db._loop.run_until_complete(asyncio.to_thread(work)) if hasattr(db, "_loop") else work()


def related(db: Any, snap: Any) -> list[Any]:
    import duckdb

    with duckdb.connect() as connection:
        relations = [snap.relation(name, connection) for name in TABLES]
        return [
            (relation.columns, listed({"row": row} for row in off_the_loop(db, relation.fetchall)))
            for relation in relations
        ]


READERS: dict[str, Callable[[Any, Any], list[Any]]] = {
    "get": lambda db, snap: [
        listed(filter(None, [snap.get("t", (5,)), snap.get("agg", (1, 0)), snap.get("v", ("v2", 5))])),
        listed([snap.get("agg", (1, 0), columns=["p50", "n", "quantile(p, 0.9)"])]),
    ],
    "get_many": lambda db, snap: [
        listed(snap.get_many("t", [(i,) for i in range(0, 20, 5)])),
        listed(snap.get_many("agg", [(a, 0) for a in range(3)])),
    ],
    "scan": lambda db, snap: [
        *(listed(snap.scan(name)) for name in TABLES),
        *(listed(snap.scan(name, limit=3)) for name in TABLES),
        *(listed(snap.scan(name, limit=3, reverse=True)) for name in TABLES),
        listed(snap.scan("t", where=kivi.col("n") > 20, order_by="-n", offset=1)),
        listed(snap.scan("agg", where=kivi.col("p50") > 20, order_by="-p50", limit=4)),
        listed(snap.scan("e", where=kivi.col("x") > 20, order_by="-x", limit=4)),
        listed(snap.scan("e", columns=["x", "_commit_ts"], where=kivi.col("_commit_ts") > 0)),
        listed(snap.scan("e", columns=["x"], order_by="-_commit_time", limit=4)),
    ],
    "scan_batches": lambda db, snap: [
        *(batches(snap.scan_batches(name)) for name in TABLES),
        batches(snap.scan_batches("e", any_order=True)),
        batches(snap.scan_batches("e", columns=["_commit_ts", "a"], any_order=True)),
    ],
    "summary": lambda db, snap: [listed([snap.summary("e", {"n": kivi.count(), "most": kivi.max("x")})])],
    "to_arrow": lambda db, snap: [
        *(table(snap.to_arrow(name)) for name in TABLES),
        *(table(snap.to_arrow(name, where=kivi.col("n") < -1)) for name in ("t", "agg")),
        table(snap.to_arrow("e", columns=["a", "_commit_ts"], order_by="x")),
    ],
    "to_pandas": lambda db, snap: [
        (str(found.dtypes), listed(found.to_dict("records"))) for found in map(snap.to_pandas, ("t", "e", "agg"))
    ],
    "to_polars": lambda db, snap: [
        (str(found.schema), listed(found.to_dicts())) for found in map(snap.to_polars, ("t", "e", "agg"))
    ],
    "rollup": lambda db, snap: [
        table(found.to_arrow())
        for found in (
            snap.rollup("agg"),
            snap.rollup("agg", by=["a"], step="1h"),
            snap.rollup("agg", by=["a"], last="1h", where=kivi.col("p50") > 1),
            snap.rollup("agg", measures=["p50"]),
        )
    ],
    "query": lambda db, snap: [
        table(found.to_arrow())
        for found in (
            snap.query("e", measures=MEASURES),
            snap.query("e", measures=MEASURES, group_by=["a", kivi.time_slot("ts", "5m"), SLOWER]),
            snap.query("e", measures={"n": kivi.count()}, group_by=["a", "_commit_ts"], order_by="-n"),
            snap.query("e", measures={"n": kivi.count(), "last": kivi.last("x")}, where=kivi.col("_commit_ts") > 1),
            snap.query("agg"),
            snap.query("agg", group_by=["a", kivi.time_slot("slot", "1h")], having=kivi.col("p50") > 1),
            snap.query("agg", group_by=["a"], measures={"n": kivi.combine("n")}, where=kivi.col("n") > 1),
        )
    ],
    "match": lambda db, snap: [
        table(found.to_arrow())
        for found in (
            snap.match("e", RISING),
            snap.match("e", RISING, start=0, end=60 * MINUTE, where=kivi.col("x") > 3, limit=3),
        )
    ],
    "windows": lambda db, snap: [
        table(found.to_arrow())
        for found in (
            snap.windows("e", size="10m", slide="5m", group_by=["a"], measures=MEASURES),
            snap.windows("e", session="2m", group_by=[SLOWER], measures=MEASURES),
            snap.windows("agg", size="1h"),
            snap.windows("agg", size="10m", slide="5m", group_by=["a"]),
        )
    ],
    "sql": lambda db, snap: [
        *(table(snap.sql(f"select * from {name}")) for name in ("t", "e join v on e.x = v.id")),
        table(snap.sql("select a, slot, n, p50, quantile(p, 0.9) from agg")),
        table(snap.sql("select *, _commit_ts from e where x > 3")),
        table(snap.sql("select table_name, column_name from information_schema.columns")),
    ],
    "dataset": lambda db, snap: [
        *((str(snap.dataset(name).schema), table(off_the_loop(db, snap.dataset(name).to_table))) for name in TABLES),
        table(off_the_loop(db, snap.dataset("e", commits=True).to_table)),
    ],
    "relation": related,
    "changes": lambda db, snap: [
        listed(snap.changes(name, since=since)) for name in ("e", "agg") for since in (0, snap.ts - 1)
    ],
    "change_batches": lambda db, snap: [
        *(batches(snap.change_batches(name, since=0)) for name in ("e", "agg")),
        batches(snap.change_batches("e", since=0, retractions="deliver")),
    ],
}


def answers(db: Any, reads: Any) -> dict[str, list[Any]]:
    """By way to read, as far as ``reads`` has it: a transaction does not have all."""
    has = kivi.aio.database._Reads if isinstance(reads, interface.Transaction) else type(reads)
    if hasattr(reads, "_target"):
        has = type(reads._target)
    return {name: read(db, reads) for name, read in READERS.items() if hasattr(has, name)}


def changed(db: Any, reads: Any, before: dict[str, list[Any]]) -> dict[str, Any]:
    """The answers that are not as before, or the errors in their place."""
    out: dict[str, Any] = {}
    for name, known in before.items():
        try:
            found: Any = READERS[name](db, reads)
        except Exception as error:
            found = error
        if found != known:
            out[name] = found
    return out


def test_every_way_to_read_is_here() -> None:
    others = {"close", "ts", "renew", "lease", "started"}
    for snapshot in (interface.Snapshot, kivi.client.Snapshot, kivi.aio.database.Snapshot):
        public = {name for name, _ in inspect.getmembers(snapshot) if not name.startswith("_")}
        assert public - others == READERS.keys()


def test_a_snapshot_that_was_closed_says_so(db: Any) -> None:
    filled(db)
    with db.snapshot() as snap:
        snap.get("t", (5,))
    for read in READERS.values():
        with pytest.raises((SnapshotTooOld, InvalidArgument), match="closed|has ended"):
            read(db, snap)


# -- every alteration -----------------------------------------------------------------------------------------------


def overwritten(db: Any) -> None:
    for name in ("t", "e"):
        db.alter_table(name, {"w": "int64"})
    db.alter_aggregate("agg", {"sw": kivi.sum("w")})
    with db.transaction() as tx:
        tx.overwrite("e")
        tx.append("e", [{"ts": 5, "a": 7, "x": 1, "w": 5}])
    with db.transaction() as tx:
        tx.overwrite("t")
        tx.put("t", (7,), v="seven", w=8)


def every(db: Any) -> None:
    for name, alter in ALTERATIONS.items():
        if name not in ("all of them", "columns, and then other contents"):
            alter(db)
            written(db, 12)


ALTERATIONS: dict[str, Callable[[Any], None]] = {
    "columns of rows": lambda db: db.alter_table("t", {"w1": "string", "w2": kivi.max("int64")}),
    "a column of events": lambda db: db.alter_table("e", {"w3": "string"}),
    "a measure, also of events of before": lambda db: db.alter_aggregate(
        "agg", {"sx": kivi.sum("x")}, derived={"avg": "sx / n"}
    ),
    "a measure of later events": lambda db: db.alter_aggregate("agg", {"m": kivi.max("x")}, backfill=False),
    "a measure with a state": lambda db: db.alter_aggregate(
        "agg", {"q": kivi.quantiles("x")}, derived={"q9": "quantile(q, 0.9)"}
    ),
    "columns, and then other contents": overwritten,
    "all of them": every,
}


# Tables are altered in all of the ways, one after the other, and with what keeps no history; by night a store is
# altered in each of the ways alone. By threads clients come to the same code as by asyncio: the other tests of this
# file go through them, too.
@pytest.mark.parametrize(
    ("alteration", "db"),
    [
        *product([*ALTERATIONS][-2:], ["memory"]),
        *stories(*product([*ALTERATIONS][-2:], ["asyncio"])),
        *(pytest.param(each, "memory", marks=pytest.mark.hypothesis) for each in [*ALTERATIONS][:-2] if AT_NIGHT),
    ],
    indirect=["db"],
)
def test_a_snapshot_answers_as_before_an_alteration(db: Any, alteration: str) -> None:
    pytest.importorskip("duckdb"), pytest.importorskip("polars"), pytest.importorskip("pandas")
    filled(db)
    with db.snapshot() as snap:
        before = answers(db, snap)
        ALTERATIONS[alteration](db)
        written(db, 23)
        for step in (lambda: None, db.consolidate, *([db.store.settle] if hasattr(db, "store") else [])):
            step()
            assert changed(db, snap, before) == {}
        if alteration != "columns, and then other contents":  # which keeps no history
            check_later_openings(db, snap.ts, before)
        for name in TABLES:  # those that nobody sees yet cannot be named either
            for later in {*db.describe(name)["columns"]} - {*next(iter(snap.scan(name)))}:
                with pytest.raises(SchemaError):
                    list(snap.scan(name, columns=[later]))


def check_later_openings(db: Any, ts: int, before: dict[str, list[Any]]) -> None:
    """The same moment, when the definitions of after it are known; by a client, too, that knows nothing else."""
    with db.snapshot(as_of=ts) as again:
        assert changed(db, again, before) == {}
    if hasattr(db, "endpoint"):
        with kivi.connect(db.endpoint, timeout=PATIENCE_S) as other, other.snapshot(as_of=ts) as again:
            assert changed(other, again, before) == {}


def test_a_transaction_goes_on_as_before_an_alteration(db: Any) -> None:
    filled(db)
    with db.transaction() as tx:
        before = answers(db, tx)
        assert {"get", "get_many", "scan", "scan_batches", "summary"} == before.keys()
        every(db)
        assert changed(db, tx, before) == {}
        tx.append("e", [{"ts": 5, "a": 1, "x": 1}])
        tx.delta("t", (1_001,), n=1)
        tx.put("t", (1_000,), v="new")
        assert tx.get("t", (1_000,)) == {"id": 1_000, "v": "new", "n": 0}
    with db.snapshot() as now:
        assert now.get("t", (1_000,)) == {"id": 1_000, "v": "new", "n": 0, "w1": None, "w2": None}


def test_a_subscription_goes_on_from_before_an_alteration(db: Any) -> None:
    filled(db)
    with db.snapshot() as snap:
        since, known = snap.ts, {"t": list(snap.scan("t")), "agg": list(snap.rollup("agg", by=["a"]))}
    every(db)
    more: dict[str, dict[str, Any]] = {"t": {}, "agg": {"rollup": {"by": ["a"]}}}
    for name, rows in known.items():
        asked = more[name] | {"since": since, "rows": rows, "interval_ms": 0, "heartbeat_ms": 50}
        with db.subscribe(name, **asked) as live, db.snapshot() as now:
            while live.ts < now.ts:
                live.next(timeout_s=0.05)
            assert live.rows == list(now.scan("t") if name == "t" else now.rollup("agg", by=["a"]))
