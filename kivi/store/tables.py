"""Creating, redefining and dropping tables: transactions on the rows of the catalog."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kivi.errors import AlreadyExists, Conflict, InvalidArgument, NotFound, RowExists
from kivi.model.schema import TableSchema
from kivi.store.catalog import COUNTERS, FIRST_ID, NAMES, TABLES, Catalog, dated
from kivi.store.commits import Commits
from kivi.store.transaction import Txn

__all__ = ["Tables"]


@dataclass(slots=True)
class Tables:
    """Thread safe. ``lock``: one change of the catalog at a time enters from here."""

    catalog: Catalog
    commits: Commits
    transaction: Callable[[], Txn]
    check_open: Callable[[], None]
    lock: threading.RLock = field(default_factory=threading.RLock)

    def create(self, schemas: Sequence[TableSchema]) -> list[TableSchema]:
        """Creates tables, all in one commit or none; aggregates and views are building then, and have what later
        commits derive.

        Raises AlreadyExists, and NotFound if a source has gone.
        """
        with self.lock:
            self.check_open()
            for schema in schemas:
                if schema.name in self.catalog.entered.by_name:
                    raise AlreadyExists(f"there is a table {schema.name!r} already: drop it first, or use another name")
            return self._define(schemas)

    def _define(self, schemas: Sequence[TableSchema]) -> list[TableSchema]:
        """One catalog transaction: names, counter, definitions. Repeated if another one came in between."""
        while True:
            try:
                return self._define_once(schemas)
            except Conflict:
                for schema in schemas:
                    if schema.name in self.catalog.entered.by_name:
                        raise AlreadyExists(f"a table {schema.name!r} was created at the same moment") from None
                    gone = [s for s in _sources(schema) if s not in self.catalog.entered.by_name]
                    if gone:
                        raise NotFound(f"the source {gone[0]!r} was dropped meanwhile") from None

    def _define_once(self, schemas: Sequence[TableSchema]) -> list[TableSchema]:
        txn = self.transaction()
        try:
            counter = txn.get(COUNTERS, [("table",)])[0]
            last_id = counter["value"] if counter else FIRST_ID - 1
            guarded: set[int] = set()
            defined = []
            for table_id, schema in enumerate(schemas, last_id + 1):
                sources = [self._source(schema, name).id for name in _sources(schema)]
                if sources:  # the event table comes first; it may have been overwritten a moment ago
                    schema = dataclasses.replace(schema, source_id=sources[0], state="building")
                defined.append(dataclasses.replace(schema, id=table_id))
                txn.insert(NAMES, (schema.name,), {"id": table_id})
                txn.put(TABLES, (table_id,), {"name": schema.name, "definition": defined[-1].to_json().decode()})
                guarded.update(sources)
            txn.put(COUNTERS, ("table",), {"value": last_id + len(schemas)})
            for source_id in guarded:
                txn.guard(TABLES, (source_id,), "name")
            created_ts = self.commits.commit_wait(txn)
        except RowExists:
            names = ", ".join(schema.name for schema in schemas)
            raise AlreadyExists(f"a table of {names} was created at the same moment") from None
        finally:
            self.commits.rollback(txn)
        return [dataclasses.replace(schema, created_ts=created_ts) for schema in defined]

    def _source(self, schema: TableSchema, name: str) -> TableSchema:
        source = self.catalog.entered.table(name)
        if source.state == "building":  # which may fail
            raise InvalidArgument(f"{name!r} is still being built: declare {schema.name!r} over it when it is ready")
        return source

    def redefine(self, built: Sequence[tuple[TableSchema, Sequence[int]]]) -> list[TableSchema]:
        """Makes tables readable in one commit; each with the stages that hold the sums of its backfill.

        Returns them as they are then. Raises NotFound if one of the tables was dropped meanwhile, or built by another
        node: as of the transaction's snapshot, behind which nobody else may define it.
        """
        txn = self.transaction()
        try:
            for schema, commit_runs in built:
                known = txn.get(TABLES, [(schema.id,)])[0]
                if known is None or not TableSchema.from_json(known["definition"].encode()).is_building:
                    raise NotFound(f"table {schema.name!r} was dropped or built meanwhile")
                txn.put(TABLES, (schema.id,), {"name": schema.name, "definition": schema.to_json().decode()})
                if txn.get(NAMES, [(schema.name,)])[0] != {"name": schema.name, "id": schema.id}:
                    raise NotFound(f"table {schema.name!r} was dropped meanwhile")
                txn.guard(NAMES, (schema.name,), "id")
                txn.run_stages[schema.id] = list(commit_runs)
            created_ts = self.commits.commit_wait(txn)
            return [dataclasses.replace(schema, created_ts=created_ts) for schema, _ in built]
        finally:
            self.commits.rollback(txn)

    def begun(self) -> Txn:
        """A transaction of the catalog. Raises Closed."""
        self.check_open()
        return self.transaction()

    def alter(
        self, name: str, altered: Callable[[TableSchema], TableSchema], commit_runs: Sequence[int] = ()
    ) -> TableSchema:
        """Replaces the definition of a table by what ``altered`` makes of it, while it is read and written.

        ``altered`` may be called again, if somebody else changed the definition meanwhile. ``commit_runs``: stages of
        runs that apply with it. Returns the definition as it is then. Raises NotFound, and what ``altered`` raises.
        """

        def work(txn: Txn) -> TableSchema:
            schema = altered(self.catalog.entered.table(name))  # after the snapshot: one in between conflicts
            txn.put(TABLES, (schema.id,), {"altered": schema.to_json().decode()})
            txn.guard(NAMES, (name,), "id")
            txn.run_stages[schema.id] = list(commit_runs)
            return dated(schema, self.commits.commit_wait(txn))

        with self.lock:
            return self.commits.again(self.begun, work)

    def drop(self, name: str) -> None:
        """Drops a table and its rows. InvalidArgument while aggregates, views or rules depend on it."""
        self.drop_those(lambda: [self.catalog.entered.table(name)])

    def drop_those(self, wanted: Callable[[], Sequence[TableSchema]]) -> None:
        """Drops the tables that ``wanted`` finds among those that are there, in one commit: it conflicts with any other
        change of them from there on, and then ``wanted`` looks again."""

        def work(txn: Txn) -> None:
            schemas = wanted()  # after the snapshot: one in between conflicts
            if not schemas:
                return
            for schema in schemas:
                together = {each.id for each in schemas}
                dependent = [each.name for each in self._dependent(schema) if each.id not in together]
                if dependent:
                    raise InvalidArgument(f"{schema.name!r} is the source of {', '.join(dependent)}: drop these first")
                rules = [rule for rule in self.catalog.entered.rules.values() if schema.name in rule.tables]
                if rules:
                    names = ", ".join(rule.name for rule in rules)
                    raise InvalidArgument(f"{schema.name!r} is named by the rules {names}: drop these first")
                txn.delete(TABLES, (schema.id,))
                txn.delete(NAMES, (schema.name,))
            self.commits.commit_wait(txn)

        with self.lock:
            self.commits.again(self.begun, work)

    def _dependent(self, schema: TableSchema) -> list[TableSchema]:
        """The aggregates and views that were declared over this table."""
        aggregates = self.catalog.entered.aggregates
        if schema.kind == "aggregate":
            return [each for each in aggregates.get(schema.source_id, ()) if each.declared_source == schema.name]
        return [*aggregates.get(schema.id, ()), *self.catalog.entered.views.get(schema.id, ())]


def _sources(schema: TableSchema) -> list[str]:
    """What an aggregate or a view is of, and was declared over, by name."""
    return [name for name in (schema.source, schema.declared_source) if name is not None]
