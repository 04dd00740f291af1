"""A cluster of real processes under attack, judged by the replay oracle: three nats-servers, three nodes, one machine.

::

    links        a proxy between nodes and nats-servers, and among nats-servers (``tests.cluster.links``)
    clients      those of the concurrent checkers, each of all nodes; what they send fails over
    readers      one for each node, of that node alone: plain snapshots, and such with a bound of age (C1, C8)
    spread       of a table whose shards lie on the nodes, of subscriptions, and of pins (``spread``)
    probes       small blind commits one after the other, to see for how long none is acknowledged
    faults       one after the other; each ends mended, and the cluster has to come back
    afterwards   every table on every node, twice; every answer of everybody must be the replay of CTS <= S

A fault is an iterator: what comes before its ``yield`` begins it, what comes after it mends it, and what it yields is
for how many seconds it lasts. ``Seen`` says what the clients noticed of one.
"""

from __future__ import annotations

import contextlib
import functools
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
from kivi.errors import CommitUnknown, DataLoss, InvalidArgument, KiviError, Retryable, SnapshotTooOld, Unavailable
from kivi.log.shards import EVERY, SHARDS, parse_shards, shown_shards
from tests.cluster.links import Links
from tests.cluster.traffic import wait_for
from tests.log.natscluster import NatsCluster
from tests.oracle import Attempt, Mismatch, Op, Oracle
from tests.proof.concurrent import ARGUMENTS, clients_of, finish, read_all, resolve
from tests.proof.damage import cut, files_of, flip
from tests.proof.spread import SPREAD, Following, Pinned, Sharded, Subscribed, Watching, make_spread
from tests.proof.workloads import TABLES, Client, fund, make_tables
from tests.serverproc import EndedError, ServerProcess
from tests.waiting import wait_until

__all__ = ["BOUNDS_S", "FAULTS", "FULL", "Seen", "besieged"]

