"""Records that callers append: dicts, Arrow or pandas become one batch of the table's columns, or are refused.

The batch has the table's columns in the table's order. What is accepted, and nothing that would lose a digit:

============ =============================================================================================
column       accepted from Arrow (dicts: what ``ColumnType.to_stored`` accepts, the same rules one value a time)
============ =============================================================================================
any          its own type, dictionary-encoded or not; the null type; a missing column is null
bool         bool
int64        every integer type, in range (pandas: floats without a fraction, its way to write ints with nulls)
float64      float16, float32, integers that a float64 holds exactly; never NaN or infinities; -0.0 becomes 0.0
decimal(p,s) decimals of any width and scale, and integers, if every value fits exactly
string       string, large_string, string_view; valid UTF-8
bytes        binary, large_binary, binary_view, fixed-size binary
timestamp    timestamps of any unit, if exact in microseconds, and days; one without a time zone is taken as UTC;
             integers are microseconds since 1970 UTC; always of the years 1 to 9999
============ =============================================================================================

NaN in a float column of pandas is its way to write null, and is read as null.

Invariant of every batch that ``event_batch`` returns: the types of ``arrow_schema``, but that text which came as a
dictionary may be left in codes (``kivi.arrow.dictionaries``); no NaN, infinity or -0.0, valid
UTF-8, decimals within their precision, moments of the years 1 to 9999, and no null event time. Everything above relies
on it and checks nothing again.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from types import NoneType
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.columns import (
    FAILURES,
    TIMESTAMP,
    arrow_type,
    decimals,
    flat,
    is_sane,
    not_finite,
    reason,
    stored_column,
)
from kivi.arrow.dictionaries import as_coded, plain, settled
from kivi.arrow.packed_events import EventBatch
from kivi.errors import InvalidArgument, ResourceExhausted, SchemaError
from kivi.model.given import has_elements
from kivi.model.names import is_text
from kivi.model.schema import Column, TableSchema
from kivi.model.types import MOMENT_MAX_US, MOMENT_MIN_US, ColumnType, check_moment, shown

__all__ = ["DELETES", "event_batch", "lasting", "row_batch", "table_batch"]

DELETES: Final = "kivi.deletes"
"""The column of a batch of rows that says which are deleted; no column of a table has such a name."""


def event_batch(schema: TableSchema, records: Any, *, validated: bool = False) -> Any:
    """Records as one validated RecordBatch with all columns of the table, in its order.

    ``records``: an iterable of dicts, a pyarrow Table or RecordBatch, a pandas DataFrame, or anything else that exports
    an Arrow stream (``__arrow_c_stream__``); an ``EventBatch`` of this schema is one already. Raises SchemaError for a
    column or type that does not fit, InvalidArgument for a value that does not; both name the column, and for dicts
    the record. ``validated``: a Table of which ``decode_ipc`` has said that it is what it claims to be.
    """
    if schema.kind != "event":
        raise InvalidArgument(f"{schema.name!r} is a {schema.kind} table: events are appended to event tables")
    if isinstance(records, EventBatch):
        if records.schema == schema:
            return records.batch
        records = records.batch  # the table has been made anew since
    table, pandas = _table_of(records)
    if table is None:
        return _from_dicts(schema, list(records))
    arrays = _from_arrow(schema, table, pandas, validated)
    for name, column in schema.by_name.items():
        if name not in arrays:
            arrays[name] = pa.nulls(table.num_rows, arrow_type(column.type))
    return _batch(schema, [arrays[name] for name in schema.by_name])


def table_batch(schema: TableSchema, records: Any, *, validated: bool = False, deletes: str | None = None) -> Any:
    """``event_batch`` or ``row_batch``, as the table is."""
    if schema.kind == "row":
        return row_batch(schema, records, validated=validated, deletes=deletes)
    if deletes is not None:
        raise InvalidArgument(f"{schema.name!r} is no row table, and only rows are deleted: leave deletes out")
    return event_batch(schema, records, validated=validated)


def row_batch(schema: TableSchema, records: Any, *, validated: bool = False, deletes: str | None = None) -> Any:
    """Records as one validated RecordBatch of a row table: its key, and some of its columns, in the table's order.

    Accepts what ``event_batch`` accepts, but that dicts all name the same columns. A column that is not there is
    none of the batch's: to write null is not to write nothing. ``deletes`` names a column of bool of the records, which
    the table does not have: where it is true the row is deleted. In the batch it is the last, ``DELETES``, without
    nulls, which are false; records that are such a batch have it already. Raises SchemaError, InvalidArgument.
    """
    if schema.kind != "row":
        raise InvalidArgument(f"{schema.name!r} is a {schema.kind} table: rows are put into row tables")
    table, pandas = _table_of(records)
    if deletes is not None and not is_text(deletes):
        raise InvalidArgument(f"deletes names a boolean column of the records, and {shown(deletes)} is no name")
    if deletes is not None and deletes in schema.by_name:
        raise SchemaError(
            f"{deletes!r} is a column of {schema.name!r}: give the one that says what to delete another name"
        )
    if table is None:
        rows = list(records)
        flags = None if deletes is None else _flags(deletes, _dicts_column(rows, deletes))
        if deletes is not None:
            rows = [{name: value for name, value in row.items() if name != deletes} for row in rows]
        names = set(rows[0]) if rows and isinstance(rows[0], Mapping) else {column.name for column in schema.key}
        for i, row in enumerate(rows):
            if not isinstance(row, Mapping) or set(row) != names:
                raise InvalidArgument(f"records[{i}] does not name the columns that records[0] names: {shown(row)}")
        for name in names - schema.by_name.keys():
            raise _unknown(schema, name)
        arrays = {name: _column_of(column, rows) for name, column in schema.by_name.items() if name in names}
    else:
        named = DELETES if deletes is None else deletes
        places = table.schema.get_all_field_indices(named)
        if len(places) > 1:
            raise SchemaError(f"the records have the column {named!r} twice")
        flags = _flags(named, table.column(places[0])) if places else None
        if flags is not None:
            table = table.drop_columns([named])
        elif deletes is not None:
            raise SchemaError(f"the records have no column {shown(deletes)}, which says what to delete")
        arrays = _from_arrow(schema, table, pandas, validated)
    for column in schema.key:
        array = arrays.get(column.name)
        if array is None or array.null_count:
            raise InvalidArgument(f"a row of {schema.name!r} needs its key column {column.name!r}, and it is null")
    present = [name for name in schema.by_name if name in arrays]
    columns = [arrays[name] for name in present]
    if flags is not None:
        columns, present = [*columns, flags], [*present, DELETES]
    return plain(pa.RecordBatch.from_arrays(columns, present))


def _dicts_column(rows: list[Any], name: str) -> Any:
    if not all(isinstance(row, Mapping) and name in row for row in rows):
        raise SchemaError(f"each of the records names the column {name!r}, which says what to delete")
    try:
        return pa.array([row[name] for row in rows], pa.bool_())
    except FAILURES:
        raise SchemaError(f"column {name!r}, which says what to delete, is True or False in each record") from None


def _flags(name: str, column: Any) -> Any:
    """A column of bool as one array without nulls."""
    if not (pa.types.is_boolean(column.type) or pa.types.is_null(column.type)):
        raise SchemaError(f"column {name!r}, which says what to delete, is of bool, and the records have {column.type}")
    return pc.fill_null(flat(column).cast(pa.bool_()), False)


def lasting(records: Any) -> Any:
    """The same records, to be read more than once: of an iterator, or a stream of Arrow, all that is left of it.

    Raises InvalidArgument for what is no records.
    """
    if isinstance(records, EventBatch):
        return records
    table, pandas = _table_of(records)
    if pandas or isinstance(records, (list, tuple)):
        return records
    return list(records) if table is None else table


def _table_of(records: Any) -> tuple[Any, bool]:
    """(an Arrow table or batch, whether pandas made it); (None, False) for what is to be read one by one."""
    if isinstance(records, (list, tuple)):
        return None, False
    if isinstance(records, (pa.Table, pa.RecordBatch)):
        return records, False
    if type(records).__module__.partition(".")[0] == "pandas":
        return _from_pandas(records), True
    if hasattr(records, "__arrow_c_stream__"):
        try:
            return pa.table(records), False
        except FAILURES as error:
            raise InvalidArgument(f"these records cannot be read as an Arrow table: {reason(error)}") from None
    if isinstance(records, Mapping) or not has_elements(records):
        raise InvalidArgument(
            f"records are a list of dicts, a pyarrow Table or RecordBatch or a pandas DataFrame, "
            f"not one {type(records).__name__}"
        )
    return None, False


def _unknown(schema: TableSchema, name: object) -> SchemaError:
    return SchemaError(f"table {schema.name!r} has no column {shown(name)}; it has {', '.join(schema.by_name)}")


def _batch(schema: TableSchema, arrays: list[Any]) -> Any:
    array = dict(zip(schema.by_name, arrays, strict=True))[name := schema.event_time or ""]
    if array.null_count:
        row = pc.index(array.is_null(), True).as_py()
        raise InvalidArgument(f"records[{row}] has no {name!r}: every event needs its event time")
    return pa.RecordBatch.from_arrays(arrays, list(schema.by_name))


# -- from dicts: columns are built by kernels if every value has a plain type, and one by one only to find the fault


_PLAIN: Final[dict[str, set[type]]] = {
    "bool": {bool},
    "int64": {int},
    "float64": {float, int},
    "decimal": {Decimal, int},
    "string": {str},
    "bytes": {bytes},
    "timestamp": {datetime},
}


def _from_dicts(schema: TableSchema, records: list[Any]) -> Any:
    for kind in set(map(type, records)):
        if not issubclass(kind, Mapping):
            at = next(i for i, record in enumerate(records) if type(record) is kind)
            raise InvalidArgument(f"records[{at}] is {shown(records[at])}, a {kind.__name__}: a record is a dict")
    for name in set(itertools.chain.from_iterable(records)):
        if name not in schema.by_name:
            raise _unknown(schema, name)
    arrays = [_column_of(column, records) for column in schema.by_name.values()]
    return _batch(schema, arrays)


def _column_of(column: Column, records: list[Any]) -> Any:
    try:
        values = list(map(operator.itemgetter(column.name), records))
    except KeyError:
        values = [record.get(column.name) for record in records]
    try:
        array = _plain_array(column.type, values)
    except FAILURES:
        array = None
    if isinstance(array, pa.ChunkedArray):
        raise _too_long(column)
    if array is not None:
        return _of_datetimes(column, array)
    stored = [_stored_value(column, value, i) for i, value in enumerate(values)]
    return stored_column(column.type, stored)


def _plain_array(type_: ColumnType, values: list[Any]) -> Any:
    """The column if plain kernels give exactly what ``to_stored`` would, else None or an exception."""
    kinds = set(map(type, values)) - {NoneType}
    if type_.name == "timestamp" and kinds == {int}:
        return pa.array(values, pa.int64()).view(TIMESTAMP)
    if not kinds <= _PLAIN[type_.name]:
        return None
    if type_.name == "timestamp" and any(value is not None and value.tzinfo is not UTC for value in values):
        return None
    array = pa.array(values, arrow_type(type_))
    if type_.name == "float64":
        return None if not_finite(array) is not None else pc.add(array, 0.0)
    return array


def _stored_value(column: Column, value: Any, row: int) -> Any:
    what = f"records[{row}][{column.name!r}]"
    return column.type.to_written(value, what)


def _of_datetimes(column: Column, array: Any) -> Any:
    """The array. Raises InvalidArgument for a time that no ``datetime`` holds, which no reader could give back."""
    if column.type.name == "timestamp":
        times = array.view(pa.int64())
        for extreme in pc.min_max(times).values():
            if extreme.is_valid and not MOMENT_MIN_US <= (time := extreme.as_py()) <= MOMENT_MAX_US:
                check_moment(time, f"records[{pc.index(times, extreme).as_py()}][{column.name!r}]")
    return array


# -- from Arrow: no Python statement per row ---------------------------------------------------------


def _from_pandas(frame: Any) -> Any:
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except AttributeError:
        raise InvalidArgument(f"records are a pandas DataFrame, not a {type(frame).__name__}") from None
    except FAILURES as error:
        raise SchemaError(f"this DataFrame is no table of columns: {reason(error)}") from None


def _from_arrow(schema: TableSchema, table: Any, pandas: bool, validated: bool) -> dict[str, Any]:
    """The table's columns that are there, by name."""
    names = table.schema.names
    for name in names:
        if name not in schema.by_name:
            raise _unknown(schema, name)
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SchemaError(f"the records have the column {twice!r} twice")
    return {
        column.name: _converted(column, table.column(column.name), pandas, validated)
        for column in schema.by_name.values()
        if column.name in names
    }


