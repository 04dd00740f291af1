"""Storage faults at every 26th call of a short history; ``make soak`` takes every one, by night."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.proof.faults import calls_in_all, faulty, prepare
from tests.seeds import stories


@pytest.mark.timeout(200)
@pytest.mark.parametrize("error", ["ENOSPC", *stories("EIO")])
@pytest.mark.parametrize("lasts", [False, True], ids=["once", "for good"])
def test_no_fault_makes_a_wrong_number_or_loses_what_was_acknowledged(tmp_path: Path, error: str, lasts: bool) -> None:
    """R12, R16."""
    empty = prepare(tmp_path / "empty")
    total = calls_in_all(tmp_path / "whole", empty)
    counted: Counter[str] = Counter()
    for number in range(1 + (3 * lasts + len(error)) % 26, total + 1, 26):
        try:
            counted += faulty(tmp_path / f"fault {number}", empty, number, error, lasts=lasts)
        except BaseException as failure:
            failure.add_note(f"{error} at call {number} of {total}")
            raise
    assert counted["committed"] > 40
    assert counted["unknown"] > 1
