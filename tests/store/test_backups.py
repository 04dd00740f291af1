"""Backups of a store that goes on: whole, shared, restored to the same answers at the same timestamps."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.cli.commands import main
from kivi.store import backups
from tests.serverproc import ServerProcess

TS = 1_767_268_800_000_000
SMALL = {"flush_bytes": 0, "block_rows": 1_000}


def fill(db: Any, begin: int, rows: int) -> None:
    db.append("calls", [{"endpoint": i % 50, "ts": TS + i, "us": i * 7} for i in range(begin, begin + rows)])


def opened(path: Path, **settings: Any) -> Any:
    db = kivi.open(path, **{**SMALL, **settings})
    if "calls" not in db.tables():
        db.create_event_table("calls", event_time="ts", columns={"endpoint": "int64", "ts": "timestamp", "us": "int64"})
        db.create_aggregate(
            "by_endpoint", source="calls", group_by=["endpoint"], measures={"us": kivi.sum("us"), "n": kivi.count()}
        )
        db.create_table("accounts", key={"id": "int64"}, columns={"n": kivi.sum("int64")}, history="1h")
    return db


def answers(db: Any, as_of: Any = None) -> Any:
    with db.snapshot(as_of=as_of) as snapshot:
        return (
            snapshot.ts,
            snapshot.to_arrow("calls").to_pylist(),
            [] if as_of else list(snapshot.scan("by_endpoint")),
            list(snapshot.scan("accounts")),
        )


def test_a_backup_opens_by_itself_and_gives_the_same_answers_at_the_same_timestamps(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as db:
        fill(db, 0, 3_000)
        past = []
        for i in range(5):
            with db.transaction() as tx:
                tx.delta("accounts", (i % 2,), n=i)
            past.append((tx.commit_ts, answers(db, tx.commit_ts)))
        made = db.backup(tmp_path / "backups")
        now = answers(db)
        fill(db, 3_000, 500)  # is not in it
    assert made["watermark"] == now[0] and made["shared_bytes"] == 0 < made["copied_bytes"]
    with kivi.open(made["path"]) as restored:
        assert answers(restored)[1:] == now[1:]
        for ts, expected in past:
            assert answers(restored, ts) == expected
        with restored.transaction() as tx:
            tx.delta("accounts", (1,), n=1)
        assert tx.commit_ts > now[0]


def test_backup_and_restore_of_a_served_store_and_what_came_after_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command line. The same commits after the backup get the same timestamps, and give the same answers."""

    def commit(db: Any, i: int) -> int:
        with db.transaction(token=f"commit {i}") as tx:
            tx.delta("accounts", (i % 3,), n=i)
            tx.append("calls", [{"endpoint": i % 5, "ts": TS + i, "us": i}] * 10)
        assert tx.commit_ts is not None
        return int(tx.commit_ts)

    past: list[tuple[Any, Any]] = []
    after: list[int] = []
    with ServerProcess(tmp_path / "data") as server, server.connect() as db:
        db.create_event_table("calls", event_time="ts", columns={"endpoint": "int64", "ts": "timestamp", "us": "int64"})
        db.create_aggregate(
            "by_endpoint", source="calls", group_by=["endpoint"], measures={"us": kivi.sum("us"), "n": kivi.count()}
        )
        db.create_table("accounts", key={"id": "int64"}, columns={"n": kivi.sum("int64")}, history="1h")
        for i in range(20):
            ts = commit(db, i)
            moment = dt.datetime.now(dt.UTC)
            past += [(ts, answers(db, ts)), (moment, answers(db, moment)[1:])]
        assert main(["--endpoint", server.endpoint, "backup", str(tmp_path / "backups"), "--keep", "2"]) == 0
        at_backup = answers(db)
        for i in range(20, 40):
            after.append(commit(db, i))
            past.append((after[-1], answers(db, after[-1])))
        at_the_end = answers(db)
        server.kill()
    assert main(["restore", str(tmp_path / "backups"), str(tmp_path / "restored")]) == 0
    assert "verified" in capsys.readouterr().out
    with kivi.open(tmp_path / "restored") as db:
        assert answers(db) == at_backup
        for i, expected in enumerate(past[:40]):
            assert answers(db, expected[0])[i % 2 :] == expected[1], expected[0]
        assert [commit(db, i) for i in range(20)] == [ts for ts, _ in past[:40:2]]  # repeats, which it knows
        assert [commit(db, i) for i in range(20, 40)] == after
        assert answers(db) == at_the_end
        for ts, answer in past[40:]:
            assert answers(db, ts) == answer


def inodes(backup: str) -> dict[str, int]:
    folder = os.path.join(backup, "engine")
    return {name: os.stat(os.path.join(folder, name)).st_ino for name in os.listdir(folder) if name.endswith("sst")}


