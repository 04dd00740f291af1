"""The short form of rules under attack; ``python -m tests.proof.rules --events 1000000`` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proof.rules import Shape, check_rules
from tests.seeds import seeds


@pytest.mark.story
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", seeds(1, night=3))
def test_what_is_raised_is_what_each_record_was_judged_against(tmp_path: Path, seed: int) -> None:
    """R25 over kills, retries, twins of tasks, late events and retractions: of many keys; by night of few, too."""
    counted = check_rules(tmp_path / "data", events=15_000, kills=2, seed=seed).counted
    assert counted["events"] > 14_700 and counted["kills"] == 3
    few = ["twin batches", "retractions"] if Shape.of(seed).batch < 1_000 else []  # there are many commits then
    for what in ("below the floor", "changes of limits", "raised by slow", "raised by again", *few):
        assert counted[what] > 0, f"not run: {what}"


def test_histories_differ() -> None:
    shapes = [Shape.of(seed) for seed in range(30)]
    for keys, batch, minutes in (
        (range(300), range(1_000), range(200)),
        (range(20_000, 10**6), range(10_000, 10**6), range(4_000, 10**6)),
    ):
        assert any(one.keys in keys for one in shapes)
        assert any(one.batch in batch for one in shapes)
        assert any(one.minutes in minutes for one in shapes)
    for what in ("come", "is_skewed", "is_text", "empty", "late", "late_us", "follow", "back_m", "slots"):
        assert len({getattr(one, what) for one in shapes}) > 1, f"all have one {what}"
