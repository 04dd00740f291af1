"""Simulated clusters whose nodes hold some of the shards, give some up, and begin with copies that hold less."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, table_prefix
from kivi.encoding.shards import shard_of
from kivi.errors import DiskFull, FeatureOff, FormatTooNew, NotFound, SnapshotTooOld, Unavailable
from kivi.log.features import MOVES
from kivi.log.members import State
from kivi.log.moves import Move, asked_entry, cancelled_entry, there_entry
from kivi.log.shards import EVERY, SHARDS, shown_shards
from kivi.model.schema import TableSchema
from kivi.store.backfill import Progress
from kivi.store.moving import erase, is_needed_below, take
from kivi.store.shards import is_in
from tests.cluster.simulation import SETTINGS, VALUES, Node, Simulation
from tests.mvcc.world import MEASURES
from tests.oracle import Mismatch, Op

__all__ = ["Altering", "Moving", "Sharded"]


class Killed(Unavailable):
    """A node, over what it was doing."""


class Sharded(Simulation):
    """Every value of the column by which events are sharded is of another shard. Small appends are cut as well."""

    SHARD_BY = ("a",)
    STEPS = (
        *(step for step in Simulation.STEPS if step[0] != "retract"),
        ("narrow", 3), ("many", 3),
    )  # fmt: skip
    MEANWHILE: tuple[str, ...] = (
        "pump", "pump", "many", "append_each", "commit", "begin", "work", "fold", "look", "snapshot", "live", "erase",
    )  # fmt: skip
    erasing = False

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
        if node is None or node.store is None or len(node.log.members.moves) > 1 or MOVES not in node.can:
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
        if self._needs(node, MOVES):
            node.say(asked_entry(move))
            self.note(f"asked {move}")

    def _needs(self, node: Node, feature: str) -> bool:
        """Whether it has been switched on, by this gateway or another one."""
        assert node.store is not None
        node.client.calm = True
        try:
            with self._waiting_for(node):
                node.store.committer.need([feature])
        except (FeatureOff, Unavailable) as error:
            self.counted[f"{type(error).__name__} {feature}"] += 1
            return False
        finally:
            node.client.calm = False
        return node.serves

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

        self.calm = self.rng.random() < 0.7
        check = self._meanwhile(node, -1 if self.calm else self.rng.randint(1, 20))

        def hold(held: int, since: int) -> None:
            rows = [(cts, some & node.held) for cts, some in node.since if some & node.held]
            node.since = store.shards.since = (*rows, (since, held & ~node.held))
            node.held = node.wanted = store.shards.held = held

        if self.rng.random() < 0.7 and len(node.snapshots) < 4:  # one that is open before, and read after
            node.snapshots.append(node.db.snapshot())
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
                self._kill_over(node)
        except (Unavailable, SnapshotTooOld, NotFound, DiskFull, FormatTooNew) as error:
            self.note(f"untaken {type(error).__name__}")
        else:
            self.note(f"taken {move} {since}")
            self._pump_all()
            for snap in node.snapshots:
                self._look(node, snap)
            node.say(there_entry(move.id, since))
        finally:
            self.copying = self.calm = False
            node.client.calm = False

    def _meanwhile(self, node: Node, lives: int) -> Callable[[], None]:
        """What others do while a node copies shards, or erases them, and that it dies over it."""
        store = node.store
        assert store is not None

        def check() -> None:
            nonlocal lives
            self.now_us += self.rng.randint(1, 5_000)
            self._happen()
            if node.store is not store or node.log.failed is not None:
                raise Unavailable("it was stopped")
            lives -= 1
            if not lives:
                raise Killed
            self.do_append_each()
            getattr(self, f"do_{self.rng.choice(self.MEANWHILE)}")()
            self._pump_all()
            if self.rng.random() < 0.5:
                store.consolidate()

        return check

    def do_erase(self) -> None:
        """A node erases what it does not hold any more, while others go on, and may die over it."""
        for node in self.nodes:
            if self.erasing or not node.serves or node.store is None or node.wanted != node.held:
                continue
            node.store.consolidate()
            if node.store.shards.taking or not (gone := node.remains.due(node.store)):
                continue
            self.erasing = True
            try:
                erase(cast(Any, node.store), gone, check=self._meanwhile(node, self.rng.choice((-1, -1, 1, 3, 8))))
            except Killed:
                self.note("killed while erasing")
                self._kill_over(node)
            except Unavailable:
                self.note("unerased")
            else:
                self.note(f"erased {gone}")
                self._check_erased(node, gone)
            finally:
                self.erasing = False
            return

    def _check_erased(self, node: Node, gone: int) -> None:
        """Nothing is left of it in base."""
        store = node.store
        assert store is not None
        for schema in (store.table("e"), store.table("high")):
            events = store.event_tables.of(schema.id)
            if events is None:
                continue
            with events.everything(store.consolidator.position) as view:
                found = {a for batch in view.scan(columns=["a"]) for a in batch["a"].to_pylist()}
            if any(gone >> shard_of(schema, (a,), SHARDS) & 1 for a in found):
                raise Mismatch(f"node {node.id} has erased {shown_shards(gone)}, and has events of {found}")
        for name in ("agg", "shares"):
            prefix = table_prefix(Space.ROW, store.table(name).id)
            for key, _ in store.engine.scan(prefix, prefix_end(prefix)):
                if is_in(store.table(name), key[len(prefix) :], gone):
                    raise Mismatch(f"node {node.id} has erased {shown_shards(gone)}, and has a row of {name}")

    def _kill_over(self, node: Node) -> None:
        if node.store is not None:
            node.kill()
            self.after(self.rng.randint(10_000, 1_000_000), lambda: self._back(node))

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
                        self._read_no_more_below(move.since)
                        continue
                    node.wanted = node.held & ~move.shards
                    node.say_live()
                    self.note(f"gave {move}")
                    return

    def _read_no_more_below(self, ts: int) -> None:
        """Most clients read once more at the snapshots that they have open, and close them, and what they have begun;
        pins end; nodes say so."""
        for one in [one for one in self.open if one.node.serves and one.store is one.node.store]:
            if one.tx.start_ts < ts and self.rng.random() < 0.8:
                self.open.remove(one)
                one.tx.rollback()
        for number in [number for number in self.pins if number < ts]:
            self._unpin(number)
        for node in self.nodes:
            for snap in [snap for snap in node.snapshots if snap.ts < ts and self.rng.random() < 0.8]:
                node.snapshots.remove(snap)
                if node.serves:
                    self._look(node, snap)
                    snap.close()
            if node.serves:
                node.say_live()

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
    """Shards are moved all the time: a while in which nothing goes wrong, but what kills a copy, and a while in which
    anything may, by turns."""

    QUIET: tuple[tuple[str, float], ...] = (
        ("pump", 60), ("begin", 6), ("work", 10), ("commit", 8), ("append_each", 6), ("many", 6), ("retry", 6),
        ("snapshot", 3), ("look", 10), ("fold", 6), ("pin", 1.5), ("read_at_pin", 4), ("live", 14), ("truncate", 2),
        ("narrow", 8), ("ask", 10), ("take", 10), ("give", 14), ("erase", 14), ("bury", 4),
    )  # fmt: skip
    ROUGH = (
        *QUIET, ("kill", 0.8), ("stop", 0.4), ("renew", 0.8), ("evict", 0.4), ("define", 0.8), ("cancel", 0.5),
    )  # fmt: skip
    PHASE = 65

    def run(self, steps: int) -> None:
        for i, at in enumerate(range(0, steps, self.PHASE)):
            self.STEPS = (self.QUIET, self.ROUGH)[i % 2]
            super().run(min(self.PHASE, steps - at))

    def do_bury(self) -> None:
        """Whoever operates the cluster says of a node whose disk is gone that it does not come back."""
        node = self._serving()
        found = [] if node is None else [node.log.members.find(id_) for id_ in sorted(self.lost)]
        for member in found:
            if node is not None and member is not None and member.state is State.LIVE:
                self.evicted.add(member.node)
                node.say(dataclasses.replace(member, state=State.EVICTED).entry())
                return


class Altering(Moving):
    """Aggregates are made, and measures added to them, by nodes that hold a part: others go on meanwhile, shards are
    moved, and who builds may die over it, stand still, or be taken for dead; then another one builds again."""

    QUIET = (*Moving.QUIET, ("define", 2), ("alter", 8), ("resume", 6))
    ROUGH = (*Moving.ROUGH, ("define", 1), ("alter", 8), ("resume", 6))
    MEANWHILE = (*Moving.MEANWHILE, "ask", "take", "give", "narrow", "resume", "alter")
    MOMENTS = 5
    """At about so many, while events are summed, others do something."""

    def run(self, steps: int) -> None:
        with self._time():
            self.do_define()
        super().run(steps)

    def _until(self, done: Callable[[], bool], node: Node) -> None:
        """Others append while a definition is on its way."""
        if self.building:
            self.do_append_each()
        super()._until(done, node)

    def do_define(self) -> None:
        """It is dropped when nothing is left to add."""
        later = [node.store.catalog.entered.by_name.get("later") for node in self.nodes if node.store is not None]
        if all(schema is None or schema.by_name.keys() >= MEASURES.keys() for schema in later):
            super().do_define()

    def do_alter(self) -> None:
        """A client adds measures to an aggregate of what is there."""
        if self.building or (node := self._serving()) is None or (store := node.store) is None:
            return
        schema = store.catalog.entered.by_name.get("later")
        left = [] if schema is None or schema.is_building else [name for name in MEASURES if name not in schema.by_name]
        if not left:
            return
        measures = {name: MEASURES[name] for name in self.rng.sample(left, min(len(left), self.rng.randint(1, 3)))}

        def alter(progress: Progress | None) -> None:
            store.alter_aggregate("later", measures, progress=progress)
            self._has_columns(store)

        held = node.held
        if self._built(node, alter):
            self.counted["altered"] += 1
            self.counted["altered, of several"] += held != EVERY
        self.note(f"alter {sorted(measures)} {node.id}")

    def do_resume(self) -> None:
        """What was left building another node builds, or the same one, also if somebody is still at it."""
        if self.building > 1 or (node := self._serving()) is None or (store := node.store) is None:
            return
        for group in store.backfill.unfinished():

            def build(progress: Progress | None, group: list[TableSchema] = group) -> None:
                store.backfill.build(group, progress, is_again=True)
                self._has_columns(store)

            if self._built(node, build):
                self.counted["resumed"] += 1
        self.note(f"resume {node.id}")

    def _progress(self, node: Node) -> Progress:
        check = self._meanwhile(node, self.rng.choice((-1, -1, -1, 2, 6)))

        def progress(done: int, total: int) -> None:
            if self.building > 1 or self.rng.random() * total > self.MOMENTS * SETTINGS.block_rows:
                return
            try:
                check()
            except Killed:
                self.note(f"killed while building {done}")
                self._kill_over(node)
                raise
            if self.rng.random() < 0.25:
                self.do_resume()
                raise SnapshotTooOld("it stood still for longer than its snapshot is kept")

        return progress
