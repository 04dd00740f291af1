"""Key spaces: everything lies in one ordered space of an engine, and the first byte says what a key is.

::

    0x01 META        name                                       what the store knows about itself
    0x02 CATALOG     name                                       reserved; the catalog is kept in tables
    0x03 ROW         table u32 | row key                        base row (kivi.encoding.base_rows), stamped with its CTS
    0x04 VERSION     table u32 | row key | ~cts u64             older version of a row, newest first
    0x05 EVENT       table u32 | 0x00                           events_upto and the like
                     table u32 | 0x01 | block u64               header of an event block
    0x06 EVENT_DATA  table u32 | block u64                      the block itself
    0x07 TOKEN       token                                      what became of a request token
    0x08 BATCH       scope 0x00 0x00 | sequence u64             what became of a batch token
    0x09 TIME        microseconds u64                           commit times from then on (kivi.encoding.commit_times)
    0x0a TOMBSTONE   cts u64 | table u32 | row key              to do: sweep the row deleted at that CTS
    0x0b TOKENS      newest u64 | oldest u64 | cts u64          of stores of older versions: that there are request
    0x0c TOKEN_DATA  newest u64 | oldest u64 | cts u64          tokens of those times, and these (.token_blocks)

All integers are big endian, so order is numeric. A space or a table is a range of neighbours, so that one scan reads
it and one range is all there is to erase. Meta and headers of an event table share a space so that *one* engine scan
sees both in one consistent view. What a row key is made of: ``kivi.encoding.keys``.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

from kivi.encoding.keys import encode_text

__all__ = [
    "Space",
    "batch_key",
    "cts_of_fact",
    "event_data_key",
    "event_file_key",
    "event_header_key",
    "event_meta_key",
    "fact_key",
    "gathered_key",
    "meta_key",
    "row_key",
    "space_prefix",
    "split_row_key",
    "split_time_key",
    "split_token_block_key",
    "split_tombstone_key",
    "split_version_key",
    "table_prefix",
    "taken_key",
    "time_key",
    "token_key",
    "tombstone_key",
    "version_key",
    "version_prefix",
]

_MASK64: Final = 2**64 - 1
_U32: Final = struct.Struct(">I")
_U64: Final = struct.Struct(">Q")
_BLOCK: Final = struct.Struct(">QQQ")


class Space(IntEnum):
    """The first byte of every key in an engine. The values are on disk and permanent."""

    META = 1
    """Facts about the store: format, recorded log position, operator ids."""
    CATALOG = 2
    """Reserved: nothing is written here, since the catalog is kept in tables."""
    ROW = 3
    """Base rows: the newest folded version of each."""
    VERSION = 4
    """Older versions that an open snapshot or a table's history needs."""
    EVENT = 5
    """Event tables: the table's own facts, then one header per block."""
    EVENT_DATA = 6
    """Event blocks."""
    TOKEN = 7
    """Request tokens."""
    BATCH = 8
    """Batch tokens."""
    TIME = 9
    """Commit times: at which moment which commit timestamp was the newest."""
    TOMBSTONE = 10
    """Rows that were deleted, oldest first, until their tombstones are swept."""
    TOKENS = 11
    """Request tokens as older versions kept them, many at a time: which there are."""
    TOKEN_DATA = 12
    """The tokens themselves."""
    FACT = 13
    """What commits wrote lately, for the verdicts of those that began before them; in a cluster."""
    GATHERED = 14
    """What commits added to aggregates while a retraction was on its way; in a cluster."""
    TAKEN = 15
    """The ids of events that count once, of each commit that brought some lately; in a cluster."""


_ROW: Final = bytes([Space.ROW])
_VERSION: Final = bytes([Space.VERSION])


def space_prefix(space: Space) -> bytes:
    """The beginning of every key of a space."""
    return bytes([space])


def table_prefix(space: Space, table_id: int) -> bytes:
    """The beginning of every key of one table in ROW, VERSION, EVENT or EVENT_DATA."""
    return bytes([space]) + _U32.pack(table_id)