def test_what_did_not_change_is_shared_with_the_backup_before_and_with_nobody_else(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as db:
        made = []
        for turn in range(3):
            fill(db, turn * 4_000, 4_000)
            made.append(db.backup(tmp_path / "backups"))
        live = {entry.inode() for entry in os.scandir(tmp_path / "data" / "engine")}
        unchanged = db.backup(tmp_path / "backups")
    assert made[1]["shared_bytes"] > 0 and unchanged["copied_bytes"] < made[2]["copied_bytes"]
    for before, after in ((made[0], made[1]), (made[1], made[2])):
        same = inodes(before["path"]).items() & inodes(after["path"]).items()
        assert same
    assert not live & {inode for backup in made for inode in inodes(backup["path"]).values()}
    for backup in made:
        backups.check(backup["path"])


def test_a_restored_store_shares_nothing_with_backups_of_the_one_before(tmp_path: Path) -> None:
    """It gives the same names to other files."""
    with opened(tmp_path / "data") as db:
        fill(db, 0, 2_000)
        first = db.backup(tmp_path / "backups")
        fill(db, 2_000, 2_000)
        db.backup(tmp_path / "backups")
    with opened(Path(first["path"]).rename(tmp_path / "restored")) as db:
        fill(db, 9_000, 2_000)
        expected = answers(db)[1:]
        other = db.backup(tmp_path / "backups")
    assert other["shared_bytes"] == 0
    with kivi.open(other["path"]) as db:
        assert answers(db)[1:] == expected


def test_the_oldest_go_and_what_was_interrupted_is_cleared_away(tmp_path: Path) -> None:
    repository = tmp_path / "backups"
    with opened(tmp_path / "data") as db:
        names = []
        for turn in range(4):
            fill(db, turn * 100, 100)
            (repository / ".partial-dead").mkdir(parents=True) if turn == 2 else None
            (tmp_path / "data" / "backup-dead").mkdir() if turn == 2 else None
            names.append(db.backup(repository, keep=2)["name"])
        assert [Path(path).name for path in backups.of_repository(str(repository))] == names[-2:]
        assert not (tmp_path / "data" / "backup-dead").exists()
        assert {path.name for path in repository.iterdir()} == {"KIVI-BACKUPS", *names[-2:]}
    for path in backups.of_repository(str(repository)):
        with kivi.open(path) as db:
            assert len(answers(db)[1]) in (300, 400)


def test_writers_go_on_and_a_backup_has_a_whole_prefix_of_them(tmp_path: Path) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []
    with opened(tmp_path / "data") as db:

        def write() -> None:
            try:
                while not stop.is_set():
                    with db.transaction() as tx:  # both or neither
                        tx.delta("accounts", (1,), n=1)
                        tx.delta("accounts", (2,), n=-1)
                        tx.append("calls", [{"endpoint": 1, "ts": TS, "us": 1}])
            except BaseException as error:
                failures.append(error)

        writers = [threading.Thread(target=write) for _ in range(3)]
        for writer in writers:
            writer.start()
        made = [db.backup(tmp_path / "backups") for _ in range(4)]
        stop.set()
        for writer in writers:
            writer.join()
    assert not failures
    for backup in made:
        with kivi.open(backup["path"]) as db, db.snapshot() as snapshot:
            one, two = snapshot.get("accounts", (1,)), snapshot.get("accounts", (2,))
            counted = snapshot.get("by_endpoint", (1,))
            assert (one is None) == (two is None) == (counted is None)
            if one is not None and two is not None and counted is not None:
                assert one["n"] == -two["n"] == counted["n"] == counted["us"]


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    with opened(tmp_path / "data") as db:
        for place, error in (
            (tmp_path / "photos", kivi.NotAStore),
            (tmp_path / "no" / "such", kivi.InvalidArgument),
            (tmp_path / "photos" / "cat.png", kivi.InvalidArgument),
        ):
            with pytest.raises(error):
                db.backup(place)
        for keep in (0, -1, True, "2"):
            with pytest.raises(kivi.InvalidArgument):
                db.backup(tmp_path / "backups", keep=keep)
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.png"]
    assert not (tmp_path / "no").exists()


def test_one_backup_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as db, opened(tmp_path / "other") as other:
        db.backup(tmp_path / "backups")
        with backups._claimed(str(tmp_path / "backups")), pytest.raises(kivi.StoreInUse):
            other.backup(tmp_path / "backups")


def test_damage_to_a_backup_is_found_before_it_is_restored(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as db:
        fill(db, 0, 5_000)
        made = db.backup(tmp_path / "backups")
    victim = max((Path(made["path"]) / "engine").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises(kivi.DataLoss, match=victim.name):
        backups.check(made["path"])


def test_a_served_store_is_backed_up_and_killed_meanwhile(tmp_path: Path) -> None:
    """What a kill leaves is no backup, and the next one clears it away."""
    with ServerProcess(tmp_path / "data") as server:
        with server.connect() as db:
            db.create_event_table(
                "calls", event_time="ts", columns={"endpoint": "int64", "ts": "timestamp", "us": "int64"}
            )
            for turn in range(8):
                fill(db, turn * 50_000, 50_000)
            asking = threading.Thread(target=lambda: _ignored(lambda: db.backup(str(tmp_path / "backups"))))
            asking.start()
            while not (tmp_path / "backups").exists():
                pass
            server.kill()
            asking.join()
        server.start()
        with server.connect() as db:
            made = db.backup(str(tmp_path / "backups"))
            for path in backups.of_repository(str(tmp_path / "backups")):
                backups.check(path)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith((".partial-", "backup-"))]
    with kivi.open(made["path"]) as db, db.snapshot() as snapshot:
        assert snapshot.to_arrow("calls", columns=["us"]).num_rows == 400_000


def _ignored(call: Any) -> None:
    with contextlib.suppress(kivi.KiviError):
        call()
