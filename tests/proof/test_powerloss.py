"""Power loss: of what was not synced any part may be gone, and nothing acknowledged is (R12, R13, R16)."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kivi.errors import KiviError
from tests.oracle import Mismatch
from tests.proof.crash import History, call_failed, power_lost, prepare
from tests.proof.powerloss import library
from tests.seeds import stories


@pytest.fixture(name="shim", scope="module")
def _shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shim = library(tmp_path_factory.mktemp("shim"))
    if shim is None:
        if os.environ.get("KIVI_CI"):
            pytest.fail("there is no C compiler (cc), and in CI there has to be one")
        pytest.skip("needs a C compiler (cc) for the library that journals what the server writes")
    return shim


@pytest.fixture(name="history", scope="module")
def _history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return prepare(tmp_path_factory.mktemp("history") / "data")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("at_rest", [False, *stories(True)], ids=["at work", "at rest"])
def test_power_loss_takes_nothing_that_was_acknowledged(
    at_rest: bool, shim: Path, history: History, tmp_path: Path
) -> None:
    """At work, the last commits that entered may not be acknowledged yet; at rest all of them are."""
    crashed = power_lost(shim, history, tmp_path, seed=1, commits=200, states=6, at_rest=at_rest)
    assert all(each.commits >= 200 for each in crashed)


@pytest.mark.timeout(180)
def test_the_checker_goes_red_when_nothing_is_synced(shim: Path, history: History, tmp_path: Path) -> None:
    """A planted bug: acknowledge before sync."""
    with pytest.raises((Mismatch, AssertionError, KiviError)) as caught:
        power_lost(shim, history, tmp_path, seed=1, commits=100, states=6, planted="no sync")
    assert not str(caught.value).startswith("the journal missed"), caught.value


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("number", "error", "lasts"), [(420, errno.EIO, False), (240, errno.ENOSPC, True)])
def test_a_failing_call_of_log_or_engine_makes_no_wrong_number(
    number: int, error: int, lasts: bool, shim: Path, history: History, tmp_path: Path
) -> None:
    """Any call that changes a file, RocksDB's own included; ``make soak`` takes others."""
    crashed = call_failed(shim, history, tmp_path, number=number, error=error, lasts=lasts, seed=2)
    assert crashed.commits > len(history.attempts)
