"""Arrow in and out: types, events from callers, and IPC bytes from strangers.

Columns travel and rest as Arrow. Whatever arrives is brought to the table's own columns first, by column and not by
row: all of the table's columns, in its order, in the types below, without NaN, infinities or -0.0, valid UTF-8.

============== ===========================  ====================================================================
type           Arrow                        also accepted, if nothing is lost
============== ===========================  ====================================================================
int64          int64                        smaller and unsigned integers that fit
float64        double                       float, integers
decimal(p, s)  decimal128(p, s)             other decimals and integers that fit
timestamp      timestamp[us, UTC]           other units if exact; without a zone it is taken as UTC; int64 microseconds
string, bytes  string, binary               large_ and dictionary-encoded forms; bytes for string if valid UTF-8
bool           bool
============== ===========================  ====================================================================

**IPC from a stranger is dangerous** (measured): 8.5 kB can expand to 256 MiB, a 224-byte message can declare 2**31 rows,
and bad string offsets pass ``validate()`` and crash the process when a value is read. ``decode_ipc`` reads the message
headers with a bounds-checked reader of its own and compares what they declare with the limits *before* pyarrow decodes
anything, and runs ``validate(full=True)`` after.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.errors import InvalidArgument, KiviError, OutOfRange, ResourceExhausted, SchemaError
from kivi.expr import Expr, to_arrow
from kivi.schema import Column, ColumnType, TableSchema

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

_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
_PLAIN: Final = {
    "bool": pa.bool_(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
    "timestamp": _TIMESTAMP,
}


def arrow_type(type_: ColumnType) -> Any:
    """The Arrow type of a column."""
    return pa.decimal128(type_.precision, type_.scale) if type_.name == "decimal" else _PLAIN[type_.name]


def arrow_schema(schema: TableSchema) -> Any:
    """What a scan of all columns returns: key columns, columns, derived columns (double)."""
    fields = [pa.field(column.name, arrow_type(column.type)) for column in (*schema.key, *schema.columns)]
    return pa.schema([*fields, *(pa.field(name, pa.float64()) for name, _ in schema.derived)])


def literal(type_: ColumnType, stored: Any) -> Any:
    """A stored value as a typed scalar, for ``kivi.expr.to_arrow``."""
    value = type_.from_stored(stored) if type_.name == "decimal" and stored is not None else stored
    return pa.scalar(value, arrow_type(type_))


def filter_batch(batch: Any, predicate: Expr, types: Mapping[str, ColumnType]) -> Any:
    """The rows of a batch that a bound predicate selects."""
    expression = to_arrow(predicate, lambda column, stored: literal(types[column], stored))
    kept = pa.Table.from_batches([batch]).filter(expression).combine_chunks().to_batches()
    return kept[0] if kept else batch.slice(0, 0)


# -- rows -------------------------------------------------------------------------------------------


def _stored_list(array: Any) -> list[Any]:
    if pa.types.is_timestamp(array.type):
        return array.cast(pa.int64()).to_pylist()  # type: ignore[no-any-return]
    if pa.types.is_decimal(array.type):
        scale = array.type.scale
        return [None if v is None else int(v.scaleb(scale)) for v in array.to_pylist()]
    return array.to_pylist()  # type: ignore[no-any-return]


def stored_rows(batch: Any) -> list[dict[str, Any]]:
    """A small batch as rows in stored form."""
    names = batch.schema.names
    return [dict(zip(names, row, strict=True)) for row in zip(*map(_stored_list, batch.columns), strict=True)]


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


def rows_batch(schema: TableSchema, names: list[str], rows: list[dict[str, Any]]) -> Any:
    """Rows in stored form as a record batch of ``names``. OutOfRange for a sum that does not fit its column."""
    by_name = schema.by_name
    arrays, fields = [], []
    for name in names:
        column = by_name.get(name)
        type_ = column.type if column is not None else ColumnType("float64")
        values = [row[name] for row in rows]
        if column is not None and column.operator is not None:
            _check_sums(column, values)
        if type_.name == "decimal":
            values = [type_.from_stored(value, name) for value in values]
        arrays.append(pa.array(values, arrow_type(type_)))
        fields.append(pa.field(name, arrow_type(type_)))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _check_sums(column: Column, values: list[Any]) -> None:
    if column.type.is_integer:
        low, high = column.type.stored_min, column.type.stored_max
        bad = next((v for v in values if v is not None and not low <= v <= high), None)
    else:
        bad = next((v for v in values if isinstance(v, float) and (v != v or v in (np.inf, -np.inf))), None)
    if bad is not None:
        column.type.from_stored(bad, column.name)
        raise OutOfRange(f"{column.name} does not fit in {column.type}", column=column.name)


# -- events from callers ------------------------------------------------------------------------------


def event_batch(schema: TableSchema, records: Any) -> Any:
    """Dicts, a pyarrow Table or RecordBatch, or a pandas DataFrame as one validated batch of an event table.

    A column that is missing is null; the event time must be there. Raises SchemaError, InvalidArgument.
    """
    if schema.kind != "event":
        raise InvalidArgument(f"{schema.name!r} is a {schema.kind} table: events are appended to event tables")
    if isinstance(records, pa.RecordBatch):
        table = pa.Table.from_batches([records])
    elif isinstance(records, pa.Table):
        table = records
    elif hasattr(records, "columns") and hasattr(records, "to_numpy"):
        table = pa.Table.from_pandas(records, preserve_index=False)
    else:
        return _from_rows(schema, records)
    return _from_table(schema, table)


def _unknown(schema: TableSchema, name: object) -> SchemaError:
    known = ", ".join(column.name for column in schema.columns)
    return SchemaError(f"event table {schema.name!r} has no column {name!r}; it has {known}")


def _from_rows(schema: TableSchema, records: Any) -> Any:
    if isinstance(records, Mapping) or not isinstance(records, Iterable) or isinstance(records, (str, bytes)):
        raise InvalidArgument(f"events are dicts in a list, an Arrow table or a record batch, not {type(records).__name__}")
    rows = list(records)
    names = {column.name for column in schema.columns}
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InvalidArgument(f"event {i} is a {type(row).__name__}, not a dict")
        if not names.issuperset(row):
            raise _unknown(schema, sorted(map(str, set(row) - names))[0])
    arrays = []
    for column in schema.columns:
        to_stored, name = column.type.to_stored, column.name
        values = [to_stored(row.get(name), f"column {name!r} of event {i}") for i, row in enumerate(rows)]
        if name == schema.event_time and None in values:
            raise InvalidArgument(f"event {values.index(None)} has no event time {name!r}")
        if column.type.name == "decimal":
            values = [column.type.from_stored(value) for value in values]
        arrays.append(pa.array(values, arrow_type(column.type)))
    return pa.RecordBatch.from_arrays(arrays, names=[column.name for column in schema.columns])


def _from_table(schema: TableSchema, table: Any) -> Any:
    names = {column.name for column in schema.columns}
    seen = set()
    for name in table.schema.names:
        if name not in names:
            raise _unknown(schema, name)
        if name in seen:
            raise SchemaError(f"the events have the column {name!r} twice")
        seen.add(name)
    arrays = []
    for column in schema.columns:
        if column.name not in seen:
            if column.name == schema.event_time:
                raise InvalidArgument(f"the events have no column {column.name!r}, which is their event time")
            arrays.append(pa.nulls(table.num_rows, arrow_type(column.type)))
            continue
        chunked = table.column(column.name)
        array = chunked.combine_chunks() if chunked.num_chunks != 1 else chunked.chunk(0)
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], chunked.type)
        arrays.append(_converted(column, array))
        if column.name == schema.event_time and arrays[-1].null_count:
            raise InvalidArgument(f"an event has no event time {column.name!r}")
    return pa.RecordBatch.from_arrays(arrays, names=[column.name for column in schema.columns])


def _converted(column: Column, array: Any) -> Any:
    """One column in the table's type. Raises SchemaError for a wrong type, InvalidArgument for a wrong value."""
    target = arrow_type(column.type)
    source = array.type
    what = f"column {column.name!r}"
    try:
        if pa.types.is_dictionary(source):
            array = array.dictionary_decode()
            source = array.type
        if pa.types.is_null(source):
            return pa.nulls(len(array), target)
        if source != target:
            if not _castable(column.type, source):
                raise SchemaError(f"{what} is {source}, which is not a {column.type}")
            if pa.types.is_timestamp(target) and pa.types.is_timestamp(source):
                array = array.cast(pa.timestamp("us", tz=source.tz)).cast(pa.int64()).cast(target)
            else:
                array = array.cast(target)
    except pa.ArrowInvalid as error:
        raise InvalidArgument(f"{what} has a value that is not a {column.type}: {error}") from None
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise SchemaError(f"{what} is {source}, which is not a {column.type}: {error}") from None
    if pa.types.is_floating(target):
        if pc.any(pc.invert(pc.is_finite(array))).as_py():
            raise InvalidArgument(f"{what} has a NaN or an infinity, which are not accepted")
        array = pc.add(array, 0.0)
    elif pa.types.is_string(target):
        try:
            array.validate(full=True)
        except pa.ArrowInvalid:
            raise InvalidArgument(f"{what} is not valid UTF-8") from None
    elif pa.types.is_decimal(target):
        limit = literal(column.type, column.type.stored_max)
        if pc.any(pc.greater(pc.abs(array), limit)).as_py():
            raise InvalidArgument(f"{what} has a value that does not fit in {column.type}")
    return array


