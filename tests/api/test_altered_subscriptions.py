"""Subscriptions to tables that are altered meanwhile: a subscription to all columns has those of the snapshot that each
of its updates names, as a read at that snapshot has them; one that named its columns keeps these.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest

import kivi
from kivi.embedded.database import Database
from kivi.errors import InvalidArgument
from tests.waiting import wait_until

T0 = 1_774_742_400_000_000
MINUTE = 60_000_000
Ask = tuple[str, dict[str, Any], Callable[[Any], list[dict[str, Any]]]]


def created(db: Any) -> None:
    db.create_table("t", key={"id": "int64"}, columns={"v": "int64"}, history="1d")
    db.create_view("by_v", source="t", key=["v", "id"])
    db.create_event_table(
        "e", event_time="ts", columns={"seq": "int64", "k": "string", "ts": "timestamp", "d": "decimal(10,2)"}
    )
    db.create_aggregate(
        "a",
        source="e",
        group_by=["k", kivi.time_slot("ts", "1m", name="slot")],
        measures={"n": kivi.count()},
        history="1d",
    )


STATES: list[Ask] = [
    ("t", {}, lambda snap: list(snap.scan("t"))),
    ("t", {"columns": ["v", "id"]}, lambda snap: list(snap.scan("t", columns=["v", "id"]))),
    ("t", {"order_by": ["-v"], "limit": 3}, lambda snap: list(snap.scan("t", order_by="-v", limit=3))),
    ("t", {"where": kivi.col("v") > 2}, lambda snap: list(snap.scan("t", where=kivi.col("v") > 2))),
    ("by_v", {"limit": 4}, lambda snap: list(snap.scan("by_v", limit=4))),
    ("a", {}, lambda snap: list(snap.scan("a"))),
    ("a", {"columns": ["n"]}, lambda snap: list(snap.scan("a", columns=["n"]))),
    ("a", {"rollup": {"by": ["k"]}}, lambda snap: list(snap.rollup("a", by=["k"]))),
    ("a", {"rollup": {"step": "2m", "last": "4m"}}, lambda snap: list(snap.rollup("a", step="2m", last="4m"))),
    ("a", {"rollup": {"by": ["k"], "measures": ["n"]}}, lambda s: list(s.rollup("a", by=["k"], measures=["n"]))),
    ("e", {"order_by": ["-seq"], "limit": 5}, lambda snap: list(snap.scan("e", order_by="-seq", limit=5))),
]
"""All that is a state, with what a snapshot has of it."""


class Written:
    """What others do meanwhile."""

    def __init__(self, db: Any, seed: int) -> None:
        self.db, self.rng, self.seq = db, random.Random(seed), 0
        self.more: dict[str, list[str]] = {"t": [], "e": []}
        self.measured = 0

    def row(self) -> None:
        more = {name: self.value(name) for name in self.more["t"] if self.rng.random() < 0.6}
        with self.db.transaction() as tx:
            tx.put("t", (self.rng.randrange(5),), v=self.rng.randrange(9), **more)

    def events(self) -> None:
        events = []
        for _ in range(self.rng.choice((1, 4))):
            more = {name: self.value(name) for name in self.more["e"] if self.rng.random() < 0.6}
            at = T0 + self.rng.randrange(6) * MINUTE
            events.append({"seq": self.seq, "k": self.rng.choice("ab"), "ts": at, "d": self.value("d")} | more)
            self.seq += 1
        self.db.append("e", events)

    def value(self, name: str) -> Any:
        cents = Decimal(self.rng.randrange(10_000)) / 100
        return T0 + self.rng.randrange(10) * MINUTE if name.startswith("at") else cents

    def table(self) -> None:
        self.add("t")

    def event_table(self) -> None:
        self.add("e")

    def add(self, table: str) -> None:
        i = len(self.more[table])
        columns = {f"price{i}": "decimal(10,2)", f"at{i}": "timestamp"}
        self.db.alter_table(table, add_columns=columns)
        self.more[table] += columns

    def aggregate(self) -> None:
        i, self.measured = self.measured, self.measured + 1
        measures = {f"money{i}": kivi.sum("d"), f"latest{i}": kivi.max("ts"), f"q{i}": kivi.quantiles("seq")}
        derived = {f"mean{i}": f"money{i} / n"} if i % 2 else None
        self.db.alter_aggregate("a", add_measures=measures, backfill=self.rng.random() < 0.5, derived=derived)

    def some(self) -> None:
        alterations = [self.table, self.event_table, self.aggregate]
        for _ in range(self.rng.choice((1, 3, 6))):
            self.rng.choice([self.row, self.row, self.events, self.rng.choice(alterations)])()


class Followed:
    """A subscription; whatever it delivers is held against a snapshot."""

    def __init__(self, db: Any, ask: Ask, **terms: Any) -> None:
        self.db, (table, wanted, self.read) = db, ask
        self.live = db.subscribe(table, interval_ms=0, heartbeat_ms=20, **wanted, **terms).__enter__()

    def hear(self) -> Any:
        update = self.live.next(timeout_s=0.02)
        if update is not None:
            self.check()
        return update

    def check(self) -> None:
        with self.db.snapshot(as_of=self.live.ts) as snap:
            found = self.read(snap)
            assert [[*row.items()] for row in self.live.rows] == [[*row.items()] for row in found]

    def until(self, ts: int) -> None:
        wait_until(lambda: self.hear() is None and self.live.ts >= ts, pause_s=0)
        self.check()

    def close(self) -> None:
        self.live.__exit__(None, None, None)


def test_what_is_added_comes_as_a_read_has_it(db: Any) -> None:
    created(db)
    written = Written(db, 0)
    written.row()
    written.events()
    followed = [Followed(db, ask) for ask in STATES]
    for one in followed:
        one.until(db.watermark())
    for alter in (written.table, written.event_table, written.aggregate):
        alter()
        for one in followed:  # rows of before, with what is added
            one.until(db.watermark())
    assert followed[0].live.rows[0]["price0"] is None
    with db.transaction() as tx:
        tx.put("t", (0,), v=1, price0="9.99", at0=T0)
    db.append("e", [{"seq": 100, "k": "a", "ts": T0, "d": "1.25", "price0": "2.50"}])
    for one in followed:
        one.until(db.watermark())
        one.close()
    assert followed[0].live.rows[0]["price0"] == Decimal("9.99")
    assert followed[0].live.rows[0]["at0"].isoformat() == "2026-03-29T00:00:00+00:00"
    assert list(followed[1].live.rows[0]) == ["v", "id"]
    assert isinstance(followed[7].live.rows[0]["money0"], Decimal)
    assert list(followed[9].live.rows[0]) == ["k", "n"]
    assert followed[10].live.rows[0]["price0"] == Decimal("2.50")


def test_every_state_is_the_snapshots_through_alterations(db: Any) -> None:
    """Alterations and commits between ticks and across them; some subscriptions leave and go on with ``since``."""
    created(db)
    written, rng = Written(db, 0), random.Random(0)
    written.row()
    written.events()
    followed = [Followed(db, ask) for ask in STATES]
    for _ in range(8):
        written.some()
        for i, one in enumerate(followed):
            if rng.random() < 0.5:
                one.hear()
            if rng.random() < 0.15 and one.live.ts:
                rows, since = one.live.rows, one.live.ts
                one.close()
                written.some()
                followed[i] = Followed(db, STATES[i], since=since, rows=rows)
    for one in followed:
        one.until(db.watermark())
        one.close()


@pytest.fixture
def beside(db: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The same store for another thread: what drives the client for asyncio is one thread's."""
    if isinstance(db, Database):
        yield db
    else:
        with kivi.connect(request.getfixturevalue("server").endpoint) as other:
            yield other


