"""Subscriptions of the client for threads."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any, Final

import grpc

from kivi import client_methods as methods
from kivi import client_subscriptions as subscriptions
from kivi.arguments import SubscribeArguments
from kivi.client_calls import silent
from kivi.client_core import Core
from kivi.client_errors import from_rpc_error
from kivi.client_steps import Stream
from kivi.client_transport import Transport
from kivi.errors import KiviError, Unavailable
from kivi.retrying import backoff_s
from kivi.schema import TableSchema
from kivi.subscribing import Follower, Subscription
from kivi.subscriptions import Update

__all__ = ["Live"]

_AHEAD: Final = 2
"""Updates that wait for whoever iterates: the server makes the next one when there is room."""


class _Ahead:
    """What was read ahead of whoever iterates: a few updates, and then what ended them."""

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[Update | KiviError | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(_AHEAD)

    def add(self, update: Update) -> None:
        """Once there is room."""
        self._room.acquire()
        self._said.put(update)

    def say(self, said: KiviError | None) -> None:
        self._said.put(said)

    def take(self, timeout_s: float | None) -> Update | KiviError | None:
        """Raises queue.Empty."""
        said = self._said.get(timeout=timeout_s)
        if isinstance(said, Update):
            self._room.release()
        return said

    def let_go(self, _: Any) -> None:
        """The call is over: a reader that waits for room goes on, and finds that."""
        self._room.release()


class Live(Subscription):
    """A stream of updates, and the thread that reads it; another stream where that one breaks."""

    def __init__(self, core: Core, transport: Transport, wanted: SubscribeArguments, schema: TableSchema) -> None:
        self._core = core
        self._transport = transport
        self._wanted = wanted
        self._closed = threading.Event()
        self._call: Any = None
        self._said = _Ahead()
        self._follower = Follower(wanted, schema)
        self._open()

    def _open(self) -> None:
        """From where it is. Waits until the server says that it accepts it."""
        for attempt in (0, 1):
            schema = self._schema()
            message = subscriptions.request(schema, self._wanted, self._follower)
            self._said = _Ahead()
            self._call = self._transport.begin(Stream("Subscribe", message, None, _nothing))
            self._call.add_done_callback(self._said.let_go)
            reader = subscriptions.Reader(schema, self._wanted, self._follower)
            self._transport.threads.start("kivi-subscription", self._read, self._call, reader, self._said)
            try:
                first = self._said.take(self._core.timeout_s)
            except queue.Empty:
                self._call.cancel()
                raise silent(self._core.endpoint, self._core.timeout_s) from None
            if not isinstance(first, KiviError):
                return
            if attempt or not self._core.stale(first, self._wanted.table):
                raise first

    def _schema(self) -> TableSchema:
        return self._core.schemas.get(self._wanted.table) or self._transport.run(self._core.fetch(self._wanted.table))

    def _read(self, call: Any, reader: subscriptions.Reader, said: _Ahead) -> None:
        """None says that it was accepted."""
        ended: KiviError = Unavailable("the server ended the subscription")
        try:
            if methods.ACCEPTED in call.initial_metadata():
                said.say(None)
            for message in call:
                update = reader.read(message)
                if update is not None:
                    said.add(update)
        except grpc.RpcError as error:
            ended = from_rpc_error(error)
        except KiviError as error:  # a value that callers cannot be shown
            ended = error
        said.say(ended)

    def _next(self, timeout_s: float | None) -> Update | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed.is_set():
            if self._call is None and not self._again(deadline):
                return None
            try:
                said = self._said.take(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if isinstance(said, Update):
                return said
            if isinstance(said, KiviError) and subscriptions.may_return(said):
                self._call = None
            elif said is not None and not self._closed.is_set():
                self.close()
                raise said
        return None

    def _again(self, deadline: float | None) -> bool:
        """Takes it up again once the server is there; False at the deadline. Raises after the client's timeout."""
        attempt, until = 0, self._core.deadline()
        while not self._closed.is_set():
            try:
                self._open()
                if self._closed.is_set():  # meanwhile: nobody else cancels this one
                    self._call.cancel()
                return True
            except KiviError as error:
                self._call = None
                if not subscriptions.may_return(error) or time.monotonic() >= until:
                    raise
            attempt += 1
            pause = backoff_s(attempt + 4)
            if deadline is not None and time.monotonic() + pause > deadline:
                break
            self._closed.wait(pause)
        return False

    def _acknowledge(self, ts: int, skip: int) -> None:
        self._transport.run(self._core.acknowledge(self._wanted, ts, skip))

    def close(self) -> None:
        self._closed.set()
        self._follower.ended = True
        if self._call is not None:
            self._call.cancel()
        self._said.say(None)  # for a thread that waits


def _nothing(_: Any) -> None:
    """Messages of a subscription are read as it needs them."""
