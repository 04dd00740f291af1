"""Coded columns: text that repeats, as the numbers of its distinct values (Arrow's dictionaries).

Services, servers and customers are named in every event, and are few. A batch of events may have such a column in
codes, from where it was appended to the block that it ends in: in a commit's record, in a stage and in pending, where
it takes a byte or two for each event instead of ten or twenty. Whoever derives from it groups by codes; whoever reads
its values asks for ``plain``.

What it saves of time and bytes: decision 0015.

Invariant of a coded column: its values are text or bytes, distinct, and none is null; codes are signed integers of the
narrowest width that holds them; a null is a null among the codes. Two batches of one table may differ in which columns
are coded, and in how: ``together`` makes one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = [
    "ROWS_MIN",
    "as_coded",
    "chunks",
    "coded",
    "compact",
    "gathered",
    "held_bytes",
    "is_coded",
    "narrowed",
    "plain",
    "settled",
    "together",
    "written_bytes",
]

ROWS_MIN: Final = 1_024
"""Fewer events are not worth a dictionary in each batch."""
_MANY: Final = 256
_SMALL_BYTES: Final = 64 << 10
_LITTLE_BYTES: Final = 4 << 10
"""No more than what a batch of one event takes besides its values."""
_REPEATS_MIN: Final = 4
_SOON: Final = 32
"""Most names have been met after so many events for each."""
_LOOKED_AT: Final = 1_024
_DISTINCT_MAX: Final = 0.95
"""Of a thousand values that are a tenth of a hundred thousand events' so many are different."""
_WIDTHS: Final = ((2**7, pa.int8()), (2**15, pa.int16()), (2**31, pa.int32()))


_EMPTY: Final[tuple[tuple[Any, Any], ...]] = (
    (lambda type_: _is_text(type_), b""),
    (pa.types.is_decimal, Decimal(0)),
    (pa.types.is_boolean, False),
)


def is_coded(array: Any) -> bool:
    """Of a column, or of a field of a schema."""
    return bool(pa.types.is_dictionary(array.type))


def coded(batch: Any) -> Any:
    """A RecordBatch with those columns in codes whose values come four times each, or more often."""
    if batch.num_rows < ROWS_MIN or not any(_is_text(column.type) for column in batch.columns):
        return batch
    return _of([_coded(column) if _is_text(column.type) else column for column in batch.columns], batch)


def plain(batch: Any) -> Any:
    """A RecordBatch with all values written out: the types of ``kivi.arrow.columns.arrow_schema``."""
    if not any(is_coded(column) for column in batch.columns):
        return batch
    return _of([column.dictionary_decode() if is_coded(column) else column for column in batch.columns], batch)


def narrowed(batch: Any) -> Any:
    """A RecordBatch whose coded columns have codes of as few bytes as they can."""
    if not any(is_coded(column) for column in batch.columns):
        return batch
    return _of([_narrow(column) if is_coded(column) else column for column in batch.columns], batch)


def together(batches: Sequence[Any]) -> Any:
    """Batches of one table as one RecordBatch, one after the other. At least one."""
    if len(batches) == 1:
        return batches[0]
    schema = batches[0].schema
    if not any(map(is_coded, schema)) and all(batch.schema.equals(schema) for batch in batches):
        return pa.concat_batches(batches)  # in a seventh of the time, where they are of one event each
    columns = [_joined([batch.column(i) for batch in batches]) for i in range(batches[0].num_columns)]
    return _of(columns, batches[0])


def compact(batches: list[Any]) -> None:
    """Joins the small ones at the end of the list now and then: a batch of one event takes some kilobytes."""
    if len(batches) % _MANY:
        return
    first = len(batches)
    while first and batches[first - 1].num_rows < ROWS_MIN and batches[first - 1].nbytes < _SMALL_BYTES:
        first -= 1
    if len(batches) - first >= _MANY:
        batches[first:] = [together(batches[first:])]


def chunks(batches: Iterable[Any], rows: int) -> Iterator[Any]:
    """The same events in chunks of ``rows`` each, but the last.

    Deriving has a price per call, and commits may be small.
    """
    held: list[Any] = []
    missing = rows
    for batch in batches:
        at = 0
        while at < batch.num_rows:
            held.append(batch.slice(at, missing))
            at += held[-1].num_rows
            missing -= held[-1].num_rows
            if not missing:
                yield together(held)
                held, missing = [], rows
    if held:
        yield together(held)


