"""Columns: their Arrow types, and the ways between Arrow, NumPy and rows.

Values are in stored form (``kivi.model.types``) on both sides of every function here but ``rows_from_batch``. Whole
columns go through kernels, as an int64, a float64 or a bool each; rows are dicts, made for as many as somebody reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.row_dicts import records
from kivi.errors import OutOfRange
from kivi.model.schema import TableSchema
from kivi.model.types import ColumnType

__all__ = [
    "FAILURES",
    "TIMESTAMP",
    "arrow_field",
    "arrow_from_stored",
    "arrow_schema",
    "arrow_type",
    "decimals",
    "distinct_names",
    "flat",
    "is_hugeint",
    "is_sane",
    "literal",
    "not_finite",
    "padded",
    "picked",
    "reason",
    "rows_batch",
    "rows_from_batch",
    "stored_array",
    "stored_column",
    "stored_lists",
    "stored_rows",
    "trimmed",
]

TIMESTAMP: Final = pa.timestamp("us", "UTC")
_TYPES: Final = {
    "bool": pa.bool_(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
    "timestamp": TIMESTAMP,
    "quantiles": pa.binary(),
    "list": pa.binary(),
    "top": pa.binary(),
}
_STATE: Final = b"kivi.type"
"""Metadata of a field that holds states: their type, so that a reader of rows can make values of them."""
FAILURES: Final = (pa.ArrowException, ValueError, TypeError, KeyError, OSError, OverflowError, MemoryError)
"""The errors that pyarrow raises for data it cannot take; its own classes derive from several built-in ones."""


def arrow_type(type_: ColumnType) -> Any:
    """The Arrow type of a column type: int64, float64, bool, string, binary, decimal128, timestamp[us, UTC]; of states
    binary."""
    return pa.decimal128(type_.precision, type_.scale) if type_.name == "decimal" else _TYPES[type_.name]


def arrow_field(name: str, type_: ColumnType) -> Any:
    """The Arrow field of a column; of states it says which they are."""
    return pa.field(name, arrow_type(type_), metadata={_STATE: str(type_)} if type_.is_state else None)


def arrow_schema(schema: TableSchema, columns: Sequence[str] | None = None) -> Any:
    """The Arrow schema of what a read of the table returns, of ``columns`` or of all; derived columns are float64."""
    known = schema.by_name
    return pa.schema(
        [
            arrow_field(name, known[name].type) if name in known else pa.field(name, pa.float64())
            for name in (schema.output_names if columns is None else columns)
        ]
    )


def padded(events: Any, schema: TableSchema) -> Any:
    """A batch of events with all columns of its table: those that were added since it was made are null."""
    for column in schema.columns[events.num_columns :]:
        events = events.append_column(column.name, pa.nulls(events.num_rows, arrow_type(column.type)))
    return events


def trimmed(events: Any, schema: TableSchema) -> Any:
    """``padded`` undone: a batch without the last columns, as far as they were added to the table and are null.

    So the same events are the same bytes whether they were sent before an alteration or after it.
    """
    columns = len(schema.columns)
    least = schema.alterations[0].columns if schema.alterations else columns
    while columns > least and events.column(columns - 1).null_count == events.num_rows:
        columns -= 1
    return events if columns == events.num_columns else events.select(range(columns))


def reason(error: BaseException) -> str:
    """The text of one of these, as a part of an error's sentence."""
    said = "; ".join(str(arg) for arg in error.args) or type(error).__name__
    return said.split("\n")[0][:300]


def is_sane(type_: Any) -> bool:
    """Arrow believes any scale that a stream declares, and casting one of -2**31 crashes it (pyarrow 26)."""
    return bool(0 <= type_.scale <= type_.precision)


# -- columns and NumPy ------------------------------------------------------------------------------


