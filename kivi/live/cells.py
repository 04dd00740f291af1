"""Where a stored subscription stands in the index: the *cells* of its predicate, which an event finds from its values.

A cell is a text: a *dimension*, which says how an event's values give cells, and a value. A predicate has one cell for
each of its clauses (``kivi.live.clauses``), of the column that leaves the fewest events; ranges have up to four::

    e  column                 equality                                 the value
    u  column hierarchy       under: events have those above them too  the row of the hierarchy
    c  column hierarchy       covers: likewise, those below            the row of the hierarchy
    q  lat lon length         the path of a cell of a quad-tree        the path
    p  column length          a prefix of a text                       the prefix
    r  column level           numbers that are equal but for their last ``level`` bits
    a                         everything

**Invariant.** Whatever hierarchies there are, an event that the predicate selects has one of its cells. If the cells
are *exact*, it selects every event that has one of them, and no event has two.

Floats are brought to integers that are in the same order, so that a range of either is one of integers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from kivi.live.clauses import Clause, clauses_of, is_word
from kivi.model.expressions import HIERARCHY, Expr
from kivi.model.expressions.texts import prefix_end
from kivi.model.types import INT64_MAX, INT64_MIN, ColumnType

__all__ = ["EVERYTHING", "Cells", "Dimension", "cell_of", "cells_of", "dimension_of", "number"]

_CELLS_MAX: Final = 256
"""Of one predicate; one that would have more is asked about every event."""
_BLOCKS_MAX: Final = 4
_LEVEL_STEP: Final = 4
"""Levels are multiples of it: an event asks each level that some subscription has."""
_VALUE_CHARS: Final = 64
"""A longer value is known by its hash."""
_TEXT: Final = ColumnType("string")


class Dimension(NamedTuple):
    """``column``: of a quad both, with a comma between. ``detail``: a hierarchy, a length or a level."""

    kind: str
    column: str = ""
    detail: str = ""

    def __str__(self) -> str:
        return "\t".join(self)

    @staticmethod
    def parse(text: str) -> Dimension:
        return Dimension(*text.split("\t"))


EVERYTHING: Final = Dimension("a")
_Found = tuple[float, Dimension, list[Any], bool]
"""About which part of all events is left, the dimension, values there, and whether they say all."""


class Cells(NamedTuple):
    cells: tuple[str, ...]
    dimensions: frozenset[Dimension]
    exact: bool


def cell_of(dimension: Dimension, value: Any) -> str:
    text = value.hex() if isinstance(value, bytes) else str(value)
    if len(text) > _VALUE_CHARS:
        text = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{dimension}\t{text}"


def dimension_of(cell: str) -> str:
    """Its dimension as text."""
    return "\t".join(cell.split("\t", 3)[:3])


def cells_of(where: Expr | None, types: Mapping[str, ColumnType]) -> Cells:
    """``types``: of the columns that an event has."""
    marked = _Marked(types)
    clauses = clauses_of(None if where is None else marked.plain(where), marked.types)
    if clauses is None:
        return _all(exact=False)
    chosen = [_chosen(clause, marked) for clause in clauses]
    found = {cell_of(dimension, value): None for _, dimension, values, _ in chosen for value in values}
    if len(found) > _CELLS_MAX:
        return _all(exact=False)
    dimensions = frozenset(dimension for _, dimension, _, _ in chosen)
    whole = all(says_all and clause.is_exact for (_, _, _, says_all), clause in zip(chosen, clauses, strict=True))
    alone = len(found) <= 1 or (len(dimensions) == 1 and next(iter(dimensions)).kind == "e")
    return Cells(tuple(found), dimensions, whole and alone)


def _all(exact: bool) -> Cells:
    return Cells((cell_of(EVERYTHING, ""),), frozenset((EVERYTHING,)), exact)


class _Marked:
    """A predicate whose nodes of hierarchies and quads are comparisons of columns that stand for them, each its own."""

    def __init__(self, types: Mapping[str, ColumnType]) -> None:
        self.types = dict(types)
        self.columns = frozenset(types)
        self.placed: dict[str, tuple[str, str, str]] = {}
        """What each of these columns stands for: kind, columns, hierarchy."""

    def plain(self, expr: Expr) -> Expr:
        match expr.op:
            case "and" | "or":
                return replace(expr, args=tuple(map(self.plain, expr.args)))
            case op if op in HIERARCHY and expr.column in self.columns:
                value, hierarchy = expr.value
                name = self._name("u" if op == "under" else "c", expr.column, hierarchy, self.types[expr.column])
                return Expr("==", name, value)
            case "startswith" if expr.args and self._is_path(expr):
                lat, lon = (arg.column for arg in expr.args[0].args)
                return Expr("==", self._name("q", f"{lat},{lon}", "", _TEXT), expr.value)
        return expr

    def _name(self, kind: str, column: str, detail: str, type_: ColumnType) -> str:
        name = f"\t{len(self.placed)}"
        self.placed[name] = kind, column, detail
        self.types[name] = type_
        return name

    def _is_path(self, expr: Expr) -> bool:
        """Whether it is the beginning of the path of a cell."""
        of = expr.args[0]
        return (
            of.op == "quad"
            and 0 < len(expr.value) <= of.value[0]
            and all(arg.op == "col" and self.types[arg.column].name == "float64" for arg in of.args)
        )


def _chosen(clause: Clause, marked: _Marked) -> _Found:
    """By what column it is found."""
    alone = len(clause.numbers) + len(clause.texts) == 1
    found: list[_Found] = [(2.0, EVERYTHING, [""], clause.is_open)]
    for name, (low, beyond) in clause.texts.items():
        if name in marked.placed:
            found.append(_placed(marked, name, low, alone))
        elif name in marked.columns:
            found.append(_of_text(name, low, beyond, alone))
    for name, (low, high) in clause.numbers.items():
        if name in marked.placed:
            found.append(_placed(marked, name, low, alone))
        elif name in marked.columns:
            found.append(_of_numbers(name, low, high, marked.types[name], alone))
    return min(found, key=lambda each: each[0])


def _placed(marked: _Marked, name: str, value: Any, alone: bool) -> _Found:
    kind, column, detail = marked.placed[name]
    if kind == "q":
        return 0.5 ** len(value), Dimension(kind, column, str(len(value))), [value], alone
    return 0.01, Dimension(kind, column, detail), [number(value)], alone


def _of_text(name: str, low: Any, beyond: Any, alone: bool) -> _Found:
    if is_word((low, beyond)):
        return 0.0, Dimension("e", name), [low], alone
    if low and beyond is not None:
        is_prefix = beyond == prefix_end(low)
        prefix = low if is_prefix else _common(low, beyond)
        if prefix:
            return 0.1 / len(prefix), Dimension("p", name, str(len(prefix))), [prefix], alone and is_prefix
    return 2.0, EVERYTHING, [""], False


def _common(a: Any, b: Any) -> Any:
    """The longest prefix of both."""
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _of_numbers(name: str, low: Any, high: Any, type_: ColumnType, alone: bool) -> _Found:
    if low == high:
        return 0.5 if type_.name == "bool" else 0.0, Dimension("e", name), [number(low)], alone
    low, high = number(low), number(high)
    level = 0
    while (high >> level) - (low >> level) >= _BLOCKS_MAX:
        level += _LEVEL_STEP
    if low == INT64_MIN or high == INT64_MAX or level >= 64 - _LEVEL_STEP:
        return 2.0, EVERYTHING, [""], False
    blocks = range(low >> level, (high >> level) + 1)
    return 0.1 + level / 64, Dimension("r", name, str(level)), [*blocks], alone and level == 0 and len(blocks) == 1


def number(value: Any) -> Any:
    """Floats as integers in their order; bools as integers; others as they are."""
    if isinstance(value, float):
        return _ordered(value)
    return int(value) if isinstance(value, bool) else value


def _ordered(value: float) -> int:
    """An integer: of two floats the greater one has the greater integer. Both zeros have the same."""
    bits: int = struct.unpack("<q", struct.pack("<d", value + 0.0))[0]
    return bits if bits >= 0 else INT64_MIN - bits
