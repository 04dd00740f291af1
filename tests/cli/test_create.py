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
from kivi.cli.append import batches
from kivi.cli.commands import main
from kivi.cli.create import columns_of
from kivi.errors import InvalidArgument, SchemaError
from kivi.model.measure_text import operator_call
from tests.serverproc import ROOT, ServerProcess

col = kivi.col
BEGIN_US = 1_767_225_600_000_000  # 2026-01-01
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


@pytest.mark.parametrize(
    ("key", "said"), [("id,nope", "no column: there are id, name"), ("id,id", "the key names a column twice: id,id")]
)
def test_a_key_that_is_none_is_named(key: str, said: str, server: ServerProcess, capsys: Any) -> None:
    assert main(["--endpoint", server.endpoint, "create", "none", "--key", key, "id=int64", "name=string"]) == 1
    assert said in capsys.readouterr().err


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
    out, said = cli("append", name, path, "--create")
    assert json.loads(out)["events"] == 2
    assert (
        said.splitlines()[0]
        == f"kivi create {name} route=string ts=timestamp us=int64 load=float64 ok=bool --event-time ts"
    )
    cli("append", name, path, "--create")  # it is there by now
    with server.connect() as db, db.snapshot() as snap:
        assert [*snap.scan(name)] == ROWS * 2


@pytest.mark.parametrize(("unit", "us"), [("seconds", 1_000_000), ("milliseconds", 1_000)])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_times_in_another_unit(
    suffix: str, unit: str, us: int, cli: Any, server: ServerProcess, tmp_path: Path
) -> None:
    """Which would be of January 1970: no table is made of them, and one that is there takes none."""
    path, name = str(tmp_path / f"e.{suffix}"), f"{unit}_{suffix}"
    at = BEGIN_US // us
    if suffix == "csv":
        (tmp_path / "e.csv").write_text(f"ts,n\n{at},1\n,2\n{at + 1},3\n")
    else:
        pq.write_table(pa.table({"ts": [at, None, at + 1], "n": [1, 2, 3]}), path)
    said = cli("append", name, path, "--create", "--event-time", "ts", "--yes", code=1)[1]
    assert f"column 'ts' has {at}: that is 2026-01-01 in {unit}" in said and f"multiply by {us:,}" in said
    assert "2026-01-01T00:00:00Z" in said and "kivi create" in said
    with server.connect() as db:
        assert name not in db.tables()
    cli("create", name, "ts=timestamp", "n=int64", "--event-time", "ts")
    (tmp_path / "f.jsonl").write_text(json.dumps({"ts": at, "n": 1}) + "\n")
    for wrong in (path, tmp_path / "f.jsonl"):
        said = cli("append", name, wrong, code=1)[1]
        assert f"column 'ts' has {at}: that is 2026-01-01 in {unit}" in said and "write times as text" in said
    with server.connect() as db, db.snapshot() as snap:
        assert [*snap.scan(name)] == []
    for right in (0, 17, BEGIN_US, -at):
        (tmp_path / "f.jsonl").write_text(
            json.dumps({"ts": at, "n": 1}) + "\n" + json.dumps({"ts": right, "n": 1}) + "\n"
        )
        cli("append", name, str(tmp_path / "f.jsonl"))
    (tmp_path / "f.jsonl").write_text(json.dumps({"ts": "1970-01-01T00:20:00Z", "n": 1}))  # it can be said
    cli("append", name, str(tmp_path / "f.jsonl"))
    with server.connect() as db, db.snapshot() as snap:
        assert sum(1 for _ in snap.scan(name)) == 9


def test_times_in_another_unit_are_refused_in_every_column(cli: Any, server: ServerProcess, tmp_path: Path) -> None:
    cli("create", "orders", "ts=timestamp", "due=timestamp", "--event-time", "ts")
    path = tmp_path / "orders.csv"
    path.write_text("ts,due\n2026-01-01,1767225600\n2026-01-01,\n")
    assert "column 'due' has 1767225600: that is 2026-01-01 in seconds" in cli("append", "orders", path, code=1)[1]
    cli("create", "rows", "id=int64", "at=timestamp", "--key", "id")
    assert "column 'at' has 1767225600000" in cli("put", "rows", 1, "at=1767225600000", code=1)[1]
    assert "outside the years 1 to 9999" in cli("put", "rows", 1, "at=1767225600000000000", code=1)[1]
    assert "'at' is named twice" in cli("put", "rows", 1, "at=2026-01-01", "at=2026-01-02", code=1)[1]
    path.write_text("ts,due\n2026-01-01,1767225600000000000\n2026-01-01,\n")
    assert "line 2, column 'due' is 1767225600000000000 us, outside" in cli("append", "orders", path, code=1)[1]
    with server.connect() as db, db.snapshot() as snap:
        assert [*snap.scan("orders"), *snap.scan("rows")] == []


