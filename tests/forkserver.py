"""Processes of Python that begin with their imports done: forks of one that has loaded what a server is made of.

::

    process = Forked("kivi_server", ["--data", path])    # as: python -m kivi_server --data PATH
    process.pid, process.stdout, process.poll(), process.wait(10), process.send_signal(9)   # as of subprocess.Popen

The imports of a server take several times the processor time of all else that it does until it listens, and the tests
start hundreds. A fork is a process of its own in whatever they ask of one: it has its own files, memory and threads,
is killed, and ends as an interpreter does. What it cannot show is the start of a program: tests of that, of a command
as it is installed, or of an environment that is read as the interpreter or a library begins, start one.

Invariant: the process that is forked runs nothing but this module. It has no thread of Python's, no store, no client
and no event loop, so what a fork has of it that a new program would not have is modules alone.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

__all__ = ["Forked"]

ROOT: Final = Path(__file__).resolve().parent.parent
LOADED: Final = (
    "kivi_server.process.serve",
    "kivi_server.http.application",
    "kivi_server.http.listener",
    "kivi_server.otlp.exports",
    "kivi_server.otlp.listener",
    "kivi.cluster",
)
"""What servers of the tests load, those of HTTP, of OpenTelemetry and of clusters as well."""
ORDER_BYTES_MAX: Final = 1 << 17
PASSED_MAX: Final = 8

_lock: Final = threading.Lock()


class Forked:
    """A child of the process that forks, which tells when it has ended.

    It has descriptors like those in ``passed``, whose numbers are the last of its arguments.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] = os.environ,
        passed: Sequence[int] = (),
    ) -> None:
        order = json.dumps({"module": module, "arguments": [*arguments], "environment": {**environment}})
        output, given = os.pipe()
        told, telling = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._told = told.detach()
        with telling, open(given, "wb"), _lock:
            asking, _ = _forking()
            socket.send_fds(asking, [order.encode()], [given, telling.fileno(), *passed])
        self.stdout: TextIO = open(output, encoding="utf-8")  # noqa: SIM115
        self.returncode: int | None = None
        self._ended = threading.Lock()
        self.pid = self._number()

    def __del__(self) -> None:
        os.close(self._told)

    def _number(self) -> int:
        if not (said := os.read(self._told, 64)):
            raise RuntimeError("the process that forks has ended")
        return int(said)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or the negative number of the signal that ended it. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._told, select.POLLIN)
            if not waiting.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            with self._ended:
                if self.returncode is None:
                    self.returncode = self._number()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended since it was asked, as for subprocess.Popen
                os.kill(self.pid, number)


@functools.cache
def _forking() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Where it is asked, and the process, which ends with this one."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forkserver", str(its.fileno())],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
        )
    atexit.register(process.wait, 10.0)
    atexit.register(ours.close)  # which comes first
    return ours, process


def _order(asked: socket.socket) -> dict[str, Any] | None:
    """In a fork, what it is to run; None where nobody asks any more."""
    selector = selectors.DefaultSelector()
    selector.register(asked, selectors.EVENT_READ)
    children: dict[int, tuple[int, int]] = {}
    """By a descriptor that is readable when it has ended: its pid, and where that is told."""
    while True:
        for key, _ in selector.select():
            if key.fd in children:
                selector.unregister(key.fd)
                pid, telling = children.pop(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):
                    os.write(telling, str(code).encode())
                os.close(telling)
                os.close(key.fd)
                continue
            said, given, _, _ = socket.recv_fds(asked, ORDER_BYTES_MAX, 2 + PASSED_MAX)
            if not said:
                return None
            output, telling, *passed = given
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # NumPy's BLAS has threads
                pid = os.fork()
            if pid == 0:
                selector.close()
                asked.close()
                for descriptor in (telling, *children, *(told for _, told in children.values())):
                    os.close(descriptor)
                for standard in (1, 2):
                    os.dup2(output, standard)
                os.close(output)
                order = json.loads(said)
                return {**order, "arguments": [*order["arguments"], *map(str, passed)]}
            for descriptor in (output, *passed):
                os.close(descriptor)
            os.write(telling, str(pid).encode())
            ended = os.pidfd_open(pid)
            children[ended] = pid, telling
            selector.register(ended, selectors.EVENT_READ)


def main() -> None:
    for name in LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    order = None
    with contextlib.suppress(KeyboardInterrupt):
        order = _order(socket.socket(fileno=int(sys.argv[1])))
    if order is not None:
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.argv[:] = [order["module"], *order["arguments"]]
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
