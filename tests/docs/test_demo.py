"""``make demo``, the whole of it: it proves its sums, and what it prints differs from the README in numbers only."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.demo.test_demo import left_behind
from tests.docs.examples import ROOT, blocks, dialogue, is_as_said


def without_numbers(text: str) -> str:
    return re.sub(r"\s*\d[\d,.]*", " #", text)


@pytest.mark.story
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_make_demo_proves_its_sums_as_the_readme_shows(tmp_path: Path) -> None:
    shown = dict(
        pair for block in blocks(ROOT / "README.md") if block.language == "console" for pair in dialogue(block.text)
    )
    done = subprocess.run(
        ["make", "-s", "demo"],
        cwd=ROOT,
        env={**os.environ, "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall("kill -9 of the whole Spark job", done.stdout)) == 2
    assert len(re.findall(r"^  proved: ", done.stdout, re.MULTILINE)) == 11
    assert "WRONG" not in done.stdout
    assert "All sums are proved: 11 of 11 checks." in done.stdout
    assert "each of the 28,185 requests of the real trace once" in done.stdout
    assert left_behind(ROOT / "demo-data") == []
    assert is_as_said(without_numbers(shown["make demo"]), without_numbers(done.stdout)), done.stdout
