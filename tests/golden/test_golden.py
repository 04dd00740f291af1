"""Every script in this folder, in every variant: see ``language`` for how to read and write one.

    as written / forced     consolidation when the script says so, or after every single command
    memory / disk           a dictionary and a list, or RocksDB and the segmented log

``UPDATE_GOLDEN=1`` writes the output of the plain variant (as written, in memory) into the scripts.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.golden.driver import EmbeddedDriver
from tests.golden.language import Runner, run_script, without_dumps

SCRIPTS = sorted(Path(__file__).parent.glob("*.script"))


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("consolidation", ["as_written", "forced"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_history(script: Path, consolidation: str, where: str, tmp_path: Path) -> None:
    """R1 to R18, one script each where a rule has an example, and the isolation cases."""
    driver = EmbeddedDriver(str(tmp_path / "store") if where == "disk" else None)
    try:
        runner = Runner(driver, forced=consolidation == "forced")
        expected = script.read_text()
        found = run_script(expected, runner)
    finally:
        driver.close()
    plain = (consolidation, where) == ("as_written", "memory")
    if plain and os.environ.get("UPDATE_GOLDEN"):
        script.write_text(found)
        return
    if consolidation == "forced" or (where == "disk" and runner.crashed):
        expected, found = without_dumps(expected), without_dumps(found)
    assert found == expected


def test_every_isolation_case_has_its_scripts() -> None:
    """Both columns of the table in the rules: with puts and with deltas."""
    names = {path.stem for path in SCRIPTS}
    for case in ("g0", "g1a", "g1b", "g1c", "otv", "pmp", "p4", "g_single", "g2_item"):
        assert {f"{case}_puts", f"{case}_deltas"} <= names, case
