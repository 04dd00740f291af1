"""Which queries select which rows: many queries and many rows at once.

Most predicates are one comparison or a few, joined by "and": of some columns a range each. Those over the same columns
are a *shape*: their bounds are NumPy columns, one entry a query, and rows are compared with all of them by a few calls.
Where a shape has a column that is compared for equality, its constants are sorted and each row finds its queries by
bisection, so that a row costs its hits and not the number of queries; text is brought to codes first. Ranges alone are
compared in blocks, every row with every query. All other predicates (or, not, isin, nulls) are evaluated one by one.

Nulls match no comparison, as in ``kivi.expr``. Measured (``make bench GOAL=8``): the comparisons of one core are far
more than its rows can be read for.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.columns import arrow_type, flat, stored_array
from kivi.arrow.predicates import filter_batch
from kivi.expr import Expr, matches, names
from kivi.types import INT64_MAX, INT64_MIN, ColumnType

__all__ = ["BatchColumns", "Columns", "Matcher", "RowColumns"]

_CELLS: Final = 1 << 22
"""A block of comparisons: 4 MB a column."""
_INTEGERS: Final = frozenset({"int64", "timestamp", "decimal", "bool"})

Q = TypeVar("Q", bound=Hashable)
Array = npt.NDArray[Any]


class Words:
    """The constants that one text column is compared with, each once."""

    def __init__(self, values: Sequence[Any], type_: ColumnType) -> None:
        self.at = {value: i for i, value in enumerate(dict.fromkeys(values))}
        self.array = pa.array(list(self.at), arrow_type(type_))
        self.of = np.array([self.at[value] for value in values], np.int64)


# -- the rows ----------------------------------------------------------------------------------------------


class Columns:
    """Rows by columns, as NumPy in stored form. ``rows``: how many."""

    rows: int

    def numbers(self, name: str, type_: ColumnType) -> tuple[Array, Array | None]:
        """Values and where they are known; int64 or float64. Integers beyond int64 are brought to its ends."""
        raise NotImplementedError

    def codes(self, name: str, words: Words) -> Array:
        """Of each row the position of its value among ``words``; -1 if it is none of them."""
        raise NotImplementedError

    def select(self, where: Expr, types: Mapping[str, ColumnType]) -> Array:
        """The rows that a predicate selects."""
        raise NotImplementedError


class RowColumns(Columns):
    """Rows as dicts of stored-form values."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = len(rows)
        self._listed = rows
        self._numbers: dict[str, tuple[Array, Array | None]] = {}

    def numbers(self, name: str, type_: ColumnType) -> tuple[Array, Array | None]:
        found = self._numbers.get(name)
        if found is None:
            values = [row[name] for row in self._listed]
            known = None
            if None in values:
                known = np.fromiter((value is not None for value in values), np.bool_, len(values))
                values = [0 if value is None else value for value in values]
            dtype = np.float64 if type_.name == "float64" else np.int64
            try:
                array = np.array(values, dtype)
            except OverflowError:  # a sum that has left 64 bits for now
                array = np.array([min(max(value, INT64_MIN), INT64_MAX) for value in values], dtype)
            found = self._numbers[name] = array, known
        return found

    def codes(self, name: str, words: Words) -> Array:
        at = words.at
        return np.fromiter((at.get(row[name], -1) for row in self._listed), np.int64, self.rows)

    def select(self, where: Expr, types: Mapping[str, ColumnType]) -> Array:
        return np.array([i for i, row in enumerate(self._listed) if matches(where, row)], np.int64)


