"""The Spark jobs as processes: ``python -m apm_demo.jobs live|trace``. Says ``ready`` once the query runs.

SIGTERM ends the query between two batches. SIGKILL ends it anywhere, which is what the demonstration does to ``trace``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kivi.spark
from apm_demo import live_job, trace_job
from apm_demo.children import end_with_parent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["main", "session"]


def session(name: str, work: Path) -> SparkSession:
    """A session that keeps to this machine, and its files to ``work``."""
    settings: dict[str, Any] = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.warehouse.dir": str(work / "warehouse"),
        # Java deletes its temporary files when it ends, unless it is killed.
        "spark.driver.extraJavaOptions": f'-Djava.io.tmpdir="{work}"',
        # A few thousand events at a time on one machine: more partitions and larger heaps only cost time to start.
        "spark.sql.shuffle.partitions": 1,
        "spark.driver.memory": "512m",
    }
    # Java's compiler for code that runs long, and its parallel collector, cost a job of seconds a third of its time.
    os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    return kivi.spark.session(name, **settings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=["live", "trace"])
    parser.add_argument("--endpoint", required=True)
    for folder in ("landing", "checkpoint", "work"):
        parser.add_argument(f"--{folder}", type=Path, required=True)
    args = parser.parse_args()

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    end_with_parent()
    spark = session(f"apm_demo-{args.job}", args.work)
    if args.job == "live":
        query = live_job.start(spark, args.endpoint, args.landing, args.checkpoint, processingTime="1 second")
    else:
        query = trace_job.start(spark, args.endpoint, args.landing, args.checkpoint, availableNow=True)
    print("ready", flush=True)
    while query.isActive and not stop.wait(0.1):
        pass
    failed = query.exception()
    query.stop()
    spark.stop()
    if failed is not None:
        print(f"the query failed: {failed}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
