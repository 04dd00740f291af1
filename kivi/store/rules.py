"""Declaring and dropping rules: transactions on the rows of the catalog, and on the events that are there already.

A rule that is created at CTS c judges, with every other that is there then, what commits enter after c. ``backfill``
judges what was committed up to c, as events of one commit, against one snapshot: what it raises and the mark that it
was done are one transaction, so it is done once or not at all.

A rule whose judgement is a pattern is declared here as well, with its position; it judges in ``kivi.store.raising``.

The tables that a rule names stay while it is there: each is guarded as it is created, and a drop looks for rules.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import arrow_type
from kivi.delta.derive import Derivation
from kivi.errors import AlreadyExists, InvalidArgument, NotFound, RowExists
from kivi.model.lateness import AUTO_US
from kivi.model.rules import Rule, check_acyclic, declared_rule
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.mvcc.leases import Lease
from kivi.store.catalog import COUNTERS, FIRST_ID, JUDGED, JUDGED_TO, NAMES, RAISED, TABLES, Catalog
from kivi.store.commits import Commits
from kivi.store.judging import Judgement
from kivi.store.lateness import Lateness
from kivi.store.reads import Reads
from kivi.store.tables import Tables
from kivi.store.transaction import Txn

__all__ = ["Rules"]

_STAGED_ROWS: Final = 65_536
_BEFORE_ALL_US: Final = -(2**62)


@dataclass(slots=True)
class Rules:
    """Thread safe."""

    catalog: Catalog
    commits: Commits
    reads: Reads
    tables: Tables
    transaction: Callable[[], Txn]
    begin: Callable[..., Lease]
    release: Callable[[Lease], None]
    check_open: Callable[[], None]
    lateness: Lateness

    def create(self, rule: Rule, *, backfill: bool = False) -> None:
        """Raises AlreadyExists, NotFound, SchemaError, InvalidArgument.

        ``backfill`` of a rule that is there already, exactly so, goes on with one that did not come to its end.
        """
        known = next((each for each in self.catalog.visible.rules.values() if each.name == rule.name), None)
        if known is None or not backfill or known.backfilled or not self._is_same(rule, known):
            known = self._created(dataclasses.replace(rule, backfilled=backfill and rule.match is not None))
        if backfill and known.match is None:
            self._backfill(known)

    def _is_same(self, rule: Rule, known: Rule) -> bool:
        declared = declared_rule(rule, self.catalog.visible.table)
        return dataclasses.replace(declared, id=known.id, created_ts=known.created_ts) == known

    def _backfill(self, rule: Rule) -> None:
        """Judges the events that were committed before the rule was there. What they raise is staged, and is there with
        the mark that it is, in one commit: so what fails is decided of all of it together."""
        then, now = self.begin(as_of_ts=rule.created_ts), self.begin()
        txn = self.transaction()
        stages: list[bytes] = []

        def renew() -> None:
            for lease in (then, now, txn.lease):
                self.commits.leases.renew(lease)

        try:
            view = self.catalog.entered
            source, into = view.table(rule.source), view.table(rule.into)
            judgement = Judgement(self.commits.judging, view, lambda: now, adds_own=False)
            columns, judged = [column.name for column in source.shown_columns], 0
            for batch in self.reads.scan(then, self.catalog.table(rule.source, then.ts), Scan(any_order=True)):
                renew()
                places = np.arange(judged, judged := judged + batch.num_rows)
                judgement.judge(source, Derivation(_named(batch, source, columns), commits=places), only=rule)
            if (raised := judgement.taken(into)) is not None:
                for at in range(0, raised.num_rows, _STAGED_ROWS):
                    renew()
                    part = raised.slice(at, _STAGED_ROWS)
                    stages.append(self.commits.staging.stage_wait(into, part, owner="rules"))
                txn.append_stages(into, stages, drop_late=True)
            judgement.count(txn, rule)
            txn.get(NAMES, [(_name(rule.name),)])
            txn.guard(NAMES, (_name(rule.name),), "id")
            done = dataclasses.replace(rule, backfilled=True)
            txn.put(TABLES, (rule.id,), {"definition": done.to_json()})
            txn.judged_at = now
            self.commits.commit_wait(txn)
        finally:
            self.commits.rollback(txn)
            for lease in (then, now):
                self.release(lease)

    def _created(self, rule: Rule) -> Rule:
        with self.tables.lock:
            try:
                return self.commits.again(self.tables.begun, functools.partial(self._create, rule))
            except RowExists:
                raise AlreadyExists(f"there is a rule {rule.name!r} already: drop it first") from None

    def _create(self, rule: Rule, txn: Txn) -> Rule:
        view = self.catalog.entered  # after the snapshot: a change in between conflicts
        others = list(view.rules.values())
        if any(each.name == rule.name for each in others):
            raise AlreadyExists(f"there is a rule {rule.name!r} already: drop it first, or use another name")
        counter = txn.get(COUNTERS, [("table",)])[0]
        rule_id = (counter["value"] if counter else FIRST_ID - 1) + 1
        declared = dataclasses.replace(declared_rule(rule, view.table), id=rule_id)
        check_acyclic(declared, others)
        if declared.match is not None:
            declared = self._begin(declared, view.table(declared.source), txn)
        for name in declared.tables:
            table = view.table(name)
            if table.state == "building":
                raise InvalidArgument(f"{name!r} is still being built: declare rule {rule.name!r} when it is ready")
            txn.guard(TABLES, (table.id,), "name")
        txn.insert(NAMES, (_name(rule.name),), {"id": rule_id})
        txn.put(TABLES, (rule_id,), {"name": _name(rule.name), "definition": declared.to_json()})
        txn.put(COUNTERS, ("table",), {"value": rule_id})
        return dataclasses.replace(declared, created_ts=self.commits.commit_wait(txn))

    def _begin(self, rule: Rule, source: TableSchema, txn: Txn) -> Rule:
        """A rule whose judgement is a pattern begins with what is decided from now on, or with all events."""
        if rule.lateness_us == AUTO_US:
            rule = dataclasses.replace(rule, lateness_us=self.lateness.auto_us(source))
        newest = self.reads.extreme_time(txn.lease, source, "max")
        now_us = self.commits.committer.now_us()
        clock_us = _BEFORE_ALL_US if newest is None else min(newest, now_us)
        seen, frontier_us = (0, _BEFORE_ALL_US) if rule.backfilled else (txn.start_ts, clock_us - rule.lateness_us)
        position = {"seen": seen, "frontier_us": frontier_us, "now_us": now_us, "clock_us": clock_us, "error": ""}
        txn.insert(JUDGED_TO, (rule.id,), position)
        return rule

    def drop(self, name: str) -> None:
        """What it raised stays. Raises NotFound."""

        def work(txn: Txn) -> None:
            rule = self._rule(name)
            txn.delete(TABLES, (rule.id,))
            txn.delete(NAMES, (_name(name),))
            txn.delete(JUDGED, (rule.id,))
            txn.delete(JUDGED_TO, (rule.id,))
            for batch in txn.scan(RAISED, Scan(prefix=(rule.id,), columns=RAISED.key_names)):
                for row in batch.to_pylist():
                    txn.delete(RAISED, tuple(row.values()))
            self.commits.commit_wait(txn)

        with self.tables.lock:
            self.commits.again(self.tables.begun, work)

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
            keys = [(rule.id,) for rule in rules]
            counted, judged_to = (self.reads.get(lease, table, keys) if keys else [] for table in (JUDGED, JUDGED_TO))
        finally:
            self.release(lease)
        names = [column.name for column in JUDGED.columns]
        none = dict.fromkeys(names, 0)
        return [
            (
                rule,
                rule.description()
                | {name: (row or none)[name] for name in names}
                | {"judged_us": at and at["frontier_us"], "error": at["error"] if at else ""},
            )
            for rule, row, at in zip(rules, counted, judged_to, strict=True)
        ]


def _named(batch: pa.RecordBatch, source: TableSchema, columns: Sequence[str]) -> pa.RecordBatch:
    """The events of a scan as a commit has them: all columns of the table by now, in their order."""
    arrays = [
        batch.column(name)
        if name in batch.schema.names
        else pa.nulls(batch.num_rows, arrow_type(source.column(name).type))
        for name in columns
    ]
    return pa.RecordBatch.from_arrays(arrays, list(columns))


def _name(name: str) -> str:
    return f"rule:{name}"
