"""The nodes of expressions, and the operators and functions that build them. Nothing here knows a schema."""

from __future__ import annotations

import datetime as dt
import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from kivi.errors import InvalidArgument
from kivi.model.given import listed
from kivi.model.types import ColumnType, check_whole_us, shown

__all__ = [
    "ARITHMETIC",
    "BESIDE",
    "COMPARISONS",
    "HIERARCHY",
    "OF_COLUMNS",
    "ROWS_BESIDE_MAX",
    "TEXT",
    "TIME_PARTS",
    "TUPLES",
    "Expr",
    "Value",
    "all_of",
    "asks_hierarchy",
    "between",
    "case",
    "check_own",
    "check_shape",
    "coalesce",
    "col",
    "lit",
    "names",
    "never_fails",
    "quad",
    "terms_of",
    "within_km",
]

COMPARISONS: Final = frozenset({"==", "!=", "<", "<=", ">", ">="})
ARITHMETIC: Final = frozenset({"+", "-", "*", "/"})
BESIDE: Final = ("prev", "next")
ROWS_BESIDE_MAX: Final = 1_000
"""By how many rows ``prev`` and ``next`` look away, at most."""
HIERARCHY: Final = frozenset({"under", "covers"})
"""Of which the store makes plain values where it reads (``kivi.store.hierarchies``)."""
TEXT: Final = frozenset({"startswith", "contains", "matches"})
TIME_PARTS: Final = ("year", "month", "day", "weekday", "hour", "minute", "second")
_MIRRORED: Final = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


@dataclass(frozen=True, slots=True, eq=False)
class Expr:
    """One node of an expression; by its ``op``:

    ============================= ==========================================================================
    "and" "or" "not"              of the predicates ``args``
    a comparison                  ``column`` with the literal ``value``; without a column, of the two ``args``
    "isin" "is_null"              of ``column``, or of ``args[0]``; ``value`` is a tuple of literals
    "startswith" "contains"       of ``column``, or of ``args[0]``; ``value`` is a literal
    "matches"                     of ``column``, or of ``args[0]``; ``value`` is a regular expression
    "under" "covers"              of ``column``, or of ``args[0]``; ``value`` is (literal, hierarchy or "")
    "quad"                        of ``args``, latitude and longitude; ``value`` is (depth,)
    "within_km"                   of ``args``, latitude and longitude; ``value`` is (latitude, longitude, km)
    "part"                        of ``args[0]``, a timestamp; ``value`` is (one of TIME_PARTS, time zone or "")
    "col" "lit"                   the value of ``column``; the literal ``value``
    "prev" "next"                 of ``column`` in the ``value``-th row before or after, in definitions of patterns
    "+" "-" "*" "/" "neg"         of ``args``
    "coalesce" "case"             of ``args``, which of "case" are condition, value, ..., value otherwise
    ============================= ==========================================================================

    "and" and "or" have one or more arguments: ``a & b & c`` is one node, so long chains nest no deeper than short ones.
    ``type`` is that of a bound value; of a bound predicate it is None.
    """

    op: str
    column: str = ""
    value: Any = None
    args: tuple[Expr, ...] = ()
    type: ColumnType | None = None

    def __and__(self, other: Expr) -> Expr:
        return Expr("and", args=(*_operands(self, "and"), *_operands(other, "and")))

    def __or__(self, other: Expr) -> Expr:
        return Expr("or", args=(*_operands(self, "or"), *_operands(other, "or")))

    def __invert__(self) -> Expr:
        return Expr("not", args=(self,))

    def __bool__(self) -> bool:
        raise InvalidArgument("combine predicates with & | ~ and parentheses, not with and, or, not")

    def __str__(self) -> str:
        of = self.column or (str(self.args[0]) if self.args else "")
        match self.op:
            case "and" | "or":
                return f"({(' & ' if self.op == 'and' else ' | ').join(map(str, self.args))})"
            case "not":
                return f"~{of}"
            case "isin":
                return f"{of}.isin({list(self.value)!r})"
            case "is_null":
                return f"{of}.is_null()"
            case "startswith" | "contains" | "matches":
                return f"{of}.{self.op}({self.value!r})"
            case "under" | "covers":
                value, hierarchy = self.value
                return f"{of}.{self.op}({value!r}{f', {hierarchy!r}' if hierarchy else ''})"
            case "quad":
                return f"quad({', '.join(map(str, self.args))}, depth={self.value[0]})"
            case "within_km":
                return f"within_km({', '.join(map(str, (*self.args, *self.value)))})"
            case "part":
                name, zone = self.value
                return f"{of}.{name}({zone!r})" if zone else f"{of}.{name}()"
            case "col":
                return self.column
            case "lit":
                return repr(self.value)
            case "prev" | "next":
                return f"{self.op}({self.column}, {self.value})"
            case "neg":
                return f"(-{of})"
            case "coalesce":
                return f"coalesce({', '.join(map(str, self.args))})"
            case "case":
                pairs = zip(self.args[::2], self.args[1::2], strict=False)
                return f"case({', '.join(f'({a}, {b})' for a, b in pairs)}, otherwise={self.args[-1]})"
            case _:
                return f"({of} {self.op} {repr(self.value) if self.column else self.args[1]})"


