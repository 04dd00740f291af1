"""``spark.readStream.format("kivi")`` on an event table: its commits in order, each event once.

**Invariants.**

* A batch is the events with start < commit timestamp <= end, and end is at most the watermark: no commit at or below it
  can still appear, however late it finishes (R11, R12). Batches follow each other without gap, so together they are all
  events, each once.
* The same two offsets give the same events whenever they are asked for, as commits are never altered: after a restart
  Spark runs its last batch again, and gets the same rows. Where this does not hold it is a StreamDataLoss
  (``offsets``): retention has dropped some, the table is another one, the store is an older one.
* An offset is the timestamp of a commit to this table: while nothing comes, it stays, and no batch runs.

A new query begins with what the table holds (``startingOffsets`` earliest): events up to the snapshot it began with, as
far as that one remembers them, and after that every commit as it was, even if retention makes some of it invisible
before it is read. ``latest`` begins after that snapshot, a commit timestamp or a moment after it.

``maxRowsPerTrigger`` cuts at commits: as many whole commits as fit, and at least one, however large it is. A batch is
cut into tasks of about ``partitionRows`` events, within a commit too. A task that loses the server goes on where it was
when the server is back; so does the query, within ``timeout``.
"""

from __future__ import annotations

import datetime as dt
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import LongType, StructField, StructType

from kivi.errors import InvalidArgument, KiviError, SchemaError, SnapshotTooOld, Unavailable
from kivi.model.changes import COMMIT_TS, TailPoints
from kivi.spark.holding import held
from kivi.spark.offsets import Offset, check_offset, dropped, forgotten, lost
from kivi.spark.options import Options
from kivi.spark.schemas import Target, arrow_schema, spark_batch, spark_schema

if TYPE_CHECKING:
    import pyarrow as pa

    from kivi.client.database import Database

__all__ = ["EventTail", "StreamReader", "TailPart", "commits", "stream_schema", "streamed"]

_POINTS: Final = 1_000


def stream_schema(target: Target, options: Options) -> StructType:
    """The schema of the rows that a stream gives. Raises SchemaError for a column that is not there."""
    found = spark_schema(target, options.columns)
    if not options.commit_ts:
        return found
    if COMMIT_TS in target.columns:
        raise SchemaError(f"table {target.table!r} has a column {COMMIT_TS!r} of its own: leave option commitTs out")
    return StructType([*found.fields, StructField(COMMIT_TS, LongType(), False)])


def streamed(db: Database, options: Options, schema: StructType) -> Target:
    """The table, if it can be streamed with these options. Raises InvalidArgument, SchemaError; Unavailable for now."""
    described = db.describe(options.table)
    if described["kind"] == "row":
        raise InvalidArgument(
            f"{options.table!r} is a row table, which does not keep its changes: event tables and aggregates can be "
            "streamed, and spark.read reads it"
        )
    if options.as_of is not None:
        raise InvalidArgument("option asOf is for batch reads: a stream begins at startingTimestamp")
    if described["kind"] == "aggregate" and options.stream_rows_max is not None:
        raise InvalidArgument(
            f"{options.table!r} is an aggregate: a batch has each changed row once, with its newest values, however "
            "many events came. Option maxRowsPerTrigger is for event tables"
        )
    if described["state"] == "building":
        raise Unavailable(f"aggregate {options.table!r} is still being built from existing events")
    target = Target.of(db, options.table)
    commit_ts = COMMIT_TS in schema.fieldNames() and COMMIT_TS not in target.columns
    target.check_readable(StructType([f for f in schema.fields if not (commit_ts and f.name == COMMIT_TS)]))
    if commit_ts and schema[COMMIT_TS].dataType != LongType():
        raise SchemaError(f"column {COMMIT_TS!r} is bigint")
    return target


class Commits(NamedTuple):
    """Commits with since < timestamp <= upto, of so many events; those up to ``kept_since`` may have lost some."""

    since: int
    upto: int
    rows: int
    kept_since: int


