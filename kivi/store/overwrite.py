"""Overwriting a table: its whole content is replaced in one commit.

The table starts a new *generation*: the same definition under a new id, empty. So nothing of the old content has to be
touched by the commit, however much there is, and no reader can see some of both::

    one log record at c    definitions  old ids deleted, new ids put; the names point to the new ids
                           content      what the transaction writes to the table, under the new id
                           aggregates   new generations too, whose deltas are derived from the new events, by the commit
                           views        likewise, of the new rows

* A snapshot at c or later finds the new ids, one before it the old ones (``Catalog.table``): old content, or, once no
  lease that was open before c needs it, SNAPSHOT_TOO_OLD. After a restart no such lease is there.
* A transaction that began before c and wrote the old content meets the deleted definition in its schema guard and
  conflicts; one that entered the log before c is overwritten with the rest.
* The other way round, a transaction that has read anything conflicts with whatever was committed to the table since it
  began: else it would overwrite what it has not seen. One that only overwrites, and has read nothing, has no use for a
  snapshot: it *begins as it enters the log* (``blind``), so that a table which is written all the time can be
  overwritten all the same. Its record says so, and the verdict stays a function of the records.
* New ids are taken from the entered catalog, whose version is compared as the commit enters: two overwrites that meet
  do not take the same, and the later one is derived again, on what the first one left: the last one stays.
* An aggregate or a view that was still being built is complete in its new generation: there is nothing older to sum.
* A table with ``retention`` or ``history`` begins anew with both: no floor, and no older version.

Callers and stages name a table by its *origin*, the id of its first generation. Stages made before an overwrite can be
committed after it: they were never part of any content.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from kivi.delta.ops import Barrier, RowOp, then_delete
from kivi.encoding.keys import encode_key
from kivi.model.schema import TableSchema
from kivi.store.catalog import COUNTERS, NAMES, TABLES, View, definition_row, table_key

__all__ = ["Generations", "new_generations"]

Row = tuple[int, bytes, RowOp]


@dataclass(slots=True)
class Generations:
    """The tables that one commit overwrites, by the ids that its transaction uses.

    ``of``: the new definition of a table; ``aggregates`` and ``views``: those of what is declared over it; ``rows``:
    the operations on the catalog.
    """

    of: dict[int, TableSchema] = field(default_factory=dict)
    aggregates: dict[int, tuple[TableSchema, ...]] = field(default_factory=dict)
    views: dict[int, tuple[TableSchema, ...]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def id(self, table: int) -> int:
        """Under which id a commit writes what its transaction wrote to ``table``."""
        new = self.of.get(table)
        return table if new is None else new.id

    def aggregates_of(self, table: int, view: View) -> tuple[TableSchema, ...]:
        return self.aggregates[table] if table in self.of else view.aggregates.get(table, ())

    def views_of(self, table: int, view: View) -> tuple[TableSchema, ...]:
        return self.views[table] if table in self.of else view.views.get(table, ())

    def origin(self, table: int, view: View) -> int:
        """By which id stages name the table that the commit writes under this one."""
        new = next((schema for schema in self.of.values() if schema.id == table), None)
        return (new or view.by_id[table]).origin


_NONE: Final = Generations()


def new_generations(view: View, overwritten: Collection[TableSchema]) -> Generations:
    """The next generations of these tables, their aggregates and views, and the catalog rows that bring them about.

    One that was overwritten since its transaction looked it up is overwritten once more. Those that are not there any
    more are left out: the commit will be refused.
    """
    if not overwritten:
        return _NONE
    found = Generations()
    last = view.last_id
    replaced: list[tuple[TableSchema, TableSchema]] = []
    for schema in sorted(overwritten, key=lambda schema: schema.id):
        old = view.by_id.get(schema.id) or view.successor(schema)
        if old is None:
            continue
        last += 1
        new = found.of[schema.id] = _next(old, last)
        replaced.append((old, new))
        for dependent in (*view.aggregates.get(old.id, ()), *view.views.get(old.id, ())):
            last += 1
            ready = dataclasses.replace(dependent, source_id=new.id, state="ready", complete_since_us=None)
            replaced.append((dependent, _next(ready, last)))
        of_new = [s for _, s in replaced if s.source_id == new.id]
        found.aggregates[schema.id] = tuple(s for s in of_new if s.kind == "aggregate")
        found.views[schema.id] = tuple(s for s in of_new if s.kind == "view")
    for old, new in replaced:
        found.rows += [
            (TABLES.id, table_key(old.id), then_delete()),
            definition_row(new),
            (NAMES.id, encode_key([NAMES.key[0].type], (new.name,)), RowOp(Barrier.PATCH, {0: new.id}, {})),
        ]
    if replaced:
        counter = encode_key([COUNTERS.key[0].type], ("table",))
        found.rows.append((COUNTERS.id, counter, RowOp(Barrier.PATCH, {0: last}, {})))
    return found


def _next(schema: TableSchema, table_id: int) -> TableSchema:
    """Nothing is older than it, so every measure that was added, or was being added, is complete in it."""
    alterations = tuple(
        one
        if one.state == "failed"
        else dataclasses.replace(one, state="ready", backfilled=True, floor_us=None, more=())
        for one in schema.alterations
    )
    more = itertools.chain.from_iterable(one.more for one in schema.alterations)
    return dataclasses.replace(
        schema,
        id=table_id,
        origin_id=schema.origin,
        created_ts=0,
        derived=(*schema.derived, *more),
        alterations=alterations,
    )
