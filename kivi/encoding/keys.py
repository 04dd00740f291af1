"""The bytes of a row key: values one after the other, so that comparing bytes is comparing values.

Each value is written so that comparing bytes (memcmp) is comparing values, and so that no encoded value is the
beginning of another one::

    type                  bytes              how
    bool                  1                  0x00 false, 0x01 true
    int64                 8                  big endian, sign bit flipped
    decimal(p, s)         8                  the unscaled integer, as int64
    timestamp             8                  microseconds since 1970, as int64
    float64               8                  big endian IEEE 754; sign bit flipped if it was clear, all
                                             bits flipped if it was set; -0.0 is written as 0.0
    string, bytes         length + 2 + z     UTF-8 or bytes; each of the z bytes 0x00 becomes 0x00 0xFF;
                                             then 0x00 0x00. So "a" < "a\\0" < "ab", as it must be

From the two properties follows what the rest of the store relies on:

* the order of keys is the order of their values, column by column;
* the encoding of the first values of a key is a byte prefix of exactly the keys that begin with those
  values, so every prefix of the key columns can be scanned: ``[p, prefix_end(p))``;
* full keys of one table are prefix-free, so something may be appended to one (a version's timestamp)
  without disturbing the order.

An encoded key has at most 64 KiB. ``encode_key`` works on one key, ``encode_key_columns`` on whole Arrow
columns, without a Python statement per row; both give the same bytes. ``decode_key`` and ``decode_key_columns`` are
the ways back. Bytes that no key of these types
can have are DataLoss. What stands before a row key, and what other keys there are: ``kivi.encoding.keyspaces``.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.columns import arrow_from_stored, arrow_type, flat, stored_array
from kivi.errors import DataLoss, InvalidArgument, ResourceExhausted
from kivi.model.types import ColumnType

__all__ = [
    "KEY_BYTES_MAX",
    "decode_key",
    "decode_key_columns",
    "encode_few_keys",
    "encode_key",
    "encode_key_columns",
    "encode_text",
    "key_width",
    "large_binary",
    "parts_of",
    "prefix_end",
]

KEY_BYTES_MAX: Final = 64 * 1024
"""Published limit: bytes of one encoded key."""
FEW_ROWS: Final = 16
"""So many keys are written one by one in less time than in columns: of five columns 6 us of one and 31 of 16, or 93."""

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

_SIGN: Final = 1 << 63
_MASK64: Final = 2**64 - 1
_F64: Final = struct.Struct(">d")
_U64: Final = struct.Struct(">Q")
_END: Final = b"\x00\x00"
_ZERO: Final = b"\x00"
_ESCAPED_ZERO: Final = b"\x00\xff"


# -- one value ------------------------------------------------------------------------------------


def _encode_bool(value: Any) -> bytes:
    return b"\x01" if value else b"\x00"


def _decode_bool(data: bytes, at: int) -> tuple[Any, int]:
    if data[at] > 1:
        raise ValueError(f"{data[at]:#04x} is not a bool")
    return data[at] == 1, at + 1


def _encode_int(value: Any) -> bytes:
    return (value + _SIGN).to_bytes(8, "big")  # type: ignore[no-any-return]


def _decode_int(data: bytes, at: int) -> tuple[Any, int]:
    return _U64.unpack_from(data, at)[0] - _SIGN, at + 8


def _encode_float(value: Any) -> bytes:
    bits = int.from_bytes(_F64.pack(value + 0.0), "big")  # -0.0 + 0.0 is 0.0
    return (bits ^ (_MASK64 if bits & _SIGN else _SIGN)).to_bytes(8, "big")


def _decode_float(data: bytes, at: int) -> tuple[Any, int]:
    bits = _U64.unpack_from(data, at)[0]
    return _F64.unpack(_U64.pack(bits ^ (_SIGN if bits & _SIGN else _MASK64)))[0], at + 8


def _encode_bytes(value: Any) -> bytes:
    return value.replace(_ZERO, _ESCAPED_ZERO) + _END  # type: ignore[no-any-return]


def _decode_bytes(data: bytes, at: int) -> tuple[Any, int]:
    end = data.index(_END, at)  # inside a value 0x00 is followed by 0xFF, so the first 0x00 0x00 is the end
    return data[at:end].replace(_ESCAPED_ZERO, _ZERO), end + 2


def encode_text(value: Any) -> bytes:
    """Text as a part of a key: escaped and terminated."""
    return _encode_bytes(value.encode())


def _decode_string(data: bytes, at: int) -> tuple[Any, int]:
    value, at = _decode_bytes(data, at)
    return value.decode(), at


# -- one column of fixed width --------------------------------------------------------------------


def _ints_to_bytes(values: npt.NDArray[Any]) -> Bytes:
    flipped = values.astype(np.int64, copy=False).view(np.uint64) ^ np.uint64(_SIGN)
    return flipped.astype(">u8").view(np.uint8).reshape(-1, 8)


def _floats_to_bytes(values: npt.NDArray[Any]) -> Bytes:
    bits = (values + 0.0).view(np.uint64)
    flip = np.where(bits >> np.uint64(63), np.uint64(_MASK64), np.uint64(_SIGN))
    return (bits ^ flip).astype(">u8").view(np.uint8).reshape(-1, 8)


def _bools_to_bytes(values: npt.NDArray[Any]) -> Bytes:
    return values.astype(np.uint8).reshape(-1, 1)


def _bytes_to_ints(matrix: Bytes) -> npt.NDArray[Any]:
    return (_bits(matrix) ^ np.uint64(_SIGN)).view(np.int64)


def _bytes_to_floats(matrix: Bytes) -> npt.NDArray[Any]:
    bits = _bits(matrix)
    return (bits ^ np.where(bits >> np.uint64(63), np.uint64(_SIGN), np.uint64(_MASK64))).view(np.float64)


def _bytes_to_bools(matrix: Bytes) -> npt.NDArray[Any]:
    values = matrix[:, 0]
    if (values > 1).any():
        raise ValueError("a bool is neither 0x00 nor 0x01")
    return values.astype(np.bool_)


def _bits(matrix: Bytes) -> npt.NDArray[np.uint64]:
    bits: npt.NDArray[np.uint64] = matrix.view(">u8")[:, 0].astype(np.uint64)  # its last axis is contiguous
    return bits


@dataclass(frozen=True, slots=True)
class _Codec:
    """How one column type is written: one value at a time and, if its width is fixed, a column at a time."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes, int], tuple[Any, int]]
    width: int  # 0: escaped and terminated
    to_bytes: Callable[[npt.NDArray[Any]], Bytes] = _ints_to_bytes
    from_bytes: Callable[[Bytes], npt.NDArray[Any]] = _bytes_to_ints  # a matrix of ``width`` bytes a row


