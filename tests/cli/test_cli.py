"""The commands, against a real server and on the files it leaves.

Those that take over a terminal, standard input or signals are processes of their own, and so is one of each kind of
exit; the others are called, since most of a process's time is spent on its imports.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kivi
from kivi.cli import main
from kivi.cli.append import Progress
from tests.serverproc import ROOT, ServerProcess
from tests.waiting import PATIENCE_S, wait_until

CSV = 'e,ts,v,s\n1,2023-11-16T18:00:00Z,10,a\n1,2023-11-16T18:01:00Z,20,\n2,2023-11-16T18:01:00Z,20,"x,y"\n'


PROCESSES = {"shell", "watch"}


class Cli:
    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.environment = {**os.environ, "KIVI_ENDPOINT": server.endpoint}

    def __call__(self, *arguments: Any, stdin: str = "", code: int = 0, process: bool = False) -> str:
        """Standard output; standard error is in ``errors``."""
        words = [str(argument) for argument in arguments]
        if words[0] == "sql":  # whose first one waits for a process to start: ten seconds may be few
            words[1:1] = ["--timeout", str(PATIENCE_S)]
        run = self._process if process or words[0] in PROCESSES else self._called
        returned, out, self.errors = run(words, stdin)
        assert returned == code, (arguments, out, self.errors)
        return out

    def _process(self, words: list[str], stdin: str) -> tuple[int, str, str]:
        ran = subprocess.run(
            [sys.executable, "-m", "kivi.cli", *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
            env=self.environment,
        )
        return ran.returncode, ran.stdout, ran.stderr

    def _called(self, words: list[str], stdin: str) -> tuple[int, str, str]:
        out, errors = io.StringIO(), io.StringIO()
        streams = mock.patch.multiple(sys, stdin=io.StringIO(stdin), stdout=out, stderr=errors)
        with mock.patch.dict(os.environ, self.environment), streams:
            try:
                returned = main(words)
            except SystemExit as wrong_usage:
                returned = int(str(wrong_usage.code))
        return returned, out.getvalue(), errors.getvalue()


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with ServerProcess(tmp_path_factory.mktemp("store") / "data") as server:
        with server.connect() as db:
            db.create_table(
                "accounts",
                key={"id": "int64"},
                columns={"name": "string", "balance": kivi.sum("int64"), "fee": "decimal(9,2)"},
            )
            columns = {"e": "int64", "ts": "timestamp", "v": "int64", "s": "string"}
            db.create_event_table("ev", event_time="ts", columns=columns)
            db.create_aggregate(
                "agg",
                source="ev",
                group_by=["e", kivi.time_slot("ts", "5m", name="slot")],
                measures={"s": kivi.sum("v"), "n": kivi.count(), "m": kivi.max("v"), "c": kivi.count("s")},
                derived={"avg": "s / n"},
            )
        yield Cli(server)


def test_status_in_ten_lines(cli):
    lines = cli("status", process=True).splitlines()
    assert len(lines) <= 12
    assert any(line.split() == ["healthy", "true"] for line in lines)
    assert json.loads(cli("status", "-o", "json"))["healthy"] is True
    cli.environment["KIVI_ENDPOINT"], kept = "localhost:1", cli.environment["KIVI_ENDPOINT"]
    try:
        assert "cannot reach" in cli("status", code=1)
    finally:
        cli.environment["KIVI_ENDPOINT"] = kept


def test_rows(cli):
    cli("put", "accounts", 1, "name=ada", "fee=1.50")
    cli("delta", "accounts", 1, "balance=21")
    assert json.loads(cli("get", "accounts", 1, "-o", "json")) == {
        "id": 1, "name": "ada", "balance": 21, "fee": "1.50"
    }  # fmt: skip
    cli("put", "accounts", 2, "name=bob")
    found = cli("scan", "accounts", "--where", "balance >= 21 & fee == 1.5", "--columns", "id,name", "-o", "csv")
    assert found == "id,name\n1,ada\n"
    assert cli("scan", "accounts", "--reverse", "--limit", 1, "--columns", "id", "-o", "csv") == "id\n2\n"
    cli("delete", "accounts", 2)
    cli("get", "accounts", 2, code=1)
    assert len(cli.errors.splitlines()) == 1


def test_an_older_snapshot_has_the_columns_of_then(cli):
    with cli.server.connect() as db:
        db.create_event_table("grown", event_time="ts", columns={"ts": "timestamp", "v": "int64"})
        db.create_aggregate("summed", source="grown", group_by=["v"], measures={"n": kivi.count()}, history="1h")
        db.append("grown", [{"ts": 1, "v": 5}])
        then = db.watermark()
        db.alter_table("grown", {"w": "int64"})
        db.alter_aggregate("summed", {"last": kivi.last("w")}, derived={"twice": "n * 2"})
        db.append("grown", [{"ts": 2, "v": 5, "w": 1}])
    assert cli("scan", "grown", "--columns", "v,w", "-o", "csv") == "v,w\n5,\n5,1\n"
    for command, columns, row in (
        (["scan", "grown"], "ts,v", "1970-01-01T00:00:00.000001Z,5"),
        (["get", "summed", 5], "v,n", "5,1"),
        (["scan", "summed"], "v,n", "5,1"),
        (["rollup", "summed", "--by", "v"], "v,n", "5,1"),
        (["query", "summed", "--by", "v", "--having", "n > 0"], "v,n", "5,1"),
    ):
        assert cli(*command, "--as-of", then, "-o", "csv") == f"{columns}\n{row}\n"
    cli("scan", "grown", "--as-of", then, "--where", "w > 0", code=1)
    assert "'w'" in cli.errors


def test_sql_in_every_form(cli):
    with cli.server.connect() as db:
        db.create_event_table("asked", event_time="ts", columns={"ts": "timestamp", "v": "int64", "s": "string"})
        db.append("asked", [{"ts": i, "v": i, "s": "a" if i % 2 else None} for i in range(4)])
    text = "select s, sum(v) as total, max(ts) as last from asked where v > ?::int group by all order by total"
    assert cli("sql", text, 0, "-o", "csv") == (
        "s,total,last\n,2,1970-01-01T00:00:00.000002Z\na,4,1970-01-01T00:00:00.000003Z\n"
    )
    assert [json.loads(line) for line in cli("sql", "select s from asked limit 1", "-o", "json").splitlines()] == [
        {"s": None}
    ]
    assert "total" in cli("sql", text, 0).splitlines()[0]
    ran = subprocess.run(
        [sys.executable, "-m", "kivi.cli", "sql", "select v from asked order by v", "-o", "arrow"],
        capture_output=True,
        check=True,
        cwd=ROOT,
        env=cli.environment,
    )
    with pa.ipc.open_stream(ran.stdout) as reader:
        assert reader.read_all().to_pydict() == {"v": [0, 1, 2, 3]}
    twice = "select v as x, s as x, 0 as x_1, v from asked where v = 1"
    assert cli("sql", twice, "-o", "csv") == "x,x,x_1,v\n1,a,0,1\n"
    assert cli("sql", twice).splitlines()[2].split() == ["1", "a", "0", "1"]
    assert cli("sql", "select sum(v) as s from (values (1), (2)) t(v)", "-o", "json") == '{"s": 3}\n'
    assert cli("sql", twice, "-o", "json") == '{"x": 1, "x_2": "a", "x_1": 0, "v": 1}\n'
    odd = (
        "select 'infinity'::timestamp as t, ['-infinity'::date] as d, '20000-01-01'::timestamptz as y, "
        "'nan'::double as n, {'f': '-inf'::float} as s, date '2026-03-01' as day, '2026-03-01 10:00'::timestamp as m"
    )
    assert json.loads(cli("sql", odd, "-o", "json"), parse_constant=pytest.fail) == {
        "t": "infinity", "d": ["-infinity"], "y": "20000-01-01 00:00:00.000000Z", "n": "NaN", "s": {"f": "-Infinity"},
        "day": "2026-03-01", "m": "2026-03-01T10:00:00",
    }  # fmt: skip
    assert cli("sql", odd).splitlines()[2].startswith("infinity  [")
    cli("sql", "drop table asked", code=1)
    assert "only a statement that reads" in cli.errors
    cli("put", "accounts", 77, "name=x", "-o", "arrow", code=1)
    cli("get", "accounts", 77, code=1)  # nothing was done


def test_errors_are_one_line_and_wrong_usage_is_2(cli):
    for arguments in (
        ["get", "nothing", 1],
        ["get", "accounts", "x"],
        ["get", "accounts", 1, 2],
        ["put", "accounts", 1, "nonsense=1"],
        ["put", "agg", 1, "2023-11-16T18:00:00Z", "s=1"],
        ["scan", "accounts", "--where", "nonsense == 1"],
        ["append", "accounts", "/nowhere.csv"],
        ["append", "ev", "/nowhere.csv"],
        ["append", "ev", "/nowhere.txt"],
    ):
        cli(*arguments, code=1, process=arguments[0] == "put")
        assert len(cli.errors.splitlines()) == 1, cli.errors
        assert cli.errors.startswith("kivi: ")
    cli("frobnicate", code=2, process=True)
    cli("get", code=2)


def test_append_every_format_and_follow(cli, tmp_path):
    csv = tmp_path / "e.csv"
    csv.write_text(CSV)
    assert json.loads(cli("append", "ev", csv, "-o", "json"))["events"] == 3
    assert "3 events" in cli.errors  # plain lines where there is no terminal
    lines = tmp_path / "e.jsonl"
    lines.write_text('{"e": 3, "ts": "2023-11-16T18:00:00Z", "v": 1}\n\n{"e": 3, "ts": 1700157600000000, "v": 2}\n')
    cli("append", "ev", lines)
    times = pa.array([1_700_157_600_000_000] * 3, pa.timestamp("us", "UTC"))
    table = pa.table({"e": [4, 4, 4], "ts": times, "v": [1, 2, 3]})
    pq.write_table(table, tmp_path / "e.parquet")
    cli("append", "ev", tmp_path / "e.parquet")
    with pa.OSFile(str(tmp_path / "e.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write(table)
    cli("append", "ev", tmp_path / "e.arrow")
    rows = [json.loads(line) for line in cli("scan", "agg", "-o", "json").splitlines()]
    assert {row["e"]: (row["s"], row["n"], row["c"]) for row in rows} == {
        1: (30, 2, 1), 2: (20, 1, 1), 3: (3, 2, 0), 4: (12, 6, 0)
    }  # fmt: skip
    bad = tmp_path / "bad.csv"
    bad.write_text("e,ts,v\n1,2023-11-16T18:00:00Z,x\n")
    cli("append", "ev", bad, code=1)
    assert "line 2" in cli.errors

    growing = tmp_path / "growing.csv"
    growing.write_text("e,ts,v\n7,2023-11-16T18:00:00Z,1\n")
    following = subprocess.Popen(
        [sys.executable, "-m", "kivi.cli", "append", "ev", str(growing), "--follow"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT, env=cli.environment,
    )  # fmt: skip

    def wait_for(total: int) -> None:
        def sums() -> list[Any]:
            with db.snapshot() as snap:
                return [row["s"] for row in snap.scan("agg", prefix=(7,))]

        with cli.server.connect() as db:
            wait_until(lambda: sums() == [total], reason=lambda: (total, sums()), pause_s=0.05)

    try:
        wait_for(1)
        with open(growing, "a") as file:
            file.write("7,2023-11-16T18:00:00Z,10\n")
        wait_for(11)
    finally:
        following.send_signal(signal.SIGINT)
        assert following.wait(60) == 0


def test_append_leaves_late_events_out_if_it_is_told_to(cli, tmp_path):
    with cli.server.connect() as db:
        db.create_event_table("kept", event_time="ts", retention="1h", columns={"ts": "timestamp", "x": "int64"})
        db.append("kept", [{"ts": 0, "x": 1}, {"ts": 36_000_000_000, "x": 2}])
        db.consolidate()
        wait_until(lambda: "complete_since_us" in db.describe("kept")["statistics"])
    csv = tmp_path / "late.csv"
    csv.write_text("ts,x\n1970-01-01T00:00:00Z,3\n1970-01-01T10:00:00Z,4\n")
    cli("append", "kept", csv, code=1)
    assert "1 events lie before the retention floor" in cli.errors
    cli("append", "kept", csv, "--late", "ignore", code=2)
    cli("append", "kept", csv, "--late", "drop")
    assert sorted(json.loads(line)["x"] for line in cli("scan", "kept", "-o", "json").splitlines()) == [2, 4]
    assert json.loads(cli("describe", "kept", "-o", "json"))["statistics"]["late_dropped"] == 1


def test_retract_asks_and_removes(cli):
    with cli.server.connect() as db:
        db.create_event_table("visits", event_time="ts", columns={"ts": "timestamp", "user": "string"})
        db.append("visits", [{"ts": second * 1_000_000, "user": user} for second, user in enumerate("aabca")])
    cli("retract", "visits", "--where", "user == 'a'", code=1)
    assert "3 events of visits match" in cli.errors and "nothing was retracted" in cli.errors
    for name in ("--where", "--start", "--end"):  # a variable that is not set is not all events
        cli("retract", "visits", name, "", "--yes", code=1)
    cli("retract", "visits", "--start", "9" * 5_000, "--yes", code=1)
    assert "is not a time" in cli.errors
    cli("retract", "visits", "--start", "1767225600000", "--yes", code=1)  # milliseconds, which would be nearly all
    args = ("--where", "user == 'a'", "--start", "1970-01-01T00:00:01Z", "--end", "1970-01-01T00:00:04Z")
    assert json.loads(cli("retract", "visits", *args, "--yes", "-o", "json"))["events"] == 1
    assert [json.loads(line)["user"] for line in cli("scan", "visits", "-o", "json").splitlines()] == list("abca")


def test_a_view_is_created_and_described(cli):
    cli("put", "accounts", "11", "name=zoe")
    cli("view", "by_name", "accounts", "--key", "name", code=1)
    assert "unique=True" in cli.errors
    cli("view", "by_name", "accounts", "--key", "name,id", "--columns", "fee")
    assert json.loads(cli("get", "by_name", "zoe", "11", "-o", "json")) == {"name": "zoe", "id": 11, "fee": None}
    assert "by_name: view, ready; view of accounts" in cli("describe", "by_name")
    cli("put", "by_name", "zoe", "11", "fee=1", code=1)
    assert "is a view of 'accounts'" in cli.errors
    cli("delete", "accounts", "11")
    with cli.server.connect() as db:
        db.drop("by_name")


def test_aggregates_of_levels_and_over_aggregates(cli):
    with cli.server.connect() as db:
        db.create_event_table("seen", event_time="ts", columns={"e": "int64", "s": "string", "ts": "timestamp"})
        db.append("seen", [{"e": i % 3, "s": "x", "ts": i * 3_600_000_000} for i in range(48)])
    slots = ["--slot", "1h", "--slot", "1month", "--tz", "Europe/Madrid"]
    out = cli("aggregate", "lv", "seen", "n=count", "--level", "e", "--level", "e,s", *slots, "-o", "json")
    assert json.loads(out)["aggregate"] == "lv_e_1h, lv_e_1month, lv_e_s_1h, lv_e_s_1month"
    day = ["--by", "e", "--by", "day=slot/1d", "--tz", "Europe/Madrid"]
    cli("aggregate", "daily", "lv_e_s_1h", "n=combine:n", *day)
    assert "aggregate of lv_e_s_1h" in cli("describe", "daily")
    with cli.server.connect() as db, db.snapshot() as snap:
        days = [(row["day"].isoformat(), row["n"]) for row in snap.scan("daily", prefix=(0,))]
    assert days == [(f"{day}T23:00:00+00:00", n) for day, n in (("1969-12-31", 8), ("1970-01-01", 8))]


def test_aggregate_sums_what_is_there_and_shows_it(cli, tmp_path):
    with ServerProcess(tmp_path / "data", "--set", "block_rows=1000") as server:
        with server.connect() as db:
            db.create_event_table("ev", event_time="ts", columns={"e": "int64", "ts": "timestamp", "v": "int64"})
            db.append("ev", [{"e": i % 7, "ts": i * 1_000_000, "v": i} for i in range(5_000)])
            db.consolidate()
        its = Cli(server)
        wanted = ["s=sum:v", "n=count", "m=max:v", "--by", "e", "--by", "slot=ts/1h", "--derived", "a=s / n"]
        assert "5000" in its("aggregate", "by_slot", "ev", *wanted)
        assert its.errors.count("\n") == 1
        assert its.errors.startswith("by_slot <- ev: 5,000 events, ")  # a plain line where there is no terminal
        with server.connect() as db, db.snapshot() as snap:
            assert sum(row["n"] for row in snap.scan("by_slot")) == 5_000
            assert [row["m"] for row in snap.scan("by_slot", prefix=(6,))] == [3_597, 4_997]
            assert snap.get("by_slot", (6, 0))["a"] == sum(range(6, 3_600, 7)) / len(range(6, 3_600, 7))

        command = [sys.executable, "-m", "kivi.cli", "aggregate", "by_e", "ev", "n=count", "--by", "e"]
        shown = on_a_terminal(command, its.environment)
        assert "by_e <- ev" in shown
        assert "━" in shown  # a bar
        assert "5,000 events" in shown

        for wrong in (["n=median:v"], ["n=sum"], ["n"], ["n=sum:nope"]):
            its("aggregate", "bad", "ev", *wrong, "--by", "e", code=1)
            assert its.errors.startswith("kivi: ")
            assert len(its.errors.splitlines()) == 1


def on_a_terminal(command: list[str], environment: dict[str, str]) -> str:
    """What the command writes to standard error when that is a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        cwd=ROOT,
        env={**environment, "TERM": "xterm", "COLUMNS": "120"},
    ) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux says EIO when the last writer has gone
            while data := os.read(ours, 65_536):
                shown += data
        os.close(ours)
        assert process.wait(60) == 0, shown
    return shown.decode()


