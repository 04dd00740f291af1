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

from kivi.encoding.keys import decode_key, decode_key_columns, encode_key, key_width
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
        rows = len(keys)
        if not rows:
            return np.zeros(0, np.int64)
        if self.after is None and self.before is None:
            found: npt.NDArray[np.int64] = decode_key_columns(self.types, keys)[self.index].cast(pa.int64()).to_numpy()
            return found
        offsets = np.frombuffer(keys.buffers()[1], np.int64, rows + 1, 8 * keys.offset)
        data = np.frombuffer(keys.buffers()[2], np.uint8)
        at = offsets[1:] - (self.after + SLOT_BYTES) if self.after is not None else offsets[:-1] + (self.before or 0)
        words = data[at[:, None] + np.arange(SLOT_BYTES)].view(">u8")[:, 0].astype(np.uint64)
        return np.asarray((words ^ np.uint64(1 << 63)).view(np.int64))


def slot_bound(floor_us: int) -> bytes:
    """A floor as the bytes of a slot."""
    return encode_key(_TIME, (floor_us,))
