"""Live subscriptions, as the hub holds them: who asks for what, what it has been told, and when it may be told more.

All of it belongs to the hub: nothing here is touched without its lock, but ``ask`` and ``close`` of the hub.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kivi.errors import KiviError
from kivi.live.shared import NOTHING, Shared
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Change, Keyed, Query, Row, Shown, Terms, Update
from kivi.mvcc.leases import Lease

__all__ = ["EventsLive", "Live", "RowsLive", "Then"]

Then = Callable[[Update | KiviError], None]
Bind = Callable[[TableSchema], Query]

BUFFER_ROWS: Final = 20_000
"""So many events wait in memory for a subscriber; beyond that it reads them again from the table."""
UPDATE_ROWS: Final = 5_000
_ROUNDING: Final = 1e-6
"""A moment that is due is a whole number of intervals, or so much of an interval beside that."""


class Live:
    """One subscription. ``bind`` makes its query for a schema; ``then`` is there while its subscriber is ready."""

    def __init__(self, table: str, bind: Bind, terms: Terms) -> None:
        self.table = table
        self.bind = bind
        self.query: Query
        self.schema: TableSchema
        self.ts = terms.since or 0
        """The snapshot that it has been told of."""
        self.skip = 0
        """Of events, how many after that it has been told, too."""
        self.until_us = terms.until_us
        self.interval_s = terms.interval_s
        self.heartbeat_s = terms.heartbeat_s
        self.patience_s = min(terms.interval_s, terms.heartbeat_s)
        """For so many seconds nobody expects an update."""
        self.then: Then | None = None
        self.due = time.monotonic()
        """Not to be told anything before this moment of the monotonic clock."""
        self.beat = 0.0
        """To be told at this moment that it is alive, if nothing else."""
        self.said_at = 0.0
        """When it was told anything, be it that it is alive."""
        self.asked = 0
        """How often."""
        self.scheduled_at: float | None = None
        """The hub looks at it then."""
        self.failure: KiviError | None = None
        self.closed = False

    def told_at(self, now: float, looked_at: float) -> None:
        """It is told something: from when on it may be told more. ``looked_at``: when there was nothing to tell it yet.

        Intervals are counted from one origin: what is due together is told at one snapshot, so that states of several
        queries can be put together. Who is told a bit late is due in time again: the intervals do not drift apart. Who
        had nothing to be told for longer waits a whole interval from now, and less than two. Whom the hub told so late,
        for want of time, that an interval is passed over is due at an even one: else two of which one is told at the
        even and one at the odd ones could be so for ever, with pauses as long as an interval, at no snapshot in common.
        It is the next even one, however soon: to leave half an interval until then made it up to two and a half.
        """
        if interval_s := self.interval_s:
            if now - self.due < interval_s / 2:
                self.due = math.ceil(self.due / interval_s + 1 - _ROUNDING) * interval_s
            elif now - max(self.due, looked_at) < interval_s / 2:
                self.due = math.ceil(now / interval_s + 1 - _ROUNDING) * interval_s
            else:
                self.due = math.ceil(now / interval_s / 2 - _ROUNDING) * 2 * interval_s

    @property
    def waits(self) -> bool:
        """Nothing can be told for now, but that all is well."""
        return False

    @property
    def dirty(self) -> bool:
        """There is something to tell."""
        raise NotImplementedError

    def take(self, ts: int) -> Update:
        """The update to the hub's snapshot ``ts``; it may be empty."""
        raise NotImplementedError


class RowsLive(Live):
    """A subscription to a state: what has been told of a query that others may have, too."""

    shared: Shared

    def __init__(self, table: str, bind: Bind, terms: Terms) -> None:
        super().__init__(table, bind, terms)
        self.told: list[Keyed] = NOTHING
        self.sought = 0
        """Of a part: something is to be said as soon as it has come to this snapshot."""

    def attach(self, shared: Shared) -> None:
        """It is told of this from now on."""
        self.shared, self.schema, self.query = shared, shared.schema, shared.query
        shared.lives.add(self)

    @property
    def is_part(self) -> bool:
        """Whether other nodes have other parts of it."""
        return self.shared.is_part

    @property
    def waits(self) -> bool:
        """No state of the hub's snapshot is known: its window is being read again."""
        return not self.shared.current

    @property
    def dirty(self) -> bool:
        return self.failure is not None or self.shared.differs_from(self.told)

    def take(self, ts: int) -> Update:
        update = self.shared.update(self.told, ts)
        self.ts, self.told = ts, self.shared.state
        return update


