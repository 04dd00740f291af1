"""A streaming job that a test starts as a program, to kill it: ``python -m tests.spark.job '{...}'``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import kivi.spark
from tests.spark.helpers import SPARK_COLUMNS, Paused, settings


def main(endpoint: str, table: str, input: str, checkpoint: str, scratch: str, **paused: str) -> None:
    """``paused``: the options of ``helpers.Paused``."""
    spark = kivi.spark.session("job", **settings(Path(scratch)))
    spark.dataSource.register(Paused)
    rows = spark.readStream.schema(SPARK_COLUMNS).option("maxFilesPerTrigger", 1).parquet(input)
    sink = rows.writeStream.format("kivi_paused" if paused else "kivi")
    sink = sink.options(endpoint=endpoint, table=table, checkpointLocation=checkpoint, **paused)
    sink.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
