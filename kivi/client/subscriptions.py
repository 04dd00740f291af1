"""What both clients' subscriptions share: the request, updates out of messages, and the stream that carries them all.

All subscriptions of a client travel in one stream, a ``Line``, so that updates which are said together come as one
message. Each may have AHEAD updates on their way or waiting for whoever iterates; who takes one makes room for another.
So nobody who is slow holds up the others.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kivi import errors
from kivi.api.arguments import SubscribeArguments
from kivi.api.retry import backoff_s
from kivi.api.subscription import Follower
from kivi.client.calls import check_size
from kivi.client.core import Core
from kivi.client.messages import scan_spec
from kivi.client.placing import holders_of, least_loaded, place_of, was_lost
from kivi.client.steps import Closed, Receive, Sleep, Steps
from kivi.errors import KiviError
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Change, Kind, Update
from kivi.wire.columns import row_reader, rows_of
from kivi.wire.methods import MESSAGE_BYTES_MAX
from kivi.wire.status import from_error
from kivi.wire.v1 import service_pb2 as pb

__all__ = ["Inbox", "Line", "Live", "Place", "Reader", "Said", "may_return", "request"]

AHEAD: Final = 2

_KINDS: Final[dict[int, Kind]] = {
    pb.CHANGE_KIND_ADD: "add",
    pb.CHANGE_KIND_REMOVE: "remove",
    pb.CHANGE_KIND_MOVE: "move",
    pb.CHANGE_KIND_CHANGE: "change",
}


def request(
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
        durable=None
        if wanted.name is None
        else pb.DurableSubscription(user=wanted.user, name=wanted.name, ttl_us=wanted.ttl_us, unseen=wanted.unseen),
    )


def may_return(error: KiviError) -> bool:
    """Whether the subscription is to be taken up again: the connection or the server went away."""
    return isinstance(error, errors.Unavailable) and not isinstance(error, (Closed, errors.ResourceExhausted))


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

    def end(self) -> None:
        """Nothing more is wanted. Harmless twice."""
        self.line.end(self.number)


class Reader:
    """Updates from the messages of one subscription, with rows as callers see them."""

    def __init__(self, schema: TableSchema, wanted: SubscribeArguments, follower: Follower) -> None:
        self._of_events = follower.of_events
        self._read = row_reader(schema, wanted.bound(schema).columns)
        self._changes: list[Change] = []
        self._reset = False

    def read(self, message: pb.SubscriptionUpdate) -> Update | None:
        """None if the update goes on."""
        kinds = [_KINDS[kind] for kind in message.kinds]
        rows = map(self._read, rows_of(message.columns))
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


class Live:
    """One subscription, without its input and output: a place on the client's line; another where that line breaks.

    ``inbox`` is a queue of the driver's kind; None in it says that the subscription was closed.
    """

    def __init__(self, core: Core, wanted: SubscribeArguments, new_inbox: Callable[[], Any]) -> None:
        self._core = core
        self._wanted = wanted
        self._new_inbox = new_inbox
        self._reader: Reader
        self.inbox = new_inbox()
        self.place: Place | None = None
        self._address = ""
        self.follower: Follower | None = None  # until the table is known
        self.closed = False

    def begin(self, deadline: float | None = None) -> Steps[bool]:
        """Takes it up, again once the server is there; False at the deadline. Raises after the client's timeout."""
        attempt, until = 0, self._core.deadline()
        while not self.closed:
            try:
                yield from self._open()
                return not self.closed
            except KiviError as error:
                if not may_return(error) or time.monotonic() >= until:
                    raise
            attempt += 1
            pause = backoff_s(attempt + 4)
            if deadline is not None and time.monotonic() + pause > deadline:
                break
            yield Sleep(pause)
        return False

    def _open(self) -> Steps[None]:
        """From where it is. Waits until the server says that it accepts it, or it is closed."""
        core, again, address = self._core, True, ""
        while True:
            schema = yield from core.schema(self._wanted.table)
            if self.follower is None:
                self.follower = Follower(self._wanted, schema)
            message = request(schema, self._wanted, self.follower, core.seen_ts)
            self._reader = Reader(schema, self._wanted, self.follower)
            self.inbox = self._new_inbox()
            address = address or place_of(core, is_durable=message.HasField("durable"))
            place = core.transport.lines_at(address).line().begin(message, self.inbox.put_nowait)
            try:
                first = yield Receive(self.inbox, core.timeout_s)
            except BaseException:
                place.end()
                raise
            if first is None:
                place.end()
                return
            if isinstance(first, KiviError):
                addresses = holders_of(first)
                if may_return(first) and not addresses:
                    was_lost(core, address)
                if not again or not (addresses or core.stale(first, self._wanted.table)):
                    raise first
                again, address = False, least_loaded(core, addresses) if addresses else ""
            elif first.moved_to_port:
                place.end()
                host, _, _ = core.endpoint.rpartition(":")
                address = core.subscriptions_at = f"{host}:{first.moved_to_port}"
            else:
                self.place, self._address = place, address
                if self.closed:  # meanwhile: nobody else ends this one
                    place.end()
                return

    def read(self, said: Said | None) -> Update | None:
        """An update; None: it goes on, or the place is lost, or it is closed. Raises what ends the subscription."""
        try:
            if isinstance(said, KiviError):
                raise said
            update = None if said is None else self._reader.read(said)
        except KiviError as error:  # or a value that callers cannot be shown
            if not self.closed and not may_return(error):
                self.close()
                raise
            self.place = None
            was_lost(self._core, self._address)
            return None
        if update is not None:
            self._core.saw(update.ts)
            if self.place is not None:
                self.place.took(update)
        return update

    def close(self) -> None:
        self.closed = True
        if self.follower is not None:
            self.follower.ended = True
        if self.place is not None:
            self.place.end()
        self.inbox.put_nowait(None)  # for whoever waits
