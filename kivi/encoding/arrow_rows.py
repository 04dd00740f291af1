"""Base rows of fixed width as Arrow columns, thousands at a time, and derived columns over them.

The columnar twin of ``RowLayout.decode``, ``rows_batch`` and ``kivi.model.derived_columns.evaluator``, to the
last bit. Whatever a column cannot hold (a sum beyond its type, a float or a derived value that is not finite) is an
OverflowError here, for the whole portion: a read row by row says which row it is, and whether anybody asked for it.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kivi.arrow.columns import arrow_from_stored, not_finite, stored_column
from kivi.encoding.base_rows import is_wide
from kivi.model.derived_columns import FUNCTIONS, literal
from kivi.model.quantiles import Quantiles, quantile_of
from kivi.model.schema import Column
from kivi.model.types import ColumnType
from kivi.states.registry import kind_of

__all__ = [
    "DecodedStates",
    "Values",
    "array_of",
    "decoded_states",
    "evaluate_columns",
    "operand",
    "read_states",
    "states_of",
    "values_of",
    "values_or_none",
]

Array = npt.NDArray[Any]

_EXACT_MAX: Final = 2**53
"""Integers up to here, and powers of ten up to 10**22, are exact as float64, so their quotient is rounded once."""


class Values(NamedTuple):
    """One column in stored form: int64, float64 or bool; ``valid`` False where it is null, None: nowhere."""

    values: Array
    valid: Array | None


class DecodedStates(NamedTuple):
    """Quantiles of many rows: items, where those of each row begin, and the scale."""

    codes: Array
    counts: Array
    offsets: Array
    scale: int


def decoded_states(column: Column, states: list[bytes]) -> DecodedStates:
    """Of a quantiles column."""
    assert column.state is not None
    (codes, counts), offsets = kind_of(column.state).decode(states)
    return DecodedStates(codes, counts, offsets, column.state.size)


def values_of(column: Column, i: int, rows: Array) -> Values:
    """Column ``i`` of rows in their layout's dtype. Raises OverflowError for a sum beyond 64 bits."""
    nulls = rows["nulls"][:, i >> 3] & (1 << (i & 7))
    valid = nulls == 0 if nulls.any() else None
    if is_wide(column):
        values = np.ascontiguousarray(rows[f"c{i}_lo"]).view(np.int64)
        if not np.array_equal(rows[f"c{i}_hi"], values >> 63):
            raise OverflowError("a sum beyond 64 bits")
        return Values(values, valid)
    values = np.ascontiguousarray(rows[f"c{i}"])
    return Values(values != 0 if column.type.name == "bool" else values, valid)


def states_of(i: int, rows: Array) -> list[bytes]:
    """The states of column ``i``, as bytes."""
    return [state or b"" for state in rows[f"c{i}"].tolist()]


def read_states(column: Column, states: list[bytes]) -> Any:
    """The Arrow column that states are read as. Raises OverflowError for what the type cannot hold."""
    assert column.state is not None
    array = stored_column(column.type, kind_of(column.state).values(states))
    if column.type.name == "float64" and not_finite(array) is not None:
        raise OverflowError("not finite")
    return array


def values_or_none(column: Values) -> list[Any]:
    """As Python values."""
    values: list[Any] = column.values.tolist()
    if column.valid is not None:
        for i in np.flatnonzero(~column.valid).tolist():
            values[i] = None
    return values


def array_of(type_: ColumnType, column: Values) -> Any:
    """The Arrow column. Raises OverflowError for what the type cannot hold."""
    values, valid = column
    if type_.name == "float64":
        _check_finite(values, valid)
    elif type_.name == "decimal":
        _check_digits(type_, values)
    return arrow_from_stored(type_, values, None if valid is None else ~valid)


def _check_finite(values: Array, valid: Array | None) -> None:
    finite = np.isfinite(values)
    if not (finite if valid is None else finite | ~valid).all():
        raise OverflowError("not finite")


def _check_digits(type_: ColumnType, values: Array) -> None:
    if len(values) and max(-int(values.min()), int(values.max())) > type_.stored_max:
        raise OverflowError(f"beyond {type_}")


# -- derived columns --------------------------------------------------------------------------------


def operand(type_: ColumnType, column: Values) -> Values:
    """A column of numbers as float64: each as Python's ``float`` makes it of the caller's form."""
    values, valid = column
    if type_.name == "float64":
        _check_finite(values, valid)
        return column
    floats = values.astype(np.float64)
    if type_.name == "decimal":
        _check_digits(type_, values)
        if type_.scale:
            floats /= 10.0**type_.scale
            for i in np.flatnonzero(np.abs(values) > _EXACT_MAX):
                floats[i] = float(type_.from_stored(int(values[i])))
    return Values(floats, valid)


def evaluate_columns(node: ast.expr, operands: Mapping[str, Any], rows: int) -> Values:
    """``evaluator`` of each of so many rows. Raises OverflowError for what leaves the finite numbers."""
    match node:
        case ast.Constant(value=value):
            return Values(np.full(rows, float(value)), None)  # type: ignore[arg-type]
        case ast.Name(id=name):
            named: Values = operands[name]
            return named
        case ast.Call(func=ast.Name(id=name), args=[ast.Name(id=column), *arguments]):
            return _of_states(name, operands[column], [literal(argument) for argument in arguments])
        case ast.UnaryOp(op=op, operand=inner):
            values, valid = evaluate_columns(inner, operands, rows)
            return Values(-values if isinstance(op, ast.USub) else values, valid)
        case ast.BinOp(left=left_node, op=op, right=right_node):
            left = evaluate_columns(left_node, operands, rows)
            right = evaluate_columns(right_node, operands, rows)
            valid = right.valid if left.valid is None else left.valid & _known(right)
            with np.errstate(all="ignore"):
                match op:
                    case ast.Add():
                        values = left.values + right.values
                    case ast.Sub():
                        values = left.values - right.values
                    case ast.Mult():
                        values = left.values * right.values
                    case _:
                        values = left.values / right.values
                        if (zero := right.values == 0).any():
                            valid = ~zero if valid is None else valid & ~zero
            _check_finite(values, valid)
            return Values(values, valid)
    raise ValueError("not an arithmetic expression")


def _of_states(name: str, states: DecodedStates, numbers: list[float]) -> Values:
    """``kivi.model.derived_columns.FUNCTIONS`` of many quantiles."""
    codes, counts, offsets, scale = states
    if name == "quantile":
        return Values(*quantile_of(codes, counts, offsets, scale, numbers[0]))
    bounds = offsets.tolist()
    read = (Quantiles(scale, codes[a:b], counts[a:b]) for a, b in itertools.pairwise(bounds))
    found = [FUNCTIONS[name](each, *numbers) for each in read]
    known = np.array([value is not None for value in found], np.bool_)
    return Values(np.array([0.0 if value is None else value for value in found], np.float64), known)


def _known(column: Values) -> Array:
    return np.ones(len(column.values), np.bool_) if column.valid is None else column.valid
