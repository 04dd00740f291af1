"""Durable subscriptions by what they ask for: which of them, and how many, select an event.

Four system tables, written in the commits that make, replace and forget subscriptions, so that at every snapshot they
say exactly what the rows of ``SUBSCRIPTIONS`` say. Cells are those of ``kivi.live.cells``; queries go by hashes::

    QUERIES  (table, query)                 what is asked for, each once, and its cells
    CELLS    (table, cell)                  how many subscriptions are selected by the cell alone; how many have to be
                                            asked besides. (table, "#" dimension): the same of all of its cells
    ASKS     (table, cell, query)           a query that has the cell, and how many subscriptions have the query
    MEMBERS  (table, query, user, name)     whose they are

All but ``QUERIES`` are columns of numbers: thousands of subscriptions are written as columns (``Txn.write_deltas``), in
which a query is looked at once, however many have it.

An event of a table finds the cells of its values in each dimension that some subscription of the table uses, and adds
up what is there. So it costs the cells that it has, and the predicates that are more than their cells; how many
subscriptions there are, and how many it reaches, does not matter. Many users that ask for the same are one number.

**Invariant.** The sums are never wrong: they are deltas of the same commit as the row that they count. Nothing but the
store remembers them; of ``CELLS`` those that were asked for lately are in memory, up to ``subscriptions_bytes``, and
follow the commits (``kivi.store.known_rows``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import flat, stored_array, stored_rows
from kivi.arrow.predicates import attempted, true_places
from kivi.delta.ops import Barrier
from kivi.encoding.keys import encode_key_columns
from kivi.errors import InvalidArgument, OutOfRange
from kivi.live.cells import EVERYTHING, Dimension, cell_of, cells_of, dimension_of, number
from kivi.live.matching import Array, RowColumns
from kivi.live.reading import types_of
from kivi.model.expressions import Expr, names
from kivi.model.expressions.quads import quad_of
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.model.types import ColumnType
from kivi.mvcc.leases import Lease
from kivi.store.catalog import ASKS, CELLS, MEMBERS, QUERIES
from kivi.store.facade import Store
from kivi.store.known_rows import KnownRows
from kivi.store.transaction import Txn

__all__ = ["Asked", "Changes", "Index", "asked", "halves"]

_CELL_BYTES: Final = 256
"""Memory of a known row of ``CELLS`` with its key, about."""
_EVENTS: Final = 16_384
_FEW: Final = 16
"""Rows that a predicate is asked about one by one: in columns it takes as long as for so many."""
_NO_CELLS: Final = ("",)
"""Of a query that no event is selected by, which is counted like any other to know when it may go."""
_ASKS_KNOWN: Final = 4_096
_KEY_OF_CELL: Final = [column.type for column in CELLS.key]


class Asked(NamedTuple):
    """A query that subscriptions have. ``exact``: its cells say all."""

    high: int
    low: int
    text: str
    exact: bool
    cells: tuple[str, ...]

    @property
    def places(self) -> str:
        return _as_text([self.exact, *self.cells])

    @staticmethod
    def of(text: str, exact: bool, cells: tuple[str, ...]) -> Asked:
        """The same text may mean other cells some day, with another hierarchy: then it is another query."""
        whole = "\n".join((text, str(exact), *cells))
        digest = hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return Asked(_int(digest[:8]), _int(digest[8:]), text, exact, cells)

    @staticmethod
    def read(high: int, low: int, text: str, places: str) -> Asked:
        exact, *cells = json.loads(places)
        return Asked(high, low, text, exact, tuple(cells))


def asked(store: Store, schema: TableSchema, where: Expr | None, text: str) -> Asked:
    """Of the predicate of a query, which is not resolved. Raises SchemaError for a hierarchy that is not there."""
    found = cells_of(store.hierarchies.named_now(schema, where), {c.name: c.type for c in schema.columns})
    return Asked.of(text, found.exact, found.cells)


class Changes:
    """What a transaction does to the index: subscriptions that come and go. None comes whose like goes in it."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, str], dict[Asked, int]] = {}
        self._come: list[tuple[Any, ...]] = []
        self._gone: list[tuple[int, int, int, str, str]] = []

    def add(self, schema: TableSchema, queries: Sequence[Asked], at: Array, users: Any, names: Any, since: int) -> None:
        """Many, of which each has one of these queries; users and names are Arrow arrays or lists."""
        counts = self._counts.setdefault((schema.origin, schema.name), {})
        for i, count in enumerate(np.bincount(at, minlength=len(queries)).tolist()):
            if count:
                counts[queries[i]] = counts.get(queries[i], 0) + count
        self._come.append((schema.origin, *halves(queries, at), users, names, since))

    def remove(self, table: int, query: Asked, user: str, name: str) -> None:
        counts = self._counts.setdefault((table, ""), {})
        counts[query] = counts.get(query, 0) - 1
        self._gone.append((table, query.high, query.low, user, name))

    def write(self, txn: Txn) -> None:
        cells, asks = dict[tuple[int, str], list[int]](), dict[tuple[int, str, int, int], list[int]]()
        for (table, _), counts in self._counts.items():
            for query, count in counts.items():
                for cell in query.cells:
                    for counted in (cell, "#" + dimension_of(cell)):
                        cells.setdefault((table, counted), [0, 0])[not query.exact] += count
                for cell in query.cells or _NO_CELLS:
                    asks.setdefault((table, cell, query.high, query.low), [0, int(query.exact)])[0] += count
        self._name_queries(txn)
        _write(txn, CELLS, cells)
        _write(txn, ASKS, asks)
        for *keys, since in self._come:
            txn.write_deltas(MEMBERS, keys, {"since": since}, barrier=Barrier.RESTART)
        _write(txn, MEMBERS, {key: [0] for key in self._gone}, barrier=Barrier.DELETE)

    def _name_queries(self, txn: Txn) -> None:
        for (table, name), counts in self._counts.items():
            come = [query for query, count in counts.items() if count > 0]
            if not come or not name:
                continue
            keys = [(table, query.high, query.low) for query in come]
            maybe = txn.maybe_there(QUERIES, [[*column] for column in zip(*keys, strict=True)])
            there = {
                i for i, is_there in zip(maybe, txn.has(QUERIES, [keys[i] for i in maybe]), strict=True) if is_there
            }
            for i, query in enumerate(come):
                if i not in there:
                    values = {"name_of_table": name, "query": query.text, "places": query.places}
                    txn.put(QUERIES, keys[i], values)


