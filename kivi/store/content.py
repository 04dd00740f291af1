"""Hashes of what a store says at a snapshot: one for each shard of its sharded tables, and one for all the rest.

Two nodes of a cluster with the same log answer alike at every S (C1), so their hashes at one S are equal. Read is what
lies there: base rows with what is pending over them, blocks, settled files; so damage at rest is found, and a fold that
was wrong. Hashed is what it says, not how it lies there: cells in stored form as the definition at S has them, without
the stamp and the layout of the row; events with their commit, and, of tables that are not sharded, with their place in
it (a node with a part of a commit does not know that). So moves, settling, cooling and consolidation change no hash.

The hash of a shard is the sum, modulo 2**64, of those of its rows and events, each of which is mixed well
(``kivi.states.hashing``): whatever order they are read in. It is no defence against somebody who looks for rows that
cancel one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kivi.arrow.columns import stored_array
from kivi.arrow.dictionaries import plain
from kivi.delta.overlay import FixedRows
from kivi.encoding.base_rows import RowLayout, Version, is_wide
from kivi.encoding.event_names import POSITION, STAMP
from kivi.encoding.shards import shards_of_events, shards_of_keys
from kivi.errors import NotFound
from kivi.log.shards import SHARDS
from kivi.model.schema import TableSchema
from kivi.mvcc.leases import Lease
from kivi.states.hashing import hashed
from kivi.store.catalog import SYSTEM
from kivi.store.reads import Reads

__all__ = ["REST", "Content", "content_at"]

Hashes = npt.NDArray[np.uint64]
REST: Final = SHARDS
"""The place of the hash of what is not sharded, behind those of the shards."""
_ROWS: Final = 4_096
_MASK64: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Content:
    """As of the commit timestamp ``ts``. ``tables``: a hash of which tables were read: one that is dropped meanwhile is
    left out, and then nothing can be compared. ``shards``: those that are whole here. ``hashes``: by number, and REST.
    """

    ts: int
    tables: int
    shards: int
    hashes: tuple[int, ...]


def content_at(reads: Reads, lease: Lease, read: Callable[[int], None]) -> Content:
    """What this store has at a snapshot. ``read(nbytes)`` is told what was read after each portion: it may wait, and
    raise to end it.

    Raises SnapshotTooOld, and DataLoss for what cannot be read.
    """
    sums, tables = np.zeros(SHARDS + 1, np.uint64), list[int]()
    shards = reads.shards.held
    for schema in _tables(reads, lease.ts):
        shards &= reads.shards.held_at(schema, lease.ts)
        of_table = np.zeros(SHARDS + 1, np.uint64)
        try:
            for places, hashes, nbytes in _hashed(reads, lease, schema):
                np.add.at(of_table, places, hashes)
                read(nbytes)
        except NotFound:  # it was dropped
            continue
        sums += of_table
        tables.append(schema.id)
    shards &= reads.shards.held  # what was given up meanwhile
    named = int(hashed(np.array(tables, np.int64)).sum(dtype=np.uint64))
    return Content(lease.ts, named, shards, tuple(sums.tolist()))


def _tables(reads: Reads, ts: int) -> Iterator[TableSchema]:
    """The tables that a snapshot sees whole, as it sees them; those of the system among them."""
    yield from SYSTEM.values()
    view = reads.catalog.visible
    known = [schema for schema in view.by_id.values() if schema.created_ts <= ts]
    known += [old.schema for old in view.replaced.values() if old.schema.created_ts <= ts < old.cts]
    yield from (schema.at(ts) for schema in sorted(known, key=lambda one: one.id) if schema.state == "ready")


def _hashed(reads: Reads, lease: Lease, schema: TableSchema) -> Iterator[tuple[Any, Hashes, int]]:
    """Of some rows or events at a time: of which shard each is, or REST, their hashes, and their bytes."""
    if schema.kind == "event":
        captured = reads.captured(lease, schema)
        names = [column.name for column in schema.shown_columns]
        with captured.view:
            stored = captured.view.scan(columns=names, naming=(STAMP, POSITION), ordered=False)
            memory = captured.in_memory((None, None), None, [*names, STAMP, POSITION])
            for batch in _each(stored, memory):
                reads.reader.check_events(lease, schema)
                batch = plain(batch)
                places = shards_of_events(schema, batch, SHARDS) if schema.shard_by else _rest(batch.num_rows)
                yield places, _of_events(schema, batch), batch.nbytes
        return
    layout, indexes = RowLayout.of(schema), tuple(schema.index_of.values())
    for portion in _portions(reads, lease, schema, layout):
        if isinstance(portion, FixedRows):
            keys, columns = portion.keys, (_of_column(schema, portion.rows, i) for i in indexes)
            nbytes = keys.nbytes + portion.rows.nbytes
        else:
            keys = pa.array([key for key, _ in portion], pa.large_binary())
            cells = [version.cells for _, version in portion]
            columns = (_of_cells(schema, [row[i] for row in cells], i) for i in indexes)
            nbytes = keys.nbytes + len(cells) * layout.width
        if len(keys):
            places = shards_of_keys(schema, keys, SHARDS) if schema.shard_by else _rest(len(keys))
            yield places, _combined(schema, hashed(keys), columns), nbytes


def _rest(rows: int) -> Any:
    return np.full(rows, REST, np.uint8)


def _each(stored: Iterable[Any], memory: Iterable[Any]) -> Iterator[Any]:
    yield from stored
    yield from memory


def _portions(
    reads: Reads, lease: Lease, schema: TableSchema, layout: RowLayout
) -> Iterator[FixedRows | list[tuple[bytes, Version]]]:
    """Live rows of this store, in columns where they can be."""
    if layout.in_columns:
        return reads.reader.scan_portions(lease, schema, None, None, few=0, first_rows=_ROWS, rows=_ROWS)
    rows = reads.reader.scan(lease, schema, None, None)

    def pages() -> Iterator[FixedRows | list[tuple[bytes, Version]]]:
        page = list[tuple[bytes, Version]]()
        for row in rows:
            page.append(row)
            if len(page) == _ROWS:
                yield page
                page = []
        yield page

    return pages()


def _combined(schema: TableSchema, first: Hashes, columns: Iterable[Sequence[Hashes]]) -> Hashes:
    """One hash for each row, of its table, its key and its columns, in order."""
    found = hashed(first ^ hashed(np.array([schema.id])))
    for parts in columns:
        for part in parts:
            found = hashed((found << np.uint64(1) | found >> np.uint64(63)) ^ part)
    return found


def _of_column(schema: TableSchema, rows: Any, i: int) -> list[Hashes]:
    column = schema.columns[i]
    nulls = hashed(rows["nulls"][:, i >> 3] >> (i & 7) & 1)
    if column.state is not None:
        return [hashed(pa.array([state or b"" for state in rows[f"c{i}"].tolist()], pa.large_binary()))]
    if is_wide(column):
        return [hashed(rows[f"c{i}_lo"]), hashed(rows[f"c{i}_hi"]), nulls]
    return [hashed(rows[f"c{i}"]), nulls]


def _of_cells(schema: TableSchema, cells: Sequence[Any], i: int) -> list[Hashes]:
    """The same of cells in stored form."""
    column = schema.columns[i]
    nulls = hashed(np.array([cell is None for cell in cells], np.uint8))
    if column.state is not None:
        return [hashed(pa.array([cell or b"" for cell in cells], pa.large_binary()))]
    if column.type.name in ("string", "bytes"):
        texts = [(cell or "").encode() if column.type.name == "string" else cell or b"" for cell in cells]
        return [hashed(pa.array(texts, pa.large_binary())), nulls]
    known = [cell or 0 for cell in cells]
    if is_wide(column):
        low = np.array([cell & _MASK64 for cell in known], np.uint64)
        return [hashed(low), hashed(np.array([cell >> 64 for cell in known], np.int64)), nulls]
    is_float = column.type.name == "float64"
    return [hashed(np.array(known, np.float64 if is_float else np.int64)), nulls]


def _of_events(schema: TableSchema, batch: Any) -> Hashes:
    def columns() -> Iterator[Sequence[Hashes]]:
        if not schema.shard_by:
            yield [hashed(batch.column(POSITION).to_numpy())]
        for column in schema.shown_columns:
            array = batch.column(column.name)
            nulls = hashed(array.is_null().to_numpy(zero_copy_only=False))
            if column.state is not None or column.type.name in ("string", "bytes"):
                yield [hashed(array.cast(pa.large_binary()).fill_null(b"")), nulls]
            else:
                yield [hashed(stored_array(column.type, array)), nulls]

    return _combined(schema, hashed(batch.column(STAMP).to_numpy()), columns())
