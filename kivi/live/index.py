"""Durable subscriptions by what they ask for: which of them, and how many, select an event.

Three system tables, written in the commits that make, replace and forget subscriptions, so that at every snapshot they
say exactly what the rows of ``SUBSCRIPTIONS`` say. Cells are those of ``kivi.live.cells``::

    CELLS    (table, cell)                  how many subscriptions are selected by the cell alone; how many predicates
                                            have to be asked besides. (table, "#" dimension): how many cells it has
    ASKS     (table, cell, ask)             such a predicate, and how many subscriptions have it; ``ask`` is its hash
    MEMBERS  (table, "=" cell or "?" ask)   whose they are

An event of a table finds the cells of its values in each dimension that some subscription of the table uses, and adds
up what is there. So it costs the cells that it has, and the predicates that are more than their cells; how many
subscriptions there are, and how many it reaches, does not matter. Many users that ask for the same are one number.

**Invariant.** The sums are never wrong: they are deltas of the same commit as the row that they count. Nothing but the
store remembers them; of ``CELLS`` those that were asked for lately are in memory, up to ``subscriptions_bytes``, and
follow the commits (``kivi.store.known_rows``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import arrow_schema, flat, stored_array, stored_lists, stored_rows
from kivi.encoding.keys import encode_key_columns
from kivi.errors import KiviError
from kivi.live.cells import EVERYTHING, Dimension, cell_of, cells_of, dimension_of, number
from kivi.live.matching import Array, BatchColumns, RowColumns
from kivi.live.reading import types_of
from kivi.model.expressions import Expr
from kivi.model.expressions.quads import quad_of
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.mvcc.leases import Lease
from kivi.store.catalog import ASKS, CELLS, MEMBERS
from kivi.store.facade import Store
from kivi.store.known_rows import KnownRows
from kivi.store.transaction import Txn

__all__ = ["Changes", "Index", "Place", "place_of", "put_rows"]

_CELL_BYTES: Final = 256
"""Memory of a known row of ``CELLS`` with its key, about."""
_EVENTS: Final = 16_384
_FEW: Final = 16
"""Rows that a predicate is asked about one by one: in columns it takes as long as for so many."""
_ASKS_KNOWN: Final = 4_096
_KEY_OF_CELL: Final = [column.type for column in CELLS.key]


class Place(NamedTuple):
    """Where a subscription stands. ``ask`` is empty where its cells say all."""

    ask: str
    cells: tuple[str, ...]

    def text(self) -> str:
        return json.dumps([self.ask, *self.cells], separators=(",", ":"))

    @staticmethod
    def parse(text: str) -> Place:
        ask, *cells = json.loads(text)
        return Place(ask, tuple(cells))

    @property
    def targets(self) -> list[str]:
        """Under which its user is found."""
        return ["?" + self.ask] if self.ask else ["=" + cell for cell in self.cells]


def place_of(store: Store, schema: TableSchema, where: Expr | None, query: str) -> Place:
    """Of the predicate of a query, which is not resolved. Raises SchemaError for a hierarchy that is not there."""
    found = cells_of(store.hierarchies.named_now(schema, where), {c.name: c.type for c in schema.columns})
    ask = "" if found.exact else hashlib.blake2b(query.encode(), digest_size=16).hexdigest()
    return Place(ask, found.cells)


class Changes:
    """What a transaction does to the index: subscriptions that come and go, added up."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, str], list[int]] = {}
        self._asks: dict[tuple[int, str, str], tuple[str, int]] = {}
        self._members: dict[tuple[int, str, str, str], int | None] = {}

    def add(self, table: int, place: Place, user: str, name: str, query: str, since: int) -> None:
        self._count(table, place, query, 1)
        self._members |= {(table, target, user, name): since for target in place.targets}

    def remove(self, table: int, place: Place, user: str, name: str) -> None:
        self._count(table, place, "", -1)
        self._members |= {(table, target, user, name): None for target in place.targets}

    def _count(self, table: int, place: Place, query: str, by: int) -> None:
        for cell in place.cells:
            for counted in (cell, "#" + dimension_of(cell)):
                self._cells.setdefault((table, counted), [0, 0])[bool(place.ask)] += by
            if place.ask:
                before, count = self._asks.get((table, cell, place.ask), ("", 0))
                self._asks[table, cell, place.ask] = query or before, count + by

    def write(self, txn: Txn) -> None:
        for cell, (exact, asks) in self._cells.items():
            if exact or asks:
                txn.delta(CELLS, cell, {"exact": exact, "asks": asks})
        known = txn.get(ASKS, list(self._asks), ["query"]) if self._asks else []
        for (ask, (query, count)), row in zip(self._asks.items(), known, strict=True):
            if row is None:
                txn.put(ASKS, ask, {"query": query})
            txn.delta(ASKS, ask, {"members": count})
        for member, since in self._members.items():
            if since is None:
                txn.delete(MEMBERS, member)
        come = [(*member, since) for member, since in self._members.items() if since is not None]
        put_rows(txn, MEMBERS, come)


