"""The channel and its session stream, for asyncio."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import grpc

from kivi.aio.lines import Lines, failure
from kivi.client.calls import (
    FRAME_BYTES,
    Calls,
    Link,
    Queued,
    Session,
    answer,
    broken_by,
    encoded,
    failed,
    leaving,
    unreachable,
)
from kivi.client.core import Core
from kivi.client.steps import (
    Answer,
    Ask,
    Closed,
    CommitPlain,
    Do,
    Message,
    Receive,
    Sleep,
    Steps,
    Stream,
    Unary,
    Upload,
    Work,
    no_text,
    silent,
)
from kivi.errors import KiviError, Unavailable
from kivi.wire.frames import Packet, joined
from kivi.wire.methods import Tls
from kivi.wire.v1 import session_pb2

__all__ = ["Transport"]

T = TypeVar("T")
_AT_ONCE: Final = 32
"""So many tasks are woken at a time, and what they ask for leaves before the next ones run: with 64 that commit again
and again, the server works while the client does (4.7 times the rate of an echo instead of 3.6, medians of 4 runs)."""
_WATCH_S: Final = 0.05  # how late a timeout may be told
_HELD_S: Final = 0.02
_HELD_BYTES: Final = 16 << 10
"""Commits of events wait for so long at most, and only those that are no larger."""
_APPEND: Final = session_pb2.Operation.KIND_APPEND

_Waiting = tuple[asyncio.Future[Answer], float]
"""A future for the answer, and by when."""


class _Session(Session):
    """One stream and its two tasks. Once broken it stays broken.

    Commits of a few events leave together, since the server derives from those together that come together: while some
    are on their way, those that follow are held, until these are answered or the time is up. So what is held is as much
    as came meanwhile, and a task that commits alone never waits.
    """

    def __init__(self, transport: Transport, epoch: int, wait_for_ready: bool) -> None:
        super().__init__(transport.core, epoch, asyncio.Event())
        self._out: deque[Queued] = deque()
        self._wake = asyncio.Event()
        self._waiting: dict[int, _Waiting] = {}
        self._watched = False
        self._held: dict[int, Packet] = {}
        self._entering: set[int] = set()
        self._release: asyncio.TimerHandle | None = None
        self._call = transport.calls.session(wait_for_ready=wait_for_ready)
        self._loop = asyncio.get_running_loop()
        self._tasks = [self._loop.create_task(self._send()), self._loop.create_task(self._receive())]

    def put(self, request: Message, bodies: Sequence[Any] = ()) -> None:
        self._out.append(request if isinstance(request, list) else encoded(request, bodies))
        self._wake.set()

    def _queue(self, number: int, asked: Ask | CommitPlain) -> None:
        request = asked.request if isinstance(asked, Ask) and asked.request.HasField("commit") else None
        if request is None or not any(operation.kind == _APPEND for operation in request.operations):
            super()._queue(number, asked)
            return
        request.id = number
        packet = encoded(request, asked.bodies)
        if len(packet) > _HELD_BYTES:
            self._out.append(packet)
            self._wake.set()
            return
        self._held[number] = packet
        if not self._entering:
            self._let_go()
        elif self._release is None:
            self._release = self._loop.call_later(_HELD_S, self._let_go)

    def _let_go(self) -> None:
        """What is held leaves."""
        if self._release is not None:
            self._release.cancel()
            self._release = None
        self._out.extend(self._held.values())
        self._entering.update(self._held)
        self._held.clear()
        self._wake.set()

    def _ended(self, number: int) -> _Waiting | None:
        """Nobody waits for this answer any more: gives who did."""
        self._entering.discard(number)
        if self._held and not self._entering:
            self._loop.call_soon(self._let_go)  # behind the other answers of the same frame
        return self._waiting.pop(number, None)

    @property
    def is_awaited(self) -> bool:
        return bool(self._waiting)

    def ask(self, asked: Ask | CommitPlain) -> asyncio.Future[Answer]:
        """The reply to come."""
        if self.broken is not None:
            raise self._lost(sent=False)
        number, future = next(self._ids), self._loop.create_future()
        self._queue(number, asked)
        deadline = math.inf if asked.timeout_s is None else time.monotonic() + asked.timeout_s
        self._waiting[number] = future, deadline
        if not self._watched:
            self._watched = True
            self._loop.call_later(_WATCH_S, self._watch)
        return future

    def _watch(self) -> None:
        """Tells those whose time is up: one timer for all that wait, as most are answered long before."""
        now = time.monotonic()
        for number in [number for number, (_, deadline) in self._waiting.items() if deadline <= now]:
            waiting = self._ended(number)
            if waiting is not None and not waiting[0].done():  # somebody waits
                waiting[0].set_exception(silent(self._core.endpoint, self._core.timeout_s))
        self._watched = bool(self._waiting)
        if self._watched:
            self._loop.call_later(_WATCH_S, self._watch)

    async def _send(self) -> None:
        """Each time the stream is ready: everything that has gathered, in frames of about a megabyte."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                out = self._out
                while out:
                    part = leaving(out.popleft())
                    parts, size = [part], len(part)
                    while out and size + len(out[0]) <= FRAME_BYTES:
                        parts.append(part := leaving(out.popleft()))
                        size += len(part)
                    if size:
                        await self._call.write(joined(parts))
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the receiving task learns why

    async def _receive(self) -> None:
        reason: KiviError = Unavailable("the server ended the session")
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                for i, (number, reply) in enumerate(self._answers(data), 1):
                    waiting = self._ended(number)
                    if waiting is not None and not waiting[0].done():
                        waiting[0].set_result(reply)
                    if i % _AT_ONCE == 0:
                        await asyncio.sleep(0)
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                reason = await failure(self._call, code)
        except asyncio.CancelledError:
            self.end(Unavailable("the session was cancelled"))
            raise
        except Exception as error:
            reason = broken_by(error, "the session")
        self.end(reason)

    def end(self, reason: KiviError) -> None:
        if self.broken is None:
            self.broken = reason
        self.hello.set()
        if self._release is not None:
            self._release.cancel()
        self._call.cancel()
        self._tasks[0].cancel()
        while self._waiting:
            _, (future, _) = self._waiting.popitem()
            if not future.done():
                future.set_exception(self._lost(sent=True))

    async def close(self) -> None:
        self.end(Closed("this client is closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass(slots=True)
class _Lookup:
    """A call for whose answer so many tasks wait. It has no deadline: each of them has its own."""

    call: asyncio.Task[Any]
    askers: int = 0


class Transport(Link[_Session]):
    """The channel and the current session; performs effects for the awaiting task."""

    def __init__(self, core: Core, access_token: str | None, tls: Tls | None) -> None:
        super().__init__(core, lambda endpoint: Calls(grpc.aio, endpoint, access_token, tls), _Session)
        self._lines: dict[str, Lines] = {}
        self._lookups: dict[bytes, _Lookup] = {}

    async def connect(self) -> None:
        """The first session; closes this client if there is none."""
        try:
            await self.reach(self.core.timeout_s)
        except BaseException:  # it was cancelled, perhaps: nobody else has it to close
            await self.close()
            raise

    async def reach(self, timeout_s: float | None) -> None:
        """A session: fails at once if nothing listens there; of several servers each may die meanwhile."""
        left = self.core.endpoint.count(",")
        session = self.open(wait_for_ready=False)
        try:
            async with asyncio.timeout(timeout_s):
                await session.hello.wait()
                while isinstance(session.broken, Unavailable) and left:
                    left -= 1
                    session = self.open(wait_for_ready=False)
                    await session.hello.wait()
        except TimeoutError:
            raise silent(self.core.endpoint, self.core.timeout_s) from None
        if session.broken is not None:
            raise unreachable(self.core.endpoint, session.broken)

    def lines_at(self, address: str) -> Lines:
        """Subscriptions at the server there; "" is the one of the session."""
        if address not in self._lines:
            self._lines[address] = Lines(partial(self._begin, address))
        return self._lines[address]

    def _begin(self, address: str) -> Any:
        """The stream of subscriptions, which somebody else reads. Raises Closed."""
        self.open()
        return self._calls_at(address).subscriptions(wait_for_ready=not address)

    async def perform(self, effect: Unary | Stream | Upload | Sleep | Receive | Do) -> Any:
        if isinstance(effect, Sleep):
            return await asyncio.sleep(effect.seconds)
        if isinstance(effect, Do):
            return await effect.call()
        if isinstance(effect, Receive):
            try:
                async with asyncio.timeout(effect.timeout_s):
                    return await effect.inbox.get()
            except TimeoutError:
                raise silent(self.core.endpoint, self.core.timeout_s) from None
        self.open()  # raises once closed
        if isinstance(effect, Unary) and effect.method == "Describe":
            message = effect.message
            if not message.lateness and not message.fresh:  # it is about the definition alone
                return await self._looked_up(effect)
        return await self._called(effect)

    async def _looked_up(self, effect: Unary) -> Any:
        """The definition of a table. When a program begins, its tasks want the same ones at once: while an answer is on
        its way, they wait for that one, each for as long as it would for its own, and it is given up when the last one
        has left. Who has seen more asks for itself."""
        wanted = effect.message.SerializeToString()
        if (lookup := self._lookups.get(wanted)) is None:
            call = asyncio.ensure_future(self._called(replace(effect, timeout_s=None)))
            lookup = self._lookups[wanted] = _Lookup(call)
            call.add_done_callback(partial(self._found, wanted, lookup))
        lookup.askers += 1
        try:
            async with asyncio.timeout(effect.timeout_s):
                return await asyncio.shield(lookup.call)
        except TimeoutError:
            raise silent(self.core.endpoint, self.core.timeout_s) from None
        finally:
            lookup.askers -= 1
            if not lookup.askers and not lookup.call.done():
                lookup.call.cancel()
                del self._lookups[wanted]  # at once: who asks now is not to join what has been given up

    def _found(self, wanted: bytes, lookup: _Lookup, call: asyncio.Task[Any]) -> None:
        if self._lookups.get(wanted) is lookup:
            del self._lookups[wanted]
        if not call.cancelled():
            call.exception()  # those who waited for it have been told, if they are still there

    async def _called(self, effect: Unary | Stream | Upload) -> Any:
        try:
            call = self.calls.start(effect)
            if not isinstance(effect, Stream):
                return await call
            try:
                async for message in call:
                    effect.on_message(message)
            finally:
                call.cancel()
        except grpc.RpcError as error:
            raise failed(error, self.core.endpoint, effect.timeout_s and self.core.timeout_s) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):  # the call was, by the channel that closed
                raise Closed(self._why_closed) from None
            raise

    async def _work(self, effect: Work) -> Answer | None:
        asked = effect.asked
        reply = None if asked is None else self.of(asked.epoch).ask(asked)
        try:
            await asyncio.to_thread(effect.work)
        except BaseException:
            if reply is not None:
                reply.cancel()  # nobody waits for it
            raise
        return None if reply is None else answer(await reply)

    async def run(self, steps: Steps[T]) -> T:
        try:
            effect = next(steps)
            while True:
                try:
                    result: Any
                    if isinstance(effect, (Ask, CommitPlain)):
                        result = answer(await self.of(effect.epoch).ask(effect))
                    elif isinstance(effect, Work):
                        result = await self._work(effect)
                    else:
                        result = await self.perform(effect)
                except KiviError as error:
                    effect = steps.throw(error)
                else:
                    effect = steps.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value
        except UnicodeEncodeError as error:
            raise no_text(error) from None
        finally:
            steps.close()

    async def close(self) -> None:
        self._closed = True
        if self._current is not None:
            await self._current.close()
        for lines in self._lines.values():
            await lines.close()
        for calls in self._at.values():
            await calls.channel.close()
