"""What a node with a part of the shards spends on applying the log: ``python -m tests.cluster.bench_shards [EVENTS]``.

One log is recorded, of which the gateway has cut events and deltas into quarters; then it is replayed into a node on
RocksDB that holds all shards, half of them and a quarter, in turn and back. Processor time of this process until all is
applied and folded; and, by itself, of what every node does whatever it holds: fetch, check, hash, decode the frames.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import kivi
from kivi.arrow.columns import arrow_schema
from kivi.embedded.database import Database
from kivi.encoding.keyspaces import Space, meta_key, space_prefix
from kivi.engine.memory import MemoryEngine
from kivi.engine.rocks import Records, RocksEngine
from kivi.log.frames import NO_HASH, decode_message, running_hash
from kivi.log.replicated import ReplicatedLog
from kivi.log.shards import EVERY, parse_shards
from kivi.log.stream import Acknowledged, Message, Stream
from kivi.runtime.settings import Settings
from kivi.store.facade import Store

GENERATION = b"a generation    "
QUARTERS = tuple(parse_shards(each) for each in ("0-15", "16-31", "32-47", "48-63"))
HELD = {"all": EVERY, "half": QUARTERS[0] | QUARTERS[1], "quarter": QUARTERS[0]}
SETTINGS = Settings.of({"background": False, "settle": False})
ROWS = 5_000
USERS = 2_000


class Recorded(Stream):
    """In memory, and always there."""

    max_message_bytes = 1 << 20
    attempts = 1

    def __init__(self, messages: list[Message] | None = None) -> None:
        self.messages: list[Message] = messages if messages is not None else []
        self.on_news: Callable[[], None] = lambda: None

    @property
    def used(self) -> float:
        return 0.0

    def publish(self, name: str, data: bytes, done: Acknowledged) -> None:
        self.messages.append(Message(len(self.messages) + 1, time.time_ns() // 1_000, data))
        done(None)

    def fetch(self, first: int, count: int, attempt: int = 0) -> Sequence[Message]:
        return self.messages[first - 1 : first - 1 + count]

    def bounds(self) -> tuple[int, int]:
        return 1, len(self.messages)

    @property
    def bounds_at(self) -> float:
        return time.monotonic()

    def check_copies(self) -> None:
        pass

    def purge(self, below: int) -> None:
        pass

    def close(self) -> None:
        pass


def node(stream: Stream, number: int, engine: Any) -> Store:
    log = ReplicatedLog(stream, generation=GENERATION, node=number, boot=1)
    return Store.open(None, settings=SETTINGS, engine=engine, log=log)


def drained(store: Store) -> None:
    assert isinstance(store.log, ReplicatedLog)
    while store.log.pump():
        pass


def record(events: int) -> list[Message]:
    """Bulk commits of 5,000 events, as they come from a gateway: text and numbers, and two aggregates of them."""
    stream = Recorded()
    store = node(stream, 1, MemoryEngine())
    db = Database(store)
    made: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        import threading

        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                made.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        while thread.is_alive():
            drained(store)
            thread.join(0.001)
        for error in made:
            raise error

    columns = {"ts": "timestamp", "user": "string", "endpoint": "string", "us": "int64", "status": "int64"}
    run(lambda: db.create_event_table("calls", event_time="ts", columns=columns, shard_by=["user"]))
    sums = {"calls": kivi.count(), "us": kivi.sum("us"), "slowest": kivi.max("us")}
    for name, by in (("by_user", ["user", kivi.time_slot("ts", "5m")]), ("by_endpoint", ["user", "endpoint"])):
        run(lambda name=name, by=by: db.create_aggregate(name, source="calls", group_by=by, measures=sums))  # type: ignore[misc]
    store.shards.cuts = lambda: QUARTERS
    rng = random.Random(1)
    schema = arrow_schema(store.table("calls"))
    for begin in range(0, events, ROWS):
        batch = pa.RecordBatch.from_pydict(
            {
                "ts": pa.array(range(begin * 1_000, (begin + ROWS) * 1_000, 1_000), pa.timestamp("us", "UTC")),
                "user": [f"user-{rng.randrange(USERS):05}" for _ in range(ROWS)],
                "endpoint": [f"/api/{rng.randrange(20)}" for _ in range(ROWS)],
                "us": [rng.randrange(1_000_000) for _ in range(ROWS)],
                "status": [rng.choice((200, 200, 200, 404, 500)) for _ in range(ROWS)],
            },
            schema,
        )

        def commit(batch: pa.RecordBatch = batch) -> None:
            with db.transaction() as tx:
                tx.append("calls", batch)

        run(commit)
    return stream.messages


def read_alone(messages: list[Message]) -> float:
    """Processor time of what no set of shards spares."""
    began, hash_ = time.process_time(), NO_HASH
    for message in messages:
        decode_message(message.data)
        hash_ = running_hash(hash_, b"%d %b" % (message.sequence, message.data))
    return time.process_time() - began


def applied(messages: list[Message], held: int, path: Path) -> float:
    """Processor time until a new node has applied and folded all of it."""
    engine = RocksEngine(str(path), records=Records(meta_key("records"), space_prefix(Space.ROW)))
    store = node(Recorded(messages), 2, engine)
    store.shards.held = held
    began = time.process_time()
    assert isinstance(store.log, ReplicatedLog)
    while store.log.pump(64):
        store.consolidate()
    spent = time.process_time() - began
    store.close()
    engine.close()
    return spent


def main() -> None:
    events = int(sys.argv[1]) if len(sys.argv) > 1 else 300_000
    messages = record(events)
    size = sum(len(message.data) for message in messages)
    print(f"{events:,} events, {len(messages)} messages, {size / 1e6:.1f} MB")
    times: dict[str, list[float]] = {name: [] for name in HELD}
    alone: list[float] = []
    order = [*HELD, *reversed(HELD)]
    for i, name in enumerate([*order, *order]):
        path = Path(tempfile.mkdtemp())
        try:
            times[name].append(applied(messages, HELD[name], path / "engine"))
        finally:
            shutil.rmtree(path)
        if i % 3 == 0:
            alone.append(read_alone(messages))
    whole = sum(times["all"])
    for name, spent in times.items():
        each = ", ".join(f"{one:.2f}" for one in spent)
        print(f"{name:8} {sum(spent) / len(spent):6.2f} s of processor time ({each}), {sum(spent) / whole:.2f} of all")
    constant = sum(alone) / len(alone)
    print(f"whatever it holds: {constant:.2f} s, {constant / (whole / len(times['all'])):.3f} of all; a ceiling of "
          f"{events / constant:,.0f} events/s")  # fmt: skip


if __name__ == "__main__":
    main()