SIZE = 3
CALLERS = 12
PROBES = 4
HELD = ("0-41", "22-63", "0-21,42-63")
"""What the nodes begin with: each shard is on two of them, and no node has all."""
COPIES = 2
LOG_BYTES = 1 << 30
DISK_BYTES = 2 << 30
FULL = tuple(f"a full disk of n{i}" for i in range(SIZE))
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
    **dict.fromkeys(FULL, 10.0),
    "shards moved": 2.0,
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
    span_s: float
    """The longest that a read took of rows which several nodes hold, of those that had an answer."""

    @property
    def is_late(self) -> bool:
        bound_s = BOUNDS_S[self.fault]
        return bound_s is not None and self.gap_s > bound_s

    def told(self) -> str:
        return (
            f"{self.fault} ({self.what}), {self.lasted_s:.1f} s: no commit of a client for {self.gap_s:.1f} s, "
            f"{self.failed} calls failed, a read that spans nodes took {self.span_s:.1f} s, "
            f"back after {self.back_s:.1f} s"
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
                for table in self.random.sample([*self.oracle.tables], 2):
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
        self.disks = [self._disk(i) for i in range(SIZE)]
        self.nats = NatsCluster(
            place, SIZE, max_bytes=2 * LOG_BYTES, through=lambda i, address: links.link("", f"n{i}", address)
        )
        self.nodes = [self._node(i) for i in range(SIZE)]
        self.renewed, self.is_spoilt = 0, False

    def _disk(self, i: int) -> Path | None:
        """A file system of a nats-server's own, where that can be had."""
        path = self.place / f"nats-{i}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
        done = subprocess.run(command, capture_output=True, check=False) if os.getuid() == 0 else None
        return path if done is not None and done.returncode == 0 else None

    def _node(self, i: int) -> ServerProcess:
        urls = [f"nats://{self.links.link(f'node-{i}', server.name, server.listen)}" for server in self.nats.servers]
        told = ("--cluster", "apm", "--nats", ",".join(urls), "--log-bytes", str(LOG_BYTES), "--shards", HELD[i])
        return ServerProcess(self.place / f"node-{i}", *told, *ARGUMENTS)

    @property
    def endpoint(self) -> str:
        return ",".join(node.endpoint for node in self.nodes)

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as opened:
            for disk in filter(None, self.disks):
                opened.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=False)
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

    def held(self, db: Any) -> list[tuple[str, int]]:
        """The number and the shards of each node: of one that was begun anew, those of its newest life."""
        found = sorted(db.cluster_status()["nodes"], key=lambda one: one["silent_s"], reverse=True)
        newest = {one["address"]: one for one in found if one["state"] in ("live", "silent")}
        lives = [newest[node.endpoint] for node in self.nodes]
        return [(one["node"], parse_shards(one["shards"])) for one in lives]

    def spread(self) -> None:
        """Has every shard be on two nodes, where a directory that was lost has left it on one."""
        with kivi.connect(self.endpoint, timeout=BACK_S) as db:
            held = self.held(db)
            newest = [node for node, _ in held]
            if all(sum(shards >> one & 1 for _, shards in held) >= COPIES for one in range(SHARDS)):
                return
            for one in db.cluster_status()["nodes"]:
                if one["state"] in ("live", "silent") and one["node"] not in newest:
                    wait_until(functools.partial(self._forget, db, one["node"]), BACK_S)
            while wait_until(functools.partial(self._rebalanced, db), BACK_S)[0]:
                self.await_moves(db)

    def _rebalanced(self, db: Any) -> list[bool]:
        """Whether moves were ordered. It is refused while a node was not heard for ten seconds, and after a fault by
        one that has heard nothing for five."""
        with contextlib.suppress(InvalidArgument, Unavailable):
            return [bool(db.rebalance_shards(copies=COPIES, keep=()))]
        return []

    def _forget(self, db: Any, node: str) -> bool:
        """Refused for ten seconds after it was heard, and after a fault by one that has heard nothing for five."""
        with contextlib.suppress(InvalidArgument, Unavailable):
            db.forget_node(node)
            return True
        return False

    def await_moves(self, db: Any) -> None:
        wait_until(lambda: not db.cluster_status()["moves"], BACK_S, reason=lambda: db.cluster_status()["moves"])

    def renew(self, i: int) -> None:
        """A node whose directory is of no use any more begins again with a copy of another one, and with its shards."""
        node, other = self.nodes[i], self.nodes[(i + 1) % SIZE]
        node.arguments = [one for one in node.arguments if one not in ("--shards", HELD[i])]
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
                wait_until(functools.partial(_spans, db), BACK_S)
                found = db.cluster_status()
                if found["failed"]:
                    raise Mismatch(f"node {node.data}: {found['failed']}")
                for one in found["nodes"]:
                    if one["agrees"] is False:
                        raise Mismatch(f"C5: node {one['address']} has applied something else than {node.endpoint}")


def _spans(db: Any) -> bool:
    """Whether a node can read what others hold."""
    with contextlib.suppress(Unavailable, SnapshotTooOld), db.snapshot() as snap:
        list(snap.scan("by_user"))
        return True
    return False


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
    cluster.spread()
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
    cluster.spread()
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


def disk_full(i: int, cluster: Cluster) -> Iterator[tuple[str, float]]:
    disk = cluster.disks[i]
    assert disk is not None
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 10))
    yield f"n{i}", 15.0
    ballast.unlink()


