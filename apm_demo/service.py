"""The web service that is watched: real HTTP servers that do real work, and measure how long it takes.

Two customers run three applications on four servers; each server listens on a port of its own. What an endpoint does
is small but real: it searches text, asks SQLite, derives keys, compresses. The text is Python's own documentation of
its language, which every Python brings along.

    customer   application   server      endpoints
    acme       shop          shop-1      GET /cart      POST /checkout
    acme       shop          shop-2      GET /cart      POST /checkout
    acme       search        search-1    GET /find      GET /suggest
    globex     billing       billing-1   GET /invoice   GET /report

**Response times are measured**: ``Measure`` wraps every handler with ``time.perf_counter_ns``. Nothing here draws a
number. ``/find`` turns slow for a reason: ``DELETE /index`` drops its index, and until ``PUT /index`` builds it again a
search has to read all text. ``/suggest`` fails for the same reason: without the index it cannot rank what it has found,
and answers 503. (``/index`` is the operator's and is not measured.)

Events land as JSON lines in files of about half a second (``apm_demo.landing``). ``ts`` is the moment the call arrived,
``status`` what was answered, ``trace_id`` that of the ``traceparent`` which the caller sent, or else a new one.
With ``--otlp`` the same calls are traced with OpenTelemetry's SDK as well, and sent there (``apm_demo.tracing``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import io
import json
import pydoc_data.topics
import re
import secrets
import signal
import socket
import sqlite3
import statistics
import sys
import time
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apm_demo.children import end_with_parent
from apm_demo.endpoints import ENDPOINTS, PLACES, Endpoint
from apm_demo.landing import land

if TYPE_CHECKING:
    from apm_demo.tracing import Tracing

__all__ = ["main"]

TOPICS: Final[dict[str, str]] = pydoc_data.topics.topics
LAND_EVERY_S: Final = 0.5


class Landing:
    """Gathers events and lands them in files, the oldest first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: list[str] = []
        self._files = 0
        self.events = 0

    def add(self, endpoint: Endpoint, ts_us: int, duration_us: int, status: int, trace_id: str) -> None:
        event = {
            "customer": endpoint.customer,
            "application": endpoint.application,
            "server": endpoint.server,
            "endpoint_id": endpoint.endpoint_id,
            "ts_us": ts_us,
            "duration_us": duration_us,
            "status": status,
            "trace_id": trace_id,
        }
        self._lines.append(json.dumps(event))

    def land(self) -> None:
        if self._lines:
            lines, self._lines = self._lines, []
            land(self._folder, f"invocations-{self._files:05d}.jsonl", lines)
            self._files += 1
            self.events += len(lines)


def trace_id_of(scope: Scope) -> str:
    """Of W3C's ``traceparent`` header, or a new one: 32 hexadecimal digits."""
    sent = dict(scope["headers"]).get(b"traceparent", b"").decode("latin-1")
    found = re.fullmatch(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}", sent)
    return found[1] if found else secrets.token_hex(16)


class Measure:
    """Middleware: the time from the call's arrival to the end of its response, in whole microseconds."""

    def __init__(self, app: ASGIApp, endpoints: dict[tuple[str, str], Endpoint], landing: Landing) -> None:
        self._app = app
        self._endpoints = endpoints
        self._landing = landing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get((scope.get("method", ""), scope.get("path", "")))
        if scope["type"] != "http" or endpoint is None:
            await self._app(scope, receive, send)
            return
        status = 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        ts_us, started = time.time_ns() // 1_000, time.perf_counter_ns()
        try:
            await self._app(scope, receive, watch)
        finally:  # a handler that raises is answered with 500, too
            if status:
                duration_us = (time.perf_counter_ns() - started) // 1_000
                self._landing.add(endpoint, ts_us, duration_us, status, trace_id_of(scope))


# -- the work -----------------------------------------------------------------------------------------
# Handlers compute on the event loop: a call is measured from its own start, so it does not count its wait in the queue.


def asked(request: Request) -> list[str]:
    """The words of the question."""
    return request.query_params.get("q", "python").lower().split()


class Shop:
    """Carts in SQLite, and a checkout that derives a key, as one that seals a payment would."""

    def __init__(self) -> None:
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._db.execute("create table items (topic text, word text, price integer)")
        rows = [(t, w, len(w) * 17) for t, text in TOPICS.items() for w in set(re.findall(r"[a-z]{5,}", text))]
        self._db.executemany("insert into items values (?, ?, ?)", rows)

    async def cart(self, request: Request) -> Response:
        words = asked(request)
        some = ", ".join("?" * len(words))
        query = f"select topic, count(*), sum(price) from items where word in ({some}) group by topic order by 3 desc"
        return JSONResponse({"cart": self._db.execute(query, words).fetchmany(10)})

    async def checkout(self, request: Request) -> Response:
        order = await request.body()
        seal = hashlib.pbkdf2_hmac("sha256", order, b"shop", 6_000).hex()
        return JSONResponse({"order": len(order), "seal": seal})


