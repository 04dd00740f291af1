"""Event tables in base: blocks of columns, in commit order.

::

    EVENT       table | 00                  meta: events_upto, rows, next id, floors, dropped, dead data
                table | 01 | order id       header of one block, in commit order
    EVENT_DATA  table | data id             the block: an Arrow IPC stream, compressed by column

A block holds the events of one or more commits, or a part of one, as *runs* of (CTS, row count) in commit order, so
that a snapshot, an ``as_of`` read and a tail can cut inside it. Its header has the range of event times and, per
numeric column, min, max, the number of non-nulls and, for integers, the exact sum: ranges prune, sums answer
``summary``. Float sums are not kept, because adding them up block by block would not be the left-to-right sum. The
header has a checksum of the data as well, so damage is DataLoss that names the block, never another number.

Headers are read at every view, so they must stay small: of a block with more than 64 runs (commits of a few events) the
header has the first and the last run, and the stream's metadata has them all, compressed. Only a cut that falls inside
such a block has to look there.

Blocks have no stamp of their own. ``events_upto`` says what they include: it is written in the same engine batch as the
blocks, and one engine scan reads it together with all headers (they are neighbours), so a view is consistent by
construction. Who reads a table captures pending events first, takes a view second, and leaves out pending events at or
below ``view.events_upto``; replay after a crash leaves out the same (``seal``).

**Invariants.** Headers in key order are commits in order: a block's last CTS is at most the next one's first (equal
when a commit spans both). Every data id is named by exactly one header or by ``dead`` in meta, in every prefix of the
engine's batches: so a crash leaves no orphans, and what was waiting to be deleted is found again. Ids are never used
twice.

**Compaction** merges up to eight neighbouring blocks of one size tier (a factor of eight) into one that takes the first
input's place in the order. A block never takes part only to swallow a few small ones behind it, which would rewrite it
again and again; so an event is rewritten about once per tier. The inputs' headers go in the batch that adds the output,
their data once every view that was open then has been closed.

**Retention** is a floor (CTS, event time): events before the time are invisible to every S at or past the CTS, whatever
block holds them; a block that lies wholly below is dropped once no snapshot from before the floor needs it, and from
then on such a snapshot is refused, not answered in part.

``seal``, ``compact``, ``set_floor``, ``drop_below_floor`` and ``sweep_orphans`` read meta and write it back: their
caller lets one at a time run, and writes the batch of one before it calls the next. Views may be taken by any thread at
any time.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.columns import arrow_schema, stored_array
from kivi.arrow.predicates import filter_batch
from kivi.engine import Engine, WriteBatch
from kivi.errors import DataLoss, InvalidArgument, SnapshotTooOld
from kivi.expr import Expr, names
from kivi.keys import prefix_end
from kivi.schema import TableSchema
from kivi.spaces import Space, event_data_key, event_header_key, event_meta_key, table_prefix
from kivi.types import ColumnType

__all__ = ["Block", "EventStore", "EventView", "Summary", "destroy"]

_VERSION: Final = 1
_FAN_IN: Final = 8
_INLINE_RUNS: Final = 64
_BATCH_ROWS: Final = 65_536
_STEP_DELETES: Final = 1_024
_RUNS: Final = b"kivi.runs"
_NUMERIC: Final = ("int64", "decimal", "timestamp", "float64")

Stamps = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]
Runs = tuple[Stamps, Counts]


# -- what is stored ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """A header. ``columns``: name -> (min, max, non-nulls, exact sum or None) in stored form.

    ``runs``: (CTS, rows), all of them if ``packed`` is 0; else the first and the last of ``packed`` ones.
    ``nbytes`` is the size of the data as stored, ``raw_bytes`` that of the columns in memory.
    """

    order: int
    data: int
    rows: int
    nbytes: int
    raw_bytes: int
    checksum: int
    time_min: int
    time_max: int
    runs: tuple[tuple[int, int], ...]
    packed: int
    columns: dict[str, tuple[Any, Any, int, int | None]]

    def encode(self) -> bytes:
        out = {
            "v": _VERSION, "order": self.order, "data": self.data, "rows": self.rows, "bytes": self.nbytes,
            "raw": self.raw_bytes, "crc": self.checksum, "time": [self.time_min, self.time_max], "runs": self.runs,
            "packed": self.packed, "columns": self.columns,
        }  # fmt: skip
        return json.dumps(out, separators=(",", ":")).encode()

    @property
    def first_cts(self) -> int:
        return self.runs[0][0]

    @property
    def last_cts(self) -> int:
        return self.runs[-1][0]


@lru_cache(maxsize=16_384)  # about 1 kB each
def _decode(raw: bytes) -> Block:
    head = json.loads(raw)
    if head["v"] != _VERSION:
        raise ValueError(f"version {head['v']}")
    return Block(
        head["order"],
        head["data"],
        head["rows"],
        head["bytes"],
        head["raw"],
        head["crc"],
        head["time"][0],
        head["time"][1],
        tuple((cts, rows) for cts, rows in head["runs"]),
        head["packed"],
        {name: tuple(stats) for name, stats in head["columns"].items()},
    )


@dataclass(slots=True)
class _Meta:
    upto: int = 0
    rows: int = 0  # ever sealed
    next: int = 1
    floors: list[tuple[int, int]] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)
    dropped: int = 0

    @staticmethod
    def decode(raw: bytes | None) -> _Meta:
        if raw is None:
            return _Meta()
        try:
            head = json.loads(raw)
            floors = [(cts, time) for cts, time in head["floors"]]
            return _Meta(head["upto"], head["rows"], head["next"], floors, head["dead"], head["dropped"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataLoss(f"the state of an event table is damaged ({error}): run kivi verify") from None

    def encode(self) -> bytes:
        out = {"upto": self.upto, "rows": self.rows, "next": self.next, "floors": self.floors, "dead": self.dead}
        out["dropped"] = self.dropped
        return json.dumps(out, separators=(",", ":")).encode()

    def floor_at(self, cts: int) -> int | None:
        """The largest floor time that snapshots at ``cts`` see."""
        return max((time for at, time in self.floors if at <= cts), default=None)


def _pack_runs(cts: Stamps, rows: Counts) -> bytes:
    """CTS as differences and rows, u64 and u32 little endian, as one LZ4 frame."""
    plain = np.diff(cts, prepend=np.uint64(0)).astype("<u8").tobytes() + rows.astype("<u4").tobytes()
    return pa.compress(plain, "lz4", asbytes=True)  # type: ignore[no-any-return]


def _unpack_runs(packed: bytes, count: int) -> Runs:
    plain = pa.decompress(packed, 12 * count, "lz4", asbytes=True)
    steps = np.frombuffer(plain, "<u8", count).astype(np.uint64)
    return np.cumsum(steps, dtype=np.uint64), np.frombuffer(plain, "<u4", count, 8 * count).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Summary:
    """What headers know about the events of a view. ``counts``: non-nulls per numeric column; ``sums``: per integer
    or decimal column, exact, unscaled, of any size."""

    rows: int
    counts: dict[str, int]
    sums: dict[str, int]


# -- reading ----------------------------------------------------------------------------------------


class _Readers:
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
        self, store: EventStore, meta: _Meta, blocks: list[Block], upto: int, ticket: int, floor_us: int | None
    ) -> None:
        self._store = store
        self._blocks = [block for block in blocks if block.first_cts <= upto]
        self._ticket = ticket
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
            self._store._readers.leave(self._ticket)

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

    def _cut(self, block: Block, after: int) -> tuple[int, int]:
        """The rows [start, stop) of the block with after < cts <= upto."""
        if block.last_cts <= after or block.first_cts > self.upto:
            return 0, 0
        if block.first_cts > after and block.last_cts <= self.upto:
            return 0, block.rows
        cts, rows = self._store._runs(block)
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
    ) -> Iterator[Any]:
        """Record batches of events with after < cts <= upto, in commit order; ``with_cts`` adds a column "_cts".

        ``time_from`` (inclusive) and ``time_to`` (exclusive) bound the event time in microseconds; ``where`` is bound;
        ``limit`` counts events that match. No batch is empty or has more than 65,536 rows.
        """
        schema = self._store.schema
        outputs = [*schema.output_columns(columns), *(["_cts"] if with_cts else [])]
        types = {c.name: c.type for c in schema.columns}
        low = max((t for t in (time_from, self.floor_us) if t is not None), default=None)
        left = math.inf if limit is None else limit
        for block in reversed(self._blocks) if reverse else self._blocks:
            if left <= 0:
                return
            start, stop = self._cut(block, after)
            if start >= stop or _outside(block, low, time_to) or (where is not None and _never(where, block)):
                continue
            predicate = _all_of(schema.event_time or "", low, time_to, where, block)
            used = {*outputs, *(names(predicate) if predicate is not None else ())} - {"_cts"} or {schema.event_time}
            batch = self._load(block, [c.name for c in schema.columns if c.name in used])
            if with_cts:
                batch = batch.append_column("_cts", pa.array(np.repeat(*self._store._runs(block))))
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
        return self._store._read(block, columns)

    def summary(self, after: int = 0) -> Summary:
        """Rows, counts and exact sums of the events with after < cts <= upto at or above the floor.

        From headers, but for blocks that the cut or the floor goes through.
        """
        schema = self._store.schema
        numeric = [c for c in schema.columns if c.type.name in _NUMERIC]
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
                known = {c.name: _statistics(c.type, batch.column(c.name)) for c in numeric}
                part = batch.num_rows
            rows += part
            for name in counts:
                counts[name] += known[name][2]
            for name in sums:
                sums[name] += known[name][3] or 0
        return Summary(rows, counts, sums)


class EventStore:
    """The blocks of one event table. See the end of the module's docstring for what may run at the same time.

    ``block_rows`` and ``block_bytes`` (of columns in memory) bound a block, and so what a scan holds at a time.
    """

    def __init__(
        self,
        engine: Engine,
        schema: TableSchema,
        *,
        block_rows: int = 131_072,
        block_bytes: int = 32 << 20,
        compression: str | None = "lz4",
    ) -> None:
        self._engine = engine
        self.schema = schema
        self._block_rows = block_rows
        self._block_bytes = block_bytes
        self._compression = compression
        self._arrow = arrow_schema(schema)
        self._readers = _Readers()
        self._waiting: list[tuple[int, list[int]]] = []
        dead = self._meta().dead
        if dead:
            self._waiting.append((0, dead))  # no view of before the restart is open

    def _meta(self) -> _Meta:
        return _Meta.decode(self._engine.get(event_meta_key(self.schema.id)))

    def _headers(self) -> tuple[_Meta, list[Block]]:
        meta, blocks = _read_headers(self._engine, self.schema.id, self.schema.name)
        return meta or _Meta(), blocks

    @property
    def events_upto(self) -> int:
        """Every event at or below this CTS is in blocks."""
        return self._meta().upto

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
        ticket = self._readers.enter()
        try:
            meta, blocks = self._headers()
            if seen_at < meta.dropped:
                raise SnapshotTooOld(
                    f"events of {self.schema.name!r} that a snapshot at {seen_at} sees were dropped by its retention; "
                    f"it can be read from {meta.dropped} on"
                )
            return EventView(self, meta, blocks, upto, ticket, meta.floor_at(seen_at))
        except BaseException:
            self._readers.leave(ticket)
            raise

    def scan(self, upto: int, **options: Any) -> Iterator[Any]:
        """``EventView.scan`` of a view taken now, which is closed when the iterator ends or is dropped."""
        view = self.view(upto)
        return _closing(view, view.scan(**options))

    def summary(self, upto: int) -> Summary:
        """Rows, counts and exact integer sums of the table at ``upto``, as far as it is in base."""
        with self.view(upto) as view:
            return view.summary()

    def complete_since(self, upto: int) -> int | None:
        """The event time from which a snapshot at ``upto`` sees everything; None: nothing was ever forgotten."""
        return self._meta().floor_at(upto)

    def time_range_us(self) -> tuple[int, int] | None:
        """The least and the largest event time in blocks, from their headers; None if there are none."""
        blocks = self._headers()[1]
        return (min(b.time_min for b in blocks), max(b.time_max for b in blocks)) if blocks else None

    def _raw(self, block: Block) -> bytes:
        raw = self._engine.get(event_data_key(self.schema.id, block.data))
        if raw is None:
            raise self._lost(block, "missing")
        if len(raw) != block.nbytes or zlib.crc32(raw) != block.checksum:
            raise self._lost(block, "damaged (its checksum is wrong)")
        return raw

    def _lost(self, block: Block, how: str) -> DataLoss:
        return DataLoss(f"block {block.data} of event table {self.schema.name!r} is {how}: restore a backup")

    def _read(self, block: Block, columns: list[str]) -> Any:
        """The columns of a block (in the table's order) as one RecordBatch."""
        raw = self._raw(block)
        try:
            fields = [self._arrow.get_field_index(name) for name in columns]
            options = pa.ipc.IpcReadOptions(included_fields=fields)
            with pa.ipc.open_stream(pa.py_buffer(raw), options=options) as reader:
                batch = reader.read_next_batch()
        except (pa.ArrowException, OSError, ValueError, StopIteration) as error:
            raise self._lost(block, f"damaged ({error})") from None
        if batch.num_rows != block.rows:
            raise self._lost(block, f"damaged (it has {batch.num_rows} events, its header says {block.rows})")
        return batch.replace_schema_metadata(None)

    def _runs(self, block: Block) -> Runs:
        """All runs of a block: CTS and row counts."""
        if not block.packed:
            pairs = np.array(block.runs, np.uint64)
            return pairs[:, 0], pairs[:, 1].astype(np.int64)
        raw = self._raw(block)
        try:
            with pa.ipc.open_stream(pa.py_buffer(raw)) as reader:
                return _unpack_runs(reader.schema.metadata[_RUNS], block.packed)
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
            raise self._lost(block, f"damaged ({error})") from None

    # -- writing --------------------------------------------------------------------------------

    def seal(self, batch: WriteBatch, parts: Sequence[tuple[int, Any]], upto: int) -> None:
        """Adds blocks for ``parts`` (CTS, events), in commit order, and the new ``events_upto`` to an engine batch.

        Parts at or below the current ``events_upto`` are there already and passed over. All parts of a commit come in
        one call, and all commits at or below ``upto`` that were not sealed before. The work is that of the parts.
        """
        meta = self._meta()
        if upto <= meta.upto:
            return
        fresh = [(cts, events) for cts, events in parts if cts > meta.upto and events.num_rows]
        stamps = [cts for cts, _ in fresh]
        if stamps != sorted(stamps) or (stamps and stamps[-1] > upto):
            raise InvalidArgument(f"parts must be in commit order and at or below {upto}, not {stamps[:8]}")
        if fresh:
            whole = pa.concat_batches([events for _, events in fresh]) if len(fresh) > 1 else fresh[0][1]
            cts = np.array(stamps, np.uint64)
            ends = np.cumsum(np.array([events.num_rows for _, events in fresh], np.int64))
            portion = -(-whole.num_rows // max(1, -(-whole.nbytes // self._block_bytes)))
            portion = min(portion, self._block_rows)
            for at in range(0, whole.num_rows, portion):
                piece = whole.slice(at, portion)
                stop = at + piece.num_rows
                first, last = np.searchsorted(ends, at, "right"), np.searchsorted(ends, stop, "left")
                bounds = np.minimum(ends[first : last + 1], stop)
                runs = _joined(cts[first : last + 1], np.diff(bounds, prepend=at))
                self._add(batch, meta.next, meta.next, piece, runs)
                meta.next += 1
            meta.rows += whole.num_rows
        meta.upto = upto
        batch.put(event_meta_key(self.schema.id), meta.encode())

    def _add(self, batch: WriteBatch, order: int, data: int, events: Any, runs: Runs) -> None:
        """Adds one block, data and header, to the batch."""
        cts, rows = runs
        packed = len(cts) if len(cts) > _INLINE_RUNS else 0
        shown = [0, -1] if packed else range(len(cts))
        body = self._encoded(events, {_RUNS: _pack_runs(cts, rows)} if packed else None)
        batch.put(event_data_key(self.schema.id, data), body)
        stats = {
            column.name: _statistics(column.type, events.column(i))
            for i, column in enumerate(self.schema.columns)
            if column.type.name in _NUMERIC
        }
        times = stats[self.schema.event_time or ""]
        header = Block(
            order=order,
            data=data,
            rows=events.num_rows,
            nbytes=len(body),
            raw_bytes=events.nbytes,
            checksum=zlib.crc32(body),
            time_min=times[0],
            time_max=times[1],
            runs=tuple((int(cts[i]), int(rows[i])) for i in shown),
            packed=packed,
            columns=stats,
        )
        batch.put(event_header_key(self.schema.id, order), header.encode())

    def _encoded(self, events: Any, metadata: dict[bytes, bytes] | None) -> bytes:
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression=self._compression)
        events = events.replace_schema_metadata(metadata)
        with pa.ipc.new_stream(sink, events.schema, options=options) as writer:
            writer.write_batch(events)
        return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]

    # -- compaction -----------------------------------------------------------------------------

    def compact(self, max_rows: int) -> bool:
        """One bounded step: data that no view needs any more are deleted, and up to eight small neighbours become
        one block of at most ``max_rows``. True if it merged some: then there may be more to do."""
        self._delete_dead()
        meta, blocks = self._headers()
        inputs = _mergeable(blocks, max_rows, self._block_bytes)
        if not inputs:
            return False
        every = [column.name for column in self.schema.columns]
        events = pa.concat_batches([self._read(block, every) for block in inputs])
        runs = [self._runs(block) for block in inputs]
        joined = _joined(np.concatenate([cts for cts, _ in runs]), np.concatenate([rows for _, rows in runs]))
        batch = WriteBatch()
        self._add(batch, inputs[0].order, meta.next, events, joined)
        meta.next += 1
        for block in inputs[1:]:
            batch.delete(event_header_key(self.schema.id, block.order))
        self._retire(meta, [block.data for block in inputs], batch)
        return True

    def _retire(self, meta: _Meta, data: list[int], batch: WriteBatch) -> None:
        """Writes a batch that takes these data out of use; they go when every view that is open now has closed."""
        meta.dead += data
        batch.put(event_meta_key(self.schema.id), meta.encode())
        self._engine.write(batch)
        self._waiting.append((self._readers.newest(), data))

    def _delete_dead(self) -> int:
        oldest = self._readers.oldest()
        gone = list(
            itertools.islice((data for ticket, ids in self._waiting if ticket < oldest for data in ids), _STEP_DELETES)
        )
        if not gone:
            return 0
        meta, found = self._meta(), set(gone)
        meta.dead = [data for data in meta.dead if data not in found]
        batch = WriteBatch()
        for data in gone:
            batch.delete(event_data_key(self.schema.id, data))
        batch.put(event_meta_key(self.schema.id), meta.encode())
        self._engine.write(batch)
        kept = [(ticket, [data for data in ids if data not in found]) for ticket, ids in self._waiting]
        self._waiting = [(ticket, ids) for ticket, ids in kept if ids]
        return len(gone)

    def sweep_orphans(self) -> int:
        """Deletes what a crash left between a swap and the deletion of its inputs. Returns how many blocks.

        Nobody has to call it: ``compact`` does the same, in steps.
        """
        total = 0
        while count := self._delete_dead():
            total += count
        return total

    # -- retention and the end --------------------------------------------------------------------

    def set_floor(self, batch: WriteBatch, cts: int, time_us: int) -> None:
        """Events before ``time_us`` are invisible to snapshots at or past ``cts``. Idempotent; a floor that
        an earlier one covers changes nothing."""
        meta = self._meta()
        if cts < meta.dropped or any(at <= cts and time >= time_us for at, time in meta.floors):
            return
        meta.floors = sorted([*meta.floors, (cts, time_us)])
        batch.put(event_meta_key(self.schema.id), meta.encode())

    def drop_below_floor(self, oldest_cts: int) -> int:
        """Drops blocks wholly below the floor that every snapshot from ``oldest_cts`` on sees. Returns how many.

        Snapshots below that floor's CTS are refused from then on. At most 1,024 blocks a call.
        """
        meta, blocks = self._headers()
        floor = meta.floor_at(oldest_cts)
        gone = [b for b in blocks if floor is not None and b.time_max < floor][:_STEP_DELETES]
        if gone:
            meta.dropped = max(meta.dropped, min(cts for cts, time in meta.floors if time == floor))
            meta.floors = [(cts, time) for cts, time in meta.floors if cts >= meta.dropped]
            batch = WriteBatch()
            for block in gone:
                batch.delete(event_header_key(self.schema.id, block.order))
            self._retire(meta, [block.data for block in gone], batch)
        return len(gone)

    def destroy(self) -> Iterator[WriteBatch]:
        """``destroy``, but nothing while a view is open."""
        if not self.open_views:
            yield from destroy(self._engine, self.schema.id)