def gathered(batches: Iterable[Any], rows: int) -> Iterator[Any]:
    """Small batches of one table together: each has ``rows`` rows or more, but the last."""
    held: list[Any] = []
    count = 0
    for batch in batches:
        held.append(batch)
        count += batch.num_rows
        if count >= rows:
            yield together(held)
            held, count = [], 0
    if held:
        yield together(held)


def as_coded(array: Any) -> Any:
    """A stranger's dictionary array, validated, as a coded column; None if it is none, or would not pay.

    It is what ``coded`` makes of its values: events are the same events however they were encoded (R16).
    """
    values, codes = array.dictionary, array.indices
    rows, count = len(array), len(values)
    if rows < ROWS_MIN or not _is_text(values.type) or count > rows:
        return None
    if values.null_count or len(values.unique()) < count or _is_varied(codes):
        return None
    met = _met(codes.slice(0, _SOON * count))
    if len(met) < count:
        met = _met(codes)
    if len(met) * _REPEATS_MIN > rows:
        return None
    if len(met) < count or (np.diff(met) < 0).any():
        place = np.zeros(max(count, 1), _width(len(met)).to_pandas_dtype())
        place[met] = np.arange(len(met))
        if codes.null_count:
            codes = pa.array(place[codes.fill_null(0).to_numpy()], mask=codes.is_null().to_numpy(zero_copy_only=False))
        else:
            codes = pa.array(place[codes.to_numpy()])
        values = values.take(pa.array(met))
    return _narrow(pa.DictionaryArray.from_arrays(settled(codes), values))


def _met(codes: Any) -> Any:
    """Each code, in the order in which they are met."""
    return codes.unique().drop_null().to_numpy()


def settled(array: Any) -> Any:
    """The same values, with nothing under its nulls: equal columns are equal bytes."""
    if not array.null_count or pa.types.is_null(array.type):
        return array
    empty = next((value for is_one, value in _EMPTY if is_one(array.type)), 0)
    filled = array.fill_null(pa.scalar(empty, array.type))  # made anew, from its first bit on
    valid = pc.and_(array.is_valid(), pa.scalar(True))  # and so is this
    return pa.Array.from_buffers(array.type, len(array), [valid.buffers()[1], *filled.buffers()[1:]])


def written_bytes(array: Any) -> int:
    """About what a column takes written out."""
    if not is_coded(array):
        return int(array.nbytes)
    counts = np.bincount(array.indices.drop_null().to_numpy(), minlength=len(array.dictionary))
    lengths = pc.binary_length(array.dictionary).to_numpy()
    return int(counts @ lengths) + 4 * len(array)


def held_bytes(batch: Any) -> int:
    """About the memory that a batch takes. A little one counts with all that it is cut from, which Arrow tells at once:
    to add up what each column refers to takes 40 times as long, and lets others have the interpreter meanwhile."""
    whole: int = batch.get_total_buffer_size()
    return whole if whole <= _LITTLE_BYTES else int(batch.nbytes)


def _is_text(type_: Any) -> bool:
    return bool(type_ in (pa.string(), pa.binary()))


def _of(columns: list[Any], like: Any) -> Any:
    """With the fields of ``like``, whose metadata say which columns are states."""
    fields = [field.with_type(column.type) for field, column in zip(like.schema, columns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _is_varied(column: Any) -> bool:
    look = column.slice(0, _LOOKED_AT)
    return bool(pc.count_distinct(look).as_py() > _DISTINCT_MAX * len(look))


def _coded(column: Any) -> Any:
    if _is_varied(column):
        return column
    found = column.dictionary_encode()
    return column if len(found.dictionary) * _REPEATS_MIN > len(column) else _narrow(found)


def _width(count: int) -> Any:
    return next(type_ for beyond, type_ in _WIDTHS if count <= beyond)


def _narrow(array: Any) -> Any:
    width = _width(len(array.dictionary))
    if array.indices.type == width:
        return array
    return pa.DictionaryArray.from_arrays(array.indices.cast(width), array.dictionary)


def _joined(columns: list[Any]) -> Any:
    if not all(is_coded(column) for column in columns):
        columns = [column.dictionary_decode() if is_coded(column) else column for column in columns]
        return pa.concat_arrays(columns)
    wide = [pa.DictionaryArray.from_arrays(column.indices.cast(pa.int32()), column.dictionary) for column in columns]
    return _narrow(pa.concat_arrays(wide))
