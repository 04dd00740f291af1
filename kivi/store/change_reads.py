"""Reading what was committed after a timestamp: tails of event tables, changed rows of aggregates
(``kivi.model.changes``).

**Invariants.**

* A snapshot has every commit at or below its timestamp (R11), so the tail (since, S] is complete and final: a commit
  that finishes late has held W back, and with it every S. Whoever reads (a, b] and then (b, c] misses none of them.
* What moves from pending into blocks is seen in one of the two: pending is captured first, blocks second, and pending
  events at or below ``events_upto`` are left out.
* The order of events within a commit is that of its record, and stays through sealing and compaction: so ``skip`` and
  ``take`` name the same events whenever they are asked for.
* A retraction in (since, S] of events up to ``since`` that the caller selects is told, unless it does not want that.
* If events after ``since`` were dropped it is SnapshotTooOld with ``kept_since``, never a shorter answer, unless the
  caller asks for what is left.

Changed rows are found from the events, whose commits carry the deltas: the distinct group keys in the source's tail,
of which no column but those that make the key is read; then the rows by key at S. The cost is that of what changed, not
of the table. An aggregate that was made complete after ``since`` has been changed everywhere.

Rows that a retention floor has taken away since are changed, too: those between the floor that ``since`` saw and the
one that S sees, from base, as long as they are there (``kivi.mvcc.forgetting``; SnapshotTooOld after that), and from
what is pending. So are the rows of events up to ``since`` that were retracted since, as long as their values are there;
then every row is given, and to a caller who asks for removed rows SnapshotTooOld. Whatever is named and has no row at S
is told as a *removed row*: its key, and null in all other columns.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from bisect import bisect_left
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.columns import padded, rows_batch
from kivi.arrow.dictionaries import gathered
from kivi.delta.grouping import Events
from kivi.delta.runs import DeltaRun
from kivi.encoding.key_slots import KeySlot
from kivi.encoding.keys import decode_key, prefix_end
from kivi.encoding.keyspaces import Space, table_prefix
from kivi.encoding.projection import Projection
from kivi.encoding.shards import shards_of_events, shards_of_keys
from kivi.errors import EventsRetracted, InvalidArgument, NotFound, SchemaError, SnapshotTooOld
from kivi.events.store import EventStore
from kivi.events.views import EventView
from kivi.log.shards import EVERY, SHARDS
from kivi.model.changes import COMMIT_TS, REMOVED, RETRACTED, Changes, TailPoints
from kivi.model.expressions import Expr, matches, names
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.mvcc.applied import PendingEvents
from kivi.mvcc.leases import Lease
from kivi.mvcc.row_floors import RowFloors
from kivi.mvcc.slot_walk import keys_between, pairs_of
from kivi.mvcc.watermark import Watermark
from kivi.store.event_parts import event_times, pieces, trimmer
from kivi.store.key_ranges import key_range
from kivi.store.reads import BATCH_ROWS, Reads, limited
from kivi.store.retention import first_positions
from kivi.store.shards import asked_shards, check_of_shards

__all__ = ["ChangeReads"]

_SMALL_ROWS: Final = 8_192
"""Small commits are read together: each batch is a message, and a message costs as much as a thousand events."""
_GROUPED_ROWS: Final = 65_536
"""And grouped together, likewise."""
_KEYS_HELD: Final = 1 << 20
_GET_ROWS: Final = 1_024


class _Cutter:
    """Puts commits together to parts of at most ``rows`` events; a commit of more is a part of its own."""

    def __init__(self, rows: int, most: int) -> None:
        self.points: list[tuple[int, int]] = []
        self._rows, self._most = rows, most
        self._part = self._part_ends = 0
        self._commit = self._cts = 0

    def fits(self, rows: int) -> bool:
        return self._part + self._commit + rows <= self._rows

    def add(self, commits: Iterable[tuple[int, int]]) -> None:
        for cts, rows in commits:
            if cts != self._cts:
                self._close()
                if len(self.points) >= self._most:
                    return
                self._cts = cts
            self._commit += rows

    def _close(self) -> None:
        if self._commit:
            if self._part and self._part + self._commit > self._rows:
                self.points.append((self._part_ends, self._part))
                self._part = 0
            self._part += self._commit
            self._part_ends, self._commit = self._cts, 0

    def ended(self) -> tuple[tuple[int, int], ...]:
        self._close()
        if self._part:
            self.points.append((self._part_ends, self._part))
        return tuple(self.points[: self._most])


@dataclass(frozen=True, slots=True)
class ChangeReads:
    """Thread safe."""

    reads: Reads
    row_floors: RowFloors
    watermark: Watermark
    store_id: bytes

    def _source(self, schema: TableSchema) -> EventStore:
        """The event table that the changes are read from. Raises InvalidArgument for a row table or a view."""
        if schema.kind in ("row", "view"):
            kind = "view" if schema.kind == "view" else "row table"
            raise InvalidArgument(
                f"{schema.name!r} is a {kind}, which does not keep its changes: event tables and aggregates do",
                table=schema.name,
            )
        events = self.reads.event_tables.of(schema.source_id if schema.kind == "aggregate" else schema.id)
        if events is None:
            raise NotFound(f"table {schema.source or schema.name!r} was dropped", table=schema.name)
        return events

    def tail_points(
        self, schema: TableSchema, since: int, rows: int, upto: int | None, most: int, shards: int | None = None
    ) -> TailPoints:
        """The points at which the commits in (since, upto] of an event table, or an aggregate's source, can be cut.

        No event is read; while there is nothing new, one header. About ``shards`` a node answers that holds these, with
        all events that it has: so there may be fewer of them between two points.
        """
        self.reads.check_open()
        self.reads.shards.check(schema, EVERY if shards is None else shards, may_ask_less=False)
        events = self._source(schema)
        watermark = self.watermark.value
        upto = watermark if upto is None else min(upto, watermark)
        pending, table = self.reads.pending, events.schema.id
        kept_since, last, cutter = events.kept_since, since, _Cutter(rows, most)
        if any(item.last > since for item in pending.events(table, upto)) or events.newest_cts() > since:
            # As of now: where commits lie does not change, and a snapshot of then may be refused.
            view_of = functools.partial(events.tail, since, upto, remembered_at=watermark, partial=True)
            view, recent = self.reads.retention.captured(pending, table, upto, view_of, since=since)
            with view:
                cutter.add(view.commits_after(since, cutter.fits))
                for item in recent:
                    cutter.add(zip(*(column.tolist() for column in item.commits()), strict=True))
                last = int(recent[-1].commits()[0][-1]) if recent else view.newest_after(since)
        last = max([last, *(cts for cts, *_ in self.retractions(schema, upto))])
        if schema.forgets_rows:
            kept_since = max(kept_since, self._erased_at(schema))
            last = max(last, self.reads.retention.moved_at(schema.id, upto) or 0)
        points, store_id = cutter.ended(), self.store_id.hex()
        return TailPoints(points, last, watermark, kept_since, schema.id, schema.created_ts, store_id)

    def scan(self, lease: Lease, schema: TableSchema, wanted: Scan, changes: Changes) -> Iterator[pa.RecordBatch]:
        """A scan of what was committed in (since, the snapshot]. It is captured at the call."""
        self.reads.check_open()
        counted = changes.skip or changes.take is not None  # among all events of the table
        self.reads.check_visible(lease, schema, EVERY if counted else asked_shards(schema, wanted))
        if wanted.shards is not None:
            check_of_shards(schema, wanted)
            if counted:
                raise InvalidArgument("skip and take count events of all shards: leave shards out")
        events = self._source(schema)
        if wanted.reverse:
            raise InvalidArgument("changes are read forwards")
        if changes.since > lease.ts:
            raise InvalidArgument(f"the snapshot {lease.ts} is older than since = {changes.since}")
        if changes.commit_ts and COMMIT_TS in schema.output_names:
            raise SchemaError(f"table {schema.name!r} has a column {COMMIT_TS!r} of its own: read it without commit_ts")
        if changes.removed and (schema.kind == "event" or REMOVED in schema.output_names):
            raise InvalidArgument(
                f"removed is for aggregates without a column {REMOVED!r} of their own, not for {schema.name!r}"
            )
        if schema.kind == "event":
            batches = self._tail_of(events, lease, schema, wanted, changes)
        else:
            if changes.skip or changes.take is not None or changes.remembered_at is not None:
                raise InvalidArgument(
                    "skip, take and remembered_at are for event tables: of an aggregate, use key ranges"
                )
            if changes.retractions == "deliver":
                raise InvalidArgument("only events that were retracted are delivered: rows of aggregates just change")
            batches = self._changed_rows(events, lease, schema, wanted, changes)
        return limited(batches, wanted.limit)

    def _tail_of(
        self, events: EventStore, lease: Lease, schema: TableSchema, wanted: Scan, changes: Changes
    ) -> Iterator[pa.RecordBatch]:
        """``_tail``, of the shards that are wanted."""
        if wanted.shards is None:
            return self._tail(events, lease, schema, wanted, changes)
        outputs = schema.output_columns(wanted.columns)
        columns = tuple(dict.fromkeys((*outputs, *schema.shard_by)))
        extra = [name for name in columns if name not in outputs]
        bits = self.reads.shards.bits(wanted.shards)
        found = self._tail(events, lease, schema, replace(wanted, columns=columns), changes)
        return (
            of.drop_columns(extra) if extra else of
            for batch in found
            if (of := batch.filter(pa.array(bits[shards_of_events(schema, batch, SHARDS)]))).num_rows
        )

    def _tail(
        self,
        events: EventStore,
        lease: Lease,
        schema: TableSchema,
        wanted: Scan,
        changes: Changes,
    ) -> Generator[pa.RecordBatch, None, None]:
        """Events of the table ``schema`` in (since, the snapshot], in commit order."""
        times = event_times(schema, wanted)
        since, remembered_at = changes.since, changes.remembered_at
        if remembered_at is not None and not lease.ts <= remembered_at <= self.watermark.value:
            raise InvalidArgument(
                f"remembered_at {remembered_at} is not between the snapshot {lease.ts} and the watermark"
            )
        outputs = list(schema.output_columns(wanted.columns))
        delivers = changes.retractions == "deliver"
        if delivers and (changes.skip or changes.take is not None):
            raise InvalidArgument("skip and take are not for tails that deliver retracted events")
        fails = changes.retractions == "fail"
        is_every = wanted.where is None and times == (None, None)
        waiting = self.reads.pending.events(schema.id, since) if delivers or (fails and not is_every) else []
        view_of = functools.partial(events.tail, since, lease.ts, remembered_at=remembered_at, partial=changes.partial)
        view, recent = self.reads.retention.captured(
            self.reads.pending, schema.id, lease.ts, view_of, floor_at=remembered_at, since=since
        )
        self.reads.leases.check(lease)
        skip, take = changes.skip, changes.take
        with_cts = changes.commit_ts or delivers
        shown = [*outputs, COMMIT_TS] if with_cts else outputs
        trim = trimmer(schema, wanted.where, times, view.floor_us, shown)
        met = view.retractions_met(since) if remembered_at is None else []
        earlier = [item._replace(batch=padded(item.batch, schema)) for item in (waiting if met else ())]
        if met and fails:
            try:
                self._check_not_read(view, schema, wanted, changes, met, earlier, is_any=is_every)
            except BaseException:
                view.close()
                raise
        in_blocks = view.rows_after(since) if recent and (skip or take is not None) else 0

        def chosen() -> Iterator[pa.RecordBatch]:
            begins = in_blocks
            for item in recent:
                low = max(0, skip - begins)
                high = item.batch.num_rows if take is None else min(item.batch.num_rows, skip + take - begins)
                begins += item.batch.num_rows
                if low < high:
                    part, stamps = item.slice(low, high)
                    stamped = pa.array(stamps.astype(np.int64))
                    yield part.append_column(COMMIT_TS, stamped) if with_cts else part

        # Gathered first: to trim a batch costs as much as to trim 10,000 rows.
        memory = pieces(trim(batch, True) for batch in gathered(chosen(), _SMALL_ROWS))

        stored = view.scan(
            after=since, time_from=times[0], time_to=times[1], where=wanted.where, columns=outputs,
            with_cts=with_cts, skip=skip, take=take,
        )  # fmt: skip
        tail: Iterator[pa.RecordBatch] = itertools.chain(stored, gathered(memory, _SMALL_ROWS))
        if delivers:
            columns = [column.name for column in schema.columns]

            def removed_at(cts: int) -> Iterator[pa.RecordBatch]:
                for batch in _removed(view, earlier, cts, since, columns):
                    yield trim(_stamped(batch, cts), True)

            tail = _interleaved(tail, [(cts, removed_at(cts)) for cts in met])
            tail = (batch if changes.commit_ts else batch.drop_columns([COMMIT_TS]) for batch in tail)
        return self.reads.watched(lease, schema, view, tail)

    def _check_not_read(
        self,
        view: EventView,
        schema: TableSchema,
        wanted: Scan,
        changes: Changes,
        met: Sequence[int],
        earlier: list[PendingEvents],
        *,
        is_any: bool,
    ) -> None:
        """Raises EventsRetracted if one of these retractions removed what the reader may have read: any event where
        ``is_any``, or where it skips and takes some, which are counted among all; otherwise one that it selects."""
        since, times = changes.since, event_times(schema, wanted)
        asked = sorted({*(() if wanted.where is None else names(wanted.where)), schema.event_time or ""})
        is_any |= bool(changes.skip) or changes.take is not None
        is_any |= any(name not in schema.by_name for name in asked)  # of commits, which nothing tells any more
        selected = trimmer(schema, wanted.where, times, None, asked)
        for cts in met:
            if is_any or any(selected(batch, True).num_rows for batch in _removed(view, earlier, cts, since, asked)):
                raise EventsRetracted(
                    f"events of {schema.name!r} committed up to {since} were retracted by the commit at {cts}: read on "
                    'with retractions="ignore", or with "deliver" to be told which',
                    table=schema.name,
                    since=since,
                    retracted_at=cts,
                )

    def check_not_read(self, lease: Lease, schema: TableSchema, where: Expr | None, since: int) -> None:
        """Raises EventsRetracted if events up to ``since`` that a predicate selects were retracted between then and the
        snapshot; of what lies on other nodes too, any."""
        if any(since < cts and first <= since for cts, first, _ in self.retractions(schema, lease.ts)):
            wanted = Scan(where=None if self.reads.shards.is_partial(schema) else where)
            tail = self._tail(self._source(schema), lease, schema, wanted, Changes(since, partial=True))
            with contextlib.closing(tail):
                next(tail, None)

    def _changed_rows(
        self, events: EventStore, lease: Lease, schema: TableSchema, wanted: Scan, changes: Changes
    ) -> Iterator[pa.RecordBatch]:
        """Rows of an aggregate, in key order, each once, as they are at the snapshot."""
        batches: Iterator[tuple[pa.RecordBatch, bool]] | None = None
        if changes.since >= schema.altered_ts:
            columns = tuple(dict.fromkeys(group.source for group in schema.group_by))
            try:
                after = Changes(changes.since, retractions="deliver")
                tail = self._tail(events, lease, events.schema, Scan(columns=columns), after)
                forgotten = self._forgotten(lease, schema, wanted, changes.since)
                batches = self._rows_by_key(lease, schema, wanted, changes, tail, forgotten)
            except SnapshotTooOld as error:
                if not (changes.partial and "kept_since" in error.details):
                    raise
        if batches is None:
            batches = self._every_row(lease, schema, wanted)
        newest = None
        if changes.commit_ts:
            newest = self.tail_points(schema, 0, 1, lease.ts, 0, wanted.shards).changed_at(lease.ts)
        marked = (_marked(batch, newest, removed if changes.removed else None) for batch, removed in batches)
        return gathered(marked, BATCH_ROWS)

    def _every_row(self, lease: Lease, schema: TableSchema, wanted: Scan) -> Iterator[tuple[pa.RecordBatch, bool]]:
        return ((batch, False) for batch in self.reads.scan(lease, schema, replace(wanted, changes=None, limit=None)))

    def retractions(self, schema: TableSchema, upto: int) -> list[tuple[int, int, int]]:
        """The retractions at or below ``upto`` of an event table, or an aggregate's source: their CTS, and the CTS of
        the first and of the last event that each removed."""
        events = self._source(schema)
        pending = self.reads.pending.retracted(events.schema.id, upto)  # first, as they move into blocks
        found = [(one.cts, int(one.names.stamps[0]), int(one.names.stamps[-1])) for one in pending]
        return found + [one for one in events.retractions() if one[0] <= upto]

    def _rows_by_key(
        self,
        lease: Lease,
        schema: TableSchema,
        wanted: Scan,
        changes: Changes,
        tail: Iterator[pa.RecordBatch],
        forgotten: list[Any],
    ) -> Iterator[tuple[pa.RecordBatch, bool]]:
        """In key order, and whether a batch is of removed rows. ``tail``: with the events that were retracted.

        Where the values of these are gone, every row is given, unless the caller asks for removed ones: SnapshotTooOld.
        """
        since = changes.since
        projection = Projection(schema, wanted.columns, wanted.where)
        low, high = key_range(schema, wanted)
        removals = _Removals(schema, wanted)
        floor_us = self.reads.retention.row_floor(schema, since) if schema.forgets_rows else None

        def portions() -> Iterator[tuple[pa.RecordBatch, bool]]:
            try:
                keys = _keys_of(schema, tail, forgotten)
            except EventsRetracted as error:
                if changes.removed and not changes.partial:
                    raise SnapshotTooOld(
                        f"rows of {schema.name!r} that a retraction after {since} removed are forgotten: read the "
                        "table again, and its changes from then on",
                        kept_since=error.details["retracted_at"],
                    ) from None
                yield from self._every_row(lease, schema, wanted)
                return
            if wanted.shards is not None:
                bits = self.reads.shards.bits(wanted.shards)
                keys = keys.filter(pa.array(bits[shards_of_keys(schema, keys, SHARDS)]))
            if floor_us is not None:  # rows that were gone before, of which events came late
                keys = keys.filter(pa.array(~KeySlot.of(schema).below(keys, floor_us)))
            first = 0 if low is None else bisect_left(range(len(keys)), low, key=lambda i: keys[i].as_py())
            beyond = len(keys) if high is None else bisect_left(range(len(keys)), high, key=lambda i: keys[i].as_py())
            for at in range(first, beyond, _GET_ROWS):
                asked = keys.slice(at, min(_GET_ROWS, beyond - at)).to_pylist()
                found = zip(asked, self.reads.reader.get(lease, schema, asked), strict=True)
                for removed, rows in itertools.groupby(found, lambda row: row[1] is None):
                    if removed:
                        yield removals.batch([key for key, _ in rows]), True
                    else:
                        portion: Any = list(rows)
                        yield from ((batch, False) for batch in projection.batches([portion], None))

        return portions()

    def _erased_at(self, schema: TableSchema) -> int:
        """Rows that a snapshot below this saw may be erased."""
        erased = self.row_floors.erased(schema.id)
        return 0 if erased is None else erased.cts

    def _forgotten(self, lease: Lease, schema: TableSchema, wanted: Scan, since: int) -> list[Any]:
        """The keys, in arrays, of the rows that were there at ``since`` and lie below the floor of the snapshot.

        More may be among them. Raises SnapshotTooOld if some may be erased by now.
        """
        if not schema.forgets_rows:
            return []
        floor_us, low_us = (self.reads.retention.row_floor(schema, ts) for ts in (lease.ts, since))
        forgotten = []
        if floor_us is not None and floor_us != low_us:
            forgotten = list(self._between(lease, schema, wanted, low_us, floor_us))
        if since < (erased := self._erased_at(schema)):  # looked at last: they go while others read
            raise SnapshotTooOld(
                f"rows of {schema.name!r} that its retention took away after {since} are erased: read the table again, "
                f"and its changes from then on; or from {erased} on",
                kept_since=erased,
            )
        return forgotten

    def _between(
        self, lease: Lease, schema: TableSchema, wanted: Scan, low_us: int | None, floor_us: int
    ) -> Iterator[Any]:
        low, high = key_range(schema, wanted)
        slot, prefix = KeySlot.of(schema), table_prefix(Space.ROW, schema.id)
        indexed, runs = self.reads.pending.capture(schema.id, low, high, lease.ts)
        for keys in (
            pa.array([key for key, _ in indexed], pa.large_binary()),
            *(_keys_in(run, low, high) for run in runs),
        ):
            yield keys.filter(pa.array(slot.below(keys, floor_us)))
        at: bytes | None = prefix + (low or b"")
        end = prefix_end(prefix) if high is None else prefix + high
        while at is not None:
            found, at = keys_between(
                self.reads.reader.engine, schema, Space.ROW, at, end,
                lists=pairs_of, low_us=low_us, floor_us=floor_us, rows=_GET_ROWS, seeks=_GET_ROWS,
            )  # fmt: skip
            yield pa.array([name[len(prefix) :] for name in found], pa.large_binary())
        self.reads.reader.check(lease, schema)


def _removed(
    view: EventView, earlier: list[PendingEvents], cts: int, since: int, columns: list[str]
) -> Iterator[pa.RecordBatch]:
    """The events up to ``since`` that the retraction at ``cts`` removed. ``earlier``: those that were pending."""
    yield from view.removed(cts, since, columns)
    waiting = [part for item in earlier if (part := item.after(view.events_upto)) is not None]
    for part, first in zip(waiting, first_positions(waiting), strict=True):
        rows = view.names_at(cts).rows_in(*part.commits(), first)
        if len(rows):
            yield part.batch.select(columns).take(pa.array(rows))


def _interleaved(
    tail: Iterator[pa.RecordBatch], removed: Iterable[tuple[int, Iterator[pa.RecordBatch]]]
) -> Iterator[pa.RecordBatch]:
    """A tail with ``COMMIT_TS``, and removed events where they were retracted; ``RETRACTED`` tells which is which."""

    def marked(batch: pa.RecordBatch, retracted: bool) -> pa.RecordBatch:
        return batch.append_column(RETRACTED, pa.array(np.full(batch.num_rows, retracted)))

    left = list(removed)
    for batch in tail:
        stamps, at = batch.column(COMMIT_TS).to_numpy(), 0
        while left and len(stamps) and stamps[-1] > left[0][0]:
            cts, found = left.pop(0)
            cut = int(np.searchsorted(stamps, cts, "right"))
            yield marked(batch.slice(at, cut - at), False)
            yield from (marked(one, True) for one in found)
            at = cut
        yield marked(batch.slice(at), False)
    for _, found in left:
        yield from (marked(one, True) for one in found)


def _stamped(batch: pa.RecordBatch, cts: int) -> pa.RecordBatch:
    return batch.append_column(COMMIT_TS, pa.array(np.full(batch.num_rows, cts, np.int64)))


class _Removals:
    """Makes removed rows: those that a predicate over their keys alone selects, where there is one."""

    def __init__(self, schema: TableSchema, wanted: Scan) -> None:
        self._schema, self._where = schema, wanted.where
        self._outputs = schema.output_columns(wanted.columns)
        self._types = [column.type for column in schema.key]
        self._nothing = dict.fromkeys(schema.output_names)

    def batch(self, keys: list[bytes]) -> pa.RecordBatch:
        named = (dict(zip(self._schema.key_names, decode_key(self._types, key), strict=True)) for key in keys)
        rows = [{**self._nothing, **row} for row in named]
        if self._where is not None:
            rows = [row for row in rows if matches(self._where, row)]
        return rows_batch(self._schema, self._outputs, rows)


def _marked(batch: pa.RecordBatch, cts: int | None, removed: bool | None) -> pa.RecordBatch:
    if cts is not None:
        batch = batch.append_column(COMMIT_TS, pa.array(np.full(batch.num_rows, cts, np.int64)))
    if removed is not None:
        batch = batch.append_column(REMOVED, pa.array(np.full(batch.num_rows, removed, np.bool_)))
    return batch


def _keys_in(run: DeltaRun, low: bytes | None, high: bytes | None) -> Any:
    rows = run.slice_range(low, high)
    return run.keys.slice(rows.start, len(rows))


def _keys_of(aggregate: TableSchema, tail: Iterator[pa.RecordBatch], others: list[Any]) -> Any:
    """The encoded keys of the rows that these events belong to, and ``others``, sorted, each once."""
    held: list[Any] = []
    count, limit = 0, _KEYS_HELD
    of_events = (Events(events, are_stored=True).groups(aggregate).keys for events in gathered(tail, _GROUPED_ROWS))
    for keys in itertools.chain(of_events, others):
        held.append(keys)
        count += len(held[-1])
        if count > limit:
            held = [_distinct(held)]
            count = len(held[0])
            limit = 2 * count + _KEYS_HELD
    keys = _distinct(held)
    return keys.take(pc.array_sort_indices(keys))


def _distinct(keys: list[Any]) -> Any:
    return pc.unique(pa.chunked_array(keys, pa.large_binary()))
