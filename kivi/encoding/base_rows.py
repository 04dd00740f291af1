"""The bytes of a base row: the one place where row values are built and parsed.

A base row is one *version* of a row: every cell folded up to a commit timestamp (CTS)::

    offset  size              field
    0       8                 cts         u64 little endian: includes every operation at or below it
    8       1                 flags       bit 0: the row is alive (clear: a stamped tombstone)
                                          bits 1 to 7: the layout, as how often the table had been altered by then
    9       ceil(columns/8)   nulls       bit i set: column i is null, its fixed bytes are zero
    ..      per column        fixed part  bool u1 | int64, decimal, timestamp i8 | float64 f8
                                          SUM over int64 or decimal: u8 low, i8 high (128 bits)
                                          string, bytes, state: u4 length of its part of the tail
    ..      ..                tail        string (UTF-8) and bytes values and states, in column order

A schema without strings, bytes and states has rows of one width, which ``dtype`` describes to NumPy, so that thousands
are decoded by one call (``rows_of``); states become objects there, the bytes of each. Sums are 128 bits wide because
int64 sums may leave 64 bits and come back (R10): width on disk must not depend on the order in which deltas arrived.

Columns that are added to a table come at the end. A row that was written before is as it was: it has the columns of its
own layout, and is read as if it had the identities of the others (``RowLayout.current``) until it is written anew.

Behind a base row its key is kept once more by the engine, in stores made since format 3, for whoever reads rows of one
width by thousands, and gets both in one piece (``kivi.engine.rocks.Records``).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kivi.errors import DataLoss
from kivi.model.schema import Column, TableSchema

__all__ = ["FieldRows", "RowLayout", "Rows", "Version"]

Array = npt.NDArray[Any]
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


def identity(column: Column) -> Any:
    """The cell of a column before anything was written to it, in stored form."""
    if column.state is not None:
        return b""
    if column.operator != "sum":
        return None
    return 0.0 if column.type.name == "float64" else 0


class FieldRows:
    """Rows of a layout's ``dtype``, each field an array of its own, for whoever takes some of very many rows and puts
    them back again and again: NumPy copies fields of records a tenth as fast. They read like an array of the dtype."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, Array]) -> None:
        self._fields = fields

    @staticmethod
    def none(dtype: np.dtype[Any], rows: int) -> FieldRows:
        """So many rows of zeros, which are no rows."""
        return FieldRows({name: np.zeros(rows, dtype[name]) for name in dtype.names or ()})

    @staticmethod
    def of(rows: Array) -> FieldRows:
        """A copy, which may be changed where the rows may not."""
        return FieldRows({name: rows[name].copy() for name in rows.dtype.names or ()})

    def __len__(self) -> int:
        return len(self._fields["cts"])

    def __getitem__(self, name: str) -> Array:
        return self._fields[name]

    def __setitem__(self, name: str, values: Any) -> None:
        self._fields[name][...] = values

    def take(self, at: Array) -> FieldRows:
        return FieldRows({name: field.take(at, 0) for name, field in self._fields.items()})

    def put(self, at: Array, rows: FieldRows) -> None:
        for name, field in self._fields.items():
            field[at] = rows[name]

    def packed(self, dtype: np.dtype[Any]) -> Array:
        """As an array of the dtype."""
        rows = np.empty(len(self), dtype)
        for name, field in self._fields.items():
            rows[name] = field
        return rows


Rows = TypeVar("Rows", Array, FieldRows)


