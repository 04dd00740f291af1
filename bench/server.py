"""The server under test: ``kivi serve`` in its own process on loopback, and what the system knows of that process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.serverproc import ServerProcess

__all__ = ["Server", "cpu_s", "disk_bytes"]


class Server(ServerProcess):
    """A program of its own, started as users start it: ``with Server(directory) as server: db = server.connect()``."""

    may_fork = False  # what it takes to start, and what memory a process has to itself, is measured

    def connect(self, **arguments: Any) -> Any:
        """A client that is patient: how long something takes is what is measured, not whether it is in time."""
        return super().connect(**{"timeout": 120.0, **arguments})

    @property
    def rss_bytes(self) -> int:
        """Its resident memory."""
        return self._kib("VmRSS") * 1024

    @property
    def peak_rss_bytes(self) -> int:
        """The most it has been since its start."""
        return self._kib("VmHWM") * 1024

    @property
    def cpu_s(self) -> float:
        """Processor time it has used, on all cores, in user and system mode."""
        return cpu_s(self.pid)

    def reopened_s(self) -> float:
        """kill -9, then start on the same directory; seconds until it listens."""
        self.kill()
        began = time.perf_counter()
        self.start(timeout_s=600)
        return time.perf_counter() - began

    def _kib(self, name: str) -> int:
        with open(f"/proc/{self.pid}/status") as file:
            for line in file:
                if line.startswith(name):
                    return int(line.split()[1])
        raise RuntimeError(f"no {name} in the status of process {self.pid}")


def cpu_s(pid: int) -> float:
    """Processor time that a process has used, on all cores, in user and system mode."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def disk_bytes(directory: str | os.PathLike[str]) -> int:
    """What the files of a directory take on disk: allocated blocks, so preallocated space counts as well."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:  # files come and go while the server works
                continue
    return total
