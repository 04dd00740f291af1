"""Which commits share a frame: small ones those that are submitted while some of their node are on their way."""

from __future__ import annotations

import pytest

import kivi
from kivi.mvcc.groups import Outcome
from tests.cluster.servers import Faults
from tests.cluster.simulation import Simulation


def _commits(simulation: Simulation, count: int, told: list[Outcome], **puts: str) -> None:
    """By the first node, each under a token of its own."""
    node = simulation.nodes[0]
    assert node.store is not None
    for i in range(count):
        tx = node.db.transaction()
        tx.delta("t", (1,), n=1)
        if puts:
            tx.append("e", [{"a": 1, "ts": 1, "x": 1, **puts}])
        assert tx._txn is not None
        node.store.commit(tx._txn, token=f"{len(told)} {i} {puts}"[:200], done=told.append)


def _one_node() -> Simulation:
    return Simulation(1, nodes=1, faults=Faults(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))


def test_what_is_small_shares_the_frame_behind_those_that_are_on_their_way() -> None:
    simulation = _one_node()
    node, told = simulation.nodes[0], list[Outcome]()
    before = node.log.outbox._n
    _commits(simulation, 40, told)
    assert node.log.proposed == 4 and not told
    simulation._until(lambda: not node.log.proposed, node)
    assert node.log.outbox._n == before + 5
    assert [outcome.commit_ts for outcome in told] == [*range(told[0].commit_ts or 0, node.log.place.number + 1)]
    assert len(told) == 40
    row = node.db.get("t", (1,))
    assert row is not None and row["n"] == 40


def test_what_is_large_waits_for_no_frame() -> None:
    simulation = _one_node()
    node, told = simulation.nodes[0], list[Outcome]()
    _commits(simulation, 6, told)
    assert node.log.proposed == 4
    _commits(simulation, 1, told, s="x" * (64 << 10))
    assert node.log.proposed == 5  # and what had waited is in it
    simulation._until(lambda: not node.log.proposed, node)
    assert len(told) == 7 and all(outcome.error is None for outcome in told)


def test_what_waits_is_refused_when_the_log_has_failed() -> None:
    simulation = _one_node()
    node, told = simulation.nodes[0], list[Outcome]()
    _commits(simulation, 6, told)
    node.log.stop()
    assert [type(outcome.error).__name__ for outcome in told] == ["CommitUnknown"] * 4 + ["LogFailed"] * 2


def test_whoever_waits_is_told_when_the_log_has_lost_what_it_had_acknowledged() -> None:
    simulation = _one_node()
    node, told = simulation.nodes[0], list[Outcome]()
    _commits(simulation, 6, told)
    node.log._lost("the log ends before")
    assert [type(outcome.error).__name__ for outcome in told] == ["CommitUnknown"] * 4 + ["Unavailable"] * 2
    assert node.db.get("t", (1,)) is None  # reads go on


def test_a_log_that_has_lost_something_says_so_however_long_it_brings_nothing() -> None:
    """And not that another node is to be asked, which has lost the same."""
    simulation = _one_node()
    node, told = simulation.nodes[0], list[Outcome]()
    _commits(simulation, 1, told)
    node.log._lost("the log ends before")
    simulation.now_us += 60_000_000
    assert node.log.is_held_up and node.store is not None
    with pytest.raises(kivi.Unavailable, match="kivi cluster reseed"):
        node.log.barrier(lambda n: None)
    with pytest.raises(kivi.Unavailable, match="kivi cluster reseed"):
        node.store.committer.fence("a token")


def test_what_waited_is_published_when_a_log_that_stood_still_goes_on() -> None:
    """It is not refused by the very message that says that the node is heard again."""
    simulation = _one_node()
    node, told = simulation.nodes[0], list[Outcome]()
    _commits(simulation, 6, told)
    assert node.log.proposed == 4 and not told
    simulation.now_us += 7_000_000  # the servers choose a leader
    simulation._until(lambda: not node.log.proposed, node)
    assert [outcome.error for outcome in told] == [None] * 6


def test_what_is_too_large_takes_nothing_that_waits_with_it() -> None:
    simulation = _one_node()
    node, told = simulation.nodes[0], list[Outcome]()
    _commits(simulation, 6, told)
    node.log._max_record_bytes = 64 << 10
    _commits(simulation, 1, told, s="x" * (64 << 10))
    assert [type(outcome.error).__name__ for outcome in told] == ["InvalidArgument"]
    simulation._until(lambda: not node.log.proposed, node)
    assert [outcome.error for outcome in told[1:]] == [None] * 6
