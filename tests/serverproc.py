"""A real server in its own process, on loopback, for tests: start, stop, kill, restart.

It is a fork that has its imports done (``tests.forkserver``), unless it has a command or an environment of its own.

::

    with ServerProcess(tmp_path / "data") as server:
        db = kivi.connect(server.endpoint)
        server.kill()          # SIGKILL
        server.start()         # the same directory, the same port
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import Any, ClassVar, Self

import kivi
from tests.forkserver import ROOT, Forked
from tests.ports import Port
from tests.waiting import PATIENCE_S

__all__ = ["ROOT", "EndedError", "ServerProcess"]


class EndedError(RuntimeError):
    """The server ended by itself before it listened; ``process.returncode`` says how."""


class ServerProcess:
    """``kivi serve`` on a directory, at a port of its own, which it keeps while it is away."""

    may_fork: ClassVar[bool] = hasattr(os, "pidfd_open")

    def __init__(self, data: str | os.PathLike[str], *arguments: str, host: str = "localhost") -> None:
        self.data = os.fspath(data)
        self.arguments = list(arguments)
        self.host = host
        self.command = [sys.executable, "-m", "kivi_server"]
        self.environment: dict[str, str] = {}
        self._held = Port()
        self.port = self._held.number
        self.process: subprocess.Popen[str] | Forked | None = None
        self.output: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    @property
    def is_forked(self) -> bool:
        """As a module of this Python is, with nothing of its own that a program looks for as it starts."""
        return self.may_fork and self.command[:2] == [sys.executable, "-m"] and not self.environment

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def http(self) -> str:
        """The address of its listener for HTTP (``--http``)."""
        return next(line for line in reversed(self.output) if line.startswith("http on ")).split()[-1]

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self, timeout_s: float = 90.0) -> Self:
        """Starts it and waits until it listens. Raises RuntimeError with what it has said since then if it does not;
        EndedError, which is one, if it ended."""
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **self.environment}
        self._lines = queue.SimpleQueue()
        before = len(self.output)
        command = [*self.command, "--data", self.data, "--listen", f"{self.host}:{self.port}", *self.arguments]
        if self.is_forked:
            self.process = Forked(command[2], command[3:], environment)
        else:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment
            )
        threading.Thread(target=self._read, args=(self.process, self._lines), daemon=True).start()
        while True:
            try:
                line = self._lines.get(timeout=timeout_s)
            except queue.Empty:
                self.kill()
                raise RuntimeError("the server does not listen: " + "".join(self.output[before:])) from None
            if line is None:
                self.process.wait()
                raise EndedError("the server ended: " + "".join(self.output[before:]))
            if line.startswith("listening on "):
                return self

    def _read(self, process: subprocess.Popen[str] | Forked, lines: queue.SimpleQueue[str | None]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.output.append(line)
                lines.put(line)
        lines.put(None)

    def connect(self, **arguments: Any) -> Any:
        """A client of it; ``arguments`` are those of ``kivi.connect``. Unless a test is about a timeout it has none of
        the ten seconds that a client has, in which a busy machine may not answer."""
        return kivi.connect(self.endpoint, **{"timeout": PATIENCE_S, **arguments})

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, and its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL: what a crash of the process does."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, timeout_s: float = 60.0) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def restart(self) -> Self:
        """kill -9, then the same directory on the same port."""
        self.kill()
        return self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
