"""Subscriptions of the client for threads."""

from __future__ import annotations

import queue
import threading
import time
from typing import Final

from kivi.api.arguments import SubscribeArguments
from kivi.api.retry import backoff_s
from kivi.api.subscription import Follower, Subscription
from kivi.client import subscriptions
from kivi.client.calls import silent
from kivi.client.core import Core
from kivi.client.transport import Transport
from kivi.errors import KiviError
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Update

__all__ = ["Live"]

_Inbox = queue.SimpleQueue[subscriptions.Said | None]
_CLOSED: Final = None


class Live(Subscription):
    """A place on the client's line; another where that line breaks."""

    def __init__(self, core: Core, transport: Transport, wanted: SubscribeArguments, schema: TableSchema) -> None:
        self._core = core
        self._transport = transport
        self._wanted = wanted
        self._closed = threading.Event()
        self._place: subscriptions.Place | None = None
        self._inbox: _Inbox = queue.SimpleQueue()
        self._reader: subscriptions.Reader
        self._follower = Follower(wanted, schema)
        self._again(None)

    def _open(self) -> None:
        """From where it is. Waits until the server says that it accepts it, or it is closed."""
        for attempt in (0, 1):
            schema = self._schema()
            message = subscriptions.request(schema, self._wanted, self._follower)
            self._reader = subscriptions.Reader(schema, self._wanted, self._follower)
            self._inbox = queue.SimpleQueue()
            place = self._transport.lines.line().begin(message, self._inbox.put)
            try:
                first = self._inbox.get(timeout=self._core.timeout_s)
            except BaseException as problem:
                place.end()
                if isinstance(problem, queue.Empty):
                    raise silent(self._core.endpoint, self._core.timeout_s) from None
                raise
            if first is _CLOSED:
                place.end()
                return
            if not isinstance(first, KiviError):
                self._place = place
                return
            if attempt or not self._core.stale(first, self._wanted.table):
                raise first

    def _schema(self) -> TableSchema:
        return self._core.schemas.get(self._wanted.table) or self._transport.run(self._core.fetch(self._wanted.table))

    def _next(self, timeout_s: float | None) -> Update | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed.is_set():
            if self._place is None and not self._again(deadline):
                return None
            try:
                said = self._inbox.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
                if isinstance(said, KiviError):
                    raise said
                update = None if said is _CLOSED else self._reader.read(said)
            except queue.Empty:
                return None
            except KiviError as error:  # or a value that callers cannot be shown
                if self._closed.is_set():
                    return None
                if not subscriptions.may_return(error):
                    self.close()
                    raise
                self._place = None
                continue
            if update is not None and (place := self._place) is not None:
                place.took(update)
                return update
        return None

    def _again(self, deadline: float | None) -> bool:
        """Takes it up, again once the server is there; False at the deadline. Raises after the client's timeout."""
        attempt, until = 0, self._core.deadline()
        while not self._closed.is_set():
            try:
                self._open()
                if not self._closed.is_set():
                    return True
                self._end()  # meanwhile: nobody else ends this one
                return False
            except KiviError as error:
                if not subscriptions.may_return(error) or time.monotonic() >= until:
                    raise
            attempt += 1
            pause = backoff_s(attempt + 4)
            if deadline is not None and time.monotonic() + pause > deadline:
                break
            self._closed.wait(pause)
        return False

    def _end(self) -> None:
        if self._place is not None:
            self._place.end()

    def _acknowledge(self, ts: int, skip: int) -> None:
        self._transport.run(self._core.acknowledge(self._wanted, ts, skip))

    def __del__(self) -> None:
        """Ends it if the caller drops it without closing."""
        if not self._closed.is_set():
            self._end()

    def close(self) -> None:
        self._closed.set()
        self._follower.ended = True
        self._end()
        self._inbox.put(_CLOSED)  # for a thread that waits
