"""The suite that every engine must pass."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kivi.engine import Engine, WriteBatch
from kivi.engine.memory import MemoryEngine
from kivi.engine.rocks import Records, RocksEngine
from kivi.errors import InvalidArgument, Unavailable

Ops = dict[bytes, bytes | None]


def batch(ops: Ops) -> WriteBatch:
    made = WriteBatch()
    for key, value in ops.items():
        if value is None:
            made.delete(key)
        else:
            made.put(key, value)
    return made


class Recording(RocksEngine):
    """Keeps everything as records, and no note that a scan would see."""

    def __init__(self, path: str) -> None:
        super().__init__(path, records=Records(b"", bytes(range(256))))

    def _noted(self, records: Records) -> frozenset[bytes]:
        return frozenset(bytes((first,)) for first in records.of)


@pytest.fixture(params=["memory", "rocks", "records"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def rocks(path: Path | str, kind: str) -> RocksEngine:
    return Recording(str(path)) if kind == "records" else RocksEngine(str(path))


@pytest.fixture
def engine(kind: str, tmp_path: Path) -> Iterator[Engine]:
    made = MemoryEngine() if kind == "memory" else rocks(tmp_path / "engine", kind)
    yield made
    made.close()


@pytest.fixture
def reopen(kind: str, tmp_path: Path) -> Callable[[Engine], Engine]:
    def again(engine: Engine) -> Engine:
        engine.close()
        if isinstance(engine, MemoryEngine):
            engine.reopen()
            return engine
        return rocks(tmp_path / "engine", kind)

    return again


def test_a_range_is_deleted_before_the_rest_of_its_batch(engine: Engine, reopen: Callable[[Engine], Engine]) -> None:
    engine.write(batch({b"a": b"1", b"b": b"2", b"c": b"3", b"d": b"4"}))
    made = WriteBatch()
    made.put(b"b", b"new")
    made.delete_range(b"b", b"d")
    made.delete_range(b"x", b"z")
    assert len(made) == 3
    before = engine.scan(b"", None)
    engine.write(made)
    left = [(b"a", b"1"), (b"b", b"new"), (b"d", b"4")]
    assert list(engine.scan(b"", None)) == left
    assert engine.get_many([b"b", b"c"]) == [b"new", None]
    assert [key for key, _ in before] == [b"a", b"b", b"c", b"d"]
    engine.flush()
    assert list(reopen(engine).scan(b"", None)) == left


def test_a_crash_takes_back_a_range_with_its_batch() -> None:
    engine = MemoryEngine()
    engine.write(batch({b"a": b"1", b"b": b"2"}))
    engine.flush()
    made = WriteBatch()
    made.delete_range(b"a", b"c")
    made.put(b"b", b"new")
    engine.write(made)
    engine.crash()
    assert list(engine.scan(b"", None)) == [(b"a", b"1"), (b"b", b"2")]


def test_a_batch_knows_its_order_and_size() -> None:
    made = batch({b"key": b"value", b"gone": None})
    assert list(made) == made.ops == [(b"key", b"value"), (b"gone", None)]
    assert (len(made), made.size_bytes) == (2, 12)


def test_get_put_delete(engine: Engine) -> None:
    engine.write(batch({b"a": b"1", b"b": b"", b"\x00": b"zero"}))
    assert engine.get_many([b"b", b"nothing", b"a", b"\x00", b"a"]) == [b"", None, b"1", b"zero", b"1"]
    engine.write(batch({b"a": None, b"never": None}))
    assert (engine.get(b"a"), engine.get(b"b"), engine.get_many([])) == (None, b"", [])
    engine.write(WriteBatch())


def test_the_last_operation_on_a_key_of_a_batch_wins(engine: Engine) -> None:
    made = batch({b"a": b"1", b"b": b"1"})
    made.put(b"a", b"2")
    made.delete(b"b")
    made.put(b"c", b"1")
    made.delete(b"c")
    made.put(b"c", b"2")
    engine.write(made)
    assert engine.get_many([b"a", b"b", b"c"]) == [b"2", None, b"2"]


def test_scan_is_in_unsigned_byte_order_and_half_open(engine: Engine) -> None:
    keys = [b"", b"\x00", b"\x00\x00", b"a", b"a\x00", b"aa", b"b", b"\x7f", b"\x80", b"\xff", b"\xff\xff"]
    engine.write(batch({key: key + b"!" for key in random.Random(1).sample(keys, len(keys))}))
    assert [key for key, _ in engine.scan(b"", None)] == sorted(keys)
    for start in [*keys, b"ab", b"\xff\xff\xff"]:
        for end in [*keys, b"ab", None]:
            expected = [(k, k + b"!") for k in sorted(keys) if start <= k and (end is None or k < end)]
            assert list(engine.scan(start, end)) == expected
            assert list(engine.scan(start, end, reverse=True)) == expected[::-1]


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 11, 12, 100])
def test_records_are_a_scan_with_the_keys_behind_the_values(engine: Engine, rows: int) -> None:
    keys = sorted([b"", b"\x00", b"a", b"a\x00", b"aa", b"aab", b"ab", b"a\xff", b"b", b"bb", b"\xff", b"\xff\xff"])
    engine.write(batch({key: bytes([len(key)]) * 3 for key in keys}))
    for start in [*keys, b"ac", b"\xff\xff\xff"]:
        for end in [*keys, b"ac", None]:
            chunks = list(engine.scan_records(start, end, rows, 3))
            expected = [value + key for key, value in engine.scan(start, end)]
            assert [record for part in chunks for record in part] == expected
            assert list(map(len, chunks)) == [min(rows, len(expected) - at) for at in range(0, len(expected), rows)]


@pytest.mark.parametrize("end", [b"k999", None])
def test_records_see_the_moment_of_the_call(engine: Engine, end: bytes | None) -> None:
    before = {b"k%03d" % i: b"old" for i in range(0, 300, 2)}
    engine.write(batch(dict(before)))
    unstarted = engine.scan_records(b"k", end, 10, 3)
    started = engine.scan_records(b"k", end, 10, 3)
    first = next(started)
    engine.write(batch({b"k%03d" % i: b"new" for i in range(0, 300, 3)}))
    engine.write(batch({b"k%03d" % i: None for i in range(0, 300, 4)} | {b"k998": b"new"}))
    engine.flush()
    for chunks in (list(unstarted), [first, *started]):
        assert [record for part in chunks for record in part] == [value + key for key, value in before.items()]


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_sees_the_moment_of_the_call(engine: Engine, reverse: bool) -> None:
    before = {b"%03d" % i: b"old" for i in range(0, 300, 2)}
    engine.write(batch(dict(before)))
    unstarted = engine.scan(b"", None, reverse=reverse)
    started = engine.scan(b"", None, reverse=reverse)
    first = next(started)
    engine.write(batch({b"%03d" % i: b"new" for i in range(0, 300, 3)}))
    engine.write(batch({b"%03d" % i: None for i in range(0, 300, 4)}))
    engine.flush()
    expected = sorted(before.items(), reverse=reverse)
    assert list(unstarted) == expected
    assert [first, *started] == expected
    assert list(engine.scan(b"", None)) != expected


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_keys_are_those_of_a_scan(engine: Engine, rows: int) -> None:
    engine.write(batch({b"%03d" % i: b"v" * (i % 5) for i in range(20)}))
    for start, end in ((b"", None), (b"004", b"011"), (b"0045", b"0115"), (b"7", None), (b"01", b"01")):
        lists = list(engine.keys(start, end, rows))
        assert [key for part in lists for key in part] == [key for key, _ in engine.scan(start, end)]
        assert all(len(part) == rows for part in lists[:-1])
        assert all(lists)
    before = engine.keys(b"", None, rows)
    engine.write(batch({b"000": None, b"0001": b""}))
    assert [key for part in before for key in part] == [b"%03d" % i for i in range(20)]


def test_scans_stay_whole_while_threads_write(engine: Engine) -> None:
    """Writers keep every key of the store at one value per batch: a scan must see one value only."""
    keys = [b"%04d" % i for i in range(200)]
    engine.write(batch(dict.fromkeys(keys, b"0000")))
    stop = threading.Event()
    wrong: list[object] = []

    def write() -> None:
        for n in range(1, 10_000):
            if stop.is_set():
                break
            engine.write(batch(dict.fromkeys(keys, b"%04d" % n)))
            if n % 50 == 0:
                engine.flush()

    def read() -> None:
        for turn in range(60):
            if turn % 3:
                seen = [value for _, value in engine.scan(b"", None, reverse=bool(turn % 2))]
            else:
                records = engine.scan_records(keys[0][:1], b"l", 30, 4)
                seen = [record[:4] for part in records for record in part]
            if len(seen) != len(keys) or len(set(seen)) != 1:
                wrong.append(seen)

    writer = threading.Thread(target=write)
    readers = [threading.Thread(target=read) for _ in range(3)]
    for thread in [writer, *readers]:
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    writer.join()
    assert not wrong


def test_a_scan_may_be_finished_by_another_thread(engine: Engine) -> None:
    engine.write(batch({b"a": b"1", b"b": b"2"}))
    scan = engine.scan(b"", None)
    seen = [next(scan)]
    thread = threading.Thread(target=lambda: seen.extend(scan))
    thread.start()
    thread.join()
    assert seen == [(b"a", b"1"), (b"b", b"2")]


def test_large_values(engine: Engine, reopen: Callable[[Engine], Engine]) -> None:
    values = {b"%d" % i: random.Random(i).randbytes(size) for i, size in enumerate([65_535, 65_536, 3 << 20])}
    engine.write(batch(dict(values)))
    assert dict(engine.scan(b"", None)) == values
    engine.flush()
    engine = reopen(engine)
    assert dict(engine.scan(b"", None)) == values
    assert engine.get(b"2") == values[b"2"]
    engine.close()


def test_a_closed_engine_and_its_open_scans_refuse(engine: Engine, reopen: Callable[[Engine], Engine]) -> None:
    engine.write(batch({b"a": b"1", b"aa": b"2", b"b": b"3"}))
    scans = [engine.scan(b"", None), engine.scan(b"", None)]
    next(scans[0])
    records = [engine.scan_records(b"a", b"b", 1, 1), engine.scan_records(b"a", b"b", 1, 1)]
    assert next(records[0]) == [b"1a"]
    engine.close()
    engine.close()
    for scan in [*scans, *records]:
        with pytest.raises(Unavailable):
            next(scan)
    for call in (
        lambda: engine.get(b"a"),
        lambda: engine.get_many([b"a"]),
        lambda: engine.scan(b"", None),
        lambda: engine.scan_records(b"a", b"b", 1, 1),
        lambda: engine.write(batch({b"a": b"1"})),
        lambda: engine.flush(),
    ):
        with pytest.raises(Unavailable):
            call()
    again = reopen(engine)  # the open scans must not hold its files
    assert again.get(b"a") == b"1"
    again.close()


def test_checkpoint_is_a_copy(engine: Engine, kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "copy")
    engine.write(batch({b"a": b"1", b"big": bytes(100_000)}))
    engine.checkpoint(path)
    engine.write(batch({b"a": b"2"}))
    with pytest.raises(InvalidArgument):
        engine.checkpoint(path)
    copy = engine.checkpoints[path] if isinstance(engine, MemoryEngine) else rocks(path, kind)
    assert dict(copy.scan(b"", None)) == {b"a": b"1", b"big": bytes(100_000)}
    copy.close()


def test_stats_are_integers(engine: Engine) -> None:
    engine.write(batch({b"a": b"1"}))
    assert engine.stats()
    assert all(isinstance(value, int) for value in engine.stats().values())


def test_model(engine: Engine) -> None:
    """Random operations against a dictionary."""
    rng = random.Random(7)
    model: dict[bytes, bytes] = {}
    for _ in range(300):
        ops: Ops = {}
        for _ in range(rng.randrange(8)):
            ops[b"%d" % rng.randrange(60)] = None if rng.random() < 0.3 else rng.randbytes(5)
        engine.write(batch(ops))
        for key, value in ops.items():
            if value is None:
                model.pop(key, None)
            else:
                model[key] = value
        if rng.random() < 0.1:
            engine.flush()
        low, high = sorted([b"%d" % rng.randrange(60), b"%d" % rng.randrange(60)])
        expected = {k: v for k, v in model.items() if low <= k < high}
        assert dict(engine.scan(low, high)) == expected
    assert list(engine.scan(b"", None)) == sorted(model.items())


def test_giving_back_changes_nothing_that_is_read(engine: Engine, reopen: Callable[[Engine], Engine]) -> None:
    engine.write(batch({b"%05d" % i: b"v" * 50 for i in range(5_000)}))
    engine.flush()
    made = WriteBatch()
    made.delete_range(b"01000", b"04000")
    engine.write(made)
    before = engine.scan(b"", None)
    for start, end in ((b"01000", b"04000"), (b"", None), (b"2", b"3")):
        engine.give_back(start, end)
    left = [b"%05d" % i for i in (*range(1_000), *range(4_000, 5_000))]
    for _ in range(20):
        assert [key for key, _ in engine.scan(b"", None)] == left
    engine.flush()
    engine = reopen(engine)
    assert [key for key, _ in engine.scan(b"", None)] == left
    engine.close()
    del before
