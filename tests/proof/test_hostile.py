"""Hostile input and overload, in small; ``make soak`` does it at full scale."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.proof.hostile import ASSAULTS, Bystander, make_tables, watched
from tests.seeds import stories
from tests.serverproc import ServerProcess

SCALE = 0.01
LONG = ("over each limit", "mutated requests", "mutated frames")
SLOWER_MAX = 30
"""Other tests run beside this one; the long form, which has the machine to itself, asks for 10."""


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Bystander, float]]:
    """A server, the well-behaved client that goes on all the time, and its quiet 99th percentile."""
    with ServerProcess(tmp_path_factory.mktemp("besieged") / "data", "--http", "localhost:0") as server:
        with server.connect(timeout=60) as db:
            make_tables(db)
        bystander = Bystander(server.endpoint)
        quiet_ms = bystander.quiet_ms()
        try:
            yield server, bystander, quiet_ms
        finally:
            code = bystander.stop()
        assert code == 0
        assert server.stop() == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("assault", [*(name for name in ASSAULTS if name not in LONG), *stories(*LONG)])
def test_an_assault_is_answered_by_name_and_others_are_served(
    assault: str, besieged: tuple[ServerProcess, Bystander, float]
) -> None:
    server, bystander, quiet_ms = besieged
    with watched(server, bystander, quiet_ms, SLOWER_MAX):
        answers = ASSAULTS[assault](server, SCALE)
    print(f"{assault}: {dict(answers)}; quiet {quiet_ms:.1f} ms")
    assert answers