def shards_moved(cluster: Cluster) -> Iterator[tuple[str, float]]:
    """From one node to another, or both keep them, and one of these may be killed over it; or all are spread anew."""
    rng = cluster.rng
    i, j = rng.sample(range(SIZE), 2)
    with kivi.connect(cluster.endpoint, timeout=BACK_S) as db:
        numbers, held = zip(*cluster.held(db), strict=True)
        moved = [shard for shard in range(SHARDS) if held[i] & ~held[j] & 1 << shard]
        chosen = sum(1 << shard for shard in rng.sample(moved, min(len(moved), rng.randint(1, 12))))
        if not chosen or held[j] | chosen == EVERY or rng.random() < 0.2:
            cluster.spread()
            yield "spread anew", 0.0
            return
        source = None if rng.random() < 0.3 else numbers[i]
        db.move_shards(shown_shards(chosen), numbers[j], source=source, copy=source is None)
    killed = rng.choice((None, i, j))
    if killed is not None:
        time.sleep(rng.uniform(0, 1))
        cluster.nodes[killed].kill()
    how = "copied" if source is None else "moved"
    what = f"{chosen.bit_count()} {how} from node {i} to {j}"
    yield what if killed is None else f"{what}, node {killed} is killed over it", rng.uniform(0, 3)
    if killed is not None:
        cluster.start(cluster.nodes[killed])
    with kivi.connect(cluster.endpoint, timeout=BACK_S) as db:
        cluster.await_moves(db)


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
    **{name: functools.partial(disk_full, i) for i, name in enumerate(FULL)},
    "shards moved": shards_moved,
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
    Raises Mismatch, or what a client met. A full disk is left out where it cannot be had, and that is said."""
    result, rng = Besieged(), random.Random(seed)
    with Links() as links, Cluster(place, links, rng) as cluster:
        db = kivi.connect(cluster.endpoint, timeout=BACK_S)
        oracle, known = Oracle({**TABLES, **SPREAD}), Acknowledged()
        make_tables(db)
        make_spread(db)
        first = fund(db, oracle)
        clients = clients_of(cluster.endpoint, oracle, seed, first=first, callers=CALLERS)
        probes = [Probe(kivi.connect(cluster.endpoint, timeout=60), oracle, 200 + i, known) for i in range(PROBES)]
        readers = [
            Reader(kivi.connect(node.endpoint, timeout=5), oracle, 300 + i, known, f"node {i}")
            for i, node in enumerate(cluster.nodes)
        ]
        spread = [Sharded(kivi.connect(cluster.endpoint, timeout=60), oracle, 400 + i, first=first) for i in range(2)]
        told = _subscribed(cluster, oracle, rng.randrange(10**6), first)
        at_all = {f"node {i}": kivi.connect(node.endpoint, timeout=10) for i, node in enumerate(cluster.nodes)}
        pinned = Pinned(kivi.connect(cluster.endpoint, timeout=60), oracle, 600, at_all)
        everybody: list[Client] = [*clients, *probes, *readers, *spread, *told, pinned]
        cluster.settle(first)
        stop = threading.Event()
        threads = [threading.Thread(target=one.run, args=(stop,), name=one.name) for one in everybody]
        for thread in threads:
            thread.start()
        try:
            for name in faults:
                if name in FULL and cluster.disks[FULL.index(name)] is None:
                    say(f"{name}: left out, since no file system can be mounted for it (that needs root)")
                    continue
                time.sleep(rest_s)
                result.seen.append(_suffered(cluster, name, probes, spread, known))
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
        for subscribed in told:
            subscribed.go_on_to(last, BACK_S)
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
            told=len(oracle.tellings) + sum("watching" in read.who for read in oracle.reads),
            spanning=sum(len(one.spans) for one in spread),
            pins=pinned.made,
            refused=sum(reader.refused for reader in readers) + pinned.refused,
            renewed=cluster.renewed,
        )
    return result


def _subscribed(cluster: Cluster, oracle: Oracle, seed: int, first: int) -> list[Subscribed]:
    """Each life of one is a client of its own, which begins at some node."""
    rng = random.Random(seed)

    def connect() -> Any:
        endpoints = [node.endpoint for node in cluster.nodes]
        return kivi.connect(",".join(rng.sample(endpoints, SIZE)), timeout=60)

    return [
        Watching(connect, oracle, 500, "by_user", first=first),
        Watching(connect, oracle, 501, "by_user", first=first, top=("total", 5)),
        Watching(connect, oracle, 502, "counters", first=first),
        Watching(connect, oracle, 503, "by_a", first=first),
        Following(connect, oracle, 504, "e", first=first),
    ]


def _suffered(cluster: Cluster, name: str, probes: list[Probe], spread: list[Sharded], known: Acknowledged) -> Seen:
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
        max((took for one in spread for ended, took in tuple(one.spans) if ended > began), default=0.0),
    )
