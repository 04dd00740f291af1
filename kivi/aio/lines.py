"""The stream of all subscriptions of a client for asyncio: a task that reads it and one that writes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc

from kivi.client.calls import broken_by, together
from kivi.client.steps import Closed
from kivi.client.subscription_messages import Line
from kivi.errors import KiviError, Unavailable
from kivi.wire.status import from_rpc_error

__all__ = ["Lines", "failure"]


class Lines:
    """The current line; another where that one broke. ``begin`` begins its call, and may raise Closed."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin
        self._line: Line | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        """How many subscriptions it has."""
        return 0 if self._line is None else self._line.load

    def line(self) -> Line:
        """Raises Closed."""
        if self._line is None or self._line.broken is not None:
            call, out = self._begin(), asyncio.Queue[bytes]()
            self._line = Line(out.put_nowait)
            self._task = asyncio.ensure_future(_serve(call, self._line, out))
        return self._line

    async def close(self) -> None:
        if self._line is not None and self._task is not None:
            self._line.fail(Closed("this client is closed"))
            self._task.cancel()
            await asyncio.wait([self._task])


async def _send(call: Any, out: asyncio.Queue[bytes]) -> None:
    """What is queued, as few messages."""
    held: bytes | None = None
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # the reading task learns why
        while True:
            parts, held = together([held or await out.get()], out, bytes)
            await call.write(b"".join(parts))


async def _serve(call: Any, line: Line, out: asyncio.Queue[bytes]) -> None:
    ended: KiviError = Unavailable("the server ended the subscriptions")
    sending = asyncio.ensure_future(_send(call, out))
    try:
        while (data := await call.read()) is not grpc.aio.EOF:
            line.arrived(data)
        if (code := await call.code()) is not grpc.StatusCode.OK:
            ended = await failure(call, code)
    except asyncio.CancelledError:
        ended = Unavailable("the stream of subscriptions was cancelled")
        raise
    except Exception as error:
        ended = broken_by(error, "the stream of subscriptions")
    finally:
        line.fail(ended)
        call.cancel()
        sending.cancel()
        await asyncio.wait([sending])


async def failure(call: Any, code: grpc.StatusCode) -> KiviError:
    """Why a call failed that was read to its end."""
    details, trailing = await call.details(), await call.trailing_metadata()
    return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details))