def test_progress_knows_its_total_later_and_says_how_far_it_is(capsys):
    now = [0.0]
    with Progress("agg <- ev", clock=lambda: now[0]) as progress:
        for done in (1, 2, 3):
            now[0] += 1.5
            progress.update(done * 1_000, done * 1_000, 4_000)
    assert capsys.readouterr().err.splitlines() == [
        "agg <- ev: 2,000 events, 667/s (50%)",
        "agg <- ev: 3,000 events, 667/s",
    ]


def test_two_shells_show_concurrent_transactions(cli):
    script = "begin\ndelta accounts 5 balance=1\nget accounts 5\ncommit\nscan accounts where id == 5\n"
    out = cli("shell", stdin=script)
    assert "snapshot " in out
    assert "committed at " in out
    cli("shell", stdin="put accounts\nfrobnicate\ncommit\n", code=1)
    assert cli.errors.count("error: ") == 3

    def shell() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "kivi.cli", "shell"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            env=cli.environment,
        )  # fmt: skip

    def say(process: subprocess.Popen[str], line: str) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return process.stdout.readline()

    with shell() as first, shell() as second:
        say(first, "begin")
        say(second, "begin")
        assert first.stdin is not None
        assert second.stdin is not None
        first.stdin.write("put accounts 5 name=a\n")
        second.stdin.write("put accounts 5 name=b\n")
        assert "committed" in say(first, "commit")
        assert "Conflict: accounts(5,).name" in say(second, "commit")


