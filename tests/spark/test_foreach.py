"""``foreachBatch`` with several tables: one commit for all of them, once, whatever fails on the way.

A batch goes into an event table with its aggregate, into a second event table (what was slow), and into a row table
(how often each endpoint was called): all three are compared with the sums of the input files.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

import kivi
import kivi.spark
from kivi.errors import InvalidArgument, NotFound, OutOfSequence, SchemaError
from kivi.spark import foreach
from tests.spark import helpers
from tests.spark.helpers import Proxy, check, committed, forget_last
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]
SLOW = 1 << 39


def split(batch: Any) -> dict[str, Any]:
    """The batch, its slow part, and its calls for each endpoint; the tables' names come in as a column."""
    from pyspark.sql import functions as F

    return {
        "calls": batch,
        "slow": batch.where(F.col("resp_time_us") > SLOW).select("seq", "ts"),
        "totals": batch.select("endpoint_id", F.lit(1).alias("calls"), F.col("resp_time_us").alias("slowest")),
    }


class Tables:
    """Three tables of a test's own."""

    def __init__(self, db: Any, name: str) -> None:
        self.db = db
        self.names = {"calls": name, "slow": f"{name}_slow", "totals": f"{name}_totals"}
        db.create_event_table(self.names["slow"], event_time="ts", columns={"seq": "int64", "ts": "timestamp"})
        db.create_table(
            self.names["totals"],
            key={"endpoint_id": "int64"},
            columns={"calls": kivi.sum("int64"), "slowest": kivi.max("int64")},
        )

    def split(self, batch: Any) -> dict[str, Any]:
        return {self.names[what]: frame for what, frame in split(batch).items()}

    def check(self, rows: list[dict[str, int]]) -> None:
        """All three hold exactly ``rows``, and at every commit of the batches they agreed."""
        check(self.db, self.names["calls"], rows)
        with self.db.snapshot() as snapshot:
            slow = [row["seq"] for row in snapshot.scan(self.names["slow"])]
            totals = {row["endpoint_id"]: (row["calls"], row["slowest"]) for row in snapshot.scan(self.names["totals"])}
        assert sorted(slow) == sorted(row["seq"] for row in rows if row["resp_time_us"] > SLOW)
        calls = Counter(row["endpoint_id"] for row in rows)
        slowest = {e: max(row["resp_time_us"] for row in rows if row["endpoint_id"] == e) for e in calls}
        assert totals == {e: (calls[e], slowest[e]) for e in calls}


@pytest.fixture
def tables(db, table) -> Tables:
    return Tables(db, table)


@pytest.fixture
def stream(spark, source, tmp_path):
    """Runs ``foreachBatch(function)`` over the input until it has caught up, a file per micro-batch."""

    def stream(function: Any, checkpoint: str = "checkpoint", partitions: int = 2) -> Any:
        frame = spark.readStream.schema(helpers.SPARK_COLUMNS).option("maxFilesPerTrigger", 1)
        rows = frame.parquet(str(source.folder)).repartition(partitions)
        place = str(tmp_path / checkpoint)
        query = rows.writeStream.foreachBatch(function).option("checkpointLocation", place)
        query = query.trigger(availableNow=True).start()
        query.awaitTermination()
        return query

    return stream


@pytest.fixture
def write(server, tables):
    """What a user hands to ``foreachBatch``."""

    def write(**options: Any) -> Any:
        return kivi.spark.into_tables(tables.split, endpoint=server.endpoint, **options)

    return write


def test_a_batch_is_one_commit_and_the_query_goes_on_from_its_checkpoint(
    stream, write, source, db, tables, tmp_path
) -> None:
    source.add(2)
    source.add(1, rows=0)
    before = db.stats()["commits"]
    stream(write())
    assert db.stats()["commits"] == before + 3 + 3  # the batches, and the marks of whose tables they are
    tables.check(source.rows)
    source.add(1)
    stream(write(), partitions=3)
    tables.check(source.rows)
    query_id = json.loads((tmp_path / "checkpoint" / "metadata").read_text())["id"]
    assert f"spark/*/{query_id}" in db.batch_scopes("spark/*/")


