"""A disk that is really full, below a real server: what is refused, what goes on, and that it ends by itself."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import kivi
from kivi.cli.commands import _problems, main
from kivi.store.facade import Store
from tests.proof.powerloss import environment, library
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

SMALL = {
    "segment_bytes": "1MiB",
    "memtable_bytes": "1MiB",
    "flush_bytes": "1MiB",
    "flush_every_s": "0.2",
    "fold_every_s": "0.2",
    "pending_soft_bytes": "1MiB",
    "pending_hard_bytes": "4MiB",
}
SETTINGS = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 32 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        if os.environ.get("KIVI_CI") and os.getuid() == 0:
            pytest.fail(f"CI runs as root, and has to be able to mount a file system: {done.stderr}", pytrace=False)
        pytest.skip(f"only root can mount a file system to fill: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path, name: str = "filler") -> Path:
    """Takes all the space that is left."""
    path = disk / name
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    return path


def metrics(server: ServerProcess) -> dict[str, float]:
    address = [line for line in list(server.output) if line.startswith("metrics on ")][-1].split()[-1]
    with urllib.request.urlopen(address, timeout=60) as reply:
        text = reply.read().decode()
    out: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name + (f"/{sample.labels['reason']}" if "reason" in sample.labels else "")
            out[name.removeprefix("kivi_")] = sample.value
    return out


def events(server: ServerProcess) -> list[dict[str, Any]]:
    """What it logged that a machine may look for."""
    return [line for line in map(json.loads, logged(server)) if "event" in line]


def logged(server: ServerProcess) -> list[str]:
    return [line for line in list(server.output) if line.startswith("{")]


class Writer:
    """Commits that are told apart by their keys, and what became of each."""

    def __init__(self, db: Any) -> None:
        self.db = db
        self.acknowledged: set[int] = set()
        self.refused: set[int] = set()
        self._keys = itertools.count()

    def commit(self) -> None:
        key = next(self._keys)
        try:
            with self.db.transaction() as tx:
                tx.put("t", (key,), data=os.urandom(64 << 10))
                tx.append("e", [{"ts": key, "n": key}])
        except kivi.DiskFull:
            self.refused.add(key)
            raise
        self.acknowledged.add(key)

    def works(self) -> bool:
        with contextlib.suppress(kivi.DiskFull):
            self.commit()
            return True
        return False

    def check(self) -> None:
        """All that was acknowledged, and nothing that was refused, in the table and in the aggregate."""
        with self.db.snapshot() as snapshot:
            assert {row["id"] for row in snapshot.scan("t", columns=["id"])} == self.acknowledged
            found = [row["total"] for row in snapshot.scan("agg")]
            assert (sum(found), len(found)) == (sum(self.acknowledged), 1)


class Reader:
    """Reads a row again and again, from its entering to its leaving."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.reads, self.longest_s = 0, 0.0

    def _run(self) -> None:
        with self._server.connect() as db:
            while not self._stop.is_set():
                began = time.monotonic()
                with db.snapshot() as snapshot:
                    assert snapshot.get("t", (0,)) is not None
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                self.reads += 1

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def make_tables(db: Any) -> None:
    db.create_table("t", key={"id": "int64"}, columns={"data": "bytes"})
    db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "n": "int64"})
    slot = kivi.time_slot("ts", "1h", name="slot")
    db.create_aggregate("agg", source="e", group_by=[slot], measures={"total": kivi.sum("n")})


def status(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["--endpoint", server.endpoint, "-o", "json", "status"])
    return code, json.loads(capsys.readouterr().out)


