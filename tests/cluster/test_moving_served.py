"""A fourth node gets a quarter of the shards while clients append, and it and the old owner are killed over it."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import kivi
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.serverproc import ServerProcess
from tests.waiting import PATIENCE_S, wait_until

COLUMNS = {"ts": "timestamp", "user": "string", "us": "int64", "pad": "string"}
USERS = [f"user {i}" for i in range(200)]
MEASURES = {"n": kivi.count(), "us": kivi.sum("us"), "mean": kivi.avg(kivi.col("us") / 7)}


def append(i: int, tx: Any) -> None:
    tx.append("calls", [{"ts": i, "user": user, "us": i, "pad": "x" * 40} for user in USERS])


class Appending:
    """A client that appends until it is told to stop; ``acknowledged`` events."""

    def __init__(self, endpoints: str) -> None:
        self.acknowledged, self._ending = 0, False
        self._thread = threading.Thread(target=self._run, args=(endpoints,))
        self._thread.start()

    def _run(self, endpoints: str) -> None:
        with kivi.connect(endpoints, timeout=PATIENCE_S) as db:
            for i in range(100_000):
                if self._ending:
                    return
                db.run(functools.partial(append, i))
                self.acknowledged += len(USERS)
                time.sleep(0.02)

    def stop(self) -> int:
        self._ending = True
        self._thread.join()
        return self.acknowledged


def asked(db: Any, shared: Any) -> list[Any]:
    """Of the shared snapshot, at a node that may have to hear of it."""
    with db.snapshot(lease=shared.lease, min_snapshot=shared.ts) as snap:
        return [
            list(snap.scan("sums")),
            list(snap.query("calls", group_by=["user"], measures={"n": kivi.count(), "us": kivi.sum("us")})),
            snap.get_many("sums", [(user,) for user in USERS]),
            list(snap.rollup("sums", by=[], measures=["n", "us"])),
        ]


def moves(db: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = db.cluster_status()["moves"]
    return found


@pytest.mark.story
def test_a_new_node_is_given_a_quarter_under_load(tmp_path: Path) -> None:
    require("nats-server")
    with contextlib.ExitStack() as opened:
        nats = opened.enter_context(NatsCluster(tmp_path, 1))
        how = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB")
        nodes = {"a": opened.enter_context(ServerProcess(tmp_path / "a", *how))}
        with kivi.connect(nodes["a"].endpoint) as db:
            db.create_event_table("calls", event_time="ts", columns=COLUMNS, shard_by=["user"])
            db.create_aggregate("sums", source="calls", group_by=["user"], measures=MEASURES)
            for i in range(50):
                db.append("calls", [{"ts": i, "user": u, "us": j, "pad": ""} for u in USERS for j in range(20)])
            for other in ("b", "c", "d"):
                db.checkpoint(tmp_path / other)
        for other, held in (("b", "0-31"), ("c", "32-63"), ("d", "0-7")):
            nodes[other] = opened.enter_context(ServerProcess(tmp_path / other, *how, "--shards", held))
            nodes[other].arguments = [*how]  # what it holds is said in its directory from now on
        endpoints = ",".join(node.endpoint for node in nodes.values())
        clients = [Appending(endpoints) for _ in range(2)]
        try:
            with kivi.connect(nodes["a"].endpoint) as db:
                wait_until(
                    lambda: (
                        {one["address"] for one in db.cluster_status()["nodes"]}
                        >= {node.endpoint for node in nodes.values()}
                    )
                )
                db.move_shards("0-7", nodes["d"].endpoint, source=nodes["b"].endpoint)
                wait_until(lambda: not moves(db))
                nodes["d"].signal(signal.SIGSTOP)  # so it has not taken them when it is killed
                db.move_shards("32-39", nodes["d"].endpoint, source=nodes["c"].endpoint)
                assert [one["since"] for one in moves(db)] == [0]
                nodes["d"].kill()
                nodes["d"].start()
                wait_until(lambda: not moves(db))
                with kivi.connect(nodes["c"].endpoint) as at_c, at_c.snapshot() as snap:
                    assert snap.ts  # somebody reads there below the move, so they are not given up before the kill
                    db.move_shards("40-47", nodes["d"].endpoint, source=nodes["c"].endpoint)
                    wait_until(lambda: [one["since"] > snap.ts for one in moves(db)] == [True])
                    nodes["c"].kill()
                assert [one["since"] > 0 for one in moves(db)] == [True]
                nodes["c"].start()
                wait_until(lambda: not moves(db))
        finally:
            acknowledged = sum(client.stop() for client in clients)
        at_all = [opened.enter_context(node.connect()) for node in nodes.values()]
        wait_until(
            lambda: (
                {n["address"]: n["shards"] for n in at_all[0].cluster_status()["nodes"] if n["state"] == "live"}
                == dict(zip((n.endpoint for n in nodes.values()), ("0-63", "8-31", "48-63", "0-7,32-47"), strict=True))
            )
        )
        newest = max(db.watermark() for db in at_all)
        snap = opened.enter_context(at_all[0].snapshot(shared=True, min_snapshot=newest))
        answers = [asked(db, snap) for db in at_all]
        assert answers[0][3][0]["n"] == 50 * 20 * len(USERS) + acknowledged
        assert all(answer == answers[0] for answer in answers)
