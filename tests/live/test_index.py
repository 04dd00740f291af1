"""Durable subscriptions by what they ask for: what an event reaches is what asking every predicate says."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.embedded.database import Database
from kivi.errors import Unavailable
from kivi.live import durable
from kivi.model.expressions import Expr
from kivi.model.schema import TableSchema
from kivi.mvcc.leases import Lease
from kivi.runtime.settings import Settings
from kivi.store import known_rows
from kivi.store.catalog import ASKS, CELLS, EARLIER_SUBSCRIPTIONS, MEMBERS, QUERIES, SUBSCRIPTIONS
from kivi.store.facade import Scan, Store
from kivi.store.reads import Reads

col = kivi.col
T0 = 1_750_000_000_000_000
COLUMNS = {
    "ts": "timestamp", "seq": "int64", "topic": "string", "raw": "bytes", "n": "int64", "x": "float64",
    "price": "decimal(9,2)", "ok": "bool", "lat": "float64", "lon": "float64",
}  # fmt: skip
TOPICS = [*(f"t{i}" for i in range(8)), "", "t1\tx", "t" * 90]


class Clock:
    def __init__(self) -> None:
        self.now = 1_760_000_000.0

    def __call__(self) -> float:
        return self.now


def predicate(rng: random.Random, depth: int = 0) -> Expr:
    number, real = rng.randrange(-40, 40), rng.choice([-1e300, -2.5, -0.0, 0.0, 0.5, 3.0, 1e9])
    path = "".join(rng.choices("0123", k=rng.randrange(1, 4)))
    cell = kivi.quad("lat", "lon", depth=rng.choice([2, 12]))
    leaves: list[Any] = [
        lambda: col("topic") == rng.choice(TOPICS),
        lambda: col("topic").isin(rng.sample(TOPICS, 3)),
        lambda: col("topic").startswith(rng.choice(["t", "t1", "t1\t", "u"])),
        lambda: (col("topic") >= "t2") & (col("topic") < rng.choice(["t25", "t3", "u"])),
        lambda: col("topic").under(rng.choice(TOPICS)),
        lambda: col("topic").covers(rng.choice(TOPICS)),
        lambda: col("raw") == b"\x00\xff",
        lambda: col("n") == number,
        lambda: (col("n") >= number) & (col("n") <= number + rng.choice([0, 3, 200, 2**62])),
        lambda: col("n") > number,
        lambda: (col("x") >= real) & (col("x") <= real + 5.0),
        lambda: col("x") == real,
        lambda: (col("price") >= 1) & (col("price") < 3),
        lambda: col("ok"),
        lambda: col("n") + col("x") > real,
        lambda: col("topic").is_null(),
        lambda: col("n") != number,
        lambda: cell.under(path),
        lambda: cell.covers(path),
        lambda: kivi.within_km("lat", "lon", rng.uniform(-80, 80), rng.uniform(-180, 180), rng.choice([50, 3_000])),
    ]
    if depth < 3 and rng.random() < 0.45:
        sides = predicate(rng, depth + 1), predicate(rng, depth + 1)
        return rng.choice([lambda: sides[0] & sides[1], lambda: sides[0] | sides[1], lambda: ~sides[0]])()
    return rng.choice(leaves)()


def events(rng: random.Random, numbers: Any, count: int) -> list[dict[str, Any]]:
    def maybe(value: Any) -> Any:
        return None if rng.random() < 0.1 else value

    return [
        {
            "ts": T0 + rng.randrange(1_000), "seq": next(numbers), "topic": maybe(rng.choice([*TOPICS, "u"])),
            "raw": maybe(rng.choice([b"", b"\x00\xff"])), "n": maybe(rng.randrange(-45, 60)),
            "x": maybe(rng.choice([-1e300, -2.5, -0.0, 0.0, 0.25, 3.0, 7.5, 1e9])),
            "price": maybe(rng.randrange(-3, 5)), "ok": maybe(rng.random() < 0.5),
            "lat": maybe(rng.uniform(-95, 90)), "lon": maybe(rng.uniform(-180, 180)),
        }
        for _ in range(count)
    ]  # fmt: skip


def rows(db: Any, schema: Any) -> list[dict[str, Any]]:
    with db.store.snapshots.opened() as lease:
        return [row for batch in db.store.scan(lease, schema, Scan()) for row in batch.to_pylist()]


def opened(path: Path, clock: Clock, **settings: Any) -> Any:
    return Database(Store.open(str(path), settings=Settings(background=False, **settings), clock=clock))


@pytest.mark.parametrize(("seed", "bytes_", "keys_min"), [(2, 64 << 20, 1), (3, 2_560, 1)])
def test_an_event_reaches_whom_its_predicate_selects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, bytes_: int, keys_min: int
) -> None:
    """Subscriptions come, go, expire and change; topics move; the store is killed; then each gets its events, once."""
    monkeypatch.setattr(known_rows, "_KEYS_MIN", keys_min)
    monkeypatch.setattr(durable, "_SWEEP_EVERY_US", 10_000_000)
    monkeypatch.setattr(durable, "_SWEEP_ROWS", 7)
    rng, clock, numbers = random.Random(seed), Clock(), itertools.count()
    path = tmp_path / "store"
    db = opened(path, clock, subscriptions_bytes=bytes_)
    db.create_hierarchy("topics", parent="parent")
    db.create_event_table("news", event_time="ts", columns=COLUMNS)
    db.create_event_table("other", event_time="ts", columns=COLUMNS)
    stored: dict[tuple[str, str], tuple[Expr | None, int, float]] = {}
    wheres: list[Expr | None] = [None, *(predicate(rng) for _ in range(40))]  # many ask for the same
    for step in range(12):
        with db.transaction() as tx:
            for name in rng.sample(TOPICS[:8], 3):
                tx.put("topics", (name,), parent=rng.choice([None, *TOPICS[:8]]))
        wanted = []
        hours = rng.choice([1, 100])
        for i in range(12):
            key, where = (f"u{rng.randrange(4)}", f"s{step}_{i}"), rng.choice(wheres)
            wanted.append({"user": key[0], "name": key[1], "where": where})
            stored[key] = where, db.watermark(), clock.now + 3_600 * hours
        since = db.watermark()
        db.store_subscriptions("news", wanted, since=since, expires_in=f"{hours}h")
        db.store_subscriptions("other", [{"user": "o", "name": f"{step}"}])
        for key in rng.sample(sorted(stored), 3):
            db.unsubscribe(key[1], key[0])
            del stored[key]
        clock.now += 700
        with db.subscribe("other", name="sweeps"):  # whose coming deletes what has expired
            pass
        stored = {key: one for key, one in stored.items() if one[2] > clock.now}
        if rng.random() < 0.4:
            db.store.crash()
            db = opened(path, clock, subscriptions_bytes=bytes_)
        if rng.random() < 0.3:
            db.consolidate()
        ts = db.append("news", batch := events(rng, numbers, 30))
        check(db, ts, [event["seq"] for event in batch], stored)
    last = db.watermark()
    for key in rng.sample(sorted(stored), 20):
        where, since, _ = stored[key]
        with db.subscribe("news", user=key[0], name=key[1], interval_ms=0, heartbeat_ms=20) as live:
            got = drain(live, last)
        with db.snapshot() as snap:
            assert got == [row["seq"] for row in snap.changes("news", since=since, where=where)]
    for user, name in [(row["user"], row["name"]) for row in rows(db, SUBSCRIPTIONS)]:
        db.unsubscribe(name, user)
    assert rows(db, MEMBERS) == []
    clock.now += 700
    with db.subscribe("other", name="one", expires_in="1s"):
        pass
    clock.now += 700
    with db.subscribe("other", name="two"):  # which sweeps the one before, and all that nobody asks for
        pass
    assert [row["cell"] for row in rows(db, CELLS)] == ["#a\t\t", "a\t\t\t"]
    assert [len(rows(db, schema)) for schema in (ASKS, QUERIES, SUBSCRIPTIONS)] == [1, 1, 1]  # of the last one
    db.close()


def drain(live: Any, upto: int) -> list[int]:
    found: list[int] = []
    while live.ts < upto:
        if (update := live.next(0.05)) is not None:
            found += [change.row["seq"] for change in update.changes]
    return found


def check(db: Any, ts: int, numbers: list[int], stored: dict[tuple[str, str], tuple[Expr | None, int, float]]) -> None:
    """Against every predicate asked about the events of the commit, by a scan."""
    selected: dict[int, set[tuple[str, str]]] = {number: set() for number in numbers}
    with db.snapshot(as_of=ts) as snap:
        for key, (where, _, _) in stored.items():
            for row in snap.changes("news", since=ts - 1, where=where):
                selected[row["seq"]].add(key)
    assert db.reached("news", ts) == [len(selected[number]) for number in numbers]
    for place in (0, len(numbers) // 2):
        found = [(one["user"], one["name"]) for one in db.subscribers("news", ts, place=place)]
        assert len(found) == len(set(found))
        assert set(found) == selected[numbers[place]]


def test_what_is_known_is_bounded_and_right(tmp_path: Path) -> None:
    with kivi.open(tmp_path / "store", subscriptions_bytes=256 * 300) as db:
        db.create_event_table("news", event_time="ts", columns={"ts": "timestamp", "topic": "string"})
        names = [f"t{i}" for i in range(3_000)]
        wanted = [{"user": f"u{i % 7}", "name": f"{i}", "where": col("topic") == t} for i, t in enumerate(names)]
        db.store_subscriptions("news", wanted + [{"user": "all", "name": t, "where": col("topic") == t} for t in names])
        known = db.hub.durable.index.known
        for begin in range(0, 3_000, 100):
            ts = db.append("news", [{"ts": T0, "topic": name} for name in names[begin : begin + 100]])
            assert db.reached("news", ts) == [2] * 100
            (followed,) = known._followed.values()
            assert 0 < followed.grid.cells <= 600
            assert followed.whole_from is None
            db.store_subscriptions("news", [{"user": "b", "name": f"{begin}", "where": col("topic") == names[begin]}])
            ts = db.append("news", [{"ts": T0, "topic": name} for name in names[begin : begin + 100]])
            assert db.reached("news", ts) == [3] + [2] * 99
        assert db.reached("news", ts, since=0) == [
            3 if i % 100 == 0 else 2
            for begin in range(0, 3_000, 100)
            for _ in range(2)
            for i in range(begin, begin + 100)
        ]


def test_those_of_an_earlier_version_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted, go on from where they were, and what they ask for is known by name again."""
    monkeypatch.setattr(durable, "_SWEEP_ROWS", 3)
    with kivi.open() as db:
        db.create_event_table("news", event_time="ts", columns={"ts": "timestamp", "topic": "string"})
        table = db.store.table("news").origin
        first = db.append("news", [{"ts": T0, "topic": "a"}])
        txn = db.store.transaction()
        for i in range(7):
            query = {"start": None, "end": None, "where": ["==", "topic", "a"], "columns": ["ts", "topic"]}
            position = {"since": 0, "ts": first if i else 0, "skip": 0, "ttl_us": 10**12, "expires_us": 4 * 10**15}
            row = {
                "table": table,
                "name_of_table": "news",
                "query": json.dumps(query, separators=(",", ":")),
                **position,
            }
            txn.put(EARLIER_SUBSCRIPTIONS, (f"u{i % 2}", f"{i}"), row)
        txn.put(EARLIER_SUBSCRIPTIONS, ("", "gone"), row | {"table": table + 1_000})  # its table was dropped
        db.store.commits.commit_wait(txn)
        ts = db.append("news", [{"ts": T0, "topic": "a"}, {"ts": T0, "topic": "b"}])
        assert db.reached("news", ts) == [0, 0]  # nobody had asked for them then
        assert db.reached("news", ts := db.append("news", [{"ts": T0, "topic": "a"}])) == [7]
        assert rows(db, EARLIER_SUBSCRIPTIONS) == []
        assert [(one["name"], one["table"]) for one in db.subscriptions("u0")] == [
            (f"{i}", "news") for i in (0, 2, 4, 6)
        ]
        with db.subscribe("news", user="u0", name="0", where=col("topic") == "a", interval_ms=0) as live:
            update = live.next(60.0)
        assert update is not None and len(update.changes) == 3
        with db.subscribe("news", user="u0", name="2", interval_ms=0) as live:
            update = live.next(60.0)
        assert update is not None and len(update.changes) == 2
        db.unsubscribe("3", "u1")
        assert db.reached("news", db.append("news", [{"ts": T0, "topic": "a"}])) == [6]