def _operands(value: object, op: str) -> tuple[Expr, ...]:
    """Side by side, where an operand is a chain of the same operator."""
    if not isinstance(value, Expr):
        raise InvalidArgument(f"{shown(value)} is not a predicate: compare kivi.col(name) with a value first")
    return value.args if value.op == op else (value,)


@dataclass(frozen=True, slots=True, eq=False)
class Value(Expr):
    """An expression that stands for a value: it has arithmetic, and comparing it gives a predicate."""

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return self.is_null() if other is None else _compared("==", self, other)

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return ~self.is_null() if other is None else _compared("!=", self, other)

    def __lt__(self, other: object) -> Expr:
        return _compared("<", self, other)

    def __le__(self, other: object) -> Expr:
        return _compared("<=", self, other)

    def __gt__(self, other: object) -> Expr:
        return _compared(">", self, other)

    def __ge__(self, other: object) -> Expr:
        return _compared(">=", self, other)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: object) -> Value:
        return Value("+", args=(self, _node(other)))

    def __radd__(self, other: object) -> Value:
        return Value("+", args=(_node(other), self))

    def __sub__(self, other: object) -> Value:
        return Value("-", args=(self, _node(other)))

    def __rsub__(self, other: object) -> Value:
        return Value("-", args=(_node(other), self))

    def __mul__(self, other: object) -> Value:
        return Value("*", args=(self, _node(other)))

    def __rmul__(self, other: object) -> Value:
        return Value("*", args=(_node(other), self))

    def __truediv__(self, other: object) -> Value:
        return Value("/", args=(self, _node(other)))

    def __rtruediv__(self, other: object) -> Value:
        return Value("/", args=(_node(other), self))

    def __neg__(self) -> Value:
        return Value("neg", args=(self,))

    def isin(self, values: Iterable[object]) -> Expr:
        """True where it equals one of ``values``, which are no expressions."""
        found = listed(values)  # a text is one value: not its letters
        if found is None:
            raise InvalidArgument(f"isin takes a list of values, not {shown(values)}: write isin([{shown(values)}])")
        if any(isinstance(value, Expr) for value in found):
            raise InvalidArgument("isin takes values, not other columns or predicates: use == and |")
        if self.op == "col":
            return Expr("isin", self.column, found)
        return Expr("isin", value=found, args=(self,))

    def is_null(self) -> Expr:
        return Expr("is_null", self.column) if self.op == "col" else Expr("is_null", args=(self,))

    # -- text ---------------------------------------------------------------------------------------

    def startswith(self, prefix: str | bytes) -> Expr:
        """True where the text, or the bytes, begin with ``prefix``: ``kivi.col("route").startswith("/v1/")``."""
        return self._text("startswith", prefix)

    def contains(self, part: str | bytes) -> Expr:
        """True where ``part`` occurs in the text, or in the bytes."""
        return self._text("contains", part)

    def matches(self, pattern: str) -> Expr:
        """True where the regular expression matches some part of the text: ``kivi.col("route").matches("^/v[12]/")``.

        It is RE2's syntax (https://github.com/google/re2/wiki/Syntax), and takes time in proportion to the text. ``^``
        and ``$`` are the ends of the text, unless ``(?m)`` says of lines. At most 1,000 characters.
        """
        return self._text("matches", pattern)

    def _text(self, op: str, value: object) -> Expr:
        if isinstance(value, Expr):
            raise InvalidArgument(f"{op} takes a literal, not another column or predicate")
        return Expr(op, self.column, value) if self.op == "col" else Expr(op, value=value, args=(self,))

    # -- hierarchies --------------------------------------------------------------------------------

    def under(self, value: object, hierarchy: str = "") -> Expr:
        """True of ``value`` and of all below it: ``kivi.col("topic").under("us politics")``.

        ``hierarchy`` is the name of one that ``create_hierarchy`` made; the only one that has keys of the column's type
        need not be named. It is the one of the reader's snapshot, or of the moment at which a subscription began. Only
        in ``where=`` of reads, subscriptions and retractions.
        """
        return self._placed("under", value, hierarchy)

    def covers(self, value: object, hierarchy: str = "") -> Expr:
        """True of ``value`` and of all above it, up to the top; as ``under``."""
        return self._placed("covers", value, hierarchy)

    def _placed(self, op: str, value: object, hierarchy: str) -> Expr:
        if isinstance(value, Expr):
            raise InvalidArgument(f"{op} takes a value, not another column or predicate")
        if self.op == "quad":
            return self._in_cell(op, value)
        of = (value, hierarchy)
        return Expr(op, self.column, of) if self.op == "col" else Expr(op, value=of, args=(self,))

    def _in_cell(self, op: str, cell: object) -> Expr:
        """Of a quad: a cell is over all whose path begins with its own."""
        if not isinstance(cell, str) or not {*cell} <= {*"0123"}:
            raise InvalidArgument(f"{op} of a quad takes a cell, which is a text of 0, 1, 2 and 3, not {shown(cell)}")
        if op == "under":
            return self.startswith(cell)
        depth = self.value[0]
        return self.isin([cell[:depth]] if len(cell) >= depth else [])

    # -- parts of a timestamp -----------------------------------------------------------------------

    def year(self, tz: str = "") -> Value:
        """The year of a timestamp; without ``tz``, an IANA name such as "Europe/Paris", in UTC. So of all parts."""
        return self._part("year", tz)

    def month(self, tz: str = "") -> Value:
        """The month of a timestamp, 1 to 12."""
        return self._part("month", tz)

    def day(self, tz: str = "") -> Value:
        """The day of the month of a timestamp, 1 to 31."""
        return self._part("day", tz)

    def weekday(self, tz: str = "") -> Value:
        """The day of the week of a timestamp, 0 (Monday) to 6."""
        return self._part("weekday", tz)

    def hour(self, tz: str = "") -> Value:
        """The hour of a timestamp, 0 to 23: ``kivi.col("ts").hour(tz="Europe/Paris") < 6``."""
        return self._part("hour", tz)

    def minute(self, tz: str = "") -> Value:
        """The minute of a timestamp, 0 to 59."""
        return self._part("minute", tz)

    def second(self, tz: str = "") -> Value:
        """The second of a timestamp, 0 to 59."""
        return self._part("second", tz)

    def _part(self, name: str, tz: str) -> Value:
        return Value("part", value=(name, tz), args=(self,))

    # NumPy would make an array of expressions of ``np.int64(3) < kivi.col("n")``.
    __array_ufunc__ = None


