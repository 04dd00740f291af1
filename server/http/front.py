"""What holds for every request: its id, where it may come from, what becomes of an error, and that it is counted.

A browser sends what any page asks it to, also to localhost. So a request that says it is of another origin is refused
unless the operator has named that one (``--http-origins``), which then may read the answer (CORS). A server on loopback
without tokens answers only to names of this machine: else a page could call itself by a name that resolves to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Final

from kivi_server.http.errors import body_of, retry_after, status_of
from kivi_server.logs import request_id
from kivi_server.sessions import Sessions
from kivi_server.status import told
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kivi.errors import InvalidArgument, KiviError, NotFound, PermissionDenied

__all__ = ["CALL", "ERROR", "Front"]

CALL: Final = "kivi.call"
"""What a route calls itself in a request's scope, for metrics; a name that starts with "live" may last for days."""
ERROR: Final = "kivi.error"
"""Likewise, an error that a route has answered in its own form."""
_ASKS: Final = (
    "Authorization, Content-Type, Content-Encoding, Idempotency-Key, If-None-Match, Last-Event-ID, X-Request-Id"
)
_PREFLIGHT: Final = [
    ("Access-Control-Allow-Methods", "GET, HEAD, POST, OPTIONS"),
    ("Access-Control-Allow-Headers", _ASKS),
    ("Access-Control-Max-Age", "600"),
]
_TELLS: Final = "ETag, X-Kivi-Snapshot, X-Kivi-More, X-Request-Id, Retry-After"
_LOCAL: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Front:
    """ASGI. ``origins``: of pages that may ask, ``*`` for all. ``local_names``: only to names of this machine."""

    def __init__(self, app: ASGIApp, sessions: Sessions, origins: Iterable[str], *, local_names: bool) -> None:
        self._app, self._sessions = app, sessions
        self._origins = frozenset(origins)
        self._hosts = {origin.partition("://")[2].rpartition(":")[0] for origin in self._origins}
        self._local_names = local_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, error, begun = time.monotonic(), None, False
        headers = Headers(scope=scope)
        request = request_id([("x-request-id", headers.get("x-request-id"))])
        origin = headers.get("origin")
        scope["app"] = self  # so that routes raise what they do not know, where it is caught here

        async def reply(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                added = MutableHeaders(scope=message)
                added["X-Request-Id"] = request
                added["X-Content-Type-Options"] = "nosniff"
                if self._origins:
                    added.add_vary_header("Origin")
                if origin is not None and self._knows(origin):
                    added["Access-Control-Allow-Origin"] = origin
                    added["Access-Control-Expose-Headers"] = _TELLS
            await send(message)

        try:
            self._check(headers, origin)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await _send(reply, 204, _PREFLIGHT)
                return
            await self._app(scope, receive, reply)
        except Exception as failure:
            error = told(_as_ours(failure, scope), "a call over HTTP", request)
            if begun:  # the status has left: all that can be said is that the answer is not whole
                raise
            await _send_error(reply, error, failure)
        finally:
            self._count(scope, time.monotonic() - began, error or scope.get(ERROR), request)

    def _knows(self, origin: str) -> bool:
        return "*" in self._origins or origin in self._origins

    def _check(self, headers: Headers, origin: str | None) -> None:
        host = headers.get("host", "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self._local_names and name not in _LOCAL and name not in self._hosts:
            raise PermissionDenied(
                f"this server listens on loopback without tokens, and answers to localhost, not to {name!r}: "
                "start it with --token-file to be called otherwise"
            )
        if origin is not None and not self._knows(origin) and origin.partition("://")[2].lower() != host:
            raise PermissionDenied(
                f"a page of {origin} may not ask this server: name its origin in --http-origins if it should"
            )

    def _count(self, scope: Scope, took: float, error: KiviError | None, request: str) -> None:
        calls, name = self._sessions.calls, scope.get(CALL, "other")
        calls.ended(f"HTTP/{name}", took, error)
        if took > calls.slow_s and not name.startswith("live"):
            client = str((scope.get("client") or ("",))[0])
            calls.slow(f"HTTP/{name}", took, request, client, type(error).__name__ if error is not None else "OK")


def _as_ours(failure: Exception, scope: Scope) -> Exception:
    """What Starlette raises of paths and methods, as an error of ours."""
    if not isinstance(failure, HTTPException):
        return failure
    if failure.status_code == 405:
        return InvalidArgument(f"{scope['path']} takes {(failure.headers or {}).get('Allow', 'other methods')}")
    return NotFound(f"there is nothing at {scope['path']!r}: /openapi.json says what there is")


async def _send_error(send: Send, error: KiviError, failure: Exception) -> None:
    status = failure.status_code if isinstance(failure, HTTPException) else status_of(error)
    headers = [("Content-Type", "application/json; charset=utf-8"), ("Cache-Control", "no-store")]
    if status == 401:
        headers.append(("WWW-Authenticate", "Bearer"))
    headers += retry_after(status, error)
    if isinstance(failure, HTTPException):
        headers += [(name, value) for name, value in (failure.headers or {}).items()]
    await _send(send, int(status), headers, body_of(error))


async def _send(send: Send, status: int, headers: list[tuple[str, str]], body: bytes = b"") -> None:
    headers = [*headers, ("Content-Length", str(len(body)))] if status != 204 else headers
    raw: Any = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
