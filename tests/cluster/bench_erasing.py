"""What it costs that shards which a node gave up leave its disk: ``python -m tests.cluster.bench_erasing [EVENTS]``.

A store with a sharded table and an aggregate of it gives half of the shards up. Printed are the bytes of its files, and
processor time for an event that was there, beside that of appending and folding one.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa

import kivi
from kivi.embedded.database import Database
from kivi.log.shards import EVERY
from kivi.store.facade import Store
from kivi.store.moving import Remains, erase

_COMMIT = 10_000
_HALF = EVERY >> 32


def main(count: int) -> None:
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as path:
        store = Store.open(path)
        db = Database(store)
        columns = {"ts": "timestamp", "user": "string", "us": "int64", "pad": "string"}
        db.create_event_table("calls", event_time="ts", columns=columns, shard_by=["user"])
        db.create_aggregate(
            "sums", source="calls", group_by=["user"], measures={"n": kivi.count(), "us": kivi.sum("us")}
        )
        began = time.process_time()
        for at in range(0, count, _COMMIT):
            users = [f"user {rng.randrange(20_000)}" for _ in range(_COMMIT)]
            pads = [rng.randbytes(20).hex() for _ in range(_COMMIT)]
            times = pa.array(range(at, at + _COMMIT), pa.timestamp("us", "UTC"))
            db.append("calls", pa.table({"ts": times, "user": users, "us": range(_COMMIT), "pad": pads}))
        db.consolidate()
        settled(store)
        appended, before = time.process_time() - began, size(path)
        store.shards.held = _HALF
        remains = Remains()
        while not (gone := remains.due(store)):
            time.sleep(0.1)
        began, clock = time.process_time(), time.perf_counter()
        erase(store, gone, check=lambda: None)
        took, clock = time.process_time() - began, time.perf_counter() - clock
        settled(store)
        after = size(path)
        print(f"{count:,} events: {before / 1e6:.1f} MB, then {after / 1e6:.1f} MB")
        print(f"appended: {appended / count * 1e6:.2f} us of the processor for an event")
        print(f"erased: {took / count * 1e6:.2f} us for an event that was there, {clock:.1f} s")
        store.close()


def settled(store: Store) -> None:
    """All is folded, flushed and given back that can be."""
    for _ in range(3):
        store.consolidate()
        store.consolidator.compact()
        with store.consolidator.mutex:
            store.consolidator.flush()
        time.sleep(3)


def size(path: str) -> int:
    return sum(one.stat().st_size for kind in ("*.sst", "*.blob", "*.parquet") for one in Path(path).rglob(kind))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
