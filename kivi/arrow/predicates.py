"""Expressions on columns: the rows of a batch that a bound predicate selects, and the values of a bound expression.

What an expression means is in ``kivi.model.expressions``; this is its evaluator for Arrow. Kernels are called directly,
since starting Arrow's expression engine costs more than most batches: one for a comparison of a column with a literal.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.arithmetic import (
    COMPARE,
    calculated_floats,
    calculated_integers,
    compared,
    exact_floats,
    floats,
    rescaled,
    within,
)
from kivi.arrow.columns import arrow_type, decimals, flat, literal, stored_array, stored_column
from kivi.errors import OutOfRange
from kivi.model.expressions import COMPARISONS, HIERARCHY, TEXT, Expr
from kivi.model.expressions.positions import haversine, haversine_max, is_position, latitudes
from kivi.model.expressions.quads import cells_of
from kivi.model.expressions.rows import out_of_range, unresolved
from kivi.model.expressions.time_parts import parts_of
from kivi.model.types import ColumnType

__all__ = ["Known", "Values", "attempted", "evaluate", "filter_batch", "mask", "spread", "true_places"]

Types = Mapping[str, ColumnType]
_BOOL: Final = ColumnType("bool")
_KLEENE: Final = {"and": pc.and_kleene, "or": pc.or_kleene}
_HAS: Final = {"startswith": pc.starts_with, "contains": pc.match_substring, "matches": pc.match_substring_regex}


def filter_batch(batch: Any, predicate: Expr, types: Types, columns: Sequence[str] | None = None) -> Any:
    """The rows of a RecordBatch or Table that a bound predicate selects: those where it is true, not unknown.

    ``columns``: at least one of its columns, which the result has; None: all. Raises OutOfRange if a row's result is an
    error.
    """
    if predicate.column and predicate.op not in HIERARCHY:
        selected = _of_column(batch.column(predicate.column), predicate, types[predicate.column])
    else:
        selected = _checked(_evaluated(batch, predicate, types))
    if columns is not None:
        batch = batch.select(list(columns))
    if isinstance(selected, pa.Scalar):
        return batch if selected.as_py() else batch.slice(0, 0)
    return batch.filter(selected)


def mask(batch: Any, predicate: Expr, types: Types) -> Any:
    """A bound predicate's value for each row, as a boolean array; null is unknown. Raises OutOfRange."""
    return _as_array(_checked(_evaluated(batch, predicate, types)), batch.num_rows)


def evaluate(batch: Any, expr: Expr, types: Types, among: npt.NDArray[np.bool_] | None = None) -> Any:
    """A bound expression's value for each row, as an array of its type's ``arrow_type``.

    Raises OutOfRange; with ``among``, a mask, only for rows that it selects, and others may be null.
    """
    type_ = expr.type or _BOOL
    if expr.op == "col":
        return flat(batch.column(expr.column))
    found = _evaluated(batch, expr, types)
    if among is not None:
        found = Values(found.of, _where(found.errors, among))
    return _shown(type_, _as_array(_checked(found), batch.num_rows))


def attempted(
    batch: Any, expr: Expr, types: Types, known: Known | None = None
) -> tuple[Any, npt.NDArray[np.bool_] | None]:
    """``evaluate`` for whoever goes on without the rows whose result is an error: the values, null there, and a mask of
    these rows; None if there are none. ``known``: of nodes the values for this batch; those of others are added."""
    type_ = expr.type or _BOOL
    if expr.op == "col" and (known is None or expr not in known):
        return flat(batch.column(expr.column)), None
    found = _evaluated(batch, expr, types, known)
    values = _shown(type_, _as_array(found.of, batch.num_rows))
    return values, None if found.errors is None else found.errors.rows


def spread(rows: Any, expr: Expr, types: Types, at: Any, known: Known) -> Values:
    """An expression over the columns of a batch ``rows``, worked out once for each of its rows, as values of another
    batch: of its row i those of row ``at[i]``, and null where that is null. ``known``: as of ``attempted``."""
    found = _evaluated(rows, expr, types, known)
    values = pc.take(_as_array(found.of, rows.num_rows), at, boundscheck=False)
    if found.errors is None:
        return Values(values)
    out = np.zeros(len(at), np.bool_)
    there = np.asarray(at.is_valid())
    out[there] = found.errors.rows[np.asarray(at.drop_null())]
    return Values(values, _Errors(out, found.errors.error) if out.any() else None)


