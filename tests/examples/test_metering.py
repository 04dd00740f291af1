"""The example of metering: a store and a gateway of their own, each killed once, and what the callers were told."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


@pytest.mark.story
@pytest.mark.timeout(300)
def test_tokens_and_cost_are_those_of_the_answers() -> None:
    command = [sys.executable, "-m", "kivi.examples.metering", "--seconds", "6", "--rate", "40", "--workers", "16"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    calls, repeated = (int(found) for found in re.findall(r"(\d+) (?:calls|were asked again)", ran.stdout))
    assert calls >= 16
    assert repeated > 0  # the kills were noticed
    assert "exact" in ran.stdout and "WRONG" not in ran.stdout
