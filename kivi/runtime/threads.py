"""The threads behind a channel, and their end.

gRPC reads and writes a stream with daemon threads of its own, which hold the lock of the stream's state while they
handle an event. The interpreter's end stops a daemon thread where it next asks for the interpreter, with whatever locks
it holds; collecting the stream then waits for its lock for ever: of 660 short processes on a busy machine one never
ended. So a client that closes waits until the threads that served it are gone, and one that nobody closed is closed
before the interpreter ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol

__all__ = ["Threads", "close_at_exit"]

_JOIN_S: Final = 2.0


class Threads:
    """Those that serve one channel: ours, which are started here, and gRPC's, which are met in what they call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._known: set[threading.Thread] = set()
        self._calls = 0  # streams that gRPC has not finished with

    def start(self, name: str, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        thread.start()
        self._add(thread)

    def met(self) -> None:
        """By the thread that calls this."""
        self._add(threading.current_thread())

    def watch(self, call: Any) -> Any:
        """Learns, when the stream ends, which thread handles its events. Returns it."""
        with self._changed:
            self._calls += 1
        call.add_done_callback(self._done)
        return call

    def _done(self, _: Any) -> None:
        self.met()
        with self._changed:
            self._calls -= 1
            self._changed.notify_all()

    def _add(self, thread: threading.Thread) -> None:
        with self._changed:
            self._known = {known for known in self._known if known.is_alive()} | {thread}

    def join(self) -> None:
        """Waits until they are gone, once all calls are cancelled; for two seconds at most."""
        until = time.monotonic() + _JOIN_S
        with self._changed:
            self._changed.wait_for(lambda: not self._calls, _JOIN_S)
            known = self._known - {threading.current_thread()}
        for thread in known:
            thread.join(max(0.0, until - time.monotonic()))


class _Closes(Protocol):
    def close(self) -> None: ...


_open: Final[weakref.WeakKeyDictionary[_Closes, int]] = weakref.WeakKeyDictionary()


def close_at_exit(client: _Closes) -> None:
    """Closes it before the interpreter of this process ends, if it is still there."""
    _open[client] = os.getpid()


@atexit.register
def _close_all() -> None:
    for client, process in list(_open.items()):
        if process == os.getpid():  # a fork has none of the threads
            with contextlib.suppress(Exception):
                client.close()
