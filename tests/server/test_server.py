"""The process: listening, access, health, metrics, and how it ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kivi
import kivi.client.database
from kivi.wire import methods
from kivi.wire.v1 import service_pb2
from tests.ports import Port
from tests.serverproc import ROOT, ServerProcess
from tests.waiting import wait_until


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kivi_server", *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT
    )


def test_plaintext_beyond_this_machine_needs_insecure(tmp_path):
    ended = run("--data", str(tmp_path / "d"), "--listen", "0.0.0.0:0")
    assert ended.returncode == 1
    assert "--insecure" in ended.stderr
    assert not (tmp_path / "d").exists()


def test_metrics_beyond_this_machine_have_to_be_asked_for(tmp_path):
    ended = run("--data", str(tmp_path / "d"), "--metrics", "0.0.0.0:0", "--listen", "localhost:0")
    assert ended.returncode == 1
    assert "--metrics-insecure" in ended.stderr
    assert not (tmp_path / "d").exists()
    with ServerProcess(tmp_path / "d", "--metrics", "0.0.0.0:0", "--metrics-insecure") as server:
        assert any(line.startswith("metrics on http://0.0.0.0:") for line in server.output)


def test_a_directory_in_use_and_one_that_is_no_store(server, tmp_path):
    assert "another process" in run("--data", server.data, "--listen", "localhost:0").stderr
    (tmp_path / "x").write_text("something else")
    ended = run("--data", str(tmp_path), "--listen", "localhost:0")
    assert ended.returncode == 1
    assert "not a kivi store" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_an_address_in_use(server, tmp_path):
    ended = run("--data", str(tmp_path / "d"), "--listen", server.endpoint)
    assert ended.returncode == 1
    assert "cannot listen" in ended.stderr


def test_one_of_the_addresses_of_a_name_in_use(tmp_path):
    """As a collector has 127.0.0.1 alone: what is sent to localhost would go to either."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"localhost:{other.getsockname()[1]}"
        for flag, others in (("--listen", ()), ("--otlp", ("--listen", "localhost:0"))):
            ended = run("--data", str(tmp_path / "d"), flag, endpoint, *others)
            assert ended.returncode == 1
            assert f": {flag}: cannot listen on {endpoint}" in ended.stderr


def test_the_port_of_a_server_of_the_tests_is_its_own_while_it_is_away(tmp_path):
    """Whoever asks for any port, or connects from any, gets none that is bound; else it could not come back."""
    with ServerProcess(tmp_path / "data") as server:
        server.kill()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", server.port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), 60)
        server.start()
        with server.connect() as db:
            assert db.tables() == []


def test_access_tokens(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("# who may do what\nroot-token\nwriter write\nreader read\n")
    with ServerProcess(tmp_path / "data", "--token-file", str(tokens)) as server:
        for wrong in (None, "nobody", "root"):
            with pytest.raises(kivi.Unauthenticated):
                server.connect(access_token=wrong)
        with server.connect(access_token="root-token") as root:
            root.create_table("t", key={"id": "int64"}, columns={"v": kivi.sum("int64")})
        with server.connect(access_token="writer") as writer:
            with writer.transaction() as tx:
                tx.delta("t", (1,), v=1)
            with pytest.raises(kivi.PermissionDenied):
                writer.drop("t")
        with server.connect(access_token="reader") as reader:
            with reader.snapshot() as snap:
                assert snap.get("t", (1,)) == {"id": 1, "v": 1}
            with pytest.raises(kivi.PermissionDenied), reader.transaction() as tx:
                tx.delta("t", (1,), v=1)
            for token in ({"batch": ("scope", 0)}, {"token": "mine"}):  # it would answer for a writer's later commit
                with pytest.raises(kivi.PermissionDenied), reader.transaction(**token):
                    pass
            with pytest.raises(kivi.PermissionDenied):
                reader.outcome("mine")
        with server.connect(access_token="writer") as writer:
            for token in ({"batch": ("scope", 0)}, {"token": "mine"}):
                with writer.transaction(**token) as tx:
                    tx.delta("t", (1,), v=1)
            with writer.snapshot() as snap:
                assert snap.get("t", (1,)) == {"id": 1, "v": 3}


def test_tls_and_client_certificates(tmp_path, require):
    openssl = require("openssl")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    arguments = ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(cert)]
    with ServerProcess(tmp_path / "data", *arguments) as server:
        tls = kivi.client.Tls(ca=str(cert), cert=str(cert), key=str(key))
        with server.connect(tls=tls) as db:
            assert db.tables() == []
        for other in (kivi.client.Tls(ca=str(cert)), None):  # no certificate; plaintext
            with pytest.raises(kivi.Unavailable):
                server.connect(tls=other, timeout=5)


def test_health_and_metrics(tmp_path):
    port = Port()
    with ServerProcess(tmp_path / "data", "--metrics", f"localhost:{port.number}") as server:
        with grpc.insecure_channel(server.endpoint) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            for name in ("", "kivi.v1.Kivi"):
                reply = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with server.connect() as db:
            db.create_table("t", key={"id": "int64"}, columns={"v": kivi.sum("int64")})
        with urllib.request.urlopen(f"http://localhost:{port.number}/metrics", timeout=60) as page:
            lines = page.read().decode().splitlines()
        values = dict(line.split() for line in lines if not line.startswith("#"))
        assert float(values["kivi_commits_total"]) >= 1
        assert float(values["kivi_watermark"]) >= 1
        assert server.stop() == 0


