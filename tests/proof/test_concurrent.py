"""The short form of the concurrent checkers; ``make soak`` runs the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proof.concurrent import checked
from tests.seeds import stories

MINIMA = {"commits": 2_000, "reads": 1_000, "consolidations": 60, "aborts": 40, "grouped": 1_000, "each": 100}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kill_every_s", [2.0, *stories(None)], ids=["killed", "steady"])
def test_every_answer_over_grpc_is_the_replay_of_a_prefix(tmp_path: Path, kill_every_s: float | None) -> None:
    """R1 to R8, R11 to R19 with eight clients and two crowds of one server, which is killed on the way, or not."""
    minima = MINIMA | ({} if kill_every_s is None else {"kills": 3})
    result = checked(tmp_path / "data", minima=minima, seconds_max=150, kill_every_s=kill_every_s)
    assert not result.short, f"not run: {result.short}"
