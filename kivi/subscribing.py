"""Subscriptions as callers have them: ``db.subscribe(...)``.

::

    with db.subscribe("endpoint_5m", prefix=(251,), order_by="-slowest", limit=10) as live:
        for update in live:            # waits for the next; the first has all rows
            show(live.rows)            # the state now, or look at update.changes
            live.ts                    # the snapshot that it is of

Each update is a real state: ``live.rows`` is what the query gives at the snapshot ``live.ts``, never a mixture. Where
the connection is lost it is taken up again at ``live.ts``, without loss or repeat as far back as the table keeps; after
that the next update has ``reset``. Between updates the server says that it is alive: ``live.ts`` moves on also when
nothing changes, and ``live.silent_s`` is for how long nothing was heard.

For an event table ``live.rows`` stays empty: an update has the events themselves, in commit order, each once. What to
remember to go on later is ``since=live.ts, skip=live.skip``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

from kivi.arguments import SubscribeArguments
from kivi.errors import InvalidArgument
from kivi.schema import TableSchema
from kivi.subscriptions import Change, Update, applied

__all__ = ["Follower", "Subscription"]


class Follower:
    """What a subscriber has been told so far, whoever tells it."""

    def __init__(self, wanted: SubscribeArguments, schema: TableSchema) -> None:
        self.of_events = wanted.of_events(schema)
        self.ts = wanted.since or 0
        self.skip = wanted.skip
        self.rows: list[dict[str, Any]] = []
        self.begun = False
        self.ended = False
        self.heard_at = time.monotonic()

    def hear(self, update: Update) -> Update | None:
        """An update with rows as callers see them; None if it says only that all is well."""
        self.heard_at = time.monotonic()
        self.ts, self.skip, self.ended = update.ts, update.skip, update.ended
        if not self.of_events:
            if update.reset:
                self.rows = []
            self.rows = applied(self.rows, update.changes, value=_row)
        first, self.begun = not self.begun, True
        return update if update.changes or update.reset or update.ended or (first and not self.of_events) else None


def _row(change: Change) -> Any:
    return change.row


def told(schema: TableSchema, update: Update) -> Update:
    """An update in stored form as callers see it. Raises OutOfRange."""
    changes = [c if c.row is None else c._replace(row=schema.row_from_stored(c.row)) for c in update.changes]
    return replace(update, changes=changes)


class Subscription(ABC):
    """Iterate over it for updates; one thread at a time. It ends with its ``with`` block, or ``close``."""

    _follower: Follower

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Update]:
        while (update := self.next()) is not None:
            yield update

    def next(self, timeout_s: float | None = None) -> Update | None:
        """The next update; None when ``timeout_s`` is over, or after the last. Raises what ended the subscription."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._follower.ended:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            said = self._next(left)
            if said is None:
                return None
            if (update := self._follower.hear(said)) is not None:
                return update
        return None

    @abstractmethod
    def _next(self, timeout_s: float | None) -> Update | None:
        """What is said next, rows as callers see them; None when the time is up."""

    @abstractmethod
    def close(self) -> None:
        """Ends it. Harmless twice."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The state at ``ts``, in order. Raises InvalidArgument for a subscription to events."""
        if self._follower.of_events:
            raise InvalidArgument("a subscription to events keeps none of them: they are in its updates")
        return self._follower.rows

    @property
    def ts(self) -> int:
        """The snapshot that its state is of; of events, up to which all were delivered."""
        return self._follower.ts

    @property
    def skip(self) -> int:
        """How many events after ``ts`` were delivered, too."""
        return self._follower.skip

    @property
    def ended(self) -> bool:
        """Whether the last update was delivered."""
        return self._follower.ended

    @property
    def silent_s(self) -> float:
        """For how long nothing was heard. The server says something at least every ``heartbeat_ms``."""
        return time.monotonic() - self._follower.heard_at
