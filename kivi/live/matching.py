"""Which queries select which rows: many queries and many rows at once.

Most predicates are a range of some columns each, or a few such clauses joined by "or" (``kivi.live.clauses``). Clauses
over the same columns are a *shape*: their bounds are NumPy columns, one entry a clause. One column of a shape is looked
up: its ranges are sorted, in buckets of about one width, and each row's value finds its clauses in each by bisection;
what is left is compared with the other columns by a few calls. So a row costs the queries that it hits, about, and not
all there are. Equality is a range of no width. Text is brought to integers first: to codes where clauses ask for one
text each, else to its rank among all bounds, so that prefixes and ranges of text are ranges of ranks.

A query of several clauses comes once, with the rows of all; one of which a clause is not exact is asked about those
rows again. Predicates without clauses (of nulls, of arithmetic, of != alone) are evaluated one by one.

Nulls match no comparison, as in ``kivi.model.expressions``.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.columns import arrow_type, flat, stored_array
from kivi.arrow.predicates import filter_batch
from kivi.errors import OutOfRange
from kivi.live.clauses import Clause, clauses_of, is_word
from kivi.model.expressions import Expr, matches, names
from kivi.model.types import INT64_MAX, INT64_MIN, ColumnType

__all__ = ["BatchColumns", "Columns", "Matcher", "RowColumns"]

_PAIRS: Final = 1 << 18
"""Of rows with queries, that are compared at a time: 2 MB a column."""

Q = TypeVar("Q", bound=Hashable)
Array = npt.NDArray[Any]


class Words:
    """The constants that one text column is compared with, each once."""

    def __init__(self, values: Sequence[Any], type_: ColumnType) -> None:
        self.at = {value: i for i, value in enumerate(dict.fromkeys(values))}
        self.array = pa.array(list(self.at), arrow_type(type_))
        self.of = np.array([self.at[value] for value in values], np.int64)


class Ranks:
    """The bounds of one text column's ranges, each once, in order: a text's rank is how many of them are not above it.

    A range is then one of ranks, (least, largest), INT64_MIN and INT64_MAX being no bound.
    """

    def __init__(self, ranges: Sequence[tuple[Any, Any]]) -> None:
        self._bounds = sorted({bound for each in ranges for bound in each if bound is not None})
        at = {bound: i for i, bound in enumerate(self._bounds)}
        self.low = np.array([INT64_MIN if low is None else at[low] + 1 for low, _ in ranges], np.int64)
        self.high = np.array([INT64_MAX if beyond is None else at[beyond] for _, beyond in ranges], np.int64)

    def of(self, values: Sequence[Any]) -> tuple[Array, Array | None]:
        """The rank of each, and where they are known; None: everywhere."""
        ranks = [-1 if value is None else bisect.bisect_right(self._bounds, value) for value in values]
        found = np.array(ranks, np.int64)
        return found, found >= 0 if None in values else None


# -- the rows ----------------------------------------------------------------------------------------------


class RowColumns:
    """Rows as dicts of stored-form values.

    ``numbers``: values and where they are known, int64 or float64; integers beyond int64 are brought to its ends.
    ``codes``: of each row the position of its value among some words; -1 if it is none of them. ``ranks``: of each row
    the rank of its text, and where it is known. ``select``: the rows that a predicate selects, or those ``among`` some.
    """

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

    def ranks(self, name: str, ranks: Ranks) -> tuple[Array, Array | None]:
        return ranks.of([row[name] for row in self._listed])

    def select(self, where: Expr, types: Mapping[str, ColumnType], among: Array | None = None) -> Array:
        rows = range(self.rows) if among is None else among.tolist()
        return np.array([i for i in rows if matches(where, self._listed[i])], np.int64)


class BatchColumns:
    """The same of a record batch."""

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

    def ranks(self, name: str, ranks: Ranks) -> tuple[Array, Array | None]:
        column = self._batch.column(name)
        if not pa.types.is_dictionary(column.type):
            column = flat(column).dictionary_encode()
        found, _ = ranks.of(column.dictionary.to_pylist())
        if not column.null_count:
            return found[column.indices.to_numpy()], None
        known = column.is_valid().to_numpy(zero_copy_only=False)
        at = column.indices.fill_null(0).to_numpy()
        return np.where(known, found[at] if len(found) else 0, -1), known

    def select(self, where: Expr, types: Mapping[str, ColumnType], among: Array | None = None) -> Array:
        batch = self._batch.select(sorted(names(where)))
        rows = np.arange(self.rows)
        if among is not None:
            batch, rows = batch.take(pa.array(among)), among
        columns = [pa.array(rows), *map(flat, batch.columns)]
        batch = pa.RecordBatch.from_arrays(columns, names=["", *batch.schema.names])
        return filter_batch(batch, where, types).column(0).to_numpy()  # type: ignore[no-any-return]


Columns = RowColumns | BatchColumns


# -- the queries -------------------------------------------------------------------------------------------


class _Bucket:
    """Queries whose ranges of one column are about as wide, so that a value finds them by bisection.

    Sorted by their lower bounds, those that may have v lie where v - width <= low <= v, and where all are more than
    half as wide as the widest, every second of them has it. Ranges that are open at one end lie on one side of v.
    """

    def __init__(self, queries: Array, low: Array, high: Array, width: Any, open_end: str = "") -> None:
        by = high if open_end == "low" else low
        order = np.argsort(by, kind="stable")
        self.queries = queries[order]
        self._sorted = by[order]
        self._width = width
        self._open = open_end

    def candidates(self, values: Array) -> tuple[Array, Array]:
        """Of each value the first of its queries, and the one behind the last."""
        count = len(self.queries)
        if self._open == "low":
            return np.searchsorted(self._sorted, values, "left"), np.full(len(values), count)
        behind = np.searchsorted(self._sorted, values, "right")
        if self._open == "high":
            return np.zeros(len(values), np.int64), behind
        if values.dtype == np.float64:
            least = np.nextafter(values - self._width, -math.inf)
        else:
            least = np.where(values < INT64_MIN + self._width, INT64_MIN, values - self._width)
        return np.searchsorted(self._sorted, least, "left"), behind


def _buckets(low: Array, high: Array) -> list[_Bucket]:
    """Ranges by their widths, in powers of two: 0 is equality."""
    whole = low.dtype != np.float64
    least, most = (INT64_MIN, INT64_MAX) if whole else (-math.inf, math.inf)
    queries = np.flatnonzero(low <= high)  # the others have no value at all
    low, high = low[queries], high[queries]
    out = []
    for open_end, chosen in (("low", low == least), ("high", (high == most) & (low != least))):
        if chosen.any():
            out.append(_Bucket(queries[chosen], low[chosen], high[chosen], 0, open_end))
    closed = (low != least) & (high != most)
    queries, low, high = queries[closed], low[closed], high[closed]
    with np.errstate(divide="ignore", over="ignore"):  # a range may be wider than the largest float
        widths = high.astype(np.uint64) - low.astype(np.uint64) if whole else high - low
        sizes = np.where(widths > 0, np.ceil(np.log2(widths.astype(np.float64))), -math.inf)
    for size in np.unique(sizes):
        chosen = sizes == size
        width = widths[chosen].max()
        if not whole:  # rounded, perhaps down
            width = np.nextafter(width, math.inf)
        if whole and int(width) > INT64_MAX:
            out.append(_Bucket(queries[chosen], low[chosen], high[chosen], 0, "high"))
        else:
            out.append(_Bucket(queries[chosen], low[chosen], high[chosen], int(width) if whole else float(width)))
    return out


class _Shape(Generic[Q]):
    """Clauses that constrain the same columns in the same way: by one text, by texts, by numbers."""

    def __init__(self, texts: tuple[str, ...], ranked: tuple[str, ...], numbers: tuple[str, ...]) -> None:
        self._texts, self._ranked, self._numbers = texts, ranked, numbers
        self.clauses: dict[tuple[Q, int], Clause] = {}
        self._listed: list[Q] = []
        self._bounds: dict[str, tuple[Array, Array]] = {}
        self._words: dict[str, Words] = {}
        self._ranks: dict[str, Ranks] = {}
        self._by: str | None = None
        """The column by which clauses are looked up: the one that leaves the fewest of them."""
        self._buckets: list[_Bucket] = []
        self.changed = True

    def _arrange(self, types: Mapping[str, ColumnType]) -> None:
        self.changed = False
        self._listed = [query for query, _ in self.clauses]
        wanted = list(self.clauses.values())
        for name in self._numbers:
            dtype = np.float64 if types[name].name == "float64" else np.int64
            low = np.array([clause.numbers[name][0] for clause in wanted], dtype)
            high = np.array([clause.numbers[name][1] for clause in wanted], dtype)
            self._bounds[name] = low, high
        for name in self._ranked:
            ranks = self._ranks[name] = Ranks([clause.texts[name] for clause in wanted])
            self._bounds[name] = ranks.low, ranks.high
        for name in self._texts:
            self._words[name] = Words([clause.texts[name][0] for clause in wanted], types[name])
        left = {name: 1 / len(words.at) for name, words in self._words.items()}
        left |= {name: _left(*bounds) for name, bounds in self._bounds.items()}
        self._by = min(left, key=left.__getitem__) if left else None
        if self._by in self._words:
            codes = self._words[self._by].of
            self._buckets = _buckets(codes, codes)
        elif self._by is not None:
            self._buckets = _buckets(*self._bounds[self._by])

    def pairs(self, columns: Columns, types: Mapping[str, ColumnType]) -> Iterator[tuple[Array, Array, list[Q]]]:
        """(rows, clauses, whose query each of these is): the hits, in blocks."""
        if self.changed:
            self._arrange(types)
        values = {name: columns.numbers(name, types[name]) for name in self._numbers}
        values |= {name: columns.ranks(name, ranks) for name, ranks in self._ranks.items()}
        codes = {name: columns.codes(name, words) for name, words in self._words.items()}
        for rows, queries in self._candidates(columns.rows, values, codes):
            keep = np.ones(len(rows), np.bool_)
            for name, (array, known) in values.items():
                low, high = self._bounds[name]
                held = array[rows]
                keep &= (held >= low[queries]) & (held <= high[queries])
                if known is not None:
                    keep &= known[rows]
            for name, array in codes.items():
                keep &= array[rows] == self._words[name].of[queries]
            if keep.any():
                yield rows[keep], queries[keep], self._listed

    def _candidates(
        self, rows: int, values: Mapping[str, tuple[Array, Array | None]], codes: Mapping[str, Array]
    ) -> Iterator[tuple[Array, Array]]:
        """(rows, queries) that may match, at most some millions at a time."""
        every = np.arange(rows)
        if self._by is None:  # no predicate at all
            step = max(1, _PAIRS // max(1, len(self._listed)))
            for begin in range(0, rows, step):
                part = every[begin : begin + step]
                yield np.repeat(part, len(self._listed)), np.tile(np.arange(len(self._listed)), len(part))
            return
        looked = codes[self._by] if self._by in codes else values[self._by][0]
        for bucket in self._buckets:
            first, behind = bucket.candidates(looked)
            counts = np.maximum(behind - first, 0)
            ends = np.cumsum(counts)
            begin = 0
            while begin < rows:
                before = ends[begin - 1] if begin else 0
                end = max(begin + 1, int(np.searchsorted(ends, before + _PAIRS, "right")))
                part = counts[begin:end]
                total = int(part.sum())
                if total:
                    within = np.arange(total) - np.repeat(np.cumsum(part) - part, part)
                    at = np.repeat(first[begin:end], part) + within
                    yield np.repeat(every[begin:end], part), bucket.queries[at]
                begin = end


def _left(low: Array, high: Array) -> float:
    """About which part of the queries a value of this column leaves, if values lie where the queries do."""
    finite = np.concatenate([low, high]).astype(np.float64)
    finite = finite[np.isfinite(finite) & (finite > INT64_MIN) & (finite < INT64_MAX)]
    if not len(finite):
        return 1.0
    spread = max(float(finite.max() - finite.min()), 1e-300)
    with np.errstate(over="ignore"):
        wide = np.clip(high.astype(np.float64) - low.astype(np.float64), 0.0, spread) / spread
    return float(wide.mean()) + 1 / len(np.unique(low)) if len(low) else 1.0


_Kind = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


class Matcher(Generic[Q]):
    """Queries by their predicates. Not thread safe."""

    def __init__(self, types: Mapping[str, ColumnType]) -> None:
        self._types = types
        self._shapes: dict[_Kind, _Shape[Q]] = {}
        self._kinds_of: dict[Q, list[_Kind]] = {}
        """Of each query those of its clauses, in order."""
        self._several: dict[Q, Expr | None] = {}
        """Queries of more clauses than one, and those that have to be asked again, with what."""
        self._others: dict[Q, Expr] = {}

    def __len__(self) -> int:
        return len(self._kinds_of) + len(self._others)

    def add(self, query: Q, where: Expr | None) -> None:
        clauses = clauses_of(where, self._types)
        if clauses is None:
            assert where is not None
            self._others[query] = where
            return
        self._kinds_of[query] = [self._insert(query, i, clause) for i, clause in enumerate(clauses)]
        again = not all(clause.is_exact for clause in clauses)
        if again or len(clauses) > 1:
            self._several[query] = where if again else None

    def _insert(self, query: Q, place: int, clause: Clause) -> _Kind:
        words = tuple(sorted(name for name, text in clause.texts.items() if is_word(text)))
        kind = words, tuple(sorted(clause.texts.keys() - set(words))), tuple(sorted(clause.numbers))
        shape = self._shapes.get(kind)
        if shape is None:
            shape = self._shapes[kind] = _Shape(*kind)
        shape.clauses[query, place] = clause
        shape.changed = True
        return kind

    def remove(self, query: Q) -> None:
        """Harmless if it is not there."""
        self._others.pop(query, None)
        self._several.pop(query, None)
        for place, kind in enumerate(self._kinds_of.pop(query, ())):
            shape = self._shapes[kind]
            del shape.clauses[query, place]
            shape.changed = True
            if not shape.clauses:
                del self._shapes[kind]

    def selected(self, columns: Columns) -> Iterator[tuple[Q, list[int] | OutOfRange]]:
        """Each query that selects some rows, and which: in order, each once. A query may come more than once.

        A query whose predicate leaves the range of its numbers comes with that error, and the others go on.
        """
        if not columns.rows:
            return
        several: dict[Q, list[Array]] = {}
        for shape in self._shapes.values():
            for rows, clauses, listed in shape.pairs(columns, self._types):
                order = np.argsort(clauses, kind="stable")
                found, by_clause = rows[order], clauses[order]
                starts = np.flatnonzero(by_clause[1:] != by_clause[:-1]) + 1
                begin = 0
                for clause, end in zip(
                    by_clause[[*starts - 1, -1]].tolist(), [*starts.tolist(), len(found)], strict=True
                ):
                    query = listed[clause]
                    if query in self._several:
                        several.setdefault(query, []).append(found[begin:end])
                    else:
                        yield query, found[begin:end].tolist()
                    begin = end
        for query, parts in several.items():
            rows = np.unique(np.concatenate(parts))
            if (where := self._several[query]) is not None:
                rows = columns.select(where, self._types, rows)
            if len(rows):
                yield query, rows.tolist()
        for query, where in self._others.items():
            try:
                rows = columns.select(where, self._types)
            except OutOfRange as error:
                yield query, error
                continue
            if len(rows):
                yield query, rows.tolist()
