"""The listener: uvicorn, on the server's own event loop, and how long a client may take.

==================== ==================================================================
no whole request     ``_HEADERS_S`` after it connected, or after its last answer: 408
takes no byte        ``STALL_S_MAX``, as over gRPC: the connection is dropped
connections          as many as the process may have files, less what the store needs
headers              64 KiB
==================== ==================================================================

A graceful stop closes what is idle, lets what is being answered end, for some seconds, and then cancels it.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Sequence
from typing import Any, Final

import h11
import uvicorn
from kivi_server import limits
from kivi_server.options import host_and_port
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kivi.errors import InvalidArgument

__all__ = ["HttpListener"]

_HEADERS_S: Final = 30.0
_HEADER_BYTES_MAX: Final = 64 << 10
_STOP_S: Final = 5
_FILES_OF_OTHERS: Final = 1_024
"""What the store, gRPC and processes that answer SQL may have open."""


class HttpListener:
    """Of one application at one endpoint or several; bound when it is made. Raises InvalidArgument for one that cannot
    be."""

    def __init__(self, endpoints: Sequence[str], flag: str, app: ASGIApp, secure: ssl.SSLContext | None) -> None:
        self._sockets: list[socket.socket] = []
        self.addresses: list[str] = []
        scheme = "https" if secure is not None else "http"
        for endpoint in endpoints:
            host, port = host_and_port(endpoint, flag)
            self._sockets.append(_bound(host.strip("[]"), port, endpoint, flag))
            self.addresses.append(f"{scheme}://{host}:{self._sockets[-1].getsockname()[1]}")
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what fails is logged by ``front``
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=int(_HEADERS_S),
                timeout_graceful_shutdown=_STOP_S,
                h11_max_incomplete_event_size=_HEADER_BYTES_MAX,
                ssl_context_factory=None if secure is None else lambda *_: secure,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving = asyncio.create_task(self._server._serve(self._sockets))  # without handlers of signals

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        for bound in self._sockets:
            bound.close()


def _bound(host: str, port: int, endpoint: str, flag: str) -> socket.socket:
    try:
        # IPv4 where the host has both, as clients may know no other.
        family, *_ = min(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=2_048, dualstack_ipv6=both)
    except OSError as error:
        raise InvalidArgument(f"{flag}: cannot serve on {endpoint}: {error}") from None


def _connections_max() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(64, min(files, 1 << 20) - _FILES_OF_OTHERS)


class _Connection(H11Protocol):
    """uvicorn's, and what it leaves open: who sends no whole request, who takes nothing, and how many may be there."""

    _whole_by: asyncio.TimerHandle | None = None
    _taken_by: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > _connections_max():
            self._refuse(b"503 Service Unavailable", b"too many connections: try again in a moment")
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._whole_by)
        _cancel(self._taken_by)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._taken_by = self.loop.call_later(limits.STALL_S_MAX, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._taken_by)

    def _wait(self) -> None:
        """For a whole head of a request, from when the one before was answered. Of bodies ``bodies`` says when."""
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            _cancel(self._whole_by)
            self._whole_by = None
        elif self._whole_by is None:
            self._whole_by = self.loop.call_later(_HEADERS_S, self._is_late)

    def _is_late(self) -> None:
        if self.conn.trailing_data[0]:  # it has sent a part of one
            self._refuse(b"408 Request Timeout", b"the request did not come whole in time")
        else:
            self.transport.close()

    def _refuse(self, status: bytes, why: bytes) -> None:
        if not self.transport.is_closing():
            head = b"HTTP/1.1 %b\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
            self.transport.write(head % (status, len(why)) + why)
            self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
