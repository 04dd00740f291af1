"""The stream of all subscriptions of a client for threads: one thread reads it, one of gRPC's writes it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kivi.client.calls import broken_by, together
from kivi.client.subscription_messages import Line
from kivi.errors import KiviError, Unavailable
from kivi.runtime.threads import Threads

__all__ = ["Lines"]

_Out = queue.SimpleQueue[bytes | None]


class Lines:
    """The current line; another where that one broke. ``begin`` begins its call, and may raise Closed."""

    def __init__(self, threads: Threads, begin: Callable[[Iterator[bytes]], Any]) -> None:
        self._threads = threads
        self._begin = begin
        self._lock = threading.Lock()
        self._line: Line | None = None

    @property
    def load(self) -> int:
        """How many subscriptions it has."""
        return 0 if self._line is None else self._line.load

    def line(self) -> Line:
        """Raises Closed."""
        with self._lock:
            if self._line is None or self._line.broken is not None:
                out: _Out = queue.SimpleQueue()
                call = self._begin(self._requests(out))
                line = Line(out.put)
                self._threads.start("kivi-subscriptions", _read, call, line, out)
                self._line = line  # once it is read: an interrupt would leave one that is not
            return self._line

    def _requests(self, out: _Out) -> Iterator[bytes]:
        """What is queued, as few messages."""
        self._threads.met()
        held: bytes | None = None
        while first := held or out.get():
            parts, held = together([first], out, bytes)
            yield b"".join(parts)


def _read(call: Any, line: Line, out: _Out) -> None:
    ended: KiviError = Unavailable("the server ended the subscriptions")
    try:
        for data in call:
            line.arrived(data)
    except Exception as error:
        ended = broken_by(error, "the stream of subscriptions")
    line.fail(ended)
    out.put(None)
    call.cancel()
