"""The subscriptions of one client: a stream of requests in, a stream of updates out.

::

    event loop                      the hub's threads
    read a request: begin -------->  (a thread of the reads) the query's result
                    taken, room ->   hub.ask
    all that was said, <----------   an update each
    as one message
    it has left: hub.ask again

A message costs gRPC 0.2 to 0.3 ms of the server's CPU, and a call each subscription: with one stream for each of a
thousand subscribers that follow what is being appended, a state a second, appends had 0.53 of their rate; what the hub
says together now travels together.

*A subscription that nobody takes updates of* has no room after a few; the hub is not asked for it then, and others on
the stream go on. *A client that takes no byte* stops its own stream: at most one update of each of its subscriptions
waits here, and after a minute it is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
from kivi_server import limits, live_queries
from kivi_server.auth import Access, Grant, Tokens
from kivi_server.clients import Client
from kivi_server.sessions import Sessions
from kivi_server.status import to_error, told

from kivi.errors import InvalidArgument, KiviError, Unauthenticated
from kivi.live.hub import LIVES_MAX
from kivi.live.lives import Live
from kivi.model.subscriptions import Update
from kivi.wire.v1 import service_pb2 as pb

__all__ = ["Subscriptions"]

_BEGIN_TOGETHER: Final = {False: 4, True: 16}
"""Of one stream; each is read by a thread that others want, too. Durable ones wait for a commit, which is one for all
that come together (``kivi.live.durable``), and have threads of their own."""
_MESSAGE_BYTES: Final = 256 << 10
_MESSAGE_PARTS: Final = 64
_TURN_S: Final = 0.002
"""What the event loop encodes before it looks after other calls."""
_PART_BYTES_MAX: Final = limits.MESSAGE_BYTES_MAX - _MESSAGE_BYTES
_CALL: Final = "Subscribe/begin"


@dataclass(slots=True, eq=False)
class _Subscription:
    """One of them. The event loop's alone; ``live`` is None while it begins."""

    number: int
    room: int
    table: str
    asked: bool = False
    """The hub is, or what it said has not left yet."""
    live: Live | None = None
    counted: bool = False
    """Among those of its client."""
    known: int = 0
    """So many columns of the table its client knows, and is told if there are others; 0: it wants certain ones."""


