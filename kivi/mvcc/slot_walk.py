"""Walking through a table for the rows of some time slots, which lie all over it: keys begin with the group.

::

    keys        (a, 17:00) (a, 17:05) (a, 17:10) ... (a, 23:55) (b, 17:00) ...        wanted: 17:05 up to 17:10
    the walk    step       found      seek --------------------> step       ...

"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kivi.encoding.key_slots import SLOT_BYTES, KeySlot, slot_bound
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, table_prefix
from kivi.engine import Engine
from kivi.model.schema import TableSchema

__all__ = ["rows_between"]

_STEPS: Final = 32
"""A seek costs as much as so many steps of a scan, so as many rows are passed over before it is worth one."""


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
    tail = SLOT_BYTES if space is Space.VERSION else 0  # a version's key ends in its timestamp
    low, high = b"" if low_us is None else slot_bound(low_us), slot_bound(floor_us)
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
        own = key[at : at + SLOT_BYTES]
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