def test_a_checkpoint_is_a_copy_of_the_running_server(cli, tmp_path):
    cli("checkpoint", tmp_path / "copy")
    cli("verify", tmp_path / "copy")
    cli("checkpoint", tmp_path / "copy", code=1)
    assert str(tmp_path / "copy") in cli.errors


def test_dump_verify_backup_and_restore(cli, tmp_path):
    """On a copy of what a killed server left: nothing is written to what is inspected."""
    cli("verify", cli.server.data, code=1)
    assert "open in another process" in cli.errors
    cli("verify", "x" * 300, code=1)
    assert "File name too long" in cli.errors
    cli("export", "ev", "s3://bucket/prefix", code=1)
    assert "is no directory of this machine" in cli.errors
    with ServerProcess(tmp_path / "data") as server:
        with server.connect() as db:
            db.create_event_table("ev", event_time="ts", columns={"e": "int64", "ts": "timestamp", "v": "int64"})
            db.create_aggregate("agg", "ev", ["e"], {"s": kivi.sum("v"), "n": kivi.count(), "m": kivi.min("v")})
            db.append("ev", [{"e": i % 7, "ts": i, "v": i} for i in range(5_000)])
            db.consolidate()
            db.append("ev", [{"e": 3, "ts": 1, "v": 1}])
        server.kill()
    data = tmp_path / "data"

    def state() -> dict[str, tuple[int, int]]:
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(data.rglob("*"))}

    before = state()
    report = json.loads(cli("verify", data, "-o", "json", process=True))
    assert report["ev"] == "5,001 events"
    assert report["agg"] == "7 rows, equal to a recount of the events"
    dumped = [json.loads(line) for line in cli("dump", data, "-o", "json").splitlines()]
    assert {line["what"] for line in dumped} >= {"store", "commit", "table", "row"}
    assert sum(line["what"] == "row" and line["table"] == "ev" for line in dumped) == 5_001
    cli("backup", data, tmp_path / "backup")
    assert state() == before
    cli("backup", data, tmp_path / "backup", code=1)
    cli("backup", data, tmp_path / "no" / "such" / "backup", code=1)
    assert str(tmp_path / "no" / "such") in cli.errors
    assert not (tmp_path / "no").exists()
    cli("restore", tmp_path / "backup", tmp_path / "restored")
    assert {path.name for path in tmp_path.iterdir()} == {"data", "backup", "restored"}
    with ServerProcess(tmp_path / "restored") as server, server.connect() as db, db.snapshot() as snap:
        assert sum(row["n"] for row in snap.scan("agg")) == 5_001
    cli("verify", tmp_path, code=1)
    assert "not a kivi store" in cli.errors

    segment = max((tmp_path / "backup" / "log").glob("*.log"), key=lambda path: path.stat().st_size)
    damage(segment)
    cli("verify", tmp_path / "backup", code=1)
    assert "damaged at byte" in cli.errors


