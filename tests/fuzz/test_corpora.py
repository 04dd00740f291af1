"""What fuzzing found, read again: each input is taken or refused as its target says."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import inputs
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_what_was_found_is_taken_or_refused(target: str) -> None:
    kept = inputs(target)
    assert kept
    for data in (*TARGETS[target].seeds, *kept.values()):
        TARGETS[target].read(data)