@pytest.mark.parametrize("path_", ["", "/nowhere/\0"])
def test_a_path_that_is_none_is_the_callers_mistake_whatever_client_it_has(server, path_):
    asked: list[tuple[str, Any]] = [
        ("Checkpoint", service_pb2.CheckpointRequest(path=path_)),
        ("Backup", service_pb2.BackupRequest(repository=path_)),
    ]
    with grpc.insecure_channel(server.endpoint) as channel:
        for name, request in asked:
            with pytest.raises(grpc.RpcError, match="a directory is named by a path") as refused:
                channel.unary_unary(f"/kivi.v1.Kivi/{name}", bytes, bytes)(request.SerializeToString(), timeout=60)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_health_is_not_serving_before_a_stop_that_waits_for_commits(tmp_path):
    """Whoever balances load learns it while what is in flight is still answered."""
    settings = ("background=false", "pending_soft_bytes=100000", "pending_hard_bytes=200000")
    arguments = [part for setting in settings for part in ("--set", setting)]
    server = ServerProcess(tmp_path / "data", *arguments).start()
    with server.connect(timeout=30) as db, grpc.insecure_channel(server.endpoint) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        db.create_table("t", key={"id": "int64"}, columns={"text": "string"})
        with db.transaction() as tx:
            tx.put("t", (0,), text="x" * 300_000)

        ended: list[BaseException | None] = []

        def write() -> None:  # it waits for room, up to 10 s
            try:
                with db.transaction() as tx:
                    tx.put("t", (1,), text="y")
                ended.append(None)
            except kivi.KiviError as error:
                ended.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        wait_until(lambda: db.stats()["server_commits_in_flight"] >= 1)
        watched = health.Watch(health_pb2.HealthCheckRequest(service="kivi.v1.Kivi"), timeout=60)
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        server.signal(signal.SIGTERM)
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not ended  # the commit is still in flight
        db.consolidate()
        writer.join()
        assert ended == [None]
        watched.cancel()
        assert server.wait() == 0