class EventsLive(Live):
    """A subscription to events: each once, in commit order, from ``ts`` on.

    *Behind*, it reads from the table, page by page and in its own time; what commits bring meanwhile is kept, up to
    BUFFER_ROWS. Where both meet it is *caught up*: from then on its events come with the commits, from memory. If they
    become too many while its subscriber is busy, they are let go, and it is behind again, from where it was.
    """

    def __init__(
        self, table: str, bind: Bind, terms: Terms, schema: TableSchema, query: Query, since: int, skip: int
    ) -> None:
        super().__init__(table, bind, terms)
        self.schema, self.query = schema, query
        self.generation = schema.id
        self.ts = self.handed = since
        self.given = 0
        """With ``unseen``, the newest commit of which it was handed an event."""
        self.again = (0, 0)
        """Commits after the first and up to the second were handed to the connection before this one, for nothing."""
        self.skip = skip
        self.counted_at = 0
        """The snapshot at which ``skip`` events of the commit at ``ts + 1`` were counted; 0: it is not known."""
        self.durable = terms.durable
        self.retractions = terms.retractions
        self.unseen = terms.durable is not None and terms.durable.unseen
        self.columns = self.read_of(schema, query)
        self.end_ts: int | None = None
        self.behind = True
        self.partial = since == skip == 0
        self.reset = False
        self.reading: Any = None
        """The tail that it is reading: (lease, batches, what their rows are)."""
        self.busy = False
        """A thread reads for it."""
        self.kept: deque[tuple[int, list[Row]]] = deque()
        self.kept_rows = 0
        self.kept_from: int | None = None
        """Every selected event after this timestamp is kept; None: they are not being kept."""

    @property
    def lives(self) -> tuple[Live, ...]:
        """Who is told of it."""
        return (self,)

    def define(self, schema: TableSchema) -> None:
        """Its query, for the schema as it is now. Rows that are kept have the columns of one schema."""
        self.schema, self.query = schema, self.bind(schema)
        before, self.columns = self.columns, self.read_of(schema, self.query)
        if self.columns != before:
            self.let_go()

    def read_of(self, schema: TableSchema, query: Query) -> tuple[str, ...]:
        """The columns that are read: others' predicates may be about some that this one does not show."""
        return schema.output_names if self.unseen else query.columns

    @property
    def shown(self) -> Shown:
        """What the rows are that are kept, or that were decided."""
        return Shown(self.schema, self.query.columns)

    @property
    def dirty(self) -> bool:
        return self.failure is not None or self.behind or bool(self.kept) or self.end_ts is not None

    def keep(self, cts: int, rows: list[Row]) -> None:
        """Keeps the events that a commit brings; commits come in order."""
        if self.kept_from is None or cts <= self.ts:
            return
        self.kept.append((cts, rows))
        self.kept_rows += len(rows)
        if self.kept_rows > BUFFER_ROWS:
            self.let_go()

    def let_go(self) -> None:
        self.kept.clear()
        self.kept_rows = 0
        self.kept_from = None
        self.behind = True

    def take(self, ts: int) -> Update:
        """The next of what is kept, at most UPDATE_ROWS. Called when it is caught up."""
        changes: list[Change] = []
        while self.kept and len(changes) < UPDATE_ROWS:
            cts, rows = self.kept[0]
            if self.end_ts is not None and cts > self.end_ts:
                break
            fresh = rows[self.skip :] if self.skip else rows
            part = fresh[: UPDATE_ROWS - len(changes)]
            changes += [Change("add", None, None, row) for row in part]
            if len(part) < len(fresh):
                self.ts, self.skip, self.counted_at = max(self.ts, cts - 1), self.skip + len(part), cts
                break
            self.kept.popleft()
            self.kept_rows -= len(rows)
            self.ts, self.skip = cts, 0
        done = not self.kept or (self.end_ts is not None and self.kept[0][0] > self.end_ts)
        if done and not self.skip:
            self.ts = max(self.ts, ts if self.end_ts is None else min(ts, self.end_ts))
        ended = self.end_ts is not None and done and self.ts >= self.end_ts
        reset, self.reset = self.reset, False
        return Update(self.ts, changes, reset=reset, skip=self.skip, ended=ended, shown=self.shown)

    def release(self, release: Callable[[Lease], None]) -> None:
        """Ends what it reads."""
        if self.reading is not None:
            lease, batches, _ = self.reading
            self.reading = None
            batches.close()
            release(lease)
