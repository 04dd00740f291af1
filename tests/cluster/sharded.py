"""Simulated clusters whose nodes hold some of the shards, give some up, and begin with copies that hold less."""

from __future__ import annotations

import functools
import operator
from typing import Any
from unittest.mock import patch

from kivi.encoding.shards import shard_of
from kivi.log.members import State
from kivi.log.shards import EVERY, SHARDS, shown_shards
from tests.cluster.simulation import VALUES, Node, Simulation
from tests.oracle import Mismatch, Op

__all__ = ["Sharded"]


class Sharded(Simulation):
    """Every value of the column by which events are sharded is of another shard. Small appends are cut as well."""

    SHARD_BY = ("a",)
    STEPS = (*(step for step in Simulation.STEPS if step[0] != "retract"), ("narrow", 3), ("many", 3))

    def run(self, steps: int) -> None:
        with patch("kivi.store.shards._CUT_ROWS", 2):
            super().run(steps)

    def finish(self) -> None:
        with patch("kivi.store.shards._CUT_ROWS", 2):
            super().finish()
        if EVERY & ~functools.reduce(operator.or_, [node.held for node in self.nodes]):
            raise Mismatch(f"some shards have no node: {[shown_shards(node.held) for node in self.nodes]}")

    def _may_be_lost(self, node: Node) -> bool:
        """Whether others have what it has, are not about to give it up, and are not left behind; and nothing that it
        has said is on its way, and would make others rely on it."""
        others = [one for one in self.nodes if one is not node and one.id not in self.evicted]
        held = functools.reduce(operator.or_, [one.held for one in others if one.held == one.wanted], 0)
        return held == EVERY and not node.log.proposed

    def do_narrow(self) -> None:
        """A node is to hold less, if others hold what it gives up."""
        node = self._serving()
        if node is None or node.store is None or node.wanted != node.held:
            return
        known = [node.log.members.find(id_) for id_ in self.lost]
        if not all(member is not None and member.state is State.EVICTED for member in known):
            return
        schema = node.store.table("e")
        shards = [1 << shard_of(schema, (a,), SHARDS) for a in VALUES]
        given_up = sum(self.rng.sample(shards, self.rng.randint(1, 2)))
        node.wanted = node.held & ~given_up
        node.say_live()
        self.note(f"narrow {node.id}")

    def do_many(self) -> None:
        """A transaction of so many events that its deltas are a run."""
        node = self._serving()
        if node is None or node.store is None:
            return
        events: list[dict[str, Any]] = [self._event() for _ in range(self.rng.randint(33, 60))]
        tx = node.db.transaction()
        tx.append("e", events)
        token = f"token {next(self.attempts)}"
        txn = tx._txn
        assert txn is not None
        self._send(node, token, [Op("append", "e", events=events)], None if txn.blind else txn.start_ts, txn)
