"""Simulated clusters: many short histories, each by a seed of its own, which fails again as it failed."""

from __future__ import annotations

import pytest

from tests.cluster.simulation import Simulation

SEEDS = range(12)
STEPS = 400


@pytest.mark.parametrize("seed", SEEDS)
def test_every_read_on_every_node_is_the_replay_of_the_log(seed: int) -> None:
    simulation = Simulation(seed)
    simulation.run(STEPS)
    simulation.finish()
    assert simulation.counted["commits"] > 20


def test_a_seed_gives_the_same_history_again() -> None:
    histories = []
    for _ in range(2):
        simulation = Simulation(1)
        simulation.run(STEPS)
        histories.append(simulation.history)
    assert histories[0] == histories[1]
