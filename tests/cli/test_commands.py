"""Whoever is told to type a command can."""

from __future__ import annotations

import re
from argparse import ArgumentParser, _SubParsersAction
from collections import defaultdict
from pathlib import Path

from kivi.cli.commands import parser
from tests.serverproc import ROOT

PLACES = ("kivi/**/*.py", "server/**/*.py", "docker/**/*", "docs/**/*.md", "*.md")
SAID = re.compile(r"(?:`|\(|^\$ )kivi ([a-z]+)\b(?: ([a-z]+)\b)?", re.MULTILINE)


def _under(parsed: ArgumentParser) -> dict[str, ArgumentParser]:
    (commands,) = (action.choices for action in parsed._actions if isinstance(action, _SubParsersAction))
    return dict(commands)


def test_every_command_that_is_named_is_there() -> None:
    """By error messages, alerts, docs."""
    commands = _under(parser())
    known = {*commands} | {f"cluster {action}" for action in _under(commands["cluster"])}
    named = defaultdict[str, set[str]](set)
    for pattern in PLACES:
        for path in filter(Path.is_file, ROOT.glob(pattern)):
            for command, action in SAID.findall(path.read_text(encoding="utf-8", errors="replace")):
                named[f"{command} {action}" if command == "cluster" and action else command].add(path.name)
    assert len(named) > 30
    assert {name: places for name, places in named.items() if name not in known} == {}


def test_every_command_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## kivi (\w+)\n\n```{kivi-help} (\w+)\n```$", page, re.MULTILINE)
    assert all(title == command for title, command in sections)
    assert sorted(title for title, _ in sections) == sorted(_under(parser()))
