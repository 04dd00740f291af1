"""The dashboard's server: reads kivi through ``kivi.aio`` and nothing else, and serves one page with its own files.

``GET /api/live`` is a stream of server-sent events: the state of a view, then how it changes, as the store's commits
come (``apm_demo.pushing``). ``GET /api/view`` is one state as JSON: that of now, or with ``as_of`` of then. Both answer
the same question (``apm_demo.views``):

    range                                  1m, 5m, 1h, 6h or 24h, up to the newest slot
    customer, application, server          how far the drill-down has gone; each needs the one before
    endpoint_id                            the end of the path; needs a server
    as_of                                  a moment, in microseconds since 1970

A state is of **one** snapshot, whose timestamp comes along, so that a total, its parts and the anomalies among them
agree however fast events arrive. (Endpoints are listed by ``endpoints``: what was called and has no row there is in
the totals of its server, and is not among its endpoints.) ``GET /api/status`` counts who looks, and the subscriptions
held for them.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

import kivi
import kivi.aio
from apm_demo.children import end_with_parent
from apm_demo.pushing import Views, said
from apm_demo.tables import PATHS, moment
from apm_demo.views import RANGES, Question, read

__all__ = ["application", "main"]

_STATIC: Final = Path(str(files("apm_demo").joinpath("static")))
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'",  # the page needs nothing from anywhere else
    "X-Content-Type-Options": "nosniff",
}


class _Bad(Exception):
    """The request makes no sense; the text says why."""


def application(endpoint: str) -> Starlette:
    """The dashboard of the kivi server at ``endpoint``. Connects at startup."""

    @asynccontextmanager
    async def connected(app: Starlette) -> AsyncIterator[None]:
        async with await kivi.aio.connect(endpoint, timeout=5) as db:
            app.state.db = db
            app.state.views = Views(db)
            yield

    routes = [
        Route("/", _page),
        Route("/api/live", _live),
        Route("/api/view", _view),
        Route("/api/status", _status),
        Mount("/static", StaticFiles(directory=_STATIC)),
    ]
    app = Starlette(routes=routes, lifespan=connected)
    app.state.ending = asyncio.Event()
    return app


async def _page(request: Request) -> Response:
    return FileResponse(_STATIC / "index.html", headers=_HEADERS)


async def _view(request: Request) -> Response:
    try:
        question, as_of = _question(request), _as_of(request)
        async with request.app.state.db.snapshot(as_of=as_of) as snapshot:
            await _check(snapshot, question)
            body: dict[str, Any] = dict(await read(snapshot, question))
            body["snapshot_ts"] = snapshot.ts
    except _Bad as bad:
        return _refused(400, str(bad))
    except kivi.KiviError as error:
        return _refused(503 if isinstance(error, kivi.errors.Unavailable) else 409, said(error))
    return JSONResponse(body, headers=_HEADERS)


async def _live(request: Request) -> Response:
    try:
        question = _question(request)
        with suppress(kivi.KiviError):  # the stream says what is the matter, and goes on trying
            async with request.app.state.db.snapshot() as snapshot:
                await _check(snapshot, question)
        return _Stream(question)
    except _Bad as bad:
        return _refused(400, str(bad))


async def _status(request: Request) -> Response:
    return JSONResponse(request.app.state.views.counts(), headers=_HEADERS)


def _refused(code: int, text: str) -> Response:
    return JSONResponse({"error": text}, code, headers=_HEADERS)


# -- what is asked --------------------------------------------------------------------------------------


def _question(request: Request) -> Question:
    asked = request.query_params
    given = [asked.get(name) for name in PATHS]
    path = tuple(value for value in given if value is not None)
    if tuple(given[: len(path)]) != path:
        raise _Bad("the path goes from customer to application to server, and leaves none out")
    chosen = asked.get("range", Question().range)
    if chosen not in RANGES:
        raise _Bad(f"a range is one of {', '.join(RANGES)}")
    endpoint = asked.get("endpoint_id")
    if endpoint is None:
        return Question(path, None, chosen)
    if len(path) < len(PATHS) or not (endpoint.isdecimal() and endpoint.isascii()) or int(endpoint) >= 2**63:
        raise _Bad("an endpoint_id is one of the endpoints of the server that the path names")
    return Question(path, int(endpoint), chosen)


async def _check(snapshot: kivi.aio.Snapshot, question: Question) -> None:
    """Raises _Bad for an endpoint that is somewhere else."""
    if question.endpoint_id is not None:
        row = await snapshot.get("endpoints", (question.endpoint_id,))
        if row is None or tuple(row[name] for name in PATHS) != question.path:
            raise _Bad("an endpoint_id is one of the endpoints of the server that the path names")


def _as_of(request: Request) -> Any:
    asked = request.query_params.get("as_of")
    if asked is None:
        return None
    if not (asked.isdecimal() and asked.isascii()):
        raise _Bad("an as_of is a moment, in microseconds since 1970")
    if int(asked) > time.time() * 1_000_000:
        raise _Bad("that moment is yet to come: what will have been by then is not known")
    return moment(int(asked))


# -- a stream ------------------------------------------------------------------------------------------


class _Stream(Response):
    """Server-sent events of a view, until the browser is gone or the server ends.

    ``send`` waits while the browser does not read (64 KiB and the system's buffers), and meanwhile nothing is made
    for it: see ``apm_demo.pushing``.
    """

    def __init__(self, question: Question) -> None:
        super().__init__(headers={**_HEADERS, "X-Accel-Buffering": "no"}, media_type="text/event-stream")
        del self.headers["content-length"]  # of nothing, which is what a Response has so far
        self._question = question

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["app"].state
        sending = asyncio.create_task(self._send(state.views, send))
        others = [asyncio.create_task(_gone(receive)), asyncio.create_task(state.ending.wait())]
        try:
            await asyncio.wait({sending, *others}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, *others):
                task.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sending

    async def _send(self, views: Views, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with views.looking(self._question) as view:
            await send({"type": "http.response.body", "body": b"retry: 700\n\n", "more_body": True})
            async for text in view.messages():
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# -- the process --------------------------------------------------------------------------------------


class _Announced(uvicorn.Server):
    """Says its address once it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            assert sockets
            print(f"ready http://127.0.0.1:{sockets[0].getsockname()[1]}/", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.ending.set()  # type: ignore[union-attr]  # streams would never end by themselves
        await super().shutdown(sockets)


def main() -> int:
    parser = argparse.ArgumentParser(description="The dashboard of a kivi server that the demonstration feeds.")
    parser.add_argument("--endpoint", default="localhost:7420", help="of the kivi server; default %(default)s")
    parser.add_argument("--port", type=int, default=0, help="on loopback; default: any that is free")
    parser.add_argument("--listen", metavar="HOST:PORT", help="instead of --port; it asks nobody who they are")
    args = parser.parse_args()
    end_with_parent()
    host, _, port = (args.listen or f"127.0.0.1:{args.port}").rpartition(":")
    try:
        listener = socket.create_server((host, int(port)))
    except (OSError, ValueError, OverflowError) as error:
        print(f"cannot listen on port {port} of {host}: {error}", file=sys.stderr)
        return 1
    config = uvicorn.Config(
        application(args.endpoint), log_level="warning", access_log=False, http="h11", ws="none", loop="asyncio",
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    _Announced(config).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
