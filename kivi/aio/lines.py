"""The stream of all subscriptions of a client for asyncio: a task that reads it and one that writes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from kivi.client.calls import FRAME_BYTES
from kivi.client.steps import Closed
from kivi.client.subscriptions import Line
from kivi.errors import KiviError, Unavailable
from kivi.wire.status import from_rpc_error

__all__ = ["Lines", "failure"]


class Lines:
    """The current line; another where that one broke. ``begin`` begins its call, and may raise Closed."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin
        self._line: Line | None = None
        self._task: asyncio.Task[None] | None = None

    def line(self) -> Line:
        """Raises Closed."""
        if self._line is None or self._line.broken is not None:
            call, out = self._begin(), _Out()
            self._line = Line(out.put)
            self._task = asyncio.ensure_future(_serve(call, self._line, out))
        return self._line

    async def close(self) -> None:
        if self._line is not None and self._task is not None:
            self._line.fail(Closed("this client is closed"))
            self._task.cancel()
            await asyncio.wait([self._task])


class _Out:
    """What is queued."""

    def __init__(self) -> None:
        self._parts: deque[bytes] = deque()
        self._wake = asyncio.Event()

    def put(self, part: bytes) -> None:
        self._parts.append(part)
        self._wake.set()

    async def send(self, call: Any) -> None:
        """As few messages."""
        parts = self._parts
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # who reads learns why
            while True:
                await self._wake.wait()
                self._wake.clear()
                while parts:
                    together = [parts.popleft()]
                    size = len(together[0])
                    while parts and size + len(parts[0]) <= FRAME_BYTES:
                        together.append(parts.popleft())
                        size += len(together[-1])
                    await call.write(b"".join(together))


async def _serve(call: Any, line: Line, out: _Out) -> None:
    ended: KiviError = Unavailable("the server ended the subscriptions")
    sending = asyncio.ensure_future(out.send(call))
    try:
        while (data := await call.read()) is not grpc.aio.EOF:
            line.arrived(data)
        if (code := await call.code()) is not grpc.StatusCode.OK:
            ended = await failure(call, code)
    except grpc.RpcError as error:
        ended = from_rpc_error(error)
    except asyncio.CancelledError:
        ended = Unavailable("the stream of subscriptions was cancelled")
        raise
    except Exception as error:
        ended = Unavailable(f"the stream of subscriptions failed: {error!r}")
    finally:
        line.fail(ended)
        call.cancel()
        sending.cancel()
        await asyncio.wait([sending])


async def failure(call: Any, code: grpc.StatusCode) -> KiviError:
    """Why a call failed that was read to its end."""
    details, trailing = await call.details(), await call.trailing_metadata()
    return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details))
