"""Answers: the rows of a tally as record batches, with what is computed of them, selected, ordered, and cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import arrow_field, arrow_from_stored, arrow_schema, arrow_type, stored_array
from kivi.arrow.ordering import sorted_table
from kivi.arrow.predicates import filter_batch
from kivi.delta.overlay import FixedRows
from kivi.encoding.projection import Projection
from kivi.errors import OutOfRange
from kivi.model import expressions
from kivi.model.questions import WINDOW_END, WINDOW_START, Question, Windows
from kivi.model.rollups import derived_from
from kivi.model.types import INT64_MAX, ColumnType
from kivi.query.tally import Found, Nulls
from kivi.runtime.ahead import in_order

__all__ = ["Answer", "Explain", "answered"]

_BATCH_ROWS: Final = 65_536
_PART_ROWS: Final = 4_096
_MOMENT: Final = ColumnType("timestamp")


Explain = Callable[[Callable[[str], bool]], str]
"""How an answer was made, for people who may be told the names of some tables."""


class Answer(Iterator[pa.RecordBatch]):
    """An answer as record batches: it is made when the first is asked for.

    ``ask`` gives the batches and how they were made, for people. ``complete_since_us``: from which moment on nothing is
    missing, microseconds since 1970; None: nothing is.
    """

    def __init__(
        self, ask: Callable[[], tuple[Iterator[pa.RecordBatch], Explain]], complete_since_us: int | None
    ) -> None:
        self._ask, self.complete_since_us = ask, complete_since_us
        self._left: Iterator[pa.RecordBatch] | None = None
        self._explain: Explain | None = None

    def _made(self) -> Iterator[pa.RecordBatch]:
        if self._left is None:
            self._left, self._explain = self._ask()
        return self._left

    def __next__(self) -> pa.RecordBatch:
        return next(self._made())

    def explanation(self, may_name: Callable[[str], bool] = lambda _: True) -> str:
        """How it was made, for somebody who may be told the names of these tables."""
        self._made()
        assert self._explain is not None
        return self._explain(may_name)


def answered(
    question: Question, found: Iterator[Callable[[], Found]], limit: int | None, check: Callable[[int], None]
) -> Iterator[pa.RecordBatch]:
    """The rows that are asked for, in order: by ``order``, and where that is equal by their groups, nulls last.

    Parts of them are made ahead, in several threads. ``check`` is told how many bytes they take so far. Raises what it
    raises, and OutOfRange for a value that its column cannot hold, if that column is asked for.
    """
    target = question.target
    names = tuple(dict.fromkeys((*question.needed, *target.key_names)))
    types = {name: question.type_of(name) for name in names}
    fields = pa.schema([arrow_field(name, type_) for name, type_ in types.items()])
    tables, kinds, held = [fields.empty_table()], set[Nulls](), 0

    def made(part: Callable[[], Found]) -> tuple[Nulls, pa.Table]:
        rows = _table(question, kind := part(), names, fields)
        return kind.nulls, rows if question.having is None else filter_batch(rows, question.having, types)

    for nulls, rows in in_order(found, made):
        kinds.add(nulls)
        tables.append(rows)
        held += tables[-1].nbytes
        check(held)
    table = pa.concat_tables(tables)
    order = list(question.order)
    if len(kinds) > 1:
        order += [(name, False) for name in target.key_names if name not in dict(question.order)]
    table = sorted_table(table, tuple(order))
    limit = table.num_rows if limit is None else min(limit, table.num_rows)
    table = table.slice(min(question.offset, table.num_rows), limit).select(list(question.columns))
    return iter(table.combine_chunks().to_batches(_BATCH_ROWS))


def _table(question: Question, kind: Found, names: tuple[str, ...], fields: pa.Schema) -> pa.Table:
    """The rows of one kind, null in the columns that are so for all of them."""
    missing = {name for name in names if name != WINDOW_END and _is_missing(question, kind, name)}
    ends = WINDOW_END in names and WINDOW_END not in kind.target.index_of
    wanted = [name for name in names if name not in missing and (name != WINDOW_END or not ends)]
    read = [*wanted, *([WINDOW_START] if ends and WINDOW_START not in wanted else [])] or [kind.target.columns[0].name]
    rows = kind.rows
    step = _PART_ROWS if rows.rows.dtype.hasobject else max(1, len(rows.rows))  # of states: what these are decoded to
    parts = (FixedRows(rows.keys.slice(at, step), rows.rows[at : at + step]) for at in range(0, len(rows.rows), step))
    having, target = question.having, _computing(question, kind)
    if having is not None and not {*expressions.names(having)} <= {*wanted}:  # what it names is made below
        having = None
    batches = Projection(target, read, having).batches(parts, None)  # which narrows the sums of rows that are selected
    table = pa.Table.from_batches(list(batches), arrow_schema(target, read))
    columns = {name: table.column(name) for name in table.column_names}
    if ends:
        assert question.windows is not None
        columns[WINDOW_END] = _ends(question.windows, columns[WINDOW_START])
    for name in missing:
        columns[name] = pa.nulls(table.num_rows, arrow_type(question.type_of(name)))
    return pa.Table.from_arrays([columns[name] for name in names], schema=fields)


def _computing(question: Question, kind: Found) -> Any:
    """The target of a kind, with the derived columns that it can compute."""
    if not kind.nulls:
        return kind.target
    derived = tuple(each for each in question.target.derived if not _is_missing(question, kind, each[0]))
    return dataclasses.replace(kind.target, derived=derived)


def _is_missing(question: Question, kind: Found, name: str) -> bool:
    """Whether it is, or is computed of, a group that is null."""
    if not kind.nulls or name in kind.nulls:
        return name in kind.nulls
    return not derived_from(question.target, name).isdisjoint(kind.nulls)


def _ends(windows: Windows, starts: Any) -> Any:
    assert windows.size is not None
    values = stored_array(_MOMENT, starts.combine_chunks())
    if windows.size.is_fixed:
        if len(values) and int(values.max()) > INT64_MAX - windows.size.count:
            raise OutOfRange("the last windows would end after time: bound the question by end", column=WINDOW_END)
        return arrow_from_stored(_MOMENT, values + windows.size.count)
    distinct, at = np.unique(values, return_inverse=True)
    ends = np.array([windows.size.end(start) for start in distinct.tolist()], np.int64)
    return arrow_from_stored(_MOMENT, ends[at])
