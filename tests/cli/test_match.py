"""``kivi match``, on the directory of a store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kivi
from kivi.cli import main

WORDS = ["match", "calls", "A B+ C", "--by", "host", "--within", "15m", "--define", "B=us > prev(us) & us < 1000"]
MORE = ["--define", "C=us < prev(us, 1)", "--measure", "first=first:A.us", "--measure", "rises=count:B"]


@pytest.fixture
def store(tmp_path: Path) -> str:
    with kivi.open(tmp_path / "data") as db:
        db.create_event_table("calls", event_time="ts", columns={"host": "string", "ts": "timestamp", "us": "int64"})
        times = [100, 120, 150, 90, 100, 180, 60]
        db.append("calls", [{"host": "a", "ts": i * 1_000_000, "us": us} for i, us in enumerate(times)])
    return str(tmp_path / "data")


def test_match_prints_one_row_for_each_match(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, *MORE, "--explain", "-o", "json", "--store", store]) == 0
    out, err = capsys.readouterr()
    found = [{"host": "a", "first": 100, "rises": 2}, {"host": "a", "first": 100, "rises": 1}]
    assert [json.loads(line) for line in out.splitlines()] == found
    assert "found: 2 matches" in err
    assert main([*WORDS, *MORE, "--end", "1970-01-01T00:00:04Z", "-o", "json", "--store", store]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--measure", "n=quantiles:us"], "write first(A.ts), count(B)"),
        (["--measure", "n=sum"], "write first(A.ts), count(B)"),
        (["--define", "C=us <"], "is not a predicate"),
        (["--define", "C=us > prev(none)"], "no column 'none'"),
        (["--define", "C=us > prev(us, 5000)"], "by 0 to 1,000 rows"),
        (["--skip", "to_first A"], "may be the first row"),
    ],
)
def test_bad_words_are_told(store: str, capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert main([*WORDS, *words, "--store", store]) != 0
    assert says in capsys.readouterr().err
