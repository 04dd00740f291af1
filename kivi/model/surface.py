"""The short names of the public surface: operators for schemas, and the transaction decorator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.expressions import Expr
from kivi.model.given import flag
from kivi.model.schema import OperatorCall
from kivi.model.types import shown

__all__ = [
    "argmax",
    "argmin",
    "avg",
    "combine",
    "count",
    "distinct",
    "first",
    "largest",
    "last",
    "max",
    "measure",
    "min",
    "quantiles",
    "smallest",
    "stddev",
    "sum",
    "top",
    "transactional",
    "var",
    "weighted_quantiles",
]


Source = Any
"""A column's name, or an expression over columns such as ``kivi.col("tokens") * kivi.col("price")``."""


def _call(operator: str, source: Source, where: Any = None, **options: Any) -> OperatorCall:
    argument, expression = source, None
    if isinstance(source, Expr):
        argument, expression = (source.column, None) if source.op == "col" else (None, source)
    elif source is not None and not isinstance(source, str):
        raise SchemaError(f"{operator} takes a column's name or an expression over columns, not {shown(source)}")
    if where is not None and not isinstance(where, Expr):
        raise InvalidArgument(f"where={shown(where)} is not a predicate: compare kivi.col(name) with a value first")
    given = tuple((name, value) for name, value in options.items() if value is not None)
    return OperatorCall(operator, argument, expression, where, given)


def _column_of(operator: str, by: Any) -> str:
    name = by.column if isinstance(by, Expr) and by.op == "col" else by
    if not isinstance(name, str):
        raise SchemaError(f"by of {operator} is a column's name, such as by='resp_time_us', not {shown(by)}")
    return name


def _name(measure: object, of: str) -> str:
    if not isinstance(measure, str):
        raise SchemaError(f"kivi.{of} takes the name of a measure, not {shown(measure)}")
    return measure


def sum(source: Source, *, where: Any = None) -> OperatorCall:
    """In a table's columns: a delta column of that type. In an aggregate's measures: the sum of a column or expression.

    ``where``, here and below: only events that this predicate selects are observed.
    """
    return _call("sum", source, where)


def min(source: Source, *, where: Any = None) -> OperatorCall:
    """In a table's columns: a delta column of that type. In an aggregate's measures: the least value."""
    return _call("min", source, where)


def max(source: Source, *, where: Any = None) -> OperatorCall:
    """In a table's columns: a delta column of that type. In an aggregate's measures: the largest value."""
    return _call("max", source, where)


def count(source: Source = None, *, where: Any = None) -> OperatorCall:
    """The number of events, or of those where the source is not null. Kept as a SUM of 1."""
    return _call("count", source, where)


def avg(source: Source, *, where: Any = None) -> OperatorCall:
    """The mean as a float64. Sums of integers and decimals are exact, rounded once on reading; null of no values."""
    return _call("avg", source, where)


def var(source: Source, *, population: bool = False, where: Any = None) -> OperatorCall:
    """The variance of the sample (divided by n - 1, as in SQL), or of the whole population (by n).

    Of float64 it is what the sums of values and squares say: a spread that is small beside the mean is lost.
    """
    return _call("var", source, where, population=flag(population, "population") or None)


def stddev(source: Source, *, population: bool = False, where: Any = None) -> OperatorCall:
    """The square root of ``var``."""
    return _call("stddev", source, where, population=flag(population, "population") or None)


def quantiles(source: Source, accuracy: float = 0.01, *, where: Any = None) -> OperatorCall:
    """The distribution: any quantile, and the fraction below any value, within ``accuracy`` relative to the value.

    Reads as a ``Quantiles``; in derived columns ``quantile(name, 0.99)`` and ``fraction_below(name, 500000)``.
    """
    return _call("quantiles", source, where, accuracy=accuracy)


def weighted_quantiles(source: Source, by: Any, accuracy: float = 0.01, *, where: Any = None) -> OperatorCall:
    """``quantiles`` of values that each stand for as many observations as ``by``, an int64 column, says.

    For what was counted before it came, such as the buckets of a histogram. Reads as a ``Quantiles``. Weights of 0 or
    less, and null, are no observation; beyond 2**40 they count as that.
    """
    return _call("weighted_quantiles", source, where, accuracy=accuracy, by=_column_of("weighted_quantiles", by))


def distinct(source: Source, error: float = 0.01, *, where: Any = None) -> OperatorCall:
    """How many different values there were, estimated with that standard error (HyperLogLog)."""
    return _call("distinct", source, where, error=error)


def first(source: Source, *, where: Any = None) -> OperatorCall:
    """The value of the first event by (event time, commit timestamp, position in the commit)."""
    return _call("first", source, where)


def last(source: Source, *, where: Any = None) -> OperatorCall:
    """The value of the last event by (event time, commit timestamp, position in the commit)."""
    return _call("last", source, where)


def argmax(source: Source, by: Any, *, where: Any = None) -> OperatorCall:
    """The value of ``source`` in the event with the greatest ``by``, a column; of equals, in the first of them."""
    return _call("argmax", source, where, by=_column_of("argmax", by))


def argmin(source: Source, by: Any, *, where: Any = None) -> OperatorCall:
    """The value of ``source`` in the event with the least ``by``, a column; of equals, in the first of them."""
    return _call("argmin", source, where, by=_column_of("argmin", by))


def largest(source: Source, n: int, *, where: Any = None) -> OperatorCall:
    """The ``n`` largest values as a list, the largest first; each as often as it was observed. At most 1,000."""
    return _call("largest", source, where, n=n)


def smallest(source: Source, n: int, *, where: Any = None) -> OperatorCall:
    """The ``n`` smallest values as a list, the smallest first; each as often as it was observed. At most 1,000."""
    return _call("smallest", source, where, n=n)


def top(source: Source, k: int, *, most: int = 1_000, where: Any = None) -> OperatorCall:
    """The ``k`` most frequent values and their counts, as a ``Top``.

    Exact while a row has at most ``most`` distinct values. Beyond it those with the least hashes go on being counted
    exactly, the rest are its ``others``, and it says that it is not ``exact``.
    """
    return _call("top", source, where, k=k, most=most)


def measure(name: str, source: Source, *, where: Any = None) -> OperatorCall:
    """A measure that ``kivi.register_measure`` has registered in the store's process."""
    return _call(_name(name, "measure"), source, where)


def combine(measure: str) -> OperatorCall:
    """In an aggregate whose source is an aggregate: the states of that measure of its source, combined."""
    return OperatorCall("combine", _name(measure, "combine"))


def transactional(function: Callable[..., Any]) -> Callable[..., Any]:
    """``@kivi.transactional``: ``f(db, ...)`` runs in a transaction, again after a conflict; ``f(tx, ...)`` joins tx.

    A coroutine function takes an asyncio database or transaction.
    """
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(db_or_tx: Any, *args: Any, **kwargs: Any) -> Any:
            if hasattr(db_or_tx, "transaction"):

                async def call(tx: Any) -> Any:
                    return await function(tx, *args, **kwargs)

                return await db_or_tx.run(call)
            return await function(db_or_tx, *args, **kwargs)

        return awaited

    @functools.wraps(function)
    def wrapper(db_or_tx: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(db_or_tx, "transaction"):
            return db_or_tx.run(lambda tx: function(tx, *args, **kwargs))
        if not hasattr(db_or_tx, "commit_ts"):
            raise InvalidArgument(f"the first argument is a database or a transaction, not {shown(db_or_tx)}")
        return function(db_or_tx, *args, **kwargs)

    return wrapper
