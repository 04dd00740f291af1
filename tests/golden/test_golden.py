"""Every script in this folder, in every variant: see ``language`` for how to read and write one.

    as written / forced     consolidation when the script says so, or after every single command
    light                   a pass after every command that combines in memory, and folds where that does not wait
    memory / disk / grpc    a dictionary and a list, or RocksDB and the segmented log, or these behind a server, as
                            written: whoever asks over gRPC sees of consolidation what the store on disk shows

``UPDATE_GOLDEN=1`` writes the output of the plain variant (as written, in memory) into the scripts.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.golden.driver import Driver, EmbeddedDriver
from tests.golden.grpc_driver import GrpcDriver, LoopThread
from tests.golden.language import Runner, run_script, without_dumps

SCRIPTS = sorted(Path(__file__).parent.glob("*.script"))
VARIANTS = [
    *itertools.product(("as_written", "forced", "light"), ("memory", "disk")),
    ("as_written", "grpc"),
]


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    running = LoopThread()
    yield running
    running.close()


@pytest.mark.parametrize(("consolidation", "where"), VARIANTS)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_history(script: Path, consolidation: str, where: str, tmp_path: Path, loop: LoopThread) -> None:
    """R1 to R18, one script each where a rule has an example, and the isolation cases."""
    path = str(tmp_path / "store")
    driver: Driver = GrpcDriver(path, loop) if where == "grpc" else EmbeddedDriver(path if where == "disk" else None)
    try:
        runner = Runner(driver, forced=consolidation == "forced", light=consolidation == "light")
        expected = script.read_text()
        found = run_script(expected, runner)
    finally:
        driver.close()
    plain = (consolidation, where) == ("as_written", "memory")
    if plain and os.environ.get("UPDATE_GOLDEN"):
        script.write_text(found)
        return
    if consolidation != "as_written" or (where != "memory" and runner.crashed):
        expected, found = without_dumps(expected), without_dumps(found)
    assert found == expected


def test_every_isolation_case_has_its_scripts() -> None:
    """Both columns of the table in the rules: with puts and with deltas."""
    names = {path.stem for path in SCRIPTS}
    for case in ("g0", "g1a", "g1b", "g1c", "otv", "pmp", "p4", "g_single", "g2_item"):
        assert {f"{case}_puts", f"{case}_deltas"} <= names, case
