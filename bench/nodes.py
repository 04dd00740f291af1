"""Goal 15: a cluster on three nats-servers that sync every write, on this machine. What its log costs, and failures.

Wanted, with one node:

* the append stream puts at least 0.7 of the bytes a second into the log that bare publishes of equal bytes do;
* commits of 64 threads are at least 0.6 of bare frames of equal size, with as many outstanding;
* a commit alone takes at most twice (a publish alone + an echo).

With two nodes: what one has committed is seen on the other within 100 ms (99 in 100) at half of that rate, and again
within 10 s after the other one stood still; a restart fails no call, a node that is killed is a gap of at most 2 s, the
leader of the log's servers one of at most 10 s.

With three nodes, what each process uses of a processor for an event of the append stream and for a small commit, by its
role: the node that the client is connected to, another node, which only applies; the server of the log that leads it,
one that follows; the client.

Beside these, what a process reaches that only forwards to the log what it is sent (``bench.forwarding``): no node can
do more, on this machine, for a client that has its bytes ready.

A *bare publish* is a message to a stream of the same servers, acknowledged by a majority. The log's bytes are what its
leader says. Two cores are shared by three servers of the log, the nodes and the clients: what would
scale with machines does not here, so rates are ratios within the run.
"""

from __future__ import annotations

import contextlib
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import kivi
from bench import echo, forwarding, tables
from bench.context import Context
from bench.server import Server, cpu_s
from bench.sheet import Figures, Ratio, Sheet, percentile
from bench.streaming import in_flight, stream
from bench.together import in_threads
from bench.verify import WrongTotals, each_own
from kivi.log.jetstream import JetStream, find_stream
from kivi.log.natslink import Nats
from tests.log.natscluster import NatsCluster

__all__ = ["sheet", "take"]

_ROWS: Final = 100_000
_THREADS: Final = 64
_COUNTERS: Final = "counters"
_LOG: Final = "8GiB"
_BARE: Final = "bare"
_FORWARDED: Final = "forwarded"
_APPEND_BYTES: Final = 3_270_000
"""What a batch of wide events is in the log."""
_KILLS: Final = 5


def sheet() -> Sheet:
    def of(above: str, *below: str) -> Callable[[Figures], float]:
        return lambda figures: figures[_system(above), above] / sum(figures[_system(each), each] for each in below)

    def worst(case: str) -> Callable[[Figures], float]:
        return lambda figures: figures["kivi", case]

    return Sheet(
        "goal15",
        "A cluster: what its log costs, and what is noticed of failures",
        [
            Ratio(
                "append stream into the log / bare publishes, bytes", of("log, appends", "bare, 1 MiB"), at_least=0.7
            ),
            Ratio(
                "commits of 64 threads / bare frames of equal size", of("log, commits", "bare, frames"), at_least=0.6
            ),
            Ratio(
                "commit alone, p50 / (bare publish + echo)",
                of("commit alone", "bare, alone", "echo, alone"),
                at_most=2.0,
            ),
            Ratio("forwarded appends / bare publishes, bytes: the ceiling", of("forwarded, appends", "bare, 1 MiB")),
            Ratio("forwarded frames / bare frames: the ceiling", of("forwarded, frames", "bare, frames")),
            Ratio("another node sees it, p99 at half load, ms", worst("lag, p99"), at_most=100.0),
            Ratio("caught up after it stood still, s", worst("caught up"), at_most=10.0),
            Ratio("calls that failed in a restart", worst("restart: failed calls"), at_most=0.0),
            Ratio("a node is killed: longest gap, p95 in s", worst("node killed: gap, p95"), at_most=2.0),
            Ratio("the log's leader is killed: longest gap in s", worst("leader killed: gap"), at_most=10.0),
        ],
    )


def _system(case: str) -> str:
    system = case.partition(",")[0]
    return system if system in (_BARE, _FORWARDED, "echo") else "kivi"


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    with _cluster(context) as cluster:
        _bare(context, sheet, cluster)
        _one_node(context, sheet, cluster)
    with _cluster(context) as cluster:
        _two_nodes(context, sheet, cluster)
    with _cluster(context) as cluster:
        _three_nodes(context, sheet, cluster)


# -- what is started -------------------------------------------------------------------------------


