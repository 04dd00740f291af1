"""``spark.readStream.format("kivi")`` on an aggregate: its changed rows, as a second job can react to them.

**Invariant.** Whoever puts the rows of each batch over those that came before, by key, has after each batch the table
as it is at one snapshot: that of the batch, which ``_commit_ts`` names. It never goes back.

A batch (start, end] has each row once that events committed in it belong to, with the values at end: the newest commit
that changed the table when the batch was planned, under a lease taken then. Values in between are not delivered, so a
consumer that is behind catches up at the cost of the rows that have changed, and there is no ``maxRowsPerTrigger``. The
first batch has the whole table (``startingOffsets`` earliest), or there is none (latest).

**What a replay delivers.** Spark runs the last planned batch again after a restart. If the table can still be read at
end (nothing was committed since; or the lease still holds, ``leaseTtl`` after it was last used; or the aggregate keeps
``history``), the same rows come. If not, the values of then are gone, and the batch is that of a later snapshot: all
rows changed in (start, later], with the later values and the later ``_commit_ts``; a warning says so. The batch after
it begins at end, and brings the rows changed between end and later again. So a row may come twice, each time with the
timestamp that it is true at, and the invariant holds.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadLimit

from kivi.errors import KiviError, SnapshotTooOld, Unavailable
from kivi.model.changes import COMMIT_TS, TailPoints
from kivi.spark.filters import Range
from kivi.spark.holding import held
from kivi.spark.offsets import Offset, forgotten
from kivi.spark.shares import Share
from kivi.spark.tail import StreamReader

if TYPE_CHECKING:
    from kivi.client.database import Database, Snapshot

__all__ = ["AggregateFeed", "FeedPart"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FeedPart(InputPartition):
    """The rows of a range of keys that have changed since, at the batch's snapshot: its lease, its timestamp, and the
    newest commit in it that changed the table."""

    lease: bytes
    ts: int
    end: int
    since: int
    range: Range
    share: Share


@dataclass(slots=True)
class _Held:
    """A shared snapshot; ``end`` is the newest commit in it that changed the table. Of the past each node that is read
    has a snapshot ``beside`` it, since its base may go on before it hears of this one."""

    end: int
    snapshot: Snapshot
    beside: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def close(self) -> None:
        self.beside.close()
        self.snapshot.close()


class AggregateFeed(StreamReader):
    """The stream of one aggregate."""

    _batch: _Held | None = None
    """The snapshot of the batch that was planned last."""
    _target: _Held | None = None
    """With ``Trigger.AvailableNow``: the snapshot that the query began with."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batch": None, "_target": None}

    def initialOffset(self) -> dict[str, Any]:
        found = self._points(0)
        match self._options.stream_start:
            case "earliest":
                ts = 0
            case "latest":
                ts = found.changed_at(found.watermark)
            case _:
                ts = self._starting()
        return Offset(ts, found.table_id, found.store).to_dict()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._hold()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        offset = Offset.of(start)
        found = self._points(offset.ts)
        since = self._since(offset, found)
        newest = found.changed_at(found.watermark) if self._target is None else self._target.end
        if newest <= since:
            return start
        if since >= found.created_ts:
            self._check_kept(since, found)
        self._let_go(self._batch)
        self._batch = self._target or self._hold()
        return Offset(self._batch.end, found.table_id, found.store).to_dict()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begins, ends = Offset.of(start), Offset.of(end)
        found = self._points(begins.ts, upto=ends.ts)
        if self._checked(ends, found) != ends.ts:
            return []
        since = self._since(begins, found)
        if since >= ends.ts:
            return []
        batch = self._batch
        if batch is None or batch.end != ends.ts or not self._is_alive(batch):
            self._let_go(batch)
            batch = self._batch = self._held_again(ends.ts)
        held_by, newest = batch.snapshot, batch.end

        def cut(db: Database, share: Share) -> list[InputPartition]:
            points = db.split_points(self._table, self._options.partition_rows)
            return [FeedPart(held_by.lease, held_by.ts, newest, since, part, share) for part in Range().cut(points)]

        return self._in_turn(cut)

    def _since(self, offset: Offset, found: TailPoints) -> int:
        """From where on rows have changed; 0, which means all of them, if the table is not the one that was read."""
        same = self._checked(offset, found) == offset.ts and found.store == offset.store
        return offset.ts if same else 0

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task."""
        assert isinstance(partition, FeedPart)
        share, begun = partition.share, False
        try:
            with held(self._options, partition.lease, partition.ts, share.nodes) as snapshot:
                for batch in snapshot.change_batches(
                    self._table,
                    since=partition.since,
                    start=partition.range.start,
                    end=partition.range.end,
                    columns=self._columns,
                    commit_ts=False,
                    partial=not self._options.fail_on_data_loss,
                    shards=share.shards,
                ):
                    begun = True
                    newest = pa.array(np.full(batch.num_rows, partition.end, np.int64))
                    yield self._output(batch.append_column(COMMIT_TS, newest))
        except SnapshotTooOld as error:
            raise forgotten(self._table, error) or error from None
        except Unavailable:
            if begun or not share.nodes:
                raise
            divided = share.again(self._options.client())
            if len(divided) == 1 and {*divided[0].nodes} <= {*share.nodes}:
                divided = [share.elsewhere()]
            for one in divided:
                yield from self.read(replace(partition, share=one))

    def commit(self, end: dict[str, Any]) -> None:
        """The batch will not be run again: what is kept for it may go."""
        if self._batch is not None and self._batch.end <= Offset.of(end).ts:
            self._let_go(self._batch)
            self._batch = None

    def stop(self) -> None:
        for kept in (self._batch, self._target):
            if kept is not None:
                kept.close()
        self._batch = self._target = None

    # -- snapshots ------------------------------------------------------------------------------

    def _hold(self, as_of: int | None = None) -> _Held:
        """A snapshot that the tasks may use."""

        def begin(db: Database) -> _Held:
            snapshot = db.snapshot(as_of=as_of, ttl_s=self._options.lease_ttl_s, shared=True)
            snapshot.__enter__()
            try:
                return _Held(self._points(0, upto=snapshot.ts).changed_at(snapshot.ts), snapshot)
            except BaseException:
                snapshot.close()
                raise

        return self._options.ask(begin)

    def _held_again(self, end: int) -> _Held:
        """For a batch that was planned by another process, or before the server was started again."""
        newest = self._hold()
        if newest.end == end:
            return newest
        past = self._hold(as_of=end)
        if self._is_readable(past):
            self._let_go(newest)
            return past
        self._let_go(past)
        _log.warning(
            "the batch of %r that ended at %d is repeated with the values of %d, as those of then are gone: "
            "an aggregate with history keeps them", self._table, end, newest.end,
        )  # fmt: skip
        return newest

    def _is_readable(self, past: _Held) -> bool:
        """Whether the nodes of all shares have the rows as of then, each of its own; they do until it is closed."""

        def look(_: Database) -> bool:
            past.beside.close()  # of an attempt before
            with self._shares() as found:
                for share in found:
                    wanted = self._options.client_at(share.nodes).snapshot(
                        as_of=past.snapshot.ts, ttl_s=self._options.lease_ttl_s, shared=True
                    )
                    try:
                        there = past.beside.enter_context(wanted)
                        list(there.scan_batches(self._table, limit=1, shards=share.shards))
                    except SnapshotTooOld:
                        return False
            return True

        try:
            return self._options.ask(look)
        except Unavailable:
            return False

    def _is_alive(self, batch: _Held) -> bool:
        try:
            batch.snapshot.renew(self._options.lease_ttl_s)
        except KiviError:
            return False
        return True

    def _let_go(self, batch: _Held | None) -> None:
        if batch is not None and batch is not self._target:
            batch.close()
