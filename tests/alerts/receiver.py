"""A receiver of webhooks on loopback: keeps what it is sent, and answers with success unless it is told otherwise."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

__all__ = ["Received", "Receiver"]


class Received(NamedTuple):
    headers: dict[str, str]
    body: bytes
    status: int

    @property
    def message(self) -> Any:
        return json.loads(self.body)


class Receiver:
    def __init__(self) -> None:
        self.received: list[Received] = []
        self.answers: list[int] = []
        """What it answers, one after the other; 200 after that."""
        self.answers_now = threading.Event()
        """Until it is set, nobody gets an answer."""
        self.answers_now.set()
        self.ends = True
        """Whether what it says behind the headers of an answer comes to an end."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status = receiver.answers.pop(0) if receiver.answers else 200
                receiver.received.append(Received({k.lower(): v for k, v in self.headers.items()}, body, status))
                receiver.answers_now.wait()
                self.send_response(status)
                if receiver.ends:
                    self.send_header("content-length", "0")
                self.end_headers()
                with contextlib.suppress(OSError):  # nobody hears it any more
                    while not receiver.ends:
                        self.wfile.write(b".")
                        time.sleep(0.02)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hooks/T0P-SECRET"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.answers_now.set()
        self.ends = True
        self._server.shutdown()
        self._server.server_close()

    @property
    def taken(self) -> list[Received]:
        return [one for one in self.received if one.status == 200]
