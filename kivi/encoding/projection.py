"""Projections: stored rows as the columns that a read asked for, one by one or thousands at a time.

Keys are decoded, derived columns computed, predicates applied and sums narrowed to their column's type. An exact sum
that does not fit its column's type is OUT_OF_RANGE only if that column was asked for (R10).
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa

from kivi.arrow.columns import arrow_field, rows_batch, stored_array
from kivi.arrow.predicates import filter_batch
from kivi.encoding.arrow_rows import (
    Values,
    array_of,
    decoded_states,
    evaluate_columns,
    operand,
    read_states,
    states_of,
    values_of,
    values_or_none,
)
from kivi.encoding.base_rows import RowLayout, Version
from kivi.encoding.keys import decode_key, decode_key_columns, key_decoder
from kivi.errors import DataLoss, OutOfRange
from kivi.model.derived_columns import calls_of, evaluator, inputs_of, parse_expression
from kivi.model.expressions import Expr, matches, names
from kivi.model.schema import Column, TableSchema
from kivi.model.types import ColumnType
from kivi.states.registry import kind_of

__all__ = ["Projection"]

_FLOAT: Final = ColumnType("float64")
DAMAGE: Final = (ValueError, IndexError, DataLoss)
"""What reading a state raises whose bytes are none."""


class Projection:
    """Makes rows of one schema: the columns asked for, and what predicates and derived columns need."""

    def __init__(self, schema: TableSchema, columns: Sequence[str] | None, where: Expr | None) -> None:
        self.schema = schema
        self.outputs = schema.output_columns(columns)
        self.where = where
        wanted = {*self.outputs, *(names(where) if where is not None else ())}
        derived = {name: text for name in sorted(wanted) if (text := schema.expression_of(name)) is not None}
        self.derived = {name: _expression(schema, text) for name, text in derived.items()}
        self._evaluators = {name: evaluator(expression) for name, expression in self.derived.items()}
        self._calls = {text: call for each in self.derived.values() for text, call in calls_of(each).items()}
        self._inputs_of = {name: inputs_of(expression) for name, expression in self.derived.items()}
        inputs = {name for each in self._inputs_of.values() for name in each}
        needed = (wanted - derived.keys()) | inputs
        self._key_types = [c.type for c in schema.key]
        self._decode_key = key_decoder(self._key_types)
        self._keys = [(i, c.name) for i, c in enumerate(schema.key) if c.name in needed]
        cells = [(i, schema.columns[i]) for name, i in schema.index_of.items() if name in needed]
        self._cells = [(i, c.name) for i, c in cells]
        self._inputs = [schema.column(name) for name in inputs]
        self._layout = RowLayout.of(schema)
        self._states = [(c.name, kind_of(c.state)) for _, c in cells if c.state is not None and not c.type.is_state]
        self._sums = [
            (name, c.type)
            for name in self.outputs
            if (c := schema.by_name.get(name)) and c.operator and not c.type.is_state
        ]
        self._types = {name: c.type for name, c in schema.by_name.items()} | dict.fromkeys(derived, _FLOAT)

    @staticmethod
    def of(schema: TableSchema, columns: Sequence[str] | None) -> Projection:
        """The one without a predicate, which is kept: making one takes longer than using it for a row."""
        wanted = None if columns is None else tuple(columns)
        return schema.remembered((Projection, wanted), lambda: Projection(schema, wanted, None))

    def row(self, key: bytes, version: Version) -> dict[str, Any] | None:
        """The row in stored form, or None if the predicate does not select it."""
        return self.rows([(key, version)])[0]

    def rows(self, pairs: Sequence[tuple[bytes, Version]]) -> list[dict[str, Any] | None]:
        """``row`` of each; many are read in a fraction of the time that each would take.

        Raises DataLoss, which names table, row and column, for a state that is damaged.
        """
        try:
            return self._rows(pairs)
        except DAMAGE as error:
            raise self._damaged(pairs) or error from None

    def _damaged(self, pairs: Sequence[tuple[bytes, Version]]) -> DataLoss | None:
        """The first row of these with a state that cannot be read."""
        columns = [(i, self.schema.columns[i]) for i, _ in self._cells if self.schema.columns[i].state is not None]
        for key, version in pairs:
            for i, column in columns:
                assert column.state is not None
                try:
                    kind_of(column.state).values([version.cells[i] or b""])
                    kind_of(column.state).decode([version.cells[i] or b""])
                except DAMAGE as error:
                    shown = decode_key(self._key_types, key)
                    return DataLoss(
                        f"table {self.schema.name!r}, row {shown}, column {column.name!r}: its state is damaged "
                        f"({error}): run kivi verify"
                    )
        return None

    def _rows(self, pairs: Sequence[tuple[bytes, Version]]) -> list[dict[str, Any] | None]:
        columns = self._columns(pairs)
        rows = _rows_of(columns, len(pairs))
        if self.where is None:
            return [*rows]
        found = [row if matches(self.where, row) else None for row in rows]
        for row in filter(None, found) if self.derived else ():
            for name in self.outputs:
                if isinstance(row[name], OutOfRange):
                    raise row[name]
        return found

    def _columns(self, pairs: Sequence[tuple[bytes, Version]]) -> dict[str, Sequence[Any]]:
        """What is needed of rows, by name: what is done once for a column is not done for each row."""
        columns: dict[str, Sequence[Any]] = {}
        if not pairs:
            return columns
        if self._keys:
            keys = [*zip(*[self._decode_key(key) for key, _ in pairs], strict=True)]
            columns = {name: keys[i] for i, name in self._keys}
        if self._cells:
            cells = [version.cells for _, version in pairs]
            for i, name in self._cells:
                columns[name] = [*map(itemgetter(i), cells)]
        for name, kind in self._states:
            columns[name] = kind.values(columns[name])
        if self.derived:
            self._derive(columns, len(pairs))
        return columns

    def _derive(self, columns: dict[str, Sequence[Any]], count: int) -> None:
        """Raises OutOfRange. Of a single row that a predicate may leave out the error is the column's value, as that of
        any other expression is, so that it is raised only if it decides or is asked for."""
        try:
            columns |= self._evaluated(columns, count, self.derived)
        except OutOfRange:
            if self.where is None or count > 1:
                raise
            for name in self.derived:
                try:
                    columns |= self._evaluated(columns, count, [name])
                except OutOfRange as error:
                    columns[name] = [error]

    def _evaluated(
        self, columns: Mapping[str, Sequence[Any]], count: int, derived: Collection[str]
    ) -> dict[str, Sequence[Any]]:
        needed = {name for each in derived for name in self._inputs_of[each]}
        inputs = {
            c.name: c.type.from_stored_all(columns[c.name], c.name)
            for c in self._inputs
            if c.name in needed and c.type.name != "quantiles"
        }
        inputs |= self._called(columns, count)
        operands = _rows_of(inputs, count)
        found: dict[str, Sequence[Any]] = {}
        for name in derived:
            try:
                found[name] = [*map(self._evaluators[name], operands)]
            except OverflowError:
                raise OutOfRange(f"{name} is too large for a float64", column=name) from None
        return found

    def _called(self, columns: Mapping[str, Sequence[Any]], count: int) -> dict[str, list[float | None]]:
        """What the derived columns' functions give for the states of these rows."""
        if not self._calls:
            return {}
        states = {
            c.name: decoded_states(c, [state or b"" for state in columns[c.name]])
            for c in self._inputs
            if c.type.name == "quantiles"
        }
        called = {text: evaluate_columns(call, states, count) for text, call in self._calls.items()}
        return {text: values_or_none(values) for text, values in called.items()}

    def selected(self, rows: Iterable[tuple[bytes, Version]], at_once: int = 1) -> Iterator[dict[str, Any]]:
        """``row`` of each that the predicate selects. Where none has a long value it looks at ``at_once`` of them: an
        error is still that of the first row that has one, and only if it is asked for."""
        rows = iter(rows)
        while pairs := list(itertools.islice(rows, at_once if self._layout.in_columns else 1)):
            try:
                found = self.rows(pairs)
            except OutOfRange:
                yield from (row for pair in pairs if (row := self.row(*pair)) is not None)
                continue
            yield from (row for row in found if row is not None)

    def narrowed(self, row: dict[str, Any]) -> dict[str, Any]:
        """The columns asked for, each checked against its type. Raises OutOfRange."""
        for name, type_ in self._sums:
            type_.from_stored(row[name], name)
        return {name: row[name] for name in self.outputs}

    def columns(self, pairs: Sequence[tuple[bytes, Version]]) -> list[Sequence[Any]]:
        """The columns asked for of at least one row, without a predicate. Sums may have outgrown their types."""
        try:
            columns = self._columns(pairs)
        except DAMAGE as error:
            raise self._damaged(pairs) or error from None
        return [columns[name] for name in self.outputs]

    # -- in columns -----------------------------------------------------------------------------

    @property
    def in_columns(self) -> bool:
        """Whether ``batches`` can make these rows."""
        return self._layout.in_columns and bool(self.outputs)

    @property
    def reads_keys(self) -> bool:
        """Whether ``batches`` looks at the keys: for their columns, or to say whose state is damaged."""
        return bool(self._keys or self._layout.states)

    def batches(
        self, portions: Iterable[tuple[Any, Any] | list[tuple[bytes, Version]]], limit: int | None
    ) -> Iterator[Any]:
        """Portions of live rows as record batches of the rows that are selected; none is empty.

        A portion is (keys, rows of the layout's dtype), or a list of (key, version).

        What ``row`` and ``rows_batch`` give, errors included: a portion with something that a column cannot hold is
        read by them, as it may be in a row that is not selected, or in a column that nobody asked for.
        """
        if limit == 0:
            return
        for portion in portions:
            if isinstance(portion, list):
                batch = self._one_by_one(portion, limit)
            else:
                keys, rows = portion
                try:
                    batch = self._batch(keys, rows)
                except (OverflowError, *DAMAGE):
                    versions = map(self._layout.decode, self._layout.bytes_of(rows))
                    batch = self._one_by_one(zip(keys.to_pylist(), versions, strict=True), limit)
            if limit is not None:
                batch = batch.slice(0, limit)
                limit -= batch.num_rows
            if batch.num_rows:
                yield batch
            if limit == 0:
                return

    @staticmethod
    def _operand(column: Column, states: list[bytes], array: Any) -> Any:
        if column.type.name == "quantiles":
            return decoded_states(column, states)
        valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
        return operand(column.type, Values(stored_array(column.type, array), valid))

    def _one_by_one(self, rows: Iterable[tuple[bytes, Version]], limit: int | None) -> Any:
        return rows_batch(self.schema, self.outputs, list(itertools.islice(self.selected(rows), limit)))

    def _batch(self, keys: Any, rows: Any) -> Any:
        arrays: dict[str, Any] = {}
        operands: dict[str, Any] = {}
        if self._keys:
            decoded = decode_key_columns(self._key_types, keys)
            arrays = {name: decoded[i] for i, name in self._keys}
        inputs = {column.name for column in self._inputs}
        for i, name in self._cells:
            column = self.schema.columns[i]
            if column.state is not None:
                states = states_of(i, rows)
                arrays[name] = read_states(column, states)
                if name in inputs:
                    operands[name] = self._operand(column, states, arrays[name])
                continue
            values = values_of(column, i, rows)
            arrays[name] = array_of(column.type, values)
            if name in inputs:
                operands[name] = operand(column.type, values)
        if self.derived:
            for column in self._inputs:
                if column.name not in operands:  # a key column
                    values = Values(stored_array(column.type, arrays[column.name]), None)
                    operands[column.name] = operand(column.type, values)
            for name, expression in self.derived.items():
                arrays[name] = array_of(_FLOAT, evaluate_columns(expression, operands, len(rows)))
        if self.where is None:
            arrays = {name: arrays[name] for name in self.outputs}
        fields = [arrow_field(name, self._types[name]) for name in arrays]
        batch = pa.RecordBatch.from_arrays(list(arrays.values()), schema=pa.schema(fields))
        if self.where is not None:
            batch = filter_batch(batch, self.where, self._types).select(list(self.outputs))
        return batch


def _rows_of(columns: Mapping[str, Sequence[Any]], count: int) -> list[dict[str, Any]]:
    if not columns:
        return [{} for _ in range(count)]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


@lru_cache(maxsize=1024)
def _parsed(text: str, columns: tuple[tuple[str, ColumnType], ...]) -> ast.expr:
    return parse_expression(text, dict(columns))


def _expression(schema: TableSchema, text: str) -> ast.expr:
    return _parsed(text, tuple((name, column.type) for name, column in schema.by_name.items()))
