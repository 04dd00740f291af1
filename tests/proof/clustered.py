"""A cluster of real processes under attack, judged by the replay oracle: three nats-servers, three nodes, one machine.

::

    links        a proxy between nodes and nats-servers, and among nats-servers (``tests.cluster.links``)
    clients      those of the concurrent checkers, each of all nodes; what they send fails over
    readers      one for each node, of that node alone: plain snapshots, and such with a bound of age (C1, C8)
    probes       small blind commits one after the other, to see for how long none is acknowledged
    faults       one after the other; each ends mended, and the cluster has to come back
    afterwards   every table on every node, twice; every answer of everybody must be the replay of CTS <= S

A fault is an iterator: what comes before its ``yield`` begins it, what comes after it mends it, and what it yields is
for how many seconds it lasts. ``Seen`` says what the clients noticed of one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kivi
from kivi.errors import CommitUnknown, DataLoss, KiviError, Retryable, SnapshotTooOld, Unavailable
from tests.cluster.links import Links
from tests.cluster.traffic import wait_for
from tests.log.natscluster import NatsCluster
from tests.oracle import Attempt, Mismatch, Op, Oracle
from tests.proof.concurrent import ARGUMENTS, clients_of, finish, read_all, resolve
from tests.proof.damage import cut, files_of, flip
from tests.proof.workloads import TABLES, Client, fund, make_tables
from tests.serverproc import EndedError, ServerProcess
from tests.waiting import wait_until

__all__ = ["BOUNDS_S", "FAULTS", "Seen", "besieged"]

SIZE = 3
CALLERS = 12
PROBES = 4
LOG_BYTES = 1 << 30
DISK_BYTES = 2 << 30
BACK_S = 180.0
"""So long a cluster may take to come back from anything, on a machine that does much else; beyond it a run fails."""
BOUNDS_S = {
    "a node killed": 2.0,
    "a node stopped": 12.0,
    "a node cut off": None,
    "a rolling restart": 2.0,
    "a damaged node": None,
    "a damaged copy of the log": None,
    "a nats-server killed": 10.0,
    "a nats-server stopped": 10.0,
    "a nats-server cut off": 10.0,
    "no quorum": None,
    "a full disk": 10.0,
    "all killed": None,
}
"""For how long no commit of a client is acknowledged, by the failure table; None where that is as long as it lasts."""


@dataclass(frozen=True)
class Seen:
    """What became of one fault. ``gap_s``: the longest time in which a client had no commit acknowledged; ``back_s``:
    from its end until every node had all that was acknowledged by then."""

    fault: str
    what: str
    lasted_s: float
    gap_s: float
    back_s: float
    failed: int
    """Calls of probes that ended with an error."""

    @property
    def is_late(self) -> bool:
        bound_s = BOUNDS_S[self.fault]
        return bound_s is not None and self.gap_s > bound_s

    def told(self) -> str:
        return (
            f"{self.fault} ({self.what}), {self.lasted_s:.1f} s: no commit of a client for {self.gap_s:.1f} s, "
            f"{self.failed} calls failed, back after {self.back_s:.1f} s"
        )


class Acknowledged:
    """Which commit was the newest that was acknowledged to anybody, by the time. Thread safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._known: list[tuple[float, int]] = []

    def add(self, commit_ts: int) -> None:
        with self._mutex:
            self._known.append((time.monotonic(), commit_ts))

    def newest(self, before: float) -> int:
        with self._mutex:
            return max((ts for at, ts in self._known if at < before), default=0)


class Probe(Client):
    """One more, again and again. ``acks``: when the commits were acknowledged."""

    def __init__(self, db: Any, oracle: Oracle, seed: int, known: Acknowledged) -> None:
        super().__init__(db, oracle, seed)
        self.known = known
        self.acks: list[float] = []

    def step(self) -> None:
        op = Op("delta", "counters", (0,), {"n": 1})
        tx = self.db.transaction()  # without a token of its own, so that the client may repeat it
        tx.delta(op.table, op.key, **op.values)
        attempt = Attempt(None, [op], "aborted", who=self.name, after=self.acknowledged)
        try:
            attempt.commit_ts = tx.commit()
            attempt.outcome = "committed"
            self.acknowledged = max(self.acknowledged, attempt.commit_ts or 0)
            self.acks.append(time.monotonic())
            self.known.add(self.acknowledged)
        except CommitUnknown as error:
            attempt.outcome, attempt.token = "unknown", error.token
            self.unknown += 1
        except (Retryable, SnapshotTooOld):
            self.restarted += 1
        finally:
            self.oracle.attempt(attempt)
        time.sleep(0.02)

    @property
    def failed(self) -> int:
        return self.unknown + self.restarted + self.unreachable

    def gap_s(self, began: float, ended: float) -> float:
        inside = [began, *(at for at in tuple(self.acks) if began < at < ended), ended]
        return max(later - earlier for earlier, later in itertools.pairwise(inside))


