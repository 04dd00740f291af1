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

    def create(self, schema: TableSchema) -> TableSchema:
        """Creates a table; an aggregate is building then, and has deltas of all commits after that.

        Raises AlreadyExists, and NotFound if an aggregate's source has gone.
        """
        with self.lock:
            self.check_open()
            if schema.name in self.catalog.entered.by_name:
                raise AlreadyExists(f"there is a table {schema.name!r} already: drop it first, or use another name")
            if schema.kind == "aggregate":
                source = self.catalog.entered.table(schema.source or "")
                schema = dataclasses.replace(schema, source_id=source.id, state="building")
            return self._define(schema)

    def _define(self, schema: TableSchema) -> TableSchema:
        """One catalog transaction: name, counter, definition. Repeated if another one came in between."""
        while True:
            try:
                return self._define_once(schema)
            except Conflict:
                if schema.name in self.catalog.entered.by_name:
                    raise AlreadyExists(f"a table {schema.name!r} was created at the same moment") from None
                if schema.kind == "aggregate" and schema.source not in self.catalog.entered.by_name:
                    raise NotFound(f"the source {schema.source!r} was dropped meanwhile") from None

    def _define_once(self, schema: TableSchema) -> TableSchema:
        txn = self.transaction()
        try:
            counter = txn.get(COUNTERS, [("table",)])[0]
            table_id = (counter["value"] if counter else FIRST_ID - 1) + 1
            if schema.kind == "aggregate":  # which may have been overwritten a moment ago
                schema = dataclasses.replace(schema, source_id=self.catalog.entered.table(schema.source or "").id)
            defined = dataclasses.replace(schema, id=table_id)
            txn.put(COUNTERS, ("table",), {"value": table_id})
            txn.insert(NAMES, (schema.name,), {"id": table_id})
            txn.put(TABLES, (table_id,), {"name": schema.name, "definition": defined.to_json().decode()})
            if schema.source_id:
                txn.guard(TABLES, (schema.source_id,), "name")
            created_ts = self.commits.commit_wait(txn)
        except RowExists:
            raise AlreadyExists(f"a table {schema.name!r} was created at the same moment") from None
        finally:
            self.commits.rollback(txn)
        return dataclasses.replace(defined, created_ts=created_ts)

    def redefine(self, schema: TableSchema, commit_runs: Sequence[int] = ()) -> TableSchema:
        """Replaces a definition; for a finished backfill, together with the stages that hold its sums.

        Returns it as it is then. Raises NotFound if the table was dropped meanwhile.
        """
        txn = self.transaction()
        try:
            txn.put(TABLES, (schema.id,), {"name": schema.name, "definition": schema.to_json().decode()})
            if txn.get(NAMES, [(schema.name,)])[0] != {"name": schema.name, "id": schema.id}:
                raise NotFound(f"table {schema.name!r} was dropped meanwhile")
            txn.guard(NAMES, (schema.name,), "id")
            txn.run_stages[schema.id] = list(commit_runs)
            return dataclasses.replace(schema, created_ts=self.commits.commit_wait(txn))
        finally:
            self.commits.rollback(txn)

    def alter(
        self, name: str, altered: Callable[[TableSchema], TableSchema], commit_runs: Sequence[int] = ()
    ) -> TableSchema:
        """Replaces the definition of a table by what ``altered`` makes of it, while it is read and written.

        ``altered`` may be called again, if somebody else changed the definition meanwhile. ``commit_runs``: stages of
        runs that apply with it. Returns the definition as it is then. Raises NotFound, and what ``altered`` raises.
        """
        with self.lock:
            while True:
                self.check_open()
                txn = self.transaction()
                try:
                    schema = altered(self.catalog.entered.table(name))  # after the snapshot: one in between conflicts
                    txn.put(TABLES, (schema.id,), {"altered": schema.to_json().decode()})
                    txn.guard(NAMES, (name,), "id")
                    txn.run_stages[schema.id] = list(commit_runs)
                    return dated(schema, self.commits.commit_wait(txn))
                except Conflict:
                    self.commits.wait_for_entered(1.0)
                finally:
                    self.commits.rollback(txn)

    def drop(self, name: str, *, only_id: int | None = None) -> None:
        """Drops a table and its rows. InvalidArgument while aggregates depend on it.

        With ``only_id`` it does nothing if the name belongs to another table by now.
        """
        with self.lock:
            self.check_open()
            while True:
                txn = self.transaction()
                try:
                    if only_id is not None and only_id not in self.catalog.entered.by_id:
                        return
                    schema = self.catalog.entered.table(name)  # after the snapshot: one in between conflicts
                    dependent = self.catalog.entered.aggregates.get(schema.id, ())
                    if dependent:
                        names = ", ".join(aggregate.name for aggregate in dependent)
                        raise InvalidArgument(f"{name!r} is the source of {names}: drop these first")
                    txn.delete(TABLES, (schema.id,))
                    txn.delete(NAMES, (name,))
                    self.commits.commit_wait(txn)
                    return
                except Conflict:
                    self.commits.wait_for_entered(1.0)  # the next attempt begins after the commits in flight
                finally:
                    self.commits.rollback(txn)
