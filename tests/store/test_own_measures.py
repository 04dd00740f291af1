"""Measures of one's own: registered in this process, found by a server, and missing where a store is opened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.model.states import OWN
from tests.serverproc import ROOT, ServerProcess

PACKAGE = """
import kivi
import numpy as np

STATE = [("n", "<i8"), ("bits", "<i8")]


def _init(values):
    states = np.zeros(len(values), STATE)
    states["n"], states["bits"] = 1, values
    return states


def _combine(a, b):
    states = a.copy()
    states["n"] += b["n"]
    states["bits"] |= b["bits"]
    return states


def register():
    kivi.register_measure(
        "bits_and_count", id=4_711, state=STATE, init=_init, combine=_combine, result="int64", takes=["int64"],
        evaluate=lambda states: states["bits"] * 1_000 + states["n"],
    )
"""
COLUMNS = {"g": "int64", "ts": "timestamp", "x": "int64"}
EVENTS = [{"g": i % 2, "ts": i, "x": None if i % 5 == 0 else i % 8} for i in range(40)]


def expected(g: int) -> int:
    seen = [event["x"] for event in EVENTS if event["g"] == g and event["x"] is not None]
    bits = 0
    for value in seen:
        bits |= value
    return bits * 1_000 + len(seen)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With an installed package that offers a measure: a directory on PYTHONPATH with its metadata."""
    site = tmp_path / "site"
    metadata = site / "kivi_bits-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "kivi_bits.py").write_text(PACKAGE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kivi-bits\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[kivi.measures]\nbits_and_count = kivi_bits:register\n")
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path}


def create(db: Any) -> None:
    db.create_event_table("events", event_time="ts", columns=COLUMNS)
    few = kivi.measure("bits_and_count", "x", where=kivi.col("x") < 4)
    measures = {"b": kivi.measure("bits_and_count", "x"), "few": few}
    db.create_aggregate("agg", "events", ["g"], measures, {"per": "b / 1000"})


def test_a_server_finds_it_and_a_store_without_it_is_not_opened(tmp_path: Path, environment: dict[str, str]) -> None:
    server = ServerProcess(tmp_path / "data")
    server.environment = environment
    with server, server.connect() as db:
        create(db)
        for begin in range(0, 40, 13):
            db.append("events", EVENTS[begin : begin + 13])
        for _ in range(2):
            with db.snapshot() as snap:
                rows = list(snap.scan("agg"))
                assert [row["b"] for row in rows] == [expected(0), expected(1)]
                assert [row["per"] for row in rows] == [expected(g) / 1_000 for g in (0, 1)]
                assert snap.to_arrow("agg", where=kivi.col("b") == expected(1))["g"].to_pylist() == [1]
            db.consolidate()
        assert db.describe("agg")["measures"]["b"] == "bits_and_count(x)"
        server.kill()
        server.start()  # from the log and from base rows
        with server.connect() as again, again.snapshot() as snap:
            assert list(snap.scan("agg")) == rows
    with pytest.raises(kivi.FormatTooNew, match=r"'bits_and_count' with id 4711, which is not known here: install"):
        kivi.open(tmp_path / "data")
    program = f"import kivi; db = kivi.open({str(tmp_path / 'data')!r}); "
    program += "print(db.snapshot().__enter__().to_arrow('agg').num_rows)"
    ran = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert (ran.stdout, ran.returncode) == ("2\n", 0), ran.stderr


def test_it_is_registered_in_this_process(tmp_path: Path) -> None:
    kivi.register_measure(
        "any_bit", id=4_712, state="<i8", init=lambda v: v, combine=lambda a, b: a | b, evaluate=lambda s: s,
        result="int64", takes=["int64"],
    )  # fmt: skip
    kivi.testing.check_measure("any_bit", examples=10)
    with kivi.open(tmp_path / "data") as db:
        db.create_event_table("events", event_time="ts", columns=COLUMNS)
        db.create_aggregate("agg", "events", ["g"], {"b": kivi.measure("any_bit", "x")})
        db.append("events", EVENTS)
        db.create_aggregate("later", "events", ["g"], {"b": kivi.measure("any_bit", "x")})
        with db.snapshot() as snap:
            rows = list(snap.scan("agg"))
            assert [row["b"] for row in rows] == [expected(g) // 1_000 for g in (0, 1)]
            assert list(snap.scan("later")) == rows
    with kivi.open(tmp_path / "data") as db, db.snapshot() as snap:
        assert list(snap.scan("agg")) == rows


def test_a_measure_that_nobody_registered_is_refused() -> None:
    with kivi.open() as db:
        db.create_event_table("events", event_time="ts", columns=COLUMNS)
        with pytest.raises(kivi.SchemaError, match="there is no measure 'unheard_of' here; there are sum, count"):
            db.create_aggregate("agg", "events", ["g"], {"b": kivi.measure("unheard_of", "x")})


def test_a_package_that_cannot_register_is_named(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "site" / "kivi_bits.py").write_text("def register():\n    raise RuntimeError('no')\n")
    ran = subprocess.run(
        [sys.executable, "-c", "import kivi; kivi.open()"], env={**os.environ, **environment}, cwd=ROOT,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "the measure 'bits_and_count' (kivi_bits:register) cannot be registered: no" in ran.stderr


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"name": 5}, "a measure's name"),
        ({"init": 1}, "init is a function"),
        ({"evaluate": None}, "evaluate is a function"),
        ({"takes": "int64"}, "takes is a list"),
        ({"takes": ["number"]}, "takes is a list"),
    ],
)
def test_a_registration_that_cannot_work_is_refused(wrong: dict[str, Any], says: str) -> None:
    right = {"name": "oddly", "id": 4_712, "state": "<i8", "init": abs, "combine": max, "evaluate": abs}
    with pytest.raises(kivi.InvalidArgument, match=says):
        kivi.register_measure(**(right | wrong))
    assert "oddly" not in OWN
