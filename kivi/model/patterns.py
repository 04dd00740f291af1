"""Patterns: rows of a partition that follow each other, as SQL:2016 recognizes them, one row of an answer per match.

``Pattern`` is what a caller writes, and knows no table; ``Match`` is the same asked of an event table: checked, bound,
with the columns of its answer. What it means:

* The events of a partition (equal ``partition_by`` columns; null is a value of its own) are rows in the total order
  (event time, CTS, position in the commit). A match is rows that follow each other without a gap, each of one symbol,
  such that the symbols make a word of the pattern and the definition of each row's symbol is true of the row. A symbol
  without a definition is true of any row.
* ``within``: the last row's event time is at most so much after the first one's. Rows beyond are no part of a match.
* A definition sees the row, and with ``prev("x", n)`` and ``next("x", n)`` the n-th row before and after it in the
  partition, in the match or not; null where there is none. It is true or it is not: a value out of range is not true.
* Of the matches that begin at a row the *preferred* one counts: of an alternation the first part that leads to a match,
  of a quantifier as many rows as lead to one, or if reluctant as few, the choices in front deciding first.
* Rows are tried in their order. After a match it goes on where ``skip`` says: behind its last row (``past_last_row``),
  at the row after its first one (``to_next_row``), or at the first or last row of a symbol (``to_first A``,
  ``to_last A``), which must be in each match and not its first row, so that there is always progress.

The answer has the columns of ``partition_by`` and then the measures, over all rows of the match, or of one symbol if
the column is written as "A.ts". ``first`` and ``last`` are the value in the first and the last row, null if it is null
there or there is no row; the others leave nulls out, and are null of no value, ``count`` 0. Rows of the answer come in
the order of the first rows of their matches.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.expressions import Expr, Value, bind, check_own, from_plain, to_plain
from kivi.model.expressions.nodes import ROWS_BESIDE_MAX
from kivi.model.measuring import NUMBERS
from kivi.model.names import check_disjoint, check_name, is_name, name_list
from kivi.model.pattern_text import (
    Alternation,
    Concatenation,
    Node,
    Repetition,
    Symbol,
    firsts,
    is_mandatory,
    lengths,
    may_lead,
    parsed,
    symbols,
)
from kivi.model.questions import seen_schema
from kivi.model.schema import Column, Measure, OperatorCall, TableSchema
from kivi.model.slots import parse_duration_us
from kivi.model.types import ColumnType, shown

__all__ = [
    "Match",
    "MatchMeasure",
    "Pattern",
    "Skip",
    "check_followed",
    "looks_ahead",
    "match_of",
    "matched_schema",
    "next",
    "pattern",
    "prev",
    "sees_inside",
]

_SYMBOLS_MAX: Final = 32
_SKIP: Final = re.compile(r"\s*(past_last_row|to_next_row|to_first|to_last)(?:\s+(\S+))?\s*\Z")
_ORDERED: Final = (*NUMBERS, "timestamp")
_MEASURES: Final = ("first", "last", "count", "sum", "min", "max", "avg")
_INT, _FLOAT = ColumnType("int64"), ColumnType("float64")

Stored = Callable[[ColumnType, Any, str], Any]


@dataclass(frozen=True, slots=True)
class Skip:
    """Where to go on after a match: "past_last_row", "to_next_row", "to_first" or "to_last" of a symbol."""

    to: str = "past_last_row"
    symbol: str = ""

    def __str__(self) -> str:
        return f"{self.to} {self.symbol}".strip()


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """Made by ``pattern``. ``define`` and ``measures`` are as they were given, in order."""

    text: str
    tree: Node
    partition_by: tuple[str, ...]
    within_us: int | None
    define: tuple[tuple[str, Expr], ...]
    measures: tuple[tuple[str, OperatorCall], ...]
    skip: Skip

    def __str__(self) -> str:
        within = "" if self.within_us is None else f" within {dt.timedelta(microseconds=self.within_us)}"
        return f"pattern ({self.text}){within}, skip {self.skip}"

    def to_json(self) -> str:
        plain = {
            "text": self.text,
            "partition_by": self.partition_by,
            "within": self.within_us,
            "define": {name: to_plain(definition) for name, definition in self.define},
            "measures": [call.as_measure(name).to_plain() for name, call in self.measures],
            "skip": str(self.skip),
        }
        return json.dumps(plain, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Pattern:
        """The inverse. Raises InvalidArgument, SchemaError for what ``to_json`` does not make."""
        try:
            plain = json.loads(text)
            plain["define"] = {name: from_plain(definition) for name, definition in plain["define"].items()}
            measures = map(Measure.from_plain, plain["measures"])
            plain["measures"] = {measure.name: measure.call for measure in measures}
            return pattern(**plain)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InvalidArgument("the definition of a pattern cannot be read") from None


def pattern(
    text: str,
    *,
    partition_by: Iterable[str] = (),
    within: str | int | dt.timedelta | None = None,
    define: Mapping[str, Expr] | None = None,
    measures: Mapping[str, OperatorCall] | None = None,
    skip: str = "past_last_row",
) -> Pattern:
    """A pattern over the rows of an event table, as of SQL's MATCH_RECOGNIZE: see ``kivi.model.patterns``.

    ``text``: symbols that follow each other, with ``( ) |`` and the quantifiers ``* + ? {m,n}``, reluctant with a "?"
    behind them. ``define``: predicates by symbol, such as ``{"B": kivi.col("us") > kivi.prev("us")}``; a symbol without
    one is any row. ``measures``: ``kivi.first``, ``last``, ``count``, ``sum``, ``min``, ``max``, ``avg`` of a column,
    or of a symbol's rows, as ``kivi.first("A.ts")`` and ``kivi.count("B")``. ``skip``: "past_last_row", "to_next_row",
    "to_first A" or "to_last A". Raises InvalidArgument, SchemaError.
    """
    tree = parsed(text)
    known = symbols(tree)
    names = name_list(partition_by, "partition_by")
    for part, given in (("define", define), ("measures", measures)):
        if given is not None and not isinstance(given, Mapping):
            raise InvalidArgument(f"{part} of a pattern maps names to what they are, and is {shown(given)}")
    for name, definition in (define or {}).items():
        if name not in known:
            raise InvalidArgument(f"{shown(name)} is defined, and no symbol of the pattern: it has {', '.join(known)}")
        if not isinstance(definition, Expr):
            raise InvalidArgument(
                f"the definition of {name!r} is a predicate like kivi.col('x') > 5, not {shown(definition)}"
            )
    if len(define or {}) > _SYMBOLS_MAX:
        raise InvalidArgument(f"{len(define or {})} symbols are defined: at most {_SYMBOLS_MAX}")
    for name, call in (measures or {}).items():
        check_name(name, "measure")
        if not isinstance(call, OperatorCall):
            raise SchemaError(f"measure {name!r} is kivi.first('A.ts') or another measure, not {shown(call)}")
    check_disjoint("the pattern's answer", (*names, *(measures or ())))
    if not names and not measures:
        raise InvalidArgument("the answer would have no column: give the pattern measures or partition_by")
    within_us = None if within is None else parse_duration_us(within, "within")
    return Pattern(
        text, tree, names, within_us, tuple((define or {}).items()), tuple((measures or {}).items()), _skip(tree, skip)
    )


def _skip(tree: Node, skip: object) -> Skip:
    found = _SKIP.match(skip) if isinstance(skip, str) else None
    if found is None or (found[2] is None) != (found[1] in ("past_last_row", "to_next_row")):
        raise InvalidArgument(
            f"skip={shown(skip)}: it is 'past_last_row', 'to_next_row', or 'to_first A' or 'to_last A' of a symbol"
        )
    to, symbol = found[1], found[2] or ""
    if symbol and symbol not in symbols(tree):
        raise InvalidArgument(
            f"skip={skip!r}: {symbol!r} is no symbol of the pattern, which has {', '.join(symbols(tree))}"
        )
    if symbol and not is_mandatory(tree, symbol):
        raise InvalidArgument(f"skip={skip!r}: not each match has a row of {symbol!r}; name a symbol that each has")
    if symbol and (symbol in firsts(tree) if to == "to_first" else may_lead(tree, symbol)):
        raise InvalidArgument(
            f"skip={skip!r}: that may be the first row of the match, which would be found again: use 'to_next_row'"
        )
    return Skip(to, symbol)


def prev(column: str, n: int = 1) -> Value:
    """In a definition of a pattern: the column's value in the n-th row before, in the partition; null of none."""
    return _beside("prev", column, n)


