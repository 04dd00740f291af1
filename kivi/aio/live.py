"""Subscriptions, for asyncio: ``async for update in live``. See ``kivi.api.subscription``."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, Self

from kivi.aio.transport import Transport
from kivi.api.arguments import SubscribeArguments, patience_s
from kivi.api.retry import backoff_s
from kivi.api.subscription import Follower
from kivi.client import subscriptions
from kivi.client.calls import silent
from kivi.client.core import Core
from kivi.errors import InvalidArgument, KiviError
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Update

__all__ = ["Subscription"]


class Subscription:
    """``async with db.subscribe(...) as live: async for update in live``. For one task at a time.

    It begins with the first update that is asked for, or as ``async with`` is entered.
    """

    def __init__(self, core: Core, transport: Transport, wanted: SubscribeArguments) -> None:
        self._core = core
        self._transport = transport
        self._wanted = wanted
        self._place: subscriptions.Place | None = None
        self._inbox: asyncio.Queue[subscriptions.Said | None] = asyncio.Queue()  # None: it is closed
        self._loop: asyncio.AbstractEventLoop
        self._reader: subscriptions.Reader
        self._closed = False
        self._follower: Follower | None = None
        self._beginning: asyncio.Task[None] | None = None

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
        if self._follower is not None:
            self._follower.asks()
            await self._tell(self._follower.to_tell())
        if patience is None:
            return await self._news()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                return await self._news()
        return None

    async def _news(self) -> Update | None:
        """The next that callers are given; None after the last."""
        while not self._closed:
            if self._place is None:
                await self._begun()
                continue
            if (follower := self._known()).ended:
                return None
            update = self._read(await self._inbox.get())
            if update is None:
                continue
            if (news := follower.hear(update)) is not None:
                return news
            await self._tell(follower.to_tell())
        return None

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

    def _read(self, said: subscriptions.Said | None) -> Update | None:
        """An update; None: it goes on, or the place is lost, or was closed. Raises what ends the subscription."""
        place = self._place
        try:
            if isinstance(said, KiviError):
                raise said
            update = None if said is None else self._reader.read(said)
        except KiviError as error:  # or a value that callers cannot be shown
            self._place = None
            if subscriptions.may_return(error):
                return None
            if place is not None:
                place.end()
            self._end()
            raise
        if update is not None and place is not None:
            place.took(update)
        return update

    async def _begun(self) -> None:
        """Waits until it has begun. A caller that is cancelled finds it under way the next time."""
        if self._beginning is None:
            self._beginning = asyncio.ensure_future(self._again())
        beginning = self._beginning
        await asyncio.wait({beginning})
        if self._beginning is beginning:
            self._beginning = None
        if not beginning.cancelled():  # by close
            beginning.result()

    async def _open(self) -> None:
        """From where it is, once the server has accepted it."""
        for attempt in (0, 1):
            schema = await self._schema()
            if self._follower is None:
                self._follower = Follower(self._wanted, schema)
            message = subscriptions.request(schema, self._wanted, self._follower)
            self._reader = subscriptions.Reader(schema, self._wanted, self._follower)
            self._inbox = asyncio.Queue()
            place = self._transport.lines.line().begin(message, self._inbox.put_nowait)
            try:
                async with asyncio.timeout(self._core.timeout_s):
                    first = await self._inbox.get()
            except BaseException as problem:
                place.end()
                if isinstance(problem, TimeoutError):
                    raise silent(self._core.endpoint, self._core.timeout_s) from None
                raise
            if not isinstance(first, KiviError):
                self._place, self._loop = place, asyncio.get_running_loop()
                return
            if attempt or not self._core.stale(first, self._wanted.table):
                raise first

    async def _again(self) -> None:
        """Done, it is nobody's any more; failed, it is for the next to see who asks."""
        attempt, until = 0, self._core.deadline()
        while True:
            try:
                await self._open()
                self._beginning = None
                return
            except KiviError as error:
                if not subscriptions.may_return(error) or time.monotonic() >= until:
                    raise
            attempt += 1
            await asyncio.sleep(backoff_s(attempt + 4))

    async def _schema(self) -> TableSchema:
        known = self._core.schemas.get(self._wanted.table)
        return known if known is not None else await self._transport.run(self._core.fetch(self._wanted.table))

    async def close(self) -> None:
        """Ends it. Harmless twice."""
        self._end()

    def _end(self) -> None:
        self._closed = True
        if self._follower is not None:
            self._follower.ended = True
        if self._place is not None:
            self._place.end()
        if self._beginning is not None:
            self._beginning.cancel()
        self._inbox.put_nowait(None)  # for a task that waits

    def __del__(self) -> None:
        """Ends it if the caller drops it without closing; a destructor runs in any thread."""
        if self._place is not None and not self._closed:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._place.end)

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
        """For how long nothing was heard. The server says something every ``heartbeat_ms``, or a little later."""
        return time.monotonic() - self._known().heard_at