def flat(array: Any) -> Any:
    """An Arrow array without chunks and without a dictionary."""
    if isinstance(array, pa.ChunkedArray):
        if array.num_chunks == 1:
            return flat(array.chunk(0))
        if pa.types.is_dictionary(array.type):  # each has its own, and Arrow does not always make one of them
            array = pa.chunked_array([chunk.dictionary_decode() for chunk in array.chunks], array.type.value_type)
        return array.combine_chunks()
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def picked(batch: Any, rows: Any) -> Any:
    """These rows of a RecordBatch, in their order. They must be there: that is not checked, which halves the time."""
    return pc.take(batch, pa.array(rows), boundscheck=False)


def stored_array(type_: ColumnType, array: Any) -> npt.NDArray[Any]:
    """An Arrow column of fixed width as NumPy in stored form: int64, float64 or bool; 0 where it is null.

    A decimal's unscaled value is at most 18 digits, so it is the low half of Arrow's 128 bits: a view.
    """
    array = flat(array)
    if type_.name == "decimal":
        if not pa.types.is_decimal128(array.type) or array.type.scale != type_.scale:
            array = array.cast(pa.decimal128(38, type_.scale))
        if len(array) == 0:
            return np.zeros(0, np.int64)
        halves = np.frombuffer(array.buffers()[1], np.int64, 2 * len(array), 16 * array.offset)
        values: npt.NDArray[Any] = halves[::2]
        return np.where(_valid(array), values, 0) if array.null_count else values
    if type_.name == "float64":
        array, zero = array.cast(pa.float64()), 0.0
    elif type_.name == "bool":
        array, zero = array.cast(pa.bool_()), False
    else:
        if type_.name == "timestamp" and pa.types.is_timestamp(array.type) and array.type.unit != "us":
            array = array.cast(pa.timestamp("us", array.type.tz))
        array, zero = array.cast(pa.int64()), 0
    if array.null_count:
        array = array.fill_null(zero)
    return array.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _valid(array: Any) -> npt.NDArray[np.bool_]:
    return array.is_valid().to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def arrow_from_stored(type_: ColumnType, values: npt.NDArray[Any], missing: npt.NDArray[np.bool_] | None = None) -> Any:
    """The inverse of ``stored_array``: the Arrow column, null where ``missing``."""
    if missing is not None and not missing.any():
        missing = None
    array = pa.array(values, mask=missing)
    if type_.name == "timestamp":
        return array.cast(TIMESTAMP)
    return decimals(type_, array) if type_.name == "decimal" else array


def not_finite(array: Any) -> int | None:
    """The first row with a NaN or an infinity."""
    finite = pc.is_finite(array)
    if pc.all(finite).as_py() is False:
        return int(pc.index(finite, False).as_py())
    return None


# -- columns and values -----------------------------------------------------------------------------


def stored_column(type_: ColumnType, stored: list[Any]) -> Any:
    """Stored-form values, None is null -> the Arrow column. Raises OverflowError beyond 64 bits."""
    if type_.name == "timestamp":
        return pa.array(stored, pa.int64()).cast(TIMESTAMP)
    if type_.name == "decimal":
        return decimals(type_, pa.array(stored, pa.int64()))
    return pa.array(stored, arrow_type(type_))


def decimals(type_: ColumnType, unscaled: Any) -> Any:
    """An int64 array of unscaled values -> decimal128, nulls kept."""
    values = unscaled.fill_null(0).to_numpy()
    halves = np.empty((len(values), 2), np.int64)
    halves[:, 0] = values
    halves[:, 1] = values >> 63
    array = pa.Array.from_buffers(arrow_type(type_), len(values), [None, pa.py_buffer(halves)])
    return pc.if_else(unscaled.is_valid(), array, pa.scalar(None, array.type)) if unscaled.null_count else array


def literal(type_: ColumnType, stored: Any) -> Any:
    """One stored-form value as a pyarrow scalar of the column's type."""
    return stored_column(type_, [stored])[0]


# -- batches and rows -------------------------------------------------------------------------------


