"""The live part beside a server elsewhere, as the containers run it: nobody holds its stdin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serverproc import ROOT, ServerProcess
from tests.waiting import wait_until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "data") as running:
        yield running


def start(server: ServerProcess, landing: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "apm_demo.live", "--endpoint", server.endpoint, "--landing", str(landing)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def ended(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    with process.stdout:
        return process.wait(60)


def test_it_makes_the_tables_and_lands_events(server: ServerProcess, tmp_path: Path) -> None:
    landing = tmp_path / "landing"
    process = start(server, landing)
    try:

        def landed() -> list[Path]:
            assert process.poll() is None
            return list(landing.glob("*.json*"))

        files = wait_until(landed, 60, pause_s=0.1)
        event = json.loads(files[0].read_text().splitlines()[0])
        assert event["duration_us"] > 0
        with server.connect() as db, db.snapshot() as snapshot:
            assert "endpoint_5m" in db.tables()
            assert snapshot.get("endpoints", (event["endpoint_id"],)) is not None
            assert [db.describe(name)["role"] for name in ("endpoint_5s", "endpoints")] == ["endpoints", "names"]
    finally:
        assert ended(process) == 0
    again = start(server, landing)  # the tables are there
    assert ended(again) == 0


def test_a_server_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "apm_demo.live", "--endpoint", "localhost:1", "--landing", str(tmp_path)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "localhost:1" in done.stderr
