"""A state machine against a dictionary of versions (R1 to R8, R11 to R17), see ``world``.

Two drivers of the same world: hypothesis, which shrinks what fails to a few steps, and a seeded scheduler, which is
denser. A failing seed reruns to the same history: ``scheduled(seed)``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.mvcc.world import World
from tests.seeds import AT_NIGHT

RANDOM = st.randoms(use_true_random=False)
BY_DAY = {"memory": (0, 1, 2, 3, 4, 6, 18, 19, 20, 21), "disk": (102, 108, 109)}
"""They catch every planted bug."""
BY_NIGHT = {"memory": range(100), "disk": range(102, 130)}
STEPS = 100
THIRTY_HAVE = {
    "commit": 800,
    "grouped": 400,
    "conflict": 30,
    "held": 40,
    "crash": 25,
    "crash in flight": 8,
    "reread": 1500,
    "repeat": 40,
}
WEIGHTS = {
    World.run: 25,
    World.begin: 20,
    World.work: 12,
    World.commit: 14,
    World.commit_held: 11,
    World.let_go: 8,
    World.rollback: 1,
    World.repeat: 3,
    World.together: 8,
    World.snapshot: 4,
    World.close_snapshot: 3,
    World.as_of: 3,
    World.consolidate: 5,
    World.light: 8,
    World.reopen: 1,
    World.crash: 2,
}


class Machine(RuleBasedStateMachine):
    """Every step of the world is a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    def teardown(self) -> None:
        self.world.close()

    @rule(rng=RANDOM)
    def begin(self, rng: random.Random) -> None:
        self.world.begin(rng)

    @rule(rng=RANDOM)
    def run(self, rng: random.Random) -> None:
        self.world.run(rng)

    @rule(rng=RANDOM)
    def work(self, rng: random.Random) -> None:
        self.world.work(rng)

    @rule(rng=RANDOM)
    def commit(self, rng: random.Random) -> None:
        self.world.commit(rng)

    @rule(rng=RANDOM)
    def commit_held(self, rng: random.Random) -> None:
        self.world.commit_held(rng)

    @rule(rng=RANDOM)
    def let_go(self, rng: random.Random) -> None:
        self.world.let_go(rng)

    @rule(rng=RANDOM)
    def together(self, rng: random.Random) -> None:
        self.world.together(rng)

    @rule(rng=RANDOM)
    def repeat(self, rng: random.Random) -> None:
        self.world.repeat(rng)

    @rule(rng=RANDOM)
    def snapshot(self, rng: random.Random) -> None:
        self.world.snapshot(rng)

    @rule(rng=RANDOM)
    def close_snapshot(self, rng: random.Random) -> None:
        self.world.close_snapshot(rng)

    @rule(rng=RANDOM)
    def as_of(self, rng: random.Random) -> None:
        self.world.as_of(rng)

    @rule(rng=RANDOM)
    def consolidate(self, rng: random.Random) -> None:
        self.world.consolidate(rng)

    @rule(rng=RANDOM)
    def light(self, rng: random.Random) -> None:
        self.world.light(rng)

    @rule(rng=RANDOM)
    def restart(self, rng: random.Random) -> None:
        if rng.random() < 0.3:
            rng.choice([self.world.crash, self.world.reopen])(rng)

    @invariant()
    def holds(self) -> None:
        self.world.check()


@pytest.mark.hypothesis
def test_shrinkable_histories() -> None:
    """R1 to R8, R11 to R17, by hypothesis, which is slower than the scheduler: a few examples for what it shrinks."""
    examples = settings().max_examples // 4
    chosen = settings(max_examples=examples, stateful_step_count=50, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Machine, settings=chosen)


def scheduled(
    seed: int, steps: int = STEPS, path: Path | None = None, begins: Callable[[], None] = lambda: None
) -> Counter[str]:
    """One deterministic history, in memory or on disk. What happened, counted. ``begins`` is called when its tables are
    there."""
    rng = random.Random(seed)
    world = World(path, few_rows=(0, 3, 24)[seed % 3])
    try:
        begins()
        for _ in range(steps):
            (step,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
            step(world, rng)
            world.check()
        world.oracle.check()
        return world.counted
    finally:
        world.close()


HISTORIES = [
    pytest.param("memory", BY_DAY["memory"], id="memory"),
    pytest.param("disk", BY_DAY["disk"], id="disk", marks=pytest.mark.story),
    *(
        pytest.param(where, chosen, id=f"more in {where}", marks=pytest.mark.hypothesis)
        for where, chosen in BY_NIGHT.items()
        if AT_NIGHT
    ),
]


@pytest.mark.parametrize(("where", "chosen"), HISTORIES)
def test_seeded_histories(where: str, chosen: Sequence[int], tmp_path: Path) -> None:
    """The same, denser, and on disk as well; below the stated minima it proves nothing."""
    counted: Counter[str] = Counter()
    for seed in chosen:
        try:
            counted += scheduled(seed, path=tmp_path / str(seed) if where == "disk" else None)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    least = {name: count * len(chosen) // (30 if where == "memory" else 48) for name, count in THIRTY_HAVE.items()}
    short = {name: (counted[name], count) for name, count in least.items() if counted[name] < count}
    assert not short, f"not run: {short}"
