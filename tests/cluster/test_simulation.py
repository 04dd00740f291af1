"""Simulated clusters: many short histories, each by a seed of its own, which fails again as it failed."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from kivi.errors import Unavailable
from tests.cluster.simulation import Simulation
from tests.oracle import Read

SEEDS = range(12)
STEPS = 500


@pytest.mark.parametrize("seed", SEEDS)
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


@pytest.mark.parametrize("seed", range(6))
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


@pytest.mark.parametrize("seed", [1, 2, 3])
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
@pytest.mark.parametrize("seed", [0, 2])
def test_a_guard_on_a_row_of_an_aggregate_misses_no_append(seed: int, watched_us: int) -> None:
    with patch("kivi.mvcc.touches.WATCHED_US", watched_us):
        simulation = Guarding(seed)
        simulation.run(STEPS)
        simulation.finish()
    assert simulation.counted["guards"] and simulation.counted["guards refused"]


def test_a_seed_gives_the_same_history_again() -> None:
    histories = []
    for _ in range(2):
        simulation = Simulation(1)
        simulation.run(STEPS)
        histories.append(simulation.history)
    assert histories[0] == histories[1]


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
