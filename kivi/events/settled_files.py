"""Settled files: events of any commits, sorted by event time, as Parquet. The one place that writes and reads them.

::

    columns of the table, in its order | _cts int64 | _pos int32      row groups of at most 65,536 events

The last two are the names of the events (``kivi.encoding.event_names``), so a row may be left out without a trace. In
the order of event time they grow or repeat, and cost next to nothing.

A *manifest* row of the engine has for each row group what a reader would otherwise open it for: the ranges of event
time and of CTS, per column of numbers or short text min, max and non-nulls, of integers the exact sum, and of every
column's bytes and Bloom filter the place and a checksum. Text, bytes and integers that hardly repeat have a filter
(``bloom``), of which a reader looks at one block. Only what a reader asks for is read, and nothing is decoded whose
checksum is wrong: a file that is damaged or missing is DataLoss that names it. The bytes come from the file's place
here, or from its object in the cold tier (``kivi.events.cold_tier``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kivi.arrow.columns import arrow_schema, arrow_type, stored_array
from kivi.arrow.dictionaries import is_coded
from kivi.encoding.event_names import POSITION, STAMP
from kivi.errors import DataLoss
from kivi.events.blocks import NUMERIC, Counts, Erased, statistics
from kivi.events.bloom import BLOCK_BYTES, block_of, digest, plain_bytes
from kivi.events.bloom import has as bloom_has
from kivi.events.cold_tier import ColdObject, ColdTier
from kivi.events.object_store import ObjectMissing
from kivi.events.places import Place
from kivi.events.pruning import equals
from kivi.events.readers import new_memory, reader_for
from kivi.model.declarations import INDEXED
from kivi.model.event_files import NAME_COLUMNS
from kivi.model.expressions import Expr
from kivi.model.schema import Column, TableSchema
from kivi.runtime.checksum import crc32

__all__ = ["GROUP_ROWS", "Group", "SettledFile", "SettledFiles", "decode_file", "write_file"]

GROUP_ROWS: Final = 65_536
_VERSION: Final = 2
_BOUND_MAX: Final = 64
"""Text of so many characters is kept as a bound."""
_UNLIKE: Final = 0.9
"""Integers of which this part differs from all others are looked for by their value; others are measured."""
_FALSE_POSITIVES: Final = 0.01
_SAMPLE: Final = 16_384
_DISTINCT_MAX: Final = 2_048
"""Of so many values at most among a sample's, a column is written as a dictionary."""
_FOOTERS: Final = 256
_MAGIC: Final = b"PAR1"

_PATTERN: Final = re.compile(r"[*?\[]")

Chunk = tuple[int, int, int]
"""Of one column in one row group: offset, bytes, checksum."""


@dataclass(frozen=True, slots=True)
class Group:
    """A row group. ``start``: the number of its first row in the file. ``columns``: as in the header of a block, and of
    text as well. ``filters``: by the number of a column."""

    start: int
    rows: int
    time_min: int
    time_max: int
    first_cts: int
    last_cts: int
    position_max: int
    columns: dict[str, tuple[Any, Any, int, int | None]]
    chunks: tuple[Chunk, ...]
    filters: dict[int, Chunk]


