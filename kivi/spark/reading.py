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
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from kivi.errors import Unavailable
from kivi.model.changes import COMMIT_TS
from kivi.model.expressions import Expr
from kivi.spark.filters import Range, predicate, range_of
from kivi.spark.holding import held
from kivi.spark.options import Options
from kivi.spark.schemas import Target, arrow_schema, spark_batch
from kivi.spark.shares import EVERYTHING, Share, in_turn, shares
from kivi.spark.tail import check_places, commits

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
    """A part of an event table at the job's snapshot: of the events with since < commit timestamp <= upto, which were
    ``rows`` when the job was planned, ``take`` after the first ``skip``; None: all.

    Retention drops what the snapshot does not see, at each node in its own time, and then others are in their places.
    So places are counted only where nothing had been dropped, and within a commit only if all of it is still there.
    """

    lease: bytes
    ts: int
    since: int
    upto: int
    rows: int
    skip: int
    take: int | None
    share: Share


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
            try:
                return self._parts(db, snapshot.lease, snapshot.ts)
            except BaseException:
                snapshot.close()
                raise

        return options.ask(begin)

    def _parts(self, db: Database, lease: bytes, ts: int) -> list[InputPartition]:
        """Events by their commits, as they lie in blocks, unless the job is about some time: times may be in any order,
        and each part would read most blocks then. (8 million events in no order of time: 0.9 M/s, by commits 2.9.)
        """
        options, size, table = self._options, self._options.partition_rows, self._options.table
        found = shares(db) if self._target.is_sharded else [EVERYTHING]
        by_commits = self._target.kind == "event" and self._range == Range() and COMMIT_TS not in self._target.columns

        def cut(share: Share) -> list[InputPartition]:
            there = options.client_at(share.nodes)
            if not by_commits or share.shards is not None:
                ranges = self._range.cut(there.split_points(table, size))
                return [SharedSnapshot(lease, ts, part, share) for part in ranges]
            parts: list[InputPartition] = []
            for part in commits(there, table, 0, ts, size):
                since, cuts = part.cut(size)
                for skip, take in cuts:
                    parts.append(CommitPart(lease, ts, since, part.upto, part.rows, skip, take, share))
            return parts or [SharedSnapshot(lease, ts, share=share)]

        return in_turn(map(cut, found))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task, which holds one batch at a time however large the table is."""
        assert isinstance(partition, SharedSnapshot | CommitPart)
        wanted, share, begun = arrow_schema(self._schema), partition.share, False
        try:
            with held(self._options, partition.lease, partition.ts, share.nodes) as snapshot:
                if isinstance(partition, CommitPart):
                    found = self._read_commits(snapshot, partition)
                else:
                    found = self._read_range(snapshot, partition)
                for batch in found:
                    begun = True
                    yield spark_batch(batch, wanted)
        except Unavailable:
            if begun or not share.nodes:
                raise
            yield from self.read(replace(partition, share=share.elsewhere()))

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
        batches = snapshot.change_batches(
            options.table,
            since=part.since,
            skip=part.skip,
            take=part.take,
            where=self._where,
            columns=self._schema.fieldNames(),
            commit_ts=True,
            remembered_at=part.ts,
            retractions="ignore",
        )
        first = [*islice(batches, 1)]
        if part.take is not None and part.take < part.rows:
            db = options.client_at(part.share.nodes)  # now that places are fixed
            check_places(db, options.table, part.since, part.upto, part.rows)
        for batch in chain(first, batches):
            inside = int(np.searchsorted(batch.column(COMMIT_TS).to_numpy(), part.upto, "right"))
            yield batch.slice(0, inside).drop_columns([COMMIT_TS])
            if inside < batch.num_rows:
                return


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
