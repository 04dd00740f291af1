"""docs/rules.md: every function and test that it names exists, and the tests carry the rule's number."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.examples import ROOT

PAGE = (ROOT / "docs/rules.md").read_text()
SECTIONS = re.findall(r"^## R(\d+) (.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE)
RULES = {int(number): text for number, text in SECTIONS}
NAMED = re.compile(r"`((?:kivi|server|tests)/[\w/.]+)(?:::([\w.]+))?`")


def places(number: int) -> tuple[str, str]:
    """The two cells below "enforced in" and "tests"."""
    found = re.search(r"^\| enforced in \| tests \|\n\|---\|---\|\n\| (.*) \| (.*) \|$", RULES[number], re.MULTILINE)
    assert found is not None, f"R{number} does not say where it is enforced and tested"
    return found[1], found[2]


@cache
def names(file: Path) -> frozenset[str]:
    """Functions and classes of a module, methods and properties as Class.name."""
    tree = ast.parse(file.read_text())
    found = set[str]()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
            }
    return frozenset(found)


def carries(text: str, number: int) -> bool:
    """``R7``, ``test_r7_...``, or a range of rules that has it."""
    ranges = [(int(a), int(b)) for a, b in re.findall(r"\bR(\d+) to R(\d+)\b", text)]
    return bool(re.search(rf"\bR{number}\b|_r{number}_", text)) or any(a <= number <= b for a, b in ranges)


def test_every_rule_is_there() -> None:
    assert sorted(RULES) == [*range(1, 21), 24, 25, 26]


@pytest.mark.parametrize("number", sorted(RULES))
def test_what_a_rule_names_exists_and_carries_its_number(number: int) -> None:
    enforced, tested = places(number)
    for cell, is_test in ((enforced, False), (tested, True)):
        found = NAMED.findall(cell)
        assert found, f"R{number} names nothing"
        for path, name in found:
            file = ROOT / path
            assert file.is_file(), f"R{number}: there is no {path}"
            assert not name or name in names(file), f"R{number}: {path} has no {name}"
            assert path.startswith("tests/") == is_test, f"R{number}: {path} is in the wrong column"
            assert not is_test or carries(file.read_text(), number), (
                f"R{number}: {path} does not say that it is about it"
            )
