"""Subscriptions, for asyncio: ``async for update in live``. See ``kivi.api.subscription``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Self

from kivi.aio.transport import Transport
from kivi.api.arguments import SubscribeArguments, patience_s
from kivi.api.subscription import Follower, State
from kivi.client import subscriptions
from kivi.client.core import Core
from kivi.errors import InvalidArgument
from kivi.model.subscriptions import Update

__all__ = ["Subscription"]


class Subscription(State):
    """``async with db.subscribe(...) as live: async for update in live``. For one task at a time.

    It begins with the first update that is asked for, or as ``async with`` is entered.
    """

    def __init__(self, core: Core, transport: Transport, wanted: SubscribeArguments) -> None:
        self._core = core
        self._transport = transport
        self._wanted = wanted
        self._live = subscriptions.Live(core, wanted, asyncio.Queue)
        self._loop: asyncio.AbstractEventLoop
        self._beginning: asyncio.Task[bool] | None = None

    async def __aenter__(self) -> Self:
        await self._begun()
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
        patience = patience_s(timeout_s, "timeout_s")
        if (follower := self._live.follower) is not None:
            follower.asks()
            await self._tell(follower.to_tell())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                return await self._news()
        return None

    async def _news(self) -> Update | None:
        """The next that callers are given; None after the last."""
        live = self._live
        while not live.closed:
            if live.place is None:
                await self._begun()
                continue
            if (follower := self._known()).ended:
                return None
            update = live.read(await live.inbox.get())
            if update is None:
                continue
            if (news := follower.hear(update)) is not None:
                return news
            await self._tell(follower.to_tell())
        return None

    async def acknowledge(self) -> None:
        """What was given so far is delivered, durably. Raises InvalidArgument for one without a name."""
        await self._tell(self._known().acknowledged())

    async def _tell(self, position: tuple[int, int] | None) -> None:
        if position is not None:
            await self._transport.run(self._core.acknowledge(self._wanted, *position))
            self._known().tell(position)

    async def _begun(self) -> None:
        """Waits until it has begun. A caller that is cancelled finds it under way the next time."""
        if self._beginning is None:
            self._loop = asyncio.get_running_loop()
            self._beginning = self._loop.create_task(self._transport.run(self._live.begin()))
        beginning = self._beginning
        await asyncio.wait({beginning})
        if self._beginning is beginning:
            self._beginning = None
        if not beginning.cancelled():  # by close
            beginning.result()

    async def close(self) -> None:
        """Ends it. Harmless twice."""
        self._live.close()
        if self._beginning is not None:
            self._beginning.cancel()

    def __del__(self) -> None:
        """Ends it if the caller drops it without closing; a destructor runs in any thread."""
        if self._live.place is not None and not self._live.closed:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._live.place.end)

    def _known(self) -> Follower:
        if self._live.follower is None:
            raise InvalidArgument("the subscription has not begun: enter it with async with, or await next()")
        return self._live.follower
