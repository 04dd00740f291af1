"""The trace into its own table, through the plain sink: ``format("kivi")`` is exactly once by itself.

The demonstration kills this job and starts it again. Nothing here knows of that.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["start"]

_LANDED: Final = "service string, timestamp string, context_tokens long, generated_tokens long"


def start(spark: SparkSession, endpoint: str, landing: Path, checkpoint: Path, **trigger: Any) -> StreamingQuery:
    """The streaming query: CSV files that land in ``landing`` -> ``llm_requests``, one file a batch."""
    from pyspark.sql import functions as F

    # Seven digits after the point, of which a timestamp keeps six: the text is cut, so that nothing can round it.
    return (
        spark.readStream.schema(_LANDED)
        .option("mode", "FAILFAST")
        .option("maxFilesPerTrigger", 1)
        .csv(str(landing))
        .select(
            "service",
            F.substring("timestamp", 1, 26).cast("timestamp").alias("ts"),
            "context_tokens",
            "generated_tokens",
        )
        .writeStream.format("kivi")
        .option("endpoint", endpoint)
        .option("table", "llm_requests")
        .option("checkpointLocation", str(checkpoint))
        .trigger(**trigger)
        .start()
    )