def next(column: str, n: int = 1) -> Value:
    """In a definition of a pattern: the column's value in the n-th row after, in the partition; null of none."""
    return _beside("next", column, n)


def _beside(op: str, column: object, n: object) -> Value:
    if isinstance(column, Expr) and column.op == "col":
        column = column.column
    if not isinstance(column, str):
        raise InvalidArgument(f"{op} takes the name of a column, as {op}('resp_time_us', 1), not {shown(column)}")
    if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= ROWS_BESIDE_MAX:
        raise InvalidArgument(f"{op}({column!r}, {shown(n)}): by 0 to {ROWS_BESIDE_MAX:,} rows")
    return Value(op, column, n)


# -- asked of a table --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MatchMeasure:
    """``operator`` over the rows of ``symbol``, or of the match if that is empty; of ``column``, or none to count rows.

    ``type``: of the answer's column. ``source``: as the caller wrote it.
    """

    name: str
    operator: str
    symbol: str
    column: str
    type: ColumnType
    source: str | None


@dataclass(frozen=True, slots=True)
class Match:
    """A pattern asked of a table. ``define`` is bound; ``columns``: of the answer; ``start_us`` (inclusive) and
    ``end_us`` (exclusive) bound the event time, None is no bound."""

    pattern: Pattern
    partition_by: tuple[tuple[str, ColumnType], ...]
    define: tuple[tuple[str, Expr], ...]
    measures: tuple[MatchMeasure, ...]
    start_us: int | None
    end_us: int | None

    @property
    def columns(self) -> list[tuple[str, ColumnType]]:
        return [*self.partition_by, *((measure.name, measure.type) for measure in self.measures)]

    def keeps_together(self, columns: Iterable[str]) -> bool:
        """Whether the events of a partition have the same values of these columns."""
        return {name for name, _ in self.partition_by}.issuperset(columns)

    @property
    def needs_symbols(self) -> bool:
        """Whether it counts which row of a match is of which symbol."""
        return bool(self.pattern.skip.symbol) or any(measure.symbol for measure in self.measures)


