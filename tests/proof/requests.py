"""Hostile HTTP: the front door beside its neighbours. ``python -m tests.proof.requests --count 100000``.

Each assault is as those of ``hostile``, among which it is: a function of a server (with ``--http``) that returns what
it was answered, by name. What is answered must be of the application's own description, and a 5xx a named one; a
connection may end instead. The long form has two well-behaved clients beside it, one of gRPC and one of HTTP, and
prints what they noticed and how much memory the server took.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pyarrow as pa
from kivi_server.http.description import described

import kivi
from tests.serverproc import ServerProcess

__all__ = ["ASSAULTS", "Assaulted", "Noticed", "beside_neighbours", "bytes_changed", "make_tables", "may_open"]

AT_ONCE: Final = 64
"""Connections, of mutated requests."""
PATIENCE_S: Final = 0.25
"""For an answer to a request that may not be whole; then the client says that it sends no more."""
ANSWER_S: Final = 30.0
"""For the end, or an answer, that has to come."""
ROWS: Final = 40_000
"""Of the answer that slow readers ask for, as Arrow, which is cheap to make: ten megabytes, more than the system takes
on itself."""
Answers = Counter[str]
STATUSES: Final = {"204"}.union(  # 204: of a browser that asks what it may
    *(operation["responses"] for path in described(kivi.__version__)["paths"].values() for operation in path.values())
)
_HEAD: Final = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r]*\r\n((?:[^\r]+\r\n)*)\r\n")


class Assaulted(AssertionError):
    """An answer that no client can make anything of."""


def make_tables(db: Any) -> None:
    db.create_event_table("web", event_time="ts", columns={"ts": "timestamp", "a": "int64", "s": "string"})
    db.create_table("pages", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "s": "string"})
    with db.transaction() as tx:
        tx.put("pages", (1,), s="a page")
    rows = {"ts": range(ROWS), "a": [i % 7 for i in range(ROWS)], "s": [f"{i:0>250}" for i in range(ROWS)]}
    db.append("web", pa.table(rows))


# -- connections ----------------------------------------------------------------------------------------


class Connection:
    """To the server's HTTP listener. Errors of connections are no errors here: they are how one ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, server: ServerProcess, *, takes_bytes: int = 1 << 16) -> Connection:
        at = urlsplit(server.http)
        return cls(*await asyncio.open_connection(at.hostname, at.port, limit=takes_bytes))

    async def send(self, data: bytes) -> None:
        with suppress(OSError):
            self._writer.write(data)
            await self._writer.drain()

    def stop_reading(self) -> None:
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def send_no_more(self) -> None:
        with suppress(OSError):
            self._writer.write_eof()

    async def all_of(self, seconds: float) -> tuple[bytes, bool]:
        """What is said until nothing comes for so long, and whether the connection has ended."""
        said = b""
        while True:
            try:
                async with asyncio.timeout(seconds):
                    more = await self._reader.read(1 << 20)
            except TimeoutError:
                return said, False
            except OSError:
                return said, True
            if not more:
                return said, True
            said += more

    def close(self) -> None:
        self._writer.transport.abort()


