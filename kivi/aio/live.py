"""Subscriptions, for asyncio: ``async for update in live``. See ``kivi.subscribing``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc

from kivi import client_methods as methods
from kivi import client_subscriptions as subscriptions
from kivi.aio.transport import Transport
from kivi.arguments import SubscribeArguments
from kivi.client_calls import failed
from kivi.client_core import Core
from kivi.client_errors import from_rpc_error
from kivi.client_steps import Stream
from kivi.errors import InvalidArgument, KiviError, NotFound, Unavailable
from kivi.retrying import backoff_s
from kivi.schema import TableSchema
from kivi.subscribing import Follower
from kivi.subscriptions import Update

__all__ = ["Subscription"]


class Subscription:
    """``async with db.subscribe(...) as live: async for update in live``. For one task at a time.

    It begins with the first update that is asked for, or as ``async with`` is entered.
    """

    def __init__(self, core: Core, transport: Transport, wanted: SubscribeArguments) -> None:
        self._core = core
        self._transport = transport
        self._wanted = wanted
        self._call: Any = None
        self._reader: subscriptions.Reader
        self._closed = False
        self._follower: Follower | None = None
        self._reading: asyncio.Task[Update | None] | None = None

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and self._known().durable:
                await self.acknowledge()
        finally:
            await self.close()

    async def __aiter__(self) -> AsyncIterator[Update]:
        while (update := await self.next()) is not None:
            yield update

    async def next(self, timeout_s: float | None = None) -> Update | None:
        """The next update; None when ``timeout_s`` is over, or after the last. Raises what ended the subscription."""
        if self._follower is not None:
            self._follower.asks()
            await self._tell(self._follower.to_tell())
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._next())
        reading = self._reading
        done, _ = await asyncio.wait({reading}, timeout=timeout_s)
        if not done or reading.cancelled():  # by close
            return None
        self._reading = None
        said = reading.result()
        return None if said is None or self._closed else self._known().hear(said)

    async def acknowledge(self) -> None:
        """What was given so far is delivered, durably. Raises InvalidArgument for one without a name."""
        follower = self._known()
        if not follower.durable:
            raise InvalidArgument("only durable subscriptions, which have a name, remember what was delivered")
        follower.asks()
        await self._tell(follower.to_tell(now=True))

    async def _tell(self, position: tuple[int, int] | None) -> None:
        if position is not None:
            await self._transport.run(self._core.acknowledge(self._wanted, *position))
            self._known().tell(position)

    async def _next(self) -> Update | None:
        """What the caller is given next, who may come for it later: until then nothing of it counts as delivered."""
        while not self._closed:
            if self._call is None:
                await self._again()
            follower = self._known()
            if follower.ended:
                return None
            try:
                message = await self._call.read()
                if message is grpc.aio.EOF:
                    await self._over()
                said = self._reader.read(message)
            except (grpc.RpcError, KiviError) as error:
                problem = from_rpc_error(error) if isinstance(error, grpc.RpcError) else error
                self._call = None
                if not subscriptions.may_return(problem):
                    await self.close()
                    raise problem from None
                continue
            if said is not None:
                if follower.is_news(said):
                    return said
                follower.hear(said)
            await self._tell(follower.to_tell())
        return None

    async def _over(self) -> None:
        """The stream has ended: raises why."""
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            raise Unavailable("the server ended the subscription")
        details, trailing = await self._call.details(), await self._call.trailing_metadata()
        raise from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details))

    async def _open(self) -> None:
        """From where it is, once the server has accepted it."""
        for attempt in (0, 1):
            schema = await self._schema()
            if self._follower is None:
                self._follower = Follower(self._wanted, schema)
            message = subscriptions.request(schema, self._wanted, self._follower)
            self._reader = subscriptions.Reader(schema, self._wanted, self._follower)
            call = self._call = self._transport.begin(Stream("Subscribe", message, None, _nothing))
            try:
                async with asyncio.timeout(self._core.timeout_s):
                    accepted = methods.ACCEPTED in tuple(await call.initial_metadata())
                    if accepted:
                        return
                    await self._over()
            except grpc.RpcError as error:
                raise failed(error, self._core.endpoint, self._core.timeout_s) from None
            except TimeoutError:
                call.cancel()
                raise Unavailable(f"no answer from {self._core.endpoint} within {self._core.timeout_s:g} s") from None
            except NotFound as error:
                if attempt or not self._core.stale(error, self._wanted.table):
                    raise

    async def _again(self) -> None:
        attempt, until = 0, self._core.deadline()
        while True:
            try:
                await self._open()
                return
            except KiviError as error:
                self._call = None
                if not subscriptions.may_return(error) or time.monotonic() >= until:
                    raise
            attempt += 1
            await asyncio.sleep(backoff_s(attempt + 4))

    async def _schema(self) -> TableSchema:
        known = self._core.schemas.get(self._wanted.table)
        return known if known is not None else await self._transport.run(self._core.fetch(self._wanted.table))

    async def close(self) -> None:
        """Ends it. Harmless twice."""
        self._closed = True
        if self._follower is not None:
            self._follower.ended = True
        if self._call is not None:
            self._call.cancel()
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()
            self._reading = None

    def _known(self) -> Follower:
        if self._follower is None:
            raise InvalidArgument("the subscription has not begun: enter it with async with, or await next()")
        return self._follower

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The state at ``ts``, in order. Raises InvalidArgument for a subscription to events."""
        follower = self._known()
        if follower.of_events:
            raise InvalidArgument("a subscription to events keeps none of them: they are in its updates")
        return follower.rows

    @property
    def ts(self) -> int:
        """The snapshot that its state is of; of events, up to which all were delivered."""
        return self._known().ts

    @property
    def skip(self) -> int:
        """How many events after ``ts`` were delivered, too."""
        return self._known().skip

    @property
    def ended(self) -> bool:
        """Whether the last update was delivered."""
        return self._known().ended

    @property
    def silent_s(self) -> float:
        """For how long nothing was heard. The server says something at least every ``heartbeat_ms``."""
        return time.monotonic() - self._known().heard_at


def _nothing(_: Any) -> None:
    """Messages of a subscription are read as it needs them."""
