"""The commit record: the one place where what a transaction did is turned into log bytes and back.

::

    COMMIT body
      u8   version (2; 4 with retractions; 5 with one of those that only version 5 has)
      u8   token kind: 0 none, 1 request token, 2 batch token
      u64  start_ts (2**64 - 1: it has read nothing, and began just before its own CTS)
      u32  guards   u32 rows   u32 derived rows   u32 appends   u32 runs
      token        request: text, 16-byte payload digest | batch: scope text, u64 sequence
      u32  retractions   (versions 4 and 5 only)
      u64  gathered since, once: text, JSON   (version 5 only)
      u64  rule_ts       (version 5 only: the snapshot that rules judged its events at, R25; 2**64 - 1: none did)
      guard...     u32 table, key, i16 column (-1: the row's existence)
      row...       u32 table, key, u8 barrier, u16 puts, (u16 column, cell)..., u16 deltas, (u16 column, cell)...
      derived...   the same, for rows of aggregates: small deltas derived from this commit's own appends
      append...    u32 table, u64 stage (0: the bytes follow), u64 length, Arrow IPC stream, padded to 8
      run...       u32 table, u64 stage, u64 length, delta run (kivi.delta.runs), padded to 8
      retraction...   u32 table, u64 0, u64 length, names of events (kivi.encoding.event_names), padded to 8

    EVENTS body  (a COMMIT record, too; of one number for each member) events that are each a transaction of its own
      u8   version (3; 6 if rules judged its events), 3 zeros
      u32  table    u32 derived rows   u32 runs
      token        text, 16-byte payload digest: of all members, each of which is (token, place)
      derived...   as above, of the last member: late events that were left out are counted
      padding to 8
      append       u64 length, Arrow IPC stream, padded to 8
      places       u64 length, u32 per event: which member it is, padded to 8; none: event i is member i
      run...       u64 table, u64 length, delta run whose CTS are places, padded to 8
      u64  rule_ts   u64 raised   (version 6 only)
      raised...    u64 table, append, places: events that rules raised, each of the member that raised it

    text, key    u32 length, bytes
    cell         u8 tag: 0 null, 1 i64, 2 i128, 3 f64, 4 text, 5 bytes, 6 true, 7 false; then its bytes

    STAGE body   u8 version, u8 kind (0 events, 1 delta run), u32 table, u64 rows, owner text, u64 length, bytes
    ABORT body   u8 version, u32 commits, u64..., u32 stages, u64..., u32 request tokens, text...
    FLOOR body   u8 version (1), u32 table, i64 event time in microseconds: see kivi.store.retention
    GATHER body  u8 version, u32 aggregates, u32 table...: see kivi.mvcc.gathering
    PIN body     u8 version, u8 whether it is new, u64 microseconds (0: it ends), 16-byte name: see kivi.mvcc.pins

Rows are sorted by table and key. Deltas are stored as they were derived, so that replay never derives again.
Decoding is lazy where it matters: Arrow bytes stay memoryviews until somebody needs the rows.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np

from kivi.delta.ops import Barrier, RowOp
from kivi.errors import DataLoss
from kivi.log import Kind
from kivi.mvcc.verdict import Guard

__all__ = [
    "BLIND",
    "Abort",
    "Bulk",
    "Commit",
    "EventsRecord",
    "Gather",
    "NewFloor",
    "Once",
    "Other",
    "Pin",
    "Stage",
    "StageKind",
    "decode_abort",
    "decode_commit",
    "decode_events",
    "decode_floor",
    "decode_gather",
    "decode_pin",
    "decode_stage",
    "deltas_body",
    "deltas_head",
    "deltas_section",
    "is_events",
    "kind_of",
]

BLIND: Final = 2**64 - 1
"""The start timestamp of a commit that has read nothing: it began just before its own CTS (R19)."""
Buffer = bytes | bytearray | memoryview
_VERSION: Final = 2
_EVENTS_VERSION: Final = 3
_RETRACTING_VERSION: Final = 4
_FULL_VERSION: Final = 5
_JUDGED_EVENTS_VERSION: Final = 6
_UNJUDGED: Final = 2**64 - 1
_HEAD: Final = struct.Struct("<BBQIIIII")
_EVENTS_HEAD: Final = struct.Struct("<B3xIII")
_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_I64: Final = struct.Struct("<Bq")
_F64: Final = struct.Struct("<Bd")
_ROW: Final = struct.Struct("<II")
_INT_CELL: Final = struct.Struct("<HBq")
_SIGN: Final = 1 << 63
_BULK: Final = struct.Struct("<IQQ")
_INT64: Final = range(-(2**63), 2**63)
_FLOOR: Final = struct.Struct("<BIq")
_FLOOR_VERSION: Final = 1
_PIN: Final = struct.Struct("<BBQ16s")


@dataclass(slots=True)
class Bulk:
    """Columns of one table in a commit: ``parts`` are the bytes to log, empty if ``stage`` has them in the log."""

    table: int
    stage: int
    parts: Sequence[Any]

    @property
    def nbytes(self) -> int:
        return sum(memoryview(part).nbytes for part in self.parts)


class Once(NamedTuple):
    """Of events of ``table`` with equal bytes in these columns, those of one commit stand in the way of every later one
    for so long: see ``kivi.mvcc.deduplication``."""

    table: int
    columns: tuple[str, ...]
    window_us: int


@dataclass(slots=True)
class Commit:
    """What one transaction does, ready for the log. ``rule_ts``: the snapshot that rules judged its events at; None: no
    rule did."""

    start_ts: int
    rows: list[tuple[int, bytes, RowOp]] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    derived: list[tuple[int, bytes, RowOp]] = field(default_factory=list)
    appends: list[Bulk] = field(default_factory=list)
    runs: list[Bulk] = field(default_factory=list)
    retractions: list[Bulk] = field(default_factory=list)
    request: tuple[str, bytes] | None = None
    batch: tuple[str, int] | None = None
    rule_ts: int | None = None
    once: Once | None = None
    gathered_since: int = 0
    """Of a retraction in a cluster: the number of the GATHER record as of which rows begin anew; 0: none do."""

    def encode(self) -> list[Any]:
        """Buffers whose concatenation is the body."""
        kind = 1 if self.request else 2 if self.batch else 0
        out = bytearray(
            _HEAD.pack(
                _VERSION, kind, self.start_ts, len(self.guards), len(self.rows), len(self.derived),
                len(self.appends), len(self.runs),
            )
        )  # fmt: skip
        if self.request:
            _put_bytes(out, self.request[0].encode())
            out += self.request[1]
        elif self.batch:
            _put_bytes(out, self.batch[0].encode())
            out += _U64.pack(self.batch[1])
        judged = self.rule_ts is not None
        if self.retractions or self.once or judged:
            out[0] = _RETRACTING_VERSION
            out += _U32.pack(len(self.retractions))
            if self.gathered_since or self.once or judged:
                out[0] = _FULL_VERSION
                out += _U64.pack(self.gathered_since)
                _put_bytes(out, json.dumps(self.once).encode())
                out += _U64.pack(_UNJUDGED if self.rule_ts is None else self.rule_ts)
        for guard in self.guards:
            out += _U32.pack(guard.table)
            _put_bytes(out, guard.key)
            out += struct.pack("<h", guard.column)
        _put_rows(out, self.rows)
        _put_rows(out, self.derived)
        buffers: list[Any] = [out]
        for bulk in (*self.appends, *self.runs, *self.retractions):
            size = bulk.nbytes
            buffers.append(_BULK.pack(bulk.table, bulk.stage, size))
            buffers += bulk.parts
            if pad := -size % 8:
                buffers.append(bytes(pad))
        return buffers


def deltas_section(rows: Iterable[tuple[int, bytes, RowOp]]) -> bytes:
    """The rows of a commit of deltas, as ``Commit.encode`` writes them."""
    out = bytearray()
    _put_rows(out, rows)
    return bytes(out)


def deltas_body(rows: int, section: bytes) -> bytes:
    """What the digest of a token covers: the body of a commit of so many rows of deltas that began at 0 without one."""
    return _HEAD.pack(_VERSION, 0, 0, 0, rows, 0, 0, 0) + section


@lru_cache(maxsize=1024)
def deltas_head(rows: int, token_bytes: int) -> bytes:
    """What stands before token, digest and rows of a commit of deltas and puts that has read nothing."""
    return _HEAD.pack(_VERSION, 1, BLIND, 0, rows, 0, 0, 0) + _U32.pack(token_bytes)


class _Reader:
    """Bounds-checked reading; anything out of place is DataLoss, since the log's checksum has vouched for it."""

    def __init__(self, body: Buffer) -> None:
        self.view = memoryview(body)
        self.at = 0

    def take(self, size: int) -> memoryview:
        end = self.at + size
        if end > len(self.view):
            raise DataLoss(
                f"a log record ends at byte {len(self.view)} inside a field that needs {end}", offset=self.at
            )
        part = self.view[self.at : end]
        self.at = end
        return part

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.take(form.size))

    def sized(self) -> bytes:
        return bytes(self.take(self.unpack(_U32)[0]))

    def version(self) -> None:
        version = self.take(1)[0]
        if version != _VERSION:
            raise DataLoss(f"a log record has version {version}; this program knows {_VERSION}")


