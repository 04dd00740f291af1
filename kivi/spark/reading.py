"""Reading a table at one snapshot, in parts.

Each part is a range of keys, or of commits of events, of about ``partitionRows`` rows: one task. Filters that kivi can
evaluate are evaluated where the rows are (``filters``), and those on the first key columns or the event time leave out
what lies outside. Spark asks for that only with ``spark.sql.python.filterPushdown.enabled`` set (``kivi.spark.session``
sets it), and stops with an error at a reader that offers it unasked; so that one is used where Spark's process is the
one that asks.

Of a sharded table whose shards are spread over nodes, a part is of the shards of one node, and is read there
(``shares``). Events are cut by time then, as no node counts those of all shards.

Planning a job opens a *shared* snapshot, a lease that other processes may use by its name, and each task
opens that and renews it while it reads, and once more when it is done. So every partition, every retry and every second
use of the same data frame sees one state.

How long that lasts: until ``leaseTtl`` (10 minutes; up to 24 hours) has passed with no task that reads. It is the time
that a job may spend elsewhere, between planning and its first task here, or between one task and the next: on the other
side of a join, or waiting for executors. Give a longer one to a job that does more before it reads. A task that comes
later tries the plan's commit timestamp. Event tables answer it (unless retention has dropped what it sees, or they were
overwritten), and so do tables with ``history`` as far as that goes; of other tables the task fails with
SNAPSHOT_TOO_OLD, which names the option, and never reads another state.

Nothing renews it in between, since nothing that could knows when to stop. A reader is planned in a Python worker that
Spark ends once it has been idle for a while, and a data frame may be executed again, or never, or in part (``take``),
without a word to its source. A process that renews as long as the application lives would keep every snapshot that a
notebook ever read, and all old rows with it, until it ends. How long a job takes before it reads, only its author
knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from kivi.errors import SnapshotTooOld
from kivi.model.expressions import Expr
from kivi.spark.filters import Range, predicate, range_of
from kivi.spark.holding import held
from kivi.spark.options import Options
from kivi.spark.schemas import Target, arrow_schema, spark_batch
from kivi.spark.shares import EVERYTHING, Share, in_turn, shares
from kivi.spark.tail import commits

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from kivi.client.database import Database, Snapshot

__all__ = ["FilteringReader", "Reader", "SharedSnapshot"]


@dataclass(frozen=True, slots=True)
class SharedSnapshot(InputPartition):
    """A part of the table at the job's snapshot: the lease's name, the timestamp it stands for, what to read, and where
    that was when the job was planned."""

    lease: bytes
    ts: int
    range: Range = field(default_factory=Range)
    share: Share = EVERYTHING


@dataclass(frozen=True, slots=True)
class CommitPart(InputPartition):
    """A part of an event table at the job's snapshot: ``take`` events after the first ``skip`` of those committed after
    ``since``. They are where they were as long as nothing more is dropped than was at ``kept_since``."""

    lease: bytes
    ts: int
    since: int
    skip: int
    take: int
    kept_since: int


class Reader(DataSourceReader):
    """One job's read."""

    def __init__(self, options: Options, target: Target, schema: StructType) -> None:
        self._options = options
        self._target = target
        self._schema = schema
        self._where: Expr | None = None
        self._range = Range()

    def partitions(self) -> list[InputPartition]:
        """Runs where the job is planned: opens the snapshot, which outlives this process."""
        options = self._options

        def begin(db: Database) -> list[InputPartition]:
            # Not closed, which would end it for the tasks: it ends by its time limit.
            snapshot = db.snapshot(as_of=options.as_of, ttl_s=options.lease_ttl_s, shared=True)
            snapshot.__enter__()
            return self._parts(db, snapshot.lease, snapshot.ts)

        return options.ask(begin)

    def _parts(self, db: Database, lease: bytes, ts: int) -> list[InputPartition]:
        """Events by their commits, as they lie in blocks, unless the job is about some time: times may be in any order,
        and each part would read most blocks then. (8 million events in no order of time: 0.9 M/s, by commits 2.9.)
        """
        size, table = self._options.partition_rows, self._options.table
        found = shares(db) if self._target.is_sharded else [EVERYTHING]
        if self._target.kind == "event" and self._range == Range() and found == [EVERYTHING]:
            parts: list[InputPartition] = []
            for part in commits(db, table, 0, ts, size):
                for skip in range(0, part.rows, size):
                    parts.append(CommitPart(lease, ts, part.since, skip, min(size, part.rows - skip), part.kept_since))
            return parts or [SharedSnapshot(lease, ts)]

        def cut(share: Share) -> list[InputPartition]:
            points = self._options.client_at(share.nodes).split_points(table, size)
            return [SharedSnapshot(lease, ts, part, share) for part in self._range.cut(points)]

        return in_turn(map(cut, found))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task, which holds one batch at a time however large the table is."""
        assert isinstance(partition, SharedSnapshot | CommitPart)
        wanted = arrow_schema(self._schema)
        nodes = partition.share.nodes if isinstance(partition, SharedSnapshot) else ()
        with held(self._options, partition.lease, partition.ts, nodes) as snapshot:
            if isinstance(partition, CommitPart):
                found = self._read_commits(snapshot, partition)
            else:
                found = self._read_range(snapshot, partition)
            for batch in found:
                yield spark_batch(batch, wanted)

    def _read_range(self, snapshot: Snapshot, part: SharedSnapshot) -> Iterator[pa.RecordBatch]:
        of = part.range
        return snapshot.scan_batches(
            self._options.table,
            prefix=of.prefix,
            start=of.start,
            end=of.end,
            where=self._where,
            columns=self._schema.fieldNames(),
            any_order=True,
            shards=part.share.shards,
        )

    def _read_commits(self, snapshot: Snapshot, part: CommitPart) -> Iterator[pa.RecordBatch]:
        options = self._options
        if options.client().tail_points(options.table, most=0).kept_since != part.kept_since:
            raise SnapshotTooOld(  # the lease had ended, and retention went on: other events are in their places
                f"events of {options.table!r} were dropped since this job was planned: run it again, with a longer "
                "option leaseTtl"
            )
        return snapshot.change_batches(
            options.table,
            since=part.since,
            skip=part.skip,
            take=part.take,
            where=self._where,
            columns=self._schema.fieldNames(),
            commit_ts=False,
            remembered_at=part.ts,
            partial=True,
            retractions="ignore",
        )


class FilteringReader(Reader):
    """One job's read, with what Spark asks of the rows."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        """Takes what kivi can evaluate; gives back the rest."""
        taken = []
        for given in filters:
            found = predicate(self._target, given)
            if found is None:
                yield given
            else:
                taken.append(given)
                self._where = found if self._where is None else self._where & found
        self._range = range_of(self._target, taken)
