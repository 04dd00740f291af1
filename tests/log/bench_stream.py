"""Figures for docs/decisions/0048: ``python -m tests.log.bench_stream [directory]``. Not a test.

Three nats-servers on loopback that sync every write, one process that publishes and reads. Rates are of the wall;
behind each stands the processor time a message of this process (p) and of all servers (s).
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from kivi.log import Entry, Kind
from kivi.log.jetstream import JetStream
from kivi.log.natslink import Nats
from kivi.log.replicated import ReplicatedLog
from tests.log.natscluster import NatsCluster

TICKS = os.sysconf("SC_CLK_TCK")


def server_s(cluster: NatsCluster) -> float:
    """Processor time that the servers have used."""
    total = 0
    for server in cluster.servers:
        assert server.process is not None
        fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


@contextlib.contextmanager
def measured(what: str, cluster: NatsCluster, count: int, size: int) -> Iterator[None]:
    wall, mine, theirs = time.perf_counter(), time.process_time(), server_s(cluster)
    yield
    wall, mine, theirs = time.perf_counter() - wall, time.process_time() - mine, server_s(cluster) - theirs
    each = f"p {mine / count * 1e6:.0f} us, s {theirs / count * 1e6:.0f} us"
    print(f"{what:34} {count / wall:10,.0f} /s {count * size / wall / 1e6:8.1f} MB/s   {each}", flush=True)


def publish_all(stream: JetStream, names: str, data: bytes, count: int) -> None:
    left, ended = count, threading.Event()

    def done(error: BaseException | None) -> None:
        nonlocal left
        assert error is None, error
        left -= 1
        if not left:
            ended.set()

    for i in range(count):
        stream.publish(f"{names}{i}", data, done)
    ended.wait()


def _publish_one(stream: JetStream, names: str, i: int) -> None:
    publish_all(stream, f"alone{names}{i}-", bytes(200), 1)


def latency(what: str, call: Callable[[int], object], count: int = 300) -> None:
    took = []
    for i in range(count):
        began = time.perf_counter()
        call(i)
        took.append(time.perf_counter() - began)
    took.sort()
    print(
        f"{what:34} p50 {statistics.median(took) * 1e3:.2f} ms   p99 {took[int(count * 0.99)] * 1e3:.2f} ms", flush=True
    )


def main(path: Path) -> None:
    with NatsCluster(path, 3) as cluster, contextlib.closing(Nats(cluster.urls)) as nats:
        stream = JetStream(nats, "bench", max_bytes=4 << 30)
        for again in "ab":
            latency("one publish alone, 200 bytes", partial(_publish_one, stream, again))
        for again in "ab":
            with measured("published together, 200 bytes", cluster, 20_000, 200):
                publish_all(stream, f"small{again}", bytes(200), 20_000)
        for again in "ab":
            with measured("published together, 1 MiB", cluster, 300, 1 << 20):
                publish_all(stream, f"large{again}", bytes(1 << 20), 300)
        for count, first, size in ((20_000, 1000, 200), (300, 40_701, 1 << 20)):
            for _ in range(2):
                with measured(f"fetched, {size:,} bytes", cluster, count, size):
                    at = first
                    while at < first + count:
                        found = stream.fetch(at, 256, 2)
                        at = found[-1].sequence + 1
        latency("one fetch of one message", lambda i: stream.fetch(1000 + i, 1, 2))
        latency("the bounds", lambda i: stream.bounds())
        with contextlib.closing(Nats(cluster.urls)) as other:
            order = JetStream(nats, "frames", max_bytes=1 << 30)
            for echo in (order, JetStream(other, "frames", max_bytes=1 << 30)):
                latency("a frame alone, until it was applied", _applied(order, echo))


def _applied(order: JetStream, at: JetStream) -> Callable[[int], object]:
    """A frame that is published to ``order``, and comes back by ``at``: the same connection, or another one."""
    node = 1 if order is at else 2
    gateway = ReplicatedLog(order, generation=bytes(16), node=node, boot=1)
    applier = gateway if order is at else ReplicatedLog(at, generation=bytes(16), node=9, boot=1)
    while applier.pump():
        pass
    news, arrived = threading.Event(), threading.Event()
    at.on_news = news.set
    applier.on_arrival = lambda frame: arrived.set()

    def one(i: int) -> None:
        arrived.clear()
        gateway.propose([Entry(Kind.COMMIT, [bytes(200)])], 0, lambda n: None)
        while not arrived.is_set():
            news.wait(0.02)
            news.clear()
            applier.pump()

    return one


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(Path(directory))