class RowLayout:
    """How the rows of one schema are laid out. Get one with ``RowLayout.of(schema)``."""

    def __init__(self, schema: TableSchema) -> None:
        columns = schema.columns
        self.columns = columns
        self.null_bytes = (len(columns) + 7) // 8
        self.states = tuple(i for i, c in enumerate(columns) if c.state is not None)
        self.in_columns = all(c.state is not None or c.type.name not in ("string", "bytes") for c in columns)
        """Whether ``rows_of`` can take its rows."""
        self.fixed = self.in_columns and not self.states
        self._struct = struct.Struct(
            f"<QB{self.null_bytes}s"
            + "".join("Qq" if is_wide(c) else "I" if c.state else _FORMATS[c.type.name] for c in columns)
        )
        self._wide = [is_wide(c) for c in columns]
        before = itertools.accumulate(self._wide, initial=0)
        self._at = [(i + halves, wide) for i, (halves, wide) in enumerate(zip(before, self._wide, strict=False))]
        self._tails = [
            (i, c.type.name == "string" and c.state is None)
            for i, c in enumerate(columns)
            if c.state is not None or c.type.name in ("string", "bytes")
        ]
        self._no_nulls = bytes(self.null_bytes)
        self._schema = schema
        self.number = len(schema.alterations)
        self.alive = _ALIVE | self.number << 1
        """The flags of a row that is alive."""
        self._flags = bytes((self.alive,))

    @staticmethod
    def of(schema: TableSchema) -> RowLayout:
        return schema.remembered(RowLayout, lambda: RowLayout(schema))

    @property
    def width(self) -> int:
        """Bytes of a row without its tail."""
        return self._struct.size

    # -- rows of other layouts ------------------------------------------------------------------

    def is_later(self, data: bytes) -> bool:
        """Whether a row was written after a later alteration of the table than this layout knows."""
        return data[8] >> 1 > self.number

    def width_of(self, data: bytes) -> int:
        """Bytes of a row of this layout or an earlier one, without its tail. Raises DataLoss."""
        number = self._number_of(data)
        return self.width if number == self.number else self._earlier[number][1]

    def _number_of(self, data: bytes) -> int:
        number = data[8] >> 1 if len(data) > 8 else -1
        if not 0 <= number <= self.number:
            raise DataLoss(f"a base row of {len(data)} bytes is not of a layout that its table had: run kivi verify")
        return number

    def current(self, data: bytes) -> bytes:
        """A row of this layout or an earlier one, in this layout; whatever lies behind it stays there.

        Raises DataLoss for what is of neither.
        """
        number = self._number_of(data)
        if number == self.number:
            return data
        null_bytes, width, nulls, added = self._earlier[number]
        if not data[8] & _ALIVE:
            nulls, added = 0, bytes(len(added))
        known = int.from_bytes(data[9 : 9 + null_bytes], "little") | nulls
        head = data[:8] + bytes((data[8] & _ALIVE | self.number << 1,)) + known.to_bytes(self.null_bytes, "little")
        return head + data[9 + null_bytes : width] + added + data[width:]

    @cached_property
    def _earlier(self) -> list[tuple[int, int, int, bytes]]:
        """Of each earlier layout: bytes of nulls, bytes without the tail, and the nulls and the fixed part to add."""
        identities = tuple(identity(column) for column in self.columns)
        blank = self.encode(Version(0, True, identities))
        nulls = int.from_bytes(blank[9 : 9 + self.null_bytes], "little")
        found = []
        for number in range(self.number):
            was = self.earlier(number)
            known = len(was.columns)
            added = blank[self.null_bytes + was.width - was.null_bytes : self.width]
            found.append((was.null_bytes, was.width, nulls >> known << known, added))
        return found

    def earlier(self, number: int) -> RowLayout:
        """The layout before all but so many of the table's alterations."""
        schema = self._schema
        columns = self.columns[: schema.alterations[number].columns]
        return RowLayout(replace(schema, columns=columns, measures=(), alterations=schema.alterations[:number]))

    def cut(self, data: bytes, later: RowLayout) -> bytes:
        """A row of a ``later`` layout in this one: without the columns that it does not know."""
        version = later.decode(data)
        return self.encode(version._replace(cells=version.cells[: len(self.columns)]))

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The structured dtype of rows in columns: cts, flags, nulls, then c0, c1 ... (wide ones: c0_lo, c0_hi; states:
        the bytes, or 0 for none, as objects)."""
        return self._fields(state="O")

    @cached_property
    def _head(self) -> np.dtype[Any]:
        """The dtype of a row's bytes without its tail: of a state, the length."""
        return self._fields(state="<u4")

    def _fields(self, state: str) -> np.dtype[Any]:
        fields: list[tuple[str, Any]] = [("cts", "<u8"), ("flags", "u1"), ("nulls", "u1", (self.null_bytes,))]  # type: ignore[list-item]
        for i, column in enumerate(self.columns):
            if is_wide(column):
                fields += [(f"c{i}_lo", "<u8"), (f"c{i}_hi", "<i8")]
            else:
                fields.append((f"c{i}", state if column.state is not None else _DTYPES[column.type.name]))
        return np.dtype(fields)

    def rows_of(self, rows: Sequence[bytes]) -> Array:
        """Encoded rows as an array of ``dtype``. Raises DataLoss for a row of another width."""
        width = self.width
        if not self.states:
            if set(map(len, rows)) - {width}:
                raise self.damaged()
            return np.frombuffer(b"".join(rows), self.dtype)
        heads = np.frombuffer(b"".join([row[:width] for row in rows]), self._head) if rows else np.zeros(0, self._head)
        if len(heads) != len(rows):
            raise self.damaged()
        out = np.zeros(len(rows), self.dtype)
        ends = np.full(len(rows), width, np.int64)
        for name in self._head.names or ():
            if self.dtype[name].hasobject:
                starts, ends = ends, ends + heads[name]
                pairs = zip(rows, starts.tolist(), ends.tolist(), strict=True)
                out[name] = np.fromiter([row[a:b] for row, a, b in pairs], object, len(rows))
            else:
                out[name] = heads[name]
        if not np.array_equal(ends, np.fromiter(map(len, rows), np.int64, len(rows))):
            raise self.damaged()
        return out

    def bytes_of(self, rows: Array | FieldRows) -> list[bytes]:
        """``rows_of`` backwards."""
        if isinstance(rows, FieldRows):
            rows = rows.packed(self.dtype)
        if not self.states:
            return rows.view(f"V{self.width}").tolist()  # type: ignore[no-any-return]
        heads = np.zeros(len(rows), self._head)
        tails = []
        for name in self._head.names or ():
            if self.dtype[name].hasobject:
                tails.append([state or b"" for state in rows[name].tolist()])
                heads[name] = np.fromiter(map(len, tails[-1]), np.uint32, len(rows))
            else:
                heads[name] = rows[name]
        return list(map(b"".join, zip(heads.view(f"V{self.width}").tolist(), *tails, strict=True)))

    def taken(self, rows: Rows, at: Array) -> Rows:
        """Rows of ``dtype`` at some places. NumPy copies such rows field by field, ten times as slowly as bytes."""
        if isinstance(rows, FieldRows):
            return rows.take(at)
        return rows[at] if self.states else rows.view(f"V{self.width}")[at].view(self.dtype)

    def put(self, rows: Array, at: Array, new: Array) -> None:
        """Replaces rows of ``dtype``, all of them different ones."""
        if self.states:
            rows[at] = new
        else:
            rows.view(f"V{self.width}")[at] = new.view(f"V{self.width}")

    def clear(self, rows: Array | FieldRows, at: Array) -> None:
        """Makes no rows of those at some places."""
        if isinstance(rows, FieldRows):
            rows.put(at, FieldRows.none(self.dtype, 1))
        else:
            rows[at] = np.zeros(1, self.dtype)[0]

    def damaged(self) -> DataLoss:
        """The error for a row, or a tombstone, of another width."""
        return DataLoss(f"a base row does not have the {self.width} bytes of its table's rows: run kivi verify")

    def encode(self, version: Version) -> bytes:
        if not version.alive:
            head = version.cts.to_bytes(8, "little") + bytes((self.alive & ~_ALIVE,))
            return head.ljust(self.width, b"\0")
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
        head = self._struct.pack(version.cts, self.alive, bytes(nulls), *fixed)
        return head + b"".join(tail) if tail else head

    def decode(self, data: bytes) -> Version:
        """Raises DataLoss for bytes that are not a row of this layout or an earlier one."""
        if data[8:9] != self._flags and len(data) > 8:
            data = self.current(data)
            if not self.is_alive(data):
                if len(data) != self.width:
                    raise self.damaged()
                return Version(self.stamp_of(data), False, ())
        try:
            cts, _, nulls, *fixed = self._struct.unpack_from(data)
            cells = [fixed[at] + (fixed[at + 1] << 64) if wide else fixed[at] for at, wide in self._at]
            if nulls != self._no_nulls:
                cells = [None if nulls[i >> 3] >> (i & 7) & 1 else cell for i, cell in enumerate(cells)]
            end = self._struct.size
            for i, is_text in self._tails:
                if (size := cells[i]) is not None:
                    part = data[end : end + size]
                    if len(part) != size:
                        raise ValueError("cut short")
                    cells[i] = part.decode() if is_text else part
                    end += size
            if len(data) != end:
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
