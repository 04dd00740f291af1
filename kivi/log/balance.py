"""Which shards go where, so that nodes hold equally many and as little as possible is copied.

A *layout* says which nodes hold each shard. `balanced` finds the one in which every shard has so many copies, the loads
of the nodes differ by one at most, and the fewest shards come to a node that does not have them: no other layout like
that needs fewer. It is a flow of least cost, by successive shortest paths (Ahuja, Magnanti, Orlin, *Network Flows*,
chapter 9)::

    source --copies--> shard --1--> node --floor of the mean--> sink
                       costs 0 where      `---1--> spare --remainder--> sink
                       the node has it

`moves` brings the nodes there by moves (``kivi.log.moves``) that are valid one after the other. A move gives a shard up
only when its new owner has it, so a shard never has fewer owners than it had, unless it had more than it is to have.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kivi.errors import InvalidArgument
from kivi.log.moves import Move
from kivi.log.shards import EVERY, SHARDS

__all__ = ["balanced", "moves"]

_FAR: Final = 2**30


class _Flow:
    """A network of edges with room and cost, each with its reverse behind it. Vertices are numbers."""

    def __init__(self, vertices: int) -> None:
        self.of: list[list[int]] = [[] for _ in range(vertices)]
        self.to, self.room, self.cost = list[int](), list[int](), list[int]()

    def edge(self, tail: int, head: int, room: int, cost: int = 0) -> int:
        for start, end, free, price in ((tail, head, room, cost), (head, tail, 0, -cost)):
            self.of[start].append(len(self.to))
            self.to.append(end)
            self.room.append(free)
            self.cost.append(price)
        return len(self.to) - 2

    def push(self, source: int, sink: int) -> bool:
        """One unit more, by a cheapest way; False if there is none."""
        far, by, waiting = [_FAR] * len(self.of), [-1] * len(self.of), deque([source])
        far[source] = 0
        while waiting:  # Bellman and Ford, from a queue: reverse edges have negative costs
            tail = waiting.popleft()
            for edge in self.of[tail]:
                head, length = self.to[edge], far[tail] + self.cost[edge]
                if self.room[edge] and length < far[head]:
                    far[head], by[head] = length, edge
                    if head not in waiting:
                        waiting.append(head)
        if by[sink] < 0:
            return False
        at = sink
        while at != source:
            self.room[by[at]] -= 1
            self.room[by[at] ^ 1] += 1
            at = self.to[by[at] ^ 1]
        return True


def balanced(held: Mapping[int, int], nodes: Sequence[int], copies: int) -> dict[int, int]:
    """What each of these nodes is to hold; ``held``: what nodes hold now. Equal arguments give equal layouts.

    Raises InvalidArgument if there are fewer nodes than copies.
    """
    if not 1 <= copies <= len(nodes):
        raise InvalidArgument(
            f"{copies} copies of each shard need as many nodes, and there are {len(nodes)} to hold them"
        )
    least, rest = divmod(SHARDS * copies, len(nodes))
    source, spare, sink = SHARDS + len(nodes), SHARDS + len(nodes) + 1, SHARDS + len(nodes) + 2
    flow = _Flow(sink + 1)
    edges = {}
    for shard in range(SHARDS):
        flow.edge(source, shard, copies)
        for at, node in enumerate(nodes):
            edges[shard, node] = flow.edge(shard, SHARDS + at, 1, int(not held.get(node, 0) >> shard & 1))
    for at in range(len(nodes)):
        flow.edge(SHARDS + at, sink, least)
        flow.edge(SHARDS + at, spare, 1)
    flow.edge(spare, sink, rest)
    while flow.push(source, sink):
        pass
    wanted = dict.fromkeys(nodes, 0)
    for (shard, node), edge in edges.items():
        wanted[node] |= 0 if flow.room[edge] else 1 << shard
    return wanted


def moves(held: Mapping[int, int], wanted: Mapping[int, int]) -> Iterator[Move]:
    """From what nodes hold to what they are to hold, those of one pair of nodes together. Others are left as they are.

    A move whose shards are in an earlier one, or whose new owner would hold all shards on the way, comes after it.
    """
    held = dict(held)
    while found := _next(held, wanted):
        for (to, source), shards in found.items():
            held[to] |= shards
            if source is not None:
                held[source] &= ~shards
            yield Move("", shards, to, source)


def _next(held: Mapping[int, int], wanted: Mapping[int, int]) -> dict[tuple[int, int | None], int]:
    """Moves of different shards, by new and old owner: of each shard one, if it needs any."""
    found: dict[tuple[int, int | None], int] = defaultdict(int)
    coming = dict.fromkeys(wanted, 0)
    for shard in range(SHARDS):
        bit = 1 << shard
        taking = [node for node in wanted if bit & wanted[node] & ~held[node]]
        giving = [node for node in wanted if bit & held[node] & ~wanted[node]]
        if taking:
            there = [node for node in taking if held[node] | coming[node] | bit != EVERY]
        else:
            there = [node for node in wanted if giving and bit & wanted[node]]
        if there:
            coming[there[0]] |= bit
            found[there[0], giving[0] if giving else None] |= bit
    return found