def may_open(count: int) -> None:
    """Has this process may have so many connections, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, count + 1_000)), hard))


async def answered(server: ServerProcess, *parts: bytes, patience_s: float = PATIENCE_S) -> str:
    """What these bytes are answered, by name; raises Assaulted for what nobody described."""
    connection = await Connection.to(server)
    try:
        for part in parts:
            await connection.send(part)
        said, ended = await connection.all_of(patience_s)
        if not said and not ended:
            connection.send_no_more()
            more, ended = await connection.all_of(ANSWER_S)
            said += more
            if not ended:
                raise Assaulted(f"no answer and no end within {ANSWER_S:g} s to {parts!r}")
        return named(said, b"".join(parts))
    finally:
        connection.close()


def named(said: bytes, sent: bytes) -> str:
    """``said``: answers, one after the other; the last may not be whole. Each is looked at."""
    if not said:
        return "closed"
    names, at = [], 0
    while at < len(said):
        found = _HEAD.match(said, at)
        if found is None:
            raise Assaulted(f"no HTTP: {said[at : at + 300]!r} to {sent[:2_000]!r}")
        status, fields = found[1].decode(), found[2].lower()
        if status == "100":
            at = found.end()
            continue
        if status not in STATUSES:
            raise Assaulted(f"{said[at : at + 300]!r} to {sent[:2_000]!r}")
        names.append(status)
        length = re.search(rb"content-length: (\d+)", fields)
        if said.startswith(b"HTTP/1.1 ", found.end()):  # of HEAD, and another answer
            at = found.end()
            continue
        at = len(said) if length is None else found.end() + int(length[1])
        if status >= "400" and b"application/json" in fields and at <= len(said):
            _check_error(said[found.end() : at], sent)
    return names[0] if names else "100"


def _check_error(body: bytes, sent: bytes) -> None:
    try:
        told = json.loads(body)
    except ValueError:
        raise Assaulted(f"no JSON, as it says: {body!r} to {sent[:2_000]!r}") from None
    if not (told.get("reason") or told.get("errorType") or "code" in told):
        raise Assaulted(f"an error without a name: {body!r} to {sent[:2_000]!r}")


async def several(count: int, of: Callable[[int], Awaitable[None]], at_once: int = AT_ONCE) -> None:
    """``count`` calls, so many at a time."""
    numbers = iter(range(count))

    async def work() -> None:
        for i in numbers:
            await of(i)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())


async def serves(server: ServerProcess) -> str:
    """Whether somebody new gets the right answer: an append, a read of what it has appended."""
    began, number = time.monotonic(), str(time.time_ns())
    while True:
        said = await _once(server, a_post(b"/v1/tables/web/append", b'[{"ts": 1, "a": %s}]' % number.encode()))
        if b'"commit_ts"' in said:
            break
        if time.monotonic() - began > ANSWER_S:
            raise Assaulted(f"an honest append is not taken: {said[:300]!r}")
        await asyncio.sleep(0.5)
    said = await _once(server, a_get(b"/v1/tables/web/rows?where=a%20%3D%20" + number.encode()))
    if number.encode() not in said:
        raise Assaulted(f"what was appended is not read: {said[:300]!r}")
    return f"served within {time.monotonic() - began:.0f} s"


async def _once(server: ServerProcess, request: bytes) -> bytes:
    connection = await Connection.to(server)
    try:
        await connection.send(request)
        said, _ = await connection.all_of(ANSWER_S)
        return said
    finally:
        connection.close()


def request(method: bytes, path: bytes, body: bytes = b"", *fields: bytes, closes: bool = True) -> bytes:
    lines = [b"%b %b HTTP/1.1" % (method, path), b"Host: localhost", *fields]
    if body or method == b"POST":
        lines.append(b"Content-Length: %d" % len(body))
    if closes:
        lines.append(b"Connection: close")
    return b"\r\n".join([*lines, b"", body])


def a_get(path: bytes, *fields: bytes) -> bytes:
    return request(b"GET", path, b"", *fields)


def a_post(path: bytes, body: bytes, *fields: bytes, media: bytes = b"application/json") -> bytes:
    return request(b"POST", path, body, b"Content-Type: " + media, *fields)


# -- mutated --------------------------------------------------------------------------------------------


def good_requests() -> list[bytes]:
    """One of each kind that there is; none that goes on for ever."""
    zipped = b"Content-Encoding: gzip"
    event = b'[{"ts": 5, "a": 1, "s": "x"}, {"ts": "2026-07-01T00:00:00Z", "a": 2}]'
    operations = b"""{"operations": [
        {"op": "put", "table": "pages", "key": [1], "values": {"s": "x"}},
        {"op": "delta", "table": "pages", "key": [2], "values": {"n": 1}},
        {"op": "append", "table": "web", "records": [{"ts": 7, "a": 3}]}], "snapshot": 1}"""
    span = {"traceId": "0" * 31 + "1", "spanId": "0" * 15 + "1", "name": "r", "kind": 2, "endTimeUnixNano": "9"}
    spans = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode()
    question = b'{"table": "web", "group_by": ["a"], "measures": {"n": "count()"}, "limit": 5}'
    found = [
        a_get(path, *fields)
        for path, *fields in (
            (b"/",),
            (b"/healthz",),
            (b"/metrics",),
            (b"/openapi.json",),
            (b"/rows?table=pages&limit=5&format=csv",),
            (b"/v1/tables", b"If-None-Match: *"),
            (b"/v1/tables/web",),
            (b"/v1/tables/web/rows?limit=3&where=a%20%3E%201&order_by=-a,ts", b"Accept: text/csv"),
            (b"/v1/tables/pages/rows?key=1&columns=n,s", b"Accept: application/vnd.apache.arrow.stream"),
            (b"/v1/tables/web/rows?limit=2&as_of=2026-07-01T00:00:00Z", b"Origin: http://localhost"),
            (b"/v1/rules", b"X-Request-Id: 7"),
            (b"/v1/alerts", b"Authorization: Bearer nobody"),
            (b"/v1/stats",),
            (b"/api/v1/query?query=sum(web)&time=1",),
            (b"/api/v1/label/__name__/values",),
        )
    ]
    return [
        *found,
        a_post(b"/v1/tables/web/append?late=drop", event, b"Idempotency-Key: a1"),
        a_post(b"/v1/tables/web/append", gzip.compress(event), zipped),
        a_post(b"/v1/tables/web/append", event[1:-1].replace(b"}, ", b"}\n"), media=b"application/x-ndjson"),
        a_post(b"/v1/transactions", operations),
        a_post(b"/v1/transactions", gzip.compress(operations), zipped, b"Idempotency-Key: b2"),
        a_post(b"/v1/query", question),
        a_post(b"/v1/query", gzip.compress(question), zipped, b"Accept: application/x-ndjson"),
        a_post(b"/v1/sql", b'{"sql": "select count(*) from pages"}'),
        a_post(b"/v1/traces", spans),
        a_post(b"/v1/traces", b"\n\x00", media=b"application/x-protobuf"),
        a_post(b"/v1/metrics", gzip.compress(b'{"resourceMetrics": []}'), zipped),
        a_post(b"/api/v1/query_range", b"query=up&start=0&end=10&step=5", media=b"application/x-www-form-urlencoded"),
        request(b"OPTIONS", b"/v1/query", b"", b"Origin: http://localhost", b"Access-Control-Request-Method: POST"),
        request(b"HEAD", b"/v1/tables/web/rows?limit=1"),
    ]


METHODS: Final = b"GET POST PUT DELETE HEAD OPTIONS TRACE CONNECT PATCH get \x00".split(b" ")
FIELDS: Final = [
    b"Content-Length: 5",
    b"Content-Length: -1",
    b"Content-Length: 99999999999999999999999",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Content-Encoding: br",
    b"Content-Encoding: gzip",
    b"Expect: 100-continue",
    b"Upgrade: websocket\r\nConnection: upgrade",
    b"Upgrade: h2c",
    b"Host: other.example",
    b"Origin: null",
    b"Range: bytes=0-",
    b"Accept: */nothing",
    b"X-\xff: \xfe",
    b" folded",
    b"X: " + b"y" * 70_000,
    b"\r\n".join(b"X-%d: y" % i for i in range(3_000)),
]
WORDS: Final = [
    *b'%00 %ff .. // ? &limit= 99999999999999999999 -1 nan 1e999 null { " \\ud800 &key= \x00'.split(b" "),
    b"\r\n",
    b"[" * 500,
    b"&where=a" + b"+1" * 400,
]


def mutated(good: bytes, dice: random.Random) -> bytes:
    """One that is not right any more, or differs at least; some lie about how much they bring."""
    head, _, body = good.partition(b"\r\n\r\n")
    first, *fields = head.split(b"\r\n")
    match dice.randrange(9):
        case 0:
            first = first.replace(first.split(b" ")[0], dice.choice(METHODS), 1)
        case 1:
            at = dice.randrange(len(first))
            first = first[:at] + dice.choice(WORDS) + first[at:]
        case 2:
            fields.insert(dice.randrange(len(fields) + 1), dice.choice(FIELDS))
        case 3:
            fields = [*dice.sample(fields, dice.randrange(len(fields) + 1)), *dice.choices(fields, k=dice.randrange(3))]
        case 4:
            lie = dice.choice([0, 1, max(0, len(body) - 1), len(body) + 1, len(body) + 1_000, 1 << 40])
            fields = _with(fields, b"Content-Length: %d" % lie)
        case 5:
            body = bytes_changed(body or b"{}", dice)
            fields = _with(fields, b"Content-Length: %d" % len(body))
        case 6:
            at = dice.randrange(len(body) + 1)
            body = body[:at] + dice.choice(WORDS) + body[at + dice.randrange(9) :]
            fields = _with(fields, b"Content-Length: %d" % len(body))
        case 7:
            sizes = dice.choice(
                [(b"%x", b"0\r\n\r\n"), (b"%x0", b""), (b"-%x", b"0\r\n\r\n"), (b"zz%x", b""), (b"%x;a=b", b"0")]
            )
            body = sizes[0] % len(body) + b"\r\n" + body + b"\r\n" + sizes[1]
            fields = _with(fields, b"Transfer-Encoding: chunked")
        case _:
            return bytes_changed(good, dice)
    return b"\r\n".join([first, *fields, b"", body])


def _with(fields: list[bytes], length: bytes) -> list[bytes]:
    return [*(field for field in fields if not field.startswith(b"Content-Length")), length]


def bytes_changed(data: bytes, dice: random.Random) -> bytes:
    out = bytearray(data)
    match dice.randrange(3):
        case 0:
            del out[dice.randrange(len(out)) :]
        case 1:
            at = dice.randrange(len(out))
            out[at:at] = dice.randbytes(dice.randint(1, 8))
        case _:
            for _ in range(dice.randint(1, 4)):
                out[dice.randrange(len(out))] = dice.choice((0, 1, 10, 13, 32, 0x7F, 0x80, 0xFF, dice.randrange(256)))
    return bytes(out)


def mutated_requests(server: ServerProcess, scale: float, seed: int = 1) -> Answers:
    """Each over a connection of its own, in some pieces."""
    dice, good, out = random.Random(seed), good_requests(), Counter[str]()

    async def one(i: int) -> None:
        sent = mutated(good[i % len(good)], dice)
        cut = dice.randrange(len(sent) + 1) if dice.random() < 0.2 else len(sent)
        out[await answered(server, sent[:cut], sent[cut:])] += 1

    async def all_of_them() -> None:
        for each in good:
            status = await answered(server, each, patience_s=ANSWER_S)
            if status not in ("200", "204", "304", "401", "409", "422"):  # as nobody's token, and an old snapshot, are
                raise Assaulted(f"{status} to what is right: {each!r}")
        await several(max(2_000, int(100_000 * scale)), one)
        out[await serves(server)] += 1

    asyncio.run(all_of_them())
    return out


# -- bodies that lie, bombs -----------------------------------------------------------------------------


def lying_bodies(server: ServerProcess, scale: float) -> Answers:
    """Lengths that are not those of the body, chunks that are none, and little that stands for a lot."""
    bomb = gzip.compress(bytes(200 << 20), 9)
    bomb_of_bombs = gzip.compress(gzip.compress(bytes(64 << 20), 9), 9)
    head = b"POST /v1/tables/web/append HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    zipped = b"Content-Encoding: gzip"
    cases: dict[str, tuple[bytes, ...]] = {
        "more than it brings": (head + b"Content-Length: 1000\r\n\r\n[]",),
        "less than it brings": (head + b"Content-Length: 1\r\n\r\n[]GET /x HTTP/1.1\r\n\r\n",),
        "far too much": (head + b"Content-Length: 1000000000000\r\n\r\n", b"[" * 1_000_000),
        "two lengths": (head + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n[]]",),
        "a length and chunks": (head + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",),
        "a chunk without end": (head + b"Transfer-Encoding: chunked\r\n\r\nfffffff\r\n", b"[" * 100_000),
        "chunks of a byte": (head + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n[\r\n" * 20_000, b"0\r\n\r\n"),
        "a bomb": (a_post(b"/v1/tables/web/append", bomb, zipped),),
        "a bomb of spans": (a_post(b"/v1/traces", bomb, zipped, media=b"application/x-protobuf"),),
        "a bomb in a bomb": (a_post(b"/v1/tables/web/append", bomb_of_bombs, zipped),),
        "deep": (a_post(b"/v1/tables/web/append", b"[" * 1_000_000),),
        "wide": (a_post(b"/v1/transactions", b'{"operations": [' + b"{}," * 300_000 + b"{}]}"),),
        "many headers": (a_get(b"/v1/stats", *(b"X-%d: y" % i for i in range(5_000))),),
    }
    names, out = list(cases), Counter[str]()

    async def one(i: int) -> None:
        name = names[i % len(names)]
        status = await answered(server, *cases[name])
        if status == "200":
            raise Assaulted(f"{name} is taken for right")
        out[f"{name} {status}"] += 1

    async def all_of_them() -> None:
        await several(len(cases) * (1 + int(10 * scale)), one, at_once=4)
        out[await serves(server)] += 1

    asyncio.run(all_of_them())
    return out


# -- slow -----------------------------------------------------------------------------------------------


def idle_http(server: ServerProcess, scale: float) -> Answers:
    """Connections that say nothing, a part of a request, or nothing after their first answer."""
    sent = (
        b"",
        b"GET /v1/sta",
        a_get(b"/healthz").replace(b"Connection: close\r\n", b""),
        b"POST / HTTP/1.1\r\nX: " + b"y" * 9_000,
    )
    return asyncio.run(
        _held(server, int(10_000 * scale), lambda i: sent[i % len(sent)], 10 * min(1.0, 10 * scale), reads=True)
    )


def slow_readers(server: ServerProcess, scale: float) -> Answers:
    """They ask for megabytes, and take none."""
    asked = a_get(b"/v1/tables/web/rows?format=arrow&limit=%d" % ROWS)
    return asyncio.run(_held(server, int(1_000 * scale) + 4, lambda i: asked, 10 * min(1.0, 10 * scale), reads=False))


def slow_writers(server: ServerProcess, scale: float) -> Answers:
    """They promise megabytes, send one of them, and then a byte now and then."""
    body = b"POST /v1/tables/web/append HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    asked = body + b"Content-Length: 4000000\r\n\r\n[" + b" " * (1 << 20)
    count = int(1_000 * scale) + 4
    return asyncio.run(_held(server, count, lambda i: asked, 10 * min(1.0, 10 * scale), reads=True, trickles=True))


async def _held(
    server: ServerProcess,
    count: int,
    sent: Callable[[int], bytes],
    seconds: float,
    *,
    reads: bool,
    trickles: bool = False,
) -> Answers:
    """Connections that are held open for so long; an honest client comes in the middle of it. What each was told."""
    may_open(count)
    out: Answers = Counter()
    connections: list[Connection] = []

    async def one(i: int) -> None:
        connection = await Connection.to(server)
        connections.append(connection)
        if not reads:
            connection.stop_reading()
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await connection.send(sent(i))

    try:
        await several(count, one)
        until = time.monotonic() + seconds
        out[await serves(server)] += 1
        while time.monotonic() < until:
            await asyncio.sleep(0.5)
            for connection in connections if trickles else ():
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await connection.send(b" ")
        if reads:
            for connection in connections:
                said, ended = await connection.all_of(0.001)
                out["open" if not said and not ended else named(said, b"")] += 1
        else:
            out["connected"] += len(connections)
        out[await serves(server)] += 1
    finally:
        for connection in connections:
            connection.close()
    return out


ASSAULTS: Final[dict[str, Callable[[ServerProcess, float], Answers]]] = {
    "mutated requests": mutated_requests,
    "lying bodies": lying_bodies,
    "idle HTTP": idle_http,
    "slow readers": slow_readers,
    "slow writers": slow_writers,
}
"""Each takes the server and a scale: 1 is the long form."""


# -- beside neighbours ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Noticed:
    """Of one assault. Each neighbour's 99th percentile: during it, when all was quiet, and what the machine let its
    process wait meanwhile, in milliseconds."""

    name: str
    answers: Answers
    took_s: float
    grown_mb: float
    p99_ms: dict[str, tuple[float, float, float]]

    def times(self, over: str) -> float:
        """How many times its quiet one it is, or what the machine itself makes a process wait."""
        slow_ms, quiet_ms, late_ms = self.p99_ms[over]
        return slow_ms / max(quiet_ms, late_ms)

    def __str__(self) -> str:
        told = ", ".join(
            f"{over} {slow:.1f} ms ({quiet:.1f} quiet, {late:.1f} the machine's)"
            for over, (slow, quiet, late) in self.p99_ms.items()
        )
        lines = [f"{self.name}: {self.took_s:.0f} s; {self.grown_mb:+.0f} MB; p99 of {told}"]
        return "\n".join(lines + [f"    {count:>7} {answer}" for answer, count in self.answers.most_common()])


def beside_neighbours(server: ServerProcess, scales: Mapping[str, float]) -> Iterator[Noticed]:
    """The assaults that ``scales`` names, one after the other, beside a client of gRPC and one of HTTP, whose answers
    are all right in the end."""
    from tests.proof import hostile

    with server.connect(timeout=60) as db:
        hostile.make_tables(db)
    neighbours = {"gRPC": hostile.Bystander(server.endpoint), "HTTP": hostile.Bystander(server.http)}
    try:
        quiet_ms = {over: each.quiet_ms() for over, each in neighbours.items()}
        for name, scale in scales.items():
            since = {over: len(each.latencies_ms) for over, each in neighbours.items()}
            before, began = hostile.resident_mb(server.pid), time.monotonic()
            answers = ASSAULTS[name](server, scale)
            took, grown = time.monotonic() - began, hostile.resident_mb(server.pid) - before
            p99_ms = {}
            for over, each in neighbours.items():
                slow, late = (hostile.p99(found[since[over] :]) for found in (each.latencies_ms, each.late_ms))
                p99_ms[over] = slow, quiet_ms[over], late
            yield Noticed(name, answers, took, grown, p99_ms)
    finally:
        codes = [each.stop() for each in neighbours.values()]
    if any(codes):
        raise Assaulted("a neighbour got a wrong answer, or none")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof.requests", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=100_000, help="mutated requests; the rest in proportion")
    parser.add_argument("--only", choices=[*ASSAULTS], action="append", help="some of the assaults")
    options = parser.parse_args(arguments)
    scales = dict.fromkeys(options.only or ASSAULTS, options.count / 100_000)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(ServerProcess(folder / "data", "--http", "localhost:0"))
        for noticed in beside_neighbours(server, scales):
            print(noticed, flush=True)
        return server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
