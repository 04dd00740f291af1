"""Measures (R20) on the command line: declared, shown, and verified against their events, damaged states included."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.cli.commands import main
from kivi.cli.offline import examine
from kivi.encoding.base_rows import RowLayout, Version
from kivi.encoding.keyspaces import row_key
from kivi.engine import WriteBatch
from kivi.errors import DataLoss, InvalidArgument, SchemaError
from kivi.model.measure_text import operator_call
from kivi.model.schema import TableSchema
from kivi.runtime.settings import Settings
from kivi.store.facade import Store
from tests.serverproc import ServerProcess

col = kivi.col
COLUMNS = {"g": "int64", "ts": "timestamp", "x": "int64", "f": "float64", "status": "int64", "route": "string"}
TYPES = {**COLUMNS, "price": "decimal(9,2)"}


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("count", kivi.count()),
        ("count:x", kivi.count("x")),
        ("count where status >= 500", kivi.count(where=col("status") >= 500)),
        ("sum:x * price", kivi.sum(col("x") * col("price"))),
        ("sum:x * 2 where route == 'a where b'", kivi.sum(col("x") * 2, where=col("route") == "a where b")),
        ("quantiles:x", kivi.quantiles("x")),
        ("quantiles:x:accuracy=0.05 where status < 500", kivi.quantiles("x", 0.05, where=col("status") < 500)),
        ("distinct:route:error=0.02", kivi.distinct("route", error=0.02)),
        ("var:x:population=true", kivi.var("x", population=True)),
        ("argmax:route:by=x", kivi.argmax("route", by="x")),
        ("largest:x:n=3", kivi.largest("x", 3)),
        ("largest(x, 3)", kivi.largest("x", 3)),
        ("argmax(route, x) where status >= 500", kivi.argmax("route", "x", where=col("status") >= 500)),
        ("top(route, 5, most=50)", kivi.top("route", 5, most=50)),
        ("top:route:k=5:most=50", kivi.top("route", 5, most=50)),
        ("combine:latency", kivi.combine("latency")),
        ("geometric_mean:x", kivi.measure("geometric_mean", "x")),
    ],
)
def test_a_measure_as_text(text: str, call: Any) -> None:
    assert str(operator_call("m", text, TYPES)) == str(call)
    assert operator_call("m", text, TYPES).as_measure("m") == call.as_measure("m")


@pytest.mark.parametrize(
    "text", ["sum", "top:route", "quantiles:x:y=1", "sum:x:x", "largest(x, 3, 4)", "count where", "sum:x +"]
)
def test_what_is_no_measure_is_refused(text: str) -> None:
    with pytest.raises((InvalidArgument, SchemaError)):
        call = operator_call("m", text, TYPES)
        with kivi.open() as db:
            db.create_event_table("e", event_time="ts", columns=COLUMNS)
            db.create_aggregate("a", "e", ["g"], {"m": call})


def test_measures_are_declared_described_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ServerProcess(tmp_path / "data") as server:
        with server.connect() as db:
            db.create_event_table("ev", event_time="ts", columns=COLUMNS)
            db.append(
                "ev", [{"g": i % 2, "ts": i, "x": i, "status": 200 + i, "route": f"/{i % 3}"} for i in range(100)]
            )

        def cli(*words: Any) -> str:
            assert main(["--endpoint", server.endpoint, *map(str, words)]) == 0
            return capsys.readouterr().out

        cli(
            "aggregate", "agg", "ev", "--by", "g",
            "n=count", "late=count where status >= 250", "latency=quantiles:x:accuracy=0.01", "mean=avg:x",
            "worst=largest:x:n=2", "routes=top:route:k=2:most=2", "last_route=argmax:route:by=x",
            "--derived", "p90=quantile(latency, 0.9)",
        )  # fmt: skip
        shown = cli("describe", "agg")
        for text in ("quantiles(x, accuracy=0.01)", "count(where=(status >= 250))", "top(route, k=2, most=2)"):
            assert text in shown
        row = json.loads(cli("get", "agg", 1, "-o", "json"))
        assert row["latency"] == {"count": 50, "p50": pytest.approx(49, 0.01), "p95": pytest.approx(95, 0.01), "p99": pytest.approx(99, 0.01)}  # fmt: skip  # noqa: E501
        assert (row["n"], row["late"], row["mean"], row["worst"], row["last_route"]) == (50, 25, 50.0, [99, 97], "/0")
        assert len(row["routes"]) == 3
        assert row["routes"][2][0] is None  # others: there is a route more than are counted
        assert sum(count for _, count in row["routes"]) == 50
        line = cli("scan", "agg", "--columns", "latency,worst", "--limit", 1).splitlines()[2]
        assert line.startswith("count=50 p50=") and line.endswith("[98, 96]")
        found = cli("scan", "agg", "--where", "quantile(latency, 0.5) > 1 & g == 1", "--columns", "g,quantile(latency, 1)", "-o", "csv")  # fmt: skip  # noqa: E501
        header, values = found.splitlines()
        assert header == 'g,"quantile(latency, 1)"'
        assert values.startswith("1,")
        rolled = cli("rollup", "agg", "--columns", "n,quantile(latency, 1)", "-o", "csv").splitlines()
        assert rolled[0] == 'n,"quantile(latency, 1)"'
        assert rolled[1].startswith("100,")
        asked = cli(
            "query", "ev", "--measure", "n=count where status >= 210", "--measure", "latency=quantiles:x:accuracy=0.01",
            "--by", "g", "--by", "high=x > 50", "--where", "x < 90", "--derived", "p=quantile(latency, 1)",
            "--having", "n > 5 & high", "--order-by=-g", "--columns", "g,high,n", "-o", "csv",
        )  # fmt: skip
        assert asked.splitlines() == ["g,high,n", "1,true,20", "0,true,19"]
        windows = cli(
            "query", "ev", "--measure", "n=count", "--size", "40us", "--slide", "20us", "--limit", 2, "-o", "json"
        )
        assert [json.loads(line)["n"] for line in windows.splitlines()] == [20, 40]
        slots = cli(
            "query", "ev", "--measure", "n=count", "--by", "s=ts/50us", "--where", "_commit_ts > 0", "-o", "csv"
        )
        assert [line.split(",")[1] for line in slots.splitlines()] == ["n", "50", "50"]
        assert "25" in cli("query", "agg", "--measure", "late=combine:late", "--by", "g", "--having", "late > 0")
        assert json.loads(cli("query", "agg", "-o", "json"))["n"] == 100
        sessions = cli(
            "query", "ev", "--measure", "n=count", "--session", "5us", "--where", "x < 10 | x > 80", "-o", "csv"
        )
        assert [line.split(",")[2] for line in sessions.splitlines()] == ["n", "10", "19"]
        ordered = cli("scan", "ev", "--order-by=-x", "--offset", 1, "--limit", 2, "--columns", "x", "-o", "csv")
        assert ordered.split() == ["x", "98", "97"]


# -- verify -------------------------------------------------------------------------------------------------

MEASURES = {
    "n": kivi.count(where=col("status") >= 500),
    "cost": kivi.sum(col("x") * col("status")),
    "load": kivi.sum(col("f") * 2, where=col("x") > 3),
    "latency": kivi.quantiles("x"),
    "users": kivi.distinct("route"),
    "mean": kivi.avg("x"),
    "mean_f": kivi.avg("f"),
    "spread_f": kivi.stddev("f"),
    "first": kivi.first("route"),
    "slowest": kivi.argmax("route", by="x"),
    "worst": kivi.largest("x", 3),
    "routes": kivi.top("route", 2, most=5),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Some commits, consolidated, and some that pend in the log."""
    chance = random.Random(1)
    path = tmp_path / "data"
    with kivi.open(path) as db:
        db.create_event_table("ev", event_time="ts", columns=COLUMNS)
        db.create_aggregate("agg", "ev", ["g"], MEASURES)
        for commit in range(4):
            rows = [
                {
                    "g": chance.randrange(3),
                    "ts": chance.randrange(50),
                    "x": chance.choice([None, chance.randrange(-5, 1_000)]),
                    "f": chance.choice([None, chance.lognormvariate(0, 30)]),
                    "status": chance.choice([200, 500]),
                    "route": f"/{chance.randrange(9)}",
                }
                for _ in range(60)
            ]
            db.append("ev", rows)
            if commit == 2:
                db.consolidate()
        db.consolidate()
    return path


