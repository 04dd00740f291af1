"""Hostile input and overload, while a well-behaved client goes on.

Each assault is a function of a server that returns what it was answered, by name. Around every one of them must hold:

* the server lives, is healthy, and does not grow by more than ``GROWN_MB_MAX``;
* the well-behaved client (a commit of one delta, a read of one row, again and again) is answered: its 99th percentile
  stays within ten times its quiet one, or what the machine itself lets a process wait;
* its sums are exact at the end: what is refused is refused whole.

Every statement is refused under a *name*: an error without one is a failure.
"""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pyarrow as pa
from kivi_server.limits import SESSION_SCANS_MAX

import kivi
from kivi.errors import KiviError
from kivi.wire.v1 import session_pb2, types_pb2
from tests.oracle import Mismatch
from tests.proof import requests
from tests.server.rawsession import RawSession, frame
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

__all__ = ["ASSAULTS", "Bystander", "make_tables", "resident_mb", "watched"]

ROOT = Path(__file__).resolve().parents[2]
GROWN_MB_MAX = 1_000
"""48 scans that nobody reads hold a block of 8 MiB each, and the allocator keeps about as much again."""
SLOWER_MAX = 10
PAUSE_S = 0.3
SLEEP_S = 0.002
Answers = Counter[str]


def make_tables(db: Any) -> None:
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "s": "string", "b": "bytes"})
    db.create_table("keys", key={"k": "bytes"}, columns={"n": kivi.sum("int64")})
    db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "a": "int64", "s": "string"})
    db.create_aggregate("agg", source="e", group_by=["a"], measures={"calls": kivi.count()})
    requests.make_tables(db)


def resident_mb(pid: int) -> float:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


class Bystander:
    """The well-behaved client, in a process of its own. ``latencies_ms`` are of a commit and a read together;
    ``late_ms``: how much longer than it asked for it slept after each, which is what the machine lets a process wait.
    """

    def __init__(self, endpoint: str) -> None:
        """``endpoint``: of the server's HTTP listener, that it goes there."""
        self.latencies_ms: list[float] = []
        self.late_ms: list[float] = []
        command = [sys.executable, "-m", "tests.proof.hostile", endpoint]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            latency_ms, late_ms = map(float, line.split())
            self.late_ms.append(late_ms)
            self.latencies_ms.append(latency_ms)

    def stop(self) -> int:
        """Its exit code: 0 if every answer was right, to the last."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self._reader.join()
        self.process.stdout.close()
        return self.process.wait(60)

    def quiet_ms(self) -> float:
        """The 99th percentile when nothing happens; waits until there are enough of them."""
        wait_until(lambda: len(self.latencies_ms) >= 400, 60.0)
        return p99(self.latencies_ms[50:])


def p99(found: Sequence[float]) -> float:
    return statistics.quantiles(found, n=100)[98] if len(found) >= 100 else max(found, default=0.0)


def behave_well(endpoint: str) -> int:
    """What the bystander's process does: adds one and reads it back, and says how long both took."""
    committed = 0
    told = threading.Event()  # not by a signal: an exception in the middle of anything might be lost there

    def listen() -> None:
        sys.stdin.read()
        told.set()

    threading.Thread(target=listen, daemon=True).start()
    with _over_http(endpoint) if "://" in endpoint else _over_grpc(endpoint) as add_and_read:
        while not told.is_set():
            began = time.perf_counter()
            committed, found = committed + 1, add_and_read()
            latency_s = time.perf_counter() - began
            if found != committed:
                print(f"{found} instead of {committed}", file=sys.stderr)
                return 1
            slept = time.perf_counter()
            time.sleep(SLEEP_S)
            print(latency_s * 1e3, (time.perf_counter() - slept - SLEEP_S) * 1e3, flush=True)
    return 0


@contextlib.contextmanager
def _over_grpc(endpoint: str) -> Iterator[Callable[[], int]]:
    """What it does, each time: a commit of one more, and what is there then."""

    def add_and_read() -> int:
        with db.transaction() as tx:
            tx.delta("t", (0,), n=1)
        with db.snapshot() as snap:
            row = snap.get("t", (0,))
        return row["n"] if row is not None else 0

    with kivi.connect(endpoint, timeout=30.0) as db:
        yield add_and_read


