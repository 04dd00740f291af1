"""Which nodes of a cluster read what of a sharded table: its *shares*.

::

    driver   one snapshot -> nodes, and the shards of each -> shares: sets of shards, each with the nodes that hold it
    task     its share, of the same snapshot, at a node that holds it -> the rows of these shards that lie there

**Invariant.** Shares are sets of shards that have no shard in common, and together are all shards. The node that reads
one leaves out rows of all others. So whoever reads each of them once, at one snapshot, has each row once; where they
are read, and who holds them by then, decides how far rows travel, and never which rows there are.

A node that has died, and a shard that has moved since, are found by the task: it goes to another node, which answers
with what it holds and asks others for the rest (rows and events), or says who can answer (commits after an offset, of
which a node tells what it holds). What one node cannot answer any more is divided again, into shares of its own.

A table that is not sharded, or of which every node holds everything, is one share without nodes: it is read at the node
that the client is connected to. Shards that no node which is reached from here holds are a share without nodes, too:
that node asks others for their rows, or says that nobody holds them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Final, TypeVar

from kivi.client.database import reached_first
from kivi.errors import InvalidArgument, Unavailable

if TYPE_CHECKING:
    from kivi.client.database import Database
    from kivi.model.changes import TailPoints

__all__ = ["EVERYTHING", "Share", "in_turn", "joined", "shares"]

T = TypeVar("T")
_SHARDS: Final = 64
_ALL: Final = (1 << _SHARDS) - 1


@dataclass(frozen=True, slots=True)
class Share:
    """``shards``: a bit for each; None: the whole table, at a node that has all of it. ``nodes``: the addresses of
    those that held all of them when this was said, the one first that is to read them."""

    shards: int | None = None
    nodes: tuple[str, ...] = ()

    def elsewhere(self) -> Share:
        """To be read at the next one of the nodes; in the end at the node that the client is connected to."""
        return replace(self, nodes=self.nodes[1:])

    def again(self, db: Database) -> list[Share]:
        """The same shards, as they are to be read now."""
        return [self] if self == EVERYTHING else shares(db, _ALL if self.shards is None else self.shards)


EVERYTHING: Final = Share()


def shares(db: Database, among: int = _ALL) -> list[Share]:
    """Of a sharded table, or of these shards of it: as few scans that leave out rows as can be told, by as many nodes
    as that allows, which are reached from here. Raises what asking for the cluster raises."""
    everything = [EVERYTHING if among == _ALL else Share(among)]
    try:
        nodes = db.cluster_status()["nodes"]
    except InvalidArgument:  # a single server
        return everything
    nodes = sorted(nodes, key=lambda one: -one["silent_s"])  # of those that had one address the last one is there
    if all(_parsed(one["shards"]) == _ALL for one in nodes if one["state"] in ("live", "silent")):
        return everything
    held = {one["address"]: _parsed(one["shards"]) for one in nodes if one["state"] == "live" and one["address"]}
    found, left = list[Share](), among

    def waste(address: str) -> tuple[float, int, float]:
        mine = held[address]
        return -(mine & left).bit_count() / mine.bit_count(), mine.bit_count(), random.random()

    while left:
        best = min((address for address, mine in held.items() if mine & left), key=waste, default=None)
        if best is None:
            found.append(Share(left))
            break
        if reached_first(db, [best]) is None:
            del held[best]
            continue
        part = held[best] & left
        others = [address for address, mine in held.items() if address != best and not part & ~mine]
        found.append(Share(None if part == _ALL else part, (best, *others)))
        left &= ~part
    return found


def in_turn(parts: Iterable[Sequence[T]]) -> list[T]:
    """The first of each, the second of each, and so on: Spark runs tasks in their order, and no node is to wait."""
    return [
        part for at in zip_longest(*([[one] for one in part] for part in parts), fillvalue=[]) for part in chain(*at)
    ]


def joined(found: Sequence[TailPoints]) -> TailPoints:
    """What the nodes of all shares say of one table, as of one timestamp. Its only point is the first one of them, if
    there is one. Raises Unavailable if the table was made again meanwhile."""
    if len({one.table_id for one in found}) > 1:
        raise Unavailable("the table was made again while nodes were asked for its commits: ask again")
    first = min((one.points[0] for one in found if one.points), default=None)
    return replace(
        found[0],
        points=() if first is None else (first,),
        last=max(one.last for one in found),
        watermark=min(one.watermark for one in found),
        kept_since=max(one.kept_since for one in found),
    )


def _parsed(shown: str) -> int:
    """The set that a node's status tells, like 0-15,40. (``kivi.log.shards`` does this too, and is not for clients.)"""
    found = 0
    for part in shown.split(",") if shown[:1].isdigit() else ():
        low, _, high = part.partition("-")
        for shard in range(int(low), int(high or low) + 1):
            found |= 1 << shard
    return found
