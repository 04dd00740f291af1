"""Measures of matches: one row each, in columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kivi.arrow.columns import arrow_field, arrow_from_stored, arrow_type, flat, stored_array
from kivi.encoding.event_names import POSITION, STAMP
from kivi.errors import OutOfRange
from kivi.model.patterns import Match, MatchMeasure
from kivi.model.types import INT64_MAX, ColumnType
from kivi.patterns.matching import Found
from kivi.patterns.rows import Rows

__all__ = ["FIRST", "answer_schema", "answered"]

FIRST: Final = ("\0time", STAMP, POSITION)
"""The columns behind those of the answer: the name of each match's first row, and before it its event time."""

Array = npt.NDArray[Any]


def answer_schema(match: Match) -> pa.Schema:
    return pa.schema([arrow_field(name, type_) for name, type_ in match.columns])


def answered(
    match: Match, rows: Rows, found: Found, more: Mapping[str, Array] | None = None, failed: Array | None = None
) -> pa.RecordBatch:
    """One row for each match, in the order of its first row, and ``FIRST``. ``more``: further columns, of each match.
    Raises OutOfRange for a sum that does not fit; or, in ``failed``, sets which matches have one, which is null."""
    lengths = found.ends - found.begins
    of = np.repeat(np.arange(len(lengths)), lengths)
    places = np.arange(len(of)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + np.repeat(found.begins, lengths)
    symbols = np.concatenate([np.array(each, np.int64) for each in found.symbols]) if found.symbols else places[:0]
    firsts = pa.array(found.begins)
    columns = [_shown(type_, rows.events.column(name).take(firsts)) for name, type_ in match.partition_by]
    for measure in match.measures:
        chosen = slice(None) if not measure.symbol else symbols == found.names.index(measure.symbol)
        columns.append(_measured(measure, rows, of[chosen], places[chosen], len(lengths), failed))
    named = [pa.array(rows.times[found.begins]), *(rows.events.column(name).take(firsts) for name in FIRST[1:])]
    order = np.lexsort([column.to_numpy() for column in named[::-1]])
    answer = pa.RecordBatch.from_arrays(columns, schema=answer_schema(match))
    for name, column in zip(FIRST, named, strict=True):
        answer = answer.append_column(name, column)
    for name, values in (more or {}).items():
        answer = answer.append_column(name, pa.array(values))
    return answer.take(pa.array(order))


def _shown(type_: ColumnType, column: Any) -> Any:
    return flat(column).cast(arrow_type(type_))


def _measured(measure: MatchMeasure, rows: Rows, of: Array, places: Array, matches: int, failed: Array | None) -> Any:
    """A measure of some rows: ``of`` which match each is, ascending, and its place among ``rows``."""
    column = flat(rows.events.column(measure.column).take(pa.array(places))) if measure.column else None
    if column is not None and measure.operator not in ("first", "last") and column.null_count:
        known = np.asarray(column.is_valid())
        column, of = column.filter(pa.array(known)), of[known]
    begins = np.searchsorted(of, np.arange(matches))
    counts = np.searchsorted(of, np.arange(matches), "right") - begins
    if measure.operator == "count":
        return pa.array(counts)
    assert column is not None
    missing = counts == 0
    if measure.operator in ("first", "last"):
        at = begins if measure.operator == "first" else begins + counts - 1
        return _shown(measure.type, column.take(pa.array(np.where(missing, 0, at), mask=missing)))
    there = ~missing
    if measure.operator in ("min", "max"):
        values = stored_array(measure.type, column)
        least = np.minimum if measure.operator == "min" else np.maximum
        out = np.zeros(matches, values.dtype)
        out[there] = least.reduceat(values, begins[there]) if there.any() else []
        return arrow_from_stored(measure.type, out, missing)
    return _summed(measure, column, begins[there], counts[there], there, failed)


def _summed(
    measure: MatchMeasure, column: Any, begins: Array, counts: Array, there: Array, failed: Array | None
) -> Any:
    """``sum`` and ``avg``, of matches that have values. Integers and decimals are added exactly."""
    type_, scale = measure.type, column.type.scale if pa.types.is_decimal(column.type) else 0
    is_float = pa.types.is_floating(column.type)
    kind = ColumnType("float64") if is_float else ColumnType("decimal", 18, scale) if scale else ColumnType("int64")
    values = stored_array(kind, column.cast(arrow_type(kind)))
    if len(values) and not is_float and float(np.abs(values.astype(float)).max()) * float(counts.max()) > INT64_MAX / 2:
        values = values.astype(object)
    with np.errstate(over="ignore", invalid="ignore"):
        totals = np.add.reduceat(values, begins).tolist() if len(begins) else []
    if measure.operator == "avg":  # the quotient of Python's integers is rounded once
        totals = [total / (count * 10**scale) for total, count in zip(totals, counts.tolist(), strict=True)]
    if type_.name == "float64":
        fits = list(map(math.isfinite, totals))
    else:
        fits = [type_.stored_min <= total <= type_.stored_max for total in totals]
    if not all(fits):
        if failed is None:
            raise OutOfRange(f"{measure.name} of a match does not fit in {type_}", column=measure.name)
        failed[np.flatnonzero(there)[~np.array(fits)]] = True
        totals = [total if fit else 0 for total, fit in zip(totals, fits, strict=True)]
    out = np.zeros(len(there), np.float64 if type_.name == "float64" else np.int64)
    out[there] = totals
    return arrow_from_stored(type_, out, ~there)
