"""Rollups: an aggregate's rows combined to a coarser level, or to longer slots, when they are read.

::

    rows of endpoint_5m                      by=["application"], step="1h"
    (shop, /cart, 17:05)  10  [state]   \\
    (shop, /pay,  17:05)   3  [state]    >   (shop, 17:00)  18  [state]
    (shop, /cart, 17:10)   5  [state]   /

States are combined, so a rollup equals what an aggregate declared at that level would hold over the same events, bit
for bit (R21); sums of floats are equal up to the order of addition, which here is that of the rows' keys.

Which rows: those whose slot begins in [``start``, ``end``), or, with ``last``, in the time before the end of the newest
slot that is not of the future: that begins at most ``AHEAD_US`` after the snapshot's commit time. So one event of a
wrong clock does not move the range for all, and a snapshot has one answer, now and later; later slots enter when a
commit comes that is so late. Where all rows are of the future, as of a simulation, it ends with the newest of them
(decision 0115). ``Rollup`` is data, in stored form; ``rolled_schema`` is the table that the result is one of.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.derived_columns import inputs_of, parse_expression
from kivi.model.lifetimes import slot_index
from kivi.model.names import name_list
from kivi.model.schema import GroupKey, TableSchema
from kivi.model.slots import MOMENT_MAX_US, Slot, parse_duration_us
from kivi.model.types import ColumnType

__all__ = [
    "AHEAD_US",
    "Ends",
    "Rollup",
    "aligned",
    "derived_from",
    "ends_before",
    "range_of_last",
    "rolled_outputs",
    "rolled_schema",
    "rollup_of",
    "stored_slot",
]

_MOMENT = ColumnType("timestamp")
AHEAD_US: Final = 600_000_000
"""A clock may be ahead of the store's. What is later than that is of a wrong one."""


@dataclass(frozen=True, slots=True)
class Rollup:
    """``by``: key columns that are no slot, in the order of the result. ``step``: the slots of the result; None: it has
    no slot. Moments and ``last_us`` are microseconds; None is no bound. ``measures``: measures and derived columns."""

    by: tuple[str, ...] = ()
    step: Slot | None = None
    start_us: int | None = None
    end_us: int | None = None
    last_us: int | None = None
    measures: tuple[str, ...] = ()


def stored_slot(schema: TableSchema) -> tuple[int, GroupKey, Slot] | None:
    """The place in the key, the group key, and the slots by which an aggregate is rolled up; None: it has none."""
    index = slot_index(schema.group_by)
    if index is None:
        return None
    group = schema.group_by[index]
    assert group.slot is not None
    return index, group, group.slot


def rollup_of(
    schema: TableSchema,
    by: Iterable[str] = (),
    step: str | int | dt.timedelta | Slot | None = None,
    tz: str | None = None,
    start: Any = None,
    end: Any = None,
    last: str | int | dt.timedelta | None = None,
    measures: Iterable[str] | None = None,
) -> Rollup:
    """What a caller asks of a table, checked. Raises SchemaError, InvalidArgument."""
    if schema.kind != "aggregate":
        raise InvalidArgument(f"{schema.name!r} is no aggregate, and only the states of aggregates are rolled up")
    names = _by(schema, by)
    stored = stored_slot(schema)
    asked = {"step": step, "start": start, "end": end, "last": last}
    if stored is None and (given := next((name for name, value in asked.items() if value is not None), None)):
        raise InvalidArgument(f"{given} is for aggregates with a time slot in their key, and {schema.name!r} has none")
    if step is None and tz is not None:
        raise InvalidArgument("tz is the time zone of step: give that too")
    if last is not None and not (start is None and end is None):
        raise InvalidArgument("last is a range that moves with the newest slot: leave out start and end, or last")
    slot = None
    if stored is not None and step is not None:
        slot = _step(schema, stored[2], step, tz)
    start_us, end_us = (
        None if stored is None else aligned(schema, stored[2], what, moment)
        for what, moment in (("start", start), ("end", end))
    )
    last_us = None if last is None else parse_duration_us(last, "last")
    chosen = _measures(schema, names, stored[1].name if stored is not None and slot is not None else None, measures)
    return Rollup(names, slot, start_us, end_us, last_us, chosen)


def _by(schema: TableSchema, by: Iterable[str]) -> tuple[str, ...]:
    names = name_list(by, "by")
    groups = {group.name: group for group in schema.group_by}
    plain = [name for name, group in groups.items() if group.slot is None]
    for name in names:
        if name not in plain:
            why = "is a time slot: give step" if name in groups else "is no key column"
            known = ", ".join(plain) or "nothing"
            raise SchemaError(f"by: {name!r} {why}; {schema.name!r} can be rolled up by {known}")
    if len(set(names)) != len(names):
        raise InvalidArgument(f"by names a column twice: {', '.join(names)}")
    return names


def _step(schema: TableSchema, stored: Slot, step: str | int | dt.timedelta | Slot, tz: str | None) -> Slot:
    slot = step if isinstance(step, Slot) else Slot.parse(step, stored.zone or None if tz is None else tz)
    if not stored.nests_in(slot):
        raise InvalidArgument(
            f"slots of {slot} are not made of whole slots of {schema.name!r}, which are {stored} long: "
            f"use a multiple of {stored.width}" + ("" if stored.is_fixed else f" in {stored.zone or 'UTC'}")
        )
    return slot


