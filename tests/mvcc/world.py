"""One store, in memory or on disk, everything that may happen to it, and what must be true after each step.

The expectation is a dictionary of versions: the replay of what was committed (``tests.oracle``). Whether a commit
conflicts is predicted, not observed, so a transaction that could have committed and was refused is a failure too. Every
choice is drawn from a ``random.Random``: a seed gives the same history again, and hypothesis can hand in its own.

In memory a crash takes any records that were on their way, and any of the engine's last batches. On disk (RocksDB and
the segmented log) what was on its way at a crash is there or not, and the tokens say so; but never a later one without
an earlier one.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import kivi
from kivi.embedded.database import Database, Snapshot, Transaction
from kivi.engine.memory import MemoryEngine
from kivi.errors import Conflict, InvalidArgument, RowExists, SnapshotTooOld
from kivi.log.memory import MemoryLog
from kivi.log.segmented import SegmentedLog
from kivi.model.outcomes import ABORTED
from kivi.mvcc.combine import is_combined
from kivi.mvcc.commit import Aborted
from kivi.mvcc.groups import Outcome
from kivi.runtime.settings import Settings
from kivi.store import reads as scan
from kivi.store.facade import Store
from tests.measures import Distinct, Extremes, Moments, Quantiles, Top, Winner, plain
from tests.oracle import Aggregate, Attempt, EventTable, Op, Oracle, Read, RowTable, Table, touched
from tests.proof.groups import Together
from tests.proof.workloads import micros
from tests.waiting import wait_until

__all__ = ["TABLES", "World"]

TABLES: dict[str, Table] = {
    "t": RowTable(("id",), {"n": "sum", "hi": "max", "v": None}),
    "h": RowTable(("id",), {"n": "sum", "hi": "max", "v": None}),
    "e": EventTable(),
    "agg": Aggregate(
        "e",
        ("a",),
        lambda event: (event["a"],),
        {
            "total": ("sum", lambda e: e["x"]),
            "calls": ("sum", lambda e: 1),
            "slow": ("max", lambda e: e["x"]),
            "below": ("sum", lambda e: int(e["x"] < 0)),
            "square": ("sum", lambda e: e["x"] ** 2),
            "spread": (Quantiles(2), lambda e: e["x"]),
            "values": (Distinct(7), lambda e: e["x"]),
            "mean": (Moments("avg"), lambda e: e["x"]),
            "deviation": (Moments("stddev"), lambda e: e["x"]),
            "newest": (Winner("last"), lambda e: e["x"]),
            "oldest": (Winner("first"), lambda e: e["x"] if e["x"] >= 0 else None),
            "worst": (Winner("argmax"), lambda e: (e["s"], e["x"])),
            "largest": (Extremes("largest", 3), lambda e: e["x"]),
            "often": (Top(2, most=4), lambda e: e["s"]),
        },
    ),
    "shares": Aggregate("e", ("a",), lambda event: (event["a"],), {"share": (Moments("avg"), lambda e: e["x"] / 7)}),
}
"""Deltas of ``agg`` are combined; of ``shares``, which adds floats, never."""
MEASURES = {
    "total": kivi.sum("x"),
    "calls": kivi.count(),
    "slow": kivi.max("x"),
    "below": kivi.count(where=kivi.col("x") < 0),
    "square": kivi.sum(kivi.col("x") * kivi.col("x")),
    "spread": kivi.quantiles("x", 0.1),
    "values": kivi.distinct("x", 0.1),
    "mean": kivi.avg("x"),
    "deviation": kivi.stddev("x"),
    "newest": kivi.last("x"),
    "oldest": kivi.first("x", where=kivi.col("x") >= 0),
    "worst": kivi.argmax("s", by="x"),
    "largest": kivi.largest("x", 3),
    "often": kivi.top("s", 2, most=4),
}
EVENT = {"a": "int64", "ts": "timestamp", "x": "int64", "s": "string"}
KINDS = ("put", "delta", "delta", "delta", "insert", "delete", "delete", "guard", "append", "bulk", "get", "scan")


class Open:
    """An open transaction and what it has done."""

    def __init__(self, tx: Transaction, token: str | None) -> None:
        self.tx = tx
        self.token = token
        self.ops: list[Op] = []
        self.outcomes: list[Outcome] = []

    def attempt(self, commit_ts: int | None) -> Attempt:
        outcome: Any = "committed" if commit_ts is not None else "aborted"
        return Attempt(self.tx.start_ts, self.ops, outcome, commit_ts, self.token)

    @property
    def refused(self) -> bool:
        return bool(self.outcomes) and isinstance(self.outcomes[0].error, Conflict)


class Member:
    """A transaction of a group. It reads nothing, so it has no snapshot until its answer tells one."""

    def __init__(self, ops: list[Op], token: str) -> None:
        self.ops = ops
        self.token = token
        self.logged: Attempt | None = None

    def attempt(self, commit_ts: int | None) -> Attempt:
        """The one that is logged, so that it learns its snapshot when that is told."""
        if self.logged is None:
            self.logged = Attempt(None, self.ops, "committed", commit_ts, self.token)
        return self.logged


def _fits(ops: list[Op]) -> bool:
    """Whether they may come in a group: puts and deltas, each of another row."""
    return all(op.kind in ("put", "delta") for op in ops) and len({(op.table, op.key) for op in ops}) == len(ops)


class World:
    """Each public method but ``check`` and ``close`` is one step; a step that has nothing to act on does nothing."""

    def __init__(self, path: Path | None = None, few_rows: int = 0) -> None:
        """``few_rows``: scans of more rows are read in columns."""
        self.path = path
        self.few_rows = few_rows
        self.engine = MemoryEngine()
        self.memory = MemoryLog()
        self.oracle = Oracle(TABLES)
        self.entered: list[Attempt] = []  # since the last restart, in log order: what the verdict knows
        self.held: dict[int, Open] = {}
        self.transactions: list[Open] = []
        self.snapshots: list[tuple[Snapshot, dict[str, Any]]] = []
        self.untold: list[tuple[Together, dict[int, Attempt]]] = []  # groups, and by place who entered with them
        self.tokens: list[tuple[str, list[Op], int]] = []
        self.counted: Counter[str] = Counter()
        self.made = 0
        self._open()
        columns: dict[str, Any] = {"n": kivi.sum("int64"), "hi": kivi.max("int64"), "v": "int64"}
        self.db.create_table("t", key={"id": "int64"}, columns=columns)
        self.db.create_table("h", key={"id": "int64"}, columns=columns, history="1h")
        self.db.create_event_table("e", event_time="ts", columns=EVENT)
        self.db.create_aggregate("agg", source="e", group_by=["a"], measures=MEASURES)
        self.db.create_aggregate("shares", source="e", group_by=["a"], measures={"share": kivi.avg(kivi.col("x") / 7)})
        assert [is_combined(self.store.table(name)) for name in ("agg", "shares")] == [True, False]
        self.first = self.last = self.db.watermark()

    def _open(self) -> None:
        chosen = Settings.of({"background": False, "consolidate_rows": 2, "block_rows": 4, "commit_timeout_s": 10.0})
        if self.path is None:
            self.store = Store.open(None, settings=chosen, engine=self.engine, log=self.memory)
        else:
            self.store = Store.open(str(self.path), settings=chosen)
        self.log = self.store.log
        self.db = Database(self.store)

    def close(self) -> None:
        self.store.crash()
        self.memory.close()

    def _arrive(self) -> None:
        """What entered the log becomes durable, and is finished or held."""
        if self.path is None:
            self.memory.release()
            return
        committer = self.store.committer

        def is_finished() -> bool:
            held = committer.held
            if self.log.durable < self.log.last or len(committer._in_flight) > len(held):
                return False
            return bool(held) or self.db.watermark() >= self.log.last  # the last step of a commit on the log's thread

        wait_until(is_finished, reason="R11: a commit does not become durable and visible", pause_s=0.0001)

    def _answered(self, opened: Open) -> None:
        """On a disk it is the log's thread that acknowledges a commit, after it has moved the watermark past it."""
        wait_until(lambda: opened.outcomes, reason="a commit is not acknowledged", pause_s=0.0001)

    # -- what is expected -----------------------------------------------------------------------

    def state(self, ts: int) -> dict[str, Any]:
        replay = self.oracle.state(ts)
        return {table: replay.answer(Read(ts, table, None, None)) for table in TABLES}

    def seen(self, reader: Any) -> dict[str, Any]:
        return {table: self._scan(reader, table) for table in TABLES}

    def _scan(self, reader: Any, table: str) -> list[dict[str, Any]]:
        with patch.object(scan, "FEW_ROWS", self.few_rows):
            rows = list(reader.scan(table))
        return [{**row, "ts": micros(row["ts"])} for row in rows] if table == "e" else plain(rows)

    def _read(self, opened: Open, table: str, key: Any) -> Any:
        """R1, R7: the replay of what was committed at or below S, then its own writes."""
        own = tuple(op for op in opened.ops if op.kind != "guard")
        ts = opened.tx.start_ts
        return self.oracle.state(ts).answer(Read(ts, table, key, None, own))

    def _conflicts(self, opened: Open) -> bool:
        """R2 to R5, R8: something entered the log after its snapshot that does not commute with it."""
        return self._meets(opened.attempt(None), opened.tx.start_ts)

    def _meets(self, attempt: Attempt, start_ts: int) -> bool:
        """Whether it clashes with what entered the log above ``start_ts``, and before itself if it has entered."""
        mine = touched(attempt)
        return any(
            touch.clashes(theirs)
            for other in self.entered
            if start_ts < (other.commit_ts or 0) and (attempt.commit_ts or math.inf) > (other.commit_ts or 0)
            for where, theirs in touched(other).items()
            if (touch := mine.get(where)) is not None
        )

    def check(self) -> None:
        """After every step."""
        watermark = self.db.watermark()
        assert watermark >= self.last, "R13: the watermark went back"
        self.last = watermark
        if self.held:
            below = [attempt.commit_ts or 0 for attempt in self.entered if (attempt.commit_ts or 0) < min(self.held)]
            assert max([0, *below]) <= watermark < min(self.held), "R11: the gap-free prefix"
        else:
            assert watermark == self.log.last, "R11: everything has finished"
        self._hear()
        for snap, expected in self.snapshots:
            assert self.seen(snap) == expected, f"R1, R14: the snapshot at {snap.ts} changed"
            self.counted["reread"] += 1

    # -- transactions ---------------------------------------------------------------------------

    def begin(self, rng: random.Random) -> None:
        if len(self.transactions) >= 6:
            return
        self.made += 1
        token = f"token {self.made}" if rng.random() < 0.5 else None
        opened = Open(self.db.transaction(token), token)
        assert opened.tx.start_ts == self.db.watermark()
        self.transactions.append(opened)
        self._perform(rng, opened)

    def run(self, rng: random.Random) -> None:
        """A whole transaction in one step: nothing comes between its snapshot and its commit."""
        if len(self.transactions) < 6:
            self.begin(rng)
            self._commit(self.transactions.pop())

    def work(self, rng: random.Random) -> None:
        if self.transactions:
            self._perform(rng, rng.choice(self.transactions))

    def _perform(self, rng: random.Random, opened: Open) -> None:
        tx, ops = opened.tx, opened.ops
        for _ in range(rng.randint(1, 3)):
            kind, table, key = rng.choice(KINDS), rng.choice("tth"), (rng.randint(0, 2),)
            values = {name: rng.randint(-5, 5) for name in rng.sample(("n", "hi", "v"), rng.randint(1, 3))}
            match kind:
                case "put":
                    tx.put(table, key, **values)
                    ops.append(Op("put", table, key, values))
                case "delta":
                    deltas = {"n": rng.randint(-5, 5), "hi": rng.randint(-5, 5)}
                    deltas.pop(rng.choice(("n", "hi", "none")), None)
                    tx.delta(table, key, **deltas)
                    ops.append(Op("delta", table, key, deltas))
                case "insert":
                    there = self._read(opened, table, key) is not None
                    try:
                        tx.insert(table, key, **values)
                        assert not there
                        ops.append(Op("insert", table, key, values))
                    except RowExists:
                        assert there
                case "delete":
                    tx.delete(table, key)
                    ops.append(Op("delete", table, key))
                case "guard":
                    column = rng.choice((None, "n", "v"))
                    tx.guard(table, key, column)
                    ops.append(Op("guard", table, key, {} if column is None else {column: None}))
                case "append" | "bulk":
                    count = 40 if kind == "bulk" and rng.random() < 0.3 else rng.randint(1, 3)
                    events = [self._event(rng) for _ in range(count)]
                    tx.append("e", events)
                    ops.append(Op("append", "e", events=events))
                case "get":
                    for name in (table, "agg", "shares"):
                        assert plain(tx.get(name, key)) == self._read(opened, name, key)
                case "scan":
                    for name in TABLES:
                        assert self._scan(tx, name) == self._read(opened, name, None)
            self.counted[kind] += 1

    def _event(self, rng: random.Random) -> dict[str, Any]:
        """Few different values and moments, so that many are equal and their order decides."""
        return {"a": rng.randint(0, 2), "ts": rng.randint(0, 3), "x": rng.randint(-5, 5), "s": rng.choice("abcdefg")}

    def rollback(self, rng: random.Random) -> None:
        if self.transactions:
            self._taken(rng).tx.rollback()

    def _taken(self, rng: random.Random) -> Open:
        return self.transactions.pop(rng.randrange(len(self.transactions)))

    # -- commits --------------------------------------------------------------------------------

    def _submit(self, opened: Open, *, arrives: bool = True) -> None:
        """Enters the log or is refused, as predicted."""
        expected = self._conflicts(opened)
        raw, before = opened.tx._txn, self.log.last
        assert raw is not None
        self.store.commit(raw, token=opened.token, done=opened.outcomes.append)
        if arrives:
            self._arrive()
        if not opened.ops:
            return
        assert opened.refused == expected, (opened.ops, opened.outcomes)
        assert (self.log.last > before) != expected, "R13"
        self.counted["conflict" if expected else "commit"] += 1
        if not expected:
            self.entered.append(opened.attempt(self.log.last))

    def commit(self, rng: random.Random) -> None:
        if self.transactions:
            self._commit(self._taken(rng))

    def _commit(self, opened: Open) -> None:
        self._submit(opened)
        if opened.ops and not opened.refused:
            commit_ts = self.log.last
            self._committed(opened, commit_ts)
            if not self.held:
                self._answered(opened)
                assert [outcome.commit_ts for outcome in opened.outcomes] == [commit_ts]
            else:
                assert opened.outcomes == [], "R17: acknowledged before the watermark was there"

    def together(self, rng: random.Random) -> None:
        """R19: blind transactions that reach the store as a group. Those that do not enter with it come alone."""
        members = [self._member(rng) for _ in range(rng.randint(2, 8))]
        repeated = rng.choice(self.tokens) if self.tokens and not self.held and rng.random() < 0.3 else None
        if repeated is not None and _fits(repeated[1]):
            members.insert(rng.randint(0, len(members)), Member(repeated[1], repeated[0]))
        group, entered = self._enter(members)
        self._arrive()
        for cts, member in entered:
            self._committed(member, cts)
        for place in group.left:
            member = members[place]
            if repeated is not None and member.token == repeated[0]:
                self._repeat(*repeated)
                continue
            opened = Open(self.db.transaction(member.token), member.token)
            for op in member.ops:
                getattr(opened.tx, op.kind)(op.table, op.key, **op.values)
            opened.ops = member.ops
            self._commit(opened)

    def _member(self, rng: random.Random) -> Member:
        self.made += 1
        ops = []
        for key in rng.sample(range(3), rng.choice((1, 1, 1, 2))):
            if rng.random() < 0.4:
                op = Op("put", rng.choice("th"), (key,), {rng.choice(("n", "v")): rng.randint(-5, 5)})
            else:
                op = Op("delta", rng.choice("th"), (key,), {rng.choice(("n", "hi")): rng.randint(-5, 5)})
            ops.append(op)
        return Member(ops, f"token {self.made}")

    def _enter(self, members: list[Member]) -> tuple[Together, list[tuple[int, Member]]]:
        """A group into the log: those that enter do so in their order, and get consecutive timestamps (R19)."""
        group, before = Together(self.store, members), self.log.last
        group.enter()
        places = [place for place in range(len(members)) if place not in group.left]
        assert self.log.last == before + len(places), "R13"
        entered = [(before + 1 + i, members[place]) for i, place in enumerate(places)]
        attempts = [member.attempt(cts) for cts, member in entered]
        self.entered += attempts
        if places:
            self.untold.append((group, dict(zip(places, attempts, strict=True))))
        self.counted["commit"] += len(places)
        self.counted["grouped"] += len(places) if len(places) > 1 else 0
        return group, entered

    def _hear(self) -> None:
        """Answers to groups: each member gets the timestamp of its place, and nothing that it clashes with lies between
        that and the snapshot that it is told (R2, R19)."""
        for group, attempts in [*self.untold]:
            if self.held and not group.is_answered:
                continue
            group.wait()
            self.untold.remove((group, attempts))
            for place, attempt in attempts.items():
                answer = group.answers[place]
                assert (answer.commit_ts, answer.error) == (attempt.commit_ts, None), (attempt, answer)
                attempt.start_ts = answer.start_ts
                assert not self._meets(attempt, answer.start_ts), f"R2, R19: entered in a group all the same: {attempt}"

    def _committed(self, opened: Open | Member, commit_ts: int) -> None:
        self.oracle.attempt(opened.attempt(commit_ts))
        if opened.token:
            self.tokens.append((opened.token, opened.ops, commit_ts))

    def commit_held(self, rng: random.Random) -> None:
        """The commit is durable, and stands still between its timestamp and its finish."""
        if not self.transactions or len(self.held) >= 3:
            return
        opened = self._taken(rng)
        if not opened.ops:
            return
        self.store.committer.hold = lambda commit: True
        self._submit(opened)
        self.store.committer.hold = None
        if not opened.refused:
            self.held[self.log.last] = opened
            assert self.store.committer.held == sorted(self.held)
            self.counted["held"] += 1

    def let_go(self, rng: random.Random) -> None:
        """R11: a held commit finishes, or aborts after its timestamp was taken; in any order."""
        if not self.held:
            return
        cts = rng.choice(sorted(self.held))
        opened = self.held.pop(cts)
        aborts = rng.random() < 0.25
        if aborts:
            self.store.committer.abort_held(cts)
            self._arrive()
        else:
            self._committed(opened, cts)
            self.store.committer.finish_held(cts)
        if self.held and cts > min(self.held):
            assert opened.outcomes == [], "R17: acknowledged before the watermark was there"
            return
        self._answered(opened)
        (outcome,) = opened.outcomes
        if aborts:
            assert isinstance(outcome.error, Aborted)
            assert opened.token is None or self.store.outcome(opened.token) == ("aborted", None)
        else:
            assert outcome.commit_ts == cts

    def repeat(self, rng: random.Random) -> None:
        """R16: the reply was dropped, and the commit comes again."""
        if not self.tokens or self.held:
            return
        self._repeat(*rng.choice(self.tokens))

    def _repeat(self, token: str, ops: list[Op], commit_ts: int) -> None:
        before = self.log.last
        tx = self.db.transaction(token=token)
        for op in ops:
            match op.kind:
                case "append":
                    tx.append(op.table, list(op.events))
                case "delete" | "guard":
                    getattr(tx, op.kind)(op.table, op.key, *op.values)
                case "insert":  # the row may be there now, and an insert is a delete and a put once it is encoded
                    tx.delete(op.table, op.key)
                    tx.put(op.table, op.key, **op.values)
                case _:
                    getattr(tx, op.kind)(op.table, op.key, **op.values)
        try:
            found = tx.commit()
        except InvalidArgument as error:
            raise AssertionError(f"R16: the token {token!r} came again with what it had brought before") from error
        assert found == commit_ts
        assert self.log.last == before
        assert self.db.outcome(token) == commit_ts, f"R16: {token}"
        self.counted["repeat"] += 1

    # -- snapshots ------------------------------------------------------------------------------

    def snapshot(self, rng: random.Random) -> None:
        if len(self.snapshots) < 4:
            snap = self.db.snapshot()
            self.snapshots.append((snap, self.state(snap.ts)))

    def close_snapshot(self, rng: random.Random) -> None:
        if self.snapshots:
            snap, _ = self.snapshots.pop(rng.randrange(len(self.snapshots)))
            snap.close()

    def as_of(self, rng: random.Random) -> None:
        """A past timestamp: a table with history answers exactly, another one exactly or not at all (R15)."""
        ts = rng.randint(self.first, self.db.watermark())
        expected = self.state(ts)
        with self.db.snapshot(as_of=ts) as snap:
            assert self._scan(snap, "h") == expected["h"], f"R1, R15: as of {ts}"
            for table in ("t", "agg", "e"):
                try:
                    assert self._scan(snap, table) == expected[table]
                    self.counted["as of"] += 1
                except SnapshotTooOld:
                    assert ts < self.db.watermark()

    # -- the store ------------------------------------------------------------------------------

    def consolidate(self, rng: random.Random) -> None:
        before = self.store.watermark()
        assert self.store.consolidate() == before, "R14: consolidation stops at the watermark"
        if rng.random() < 0.5:
            self.store.consolidator.flush()
        if rng.random() < 0.5:
            self.store.consolidator.sweep()
            self.store.consolidator.compact()
        if self.counted["consolidate"] % 2:
            self.store.settle(8)
        self._all_agree()
        self.counted["consolidate"] += 1

    def light(self, rng: random.Random) -> None:
        """A light pass: deltas of aggregates are combined in memory, and the position stays."""
        before = self.store.consolidator.position
        self.store.consolidator.run_light()
        assert self.store.consolidator.position == before
        self._all_agree()
        self.counted["light"] += 1

    def _all_agree(self) -> None:
        with self.db.snapshot() as snap:
            assert self.seen(snap) == self.state(snap.ts)

    def reopen(self, rng: random.Random) -> None:
        if not self.held:
            self.store.close()
            self._open()
            self._restarted()

    def crash(self, rng: random.Random) -> None:
        """Records were on their way to the disk: a prefix of them arrived, and a prefix of the batches of base."""
        self.memory.hold = True
        flying: list[tuple[int, Open | Member]] = []
        if rng.random() < 0.5:
            _, entered = self._enter([self._member(rng) for _ in range(rng.randint(2, 8))])
            flying += entered
        for opened in self.transactions:
            if opened.ops and opened.token:
                self._submit(opened, arrives=False)
                if not opened.refused:
                    flying.append((self.log.last, opened))
        keep = rng.randint(0, len(flying))
        if isinstance(self.log, SegmentedLog):
            self.log.abandon()
        self.store.crash()
        self.engine.crash(rng.randint(0, 8))
        self.memory.hold = False
        self.memory.crash(keep)
        last = max([self.last, *(cts for cts, _ in flying)])
        self._open()
        if self.path is not None:
            found = [self.db.outcome(one.token or "") for _, one in flying]
            keep = sum(outcome is not ABORTED for outcome in found)
        for cts, one in flying[:keep]:
            self._committed(one, cts)
        self._restarted()
        for i, (cts, one) in enumerate(flying):
            assert one.token is not None
            assert self.db.outcome(one.token) == (cts if i < keep else ABORTED), f"R16: {one.token} after a crash"
            if i >= keep:
                self._comes_too_late(one.token)
        with self.db.transaction() as tx:
            tx.guard("t", (0,))
        assert (tx.commit_ts or 0) > last, "R13: a timestamp was handed out twice"
        self.counted["crash"] += 1
        self.counted["crash in flight"] += bool(flying)

    def _comes_too_late(self, token: str) -> None:
        """R16: outcome() has said aborted, so an attempt that was still on its way must never commit."""
        with pytest.raises(Aborted), self.db.transaction(token=token) as tx:
            tx.delta("t", (0,), n=1)
        self._all_agree()

    def _restarted(self) -> None:
        for cts, opened in self.held.items():  # durable before the restart: there after it (R12)
            self._committed(opened, cts)
        self.held.clear()
        self.untold.clear()
        self.entered.clear()
        self.transactions.clear()
        self.snapshots.clear()
        assert self.db.watermark() >= self.last, "R13: a snapshot handed out before lies above the watermark"
        self._all_agree()