def match_of(
    schema: TableSchema, asked: Pattern, start: Any = None, end: Any = None, stored: Stored = ColumnType.to_stored
) -> Match:
    """What a caller asks, checked. ``stored`` is as of ``bind``. Raises SchemaError, InvalidArgument."""
    if not isinstance(asked, Pattern):
        raise InvalidArgument(f"match takes a pattern, made by kivi.pattern('A B+ C', ...), not {shown(asked)}")
    if schema.kind != "event":
        raise InvalidArgument(f"{schema.name!r} is no event table: patterns are of events")
    seen = seen_schema(schema)
    known = symbols(asked.tree)

    def type_of(name: str) -> ColumnType:
        if name.partition(".")[0] in known and "." in name:
            raise SchemaError(
                f"{name!r}: a definition does not see the rows of other symbols; it sees its own row, by "
                "kivi.col('x'), and those beside it, by kivi.prev('x', n) and kivi.next('x', n)"
            )
        return seen.column(name).type

    for name, definition in asked.define:
        check_own(definition, f"the definition of {name}")
    define = tuple((name, bind(definition, type_of, stored, beside=True)) for name, definition in asked.define)
    partition_by = tuple((name, schema.column(name).type) for name in asked.partition_by)
    measures = tuple(_measure(schema, known, name, call) for name, call in asked.measures)
    bounds = [None if moment is None else int(schema.stored_bound(moment)[0]) for moment in (start, end)]
    return Match(asked, partition_by, define, measures, bounds[0], bounds[1])


