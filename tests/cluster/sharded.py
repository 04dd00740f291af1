"""Simulated clusters whose nodes hold some of the shards, give some up, and begin with copies that hold less."""

from __future__ import annotations

import functools
import operator
from typing import Any, cast
from unittest.mock import patch

from kivi.encoding.shards import shard_of
from kivi.errors import DiskFull, NotFound, SnapshotTooOld, Unavailable
from kivi.log.members import State
from kivi.log.moves import Move, asked_entry, cancelled_entry, there_entry
from kivi.log.shards import EVERY, SHARDS, shown_shards
from kivi.store.moving import is_needed_below, take
from tests.cluster.simulation import VALUES, Node, Simulation
from tests.oracle import Mismatch, Op

__all__ = ["Sharded"]


class Killed(Exception):
    pass


class Sharded(Simulation):
    """Every value of the column by which events are sharded is of another shard. Small appends are cut as well."""

    SHARD_BY = ("a",)
    STEPS = (
        *(step for step in Simulation.STEPS if step[0] != "retract"),
        ("narrow", 3), ("many", 3),
    )  # fmt: skip
    MEANWHILE = ("pump", "pump", "many", "append_each", "commit", "begin", "work", "fold", "look", "snapshot", "live")

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
        if not self._none_is_lost(node):
            return
        schema = node.store.table("e")
        shards = [1 << shard_of(schema, (a,), SHARDS) for a in VALUES]
        given_up = sum(self.rng.sample(shards, self.rng.randint(1, 2)))
        node.wanted = node.held & ~given_up
        node.say_live()
        self.note(f"narrow {node.id}")

    # -- moves ------------------------------------------------------------------------------------------

    def do_ask(self) -> None:
        """Somebody asks a node for a move of some shards from one node to another, or to both."""
        node = self._serving()
        if node is None or node.store is None or len(node.log.members.moves) > 1:
            return
        schema = node.store.table("e")
        every = [1 << shard_of(schema, (a,), SHARDS) for a in VALUES]
        found = [(there, shards) for there in self.nodes for shards in every if not shards & there.held]
        if not found:
            return
        there, shards = self.rng.choice(found)
        sources = [one.id for one in self.nodes if one.held & shards]
        given = self.rng.choice(sources) if sources and self.rng.random() < 0.7 else None
        move = Move(f"move {next(self.attempts)}", shards, there.id, given)
        if node.log.members.why_not(move) is not None:
            return
        node.say(asked_entry(move))
        self.note(f"asked {move}")

    def do_take(self) -> None:
        """The new owner copies the shards while others go on, and may die over it."""
        for node in self.nodes:
            moves = [move for move in node.log.members.moves.values() if move.to == node.id and not move.since]
            if not node.serves or not moves or self.copying or node.wanted != node.held:
                continue
            if not moves[0].shards & ~node.held:  # it has said so, and that comes
                continue
            self._take(node, moves[0])
            return

    def _take(self, node: Node, move: Move) -> None:
        store = node.store
        assert store is not None

        def hold(held: int, since: int) -> None:
            rows = [(cts, some & node.held) for cts, some in node.since if some & node.held]
            node.since = store.shards.since = (*rows, (since, held & ~node.held))
            node.held = node.wanted = store.shards.held = held

        def check() -> None:
            self.now_us += self.rng.randint(1, 5_000)
            self._happen()
            if node.store is not store or node.log.failed is not None:
                raise Unavailable("it was stopped")
            if self.rng.random() < 0.04:
                raise Killed
            self.do_append_each()
            getattr(self, f"do_{self.rng.choice(self.MEANWHILE)}")()
            self._pump_all()
            if self.rng.random() < 0.5:
                store.consolidate()

        if self.rng.random() < 0.7 and len(node.snapshots) < 4:  # one that is open before, and read after
            node.snapshots.append(node.db.snapshot())
            for _ in range(3):
                self.do_many()
                self.do_append_each()
                self._pump_all()
        if not node.serves or node.store is not store:
            return
        self.copying = True
        node.client.calm = True
        try:
            with self._waiting_for(node):
                since = take(cast(Any, store), move.shards, hold=hold, check=check)
        except Killed:
            self.note("killed while taking")
            if node.store is store:
                node.kill()
                self.after(self.rng.randint(10_000, 1_000_000), lambda: self._back(node))
        except (Unavailable, SnapshotTooOld, NotFound, DiskFull) as error:
            self.note(f"untaken {type(error).__name__}")
        else:
            self.note(f"taken {move} {since}")
            self._pump_all()
            for snap in node.snapshots:
                self._look(node, snap)
            node.say(there_entry(move.id, since))
        finally:
            self.copying = False
            node.client.calm = False

    def _pump_all(self) -> None:
        for one in self.nodes:
            if one.runs:
                one.pump()

    def do_give(self) -> None:
        """An old owner gives up what the new one has, if nobody reads below."""
        for node in self.nodes:
            if not node.serves or node.store is None or node.wanted != node.held:
                continue
            for move in node.log.members.moves.values():
                if move.source == node.id and move.since and self._none_is_lost(node):
                    if is_needed_below(node.store, move.since):
                        self.note("needed below")
                        continue
                    node.wanted = node.held & ~move.shards
                    node.say_live()
                    self.note(f"give {move}")
                    return

    def do_cancel(self) -> None:
        node = self._serving()
        if node is not None and node.log.members.moves:
            node.say(cancelled_entry(self.rng.choice(list(node.log.members.moves))))

    def _none_is_lost(self, node: Node) -> bool:
        """Whether the log knows of every node that is gone for good."""
        known = [node.log.members.find(id_) for id_ in self.lost]
        return all(member is not None and member.state is State.EVICTED for member in known)

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


class Moving(Sharded):
    """Shards are moved all the time."""

    STEPS = (
        ("pump", 60), ("begin", 6), ("work", 10), ("commit", 8), ("append_each", 6), ("many", 6), ("retry", 6),
        ("snapshot", 5), ("look", 10), ("fold", 6), ("pin", 1.5), ("read_at_pin", 4), ("live", 10), ("truncate", 2),
        ("kill", 0.6), ("stop", 0.3), ("renew", 0.4), ("evict", 0.3), ("define", 0.5),
        ("narrow", 5), ("ask", 8), ("take", 8), ("give", 8), ("cancel", 0.3),
    )  # fmt: skip
