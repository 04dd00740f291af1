"""Goal 17: what more nodes would do, computed of single roles, since two cores cannot show it.

Each figure is processor time of this process while it does the work of one node of so many:

* *applying*: one log is recorded, of which the gateway has cut events and deltas into quarters, and replayed into a
  node on RocksDB that holds all shards, half of them and a quarter, in turn and back. What every node does, whatever it
  holds (fetch, check, hash, decode the frames), is the ceiling of ORDER in events a second.
* *reads beside applying*: at a load that takes half of a core of one node alone. Of three nodes each is gateway of a
  third of it and applies all. Computed of the times of recording, applying and one read.
* *matching*: changed rows are read, matched, put into windows, and the differences made. *Query shards* have their
  queries each, and all commits; *data shards* all queries each, and the commits of their shards. With n of them there
  are n times as many queries, or commits, and what the slowest node then takes says what n nodes are worth: n times the
  time of one alone, by that of the slowest. Of a data shard that is with the reading of the whole log.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import kivi
from bench.context import Context
from bench.sheet import Figures, Ratio, Sheet
from bench.verify import WrongTotals
from kivi.api.arguments import SubscribeArguments
from kivi.arrow.columns import arrow_schema
from kivi.embedded.database import Database
from kivi.encoding.keyspaces import Space, meta_key, space_prefix
from kivi.encoding.shards import shard_of
from kivi.engine.memory import MemoryEngine
from kivi.engine.rocks import Records, RocksEngine
from kivi.live.groups import RowGroup
from kivi.live.lives import RowsLive
from kivi.live.reading import read_window
from kivi.log.frames import NO_HASH, decode_message, running_hash
from kivi.log.replicated import ReplicatedLog
from kivi.log.shards import EVERY, SHARDS, parse_shards
from kivi.log.stream import Acknowledged, Message, Stream
from kivi.model.declarations import event_table_schema
from kivi.runtime.settings import Settings
from kivi.store.facade import Store

__all__ = ["sheet", "take"]

GENERATION = b"a generation    "
QUARTERS = tuple(parse_shards(each) for each in ("0-15", "16-31", "32-47", "48-63"))
HELD = {"all": EVERY, "half": QUARTERS[0] | QUARTERS[1], "quarter": QUARTERS[0]}
SETTINGS = Settings.of({"background": False, "settle": False})
ROWS = 5_000
USERS = 2_000
_QUERIES = 400
_WIDTH = 60
_COMMITS = 15
_KINDS = ("query shards", "data shards")
_CHANGED = 500
_READS = 400
_SCHEMA = event_table_schema("calls", "ts", {"ts": "timestamp", "user": "string", "us": "int64"}, shard_by=["user"])


def sheet() -> Sheet:
    def part(of: str) -> Callable[[Figures], float]:
        return lambda figures: figures["kivi", f"applying, {of}"] / figures["kivi", "applying, all"]

    def grid(kind: str, nodes: int) -> Callable[[Figures], float]:
        return lambda figures: nodes * figures["kivi", f"{kind}, 1"] / figures["kivi", f"{kind}, {nodes}"]

    return Sheet(
        "goal17",
        "What more nodes would do, computed of single roles",
        [
            Ratio("applying with half of the shards / with all", part("half"), at_most=0.6),
            Ratio("applying with a quarter / with all", part("quarter"), at_most=0.35),
            Ratio("reads beside applying, three nodes / one (computed)", _reads_of_three, at_least=2.5),
            *(
                Ratio(f"matching, {nodes} {kind} / one (computed)", grid(kind, nodes), at_least=least)
                for kind in ("query shards", "data shards")
                for nodes, least in ((2, 1.9), (4, 3.7))
            ),
        ],
    )


def _reads_of_three(figures: Figures) -> float:
    """Cores that are left for reads, of three and of one, where one node alone spends half of its core."""
    committed, applied = figures["kivi", "recording"], figures["kivi", "applying, all"]
    load = 0.5 / (committed + applied)
    return (3 - load * (committed + 3 * applied)) / 0.5


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
        hash_ = running_hash(hash_, message.sequence, message.data)
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


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    events = 100_000 if context.quick else 500_000
    began = time.process_time()
    messages = record(events)
    recorded = time.process_time() - began
    times: dict[str, list[float]] = {name: [] for name in HELD}
    for name in (*HELD, *reversed(HELD)):
        with context.directory() as path:
            times[name].append(applied(messages, HELD[name], path / "engine"))
    for name, spent in times.items():
        sheet.record("kivi", f"applying, {name}", sum(spent) / len(spent) / events * 1e6, "us an event")
    applying = sum(times["all"]) / len(times["all"])
    sheet.record("kivi", "recording", max(0.0, recorded - applying) / events * 1e6, "us an event")
    constant = read_alone(messages)
    sheet.record("kivi", "ORDER, whatever a node holds", constant / events * 1e6, "us an event")
    sheet.record("kivi", "ORDER, ceiling", events / constant, "events/s", bytes=sum(len(m.data) for m in messages))
    sheet.record("kivi", "a read of 12 rows", _read(), "us")
    _match(sheet, constant / events)


# -- reads and matching -------------------------------------------------------------------------------


def _sums(users: Sequence[str]) -> tuple[Database, Any]:
    """An aggregate of these users, with a row each."""
    db = Database(Store.open(None, settings=SETTINGS, engine=MemoryEngine()))
    db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "user": "string", "us": "int64"},
                          shard_by=["user"])  # fmt: skip
    db.create_aggregate("sums", source="calls", group_by=["user"], measures={"us": kivi.sum("us"), "n": kivi.count()})
    db.append("calls", [{"ts": 0, "user": user, "us": 0} for user in users])
    return db, db.store.table("sums")


def _read() -> float:
    """Processor time, in us."""
    users = [f"user-{i:05}" for i in range(USERS)]
    db, _ = _sums(users)
    began = time.process_time()
    for i in range(_READS):
        with db.snapshot() as snap:
            list(snap.scan("sums", start=(users[i],), limit=12))
    spent = (time.process_time() - began) / _READS * 1e6
    db.close()
    return spent


def _match(sheet: Sheet, log_s: float) -> None:
    """``log_s``: what every node spends for an event of the log, whatever it holds."""
    spent: dict[tuple[str, int, int], float] = {}
    each = [(kind, nodes, node) for kind in _KINDS for nodes in (1, 2, 4) for node in range(nodes)]
    for kind, nodes, node in (*each, *reversed(each)):
        took = _node_of(kind, nodes, node) + (nodes * _CHANGED * log_s if kind == "data shards" else 0.0)
        spent[kind, nodes, node] = min(took, spent.get((kind, nodes, node), took))
    for kind in _KINDS:
        for nodes in (1, 2, 4):
            took = max(spent[kind, nodes, node] for node in range(nodes))
            sheet.record("kivi", f"{kind}, {nodes}", took * 1e3, "ms a commit, the slowest node")


def _node_of(kind: str, nodes: int, node: int) -> float:
    """What one of so many nodes spends on a commit, in s."""
    rng, times = random.Random(nodes), nodes if kind == "data shards" else 1
    users = [f"user-{i:05}" for i in range(times * USERS)]
    commits = _commits(users, times)
    lows = [rng.randrange(USERS - _WIDTH) for _ in range(nodes * _QUERIES)]
    if kind == "query shards":
        return _kept_up(users, lows[node::nodes], commits)
    own = [user for user in users if shard_of(_SCHEMA, (user,), SHARDS) * nodes // SHARDS == node]
    held = set(own)
    return _kept_up(own, lows[:_QUERIES], [[event for event in commit if event[0] in held] for commit in commits])


_Commit = list[tuple[str, int]]


def _commits(users: Sequence[str], times: int) -> list[_Commit]:
    rng = random.Random(5)
    return [[(rng.choice(users), rng.randrange(100)) for _ in range(times * _CHANGED)] for _ in range(_COMMITS)]


def _kept_up(users: Sequence[str], lows: Sequence[int], commits: Sequence[_Commit]) -> float:
    """Processor time, in s, of a commit, to keep up a query for each of ``lows``: the ten largest of a range of users.

    Raises WrongTotals unless each gives what its window has.
    """
    db, schema = _sums(users)
    store, feed = db.store, db.store.pending.feed
    feed.start()
    group, lives = RowGroup(store, schema), list[RowsLive]()
    with store.snapshots.opened() as lease:
        for low in lows:
            at = users[low % len(users)], users[min(low % len(users) + _WIDTH, len(users) - 1)]
            wanted = SubscribeArguments("sums", start=(at[0],), end=(at[1],), order_by="-us", limit=10)
            live = RowsLive("sums", wanted.bound, wanted.terms(schema))
            if group.enter(live, schema, wanted.bound(schema)):
                live.shared.fresh, live.shared.read_ts = read_window(store, lease, schema, live.query), lease.ts
            lives.append(live)
        group.advance(lease, (), again=False)
        for live in lives:
            live.take(lease.ts)
    spent = 0.0
    for commit in commits:
        db.append("calls", [{"ts": 0, "user": user, "us": us} for user, us in commit])
        with store.snapshots.opened() as lease:
            began = time.process_time()
            found, _ = feed.take(lease.ts)
            touched = group.advance(lease, found, again=False)
            for shared in group.stale:
                group.begin(shared)
                shared.fresh, shared.read_ts = read_window(store, lease, schema, shared.query), lease.ts
            if group.stale:
                group.stale.clear()
                touched += group.advance(lease, (), again=False)
            for told in {live for member in touched for live in member.lives}:
                told.take(lease.ts)
            spent += time.process_time() - began
    with store.snapshots.opened() as lease:
        for live in lives[:: max(1, len(lives) // 20)]:
            if live.shared.window.state() != read_window(store, lease, schema, live.query).state():
                raise WrongTotals(f"{live.query} is not kept up")
    db.close()
    return spent / len(commits)
