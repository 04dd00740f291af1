"""Writing: tasks stage, the driver commits. Why it is exactly once is told in ``kivi.spark``.

The processes that run each step, in Spark's words, for one micro-batch or one batch job::

    planning process      writer() or streamWriter()   checks the schema: nothing has been written when it fails
    every task            write(rows)                  stages, returns the ids
    commit process        commit(messages)             one transaction; or abort(messages)

The processes are different ones; what they share is in the pickled writer (batch jobs) or built again from the
options (streams), and in the messages.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from kivi.errors import InvalidArgument
from kivi.spark.applications import SecondApplication, scope_of, warn_of_others
from kivi.spark.commit import commit_stages
from kivi.spark.options import Options
from kivi.spark.schemas import Target

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from kivi.client.database import Database

__all__ = ["BatchWriter", "SecondApplication", "Staged", "Stager", "StreamWriter", "discard", "scope_of"]

_log = logging.getLogger(__name__)

# A stage is one record in the server's log: large enough that its sync costs nothing per row, small enough that
# a task holds little memory.
_STAGE_ROWS: Final = 200_000
_STAGE_BYTES: Final = 16 << 20
_STAGES_UNDER_WAY: Final = 2


@dataclass(frozen=True, slots=True)
class Staged(WriterCommitMessage):
    """The message of one task: the stages that it made durable, how many rows, and which query it belonged to."""

    stages: tuple[bytes, ...]
    rows: int
    query_id: str | None = None


class StreamWriter(DataSourceStreamArrowWriter):
    """The sink of a streaming query, of rows of ``schema``.

    Spark makes one where it plans, where it commits and where it aborts. An abort has to work while the server is
    away, so only planning and ``write`` look at the table.
    """

    def __init__(self, options: Options, schema: StructType, overwrite: bool = False) -> None:
        self._options = options
        self._schema = schema
        self._overwrite = overwrite

    def target(self, db: Database) -> Target:
        """The table, if the rows fit into it. Raises NotFound, SchemaError, InvalidArgument."""
        found = Target.of(db, self._options.table)
        found.check_appendable(self._schema, self._overwrite, self._options.deletes)
        return found

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """One task of one micro-batch."""
        query_id, batch = _local("sql.streaming.queryId"), _local("streaming.sql.batchId")
        owner = f"{scope_of(self._options.table, self._options.application_id or query_id or '?')}/{batch}"
        return Staged(*Stager(self._options, self._options.ask(self.target), owner)(iterator), query_id)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """The micro-batch, once, whatever was tried before. Rows or not, it takes its number."""
        application_id = self._application_id(messages)
        scope = scope_of(self._options.table, application_id)
        warn_of_others(self._options, application_id)
        stages = {self._options.table: _stages(messages)}
        started, committed = commit_stages(self._options, stages, (scope, batchId))
        if committed <= started:
            _log.warning(
                "batch %d of %s was committed before, at %d; what came again was dropped",
                batchId, scope, committed,
            )  # fmt: skip

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Gives the stages up; those that were committed after all are passed over by the server."""
        discard(self._options, _stages(messages))

    def _application_id(self, messages: Sequence[WriterCommitMessage | None]) -> str:
        if self._options.application_id is not None:
            return self._options.application_id
        found = {message.query_id for message in messages if isinstance(message, Staged)} - {None}
        if len(found) != 1:
            raise InvalidArgument(
                'this Spark does not tell its tasks which query they work for: give the sink option("applicationId", '
                "name), one name per checkpoint"
            )
        return str(found.pop())


class BatchWriter(DataSourceArrowWriter):
    """The sink of a batch job: all of it in one commit, or nothing. ``overwrite``: in place of what the table holds."""

    def __init__(self, options: Options, target: Target, overwrite: bool = False) -> None:
        self._options = options
        self._target = target
        self._overwrite = overwrite
        self._job = f"spark/{options.table}/{uuid.uuid4().hex}"  # made where the job is planned; every task has it

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        return Staged(*Stager(self._options, self._target, self._job)(iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        stages = _stages(messages)
        if stages or self._overwrite:
            commit_stages(self._options, {self._options.table: stages}, overwrite=self._overwrite)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        discard(self._options, _stages(messages))


def _local(name: str) -> str | None:
    """A local property of the running task. These names are Spark's own and not promised."""
    context = TaskContext.get()
    return context.getLocalProperty(name) if context is not None else None


def _stages(messages: Sequence[WriterCommitMessage | None]) -> list[bytes]:
    return [stage for message in messages if isinstance(message, Staged) for stage in message.stages]


@dataclass(frozen=True)
class Stager:
    """Stages the rows of a task. Pickles."""

    options: Options
    target: Target
    owner: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> tuple[tuple[bytes, ...], int]:
        """Stages all of them: the stages' ids, and how many rows. Spark's next rows are read while the last travel."""
        staged: list[Future[bytes]] = []
        rows = 0
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="kivi-stage") as pool:
                for chunk in _chunks(batches):
                    if len(staged) >= _STAGES_UNDER_WAY:
                        staged[-_STAGES_UNDER_WAY].result()
                    rows += sum(batch.num_rows for batch in chunk)
                    staged.append(pool.submit(self._stage, chunk))
            return tuple(future.result() for future in staged), rows
        except BaseException:  # by now the pool has ended, and all of them with it
            discard(self.options, [future.result() for future in staged if future.exception() is None])
            raise

    def _stage(self, batches: list[pa.RecordBatch]) -> bytes:
        table = self.target.conform(batches, self.options.deletes)
        return self.options.ask(lambda db: db.stage(self.target.table, table, self.owner, self.options.deletes))


def _chunks(iterator: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Spark's small batches, gathered to the size of a stage."""
    batches: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in iterator:
        if batch.num_rows:
            batches.append(batch)
            rows += batch.num_rows
            size += batch.nbytes
            if rows >= _STAGE_ROWS or size >= _STAGE_BYTES:
                yield batches
                batches, rows, size = [], 0, 0
    if batches:
        yield batches


def discard(options: Options, stages: Sequence[bytes]) -> None:
    """Best effort, and one attempt: what is not given up expires.

    Nothing is raised, whatever it is: Spark would report that in place of the error that led here.
    """
    if stages:
        try:
            options.client().discard_stages(stages)
        except Exception as error:
            _log.info("%d stages of table %s are left to expire: %s", len(stages), options.table, error)
