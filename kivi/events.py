"""Event tables in base: blocks of columns, in commit order.

::

    EVENT       table | 00                  meta: events_upto, rows, next id, floors, dead data
                table | 01 | order id       header of one block, in commit order
    EVENT_DATA  table | data id             the block: an Arrow IPC stream, compressed by column

A block holds the events of one or more commits, or a part of one, as ``runs`` of (CTS, row count) in commit order, so a
snapshot, an ``as_of`` read and a tail can cut inside it. Its header has the range of event times and, per numeric column,
min, max, the number of non-nulls and, for integers, the exact sum: ranges prune, float sums are not kept.

Blocks have no stamp of their own. ``events_upto`` says what they include: it is written in the same engine batch as the
blocks, and one engine scan reads it together with all headers (they are neighbours), so a view is consistent by
construction. Who reads a table captures pending events first, takes a view second, and leaves out pending events at or
below ``view.events_upto``; replay after a crash leaves out the same (``seal``).

**Compaction** merges neighbouring small blocks, smallest tier first, so each event is rewritten a logarithmic number of
times. The output takes the first input's place in the order; the inputs' headers go in the same batch, their data when
the last view opened before has been closed. Until then their ids are in meta, so a crash leaves no orphans.

**Retention** is a floor (CTS, event time): events before the time are invisible to every S at or past the CTS, whatever
block holds them; a block that lies wholly below is dropped once no view from before the floor is open.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow import arrow_schema, filter_batch
from kivi.engine import Engine, WriteBatch
from kivi.errors import DataLoss, SnapshotTooOld
from kivi.expr import Expr, names
from kivi.keys import Space, event_data_key, event_header_key, event_meta_key, prefix_end, table_prefix
from kivi.schema import TableSchema

__all__ = ["Block", "EventStore", "EventView"]

_VERSION: Final = 1
_FAN_IN: Final = 8
_NUMERIC: Final = ("int64", "decimal", "timestamp", "float64")


@dataclass(frozen=True, slots=True)
class Block:
    """A header. ``columns``: name -> (min, max, non-nulls, exact sum or None) in stored form."""

    order: int
    data: int
    rows: int
    nbytes: int
    time_min: int
    time_max: int
    runs: tuple[tuple[int, int], ...]
    columns: dict[str, tuple[Any, Any, int, int | None]]

    def encode(self) -> bytes:
        out = {
            "v": _VERSION, "order": self.order, "data": self.data, "rows": self.rows, "bytes": self.nbytes,
            "time": [self.time_min, self.time_max], "runs": self.runs, "columns": self.columns,
        }  # fmt: skip
        return json.dumps(out, separators=(",", ":")).encode()

    @property
    def first_cts(self) -> int:
        return self.runs[0][0]

    @property
    def last_cts(self) -> int:
        return self.runs[-1][0]

    def cut(self, after: int, upto: int) -> tuple[int, int]:
        """The rows [start, stop) with after < cts <= upto."""
        start = sum(rows for cts, rows in self.runs if cts <= after)
        return start, sum(rows for cts, rows in self.runs if cts <= upto)


@lru_cache(maxsize=65_536)
def _decode(raw: bytes) -> Block:
    try:
        head = json.loads(raw)
        if head["v"] != _VERSION:
            raise ValueError(f"version {head['v']}")
        return Block(
            head["order"],
            head["data"],
            head["rows"],
            head["bytes"],
            head["time"][0],
            head["time"][1],
            tuple((cts, rows) for cts, rows in head["runs"]),
            {name: tuple(stats) for name, stats in head["columns"].items()},  # type: ignore[misc]
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataLoss(f"the header of an event block is damaged ({error}): run kivi verify") from None


@dataclass(slots=True)
class _Meta:
    upto: int = 0
    rows: int = 0
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


class EventView:
    """The blocks of one table at a moment, cut at ``upto``. Close it (or use ``with``): data wait for it."""

    def __init__(self, store: EventStore, meta: _Meta, blocks: list[Block], upto: int, ticket: int) -> None:
        self._store = store
        self._blocks = blocks
        self._ticket = ticket
        self.upto = upto
        self.events_upto = meta.upto
        self.floor_us = meta.floor_at(upto)

    def __enter__(self) -> EventView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._store._close_view(self._ticket)

    def __del__(self) -> None:
        self.close()

    @property
    def rows(self) -> int:
        """Events at or below ``upto`` in blocks, those below the retention floor included."""
        return sum(stop for block in self._blocks for _, stop in (block.cut(0, self.upto),))

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
    ) -> Iterator[Any]:
        """Record batches of events with after < cts <= upto, in commit order; ``with_cts`` adds a column "_cts".

        ``time_from`` (inclusive) and ``time_to`` (exclusive) bound the event time in microseconds; ``where`` is bound.
        """
        schema = self._store.schema
        outputs = list(schema.output_columns(columns))
        low = max((t for t in (time_from, self.floor_us) if t is not None), default=None)
        predicate = _all_of(schema.event_time or "", low, time_to, where)
        needed = [
            c.name for c in schema.columns if c.name in {*outputs, *(names(predicate) if predicate is not None else ())}
        ]
        for block in reversed(self._blocks) if reverse else self._blocks:
            start, stop = block.cut(after, self.upto)
            if start >= stop or _outside(block, low, time_to) or (where is not None and _never(where, block)):
                continue
            batch = self._store._read(block, needed)
            if with_cts:
                stamps = np.repeat(np.array([c for c, _ in block.runs], np.uint64), [n for _, n in block.runs])
                batch = batch.append_column("_cts", pa.array(stamps))
            batch = batch.slice(start, stop - start)
            if predicate is not None:
                batch = filter_batch(batch, predicate, {c.name: c.type for c in schema.columns})
            if reverse:
                batch = batch.take(pa.array(np.arange(batch.num_rows - 1, -1, -1)))
            if batch.num_rows:
                yield batch.select([*outputs, "_cts"] if with_cts else outputs)


class EventStore:
    """The blocks of one event table. ``seal``, ``compact`` and ``drop_below_floor`` are called by one thread at a time."""

    def __init__(
        self, engine: Engine, schema: TableSchema, *, block_rows: int = 131_072, compression: str | None = "lz4"
    ) -> None:
        self._engine = engine
        self.schema = schema
        self._block_rows = block_rows
        self._compression = compression
        self._arrow = arrow_schema(schema)
        self._mutex = threading.Lock()
        self._tickets = 0
        self._open: set[int] = set()
        self._waiting: list[tuple[int, list[int]]] = []
        meta = self._meta()
        if meta.dead:
            self._waiting.append((0, meta.dead))

    def _meta(self) -> _Meta:
        return _Meta.decode(self._engine.get(event_meta_key(self.schema.id)))

    @property
    def events_upto(self) -> int:
        return self._meta().upto

    # -- reading --------------------------------------------------------------------------------

    def view(self, upto: int) -> EventView:
        """The table at ``upto``, as it is in base now."""
        with self._mutex:
            self._tickets += 1
            ticket = self._tickets
            self._open.add(ticket)
        try:
            prefix = table_prefix(Space.EVENT, self.schema.id)
            meta, blocks = _Meta(), []
            for key, raw in self._engine.scan(prefix, prefix_end(prefix)):
                if key[len(prefix)] == 0:
                    meta = _Meta.decode(raw)
                else:
                    blocks.append(_decode(raw))
            if upto < meta.dropped:
                raise SnapshotTooOld(
                    f"events of {self.schema.name!r} that a snapshot at {upto} sees were dropped by its retention; "
                    f"it can be read from {meta.dropped} on"
                )
        except BaseException:
            self._close_view(ticket)
            raise
        return EventView(self, meta, blocks, upto, ticket)

    def time_range_us(self) -> tuple[int, int] | None:
        """The least and the largest event time in blocks, from their headers; None if there are none."""
        prefix = table_prefix(Space.EVENT, self.schema.id) + b"\x01"
        blocks = [_decode(raw) for _, raw in self._engine.scan(prefix, prefix_end(prefix))]
        return (min(b.time_min for b in blocks), max(b.time_max for b in blocks)) if blocks else None

    def _close_view(self, ticket: int) -> None:
        with self._mutex:
            self._open.discard(ticket)

    def _read(self, block: Block, columns: list[str]) -> Any:
        raw = self._engine.get(event_data_key(self.schema.id, block.data))
        where = f"block {block.data} of event table {self.schema.name!r}"
        if raw is None:
            raise DataLoss(f"{where} is missing: restore a backup")
        fields = [self._arrow.get_field_index(name) for name in columns]
        try:
            options = pa.ipc.IpcReadOptions(included_fields=fields)
            table = pa.ipc.open_stream(pa.py_buffer(raw), options=options).read_all()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataLoss(f"{where} is damaged ({error}): restore a backup") from None
        if table.num_rows != block.rows:
            raise DataLoss(f"{where} has {table.num_rows} events where its header says {block.rows}: restore a backup")
        batches = table.combine_chunks().to_batches()
        return batches[0]

    # -- writing --------------------------------------------------------------------------------

    def seal(self, batch: WriteBatch, parts: Sequence[tuple[int, Any]], upto: int) -> None:
        """Adds blocks for ``parts`` (CTS, events), in commit order, and the new ``events_upto`` to an engine batch.

        Parts at or below the current ``events_upto`` are there already and passed over.
        """
        meta = self._meta()
        fresh = [(cts, events) for cts, events in parts if cts > meta.upto and events.num_rows]
        if upto <= meta.upto:
            return
        if fresh:
            table = pa.Table.from_batches([events for _, events in fresh]).combine_chunks()
            runs = [(cts, events.num_rows) for cts, events in fresh]
            for at in range(0, table.num_rows, self._block_rows):
                piece = table.slice(at, self._block_rows).combine_chunks().to_batches()[0]
                block = self._make(meta.next, meta.next, piece, _slice_runs(runs, at, piece.num_rows), batch)
                batch.put(event_header_key(self.schema.id, block.order), block.encode())
                meta.next += 1
            meta.rows += table.num_rows
        meta.upto = upto
        batch.put(event_meta_key(self.schema.id), meta.encode())

    def _make(self, order: int, data: int, events: Any, runs: tuple[tuple[int, int], ...], batch: WriteBatch) -> Block:
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression=self._compression)
        with pa.ipc.new_stream(sink, events.schema, options=options) as writer:
            writer.write_batch(events)
        body = sink.getvalue().to_pybytes()
        batch.put(event_data_key(self.schema.id, data), body)
        stats = {
            column.name: _statistics(events.column(i), column.type.name)
            for i, column in enumerate(self.schema.columns)
            if column.type.name in _NUMERIC
        }
        times = stats[self.schema.event_time or ""]
        return Block(order, data, events.num_rows, len(body), times[0], times[1], runs, stats)

    def compact(self, max_rows: int) -> bool:
        """One bounded step: data that no view needs any more is deleted, and up to eight small neighbours become
        one block of at most ``max_rows``. True if there may be more to do."""
        self._delete_dead()
        meta, blocks = _Meta(), []
        prefix = table_prefix(Space.EVENT, self.schema.id)
        for key, raw in self._engine.scan(prefix, prefix_end(prefix)):
            if key[len(prefix)] == 0:
                meta = _Meta.decode(raw)
            else:
                blocks.append(_decode(raw))
        inputs = _mergeable(blocks, max_rows)
        if not inputs:
            return False
        every = [column.name for column in self.schema.columns]
        table = pa.Table.from_batches([self._read(block, every) for block in inputs]).combine_chunks()
        runs: list[tuple[int, int]] = []
        for cts, rows in (run for block in inputs for run in block.runs):
            if runs and runs[-1][0] == cts:
                runs[-1] = (cts, runs[-1][1] + rows)
            else:
                runs.append((cts, rows))
        batch = WriteBatch()
        output = self._make(inputs[0].order, meta.next, table.to_batches()[0], tuple(runs), batch)
        meta.next += 1
        for block in inputs[1:]:
            batch.delete(event_header_key(self.schema.id, block.order))
        batch.put(event_header_key(self.schema.id, output.order), output.encode())
        self._retire(meta, [block.data for block in inputs], batch)
        return True

    def _retire(self, meta: _Meta, data: list[int], batch: WriteBatch) -> None:
        """Writes a batch that takes these data out of use; they go when every view that is open now has closed."""
        meta.dead += data
        batch.put(event_meta_key(self.schema.id), meta.encode())
        self._engine.write(batch)
        with self._mutex:
            self._waiting.append((self._tickets, data))

    def _delete_dead(self) -> None:
        with self._mutex:
            oldest = min(self._open, default=self._tickets + 1)
            gone = [data for ticket, ids in self._waiting if ticket < oldest for data in ids]
            self._waiting = [item for item in self._waiting if item[0] >= oldest]
        if gone:
            meta = self._meta()
            meta.dead = [data for data in meta.dead if data not in gone]
            batch = WriteBatch()
            for data in gone:
                batch.delete(event_data_key(self.schema.id, data))
            batch.put(event_meta_key(self.schema.id), meta.encode())
            self._engine.write(batch)

    # -- retention --------------------------------------------------------------------------------

    def set_floor(self, batch: WriteBatch, cts: int, time_us: int) -> None:
        """Events before ``time_us`` are invisible to snapshots at or past ``cts``. Idempotent."""
        meta = self._meta()
        if (cts, time_us) not in meta.floors:
            meta.floors = [*meta.floors, (cts, time_us)]
            batch.put(event_meta_key(self.schema.id), meta.encode())

    def drop_below_floor(self, oldest_cts: int) -> int:
        """Drops blocks wholly below the floor that every snapshot from ``oldest_cts`` on sees. Returns how many."""
        view = self.view(oldest_cts)
        view.close()
        meta = self._meta()
        floor = meta.floor_at(oldest_cts)
        gone = [b for b in view._blocks if floor is not None and b.time_max < floor]
        if gone:
            meta.dropped = max(cts for cts, time in meta.floors if time == floor and cts <= oldest_cts)
            batch = WriteBatch()
            for block in gone:
                batch.delete(event_header_key(self.schema.id, block.order))
            self._retire(meta, [block.data for block in gone], batch)
        return len(gone)


def _slice_runs(runs: list[tuple[int, int]], start: int, count: int) -> tuple[tuple[int, int], ...]:
    out, at = [], 0
    for cts, rows in runs:
        low, high = max(at, start), min(at + rows, start + count)
        if low < high:
            out.append((cts, high - low))
        at += rows
    return tuple(out)


def _statistics(array: Any, type_name: str) -> tuple[Any, Any, int, int | None]:
    present = array.drop_null()
    count = len(present)
    if not count:
        return None, None, 0, None if type_name == "float64" else 0
    if type_name == "float64":
        bounds = pc.min_max(present).as_py()
        return bounds["min"], bounds["max"], count, None
    if type_name == "decimal":
        values = np.frombuffer(present.buffers()[1], np.int64)[2 * present.offset : 2 * (present.offset + count) : 2]
    else:
        values = present.view(pa.int64()).to_numpy(zero_copy_only=False)
    low, high = int(values.min()), int(values.max())
    if max(abs(low), abs(high)) * count < 2**63:
        return low, high, count, int(values.sum())
    limbs = int((values & 0xFFFFFFFF).sum()), int((values >> 32).sum())
    return low, high, count, limbs[0] + (limbs[1] << 32)


def _all_of(time_column: str, low: int | None, high: int | None, where: Expr | None) -> Expr | None:
    terms = [where] if where is not None else []
    if low is not None:
        terms.append(Expr(">=", time_column, low))
    if high is not None:
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
    if stats is None or where.op in ("not", "is_null", "!="):
        return False
    low, high, count, _ = stats
    if not count:
        return True
    match where.op:
        case "==":
            return not low <= where.value <= high
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


def _mergeable(blocks: list[Block], max_rows: int) -> list[Block]:
    """Eight neighbours of one size tier or below, together at most ``max_rows``; the smallest tier first."""
    tiers = [int(math.log(max(block.rows, 1), _FAN_IN)) for block in blocks]
    for tier in sorted(set(tiers)):
        start = 0
        for i in range(len(blocks) + 1):
            fits = i < len(blocks) and tiers[i] <= tier
            if fits and i - start + 1 == _FAN_IN:
                if sum(block.rows for block in blocks[start : i + 1]) <= max_rows:
                    return blocks[start : i + 1]
                start += 1
            elif not fits:
                start = i + 1
    return []
