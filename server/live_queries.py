"""Subscriptions of clients: between the messages of Subscribe and the hub, which keeps queries up.

A message costs 0.2 to 0.3 ms of the server's CPU, nearly all of it gRPC's; that is what many subscribers cost those who
commit. A thousand that follow one hot row, a state a second each, left 38% of the rate of small transactions while each
had a wake-up of the event loop, a task and a turn of its own; with ``Answers``, and a hub that is patient where its
subscribers are, it is two thirds (medians of three turns each, 2 cores that others used too).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Final

from kivi_server import limits
from kivi_server.translate import Translator

from kivi.arguments import check_names
from kivi.client_codec import fill_values
from kivi.errors import InvalidArgument, KiviError
from kivi.live.hub import Hub
from kivi.live.lives import Live
from kivi.schema import TableSchema
from kivi.subscriptions import Durable, Query, Terms, Update
from kivi.wire.v1 import service_pb2 as pb

__all__ = ["Answers", "messages", "subscribe"]

_CHANGES: Final = 2_000
"""Of one message; a state of more rows comes in several."""
_MS_MAX: Final = 3_600_000
_AT_ONCE: Final = 16
"""Answers that one turn of the event loop takes up: calls that wait for it get theirs in between."""
Kind = pb.SubscribeChange.Kind
_KINDS: Final = {
    "add": Kind.KIND_ADD,
    "remove": Kind.KIND_REMOVE,
    "move": Kind.KIND_MOVE,
    "change": Kind.KIND_CHANGE,
}


def subscribe(hub: Hub, translator: Translator, request: pb.SubscribeRequest) -> Live:
    """Raises what the request deserves. Reads the query's result: not for the event loop."""
    spec = request.spec
    if spec.reverse or spec.measures or spec.HasField("changes"):
        raise InvalidArgument("a subscription has an order of its own, and neither measures nor changes")
    if request.interval_ms > _MS_MAX or request.heartbeat_ms > _MS_MAX:
        raise InvalidArgument(f"interval_ms and heartbeat_ms are at most {_MS_MAX:,}")
    schema = translator.schema(spec.table, spec.table_id)
    limit = spec.limit if spec.HasField("limit") else None
    of_events = schema.kind == "event" and not request.order_by and limit is None and not request.offset
    if schema.kind == "event" and spec.prefix.values:
        raise InvalidArgument(f"event table {schema.name!r} has no row keys: use where")
    if request.HasField("until_us") and not of_events:
        raise InvalidArgument("until_us ends a subscription to events")

    def bind(schema: TableSchema) -> Query:
        scan = translator.scan(schema, spec)
        return Query.of(schema, scan, request.order_by, limit, request.offset)

    durable = None
    if request.HasField("durable"):
        check_names(request.durable.user, request.durable.name)
        if request.durable.ttl_us <= 0:
            raise InvalidArgument("a durable subscription lasts for some time: ttl_us is greater than zero")
        durable = Durable(request.durable.user, request.durable.name, request.durable.ttl_us, request.durable.unseen)
    terms = Terms(
        of_events,
        request.interval_ms / 1_000,
        max(10, request.heartbeat_ms or 1_000) / 1_000,
        request.since if request.HasField("since") else None,
        request.skip,
        request.until_us if request.HasField("until_us") else None,
        durable,
    )
    return hub.subscribe(spec.table, bind, terms)


class Answers:
    """From the hub's threads to the event loop: one wake-up for all that it says together, and a few answers a turn.

    A wake-up costs the hub a system call, and its turn of the interpreter; a thousand subscribers told by one tick
    would hold it up for as long as the loop is busy, a thousand times.
    """

    def __init__(self) -> None:
        self._said: deque[tuple[asyncio.Future[Update | KiviError], Update | KiviError]] = deque()
        self._woken = False

    def put(
        self,
        loop: asyncio.AbstractEventLoop,
        answer: asyncio.Future[Update | KiviError],
        said: Update | KiviError,
    ) -> None:
        """From any thread."""
        self._said.append((answer, said))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._settle, loop)

    def _settle(self, loop: asyncio.AbstractEventLoop) -> None:
        self._woken = False  # first: who puts something after the last look wakes the loop again
        for _ in range(_AT_ONCE):
            if not self._said:
                return
            answer, said = self._said.popleft()
            if not answer.done():
                answer.set_result(said)
        self._woken = True
        loop.call_soon(self._settle, loop)


async def messages(hub: Hub, live: Live, answers: Answers) -> AsyncIterator[pb.SubscribeResponse]:
    """What is to be sent, each asked for when the one before has left. Raises what ends the subscription."""
    loop = asyncio.get_running_loop()
    while True:
        answer: asyncio.Future[Update | KiviError] = loop.create_future()
        hub.ask(live, functools.partial(answers.put, loop, answer))
        said = await answer
        if isinstance(said, KiviError):
            raise said
        for message in _encoded(live, said):
            yield message
        if said.ended:
            return


def _encoded(live: Live, update: Update) -> Iterator[pb.SubscribeResponse]:
    """Raises OutOfRange for a sum that has outgrown its column."""
    schema, names = live.schema, live.query.columns
    checked = [(name, schema.by_name[name].type) for name in names if name in schema.by_name]
    checked = [(name, type_) for name, type_ in checked if schema.by_name[name].operator is not None]
    message = pb.SubscribeResponse(ts=update.ts, reset=update.reset, skip=update.skip, ended=update.ended)
    size = 0
    for change in update.changes:
        if len(message.changes) >= _CHANGES or size > limits.PAGE_BYTES:
            message.more = True
            yield message
            message = pb.SubscribeResponse(ts=update.ts, skip=update.skip, ended=update.ended)
            size = 0
        part = message.changes.add(kind=_KINDS[change.kind], old=change.old or 0, new=change.new or 0)
        if change.row is not None:
            for name, type_ in checked:
                type_.from_stored(change.row[name], name)
            fill_values(part.values, map(change.row.__getitem__, names))
            size += sum(len(v) for v in change.row.values() if isinstance(v, (str, bytes)))
    yield message