class Reader(Client):
    """Of one node, whatever becomes of it; ``refused`` counts what it could not say in time (C8)."""

    def __init__(self, db: Any, oracle: Oracle, seed: int, known: Acknowledged, node: str) -> None:
        super().__init__(db, oracle, seed)
        self.name, self.known, self.refused = f"reader of {node}", known, 0

    def step(self) -> None:
        bound_s = self.random.choice((None, 0, 1, 5))
        asked = time.monotonic()
        arguments: dict[str, Any] = {} if bound_s is None else {"max_staleness": f"{bound_s}s"}
        try:
            with self.db.snapshot(**arguments) as snap:
                if bound_s is not None and snap.ts < (least := self.known.newest(asked - bound_s)):
                    raise Mismatch(f"C8: {self.name} asked for at most {bound_s} s, and {snap.ts} is below {least}")
                for table in self.random.sample([*TABLES], 2):
                    self.scan(snap, table)
        except DataLoss:  # of a node whose files were damaged
            self.refused += 1
            time.sleep(0.2)
        except Unavailable:
            self.refused += 1
            raise
        time.sleep(0.05)


class Cluster:
    """The processes. ``settled``: until each of them is as it should be."""

    def __init__(self, place: Path, links: Links, rng: random.Random) -> None:
        self.place, self.links, self.rng = place, links, rng
        self.disk = self._disk()
        self.nats = NatsCluster(
            place, SIZE, max_bytes=2 * LOG_BYTES, through=lambda i, address: links.link("", f"n{i}", address)
        )
        self.nodes = [self._node(i) for i in range(SIZE)]
        self.renewed, self.is_spoilt = 0, False

    def _disk(self) -> Path | None:
        """A file system of the first nats-server's own, where that can be had."""
        path = self.place / "nats-0"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
        done = subprocess.run(command, capture_output=True, check=False) if os.getuid() == 0 else None
        return path if done is not None and done.returncode == 0 else None

    def _node(self, i: int) -> ServerProcess:
        urls = [f"nats://{self.links.link(f'node-{i}', server.name, server.listen)}" for server in self.nats.servers]
        told = ("--cluster", "apm", "--nats", ",".join(urls), "--log-bytes", str(LOG_BYTES))
        return ServerProcess(self.place / f"node-{i}", *told, *ARGUMENTS)

    @property
    def endpoint(self) -> str:
        return ",".join(node.endpoint for node in self.nodes)

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as opened:
            if self.disk is not None:
                opened.callback(subprocess.run, ["umount", "--lazy", str(self.disk)], check=False)
            opened.enter_context(self.nats)
            for node in self.nodes:
                opened.callback(node.__exit__)
            self.start(*self.nodes)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        for node in self.nodes:
            if node.process is not None and node.process.poll() is None:
                node.signal(signal.SIGCONT)
        self._opened.close()

    def start(self, *nodes: ServerProcess) -> None:
        """All at once: each waits for the log."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: node.start(BACK_S), nodes))

    def any_node(self) -> tuple[int, ServerProcess]:
        i = self.rng.randrange(SIZE)
        return i, self.nodes[i]

    def any_server(self) -> int:
        """Which nats-server: the log's leader every other time."""
        if self.rng.random() < 0.5:
            with contextlib.suppress(KiviError, TypeError, ValueError), kivi.connect(self.endpoint, timeout=10) as db:
                return int(db.cluster_status()["log"]["leader"][1:])
        return self.rng.randrange(SIZE)

    def renew(self, i: int) -> None:
        """A node whose directory is of no use any more begins again with a copy of another one."""
        node, other = self.nodes[i], self.nodes[(i + 1) % SIZE]
        if node.process is not None and node.process.poll() is None:
            node.kill()
        shutil.rmtree(node.data)
        with kivi.connect(other.endpoint, timeout=BACK_S) as db:
            db.checkpoint(node.data)
        node.start(BACK_S)
        self.renewed += 1

    def settle(self, at_least: int) -> None:
        """Waits until every node has that commit and every copy of the log is whole. Raises Mismatch for nodes that
        disagree or have stopped."""
        wait_until(self.nats.is_ready, BACK_S, reason=lambda: [server.problem for server in self.nats.servers])
        for node in self.nodes:
            assert node.process is not None
            if node.process.poll() is not None:
                raise Mismatch(f"node {node.data} has ended by itself: {''.join(node.output[-20:])}")
            with kivi.connect(node.endpoint, timeout=BACK_S) as db:
                wait_for(at_least, db)
                found = db.cluster_status()
                if found["failed"]:
                    raise Mismatch(f"node {node.data}: {found['failed']}")
                for one in found["nodes"]:
                    if one["agrees"] is False:
                        raise Mismatch(f"C5: node {one['address']} has applied something else than {node.endpoint}")


