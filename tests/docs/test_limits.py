"""The published limits are those of the code."""

from __future__ import annotations

import importlib
import re

from kivi.runtime.settings import Settings
from tests.docs.examples import ROOT

UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "s": 1, "h": 3_600}
ROW = re.compile(r"^\| .* \| ([\d,]+) ?(\w*) \| `([\w.]+)` \|$", re.MULTILINE)


def test_limits_are_as_they_are_published() -> None:
    rows = ROW.findall((ROOT / "docs/reference/limits.md").read_text())
    assert len(rows) >= 16
    for number, unit, name in rows:
        room, _, last = name.rpartition(".")
        owner = Settings() if room == "Settings" else importlib.import_module(room)
        assert getattr(owner, last) == int(number.replace(",", "")) * UNITS[unit], name
