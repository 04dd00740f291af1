"""A job on a cluster with speculation, as a program: ``python -m tests.spark.speculation '{...}'``.

Spark runs twins of slow tasks only on another host than the first attempt's, and never in local mode, nor in
``local-cluster`` mode, whose workers share a host. So this process holds a standalone master and two workers, which
have two addresses of loopback; their executors are processes of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import kivi.spark
from kivi.spark import foreach
from kivi.spark.java import find_java
from tests.spark import helpers
from tests.spark.flags import JAVA_FLAGS

ROOT = Path(__file__).resolve().parents[2]


def cluster(scratch: Path) -> str:
    """Starts a master and two workers in this process's Java; the master's address."""
    from pyspark import SparkConf, SparkContext

    os.environ.update({name: value for name, value in find_java().environment.items() if value is not None})
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    SparkContext._ensure_initialized()
    jvm = SparkContext._jvm
    assert jvm is not None
    deploy = jvm.org.apache.spark.deploy
    conf = SparkConf()._jconf
    env = deploy.master.Master.startRpcEnvAndEndpoint("127.0.0.1", 0, 0, conf)._1()
    master = f"spark://{env.address().hostPort()}"
    none = jvm.scala.Option.empty()
    masters = SparkContext._gateway.new_array(jvm.java.lang.String, 1)  # type: ignore[union-attr]
    masters[0] = master
    for number, host in enumerate(("127.0.0.1", "127.0.0.2")):
        deploy.worker.Worker.startRpcEnvAndEndpoint(
            host, 0, 0, 1, 1024, masters, str(scratch / "work"), jvm.scala.Some(number), conf, none
        )
    return master


def main(endpoint: str, tables: dict[str, str], input: str, scratch: str) -> None:
    folder = Path(scratch)
    twins = folder / "twins"
    twins.mkdir()
    settings: dict[str, str | bool] = {
        "spark.speculation": True,
        "spark.speculation.interval": "50ms",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.multiplier": "1.5",
        "spark.speculation.minTaskRuntime": "100ms",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": JAVA_FLAGS,
        "spark.executorEnv.PYTHONPATH": str(ROOT),
        "spark.executorEnv.KIVI_TEST_TWINS": str(twins),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": str(folder),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    spark = kivi.spark.session("speculation", master=cluster(folder), **settings)
    spark.dataSource.register(helpers.Twins)
    foreach.Stager = helpers.TwinStager  # type: ignore[misc]

    def stream(name: str) -> None:
        rows = spark.readStream.schema(helpers.SPARK_COLUMNS).parquet(input).repartition(2)
        writer = rows.writeStream.option("checkpointLocation", str(folder / name)).trigger(availableNow=True)
        if name == "foreach":
            split = kivi.spark.into_tables(lambda batch: {tables[name]: batch}, endpoint=endpoint)
            writer = writer.foreachBatch(split)
        else:
            format = "kivi_twins" if name == "sink" else "kivi"
            writer = writer.format(format).options(endpoint=endpoint, table=tables[name])
        writer.start().awaitTermination()
        print(f"done: {name}, {' '.join(sorted(path.name for path in twins.iterdir()))}", flush=True)

    stream("sink")
    stream("foreach")
    stream("lost")
    shutil.rmtree(folder / "lost")
    print("the checkpoint is deleted", flush=True)
    stream("lost")
    spark.stop()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
