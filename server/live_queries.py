"""Subscriptions between the messages of Subscribe and the hub: what is wanted, and updates as they travel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import tee
from typing import Final

from kivi_server import limits
from kivi_server.auth import Grant
from kivi_server.translate import Translator

from kivi.api.arguments import check_names
from kivi.errors import InvalidArgument, Unavailable
from kivi.live.hub import Hub
from kivi.live.lives import EventsLive, Live
from kivi.model.changes import check_retractions
from kivi.model.lateness import AUTO_US
from kivi.model.schema import TableSchema
from kivi.model.slots import parse_duration_us
from kivi.model.subscriptions import Change, Durable, Query, Terms, Update
from kivi.wire.codec import to_table
from kivi.wire.columns import column_writer
from kivi.wire.v1 import service_pb2 as pb
from kivi.wire.v1 import types_pb2

__all__ = ["definition", "encoded", "outputs_of", "subscribe"]

_CHANGES: Final = 2_000
"""Of one message; a state of more rows comes in several."""
_MS_MAX: Final = 3_600_000
_KINDS: Final = {
    "add": pb.CHANGE_KIND_ADD,
    "remove": pb.CHANGE_KIND_REMOVE,
    "move": pb.CHANGE_KIND_MOVE,
    "change": pb.CHANGE_KIND_CHANGE,
}


def subscribe(hub: Hub, translator: Translator, request: pb.BeginSubscription, grant: Grant) -> Live:
    """Raises what the request deserves. Reads the query's result: not for the event loop."""
    spec = request.spec
    if (
        spec.reverse
        or spec.measures
        or spec.HasField("changes")
        or spec.HasField("question")
        or spec.order_by
        or spec.offset
    ):
        raise InvalidArgument("a subscription has an order of its own, and neither measures nor changes")
    if request.interval_ms > _MS_MAX or request.heartbeat_ms > _MS_MAX:
        raise InvalidArgument(f"interval_ms and heartbeat_ms are at most {_MS_MAX:,}")
    if request.lateness_us < AUTO_US:
        raise InvalidArgument("a lateness is a number of microseconds from 0 on, or -1: as late as most events were")
    hub.wait_for(request.min_snapshot)
    tenant = grant.tenant
    schema = translator.schema(spec.table, spec.table_id, tenant=tenant)
    if max(spec.known_columns, request.all_columns_of) > len(schema.output_names):  # as another node has it by now
        raise Unavailable(f"table {spec.table!r} was altered, and this node has not come so far: ask again")
    limit = spec.limit if spec.HasField("limit") else None
    of_events = schema.kind == "event" and not request.order_by and limit is None and not request.offset
    if schema.kind == "event" and spec.prefix.values:
        raise InvalidArgument(f"event table {schema.name!r} has no row keys: use where")
    if request.HasField("until_us") and not of_events:
        raise InvalidArgument("until_us ends a subscription to events")

    named = _without_columns(spec) if request.all_columns_of else ()

    def bind(schema: TableSchema) -> Query:
        scan = translator.scan(schema, spec)
        if named:
            scan = replace(scan, columns=schema.output_columns((*schema.output_names, *named)))
        if tenant is not None:
            scan = tenant.narrowed(schema, scan)
        query = Query.of(schema, scan, request.order_by, limit, request.offset)
        return replace(query, scan=replace(query.scan, shards=request.shards)) if request.shards else query

    if request.shards and (schema.kind != "aggregate" or not schema.shard_by or spec.HasField("rollup")):
        raise InvalidArgument(f"shards are of subscriptions to rows of a sharded aggregate, not to {schema.name!r}")
    durable = None
    if request.HasField("durable"):
        grant.require_all_rows("a durable subscription, whose name is anybody's,")
        check_names(request.durable.user, request.durable.name)
        ttl_us = parse_duration_us(request.durable.ttl_us, "ttl_us")
        durable = Durable(request.durable.user, request.durable.name, ttl_us, request.durable.unseen)
    terms = Terms(
        of_events,
        request.interval_ms / 1_000,
        max(10, request.heartbeat_ms or 1_000) / 1_000,
        request.since if request.HasField("since") else None,
        request.skip,
        request.until_us if request.HasField("until_us") else None,
        durable,
        check_retractions(request.retractions or "fail"),
        request.lateness_us,
    )
    return hub.subscribe(spec.table, bind, terms)


