"""The demonstration on three nodes, as ``make cluster-demo`` runs it, and what it finds where something is wrong."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

import kivi
from apm_demo.cluster import Client, pulses_are
from tests.conftest import require
from tests.demo.test_demo import demo, left_behind


@pytest.mark.story
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_the_sums_are_proved_on_each_node_though_some_were_killed(tmp_path: Path) -> None:
    require("nats-server")
    data, home = tmp_path / "data", tmp_path / "home"
    home.mkdir()
    process = demo(data, "--cluster", "--seconds", "36", home=home)
    assert process.stdout is not None
    with process.stdout:
        said = process.stdout.read()
    assert process.wait() == 0, said
    assert len(re.findall(r"kill -9 of node \d,", said)) == 1
    assert len(re.findall(r"kill -9 of the nats-server of node \d, which led the log", said)) == 1
    assert len(re.findall(r"was killed: the longest that one of 6 clients waited for a commit was \d", said)) == 2
    assert len(set(re.findall(r"node \d, on \S+, at snapshot (\d+):", said))) == 1
    assert "All sums are proved: 24 of 24 checks." in said
    assert "WRONG" not in said
    assert left_behind(data) == []


def test_a_commit_that_is_lost_or_counts_twice_is_found() -> None:
    with kivi.open() as db:
        db.create_table("pulses", key={"client": "int64"}, columns={"commits": kivi.sum("int64")})
        with db.transaction() as tx:
            tx.delta("pulses", (0,), commits=5)
            tx.delta("pulses", (1,), commits=7)
        with db.snapshot() as snapshot:
            assert pulses_are(snapshot, {0: 5, 1: 7}).wrong == []
            found = pulses_are(snapshot, {0: 6, 1: 6, 2: 1}).wrong
    assert [sentence.partition(":")[0] for sentence in found] == ["client 0", "client 1", "client 2"]


def test_a_pause_counts_from_the_kill_on_and_until_now() -> None:
    client, now = Client("localhost:1", 0, made=0), time.monotonic()
    client.acknowledged = [now - 9.0, now - 7.0, now - 6.5, now - 2.0]
    assert client.pause_s(now - 8.0) == pytest.approx(4.5)
    assert client.pause_s(now - 2.1) == pytest.approx(2.0, abs=0.5)
