"""``spark.readStream.format("kivi")`` on an event table: its commits in order, each event once.

**Invariants.**

* A batch is the events with start < commit timestamp <= end, and end is at most the watermark: no commit at or below it
  can still appear, however late it finishes (R11, R12). Batches follow each other without gap, so together they are all
  events, each once.
* The same two offsets give the same events whenever they are asked for, as commits are never altered: after a restart
  Spark runs its last batch again, and gets the same rows. Where this does not hold it is a StreamDataLoss
  (``offsets``): retention has dropped some, the table is another one, the store is an older one.
* An offset is the timestamp of a commit to this table, one that appended or one that retracted: while nothing comes, it
  stays, and no batch runs.
* A batch is read at one snapshot, that of its end, however many tasks it has. A retraction at r (R22) is met by the
  batch with start < r <= end, if it removed events up to start, which earlier batches had: ``retractions`` says what
  becomes of them. What it removed of the batch itself is in no batch. With "deliver" one task reads a batch, as the
  removed events are those up to its start; what a new query begins with is still read by many, as none of it was read
  before. Where the values of retracted events are gone before a batch is read (again), it fails; with "ignore" it has
  what is left.

* The shards of a table are read each at a node that holds it (``shares``). An offset is the newest commit to any of
  them at the watermark of the node that is asked first: each other one is waited for until it has come so far, so that
  all tell of the same commits. Where the events of one commit lie at several nodes, each gives those of its shards.

A new query begins with what the table holds (``startingOffsets`` earliest): events up to the snapshot it began with, as
far as that one remembers them, and after that every commit as it was, even if retention makes some of it invisible
before it is read. ``latest`` begins after that snapshot, a commit timestamp or a moment after it.

``maxRowsPerTrigger`` cuts at commits: as many whole commits as fit, and at least one, however large it is. A batch is
cut into tasks of about ``partitionRows`` events, within a commit too. A task that loses the server goes on where it was
when the server is back; so does the query, within ``timeout``.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import BooleanType, DataType, LongType, StructField, StructType

from kivi.errors import InvalidArgument, KiviError, SchemaError, SnapshotTooOld, Unavailable
from kivi.model.changes import COMMIT_TS, RETRACTED, TailPoints
from kivi.spark.holding import held
from kivi.spark.offsets import Offset, check_offset, dropped, forgotten, lost, retracted
from kivi.spark.options import Options
from kivi.spark.schemas import Target, arrow_schema, spark_batch, spark_schema
from kivi.spark.shares import EVERYTHING, Share, in_turn, joined, shares

if TYPE_CHECKING:
    from kivi.client.database import Database, Snapshot

__all__ = ["EventTail", "StreamReader", "TailPart", "check_places", "commits", "stream_schema", "streamed"]

_POINTS: Final = 1_000
_TOLD_S: Final = 10.0
_BY: Final = {COMMIT_TS: "commitTs", RETRACTED: "retractions"}


def stream_schema(target: Target, options: Options) -> StructType:
    """The schema of the rows that a stream gives. Raises SchemaError for a column that is not there."""
    found = spark_schema(target, options.columns)
    for name, type_ in _added(options).items():
        if name in target.columns:
            raise SchemaError(f"table {target.table!r} has a column {name!r} of its own: leave option {_BY[name]} out")
        found = StructType([*found.fields, StructField(name, type_, False)])
    return found


def _added(options: Options) -> dict[str, DataType]:
    """The columns that the options add."""
    added: dict[str, DataType] = {COMMIT_TS: LongType()} if options.commit_ts else {}
    return {**added, RETRACTED: BooleanType()} if options.retractions == "deliver" else added


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
    if described["kind"] == "aggregate" and options.retractions == "deliver":
        raise InvalidArgument(
            f"{options.table!r} is an aggregate: a row whose events were retracted comes with its newest values. "
            'Option retractions "deliver" is for event tables'
        )
    if described["state"] == "building":
        raise Unavailable(f"aggregate {options.table!r} is still being built from existing events")
    target = Target.of(db, options.table)
    added = {name: type_ for name, type_ in _added(options).items() if name in schema.fieldNames()}
    target.check_readable(StructType([field for field in schema.fields if field.name not in added]))
    for name, type_ in added.items():
        if schema[name].dataType != type_:
            raise SchemaError(f"column {name!r} is {type_.simpleString()}")
    return target


class Commits(NamedTuple):
    """Commits with since < timestamp <= upto, of so many events; those up to ``kept_since`` may have lost some."""

    since: int
    upto: int
    rows: int
    kept_since: int

    def cut(self, size: int) -> tuple[int, list[tuple[int, int | None]]]:
        """From which commit on its events are counted, and which of them are to be read together: so many after so
        many others; None: all. They are counted only where no event was dropped, as each node drops in its own time."""
        since = self.since
        if self.rows > size and self.kept_since < self.upto:  # it is one commit, and all of it is there
            since = max(since, self.kept_since)
        if since < self.kept_since:
            return since, [(0, None)]
        return since, [(skip, min(size, self.rows - skip)) for skip in range(0, self.rows, size)]


def check_places(db: Database, table: str, since: int, upto: int, rows: int) -> None:
    """Raises SnapshotTooOld if a commit that was cut has some of its events, and not all: they have other places."""
    if db.tail_points(table, since, rows, upto=upto, most=1).points not in ((), ((upto, rows),)):
        raise SnapshotTooOld(
            f"events of {table!r} were dropped since this job was planned: run it again, with a longer option leaseTtl"
        )


def commits(db: Database, table: str, since: int, upto: int, rows: int, shards: int | None = None) -> Iterator[Commits]:
    """An event table's commits after ``since`` up to ``upto``, in order, put together to about ``rows`` events."""
    whole = False
    while not whole:
        found = db.tail_points(table, since, rows, upto=upto, most=_POINTS, shards=shards)
        for commit_ts, count in found.points:
            yield Commits(since, commit_ts, count, found.kept_since)
            since = commit_ts
        whole = len(found.points) < _POINTS


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The common part of the streams of event tables and of aggregates. Pickles: tasks have a copy."""

    _told: tuple[float, list[Share]] = 0.0, []
    """The shares, and when these were told."""

    def __init__(self, options: Options, target: Target, schema: StructType) -> None:
        self._options = options
        self._table = target.table
        self._is_sharded = target.is_sharded
        self._names = [name for name in schema.fieldNames() if name not in _added(options)]
        self._columns = self._names or [next(iter(target.columns))]  # if it is the commits alone that are wanted
        self._schema = schema

    @contextlib.contextmanager
    def _shares(self) -> Iterator[list[Share]]:
        """Where the table is read now; asked for seldom, and again where a node has not answered for what it had."""
        told, found = self._told
        if not self._is_sharded:
            found = [EVERYTHING]
        elif not found or time.monotonic() - told > _TOLD_S:
            found = shares(self._options.client())
            self._told = time.monotonic(), found
        try:
            yield found
        except Unavailable:
            self._told = 0.0, []
            raise

    def _in_turn(self, cut: Callable[[Database, Share], Iterable[InputPartition]]) -> list[InputPartition]:
        """The parts of all shares, each cut at a node that reads it."""

        def ask(_: Database) -> list[InputPartition]:
            with self._shares() as found:
                return in_turn([*cut(self._options.client_at(share.nodes), share)] for share in found)

        return self._options.ask(ask)

    def _points(self, since: int, rows: int = 1, upto: int | None = None, most: int = 0) -> TailPoints:
        """Of the nodes of all shares together, of which each tells of at most its part of the rows. One node tells of
        its watermark; several are to tell of the same one, which some of them may have to come to."""

        return self._options.ask(lambda db: self._told_by(db, since, rows, upto, most))

    def _told_by(self, db: Database, since: int, rows: int = 1, upto: int | None = None, most: int = 0) -> TailPoints:
        with self._shares() as found:
            newest = max(since, db.watermark()) if upto is None and len(found) > 1 else upto
            of_each = max(1, rows // len(found))
            return joined(
                [
                    self._options.client_at(share.nodes).tail_points(
                        self._table, since, of_each, upto=newest, most=most, shards=share.shards
                    )
                    for share in found
                ]
            )

    def _checked(self, offset: Offset, found: TailPoints) -> int | None:
        return check_offset(self._table, offset, found, fail=self._options.fail_on_data_loss)

    def _check_kept(self, since: int, found: TailPoints) -> None:
        if since < found.kept_since:
            lost(self._options.fail_on_data_loss, dropped(self._table, found.kept_since))

    def _starting(self) -> int:
        """The commit timestamp that the user gave, or that of a moment."""
        start = self._options.stream_start
        if isinstance(start, dt.datetime):

            def look(db: Database) -> int:
                with db.snapshot(as_of=start) as snapshot:
                    return snapshot.ts

            return self._options.ask(look)
        ts = int(start)
        if ts > (watermark := self._points(ts).watermark):
            raise InvalidArgument(f"the stream would begin after commit {ts}, and the store only goes to {watermark}")
        return ts

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The newest commit of the table, for the query's progress."""
        try:
            found = self._told_by(self._options.client(), 0)
        except KiviError:
            return None  # the batch itself will say what is wrong
        return Offset(max(found.last, found.created_ts), found.table_id, found.store).to_dict()

    def _output(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return spark_batch(batch.select(self._schema.fieldNames()), arrow_schema(self._schema))


@dataclass(frozen=True, slots=True)
class TailPart(InputPartition):
    """Events with since < commit timestamp <= upto, as of ``snapshot``: ``take`` of them after the first ``skip``.
    They were ``rows`` when the batch was planned."""

    since: int
    upto: int
    snapshot: int
    skip: int = 0
    take: int | None = None
    remembered_at: int | None = None
    share: Share = EVERYTHING
    rows: int = 0

    def left_at(self, ts: int) -> TailPart:
        """What is left of it at a later snapshot."""
        if self.remembered_at is not None:
            return replace(self, remembered_at=max(ts, self.remembered_at))
        return replace(self, snapshot=max(ts, self.snapshot))


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
                ts = self._starting()
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
                end = _end(found)
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
        return Offset(_end(found), found.table_id, found.store).to_dict()

    def _from(self, offset: Offset, found: TailPoints) -> tuple[int, int | None]:
        """From where on to read, and the floor."""
        since = self._checked(offset, found)
        if since is None:
            return 0, None
        return since, offset.floor if found.store == offset.store else None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begins, ends = Offset.of(start), Offset.of(end)
        found = self._points(begins.ts, upto=ends.ts)
        if self._checked(ends, found) != ends.ts:
            return []  # it cannot be read again, and that is no failure
        since, floor = self._from(begins, found)
        if floor is not None and since < floor < ends.ts:
            since = floor  # there was nothing before it
        remembered_at = floor if floor is not None and since < floor else None
        if remembered_at is None and since < ends.ts:
            self._check_kept(since, found)
        if self._options.retractions == "deliver" and remembered_at is None:
            whole = TailPart(since, ends.ts, ends.ts)
            return self._in_turn(lambda _, share: [replace(whole, share=share)] if since < ends.ts else [])
        return self._in_turn(lambda db, share: self._parts_of(db, share, since, ends.ts, remembered_at))

    def _parts_of(
        self, db: Database, share: Share, since: int, ends: int, remembered_at: int | None
    ) -> Iterator[InputPartition]:
        size, done = self._options.partition_rows, since
        for part in commits(db, self._table, since, ends, size, share.shards):
            # A commit that has lost events has lost their places too, so it is not cut if that may be; nor is one of
            # which some shards are read, whose events are not counted.
            since, cuts = part.since, list[tuple[int, int | None]]([(0, None)])
            if self._options.fail_on_data_loss and part.rows > size and share.shards is None:
                since, cuts = part.cut(size)
            for skip, take in cuts:
                yield TailPart(since, part.upto, ends, skip, take, remembered_at, share, part.rows)
            done = part.upto
        if done < ends:  # a retraction, or what is gone, or of other shards: the task finds out
            yield TailPart(done, ends, ends, remembered_at=remembered_at, share=share)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task. Goes on where it was if the server is away for a while; of some shards Spark begins again, as
        nodes may have the events of one commit in different orders."""
        assert isinstance(partition, TailPart)
        part, options = partition, self._options
        partial = not options.fail_on_data_loss
        done, deadline = 0, time.monotonic() + options.timeout_s
        while part.take is None or done < part.take:
            try:
                with held(options, None, part.snapshot, part.share.nodes, part.remembered_at or 0) as snapshot:
                    for batch in self._batches(snapshot, part, done, partial):
                        yield self._output(batch)
                        done, deadline = done + batch.num_rows, time.monotonic() + options.timeout_s
                return
            except (SnapshotTooOld, Unavailable) as error:
                if loss := forgotten(self._table, error):
                    raise loss from None
                if gone := error.details.get("retracted_at"):
                    if options.retractions != "ignore" or done:
                        raise retracted(self._table, error) from None
                    part = part.left_at(int(gone))
                    continue
                places_hold = part.remembered_at is None and not partial and part.share.shards is None
                if time.monotonic() > deadline or (done and not places_hold):
                    raise
            time.sleep(random.uniform(0.1, 0.5))
            divided = part.share.again(options.client())
            if done or part.take is not None:  # places are those of a node that has everything
                divided = [share for share in divided if share.shards is None]
            if len(divided) > 1:  # no node holds all of them any more
                for share in divided:
                    yield from self.read(replace(part, share=share))
                return
            part = replace(part, share=divided[0]) if divided else part

    def _batches(self, snapshot: Snapshot, part: TailPart, done: int, partial: bool) -> Iterator[pa.RecordBatch]:
        """The events of a part after the first ``done``, with ``COMMIT_TS``."""
        delivers = self._options.retractions == "deliver" and part.remembered_at is None
        skip = 0 if delivers else part.skip + done
        over = done if delivers else 0
        batches = snapshot.change_batches(
            self._table,
            since=part.since,
            columns=self._columns,
            commit_ts=True,
            skip=skip,
            take=None if part.take is None else part.take - done,
            remembered_at=part.remembered_at,
            partial=partial,
            retractions="deliver" if delivers else "fail" if self._options.retractions == "fail" else "ignore",
            shards=part.share.shards,
        )
        first = [*islice(batches, 1)]
        if part.take is not None and part.remembered_at is not None:  # what that snapshot does not see may be dropped
            db = self._options.client_at(part.share.nodes)
            check_places(db, self._table, part.since, part.upto, part.rows)
        for batch in chain(first, batches):
            inside = int(np.searchsorted(batch.column(COMMIT_TS).to_numpy(), part.upto, "right"))
            ends = inside < batch.num_rows
            if over < inside:
                cut = batch.slice(over, inside - over)
                yield cut if delivers else cut.append_column(RETRACTED, pa.array(np.zeros(cut.num_rows, bool)))
            over = max(0, over - inside)
            if ends:
                return


def _end(found: TailPoints) -> int:
    """Of the next batch: the first point asked for, if there is one; behind the last of them are only retractions."""
    return found.points[0][0] if found.points else found.last