def test_dump_shows_what_is_stored_in_the_words_of_the_golden_histories(cli, tmp_path):
    data = str(tmp_path / "data")
    with kivi.open(data, background=False) as db:
        columns = {"name": "string", "n": kivi.sum("int64"), "peak": kivi.max("int64"), "fee": "decimal(9,2)"}
        db.create_table("acc", key={"id": "int64", "of": "string"}, columns=columns)
        with db.transaction() as tx:
            tx.put("acc", (1, "x"), name="ada", fee="1.50")
            tx.guard("acc", (2, "x"))
            tx.guard("acc", (1, "x"), "n")
        first = tx.commit_ts
        db.consolidate()
        db.store.consolidator.flush()
        with db.transaction(token="mine") as tx:
            tx.delta("acc", (1, "x"), n=21, peak=7)
            tx.delete("acc", (2, "x"))
        db.store.crash()  # as if the process had been killed: what is in the log only stays there
    lines = cli("dump", data).splitlines()
    header = next(line for line in lines if line.startswith(f"commit ts={tx.commit_ts} "))
    assert "token=mine" in header
    after = lines[lines.index(header) + 1 :]
    assert after[:2] == ["    rows     acc(1, 'x')  n+=21 peak max=7", "    rows     acc(2, 'x')  delete"]
    assert {"    guards   acc(1, 'x').n", "    guards   acc(2, 'x')"} <= set(lines)
    assert f"stored row        acc(1, 'x') @{first}  name='ada' n=0 peak=null fee=1.50" in lines
    (moments,) = (line for line in lines if line.startswith("stored time "))  # those of the one pass
    assert re.fullmatch(rf"stored time +\S+Z @\d+ \.\. \S+Z @{first}  2 moments", moments), moments
    assert "row table=acc id=1 of=x name=ada n=21 peak=7 fee=1.50" in lines


