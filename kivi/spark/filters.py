"""Spark's filters as kivi's predicates, and as ranges of keys or of event time.

Both are SQL's: a comparison with null is unknown, and only what is true selects a row. So a filter that has a
predicate need not be evaluated again. The ones that have none (on the end of a string, on a column of another name)
stay with Spark. So do arithmetic, columns compared with each other, ``coalesce`` and ``case``: Spark hands a data
source in Python comparisons of one column with literals only, and evaluates the rest by its own rules.

A range is found besides: equal to the first key columns, and bounds on the next one, or bounds on the event time. It is
never narrower than the predicate, which is evaluated all the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import datasource as spark

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.expressions import Expr, col

if TYPE_CHECKING:
    from kivi.spark.schemas import Target

__all__ = ["Range", "predicate", "range_of"]

_COMPARISONS: Final[dict[type[spark.Filter], Callable[[Any, Any], Expr]]] = {
    spark.EqualTo: lambda column, value: column == value,
    spark.LessThan: lambda column, value: column < value,
    spark.LessThanOrEqual: lambda column, value: column <= value,
    spark.GreaterThan: lambda column, value: column > value,
    spark.GreaterThanOrEqual: lambda column, value: column >= value,
    spark.In: lambda column, value: column.isin(value),
    spark.StringStartsWith: lambda column, value: column.startswith(value),
    spark.StringContains: lambda column, value: column.contains(value),
}


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a scan: all rows whose key begins with ``prefix``, from ``start`` on, before ``end``."""

    prefix: tuple[Any, ...] = ()
    start: tuple[Any, ...] | None = None
    end: tuple[Any, ...] | None = None

    def cut(self, points: Sequence[tuple[Any, ...]]) -> list[Range]:
        """The parts between the points, those that are empty left out."""
        bounds = [self.start, *(point for point in points if self._holds(point)), self.end]
        return [Range(self.prefix, start, end) for start, end in itertools.pairwise(bounds)]

    def _holds(self, point: tuple[Any, ...]) -> bool:
        if self.prefix and point[: len(self.prefix)] != self.prefix:
            return False
        after = self.start is None or point > self.start
        return after and (self.end is None or point < self.end)


def predicate(target: Target, given: spark.Filter) -> Expr | None:
    """The filter, or None if it is Spark's to evaluate."""
    if isinstance(given, spark.Not):
        inner = predicate(target, given.child)
        return None if inner is None else ~inner
    attribute: tuple[str, ...] = getattr(given, "attribute", ())
    if len(attribute) != 1 or attribute[0] not in target.columns:
        return None
    column: Any = col(attribute[0])
    if isinstance(given, spark.IsNull):
        return Expr("is_null", attribute[0])
    if isinstance(given, spark.IsNotNull):
        return ~Expr("is_null", attribute[0])
    value = getattr(given, "value", None)
    if isinstance(given, spark.EqualNullSafe):
        if value is None:
            return Expr("is_null", attribute[0])
        # True or false, never unknown: negated it selects rows with a null, too.
        same: Expr = column == value
        return same & ~Expr("is_null", attribute[0])
    build = _COMPARISONS.get(type(given))
    return None if build is None or not _is_comparable(target, attribute[0], value) else build(column, value)


def _is_comparable(target: Target, name: str, value: Any) -> bool:
    """Whether kivi takes the literal for what Spark means by it."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    try:
        return all(v is not None and target.columns[name].to_stored(v) is not None for v in values)
    except (InvalidArgument, SchemaError):
        return False


def range_of(target: Target, filters: Sequence[spark.Filter]) -> Range:
    """The least range that holds every row that all of ``filters`` select, as far as it is found here."""
    equal: dict[str, Any] = {}
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    for given in filters:
        attribute: tuple[str, ...] = getattr(given, "attribute", ())
        name, value = attribute[0] if len(attribute) == 1 else "", getattr(given, "value", None)
        if name not in target.columns or not _is_comparable(target, name, value) or isinstance(value, (tuple, list)):
            continue
        type_ = target.columns[name]
        value = type_.from_stored(type_.to_stored(value))  # as points are given: a moment in UTC
        if isinstance(given, (spark.EqualTo, spark.EqualNullSafe)):
            equal[name] = value
        elif isinstance(given, (spark.GreaterThan, spark.GreaterThanOrEqual)):
            low[name] = max(value, low.get(name, value))
        elif isinstance(given, spark.LessThan):
            high[name] = min(value, high.get(name, value))
    prefix: list[Any] = []
    columns = list(target.key) if target.kind != "event" else [target.event_time or ""]
    while columns and columns[0] in equal and target.kind != "event":
        prefix.append(equal[columns.pop(0)])
    start = end = None
    if columns:
        start = (*prefix, low[columns[0]]) if columns[0] in low else None
        end = (*prefix, high[columns[0]]) if columns[0] in high else None
    return Range(tuple(prefix), start, end)
