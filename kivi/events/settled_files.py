"""Settled files: events of any commits, sorted by event time, as Parquet. The one place that reads them;
``file_writing`` writes them.

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

from kivi.arrow.columns import arrow_schema, arrow_type
from kivi.arrow.dictionaries import is_coded
from kivi.arrow.parquet import FAILURES, MAGIC, footer_of, parsed, whole
from kivi.encoding.event_names import POSITION, STAMP
from kivi.errors import DataLoss
from kivi.events.blocks import Counts, Erased
from kivi.events.bloom import BLOCK_BYTES, block_of, digest, plain_bytes
from kivi.events.bloom import has as bloom_has
from kivi.events.cold_tier import ColdObject, ColdTier
from kivi.events.object_store import ObjectMissing
from kivi.events.places import Place
from kivi.events.pruning import equals
from kivi.events.readers import new_memory, reader_for
from kivi.model.event_files import NAME_COLUMNS
from kivi.model.expressions import Expr
from kivi.model.schema import Column, TableSchema
from kivi.runtime.checksum import crc32

__all__ = [
    "GROUP_ROWS",
    "Chunk",
    "Group",
    "SettledFile",
    "SettledFiles",
    "StoredGroup",
    "Stretch",
    "decode_file",
    "file_names",
]

GROUP_ROWS: Final = 65_536
_VERSION: Final = 2
_FOOTERS: Final = 256

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

    @property
    def index(self) -> int:
        """Its number in the file."""
        return self.start // GROUP_ROWS


class _OfGroups:
    """What is true of consecutive row groups together, at least one, in order of event time."""

    groups: Sequence[Group]

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


@dataclass(frozen=True)
class Stretch(_OfGroups):
    """Row groups of one file that follow each other, at least one, as if they were one."""

    groups: Sequence[Group]

    @property
    def start(self) -> int:
        return self.groups[0].start

    @cached_property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """Columns of a row group as they are stored, verified. ``columns``: their numbers in the file, as they were asked
    for. ``chunks``: of each of these once, where its bytes lie in the file, and these. ``name`` is for people."""

    name: str
    file: int
    file_bytes: int
    footer: bytes
    index: int
    num_rows: int
    columns: list[int]
    chunks: list[tuple[int, memoryview]]

    @property
    def nbytes(self) -> int:
        """Of the chunks."""
        return sum(len(part) for _, part in self.chunks)


@dataclass(frozen=True)
class SettledFile(_OfGroups):
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


def file_names(columns: Sequence[Column]) -> list[str]:
    """The table's columns, and those of names, which yield to a column of the table that is called so."""
    used = [column.name for column in columns]
    for name in NAME_COLUMNS:
        while name in used:
            name += "_"
        used.append(name)
    return used


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
        part: Stretch,
        columns: Sequence[str],
        *,
        named: bool = False,
        coded: Collection[str] = (),
        once: bool = False,
    ) -> Any:
        """The columns of row groups as one RecordBatch; ``named``: with ``STAMP`` (uint64) and ``POSITION`` (int64).
        ``coded``: columns that may come in codes, which are wide ones (``narrowed``). ``once``: see ``ColdTier.fill``.

        Columns that were added to the table after the file was written are null.
        """
        wanted = [i for name in columns if (i := self._index[name]) < file.stored]
        if named or not wanted:
            wanted += [file.stored, file.stored + 1]
        footer, _ = self._footer(file.number, file.nbytes, file.tail, file.cold)
        try:
            written = [footer.row_group(group.index) for group in part.groups]
            codes = [
                written[0].column(i).path_in_schema
                for name in coded
                if (i := self._index[name]) in wanted
                and self._types[i] in (pa.string(), pa.binary())
                and all(group.column(i).has_dictionary_page for group in written)
            ]
            with reader_for(file.nbytes) as reader:
                chunks = [group.chunks[i] for group in part.groups for i in wanted]
                self._fetch(file.number, file.nbytes, chunks, file.cold, reader.memory, once=once)
                numbers = [group.index for group in part.groups]
                found = reader.opened(file.nbytes, footer, codes).read(numbers, wanted, threads=False)
            arrays = [
                _whole(found[i], self._types[i]) if (i := self._index[name]) < file.stored
                else pa.nulls(part.rows, self._types[i])
                for name in columns
            ]  # fmt: skip
            names = list(columns)
            if named:
                arrays += [_whole(found[file.stored], pa.uint64()), _whole(found[file.stored + 1], pa.int64())]
                names += [STAMP, POSITION]
            batch = pa.RecordBatch.from_arrays(arrays, names)
        except FAILURES as error:
            raise self._lost(file.number, file.cold, f"damaged ({error})") from None
        if batch.num_rows != part.rows:
            said = f"damaged (row groups have {batch.num_rows} events, their manifest {part.rows})"
            raise self._lost(file.number, file.cold, said)
        return batch

    def stored(self, file: SettledFile, group: Group, columns: Sequence[str], max_bytes: int) -> StoredGroup | None:
        """The columns of a row group as they are stored; None if the file does not have all of them, or these take more
        than ``max_bytes``."""
        numbers = [self._index.get(name, file.stored) for name in columns]
        if not numbers or max(numbers) >= file.stored:
            return None
        chunks = [group.chunks[i] for i in sorted(set(numbers))]
        if sum(size for _, size, _ in chunks) > max_bytes:
            return None
        _, footer = self._footer(file.number, file.nbytes, file.tail, file.cold)
        memory = memoryview(self._fetch(file.number, file.nbytes, chunks, file.cold))
        parts = [(at, memory[at : at + size]) for at, size, _ in chunks]
        name = f"{self._named(file.number, file.cold)} of event table {self.schema.name!r}"
        return StoredGroup(name, file.number, file.nbytes, footer, group.index, group.rows, numbers, parts)

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
        names = file_names(self.schema.columns[:stored])
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
        memory = self._fetch(file.number, file.nbytes, chunks, file.cold, once=True)
        memory[: len(MAGIC)] = MAGIC  # which no chunk has
        self._parsed(file.number, file.cold, memory)
        return bytes(memory)

    def _read_footer(self, number: int, nbytes: int, tail: Chunk, cold: ColdObject | None) -> tuple[Any, bytes]:
        """Parsed, and as it is."""
        memory = self._fetch(number, nbytes, [tail], cold)
        return self._parsed(number, cold, memory), footer_of(memoryview(memory)[tail[0] :])

    def _parsed(self, number: int, cold: ColdObject | None, memory: Any) -> Any:
        try:
            return parsed(memory)
        except FAILURES as error:
            raise self._lost(number, cold, f"damaged ({error})") from None

    def _fetch(
        self,
        number: int,
        nbytes: int,
        chunks: Sequence[Chunk],
        cold: ColdObject | None,
        memory: Any = None,
        *,
        once: bool = False,
    ) -> Any:
        """Memory, new or as given, in which these chunks lie where they lie in the file, and are what was written."""
        memory = memory or new_memory(nbytes)
        view = memoryview(memory)[:nbytes]
        self._fill(number, nbytes, chunks, cold, view, once=once)
        wrong = [one for one in chunks if crc32(view[one[0] : one[0] + one[1]]) != one[2]]
        if wrong and cold is not None and self.cold is not None:  # on its way, or in the cache: once more
            for at, _, _ in wrong:
                self.cold.forget(cold, at)
            self._fill(number, nbytes, wrong, cold, view, once=once)
        for at, size, checksum in wrong:
            if crc32(view[at : at + size]) != checksum:
                if cold is not None and self.cold is not None:
                    self.cold.forget(cold, at)
                raise self._lost(number, cold, f"damaged (the checksum of the bytes from {at} on is wrong)")
        view.release()
        return memory

    def _fill(
        self,
        number: int,
        nbytes: int,
        chunks: Sequence[Chunk],
        cold: ColdObject | None,
        into: memoryview,
        *,
        once: bool = False,
    ) -> None:
        spans = [(at, size) for at, size, _ in chunks]
        try:
            if cold is None:
                there = self.place.fill(number, nbytes, spans, into)
            else:
                assert self.cold is not None, "a table whose files may be cold is opened with the tier"
                self.cold.fill(cold, nbytes, spans, into, once=once)
                there = True
        except OSError as error:
            raise self._lost(number, cold, f"unreadable ({error.strerror})") from None
        except ObjectMissing:
            there = False
        if not there:
            raise self._lost(number, cold, "missing, or not of its length")

    def _named(self, number: int, cold: ColdObject | None) -> str:
        return self.place.named(number) if cold is None or self.cold is None else self.cold.named(cold)

    def _lost(self, number: int, cold: ColdObject | None, how: str) -> DataLoss:
        name, todo = self._named(number, cold), "restore a backup"
        if cold is not None and self.cold is not None:
            todo = (
                "put it back there, if the object store keeps versions, or restore a backup; other events can be read"
            )
        return DataLoss(f"{name} of event table {self.schema.name!r} is {how}: {todo}", path=name)

    def rows_at(self, erased: Counts, part: Group | Stretch) -> Counts:
        """Those of these rows of the file that lie in a part of it, as rows of that."""
        low, high = np.searchsorted(erased, [part.start, part.start + part.rows])
        return erased[low:high] - part.start


def _whole(column: Any, type_: Any) -> Any:
    array = whole(column)
    if type_ == pa.uint64():  # CTS, which are not negative
        return array.view(type_)
    return array if array.type == type_ or is_coded(array) else array.cast(type_)
