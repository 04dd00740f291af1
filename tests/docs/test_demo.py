"""``make demo``, as the README shows it: what it prints differs from the page in numbers only."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.examples import ROOT, blocks, dialogue, is_as_said


def without_numbers(text: str) -> str:
    return re.sub(r"\s*\d[\d,.]*", " #", text)


@pytest.mark.story
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_make_demo_prints_what_the_readme_shows(tmp_path: Path) -> None:
    shown = dict(
        pair for block in blocks(ROOT / "README.md") if block.language == "console" for pair in dialogue(block.text)
    )
    done = subprocess.run(
        ["make", "-s", "demo"], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert is_as_said(without_numbers(shown["make demo"]), without_numbers(done.stdout)), done.stdout
