"""One query that is kept up, for all subscriptions that ask for it.

Subscriptions whose queries are equal, with the values of their tenant and of hierarchies bound into them, share a
``Shared``: its window, the state that this shows, and each update from one state to another. What is a subscriber's
own is the state that it was told last (``lives.RowsLive``): its interval, its ``since``, and how slow it is.

**Invariants.**

* While it is ``current`` its window is what the query gives at the hub's snapshot. Otherwise nobody is told a state:
  whoever waits hears that all is well, as of the snapshot that it was told last (``Hub._tell``).
* ``state`` is never changed: another state is another list. So two subscriptions have been told the same if they have
  the same list, and what one gets at a snapshot is the other's, too (``update``), encoded once (``Update.made``).
* What changed since the snapshot of ``fresh`` is in ``missed``: a group notes it from before the reading begins
  (``Group.begin``), and looks at these rows again when it takes the window over, which is at that snapshot or a later
  one (``Group.fresh_at``).
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace
from typing import Any, Final

from kivi.errors import KiviError
from kivi.live.windows import Window
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Keyed, Query, Shown, Update, differences
from kivi.mvcc.applied import PendingEvents
from kivi.store.key_ranges import key_range

__all__ = ["ATTEMPTS", "NOTHING", "Shared", "key_of"]

ATTEMPTS: Final = 3
"""A window that was overtaken by changes while it was read again, so many times in a row, is read in a tick."""
_UPDATES_MAX: Final = 64
"""Whoever comes back has a state of its own, of before, which is kept with the update from it."""
NOTHING: Final[list[Keyed]] = []
"""The state of those who have been told nothing that holds."""


def key_of(query: Query) -> bytes:
    """Equal for queries that show the same rows of a table at every snapshot, as long as its definition stays.

    A digest of the query's text, which says all of it: of equal numbers it tells 1 from 1.0, and 0.0 from -0.0.
    """
    scan = query.scan if query.scan.rollup is not None else replace(query.scan, columns=None)
    return hashlib.sha256(repr(replace(query, scan=scan)).encode("utf-8", "surrogatepass")).digest()


class Shared:
    """Not thread safe: it is touched with the hub's lock, or by the one that reads its window for the first time."""

    def __init__(self, table: str, schema: TableSchema, query: Query) -> None:
        self.table = table
        self.lives: set[Any] = set()
        """The ``RowsLive`` of it."""
        self.window: Window
        self.current = False
        self.state = NOTHING
        self.from_ts = 0
        """While it is current: the snapshot since which its window has not changed."""
        self.fresh: Window | None = None
        """Its window at ``read_ts``, until a tick takes it over."""
        self.read_ts = 0
        self.missed: set[bytes] = set()
        """The rows that changed since then, or more."""
        self.missed_events: list[PendingEvents] = []
        """Likewise, commits' events."""
        self.reread = False
        """More changed since then than can be told."""
        self.attempts = ATTEMPTS  # whoever subscribes waits for the tick that takes it over
        self.opened = threading.Event()
        """It has been read for the first time, or that has failed."""
        self.failure: KiviError | None = None
        self._updates: dict[int, tuple[list[Keyed], Update]] = {}
        """By the states that they begin with, at the snapshot ``_ts``."""
        self._ts = 0
        self.define(schema, query)

    def define(self, schema: TableSchema, query: Query) -> None:
        """Its query, for the schema as it is now."""
        self.schema, self.query, self.key = schema, query, key_of(query)
        self.range = (None, None) if schema.kind == "event" else key_range(schema, query.scan)

    @property
    def is_part(self) -> bool:
        """Whether other nodes have other parts of it."""
        return self.query.scan.shards is not None

    def miss(self, *, all_: bool) -> None:
        """Begins to note what changes; ``all_``: it cannot be said what changed."""
        self.missed, self.missed_events, self.reread = set(), [], all_

    def take_over(self, window: Window) -> None:
        """The window is that of the hub's snapshot, or becomes it in this tick."""
        self.window, self.fresh, self.current = window, None, True
        self._updates.clear()

    def differs_from(self, told: list[Keyed]) -> bool:
        """Whether there may be something to tell those who have been told this."""
        return self.current and (self.window.changed or told is not self.state)

    def shown(self) -> list[Keyed]:
        """The state now; called while it is current."""
        if self.window.changed:
            self.window.changed = False
            if (state := self.window.state()) != self.state or self.state is NOTHING:
                self.state = state
        return self.state

    def update(self, told: list[Keyed], ts: int) -> Update:
        """From one state to that of now, at the hub's snapshot ``ts``; called while it is current."""
        state = self.shown()
        if ts != self._ts or len(self._updates) >= _UPDATES_MAX:
            self._ts = ts
            self._updates.clear()
        found = self._updates.get(id(told))
        if found is None:
            changes = () if told is state else differences(told, state)
            from_ts = self.from_ts if self.is_part else 0
            shown = Shown(self.schema, self.query.columns)
            update = Update(ts, changes, reset=told is NOTHING, from_ts=from_ts, shown=shown)
            found = self._updates[id(told)] = told, update
        return found[1]
