"""What both clients' subscriptions share: the request, and updates out of messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kivi import errors
from kivi.arguments import SubscribeArguments
from kivi.client_codec import row_reader
from kivi.client_messages import scan_spec
from kivi.client_steps import Closed
from kivi.errors import KiviError
from kivi.schema import TableSchema
from kivi.subscribing import Follower
from kivi.subscriptions import Change, Kind, Update
from kivi.wire.v1 import service_pb2 as pb

__all__ = ["Reader", "may_return", "request"]

_KINDS: Final[dict[int, Kind]] = {
    pb.SubscribeChange.KIND_ADD: "add",
    pb.SubscribeChange.KIND_REMOVE: "remove",
    pb.SubscribeChange.KIND_MOVE: "move",
    pb.SubscribeChange.KIND_CHANGE: "change",
}


def request(schema: TableSchema, wanted: SubscribeArguments, follower: Follower) -> pb.SubscribeRequest:
    """From where the follower is. Raises SchemaError, InvalidArgument."""
    query = wanted.bound(schema)
    spec = scan_spec(schema, query.scan)
    if query.limit is not None:
        spec.limit = query.limit
    goes_on = follower.begun or wanted.since is not None
    return pb.SubscribeRequest(
        spec=spec,
        order_by=wanted.order_by,
        offset=query.offset,
        interval_ms=round(wanted.interval_ms),
        heartbeat_ms=round(wanted.heartbeat_ms),
        since=follower.ts if goes_on else None,
        skip=follower.skip,
        until_us=wanted.until_us if follower.of_events else None,
        durable=None
        if wanted.name is None
        else pb.DurableSubscription(user=wanted.user, name=wanted.name, ttl_us=wanted.ttl_us, unseen=wanted.unseen),
    )


def may_return(error: KiviError) -> bool:
    """Whether the subscription is to be taken up again: the connection or the server went away."""
    return isinstance(error, errors.Unavailable) and not isinstance(error, (Closed, errors.ResourceExhausted))


class Reader:
    """Updates from the messages of one stream, with rows as callers see them."""

    def __init__(self, schema: TableSchema, wanted: SubscribeArguments, follower: Follower) -> None:
        self._of_events = follower.of_events
        self._read: Callable[[Any], dict[str, Any]] = row_reader(schema, wanted.bound(schema).columns)
        self._changes: list[Change] = []
        self._reset = False

    def read(self, message: pb.SubscribeResponse) -> Update | None:
        """None if the update goes on."""
        for change in message.changes:
            kind = _KINDS[change.kind]
            row = None if kind == "remove" else self._read(change.values)
            if self._of_events:
                self._changes.append(Change(kind, None, None, row))
            else:
                old = None if kind == "add" else change.old
                self._changes.append(Change(kind, old, None if kind == "remove" else change.new, row))
        self._reset = self._reset or message.reset
        if message.more:
            return None
        changes, self._changes = self._changes, []
        reset, self._reset = self._reset, False
        return Update(message.ts, changes, reset=reset, skip=message.skip, ended=message.ended)