@dataclass(frozen=True)
class SettledFile:
    """A manifest row. ``stored``: how many columns of the table it has. ``tail``: the bytes after the last chunk.

    ``erased``: rows that are retracted from a CTS on; those of before every open snapshot are left out by rewriting it.
    ``cold``: its object in the cold tier; None: it is here. ``named``: retractions whose events may be in it. One
    that is cold is not looked through when a retraction reaches base, but soon after.
    """

    number: int
    rows: int
    nbytes: int
    raw_bytes: int
    stored: int
    tail: Chunk
    groups: tuple[Group, ...]
    erased: tuple[Erased, ...] = ()
    cold: ColdObject | None = None
    named: tuple[Erased, ...] = ()

    @property
    def time_min(self) -> int:
        return self.groups[0].time_min

    @property
    def time_max(self) -> int:
        return self.groups[-1].time_max

    @cached_property
    def first_cts(self) -> int:
        return min(group.first_cts for group in self.groups)

    @cached_property
    def last_cts(self) -> int:
        return max(group.last_cts for group in self.groups)

    @cached_property
    def columns(self) -> dict[str, tuple[Any, Any, int, int | None]]:
        """What is known of all rows together."""
        every = [group.columns for group in self.groups]
        return {name: _facts([of[name] for of in every]) for name in every[0] if all(name in of for of in every)}

    def with_erased(self, more: Erased) -> SettledFile:
        return replace(self, erased=(*self.erased, more))

    def with_named(self, more: Erased) -> SettledFile:
        return replace(self, named=(*self.named, more))

    @property
    def erased_data(self) -> list[int]:
        """What is stored in the engine of its retractions."""
        return [one.data for one in (*self.erased, *self.named)]

    def encode(self) -> bytes:
        groups = [
            [
                *(g.start, g.rows, g.time_min, g.time_max, g.first_cts, g.last_cts, g.position_max),
                *(g.columns, g.chunks, [(i, *chunk) for i, chunk in g.filters.items()]),
            ]
            for g in self.groups
        ]
        head = [self.number, self.rows, self.nbytes, self.raw_bytes, self.stored, self.tail, groups, self.erased]
        more: dict[str, Any] = {} if self.cold is None else {"cold": self.cold}
        more |= {"named": self.named} if self.named else {}
        return json.dumps({"v": _VERSION, "file": head, **more}, separators=(",", ":")).encode()


def decode_file(raw: bytes) -> SettledFile:
    """Raises ValueError, KeyError, TypeError or IndexError for anything but what ``encode`` gives."""
    found = json.loads(raw)
    if not 1 <= found["v"] <= _VERSION:
        raise ValueError(f"version {found['v']}")
    number, rows, nbytes, raw_bytes, stored, tail, groups, erased = found["file"]
    return SettledFile(
        number,
        rows,
        nbytes,
        raw_bytes,
        stored,
        tuple(tail),
        tuple(map(_decode_group, groups)),
        tuple(Erased(*one) for one in erased),
        ColdObject(*found["cold"]) if "cold" in found else None,
        tuple(Erased(*one) for one in found.get("named", ())),
    )


def _decode_group(found: list[Any]) -> Group:
    start, rows, time_min, time_max, first_cts, last_cts, position_max, columns, chunks, *more = found
    known = {name: tuple(facts) for name, facts in columns.items()}
    places = tuple((at, size, checksum) for at, size, checksum in chunks)
    filters = {i: (at, size, checksum) for i, at, size, checksum in (more[0] if more else ())}  # of version 2
    return Group(start, rows, time_min, time_max, first_cts, last_cts, position_max, known, places, filters)


def _facts(parts: Sequence[tuple[Any, Any, int, int | None]]) -> tuple[Any, Any, int, int | None]:
    """Of some rows together."""
    totals = [total for _, _, _, total in parts if total is not None]
    present = [part for part in parts if part[2]]
    return (
        min((low for low, _, _, _ in present), default=None),
        max((high for _, high, _, _ in present), default=None),
        sum(count for _, _, count, _ in parts),
        sum(totals) if len(totals) == len(parts) else None,
    )


# -- writing ------------------------------------------------------------------------------------------


def write_file(schema: TableSchema, number: int, events: Any, stamps: Any, positions: Any) -> tuple[Any, SettledFile]:
    """The bytes of a file, and its manifest row. ``events``: a batch with the table's columns, in the order of event
    time, then of their names."""
    columns = [*events.columns, pa.array(stamps.astype(np.int64)), pa.array(positions.astype(np.int32))]
    table = pa.Table.from_arrays(columns, names=_file_names(schema.columns))
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


def _file_names(columns: Sequence[Column]) -> list[str]:
    """The table's columns, and those of names, which yield to a column of the table that is called so."""
    used = [column.name for column in columns]
    for name in NAME_COLUMNS:
        while name in used:
            name += "_"
        used.append(name)
    return used


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


# -- reading ------------------------------------------------------------------------------------------


