"""Exactly once, proved: each thing that may go wrong between a task and the commit, made to happen.

The oracle is the input: after each story the table holds every row of the files once, and the aggregate their exact
sums (``helpers.check``). The stories, and where each is told:

=========================================================== ========================================================
a worker is killed after it staged                          here; foreachBatch: test_foreach
both attempts of a speculative task finish                  here, on a cluster of two workers; and test_sink
the driver is killed before a commit, and after one         here; at any moment: test_stream
... and a node of a cluster in the same batch               test_nodes
... and goes on with another number of partitions           here, test_stream
the commit's reply is lost                                  test_stream (once; for good), test_foreach
the last entry of Spark's commit log is lost                test_stream, test_foreach
an old batch comes again after a thousand others            here
the checkpoint is deleted                                   here (the warning), test_foreach, test_sink
staged data: invisible, dropped by a repeat or an abort     test_sink, tests/api, tests/store
staged data: a quota, a time limit, a restart               here, through the sink; tests/store/test_aggregates
=========================================================== ========================================================
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kivi
from kivi.errors import NotFound, ResourceExhausted
from kivi.spark.options import Options
from kivi.spark.schemas import Target, spark_schema
from kivi.spark.sink import Staged, StreamWriter
from tests.serverproc import ServerProcess
from tests.spark import helpers
from tests.spark.helpers import Input, check, committed, wait_for_job
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]


def start(module: str, **arguments: Any) -> subprocess.Popen[str]:
    """A program of this folder, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.spark.{module}", json.dumps(arguments)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def test_a_worker_is_killed_after_it_staged(run, source, db, table, tmp_path) -> None:
    """SIGKILL to the Python process of the first attempt, in each of two batches."""
    source.add(2)
    before = db.stats()["stage_bytes"]
    run("kivi_killed", partitions=2)
    check(db, table, source.rows)
    assert committed(tmp_path / "checkpoint") == [0, 1]
    assert db.stats()["stage_bytes"] > before  # what the killed ones staged is there, and nobody sees it


@pytest.mark.story
@pytest.mark.timeout(600)  # three sessions begin
def test_the_driver_is_killed_before_a_commit_and_after_one(run, source, server, db, table, tmp_path) -> None:
    """Each time the last process to live is the one that commits; then the query goes on in three parts."""
    source.add(4, rows=100)
    checkpoint = tmp_path / "checkpoint"
    place = {"endpoint": server.endpoint, "table": table, "input": str(source.folder), "scratch": str(tmp_path)}
    for pause, done, known in (("before 1", 1, [0]), ("after 2", 3, [0, 1])):
        note = tmp_path / pause
        job = start("job", **place, checkpoint=str(checkpoint), pause=pause, note=str(note))
        wait_for_job(job, note.exists)
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
        assert committed(checkpoint) == known
        check(db, table, source.rows[: 100 * done])
    run(partitions=3)
    check(db, table, source.rows)
    assert committed(checkpoint) == [0, 1, 2, 3]


@pytest.mark.story
def test_twins_of_a_task_both_finish_and_a_deleted_checkpoint_warns(source, server, db, table, tmp_path) -> None:
    """Spark's own speculation, on two workers: the twin of a straggler stages the same rows, and both return.

    Then, in the same cluster to save its start: a query whose checkpoint is deleted is a new application. Its rows are
    appended again, as documented, and the driver says so.
    """
    names = {"sink": table, "foreach": f"{table}_foreach", "lost": f"{table}_lost"}
    for name in list(names.values())[1:]:
        helpers.create(db, name)
    source.add(1)
    before = db.stats()["stage_bytes"]
    job = start("speculation", endpoint=server.endpoint, tables=names, input=str(source.folder), scratch=str(tmp_path))
    said, _ = job.communicate()
    assert job.returncode == 0, said
    for name in ("sink", "foreach"):
        met = {path.name for path in (tmp_path / "twins").glob(f"{names[name]}-*")}
        assert met == {f"{names[name]}-0", f"{names[name]}-1"}, said
        check(db, names[name], source.rows)
    assert db.stats()["stage_bytes"] > before  # the stages of two losers
    first, second = said.split("the checkpoint is deleted")
    assert "SecondApplication" not in first
    assert f"begins to feed table {names['lost']!r}, which 1 other(s) have fed" in second
    with db.snapshot() as snapshot:
        seqs = Counter(event["seq"] for event in snapshot.scan(names["lost"]))
        total = sum(row["total"] for row in snapshot.scan(f"{names['lost']}_5m"))
    assert seqs == {row["seq"]: 2 for row in source.rows}
    assert total == 2 * sum(row["resp_time_us"] for row in source.rows)


# -- the sink's own steps, without a Spark around them ----------------------------------------------------


