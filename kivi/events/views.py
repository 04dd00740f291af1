"""Views: the events of one table at a moment, cut at a snapshot; scans and summaries of them.

A view is taken in one engine scan and never changes. What it may still have to read stays until it is closed
(``Readers``), whatever settling, compaction and retention do meanwhile. Headers and manifest decide what is opened at
all: a block or a row group outside the time bounds, or one that a predicate cannot select a row of, is passed over.

Settled events are those of the earliest commits, so commit order is settled files first (``settled_views``), then
blocks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kivi.arrow.predicates import filter_batch
from kivi.encoding.event_names import POSITION, STAMP, EventNames
from kivi.errors import EventsRetracted, InvalidArgument
from kivi.events.blocks import Block, Blocks, Counts, Meta, first_positions
from kivi.events.pruning import all_kept, always, never, outside
from kivi.events.settled_files import Group, SettledFile, SettledFiles
from kivi.events.settled_views import SettledView, Wanted
from kivi.events.summing import Sums
from kivi.model.changes import COMMIT_TS
from kivi.model.event_files import EventFiles
from kivi.model.expressions import Expr, names

__all__ = ["EventView", "Readers", "later_of"]

_BATCH_ROWS: Final = 65_536


def later_of(*times: int | None) -> int | None:
    """The latest of some bounds, of which any may not be there."""
    return max((time_us for time_us in times if time_us is not None), default=None)


class Readers:
    """Which views are open. A view's ticket is larger than those of all views opened before it.

    Leaving must not take the lock: a view that nobody closed leaves from the garbage collector, which may
    run in any thread, inside any lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._left: deque[int] = deque()
        self._last = 0

    def enter(self) -> int:
        with self._lock:
            self._last += 1
            self._open.add(self._last)
            return self._last

    def leave(self, ticket: int) -> None:
        self._left.append(ticket)

    def newest(self) -> int:
        """The last ticket handed out: whoever enters later sees what was written before this call."""
        with self._lock:
            return self._last

    def oldest(self) -> int:
        """The ticket of the oldest open view, or one that will never be reached."""
        with self._lock:
            while self._left:
                self._open.discard(self._left.popleft())
            return min(self._open, default=self._last + 1)

    def __len__(self) -> int:
        self.oldest()
        return len(self._open)


