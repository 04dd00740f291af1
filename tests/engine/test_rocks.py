"""What only RocksDB has: damage, the lock, and the findings that `kivi.engine.rocks` is built on."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rocksdict

from kivi.engine import WriteBatch, giving_back, rocks
from kivi.engine.rocks import Records, RocksEngine, _records
from kivi.errors import DataLoss, StoreInUse, Unavailable
from tests.waiting import wait_until

RECORDS = Records(b"note", b"0")  # as all keys of ``fill`` begin
ROOT = Path(__file__).parents[2]


def fill(engine: RocksEngine, count: int = 2000, big: bool = False) -> None:
    made = WriteBatch()
    for i in range(count):
        made.put(b"%06d" % i, random.Random(i).randbytes(40))
    if big:
        made.put(b"%06dx" % (count // 2), bytes(100_000))
    engine.write(made)
    engine.flush()


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def test_nothing_is_written_to_rocksdbs_own_log(tmp_path: Path) -> None:
    engine = RocksEngine(str(tmp_path))
    made = WriteBatch()
    made.put(b"a", bytes(10_000))
    engine.write(made)
    assert all(path.stat().st_size == 0 for path in tmp_path.glob("*.log"))
    engine.close()


def test_large_values_are_in_blob_files(tmp_path: Path) -> None:
    engine = RocksEngine(str(tmp_path))
    fill(engine, big=True)
    assert engine.stats()["blob_bytes"] >= 100_000
    assert engine.stats()["sst_bytes"] < 200_000
    engine.close()


def test_keys_and_values_are_compressed(tmp_path: Path) -> None:
    engine = RocksEngine(str(tmp_path))
    made = WriteBatch()
    for i in range(1000):
        made.put(b"%d" % i, bytes(1000))
    engine.write(made)
    engine.flush()
    assert engine.stats()["sst_bytes"] < 100_000
    engine.close()


def test_two_engines_on_one_directory(tmp_path: Path) -> None:
    engine = RocksEngine(str(tmp_path))
    with pytest.raises(StoreInUse, match=str(tmp_path)):
        RocksEngine(str(tmp_path))
    other = "import sys; from kivi.engine.rocks import RocksEngine; RocksEngine(sys.argv[1])"
    ran = subprocess.run(
        [sys.executable, "-c", other, str(tmp_path)], check=False, capture_output=True, text=True, cwd=ROOT
    )
    assert "StoreInUse" in ran.stderr
    engine.close()
    RocksEngine(str(tmp_path)).close()


@pytest.mark.parametrize("what", ["*.sst", "MANIFEST-*"])
def test_a_damaged_file_is_data_loss_at_open_or_at_the_read(tmp_path: Path, what: str) -> None:
    engine = RocksEngine(str(tmp_path))
    fill(engine)
    engine.close()
    path = next(iter(tmp_path.glob(what)))
    flip(path, path.stat().st_size // 2)
    with pytest.raises(DataLoss, match=str(tmp_path)):
        engine = RocksEngine(str(tmp_path))
        list(engine.scan(b"", None))


@pytest.mark.parametrize("what", ["*.sst", "CURRENT"])
def test_a_missing_file_is_data_loss(tmp_path: Path, what: str) -> None:
    engine = RocksEngine(str(tmp_path))
    fill(engine)
    made = WriteBatch()
    made.put(b"not flushed", b"")
    engine.write(made)
    engine.close()
    next(iter(tmp_path.glob(what))).unlink()
    with pytest.raises(DataLoss, match=str(tmp_path)):
        RocksEngine(str(tmp_path))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("missing", [False, True])
def test_a_scan_does_not_end_silently_at_a_damaged_blob(tmp_path: Path, reverse: bool, missing: bool) -> None:
    engine = RocksEngine(str(tmp_path))
    fill(engine, big=True)
    engine.close()
    (path,) = tmp_path.glob("*.blob")
    if missing:
        path.unlink()
    else:
        flip(path, 5000)
    engine = RocksEngine(str(tmp_path))
    seen = 0
    with pytest.raises(DataLoss):
        for _ in engine.scan(b"", None, reverse=reverse):
            seen += 1
    assert 0 < seen < 2000
    with pytest.raises(DataLoss):
        engine.get(b"001000x")
    with pytest.raises(DataLoss):
        engine.get_many([b"000000", b"001000x"])
    engine.close()


@pytest.mark.parametrize("what", ["blob", "sst", "missing"])
@pytest.mark.parametrize("rows", [1, 7, 999, 1_000, 1_001, 5_000])
def test_records_do_not_end_silently_at_damage(tmp_path: Path, what: str, rows: int) -> None:
    engine = RocksEngine(str(tmp_path), records=RECORDS)
    fill(engine, big=True)
    engine.close()
    (path,) = tmp_path.glob("*.sst" if what == "sst" else "*.blob")
    if what == "missing":
        path.unlink()
    else:
        flip(path, path.stat().st_size // 2)
    engine = RocksEngine(str(tmp_path), records=RECORDS)
    seen = 0
    with pytest.raises(DataLoss):
        for part in engine.scan_records(b"0", b"1", rows, 40):
            assert [record[40:] for record in part] == [b"%06d" % i for i in range(seen, seen + rows)]
            seen += rows
    assert seen < 2000 and (seen or rows > 500)
    engine.close()


def test_what_follows_an_early_end_of_records_is_read_all_the_same(tmp_path: Path) -> None:
    """Whatever made the fast iterator end, the exact one of the same moment has the rest."""
    engine = RocksEngine(str(tmp_path), records=RECORDS)
    fill(engine, count=20)
    expected = [value + key for key, value in engine.scan(b"0", b"1")]
    for early in range(21):
        for rows in (1, 3, 7, 20, 30):
            bounds = rocksdict.ReadOptions()
            bounds.set_iterate_upper_bound(b"1")
            values, rest = engine._twins(bounds, b"0")
            short: Any = itertools.islice(values, early)
            chunks = list(_records(short, rest, b"0", rows, 40, bounds))
            assert [record for part in chunks for record in part] == expected
            assert list(map(len, chunks[:-1])) == [rows] * (len(chunks) - 1)
            del values, rest, short
    engine.close()


def test_records_are_kept_of_the_keys_that_were_named_when_the_engine_was_empty(tmp_path: Path) -> None:
    RocksEngine(str(tmp_path)).close()  # nothing was written to it
    engine = RocksEngine(str(tmp_path), records=RECORDS)
    fill(engine, count=3)
    engine.write(of({b"other": b"value"}))
    engine.close()
    again = RocksEngine(str(tmp_path), records=Records(b"note", b"0o"))  # the note counts, not what is asked for now
    again.write(of({b"000001": b"new", b"000002": None, b"other2": b"value"}))
    assert again.get_many([b"000000", b"000001", b"000002", b"other"]) == [
        random.Random(0).randbytes(40), b"new", None, b"value",
    ]  # fmt: skip
    assert dict(again.scan(b"0", b"1", reverse=True)) == {
        b"000000": random.Random(0).randbytes(40), b"000001": b"new"
    }  # fmt: skip
    again.flush()
    again.checkpoint(str(tmp_path / "copy"))
    again.close()
    plain = RocksEngine(str(tmp_path / "copy"))
    assert dict(plain.scan(b"", None)) == {
        b"000000": random.Random(0).randbytes(40) + b"000000", b"000001": b"new000001",
        b"note": b"0", b"other": b"value", b"other2": b"value",
    }  # fmt: skip
    plain.close()


def test_an_engine_that_holds_pairs_without_the_note_keeps_none(tmp_path: Path) -> None:
    engine = RocksEngine(str(tmp_path))
    fill(engine, count=5)
    engine.close()
    engine = RocksEngine(str(tmp_path), records=RECORDS)
    engine.write(of({b"000001": b"new", b"000009": b"more"}))
    values = {b"%06d" % i: random.Random(i).randbytes(40) for i in (0, 2, 3, 4)}
    assert dict(engine.scan(b"", None)) == values | {b"000001": b"new", b"000009": b"more"}
    assert [r for part in engine.scan_records(b"000002", b"000005", 2, 40) for r in part] == [
        values[b"%06d" % i] + b"%06d" % i for i in (2, 3, 4)
    ]
    engine.close()


@pytest.mark.parametrize("end", [None, b"1", b"1\0", b"10", b"2", b"000003", b"0"])
@pytest.mark.parametrize("start", [b"", b"/", b"0", b"000001", b"1", b"3"])
def test_ranges_of_records_and_of_other_keys(tmp_path: Path, start: bytes, end: bytes | None) -> None:
    engine = RocksEngine(str(tmp_path), records=RECORDS)
    pairs: dict[bytes, bytes | None] = {b"00000%d" % i: b"v%d" % i for i in range(4)}
    pairs |= {b"": b"v-", b"/": b"v/", b"1": b"v1", b"10": b"v2", b"2": b"v3", b"note": b"0."}
    engine.write(of({key: value for key, value in pairs.items() if key != b"note"}))
    expected = {k: v for k, v in sorted(pairs.items()) if start <= k and (end is None or k < end)}
    if b"note" in expected:
        expected[b"note"] = b"0"
    assert dict(engine.scan(start, end)) == expected
    assert dict(engine.scan(start, end, reverse=True)) == expected
    records = [record for chunk in engine.scan_records(start, end, 3, 2) for record in chunk]
    assert records == [value + key for key, value in expected.items() if value is not None]
    for keys in ([b"1", b"000001", b"none"], [b"000001", b"1"], [b"2", b"10"]):
        assert engine.get_many(keys) == [pairs.get(key) for key in keys]
    engine.close()


def test_records_are_read_the_quick_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a whole space, and those of a part of it."""
    engine = RocksEngine(str(tmp_path), records=RECORDS)
    fill(engine, count=20)
    monkeypatch.setattr(engine, "scan", None)
    for start, end in ((b"0", b"1"), (b"000003", b"000007"), (b"000003", b"1")):
        assert list(engine.scan_records(start, end, 7, 40))
    engine.close()


