"""The cold tier's places: URLs that are one place, disks that are not there, copies; none waits for another."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.cli.commands import main
from kivi.cli.offline import examine
from kivi.errors import Unavailable
from kivi.events.object_store import ObjectStore
from kivi.events.store import EventStore
from tests.store.test_cold import forget_everything, objects, opened, pins, run
from tests.store.test_settling import MINUTE, T0, append, events, files, settle_in_parts
from tests.waiting import wait_until


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold"


@pytest.fixture
def db(tmp_path: Path, cold: Path) -> Iterator[Any]:
    """600 events in settled files of about 100, none of them cold yet."""
    with opened(tmp_path / "data", cold) as db:
        settle_in_parts(db)
        yield db


def test_two_spellings_of_a_url_are_one_place_and_no_live_object_is_deleted(
    tmp_path: Path, cold: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(cold)
    urls = [f"file://{cold}/mnt", f"file://{cold}/./mnt", f"file://{cold}//mnt", f"file://{tmp_path}/link/mnt"]
    urls += [f"file://{cold}"]  # one above
    names = [f"t{i}" for i in range(len(urls))]
    with kivi.open(tmp_path / "data", background=False, block_rows=64) as db:
        for name, url in zip(names, urls, strict=True):
            db.create_event_table(
                name, event_time="ts", columns={"ts": "timestamp", "k": "int64"}, local="1m", cold=url
            )
            db.append(name, [{"ts": T0 + i * MINUTE, "k": i} for i in range(300)])
        db.consolidate()
        db.store.settle(100)
        assert db.store.cooler.cool() >= len(urls)
        backup = db.backup(tmp_path / "backups")
        db.drop(names[0])
        db.consolidate()
        for _ in range(10):
            db.store.housekeeping.step()
        db.store.cooler.cool()
        with db.snapshot() as snapshot:
            for name in names[1:]:
                assert [row["k"] for row in snapshot.scan(name)] == list(range(300))
        live = {one.key for one in db.store.event_tables.objects_in_use()}
    capsys.readouterr()
    run(["orphans", str(tmp_path / "data"), "-o", "json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"/".join(one["object"].split("/")[-3:]) for one in found}.isdisjoint(live)
    assert {one["pinned_for"] for one in found} == {backup["path"]}, "what the dropped table left"


def retracted(db: Any, table: str, condition: Any) -> None:
    """Their settled files become others, and what was cold of them is garbage."""
    with db.transaction() as tx:
        tx.retract(table, where=condition)
    db.consolidate()
    db.store.consolidator.flush()
    db.store.settle(100)


def test_an_object_store_that_cannot_be_reached_holds_no_other_up(tmp_path: Path, cold: Path) -> None:
    with kivi.open(tmp_path / "data", background=False, block_rows=64, cold_timeout_s=1.0) as db:
        for name, where in (("a", "away"), ("b", "good"), ("c", "away")):
            url = f"file://{cold}/{where}"
            db.create_event_table(
                name, event_time="ts", columns={"ts": "timestamp", "k": "int64"}, local="1m", cold=url
            )

        def fill(first: int) -> None:
            for name in "abc":
                db.append(name, [{"ts": T0 + i * MINUTE, "k": i} for i in range(first, first + 300)])
            db.consolidate()
            db.store.settle(100)

        fill(0)
        assert db.store.cooler.cool() >= 3
        before = set(objects(cold / "good"))
        for name in "abc":
            retracted(db, name, kivi.col("k") < 50)
        fill(300)
        (cold / "away").rename(cold / "aside")
        (cold / "away").touch()  # it is there, and no directory
        began = time.monotonic()
        with pytest.raises(Unavailable, match="/away/"):
            db.store.cooler.cool()
        assert time.monotonic() - began < 15
        now = set(objects(cold / "good"))
        assert now - before and before - now, "moved, and swept"
        (cold / "away").unlink()
        (cold / "aside").rename(cold / "away")
        assert db.store.cooler.cool() > 0
        assert len(objects(cold)) == db.stats()["cold_files"]
        with db.snapshot() as snapshot:
            for name in "abc":
                assert [row["k"] for row in snapshot.scan(name)] == list(range(50, 600))


@pytest.mark.parametrize("what", ["backup", "close"])
def test_nothing_waits_for_a_whole_sweep(
    tmp_path: Path, cold: Path, db: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    db.store.cooler.cool()
    retracted(db, "calls", kivi.col("k") < 600)
    real, asked = ObjectStore.delete, list[str]()
    copying = threading.Thread(target=db.backup, args=(tmp_path / "backups",))

    def delete(self: ObjectStore, keys: list[str]) -> None:
        for key in keys:
            if not asked and what == "backup":
                copying.start()
                wait_until(lambda: db.store.cold._copying)
            elif not asked:
                db.store.cooler._stop.set()
            asked.append(key)
            real(self, [key])

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "delete", delete)
        db.store.cooler.cool()
    assert len(asked) == 1 and objects(cold)
    if what == "backup":
        copying.join()
    else:
        db.store.cooler._stop.clear()
    db.store.cooler.cool()
    assert len(objects(cold)) == db.stats()["cold_files"]


def test_a_disk_that_is_not_mounted_takes_and_loses_nothing(tmp_path: Path, cold: Path, db: Any) -> None:
    db.store.cooler.cool()
    append(db, 600, 200, late=0)
    retracted(db, "calls", kivi.col("k") < 50)
    before, here = events(db), files(tmp_path / "data")
    db.close()
    shutil.rmtree(tmp_path / "data/cold/cache")
    cold.rename(tmp_path / "disk")
    cold.mkdir()  # where the disk belongs
    with opened(tmp_path / "data", cold) as again:
        assert again.stats()["cold_uploads_waiting"] > 0
        calls = (again.store.cooler.cool, lambda: events(again), lambda: again.backup(tmp_path / "backups"))
        for call in calls:
            with pytest.raises(Unavailable, match=rf"^file://{cold}/\w+ is missing, .*: mount the disk or share"):
                call()
        assert files(tmp_path / "data") == here and not list(cold.iterdir())
        assert again.stats()["cold_deleted"] == 0
        cold.rmdir()
        (tmp_path / "disk").rename(cold)
        assert events(again) == before
        assert again.store.cooler.cool() > 0
        assert events(again) == before
        assert len(objects(cold)) == again.stats()["cold_files"]


def test_a_hard_link_of_its_owner_does_not_make_a_copy_the_store(tmp_path: Path, cold: Path, db: Any) -> None:
    db.store.cooler.cool()
    before, there = events(db), objects(cold)
    db.close()
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    (tmp_path / "copy/cold/OWNER").unlink()
    (tmp_path / "copy/cold/OWNER").hardlink_to(tmp_path / "data/cold/OWNER")  # as ``cp -al`` does
    with opened(tmp_path / "copy", cold) as copy:
        forget_everything(copy)
    assert objects(cold) == there
    with opened(tmp_path / "data", cold) as db:
        assert events(db) == before
        forget_everything(db)
    assert not objects(cold)


def test_what_is_restored_is_pinned_before_it_is_verified(
    tmp_path: Path, cold: Path, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.store.cooler.cool()
    backup = db.backup(tmp_path / "backups")["path"]
    there, mine = objects(cold), pins(cold)
    real = EventStore.check_files

    def check_files(self: EventStore) -> int:
        """Meanwhile the backup and the table that it is of are deleted."""
        if len(objects(cold)) == len(there):
            for pin in mine:
                pin.unlink()
            forget_everything(db)
        return real(self)

    with monkeypatch.context() as patched:
        patched.setattr(EventStore, "check_files", check_files)
        run(["restore", backup, str(tmp_path / "restored")])
    assert objects(cold) == there
    with opened(tmp_path / "restored", cold) as restored:
        assert len(events(restored)) == 600
    now = pins(cold)
    there[0].write_bytes(b"x")
    assert main(["restore", backup, str(tmp_path / "another")]) != 0
    assert pins(cold) == now, "what is not made pins nothing"


def test_a_backup_that_could_not_be_removed_keeps_its_pins(
    tmp_path: Path, cold: Path, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.store.cooler.cool()
    old = db.backup(tmp_path / "backups")["path"]
    append(db, 600, 10)
    real_rename, real_rmtree = os.rename, shutil.rmtree

    def rename(source: Any, target: Any) -> None:
        if str(source) == old:
            raise PermissionError(13, "injected")
        real_rename(source, target)

    def rmtree(path: Any, ignore_errors: bool = False) -> None:
        if str(path) != old:
            real_rmtree(path, ignore_errors=ignore_errors)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", rename)
        patched.setattr(shutil, "rmtree", rmtree)
        db.backup(tmp_path / "backups", keep=1)
    assert len(pins(cold)) == 2 and examine(old)["result"] == "good"
    append(db, 610, 10)
    db.backup(tmp_path / "backups", keep=1)
    assert len(pins(cold)) == 1 and not Path(old).exists()
