"""What rules cost an append stream, as a part of its rate without any (decision 0075).

``python -m tests.store.bench_rules --rules 1 --batch 10000`` appends to two stores in this process in turn, one without
rules and one with them: batches of events of 10,000 endpoints whose times go on, five minutes in 200,000 events. It
prints the processor time of an event in each, of the thread that appends and of the whole process, and their ratio;
medians over the batches after the first ones. ``where`` compares with twenty times the average of the previous slot;
one event in ten thousand is that much.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import pyarrow as pa

import kivi

SLOT_US: Final = 300_000_000
PER_SLOT: Final = 200_000
COLUMNS: Final = {"endpoint": "int64", "ts": "timestamp", "us": "int64"}


def opened(path: Path, rules: int) -> Any:
    db = kivi.open(path)
    db.create_event_table("calls", event_time="ts", columns=COLUMNS)
    db.create_aggregate(
        "slots",
        source="calls",
        group_by=["endpoint", kivi.time_slot("ts", "5m", name="slot")],
        measures={"total": kivi.sum("us"), "calls": kivi.count()},
        derived={"avg": "total / calls"},
    )
    for i in range(rules):
        db.create_event_table(f"slow{i}", event_time="ts", columns={**COLUMNS, "usual": "float64"})
        db.create_rule(
            f"slow{i}",
            source="calls",
            against=kivi.previous_slot("slots", by=["endpoint"]),
            where=kivi.col("us") > (20 + i) * kivi.ref("avg"),
            into=f"slow{i}",
            select={"usual": kivi.ref("avg")},
        )
    return db


def batches(size: int, endpoints: int, wide: bool) -> Iterator[pa.RecordBatch]:
    draw, first = np.random.default_rng(1), 0
    while True:
        ts = np.arange(first, first + size) * SLOT_US // PER_SLOT
        if wide:
            ts = draw.integers(0, 3_600_000_000, size)
        us = draw.integers(1_000, 100_000, size) + np.where(draw.random(size) < 0.0001, 2_000_000, 0)
        moments = pa.array(ts).cast(pa.timestamp("us", "UTC"))
        yield pa.RecordBatch.from_arrays(
            [pa.array(draw.integers(0, endpoints, size)), moments, pa.array(us)], [*COLUMNS]
        )
        first += size


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rules", type=int, default=1)
    parser.add_argument("--batch", type=int, default=10_000)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--endpoints", type=int, default=10_000)
    parser.add_argument("--wide", action="store_true", help="times anywhere in an hour")
    args = parser.parse_args()
    with TemporaryDirectory(prefix="kivi-bench-") as directory:
        stores = {rules: opened(Path(directory) / str(rules), rules) for rules in (0, args.rules)}
        taken: dict[int, list[tuple[float, float]]] = {rules: [] for rules in stores}
        for i, batch in zip(range(args.batches), batches(args.batch, args.endpoints, args.wide), strict=False):
            for rules in sorted(stores, reverse=bool(i % 2)):
                began = time.thread_time_ns(), time.process_time_ns()
                stores[rules].append("calls", batch)
                if i * args.batch >= PER_SLOT:  # there is a slot before
                    taken[rules].append((time.thread_time_ns() - began[0], time.process_time_ns() - began[1]))
        raised = sum(rule["raised"] for rule in stores[args.rules].rules())
        for db in stores.values():
            db.close()
    for name, i in (("appending thread", 0), ("process", 1)):
        without, with_rules = (statistics.median(one[i] for one in taken[rules]) / args.batch for rules in stores)
        print(f"{name}: {without:.0f} ns an event, {with_rules:.0f} with rules: {without / with_rules:.2f}")
    print(f"{raised:,} raised")


if __name__ == "__main__":
    main()