def test_what_is_above_a_topic_is_remembered_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk that fails half way leaves nothing behind; nor does what was above in a hierarchy by another column."""
    with kivi.open() as db:
        db.create_event_table("news", event_time="ts", columns={"ts": "timestamp", "topic": "string"})
        db.create_table("topics", key={"name": "string"}, columns={"parent": "string", "theme": "string"})
        db.create_hierarchy("topics", parent="parent")
        with db.transaction() as tx:
            for name, parent, theme in (("a", "b", "x"), ("b", "c", None), ("c", None, None), ("x", None, None)):
                tx.put("topics", (name,), parent=parent, theme=theme)
        wanted = [col("topic").under("c"), col("topic").under("c") & (col("topic") != "b"), col("topic").under("x")]
        db.store_subscriptions("news", [{"name": f"{i}", "where": where} for i, where in enumerate(wanted)])
        ts = db.append("news", [{"ts": T0, "topic": "a"}])
        get, failures = Reads.get, [Unavailable("for now")]

        def failing(self: Reads, lease: Lease, schema: TableSchema, keys: Any, *args: Any) -> Any:
            if schema.name == "topics" and ("b",) in keys and failures:
                raise failures.pop()
            return get(self, lease, schema, keys, *args)

        monkeypatch.setattr(Reads, "get", failing)
        with pytest.raises(Unavailable, match="for now"):
            db.reached("news", ts)
        assert db.reached("news", ts) == [2]
        db.drop("topics_by_parent")
        db.create_hierarchy("topics", parent="theme")
        assert db.reached("news", db.append("news", [{"ts": T0, "topic": "a"}])) == [1]


def test_those_of_an_earlier_version_that_ask_for_much_are_taken_over_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_TAKEN_MAX", 300)
    with kivi.open(max_transaction_operations=1_000) as db:
        db.create_event_table("news", event_time="ts", columns={"ts": "timestamp", "topic": "string"})
        position = {"table": db.store.table("news").origin, "since": 0, "ts": 0, "skip": 0}
        txn = db.store.transaction()
        for i in range(40):
            where = ["isin", "topic", [f"{i + j}" for j in range(60)]]
            query = json.dumps({"start": None, "end": None, "where": where, "columns": ["ts", "topic"]})
            row = {"name_of_table": "news", "query": query, "ttl_us": 10**12, "expires_us": 4 * 10**15}
            txn.put(EARLIER_SUBSCRIPTIONS, ("u", f"{i:02}"), row | position)
        db.store.commits.commit_wait(txn)
        assert [one["name"] for one in db.subscriptions("u")] == [f"{i:02}" for i in range(40)]
        assert db.reached("news", db.append("news", [{"ts": T0, "topic": "39"}])) == [40]