Fault = Callable[[Cluster], Iterator[tuple[str, float]]]


def node_killed(cluster: Cluster) -> Iterator[tuple[str, float]]:
    i, node = cluster.any_node()
    node.kill()
    yield f"node {i}", cluster.rng.uniform(0, 5)
    cluster.start(node)


def node_stopped(cluster: Cluster) -> Iterator[tuple[str, float]]:
    i, node = cluster.any_node()
    node.signal(signal.SIGSTOP)
    yield f"node {i}", cluster.rng.uniform(1, 30)
    node.signal(signal.SIGCONT)


def node_cut_off(cluster: Cluster) -> Iterator[tuple[str, float]]:
    i, _ = cluster.any_node()
    resets = cluster.rng.random() < 0.5
    with cluster.links.cut(lambda source, target: source == f"node-{i}", resets=resets):
        yield f"node {i}, {'reset' if resets else 'silent'}", cluster.rng.uniform(1, 15)


def rolling_restart(cluster: Cluster) -> Iterator[tuple[str, float]]:
    for i, node in enumerate(cluster.nodes):
        if node.stop() != 0:
            raise Mismatch(f"node {i} did not end well: {''.join(node.output[-20:])}")
        cluster.start(node)
    yield "all nodes", 0.0


def node_damaged(cluster: Cluster) -> Iterator[tuple[str, float]]:
    """Files of a node that is down are spoilt. It refuses to start, or refuses what it cannot read, or nothing that is
    in use was hit, and the oracle judges what it answers; then it begins again with a copy."""
    i, node = cluster.any_node()
    node.kill()
    files = [file for file in files_of(Path(node.data)) if file.parts[0] == "engine"]
    done = []
    for file in cluster.rng.sample(files, min(3, len(files))):
        how = cluster.rng.choice((flip, cut))
        with contextlib.suppress(IndexError):  # of a file of zeros
            done.append(f"{file} {how(Path(node.data, file), cluster.rng)}")
    noticed = "nothing in use was hit"
    try:
        node.start(BACK_S)
        with kivi.connect(node.endpoint, timeout=20) as db, db.snapshot() as snap:
            for table in TABLES:
                list(snap.scan(table))
    except EndedError:
        noticed = "it did not start: " + node.output[-1].strip()
    except (RuntimeError, KiviError) as error:
        noticed = f"it refused: {error}"
    yield f"node {i}: {', '.join(done)}: {noticed}", 2.0
    cluster.renew(i)


def server_killed(cluster: Cluster) -> Iterator[tuple[str, float]]:
    i = cluster.any_server()
    cluster.nats.servers[i].kill()
    yield f"n{i}", cluster.rng.uniform(0, 12)
    cluster.nats.servers[i].start()


def server_stopped(cluster: Cluster) -> Iterator[tuple[str, float]]:
    i = cluster.any_server()
    with cluster.nats.stopped(i):
        yield f"n{i}", cluster.rng.uniform(1, 30)


def server_cut_off(cluster: Cluster) -> Iterator[tuple[str, float]]:
    """From the other servers; its clients still reach it."""
    i, resets = cluster.any_server(), cluster.rng.random() < 0.5
    with cluster.links.cut(lambda source, target: f"n{i}" in (source, target) and source[:4] != "node", resets=resets):
        yield f"n{i}, {'reset' if resets else 'silent'}", cluster.rng.uniform(1, 20)


def copy_damaged(cluster: Cluster) -> Iterator[tuple[str, float]]:
    """One bit in what one nats-server has of the log. A node that begins with the first message, and reads all of it,
    finds the message at another server. Only once: two such copies may be all that there are of one message."""
    if cluster.is_spoilt:
        yield "again", 0.0
        return
    cluster.is_spoilt = True
    server, (i, node) = cluster.nats.servers[-1], cluster.any_node()
    server.kill()
    blocks = sorted((server.directory / "store").rglob("*.blk"), key=lambda file: file.stat().st_size)
    where = flip(blocks[-1], cluster.rng)
    node.kill()
    server.start()
    yield f"{server.name}, {where} of {blocks[-1].name}; node {i} begins with the first message", 1.0
    shutil.rmtree(node.data)
    cluster.start(node)