def _converted(column: Column, array: Any, pandas: bool, validated: bool) -> Any:
    type_, name = column.type, column.name
    if isinstance(array, pa.ChunkedArray) and array.num_chunks == 1:
        array = array.chunk(0)
    sent = array.type
    given = sent.value_type if pa.types.is_dictionary(sent) else sent
    accepted = pa.types.is_null(given) or _ACCEPTED[type_.name](given)
    if not accepted and not (pandas and type_.name == "int64" and pa.types.is_floating(given)):
        raise SchemaError(f"column {name!r} is {type_}, and the records have {sent}")
    try:
        if not validated:
            array.validate(full=True)
        if (codes := _codes(type_, array)) is not None:
            return codes
        array = flat(array)
        if isinstance(array, pa.ChunkedArray):  # Arrow leaves text over 2 GiB in chunks
            raise _too_long(column)
        if type_.name == "decimal" and pa.types.is_integer(given):
            array = _scaled(type_, array)
        elif type_.name == "timestamp" and pa.types.is_integer(given):
            array = array.cast(pa.int64()).cast(TIMESTAMP)
        elif type_.name == "float64" and pa.types.is_integer(given):
            array = _floats(column, array)
        elif array.type != arrow_type(type_):
            array = array.cast(arrow_type(type_))
    except FAILURES as error:
        raise InvalidArgument(f"column {name!r}: {reason(error)}") from None
    if type_.name == "float64":
        row = not_finite(array)
        if row is not None:
            raise InvalidArgument(f"column {name!r} is {array[row]} in row {row}: NaN and infinities are not accepted")
        array = pc.add(array, 0.0)  # -0.0 + 0.0 is 0.0
    return _of_datetimes(column, settled(array))