_INT: Final = _Codec(_encode_int, _decode_int, 8)
_CODECS: Final[dict[str, _Codec]] = {
    "bool": _Codec(_encode_bool, _decode_bool, 1, _bools_to_bytes, _bytes_to_bools),
    "int64": _INT,
    "decimal": _INT,
    "timestamp": _INT,
    "float64": _Codec(_encode_float, _decode_float, 8, _floats_to_bytes, _bytes_to_floats),
    "string": _Codec(encode_text, _decode_string, 0),
    "bytes": _Codec(_encode_bytes, _decode_bytes, 0),
}


# -- one key --------------------------------------------------------------------------------------


def encode_key(types: Sequence[ColumnType], values: Sequence[Any]) -> bytes:
    """Stored-form values -> bytes. Fewer values than types give the prefix of all keys that begin with them.

    Raises InvalidArgument for a null and for too many values, ResourceExhausted beyond ``KEY_BYTES_MAX``.
    """
    if len(values) > len(types):
        raise InvalidArgument(f"a key of {len(types)} columns cannot have {len(values)} values")
    parts = []
    for type_, value in zip(types, values, strict=False):
        if value is None:
            raise InvalidArgument("a null key: every key column needs a value")
        parts.append(_CODECS[type_.name].encode(value))
    key = b"".join(parts)
    if len(key) > KEY_BYTES_MAX:
        raise _too_long(len(key))
    return key


