"""Moves of shards from one node of a cluster to another, as the log's prefix knows them.

::

    asked       some node wrote: the shards go to a node, and from another one, or from nobody (then both keep them)
    there       the new owner has them, as of ``since``, and all that came after it: it holds them from this entry on
    over        the new owner has said itself that it holds them, and the old one no longer does; or one of them is gone
    cancelled   by an entry, while it was only asked

A move is a function of the prefix, so whoever dies in the middle takes it up again when it is back, and all nodes agree
at every place of the log on who holds what: nothing is moved in part. Shards are in one move at a time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kivi.log import Entry, Kind
from kivi.log.features import MOVES
from kivi.log.shards import parse_shards, shown_shards

__all__ = ["Move", "asked_entry", "cancelled_entry", "there_entry"]


@dataclass(frozen=True, slots=True)
class Move:
    """``source`` gives the shards up; None: nobody does. ``since``: the commit timestamp from which the node ``to`` has
    their rows; 0: it has not. ``told``: the node ``to`` has said so itself: what it said before may come later."""

    id: str
    shards: int
    to: int
    source: int | None = None
    since: int = 0
    told: bool = False

    @classmethod
    def of(cls, saved: list[Any]) -> Move:
        """What ``saved`` gave. Raises ValueError, TypeError, InvalidArgument."""
        id_, shards, to, source, since, *told = saved
        return cls(str(id_), parse_shards(shards), int(to), source, int(since), bool(told))

    def saved(self) -> list[Any]:
        return [self.id, shown_shards(self.shards), self.to, self.source, self.since, *[True] * self.told]


def asked_entry(move: Move) -> Entry:
    return _entry({"move": move.saved()})


def there_entry(id_: str, since: int) -> Entry:
    return _entry({"there": [id_, since]})


def cancelled_entry(id_: str) -> Entry:
    return _entry({"cancel": id_})


def _entry(content: dict[str, Any]) -> Entry:
    return Entry(Kind.MEMBER, (json.dumps(content).encode(),), 0, (MOVES,))