def commits(db: Database, table: str, since: int, upto: int, rows: int) -> Iterator[Commits]:
    """An event table's commits after ``since`` up to ``upto``, in order, put together to about ``rows`` events."""
    whole = False
    while not whole:
        found = db.tail_points(table, since, rows, upto=upto, most=_POINTS)
        for commit_ts, count in found.points:
            yield Commits(since, commit_ts, count, found.kept_since)
            since = commit_ts
        whole = len(found.points) < _POINTS


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The common part of the streams of event tables and of aggregates. Pickles: tasks have a copy."""

    def __init__(self, options: Options, target: Target, schema: StructType) -> None:
        self._options = options
        self._table = target.table
        self._names = [name for name in schema.fieldNames() if name != COMMIT_TS]
        self._columns = self._names or [next(iter(target.columns))]  # if it is the commits alone that are wanted
        self._schema = schema

    def _points(self, since: int, rows: int = 1, upto: int | None = None, most: int = 0) -> TailPoints:
        return self._options.ask(lambda db: db.tail_points(self._table, since, rows, upto=upto, most=most))

    def _checked(self, offset: Offset, found: TailPoints) -> int | None:
        return check_offset(self._table, offset, found, fail=self._options.fail_on_data_loss)

    def _check_kept(self, since: int, found: TailPoints) -> None:
        if since < found.kept_since:
            lost(self._options.fail_on_data_loss, dropped(self._table, found.kept_since))

    def _starting(self, found: TailPoints) -> int:
        """The commit timestamp that the user gave, or that of a moment."""
        start = self._options.stream_start
        if isinstance(start, dt.datetime):

            def look(db: Database) -> int:
                with db.snapshot(as_of=start) as snapshot:
                    return snapshot.ts

            return self._options.ask(look)
        ts = int(start)
        if ts > found.watermark:
            raise InvalidArgument(
                f"the stream would begin after commit {ts}, and the store only goes to {found.watermark}"
            )
        return ts

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The newest commit of the table, for the query's progress."""
        try:
            found = self._options.client().tail_points(self._table, most=0)
        except KiviError:
            return None  # the batch itself will say what is wrong
        return Offset(max(found.last, found.created_ts), found.table_id, found.store).to_dict()

    def _output(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return spark_batch(batch.select(self._schema.fieldNames()), arrow_schema(self._schema))


@dataclass(frozen=True, slots=True)
class TailPart(InputPartition):
    """The events with since < commit timestamp <= upto; of these ``take`` after the first ``skip``."""

    since: int
    upto: int
    skip: int = 0
    take: int | None = None
    remembered_at: int | None = None


class EventTail(StreamReader):
    """The stream of one event table."""

    _target: int | None = None
    """With ``Trigger.AvailableNow``: the newest commit when the query began."""

    def getDefaultReadLimit(self) -> ReadLimit:
        rows = self._options.stream_rows_max
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._points(0).last

    def initialOffset(self) -> dict[str, Any]:
        found = self._points(0)
        floor = None
        match self._options.stream_start:
            case "earliest":
                ts, floor = 0, found.watermark
            case "latest":
                ts = found.watermark
            case _:
                ts = self._starting(found)
        return Offset(ts, found.table_id, found.store, floor).to_dict()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        offset = Offset.of(start)
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        target = self._target

        def found_in(since: int, upto: int | None) -> TailPoints:
            return self._points(since, rows or 1, upto, 1 if rows else 0)

        found = found_in(offset.ts, target)
        since, floor = self._from(offset, found)
        if since > 0 and since != offset.ts:  # the store is an older one: go on from what it has now, not from later
            return Offset(since, found.table_id, found.store).to_dict()
        if floor is not None and since < floor:
            upto = floor if target is None else min(floor, target)
            found = found_in(since, upto)
            if found.last > since:
                end = found.points[0][0] if rows else found.last
                whole = end == found.last and upto == floor  # nothing of the first snapshot is left: the tail begins
                return Offset(floor if whole else end, found.table_id, found.store, None if whole else floor).to_dict()
            if upto < floor:
                return start
            if found.kept_since > since:  # is it gone, or was it forgotten before? A batch finds out
                return Offset(floor, found.table_id, found.store).to_dict()
            since = floor
        if since != offset.ts:
            found = found_in(since, target)
        if found.last <= since:
            return start
        self._check_kept(since, found)
        end = found.points[0][0] if rows else found.last
        return Offset(end, found.table_id, found.store).to_dict()

    def _from(self, offset: Offset, found: TailPoints) -> tuple[int, int | None]:
        """From where on to read, and the floor."""
        since = self._checked(offset, found)
        if since is None:
            return 0, None
        return since, offset.floor if found.store == offset.store else None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begins, ends = Offset.of(start), Offset.of(end)
        found = self._points(begins.ts)
        if self._checked(ends, found) != ends.ts:
            return []  # it cannot be read again, and that is no failure
        since, floor = self._from(begins, found)
        if floor is not None and since < floor < ends.ts:
            since = floor  # there was nothing before it
        remembered_at = floor if floor is not None and since < floor else None
        if remembered_at is None and since < ends.ts:
            self._check_kept(since, found)
        parts: list[InputPartition] = []
        size, fail = self._options.partition_rows, self._options.fail_on_data_loss
        for part in self._options.ask(lambda db: [*commits(db, self._table, since, ends.ts, size)]):
            # A commit that has lost events has lost their places too, so it is not cut if that may be.
            cut = range(0, part.rows, size) if fail and part.rows > size else [0]
            take = size if len(cut) > 1 else None
            parts += [TailPart(part.since, part.upto, skip, take, remembered_at) for skip in cut]
        if not parts and remembered_at is not None:
            parts.append(TailPart(since, ends.ts, 0, None, remembered_at))  # which will find out if something is gone
        return parts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task. Goes on where it was if the server is away for a while."""
        assert isinstance(partition, TailPart)
        part, options = partition, self._options
        partial = not options.fail_on_data_loss
        done, deadline = 0, time.monotonic() + options.timeout_s
        while part.take is None or done < part.take:
            try:
                with held(options, None, part.upto) as snapshot:
                    for batch in snapshot.change_batches(
                        self._table,
                        since=part.since,
                        columns=self._columns,
                        commit_ts=COMMIT_TS in self._schema.fieldNames(),
                        skip=part.skip + done,
                        take=None if part.take is None else part.take - done,
                        remembered_at=part.remembered_at,
                        partial=partial,
                        retractions=options.retractions,
                    ):
                        yield self._output(batch)
                        done, deadline = done + batch.num_rows, time.monotonic() + options.timeout_s
                return
            except (SnapshotTooOld, Unavailable) as error:
                if loss := forgotten(self._table, error):
                    raise loss from None
                places_hold = part.remembered_at is None and not partial
                if time.monotonic() > deadline or (done and not places_hold):
                    raise
            time.sleep(random.uniform(0.1, 0.5))
