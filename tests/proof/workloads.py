"""What the concurrent checkers run: clients that log everything they do and see, for the replay oracle to judge.

Each client is one thread with a ``kivi`` database of its own, embedded or over gRPC, and mixes:

``Mix``        every operation on a few hot rows, events, snapshots that stay open and are read again
``Bank``       transfers are deltas, 5% are puts computed from reads and deletes: the total is the same at every S
``Counters``   increments and decrements, never a conflict, and ``as_of`` reads of the past
``LongFork``   rows written apart, read together: no two readers see two writes in different orders
``Sessions``   what a client has seen never goes back, and ``min_snapshot`` waits or refuses, never lies
``Viewed``     rows that two views have under other keys, one of which is unique (``tests.proof.views``)

A reply that is lost leaves its attempt *unknown*: it is resolved through its token once the run is over. Whatever else
goes wrong ends the run.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from pathlib import Path
from typing import Any

import kivi
from kivi.errors import CommitUnknown, Conflict, KiviError, Retryable, RowExists, SnapshotTooOld, Unavailable
from kivi.model.outcomes import ABORTED
from tests.measures import Quantiles, Winner
from tests.oracle import TWICE, Aggregate, Attempt, EventTable, Mismatch, Op, Oracle, Read, RowTable, Table, View

__all__ = [
    "TABLES",
    "Bank",
    "Client",
    "Counters",
    "LongFork",
    "MemberToken",
    "Mix",
    "Sessions",
    "make_tables",
    "micros",
    "settled",
]

KEYS = 10
MOMENTS = 100  # event times, so that some are equal and the order of commits decides
ACCOUNTS = 16
TOTAL = 1_000 * ACCOUNTS
COLUMNS: dict[str, Any] = {
    "n": kivi.sum("int64"),
    "f": kivi.sum("float64"),
    "hi": kivi.max("int64"),
    "v": "int64",
    "s": "string",
}
TABLES: dict[str, Table] = {
    "t": RowTable(("id",), {"n": "sum", "f": "fsum", "hi": "max", "v": None, "s": None}),
    "e": EventTable(),
    "by_a": Aggregate(
        "e",
        ("a",),
        lambda event: (event["a"],),
        {"total": ("sum", lambda e: e["x"]), "calls": ("sum", lambda e: 1), "slow": ("max", lambda e: e["x"])},
    ),
    "by_b": Aggregate(
        "e",
        ("b",),
        lambda event: (event["b"],),
        {
            "total": ("sum", lambda e: e["x"]),
            "fast": ("min", lambda e: e["x"]),
            "many": ("sum", lambda e: int(e["x"] > 500)),
            "spread": (Quantiles(2), lambda e: e["x"]),
            "newest": (Winner("last"), lambda e: e["x"]),
        },
    ),
    "kept": Aggregate(
        "e",
        ("a",),
        lambda event: (event["a"],),
        {"total": ("sum", lambda e: e["x"]), "calls": ("sum", lambda e: 1), "slow": ("max", lambda e: e["x"])},
    ),
    "bank": RowTable(("id",), {"balance": "sum"}),
    "counters": RowTable(("id",), {"n": "sum"}),
    "fork": RowTable(("id",), {"v": None}),
    "past": RowTable(("id",), {"n": "sum", "f": "fsum", "v": None}),
    "people": RowTable(("id",), {"name": None, "desk": None, "balance": "sum"}),
    "by_name": View("people", ("name", "id"), ("balance",)),
    "by_desk": View("people", ("desk",), ("id", "name", "balance")),
}
BY_B = {
    "total": kivi.sum("x"),
    "fast": kivi.min("x"),
    "many": kivi.count(where=kivi.col("x") > 500),
    "spread": kivi.quantiles("x", 0.1),
    "newest": kivi.last("x"),
}
"""What ``TABLES`` says of ``by_b``, as it is declared. The model (``tests.mvcc.world``) has all kinds of measures; here
they are few, and in an aggregate without history, of which a fold makes each version of each state: threads wait for
one another at each NumPy call, and then runs fall below their minima."""
EVENT = {"a": "int64", "b": "string", "ts": "timestamp", "x": "int64"}


def make_tables(db: Any, cold: Path | None = None) -> None:
    """All tables of the workloads, empty. ``cold``: a directory for the settled files of events but the newest."""
    tier = {} if cold is None else {"local": 1, "cold": cold.absolute().as_uri()}
    db.create_table("t", key={"id": "int64"}, columns=COLUMNS)
    db.create_event_table("e", event_time="ts", columns=EVENT, **tier)
    measures = {"total": kivi.sum("x"), "calls": kivi.count(), "slow": kivi.max("x")}
    db.create_aggregate("by_a", source="e", group_by=["a"], measures=measures)
    db.create_aggregate("kept", source="e", group_by=["a"], measures=measures, history="1h")
    db.create_aggregate("by_b", source="e", group_by=["b"], measures=BY_B)
    db.create_table("bank", key={"id": "int64"}, columns={"balance": kivi.sum("int64")})
    db.create_table("counters", key={"id": "int64"}, columns={"n": kivi.sum("int64")}, history="1h")
    db.create_table("fork", key={"id": "int64"}, columns={"v": "int64"})
    summed = {"n": kivi.sum("int64"), "f": kivi.sum("float64"), "v": "int64"}
    db.create_table("past", key={"id": "int64"}, columns=summed, history="1h")
    people = {"name": "string", "desk": "int64", "balance": kivi.sum("int64")}
    db.create_table("people", key={"id": "int64"}, columns=people, history="1h")
    db.create_view("by_name", source="people", key=["name", "id"], columns=["balance"])
    db.create_view("by_desk", source="people", key=["desk"], columns=["name", "balance"], unique=True)


def fund(db: Any, oracle: Oracle) -> int:
    """Opens the accounts, as a commit of the oracle's. Returns its timestamp."""
    ops = [Op("put", "bank", (i,), {"balance": TOTAL // ACCOUNTS}) for i in range(ACCOUNTS)]
    with db.transaction() as tx:
        for op in ops:
            tx.put(op.table, op.key, **op.values)
    oracle.attempt(Attempt(tx.start_ts, ops, "committed", tx.commit_ts, who="fund"))
    return int(tx.commit_ts)


class MemberToken(str):
    """What stands in an attempt for (token, place), where many transactions share one token (R16, R19)."""

    token: str
    place: int

    def __new__(cls, token: str, place: int) -> MemberToken:
        made = super().__new__(cls, f"{token} at {place}")
        made.token, made.place = token, place
        return made


def settled(db: Any, token: str) -> int | None:
    """What became of a token, for ``Oracle.resolve``: its commit timestamp, or None if it never will commit."""
    found = db.outcome(token.token, token.place) if isinstance(token, MemberToken) else db.outcome(token)
    assert isinstance(found, int) or found is ABORTED, f"the outcome of {token!r} stays unknown"
    return found if isinstance(found, int) else None


def micros(moment: Any) -> int:
    return round(moment.timestamp() * 1_000_000)


class Client:
    """One thread's transactions. Everything it does and sees goes into the oracle."""

    def __init__(self, db: Any, oracle: Oracle, seed: int, *, first: int = 0) -> None:
        self.db = db
        self.oracle = oracle
        self.random = random.Random(seed)
        self.name = f"{type(self).__name__.lower()} {seed}"
        self.first = first
        self.acknowledged = first
        self.unknown = self.restarted = self.unreachable = 0
        self.failure: BaseException | None = None
        # Some workers are several threads, of which two may not be in one generator.
        self._tokens = map((self.name + " {}").format, itertools.count())

    def run(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                try:
                    self.step()
                except SnapshotTooOld:  # a restart of the server ends every snapshot
                    self.restarted += 1
                except (Unavailable, CommitUnknown):
                    self.unreachable += 1
                    time.sleep(0.02)
        except BaseException as error:
            self.failure = error
        finally:
            self.close()

    def step(self) -> None:
        """One transaction or a few reads."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of what the client holds open."""

    def commit(self, tx: Any, ops: list[Op], token: str | None = None) -> int | None:
        """Commits and logs the attempt; None if it was aborted or its outcome is unknown."""
        attempt = Attempt(tx.start_ts, ops, "aborted", token=token, who=self.name)
        try:
            attempt.commit_ts = tx.commit()
            attempt.outcome = "committed"
            self.acknowledged = max(self.acknowledged, attempt.commit_ts or 0)
        except Conflict as error:
            attempt.refused = error
        except RowExists as error:  # of a unique view: its rows would be two under one key
            self.oracle.read(Read(tx.start_ts, error.table, tuple(error.key), TWICE, tuple(ops), self.name))
        except (Retryable, SnapshotTooOld):  # the server went away before the commit was logged
            self.restarted += 1
        except CommitUnknown as error:
            attempt.outcome, attempt.token = "unknown", error.token or token
            self.unknown += 1
        self.oracle.attempt(attempt)
        return attempt.commit_ts

    def begin(self) -> tuple[Any, str]:
        token = next(self._tokens)
        tx = self.db.transaction(token=token)
        if tx.start_ts < self.acknowledged:
            raise Mismatch(f"R17: {self.name} has seen {self.acknowledged} and begins at {tx.start_ts}")
        return tx, token

    def scan(self, snap: Any, table: str) -> list[dict[str, Any]]:
        rows, spec = list(snap.scan(table)), self.oracle.tables[table]
        is_sharded = isinstance(spec, EventTable) and spec.is_sharded
        if isinstance(spec, EventTable):
            rows = [{**row, "ts": micros(row["ts"])} for row in rows]
        self.oracle.read(Read(snap.ts, table, None, rows, who=self.name, is_any_order=is_sharded))
        return rows


class Mix(Client):
    """Every operation."""

    def __init__(self, db: Any, oracle: Oracle, seed: int, *, first: int = 0) -> None:
        super().__init__(db, oracle, seed, first=first)
        self.snapshots: list[Any] = []

    def step(self) -> None:
        self.transaction()
        if self.random.random() < 0.3:
            self.look()

    def close(self) -> None:
        for snap in self.snapshots:
            with contextlib.suppress(KiviError):
                snap.close()

    # -- writing --------------------------------------------------------------------------------

    def transaction(self) -> None:
        tx, token = self.begin()
        ops: list[Op] = []
        for _ in range(self.random.choice((1, 1, 2, 3))):
            if self.random.random() < 0.4:
                self.read_in(tx, ops)
            self.write_in(tx, ops)
        if self.random.random() < 0.3:
            self.read_in(tx, ops)
        if self.random.random() < 0.03:
            tx.rollback()
        else:
            self.commit(tx, ops, token)

    def write_in(self, tx: Any, ops: list[Op]) -> None:
        rng = self.random
        key = (rng.randrange(KEYS),)
        values: dict[str, Any]
        kind = rng.choices(
            ("delta", "put", "put_sum", "insert", "delete", "guard", "append", "bulk"), (40, 12, 4, 6, 6, 10, 12, 2)
        )[0]
        match kind:
            case "delta":
                values = {"n": rng.randrange(-50, 50)}
                if rng.random() < 0.5:
                    values |= {"f": rng.uniform(-1, 1), "hi": rng.randrange(1000)}
                tx.delta("t", key, **values)
                ops.append(Op("delta", "t", key, values))
            case "put":
                values = {"v": rng.randrange(100), "s": f"s{rng.randrange(100)}"}
                tx.put("t", key, **values)
                ops.append(Op("put", "t", key, values))
            case "put_sum":
                tx.put("t", key, n=7)
                ops.append(Op("put", "t", key, {"n": 7}))
            case "insert":
                try:
                    tx.insert("t", key, v=1)
                    ops.append(Op("insert", "t", key, {"v": 1}))
                except RowExists:
                    pass
            case "delete":
                tx.delete("t", key)
                ops.append(Op("delete", "t", key))
            case "guard":
                column = rng.choice(("n", "v", None))
                tx.guard("t", key, column)
                ops.append(Op("guard", "t", key, {} if column is None else {column: None}))
            case _:
                count = 50 if kind == "bulk" else rng.randrange(1, 4)
                events = [
                    {
                        "a": rng.randrange(5),
                        "b": rng.choice("xyz"),
                        "ts": rng.randrange(MOMENTS),
                        "x": rng.randrange(999),
                    }
                    for _ in range(count)
                ]
                tx.append("e", events)
                ops.append(Op("append", "e", events=events))

    # -- reading --------------------------------------------------------------------------------

    def read_in(self, tx: Any, ops: list[Op]) -> None:
        table = self.random.choice(("t", "t", "by_a", "by_b", "kept"))
        own = tuple(op for op in ops if op.kind != "guard")
        key: tuple[Any, ...] | None
        if self.random.random() < 0.7:
            key = self.key_of(table)
            found: Any = tx.get(table, key)
        else:
            key, found = None, list(tx.scan(table))
        self.oracle.read(Read(tx.start_ts, table, key, found, own, self.name))

    def key_of(self, table: str) -> tuple[Any, ...]:
        return (self.random.choice("xyz") if table == "by_b" else self.random.randrange(KEYS),)

    def look(self) -> None:
        """Opens a snapshot, or reads one again that has been open for a while, or closes one."""
        if len(self.snapshots) < 3:
            self.snapshots.append(self.db.snapshot(min_snapshot=self.acknowledged))
        snap = self.random.choice(self.snapshots)
        try:
            for table in ("t", "by_b", "kept") if self.random.random() < 0.8 else ("e",):
                self.scan(snap, table)
        except KiviError:
            self.snapshots.remove(snap)
            raise
        if self.random.random() < 0.2:
            self.snapshots.remove(snap)
            snap.close()


class Bank(Client):
    """Money moves and never changes its amount."""

    def step(self) -> None:
        if self.random.random() < 0.3:
            with self.db.snapshot(min_snapshot=self.acknowledged) as snap:
                total = sum(row["balance"] for row in self.scan(snap, "bank"))
                if total != TOTAL:
                    raise Mismatch(f"bank: {total} instead of {TOTAL} at {snap.ts}")
            return
        tx, token = self.begin()
        source, target = ((i,) for i in self.random.sample(range(ACCOUNTS), 2))
        amount = self.random.randrange(1, 100)
        ops: list[Op]
        match self.random.random():
            case chance if chance < 0.04:  # computed from what was read: a concurrent delta must abort it (R4, R8)
                balances = [self.balance(tx, key) for key in (source, target)]
                ops = [
                    Op("put", "bank", source, {"balance": balances[0] - amount}),
                    Op("put", "bank", target, {"balance": balances[1] + amount}),
                ]
            case chance if chance < 0.05:
                ops = [
                    Op("delta", "bank", target, {"balance": self.balance(tx, source)}),
                    Op("delete", "bank", source),
                ]
            case _:
                ops = [
                    Op("delta", "bank", source, {"balance": -amount}),
                    Op("delta", "bank", target, {"balance": amount}),
                ]
        for op in ops:
            getattr(tx, op.kind)(op.table, op.key, **op.values)
        self.commit(tx, ops, token)

    def balance(self, tx: Any, key: tuple[Any, ...]) -> int:
        row = tx.get("bank", key)
        self.oracle.read(Read(tx.start_ts, "bank", key, row, who=self.name))
        return 0 if row is None else int(row["balance"])


class Counters(Client):
    """Blind deltas: none may abort (R3)."""

    def step(self) -> None:
        if self.random.random() < 0.2:
            with self.db.snapshot() as now:
                moment = self.random.randint(self.first, now.ts)
            with self.db.snapshot(as_of=moment) as snap:
                self.scan(snap, "counters")
            return
        tx, token = self.begin()
        ops = []
        for key in self.random.sample(range(5), self.random.randint(1, 3)):
            op = Op("delta", "counters", (key,), {"n": self.random.choice((-3, -2, -1, 1, 2, 3))})
            tx.delta(op.table, op.key, **op.values)
            ops.append(op)
        before = self.unknown + self.restarted
        if self.commit(tx, ops, token) is None and self.unknown + self.restarted == before:
            raise Mismatch("R3: a transaction of deltas was aborted")


class LongFork(Client):
    """Rows are written apart and read together. That every reader agrees on one order is the oracle's check."""

    def step(self) -> None:
        if self.random.random() < 0.5:
            with self.db.snapshot() as snap:
                rows = snap.get_many("fork", [(0,), (1,), (2,)])
                for i, row in enumerate(rows):
                    self.oracle.read(Read(snap.ts, "fork", (i,), row, who=self.name))
            return
        tx, token = self.begin()
        key = (self.random.randrange(3),)
        row = tx.get("fork", key)
        self.oracle.read(Read(tx.start_ts, "fork", key, row, who=self.name))
        op = Op("put", "fork", key, {"v": 1 if row is None else row["v"] + 1})
        tx.put(op.table, op.key, **op.values)
        self.commit(tx, [op], token)


class Sessions(Client):
    """Snapshots of one client never go back, and one that must be newer than W waits or says so."""

    def step(self) -> None:
        with self.db.snapshot() as snap:
            if snap.ts < self.acknowledged:
                raise Mismatch(f"R17: {self.name} has seen {self.acknowledged} and now {snap.ts}")
            self.acknowledged = snap.ts
            self.scan(snap, self.random.choice(("bank", "counters", "fork")))
        if self.random.random() < 0.3:
            tx, token = self.begin()
            op = Op("delta", "counters", (self.random.randrange(5),), {"n": 1})
            tx.delta(op.table, op.key, **op.values)
            committed = self.commit(tx, [op], token)
            if committed is not None:
                with self.db.snapshot(min_snapshot=committed) as snap:
                    if snap.ts < committed:
                        raise Mismatch(f"R17: min_snapshot={committed} gave {snap.ts}")
                    self.scan(snap, "counters")
