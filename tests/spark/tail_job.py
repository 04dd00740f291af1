"""A streaming job from one event table to another that a test starts to kill it: ``python -m tests.spark.tail_job``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import kivi.spark
from tests.spark.helpers import Paused, settings


def copy(spark: Any, endpoint: str, source: str, table: str, checkpoint: str, **paused: str) -> None:
    """``paused``: the options of ``helpers.Paused``."""
    rows = spark.readStream.format("kivi").options(endpoint=endpoint, table=source, maxRowsPerTrigger=100).load()
    sink = rows.writeStream.format("kivi_paused" if paused else "kivi")
    sink = sink.options(endpoint=endpoint, table=table, checkpointLocation=checkpoint, **paused)
    sink.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    scratch, arguments, paused = json.loads(sys.argv[1])
    spark = kivi.spark.session("tail", **settings(Path(scratch)))
    spark.dataSource.register(Paused)
    copy(spark, *arguments, **paused)
