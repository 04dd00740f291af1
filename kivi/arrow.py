"""Arrow columns: their types, what callers append, and streams that came from a stranger.

**Types.** One Arrow type per column type (``arrow_type``), so that any two batches of one table can be put
together and blocks of different years have one form.

**What callers append** (``event_batch``) arrives as dicts, as Arrow or as pandas, and leaves as a batch of the
table's columns in the table's order, or not at all. What is accepted, and nothing that would lose a digit:

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
timestamp    timestamps of any unit, if exact in microseconds; one without a time zone is taken as UTC; integers
             are microseconds since 1970 UTC
============ =============================================================================================

NaN in a float column of pandas is its way to write null, and is read as null.

Invariant of every batch that ``event_batch`` returns: the types of ``arrow_schema``, no NaN, infinity or -0.0, valid
UTF-8, decimals within their precision, and no null event time. Everything above relies on it and checks nothing again.

**From a stranger** (``decode_ipc``) nothing is believed. Measured: 8.5 kB expand to 256 MiB, 224 bytes declare
2**31 rows, bad string offsets pass ``validate()`` and crash the process later, a decimal of scale -2**31 passes even
``validate(full=True)`` and crashes it when it is cast. So the metadata of every message is read first, by the
bounds-checked reader below, and what it declares is added up against the caller's limits; types are held to a short
list; only then does Arrow decode, and ``validate(full=True)`` runs before anybody looks at a value.
"""

from __future__ import annotations

import itertools
import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from types import NoneType
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.errors import InvalidArgument, KiviError, ResourceExhausted, SchemaError
from kivi.expr import Expr
from kivi.keys import arrow_from_stored, flat, stored_array
from kivi.schema import Column, TableSchema
from kivi.types import ColumnType

__all__ = [
    "arrow_schema",
    "arrow_type",
    "decode_ipc",
    "encode_ipc",
    "event_batch",
    "filter_batch",
    "literal",
    "rows_batch",
    "rows_from_batch",
    "stored_rows",
]

_TIMESTAMP: Final = pa.timestamp("us", "UTC")
_TYPES: Final = {
    "bool": pa.bool_(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
    "timestamp": _TIMESTAMP,
}
_FAILURES: Final = (pa.ArrowException, ValueError, TypeError, KeyError, OSError, OverflowError, MemoryError)
"""What pyarrow raises for data it cannot take; its own classes derive from several built-in ones."""


def arrow_type(type_: ColumnType) -> Any:
    """The Arrow type of a column type: int64, float64, bool, string, binary, decimal128, timestamp[us, UTC]."""
    return pa.decimal128(type_.precision, type_.scale) if type_.name == "decimal" else _TYPES[type_.name]


def arrow_schema(schema: TableSchema) -> Any:
    """The Arrow schema of what a read of the table returns, in ``output_names`` order; derived columns are float64."""
    fields = [pa.field(name, arrow_type(column.type)) for name, column in schema.by_name.items()]
    return pa.schema(fields + [pa.field(name, pa.float64()) for name, _ in schema.derived])


# -- what callers append ----------------------------------------------------------------------------


def event_batch(schema: TableSchema, records: Any) -> Any:
    """Records as one validated RecordBatch with all columns of the table, in its order.

    ``records``: an iterable of dicts, a pyarrow Table or RecordBatch, a pandas DataFrame, or anything else that exports
    an Arrow stream (``__arrow_c_stream__``). Raises SchemaError for a column or type that does not fit, InvalidArgument
    for a value that does not; both name the column, and for dicts the record.
    """
    if schema.kind != "event":
        raise InvalidArgument(f"{schema.name!r} is a {schema.kind} table: events are appended to event tables")
    if isinstance(records, (pa.Table, pa.RecordBatch)):
        return _from_arrow(schema, records, False)
    if type(records).__module__.partition(".")[0] == "pandas":
        return _from_arrow(schema, _from_pandas(records), True)
    if hasattr(records, "__arrow_c_stream__"):
        try:
            table = pa.table(records)
        except _FAILURES as error:
            raise InvalidArgument(f"these records cannot be read as an Arrow table: {_reason(error)}") from None
        return _from_arrow(schema, table, False)
    if isinstance(records, (Mapping, str, bytes)) or not isinstance(records, Iterable):
        raise InvalidArgument(
            f"records are a list of dicts, a pyarrow Table or RecordBatch or a pandas DataFrame, "
            f"not one {type(records).__name__}"
        )
    return _from_dicts(schema, list(records))


def _unknown(schema: TableSchema, name: object) -> SchemaError:
    return SchemaError(f"table {schema.name!r} has no column {name!r}; it has {', '.join(schema.by_name)}")


def _batch(schema: TableSchema, arrays: list[Any]) -> Any:
    for name, array in zip(schema.by_name, arrays, strict=True):
        if name == schema.event_time and array.null_count:
            row = pc.index(array.is_null(), True).as_py()
            raise InvalidArgument(f"records[{row}] has no {schema.event_time!r}: every event needs its event time")
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(schema))


