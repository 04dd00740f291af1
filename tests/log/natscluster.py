"""Real nats-servers on loopback, for tests: start, kill -9, stop and continue, spoil the files of one."""

from __future__ import annotations

import atexit
import contextlib
import json
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kivi.errors import Unavailable
from kivi.log.jetstream import JetStream
from kivi.log.natslink import Nats
from kivi.log.natsserver import NatsServer, Peers, find_nats_server, free_ports
from kivi.log.stream import Stream
from tests.waiting import wait_until

__all__ = ["NatsCluster", "copies_are_equal", "reserved_ports"]


def reserved_ports(count: int) -> list[int]:
    """Ports of loopback that are given to nobody else until this process ends, though a server that has one may be
    away for long: what is free is so for a moment only, and several processes run tests at once.

    Each is bound here, and not listened at. So `free_ports` of any process leaves it out, and a server takes it all
    the same, as it sets SO_REUSEADDR; elsewhere than on Linux that would not be enough.
    """
    if sys.platform != "linux":
        return free_ports(count)
    found: list[int] = []
    while len(found) < count:
        held = socket.socket()
        with contextlib.suppress(OSError):  # somebody was faster
            held.bind(("127.0.0.1", *free_ports(1)))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of itself it shared with nobody
            found.append(held.getsockname()[1])
        atexit.register(held.close)
    return found


def copies_are_equal(stream: Stream) -> bool:
    """Whether none is away, or behind."""
    with contextlib.suppress(Unavailable):
        stream.check_copies()
        return True
    return False


class AdvertisedServer(NatsServer):
    """Its peers reach it at another address than the one that it listens at, and tell one another of that one alone."""

    advertise: str

    def configuration(self) -> str:
        return (
            super().configuration().replace("cluster {\n", f"cluster {{\n  advertise: {json.dumps(self.advertise)}\n")
        )


class NatsCluster:
    """``size`` servers, which run while this is entered. A server that was killed stays so until ``start``.

    ``through``: gives the address at which the others reach the server ``i``, which listens for them at an address.
    """

    def __init__(
        self,
        path: Path,
        size: int,
        max_bytes: int = 8 << 30,
        secret: str | None = None,
        through: Callable[[int, str], str] = lambda i, address: address,
    ) -> None:
        ports = reserved_ports(2 * size)
        self.login: dict[str, Any] = {} if secret is None else {"user": "kivi", "password": secret}
        listened = [f"127.0.0.1:{port}" for port in ports[size:]]
        routes = [through(i, address) for i, address in enumerate(listened)]
        self.servers = [
            AdvertisedServer(
                path / f"nats-{i}",
                name=f"n{i}",
                listen=f"127.0.0.1:{ports[i]}",
                peers=Peers("kivi", listened[i], routes, secret) if size > 1 else None,
                max_bytes=max_bytes,
                password=secret,
                binary=find_nats_server(),
            )
            for i in range(size)
        ]
        for server, route in zip(self.servers, routes, strict=True):
            server.advertise = route

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def __enter__(self) -> NatsCluster:
        for server in self.servers:
            server.start()
        wait_until(self.is_ready, reason=lambda: [server.said() for server in self.servers])
        return self

    def __exit__(self, *exc: object) -> None:
        for server in self.servers:
            with contextlib.suppress(Exception):
                if server.process is not None:
                    server.process.send_signal(signal.SIGCONT)
            server.kill()

    def is_ready(self) -> bool:
        """JetStream is on everywhere, and has a leader."""
        return all(not server.look() for server in self.servers) and self._answers()

    def _answers(self) -> bool:
        with contextlib.suppress(Exception), contextlib.closing(Nats(self.urls, **self.login)) as nats:
            message = nats.call(nats.link.request("$JS.API.INFO", b"", 2.0), 3.0)
            return "error" not in json.loads(message.data)
        return False

    def leader(self, stream: JetStream) -> int:
        """Which server leads the stream, once one does."""
        leader = wait_until(lambda: stream._ask("STREAM.INFO").get("cluster", {}).get("leader"))
        return int(leader[1:])

    @contextlib.contextmanager
    def stopped(self, at: int) -> Iterator[None]:
        """SIGSTOP, and SIGCONT at the end."""
        process = self.servers[at].process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)
