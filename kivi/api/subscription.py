"""Subscriptions as callers have them: ``db.subscribe(...)``.

::

    with db.subscribe("endpoint_5m", prefix=(251,), order_by="-slowest", limit=10) as live:
        for update in live:            # waits for the next; the first has all rows
            show(live.rows)            # the state now, or look at update.changes
            live.ts                    # the snapshot that it is of

Each update is a real state: ``live.rows`` is what the query gives at the snapshot ``live.ts``, never a mixture. Where
the connection is lost it is taken up again at ``live.ts``, without loss or repeat as far back as the table keeps; after
that the next update has ``reset``. Another program goes on with ``since=live.ts, rows=live.rows`` of the one before;
without ``rows`` it follows the changes by itself, from the state that it has. Between updates the server says that it
is alive: ``live.ts`` moves on also when nothing changes, and ``live.silent_s`` is for how long nothing was heard.

A *durable* subscription to events has a name. What was delivered is remembered by the store, and told to it now and
then, at most every second: an update counts as delivered when the next one is asked for. So a program that dies gets
the update that it was working on again. ``acknowledge`` tells it at once.

Rows have the columns that were asked for. Without ``columns`` (of a rollup: ``measures``) these are all that the table
has at ``live.ts``: those that are added meanwhile come with the next update, in every row.

For an event table ``live.rows`` stays empty: an update has the events themselves, in commit order, each once. What to
remember to go on later is ``since=live.ts, skip=live.skip``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final, Self

from kivi.api.arguments import SubscribeArguments, patience_s
from kivi.errors import InvalidArgument
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Stored, Update, applied
from kivi.model.types import ColumnType

__all__ = ["Follower", "State", "Subscription", "listed", "told"]

_TELL_S: Final = 1.0
_MOMENT: Final = ColumnType("timestamp")


class Follower:
    """The state that a subscriber has been told so far, in this process or by a server."""

    def __init__(self, wanted: SubscribeArguments, schema: TableSchema) -> None:
        self.of_events = wanted.of_events(schema)
        self.ts = wanted.since or 0
        self.skip = wanted.skip
        known = [] if self.of_events or wanted.since is None else wanted.rows
        self._rows: list[dict[str, Any]] | None = None if known is None else list(known)
        self.begun = False
        self.ended = False
        self.durable = wanted.name is not None
        self._delivered = self._told = (self.ts, self.skip)
        self._told_at = time.monotonic()
        self._renew_s = min(wanted.ttl_us / 4e6, 3_600.0)
        self.heard_at = time.monotonic()

    def hear(self, update: Update) -> Update | None:
        """An update with rows as callers see them; None if it says only that all is well."""
        begins = not self.begun and not self.of_events
        self.heard_at = time.monotonic()
        self.ts, self.skip, self.ended = update.ts, update.skip, update.ended
        if not self.of_events:
            if update.reset:
                self._rows = []
            if self._rows is not None:
                self._rows = _applied(self._rows, update)
        self.begun = True
        return update if update.changes or update.reset or update.ended or begins else None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Raises InvalidArgument where only the caller knows them."""
        if self._rows is None:
            raise InvalidArgument(
                "with since= only changes come, and who subscribes has the rows: give them too, as rows=, or look at "
                "the changes of each update"
            )
        return self._rows

    def asks(self) -> None:
        """The caller asks for the next update: it has what it was given."""
        self._delivered = (self.ts, self.skip)

    def to_tell(self, *, now: bool = False) -> tuple[int, int] | None:
        """The position to tell the store, if it is time for that: it has moved, or the store should hear of it."""
        if not self.durable:
            return None
        silent_s = time.monotonic() - self._told_at
        moved = self._delivered > self._told and (now or silent_s >= _TELL_S)
        return self._delivered if moved or silent_s >= self._renew_s else None

    def acknowledged(self) -> tuple[int, int] | None:
        """The position to tell the store now, if it has moved. Raises InvalidArgument for one without a name."""
        if not self.durable:
            raise InvalidArgument("only durable subscriptions, which have a name, remember what was delivered")
        self.asks()
        return self.to_tell(now=True)

    def tell(self, position: tuple[int, int]) -> None:
        """The store knows it."""
        self._told, self._told_at = position, time.monotonic()


def _applied(rows: list[dict[str, Any]], update: Update) -> list[dict[str, Any]]:
    try:
        return applied(rows, update.changes, value=attrgetter("row"))
    except IndexError:
        raise InvalidArgument(
            "the rows given to subscribe are not what its query gives at since: give those, or neither of both"
        ) from None


def listed(stored: Stored) -> dict[str, Any]:
    """A durable subscription as callers see it."""
    expires = _MOMENT.from_stored(stored.expires_us)
    return {"name": stored.name, "table": stored.table, "ts": stored.ts, "skip": stored.skip, "expires": expires}


def told(update: Update) -> Update:
    """An update in stored form as callers see it. Raises OutOfRange."""
    if update.shown is None:  # it has no rows
        return update
    schema, names = update.shown
    changes = [c if c.row is None else c._replace(row=schema.row_from_stored(c.row, names)) for c in update.changes]
    return replace(update, changes=changes)


class State(ABC):
    """What a subscription has told so far, for threads and for asyncio."""

    _follower: Follower

    def _known(self) -> Follower:
        return self._follower

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The state at ``ts``, in order. Raises InvalidArgument for a subscription to events."""
        if self._known().of_events:
            raise InvalidArgument("a subscription to events keeps none of them: they are in its updates")
        return self._known().rows

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


class Subscription(State):
    """Iterate over it for updates; one thread at a time. It ends with its ``with`` block, or ``close``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and self._follower.durable:
                self.acknowledge()
        finally:
            self.close()

    def __iter__(self) -> Iterator[Update]:
        while (update := self.next()) is not None:
            yield update

    def next(self, timeout_s: float | None = None) -> Update | None:
        """The next update; None when ``timeout_s`` is over, or after the last. Raises what ended the subscription."""
        patience = patience_s(timeout_s, "timeout_s")
        deadline = None if patience is None else time.monotonic() + patience
        self._follower.asks()
        self._tell(self._follower.to_tell())
        while not self._follower.ended:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            said = self._next(left)
            if said is not None and (update := self._follower.hear(said)) is not None:
                return update
            self._tell(self._follower.to_tell())
            if said is None:
                return None
        return None

    def acknowledge(self) -> None:
        """Marks what was given so far as delivered, durably. Raises InvalidArgument for one without a name."""
        self._tell(self._follower.acknowledged())

    def _tell(self, position: tuple[int, int] | None) -> None:
        if position is not None:
            self._acknowledge(*position)
            self._follower.tell(position)

    @abstractmethod
    def _acknowledge(self, ts: int, skip: int) -> None:
        """The store is to remember it."""

    @abstractmethod
    def _next(self, timeout_s: float | None) -> Update | None:
        """The next update, rows as callers see them; None when the time is up."""

    @abstractmethod
    def close(self) -> None:
        """Ends it. Harmless twice."""
