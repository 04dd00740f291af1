"""A follower is its owner at every snapshot: whatever is committed, folded, rolled and truncated meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.embedded.database import Database
from kivi.errors import DataLoss, InvalidArgument, KiviError, NotFound, SnapshotTooOld, Unavailable
from kivi.log.followed import FollowedLog, LeftBehind
from kivi.runtime.settings import Settings
from kivi.store.catalog import EARLIER_SUBSCRIPTIONS
from kivi.store.checkpoint import followers_copy
from kivi.store.facade import Store
from kivi.store.following import Follower, open_follower
from kivi.store.opening import read_marker
from tests.waiting import wait_until

COLUMNS = {"g": "int64", "ts": "timestamp", "x": "int64", "text": "string"}
MEASURES = {"n": kivi.count(), "s": kivi.sum("x"), "p": kivi.quantiles("x"), "last": kivi.last("text")}


class Pair:
    """An owner with small segments, and its follower."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self.clock = path, clock
        self.copies = 0
        settings = Settings(segment_bytes=16 << 10, block_rows=50, background=False)
        self.owner = Database(Store.open(str(path / "owner"), settings=settings, clock=clock))
        self.follower: Follower | None = None
        self.db: Any = None

    def follow(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """``meanwhile``: what the owner does between the copy and its opening."""
        self.end()
        self.copies += 1
        copy = str(self.path / f"copy{self.copies}")
        followers_copy(self.owner.store, copy)
        meanwhile()
        settings = Settings(block_rows=70, background=False)
        self.follower = open_follower(copy, str(self.path / "owner" / "log"), settings, clock=self.clock)
        self.db = Database(self.follower.store)

    def caught_up(self) -> int:
        upto = self.owner.watermark()
        wait_until(lambda: self.db.watermark() >= upto, 10)
        assert self.db.watermark() == upto
        return upto

    def end(self) -> None:
        if self.follower is not None:
            self.follower.close()

    def close(self) -> None:
        self.end()
        self.owner.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def everything(db: Any, ts: int) -> dict[str, Any]:
    """All that can be read at a snapshot."""
    found: dict[str, Any] = {}
    with db.snapshot(as_of=ts) as snap:
        for name in db.tables():
            if db.describe(name)["state"] != "ready":
                continue
            try:
                found[name] = [{key: str(value) for key, value in row.items()} for row in snap.scan(name)]
            except KiviError as error:
                found[name] = type(error)
        try:
            found["changes"] = sorted(map(str, snap.changes("events", since=max(0, ts - 5), retractions="ignore")))
        except KiviError as error:
            found["changes"] = type(error)
    return found


def steps(db: Any, chance: random.Random) -> Iterator[None]:
    """Anything that commits, for ever."""
    tables = 0
    while True:
        match chance.randrange(12):
            case 0 | 1 | 2:
                rows = [
                    {
                        "g": chance.randrange(4),
                        "ts": chance.randrange(10**9),
                        "x": chance.randrange(-9, 1_000),
                        "text": str(chance.random()),
                    }
                    for _ in range(chance.choice([1, 30, 200]))
                ]
                db.append("events", rows, late="drop")
            case 3 | 4:
                with db.transaction() as tx:
                    for _ in range(3):
                        tx.delta("rows", (chance.randrange(9),), n=chance.randrange(9))
            case 5:
                with db.transaction() as tx:
                    key = (chance.randrange(9),)
                    tx.delete("rows", key) if chance.random() < 0.4 else tx.put("rows", key, text="x", n=3)
            case 6:
                with db.transaction() as tx:
                    tx.retract("events", where=kivi.col("x") == chance.randrange(1_000))
            case 7:
                tables += 1
                db.create_table(f"t{tables}", key={"id": "int64"}, columns={"v": "string"}, history="1h")
                db.put(f"t{tables}", (1,), v="a") if hasattr(db, "put") else None
            case 8:
                name = f"a{chance.randrange(3)}"
                if name in db.tables():
                    db.drop(name)
                else:
                    db.create_aggregate(name, source="events", group_by=["g"], measures=MEASURES)
            case 9:
                name = f"c{chance.randrange(100)}"
                if name not in db.describe("rows")["columns"]:
                    db.alter_table("rows", {name: "int64"})
            case 10:
                with db.appender("events", each=True, linger_ms=0) as app:
                    for i in range(5):
                        app.append(g=1, ts=10**9 + i, x=i, text="each")
            case 11:
                db.consolidate()
        yield


@pytest.mark.parametrize("seed", range(2))
def test_it_answers_as_its_owner_does_at_every_snapshot(pair: Pair, seed: int) -> None:
    chance = random.Random(seed)
    db = pair.owner
    db.create_event_table("events", event_time="ts", columns=COLUMNS, retention=800)
    db.create_aggregate("by_g", source="events", group_by=["g", kivi.time_slot("ts", 200)], measures=MEASURES)
    db.create_table("rows", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "text": "string"}, history="1h")
    db.create_event_table("slow", event_time="ts", columns={"ts": "timestamp", "g": "int64", "x": "int64"})
    db.create_rule("slow", source="events", where=kivi.col("x") > 900, into="slow")
    doing = steps(db, chance)
    next(doing)
    pair.follow(lambda: db.append("events", [{"g": 1, "ts": 10**8 + seed, "x": 950, "text": "meanwhile"}], late="drop"))
    assert_alike(pair.db, db, pair.caught_up())
    for i in range(48):
        next(doing)
        if chance.random() < 0.1:
            pair.caught_up()
            pair.db.consolidate()
        if chance.random() < 0.05:
            pair.follow()
        if i % 6 == 0:
            upto = pair.caught_up()
            for ts in {upto, max(1, upto - chance.randrange(3))}:
                assert_alike(pair.db, db, ts)
    pair.caught_up()
    pair.db.consolidate()
    assert pair.db.store.settings.background is False
    pair.db.store.settle()
    assert_alike(pair.db, db, pair.caught_up())


