"""``Appender``: events one at a time, committed together. Shared by the embedded database and the client for threads.

How a batch commits is the database's ``_append``: as one transaction, or with ``each`` as one for each event. How an
event becomes a row is ``kivi.arrow.packed_events``.

Without a lock
--------------
A lock costs an append 100 to 200 ns, and when many threads append, the one that is stopped while it holds the lock
stops them all (measured with 32 threads: 1.7 us of CPU an event instead of 1.3 us). So an event joins its batch by one
``list.append``, which is atomic, and the lock is taken once in thousands of appends, when the batch's ``limit`` says
that somebody has to look:

1. append: ``batch = current``; ``batch.rows.append(row)``; if ``len(batch.rows) >= batch.limit``: attend.
2. seal, under the lock: ``current`` = a new batch; ``batch.limit = 0``; then ``batch.size = len(batch.rows)``.

The first ``size`` rows are the batch. A row that came later than that was appended after ``limit`` had become 0, so its
thread attends, finds its row beyond ``size``, and puts it into the batch that gathers then, under the lock. A row that
came earlier is in, and its thread may return whether it attends or not. ``limit`` is 1 in a new batch, so that the
first event wakes the sender; then what the batch and the bounds leave room for. An event with much text takes the
lock first, so that the bounds in bytes hold however many threads append.

One batch is in flight at a time: a server runs what it gets together in no promised order. Handing the next batch to
gRPC before the producers of the last one are woken, by a thread of its own for the answers, brought 4 % with 32
producers on 2 cores, which is within the noise.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from kivi.api.arguments import AppenderArguments
from kivi.api.gathering import (
    BATCH_BYTES,
    BYTES_BUFFERED_MAX,
    EVENTS_BUFFERED_MAX,
    AppendFuture,
    Gathered,
    Halves,
    Outcome,
    closed,
)
from kivi.api.tokens import new_token
from kivi.arrow.packed_events import EventRows, Row
from kivi.errors import InvalidArgument
from kivi.runtime.forks import register_fork_handler

if TYPE_CHECKING:
    from kivi.model.schema import TableSchema

__all__ = ["Appender"]


class Appendable(Protocol):
    """What an appender needs of its database."""

    def _append(self, table: str, events: Any, token: str, late: str, *, each: bool) -> int: ...

    def _schema(self, table: str) -> TableSchema: ...

    @property
    def _value_bytes_max(self) -> int: ...


class Appender:
    """Events one at a time: whatever has gathered when the previous batch was answered travels together.

    A batch leaves when ``max_events`` or 16 MiB have gathered, or ``linger_ms`` after its first event. Batches of one
    appender commit in order, and so do the events of one thread. At most 100,000 events or 64 MiB wait for
    durability; the ``append`` that reaches one of these waits until there is room again. (In a table with text or
    bytes an event counts as 256 bytes more than its columns of fixed width, if its text is not longer.)

    ``late``: what becomes of an event below the table's retention floor when its batch commits. With "fail" its future
    raises InvalidArgument, and the others of the batch commit without it: see ``kivi.api.gathering``. With "drop" it is
    left out and counted (``describe``, ``late_dropped``), and its future has the timestamp of the commit that did so.
    """

    def __init__(self, db: Appendable, wanted: AppenderArguments) -> None:
        self._db = db
        self._wanted = wanted
        schema = db._schema(wanted.table)
        if schema.kind != "event":
            raise InvalidArgument(f"{wanted.table!r} is not an event table: write its rows in a transaction")
        self._rows = EventRows(schema, db._value_bytes_max)
        self._changed = threading.Condition()  # its lock guards what follows, and sealing
        self._batch = Gathered()  # the one that gathers
        self._last = self._batch  # the one that was sealed last
        self._full: deque[Gathered] = deque()  # sealed, waiting for the sender
        self._sent: Gathered | None = None  # by the sender, and not answered yet
        self._waiting = 0  # events of sealed batches that are not answered yet
        self._waiting_bytes = 0  # the same in bytes
        self._closing = False
        self._why_closed = "the appender is closed"
        # Compiled for the table: it takes the place of the method below, and is called without a detour.
        self.append = self._rows.compiled(self._put, self._put_large)  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._send, name="kivi-appender", daemon=True)
        self._thread.start()
        register_fork_handler(self)

    def forked(self) -> None:
        """This is a child, where nobody sends, and what has gathered is the parent's to commit."""
        self._closing = True
        self._why_closed = "this appender was made before os.fork(), and is the parent's: make another one here"
        self._changed = threading.Condition()
        self._waiting = self._waiting_bytes = 0
        for batch in (self._sent, *self._full, self._batch):
            if batch is not None:
                batch.forked(closed(self._why_closed))
        self._full.clear()
        self._batch = self._last = Gathered()
        self._batch.limit = self._batch.size = 0  # whatever comes to it is late

    def append(self, /, **event: Any) -> AppendFuture:
        """One event. A bad one raises SchemaError, InvalidArgument or ResourceExhausted, and concerns no other; where
        only an aggregate of the table finds it bad, or it is late, its future does."""
        return self.__dict__["append"](**event)  # type: ignore[no-any-return]

    def _put(self, row: Row) -> AppendFuture:
        batch = self._batch
        rows = batch.rows
        rows.append(row)
        if len(rows) >= batch.limit:
            batch = self._attend(batch, row)
        return AppendFuture(batch, id(row))

    def _put_large(self, row: Row, size: int) -> AppendFuture:
        with self._changed:
            return AppendFuture(self._placed(row, size), id(row))

    # -- under the lock -------------------------------------------------------------------------

    def _attend(self, batch: Gathered, row: Row) -> Gathered:
        """The batch of a row that is in ``batch.rows``, once there is room for more."""
        with self._changed:
            if batch.size is None:
                self._look(batch)
            elif any(late is row for late in batch.rows[batch.size :]):
                return self._placed(row, 0)
            while self._is_full() and not self._closing:
                self._changed.wait()
            return batch

    def _placed(self, row: Row, large_bytes: int) -> Gathered:
        """Puts a row into the batch that gathers, when there is room. Raises Unavailable once closed."""
        while self._is_full() and not self._closing:
            self._changed.wait()
        if self._closing:
            raise closed(self._why_closed)
        batch = self._batch
        batch.rows.append(row)
        batch.large_bytes += large_bytes
        self._look(batch)
        return batch

    def _look(self, batch: Gathered) -> None:
        """The batch has a first row, or as many as it may have, or more may come than it was told."""
        if batch.first_at is None:
            batch.first_at = time.monotonic()
            self._changed.notify_all()
        left = BATCH_BYTES - self._bytes(batch, len(batch.rows))
        stuck = not self._waiting and self._is_full()  # no answer will make room
        if len(batch.rows) >= self._wanted.max_events or left <= 0 or stuck:
            self._seal()
        elif self._waiting_bytes >= BYTES_BUFFERED_MAX:
            batch.limit = 0
        else:
            room = len(batch.rows) + left // self._rows.event_bytes + 1
            batch.limit = int(min(self._wanted.max_events, EVENTS_BUFFERED_MAX - self._waiting, room))

    def _bytes(self, batch: Gathered, count: int) -> int:
        return count * self._rows.event_bytes + batch.large_bytes

    def _is_full(self) -> bool:
        gathering = len(self._batch.rows) if self._batch.size is None else 0
        return self._waiting + gathering >= EVENTS_BUFFERED_MAX or self._waiting_bytes >= BYTES_BUFFERED_MAX

    def _seal(self) -> None:
        """The batch that gathers is to be sent, if it has any rows; another one begins."""
        batch = self._batch
        if self._closing or not batch.rows:  # once closed, what is there was refused
            return
        self._batch = Gathered()
        batch.limit = 0  # before the size: see "Without a lock"
        batch.size = len(batch.rows)
        self._waiting += batch.size
        self._waiting_bytes += self._bytes(batch, batch.size)
        self._full.append(batch)
        self._last = batch
        self._changed.notify_all()

    def flush(self) -> None:
        """Waits until everything appended so far is answered; raises nothing: the futures tell."""
        with self._changed:
            self._seal()
            last = self._last
        if last.size and not last.is_done:
            last.wait()

    def close(self) -> None:
        """Flushes and ends."""
        with self._changed:
            if not self._closing:
                self._seal()
                self._batch.limit = self._batch.size = 0  # whatever comes to it is late
                self._closing = True
                self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Appender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the sender's thread --------------------------------------------------------------------

    def _take(self) -> Gathered | None:
        with self._changed:
            while not self._full:
                if self._closing:
                    return None
                if self._batch.first_at is None:
                    self._changed.wait()
                elif (left := self._batch.first_at + self._wanted.linger_ms / 1000 - time.monotonic()) <= 0:
                    self._seal()
                else:
                    self._changed.wait(left)
            self._sent = self._full[0]
            return self._full.popleft()

    def _send(self) -> None:
        while (batch := self._take()) is not None:
            size, wanted = batch.size or 0, self._wanted
            halves = Halves(size, each=wanted.each)
            while (part := halves.next()) is not None:
                token = new_token()
                try:
                    events = self._rows.batch(batch.rows[slice(*part)])
                    outcome: Outcome = self._db._append(wanted.table, events, token, wanted.late, each=wanted.each)
                except BaseException as error:
                    outcome = error
                halves.settle(token, outcome)
            of_each = wanted.each or len(halves.settled) > 1
            ids = list(map(id, batch.rows[:size])) if of_each else ()
            with self._changed:
                del batch.rows[:size]
                batch.size = 0  # what is there now came too late
                self._waiting -= size
                self._waiting_bytes -= self._bytes(batch, size)
                self._changed.notify_all()
            batch.resolve(halves.settled, ids)
            self._sent = None
