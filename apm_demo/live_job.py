"""One micro-batch of invocations, and the anomalies in it, in one kivi transaction, exactly once.

A table that is only appended to needs none of this: ``format("kivi")`` does it (``apm_demo.trace_job``). Here the batch
carries more than its events, so it is written in ``foreachBatch``, by ``kivi.spark.write_batch``::

    Spark      says, per endpoint, slot and file, which response was slowest
    tasks      stage the events (durable, invisible)
    driver     one transaction under the batch token (application, batch id):
                 append the stages; read the averages of the previous slots - at the transaction's snapshot, with the
                 batch's own events added; have Spark pick the events above the limits; append those as anomalies;
                 note which files the batch held

A batch that Spark runs again is answered with its first commit, and what the second run brought is dropped: events and
anomalies stay together. No Python statement runs per event, neither in the tasks (Arrow) nor on the driver, which sees
one row per endpoint, slot and file, and the anomalies themselves. Where nothing exceeds its limit, Spark is not asked
for them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

import kivi.spark
from apm_demo.rule import Totals, limit_us, previous_slot_us
from apm_demo.tables import Detector, micros

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamReader

__all__ = ["APPLICATION", "events", "start"]

# Whose batches these are. It lives as long as the checkpoint, which the demonstration makes and deletes with the store.
APPLICATION: Final = "apm_demo/invocations"
_LANDED: Final = (
    "customer string, application string, server string, endpoint_id long, ts_us long, resp_time_us long, "
    "status long, trace_id string"
)
_EVENT: Final = ("customer", "application", "server", "endpoint_id", "ts", "resp_time_us", "status", "trace_id")


def events(reader: DataFrameReader | DataStreamReader, landing: Any) -> DataFrame:
    """What has landed in a directory, or in files: the events, with the file of each."""
    from pyspark.sql import functions as F

    rows: DataFrame = reader.schema(_LANDED).option("mode", "FAILFAST").json(landing)
    return rows.select(
        *("customer", "application", "server", "endpoint_id"),
        F.timestamp_micros("ts_us").alias("ts"),
        *("resp_time_us", "status", "trace_id"),
        "ts_us",
        F.col("_metadata.file_name").alias("file"),
    )


def start(
    spark: SparkSession, endpoint: str, landing: Path, checkpoint: Path, detector: Detector, **trigger: Any
) -> StreamingQuery:
    """The streaming query: files that land in ``landing`` -> the server at ``endpoint``. ``trigger`` as Spark's."""
    from pyspark.sql import functions as F

    slot_us = F.col("ts_us") - F.pmod("ts_us", F.lit(detector.width_us))
    landed = events(spark.readStream, str(landing)).withColumn("slot_us", slot_us)
    batch = functools.partial(_batch, endpoint, detector)
    return (
        landed.writeStream.foreachBatch(batch).option("checkpointLocation", str(checkpoint)).trigger(**trigger).start()
    )


def _batch(endpoint: str, detector: Detector, frame: DataFrame, batch_id: int) -> None:
    frame = frame.persist()
    try:
        parts = _parts(frame)
        groups = parts.group_by(["endpoint_id", "slot_us"]).aggregate([("slowest_us", "max")])

        def also(tx: Any) -> None:
            limits = _limits(tx, detector, groups)
            anomalies = _anomalies(frame, limits, batch_id)
            if anomalies is not None:
                tx.append("anomalies", anomalies)
            tx.put(
                "batches",
                (batch_id,),
                files=",".join(sorted(set(parts["file"].to_pylist()))),
                events=pc.sum(parts["events"]).as_py() or 0,
                anomalies=0 if anomalies is None else anomalies.num_rows,
            )

        invocations = {"invocations": frame.select(*_EVENT)}
        kivi.spark.write_batch(batch_id, invocations, also=also, endpoint=endpoint, application_id=APPLICATION)
    finally:
        frame.unpersist()


def _parts(frame: DataFrame) -> pa.Table:
    """(file, endpoint_id, slot_us, slowest_us, events), a row for each combination."""
    from pyspark.sql import functions as F

    groups = frame.groupBy("file", "endpoint_id", "slot_us")
    return groups.agg(F.max("resp_time_us").alias("slowest_us"), F.count("*").alias("events")).toArrow()


def _limits(tx: Any, detector: Detector, groups: pa.Table) -> pa.Table:
    """The (endpoint, slot)s of the batch whose slowest event is an anomaly, and what they are measured against."""
    wanted = {
        (endpoint_id, slot): (endpoint_id, previous_slot_us(slot, detector.width_us))
        for endpoint_id, slot in zip(groups["endpoint_id"].to_pylist(), groups["slot_us"].to_pylist(), strict=True)
    }
    previous = sorted(set(wanted.values()))
    rows: list[Mapping[str, Any] | None] = tx.get_many(detector.table, previous) if previous else []
    totals = {
        (row["endpoint_id"], micros(row["slot"])): Totals(row["sum_resp_time"], row["invocations"])
        for row in rows
        if row is not None
    }
    limits = [
        {
            "endpoint_id": key[0],
            "slot_us": key[1],
            "limit_us": limit,
            "previous_sum_us": found[0],
            "previous_count": found[1],
        }
        for key, before in wanted.items()
        if (found := totals.get(before)) is not None and (limit := limit_us(found)) is not None
    ]
    fields = ("endpoint_id", "slot_us", "limit_us", "previous_sum_us", "previous_count")
    table = pa.Table.from_pylist(limits, pa.schema([(name, pa.int64()) for name in fields]))
    both = table.join(groups, ["endpoint_id", "slot_us"], join_type="inner")
    return both.filter(pc.greater(both["slowest_us_max"], both["limit_us"])).select(fields)


def _anomalies(frame: DataFrame, limits: pa.Table, batch_id: int) -> pa.Table | None:
    """The events above their limits, picked by Spark; None without asking it where there are none."""
    if not limits.num_rows:
        return None
    from pyspark.sql import functions as F

    spark = frame.sparkSession
    over = frame.join(F.broadcast(spark.createDataFrame(limits)), ["endpoint_id", "slot_us"]).where(
        "resp_time_us > limit_us"
    )
    return over.select(
        *_EVENT, "previous_sum_us", "previous_count", F.lit(batch_id).cast("long").alias("batch_id")
    ).toArrow()
