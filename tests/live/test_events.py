"""Subscriptions to events: each event once, in commit order, past ones first, then those that come."""

from __future__ import annotations

import contextlib
import datetime as dt
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.errors import InvalidArgument, NotFound, SnapshotTooOld
from kivi.live import lives
from kivi.live.tails import Tails
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

T0 = 1_750_000_000_000_000


@pytest.fixture(params=["embedded", "server"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        if request.param == "embedded":
            db: Any = stack.enter_context(kivi.open(tmp_path / "store"))
        else:
            server = stack.enter_context(ServerProcess(tmp_path / "store"))
            db = stack.enter_context(server.connect())
        db.create_event_table(
            "calls", event_time="ts", columns={"seq": "int64", "service": "string", "ts": "timestamp", "us": "int64"}
        )
        yield db


class Source:
    """Appends events with ascending numbers; some commits have many."""

    def __init__(self, db: Any) -> None:
        self.db = db
        self.events: list[dict[str, Any]] = []
        self._random = random.Random(7)

    def add(self, count: int) -> int:
        new = [
            {
                "seq": len(self.events) + i,
                "service": self._random.choice("xyz"),
                "ts": T0 + self._random.randrange(3_600_000_000),
                "us": self._random.randrange(1_000),
            }
            for i in range(count)
        ]
        self.events += new
        ts: int = self.db.append("calls", new)
        return ts


def collect(live: Any, count: int, timeout_s: float = 20.0) -> list[int]:
    """The numbers of the next events."""
    found: list[int] = []

    def complete() -> bool:
        if len(found) >= count:
            return True
        update = live.next(1.0)
        if update is not None:
            assert not update.reset
            found.extend(change.row["seq"] for change in update.changes)
        return update is None and live.ended

    wait_until(complete, timeout_s, reason=lambda: (len(found), count), pause_s=0)
    return found


def test_past_ones_first_then_those_that_come(db: Any) -> None:
    source = Source(db)
    for count in (1, 5, 12_000, 3):
        source.add(count)
    with db.subscribe("calls", interval_ms=0) as live:
        assert collect(live, len(source.events)) == list(range(len(source.events)))
        for count in (1, 1, 40_000, 2):  # more than is kept for a subscriber that is busy
            at = len(source.events)
            source.add(count)
            assert collect(live, count) == list(range(at, at + count))
        assert live.next(0.3) is None
        assert live.ts == db.watermark()


def test_only_those_that_are_selected(db: Any) -> None:
    source = Source(db)
    source.add(3_000)
    where = (kivi.col("service") == "y") & (kivi.col("us") < 500)
    low, high = T0 + 600_000_000, T0 + 2_400_000_000
    with db.subscribe(
        "calls", where=where, from_time=low, until_time=high, columns=["seq"], interval_ms=0
    ) as live:  # that moment is over: it ends when what is there has been read
        update = live.next(60.0)
        assert set(update.changes[0].row) == {"seq"}
        found = [change.row["seq"] for change in update.changes] + collect(live, 10_000)
        assert live.ended
        assert live.next(0.1) is None
    wanted = [e["seq"] for e in source.events if e["service"] == "y" and e["us"] < 500 and low <= e["ts"] < high]
    assert found == wanted
    with db.subscribe("calls", where=where, since=db.watermark(), interval_ms=0) as live:
        at = len(source.events)
        source.add(200)
        wanted = [e["seq"] for e in source.events[at:] if e["service"] == "y" and e["us"] < 500]
        assert collect(live, len(wanted)) == wanted


def test_it_ends_when_its_moment_is_over(db: Any) -> None:

    def told(now: dt.datetime, lasts: dt.timedelta) -> Any:
        live = db.subscribe("calls", until_time=now + lasts, since=db.watermark(), interval_ms=0, heartbeat_ms=100)
        db.append("calls", [{"seq": 0, "ts": now, "us": 1}, {"seq": 1, "ts": now + 2 * lasts, "us": 1}])
        assert collect(live, 1) == [0]  # the other one lies behind its end
        return live

    began, hour = dt.datetime.now(dt.UTC), dt.timedelta(hours=1)
    with told(began, hour) as live:
        assert not live.ended
    now = dt.datetime.now(dt.UTC)
    lasts = max(dt.timedelta(seconds=2), 10 * (now - began))  # so that it is not over before it is told
    with told(now, lasts) as live:
        assert not live.ended
        assert live.next(60.0).ended
        assert dt.datetime.now(dt.UTC) >= now + lasts
        db.append("calls", [{"seq": 2, "ts": now, "us": 1}])
        assert live.next(0.2) is None


def test_it_goes_on_where_it_was(db: Any) -> None:
    """From any update on, with the rest of a large commit: nothing is lost and nothing comes twice."""
    source = Source(db)
    source.add(10)
    source.add(17_000)
    source.add(20)
    found: list[int] = []
    since, skip = None, 0
    for _ in range(40):
        with db.subscribe("calls", interval_ms=0, since=since, skip=skip, where=kivi.col("us") >= 100) as live:
            update = live.next(60.0)
            if update is None or not update.changes:
                break
            found += [change.row["seq"] for change in update.changes]
            since, skip = live.ts, live.skip
            if live.ts >= db.watermark():
                break
    assert found == [event["seq"] for event in source.events if event["us"] >= 100]
    assert since == db.watermark()


def test_a_subscriber_that_takes_its_time(db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves lying is let go and read again; commits never wait for it."""
    monkeypatch.setattr(lives, "BUFFER_ROWS", 50)
    source = Source(db)
    stop = threading.Event()

    def append() -> None:
        while not stop.is_set():
            source.add(20)
            time.sleep(0.002)

    thread = threading.Thread(target=append)
    found: list[int] = []
    with db.subscribe("calls", interval_ms=50, heartbeat_ms=20) as live:
        thread.start()
        rng = random.Random(2)
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            update = live.next(0.5)
            if update is not None:
                found += [change.row["seq"] for change in update.changes]
            time.sleep(rng.choice((0, 0, 0.2)))
        stop.set()
        thread.join()
        found += collect(live, len(source.events) - len(found))
    assert found == list(range(len(source.events)))


def test_a_table_that_is_gone_or_another(db: Any) -> None:
    source = Source(db)
    source.add(3)
    with db.subscribe("calls", interval_ms=0) as live:
        collect(live, 3)
        with db.transaction() as tx:
            tx.overwrite("calls")
        with pytest.raises(SnapshotTooOld, match="overwritten"):
            live.next(60.0)
    with db.subscribe("calls", interval_ms=0, since=db.watermark()) as live:
        db.drop("calls")
        with pytest.raises(NotFound):
            live.next(60.0)


def test_bad_arguments(db: Any) -> None:
    with pytest.raises(InvalidArgument, match="past the watermark"):
        db.subscribe("calls", since=10**9)
    with pytest.raises(InvalidArgument, match="no row keys"):
        db.subscribe("calls", prefix=(1,))
    with pytest.raises(InvalidArgument, match="time zone"):
        db.subscribe("calls", from_time=dt.datetime(2026, 1, 1))  # noqa: DTZ001 (that is the point)
    with db.subscribe("calls", since=0) as live, pytest.raises(InvalidArgument, match="keeps none"):
        _ = live.rows


def test_nothing_is_read_for_those_who_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who returns does not wait for the past of a thousand who came and left."""
    with kivi.open(None) as db:
        db.create_event_table("past", event_time="ts", columns={"seq": "int64", "ts": "timestamp"})
        db.append("past", [{"seq": i, "ts": 1_750_000_000_000_000 + i} for i in range(10)])
        read: list[Any] = []
        held = threading.Event()
        page = Tails.page

        def slow(self: Tails, live: Any) -> Any:
            read.append(live)
            assert held.wait(60.0)
            return page(self, live)

        monkeypatch.setattr(Tails, "page", slow)
        gone: list[Any] = [db.subscribe("past", since=0, interval_ms=0) for _ in range(30)]

        def all_ask() -> bool:
            if len(read) == 2 and all(live._live.busy for live in gone):  # two threads read, the others wait
                return True
            for live in gone:
                assert live.next(0.0) is None
            return False

        wait_until(all_ask)
        for live in gone:
            live.close()
        held.set()
        with db.subscribe("past", since=0, interval_ms=0) as live:
            update = live.next(60.0)
            assert update is not None
            assert len(update.changes) == 10
        assert len(read) == 3
