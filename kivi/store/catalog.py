"""The catalog: which tables there are. It is kept in rows of the store itself, in system tables.

    1 tables     (id)    -> name, definition, altered   the definitions (JSON); a drop deletes the row
    2 names      (name)  -> id                          two creators of one name conflict here
    3 counters   (name)  -> value                       the last table id; ids are never reused (generations)
    4 late       (table) -> dropped (SUM)               late events left out, by table (kivi.store.retention)
    5 subscriptions (user, name) -> query, position ... durable subscriptions (kivi.live.durable)
    6 retractions (table) -> events                     of the newest retraction: two of one table conflict here
    7 judged     (rule)  -> judged, raised ... (SUM)    what became of the events that each rule judged
   10 alerts     (name)  -> definition, clock ...       alerts, and up to when each is judged (kivi.alerts)
   11 alert_instances (alert, instance) -> state ...    those that are not inactive
   12 alert_notifications (alert, number) -> ...        those that are yet to be delivered
   13 cells      (table, cell) -> exact, asks (SUM)     how many durable subscriptions ask for what (kivi.live.index)
   14 asks       (table, cell, ask) -> query, ...       predicates that are more than their cells say
   15 members    (table, target, user, name) -> since   who asks
      judged_to  (rule)  -> seen, frontier, clock ...   up to when a rule has judged its matches (kivi.store.raising)
      raised     (rule, at, cts, position) -> until     first rows of matches that it has judged, while it may meet them

Rules (``kivi.model.rules``) are definitions among those of tables, with ids of the same counter; their names are theirs
alone, and stand among the others as ``rule:NAME``.

A commit that names a table implies a guard on its definition cell, so it conflicts with a concurrent drop or overwrite.
Creating an aggregate or a view touches only its own row: writers of the source are not disturbed; those that enter
the log after it must have derived with it. So each table has the CTS of its newest *change*: of its definition, of its
retention floor, or of anything that is derived from it; and a commit that was derived before that is derived again
(``Catalog.is_behind``, under the entry lock). Which commits these are says the log alone.

An alteration puts the new definition into a cell of its own, ``altered``, which then stands for ``definition``: so
transactions that have named the table before go on, and their commits are prepared again if they enter after it.

Two views: *entered* (what the next commit must be derived with) changes when a catalog commit enters the log;
*visible* (what readers see) when it has been applied. A definition's ``created_ts`` is the CTS of its newest catalog
commit: a snapshot below it does not see the table.

An overwrite (``kivi.store.overwrite``) deletes definitions and puts those of the next generations in one commit. The
old ones are *replaced*: a snapshot from before that commit finds them (``Catalog.table``), and they are folded and read
like any other, until no snapshot that sees them is open (``release``). Then their rows are erased, as those of a
dropped table.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from kivi.delta.ops import Barrier, RowOp
from kivi.encoding.keys import decode_key, encode_key
from kivi.errors import NotFound, SnapshotTooOld
from kivi.log.features import MATCHES_RAISED, WEIGHTED_QUANTILES
from kivi.model.rules import Rule
from kivi.model.schema import Alteration, Column, TableSchema
from kivi.model.types import ColumnType, shown
from kivi.mvcc.record import Commit
from kivi.mvcc.verdict import Guard
from kivi.states.registry import check_known

__all__ = [
    "ALERTS",
    "ALERT_INSTANCES",
    "ALERT_NOTIFICATIONS",
    "ASKS",
    "CELLS",
    "COUNTERS",
    "EARLIER_SUBSCRIPTIONS",
    "JUDGED",
    "JUDGED_TO",
    "LATE",
    "MEMBERS",
    "NAMES",
    "QUERIES",
    "RAISED",
    "RETRACTIONS",
    "SUBSCRIPTIONS",
    "SYSTEM",
    "TABLES",
    "Catalog",
    "View",
    "changes",
    "dated",
    "definition_row",
    "features_in",
    "features_of",
    "is_judged",
    "schema_guards",
]

_INT: Final = ColumnType("int64")
_TEXT: Final = ColumnType("string")
_BYTES: Final = ColumnType("bytes")
_BOOL: Final = ColumnType("bool")
_HISTORY_US: Final = 600_000_000
"""For so long it can be asked whom an event has reached."""
TABLES: Final = TableSchema(
    "kivi.tables",
    "row",
    (Column("id", _INT),),
    (Column("name", _TEXT), Column("definition", _TEXT), Column("altered", _TEXT)),
    id=1,
    alterations=(Alteration(2),),
)
NAMES: Final = TableSchema("kivi.names", "row", (Column("name", _TEXT),), (Column("id", _INT),), id=2)
COUNTERS: Final = TableSchema("kivi.counters", "row", (Column("name", _TEXT),), (Column("value", _INT),), id=3)
LATE: Final = TableSchema("kivi.late", "row", (Column("table", _INT),), (Column("dropped", _INT, "sum"),), id=4)
EARLIER_SUBSCRIPTIONS: Final = TableSchema(  # as 0.1.0 wrote them
    "kivi.subscriptions",
    "row",
    (Column("user", _TEXT), Column("name", _TEXT)),
    (
        Column("table", _INT),
        Column("name_of_table", _TEXT),
        Column("query", _TEXT),
        Column("since", _INT),
        Column("ts", _INT),
        Column("skip", _INT),
        Column("ttl_us", _INT),
        Column("expires_us", _INT),
        Column("places", _TEXT),
    ),
    id=5,
    alterations=(Alteration(8),),
)
RETRACTIONS: Final = TableSchema("kivi.retractions", "row", (Column("table", _INT),), (Column("events", _INT),), id=6)
JUDGED: Final = TableSchema(
    "kivi.judged",
    "row",
    (Column("rule", _INT),),
    tuple(Column(name, _INT, "sum") for name in ("judged", "raised", "missing", "failed", "late")),
    id=7,
)
ALERTS: Final = TableSchema(
    "kivi.alerts",
    "row",
    (Column("name", _TEXT),),
    (
        Column("definition", _TEXT),
        Column("silenced_us", _INT),
        Column("seen", _INT),
        Column("now_us", _INT),
        Column("clock_us", _INT),
        Column("over_us", _INT),
        Column("told", _INT),
        Column("error", _TEXT),
    ),
    id=10,
)
ALERT_INSTANCES: Final = TableSchema(
    "kivi.alert_instances",
    "row",
    (Column("alert", _TEXT), Column("instance", _BYTES)),
    (
        Column("key", _TEXT),
        Column("state", _TEXT),
        Column("since_us", _INT),
        Column("holds_us", _INT),
        Column("value", _TEXT),
        Column("changed_us", _INT),
        Column("told", _BOOL),
    ),
    id=11,
)
ALERT_NOTIFICATIONS: Final = TableSchema(
    "kivi.alert_notifications",
    "row",
    (Column("alert", _TEXT), Column("number", _INT)),
    (
        Column("instance", _BYTES),
        Column("key", _TEXT),
        Column("starts_us", _INT),
        Column("ends_us", _INT),
        Column("value", _TEXT),
        Column("made_us", _INT),
    ),
    id=12,
)
_LAST_ID: Final = 2**32 - 1
"""The greatest, from which newer system tables count down: those below ``FIRST_ID`` are all taken."""
_QUERY: Final = (Column("table", _INT), Column("high", _INT), Column("low", _INT))
"""The name of a query: the table that it is to, and a hash."""
SUBSCRIPTIONS: Final = TableSchema(
    "kivi.subscribed",
    "row",
    (Column("user", _TEXT), Column("name", _TEXT)),
    tuple(
        Column(name, _INT, "max") for name in ("table", "high", "low", "since", "ts", "skip", "ttl_us", "expires_us")
    ),
    id=_LAST_ID,
)
QUERIES: Final = TableSchema(
    "kivi.queries",
    "row",
    _QUERY,
    (Column("name_of_table", _TEXT), Column("query", _TEXT), Column("places", _TEXT)),
    id=_LAST_ID - 1,
    history_us=_HISTORY_US,
)
CELLS: Final = TableSchema(
    "kivi.cells",
    "row",
    (Column("table", _INT), Column("cell", _TEXT)),
    (Column("exact", _INT, "sum"), Column("asks", _INT, "sum")),
    id=_LAST_ID - 2,
    history_us=_HISTORY_US,
)
ASKS: Final = TableSchema(
    "kivi.asks",
    "row",
    (Column("table", _INT), Column("cell", _TEXT), *_QUERY[1:]),
    (Column("members", _INT, "sum"), Column("exact", _INT, "max")),
    id=_LAST_ID - 3,
    history_us=_HISTORY_US,
)
MEMBERS: Final = TableSchema(
    "kivi.members",
    "row",
    (*_QUERY, Column("user", _TEXT), Column("name", _TEXT)),
    (Column("since", _INT, "max"),),
    id=_LAST_ID - 4,
    history_us=_HISTORY_US,
)
JUDGED_TO: Final = TableSchema(
    "kivi.judged_to",
    "row",
    (Column("rule", _INT),),
    (*(Column(name, _INT) for name in ("seen", "frontier_us", "now_us", "clock_us")), Column("error", _TEXT)),
    id=_LAST_ID - 5,
)
RAISED: Final = TableSchema(
    "kivi.raised",
    "row",
    tuple(Column(name, _INT) for name in ("rule", "at_us", "cts", "position")),
    (Column("until_us", _INT),),
    id=_LAST_ID - 6,
)
_FOLLOWING: Final = frozenset({MEMBERS.id})
"""What is written there follows from a row of another table, in the same commit: a verdict looks at that one."""


def is_judged(schema: TableSchema) -> bool:
    """Whether a verdict looks at rows of the table that are written in columns. Those of aggregates are derived."""
    return schema.kind == "row" and schema.id not in _FOLLOWING


SYSTEM: Final = {
    schema.id: schema
    for schema in (
        TABLES,
        NAMES,
        COUNTERS,
        LATE,
        EARLIER_SUBSCRIPTIONS,
        RETRACTIONS,
        JUDGED,
        ALERTS,
        ALERT_INSTANCES,
        ALERT_NOTIFICATIONS,
        SUBSCRIPTIONS,
        QUERIES,
        CELLS,
        ASKS,
        MEMBERS,
        JUDGED_TO,
        RAISED,
    )
}
FIRST_ID: Final = 16
_DEFINITION: Final = 1
_ALTERED: Final = 2
_FEATURES: Final = {"weighted_quantiles": WEIGHTED_QUANTILES}
"""By the kind of a measure: those that not every version knows which may be in a cluster."""


def table_key(table_id: int) -> bytes:
    return encode_key((_INT,), (table_id,))


def late_row(origin: int, dropped: int) -> tuple[int, bytes, RowOp]:
    """The operation that counts events that were left out."""
    return LATE.id, table_key(origin), RowOp(Barrier.PATCH, {}, {0: dropped})


def judged_row(rule_id: int, counts: Mapping[int, int]) -> tuple[int, bytes, RowOp]:
    """The operation that counts what became of the events that a rule judged; by the columns of ``JUDGED``."""
    return JUDGED.id, table_key(rule_id), RowOp(Barrier.PATCH, {}, counts)


def retraction_row(table_id: int, events: int) -> tuple[int, bytes, RowOp]:
    """The operation that every retraction of the table makes: a put, so that of two concurrent ones one conflicts."""
    return RETRACTIONS.id, table_key(table_id), RowOp(Barrier.PATCH, {0: events}, {})


@functools.lru_cache(4_096)
def schema_guard(table_id: int) -> Guard:
    """The guard that every commit naming the table implies."""
    return Guard(TABLES.id, table_key(table_id), _DEFINITION)


def schema_guards(commit: Commit, schema_of: Callable[[int], TableSchema | None]) -> list[Guard]:
    """The guards that a commit implies: of the tables of events and rows that it names, but for those it defines."""
    tables = {each[0] for each in (*commit.rows, *commit.guards)}
    tables.update([bulk.table for bulk in (*commit.appends, *commit.retractions)])
    if TABLES.id in tables:
        tables.difference_update([table for table, _ in changes(commit.rows)])
    return [
        schema_guard(table)
        for table in sorted(tables.difference(SYSTEM))
        if (schema := schema_of(table)) is not None and schema.kind not in ("aggregate", "view")
    ]


def definition_row(schema: TableSchema) -> tuple[int, bytes, RowOp]:
    """The operation that defines ``schema``."""
    return TABLES.id, table_key(schema.id), RowOp(Barrier.PATCH, {0: schema.name, 1: schema.to_json().decode()}, {})


@dataclass(frozen=True, slots=True)
class Replaced:
    """A generation of a table that the commit at ``cts`` overwrote."""

    schema: TableSchema
    cts: int


@dataclass(frozen=True, slots=True)
class View:
    """One immutable state of the catalog. ``aggregates`` and ``views`` are by the id of their source; ``last_id``: the
    largest table id ever given."""

    version: int = 0
    by_id: dict[int, TableSchema] = field(default_factory=dict)
    by_name: dict[str, TableSchema] = field(default_factory=dict)
    aggregates: dict[int, tuple[TableSchema, ...]] = field(default_factory=dict)
    views: dict[int, tuple[TableSchema, ...]] = field(default_factory=dict)
    replaced: dict[int, Replaced] = field(default_factory=dict)
    last_id: int = FIRST_ID - 1
    rules: dict[int, Rule] = field(default_factory=dict)
    """By id, in their order, in which they judge."""

    def rules_of(self, table: TableSchema) -> list[Rule]:
        """Those that judge the events of a table in the commits that bring them: not those of a pattern."""
        return [rule for rule in self.rules.values() if rule.source == table.name and rule.match is None]

    def table(self, name: str) -> TableSchema:
        try:
            return self.by_name[name]
        except (KeyError, TypeError):
            known = ", ".join(sorted(self.by_name)) or "none yet"
            raise NotFound(f"there is no table {shown(name)}; tables are: {known}", table=str(name)) from None

    def with_rows(self, rows: Iterable[tuple[int, RowOp]], cts: int) -> View:
        """After operations on the tables table: (table id, operation). Raises FormatTooNew for a definition with a
        measure that is not known here: such a store is not opened."""
        by_id, rules = dict(self.by_id), dict(self.rules)
        gone: list[TableSchema] = []
        origins: set[int] = set()
        last_id = self.last_id
        for table_id, op in rows:
            last_id = max(last_id, table_id)
            if op.barrier is Barrier.DELETE:
                rules.pop(table_id, None)
                if (old := by_id.pop(table_id, None)) is not None:
                    gone.append(old)
            elif Rule.is_json(text := op.puts.get(_DEFINITION) or ""):
                rule = Rule.from_json(text)
                rules[table_id] = replace(rule, created_ts=rule.created_ts or cts)
            elif text := op.puts.get(_ALTERED) or op.puts.get(_DEFINITION):
                new = dated(TableSchema.from_json(text.encode()), cts, is_altered=_ALTERED in op.puts)
                by_id[table_id] = new
                check_known(column.state for column in new.columns if column.state is not None)
                origins.add(new.origin)
        replaced = {**self.replaced, **{old.id: Replaced(old, cts) for old in gone if old.origin in origins}}
        by_name = {schema.name: schema for schema in by_id.values()}
        aggregates, views = _by_source(by_id, "aggregate"), _by_source(by_id, "view")
        rules = dict(sorted(rules.items()))
        return View(self.version + 1, by_id, by_name, aggregates, views, replaced, last_id, rules)

    def successor(self, schema: TableSchema) -> TableSchema | None:
        """The generation that overwrote an old one of this table; None if it was not overwritten, or dropped since."""
        current = self.by_name.get(schema.name)
        return current if current is not None and current.id != schema.id and current.origin == schema.origin else None


def _by_source(by_id: Mapping[int, TableSchema], kind: str) -> dict[int, tuple[TableSchema, ...]]:
    sources: dict[int, tuple[TableSchema, ...]] = {}
    for schema in by_id.values():
        if schema.kind == kind:
            sources[schema.source_id] = (*sources.get(schema.source_id, ()), schema)
    return sources


def dated(schema: TableSchema, cts: int, *, is_altered: bool = True) -> TableSchema:
    """A definition that the commit at ``cts`` brought: what is new of it is of then. ``is_altered``: the table was
    there, and could be read, before."""
    alterations = tuple(replace(one, cts=one.cts or cts) for one in schema.alterations)
    created_ts = schema.created_ts if alterations or is_altered else 0
    return replace(schema, created_ts=created_ts or cts, alterations=alterations)


class Catalog:
    """Both views. ``enter`` is called under the entry lock, ``apply`` before the watermark passes the commit."""

    def __init__(self) -> None:
        self.entered = View()
        self.visible = View()
        self.changed_at = 0
        """The CTS of the newest change of any table. What is derived notes it first, and looks at ``entered`` then."""
        self.changes: dict[int, int] = {}
        """The CTS of each table's newest."""
        self.on_touch: Callable[[int, int], None] = lambda table, cts: None
        self.on_define: Callable[[list[tuple[int, RowOp]], int], None] = lambda rows, cts: None
        """Called with each table that changed, and with what commits do to definitions, and when."""
        self._mutex = threading.Lock()  # of ``visible``, which commits and housekeeping replace

    def enter(self, rows: list[tuple[int, RowOp]], cts: int) -> None:
        before = self.entered
        self.entered = replace(before.with_rows(rows, cts), replaced={})
        self.on_define(rows, cts)
        for table, _ in rows:
            self.touch(table, cts, before)

    def touch(self, table: int, cts: int, view: View | None = None) -> None:
        """The table changed at ``cts``, as ``view`` or the entered one has it: so did all that it is derived from."""
        of: int | None = table
        while of is not None:
            self.changes[of] = max(cts, self.changes.get(of, 0))
            self.on_touch(of, cts)
            schema = self.entered.by_id.get(of) or (view.by_id.get(of) if view is not None else None)
            rule = self.entered.rules.get(of) or (view.rules.get(of) if view is not None else None)
            if rule is not None:
                judged = self.entered.by_name.get(rule.source)
                of = None if judged is None else judged.id
            else:
                of = schema.source_id if schema is not None and schema.kind in ("aggregate", "view") else None
        self.changed_at = max(self.changed_at, cts)

    def restore(self, changes: Mapping[int, int]) -> None:
        """When each table changed, if that is known better than from its definition."""
        self.changes = dict(changes)
        self.changed_at = max(changes.values(), default=0)

    def is_behind(self, derived_at: int, tables: Iterable[int]) -> bool:
        """Whether one of the tables has gone, or changed after ``derived_at``."""
        known, changes = self.entered.by_id, self.changes
        return any(table not in known or changes.get(table, 0) > derived_at for table in tables if table not in SYSTEM)

    def apply(self, rows: list[tuple[int, RowOp]], cts: int) -> None:
        with self._mutex:
            self.visible = self.visible.with_rows(rows, cts)

    def load(self, rows: list[tuple[int, RowOp]], cts: int) -> None:
        """Definitions found in base at open, or in a replayed record: entered and applied in one step."""
        self.enter(rows, cts)
        self.apply(rows, cts)

    def given(self, last_id: int) -> None:
        """At open: ids up to this one were given, to tables that may be gone."""
        self.entered = replace(self.entered, last_id=max(last_id, self.entered.last_id))
        self.visible = replace(self.visible, last_id=max(last_id, self.visible.last_id))

    def release(self, table_ids: Iterable[int]) -> None:
        """No open snapshot sees these replaced generations: from now on they cannot be read."""
        gone = set(table_ids)
        with self._mutex:
            kept = {table: old for table, old in self.visible.replaced.items() if table not in gone}
            self.visible = replace(self.visible, replaced=kept)

    def table(self, name: str, ts: int) -> TableSchema:
        """The table as a snapshot at ``ts`` sees it; its newest generation if it sees none. Raises NotFound."""
        view = self.visible
        current = view.by_name.get(name)
        if current is None or ts < current.created_ts:
            for old in view.replaced.values():
                if old.schema.name == name and old.schema.created_ts <= ts < old.cts:
                    return old.schema.at(ts)
        return view.table(name).at(ts)

    def check_seen(self, schema: TableSchema, ts: int) -> None:
        """Raises unless a snapshot at ``ts`` sees this generation: NotFound, SnapshotTooOld."""
        if ts < schema.created_ts:
            if schema.origin_id:
                raise SnapshotTooOld(
                    f"table {schema.name!r} was overwritten at {schema.created_ts}, and what the snapshot at {ts} saw "
                    "is not kept any more: begin again"
                )
            raise NotFound(
                f"table {schema.name!r} was created at {schema.created_ts}, after the snapshot {ts}", table=schema.name
            )
        old = self.visible.replaced.get(schema.id)
        if old is not None and ts >= old.cts:  # it was looked up before the overwrite
            raise self.missing(schema)

    def missing(self, schema: TableSchema) -> NotFound | SnapshotTooOld:
        """Why a generation cannot be read any more."""
        if (now := self.visible.successor(schema)) is not None:
            return SnapshotTooOld(f"table {schema.name!r} was overwritten at {now.created_ts}: begin again")
        return NotFound(f"table {schema.name!r} was dropped", table=schema.name)

    def is_visible(self, table_id: int) -> bool:
        """Whether readers still see the table: its rows are erased only after this has become False."""
        view = self.visible
        return table_id in SYSTEM or table_id in view.by_id or table_id in view.replaced

    def schema_of(self, table_id: int) -> TableSchema | None:
        """System tables included. The entered view, since what is in flight must be foldable as soon as it is applied;
        and the visible one, since a table whose drop is not durable yet is still there: its rows must be kept."""
        found = SYSTEM.get(table_id) or self.entered.by_id.get(table_id)
        if found is None:
            view = self.visible
            old = view.replaced.get(table_id)
            found = view.by_id.get(table_id) or (old.schema if old is not None else None)
        return found


def features_of(rows: Iterable[tuple[int, RowOp]]) -> tuple[str, ...]:
    """Which features (``kivi.log.features``) a node needs to read what commits do to definitions."""
    return features_in(View().with_rows(rows, 0))


def features_in(view: View) -> tuple[str, ...]:
    """Which of them a node needs to read these definitions."""
    schemas = view.by_id.values()
    kinds = {column.state.kind for schema in schemas for column in schema.columns if column.state is not None}
    raised = {MATCHES_RAISED for rule in view.rules.values() if rule.match is not None}
    return tuple(sorted({_FEATURES[kind] for kind in kinds & _FEATURES.keys()} | raised))


def changes(rows: Iterable[tuple[int, bytes, RowOp]]) -> list[tuple[int, RowOp]]:
    """The operations of a commit on the tables table, as (table id, operation)."""
    return [(decode_key((_INT,), key)[0], op) for table, key, op in rows if table == TABLES.id]