def meta_key(name: str) -> bytes:
    return bytes([Space.META]) + name.encode()


def row_key(table_id: int, key: bytes) -> bytes:
    return _ROW + _U32.pack(table_id) + key


def split_row_key(data: bytes) -> tuple[int, bytes]:
    """``row_key`` undone: (table id, key)."""
    return _U32.unpack_from(data, 1)[0], data[5:]


def version_prefix(table_id: int, key: bytes) -> bytes:
    """The beginning of all older versions of a row."""
    return _VERSION + _U32.pack(table_id) + key


def version_key(table_id: int, key: bytes, cts: int) -> bytes:
    """A scan from here to the end of ``version_prefix`` meets versions with CTS <= ``cts``, newest first."""
    return _VERSION + _U32.pack(table_id) + key + _U64.pack(_MASK64 - cts)


def split_version_key(data: bytes) -> tuple[int, bytes, int]:
    """``version_key`` undone: (table id, key, cts)."""
    return _U32.unpack_from(data, 1)[0], data[5:-8], _MASK64 - _U64.unpack_from(data, len(data) - 8)[0]


def event_meta_key(table_id: int) -> bytes:
    return table_prefix(Space.EVENT, table_id) + b"\x00"


def event_header_key(table_id: int, block_id: int) -> bytes:
    return table_prefix(Space.EVENT, table_id) + b"\x01" + _U64.pack(block_id)


def event_file_key(table_id: int, number: int) -> bytes:
    """A settled file; the least of them comes after all headers."""
    return table_prefix(Space.EVENT, table_id) + b"\x02" + _U64.pack(number)


def event_data_key(table_id: int, block_id: int) -> bytes:
    return table_prefix(Space.EVENT_DATA, table_id) + _U64.pack(block_id)


_TOKEN: Final = bytes([Space.TOKEN])


def token_key(token: str) -> bytes:
    return _TOKEN + token.encode()


def split_token_block_key(data: bytes) -> tuple[int, int, int]:
    """Of a key in TOKENS or TOKEN_DATA: newest and oldest time of issue in microseconds, least CTS.

    Raises struct.error.
    """
    newest, oldest, cts = _BLOCK.unpack(data[1:])
    return newest, oldest, cts


def batch_key(scope: str, sequence: int) -> bytes:
    """All sequence numbers of one scope are neighbours, in order."""
    return bytes([Space.BATCH]) + encode_text(scope) + _U64.pack(sequence)


def time_key(time_us: int) -> bytes:
    """A backward scan that ends before ``time_key(t + 1)`` meets the row that knows moment t first."""
    return bytes([Space.TIME]) + _U64.pack(time_us)


def fact_key(cts: int) -> bytes:
    """What the commit at this CTS wrote."""
    return bytes([Space.FACT]) + _U64.pack(cts)


def gathered_key(cts: int) -> bytes:
    """What the commits that entered together, the last at this CTS, added to aggregates."""
    return bytes([Space.GATHERED]) + _U64.pack(cts)


def taken_key(cts: int) -> bytes:
    """The ids that the commit at this CTS took."""
    return bytes([Space.TAKEN]) + _U64.pack(cts)


def cts_of_fact(data: bytes) -> int:
    """``fact_key``, ``gathered_key`` or ``taken_key`` undone."""
    return int(_U64.unpack_from(data, 1)[0])


def split_time_key(data: bytes) -> int:
    """``time_key`` undone: microseconds."""
    return int(_U64.unpack_from(data, 1)[0])


def tombstone_key(cts: int, table_id: int, key: bytes) -> bytes:
    return bytes([Space.TOMBSTONE]) + _U64.pack(cts) + _U32.pack(table_id) + key


def split_tombstone_key(data: bytes) -> tuple[int, int, bytes]:
    """``tombstone_key`` undone: (cts, table id, key)."""
    return _U64.unpack_from(data, 1)[0], _U32.unpack_from(data, 9)[0], data[13:]
