"""Aggregates over aggregates, and many levels of aggregates at once.

An aggregate whose ``source=`` is another one is *flattened* where it is declared: its groups and measures become groups
and measures of the event table that both are of. So it is derived from the events, in the commit that brings them, like
any other, and holds what an aggregate declared there would hold, bit for bit (R21)::

    endpoint_5m  over invocations  by application, endpoint_id, slot = 5m of ts  calls = count(), slowest = max(resp)
    app_1h       over endpoint_5m  by application, slot = 1h of slot             calls = combine, slowest = combine
          is     over invocations  by application, slot = 1h of ts               calls = count(), slowest = max(resp)

That is possible where each of its rows is made of whole rows of its source: it groups by key columns of that, and its
slots are made of whole slots. Its measures are states of its source's measures, combined.

What is declared like this names its source (``declared_source``), which cannot be dropped before it.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kivi.errors import SchemaError
from kivi.model.declarations import TimeSlot, aggregate_schema, with_measures
from kivi.model.schema import GroupKey, OperatorCall, TableSchema
from kivi.model.slots import Slot

__all__ = ["altered_schema", "declared_schema", "flat_measure", "level_names", "level_schemas"]

_COMBINES: Final = {"sum": ("sum", "count"), "min": ("min",), "max": ("max",)}
"""Which measures an operator of an aggregate over them combines: a sum of counts is a count of all of them."""

Tables = Callable[[str], TableSchema]
Groups = Sequence[str | TimeSlot]
Duration = str | int | dt.timedelta


def declared_schema(
    table: Tables,
    name: str,
    source: str,
    group_by: Groups,
    measures: Mapping[str, OperatorCall] | None,
    derived: Mapping[str, str] | None = None,
    history: Duration | None = None,
    retention: Duration | None = None,
) -> TableSchema:
    """The schema of an aggregate over an event table, or over another aggregate. ``table`` finds tables by name.

    No ``measures``, over an aggregate: all of its measures. Raises SchemaError, InvalidArgument, NotFound.
    """
    over = table(source)
    if over.kind != "aggregate":
        return aggregate_schema(name, over, group_by, measures or {}, derived, history, retention)
    calls = measures or {measure.name: OperatorCall("combine", measure.name) for measure in over.measures}
    groups = [_flat_group(name, over, item) for item in group_by]
    combined = {measure: flat_measure(f"aggregate {name!r}", over, measure, call) for measure, call in calls.items()}
    flat = aggregate_schema(name, table(over.source or ""), groups, combined, derived, history, retention)
    return dataclasses.replace(flat, declared_source=over.name)


def altered_schema(
    table: Tables,
    schema: TableSchema,
    measures: Mapping[str, OperatorCall],
    derived: Mapping[str, str] | None = None,
    backfill: bool = True,
) -> TableSchema:
    """An aggregate with more measures: of what it was declared over, as ``declared_schema`` takes them.

    Raises SchemaError, InvalidArgument.
    """
    if schema.declared_source is not None and isinstance(measures, Mapping):
        over = table(schema.declared_source)
        measures = {
            measure: flat_measure(f"aggregate {schema.name!r}", over, measure, call)
            for measure, call in measures.items()
        }
    source = schema if schema.source is None else table(schema.source)
    return with_measures(schema, source, measures, derived, backfill)


def _flat_group(name: str, over: TableSchema, item: str | TimeSlot) -> str | TimeSlot:
    column = item.column if isinstance(item, TimeSlot) else item
    group = next((group for group in over.group_by if group.name == column), None)
    if group is None:
        keys = ", ".join(over.key_names)
        raise SchemaError(f"aggregate {name!r}: {column!r} is no key column of its source {over.name!r}: it has {keys}")
    if not isinstance(item, TimeSlot):
        return group.source if group.slot is None else TimeSlot(group.source, group.slot, group.name)
    if group.slot is not None and not group.slot.nests_in(item.slot):
        raise SchemaError(
            f"aggregate {name!r}: slots of {item.slot} are not made of whole slots of {over.name!r}, which are "
            f"{group.slot} long: {_fitting(group.slot)} fit; or declare it over the events, {over.source!r}"
        )
    return TimeSlot(group.source, item.slot, item.name)


def _fitting(finer: Slot) -> str:
    """Which widths are made of whole slots."""
    multiples = f"multiples of {finer.width}"
    if finer.is_fixed:
        return multiples
    where = f"in {finer.zone}" if finer.zone else "without a zone"
    if finer.unit == "us":
        return f"{where}, {multiples} that divide 24 hours, days, weeks, months, quarters and years"
    return f"{where}, {multiples}" + (", weeks, months, quarters and years" if finer.width == "1d" else "")


def flat_measure(what: str, over: TableSchema, measure: str, call: OperatorCall) -> OperatorCall:
    """What of the events a measure over an aggregate is. Raises SchemaError."""
    where = f"{what}: measure {measure!r}"
    if not isinstance(call, OperatorCall) or call.operator not in ("combine", *_COMBINES):
        raise SchemaError(f"{where} is over the aggregate {over.name!r}: write kivi.combine of one of its measures")
    if call.expression is not None or call.where is not None or call.options:  # == of expressions is an expression
        raise SchemaError(
            f"{where}: the states of {over.name!r} are made of all its events already, so where=, expressions and "
            f"options are for aggregates over the events, {over.source!r}"
        )
    found = next((each for each in over.measures if each.name == call.argument), None)
    if found is None:
        known = ", ".join(each.name for each in over.measures)
        raise SchemaError(f"{where}: {call.argument!r} is no measure of its source {over.name!r}: it has {known}")
    if call.operator != "combine" and found.operator not in _COMBINES[call.operator]:
        raise SchemaError(
            f"{where}: {call} cannot be had from {over.name!r}, where {found.name!r} is a {found.operator}: combine "
            f"it, kivi.combine({found.name!r}), or declare it over the events, {over.source!r}"
        )
    return found.call


# -- levels ---------------------------------------------------------------------------------------


def level_names(name: str, levels: Sequence[Sequence[str]], slots: Sequence[str]) -> list[str]:
    """``calls_customer_5m``: of each level each slot. Raises SchemaError where two are the same."""
    names = ["_".join((name, *columns, slot)) for columns in levels for slot in slots]
    twice = next((each for each in names if names.count(each) > 1), None)
    if twice is not None:
        raise SchemaError(f"levels and slots name the aggregate {twice!r} twice")
    return names


def level_schemas(
    table: Tables,
    name: str,
    source: str,
    levels: Sequence[Sequence[str]],
    slots: Sequence[str],
    measures: Mapping[str, OperatorCall] | None,
    derived: Mapping[str, str] | None = None,
    history: Duration | None = None,
    retention: Duration | Mapping[str, Duration] | None = None,
    tz: str | None = None,
) -> list[TableSchema]:
    """An aggregate for each level, which is the columns that it groups by, and each width of slots.

    ``retention``: of all of them, or by the widths of slots, as they stand in ``slots``; of others there is none.

    Slots are those of the event time, or of the slots of a source that is an aggregate. Raises as ``declared_schema``.
    """
    over = table(source)
    time = _time_of(over)
    names = iter(level_names(name, levels, slots))
    return [
        declared_schema(
            table,
            next(names),
            source,
            [*columns, TimeSlot(time, Slot.parse(slot, tz), "slot")],
            measures,
            derived,
            history,
            retention.get(slot) if isinstance(retention, Mapping) else retention,
        )
        for columns in levels
        for slot in slots
    ]


def _time_of(over: TableSchema) -> str:
    if over.kind == "aggregate":
        slotted: list[GroupKey] = [group for group in over.group_by if group.slot is not None]
        if len(slotted) != 1:
            raise SchemaError(
                f"{over.name!r} is grouped by {len(slotted)} time slots, and levels need one: use create_aggregate"
            )
        return slotted[0].name
    return over.event_time or ""
