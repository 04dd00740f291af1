"""A table without Python: ``kivi create``, ``kivi drop``, ``kivi append --create``, and measures as in Python."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kivi
from kivi.cli.commands import main
from kivi.cli.create import columns_of
from kivi.errors import InvalidArgument, SchemaError
from kivi.model.measure_text import operator_call
from tests.serverproc import ROOT, ServerProcess

col = kivi.col
TYPES = {"x": "int64", "status": "int64", "route": "string", "trace_id": "string"}


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("count()", kivi.count()),
        ("kivi.sum(x)", kivi.sum("x")),
        ("sum('x')", kivi.sum("x")),
        ("sum((x + 1) * 2)", kivi.sum((col("x") + 1) * 2)),
        ("sum(coalesce(x, 0), where=route.isin)", None),
        ("count(where=status >= 500 & route in ['a, (b', 'c'])", None),
        ("count(x, where=status >= 500)", kivi.count("x", where=col("status") >= 500)),
        ("count() where route == 'a where (b'", kivi.count(where=col("route") == "a where (b")),
        ("sum(x) where status < 500", kivi.sum("x", where=col("status") < 500)),
        ("quantiles(x, accuracy=0.05)", kivi.quantiles("x", 0.05)),
        ('argmax(trace_id, by="x")', kivi.argmax("trace_id", by="x")),
        ("top(route, k=5, most=50)", kivi.top("route", 5, most=50)),
    ],
)
def test_a_measure_as_python_has_it(text: str, call: Any) -> None:
    if "isin" in text:
        with pytest.raises(InvalidArgument):
            operator_call("m", text, TYPES)
        return
    if call is None:
        call = kivi.count(where=(col("status") >= 500) & col("route").isin(["a, (b", "c"]))
    assert str(operator_call("m", text, TYPES)) == str(call)


@pytest.mark.parametrize("text", ["sum(x", "sum(x))", "sum(x) and", "sum(x, x)", "sum(x, by=x)", "()"])
def test_what_is_no_measure_is_refused(text: str) -> None:
    with pytest.raises((InvalidArgument, SchemaError)):
        operator_call("m", text, TYPES)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("create") / "data") as server:
        yield server


@pytest.fixture
def cli(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: Any, code: int = 0) -> tuple[str, str]:
        assert main(["--endpoint", server.endpoint, "-o", "json", *map(str, words)]) == code
        out = capsys.readouterr()
        return out.out, out.err

    return call


def test_tables_are_created_used_and_dropped(cli: Any) -> None:
    cli(
        "create",
        "accounts",
        "--key",
        "id",
        "id=int64",
        "name=string",
        "balance=sum(int64)",
        "peak=max:int64",
        "--history",
        "1h",
    )
    cli("delta", "accounts", 1, "balance=21", "peak=21")
    cli("delta", "accounts", 1, "balance=-1", "peak=5")
    assert json.loads(cli("get", "accounts", 1)[0]) == {"id": 1, "name": None, "balance": 20, "peak": 21}
    assert json.loads(cli("describe", "accounts")[0])["history_us"] == 3_600_000_000
    cli(
        "create",
        "calls",
        "route=string",
        "ts=timestamp",
        "us=int64",
        "--event-time",
        "ts",
        "--retention",
        "30d",
        "--index",
        "route",
    )
    found = json.loads(cli("describe", "calls")[0])
    assert (found["kind"], found["event_time"], found["retention_us"]) == ("event", "ts", 30 * 86_400_000_000)
    cli(
        "aggregate",
        "calls_5m",
        "calls",
        "total=sum(us)",
        "p=quantiles(us, accuracy=0.05)",
        "--by",
        "route",
        "--by",
        "slot=ts/5m",
    )
    assert json.loads(cli("describe", "calls_5m")[0])["measures"]["total"] == "sum(us)"
    cli("drop", "calls_5m", "--yes")
    assert "calls_5m" not in cli("tables")[0]
    for wrong, said in (
        (["t", "id=int64"], "--key"),
        (["t", "id=int64", "--key", "id", "--event-time", "id"], "--key"),
        (["t", "id=int64", "--key", "nope"], "nope"),
        (["t", "id=int46", "--key", "id"], "int46"),
        (["t", "id=int64", "id=int64", "--key", "id"], "twice"),
        (["t", "id", "--key", "id"], "name=type"),
        (["t", "id=int64", "ts=timestamp", "--key", "id", "--retention", "1d"], "--retention"),
        (["t", "id=int64", "ts=timestamp", "--event-time", "ts", "--history", "1d"], "--history"),
    ):
        _, errors = cli("create", *wrong, code=1)
        assert errors.startswith("kivi: ") and said in errors and len(errors.splitlines()) == 1
    assert json.loads(f"[{cli('tables')[0].strip().replace(chr(10), ',')}]")[0]["table"] == "accounts"


ROWS: list[dict[str, Any]] = [
    {"route": "/a", "ts": dt.datetime(2026, 1, 1, 10, 0, 0, 250_000, dt.UTC), "us": 120, "load": 0.5, "ok": True},
    {"route": None, "ts": dt.datetime(2026, 1, 1, 10, 0, 1, 0, dt.UTC), "us": 7, "load": 2.0, "ok": False},
]


def written(path: Path) -> Path:
    table = pa.Table.from_pylist(ROWS)
    match path.suffix:
        case ".csv":
            lines = [
                ",".join("" if v is None else v.isoformat() if name == "ts" else str(v) for name, v in row.items())
                for row in ROWS
            ]
            path.write_text("\n".join(["route,ts,us,load,ok", *lines, ""]))
        case ".jsonl":
            path.write_text("".join(json.dumps({**row, "ts": row["ts"].isoformat()}) + "\n" for row in ROWS))
        case ".parquet":
            pq.write_table(table, path)
        case ".arrow":
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
    return path


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet", "arrow"])
def test_a_table_is_made_for_a_file(suffix: str, cli: Any, server: ServerProcess, tmp_path: Path) -> None:
    path, name = written(tmp_path / f"calls.{suffix}"), f"calls_{suffix}"
    if suffix == "jsonl":  # of which Arrow reads the time as text
        assert "say --event-time" in cli("append", name, path, "--create", code=1)[1]
    time = ["--event-time", "ts"] * (suffix == "jsonl")
    out, said = cli("append", name, path, "--create", *time)
    assert json.loads(out)["events"] == 2
    assert (
        said.splitlines()[0]
        == f"kivi create {name} route=string ts=timestamp us=int64 load=float64 ok=bool --event-time ts"
    )
    cli("append", name, path, "--create")  # it is there by now
    with server.connect() as db, db.snapshot() as snap:
        assert [*snap.scan(name)] == ROWS * 2


def test_types_of_files(tmp_path: Path) -> None:
    table = pa.table({
        "d": pa.array([decimal.Decimal("1.50")], pa.decimal128(9, 2)), "b": [b"x"], "i": pa.array([1], pa.uint16()),
        "s": pa.array(["x"]).dictionary_encode(), "f": pa.array([0.5], pa.float32()),
        "t": pa.array([1], pa.timestamp("ns")),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet")
    types = {"d": "decimal(9,2)", "b": "bytes", "i": "int64", "s": "string", "f": "float64", "t": "timestamp"}
    assert columns_of(str(tmp_path / "a.parquet")) == types
    pq.write_table(pa.table({"x": [[1]]}), tmp_path / "b.parquet")
    with pytest.raises(SchemaError, match="'x' is list"):
        columns_of(str(tmp_path / "b.parquet"))
    for name, text in (
        ("a.csv", ""),
        ("b.csv", "a,b\n"),
        ("c.csv", "a,b\n1\n"),
        ("a.json", ""),
        ("b.json", "{"),
        ("x.arrow", "no"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(InvalidArgument, match=name):
            columns_of(str(tmp_path / name))
    (tmp_path / "big.csv").write_text("a,t\n" + "1,2026-01-01T00:00:00Z\n" * 60_000)
    assert columns_of(str(tmp_path / "big.csv")) == {"a": "int64", "t": "timestamp"}


@pytest.mark.parametrize("answer", ["n", "y"])
def test_on_a_terminal_it_asks(answer: str, server: ServerProcess, tmp_path: Path) -> None:
    path, name = written(tmp_path / "calls.csv"), f"asked_{answer}"
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kivi.cli", "--endpoint", server.endpoint, "append", name, str(path), "--create"]
    with subprocess.Popen(command, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, cwd=ROOT) as asking:
        os.close(theirs)
        shown = b""
        while b"[y/N]" not in shown:
            shown += os.read(ours, 4096)
        os.write(ours, f"{answer}\n".encode())
        assert asking.wait(60) == (answer == "n")
    os.close(ours)
    assert b"kivi create " + name.encode() in shown
    with server.connect() as db:
        assert (name in db.tables()) == (answer == "y")