def test_a_committed_batch_that_is_replayed_in_other_pieces_counts_once(
    stream, server, source, db, tables, tmp_path
) -> None:
    written: list[kivi.spark.Written] = []

    def write(batch: Any, batch_id: int) -> None:
        written.append(kivi.spark.write_batch(batch_id, tables.split(batch.persist()), endpoint=server.endpoint))

    source.add(3)
    stream(write)
    staged = db.stats()["stage_bytes"]
    assert forget_last(tmp_path / "checkpoint") == 2
    source.add(1)
    stream(write, partitions=3)
    tables.check(source.rows)
    assert [w.repeated for w in written] == [False, False, False, True, False]
    assert written[3].commit_ts == written[2].commit_ts
    assert all(w.rows[tables.names["calls"]] == w.rows[tables.names["totals"]] == 200 for w in written)
    wait_until(
        lambda: db.stats()["stage_bytes"] <= staged
    )  # what the replay staged is dropped; no answer waits for that


def test_a_worker_that_is_killed_after_it_staged(stream, write, source, db, tables, tmp_path, monkeypatch) -> None:
    """SIGKILL to the Python process of the first attempt, each batch and table; its stages are never named."""
    source.add(2)
    before = db.stats()["stage_bytes"]
    monkeypatch.setattr(foreach, "Stager", helpers.KilledStager)
    stream(write(application_id="killed"))
    tables.check(source.rows)
    assert committed(tmp_path / "checkpoint") == [0, 1]
    assert db.stats()["stage_bytes"] > before  # what the killed ones left is there, and nobody sees it


def test_the_commits_reply_is_lost_and_asked_for_again(stream, server, source, tables) -> None:
    source.add(3)
    with Proxy(server.port, helpers.commit_of("*", "lost", 1)) as proxy:
        stream(kivi.spark.into_tables(tables.split, endpoint=proxy.endpoint, application_id="lost"))
        assert proxy.lost == 1
    tables.check(source.rows)


def test_when_a_frame_does_not_fit_nothing_is_staged(spark, server, db, tables) -> None:
    good = spark.sql("select 1L as seq, timestamp'2026-07-01 12:00:00' as ts")
    before = db.stats()["stages"]
    slow, calls = tables.names["slow"], tables.names["calls"]
    for frames, error, what in (
        ({slow: good, calls: good.withColumnRenamed("seq", "number")}, SchemaError, "has no column 'number'"),
        ({slow: good, f"{calls}_5m": good}, InvalidArgument, "is a table of kind aggregate"),
        ({slow: good, "nowhere": good}, NotFound, "nowhere"),
        ({slow: good, calls: spark.readStream.format("rate").load()}, InvalidArgument, "call this in foreachBatch"),
        ([good], InvalidArgument, "a mapping of table names to data frames, not list"),
    ):
        with pytest.raises(error, match=what):
            kivi.spark.write_batch(0, frames, endpoint=server.endpoint, application_id="bad")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="give application_id"):
        kivi.spark.write_batch(0, {slow: good}, endpoint=server.endpoint)
    with pytest.raises(InvalidArgument, match="no argument 'endpont'"):
        kivi.spark.into_tables(tables.split, endpont=server.endpoint)
    with pytest.raises(InvalidArgument, match="a batch id is a number"):
        kivi.spark.write_batch(-1, {slow: good}, endpoint=server.endpoint, application_id="bad")
    assert db.stats()["stages"] <= before
    tables.check([])


def test_what_else_is_written_is_in_the_same_transaction_or_not_there(spark, server, db, tables) -> None:
    """``also`` sees the batch's own events in the aggregate; when it fails, nothing of the batch happens."""
    calls, totals = tables.names["calls"], tables.names["totals"]
    frame = spark.sql(
        "select id as seq, 7L as endpoint_id, timestamp'2026-07-01 12:00:00' as ts, 10L as resp_time_us from range(5)"
    )

    def also(tx: Any) -> None:
        (row,) = tx.scan(f"{calls}_5m", prefix=(7,))
        tx.delta(totals, (7,), calls=row["invocations"], slowest=row["total"])

    def broken(tx: Any) -> None:
        also(tx)
        raise RuntimeError("planted")

    def batch(batch_id: int, do: Any) -> kivi.spark.Written:
        return kivi.spark.write_batch(
            batch_id, {calls: frame}, also=do, endpoint=server.endpoint, application_id=f"also {calls}"
        )

    staged = db.stats()["stage_bytes"]
    with pytest.raises(RuntimeError, match="planted"):
        batch(0, broken)
    tables.check([])
    wait_until(lambda: db.stats()["stage_bytes"] <= staged)  # given up
    assert batch(0, also).rows == {calls: 5}
    assert batch(0, also).repeated
    with db.snapshot() as snapshot:
        assert list(snapshot.scan(totals)) == [{"endpoint_id": 7, "calls": 5, "slowest": 50}]
    with pytest.raises(OutOfSequence):
        batch(2, also)