def _without_columns(spec: types_pb2.ScanSpec) -> tuple[str, ...]:
    """The columns that it has named, of rows; it asks for all that there are at a snapshot."""
    if spec.HasField("match"):
        raise InvalidArgument("the matches of a pattern have the columns of its measures, and no others")
    named = () if spec.HasField("rollup") else tuple(spec.columns)
    spec.ClearField("columns")
    spec.ClearField("known_columns")
    if spec.HasField("rollup"):
        spec.rollup.ClearField("measures")
    return named


def outputs_of(update: Update) -> int:
    """How many columns the table had that its rows are of, which says as what it was defined: some are only added."""
    return 0 if update.shown is None or not update.changes else len(update.shown.schema.output_names)


def definition(update: Update) -> types_pb2.Table:
    """Of the table that its rows are of."""
    assert update.shown is not None
    schema = update.shown.schema
    return schema.remembered(to_table, lambda: to_table(schema))


def encoded(number: int, live: Live, update: Update) -> Iterator[bytes]:
    """An update as one SubscribeResponse or several. Raises OutOfRange for a sum that has outgrown its column.

    Those who get the same update get the same messages but for the number, each made when the first of them comes to
    it: making all takes a second for a million changes, and whoever sends them lets others run in between. Of one event
    loop alone.
    """
    made = update.made.get("grpc")
    if made is None:
        (made,) = tee(_messages(live, update), 1)
        update.made["grpc"] = made
    for message in copy(made):
        if isinstance(message, Exception):
            raise message
        message.updates[0].number = number
        yield message.SerializeToString()


def _messages(live: Live, update: Update) -> Iterator[pb.SubscribeResponse | Exception]:
    """An error is its last, whatever it is: all that read it get that, and none takes what there is for the whole."""
    try:
        yield from _made(live, update)
    except Exception as error:
        yield error


def _made(live: Live, update: Update) -> Iterator[pb.SubscribeResponse]:
    schema, names = update.shown or (live.schema, ())
    write, of_events = column_writer(schema, names), isinstance(live, EventsLive)
    for begin, end in _parts(schema, names, update.changes):
        changes = update.changes[begin:end]
        message = pb.SubscribeResponse()
        part = message.updates.add(ts=update.ts, kinds=[_KINDS[change.kind] for change in changes])
        part.reset = update.reset and not begin
        part.from_ts = update.from_ts
        part.skip, part.ended, part.more = update.skip, update.ended, end < len(update.changes)
        if not of_events:
            part.old.extend([change.old or 0 for change in changes])
            part.new.extend([change.new or 0 for change in changes])
        if rows := [change.row for change in changes if change.row is not None]:
            write(part.columns, [[row[name] for row in rows] for name in names])
        yield message


def _parts(schema: TableSchema, names: Sequence[str], changes: Sequence[Change]) -> Iterator[tuple[int, int]]:
    """Where to cut them; once, where there are none."""
    varying = [n for n in names if n in schema.by_name and schema.by_name[n].type.name in ("string", "bytes")]
    begin = size = 0
    if varying:
        for i, change in enumerate(changes):
            if i - begin >= _CHANGES or size > limits.PAGE_BYTES:
                yield begin, i
                begin, size = i, 0
            if change.row is not None:
                size += sum(len(change.row[name] or "") for name in varying)
    else:
        while len(changes) - begin > _CHANGES:
            yield begin, begin + _CHANGES
            begin += _CHANGES
    yield begin, len(changes)
