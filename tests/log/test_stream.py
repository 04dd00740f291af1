"""The suite that every stream must pass: simulated servers, one real nats-server, and three of them."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kivi.errors import Unavailable
from kivi.log.jetstream import JetStream
from kivi.log.natslink import Nats
from kivi.log.stream import Message, Stream
from tests.cluster.servers import Client, Faults, Servers
from tests.conftest import require
from tests.log.natscluster import NatsCluster, copies_are_equal
from tests.waiting import wait_until


class Time:
    """What the simulated servers need of a simulation."""

    def __init__(self) -> None:
        self.rng, self.now_us = random.Random(1), 1_800_000_000_000_000
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def clock(self) -> float:
        return self.now_us / 1_000_000

    def after(self, delay_us: int, run: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now_us + delay_us, next(self._order), run))

    def run(self) -> None:
        while self._events:
            self.now_us, _, run = heapq.heappop(self._events)
            run()


class Harness:
    """A new stream, and a publish that waits for its acknowledgement."""

    def __init__(self, stream: Stream, time: Time | None = None) -> None:
        self.stream, self.time = stream, time
        self.told: list[tuple[str, BaseException | None]] = []

    def publish(self, *messages: tuple[str, bytes]) -> None:
        upto = len(self.told) + len(messages)
        for name, data in messages:
            self.stream.publish(name, data, lambda error, name=name: self.told.append((name, error)))  # type: ignore[misc]
        self.pass_time()
        wait_until(lambda: len(self.told) >= upto, pause_s=0.001)

    def pass_time(self) -> None:
        if self.time is not None:
            self.time.run()

    def read(self, first: int, count: int = 1000) -> list[Message]:
        return [*self.stream.fetch(first, count)]


@pytest.fixture(scope="module", params=["simulated", "one", "three"])
def streams(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Harness]]:
    """Makes streams, each new, all on the same servers."""
    if request.param == "simulated":

        def simulated() -> Harness:
            time: Any = Time()
            return Harness(Client(Servers(time, Faults(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0))), time)

        yield simulated
        return
    require("nats-server")
    names = itertools.count()
    size = 1 if request.param == "one" else 3
    with NatsCluster(tmp_path_factory.mktemp("nats"), size) as cluster, contextlib.closing(Nats(cluster.urls)) as nats:
        yield lambda: Harness(JetStream(nats, f"stream-{next(names)}", max_bytes=64 << 20))


@pytest.fixture
def h(streams: Callable[[], Harness]) -> Iterator[Harness]:
    harness = streams()
    yield harness
    if not getattr(harness.stream, "closed", False):
        harness.stream.close()


def test_a_new_stream_is_empty(h: Harness) -> None:
    assert h.stream.bounds() == (1, 0)
    assert h.read(1) == []


def test_messages_come_back_in_order_numbered_from_one_with_their_times(h: Harness) -> None:
    messages = [(f"m{i}", b"%d" % i * i) for i in range(1, 101)]
    h.publish(*messages)
    assert sorted(h.told) == sorted((name, None) for name, _ in messages)
    assert h.stream.bounds() == (1, 100)
    found = h.read(1)
    assert [message.sequence for message in found] == list(range(1, 101))
    data = [message.data for message in found]
    assert sorted(data) == sorted(data for _, data in messages)
    if h.time is None:  # the simulated servers mix up what is on its way at one time
        assert data == [data for _, data in messages]
        assert all(abs(later.time_us - found[0].time_us) < 600_000_000 for later in found)
    assert found[0].time_us > 1_700_000_000_000_000


def test_a_name_that_comes_again_is_one_message(h: Harness) -> None:
    h.publish(("a", b"one"))
    h.publish(("a", b"one"), ("b", b"two"))
    assert [error for _, error in h.told] == [None, None, None]
    assert [message.data for message in h.read(1)] == [b"one", b"two"]


def test_reads_begin_and_end_where_they_are_told_to(h: Harness) -> None:
    for i in range(10):
        h.publish((f"m{i}", b"%d" % i))
    assert [message.data for message in h.read(4, 3)] == [b"3", b"4", b"5"]
    assert [message.data for message in h.read(9, 100)] == [b"8", b"9"]
    assert h.read(11) == []


def test_every_attempt_finds_what_all_copies_have(h: Harness) -> None:
    for i in range(5):
        h.publish((f"m{i}", b"%d" % i))
    wait_until(lambda: copies_are_equal(h.stream))
    for attempt in range(1, h.stream.attempts + 1):
        wait_until(lambda attempt=attempt: [m.data for m in h.stream.fetch(2, 1, attempt)] == [b"1"])  # type: ignore[misc]
        assert [*h.stream.fetch(6, 1, attempt)] == []


def test_readers_are_woken(h: Harness) -> None:
    news = threading.Event()
    h.stream.on_news = news.set
    h.publish(("a", b"one"))
    h.pass_time()
    assert news.wait(10)
    wait_until(lambda: [message.data for message in h.read(1)] == [b"one"])


def test_what_is_purged_is_gone_and_numbers_go_on(h: Harness) -> None:
    for i in range(10):
        h.publish((f"m{i}", b"%d" % i))
    h.stream.purge(4)
    assert h.stream.bounds() == (4, 10)
    h.stream.purge(2)
    assert h.stream.bounds() == (4, 10)
    h.stream.purge(1_000)
    assert h.stream.bounds() == (11, 10)
    h.publish(("next", b"next"))
    assert h.stream.bounds() == (11, 11)
    assert [(message.sequence, message.data) for message in h.read(11)] == [(11, b"next")]


def test_the_largest_message(h: Harness) -> None:
    data = random.Random(1).randbytes(h.stream.max_message_bytes)
    h.publish(("large", data))
    assert [message.data for message in h.read(1)] == [data]


def test_what_is_on_its_way_when_the_stream_is_closed_is_told(h: Harness) -> None:
    if h.time is not None:
        pytest.skip("a simulated process that is closed is gone")
    told: list[BaseException | None] = []
    for i in range(1000):
        h.stream.publish(f"m{i}", b"x", told.append)
    h.stream.close()
    wait_until(lambda: len(told) == 1000)
    assert all(error is None or isinstance(error, Unavailable) for error in told)
    h.stream.publish("late", b"x", told.append)
    wait_until(lambda: len(told) == 1001)
    assert isinstance(told[-1], Unavailable)
