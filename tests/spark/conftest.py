"""One server for all tests of this folder; the Spark session is that of tests/conftest.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kivi
from tests.serverproc import ServerProcess
from tests.spark import helpers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kivi.client.database import Database

_numbers = itertools.count()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("spark-server") / "data") as running:
        yield running
        assert running.process is not None
        assert running.process.poll() is None, f"the server ended on the way: {''.join(running.output)}"


@pytest.fixture(scope="package")
def db(server: ServerProcess) -> Iterator[Database]:
    with kivi.connect(server.endpoint, timeout=30) as client:
        yield client


@pytest.fixture
def table(db: Database) -> str:
    """An event table of this test's own, with an aggregate on it."""
    name = f"t{next(_numbers)}"
    helpers.create(db, name)
    return name


@pytest.fixture
def source(tmp_path: Path) -> helpers.Input:
    return helpers.Input(tmp_path / "input")


@pytest.fixture
def run(
    spark: SparkSession, server: ServerProcess, source: helpers.Input, table: str, tmp_path: Path
) -> Callable[..., Any]:
    """Runs a query over the input until it has caught up, a file per micro-batch."""

    def run(format: str = "kivi", checkpoint: str = "checkpoint", partitions: int = 0, **options: Any) -> Any:
        frame = spark.readStream.schema(helpers.SPARK_COLUMNS).option("maxFilesPerTrigger", 1)
        rows = frame.parquet(str(source.folder))
        if partitions:
            rows = rows.repartition(partitions)
        wanted = {"endpoint": server.endpoint, "table": table, "checkpointLocation": str(tmp_path / checkpoint)}
        query = rows.writeStream.format(format).options(**{**wanted, **options}).trigger(availableNow=True).start()
        query.awaitTermination()
        return query

    return run
