"""Subscriptions to states: every state that is delivered is what the query gives at the snapshot that it names.

The judge is a scan at that snapshot, filtered and sorted here, in plain Python: tables keep history, so any past
snapshot can be asked.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kivi
from kivi.embedded.database import Database
from kivi.errors import Conflict, InvalidArgument, NotFound, ResourceExhausted, SchemaError
from kivi.live import groups, windows
from kivi.live import hub as hubs
from kivi.model.subscriptions import Update, applied
from tests.waiting import PATIENCE_S, wait_until

HOUR = "1h"


def create(db: Any) -> None:
    """Tables that keep history, so that any past snapshot can be asked."""
    db.create_table(
        "rows",
        key={"part": "int64", "name": "string"},
        columns={"n": kivi.sum("int64"), "text": "string", "level": "float64"},
        history=HOUR,
    )
    db.create_event_table(
        "calls",
        event_time="ts",
        columns={"endpoint": "int64", "service": "string", "ts": "timestamp", "us": "int64"},
    )
    db.create_aggregate(
        "calls_5m",
        source="calls",
        group_by=["endpoint", kivi.time_slot("ts", "5m", name="slot")],
        measures={"total": kivi.sum("us"), "calls": kivi.count(), "slowest": kivi.max("us")},
        derived={"average": "total / calls"},
        history=HOUR,
    )


@pytest.fixture
def db() -> Iterator[Database]:
    with kivi.open(None) as db:
        create(db)
        yield db


class Judge:
    """What a query gives, worked out from all rows of its table."""

    def __init__(self, db: Database, table: str, keep: Callable[[dict[str, Any]], bool], **wanted: Any) -> None:
        self.db, self.table, self.keep, self.wanted = db, table, keep, wanted

    def __call__(self, ts: int) -> list[dict[str, Any]]:
        with self.db.snapshot(as_of=ts) as snapshot:
            rows = [row for row in snapshot.scan(self.table) if self.keep(row)]
        for term in reversed(self.wanted.get("order_by", ())):
            name, down = term.removeprefix("-"), term.startswith("-")
            known = [row for row in rows if row[name] is not None]
            known.sort(key=lambda row: row[name], reverse=False)
            if down:  # stable: rows that are equal stay in order
                known = [
                    row for _, row in sorted(enumerate(known), key=lambda item: (_Negative(item[1][name]), item[0]))
                ]
            rows = known + [row for row in rows if row[name] is None]
        first = self.wanted.get("offset", 0)
        limit = self.wanted.get("limit")
        rows = rows[first : None if limit is None else first + limit]
        columns = self.wanted.get("columns")
        return [{name: row[name] for name in columns} for row in rows] if columns else rows


class _Negative:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __lt__(self, other: _Negative) -> bool:
        return bool(other.value < self.value)


QUERIES: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Any]], bool]]] = {
    "all": ("rows", {}, lambda row: True),
    "prefix": ("rows", {"prefix": (3,)}, lambda row: row["part"] == 3),
    "range": (
        "rows",
        {"start": (2, "b"), "end": (4, "c")},
        lambda row: (2, "b") <= (row["part"], row["name"]) < (4, "c"),
    ),
    "where": ("rows", {"where": (kivi.col("n") > 5) & (kivi.col("n") <= 40)}, lambda row: 5 < (row["n"] or 0) <= 40),
    "top": ("rows", {"order_by": ["-n", "name"], "limit": 4}, lambda row: True),
    "page": ("rows", {"order_by": ["level", "-text"], "limit": 5, "offset": 3}, lambda row: True),
    "page of keys": ("rows", {"limit": 6, "offset": 2}, lambda row: True),
    "text": ("rows", {"where": kivi.col("text") == "b", "columns": ["name", "n"]}, lambda row: row["text"] == "b"),
    "or": (
        "rows",
        {"where": (kivi.col("text") == "a") | kivi.col("level").is_null(), "order_by": ["-level"], "limit": 7},
        lambda row: row["text"] == "a" or row["level"] is None,
    ),
    "none": ("rows", {"limit": 0}, lambda row: True),
    "averages": ("calls_5m", {"order_by": ["-average"], "limit": 5}, lambda row: True),
    "one endpoint": ("calls_5m", {"prefix": (2,), "columns": ["slot", "calls"]}, lambda row: row["endpoint"] == 2),
    "slow ones": ("calls_5m", {"where": kivi.col("average") >= 400.0}, lambda row: row["average"] >= 400.0),
}


def change(db: Database, rng: random.Random) -> None:
    """One transaction of some rows, or events."""
    if rng.random() < 0.3:
        db.append(
            "calls",
            [
                {
                    "endpoint": rng.randrange(6),
                    "service": rng.choice("xyz"),
                    "ts": 1_750_000_000_000_000 + rng.randrange(4) * 300_000_000,
                    "us": rng.randrange(1_000),
                }
                for _ in range(rng.choice((1, 3, 40)))
            ],
        )
        return
    with db.transaction() as tx:
        for _ in range(rng.choice((1, 1, 2, 5))):
            key = (rng.randrange(6), rng.choice("abcde"))
            match rng.randrange(5):
                case 0:
                    tx.delete("rows", key)
                case 1:
                    tx.put("rows", key, text=rng.choice(["a", "b", "c", None]), level=rng.choice([None, 0.5, 1.5, 2.0]))
                case _:
                    tx.delta("rows", key, n=rng.randrange(-3, 12))


@pytest.mark.parametrize("name", QUERIES)
def test_every_state_is_the_querys(db: Database, name: str) -> None:
    """Random transactions, with a reading after some of them, with the store folding in between."""
    table, wanted, keep = QUERIES[name]
    rng = random.Random(name)
    for _ in range(20):
        change(db, rng)
    judge = Judge(db, table, keep, **wanted)
    with db.subscribe(table, interval_ms=0, heartbeat_ms=10, **wanted) as live:
        first = live.next(60.0)
        assert first is not None
        assert first.reset
        assert live.rows == judge(live.ts)
        seen = 0
        for i in range(40):
            for _ in range(rng.choice((1, 1, 4))):
                change(db, rng)
            if i % 20 == 10:
                db.consolidate()
            if rng.random() < 0.7:
                seen += until_quiet(live, db.watermark(), judge)
        seen += until_quiet(live, db.watermark(), judge)
        assert seen > 0 or name == "none"


def until_quiet(live: Any, ts: int, judge: Judge) -> int:
    """Up to ``ts``; where nothing changes that is shown, no update comes, but the snapshot moves on."""
    seen = 0

    def is_there() -> bool:
        nonlocal seen
        if live.ts >= ts:
            return True
        update = live.next(0.05)
        if update is not None:
            seen += 1
            assert update.ts == live.ts
            assert live.rows == judge(live.ts), (update, judge(live.ts))
        return False

    wait_until(is_there, pause_s=0)
    assert live.rows == judge(live.ts)
    return seen


def test_states_of_many_subscribers_while_others_commit(db: Database) -> None:
    """All queries at once, some slow to read, four threads that commit, folding: no state is torn."""
    stop = threading.Event()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            with contextlib.suppress(Conflict):
                change(db, rng)
            time.sleep(0.001)

    writers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    lives = []
    for thread in writers:
        thread.start()
    try:
        for i, (table, wanted, keep) in enumerate(QUERIES.values()):
            live = db.subscribe(table, interval_ms=(0, 20, 100)[i % 3], heartbeat_ms=50, **wanted)
            lives.append((live, Judge(db, table, keep, **wanted)))
        rng = random.Random(5)
        began, states = time.monotonic(), 0
        while (lasted_s := time.monotonic() - began) < 3 or (states <= 50 and lasted_s < PATIENCE_S):
            live, judge = rng.choice(lives)
            if live.next(0.02) is not None:
                assert live.rows == judge(live.ts)
                states += 1
        assert states > 50
    finally:
        stop.set()
        for thread in writers:
            thread.join()
    for live, judge in lives:
        until_quiet(live, db.watermark(), judge)
        live.close()


def test_a_hot_row_is_told_once_in_an_interval(db: Database) -> None:
    with db.subscribe("rows", prefix=(1,), interval_ms=300, heartbeat_ms=10) as live:
        live.next(60.0)
        began, updates = time.monotonic(), 0
        while (lasted_s := time.monotonic() - began) < 1.5 or updates < 3:
            with db.transaction() as tx:
                tx.delta("rows", (1, "a"), n=1)
            updates += live.next(0.0) is not None
        assert updates <= lasted_s / 0.3 + 2
        until_quiet(live, db.watermark(), Judge(db, "rows", lambda row: row["part"] == 1))


def test_kinds_of_changes(db: Database) -> None:
    with db.transaction() as tx:
        for i, name in enumerate("abc"):
            tx.put("rows", (0, name), level=float(i))
    with db.subscribe("rows", order_by="-level", columns=["name", "level"], interval_ms=0) as live:
        assert kinds(live.next(60.0)) == [("add", None, 0, "c"), ("add", None, 1, "b"), ("add", None, 2, "a")]
        with db.transaction() as tx:
            tx.put("rows", (0, "a"), level=9.0)
        assert kinds(live.next(60.0)) == [("move", 2, 0, "a")]
        with db.transaction() as tx:
            tx.put("rows", (0, "b"), level=0.5)
        assert kinds(live.next(60.0)) == [("change", 2, 2, "b")]
        with db.transaction() as tx:
            tx.delete("rows", (0, "c"))
            tx.put("rows", (0, "d"), level=5.0)
        assert kinds(live.next(60.0)) == [("remove", 1, None, None), ("add", None, 1, "d")]
        with db.transaction() as tx:
            tx.put("rows", (0, "a"), text="which nobody shows")
        assert live.next(0.2) is None
        assert [row["name"] for row in live.rows] == ["a", "d", "b"]


def kinds(update: Update | None) -> list[tuple[Any, ...]]:
    assert update is not None
    return [(c.kind, c.old, c.new, None if c.row is None else c.row["name"]) for c in update.changes]


def test_it_goes_on_from_a_timestamp(db: Database) -> None:
    """The difference to a snapshot that the caller has; a clean beginning where it cannot be read any more."""
    judge = Judge(db, "rows", lambda row: True)
    rng = random.Random(1)
    for _ in range(30):
        change(db, rng)
    with db.subscribe("rows", interval_ms=0) as live:
        live.next(60.0)
        had, ts = list(live.rows), live.ts
    for _ in range(10):
        change(db, rng)
    for rows in (had, None):
        with db.subscribe("rows", interval_ms=0, since=ts, rows=rows) as live:
            update = live.next(60.0)
            assert update is not None
            assert not update.reset
            assert applied(had, update.changes, value=lambda change: change.row) == judge(live.ts)
            if rows is not None:
                assert live.rows == judge(live.ts)
                continue
            with pytest.raises(InvalidArgument, match="give them too, as rows="):
                _ = live.rows
    with (
        db.subscribe("rows", interval_ms=0, since=ts, rows=had[:1]) as live,
        pytest.raises(InvalidArgument, match="not what its query gives at since"),
    ):
        live.next(60.0)
    with db.subscribe("rows", interval_ms=0, since=db.watermark() + 1_000, rows=had) as live:  # of another store
        update = live.next(60.0)
        assert update is not None
        assert update.reset
        assert live.rows == judge(live.ts)
    db.create_table("plain", key={"id": "int64"}, columns={"n": "int64"})
    with db.transaction() as tx:
        tx.put("plain", (1,), n=1)
    ts = db.watermark()
    with db.transaction() as tx:
        tx.put("plain", (1,), n=2)
    db.consolidate()
    with db.subscribe("plain", interval_ms=0, since=ts) as live:
        update = live.next(60.0)
        assert update is not None
        assert update.reset
        assert live.rows == [{"id": 1, "n": 2}]


def test_an_overwritten_table_is_read_again_and_a_dropped_one_ends_it(db: Database) -> None:
    with db.transaction() as tx:
        tx.put("rows", (1, "a"), text="old")
        tx.put("rows", (1, "b"), text="stays")
    with db.subscribe("rows", columns=["name", "text"], interval_ms=0) as live:
        live.next(60.0)
        with db.transaction() as tx:
            tx.overwrite("rows")
            tx.put("rows", (1, "b"), text="stays")
            tx.put("rows", (1, "c"), text="new")
        update = live.next(60.0)
        assert kinds(update) == [("remove", 0, None, None), ("add", None, 1, "c")]
        with db.transaction() as tx:
            tx.put("rows", (1, "d"), text="later")
        assert kinds(live.next(60.0)) == [("add", None, 2, "d")]
        db.drop("rows")
        with pytest.raises(NotFound, match="rows"):
            live.next(60.0)
        assert live.next(0.1) is None


def test_more_commits_than_the_feed_holds(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a follower: what it loses it reads again, and the states are right all the same."""
    monkeypatch.setattr(db.store.pending.feed, "_max_bytes", 1_000)
    test_every_state_is_the_querys(db, "top")