_Decoded = TypeVar("_Decoded")


def _reads(decode: Callable[[Buffer], _Decoded]) -> Callable[[Buffer], _Decoded]:
    """A body that is none, although its checksum is right, was written by another program, or by a bug: DataLoss."""

    @functools.wraps(decode)
    def read(body: Buffer) -> _Decoded:
        try:
            return decode(body)
        except (ValueError, LookupError, TypeError, struct.error) as error:
            raise DataLoss(f"a log record is damaged ({error}): run kivi verify") from None

    return read


@_reads
def decode_commit(body: Buffer) -> Commit:
    """The inverse of ``Commit.encode``. Raises DataLoss."""
    reader = _Reader(body)
    version, kind, start_ts, guards, rows, derived, appends, runs = reader.unpack(_HEAD)
    if version not in (_VERSION, _RETRACTING_VERSION, _FULL_VERSION):
        raise DataLoss(f"a commit record has version {version}; this program knows {_VERSION}")
    commit = Commit(start_ts)
    if kind == 1:
        commit.request = (reader.sized().decode(), bytes(reader.take(16)))
    elif kind == 2:
        commit.batch = (reader.sized().decode(), reader.unpack(_U64)[0])
    retractions = reader.unpack(_U32)[0] if version != _VERSION else 0
    if version == _FULL_VERSION:
        commit.gathered_since = reader.unpack(_U64)[0]
        if (once := json.loads(reader.sized())) is not None:
            commit.once = Once(once[0], tuple(once[1]), once[2])
        rule_ts = reader.unpack(_U64)[0]
        commit.rule_ts = None if rule_ts == _UNJUDGED else rule_ts
    for _ in range(guards):
        table = reader.unpack(_U32)[0]
        commit.guards.append(Guard(table, reader.sized(), struct.unpack("<h", reader.take(2))[0]))
    commit.rows = [_get_row(reader) for _ in range(rows)]
    commit.derived = [_get_row(reader) for _ in range(derived)]
    commit.appends = [_get_bulk(reader) for _ in range(appends)]
    commit.runs = [_get_bulk(reader) for _ in range(runs)]
    commit.retractions = [_get_bulk(reader) for _ in range(retractions)]
    return commit