def test_every_state_is_the_snapshots_while_another_thread_commits_and_alters(db: Any, beside: Any) -> None:
    created(db)
    written, failures = Written(beside, 1), list[BaseException]()
    written.row()
    written.events()
    followed = [Followed(db, ask) for ask in STATES]

    def write() -> None:
        try:
            for _ in range(15):
                written.some()
                time.sleep(0.02)
        except BaseException as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        for one in followed:
            one.hear()
    writer.join()
    assert failures == []
    for one in followed:
        one.until(db.watermark())
        one.close()


def test_every_event_comes_once_with_the_columns_of_its_update(db: Any) -> None:
    created(db)
    written, rng = Written(db, 1), random.Random(1)
    written.events()
    asked: list[dict[str, Any]] = [{}, {"columns": ["d", "seq"]}, {"where": kivi.col("d") > Decimal(30)}]
    lives = [db.subscribe("e", interval_ms=0, heartbeat_ms=20, since=0, **wanted).__enter__() for wanted in asked]
    told: list[list[dict[str, Any]]] = [[] for _ in asked]

    def hear(i: int) -> Any:
        update = lives[i].next(timeout_s=0.02)
        if update is not None:
            rows = [change.row for change in update.changes]
            told[i] += rows
            with db.snapshot(as_of=update.ts) as snap:
                least = snap.to_arrow("e").schema.names
            if "columns" in asked[i]:
                assert all(list(row) == ["d", "seq"] for row in rows)
            else:
                assert all(list(row)[: len(least)] == least for row in rows)
        return update

    for _ in range(10):
        written.some()
        for i in range(len(lives)):
            if rng.random() < 0.5:
                hear(i)
            if rng.random() < 0.15 and lives[i].ts:
                since, skip = lives[i].ts, lives[i].skip
                lives[i].__exit__(None, None, None)
                written.some()
                again = db.subscribe("e", interval_ms=0, heartbeat_ms=20, since=since, skip=skip, **asked[i])
                lives[i] = again.__enter__()
    written.event_table()
    written.events()
    last = db.watermark()
    with db.snapshot() as snap:
        known = {row["seq"]: row for row in snap.scan("e")}
    for i, live in enumerate(lives):
        wait_until(lambda i=i, live=live: hear(i) is None and live.ts >= last, pause_s=0)  # type: ignore[misc]
        live.__exit__(None, None, None)
        wanted = [seq for seq, row in known.items() if i != 2 or row["d"] > 30]
        assert sorted(row["seq"] for row in told[i]) == sorted(wanted)
        for row in told[i]:
            assert row == {name: known[row["seq"]][name] for name in row}
    assert "price0" in told[0][-1]


