"""Every example of README and docs runs, and prints what the page says (``examples`` explains how)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import require
from tests.docs.examples import EXCEPTIONS, PAGES, ROOT, Page, blocks, fences

WITH_EXAMPLES = [page for page in PAGES if blocks(page)]


def marked(page: Path) -> list[pytest.MarkDecorator]:
    """All but README and tutorial are stories; pages about Spark start a driver of their own, which takes long."""
    if "kivi.spark" in page.read_text():
        return [pytest.mark.story, pytest.mark.spark, pytest.mark.timeout(400)]
    return [] if page.stem in ("README", "tutorial") else [pytest.mark.story]


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT)), marks=marked(p)) for p in WITH_EXAMPLES])
def test_the_examples_of(page: Path, tmp_path: Path) -> None:
    if any("curl " in block.text for block in blocks(page)):
        require("curl")
    folder = tmp_path / "work"
    folder.mkdir()
    with Page(page, folder) as running:
        for block in blocks(page):
            running.run(block)
    assert running.used == {each for each in EXCEPTIONS if each.page == running.name}, "an exception is not needed"


def test_every_block_says_its_language() -> None:
    for page in PAGES:
        for line, info, _, _ in fences(page):
            assert info, f"{page.relative_to(ROOT)}:{line}"


def test_exceptions_are_of_pages() -> None:
    names = {str(page.relative_to(ROOT)) for page in WITH_EXAMPLES}
    assert {each.page for each in EXCEPTIONS} <= names