@dataclass(slots=True)
class EventsRecord:
    """Events of one table, each a transaction of its own. See the table above.

    ``places``: which member each event is, a NumPy array of uint64; None: event i is member i. ``raised``: (table,
    events, places) that rules raised, judging at ``rule_ts``.
    """

    table: int
    request: tuple[str, bytes]
    derived: Sequence[tuple[int, bytes, RowOp]]
    events: Sequence[Any]
    places: Any
    runs: Sequence[tuple[int, Sequence[Any]]]
    rule_ts: int | None = None
    raised: Sequence[tuple[int, Sequence[Any], Any]] = ()

    def encode(self) -> list[Any]:
        """Buffers whose concatenation is the body."""
        version = _EVENTS_VERSION if self.rule_ts is None else _JUDGED_EVENTS_VERSION
        head = bytearray(_EVENTS_HEAD.pack(version, self.table, len(self.derived), len(self.runs)))
        _put_bytes(head, self.request[0].encode())
        head += self.request[1]
        _put_rows(head, self.derived)
        head += bytes(-len(head) % 8)
        buffers: list[Any] = [head]
        parts = [(b"", self.events), (b"", _packed(self.places)), *((_U64.pack(t), run) for t, run in self.runs)]
        if self.rule_ts is not None:
            judged = _U64.pack(self.rule_ts) + _U64.pack(len(self.raised))
            for table, events, places in self.raised:
                parts += [(judged + _U64.pack(table), events), (b"", _packed(places))]
                judged = b""
        for before, part in parts:
            size = sum(memoryview(piece).nbytes for piece in part)
            buffers += [before + _U64.pack(size), *part, bytes(-size % 8)]
        if self.rule_ts is not None and not self.raised:
            buffers.append(judged)
        return buffers