@contextlib.contextmanager
def _over_http(endpoint: str) -> Iterator[Callable[[], int]]:
    """Of another row, through one connection that stays open."""
    one_more = {"op": "delta", "table": "t", "key": [-1], "values": {"n": 1}}

    def add_and_read() -> int:
        http.post("/v1/transactions", json={"operations": [one_more]}).raise_for_status()
        (row,) = http.get("/v1/tables/t/rows", params={"key": "-1"}).raise_for_status().json()["rows"]
        return int(row["n"])

    with httpx.Client(base_url=endpoint, timeout=30.0) as http:
        yield add_and_read


@contextlib.contextmanager
def watched(
    server: ServerProcess, bystander: Bystander, quiet_ms: float, slower_max: float = SLOWER_MAX
) -> Iterator[None]:
    """What must hold around one assault. ``quiet_ms``: the bystander's 99th percentile when nothing happens.

    Where whatever else the machine does keeps each process waiting for longer than that, it is that which counts.
    """
    before, since = resident_mb(server.pid), len(bystander.latencies_ms)
    yield
    time.sleep(0.3)
    assert bystander.process.poll() is None, "the well-behaved client got a wrong answer, or none"
    assert server.process is not None
    assert server.process.poll() is None, "".join(server.output[-20:])
    grown = resident_mb(server.pid) - before
    assert grown < GROWN_MB_MAX, f"the server grew by {grown:.0f} MB"
    slow_ms, late_ms = p99(bystander.latencies_ms[since:]), p99(bystander.late_ms[since:])
    said = (
        f"99th percentile {slow_ms:.1f} ms, {quiet_ms:.1f} ms when all is quiet, {late_ms:.1f} ms of it the machine's"
    )
    assert slow_ms <= slower_max * max(quiet_ms, late_ms), said


def named(call: Callable[[], object], pause_s: float = 0.0) -> str:
    """What a call was answered: ok, or the error's name. An error that is none of ours is not an answer."""
    time.sleep(pause_s)
    try:
        call()
        return "ok"
    except KiviError as error:
        if type(error) is KiviError:
            raise AssertionError(f"an error without a name: {error}") from error
        return type(error).__name__


# -- just over each limit -------------------------------------------------------------------------------


def over_each_limit(server: ServerProcess, scale: float) -> Answers:
    """One unit too much of everything that has a published limit, and exactly the limit.

    Largest messages one after the other take the whole machine: each costs the others some 50 ms. So there are pauses.
    """
    out: Answers = Counter()
    with server.connect(timeout=60.0) as db:

        def put(value: Any, column: str = "b", key: int = 1) -> str:
            def call() -> None:
                with db.transaction() as tx:
                    tx.put("t", (key,), **{column: value})

            return named(call, PAUSE_S)

        def one_key(key: bytes) -> str:
            def call() -> None:
                with db.transaction() as tx:
                    tx.delta("keys", (key,), n=1)
                with db.snapshot() as snap:
                    if (row := snap.get("keys", (key,))) != {"k": key, "n": 1}:
                        raise Mismatch(f"the row {key!r}, to which 1 was added, is {row}")

            return named(call, PAUSE_S)

        mib = 1 << 20
        out["value 16 MiB " + put(b"x" * 16 * mib)] += 1
        out["value 16 MiB + 1 " + put(b"x" * (16 * mib + 1))] += 1
        out["text 16 MiB + 1 " + put("x" * (16 * mib + 1), "s")] += 1
        out["key of zero bytes " + one_key(bytes(1_000))] += 1
        out["key of no bytes " + one_key(b"")] += 1
        out["key 64 KiB " + one_key(b"k" * (65_536 - 2))] += 1
        out["key 64 KiB + 1 " + one_key(b"k" * 65_537)] += 1
        rows = pa.table(
            {"ts": pa.array(np.zeros(1_000_001, "i8"), pa.timestamp("us", "UTC")), "a": np.zeros(1_000_001, "i8")}
        )
        out["append 10^6 " + named(lambda: db.append("e", rows.slice(0, 1_000_000)), PAUSE_S)] += 1
        out["append 10^6 + 1 " + named(lambda: db.append("e", rows), PAUSE_S)] += 1
        out["get 100,001 " + named(lambda: _many(db, 100_001), PAUSE_S)] += 1
        out["unknown table " + named(lambda: db.append("nothing", [{"a": 1}]), PAUSE_S)] += 1

        def large(count: int) -> None:
            with db.transaction() as tx:
                for i in range(count):
                    tx.delta("t", (5 + i % 100,), n=1)

        count = int(1_000_000 * scale)
        out[f"{count} operations " + named(lambda: large(count), PAUSE_S)] += 1
        if scale >= 1:
            out["10^6 + 1 operations " + named(lambda: large(1_000_001), PAUSE_S)] += 1
    return out


