"""What JetStream does to its clients when servers die, stand still, are full, or have lost bytes; real ones.

The servers of ``three`` are killed and spoilt, and are all well again after each test.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kivi.errors import DiskFull, InvalidArgument, NotFound, Unauthenticated, Unavailable
from kivi.log import Entry, Kind, natsserver
from kivi.log.jetstream import JetStream
from kivi.log.natslink import Nats
from kivi.log.natsserver import NatsServer, version_of
from kivi.log.replicated import Arrived, ReplicatedLog
from kivi.log.stream import Message
from tests.cluster.links import Links
from tests.conftest import require
from tests.log.natscluster import NatsCluster, copies_are_equal
from tests.ops.test_disk_full import disk as disk
from tests.ops.test_disk_full import fill
from tests.waiting import PATIENCE_S, Pulse, wait_until

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

    def __init__(self, stream: JetStream, padding: int = 0) -> None:
        self.stream, self.sent, self.padding = stream, 0, bytes(padding)
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
                self.stream.publish(f"n{n}", b"%9d" % n + self.padding, lambda error, n=n: self._done(n, error))  # type: ignore[misc]
                time.sleep(0.0005)

    def _done(self, n: int, error: BaseException | None) -> None:
        if error is None:
            self.acknowledged.add(n)
        else:
            self.failed.append(error)
        self._told.release()

    def close(self) -> None:
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
    with pytest.raises(Unavailable, match="127.0.0.1:1"):
        Nats(["nats://127.0.0.1:1"], timeout_s=0.5)


@pytest.mark.parametrize("said", [b"", b"INFO {}\r\n"])
def test_a_connection_that_comes_to_nothing_is_closed(said: bytes) -> None:
    """Not by the garbage collector, at some time: to a server that says nothing, or no more than that it is there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(server.accept()[0])
                    accepted[-1].sendall(said)

        accepting = threading.Thread(target=accept)
        accepting.start()
        with pytest.raises(Unavailable):
            Nats([f"nats://127.0.0.1:{server.getsockname()[1]}"], timeout_s=0.5)
        server.shutdown(socket.SHUT_RDWR)
        accepting.join()
        assert accepted
        for connection in accepted:
            with connection:
                connection.settimeout(PATIENCE_S)
                with contextlib.suppress(ConnectionResetError):
                    while connection.recv(1 << 10):
                        pass


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


def test_the_bounds_are_never_below_what_was_read(one: NatsCluster) -> None:
    with contextlib.closing(Nats(one.urls)) as nats, contextlib.closing(Nats(one.urls)) as other:
        writer, reader = (JetStream(at, "bounds", max_bytes=1 << 20) for at in (nats, other))
        other.call(reader._subscription.unsubscribe(), 5.0)  # so that no news tell it
        for i in range(20):
            assert reader.bounds()[1] <= i
            told: list[BaseException | None] = []
            writer.publish(f"m{i}", b"x", told.append)
            wait_until(lambda told=told: told == [None], pause_s=0.001)  # type: ignore[misc]
            assert writer.bounds() == (1, i + 1)
            assert [message.sequence for message in reader.fetch(i + 1, 9)] == [i + 1]
            assert reader.bounds() == (1, i + 1)


