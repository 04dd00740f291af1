"""What JetStream does to its clients when servers die, stand still, are full, or have lost bytes; real ones.

The servers of ``three`` are killed and spoilt, and are all well again after each test.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kivi.errors import DiskFull, InvalidArgument, NotFound, Unavailable
from kivi.log import Entry, Kind
from kivi.log.jetstream import JetStream
from kivi.log.natslink import Nats
from kivi.log.natsserver import NatsServer, version_of
from kivi.log.replicated import ReplicatedLog
from kivi.log.stream import Message
from tests.conftest import require
from tests.log.natscluster import NatsCluster, copies_are_equal
from tests.waiting import wait_until

GENERATION = b"a generation    "


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    require("nats-server")
    with NatsCluster(tmp_path_factory.mktemp("nats"), 1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    require("nats-server")
    with NatsCluster(tmp_path_factory.mktemp("nats"), 3) as cluster:
        yield cluster


class Publisher:
    """Publishes numbered messages, some at a time, until ``stop``: ``acknowledged`` are known to be there."""

    def __init__(self, stream: JetStream) -> None:
        self.stream, self.sent = stream, 0
        self.acknowledged: set[int] = set()
        self.failed: list[BaseException] = []
        self._told = threading.Semaphore(64)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            if self._told.acquire(timeout=0.1):
                n = self.sent
                self.sent += 1
                self.stream.publish(f"n{n}", b"%d" % n, lambda error, n=n: self._done(n, error))  # type: ignore[misc]
                time.sleep(0.0005)

    def _done(self, n: int, error: BaseException | None) -> None:
        if error is None:
            self.acknowledged.add(n)
        else:
            self.failed.append(error)
        self._told.release()

    def stop(self) -> None:
        self._ending.set()
        self._thread.join()
        wait_until(lambda: len(self.acknowledged) + len(self.failed) == self.sent)


def read_all(stream: JetStream) -> list[Message]:
    found: list[Message] = []
    while len(found) < stream.bounds()[1]:
        found += stream.fetch(len(found) + 1, 500, 2)
    return found


# -- set up ---------------------------------------------------------------------------------------


def test_a_stream_is_made_when_that_is_asked_for_and_otherwise_has_to_be_as_it_would_be_made(one: NatsCluster) -> None:
    with contextlib.closing(Nats(one.urls)) as nats:
        with pytest.raises(NotFound, match="no stream absent"):
            JetStream(nats, "absent", max_bytes=1 << 20, create=False)
        JetStream(nats, "made", max_bytes=1 << 20).close()
        JetStream(nats, "made", max_bytes=1 << 20, create=False).close()
        with pytest.raises(InvalidArgument, match="max_bytes is 1048576 and not 2097152"):
            JetStream(nats, "made", max_bytes=2 << 20)
        with pytest.raises(DiskFull):
            JetStream(nats, "huge", max_bytes=1 << 50)
        with pytest.raises(InvalidArgument, match="no name"):
            JetStream(nats, "a.b", max_bytes=1 << 20)


def test_servers_that_are_not_there_are_named() -> None:
    with pytest.raises(Unavailable, match="nats://127.0.0.1:1"):
        Nats(["nats://127.0.0.1:1"], timeout_s=0.5)


def test_a_full_stream_says_so_and_takes_more_when_it_is_truncated(one: NatsCluster) -> None:
    with contextlib.closing(Nats(one.urls)) as nats:
        stream = JetStream(nats, "full", max_bytes=1 << 20)
        told: list[BaseException | None] = []
        for i in range(20):
            stream.publish(f"m{i}", bytes(100_000), told.append)
        wait_until(lambda: len(told) == 20)
        full = [error for error in told if error is not None]
        assert all(isinstance(error, DiskFull) for error in full)
        assert stream.bounds() == (1, 20 - len(full)) == (1, 10)
        stream.purge(6)
        again: list[BaseException | None] = []
        stream.publish("m19", bytes(100_000), again.append)
        wait_until(lambda: again)
        assert again == [None]
        assert stream.bounds() == (6, 11)


# -- a server of our own --------------------------------------------------------------------------


def test_a_server_that_dies_is_started_again(tmp_path: Path) -> None:
    require("nats-server")
    with NatsCluster(tmp_path, 1) as cluster, contextlib.closing(Nats(cluster.urls)) as nats:
        server = cluster.servers[0]
        assert server.version >= (2, 11)
        stream = JetStream(nats, "order", max_bytes=1 << 20)
        told: list[BaseException | None] = []
        stream.publish("a", b"one", told.append)
        wait_until(lambda: told)
        assert server.process is not None
        server.process.kill()
        stream.publish("a", b"one", told.append)
        stream.publish("b", b"two", told.append)
        wait_until(lambda: len(told) == 3)
        assert told == [None, None, None]
        assert server.restarts == 1
        assert [message.data for message in stream.fetch(1, 9)] == [b"one", b"two"]  # names outlive a restart
        wait_until(lambda: not server.problem)


def test_a_server_whose_node_was_killed_is_ended_before_another_one_runs_on_its_directory(tmp_path: Path) -> None:
    require("nats-server")
    with NatsCluster(tmp_path, 1) as cluster:
        left = cluster.servers[0]
        left._cease()  # as if the node that supervises it were gone
        assert left.process is not None
        server = NatsServer(left.directory, name=left.name, listen=left.listen)
        server.start()
        try:
            assert left.process.wait(10) is not None
            assert server.process is not None
            assert server.process.poll() is None
        finally:
            server.stop()
        assert server.process is None


def test_a_program_that_is_no_nats_server_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no nats-server"):
        version_of("/bin/true")
    with pytest.raises(InvalidArgument, match="cannot be run"):
        version_of("/nowhere/nats-server")


# -- three servers --------------------------------------------------------------------------------


@pytest.mark.story
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_nothing_acknowledged_is_lost_or_doubled_when_the_leader_goes(three: NatsCluster, how: str) -> None:
    with contextlib.closing(Nats(three.urls)) as nats:
        stream = JetStream(nats, f"leader-{how}", max_bytes=64 << 20)
        publisher = Publisher(stream)
        wait_until(lambda: len(publisher.acknowledged) > 200)
        at = three.leader(stream)
        if how == "killed":
            three.servers[at].kill()
            went, before = time.monotonic(), publisher.sent
            wait_until(lambda: publisher.sent > before + 200)
            paused_s = time.monotonic() - went
            three.servers[at].start()
        else:
            with three.stopped(at):
                went, before = time.monotonic(), publisher.sent
                wait_until(lambda: publisher.sent > before + 200)
                paused_s = time.monotonic() - went
        assert paused_s < 15.0
        publisher.stop()
        assert not publisher.failed
        wait_until(three.is_ready)
        wait_until(lambda: copies_are_equal(stream))
        for _ in range(6):  # whichever copy it is
            assert sorted(int(message.data) for message in read_all(stream)) == sorted(publisher.acknowledged)


@pytest.mark.story
def test_a_name_is_known_after_all_servers_were_started_again(three: NatsCluster) -> None:
    with contextlib.closing(Nats(three.urls)) as nats:
        stream = JetStream(nats, "restarted", max_bytes=64 << 20)
        told: list[BaseException | None] = []
        stream.publish("a", b"one", told.append)
        wait_until(lambda: told)
        for server in three.servers:
            server.kill()
        with pytest.raises(Unavailable):
            stream.bounds()
        stream.publish("a", b"one", told.append)  # on its way while nobody is there
        for server in three.servers:
            server.start()
        stream.publish("b", b"two", told.append)
        wait_until(lambda: len(told) == 3)
        assert told == [None, None, None]
        assert [message.data for message in stream.fetch(1, 9)] == [b"one", b"two"]
        wait_until(three.is_ready)


@pytest.mark.story
@pytest.mark.parametrize("where", ["follower", "leader"])
def test_bytes_that_one_copy_has_lost_are_read_from_another(three: NatsCluster, where: str) -> None:
    """A flipped bit in the file of one server: what it then answers has a hole, and no error."""
    count, padding = 1500, bytes(5000)
    with contextlib.closing(Nats(three.urls)) as nats:
        stream = JetStream(nats, f"spoilt-{where}", max_bytes=16 << 20)
        writer = ReplicatedLog(stream, generation=GENERATION, node=1, boot=1)
        for i in range(count):
            writer.propose([Entry(Kind.COMMIT, [b"body %6d" % i, padding])], 0, lambda n: None)
        wait_until(lambda: stream.bounds() == (1, count))
        leader = three.leader(stream)
        at = leader if where == "leader" else (leader + 1) % 3
        three.servers[at].stop()
        _flip(three.servers[at], stream.name, b"body %6d" % 150)
        three.servers[at].start()
        wait_until(three.is_ready)
        wait_until(lambda: len(stream.fetch(1, count, 2)) < count, reason="no copy has a hole")

        seen: list[bytes] = []
        log = ReplicatedLog(stream, generation=GENERATION, node=2, boot=1)
        log.on_arrival = lambda one: seen.extend(bytes(entry.body[0][:11]) for entry in one.frame.entries)

        def pump() -> bool:
            with contextlib.suppress(Unavailable):
                log.pump()
            assert log.failed is None
            return len(seen) == count

        wait_until(pump)
        assert sorted(seen) == [b"body %6d" % i for i in range(count)]


def _flip(server: NatsServer, stream: str, content: bytes) -> None:
    """One bit of the message with this content."""
    for path in (server.directory / "store").rglob(f"streams/{stream}/msgs/*.blk"):
        data = bytearray(path.read_bytes())
        if (found := data.find(content)) >= 0:
            data[found] ^= 1
            path.write_bytes(data)
            return
    raise AssertionError(f"{content!r} is in no block of {stream}")