def _many(db: Any, count: int) -> None:
    with db.snapshot() as snap:
        snap.get_many("t", [(i,) for i in range(count)])


# -- mutated ----------------------------------------------------------------------------------------------


def mutated_frames(server: ServerProcess, scale: float) -> Answers:
    """Valid session frames with bytes changed, cut or repeated: each gets an answer or ends its own session."""
    rng, out = random.Random(1), Counter[str]()
    put = session_pb2.Operation(kind=session_pb2.Operation.KIND_PUT, table="t")
    put.key.add(int_value=9)
    put.columns.append("s")
    put.values.add(string_value="x" * 20)
    text = b"y" * 300
    long = session_pb2.Operation(kind=session_pb2.Operation.KIND_PUT, table="t", columns=["s"])
    long.key.add(int_value=9)
    long.values.add(string_body=len(text))
    good = frame(
        session_pb2.Request(id=1, txn=1, begin=session_pb2.Begin()),
        (session_pb2.Request(id=2, txn=1, operations=[put, long], get=session_pb2.Get(table="t")), text),
        session_pb2.Request(id=3, txn=1, commit=session_pb2.Commit(token="k1-1-x")),
    )
    session = RawSession(server.endpoint)
    for _ in range(int(100_000 * scale)):
        session.frames.put(requests.bytes_changed(good, rng))
        out["frames"] += 1
        if out["frames"] % 200 == 0 and not _alive(session):
            out["sessions ended"] += 1
            session.close()
            session = RawSession(server.endpoint)
    session.close()
    return out


def _alive(session: RawSession) -> bool:
    """Whether a session still answers a good request; a mutated one may have ended it."""
    number = 1_000_000_007
    session.send(session_pb2.Request(id=number, txn=99, begin=session_pb2.Begin()))
    session.send(session_pb2.Request(txn=99, release=session_pb2.Release()))
    try:
        session.reply(number)
    except grpc.RpcError:
        return False
    return True


