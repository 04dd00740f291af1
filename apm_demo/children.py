"""The demonstration's processes: started, listened to, killed when the story says so, and never left behind.

Each runs in a session of its own, so that Ctrl-C on the terminal reaches only the demonstration, which then ends them
in order, and so that a kill takes the whole job (Spark's Python, its Java and their workers). Their output goes to one
file each; lines on stdout are read as they come.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Child", "Failure", "end_with_parent"]


# The demonstration is not installed, it lies in the checkout: its processes, and those that Spark starts for them, find
# it wherever they work.
_ROOT = str(Path(__file__).resolve().parent.parent)
_IMPORTABLE = {"PYTHONPATH": os.pathsep.join(path for path in (_ROOT, os.environ.get("PYTHONPATH")) if path)}


class Failure(Exception):
    """The demonstration cannot go on; the text is for the person who started it."""


class Child:
    """One process group: ``python -m module arguments``."""

    _gone_s = 10.0  # how long what a killed process leaves in its session may take to end by itself

    def __init__(
        self,
        name: str,
        log: Path,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        with open(log, "ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,  # closes with this process: see end_with_parent
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **_IMPORTABLE, **(environment or {}), "PYTHONUNBUFFERED": "1"},
                cwd=cwd,
                start_new_session=True,
            )
        threading.Thread(target=self._read, name=f"read-{name}", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout, open(self.log, "a", encoding="utf-8") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def lines(self) -> list[str]:
        """What it has said since the last time; does not wait."""
        said = []
        with contextlib.suppress(queue.Empty):
            while (line := self._lines.get_nowait()) is not None:
                said.append(line)
        return said

    def wait_for(self, start: str, timeout_s: float) -> str:
        """The rest of the next line that begins with ``start``. Raises Failure if it ends, or stays silent, before."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise Failure(f"{self.name} did not say {start!r} within {timeout_s:.0f} s\n{self.tail()}") from None
            if line is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(5)  # its last words are in the log then
                raise Failure(f"{self.name} ended before it said {start!r}\n{self.tail()}")
            if line.startswith(start):
                return line.removeprefix(start).strip()

    def check(self) -> None:
        """Raises Failure if it has ended with an error."""
        if self.exit_code not in (None, 0):
            raise Failure(f"{self.name} ended with exit code {self.exit_code}\n{self.tail()}")

    def wait(self, timeout_s: float) -> None:
        """Until it ends by itself. Raises Failure if it does not, or with an error."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise Failure(f"{self.name} did not end within {timeout_s:.0f} s\n{self.tail()}") from None
        self.check()

    def terminate(self) -> None:
        """SIGTERM; does not wait."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to the whole group; returns when all of its session is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._gone(self._gone_s)

    def stop(self, timeout_s: float = 20) -> None:
        """SIGTERM, and SIGKILL for what is left after ``timeout_s``."""
        if self.exit_code is None:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        self.kill()

    def _gone(self, timeout_s: float) -> None:
        """Waits for Spark's Python workers: they leave the group, not the session, and end when their Java has."""
        deadline = time.monotonic() + timeout_s
        while left := _in_session(self._process.pid):
            if time.monotonic() > deadline:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.02)

    def tail(self, lines: int = 15) -> str:
        """The end of its log, for an error message."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
        except OSError:
            text = []
        return "\n".join([*(f"    {line}" for line in text), f"    (all of it: {self.log})"])


def _in_session(session: int) -> list[int]:
    """Processes of a session that are not zombies; none where /proc does not tell."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            # pid (name, which may contain anything) state ppid pgrp session ...
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.parent.name))
    return found


def end_with_parent() -> None:
    """Called in a child: SIGTERM to itself when the demonstration's end of its stdin closes, however that ended.

    A program that was started otherwise, in a container or by a service manager, has no pipe there.
    """
    try:
        if not stat.S_ISFIFO(os.fstat(0).st_mode):
            return
    except OSError:
        return

    def watch() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