def true_places(values: Any) -> npt.NDArray[np.int64]:
    """Where an array of booleans is true, ascending. Of few places among many it is found by whole bytes, which takes a
    tenth of the time of Arrow's kernel."""
    count, offset = len(values), values.offset
    valid, data = (
        None if buffer is None else np.frombuffer(buffer, np.uint8)[offset // 8 : (offset + count + 7) // 8]
        for buffer in values.buffers()
    )
    if not count or data is None:
        return np.zeros(0, np.int64)
    if valid is not None:
        data = data & valid
    some = data.nonzero()[0]
    byte, bit = np.unpackbits(data[some], bitorder="little").reshape(-1, 8).nonzero()
    places: npt.NDArray[np.int64] = 8 * some[byte] + bit - offset % 8
    return places[(places >= 0) & (places < count)]


# -- values and errors --------------------------------------------------------------------------------------


class _Errors(NamedTuple):
    """In which rows a result is out of range (the value is null there), and the error of one of them."""

    rows: npt.NDArray[np.bool_]
    error: OutOfRange


@dataclass(slots=True)
class Values:
    """A column in stored form, decimals and timestamps as int64; a scalar is the same in each row."""

    of: Any
    errors: _Errors | None = None
    _exact: tuple[Any] | None = None

    def exact_floats(self, type_: ColumnType) -> Any | None:
        """``arithmetic.exact_floats``, found out once."""
        if self._exact is None:
            self._exact = (exact_floats(type_, self.of),)
        return self._exact[0]


Known = dict[Expr, Values]
"""By node: two that say the same are two."""


def _checked(values: Values) -> Any:
    if values.errors is not None:
        raise values.errors.error
    return values.of


def _as_array(values: Any, rows: int) -> Any:
    return pa.repeat(values, rows) if isinstance(values, pa.Scalar) else flat(values)


def _shown(type_: ColumnType, values: Any) -> Any:
    """A column in stored form in its type's ``arrow_type``."""
    if type_.name == "decimal":
        return decimals(type_, values)
    wanted = arrow_type(type_)
    return values if values.type == wanted else values.cast(wanted)


def _joined(*found: _Errors | None) -> _Errors | None:
    there = [errors for errors in found if errors is not None]
    if not there:
        return None
    return _Errors(functools.reduce(np.logical_or, (errors.rows for errors in there)), there[0].error)


def _where(errors: _Errors | None, rows: Any) -> _Errors | None:
    """The errors in these rows, which are a mask."""
    if errors is None:
        return None
    left = errors.rows & rows
    return _Errors(left, errors.error) if left.any() else None


def _found(expr: Expr, result: tuple[Any, npt.NDArray[np.bool_] | None], *before: _Errors | None) -> Values:
    values, bad = result
    return Values(values, _joined(*before, None if bad is None or not bad.any() else _Errors(bad, out_of_range(expr))))


def _rows_of(values: Any, rows: int) -> npt.NDArray[np.bool_]:
    """A boolean column as NumPy: True where it is true."""
    return np.asarray(_as_array(values, rows).fill_null(False))


# -- nodes --------------------------------------------------------------------------------------------------


def _evaluated(batch: Any, expr: Expr, types: Types, known: Known | None = None) -> Values:
    if known is None:
        return _worked_out(batch, expr, types, None)
    if (found := known.get(expr)) is None:
        found = known[expr] = _worked_out(batch, expr, types, known)
    return found


def _worked_out(batch: Any, expr: Expr, types: Types, known: Known | None) -> Values:
    op = expr.op
    if op in HIERARCHY:
        raise unresolved(expr)
    if expr.column:
        return Values(_of_column(batch.column(expr.column), expr, types[expr.column]))
    if op == "lit":
        type_ = expr.type or _BOOL
        return Values(pa.scalar(expr.value, _stored_type(type_)))
    args = [_evaluated(batch, arg, types, known) for arg in expr.args]
    errors = None
    for arg in args:
        if arg.errors is not None:
            errors = _joined(errors, arg.errors)
    if op in _KLEENE:
        out = functools.reduce(_KLEENE[op], [arg.of for arg in args])
        return Values(out, None if errors is None else _where(errors, np.asarray(out.is_null())))
    match op:
        case "not":
            return Values(pc.invert(args[0].of), errors)
        case "is_null":
            out = args[0].of.is_null()
            return Values(out if errors is None else _without(out, errors, batch.num_rows), errors)
        case "isin":
            return Values(_is_in(args[0].of, pa.array(expr.value, args[0].of.type)), errors)
        case "startswith" | "contains" | "matches":
            return Values(_HAS[op](args[0].of, expr.value), errors)
        case "part":
            name, zone = expr.value
            return Values(_parts(name, zone, _as_array(args[0].of, batch.num_rows)), errors)
        case "within_km" | "quad":
            lat, lon = (
                _as_array(floats(of.type or _BOOL, arg.of), batch.num_rows)
                for of, arg in zip(expr.args, args, strict=True)
            )
            return Values((_within if op == "within_km" else _quads)(lat, lon, expr.value), errors)
        case "coalesce":
            return _coalesced(expr, args, batch.num_rows)
        case "case":
            return _chosen(expr, args, batch.num_rows)
    if op in COMPARISONS:
        left, right = (arg.type or _BOOL for arg in expr.args)
        if (left.name == "float64") != (right.name == "float64"):
            a, b = args[0].exact_floats(left), args[1].exact_floats(right)
            if a is not None and b is not None:
                return Values(COMPARE[op](a, b), errors)
        return Values(compared(op, args[0].of, left, args[1].of, right), errors)
    return _calculated(expr, args, errors, batch.num_rows)


def _of_column(values: Any, expr: Expr, type_: ColumnType) -> Any:
    match expr.op:
        case "is_null":
            return values.is_null()
        case "isin":
            wanted = stored_column(type_, list(expr.value))
            if isinstance(values, pa.DictionaryArray):
                return _of_codes(values, _is_in(values.dictionary, wanted))
            return _is_in(values, wanted)
        case "col":
            return _stored(values, type_)
    if expr.op in TEXT:
        test, value = _HAS[expr.op], expr.value
    else:
        test, value = COMPARE[expr.op], literal(type_, expr.value)
    if isinstance(values, pa.DictionaryArray):
        return _of_codes(values, test(values.dictionary, value))
    return test(values, value)


def _of_codes(values: Any, selected: Any) -> Any:
    """What is true of a coded column, given what is true of its distinct values."""
    codes = np.flatnonzero(selected)
    if len(codes) == 1:
        return pc.equal(values.indices, pa.scalar(codes[0], values.indices.type))
    return selected.take(values.indices)


def _stored(values: Any, type_: ColumnType) -> Any:
    values = flat(values)
    if type_.name == "decimal":
        known = values.is_valid().to_numpy(zero_copy_only=False) if values.null_count else None
        return pa.array(stored_array(type_, values), mask=None if known is None else ~known)
    return values.cast(pa.int64()) if type_.name == "timestamp" else values


def _stored_type(type_: ColumnType) -> Any:
    return pa.int64() if type_.name in ("decimal", "timestamp") else arrow_type(type_)


def _is_in(values: Any, wanted: Any) -> Any:
    found = pc.is_in(values, value_set=wanted)
    return pc.if_else(values.is_valid(), found, pa.scalar(None, pa.bool_())) if values.null_count else found


def _parts(name: str, zone: str, moments: Any) -> Any:
    filled = moments.fill_null(0) if moments.null_count else moments
    parts = pa.array(parts_of(name, zone, filled.to_numpy()))
    return pc.if_else(moments.is_valid(), parts, pa.scalar(None, pa.int64())) if moments.null_count else parts


def _within(lat: Any, lon: Any, circle: tuple[float, float, float]) -> Any:
    """Two columns of float64. Most positions are of another latitude, and need no sines."""
    lats, lons = (of.fill_null(np.inf).to_numpy() for of in (lat, lon))
    known = is_position(lats, lons)
    low, high = latitudes(circle)
    near = np.flatnonzero(known & (lats >= low) & (lats <= high))
    found = np.zeros(len(lats), np.bool_)
    found[near] = haversine(lats[near], lons[near], circle) <= haversine_max(circle)
    return pa.array(found, mask=~known)


def _quads(lat: Any, lon: Any, of: tuple[int]) -> Any:
    """Two columns of float64."""
    (depth,) = of
    lats, lons = (of.fill_null(np.inf).to_numpy() for of in (lat, lon))
    known = is_position(lats, lons)
    cells = cells_of(np.where(known, lats, 0.0), np.where(known, lons, 0.0), depth)
    return pa.array(cells, pa.binary(), mask=~known).cast(pa.string())


def _calculated(expr: Expr, args: Sequence[Values], errors: _Errors | None, rows: int) -> Values:
    """+ - * / and the negative, which is a difference to 0."""
    type_ = expr.type or _BOOL
    types = [arg.type or _BOOL for arg in expr.args]
    op, values, bad = expr.op, [arg.of for arg in args], None
    if op == "neg":
        op, values, types = "-", [pa.scalar(0, values[0].type), *values], [types[0], *types]
    if type_.name == "float64":
        left, right = (floats(of, value) for of, value in zip(types, values, strict=True))
        return _found(expr, calculated_floats(op, left, right), errors)
    if op in ("+", "-"):
        known = pc.and_(pc.is_valid(values[0]), pc.is_valid(values[1]))
        digits = [type_.scale - of.scale for of in types]
        found = [rescaled(_as_array(v, rows) if by else v, by) for v, by in zip(values, digits, strict=True)]
        values = [value for value, _ in found]
        for _, beyond in found:  # which adding the other operand, if there is one, does not bring back into range
            if beyond is not None:
                errors = _found(expr, (None, beyond & np.asarray(known)), errors).errors
    out, bad = calculated_integers(op, *values)
    return _found(expr, (out, bad) if type_.name == "int64" else within(type_, out, bad), errors)


def _converted(arg: Values, of: ColumnType, expr: Expr, rows: int) -> Values:
    """An operand as its ``case`` or ``coalesce`` gives it, whose type may be a wider one."""
    type_ = expr.type or _BOOL
    if of == type_ or type_.name not in ("float64", "decimal"):
        return arg
    if type_.name == "float64":
        return Values(floats(of, arg.of), arg.errors)
    values, bad = rescaled(_as_array(arg.of, rows), type_.scale - of.scale)
    return _found(expr, within(type_, values, bad), arg.errors)


def _coalesced(expr: Expr, args: Sequence[Values], rows: int) -> Values:
    args = [_converted(arg, of.type or _BOOL, expr, rows) for arg, of in zip(args, expr.args, strict=True)]
    errors: _Errors | None = None
    if any(arg.errors for arg in args):
        still = np.ones(rows, np.bool_)  # rows that are null so far
        for arg in args:
            errors = _joined(errors, _where(arg.errors, still))
            still = still & np.asarray(_as_array(arg.of, rows).is_null())
            if arg.errors is not None:
                still = still & ~arg.errors.rows
    out = pc.coalesce(*(arg.of for arg in args))
    return Values(out if errors is None else _without(out, errors, rows), errors)


def _chosen(expr: Expr, args: Sequence[Values], rows: int) -> Values:
    """From the last to the first: a condition that is true puts its value over what those after it gave."""
    conditions, values = args[:-1:2], [*args[1::2], args[-1]]
    types = [arg.type or _BOOL for arg in (*expr.args[1::2], expr.args[-1])]
    values = [_converted(value, of, expr, rows) for value, of in zip(values, types, strict=True)]
    out, errors = values[-1].of, values[-1].errors
    for condition, value in zip(reversed(conditions), reversed(values[:-1]), strict=True):
        holds = condition.of.fill_null(False) if _is_array(condition.of) else pa.scalar(bool(condition.of.as_py()))
        out = pc.if_else(holds, value.of, out)
        if condition.errors or value.errors or errors:
            true = _rows_of(holds, rows)
            errors = _joined(condition.errors, _where(value.errors, true), _where(errors, ~true))
    return Values(out if errors is None else _without(out, errors, rows), errors)


def _is_array(values: Any) -> bool:
    return not isinstance(values, pa.Scalar)


def _without(values: Any, errors: _Errors, rows: int) -> Any:
    return pc.if_else(pa.array(errors.rows), pa.scalar(None, values.type), _as_array(values, rows))