class BatchColumns(Columns):
    """A record batch of events."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.rows = batch.num_rows
        self._batch = batch

    def numbers(self, name: str, type_: ColumnType) -> tuple[Array, Array | None]:
        column = flat(self._batch.column(name))
        known = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None
        return stored_array(type_, column), known

    def codes(self, name: str, words: Words) -> Array:
        column, wanted = self._batch.column(name), words.array
        kind = wanted.type
        if pa.types.is_dictionary(column.type):
            of_words = pc.index_in(column.dictionary.cast(kind), wanted).fill_null(-1)
            found = of_words.take(column.indices).fill_null(-1)
        else:
            found = pc.index_in(flat(column).cast(kind), wanted).fill_null(-1)
            if column.null_count:
                found = pc.if_else(column.is_valid(), found, -1)
        return found.to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]

    def select(self, where: Expr, types: Mapping[str, ColumnType]) -> Array:
        batch = self._batch.select(sorted(names(where)))
        batch = pa.RecordBatch.from_arrays([flat(c) for c in batch.columns], names=batch.schema.names)
        batch = batch.append_column("", pa.array(np.arange(self.rows)))
        selected = filter_batch(batch, where, types)
        return selected.column(selected.num_columns - 1).to_numpy()  # type: ignore[no-any-return]


# -- the queries -------------------------------------------------------------------------------------------


class _Ranges(NamedTuple):
    """Per column: (least, largest) for numbers; a constant for text."""

    numbers: dict[str, tuple[Any, Any]]
    texts: dict[str, Any]


def _ranges(where: Expr | None, types: Mapping[str, ColumnType]) -> _Ranges | None:
    """The predicate as ranges; None if it is none."""
    found = _Ranges({}, {})
    if where is None:
        return found
    for term in where.args if where.op == "and" else (where,):
        if term.op in ("and", "or", "not", "isin", "is_null", "!="):
            return None
        type_, name, value = types[term.column], term.column, term.value
        if type_.name not in _INTEGERS and type_.name != "float64":
            if term.op != "==" or name in found.texts:
                return None
            found.texts[name] = value
            continue
        exact = type_.name in _INTEGERS
        low, high = found.numbers.get(name, (INT64_MIN, INT64_MAX) if exact else (-math.inf, math.inf))
        match term.op:
            case "==":
                low, high = max(low, value), min(high, value)
            case ">=":
                low = max(low, value)
            case "<=":
                high = min(high, value)
            case ">" if exact:
                low = max(low, int(value) + 1)
            case "<" if exact:
                high = min(high, int(value) - 1)
            case ">":
                low = max(low, math.nextafter(value, math.inf))
            case "<":
                high = min(high, math.nextafter(value, -math.inf))
        if low > INT64_MAX or high < INT64_MIN:  # beyond every value
            low, high = 1, 0
        found.numbers[name] = low, high
    return found


class _Shape(Generic[Q]):
    """Queries that constrain the same columns in the same way."""

    def __init__(self, texts: tuple[str, ...], equal: tuple[str, ...], ranged: tuple[str, ...]) -> None:
        self._texts, self._equal, self._ranged = texts, equal, ranged
        self.queries: dict[Q, _Ranges] = {}
        self._listed: list[Q] = []
        self._bounds: dict[str, tuple[Array, Array]] = {}
        self._words: dict[str, Words] = {}
        self._first: str | None = None
        """The column that is looked up: of those that are compared for equality, the one with the most constants."""
        self._sorted: tuple[Array, Array] | None = None
        self.changed = True

    def _arrange(self, types: Mapping[str, ColumnType]) -> None:
        self.changed = False
        self._listed = list(self.queries)
        wanted = list(self.queries.values())
        for name in (*self._equal, *self._ranged):
            dtype = np.float64 if types[name].name == "float64" else np.int64
            low = np.array([ranges.numbers[name][0] for ranges in wanted], dtype)
            high = np.array([ranges.numbers[name][1] for ranges in wanted], dtype)
            self._bounds[name] = low, high
        for name in self._texts:
            self._words[name] = Words([ranges.texts[name] for ranges in wanted], types[name])
        named = [(len(self._words[name].at), name) for name in self._texts]
        named += [(len(np.unique(self._bounds[name][0])), name) for name in self._equal]
        first = self._first = max(named)[1] if named else None
        if first is not None:
            constants = self._words[first].of if first in self._words else self._bounds[first][0]
            order = np.argsort(constants, kind="stable")
            self._sorted = constants[order], order

    def pairs(self, columns: Columns, types: Mapping[str, ColumnType]) -> Iterator[tuple[Array, Array, list[Q]]]:
        """(rows, queries, which queries the numbers are): the hits, in blocks."""
        if self.changed:
            self._arrange(types)
        first = self._first
        values = {name: columns.numbers(name, types[name]) for name in (*self._equal, *self._ranged)}
        codes = {name: columns.codes(name, words) for name, words in self._words.items()}
        step = max(1, _CELLS // max(1, len(self._listed)))
        for begin in range(0, columns.rows, step):
            rows = np.arange(begin, min(begin + step, columns.rows))
            if first is not None and self._sorted is not None:
                constants, order = self._sorted
                looked = codes[first][rows] if first in codes else values[first][0][rows]
                low, high = np.searchsorted(constants, looked, "left"), np.searchsorted(constants, looked, "right")
                counts = high - low
                hit_rows = np.repeat(rows, counts)
                ends = np.cumsum(counts)
                within = np.arange(len(hit_rows)) - np.repeat(ends - counts, counts)
                hit_queries = order[np.repeat(low, counts) + within]
            elif self._ranged:
                name = self._ranged[0]
                held = values[name][0][rows, None]
                bounds = self._bounds[name]
                at, hit_queries = np.nonzero((held >= bounds[0]) & (held <= bounds[1]))
                hit_rows = rows[at]
            else:  # no predicate at all
                hit_rows = np.repeat(rows, len(self._listed))
                hit_queries = np.tile(np.arange(len(self._listed)), len(rows))
            keep = np.ones(len(hit_rows), np.bool_)
            for name, (array, known) in values.items():
                low_bounds, high_bounds = self._bounds[name]
                held = array[hit_rows]
                keep &= (held >= low_bounds[hit_queries]) & (held <= high_bounds[hit_queries])
                if known is not None:
                    keep &= known[hit_rows]
            for name, array in codes.items():
                keep &= array[hit_rows] == self._words[name].of[hit_queries]
            if not keep.all():
                hit_rows, hit_queries = hit_rows[keep], hit_queries[keep]
            if len(hit_rows):
                yield hit_rows, hit_queries, self._listed


class Matcher(Generic[Q]):
    """Queries by their predicates. Not thread safe."""

    def __init__(self, types: Mapping[str, ColumnType]) -> None:
        self._types = types
        self._shapes: dict[tuple[tuple[str, ...], ...], _Shape[Q]] = {}
        self._shape_of: dict[Q, tuple[tuple[str, ...], ...]] = {}
        self._others: dict[Q, Expr] = {}

    def __len__(self) -> int:
        return len(self._shape_of) + len(self._others)

    def add(self, query: Q, where: Expr | None) -> None:
        ranges = _ranges(where, self._types)
        if ranges is None:
            assert where is not None
            self._others[query] = where
            return
        equal = tuple(sorted(name for name, (low, high) in ranges.numbers.items() if low == high))
        ranged = tuple(sorted(ranges.numbers.keys() - set(equal)))
        kind = (tuple(sorted(ranges.texts)), equal, ranged)
        shape = self._shapes.get(kind)
        if shape is None:
            shape = self._shapes[kind] = _Shape(*kind)
        shape.queries[query] = ranges
        shape.changed = True
        self._shape_of[query] = kind

    def remove(self, query: Q) -> None:
        """Harmless if it is not there."""
        self._others.pop(query, None)
        kind = self._shape_of.pop(query, None)
        if kind is not None:
            shape = self._shapes[kind]
            del shape.queries[query]
            shape.changed = True
            if not shape.queries:
                del self._shapes[kind]

    def hits(self, columns: Columns) -> Iterator[tuple[int, Q]]:
        """(row, query) for each query that selects a row; of one query in the order of the rows."""
        if not columns.rows:
            return
        for shape in self._shapes.values():
            for rows, queries, listed in shape.pairs(columns, self._types):
                yield from zip(rows.tolist(), map(listed.__getitem__, queries.tolist()), strict=True)
        for query, where in self._others.items():
            yield from ((row, query) for row in columns.select(where, self._types).tolist())
