"""The planted bugs still fit the code; ``make mutants`` runs their checkers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.proof.mutate import ROOT, applied, mutants, scratch

LISTED = 9
"""In the rules: snapshot = largest CTS; open snapshots ignored; put against delta off; W before pending; the token in a
second batch; acknowledge before sync; CTS reused; begin not atomic with W; a delete that leaves old deltas."""


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs git and a clone")
def test_every_planted_bug_applies_and_names_a_checker_that_is_there(tmp_path: Path) -> None:
    planted = mutants()
    assert len(planted) >= LISTED
    tree = scratch(tmp_path)
    for mutant in planted:
        assert all((ROOT / checker.split()[0]).exists() for checker in mutant.checkers)
        applied(mutant, tree)
        applied(mutant, tree, reverse=True)