def test_types_of_files(tmp_path: Path) -> None:
    table = pa.table({
        "d": pa.array([decimal.Decimal("1.50")], pa.decimal128(9, 2)), "b": [b"x"], "i": pa.array([1], pa.uint16()),
        "s": pa.array(["x"]).dictionary_encode(), "f": pa.array([0.5], pa.float32()),
        "t": pa.array([1], pa.timestamp("ns")), "day": pa.array([1], pa.date32()),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet")
    types = {"d": "decimal(9,2)", "b": "bytes", "i": "int64", "s": "string", "f": "float64", "t": "timestamp"}
    types["day"] = "timestamp"
    assert columns_of(str(tmp_path / "a.parquet")) == types
    pq.write_table(pa.table({"x": [[1]]}), tmp_path / "b.parquet")
    with pytest.raises(SchemaError, match="'x' is list"):
        columns_of(str(tmp_path / "b.parquet"))
    for name, text in (
        ("a.csv", ""),
        ("b.csv", "a,b\n"),
        ("c.csv", "a,b\n1\n"),
        ("d.csv", "a,b,a\n1,2,3\n"),
        ("a.json", ""),
        ("b.json", "{"),
        ("x.arrow", "no"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(InvalidArgument, match=name):
            columns_of(str(tmp_path / name))
    (tmp_path / "big.csv").write_text("a,t\n" + "1,2026-01-01T00:00:00Z\n" * 60_000)
    assert columns_of(str(tmp_path / "big.csv")) == {"a": "int64", "t": "timestamp"}


def test_types_keep_the_digits_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "zip,uid,n,x,at\n01234,12345678901234567890,10,0.5,1767225600000000\n90210,5,0,00.5,-1\n,,,,\n"
    )
    types = {"zip": "string", "uid": "string", "n": "int64", "x": "string", "at": "int64"}
    assert columns_of(str(tmp_path / "a.csv")) == types
    (tmp_path / "b.csv").write_text("n,x\n0,0.25\n-7,123456789012345\n")
    assert columns_of(str(tmp_path / "b.csv")) == {"n": "int64", "x": "float64"}
    for line in ('{"uid": 12345678901234567890}', '{"uid": 9007199254740993}\n{"uid": 1.5}'):
        (tmp_path / "c.json").write_text(line)
        with pytest.raises(InvalidArgument, match="'uid' would be float64, which has less digits than .*as text"):
            columns_of(str(tmp_path / "c.json"))
    (tmp_path / "c.json").write_text('{"uid": 9007199254740993}')
    assert columns_of(str(tmp_path / "c.json")) == {"uid": "int64"}


@pytest.mark.parametrize(
    ("name", "many", "last", "said"),
    [
        ("a.csv", "90210,2026-01-01\n", "01234,2026-01-01\n", "'n': 01234 has more digits than int64"),
        (
            "a.csv",
            "1.5555,2026-01-01\n",
            "1234567890123456789,2026-01-01\n",
            "1234567890123456789 has more digits than fl",
        ),
        (
            "a.json",
            '{"n": 1.5555, "day": "2026-01-01"}\n',
            '{"n": 1234567890123456789, "day": "2026-01-01"}\n',
            "1234567890123456789 has more digits than float64",
        ),
    ],
)
def test_digits_that_come_late_in_a_file_are_not_lost(
    cli: Any, server: ServerProcess, tmp_path: Path, name: str, many: str, last: str, said: str
) -> None:
    """Types are told by its first megabyte."""
    head = "n,day\n" if name == "a.csv" else ""
    (tmp_path / name).write_text(head + many * (1_100_000 // len(many)) + last)
    error = cli("append", "late", str(tmp_path / name), "--create", "--event-time", "day", code=1)[1]
    assert said in error
    assert "no table was created" in error
    with server.connect() as db:
        assert "late" not in db.tables()


def test_digits_that_a_float_has_not_are_kept_as_text(tmp_path: Path) -> None:
    """Of decimals; floats themselves are written with up to 17 digits, or by C with any number of them."""
    floats = ["0.30000000000000004", "1.7976931348623157e+308", "0.10000000000000000555", "-2.2250738585072014E-308"]
    for text in floats:
        (tmp_path / "a.csv").write_text(f"x\n1.5\n{text}\n")
        assert columns_of(str(tmp_path / "a.csv")) == {"x": "float64"}
    for text in ("12345678.0123456789", "-9999999999999999.99", "0.123456789012345678", "1.2345678901234567e400"):
        (tmp_path / "a.csv").write_text(f"x\n1.5\n{text}\n")
        assert columns_of(str(tmp_path / "a.csv")) == {"x": "string"}


def test_a_cell_may_have_lines_where_types_are_told(tmp_path: Path) -> None:
    text = "x\n" * 400
    for line in (f'"{text}",1,true\n', f'"{text} ""quoted""\n",1,true\n', f'"{text * 2_000}",1,true\n'):
        (tmp_path / "a.csv").write_text("s,n,b\n" + line * (2_000 if len(line) < 10_000 else 3))
        assert columns_of(str(tmp_path / "a.csv")) == {"s": "string", "n": "int64", "b": "bool"}


TEXTS = [
    "", " ", " a ", 'say "hi"', "a,b", "line\nbreak", "cr\rhere", "crlf\r\n", "\u2028\x85", "null", "NA", "'q'", '""',
    "01234", "0x00", "2026-01-01", "\N{GRINNING FACE}", "\0", "true", '"', ",", "\n", "\ttab",
]  # fmt: skip
EVERY = {
    "ts": "timestamp", "ok": "bool", "n": "int64", "x": "float64", "cost": "decimal(12,2)", "big": "decimal(18,10)",
    "s": "string", "raw": "bytes", "at": "timestamp",
}  # fmt: skip


def every_value() -> list[dict[str, Any]]:
    decimals = [decimal.Decimal(text) for text in ("1.50", "-9999999999.99", "0")]
    bigs = [decimal.Decimal(text) for text in ("12345678.0123456789", "-0.0000000001", "0")]
    moments = [
        dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, dt.UTC),
        dt.datetime(1, 1, 1, tzinfo=dt.UTC),
        dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, dt.UTC),
    ]
    values: dict[str, list[Any]] = {
        "ok": [True, False], "n": [2**63 - 1, -(2**63), 0], "x": [-0.0, 0.1 + 0.2, 1e300, 5e-324, -1.5, 3.0, 1e22],
        "cost": decimals, "big": bigs, "s": TEXTS, "raw": [b"", b"\x00\xff", b"0x"], "at": moments,
    }  # fmt: skip
    columns = {name: [*found, None] for name, found in values.items()}
    begin = dt.datetime(1969, 12, 31, 23, 59, 59, 999_990, dt.UTC)
    return [
        {"ts": begin + dt.timedelta(microseconds=i), **{name: found[i % len(found)] for name, found in columns.items()}}
        for i in range(len(TEXTS) + 4)
    ]


def rows_of(server: ServerProcess, table: str) -> list[dict[str, Any]]:
    with server.connect() as db, db.snapshot() as snap:
        return sorted(snap.to_arrow(table).to_pylist(), key=lambda row: row["ts"])


def test_what_is_written_is_read_as_it_was(cli: Any, server: ServerProcess, tmp_path: Path) -> None:
    """Every type through Parquet, whose tables are equal with ``--create`` too, and through CSV and JSON lines."""
    with server.connect() as db:
        for name in ("every", "every_csv", "every_json"):
            db.create_event_table(name, event_time="ts", columns=EVERY)
        db.append("every", every_value())
    wanted = rows_of(server, "every")
    assert len(wanted) == len(TEXTS) + 4 and repr([row["s"] for row in wanted]) == repr([*TEXTS, None, *TEXTS[:3]])
    cli("export", "every", tmp_path / "out")
    cli("append", "every_parquet", tmp_path / "out" / "part-0.parquet", "--create", "--event-time", "ts", "--yes")
    for style, name in (("csv", "every.csv"), ("json", "every.jsonl")):
        (tmp_path / name).write_text(cli("-o", style, "scan", "every")[0], newline="")
        cli("append", f"every_{style}", tmp_path / name)
    for name in ("every_parquet", "every_csv", "every_json"):
        assert repr(rows_of(server, name)) == repr(wanted)
    with server.connect() as db:
        assert db.describe("every_parquet")["columns"] == EVERY


def test_a_table_made_of_text_has_all_that_the_text_says(cli: Any, server: ServerProcess, tmp_path: Path) -> None:
    """Text says no types: what is no number, bool or time in all rows is text, letter by letter."""
    with server.connect() as db:
        db.create_event_table("told", event_time="ts", columns=EVERY)
        db.append("told", every_value())
    for style, name in (("csv", "told.csv"), ("json", "told.jsonl")):
        (tmp_path / name).write_text(cli("-o", style, "scan", "told")[0], newline="")
        cli("append", f"told_{style}", tmp_path / name, "--create", "--event-time", "ts", "--yes")
        for row, found in zip(rows_of(server, "told"), rows_of(server, f"told_{style}"), strict=True):
            for same in ("ts", "ok", "n", "x", "s"):
                assert repr(row[same]) == repr(found[same])
            assert (found["raw"] and bytes.fromhex(found["raw"].removeprefix("0x"))) == row["raw"]
            at = found["at"]  # of years that Arrow's times of CSV do not reach
            assert (dt.datetime.fromisoformat(at) if at and style == "csv" else at) == row["at"]
            assert (found["big"] and decimal.Decimal(found["big"])) == row["big"]
            assert found["cost"] == (float(row["cost"]) if style == "csv" and row["cost"] is not None else
                                     None if row["cost"] is None else str(row["cost"]))  # fmt: skip


@pytest.mark.parametrize("suffix", ["json", "jsonl", "ndjson"])
def test_times_with_fractions_of_seconds_are_times(
    cli: Any, server: ServerProcess, tmp_path: Path, suffix: str
) -> None:
    """In JSON as in CSV, without an option, and exact to the microsecond."""
    said = [f"2026-01-01T00:00:00{rest}" for rest in (".000001Z", "Z", ".123456")] + ["2026-01-01 01:00:00.5+01:00"]
    path, name = tmp_path / f"f.{suffix}", f"fractions_{suffix}"
    path.write_text("".join(json.dumps({"ts": text, "n": n}) + "\n" for n, text in enumerate(said)))
    assert columns_of(str(path)) == {"ts": "timestamp", "n": "int64"}
    assert f"kivi create {name} ts=timestamp n=int64 --event-time ts" in cli("append", name, path, "--create")[1]
    with server.connect() as db, db.snapshot() as snap:
        moments = {row["n"]: row["ts"] for row in snap.scan(name)}
    begin = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    assert {n: (at - begin) // dt.timedelta(microseconds=1) for n, at in moments.items()} == {
        0: 1, 1: 0, 2: 123_456, 3: 500_000,
    }  # fmt: skip


@pytest.mark.parametrize("other", ["2026-02-30T00:00:00.5", "20260101", "1.5", "", "soon"])
def test_a_column_of_json_with_a_text_that_is_no_time_is_text(other: str, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text("".join(json.dumps({"a": text, "t": None}) + "\n" for text in ("2026-01-01T00:00:00.5Z", other)))
    assert columns_of(str(path)) == {"a": "string", "t": "string"}


def test_numbers_of_json_are_exact_as_decimals(cli: Any, server: ServerProcess, tmp_path: Path) -> None:
    """As over HTTP."""
    cli("create", "paid", "ts=timestamp", "cost=decimal(18,2)", "x=float64", "--event-time", "ts")
    (tmp_path / "paid.jsonl").write_text('{"ts": "2026-01-01", "cost": 9999999999999999.99, "x": 0.1}\n')
    cli("append", "paid", tmp_path / "paid.jsonl")
    (row,) = rows_of(server, "paid")
    assert (row["cost"], row["x"]) == (decimal.Decimal("9999999999999999.99"), 0.1)
    (tmp_path / "paid.jsonl").write_text('{"ts": "2026-01-01", "cost": 0.125}\n')
    assert "more than 2 digits after the point" in cli("append", "paid", tmp_path / "paid.jsonl", code=1)[1]


def test_directories_are_not_called_as_files(cli: Any, server: ServerProcess, tmp_path: Path) -> None:
    with server.connect() as db:
        db.create_event_table("short", event_time="ts", columns={"ts": "timestamp"})
    for name, style in (("x.csv", "csv"), ("x.ndjson", "json")):
        said = cli("export", "short", tmp_path / name, code=1)[1]
        assert "writes a directory" in said and f"kivi scan short -o {style}" in said
        assert not (tmp_path / name).exists()
    cli("export", "short", tmp_path / "x.parquet")  # as others call theirs


def test_a_line_may_be_longer_than_what_types_are_told_by(tmp_path: Path) -> None:
    text = "x" * 3_000_000
    (tmp_path / "a.csv").write_text(f"n,s\n1,{text}\n2,y\n")
    (tmp_path / "a.json").write_text(json.dumps({"n": 1, "s": text}) + "\n" + json.dumps({"n": 2, "s": "y"}) + "\n")
    for name in ("a.csv", "a.json"):
        assert columns_of(str(tmp_path / name)) == {"n": "int64", "s": "string"}


def test_files_of_spreadsheets(cli: Any, server: ServerProcess, tmp_path: Path) -> None:
    """With a mark of the order of bytes in front, and days."""
    (tmp_path / "days.csv").write_bytes(b"\xef\xbb\xbfday,n\r\n2026-01-01,1\r\n")
    pq.write_table(pa.table({"day": pa.array([dt.date(2026, 1, 1)]), "n": [1]}), tmp_path / "days.parquet")
    for suffix in ("csv", "parquet"):
        cli("append", "days", str(tmp_path / f"days.{suffix}"), "--create")
    with server.connect() as db, db.snapshot() as snap:
        assert [*snap.scan("days")] == [{"day": dt.datetime(2026, 1, 1, tzinfo=dt.UTC), "n": 1}] * 2
    (tmp_path / "twice.csv").write_text("day,n,n\n2026-01-01,1,2\n")
    assert "'n'" in cli("append", "days", str(tmp_path / "twice.csv"), code=1)[1]
    for name, header, said in (
        ("semicolons.csv", "day;n", "its cells are separated by ';'"),
        ("tabs.csv", "day\tn", "its cells are separated by '\\t'"),
        ("spaces.csv", "day,Total (EUR)", "'Total (EUR)' is no name of a column"),
        ("unnamed.csv", "2026-01-01,1", "'2026-01-01' is no name of a column"),
        ("packed.csv.gz", "day,n", "unpack it first"),
    ):
        (tmp_path / name).write_text(f"{header}\n2026-01-01{',' if ',' in header else header[3]}1\n")
        assert said in cli("append", "others", str(tmp_path / name), "--create", code=1)[1]


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


@pytest.mark.parametrize("levels", [201, 100_000])
def test_json_that_is_nested_deeply_is_refused(levels: int, cli: Any, server: ServerProcess, tmp_path: Path) -> None:
    """Arrow's reader would end the process."""
    path, name = tmp_path / "deep.jsonl", f"deep_{levels}"
    deep = '{"ts": "2026-01-01T00:00:00Z", "a": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}\n"
    path.write_text('{"ts": "2026-01-01T00:00:00Z"}\n\n' + deep)
    said = f"{path}, line 3 has more than 200 levels of arrays and objects in JSON"
    assert said in cli("append", name, path, "--create", "--event-time", "ts", code=1)[1]
    with server.connect() as db:
        assert name not in db.tables()
    cli("create", name, "ts=timestamp", "a=string", "--event-time", "ts")
    assert said in cli("append", name, path, code=1)[1]


MANY = 60_000  # rows of more than the megabyte by which the types are seen
CSV, CSV_ROW = "ts,n,x\n", "2026-01-01T00:00:00Z,1,0.5\n"
JSON_ROW = '{"ts": "2026-01-01T00:00:00Z", "n": 1}\n'


@pytest.mark.parametrize(
    ("count", "row", "said"),
    [
        *[
            (1, f"2026-01-02,{null},0.5\n", f"line 3, column 'n': {null!r} is not a int64: leave the cell empty")
            for null in ("NULL", "NA", "n/a", "NaN")
        ],
        (1, "20260102,1,0.5\n", "line 3, column 'ts': 20260102 would be a moment of 1970"),
        (1, "2026-01-02,1,NaN\n", "line 3, column 'x' is nan"),
        (1, "\n,2,\n", "line 4 has no 'ts': every event needs its event time"),
        (MANY, "2026-01-02,1.5,\n", f"line {MANY + 2}, column 'n': '1.5' is not a int64"),
        (MANY, "2026-01-02,1\n", f"line {MANY + 2} has 2 cells"),
        (MANY, f"2026-01-02,{10**20},\n", f"line {MANY + 2}, column 'n' is {10**20}"),
        (MANY, JSON_ROW.replace("1}", '"x"}'), f"line {MANY + 1}, column 'n': 'x' is not a int64"),
        (MANY, JSON_ROW.replace("1}", "0.5}"), f"line {MANY + 1}, column 'n' is 0.5"),
        (MANY, JSON_ROW.replace('"n"', '"z"'), f"line {MANY + 1}: table 'half' has no column 'z'"),
    ],
)
def test_no_table_is_made_for_lines_that_do_not_fit_it(
    count: int, row: str, said: str, cli: Any, server: ServerProcess, tmp_path: Path
) -> None:
    path = tmp_path / f"half.{'json' if row[0] == '{' else 'csv'}"
    path.write_text(JSON_ROW * count + row if row[0] == "{" else CSV + CSV_ROW * count + row)
    errors = cli("append", "half", path, "--create", "--event-time", "ts", code=1)[1]
    assert said in errors and "no table was created" in errors and "kivi create" in errors
    with server.connect() as db:
        assert "half" not in db.tables()


def test_no_table_is_made_for_columns_that_do_not_fit_it(cli: Any, server: ServerProcess, tmp_path: Path) -> None:
    pq.write_table(pa.table({"ts": pa.array([0, None], pa.timestamp("us")), "n": [1, 2]}), tmp_path / "half.parquet")
    errors = cli("append", "half", tmp_path / "half.parquet", "--create", code=1)[1]
    assert "has no 'ts'" in errors and "no table was created" in errors
    with server.connect() as db:
        assert "half" not in db.tables()


def test_whoever_cannot_append_to_the_table_that_was_made_for_it_is_told_that_it_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.csv").write_text("ts,n\n" + "2026-01-01T00:00:00Z,1\n" * 20)
    server = ServerProcess(tmp_path / "data")
    server.environment = {"KIVI_STORE_MAX_APPEND_ROWS": "10"}
    with server:
        words = ["--endpoint", server.endpoint, "append", "x", str(tmp_path / "x.csv"), "--create"]
        assert main(words) == 1
        said = capsys.readouterr().err
        assert "the table was created: append to x again, or kivi drop x" in said
        with server.connect() as db, db.snapshot() as snap:
            assert db.tables() == ["x"] and not list(snap.scan("x"))
        assert main(words) == 1  # it is there already, and not of this command
        assert "was created" not in capsys.readouterr().err
        (tmp_path / "x.csv").write_text("ts,n\n" + "2026-01-01T00:00:00Z,1\n" * 5)
        assert main(words) == 0


def test_what_the_server_refuses_is_said_of_its_line(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("ts,x\n2026-01-01,1\n\n2026-01-01,inf\n")
    cli("create", "located", "ts=timestamp", "x=float64", "--event-time", "ts")
    assert f"{tmp_path}/x.csv, line 4, column 'x' is inf" in cli("append", "located", tmp_path / "x.csv", code=1)[1]


def test_a_number_of_json_is_the_nearest_float_where_its_column_is_of_floats(cli: Any, tmp_path: Path) -> None:
    """Many write large floats without a point, and zeros for the digits that they leave out."""
    (tmp_path / "x.json").write_text('{"ts": 1, "x": 123456789012345680000}\n')
    cli("create", "nearest", "ts=timestamp", "x=float64", "--event-time", "ts")
    cli("append", "nearest", tmp_path / "x.json")
    assert json.loads(cli("scan", "nearest")[0])["x"] == 1.2345678901234568e20
    (tmp_path / "x.json").write_text('{"ts": 1, "x": 1' + "0" * 400 + "}\n")
    assert "too large for a float64" in cli("append", "nearest", tmp_path / "x.json", code=1)[1]


def test_a_file_that_is_still_being_written_is_checked_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path, description = tmp_path / "f.csv", {"key": {}, "columns": {"ts": "timestamp", "n": "int64"}}
    path.write_text("ts,n\n1,2\n3,NUL")
    (only,) = batches(str(path), description, follow=True, waits=False)
    assert only.rows == [{"ts": 1, "n": 2}] and only.lines == [2]