def halves(queries: Sequence[Asked], at: Array) -> tuple[Array, Array]:
    """Columns of their names, where each row has one of these queries."""
    high, low = (np.array([getattr(each, half) for each in queries], np.int64)[at] for half in ("high", "low"))
    return high, low


_as_text: Final = json.JSONEncoder(separators=(",", ":")).encode


def _int(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _write(txn: Txn, schema: TableSchema, rows: Mapping[Any, Sequence[int]], barrier: Barrier = Barrier.PATCH) -> None:
    if rows:
        keys = [[*column] for column in zip(*rows, strict=True)]
        values = zip((column.name for column in schema.columns), zip(*rows.values(), strict=True), strict=True)
        txn.write_deltas(schema, keys, dict(values), barrier=barrier)


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


_Query = tuple[int, int]
"""Its name: ``high`` and ``low``."""


class Index:
    """Thread safe."""

    def __init__(self, store: Store, selecting: Callable[[TableSchema, str], Expr | None]) -> None:
        """``selecting``: the predicate of a stored query."""
        self._store = store
        self._selecting = selecting
        self._known_asks: dict[tuple[int, int, _Query], Expr | None] = {}
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
        queries = [query for cell in exact for query, _ in self._queries(lease, schema, cell, exact=True)]
        found: list[dict[str, str]] = []
        for query in (*queries, *(query for query, _, _ in asked)):
            if len(found) < limit:
                wanted = Scan(prefix=(schema.origin, *query), columns=("user", "name"), limit=limit - len(found))
                found += [row for batch in self._store.scan(lease, MEMBERS, wanted) for row in batch.to_pylist()]
        return found

    def _selected(
        self, lease: Lease, schema: TableSchema, batch: pa.RecordBatch
    ) -> tuple[Array, list[str], list[tuple[_Query, int, Array]]]:
        """How many subscriptions select each event by a cell alone, and these cells; and (query, members, events)."""
        counts, exact = np.zeros(batch.num_rows, np.int64), list[str]()
        candidates: dict[_Query, tuple[int, list[Array]]] = {}
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
                for query, members in self._queries(lease, schema, found.cells[at], exact=False):
                    candidates.setdefault(query, (members, []))[1].append(rows)
        return counts, exact, list(self._asked(lease, schema, batch, candidates)) if candidates else []

    def _asked(
        self,
        lease: Lease,
        schema: TableSchema,
        batch: pa.RecordBatch,
        candidates: dict[_Query, tuple[int, list[Array]]],
    ) -> Iterator[tuple[_Query, int, Array]]:
        """Predicates are asked about the events that have one of their cells."""
        types, listed = types_of(schema), RowColumns(stored_rows(batch))
        predicates = self._predicates(lease, schema, [*candidates])
        for query, (members, parts) in candidates.items():
            rows = np.unique(np.concatenate(parts))
            try:
                where = self._store.hierarchies.resolved_at(lease, schema, predicates[query])
                if where is not None:
                    rows = _selected(batch, listed, where, types, rows)
            except InvalidArgument:  # its hierarchy is gone, or has too much below the value
                continue
            if len(rows):
                yield query, members, rows

    def _predicates(self, lease: Lease, schema: TableSchema, queries: Sequence[_Query]) -> dict[_Query, Expr | None]:
        known, of = self._known_asks, (schema.id, schema.altered_ts)
        found: dict[_Query, Expr | None] = {}
        for query in queries:
            with contextlib.suppress(KeyError):  # others may empty it meanwhile
                found[query] = known[*of, query]
        unknown = [query for query in queries if query not in found]
        rows = self._store.reads.get(lease, QUERIES, [(schema.origin, *query) for query in unknown]) if unknown else ()
        for query, row in zip(unknown, rows, strict=True):
            assert row is not None
            found[query] = self._selecting(schema, row["query"])
            if len(known) >= _ASKS_KNOWN:
                known.clear()
            known[*of, query] = found[query]
        return found

    # -- rows --------------------------------------------------------------------------------------------

    def _dimensions(self, lease: Lease, schema: TableSchema) -> list[Dimension]:
        wanted = Scan(start=(schema.origin, "#"), end=(schema.origin, "$"))
        rows = [row for batch in self._store.scan(lease, CELLS, wanted) for row in batch.to_pylist()]
        return [Dimension.parse(row["cell"][1:]) for row in rows if row["exact"] or row["asks"]]

    def _queries(self, lease: Lease, schema: TableSchema, cell: str, *, exact: bool) -> Iterator[tuple[_Query, int]]:
        """Those of a cell, and how many subscriptions have each."""
        wanted = Scan(prefix=(schema.origin, cell), columns=("high", "low", "members", "exact"))
        for batch in self._store.scan(lease, ASKS, wanted):
            for high, low, members, says_all in zip(*(batch.column(i).to_pylist() for i in range(4)), strict=True):
                if members and says_all == exact:
                    yield (high, low), members

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
        known = dict[Any, int]()
        for i, of_value in enumerate(self._ways(lease, schema, dimension, distinct)):
            for each in of_value:
                if (place := known.get(each)) is None:
                    cell = cell_of(dimension, number(each))
                    place = known[each] = cells.setdefault(cell, len(cells))
                values.append(i)
                at.append(place)
        return _Found(codes, np.array(values, np.int64), np.array(at, np.int64), list(cells), len(distinct))

    def _ways(
        self, lease: Lease, schema: TableSchema, dimension: Dimension, values: Sequence[Any]
    ) -> Iterable[Iterable[Any]]:
        """From values to those of their cells."""
        kind, column, detail = dimension
        if kind in ("u", "c"):
            type_ = schema.column(column).type
            return self._store.hierarchies.walks(lease, detail, type_, "covers" if kind == "u" else "under", values)
        if kind == "p":
            length = int(detail)
            return ((value[:length],) if len(value) >= length else () for value in values)
        if kind == "r":
            level = int(detail)
            return ((number(value) >> level,) for value in values)
        return ((value,) for value in values)


def _selected(
    batch: pa.RecordBatch, listed: RowColumns, where: Expr, types: Mapping[str, ColumnType], rows: Array
) -> Array:
    """Which of these rows a predicate selects: none for which it is out of range, whatever it is for those beside."""
    if len(rows) < _FEW:
        with contextlib.suppress(OutOfRange):
            return listed.select(where, types, rows)
    asked = batch.select(sorted(names(where)) or batch.schema.names[:1]).take(pa.array(rows))
    values, _ = attempted(asked, where, types)
    return rows[true_places(values)]


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
