"""Views: the blocks of one event table at a moment, cut at a snapshot; scans and summaries of them.

A view is taken in one engine scan and never changes. What it may still have to read stays in the engine until it is
closed (``Readers``), whatever compaction and retention do meanwhile. Headers decide what is opened at all: a block
outside the time bounds, or one that a predicate cannot select a row of, is passed over.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kivi.arrow.predicates import filter_batch
from kivi.errors import InvalidArgument
from kivi.events.blocks import NUMERIC, Block, Blocks, Meta, statistics
from kivi.events.summing import Sums
from kivi.model.expressions import Expr, names

__all__ = ["EventView", "Readers", "Summary", "later_of"]

_BATCH_ROWS: Final = 65_536


def later_of(*times: int | None) -> int | None:
    """The latest of some bounds, of which any may not be there."""
    return max((time_us for time_us in times if time_us is not None), default=None)


@dataclass(frozen=True, slots=True)
class Summary:
    """Sums over the headers of a view. ``counts``: non-nulls per numeric column; ``sums``: per integer
    or decimal column, exact, unscaled, of any size."""

    rows: int
    counts: dict[str, int]
    sums: dict[str, int]


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
    """The blocks of one table at a moment, cut at ``upto``. Close it (or use ``with``): data wait for it.

    ``floor_us``: events before it are left out; a caller that knows of a later floor may raise it before it scans.
    """

    def __init__(
        self,
        base: Blocks,
        readers: Readers,
        ticket: int,
        meta: Meta,
        blocks: list[Block],
        upto: int,
        floor_us: int | None,
    ) -> None:
        self._base = base
        self._readers = readers
        self._ticket = ticket
        self._blocks = [block for block in blocks if block.first_cts <= upto]
        self._closed = False
        self.upto = upto
        self.events_upto = meta.upto
        self.floor_us = floor_us

    def __enter__(self) -> EventView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Data that only this view needed may go; its scans end with InvalidArgument. Harmless twice."""
        if not self._closed:
            self._closed = True
            self._readers.leave(self._ticket)

    def __del__(self) -> None:
        self.close()

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Headers of the blocks that hold events at or below ``upto``, in commit order."""
        return tuple(self._blocks)

    @property
    def rows(self) -> int:
        """Events at or below ``upto`` in blocks, those below the retention floor included."""
        return sum(stop for block in self._blocks for _, stop in (self._cut(block, 0),))

    def rows_after(self, after: int) -> int:
        """Events with after < cts <= upto in blocks, whatever the floor."""
        return sum(stop - start for start, stop in (self._cut(block, after) for block in self._blocks))

    def newest_after(self, after: int) -> int:
        """The largest CTS with after < cts <= upto in blocks; ``after`` if there is none."""
        for block in reversed(self._blocks):
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
        blocks = [block for block in self._blocks if block.last_cts > after]
        for i, block in enumerate(blocks):
            begins = block.first_cts > (blocks[i - 1].last_cts if i else after)
            ends = block.last_cts < blocks[i + 1].first_cts if i + 1 < len(blocks) else block.last_cts <= self.upto
            if begins and ends and fits(block.rows):
                yield block.last_cts, block.rows
                continue
            cts, rows = self._base.runs(block)
            inside = (cts > np.uint64(after)) & (cts <= np.uint64(self.upto))
            yield from zip(cts[inside].tolist(), rows[inside].tolist(), strict=True)

    def _cut(self, block: Block, after: int) -> tuple[int, int]:
        """The rows [start, stop) of the block with after < cts <= upto."""
        if block.last_cts <= after or block.first_cts > self.upto:
            return 0, 0
        if block.first_cts > after and block.last_cts <= self.upto:
            return 0, block.rows
        cts, rows = self._base.runs(block)
        bounds = [np.searchsorted(cts, np.uint64(max(0, min(at, 2**64 - 1))), "right") for at in (after, self.upto)]
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
        limit: int | None = None,
        reverse: bool = False,
        with_cts: bool = False,
        skip: int = 0,
        take: int | None = None,
    ) -> Iterator[Any]:
        """Record batches of events with after < cts <= upto, in commit order; ``with_cts`` adds a column "_cts".

        Of these, whatever else is asked of them, the first ``skip`` are passed over and ``take`` are looked at.

        ``time_from`` (inclusive) and ``time_to`` (exclusive) bound the event time in microseconds; ``where`` is bound;
        ``limit`` counts events that match. No batch is empty or has more than 65,536 rows.
        """
        schema = self._base.schema
        outputs = [*schema.output_columns(columns), *(["_cts"] if with_cts else [])]
        types = {c.name: c.type for c in schema.columns}
        low = later_of(time_from, self.floor_us)
        left = math.inf if limit is None else limit
        for block in reversed(self._blocks) if reverse else self._blocks:
            if left <= 0:
                return
            start, stop = self._cut(block, after)
            if skip or take is not None:
                rows = stop - start
                start = min(start + skip, stop)
                skip = max(0, skip - rows)
                if take is not None:
                    stop = min(stop, start + take)
                    take -= stop - start
            if start >= stop or _outside(block, low, time_to) or (where is not None and _never(where, block)):
                continue
            predicate = _all_of(schema.event_time or "", low, time_to, where, block)
            used = {*outputs, *(names(predicate) if predicate is not None else ())} - {"_cts"} or {schema.event_time}
            batch = self._load(block, [c.name for c in schema.columns if c.name in used])
            if with_cts:
                batch = batch.append_column("_cts", pa.array(np.repeat(*self._base.runs(block))))
            batch = batch.slice(start, stop - start)
            if predicate is not None:
                batch = filter_batch(batch, predicate, types)
            if reverse:
                batch = batch.take(pa.array(np.arange(batch.num_rows - 1, -1, -1)))
            batch = batch.select(outputs)
            if batch.num_rows > left:
                batch = batch.slice(0, int(left))
            left -= batch.num_rows
            for at in range(0, batch.num_rows, _BATCH_ROWS):
                yield batch.slice(at, _BATCH_ROWS)

    def _load(self, block: Block, columns: list[str]) -> Any:
        if self._closed:
            raise InvalidArgument("this view of an event table is closed: take another one")
        return self._base.read(block, columns)

    def sum_up(
        self, into: Sums, *, time_from: int | None = None, time_to: int | None = None, where: Expr | None = None
    ) -> tuple[int, int]:
        """Adds the events of a ``scan`` to ``into``. (blocks whose header was enough, blocks that were read)"""
        schema = self._base.schema
        types = {c.name: c.type for c in schema.columns}
        low = later_of(time_from, self.floor_us)
        known = read = 0
        for block in self._blocks:
            start, stop = self._cut(block, 0)
            if start >= stop or _outside(block, low, time_to) or (where is not None and _never(where, block)):
                continue
            inside = (low is None or block.time_min >= low) and (time_to is None or block.time_max < time_to)
            whole = stop - start == block.rows and inside and (where is None or _always(where, block))
            if whole and into.from_headers:
                into.add_known(block.rows, block.columns)
                known += 1
                continue
            predicate = _all_of(schema.event_time or "", low, time_to, where, block)
            used = {*into.columns, *(names(predicate) if predicate is not None else ())} or {schema.event_time}
            batch = self._load(block, [c.name for c in schema.columns if c.name in used]).slice(start, stop - start)
            into.add(batch if predicate is None else filter_batch(batch, predicate, types))
            read += 1
        return known, read

    def summary(self, after: int = 0) -> Summary:
        """Rows, counts and exact sums of the events with after < cts <= upto at or above the floor.

        From headers, but for blocks that the cut or the floor goes through.
        """
        schema = self._base.schema
        numeric = [c for c in schema.columns if c.type.name in NUMERIC]
        rows, counts = 0, dict.fromkeys((c.name for c in numeric), 0)
        sums = {c.name: 0 for c in numeric if c.type.is_integer}
        for block in self._blocks:
            start, stop = self._cut(block, after)
            low = self.floor_us
            if start >= stop or _outside(block, low, None):
                continue
            known = block.columns
            part = stop - start
            if part < block.rows or (low is not None and block.time_min < low):
                batch = self._load(block, [c.name for c in numeric]).slice(start, part)
                predicate = _all_of(schema.event_time or "", low, None, None, block)
                if predicate is not None:
                    batch = filter_batch(batch, predicate, {c.name: c.type for c in numeric})
                known = {c.name: statistics(c.type, batch.column(c.name)) for c in numeric}
                part = batch.num_rows
            rows += part
            for name in counts:
                counts[name] += known[name][2]
            for name in sums:
                sums[name] += known[name][3] or 0
        return Summary(rows, counts, sums)


# -- what headers decide ------------------------------------------------------------------------------


def _all_of(time_column: str, low: int | None, high: int | None, where: Expr | None, block: Block) -> Expr | None:
    """``where`` and the time bounds, but for bounds that the whole block keeps."""
    terms = [where] if where is not None else []
    if low is not None and block.time_min < low:
        terms.append(Expr(">=", time_column, low))
    if high is not None and block.time_max >= high:
        terms.append(Expr("<", time_column, high))
    out: Expr | None = None
    for term in terms:
        out = term if out is None else out & term
    return out


def _outside(block: Block, low: int | None, high: int | None) -> bool:
    return (low is not None and block.time_max < low) or (high is not None and block.time_min >= high)


def _never(where: Expr, block: Block) -> bool:
    """True if the header proves that no row of the block is selected."""
    if where.op == "and":
        return any(_never(arg, block) for arg in where.args)
    if where.op == "or":
        return all(_never(arg, block) for arg in where.args)
    stats = block.columns.get(where.column)
    if stats is None or where.op == "not":
        return False
    low, high, count, _ = stats
    if where.op == "is_null":
        return count == block.rows
    if not count:
        return True
    match where.op:
        case "==":
            return not low <= where.value <= high
        case "!=":
            return bool(low == high == where.value)
        case "isin":
            return all(not low <= value <= high for value in where.value)
        case "<":
            return bool(low >= where.value)
        case "<=":
            return bool(low > where.value)
        case ">":
            return bool(high <= where.value)
        case ">=":
            return bool(high < where.value)
    return False


def _always(where: Expr, block: Block) -> bool:
    """True if the header proves that every row of the block is selected."""
    if where.op == "and":
        return all(_always(arg, block) for arg in where.args)
    if where.op == "or":
        return any(_always(arg, block) for arg in where.args)
    negated = where.op == "not"
    if negated:
        where = where.args[0]
    stats = block.columns.get(where.column)
    if stats is None or (negated and where.op != "is_null"):
        return False
    low, high, count, _ = stats
    if where.op == "is_null":
        return count == (block.rows if negated else 0)
    if count < block.rows:
        return False
    match where.op:
        case "==":
            return bool(low == high == where.value)
        case "!=":
            return not low <= where.value <= high
        case "isin":
            return bool(low == high and low in where.value)
        case "<":
            return bool(high < where.value)
        case "<=":
            return bool(high <= where.value)
        case ">":
            return bool(low > where.value)
        case ">=":
            return bool(low >= where.value)
    return False