def _compared(op: str, left: Expr, right: object) -> Expr:
    """A column beside a literal is one node, which most predicates are, and the readers of blocks know."""
    if not isinstance(right, Expr):
        right = _node(right)
    if left.op == "col" and right.op == "lit":
        return Expr(op, left.column, right.value)
    if left.op == "lit" and right.op == "col":
        return Expr(_MIRRORED[op], right.column, left.value)
    return Expr(op, args=(left, right))


def _node(value: object) -> Expr:
    return value if isinstance(value, Expr) else lit(value)


def lit(value: object) -> Value:
    """A literal as a value: only where Python's own operators would not make one."""
    if isinstance(value, dt.timedelta):
        check_whole_us(value, "a literal")
        value = value // dt.timedelta(microseconds=1)
    return Value("lit", value=value)


def col(name: str) -> Value:
    """A column, to compare or to calculate with: ``kivi.col("resp_time_us") > 120_000``."""
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"kivi.col takes the name of a column, not {shown(name)}")
    return Value("col", name)


def coalesce(*values: object) -> Value:
    """The first of the values that is not null: ``kivi.coalesce(kivi.col("discount"), 0)``."""
    if not values:
        raise InvalidArgument("coalesce takes one value or more")
    return Value("coalesce", args=tuple(map(_node, values)))


def case(*pairs: tuple[Expr, object], otherwise: object = None) -> Value:
    """The value beside the first condition that is true: ``kivi.case((kivi.col("status") >= 500, 1), otherwise=0)``."""
    args: list[Expr] = []
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], Expr):
            raise InvalidArgument(f"case takes pairs of a condition and a value, and otherwise=, not {shown(pair)}")
        args += (pair[0], _node(pair[1]))
    if not args:
        raise InvalidArgument("case takes one pair of a condition and a value, or more")
    return Value("case", args=(*args, _node(otherwise)))