def test_an_engine_that_cannot_tell_what_it_holds_is_let_go_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: RocksEngine, records: Records) -> frozenset[bytes]:
        raise DataLoss("the note cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(RocksEngine, "_noted", fails)
        try:
            RocksEngine(str(tmp_path), records=RECORDS)
        except DataLoss as error:
            kept = error  # and with it the frames of what failed
    RocksEngine(str(tmp_path), records=RECORDS).close()
    assert "note" in str(kept)


def test_a_value_without_its_key_is_damage(tmp_path: Path) -> None:
    engine = RocksEngine(str(tmp_path))
    engine.write(of({b"note": b"0", b"000001": b"x000001", b"000002": b"x"}))
    engine.close()
    engine = RocksEngine(str(tmp_path), records=RECORDS)
    assert engine.get(b"000001") == b"x"
    for read in (
        lambda: engine.get(b"000002"),
        lambda: engine.get_many([b"000001", b"000002"]),
        lambda: list(engine.scan(b"0", b"1")),
    ):
        with pytest.raises(DataLoss, match="does not end with its key"):
            read()
    engine.close()


def of(pairs: dict[bytes, bytes | None]) -> WriteBatch:
    made = WriteBatch()
    for key, value in pairs.items():
        if value is None:
            made.delete(key)
        else:
            made.put(key, value)
    return made


def test_bounds_live_as_long_as_their_scans(tmp_path: Path) -> None:
    engine = RocksEngine(str(tmp_path), records=RECORDS)
    fill(engine)
    scans = [engine.scan(b"%06d" % (i * 10), b"%06d" % (i * 10 + 5)) for i in range(200)]
    records = [engine.scan_records(b"%06d" % (i * 10), b"%06d" % (i * 10 + 5), 10, 40) for i in range(200)]
    gc.collect()
    assert [len(list(scan)) for scan in scans] == [5] * 200
    assert [[len(part) for part in scan] for scan in records] == [[5]] * 200
    engine.close()


def test_what_we_found_in_rocksdict(tmp_path: Path) -> None:
    """The findings that the code works around. If this fails, rocksdict changed: look at each again."""
    engine = RocksEngine(str(tmp_path))
    fill(engine, count=20)
    bounds = rocksdict.ReadOptions()
    bounds.set_iterate_lower_bound(b"000010")
    iterator = engine._db.iter(bounds)
    iterator.seek(b"000000")
    assert iterator.key() == b"000000", "the lower bound is not a lower bound"
    iterator.seek(b"000010")
    assert not iterator.valid(), "... but an upper one"

    snapshot = engine._db.snapshot()
    made = WriteBatch()
    made.put(b"000000", b"later")
    engine.write(made)
    assert snapshot[b"000000"] != b"later"
    isolated = dict(snapshot.items())[b"000000"] != b"later"
    assert not isolated, "iterators of a Snapshot have become isolated"
    del iterator, snapshot
    engine.close()


@pytest.mark.parametrize(
    ("written", "damaged"),
    [
        (b"[TableOptions/BlockBasedTable ", b"[TableOptions/BlockBAsedTable "),
        (b"blob_garbage_collection_force_threshold=1", b"blob_garbage_collection_force_threshold=9"),
    ],
)
def test_damaged_options_are_not_needed(tmp_path: Path, written: bytes, damaged: bytes) -> None:
    engine = RocksEngine(str(tmp_path / "engine"))
    fill(engine, 10)
    engine._db.set_options({"enable_blob_garbage_collection": "true"})  # else the other is not looked at
    engine.close()
    newest = max((tmp_path / "engine").glob("OPTIONS-*"))
    text = newest.read_bytes()
    assert written in text
    newest.write_bytes(text.replace(written, damaged))
    engine = RocksEngine(str(tmp_path / "engine"))
    assert len(list(engine.scan(b"", None))) == 10
    engine.close()


def test_a_store_that_exists_is_opened_with_the_settings_of_now(tmp_path: Path) -> None:
    engine = RocksEngine(str(tmp_path / "engine"), cache_bytes=32 << 20, memtable_bytes=8 << 20)
    fill(engine, 10)
    engine.close()
    engine = RocksEngine(str(tmp_path / "engine"), cache_bytes=64 << 20, memtable_bytes=16 << 20)
    assert engine.stats()["block_cache_capacity_bytes"] == 64 << 20
    newest = max((tmp_path / "engine").glob("OPTIONS-*"))
    assert b"write_buffer_size=16777216" in newest.read_bytes()
    assert len(list(engine.scan(b"", None))) == 10
    engine.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("flipped", [4, 8, 0x40])
def test_a_manifest_with_a_record_of_another_type_is_refused_at_once(tmp_path: Path, flipped: int) -> None:
    engine = RocksEngine(str(tmp_path / "engine"))
    fill(engine, 10)
    engine.close()
    manifest = next((tmp_path / "engine").glob("MANIFEST-*"))
    whole = manifest.read_bytes()
    kinds, at = [], 0
    while at + 7 <= len(whole) and whole[at + 6]:
        kinds.append(at + 6)
        at += 7 + int.from_bytes(whole[at + 4 : at + 6], "little")
    assert len(kinds) > 1
    for kind in kinds:
        data = bytearray(whole)
        data[kind] ^= flipped
        manifest.write_bytes(data)
        with pytest.raises(DataLoss) as caught:
            RocksEngine(str(tmp_path / "engine"))
        assert caught.value.path == str(tmp_path / "engine")
    manifest.write_bytes(whole)
    RocksEngine(str(tmp_path / "engine")).close()


def test_manifests_of_many_blocks_are_read_to_their_end(tmp_path: Path) -> None:
    engine = RocksEngine(str(tmp_path / "engine"))
    for _ in range(400):
        fill(engine, 3)
    engine.close()
    manifest = next((tmp_path / "engine").glob("MANIFEST-*"))
    assert manifest.stat().st_size > 32 << 10
    RocksEngine(str(tmp_path / "engine")).close()


def _grown(engine: RocksEngine, rounds: range, kept: int, of: int) -> None:
    """Each round writes so many large values, and deletes all but ``kept`` of those of the round before it."""
    for i in rounds:
        batch = WriteBatch()
        batch.put(b"!", b"%d" % i)  # every file has keys of the others' ranges, so that compactions have to read them
        batch.put(b"~", b"%d" % i)
        for j in range(of):
            batch.put(b"%06d-%d" % (i, j), random.Random(i * of + j).randbytes(100_000))
            if j >= kept and i:
                batch.delete(b"%06d-%d" % (i - 1, j))
        engine.write(batch)
        engine.flush()
        wait_until(
            lambda: not engine.stats()["running_compactions"] and not engine.stats()["pending_compaction_bytes"], 60
        )


def test_compactions_do_not_copy_large_values_that_are_all_in_use(tmp_path: Path) -> None:
    engine = RocksEngine(str(tmp_path))
    _grown(engine, range(4), 4, 4)
    first = {path.name for path in tmp_path.glob("*.blob")}
    engine._db.set_options({"enable_blob_garbage_collection": "true"})  # as it always was in older versions
    engine.close()
    engine = RocksEngine(str(tmp_path))
    _grown(engine, range(4, 40), 4, 4)
    assert first <= {path.name for path in tmp_path.glob("*.blob")}
    assert engine.stats()["blob_bytes"] < 1.01 * 40 * 4 * 100_000
    engine.close()


def test_large_values_that_are_not_in_use_any_more_are_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kivi.engine.rocks._GARBAGE_BYTES_MIN", 1_000_000)
    engine = RocksEngine(str(tmp_path))
    _grown(engine, range(60), 1, 4)
    held = 60 * 100_000
    assert engine.stats()["blob_bytes"] < 2.5 * held  # written were four times as many
    left = [*(b"%06d-0" % i for i in range(59)), *(b"000059-%d" % j for j in range(4))]
    assert [key for key, _ in engine.scan(b"0", b"1")] == left
    _grown(engine, range(60, 400), 4, 4)  # nothing more is deleted: it ends collecting
    files = {path.name for path in tmp_path.glob("*.blob")}
    _grown(engine, range(400, 420), 4, 4)
    assert files <= {path.name for path in tmp_path.glob("*.blob")}
    engine.close()


def test_what_was_deleted_is_given_back_to_the_disk(tmp_path: Path) -> None:
    """Small values and large ones, of ranges that RocksDB would not compact by itself."""
    engine = RocksEngine(str(tmp_path))
    made = WriteBatch()
    for i in range(20_000):
        made.put(b"%06d" % i, random.Random(i).randbytes(100))
    for i in range(100):
        made.put(b"1%05d" % i, random.Random(i).randbytes(100_000))
    engine.write(made)
    engine.flush()
    gone = WriteBatch()
    gone.delete_range(b"0", b"019000")
    gone.delete_range(b"1", b"2")
    engine.write(gone)
    engine.flush()
    before = engine.stats()
    assert before["sst_bytes"] > 2_000_000 and before["blob_bytes"] > 9_000_000
    engine.give_back(b"0", b"2")
    wait_until(lambda: engine.stats()["sst_bytes"] < 300_000 and engine.stats()["blob_bytes"] < 100_000)
    assert len(list(engine.scan(b"", None))) == 1_000
    engine.close()


def test_blobs_beside_others_that_stay_are_given_back_though_nothing_compacts_the_keys_of_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two tables that grew together one is dropped: each blob file has some of both."""
    monkeypatch.setattr(rocks, "_GARBAGE_BYTES_MIN", 1 << 20)
    engine = RocksEngine(str(tmp_path))
    for part in range(4):
        made = WriteBatch()
        for i in range(20 * part, 20 * (part + 1)):
            for table in (b"0", b"1"):
                made.put(table + b"%05d" % i, random.Random(i).randbytes(100_000))
        engine.write(made)
        engine.flush()
    gone = WriteBatch()
    gone.owe(b"0", b"1")
    for i in range(80):
        gone.delete(b"0%05d" % i)
    engine.write(gone)
    engine.flush()
    engine.give_back(b"0", b"1")
    wait_until(lambda: engine.stats()["blob_bytes"] < 1.2 * 80 * 100_000)
    assert len(list(engine.scan(b"1", None))) == 80
    engine.close()


def test_giving_back_goes_part_by_part_and_rests_and_closing_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rocks, "_COMPACTED_BYTES", 1 << 20)
    engine = RocksEngine(str(tmp_path), memtable_bytes=1 << 20)
    for part in range(8):
        made = WriteBatch()
        for i in range(10_000):
            made.put(b"%02d%06d" % (part, i), random.Random(i).randbytes(100))
        engine.write(made)
        engine.flush()
    cuts = [*rocks._cuts(engine._db.live_files(), b"", None)]
    assert len(cuts) >= 5 and cuts == sorted(cuts)
    assert len([*rocks._cuts(engine._db.live_files(), b"02", b"04")]) <= 2
    monkeypatch.setattr(giving_back, "_REST_S", 1e6)
    engine.give_back(b"", None)
    wait_until(lambda: engine._giving_back._thread is not None)
    engine.close()  # does not wait until it has rested
    engine.give_back(b"", None)  # forgotten
    again = RocksEngine(str(tmp_path))
    assert sum(len(keys) for keys in again.keys(b"", None, 1_000)) == 80_000
    again.close()


def test_what_is_owed_is_noted_until_it_was_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RocksEngine(str(tmp_path), owed=b"owed/")

    def notes() -> dict[bytes, bytes]:
        return dict(engine.scan(b"owed/", b"owed0"))

    for at in (b"0", b"1"):
        made = WriteBatch()
        made.put(at + b"5", b"v")
        engine.write(made)
        gone = WriteBatch()
        gone.owe(at, None if at == b"1" else b"1")
        gone.delete(at + b"5")
        engine.write(gone)
    assert notes() == {b"owed/30": b"1", b"owed/31": b""}
    monkeypatch.setattr(giving_back, "_REST_S", 1e6)
    engine.give_back(b"1", None)
    wait_until(lambda: not engine._giving_back._asked)
    engine.give_back(b"0", b"1")  # it comes to neither end before it is closed
    engine.close()
    engine = RocksEngine(str(tmp_path), owed=b"owed/")
    assert notes() == {b"owed/30": b"1", b"owed/31": b""}
    monkeypatch.setattr(giving_back, "_REST_S", 0.0)
    engine.give_back_owed()
    wait_until(lambda: not notes())
    engine.close()


def test_what_is_deleted_while_its_range_is_compacted_is_still_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giving_back, "_REST_S", 0.0)
    forgotten, begun, goes_on = list[bytes](), threading.Event(), threading.Event()

    def compact(start: bytes, end: bytes | None) -> Iterator[None]:
        begun.set()
        goes_on.wait()
        yield

    giving = giving_back.GivingBack(compact, forgotten.append)
    giving.ask(b"0", b"1")
    begun.wait()
    with giving.owing([b"0"]):
        pass
    goes_on.set()
    giving.ask(b"2", b"3")
    wait_until(lambda: forgotten == [b"2"])
    giving.ask(b"0", b"1")
    wait_until(lambda: forgotten == [b"2", b"0"])
    giving.stop()


@pytest.mark.parametrize("what", ["flush", "checkpoint"])
def test_closing_waits_for_what_runs_beside_it(tmp_path: Path, what: str) -> None:
    """Whoever closes it while others flush, or copy it, has it closed: it opens again, with what was flushed."""
    value = random.Random(what).randbytes(1 << 20)
    for turn in range(20):
        engine = RocksEngine(str(tmp_path / "engine"))
        made = WriteBatch()
        for i in range(8):
            made.put(b"%d" % i, value + bytes([turn]))
        engine.write(made)
        began = threading.Event()

        def work(engine: RocksEngine = engine, began: threading.Event = began, turn: int = turn) -> None:
            with contextlib.suppress(Unavailable):
                for i in itertools.count():
                    began.set()
                    engine.flush() if what == "flush" else engine.checkpoint(str(tmp_path / f"copy-{turn}-{i}"))

        thread = threading.Thread(target=work)
        thread.start()
        began.wait()
        engine.close()
        thread.join()
    with contextlib.closing(RocksEngine(str(tmp_path / "engine"))) as again:
        assert sum(1 for _ in again.scan(b"", None)) == 8
