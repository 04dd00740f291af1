"""Nodes that each run a server of the log, and what is committed by them and found on them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from pathlib import Path

import kivi
from tests.cluster.traffic import Client, answers_of, newest_of, wait_for
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

__all__ = ["Node", "all_have", "commit"]


class Node(ServerProcess):
    """A server with one of the log's beside it, which ``kill`` leaves, and the end does not."""

    def __init__(self, data: Path, *arguments: str) -> None:
        super().__init__(data, "--cluster", "apm", "--log-bytes", "1GiB", *arguments)

    @property
    def log_server(self) -> int:
        """Its process id."""
        return int(Path(self.data, "nats-server", "pid").read_text())

    def log_server_runs(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return self._runs(self.log_server)
        return False

    def _runs(self, process: int) -> bool:
        with contextlib.suppress(OSError):
            return os.fsencode(self.data) in Path(f"/proc/{process}/cmdline").read_bytes()
        return False

    def await_log_server_after(self, before: int) -> None:
        """The node starts another one when it finds that this one has ended, in its own time."""

        def is_another() -> bool:
            with contextlib.suppress(OSError, ValueError):  # its number is being written
                return self.log_server != before and self.log_server_runs()
            return False

        wait_until(is_another)

    def kill_log_server(self) -> None:
        """SIGKILL; returns when it is gone, be there another one by then or not."""
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(Path(self.data, "nats-server", "companion", "pid").read_text()), signal.SIGKILL)
        with contextlib.suppress(OSError, ValueError):
            if self._runs(killed := self.log_server):
                os.kill(killed, signal.SIGKILL)
                wait_until(lambda: not self._runs(killed))

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.kill_log_server()


def commit(nodes: list[Node], seed: int, commits: int = 20) -> Counter[int]:
    """Clients of these nodes, each of one: what they have committed. All have heard of the tables by then."""
    newest = newest_of(nodes)
    for node in nodes:
        with kivi.connect(node.endpoint, timeout=60) as db:
            wait_for(newest, db)
    clients = [Client(node.endpoint, seed + i, commits) for i, node in enumerate(nodes)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert [client.failure for client in clients] == [None] * len(clients)
    return sum((client.done for client in clients), Counter())


def all_have(nodes: list[Node], wanted: Counter[int]) -> None:
    last = newest_of(nodes)
    answers = [answers_of(node, last) for node in nodes]
    assert answers == [answers[0]] * len(nodes)
    assert {row["endpoint"]: row["us"] for row in answers[0][1]} == dict(wanted)  # type: ignore[attr-defined]
    assert {row["endpoint"]: row["us"] for row in answers[0][2]} == dict(wanted)  # type: ignore[attr-defined]