def test_a_table_of_one_column(spark, server, db, table) -> None:
    """Spark then hands the tasks arrays, and not tuples of them."""
    db.create_event_table(f"{table}_moments", event_time="ts", columns={"ts": "timestamp"})
    frame = spark.sql("select timestamp_micros(id) as ts from range(1000)").repartition(3)
    written = kivi.spark.write_batch(
        0, {f"{table}_moments": frame}, endpoint=server.endpoint, application_id=f"moments of {table}"
    )
    assert written.rows == {f"{table}_moments": 1000}
    assert not written.repeated
    with db.snapshot() as snapshot:
        assert len(set(snapshot.to_arrow(f"{table}_moments")["ts"].to_pylist())) == 1000


def test_several_sinks_write_into_one_store_at_once(spark, write, server, source, db, table, tables, tmp_path) -> None:
    """Two queries of ``format("kivi")`` into one table and one of ``foreachBatch`` into others, at the same time."""
    other = f"{table}_sink"
    helpers.create(db, other)
    source.add(4)

    def writer(name: str) -> Any:
        rows = spark.readStream.schema(helpers.SPARK_COLUMNS).option("maxFilesPerTrigger", 1)
        rows = rows.parquet(str(source.folder)).repartition(2)
        return rows.writeStream.option("checkpointLocation", str(tmp_path / name)).trigger(availableNow=True)

    sink = {"endpoint": server.endpoint, "table": other}
    queries = [
        writer("foreach").foreachBatch(write(application_id="together")).start(),
        writer("one").format("kivi").options(**sink).start(),
        writer("two").format("kivi").options(**sink).start(),
    ]
    for query in queries:
        query.awaitTermination()
    tables.check(source.rows)
    with db.snapshot() as snapshot:
        seqs = Counter(event["seq"] for event in snapshot.scan(other))
        aggregate = list(snapshot.scan(f"{other}_5m"))
    assert seqs == {row["seq"]: 2 for row in source.rows}
    assert sum(row["invocations"] for row in aggregate) == 2 * len(source.rows)
    assert sum(row["total"] for row in aggregate) == 2 * sum(row["resp_time_us"] for row in source.rows)


def test_a_new_checkpoint_is_a_second_application_and_warns(stream, write, run, source, tables, table) -> None:
    """Any other warning is an error here: two applications that feed different tables are none of each other's."""
    source.add(1)
    first = stream(write(), "one")
    source.add(1)
    stream(write(), "one")
    tables.check(source.rows)
    with pytest.warns(kivi.spark.SecondApplication) as said:
        second = stream(write(), "two")
    assert [str(warning.message).partition(". If")[0] for warning in said] == [
        f"application *{second.id} begins to feed table {name!r}, which 1 other(s) have fed (*{first.id})"
        for name in tables.names.values()
    ]
    with pytest.raises(InvalidArgument, match=r"must not begin with \*"):
        write(application_id=f"*{first.id}")


def test_progress_is_in_sparks_own_metrics(spark, run, write, source, db, table, tmp_path) -> None:
    """``format("kivi")`` counts its rows; ``foreachBatch`` cannot, and observes itself, as ``kivi.spark`` says."""
    from pyspark.sql import functions as F

    source.add(2)
    helpers.create(db, f"{table}_sink")
    query = run(table=f"{table}_sink")
    assert [progress.sink.numOutputRows for progress in query.recentProgress] == [200, 200]
    rows = spark.readStream.schema(helpers.SPARK_COLUMNS).parquet(str(source.folder))
    seen = rows.observe("kivi", F.count(F.lit(1)).alias("rows"), F.sum("resp_time_us").alias("total"))
    place = str(tmp_path / "observed")
    query = seen.writeStream.foreachBatch(write(application_id="observed")).option("checkpointLocation", place)
    query = query.trigger(availableNow=True).start()
    query.awaitTermination()
    (progress,) = query.recentProgress
    total = sum(row["resp_time_us"] for row in source.rows)
    assert progress.observedMetrics["kivi"].asDict() == {"rows": 400, "total": total}
    assert progress.sink.numOutputRows == -1
    assert progress.numInputRows == 400  # the batch is cached: it was read once