@contextlib.contextmanager
def opened(data: Path) -> Iterator[tuple[Store, TableSchema, list[tuple[bytes, Version]]]]:
    """The store, the aggregate, and its rows as they are stored."""
    store = Store.open(str(data), settings=Settings(background=False))
    try:
        schema, lease = store.table("agg"), store.begin()
        rows = list(store.reader.scan(lease, schema, None, None))
        store.release(lease)
        yield store, schema, rows
        store.engine.flush()
    finally:
        store.close()


def test_verify_recounts_every_measure(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(str(data))["agg"] == "3 rows, equal to a recount of the events"
    assert main(["dump", str(data)]) == 0
    out = capsys.readouterr().out
    assert "latency=Quantiles(count=" in out
    assert "routes=Top([" in out
    assert "damaged" not in out


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("n", lambda n: n + 1),
        ("cost", lambda n: n - 1),
        ("load", lambda f: f * 1.000001),
        ("latency", lambda state: state[:1] + bytes([state[1] + 2]) + state[2:]),
        ("users", lambda state: state[:-1]),
        ("mean", lambda state: b"\x02" * len(state)),
        ("mean_f", lambda state: bytes([state[0] ^ 1]) + state[1:]),
        ("spread_f", lambda state: state[:-1] + bytes([state[-1] ^ 1])),
        ("first", lambda state: state[:-1] + b"x"),
        ("worst", lambda _: b""),
        ("routes", lambda state: state[:-1] + b"x"),
    ],
)
def test_verify_finds_a_damaged_state(data: Path, name: str, change: Callable[[Any], Any]) -> None:
    with opened(data) as (store, schema, rows):
        key, version = rows[0]
        cells, at = list(version.cells), schema.index_of[name]
        cells[at] = change(cells[at])
        assert cells[at] != version.cells[at]
        batch = WriteBatch()
        batch.put(row_key(schema.id, key), RowLayout.of(schema).encode(version._replace(cells=tuple(cells))))
        store.engine.write(batch)
    message = rf"aggregate 'agg' has {name}=.* in agg\(0\), and its events give |table 'agg' cannot be read: "
    with pytest.raises(DataLoss, match=message):
        examine(str(data))


