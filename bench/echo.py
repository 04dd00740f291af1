"""The cheapest call that gRPC can do in Python, as a measure for every small call: a unary echo.

The server (``python -m bench.echo``) is an asyncio server in its own process and returns the 64 bytes it gets, without
any message class. The clients are gRPC's two: threads on one channel, and tasks on one channel.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc

from bench.machine import ROOT
from bench.together import in_tasks, in_threads, run
from bench.writing import at_a_pace

__all__ = ["alone", "paced", "served", "tasks_rate", "threads_rate"]

_METHOD: Final = "/bench.Echo/Echo"
_PAYLOAD: Final = b"x" * 64


class _Handler(grpc.GenericRpcHandler):
    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(_echo) if details.method == _METHOD else None


async def _echo(request: bytes, context: Any) -> bytes:
    return request


async def _serve() -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Handler(),))
    port = server.add_insecure_port("localhost:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


@contextmanager
def served() -> Iterator[str]:
    """An echo server while it lasts; its endpoint."""
    with subprocess.Popen([sys.executable, "-m", "bench.echo"], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield f"localhost:{int(process.stdout.readline())}"
        finally:
            process.kill()


def alone(endpoint: str, seconds: float) -> list[float]:
    """Seconds of each call, one after the other."""
    with grpc.insecure_channel(endpoint) as channel:
        call: Any = channel.unary_unary(_METHOD)
        for _ in range(100):
            call(_PAYLOAD)
        took = []
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            call(_PAYLOAD)
            took.append(time.perf_counter() - began)
    return took


def threads_rate(endpoint: str, threads: int, seconds: float) -> float:
    """Calls a second of so many threads on one channel."""
    with grpc.insecure_channel(endpoint) as channel:
        call: Any = channel.unary_unary(_METHOD)
        call(_PAYLOAD)

        def once() -> None:
            assert call(_PAYLOAD) == _PAYLOAD

        done, took = in_threads([once] * threads, seconds)
        return done / took


def tasks_rate(endpoint: str, tasks: int, seconds: float) -> float:
    """Calls a second of so many tasks on one channel."""

    async def measured() -> float:
        async with grpc.aio.insecure_channel(endpoint) as channel:
            call: Any = channel.unary_unary(_METHOD)
            await call(_PAYLOAD)

            async def once() -> None:
                assert await call(_PAYLOAD) == _PAYLOAD

            done, took = await in_tasks([once] * tasks, seconds)
            return done / took

    return run(measured())


def paced(endpoint: str, rate: float, seconds: float) -> list[float]:
    """Seconds of each call, of so many begun a second, whether those before them are answered or not."""

    async def measured() -> list[float]:
        async with grpc.aio.insecure_channel(endpoint) as channel:
            call: Any = channel.unary_unary(_METHOD)

            async def once(_: int) -> None:
                assert await call(_PAYLOAD) == _PAYLOAD

            await at_a_pace(once, rate, 1.0)
            return (await at_a_pace(once, rate, seconds)).took_s

    return run(measured())


if __name__ == "__main__":
    asyncio.run(_serve())
