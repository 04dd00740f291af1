"""The paper's example through real Spark and a real server, in slots of five minutes; and a batch that Spark repeats.

Endpoint 251 takes 10 and 20 ms in [17:50, 17:55), and 121 ms at 17:55:03, which comes in a later batch. Endpoint 252
does the same within one batch: what the batch itself brings counts, or its anomaly would depend on how files are cut.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from apm_demo import live_job
from apm_demo.children import Child
from apm_demo.landing import land
from apm_demo.tables import create, create_rules, micros
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def moment(minute: int, second: int = 0) -> dt.datetime:
    return dt.datetime(2024, 3, 1, 17, minute, second, tzinfo=dt.UTC)


PLACE = {"customer": "acme", "application": "shop", "server": "shop-1"}


def event(endpoint_id: int, at: dt.datetime, ms: int) -> str:
    return json.dumps(
        {
            **PLACE,
            "endpoint_id": endpoint_id,
            "ts_us": micros(at),
            "duration_us": ms * 1_000,
            "status": 200,
            "trace_id": f"{endpoint_id}/{micros(at)}",
        }
    )


class Job:
    """The live job as the demonstration starts it."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self.landing, self.checkpoint, self._work = (folder / name for name in ("landing", "checkpoint", "work"))
        for made in (self.landing, self._work):
            made.mkdir()
        self._endpoint = endpoint
        self._log = folder / "job.log"

    def start(self) -> Child:
        folders = {"landing": self.landing, "checkpoint": self.checkpoint, "work": self._work}
        named = [text for name, folder in folders.items() for text in (f"--{name}", str(folder))]
        command = ("live", "--endpoint", self._endpoint)
        return Child(
            "job", self._log, "apm_demo.jobs", *command, *named, environment={"SPARK_LOCAL_DIRS": str(self._work)}
        )

    def go_on(self, spark: SparkSession) -> None:
        """The same query in this process, from its checkpoint until all that has landed is in."""
        query = live_job.start(spark, self._endpoint, self.landing, self.checkpoint, availableNow=True)
        assert query.awaitTermination(150)
        assert query.exception() is None


def wait_for_batch(db: Any, job: Child, batch_id: int) -> None:
    def came() -> bool:
        job.check()
        return db.get("batches", (batch_id,)) is not None

    wait_until(came, 150, reason=lambda: f"batch {batch_id} did not come\n{job.tail()}", pause_s=0.05)


def state(db: Any) -> tuple[list[Any], ...]:
    """Everything the job writes, at one snapshot."""
    with db.snapshot() as snapshot:
        names = ("invocations", "endpoint_5m", "customer_1h", "anomalies", "anomalies_per_endpoint", "batches")
        return tuple(list(snapshot.scan(name)) for name in names)


@pytest.mark.story
@pytest.mark.spark
@pytest.mark.timeout(400)
def test_the_papers_example_and_a_repeated_batch(tmp_path: Path, spark: SparkSession) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(tmp_path / "store"))
        db = stack.enter_context(server.connect())
        create(db)
        create_rules(db, "5m")
        job = Job(server.endpoint, tmp_path)
        land(job.landing, "part-0.jsonl", [event(251, moment(51), 10), event(251, moment(53), 20)])
        running = job.start()
        stack.callback(running.kill)
        wait_for_batch(db, running, 0)
        with db.snapshot() as snapshot:
            row = snapshot.get("endpoint_5m", (*PLACE.values(), 251, moment(50)))
            assert row is not None
            assert (row["sum_resp_time"], row["calls"], row["avg_resp_time"]) == (30_000, 2, 15_000.0)
            assert list(snapshot.scan("anomalies")) == []

        own = [event(252, moment(55, 3), 121), event(252, moment(55, 4), 30)]
        own += [event(252, moment(51), 10), event(252, moment(53), 20)]
        land(job.landing, "part-1.jsonl", [event(251, moment(55, 3), 121), *own])
        wait_for_batch(db, running, 1)
        running.kill()
        with db.snapshot() as snapshot:
            anomalies = list(snapshot.scan("anomalies"))
            row = snapshot.get("endpoint_5m", (*PLACE.values(), 251, moment(55)))
        found = sorted((a["endpoint_id"], a["ts"], a["duration_us"]) for a in anomalies)
        assert found == [(251, moment(55, 3), 121_000), (252, moment(55, 3), 121_000)]
        assert {(a["previous_sum_us"], a["previous_count"]) for a in anomalies} == {(30_000, 2)}
        assert row is not None
        assert (row["sum_resp_time"], row["calls"], row["slowest_us"]) == (121_000, 1, 121_000)

        # As if Spark had been killed after the commit and before it noted that (which perhaps it was): it runs the
        # last batch again, events and anomalies.
        before = state(db)
        noted = job.checkpoint / "commits" / "1"
        noted.unlink(missing_ok=True)
        noted.with_name(".1.crc").unlink(missing_ok=True)  # by this alone Spark would take the note for another query's
        job.go_on(spark)
        assert state(db) == before
        assert noted.exists(), "the batch was not run again, and this proved nothing"