def put_rows(txn: Txn, schema: TableSchema, rows: Sequence[tuple[Any, ...]]) -> None:
    """Upserts whole rows, in columns."""
    if rows:
        arrow = arrow_schema(schema)
        columns = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), arrow, strict=True)]
        txn.write(schema, pa.RecordBatch.from_arrays(columns, schema=arrow))


class _Found(NamedTuple):
    """What the events of a batch have in a dimension. ``codes``: which distinct value each has, -1: none; the cells of
    these are pairs of ``values`` and ``at``, which are positions in ``cells``."""

    codes: Array
    values: Array
    at: Array
    cells: list[str]
    distinct: int

    def rows_of(self, cells: Array) -> Iterator[tuple[int, Array]]:
        """Each of these cells with the events that have it."""
        order = np.argsort(self.codes, kind="stable")
        starts = np.searchsorted(self.codes[order], np.arange(self.distinct + 1))
        by_cell = np.argsort(self.at, kind="stable")
        first = np.searchsorted(self.at[by_cell], cells)
        behind = np.searchsorted(self.at[by_cell], cells, "right")
        for cell, a, b in zip(cells.tolist(), first.tolist(), behind.tolist(), strict=True):
            values = self.values[by_cell[a:b]].tolist()
            yield cell, np.concatenate([order[starts[value] : starts[value + 1]] for value in values])


