"""Three stores over real JetStream: clients on all of them, servers and nodes that die, judged by the oracle.

What is simulated in ``test_simulation`` is real here: RocksDB, threads, nats-servers that sync, time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kivi.embedded.database import Database
from kivi.log.jetstream import JetStream
from kivi.log.natslink import Nats
from kivi.runtime.settings import Settings
from kivi.store.facade import Store
from tests.cluster.nodes import StoreNode
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.oracle import Oracle
from tests.proof.workloads import TABLES, Bank, Client, Counters, Mix, fund, make_tables, settled
from tests.waiting import wait_until

SETTINGS = Settings.of({"consolidate_rows": 200, "block_rows": 64, "settle": False, "commit_timeout_s": 15.0})
LOOKED_AT = ("t", "e", "by_a", "by_b", "kept", "bank", "counters")


class Story:
    """Nodes over ``cluster``, each with a client of each kind."""

    def __init__(self, path: Path, cluster: NatsCluster) -> None:
        self.path, self.cluster = path, cluster
        self.oracle = Oracle(TABLES)
        seed = Database(Store.open(str(path / "seed"), settings=SETTINGS))
        make_tables(seed)
        self.genesis = fund(seed, self.oracle)
        seed.consolidate()
        seed.store.close()
        self.stack = contextlib.ExitStack()
        self.nodes: list[StoreNode] = []
        for i in range(3):
            self.nodes.append(self.start(i))
        self.seeds = iter(range(1000))
        self.clients: list[Client] = []
        self.stop = threading.Event()
        self.threads: list[threading.Thread] = []

    def start(self, i: int) -> StoreNode:
        nats = self.stack.enter_context(contextlib.closing(Nats(self.cluster.urls)))
        stream = JetStream(nats, "order", max_bytes=256 << 20)
        return StoreNode(
            self.path / f"node-{i}", i + 1, stream, seed=self.path / "seed", genesis=self.genesis, settings=SETTINGS
        )

    def serve(self, node: StoreNode) -> None:
        """Clients begin on the node."""
        wait_until(lambda: not node.store.is_catching_up)
        for kind in (Mix, Bank, Counters):
            client = kind(node.db, self.oracle, next(self.seeds), first=self.genesis)
            self.clients.append(client)
            thread = threading.Thread(target=client.run, args=(self.stop,))
            self.threads.append(thread)
            thread.start()

    def go_on(self, commits: int) -> None:
        """Until so many more are committed."""
        upto = self._committed() + commits
        wait_until(lambda: self._committed() >= upto, reason=lambda: [node.log.failed for node in self.nodes])

    def _committed(self) -> int:
        return sum(attempt.outcome == "committed" for attempt in [*self.oracle.attempts])

    def finish(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        for client in self.clients:
            if client.failure is not None:
                raise client.failure
        last = self.nodes[0].stream.bounds()[1]
        first = self.nodes[0]
        self.oracle.resolve(lambda token: settled(first.db, token))  # which commits fences, too

        def equal() -> bool:
            places = {node.log.place for node in self.nodes}
            return len(places) == 1 and places.pop().sequence >= last and not any(n.log.proposed for n in self.nodes)

        wait_until(equal, reason=lambda: [(node.log.place, node.log.failed) for node in self.nodes])
        for node in self.nodes:
            assert self.oracle.confirm(lambda token, node=node: settled(node.db, token), most=100)  # type: ignore[misc]
        reader = Client(first.db, self.oracle, 0)
        found = []
        for node in self.nodes:
            with node.db.snapshot() as snap:
                found.append([snap.ts, *[reader.scan(snap, table) for table in LOOKED_AT]])
        assert found[0] == found[1] == found[2]
        self.oracle.check()

    def close(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        for node in self.nodes:
            node.close()
        self.stack.close()


@pytest.fixture
def begin(tmp_path: Path) -> Callable[[int], contextlib.AbstractContextManager[Story]]:
    require("nats-server")

    @contextlib.contextmanager
    def made(servers: int):
        with NatsCluster(tmp_path, servers) as cluster:
            story = Story(tmp_path, cluster)
            try:
                yield story
            finally:
                story.close()

    return made


def test_three_nodes_commit_and_are_equal(begin) -> None:
    with begin(1) as story:
        for node in story.nodes:
            story.serve(node)
        story.go_on(100)
        story.finish()


@pytest.mark.story
def test_three_nodes_over_three_servers_of_which_one_of_each_is_killed(begin) -> None:
    with begin(3) as story:
        for node in story.nodes:
            story.serve(node)
        story.go_on(100)
        story.cluster.servers[story.cluster.leader(story.nodes[0].stream)].kill()
        story.go_on(100)
        story.nodes[2].crash()
        story.go_on(50)
        story.nodes[2] = story.start(2)
        story.serve(story.nodes[2])
        story.go_on(100)
        story.finish()
