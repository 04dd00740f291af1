"""Rolling up: rows of an aggregate, in columns, combined to rows of a coarser one.

A row of an aggregate is what the events of its group did to an empty row, so it is a delta of the coarser row that it
belongs to. Rows thus become delta rows under other keys, and are combined as those of one transaction are
(``kivi.delta.combine``)::

    FixedRows --keys: by, step--> delta rows --Combining, portion by portion--> one a key --fold--> FixedRows

What is held is the result, and one portion of rows or about as many as the result has. Sums of floats are added in the
order of the rows, whatever the portions are. Pure: no I/O and no clock.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import arrow_from_stored, stored_array
from kivi.delta.combine import Combining
from kivi.delta.overlay import FixedRows, fold_over
from kivi.delta.runs import LIMB, LOW, Array, Cells, DeltaRun, RunColumn
from kivi.delta.states import States
from kivi.encoding.arrow_rows import states_of
from kivi.encoding.base_rows import RowLayout, is_wide
from kivi.encoding.keys import decode_key_columns, encode_key_columns
from kivi.model.schema import Column, TableSchema
from kivi.model.slots import Slot
from kivi.states.registry import kind_of

__all__ = ["Rolling"]

_ROWS_MIN: Final = 4_096
"""Rows that are combined at once, at least."""
_STATES_ROWS: Final = 512
"""So many rows' states are taken at once: what they are decoded to stays in the processor's cache. 4,800 states of
quantiles with 330 codes each into 100 groups, microseconds a state: 12 all at once, 10 in parts of 300 to 600."""
_CTS: Final = 1
"""All delta rows are as of one transaction."""


class Rolling:
    """Rows of ``schema`` go in, portion by portion; rows of ``target``, which ``rolled_schema`` made of it, come out.

    ``step``: the slots of the target, which are the last column of its key.
    """

    def __init__(self, schema: TableSchema, target: TableSchema, step: Slot | None) -> None:
        self._types = [column.type for column in schema.key]
        self._key_from = [schema.key_names.index(name) for name in target.key_names]
        self._cells_from = [schema.index_of[column.name] for column in target.columns]
        self._target, self._step = target, step
        has_states = any(column.state is not None for column in target.columns)
        self._rows_at_once = _STATES_ROWS if has_states else _ROWS_MIN
        self._combining = Combining(target, self._rows_at_once)

    def keys(self, keys: Any) -> Any:
        """To which key of the target each key belongs. A LargeBinaryArray, both."""
        if not self._key_from:
            return pa.array([b""] * len(keys), pa.large_binary())
        decoded = decode_key_columns(self._types, keys)
        arrays = [decoded[i] for i in self._key_from]
        if self._step is not None:
            type_ = self._target.key[-1].type
            arrays[-1] = arrow_from_stored(type_, self._step.starts(stored_array(type_, arrays[-1])))
        return encode_key_columns([column.type for column in self._target.key], arrays)

    def add(self, keys: Any, rows: Array) -> None:
        """Rows and, for each, its key of the target, as ``keys`` gave it. Raises OutOfRange for a sum of floats."""
        step = self._rows_at_once
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            columns = [_cells(c, i, part) for c, i in zip(self._target.columns, self._cells_from, strict=True)]
            run = DeltaRun(keys.slice(at, len(part)), _CTS, tuple(columns))
            run.distinct = False
            self._combining.add(run)

    def result(self) -> FixedRows:
        """The rows of the target, in key order. Raises OutOfRange for a sum of floats."""
        layout = RowLayout.of(self._target)
        run = self._combining.result()
        if run is None or not run.rows:
            return FixedRows.none(layout)
        return fold_over(layout, FixedRows.none(layout), [(run, range(run.rows))], _CTS)


def _cells(column: Column, i: int, rows: Array) -> RunColumn:
    """Column ``i`` of rows as deltas."""
    if column.state is not None:
        return States.decoded(kind_of(column.state), states_of(i, rows))
    if is_wide(column):
        low, high = np.ascontiguousarray(rows[f"c{i}_lo"]), np.ascontiguousarray(rows[f"c{i}_hi"])
        if np.array_equal(high, low.view(np.int64) >> 63):
            return Cells(low.view(np.int64))
        return Cells((low & LOW).astype(np.int64), (high << LIMB) + (low >> LIMB).astype(np.int64))
    values = np.ascontiguousarray(rows[f"c{i}"])
    nulls = rows["nulls"][:, i >> 3] & (1 << (i & 7))
    return Cells(values, None, nulls == 0) if nulls.any() else Cells(values)
