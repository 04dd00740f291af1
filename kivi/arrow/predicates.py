"""Predicates on columns: the rows of a batch that a bound ``Expr`` selects.

The same three-valued logic as ``kivi.model.expressions.matches`` has on single rows: a comparison with null is unknown,
and what is unknown is not selected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.columns import literal, stored_column
from kivi.model.expressions import Expr
from kivi.model.types import ColumnType

__all__ = ["filter_batch"]


def filter_batch(batch: Any, predicate: Expr, types: Mapping[str, ColumnType]) -> Any:
    """The rows of a RecordBatch or Table that a bound predicate selects: those where it is true, not unknown.

    Kernels are called directly, since starting Arrow's expression engine costs more than most batches.
    """
    mask = _mask(batch, predicate, types)
    if isinstance(mask, pa.Scalar):
        return batch if mask.as_py() else batch.slice(0, 0)
    return batch.filter(mask)


_COMPARE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


def _mask(batch: Any, predicate: Expr, types: Mapping[str, ColumnType]) -> Any:
    match predicate.op:
        case "and" | "or":
            combine = pc.and_kleene if predicate.op == "and" else pc.or_kleene
            return functools.reduce(combine, (_mask(batch, arg, types) for arg in predicate.args))
        case "not":
            return pc.invert(_mask(batch, predicate.args[0], types))
    values = batch.column(predicate.column)
    if predicate.op == "is_null":
        return values.is_null()
    type_ = types[predicate.column]
    if predicate.op == "isin":
        found = pc.is_in(values, value_set=stored_column(type_, list(predicate.value)))
        return pc.if_else(values.is_valid(), found, pa.scalar(None, pa.bool_())) if values.null_count else found
    return _COMPARE[predicate.op](values, literal(type_, predicate.value))
