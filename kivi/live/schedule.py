"""A schedule: which subscription is to be looked at when."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection
from typing import Final

from kivi.live.lives import Live

__all__ = ["Schedule"]

_SPARE: Final = 1_024


class Schedule:
    """Subscriptions by when they are to be looked at: each once, at the first of the moments that were named."""

    def __init__(self, everybody: Collection[Live]) -> None:
        self._everybody = everybody
        self._entries: list[tuple[float, int, Live]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, live: Live, at: float) -> None:
        """It is to be looked at then, if not before."""
        if live.scheduled_at is not None and live.scheduled_at <= at:
            return
        live.scheduled_at = at
        heapq.heappush(self._entries, (at, next(self._numbers), live))
        if len(self._entries) > 2 * len(self._everybody) + _SPARE:  # most are about what was told or closed since
            every = ((one.scheduled_at, next(self._numbers), one) for one in tuple(self._everybody))
            self._entries = [(at, number, one) for at, number, one in every if at is not None]
            heapq.heapify(self._entries)

    def due(self, now: float) -> list[Live]:
        """Takes out the subscriptions whose moment has come."""
        found = []
        while self._entries and self._entries[0][0] <= now:
            at, _, live = heapq.heappop(self._entries)
            if at == live.scheduled_at:
                live.scheduled_at = None
                found.append(live)
        return found

    @property
    def next_at(self) -> float | None:
        """The first moment."""
        return self._entries[0][0] if self._entries else None
