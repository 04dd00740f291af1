"""Time slots in encoded row keys: which rows of an aggregate lie below a retention floor.

The slot is eight bytes of the key, whose order is that of time (``kivi.encoding.keys``), so a floor is eight bytes too
and no key is decoded::

    key    "server-1" 00 00 | 80 06 0a 24 ... (slot) | what comes after it
           ^ the group        ^ ``at``

Where they lie follows from the widths of the columns after the slot, or before it; only where text stands on both
sides the key is decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kivi.encoding.keys import decode_key, decode_key_columns, encode_key, key_width, prefix_end
from kivi.encoding.keyspaces import Space, table_prefix
from kivi.engine import Engine
from kivi.model.lifetimes import slot_index
from kivi.model.schema import TableSchema
from kivi.model.types import ColumnType

__all__ = ["KeySlot", "rows_between"]

_TIME = (ColumnType("timestamp"),)
_BYTES = 8
_STEPS = 32
"""A seek costs as much as so many steps of a scan, so as many rows are passed over before it is worth one."""


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
            return len(key) - self.after - _BYTES
        if self.before is not None:
            return self.before
        return len(encode_key(self.types, decode_key(self.types, key)[: self.index]))

    def is_below(self, key: bytes, floor_us: int) -> bool:
        at = self.at(key)
        return key[at : at + _BYTES] < bound_of(floor_us)

    def below(self, keys: Any, floor_us: int) -> npt.NDArray[np.bool_]:
        """Of a LargeBinaryArray of full keys: which lie below the floor."""
        rows = len(keys)
        if not rows:
            return np.zeros(0, np.bool_)
        if self.after is None and self.before is None:
            slots = decode_key_columns(self.types, keys)[self.index].cast(pa.int64()).to_numpy()
            return np.asarray(slots < floor_us)
        offsets = np.frombuffer(keys.buffers()[1], np.int64, rows + 1, 8 * keys.offset)
        data = np.frombuffer(keys.buffers()[2], np.uint8)
        at = offsets[1:] - (self.after + _BYTES) if self.after is not None else offsets[:-1] + (self.before or 0)
        slots = data[at[:, None] + np.arange(_BYTES)].view(">u8")[:, 0]
        return np.asarray(slots < int.from_bytes(bound_of(floor_us), "big"))


def bound_of(floor_us: int) -> bytes:
    """A floor as the bytes of a slot."""
    return encode_key(_TIME, (floor_us,))


def rows_between(
    engine: Engine,
    schema: TableSchema,
    space: Space,
    start: bytes,
    end: bytes | None,
    *,
    low_us: int | None,
    floor_us: int,
    rows: int,
    seeks: int,
) -> tuple[list[tuple[bytes, int]], bytes | None]:
    """Some of the engine's keys of ROW or VERSION in [start, end) whose slot lies in [low, floor), each with the bytes
    that it and its value take; and where to go on from, None at the end.

    It goes from group to group: of each it passes over what lies outside by a seek. At most so many ``rows`` are given,
    and so many ``seeks`` made.
    """
    slot, head = KeySlot.of(schema), len(table_prefix(space, schema.id))
    tail = _BYTES if space is Space.VERSION else 0  # a version's key ends in its timestamp
    low, high = b"" if low_us is None else bound_of(low_us), bound_of(floor_us)
    found: list[tuple[bytes, int]] = []
    at: bytes | None = start
    for _ in range(seeks):
        assert at is not None
        at = _passed(engine.scan(at, end), slot, head, tail, low, high, rows, found)
        if at is None or (end is not None and at >= end):
            return found, None
        if len(found) >= rows:
            break
    return found, at


def _passed(
    pairs: Iterator[tuple[bytes, bytes]],
    slot: KeySlot,
    head: int,
    tail: int,
    low: bytes,
    high: bytes,
    rows: int,
    found: list[tuple[bytes, int]],
) -> bytes | None:
    """Adds to ``found`` as long as neighbours belong to it. Where to seek to then; None: there is nothing after it."""
    passed = 0
    for name, value in pairs:
        key = name[head : len(name) - tail]
        at = slot.at(key)
        own = key[at : at + _BYTES]
        if low <= own < high:
            found.append((name, len(name) + len(value)))
            passed = 0
            if len(found) >= rows:
                return name + b"\0"
            continue
        passed += 1
        if passed > _STEPS:
            group = name[: head + at]
            return group + low if own < low else prefix_end(group)
    return None
