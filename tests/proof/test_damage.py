"""Damage to each file of a store, at a place in each; ``make soak`` goes on with others."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.proof.crash import prepare
from tests.proof.damage import contents, cut, damaged, files_of, flip


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", [flip, cut], ids=["flipped", "cut"])
def test_damage_is_never_a_wrong_number_and_verify_sees_it(
    tmp_path: Path, how: object, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = prepare(tmp_path / "whole").path
    expected = contents(whole)
    counted: Counter[str] = Counter()
    for number, name in enumerate(files_of(whole)):
        found = damaged(whole, expected, name, how, tmp_path / f"{number}", random.Random(100 * number))
        counted[found] += 1
        counted[f"{found} {name.parts[0]}"] += 1
    assert counted["refused"], counted
    capsys.readouterr()
    print(counted)