class Sink:
    """The stream's sink as Spark makes it, and one batch of rows for it."""

    def __init__(self, db: Any, endpoint: str, table: str, source: Input, **options: str) -> None:
        if not source.files:
            source.add(1)
        self.rows = pq.read_table(source.folder / "00000.parquet").to_batches()
        given = {"endpoint": endpoint, "table": table, "applicationId": "app", "timeout": "5", **options}
        self.writer = StreamWriter(Options.of(given), spark_schema(Target.of(db, table)))

    def stage(self, rows: list[pa.RecordBatch] | None = None) -> Staged:
        return self.writer.write(iter(self.rows if rows is None else rows))

    def commit(self, batch: int, *messages: Staged) -> None:
        self.writer.commit(messages, batch)


@pytest.mark.story
def test_an_old_batch_comes_again_after_a_thousand_others(server, db, table, source) -> None:
    sink = Sink(db, server.endpoint, table, source)
    for batch in range(1_004):
        sink.commit(batch, *([sink.stage()] if batch == 3 else []))
    check(db, table, source.rows)
    staged, w = db.stats()["stage_bytes"], db.watermark()
    sink.commit(3, sink.stage(), sink.stage([row.slice(0, 10) for row in sink.rows]))
    db.consolidate()
    sink.commit(3, sink.stage())
    check(db, table, source.rows)
    wait_until(lambda: db.stats()["stage_bytes"] <= staged)  # no answer waits for that
    assert db.watermark() >= w


@pytest.fixture
def own(tmp_path):
    """A server of its own with small limits, to be killed; started with the settings that are given."""
    running: list[ServerProcess] = []

    def own(**settings: Any) -> ServerProcess:
        arguments = [text for name, value in settings.items() for text in ("--set", f"{name}={value}")]
        running.append(ServerProcess(tmp_path / "own", *arguments).start())
        return running[0]

    yield own
    for server in running:
        server.kill()


def test_what_was_staged_outlives_a_crash_of_the_server_and_is_committed_after_it(own, source) -> None:
    server = own()
    with kivi.connect(server.endpoint, timeout=30) as db:
        helpers.create(db, "t")
        sink = Sink(db, server.endpoint, "t", source, timeout="30")
        messages = [sink.stage(sink.rows), sink.stage([])]
        held = db.stats()["stage_bytes"]
    server.restart()
    with kivi.connect(server.endpoint, timeout=30) as db:
        assert db.stats()["stage_bytes"] == held > 0
        check(db, "t", [])
        sink.commit(0, *messages)
        check(db, "t", source.rows)
        server.restart()
    with kivi.connect(server.endpoint, timeout=30) as db:
        sink.commit(0, *messages)  # the token outlived it too
        check(db, "t", source.rows)


def test_staged_data_have_a_quota_which_a_commit_or_an_abort_frees(own, source) -> None:
    server = own(stage_bytes=30_000)
    with kivi.connect(server.endpoint, timeout=30) as db:
        helpers.create(db, "t")
        sink = Sink(db, server.endpoint, "t", source, timeout="4")
        messages: list[Staged] = []
        with pytest.raises(ResourceExhausted, match="staged and not committed"):
            while len(messages) < 100:
                messages.append(sink.stage())
        assert 1 < len(messages) < 100
        sink.writer.abort(messages[1:], 0)
        sink.commit(0, messages[0])
        wait_until(lambda: db.stats()["stage_bytes"] == 0)
        check(db, "t", source.rows)
        sink.commit(1, sink.stage([]))


@pytest.mark.parametrize("kind", ["event", "row"])
def test_what_nobody_commits_is_collected_and_a_late_commit_fails(own, source, kind) -> None:
    """And its batch comes again with rows of its own: a commit that finds its stages gone does nothing."""
    server = own(stage_ttl_s=0.5)
    with kivi.connect(server.endpoint, timeout=30) as db:
        helpers.create(db, "t")
        db.create_table("r", key={"seq": "int64"}, columns={"resp_time_us": kivi.sum("int64")})
        sink = Sink(db, server.endpoint, "t" if kind == "event" else "r", source)
        if kind == "row":
            sink.rows = [batch.select(["seq", "resp_time_us"]) for batch in sink.rows]
        message = sink.stage()
        wait_until(lambda: not db.stats()["stage_bytes"], 60, reason="it is not collected", pause_s=0.05)
        with pytest.raises(NotFound, match="stage the data again"):
            sink.commit(0, message)
        server.arguments.clear()
        server.restart()  # where the next one is not collected before a busy machine commits it
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sink.commit(0, sink.stage())
        if kind == "event":
            check(db, "t", source.rows)
        else:
            with db.snapshot() as snapshot:
                found = {row["seq"]: row["resp_time_us"] for row in snapshot.scan("r")}
            assert found == {row["seq"]: row["resp_time_us"] for row in source.rows}
