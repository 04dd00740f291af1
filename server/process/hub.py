"""``kivi serve --hub``: subscriptions in a process of their own, so that those who commit keep their interpreter.

::

    this process                                        the hub
    a copy of base, by hard links  ------------------>  opens it, and follows the log (kivi.store.following)
    "subscriptions are at port p" -> the client ----->  Subscribe: the same service, over its own store
    stdin of the hub, which ends with this process      what it was told, in one line; its end is the hub's

Durable subscriptions stay here: what they remember are rows, and only this process commits. A hub that ends, or was
left behind by the log, is started again with another copy; its clients ask here where it is, and go on from what they
have. Its port answers reads, too, and refuses what commits.

The copy lies in the directory ``hub`` of the store's, and is thrown away with the process. It takes the room of what
has changed since it was made: ``kivi_server.metrics`` has how far the hub is behind.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Final

from kivi_server.options import Options, host_and_port

from kivi.errors import KiviError, Unavailable
from kivi.store.checkpoint import followers_copy
from kivi.store.facade import Store

__all__ = ["SAID", "HubProcess", "forget_copies"]

_log = logging.getLogger("kivi.server")
_PAUSE_S: Final = 0.2
_PAUSE_MAX_S: Final = 10.0
_STEADY_S: Final = 60.0
"""A hub that has run for so long is started again at once."""
_STOP_S: Final = 5.0
_LISTENING: Final = "listening on "
SAID: Final = (
    "subscriptions",
    "subscription_windows",
    "subscription_renewals",
    "subscription_updates",
    "subscription_ticks",
    "subscription_tick_s",
    "subscription_lag",
)
"""What the hub says of itself each second."""


def _directory(data: str) -> str:
    return os.path.join(data, "hub")


def forget_copies(data: str) -> None:
    """Of a hub that was killed with its server: they hold on to files that the store has let go of."""
    shutil.rmtree(_directory(data), ignore_errors=True)


class HubProcess:
    """The process, and the thread that starts it, again where it ends."""

    def __init__(self, store: Store, options: Options, prepare: Callable[[], None]) -> None:
        """``prepare``: commits what the hub is to find in the store, and cannot commit itself."""
        self._store = store
        self._prepare = prepare
        self._options = options
        self._directory = _directory(options.data)
        self._process: subprocess.Popen[str] | None = None
        self._stopping = threading.Event()
        self._port = 0
        self._problem = "it is starting"
        self.starts = 0
        self._said: dict[str, int | float] = {}
        self._thread = threading.Thread(target=self._supervise, name="kivi-hub", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def port(self) -> int:
        """Where it listens. Raises Unavailable as long as it does not."""
        if not self._port:
            raise Unavailable(f"subscriptions have a process of their own here, and {self._problem}: try again")
        return self._port

    def stop(self) -> None:
        self._stopping.set()
        if (process := self._process) is not None:
            process.terminate()
        if self._thread.is_alive():
            self._thread.join()

    def stats(self) -> dict[str, int | float]:
        """Of both processes: figures of subscriptions are the hub's, as it said a moment ago."""
        return {"hub_listens": int(bool(self._port)), "hub_starts": self.starts, **self._said}

    def _supervise(self) -> None:
        pause = _PAUSE_S
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                self._run()
            except KiviError as error:
                self._problem = f"could not be started ({error.message})"
            except OSError as error:
                self._problem = f"could not be started ({error.strerror})"
            self._port = 0
            shutil.rmtree(self._directory, ignore_errors=True)
            if self._stopping.is_set():
                return
            _log.warning("the process of subscriptions has ended: %s; it is started again", self._problem)
            pause = _PAUSE_S if time.monotonic() - began > _STEADY_S else min(2 * pause, _PAUSE_MAX_S)
            self._stopping.wait(pause)

    def _run(self) -> None:
        """One process, from its copy to its end."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._prepare()
        copy = os.path.join(self._directory, "store")
        followers_copy(self._store, copy)
        with subprocess.Popen(
            [sys.executable, "-m", "kivi_server.process.follower"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            self._process = process
            self.starts += 1
            assert process.stdin is not None and process.stdout is not None
            if self._stopping.is_set():  # it was told to before there was a process to tell
                process.terminate()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(_told(self._options, copy) + "\n")
                process.stdin.flush()
            for line in process.stdout:
                if line.startswith(_LISTENING):
                    _, self._port = host_and_port(line.removeprefix(_LISTENING).strip(), "--hub")
                elif line.startswith("{"):
                    self._said = json.loads(line)
            self._said = {}
            try:
                code = process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            self._process = None
        self._problem = f"has ended with {code}"


def _told(options: Options, copy: str) -> str:
    """What the hub serves: the copy, under the same tokens, keys and limits, and none of the other listeners."""
    own = replace(options, data=copy, listen=options.hub or "", hub=None, metrics=None, http=None, otlp=None, source={})
    settings = {**asdict(options.settings)}
    return json.dumps({"log": os.path.join(options.data, "log"), "options": {**asdict(own), "settings": settings}})
