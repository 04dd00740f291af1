"""An S3 server of this machine, in a process of its own (moto), and a proxy before it that does what networks do."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.ports import Port

__all__ = ["Faulty", "Reply", "faulty", "s3_server"]

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """A port with an empty bucket ``bucket``."""
    held = Port()
    port = held.number
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request("PUT", "/bucket")
                assert connection.getresponse().status == 200
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "moto does not listen"
                time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


@dataclass
class Reply:
    """Of the server. ``body`` is cut off to ``length`` bytes if that is set, and the connection ends there."""

    head: bytes
    body: bytes
    length: int | None = None


Fault = Callable[[str, str, Reply], Reply]
"""What becomes of a reply to (method, path)."""


class Faulty:
    """Forwards requests to ``port``. Set ``fault`` and ``delay_s`` at any time; ``asked`` has (method, path)."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.port = 0
        self.fault: Fault | None = None
        self.delay_s = 0.0
        self.asked: list[tuple[str, str]] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Faulty:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    @property
    def url(self) -> str:
        """Of a cold tier in it. Small objects are one request, as the default of S3's own clients is."""
        return (
            f"s3://bucket/some/prefix?endpoint_override=127.0.0.1:{self.port}&scheme=http&region=us-east-1"
            "&allow_delayed_open=true"
        )

    def unavailable(self, times: int = 1_000_000, method: str = "") -> None:
        """So many requests are answered by 503."""
        left = [times]

        def fault(asked: str, path: str, reply: Reply) -> Reply:
            if asked.startswith(method) and left[0] > 0:
                left[0] -= 1
                body = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>injected</Message></Error>"
                head = f"HTTP/1.1 503 Slow Down\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                return Reply(head.encode(), b"" if asked == "HEAD" else body)
            return reply

        self.fault = fault

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(self._ended())
        self._loop.close()

    async def _ended(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.05)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request of a connection; another one comes over another connection."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = await reader.readuntil(b"\r\n\r\n")
            if b"expect: 100-continue" in head.lower():
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await _body(reader, head)
            method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
            self.asked.append((method, path))
            reply = await self._forwarded(method, head, body)
            await asyncio.sleep(self.delay_s)
            if self.fault is not None:
                reply = self.fault(method, path, reply)
            writer.write(reply.head + reply.body[: reply.length])
            await writer.drain()
        writer.close()

    async def _forwarded(self, method: str, head: bytes, body: bytes) -> Reply:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.target)
        writer.write(_closing(head) + body)
        answered = await reader.readuntil(b"\r\n\r\n")
        read = b"" if method == "HEAD" else await reader.readexactly(_length(answered))
        writer.close()
        # moto gives this element another name than S3 does, and clients look at it
        read = read.replace(b"<CompleteMultipartUploadResponse ", b"<CompleteMultipartUploadResult   ")
        read = read.replace(b"</CompleteMultipartUploadResponse>", b"</CompleteMultipartUploadResult  >")
        return Reply(_closing(answered), read)


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    """As it comes: in chunks, if it does."""
    if b"transfer-encoding: chunked" not in head.lower():
        return await reader.readexactly(_length(head))
    parts = []
    while size := int((line := await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        parts += [line, await reader.readexactly(size + 2)]
    parts.append(line)
    while parts[-1] != b"\r\n":  # trailers, and an empty line
        parts.append(await reader.readuntil(b"\r\n"))
    return b"".join(parts)


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


def _closing(head: bytes) -> bytes:
    """The head of a message after which the connection ends, and without a question whether it may go on."""
    lines = head[:-4].split(b"\r\n")
    kept = [line for line in lines if not line.lower().startswith((b"connection:", b"expect:"))]
    return b"\r\n".join([*kept, b"Connection: close"]) + b"\r\n\r\n"


@contextlib.contextmanager
def faulty() -> Iterator[Faulty]:
    with s3_server() as port, Faulty(port) as proxy:
        yield proxy