def test_a_full_disk_refuses_commits_and_service_resumes_by_itself(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backups = disk / "backups"
    with ServerProcess(disk / "data", *SETTINGS, "--metrics", "localhost:0", "--log-format", "json") as server:
        pid = server.pid
        with server.connect() as db:
            make_tables(db)
            writer = Writer(db)
            for _ in range(20):
                writer.commit()
            code, found = status(server, capsys)
            assert "was full" not in found["disk"]
            filler = fill(disk)

            # full: commits are refused, whatever room the log and pending still had; reads go on
            with Reader(server) as reader:
                wait_until(lambda: not writer.works())
                before = reader.reads
                wait_until(lambda: reader.reads > before + 20)
            assert reader.longest_s < 5
            with pytest.raises(kivi.DiskFull) as caught:
                writer.commit()
            assert isinstance(caught.value, kivi.ResourceExhausted) and "make room" in caught.value.message
            assert caught.value.details["path"].startswith(str(disk))
            writer.check()
            with pytest.raises(kivi.DiskFull):
                db.backup(str(backups))
            with pytest.raises(kivi.DiskFull):
                db.stage("e", [{"ts": i, "n": int.from_bytes(os.urandom(7))} for i in range(200_000)])
            assert not backups.exists() or not [name for name in os.listdir(backups) if name != "KIVI-BACKUPS"]
            writer.check()
            code, found = status(server, capsys)
            assert (code, found["healthy"]) == (1, False)
            assert "no disk space since" in found["problems"] and "reads go on" in found["problems"]
            seen = metrics(server)
            assert (seen["disk_full"], seen["storage_failing"]) == (1, 0)
            assert (
                seen["disk_full_times_total"] >= 1
            )  # what a pass in the background gives back may be room for a moment
            assert seen["aborts_total/storage"] == len(writer.refused) > 1
            assert seen["disk_full_refused"] == len(writer.refused) + 1  # the stage
            assert "engine_errors_open" in seen and "verify" not in found["problems"]

            # freed: without a restart, and it says so
            filler.unlink()
            wait_until(writer.works)
            wait_until(lambda: metrics(server)["disk_full"] == 0)
            for _ in range(50):
                writer.commit()
            writer.check()
            seen = metrics(server)
            assert seen["aborts_total/storage"] == seen["disk_full_refused"] - 1 == len(writer.refused)
            began, ended = seen["disk_full_began_timestamp_seconds"], seen["disk_full_ended_timestamp_seconds"]
            assert 0 < began < ended < time.time()
            lasted = ended - began
            assert seen["disk_full_seconds_total"] == pytest.approx(lasted, abs=0.2)
            wait_until(lambda: metrics(server)["engine_errors_open"] == 0)
            code, found = status(server, capsys)
            assert f"went on by itself: {len(writer.refused) + 1} commits and stages were refused" in found["disk"]
            assert "was full" in found["disk"] and "RocksDB" not in found.get("problems", "")
            *said, space = events(server)
            assert (space["event"], space["level"]) == ("disk_space", "warning")
            short: set[str] = set()
            for event in said:  # a part may find room for a moment, and lose it again
                if event["event"] == "disk_space":
                    short.pop()  # the only one
                    assert not short
                    continue
                part = "base" if event["message"].startswith("base ") else "the commit log"
                assert (event["event"], event["level"]) == (
                    ("storage_works", "warning") if part in short else ("disk_full", "error")
                )
                short ^= {part}
            assert len(short) == 1  # the last to work again
            assert space["refused"] == len(writer.refused) + 1 and space["seconds"] == pytest.approx(lasted, abs=0.2)
            assert db.backup(str(backups))["watermark"] == db.watermark()
        assert server.pid == pid
        server.restart()
        with server.connect() as db:
            writer.db = db
            writer.check()
        assert server.stop() == 0


def test_what_is_closed_without_space_loses_nothing_and_opens_again(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be folded stays in the log. A store that cannot be opened says what to do, and changes nothing."""
    path = str(disk / "data")
    with kivi.open(path, segment_bytes=1 << 20) as db:
        make_tables(db)
        writer = Writer(db)
        writer.commit()
        filler = fill(disk)
        wait_until(lambda: not writer.works())
        with pytest.raises(kivi.DiskFull):
            db.checkpoint(str(disk / "copy"))
    assert "closed without folding" in caplog.text
    more = fill(disk, "more")  # the log has given back what it had in advance
    with pytest.raises(kivi.DiskFull, match="make room"):
        kivi.open(path)
    filler.unlink()
    more.unlink()
    with kivi.open(path) as db:
        writer.db = db
        writer.check()


def test_a_new_store_on_a_full_disk_is_refused(disk: Path) -> None:
    (disk / "data").mkdir()
    filler = fill(disk)
    with pytest.raises(kivi.DiskFull, match="make room"):
        Store.open(str(disk / "data"))
    filler.unlink()
    Store.open(str(disk / "data")).close()


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[tuple[ServerProcess, Path]]:
    """A server, and the file that names what cannot be synced below its directory."""
    shim = library(tmp_path)
    if shim is None:
        if os.environ.get("KIVI_CI"):
            pytest.fail("there is no C compiler (cc), and in CI there has to be one")
        pytest.skip("needs a C compiler (cc) for the library that makes a sync fail")
    data, names = tmp_path / "data", tmp_path / "broken"
    data.mkdir()
    server = ServerProcess(data, *SETTINGS, "--metrics", "localhost:0", "--log-format", "json")
    server.environment = {**environment(shim, data, tmp_path / "journal"), "JOURNAL_FAIL_SYNC": str(names)}
    with server:
        yield server, names


def test_a_failed_sync_of_the_log_stops_the_server_which_says_what_to_do(broken: tuple[ServerProcess, Path]) -> None:
    """No matter of room, and never tried again: what a failed sync has left on the disk only a new start can tell."""
    server, names = broken
    with server.connect() as db:
        make_tables(db)
        with db.transaction() as tx:
            tx.put("t", (1,), data=b"acknowledged")
        names.write_text("/log/0")  # its segments: the log syncs its mark by itself, once a second
        with pytest.raises(kivi.CommitUnknown), db.transaction(token="mine") as tx:
            tx.put("t", (2,), data=b"unknown")
        assert server.wait(60) == 1
    (said,) = [line for line in map(json.loads, logged(server)) if "so does the server" in line["message"]]
    assert said["level"] == "error" and "failed" in said["message"]
    assert "start the server again" in server.output[-1]
    names.unlink()
    server.start()
    with server.connect() as db, db.snapshot() as snapshot:
        there = {row["id"] for row in snapshot.scan("t", columns=["id"])}
        assert there == ({1} if db.outcome("mine") is kivi.ABORTED else {1, 2})


def test_files_of_base_that_cannot_be_written_are_told_until_a_restart(
    broken: tuple[ServerProcess, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """RocksDB does not get over it. Commits go on into the log as long as pending has room, reads all the time."""
    server, names = broken
    with server.connect() as db:
        make_tables(db)
        writer = Writer(db)
        writer.commit()
        names.write_text("/engine/")
        refused: list[kivi.KiviError] = []
        while not refused:
            try:
                writer.commit()
            except kivi.Unavailable as error:
                refused.append(error)
        assert "restart the server" in refused[0].message and not isinstance(refused[0], kivi.ResourceExhausted)
        writer.check()
        names.unlink()
        wait_until(lambda: metrics(server)["storage_failing"])
        seen = metrics(server)
        assert (seen["storage_failing"], seen["disk_full"], seen["aborts_total/storage"]) == (1, 0, 1)
        code, found = status(server, capsys)
        assert code == 1 and "restart the server" in found["problems"]
        assert [event["event"] for event in events(server)] == ["storage_failing"]
        server.restart()
        wait_until(lambda: _works(server))
    with server.connect() as db:
        writer.db = db
        writer.check()
        writer.commit()
        assert status(server, capsys)[0] == 0


def _works(server: ServerProcess) -> bool:
    return metrics(server)["storage_failing"] == 0


def test_status_tells_of_storage_that_has_to_be_mended() -> None:
    """What RocksDB does not get over by itself."""
    now = {"storage_failing": 1, "engine_errors_open": 1, "disk_free_bytes": 1 << 40, "disk_size_bytes": 1 << 41}
    mend, verify = _problems(now, now)
    assert "restart the server" in mend and "kivi verify" in verify