# .. from dicts: columns are built by kernels if every value has a plain type, and one by one only to find the fault


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
            raise InvalidArgument(f"records[{at}] is {records[at]!r:.80}, a {kind.__name__}: a record is a dict")
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
    except _FAILURES:
        array = None
    if isinstance(array, pa.ChunkedArray):
        raise _too_long(column)
    if array is not None:
        return array
    stored = [_stored_value(column, value, i) for i, value in enumerate(values)]
    return _stored_column(column.type, stored)


def _plain_array(type_: ColumnType, values: list[Any]) -> Any:
    """The column if plain kernels give exactly what ``to_stored`` would, else None or an exception."""
    kinds = set(map(type, values)) - {NoneType}
    if type_.name == "timestamp" and kinds == {int}:
        return pa.array(values, pa.int64()).cast(_TIMESTAMP)
    if not kinds <= _PLAIN[type_.name]:
        return None
    if type_.name == "timestamp" and any(value is not None and value.tzinfo is not UTC for value in values):
        return None
    array = pa.array(values, arrow_type(type_))
    if type_.name == "float64":
        return None if _not_finite(array) is not None else pc.add(array, 0.0)
    return array


def _stored_value(column: Column, value: Any, row: int) -> Any:
    what = f"records[{row}][{column.name!r}]"
    if column.type.name == "timestamp" and hasattr(value, "nanosecond") and value.nanosecond:  # pandas
        raise InvalidArgument(f"{what} is {value}, which is not a whole number of microseconds")
    return column.type.to_stored(value, what)


def _stored_column(type_: ColumnType, stored: list[Any]) -> Any:
    """Stored-form values, None is null -> the Arrow column. Raises OverflowError beyond 64 bits."""
    if type_.name == "timestamp":
        return pa.array(stored, pa.int64()).cast(_TIMESTAMP)
    if type_.name == "decimal":
        return _decimals(type_, pa.array(stored, pa.int64()))
    return pa.array(stored, arrow_type(type_))


def _decimals(type_: ColumnType, unscaled: Any) -> Any:
    """An int64 array of unscaled values -> decimal128, nulls kept."""
    if not unscaled.null_count:
        return arrow_from_stored(type_, unscaled.to_numpy())
    array = arrow_from_stored(type_, unscaled.fill_null(0).to_numpy())
    return pc.if_else(unscaled.is_valid(), array, pa.scalar(None, array.type))


def _not_finite(array: Any) -> int | None:
    """The first row with a NaN or an infinity."""
    finite = pc.is_finite(array)
    if pc.all(finite).as_py() is False:
        return int(pc.index(finite, False).as_py())
    return None


# .. from Arrow: no Python statement per row


def _from_pandas(frame: Any) -> Any:
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except AttributeError:
        raise InvalidArgument(f"records are a pandas DataFrame, not a {type(frame).__name__}") from None
    except _FAILURES as error:
        raise SchemaError(f"this DataFrame is no table of columns: {_reason(error)}") from None


def _from_arrow(schema: TableSchema, table: Any, pandas: bool) -> Any:
    names = table.schema.names
    for name in names:
        if name not in schema.by_name:
            raise _unknown(schema, name)
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SchemaError(f"the records have the column {twice!r} twice")
    arrays = []
    for column in schema.by_name.values():
        if column.name in names:
            arrays.append(_converted(column, table.column(column.name), pandas))
        else:
            arrays.append(pa.nulls(table.num_rows, arrow_type(column.type)))
    return _batch(schema, arrays)


