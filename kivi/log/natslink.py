"""A connection to NATS servers, from threads: its event loop is in a thread of its own.

It is to whichever of the servers answers, and moves to another one when that one goes away. Nothing is buffered while
there is no connection: what is sent then fails at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
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
_ENDS: Final = frozenset({"204", "404", "408", "412", "503"})
"""Statuses behind which no more of an answer comes."""


class Link:
    """The connection, for those in the event loop."""

    def __init__(self, servers: Sequence[str], options: dict[str, Any]) -> None:
        self._servers, self._options = list(servers), options
        self._tokens = itertools.count(1)
        self._waiting: dict[str, Callable[[Msg], None]] = {}
        self._inbox = ""
        self.client: Client | None = None
        self.failure: Exception | None = None
        """What went wrong last."""
        self.on_connected: Callable[[], None] = lambda: None

    @property
    def is_refused(self) -> bool:
        """Whether a server has said that it does not know who this is."""
        return "authorization" in str(self.failure).lower()

    @property
    def open(self) -> Client:
        """The client library's connection."""
        if self.client is None:
            raise Unavailable("the connection to NATS is closed")
        return self.client

    async def connect(self) -> None:
        """Raises what the client library raises; goes on for ever while no server answers."""
        from nats.aio.client import Client

        client = Client()

        async def failed(error: Exception) -> None:
            if not self.is_refused:  # who is refused is cut off, too, and may hear of that last
                self.failure = error
            _log.debug("nats %s: %s", self._servers, error)

        async def connected() -> None:
            self.on_connected()

        await client.connect(
            servers=self._servers,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.25,  # type: ignore[arg-type] # seconds, whole or not
            connect_timeout=CONNECT_S,
            ping_interval=PING_S,
            max_outstanding_pings=2,
            pending_size=-1,
            error_cb=failed,
            reconnected_cb=connected,
            **self._options,
        )
        self._inbox = client.new_inbox()
        await client.subscribe(f"{self._inbox}.*", cb=self._answered, pending_msgs_limit=0, pending_bytes_limit=0)
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

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Msg:
        """The one answer. Raises Unavailable if nobody serves the subject."""
        messages = await self.request_many(subject, payload, timeout_s, is_last=lambda message: True)
        return messages[0]

    async def request_many(
        self, subject: str, payload: bytes, timeout_s: float, is_last: Callable[[Msg], bool] | None = None
    ) -> list[Msg]:
        """All answers; the last one has a status, or is the last by ``is_last``.

        What had come by the time-out, if anything has; else raises TimeoutError.
        """
        found: list[Msg] = []
        ended = asyncio.get_running_loop().create_future()

        def answered(message: Msg) -> None:
            found.append(message)
            is_end = (is_last is not None and is_last(message)) or status(message) in _ENDS
            if is_end and not ended.done():
                ended.set_result(None)

        token = await self.send(subject, payload, answered)
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ended, timeout_s)
        finally:
            self.forget(token)
        if not found:
            raise TimeoutError(f"no answer to {subject} within {timeout_s} s")
        if status(found[-1]) == "503":
            raise Unavailable(f"no server serves {subject} now")
        return found

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()
            self.client = None


def status(message: Msg) -> str:
    """The status in the headers of an answer; "" for one that has none."""
    return (message.headers or {}).get("Status", "")


class Nats:
    """``servers``: the URLs (``nats://HOST:PORT``, or ``tls://``) of some of the servers, better of all.

    ``options`` are those of ``nats.connect`` that say who one is: ``user_credentials``, ``user``, ``password``,
    ``token``, ``tls``. Raises Unavailable if no server answers within ``timeout_s``, Unauthenticated if they refuse
    who one is, InvalidArgument if the client library is not installed.
    """

    def __init__(self, servers: Sequence[str], *, timeout_s: float = 10.0, **options: Any) -> None:
        try:
            import nats  # noqa: F401
        except ModuleNotFoundError:
            raise InvalidArgument("a cluster needs the client of NATS: pip install 'kivi[cluster]'") from None
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
            at, why = ", ".join(self.servers), self.link.failure or error.message
            if self.link.is_refused:
                raise Unauthenticated(f"the NATS servers at {at} do not know who this is: {why}") from None
            raise Unavailable(f"no NATS server answers at {at}: {why}") from None

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
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
