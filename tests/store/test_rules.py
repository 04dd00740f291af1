"""R25: what rules raise is what a brute force raises that judges each record's events at its ``rule_ts``.

The history is random: late events, several rules of one table, one that judges what another raised, batches and events
that are each a commit, retries under their tokens, transactions with a snapshot of their own, retractions, deltas that
move the looked-up rows, consolidation, and stores that are let go of in the middle. ``rule_ts`` comes from the log.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.arrow.records import event_batch
from kivi.embedded.database import Database
from kivi.engine.memory import MemoryEngine
from kivi.log import Kind
from kivi.log.memory import MemoryLog
from kivi.mvcc.record import decode_commit, decode_events, is_events
from kivi.runtime.settings import Settings
from kivi.store import known_rows
from kivi.store.facade import Store
from tests.serverproc import ServerProcess

SETTINGS = Settings.of({"background": False, "consolidate_rows": 4, "block_rows": 16})
SLOT_US = 10
KEYS = 5
NEVER = 2**63 - 1


class History:
    """A store in memory, what was done to it, and what the rules should have raised."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.engine, self.log = MemoryEngine(), MemoryLog()
        self.open()
        db = self.db
        db.create_event_table("e", event_time="ts", columns={"k": "int64", "ts": "timestamp", "x": "int64"})
        db.create_aggregate(
            "slots",
            source="e",
            group_by=["k", kivi.time_slot("ts", SLOT_US, name="slot")],
            measures={"s": kivi.sum("x"), "n": kivi.count(), "most": kivi.max("x")},
            derived={"avg": "s / n"},
        )
        db.create_table("limits", key={"k": "int64"}, columns={"least": "int64", "more": kivi.sum("int64")})
        for name in ("slow", "own", "far", "limited"):
            columns = {"k": "int64", "ts": "timestamp", "x": "int64", "of": "int64"}
            db.create_event_table(name, event_time="ts", columns=columns)
        db.create_event_table("again", event_time="ts", columns={"k": "int64", "ts": "timestamp", "x": "int64"})
        db.create_aggregate("raised", source="slow", group_by=["k"], measures={"n": kivi.count(), "s": kivi.sum("x")})
        before = kivi.previous_slot("slots", by=["k"])
        over = kivi.col("x") > kivi.ref("avg")
        select = {"of": kivi.ref("s")}
        db.create_rule("slow", source="e", against=before, where=over, into="slow", select=select)
        db.create_rule("own", source="e", against=before, where=over, into="own", select=select, own_events=True)
        far = kivi.previous_slot("slots", by=["k"], back=2 * SLOT_US, slots=3)
        db.create_rule("far", source="e", against=far, where=over, into="far", select=select)
        limited = kivi.col("x") > kivi.ref("least") + kivi.ref("more")
        db.create_rule(
            "limited", source="e", against=kivi.lookup("limits", by=["k"]), where=limited, into="limited",
            select={"of": kivi.ref("least") + kivi.ref("more")},
        )  # fmt: skip
        db.create_rule("again", source="slow", against=before, where=kivi.col("x") > 2 * kivi.ref("avg"), into="again")
        self.before = self.log.last
        self.appended: dict[int, list[dict[str, int]]] = {}  # by the CTS of the commit
        self.retracted: dict[int, int] = {}  # the CTS of an event's commit, and that of its retraction
        self.limits: list[tuple[int, int, str, int]] = []  # (CTS, key, what, value)
        self.tokens = 0
        self.last = 0

    def open(self) -> None:
        self.store = Store.open(None, settings=SETTINGS, engine=self.engine, log=self.log)
        self.db: Any = Database(self.store)

    def events(self, count: int) -> list[dict[str, int]]:
        rng = self.random
        self.last += rng.randrange(3)
        return [
            {"k": rng.randrange(KEYS), "ts": max(0, self.last - rng.randrange(30)), "x": rng.randrange(100)}
            for _ in range(count)
        ]

    # -- what may happen -----------------------------------------------------------------------------

    def append(self) -> None:
        rng, rows = self.random, self.events(self.random.choice([1, 3, 50, 120]))
        self.tokens += 1
        token = f"t{self.tokens}"
        for _ in range(rng.choice([1, 1, 2])):
            commit_ts = self.db.append("e", rows, token=token)
        self.appended[commit_ts] = rows

    def append_each(self) -> None:
        rows = self.events(self.random.choice([2, 40, 100]))
        self.tokens += 1
        for _ in range(self.random.choice([1, 2])):
            batch = event_batch(self.db._schema("e"), rows)
            first = self.db._append("e", batch, f"t{self.tokens}", "fail", each=True)
        self.appended |= {first + i: [row] for i, row in enumerate(rows)}

    def transact(self) -> None:
        """One that began before others committed: it is judged at a newer snapshot than its own."""
        with self.db.transaction() as tx:
            tx.get("limits", (0,))
            self.append()
            rows = self.events(3)
            tx.append("e", rows)
        self.appended[tx.commit_ts] = rows

    def limit(self) -> None:
        key, value = self.random.randrange(KEYS), self.random.randrange(60)
        with self.db.transaction() as tx:
            what = self.random.choice(["put", "delta", "delete"])
            match what:
                case "put":
                    tx.put("limits", (key,), least=value)
                case "delta":
                    tx.delta("limits", (key,), more=1)
                case _:
                    tx.delete("limits", (key,))
        self.limits.append((tx.commit_ts, key, what, value))

    def retract(self) -> None:
        commits = [ts for ts in self.appended if ts not in self.retracted]
        if not commits:
            return
        moment = self.random.choice(self.appended[self.random.choice(commits)])["ts"]
        with self.db.transaction() as tx:
            tx.retract("e", start=(moment,), end=(moment + 1,))
        if tx.commit_ts is not None:
            self.gone = [*getattr(self, "gone", []), (moment, tx.commit_ts)]

    def consolidate(self) -> None:
        self.db.consolidate()

    def reopen(self) -> None:
        self.store.crash()
        self.open()

    def step(self) -> None:
        doing = [self.append, self.append, self.append_each, self.transact, self.limit, self.limit]
        self.random.choice([*doing, self.retract, self.consolidate, self.reopen])()

    # -- the brute force -------------------------------------------------------------------------------

    def rule_ts(self) -> dict[int, int]:
        """Of each commit that brought events: where its record says that it was judged."""
        found: dict[int, int] = {}
        for record in self.log.replay(self.before):
            if record.kind == Kind.COMMIT:
                body = decode_events(record.body) if is_events(record.body) else decode_commit(record.body)
                if body.rule_ts is not None:
                    assert body.rule_ts < record.sequence
                    found |= {record.sequence + i: body.rule_ts for i in range(record.count)}
        return found

    def slots(self, upto: int, own: int = 0) -> dict[tuple[int, int], tuple[int, int]]:
        """(sum, count) by key and slot at a snapshot, with the events of the commit ``own``."""
        gone = getattr(self, "gone", [])
        found: dict[tuple[int, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
        for commit_ts, rows in self.appended.items():
            if commit_ts <= upto or commit_ts == own:
                for row in rows:
                    if any(moment == row["ts"] and commit_ts < at <= upto for moment, at in gone):
                        continue
                    at = row["k"], row["ts"] // SLOT_US
                    found[at] = found[at][0] + row["x"], found[at][1] + 1
        return found

    def limit_of(self, key: int, upto: int) -> int | None:
        row: dict[str, int | None] | None = None
        for commit_ts, of, what, value in self.limits:
            if of != key or commit_ts > upto:
                continue
            if what == "delete":
                row = None
            else:
                row = row or {"least": None, "more": 0}
                row = row | ({"least": value} if what == "put" else {"more": (row["more"] or 0) + 1})
        return None if row is None or row["least"] is None else row["least"] + (row["more"] or 0)

    def expected(self) -> dict[str, list[tuple[int, ...]]]:
        """(commit, key, time, x, what it was measured against) of all that should have been raised."""
        out: dict[str, list[tuple[int, ...]]] = {name: [] for name in ("slow", "own", "far", "limited", "again")}
        judged = self.rule_ts()
        known: dict[tuple[int, int], Any] = {}
        for commit_ts, rows in self.appended.items():
            at = judged[commit_ts]
            states = [
                known.setdefault((at, own), self.slots(at, own)) for own in (0, commit_ts if len(rows) > 1 else 0)
            ]
            for row in rows:
                event = commit_ts, row["k"], row["ts"], row["x"]
                slot = row["ts"] // SLOT_US
                for name, state, slots in (
                    ("slow", states[0], [slot - 1]),
                    ("own", states[1], [slot - 1]),
                    ("far", states[0], [slot - 2, slot - 3, slot - 4]),
                ):
                    total, count = (sum(state.get((row["k"], s), (0, 0))[i] for s in slots) for i in (0, 1))
                    if count and row["x"] > total / count:
                        out[name].append((*event, total))
                        if name == "slow" and row["x"] > 2 * (total / count):
                            out["again"].append(event)
                least = self.limit_of(row["k"], at)
                if least is not None and row["x"] > least:
                    out["limited"].append((*event, least))
        return {name: sorted(events) for name, events in out.items()}

    def raised(self) -> dict[str, list[tuple[int, ...]]]:
        found = {}
        with self.db.snapshot() as snapshot:
            for name in ("slow", "own", "far", "limited", "again"):
                columns = ["k", "ts", "x", *(["of"] if name != "again" else [])]
                rows: list[tuple[int, ...]] = []
                for batch in snapshot.change_batches(name, since=0):
                    batch = batch.set_column(batch.schema.get_field_index("ts"), "ts", batch.column("ts").cast("int64"))
                    rows += zip(*(batch.column(c).to_pylist() for c in ["_commit_ts", *columns]), strict=True)
                found[name] = sorted(rows)
        return found

    def check(self) -> None:
        expected, raised = self.expected(), self.raised()
        for name, events in expected.items():
            assert raised[name] == events, name
        with self.db.snapshot() as snapshot:
            counted = {row["k"]: (row["n"], row["s"]) for row in snapshot.scan("raised")}
        of_key: dict[int, tuple[int, int]] = {}
        for _, key, _, x, _ in expected["slow"]:
            n, s = of_key.get(key, (0, 0))
            of_key[key] = n + 1, s + x
        assert counted == of_key
        brought = sum(map(len, self.appended.values()))
        for rule in self.db.rules():
            assert rule["judged"] == (brought if rule["source"] == "e" else len(expected["slow"]))
            assert rule["raised"] == len(expected[rule["name"]])
            assert rule["failed"] == rule["late"] == 0


@pytest.fixture(params=[1, 64], ids=["rows are followed", "rows are read"])
def followed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_rows, "_KEYS_MIN", request.param)


@pytest.mark.parametrize("seed", range(2))
def test_r25_what_is_raised_is_what_a_brute_force_finds(followed: None, seed: int) -> None:
    history = History(seed)
    for step in range(40):
        history.step()
        if step % 20 == 19:
            history.check()
    history.reopen()
    history.check()


def test_r25_thousands_of_rows_are_followed(tmp_path: Path) -> None:
    """More of them than there is room for at first come with commits after the first that was judged."""
    endpoints = range(3_000)

    def events(slot: int, x: int) -> list[dict[str, int]]:
        return [{"k": k, "ts": slot * SLOT_US, "x": x + k} for k in endpoints]

    with kivi.open(tmp_path / "db", background=False) as db:
        db.create_event_table("e", event_time="ts", columns={"k": "int64", "ts": "timestamp", "x": "int64"})
        slot = kivi.time_slot("ts", SLOT_US, name="slot")
        db.create_aggregate("slots", source="e", group_by=["k", slot], measures={"s": kivi.sum("x")})
        db.create_event_table("same", event_time="ts", columns={"k": "int64", "ts": "timestamp", "x": "int64"})
        before = kivi.previous_slot("slots", by=["k"])
        db.create_rule("same", source="e", against=before, where=kivi.col("x") == kivi.ref("s"), into="same")
        for slot_number, x in ((0, 5), (1, 5), (1, 1), (2, 6), (2, 5 + 1)):
            db.append("e", events(slot_number, x))
        with db.snapshot() as snapshot:
            raised = [(row["k"], row["x"]) for row in snapshot.scan("same")]
    # The second batch equals slot 0. Those of slot 2 equal slot 1, (5 + k) + (1 + k), for k = 0 alone, twice.
    assert sorted(raised) == sorted([(k, 5 + k) for k in endpoints] + [(0, 6)] * 2)


@pytest.mark.timeout(120)
def test_r25_an_event_and_what_it_raised_survive_a_kill_together_or_not_at_all(tmp_path: Path) -> None:
    """Writers retry under their tokens until they are answered, while the server is killed with SIGKILL."""
    with ServerProcess(tmp_path / "data") as server:
        with server.connect(timeout=60) as db:
            db.create_event_table("e", event_time="ts", columns={"k": "int64", "ts": "timestamp", "x": "int64"})
            db.create_event_table("high", event_time="ts", columns={"k": "int64", "ts": "timestamp", "x": "int64"})
            db.create_rule("high", source="e", where=kivi.col("x") >= 50, into="high")
        killed = threading.Event()

        def write(writer: int) -> int:
            sent = 0
            with server.connect(timeout=60) as db:
                while sent < 40 or not killed.is_set():
                    rows = [{"k": writer, "ts": sent, "x": (7 * sent + i) % 100} for i in range(40)]
                    while True:
                        try:
                            db.append("e", rows, token=f"{writer}/{sent}")
                            break
                        except (kivi.CommitUnknown, kivi.Unavailable):
                            killed.wait(0.05)
                    sent += 1
            return sent

        with ThreadPoolExecutor(2) as pool:
            writers = [pool.submit(write, i) for i in range(2)]
            for _ in range(2):
                killed.wait(0.7)
                server.restart()
            killed.set()
            batches = sum(writer.result() for writer in writers)
        with server.connect(timeout=60) as db, db.snapshot() as snapshot:
            columns = ["_commit_ts", "k", "ts", "x"]
            brought, raised = (
                [row for batch in snapshot.change_batches(name, since=0) for row in batch.select(columns).to_pylist()]
                for name in ("e", "high")
            )
            assert len(brought) == 40 * batches
            assert raised == [row for row in brought if row["x"] >= 50]
            (rule,) = db.rules()
            assert (rule["judged"], rule["raised"]) == (len(brought), len(raised))
