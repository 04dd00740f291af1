"""Combining: many delta runs as one run, with one row per key, before anything is folded into base.

**Within one transaction.** A backfill is one transaction whose deltas are derived in chunks, thousands of them, that
mostly touch the same rows. What a transaction does to a row is *one* delta, combined at commit and stored (R10), so its
chunks may be combined with each other. With ``f`` one row's fold over deltas in order, and a key without a row in a run
left out:

    combine([r])             = r
    combine([r1, ..., rn])   = per key: f(... f(f(identity, d1), d2) ..., dn)        in the order of the runs
    combine([r1, ..., rn])   = combine([combine([r1, ..., rm]), rm+1, ..., rn])      a prefix may be combined first

The last is what makes it online, and for SUM over floats it holds for prefixes only: they are added strictly left to
right, so that the bits do not depend on when it happened.

**Across commits**, what many commits added to a row may become one addition, before base is written once for all of
them, where these laws make it nobody's business (``+`` is the column's operator, b a base row):

    b + d1 + d2  =  b + (d1 + d2)            SUM of integers and decimals, in 128 bits; MIN; MAX
    stamp(d1 + d2)  =  max(cts1, cts2)       what folding both would have stamped the row with

For states, ``+`` puts bags of items together (``kivi.states``). They do not hold for SUM over floats, which fold
strictly left to right across commits: ``is_combinable`` says which tables qualify. A combined row can be read at S >=
its stamp, and by nobody at an S between the commits that it is made of. The caller sees to it that no such snapshot is
or will be open: ``kivi.mvcc.combine``.

* Integers and decimals: each limb is summed by itself. Exact while sums stay within 2**95, which 2**32 rows of 64 bits
  cannot leave.
* MIN and MAX skip rows that have none, and have none where no row had one.
* A SUM over floats that leaves the finite numbers is OutOfRange: the deltas of one transaction are finite.

Pure: no I/O and no clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from kivi.delta.gather import stamps_of
from kivi.delta.order import numbered_keys
from kivi.delta.runs import (
    Array,
    Cells,
    DeltaRun,
    RunColumn,
    dtype_of,
    fitted,
    joined_columns,
    neutral_of,
    ufunc_of,
)
from kivi.delta.states import States
from kivi.encoding.base_rows import is_wide
from kivi.errors import OutOfRange
from kivi.model.schema import Column, TableSchema
from kivi.model.types import INT64_MAX
from kivi.states.kinds import ByGroup
from kivi.states.registry import kind_of

__all__ = [
    "Combining",
    "combine",
    "commutes",
    "exact_sums",
    "extremes",
    "finite_sums",
    "is_combinable",
    "most_of",
    "pieces",
    "worth_combining",
]

_FAN_IN: Final = 4
_ALIKE: Final = 1.25


def is_combinable(schema: TableSchema) -> bool:
    """Whether deltas of different commits may be combined with each other."""
    return schema.remembered(is_combinable, lambda: all(map(commutes, schema.columns)))


def commutes(column: Column) -> bool:
    """Whether its deltas may be combined in any groups: all but sums of floats, alone or in a state (R10)."""
    if column.state is not None:
        return not kind_of(column.state).ordered
    return column.operator is not None and not (column.operator == "sum" and column.type.name == "float64")


def combine(schema: TableSchema, runs: Sequence[DeltaRun]) -> DeltaRun:
    """One run with the deltas of ``runs``, at least one: of one commit, or of a table that ``is_combinable``.

    Of one CTS if all are of that, and otherwise with the newest of each key. Raises OutOfRange.
    """
    filled = [fitted(run, schema) for run in runs if run.rows] or runs[:1]
    cts = filled[0].cts
    one = isinstance(cts, int) and all(isinstance(run.cts, int) and run.cts == cts for run in filled)
    if not one and not is_combinable(schema):
        raise ValueError("only deltas of one commit are combined where floats are added")
    if not filled[0].rows or (len(filled) == 1 and filled[0].distinct):
        return filled[0]
    windows = [(run, range(run.rows)) for run in filled]
    group_of, last, keys = numbered_keys(windows)
    groups = len(last)
    most = len(filled) if all(run.distinct for run in filled) else int(np.bincount(group_of).max())
    stamps = None if one else stamps_of(windows)
    by = ByGroup(group_of, groups)
    columns: list[RunColumn] = []
    for i, column in enumerate(schema.columns):
        cells = joined_columns([run.columns[i] for run in filled])
        if isinstance(cells, States):
            columns.append((cells if stamps is None else cells.stamped(stamps)).grouped(by))
        elif is_wide(column):
            columns.append(exact_sums(cells, group_of, groups, most))
        elif column.operator == "sum":
            columns.append(_floats(schema, column, cells, group_of, groups))
        else:
            columns.append(extremes(column, cells, group_of, groups))
    if stamps is not None:
        cts = stamps[last]  # the newest of each key, where runs are in CTS order
        if any(a.last_cts > b.first_cts for a, b in itertools.pairwise(filled)):
            np.maximum.at(cts, group_of, stamps)
    return DeltaRun(keys, cts, tuple(columns), distinct=True)


def exact_sums(cells: Cells, group_of: Array, groups: int, most: int) -> Cells:
    """The sums of integers by the number of their group, of which none has more than ``most`` rows."""
    values = cells.values
    if not len(values):
        return Cells(np.zeros(groups, np.int64))
    if cells.high is None and most_of(values) * most <= INT64_MAX:
        return Cells(_sums(values, group_of, groups))
    low, high = cells.limbs()
    return Cells.of_limbs(_sums(low, group_of, groups), _sums(high, group_of, groups))


def most_of(values: Array) -> int:
    """How far from 0 an integer is at most. At least one."""
    return max(abs(int(values.min())), abs(int(values.max())))


def _sums(values: Array, group_of: Array, groups: int) -> Array:
    sums = np.zeros(groups, values.dtype)
    np.add.at(sums, group_of, values)
    return sums


def _floats(schema: TableSchema, column: Column, cells: Cells, group_of: Array, groups: int) -> Cells:
    with np.errstate(over="ignore", invalid="ignore"):
        return finite_sums(schema, column, _sums(cells.values, group_of, groups))


def finite_sums(schema: TableSchema, column: Column, sums: Array) -> Cells:
    """Sums of floats as a column. Raises OutOfRange."""
    if not np.isfinite(sums).all():
        raise OutOfRange(
            f"the events add up to more than a float64 holds in {schema.name!r}.{column.name}", column=column.name
        )
    return Cells(sums)


def extremes(column: Column, cells: Cells, group_of: Array, groups: int) -> Cells:
    """The least or greatest by the number of their group."""
    values, seen = cells.values, None
    if cells.valid is not None:
        values, group_of = values[cells.valid], group_of[cells.valid]
        seen = np.zeros(groups, np.bool_)
        seen[group_of] = True
    found = np.full(groups, neutral_of(column), dtype_of(column))
    ufunc_of(column).at(found, group_of, values)
    if seen is None or seen.all():
        return Cells(found)
    found[~seen] = 0
    return Cells(found, None, seen)


class Combining:
    """The runs of one transaction, combined as they come.

    A run waits until as many rows wait as there are combined ones, and at least ``rows_min``; items of states count as
    rows do (``DeltaRun.weight``). So n rows cost O(n log n)
    in all, and what is held is at most twice the distinct rows, or ``rows_min``, and one run; while runs are combined
    their columns are copied, one at a time.
    """

    def __init__(self, schema: TableSchema, rows_min: int) -> None:
        self._schema = schema
        self._rows_min = rows_min
        self._runs: list[DeltaRun] = []  # the first is all there was until then
        self._waiting = 0

    def add(self, run: DeltaRun) -> None:
        """The next run, in order. Raises OutOfRange."""
        self._runs.append(run)
        self._waiting += run.weight
        if self._waiting >= max(self._rows_min, self._runs[0].weight):
            self._combine()

    def _combine(self) -> None:
        self._runs[:] = [combine(self._schema, self._runs)]
        self._waiting = 0

    @property
    def nbytes(self) -> int:
        """What it holds."""
        return sum(run.nbytes for run in self._runs)

    def result(self) -> DeltaRun | None:
        """Everything, and lets go of it; None if there was nothing. Raises OutOfRange."""
        if self._runs:
            self._combine()
        return self._runs.pop() if self._runs else None


def pieces(run: DeltaRun, rows: int) -> Iterator[DeltaRun]:
    """The run cut into runs of at most ``rows`` rows, in key order. They share its memory."""
    for at in range(0, run.rows, rows):
        part = slice(at, min(at + rows, run.rows))
        cts = run.cts if isinstance(run.cts, int) else run.cts[part]
        yield DeltaRun(run.keys.slice(at, part.stop - at), cts, tuple(cells.take(part) for cells in run.columns))


def worth_combining(weights: Sequence[int]) -> int:
    """How many of the last runs, given the weight of each, to combine now: as many as make the first of them about a
    quarter of the whole, or nothing.

    So a row is combined about once for each time that its table's pending rows grow fourfold, the work is n log n,
    and three runs of a size are left, of each of log n sizes. Appends of one size have runs of about one size, each as
    often a little smaller as a little larger than the one before: hence "about". The items of states count as rows do:
    rows stop growing when all keys are there, and by them alone all items that wait were moved every time.
    """
    worth = total = 0
    for count, each in enumerate(reversed(weights), 1):
        if (_FAN_IN - 1) * each <= _ALIKE * total:
            worth = count
        total += each
    return worth