class Subscriptions:
    """One stream."""

    def __init__(self, sessions: Sessions, tokens: Tokens, grant: Grant, client: Client) -> None:
        self._sessions = sessions
        self._hub = sessions.hub
        self._tokens = tokens
        self._grant = grant
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._held: dict[int, _Subscription] = {}
        self._waiting: dict[bool, deque[tuple[_Subscription, pb.BeginSubscription]]]
        self._waiting = {is_durable: deque() for is_durable in _BEGIN_TOGETHER}
        self._beginning: set[asyncio.Task[None]] = set()
        self._beginners = dict.fromkeys(_BEGIN_TOGETHER, 0)  # of these tasks, those that will look at what waits again
        self._said: deque[tuple[_Subscription, Update | KiviError | int | None]] = deque()
        """None: it is accepted; a number: it is to be begun at that port."""
        self._left: list[_Subscription] = []  # what was said of them has been sent, or is about to be
        self._wake = asyncio.Event()
        self._woken = False

    async def serve(self, read: Callable[[], Awaitable[Any]], write: Callable[[bytes], Awaitable[None]]) -> None:
        """Until the client ends it. Raises what ends all of them."""
        tasks = [asyncio.ensure_future(self._receive(read)), asyncio.ensure_future(self._send(write))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*tasks, *self._beginning):
                task.cancel()
            for one in self._held.values():  # what is being made now is closed by whoever waits for it
                self._close(one)
            await asyncio.gather(*tasks, *self._beginning, return_exceptions=True)

    # -- what the client says -----------------------------------------------------------------------------

    async def _receive(self, read: Callable[[], Awaitable[Any]]) -> None:
        while (request := await read()) is not grpc.aio.EOF:
            self._begin(request.begin)
            for number in request.taken:
                if (one := self._held.get(number)) is not None:
                    one.room += 1
                    self._ask(one)
            for sought in request.seek:
                if (one := self._held.get(sought.number)) is not None and one.live is not None:
                    self._hub.seek(one.live, sought.ts)
            for number in request.end:
                if (one := self._held.pop(number, None)) is not None:
                    self._close(one)

    def _begin(self, wanted: Any) -> None:
        refused: KiviError | None = None
        try:
            self._client.take(len(wanted))
        except KiviError as error:
            refused = error
        for each in wanted:
            if each.number in self._held:
                raise InvalidArgument(f"subscription {each.number} is there already: choose another number")
            one = self._held[each.number] = _Subscription(
                each.number, each.room, each.spec.table, known=each.all_columns_of
            )
            is_durable = each.HasField("durable")
            waiting = self._waiting[is_durable]
            if len(self._held) > LIVES_MAX or len(waiting) > LIVES_MAX:
                raise limits.exceeded("live_subscriptions_max", LIVES_MAX, LIVES_MAX + 1, "subscriptions of a stream")
            if refused is not None:
                self._refuse(one, refused, time.monotonic())
                continue
            waiting.append((one, each))
            if self._beginners[is_durable] < _BEGIN_TOGETHER[is_durable]:
                self._beginners[is_durable] += 1
                task = asyncio.ensure_future(self._begin_waiting(is_durable))
                self._beginning.add(task)
                task.add_done_callback(self._beginning.discard)

    async def _begin_waiting(self, is_durable: bool) -> None:
        while waiting := self._waiting[is_durable]:  # nothing is awaited between the last look and what follows
            await self._begin_next(*waiting.popleft())
        self._beginners[is_durable] -= 1

    async def _begin_next(self, one: _Subscription, wanted: pb.BeginSubscription) -> None:
        if self._held.get(one.number) is not one:  # it was ended before its turn
            return
        began = time.monotonic()
        try:
            self._require(one.table)
            self._client.check_reads()  # what it begins with is read
            if (beside := self._sessions.subscriptions_beside) is not None and not wanted.HasField("durable"):
                self._calls_ended(began)
                self._put(one, beside())
                return
            self._client.subscribe()
            one.counted = True
            live = await self._opened(wanted)
        except Exception as error:
            self._close(one)
            self._refuse(one, error, began)
            return
        one.live = live
        if self._held.get(one.number) is not one:
            self._close(one)
            return
        self._calls_ended(began)
        one.asked = True  # until that it is accepted has left
        self._put(one, None)

    def _calls_ended(self, began: float) -> None:
        self._sessions.calls.ended(_CALL, time.monotonic() - began)

    async def _opened(self, wanted: pb.BeginSubscription) -> Live:
        hub = self._hub
        pool = self._sessions.openings if wanted.HasField("durable") else self._sessions.reads

        def opened() -> Live:
            with self._client.reading():
                return live_queries.subscribe(hub, self._sessions.translator, wanted, self._grant)

        opening = self._loop.run_in_executor(pool, opened)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:  # the client has gone, and its subscription is still being made
            opening.add_done_callback(lambda made: None if made.exception() else hub.close(made.result()))
            raise

    def _require(self, table: str) -> None:
        """The token may read it, as it is now. Raises Unauthenticated, PermissionDenied."""
        now = self._tokens.now(self._grant)
        if now is None:
            raise Unauthenticated("the token of this subscription was withdrawn")
        now.require(Access.READ, "Subscribe", table)
        if now.tenant != self._grant.tenant:
            raise Unauthenticated("this access token is for other rows by now: subscribe again")

    def _refuse(self, one: _Subscription, error: Exception, began: float) -> None:
        self._sessions.calls.ended(_CALL, time.monotonic() - began, error)
        self._put(one, self._told(one, error))

    def _told(self, one: _Subscription, error: Exception) -> KiviError:
        return told(error, "a subscription", f"{self._client.name}/{one.number}")

    def _close(self, one: _Subscription) -> None:
        if one.counted:
            one.counted = False
            self._client.unsubscribe()
        if one.live is not None:
            self._hub.close(one.live)

    # -- what the hub says ---------------------------------------------------------------------------------

    def _ask(self, one: _Subscription) -> None:
        """For the next update, if there is room for one."""
        if one.room > 0 and one.live is not None and not one.asked and self._held.get(one.number) is one:
            one.room -= 1
            one.asked = True
            self._hub.ask(one.live, functools.partial(self._put, one))

    def _put(self, one: _Subscription, said: Update | KiviError | int | None) -> None:
        """From any thread."""
        self._said.append((one, said))
        if not self._woken:  # of those who wake it at the same time any one is enough
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake.set)

    async def _send(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._woken = False  # first: who puts something after the last look wakes it again
            parts = self._leaving()
            while True:
                message = _joined(parts)
                if message:
                    await write(message)
                left, self._left = self._left, []
                for one in left:
                    one.asked = False
                    self._ask(one)
                if not message:
                    break

    def _leaving(self) -> Iterator[bytes]:
        """Messages, in parts."""
        while self._said:
            one, said = self._said.popleft()
            if self._held.get(one.number) is one:  # else it was ended
                yield from self._encoded(one, said)
            self._left.append(one)

    def _encoded(self, one: _Subscription, said: Update | KiviError | int | None) -> Iterator[bytes]:
        try:
            if isinstance(said, KiviError):
                raise said
            if isinstance(said, int):
                self._held.pop(one.number, None)
                yield _of(one, moved_to_port=said)
                return
            if said is None or one.live is None:
                yield _of(one, accepted=True)
                return
            self._require(one.table)
            if one.known and (outputs := live_queries.outputs_of(said)) not in (0, one.known):
                one.known = outputs
                yield _of(one, altered=live_queries.definition(said), more=True)
            for part in live_queries.encoded(one.number, one.live, said):
                if len(part) > _PART_BYTES_MAX:  # it would end the stream, and with it all the others
                    raise limits.exceeded("message_bytes_max", _PART_BYTES_MAX, len(part), "bytes of one row")
                yield part
            ended = said.ended
        except Exception as error:
            ended = True
            yield _of(one, error=to_error(self._told(one, error)))
        if ended:
            self._held.pop(one.number, None)
            self._close(one)


def _of(one: _Subscription, **said: Any) -> bytes:
    update = pb.SubscriptionUpdate(number=one.number, **said)
    return bytes(pb.SubscribeResponse(updates=(update,)).SerializeToString())


def _joined(parts: Iterator[bytes]) -> bytes:
    """As one message, some of them; empty at their end. They are made as they are taken, while others wait."""
    taken: list[bytes] = []
    size, until = 0, time.monotonic() + _TURN_S
    for part in parts:
        taken.append(part)
        size += len(part)
        if size >= _MESSAGE_BYTES or len(taken) >= _MESSAGE_PARTS or time.monotonic() >= until:
            break
    return b"".join(taken)
