"""A plugin of pytest for the mutation gate: what failed a test, and whether that is a mismatch that a checker found.

A mismatch is an assertion of a checker: an ``AssertionError`` (the oracle's ``Mismatch`` is one) or ``pytest.fail``,
raised by code of ``tests``. Everything else is some error, which says nothing about what the checker checks; and so is
a run that says of itself that it was too short to prove anything (*not run*). Writes a list, in order, to the file that
``MUTANT_FAILURES`` names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).resolve().parents[1]
_failures: list[dict[str, Any]] = []


def described(error: BaseException) -> dict[str, Any]:
    """The first line of what an error says, where it was raised, and whether it is a mismatch."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code if trace is not None else None
    by_checker = code is not None and Path(code.co_filename).resolve().is_relative_to(_TESTS)
    failed = isinstance(error, pytest.fail.Exception)  # raised within pytest, for a test that called it
    was_short = str(error).startswith("not run") or type(error).__name__ == "NotReachedError"
    where = f"{Path(code.co_filename).name}:{trace.tb_lineno}" if code is not None and trace is not None else ""
    return {
        "error": type(error).__name__,
        "message": (str(error).splitlines() or [""])[0][:300],
        "where": where,
        "mismatch": not was_short and (failed or (isinstance(error, AssertionError) and by_checker)),
    }


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.failed:
        error = call.excinfo.value if call.excinfo is not None else AssertionError(str(report.longrepr))
        _failures.append(described(error))
        if name := os.environ.get("MUTANT_FAILURES"):
            Path(name).write_text(json.dumps(_failures), encoding="utf-8")
    return report
