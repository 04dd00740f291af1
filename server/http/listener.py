"""The listener: uvicorn, on the server's own event loop, and how long a client may take.

==================== ==================================================================
no whole request     ``_HEADERS_S`` after it connected, or after its last answer: 408
rest of a body       read and left out for ``_HEADERS_S`` after the answer that did not wait for it, or until
                     nothing has come for ``_SILENT_S``: closed
takes no byte        ``STALL_S_MAX``, as over gRPC: the connection is dropped
connections          as many as the process may have files, less what the store needs
headers              64 KiB, ``_HEADERS_MAX`` of them: else 400, before they are looked at
chunks of a body     64 bytes each on the average, if there are thousands: else 400
held by connections  ``held.HELD_BYTES_MAX``, of all together
a round of the loop  ``_TURN_S`` of what has come, and of pieces of large answers, in turn;
                     of one connection ``_EVENTS`` chunks
==================== ==================================================================

**Invariant.** At every moment a connection is being answered, or a clock of it runs: ``_look`` sees to that after
whatever has happened, and of bodies that somebody waits for ``bodies`` does. However many connections bring something
at once or are about to take an answer of megabytes, the event loop, which gRPC has too, reads and writes that for
``_TURN_S`` in each of its rounds: nothing but ``_Turns`` calls ``take_turn``, unless the connection is about to end.

A graceful stop closes what is idle, lets what is being answered end, for some seconds, and then cancels it. It waits
for no rest of a body: what is answered is over, even if the client goes on sending.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import h11
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from kivi_server import limits
from kivi_server.http.held import Held
from kivi_server.options import host_and_port
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from kivi.errors import InvalidArgument

__all__ = ["HttpListener"]

_HEADERS_S: Final = 30.0
_SILENT_S: Final = 2.0
_HEADER_BYTES_MAX: Final = 64 << 10
_HEADERS_MAX: Final = 100
"""Each takes the event loop some microseconds, and some hundred bytes for as long as a stream goes on."""
_STOP_S: Final = 5
_CHUNKS: Final = 1_000
_CHUNK_BYTES_MIN: Final = 64
"""On the average of so many: each takes the event loop some 20 microseconds, however little is in it."""
_TURN_S: Final = 0.001
"""A commit over gRPC takes some five rounds, each as long as what all others have for it to do."""
_EVENTS: Final = 32
_PIECE: Final = 64 << 10
_PIECE_S: Final = 0.000_2
"""What a turn counts for one, which is written after it."""
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
        self.held = Held()
        turns = _Turns()
        connections: Any = partial(_Connection, self.held, turns)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=connections,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=86_400,  # ``_Connection`` has a clock for it
                timeout_graceful_shutdown=_STOP_S,
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
        bound = socket.create_server((host, port), family=family, backlog=2_048, dualstack_ipv6=both)
    except OSError as error:
        raise InvalidArgument(f"{flag}: cannot serve on {endpoint}: {error}") from None
    # Connections inherit it. asyncio sets it only on sockets that name TCP as their protocol, and what follows a head
    # would wait for the client's delayed acknowledgement, 40 ms.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def _connections_max() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(64, min(files, 1 << 20) - _FILES_OF_OTHERS)


class _Turns:
    """Who has something to be read or written, in the order in which it came; of one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], object], float]] = deque()
        self._is_due = False

    def add(self, takes_turn: Callable[[], object], then_s: float = 0.0) -> None:
        """``then_s``: how long what it begins goes on after it."""
        self._waiting.append((takes_turn, then_s))
        self._become_due()

    async def own(self) -> None:
        """Returns when it has come, for a piece of an answer."""
        come = asyncio.Event()
        self.add(come.set, _PIECE_S)
        await come.wait()

    def _become_due(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        until = time.monotonic() + _TURN_S
        try:
            while self._waiting:
                takes_turn, then_s = self._waiting.popleft()
                takes_turn()
                until -= then_s
                if time.monotonic() >= until:
                    break
        finally:
            self._is_due = False
            self._become_due()


class _Parser(h11.Connection):
    """h11's, and what it lets through: floods of headers, and of chunks that hold nothing."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _HEADER_BYTES_MAX)
        self._receive_buffer = _Incoming()
        self.why = ""
        """What is wrong, of these."""
        self.left = _EVENTS
        """How many events of what has come this turn still gives."""
        self._chunks = self._bytes = 0

    @property
    def nbytes(self) -> int:
        """What has come and was not read; ``trailing_data`` would copy it."""
        return len(self._receive_buffer)

    def next_event(self) -> Any:
        if not self.left:
            return h11.NEED_DATA
        self.left -= 1
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._chunks = self._bytes = 0
            elif isinstance(event, h11.Data):
                self._chunks, self._bytes = self._chunks + event.chunk_start, self._bytes + len(event.data)
                if self._chunks > _CHUNKS and self._bytes < _CHUNK_BYTES_MIN * self._chunks:
                    raise _Flood(f"chunks have at least {_CHUNK_BYTES_MIN} bytes on the average: send fewer of them")
        except _Flood as flood:
            self.why = str(flood)
            raise
        return event


class _Flood(h11.RemoteProtocolError):
    pass


class _Incoming(ReceiveBuffer):
    def maybe_extract_lines(self) -> Any:
        """Of a head, or of what follows the last chunk."""
        before = len(self)
        lines = super().maybe_extract_lines()
        if before - len(self) > _HEADER_BYTES_MAX:  # h11 looks at what is not whole
            raise _Flood(f"the headers of a request have at most {_HEADER_BYTES_MAX:,} bytes")
        if lines is not None and len(lines) > 1 + _HEADERS_MAX:
            raise _Flood(f"a request has at most {_HEADERS_MAX} headers, not {len(lines) - 1:,}")
        return lines


class _Flow(FlowControl):
    """uvicorn's, and nothing is read while enough of what has come waits for its turn, whoever asks for more."""

    is_full = False

    def fill(self) -> None:
        self.is_full = True
        self.pause_reading()

    def resume_reading(self) -> None:
        if not self.is_full:
            super().resume_reading()


class _Connection(H11Protocol):
    """uvicorn's, and what it leaves open: who sends no whole request, who takes nothing, and how many may be there."""

    cycle: Any  # None where there is none
    app: Any
    conn: _Parser
    flow: _Flow
    _waits = False
    """For its turn to read what has come. Hardly more is taken from the system meanwhile."""
    _rest = 0
    """Bytes of an answer that wait until those before them are taken."""
    _has_ended = False
    """The client sends nothing any more."""
    _stops = False
    _rest_by: asyncio.Timeout | None = None
    """While the rest of a body is left out."""
    _whole_by: asyncio.TimerHandle | None = None
    _taken_by: asyncio.TimerHandle | None = None
    _left = 0
    """Bytes that were to be taken when the clock was set. The system takes some hundred KiB on itself, and asks for
    more when a part of them has gone: so that much, in that time, is what counts as taking something."""
    _tls: Any = None
    """asyncio's, of a connection that has it: what it has encrypted waits in a transport of its own below it, which
    nothing public tells of; and when it closes, it gives whoever is still taking an answer 30 s."""

    def __init__(self, held: Held, turns: _Turns, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn = _Parser()
        self._held, self._turns = held, turns
        self._application, self.app = self.app, self._asked

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._tls = getattr(transport, "_ssl_protocol", None)
        self._transports = [transport] if self._tls is None else [transport, self._tls._transport]
        for each in self._transports:
            each.set_write_buffer_limits(1)  # so that an answer waits, and is counted, when anything is not taken
        if len(self.connections) > _connections_max():
            self._refuse(b"503 Service Unavailable", b"too many connections: try again in a moment")
        self._look()

    def data_received(self, data: bytes) -> None:
        if self._waits:
            self.flow.fill()
        super().data_received(data)
        self._held.look(self)

    def handle_events(self) -> None:
        """Of uvicorn: something has come, or the next request has been waiting for the answer of this one."""
        if not self._waits:
            self._waits = True
            self._turns.add(self.take_turn)

    def take_turn(self, events: int = _EVENTS) -> None:
        if self._waits and not self.transport.is_closing():
            self._waits = self.flow.is_full = False
            self.flow.resume_reading()  # uvicorn stops it again where there is enough for now
            self.conn.left = events
            super().handle_events()
            if not self.conn.left:  # there may be more
                self.flow.fill()
                self.handle_events()
            self._look()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's, of which uvicorn returns nothing
        self.take_turn(sys.maxsize)  # what it has sent is answered, as far as that needs nobody else
        super().eof_received()
        self._has_ended = True
        return bool(self._rest) and self._tls is None  # what is made already leaves; asyncio closes TLS regardless

    def shutdown(self) -> None:
        self.take_turn()  # a request that has come is answered
        self._stops = True
        if self._rest_by is not None and not self._rest_by.expired():
            self._rest_by.reschedule(0)
        super().shutdown()

    async def _asked(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, whose answers leave piece by piece, in turn with those of others, however large they are.
        The transport would copy the whole of it, twice, for whoever does not take it.

        Many clients look for an answer only when they have sent all of a body. A connection that is closed before that
        is reset, and the answer lost: so where it ends with this answer, it ends when the rest of the body has come."""
        cycle, is_last = self.cycle, _is_last(scope)
        waits = False

        async def reply(message: Message) -> None:
            body = memoryview(message.get("body", b""))
            for at in range(0, len(body) - _PIECE, _PIECE):
                self._rest = len(body) - at
                await self.flow.drain()  # before its turn: many may become able to take more in the same round
                if cycle.disconnected:
                    break
                await self._turns.own()
                self._rest -= _PIECE
                await send({"type": message["type"], "body": body[at : at + _PIECE], "more_body": True})
                message = {**message, "body": body[at + _PIECE :]}
            self._rest = 0
            if is_last and self.conn.their_state is h11.SEND_BODY and message["type"] == "http.response.body":
                nonlocal waits
                waits = waits or not message.get("more_body", False)
                message = {**message, "more_body": True}
            await send(message)

        await self._application(scope, receive, reply)
        if waits:
            await self._leave_out_rest(receive)
            await send({"type": "http.response.body"})

    async def _leave_out_rest(self, receive: Receive) -> None:
        until = self.loop.time() + _HEADERS_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as clock:
                self._rest_by = clock
                while not (self._stops or clock.expired()):
                    clock.reschedule(min(until, self.loop.time() + _SILENT_S))
                    if not (await receive()).get("more_body"):
                        break
        self._rest_by = None

    def send_400_response(self, msg: str) -> None:
        """Also to what was a request up to a body that is none: then nobody waits for what the application answers."""
        cycle = self.cycle
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else its answer has begun, or is over
            super().send_400_response(self.conn.why or msg)
        self.transport.close()

    def on_response_complete(self) -> None:
        nothing: Any = None
        self.scope = self.headers = self.cycle = nothing  # thousands of headers, while it is idle, would be megabytes
        super().on_response_complete()
        if self._has_ended:
            self.transport.close()
        self._has_taken()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._whole_by)
        _cancel(self._taken_by)
        self._held.forget(self)
        self._unset_keepalive_if_required()  # which uvicorn leaves after a reset, and all of this with it, for a day
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._has_taken()  # up to here; more is there to be taken than when the clock was set

    def resume_writing(self) -> None:
        super().resume_writing()
        self._has_taken()

    def holds(self) -> int:
        of_request = 0 if self.cycle is None else len(self.cycle.body) + self._rest
        return self._untaken() + of_request + self.conn.nbytes

    def give_up(self) -> None:
        if self.cycle is None or not self.cycle.response_started:
            self._refuse(b"503 Service Unavailable", b"others need the memory: send the request again, and whole")
        self.transport.abort()

    def _has_taken(self) -> None:
        """Of an answer that waited to be written: where a client takes nothing, none ends and none goes on."""
        _cancel(self._taken_by)
        self._taken_by = None
        self._look()

    def _look(self) -> None:
        """After whatever has happened: which clocks run, and what is held."""
        self._held.look(self)
        is_closing = self.transport.is_closing()
        if is_closing and self._tls is not None and self._tls._shutdown_timeout_handle is not None:
            self._tls._shutdown_timeout_handle.cancel()  # our clock runs instead
        if self._taken_by is None and (is_closing or self._untaken()):
            self._await_taking()
        if is_closing or not self._owes():
            _cancel(self._whole_by)
            self._whole_by = None
        elif self._whole_by is None:
            self._whole_by = self.loop.call_later(_HEADERS_S, self._is_late)

    def _owes(self) -> bool:
        """Whether it is for the client to go on: with a request, or with a body that nobody waits for any more."""
        return self.conn.their_state is h11.IDLE or (self.cycle is None and self.conn.their_state is h11.SEND_BODY)

    def _is_late(self) -> None:
        self.take_turn(sys.maxsize)
        if not self._owes():
            return
        if self.conn.their_state is h11.IDLE and self.conn.nbytes:  # it has sent a part of one
            self._refuse(b"408 Request Timeout", b"the request did not come whole in time")
        else:
            self.transport.close()
            self._look()

    def _untaken(self) -> int:
        return sum(each.get_write_buffer_size() for each in self._transports)

    def _await_taking(self) -> None:
        self._left = self._untaken()
        self._taken_by = self.loop.call_later(limits.STALL_S_MAX, self._judge_taking)

    def _judge_taking(self) -> None:
        self._taken_by = None
        if self._untaken() >= self._left:
            self.transport.abort()
        elif self._untaken() or self.transport.is_closing():
            self._await_taking()

    def _refuse(self, status: bytes, why: bytes) -> None:
        if not self.transport.is_closing():
            head = b"HTTP/1.1 %b\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
            self.transport.write(head % (status, len(why)) + why)
            self.transport.close()


def _is_last(scope: Scope) -> bool:
    """Whether the connection ends with the answer of this request."""
    closes = any(name == b"connection" and b"close" in value.lower() for name, value in scope["headers"])
    return closes or scope["http_version"] == "1.0"


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
