"""Goal 20: the front door: spans over HTTP beside gRPC, what it costs an idle server, pollers, and hostile clients.

* *Spans*: exports of 512 by 8 senders in a process of its own, over one connection each, made and packed before the
  clock starts. Before a rate is believed the table and its aggregate have each span once, also after a ``kill -9`` and
  exports that were sent again, in other batches. Wanted: OTLP/HTTP 0.7 of OTLP/gRPC, packed and not.
* *Idle*: a server without and with ``--http``, twice each; in memory, and how many one-delta transactions of 64 threads
  it takes over gRPC. Wanted: 40 MiB at most; the same rate.
* *Pollers*: of a dashboard with three questions, with the tag of their last answer, each twice after each commit. How
  often the store was read for all of them. Wanted: for a thousand no more often than for two.
* *Neighbours*: two clients, of gRPC and of HTTP, beside each assault of ``tests.proof.requests``: ten thousand
  connections that say nothing, readers that take nothing, writers that trickle, bodies that lie, requests that are
  wrong. Wanted: their 99th percentile within ten times the quiet one, or what the machine lets a process wait.
"""

from __future__ import annotations

import asyncio
import gzip
import http.client
import multiprocessing
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
import pyarrow.compute as pc
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest as Request

import kivi
from bench import tables
from bench.context import Context
from bench.server import Server
from bench.sheet import Figures, Ratio, Sheet, percentile
from bench.together import in_threads, run
from bench.verify import WrongTotals, each_own
from tests.otlp import EXPORT, Recorder
from tests.ports import Port
from tests.proof.requests import ASSAULTS, beside_neighbours, may_open

__all__ = ["sheet", "take"]

SPANS: Final = 512  # of an export, as the SDK batches them
SENDERS: Final = 8
_EXPORTS_A_SECOND: Final = 120  # of ``seconds``
_WARM_UP: Final = 16
_HOW: Final = ("gRPC", "HTTP", "HTTP, gzip", "gRPC, gzip")
_TOGETHER: Final = 64
_POLLERS: Final = (2, 1_000)
_ROUNDS: Final = 10
_SCALES: Final = {
    **dict.fromkeys(ASSAULTS, 1.0),
    "mutated requests": 0.05,
}
_OVER: Final = ("gRPC", "HTTP")
_POLLED: Final = (
    f"/v1/tables/{tables.AGGREGATE}/rows?limit=20",
    f"/v1/tables/{tables.AGGREGATE}/rows?step=1h&limit=20",
    f"/rows?table={tables.EVENTS}&limit=5&order_by=-ts",
)


def sheet() -> Sheet:
    def spans(how: str) -> Callable[[Figures], float]:
        return lambda figures: figures["kivi", f"spans, HTTP{how}"] / figures["kivi", f"spans, gRPC{how}"]

    def worst(over: str) -> Callable[[Figures], float]:
        return lambda figures: max(figures["kivi", f"{name}: p99 of {over}"] for name in _SCALES)

    return Sheet(
        "goal20",
        "The front door: spans over HTTP, an idle server, pollers, hostile clients",
        [
            Ratio("spans over HTTP / over gRPC", spans(""), at_least=0.7),
            Ratio("spans over HTTP / over gRPC, gzip", spans(", gzip"), at_least=0.7),
            Ratio("MiB that the HTTP application takes, idle", _taken, at_most=40),
            Ratio("commits over gRPC with it / without it", _commits, at_least=0.95),
            Ratio("reads of the store for 1,000 pollers / for 2", _reads, at_most=1.0),
            *(Ratio(f"p99 of a neighbour over {over}, assaulted / quiet", worst(over), at_most=10) for over in _OVER),
        ],
    )


def _taken(figures: Figures) -> float:
    return figures["kivi", "memory, idle, with HTTP"] - figures["kivi", "memory, idle, without"]


def _commits(figures: Figures) -> float:
    return figures["kivi", "commits, with HTTP"] / figures["kivi", "commits, without"]


def _reads(figures: Figures) -> float:
    few, many = (figures["kivi", f"reads of the store, {count:,} pollers"] for count in _POLLERS)
    return many / few


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    for how in _HOW:
        _spans(context, sheet, how)
    _idle(context, sheet)
    for count in _POLLERS:
        _polled(context, sheet, count)
    with context.server("--http", "localhost:0") as server:
        for noticed in beside_neighbours(server, {k: v * (0.01 if context.quick else 1) for k, v in _SCALES.items()}):
            print(f"  {noticed}".replace("\n", "\n  "), flush=True)
            for over in _OVER:
                sheet.record("kivi", f"{noticed.name}: p99 of {over}", noticed.times(over), "times the quiet one")
            sheet.record(
                "kivi",
                f"{noticed.name}: memory",
                noticed.grown_mb,
                "MB",
                answers=dict(noticed.answers),
                s=noticed.took_s,
            )


