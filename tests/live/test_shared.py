"""Subscriptions that share: equal queries have one window and one update, and every state is what the query gives.

The judge works each state out from all rows of the table at the snapshot that the update names. Windows keep one row
in reserve, so they run short and are read again all the time, slowly, while others commit.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from kivi_server.live_queries import encoded

import kivi
from kivi.api.arguments import SubscribeArguments
from kivi.api.subscription import told
from kivi.embedded.database import Database
from kivi.errors import KiviError, ResourceExhausted
from kivi.live import groups, renewals, shared, windows
from kivi.live.lives import RowsLive
from kivi.live.reading import read_window
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Query, Update, applied
from kivi.model.tenants import Tenant
from kivi.wire.v1 import service_pb2 as pb
from tests.live.test_states import QUERIES, Judge, change, create
from tests.waiting import PATIENCE_S, wait_until

ASKED = ["all", "where", "top", "page", "page of keys", "or", "averages", "newest"]
TENANTS = [None, Tenant("part", "3"), Tenant("part", "1")]
EVERY = {**QUERIES, "newest": ("calls", {"order_by": ["-us"], "limit": 3}, lambda row: True)}


class Told:
    """One subscriber. Whatever it is told is held against the judge."""

    def __init__(self, db: Database, name: str, tenant: Tenant | None = None, **terms: Any) -> None:
        table, wanted, keep = EVERY[name]
        self.asked = name, tenant

        def shown(row: dict[str, Any]) -> bool:
            return keep(row) and (tenant is None or row["part"] == int(tenant.text))

        self.judge = Judge(db, table, shown, **wanted)
        self.hub = db.hub
        asked = SubscribeArguments(table, **wanted, **{"interval_ms": 0, "heartbeat_ms": 20, **terms})

        def bind(schema: TableSchema) -> Query:
            query = asked.bound(schema)
            return query if tenant is None else replace(query, scan=tenant.narrowed(schema, query.scan))

        self.rows: list[dict[str, Any]] = []
        self.ts = terms.get("since") or 0
        self.updates: list[Update] = []
        self.said: queue.SimpleQueue[Update | KiviError] = queue.SimpleQueue()
        live = db.hub.subscribe(table, bind, asked.terms(db.store.table(table)))
        assert isinstance(live, RowsLive)
        self.live = live
        self.hub.ask(self.live, self.said.put)

    def hear(self, timeout_s: float = 0.0) -> None:
        """All that it has been told."""
        while True:
            try:
                said = self.said.get(timeout=timeout_s)
            except queue.Empty:
                return
            if isinstance(said, KiviError):
                raise said
            assert said.ts >= self.ts
            self.ts = said.ts
            self.updates.append(said)
            shown = told(said)
            self.rows = applied([] if said.reset else self.rows, shown.changes, value=lambda change: change.row)
            assert self.rows == self.judge(said.ts), (self.asked, said)
            self.hub.ask(self.live, self.said.put)
            timeout_s = 0.0

    def close(self) -> None:
        self.hub.close(self.live)


@pytest.fixture
def db(monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    monkeypatch.setattr(windows, "_SLACK_MIN", 1)

    def slow(*args: Any) -> windows.Window:
        window = read_window(*args)
        time.sleep(0.005)  # others commit, after its snapshot
        return window

    monkeypatch.setattr(renewals, "read_window", slow)
    with kivi.open(None, live_renewals_per_s=100) as db:
        create(db)
        yield db


def until_all(subscribers: list[Told], ts: int) -> None:
    """Each has come so far, and was told nothing wrong on the way."""

    def are_there() -> bool:
        for one in subscribers:
            one.hear(0.001)
        return all(one.ts >= ts for one in subscribers)

    wait_until(are_there, pause_s=0)


@pytest.mark.parametrize("seed", range(3))
def test_every_state_is_the_querys_while_others_come_and_go(db: Database, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        change(db, rng)
    subscribers: list[Told] = []
    gone: list[Told] = []
    began = time.monotonic()
    while (lasted_s := time.monotonic() - began) < 3 or (not db.hub._renewals.count and lasted_s < PATIENCE_S):
        for _ in range(rng.choice((0, 1, 4))):
            change(db, rng)
        if len(subscribers) < 6 or rng.random() < 0.3:
            name = rng.choice(ASKED)
            tenant = rng.choice(TENANTS) if EVERY[name][0] == "rows" else None
            interval_ms = rng.choice((0, 0, 5, 40))
            before = next((one for one in gone if one.asked == (name, tenant) and one.updates), None)
            if before is not None and rng.random() < 0.7:  # it comes back, with the state that it was told
                one = Told(db, name, tenant, interval_ms=interval_ms, since=before.ts)
                one.rows = before.rows
            else:
                one = Told(db, name, tenant, interval_ms=interval_ms)
            subscribers.append(one)
        if len(subscribers) > 12 or rng.random() < 0.1:
            leaving = subscribers.pop(rng.randrange(len(subscribers)))
            leaving.close()
            gone.append(leaving)
        for one in subscribers:
            if rng.random() < 0.6:
                one.hear()
        if rng.random() < 0.05:
            db.consolidate()
    until_all(subscribers, db.watermark())
    assert db.hub._renewals.count > 0
    windows_of: dict[Any, set[int]] = {}
    for one in subscribers:
        windows_of.setdefault(one.asked, set()).add(id(one.live.shared))
    assert all(len(found) == 1 for found in windows_of.values())
    assert len(set.union(*windows_of.values())) == len(windows_of)


def test_those_who_are_told_the_same_get_one_update_encoded_once(db: Database) -> None:
    rng = random.Random(7)
    equal = [Told(db, "all", interval_ms=50) for _ in range(5)]
    other = Told(db, "all", Tenant("part", "3"), interval_ms=50)
    for _ in range(20):
        for _ in range(4):
            change(db, rng)
        for one in (*equal, other):
            one.hear(0.05)
    until_all([*equal, other], db.watermark())
    assert len({one.live.shared for one in equal}) == 1
    got = Counter(id(update) for one in equal for update in one.updates if update.changes)
    assert max(got.values()) == 5
    assert not got.keys() & {id(update) for update in other.updates}
    (update,) = {id(u): u for u in equal[0].updates if got[id(u)] == 5 and len(u.changes) > 1}.popitem()[1:]
    ((first,), (second,)) = (
        pb.SubscribeResponse.FromString(next(encoded(i, one.live, update))).updates
        for i, one in enumerate(equal[:2], 8)
    )
    assert (first.number, second.number) == (8, 9)
    assert update.made["grpc"]
    second.number = 8
    assert first == second


def test_states_of_those_who_come_back_are_let_go(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a state of its own, of before, and nothing is committed meanwhile."""
    monkeypatch.setattr(shared, "_UPDATES_MAX", 3)
    before = db.watermark()
    with db.transaction() as tx:
        tx.put("rows", (1, "a"), text="x")
    for _ in range(10):
        late = Told(db, "all", since=before)
        until_all([late], db.watermark())
        assert [change.kind for update in late.updates for change in update.changes] == ["add"]
        assert len(late.live.shared._updates) <= 3
    assert db.hub.windows == 1


