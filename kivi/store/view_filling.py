"""Filling a secondary view of a table that has rows already: exact, while writers go on, without a write lock.

::

    c    catalog commit: the view is BUILDING and unreadable. Every commit that enters the log after c derives what it
         does to the view; where a row is not in the view yet, it puts the whole row there (``kivi.store.view_rows``)
    ...  the rows of the source are gone through in the order of their keys, in transactions like any others: each
         reads some rows at its S, puts those into the view that are not there yet, and guards the rows it has read
    b    a catalog commit makes the view readable

So a row enters the view once, whole, by a writer or from here, whoever is first; the other one conflicts, by the guard
or by the row of the view, and looks again. From then on writers keep it as the source has it. When the last row has
been gone through, all are there. A conflict names its row: those before it are committed, and then it alone, so that a
table with rows that are written all the time is filled at the same pace. Memory holds one transaction's rows.

A crash on the way leaves a BUILDING view; opening the store goes through the source again, in the background, and
leaves what is there. Snapshots below b do not see the view. If two rows come under one key of a unique view, the view
is dropped again: RowExists names it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kivi.delta.rekeying import Rekeying
from kivi.encoding.base_rows import Version
from kivi.encoding.keys import encode_key
from kivi.errors import Conflict, NotFound
from kivi.model.schema import TableSchema
from kivi.mvcc.leases import Lease
from kivi.mvcc.snapshot import Reader
from kivi.mvcc.verdict import EXISTENCE, Guard
from kivi.store.catalog import Catalog
from kivi.store.commits import Commits
from kivi.store.snapshots import Snapshots
from kivi.store.tables import Tables
from kivi.store.transaction import Txn
from kivi.store.view_rows import taken_key

__all__ = ["ViewFilling"]

_ROWS: Final = 8_192
Rows = list[tuple[bytes, Version]]


class Filled(Protocol):
    """The parts of a store that it is done with."""

    catalog: Catalog
    commits: Commits
    reader: Reader
    snapshots: Snapshots

    def transaction(self, lease: Lease | None = None) -> Txn: ...


@dataclass(frozen=True, slots=True)
class ViewFilling:
    """Fills views."""

    store: Filled
    tables: Tables

    def fill(self, view: TableSchema, progress: Callable[[int, int], None] | None = None) -> TableSchema:
        """Puts the rows that its source had at its catalog commit into the view, and makes it readable.

        ``progress(rows that it has gone through, 0)``. Returns its definition then. Raises RowExists, and NotFound
        if it was dropped meanwhile.
        """
        after: bytes | None = None
        rows, done = _ROWS, 0
        while True:
            found, conflict = self._fill_some(view, after, rows)
            if conflict is None:
                done += len(found)
                if progress is not None:
                    progress(done, 0)
                if len(found) < rows:
                    break
                after, rows = found[-1][0] + b"\0", _ROWS
            else:
                rows = max(1, _place_of(conflict, found))
                self.store.commits.wait_for_entered(1.0)
        return self.tables.redefine([(dataclasses.replace(view, state="ready"), [])])[0]

    def _fill_some(self, view: TableSchema, start: bytes | None, count: int) -> tuple[Rows, bytes | None]:
        """Up to so many rows of the source from ``start`` on: those that were read, and the key that conflicted.

        If it has conflicted, nothing was written.
        """
        store = self.store
        source = store.catalog.schema_of(view.source_id)
        if source is None or view.id not in store.catalog.entered.by_id:
            raise NotFound(f"view {view.name!r} or its source was dropped meanwhile", table=view.name)
        way = Rekeying.of(view, source)
        txn = store.transaction(store.snapshots.begin(min_snapshot=view.created_ts))
        try:
            rows = list(itertools.islice(store.reader.scan(txn.lease, source, start, None), count))
            keyed = {key: (way.key_of(way.values_of(key), row), row) for key, row in rows}
            wanted = sorted({at for at, _ in keyed.values() if at is not None})
            there = dict(zip(wanted, store.reader.get(txn.lease, view, wanted), strict=True))
            for key, (at, row) in keyed.items():
                values = way.values_of(key)
                if at is None or ((other := there[at]) is not None and way.is_of(values, other)):
                    continue
                if other is not None or (view.id, at) in txn.rows:
                    raise taken_key(view, at)
                txn.rows[view.id, at] = way.row_of(values, row)
                # One row alone may be written all the time, but for these cells, whose writers derive it too.
                cells = sorted(way.observed) if len(rows) == 1 and way.observed else [EXISTENCE]
                txn.guards.update(Guard(source.id, key, cell) for cell in cells)
            if txn.rows:
                txn.schemas |= {view.id: view, source.id: source}
                store.commits.commit_wait(txn)
            return rows, None
        except Conflict as conflict:
            return rows, _conflicting(conflict, source, view, keyed)
        finally:
            txn.rollback()


def _conflicting(
    conflict: Conflict, source: TableSchema, view: TableSchema, keyed: dict[bytes, tuple[bytes | None, Version]]
) -> bytes:
    """The row of the source that a conflict is about; b"" if it is about none of them."""
    of = {source.name: source, view.name: view}.get(conflict.table)
    if of is None or not conflict.key:
        return b""
    stored = of.stored_key(conflict.key)
    at = encode_key([column.type for column in of.key], stored)
    return next((key for key, (in_view, _) in keyed.items() if at in (key, in_view)), b"")


def _place_of(conflicting: bytes, rows: Rows) -> int:
    """How many of the rows stand before it; half of them if it is none."""
    return next((i for i, (key, _) in enumerate(rows) if key == conflicting), len(rows) // 2)
