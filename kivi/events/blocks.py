"""Blocks as they are stored: meta, headers, data. The one place where their bytes are built and parsed.

A header is JSON, and says of its block what a reader would otherwise have to open it for. The data are one record
batch, so that a column is read without the others. See ``kivi.events`` for what headers and meta mean together.

Columns of integers are stored as what they lie above their least value, which the header has, in the fewest bytes that
hold it (frame of reference; decision 0016).
Text that repeats is stored in codes (``kivi.arrow.dictionaries``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.columns import TIMESTAMP, arrow_schema, arrow_type, decimals, padded, stored_array
from kivi.arrow.dictionaries import is_coded, written_bytes
from kivi.arrow.ipc import PARALLEL_BYTES, encode_ipc
from kivi.encoding.event_names import EventNames
from kivi.encoding.keyspaces import (
    Space,
    event_data_key,
    event_file_key,
    event_header_key,
    event_meta_key,
    table_prefix,
)
from kivi.engine import Engine, WriteBatch
from kivi.errors import DataLoss
from kivi.model.schema import TableSchema
from kivi.model.types import ColumnType
from kivi.runtime.checksum import crc32

__all__ = [
    "NUMERIC",
    "Block",
    "Blocks",
    "Counts",
    "Erased",
    "Meta",
    "Runs",
    "Stamps",
    "first_positions",
    "headers_in",
    "joined",
    "read_headers",
    "statistics",
]

_VERSION: Final = 1
_INLINE_RUNS: Final = 64
_RUNS: Final = b"kivi.runs"
NUMERIC: Final = ("int64", "decimal", "timestamp", "float64")
"""Types of the columns that headers know something about."""

Stamps = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]
Runs = tuple[Stamps, Counts]


class Erased(NamedTuple):
    """The retraction at ``cts`` removed so many ``rows`` of a block: which those are is stored at ``data``.

    ``blank``: their values are gone from the block, too.
    """

    cts: int
    data: int
    rows: int
    checksum: int
    blank: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """A header. ``columns``: name -> (min, max, non-nulls, exact sum or None) in stored form.

    ``runs``: (CTS, rows), all of them if ``packed`` is 0; else the first and the last of ``packed`` ones.
    ``nbytes`` is the size of the data as stored, ``raw_bytes`` that of the columns in memory. ``first``: the position
    of its first event in that one's commit. ``erased``: by CTS; what is blank is in ``rows``, and not in ``columns``.
    ``settled``: the events lie in settled files, and the data are the runs alone.
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
    first: int = 0
    erased: tuple[Erased, ...] = ()
    settled: bool = False

    def encode(self) -> bytes:
        out = {"v": _VERSION} | {key: getattr(self, name) for name, key in _NUMBERS.items()}
        out |= {"time": [self.time_min, self.time_max], "runs": self.runs, "columns": self.columns}
        out |= {"first": self.first} if self.first else {}
        out |= {"erased": self.erased} if self.erased else {}
        out |= {"settled": True} if self.settled else {}
        return json.dumps(out, separators=(",", ":")).encode()

    @property
    def first_cts(self) -> int:
        return self.runs[0][0]

    @property
    def last_cts(self) -> int:
        return self.runs[-1][0]


_NUMBERS: Final = {
    "order": "order", "data": "data", "rows": "rows", "nbytes": "bytes", "raw_bytes": "raw", "checksum": "crc",
    "packed": "packed",
}  # fmt: skip


@lru_cache(maxsize=16_384)  # about 1 kB each
def _decode(raw: bytes) -> Block:
    head = json.loads(raw)
    if head["v"] != _VERSION:
        raise ValueError(f"version {head['v']}")
    numbers: dict[str, Any] = {name: head[key] for name, key in _NUMBERS.items()}
    return Block(
        **numbers,
        time_min=head["time"][0],
        time_max=head["time"][1],
        runs=tuple((cts, rows) for cts, rows in head["runs"]),
        columns={name: tuple(stats) for name, stats in head["columns"].items()},
        first=head.get("first", 0),
        erased=tuple(Erased(*one) for one in head.get("erased", ())),
        settled=head.get("settled", False),
    )


