"""Expressions over columns: predicates like ``kivi.col("status") >= 500``, and values like ``col("a") * col("b")``.

An expression is built by the caller, travels as plain data and is evaluated where the rows are: on single rows
(``matches``, ``value_of``) or on Arrow columns (``kivi.arrow.predicates``). There is one definition of what it means,
which is this page; both evaluators keep to it, and a property test compares them. Spark evaluates its own filters, and
hands over those that compare one column with a literal (``kivi.spark.filters``), which mean the same there.

**Three values.** As in SQL a comparison with null is unknown, ``~unknown`` is unknown, and only *true* selects a row.
Null in arithmetic gives null. ``coalesce`` is the first of its values that is not null. ``case`` is the value beside
the first condition that is true, else ``otherwise``. A column of bool is a predicate by itself.

**Types.** A literal beside a single column is of the column's type, and refused if that does not hold it. Beside any
other value it has that value's type if that holds it, else its own. So no literal of a comparison is ever rounded.

======================== ============================ =========================================================
expression               type                         exactness
======================== ============================ =========================================================
int64 + - * int64        int64                        exact
decimal + - decimal      decimal(18, larger scale)    exact; int64 stands for a decimal of scale 0
decimal * decimal        decimal(18, sum of scales)   exact; a sum of scales above 18 is a SchemaError
number + - * float64     float64                      the other operand is rounded to the nearest float64 first
number / number          float64                      both are rounded to float64 first; a divisor of 0 gives null
-number                  the same
timestamp - timestamp    int64                        microseconds, exact
timestamp + - int64      timestamp                    microseconds, exact; a timedelta is a literal of int64
coalesce, case           the type of all values       int64 and decimal become decimal, any with float64 float64
comparison               predicate                    int64, decimal and float64 are compared exactly, not rounded
startswith, contains     predicate                    of strings by code points, of bytes by bytes
matches                  predicate                    RE2, of strings (``kivi.model.expressions.texts``)
quad                     string                       of numbers (``kivi.model.expressions.quads``)
within_km                predicate                    of numbers (``kivi.model.expressions.positions``)
under, covers            predicate                    of values in a hierarchy (``kivi.store.hierarchies``)
year, month, ... second  int64                        of timestamps (``kivi.model.expressions.time_parts``)
======================== ============================ =========================================================

A decimal becomes a float64 as its unscaled value, rounded, divided by a power of ten. Strings, bytes, bools and
timestamps are compared with their own type only. -0.0 is 0.0.

**Out of range.** An int64 beyond 64 bits, a timestamp outside the years 1 to 9999, a decimal of more than 18 digits and
a float64 that is not finite are OutOfRange. Such a row behaves like a fourth value: it passes through every operator,
but *false* decides an "and" and *true* an "or" whatever stands beside them, and what ``case`` and ``coalesce`` do not
reach does not count. So whether a row fails depends neither on the order of operands nor on which blocks or ranges of
time a read leaves out. The error is raised where a row's result is asked for; a batch that has one such row fails.

``bind`` checks a predicate against a schema, and ``bind_value`` a value: literals are brought to stored form, every
value learns its type, and what has no columns is computed once. ``to_plain`` and ``from_plain`` are for catalogs. What
a scan reads (``kivi.model.scans``) is a predicate with a range of keys, columns and a limit.
"""

from kivi.model.expressions.binding import bind, bind_value
from kivi.model.expressions.bounds import bounds_of
from kivi.model.expressions.nodes import (
    COMPARISONS,
    HIERARCHY,
    TEXT,
    TIME_PARTS,
    Expr,
    Value,
    all_of,
    asks_hierarchy,
    between,
    case,
    check_own,
    coalesce,
    col,
    lit,
    names,
    never_fails,
    quad,
    terms_of,
    within_km,
)
from kivi.model.expressions.plain import from_plain, to_plain
from kivi.model.expressions.rows import matches, value_of

__all__ = [
    "COMPARISONS",
    "HIERARCHY",
    "TEXT",
    "TIME_PARTS",
    "Expr",
    "Value",
    "all_of",
    "asks_hierarchy",
    "between",
    "bind",
    "bind_value",
    "bounds_of",
    "case",
    "check_own",
    "coalesce",
    "col",
    "from_plain",
    "lit",
    "matches",
    "names",
    "never_fails",
    "quad",
    "terms_of",
    "to_plain",
    "value_of",
    "within_km",
]
