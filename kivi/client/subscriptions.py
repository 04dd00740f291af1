"""A subscription of either client, without its input and output: its place, and how it is taken up again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kivi import errors
from kivi.api.arguments import SubscribeArguments
from kivi.api.retry import backoff_s
from kivi.api.subscription import Follower
from kivi.client.core import Core
from kivi.client.merging import Merged, parts_of
from kivi.client.placing import Trail, holders_of, least_loaded, place_of, was_lost
from kivi.client.steps import Closed, Receive, Sleep, Steps, Timeout
from kivi.client.subscription_messages import Place, Reader, begin_message
from kivi.errors import KiviError
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Update

__all__ = ["Live", "may_return"]


def may_return(error: KiviError) -> bool:
    """Whether the subscription is to be taken up again: the connection or the server went away."""
    return isinstance(error, errors.Unavailable) and not isinstance(error, (Closed, errors.ResourceExhausted))


class Live:
    """One subscription, without its input and output: a place on the client's line; another where that line breaks.

    ``inbox`` is a queue of the driver's kind; None in it says that the subscription was closed.
    """

    def __init__(self, core: Core, wanted: SubscribeArguments, new_inbox: Callable[[], Any]) -> None:
        self._core = core
        self._wanted = wanted
        self._new_inbox = new_inbox
        self._reader: Reader | Merged
        self._merged: Merged | None = None
        """The last one, if what it gave was given last."""
        self.inbox = new_inbox()
        self.place: Place | Merged | None = None
        self._address = ""
        self.follower: Follower | None = None  # until the table is known
        self.closed = False

    def begin(self) -> Steps[bool]:
        """Takes it up, again once the server is there; False if it was closed. Raises after the client's timeout."""
        attempt, until, why = 0, self._core.deadline(), None
        while not self.closed:
            try:
                yield from self._open(until)
                return not self.closed
            except KiviError as error:
                why = why if why and isinstance(error, Timeout) else error  # what was refused says more
                attempt += 1
                pause = backoff_s(attempt + 4)
                if not may_return(error) or time.monotonic() + pause >= until:
                    raise why from None
            yield Sleep(pause)
        return False

    def _open(self, deadline: float) -> Steps[None]:
        """From where it is. Waits until the server says that it accepts it, or it is closed."""
        core, again, address, trail = self._core, True, "", None
        while True:
            schema = yield from core.schema(self._wanted.table)
            if self.follower is None:
                self.follower = Follower(self._wanted, schema)
            message = begin_message(schema, self._wanted, self.follower, core.seen_ts)
            self._reader = Reader(schema, self._wanted, self.follower, core.heard)
            self.inbox = self._new_inbox()
            address = address or place_of(core, is_durable=message.HasField("durable"))
            place = core.transport.lines_at(address).line().begin(message, self.inbox.put_nowait)
            try:
                first = yield Receive(self.inbox, core.left(deadline))
            except BaseException:
                place.end()
                raise
            if first is None:
                place.end()
                return
            if isinstance(first, KiviError):
                if held := parts_of(first, schema, self._wanted):
                    return (yield from self._open_parts(schema, held, deadline))
                if holders_of(first):
                    trail = trail or Trail(address or core.endpoint, deadline)
                    address = least_loaded(core, trail.named_by(first))
                    trail.went_to(address)
                    continue
                if may_return(first):
                    was_lost(core, address)
                if not again or not core.stale(first, self._wanted.table):
                    raise first
                again, address = False, ""
            elif first.moved_to_port:
                place.end()
                host, _, _ = core.endpoint.rpartition(":")
                address = core.subscriptions_at = f"{host}:{first.moved_to_port}"
            else:
                self.place, self._address, self._merged = place, address, None
                if self.closed:  # meanwhile: nobody else ends this one
                    place.end()
                return

    def _open_parts(self, schema: TableSchema, held: list[tuple[str, int]], deadline: float) -> Steps[None]:
        """Where no node has all of its shards: at several, from what was given last."""
        assert self.follower is not None
        given = None if self._merged is None else self._merged.given
        merged = self._merged = Merged(self._core, schema, self._wanted, self.follower, given)
        self.inbox = self._new_inbox()
        try:
            merged.begin(held, self.inbox.put_nowait)
            while not merged.is_accepted:
                said = yield Receive(self.inbox, self._core.left(deadline))
                if said is None:
                    merged.end()
                    return
                merged.hear(said)
        except BaseException as error:
            merged.end()
            if isinstance(error, KiviError) and may_return(error):
                was_lost(self._core, merged.lost)
            raise
        self._reader = self.place = merged
        self.inbox.put_nowait((0, None))  # whoever reads looks at what was heard
        if self.closed:
            merged.end()

    def read(self, said: Any) -> Update | None:
        """An update; None: it goes on, or the place is lost, or it is closed. Raises what ends the subscription."""
        try:
            if isinstance(said, KiviError):
                raise said
            update = None if said is None else self._reader.read(said)
        except KiviError as error:  # or a value that callers cannot be shown
            if not self.closed and not may_return(error):
                self.close()
                raise
            if isinstance(self.place, Merged):
                self.place.end()
                self._address = self.place.lost
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
