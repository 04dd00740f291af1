"""A log that grows from one server to three, and one whose server is replaced by another machine's: real processes."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kivi
from kivi.cluster import PeerServer
from kivi.log.jetstream import JetStream, find_stream
from kivi.log.natslink import Nats
from kivi.log.natsserver import NatsServer
from tests.cluster.peered import Node, all_have, commit
from tests.cluster.traffic import START, make_tables
from tests.conftest import require
from tests.log.natscluster import reserved_ports
from tests.waiting import Pulse, wait_until

SECRET = "what only the servers of this test know"


class Steady(threading.Thread):
    """Commits one by one by any of some nodes until it is ended; ``moments`` are those of acknowledgements."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self.endpoint = endpoint
        self.done: Counter[int] = Counter()
        self.moments = [time.monotonic()]
        self.failure: BaseException | None = None
        self._ending = threading.Event()

    def run(self) -> None:
        try:
            with kivi.connect(self.endpoint, timeout=60) as db:
                while not self._ending.is_set():
                    db.run(self._one)
                    self.done[1] += 7
                    self.moments.append(time.monotonic())
        except BaseException as error:
            self.failure = error

    def _one(self, tx: kivi.Transaction) -> None:
        tx.append("calls", [{"ts": START, "endpoint": 1, "us": 7}])
        tx.delta("totals", (1,), us=7, n=1)

    def end(self) -> Counter[int]:
        self._ending.set()
        self.join()
        assert self.failure is None
        assert self.done[1] > 0
        return self.done

    def has_not_paused(self, pulse: Pulse) -> None:
        """For longer than two elections in a row (NATS takes up to nine seconds for one, and a vote may be split), and
        what a busy machine adds to that, where each of some processes may wait for its turn."""
        pause_s = max(b - a for a, b in itertools.pairwise(self.moments))
        print(f"the longest pause: {pause_s:.2f} s")
        assert pause_s < 20.0 + 10 * pulse.late_s


class Machines:
    """Nodes by the peers that they are; each is started with a list of its own."""

    def __init__(self, path: Path, count: int, pool: ThreadPoolExecutor) -> None:
        (path / "secret").write_text(f"{SECRET}\n")
        self.path, self.pool = path, pool
        self.peers = [f"127.0.0.1:{port}" for port in reserved_ports(count)]
        self.nodes = [Node(path / f"node-{i}") for i in range(count)]

    def named(self, i: int, *peers: int) -> Node:
        """The node ``i``, which is started next with this list."""
        node = self.nodes[i]
        node.arguments[4:] = [
            "--peers", ",".join(self.peers[each] for each in peers), "--peer", self.peers[i],
            "--cluster-secret-file", str(self.path / "secret"),
        ]  # fmt: skip
        return node

    def start(self, *nodes: Node) -> None:
        """All at once: each may wait for the others."""
        list(self.pool.map(Node.start, nodes))

    def has_copies(self, node: Node, *at: int) -> None:
        """Waits until the log has its copies on these, and all are up to date."""

        def copies() -> dict[str, bool]:
            with contextlib.suppress(kivi.Unavailable), node.connect() as db:
                log = db.cluster_status()["log"]
                return {} if log is None else {copy["server"]: copy["current"] for copy in log["copies"]}
            return {}

        wanted = {self.peers[i]: True for i in at}
        wait_until(lambda: copies() == wanted, reason=lambda: [copies(), *(node.output[-3:] for node in self.nodes)])


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    require("nats-server")
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        found = Machines(tmp_path, 4, pool)
        for node in found.nodes:
            stack.callback(node.__exit__)
        yield found


def forget(db: kivi.client.Database, gone: str) -> None:
    """A node that is served is one of the log's servers to the others a moment later, and nobody is removed by servers
    that have no leader: then it is to be tried again."""

    def is_forgotten() -> bool:
        try:
            db.forget_node(gone)
        except kivi.Unavailable:
            return False
        except kivi.InvalidArgument as error:
            if "start the node that takes its place first" not in error.message:
                raise
            return False
        return True

    wait_until(is_forgotten, pause_s=0.2)


def _problems(node: Node) -> list[str]:
    with node.connect() as db:
        return list(db.cluster_status()["problems"])


def test_a_log_that_an_earlier_version_began_alone_goes_on_alone_and_takes_no_peers(tmp_path: Path) -> None:
    """No group of peers knows of it, and JetStream deletes what no group knows of."""
    require("nats-server")
    own, *others = (f"127.0.0.1:{port}" for port in reserved_ports(3))
    earlier = NatsServer(tmp_path / "node" / "nats-server", name=own, listen=f"127.0.0.1:{reserved_ports(1)[0]}")
    earlier.start()
    with contextlib.closing(Nats([earlier.url])) as nats:
        JetStream(nats, "kivi-apm", max_bytes=1 << 20).close()
    earlier.stop()
    with pytest.raises(kivi.InvalidArgument, match="begun by an earlier version.*kivi cluster reseed"):
        PeerServer(str(tmp_path / "node"), "apm", [own, *others], own, None, log_bytes=1 << 20)
    alone = PeerServer(str(tmp_path / "node"), "apm", [own], own, None, log_bytes=1 << 20)
    alone.start()
    try:
        with contextlib.closing(Nats([alone.url], **alone.login)) as nats:
            assert find_stream(nats, "kivi-apm", 30.0) is not None
    finally:
        alone.stop()


