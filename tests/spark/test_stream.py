"""The streaming sink, exactly once: whatever fails, table and aggregate equal the sums of the input files.

Every test streams real files through a real Spark into a real server, makes something go wrong on the way, and
compares the whole table, event by event, and the whole aggregate with what was written to the files.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.seeds import seeds
from tests.spark import helpers
from tests.spark.helpers import Proxy, check, commit_of, committed, forget_last, wait_for_job

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]
ROOT = Path(__file__).resolve().parents[2]


def test_files_arrive_once_and_the_query_goes_on_from_its_checkpoint(run, source, db, table, tmp_path) -> None:
    source.add(2)
    source.add(1, rows=0)  # a micro-batch without rows takes its number too
    run()
    check(db, table, source.rows)
    source.add(2)
    run(partitions=3)
    check(db, table, source.rows)
    assert committed(tmp_path / "checkpoint") == [0, 1, 2, 3, 4]
    (scope,) = db.batch_scopes(f"spark/{table}/")
    query_id = json.loads((tmp_path / "checkpoint" / "metadata").read_text())["id"]
    assert scope == f"spark/{table}/{query_id}"


def test_a_committed_batch_that_is_replayed_in_other_pieces_counts_once(run, source, db, table, tmp_path) -> None:
    source.add(3)
    run()
    assert forget_last(tmp_path / "checkpoint") == 2
    source.add(1)
    run(partitions=3)
    check(db, table, source.rows)
    assert committed(tmp_path / "checkpoint") == [0, 1, 2, 3]


def test_a_task_that_dies_after_it_staged_is_run_again_and_counts_once(run, source, db, table) -> None:
    source.add(2)
    run("kivi_flaky", partitions=2)
    check(db, table, source.rows)


def test_the_commits_reply_is_lost_and_the_driver_asks_again(run, source, server, db, table) -> None:
    source.add(3)
    with Proxy(server.port, commit_of(table, "app", 1)) as proxy:
        run(endpoint=proxy.endpoint, applicationId="app")
        assert proxy.lost == 1
    check(db, table, source.rows)


def test_the_commits_reply_is_lost_and_the_driver_gives_up(run, source, server, db, table, tmp_path) -> None:
    """Spark aborts the batch, which is committed all the same, and replays it when the query starts again."""
    from pyspark.errors import StreamingQueryException

    source.add(3)
    with Proxy(server.port, commit_of(table, "app", 1), stays_down=True) as proxy:
        with pytest.raises(StreamingQueryException, match="CommitUnknown|Unavailable"):
            run(endpoint=proxy.endpoint, applicationId="app", timeout=2)
        assert proxy.lost == 1
        assert committed(tmp_path / "checkpoint") == [0]
        check(db, table, source.rows[:400])  # the server has it, Spark does not know
        proxy.up()
        run(endpoint=proxy.endpoint, applicationId="app", partitions=2)
    check(db, table, source.rows)


def test_a_frame_that_does_not_fit_fails_before_anything_is_written(spark, server, source, db, table, tmp_path) -> None:
    from pyspark.errors import StreamingQueryException

    source.add(1)
    before = db.stats()["stages"]
    rows = (
        spark.readStream.schema(helpers.SPARK_COLUMNS).parquet(str(source.folder)).withColumnRenamed("seq", "sequence")
    )
    query = (
        rows.writeStream.format("kivi")
        .options(endpoint=server.endpoint, table=table, checkpointLocation=str(tmp_path / "checkpoint"))
        .start()
    )
    with pytest.raises(StreamingQueryException, match=r"SchemaError: table .* has no column 'sequence'"):
        query.awaitTermination()
    assert db.stats()["stages"] <= before
    check(db, table, [])


def test_executors_load_the_client_and_never_the_store(run, source, tmp_path) -> None:
    source.add(1)
    run("kivi_spy", note=str(tmp_path / "note"))
    loaded: dict[str, set[str]] = {}
    for line in (tmp_path / "note").read_text().splitlines():
        who, _, modules = line.partition(" ")
        loaded.setdefault(who, set()).update(modules.split(","))
    assert loaded.keys() == {"task", "commit"}
    for modules in loaded.values():
        assert "kivi.client" in modules
        assert modules & {"rocksdict", "kivi.store", "kivi.engine", "kivi.mvcc"} == set()


def start_job(server: Any, table: str, source: helpers.Input, tmp_path: Path, pause: str) -> subprocess.Popen[str]:
    """The query as a program of its own, with its own Java. ``pause``: as of ``helpers.Paused``."""
    arguments = {
        "endpoint": server.endpoint,
        "table": table,
        "input": str(source.folder),
        "checkpoint": str(tmp_path / "checkpoint"),
        "scratch": str(tmp_path),
        "pause": pause,
        "note": str(tmp_path / "note"),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.spark.job", json.dumps(arguments)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@pytest.mark.story
@pytest.mark.parametrize("again", seeds(0, night=2))
def test_the_driver_is_killed(run, source, server, db, table, tmp_path, again) -> None:
    """On the way, by night twice; the last, which goes on from the checkpoint to the end, is this process."""
    files = 7 + 7 * again
    source.add(files, rows=100)
    checkpoint = tmp_path / "checkpoint"
    for goal, end in ((2, 5), (6, 12))[: 1 + again]:  # it is killed between them, however late this process sees it
        job = start_job(server, table, source, tmp_path, f"before {end}")
        wait_for_job(job, lambda: len(committed(checkpoint)) >= goal)  # noqa: B023
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
        assert goal <= len(committed(checkpoint)) <= end
    run()
    check(db, table, source.rows)
    assert len(db.batch_scopes(f"spark/{table}/")) == 1  # it stayed one application
    assert committed(checkpoint) == list(range(files))


def test_a_second_checkpoint_is_a_second_application(run, source, db, table) -> None:
    """The driver warns on its standard error, which Java has had since it started: test_exactly_once reads it."""
    source.add(1)
    run(checkpoint="one")
    run(checkpoint="two")
    run(checkpoint="two")
    assert len(db.batch_scopes(f"spark/{table}/")) == 2