def test_matches_keep_the_columns_of_their_measures(db: Any) -> None:
    created(db)
    now = time.time_ns() // 1_000
    rising = kivi.pattern(
        "A B",
        partition_by=["k"],
        within="10m",
        define={"B": kivi.col("d") > kivi.prev("d")},
        measures={"began": kivi.first("A.ts"), "most": kivi.max("d")},
    )
    with db.subscribe_matches("e", rising, lateness="0s", interval_ms=0, heartbeat_ms=20) as live:
        found: list[Any] = []
        for i in range(4):
            at = now - (100 - 10 * i) * 1_000_000
            more = {f"price{i - 1}": "1.00"} if i else {}
            events = [{"seq": i, "k": "z", "ts": at + j, "d": f"{j + 1}.25"} | more for j in range(2)]
            db.append("e", events)
            db.alter_table("e", add_columns={f"price{i}": "decimal(10,2)"})
        db.append("e", [{"seq": 9, "k": "y", "ts": now, "d": 0}])

        def are_there() -> bool:
            update = live.next(timeout_s=0.05)
            found.extend(change.row for change in update.changes if change.kind == "add") if update else None
            return len(found) >= 4

        wait_until(are_there, pause_s=0)
    assert [row["most"] for row in found] == [Decimal("2.25")] * 4
    with db.snapshot() as snap:
        wanted = [repr(row["began"]) for row in snap.match("e", rising)]
    assert [repr(row["began"]) for row in found] == wanted


def test_a_durable_subscription_goes_on_over_an_alteration(db: Any) -> None:
    """What it selects is its query; columns that were added since do not make it another."""
    created(db)
    costly = kivi.col("d") > Decimal(1)
    stored = [{"user": "eve", "name": "two", "where": costly}]

    def told(**wanted: Any) -> list[Any]:
        with db.subscribe("e", name="one", user="ada", where=costly, interval_ms=0, heartbeat_ms=20, **wanted) as live:
            rows: list[Any] = []
            while (update := live.next(timeout_s=60.0)) is not None:
                rows += [change.row for change in update.changes]
                if len(rows) == 2:
                    break
            return rows

    def written(seq: int, **more: Any) -> None:
        db.append("e", [{"seq": seq + i, "k": "z", "ts": T0, "d": "1.25"} | more for i in range(2)])

    written(0)
    assert [row["seq"] for row in told()] == [0, 1]
    db.store_subscriptions("e", stored)
    db.alter_table("e", add_columns={"price": "decimal(10,2)"})
    written(2, price="7.50")
    assert [(row["seq"], row["price"]) for row in told()] == [(2, Decimal("7.50")), (3, Decimal("7.50"))]
    db.store_subscriptions("e", stored)
    written(4)
    assert told(columns=["seq"]) == [{"seq": 4}, {"seq": 5}]
    with (
        pytest.raises(InvalidArgument, match="another query"),
        db.subscribe("e", name="one", user="ada", where=kivi.col("d") > Decimal(2)),
    ):
        pass
    db.unsubscribe("one", user="ada")
    with db.subscribe("e", name="two", user="eve", interval_ms=0, heartbeat_ms=20) as live:
        assert len(live.next(timeout_s=30.0).changes) == 6
    db.unsubscribe("two", user="eve")


def test_what_others_ask_for_is_not_told(db: Any) -> None:
    """Rows that changed are read once for all who ask, with every column that any of them wants."""
    created(db)
    quarter = "quantile(q0, 0.25)"
    Written(db, 0).aggregate()
    db.append("e", [{"seq": 1, "k": "z", "ts": T0, "d": "1.25"}])
    every, one = Followed(db, STATES[5]), Followed(db, ("a", {"columns": ["k", quarter]}, lambda snap: []))
    every.until(db.watermark())
    db.append("e", [{"seq": 2, "k": "z", "ts": T0, "d": "1.25"}])
    every.until(db.watermark())
    assert quarter not in every.live.rows[0]
    every.close()
    one.close()
