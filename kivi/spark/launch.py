"""A Spark session that knows kivi, on any machine with Python."""

from __future__ import annotations

import contextlib
import os
import site
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import kivi.client
from kivi.errors import InvalidArgument, KiviError
from kivi.spark.java import JavaFailed, find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["session"]

_DEFAULTS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # Rows cross between Java and Python in Arrow batches; larger ones cost less each.
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # What kivi can evaluate it does, next to the rows.
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",
    # A data frame on one machine needs no 200 shuffle partitions.
    "spark.sql.shuffle.partitions": "4",
}
_LOG_LEVELS: Final = Path(__file__).with_name("log4j2.properties")


def session(app: str, *, master: str = "local[2]", **conf: str | int | bool) -> SparkSession:
    """A Spark session with ``format("kivi")`` registered; Java is found as ``kivi.spark.java`` says.

    ``conf``: Spark's own settings by their names (``**{"spark.sql.shuffle.partitions": 8}``), which win over the
    defaults here: no web UI, session time zone UTC, Arrow between Java and Python, warnings and errors only in the
    log. Where a session is running already it is that one which is returned, with ``format("kivi")`` added.
    Raises JavaNotFound, JavaFailed, InvalidArgument.
    """
    for name in conf:
        if not name.startswith("spark."):
            raise InvalidArgument(f'{name!r} is not a Spark setting: give them as **{{"spark.name": value}}')
    try:
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession
    except ImportError:
        raise KiviError("PySpark is not installed: pip install 'kivi[spark]'") from None
    from kivi.spark.source import KiviDataSource

    builder = SparkSession.builder.appName(app).master(master)
    settings: dict[str, Any] = {**_DEFAULTS, **conf}
    with _environment(master, settings):
        try:
            spark = builder.config(map=settings).getOrCreate()
        except PySparkRuntimeError as error:
            if error.getCondition() != "JAVA_GATEWAY_EXITED":
                raise
            raise JavaFailed(
                "Java ended before Spark was ready; its own words are above. Often the machine has too little memory "
                "for spark.driver.memory (1 GB unless it is set), or a setting of Java's is not one it knows"
            ) from None
    spark.dataSource.register(KiviDataSource)
    return spark


@contextlib.contextmanager
def _environment(master: str, settings: dict[str, Any]) -> Iterator[None]:
    """Sets the environment that Java is started with; variables of Java and PYTHONPATH are put back afterwards.

    Nothing happens if this process has started its Java already.
    """
    from pyspark import SparkContext

    if SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
        yield
        return
    changes = dict(find_java().environment)
    if master.startswith("local"):
        # Workers are this Python and import what this process imports, however kivi got onto its path. On a
        # cluster the paths are the workers' own, and what the environment says is right.
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        root = str(Path(kivi.client.__file__).parents[2])
        if root not in (*site.getsitepackages(), site.getusersitepackages()):
            changes["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    flags = settings.get("spark.driver.extraJavaOptions", "")
    if "log4j" not in flags:
        settings["spark.driver.extraJavaOptions"] = f"-Dlog4j.configurationFile={_LOG_LEVELS.as_uri()} {flags}".strip()
    before = {name: os.environ.get(name) for name in changes}
    _apply(changes)
    try:
        yield
    finally:
        _apply(before)


def _apply(changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
