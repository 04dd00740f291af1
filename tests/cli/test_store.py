"""``--store DIR``: commands that read, on the directory of a store that nobody has open."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import kivi
from kivi.cli import main
from tests.serverproc import ROOT


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a store that has crashed: some of it is in the log alone."""
    path = tmp_path_factory.mktemp("offline") / "data"
    db = kivi.open(path, background=False)
    db.create_event_table("ev", event_time="ts", columns={"e": "int64", "ts": "timestamp", "v": "int64"})
    db.create_aggregate("agg", "ev", ["e"], {"s": kivi.sum("v"), "n": kivi.count(), "m": kivi.min("v")})
    db.append("ev", [{"e": i % 7, "ts": i, "v": i} for i in range(5_000)])
    db.consolidate()
    db.append("ev", [{"e": 3, "ts": 1, "v": -1}])
    db.store.crash()
    return path


@pytest.fixture
def run(data: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*words: Any, code: int = 0, store: Path = data) -> str:
        """What a command prints, or with a code the line that says what was wrong."""
        assert main([*map(str, words), "--store", str(store)]) == code
        out, err = capsys.readouterr()
        assert len(err.splitlines()) == (code != 0), err
        return err or out

    return run


def state(data: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(data.rglob("*"))}


TOTALS = [{"e": e, "n": 715 if e <= 1 or e == 3 else 714} for e in range(7)]


@pytest.mark.parametrize(
    "words",
    [
        ["sql", "select e, count(*) as n from ev group by e order by e"],
        ["sql", "select e, n from agg where e >= ?::int order by e", "0"],
        ["query", "ev", "--measure", "n=count", "--by", "e"],
        ["scan", "agg", "--columns", "e,n"],
        ["rollup", "agg", "--by", "e", "--columns", "n"],
    ],
)
def test_it_answers_as_a_server_would(run: Callable[..., str], data: Path, words: list[str]) -> None:
    before = state(data)
    assert [json.loads(line) for line in run(*words, "-o", "json").splitlines()] == TOTALS
    assert state(data) == before


def test_tables_rows_and_exports(run: Callable[..., str], data: Path, tmp_path: Path) -> None:
    before = state(data)
    assert [line.split(",")[:2] for line in run("tables", "-o", "csv").splitlines()[1:]] == [
        ["agg", "aggregate"],
        ["ev", "event"],
    ]
    assert run("describe", "agg").startswith("agg: aggregate table, ready")
    summed = sum(range(3, 5_000, 7)) - 1
    assert json.loads(run("get", "agg", 3, "-o", "json")) == {"e": 3, "s": summed, "n": 715, "m": -1}
    run("export", "ev", tmp_path / "out")
    assert pq.read_table(tmp_path / "out").num_rows == 5_001
    assert state(data) == before


def test_what_is_refused(run: Callable[..., str], tmp_path: Path) -> None:
    assert "not a kivi store" in run("sql", "select 1", code=1, store=tmp_path)
    with kivi.open(tmp_path / "open", background=False):
        assert "open in another process" in run("sql", "select 1", code=1, store=tmp_path / "open")
    assert "only a statement that reads" in run("sql", "drop table ev", code=1)
    with pytest.raises(SystemExit, match="2"):  # it would be lost
        run("put", "agg", 1, "n=1")


def test_a_command_does_without_pandas(data: Path) -> None:
    """pyarrow would import it, where it is installed, with the first row that a command reads."""
    pytest.importorskip("pandas")
    command = [sys.executable, "-X", "importtime", "-m", "kivi.cli", "scan", "agg", "-o", "json", "--store", str(data)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    assert len(done.stdout.splitlines()) == 7
    assert re.search(r"\bpyarrow\.", done.stderr) and not re.search(r"\bpandas\.", done.stderr)
