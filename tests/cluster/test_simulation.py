"""Simulated clusters: many short histories, each by a seed of its own, which fails again as it failed."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from typing import Any
from unittest.mock import patch

import pytest

from kivi.errors import SnapshotTooOld, Unavailable
from kivi.log.replicated import ReplicatedLog
from tests.cluster.simulation import Simulation
from tests.oracle import Mismatch, Read
from tests.seeds import seeds, stories

STEPS = 500


@pytest.mark.parametrize("seed", seeds(4, 7, 18, *stories(2, 3), night=19))
def test_every_read_on_every_node_is_the_replay_of_the_log(seed: int) -> None:
    simulation = Simulation(seed)
    simulation.run(STEPS)
    simulation.finish()
    assert simulation.counted["commits"] > 10
    assert simulation.counted["raised"] or simulation.counted["retracted"]


class Renewing(Simulation):
    """Nodes are lost and begun anew all the time, and the log is truncated as far as may be."""

    STEPS = (
        ("pump", 60), ("write", 8), ("append_each", 8), ("retry", 2), ("look", 3), ("fold", 12), ("kill", 0.5),
        ("renew", 2), ("live", 12), ("truncate", 12), ("evict", 8),
    )  # fmt: skip


@pytest.mark.parametrize("seed", seeds(1, *stories(3), night=6))
def test_the_log_is_kept_for_whoever_needs_it(seed: int) -> None:
    simulation = Renewing(seed)
    simulation.run(STEPS)
    simulation.finish()
    assert simulation.servers.first > 5, "the log was truncated"


class Retracting(Simulation):
    """Events are appended and removed all the time, on nodes that fold, die and begin anew meanwhile."""

    STEPS = (
        ("pump", 60), ("append_each", 20), ("retract", 6), ("work", 3), ("commit", 2), ("begin", 2), ("retry", 6),
        ("look", 3), ("fold", 12), ("kill", 1.5), ("stop", 0.5), ("renew", 0.6), ("live", 4), ("define", 0.3),
        ("export", 4),
    )  # fmt: skip


@pytest.mark.parametrize("seed", seeds(7, *stories(13), night=14))
def test_a_retraction_has_what_came_before_it_in_the_log(seed: int) -> None:
    simulation = Retracting(seed)
    simulation.run(STEPS // 2)
    simulation.finish()
    assert simulation.counted["retracted"]


class Guarding(Simulation):
    """Rows of an aggregate are guarded beside appends of their events, on nodes that die and begin anew meanwhile."""

    KINDS = ("guard", "guard", "put", "append")
    STEPS = (
        ("pump", 60), ("begin", 14), ("work", 24), ("commit", 16), ("append_each", 2), ("retry", 6), ("retract", 0.5),
        ("fold", 6), ("kill", 1.5), ("stop", 0.5), ("renew", 0.6), ("live", 4), ("look", 2),
    )  # fmt: skip

    def _appended(self) -> list[dict[str, Any]]:
        """Of one row, and now and then so many that its deltas are a run."""
        return [self._event()] * self.rng.choice((1, 1, 1, 40))


@pytest.mark.parametrize("watched_us", [300_000, 600_000_000])
@pytest.mark.parametrize("seed", [0, *stories(2)])
def test_a_guard_on_a_row_of_an_aggregate_misses_no_append(seed: int, watched_us: int) -> None:
    with patch("kivi.mvcc.touches.WATCHED_US", watched_us):
        simulation = Guarding(seed)
        simulation.run(STEPS)
        simulation.finish()
    assert simulation.counted["guards"] and simulation.counted["guards refused"]


class Moments(Simulation):
    """Clients ask nodes, which may be behind, for what was there at a moment: a little while ago, now, and later."""

    STEPS = (*Simulation.STEPS, ("moment", 12))

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.found: list[tuple[int, int, str]] = []
        """Moments that were over, and the snapshots that they were answered with."""

    def do_moment(self) -> None:
        if (node := self._serving()) is None or node.store is None:
            return
        moment_us = self.now_us - self.rng.choice((0, 1_000, 20_000, 200_000, 2_000_000, -50_000))
        acknowledged, timeout_s = self.acknowledged, self.rng.choice((0.0, 0.5))
        try:
            with self._waiting_for(node):
                lease = node.store.snapshots.begin(as_of_us=moment_us, timeout_s=timeout_s)
        except (Unavailable, SnapshotTooOld) as error:
            self.note(f"moment {type(error).__name__}")
            return
        node.store.snapshots.release(lease)
        if moment_us < node.log.last_time_us:
            self.found.append((moment_us, lease.ts, f"node {node.id}"))
            self.counted["over"] += 1
        elif lease.ts < acknowledged:
            raise Mismatch(f"as_of: node {node.id} answers {lease.ts} for now, {acknowledged} was acknowledged before")
        else:
            self.counted["now"] += 1

    def finish(self) -> None:
        super().finish()
        for node in self.nodes:
            assert node.store is not None
            for moment_us, ts, who in self.found:
                if (meant := node.store.timeline.at(moment_us)) != ts:
                    raise Mismatch(f"as_of: {who} answered {ts} for {moment_us}, which is {meant}")


@pytest.mark.parametrize("seed", [1, 3, *stories(2)])
def test_a_moment_means_one_snapshot_whatever_node_is_asked(seed: int) -> None:
    """What a node has yet to hear of is waited for, or the answer is refused; it is never left out."""
    simulation = Moments(seed)
    simulation.run(STEPS)
    simulation.finish()
    assert simulation.counted["over"] > 5 and simulation.counted["now"]


@pytest.mark.story
@pytest.mark.parametrize(("kind", "seed"), [(Simulation, 1), (Retracting, 2)])
def test_a_seed_gives_the_same_history_again(kind: type[Simulation], seed: int) -> None:
    """Also on a machine on which a moment takes a minute."""
    histories = []
    for pace_s in (0.0, 60.0):
        real, asked = time.monotonic, itertools.count()
        with contextlib.ExitStack() as slowly:
            for clock in ("monotonic", "perf_counter", "time") if pace_s else ():
                slowly.enter_context(patch.object(time, clock, lambda: real() + pace_s * next(asked)))  # noqa: B023
            simulation = kind(seed)
            simulation.run(STEPS // 2)
            simulation.finish()
        histories.append(simulation.history)
    assert histories[0] == histories[1]


def test_a_node_reads_no_rows_of_a_definition_that_it_has_yet_to_hear_of_again() -> None:
    """Rows of before are folded as their table is defined by then, and the node is killed before base comes to that."""
    simulation = Simulation(2)
    node = simulation.nodes[0]
    assert node.store is not None
    with simulation._time():
        with simulation._waiting_for(node):
            with node.db.transaction() as tx:
                tx.put("t", (1,), v=7)
            node.store.leases.stay(node.db.watermark())
            node.db.alter_table("t", {"w": "int64"})
            node.store.consolidate()
        node.engine.flush()
        node.kill()
        node.start()
        assert not node.serves
        simulation._until(lambda: node.serves, node)
        with node.db.snapshot() as snap:
            assert snap.get("t", (1,)) == {"id": 1, "n": 0, "hi": None, "v": 7, "w": None}


def test_a_log_that_has_lost_what_it_acknowledged_takes_no_writes_and_reads_go_on() -> None:
    simulation = Simulation(2)
    simulation.run(200)
    simulation.finish()
    simulation.servers.lose(3)
    for node in simulation.nodes:
        node.pump()
        with pytest.raises(Unavailable, match="reseed"):
            node.log.check_writable()
        with node.db.snapshot() as snap:
            assert snap.ts == node.log.place.number
            assert node.scan(snap, "t") == simulation.oracle.state(snap.ts).answer(Read(snap.ts, "t", None, None))


def test_what_a_node_needs_is_asked_while_stages_leave_the_log() -> None:
    """By a thread that says it to the others, while another one has folded what was staged."""
    log, count = Simulation(2).nodes[0].log, 2_000
    log._stages = {number: ((number,), 0) for number in range(1, count)}

    def fold() -> None:
        for below in range(count + 1):
            log.truncate(below)

    folding = threading.Thread(target=fold)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        folding.start()
        while folding.is_alive():
            assert log.needed <= 1
    finally:
        sys.setswitchinterval(before)
        folding.join()
    assert not log._stages


def test_a_node_that_has_saved_the_place_where_it_noticed_a_loss_notices_it_again() -> None:
    simulation = Simulation(2)
    simulation.run(50)
    simulation.finish()
    log = simulation.nodes[0].log
    at, saved = log.place, log.save(log.last)
    for hash_, is_lost in ((at.hash, False), (bytes(len(at.hash)), True)):
        again = ReplicatedLog(
            log._stream, generation=log.generation, node=log.node, boot=2, saved=saved, reached=(at.sequence, hash_)
        )
        assert (again.place, again.lost_suffix is not None) == (at, is_lost)
