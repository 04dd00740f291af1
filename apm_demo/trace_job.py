"""The trace into its own table, through the plain sink: ``format("kivi")`` is exactly once by itself.

The demonstration kills this job and starts it again. Nothing here knows of that.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamReader

__all__ = ["events", "start"]

_LANDED: Final = (
    "service string, timestamp string, context_tokens long, generated_tokens long, status long, trace_id string"
)


def events(reader: DataFrameReader | DataStreamReader, landing: str) -> DataFrame:
    """What has landed, in the columns of the table."""
    from pyspark.sql import functions as F

    # Seven digits after the point, of which a timestamp keeps six: the text is cut, so that nothing can round it.
    rows: DataFrame = reader.schema(_LANDED).option("mode", "FAILFAST").csv(landing)
    moment = F.substring("timestamp", 1, 26).cast("timestamp").alias("ts")
    return rows.select("service", moment, "context_tokens", "generated_tokens", "status", "trace_id")


def start(spark: SparkSession, endpoint: str, landing: Path, checkpoint: Path, **trigger: Any) -> StreamingQuery:
    """The streaming query: CSV files that land in ``landing`` -> ``llm_requests``, one file a batch."""
    return (
        events(spark.readStream.option("maxFilesPerTrigger", 1), str(landing))
        .writeStream.format("kivi")
        .option("endpoint", endpoint)
        .option("table", "llm_requests")
        .option("checkpointLocation", str(checkpoint))
        .trigger(**trigger)
        .start()
    )
