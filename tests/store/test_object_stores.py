"""The cold tier in a real S3 server on this machine, and what it and the network between may do."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.cli.offline import examine
from kivi.errors import DataLoss, Unavailable
from kivi.events.object_store import ObjectMissing, ObjectStore
from kivi.runtime import deadlines
from tests.s3server import CREDENTIALS, Faulty, Reply, faulty
from tests.serverproc import ServerProcess
from tests.store.test_settling import COLUMNS, MINUTE, T0, append, events, files, settle_in_parts, sums
from tests.waiting import wait_until

LATE = {"start": T0 + 500 * MINUTE}


@pytest.fixture(scope="module")
def server() -> Iterator[Faulty]:
    with faulty() as proxy:
        yield proxy


@pytest.fixture
def s3(server: Faulty, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    server.asked.clear()
    yield server
    server.fault, server.delay_s = None, 0.0


def opened(path: Path, s3: Faulty, **settings: Any) -> Any:
    db = kivi.open(path, background=False, block_rows=64, **{"cold_timeout_s": 20.0, **settings})
    if "calls" not in db.tables():
        db.create_event_table("calls", event_time="ts", columns=COLUMNS, local="100m", cold=s3.url)
    return db


@pytest.fixture
def db(tmp_path: Path, s3: Faulty) -> Iterator[Any]:
    with opened(tmp_path / "data", s3) as db:
        settle_in_parts(db)
        yield db


def forget_what_was_read(db: Any, s3: Faulty) -> None:
    shutil.rmtree(db.store.parts.path + "/cold/cache", ignore_errors=True)
    table = db.store.event_tables.of(db.store.table("calls").id)
    table.redefine(table.schema)  # footers
    db.store.cold.store(s3.url)._handle.cache_clear()


def keys(db: Any, s3: Faulty) -> list[str]:
    return [key for key in db.store.cold.store(s3.url).list("") if key.endswith(".parquet")]


def test_r23_events_in_s3_are_the_same_events(tmp_path: Path, s3: Faulty, db: Any) -> None:
    before = events(db), sums(db)
    there = len(keys(db, s3))
    moved = db.store.cooler.cool()
    assert moved > 2 and len(keys(db, s3)) == there + moved
    assert len(files(tmp_path / "data")) == db.stats()["settled_files"] - moved
    assert (events(db), sums(db)) == before
    with db.transaction() as tx:
        tx.retract("calls", where=kivi.col("k") < 100)
    db.consolidate()
    db.store.consolidator.flush()
    for _ in range(2):
        db.store.settle(100)
        db.store.cooler.cool()
    assert [row["k"] for row in events(db)] == list(range(100, 600))
    assert len(keys(db, s3)) == there + db.stats()["cold_files"]
    backup = db.backup(tmp_path / "backups")
    assert "of them in the cold tier" in examine(backup["path"])["calls"]
    db.close()
    with opened(tmp_path / "data", s3) as again:
        assert [row["k"] for row in events(again)] == list(range(100, 600))


def test_a_large_object_goes_in_parts_and_comes_in_ranges(s3: Faulty) -> None:
    store = ObjectStore(s3.url, 30.0)
    data = bytes(range(256)) * 100_000
    store.write("large/one", data)
    assert store.read_whole("large/one") == data
    s3.asked.clear()
    spans = [(0, 10), (100, 50), (9_000_000, 3), (20_000_000, 7)]
    assert store.read("large/one", len(data), spans) == [data[at : at + size] for at, size in spans]
    assert [method for method, _ in s3.asked].count("GET") == 3
    with pytest.raises(ObjectMissing, match="large/one is missing, or not of its length"):
        store.read("large/one", len(data) + 1, [(0, 1)])
    store.delete(["large/one", "large/one"])
    with pytest.raises(ObjectMissing, match="large/one"):
        store.read_whole("large/one")
    assert store.list("large") == []


def test_what_is_unavailable_for_a_while_is_asked_for_again(s3: Faulty, db: Any) -> None:
    before = events(db)
    s3.unavailable(3)
    assert db.store.cooler.cool() > 0
    forget_what_was_read(db, s3)
    s3.unavailable(3)
    assert events(db) == before


def test_what_stays_unavailable_is_an_error_that_names_it_and_everything_else_goes_on(
    tmp_path: Path, s3: Faulty, db: Any
) -> None:
    db.store.cooler.cool()
    before, late = events(db), sums(db, **LATE)
    db.close()
    with opened(tmp_path / "data", s3, cold_timeout_s=1.0) as again:
        forget_what_was_read(again, s3)
        s3.unavailable()
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"s3://bucket/some/prefix/.*parquet.* cannot be reached .*tried again"):
            events(again)
        assert time.monotonic() - began < 60
        assert sums(again, **LATE) == late
        append(again, 600, 200, late=0)
        again.store.settle(100)
        assert again.stats()["settling"] == 0
        with pytest.raises(Unavailable):
            again.store.cooler.cool()
        assert again.stats()["cold_uploads_waiting"] > 0
        s3.fault = None
        assert again.store.cooler.cool() > 0
        assert events(again)[:600] == before


def test_a_slow_answer_ends_with_the_callers_time(s3: Faulty, db: Any) -> None:
    db.store.cooler.cool()
    before = events(db)
    forget_what_was_read(db, s3)
    s3.delay_s = 20.0
    began = time.monotonic()
    with deadlines.until(began + 0.5), pytest.raises(Unavailable, match=r"parquet.* \(no answer in time\)"):
        events(db)
    assert time.monotonic() - began < 19
    s3.asked.clear()
    assert sums(db, **LATE)["n"] > 0 and not s3.asked
    s3.delay_s = 0.0
    assert events(db) == before


def test_what_is_torn_on_its_way_is_read_again_and_what_is_damaged_is_named(s3: Faulty, db: Any) -> None:
    db.store.cooler.cool()
    before, late = events(db), sums(db, **LATE)

    def torn(times: int, cut: bool) -> None:
        left = [times]

        def fault(method: str, path: str, reply: Reply) -> Reply:
            if method == "GET" and path.split("?")[0].endswith(".parquet") and left[0] > 0 and len(reply.body) > 20:
                left[0] -= 1
                if cut:
                    return Reply(reply.head, reply.body, len(reply.body) // 2)
                return Reply(reply.head, reply.body[:10] + bytes([reply.body[10] ^ 1]) + reply.body[11:])
            return reply

        s3.fault = fault

    for cut in (True, False):
        forget_what_was_read(db, s3)
        torn(1, cut)
        assert events(db) == before
    forget_what_was_read(db, s3)
    torn(1_000_000, False)
    with pytest.raises(DataLoss, match=r"s3://.*parquet.* of event table 'calls' is damaged .*restore a backup"):
        events(db)
    assert sums(db, **LATE) == late
    s3.fault = None
    assert events(db) == before


def test_what_is_gone_is_named_and_everything_else_goes_on(s3: Faulty, db: Any) -> None:
    db.store.cooler.cool()
    late = sums(db, **LATE)
    store = db.store.cold.store(s3.url)
    (victim, *_) = [one for one in db.store.event_tables.objects_in_use() if one.url == s3.url]
    store.delete([victim.key])
    forget_what_was_read(db, s3)
    with pytest.raises(DataLoss, match=rf"{victim.key}.* is missing.*put it back there, .*or restore a backup"):
        events(db)
    assert sums(db, **LATE) == late


@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_an_upload_that_fails_leaves_the_file_here(tmp_path: Path, s3: Faulty, db: Any, method: str) -> None:
    before, here = events(db), files(tmp_path / "data")
    db.close()
    with opened(tmp_path / "data", s3, cold_timeout_s=0.2) as again:
        s3.unavailable(method=method)
        with pytest.raises(Unavailable, match="cannot be reached"):
            again.store.cooler.cool()
        assert files(tmp_path / "data") == here and events(again) == before
    s3.fault = None
    with opened(tmp_path / "data", s3) as again:
        moved = again.store.cooler.cool()
        assert moved > 0 and events(again) == before
        assert (
            len(again.store.cold.store(s3.url).list(next(iter(again.store.event_tables.objects_in_use())).generation))
            == moved
        )


def test_an_access_key_that_is_refused_is_told_at_once(s3: Faulty) -> None:
    def refuse(method: str, path: str, reply: Reply) -> Reply:
        body = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>injected</Message></Error>"
        return Reply(f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(body)}\r\n\r\n".encode(), body)

    s3.fault = refuse
    began = time.monotonic()
    with pytest.raises(Unavailable, match="look at its credentials"):
        ObjectStore(s3.url, 60.0).write("some", b"bytes")
    assert time.monotonic() - began < 50


def test_a_server_answers_in_the_clients_time_while_the_object_store_is_slow(tmp_path: Path, s3: Faulty) -> None:
    settings = ("settle=true", "settle_every_s=0.1", "settle_idle_s=0.0", "cold_every_s=0.1", "fold_every_s=0.1")
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    with ServerProcess(tmp_path / "data", *arguments) as server, server.connect() as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS, local="1m", cold=s3.url)
        db.append("calls", [{"ts": T0 + i, "k": i} for i in range(1_000)])
        db.append("calls", [{"ts": T0 + 10 * MINUTE, "k": 1_000}])
        wait_until(lambda: db.stats()["cold_files"] > 0 and not db.stats()["cold_uploads_waiting"])
        s3.delay_s = 20.0
        with server.connect(timeout=60) as hasty:
            with hasty.snapshot() as snapshot, pytest.raises(Unavailable):
                began, hasty._core.timeout_s = time.monotonic(), 1.0
                snapshot.query("calls", group_by=["k"], measures={"n": kivi.count()}).to_arrow()
            assert time.monotonic() - began < 19
            hasty._core.timeout_s = 60.0
            with hasty.snapshot() as snapshot:
                s3.asked.clear()
                found = snapshot.query("calls", start=T0 + 5 * MINUTE, measures={"n": kivi.count()})
                assert [row["n"] for row in found] == [1]
                assert not [path for method, path in s3.asked if method == "GET" and ".parquet" in path]
        s3.delay_s = 0.0
        with db.snapshot() as snapshot:
            assert [row["k"] for row in snapshot.scan("calls")] == list(range(1_001))


def test_a_directory_that_does_not_answer_is_unavailable_in_time(tmp_path: Path) -> None:
    """As that of a network's disk may be: here an object is a pipe that nobody writes to."""
    store = ObjectStore(f"file://{tmp_path}", 0.3)
    store.make("g")
    pipe = tmp_path / "g" / "1.parquet"
    os.mkfifo(pipe)
    began = time.monotonic()
    try:
        with pytest.raises(Unavailable, match="no answer in time"):
            store.read_whole("g/1.parquet")
        assert time.monotonic() - began < 20
    finally:
        os.close(os.open(pipe, os.O_RDWR))  # whoever waits for it goes on
