"""R25: what rules raise is what a brute force raises that judges each record's events at its ``rule_ts``.

The history is random: late events, several rules of one table, one that judges what another raised, batches and events
that are each a commit, retries under their tokens, transactions with a snapshot of their own, retractions, deltas that
move the looked-up rows, consolidation, and stores that are let go of in the middle. ``rule_ts`` comes from the log.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import defaultdict
from concurrent.futures import Future
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
from kivi.store import commits, known_rows
from kivi.store.event_commits import derived_together
from kivi.store.facade import Commit, Outcome, Store
from tests.server.killed import written_under_kills
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

    def append_together(self) -> None:
        """Transactions of an event each, mostly, as a group: one may conflict, and one comes again."""
        rng, store, told = self.random, self.store, dict[str, list[Future[Outcome]]]()
        schema, limits = store.table("e"), store.table("limits")
        brought = {f"t{self.tokens + i}": self.events(rng.choice([1, 1, 1, 2])) for i in range(1, rng.choice([3, 9]))}
        self.tokens += len(brought)
        refused = rng.choice([None, *brought])

        def commit(token: str) -> Commit:
            txn = store.transaction()
            txn.append(schema, event_batch(schema, brought[token]))
            if token == refused:
                txn.guard(limits, (0,), None)
            told.setdefault(token, []).append(Future())
            return Commit(txn, token, None, told[token][-1].set_result)

        together = [commit(token) for token in (*brought, rng.choice([*brought]))]
        if refused:
            self.limit(0)
        store.commit_together(together)
        for token, waiting in told.items():
            outcomes = [each.result(10) for each in waiting]
            assert all((outcome.error is None) == (token != refused) for outcome in outcomes)
            if token != refused:
                (commit_ts,) = {outcome.commit_ts for outcome in outcomes}
                assert commit_ts is not None
                self.appended[commit_ts] = brought[token]

    def limit(self, key: int | None = None) -> None:
        key, value = self.random.randrange(KEYS) if key is None else key, self.random.randrange(60)
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

    def alter(self) -> None:
        """Rows of before have another layout, and those that rules look for and that are not there have none."""
        if (number := len(self.store.table("slots").alterations)) < 3:
            self.db.alter_aggregate(
                "slots", add_measures={f"added{number}": kivi.min("x")}, backfill=self.random.choice([True, False])
            )

    def step(self) -> None:
        doing = [self.append, self.append, self.append_each, self.append_together, self.append_together]
        doing += [self.transact, self.limit, self.limit]
        self.random.choice([*doing, self.retract, self.consolidate, self.reopen, self.alter])()

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


@pytest.fixture(
    params=[(1, 1 << 18), (1, 8), (64, 1 << 18)], ids=["rows are followed", "new rows are", "rows are read"]
)
def followed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(("_KEYS_MIN", "_ROWS_MAX"), request.param, strict=True):
        monkeypatch.setattr(known_rows, name, value)


@pytest.mark.parametrize("seed", range(2))
def test_r25_what_is_raised_is_what_a_brute_force_finds(followed: None, seed: int) -> None:
    history = History(seed)
    for step in range(40):
        history.step()
        if step % 20 == 19:
            history.check()
    history.reopen()
    history.check()


@pytest.mark.parametrize("how", ["alone", "together", "each"])
def test_r25_of_several_events_that_one_has_raised_the_last_is_the_last(how: str) -> None:
    """Two rules raise into one table: what an aggregate has of it is what a question of its events finds (R20)."""
    store = Store.open(None, settings=SETTINGS, engine=MemoryEngine(), log=MemoryLog())
    db = Database(store)
    for name in ("e", "r"):
        db.create_event_table(name, event_time="ts", columns={"k": "int64", "ts": "timestamp", "x": "float64"})
    for i in range(3):
        db.create_rule(f"r{i}", source="e", into="r", select={"x": kivi.col("x") * 0.5 + i})
    measures = {"n": kivi.count(), "first": kivi.first("x"), "last": kivi.last("x"), "sum": kivi.sum("x")}
    db.create_aggregate("a", source="r", group_by=["k"], measures=measures)
    events = [{"k": i % 2, "ts": 5, "x": float(i)} for i in range(6)]
    if how == "each":
        with db.appender("e", each=True) as appender:
            for event in events:
                appender.append(**event)
    else:
        told: list[Future[Outcome]] = [Future() for _ in events]
        commits_ = []
        for event, done in zip(events, told, strict=True):
            txn = store.transaction()
            txn.append(store.table("e"), event_batch(store.table("e"), [event]))
            commits_.append(Commit(txn, None, None, done.set_result))
        for some in [commits_] if how == "together" else [[one] for one in commits_]:
            store.commit_together(some)
        assert [done.result(10).error for done in told] == [None] * 6
    with db.snapshot() as snapshot:
        asked = snapshot.query("r", group_by=["k"], measures=measures, where=kivi.col("ts") >= 0)
        assert list(snapshot.scan("a")) == list(asked)
        assert [row["last"] for row in snapshot.scan("a")] == [2.0 + 2, 2.5 + 2]
    db.close()


@pytest.mark.parametrize("how", ["transaction", "each", "backfill"])
@pytest.mark.parametrize(
    "bad",
    [
        {"x": 2**32},  # its square leaves the range, in what is measured
        {"x": 2**40, "y": 1},  # or its cube, in what says which are measured
        {"name": "n" * 70_000},  # its key is too long
        {"name": "n" * 60_000},  # or it itself is, which the source had before there was such a limit
    ],
    ids=["expression", "where", "key", "value"],
)
def test_r25_what_is_raised_and_an_aggregate_cannot_have_fails_alone(how: str, bad: dict[str, Any]) -> None:
    """Of two rules into one table, however many fail; others stay."""
    db = Database(Store.open(None, settings=SETTINGS, engine=MemoryEngine(), log=MemoryLog()))
    columns = {"k": "int64", "ts": "timestamp", "x": "int64", "y": "int64", "name": "string"}
    for name in ("e", "r"):
        db.create_event_table(name, event_time="ts", columns=columns)
    x, y = kivi.col("x"), kivi.col("y")
    squares, far = kivi.sum(x * x, where=y == 0), kivi.count(where=(y > 0) & (x * x * x > 0))
    db.create_aggregate("a", source="r", group_by=["k"], measures={"n": kivi.count(), "s": squares, "far": far})
    db.create_aggregate("b", source="r", group_by=["name", kivi.time_slot("ts", "7s")], measures={"n": kivi.count()})
    events = [{"k": i % 3, "ts": 5, "x": i, "y": 0, "name": "", **(bad if i % 2 else {})} for i in range(200)]

    limits = dataclasses.replace(SETTINGS, max_value_bytes=50_000)
    if len(bad.get("name", "")) == 60_000:
        db.store.commits.judging.settings = limits

    def rules() -> None:
        for name in ("one", "two"):
            where = kivi.col("k") > 0 if name == "two" else None
            db.create_rule(name, source="e", into="r", where=where, backfill=how == "backfill")

    if how == "backfill":
        db.append("e", events)
        rules()
    else:
        rules()
        if how == "each":
            with db.appender("e", each=True) as appender:
                for event in events:
                    appender.append(**event)
        else:
            db.append("e", events)
    good = [(event["k"], event["x"]) for i, event in enumerate(events) if i % 2 == 0]
    twice = [*good, *(each for each in good if each[0] > 0)]
    with db.snapshot() as snapshot:
        assert sorted((row["k"], row["x"]) for row in snapshot.scan("r")) == sorted(twice)
        sums = {row["k"]: (row["n"], row["s"]) for row in snapshot.scan("a")}
        mine = [[x for k, x in twice if k == wanted] for wanted in range(3)]
        assert sums == {k: (len(xs), sum(x * x for x in xs)) for k, xs in enumerate(mine)}
        assert sum(row["n"] for row in snapshot.scan("b")) == len(twice)
        assert len(list(snapshot.scan("e"))) == 200
    counts = {rule["name"]: (rule["judged"], rule["raised"], rule["failed"]) for rule in db.rules()}
    of_two = sum(event["k"] > 0 for event in events)
    assert counts == {"one": (200, 100, 100), "two": (200, len(twice) - 100, of_two - len(twice) + 100)}
    db.close()


@pytest.mark.parametrize("how", ["transaction", "each", "backfill"])
def test_r25_what_is_raised_at_a_time_that_no_event_may_have_fails_alone(how: str) -> None:
    """Which would be in the way of every reader of its table."""
    db = Database(Store.open(None, settings=SETTINGS, engine=MemoryEngine(), log=MemoryLog()))
    for name in ("e", "r"):
        db.create_event_table(name, event_time="ts", columns={"ts": "timestamp", "more": "int64"})
    far = [0, 4 * 10**17, 7, -(4 * 10**17), 2**62]
    events = [{"ts": 1_700_000_000_000_000, "more": more} for more in far]

    def rule() -> None:
        later = kivi.col("ts") + kivi.col("more")
        db.create_rule("later", source="e", into="r", select={"ts": later}, backfill=how == "backfill")

    if how != "backfill":
        rule()
    if how == "each":
        with db.appender("e", each=True) as appender:
            for event in events:
                appender.append(**event)
    else:
        db.append("e", events)
    if how == "backfill":
        rule()
    with db.snapshot() as snapshot:
        assert sorted(row["more"] for row in snapshot.scan("r")) == [0, 7]
    (found,) = db.rules()
    assert (found["judged"], found["raised"], found["failed"]) == (5, 2, 3)
    db.close()


@pytest.mark.parametrize("how", ["transaction", "beside", "each", "backfill"])
def test_r25_what_is_too_much_together_fails_in_the_order_of_the_events(how: str) -> None:
    """Exactly those that a sum cannot have after those before them that it has: of two rules, whose events alternate,
    and beside those that the transaction itself brings. Of events that are each a commit, those of one are together."""
    db = Database(Store.open(None, settings=SETTINGS, engine=MemoryEngine(), log=MemoryLog()))
    for name in ("e", "r"):
        db.create_event_table(name, event_time="ts", columns={"ts": "timestamp", "k": "int64", "x": "float64"})
    by_k = {"s": kivi.sum("x", where=kivi.col("k") > 0), "mean": kivi.avg("x")}
    db.create_aggregate("a", source="r", group_by=["k"], measures=by_k)
    db.create_aggregate("all", source="r", group_by=["ts"], measures={"s": kivi.sum("x")})
    rng = random.Random(5)
    events = [{"ts": 5, "k": rng.randrange(3), "x": rng.choice([1.0, 5e307, 1e308, -1e308])} for _ in range(400)]
    own = [{"ts": 5, "k": 1, "x": 1.5e308}] if how == "beside" else []

    def rules() -> None:
        for name in ("one", "two"):
            db.create_rule(name, source="e", into="r", backfill=how == "backfill")

    if how == "backfill":
        db.append("e", events[:150])
        db.append("e", events[150:])
        rules()
        in_order = [[(0, event) for event in events], [(1, event) for event in events]]
    else:
        rules()
        in_order = [[(i, event) for event in events for i in range(2)]]
        if how == "each":
            in_order = [[(i, event) for i in range(2)] for event in events]
            with db.appender("e", each=True) as appender:
                for event in events:
                    appender.append(**event)
        else:
            with db.transaction() as tx:
                tx.append("e", events)
                if own:
                    tx.append("r", own)
    raised, failed = [(each["k"], each["x"]) for each in own], [0, 0]
    for of_commit in in_order:
        sums: dict[Any, float] = {k: event["x"] for event in own for k in (event["k"], -1)}
        for i, event in of_commit:
            more = {k: sums.get(k, 0.0) + event["x"] for k in (event["k"], -1)}
            if all(map(math.isfinite, more.values())):
                sums |= more
                raised.append((event["k"], event["x"]))
            else:
                failed[i] += 1
    assert 0 < sum(failed) < 800
    with db.snapshot() as snapshot:
        assert sorted((row["k"], row["x"]) for row in snapshot.scan("r")) == sorted(raised)
        if how in ("transaction", "beside"):
            assert {row["k"]: row["s"] for row in snapshot.scan("a") if row["k"]} == {k: sums[k] for k in (1, 2)}
            assert [row["s"] for row in snapshot.scan("all")] == [sums[-1]]
    counts = [(rule["judged"], rule["raised"], rule["failed"]) for rule in db.rules()]
    assert counts == [(400, 400 - each, each) for each in failed]
    db.close()


@pytest.mark.parametrize("how", ["transaction", "each"])
def test_r25_what_a_measure_of_ones_own_refuses_fails_alone(how: str) -> None:
    """One that does not combine what it has observed, which breaks its law, has nothing of what was raised together."""

    def known(values: Any) -> Any:
        if (values < 0).any():
            raise ValueError("a measure of what is not negative")
        return values

    def combined(a: Any, b: Any) -> Any:
        if (a + b > 50).any():
            raise ValueError("too much")
        return a + b

    own = {"evaluate": lambda states: states, "result": "int64", "takes": ["int64"]}
    kivi.register_measure("not_negative", id=4_713, state="<i8", init=known, combine=combined, **own)
    db = Database(Store.open(None, settings=SETTINGS, engine=MemoryEngine(), log=MemoryLog()))
    for name in ("e", "r"):
        db.create_event_table(name, event_time="ts", columns={"ts": "timestamp", "k": "int64", "x": "int64"})
    measures = {"s": kivi.measure("not_negative", "x", where=kivi.col("k") > 0)}
    db.create_aggregate("a", source="r", group_by=["k"], measures=measures)
    db.create_rule("one", source="e", into="r")
    events = [{"ts": 5, "k": i % 3, "x": -1 if i % 7 == 3 else i % 3} for i in range(30)]

    def append(events: list[dict[str, int]]) -> None:
        if how == "each":
            with db.appender("e", each=True) as appender:
                for event in events:
                    appender.append(**event)
        else:
            db.append("e", events)

    append(events)
    good = [event for event in events if event["k"] == 0 or event["x"] >= 0]
    with db.snapshot() as snapshot:
        assert [(row["k"], row["x"]) for row in snapshot.scan("r")] == [(e["k"], e["x"]) for e in good]
        sums = {row["k"]: row["s"] for row in snapshot.scan("a") if row["k"]}
        assert sums == {k: sum(e["x"] for e in good if e["k"] == k) for k in (1, 2)}
    (rule,) = db.rules()
    assert (rule["judged"], rule["raised"], rule["failed"]) == (30, len(good), 30 - len(good))
    if how == "transaction":
        append([{"ts": 5, "k": 1, "x": 30}, {"ts": 5, "k": 1, "x": 31}])
        (rule,) = db.rules()
        assert (rule["judged"], rule["raised"], rule["failed"]) == (32, len(good), 32 - len(good))
    db.close()


def test_r25_of_events_that_are_judged_together_one_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be derived of one of them is no matter of the others."""
    joint: list[bool] = []

    def noted(*args: Any) -> Any:
        joint.append(False)
        found = derived_together(*args)
        joint[-1] = found is not None
        return found

    monkeypatch.setattr(commits, "derived_together", noted)
    store = Store.open(None, settings=SETTINGS, engine=MemoryEngine(), log=MemoryLog())
    db = Database(store)
    db.create_event_table("e", event_time="ts", columns={"k": "int64", "ts": "timestamp", "x": "float64"})
    db.create_aggregate("of_k", source="e", group_by=["k"], measures={"n": kivi.count(), "s": kivi.sum("x")})
    db.create_event_table("large", event_time="ts", columns={"k": "int64", "ts": "timestamp", "x": "float64"})
    db.create_aggregate("large_of_x", source="large", group_by=["x"], measures={"n": kivi.count()})
    db.create_rule("large", source="e", where=kivi.col("x") > 10.0, into="large")
    schema = store.table("e")

    def commit(*events: tuple[int | None, float | None]) -> list[Outcome]:
        told: list[Future[Outcome]] = []
        together = []
        for k, x in events:
            txn = store.transaction()
            txn.append(schema, event_batch(schema, [{"k": k, "ts": 5, "x": x}]))
            told.append(Future())
            together.append(Commit(txn, None, None, told[-1].set_result))
        store.commit_together(together)
        return [each.result(10) for each in told]

    assert [outcome.error for outcome in commit((1, 11.0), (2, 1.0), (1, 12.0))] == [None] * 3
    assert joint == [True]
    refused = [outcome.error for outcome in commit((1, 13.0), (None, 14.0), (3, None))]
    assert [type(error) for error in refused if error is not None] == [kivi.InvalidArgument]
    assert joint == [True, False]
    with db.snapshot() as snapshot:
        assert {row["k"]: (row["n"], row["s"]) for row in snapshot.scan("of_k")} == {
            1: (3, 36.0), 2: (1, 1.0), 3: (1, 0.0),
        }  # fmt: skip
        assert sorted(row["x"] for row in snapshot.scan("large_of_x")) == [11.0, 12.0, 13.0]
        assert sorted((row["k"], row["x"]) for row in snapshot.scan("large")) == [(1, 11.0), (1, 12.0), (1, 13.0)]
    (rule,) = db.rules()
    assert (rule["judged"], rule["raised"], rule["failed"], rule["missing"]) == (5, 3, 0, 0)
    db.close()


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