def destroy(engine: Engine, table: int) -> Iterator[WriteBatch]:
    """Bounded batches that together delete a dropped table's events.

    The caller writes each before it asks for the next; after a crash it begins again. No block is read.
    """
    meta, blocks = _read_headers(engine, table, f"table {table}")
    if meta is None:
        return
    batch = WriteBatch()
    for block in blocks:
        batch.delete(event_header_key(table, block.order))
        batch.delete(event_data_key(table, block.data))
        if len(batch) >= _STEP_DELETES:
            yield batch
            batch = WriteBatch()
    for data in meta.dead:
        batch.delete(event_data_key(table, data))
    batch.delete(event_meta_key(table))
    yield batch


# -- helpers ------------------------------------------------------------------------------------------


def _read_headers(engine: Engine, table: int, name: str) -> tuple[_Meta | None, list[Block]]:
    """Meta and all headers in one consistent view: a single engine scan."""
    prefix = table_prefix(Space.EVENT, table)
    meta, blocks = None, []
    for key, raw in engine.scan(prefix, prefix_end(prefix)):
        if key[len(prefix)] == 0:
            meta = _Meta.decode(raw)
            continue
        try:
            blocks.append(_decode(raw))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            number = int.from_bytes(key[len(prefix) + 1 :], "big")
            raise DataLoss(
                f"the header of block {number} of event table {name!r} is damaged ({error!r}): restore a backup"
            ) from None
    return meta, blocks


