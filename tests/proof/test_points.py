"""A crash at each of these named points, once; ``make soak`` goes over all points, again and again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proof.crash import History, crash_at, killed_at_rest, prepare
from tests.proof.points import POINTS

SHORT = {
    "timestamp": 31,
    "half written": 7,
    "synced": 23,
    "applied": 11,
    "watermark moved": 17,
    "before the position": 5,
    "events sealed": 3,
    "compaction": 2,
    "backfill chunk": 4,
    "checkpoint copied": 1,
    "group in the log": 13,
    "half a group written": 9,
    "group applied": 19,
}
"""Point: which time that it is reached is the last."""


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return prepare(tmp_path_factory.mktemp("history") / "data")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("point", SHORT)
def test_a_crash_at_a_named_point(point: str, history: History, tmp_path: Path) -> None:
    """R12, R13, R16."""
    crashed = crash_at(point, SHORT[point], history, tmp_path)
    assert crashed.commits > 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_kill_when_every_group_is_acknowledged(seed: int, history: History, tmp_path: Path) -> None:
    """R12, R16, R19: all members of the last groups are there, each under its own timestamp."""
    killed = killed_at_rest(history, tmp_path, seed=seed, commits=200)
    assert killed.grouped > 20, f"not run: {killed}"


def test_every_point_is_one_of_the_product() -> None:
    for owner, attribute, _ in POINTS.values():
        assert callable(getattr(owner, attribute))
