"""The checker of the examples goes red where a page is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.examples import ROOT, Block, Failed, Page, commands, dialogue, is_as_said


def block(language: str, text: str, output: str | None = None) -> Block:
    return Block(ROOT / "README.md", 1, language, text, output)


@pytest.fixture
def page(tmp_path: Path):
    (tmp_path / "work").mkdir()
    with Page(ROOT / "README.md", tmp_path / "work", timeout_s=20) as running:
        yield running


@pytest.mark.parametrize(
    "wrong",
    [
        block("python", "print(1)", "2\n"),
        block("python", "print(1)\nraise SystemExit(0)"),
        block("python", "import os\nos._exit(0)"),
        block("shell", "echo one; false"),
        block("shell", "echo one | false | true"),
        block("shell", "echo one\necho two", "one\n"),
        block("console", "$ echo one\ntwo\n"),
        block("console", "$ echo one\none\n$ kivi no-such-command\n"),
    ],
    ids=lambda wrong: wrong.text,
)
def test_a_page_that_is_wrong_fails(page: Page, wrong: Block) -> None:
    with pytest.raises(Failed):
        page.run(wrong)


def test_a_page_that_is_right_passes(page: Page) -> None:
    page.run(block("python", "import asyncio\nawait asyncio.sleep(0)\nx = 6 * 7"))
    page.run(block("python", "print(x)", "42\n"))
    page.run(block("shell", "export WHO=ada\n# a comment\ncat > file <<'END'\none\nEND\n"))
    page.run(block("console", '$ echo "$WHO"; cat \\\n> file\nada\no...\n'))


def test_commands_go_on_behind_a_backslash_and_in_a_here_document() -> None:
    assert list(commands("a \\\n  b\ncat <<'END'\nx\nEND\nc\n")) == ["a \\\n  b", "cat <<'END'\nx\nEND", "c"]
    assert list(dialogue("$ a\n> b\n1\n$ c\n")) == [("a\nb", "1"), ("c", "")]


def test_an_ellipsis_stands_for_anything_and_nothing_else_does() -> None:
    assert is_as_said("a ... d\n", "a b c d")
    assert not is_as_said("a\n", "a\nb")
    assert not is_as_said("a ... e\n", "a b c d")
