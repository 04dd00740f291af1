"""Rolling up: rows of an aggregate, in columns, combined to rows of a coarser one.

A row of an aggregate is what the events of its group did to an empty row, so it is a delta of the coarser row that it
belongs to. Rows thus become delta rows under other keys, and are combined as those of one transaction are
(``kivi.delta.combine``)::

    FixedRows --keys: by, step--> delta rows --Combining, portion by portion--> one a key --fold--> FixedRows

What is held is the result, and one portion of rows or about as many as the result has. Sums of floats are added in the
order of the rows, whatever the portions are. Pure: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import arrow_from_stored, stored_array
from kivi.delta.combine import Combining, combine, is_combinable
from kivi.delta.overlay import FixedRows
from kivi.delta.runs import LIMB, LOW, Array, Cells, DeltaRun, RunColumn
from kivi.delta.states import States
from kivi.encoding.arrow_rows import states_of
from kivi.encoding.base_rows import RowLayout, is_wide
from kivi.encoding.keys import decode_key_columns, encode_key_columns
from kivi.model.schema import Column, TableSchema
from kivi.model.slots import Slot
from kivi.states.registry import kind_of

__all__ = ["CTS", "Rolling", "folded"]

_ROWS_MIN: Final = 4_096
"""Rows that are combined at once, at least."""
_STATES_ROWS: Final = 512
"""So many rows' states are taken at once, and combined with each other first: what they are decoded to stays in the
processor's cache. 512 states of quantiles with 350 codes each into 43 groups take 4 us a state."""
_ITEMS_MIN: Final = 1 << 20
"""What parts of that size are combined to is combined when so many items of states wait, at least."""
CTS: Final = 1
"""All delta rows are as of one transaction."""


class Rolling:
    """Rows of ``schema`` go in, portion by portion; rows of ``target`` come out.

    ``keys_from``: of each key column of the target the place in the key of ``schema``, and the slots that it is cut to.
    ``cells_from``: the place of each column. ``combining``: what they are added to; a new one otherwise.
    """

    def __init__(
        self,
        schema: TableSchema,
        target: TableSchema,
        keys_from: Sequence[tuple[int, Slot | None]],
        cells_from: Sequence[int],
        combining: Combining | None = None,
    ) -> None:
        self._types = [column.type for column in schema.key]
        self._keys_from, self._cells_from, self._target = keys_from, cells_from, target
        has_states = any(column.state is not None for column in target.columns)
        self._rows_at_once = _STATES_ROWS if has_states else _ROWS_MIN
        self._in_parts = has_states and is_combinable(target)
        self._combining = combining or Combining(target, _ITEMS_MIN if self._in_parts else self._rows_at_once)

    @staticmethod
    def by_names(schema: TableSchema, target: TableSchema, step: Slot | None) -> Rolling:
        """To a target that ``rolled_schema`` made of it; ``step``: the slots of the target, last in its key."""
        places = [schema.key_names.index(name) for name in target.key_names]
        slots = [None] * len(places) if step is None else [*([None] * (len(places) - 1)), step]
        cells = [schema.index_of[column.name] for column in target.columns]
        return Rolling(schema, target, list(zip(places, slots, strict=True)), cells)

    def keys(self, keys: Any) -> Any:
        """To which key of the target each key belongs. A LargeBinaryArray, both."""
        if not self._keys_from:
            return pa.array([b""] * len(keys), pa.large_binary())
        decoded = decode_key_columns(self._types, keys)
        arrays = [decoded[i] for i, _ in self._keys_from]
        for place, (_, slot) in enumerate(self._keys_from):
            if slot is not None:
                type_ = self._target.key[place].type
                arrays[place] = arrow_from_stored(type_, slot.starts(stored_array(type_, arrays[place])))
        return encode_key_columns([column.type for column in self._target.key], arrays)

    def add(self, keys: Any, rows: Array) -> None:
        """Rows and, for each, its key of the target, as ``keys`` gave it. Raises OutOfRange for a sum of floats."""
        step = self._rows_at_once
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            columns = [_cells(c, i, part) for c, i in zip(self._target.columns, self._cells_from, strict=True)]
            run = DeltaRun(keys.slice(at, len(part)), CTS, tuple(columns))
            run.distinct = False
            self._combining.add(combine(self._target, [run]) if self._in_parts else run)

    def add_deltas(self, keys: Any, run: DeltaRun) -> None:
        """What commits did to rows: a run of ``schema`` and, for each of its rows, its key of the target.

        Those of one row are added in the order of the run. Raises OutOfRange for a sum of floats.
        """
        columns = [run.columns[i] for i in self._cells_from]
        known = tuple(c.stamped(run.cts) if isinstance(c, States) else c for c in columns)
        deltas = DeltaRun(keys, CTS, known)
        deltas.distinct = False
        self._combining.add(deltas)

    @property
    def nbytes(self) -> int:
        """What it holds, about."""
        return self._combining.nbytes

    def result(self) -> FixedRows:
        """The rows of the target, in key order. Raises OutOfRange for a sum of floats."""
        return folded(self._target, self._combining.result())


def folded(target: TableSchema, run: DeltaRun | None) -> FixedRows:
    """A run of one transaction as rows, in key order; None: no rows. What folding it over nothing gives.

    A sum that starts from nothing is the delta itself, so nothing is added up: 31 ns a row of two sums,
    and folding took 430.
    """
    layout = RowLayout.of(target)
    if run is None or not run.rows:
        return FixedRows.none(layout)
    rows = np.zeros(run.rows, layout.dtype)
    rows["cts"], rows["flags"] = CTS, layout.alive
    for i, column in enumerate(target.columns):
        cells = run.columns[i]
        if isinstance(cells, States):
            rows[f"c{i}"] = np.fromiter(cells.stamped(CTS).encoded(), object, run.rows)
        elif is_wide(column):
            low, high = (cells.values, cells.values >> 2 * LIMB - 1) if cells.high is None else _words(cells)
            rows[f"c{i}_lo"], rows[f"c{i}_hi"] = low.view(np.uint64), high
        else:
            rows[f"c{i}"] = cells.values
            if cells.valid is not None:
                rows["nulls"][:, i >> 3] |= (~cells.valid).astype(np.uint8) << (i & 7)
    return FixedRows(run.keys, rows)


def _words(cells: Cells) -> tuple[Array, Array]:
    """The low and the high 64 bits of deltas in limbs, of which the low ones are 32 bits wide."""
    assert cells.high is not None
    return cells.values + (cells.high << LIMB), cells.high >> LIMB


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
