"""The short form of a cluster under attack; ``make soak CLUSTER=1``, by night, is every fault of ``clustered``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import require
from tests.proof.clustered import besieged

SHORT = ("a node killed", "a nats-server stopped", "a damaged node", "all killed")


@pytest.mark.story
@pytest.mark.timeout(900)
def test_every_answer_of_any_node_is_the_replay_of_the_log(tmp_path: Path) -> None:
    """C1 to C6 and C8, R1 to R8, R16, R17: three nodes and three servers of the log, clients of all of them."""
    require("nats-server")
    result = besieged(tmp_path, SHORT, seed=0, rest_s=1.0)
    assert [one.fault for one in result.seen] == [*SHORT]
    assert result.counted["commits"] > 500 and result.counted["reads"] > 500