# -- spans ----------------------------------------------------------------------------------------------


def _exports(first: int, count: int) -> list[bytes]:
    """Requests, from the ``first``: each has spans of its own, of 20 routes."""
    recorder = Recorder()
    for i in range(SPANS):
        recorder.span(f"/r{i % 20}")
    made = encode_spans(recorder.memory.get_finished_spans())
    mark = b"kivi\xff\xfe\xfd\xfc"
    for i, span in enumerate(made.resource_spans[0].scope_spans[0].spans):
        span.trace_id, span.span_id = mark + bytes(8), (i + 1).to_bytes(8, "big")
    body = made.SerializeToString()
    return [body.replace(mark, number.to_bytes(8, "big")) for number in range(first + 1, first + count + 1)]


def _regrouped(bodies: list[bytes]) -> list[bytes]:
    """The same spans, in other batches."""
    spans = [span for body in bodies for span in Request.FromString(body).resource_spans[0].scope_spans[0].spans]
    random.Random(1).shuffle(spans)
    for i, body in enumerate(bodies):
        made = Request.FromString(body)
        del made.resource_spans[0].scope_spans[0].spans[:]
        made.resource_spans[0].scope_spans[0].spans.extend(spans[i * SPANS : (i + 1) * SPANS])
        bodies[i] = made.SerializeToString()
    return bodies


def _send(how: str, target: str, first: int, count: int, again: bool = False) -> float:
    """In a process of its own. Seconds from the first export to the last acknowledgement. ``again``: regrouped."""
    bodies = _exports(first, count)
    if again:
        bodies = _regrouped(bodies)
    if how == "HTTP, gzip":
        bodies = [gzip.compress(body, 6) for body in bodies]
    taken = iter(bodies)
    with ThreadPoolExecutor(SENDERS) as senders, ExitStack() as stack:

        def work(send: Callable[[bytes], None]) -> None:
            for body in taken:
                send(body)

        sends = [stack.enter_context(_sender(how, target)) for _ in range(SENDERS)]
        began = time.perf_counter()
        list(senders.map(work, sends))
        return time.perf_counter() - began


@contextmanager
def _sender(how: str, target: str) -> Iterator[Callable[[bytes], None]]:
    if how.startswith("gRPC"):
        coding = grpc.Compression.Gzip if how.endswith("gzip") else grpc.Compression.NoCompression
        with grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)], compression=coding) as channel:
            call: Any = channel.unary_unary(EXPORT)

            def over_grpc(body: bytes) -> None:
                if call(body, timeout=60):
                    raise WrongTotals("an export was taken in part")

            yield over_grpc
        return
    at = urlsplit(target)
    connection = http.client.HTTPConnection(str(at.hostname), at.port, timeout=60)
    headers = {"Content-Type": "application/x-protobuf"}
    if how.endswith("gzip"):
        headers["Content-Encoding"] = "gzip"

    def over_http(body: bytes) -> None:
        connection.request("POST", "/v1/traces", body, headers)
        reply = connection.getresponse()
        if reply.read() or reply.status != 200:
            raise WrongTotals(f"an export was answered {reply.status}")

    with closing(connection):
        yield over_http


