"""What the siege of a cluster has besides: a sharded table, subscriptions, and pins, judged by the replay oracle.

``Sharded``     appends to an event table whose shards lie on several nodes, and reads it and its aggregate at one S
``Watching``    a subscription to rows: each state is what its query gives at the snapshot that it names
``Following``   a subscription to events: each of them once, in commit order
``Pinned``      a shared snapshot, read at every node until it ends: never too old, and the same everywhere

A subscription ends after some seconds and goes on from what it had been told, by another client at another node: that
client knows nothing of the one before.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import kivi
from kivi.errors import KiviError, NotFound, SnapshotTooOld, Unavailable
from tests.oracle import Aggregate, EventTable, Mismatch, Op, Oracle, Read, Table, Told
from tests.proof.workloads import Client, micros

__all__ = ["SPREAD", "Following", "Pinned", "Sharded", "Subscribed", "Watching", "make_spread"]

USERS = 24
MOMENTS = 100
SPREAD: dict[str, Table] = {
    "s": EventTable(is_sharded=True),
    "by_user": Aggregate(
        "s",
        ("user",),
        lambda event: (event["user"],),
        {"total": ("sum", lambda e: e["x"]), "calls": ("sum", lambda e: 1), "slow": ("max", lambda e: e["x"])},
    ),
}
MEASURES = {"total": kivi.sum("x"), "calls": kivi.count(), "slow": kivi.max("x")}


def make_spread(db: Any) -> None:
    """The tables of ``SPREAD``, empty."""
    columns = {"user": "string", "ts": "timestamp", "x": "int64"}
    db.create_event_table("s", event_time="ts", columns=columns, shard_by=["user"])
    db.create_aggregate("by_user", source="s", group_by=["user"], measures=MEASURES)


class Sharded(Client):
    """``spans``: of each read of rows that several nodes hold, when it ended and how long it took."""

    def __init__(self, db: Any, oracle: Oracle, seed: int, *, first: int = 0) -> None:
        super().__init__(db, oracle, seed, first=first)
        self.spans: list[tuple[float, float]] = []

    def step(self) -> None:
        if self.random.random() < 0.5:
            self.transaction()
        else:
            with self.db.snapshot(min_snapshot=self.acknowledged) as snap:
                for _ in range(self.random.randint(1, 3)):
                    began = time.monotonic()
                    self.look(snap)
                    self.spans.append((time.monotonic(), time.monotonic() - began))

    def key(self) -> tuple[str]:
        return (f"user {self.random.randrange(USERS)}",)

    def transaction(self) -> None:
        tx, token = self.begin()
        ops: list[Op] = []
        try:
            for _ in range(self.random.choice((1, 1, 2))):
                count = 100 if self.random.random() < 0.05 else self.random.randint(1, 6)
                (*users,) = (self.key()[0] for _ in range(count))
                events = [
                    {"user": user, "ts": self.random.randrange(MOMENTS), "x": self.random.randrange(999)}
                    for user in users
                ]
                tx.append("s", events)
                ops.append(Op("append", "s", events=events))
                if self.random.random() < 0.2:  # with its own events
                    key = self.key()
                    self.oracle.read(Read(tx.start_ts, "by_user", key, tx.get("by_user", key), tuple(ops), self.name))
        except KiviError:
            with contextlib.suppress(KiviError):
                tx.rollback()
            raise
        self.commit(tx, ops, token)

    def look(self, snap: Any) -> None:
        match self.random.random():
            case chance if chance < 0.1:
                self.scan(snap, "s")
            case chance if chance < 0.5:
                self.scan(snap, "by_user")
            case chance if chance < 0.75:
                keys = [self.key() for _ in range(3)]
                for key, row in zip(keys, snap.get_many("by_user", keys), strict=True):
                    self.oracle.read(Read(snap.ts, "by_user", key, row, who=self.name))
            case _:  # of its events anew
                rows = list(snap.query("s", group_by=["user"], measures=MEASURES))
                rows.sort(key=lambda row: row["user"])
                self.oracle.read(Read(snap.ts, "by_user", None, rows, who=self.name))


class Subscribed(Client):
    """One step is the life of one subscription. ``connect`` makes a client of the cluster; ``ts`` is what was told."""

    query: Mapping[str, Any] = {}

    def __init__(self, connect: Callable[[], Any], oracle: Oracle, seed: int, table: str, *, first: int) -> None:
        super().__init__(connect(), oracle, seed, first=first)
        self.name += f" of {table}"
        self.connect, self.table, self.ts = connect, table, first

    def step(self) -> None:
        self.db.close()
        self.db = self.connect()
        ends = time.monotonic() + self.random.uniform(1, 6)
        interval_ms = self.random.choice((0, 20, 200))
        with self.db.subscribe(self.table, interval_ms=interval_ms, **self.query, **self.where()) as live:
            while time.monotonic() < ends:
                update = live.next(0.3)
                if live.ts < self.ts:
                    raise Mismatch(f"C6: {self.name} was told of {self.ts}, and then of {live.ts}")
                self.hear(live, update)
                self.ts = live.ts

    def where(self) -> dict[str, Any]:
        """From where it goes on."""
        raise NotImplementedError

    def hear(self, live: Any, update: Any) -> None:
        """What it was told; ``update`` is None where nothing has changed."""
        raise NotImplementedError

    def go_on_to(self, ts: int, within_s: float) -> None:
        """Until it was told all that is committed. Raises Mismatch if it is not."""
        until = time.monotonic() + within_s
        while self.ts < ts:
            if time.monotonic() > until:
                raise Mismatch(f"{self.name} has heard of nothing behind {self.ts}, and {ts} was acknowledged")
            with contextlib.suppress(Unavailable):
                self.step()
        self.db.close()


class Watching(Subscribed):
    """``top``: a column, and how many rows with its largest values; None: all rows, in the order of their keys."""

    def __init__(self, *arguments: Any, top: tuple[str, int] | None = None, first: int) -> None:
        super().__init__(*arguments, first=first)
        self.top, self.rows, self.ts = top, list[dict[str, Any]](), 0
        self.is_told = False
        if top is not None:
            self.query = {"order_by": f"-{top[0]}", "limit": top[1]}

    def where(self) -> dict[str, Any]:
        return {"since": self.ts, "rows": self.rows} if self.is_told else {}

    def hear(self, live: Any, update: Any) -> None:
        self.is_told |= update is not None  # the first has all rows
        if self.is_told and (update is not None or live.ts > self.ts):
            self.rows = list(live.rows)
            self.oracle.read(Read(live.ts, self.table, None, self.rows, who=self.name, top=self.top))


class Following(Subscribed):
    """``skip``: how many events after ``ts`` it was told of, too."""

    skip = 0

    def where(self) -> dict[str, Any]:
        return {"since": self.ts, "skip": self.skip}

    def hear(self, live: Any, update: Any) -> None:
        events = [] if update is None else [{**change.row, "ts": micros(change.row["ts"])} for change in update.changes]
        if update is not None and (update.reset or any(change.kind != "add" for change in update.changes)):
            raise Mismatch(f"{self.name} begins anew, or takes events back, at {live.ts}")
        self.oracle.told(Told(self.table, (self.ts, self.skip), (live.ts, live.skip), events, self.name))
        self.skip = live.skip


class Pinned(Client):
    """One step is one look, at one node. ``nodes``: a client of each, by its name. ``refused``: what they could not say
    in time."""

    def __init__(self, db: Any, oracle: Oracle, seed: int, nodes: Mapping[str, Any]) -> None:
        super().__init__(db, oracle, seed)
        self.pin = self.name
        self.nodes, self.until, self.lease, self.ts = nodes, 0.0, b"", 0
        self.made = self.refused = 0

    def step(self) -> None:
        if time.monotonic() > self.until:
            ttl_s = self.random.uniform(3, 40)
            began = time.monotonic()
            pin = self.db.snapshot(shared=True, ttl_s=ttl_s).__enter__()  # nobody closes it: it ends by itself
            self.lease, self.ts = pin.lease, pin.ts
            self.until, self.made = began + ttl_s, self.made + 1
        try:
            node = self.random.choice([*self.nodes])
            self.name = f"{self.pin} at {node}"
            with self.nodes[node].snapshot(lease=self.lease, min_snapshot=self.ts) as snap:
                if snap.ts != self.ts:
                    raise Mismatch(f"C1: the pin of {self.ts} is read at {snap.ts}")
                for table in self.random.sample([*self.oracle.tables], 2):
                    self.scan(snap, table)
        except (SnapshotTooOld, NotFound) as error:
            if time.monotonic() < self.until:
                raise Mismatch(f"C1: a pin ends {self.until - time.monotonic():.1f} s too early: {error}") from error
        except Unavailable:
            self.refused += 1
            raise
        time.sleep(0.1)

    def close(self) -> None:
        for db in self.nodes.values():
            db.close()
