"""One event table: what is sealed becomes blocks, blocks become settled files, and what is below the floor goes.

Every change is one engine batch that leaves headers, data and meta agreeing with each other (the invariants are in
``kivi.events``). Data that went out of use are named in meta as dead in that batch, and deleted later, when the last
view that may need them has closed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import padded
from kivi.arrow.dictionaries import coded, together, written_bytes
from kivi.encoding.event_names import STAMP, EventNames
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import (
    Space,
    event_data_key,
    event_file_key,
    event_header_key,
    event_meta_key,
    table_prefix,
)
from kivi.engine import Engine, WriteBatch
from kivi.errors import InvalidArgument, NotFound, SnapshotTooOld
from kivi.events.blocks import Block, Blocks, Counts, Erased, Meta, Stamps, first_positions, joined, read_headers
from kivi.events.cold_tier import ColdObject, ColdTier
from kivi.events.compaction import mergeable, unchanging
from kivi.events.cooling import Cooling
from kivi.events.manifest import Manifest, settled_files
from kivi.events.places import InEngine, Place
from kivi.events.settled_files import SettledFile, SettledFiles
from kivi.events.settling import Settling, data_of, named_rows
from kivi.events.views import EventView, Readers
from kivi.model.schema import TableSchema

__all__ = ["EventStore", "destroy"]

_STEP_DELETES: Final = 1_024
_GIVEN_BACK: Final = 32
"""When so many data were deleted, the engine is asked to give back what they took."""
_RETRACTIONS_MAX: Final = 256


class EventStore:
    """The blocks of one event table. The end of ``kivi.events`` says what may run at the same time.

    ``block_rows`` and ``block_bytes`` (of columns in memory) bound a block, and so what a scan holds at a time.
    ``place``: of settled files, in the engine if it is None; ``cold``: where those are that lie elsewhere.
    """

    def __init__(
        self,
        engine: Engine,
        schema: TableSchema,
        *,
        block_rows: int = 131_072,
        block_bytes: int = 8 << 20,
        place: Place | None = None,
        cold: ColdTier | None = None,
    ) -> None:
        self._engine = engine
        self._block_rows = block_rows
        self._block_bytes = block_bytes
        self._base = Blocks(engine, schema)
        self._files = SettledFiles(place or InEngine(engine, schema.id), schema, cold)
        self._manifest = Manifest(engine, schema.id, schema.name)
        self._readers = Readers()
        self._waiting: dict[int, int] = {}  # data out of use, and the newest view that may need them
        self._made: list[int] = []  # by a rewriting in progress: out of use for whoever comes after a crash alone
        self._waiting_files: list[tuple[int, list[SettledFile]]] = []
        self._deleted = 0  # data, since the engine was asked to give back what they took
        self._files.place.keep_only(file.number for file in self._manifest.read()[2] if file.cold is None)
        self.settling = Settling(self)
        self.cooling = Cooling(self)
        self._compacted = 0, 0  # by so many rows a block, compaction need not look at what is before this order
        self._apart = 0  # what is before this order is being made anew
        self._wait_for(self._base.meta())  # no view of before the restart is open
        self._owed = True  # it is asked however few they are: there may be no more

    @property
    def schema(self) -> TableSchema:
        return self._base.schema

    def redefine(self, schema: TableSchema) -> None:
        """The table was altered: columns were added to it."""
        self._base = Blocks(self._engine, schema)
        self._files = SettledFiles(self._files.place, schema, self._files.cold)

    @property
    def events_upto(self) -> int:
        """Every event at or below this CTS is in blocks."""
        return self._base.meta().upto

    @property
    def block_size(self) -> tuple[int, int]:
        """Events and bytes of a block, at most."""
        return self._block_rows, self._block_bytes

    @property
    def open_views(self) -> int:
        return len(self._readers)

    # -- reading --------------------------------------------------------------------------------

    def view(self, upto: int, *, floor_at: int | None = None) -> EventView:
        """The table at ``upto``, as it is in base now. Raises SnapshotTooOld if retention dropped what it would see.

        With ``floor_at`` it has the retention floor that snapshots at that CTS see: events up to a past moment, as far
        as they are still remembered at a later one.
        """
        seen_at = upto if floor_at is None else floor_at

        def floor(meta: Meta) -> int | None:
            if seen_at < meta.dropped:
                raise SnapshotTooOld(
                    f"events of {self.schema.name!r} that a snapshot at {seen_at} sees were dropped by its retention; "
                    f"it can be read from {meta.dropped} on"
                )
            return meta.floor_at(seen_at)

        return self._viewed(upto, floor, seen_at)

    def forgets_alike(self, low: int, high: int) -> bool:
        """Whether snapshots at ``low`` see the retention floor that those at ``high`` see."""
        meta = self._base.meta()
        return meta.floor_at(low) == meta.floor_at(high)

    def everything(self, upto: int) -> EventView:
        """All that any snapshot up to there may still see, but what was retracted."""
        return self._viewed(upto, lambda meta: meta.floor_at(meta.dropped), upto)

    def tail(self, since: int, upto: int, *, remembered_at: int | None = None, partial: bool = False) -> EventView:
        """A view for the commits in (since, upto]: scan it with ``after=since``.

        No floor hides what is still there, but for that of ``remembered_at``. Raises SnapshotTooOld if some of it was
        dropped, unless ``partial``.
        """

        def floor(meta: Meta) -> int | None:
            complete = since >= meta.lost if remembered_at is None else remembered_at >= meta.dropped
            if not (complete or partial):
                raise SnapshotTooOld(
                    f"events of {self.schema.name!r} committed after {since} were dropped by its retention: all of "
                    f"those committed after {meta.lost} are still there",
                    table=self.schema.name,
                    kept_since=meta.lost,
                )
            return None if remembered_at is None else meta.floor_at(remembered_at)

        return self._viewed(upto, floor, upto if remembered_at is None else remembered_at, since)

    def _viewed(
        self, upto: int, floor: Callable[[Meta], int | None], erased_at: int, since: int | None = None
    ) -> EventView:
        ticket = self._readers.enter()
        try:
            meta, blocks, files = self._manifest.read()
            floor_us = floor(meta)
            if erased_at < meta.blanked:
                raise SnapshotTooOld(
                    f"events of {self.schema.name!r} that a snapshot at {erased_at} sees were retracted, and are not "
                    f"there any more; it can be read from {meta.blanked} on",
                    table=self.schema.name,
                    retracted_at=meta.blanked,
                )
            parts = self._base, self._files, self._readers, ticket, meta, blocks, files
            partial = since is not None and since < meta.lost
            return EventView(*parts, upto, floor_us, erased_at, is_partial=partial)
        except BaseException:
            self._readers.leave(ticket)
            raise

    def hidden_upto(self, upto: int, floor_us: int | None) -> int:
        """The newest commit of an event that was dropped, or that snapshots at ``upto`` do not see since it is before
        ``floor_us``; 0: there is none."""
        with self.tail(0, upto, partial=True) as view:
            lost = self.kept_since
            if floor_us is None:
                return lost
            hidden = view.scan(after=lost, time_to=floor_us, columns=[], naming=(STAMP,), ordered=False)
            return max((int(batch.column(STAMP).to_numpy().max()) for batch in hidden), default=lost)

    @property
    def kept_since(self) -> int:
        """Every event committed after this is still there."""
        return self._base.meta().lost

    def newest_cts(self) -> int:
        """The CTS of the newest event in blocks; 0 if there are none."""
        return self._base.newest_cts()

    def complete_since(self, upto: int) -> int | None:
        """The event time from which a snapshot at ``upto`` sees everything; None: nothing was ever forgotten."""
        return self._base.meta().floor_at(upto)

    def time_range_us(self) -> tuple[int, int] | None:
        """The least and the largest event time in blocks, from their headers; None if there are none."""
        blocks = self._base.headers()[1]
        return (min(b.time_min for b in blocks), max(b.time_max for b in blocks)) if blocks else None

    # -- writing --------------------------------------------------------------------------------

    def seal(self, batch: WriteBatch, parts: Sequence[tuple[Stamps, Counts, Any]], upto: int) -> None:
        """Adds blocks for ``parts``, in commit order, and the new ``events_upto`` to an engine batch.

        A part is (CTS of its commits, how many events each brought, these events). Parts at or below the current
        ``events_upto`` are there already and passed over. All parts of a commit come in one call, and all commits at or
        below ``upto`` that were not sealed before. The work is that of the parts.
        """
        base = self._base
        meta = base.meta()
        if upto <= meta.upto:
            return
        fresh = [kept for part in parts if (kept := _above(*part, meta.upto))[2].num_rows]
        if fresh:
            cts = np.concatenate([stamps for stamps, _, _ in fresh])
            if int(cts[-1]) > upto or (cts[1:] < cts[:-1]).any():
                raise InvalidArgument(f"parts must be in commit order and at or below {upto}, not {cts[:8].tolist()}")
            whole = coded(together([padded(events, base.schema) for _, _, events in fresh]))
            counts = np.concatenate([rows for _, rows, _ in fresh])
            ends = np.cumsum(counts)
            begins = np.concatenate([[0], ends[:-1]])  # of each commit, which may have come in several parts
            begins = begins[np.searchsorted(cts, cts)]
            size = sum(written_bytes(column) for column in whole.columns)
            portion = -(-whole.num_rows // max(1, -(-size // self._block_bytes)))
            portion = min(portion, self._block_rows)
            for at in range(0, whole.num_rows, portion):
                piece = whole.slice(at, portion)
                stop = at + piece.num_rows
                first, last = np.searchsorted(ends, at, "right"), np.searchsorted(ends, stop, "left")
                bounds = np.minimum(ends[first : last + 1], stop)
                runs = joined(cts[first : last + 1], np.diff(bounds, prepend=at))
                base.add(batch, meta.next, meta.next, piece, runs, first=at - int(begins[first]))
                meta.next += 1
            meta.rows += whole.num_rows
        meta.upto = upto
        batch.put(event_meta_key(self.schema.id), meta.encode())

    # -- compaction -----------------------------------------------------------------------------

    def compact(self, max_rows: int, unneeded: int = 0) -> int:
        """One bounded step: data that no view needs any more are deleted, and up to eight small neighbours become
        one block of at most ``max_rows``. How many rows were merged: if any, there may be more to do.

        No snapshot below ``unneeded`` is or will be open: what retractions up to there removed is made blank.
        """
        self._delete_dead()
        rows, order = self._compacted
        order = max(order if rows == max_rows else 0, self._apart)
        blocks = [one for one in self._base.headers_since(order) if not one.settled]
        inputs = mergeable(blocks, max_rows, self._block_bytes)
        if not inputs:
            if (full := unchanging(blocks, max_rows, self._block_bytes)) is not None:
                self._compacted = max_rows, full.order
            if not self._apart and self._has_to_blank(unneeded):
                blocks = self._base.headers()[1]
                inputs = self._to_blank(blocks, unneeded)
        return self._rewrite(blocks, inputs, unneeded) if inputs else 0

    def _rewrite(self, blocks: list[Block], inputs: list[Block], unneeded: int) -> int:
        """Makes one block of neighbours, or of one by itself, without what retractions up to ``unneeded`` removed."""
        meta, base = self._base.meta(), self._base
        every = [column.name for column in base.schema.columns]
        events = together([base.read(block, every) for block in inputs])
        runs = [self._base.runs(block) for block in inputs]
        merged = joined(np.concatenate([cts for cts, _ in runs]), np.concatenate([rows for _, rows in runs]))
        batch, at = WriteBatch(), 0
        blank, newest, left = list[Counts](), 0, dict[int, list[Counts]]()
        for block in inputs:
            for one in block.erased:
                rows = self._base.rows_erased(one) + at
                if one.blank or one.cts <= unneeded:
                    blank.append(rows)
                    newest = max(newest, one.cts)
                else:  # who is blank may be of the same retraction, in a block that was made when more was unneeded
                    left.setdefault(one.cts, []).append(rows)
            at += block.rows
        erased = list[Erased]()
        if blank:
            gone = np.unique(np.concatenate(blank))
            meta.blanked = max(meta.blanked, newest)
            events = self._blank(events, gone, inputs[0].time_min)
            erased.append(self._base.add_erased(batch, newest, meta.next, gone, blank=True))
            meta.next += 1
        for cts, found in sorted(left.items()):
            erased.append(self._base.add_erased(batch, cts, meta.next, np.concatenate(found)))
            meta.next += 1
        first = first_positions(blocks)[blocks.index(inputs[0])]
        times = min(block.time_min for block in inputs), max(block.time_max for block in inputs)
        base.add(
            batch, inputs[0].order, meta.next, coded(events), merged, first=first, erased=tuple(erased), times=times
        )
        meta.next += 1
        for block in inputs[1:]:
            batch.delete(event_header_key(self.schema.id, block.order))
        self.retire(meta, [data for block in inputs for data in data_of(block)], [], batch)
        return sum(block.rows for block in inputs)

    def _blank(self, events: Any, rows: Counts, time_us: int) -> Any:
        """The events without any value in these rows, but for an event time that says nothing of them."""
        gone = np.zeros(events.num_rows, np.bool_)
        gone[rows] = True
        # Arrow's ``if_else`` would leave the values where they are, under nulls; ``take`` makes others.
        kept, columns = pa.array(np.arange(events.num_rows), mask=gone), []
        for column in self.schema.columns:
            array = events.column(column.name).take(kept)
            if column.name == self.schema.event_time:
                array = array.fill_null(pa.scalar(time_us, pa.int64()).cast(array.type))
            columns.append(array)
        return pa.RecordBatch.from_arrays(columns, events.schema.names)

    # -- retractions ------------------------------------------------------------------------------

    def erase(self, batch: WriteBatch, cts: int, names: EventNames) -> None:
        """Tells the blocks, in an engine batch, which events the retraction at ``cts`` removed: all of them are sealed.

        Idempotent. Retractions come in the order of their CTS.
        """
        meta, blocks, files = self._manifest.read()
        if cts <= meta.erased_upto:
            return
        for file in files:
            if file.cold is not None:  # nothing here may wait for an object store
                low, high = np.searchsorted(names.stamps, np.array([file.first_cts, file.last_cts + 1], np.uint64))
                if low < high:
                    some = EventNames(names.stamps[low:high], names.positions[low:high])
                    self._manifest.put(batch, file.with_named(self._base.add_named(batch, cts, meta.next, some)))
                    meta.next += 1
                    meta.manifest += 1
            elif len(rows := named_rows(self._files, file, names)):
                self._manifest.put(batch, file.with_erased(self._base.add_erased(batch, cts, meta.next, rows)))
                meta.next += 1
                meta.manifest += 1
        for block, first in zip(blocks, first_positions(blocks), strict=True):
            if block.settled:
                continue
            low, high = np.searchsorted(names.stamps, np.array([block.first_cts, block.last_cts + 1], np.uint64))
            rows = names.rows_in(*self._base.runs(block), first) if low < high else np.zeros(0, np.int64)
            if len(rows):
                erased = self._base.add_erased(batch, cts, meta.next, rows)
                self._base.put_header(batch, replace(block, erased=(*block.erased, erased)))
                meta.next += 1
        meta.erased_upto = cts
        meta.retractions.append((cts, int(names.stamps[0]), int(names.stamps[-1]), names.size, False))
        meta.retractions = _at_most(meta.retractions)
        batch.put(event_meta_key(self.schema.id), meta.encode())

    def _has_to_blank(self, unneeded: int) -> bool:
        return any(one[0] <= unneeded and not one[-1] for one in self._base.meta().retractions)

    def _to_blank(self, blocks: list[Block], unneeded: int) -> list[Block]:
        """A block with events to make blank. Notes the retractions of which none are left, in files neither."""
        for block in blocks:
            if any(one.cts <= unneeded and not one.blank for one in block.erased):
                return [block]
        meta, _, files = self._manifest.read()
        if any(one.cts <= unneeded for file in files for one in (*file.erased, *file.named)):
            return []
        meta.retractions = [(*one[:-1], one[-1] or one[0] <= unneeded) for one in meta.retractions]
        batch = WriteBatch()
        batch.put(event_meta_key(self.schema.id), meta.encode())
        self._engine.write(batch)
        return []

    def retractions(self) -> list[tuple[int, int, int]]:
        """Of those that blocks know of: the CTS, and that of the first and of the last event that it removed."""
        return [(cts, first, last) for cts, first, last, *_ in self._base.meta().retractions]

    def retracted_from(self, cts: int) -> int:
        """How many events were retracted, as far as blocks know, of which some may have been committed from ``cts`` on.

        What was committed before is no longer in a log that begins there.
        """
        return sum(count for _, _, last, count, _ in self._base.meta().retractions if last >= cts)

    def erased_left(self) -> int:
        """How many retracted events still lie in blocks and settled files; for a while, of cold ones, at most."""
        meta, blocks, files = self._manifest.read()
        if all(one[-1] for one in meta.retractions):
            return 0
        every = [one for block in blocks for one in block.erased]
        every += [one for file in files for one in (*file.erased, *file.named)]
        return sum(one.rows for one in every if not one.blank)

    # -- settling ---------------------------------------------------------------------------------

    @property
    def parts(self) -> tuple[Blocks, Manifest, SettledFiles]:
        return self._base, self._manifest, self._files

    def enter(self) -> int:
        """What is there now stays until this ticket is given back."""
        return self._readers.enter()

    def leave(self, ticket: int) -> None:
        self._readers.leave(ticket)

    @property
    def is_apart(self) -> bool:
        return bool(self._apart)

    def set_apart(self, orders: int) -> int:
        """What is there now is neither compacted with what comes from here on nor settled, until ``rejoin``. The first
        of so many orders between both."""
        first = self._reserve(self._base.meta(), orders)
        self._apart, self._made = first + orders, []
        return first

    @property
    def made(self) -> list[int]:
        """Data that are not deleted until ``rejoin``, although meta names them as dead."""
        return self._made

    def rejoin(self) -> None:
        """Called before anybody else can delete what was replaced: that is much, however few data it is, and its space
        is given back when the last of it has gone."""
        self._apart, self._made, self._compacted, self._owed = 0, [], (0, 0), True

    def reserve(self, count: int) -> int:
        """The first of so many numbers that nothing else has or will have."""
        meta = self._base.meta()
        if not meta.next > 1:
            raise NotFound(f"event table {self.schema.name!r} was dropped", table=self.schema.name)
        return self._reserve(meta, count)

    def _reserve(self, meta: Meta, count: int) -> int:
        first = meta.next
        meta.next += count
        batch = WriteBatch()
        batch.put(event_meta_key(self.schema.id), meta.encode())
        self._engine.write(batch)
        return first

    @property
    def version(self) -> tuple[int, ...]:
        """Another one after any change but that of floors."""
        meta = self._base.meta()
        return meta.next, meta.manifest, meta.upto, meta.erased_upto, meta.blanked

    @property
    def rows_sealed(self) -> int:
        """How many events have come into blocks, ever."""
        return self._base.meta().rows

    def hot_rows(self) -> int:
        """How many events are not settled."""
        return sum(block.rows for block in self._base.headers()[1] if not block.settled)

    def files(self) -> list[SettledFile]:
        return self._manifest.read()[2]

    def check_files(self) -> int:
        """Reads every byte of every settled file. How many there are; raises DataLoss that names one."""
        files = self.files()
        for file in files:
            self._files.check(file)
        return len(files)

    def unneeded_files(self) -> list[SettledFile]:
        """Files out of use that no view needs. They may be deleted once the engine was flushed after this: until then a
        crash may bring back what names them."""
        oldest = self._readers.oldest()
        return [file for ticket, files in self._waiting_files if ticket < oldest for file in files]

    def delete_files(self, files: list[SettledFile]) -> None:
        """Deletes them; of those that are cold the next sweep does."""
        self._files.place.delete(file.number for file in files if file.cold is None)
        if self._files.cold is not None and any(file.cold is not None for file in files):
            self._files.cold.has_garbage = True
        gone = {(file.number, file.cold) for file in files}
        kept = [
            (ticket, [one for one in every if (one.number, one.cold) not in gone])
            for ticket, every in self._waiting_files
        ]
        self._waiting_files = [(ticket, every) for ticket, every in kept if every]

    def waiting_objects(self) -> list[ColdObject]:
        """The objects of files out of use that a view may still need."""
        return [file.cold for _, files in self._waiting_files for file in files if file.cold is not None]

    def retire(self, meta: Meta, data: list[int], files: list[SettledFile], batch: WriteBatch) -> None:
        """Writes a batch that takes these out of use; they go when every view that is open now has closed."""
        in_engine = self._files.place.in_engine
        data = data + ([file.number for file in files] if in_engine else [])
        meta.dead += data
        batch.put(event_meta_key(self.schema.id), meta.encode())
        written = False
        try:
            self._engine.write(batch)
            written = True
        finally:  # whoever is interrupted asks the rows
            if files and not in_engine and (written or files[0] not in self.files()):
                self._waiting_files.append((self._readers.newest(), files))
        self._wait_for(meta)

    def _wait_for(self, meta: Meta) -> None:
        """What meta names as dead, and nothing else, is deleted when the views that are open now have closed."""
        newest, made = self._readers.newest(), set(self._made)
        self._waiting = {data: self._waiting.get(data, newest) for data in meta.dead if data not in made}

    def _delete_dead(self) -> int:
        meta = self._base.meta()
        self._wait_for(meta)  # whoever wrote it may have been interrupted since
        oldest = self._readers.oldest()
        unneeded = (data for data, ticket in self._waiting.items() if ticket < oldest)
        gone = list(itertools.islice(unneeded, _STEP_DELETES))
        if not gone:
            return 0
        found = set(gone)
        meta.dead = [data for data in meta.dead if data not in found]
        batch = WriteBatch()
        prefix = table_prefix(Space.EVENT_DATA, self.schema.id)
        batch.owe(prefix, prefix_end(prefix))
        for data in gone:
            batch.delete(event_data_key(self.schema.id, data))
        batch.put(event_meta_key(self.schema.id), meta.encode())
        self._engine.write(batch)
        self._wait_for(meta)
        self._deleted += len(gone)
        if self._deleted >= _GIVEN_BACK or (self._owed and not self._waiting):
            self._engine.give_back(prefix, prefix_end(prefix))
            self._deleted, self._owed = 0, self._owed and bool(self._waiting)
        return len(gone)

    # -- retention and the end --------------------------------------------------------------------

    def set_floor(self, batch: WriteBatch, cts: int, time_us: int) -> None:
        """Events before ``time_us`` are invisible to snapshots at or past ``cts``. Idempotent; a floor that
        an earlier one covers changes nothing."""
        meta = self._base.meta()
        if cts < meta.dropped or any(at <= cts and time >= time_us for at, time in meta.floors):
            return
        meta.floors = sorted([*meta.floors, (cts, time_us)])
        batch.put(event_meta_key(self.schema.id), meta.encode())

    def drop_below_floor(self, oldest_cts: int) -> int:
        """Drops blocks and settled files wholly below the floor that every snapshot from ``oldest_cts`` on sees.

        Returns how many. Snapshots below that floor's CTS are refused from then on. At most 1,024 of each a call. A
        file with events of commits that tails may still ask for stays until these commits go, however old its events.
        What was out of use before is deleted.
        """
        self._delete_dead()
        meta, blocks, files = self._manifest.read()
        floor = meta.floor_at(oldest_cts)
        if floor is None:
            return 0
        gone = [block for block in blocks if block.time_max < floor][:_STEP_DELETES]
        lost = max([meta.lost, *(block.last_cts for block in gone)])
        gone_files = [file for file in files if file.time_max < floor and file.last_cts <= lost][:_STEP_DELETES]
        if gone or gone_files:
            meta.dropped = max(meta.dropped, min(cts for cts, time in meta.floors if time == floor))
            meta.lost = lost
            meta.floors = [(cts, time) for cts, time in meta.floors if cts >= meta.dropped]
            meta.manifest += bool(gone_files)
            batch = WriteBatch()
            for block in gone:
                batch.delete(event_header_key(self.schema.id, block.order))
            for file in gone_files:
                self._manifest.delete(batch, file)
            data = [data for block in gone for data in data_of(block)]
            data += [data for file in gone_files for data in file.erased_data]
            self.retire(meta, data, gone_files, batch)
        return len(gone) + len(gone_files)


def destroy(engine: Engine, table: int) -> Iterator[WriteBatch]:
    """Bounded batches that together delete a dropped table's events.

    The caller writes each before it asks for the next; after a crash it begins again. No block is read.
    """
    meta, blocks = read_headers(engine, table, f"table {table}")
    if meta is None:
        return
    batch = WriteBatch()
    for block in blocks:
        batch.delete(event_header_key(table, block.order))
        for data in data_of(block):
            batch.delete(event_data_key(table, data))
        if len(batch) >= _STEP_DELETES:
            yield batch
            batch = WriteBatch()
    for file in settled_files(engine, table):
        batch.delete(event_file_key(table, file.number))
        for data in (file.number, *file.erased_data):
            batch.delete(event_data_key(table, data))
        if len(batch) >= _STEP_DELETES:
            yield batch
            batch = WriteBatch()
    for data in meta.dead:
        batch.delete(event_data_key(table, data))
    batch.delete(event_meta_key(table))
    yield batch


def _at_most(retractions: list[tuple[int, int, int, int, bool]]) -> list[tuple[int, int, int, int, bool]]:
    """The oldest two of very many as one, which is asked for wherever one of them would be."""
    if len(retractions) <= _RETRACTIONS_MAX:
        return retractions
    (_, first, last, count, done), (cts, other_first, other_last, other, also_done), *rest = retractions
    together = cts, min(first, other_first), max(last, other_last), count + other, done and also_done
    return [together, *rest]


def _above(stamps: Stamps, rows: Counts, events: Any, upto: int) -> tuple[Stamps, Counts, Any]:
    """The commits of a part above ``upto``."""
    if int(stamps[0]) > upto:
        return stamps, rows, events
    first = int(np.searchsorted(stamps, np.uint64(upto), "right"))
    return stamps[first:], rows[first:], events.slice(int(rows[:first].sum()))