def _spans(context: Context, sheet: Sheet, how: str) -> None:
    count = max(20, int(_EXPORTS_A_SECOND * context.seconds))
    otlp = Port()
    arguments = ("--otlp", f"localhost:{otlp.number}", "--http", "localhost:0")
    with context.server(*arguments) as server, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as sender:

        def send(*which: Any) -> float:
            target = arguments[1] if how.startswith("gRPC") else server.http  # another one after a restart
            return sender.submit(_send, how, target, *which).result()

        send(0, _WARM_UP)
        before = server.cpu_s
        took = send(_WARM_UP, count)
        used = server.cpu_s - before
        _check_spans(server, how, _WARM_UP + count)
        server.restart()
        send(count // 2, 16, True)
        _check_spans(server, f"{how}, a kill and repetitions later", _WARM_UP + count)
    sheet.record("kivi", f"spans, {how}", count * SPANS / took, "spans/s", spans=count * SPANS)
    sheet.record("kivi", f"processor time of a span, {how}", used / (count * SPANS) * 1e6, "us")


def _check_spans(server: Server, who: str, exports: int) -> None:
    """Each span once, in the table and in its aggregate."""
    with server.connect() as db, db.snapshot() as snap:
        table = snap.to_arrow("invocations", columns=["trace_id", "span_id"])
        calls = snap.to_arrow("invocations_endpoint_5m", columns=["calls"])
    ids = table.group_by(["trace_id", "span_id"]).aggregate([])
    found = (table.num_rows, ids.num_rows, pc.sum(calls["calls"]).as_py())
    if found != (exports * SPANS,) * 3:
        raise WrongTotals(f"{who}: {exports * SPANS:,} spans were sent; there are {found} events, ids, calls")


# -- an idle server -------------------------------------------------------------------------------------


def _idle(context: Context, sheet: Sheet) -> None:
    """In turn: without, with, with, without; the mean of each two."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for how in ("without", "with HTTP", "with HTTP", "without"):
        with context.server(*(("--http", "localhost:0") if how != "without" else ())) as server:
            if how != "without":
                _asked(server, "/healthz")  # what is imported with the first request is of what it costs
            time.sleep(3 if not context.quick else 0.5)
            found[f"memory, idle, {how}"].append(server.rss_bytes / 2**20)
            with server.connect() as db:
                found[f"commits, {how}"].append(_commit_rate(db, context.seconds))
    for case, each in found.items():
        sheet.record("kivi", case, sum(each) / len(each), "MiB" if case.startswith("memory") else "transactions/s")


def _commit_rate(db: Any, seconds: float) -> float:
    db.create_table("counters", key={"id": "int64"}, columns={"hits": kivi.sum("int64")})
    stamps: list[int] = []

    def increment() -> None:
        with db.transaction() as tx:
            tx.delta("counters", (1,), hits=1)
        stamps.append(tx.commit_ts)

    in_threads([increment] * _TOGETHER, seconds / 5)
    count, took = in_threads([increment] * _TOGETHER, seconds)
    each_own("kivi", stamps, len(stamps))
    with db.snapshot() as snap:
        if (row := snap.get("counters", (1,))) is None or row["hits"] != len(stamps):
            raise WrongTotals(f"kivi holds {row} after {len(stamps):,} increments")
    return count / took


def _asked(server: Server, path: str) -> bytes:
    at = urlsplit(server.http)
    connection = http.client.HTTPConnection(str(at.hostname), at.port, timeout=60)
    connection.request("GET", path)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    if reply.status != 200:
        raise WrongTotals(f"{path} is answered {reply.status}: {body!r}")
    return body


# -- pollers --------------------------------------------------------------------------------------------


class _Poller:
    """Of all questions, through one connection, each with the tag of its last answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._tags = dict[str, str]()
        self.took_s: list[float] = []

    async def poll(self, commit_ts: int, status: int) -> None:
        """Raises WrongTotals for an answer that has not that status, or lacks that commit."""
        for path in _POLLED:
            tag = f"If-None-Match: {self._tags[path]}\r\n" if path in self._tags else ""
            began = time.perf_counter()
            self._writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{tag}\r\n".encode())
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
            fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
            await self._reader.readexactly(int(fields.get("content-length", 0)))
            self.took_s.append(time.perf_counter() - began)
            found = int(head.split()[1]), int(fields.get("x-kivi-snapshot", 0))
            if found[0] != status or found[1] < commit_ts:
                raise WrongTotals(f"{path} is answered {found}, not {status} at {commit_ts} or later")
            self._tags[path] = fields["etag"]

    def close(self) -> None:
        self._writer.transport.abort()


def _polled(context: Context, sheet: Sheet, count: int) -> None:
    pool, rounds = context.pool("wide", 1_000), max(2, int(_ROUNDS * min(1.0, context.seconds / 5)))
    with context.server("--http", "localhost:0") as server, server.connect() as db:
        tables.create(db)
        before = db.stats()["server_http_computed"]
        took_s = run(_rounds(server, db, pool.batches[:rounds], count))
        computed = db.stats()["server_http_computed"] - before
    sheet.record("kivi", f"reads of the store, {count:,} pollers", computed, "reads", commits=rounds)
    sheet.record("kivi", f"a poll, {count:,} pollers, p99", percentile(took_s, 99) * 1e3, "ms", polls=len(took_s))


async def _rounds(server: Server, db: Any, batches: list[Any], count: int) -> list[float]:
    """After each commit all of them poll, together, and once more when nothing has changed."""
    may_open(count)
    at = urlsplit(server.http)
    pollers = [_Poller(*await asyncio.open_connection(at.hostname, at.port)) for _ in range(count)]
    try:
        for batch in batches:
            ts = await asyncio.to_thread(db.append, tables.EVENTS, batch)
            for status in (200, 304):
                await asyncio.gather(*(poller.poll(ts, status) for poller in pollers))
    finally:
        for poller in pollers:
            poller.close()
    return [s for poller in pollers for s in poller.took_s]