@dataclass
class _Cluster:
    nats: NatsCluster
    path: Path

    @contextlib.contextmanager
    def node(self, number: int) -> Iterator[Server]:
        how = ("--cluster", "apm", "--nats", ",".join(self.nats.urls), "--log-bytes", _LOG)
        with Server(self.path / f"node-{number}", *how) as server:
            yield server

    def leader(self, nats: Nats) -> int:
        """Which server leads the log."""
        found = find_stream(nats, "kivi-apm", 10.0)
        assert found is not None
        return int(found["cluster"]["leader"][1:])

    @contextlib.contextmanager
    def connected(self) -> Iterator[Nats]:
        with contextlib.closing(Nats(self.nats.urls)) as nats:
            yield nats

    def log(self, nats: Nats) -> tuple[int, int]:
        """Bytes and messages."""
        found = find_stream(nats, "kivi-apm", 10.0)
        assert found is not None
        return found["state"]["bytes"], found["state"]["last_seq"]


@contextlib.contextmanager
def _cluster(context: Context) -> Iterator[_Cluster]:
    with context.directory() as path, NatsCluster(path, 3, max_bytes=32 << 30) as nats:
        yield _Cluster(nats, path)


# -- the log alone ---------------------------------------------------------------------------------


def _bare(context: Context, sheet: Sheet, cluster: _Cluster) -> None:
    with cluster.connected() as nats, contextlib.closing(JetStream(nats, _BARE, max_bytes=forwarding.LOG_BYTES)) as to:
        rate = _published(to, forwarding.MESSAGE, context.seconds, 32)
        sheet.record(_BARE, "bare, 1 MiB", rate * forwarding.MESSAGE / 1e6, "MB/s")
        took = [_alone(to, i) for i in range(100 if context.quick else 500)]
        sheet.record(_BARE, "bare, alone", statistics.median(took) * 1e6, "us")
        with forwarding.served(cluster.nats.urls, _BARE) as endpoint:
            rate = forwarding.rate(endpoint, _APPEND_BYTES, context.seconds, in_flight(_ROWS))
        sheet.record(_FORWARDED, "forwarded, appends", rate * _APPEND_BYTES / 1e6, "MB/s")
    with echo.served() as endpoint:
        sheet.record("echo", "echo, alone", percentile(echo.alone(endpoint, context.seconds / 2), 50) * 1e6, "us")


def _published(to: JetStream, size: int, seconds: float, outstanding: int) -> float:
    """Messages a second."""
    data, room, done, failures = bytes(size), threading.Semaphore(outstanding), 0, list[BaseException]()
    names = f"{random.randbytes(6).hex()}-{size}-"

    def told(error: BaseException | None) -> None:
        failures.extend([error] if error is not None else [])
        room.release()

    began = time.perf_counter()
    while time.perf_counter() - began < seconds and not failures:
        room.acquire()
        to.publish(f"{names}{done}", data, told)
        done += 1
    for _ in range(outstanding):
        room.acquire()
    if failures:
        raise failures[0]
    return done / (time.perf_counter() - began)


def _alone(to: JetStream, number: int) -> float:
    ended = threading.Event()
    began = time.perf_counter()
    to.publish(f"alone-{id(to)}-{number}", bytes(400), lambda error: ended.set())
    ended.wait()
    return time.perf_counter() - began


# -- one node --------------------------------------------------------------------------------------


