"""The decisions: numbered, short, each with its four parts; and what the code cites is there."""

from __future__ import annotations

import re
import subprocess

from tests.docs.examples import ROOT

FOLDER = ROOT / "docs/decisions"
FILES = sorted(FOLDER.glob("0*.md"))
PARTS = ("**Context.** ", "**Decision.** ", "**Alternatives and measurements.**", "**Consequences.** ")


def tracked() -> list[str]:
    """What is written by people, as git has it and with what is new."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    kinds = (".py", ".md", ".proto", ".yml", ".yaml", ".toml", ".sh", ".script", ".patch", "Makefile", "run")
    return [name for name in names if name.endswith(kinds) and (ROOT / name).is_file()]


def test_they_are_numbered_short_and_complete() -> None:
    index = (FOLDER / "index.md").read_text()
    assert len({file.name[:4] for file in FILES}) == len(FILES), "two have one number"
    for file in FILES:
        text = file.read_text()
        assert re.match(r"\d{4}-", file.name) and text.startswith(f"# {file.name[:4]} "), file.name
        assert all(part in text for part in PARTS), f"{file.name} lacks one of its parts"
        assert len(text.splitlines()) <= 60, f"{file.name} is more than a page"
        assert f"({file.name})" in index and f"\n{file.stem}\n" in index, f"{file.name} is not in the index"


def test_every_decision_that_is_cited_is_there() -> None:
    known = {file.name[:4] for file in FILES}
    cited = {
        (number, name)
        for name in tracked()
        for number in re.findall(r"\b[Dd]ecisions? (\d{4})\b", (ROOT / name).read_text(encoding="utf-8"))
    }
    assert cited, "the code cites none"
    assert not [each for each in cited if each[0] not in known]


def test_nothing_cites_a_document_that_is_not_here() -> None:
    """The design was a page outside this repository: what was needed of it is in the essays and decisions."""
    gone = re.compile(r"\bdesign, section|\b(semantics|design|api|style|cluster)\.md\b|\bthe design's measurements\b")
    here = {"tests/docs/test_decisions.py"}
    found = {name for name in tracked() if gone.search((ROOT / name).read_text(encoding="utf-8"))}
    assert found <= here