@pytest.mark.story
def test_a_log_of_one_server_grows_to_three_while_it_is_written(machines: Machines) -> None:
    a = machines.named(0, 0).start()
    with a.connect() as db:
        make_tables(db)
    wanted = commit([a], 0)
    assert any("the log has one copy" in problem for problem in _problems(a))

    # New servers that meet while the one with the log is away begin none of their own: they wait for it.
    a.stop()
    b, c = machines.named(1, 0, 1, 2), machines.named(2, 0, 1, 2)
    starting = [machines.pool.submit(node.start) for node in (b, c)]
    away = f"{machines.peers[0]} is not there"
    wait_until(lambda: all(away in "".join(node.output) for node in (b, c)), reason=lambda: [b.output, c.output])
    time.sleep(5.0)  # an election takes up to 4 s
    assert not any(Path(node.data, "nats-server", "store").exists() for node in (b, c))
    a.start()
    steady = Steady(a.endpoint)
    with Pulse() as pulse:
        steady.start()
        for one in starting:
            one.result()
        machines.has_copies(a, 0, 1, 2)
        time.sleep(2.0)
        wanted += steady.end()
    steady.has_not_paused(pulse)
    wanted += commit([a, b, c], 10)
    all_have([a, b, c], wanted)

    a.kill()  # what it alone had is on the others
    a.kill_log_server()
    wanted += commit([b, c], 20)
    all_have([b, c], wanted)
    machines.named(0, 0, 1, 2).start()
    machines.has_copies(b, 0, 1, 2)
    all_have([a, b, c], wanted + commit([a], 30))
    wait_until(lambda: not _problems(a), reason=lambda: _problems(a))


@pytest.mark.story
def test_a_machine_that_is_gone_for_good_is_replaced_by_another_one(machines: Machines) -> None:
    a, b, c = (machines.named(i, 0, 1, 2) for i in range(3))
    machines.start(a, b, c)
    with a.connect() as db:
        make_tables(db)
    wanted = commit([a, b, c], 0)
    gone = c.endpoint
    with a.connect() as db:  # a node says its address once it is served
        wait_until(lambda: any(node["address"] == gone for node in db.cluster_status()["nodes"]))
    with a.connect() as db, pytest.raises(kivi.InvalidArgument, match="heard in the last ten seconds"):
        db.forget_node(gone)
    c.kill()
    c.kill_log_server()
    shutil.rmtree(c.data)

    steady = Steady(f"{a.endpoint},{b.endpoint}")
    steady.start()
    with Pulse() as pulse, a.connect() as db:

        def refused() -> str:
            try:
                db.forget_node(gone)
            except kivi.KiviError as error:
                return error.message
            pytest.fail("a server was removed whose copy has no other place")

        wait_until(lambda: "start the node that takes its place first" in refused(), reason=refused, pause_s=1.0)
        d = machines.named(3, 0, 1, 3).start()  # an empty directory: it reads the log from its first message
        forget(db, gone)
        forget(db, gone)
        machines.has_copies(a, 0, 1, 3)
        assert {one["address"]: one["state"] for one in db.cluster_status()["nodes"]}[gone] == "evicted"
    wanted += steady.end()
    steady.has_not_paused(pulse)
    all_have([a, b, d], wanted)

    b.kill()  # with two of three: the new server's copy counts
    b.kill_log_server()
    wanted += commit([a, d], 10)
    a.stop()
    machines.named(1, 0, 1, 3)
    machines.start(machines.named(0, 0, 1, 3), b)
    all_have([a, b, d], wanted + commit([a, b, d], 20))


@pytest.mark.story
def test_a_peer_whose_name_the_others_have_lost_is_shown_by_it_and_removed(machines: Machines) -> None:
    """Servers that are started again know those that are away by a number alone."""
    a, b, c = (machines.named(i, 0, 1, 2) for i in range(3))
    machines.start(a, b, c)
    gone = c.endpoint
    with a.connect() as db:
        make_tables(db)
        wait_until(lambda: any(node["address"] == gone for node in db.cluster_status()["nodes"]))
    wanted = commit([a, b, c], 0)
    c.kill()
    c.kill_log_server()
    a.stop()
    b.stop()
    a, b, d = (machines.named(i, 0, 1, 3) for i in (0, 1, 3))
    machines.start(a, b, d)
    with kivi.connect(a.endpoint, timeout=60) as db:

        def copies() -> dict[str, bool]:
            log = db.cluster_status()["log"]
            return {} if log is None else {copy["server"]: copy["away"] for copy in log["copies"]}

        def silent_s() -> float:
            return next(node["silent_s"] for node in db.cluster_status()["nodes"] if node["address"] == gone)

        now = {machines.peers[0]: False, machines.peers[1]: False, machines.peers[2]: True}
        wait_until(lambda: copies() == now, reason=copies)
        wait_until(lambda: silent_s() > 10, reason=silent_s)  # until then it may come back
        assert any(f"server {machines.peers[2]} of the log is away" in said for said in _problems(a))
        forget(db, gone)
        machines.has_copies(a, 0, 1, 3)
    all_have([a, b, d], wanted)