def _converted(column: Column, array: Any, pandas: bool) -> Any:
    type_, name = column.type, column.name
    given = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    accepted = pa.types.is_null(given) or _ACCEPTED[type_.name](given)
    if not accepted and not (pandas and type_.name == "int64" and pa.types.is_floating(given)):
        raise SchemaError(f"column {name!r} is {type_}, and the records have {array.type}")
    try:
        array.validate(full=True)
        array = flat(array)
        if isinstance(array, pa.ChunkedArray):  # Arrow leaves text over 2 GiB in chunks
            raise _too_long(column)
        if type_.name == "decimal" and pa.types.is_integer(given):
            array = _scaled(type_, array)
        elif type_.name == "timestamp" and pa.types.is_integer(given):
            array = array.cast(pa.int64()).cast(_TIMESTAMP)
        elif array.type != arrow_type(type_):
            array = array.cast(arrow_type(type_))
    except _FAILURES as error:
        raise InvalidArgument(f"column {name!r}: {_reason(error)}") from None
    if type_.name == "float64":
        row = _not_finite(array)
        if row is not None:
            raise InvalidArgument(f"column {name!r} is {array[row]} in row {row}: NaN and infinities are not accepted")
        array = pc.add(array, 0.0)  # -0.0 + 0.0 is 0.0
    return array


def _too_long(column: Column) -> ResourceExhausted:
    return ResourceExhausted(f"column {column.name!r} has more than 2 GiB in one append: send less at a time")


def _scaled(type_: ColumnType, integers: Any) -> Any:
    """Whole numbers as decimals: 12 -> 12.00. Raises ValueError for what does not fit."""
    integers = integers.cast(pa.int64())
    limits = pc.min_max(integers).as_py()
    most = type_.stored_max // 10**type_.scale
    for extreme in (limits["min"], limits["max"]):
        if extreme is not None and abs(extreme) > most:
            raise ValueError(f"{extreme} does not fit in {type_}")
    return _decimals(type_, pc.multiply_checked(integers, pa.scalar(10**type_.scale, pa.int64())))


_is = pa.types
_ACCEPTED: Final[dict[str, Callable[[Any], bool]]] = {
    "bool": lambda t: bool(_is.is_boolean(t)),
    "int64": lambda t: bool(_is.is_integer(t)),
    "float64": lambda t: bool(_is.is_floating(t) or _is.is_integer(t)),
    "decimal": lambda t: bool((_is.is_decimal(t) and _is_sane(t)) or _is.is_integer(t)),
    "string": lambda t: bool(_is.is_string(t) or _is.is_large_string(t) or _is.is_string_view(t)),
    "bytes": lambda t: bool(
        _is.is_binary(t) or _is.is_large_binary(t) or _is.is_binary_view(t) or _is.is_fixed_size_binary(t)
    ),
    "timestamp": lambda t: bool(_is.is_timestamp(t) or _is.is_integer(t)),
}


def _reason(error: BaseException) -> str:
    said = "; ".join(str(arg) for arg in error.args) or type(error).__name__
    return said.split("\n")[0][:300]


# -- stored form ------------------------------------------------------------------------------------


def stored_rows(batch: Any) -> list[dict[str, Any]]:
    """The rows of a small batch in ``arrow_schema`` types as dicts of stored-form values."""
    names = batch.schema.names
    columns = [_stored_list(flat(column)) for column in batch.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _stored_list(array: Any) -> list[Any]:
    if pa.types.is_timestamp(array.type):
        return array.cast(pa.int64()).to_pylist()  # type: ignore[no-any-return]
    if not pa.types.is_decimal(array.type):
        return array.to_pylist()  # type: ignore[no-any-return]
    values = stored_array(ColumnType("decimal", array.type.precision, array.type.scale), array).tolist()
    if array.null_count:
        valid = array.is_valid().to_pylist()
        return [value if known else None for value, known in zip(values, valid, strict=True)]
    return values  # type: ignore[no-any-return]


def rows_from_batch(batch: Any) -> list[dict[str, Any]]:
    """A scan's batch as rows in the form that callers see: aware datetimes, Decimals."""
    names, columns = batch.schema.names, []
    moment = ColumnType("timestamp").from_stored
    for name, column in zip(names, batch.columns, strict=True):
        if pa.types.is_timestamp(column.type):
            columns.append([moment(value, name) for value in column.cast(pa.int64()).to_pylist()])
        else:
            columns.append(column.to_pylist())
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] if columns else []


