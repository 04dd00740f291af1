"""The planted bugs still fit the code; ``make mutants`` runs their checkers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.oracle import Mismatch
from tests.proof.crash import NotReachedError
from tests.proof.failures import described
from tests.proof.mutate import ROOT, applied, imports_the_tree, mutants, scratch, verdict

LISTED = 14
"""In the rules: snapshot = largest CTS; open snapshots ignored; put against delta off; W before pending; the token in a
second batch; acknowledge before sync; CTS reused; begin not atomic with W; a delete that leaves old deltas. Of
groups: a member that does not see the cells of those before it; facts that are not noted; another order than that of
the verdicts; an outcome that is acknowledged for what is durable in part; a token remembered for the wrong member."""


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs git and a clone")
def test_every_planted_bug_applies_and_names_a_checker_that_is_there(tmp_path: Path) -> None:
    planted = mutants()
    assert len(planted) >= LISTED
    tree = scratch(tmp_path)
    for mutant in planted:
        assert all((ROOT / checker.split()[0]).exists() for checker in mutant.checkers)
        applied(mutant, tree)
        applied(mutant, tree, reverse=True)


@pytest.mark.parametrize(
    ("error", "mismatch"),
    [
        (Mismatch("R1: another number"), True),
        (AssertionError("R11: the gap-free prefix"), True),
        (TypeError("'>' not supported"), False),
        (ImportError("no module named 'kivi.mvcc.plain'"), False),
        (NotReachedError("the point was not reached"), False),
        (AssertionError("not run: {'grouped': (3, 500)}"), False),
    ],
)
def test_only_an_assertion_of_a_checker_is_a_mismatch(error: Exception, mismatch: bool) -> None:
    with pytest.raises(type(error)) as raised:
        raise error
    assert described(raised.value)["mismatch"] is mismatch


@pytest.mark.parametrize(
    ("code", "file", "mismatch"),
    [
        ("assert False", "tests/store/test_late.py", True),
        ("assert False", "tests/mvcc/world.py", True),
        ("assert False", "tests/oracle.py", True),
        ("assert False", "tests/proof/groups.py", False),  # what is not answered, or not in time, is not compared
        ("assert False", "tests/serverproc.py", False),
        ("assert False", "kivi/store/facade.py", False),
        ("raise Mismatch('R1')", "tests/proof/crowd.py", True),
        ("pytest.fail('nobody noticed')", "tests/store/test_planted.py", True),
        ("pytest.fail('Timeout (>120.0s) from pytest-timeout.')", "pytest_timeout.py", False),
    ],
)
def test_only_who_compares_can_find_a_mismatch(code: str, file: str, mismatch: bool) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)) as raised:
        exec(compile(code, str(ROOT / file), "exec"), {"Mismatch": Mismatch, "pytest": pytest})
    assert described(raised.value)["mismatch"] is mismatch


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs git and a clone")
def test_the_gate_runs_the_patched_tree_and_says_how_a_checker_failed(tmp_path: Path) -> None:
    tree = scratch(tmp_path)
    assert imports_the_tree(tree)
    (tree / "tests" / "test_made.py").write_text(
        "import kivi\ndef test_asserts(): assert kivi is None\ndef test_breaks(): kivi.nothing()\n"
    )
    for name, expected in {"asserts": (True, True), "breaks": (True, False)}.items():
        said = verdict(f"tests/test_made.py -k {name}", tree)
        assert (said.failed, said.mismatch) == expected, said