@dataclass(slots=True)
class Meta:
    upto: int = 0
    rows: int = 0  # ever sealed
    next: int = 1
    floors: list[tuple[int, int]] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)
    dropped: int = 0  # the CTS of the newest floor by which blocks were dropped
    lost: int = 0  # the newest CTS of an event that was dropped
    erased_upto: int = 0  # blocks know of every retraction at or below this CTS
    blanked: int = 0  # the newest retraction of which some events are blank
    retractions: list[tuple[int, int, int, int, bool]] = field(default_factory=list)
    """(CTS, CTS of the first and last event that it removed, how many, whether none of them is left in blocks)"""
    manifest: int = 0  # grows with every change of the settled files

    @staticmethod
    def decode(raw: bytes | None) -> Meta:
        if raw is None:
            return Meta()
        try:
            head = json.loads(raw)
            floors = [(cts, time) for cts, time in head["floors"]]
            lost = head.get("lost", head["dropped"])  # what was dropped was committed before the floor
            retractions = [tuple(one) for one in head.get("retractions", ())]
            return Meta(**{**head, "floors": floors, "lost": lost, "retractions": retractions})
        except (ValueError, KeyError, TypeError) as error:
            raise DataLoss(f"the state of an event table is damaged ({error}): run kivi verify") from None

    def encode(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

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


def first_positions(blocks: list[Block]) -> list[int]:
    """``Block.first`` of each. Stores from before retractions do not say it of a block that begins inside a commit."""
    found = list[int]()
    for i, block in enumerate(blocks):
        first, before = block.first, blocks[i - 1] if i else None
        if not first and before is not None and before.last_cts == block.first_cts:
            first = before.runs[-1][1] + (found[-1] if before.first_cts == before.last_cts else 0)
        found.append(first)
    return found


def joined(cts: Stamps, rows: Counts) -> Runs:
    """Neighbouring runs of one commit as one."""
    starts = np.flatnonzero(np.diff(cts, prepend=cts[0] + np.uint64(1)) != 0)
    return cts[starts], np.add.reduceat(rows, starts)


def statistics(type_: ColumnType, array: Any) -> tuple[Any, Any, int, int | None]:
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


_WORDS: Final = {1: (pa.uint8(), "<u1"), 2: (pa.uint16(), "<u2"), 4: (pa.uint32(), "<u4")}


def _distances(values: Counts, width: int, mask: Any) -> Any:
    """Integers from 0 on, below 256**width, as an array of ``width`` bytes each: 1 to 7, little endian."""
    if width in _WORDS:
        type_, dtype = _WORDS[width]
        return pa.array(values.astype(dtype), type_, mask=mask)
    of_eight = np.ascontiguousarray(values, "<i8").view(np.uint8).reshape(-1, 8)
    data = np.empty((len(values), width), np.uint8)
    for i in range(width):  # a ninth of the time of copying whole rows of three bytes
        data[:, i] = of_eight[:, i]
    valid = None if mask is None else pa.py_buffer(np.packbits(~mask, bitorder="little"))
    return pa.Array.from_buffers(pa.binary(width), len(values), [valid, pa.py_buffer(data)])


def _from_distances(array: Any) -> Any:
    """``_distances`` undone: an int64 array."""
    if not pa.types.is_fixed_size_binary(array.type):
        return array.cast(pa.int64())
    width, rows = array.type.byte_width, len(array)
    data = np.frombuffer(array.buffers()[1], np.uint8, rows * width, array.offset * width).reshape(-1, width)
    of_eight = np.zeros((rows, 8), np.uint8)
    for i in range(width):
        of_eight[:, i] = data[:, i]
    mask = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    return pa.array(of_eight.view("<i8").reshape(rows), pa.int64(), mask=mask)


def _narrowed(schema: TableSchema, events: Any, stats: dict[str, tuple[Any, Any, int, int | None]]) -> Any:
    """The columns of integers by their distance from their least value, in the fewest bytes; nulls stay nulls."""
    arrays, names = [], []
    for i, column in enumerate(schema.columns):
        array = events.column(i)
        low, high, count, _ = stats.get(column.name, (None, None, 0, None))
        if column.type.name in ("int64", "timestamp", "decimal") and count:
            width = max(1, ((high - low).bit_length() + 7) // 8)
            if width < 8:
                mask = None if not array.null_count else array.is_null().to_numpy(zero_copy_only=False)
                array = _distances(stored_array(column.type, array) - low, width, mask)
        arrays.append(array)
        names.append(column.name)
    return pa.RecordBatch.from_arrays(arrays, names)


def read_headers(engine: Engine, table: int, name: str, since: int | None = None) -> tuple[Meta | None, list[Block]]:
    """Meta and all headers in one consistent view: a single engine scan. ``since``: headers of this order and later."""
    prefix = table_prefix(Space.EVENT, table)
    first = prefix if since is None else event_header_key(table, since)
    return headers_in(engine.scan(first, event_file_key(table, 0)), prefix, name)


def headers_in(rows: Iterable[tuple[bytes, bytes]], prefix: bytes, name: str) -> tuple[Meta | None, list[Block]]:
    """Meta and the headers among rows of the engine that have no other."""
    meta, blocks = None, []
    for key, raw in rows:
        if key[len(prefix)] == 0:
            meta = Meta.decode(raw)
            continue
        try:
            blocks.append(_decode(raw))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            number = int.from_bytes(key[len(prefix) + 1 :], "big")
            raise DataLoss(
                f"the header of block {number} of event table {name!r} is damaged ({error!r}): restore a backup"
            ) from None
    return meta, blocks


class Blocks:
    """The blocks of one event table in the engine. One that is damaged or missing is DataLoss that names it."""

    def __init__(self, engine: Engine, schema: TableSchema) -> None:
        self._engine = engine
        self.schema = schema
        self._arrow = arrow_schema(schema)
        self._types = {column.name: column.type for column in schema.columns}

    def meta(self) -> Meta:
        return Meta.decode(self._engine.get(event_meta_key(self.schema.id)))

    def headers(self) -> tuple[Meta, list[Block]]:
        """Meta and all headers, in one consistent view."""
        meta, blocks = read_headers(self._engine, self.schema.id, self.schema.name)
        return meta or Meta(), blocks

    def headers_since(self, order: int) -> list[Block]:
        """The headers of the blocks of this order and later ones."""
        return read_headers(self._engine, self.schema.id, self.schema.name, order)[1]

    def newest_cts(self) -> int:
        """The CTS of the last event; 0 if there is none. Reads one header."""
        first = event_header_key(self.schema.id, 0)
        for _, raw in self._engine.scan(first, event_file_key(self.schema.id, 0), reverse=True):
            return _decode(raw).last_cts
        return 0

    def read(self, block: Block, columns: list[str]) -> Any:
        """The columns of a block (in the table's order) as one RecordBatch.

        Those that were added to the table after it was written are null.
        """
        raw = self._raw(block)
        try:
            fields = [self._arrow.get_field_index(name) for name in columns]
            stored = self._stored(raw)
            options = pa.ipc.IpcReadOptions(
                included_fields=[i for i in fields if i < stored] or [0], use_threads=len(raw) >= PARALLEL_BYTES
            )
            with pa.ipc.open_stream(pa.py_buffer(raw), options=options) as reader:
                batch = reader.read_next_batch()
            arrays = [
                self._widened(block, name, batch.column(name))
                if i < stored
                else pa.nulls(batch.num_rows, arrow_type(self._types[name]))
                for i, name in zip(fields, columns, strict=True)
            ]
            batch = pa.RecordBatch.from_arrays(arrays, columns)
        except (pa.ArrowException, OSError, ValueError, StopIteration) as error:
            raise self._lost(block, f"damaged ({error})") from None
        if batch.num_rows != block.rows:
            raise self._lost(block, f"damaged (it has {batch.num_rows} events, its header says {block.rows})")
        return batch

    def _stored(self, raw: bytes) -> int:
        """How many columns a block has."""
        if not self.schema.alterations:
            return len(self._types)
        with pa.ipc.open_stream(pa.py_buffer(raw)) as reader:
            return len(reader.schema.names)

    def _widened(self, block: Block, name: str, array: Any) -> Any:
        type_ = self._types[name]
        if array.type == arrow_type(type_):
            return array
        if is_coded(array):
            return array.dictionary_decode()
        values = pc.add(_from_distances(array), pa.scalar(block.columns[name][0], pa.int64()))
        if type_.name == "timestamp":
            return values.cast(TIMESTAMP)
        return decimals(type_, values) if type_.name == "decimal" else values

    def runs(self, block: Block) -> Runs:
        """All runs of a block: CTS and row counts."""
        if not block.packed:
            pairs = np.array(block.runs, np.uint64)
            return pairs[:, 0], pairs[:, 1].astype(np.int64)
        raw = self._raw(block)
        try:
            if block.settled:
                return _unpack_runs(raw, block.packed)
            with pa.ipc.open_stream(pa.py_buffer(raw)) as reader:
                return _unpack_runs(reader.schema.metadata[_RUNS], block.packed)
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
            raise self._lost(block, f"damaged ({error})") from None

    def erased(self, every: Iterable[Erased], upto: int) -> Counts | None:
        """Which rows of a block or a file the retractions at or below ``upto`` removed, in order; None: none."""
        parts = [self.rows_erased(one) for one in every if one.cts <= upto]
        return None if not parts else parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))

    def rows_erased(self, erased: Erased) -> Counts:
        """The rows of one retraction."""
        raw = self._engine.get(event_data_key(self.schema.id, erased.data))
        if raw is None or crc32(raw) != erased.checksum:
            raise self._lost(erased, "damaged (which events were retracted)")
        try:
            plain = pa.decompress(raw, 4 * erased.rows, "lz4", asbytes=True)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._lost(erased, f"damaged ({error})") from None
        return np.frombuffer(plain, "<u4", erased.rows).astype(np.int64)

    def add_erased(self, batch: WriteBatch, cts: int, data: int, rows: Counts, *, blank: bool = False) -> Erased:
        """Adds the rows of one retraction to the batch. Its header is yet to name them."""
        raw = pa.compress(rows.astype("<u4").tobytes(), "lz4", asbytes=True)
        batch.put(event_data_key(self.schema.id, data), raw)
        return Erased(cts, data, len(rows), crc32(raw), blank)

    def add_named(self, batch: WriteBatch, cts: int, data: int, names: EventNames) -> Erased:
        """The same by their names, of a file in which it is not known yet which rows these are."""
        raw = names.encode()
        batch.put(event_data_key(self.schema.id, data), raw)
        return Erased(cts, data, names.size, crc32(raw))

    def names_erased(self, erased: Erased) -> EventNames:
        """The names of ``add_named``."""
        raw = self._engine.get(event_data_key(self.schema.id, erased.data))
        if raw is None or crc32(raw) != erased.checksum:
            raise self._lost(erased, "damaged (which events were retracted)")
        return EventNames.decode(raw)

    def _raw(self, block: Block) -> bytes:
        raw = self._engine.get(event_data_key(self.schema.id, block.data))
        if raw is None:
            raise self._lost(block, "missing")
        if len(raw) != block.nbytes or crc32(raw) != block.checksum:
            raise self._lost(block, "damaged (its checksum is wrong)")
        return raw

    def _lost(self, block: Block | Erased, how: str) -> DataLoss:
        return DataLoss(f"block {block.data} of event table {self.schema.name!r} is {how}: restore a backup")

    def add(
        self,
        batch: WriteBatch,
        order: int,
        data: int,
        events: Any,
        runs: Runs,
        *,
        first: int = 0,
        erased: tuple[Erased, ...] = (),
        times: tuple[int, int] | None = None,
    ) -> None:
        """Adds one block, data and header, to the batch. ``times``: of event times, if blank events say nothing."""
        events = padded(events, self.schema)
        cts, rows = runs
        packed = len(cts) if len(cts) > _INLINE_RUNS else 0
        shown = [0, -1] if packed else range(len(cts))
        stats = {
            column.name: statistics(column.type, events.column(i))
            for i, column in enumerate(self.schema.columns)
            if column.type.name in NUMERIC
        }
        stored = _narrowed(self.schema, events, stats)
        stored = stored.replace_schema_metadata({_RUNS: _pack_runs(cts, rows)} if packed else None)
        body = encode_ipc(stored, "lz4").to_pybytes()
        batch.put(event_data_key(self.schema.id, data), body)
        times = times or stats[self.schema.event_time or ""][:2]
        header = Block(
            order=order,
            data=data,
            rows=events.num_rows,
            nbytes=len(body),
            raw_bytes=sum(written_bytes(column) for column in events.columns),
            checksum=crc32(body),
            time_min=times[0],
            time_max=times[1],
            runs=tuple((int(cts[i]), int(rows[i])) for i in shown),
            packed=packed,
            columns=stats,
            first=first,
            erased=erased,
        )
        self.put_header(batch, header)

    def add_settled(
        self, batch: WriteBatch, data: int, blocks: list[Block], first: int, gone: tuple[Erased, ...]
    ) -> None:
        """Adds the header that takes the place of these blocks, whose events are in settled files.

        ``first``: the position of the first event. ``gone``: how many of the events lie nowhere any more, because no
        snapshot sees them.
        """
        runs = [self.runs(block) for block in blocks]
        cts, rows = joined(np.concatenate([stamps for stamps, _ in runs]), np.concatenate([rows for _, rows in runs]))
        raw = _pack_runs(cts, rows)
        batch.put(event_data_key(self.schema.id, data), raw)
        header = Block(
            order=blocks[0].order,
            data=data,
            rows=int(rows.sum()),
            nbytes=len(raw),
            raw_bytes=0,
            checksum=crc32(raw),
            time_min=min(block.time_min for block in blocks),
            time_max=max(block.time_max for block in blocks),
            runs=tuple((int(cts[i]), int(rows[i])) for i in (0, -1)),
            packed=len(cts),
            columns={},
            first=first,
            erased=gone,
            settled=True,
        )
        self.put_header(batch, header)

    def put_header(self, batch: WriteBatch, header: Block) -> None:
        batch.put(event_header_key(self.schema.id, header.order), header.encode())
