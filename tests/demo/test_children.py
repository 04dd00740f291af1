"""Processes: what they say, what a failure says, and that nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from apm_demo.children import Child, Failure
from tests.waiting import wait_until


@pytest.fixture
def start(tmp_path: Path):
    """``start(program)``: the program as a child, imported as a module from a folder of this test."""
    started: list[Child] = []

    def start(program: str) -> Child:
        (tmp_path / "program.py").write_text(textwrap.dedent(program))
        started.append(Child("program", tmp_path / "program.log", "program", cwd=tmp_path))
        return started[-1]

    yield start
    for child in started:
        child.stop(0)


def gone(pid: int) -> bool:
    """Zombies count as gone: nobody else reaps what this test's children leave."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


GRANDCHILD = """
    import os, subprocess, sys, time
    inner = [sys.executable, "-c", "import os, time; os.setpgid(0, 0); print(os.getpid(), flush=True); time.sleep(300)"]
    subprocess.Popen(inner)
    time.sleep(300)
"""


def test_a_kill_takes_the_whole_session(start: Callable[[str], Child]) -> None:
    """Spark's Python workers make a process group of their own: the kill finds them by their session."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc")
    child = start(GRANDCHILD)
    inner = int(child.wait_for("", 60))
    assert not gone(inner)
    child._gone_s = 0.2
    child.kill()
    wait_until(lambda: gone(inner))
    assert child.exit_code == -9


def test_what_was_said_is_in_the_failure(start: Callable[[str], Child]) -> None:
    child = start("import sys; print('hello', flush=True); sys.exit('the reason')")
    with pytest.raises(Failure, match=r"(?s)ended before it said 'ready'.*the reason.*program\.log"):
        child.wait_for("ready", 60)
    with pytest.raises(Failure, match="exit code 1"):
        child.check()


def test_silence_is_a_failure(start: Callable[[str], Child]) -> None:
    child = start("import time; time.sleep(300)")
    with pytest.raises(Failure, match="did not say 'ready' within"):
        child.wait_for("ready", 0.2)


def test_lines_are_read_as_they_come(start: Callable[[str], Child]) -> None:
    child = start("print('ready 7', flush=True); print('more', flush=True)")
    assert child.wait_for("ready", 60) == "7"
    child.wait(60)
    assert wait_until(lambda: list(child.lines())) == ["more"]


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text(
        "import os, time\nfrom apm_demo.children import end_with_parent\n"
        "end_with_parent()\nprint(os.getpid(), flush=True)\ntime.sleep(300)\n"
    )
    program = (
        "import sys, time; from pathlib import Path; from apm_demo.children import Child; "
        f"child = Child('inner', Path({str(tmp_path / 'inner.log')!r}), 'inner', cwd=Path({str(tmp_path)!r})); "
        "print(child.wait_for('', 60), flush=True); time.sleep(300)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ})
    assert parent.stdout is not None
    with parent.stdout:
        inner = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_until(lambda: gone(inner))