def rows_batch(schema: TableSchema, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Any:
    """Stored-form rows as a RecordBatch of the columns ``names``, in ``arrow_schema`` types.

    Raises OutOfRange for a value that its column's type cannot hold: a sum may be up to 128 bits wide.
    """
    arrays, fields = [], []
    for name in names:
        values = [row[name] for row in rows]
        column = schema.by_name.get(name)
        type_ = column.type if column is not None else _FLOAT
        fields.append(pa.field(name, arrow_type(type_)))
        try:
            array = _stored_column(type_, values)
            if column is not None and type_.name in ("decimal", "float64"):
                _check_range(type_, values, array)
        except _FAILURES:
            for value in values:
                type_.from_stored(value, name)
            raise
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


_FLOAT: Final = ColumnType("float64")


def _check_range(type_: ColumnType, values: Sequence[Any], array: Any) -> None:
    if type_.name == "float64":
        if _not_finite(array) is not None:
            raise ValueError("not finite")
    elif len(values) and np.abs(stored_array(type_, array)).max() > type_.stored_max:
        raise ValueError("too wide")


def literal(type_: ColumnType, stored: Any) -> Any:
    """One stored-form value as a pyarrow scalar of the column's type."""
    return _stored_column(type_, [stored])[0]


# -- predicates -------------------------------------------------------------------------------------


def filter_batch(batch: Any, predicate: Expr, types: Mapping[str, ColumnType]) -> Any:
    """The rows of a RecordBatch or Table that a bound predicate selects: those where it is true, not unknown.

    Kernels are called directly, since starting Arrow's expression engine costs more than most batches.
    """
    mask = _mask(batch, predicate, types)
    if isinstance(mask, pa.Scalar):
        return batch if mask.as_py() else batch.slice(0, 0)
    return batch.filter(mask)


_COMPARE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


def _mask(batch: Any, predicate: Expr, types: Mapping[str, ColumnType]) -> Any:
    match predicate.op:
        case "and":
            return pc.and_kleene(_mask(batch, predicate.args[0], types), _mask(batch, predicate.args[1], types))
        case "or":
            return pc.or_kleene(_mask(batch, predicate.args[0], types), _mask(batch, predicate.args[1], types))
        case "not":
            return pc.invert(_mask(batch, predicate.args[0], types))
    values = batch.column(predicate.column)
    if predicate.op == "is_null":
        return values.is_null()
    type_ = types[predicate.column]
    if predicate.op == "isin":
        found = pc.is_in(values, value_set=_stored_column(type_, list(predicate.value)))
        return pc.if_else(values.is_valid(), found, pa.scalar(None, pa.bool_())) if values.null_count else found
    return _COMPARE[predicate.op](values, literal(type_, predicate.value))


# -- streams ----------------------------------------------------------------------------------------


def encode_ipc(batch: Any, compression: str | None = None) -> Any:
    """A RecordBatch or Table as an Arrow IPC stream (a pa.Buffer). ``compression``: None, "lz4" or "zstd"."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write(batch)
    return sink.getvalue()


def decode_ipc(data: Any, *, max_bytes: int, max_rows: int) -> Any:
    """A pa.Table from an Arrow IPC stream that a stranger sent.

    Raises ResourceExhausted for a stream beyond a limit, InvalidArgument for one that is not valid, and nothing else.

    ``max_bytes`` limits what the stream expands to (buffers after decompression, dictionaries written out, and
    ``_NODE_BYTES`` for each array), ``max_rows`` its rows. Columns must be flat: bool, numbers, decimals, text,
    bytes, timestamps, null, and dictionaries of them, which come back written out. Streams only, as written since
    Arrow 0.15, with their end marker: one that was cut off between two batches is refused, not read in part.

    The table refers to ``data`` where it can, so ``data`` must not change while the table is used.
    """
    view = memoryview(data).cast("B") if not isinstance(data, memoryview) else data.cast("B")
    try:
        _survey(view, max_bytes, max_rows)
        return _decoded(view, max_bytes)
    except KiviError:
        raise
    except (*_FAILURES, struct.error, IndexError) as error:
        raise _not_a_stream(_reason(error)) from None


def _not_a_stream(reason: str) -> InvalidArgument:
    return InvalidArgument(f"not a valid Arrow IPC stream: {reason}")


def _too_much(what: str, found: int, limit: int) -> ResourceExhausted:
    return ResourceExhausted(
        f"this Arrow stream holds {found} {what}, more than the limit of {limit}: send less at a time", limit=limit
    )


_MAX_COLUMNS: Final = 4_096
_NODE_BYTES: Final = 128
"""What an array costs in memory whatever it holds; charged, so that a million empty ones are not free."""
_WIDEST: Final = 32
"""Bytes of the widest number, a decimal256."""


def _decoded(view: memoryview, max_bytes: int) -> Any:
    options = pa.ipc.IpcReadOptions(use_threads=False)
    with pa.ipc.open_stream(pa.py_buffer(view), options=options) as reader:
        if len(reader.schema) > _MAX_COLUMNS:
            raise _too_much("columns", len(reader.schema), _MAX_COLUMNS)
        for field in reader.schema:
            if not _is_flat(field.type):
                raise InvalidArgument(f"column {field.name!r} of this Arrow stream is {field.type}: use a plain type")
        table = reader.read_all()
    table.validate(full=True)
    return _written_out(table, max_bytes)


def _is_flat(type_: Any) -> bool:
    if _is.is_dictionary(type_):
        return not _is.is_dictionary(type_.value_type) and _is_flat(type_.value_type)
    return bool(
        _is.is_boolean(type_)
        or _is.is_integer(type_)
        or _is.is_floating(type_)
        or (_is.is_decimal(type_) and _is_sane(type_))
        or _is.is_string(type_)
        or _is.is_large_string(type_)
        or _is.is_binary(type_)
        or _is.is_large_binary(type_)
        or (_is.is_fixed_size_binary(type_) and type_.byte_width > 0)
        or _is.is_timestamp(type_)
        or _is.is_null(type_)
    ) and not isinstance(type_, pa.BaseExtensionType)


def _is_sane(type_: Any) -> bool:
    """Arrow believes any scale that a stream declares, and casting one of -2**31 crashes it (pyarrow 26)."""
    return bool(0 <= type_.scale <= type_.precision)


def _written_out(table: Any, max_bytes: int) -> Any:
    """Dictionaries replaced by their values, once it is known how much that will be."""
    total = table.nbytes
    for i, field in enumerate(table.schema):
        if not _is.is_dictionary(field.type):
            continue
        for chunk in table.column(i).chunks:
            total += _written_bytes(chunk)
            if total > max_bytes:
                raise _too_much("bytes with its dictionaries written out", total, max_bytes)
        chunks = [chunk.dictionary_decode() for chunk in table.column(i).chunks]
        table = table.set_column(i, field.name, pa.chunked_array(chunks, field.type.value_type))
    return table


def _written_bytes(chunk: Any) -> int:
    type_ = chunk.type.value_type
    if _is.is_fixed_size_binary(type_):
        return int(type_.byte_width) * len(chunk)
    if _is.is_primitive(type_) or _is.is_decimal(type_) or _is.is_null(type_):
        return _WIDEST * len(chunk)
    lengths = pc.binary_length(chunk.dictionary).cast(pa.int64())
    return 8 * len(chunk) + (pc.sum(lengths.take(chunk.indices)).as_py() or 0)


# .. what the messages of a stream declare
#
#   message    0xFFFFFFFF | i32 length of the metadata | metadata, a flatbuffer | body
#   end        0xFFFFFFFF | i32 0
#   Message    version i16, header type u8, header, bodyLength i64                 (format/Message.fbs)
#   RecordBatch  length i64, nodes [(length, nulls)], buffers [(offset, length)], compression
#   DictionaryBatch  id i64, data RecordBatch, isDelta bool
#
# A compressed buffer begins with its length when expanded, i64, or -1 if it is not compressed after all.

_CONTINUATION: Final = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_V5: Final = 4
_I64_PAIR: Final = struct.Struct("<qq")


class _Flat:
    """A flatbuffer table, of which every read is bounds-checked: past the end is an error, never other memory.

    ``fields`` are numbered as in the .fbs file (a union takes two). An absent field is its default, 0.
    """

    __slots__ = ("_at", "_data", "_fields", "_vtable")

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self._at = at
        self._vtable = at - _read("<i", data, at)
        size = _read("<H", data, self._vtable)
        self._fields = max(0, (size - 4) // 2)

    @staticmethod
    def root(data: memoryview) -> _Flat:
        return _Flat(data, _read("<I", data, 0))

    def _field(self, number: int) -> int:
        """Where the field is, or 0."""
        if number >= self._fields:
            return 0
        offset = _read("<H", self._data, self._vtable + 4 + 2 * number)
        return self._at + offset if offset else 0

    def scalar(self, number: int, layout: str) -> int:
        at = self._field(number)
        return _read(layout, self._data, at) if at else 0

    def table(self, number: int) -> _Flat | None:
        at = self._field(number)
        return _Flat(self._data, at + _read("<I", self._data, at)) if at else None

    def pairs(self, number: int) -> Iterator[tuple[int, int]]:
        """A vector of structs of two i64."""
        at = self._field(number)
        if not at:
            return iter(())
        at += _read("<I", self._data, at)
        count = _read("<I", self._data, at)
        at += 4
        if at + 16 * count > len(self._data):
            raise ValueError("a vector leaves its message")
        return _I64_PAIR.iter_unpack(self._data[at : at + 16 * count])

    def count(self, number: int) -> int:
        at = self._field(number)
        return _read("<I", self._data, at + _read("<I", self._data, at)) if at else 0


def _read(layout: str, data: memoryview, at: int) -> int:
    if at < 0:  # struct would count from the end
        raise ValueError("an offset leaves its message")
    return struct.unpack_from(layout, data, at)[0]  # type: ignore[no-any-return]


class _Budget:
    """What the messages declared so far, against the limits."""

    def __init__(self, max_bytes: int, max_rows: int) -> None:
        self._max_bytes, self._max_rows = max_bytes, max_rows
        self._bytes = self._rows = 0

    def add(self, nbytes: int, rows: int) -> None:
        self._bytes += nbytes
        self._rows += rows
        if self._rows > self._max_rows:
            raise _too_much("rows", self._rows, self._max_rows)
        if self._bytes > self._max_bytes:
            raise _too_much("bytes", self._bytes, self._max_bytes)


def _survey(view: memoryview, max_bytes: int, max_rows: int) -> None:
    """Walks all messages and adds up what they declare. Raises for limits, and for what is no stream."""
    budget = _Budget(max_bytes, max_rows)
    dictionaries = _Budget(max_bytes, max_rows)
    at, first = 0, True
    while True:
        if at == len(view):
            raise ValueError("it ends without an end marker: it was cut off")
        marker, size = struct.unpack_from("<Ii", view, at)
        if marker != _CONTINUATION:
            raise ValueError("a message does not begin with its mark")
        at += 8
        if size == 0:
            break
        if size < 0 or at + size > len(view):
            raise ValueError("the metadata of a message is cut off")
        message = _Flat.root(view[at : at + size])
        at += size
        if message.scalar(0, "<h") != _V5:
            raise ValueError("metadata version 5 is needed: write it with Arrow 1.0 or later")
        kind, length = message.scalar(1, "<B"), message.scalar(3, "<q")
        if length < 0 or at + length > len(view):
            raise ValueError("the body of a message is cut off")
        body = view[at : at + length]
        at += length
        header = message.table(2)
        if header is None or (kind == _SCHEMA) is not first:
            raise ValueError("a stream is one schema, then batches")
        if kind == _SCHEMA:
            if header.scalar(0, "<h") != 0:
                raise ValueError("its numbers are big endian")
        elif kind == _DICTIONARY:
            data = header.table(1)
            if data is None or header.scalar(2, "<B"):
                raise ValueError("a dictionary that is sent in pieces is not supported")
            _survey_batch(data, body, dictionaries)
        elif kind == _BATCH:
            _survey_batch(header, body, budget)
        else:
            raise ValueError(f"a message of kind {kind} has no place in a stream of batches")
        first = False
    if first:
        raise ValueError("it has no schema")
    if at != len(view):
        raise ValueError(f"{len(view) - at} bytes follow its end marker")


def _survey_batch(batch: _Flat, body: memoryview, budget: _Budget) -> None:
    rows = batch.scalar(0, "<q")
    nodes, buffers = batch.count(1), batch.count(2)
    if rows < 0 or nodes > _MAX_COLUMNS or buffers > 3 * _MAX_COLUMNS or batch.count(4):
        raise ValueError("a batch has a negative length, too many columns, or views")
    budget.add(_NODE_BYTES * nodes, rows)
    for length, nulls in batch.pairs(1):
        if length != rows or not 0 <= nulls <= rows:
            raise ValueError("the columns of a batch differ in length")
    compressed = batch.table(3) is not None
    for offset, length in batch.pairs(2):
        if offset < 0 or length < 0 or offset + length > len(body):
            raise ValueError("a buffer leaves its message")
        if compressed and length:
            if length < 8:
                raise ValueError("a compressed buffer is cut off")
            expanded = _read("<q", body, offset)
            if expanded < -1:
                raise ValueError("a compressed buffer has a negative length")
            length = length - 8 if expanded == -1 else expanded
        budget.add(length, 0)