def aligned(schema: TableSchema, stored: Slot, what: str, moment: Any) -> int | None:
    """A bound, in microseconds since 1970. Raises InvalidArgument where it is within a slot."""
    if moment is None:
        return None
    value = int(_MOMENT.to_stored(moment, what))
    try:
        start = stored.start(value)
    except OverflowError:
        raise InvalidArgument(
            f"{what} is {value} us, where there are no slots: the years 1 to 9999 have some"
        ) from None
    if start != value:
        near = [each for each in (start, stored.end(start)) if _MOMENT.stored_min <= each <= _MOMENT.stored_max]
        moments = " or ".join(_MOMENT.from_stored(each).isoformat() for each in near) or "one in the years 1 to 9999"
        raise InvalidArgument(f"{what} lies within a slot of {schema.name!r}, which are {stored} long: it is {moments}")
    return value


def _measures(
    schema: TableSchema, by: Sequence[str], slot: str | None, measures: Iterable[str] | None
) -> tuple[str, ...]:
    derived, kept = dict(schema.derived), {*by, *([slot] if slot is not None else ())}

    def missing(name: str) -> list[str]:
        """The key columns that a derived column needs, and the result does not have."""
        inputs = derived_from(schema, name)
        return [column for column in inputs if column in schema.key_names and column not in kept]

    if measures is None:
        return (*(column.name for column in schema.shown_columns), *(name for name in derived if not missing(name)))
    names = tuple(dict.fromkeys(name_list(measures, "measures")))
    if not names:
        raise InvalidArgument("measures names no measure: leave it out to read all of them")
    for name in names:
        if name not in schema.index_of and schema.expression_of(name) is None:
            known = ", ".join((*schema.index_of, *derived))
            raise SchemaError(f"{name!r} is no measure of {schema.name!r}: it has {known}")
        if needed := missing(name):
            raise SchemaError(f"{name!r} is computed from {needed[0]!r}, which is rolled up: add it to by")
    return names


def derived_from(schema: TableSchema, name: str) -> set[str]:
    """The columns that a derived column, declared or named by its text, is computed from; none of any other name."""
    text = schema.expression_of(name)
    types = {column: known.type for column, known in schema.by_name.items()}
    return set() if text is None else inputs_of(parse_expression(text, types))


def rolled_schema(schema: TableSchema, rollup: Rollup) -> TableSchema:
    """The table that a rollup is a content of. Besides ``rollup.measures`` it has what derived columns need."""
    return schema.remembered(("rolled", rollup.by, rollup.step, rollup.measures), lambda: _rolled(schema.shown, rollup))


def _rolled(schema: TableSchema, rollup: Rollup) -> TableSchema:
    derived = tuple((name, text) for name, text in schema.derived if name in rollup.measures)
    needed = {*rollup.measures, *(column for name in rollup.measures for column in derived_from(schema, name))}
    kept = [i for i, column in enumerate(schema.columns) if column.name in needed] or [0]
    groups = [next(group for group in schema.group_by if group.name == name) for name in rollup.by]
    stored = stored_slot(schema)
    if rollup.step is not None and stored is not None:
        groups.append(GroupKey.of_slot(stored[1].name, stored[1].source, rollup.step))
    return dataclasses.replace(
        schema,
        key=tuple(schema.by_name[group.name] for group in groups),
        columns=tuple(schema.columns[i] for i in kept),
        measures=tuple(schema.measures[i] for i in kept),
        group_by=tuple(groups),
        derived=derived,
        retention_us=None,
    )


def rolled_outputs(schema: TableSchema, rollup: Rollup) -> tuple[str, ...]:
    """The columns of the result, in order: ``by``, the slot, measures and derived columns."""
    return (*rolled_schema(schema, rollup).key_names, *rollup.measures)


@dataclass(frozen=True, slots=True)
class Ends:
    """Which slots a ``last`` time may end with at a snapshot: those that begin before ``high_us``; None: any.

    ``beyond``: later ones may be there, which are left out; unless they are ``alone``.
    """

    high_us: int | None = None
    beyond: bool = False
    alone: bool = False

    @property
    def bound_us(self) -> int | None:
        """Which slots belong to the range, if they are not before it."""
        return None if self.alone else self.high_us


def ends_before(schema: TableSchema, commit_time_us: int) -> int:
    """Where the last slot ends that is not of the future at a snapshot of that commit time."""
    stored = stored_slot(schema)
    assert stored is not None
    return stored[2].end(stored[2].start(commit_time_us + AHEAD_US))


def range_of_last(schema: TableSchema, rollup: Rollup, newest_us: int) -> int:
    """From which moment on slots belong to a rollup of the ``last`` time, given where the newest of them begins.

    They end with the newest slot of the result: with ``step="1m", last="15m"`` it has 15 slots. They are whole slots of
    the result, the newest at least, about as many as make up that time: days of 23 hours and months of 31 days count as
    days and months do. So no row is of a part of its slot, and the newest row is always within its own range.
    """
    stored = stored_slot(schema)
    assert stored is not None
    assert rollup.last_us is not None
    slot = rollup.step or stored[2]
    newest = slot.start(newest_us)
    wanted = max(slot.end(newest) - rollup.last_us, -MOMENT_MAX_US)
    before = slot.start(wanted)
    after = slot.end(before)
    return min(newest, before if wanted - before <= after - wanted else after)