def key_encoder(types: Sequence[ColumnType]) -> Callable[[Sequence[Any]], bytes]:
    """``encode_key`` for many keys of these types, all values of which are there and none is null."""
    encoders = [_CODECS[type_.name].encode for type_ in types]

    def encode(values: Sequence[Any]) -> bytes:
        key = b"".join([part(value) for part, value in zip(encoders, values, strict=True)])
        if len(key) > KEY_BYTES_MAX:
            raise _too_long(len(key))
        return key

    return encode


def decode_key(types: Sequence[ColumnType], data: bytes) -> tuple[Any, ...]:
    """The stored-form values of a full key of these types. Raises DataLoss for bytes that are none."""
    values = []
    at = 0
    try:
        for type_ in types:
            value, at = _CODECS[type_.name].decode(data, at)
            values.append(value)
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes are left over")
    except (ValueError, IndexError, struct.error) as error:
        raise _damaged(error) from None
    return tuple(values)


def key_decoder(types: Sequence[ColumnType]) -> Callable[[bytes], Sequence[Any]]:
    """``decode_key`` for many keys of these types; those of integers are one step."""
    if any(_CODECS[type_.name] is not _INT for type_ in types):
        return functools.partial(decode_key, types)
    unpack = struct.Struct(f">{len(types)}Q").unpack

    def decode(data: bytes) -> Sequence[Any]:
        try:
            return [part - _SIGN for part in unpack(data)]
        except struct.error as error:
            raise _damaged(error) from None

    return decode


def key_width(types: Sequence[ColumnType]) -> int | None:
    """Bytes of every full key of these types, None if keys differ in length."""
    widths = [_CODECS[type_.name].width for type_ in types]
    return sum(widths) if all(widths) else None


