"""A WSGI application on a port of its own: the metrics, which need no extra."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from kivi_server.options import host_and_port

from kivi.errors import InvalidArgument

__all__ = ["serving"]

_TIMEOUT_S: Final = 30.0  # for a client that takes no byte
_CONNECTIONS_MAX: Final = 32
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@contextlib.contextmanager
def serving(endpoint: str, flag: str, application: Application) -> Iterator[str]:
    """Serves it on "host:port", as ``flag`` says, and gives the address: port 0 picks a free one."""
    host, port = host_and_port(endpoint, flag)
    try:
        server = make_server(host.strip("[]"), port, application, _Server, _Handler)
    except OSError as error:
        raise InvalidArgument(f"{flag}: cannot serve on {endpoint}: {error}") from None
    thread = threading.Thread(target=server.serve_forever, name=f"kivi{flag.removeprefix('-')}", daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, and at most so many: those beyond are closed, as a server that is down would."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], *arguments: Any) -> None:
        self._room = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        # IPv4 where the host has both, as clients may know no other.
        self.address_family = min(found[0] for found in socket.getaddrinfo(*address, type=socket.SOCK_STREAM))
        super().__init__(address, *arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: calls are counted, and a query may hold what is nobody's business."""
