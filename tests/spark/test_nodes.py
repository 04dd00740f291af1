"""Jobs over several nodes of a cluster: tasks read one state by any of them, also when the one that planned the job has
died; and a batch counts once though its driver and a node were killed in the middle of it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import kivi
from kivi.spark.feed import AggregateFeed
from kivi.spark.options import Options
from kivi.spark.reading import Reader
from kivi.spark.schemas import Target, spark_schema
from kivi.spark.tail import EventTail, StreamReader, stream_schema
from tests.cluster.inprocess import Loop, Served
from tests.cluster.traffic import wait_for
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.serverproc import ServerProcess
from tests.spark import helpers
from tests.spark.test_exactly_once import start
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    require("nats-server")
    with NatsCluster(tmp_path, 1) as nats, contextlib.ExitStack() as stack:
        how = ("--cluster", "apm", "--nats", ",".join(nats.urls), "--log-bytes", "1GiB")
        yield [stack.enter_context(ServerProcess(tmp_path / f"node-{i}", *how)) for i in range(3)]


def test_tasks_read_by_any_node_what_was_there_when_the_job_was_planned(nodes: list[ServerProcess]) -> None:
    with nodes[1].connect() as db:
        db.create_table("rows", key={"id": "int64"}, columns={"v": "int64"})
        with db.transaction() as tx:
            for i in range(10):
                tx.put("rows", (i,), v=1)
    options = Options(table="rows", endpoint=nodes[0].endpoint, lease_ttl_s=60.0)
    with nodes[0].connect() as db:
        wait_for(tx.commit_ts or 0, db)
        target = Target.of(options.client(), "rows")
        reader = Reader(options, target, spark_schema(target))
        parts = reader.partitions()
    with nodes[1].connect() as db, db.transaction() as tx:
        for i in range(10):
            tx.put("rows", (i,), v=2)
    nodes[0].kill()
    for node in nodes[1:]:
        with node.connect() as db, db.snapshot(min_snapshot=tx.commit_ts) as now:
            assert {row["v"] for row in now.scan("rows")} == {2}
            db.consolidate()
        by_node = Reader(dataclasses.replace(options, endpoint=node.endpoint), target, spark_schema(target))
        found = [v for part in parts for batch in by_node.read(part) for v in batch.column("v").to_pylist()]
        assert found == [1] * 10


STREAMS: dict[str, type[StreamReader]] = {"calls": EventTail, "sums": AggregateFeed}


def stream_of(table: str, node: Served) -> Any:
    options = Options(table=table, endpoint=node.endpoint)
    target = Target.of(options.client(), table)
    return STREAMS[table](options, target, stream_schema(target, options))


@pytest.mark.parametrize("table", STREAMS)
def test_a_stream_goes_on_by_a_node_that_has_not_come_so_far(tmp_path: Path, table: str) -> None:
    """Its driver is another process by now, and connects to that node: no commit is lost for that."""
    require("nats-server")
    with contextlib.ExitStack() as opened:
        nats, loop = opened.enter_context(NatsCluster(tmp_path, 1)), opened.enter_context(Loop())
        one, two = (opened.enter_context(Served(tmp_path / name, nats, loop)) for name in ("one", "two"))
        db = opened.enter_context(one.connect())
        db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "user": "string", "us": "int64"})
        db.create_aggregate("sums", source="calls", group_by=["user"], measures={"us": kivi.sum("us")})
        made = db.watermark()
        wait_until(lambda: two.node.store.watermark() >= made)
        before, after = stream_of(table, one), stream_of(table, two)
        begin = before.initialOffset()

        def goes_on() -> tuple[Any, Any]:
            return after.partitions(begin, end), after.latestOffset(end, ReadAllAvailable())

        behind = opened.enter_context(contextlib.ExitStack())
        behind.enter_context(two.behind(one))
        db.append("calls", [{"ts": i, "user": f"user {i % 2}", "us": i} for i in range(10)])
        end = before.latestOffset(begin, ReadAllAvailable())
        assert end["ts"] > made
        later = opened.enter_context(ThreadPoolExecutor()).submit(goes_on)
        time.sleep(0.2)
        assert not later.done()
        behind.close()
        parts, newest = later.result(60)
        assert newest == end
        assert sum(us for part in parts for batch in after.read(part) for us in batch.column("us").to_pylist()) == 45


@pytest.mark.story
@pytest.mark.timeout(600)  # three sessions begin
def test_the_driver_and_a_node_are_killed_in_the_same_batch(
    nodes: list[ServerProcess], run, source, tmp_path: Path
) -> None:
    """Once when the batch is staged and not committed, once when it is committed and Spark does not know. What a node
    has staged is in the log, and so is a batch's mark: whatever node the next driver asks, the batch counts once."""
    endpoint = ",".join(node.endpoint for node in nodes)
    with kivi.connect(endpoint) as db:
        helpers.create(db, "calls")
    source.add(4, rows=100)
    checkpoint = tmp_path / "checkpoint"
    place = {"endpoint": endpoint, "table": "calls", "input": str(source.folder), "scratch": str(tmp_path)}
    for i, (pause, done, known) in enumerate((("before 1", 1, [0]), ("after 2", 3, [0, 1]))):
        note = tmp_path / pause
        job = start("job", **place, checkpoint=str(checkpoint), pause=pause, note=str(note))
        helpers.wait_for_job(job, note.exists)
        nodes[i].kill()
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
        assert helpers.committed(checkpoint) == known
        with kivi.connect(nodes[2].endpoint, read="fresh") as db:
            helpers.check(db, "calls", source.rows[: 100 * done])
    nodes[0].start()  # one of the two that have died; it takes part in what is left
    run(endpoint=endpoint, table="calls", partitions=3)
    nodes[1].start()
    assert helpers.committed(checkpoint) == [0, 1, 2, 3]
    for node in nodes:
        with kivi.connect(node.endpoint, read="fresh") as db:
            helpers.check(db, "calls", source.rows)
