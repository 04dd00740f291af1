"""What a node could reach at best: a process that publishes to the log's servers what it is sent, and does no more.

The server (``python -m bench.forwarding URL,URL,URL STREAM``) is an asyncio server of gRPC. It publishes each message
of a stream as it comes, cut to what a message of the log may have, and answers it once all of that is acknowledged. It
judges, applies, stores and reads nothing, and its client has the bytes ready, so what lies between it and bare
publishes is the price of a process between a client and the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import grpc

from bench.machine import ROOT
from kivi.log.jetstream import JetStream
from kivi.log.natslink import Nats

__all__ = ["LOG_BYTES", "MESSAGE", "rate", "served"]

LOG_BYTES: Final = 8 << 30
MESSAGE: Final = (1 << 20) - 4096
"""What is published of more than that is cut to this size."""
_METHOD: Final = "/bench.Forwarding/Forward"
_OPTIONS: Final = [("grpc.max_receive_message_length", 64 << 20)]


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, to: JetStream) -> None:
        self._to, self._published, self._names = to, 0, random.randbytes(6).hex()

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._forward) if details.method == _METHOD else None

    async def _forward(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        loop, answers = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()

        def publish(data: bytes) -> None:
            view = memoryview(data)
            parts = (
                [data] if len(data) <= MESSAGE else [bytes(view[i : i + MESSAGE]) for i in range(0, len(data), MESSAGE)]
            )
            left = len(parts)

            def done(error: BaseException | None) -> None:
                nonlocal left
                left -= 1
                if not left or error is not None:
                    loop.call_soon_threadsafe(answers.put_nowait, b"" if error is None else None)

            for part in parts:
                self._published += 1
                self._to.publish(f"{self._names}-{self._published}", part, done)

        async def read() -> None:
            async for data in requests:
                publish(data)

        reading = asyncio.ensure_future(read())
        while (answer := await answers.get()) is not None:
            yield answer
        reading.cancel()
        raise RuntimeError("a message was not acknowledged")


async def _serve(urls: Sequence[str], name: str) -> None:
    with contextlib.closing(Nats(urls)) as nats, contextlib.closing(JetStream(nats, name, max_bytes=LOG_BYTES)) as to:
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers((_Handler(to),))
        port = server.add_insecure_port("localhost:0")
        await server.start()
        print(port, flush=True)
        await server.wait_for_termination()


@contextmanager
def served(urls: Sequence[str], name: str) -> Iterator[str]:
    """Such a process while it lasts; its endpoint."""
    command = [sys.executable, "-m", "bench.forwarding", ",".join(urls), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield f"localhost:{int(process.stdout.readline())}"
        finally:
            process.kill()


def rate(endpoint: str, size: int, seconds: float, outstanding: int) -> float:
    """Messages of so many bytes a second that were acknowledged, with so many outstanding."""
    data, room = bytes(size), threading.Semaphore(outstanding)
    until = time.perf_counter() + seconds

    def requests() -> Iterator[bytes]:
        while time.perf_counter() < until:
            room.acquire()
            yield data

    began, count = time.perf_counter(), 0
    with grpc.insecure_channel(endpoint, options=_OPTIONS) as channel:
        forward: Any = channel.stream_stream(_METHOD)
        sending = forward(requests())
        try:
            for _ in sending:
                count += 1
                room.release()
                if time.perf_counter() >= until:
                    break
        finally:
            sending.cancel()
    return count / (time.perf_counter() - began)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1].split(","), sys.argv[2]))