def _codes(type_: ColumnType, array: Any) -> Any:
    """The column in codes, if that is how it came and it can stay so."""
    if not isinstance(array, pa.DictionaryArray) or array.type.value_type != arrow_type(type_):
        return None
    return as_coded(array)


def _too_long(column: Column) -> ResourceExhausted:
    return ResourceExhausted(f"column {column.name!r} has more than 2 GiB in one append: send less at a time")


def _floats(column: Column, integers: Any) -> Any:
    """Whole numbers as floats. Raises InvalidArgument for one that is none."""
    try:
        return integers.cast(pa.float64())
    except pa.ArrowInvalid:  # some are beyond 2**53, from where on not all are floats
        values = integers.to_pylist()
        return stored_column(column.type, [_stored_value(column, value, i) for i, value in enumerate(values)])


def _scaled(type_: ColumnType, integers: Any) -> Any:
    """Whole numbers as decimals: 12 -> 12.00. Raises ValueError for what does not fit."""
    integers = integers.cast(pa.int64())
    limits = pc.min_max(integers).as_py()
    most = type_.stored_max // 10**type_.scale
    for extreme in (limits["min"], limits["max"]):
        if extreme is not None and abs(extreme) > most:
            raise ValueError(f"{extreme} does not fit in {type_}")
    return decimals(type_, pc.multiply_checked(integers, pa.scalar(10**type_.scale, pa.int64())))


_is = pa.types
_ACCEPTED: Final[dict[str, Callable[[Any], bool]]] = {
    "bool": lambda t: bool(_is.is_boolean(t)),
    "int64": lambda t: bool(_is.is_integer(t)),
    "float64": lambda t: bool(_is.is_floating(t) or _is.is_integer(t)),
    "decimal": lambda t: bool((_is.is_decimal(t) and is_sane(t)) or _is.is_integer(t)),
    "string": lambda t: bool(_is.is_string(t) or _is.is_large_string(t) or _is.is_string_view(t)),
    "bytes": lambda t: bool(
        _is.is_binary(t) or _is.is_large_binary(t) or _is.is_binary_view(t) or _is.is_fixed_size_binary(t)
    ),
    "timestamp": lambda t: bool(_is.is_timestamp(t) or _is.is_integer(t) or _is.is_date(t)),
}
