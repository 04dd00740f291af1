"""Events one at a time, sent together, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from kivi.arguments import check_batching
from kivi.client_appender import BATCH_BYTES, BYTES_BUFFERED_MAX, EVENTS_BUFFERED_MAX, Columns, closed
from kivi.errors import InvalidArgument, ResourceExhausted
from kivi.schema import TableSchema

if TYPE_CHECKING:
    from kivi.aio.database import Database

__all__ = ["Appender"]


class Appender:
    """Whatever has gathered when the previous batch was answered travels together.

    A batch leaves when ``max_events`` or 16 MiB have gathered, or ``linger_ms`` after its first event.
    Batches of one appender commit in order. ``append`` does not wait: beyond 100,000 events or 64 MiB
    that are not durable yet it raises ResourceExhausted, and ``await app.room()`` waits for space.
    """

    def __init__(self, db: Database, table: str, linger_ms: float, max_events: int) -> None:
        check_batching(linger_ms, max_events)
        self._db = db
        self._table = table
        self._linger_s = linger_ms / 1000
        self._max_events = max_events
        self._schema: TableSchema | None = None
        self._columns: Columns | None = None
        self._futures: list[asyncio.Future[int]] = []
        self._full: deque[tuple[Columns, list[asyncio.Future[int]]]] = deque()  # batches of max_events, to be sent
        self._first_at = 0.0
        self._waiting = 0  # events that are not answered yet
        self._waiting_bytes = 0  # of the batches that are full or on their way
        self._closing = False
        self._flushing = False
        self._changed = asyncio.Event()  # there is something for the sending task
        self._answered = asyncio.Event()  # a batch has been answered
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Appender:
        self._schema = await self._db._schema(self._table)
        if self._schema.kind != "event":
            raise InvalidArgument(f"{self._table!r} is not an event table: write its rows in a transaction")
        self._columns = Columns(self._schema, self._db._value_bytes_max)
        self._task = asyncio.create_task(self._send())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def append(self, **event: Any) -> asyncio.Future[int]:
        """One event; awaiting the future gives its commit timestamp once it is durable and visible.

        Raises SchemaError, InvalidArgument or ResourceExhausted for a bad event, which then concerns no other.
        """
        if self._columns is None or self._closing:
            raise closed()
        if self._waiting >= EVENTS_BUFFERED_MAX:
            raise _full("events", "events_buffered_max", EVENTS_BUFFERED_MAX)
        if self._waiting_bytes >= BYTES_BUFFERED_MAX:
            raise _full("bytes", "bytes_buffered_max", BYTES_BUFFERED_MAX)
        self._columns.append(event)
        self._waiting += 1
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        if self._columns.count >= self._max_events or self._columns.nbytes >= BATCH_BYTES:
            self._full.append(self._taken(self._columns))
            self._changed.set()
        elif self._columns.count == 1:
            self._first_at = time.monotonic()
            self._changed.set()
        return future

    def _taken(self, columns: Columns) -> tuple[Columns, list[asyncio.Future[int]]]:
        """The batch that has gathered; another one begins."""
        taken = columns, self._futures
        self._waiting_bytes += columns.nbytes
        self._columns, self._futures = Columns(columns.schema, self._db._value_bytes_max), []
        return taken

    async def room(self) -> None:
        """Waits until ``append`` has space."""
        while self._waiting >= EVENTS_BUFFERED_MAX or self._waiting_bytes >= BYTES_BUFFERED_MAX:
            self._answered.clear()
            await self._answered.wait()

    async def flush(self) -> None:
        """Waits until everything appended so far is answered; raises nothing: the futures tell."""
        self._flushing = True
        self._changed.set()
        while self._waiting:
            self._answered.clear()
            await self._answered.wait()
        self._flushing = False

    async def close(self) -> None:
        """Flushes and ends."""
        self._closing = True
        self._changed.set()
        if self._task is not None:
            await self._task

    async def _wait(self, seconds: float | None) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def _take(self) -> tuple[Columns, list[asyncio.Future[int]]] | None:
        """The next batch, when it is due; None at the end."""
        assert self._columns is not None
        while not self._full:
            if self._columns.count:
                left = self._first_at + self._linger_s - time.monotonic()
                if left <= 0 or self._closing or self._flushing:
                    return self._taken(self._columns)
                await self._wait(left)
            elif self._closing:
                return None
            else:
                await self._wait(None)
        return self._full.popleft()

    async def _send(self) -> None:
        while (taken := await self._take()) is not None:
            columns, futures = taken
            try:
                commit_ts = await self._db.append(columns.schema.name, columns.batch())
            except BaseException as error:
                for future in futures:
                    if not future.done():
                        future.set_exception(error)
                if not isinstance(error, Exception):
                    raise
            else:
                for future in futures:
                    if not future.done():
                        future.set_result(commit_ts)
            self._waiting -= columns.count
            self._waiting_bytes -= columns.nbytes
            self._answered.set()


def _full(what: str, limit: str, maximum: int) -> ResourceExhausted:
    return ResourceExhausted(
        f"{maximum:,} {what} wait for durability: await room() before appending more", limit=limit, maximum=maximum
    )
