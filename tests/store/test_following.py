"""A follower is its owner at every snapshot: whatever is committed, folded, rolled and truncated meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.embedded.database import Database
from kivi.errors import DataLoss, InvalidArgument, KiviError, NotFound, SnapshotTooOld
from kivi.log.followed import FollowedLog, LeftBehind
from kivi.runtime.settings import Settings
from kivi.store.checkpoint import followers_copy
from kivi.store.facade import Store
from kivi.store.following import Follower, open_follower
from kivi.store.opening import read_marker
from tests.waiting import wait_until

COLUMNS = {"g": "int64", "ts": "timestamp", "x": "int64", "text": "string"}
MEASURES = {"n": kivi.count(), "s": kivi.sum("x"), "p": kivi.quantiles("x"), "last": kivi.last("text")}


class Pair:
    """An owner with small segments, and its follower."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.copies = 0
        settings = Settings(segment_bytes=16 << 10, block_rows=50, background=False)
        self.owner = Database(Store.open(str(path / "owner"), settings=settings))
        self.follower: Follower | None = None
        self.db: Any = None

    def follow(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """``meanwhile``: what the owner does between the copy and its opening."""
        self.end()
        self.copies += 1
        copy = str(self.path / f"copy{self.copies}")
        followers_copy(self.owner.store, copy)
        meanwhile()
        self.follower = open_follower(copy, str(self.path / "owner" / "log"), Settings(block_rows=70, background=False))
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