class Index:
    """Thread safe."""

    def __init__(self, store: Store, selecting: Callable[[TableSchema, str], Expr | None]) -> None:
        """``selecting``: the predicate of a stored query."""
        self._store = store
        self._selecting = selecting
        self._known_asks: dict[tuple[int, int, str], Expr | None] = {}
        rows = max(1, store.settings.subscriptions_bytes // _CELL_BYTES)
        self.known = KnownRows(store.pending, store.reader, lambda: store.log.last, rows)

    def reached(self, lease: Lease, schema: TableSchema, batches: Iterable[pa.RecordBatch]) -> list[int]:
        """How many subscriptions there are at the snapshot that select each event."""
        found: list[int] = []
        for batch in _cut(batches):
            counts, _, asked = self._selected(lease, schema, batch)
            for _, members, rows in asked:
                counts[rows] += members
            found += counts.tolist()
        return found

    def subscribers(self, lease: Lease, schema: TableSchema, event: pa.RecordBatch, limit: int) -> list[dict[str, str]]:
        """Whose these are, of one event: user and name of each, ``limit`` at most."""
        _, exact, asked = self._selected(lease, schema, event)
        found: list[dict[str, str]] = []
        for target in (*("=" + cell for cell in exact), *("?" + ask for ask, _, _ in asked)):
            if len(found) < limit:
                wanted = Scan(prefix=(schema.origin, target), columns=("user", "name"), limit=limit - len(found))
                found += [row for batch in self._store.scan(lease, MEMBERS, wanted) for row in batch.to_pylist()]
        return found

    def _selected(
        self, lease: Lease, schema: TableSchema, batch: pa.RecordBatch
    ) -> tuple[Array, list[str], list[tuple[str, int, Array]]]:
        """How many subscriptions select each event by a cell alone, and these cells; and (ask, members, events)."""
        counts, exact = np.zeros(batch.num_rows, np.int64), list[str]()
        candidates: dict[str, tuple[str, int, list[Array]]] = {}
        for dimension in self._dimensions(lease, schema):
            found = self._cells(lease, schema, batch, dimension)
            if not found.cells:
                continue
            alone, asks = self._counts(lease, schema, found.cells)
            exact += [found.cells[at] for at in np.flatnonzero(alone).tolist()]
            of_value = np.zeros(found.distinct, np.int64)
            np.add.at(of_value, found.values, alone[found.at])
            known = found.codes >= 0
            counts[known] += of_value[found.codes[known]]
            for at, rows in found.rows_of(np.flatnonzero(asks)):
                for ask, query, members in self._asks(lease, schema, found.cells[at]):
                    candidates.setdefault(ask, (query, members, []))[2].append(rows)
        return counts, exact, list(self._asked(lease, schema, batch, candidates)) if candidates else []

    def _asked(
        self,
        lease: Lease,
        schema: TableSchema,
        batch: pa.RecordBatch,
        candidates: dict[str, tuple[str, int, list[Array]]],
    ) -> Iterator[tuple[str, int, Array]]:
        """Predicates are asked about the events that have one of their cells."""
        columns, types, listed = BatchColumns(batch), types_of(schema), RowColumns(stored_rows(batch))
        for ask, (query, members, parts) in candidates.items():
            rows = np.unique(np.concatenate(parts))
            try:
                where = self._store.hierarchies.resolved_at(lease, schema, self._predicate(schema, ask, query))
                if where is not None:
                    rows = (listed if len(rows) < _FEW else columns).select(where, types, rows)
            except KiviError:  # out of range, which ends it for whoever is connected; its hierarchy is gone
                continue
            if len(rows):
                yield ask, members, rows

    def _predicate(self, schema: TableSchema, ask: str, query: str) -> Expr | None:
        key = schema.id, schema.altered_ts, ask
        if key not in self._known_asks:
            if len(self._known_asks) >= _ASKS_KNOWN:
                self._known_asks.clear()
            self._known_asks[key] = self._selecting(schema, query)
        return self._known_asks[key]

    # -- rows --------------------------------------------------------------------------------------------

    def _dimensions(self, lease: Lease, schema: TableSchema) -> list[Dimension]:
        wanted = Scan(start=(schema.origin, "#"), end=(schema.origin, "$"))
        rows = [row for batch in self._store.scan(lease, CELLS, wanted) for row in batch.to_pylist()]
        return [Dimension.parse(row["cell"][1:]) for row in rows if row["exact"] or row["asks"]]

    def _asks(self, lease: Lease, schema: TableSchema, cell: str) -> Iterator[tuple[str, str, int]]:
        wanted = Scan(prefix=(schema.origin, cell), columns=("ask", "query", "members"))
        for batch in self._store.scan(lease, ASKS, wanted):
            lists = stored_lists(batch)
            for ask, query, members in zip(lists["ask"], lists["query"], lists["members"], strict=True):
                if members:
                    yield ask, query, members

    def _counts(self, lease: Lease, schema: TableSchema, cells: Sequence[str]) -> tuple[Array, Array]:
        tables = pa.array(np.full(len(cells), schema.origin))
        keys = encode_key_columns(_KEY_OF_CELL, [tables, pa.array(cells, pa.string())])
        with self.known.lock:
            rows = self.known.rows(lease, CELLS, keys)
        return rows["c0_lo"].astype(np.int64), rows["c1_lo"].astype(np.int64)

    # -- the cells of events -----------------------------------------------------------------------------

    def _cells(self, lease: Lease, schema: TableSchema, batch: pa.RecordBatch, dimension: Dimension) -> _Found:
        if dimension == EVERYTHING:
            none = np.zeros(batch.num_rows, np.int64)
            return _Found(none, none[:1], none[:1], [cell_of(EVERYTHING, "")], 1)
        codes, distinct = _quads(batch, dimension) if dimension.kind == "q" else _distinct(schema, batch, dimension)
        cells: dict[str, int] = {}
        values, at = list[int](), list[int]()
        found_by = self._way(lease, schema, dimension)
        for i, value in enumerate(distinct):
            for each in found_by(value):
                values.append(i)
                at.append(cells.setdefault(cell_of(dimension, number(each)), len(cells)))
        return _Found(codes, np.array(values, np.int64), np.array(at, np.int64), list(cells), len(distinct))

    def _way(self, lease: Lease, schema: TableSchema, dimension: Dimension) -> Callable[[Any], Iterable[Any]]:
        """From a value to those of its cells."""
        kind, column, detail = dimension
        if kind in ("u", "c"):
            type_ = schema.column(column).type
            return self._store.hierarchies.walk(lease, detail, type_, "covers" if kind == "u" else "under")
        if kind == "p":
            length = int(detail)
            return lambda value: (value[:length],) if len(value) >= length else ()
        if kind == "r":
            level = int(detail)
            return lambda value: (number(value) >> level,)
        return lambda value: (value,)


def _cut(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for begin in range(0, batch.num_rows, _EVENTS):
            yield batch.slice(begin, _EVENTS)


def _distinct(schema: TableSchema, batch: pa.RecordBatch, dimension: Dimension) -> tuple[Array, list[Any]]:
    """Of each event which value it has, -1: null; and the values, in stored form."""
    column = flat(batch.column(dimension.column))
    type_ = schema.column(dimension.column).type
    if type_.name not in ("string", "bytes"):
        column = pa.array(stored_array(type_, column), mask=column.is_null().to_numpy(zero_copy_only=False))
    coded = column.dictionary_encode()
    return coded.indices.fill_null(-1).to_numpy().astype(np.int64), coded.dictionary.to_pylist()


def _quads(batch: pa.RecordBatch, dimension: Dimension) -> tuple[Array, list[Any]]:
    """The same of the cells of positions."""
    lats, lons = (flat(batch.column(name)).to_pylist() for name in dimension.column.split(","))
    depth, at = int(dimension.detail), dict[str, int]()
    codes = np.full(batch.num_rows, -1, np.int64)
    for i, (lat, lon) in enumerate(zip(lats, lons, strict=True)):
        path = None if lat is None or lon is None else quad_of(lat, lon, depth)
        if path is not None:
            codes[i] = at.setdefault(path, len(at))
    return codes, list(at)