def _packed(places: Any) -> list[Any]:
    return [] if places is None else [memoryview(places.astype("<u4")).cast("B")]


def is_events(body: Buffer) -> bool:
    """Whether it is the body of an ``EventsRecord``, and not of a ``Commit``."""
    return memoryview(body)[0] in (_EVENTS_VERSION, _JUDGED_EVENTS_VERSION)


@_reads
def decode_events(body: Buffer) -> EventsRecord:
    """The inverse of ``EventsRecord.encode``. Raises DataLoss."""
    reader = _Reader(body)
    version, table, derived, runs = reader.unpack(_EVENTS_HEAD)
    request = reader.sized().decode(), bytes(reader.take(16))
    rows = [_get_row(reader) for _ in range(derived)]
    reader.take(-reader.at % 8)

    def part() -> memoryview:
        size = reader.unpack(_U64)[0]
        data = reader.take(size)
        reader.take(-size % 8)
        return data

    def places() -> Any:
        packed = part()
        return np.frombuffer(packed, "<u4").astype(np.uint64) if len(packed) else None

    record = EventsRecord(table, request, rows, [part()], places(), [])
    record.runs = [(reader.unpack(_U64)[0], [part()]) for _ in range(runs)]
    if version == _JUDGED_EVENTS_VERSION:
        record.rule_ts = reader.unpack(_U64)[0]
        raised = reader.unpack(_U64)[0]
        record.raised = [(reader.unpack(_U64)[0], [part()], places()) for _ in range(raised)]
    return record


def _get_bulk(reader: _Reader) -> Bulk:
    table, stage, size = reader.unpack(_BULK)
    data = reader.take(size)
    reader.take(-size % 8)
    return Bulk(table, stage, [data] if size else [])


def _put_bytes(out: bytearray, data: bytes) -> None:
    out += _U32.pack(len(data))
    out += data


def _put_rows(out: bytearray, rows: Iterable[tuple[int, bytes, RowOp]]) -> None:
    for table, key, op in rows:
        out += _ROW.pack(table, len(key))
        out += key
        out.append(op.barrier)
        for cells in (op.puts, op.deltas):
            out += _U16.pack(len(cells))
            for column, value in cells.items():
                if type(value) is int and -_SIGN <= value < _SIGN:
                    out += _INT_CELL.pack(column, 1, value)
                else:
                    out += _U16.pack(column)
                    _put_cell(out, value)


def _get_row(reader: _Reader) -> tuple[int, bytes, RowOp]:
    table = reader.unpack(_U32)[0]
    key = reader.sized()
    barrier = Barrier(reader.take(1)[0])
    cells: list[dict[int, Any]] = []
    for _ in range(2):
        count = reader.unpack(_U16)[0]
        cells.append({reader.unpack(_U16)[0]: _get_cell(reader) for _ in range(count)})
    return table, key, RowOp(barrier, cells[0], cells[1])


def _put_cell(out: bytearray, value: Any) -> None:
    if value is None:
        out.append(0)
    elif value is True:
        out.append(6)
    elif value is False:
        out.append(7)
    elif isinstance(value, int):
        if value in _INT64:
            out += _I64.pack(1, value)
        else:
            out.append(2)
            out += value.to_bytes(16, "little", signed=True)
    elif isinstance(value, float):
        out += _F64.pack(3, value)
    elif isinstance(value, str):
        out.append(4)
        _put_bytes(out, value.encode())
    else:
        out.append(5)
        _put_bytes(out, value)


def _get_cell(reader: _Reader) -> Any:
    tag = reader.take(1)[0]
    match tag:
        case 0:
            return None
        case 1:
            return int.from_bytes(reader.take(8), "little", signed=True)
        case 2:
            return int.from_bytes(reader.take(16), "little", signed=True)
        case 3:
            return struct.unpack("<d", reader.take(8))[0]
        case 4:
            return reader.sized().decode()
        case 5:
            return reader.sized()
        case 6 | 7:
            return tag == 6
    raise DataLoss(f"a log record holds a cell of unknown type {tag}", offset=reader.at)


class StageKind(IntEnum):
    """What a STAGE record holds. The values are on disk."""

    EVENTS = 0
    RUN = 1


