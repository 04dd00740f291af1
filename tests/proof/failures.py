"""A plugin of pytest for the mutation gate: what failed a test, and whether that is a mismatch that a checker found.

A mismatch is the oracle's ``Mismatch``, wherever it is raised, or an ``assert`` or ``pytest.fail`` of a file that
compares answers: of a test, of the model's world, of the oracle. The modules around them assert that a server has
started or that something came in time, so what they assert is an error like any other, which says nothing about what
the checker checks. So is a test that ran into its time limit, which pytest ends by a ``fail`` of its own, and a run
that says of itself that it was too short to prove anything (*not run*). Writes a list, in order, to the file that
``MUTANT_FAILURES`` names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import CodeType
from typing import Any

import _pytest
import pytest

from tests.oracle import Mismatch

_TESTS = Path(__file__).resolve().parents[1]
_PYTEST = Path(_pytest.__file__).parent
_COMPARING = (_TESTS / "oracle.py", _TESTS / "mvcc" / "world.py")
_failures: list[dict[str, Any]] = []


def described(error: BaseException) -> dict[str, Any]:
    """The first line of what an error says, where it was raised, and whether it is a mismatch."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    raised: list[tuple[CodeType, int]] = []
    trace = error.__traceback__
    while trace is not None:
        raised.append((trace.tb_frame.f_code, trace.tb_lineno))
        trace = trace.tb_next
    while raised and Path(raised[-1][0].co_filename).is_relative_to(_PYTEST):  # in fail() or raises(), for its caller
        raised.pop()
    compared = bool(raised) and _compares(Path(raised[-1][0].co_filename).resolve())
    asserted = isinstance(error, AssertionError | pytest.fail.Exception)
    was_short = str(error).startswith("not run") or type(error).__name__ == "NotReachedError"
    where = f"{Path(raised[-1][0].co_filename).name}:{raised[-1][1]}" if raised else ""
    return {
        "error": type(error).__name__,
        "message": (str(error).splitlines() or [""])[0][:300],
        "where": where,
        "mismatch": not was_short and (isinstance(error, Mismatch) or (asserted and compared)),
    }


def _compares(file: Path) -> bool:
    return file in _COMPARING or (file.name.startswith("test_") and file.is_relative_to(_TESTS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.failed:
        error = call.excinfo.value if call.excinfo is not None else AssertionError(str(report.longrepr))
        _failures.append(described(error))
        if name := os.environ.get("MUTANT_FAILURES"):
            Path(name).write_text(json.dumps(_failures), encoding="utf-8")
    return report
