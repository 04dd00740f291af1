"""The bytes of a base row: the one place where row values are built and parsed.

A base row is one *version* of a row: every cell folded up to a commit timestamp (CTS)::

    offset  size              field
    0       8                 cts         u64 little endian: includes every operation at or below it
    8       1                 flags       bit 0: the row is alive (clear: a stamped tombstone)
    9       ceil(columns/8)   nulls       bit i set: column i is null, its fixed bytes are zero
    ..      per column        fixed part  bool u1 | int64, decimal, timestamp i8 | float64 f8
                                          SUM over int64 or decimal: u8 low, i8 high (128 bits)
                                          string, bytes: u4 length of its part of the tail
    ..      ..                tail        string (UTF-8) and bytes values, in column order

A schema without strings or bytes has rows of one width, which ``dtype`` describes to NumPy, so that
thousands are decoded by one call. Sums are 128 bits wide because int64 sums may leave 64 bits and come
back (R10): width on disk must not depend on the order in which deltas arrived.

Behind a base row its key is kept once more by the engine, in stores made since format 3, for whoever reads rows of one
width by thousands, and gets both in one piece (``kivi.engine.rocks.Records``).
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from kivi.errors import DataLoss
from kivi.model.schema import Column, TableSchema

__all__ = ["RowLayout", "Version"]

_ALIVE: Final = 1
_MASK64: Final = 2**64 - 1
_DTYPES: Final = {"bool": "u1", "int64": "<i8", "decimal": "<i8", "timestamp": "<i8", "float64": "<f8"}
_FORMATS: Final = {
    "bool": "?",
    "int64": "q",
    "decimal": "q",
    "timestamp": "q",
    "float64": "d",
    "string": "I",
    "bytes": "I",
}


class Version(NamedTuple):
    """A row as of ``cts``. ``cells``: stored form per non-key column, None is null; a tombstone has no cells."""

    cts: int
    alive: bool
    cells: tuple[Any, ...]


def is_wide(column: Column) -> bool:
    """Kept in 128 bits: a SUM over exact integers."""
    return column.operator == "sum" and column.type.is_integer


class RowLayout:
    """How the rows of one schema are laid out. Get one with ``RowLayout.of(schema)``."""

    def __init__(self, schema: TableSchema) -> None:
        columns = schema.columns
        self.columns = columns
        self.null_bytes = (len(columns) + 7) // 8
        self.fixed = all(c.type.name not in ("string", "bytes") for c in columns)
        self._struct = struct.Struct(
            f"<QB{self.null_bytes}s" + "".join("Qq" if is_wide(c) else _FORMATS[c.type.name] for c in columns)
        )
        self._wide = [is_wide(c) for c in columns]

    @staticmethod
    def of(schema: TableSchema) -> RowLayout:
        return schema.remembered(RowLayout, lambda: RowLayout(schema))

    @property
    def width(self) -> int:
        """Bytes of a row without its tail."""
        return self._struct.size

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The structured dtype of a fixed layout: cts, flags, nulls, then c0, c1 ... (wide ones: c0_lo, c0_hi)."""
        fields: list[tuple[str, Any]] = [("cts", "<u8"), ("flags", "u1"), ("nulls", "u1", (self.null_bytes,))]  # type: ignore[list-item]
        for i, column in enumerate(self.columns):
            if is_wide(column):
                fields += [(f"c{i}_lo", "<u8"), (f"c{i}_hi", "<i8")]
            else:
                fields.append((f"c{i}", _DTYPES[column.type.name]))
        return np.dtype(fields)

    def encode(self, version: Version) -> bytes:
        if not version.alive:
            return version.cts.to_bytes(8, "little").ljust(self.width, b"\0")
        nulls = bytearray(self.null_bytes)
        fixed: list[Any] = []
        tail: list[bytes] = []
        for i, cell in enumerate(version.cells):
            wide = self._wide[i]
            if cell is None:
                nulls[i >> 3] |= 1 << (i & 7)
                fixed += (0, 0) if wide else (0,)
            elif wide:
                fixed += (cell & _MASK64, cell >> 64)
            elif isinstance(cell, (str, bytes)):
                data = cell.encode() if isinstance(cell, str) else cell
                fixed.append(len(data))
                tail.append(data)
            else:
                fixed.append(cell)
        head = self._struct.pack(version.cts, _ALIVE, bytes(nulls), *fixed)
        return head + b"".join(tail) if tail else head

    def decode(self, data: bytes) -> Version:
        """Raises DataLoss for bytes that are not a row of this layout."""
        try:
            cts, flags, nulls, *fixed = self._struct.unpack_from(data)
            tail = self._struct.size
            cells: list[Any] = []
            at = 0
            if not flags & _ALIVE:
                if len(data) != tail:
                    raise ValueError("a tombstone of another width")
                return Version(cts, False, ())
            for i, column in enumerate(self.columns):
                if nulls[i >> 3] >> (i & 7) & 1:
                    cells.append(None)
                    at += 2 if self._wide[i] else 1
                elif self._wide[i]:
                    cells.append(fixed[at] + (fixed[at + 1] << 64))
                    at += 2
                elif column.type.name in ("string", "bytes"):
                    end = tail + fixed[at]
                    part = data[tail:end]
                    if len(part) != fixed[at]:
                        raise ValueError("cut short")
                    cells.append(part.decode() if column.type.name == "string" else part)
                    tail, at = end, at + 1
                else:
                    cells.append(fixed[at])
                    at += 1
            if len(data) != tail:
                raise ValueError("it goes on after its end")
            return Version(cts, True, tuple(cells))
        except (struct.error, ValueError) as error:
            raise DataLoss(f"a base row of {len(data)} bytes is damaged ({error}): run kivi verify") from None

    @staticmethod
    def is_alive(data: bytes) -> bool:
        """Whether an encoded row is no tombstone, without decoding the rest."""
        return bool(data[8] & _ALIVE)

    @staticmethod
    def stamp_of(data: bytes) -> int:
        """The CTS of an encoded row, without decoding the rest."""
        return int.from_bytes(data[:8], "little")
