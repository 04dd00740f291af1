"""``under`` and ``covers`` at a snapshot: the predicate that they stand for, of plain values.

``under("a")`` is ``isin`` of "a" and of all below it, ``covers("a")`` of "a" and of all above it, as the hierarchy is
at the reader's snapshot, its own writes included. So what a scan selects is a function of S, like everything else; and
pruning, aggregates and the live matcher see an ``isin``.

::

    under    the view by parent, level by level: one range of keys for each row that is found
    covers   the table, row by row, from the value to the top

A row that is its own ancestor ends the walk where it began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kivi.arrow.columns import stored_lists
from kivi.errors import InvalidArgument, NotFound, SchemaError
from kivi.model.expressions import HIERARCHY, Expr, asks_hierarchy
from kivi.model.hierarchies import is_hierarchy
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.model.types import ColumnType
from kivi.mvcc.leases import Lease
from kivi.store.catalog import Catalog
from kivi.store.reads import Reads
from kivi.store.snapshots import Snapshots
from kivi.store.transaction import Txn

__all__ = ["Hierarchies"]

_FOUND_MAX: Final = 100_000
_PARENTS_MAX: Final = 1 << 18
"""About 40 MB."""


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Thread safe."""

    catalog: Catalog
    reads: Reads
    snapshots: Snapshots
    _parents: dict[tuple[int, str], tuple[int, dict[Any, Any]]] = field(default_factory=dict)
    """By table and the column that says what is above a row: as of when, and that of some rows. Of whichever is there,
    so is all that is above it: what was read comes in at once, when nothing is missing."""

    def resolved(self, lease: Lease, schema: TableSchema, wanted: Scan, txn: Txn | None = None) -> Scan:
        """The scan with plain values for what its predicate says of hierarchies.

        Raises SchemaError where there is no such hierarchy, InvalidArgument where too much is below a value.
        """
        if wanted.where is None or not asks_hierarchy(wanted.where):
            return wanted
        return replace(wanted, where=self._plain(wanted.where, lease, schema, txn))

    def resolved_now(self, schema: TableSchema, where: Expr | None) -> Expr | None:
        """``resolved`` of a predicate, at the newest snapshot."""
        if where is None or not asks_hierarchy(where):
            return where
        with self.snapshots.opened() as lease:
            return self._plain(where, lease, schema, None)

    def resolved_at(self, lease: Lease, schema: TableSchema, where: Expr | None) -> Expr | None:
        """``resolved`` of a predicate."""
        return where if where is None or not asks_hierarchy(where) else self._plain(where, lease, schema, None)

    def named_now(self, schema: TableSchema, where: Expr | None) -> Expr | None:
        """The predicate with the names of the hierarchies that it means, at the newest snapshot. Raises SchemaError."""
        if where is None or not asks_hierarchy(where):
            return where
        with self.snapshots.opened() as lease:
            return self._named(where, lease, schema)

    def _named(self, expr: Expr, lease: Lease, schema: TableSchema) -> Expr:
        if expr.op not in HIERARCHY:
            args = tuple(self._named(arg, lease, schema) for arg in expr.args)
            return replace(expr, args=args) if args else expr
        value, name = expr.value
        type_ = schema.output_type(expr.column) if expr.column else expr.args[0].type
        return replace(expr, value=(value, self._hierarchy(lease, name, str(type_))[0].name))

    def walks(
        self, lease: Lease, name: str, type_: ColumnType, op: str, values: Sequence[Any]
    ) -> Iterable[Iterable[Any]]:
        """Of each value the values that ``op`` of it stands for; none where there is no such hierarchy any more."""
        try:
            table, view = self._hierarchy(lease, name, str(type_))
        except SchemaError:
            return [() for _ in values]
        if op == "under":
            return (self._below(lease, table, view, value, None) for value in values)
        parents = self._parents_of(lease, table, view.key[0].name, values)
        return (self._walked(table, value, lambda of: _one_or_none(parents[of])) for value in values)

    def _parents_of(self, lease: Lease, table: TableSchema, parent: str, values: Sequence[Any]) -> dict[Any, Any]:
        """Of these and of all that is above them, by levels. What was read of a table that has not changed since is
        remembered."""
        key = table.id, parent
        ts, known = self._parents.get(key, (0, {}))
        changed = self.reads.reader.pending.changed_at(table.id)
        if not changed <= ts <= lease.ts or len(known) > _PARENTS_MAX:
            known = {}
            if changed <= lease.ts:
                self._parents.clear()  # there is one, as a rule
                self._parents[key] = lease.ts, known
        found: dict[Any, Any] = {}
        level = [value for value in dict.fromkeys(values) if value not in known]
        while level:
            rows = self.reads.get(lease, table, [(value,) for value in level], (parent,))
            found.update((value, row and row[parent]) for value, row in zip(level, rows, strict=True))
            above = dict.fromkeys(found[value] for value in level)
            level = [value for value in above if value is not None and value not in known and value not in found]
        known.update(found)
        return known

    def _plain(self, expr: Expr, lease: Lease, schema: TableSchema, txn: Txn | None) -> Expr:
        if expr.op not in HIERARCHY:
            args = tuple(self._plain(arg, lease, schema, txn) for arg in expr.args)
            return replace(expr, args=args) if args else expr
        value, name = expr.value
        type_ = schema.output_type(expr.column) if expr.column else expr.args[0].type
        table, view = self._hierarchy(lease, name, str(type_))
        walk = self._below if expr.op == "under" else self._above
        return Expr("isin", expr.column, tuple(walk(lease, table, view, value, txn)), expr.args)

    def _hierarchy(self, lease: Lease, name: str, type_name: str) -> tuple[TableSchema, TableSchema]:
        """The table and its view. Without a name it is the only one whose keys are of that type."""
        found = [pair for pair in self._all(lease) if not name or pair[0].name == name]
        fitting = [(table, view) for table, view in found if str(table.key[0].type) == type_name]
        if len(fitting) == 1:
            return fitting[0]
        names = sorted(table.name for table, _ in fitting or found)
        if name and found:
            raise SchemaError(f"the keys of hierarchy {name!r} are no {type_name}, as the column's values are")
        if len(fitting) > 1:
            raise SchemaError(
                f"there are the hierarchies {', '.join(names)}: say which, as in under(..., {names[0]!r})"
            )
        said = repr(name) if name else f"with keys of {type_name}"
        raise SchemaError(f"there is no hierarchy {said}: make one with create_hierarchy")

    def tables(self) -> list[TableSchema]:
        """Those that are hierarchies now."""
        known = self.catalog.visible
        views = [view for view in known.by_id.values() if view.kind == "view"]
        return [
            table for view in views if (table := known.by_id.get(view.source_id or 0)) and is_hierarchy(view, table)
        ]

    def _all(self, lease: Lease) -> Iterable[tuple[TableSchema, TableSchema]]:
        for view in [schema for schema in self.catalog.visible.by_id.values() if schema.kind == "view"]:
            try:
                table, seen = (self.catalog.table(name, lease.ts) for name in (view.source or "", view.name))
            except NotFound:
                continue
            if is_hierarchy(seen, table):
                yield table, seen

    def _below(self, lease: Lease, table: TableSchema, view: TableSchema, value: Any, txn: Txn | None) -> Iterable[Any]:
        key = table.key[0].name

        def children(of: Any) -> Iterable[Any]:
            for batch in self.reads.scan(lease, view, Scan(prefix=(of,), columns=(key,)), txn):
                yield from stored_lists(batch)[key]

        return self._walked(table, value, children)

    def _above(self, lease: Lease, table: TableSchema, view: TableSchema, value: Any, txn: Txn | None) -> Iterable[Any]:
        parent = view.key[0].name

        def parents(of: Any) -> Iterable[Any]:
            (row,) = self.reads.get(lease, table, [(of,)], (parent,), txn)
            return _one_or_none(row and row[parent])

        return self._walked(table, value, parents)

    def _walked(self, table: TableSchema, value: Any, nearest: Callable[[Any], Iterable[Any]]) -> Iterable[Any]:
        found = {value: None}
        for each in (waiting := [value]):  # which grows meanwhile
            for other in nearest(each):
                if other not in found:
                    found[other] = None
                    waiting.append(other)
            if len(found) > _FOUND_MAX:
                raise InvalidArgument(
                    f"more than {_FOUND_MAX:,} rows of {table.name!r} are below {value!r}: ask for parts of them"
                )
        return found


def _one_or_none(value: Any) -> tuple[Any, ...]:
    return () if value is None else (value,)