def quad(lat: str | Value, lon: str | Value, depth: int = 12) -> Value:
    """The cell of a position in a quad-tree, a text of ``depth`` digits: ``kivi.quad("lat", "lon", depth=12)``.

    ``lat`` and ``lon`` are columns, or values, in degrees. The first digit says which quarter of the map it lies in (0
    north-west, 1 north-east, 2 south-west, 3 south-east), each further one which quarter of that. So cells are a
    hierarchy: ``kivi.quad("lat", "lon").under("12")`` is true of what lies in the cell "12", and ``.covers(cell)`` of
    what lies in a cell that has all of ``cell``. A value like any other, to group by as well.
    """
    return Value("quad", value=(depth,), args=_position(lat, lon, "quad takes the columns of latitude and longitude"))


def _position(lat: str | Value, lon: str | Value, advice: str) -> tuple[Expr, ...]:
    args = tuple(col(each) if isinstance(each, str) else each for each in (lat, lon))
    if not all(isinstance(each, Expr) for each in args):
        raise InvalidArgument(advice)
    return args


def within_km(lat: str | Value, lon: str | Value, at_lat: float, at_lon: float, km: float) -> Expr:
    """True where a position lies within ``km`` kilometres of another: ``kivi.within_km("lat", "lon", 48.9, 2.4, 5)``.

    ``lat`` and ``lon`` are columns, or values, in degrees; ``at_lat`` and ``at_lon`` are degrees. Distances are those
    of great circles on a sphere of 6371.0088 km (``kivi.model.expressions.positions``).
    """
    advice = "within_km takes the columns of latitude and longitude, then a latitude, longitude and km"
    return Expr("within_km", value=(at_lat, at_lon, km), args=_position(lat, lon, advice))


def all_of(*terms: Expr | None) -> Expr | None:
    """The terms that there are, joined by "and"; None if there are none."""
    there = [term for term in terms if term is not None]
    return functools.reduce(operator.and_, there) if there else None


def terms_of(predicate: Expr | None) -> tuple[Expr, ...]:
    """Of what ``all_of`` joins, each: whatever the predicate selects, all of them are true of."""
    return () if predicate is None else predicate.args if predicate.op == "and" else (predicate,)


def between(column: str, low: Any, beyond: Any) -> Expr | None:
    """low <= column < beyond, in stored form, None being no bound."""
    return all_of(
        None if low is None else Expr(">=", column, low), None if beyond is None else Expr("<", column, beyond)
    )


def names(expr: Expr) -> set[str]:
    """The columns that an expression reads."""
    return {expr.column} if expr.column else set().union(*(names(arg) for arg in expr.args))


def never_fails(expr: Expr) -> bool:
    """Whether it is about columns of one row, and no part of it can be out of range."""
    return expr.op in _SAFE and all(map(never_fails, expr.args))


def asks_hierarchy(expr: Expr) -> bool:
    """Whether a part of it is ``under`` or ``covers``, which mean something to a reader with a snapshot alone."""
    return expr.op in HIERARCHY or any(map(asks_hierarchy, expr.args))


def check_own(expr: Expr, what: str) -> None:
    """Raises InvalidArgument for what asks a hierarchy. ``what`` is evaluated where there is none."""
    if asks_hierarchy(expr):
        raise InvalidArgument(
            f"{what}: {expr}: under() and covers() are for where= of reads, questions, subscriptions and retractions, "
            "which have a snapshot to ask the hierarchy at"
        )


def check_shape(expr: Expr) -> None:
    """Raises InvalidArgument for a node that the functions here do not make. Its operands are not looked at."""
    op, count = expr.op, len(expr.args)
    if expr.column:
        right = count == 0 and (op in OF_COLUMNS or op == "col")
    elif op in ("and", "or", "coalesce"):
        right = count > 0
    elif op == "case":
        right = count > 2 and count % 2 == 1
    else:
        right = _OPERANDS.get(op) == count
    if not right or (op in TUPLES and not isinstance(expr.value, tuple)):
        raise InvalidArgument(
            f"{shown(op)} with {count} operands{' and a column' if expr.column else ''} is no expression"
        )


OF_COLUMNS: Final = COMPARISONS | TEXT | HIERARCHY | {"isin", "is_null", *BESIDE}
"""Operators that may have a column beside literals, in one node."""
_SAFE: Final = COMPARISONS | TEXT | {"and", "or", "not", "isin", "is_null", "col", "lit", "quad", "within_km", "part"}
TUPLES: Final = HIERARCHY | {"isin", "quad", "within_km", "part"}
"""Operators whose ``value`` is a tuple of literals."""
_OPERANDS: Final = dict.fromkeys((*COMPARISONS, *ARITHMETIC, "quad", "within_km"), 2) | {
    "lit": 0,
    "neg": 1,
    "not": 1,
    "isin": 1,
    "is_null": 1,
    "part": 1,
    **dict.fromkeys((*TEXT, *HIERARCHY), 1),
}