@pytest.mark.parametrize("lost", [True, False])
def test_verify_finds_rows_that_are_lost_or_of_no_event(data: Path, lost: bool) -> None:
    with opened(data) as (store, schema, rows):
        key, version = rows[0] if lost else (rows[-1][0][:-1] + b"\x07", rows[-1][1])
        batch = WriteBatch()
        if lost:
            batch.delete(row_key(schema.id, key))
        else:
            batch.put(row_key(schema.id, key), RowLayout.of(schema).encode(version))
        store.engine.write(batch)
    message = r"agg\(0\), which its events give, is not there" if lost else r"agg\(7\), which none of its events gives"
    with pytest.raises(DataLoss, match=message):
        examine(str(data))


def test_verify_of_aggregates_over_aggregates_and_of_what_was_backfilled(tmp_path: Path) -> None:
    path = tmp_path / "levels"
    with kivi.open(path) as db:
        db.create_event_table("ev", event_time="ts", columns=COLUMNS)
        db.append("ev", [{"g": i % 3, "ts": i * 10**9, "x": i, "f": i / 3, "route": f"/{i}"} for i in range(50)])
        db.create_aggregate("fine", "ev", ["g", kivi.time_slot("ts", "1h")], MEASURES)
        db.create_aggregate(
            "coarse", "fine", [kivi.time_slot("slot", "1d", name="day")],
            {name: kivi.combine(name) for name in ("latency", "mean", "slowest", "load")},
        )  # fmt: skip
        db.append("ev", [{"g": i % 3, "ts": i * 10**9, "x": i, "f": i / 3, "route": f"/{i}"} for i in range(50)])
    report = examine(str(path))
    assert report["fine"].endswith("equal to a recount of the events")
    assert report["coarse"].endswith("equal to a recount of the events")