def stored_rows(batch: Any) -> list[dict[str, Any]]:
    """The rows of a small batch in ``arrow_schema`` types as dicts of stored-form values."""
    return records(batch.schema.names, [_stored_list(flat(column)) for column in batch.columns])


def stored_lists(batch: Any) -> dict[str, list[Any]]:
    """The columns of a batch in ``arrow_schema`` types as lists of stored-form values."""
    return {name: _stored_list(flat(column)) for name, column in zip(batch.schema.names, batch.columns, strict=True)}


def _stored_list(array: Any) -> list[Any]:
    if pa.types.is_timestamp(array.type):
        array = array.view(pa.int64())
    if not pa.types.is_decimal(array.type):
        return _listed(array)
    values = stored_array(ColumnType("decimal", array.type.precision, array.type.scale), array).tolist()
    if array.null_count:
        valid = array.is_valid().to_pylist()
        return [value if known else None for value, known in zip(values, valid, strict=True)]
    return values  # type: ignore[no-any-return]


def distinct_names(names: Sequence[str]) -> list[str]:
    """For columns of which several may have one name: the later ones are called ``name_1``, ``name_2``."""
    found = dict[str, None]()
    for name in names:
        numbered = (f"{name}_{i}" for i in itertools.count(1) if f"{name}_{i}" not in names)
        found[next(each for each in itertools.chain([name], numbered) if each not in found)] = None
    return list(found)


def is_hugeint(type_: Any) -> bool:
    """Whether it is what SQL's whole numbers of 128 bits are in Arrow, sums of int64 among them: no column's type."""
    return type_ == pa.decimal128(38, 0)  # type: ignore[no-any-return]


def _listed(array: Any) -> list[Any]:
    """``to_pylist``, for numbers in a tenth of its time."""
    if (pa.types.is_int64(array.type) or pa.types.is_float64(array.type)) and not array.null_count:
        return array.to_numpy().tolist()  # type: ignore[no-any-return]
    return array.to_pylist()  # type: ignore[no-any-return]


def rows_from_batch(batch: Any) -> list[dict[str, Any]]:
    """A scan's batch as rows in the form that callers see: aware datetimes, Decimals. Raises OutOfRange."""
    return records(batch.schema.names, list(map(_seen, batch.schema, batch.columns)))


def _seen(field: Any, column: Any) -> list[Any]:
    name = field.name
    if field.metadata is not None and _STATE in field.metadata:
        return ColumnType.read(field.metadata[_STATE].decode()).from_stored_all(_listed(column), name)
    if pa.types.is_timestamp(column.type):
        us = column.cast(pa.timestamp("us", column.type.tz), safe=False)  # SQL has coarser and finer ones
        return ColumnType("timestamp").from_stored_all(_listed(us.cast(pa.int64())), name)
    try:
        return _listed(column)
    except (ValueError, OverflowError) as error:  # days of SQL that Python has not
        raise OutOfRange(
            f"{name} has a value that is out of range here ({error}): cast it to text", column=name
        ) from None


def rows_batch(schema: TableSchema, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Any:
    """Stored-form rows as a RecordBatch of the columns ``names``, in ``arrow_schema`` types.

    Raises OutOfRange for a value that its column's type cannot hold: a sum may be up to 128 bits wide.
    """
    arrays, fields = [], []
    for name in names:
        values = [row[name] for row in rows]
        column = schema.by_name.get(name)
        type_ = column.type if column is not None else _FLOAT
        fields.append(arrow_field(name, type_))
        try:
            array = stored_column(type_, values)
            if column is not None and type_.name in ("decimal", "float64"):
                _check_range(type_, values, array)
        except FAILURES:
            for value in values:
                type_.from_stored(value, name)
            raise
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


_FLOAT: Final = ColumnType("float64")


def _check_range(type_: ColumnType, values: Sequence[Any], array: Any) -> None:
    if type_.name == "float64":
        if not_finite(array) is not None:
            raise ValueError("not finite")
    elif len(values) and np.abs(stored_array(type_, array)).max() > type_.stored_max:
        raise ValueError("too wide")