def test_rows_are_noted_while_nobody_may_be_told(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The feed fills more than once in an interval; no row is forgotten for that."""
    noted: list[int] = []
    note = groups.RowGroup.note

    def counted(self: groups.RowGroup, commits: Any) -> None:
        noted.append(len(commits))
        note(self, commits)

    monkeypatch.setattr(db.store.pending.feed, "_max_bytes", 200_000)
    monkeypatch.setattr(groups.RowGroup, "note", counted)
    rng = random.Random(8)
    judges = {name: Judge(db, table, keep, **wanted) for name, (table, wanted, keep) in QUERIES.items()}
    lives = {
        name: db.subscribe(table, interval_ms=400, heartbeat_ms=400, **wanted)
        for name, (table, wanted, _) in QUERIES.items()
    }
    until, patience = time.monotonic() + 3.0, time.monotonic() + PATIENCE_S
    while time.monotonic() < (until if noted else patience):
        for _ in range(20):
            change(db, rng)
        for name, live in lives.items():
            if live.next(0.0) is not None:
                assert live.rows == judges[name](live.ts)
        time.sleep(0.005)
    for name, live in lives.items():
        until_quiet(live, db.watermark(), judges[name])
        live.close()
    assert sum(noted) > 0


def test_windows_of_events(db: Database) -> None:
    """The latest, the slowest, and the first from a moment on, of an event table; they come and go as others come."""
    rng = random.Random(3)
    change(db, rng)
    with db.snapshot() as snapshot:
        moment = min(event["ts"] for event in snapshot.scan("calls")) + dt.timedelta(microseconds=1)
    where = kivi.col("us") >= 500
    with (
        db.subscribe(
            "calls", order_by="-us", limit=5, interval_ms=0, heartbeat_ms=10, where=where, columns=["us", "endpoint"]
        ) as slow,
        db.subscribe("calls", order_by="-ts", limit=3, interval_ms=0, heartbeat_ms=10) as latest,
        db.subscribe("calls", from_time=moment, order_by="ts", limit=3, interval_ms=0, heartbeat_ms=10) as first,
    ):
        for _ in range(25):
            for _ in range(3):
                change(db, rng)
            ts = db.watermark()
            for live in (slow, latest, first):
                while live.ts < ts:
                    live.next(0.05)
                with db.snapshot(as_of=live.ts) as snapshot:
                    events = list(snapshot.scan("calls"))
                if live is slow:
                    wanted = sorted((e for e in events if e["us"] >= 500), key=lambda e: -e["us"])[:5]
                    assert live.rows == [{"us": e["us"], "endpoint": e["endpoint"]} for e in wanted]
                elif live is latest:
                    wanted = sorted(events, key=lambda e: -e["ts"].timestamp())[:3]
                    assert live.rows == wanted
                else:
                    wanted = sorted((e for e in events if e["ts"] >= moment), key=lambda e: e["ts"])[:3]
                    assert live.rows == wanted


def test_a_node_of_a_hierarchy_covers_what_is_below(db: Database) -> None:
    """Customer, application, server, endpoint: a subscription at each depth, by key range, and one event for all."""
    names = ("customer", "application", "server", "endpoint")
    db.create_event_table("hits", event_time="ts", columns={**dict.fromkeys(names, "string"), "ts": "timestamp"})
    db.create_aggregate("tree", source="hits", group_by=list(names), measures={"hits": kivi.count()})
    rng = random.Random(8)
    path = ("acme", "shop", "shop-1", "/cart")
    lives = [db.subscribe("tree", prefix=path[:depth], interval_ms=0, heartbeat_ms=10) for depth in range(5)]

    def below(depth: int) -> Judge:
        return Judge(db, "tree", lambda row: tuple(row.values())[:depth] == path[:depth])

    for i in range(20):  # names that begin alike are other nodes
        hit = [rng.choice((node, node, f"{node}x", "")) for node in path] if i else list(path)
        db.append("hits", [{**dict(zip(names, hit, strict=True)), "ts": 0}])
        for depth, live in enumerate(lives):
            until_quiet(live, db.watermark(), below(depth))
    assert [len(live.rows) > 0 for live in lives] == [True] * 5
    for live in lives:
        live.close()


def test_many_rows_change_at_once(db: Database) -> None:
    """So many that they are scanned for: the largest, those of a range, and one that leaves them, at each state."""
    queries: list[tuple[dict[str, Any], Callable[[dict[str, Any]], bool]]] = [
        ({"order_by": ["-total"], "limit": 7}, lambda row: True),
        ({"order_by": ["slowest"], "limit": 5, "offset": 3}, lambda row: True),
        ({"limit": 9, "offset": 2}, lambda row: True),
        ({"where": kivi.col("total") >= 30_000}, lambda row: row["total"] >= 30_000),
        ({"start": (2_000,), "end": (2_050,)}, lambda row: 2_000 <= row["endpoint"] < 2_050),
    ]
    rng = random.Random(6)

    def append(count: int) -> None:
        chosen = rng.sample(range(4_000), count)
        db.append("calls", [{"endpoint": e, "service": "x", "ts": 0, "us": rng.randrange(20_000)} for e in chosen])

    append(3_000)
    lives = []
    for wanted, keep in queries:
        live = db.subscribe("calls_5m", interval_ms=0, heartbeat_ms=10, **wanted)
        lives.append((live, Judge(db, "calls_5m", keep, **wanted)))
    for i in range(6):
        append((3_000, 600, 10, 2_000, 4_000, 700)[i])
        if i == 2:
            db.consolidate()
        for live, judge in lives:
            until_quiet(live, db.watermark(), judge)
    for live, _ in lives:
        live.close()


def test_what_cannot_be_subscribed_to(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound):
        db.subscribe("nothing")
    with pytest.raises(SchemaError, match="no column 'x'"):
        db.subscribe("rows", order_by="-x")
    with pytest.raises(InvalidArgument, match="twice"):
        db.subscribe("rows", order_by=["n", "-n"])
    with pytest.raises(InvalidArgument, match="no event table"):
        db.subscribe("rows", from_time=0)
    with pytest.raises(InvalidArgument, match="limit"):
        db.subscribe("rows", limit=-1)
    monkeypatch.setattr(windows, "ROWS_MAX", 3)
    with db.transaction() as tx:
        for name in "abcd":
            tx.put("rows", (0, name), text="x")
    with pytest.raises(ResourceExhausted, match="limit, a prefix or a predicate"):
        db.subscribe("rows")
    with db.subscribe("rows", prefix=(7,), interval_ms=0) as live:
        live.next(60.0)
        with db.transaction() as tx:
            for name in "abcd":
                tx.put("rows", (7, name), text="x")
        with pytest.raises(ResourceExhausted):
            live.next(60.0)
    monkeypatch.setattr(hubs, "LIVES_MAX", 0)
    with pytest.raises(ResourceExhausted, match="live_subscriptions_max"):
        db.subscribe("rows", limit=1)


def test_nothing_runs_without_subscribers(db: Database) -> None:
    live = db.subscribe("rows")
    live.next(60.0)
    assert db.store.pending.feed.on
    live.close()
    wait_until(lambda: not db.store.pending.feed.on)
    assert db.hub.count == 0
    with db.subscribe("rows") as again:
        assert again.next(30.0) is not None
