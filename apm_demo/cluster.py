"""The demonstration on three nodes, each with a server of their log, while one of each is killed: ``ClusterDemo``.

The traffic is the same: a web service and Spark, each connected to all three nodes. Beside it small clients
commit one by one, and write down when each commit was acknowledged, so that it is seen how long they had to wait. At
the end the sums are proved on every node by itself, at one snapshot that all have.

The traffic goes on for as long as it is told to; what is killed is killed at shares of that time, in ``_script``, which
the loop that watches the traffic moves on a step at a time.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx

import kivi
from apm_demo.children import Child, Failure
from apm_demo.demo import Demo, console
from apm_demo.proof import Finding, prove_live
from apm_demo.say import Voice

__all__ = ["Client", "ClusterDemo", "pulses_are"]

_NODES: Final = 3
_CLIENTS: Final = 6
_PAUSE_S: Final = 0.05
_KILL_AT: Final = (0.3, 0.6)  # of the time of live traffic: a node, a server of the log
_CALM_S: Final = 8.0  # for so long after a kill it is looked how long nobody could commit
_BACK_S: Final = 120.0
_PULSES: Final = "pulses"


class Client(threading.Thread):
    """Commits one by one to whichever node it is connected to, once that has heard of the commit ``made``;
    ``acknowledged`` has the moment of each."""

    def __init__(self, endpoint: str, number: int, made: int) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self._endpoint, self.number, self._made = endpoint, number, made
        self._ending = threading.Event()
        self.acknowledged: list[float] = []
        self.failure: kivi.KiviError | None = None

    def run(self) -> None:
        try:
            with kivi.connect(self._endpoint) as db:
                with db.snapshot(min_snapshot=self._made) as snapshot:
                    assert snapshot.ts >= self._made
                while not self._ending.wait(_PAUSE_S):
                    db.run(lambda tx: tx.delta(_PULSES, (self.number,), commits=1))
                    self.acknowledged.append(time.monotonic())
        except kivi.KiviError as error:
            self.failure = error

    def pause_s(self, since: float) -> float:
        """How long at most it had to wait for an acknowledgement after ``since``."""
        moments = [since, *(moment for moment in self.acknowledged if moment > since)]
        return max(later - before for before, later in zip(moments, [*moments[1:], time.monotonic()], strict=True))

    def end(self) -> None:
        self._ending.set()
        self.join()


class ClusterDemo(Demo):
    """``_nodes`` are the processes; one that was killed is replaced by the next one at the same place."""

    def __init__(self, data: Path, voice: Voice, stack: contextlib.ExitStack) -> None:
        super().__init__(data, voice, stack)
        self._peers = [f"localhost:{port}" for port in _free_ports(_NODES)]
        self._addresses = [f"localhost:{port}" for port in _free_ports(_NODES)]
        self._consoles = _free_ports(_NODES)
        self._nodes: list[Child] = []
        self._clients: list[Client] = []
        self._made = 0
        self._script: Iterator[None] = iter(())
        self._elapsed_s = 0.0
        self._counts = (0, 0)

    def start_server(self, port: int) -> str:
        self.voice.step("starting three nodes of a cluster, each with a nats-server of its own for their log")
        self._stack.callback(self._end_log_servers)
        self._consoles[0] = port or self._consoles[0]
        self._nodes = [self._start_node(i) for i in range(_NODES)]
        address = console(self._nodes[0])
        for node in self._nodes:
            node.wait_for("listening on", 60)
        names = self._connect(",".join(self._addresses))
        self._db.create_table(_PULSES, key={"client": "int64"}, columns={"commits": kivi.sum("int64")})
        self._made = self._db.watermark()  # another node may hear of the table later than its first client asks there
        self.voice.note(f"they listen on {self._endpoint} and have {len(names)} tables, of which most are aggregates")
        return address

    def _start_node(self, i: int) -> Child:
        return self._start(
            f"node-{i + 1}", "kivi.cli", "serve",
            "--data", str(self._directory(i)),
            "--listen", self._addresses[i],
            "--http", f"localhost:{self._consoles[i]}",
            "--cluster", "demo",
            "--peers", ",".join(self._peers),
            "--peer", self._peers[i],
            "--log-bytes", "1GiB",
        )  # fmt: skip

    def _directory(self, i: int) -> Path:
        return self.data / f"node-{i + 1}"

    def live_traffic(self, seconds: float) -> tuple[int, int]:
        self._clients = [Client(self._endpoint, number, self._made) for number in range(_CLIENTS)]
        for client in self._clients:
            client.start()
            self._stack.callback(client.end)
        self._script = self._falls(seconds)
        answered = super().live_traffic(seconds)
        for _ in self._script:  # what has not come back yet
            time.sleep(0.1)
        return answered

    def meanwhile(self, elapsed_s: float) -> None:
        self._elapsed_s = elapsed_s
        next(self._script, None)

    def _live_counts(self) -> tuple[int, int]:
        """What was seen last, while the node that was asked is gone."""
        with contextlib.suppress(kivi.Unavailable, kivi.Retryable, kivi.SnapshotTooOld):
            self._counts = super()._live_counts()
        return self._counts

    def replay(self) -> None:
        """The real trace is not part of this story."""

    # -- what is killed -------------------------------------------------------------------------------

    def _falls(self, seconds: float) -> Iterator[None]:
        """A node is killed and started again; then the server that leads the log, which its node starts again."""
        voice = self.voice
        yield from self._until_true(lambda: self._elapsed_s >= _KILL_AT[0] * seconds, seconds)
        i = max(range(_NODES), key=self._sessions)
        since = time.monotonic()
        self._watched.remove(self._nodes[i])
        self._nodes[i].kill()
        voice.note(f"kill -9 of node {i + 1}, on {self._addresses[i]}; the server of the log beside it goes on")
        yield from self._calm(since, f"node {i + 1} was killed")
        began = time.monotonic()
        node = self._nodes[i] = self._start_node(i)
        yield from self._until_true(lambda: any(line.startswith("listening on") for line in node.lines()), _BACK_S)
        voice.note(
            f"node {i + 1} is back, with all that it has missed, {time.monotonic() - began:.1f} s after its start"
        )

        yield from self._until_true(lambda: self._elapsed_s >= _KILL_AT[1] * seconds, seconds)
        i = self._leader()
        left = self._log_server(i)
        since = time.monotonic()
        if left is not None:
            os.kill(left, signal.SIGKILL)
        voice.note(f"kill -9 of the nats-server of node {i + 1}, which led the log")
        yield from self._until_true(lambda: self._log_server(i) not in (None, left), _BACK_S)
        back = time.monotonic() - since
        yield from self._calm(since, f"the nats-server of node {i + 1} was killed")
        voice.note(f"node {i + 1} had started its nats-server again after {back:.1f} s")

    def _until_true(self, reached: Callable[[], bool], most_s: float) -> Iterator[None]:
        """Raises Failure if it takes longer than ``most_s``, a long time."""
        deadline = time.monotonic() + most_s + _BACK_S
        while not reached():
            self._check()
            if time.monotonic() > deadline:
                raise Failure(f"what was killed is not back after {most_s + _BACK_S:.0f} s")
            yield

    def _calm(self, since: float, what: str) -> Iterator[None]:
        """Until all clients commit again; says how long they could not."""

        def is_calm() -> bool:
            now = time.monotonic()
            return now - since > _CALM_S and all(now - client.acknowledged[-1] < 1.0 for client in self._clients)

        yield from self._until_true(is_calm, _BACK_S)
        pauses = sorted(client.pause_s(since) for client in self._clients)
        self.voice.note(
            f"{what}: the longest that one of {_CLIENTS} clients waited for a commit was {pauses[-1]:.1f} s, "
            f"half of them at most {pauses[_CLIENTS // 2 - 1]:.1f} s"
        )

    def _check(self) -> None:
        super()._check()
        for client in self._clients:
            if client.failure is not None:
                raise Failure(f"a client's commit has failed: {client.failure}")

    def _sessions(self, i: int) -> float:
        """How many clients have a session with the node."""
        with kivi.connect(self._addresses[i]) as db:
            return float(db.stats()["server_sessions"])

    def _leader(self) -> int:
        """Whose nats-server leads the log. Its monitor says so, which is the same for each."""
        conf = (self._directory(0) / "nats-server" / "nats.conf").read_text()
        (monitor,) = re.findall(r'^http: "(.*)"', conf, re.MULTILINE)
        said = httpx.get(f"http://{monitor}/jsz", params={"streams": "true"}, timeout=10, trust_env=False).json()
        (stream,) = said["account_details"][0]["stream_detail"]
        return self._peers.index(stream["cluster"]["leader"])

    def _log_server(self, i: int) -> int | None:
        """Its process id; None if it does not run."""
        with contextlib.suppress(OSError, ValueError):
            pid = int((self._directory(i) / "nats-server" / "pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            return pid if os.fsencode(self._directory(i)) in command else None
        return None

    def _end_log_servers(self) -> None:
        """Those of nodes that have not ended by themselves."""
        for i in range(_NODES):
            if (pid := self._log_server(i)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # -- the proof --------------------------------------------------------------------------------------

    def prove(self, answered: tuple[int, int]) -> list[Finding]:
        """All checks on each node, at one snapshot; says each."""
        for client in self._clients:
            client.end()
        self._check()
        self.voice.step(
            "proving the sums: recounting the landed files, and comparing with each node, at one snapshot of all"
        )
        committed = {client.number: len(client.acknowledged) for client in self._clients}
        findings: list[Finding] = []
        with contextlib.ExitStack() as stack:
            nodes = [stack.enter_context(kivi.connect(address)) for address in self._addresses]
            snapshots = [stack.enter_context(snapshot) for snapshot in _at_one_moment(nodes)]
            for i, snapshot in enumerate(snapshots):
                self.voice.note(f"node {i + 1}, on {self._addresses[i]}, at snapshot {snapshot.ts}:")
                found = [
                    *prove_live(snapshot, self.data / "landing" / "invocations", *answered),
                    pulses_are(snapshot, committed),
                ]
                self._say(found)
                findings += found
        return findings


def pulses_are(snapshot: Any, committed: dict[int, int]) -> Finding:
    stored = {row["client"]: row["commits"] for row in snapshot.scan(_PULSES)}
    wrong = [
        f"client {number}: {count} commits were acknowledged, and {stored.get(number, 0)} are in the store"
        for number, count in committed.items()
        if stored.get(number, 0) != count
    ]
    return Finding(
        f"{sum(committed.values()):,} commits of {len(committed)} clients were acknowledged, and count once", wrong
    )


def _at_one_moment(nodes: list[Any]) -> list[Any]:
    """A snapshot of each, all with one commit timestamp: nobody writes any more. Raises Failure if they do not meet."""
    ts = 0
    for _ in range(20):
        snapshots = [node.snapshot(min_snapshot=ts, ttl_s=300) for node in nodes]
        if len({snapshot.ts for snapshot in snapshots}) == 1:
            return snapshots
        ts = max(snapshot.ts for snapshot in snapshots)
        for snapshot in snapshots:
            snapshot.close()
    raise Failure("the nodes come to no snapshot that all have")


def _free_ports(count: int) -> list[int]:
    """Below those that the system gives to whoever connects somewhere: they have to stay free until a node is back."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", random.randrange(12_000, 32_000)))
                found.append(one.getsockname()[1])
        return found
