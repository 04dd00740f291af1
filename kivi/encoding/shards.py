"""Of which shard an event or a row is, and events and runs that were cut by shards before they entered the log.

**The shard** of an event is a checksum of its columns ``shard_by``, encoded as the beginning of a key, modulo the
number of shards. An aggregate of a sharded table groups by these columns first, so its row is of the shard of its
events. An event with a null there is of shard 0: no aggregate takes it, and no read for a value finds it.

**Pieces.** A gateway cuts what it publishes into one piece for each set of shards that some nodes hold and others do
not, so that a node decodes the pieces that it needs, and passes over the rest::

    "kvshard1"   u64 how many pieces
    piece        u64 the set of its shards   u64 bytes of places   u64 bytes of data
                 places: u32 each, which of the events that were cut these are; none for a run; padded to 8
                 data: an Arrow IPC stream, as it would be without pieces; padded to 8

An Arrow IPC stream begins with 0xFF, so what was not cut is known from what was.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.encoding.keys import decode_key, decode_key_columns, encode_key, encode_key_columns
from kivi.errors import DataLoss
from kivi.model.schema import TableSchema

__all__ = ["Piece", "join_pieces", "pieces_of", "shard_of", "shard_of_key", "shards_of_events", "shards_of_keys"]

Array = Any
_MAGIC: Final = b"kvshard1"
_HEAD: Final = struct.Struct("<8sQ")
_PIECE: Final = struct.Struct("<QQQ")


class Piece(NamedTuple):
    """``places``: of the events that were cut; None: of a run. ``data``: buffers, one memoryview if it was read."""

    shards: int
    places: Array | None
    data: Sequence[Any]


def join_pieces(pieces: Sequence[Piece]) -> list[Any]:
    """Buffers whose concatenation ``pieces_of`` reads."""
    out: list[Any] = [_HEAD.pack(_MAGIC, len(pieces))]
    for shards, places, data in pieces:
        packed = b"" if places is None else places.astype("<u4").tobytes()
        size = sum(memoryview(part).nbytes for part in data)
        out += [_PIECE.pack(shards, len(packed), size), packed, bytes(-len(packed) % 8), *data, bytes(-size % 8)]
    return out


def pieces_of(data: Any) -> list[Piece] | None:
    """What ``join_pieces`` made; None for what was not cut. Raises DataLoss."""
    view = memoryview(data)
    if bytes(view[: len(_MAGIC)]) != _MAGIC:
        return None
    try:
        _, count = _HEAD.unpack_from(view)
        at, pieces = _HEAD.size, list[Piece]()
        for _ in range(count):
            shards, places, size = _PIECE.unpack_from(view, at)
            at += _PIECE.size
            which = np.frombuffer(view[at : at + places], "<u4").astype(np.uint64) if places else None
            at += places + -places % 8
            if at + size > len(view):
                raise ValueError("a piece is cut off")
            pieces.append(Piece(shards, which, [view[at : at + size]]))
            at += size + -size % 8
    except (struct.error, ValueError) as error:
        raise DataLoss(f"events that were cut by shards cannot be read: {error}") from None
    return pieces


def shard_of(schema: TableSchema, values: Sequence[Any], of: int) -> int:
    """Of one of ``of`` shards that events with these values of ``shard_by`` are of; values in stored form."""
    return crc32(encode_key([schema.column(name).type for name in schema.shard_by], values)) % of


def shard_of_key(schema: TableSchema, key: bytes, of: int) -> int:
    """The same of a row of an aggregate."""
    return shard_of(schema, decode_key([column.type for column in schema.key], key)[: len(schema.shard_by)], of)


def shards_of_events(schema: TableSchema, batch: pa.RecordBatch, of: int) -> Array:
    """The shard of each event."""
    columns = [batch.column(name) for name in schema.shard_by]
    return _shards(schema, columns, of)


def shards_of_keys(schema: TableSchema, keys: pa.LargeBinaryArray, of: int) -> Array:
    """The shard of each row of an aggregate."""
    columns = decode_key_columns([column.type for column in schema.key], keys)[: len(schema.shard_by)]
    return _shards(schema, columns, of)


def _shards(schema: TableSchema, columns: Sequence[Any], of: int) -> Array:
    rows = len(columns[0])
    missing = [column.is_null() for column in columns if column.null_count]
    whole = np.ones(rows, np.bool_)
    for one in missing:
        whole &= ~one.to_numpy(zero_copy_only=False)
    if missing:
        columns = [column.filter(pa.array(whole)) for column in columns]
    coded = pc.dictionary_encode(encode_key_columns([schema.column(name).type for name in schema.shard_by], columns))
    distinct = np.array([crc32(key) % of for key in coded.dictionary.to_pylist()], np.uint8)
    found = distinct[coded.indices.to_numpy()] if len(distinct) else distinct
    shards = np.zeros(rows, np.uint8)
    shards[whole] = found
    return shards
