"""Measures as they are declared, made into columns: every rule of what a measure may observe is here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from kivi.errors import SchemaError
from kivi.model.expressions import asks_hierarchy, bind, bind_value, names
from kivi.model.names import check_name
from kivi.model.quantiles import scale_of
from kivi.model.schema import Column, Measure, OperatorCall, TableSchema
from kivi.model.states import KINDS, OWN, State, precision_of
from kivi.model.types import ColumnType, shown

__all__ = ["NUMBERS", "PLAIN", "TIMED", "delta_column", "measured", "observed_columns"]

PLAIN: Final = ("sum", "count", "min", "max")
"""Measures that are numbers."""

NUMBERS: Final = ("int64", "float64", "decimal")
_ORDERED: Final = (*NUMBERS, "timestamp")
_ANY: Final = (*_ORDERED, "bool", "string", "bytes")
_TAKES: Final = {
    "quantiles": NUMBERS, "weighted_quantiles": NUMBERS, "avg": NUMBERS, "var": NUMBERS, "stddev": NUMBERS,
    "largest": _ORDERED, "smallest": _ORDERED,
    "distinct": _ANY, "first": _ANY, "last": _ANY, "argmax": _ANY, "argmin": _ANY, "top": _ANY,
}  # fmt: skip
TIMED: Final = frozenset({"first", "last", "argmax", "argmin"})
"""Measures that use the total order of events: event time, commit, position in the commit."""

_LARGEST_MAX: Final = 1_000
_MOST_MAX: Final = 100_000
_FLOAT: Final = ColumnType("float64")


def measured(
    source: TableSchema, measures: Mapping[str, OperatorCall], checked: bool = True
) -> tuple[list[Column], list[Measure]]:
    """The columns of measures, and what they measure; ``checked``: their names become names of columns for good.

    Raises SchemaError, InvalidArgument.
    """
    columns, built = [], []
    for name, call in measures.items():
        if checked:
            check_name(name, "measure")
        if not isinstance(call, OperatorCall):
            raise SchemaError(
                f"measure {name!r} must be kivi.sum, count, quantiles or another measure, not {shown(call)}"
            )
        column, measure = _measure(source, name, call)
        columns.append(column)
        built.append(measure)
    return columns, built


def _measure(source: TableSchema, name: str, call: OperatorCall) -> tuple[Column, Measure]:
    if call.operator == "combine":
        raise SchemaError(f"measure {name!r}: kivi.combine is for aggregates whose source is an aggregate")
    type_ = ColumnType("int64")
    for part in (call.expression, call.where):
        if part is not None and asks_hierarchy(part):
            raise SchemaError(
                f"measure {name!r}: under() and covers() ask a hierarchy as of a snapshot, and a measure observes "
                "events once, whatever becomes of it: group by the column, and ask for what is under a value in where= "
                "of the read, question or rollup, one for each value"
            )
    if call.expression is not None:
        _, type_ = bind_value(call.expression, lambda column: source.column(column).type)
    elif call.argument is not None:
        type_ = source.column(call.argument).type
    elif call.operator != "count":
        raise SchemaError(f"measure {name!r}: {call.operator} needs a column of {source.name!r}")
    if call.where is not None:
        bind(call.where, lambda column: source.column(column).type)
    measure = call.as_measure(name)
    if call.operator == "count":
        return Column(name, ColumnType("int64"), "sum"), measure
    if call.operator in PLAIN:
        if type_.name == "decimal" and call.operator == "sum":
            type_ = ColumnType("decimal", 18, type_.scale)
        return delta_column(name, call, type_), measure
    return _state_column(source, name, call, type_), measure


def delta_column(name: str, call: OperatorCall, type_: ColumnType) -> Column:
    """A column that is a number: of a SUM, COUNT, MIN or MAX. Raises SchemaError."""
    if call.operator in ("sum", "count"):
        if type_.name not in NUMBERS:
            raise SchemaError(f"column {name!r}: {call.operator} needs int64, float64 or decimal, not {type_}")
        return Column(name, type_, "sum")
    if call.operator not in ("min", "max"):
        raise SchemaError(f"column {name!r}: {call.operator} is a measure of aggregates: use sum, min, max or count")
    if type_.name not in _ORDERED:
        raise SchemaError(f"column {name!r}: {call.operator} needs a number or a timestamp, not {type_}")
    return Column(name, type_, call.operator)


def _state_column(source: TableSchema, name: str, call: OperatorCall, type_: ColumnType) -> Column:
    kind, options = call.operator, dict(call.options)
    own = OWN.get(kind)
    takes = own.takes if own is not None else _TAKES.get(kind)
    if takes is None:
        known = ", ".join(["sum", "count", "min", "max", *KINDS, *OWN])
        raise SchemaError(f"measure {name!r}: there is no measure {kind!r} here; there are {known}")
    if type_.name not in takes:
        raise SchemaError(f"measure {name!r}: {kind} observes {', '.join(takes)}, not {type_}")
    if own is not None:
        return Column(name, own.result, kind, State(own.id, kind, type_))
    by, size, result = None, 0, type_
    match kind:
        case "quantiles" | "weighted_quantiles":
            size = scale_of(options.get("accuracy", 0.01))
            result = ColumnType("quantiles", 0, size)
            if kind == "weighted_quantiles":
                by = source.column(options.get("by")).type  # type: ignore[arg-type]
                if by.name != "int64":
                    raise SchemaError(f"measure {name!r}: weights are whole numbers, an int64 column, not {by}")
        case "distinct":
            size, result = precision_of(options.get("error", 0.01)), ColumnType("int64")
        case "avg" | "var" | "stddev":
            size, result = int(bool(options.get("population"))), _FLOAT
        case "argmax" | "argmin":
            by = source.column(options.get("by")).type  # type: ignore[arg-type]
            if by.name not in _ORDERED:
                raise SchemaError(f"measure {name!r}: {kind} compares numbers or timestamps, not {by}")
        case "largest" | "smallest":
            size = _whole(name, "n", options.get("n"), _LARGEST_MAX)
            result = ColumnType("list", of=str(type_))
        case "top":
            size = _whole(name, "most", options.get("most", 1_000), _MOST_MAX)
            result = ColumnType("top", 0, _whole(name, "k", options.get("k"), size), str(type_))
    return Column(name, result, kind, State(KINDS[kind], kind, type_, by, size))


def observed_columns(source: TableSchema, measures: Iterable[Measure]) -> tuple[tuple[str, str], ...]:
    """The columns, and their types as text, that measures compute with, compare, or keep states of."""
    found: dict[str, str] = {}
    for measure in measures:
        call = measure.call
        used = [name for part in (call.expression, call.where) if part is not None for name in names(part)]
        for name in (*used, measure.source, measure.by):
            if name is not None and (used or measure.operator not in PLAIN):
                found[name] = str(source.column(name).type)
    return tuple(sorted(found.items()))


def _whole(name: str, what: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise SchemaError(f"measure {name!r}: {what} is a whole number from 1 to {most:,}, not {shown(value)}")
    return value