def _castable(type_: ColumnType, source: Any) -> bool:
    types = pa.types
    match type_.name:
        case "int64":
            return bool(types.is_integer(source))
        case "float64":
            return bool(types.is_floating(source) or types.is_integer(source))
        case "decimal":
            return bool(types.is_decimal(source) or types.is_integer(source))
        case "timestamp":
            return bool(types.is_timestamp(source) or types.is_int64(source))
        case "string":
            return bool(
                types.is_large_string(source) or types.is_string_view(source)
                or types.is_binary(source) or types.is_large_binary(source)
            )  # fmt: skip
        case "bytes":
            return bool(types.is_large_binary(source) or types.is_binary_view(source) or types.is_fixed_size_binary(source))
    return False


# -- IPC ------------------------------------------------------------------------------------------------


def encode_ipc(batch: Any, compression: str | None = None) -> Any:
    """A record batch or table as an IPC stream, in one buffer."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression) if compression else None
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write(batch)
    return sink.getvalue()


def decode_ipc(data: Any, *, max_bytes: int, max_rows: int) -> Any:
    """An IPC stream from a stranger as a Table.

    Raises ResourceExhausted if it declares more than ``max_rows`` rows or ``max_bytes`` bytes in memory,
    InvalidArgument if it is malformed.
    """
    buffer = pa.py_buffer(data)
    try:
        _check_declared(memoryview(buffer), max_bytes, max_rows)
        table = pa.ipc.open_stream(buffer).read_all()
        table.validate(full=True)
    except KiviError:
        raise
    except (pa.ArrowException, ValueError, struct.error, IndexError, OSError) as error:
        raise InvalidArgument(f"not a valid Arrow IPC stream: {error}") from None
    return table


_SCHEMA, _DICTIONARY, _RECORD = 1, 2, 3


class _Flat:
    """A bounds-checked table of a flatbuffer: struct.error or IndexError for anything out of place."""

    def __init__(self, data: memoryview, at: int) -> None:
        if not 0 <= at <= len(data) - 4:
            raise IndexError("a table lies outside its message")
        self.data, self.at = data, at
        self._vtable = at - struct.unpack_from("<i", data, at)[0]
        if not 0 <= self._vtable <= len(data) - 4:
            raise IndexError("a vtable lies outside its message")
        self._size = struct.unpack_from("<H", data, self._vtable)[0]

    def slot(self, index: int) -> int | None:
        """Where field ``index`` lies, or None if it is left out."""
        entry = 4 + 2 * index
        if entry + 2 > self._size:
            return None
        offset = struct.unpack_from("<H", self.data, self._vtable + entry)[0]
        return self.at + offset if offset else None

    def number(self, index: int, form: str, default: int = 0) -> int:
        at = self.slot(index)
        return default if at is None else int(struct.unpack_from(form, self.data, at)[0])

    def table(self, index: int) -> _Flat | None:
        at = self.slot(index)
        return None if at is None else _Flat(self.data, at + struct.unpack_from("<I", self.data, at)[0])

    def pairs(self, index: int) -> list[tuple[int, int]]:
        """A vector of structs of two int64."""
        at = self.slot(index)
        if at is None:
            return []
        start = at + struct.unpack_from("<I", self.data, at)[0]
        count = struct.unpack_from("<I", self.data, start)[0]
        if start + 4 + 16 * count > len(self.data):
            raise IndexError("a vector lies outside its message")
        numbers = struct.unpack_from(f"<{2 * count}q", self.data, start + 4)
        return list(zip(numbers[::2], numbers[1::2], strict=True))


def _messages(data: memoryview) -> Iterator[tuple[_Flat, memoryview]]:
    """(message table, body) of an encapsulated stream, up to its end mark."""
    at = 0
    while at + 4 <= len(data):
        size = struct.unpack_from("<I", data, at)[0]
        at += 4
        if size == 0xFFFFFFFF:
            size = struct.unpack_from("<I", data, at)[0]
            at += 4
        if size == 0:
            return
        if size > len(data) - at:
            raise IndexError("a message header is cut short")
        head = data[at : at + size]
        message = _Flat(head, struct.unpack_from("<I", head, 0)[0])
        at += size
        length = message.number(3, "<q")
        if not 0 <= length <= len(data) - at:
            raise IndexError("a message body is cut short")
        yield message, data[at : at + length]
        at += length


def _check_declared(data: memoryview, max_bytes: int, max_rows: int) -> None:
    rows = nbytes = 0
    for message, body in _messages(data):
        kind = message.number(1, "<B")
        header = message.table(2)
        if header is None:
            raise IndexError("a message has no header")
        if kind == _SCHEMA:
            continue
        if kind not in (_DICTIONARY, _RECORD):
            raise InvalidArgument(f"not a valid Arrow IPC stream: message kind {kind} is not accepted")
        batch = header if kind == _RECORD else header.table(1)
        if batch is None:
            raise IndexError("a dictionary has no data")
        length = batch.number(0, "<q")
        if length < 0 or any(node[0] < 0 or node[0] > max(length, max_rows) for node in batch.pairs(1)):
            raise IndexError("a column declares a length that its batch does not have")
        rows += length
        compressed = batch.table(3) is not None
        for offset, size in batch.pairs(2):
            if offset < 0 or size < 0 or offset + size > len(body):
                raise IndexError("a buffer lies outside its message")
            plain = size
            if compressed and size >= 8:
                declared = struct.unpack_from("<q", body, offset)[0]
                plain = size if declared == -1 else declared
                if plain < 0:
                    raise IndexError("a compressed buffer declares a negative size")
            nbytes += plain
        if rows > max_rows:
            raise ResourceExhausted(f"the events declare {rows} rows, over the limit of {max_rows}: send less at a time")
        if nbytes > max_bytes:
            raise ResourceExhausted(f"the events declare {nbytes} bytes, over the limit of {max_bytes}: send less at a time")
