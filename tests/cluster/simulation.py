"""A cluster in one thread: real stores over simulated servers, in virtual time, under a seeded scheduler.

Every node is the real pipeline: store, committer, verdict, pending, consolidation, and the replicated log over
``tests.cluster.servers``. Its engine is in memory, and a crash takes any of what it had not flushed. Each step of the
simulation is one thing that happens to one of them: a client begins, writes, commits, or sends a commit again by
another node; a node reads what is new, folds, stops, goes on, dies, comes back, or begins with the copy of another.

**Oracle.** What clients did and what they saw is judged by the replay of the commits (``tests.oracle``): every read at
every S on every node, every verdict, every token. At the end all that was cut is mended, and then all nodes must be at
one place, with one hash, and answer alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import heapq
import itertools
import math
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

import kivi
from kivi.arrow.columns import arrow_schema
from kivi.arrow.id_window import ID
from kivi.cluster.status import IN_DOUBT
from kivi.cluster.verifying import Compared, compare, told
from kivi.embedded.database import Database, Snapshot, Transaction
from kivi.encoding.keyspaces import meta_key
from kivi.encoding.shards import shard_of
from kivi.engine import WriteBatch
from kivi.engine.memory import MemoryEngine
from kivi.errors import (
    AlreadyExists,
    Conflict,
    DataLoss,
    DiskFull,
    FormatTooNew,
    KiviError,
    NotFound,
    RowExists,
    SnapshotTooOld,
    Unavailable,
)
from kivi.log import Entry
from kivi.log.features import FEATURES
from kivi.log.members import Member, State, truncation
from kivi.log.memory import MemoryLog
from kivi.log.replicated import Arrived, ReplicatedLog
from kivi.log.shards import EVERY, SHARDS, shown_shards
from kivi.mvcc.groups import Outcome, Part
from kivi.mvcc.record import Abort, Pin
from kivi.mvcc.replicated import PLACE, ReplicatedCommitter
from kivi.runtime.settings import Settings
from kivi.store.backfill import Progress
from kivi.store.content import content_at
from kivi.store.facade import Store
from kivi.store.moving import Remains
from tests.cluster.servers import YEAR_US, Client, Faults, Servers
from tests.measures import plain
from tests.mvcc.world import EVENT, MEASURES, TABLES
from tests.oracle import Attempt, EventTable, Mismatch, Op, Oracle, Read
from tests.proof.groups import Together
from tests.proof.workloads import micros

__all__ = ["Node", "Simulation"]

GENERATION = b"a generation    "
_BOOT = meta_key("boot")
LATER = {"calls": kivi.count(), "total": kivi.sum("x"), "slow": kivi.max("x")}
"""Of an aggregate that is made and dropped while others write."""
PINNED_US = 3_600_000_000
SHARDED = {"e", "agg", "shares", "later"}
VALUES = range(3)
HIGH = 3
"""A rule raises the events with a larger x."""
"""Of the column by which these are sharded."""
PATIENCE_US = 120_000_000
START_US = 1_800_000_000_000_000
_MAY_FAIL = (AlreadyExists, NotFound, Conflict, SnapshotTooOld, DiskFull)
_IS_THERE = "still being built|has a column .* already"
"""What adding measures fails with where another node has added some."""
SETTINGS = Settings.of(
    {
        "background": False, "consolidate_rows": 2, "block_rows": 4, "settle": False, "conflict_entries": 8,
        "conflict_window_s": 20.0, "lease_ttl_s": 3_600.0, "lease_ttl_max_s": 3_600.0,
    }
)  # fmt: skip


@dataclass
class Open:
    """A transaction of a client, and the snapshots that it holds."""

    node: Node
    store: Store | None
    tx: Transaction
    ops: list[Op] = field(default_factory=list)
    staged: bool | None = None
    """Whether its events come from stages: what does not would stand before them."""


class Node:
    """One node; ``store`` is None while it is down. ``id`` is new if its disk is."""

    def __init__(self, simulation: Simulation, id_: int, engine: MemoryEngine) -> None:
        self.simulation, self.id, self.engine = simulation, id_, engine
        self.stopped = False
        self.can = simulation.version()
        """The features that its version knows."""
        ahead = YEAR_US / 1_000_000 if simulation.wrong_clocks == "nodes" else 1.0
        self.clock_off_s = simulation.rng.choice((0.0, 0.0, -2.0, ahead))
        self.snapshots: list[Snapshot] = []
        self.store: Store | None = None
        self.held = self.wanted = EVERY
        """The shards of which it has everything, and those that it is to have."""
        self.since: tuple[tuple[int, int], ...] = ()
        """Shards whose rows it has from a commit timestamp on only."""

    def start(self) -> None:
        sim = self.simulation
        boot = int.from_bytes(self.engine.get(_BOOT) or b"", "little") + 1
        batch = WriteBatch()
        batch.put(_BOOT, boot.to_bytes(8, "little"))
        self.engine.write(batch)
        self.engine.flush()
        self.client = Client(sim.servers)
        try:
            self.log = self._opened_log(boot)
        except FormatTooNew as error:
            sim.refused(self, error)
            self.log = self._opened_log(boot)
        self.store = Store.open(None, settings=SETTINGS, engine=self.engine, log=self.log, clock=sim.clock)
        committer = self.store.committer
        assert isinstance(committer, ReplicatedCommitter)
        committer.later = sim.derive
        self.log.on_arrival = partial(self._arrived, committer, self.log.on_arrival)
        self.store.shards.held, self.store.shards.since = self.held, self.since
        self.store.spanning.owners = Others(self)
        self.db = Database(self.store)
        self.snapshots = []
        self.remains = Remains()
        self.say_live()

    def _opened_log(self, boot: int) -> ReplicatedLog:
        sim = self.simulation
        return ReplicatedLog(
            self.client, generation=GENERATION, node=self.id, boot=boot, saved=self.engine.get(PLACE),
            genesis=sim.genesis, clock=sim.clock, wall_clock=self.clock, lost_after_s=0.0, features=self.can,
        )  # fmt: skip

    def _arrived(self, committer: ReplicatedCommitter, arrive: Callable[[Arrived], None], arrived: Arrived) -> None:
        """What a gateway judges of its own frame is what all others decode, to the cell."""
        items = committer._proposed.get(arrived.frame.id.n, ()) if arrived.mine else ()
        parts = [part for part in items if isinstance(part, Part)]
        if parts and not any(map(committer.is_behind, parts)):
            decoded = [part for part in committer.decode(arrived) if isinstance(part, Part)]
            if (mine := _written(parts)) != (others := _written(decoded)):
                raise Mismatch(f"C1: node {self.id} judges {mine} of what it published, and others {others}")
        self.simulation.arriving(self, arrived)
        before = frozenset(self.log.members.on)
        arrive(arrived)
        self.simulation.arrived(self, arrived, before)

    def clock(self) -> float:
        """What its machine takes for the time."""
        return self.simulation.clock() + self.clock_off_s

    def say_live(self) -> None:
        """And which shards it is to hold: it gives others up once that is said, and counts."""
        wanted, store, given = self.wanted, self.store, self.held & ~self.wanted
        live = Member(self.id, State.LIVE, self.log.needed, {"features": sorted(self.can)})
        if wanted != EVERY and self.store is not None:
            live = live.with_snapshots(*self.store.leases.told())

        def said(number: int) -> None:
            known = self.log.members.find(self.id)
            if self.store is not store or store is None or known is None:
                return
            if given and not known.shards & given:  # what it has taken since then it keeps
                self.held = self.wanted = store.shards.held = self.held & ~given
            elif self.wanted == wanted:  # nobody else holds what it would give up
                self.wanted = self.held
            if self.held & ~known.shards and all(move.to != self.id for move in self.log.members.moves.values()):
                self.held = self.wanted = store.shards.held = self.held & known.shards  # what it took was cancelled

        self.say((live if wanted == EVERY else live.with_shards(wanted)).entry(), done=said)

    def say(self, *entries: Entry, done: Callable[[int], None] = lambda number: None) -> None:
        """``done`` is called with the last number before the entries, once they are back."""
        assert self.store is not None
        committer = self.store.committer
        assert isinstance(committer, ReplicatedCommitter)
        committer.say(entries, lambda error, number: done(number) if error is None else None)

    def kill(self) -> None:
        """What was not flushed is gone, or some of it."""
        sim = self.simulation
        assert self.store is not None
        if self.serves and sim.rng.random() < 0.7:
            self.store.consolidate()  # in the middle of a pass, as it is kept
        self.client.close()
        self.store._closed = True
        self.engine.crash(keep=sim.rng.randint(0, self.engine.stats()["unflushed_batches"]))
        self.store = None
        self.snapshots = []

    @property
    def serves(self) -> bool:
        return self.runs and self.store is not None and not self.store.is_catching_up

    @property
    def runs(self) -> bool:
        return self.store is not None and not self.stopped and self.log.failed is None

    def pump(self) -> None:
        sim = self.simulation
        try:
            self.log.pump(sim.rng.randint(1, 32))
            if sim.rng.random() < 0.1:
                self.client.purge(self.log.members.floor)
        except Unavailable:
            sim.counted["nobody answers"] += 1
        if sim.servers.last_at(self.log.proven_at) > self.log.place.sequence:
            raise Mismatch(f"C8: node {self.id} says it has what there was at {self.log.proven_at}, and has not")

        if self.log.place.time_us > sim.now_us + 1_000_000:
            raise Mismatch(f"node {self.id} takes a clock for the time that is ahead of all others")

    def holds(self, a: int, ts: int) -> bool:
        """Whether it has the events and rows of this value of the column by which they are sharded, at a snapshot."""
        assert self.store is not None
        held = self.held
        for cts, shards in self.since:
            held &= ~shards if cts > ts else EVERY
        return self.held == EVERY or bool(held >> shard_of(self.store.table("e"), (a,), SHARDS) & 1)

    def scan(self, reader: Any, table: str) -> list[dict[str, Any]]:
        rows = list(reader.scan(table))
        return [{**row, "ts": micros(row["ts"])} for row in rows] if table in ("e", "high", "spans") else plain(rows)


@dataclass
class Others:
    """The other nodes, for one that asks them for shards that it lacks."""

    node: Node

    def plan(self, shards: int, without: frozenset[int], ts: int) -> list[tuple[int, int]]:
        log = self.node.log
        return log.members.owners(shards, besides=self.node.id, time_us=log.place.time_us, without=without, ts=ts)

    def ask(self, node: int, request: bytes) -> Iterator[bytes]:
        """Which may go away at any moment."""
        sim = self.node.simulation
        for there in sim.nodes:
            if (sim.copying or sim.building) and there.id == node and there.serves:  # it is waited for
                for _ in range(30):
                    there.pump()
            is_here = sim.calm or sim.rng.random() > 0.05
            if there.id == node and there.serves and there.store is not None and is_here:
                for i, frame in enumerate(there.store.spanning.serve(request, timeout_s=0.0)):
                    if i and not sim.calm and sim.rng.random() < 0.1:
                        break
                    yield frame
                else:
                    return
        raise Unavailable(f"node {node} does not answer")


def _written(parts: Sequence[Part]) -> list[Any]:
    """What each member writes and guards."""
    return [
        ([(table, key, op.barrier, [*op.puts], [*op.deltas]) for table, key, op in footprint.rows], footprint.guards)
        for part in parts
        for _, footprint in part.written(0)
    ]


class Simulation:
    """``run(steps)``, then ``finish()``, which checks."""

    SHARD_BY: tuple[str, ...] = ()
    copying = False
    """Whether a node takes shards, and others go on meanwhile."""
    building = 0
    """How many nodes sum events of others for what is being defined, one while another one does."""
    calm = False
    """Whether those that are asked for shards answer, and go away over none."""
    KINDS: tuple[str, ...] = (
        "put", "delta", "delta", "delta", "insert", "delete", "guard", "guard", "append", "append", "staged", "get",
    )  # fmt: skip

    def __init__(self, seed: int, *, nodes: int = 3, faults: Faults | None = None) -> None:
        self.rng = random.Random(seed)
        self.wrong_clocks = self.rng.choice(("servers", "nodes"))
        """Of which some are a year ahead now and then; never of both."""
        self.now_us = START_US
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._deriving = 0
        self._history = hashlib.blake2b(digest_size=16)
        self.counted: Counter[str] = Counter()
        self.oracle = Oracle({**TABLES, "later": TABLES["agg"], "spans": EventTable()})
        self.shown: list[tuple[int, int, frozenset[str]]] = []
        """Of ``later``, which was made several times: its number, and which columns it has had from a commit on."""
        self.dropped: set[int] = set()
        """Those of ``later`` that a client has dropped, or may have."""
        self.seen: dict[tuple[int, int], tuple[frozenset[str], str]] = {}
        """The columns that it had for readers at a timestamp, and for whom."""
        self.servers = Servers(self, faults or Faults())
        self.servers.faults.clock_ahead = 0.01 if self.wrong_clocks == "servers" else 0.0
        self.attempts = itertools.count(1)
        self.open: list[Open] = []
        self.sent: list[tuple[str, list[Op]]] = []
        self.spans: list[bytes] = []
        self.pins: dict[int, bytes] = {}
        """That are held: by their number."""
        self.told: dict[int, dict[int, Member]] = {}
        """By timestamp, the hashes that nodes have told of what they store."""
        self.stages: list[tuple[bytes, list[dict[str, Any]]]] = []
        self._ids = itertools.count(1)
        self.acknowledged = 0
        self.joining: dict[int, tuple[Node, Store]] = {}
        self.evicted: set[int] = set()
        self.lost: set[int] = set()
        """Nodes whose disks are gone: nobody may rely on them, and whoever operates the cluster knows."""
        self.nodes: list[Node] = []
        with self._time():
            engine = self._genesis()
            for i in range(nodes):
                engine.checkpoint(f"genesis {i}")
                self.nodes.append(self._started(engine.checkpoints[f"genesis {i}"]))
            for node in self.nodes:  # before the log may be truncated it has to know them
                self._until(lambda node=node: not node.log.proposed, node)  # type: ignore[misc]

    def _genesis(self) -> MemoryEngine:
        """A store with the tables: what a cluster adopts."""
        engine, log = MemoryEngine(), MemoryLog()
        store = Store.open(None, settings=SETTINGS, engine=engine, log=log, clock=self.clock)
        db = Database(store)
        columns: dict[str, Any] = {"n": kivi.sum("int64"), "hi": kivi.max("int64"), "v": "int64"}
        for name, how in (("t", {}), ("h", {"history": "1h"})):
            db.create_table(name, key={"id": "int64"}, columns=columns, **how)
        db.create_event_table("e", event_time="ts", columns=EVENT, shard_by=self.SHARD_BY)
        db.create_event_table("spans", event_time="ts", columns={"ts": "timestamp", "id": "bytes"})
        db.create_event_table("high", event_time="ts", columns=EVENT, shard_by=self.SHARD_BY)
        db.create_rule("high", source="e", where=kivi.col("x") > HIGH, into="high")
        db.create_aggregate("agg", source="e", group_by=["a"], measures=MEASURES)
        db.create_aggregate("shares", source="e", group_by=["a"], measures={"share": kivi.avg(kivi.col("x") / 7)})
        db.consolidate()
        self.genesis = db.watermark()
        store.close()
        engine.reopen()
        return engine

    def _started(
        self,
        engine: MemoryEngine,
        id_: int | None = None,
        held: int = EVERY,
        since: tuple[tuple[int, int], ...] = (),
    ) -> Node:
        node = Node(self, next(self._ids) if id_ is None else id_, engine)
        node.held, node.since = held, since
        node.wanted = held
        node.start()
        return node

    # -- time -------------------------------------------------------------------------------------

    def clock(self) -> float:
        return self.now_us / 1_000_000

    def _time(self) -> contextlib.AbstractContextManager[Any]:
        """No other time passes: stores flush, keep house and give up deriving again by this one, however busy the
        machine is."""
        return patch.object(time, "monotonic", self.clock)

    def after(self, delay_us: int, run: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now_us + delay_us, next(self._order), run))

    def derive(self, run: Callable[[], object]) -> None:
        """What a node derives again, beside its log."""

        def due() -> None:
            self._deriving -= 1
            run()

        self._deriving += 1
        self.after(1_000, due)

    def _happen(self) -> None:
        """What is due."""
        while self._events and self._events[0][0] <= self.now_us:
            heapq.heappop(self._events)[2]()

    def version(self) -> frozenset[str]:
        """The features of the version that a new node has."""
        return frozenset(FEATURES)

    def refused(self, node: Node, error: KiviError) -> None:
        """A node does not start because of its version."""
        raise error

    def arriving(self, node: Node, arrived: Arrived) -> None:
        """Before a node applies a frame that counts."""

    def arrived(self, node: Node, arrived: Arrived, before: frozenset[str]) -> None:
        """Behind it; ``before``: the features that were on."""

    def note(self, what: str) -> None:
        self.counted[what.split(" ", 1)[0]] += 1
        self._history.update(f"{self.now_us} {what}\n".encode())

    @property
    def history(self) -> str:
        """Equal for equal histories."""
        return self._history.hexdigest()

    # -- steps ------------------------------------------------------------------------------------

    STEPS: tuple[tuple[str, float], ...] = (
        ("pump", 30), ("begin", 8), ("work", 14), ("commit", 10), ("write", 4), ("append_each", 4), ("again", 3),
        ("fence", 5), ("retract", 2.5), ("export", 4), ("pin", 1.5), ("read_at_pin", 3),
        ("retry", 4), ("snapshot", 4), ("look", 5), ("fold", 5), ("stop", 0.5), ("kill", 0.8), ("cut", 0.4),
        ("leader", 0.5), ("renew", 0.6), ("define", 0.5), ("live", 4), ("truncate", 4), ("evict", 2),
        ("fresh", 3), ("fill", 0.5), ("stage", 3), ("discard", 1),
    )  # fmt: skip

    def run(self, steps: int) -> None:
        names, weights = zip(*self.STEPS, strict=True)
        with self._time():
            for name in self.rng.choices(names, weights, k=steps):
                self.now_us += self.rng.randint(1, 20_000)
                self._happen()
                self.note(name)
                getattr(self, f"do_{name}")()
                self._look_after()

    def _serving(self) -> Node | None:
        found = [node for node in self.nodes if node.serves]
        return self.rng.choice(found) if found else None

    def do_pump(self) -> None:
        for node in self.nodes:
            if node.runs and self.rng.random() < 0.7:
                node.pump()

    def do_retry(self) -> None:
        if (node := self._serving()) is not None:
            node.log.outbox.retry(all_of_them=self.rng.random() < 0.3)

    def do_begin(self) -> None:
        if len(self.open) < 8 and (node := self._serving()) is not None:
            self.open.append(Open(node, node.store, node.db.transaction()))

    def _opened(self) -> Open | None:
        self.open = [one for one in self.open if one.node.serves and one.store is one.node.store]
        return self.rng.choice(self.open) if self.open else None

    def do_work(self) -> None:
        if (one := self._opened()) is None:
            return
        rng, tx, kind = self.rng, one.tx, self.rng.choice(self.KINDS)
        table, key = rng.choice("tth"), (rng.randint(0, 3),)
        values = {name: rng.randint(-5, 5) for name in rng.sample(("n", "hi", "v"), rng.randint(1, 3))}
        match kind:
            case "put":
                tx.put(table, key, **values)
                one.ops.append(Op("put", table, key, values))
            case "delta":
                deltas = {"n": rng.randint(-5, 5), "hi": rng.randint(-5, 5)}
                tx.delta(table, key, **deltas)
                one.ops.append(Op("delta", table, key, deltas))
            case "insert":
                try:
                    tx.insert(table, key, **values)
                    one.ops.append(Op("insert", table, key, values))
                except RowExists:
                    pass
            case "delete":
                tx.delete(table, key)
                one.ops.append(Op("delete", table, key))
            case "guard":
                column = rng.choice((None, "n", "v"))
                if not self.SHARD_BY and rng.random() < 0.5:
                    table, key, column = "agg", (rng.choice(VALUES),), rng.choice((None, "calls"))
                tx.guard(table, key, column)
                one.ops.append(Op("guard", table, key, {} if column is None else {column: None}))
            case "append" if not one.staged:
                one.staged = False
                events = self._appended()
                tx.append("e", events)
                one.ops.append(Op("append", "e", events=events))
            case "staged" if one.staged is not False:
                if self.stages and one.node.store is not None:
                    id_, events = rng.choice(self.stages[-6:])
                    staging, store = one.node.store.staging, one.node.store
                    number = staging.index.sequence_of(id_)
                    if number > store.watermark() or not staging.index.is_live(number):
                        return  # it would wait, in this one thread; or the commit will not find it
                    try:
                        tx.append_stages("e", [id_])
                        one.staged = True
                        one.ops.append(Op("append", "e", events=events))
                        self.counted["staged"] += 1
                    except Unavailable:
                        self.counted["nobody answers"] += 1
                    except DataLoss:
                        if one.node.id not in self.evicted:
                            raise
            case "get":
                own = tuple(op for op in one.ops if op.kind != "guard")
                for name in (table, "agg"):
                    if name == "agg" and not one.node.holds(*key, tx.start_ts):
                        continue
                    found = tx.get(name, key)
                    self.oracle.read(Read(tx.start_ts, name, key, found, own, f"node {one.node.id}"))

    def _appended(self) -> list[dict[str, Any]]:
        return [self._event() for _ in range(self.rng.randint(1, 4))]

    def _event(self) -> dict[str, Any]:
        rng = self.rng
        return {"a": rng.randint(0, 2), "ts": rng.randint(0, 3), "x": rng.randint(-5, 5), "s": rng.choice("abcdefg")}

    def do_commit(self) -> None:
        if (one := self._opened()) is None or not one.ops:
            return
        self.open.remove(one)
        token = f"token {next(self.attempts)}"
        self.sent.append((token, one.ops))
        txn = one.tx._txn
        if txn is None or one.node.store is None:
            return
        self._send(one.node, token, one.ops, txn.start_ts if not txn.blind else None, txn)

    def _send(self, node: Node, token: str, ops: list[Op], start_ts: int | None, txn: Any) -> None:
        attempt = Attempt(start_ts, ops, "unknown", None, token, f"node {node.id}")
        self.oracle.attempt(attempt)
        assert node.store is not None
        node.store.commit(txn, token=token, done=lambda outcome: self._told(attempt, outcome))

    def _told(self, attempt: Attempt, outcome: Outcome) -> None:
        self.note(f"told {attempt.token} {outcome.commit_ts} {type(outcome.error).__name__}")
        if outcome.commit_ts is not None:
            self.acknowledged = max(self.acknowledged, outcome.commit_ts)
            attempt.outcome, attempt.commit_ts, attempt.repeat = "committed", outcome.commit_ts, outcome.repeated
            self.counted["retracted"] += any(op.kind == "retract" for op in attempt.ops)
        elif isinstance(outcome.error, kivi.CommitUnknown):
            pass
        else:
            attempt.outcome = "aborted"
            if isinstance(outcome.error, Conflict):
                attempt.refused = outcome.error

    def do_again(self) -> None:
        """A client sends a commit again, by any node: it had no answer, or does not trust it."""
        node = self._serving()
        if node is None or not self.sent:
            return
        token, ops = self.rng.choice(self.sent[-12:])
        tx = node.db.transaction()
        try:
            for op in ops:
                match op.kind:
                    case "put":
                        tx.put(op.table, op.key, **op.values)
                    case "delta":
                        tx.delta(op.table, op.key, **op.values)
                    case "insert":
                        tx.insert(op.table, op.key, **op.values)
                    case "delete":
                        tx.delete(op.table, op.key)
                    case "guard":
                        tx.guard(op.table, op.key, next(iter(op.values), None))
                    case "append":
                        tx.append("e", op.events)
        except RowExists:
            tx.rollback()
            return
        txn = tx._txn
        assert txn is not None
        self._send(node, token, ops, None if txn.blind else txn.start_ts, txn)

    def do_fence(self) -> None:
        """A client asks what became of a token that never came, so that it never will: this takes a timestamp too."""
        if (node := self._serving()) is not None and node.store is not None:
            fence = Abort(tokens=(f"fenced {next(self.attempts)}",))
            node.store.committer.log_other(fence, lambda error, number: None)

    def do_retract(self) -> None:
        """A client removes events; their rows are computed again, and completed where the commit comes back."""
        if (node := self._serving()) is None:
            return
        column = self.rng.choice("axs")
        value = self._event()[column]
        tx = node.db.transaction()
        if not tx.retract("e", where=kivi.col(column) == value):
            tx.rollback()
            return
        assert tx._txn is not None
        token, ops = f"token {next(self.attempts)}", [Op("retract", "e", values={column: value})]
        self._send(node, token, ops, tx.start_ts, tx._txn)

    def do_pin(self) -> None:
        """A client pins a snapshot, or ends one; any node that is there answers at it."""
        if (node := self._serving()) is None or node.store is None:
            return
        committer = node.store.committer
        if len(self.pins) > 2:
            self._unpin(self.rng.choice(list(self.pins)))
            return
        name = self.rng.randbytes(16)

        def done(error: BaseException | None, number: int) -> None:
            if error is None:
                self.pins[number] = name

        committer.log_other(Pin(name, PINNED_US, True), done)

    def _unpin(self, number: int) -> None:
        if (node := self._serving()) is not None and node.store is not None:
            node.store.committer.log_other(Pin(self.pins.pop(number), 0, False), lambda error, number: None)

    def do_read_at_pin(self) -> None:
        node = self._serving()
        reached = [] if node is None else [number for number in self.pins if number <= node.db.watermark()]
        if node is None or node.store is None or not reached:
            return
        number = self.rng.choice(reached)
        assert isinstance(node.store.committer, ReplicatedCommitter)
        try:
            assert node.store.committer.pins.find(self.pins[number]).ts == number
        except SnapshotTooOld:
            raise Mismatch(f"C1: node {node.id} has forgotten the pin {number}") from None
        with node.db.snapshot(as_of=number) as snap:
            self._look(node, snap, is_pinned=True)
        self._verify(node, number)
        self.note("pinned read")

    def _verify(self, node: Node, ts: int) -> None:
        """What a node stores has the hashes that others have told at this timestamp, whenever they did."""
        for one in self.contents(node, ts):
            if one.state in IN_DOUBT:
                raise Mismatch(f"C1: node {node.id} tells hashes that others do not: {one}")
            self.counted[f"content {one.state}"] += 1

    def contents(self, node: Node, ts: int) -> list[Compared]:
        """What is known at a timestamp, when a node has told its hashes."""
        assert node.store is not None
        try:
            with contextlib.closing(node.db.snapshot(as_of=ts)) as snap:
                assert snap._lease is not None
                content = content_at(node.store.reads, snap._lease, lambda nbytes: None)
        except SnapshotTooOld:
            return []
        about = {"shards": shown_shards(node.held), "content": told(content)}
        self.told.setdefault(ts, {})[node.id] = Member(node.id, State.LIVE, 0, about)
        return compare(self.told[ts].values())

    def do_export(self) -> None:
        """An exporter sends spans to any node, new ones and some that it sent before: each counts once."""
        if (node := self._serving()) is None or node.store is None:
            return
        rng, store = self.rng, node.store
        new = [next(self._ids).to_bytes(24, "big") for _ in range(rng.randint(0, 3))]
        sent = {*new, *rng.choices(self.spans[-9:], k=rng.randint(1, 3))} if self.spans else {*new}
        self.spans += new
        schema = store.table("spans")
        window = store.shared_window(schema, ("id",), 3_600, 1_000_000)
        assert window is not None
        known = window.known(np.array(sorted(sent), ID))
        events = [{"ts": 1, "id": id_} for id_, is_known in zip(sorted(sent), known, strict=True) if not is_known]
        if events:
            txn = store.blind_transaction()
            txn.append(schema, pa.RecordBatch.from_pylist(events, arrow_schema(schema)))
            txn.once = window.once
            self._send(node, f"token {next(self.attempts)}", [Op("append", "spans", events=events)], None, txn)

    def do_write(self) -> None:
        """A group of blind deltas and puts, entering in columns."""
        if (node := self._serving()) is None or node.store is None:
            return
        members = []
        for _ in range(self.rng.randint(1, 5)):
            table, key = self.rng.choice("tth"), (self.rng.randint(0, 3),)
            kind = self.rng.choice(("put", "delta", "delta"))
            values = {"v": self.rng.randint(-5, 5)} if kind == "put" else {"n": self.rng.randint(-5, 5)}
            members.append(_Member([Op(kind, table, key, values)], f"token {next(self.attempts)}", self))
        if len(members) > 1 and self.rng.random() < 0.3:  # one comes twice in one group
            members.append(_Member(members[0].ops, members[0].token, self))
        group = Together(node.store, members)
        for member in members:
            member.attempt = Attempt(None, member.ops, "unknown", None, member.token, f"node {node.id}")
            self.oracle.attempt(member.attempt)
        group.enter()
        self.after(0, lambda: self._hear(group, members))

    def _hear(self, group: Together, members: list[_Member]) -> None:
        for place, answer in [*group.answers.items()]:
            if not members[place].told:
                members[place].told = True
                self._told(members[place].attempt, Outcome(answer.commit_ts, answer.error))
        for place in group.left:
            members[place].attempt.outcome = "aborted"
        if not all(member.told for member in members) and self._open_ended:
            self.after(20_000, lambda: self._hear(group, members))

    _open_ended = True

    def do_append_each(self) -> None:
        if (node := self._serving()) is None or node.store is None:
            return
        events = [self._event() for _ in range(self.rng.randint(1, 5))]
        schema = node.store.table("e")
        names = arrow_schema(schema)
        batch = pa.RecordBatch.from_pylist(events, names)
        token = f"token {next(self.attempts)}"
        attempts = [
            Attempt(None, [Op("append", "e", events=[event])], "unknown", None, f"{token} {i}", f"node {node.id}")
            for i, event in enumerate(events)
        ]
        for attempt in attempts:
            self.oracle.attempt(attempt)

        def told(outcome: Outcome) -> None:
            for i, attempt in enumerate(attempts):
                first = outcome.commit_ts
                self._told(attempt, Outcome(None if first is None else first + i, outcome.error, outcome.repeated))

        node.store.append_each(schema, batch, token=token, done=told)

    def do_stage(self) -> None:
        """A client makes events durable by one node, for a commit by any."""
        if (node := self._serving()) is None or node.store is None:
            return
        events = [self._event() for _ in range(self.rng.randint(1, 40))]
        schema = node.store.table("e")
        batch = pa.RecordBatch.from_pylist(events, arrow_schema(schema))

        def done(error: BaseException | None, id_: bytes | None) -> None:
            if error is None and id_ is not None:
                self.stages.append((id_, events))

        try:
            node.store.staging.stage(schema, batch, owner="", done=done)
        except DiskFull:
            self.counted["DiskFull"] += 1

    def do_discard(self) -> None:
        if (node := self._serving()) is not None and node.store is not None and self.stages:
            node.store.discard_stages([self.rng.choice(self.stages[-6:])[0]])

    def do_snapshot(self) -> None:
        if (node := self._serving()) is not None and len(node.snapshots) < 3:
            node.snapshots.append(node.db.snapshot())

    def do_look(self) -> None:
        """Reads whole tables at a snapshot, an old one or a new one."""
        if (node := self._serving()) is None:
            return
        if node.snapshots and self.rng.random() < 0.7:
            snap = self.rng.choice(node.snapshots)
            if self.rng.random() < 0.4:
                node.snapshots.remove(snap)
                self._look(node, snap)
                snap.close()
                return
            self._look(node, snap)
            return
        with node.db.snapshot() as snap:
            self._look(node, snap)

    def _look(self, node: Node, snap: Snapshot, *, is_pinned: bool = False) -> None:
        for table in self.oracle.tables:
            if node.held != EVERY and table in SHARDED:
                self._look_in_parts(node, snap, table)
            try:
                found = node.scan(snap, table)
                if found and node.held != EVERY and table == "e" and self.rng.random() < 0.3:
                    self._ask_of_all(snap, found)
            except Unavailable:
                if node.held == EVERY or table not in SHARDED:
                    raise
                self.counted["elsewhere"] += 1
                continue
            except (SnapshotTooOld, NotFound) as error:
                if isinstance(error, NotFound) and table != "later":
                    raise
                if is_pinned and isinstance(error, SnapshotTooOld):
                    raise Mismatch(f"C1: node {node.id} does not answer at the pin {snap.ts}: {error}") from None
                if isinstance(error, NotFound):
                    self._check_nobody_had_it(node, snap)
                self.counted[type(error).__name__] += 1
                continue
            self.counted["spanned"] += node.held != EVERY and table in SHARDED
            by_shard = node.held != EVERY and table == "e"
            columns = self._columns(node, snap, table, found)
            who = f"node {node.id}"
            self.oracle.read(Read(snap.ts, table, None, found, (), who, is_any_order=by_shard, columns=columns))
        was, self.calm = self.calm, True  # so that this look draws no number, and changes no history
        try:
            raised = Counter(map(repr, node.scan(snap, "high")))
            high = Counter(repr(row) for row in node.scan(snap, "e") if row["x"] > HIGH)
        except (Unavailable, SnapshotTooOld):
            if node.held == EVERY:
                raise
            return
        finally:
            self.calm = was
        retracts = any(op.kind == "retract" for attempt in self.oracle.attempts for op in attempt.ops)
        if high - raised or (raised - high and not retracts):  # what was raised stays
            raise Mismatch(f"R25: node {node.id} at {snap.ts} has raised {raised.total()} of {high.total()} events")
        self.counted["raised"] += bool(raised)
        self.counted["raised, of several"] += bool(raised) and node.held != EVERY

    def _columns(self, node: Node, snap: Snapshot, table: str, rows: Sequence[dict[str, Any]]) -> frozenset[str] | None:
        """Those of ``later``, which are the same for whoever reads at this timestamp."""
        if table != "later" or not rows:
            return None
        assert node.store is not None
        columns, place = frozenset(rows[0]), (node.store.catalog.table("later", snap.ts).id, snap.ts)
        known, who = self.seen.setdefault(place, (columns, f"node {node.id}"))
        if known != columns:
            raise Mismatch(f"R1: at {place} later has {columns} on node {node.id}, and on {who} {known}")
        self.counted["added, read"] += len(columns) > 1 + len(LATER)
        self.counted["added, read, of several"] += len(columns) > 1 + len(LATER) and node.held != EVERY
        return columns

    def _check_nobody_had_it(self, node: Node, snap: Snapshot) -> None:
        """What was ready is there until a client drops it."""
        gone = {id_ for id_, since, _ in self.shown if since <= snap.ts} - self.dropped
        if gone:
            raise Mismatch(f"node {node.id} does not have later at {snap.ts}, which was ready as {gone}")

    def _check_columns(self) -> None:
        """Whoever reads at or above the commit that made columns readable has them, and nobody below it."""
        for id_, since, columns in self.shown:
            before = [names for of, cts, names in self.shown if of == id_ and cts < since]
            new = columns.difference(*before)
            for (of, ts), (found, who) in self.seen.items():
                if of == id_ and (not columns <= found if ts >= since else new & found):
                    raise Mismatch(f"R1: {who} has found {set(found)} at {ts}, and {set(columns)} are there at {since}")

    def _ask_of_all(self, snap: Snapshot, events: list[dict[str, Any]]) -> None:
        """Rollups and questions of nodes that hold a part each are about what scans give."""
        (asked,) = snap.query("e", measures={"n": kivi.count(), "x": kivi.sum("x")})
        (rolled,) = snap.rollup("agg", measures=["calls", "total"])
        wanted = (len(events), sum(event["x"] for event in events))
        found = (asked["n"], asked["x"] or 0), (rolled["calls"], rolled["total"])
        if found != (wanted, wanted):
            raise Mismatch(f"R20: asked at {snap.ts} of all, {found} is not {wanted}")
        backwards = list(snap.scan("e", reverse=True))[::-1]
        for a in VALUES:  # those of one shard are in order; who answers alone, and for which, may be another each time
            if [(row["x"], row["s"]) for row in backwards if row["a"] == a] != [
                (event["x"], event["s"]) for event in events if event["a"] == a
            ]:
                raise Mismatch(f"at {snap.ts} events backwards are others than forwards")

    def _look_in_parts(self, node: Node, snap: Snapshot, table: str) -> None:
        """A node that holds some shards answers for these, and for no others."""
        for a in VALUES:
            only = ("a", a) if table == "e" else None
            try:
                if only is None:
                    found: Any = snap.get(table, (a,))
                    found = None if found is None else plain([found])[0]
                else:
                    rows = snap.scan(table, where=kivi.col("a") == a)
                    found = [{**row, "ts": micros(row["ts"])} for row in rows]
            except Unavailable:
                if node.holds(a, snap.ts):
                    raise
                self.counted["elsewhere"] += 1
                continue
            except (SnapshotTooOld, NotFound) as error:
                if isinstance(error, NotFound) and table != "later":
                    raise
                self.counted[type(error).__name__] += 1
                continue
            self.counted["in parts" if node.holds(a, snap.ts) else "asked of another"] += 1
            key = None if only is not None else (a,)
            columns = self._columns(node, snap, table, [] if found is None or only is not None else [found])
            self.oracle.read(Read(snap.ts, table, key, found, (), f"node {node.id}", only, columns=columns))

    def do_fold(self) -> None:
        if (node := self._serving()) is not None and node.store is not None:
            node.store.consolidate()
            node.store.consolidator.sweep()
            if self.rng.random() < 0.5:
                node.store.consolidator.flush()

    def do_define(self) -> None:
        """A client defines an aggregate of what is there, or drops it; it waits, and so does everything else."""
        if (node := self._serving()) is None or node.store is None:
            return
        there = "later" in node.store.catalog.entered.by_name
        how = {"source": "e", "group_by": ["a"], "measures": LATER}

        def define(progress: Progress | None) -> None:
            if there:
                stores = [one.store for one in self.nodes if one.store is not None]
                known = [store.catalog.entered.by_name.get("later") for store in stores]
                self.dropped |= {schema.id for schema in known if schema is not None}
                node.db.drop("later")
            else:
                node.db.create_aggregate("later", **how, progress=progress)  # type: ignore[arg-type]
                self._has_columns(node.store)

        self._built(node, define)
        self.note(f"defined {there} {node.db.watermark()}")

    def _built(self, node: Node, build: Callable[[Progress | None], None]) -> bool:
        """A definition, which is waited for. False: it failed, as it may."""
        node.client.calm, calm = True, self.calm
        self.calm = self.calm or bool(self.SHARD_BY and self.rng.random() < 0.8)
        self.building += 1
        try:
            with self._waiting_for(node):
                build(self._progress(node))
        except Exception as error:
            given_up = isinstance(error, Unavailable) and self.SHARD_BY  # an owner went away, or the node itself
            # another node did the same, and this one had not heard of it
            is_there = isinstance(error, KiviError) and re.search(_IS_THERE, error.message)
            if not given_up and not is_there and not isinstance(error, _MAY_FAIL) and node.log.failed is None:
                raise Mismatch(f"a definition failed: {error}") from error
            self.counted[f"unbuilt {type(error).__name__}"] += 1
            return False
        finally:
            node.client.calm, self.calm = False, calm
            self.building -= 1
        return True

    def _progress(self, node: Node) -> Progress | None:
        """What happens while a node sums events."""
        return None

    def _has_columns(self, store: Store | None) -> None:
        """Of ``later``, once it has been made, or measures have been added to it."""
        schema = None if store is None else store.catalog.entered.by_name.get("later")
        if schema is not None and not schema.is_building:
            self.shown.append((schema.id, schema.altered_ts, frozenset(schema.output_names)))

    @contextlib.contextmanager
    def _waiting_for(self, node: Node) -> Iterator[None]:
        """Where this thread would stand still until another one tells it something, time passes for a node: there is no
        other thread, so nothing is up to chance. ``Condition.wait`` is below all that waits: futures, events, W."""
        real, here = threading.Condition.wait, threading.get_ident()

        def wait(condition: Any, timeout: float | None = None) -> bool:
            if threading.get_ident() != here:
                return real(condition, timeout)
            until_us = math.inf if timeout is None else self.now_us + timeout * 1_000_000
            told = threading.Lock()
            told.acquire()
            condition._waiters.append(told)
            saved = condition._release_save()
            try:
                self._until(lambda: not told.locked() or self.now_us >= until_us, node)
            finally:
                condition._acquire_restore(saved)
            if told.locked():
                condition._waiters.remove(told)
                if node.log.failed is not None:
                    raise node.log.failed
            return not told.locked()

        with patch.object(threading.Condition, "wait", wait), patch.object(threading, "_time", self.clock):
            yield  # ``Condition.wait_for`` reckons with ``threading._time``: a real clock made every run another one

    def _until(self, done: Callable[[], bool], node: Node) -> None:
        """Time passes, for this node only."""
        until_us = self.now_us + PATIENCE_US
        while node.log.failed is None and not done():
            if self.now_us > until_us:
                raise Mismatch(f"C4: node {node.id} gets no further than {node.log.place}, of {self.servers.last}")
            self.now_us += 1_000
            self._happen()
            node.client.cut = False
            node.log.outbox.retry()
            node.pump()

    # -- faults -----------------------------------------------------------------------------------

    def do_stop(self) -> None:
        """A process stands still, and goes on as if nothing had been."""
        if len([node for node in self.nodes if node.serves]) > 1 and (node := self._serving()) is not None:
            node.stopped = True
            self.after(self.rng.randint(100_000, 5_000_000), lambda: setattr(node, "stopped", False))

    def do_kill(self) -> None:
        if len([node for node in self.nodes if node.serves]) > 1 and (node := self._serving()) is not None:
            node.kill()
            self.after(self.rng.randint(10_000, 1_000_000), lambda: self._back(node))

    def _back(self, node: Node) -> None:
        """What the crash left of a pass must not be seen, from the first moment on."""
        if node in self.nodes and node.store is None:
            node.start()
            if node.serves:
                with node.db.snapshot() as snap:
                    self._look(node, snap)

    def do_cut(self) -> None:
        if (node := self._serving()) is not None:
            client = node.client
            client.cut = True
            self.after(self.rng.randint(10_000, 2_000_000), lambda: setattr(client, "cut", False))

    def do_fill(self) -> None:
        """The servers have room for a few more messages, for a while: what they refuse was never there."""
        self.servers.room = self.rng.randint(0, 2)
        self.servers.max_messages = len(self.servers.log) + self.servers.room + self.rng.randint(0, 3)
        self.after(self.rng.randint(10_000, 2_000_000), lambda: setattr(self.servers, "max_messages", 1_000_000))

    def do_leader(self) -> None:
        self.servers.change_leader()

    # -- nodes ------------------------------------------------------------------------------------

    def do_live(self) -> None:
        """A node says how far back it may have to read."""
        if (node := self._serving()) is not None:
            node.say_live()

    def do_truncate(self) -> None:
        if (node := self._serving()) is not None:
            node.say(truncation(node.log.place.sequence + 1))

    def do_evict(self) -> None:
        """Somebody finds that the log is kept for too long for somebody else."""
        if (node := self._serving()) is None:
            return
        for member in node.log.members.holding()[:1]:
            if member.node != node.id:
                self.evicted.add(member.node)
                node.say(dataclasses.replace(member, state=State.EVICTED).entry())

    def do_renew(self) -> None:
        """A node loses its disk: a new one begins with the copy of another one, which says so before it makes it."""
        whole = [node for node in self.nodes if node.serves]
        if len(whole) >= 2:
            lost, source = self.rng.sample(whole, 2)
            if not self._may_be_lost(lost):
                return
            self.lost.add(lost.id)
            lost.kill()
            self.nodes.remove(lost)
            self._join(source)

    def _may_be_lost(self, node: Node) -> bool:
        """Whether the cluster has all that it has without this one."""
        return True

    def _join(self, source: Node) -> None:
        id_, store = next(self._ids), source.store
        assert store is not None
        store.consolidate()
        store.consolidator.flush()
        joining = Member(id_, State.JOINING, source.log.needed).entry()
        self.joining[id_] = source, store
        source.say(joining, done=lambda number: self.after(0, lambda: self._copy(id_, source, store)))

    def _copy(self, id_: int, source: Node, store: Store) -> None:
        if self.joining.pop(id_, None) is None:
            return  # it was given up
        if source.store is not store or not source.serves:
            self._replace()
            return
        known = source.log.members.find(id_)
        if known is None or known.state is not State.JOINING:  # the log was truncated before it was said
            self._replace()
            return
        store.consolidate()
        store.consolidator.flush()
        source.engine.checkpoint(f"copy {id_}")
        engine = source.engine.checkpoints.pop(f"copy {id_}")
        batch = WriteBatch()
        batch.delete(_BOOT)
        engine.write(batch)
        held = source.held, source.since  # as of what was copied
        self.after(self.rng.randint(1, 3_000_000), lambda: self.nodes.append(self._started(engine, id_, *held)))

    def _replace(self) -> None:
        """There are fewer nodes than there should be."""
        if (source := self._serving()) is not None:
            self._join(source)
        else:
            self.after(100_000, self._replace)

    def _look_after(self) -> None:
        """A node that the log has left behind begins anew; it was told so before, and nobody else is left behind."""
        for node in [node for node in self.nodes if node.store is not None and node.log.failed is not None]:
            assert node.log.failed is not None
            if "the log begins at" not in node.log.failed.message:
                raise Mismatch(f"C4: node {node.id} stopped: {node.log.failed.message}")
            if node.id not in self.evicted:
                raise Mismatch(f"C7: the log was truncated, and node {node.id} needed it: {node.log.failed.message}")
            self.counted["left behind"] += 1
            self.lost.add(node.id)
            node.kill()
            self.nodes.remove(node)
            self._replace()
        for id_, (source, store) in [*self.joining.items()]:
            if source.store is not store:  # who was to give the copy has died
                del self.joining[id_]
                self._replace()

    def do_fresh(self) -> None:
        """A client asks a node for all that was acknowledged by now, by whomever."""
        if (node := self._serving()) is None:
            return
        acknowledged, store = self.acknowledged, node.store

        def told(number: int) -> None:
            if number < acknowledged:
                raise Mismatch(f"fresh: node {node.id} reads at {number}, and {acknowledged} was acknowledged before")
            if node.serves and node.store is store:
                self.after(0, look)

        def look() -> None:
            if node.serves and node.store is store:
                with node.db.snapshot() as snap:
                    if snap.ts < acknowledged:
                        raise Mismatch(f"fresh: node {node.id} read at {snap.ts}, {acknowledged} was acknowledged")
                    self.note("looked fresh")
                    self._look(node, snap)

        node.say(done=told)

    # -- the end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Mends everything, waits until all is told, and judges."""
        with self._time():
            self._finish()

    def _finish(self) -> None:
        self.servers.faults = Faults(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        for node in self.nodes:
            node.client.cut = node.stopped = False
            if node.store is None:
                node.start()
        for i in range(2_000):
            self.now_us += 50_000
            if i == 10 and (one := self._serving()) is not None and one.store is not None:
                one.store.staging.drop(one.store.stages.live())  # as their time limit would
            if i == 20:  # as they do all the time: else somebody may need what the log has not
                for node in self.nodes:
                    if node.serves and node.store is not None:
                        node.store.consolidate()
                        node.store.consolidator.flush()
            self._happen()
            for node in self.nodes:
                node.log.outbox.retry(all_of_them=self.rng.random() < 0.1)
                while node.log.pump():
                    pass
            self._look_after()
            places = {(node.log.place.sequence, node.log.proposed) for node in self.nodes}
            self._open_ended = len(places) > 1 or places != {(self.servers.last, 0)}
            if not self._open_ended and not self._events:
                break
        if len({node.log.place for node in self.nodes}) > 1:
            raise Mismatch(f"C1: the nodes are not at one place: {[node.log.place for node in self.nodes]}")
        if any(node.log.proposed for node in self.nodes):
            raise Mismatch("C2: what was proposed has not come back")
        times = Counter(attempt.token for attempt in self.oracle.attempts)
        for attempt in self.oracle.attempts:
            if attempt.outcome == "unknown" and times[attempt.token] > 1:
                attempt.start_ts = None  # which of those with one token it was that committed, nobody can say
        self.oracle.resolve(self._outcome)
        self.oracle.confirm(self._outcome)
        for node in self.nodes:
            for snap in node.snapshots:
                self._look(node, snap)
            with node.db.snapshot() as snap:
                if snap.ts != self.nodes[0].log.place.number:
                    raise Mismatch(f"R1: node {node.id} reads at {snap.ts}, the log is at {self.nodes[0].log.place}")
                self._look(node, snap)
                self._verify(node, snap.ts)
        with self.nodes[0].db.snapshot() as snap:
            spans = [row["id"] for row in snap.scan("spans")]
        if len(spans) > len(set(spans)):
            raise Mismatch("a span counts twice")
        self._check_guards()
        self._check_columns()
        report = self.oracle.check()
        self.counted["commits"], self.counted["reads"] = report.commits, report.reads

    def _check_guards(self) -> None:
        """R8 on rows of ``agg``: a guard on one and an append of an event of it are not concurrent, if both commit."""
        refused = [one for one in self.oracle.attempts if one.refused is not None and one.refused.table == "agg"]
        self.counted["guards refused"] += len(refused)
        done = [one for one in self.oracle.attempts if one.outcome == "committed" and not one.repeat]
        guards: list[tuple[int, int, Any]] = []
        touches: list[tuple[int, int, Any]] = []
        for attempt in done:
            for op in attempt.ops:
                span = (attempt.began, attempt.commit_ts or 0)
                if op.kind == "guard" and op.table == "agg":
                    guards.append((*span, op.key))
                elif op.kind == "append" and op.table == "e":
                    touches += [(*span, (event["a"],)) for event in op.events]
                elif op.kind == "retract" and "a" in op.values:
                    touches.append((*span, (op.values["a"],)))
        for began, cts, key in guards:
            self.counted["guards"] += 1
            for start, at, touched in touches:
                if touched == key and (began < at < cts or start < cts < at):
                    raise Mismatch(
                        f"R8: a guard on agg {key} from {began} to {cts}, and an append from {start} to {at}"
                    )

    def _outcome(self, token: str) -> int | None:
        """As every node knows it."""
        token, _, place = token.partition(" ")[2].partition(" ")
        found = set()
        for node in self.nodes:
            assert node.store is not None
            known = node.store.tokens.find(f"token {token}")
            found.add(None if known is None else known.cts + int(place or 0))
        if len(found) > 1:
            raise Mismatch(f"C3: the nodes disagree on token {token}: {found}")
        return found.pop()


class _Member:
    def __init__(self, ops: list[Op], token: str, simulation: Simulation) -> None:
        self.ops, self.token = ops, token
        self.told = False
        self.attempt: Attempt
