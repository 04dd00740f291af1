"""Arrow IPC streams: written for whoever asks, and read from whoever sends.

From a stranger nothing is believed (``decode_ipc``): some hundred bytes can declare gigabytes, and some invalid
columns pass every validation and crash the process later (decision 0025). So the metadata of every message is read
first, by the bounds-checked reader below, and what it declares is added up against the caller's limits; types are held
to a short list; only then does Arrow decode, and ``validate(full=True)`` runs before anybody looks at a value.
What was read is encoded anew for the log, and again for a block: at most a twentieth of an append (decision 0033).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.columns import FAILURES, is_sane, reason
from kivi.errors import InvalidArgument, KiviError, ResourceExhausted

__all__ = ["PARALLEL_BYTES", "decode_ipc", "encode_ipc", "own_batches"]

_is = pa.types


def encode_ipc(batch: Any, compression: str | None = None) -> Any:
    """A RecordBatch or Table as an Arrow IPC stream (a pa.Buffer). ``compression``: None, "lz4" or "zstd"."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write(batch)
    return sink.getvalue()


PARALLEL_BYTES: Final = 1 << 20
"""A stream of fewer bytes is read by the thread that asks: to hand its columns to others takes longer. (On two busy
cores a compressed one of 1 kB took 123 us by itself and 313 by several threads, of 565 kB 1.6 ms and 5.3, of 3.7 MB
39 ms and 28.)
"""


def own_batches(data: Any) -> list[Any]:
    """The events in a stream that the store itself wrote: one RecordBatch, or none. Not for a stranger's bytes.

    Refers to ``data``; a buffer that lies there at an odd address is copied, since Arrow's kernels may crash on it.
    """
    buffer = pa.py_buffer(data)
    options = pa.ipc.IpcReadOptions(
        ensure_alignment=pa.ipc.Alignment.DataTypeSpecific, use_threads=buffer.size >= PARALLEL_BYTES
    )
    with pa.ipc.open_stream(buffer, options=options) as reader:
        table = reader.read_all()
    return table.combine_chunks().to_batches() if table.num_rows else []


def decode_ipc(data: Any, *, max_bytes: int, max_rows: int, codes: bool = False) -> Any:
    """A pa.Table from an Arrow IPC stream that a stranger sent.

    Raises ResourceExhausted for a stream beyond a limit, InvalidArgument for one that is not valid, and nothing else.

    ``max_bytes`` limits what the stream expands to (buffers after decompression, dictionaries written out, and
    ``_NODE_BYTES`` for each array), ``max_rows`` its rows. Columns must be flat: bool, numbers, decimals, text,
    bytes, timestamps, null, and dictionaries of them, which come back written out; with ``codes`` those of text stay.
    Streams only, as written since Arrow 0.15, with their end marker: one that was cut off between two batches is
    refused, not read in part.

    The table refers to ``data`` where it can, so ``data`` must not change while the table is used.
    """
    view = memoryview(data).cast("B") if not isinstance(data, memoryview) else data.cast("B")
    try:
        _survey(view, max_bytes, max_rows)
        return _decoded(view, max_bytes, codes)
    except KiviError:
        raise
    except (*FAILURES, struct.error, IndexError) as error:
        raise _not_a_stream(reason(error)) from None


def _not_a_stream(reason: str) -> InvalidArgument:
    return InvalidArgument(f"not a valid Arrow IPC stream: {reason}")


def _too_much(what: str, found: int, limit: int) -> ResourceExhausted:
    return ResourceExhausted(
        f"this Arrow stream holds {found} {what}, more than the limit of {limit}: send less at a time", limit=limit
    )


_MAX_COLUMNS: Final = 4_096
_NODE_BYTES: Final = 128
"""Memory that an array costs whatever it holds; it is charged, so that a million empty ones are not free."""
_WIDEST: Final = 32
"""Bytes of the widest number, a decimal256."""


def _decoded(view: memoryview, max_bytes: int, codes: bool) -> Any:
    options = pa.ipc.IpcReadOptions(use_threads=False)
    with pa.ipc.open_stream(pa.py_buffer(view), options=options) as reader:
        if len(reader.schema) > _MAX_COLUMNS:
            raise _too_much("columns", len(reader.schema), _MAX_COLUMNS)
        for field in reader.schema:
            if not _is_flat(field.type):
                raise InvalidArgument(f"column {field.name!r} of this Arrow stream is {field.type}: use a plain type")
        table = reader.read_all()
    table.validate(full=True)
    return _written_out(table, max_bytes, codes)


def _is_flat(type_: Any) -> bool:
    if _is.is_dictionary(type_):
        return not _is.is_dictionary(type_.value_type) and _is_flat(type_.value_type)
    return bool(
        _is.is_boolean(type_)
        or _is.is_integer(type_)
        or _is.is_floating(type_)
        or (_is.is_decimal(type_) and is_sane(type_))
        or _is.is_string(type_)
        or _is.is_large_string(type_)
        or _is.is_binary(type_)
        or _is.is_large_binary(type_)
        or (_is.is_fixed_size_binary(type_) and type_.byte_width > 0)
        or _is.is_timestamp(type_)
        or _is.is_null(type_)
    ) and not isinstance(type_, pa.BaseExtensionType)


def _written_out(table: Any, max_bytes: int, codes: bool) -> Any:
    """Dictionaries replaced by their values, once it is known how much that will be. ``codes``: but not text."""
    dictionaries = [(i, field) for i, field in enumerate(table.schema) if _is.is_dictionary(field.type)]
    total = table.nbytes if dictionaries else 0  # which takes 20 us to add up, a quarter of what one event takes here
    for i, field in dictionaries:
        for chunk in table.column(i).chunks:
            total += _written_bytes(chunk)
            if total > max_bytes:
                raise _too_much("bytes with its dictionaries written out", total, max_bytes)
        if codes and (_is.is_string(field.type.value_type) or _is.is_binary(field.type.value_type)):
            continue
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


# -- what the messages of a stream declare
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
        """The place of the field, or 0."""
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
    """The sums of what messages declared so far, against the limits."""

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
