"""Walking through a table for the rows of some time slots, which lie all over it: keys begin with the group.

::

    keys        (a, 17:00) (a, 17:05) (a, 17:10) ... (a, 23:55) (b, 17:00) ...        wanted: 17:05 up to 17:10
    the walk    passed     found      seek --------------------> passed      ...

Keys come in lists, in which the rows of a group are found by bisection: no statement runs once per row. A seek costs as
much as some dozen keys, so a group that ends within the list is not worth one. Who erases them asks for ``Spans``:
of a group of which more than a few are wanted none is listed, and the walk seeks to the next group.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final

from kivi.encoding.key_slots import SLOT_BYTES, KeySlot, slot_bound
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, table_prefix
from kivi.engine import Engine
from kivi.model.schema import TableSchema

__all__ = ["Lists", "Spans", "keys_between", "keys_of", "pairs_of"]

_KEYS: Final = 64
_FEW: Final = 8

Spans = list[tuple[bytes, bytes]]
"""Ranges of the engine's keys: the first, and the end, which is exclusive."""

Lists = Callable[[Engine, bytes, bytes | None], Iterator[list[bytes]]]
"""The engine's keys of a range, in lists; none is empty."""


def keys_of(engine: Engine, start: bytes, end: bytes | None) -> Iterator[list[bytes]]:
    """Keys alone: quick, and silent about damage."""
    return engine.keys(start, end, _KEYS)


def pairs_of(engine: Engine, start: bytes, end: bytes | None) -> Iterator[list[bytes]]:
    """The keys of a scan, which raises DataLoss where it meets damage."""
    keys = (key for key, _ in engine.scan(start, end))
    return iter(lambda: list(itertools.islice(keys, _KEYS)), [])


def keys_between(
    engine: Engine,
    schema: TableSchema,
    space: Space,
    start: bytes,
    end: bytes | None,
    *,
    lists: Lists,
    low_us: int | None,
    floor_us: int,
    rows: int,
    seeks: int,
    spans: Spans | None = None,
) -> tuple[list[bytes], bytes | None]:
    """Some of the engine's keys of ROW or VERSION in [start, end) whose slot lies in [low, floor); and where to go on
    from, None at the end.

    Not many more than ``rows`` are given, and at most so many ``seeks`` made. Of a group with more than a few their
    range is added to ``spans``, if given, instead.
    """
    slot, head = KeySlot.of(schema), len(table_prefix(space, schema.id))
    tail = SLOT_BYTES if space is Space.VERSION else 0  # a version's key ends in its timestamp
    low, high = b"" if low_us is None else slot_bound(low_us), slot_bound(floor_us)
    found: list[bytes] = []

    def group_of(name: bytes) -> bytes:
        return name[: head + slot.at(name[head : len(name) - tail])]

    at: bytes | None = start
    for _ in range(seeks):
        assert at is not None
        at = _collect(lists(engine, at, end), group_of, low, high, rows, found, spans)
        if at is None or (end is not None and at >= end):
            return found, None
        if len(found) >= rows:
            break
    return found, at


def _collect(
    lists: Iterator[list[bytes]],
    group_of: Callable[[bytes], bytes],
    low: bytes,
    high: bytes,
    rows: int,
    found: list[bytes],
    spans: Spans | None,
) -> bytes | None:
    """Adds to ``found``. Where to seek to then; None: there is nothing after it."""
    for names in lists:
        at = 0
        while at < len(names):
            group = group_of(names[at])
            first = bisect_left(names, group + low, at)
            beyond = bisect_left(names, group + high, first)
            next_group = prefix_end(group)
            if spans is not None and beyond - first > _FEW:
                spans.append((group + low, group + high))
                if beyond == len(names):
                    return next_group
            else:
                found += names[first:beyond]
                if len(found) >= rows:
                    return found[-1] + b"\0"
                if beyond == len(names):
                    break  # the next list may go on with this group
            if next_group is None:
                return None
            at = bisect_left(names, next_group, beyond)
            if at == len(names):
                return next_group
    return None
