"""What the tests submit to a cluster: writes with one batch job, overwrites with another, reads, and says from where.

Given to ``spark-submit`` as a file: of kivi it knows what ``--py-files`` brings, and of the tests nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession

import kivi.spark


def where(_: Any) -> Iterator[list[str]]:
    """From a task: which executor this is, and which kivi it has loaded."""
    import kivi

    yield [os.path.basename(os.getcwd()), str(kivi.__file__)]


def main(endpoint: str, table: str, out: str) -> None:
    spark = SparkSession.builder.appName("kivi on a cluster").getOrCreate()
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
    seen = spark.sparkContext.parallelize(range(8), 8).mapPartitions(where).collect()
    with open(out, "w") as file:
        json.dump({"total": list(total), "head": list(head), "seen": seen, "driver": kivi.__file__}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