@pytest.mark.story
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("leads", [False, True])
def test_a_server_that_is_cut_off_from_the_others_is_left_though_it_answers(
    tmp_path: Path, *, leads: bool, resets: bool
) -> None:
    require("nats-server")

    def server_of(stream: JetStream) -> int:
        found = stream._nats.link.open.connected_url
        return cluster.urls.index(found.geturl()) if found is not None else -1

    with contextlib.ExitStack() as opened:
        links = opened.enter_context(Links())
        cluster = NatsCluster(tmp_path, 3, through=lambda i, address: links.link("", f"n{i}", address))
        opened.enter_context(cluster)
        nats = opened.enter_context(contextlib.closing(Nats(cluster.urls)))
        stream = JetStream(nats, "order", max_bytes=64 << 20, give_up_s=120.0)

        def is_placed() -> bool:
            with contextlib.suppress(Unavailable):  # what is asked while a connection is being made may be lost with it
                if (server_of(stream) == cluster.leader(stream)) == leads:
                    return True
                nats.call(nats.link.open.force_reconnect(), 5.0)
            return False

        wait_until(is_placed)
        wait_until(lambda: copies_are_equal(stream))
        at = server_of(stream)
        publisher = opened.enter_context(contextlib.closing(Publisher(stream)))
        wait_until(lambda: len(publisher.acknowledged) > 50)
        with links.cut(lambda source, target: f"n{at}" in (source, target), resets=resets):
            sent = publisher.sent
            wait_until(lambda: any(n > sent + 50 for n in publisher.acknowledged.copy()), 60.0)  # others come meanwhile
            acknowledged = len(publisher.acknowledged)
            assert server_of(stream) != at
            assert stream.bounds()[1] >= acknowledged
        publisher.close()
        assert not publisher.failed
        assert {int(message.data) for message in read_all(stream)} == set(range(publisher.sent))


@pytest.mark.story
def test_a_server_whose_disk_was_full_goes_on_when_there_is_room(disk: Path) -> None:
    require("nats-server")
    with NatsCluster(disk, 1, max_bytes=1 << 30) as cluster, contextlib.closing(Nats(cluster.urls)) as nats:
        stream = JetStream(nats, "order", max_bytes=64 << 20, give_up_s=3.0)
        publisher = Publisher(stream, padding=20_000)
        wait_until(lambda: len(publisher.acknowledged) > 50)
        filler = fill(disk)
        wait_until(lambda: len(publisher.failed) > 20)
        publisher.close()
        assert all(isinstance(error, Unavailable) for error in publisher.failed)
        filler.unlink()

        def takes() -> bool:
            told: list[BaseException | None] = []
            stream.publish("after", b"after", told.append)
            wait_until(lambda: told)
            return told == [None]

        wait_until(takes)
        found = {int(message.data[:9]) for message in read_all(stream) if message.data != b"after"}
        assert publisher.acknowledged <= found
        wait_until(lambda: not cluster.servers[0].problem)


