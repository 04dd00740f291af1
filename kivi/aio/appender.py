"""Events one at a time, sent together, for asyncio.

Each event has an ``asyncio.Future`` of its own. That is written in C: making, settling and awaiting one takes 350 ns of
CPU, and an awaitable object in Python that looks at its batch's outcome 490 ns. Sending the next batch before the
futures of the last one are settled made no difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections import deque
from typing import Any, Protocol

from kivi.api.arguments import AppenderArguments
from kivi.api.gathering import BATCH_BYTES, BYTES_BUFFERED_MAX, EVENTS_BUFFERED_MAX, Halves, Settled, closed
from kivi.api.tokens import new_token
from kivi.arrow.packed_events import EventRows, Row
from kivi.errors import CommitUnknown, InvalidArgument, ResourceExhausted
from kivi.model.schema import TableSchema

__all__ = ["Appender"]


class Appendable(Protocol):
    """What an appender needs of its database."""

    async def _append(self, table: str, events: Any, token: str, late: str, *, each: bool) -> int: ...

    async def _schema(self, table: str) -> TableSchema: ...

    @property
    def _value_bytes_max(self) -> int: ...


class _Batch:
    """Rows that gather or are on their way, and a future for each."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.futures: list[AppendFuture] = []
        self.large_bytes = 0
        self.first_at = 0.0
        self.is_done = False


class Appender:
    """Whatever has gathered when the previous batch was answered travels together.

    A batch leaves when ``max_events`` or 16 MiB have gathered, or ``linger_ms`` after its first event.
    Batches of one appender commit in order. ``append`` does not wait: beyond 100,000 events or 64 MiB
    that are not durable yet it raises ResourceExhausted, and ``await app.room()`` waits for space. (In a
    table with text or bytes an event counts as 256 bytes more than its columns of fixed width, if its
    text is not longer.) ``late`` as of ``kivi.api.appender.Appender``: with "drop" the future of an event that was
    left out has the timestamp of the commit that counted it.
    """

    def __init__(self, db: Appendable, wanted: AppenderArguments) -> None:
        self._db = db
        self._wanted = wanted
        self._batch = _Batch()  # the one that gathers
        self._last = self._batch  # the one that was sealed last
        self._full: deque[_Batch] = deque()  # sealed, waiting for the sending task
        self._left = 0  # appends until somebody has to look
        self._waiting = 0  # events of sealed batches that are not answered yet
        self._waiting_bytes = 0  # the same in bytes
        self._closing = False
        self._changed = asyncio.Event()  # there is something for the sending task
        self._answered = asyncio.Event()  # a batch has been answered
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Appender:
        schema = await self._db._schema(self._wanted.table)
        if schema.kind != "event":
            raise InvalidArgument(f"{self._wanted.table!r} is not an event table: write its rows in a transaction")
        self._rows = EventRows(schema, self._db._value_bytes_max)
        self._future = functools.partial(AppendFuture, loop=asyncio.get_running_loop())
        # Compiled for the table: it takes the place of the method below, and is called without a detour.
        self.append = self._rows.compiled(self._put, self._put_large)  # type: ignore[method-assign]
        self._task = asyncio.create_task(self._send())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def append(self, /, **event: Any) -> AppendFuture:
        """One event; awaiting the future gives its commit timestamp once it is durable and visible.

        Raises SchemaError, InvalidArgument or ResourceExhausted for a bad event, which then concerns no other; where
        only an aggregate of the table finds it bad, or it is late, the future does.
        """
        compiled: Any = self.__dict__.get("append")
        if compiled is None:
            raise closed()
        return compiled(**event)  # type: ignore[no-any-return]

    def _put(self, row: Row) -> AppendFuture:
        if self._left <= 0:
            self._look()
        batch = self._batch
        batch.rows.append(row)
        future: AppendFuture = self._future()
        batch.futures.append(future)
        self._left -= 1
        if self._left <= 0 and (len(batch.rows) >= self._wanted.max_events or self._bytes(batch) >= BATCH_BYTES):
            self._seal()
        return future

    def _put_large(self, row: Row, size: int) -> AppendFuture:
        self._left = 0
        self._look()
        self._batch.large_bytes += size
        self._left = 1  # it is looked at after this one, too
        return self._put(row)

    def _look(self) -> None:
        """Before an event joins a batch that is new, or that has no room as far as it was told. Raises without."""
        if self._closing:
            raise closed()
        batch = self._batch
        if self._waiting + len(batch.rows) >= EVENTS_BUFFERED_MAX:
            raise _full("events", "events_buffered_max", EVENTS_BUFFERED_MAX)
        if self._waiting_bytes >= BYTES_BUFFERED_MAX:
            raise _full("bytes", "bytes_buffered_max", BYTES_BUFFERED_MAX)
        if not batch.rows:
            batch.first_at = time.monotonic()
            self._changed.set()
        room = (BATCH_BYTES - self._bytes(batch)) // self._rows.event_bytes + 1
        most = min(self._wanted.max_events, EVENTS_BUFFERED_MAX - self._waiting)
        self._left = max(1, min(int(most) - len(batch.rows), room))

    def _bytes(self, batch: _Batch) -> int:
        return len(batch.rows) * self._rows.event_bytes + batch.large_bytes

    def _seal(self) -> None:
        """The batch that gathers is to be sent, if it has any rows; another one begins."""
        batch = self._batch
        if not batch.rows:
            return
        self._waiting += len(batch.rows)
        self._waiting_bytes += self._bytes(batch)
        self._full.append(batch)
        self._last, self._batch, self._left = batch, _Batch(), 0
        self._changed.set()

    async def room(self) -> None:
        """Waits until ``append`` has space."""
        while self._waiting + len(self._batch.rows) >= EVENTS_BUFFERED_MAX or self._waiting_bytes >= BYTES_BUFFERED_MAX:
            self._answered.clear()
            await self._answered.wait()

    async def flush(self) -> None:
        """Waits until everything appended so far is answered; raises nothing: the futures tell."""
        self._seal()
        last = self._last
        while last.futures and not last.is_done:
            self._answered.clear()
            await self._answered.wait()

    async def close(self) -> None:
        """Flushes and ends. Cancelled, it waits no longer, and that is all: what was appended is sent all the same."""
        self._end()
        if self._task is not None:
            await asyncio.shield(self._task)

    def _end(self) -> None:
        self._seal()
        self._closing, self._left = True, 0
        self._changed.set()

    async def _wait(self, seconds: float | None) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def _take(self) -> _Batch | None:
        """The next batch, when it is due; None at the end."""
        while not self._full:
            if self._closing:
                return None
            if not self._batch.rows:
                await self._wait(None)
            elif (left := self._batch.first_at + self._wanted.linger_ms / 1000 - time.monotonic()) <= 0:
                self._seal()
            else:
                await self._wait(left)
        return self._full.popleft()

    async def _send(self) -> None:
        each = self._wanted.each
        try:
            while (batch := await self._take()) is not None:
                halves = Halves(len(batch.rows), each=each)
                try:
                    while (part := halves.next()) is not None:
                        await self._append(batch, part, halves)
                finally:
                    self._answer(batch, halves)
        finally:  # cancelled, as a loop's last tasks are: nobody sends what is left
            self._end()
            for batch in self._full:
                self._answer(batch, Halves(len(batch.rows), each=each))

    async def _append(self, batch: _Batch, part: tuple[int, int], halves: Halves) -> None:
        wanted, token = self._wanted, new_token()
        try:
            rows = batch.rows if part == (0, len(batch.rows)) else batch.rows[slice(*part)]
            first = await self._db._append(wanted.table, self._rows.batch(rows), token, wanted.late, each=wanted.each)
            halves.settle(token, first)
        except Exception as error:
            halves.settle(token, error)
        except BaseException:  # it may have been sent
            halves.settle(token, CommitUnknown(token=token))
            raise

    def _answer(self, batch: _Batch, halves: Halves) -> None:
        while halves.next() is not None:  # a part that was never sent, and never will be
            halves.settle(new_token(), closed())
        for settled in halves.settled:
            _settle(settled, batch.futures)
        batch.is_done = True
        self._waiting -= len(batch.rows)
        self._waiting_bytes -= self._bytes(batch)
        self._answered.set()