def takes_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times outside the years 1 to 9999, which stores of earlier versions were given."""
    for module in ("kivi.arrow.records", "kivi.model.schema", "kivi.model.types"):
        monkeypatch.setattr(f"{module}.check_moment", lambda value, what: value)
    for module in ("grouping", "derive"):
        monkeypatch.setattr(f"kivi.delta.{module}.MOMENT_MIN_US", -(2**63))


def test_dump_goes_on_at_moments_beyond_the_years_of_python(cli, tmp_path, monkeypatch):
    takes_any_time(monkeypatch)
    data = str(tmp_path / "data")
    late, early = 300_000_000_000_000_000, -(2**63) + 300_000_000
    with kivi.open(data, background=False) as db:
        columns = {"at": "timestamp", "n": kivi.sum("int64"), "last": kivi.max("timestamp")}
        db.create_table("t", key={"ts": "timestamp"}, columns=columns)
        db.create_event_table("ev", event_time="ts", columns={"ts": "timestamp", "x": "int64"})
        slot = kivi.time_slot("ts", "5m", name="slot")
        db.create_aggregate("by_slot", source="ev", group_by=[slot], measures={"x": kivi.sum("x")})
        for moment in (late, early, 0):
            with db.transaction() as tx:
                tx.put("t", (moment,), at=moment, n=1, last=moment)
                tx.append("ev", [{"ts": moment, "x": 1}])
            if moment == early:
                db.consolidate()
                db.store.consolidator.flush()
        db.store.crash()
    lines = cli("dump", data).splitlines()
    assert f"    rows     t({late} us)  at={late} us n=1 last={late} us" in lines  # from the log
    for moment in (late, early):
        assert f"row table=t ts={moment} at={moment} n=1 last={moment}" in lines
        assert f"row table=ev ts={moment} x=1" in lines
        assert any(line.startswith(f"stored row        t({moment} us) @") for line in lines)
    assert "row table=t ts=1970-01-01T00:00:00Z at=1970-01-01T00:00:00Z n=1 last=1970-01-01T00:00:00Z" in lines
    rows = [json.loads(line) for line in cli("dump", data, "-o", "json").splitlines()]
    slots = [row["slot"] for row in rows if row["what"] == "row" and row["table"] == "by_slot"]
    assert slots == [early // 300_000_000 * 300_000_000, "1970-01-01T00:00:00Z", late]


def damage(segment: Path) -> None:
    """Flips a byte inside the first record."""
    with open(segment, "r+b") as file:
        file.seek(4096 + 40)
        byte = file.read(1)[0]
        file.seek(4096 + 40)
        file.write(bytes([byte ^ 0xFF]))


def test_verify_believes_float_sums_in_any_order(cli, tmp_path):
    """Left to right in commit order is 8.0; another order loses the small ones, and is no damage."""
    data = tmp_path / "floats"
    with kivi.open(data) as db:
        db.create_event_table("ev", event_time="ts", columns={"ts": "timestamp", "f": "float64", "g": "int64"})
        db.create_aggregate("sums", source="ev", group_by=["g"], measures={"f": kivi.sum("f"), "n": kivi.count()})
        for values in ([1e16], [1.0] * 8, [-1e16]):
            db.append("ev", [{"ts": 1, "f": f, "g": 1} for f in values])
        with db.snapshot() as snap:
            assert snap.get("sums", (1,)) == {"g": 1, "f": 8.0, "n": 10}
    assert "equal to a recount of the events" in cli("verify", data, "-o", "json")


def test_verify_and_backup_of_a_sum_that_does_not_fit_now_and_of_an_early_moment(cli, tmp_path, monkeypatch):
    takes_any_time(monkeypatch)
    data = tmp_path / "odd"
    with kivi.open(data) as db:
        db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "v": "int64"}, history=None)
        with db.transaction() as tx:
            tx.put("t", (1,), n=2**63 - 1, v=5)
        with db.transaction() as tx:
            tx.delta("t", (1,), n=1)
        db.create_event_table("ev", event_time="ts", columns={"ts": "timestamp", "x": "int64"})
        slot = kivi.time_slot("ts", "5m", name="slot")
        db.create_aggregate(
            "by_slot", source="ev", group_by=[slot], measures={"x": kivi.sum("x"), "last": kivi.max("ts")}
        )
        db.append("ev", [{"ts": 300_000_000_000_000_000, "x": 2**62}, {"ts": 300_000_000_000_000_000, "x": 2**62}])
    report = json.loads(cli("verify", data, "-o", "json"))
    assert report["t"] == "1 rows, n not read: a sum does not fit its type right now"
    assert "equal to a recount" in report["by_slot"]


@pytest.mark.story
def test_watch_prints_changes_as_they_come(cli: Cli) -> None:
    with cli.server.connect() as db:
        db.create_table("watched", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        with db.transaction() as tx:
            tx.delta("watched", (1,), n=5)
        command = [sys.executable, "-m", "kivi.cli", "watch", "watched", "--order-by=-n", "--limit", "2", "-o", "json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=cli.environment) as process:
            assert process.stdout is not None
            lines = (json.loads(line) for line in process.stdout)
            assert next(lines)["kind"] == "reset"
            assert next(lines)["row"] == {"id": 1, "n": 5}
            with db.transaction() as tx:
                tx.delta("watched", (2,), n=7)
            found = next(lines)
            assert (found["kind"], found["new"], found["row"]) == ("add", 0, {"id": 2, "n": 7})
            process.terminate()
            assert process.wait(60) == 0
        with db.snapshot() as snapshot:
            (count,) = snapshot.summary("ev", {"n": kivi.count()}).values()
    until = "2023-11-17T00:00:00Z"
    assert len(cli("watch", "ev", "--until", until, "-o", "json").splitlines()) == count
    first, *events = cli("watch", "ev", "--until", until, "--columns", "e,v", "--where", "v >= 0").splitlines()
    assert first == "e,v"
    assert len(events) <= count
    assert cli("watch", "ev", "--until", until, "--name", "n", "--user", "u") != ""
    assert cli("watch", "ev", "--until", until, "--name", "n", "--user", "u") == "e,ts,v,s\n"  # all were delivered


def test_watch_draws_a_state_on_a_terminal(cli: Cli) -> None:
    with cli.server.connect() as db:
        db.create_table("drawn", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        parent, child = pty.openpty()
        command = [sys.executable, "-m", "kivi.cli", "watch", "drawn"]

        def draws(total: int) -> None:
            text = ""

            def found() -> bool:
                nonlocal text
                text += os.read(parent, 4096).decode()
                shown = rf" {total}\x1b\[K\r\n.*1 rows at snapshot \d+, live"
                return re.search(shown, text, re.DOTALL) is not None

            wait_until(found, reason=lambda: text, pause_s=0)

        with subprocess.Popen(command, stdout=child, cwd=ROOT, env=cli.environment) as process:
            os.close(child)
            for n in (3, 4):
                with db.transaction() as tx:
                    tx.delta("drawn", (1,), n=n)
                draws(3 if n == 3 else 7)
            process.terminate()
            assert process.wait(60) == 0
        os.close(parent)


def test_a_store_begins_a_cluster_of_a_name_that_clusters_can_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, marker = tmp_path / "store", tmp_path / "store" / "KIVI"
    kivi.open(store).close()
    before = marker.read_text()
    for name in ("", "a b", "a.b", "*", "ä", "../a", "x" * 201):
        assert main(["cluster", "adopt", str(store), "--cluster", name]) == 1
        assert "is no name of a cluster" in capsys.readouterr().err
    assert marker.read_text() == before
    assert main(["cluster", "adopt", str(marker), "--cluster", "apm"]) == 1  # a file is no store, either
    assert "is not a kivi store" in capsys.readouterr().err
    assert main(["cluster", "adopt", str(store), "--cluster", "apm"]) == 0
    assert "apm begins with the store" in capsys.readouterr().out
