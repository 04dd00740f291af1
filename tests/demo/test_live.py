"""The live part beside a server elsewhere, as the containers run it: nobody holds its stdin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import kivi
from tests.serverproc import ROOT, ServerProcess
from tests.waiting import wait_until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "data") as running:
        yield running


def start(server: ServerProcess, landing: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "apm_demo.live", "--endpoint", server.endpoint, "--landing", str(landing)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    word, _, address = process.stdout.readline().strip().partition(" ")
    assert word == "ready"
    return process, address


def ended(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    with process.stdout:
        return process.wait(60)


def test_it_makes_the_tables_serves_the_dashboard_and_lands_events(server: ServerProcess, tmp_path: Path) -> None:
    landing = tmp_path / "landing"
    process, address = start(server, landing)
    try:
        with urllib.request.urlopen(address, timeout=60) as page:
            assert page.status == 200

        def landed() -> list[Path]:
            assert process.poll() is None
            return list(landing.glob("*.json*"))

        files = wait_until(landed, 60, pause_s=0.1)
        event = json.loads(files[0].read_text().splitlines()[0])
        assert event["resp_time_us"] > 0
        with kivi.connect(server.endpoint) as db, db.snapshot() as snapshot:
            assert "endpoint_5m" in db.tables()
            assert snapshot.get("endpoints", (event["endpoint_id"],)) is not None
    finally:
        assert ended(process) == 0
    again, _ = start(server, landing)  # the tables are there
    assert ended(again) == 0


def test_a_server_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "apm_demo.live", "--endpoint", "localhost:1", "--landing", str(tmp_path)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "localhost:1" in done.stderr