def test_r25_rows_of_old_slots_are_forgotten_and_those_of_new_ones_known_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the stream goes on, what it looks up is not read row by row."""
    monkeypatch.setattr(known_rows, "_ROWS_MAX", 500)
    read: list[int] = []
    reading = known_rows._read

    def noted(*args: Any) -> Any:
        read.append(len(args[-1]))
        return reading(*args)

    monkeypatch.setattr(known_rows, "_read", noted)
    with kivi.open(tmp_path / "db", background=False) as db:
        db.create_event_table("e", event_time="ts", columns={"k": "int64", "ts": "timestamp", "x": "int64"})
        slot = kivi.time_slot("ts", SLOT_US, name="slot")
        db.create_aggregate("slots", source="e", group_by=["k", slot], measures={"s": kivi.sum("x")})
        db.create_event_table("same", event_time="ts", columns={"k": "int64", "ts": "timestamp", "x": "int64"})
        before = kivi.previous_slot("slots", by=["k"])
        db.create_rule("same", source="e", against=before, where=kivi.col("x") == kivi.ref("s") + 1, into="same")

        def append(number: int, x: int) -> None:
            db.append("e", [{"k": k, "ts": number * SLOT_US, "x": x + k} for k in range(100)])

        def raised() -> int:
            with db.snapshot() as snapshot:
                return len(list(snapshot.scan("same")))

        for number in range(30):
            append(number, number)
        followed = db.store.commits.judging.known._followed[db.store.table("slots").id]
        assert (read, raised()) == ([], 2_900)
        assert followed.grid.cells <= 1_000
        append(1, 1)  # once more: those of slot 0 are read
        assert (read, raised()) == ([100], 3_000)
        append(2, 3 + 2)  # slot 1 has 2 + 2k by now, and 5 + k = 3 + 2k for one k
        assert raised() == 3_001


@pytest.mark.timeout(120)
def test_r25_an_event_and_what_it_raised_survive_a_kill_together_or_not_at_all(tmp_path: Path) -> None:
    """Writers retry under their tokens until they are answered, while the server is killed with SIGKILL."""
    with ServerProcess(tmp_path / "data") as server:
        with server.connect(timeout=60) as db:
            db.create_event_table("e", event_time="ts", columns={"k": "int64", "ts": "timestamp", "x": "int64"})
            db.create_event_table("high", event_time="ts", columns={"k": "int64", "ts": "timestamp", "x": "int64"})
            db.create_rule("high", source="e", where=kivi.col("x") >= 50, into="high")

        def write(db: Any, number: int) -> None:
            rows = [{"k": number % 2, "ts": number, "x": (7 * number + i) % 100} for i in range(40)]
            db.append("e", rows, token=f"{number}")

        batches = written_under_kills(server, write, kills=2, pause_s=0.7, writers=2, at_least=40)
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
