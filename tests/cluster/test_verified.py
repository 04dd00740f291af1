"""`kivi cluster verify` on three real nodes: while clients append it alarms nobody, and it finds what was damaged."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

import kivi
from kivi.encoding.keyspaces import Space, table_prefix
from tests.cluster.test_moving_served import COLUMNS, MEASURES, USERS, Appending
from tests.cluster.test_verifying import flip
from tests.cluster.traffic import wait_for
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.serverproc import EndedError, ServerProcess
from tests.waiting import wait_until


def verify(node: ServerProcess) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kivi.cli", "cluster", "verify", "--endpoint", node.endpoint]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.story
def test_nodes_compare_what_they_store_under_load_and_one_that_was_damaged_stops(tmp_path: Path) -> None:
    require("nats-server")
    with contextlib.ExitStack() as opened:
        nats = opened.enter_context(NatsCluster(tmp_path, 1))
        how = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB")
        one, two, three = (opened.enter_context(ServerProcess(tmp_path / name, *how)) for name in ("a", "b", "c"))
        with one.connect() as db:
            db.create_event_table("calls", event_time="ts", columns=COLUMNS, shard_by=["user"])
            db.create_aggregate("sums", source="calls", group_by=["user"], measures=MEASURES)
            table, made = db.describe("sums")["id"], db.watermark()
        for node in (two, three):
            with node.connect() as db:
                wait_for(made, db)
        appending = Appending(f"{one.endpoint},{two.endpoint},{three.endpoint}")
        for node in (one, two, three, one, two):
            done = verify(node)
            assert done.returncode == 0, done.stderr
            assert "agree" in done.stdout
            assert "differ" not in done.stdout and "undecided" not in done.stdout
        acknowledged = appending.stop()
        assert acknowledged
        with three.connect() as db:
            db.consolidate()
        three.stop()
        flip(str(tmp_path / "c"), table_prefix(Space.ROW, table))
        three.start()
        done = verify(one)
        assert done.returncode == 1
        assert "differ" in done.stdout and three.endpoint in done.stdout
        wait_until(lambda: "make it anew" in "".join(three.output))
        with pytest.raises(kivi.KiviError), kivi.connect(three.endpoint, timeout=2.0) as db:  # or nobody is there
            db.get("sums", (USERS[0],))
        for node in (one, two):
            with kivi.connect(node.endpoint, read="fresh") as db:
                db.append("calls", [{"ts": 0, "user": USERS[0], "us": 1, "pad": ""}])
                acknowledged += 1
                with db.snapshot() as snap:
                    assert sum(row["n"] for row in snap.scan("sums")) == acknowledged
        three.stop()
        with pytest.raises(EndedError, match="make it anew"):
            three.start()
