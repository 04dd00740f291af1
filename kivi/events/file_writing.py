"""Settled files, written: how each column is encoded, and what the manifest has of each row group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kivi.arrow.columns import stored_array
from kivi.events.blocks import NUMERIC, statistics
from kivi.events.settled_files import GROUP_ROWS, Chunk, Group, SettledFile, file_names
from kivi.model.declarations import INDEXED
from kivi.model.schema import TableSchema
from kivi.runtime.checksum import crc32

__all__ = ["write_file"]

_BOUND_MAX: Final = 64
"""Text of so many characters is kept as a bound."""
_UNLIKE: Final = 0.9
"""Integers of which this part differs from all others are looked for by their value; others are measured."""
_FALSE_POSITIVES: Final = 0.01
_SAMPLE: Final = 16_384
_DISTINCT_MAX: Final = 2_048
"""Of so many values at most among a sample's, a column is written as a dictionary."""


def write_file(schema: TableSchema, number: int, events: Any, stamps: Any, positions: Any) -> tuple[Any, SettledFile]:
    """The bytes of a file, and its manifest row. ``events``: a batch with the table's columns, in the order of event
    time, then of their names."""
    columns = [*events.columns, pa.array(stamps.astype(np.int64)), pa.array(positions.astype(np.int32))]
    fields = [  # of a column without nulls nothing says where they are, which halves the time that it takes to decode
        pa.field(name, column.type, nullable=column.null_count > 0)
        for name, column in zip(file_names(schema.columns), columns, strict=True)
    ]
    table = pa.Table.from_arrays(columns, schema=pa.schema(fields))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=GROUP_ROWS, write_page_index=True, **_encodings(schema, table))
    data = sink.getvalue()
    footer = pq.read_metadata(pa.BufferReader(data))
    groups, beyond, start = [], 4, 0
    for index in range(footer.num_row_groups):
        written = [footer.row_group(index).column(i) for i in range(table.num_columns)]
        chunks = tuple(_chunk(data, column) for column in written)
        filters = {
            i: _checked(data, column.bloom_filter_offset, column.bloom_filter_length)
            for i, column in enumerate(written)
            if column.bloom_filter_offset is not None
        }
        beyond = max(beyond, *(at + size for at, size, _ in (*chunks, *filters.values())))
        rows = footer.row_group(index).num_rows
        group = _group(schema, events.slice(start, rows), start, stamps, positions, chunks, filters)
        group.columns.update(_text_bounds(schema, written))
        groups.append(group)
        start += rows
    tail = beyond, data.size - beyond, crc32(memoryview(data)[beyond:])
    return data, SettledFile(
        number, events.num_rows, data.size, events.nbytes, len(schema.columns), tail, tuple(groups)
    )


def _text_bounds(schema: TableSchema, written: Sequence[Any]) -> dict[str, tuple[Any, Any, int, int | None]]:
    """Of the columns of short text."""
    found: dict[str, tuple[Any, Any, int, int | None]] = {}
    for column, chunk in zip(schema.columns, written, strict=False):
        if column.type.name == "string" and (of := chunk.statistics) is not None and of.has_null_count:
            if of.null_count == chunk.num_values:
                found[column.name] = None, None, 0, None
            elif of.has_min_max and len(of.min) <= _BOUND_MAX and len(of.max) <= _BOUND_MAX:
                found[column.name] = of.min, of.max, chunk.num_values - of.null_count, None
    return found


def _encodings(schema: TableSchema, table: Any) -> dict[str, Any]:
    """What takes the least bytes of those that are read fast, and filters that pay; measured in decision 0041."""
    coded, encoding, compression, filters = [], {}, {}, {}
    filtered = {column.name for column in schema.columns if column.type.name in INDEXED}
    for name, column in zip(table.column_names, table.columns, strict=True):
        step = max(1, len(column) // _SAMPLE)
        sample = column.take(pa.array(np.arange(0, len(column), step)))
        wide = not pa.types.is_primitive(column.type) and not pa.types.is_decimal(column.type)
        distinct = len(sample.unique())
        few = distinct <= min(_DISTINCT_MAX, len(sample) // 4)
        if name in filtered and (wide or name in schema.index or distinct > _UNLIKE * len(sample)):
            values = min(len(column), 2 * distinct if few else GROUP_ROWS)
            filters[name] = {"ndv": values, "fpp": _FALSE_POSITIVES}
        compression[name] = "zstd" if wide and not few else "lz4"
        if few and not pa.types.is_boolean(column.type):
            coded.append(name)
        elif pa.types.is_floating(column.type):
            encoding[name] = "BYTE_STREAM_SPLIT"
        elif not wide and not pa.types.is_boolean(column.type):
            encoding[name] = "DELTA_BINARY_PACKED"
    return {
        "use_dictionary": coded or False,
        "column_encoding": encoding or None,
        "compression": compression,
        "store_decimal_as_integer": True,
        "bloom_filter_options": filters or None,
    }


def _chunk(data: Any, column: Any) -> Chunk:
    starts = [column.data_page_offset]
    if column.has_dictionary_page and column.dictionary_page_offset:
        starts.append(column.dictionary_page_offset)
    return _checked(data, min(starts), column.total_compressed_size)


def _checked(data: Any, at: int, size: int) -> Chunk:
    return at, size, crc32(memoryview(data)[at : at + size])


def _group(
    schema: TableSchema, events: Any, start: int, stamps: Any, positions: Any, chunks: Any, filters: dict[int, Chunk]
) -> Group:
    cts = stamps[start : start + events.num_rows]
    times = stored_array(schema.column(schema.event_time or "").type, events.column(schema.event_time))
    return Group(
        start,
        events.num_rows,
        int(times[0]),
        int(times[-1]),
        int(cts.min()),
        int(cts.max()),
        int(positions[start : start + events.num_rows].max()),
        {
            column.name: statistics(column.type, events.column(i))
            for i, column in enumerate(schema.columns)
            if column.type.name in NUMERIC
        },
        chunks,
        filters,
    )