def mutated_arrow(server: ServerProcess, scale: float) -> Answers:
    """Valid Arrow streams with bytes changed, and the worst known ones: a bomb, 2^31 rows, bad offsets."""
    rng, out = random.Random(2), Counter[str]()
    sink = pa.BufferOutputStream()
    table = pa.table({"ts": pa.array([1, 2, 3], pa.timestamp("us", "UTC")), "a": [1, 2, 3], "s": ["a", "bb", "ccc"]})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    good = sink.getvalue().to_pybytes()
    bomb_sink = pa.BufferOutputStream()
    zeros = pa.table({"ts": pa.array(np.zeros(30 << 20, "i8"), pa.timestamp("us", "UTC"))})
    with pa.ipc.new_stream(bomb_sink, zeros.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(zeros)
    payloads = [("bomb", bomb_sink.getvalue().to_pybytes())] * 3
    payloads += [("mutated", requests.bytes_changed(good, rng)) for _ in range(int(100_000 * scale))]
    for start in range(0, len(payloads), 50):
        session, some = RawSession(server.endpoint), payloads[start : start + 50]
        for number, (_, data) in enumerate(some, 1):
            session.send((_append(number, data), data))
        for number, (kind, _) in enumerate(some, 1):
            error = session.reply(number).error
            code = _CODES[error.code]
            out[f"{kind} {code.name}"] += 1
            assert code in _NAMED, f"{kind}: {code} {error.message}"
        session.close()
    return out


def _append(number: int, data: bytes) -> session_pb2.Request:
    """A transaction of the events in its body."""
    append = session_pb2.Operation(kind=session_pb2.Operation.KIND_APPEND, table="e", arrow_bytes=len(data))
    return session_pb2.Request(id=number, operations=[append], commit=session_pb2.Commit())


_CODES = {code.value[0]: code for code in grpc.StatusCode}
_NAMED = (
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.NOT_FOUND,
)


# -- too many ---------------------------------------------------------------------------------------------


def idle_connections(server: ServerProcess, scale: float) -> Answers:
    """Connections that say hello in HTTP/2 and nothing more, and connections that say nothing at all."""
    wanted = int(5_000 * scale)
    requests.may_open(wanted)
    held: list[socket.socket] = []
    out: Answers = Counter()
    try:
        for i in range(wanted):
            try:
                connection = socket.create_connection((server.host, server.port), timeout=10)
                held.append(connection)
                if i % 2:
                    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
                out["connected"] += 1
            except OSError as error:
                out[type(error).__name__] += 1
        with server.connect(timeout=60) as db:
            out["and one that works " + named(db.watermark)] += 1
        time.sleep(5 * min(1.0, 10 * scale))  # idle: the storm of connecting is over in a second
    finally:
        for connection in held:
            connection.close()
    return out


def open_snapshots(server: ServerProcess, scale: float) -> Answers:
    """Ten thousand snapshots, held open while rows change under them."""
    out: Answers = Counter()
    with server.connect(timeout=30.0) as db:
        held = []
        for i in range(int(10_000 * scale)):
            held.append(db.snapshot())
            if i % 100 == 0:
                with db.transaction() as tx:
                    tx.delta("t", (3,), n=1)
        out["open"] = len(held)
        seen = [snap.get("t", (3,)) for snap in random.Random(3).sample(held, 100)]
        out["read"] = len(seen)
        for snap in held:
            snap.close()
    return out


def cancels(server: ServerProcess, scale: float) -> Answers:
    """Calls that are cancelled at once or whose deadline has passed; what was logged completes all the same."""
    out: Answers = Counter()
    rng = random.Random(4)
    sink = pa.BufferOutputStream()
    table = pa.table({"ts": pa.array([1] * 500, pa.timestamp("us", "UTC")), "a": [77] * 500})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    for i in range(int(3_000 * scale)):
        session = RawSession(server.endpoint)
        if i % 3:
            session.send((_append(1, data), data))
        else:
            scan = session_pb2.ScanOpen(spec=types_pb2.ScanSpec(table="e"))
            session.send(session_pb2.Request(id=1, txn=1, first=session_pb2.Begin(), scan_open=scan))
        if rng.random() < 0.3:
            session.reply(1)
        session.close()
        out["calls"] += 1
    for _ in range(int(100 * scale) + 5):
        session = RawSession(server.endpoint)
        session.send(session_pb2.Request(id=1, txn=1, begin=session_pb2.Begin()))
        session.close()
        out["sessions"] += 1
    with server.connect(timeout=30.0) as db, db.snapshot() as snap:
        row = snap.get("agg", (77,))
        calls = 0 if row is None else row["calls"]
        if calls % 500:
            raise Mismatch(f"half an append is in the aggregate, which counts {calls}")
        events = sum(1 for event in snap.scan("e", where=kivi.col("a") == 77))
        if calls != events:
            raise Mismatch(f"the aggregate is no recount: it counts {calls} of {events}")
        out["appends that were logged"] = calls // 500
    return out


def readers_that_stop(server: ServerProcess, scale: float) -> Answers:
    """Scans of which nobody asks for a second page: those beyond the limit are refused, the memory is bounded."""
    out: Answers = Counter()
    with server.connect(timeout=30.0) as db:
        for _ in range(int(40 * scale) + 2):
            db.append("e", [{"ts": i, "a": 5, "s": "x" * 200} for i in range(2_000)])
    session, wanted = RawSession(server.endpoint), int(1_100 * scale) + 3
    session.send(session_pb2.Request(txn=1, begin=session_pb2.Begin()))
    for number in range(1, wanted + 1):
        opening = session_pb2.ScanOpen(spec=types_pb2.ScanSpec(table="e"), page_rows=100)
        session.send(session_pb2.Request(id=number, txn=1, scan_open=opening))
    for number in range(1, wanted + 1):
        error = session.reply(number).error
        out["refused" if error.code else "held"] += 1
        assert not error.code or error.message.startswith("open scans: "), error
    assert (out["refused"] > 0) == (wanted > SESSION_SCANS_MAX)
    time.sleep(8 * min(1.0, 10 * scale))
    session.close()
    return out


ASSAULTS: dict[str, Callable[[ServerProcess, float], Answers]] = {
    "over each limit": over_each_limit,
    "mutated frames": mutated_frames,
    "mutated arrow": mutated_arrow,
    "idle connections": idle_connections,
    "open snapshots": open_snapshots,
    "cancels": cancels,
    "readers that stop": readers_that_stop,
    **requests.ASSAULTS,
}
"""Each takes the server (with ``--http``) and a scale: 1 is the long form."""


if __name__ == "__main__":
    raise SystemExit(behave_well(sys.argv[1]))
