"""A connection to NATS servers, from threads: its event loop is in a thread of its own.

It is to whichever of the servers answers, and moves to another one when that one goes away, or does nothing of what it
is asked for some seconds: one that is cut off from the others answers its clients' pings, and has no leader of anything
for as long as it stays so. Nothing is buffered while there is no connection: what is sent then fails at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import ssl
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kivi.errors import InvalidArgument, Unauthenticated, Unavailable

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

__all__ = ["Link", "Nats"]

_log = logging.getLogger("kivi.log")
T = TypeVar("T")
CONNECT_S: Final = 2
PING_S: Final = 2
"""A server that stands still is left after two pings without an answer."""
_SILENT_S: Final = 3.0
"""So long a server may do nothing of what it is asked. Three of them elect a leader in four to nine seconds: whoever
moves on as often is by then at one that knows it."""
_REFUSED_S: Final = 5.0
_LOOK_S: Final = 0.1
_END_S: Final = 1.0
_ENDS: Final = frozenset({"204", "404", "408", "412", "503"})
"""Statuses behind which no more of an answer comes."""


def _is_told(record: logging.LogRecord) -> bool:
    """Not what asyncio says of the client library whenever a connection with TLS ends, which is harmless."""
    return "eof_received()" not in record.getMessage()


class Link:
    """The connection, for those in the event loop."""

    def __init__(self, servers: Sequence[str], options: dict[str, Any]) -> None:
        self._servers, self._options = random.sample(servers, len(servers)), options
        self._tokens = itertools.count(1)
        self._waiting: dict[str, Callable[[Msg], None]] = {}
        self._asking: set[asyncio.Future[None]] = set()
        self._undone = dict[str, tuple[float, float]]()
        """Of kinds of work that were asked for in vain: since when, and when last."""
        self._inbox = ""
        self.client: Client | None = None
        self.failure: Exception | None = None
        """What went wrong last."""
        self.on_connected: Callable[[], None] = lambda: None

    @property
    def is_refused(self) -> bool:
        """Whether a server has said that it does not know who this is, or this does not know the server."""
        return isinstance(self.failure, ssl.SSLError) or "authorization" in str(self.failure).lower()

    @property
    def open(self) -> Client:
        """The client library's connection."""
        if self.client is None:
            raise Unavailable("the connection to NATS is closed")
        return self.client

    async def connect(self) -> None:
        """Raises what the client library raises, Unavailable once servers have refused for five seconds; goes on for
        ever while none answers."""
        from nats.aio.client import Client

        client = Client()

        async def failed(error: Exception) -> None:
            if not client.is_connected:
                _let_go(client)
            if not self.is_refused:  # who is refused is cut off, too, and may hear of that last
                self.failure = error
            _log.debug("nats %s: %s", self._servers, error)

        async def connected() -> None:
            for ended in [*self._asking]:  # nobody answers what was asked over the connection that was lost
                if not ended.done():
                    ended.set_exception(Unavailable("the connection to NATS was lost before an answer had come"))
            self.on_connected()

        connecting = asyncio.ensure_future(
            client.connect(
                servers=self._servers,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.25,  # type: ignore[arg-type] # seconds, whole or not
                connect_timeout=CONNECT_S,
                ping_interval=PING_S,
                max_outstanding_pings=2,
                pending_size=-1,
                dont_randomize=True,  # it goes round: the next one is not the one that was left
                error_cb=failed,
                reconnected_cb=connected,
                **self._options,
            )
        )
        patience_s = _REFUSED_S
        try:
            while not (await asyncio.wait([connecting], timeout=_LOOK_S))[0]:
                if self.is_refused and (patience_s := patience_s - _LOOK_S) < 0:
                    raise Unavailable(str(self.failure))
            await connecting
            self._inbox = client.new_inbox()
            await client.subscribe(f"{self._inbox}.*", cb=self._answered, pending_msgs_limit=0, pending_bytes_limit=0)
        except BaseException:
            connecting.cancel()
            try:
                await asyncio.wait([connecting])
            finally:
                _let_go(client)
            raise
        self.client = client

    async def _answered(self, message: Msg) -> None:
        waiting = self._waiting.get(message.subject.rpartition(".")[2])
        if waiting is not None:
            waiting(message)

    async def send(
        self, subject: str, payload: bytes, answered: Callable[[Msg], None], headers: dict[str, str] | None = None
    ) -> str:
        """Sends a request; ``answered`` is called with each answer, until ``forget`` with what this returns."""
        client = self.open
        token = format(next(self._tokens), "x")
        self._waiting[token] = answered
        try:
            await client.publish(subject, payload, f"{self._inbox}.{token}", headers)
        except BaseException:
            self.forget(token)
            raise
        return token

    def forget(self, token: str) -> None:
        self._waiting.pop(token, None)

    def done(self, work: str) -> None:
        """The server has done some of this kind of work."""
        self._undone.pop(work, None)

    async def undone(self, work: str) -> None:
        """The server has not done in time what it was asked; where that was so for ``_SILENT_S``, it is left."""
        now = asyncio.get_running_loop().time()
        since, last = self._undone.get(work, (now, now))
        if now - last > 2 * _SILENT_S:  # that was another time, of which nothing more was asked
            since = now
        self._undone[work] = since, now
        if now - since > _SILENT_S and len(self.open.servers) > 1:
            left = self.open.connected_url
            _log.warning(
                "the NATS server at %s does not do what it is asked: another one is",
                left and left.netloc.rpartition("@")[2],
            )
            self._undone.clear()
            await self.open.force_reconnect()

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Msg:
        """The one answer. Raises Unavailable if nobody serves the subject."""
        messages = await self.request_many(subject, payload, timeout_s, is_last=lambda message: True)
        return messages[0]

    async def request_many(
        self, subject: str, payload: bytes, timeout_s: float, is_last: Callable[[Msg], bool] | None = None
    ) -> list[Msg]:
        """All answers; the last one has a status, or is the last by ``is_last``.

        What had come by the time-out, if anything has; else raises TimeoutError. Raises Unavailable if the connection
        is lost meanwhile.
        """
        found: list[Msg] = []
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def answered(message: Msg) -> None:
            found.append(message)
            is_end = (is_last is not None and is_last(message)) or status(message) in _ENDS
            if is_end and not ended.done():
                ended.set_result(None)

        self._asking.add(ended)
        token = ""
        try:
            token = await self.send(subject, payload, answered)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ended, timeout_s)
        finally:
            self._asking.discard(ended)
            self.forget(token)
        if found and status(found[-1]) != "503":
            self.done(subject)
            return found
        if subject.startswith("$JS."):  # what servers do, and not another node
            await self.undone(subject)
        if not found:
            raise TimeoutError(f"no answer to {subject} within {timeout_s} s")
        raise Unavailable(f"no server serves {subject} now")

    async def close(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            try:
                await client.close()
            finally:
                _let_go(client)


def _let_go(client: Client) -> None:
    """Closes its connection. The library leaves it open to a server that took it and then said nothing, and where it
    is interrupted. Harmless twice."""
    if client._transport is not None:
        client._transport.close()  # type: ignore[no-untyped-call]


async def _end_all() -> None:
    """Cancels what is on its way, and waits until its connections are closed."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_END_S)
    await asyncio.sleep(0)  # a connection ends a step after it was closed


def status(message: Msg) -> str:
    """The status in the headers of an answer; "" for one that has none."""
    return (message.headers or {}).get("Status", "")


class Nats:
    """``servers``: the URLs (``nats://HOST:PORT``, or ``tls://``) of some of the servers, better of all.

    ``options`` are those of ``nats.connect`` that say who one is: ``user_credentials``, ``user``, ``password``,
    ``token``, ``tls``, ``tls_hostname``. Raises Unavailable if no server answers within ``timeout_s``, Unauthenticated
    if they refuse who one is, InvalidArgument if the client library is not installed.
    """

    def __init__(self, servers: Sequence[str], *, timeout_s: float = 10.0, **options: Any) -> None:
        try:
            import nats  # noqa: F401
        except ModuleNotFoundError:
            raise InvalidArgument("a cluster needs the client of NATS: pip install 'kivi[cluster]'") from None
        if "tls" in options:
            logging.getLogger("asyncio").addFilter(_is_told)
        self.servers = list(servers)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kivi-nats", daemon=True)
        self._thread.start()
        self._closed = False
        self.link = Link(self.servers, options)
        try:
            self.call(self.link.connect(), timeout_s)
        except Unavailable as error:
            self.close()
            at = ", ".join(url.rpartition("@")[2].rpartition("/")[2] for url in self.servers)  # and no password
            why = self.link.failure or error.message
            if self.link.is_refused:
                raise Unauthenticated(f"the NATS servers at {at} and this do not know one another: {why}") from None
            raise Unavailable(f"no NATS server answers at {at}: {why}") from None

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(_end_all())
        self.loop.close()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs it in the event loop. Raises Unavailable if the connection was closed."""
        if self._closed:
            work.close()
            raise Unavailable("the connection to NATS is closed")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Runs it in the event loop, and waits. Raises Unavailable if it takes longer or the connection fails."""
        import nats.errors

        future = self.start(work)
        try:
            return future.result(timeout_s)
        except (FutureTimeout, TimeoutError) as error:
            future.cancel()
            raise Unavailable(str(error) or f"no answer within {timeout_s} s") from None
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"NATS: {error or type(error).__name__}") from error

    def soon(self, run: Callable[[], object]) -> None:
        """Runs it in the event loop, and does not wait."""
        self.loop.call_soon_threadsafe(run)

    def close(self) -> None:
        """Ends it. Idempotent."""
        if self._closed:
            return
        with contextlib.suppress(Unavailable):
            self.call(self.link.close(), 5.0)
        self._closed = True
        self.soon(self.loop.stop)
        self._thread.join(5.0)
