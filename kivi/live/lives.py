"""Live subscriptions, as the hub holds them: who asks for what, what it has been told, and when it may be told more.

All of it belongs to the hub: nothing here is touched without its lock, but ``ask`` and ``close`` of the hub.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from kivi.errors import KiviError
from kivi.live.windows import Window
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Change, Keyed, Query, Row, Terms, Update, differences
from kivi.mvcc.applied import PendingEvents
from kivi.mvcc.leases import Lease
from kivi.store.key_ranges import key_range

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
        self.due = 0.0
        """Not to be told anything before this moment of the monotonic clock."""
        self.beat = 0.0
        """To be told at this moment that it is alive, if nothing else."""
        self.asked = 0
        """How often."""
        self.scheduled_at: float | None = None
        """The hub looks at it then."""
        self.failure: KiviError | None = None
        self.closed = False
        self.missed: set[bytes] = set()
        """While it joins: the rows that changed since its own snapshot, or more."""
        self.missed_events: list[PendingEvents] = []
        """While it joins: likewise, commits' events."""
        self.reread = False
        """While it joins: more changed than can be told."""

    def define(self, schema: TableSchema) -> None:
        """Its query, for the schema as it is now."""
        self.schema, self.query = schema, self.bind(schema)

    def told_at(self, now: float) -> None:
        """It is told something: from when on it may be told more.

        Intervals are counted from one origin: what is due together is told at one snapshot, so that states of several
        queries can be put together. Who is told a bit late is due in time again: the intervals do not drift apart.
        """
        if self.interval_s:
            late = now - self.due
            since = self.due if late < self.interval_s / 2 else now
            self.due = math.ceil(since / self.interval_s + 1 - _ROUNDING) * self.interval_s

    @property
    def dirty(self) -> bool:
        """There is something to tell."""
        raise NotImplementedError

    def take(self, ts: int) -> Update:
        """The update to the hub's snapshot ``ts``; it may be empty."""
        raise NotImplementedError


class RowsLive(Live):
    """A subscription to a state: rows, and how they differ from the rows that were told before."""

    def __init__(self, table: str, bind: Bind, terms: Terms) -> None:
        super().__init__(table, bind, terms)
        self.window: Window
        self.read_ts = 0
        """The snapshot that the window was first read at."""
        self.told: list[Keyed] = []
        self.reset = True
        """It has been told nothing that holds."""
        self.range: tuple[bytes | None, bytes | None]
        self.from_ts = 0
        """Of a part: its window has not changed since this snapshot."""
        self.sought = 0
        """Of a part: something is to be said as soon as it has come to this snapshot."""

    @property
    def is_part(self) -> bool:
        """Whether other nodes have other parts of it."""
        return self.query.scan.shards is not None

    def define(self, schema: TableSchema) -> None:
        super().define(schema)
        self.range = (None, None) if schema.kind == "event" else key_range(schema, self.query.scan)

    @property
    def dirty(self) -> bool:
        return self.failure is not None or self.reset or self.window.changed

    def take(self, ts: int) -> Update:
        self.ts = ts
        if not (self.window.changed or self.reset):
            return Update(ts, from_ts=self.from_ts)
        state = self.window.state()
        update = Update(ts, differences(self.told, state), reset=self.reset, from_ts=self.from_ts)
        self.told, self.reset, self.window.changed = state, False, False
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
        # Others' predicates may be about columns that this one does not show.
        self.columns = schema.output_names if self.unseen else query.columns
        self.end_ts: int | None = None
        self.behind = True
        self.partial = since == skip == 0
        self.reset = False
        self.reading: Any = None
        """The tail that it is reading: (lease, batches)."""
        self.busy = False
        """A thread reads for it."""
        self.kept: deque[tuple[int, list[Row]]] = deque()
        self.kept_rows = 0
        self.kept_from: int | None = None
        """Every selected event after this timestamp is kept; None: they are not being kept."""

    def define(self, schema: TableSchema) -> None:
        super().define(schema)
        if self.unseen and self.columns != schema.output_names:  # the table was altered
            self.columns = schema.output_names
            self.let_go()

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
        return Update(self.ts, changes, reset=reset, skip=self.skip, ended=ended)

    def shown(self, update: Update) -> Update:
        """The columns that were asked for."""
        changes = [
            change._replace(row={name: change.row[name] for name in self.query.columns})
            for change in update.changes
            if change.row is not None
        ]
        return replace(update, changes=changes)

    def release(self, release: Callable[[Lease], None]) -> None:
        """Ends what it reads."""
        if self.reading is not None:
            lease, batches = self.reading
            self.reading = None
            batches.close()
            release(lease)