class AppendFuture(asyncio.Future[int]):
    """One event's outcome. ``token``: the request token that it was appended under; ``place``: which member of that it
    is, of an appender with ``each``. Both are None until the outcome is known."""

    # A dictionary for each, made when the first of them is set, would cost 100 ns, and to note each one's place 50.
    __slots__ = ("_place", "_settled")

    _settled: Settled
    _place: int
    """Of one that was cancelled or has failed; of another its timestamp tells."""

    @property
    def token(self) -> str | None:
        settled: Settled | None = getattr(self, "_settled", None)
        return settled and settled.token

    @property
    def place(self) -> int | None:
        settled: Any = getattr(self, "_settled", None)
        if settled is None or not settled.each:
            return None
        place: int | None = getattr(self, "_place", None)
        return self.result() - settled.outcome if place is None else place


def _settle(settled: Settled, futures: list[AppendFuture]) -> None:
    first, end, _, outcome, each = settled
    if isinstance(outcome, int):
        stamps = range(outcome, outcome + end - first) if each else itertools.repeat(outcome)
        for future, stamp in zip(futures[first:end], stamps, strict=False):
            future._settled = settled
            try:
                future.set_result(stamp)
            except asyncio.InvalidStateError:  # it was cancelled
                future._place = stamp - outcome
        return
    for place, future in enumerate(futures[first:end]):
        future._settled, future._place = settled, place
        if not future.done():
            error: Any = settled.of(first + place)
            future.set_exception(error)


def _full(what: str, limit: str, maximum: int) -> ResourceExhausted:
    return ResourceExhausted(
        f"{maximum:,} {what} wait for durability: await room() before appending more", limit=limit, maximum=maximum
    )
