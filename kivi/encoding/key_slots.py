"""Time slots in encoded row keys: which rows of an aggregate lie below a retention floor.

The slot is eight bytes of the key, whose order is that of time (``kivi.encoding.keys``), so a floor is eight bytes too
and no key is decoded::

    key    "server-1" 00 00 | 80 06 0a 24 ... (slot) | what comes after it
           ^ the group        ^ ``at``

Where they lie follows from the widths of the columns after the slot, or before it; only where text stands on both
sides the key is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kivi.encoding.keys import (
    decode_key,
    decode_key_columns,
    encode_key,
    encode_key_columns,
    key_width,
    large_binary,
    parts_of,
)
from kivi.model.lifetimes import slot_index
from kivi.model.schema import TableSchema
from kivi.model.types import ColumnType

__all__ = ["SLOT_BYTES", "KeySlot", "slot_bound"]

_TIME: Final = (ColumnType("timestamp"),)
SLOT_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class KeySlot:
    """Where the slot lies in the keys of one table. ``before`` and ``after``: bytes of the columns on either side, None
    where they differ from key to key."""

    types: tuple[ColumnType, ...]
    index: int
    before: int | None
    after: int | None

    @staticmethod
    def of(schema: TableSchema) -> KeySlot:
        """Of an aggregate with ``retention``."""

        def made() -> KeySlot:
            index = slot_index(schema.group_by)
            assert index is not None
            types = tuple(column.type for column in schema.key)
            return KeySlot(types, index, key_width(types[:index]), key_width(types[index + 1 :]))

        return schema.remembered(KeySlot, made)

    def at(self, key: bytes) -> int:
        """Where its eight bytes begin in a full key."""
        if self.after is not None:
            return len(key) - self.after - SLOT_BYTES
        if self.before is not None:
            return self.before
        return len(encode_key(self.types, decode_key(self.types, key)[: self.index]))

    def is_below(self, key: bytes, floor_us: int) -> bool:
        at = self.at(key)
        return key[at : at + SLOT_BYTES] < slot_bound(floor_us)

    def below(self, keys: Any, floor_us: int) -> npt.NDArray[np.bool_]:
        """Of a LargeBinaryArray of full keys: which lie below the floor."""
        return np.asarray(self.slots(keys) < floor_us)

    def slots(self, keys: Any) -> npt.NDArray[np.int64]:
        """Of a LargeBinaryArray of full keys: where their slots begin, in microseconds since 1970."""
        if not len(keys):
            return np.zeros(0, np.int64)
        if self.after is None and self.before is None:
            found: npt.NDArray[np.int64] = decode_key_columns(self.types, keys)[self.index].cast(pa.int64()).to_numpy()
            return found
        offsets, data = parts_of(keys)
        if (width := _width(offsets)) is not None:
            at = self._within(width)
            words = np.ndarray((len(keys),), ">u8", data, int(offsets[0]) + at, (width,)).astype(np.uint64)
        else:
            words = data[self._starts(offsets)[:, None] + np.arange(SLOT_BYTES)].view(">u8")[:, 0].astype(np.uint64)
        return np.asarray((words ^ np.uint64(1 << 63)).view(np.int64))

    def without(self, keys: Any) -> pa.LargeBinaryArray:
        """Of a LargeBinaryArray of full keys: what is left of them without the slots. As keys, none of it is the
        beginning of another one."""
        if not len(keys):
            return keys
        if self.after is None and self.before is None:
            columns = decode_key_columns(self.types, keys)
            types = list(self.types)
            del columns[self.index], types[self.index]
            return encode_key_columns(types, columns)
        offsets, data = parts_of(keys)
        left = offsets - offsets[0] - SLOT_BYTES * np.arange(len(offsets))
        if (width := _width(offsets)) is None:
            kept = np.ones(int(offsets[-1]), np.bool_)
            kept[: int(offsets[0])] = False
            kept[self._starts(offsets)[:, None] + np.arange(SLOT_BYTES)] = False
            return large_binary(left, data[: len(kept)][kept])
        at = self._within(width)
        around = [(start, end - start) for start, end in ((0, at), (at + SLOT_BYTES, width)) if end > start]
        if not around:
            return large_binary(left, np.zeros(0, np.uint8))
        rows = np.empty(len(keys), [(str(start), f"V{size}") for start, size in around])  # copied whole, as fields
        for start, size in around:
            rows[str(start)] = np.ndarray((len(keys),), f"V{size}", data, int(offsets[0]) + start, (width,))
        return large_binary(left, rows.view(np.uint8))

    def moved(self, keys: Any, slots: npt.NDArray[np.int64]) -> pa.LargeBinaryArray:
        """Full keys with other slots in the place of theirs; ``slots``: of each, or one of all."""
        if not len(keys):
            return keys
        words = (np.broadcast_to(slots, len(keys)).view(np.uint64) ^ np.uint64(1 << 63)).astype(">u8")
        if self.after is None and self.before is None:
            columns = decode_key_columns(self.types, keys)
            columns[self.index] = pa.array(np.broadcast_to(slots, len(keys)))
            return encode_key_columns(self.types, columns)
        offsets, data = parts_of(keys)
        data = data[int(offsets[0]) : int(offsets[-1])].copy()
        offsets = offsets - offsets[0]
        if (width := _width(offsets)) is not None:
            np.ndarray((len(keys),), ">u8", data, self._within(width), (width,))[...] = words
        else:
            data[self._starts(offsets)[:, None] + np.arange(SLOT_BYTES)] = words.view(np.uint8).reshape(-1, SLOT_BYTES)
        return large_binary(offsets, data)

    def _within(self, width: int) -> int:
        """Where the slot begins in keys of this width."""
        return width - self.after - SLOT_BYTES if self.after is not None else self.before or 0

    def _starts(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where the slots begin in the bytes of keys."""
        return offsets[1:] - (self.after + SLOT_BYTES) if self.after is not None else offsets[:-1] + (self.before or 0)


def _width(offsets: npt.NDArray[np.int64]) -> int | None:
    """Of keys, if all have the same."""
    width = int(offsets[1] - offsets[0])
    return width if (np.diff(offsets) == width).all() else None


def slot_bound(floor_us: int) -> bytes:
    """A floor as the bytes of a slot."""
    return encode_key(_TIME, (floor_us,))