def test_sigterm_answers_what_is_in_flight_and_loses_nothing(tmp_path):
    server = ServerProcess(tmp_path / "data").start()
    with server.connect(timeout=3) as db:
        db.create_table("t", key={"id": "int64"}, columns={"v": kivi.sum("int64")})
        acknowledged, refused = [], []

        def add() -> None:
            try:
                while True:
                    with db.transaction() as tx:
                        tx.delta("t", (1,), v=1)
                    acknowledged.append(tx.commit_ts)
            except kivi.KiviError as error:
                refused.append(error)

        threads = [threading.Thread(target=add) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: refused or len(acknowledged) > 100)
        assert server.stop() == 0
        for thread in threads:
            thread.join()
    assert acknowledged
    expected = (kivi.Unavailable, kivi.CommitUnknown, kivi.SnapshotTooOld)
    assert all(isinstance(error, expected) for error in refused), refused
    unknown = sum(isinstance(error, kivi.CommitUnknown) for error in refused)
    server.start()
    with server.connect() as db, db.snapshot() as snap:
        total = snap.get("t", (1,))["v"]
    server.stop()
    assert len(acknowledged) <= total <= len(acknowledged) + unknown
    assert len(set(acknowledged)) == len(acknowledged)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_every_acknowledged_append_is_there_once_after_the_server_ends(tmp_path, number):
    server = ServerProcess(tmp_path / "data").start()
    with server.connect(timeout=60) as db:
        db.create_event_table("ev", event_time="ts", columns={"e": "int64", "ts": "timestamp", "v": "int64"})
        db.create_aggregate("agg", "ev", ["e"], {"s": kivi.sum("v"), "n": kivi.count()})
        stop = threading.Event()
        done: list[int] = []

        def append(worker: int) -> None:
            i = 0
            while not stop.is_set():
                value = worker * 1_000_000 + i
                db.append("ev", [{"e": worker, "ts": value, "v": value}])  # repeated by the client under one token
                done.append(value)
                i += 1

        threads = [threading.Thread(target=append, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            before = len(done)
            wait_until(lambda: len(done) > before + 100)  # noqa: B023
            server.signal(number)
            server.wait()
            server.start()
        stop.set()
        for thread in threads:
            thread.join()
        with db.snapshot() as snap:
            stored = [row["v"] for row in snap.scan("ev")]
            sums = {row["e"]: (row["s"], row["n"]) for row in snap.scan("agg")}
    server.kill()
    assert sorted(stored) == sorted(done)
    recount: dict[int, tuple[int, int]] = {}
    for value in stored:
        s, n = recount.get(value // 1_000_000, (0, 0))
        recount[value // 1_000_000] = (s + value, n + 1)
    assert sums == recount


def test_a_client_that_reads_nothing_does_not_grow_the_server(server, db, accounts):
    """Its requests stop being read once too many are unanswered."""
    from tests.server.rawsession import RawSession
    from tests.server.test_session import get, pb

    with db.transaction() as tx:
        tx.put(accounts, (1,), name="x" * 100_000)
    table_id = db.describe(accounts)["id"]
    session = RawSession(server.endpoint)
    session.send(pb.Request(txn=1, begin=pb.Begin()))

    def resident_mb() -> float:
        with open(f"/proc/{server.pid}/statm") as file:
            return int(file.read().split()[1]) * 4096 / 1e6

    before = resident_mb()
    for i in range(1, 5_001):  # 500 MB of answers
        session.send(pb.Request(id=i, txn=1, get=get(table_id, 1)))
    time.sleep(3)
    grown = resident_mb() - before
    with db.snapshot() as snap:  # others are served meanwhile
        assert snap.get(accounts, (1,), ["id"]) == {"id": 1}
    session.close()
    assert grown < 300, grown


def test_commits_that_wait_for_room_hold_up_no_reader(tmp_path):
    """More of them than any pool has threads: scans, reads and begins go on, and all commit once there is room."""
    settings = ("background=false", "pending_soft_bytes=100000", "pending_hard_bytes=200000")
    arguments = [part for setting in settings for part in ("--set", setting)]
    with ServerProcess(tmp_path / "data", *arguments) as server, server.connect(timeout=30) as db:
        db.create_table("t", key={"id": "int64"}, columns={"text": "string"})
        with db.transaction() as tx:
            tx.put("t", (0,), text="x" * 300_000)
        stamps: list[int] = []

        def write(i: int) -> None:
            with db.transaction() as tx:
                tx.put("t", (i,), text="y")
            assert tx.commit_ts
            stamps.append(tx.commit_ts)

        before = db.stats()["server_requests"]
        writers = [threading.Thread(target=write, args=(i,)) for i in range(1, 65)]
        for writer in writers:
            writer.start()
        wait_until(lambda: db.stats()["server_requests"] >= before + 64)
        with server.connect(timeout=30) as reader, reader.snapshot() as snap:
            assert [row["id"] for row in snap.scan("t", where=kivi.col("id") >= 0)] == [0]
            assert snap.to_arrow("t").num_rows == 1
            assert snap.get("t", (1,)) is None
        assert not stamps and all(writer.is_alive() for writer in writers)  # none has been told that it waits in vain
        db.consolidate()
        for writer in writers:
            writer.join(60)
        assert len(set(stamps)) == 64
        with db.snapshot() as snap:
            assert snap.to_arrow("t").num_rows == 65


@pytest.mark.story
@pytest.mark.parametrize("wrote", [False, True])
def test_a_transaction_outlives_its_lease_only_if_it_is_renewed(tmp_path, wrote):
    with ServerProcess(tmp_path / "data", "--set", "lease_ttl_s=4") as server, server.connect() as db:
        db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        with db.transaction() as tx:
            if wrote:
                tx.put("t", (1,), n=1)
            for _ in range(10):
                tx.renew()
                time.sleep(0.5)
            tx.delta("t", (1,), n=1)
        with pytest.raises(kivi.SnapshotTooOld), db.transaction() as tx:
            assert tx.start_ts
            if wrote:
                tx.put("t", (1,), n=5)
            time.sleep(4.5)
            tx.delta("t", (1,), n=1)
        with db.snapshot() as snap:
            assert snap.get("t", (1,)) == {"id": 1, "n": 1 + wrote}


def test_the_server_does_without_pandas(tmp_path):
    """pyarrow would import it with its first array, in the midst of commits; Spark's tests have it installed."""
    pytest.importorskip("pandas")
    with ServerProcess(tmp_path / "data") as server, server.connect() as db:
        db.create_event_table("ev", event_time="ts", columns={"ts": "timestamp", "v": "int64"})
        db.create_aggregate("by_v", "ev", ["v"], {"n": kivi.count()})
        with db.subscribe("by_v") as live:
            db.append("ev", [{"ts": i, "v": i % 7} for i in range(5_000)])
            while not live.rows:
                live.next(1)
        db.consolidate()
        with db.snapshot() as snap:
            assert snap.to_arrow("ev").num_rows == 5_000
            assert len(list(snap.scan("by_v"))) == 7
        mapped = Path(f"/proc/{server.pid}/maps").read_text()
    assert "/pyarrow/" in mapped
    assert "/pandas/" not in mapped


def test_bytes_that_are_no_message_are_the_callers_mistake(server):
    """Of every call, unary or stream."""
    with grpc.insecure_channel(server.endpoint) as channel:
        for name, method in methods.METHODS.items():
            sent = iter([b"\xff\xff\xff\x07junk"]) if method.client_streaming else b"\xff\xff\xff\x07junk"
            if name in ("Exchange", "Session"):  # whose answers say so
                continue
            kind = "_".join(
                "stream" if many else "unary" for many in (method.client_streaming, method.server_streaming)
            )
            with pytest.raises(grpc.RpcError) as refused:
                list(getattr(channel, kind)(methods.path(name))(sent, timeout=30))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