class Search:
    """Full text search: by an inverted index, or without one by reading everything."""

    def __init__(self) -> None:
        self._index: dict[str, list[str]] = {}
        self._build()
        self._words = sorted(self._index)

    def _build(self) -> None:
        for topic, text in TOPICS.items():
            for word in set(re.findall(r"[a-z]{3,}", text.lower())):
                self._index.setdefault(word, []).append(topic)

    async def find(self, request: Request) -> Response:
        found: Counter[str] = Counter()
        if self._index:
            for word in asked(request):
                found.update(self._index.get(word, ()))
        else:
            wanted = set(asked(request))
            for topic, text in TOPICS.items():
                found[topic] += len(wanted & set(re.findall(r"[a-z]{3,}", text.lower())))
        best = [topic for topic, _ in found.most_common(10)]
        snippets = {topic: TOPICS[topic][:200] for topic in best}
        return JSONResponse({"topics": snippets, "of": len(found)})

    async def suggest(self, request: Request) -> Response:
        found = {}
        for word in asked(request):
            at, end = (bisect_left(self._words, word[:2] + last) for last in ("", "\uffff"))
            found[word] = self._words[at:end], sum(word[:2] in other for other in self._words)
        if not self._index:
            return JSONResponse({"error": "there is no index to rank by"}, status_code=503)
        ranked = {word: sorted(begin, key=lambda w: -len(self._index[w])) for word, (begin, _) in found.items()}
        return JSONResponse({word: (ranked[word][:5], holding) for word, (_, holding) in found.items()})

    async def drop_index(self, request: Request) -> Response:
        self._index.clear()
        return Response(status_code=204)

    async def build_index(self, request: Request) -> Response:
        self._index.clear()
        self._build()
        return Response(status_code=204)


class Billing:
    """An invoice as a compressed document, and a report over the lengths of all lines."""

    async def invoice(self, request: Request) -> Response:
        lines = [line for text in list(TOPICS.values())[:6] for line in text.splitlines()]
        document = "\n".join(f"{n:6d}  {line:<80}" for n, line in enumerate([*asked(request), *lines]))
        return Response(zlib.compress(document.encode(), 6), media_type="application/octet-stream")

    async def report(self, request: Request) -> Response:
        lengths = [len(line) for text in list(TOPICS.values())[:40] for line in text.splitlines()]
        out = io.StringIO()
        for length, count in sorted(Counter(lengths).items()):
            out.write(f"{length};{count}\n")
        return JSONResponse({"lines": len(lengths), "median": statistics.median(lengths), "table": out.getvalue()})


def applications(landing: Landing, tracing: Tracing | None = None) -> dict[str, ASGIApp]:
    """Server name -> its application."""
    search, billing = Search(), Billing()
    handlers: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {
        ("search", "/find"): search.find,
        ("search", "/suggest"): search.suggest,
        ("billing", "/invoice"): billing.invoice,
        ("billing", "/report"): billing.report,
    }
    made: dict[str, ASGIApp] = {}
    for customer, application, server, _ in PLACES:
        if application == "shop":
            shop = Shop()  # one a server
            handlers |= {("shop", "/cart"): shop.cart, ("shop", "/checkout"): shop.checkout}
        mine = [e for e in ENDPOINTS if e.server == server]
        routes = [Route(e.path, handlers[application, e.path], methods=[e.method]) for e in mine]
        if application == "search":
            routes += [Route("/index", search.drop_index, methods=["DELETE"])]
            routes += [Route("/index", search.build_index, methods=["PUT"])]
        measured = {(e.method, e.path): e for e in mine}
        made[server] = Measure(Starlette(routes=routes), measured, landing)
        if tracing is not None:
            from apm_demo.tracing import Traced

            made[server] = Traced(made[server], measured, tracing.tracer(customer, application, server))
    return made


class _Server(uvicorn.Server):
    """Several in one process: signals are the process's, not each server's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(folder: Path, tracing: Tracing | None) -> None:
    landing = Landing(folder)
    servers, sockets = [], []
    for name, app in applications(landing, tracing).items():
        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append((name, listener))
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", http="h11", ws="none")
        servers.append(_Server(config))
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    running = [asyncio.create_task(one.serve(sockets=[at])) for one, (_, at) in zip(servers, sockets, strict=True)]
    while not all(server.started for server in servers):  # noqa: ASYNC110 (uvicorn offers nothing to wait for)
        await asyncio.sleep(0.01)
    ports = {name: listener.getsockname()[1] for name, listener in sockets}
    print(f"ready {json.dumps(ports)}", flush=True)
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LAND_EVERY_S)
        landing.land()
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*running)
    landing.land()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)
    print(f"landed {landing.events}", flush=True)


def _tracing(endpoint: str | None) -> Tracing | None:
    """Of an extra of its own, and loaded only where it is asked for."""
    if endpoint is None:
        return None
    try:
        from apm_demo.tracing import Tracing
    except ImportError as error:
        sys.exit(f"--otlp needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-grpc: {error}")
    return Tracing(endpoint)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--land", type=Path, required=True, metavar="DIR", help="where events land")
    parser.add_argument("--otlp", metavar="URL", help="send traces there too, such as http://localhost:4317")
    args = parser.parse_args()
    end_with_parent()
    asyncio.run(_serve(args.land, _tracing(args.otlp)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
