"""Settled files on a disk: there before anything names them, gone after, whole in copies, named when damaged."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import kivi
from kivi.cli.offline import examine
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, table_prefix
from kivi.errors import DataLoss, DiskFull, EventsRetracted, SnapshotTooOld, Unavailable
from kivi.events import settling
from kivi.events.places import Directory
from kivi.events.settling import Settling
from tests.waiting import wait_until

T0 = 1_767_268_800_000_000
MINUTE = 60_000_000
COLUMNS = {"ts": "timestamp", "k": "int64", "x": "float64", "d": "decimal(9,2)", "s": "string", "b": "bool"}


def opened(path: Path, **settings: Any) -> Any:
    db = kivi.open(path, background=False, block_rows=64, **settings)
    if "calls" not in db.tables():
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
    return db


def append(db: Any, first: int, rows: int, late: float = 0.1, reach: int = 500) -> None:
    rng = random.Random(first)
    db.append(
        "calls",
        [
            {
                "ts": T0 + i * MINUTE - (rng.randrange(reach) * MINUTE if rng.random() < late else 0),
                "k": i,
                "x": rng.uniform(-1e9, 1e9),
                "d": None if i % 7 == 0 else i,
                "s": f"s{i % 5}",
                "b": i % 2 == 0,
            }
            for i in range(first, first + rows)
        ],
    )
    db.consolidate()


def files(path: Path) -> list[Path]:
    return sorted((path / "events").rglob("*.parquet"))


def events(db: Any) -> list[dict[str, Any]]:
    with db.snapshot() as snapshot:
        return list(snapshot.scan("calls"))


def sums(db: Any, **options: Any) -> Any:
    measures = {"n": kivi.count(), "x": kivi.sum("x"), "d": kivi.sum("d"), "most": kivi.max("k")}
    with db.snapshot() as snapshot:
        return snapshot.summary("calls", measures, **options)


def settle_in_parts(db: Any) -> None:
    """600 events, a minute apart on the whole, in settled files of about 100."""
    for first in range(0, 600, 100):
        append(db, first, 100)
        db.store.settle(100)


def test_events_wait_to_settle_from_their_commit_on(tmp_path: Path) -> None:
    """Whether they are pending, in blocks, or some of each."""
    with opened(tmp_path / "data") as db:
        for number in (1, 2):
            db.append("calls", [{"ts": T0}] * 100)
            assert db.stats()["settling"] == 100 * number
            db.consolidate()
            assert db.stats()["settling"] == 100 * number
        db.store.settle()
        assert db.stats()["settling"] == 0


def test_r23_settled_events_are_the_same_events_in_the_same_order(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as db:
        for first in range(0, 600, 100):
            append(db, first, 100)
        where = {"where": (kivi.col("s") == "s3") & (kivi.col("d") > 2)}
        spans = {"start": T0 + 100 * MINUTE, "end": T0 + 350 * MINUTE}
        before = events(db), sums(db), sums(db, **where), sums(db, **spans)
        with db.snapshot() as snapshot:
            backwards = list(snapshot.scan("calls", reverse=True, **spans))
        db.store.settle(128)
        assert db.stats()["settling"] == 0 < db.stats()["settled_files"] == len(files(tmp_path / "data"))
        assert (events(db), sums(db), sums(db, **where), sums(db, **spans)) == before
        with db.snapshot() as snapshot:
            assert list(snapshot.scan("calls", reverse=True, **spans)) == backwards
        append(db, 600, 50)  # hot ones behind settled ones
        now = events(db), sums(db)
    with opened(tmp_path / "data") as db:
        assert (events(db), sums(db)) == now
    assert "settled files intact" in examine(str(tmp_path / "data"))["calls"]


def test_r22_r23_snapshots_of_before_see_what_they_saw_in_files_made_of_files(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as db:
        stamps = list[int]()
        for first in range(0, 200, 20):
            append(db, first, 20)
            stamps.append(db.watermark())
        db.store.settle()
        with db.snapshot() as before:
            with db.transaction() as tx:
                tx.retract("calls", where=kivi.col("s") == "s1")
            db.consolidate()
            for size in (200, 40):
                every = [row["k"] for row in before.scan("calls")]
                assert every == list(range(200))
                assert [row["k"] for row in events(db)] == [k for k in every if k % 5 != 1]
                assert sums(db)["n"] == 160
                for i, ts in enumerate(stamps):
                    with db.snapshot(as_of=ts) as snapshot:
                        assert snapshot.summary("calls", {"n": kivi.count()})["n"] == 20 * (i + 1)
                        table = db.store.event_tables.of(db.store.table("calls").id)
                        with table.view(ts) as view:
                            assert sum(b.num_rows for b in view.scan(ordered=False)) == 20 * (i + 1)
                with pytest.MonkeyPatch.context() as patched:  # all files become others, once
                    left = [list[Any]]
                    patched.setattr(
                        settling, "combinable", lambda files, _, left=left: left.pop()(files) if left else []
                    )
                    db.store.settle(size)


def test_files_are_parquet_that_anybody_can_read(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    with opened(tmp_path / "data") as db:
        append(db, 0, 100)
        db.store.settle()
        rows = {row["k"]: row for row in events(db)}
    found = [row for path in files(tmp_path / "data") for row in pq.read_table(path).to_pylist()]
    assert len(found) == 100
    for row in found:
        assert row.pop("_pos") == row["k"] and row.pop("_cts") > 0
        assert row == rows[row["k"]]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG])
def test_a_step_that_fails_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with opened(tmp_path / "data") as db:
        append(db, 0, 300)
        before = events(db)
        real, left = os.fsync, itertools.count()

        def fsync(handle: int) -> None:
            if next(left) == 2:
                raise OSError(code, "injected")
            real(handle)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fsync)
            with pytest.raises(DiskFull, match=r"no disk space for .*parquet|no disk space for .*events"):
                db.store.settle(64)
        assert events(db) == before
        assert len(files(tmp_path / "data")) == db.stats()["settled_files"]
        db.store.settle(64)
        assert events(db) == before and db.stats()["settling"] == 0


@pytest.mark.parametrize("after", [False, True], ids=["at", "after"])
@pytest.mark.parametrize("step", ["_settle", "_combine"])
def test_a_swap_that_is_interrupted_leaves_no_file_that_nothing_names_and_deletes_none_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    """Base takes no more for a while, or whoever settles is interrupted when it has taken the swap."""
    with opened(tmp_path / "data") as db:
        append(db, 0, 300)
        if step == "_combine":
            db.store.settle(64)
            monkeypatch.setattr("kivi.events.settling.combinable", lambda files, rows: list(files)[:2])
        before, engine, swaps = events(db), db.store.engine, list[int]()
        write, swap = engine.write, Settling._swap

        def interrupted(*args: Any) -> bool:
            swaps.append(1)
            with monkeypatch.context() as patched:
                patched.setattr(engine, "write", written)
                return swap(*args)

        def written(batch: Any) -> None:
            if after:
                write(batch)
                raise KeyboardInterrupt
            raise Unavailable("injected")

        with monkeypatch.context() as patched, pytest.raises((Unavailable, KeyboardInterrupt)):
            patched.setattr(Settling, "_swap", interrupted)
            db.store.settle(64)
        assert swaps and events(db) == before
        monkeypatch.setattr("kivi.events.settling.combinable", lambda files, rows: [])
        table = db.store.event_tables.of(db.store.table("calls").id)
        named = {file.number for file in table.files()}
        there = {int(path.stem) for path in files(tmp_path / "data")}
        assert there >= named and (after or there == named)
        db.store.settle(64)
        assert events(db) == before and db.stats()["settling"] == 0
        assert len(files(tmp_path / "data")) == db.stats()["settled_files"]


@pytest.mark.parametrize("at", ["written", "swapped"])
def test_what_a_crash_leaves_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    class Crash(Exception):
        pass

    db = opened(tmp_path / "data")
    append(db, 0, 200)
    before = events(db)
    db.store.consolidator.flush()

    def crash(*_: Any) -> None:
        raise Crash

    owner, name = (Directory, "made") if at == "written" else (Settling, "_combine")
    with monkeypatch.context() as patched, pytest.raises(Crash):
        patched.setattr(owner, name, crash)
        if at == "written":
            patched.setattr(Directory, "delete", lambda *_: None)
        else:
            patched.setattr("kivi.events.settling.combinable", lambda files, rows: list(files))
        db.store.settle()
    left = files(tmp_path / "data")
    assert left
    db.store.crash()
    with opened(tmp_path / "data") as again:
        assert events(again) == before
        assert len(files(tmp_path / "data")) == again.stats()["settled_files"]
        again.store.settle()
        assert events(again) == before


def test_every_damaged_byte_is_found_and_the_file_is_named(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as db:
        append(db, 0, 40)
        db.store.settle()
        (path, *_) = files(tmp_path / "data")
        raw = path.read_bytes()
        before = events(db)
        for at in [*range(4, len(raw), 37), len(raw) - 1]:
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
            with opened_again(db) as view, pytest.raises(DataLoss, match=rf"{path.name}.*'calls'.*damaged") as caught:
                view()
            assert caught.value.path == str(path)
        for damaged in (raw[:-1], raw + b"x", None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with opened_again(db) as view, pytest.raises(DataLoss, match="missing, or not of its length"):
                view()
        path.write_bytes(raw)
        assert events(db) == before
    path.write_bytes(raw[:100] + bytes([raw[100] ^ 1]) + raw[101:])
    with pytest.raises(DataLoss, match=path.name):
        examine(str(tmp_path / "data"))


class opened_again:
    """Reads everything, with no footer in memory."""

    def __init__(self, db: Any) -> None:
        self._db = db

    def __enter__(self) -> Any:
        store = self._db.store
        table = store.event_tables.of(store.table("calls").id)
        table.redefine(table.schema)

        def read() -> None:
            table.check_files()
            events(self._db)

        return read

    def __exit__(self, *_: object) -> None:
        pass


def test_a_reader_keeps_the_files_it_may_need_and_the_last_one_out_lets_them_go(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as db:
        for first in range(0, 1_600, 100):
            append(db, first, 100, late=0.5)
            db.store.settle(100)
        names = {path.name for path in files(tmp_path / "data")}
        with db.snapshot() as snapshot:
            scan = snapshot.scan("calls")
            first = next(iter(scan))
            for start in range(1_600, 3_200, 100):
                append(db, start, 100, late=0.9, reach=5_000)
            db.store.settle(100)
            assert names <= {path.name for path in files(tmp_path / "data")}
            assert len([first, *scan]) == 1_600
        db.store.settle(100)
        stats = db.stats()
        assert len(files(tmp_path / "data")) == stats["settled_files"]
        assert stats["settled_combined_rows"] > 0
        assert not names <= {path.name for path in files(tmp_path / "data")}


def test_retention_deletes_files_and_a_dropped_table_leaves_none(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with kivi.open(path, background=False, block_rows=64) as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS, retention="100m")
        for first in range(0, 500, 100):
            append(db, first, 100, late=0)
            db.store.settle(100)
        before = len(files(path))
        for _ in range(3):
            db.store.housekeeping.move_floors()
            db.consolidate()
        db.store.settle()
        assert [row["k"] for row in events(db)] == list(range(399, 500))
        assert len(files(path)) < before
        db.drop("calls")
        db.consolidate()
        for _ in range(10):
            db.store.housekeeping.step()
        assert not files(path)
        prefix = table_prefix(Space.EVENT, 0)[:1]
        assert not list(db.store.engine.scan(prefix, prefix_end(prefix)))


def test_nothing_of_a_retracted_event_stays(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as db:
        db.append("calls", [{"ts": T0 + i, "k": i, "s": f"secret-{i}-of-a-customer"} for i in range(50)])
        db.consolidate()
        db.store.settle()
        with db.snapshot() as before:
            with db.transaction() as tx:
                tx.retract("calls", where=kivi.col("k") == 7)
            db.consolidate()
            db.store.settle()
            assert len(list(before.scan("calls"))) == 50
            assert db.describe("calls")["statistics"]["retracted_in_blocks"] == 1
        assert [row["k"] for row in events(db)] == [k for k in range(50) if k != 7]
        db.store.consolidator.flush()
        db.store.settle()
        db.store.consolidator.compact()
        db.store.settle()
        assert db.describe("calls")["statistics"]["retracted_in_blocks"] == 0
        assert [row["k"] for row in events(db)] == [k for k in range(50) if k != 7]
        names = {row.get("s") for row in parquet_rows(tmp_path / "data")}
        assert "secret-7-of-a-customer" not in names and "secret-8-of-a-customer" in names


def parquet_rows(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    return [row for file in files(path) for row in pq.read_table(file).to_pylist()]


def test_the_header_of_settled_events_stays_small_however_many_retractions_there_were(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as db:
        append(db, 0, 100)
        db.store.settle()
        since = db.watermark()
        for k in range(12):
            with db.transaction() as tx:
                tx.retract("calls", where=kivi.col("k") == k)
            db.consolidate()
            db.store.consolidator.flush()
            db.store.settle()
        assert [row["k"] for row in events(db)] == list(range(12, 100))
        table = db.store.event_tables.of(db.store.table("calls").id)
        with table.view(db.watermark()) as view:
            assert [(one.cts, one.rows, one.blank) for one in view.blocks[0].erased] == [(db.watermark(), 12, True)]
            with pytest.raises(EventsRetracted):
                list(view.removed(since + 1, since, ["k"]))


def test_a_snapshot_that_opens_while_a_step_begins_sees_what_is_retracted_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "data") as db, contextlib.ExitStack() as stack:
        append(db, 0, 100)
        db.store.settle()
        db.store.consolidator.flush()
        real = db.store.leases.oldest
        before = list[Any]()

        def oldest() -> int | None:
            found = real()
            if not before:
                before.append(stack.enter_context(db.snapshot()))
                with db.transaction() as tx:
                    tx.retract("calls", where=kivi.col("k") == 7)
                db.consolidate()
                db.store.consolidator.flush()
            return found

        with monkeypatch.context() as patched:
            patched.setattr(db.store.leases, "oldest", oldest)
            unneeded = db.store.consolidator.unneeded()
        assert before and unneeded < db.watermark()
        assert len(list(before[0].scan("calls"))) == 100


def test_a_file_that_cannot_be_deleted_is_deleted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "data") as db:
        append(db, 0, 100)
        db.store.settle(64)
        with db.transaction() as tx:
            tx.retract("calls", where=kivi.col("k") == 7)
        db.consolidate()
        db.store.consolidator.flush()
        before = events(db)

        def unlink(path: str) -> None:
            raise OSError(errno.EROFS, "read-only", path)

        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", unlink)
            with pytest.raises(Unavailable, match=r"parquet cannot be deleted \(read-only\)"):
                db.store.settle(100)
        assert events(db) == before and len(files(tmp_path / "data")) > db.stats()["settled_files"]
        db.store.settle(100)
        assert events(db) == before and len(files(tmp_path / "data")) == db.stats()["settled_files"]


def test_backups_hold_files_and_share_them_whatever_is_combined_later(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as db:
        for first in range(0, 300, 100):
            append(db, first, 100)
        db.store.settle(100)
        one, before = db.backup(tmp_path / "backups"), events(db)
        again = db.backup(tmp_path / "backups")
        assert again["shared_bytes"] > 0 and again["copied_bytes"] < one["copied_bytes"]
        db.checkpoint(str(tmp_path / "copy"))
        for first in range(300, 2_000, 100):
            append(db, first, 100, late=0.9)
        db.store.settle(100)
        db.store.settle(100)
    for path in (Path(one["path"]), Path(again["path"]), tmp_path / "copy"):
        assert files(path)
        with opened(path) as copy:
            assert events(copy) == before
            copy.store.settle(50)
            assert events(copy) == before


def test_a_table_that_is_altered_reads_its_older_files(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as db:
        append(db, 0, 100)
        db.store.settle()
        db.alter_table("calls", {"more": "int64"})
        db.append("calls", [{"ts": T0, "k": 1_000, "more": 7}])
        db.consolidate()
        expected = [(k, None) for k in range(100)] + [(1_000, 7)]
        for _ in range(2):
            assert [(row["k"], row["more"]) for row in events(db)] == expected
            with db.snapshot() as snapshot:
                assert snapshot.summary("calls", {"n": kivi.count("more"), "sum": kivi.sum("more")})["sum"] == 7
            db.store.settle()
            db.store.settler._step(
                db.store.table("calls"), db.store.event_tables.of(db.store.table("calls").id), every=True, file_rows=1
            )


def test_r23_a_partial_tail_has_no_events_of_dropped_commits_whose_file_stands(tmp_path: Path) -> None:
    with kivi.open(tmp_path / "data", background=False, block_rows=64) as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS, retention="100m")
        append(db, 0, 100, late=0)
        db.store.settle(100)
        append(db, 100, 150, late=0.2, reach=120)
        db.store.settle(100)
        with pytest.MonkeyPatch.context() as patched:  # all become one file, once
            left = [list[Any]]
            patched.setattr(settling, "combinable", lambda files, _: left.pop()(files) if left else [])
            db.store.settle(1_000)
        table: Any = db.store.event_tables.of(db.store.table("calls").id)
        for _ in range(3):
            db.store.housekeeping.move_floors()
            db.consolidate()
        with db.snapshot() as snapshot:
            with pytest.raises(SnapshotTooOld) as told:
                list(snapshot.changes("calls", since=0))
            assert min(file.first_cts for file in table.files()) <= told.value.details["kept_since"]
            kept = list(snapshot.changes("calls", since=0, partial=True))
            assert kept == list(snapshot.changes("calls", since=told.value.details["kept_since"]))
            assert [row["k"] for row in kept] == list(range(100, 250))


def test_a_table_that_is_idle_again_and_again_has_few_headers(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as db:
        table = db.store.event_tables.of(db.store.table("calls").id)
        stamps = list[int]()
        for first in range(100):
            append(db, first, 1)
            stamps.append(db.watermark())
            db.store.settle()
        headers = table.parts[1].read()[1]
        assert len(headers) < 10 and sum(block.rows for block in headers) == 100
        assert [row["k"] for row in events(db)] == list(range(100))
        with db.snapshot() as snapshot:
            tail = list(snapshot.changes("calls", since=stamps[41]))
        assert [(row["k"], row["_commit_ts"]) for row in tail] == list(enumerate(stamps))[42:]


@pytest.mark.story
def test_by_default_a_stream_is_settled_behind_itself_which_rests_meanwhile(tmp_path: Path) -> None:
    with kivi.open(tmp_path / "data", settle_every_s=0.02, settle_idle_s=2.0) as db:
        db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "k": "int64"})
        keys, rows = np.arange(200_000), 0

        def stream() -> bool:
            nonlocal rows
            db.append("calls", pa.table({"ts": pa.array(T0 + rows + keys, pa.timestamp("us", "UTC")), "k": keys}))
            rows += len(keys)
            time.sleep(0.05)  # fast enough to be a burst, and does not take the processors while the settler rests
            return bool(db.stats()["settling_rested_seconds"])

        wait_until(stream, timeout_s=120)
        wait_until(lambda: db.stats()["settling"] == 0, timeout_s=120)  # once nothing comes, all of it
        stats = db.stats()
        assert stats["settled_rows"] == rows and stats["settled_depth"] == stats["settled_write_amplification"] == 1
        with db.snapshot() as snapshot:
            found = [batch.column("k") for batch in snapshot.change_batches("calls", since=0, commit_ts=False)]
        assert pa.chunked_array(found).equals(pa.chunked_array([pa.array(keys)] * (rows // len(keys))))


def test_in_the_background_an_idle_table_is_settled(tmp_path: Path) -> None:
    settings = {"settle_idle_s": 0.1, "settle_every_s": 0.02, "fold_every_s": 0.05}
    with kivi.open(tmp_path / "data", **settings) as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        db.append("calls", [{"ts": T0 + i, "k": i} for i in range(1_000)])
        wait_until(lambda: db.stats()["settled_rows"] and not db.stats()["settling"], pause_s=0.02)
        assert [row["k"] for row in events(db)] == list(range(1_000))
