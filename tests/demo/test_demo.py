"""What the demonstration does when it must not or cannot go on; ``tests/docs/test_demo.py`` runs the whole of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from apm_demo.children import Failure
from apm_demo.demo import clean


def demo(data: Path, *arguments: str, home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "apm_demo", "--data", str(data), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HOME": str(home)},
    )


def left_behind(data: Path) -> list[str]:
    """Command lines of processes that work on the directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(data) in command:
            found.append(command)
    return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    made = tmp_path / "home"
    made.mkdir()
    return made


@pytest.mark.story
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_all_it_started_when_it_is_told_to(tmp_path: Path, home: Path, number: signal.Signals) -> None:
    data = tmp_path / "data"
    process = demo(data, home=home)
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if "starting a web service" in line:
                break
        time.sleep(1.5)  # somewhere in the start of Spark
        process.send_signal(number)
        said = process.stdout.read()
    assert process.wait(60) == (130 if number == signal.SIGINT else 143)
    assert "every process that was started has ended" in said
    assert left_behind(data) == []


def test_a_port_that_is_taken_is_said_and_nothing_is_left(tmp_path: Path, home: Path) -> None:
    import socket

    data = tmp_path / "data"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = demo(data, "--port", str(port), home=home)
        said, _ = process.communicate()
    assert process.returncode == 1
    assert f"localhost:{port}" in said
    assert "nothing was proved" in said
    assert left_behind(data) == []


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(Failure, match="was not made by this demonstration"):
        clean(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_its_own_directory_is_cleaned(tmp_path: Path) -> None:
    data = clean(tmp_path / "data")
    (data / "landing" / "invocations" / "old.jsonl").write_text("old")
    clean(tmp_path / "data")
    assert sorted(p.name for p in data.rglob("*") if p.is_file()) == [".kivi-demo"]
