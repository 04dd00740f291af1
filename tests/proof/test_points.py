"""A crash at each of these named points, once; ``make soak`` goes over all points, again and again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.oracle import Mismatch, Op
from tests.proof.crash import History, crash_at, killed_at_rest, prepare
from tests.proof.points import POINTS
from tests.seeds import stories

SHORT = {
    "timestamp": 31,
    "half written": 7,
    "synced": 23,
    "applied": 11,
    "watermark moved": 17,
    "before the position": 5,
    "events sealed": 3,
    "compaction": 2,
    "settled files written": 3,
    "settled": 3,
    "settled files deleted": 2,
    "object written": 3,
    "object read back": 3,
    "objects deleted": 1,
    "backfill chunk": 4,
    "view filled in part": 4,
    "checkpoint copied": 1,
    "group encoded": 13,
    "half a group written": 9,
    "group applied": 19,
    "events encoded": 11,
    "events entered": 7,
    "events applied": 13,
}
"""Point: which time that it is reached is the last."""
LONG = [point for point in SHORT if point.startswith(("settled", "object", "backfill", "view", "checkpoint"))]
"""A store gets there only when it has had much to do."""


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return prepare(tmp_path_factory.mktemp("history") / "data")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", [*(point for point in SHORT if point not in LONG), *stories(*LONG)])
def test_a_crash_at_a_named_point(point: str, history: History, tmp_path: Path) -> None:
    """R12, R13, R16."""
    crashed = crash_at(point, SHORT[point], history, tmp_path, seconds_max=200)
    assert crashed.commits > 0 and crashed.listened


def test_a_crash_before_the_server_listens_is_judged_too(history: History, tmp_path: Path) -> None:
    """The history's log holds more than two records, and the recovery applies each of them."""
    crashed = crash_at("applied", 2, history, tmp_path)
    assert not crashed.listened and crashed.commits == len(history.attempts) + 1  # with the one after it


def test_what_such_a_crash_lost_is_found(history: History, tmp_path: Path) -> None:
    """The oracle is told of an operation that the store does not hold."""
    *earlier, last = history.attempts
    more = replace(last, ops=[*last.ops, Op("delta", "counters", (0,), {"n": 1})])
    with pytest.raises(Mismatch, match="counters"):
        crash_at("applied", 2, replace(history, attempts=[*earlier, more]), tmp_path)


def test_a_server_that_does_not_start_is_no_crash(history: History, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no such point"):
        crash_at("no such point", 1, history, tmp_path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_kill_when_every_group_is_acknowledged(seed: int, history: History, tmp_path: Path) -> None:
    """R12, R16, R19: all members of the last groups are there, each under its own timestamp."""
    killed = killed_at_rest(history, tmp_path, seed=seed, commits=200)
    assert killed.grouped > 20, f"not run: {killed}"


def test_every_point_is_one_of_the_product() -> None:
    for owner, attribute, _ in POINTS.values():
        assert callable(getattr(owner, attribute))
