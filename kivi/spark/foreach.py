"""``foreachBatch``: a micro-batch into several tables, in one transaction, exactly once.

::

    def split(batch):                              # of the batch, which is cached, a data frame for each table
        return {"invocations": batch, "slow_ones": batch.where("resp_time_us > 1000000")}

    query = (events.writeStream.foreachBatch(kivi.spark.into_tables(split, endpoint="localhost:7420"))
             .option("checkpointLocation", "checkpoint/").start())

It is the sink (``kivi.spark.sink``) with more than one table: tasks stage, the driver commits all of it under one batch
token, and a batch that comes again gets its first commit timestamp back.

How the driver learns what was staged: the rows of a task go through a function that stages them, and the last thing the
task returns is one row with the stages' ids, which the driver collects. There is no shuffle after the staging, so what
the driver gets of a partition comes from exactly one attempt of its task. An attempt that died, or lost against its
twin, leaves stages that nobody names, and they expire. (``mapInArrow`` would say the same, but asks for pandas.)

What Spark evaluates twice it may evaluate to different rows. Where the frames come from one batch, it has to be cached:
``into_tables`` does that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kivi.errors import InvalidArgument
from kivi.spark.applications import announce, scope_of
from kivi.spark.commit import commit_stages
from kivi.spark.options import Options
from kivi.spark.schemas import Target
from kivi.spark.sink import Stager, discard

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from kivi.client.database import Transaction

__all__ = ["Stager", "Written", "into_tables", "write_batch"]


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome of a batch: its commit timestamp, the rows that this run of it staged for each table, and whether an
    earlier run had committed it, in which case those were dropped."""

    commit_ts: int
    rows: dict[str, int]
    repeated: bool


def into_tables(
    split: Callable[[DataFrame], Mapping[str, DataFrame]], *, application_id: str | None = None, **connection: Any
) -> Callable[[DataFrame, int], None]:
    """For ``writeStream.foreachBatch``: each batch is cached, and what ``split`` makes of it written as one.

    ``connection`` and ``application_id`` as in ``write_batch``.
    """
    _options("?", application_id, connection)  # what is wrong with them is said here, and not by the first batch

    def write(batch: DataFrame, batch_id: int) -> None:
        cached = batch.persist()
        try:
            write_batch(batch_id, split(cached), application_id=application_id, **connection)
        finally:
            cached.unpersist()

    return write


def write_batch(
    batch_id: int,
    frames: Mapping[str, DataFrame],
    *,
    application_id: str | None = None,
    also: Callable[[Transaction], None] | None = None,
    **connection: Any,
) -> Written:
    """Inside a function of your own for ``foreachBatch``: table -> its rows, all of it in one commit, once.

    Rows become events, or a row table's writes, as with ``format("kivi")``. ``also(tx)`` may read and write in the same
    transaction, which has the events of this batch already; it runs again when the commit has to be tried again, so it
    must do nothing else. ``application_id`` says whose batches these are; default the query's id, which lives in the
    checkpoint. ``connection``: ``endpoint``, ``access_token``, ``tls``, ``timeout`` (seconds), as the options of
    ``format("kivi")``.

    All frames are checked before the first row moves. Raises SchemaError, InvalidArgument, NotFound; OutOfSequence for
    a batch whose predecessor did not come.
    """
    if isinstance(batch_id, bool) or not isinstance(batch_id, int) or batch_id < 0:
        raise InvalidArgument(f"a batch id is a number from 0 on, as foreachBatch gives it, not {batch_id!r}")
    if not isinstance(frames, Mapping):
        raise InvalidArgument(f"frames is a mapping of table names to data frames, not {type(frames).__name__}")
    options = _options("?", application_id, connection)
    targets = {}
    for table, frame in frames.items():
        if getattr(frame, "isStreaming", True):
            raise InvalidArgument(f"frames[{table!r}] is not the data frame of a batch: call this in foreachBatch")
        target = options.ask(functools.partial(Target.of, table=table))
        target.check_appendable(frame.schema, overwrite=False, deletes=options.deletes)
        targets[table] = target
    application = options.application_id or _query_id(frames)
    scope = scope_of("*", application)
    announce(options, application, frames)
    staged: dict[str, tuple[list[bytes], int]] = {}
    try:
        for table, target in targets.items():
            stager = Stager(replace(options, table=table), target, f"{scope}/{batch_id}")
            staged[table] = _collected(frames[table], stager)
        stages = {table: ids for table, (ids, _) in staged.items()}
        started, committed = commit_stages(options, stages, (scope, batch_id), also)
    except BaseException:
        discard(options, [stage for ids, _ in staged.values() for stage in ids])
        raise
    return Written(committed, {table: rows for table, (_, rows) in staged.items()}, committed <= started)


def _options(table: str, application_id: str | None, connection: Mapping[str, Any]) -> Options:
    """The options of ``format("kivi")`` by their names in Python."""
    names = {"endpoint": "endpoint", "access_token": "accessToken", "tls": "tls", "timeout": "timeout"}
    for name in connection:
        if name not in names:
            raise InvalidArgument(f"there is no argument {name!r}; connections take {', '.join(names)}")
    given = {names[name]: str(value) for name, value in connection.items() if value is not None}
    return Options.of({"table": table, "applicationId": application_id or "", **given})


def _query_id(frames: Mapping[str, DataFrame]) -> str:
    """The id of the query whose batch this thread handles, from Spark's local properties. A name not promised."""
    query_id = None
    for frame in frames.values():
        context = getattr(frame, "_sc", None)  # of Spark Connect's frames: none
        query_id = query_id or (context and context.getLocalProperty("sql.streaming.queryId"))
    if not query_id:
        raise InvalidArgument(
            "no streaming query is known here (outside foreachBatch, or with Spark Connect): give application_id, one "
            "name per checkpoint"
        )
    return str(query_id)


def _collected(frame: DataFrame, stager: Stager) -> tuple[list[bytes], int]:
    """Runs the staging; (the stages, how many rows are in them). ``mapInArrow`` would do it, and needs pandas."""
    from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]  # PySpark's own stubs lack it

    names = frame.columns

    def stage(columns: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        """As many values as there are rows, as Spark wants it: nulls, and in the first one what the task has to say."""
        lengths: list[int] = []

        def batches() -> Iterator[pa.RecordBatch]:
            for arrays in columns:
                several = arrays if isinstance(arrays, tuple) else (arrays,)
                lengths.append(len(several[0]))
                yield pa.RecordBatch.from_arrays(list(several), names)

        stages, rows = stager(batches())
        said: list[bytes] | None = [str(rows).encode(), *stages]
        for length in lengths:
            few = [said] if length else []
            said = None if length else said
            yield pa.concat_arrays([pa.array(few, _SAID), pa.nulls(length - len(few), _SAID)])

    # A function with an effect must not be taken for one that the optimizer may repeat.
    staging = arrow_udf(stage, "array<binary>").asNondeterministic()
    told = frame.select(staging(*(frame[f"`{name}`"] for name in names)).alias("said")).where("said is not null")
    parts = [[bytes(part) for part in row.said] for row in told.collect()]
    return [stage for part in parts for stage in part[1:]], sum(int(part[0]) for part in parts)


_SAID = pa.list_(pa.binary())