class EventView:
    """The events of one table at a moment, cut at ``upto``. Close it (or use ``with``): data wait for it.

    ``blocks``: headers of the blocks that hold events at or below ``upto``, in commit order, those of settled ones
    first, whose events are in ``files``.
    ``floor_us``: events before it are left out; a caller that knows of a later floor may raise it before it scans.
    ``erased_at``: what retractions at or below this CTS removed is left out. Blocks know those up to ``erased_upto``;
    ``names`` are of other events to leave out, which a caller adds before it scans; ``pending``: those of retractions.
    ``is_partial``: of the events that no floor hides some were dropped, with the headers of their commits. Files may
    still have them, if they have events of other commits: they are left out.
    """

    def __init__(
        self,
        base: Blocks,
        settled: SettledFiles,
        readers: Readers,
        ticket: int,
        meta: Meta,
        blocks: list[Block],
        files: list[SettledFile],
        upto: int,
        floor_us: int | None,
        erased_at: int,
        *,
        is_partial: bool = False,
    ) -> None:
        self._base = base
        self._readers = readers
        self._ticket = ticket
        self.blocks = [block for block in blocks if block.first_cts <= upto]
        self.files = [file for file in files if file.first_cts <= upto]
        self._closed = False
        self.upto = upto
        self.events_upto = meta.upto
        self.floor_us = floor_us
        self.erased_at = erased_at
        self.is_partial = is_partial
        self.erased_upto = meta.erased_upto
        self.names = EventNames.none()
        self.pending: dict[int, EventNames] = {}
        self._retractions = [(cts, first) for cts, first, *_ in meta.retractions]
        self._firsts: dict[int, int] | None = None
        self._every = blocks
        self._settled = SettledView(base, settled, self)

    def __enter__(self) -> EventView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Data that only this view needed may go; its scans end with InvalidArgument. Harmless twice."""
        if not self._closed:
            self._closed = True
            self._readers.leave(self._ticket)

    def __del__(self) -> None:
        self.close()

    @property
    def hot(self) -> list[Block]:
        """The blocks whose events are in blocks."""
        return [block for block in self.blocks if not block.settled]

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def rows(self) -> int:
        """Events at or below ``upto`` in blocks, those below the retention floor included."""
        return self.rows_after(0)

    def rows_after(self, after: int) -> int:
        """Events with after < cts <= upto in blocks, whatever the floor."""
        return sum(stop - start for start, stop in (self._cut(block, after) for block in self.blocks))

    def take_files(self) -> list[EventFiles]:
        """Settled files that another reader reads by itself, verified: scans of this view leave their events out then.

        Not those with retracted events. Raises DataLoss for one that is damaged.
        """
        taken = [file for file in self.files if self._settled.is_shareable(file)]
        shared = self._settled.shared(taken, self.floor_us)
        numbers = {file.number for file in taken}
        self.files = [file for file in self.files if file.number not in numbers]
        return shared

    def newest_after(self, after: int) -> int:
        """The largest CTS with after < cts <= upto in blocks; ``after`` if there is none."""
        for block in reversed(self.blocks):
            if block.last_cts <= self.upto:
                return max(after, block.last_cts)
            cts, _ = self._base.runs(block)
            if len(inside := cts[(cts > np.uint64(after)) & (cts <= np.uint64(self.upto))]):
                return int(inside[-1])
        return after

    def commits_after(self, after: int, fits: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
        """(CTS, events) of the commits with after < cts <= upto, in commit order; one may come in several parts.

        No event is read. A block of whole commits whose number of events ``fits`` comes as if it were one commit, the
        last: then nothing but its header is read.
        """
        blocks = [block for block in self.blocks if block.last_cts > after]
        for i, block in enumerate(blocks):
            begins = block.first_cts > (blocks[i - 1].last_cts if i else after)
            ends = block.last_cts < blocks[i + 1].first_cts if i + 1 < len(blocks) else block.last_cts <= self.upto
            if begins and ends and fits(block.rows):
                yield block.last_cts, block.rows
                continue
            cts, rows = self._base.runs(block)
            inside = (cts > np.uint64(after)) & (cts <= np.uint64(self.upto))
            yield from zip(cts[inside].tolist(), rows[inside].tolist(), strict=True)

    def _first(self, block: Block) -> int:
        if self._firsts is None:
            self._firsts = dict(zip((one.order for one in self._every), first_positions(self._every), strict=True))
        return self._firsts[block.order]

    def spans(self, first_cts: int, last_cts: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Of the settled blocks with some of these commits, the name of the first event and of the last."""
        for block in self.blocks:
            if block.settled and block.first_cts <= last_cts and block.last_cts >= first_cts:
                first = self._first(block)
                last = block.runs[-1][1] - 1 + (first if block.first_cts == block.last_cts else 0)
                yield (block.first_cts, first), (block.last_cts, last)

    def named(self, block: Block, names: EventNames) -> Counts:
        """Which rows of the hot block have these names."""
        low, high = np.searchsorted(names.stamps, np.array([block.first_cts, block.last_cts + 1], np.uint64))
        if low == high:
            return np.zeros(0, np.int64)
        return names.rows_in(*self._base.runs(block), self._first(block))

    def _erased(self, block: Block) -> Counts | None:
        """The rows of the hot block that this view leaves out as retracted; None: none."""
        known = self._base.erased(block.erased, self.erased_at)
        if self.names.size and len(more := self.named(block, self.names)):
            known = more if known is None else np.union1d(known, more)
        return known

    def retractions_met(self, since: int) -> list[int]:
        """The CTS of the retractions in (since, ``erased_at``] that removed events committed up to ``since``."""
        pending = [(cts, int(names.stamps[0])) for cts, names in self.pending.items()]
        return [
            cts for cts, first in (*self._retractions, *pending) if since < cts <= self.erased_at and first <= since
        ]

    def names_at(self, cts: int) -> EventNames:
        """The events of a retraction that is pending; of another one none."""
        return self.pending.get(cts, EventNames.none())

    def removed(self, cts: int, upto: int, columns: Sequence[str]) -> Iterator[Any]:
        """Record batches of the events up to ``upto`` that the retraction at ``cts`` removed, in commit order.

        Raises EventsRetracted if their values are gone.
        """
        for block in self.blocks:
            _, stop = self._cut_at(block, upto)
            if stop and any(one.blank and (one.cts == cts or one.cts > upto) for one in block.erased):
                raise EventsRetracted(
                    f"the events of {self._base.schema.name!r} that the commit at {cts} removed are there no more: "
                    'read on with retractions="ignore"',
                    table=self._base.schema.name,
                    retracted_at=cts,
                )
        wanted = Wanted(list(columns), upto=upto, retracted_at=cts)
        yield from (batch.select(list(columns)) for batch in self._settled.ordered(wanted))
        for block in self.hot:
            _, stop = self._cut_at(block, upto)
            known = [one for one in block.erased if one.cts == cts]
            parts = [self._base.rows_erased(one) for one in known] + [self.named(block, self.names_at(cts))]
            rows = np.concatenate(parts)
            if len(rows := rows[rows < stop]):
                yield self._base.read(block, list(columns)).take(pa.array(rows))

    def picked(self, names: EventNames, columns: Sequence[str]) -> Iterator[Any]:
        """Record batches of the events with these names, in commit order, with their names."""
        yield from self._settled.ordered(Wanted([*columns, STAMP, POSITION], upto=self.upto, named=names))
        for block in self.hot:
            if len(rows := self.named(block, names)):
                every = EventNames.of_rows(*self._base.runs(block), self._first(block))
                batch = self._base.read(block, list(columns)).take(pa.array(rows))
                batch = batch.append_column(STAMP, pa.array(every.stamps[rows]))
                yield batch.append_column(POSITION, pa.array(every.positions[rows]))

    def _with_names(self, block: Block, batch: Any, whole: bool) -> Any:
        stamps, rows = self._base.runs(block)
        if not whole:
            return batch.append_column(STAMP, pa.array(np.repeat(stamps, rows)))
        names = EventNames.of_rows(stamps, rows, self._first(block))
        return batch.append_column(STAMP, pa.array(names.stamps)).append_column(POSITION, pa.array(names.positions))

    def _cut(self, block: Block, after: int) -> tuple[int, int]:
        """The rows [start, stop) of the block with after < cts <= upto."""
        return self._cut_at(block, self.upto, after)

    def _cut_at(self, block: Block, upto: int, after: int = 0) -> tuple[int, int]:
        if block.last_cts <= after or block.first_cts > upto:
            return 0, 0
        if block.first_cts > after and block.last_cts <= upto:
            return 0, block.rows
        cts, rows = self._base.runs(block)
        bounds = [np.searchsorted(cts, np.uint64(max(0, min(at, 2**64 - 1))), "right") for at in (after, upto)]
        start, stop = (int(rows[:bound].sum()) for bound in bounds)
        return start, max(start, stop)

    def scan(
        self,
        *,
        after: int = 0,
        time_from: int | None = None,
        time_to: int | None = None,
        where: Expr | None = None,
        columns: Sequence[str] | None = None,
        reverse: bool = False,
        with_cts: bool = False,
        naming: Sequence[str] = (),
        skip: int = 0,
        take: int | None = None,
        may_have: Callable[[int, int], bool] | None = None,
        ordered: bool = True,
        coded: bool = False,
        stored_bytes: int = 0,
    ) -> Iterator[Any]:
        """Record batches of events with after < cts <= upto, in commit order; ``with_cts`` adds ``COMMIT_TS``,
        ``naming`` adds ``STAMP``, or ``STAMP`` and ``POSITION``. Not ``ordered``: settled ones as they lie, and if
        ``coded`` their text perhaps in codes; row groups of up to ``stored_bytes`` perhaps as StoredGroup.

        Of these, whatever else is asked of them, the first ``skip`` are passed over and ``take`` are looked at.
        Retracted ones are counted, so that it is the same events whenever they are asked for.

        ``time_from`` (inclusive) and ``time_to`` (exclusive) bound the event time in microseconds; ``where`` is bound.
        ``may_have`` says whether events between a least and a greatest event time are wanted: others are not read.
        No batch is empty or has more than 65,536 rows.
        """
        outputs = [*self._base.schema.output_columns(columns), *([COMMIT_TS] if with_cts else [])]
        outputs += naming
        low = later_of(time_from, self.floor_us)
        wanted = Wanted(outputs, low, time_to, where, after=after, upto=self.upto, may_have=may_have)
        if not ordered:
            wanted = replace(wanted, coded=coded, stored_bytes=stored_bytes)
        if skip or take is not None:
            wanted, skip, take = self._without_others(wanted, skip, take)
        settled = self._settled.ordered(wanted, reverse=reverse) if ordered else self._settled.as_it_lies(wanted)
        if not reverse:
            yield from settled
        for block in reversed(self.hot) if reverse else self.hot:
            start, stop = self._cut(block, after)
            if skip or take is not None:
                rows = stop - start
                start = min(start + skip, stop)
                skip = max(0, skip - rows)
                if take is not None:
                    stop = min(stop, start + take)
                    take -= stop - start
            if start >= stop or outside(block, low, time_to) or (where is not None and never(where, block)):
                continue
            if may_have is not None and not may_have(block.time_min, block.time_max):
                continue
            batch = self._selected(block, start, stop, outputs, low, time_to, where)
            if reverse:
                batch = batch.take(pa.array(np.arange(batch.num_rows - 1, -1, -1)))
            batch = batch.select(outputs)
            for at in range(0, batch.num_rows, _BATCH_ROWS):
                yield batch.slice(at, _BATCH_ROWS)
        if reverse:
            yield from settled

    def _without_others(self, wanted: Wanted, skip: int, take: int | None) -> tuple[Wanted, int, int | None]:
        """Bounds, as names, of the events that are left of settled ones; and what is left to skip and to take."""
        bounds, ends = list[tuple[int, int]](), [skip] if take is None else [skip, skip + take]
        rows = 0
        for block in self.blocks:
            if block.settled:
                start, stop = self._cut(block, wanted.after)
                while len(bounds) < len(ends) and ends[len(bounds)] < rows + stop - start:
                    bounds.append(self._name(block, start + ends[len(bounds)] - rows))
                rows += stop - start
        beyond = self.upto + 1, 0
        bounds += [beyond] * (2 - len(bounds))
        left = None if take is None else max(0, take - max(0, rows - skip))
        return replace(wanted, first=bounds[0], beyond=bounds[1]), max(0, skip - rows), left

    def _name(self, block: Block, row: int) -> tuple[int, int]:
        """The name of a row of a block."""
        stamps, rows = self._base.runs(block)
        ends = np.cumsum(rows)
        run = int(np.searchsorted(ends, row, "right"))
        position = row - int(ends[run] - rows[run]) + (self._first(block) if run == 0 else 0)
        return int(stamps[run]), position

    def _selected(
        self,
        block: Block,
        start: int,
        stop: int,
        outputs: Sequence[str],
        low: int | None,
        high: int | None,
        where: Expr | None,
    ) -> Any:
        """Of the rows [start, stop) of a block those that are asked for, with these columns and perhaps others."""
        if self._closed:
            raise InvalidArgument("this view of an event table is closed: take another one")
        schema = self._base.schema
        predicate = all_kept(schema.event_time or "", low, high, where, block)
        used = {*outputs, *(names(predicate) if predicate is not None else ())}
        columns = [c.name for c in schema.columns if c.name in used]
        batch = self._base.read(block, columns or [schema.event_time or ""])
        if COMMIT_TS in outputs and COMMIT_TS not in columns:  # a table may have a column of its own of that name
            stamps, rows = self._base.runs(block)
            batch = batch.append_column(COMMIT_TS, pa.array(np.repeat(stamps.astype(np.int64), rows)))
        if STAMP in outputs:
            batch = self._with_names(block, batch, POSITION in outputs)
        if (erased := self._erased(block)) is None:
            batch = batch.slice(start, stop - start)
        else:
            left = np.ones(block.rows, np.bool_)
            left[erased] = False
            batch = batch.take(pa.array(start + np.flatnonzero(left[start:stop])))
        return batch if predicate is None else filter_batch(batch, predicate, {c.name: c.type for c in schema.columns})

    def sum_up(
        self, into: Sums, *, time_from: int | None = None, time_to: int | None = None, where: Expr | None = None
    ) -> tuple[int, int]:
        """Adds the events of a ``scan`` to ``into``. (blocks whose header was enough, blocks that were read)"""
        low = later_of(time_from, self.floor_us)
        wanted = Wanted([*into.columns], low, time_to, where, upto=self.upto, coded=True)
        known, read = self._settled.sum_up(into, wanted)
        for block in self.hot:
            start, stop = self._cut(block, 0)
            if start >= stop or outside(block, low, time_to) or (where is not None and never(where, block)):
                continue
            inside = (low is None or block.time_min >= low) and (time_to is None or block.time_max < time_to)
            whole = stop - start == block.rows and inside and (where is None or always(where, block))
            blank = self._blank(block)
            if whole and blank is not None:
                into.add_known(block.rows - blank, block.columns)
                known += 1
                continue
            into.add(self._selected(block, start, stop, into.columns, low, time_to, where))
            read += 1
        return known, read

    def rows_between(self, time_from: int | None, time_to: int | None) -> int:
        """How many events are read as a whole with some that may lie in a range of event time."""
        low = later_of(time_from, self.floor_us)
        return sum(part.rows for part in self.parts() if not outside(part, low, time_to))

    def rows_perhaps(
        self,
        time_from: int | None,
        time_to: int | None,
        where: Expr,
        may_have: Callable[[int, int], bool] | None = None,
    ) -> int:
        """How many events are read for those that a predicate selects in a range of event time, at most. ``may_have``:
        as of ``scan``."""
        wanted = Wanted([], later_of(time_from, self.floor_us), time_to, where, upto=self.upto, may_have=may_have)
        hot = (block for block in self.hot if not outside(block, wanted.low_us, time_to) and not never(where, block))
        return self._settled.rows_perhaps(wanted) + sum(
            block.rows for block in hot if may_have is None or may_have(block.time_min, block.time_max)
        )

    def cut_rows(self, time_from: int | None, time_to: int | None) -> int:
        """Events of what the snapshot or bounds of the event time cut: ``sum_up`` reads these."""
        low = later_of(time_from, self.floor_us)
        return sum(
            part.rows
            for part in self.parts()
            if not outside(part, low, time_to)
            and (
                (low is not None and part.time_min < low)
                or (time_to is not None and part.time_max >= time_to)
                or part.last_cts > self.upto
            )
        )

    def parts(self) -> list[Block | Group]:
        """What is read as a whole: row groups of settled files, and blocks."""
        return [*(group for file in self.files for group in file.groups), *self.hot]

    def _blank(self, block: Block) -> int | None:
        """How many events of the block are blank; None: it has retracted ones, for this view, that are not."""
        if self.names.size and len(self.named(block, self.names)):
            return None
        if all(one.blank for one in block.erased if one.cts <= self.erased_at):
            return sum(one.rows for one in block.erased if one.blank)
        return None
