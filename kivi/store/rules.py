"""Declaring and dropping rules: transactions on the rows of the catalog, and on the events that are there already.

A rule that is created at CTS c judges, with every other that is there then, what commits enter after c. ``backfill``
judges what was committed up to c, as events of one commit, against one snapshot: what it raises and the mark that it
was done are one transaction, so it is done once or not at all.

The tables that a rule names stay while it is there: each is guarded as it is created, and a drop looks for rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kivi.errors import AlreadyExists, Conflict, InvalidArgument, NotFound, RowExists
from kivi.model.rules import Rule, check_acyclic, declared_rule
from kivi.mvcc.leases import Lease
from kivi.store.catalog import COUNTERS, FIRST_ID, JUDGED, NAMES, TABLES, Catalog
from kivi.store.commits import Commits
from kivi.store.reads import Reads
from kivi.store.tables import Tables
from kivi.store.transaction import Txn

__all__ = ["Rules"]


@dataclass(slots=True)
class Rules:
    """Thread safe."""

    catalog: Catalog
    commits: Commits
    reads: Reads
    tables: Tables
    transaction: Callable[[], Txn]
    begin: Callable[[], Lease]
    release: Callable[[Lease], None]
    check_open: Callable[[], None]

    def create(self, rule: Rule) -> Rule:
        """Raises AlreadyExists, NotFound, SchemaError, InvalidArgument."""
        with self.tables.lock:
            while True:
                self.check_open()
                txn = self.transaction()
                try:
                    return self._create(rule, txn)
                except Conflict:
                    self.commits.wait_for_entered(1.0)
                except RowExists:
                    raise AlreadyExists(f"there is a rule {rule.name!r} already: drop it first") from None
                finally:
                    self.commits.rollback(txn)

    def _create(self, rule: Rule, txn: Txn) -> Rule:
        view = self.catalog.entered  # after the snapshot: a change in between conflicts
        others = list(view.rules.values())
        if any(each.name == rule.name for each in others):
            raise AlreadyExists(f"there is a rule {rule.name!r} already: drop it first, or use another name")
        counter = txn.get(COUNTERS, [("table",)])[0]
        rule_id = (counter["value"] if counter else FIRST_ID - 1) + 1
        declared = dataclasses.replace(declared_rule(rule, view.table), id=rule_id)
        check_acyclic(declared, others)
        for name in declared.tables:
            table = view.table(name)
            if table.state == "building":
                raise InvalidArgument(f"{name!r} is still being built: declare rule {rule.name!r} when it is ready")
            txn.guard(TABLES, (table.id,), "name")
        txn.insert(NAMES, (_name(rule.name),), {"id": rule_id})
        txn.put(TABLES, (rule_id,), {"name": _name(rule.name), "definition": declared.to_json()})
        txn.put(COUNTERS, ("table",), {"value": rule_id})
        return dataclasses.replace(declared, created_ts=self.commits.commit_wait(txn))

    def drop(self, name: str) -> None:
        """What it raised stays. Raises NotFound."""
        with self.tables.lock:
            while True:
                self.check_open()
                txn = self.transaction()
                try:
                    rule = self._rule(name)
                    txn.delete(TABLES, (rule.id,))
                    txn.delete(NAMES, (_name(name),))
                    txn.delete(JUDGED, (rule.id,))
                    self.commits.commit_wait(txn)
                    return
                except Conflict:
                    self.commits.wait_for_entered(1.0)
                finally:
                    self.commits.rollback(txn)

    def _rule(self, name: str) -> Rule:
        for rule in self.catalog.entered.rules.values():
            if rule.name == name:
                return rule
        known = ", ".join(sorted(rule.name for rule in self.catalog.entered.rules.values())) or "none yet"
        raise NotFound(f"there is no rule {name!r}; rules are: {known}")

    def listed(self) -> list[tuple[Rule, dict[str, Any]]]:
        """Each rule by name, with its description and what became of the events that it judged: see
        ``kivi.store.judging``."""
        self.check_open()
        rules = sorted(self.catalog.visible.rules.values(), key=lambda rule: rule.name)
        lease = self.begin()
        try:
            counted = self.reads.get(lease, JUDGED, [(rule.id,) for rule in rules]) if rules else []
        finally:
            self.release(lease)
        names = [column.name for column in JUDGED.columns]
        none = dict.fromkeys(names, 0)
        return [
            (rule, rule.description() | {name: (row or none)[name] for name in names})
            for rule, row in zip(rules, counted, strict=True)
        ]


def _name(name: str) -> str:
    return f"rule:{name}"