def test_a_log_that_seems_shorter_for_a_moment_is_asked_again(
    one: NatsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a change of leaders: one that has been elected, and has not applied what it has, says too little."""
    with contextlib.closing(Nats(one.urls)) as nats:
        stream = JetStream(nats, "seems", max_bytes=1 << 20)
        log = ReplicatedLog(stream, generation=GENERATION, node=1, boot=1)
        arrived: list[Arrived] = []
        log.on_arrival = arrived.append
        log.propose([Entry(Kind.COMMIT, [b"one"])], 0, lambda n: None)
        wait_until(lambda: log.pump() or arrived)
        said = iter([(1, 1), (1, 0)])
        with monkeypatch.context() as patched:
            patched.setattr(stream, "bounds", lambda: next(said))
            patched.setattr(stream, "fetch", lambda *asked: [])
            with pytest.raises(Unavailable, match="ends before 1 now"):
                log.pump()
        assert log.failed is None
        log.propose([Entry(Kind.COMMIT, [b"two"])], 0, lambda n: None)
        wait_until(lambda: log.pump() or len(arrived) == 2)


# -- a server of our own --------------------------------------------------------------------------


def is_well_when_it_is_looked_at(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it was started again, however long that takes: then it is not taken for one that stands still, and is
    started again once more, because a machine is busy."""
    launch = server._launch

    def launched() -> None:
        monkeypatch.setattr(natsserver, "_ANSWER_S", PATIENCE_S)
        launch()
        wait_until(lambda: not server.look(), reason=server.said)

    monkeypatch.setattr(server, "_launch", launched)


def test_a_server_that_dies_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("nats-server")
    with NatsCluster(tmp_path, 1) as cluster, contextlib.closing(Nats(cluster.urls)) as nats:
        server = cluster.servers[0]
        is_well_when_it_is_looked_at(server, monkeypatch)
        assert server.version >= (2, 11)
        stream = JetStream(nats, "order", max_bytes=1 << 20, give_up_s=120.0)
        told: list[BaseException | None] = []
        stream.publish("a", b"one", told.append)
        wait_until(lambda: told)
        assert server.process is not None
        server.process.kill()
        stream.publish("a", b"one", told.append)
        stream.publish("b", b"two", told.append)
        wait_until(lambda: len(told) == 3)
        assert told == [None, None, None]
        assert [message.data for message in stream.fetch(1, 9)] == [b"one", b"two"]  # names outlive a restart
        wait_until(lambda: not server.problem)
        assert server.restarts == 1


def test_a_server_whose_node_was_killed_is_ended_before_another_one_runs_on_its_directory(tmp_path: Path) -> None:
    require("nats-server")
    with NatsCluster(tmp_path, 1) as cluster:
        left = cluster.servers[0]
        left._cease()  # as if the node that supervises it were gone
        assert left.process is not None
        server = NatsServer(left.directory, name=left.name, listen=left.listen)
        server.start()
        try:
            assert left.process.wait(PATIENCE_S) is not None
            assert server.process is not None
            assert server.process.poll() is None
        finally:
            server.stop()
        assert server.process is None


def test_a_server_that_stands_still_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("nats-server")
    with NatsCluster(tmp_path, 1) as cluster, contextlib.closing(Nats(cluster.urls)) as nats:
        (server,) = cluster.servers
        is_well_when_it_is_looked_at(server, monkeypatch)
        stream = JetStream(nats, "order", max_bytes=1 << 20, give_up_s=120.0)
        told: list[BaseException | None] = []
        assert server.process is not None
        stood = server.process
        stood.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(natsserver, "_ANSWER_S", 0.5)
        monkeypatch.setattr(natsserver, "_LOOK_S", 0.2)
        stream.publish("a", b"one", told.append)
        wait_until(lambda: told)
        assert told == [None]
        wait_until(lambda: stood.returncode is not None)  # it may have answered before it stood
        assert stood.returncode == -signal.SIGKILL
        wait_until(lambda: not server.problem)
        assert server.restarts == 1


def test_a_server_that_a_killed_node_has_left_is_ended_though_it_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("nats-server")
    monkeypatch.setattr(natsserver, "_PATIENCE_S", 0.5)
    with NatsCluster(tmp_path, 1) as cluster:
        left = cluster.servers[0]
        left._cease()  # as if the node that supervises it were gone
        assert left.process is not None
        left.process.send_signal(signal.SIGSTOP)
        server = NatsServer(left.directory, name=left.name, listen=left.listen)
        server.start()
        try:
            assert left.process.wait(PATIENCE_S) == -signal.SIGKILL
        finally:
            server.kill()


def test_the_process_that_is_ended_as_the_server_of_a_directory_is_that_server(tmp_path: Path) -> None:
    require("nats-server")
    with NatsCluster(tmp_path, 1) as cluster:
        server = cluster.servers[0]
        assert server.process is not None
        written = server.directory / "pid"
        assert int(written.read_text()) == server.process.pid
        server.kill()
        bystander = subprocess.Popen(["sleep", "60"])
        try:
            written.write_text(str(bystander.pid))  # its number has come again
            server.binary = str(tmp_path / "none")
            with pytest.raises(FileNotFoundError):  # as if the node ended there: nobody finds the old number any more
                server.start()
            assert not written.exists() and bystander.poll() is None
        finally:
            bystander.kill()
            bystander.wait()


def test_a_server_that_cannot_listen_says_why(tmp_path: Path) -> None:
    require("nats-server")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = NatsServer(tmp_path, name="n0", listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(Unavailable, match="address already in use"):
            server.start()


@pytest.mark.story
def test_servers_with_a_secret_let_nobody_in_who_does_not_know_it(tmp_path: Path) -> None:
    require("nats-server")
    secret = 'a "secret": with/@ all sorts%'
    with NatsCluster(tmp_path, 3, secret=secret) as cluster:
        assert cluster.servers[0].directory.joinpath("nats.conf").stat().st_mode & 0o077 == 0
        refused: list[dict[str, Any]] = [{}, {"user": "kivi", "password": "another"}, {"token": secret}]
        for wrong in refused:
            with pytest.raises(Unauthenticated):
                Nats(cluster.urls, **wrong)
        with contextlib.closing(Nats(cluster.urls, **cluster.login)) as nats:
            stream = JetStream(nats, "order", max_bytes=1 << 20)  # three copies: the servers know one another
            told: list[BaseException | None] = []
            stream.publish("a", b"one", told.append)
            wait_until(lambda: told == [None])


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
        stream = JetStream(nats, f"leader-{how}", max_bytes=64 << 20, give_up_s=120.0)
        publisher = Publisher(stream)
        wait_until(lambda: len(publisher.acknowledged) > 200)
        at = three.leader(stream)
        with Pulse() as pulse:
            if how == "killed":
                three.servers[at].kill()
                late_s = goes_on(three, publisher, at)
                three.servers[at].start()
            else:
                with three.stopped(at):
                    late_s = goes_on(three, publisher, at)
        # How long an election takes is the servers' to say; and each of some processes may wait for its turn.
        assert late_s < 15.0 + 10 * pulse.late_s
        publisher.close()
        assert not publisher.failed
        wait_until(three.is_ready)
        wait_until(lambda: copies_are_equal(stream))
        for _ in range(6):  # whichever copy it is
            assert sorted(int(message.data) for message in read_all(stream)) == [-1, *sorted(publisher.acknowledged)]


def goes_on(three: NatsCluster, publisher: Publisher, at: int) -> float:
    """How much later it does so, without that server, than somebody who has just come to the others is acknowledged."""
    before, told = publisher.sent, list[BaseException | None]()
    with contextlib.closing(Nats([url for i, url in enumerate(three.urls) if i != at])) as nats:
        name, most = publisher.stream.name, 64 << 20
        new = JetStream(nats, name, max_bytes=most, create=False, give_up_s=120.0, timeout_s=PATIENCE_S)
        new.publish("new", b"%9d" % -1, told.append)
        wait_until(lambda: told)
        assert told == [None]
        acknowledged = time.monotonic()
        wait_until(lambda: publisher.sent > before + 200)
        return time.monotonic() - acknowledged


def test_what_was_asked_over_a_connection_that_is_lost_is_not_waited_for(one: NatsCluster) -> None:
    async def say_nothing(message: object) -> None: ...

    with contextlib.closing(Nats(one.urls)) as nats:
        nats.call(nats.link.open.subscribe("mute", cb=say_nothing), 5.0)
        asked = nats.start(nats.link.request("mute", b"", 60.0))
        nats.call(nats.link.open.flush(), 5.0)
        one.servers[0].kill()
        one.servers[0].start()
        wait_until(asked.done)
        with pytest.raises(Unavailable, match="was lost"):
            asked.result()
        wait_until(one.is_ready)


@pytest.mark.story
def test_a_name_is_known_after_all_servers_were_started_again(three: NatsCluster) -> None:
    with contextlib.closing(Nats(three.urls)) as nats:
        stream = JetStream(nats, "restarted", max_bytes=64 << 20, give_up_s=120.0)
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
        wait_until(three.is_ready)
        wait_until(lambda: copies_are_equal(stream))  # so whichever is asked
        assert [message.data for message in stream.fetch(1, 9)] == [b"one", b"two"]


@pytest.mark.story
@pytest.mark.parametrize("where", ["follower", "leader"])
def test_bytes_that_one_copy_has_lost_are_read_from_another(
    three: NatsCluster, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A flipped bit in the file of one server: what it then answers has a hole, and no error."""
    count, padding = 1500, bytes(5000)
    monkeypatch.setattr("kivi.log.replicated._HELD_UP_S", 1e6)  # it reads nothing of what it writes
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

        def has_a_hole() -> bool:
            with contextlib.suppress(Unavailable):  # it may have been connected to that server
                return len(stream.fetch(1, count, 2)) < count
            return False

        wait_until(has_a_hole, reason="no copy has a hole")
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
