"""The site builds without a warning, as ``make docs`` builds it; and links work in the repository as well."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.examples import PAGES, ROOT

LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:)([^)\s]+)\)")
FENCE = re.compile(r"^(`{3,}).*?^\1$", re.DOTALL | re.MULTILINE)


@pytest.mark.story
@pytest.mark.timeout(300)
def test_the_site_builds(tmp_path: Path) -> None:
    """-W: a warning is an error, among them links, files and names that are not there (-n). Without the pages of kivi's
    sources, which are a fifth of the work: ``make docs`` makes them by night."""
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", "-d", str(tmp_path / "cache")]
    sphinx += ["-D", "extensions=myst_parser,sphinx.ext.autodoc"]
    built = subprocess.run([*sphinx, "docs", str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        assert (tmp_path / "site" / page.relative_to(ROOT / "docs")).with_suffix(".html").exists()
    settings = (tmp_path / "site/reference/settings.html").read_text()
    assert "pending_hard_bytes" in settings and "384 MiB" in settings


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_the_repository(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        name, _, anchor = link.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.is_relative_to(ROOT) and file.exists(), f"{link}: there is no such file"
        assert not anchor or anchor in anchors(file), f"{link}: there is no such heading"


def test_the_readme_is_short() -> None:
    """Three minutes."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
