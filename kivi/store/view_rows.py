"""Secondary views: what a commit writes to the views of the row tables that it writes.

**The invariant.** At every S a view holds exactly the rows that its source has at S, each under the view's key (but for
those that have a null there). A view's rows are ordinary rows, so what makes the source exact makes them exact:
snapshots, history, consolidation, replay, copies. What is left to hold is that every commit which changes the source
changes the view by the same, in the same record. It is held here, and by the verdict:

::

    prepare    the rows of the source that the commit writes are read at its S; from each, and from the operation on it,
               follows what becomes of it in the view: nothing, the same operation, or one row deleted and one made
    record     these operations, as rows of the commit; guards on the cells of the source that they follow from
    verdict    refuses the commit if one of these cells changed since S (R2): it would have derived something else

So a write of what a view is made of has read the row. It conflicts with a concurrent put of the view's key columns,
and if it moves the row, with every concurrent write of what the view carries; deltas of a carried column flow to the
view as deltas, and still never conflict with each other. A transaction that has not read anything owes nothing to a
snapshot: it is derived at the newest one, and where the verdict refuses that, it is derived again (``commits``), so
that the last of blind puts stays, as without a view. Where a row's key in the view follows from its own key, nothing is
read.

**Unique views.** A row that comes under a new key is a strict insert there: RowExists, naming the view and that key, if
another row is there at S and this commit does not take it away; if one came after S, the rows of the view conflict.

**While a view is built** (``kivi.store.view_filling``) its rows are there in part. A commit that finds a row missing
makes it whole instead of changing it, whoever writes it first; so from then on it is as it will be.

**The road.** Every writer of rows goes through ``Txn.rows`` and ``prepare``, stages and overwrites included, but for
the groups of blind deltas and puts (``groups.Writes``), whose plans leave tables with views out
(``Commits.write_plans``).
Views that were created meanwhile make another catalog, by which the commit is derived again as it enters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kivi.delta.ops import Barrier, RowOp, apply_op
from kivi.delta.rekeying import Rekeying
from kivi.encoding.base_rows import Version
from kivi.errors import NotFound, RowExists, SnapshotTooOld
from kivi.model.schema import TableSchema
from kivi.mvcc.leases import Lease
from kivi.mvcc.snapshot import Reader
from kivi.mvcc.verdict import EXISTENCE, Guard
from kivi.store.catalog import Catalog, View
from kivi.store.overwrite import Generations
from kivi.store.transaction import OWN_CTS, Derived, Txn, caller_key

__all__ = ["ViewRows", "taken_key"]

Rows = Mapping[bytes, RowOp]
_DELETE = RowOp(Barrier.DELETE, {}, {})


@dataclass(slots=True)
class _Changed:
    """A row of the source: its own key, its values, what it was and what it will be, and the operation."""

    key: bytes
    values: tuple[object, ...]
    old: Version | None
    new: Version | None
    op: RowOp


@dataclass(slots=True)
class _InView:
    """The same in one view: its key there before and after."""

    row: _Changed
    old: bytes | None
    new: bytes | None


@dataclass(slots=True)
class _Found:
    """What is derived for one view: operations by key, and of which rows which cells of the source they follow from."""

    ops: dict[bytes, RowOp] = field(default_factory=dict)
    made: list[tuple[bytes, _Changed]] = field(default_factory=list)
    guards: set[Guard] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class ViewRows:
    """Thread safe."""

    catalog: Catalog
    reader: Reader

    def derive(self, txn: Txn, view: View, new: Generations, snapshot: Callable[[], Lease]) -> Derived | None:
        """What a transaction does to views, by the catalog ``view``; None: nothing, and it has read nothing for that.

        ``snapshot`` opens the one to read at, of a transaction that has none. Raises RowExists, SnapshotTooOld.
        """
        if not (view.views or new.views):
            return None
        tables = {table for table, _ in txn.rows if new.views_of(table, view)}
        if not tables:
            return None
        found = Derived()
        by_table: dict[int, dict[bytes, RowOp]] = {table: {} for table in tables}
        for (table, key), op in txn.rows.items():
            if table in tables:
                by_table[table][key] = op
        for table, rows in sorted(by_table.items()):
            source = new.of.get(table) or view.by_id.get(table)
            if source is None:  # it was dropped: the commit will be refused
                continue
            views = new.views_of(table, view)

            def opened() -> Lease:
                found.lease = txn.lease if txn.lease.id else snapshot()
                return found.lease

            at = None if table in txn.overwritten else opened
            for each, of in zip(views, self._of(source, views, rows, at), strict=True):
                found.rows += [(each.id, key, op) for key, op in of.ops.items()]
                found.guards |= of.guards
        return found

    def own_ops(self, txn: Txn, view: TableSchema) -> dict[bytes, RowOp]:
        """What a transaction's own writes do to a view, for its reads; its commit checks that keys are unique."""
        source = self.catalog.schema_of(view.source_id)
        rows = {key: op for (table, key), op in txn.rows.items() if table == view.source_id}
        if source is None or not rows:
            return {}
        at = None if view.source_id in txn.overwritten else lambda: txn.lease
        return self._of(source, [view], rows, at, checked=False)[0].ops

    def _of(
        self,
        source: TableSchema,
        views: Sequence[TableSchema],
        rows: Rows,
        at: Callable[[], Lease] | None,
        *,
        checked: bool = True,
    ) -> list[_Found]:
        """For each of the views what follows from operations on rows of the source. ``at`` opens the snapshot that they
        are read at, if one has to be; None: the source was empty."""
        ways = [Rekeying.of(each, source) for each in views]
        named = {key: ways[0].values_of(key) for key in rows}
        asking = [way for way, each in zip(ways, views, strict=True) if not (way.is_fixed and each.state == "ready")]
        read = [key for key, op in rows.items() if any(way.concerns(op) for way in asking)]
        lease = at() if read and at is not None else None
        olds = dict(zip(read, self.reader.get(lease, source, read), strict=True)) if lease is not None else {}
        changed = {
            key: _Changed(key, named[key], old, apply_op(source, old, OWN_CTS, rows[key]), rows[key])
            for key in read
            for old in [olds.get(key)]
        }
        return [
            self._of_view(source, each, way, rows, named, changed, lease, checked)
            for each, way in zip(views, ways, strict=True)
        ]

    def _of_view(
        self,
        source: TableSchema,
        view: TableSchema,
        way: Rekeying,
        rows: Rows,
        named: Mapping[bytes, tuple[object, ...]],
        changed: Mapping[bytes, _Changed],
        lease: Lease | None,
        checked: bool,
    ) -> _Found:
        found = _Found()
        building = view.state == "building"
        if way.is_fixed and not building:  # and so the row is in the view whenever it is in its source
            for key, op in rows.items():
                at = way.key_of(named[key], Version(OWN_CTS, True, ()))
                assert at is not None
                found.ops[at] = way.same_row(op)
            return found
        inside = [
            _InView(row, way.key_of(row.values, row.old), way.key_of(row.values, row.new))
            for row in changed.values()
            if way.concerns(row.op)
        ]
        there = self._rows_there(view, inside, building, lease)
        for one in inside:
            _derive(found, source, way, one, _is_there(way, one, there) if building else one.old is not None)
        for at, row in found.made:
            if checked and view.unique:
                self._check_unique(view, way, at, row, found, there)
            assert row.new is not None
            found.ops[at] = way.row_of(row.values, row.new)
        return found

    def _rows_there(
        self, view: TableSchema, inside: Iterable[_InView], building: bool, lease: Lease | None
    ) -> dict[bytes, Version]:
        """The rows of the view at the snapshot that say whether others are in the way, or what is not built yet."""
        keys = set[bytes]()
        if building:
            keys = {key for one in inside for key in (one.old, one.new) if key is not None}
        elif view.unique:
            keys = {one.new for one in inside if one.new is not None and one.new != one.old}
        if lease is None or not keys or not self.catalog.is_visible(view.id):
            return {}
        wanted = sorted(keys)
        try:
            versions = self.reader.get(lease, view, wanted)
        except (NotFound, SnapshotTooOld):
            if view.id in self.catalog.entered.by_id:
                raise
            return {}  # it was dropped meanwhile: the commit is derived again without it
        return {key: version for key, version in zip(wanted, versions, strict=True) if version is not None}

    def _check_unique(
        self,
        view: TableSchema,
        way: Rekeying,
        at: bytes,
        row: _Changed,
        found: _Found,
        there: Mapping[bytes, Version],
    ) -> None:
        """Raises RowExists where another row has the key, of this commit or of the snapshot."""
        before = found.ops.get(at)
        other = there.get(at)
        taken = other is not None and before is not _DELETE and not way.is_of(row.values, other)
        if taken or (before is not None and before.barrier is Barrier.RESTART):
            raise taken_key(view, at)