def test_a_slow_reading_holds_nobody_else_up(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """One window is read again for as long as that takes; another query goes on, and nobody is told half of a state."""
    with db.transaction() as tx:
        for i in range(20):
            tx.put("rows", (i % 6, f"{i}"), level=float(i))
    top, every = Told(db, "top"), Told(db, "all")
    until_all([top, every], db.watermark())
    may_go_on = threading.Event()

    def stuck(*args: Any) -> windows.Window:
        window = read_window(*args)
        assert may_go_on.wait(PATIENCE_S)
        return window

    monkeypatch.setattr(renewals, "read_window", stuck)
    for row in top.rows:
        with db.transaction() as tx:
            tx.delete("rows", (row["part"], row["name"]))
    late = None
    for i in range(5):
        with db.transaction() as tx:
            tx.delta("rows", (1, "hot"), n=100 * i)
        until_all([every], db.watermark())
        top.hear(0.05)
        if late is None and not top.live.shared.current:  # who comes now waits with it
            late = Told(db, "top")
    assert late is not None
    assert not late.updates
    assert top.ts < db.watermark()
    may_go_on.set()
    until_all([top, late], db.watermark())
    assert late.live.shared is top.live.shared


def test_a_window_that_was_overtaken_is_never_taken_over(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too much changes while it is read: it is read once more, and ticks meanwhile leave alone what was read before."""
    with db.transaction() as tx:
        for i in range(20):
            tx.put("rows", (i % 6, f"{i}"), level=float(i))
    top = Told(db, "top")
    until_all([top], db.watermark())
    reading, may_go_on = threading.Semaphore(0), threading.Semaphore(0)

    def stuck(*args: Any) -> windows.Window:
        window = read_window(*args)
        reading.release()
        assert may_go_on.acquire(timeout=PATIENCE_S)
        return window

    monkeypatch.setattr(renewals, "read_window", stuck)
    monkeypatch.setattr(groups, "_MISSED_MAX", 0)
    for row in top.rows:
        with db.transaction() as tx:
            tx.delete("rows", (row["part"], row["name"]))
    try:
        assert reading.acquire(timeout=PATIENCE_S)
        with db.transaction() as tx:
            tx.put("rows", (1, "meanwhile"), n=1_000)
        wait_until(lambda: db.hub.ts >= db.watermark())
        may_go_on.release()
        assert reading.acquire(timeout=PATIENCE_S)  # again
        monkeypatch.setattr(groups, "_MISSED_MAX", 50_000)
        with db.transaction() as tx:
            tx.put("rows", (1, "in no window"), level=None)
        wait_until(lambda: db.hub.ts >= db.watermark())
        top.hear(0.1)
        assert not top.live.shared.current
    finally:
        monkeypatch.undo()
        may_go_on.release(10)
    until_all([top], db.watermark())
    assert top.rows[0]["name"] == "meanwhile"


def test_queries_that_an_alteration_makes_different(db: Database) -> None:
    """All columns are the same as those named until there is one more."""
    named = {"columns": ["part", "name", "n", "text", "level"]}
    EVERY["named"] = ("rows", named, lambda row: True)
    try:
        every, some = Told(db, "all"), Told(db, "named")
        assert every.live.shared is some.live.shared
        with db.transaction() as tx:
            tx.put("rows", (1, "a"), text="x")
        until_all([every, some], db.watermark())
        db.alter_table("rows", {"more": "int64"})
        with db.transaction() as tx:
            tx.put("rows", (1, "b"), more=5)
        until_all([every, some], db.watermark())
        assert every.live.shared is not some.live.shared
        assert "more" in every.rows[1]
        assert "more" not in some.rows[1]
    finally:
        del EVERY["named"]


def test_a_reading_that_fails_ends_all_that_share_it(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, other = Told(db, "all"), Told(db, "all"), Told(db, "top")
    until_all([first, second, other], db.watermark())
    monkeypatch.setattr(windows, "ROWS_MAX", 5)
    with db.transaction() as tx:
        for i in range(8):
            tx.put("rows", (i, "a"), level=float(i))
    for one in (first, second):
        with pytest.raises(ResourceExhausted):
            until_all([one], db.watermark() + 1)
    until_all([other], db.watermark())
    first.close()
    second.close()
    with pytest.raises(ResourceExhausted):
        Told(db, "all")
    monkeypatch.undo()
    assert Told(db, "all").live.shared.current


def test_readings_keep_their_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """All windows at once, of a feed that lost what was committed: one after the other, no faster than it is said."""
    with kivi.open(None, live_renewals_per_s=20) as db:
        create(db)
        rng = random.Random(3)
        subscribers = [Told(db, name, tenant) for name in ("all", "where", "top", "or") for tenant in TENANTS]
        until_all(subscribers, db.watermark())
        assert db.hub._renewals.count == 0
        monkeypatch.setattr(db.store.pending.feed, "_max_bytes", 1)
        began = time.monotonic()
        while not db.hub._renewals.count:
            change(db, rng)
        monkeypatch.undo()
        until_all(subscribers, db.watermark())
        assert db.hub._renewals.count >= len(subscribers)
        assert db.hub._renewals.count <= (time.monotonic() - began) * 20 + 1
