"""``Appender``: events one at a time, committed together. Shared by the embedded database and the client for threads.

What it gathers is ``client_appender.Columns``; how a batch commits is the database's ``append``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from kivi.arguments import check_batching
from kivi.client_appender import (
    BATCH_BYTES,
    BYTES_BUFFERED_MAX,
    EVENTS_BUFFERED_MAX,
    AppendFuture,
    Columns,
    Pending,
    closed,
)
from kivi.errors import InvalidArgument

if TYPE_CHECKING:
    from kivi.schema import TableSchema

__all__ = ["Appender"]


class Appendable(Protocol):
    """What an appender needs of its database."""

    def append(self, table: str, records: Any) -> int: ...

    def _schema(self, table: str) -> TableSchema: ...

    @property
    def _value_bytes_max(self) -> int: ...


class Appender:
    """Events one at a time: whatever has gathered when the previous batch was answered travels together.

    A batch leaves when ``max_events`` or 16 MiB have gathered, or ``linger_ms`` after its first event. Batches of one
    appender commit in order. At most 100,000 events or 64 MiB wait for durability; beyond, ``append`` waits.
    """

    def __init__(self, db: Appendable, table: str, linger_ms: float, max_events: int) -> None:
        check_batching(linger_ms, max_events)
        self._db = db
        self._schema = db._schema(table)
        if self._schema.kind != "event":
            raise InvalidArgument(f"{table!r} is not an event table: write its rows in a transaction")
        self._linger_s = linger_ms / 1000
        self._max_events = max_events
        self._changed = threading.Condition()
        self._value_bytes_max = db._value_bytes_max
        self._columns = Columns(self._schema, self._value_bytes_max)
        self._pending = Pending()
        self._full: deque[tuple[Columns, Pending]] = deque()  # batches of max_events, waiting for the sender
        self._first_at = 0.0
        self._waiting = 0  # events that are not answered yet
        self._waiting_bytes = 0  # of the batches that are full or on their way
        self._closing = False
        self._flushing = False
        self._thread = threading.Thread(target=self._send, name="kivi-appender", daemon=True)
        self._thread.start()

    def append(self, **event: Any) -> AppendFuture:
        """One event. A bad one raises SchemaError, InvalidArgument or ResourceExhausted, and concerns no other."""
        with self._changed:
            while self._is_full() and not self._closing:
                self._changed.wait()
            if self._closing:
                raise closed()
            columns = self._columns
            columns.append(event)
            self._waiting += 1
            future = AppendFuture(self._pending)
            if columns.count >= self._max_events or columns.nbytes >= BATCH_BYTES:
                self._full.append(self._taken())
                self._changed.notify_all()
            elif columns.count == 1:
                self._first_at = time.monotonic()
                self._changed.notify_all()
            return future

    def _is_full(self) -> bool:
        return self._waiting >= EVENTS_BUFFERED_MAX or self._waiting_bytes >= BYTES_BUFFERED_MAX

    def _taken(self) -> tuple[Columns, Pending]:
        """The batch that has gathered; another one begins."""
        taken = self._columns, self._pending
        self._waiting_bytes += self._columns.nbytes
        self._columns, self._pending = Columns(self._schema, self._value_bytes_max), Pending()
        return taken

    def flush(self) -> None:
        """Waits until everything appended so far is answered; raises nothing: the futures tell."""
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            while self._waiting:
                self._changed.wait()
            self._flushing = False

    def close(self) -> None:
        """Flushes and ends."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Appender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self) -> tuple[Columns, Pending] | None:
        with self._changed:
            while True:
                if self._full:
                    return self._full.popleft()
                if self._columns.count:
                    left = self._first_at + self._linger_s - time.monotonic()
                    if left <= 0 or self._closing or self._flushing:
                        break
                    self._changed.wait(left)
                elif self._closing:
                    return None
                else:
                    self._changed.wait()
            return self._taken()

    def _send(self) -> None:
        while (taken := self._take()) is not None:
            columns, pending = taken
            commit_ts, failure = 0, None
            try:
                commit_ts = self._db.append(self._schema.name, columns.batch())
            except BaseException as error:
                failure = error
            with self._changed:
                self._waiting -= columns.count
                self._waiting_bytes -= columns.nbytes
                self._changed.notify_all()
            pending.resolve(commit_ts, failure)
