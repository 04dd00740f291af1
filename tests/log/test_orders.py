"""What every log promises to who commits through it, whoever gives the numbers: the local log, and the replicated one.

A local log gives numbers as records enter, and says later that they are durable. A log that orders takes proposals, and
gives numbers as they come back, durable, in one order that everybody sees. Seen from outside both are this: what was
entered together has consecutive numbers, numbers and times only grow, each is told once, in order, when it is durable,
and a log that is opened again goes on behind all that was told.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kivi.errors import InvalidArgument, Unavailable
from kivi.log import CommitLog, Entry, Kind, Ticket
from kivi.log.jetstream import JetStream
from kivi.log.natslink import Nats
from kivi.log.replicated import Arrived, ReplicatedLog
from kivi.log.segmented import SegmentedLog
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.waiting import wait_until


@dataclass(frozen=True)
class Told:
    """What became of a group: its bodies, its numbers, and what the log said was durable when it told."""

    bodies: tuple[bytes, ...]
    ticket: Ticket
    durable: int


class Gateway(ABC):
    """One process that commits through a log."""

    log: CommitLog

    def __init__(self) -> None:
        self.told: list[Told] = []

    @abstractmethod
    def enter(self, *bodies: bytes) -> None:
        """Enters a group. Does not wait."""

    @abstractmethod
    def reopen(self, *, crash: bool) -> None:
        """Ends and begins again, where it was told."""

    @abstractmethod
    def close(self) -> None: ...

    def put(self, *bodies: bytes) -> Ticket:
        """Enters a group, and waits until that is told."""
        before = len(self.told)
        self.enter(*bodies)
        wait_until(lambda: len(self.told) > before, pause_s=0.001)
        return self.told[before].ticket


class Local(Gateway):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = str(path)
        self._open()

    def _open(self) -> None:
        self.log = SegmentedLog(self.path, store_id=b"0123456789abcdef", max_record_bytes=1 << 20)

    def enter(self, *bodies: bytes) -> None:
        tickets: list[Ticket] = []
        known = threading.Event()

        def done(error: BaseException | None) -> None:
            assert error is None
            known.wait()
            self.told.append(Told(bodies, tickets[0], self.log.durable))

        tickets.append(self.log.append([Entry(Kind.COMMIT, [body]) for body in bodies], done))
        known.set()

    def reopen(self, *, crash: bool) -> None:
        assert isinstance(self.log, SegmentedLog)
        if crash:
            self.log.abandon()
        else:
            self.log.close()
        self._open()

    def close(self) -> None:
        self.log.close()


class Replicated(Gateway):
    """Every body commits. What is saved at a number is what a crash leaves, if that is older than what was told."""

    log: ReplicatedLog

    def __init__(self, stream: Callable[[], JetStream], node: int) -> None:
        super().__init__()
        self._stream, self.node, self.boot = stream, node, 0
        self._saved: bytes | None = None
        self._open()

    def _open(self) -> None:
        self.boot += 1
        stream = self._stream()
        self.log = ReplicatedLog(
            stream, generation=b"a generation    ", node=self.node, boot=self.boot, saved=self._saved
        )
        self.log.on_arrival = self._arrived
        self._news, self._ending = threading.Event(), False
        stream.on_news = self._news.set
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending:
            self._news.wait(0.02)
            self._news.clear()
            with contextlib.suppress(Unavailable):
                self.log.pump()
                self.log.outbox.retry()

    def _arrived(self, arrived: Arrived) -> None:
        bodies = tuple(bytes(entry.body[0]) for entry in arrived.frame.entries)
        tickets: list[Ticket] = []

        def done(error: BaseException | None) -> None:
            assert error is None
            self.told.append(Told(bodies, tickets[0], self.log.durable))

        tickets.append(self.log.append(arrived.frame.entries, done))
        for one in self.log.take_done():
            one(None)

    def enter(self, *bodies: bytes) -> None:
        self.log.propose([Entry(Kind.COMMIT, [body]) for body in bodies], 0, lambda n: None)

    def reopen(self, *, crash: bool) -> None:
        self._end()
        if not crash:
            self._saved = self.log.save(self.log.last)
        else:
            self.told = []  # all behind what was saved is told again
        self._open()

    def _end(self) -> None:
        self._ending = True
        self._news.set()
        self._thread.join()
        self.log.close()

    def close(self) -> None:
        self._end()


@pytest.fixture(scope="module", params=["local", "replicated"])
def gateways(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Callable[[], Gateway]]]:
    """Makes logs, each new: each is a function that makes a gateway to it."""
    names = itertools.count()
    if request.param == "local":
        yield lambda: lambda: Local(tmp_path_factory.mktemp("log") / "log")
        return
    require("nats-server")
    with NatsCluster(tmp_path_factory.mktemp("nats"), 1) as cluster, contextlib.closing(Nats(cluster.urls)) as nats:

        def made() -> Callable[[], Gateway]:
            name, nodes = f"log-{next(names)}", itertools.count(1)
            return lambda: Replicated(lambda: JetStream(nats, name, max_bytes=64 << 20), next(nodes))

        yield made


@pytest.fixture
def log(gateways: Callable[[], Callable[[], Gateway]]) -> Iterator[Callable[[], Gateway]]:
    """Gateways to one new log; a local one has no more than one."""
    made: list[Gateway] = []
    make = gateways()

    def opened() -> Gateway:
        made.append(make())
        return made[-1]

    yield opened
    for one in made:
        one.close()


def test_numbers_begin_at_one_and_are_consecutive_in_a_group(log: Callable[[], Gateway]) -> None:
    one = log()
    assert (one.log.last, one.log.next, one.log.durable, one.log.last_time_us) == (0, 1, 0, 0)
    first, second = one.put(b"a"), one.put(b"b", b"c", b"d")
    assert [(first.first, first.last), (second.first, second.last)] == [(1, 1), (2, 4)]
    wait_until(lambda: one.log.last == 4)
    assert (one.log.next, one.log.durable, one.log.last_time_us) == (5, 4, second.time_us)
    assert abs(first.time_us / 1e6 - time.time()) < 600


def test_all_is_told_once_in_order_when_it_is_durable(log: Callable[[], Gateway]) -> None:
    one = log()
    for i in range(300):
        one.enter(*[b"%d" % i] * (1 + i % 3))
    wait_until(lambda: len(one.told) == 300)
    assert sorted(told.bodies for told in one.told) == sorted((b"%d" % i,) * (1 + i % 3) for i in range(300))
    last, last_us = 0, 0
    for told in one.told:
        assert told.ticket.first == last + 1
        assert told.ticket.last == last + len(told.bodies) <= told.durable
        assert told.ticket.time_us >= last_us
        last, last_us = told.ticket.last, told.ticket.time_us


def test_groups_of_many_threads_stay_together(log: Callable[[], Gateway]) -> None:
    one = log()

    def work(name: int) -> None:
        for i in range(25):
            one.enter(*[b"%d-%d" % (name, i)] * (1 + i % 4))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(one.told) == 100)
    assert all(len(set(told.bodies)) == 1 and len(told.bodies) == _size(told) for told in one.told)


def _size(told: Told) -> int:
    return told.ticket.last - told.ticket.first + 1


@pytest.mark.parametrize("crash", [False, True])
def test_a_log_that_is_opened_again_goes_on_behind_what_was_told(log: Callable[[], Gateway], crash: bool) -> None:
    one = log()
    for i in range(20):
        one.put(b"%d" % i)
    told = [*one.told]
    before = told[-1].ticket
    one.reopen(crash=crash)
    after = one.log.last
    wait_until(lambda: one.log.last >= before.last)
    assert crash or after == before.last
    wait_until(lambda: one.told == told)  # all of it, again and alike, where a crash has left nothing
    again = one.put(b"next") if not crash else _next(one)
    assert again.first > before.last
    assert again.time_us >= before.time_us


def _next(one: Gateway) -> Ticket:
    """Of a log that tells again what it had told."""
    one.enter(b"next")
    wait_until(lambda: one.told[-1].bodies == (b"next",))
    return one.told[-1].ticket


def test_what_is_over_the_limits_does_not_enter(log: Callable[[], Gateway]) -> None:
    one = log()
    with pytest.raises(InvalidArgument):
        one.enter()
    with pytest.raises(InvalidArgument):
        one.enter(bytes((64 << 20) + 1))
    assert one.put(b"x").first == 1


def test_everybody_sees_one_order(log: Callable[[], Gateway]) -> None:
    one = log()
    if isinstance(one, Local):
        pytest.skip("a local log has one process")
    others = [log(), log()]
    for i in range(40):
        for gateway in (one, *others):
            gateway.enter(b"%d" % i)
    wait_until(lambda: all(len(gateway.told) == 120 for gateway in (one, *others)))
    assert [told.ticket for told in one.told] == [told.ticket for told in others[0].told]
    assert one.told == others[0].told == others[1].told
