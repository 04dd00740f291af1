"""Lifetimes: by which column of its key an aggregate with ``retention`` forgets, and where a floor of it may lie.

A row is forgotten as a whole, so its floor lies where a slot begins: the rows below it are those whose slot has ended
by then, and the events that make them are those before it. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from kivi.model.schema import GroupKey, TableSchema

__all__ = ["retention_slot", "slot_index", "slot_start"]


def slot_index(group_by: Sequence[GroupKey]) -> int | None:
    """The place, in the key, of the column by which rows are forgotten: the last that is a time slot; None if none."""
    return max((i for i, group in enumerate(group_by) if group.slot is not None), default=None)


def retention_slot(schema: TableSchema) -> GroupKey:
    """The group key by which an aggregate with ``retention`` forgets its rows."""
    index = slot_index(schema.group_by)
    assert index is not None, "an aggregate with retention was declared with a time slot"
    return schema.group_by[index]


def slot_start(group: GroupKey, time_us: int) -> int:
    """The start, in microseconds since 1970, of the slot that a moment falls in."""
    assert group.slot is not None, "rows are forgotten by their slots"
    return group.slot.start(time_us)
