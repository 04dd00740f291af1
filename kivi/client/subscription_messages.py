"""The stream that carries all subscriptions of a client, requests for it, and updates out of its messages.

All subscriptions of a client travel in one stream, a ``Line``, so that updates which are said together come as one
message. Each may have AHEAD updates on their way or waiting for whoever iterates; who takes one makes room for another.
So nobody who is slow holds up the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final, NamedTuple

from kivi.api.arguments import SubscribeArguments
from kivi.api.subscription import Follower
from kivi.client.calls import check_size
from kivi.client.messages import scan_spec
from kivi.errors import KiviError
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Change, Kind, Update
from kivi.wire.columns import rows_of, rows_reader
from kivi.wire.methods import MESSAGE_BYTES_MAX
from kivi.wire.status import from_error
from kivi.wire.v1 import service_pb2 as pb
from kivi.wire.v1 import types_pb2

__all__ = ["KINDS", "Inbox", "Line", "Place", "Reader", "Said", "begin_message"]

AHEAD: Final = 2

KINDS: Final[dict[int, Kind]] = {
    pb.CHANGE_KIND_ADD: "add",
    pb.CHANGE_KIND_REMOVE: "remove",
    pb.CHANGE_KIND_MOVE: "move",
    pb.CHANGE_KIND_CHANGE: "change",
}


def begin_message(
    schema: TableSchema, wanted: SubscribeArguments, follower: Follower, min_snapshot: int
) -> pb.BeginSubscription:
    """From where the follower is, and not before ``min_snapshot``. Raises SchemaError, InvalidArgument."""
    query = wanted.bound(schema)
    spec = scan_spec(schema, query.scan)
    if query.limit is not None:
        spec.limit = query.limit
    goes_on = follower.begun or wanted.since is not None
    return pb.BeginSubscription(
        room=AHEAD,
        spec=spec,
        order_by=wanted.order_by,
        offset=query.offset,
        interval_ms=round(wanted.interval_ms),
        heartbeat_ms=round(wanted.heartbeat_ms),
        since=follower.ts if goes_on else None,
        skip=follower.skip,
        until_us=wanted.until_us if follower.of_events else None,
        retractions=wanted.retractions,
        min_snapshot=min_snapshot,
        lateness_us=wanted.lateness_us,
        all_columns_of=len(schema.output_names) if wanted.all_columns else 0,
        durable=None
        if wanted.name is None
        else pb.DurableSubscription(user=wanted.user, name=wanted.name, ttl_us=wanted.ttl_us, unseen=wanted.unseen),
    )


Said = pb.SubscriptionUpdate | KiviError
Inbox = Callable[[Said], None]


class Line:
    """One stream without its input and output. Once broken it stays broken. Threads may share it.

    ``put`` takes what is to be sent: encoded requests, which may be joined to one message.
    """

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self.broken: KiviError | None = None
        self._put = put
        self._numbers = itertools.count(1)
        self._inboxes: dict[int, Inbox] = {}

    def begin(self, wanted: pb.BeginSubscription, inbox: Inbox) -> Place:
        """``inbox`` gets all that is said of it: that it is accepted, updates, what ended it."""
        number = wanted.number = next(self._numbers)
        data = pb.SubscribeRequest(begin=(wanted,)).SerializeToString()
        check_size("message_bytes_max", MESSAGE_BYTES_MAX, len(data))
        self._inboxes[number] = inbox
        if self.broken is not None:  # looked at after that: whoever breaks it sees the inbox
            self._inboxes.pop(number, None)
            raise self.broken
        self._put(data)
        return Place(self, number)

    @property
    def load(self) -> int:
        """How many subscriptions it has."""
        return len(self._inboxes)

    def take(self, number: int) -> None:
        self._put(pb.SubscribeRequest(taken=[number]).SerializeToString())

    def seek(self, number: int, ts: int) -> None:
        self._put(pb.SubscribeRequest(seek=[pb.SoughtSnapshot(number=number, ts=ts)]).SerializeToString())

    def end(self, number: int) -> None:
        if self._inboxes.pop(number, None) is not None:
            self._put(pb.SubscribeRequest(end=[number]).SerializeToString())

    def arrived(self, data: bytes) -> None:
        """A message came."""
        for update in pb.SubscribeResponse.FromString(data).updates:
            inbox = self._inboxes.get(update.number)
            if inbox is None:  # it was ended here meanwhile
                continue
            if update.HasField("error"):
                self._inboxes.pop(update.number, None)
                inbox(from_error(update.error))
            else:
                inbox(update)

    def fail(self, reason: KiviError) -> None:
        """It is broken: nothing more comes of any subscription."""
        self.broken = self.broken or reason
        while self._inboxes:
            try:
                _, inbox = self._inboxes.popitem()
            except KeyError:  # another thread's
                break
            inbox(self.broken)


class Place(NamedTuple):
    """A subscription's, on its line."""

    line: Line
    number: int

    def took(self, update: Update) -> None:
        """It was taken: there is room for another, if another comes."""
        if update.ended:
            self.end()
        else:
            self.line.take(self.number)

    def seek(self, ts: int) -> None:
        """Something is to be said of this part as soon as it has come to ``ts``."""
        self.line.seek(self.number, ts)

    def end(self) -> None:
        """Nothing more is wanted. Harmless twice."""
        self.line.end(self.number)


class Reader:
    """Updates from the messages of one subscription, with rows as callers see them.

    Rows are read as what the table was at their snapshot: as it was begun with, until a message says another.
    """

    def __init__(
        self,
        schema: TableSchema,
        wanted: SubscribeArguments,
        follower: Follower,
        heard: Callable[[types_pb2.Table], TableSchema],
    ) -> None:
        self._of_events = follower.of_events
        self._wanted, self._heard = wanted, heard
        self._define(schema)
        self._changes: list[Change] = []
        self._reset = False

    def _define(self, schema: TableSchema) -> None:
        self._read = rows_reader(self._wanted.shown(schema), self._wanted.bound(schema).columns)

    def read(self, message: pb.SubscriptionUpdate) -> Update | None:
        """None if the update goes on."""
        if message.HasField("altered"):
            self._define(self._heard(message.altered))
        kinds = [KINDS[kind] for kind in message.kinds]
        rows = iter(self._read(rows_of(message.columns)))
        if self._of_events:
            self._changes += [Change(kind, None, None, next(rows)) for kind in kinds]
        else:
            for kind, old, new in zip(kinds, message.old, message.new, strict=True):
                if kind == "remove":
                    self._changes.append(Change(kind, old, None, None))
                else:
                    self._changes.append(Change(kind, None if kind == "add" else old, new, next(rows)))
        self._reset = self._reset or message.reset
        if message.more:
            return None
        changes, self._changes = self._changes, []
        reset, self._reset = self._reset, False
        return Update(message.ts, changes, reset=reset, skip=message.skip, ended=message.ended)
