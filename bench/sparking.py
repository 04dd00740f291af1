"""Goal 7: Spark. 20 million events written and read through ``format("kivi")``, beside Parquet in the same session.

* *Write*: Parquet files of 20 million events into an event table, one job, one commit, against the same job writing
  Parquet. Once as a batch job, and once as a streaming query with ``Trigger.AvailableNow``, which is the sink that
  streams use. Both tables have an aggregate, as kivi's always do; Parquet sums nothing. Wanted: half of Parquet's rate.
* *Read*: every row and every column, added up by Spark, against the same rows from Parquet; each the second time, as
  the first warms Java up. Wanted: a third.
* *Overhead*: what a micro-batch of 1,000 events costs beyond the same query with Spark's ``noop`` sink: the median
  batch of each, in one session. Wanted: 300 ms at most.

A small job of each kind runs before the clock does. Spark is local[2] in one Java process, beside kivi's server: on two
cores everything that kivi does is time that Spark does not have, where Parquet has both. Totals of tables and
aggregates are verified, and so are the sums that a read adds up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

import kivi
import kivi.spark
from bench import tables, verify
from bench.context import Context
from bench.data import Pool
from bench.server import Server
from bench.sheet import Figures, Ratio, Sheet

__all__ = ["sheet", "take"]

_EVENTS: Final = 20_000_000
_QUICK_EVENTS: Final = 500_000
_FILE_ROWS: Final = 500_000
_BATCH: Final = 1_000  # events of a micro-batch
_BATCHES: Final = 40
_WARM_UP: Final = 10
_STREAMED: Final = "streamed"
_SCHEMA: Final = "endpoint_id long, ts timestamp, resp_time_us long"


def sheet() -> Sheet:
    def against(ours: str, theirs: str) -> Callable[[Figures], float]:
        return lambda figures: figures["kivi", ours] / figures["parquet", theirs]

    ratios = [
        Ratio("write, batch job: kivi / Parquet", against("write, batch job", "write"), at_least=0.5),
        Ratio("write, streaming query: kivi / Parquet", against("write, streaming query", "write"), at_least=0.5),
        Ratio("read, every column: kivi / Parquet", against("read", "read"), at_least=1 / 3),
        Ratio(
            "overhead of a micro-batch of 1,000 events, ms",
            lambda figures: figures["kivi", "micro-batch"] - figures["noop", "micro-batch"],
            at_most=300.0,
        ),
    ]
    return Sheet("goal7", "Spark: writing and reading 20 million events, and micro-batches of 1,000", ratios)


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    pool = context.pool("wide", _FILE_ROWS if not context.quick else 50_000)
    times = (_QUICK_EVENTS if context.quick else _EVENTS) // (len(pool) * pool.batch_rows)
    with context.directory() as path:
        settings = {"spark.local.dir": path / "scratch", "spark.sql.warehouse.dir": path / "warehouse"}
        spark = kivi.spark.session("bench", **{"spark.driver.memory": "2g", **{k: str(v) for k, v in settings.items()}})
        try:
            _files(path / "events", pool, times)
            server = Server(path / "data")
            with server:
                _volumes(sheet, spark, server, path, pool, times)
                _overhead(context, sheet, spark, server, path, pool)
        finally:
            spark.stop()


def _files(folder: Path, pool: Pool, times: int) -> None:
    folder.mkdir()
    for i in range(times):
        for j, batch in enumerate(pool.batches):
            pq.write_table(pa.Table.from_batches([batch]), folder / f"{i:03}-{j:03}.parquet")


def _volumes(sheet: Sheet, spark: Any, server: Server, path: Path, pool: Pool, times: int) -> None:
    events = times * len(pool) * pool.batch_rows
    source = spark.read.schema(_SCHEMA).parquet(str(path / "events"))

    def rate(system: str, case: str, job: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = job()
        sheet.record(system, case, events / (time.perf_counter() - began), "events/s", events=events)
        return result

    some = source.limit(10_000)  # a first job of each kind starts what Spark starts lazily
    some.write.parquet(str(path / "warm"))
    rate("parquet", "write", lambda: source.write.parquet(str(path / "copy")))
    with server.connect() as db:
        tables.create(db)
        tables.create(db, _STREAMED, f"{_STREAMED}_5m")
        tables.create(db, "warm", "warm_5m")
        some.write.format("kivi").options(endpoint=server.endpoint, table="warm").mode("append").save()
        kivi_sink = {"endpoint": server.endpoint, "table": tables.EVENTS}
        job = source.write.format("kivi").options(**kivi_sink).mode("append")
        rate("kivi", "write, batch job", job.save)
        rate("kivi", "write, streaming query", lambda: _streamed(spark, server, path, len(pool) * times))
        for aggregate in (tables.AGGREGATE, f"{_STREAMED}_5m"):
            tables.check(db, pool.expected([times] * len(pool)), f"kivi, {aggregate}", aggregate)
        db.consolidate()
    reads: dict[str, Callable[[], dict[str, int]]] = {
        "parquet": lambda: _summed(spark.read.parquet(str(path / "copy"))),
        "kivi": lambda: _summed(spark.read.format("kivi").options(**kivi_sink).load()),
    }
    for read in reads.values():
        read()
    theirs, ours = (rate(system, "read", read) for system, read in reads.items())
    if ours != theirs or ours["rows"] != events:
        raise verify.WrongTotals(f"Spark reads {ours} from kivi, and {theirs} from Parquet")


def _summed(frame: Any) -> dict[str, int]:
    """Every row and every column of a data frame, added up by Spark."""
    from pyspark.sql import functions as F

    found = frame.agg(
        F.count("*").alias("rows"),
        F.sum("endpoint_id").alias("endpoints"),
        F.sum(F.pmod(F.unix_micros("ts"), F.lit(1_000_003))).alias("times"),
        F.sum("resp_time_us").alias("total"),
    ).collect()[0]
    return {name: int(value) for name, value in found.asDict().items()}


def _streamed(spark: Any, server: Server, path: Path, files: int) -> None:
    query = (
        spark.readStream.schema(_SCHEMA)
        .option("maxFilesPerTrigger", max(1, files // 4))
        .parquet(str(path / "events"))
        .writeStream.format("kivi")
        .options(endpoint=server.endpoint, table=_STREAMED, checkpointLocation=str(path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def _overhead(context: Context, sheet: Sheet, spark: Any, server: Server, path: Path, pool: Pool) -> None:
    """Micro-batches of one small file each. The first ones warm Java up, and do not count."""
    small, batches = path / "small", _WARM_UP + (5 if context.quick else _BATCHES)
    small.mkdir()
    table = pa.Table.from_batches(pool.batches).slice(0, batches * _BATCH)
    for i in range(batches):
        pq.write_table(table.slice(i * _BATCH, _BATCH), small / f"{i:03}.parquet")
    with server.connect() as db:
        db.create_event_table("small", event_time="ts", columns=dict(zip(*_columns(), strict=True)))
        db.create_aggregate("small_n", source="small", group_by=["endpoint_id"], measures={"n": kivi.count()})
        for system in ("noop", "kivi"):
            took = _micro_batches(spark, server, path, system)
            if len(took) != batches:
                raise RuntimeError(f"{len(took)} micro-batches of {system}, not {batches}")
            sheet.record(system, "micro-batch", statistics.median(took[_WARM_UP:]), "ms", batches=len(took) - _WARM_UP)
        with db.snapshot() as snapshot:
            held = sum(row["n"] for row in snapshot.scan("small_n"))
    if held != batches * _BATCH:
        raise verify.WrongTotals(f"{batches * _BATCH} events were streamed, and kivi holds {held}")


def _columns() -> tuple[list[str], list[str]]:
    return ["endpoint_id", "ts", "resp_time_us"], ["int64", "timestamp", "int64"]


def _micro_batches(spark: Any, server: Server, path: Path, system: str) -> list[int]:
    """Milliseconds that each micro-batch took, as Spark says."""
    writer = (
        spark.readStream.schema(_SCHEMA)
        .option("maxFilesPerTrigger", 1)
        .parquet(str(path / "small"))
        .writeStream.format(system)
        .option("checkpointLocation", str(path / f"checkpoint-{system}"))
        .trigger(availableNow=True)
    )
    if system == "kivi":
        writer = writer.options(endpoint=server.endpoint, table="small")
    query = writer.start()
    query.awaitTermination()
    return [p["durationMs"]["triggerExecution"] for p in query.recentProgress if p["numInputRows"]]
