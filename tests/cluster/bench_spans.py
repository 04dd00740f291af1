"""What a read costs that spans nodes, beside one of a node that holds all: ``python -m tests.cluster.bench_spans [N]``.

Three nodes in this process, on RocksDB and a real nats-server: one holds all shards, the others half of them each. N
events of 2,000 users, an aggregate by user and five minutes. Each read is timed at the node that holds all, and at one
that holds half and asks the other for the rest, in turn and back; processor time is of both nodes together, as they are
one process, and without the nats-server.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import kivi
from kivi.cluster import ClusterNode
from kivi.embedded.database import Database
from kivi.runtime.settings import Settings
from kivi.store.transaction import encoded_key
from tests.log.natscluster import NatsCluster
from tests.waiting import wait_until

USERS = 2_000
ROWS = 20_000
TURNS = 7


class Halves:
    """The way to the other nodes that does not know of the one that holds everything."""

    def __init__(self, node: ClusterNode, whole: ClusterNode) -> None:
        self.node, self.whole = node, whole

    def plan(self, shards: int, without: frozenset[int], ts: int) -> Sequence[tuple[int, int]]:
        return self.node.asking.plan(shards, without | {self.whole.id}, ts)

    def ask(self, node: int, request: bytes) -> Iterator[bytes]:
        return self.node.asking.ask(node, request)


def filled(db: Database, events: int) -> None:
    rng = random.Random(1)
    columns = {"ts": "timestamp", "user": "string", "us": "int64", "path": "string"}
    db.create_event_table("calls", event_time="ts", columns=columns, shard_by=["user"])
    by: list[Any] = ["user", kivi.time_slot("ts", "5m")]
    db.create_aggregate("sums", source="calls", group_by=by, measures={"n": kivi.count(), "us": kivi.sum("us")})
    for at in range(0, events, ROWS):
        rows = [
            {"ts": (at + i) * 1_000, "user": f"user {rng.randrange(USERS)}", "us": rng.randrange(9_999), "path": "/x"}
            for i in range(min(ROWS, events - at))
        ]
        db.append("calls", rows)


def main(events: int) -> None:
    with contextlib.ExitStack() as opened:
        path = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        nats = opened.enter_context(NatsCluster(path, 1))

        def started(name: str, shards: str | None = None) -> ClusterNode:
            node = ClusterNode(
                str(path / name),
                "apm",
                nats.urls,
                about={"address": name},
                settings=Settings(),
                shards=shards,
                log_bytes=1 << 30,
            )
            opened.callback(node.close)
            return node

        whole = started("whole")
        db = Database(whole.store)
        filled(db, events)
        for name in ("low", "high"):
            db.checkpoint(str(path / name))
        low, _ = started("low", "0-31"), started("high", "32-63")
        low.store.spanning.owners = Halves(low, whole)
        time.sleep(2)
        reads: dict[str, Callable[[Any], object]] = {
            "one row by key, of the other node": lambda snap: snap.get("sums", key),
            "100 rows by key": lambda snap: snap.get_many("sums", keys),
            "first 20 rows": lambda snap: list(snap.scan("sums", limit=20)),
            "all rows of the aggregate": lambda snap: snap.to_arrow("sums"),
            "rollup of all rows": lambda snap: list(snap.rollup("sums", by=[])),
            "all events": lambda snap: snap.to_arrow("calls"),
            "question of all events": lambda snap: list(snap.query("calls", measures=MEASURES, group_by=["path"])),
            "events of a hundredth of the time": lambda snap: snap.to_arrow("calls", end=moment),
        }
        schema = low.store.table("sums")
        with db.snapshot() as snap:
            keys = [tuple(row[name] for name in schema.key_names) for row in snap.scan("sums", limit=100)]
        stored = [tuple(c.type.to_stored(v) for c, v in zip(schema.key, one, strict=True)) for one in keys]
        key = next(
            k for k, s in zip(keys, stored, strict=True) if low.store.shards.lacks(schema, [encoded_key(schema, s)])
        )
        moment = events * 10
        last = whole.store.watermark()
        wait_until(lambda: low.store.watermark() >= last)
        print(f"{events:,} events; wall ms and processor ms, medians of {2 * TURNS}")
        for name, read in reads.items():
            taken: dict[str, list[tuple[float, float]]] = {"here": [], "spanning": []}
            for turn in range(TURNS):
                sides = [("here", whole), ("spanning", low), ("spanning", low), ("here", whole)]
                for side, node in sides if turn % 2 else sides[::-1]:
                    with Database(node.store).snapshot() as snap:
                        wall, cpu = time.perf_counter(), time.process_time()
                        read(snap)
                        taken[side].append((time.perf_counter() - wall, time.process_time() - cpu))
            (one, one_cpu), (two, two_cpu) = (
                tuple(1_000 * statistics.median(column) for column in zip(*taken[side], strict=True)) for side in taken
            )
            wall_, cpu_ = f"{one:9.2f} {two:9.2f} {two / one:6.1f}", f"{one_cpu:9.2f} {two_cpu:9.2f}"
            print(f"{name:36} {wall_}   {cpu_} {two_cpu / one_cpu:6.1f}")


MEASURES = {"n": kivi.count(), "us": kivi.sum("us"), "last": kivi.last("us")}

if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200_000)
