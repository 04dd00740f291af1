"""What the tests submit to a cluster: writes with one batch job, overwrites with another, reads, and says from where.

Given to ``spark-submit`` as a file: of kivi it knows what ``--py-files`` brings, and of the tests nothing. With the
address of a Spark Connect server it is a program of its own, which brings kivi along.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession

import kivi.spark


def where(batches: Iterator[Any]) -> Iterator[Any]:
    """From a task: which executor this is, and which kivi it has loaded."""
    import pyarrow as pa

    import kivi

    for batch in batches:
        here = [os.path.basename(os.getcwd())] * batch.num_rows, [str(kivi.__file__)] * batch.num_rows
        yield pa.RecordBatch.from_arrays([pa.array(values) for values in here], ["executor", "path"])


def main(endpoint: str, table: str, out: str, remote: str = "") -> None:
    builder = SparkSession.builder.appName("kivi on a cluster")
    spark = (builder.remote(remote) if remote else builder).getOrCreate()
    if remote:
        spark.addArtifacts("kivi.zip", pyfile=True)
    spark.dataSource.register(kivi.spark.KiviDataSource)
    rows = spark.range(0, 20_000, 1, 4).selectExpr(
        "id as seq", "id % 20 as endpoint_id", "timestamp_micros(1750000000000000 + id) as ts", "id * 3 as resp_time_us"
    )
    sink = {"endpoint": endpoint, "table": table}
    rows.write.format("kivi").options(**sink).mode("append").save()
    rows.where("seq < 5000").write.format("kivi").options(**sink).mode("overwrite").save()
    read = spark.read.format("kivi").options(**sink, partitionRows=1000).load()
    total = read.where("endpoint_id < 10").selectExpr("count(*)", "sum(resp_time_us)").collect()[0]
    head = spark.read.format("kivi").options(**sink, aggregate="count(), sum(resp_time_us)").load().collect()[0]
    seen = spark.range(0, 16, 1, 8).mapInArrow(where, "executor string, path string").distinct().collect()
    with open(out, "w") as file:
        said = {"total": list(total), "head": list(head), "seen": [list(row) for row in seen], "driver": kivi.__file__}
        json.dump(said, file)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