class SettledFiles:
    """The settled files of one table. Thread safe."""

    def __init__(self, place: Place, schema: TableSchema, cold: ColdTier | None = None) -> None:
        self.place = place
        self.cold = cold
        self.schema = schema
        self._index = {column.name: i for i, column in enumerate(schema.columns)}
        self._types = [arrow_type(column.type) for column in schema.columns]
        self._arrow = arrow_schema(schema)
        self._sound = set[int]()
        self._sound_filters = set[tuple[int, int]]()
        self._footer = lru_cache(maxsize=_FOOTERS)(self._read_footer)

    def read(
        self,
        file: SettledFile,
        group: Group,
        columns: Sequence[str],
        *,
        named: bool = False,
        coded: Collection[str] = (),
        threads: bool = False,
    ) -> Any:
        """The columns of a row group as one RecordBatch; ``named``: with ``STAMP`` (uint64) and ``POSITION`` (int64).
        ``coded``: columns that may come in codes, which are wide ones (``narrowed``). ``threads``: several at a time.

        Columns that were added to the table after the file was written are null.
        """
        wanted = [i for name in columns if (i := self._index[name]) < file.stored]
        if named or not wanted:
            wanted += [file.stored, file.stored + 1]
        footer = self._footer(file.number, file.nbytes, file.tail, file.cold)
        try:
            index = group.start // GROUP_ROWS
            written = footer.row_group(index)
            codes = [
                written.column(i).path_in_schema
                for name in coded
                if (i := self._index[name]) in wanted
                and self._types[i] in (pa.string(), pa.binary())
                and written.column(i).has_dictionary_page
            ]
            with reader_for(file.nbytes) as reader:
                self._fetch(file.number, file.nbytes, [group.chunks[i] for i in wanted], file.cold, reader.memory)
                opened = reader.opened(file.nbytes, footer, codes)
                table = opened.read_row_group(index, column_indices=wanted, use_threads=threads)
            found = dict(zip(sorted(set(wanted)), table.columns, strict=True))
            arrays = [
                _whole(found[i], self._types[i]) if (i := self._index[name]) < file.stored
                else pa.nulls(group.rows, self._types[i])
                for name in columns
            ]  # fmt: skip
            names = list(columns)
            if named:
                arrays += [_whole(found[file.stored], pa.uint64()), _whole(found[file.stored + 1], pa.int64())]
                names += [STAMP, POSITION]
            batch = pa.RecordBatch.from_arrays(arrays, names)
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise self._lost(file.number, file.cold, f"damaged ({error})") from None
        if batch.num_rows != group.rows:
            said = f"damaged (a row group has {batch.num_rows} events, its manifest {group.rows})"
            raise self._lost(file.number, file.cold, said)
        return batch

    def check(self, file: SettledFile) -> None:
        """Reads all bytes of a file. Raises DataLoss that names it."""
        self.whole(file)

    def may_have(self, file: SettledFile, groups: Sequence[Group], where: Expr) -> list[Group]:
        """Those of the row groups of which no Bloom filter says that they have nothing that the predicate selects.

        A filter is verified once since the store was opened. Raises DataLoss.
        """
        digests: dict[bytes, int] = {}

        def has(group: Group, name: str, value: Any) -> bool:
            chunk = group.filters.get(self._index.get(name, -1))
            data = plain_bytes(value)
            if chunk is None or data is None:
                return True
            if (found := digests.get(data)) is None:
                found = digests[data] = digest(data)
            return bloom_has(self._filter_block(file, chunk, found), found)

        return [group for group in groups if not group.filters or equals(where, partial(has, group))]

    def _filter_block(self, file: SettledFile, chunk: Chunk, digest: int) -> bytes:
        at, size, _ = chunk
        bits = 1 << (size.bit_length() - 1)  # after a header, which is shorter
        block = at + size - bits + BLOCK_BYTES * block_of(digest, bits // BLOCK_BYTES)
        if file.cold is not None or (file.number, at) not in self._sound_filters:
            memory = self._fetch(file.number, file.nbytes, [chunk], file.cold)
            self._sound_filters.add((file.number, at))
        else:
            memory = new_memory(file.nbytes)
            with memoryview(memory) as view:
                self._fill(file.number, file.nbytes, [(block, BLOCK_BYTES, 0)], None, view)
        return bytes(memory[block : block + BLOCK_BYTES])

    def path(self, file: SettledFile) -> str | None:
        """Where others can read it; None: they cannot. A path with what stands for other characters is none to them."""
        path = None if file.cold is not None else self.place.path(file.number)
        return None if path is None or _PATTERN.search(path) else path

    def columns(self, stored: int) -> tuple[tuple[str, ...], str]:
        """The columns of the table that a file has, and the name of the one with the CTS of each event."""
        names = _file_names(self.schema.columns[:stored])
        return tuple(names[:stored]), names[stored]

    def sound(self, file: SettledFile) -> str:
        """The path of a file, whose bytes were verified once since the store was opened. Raises DataLoss."""
        if file.number not in self._sound:
            self.check(file)
            self._sound.add(file.number)
        path = self.path(file)
        assert path is not None
        return path

    def whole(self, file: SettledFile) -> bytes:
        """All bytes of a file, as they were written. Raises DataLoss that names it."""
        chunks = [file.tail, *(chunk for group in file.groups for chunk in (*group.chunks, *group.filters.values()))]
        memory = self._fetch(file.number, file.nbytes, chunks, file.cold)
        memory[: len(_MAGIC)] = _MAGIC  # which no chunk has
        self._parsed(file.number, file.cold, memory)
        return bytes(memory)

    def _read_footer(self, number: int, nbytes: int, tail: Chunk, cold: ColdObject | None) -> Any:
        return self._parsed(number, cold, self._fetch(number, nbytes, [tail], cold))

    def _parsed(self, number: int, cold: ColdObject | None, memory: Any) -> Any:
        try:
            return pq.read_metadata(pa.BufferReader(pa.py_buffer(memory)))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._lost(number, cold, f"damaged ({error})") from None

    def _fetch(
        self, number: int, nbytes: int, chunks: Sequence[Chunk], cold: ColdObject | None, memory: Any = None
    ) -> Any:
        """Memory, new or as given, in which these chunks lie where they lie in the file, and are what was written."""
        memory = memory or new_memory(nbytes)
        view = memoryview(memory)[:nbytes]
        self._fill(number, nbytes, chunks, cold, view)
        wrong = [one for one in chunks if crc32(view[one[0] : one[0] + one[1]]) != one[2]]
        if wrong and cold is not None and self.cold is not None:  # on its way, or in the cache: once more
            for at, _, _ in wrong:
                self.cold.forget(cold, at)
            self._fill(number, nbytes, wrong, cold, view)
        for at, size, checksum in wrong:
            if crc32(view[at : at + size]) != checksum:
                if cold is not None and self.cold is not None:
                    self.cold.forget(cold, at)
                raise self._lost(number, cold, f"damaged (the checksum of the bytes from {at} on is wrong)")
        view.release()
        return memory

    def _fill(
        self, number: int, nbytes: int, chunks: Sequence[Chunk], cold: ColdObject | None, into: memoryview
    ) -> None:
        spans = [(at, size) for at, size, _ in chunks]
        try:
            if cold is None:
                there = self.place.fill(number, nbytes, spans, into)
            else:
                assert self.cold is not None, "a table whose files may be cold is opened with the tier"
                self.cold.fill(cold, nbytes, spans, into)
                there = True
        except OSError as error:
            raise self._lost(number, cold, f"unreadable ({error.strerror})") from None
        except ObjectMissing:
            there = False
        if not there:
            raise self._lost(number, cold, "missing, or not of its length")

    def _lost(self, number: int, cold: ColdObject | None, how: str) -> DataLoss:
        if cold is None or self.cold is None:
            name, todo = self.place.named(number), "restore a backup"
        else:
            name = self.cold.named(cold)
            todo = (
                "put it back there, if the object store keeps versions, or restore a backup; other events can be read"
            )
        return DataLoss(f"{name} of event table {self.schema.name!r} is {how}: {todo}", path=name)

    def rows_at(self, erased: Counts, group: Group) -> Counts:
        """Those of these rows of the file that lie in the group, as rows of it."""
        low, high = np.searchsorted(erased, [group.start, group.start + group.rows])
        return erased[low:high] - group.start


def _whole(column: Any, type_: Any) -> Any:
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # of no rows, or of more than Arrow puts into one
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.nulls(0, array.type)
    if type_ == pa.uint64():  # CTS, which are not negative
        return array.view(type_)
    return array if array.type == type_ or is_coded(array) else array.cast(type_)
