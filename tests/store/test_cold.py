"""The cold tier: settled files in an object store are the same events; here a directory, as ``file://``.

What a real object store and a network between can do is in ``test_object_stores``; what several URLs, disks and copies
can do to each other, in ``test_cold_places``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.cli.commands import main
from kivi.cli.offline import examine
from kivi.errors import DataLoss, DiskFull, InvalidArgument, SchemaError, Unavailable
from kivi.events.cold_tier import ColdObject
from kivi.events.object_store import ObjectMissing, ObjectStore
from kivi.events.range_cache import RangeCache
from kivi.events.store import EventStore
from tests.serverproc import ServerProcess
from tests.store.test_settling import COLUMNS, MINUTE, T0, append, events, files, settle_in_parts, sums
from tests.waiting import wait_until


def opened(path: Path, cold: Path, **settings: Any) -> Any:
    db = kivi.open(path, background=False, block_rows=64, **settings)
    if "calls" not in db.tables():
        db.create_event_table("calls", event_time="ts", columns=COLUMNS, local="100m", cold=f"file://{cold}")
    return db


def objects(cold: Path) -> list[Path]:
    return sorted(cold.rglob("*.parquet"))


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold"


@pytest.fixture
def db(tmp_path: Path, cold: Path) -> Iterator[Any]:
    """600 events in settled files of about 100, none of them cold yet; those of the first 500 minutes may be."""
    with opened(tmp_path / "data", cold) as db:
        settle_in_parts(db)
        yield db


def test_r23_cold_events_are_the_same_events_in_the_same_order(
    tmp_path: Path, cold: Path, db: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    where = {"where": (kivi.col("s") == "s3") & (kivi.col("d") > 2)}
    spans = {"start": T0 + 100 * MINUTE, "end": T0 + 350 * MINUTE}
    before = events(db), sums(db), sums(db, **where), sums(db, **spans)
    with db.snapshot() as snapshot:
        backwards = list(snapshot.scan("calls", reverse=True, **spans))
    here = len(files(tmp_path / "data"))
    assert db.stats()["cold_uploads_waiting"] > 0
    moved = db.store.cooler.cool()
    assert moved > 2 and len(objects(cold)) == moved and len(files(tmp_path / "data")) == here - moved
    stats = db.stats()
    assert stats["cold_files"] == moved and stats["cold_uploads_waiting"] == 0
    assert stats["cold_bytes"] == sum(path.stat().st_size for path in objects(cold)) == stats["cold_uploaded_bytes"]
    assert stats["local_bytes"] == sum(path.stat().st_size for path in files(tmp_path / "data")) > 0
    assert (events(db), sums(db), sums(db, **where), sums(db, **spans)) == before
    with db.snapshot() as snapshot:
        assert list(snapshot.scan("calls", reverse=True, **spans)) == backwards
    db.close()
    with opened(tmp_path / "data", cold) as again:
        assert (events(again), sums(again)) == before[:2]
    assert "settled files intact" in examine(str(tmp_path / "data"))["calls"]
    capsys.readouterr()
    run(["dump", str(tmp_path / "data")])
    dumped = capsys.readouterr().out
    assert all(f"cold: file://{cold} {path.relative_to(cold)}" in dumped for path in objects(cold))
    assert len(objects(cold)) == moved


def test_only_what_is_asked_for_is_fetched_and_once(cold: Path, db: Any) -> None:
    db.store.cooler.cool()
    assert db.stats()["cold_fetched_bytes"] == 0
    assert sums(db)["n"] == 600  # from the manifest, but for sums of floats
    whole = db.stats()
    with db.snapshot() as snapshot:
        assert snapshot.summary("calls", {"n": kivi.count(), "k": kivi.sum("k")})["k"] == sum(range(600))
    assert db.stats()["cold_fetched_bytes"] == whole["cold_fetched_bytes"]
    spans = {"start": T0 + 10 * MINUTE, "end": T0 + 12 * MINUTE}
    with db.snapshot() as snapshot:
        assert len(list(snapshot.scan("calls", columns=["b"], **spans))) > 0
    once = db.stats()
    assert 0 < once["cold_fetched_bytes"] - whole["cold_fetched_bytes"] < once["cold_bytes"] // 2
    with db.snapshot() as snapshot:
        assert len(list(snapshot.scan("calls", columns=["b"], **spans))) > 0
    twice = db.stats()
    assert twice["cold_fetched_bytes"] == once["cold_fetched_bytes"]
    assert twice["cold_cache_hits"] > once["cold_cache_hits"]


def test_the_cache_is_bounded_outlives_the_process_and_may_be_damaged(tmp_path: Path, cold: Path, db: Any) -> None:
    db.store.cooler.cool()
    before = events(db)
    everything = db.stats()["cold_cache_bytes"]
    db.close()
    cache = tmp_path / "data/cold/cache"
    with opened(tmp_path / "data", cold) as again:
        assert events(again) == before and again.stats()["cold_fetched_bytes"] == 0
    for path in cache.iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    with opened(tmp_path / "data", cold) as again:
        assert events(again) == before and again.stats()["cold_fetched_bytes"] > 0
    with opened(tmp_path / "data", cold, cold_cache_bytes=everything // 4) as again:
        for _ in range(2):
            assert events(again) == before
            assert 0 < again.stats()["cold_cache_bytes"] <= everything // 4
            assert sum(path.stat().st_size for path in cache.iterdir()) <= everything // 4


def test_the_least_recently_used_range_goes_first(tmp_path: Path) -> None:
    cache = RangeCache(str(tmp_path / "cache"), 100)
    for at in (0, 1, 2):
        cache.put("a", at, bytes(30))
    assert cache.get("a", 0, 30) == bytes(30)
    cache.put("b", 0, bytes(30))
    assert cache.get("a", 1, 30) is None and cache.get("a", 0, 30) is not None and cache.get("b", 0, 30) is not None
    cache.put("c", 0, bytes(101))
    assert cache.get("c", 0, 101) is None and cache.nbytes == 90
    assert cache.get("a", 0, 29) is None  # of another length: it is not what it was


def test_late_events_and_retractions_make_other_files_and_nothing_is_left(tmp_path: Path, cold: Path, db: Any) -> None:
    db.store.cooler.cool()
    names = {path.name for path in objects(cold)}
    for first in range(600, 3_000, 100):
        append(db, first, 100, late=0.9, reach=2_000)
        db.store.settle(100)
        db.store.cooler.cool()
    with db.transaction() as tx:
        tx.retract("calls", where=kivi.col("k") == 7)
    db.consolidate()
    db.store.consolidator.flush()
    for _ in range(2):
        db.store.settle(100)
        db.store.cooler.cool()
    assert [row["k"] for row in events(db)] == [k for k in range(3_000) if k != 7]
    assert not names <= {path.name for path in objects(cold)}
    stats = db.stats()
    assert len(objects(cold)) == stats["cold_files"] and stats["cold_deleted"] > 0
    assert len(files(tmp_path / "data")) == stats["settled_files"] - stats["cold_files"]
    db.store.consolidator.compact()
    assert db.describe("calls")["statistics"]["retracted_in_blocks"] == 0


def test_a_reader_keeps_the_objects_it_may_need(cold: Path, db: Any) -> None:
    db.store.cooler.cool()
    names = {path.name for path in objects(cold)}
    with db.snapshot() as snapshot:
        scan = snapshot.scan("calls")
        first = next(iter(scan))
        for start in range(600, 3_000, 100):
            append(db, start, 100, late=0.9, reach=2_000)
        db.store.settle(100)
        db.store.cooler.cool()
        assert names <= {path.name for path in objects(cold)}
        assert len([first, *scan]) == 600
    db.store.settle(100)
    db.store.cooler.cool()
    assert len(objects(cold)) == db.stats()["cold_files"]
    assert not names <= {path.name for path in objects(cold)}


def test_retention_deletes_objects_and_a_dropped_table_leaves_none(tmp_path: Path, cold: Path) -> None:
    with kivi.open(tmp_path / "data", background=False, block_rows=64) as db:
        url = f"file://{cold}"
        db.create_event_table("calls", event_time="ts", columns=COLUMNS, retention="300m", local="100m", cold=url)
        for first in range(0, 500, 100):
            append(db, first, 100, late=0)
            db.store.settle(100)
        db.store.cooler.cool()
        before = len(objects(cold))
        for _ in range(3):
            db.store.housekeeping.move_floors()
            db.consolidate()
        db.store.cooler.cool()
        assert 0 < len(objects(cold)) < before
        assert [row["k"] for row in events(db)] == list(range(199, 500))
        db.drop("calls")
        db.consolidate()
        for _ in range(10):
            db.store.housekeeping.step()
        db.store.cooler.cool()
        assert not objects(cold) and not files(tmp_path / "data")


POINTS = {
    "uploaded": (ObjectStore, "write"),
    "read back": (ObjectStore, "read_whole"),
    "swapped": (EventStore, "retire"),
    "deleted here": (EventStore, "delete_files"),
    "deleted there": (ObjectStore, "delete"),
}


@pytest.mark.parametrize("at", POINTS)
def test_a_crash_at_any_point_leaves_events_where_a_row_names_them(
    tmp_path: Path, cold: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    class Crash(BaseException):
        pass

    db = opened(tmp_path / "data", cold)
    for first in range(0, 600, 100):
        append(db, first, 100)
        db.store.settle(100)
    if at == "deleted there":
        db.store.cooler.cool()
        with db.transaction() as tx:
            tx.retract("calls", where=kivi.col("k") < 50)
        db.consolidate()
        db.store.consolidator.flush()
        db.store.settle(100)
    before = events(db)
    owner, name = POINTS[at]
    real = getattr(owner, name)

    def crash(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        raise Crash

    with monkeypatch.context() as patched, pytest.raises(Crash):
        patched.setattr(owner, name, crash)
        db.store.cooler.cool()
    db.store.crash()
    with opened(tmp_path / "data", cold) as again:
        assert events(again) == before
        again.store.settle(100)
        again.store.cooler.cool()
        assert events(again) == before
        stats = again.stats()
        assert len(objects(cold)) == stats["cold_files"] > 0
        assert len(files(tmp_path / "data")) == stats["settled_files"] - stats["cold_files"]


def test_a_file_is_deleted_here_only_after_the_same_bytes_came_back(
    tmp_path: Path, cold: Path, monkeypatch: pytest.MonkeyPatch, db: Any
) -> None:
    here, real = files(tmp_path / "data"), ObjectStore.write

    def torn(self: ObjectStore, key: str, data: bytes) -> None:
        real(self, key, data[:-1] + b"?")

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "write", torn)
        with pytest.raises(DataLoss, match=r"parquet is not what was written to it: its events stay here"):
            db.store.cooler.cool()
    assert files(tmp_path / "data") == here and db.stats()["cold_files"] == 0
    db.store.cooler.cool()
    assert len(objects(cold)) == db.stats()["cold_files"] > 0


def test_a_damaged_file_does_not_move_and_the_others_do(tmp_path: Path, cold: Path, db: Any) -> None:
    path = files(tmp_path / "data")[0]
    raw = path.read_bytes()
    path.write_bytes(raw[:50] + bytes([raw[50] ^ 1]) + raw[51:])
    with pytest.raises(DataLoss, match=path.name):
        db.store.cooler.cool()
    db.store.cooler.cool()
    assert path.exists() and db.stats()["cold_files"] > 1


def test_an_object_that_is_gone_or_damaged_is_named_and_other_questions_go_on(cold: Path, db: Any) -> None:
    db.store.cooler.cool()
    victim = min(objects(cold), key=lambda path: int(path.name.split("-")[0]))
    raw = victim.read_bytes()
    late = {"start": T0 + 400 * MINUTE}
    before = sums(db, **late)
    for damaged in (raw[:-1], raw + b"x", raw[:50] + bytes([raw[50] ^ 1]) + raw[51:], None):
        shutil.rmtree(db.store.parts.path + "/cold/cache", ignore_errors=True)
        victim.unlink() if damaged is None else victim.write_bytes(damaged)
        db.store.cold.store(f"file://{cold}")._handle.cache_clear()
        with pytest.raises(DataLoss, match=rf"{victim.name} of event table 'calls' is .*restore a backup") as caught:
            events(db)
        assert caught.value.path.endswith(victim.name)
        assert sums(db, **late) == before
        append(db, 10_000, 10, late=0)
        with db.transaction() as tx:
            tx.retract("calls", where=kivi.col("k") >= 10_000, start=T0 + 9_000 * MINUTE)
        db.consolidate()
    victim.write_bytes(raw)
    db.store.cold.store(f"file://{cold}")._handle.cache_clear()
    assert len(events(db)) == 600


def test_a_table_of_a_store_in_memory_has_no_cold_tier(tmp_path: Path) -> None:
    with kivi.open() as db, pytest.raises(InvalidArgument, match="store in memory has no cold tier"):
        db.create_event_table("calls", event_time="ts", columns=COLUMNS, local="1d", cold=f"file://{tmp_path}")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"local": "1d"}, "come together"),
        ({"cold": "file:///x"}, "come together"),
        ({"local": "1d", "cold": "bucket/prefix"}, "is the URL of an object store"),
        ({"local": "1d", "cold": "file:///a/../b"}, "is the URL of an object store"),
        ({"local": "1d", "cold": "file:///a b"}, "as %20"),
        ({"local": "1d", "cold": "s3://"}, "is the URL of an object store"),
        ({"local": "1d", "cold": 7}, "is the URL of an object store"),
        ({"local": "1d", "cold": "s3://key:secret@bucket/x"}, "has a secret in it"),
        ({"local": "soon", "cold": "file:///x"}, "local"),
    ],
)
def test_what_cannot_be_a_cold_tier_is_refused(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with kivi.open(tmp_path / "data", background=False) as db:
        with pytest.raises((InvalidArgument, SchemaError), match=why):
            db.create_event_table("calls", event_time="ts", columns=COLUMNS, **options)
        assert not db.tables()


def test_a_table_whose_object_store_cannot_be_reached_is_not_created(tmp_path: Path) -> None:
    with kivi.open(tmp_path / "data", background=False, cold_timeout_s=0.2) as db:
        with pytest.raises(Unavailable, match="nonsense://bucket/x/.* cannot be reached .*: look at .* its URL"):
            db.create_event_table("calls", event_time="ts", columns=COLUMNS, local="1d", cold="nonsense://bucket/x")
        assert not db.tables()


def test_in_the_background_old_files_move(tmp_path: Path, cold: Path) -> None:
    settings = {
        "settle": True,
        "settle_idle_s": 0.1,
        "settle_every_s": 0.02,
        "fold_every_s": 0.05,
        "cold_every_s": 0.05,
    }
    with kivi.open(tmp_path / "data", **settings) as db:
        url = f"file://{cold}"
        db.create_event_table("calls", event_time="ts", columns=COLUMNS, local="1m", cold=url)
        db.append("calls", [{"ts": T0 + i, "k": i} for i in range(1_000)])
        db.append("calls", [{"ts": T0 + 10 * MINUTE, "k": 1_000}])
        wait_until(
            lambda: db.stats()["cold_bytes"] and not db.stats()["cold_uploads_waiting"], reason=db.stats, pause_s=0.02
        )
        assert objects(cold)
        assert [row["k"] for row in events(db)] == list(range(1_001))


def test_of_two_stores_with_one_directory_of_objects_neither_touches_the_others(tmp_path: Path, cold: Path) -> None:
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(opened(tmp_path / name, cold)) for name in ("a", "b")]
        for db in stores:
            for first in range(0, 600, 100):
                append(db, first, 100)
                db.store.settle(100)
            db.store.cooler.cool()
        one, other = stores
        one.drop("calls")
        one.consolidate()
        for _ in range(10):
            one.store.housekeeping.step()
        one.store.cooler.cool()
        assert len(objects(cold)) == other.stats()["cold_files"] > 0
        assert len(events(other)) == 600


def test_a_directory_that_was_copied_by_hand_writes_under_a_generation_of_its_own(tmp_path: Path, cold: Path) -> None:
    with opened(tmp_path / "data", cold) as db:
        settle_in_parts(db)
        db.store.cooler.cool()
        before = events(db)
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    there = objects(cold)
    with opened(tmp_path / "copy", cold) as copy:
        with copy.transaction() as tx:
            tx.retract("calls", where=kivi.col("s") == "s1")
        copy.consolidate()
        copy.store.consolidator.flush()
        for _ in range(3):
            copy.store.settle(100)
            copy.store.cooler.cool()
        assert events(copy) == [row for row in before if row["s"] != "s1"]
        assert set(there) < set(objects(cold))
    with opened(tmp_path / "data", cold) as db:
        db.store.cooler.cool()
        assert events(db) == before
    assert set(there) < set(objects(cold))


def test_a_client_declares_a_cold_tier_and_is_told_of_it(tmp_path: Path, cold: Path) -> None:
    url = f"file://{cold}"
    with ServerProcess(tmp_path / "data") as server, server.connect() as client:
        client.create_event_table("calls", event_time="ts", columns=COLUMNS, local="2d", cold=url + "/")
        described = client.describe("calls")
        assert (described["local_us"], described["cold"]) == (2 * 86_400_000_000, url)
        assert client.stats()["cold_uploads_waiting"] == 0
    with opened(tmp_path / "data", cold) as db:
        assert db.store.table("calls").cold == url


# -- copies ------------------------------------------------------------------------------------------


def forget_everything(db: Any) -> None:
    """Drops the table, and lets go of whatever nobody needs then."""
    db.drop("calls")
    db.consolidate()
    for _ in range(10):
        db.store.housekeeping.step()
    db.store.cooler.cool()


def pins(cold: Path) -> list[Path]:
    return sorted(cold.rglob("*.json"))


def test_no_object_is_deleted_while_a_backup_names_it(tmp_path: Path, cold: Path, db: Any) -> None:
    db.store.cooler.cool()
    before = events(db)
    first = db.backup(tmp_path / "backups")
    db.checkpoint(str(tmp_path / "checkpoint"))
    there = objects(cold)
    assert there and len(pins(cold)) == 2 and not list(Path(first["path"]).rglob("cold"))
    forget_everything(db)
    assert objects(cold) == there
    for copy in (Path(first["path"]), tmp_path / "checkpoint"):
        assert f"{len(there)} of them in the cold tier" in examine(str(copy))["calls"]
        with opened(copy, cold) as restored:
            assert events(restored) == before
            forget_everything(restored)
        assert objects(cold) == there
    (checkpointed,) = [pin for pin in pins(cold) if "checkpoint" in pin.read_text()]
    checkpointed.unlink()  # as whoever deletes a checkpoint does
    db.create_table("more", key={"id": "int64"}, columns={})
    db.backup(tmp_path / "backups", keep=1)
    assert not pins(cold)
    db.store.cooler.cool()
    assert not objects(cold)


def test_a_backup_that_fails_pins_nothing(tmp_path: Path, cold: Path, monkeypatch: pytest.MonkeyPatch, db: Any) -> None:
    db.store.cooler.cool()

    def full(*_: Any) -> None:
        raise OSError(28, "injected")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", full)
        for copy in (lambda: db.backup(tmp_path / "backups"), lambda: db.checkpoint(str(tmp_path / "checkpoint"))):
            with pytest.raises(DiskFull):
                copy()
            assert not pins(cold)
    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "write", lambda *_: (_ for _ in ()).throw(Unavailable("injected")))
        with pytest.raises(Unavailable, match="injected"):
            db.backup(tmp_path / "backups")
    assert not list((tmp_path / "backups").glob("2*"))


def test_pins_are_all_there_or_none_is(cold: Path, monkeypatch: pytest.MonkeyPatch, db: Any) -> None:
    db.store.cooler.cool()
    url, write, written = f"file://{cold}", ObjectStore.write, list[str]()
    for generation in ("g1", "g2"):
        db.store.cold.store(url).make(generation)

    def half(self: ObjectStore, key: str, data: bytes) -> None:
        write(self, key, data)
        written.append(key)
        if len(written) == 2:  # it is there, and nobody knows
            raise Unavailable("injected")

    monkeypatch.setattr(ObjectStore, "write", half)
    with pytest.raises(Unavailable, match="injected"):
        db.store.cold.pin([ColdObject(url, f"{each}/1/1.parquet") for each in ("g1", "g2")], "copy")
    assert len(written) == 2 and not pins(cold)


def test_what_settling_reads_of_cold_files_takes_no_room_in_the_cache(db: Any) -> None:
    assert db.store.cooler.cool() > 2
    with db.transaction() as tx:
        assert tx.retract("calls", start=T0, end=T0 + 300 * MINUTE)
    before = db.stats()
    db.consolidate()
    db.store.settle()
    after = db.stats()
    fetched, cached = (after[name] - before[name] for name in ("cold_fetched_bytes", "cold_cache_bytes"))
    assert fetched > cached
    assert len(events(db)) and db.stats()["cold_cache_bytes"] > after["cold_cache_bytes"]


def test_what_is_restored_reads_the_objects_and_deletes_none_of_them(tmp_path: Path, cold: Path, db: Any) -> None:
    db.store.cooler.cool()
    before, there = events(db), objects(cold)
    db.backup(tmp_path / "backups")
    run(["restore", str(tmp_path / "backups"), str(tmp_path / "restored")])
    assert len(pins(cold)) == 2
    with opened(tmp_path / "restored", cold) as restored:
        assert events(restored) == before
        append(restored, 600, 300, late=0.9)
        with restored.transaction() as tx:
            tx.retract("calls", where=kivi.col("s") == "s1")
        restored.consolidate()
        restored.store.consolidator.flush()
        for _ in range(2):
            restored.store.settle(100)
            restored.store.cooler.cool()
        assert set(there) < set(objects(cold))
        forget_everything(restored)
        assert objects(cold) == there
    assert events(db) == before
    db.close()
    run(["backup", str(tmp_path / "data"), str(tmp_path / "copy")])
    assert len(pins(cold)) == 3 and not (tmp_path / "copy/cold").exists()


def test_orphans_are_listed_and_stay(tmp_path: Path, cold: Path, db: Any, capsys: pytest.CaptureFixture[str]) -> None:
    db.store.cooler.cool()
    backup = db.backup(tmp_path / "backups")
    orphan = cold / "0123456789abcdef/17/1-00000000.parquet"
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"x")
    with db.transaction() as tx:
        tx.retract("calls", where=kivi.col("k") < 100)
    db.consolidate()
    db.store.consolidator.flush()
    for _ in range(2):
        db.store.settle(100)
        db.store.cooler.cool()
    named = {one.key for one in db.store.event_tables.objects_in_use()}
    db.close()
    capsys.readouterr()
    run(["orphans", str(tmp_path / "data"), str(tmp_path / "backups")])
    assert capsys.readouterr().out == f"file://{orphan}\n"
    run(["orphans", str(tmp_path / "data"), "-o", "json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    pinned = {one["object"] for one in found if one["pinned_for"] == backup["path"]}
    assert {one["object"] for one in found} - pinned == {f"file://{orphan}"}
    assert pinned == {f"file://{path}" for path in objects(cold) if str(path.relative_to(cold)) not in named} - {
        f"file://{orphan}"
    }
    assert pinned and orphan.exists()


def run(arguments: list[str]) -> None:
    assert main(arguments) == 0


# -- retractions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [False, True])
def test_a_retraction_of_cold_events_waits_for_no_object_store(
    cold: Path, monkeypatch: pytest.MonkeyPatch, db: Any, gone: bool
) -> None:
    db.store.cooler.cool()
    before = events(db)
    since = db.watermark()
    with db.transaction() as tx:
        tx.retract("calls", where=kivi.col("s") == "s1")
        tx.retract("calls", where=kivi.col("k") == 599)
    shutil.rmtree(db.store.parts.path + "/cold/cache")
    with monkeypatch.context() as patched:
        why: Exception = ObjectMissing("injected") if gone else Unavailable("injected")
        patched.setattr(ObjectStore, "read", lambda *_: (_ for _ in ()).throw(why))
        db.consolidate()
        for _ in range(2):
            db.store.settle(100)
        db.store.consolidator.flush()
        append(db, 600, 10)
        with db.snapshot() as snapshot, pytest.raises((DataLoss, Unavailable)):
            list(snapshot.scan("calls"))
    with monkeypatch.context() as patched:
        patched.setattr("kivi.events.settling._AGAIN_S", 0.0)
        left = [row for row in before if row["s"] != "s1" and row["k"] != 599]
        assert [row["k"] for row in events(db)][: len(left)] == [row["k"] for row in left]
        with db.snapshot(as_of=since) as snapshot:
            assert list(snapshot.scan("calls")) == before
        assert db.describe("calls")["statistics"]["retracted_in_blocks"] >= 121
        measures = {"n": kivi.count(), "k": kivi.sum("k")}
        with db.snapshot() as snapshot:
            found = snapshot.summary("calls", measures, end=T0 + 2_000 * MINUTE)
        assert found["n"] == len(left) + 10
        table = db.store.event_tables.of(db.store.table("calls").id)
        with table.view(db.watermark()) as view:
            (cts,) = {one.cts for file in view.files for one in file.named}
            names = [row for batch in view.removed(cts, since, ["k"]) for row in batch.column("k").to_pylist()]
        assert names == [row["k"] for row in before if row["s"] == "s1" or row["k"] == 599]
        table.settling._passed_over.clear()
        for _ in range(3):
            db.store.settle(100)
            db.store.cooler.cool()
        assert not any(file.named for file in table.files())
        assert [row["k"] for row in events(db)][: len(left)] == [row["k"] for row in left]
        db.store.consolidator.compact()
        assert db.describe("calls")["statistics"]["retracted_in_blocks"] == 0
        assert len(objects(cold)) == db.stats()["cold_files"]


def test_sql_reads_cold_files_too(cold: Path, db: Any) -> None:
    pytest.importorskip("duckdb")
    statement = "select s, count(*) as n, sum(k) as k, min(d) as d from calls where k % 3 = 1 group by all order by s"
    with db.snapshot() as snapshot:
        before = snapshot.sql(statement).to_pylist()
    assert db.store.cooler.cool() > 0 and db.stats()["cold_fetched_bytes"] == 0
    with db.snapshot() as snapshot:
        assert snapshot.sql(statement).to_pylist() == before
    assert db.stats()["cold_fetched_bytes"] > 0
    with db.transaction() as tx:
        tx.retract("calls", where=kivi.col("k") < 300)
    db.consolidate()
    with db.snapshot() as snapshot:
        assert snapshot.sql("select count(*) as n, min(k) as k from calls").to_pylist() == [{"n": 300, "k": 300}]