def _one_node(context: Context, sheet: Sheet, cluster: _Cluster) -> None:
    with cluster.node(0) as server, server.connect() as db, cluster.connected() as nats:
        tables.create(db)
        pool = context.pool("wide", _ROWS)
        before = cluster.log(nats)
        done = stream(db, tables.EVENTS, pool.batches, in_flight(_ROWS), context.seconds)
        grown = cluster.log(nats)[0] - before[0]
        tables.check(db, pool.expected(done.sent), "kivi, one node")
        share = done.events / sum(pool.events([n]) for n in done.sent)  # the warm-up is in the log, too
        sheet.record("kivi", "append stream", done.rate, "events/s")
        sheet.record("kivi", "log, appends", grown * share / done.seconds / 1e6, "MB/s")

        db.create_table(_COUNTERS, key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        stamps: list[int] = []

        def one() -> None:
            with db.transaction() as tx:
                tx.delta(_COUNTERS, (1,), n=1)
            stamps.append(tx.commit_ts)

        alone, until = list[float](), time.perf_counter() + context.seconds / 2
        while (began := time.perf_counter()) < until:
            one()
            alone.append(time.perf_counter() - began)
        sheet.record("kivi", "commit alone", percentile(alone, 50) * 1e6, "us")
        before = cluster.log(nats)
        count, took = in_threads([one] * _THREADS, context.seconds)
        after = cluster.log(nats)
        each_own("kivi", stamps, len(stamps))
        if (row := db.get(_COUNTERS, (1,))) is None or row["n"] != len(stamps):
            raise WrongTotals(f"kivi counts {row}, and {len(stamps):,} commits were acknowledged")
        frames, size = after[1] - before[1], (after[0] - before[0]) // max(1, after[1] - before[1])
        sheet.record("kivi", "commits, 64 threads", count / took, "commits/s", frame_bytes=size, frames=frames)
        sheet.record("kivi", "log, commits", frames / took, "frames/s")
        with contextlib.closing(JetStream(nats, _BARE, max_bytes=forwarding.LOG_BYTES)) as to:
            outstanding = max(1, round(_THREADS * frames / max(1, count)))
            rate = _published(to, size, context.seconds, outstanding)
            with forwarding.served(cluster.nats.urls, _BARE) as endpoint:
                forwarded = forwarding.rate(endpoint, size, context.seconds, outstanding)
        sheet.record(_BARE, "bare, frames", rate, "frames/s", outstanding=outstanding, bytes=size)
        sheet.record(_FORWARDED, "forwarded, frames", forwarded, "frames/s")


# -- two nodes -------------------------------------------------------------------------------------


def _two_nodes(context: Context, sheet: Sheet, cluster: _Cluster) -> None:
    with cluster.node(0) as one, cluster.node(1) as other:
        with one.connect() as db:
            tables.create(db)
            db.create_table(_COUNTERS, key={"id": "int64"}, columns={"n": kivi.sum("int64")})
            _lag(context, sheet, db, other)
        everywhere = f"{one.endpoint},{other.endpoint}"
        with _Committing(everywhere, before=0) as committing:
            time.sleep(1.0)
            one.stop()
            one.start()
            time.sleep(1.0)
        sheet.record("kivi", "restart: failed calls", len(committing.failures), "calls")
        sheet.record("kivi", "restart: gap", committing.longest_s, "s")
        gaps, committed = [], committing.count
        for _ in range(1 if context.quick else _KILLS):
            with _Committing(everywhere, before=committed) as committing:
                time.sleep(1.0)
                one.kill()
                time.sleep(3.0)
                one.start()
            committing.check()
            gaps.append(committing.longest_s)
            committed = committing.count
        sheet.record("kivi", "node killed: gap, p95", percentile(gaps, 95), "s")
        with cluster.connected() as nats:
            leader = cluster.leader(nats)
        with _Committing(everywhere, before=committed) as committing:
            time.sleep(1.0)
            cluster.nats.servers[leader].kill()
            time.sleep(15.0)
            cluster.nats.servers[leader].start()
        committing.check()
        sheet.record("kivi", "leader killed: gap", committing.longest_s, "s")


def _lag(context: Context, sheet: Sheet, db: Any, other: Server) -> None:
    pool = context.pool("wide", 10_000)
    rate = stream(db, tables.EVENTS, pool.batches, in_flight(10_000), context.seconds).rate / 10_000
    seen: list[tuple[int, float]] = []
    ended = threading.Event()

    def watch() -> None:
        with other.connect() as there:
            while not ended.is_set():
                seen.append((there.watermark(), time.monotonic()))

    def paced(seconds: float) -> list[tuple[int, float]]:
        acknowledged, began, i = [], time.monotonic(), 0
        while time.monotonic() - began < seconds:
            ts = db.append(tables.EVENTS, pool.batches[i % len(pool)])
            acknowledged.append((ts, time.monotonic()))
            i += 1
            time.sleep(max(0.0, began + i / (rate / 2) - time.monotonic()))
        return acknowledged

    def lags(acknowledged: list[tuple[int, float]]) -> list[float]:
        found, at = [], 0
        for ts, told in acknowledged:
            while at < len(seen) and seen[at][0] < ts:
                at += 1
            if at < len(seen):
                found.append(max(0.0, seen[at][1] - told))
        return found

    watching = threading.Thread(target=watch)
    watching.start()
    acknowledged = paced(2 * context.seconds)
    time.sleep(1.0)
    found = lags(acknowledged)
    sheet.record("kivi", "lag, p50", percentile(found, 50) * 1e3, "ms", batches=len(found))
    sheet.record("kivi", "lag, p99", percentile(found, 99) * 1e3, "ms")
    other.signal(signal.SIGSTOP)
    stopped_s = 2.0 if context.quick else 30.0
    paced(stopped_s)
    other.signal(signal.SIGCONT)
    went_on = time.monotonic()
    acknowledged = paced(stopped_s)
    time.sleep(1.0)
    ended.set()
    watching.join()
    after = [(told - went_on, lag) for (_, told), lag in zip(acknowledged, lags(acknowledged), strict=False)]
    worst = [max((lag for at, lag in after if second <= at < second + 1), default=0.0) for second in range(30)]
    sheet.record("kivi", "caught up", _caught_up_s(after), "s", stood_still_s=stopped_s, lag_of_each_second=worst)


def _caught_up_s(after: list[tuple[float, float]], bound_s: float = 0.1) -> float:
    """From when on at most one in a hundred of the commits that follow is seen later than ``bound_s``; ``after`` has
    when each was acknowledged and how much later it was seen."""
    late = sum(lag > bound_s for _, lag in after)
    for i, (at, lag) in enumerate(after):
        if late <= (len(after) - i) / 100:
            return at
        late -= lag > bound_s
    return after[-1][0] if after else 0.0


# -- three nodes -----------------------------------------------------------------------------------


def _three_nodes(context: Context, sheet: Sheet, cluster: _Cluster) -> None:
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(cluster.node(number)) for number in range(3)]
        db = stack.enter_context(nodes[0].connect())
        tables.create(db)
        db.create_table(_COUNTERS, key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        pool = context.pool("wide", _ROWS)
        with _processors(sheet, cluster, nodes, "event") as counted:
            done = stream(db, tables.EVENTS, pool.batches, in_flight(_ROWS), context.seconds)
            counted.append(sum(pool.events([n]) for n in done.sent))
        sheet.record("kivi", "append stream, three nodes", done.rate, "events/s")

        def one() -> None:
            with db.transaction() as tx:
                tx.delta(_COUNTERS, (1,), n=1)

        with _processors(sheet, cluster, nodes, "commit") as counted:
            count, took = in_threads([one] * _THREADS, context.seconds)
            counted.append(count)
        sheet.record("kivi", "commits, 64 threads, three nodes", count / took, "commits/s")
        for node in nodes:
            with node.connect(read="fresh") as there:
                tables.check(there, pool.expected(done.sent), f"kivi, {node.endpoint}")
                if (row := there.get(_COUNTERS, (1,))) is None or row["n"] != count:
                    raise WrongTotals(f"{node.endpoint} counts {row}, and {count:,} commits were acknowledged")


@contextlib.contextmanager
def _processors(sheet: Sheet, cluster: _Cluster, nodes: list[Server], what: str) -> Iterator[list[int]]:
    """Records what a process of each role uses for one of those that are counted, once all nodes have applied them."""
    with cluster.connected() as nats:
        leader = cluster.leader(nats)
    servers = [server.process.pid for server in cluster.nats.servers if server.process is not None]
    roles = {
        "connected node": [nodes[0].pid],
        "another node": [node.pid for node in nodes[1:]],
        "log's leader": [servers[leader]],
        "log's follower": [pid for at, pid in enumerate(servers) if at != leader],
    }
    before, counted = {pid: cpu_s(pid) for pids in roles.values() for pid in pids}, list[int]()
    own = time.process_time()
    yield counted
    own = time.process_time() - own
    for node in nodes:
        with node.connect(read="fresh") as db:
            db.get(_COUNTERS, (1,))
    for role, pids in roles.items():
        used = statistics.mean(cpu_s(pid) - before[pid] for pid in pids)
        sheet.record("kivi", f"CPU, {role}, {what}", used / sum(counted) * 1e6, "us for one")
    sheet.record("kivi", f"CPU, client, {what}", own / sum(counted) * 1e6, "us for one")


class _Committing:
    """Clients of all nodes that commit until this is left; ``before``: what was counted by then."""

    def __init__(self, endpoints: str, before: int) -> None:
        self.endpoints, self.before = endpoints, before
        self.at: list[float] = []
        self.failures: list[BaseException] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(4)]

    def _run(self) -> None:
        with kivi.connect(self.endpoints, timeout=60.0) as db:
            while not self._ended.is_set():
                try:
                    with db.transaction() as tx:
                        tx.delta(_COUNTERS, (1,), n=1)
                except kivi.KiviError as error:
                    self.failures.append(error)
                self.at.append(time.monotonic())

    def __enter__(self) -> _Committing:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        with kivi.connect(self.endpoints, timeout=60.0, read="fresh") as db:
            row = db.get(_COUNTERS, (1,))
        self.count = row["n"] if row is not None else 0

    def check(self) -> None:
        """Raises WrongTotals unless every call counted once."""
        if self.failures or self.count != self.before + len(self.at):
            raise WrongTotals(f"{self.before} + {len(self.at)} commits, {self.count} counted: {self.failures[:3]}")

    @property
    def longest_s(self) -> float:
        """Without any answer, to any of them."""
        at = sorted(self.at)
        return max((b - a for a, b in pairwise(at)), default=0.0)
