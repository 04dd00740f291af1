"""The connections of durable subscriptions, and the events that one of a user's need not be handed.

See ``kivi.live.durable`` for what is promised. Everything here is called with the hub's lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from kivi.errors import KiviError, OutOfRange, StoreInUse
from kivi.live.durable import DurableSubscriptions
from kivi.live.lives import EventsLive
from kivi.model.changes import COMMIT_TS
from kivi.model.expressions import Expr, matches
from kivi.model.subscriptions import Change, Durable, Row

__all__ = ["Connections"]


class Connections:
    """By user and name."""

    def __init__(self, durable: DurableSubscriptions) -> None:
        self._durable = durable
        self._connected: dict[tuple[str, str], EventsLive] = {}
        self._unfinished: dict[tuple[str, str], tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._connected)

    def take_over(self, live: EventsLive, durable: Durable) -> EventsLive | None:
        """From now on the subscription is this connection's. Returns the one that had it, if that is still open."""
        before = self._connected.get(durable[:2])
        if before is not None:
            self._left(before, durable)
        self._connected[durable[:2]] = live
        live.again = self._unfinished.pop(durable[:2], live.again)
        if before is None or before.closed:
            return None
        before.failure = StoreInUse(f"subscription {durable.name!r} was taken over by another connection")
        return before

    def left(self, live: EventsLive) -> None:
        """The connection has ended."""
        if live.durable is not None and self._connected.get(live.durable[:2]) is live:
            self._left(live, live.durable)

    def _left(self, live: EventsLive, durable: Durable) -> None:
        """It gets again what it was handed and has not acknowledged, since others passed over that."""
        del self._connected[durable[:2]]
        if live.unseen and live.given:
            acknowledged = 0
            with contextlib.suppress(KiviError):
                acknowledged = self._durable.position(durable.user, durable.name)
            if acknowledged < live.given:
                self._unfinished[durable[:2]] = acknowledged, live.given

    def unseen(self, live: EventsLive, changes: Sequence[Change]) -> list[Change]:
        """Without what others of its user select and have been handed. Called as it is handed out."""
        durable = live.durable
        assert durable is not None
        others = []
        for other, where in self._durable.others(durable.user, durable.name, live.schema):
            connected = self._connected.get((durable.user, other.name))
            handed = max(other.ts, connected.handed if connected is not None else 0)
            others.append((where, other.since, handed))
        kept = []
        nothing: Row = dict.fromkeys(live.columns)
        for change in changes:
            assert change.row is not None
            row = nothing | change.row  # which was read before an alteration, perhaps
            cts = row[COMMIT_TS]
            if live.again[0] < cts <= live.again[1] or not any(
                since < cts <= handed and (where is None or _selects(where, row)) for where, since, handed in others
            ):
                kept.append(change)
        return kept


def _selects(where: Expr, row: Mapping[str, Any]) -> bool:
    """Whether another subscription was handed this event. It was not if its predicate fails there, which ended it."""
    try:
        return matches(where, row)
    except OutOfRange:
        return False
