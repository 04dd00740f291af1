"""The planted bugs still fit the code; ``make mutants`` runs their checkers."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle import Mismatch
from tests.proof.crash import NotReachedError
from tests.proof.failures import described
from tests.proof.mutate import ROOT, Mutant, applied, imports_the_tree, mutants, scratch, verdict

LISTED = {
    "snapshot = largest CTS": "snapshot_is_the_largest_timestamp",
    "consolidation that ignores open snapshots": "consolidation_ignores_open_snapshots",
    "the put-against-delta check off": "put_against_delta_is_not_checked",
    "W moved before the commit is in pending": "watermark_moves_before_pending",
    "the token in a second batch": "token_in_a_second_batch",
    "acknowledge before sync": "acknowledged_before_sync",
    "CTS reused after a restart": "timestamps_come_again_after_a_restart",
    "begin not atomic with reading W": "begin_is_not_atomic_with_the_watermark",
    "a delete that leaves old deltas alive": "a_delete_leaves_old_deltas_alive",
    # A member has read nothing, so it begins just before its own CTS and meets no other member: what it would see of
    # those before it decides nothing within the group. It does for who read before the group and enters after it,
    # and he misses the cells of all members but the last.
    "a member that does not see the cells of those before it": "group_notes_only_its_last_member",
    "facts of a group that are not noted": "group_facts_are_not_noted",
    "CTS in another order than the verdicts, in memory": "group_is_applied_in_another_order",
    "CTS in another order than the verdicts, in the log": "group_enters_the_log_in_another_order",
    "CTS of one message's events in another order": "events_are_applied_in_another_order",
    "an outcome acknowledged for a group that is durable in part": "group_is_acknowledged_when_durable_in_part",
    "a token remembered for the wrong member": "group_token_of_another_member",
    "a place that answers for the one before it": "outcome_of_the_place_before",
    "a state combined without its base": "states_are_folded_without_their_base",
    "an item without its CTS": "items_do_not_get_their_commit",
    "positions that do not decide between equals": "winners_ignore_positions",
}
"""The bugs that the rules demand to be planted, and the patch that plants each."""

RULES = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs git and a clone")
def test_every_planted_bug_applies(tmp_path: Path) -> None:
    tree = scratch(tmp_path)
    for mutant in mutants():
        applied(mutant, tree)
        applied(mutant, tree, reverse=True)


def test_the_rules_list_what_is_planted_and_nothing_else() -> None:
    planted = {mutant.name for mutant in mutants()}
    assert set(LISTED.values()) <= planted
    table = RULES[RULES.index("| of | planted bugs |") :]
    assert sorted(re.findall(r"\(`(\w+)`\)", table)) == sorted(planted)


def test_a_rule_names_the_planted_bugs_that_carry_its_number() -> None:
    expected = {(rule, mutant.name) for mutant in mutants() for rule in rules_of(mutant)}
    sections = re.findall(r"^## (R\d+) (.*?)(?=^## )", RULES, re.DOTALL | re.MULTILINE)
    named = [
        (rule, name) for rule, text in sections for name in re.findall(r"`tests/proof/mutants/(\w+)\.patch`", text)
    ]
    assert sorted(named) == sorted(expected)


def rules_of(mutant: Mutant) -> list[str]:
    """Those that a patch begins with: ``R2, R19: what is wrong``."""
    head = re.match(r"R\d+(, R\d+)*(?=: )", mutant.why)
    return head[0].split(", ") if head else []


@pytest.mark.story
def test_a_checker_runs_the_tests_that_it_means() -> None:
    """Its word stands in their names. Pytest would choose none of them otherwise, or all, by the name of their file."""
    checkers = sorted({checker for mutant in mutants() for checker in mutant.checkers})
    files = sorted({checker.split()[0] for checker in checkers})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    tests = [line.split("::", 1) for line in run.stdout.splitlines() if "::" in line]
    for checker in checkers:
        file, *chosen = checker.split()
        assert len(chosen) in (0, 2) and chosen[:1] in ([], ["-k"]), checker
        word = chosen[-1].lower() if chosen else ""
        assert re.fullmatch(r"\w*", word), f"{checker}: one word, that can be looked for"
        assert any(where == file and word in name.lower() for where, name in tests), f"{checker} chooses no test"


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
        ("with pytest.raises(ValueError): pass", "tests/store/test_overwrite.py", True),
        ("with pytest.raises(ValueError, match='late'): raise ValueError('early')", "tests/store/test_late.py", True),
        ("with pytest.raises(ValueError): pass", "tests/proof/hostile.py", False),
        ("pytest.fail('Timeout (>120.0s) from pytest-timeout.')", "pytest_timeout.py", False),
    ],
)
def test_only_who_compares_can_find_a_mismatch(code: str, file: str, mismatch: bool) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)) as raised:
        exec(compile(code, str(ROOT / file), "exec"), {"Mismatch": Mismatch, "pytest": pytest})
    assert described(raised.value)["mismatch"] is mismatch


@pytest.mark.story
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