def _measure(schema: TableSchema, known: list[str], name: str, call: OperatorCall) -> MatchMeasure:
    if call.operator not in _MEASURES or call.options:
        raise SchemaError(f"measure {name!r}: {call} is not of matches, which have {', '.join(_MEASURES)}")
    if call.expression is not None or call.where is not None:
        raise SchemaError(
            f"measure {name!r}: of a match it is of a column, as 'x', or 'A.x' of a symbol's rows; without where= and "
            "without an expression"
        )
    symbol, column = "", call.argument or ""
    before, dot, after = column.partition(".")
    if dot:
        symbol, column = before, after
    elif call.operator == "count" and column in known:
        symbol, column = column, ""
    if symbol and symbol not in known:
        raise SchemaError(
            f"measure {name!r}: {shown(symbol)} is no symbol of the pattern, which has {', '.join(known)}"
        )
    if call.operator == "count" and not column and not dot:
        return MatchMeasure(name, "count", symbol, "", _INT, call.argument)
    if not is_name(column):
        raise SchemaError(f"measure {name!r}: {shown(call.argument)} is no column: write 'x', or 'A.x'")
    type_ = schema.column(column).type
    takes: tuple[str, ...] = {"sum": NUMBERS, "avg": NUMBERS, "min": _ORDERED, "max": _ORDERED}.get(call.operator, ())
    if takes and type_.name not in takes:
        raise SchemaError(f"measure {name!r}: {call.operator} is of {', '.join(takes)}, and {column!r} is a {type_}")
    match call.operator:
        case "count":
            type_ = _INT
        case "avg":
            type_ = _FLOAT
        case "sum" if type_.name == "decimal":
            type_ = ColumnType("decimal", 18, type_.scale)
    return MatchMeasure(name, call.operator, symbol, column, type_, call.argument)


def sees_inside(match: Match) -> bool:
    """Whether its definitions see rows of the match alone: whatever lies beside a match changes nothing about it."""
    tree, defined = match.pattern.tree, dict(match.define)
    reach = {name: (_reach(definition, "prev"), _reach(definition, "next")) for name, definition in defined.items()}
    before, after = _beside_least(tree), _beside_least(tree, mirrored=True)
    return all(back <= before[name] and ahead <= after[name] for name, (back, ahead) in reach.items())


def rows_beside(match: Match) -> int:
    """How far the rows beside their own lie at most that its definitions see."""
    return max([_reach(definition, op) for _, definition in match.define for op in ("prev", "next")], default=0)


def _reach(expr: Expr, op: str) -> int:
    return max([expr.value if expr.op == op else 0, *(_reach(arg, op) for arg in expr.args)])


def _beside_least(node: Node, mirrored: bool = False) -> dict[str, int]:
    """How many rows of the match are at least before a row of each symbol; ``mirrored``: after it."""
    found = dict[str, int]()

    def visit(node: Node, rows: int) -> None:
        match node:
            case Symbol(name):
                found[name] = min(rows, found.get(name, rows))
            case Repetition(body):
                visit(body, rows)
            case Alternation(parts):
                for part in parts:
                    visit(part, rows)
            case Concatenation(parts):
                for part in reversed(parts) if mirrored else parts:
                    visit(part, rows)
                    rows += lengths(part)[0]

    visit(node, 0)
    return found


def looks_ahead(expr: Expr) -> bool:
    """Whether a definition sees rows behind its own."""
    return _reach(expr, "next") > 0


def matched_schema(schema: TableSchema, match: Match) -> TableSchema:
    """The rows of its answer, as those of a table."""
    columns = tuple(Column(name, type_) for name, type_ in match.columns)
    return TableSchema(schema.name, "row", (), columns, id=schema.id)


def check_followed(match: Match) -> None:
    """Raises InvalidArgument for a pattern whose matches are never sure before all events are there."""
    if match.pattern.within_us is None:
        raise InvalidArgument(
            "a pattern without within has matches that may begin and end at any time: give it a within, such as '15m', "
            "to follow them"
        )
    if not sees_inside(match):
        raise InvalidArgument(
            "a definition looks at rows that may lie outside the match, and so any time away: to follow matches, let "
            "prev and next see rows of the match alone, as prev('x') does in B of 'A B+ C'"
        )
