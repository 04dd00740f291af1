"""What every test may use: ``require``, for tests that drive a program from outside this repository."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import hypothesis
import pytest

# A program's name here -> the names it goes by on different systems.
PROGRAMS = {
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
    "chromedriver": ("chromedriver",),
    "prometheus": ("prometheus",),
}

# Machines differ and are shared: a slow example is no failure, a stuck test meets pytest's timeout.
hypothesis.settings.register_profile("kivi", deadline=None, print_blob=True)
hypothesis.settings.load_profile("kivi")


def require(program: str) -> str:
    """The path of ``program``; without it, skips the test, or fails it in continuous integration (``KIVI_CI``)."""
    for name in PROGRAMS.get(program, (program,)):
        if path := shutil.which(name):
            return path
    reason = f"{program} is not installed"
    if os.environ.get("KIVI_CI"):
        pytest.fail(f"{reason}, and KIVI_CI forbids skipping: .ci/run has to install it", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(name="require")
def _require() -> Callable[[str], str]:
    """``require`` as a fixture, for tests that would import nothing else from here."""
    return require