def prefix_end(prefix: bytes) -> bytes | None:
    """The smallest byte string greater than everything that begins with ``prefix``; None if there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


def _too_long(length: int) -> ResourceExhausted:
    return ResourceExhausted(
        f"a key of {length} bytes is beyond the limit key_bytes_max = {KEY_BYTES_MAX} when encoded: use a shorter one",
        limit="key_bytes_max",
        maximum=KEY_BYTES_MAX,
    )


def _damaged(error: object) -> DataLoss:
    return DataLoss(f"a stored key does not fit its table ({error}): run kivi verify")


# -- columns of keys ------------------------------------------------------------------------------


def encode_few_keys(types: Sequence[ColumnType], columns: Sequence[Any]) -> list[bytes]:
    """``encode_key`` of a few rows, one by one. Columns are of Arrow, or stored-form values in a list or of NumPy, and
    without nulls."""
    stored = [_listed(type_, column) for type_, column in zip(types, columns, strict=False)]
    return [*map(key_encoder(types[: len(stored)]), zip(*stored, strict=True))]


def encode_key_columns(types: Sequence[ColumnType], arrays: Sequence[Any], after: Any = None) -> pa.LargeBinaryArray:
    """``encode_key`` of every row of Arrow columns, at once. Chunked, sliced and dictionary arrays are fine.

    ``after``: each row's key begins with this, the same of the columns that come before these.

    Neighbouring columns of fixed width become one byte matrix; strings are joined by an Arrow kernel, and
    escaped only if there is a zero byte among them. Text in codes is of fixed width where all of its values are as long
    ("server-017"). What that saves: decision 0026. A few rows are written one by one, which takes a tenth of the calls.
    """
    arrays = [array if _is_few(array) else flat(array) for array in arrays]
    if any(array.null_count for array in arrays):
        raise InvalidArgument("a null key: every key column needs a value")
    rows = len(arrays[0]) if arrays else 0
    if 0 < rows <= FEW_ROWS and after is None:
        return pa.array(encode_few_keys(types, arrays), pa.large_binary())
    parts: list[Any] = [] if after is None else [after]
    fixed: list[Bytes] = []
    for type_, array in zip(types, arrays, strict=False):
        codec = _CODECS[type_.name]
        if codec.width:
            fixed.append(codec.to_bytes(stored_array(type_, flat(array))))
            continue
        if (text := _of_one_width(array)) is not None:
            fixed.append(text)
            continue
        if fixed:
            parts.append(_from_matrix(fixed))
            fixed = []
        parts += [_escaped(flat(array)), pa.scalar(_END, pa.large_binary())]
    if fixed:
        if rows and after is not None and len(parts) == 1 and (before := _matrix(after)) is not None:
            parts, fixed = [], [before, *fixed]
        parts.append(_from_matrix(fixed))
    if not rows or not parts:
        return pa.array([b""] * rows, pa.large_binary())
    nothing_between = pa.scalar(b"", pa.large_binary())
    keys = parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, nothing_between)
    longest = int(np.diff(_offsets(keys)).max())
    if longest > KEY_BYTES_MAX:
        raise _too_long(longest)
    return keys


def decode_key_columns(types: Sequence[ColumnType], keys: pa.LargeBinaryArray) -> list[Any]:
    """``decode_key`` of many full keys at once: one Arrow array per type, as ``arrow_type`` has it. Raises DataLoss.

    Keys of fixed width are a byte matrix; of others each column begins where the one before it ended, and text ends at
    the first 0x00 0x00 (decision 0026).
    """
    try:
        return _decoded(types, keys)
    except (ValueError, pa.ArrowException) as error:
        raise _damaged(str(error).split("\n")[0]) from None


def _decoded(types: Sequence[ColumnType], keys: Any) -> list[Any]:
    rows = len(keys)
    if not rows:
        return [pa.array([], arrow_type(type_)) for type_ in types]
    offsets, data = _offsets(keys), _data(keys)
    at, ends = offsets[:-1], offsets[1:]
    matrix = None  # as long as all keys are of one width and columns of fixed width were read, what is left of them
    width = int(ends[0] - at[0])
    if (np.diff(offsets) == width).all():
        matrix = data[offsets[0] : offsets[-1]].reshape(rows, width)
    arrays = []
    ends_of_text: Offsets | None = None
    for type_ in types:
        codec = _CODECS[type_.name]
        if not codec.width:
            if ends_of_text is None:
                zero = data[: offsets[-1]] == 0
                ends_of_text = np.flatnonzero(zero[:-1] & zero[1:])
            array, at = _text(type_, keys, at, ends, ends_of_text)
            matrix = None
        else:
            if matrix is not None:
                part, matrix = matrix[:, : codec.width], matrix[:, codec.width :]
                if part.shape[1] < codec.width:
                    raise ValueError("cut short")
            else:
                if (at + codec.width > ends).any():
                    raise ValueError("cut short")
                part = data[at[:, None] + np.arange(codec.width)]
            array = arrow_from_stored(type_, codec.from_bytes(part))
            at = at + codec.width
        arrays.append(array)
    if (at != ends).any():
        raise ValueError("bytes are left over")
    return arrays


def _text(type_: ColumnType, keys: Any, at: Offsets, ends: Offsets, ends_of_text: Offsets) -> tuple[Any, Offsets]:
    """One column of strings or bytes that begin at ``at``, and where the next column begins."""
    found = np.searchsorted(ends_of_text, at)
    if len(found) and found[-1] == len(ends_of_text):
        raise ValueError("a text has no end")
    stops = ends_of_text[found]
    if (stops + 2 > ends).any():
        raise ValueError("a text has no end")
    # Arrow gathers them: as every other element of an array whose elements are the texts and what lies between.
    bounds = np.empty(2 * len(at) + 1, np.int64)
    bounds[:-1:2], bounds[1::2], bounds[-1] = at, stops, stops[-1]
    both = pa.Array.from_buffers(pa.large_binary(), 2 * len(at), [None, pa.py_buffer(bounds), keys.buffers()[2]])
    texts = both.take(pa.array(np.arange(0, 2 * len(at), 2)))
    if np.count_nonzero(_data(texts)) < int(_offsets(texts)[-1]):
        texts = pc.replace_substring(texts, _ESCAPED_ZERO, _ZERO)
    return texts.cast(arrow_type(type_)), stops + 2


def _listed(type_: ColumnType, array: Any) -> list[Any]:
    """The stored-form values of a column without nulls."""
    if isinstance(array, list):
        return array
    if not isinstance(array, np.ndarray):
        array = stored_array(type_, array) if _CODECS[type_.name].width else flat(array)
    values: list[Any] = array.tolist()
    return values


def _is_few(array: Any) -> bool:
    """Whether it is in codes, of fewer values than it has rows."""
    return (
        isinstance(array, pa.DictionaryArray)
        and 0 < len(array.dictionary) < len(array)
        and not array.dictionary.null_count
    )


def _of_one_width(array: Any) -> Bytes | None:
    """The encoded texts of a column in codes as a byte matrix, if all of its values are as long."""
    if not isinstance(array, pa.DictionaryArray):
        return None
    values = _matrix(_escaped(array.dictionary))
    if values is None:
        return None
    ended = np.zeros((len(values), values.shape[1] + len(_END)), np.uint8)
    ended[:, : -len(_END)] = values
    gathered: Bytes = np.take(ended, array.indices.to_numpy(), axis=0)
    return gathered


def _matrix(array: Any) -> Bytes | None:
    """A large_binary array of at least one row as a byte matrix, if all its values are of one length."""
    offsets = _offsets(array)
    width = int(offsets[1] - offsets[0])
    if (np.diff(offsets) != width).any():
        return None
    return _data(array)[offsets[0] : offsets[-1]].reshape(len(array), width)


def _from_matrix(columns: Sequence[Bytes]) -> Any:
    """Byte matrices side by side -> one binary value per row."""
    rows, widths = len(columns[0]), [column.shape[1] for column in columns]
    width = sum(widths)
    if len(columns) == 1:
        matrix: Any = np.ascontiguousarray(columns[0])
    else:  # as fields of records, which are copied whole
        matrix = np.empty(rows, [(str(i), f"V{each}") for i, each in enumerate(widths)])
        for i, (column, each) in enumerate(zip(columns, widths, strict=True)):
            matrix[str(i)] = np.ascontiguousarray(column).view(f"V{each}").reshape(rows)
    offsets = np.arange(0, (rows + 1) * width, width, dtype=np.int64)
    return large_binary(offsets, matrix.view(np.uint8))


def large_binary(offsets: Offsets, data: npt.NDArray[Any]) -> Any:
    """A LargeBinaryArray of these buffers."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def _escaped(array: Any) -> Any:
    array = array.cast(pa.large_binary())
    offsets = _offsets(array)
    used = _data(array)[offsets[0] : offsets[-1]]
    if np.count_nonzero(used) == len(used):
        return array
    return pc.replace_substring(array, _ZERO, _ESCAPED_ZERO)


def parts_of(keys: pa.LargeBinaryArray) -> tuple[Offsets, Bytes]:
    """Where each of at least one key begins, and the last one ends, in the bytes; and these."""
    return _offsets(keys), _data(keys)


def _offsets(array: Any) -> Offsets:
    """Offsets of a large_binary array with at least one row, slicing allowed for."""
    return np.frombuffer(array.buffers()[1], np.int64, len(array) + 1, 8 * array.offset)


def _data(array: Any) -> Bytes:
    buffer = array.buffers()[2]
    return np.frombuffer(buffer, np.uint8) if buffer is not None and buffer.size else np.zeros(0, np.uint8)
