"""The suite that every log must pass."""

from __future__ import annotations

import itertools
import random
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kivi.errors import DataLoss, InvalidArgument, NotFound, Unavailable
from kivi.log import MAX_RECORD_NUMBERS, CommitLog, Entry, Kind, Record, Ticket
from kivi.log.memory import MemoryLog
from kivi.log.segmented import SegmentedLog

STORE = b"0123456789abcdef"


class Clock:
    def __init__(self) -> None:
        self.us = 1_000_000

    def __call__(self) -> int:
        return self.us * 1000 + 999


class Harness:
    """A log, how to close, crash and open it again, and a blocking append."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind, self.path, self.clock = kind, str(path / "log"), Clock()
        self.log: CommitLog = MemoryLog(clock=self.clock, max_record_bytes=1 << 20)
        self.memory = self.log
        if kind == "segmented":
            self.open()

    def open(self) -> CommitLog:
        if self.kind == "memory":
            assert isinstance(self.memory, MemoryLog)
            self.memory.reopen()
        else:
            self.log = SegmentedLog(
                self.path,
                store_id=STORE,
                clock=self.clock,
                segment_bytes=16 * 1024,
                max_record_bytes=1 << 20,
            )
        return self.log

    def reopen(self) -> CommitLog:
        self.log.close()
        return self.open()

    def crash(self) -> CommitLog:
        if isinstance(self.log, MemoryLog):
            self.log.crash()
            return self.log
        assert isinstance(self.log, SegmentedLog)
        self.log.abandon()
        return self.open()

    def append(self, *bodies: bytes, kind: Kind = Kind.COMMIT) -> Ticket:
        return put(self.log, *bodies, kind=kind)


def put(log: CommitLog, *bodies: bytes, kind: Kind = Kind.COMMIT) -> Ticket:
    event, outcome = threading.Event(), []

    def done(error: BaseException | None) -> None:
        outcome.append(error)
        event.set()

    ticket = log.append([Entry(kind, [body]) for body in bodies], done)
    assert event.wait(20)
    assert outcome == [None]
    return ticket


@pytest.fixture(params=["memory", "segmented"])
def h(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(request.param, tmp_path)
    yield harness
    harness.log.close()


def bodies(records: list[Record]) -> list[bytes]:
    return [bytes(record.body) for record in records]


def test_a_new_log_is_empty(h: Harness) -> None:
    assert (h.log.last, h.log.durable, h.log.first, h.log.last_time_us) == (0, 0, 1, 0)
    assert list(h.log.replay(0)) == []


def test_numbers_start_at_one_and_are_consecutive_in_a_group(h: Harness) -> None:
    assert h.append(b"a") == Ticket(1, 1, 1_000_000)
    h.clock.us += 5
    assert h.append(b"b", b"c", b"d") == Ticket(2, 4, 1_000_005)
    assert (h.log.last, h.log.durable, h.log.first, h.log.last_time_us) == (4, 4, 1, 1_000_005)
    assert list(h.log.replay(0)) == [
        Record(1, 1_000_000, Kind.COMMIT, b"a"),
        Record(2, 1_000_005, Kind.COMMIT, b"b"),
        Record(3, 1_000_005, Kind.COMMIT, b"c"),
        Record(4, 1_000_005, Kind.COMMIT, b"d"),
    ]


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_comes_back(h: Harness, kind: Kind) -> None:
    h.append(b"x", kind=kind)
    h.reopen()
    assert [record.kind for record in h.log.replay(0)] == [kind]


def test_a_body_in_parts_of_any_buffer_type(h: Harness) -> None:
    parts: list[Any] = [
        b"ab",
        memoryview(b"cd"),
        b"",
        bytearray(b"ef"),
        memoryview(array("I", [1, 2])),
        memoryview(b""),
    ]
    expected = b"".join(bytes(part) for part in parts)
    event = threading.Event()
    records = [Entry(Kind.COMMIT, parts), Entry(Kind.COMMIT, [])]
    h.log.append(records, lambda error: event.set())
    event.wait(20)
    assert bodies(list(h.reopen().replay(0))) == [expected, b""]


def test_more_parts_than_one_system_call_takes(h: Harness) -> None:
    event = threading.Event()
    h.log.append([Entry(Kind.COMMIT, [b"%d," % i for i in range(5000)])], lambda error: event.set())
    event.wait(20)
    assert bytes(h.reopen().read(1).body) == b"".join(b"%d," % i for i in range(5000))


def test_done_is_called_once_in_log_order_when_durable(h: Harness) -> None:
    seen: list[tuple[int, BaseException | None, bool]] = []
    tickets: list[Ticket] = []
    finished = threading.Event()

    def done(i: int) -> Callable[[BaseException | None], None]:
        def call(error: BaseException | None) -> None:
            seen.append((i, error, h.log.durable >= i + 1))
            if i == 499:
                finished.set()

        return call

    tickets.extend(h.log.append([Entry(Kind.COMMIT, [b"x" * (i % 700)])], done(i)) for i in range(500))
    assert finished.wait(20)
    assert seen == [(i, None, True) for i in range(500)]
    assert [ticket.first for ticket in tickets] == list(range(1, 501))


def test_what_done_raises_stops_nothing(h: Harness) -> None:
    def done(error: BaseException | None) -> None:
        raise RuntimeError("a bug in the caller")

    if h.kind == "segmented":
        h.log.append([Entry(Kind.COMMIT, [b"x"])], done)
        assert h.append(b"y").first == 2


def test_done_may_append(h: Harness) -> None:
    event = threading.Event()
    h.log.append(
        [Entry(Kind.COMMIT, [b"a"])],
        lambda error: (h.log.append([Entry(Kind.COMMIT, [b"b"])], lambda error: event.set()), None)[1],
    )
    assert event.wait(20)
    assert bodies(list(h.log.replay(0))) == [b"a", b"b"]


def test_groups_of_many_threads_stay_together(h: Harness) -> None:
    def work(name: int) -> None:
        rng = random.Random(name)
        for i in range(30):
            body = b"%d-%d-" % (name, i) + bytes(rng.randrange(300))
            h.append(*[body] * rng.randrange(1, 5))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = list(h.reopen().replay(0))
    assert [record.sequence for record in records] == list(range(1, len(records) + 1))
    runs = [records[0].body]
    for before, record in itertools.pairwise(records):
        assert record.time_us >= before.time_us
        if record.body != before.body:
            runs.append(record.body)
    assert len(runs) == len(set(map(bytes, runs))) == 240


def test_everything_is_there_after_a_restart_and_after_a_crash(h: Harness) -> None:
    for i in range(100):
        h.append(b"%d" % i * 100)
    expected = list(h.log.replay(0))
    assert list(h.reopen().replay(0)) == expected
    assert (h.log.last, h.log.durable, h.log.first) == (100, 100, 1)
    assert h.append(b"next").first == 101
    h.crash()
    assert list(h.log.replay(0))[:100] == expected
    assert (h.log.last, h.log.durable) == (101, 101)
    for _ in range(3):
        before = h.log.last
        assert h.append(b"again").first > before
        h.crash()
    assert [record.sequence for record in h.log.replay(0)] == sorted(r.sequence for r in h.log.replay(0))


def test_times_never_fall(h: Harness) -> None:
    assert h.append(b"a").time_us == 1_000_000
    h.clock.us = 400
    assert h.append(b"b").time_us == 1_000_000
    assert h.reopen().last_time_us == 1_000_000
    assert h.append(b"c").time_us == 1_000_000


def test_replay_after(h: Harness) -> None:
    for i in range(1, 101):
        h.append(b"%d" % i * 150)
    for after in (0, 1, 50, 99, 100):
        assert [record.sequence for record in h.log.replay(after)] == list(range(after + 1, 101))
    with pytest.raises(DataLoss):
        h.log.replay(101)


def test_replay_sees_the_moment_of_the_call(h: Harness) -> None:
    h.append(b"a")
    records = h.log.replay(0)
    h.append(b"b")
    assert bodies(list(records)) == [b"a"]


def test_read(h: Harness) -> None:
    rng = random.Random(5)
    for i in range(1, 61):
        h.append(b"%d" % i * 300)
    for log in (h.log, h.reopen()):
        for i in rng.sample(range(1, 61), 60):
            assert bytes(log.read(i).body) == b"%d" % i * 300
        for missing in (0, 61, 10**9):
            with pytest.raises(NotFound):
                log.read(missing)


def test_truncate_forgets_and_numbers_do_not_regress(h: Harness) -> None:
    for i in range(100):
        h.append(b"%d" % i * 300)
    h.log.truncate(50)
    first = h.log.first
    assert 1 < first <= 50
    assert h.reopen().first == first
    assert [record.sequence for record in h.log.replay(first - 1)] == list(range(first, 101))
    for after in (0, first - 2):
        with pytest.raises(DataLoss):
            h.log.replay(after)
    with pytest.raises(NotFound):
        h.log.read(first - 1)
    h.log.truncate(10**9)
    h.reopen()
    assert (h.log.last, h.log.durable, h.log.last_time_us) == (100, 100, 1_000_000)
    assert list(h.log.replay(100)) == []
    h.clock.us = 3
    assert h.append(b"x") == Ticket(101, 101, 1_000_000)
    h.log.truncate(10**9)
    assert h.crash().last == 101


def test_limits(h: Harness) -> None:
    def never(error: BaseException | None) -> None:
        raise AssertionError

    with pytest.raises(InvalidArgument):
        h.log.append([], never)
    with pytest.raises(InvalidArgument):
        h.log.append([Entry(Kind.COMMIT, [bytes(1 << 20), b"x"])], never)
    assert h.append(bytes(1 << 20)).first == 1


def test_close_finishes_what_is_queued_and_then_refuses(h: Harness) -> None:
    seen: list[BaseException | None] = []
    for _ in range(50):
        h.log.append([Entry(Kind.COMMIT, [b"x"])], seen.append)
    h.log.close()
    h.log.close()
    assert seen == [None] * 50
    with pytest.raises(Unavailable):
        h.append(b"x")
    assert len(list(h.open().replay(0))) == 50


def test_stats_are_numbers(h: Harness) -> None:
    h.append(b"x")
    assert all(isinstance(value, (int, float)) for value in h.log.stats().values())


def test_a_record_may_take_several_numbers(h: Harness) -> None:
    """The numbers inside a record are its own: it is found by each of them, and the next record begins behind them."""
    event = threading.Event()
    entries = [
        Entry(Kind.COMMIT, [b"one"]),
        Entry(Kind.COMMIT, [b"three"], 3),
        Entry(Kind.COMMIT, [b"many", bytes(10_000)], 70_000),
        Entry(Kind.COMMIT, [b"last"]),
    ]
    ticket = h.log.append(entries, lambda error: event.set())
    event.wait(20)
    first = ticket.first
    assert ticket.last == first + 70_004 == h.log.last == h.log.durable
    assert h.log.next == ticket.last + 1
    numbers = [(first, first), (first + 1, first + 3), (first + 4, first + 70_003), (first + 70_004, first + 70_004)]
    for log in (h.log, h.reopen()):
        assert [(record.sequence, record.last) for record in log.replay(0)] == numbers
        for number in (first + 1, first + 2, first + 3):
            assert log.read(number).body == b"three"
        assert log.read(first + 50_000).sequence == first + 4
        assert [bytes(record.body[:4]) for record in log.replay(first + 2)] == [b"thre", b"many", b"last"]
        assert [bytes(record.body[:4]) for record in log.replay(first + 3)] == [b"many", b"last"]
        assert log.last == ticket.last
        assert log.next > log.last


def test_a_record_takes_at_least_one_number_and_not_too_many(h: Harness) -> None:
    for count in (0, -1, MAX_RECORD_NUMBERS + 1):
        with pytest.raises(InvalidArgument):
            h.log.append([Entry(Kind.COMMIT, [b"x"], count)], lambda error: None)
    assert h.log.last == 0
