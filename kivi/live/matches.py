"""Subscriptions to the matches of a pattern: from position to position (``kivi.store.decided``), at the hub's pace.

The position that its subscriber has is ``ts``, the snapshot, and ``skip``, which stands for the frontier: so one that
comes back with both goes on exactly there, on this node or on another, whatever was killed meanwhile. The frontier is
the clock of event time (``Clock``) less the lateness.
"""

from __future__ import annotations

import time
from typing import Final

from kivi.errors import InvalidArgument, SnapshotTooOld
from kivi.live.lives import Bind, EventsLive
from kivi.model.event_clock import Clock
from kivi.model.lateness import AUTO_US
from kivi.model.patterns import check_followed, matched_schema
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Change, Row, Terms, Update
from kivi.model.types import INT64_MAX, INT64_MIN
from kivi.mvcc.leases import Lease
from kivi.store.decided import Decided, Position
from kivi.store.facade import Store

__all__ = ["MatchesLive"]

_PAUSE_S: Final = 0.1
"""It looks about so often, or after its interval if that is less."""
_BASE_US: Final = 2**62
_SHARE: Final = 3.0
"""A pause is at least so many times as long as looking for matches took before it."""


class MatchesLive(EventsLive):
    """Of one subscription. It reads from the table whenever it looks, in a thread of the hub's readers."""

    def __init__(self, store: Store, table: str, bind: Bind, terms: Terms, events: TableSchema) -> None:
        query = bind(events)
        match = query.scan.match
        if match is None:
            raise InvalidArgument("a subscription to matches has a pattern")
        check_followed(match)
        self._store, self._match = store, match
        shown = matched_schema(events, match)
        super().__init__(table, bind, terms, shown, query, terms.since or 0, terms.skip)
        self.generation = events.id
        self._decided = Decided(store.reads, store.changes, match, query.where)
        self._clock: Clock | None = None
        self._next_us: int | None = None
        self._looked = False
        lateness_us = terms.lateness_us
        self._lateness_us = store.lateness.auto_us(events) if lateness_us == AUTO_US else lateness_us
        if terms.since is None:  # from now on
            with store.snapshots.opened() as lease:
                self.ts, self.skip = lease.ts, _skip_of(self._frontier(lease, self._events(lease), INT64_MIN))
        self.pause_s = self._pause_s = min(_PAUSE_S, max(terms.interval_s, 0.01))

    def define(self, schema: TableSchema) -> None:
        """Its matches are of measures, whatever columns are added; it reads the table as each snapshot sees it."""

    def _events(self, lease: Lease) -> TableSchema:
        schema = self._store.table(self.table, lease)
        if schema.id != self.generation:
            raise SnapshotTooOld(f"table {schema.name!r} was overwritten: subscribe again", table=schema.name)
        return schema

    def keep(self, cts: int, rows: list[Row]) -> None:
        """No event is kept: it reads them."""

    def look(self) -> Update | None:
        """What changed for it; None: nothing."""
        began = time.thread_time()
        if self._looked and self._store.watermark() <= self.ts and not self._is_due():
            return None
        with self._store.snapshots.opened() as lease:
            was, events = Position(self.ts, _frontier_of(self.skip)), self._events(lease)
            if self._looked and not self._has_news(lease, events) and not self._is_due():
                return None
            frontier_us = self._frontier(lease, events, was.frontier_us)
            told = self._decided.between(lease, events, was, frontier_us)
            self.ts, self.skip = lease.ts, _skip_of(frontier_us)
        self._looked, self._next_us = True, told.next_us
        self.pause_s = max(self._pause_s, _SHARE * (time.thread_time() - began))
        changes = [Change("remove", None, None, row) for row in told.removed]
        changes += [Change("add", None, None, row) for row in told.added]
        return Update(self.ts, changes, skip=self.skip, shown=self.shown) if changes else None

    def _has_news(self, lease: Lease, events: TableSchema) -> bool:
        """Whether events came. Of those on other nodes that is not known without asking them."""
        if self._store.shards.is_partial(events):
            return lease.ts > self.ts
        return self._store.changes.tail_points(events, self.ts, 1, lease.ts, 0).last > self.ts

    def _is_due(self) -> bool:
        """Whether something is decided by now, without another event."""
        if self._next_us is None or self._clock is None:
            return False
        return self._clock.at(self._store.committer.now_us(), None).clock_us - self._lateness_us > self._next_us

    def _frontier(self, lease: Lease, events: TableSchema, least_us: int) -> int:
        now_us = self._store.committer.now_us()
        after_us = None if self._clock is None else self._clock.clock_us
        newest = self._store.reads.extreme_time(lease, events, "max", after_us)
        if self._clock is not None:
            self._clock = self._clock.at(now_us, newest)
        elif newest is not None:
            self._clock = Clock(now_us, min(newest, now_us))
        else:
            return least_us
        return max(least_us, self._clock.clock_us - self._lateness_us)


def _skip_of(frontier_us: int) -> int:
    """A number from 0 on; 0 is before all events."""
    return min(max(frontier_us + _BASE_US, 0), INT64_MAX)


def _frontier_of(skip: int) -> int:
    return skip - _BASE_US if skip else INT64_MIN