def _closing(view: EventView, batches: Iterator[Any]) -> Iterator[Any]:
    with view:
        yield from batches


def _joined(cts: Stamps, rows: Counts) -> Runs:
    """Neighbouring runs of one commit as one."""
    starts = np.flatnonzero(np.diff(cts, prepend=cts[0] + np.uint64(1)) != 0)
    return cts[starts], np.add.reduceat(rows, starts)


def _statistics(type_: ColumnType, array: Any) -> tuple[Any, Any, int, int | None]:
    """(min, max, non-nulls, exact sum of int64 and decimals) in stored form."""
    present = array.drop_null()
    count = len(present)
    if not count:
        return None, None, 0, 0 if type_.is_integer else None
    if type_.name == "float64":
        bounds = pc.min_max(present).as_py()
        return bounds["min"], bounds["max"], count, None
    values = stored_array(type_, present)
    low, high = int(values.min()), int(values.max())
    if not type_.is_integer:
        return low, high, count, None
    if max(abs(low), abs(high)) * count < 2**63:
        return low, high, count, int(values.sum())
    return low, high, count, int((values & 0xFFFFFFFF).sum()) + (int((values >> 32).sum()) << 32)


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


def _mergeable(blocks: list[Block], max_rows: int, max_bytes: int) -> list[Block]:
    """Neighbours to merge now, oldest first; empty if there is nothing to do.

    A block of more than half of a limit is *full* and stays. Between full blocks lie segments. The last one still
    grows: eight neighbours of its largest tier are merged (with smaller ones that lie between them), of the next tier
    behind those, and so on, the last of these first. The others grow no more, so what is left there becomes as few
    blocks as will hold it.
    """
    segments: list[list[Block]] = [[]]
    for block in blocks:
        if 2 * block.rows > max_rows or 2 * block.raw_bytes > max_bytes:
            segments.append([])
        else:
            segments[-1].append(block)
    for segment in segments[:-1]:
        if len(segment) > 1:
            return _fitting(segment, max_rows, max_bytes)
    chosen: list[Block] = []
    tail = segments[-1]
    while tail:
        tiers = [int(math.log(max(block.rows, 1), _FAN_IN) + 1e-9) for block in tail]
        last = max(i for i, tier in enumerate(tiers) if tier == max(tiers))
        if last + 1 >= _FAN_IN:
            chosen = tail[: last + 1]  # a later one is of a smaller tier, and goes first
        tail = tail[last + 1 :]
    return _fitting(chosen, max_rows, max_bytes)


def _fitting(blocks: list[Block], max_rows: int, max_bytes: int) -> list[Block]:
    """The first blocks, at most eight, that fit together into one."""
    rows = nbytes = 0
    for i, block in enumerate(blocks[:_FAN_IN]):
        rows += block.rows
        nbytes += block.raw_bytes
        if rows > max_rows or nbytes > max_bytes:
            return blocks[:i]
    return blocks[:_FAN_IN]
