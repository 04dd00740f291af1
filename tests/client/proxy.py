"""A TCP proxy that can lose what a server says: for tests of what a client does then."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import kivi
from tests.waiting import wait_until


class Proxy:
    """Forwards to ``port``. ``mute``: requests go through, replies do not. ``cut()``: connections end.
    ``far_s``: seconds until a new connection says anything."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.mute = False
        self.refuse = False
        self.far_s = 0.0
        self.replied = 0  # bytes of replies that went through
        self._listener = socket.create_server(("localhost", 0))
        self.endpoint = f"localhost:{self._listener.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, target, *args) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refuse:
                client.close()
                continue
            time.sleep(self.far_s)
            try:
                server = socket.create_connection(("localhost", self.target))
            except OSError:
                client.close()
                continue
            self._pairs.append((client, server))
            self._start(self._pump, client, server, False)
            self._start(self._pump, server, client, True)

    def _pump(self, source: socket.socket, sink: socket.socket, replies: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not (replies and self.mute):
                    self.replied += len(data) if replies else 0
                    sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def cut_noticed_by(self, client: Any) -> None:
        """The same, and the client knows it."""
        session = client._transport._current
        self.cut()
        wait_until(lambda: session.broken is not None)

    def lose(self) -> None:
        """What was said while ``mute`` is lost for good; the next connection is a good one."""
        self.mute = False
        self.cut()

    def lose_the_reply_of_a_commit(self, db: Any) -> None:
        """Of the next one, which ``db`` sees by another way: the connection ends when it is there, and not before."""
        before, self.mute = db.watermark(), True

        def lose() -> None:
            wait_until(lambda: db.watermark() > before)
            self.lose()

        self._start(lose)

    def connect(self, **arguments: Any) -> Any:
        return kivi.connect(self.endpoint, **arguments)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(60)  # no more connections after that, which nobody would close
        self.cut()
        for thread in self._threads:
            thread.join(60)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
