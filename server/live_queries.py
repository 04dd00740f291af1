"""Subscriptions of clients: between the messages of Subscribe and the hub, which keeps queries up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

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

__all__ = ["messages", "subscribe"]

_CHANGES: Final = 2_000
"""Of one message; a state of more rows comes in several."""
_MS_MAX: Final = 3_600_000
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


async def messages(hub: Hub, live: Live) -> AsyncIterator[pb.SubscribeResponse]:
    """What is to be sent, each asked for when the one before has left. Raises what ends the subscription."""
    loop = asyncio.get_running_loop()
    while True:
        answer: asyncio.Future[Update | KiviError] = loop.create_future()

        def settle(said: Update | KiviError, answer: asyncio.Future[Any] = answer) -> None:
            if not answer.done():
                answer.set_result(said)

        def then(said: Update | KiviError, settle: Any = settle) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, said)

        hub.ask(live, then)
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