def no_quorum(cluster: Cluster) -> Iterator[tuple[str, float]]:
    two = cluster.rng.sample(cluster.nats.servers, 2)
    for server in two:
        server.kill()
    yield " and ".join(server.name for server in two), cluster.rng.uniform(2, 10)
    for server in two:
        server.start()


def disk_full(cluster: Cluster) -> Iterator[tuple[str, float]]:
    assert cluster.disk is not None
    ballast = cluster.disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 10))
    yield "n0", 15.0
    ballast.unlink()


def all_killed(cluster: Cluster) -> Iterator[tuple[str, float]]:
    """The power of the whole room; what a kernel has not written yet is not lost with it."""
    for node in cluster.nodes:
        node.signal(signal.SIGKILL)
    for server in cluster.nats.servers:
        server.kill()
    for node in cluster.nodes:
        node.wait()
    yield "all", 0.5
    for server in cluster.nats.servers:
        server.start()
    cluster.start(*cluster.nodes)


FAULTS: dict[str, Fault] = {
    "a node killed": node_killed,
    "a node stopped": node_stopped,
    "a node cut off": node_cut_off,
    "a rolling restart": rolling_restart,
    "a damaged node": node_damaged,
    "a damaged copy of the log": copy_damaged,
    "a nats-server killed": server_killed,
    "a nats-server stopped": server_stopped,
    "a nats-server cut off": server_cut_off,
    "no quorum": no_quorum,
    "a full disk": disk_full,
    "all killed": all_killed,
}


@dataclass
class Besieged:
    """``counted``: what clients did."""

    seen: list[Seen] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)


def besieged(
    place: Path,
    faults: Iterable[str],
    *,
    seed: int,
    rest_s: float = 4.0,
    say: Callable[[str], None] = lambda text: None,
) -> Besieged:
    """One cluster, these faults in this order, each asked for when the one before is over, and the judgement.
    Raises Mismatch, or what a client met. A full disk is left out where it cannot be had."""
    result, rng = Besieged(), random.Random(seed)
    with Links() as links, Cluster(place, links, rng) as cluster:
        db = kivi.connect(cluster.endpoint, timeout=BACK_S)
        oracle, known = Oracle(TABLES), Acknowledged()
        make_tables(db)
        first = fund(db, oracle)
        clients = clients_of(cluster.endpoint, oracle, seed, first=first, callers=CALLERS)
        probes = [Probe(kivi.connect(cluster.endpoint, timeout=60), oracle, 200 + i, known) for i in range(PROBES)]
        readers = [
            Reader(kivi.connect(node.endpoint, timeout=5), oracle, 300 + i, known, f"node {i}")
            for i, node in enumerate(cluster.nodes)
        ]
        everybody: list[Client] = [*clients, *probes, *readers]
        cluster.settle(first)
        stop = threading.Event()
        threads = [threading.Thread(target=one.run, args=(stop,), name=one.name) for one in everybody]
        for thread in threads:
            thread.start()
        try:
            for name in faults:
                if name == "a full disk" and cluster.disk is None:
                    continue
                time.sleep(rest_s)
                result.seen.append(_suffered(cluster, name, probes, known))
                say(result.seen[-1].told())
                if any(one.failure is not None for one in everybody):
                    break
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        finish(everybody)
        resolve(db, oracle)
        last = max(attempt.commit_ts or 0 for attempt in oracle.attempts)
        for i, node in enumerate(cluster.nodes):
            with kivi.connect(node.endpoint, timeout=BACK_S) as one:
                read_all(one, oracle, f"the last of node {i}", at_least=last)
        report = oracle.check()
        cluster.settle(last)
        db.close()
        result.counted.update(
            commits=report.commits,
            aborts=report.aborts,
            reads=report.reads,
            unknown=report.unknown,
            refused=sum(reader.refused for reader in readers),
            renewed=cluster.renewed,
        )
    return result


def _suffered(cluster: Cluster, name: str, probes: list[Probe], known: Acknowledged) -> Seen:
    failed, began = sum(probe.failed for probe in probes), time.monotonic()
    fault = FAULTS[name](cluster)
    what, lasts_s = next(fault)
    time.sleep(lasts_s)
    next(fault, None)
    mended = time.monotonic()
    cluster.settle(known.newest(mended))
    back = time.monotonic()
    time.sleep(1.0)
    return Seen(
        name,
        what,
        mended - began,
        max(probe.gap_s(began, time.monotonic()) for probe in probes),
        back - mended,
        sum(probe.failed for probe in probes) - failed,
    )