@dataclass(slots=True)
class Stage:
    """Durable and invisible: events or a delta run that a later commit may name."""

    kind: StageKind
    table: int
    rows: int
    owner: str
    data: Sequence[Any]

    @property
    def nbytes(self) -> int:
        """Of its data."""
        return sum(memoryview(part).nbytes for part in self.data)

    def encode(self) -> list[Any]:
        owner = self.owner.encode()
        size = sum(memoryview(part).nbytes for part in self.data)
        head = struct.pack("<BBIQI", _VERSION, self.kind, self.table, self.rows, len(owner)) + owner
        return [head + _U64.pack(size) + bytes(-(len(head) + 8) % 8), *self.data]


@_reads
def decode_stage(body: Buffer) -> Stage:
    reader = _Reader(body)
    reader.version()
    kind = StageKind(reader.take(1)[0])
    table, rows = reader.unpack(struct.Struct("<IQ"))
    owner = reader.sized().decode()
    size = reader.unpack(_U64)[0]
    reader.take(-reader.at % 8)
    return Stage(kind, table, rows, owner, [reader.take(size)])


@dataclass(slots=True)
class Abort:
    """Commits that took a CTS and did not happen, request tokens that never will, stages that were given up."""

    commits: tuple[int, ...] = ()
    tokens: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()

    def encode(self) -> list[Any]:
        out = bytearray([_VERSION])
        for numbers in (self.commits, self.stages):
            out += _U32.pack(len(numbers)) + struct.pack(f"<{len(numbers)}Q", *numbers)
        out += _U32.pack(len(self.tokens))
        for token in self.tokens:
            _put_bytes(out, token.encode())
        return [out]


@_reads
def decode_abort(body: Buffer) -> Abort:
    reader = _Reader(body)
    reader.version()
    commits, stages = (
        struct.unpack(f"<{count}Q", reader.take(8 * count)) for count in (reader.unpack(_U32)[0] for _ in range(2))
    )
    tokens = tuple(reader.sized().decode() for _ in range(reader.unpack(_U32)[0]))
    return Abort(commits, tokens, stages)


@dataclass(frozen=True, slots=True)
class NewFloor:
    """From its record on, what lies before ``time_us`` in a table with retention is forgotten."""

    table: int
    time_us: int

    def encode(self) -> list[Any]:
        return [_FLOOR.pack(_FLOOR_VERSION, self.table, self.time_us)]


@_reads
def decode_floor(body: Buffer) -> NewFloor:
    version, table, time_us = _FLOOR.unpack(body)
    if version != _FLOOR_VERSION:
        raise DataLoss(f"a floor record has version {version}; this program knows {_FLOOR_VERSION}")
    return NewFloor(table, time_us)


@dataclass(frozen=True, slots=True)
class Gather:
    """From its record on, what commits add to these aggregates is kept: see ``kivi.mvcc.gathering``."""

    tables: tuple[int, ...]

    def encode(self) -> list[Any]:
        return [struct.pack(f"<BI{len(self.tables)}I", _VERSION, len(self.tables), *self.tables)]


@_reads
def decode_gather(body: Buffer) -> Gather:
    reader = _Reader(body)
    reader.version()
    return Gather(tuple(reader.unpack(_U32)[0] for _ in range(reader.unpack(_U32)[0])))


@dataclass(frozen=True, slots=True)
class Pin:
    """Its S is its record's number, if it ``is_new``; it is held for so long from its record on, by the log's time."""

    name: bytes
    ttl_us: int
    is_new: bool

    def encode(self) -> list[Any]:
        return [_PIN.pack(_VERSION, self.is_new, self.ttl_us, self.name)]


@_reads
def decode_pin(body: Buffer) -> Pin:
    version, is_new, ttl_us, name = _PIN.unpack(body)
    if version != _VERSION:
        raise DataLoss(f"a log record has version {version}; this program knows {_VERSION}")
    return Pin(name, ttl_us, bool(is_new))


Other: TypeAlias = Stage | Abort | NewFloor | Gather | Pin
"""What a record that is no commit holds."""
_KINDS: Final = {Stage: Kind.STAGE, Abort: Kind.ABORT, NewFloor: Kind.FLOOR, Gather: Kind.GATHER, Pin: Kind.PIN}


def kind_of(other: Other) -> Kind:
    """The kind of its record."""
    return _KINDS[type(other)]