def taken_key(view: TableSchema, key: bytes) -> RowExists:
    """Two rows of the source would come under one key of a unique view."""
    named = caller_key(view, key)
    return RowExists(
        f"two rows of {view.source!r} would be {named!r} in {view.name!r}, which is a unique view; nothing was applied",
        table=view.name,
        key=named,
    )


def _is_there(way: Rekeying, one: _InView, there: Mapping[bytes, Version]) -> bool:
    """Whether the row is in a view that is being built."""
    version = None if one.old is None else there.get(one.old)
    return version is not None and way.is_of(one.row.values, version)


def _derive(found: _Found, source: TableSchema, way: Rekeying, one: _InView, was_there: bool) -> None:
    """Of one row: what becomes of it; rows that are made come last, since others may make room for them."""
    row, op = one.row, one.row.op
    observed: Iterable[int] = way.moving
    if was_there and one.old == one.new and op.barrier is Barrier.PATCH:
        same = way.same_row(op)
        if same.puts or same.deltas:
            assert one.new is not None
            found.ops[one.new] = same
    else:
        if was_there and one.old != one.new:
            assert one.old is not None
            found.ops.setdefault(one.old, _DELETE)
        if one.new is not None:
            found.made.append((one.new, row))
            observed = way.observed
    if op.barrier is Barrier.PATCH:  # others conflict with every write of the row, and it with theirs
        for i in observed:
            if i not in op.puts:
                found.guards.add(Guard(source.id, row.key, i))
        if not way.observed:
            found.guards.add(Guard(source.id, row.key, EXISTENCE))
