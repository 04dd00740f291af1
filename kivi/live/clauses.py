"""A predicate as clauses, of which the matcher's index finds those that a row may be selected by.

A clause is of some columns a range each, all of which hold; a predicate is true only where one of its clauses is. So
``or`` is the clauses of both sides, ``isin`` one clause a value, and ``and`` their intersections, each with each. A
prefix is a range of texts, a circle is some of latitudes and longitudes (``bounds_of``). What is left out (patterns,
nulls, too many combinations) makes a clause inexact: the predicate itself is asked about the rows that it finds.

**Invariant.** Where the predicate is true, one clause is; where all of its clauses are exact, it is true wherever one
is. A predicate that may be out of range has no clauses: a row that no clause finds could be an error beside null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kivi.model.expressions import COMPARISONS, Expr, bounds_of, never_fails
from kivi.model.types import INT64_MAX, INT64_MIN, ColumnType

__all__ = ["Clause", "clauses_of", "is_word"]

_CLAUSES_MAX: Final = 64
"""Of an ``and``: what is beyond is left out of the clauses."""
_VALUES_MAX: Final = 10_000
"""Of one predicate; one with more is found by the range of all."""
_INTEGERS: Final = frozenset({"int64", "timestamp", "decimal", "bool"})
_TEXTS: Final = frozenset({"string", "bytes"})
_NEGATED: Final = {"<": ">=", ">=": "<", ">": "<=", "<=": ">", "!=": "=="}


class Clause(NamedTuple):
    """``numbers``: (least, largest) of a column. ``texts``: (least, the first beyond), None being no bound."""

    numbers: dict[str, tuple[Any, Any]]
    texts: dict[str, tuple[Any, Any]]
    is_exact: bool = True

    @property
    def is_open(self) -> bool:
        """Whether it has no range at all."""
        return not self.numbers and not self.texts


_ANY: Final = Clause({}, {}, is_exact=False)


def clauses_of(where: Expr | None, types: Mapping[str, ColumnType]) -> list[Clause] | None:
    """None: there are none, and the predicate has to be asked about every row. An empty list: it is never true."""
    if where is None:
        return [Clause({}, {})]
    if not never_fails(where):
        return None
    found = _clauses(where, types)
    if len(found) > _VALUES_MAX:
        return None
    return None if any(clause.is_open for clause in found) else found


def is_word(text_range: tuple[Any, Any]) -> bool:
    """Whether it has one text only."""
    low, beyond = text_range
    return low is not None and beyond is not None and bool(beyond == _next(low))


def _next(text: Any) -> Any:
    """The least text that is greater."""
    return text + ("\0" if isinstance(text, str) else b"\0")


def _clauses(where: Expr, types: Mapping[str, ColumnType]) -> list[Clause]:
    match where.op:
        case "or":
            return [clause for arg in where.args for clause in _clauses(arg, types)]
        case "and":
            return _all_of([_clauses(arg, types) for arg in where.args])
        case "not":
            return _negated(where.args[0], types)
        case "isin" if where.column:
            if len(where.value) <= _VALUES_MAX:
                equal = [Expr("==", where.column, value) for value in dict.fromkeys(where.value)]
                return [clause for term in equal for clause in _range(term, types)]
            ends = Expr(">=", where.column, min(where.value)), Expr("<=", where.column, max(where.value))
            return _inexact(_all_of([_range(term, types) for term in ends]))
        case "!=":
            return [_ANY]
        case op if where.column and op in COMPARISONS:
            return _range(where, types)
    bounds = bounds_of(where)
    if not bounds:
        return [_ANY]
    found = _all_of([_clauses(bound, types) for bound in bounds])
    return found if where.op == "startswith" and where.column else _inexact(found)


def _negated(inner: Expr, types: Mapping[str, ColumnType]) -> list[Clause]:
    """Of "not": what is unknown stays so."""
    if inner.op == "not":
        return _clauses(inner.args[0], types)
    if inner.op in ("and", "or"):
        args = tuple(Expr("not", args=(arg,)) for arg in inner.args)
        return _clauses(Expr("or" if inner.op == "and" else "and", args=args), types)
    # Of floats it may be no number, which is neither less nor greater.
    if inner.column and inner.op in _NEGATED and types[inner.column].name != "float64":
        return _clauses(Expr(_NEGATED[inner.op], inner.column, inner.value), types)
    return [_ANY]


def _inexact(clauses: Sequence[Clause]) -> list[Clause]:
    return [clause._replace(is_exact=False) for clause in clauses]


def _all_of(sides: Sequence[list[Clause]]) -> list[Clause]:
    """Those of an ``and``: the shortest lists first, as long as they do not multiply to too many."""
    found = [Clause({}, {})]
    left_out = False
    for side in sorted(sides, key=len):
        if len(found) * len(side) > max(_CLAUSES_MAX, len(side) if len(found) == 1 else 0):
            left_out = True
            continue
        found = [both for a in found for b in side if (both := _both(a, b)) is not None]
    return _inexact(found) if left_out else found


def _both(a: Clause, b: Clause) -> Clause | None:
    """None: nothing lies in both."""
    numbers, texts = dict(a.numbers), dict(a.texts)
    for name, (low, high) in b.numbers.items():
        least, most = numbers.get(name, (low, high))
        numbers[name] = low, high = max(low, least), min(high, most)
        if low > high:
            return None
    for name, (low, beyond) in b.texts.items():
        least, end = texts.get(name, (low, beyond))
        low = least if low is None else low if least is None else max(low, least)
        beyond = end if beyond is None else beyond if end is None else min(beyond, end)
        texts[name] = low, beyond
        if low is not None and beyond is not None and low >= beyond:
            return None
    return Clause(numbers, texts, a.is_exact and b.is_exact)


def _range(term: Expr, types: Mapping[str, ColumnType]) -> list[Clause]:
    """Of a comparison of a column with a literal, but for !=; none, if it is beyond every value."""
    name, value, type_ = term.column, term.value, types[term.column]
    if type_.name in _TEXTS:
        low = {"==": value, ">=": value, ">": _next(value)}.get(term.op)
        beyond = {"==": _next(value), "<": value, "<=": _next(value)}.get(term.op)
        return [Clause({}, {name: (low, beyond)})]
    exact = type_.name in _INTEGERS
    if not exact and type_.name != "float64":
        return [_ANY]
    least, most = (INT64_MIN, INT64_MAX) if exact else (-math.inf, math.inf)
    least = {"==": value, ">=": value, ">": _beside(value, 1, exact)}.get(term.op, least)
    most = {"==": value, "<=": value, "<": _beside(value, -1, exact)}.get(term.op, most)
    if exact and (least > INT64_MAX or most < INT64_MIN):
        return []
    return [Clause({name: (least, most)}, {})]


def _beside(value: Any, sign: int, exact: bool) -> Any:
    """The next value."""
    return int(value) + sign if exact else math.nextafter(value, sign * math.inf)