def assert_alike(one: Any, other: Any, ts: int) -> None:
    """What neither of them has forgotten by then."""
    ours, theirs = everything(one, ts), everything(other, ts)
    assert ours.keys() == theirs.keys()
    for name in ours:
        if SnapshotTooOld not in (ours[name], theirs[name]):
            assert ours[name] == theirs[name], name
    assert any(isinstance(found, list) for found in ours.values())


def test_it_writes_nothing_and_says_where_to(pair: Pair) -> None:
    pair.owner.create_table("rows", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    pair.follow()
    for write in (
        lambda: pair.db.run(lambda tx: tx.delta("rows", (1,), n=1)),
        lambda: pair.db.create_table("more", key={"id": "int64"}, columns={}),
        lambda: pair.db.drop("rows"),
    ):
        with pytest.raises(InvalidArgument, match="commit at the server that owns it"):
            write()
    with pair.db.snapshot(max_staleness="1s") as snap:
        assert [*snap.scan("rows")] == []
    pair.owner.run(lambda tx: tx.delta("rows", (1,), n=1))
    with pair.db.snapshot(max_staleness=0) as snap:  # all that was acknowledged before
        assert [*snap.scan("rows")] == [{"id": 1, "n": 1}]


def test_subscriptions_of_an_earlier_version_are_read_when_their_owner_has_taken_them_over(pair: Pair) -> None:
    pair.owner.create_event_table("news", event_time="ts", columns={"ts": "timestamp", "topic": "string"})
    row = {"table": pair.owner.store.table("news").origin, "name_of_table": "news", "since": 0, "ts": 0, "skip": 0}
    query = '{"start":null,"end":null,"where":["==","topic","a"],"columns":["ts","topic"]}'
    txn = pair.owner.store.transaction()
    txn.put(EARLIER_SUBSCRIPTIONS, ("u", "0"), row | {"query": query, "ttl_us": 10**12, "expires_us": 4 * 10**15})
    pair.owner.store.commits.commit_wait(txn)
    pair.follow()
    assert pair.db.subscriptions("u") == []
    pair.owner.hub.durable.take_over()
    ts = pair.owner.append("news", [{"ts": 1_750_000_000_000_000, "topic": "a"}])
    pair.caught_up()
    assert pair.db.reached("news", ts) == [1]
    assert [one["name"] for one in pair.db.subscriptions("u")] == ["0"]


def test_a_moment_is_the_snapshot_that_it_is_for_its_owner(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was acknowledged before it is asked has a time, too, that the follower has yet to hear of."""
    pair.owner.create_table("rows", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    pair.follow()
    pair.caught_up()
    assert pair.follower is not None
    log, looks, goes_on = pair.follower._log, threading.Event(), threading.Event()
    news = log.news

    def held() -> Any:
        looks.set()
        return news() if goes_on.is_set() else []

    monkeypatch.setattr(log, "news", held)
    assert looks.wait(60)  # it was in the middle of a look, perhaps, which is over
    pair.owner.run(lambda tx: tx.delta("rows", (1,), n=1))
    moment_us = pair.owner.store.committer.now_us()
    time.sleep(0.001)
    with pytest.raises(Unavailable, match="not readable yet"):
        pair.db.store.snapshots.begin(as_of_us=moment_us, timeout_s=0.05)
    goes_on.set()
    ours, theirs = (db.store.snapshots.begin(as_of_us=moment_us) for db in (pair.db, pair.owner))
    assert ours.ts == theirs.ts == pair.owner.watermark()


def answer(db: Any, table: str, ts: int) -> Any:
    try:
        with db.snapshot(as_of=ts) as snap:
            return list(snap.scan(table))
    except SnapshotTooOld:
        return SnapshotTooOld


def test_what_its_owner_has_forgotten_of_a_history_a_copy_does_not_answer(tmp_path: Path) -> None:
    """The floor of a history is in base, in the batch that deletes what lies below it, so a copy begins with it. One
    that was made before that may still have what its owner has deleted: that is the truth, or it is refused."""
    at_s = 0.0
    pair = Pair(tmp_path, lambda: at_s or time.time())
    db = pair.owner
    db.create_table("rows", key={"id": "int64"}, columns={"x": "int64"}, history="1m")
    written: dict[int, int] = {}
    for x in range(4):
        time.sleep(0.02)
        moment_us = db.store.committer.now_us()
        time.sleep(0.02)
        written[db.run(lambda tx: tx.put("rows", (1,), x=x)) or db.watermark()] = x  # noqa: B023
        db.consolidate()
    pair.follow()
    pair.caught_up()
    at_s = moment_us / 1e6 + 60  # a minute after the third was there, and before the fourth was so long ago
    db.store.consolidator.sweep()
    forgotten = [ts for ts in written if answer(db, "rows", ts) is SnapshotTooOld]
    assert 0 < len(forgotten) < len(written)
    for ts, x in written.items():
        assert answer(pair.db, "rows", ts) in ([{"id": 1, "x": x}], SnapshotTooOld)
    pair.db.consolidate()
    pair.db.store.consolidator.sweep()  # it forgets by itself, by the same clock
    for ts in written:
        assert answer(pair.db, "rows", ts) == answer(db, "rows", ts)
    pair.clock = time.time  # and by what the copy says, whatever its own clock does
    pair.follow()
    assert [answer(pair.db, "rows", ts) for ts in forgotten] == [SnapshotTooOld] * len(forgotten)
    pair.close()


def test_it_has_the_floors_of_its_owner_and_moves_none(tmp_path: Path) -> None:
    """Floors of retention are records, so at each S both have the same: of events, of rows, and of what came late."""
    now_s = 1_000.0
    pair = Pair(tmp_path, lambda: now_s)
    db = pair.owner
    db.create_event_table("events", event_time="ts", columns=COLUMNS, retention=800)
    slot, measures = kivi.time_slot("ts", 200), {"n": kivi.count()}
    db.create_aggregate("by_g", source="events", group_by=["g", slot], measures=measures, retention=400)
    db.create_aggregate("whole", source="events", group_by=["g", slot], measures=measures)
    pair.follow()

    def append(*times: int) -> None:
        db.append("events", [{"g": 1, "ts": ts, "x": ts, "text": ""} for ts in times], late="drop")

    append(*range(500, 1_000, 50))
    before = db.watermark()
    pair.caught_up()
    held = db.snapshot(), pair.db.snapshot()
    append(2_000)
    db.consolidate()
    db.store.housekeeping.move_floors()
    append(1_100, 1_500, 1_900)  # below one floor or both, and below none
    db.consolidate()
    upto = pair.caught_up()
    for name in ("events", "by_g", "whole"):
        assert list(held[0].scan(name)) == list(held[1].scan(name))
    for snap in held:
        snap.close()
    now_s += 3e7  # a year: by its own clock all would be gone
    for _ in range(2):
        assert_alike(pair.db, db, upto)
        for name in ("events", "by_g", "whole"):
            for ts in (before, upto):
                assert floors(pair.db, name, ts) == floors(db, name, ts)
        pair.db.store.housekeeping.move_floors()
        pair.db.consolidate()
    assert [floors(db, name, upto)[0] for name in ("events", "by_g", "whole")] == [1_200, 1_600, None]
    assert floors(db, "events", upto)[1] == 1 and floors(db, "by_g", upto)[1]
    assert [floors(db, name, before)[0] for name in ("events", "by_g")] == [None, None]
    assert pair.db.watermark() == upto
    pair.close()


def floors(db: Any, name: str, ts: int) -> tuple[int | None, Any]:
    """Of a table at a snapshot; and how many events have come below them by now."""
    schema = db.store.table(name)
    return db.store.retention.seen_at(schema.id, ts), db.store.statistics(schema).get("late_dropped")


def test_who_is_left_behind_says_so_and_begins_anew(pair: Pair) -> None:
    pair.owner.create_table("rows", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "text": "string"})
    store_id, _ = read_marker(str(pair.path / "owner"))
    position = followers_copy(pair.owner.store, str(pair.path / "early"))
    for i in range(40):
        with pair.owner.transaction() as tx:
            tx.put("rows", (i,), text="x" * 2_000)
        pair.owner.consolidate()
    pair.owner.store.consolidator.flush()
    log = str(pair.path / "owner" / "log")
    with pytest.raises(LeftBehind):
        FollowedLog(log, after=position, store_id=store_id)
    with pytest.raises(NotFound, match="another store"):
        FollowedLog(log, after=position, store_id=bytes(16))
    pair.follow()
    assert everything_of(pair.db) == everything_of(pair.owner)


def everything_of(db: Any) -> list[Any]:
    with db.snapshot() as snap:
        return [*snap.scan("rows")]


def test_a_damaged_record_ends_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kivi.log.followed._PATIENCE_S", 0.2)
    pair.owner.create_table("rows", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "text": "string"})
    pair.follow()
    pair.caught_up()
    assert pair.follower is not None
    log = pair.follower.store.log
    assert isinstance(log, FollowedLog)
    real = log._files.pread
    monkeypatch.setattr(log._files, "pread", lambda fd, count, at: _flipped(real(fd, count, at)) if at >= 4096 else real(fd, count, at))  # fmt: skip  # noqa: E501
    pair.owner.run(lambda tx: tx.put("rows", (1,), text="flipped"))
    until = time.monotonic() + 10
    while log.failed is None and time.monotonic() < until:
        time.sleep(0.01)
    assert isinstance(log.failed, DataLoss) and log.failed.offset is not None
    with pytest.raises(KiviError, match="this node has stopped"):
        pair.db.snapshot().__enter__()


def _flipped(data: bytes) -> bytes:
    at = data.find(b"flipped")
    return data if at < 0 else data[:at] + b"F" + data[at + 1 :]
