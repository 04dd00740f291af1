"""A job's tasks read one state by several nodes of a cluster, also when the one that planned it has died."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest

import kivi
from kivi.spark.options import Options
from kivi.spark.reading import Reader
from kivi.spark.schemas import Target, spark_schema
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.serverproc import ServerProcess

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]


def test_tasks_read_by_any_node_what_was_there_when_the_job_was_planned(tmp_path: Path) -> None:
    require("nats-server")
    with NatsCluster(tmp_path, 1) as nats, contextlib.ExitStack() as stack:
        how = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB")
        nodes = [stack.enter_context(ServerProcess(tmp_path / f"node-{i}", *how)) for i in range(3)]
        with kivi.connect(nodes[1].endpoint) as db:
            db.create_table("rows", key={"id": "int64"}, columns={"v": "int64"})
            with db.transaction() as tx:
                for i in range(10):
                    tx.put("rows", (i,), v=1)
        options = Options(table="rows", endpoint=nodes[0].endpoint, lease_ttl_s=60.0)
        with kivi.connect(nodes[0].endpoint) as db, db.snapshot(min_snapshot=tx.commit_ts):
            target = Target.of(options.client(), "rows")
            reader = Reader(options, target, spark_schema(target))
            parts = reader.partitions()
        with kivi.connect(nodes[1].endpoint) as db, db.transaction() as tx:
            for i in range(10):
                tx.put("rows", (i,), v=2)
        nodes[0].kill()
        for node in nodes[1:]:
            with kivi.connect(node.endpoint) as db, db.snapshot(min_snapshot=tx.commit_ts) as now:
                assert {row["v"] for row in now.scan("rows")} == {2}
                db.consolidate()
            by_node = Reader(dataclasses.replace(options, endpoint=node.endpoint), target, spark_schema(target))
            found = [v for part in parts for batch in by_node.read(part) for v in batch.column("v").to_pylist()]
            assert found == [1] * 10
