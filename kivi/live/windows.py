"""Windows: the rows that a query shows, and a few more behind them, in its order.

A query with a limit keeps ``slack`` rows beyond it: when a shown row leaves, the next one is known. What lies beyond
the last row that is kept is not known, unless the window is ``whole``. Rows are put in where they belong; those that
would come behind the last known are left out, for there may be others before them. When fewer rows are left than are
shown, the window is ``short``, and has to be read again.

Without a limit a window holds all that matches; ROWS_MAX is the most.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from kivi.errors import ResourceExhausted
from kivi.model.rollups import Ends
from kivi.model.subscriptions import Keyed, Query, Row

if TYPE_CHECKING:
    from kivi.live.partials import Partials

__all__ = ["ROWS_MAX", "Window"]

ROWS_MAX: Final = 100_000
_SLACK_MIN: Final = 16


class Window:
    """Not thread safe. ``rows`` are in stored form, of the columns that are shown."""

    __slots__ = (
        "_order",
        "_query",
        "_ranks",
        "_rows",
        "_sort_key",
        "changed",
        "dropped",
        "ends",
        "low_us",
        "partials",
        "slack",
        "whole",
    )

    def __init__(self, query: Query) -> None:
        self._query = query
        self._sort_key = query.sort_key()
        self._rows: dict[bytes, Row] = {}
        self._ranks: dict[bytes, tuple[Any, ...]] = {}  # the sort keys; each ends with the row's key
        self._order: list[tuple[Any, ...]] = []
        self.slack = max(_SLACK_MIN, (query.shown or 0) // 2)
        self.whole = True
        self.changed = True
        """Since whoever looks at it made it False."""
        self.partials: Partials | None = None
        """Of a rollup: what its rows are made of."""
        self.low_us: int | None = None
        """Of a rollup of the last time without partial results: where that begins."""
        self.ends = Ends()
        """Likewise, which slots it may end with."""
        self.dropped: list[bytes] = []
        """Keys that gave way to others; whoever indexes what is held empties it."""

    def let_go_of_partials(self) -> None:
        """What changes from then on is read again."""
        if self.partials is not None:
            self.low_us, self.ends, self.partials = self.partials.low_us, self.partials.ends, None

    def held(self) -> Iterable[bytes]:
        return self._rows.keys()

    def put(self, key: bytes, row: Row) -> bool:
        """The row matches and is like this now. Returns whether it is held."""
        before = self._ranks.get(key)
        rank = before if before is not None and not self._query.order else self._sort_key(row, key)
        names = self._query.columns
        shown = row if self._query.whole and len(row) == len(names) else {name: row[name] for name in names}
        if before is not None:
            if before == rank:
                if self._rows[key] != shown:
                    self._rows[key] = shown
                    self.changed = True
                return True
            self._take_out(key, before)
        if not self.whole and (not self._order or self._order[-1] < rank):
            return False
        self._rows[key], self._ranks[key] = shown, rank
        insort(self._order, rank)
        self.changed = True
        if self._query.shown is None or self._query.shown > ROWS_MAX:
            if len(self._order) > ROWS_MAX:
                raise ResourceExhausted(
                    f"a subscription to {self._query.scan!r} would hold more than {ROWS_MAX:,} rows, beyond the limit "
                    f"subscription_rows_max = {ROWS_MAX:,}: give it a limit, a prefix or a predicate",
                    limit="subscription_rows_max",
                    maximum=ROWS_MAX,
                )
        elif len(self._order) > self._query.shown + 2 * self.slack:
            keep = self._query.shown + self.slack
            for beyond in self._order[keep:]:
                del self._rows[beyond[-1]], self._ranks[beyond[-1]]
                self.dropped.append(beyond[-1])
            del self._order[keep:]
            self.whole = False
        return key in self._rows

    def remove(self, key: bytes) -> None:
        """The row is gone, or does not match any more. Harmless if it is not held."""
        before = self._ranks.get(key)
        if before is not None:
            self._take_out(key, before)

    def _take_out(self, key: bytes, rank: tuple[Any, ...]) -> None:
        del self._rows[key], self._ranks[key]
        del self._order[bisect_left(self._order, rank)]
        self.changed = True

    @property
    def last(self) -> tuple[Any, ...] | None:
        """The place in the order of the last row that is held, if others may lie beyond it."""
        return None if self.whole or not self._order else self._order[-1]

    @property
    def short(self) -> bool:
        """More is to be shown than is known."""
        return not self.whole and len(self._order) < (self._query.shown or 0)

    def state(self) -> list[Keyed]:
        """The rows that are shown, in order."""
        ranks = self._order[self._query.offset : self._query.shown]
        return [(rank[-1], self._rows[rank[-1]]) for rank in ranks]
