"""One micro-batch of invocations in one kivi transaction, exactly once, with a note of the files that it held.

A table that is only appended to needs none of this: ``format("kivi")`` does it (``apm_demo.trace_job``). Here the batch
carries a row besides its events, so it is written in ``foreachBatch``, by ``kivi.spark.write_batch``::

    tasks      stage the events (durable, invisible)
    driver     one transaction under the batch token (application, batch id):
                 append the stages, note which files the batch held; rules of the store judge it, as any commit

A batch that Spark runs again is answered with its first commit, and what the second run brought is dropped: events,
anomalies and the note stay together. No Python statement runs per event.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow.compute as pc

import kivi.spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamReader

__all__ = ["APPLICATION", "events", "start"]

# Whose batches these are. It lives as long as the checkpoint, which the demonstration makes and deletes with the store.
APPLICATION: Final = "apm_demo/invocations"
_LANDED: Final = (
    "customer string, application string, server string, endpoint_id long, ts_us long, duration_us long, "
    "status long, trace_id string"
)
_EVENT: Final = ("customer", "application", "server", "endpoint_id", "ts", "duration_us", "status", "trace_id")


def events(reader: DataFrameReader | DataStreamReader, landing: Any) -> DataFrame:
    """What has landed in a directory, or in files: the events, with the file of each."""
    from pyspark.sql import functions as F

    rows: DataFrame = reader.schema(_LANDED).option("mode", "FAILFAST").json(landing)
    return rows.select(
        *("customer", "application", "server", "endpoint_id"),
        F.timestamp_micros("ts_us").alias("ts"),
        *("duration_us", "status", "trace_id"),
        "ts_us",
        F.col("_metadata.file_name").alias("file"),
    )


def start(spark: SparkSession, endpoint: str, landing: Path, checkpoint: Path, **trigger: Any) -> StreamingQuery:
    """The streaming query: files that land in ``landing`` -> the server at ``endpoint``. ``trigger`` as Spark's."""
    batch = functools.partial(_batch, endpoint)
    stream = events(spark.readStream, str(landing)).writeStream.foreachBatch(batch)
    return stream.option("checkpointLocation", str(checkpoint)).trigger(**trigger).start()


def _batch(endpoint: str, frame: DataFrame, batch_id: int) -> None:
    frame = frame.persist()
    try:
        files = frame.groupBy("file").count().toArrow()

        def also(tx: Any) -> None:
            names = ",".join(sorted(files["file"].to_pylist()))
            tx.put("batches", (batch_id,), files=names, events=pc.sum(files["count"]).as_py() or 0)

        invocations = {"invocations": frame.select(*_EVENT)}
        kivi.spark.write_batch(batch_id, invocations, also=also, endpoint=endpoint, application_id=APPLICATION)
    finally:
        frame.unpersist()
