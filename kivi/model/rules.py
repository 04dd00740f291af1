"""Rules as they are declared: which events of a table raise something, measured against what, and what that is (R25).

A rule is plain data: what the catalog stores, and what travels from a client to its server. ``declared`` checks one
against the tables that it names and settles what ``select=None`` stands for, so that columns that are added to a table
later change no rule. ``bind`` makes of it what is evaluated; both work on the same names:

=====================  ============================================================================================
``kivi.col("x")``      a column of the event
``kivi.ref("x")``      a column, key column or derived column of the row that the event is measured against
``kivi.ref("a.x")``    the same, where ``against`` is a dict of names
=====================  ============================================================================================

A reference is a column of the name ``ref(x)``, which no table has: expressions, their plain form and their evaluators
know of nothing else than columns.

A rule with ``match`` judges no event by itself: it raises the matches of a pattern (``kivi.store.raising``), and what
``kivi.col`` names in its ``select`` is a column of a match.

Which row that is: ``lookup`` names the columns of the event that are the row's key; ``previous_slot`` those that are
its key but for the slot, which is counted from the slot of the aggregate that the event's own time falls in: the one
before it, or the one that a moment ``back`` lies in; with ``slots=n`` the n slots that end there are combined, as if
they were one, and the slot column is that of the last.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.expressions import Expr, Value, bind, bind_value, check_own, col, from_plain, lit, to_plain
from kivi.model.lateness import AUTO_US, lateness_us
from kivi.model.names import check_name, column_names
from kivi.model.patterns import Match, Pattern, check_followed, match_of, matched_schema
from kivi.model.questions import seen_schema
from kivi.model.schema import Column, GroupKey, OperatorCall, TableSchema
from kivi.model.slots import Slot, parse_duration_us
from kivi.model.types import ColumnType, shown

__all__ = [
    "SLOTS_MAX",
    "Against",
    "Bound",
    "Looked",
    "Nodes",
    "Rule",
    "bind_rule",
    "bound_match",
    "check_acyclic",
    "declared_rule",
    "key_of",
    "lookup",
    "named",
    "previous_slot",
    "ref",
]

SLOTS_MAX: Final = 1_000
"""Slots that a rule combines at most."""
_FAR_US: Final = 2**60
_LATENESS: Final = "5s"
_OPEN, _CLOSE = "ref(", ")"
Find = Callable[[str], TableSchema]


def ref(name: str) -> Value:
    """A column of what a rule's ``against`` finds: ``kivi.ref("avg_resp_time")``, ``kivi.ref("prices.price")``."""
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"kivi.ref takes the name of a column, not {shown(name)}")
    return col(f"{_OPEN}{name}{_CLOSE}")


def _reference(column: str) -> str | None:
    """What ``ref`` was given; None for a column of the event."""
    return column[len(_OPEN) : -len(_CLOSE)] if column.startswith(_OPEN) and column.endswith(_CLOSE) else None


@dataclass(frozen=True, slots=True)
class Against:
    """Rows that events are measured against: get one with ``previous_slot`` or ``lookup``."""

    table: str
    by: tuple[str, ...]
    kind: Literal["slot", "row"]
    back_us: int = 0
    """Of a slot: how long before the event's own it lies; 0: it is the one before that."""
    slots: int = 1

    def __str__(self) -> str:
        more = [f", back={Slot.parse(self.back_us).width!r}"] if self.back_us else []
        more += [f", slots={self.slots}"] if self.slots != 1 else []
        name = "previous_slot" if self.kind == "slot" else "lookup"
        return f"{name}({self.table!r}, by={list(self.by)}{''.join(more)})"


def previous_slot(
    table: str, by: Sequence[str], back: str | int | dt.timedelta | None = None, slots: int = 1
) -> Against:
    """The slot just before the event's own, of the aggregate ``table``; ``by``: the event's columns that are the rest
    of its key, in its order.

    ``back``: how far back instead, such as "1w" (seven days): the slot in which the moment lies that is so long before
    the beginning of the event's own. ``slots``: so many slots, of which that is the last, combined; slots without a row
    are left out. A missing row is no match.
    """
    if not isinstance(slots, int) or isinstance(slots, bool) or not 1 <= slots <= SLOTS_MAX:
        raise InvalidArgument(f"slots is how many slots are combined, 1 to {SLOTS_MAX:,}, not {shown(slots)}")
    return Against(table, _names(table, by), "slot", 0 if back is None else _back_us(back), slots)


def _back_us(back: str | int | dt.timedelta) -> int:
    weeks = re.fullmatch(r"([0-9]{1,9})\s*w(?:eeks?)?", back.strip()) if isinstance(back, str) else None
    return parse_duration_us(f"{int(weeks[1]) * 7}d" if weeks else back, "back")


def lookup(table: str, by: Sequence[str]) -> Against:
    """The row of ``table`` under the key that the columns ``by`` of the event are, in the key's order. A missing row is
    no match."""
    return Against(table, _names(table, by), "row")


def _names(table: object, by: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(table, str):
        raise InvalidArgument(f"the table to look in is a name, not {shown(table)}")
    return tuple(column_names(f"what is looked up in {table!r}", "by", by))


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. ``where`` and what ``select`` computes are JSON of ``kivi.model.expressions.to_plain``, and come with
    literals as they were given. ``select`` maps columns of ``into``; ``id`` is never reused."""

    name: str
    source: str
    into: str
    against: tuple[tuple[str, Against], ...] = ()
    """By name; the name of a single one is empty."""
    where: str | None = None
    select: tuple[tuple[str, str], ...] | None = None
    own_events: bool = False
    id: int = 0
    created_ts: int = 0
    backfilled: bool = False
    """Whether it has judged what was there before it, too."""
    match: str | None = None
    """Its judgement is a pattern, of which this is the JSON: then ``where`` says which events it is matched over, and
    the columns of a match stand in ``select`` in the place of the event's."""
    lateness_us: int = 0

    @property
    def tables(self) -> tuple[str, ...]:
        """Which it names."""
        return tuple(dict.fromkeys((self.source, self.into, *(each.table for _, each in self.against))))

    def description(self) -> dict[str, Any]:
        """For people and programs."""
        against: Any = {name: str(each) for name, each in self.against}
        return {
            "name": self.name,
            "source": self.source,
            "against": against.get("", against or None),
            "where": None if self.where is None else str(_expression(self.where)),
            "into": self.into,
            "select": {name: str(_expression(text)) for name, text in self.select or ()},
            "own_events": self.own_events,
            "created_ts": self.created_ts,
            "backfilled": self.backfilled,
            "match": None if self.match is None else str(Pattern.from_json(self.match)),
            "lateness_us": self.lateness_us,
        }

    @property
    def matched(self) -> Pattern:
        """Of a rule whose judgement is a pattern."""
        return Pattern.from_json(self.match or "")

    def judged_schema(self, source: TableSchema) -> TableSchema:
        """What stands in ``select``: an event of its source, or a match."""
        return source if self.match is None else matched_schema(source, match_of(source, self.matched))

    def to_json(self) -> str:
        """The form in the catalog, beside definitions of tables: see ``is_rule``."""
        known = dataclasses.asdict(self)
        if self.match is None:  # as versions read it that know of no patterns here
            del known["match"], known["lateness_us"]
        return json.dumps({"rule": known}, separators=(",", ":"))

    @staticmethod
    def is_json(text: str) -> bool:
        """Whether it is a rule's form, and not a table's."""
        return text.startswith('{"rule":')

    @staticmethod
    def from_json(text: str) -> Rule:
        """The inverse. Raises InvalidArgument for what ``to_json`` does not make."""
        try:
            known = json.loads(text)["rule"]
            known["against"] = tuple((name, _against(each)) for name, each in known["against"])
            if known["select"] is not None:
                known["select"] = tuple((name, expression) for name, expression in known["select"])
            return Rule(**known)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InvalidArgument("the definition of a rule cannot be read") from None


def _against(known: Mapping[str, Any]) -> Against:
    by = known["by"]
    if known["kind"] == "slot":
        return previous_slot(known["table"], by, known["back_us"] or None, known["slots"])
    return lookup(known["table"], by)


def named(
    name: str,
    source: str,
    against: Against | Mapping[str, Against] | None,
    where: Expr | None,
    into: str,
    select: Mapping[str, object] | None,
    own_events: bool,
    match: Pattern | None = None,
    lateness: str | int | dt.timedelta | None = None,
) -> Rule:
    """A rule as its caller writes it. Nothing is known about the tables yet. Raises InvalidArgument, SchemaError."""
    check_name(name, "rule")
    for what, table in (("source", source), ("into", into)):
        if not isinstance(table, str):
            raise InvalidArgument(f"{what} of rule {name!r} is the name of a table, not {shown(table)}")
    found: tuple[tuple[str, Against], ...] = ()
    if isinstance(against, Against):
        found = (("", against),)
    elif isinstance(against, Mapping):
        for alias in against:
            check_name(alias, f"rule {name!r}: against")
        found = tuple(against.items())
    elif against is not None:
        raise InvalidArgument(f"rule {name!r}: against is kivi.previous_slot(...), kivi.lookup(...) or a dict of these")
    if any(not isinstance(each, Against) for _, each in found):
        raise InvalidArgument(f"rule {name!r}: against maps names to kivi.previous_slot(...) and kivi.lookup(...)")
    if where is not None and not isinstance(where, Expr):
        raise InvalidArgument(f"rule {name!r}: where is a predicate over kivi.col and kivi.ref, not {shown(where)}")
    if select is not None and not isinstance(select, Mapping):
        raise InvalidArgument(f"rule {name!r}: select maps columns of {into!r} to expressions, and is {shown(select)}")
    computed = tuple((column, _text(_node(value))) for column, value in (select or {}).items())
    for column, _ in computed:
        check_name(column, "column")
    condition = None if where is None else _text(where)
    rule = Rule(name, source, into, found, condition, computed, bool(own_events))
    if match is None:
        if lateness is not None:
            raise InvalidArgument(f"rule {name!r}: lateness is of a rule with match=, a pattern; this one has none")
        return rule
    if not isinstance(match, Pattern):
        raise InvalidArgument(f"rule {name!r}: match is a pattern, made by kivi.pattern(...), not {shown(match)}")
    waited_us = lateness_us(_LATENESS if lateness is None else lateness)
    return dataclasses.replace(rule, match=match.to_json(), lateness_us=waited_us)


def _node(value: object) -> Expr:
    return value if isinstance(value, Expr) else lit(value)


def _text(expr: Expr) -> str:
    return json.dumps(to_plain(expr), separators=(",", ":"))


def _expression(text: str) -> Expr:
    return from_plain(json.loads(text))


# -- against the tables ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Looked:
    """What a rule reads of one of the rows that an event is measured against: of its columns, and the largest parts of
    ``where`` and of ``select`` that need nothing else. In these columns have the names that the row's table has."""

    against: Against
    columns: tuple[str, ...]
    types: Mapping[str, ColumnType]
    where: tuple[Expr, ...]
    select: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """A rule that can be evaluated. ``where`` and ``select`` are bound; ``types`` are those of the event's columns.

    ``looked``: one for each of ``against``. ``selects``: the event's columns that ``select`` reads.
    """

    rule: Rule
    where: Expr | None
    select: tuple[tuple[str, Expr], ...]
    types: Mapping[str, ColumnType]
    looked: tuple[Looked, ...]
    selects: tuple[str, ...]


def declared_rule(rule: Rule, find: Find) -> Rule:
    """The rule with all that it raises: columns that both tables have are taken over unless ``select`` names them.

    ``find`` gives a table by its name. Raises NotFound, SchemaError, InvalidArgument.
    """
    what = f"rule {rule.name!r}"
    source, into = find(rule.source), find(rule.into)
    for part, table in (("its source", source), ("into", into)):
        if table.kind != "event":
            raise SchemaError(f"{what}: {part} {table.name!r} is a {table.kind} table: rules judge and raise events")
    if source.name == into.name:
        raise SchemaError(f"{what} would raise events of {source.name!r} into itself: raise them into another table")
    for _, against in rule.against:
        _check_against(what, rule, against, source, find(against.table))
    if rule.match is not None:
        rule = _check_match(rule, source, into)
    judged = rule.judged_schema(source)
    select = dict(rule.select or ())
    taken = {
        column.name: _text(col(column.name))
        for column in into.shown_columns
        if column.name not in select
        and (own := judged.by_name.get(column.name)) is not None
        and own.type == column.type
    }
    whole = {column.name: {**taken, **select}[column.name] for column in into.shown_columns
             if column.name in taken or column.name in select}  # fmt: skip
    for column_name in select:
        into.column(column_name)
    if into.event_time not in whole:
        raise SchemaError(
            f"{what} gives no {into.event_time!r}, the event time of {into.name!r}: name it in select, like "
            f"select={{{into.event_time!r}: kivi.col({source.event_time!r})}}"
        )
    if into.shard_by and [whole.get(name) for name in into.shard_by] != [_text(col(name)) for name in source.shard_by]:
        raise _other_shards(what, source, into)
    complete = dataclasses.replace(rule, select=tuple(whole.items()))
    for text in (complete.where, *whole.values()):
        if text is not None:
            check_own(_expression(text), what)
    bind_rule(complete, find)
    return complete


def _other_shards(what: str, source: TableSchema, table: TableSchema) -> SchemaError:
    """Where they are alike, an event, what it is measured against and what it raises lie together."""
    own = f"sharded by {', '.join(source.shard_by)}" if source.shard_by else "not sharded"
    return SchemaError(
        f"{what}: {table.name!r} is sharded by {', '.join(table.shard_by)}, and its source {source.name!r} is {own}: "
        "its tables are sharded by the same columns of the event, or not at all"
    )


def _check_match(rule: Rule, source: TableSchema, into: TableSchema) -> Rule:
    """A match happens, where nothing else is said, when its last event does: its pattern has that as a measure."""
    if rule.against or rule.own_events:
        raise InvalidArgument(
            f"rule {rule.name!r}: a pattern is matched over events alone: give match=, or against= and own_events="
        )
    if source.shard_by:
        raise SchemaError(
            f"rule {rule.name!r}: {source.name!r} is sharded by {', '.join(source.shard_by)}, and a rule knows what it "
            "has judged by the places of events in their commits, which nodes with a part of them count otherwise: "
            "match over a table without shards, into which another rule may raise the events that matter, or follow "
            "the matches with subscribe_matches"
        )
    if not isinstance(rule.lateness_us, int) or rule.lateness_us < AUTO_US:
        raise InvalidArgument(
            f"rule {rule.name!r}: lateness is a number of microseconds, not {shown(rule.lateness_us)}"
        )
    asked, time = rule.matched, into.event_time or ""
    if time not in {*asked.partition_by, *(name for name, _ in asked.measures)}:
        measures = (*asked.measures, (time, OperatorCall("last", source.event_time)))
        rule = dataclasses.replace(rule, match=dataclasses.replace(asked, measures=measures).to_json())
    check_followed(match_of(source, rule.matched))
    return rule


def bound_match(rule: Rule, source: TableSchema) -> tuple[Match, Expr | None]:
    """The pattern of a rule, and of which events; as a reader asks for it."""
    seen = seen_schema(source)
    where = None if rule.where is None else bind(_expression(rule.where), lambda name: seen.column(name).type)
    return match_of(source, rule.matched), where


def _check_against(what: str, rule: Rule, against: Against, source: TableSchema, table: TableSchema) -> None:
    if not table.key:
        raise SchemaError(f"{what}: {table.name!r} is an event table, which has no rows to look up")
    if table.shard_by and source.shard_by != against.by[: len(table.shard_by)]:
        raise _other_shards(what, source, table)
    key = list(table.key)
    if against.kind == "slot":
        slots = [group for group in table.group_by if group.slot is not None]
        if table.kind != "aggregate" or len(slots) != 1:
            raise SchemaError(f"{what}: {table.name!r} is no aggregate with one slot of time: use kivi.lookup")
        key = [column for column in key if column.name != slots[0].name]
        if against.back_us > _FAR_US or against.slots * (slots[0].slot or Slot("us", 1)).nominal_us > _FAR_US:
            raise SchemaError(f"{what}: {against} looks more than 36,000 years back")
        if rule.own_events and slots[0].source != source.event_time:
            raise SchemaError(
                f"{what}: own_events adds a commit's events to slots before others of its events, and the slots of "
                f"{table.name!r} are of {slots[0].source!r}, which is not the event time"
            )
        if rule.own_events and table.source != source.name:
            raise SchemaError(
                f"{what}: own_events adds the events of {source.name!r} in the same commit, and {table.name!r} is an "
                f"aggregate of {table.source!r}"
            )
    elif rule.own_events and all(each.kind == "row" for _, each in rule.against):
        raise SchemaError(f"{what}: own_events adds to slots; what kivi.lookup finds is as it was before the commit")
    names = ", ".join(column.name for column in key)
    if len(against.by) != len(key):
        raise SchemaError(f"{what}: by names {len(key)} columns of {source.name!r}, for {names} of {table.name!r}")
    for name, column in zip(against.by, key, strict=True):
        own = source.column(name).type
        if own != column.type:
            raise SchemaError(
                f"{what}: {name!r} of {source.name!r} is a {own}, and {column.name!r} of {table.name!r} a {column.type}"
            )


def check_acyclic(rule: Rule, others: Sequence[Rule]) -> None:
    """Raises InvalidArgument if what the rule raises would come back to its source through other rules."""
    reached, todo = set[str](), [rule.into]
    while todo:
        table = todo.pop()
        if table == rule.source:
            raise InvalidArgument(
                f"rule {rule.name!r} raises into {rule.into!r}, from which other rules lead back to {rule.source!r}: "
                "rules must not form a circle"
            )
        if table not in reached:
            reached.add(table)
            todo += [each.into for each in others if each.source == table]


def bind_rule(rule: Rule, find: Find, nodes: Nodes | None = None) -> Bound:
    """The rule as it is evaluated. ``nodes``: those of other rules, of which equal ones are taken, so that they are
    worked out once for all. Raises NotFound, SchemaError, InvalidArgument."""
    source, into = find(rule.source), find(rule.into)
    if rule.match is not None:
        bound_match(rule, source)
        source, rule = rule.judged_schema(source), dataclasses.replace(rule, where=None)
    aliases = dict(rule.against)
    types: dict[str, ColumnType] = {}
    read: dict[str, dict[str, ColumnType]] = {alias: {} for alias in aliases}

    def type_of(name: str) -> ColumnType:
        if (reference := _reference(name)) is None:
            types[name] = source.column(name).type
            return types[name]
        alias, column = _resolved(rule, reference)
        table = find(aliases[alias].table)
        table.output_columns([column])
        read[alias][column] = table.output_type(column)
        return read[alias][column]

    where = None if rule.where is None else bind(_expression(rule.where), type_of)
    select = []
    for name, text in rule.select or ():
        column = into.column(name)
        select.append((name, _bound_to(rule, column, _expression(text), type_of)))
    parts = _Parts(rule, {} if nodes is None else nodes)
    of_where = None if where is None else parts.of(where)
    found, parts.found, parts.columns = parts.found, {}, {}
    of_select = tuple((name, parts.of(expr)) for name, expr in select)
    looked = tuple(
        Looked(against, tuple(read[alias]), read[alias], tuple(found.get(alias, ())), tuple(parts.found.get(alias, ())))
        for alias, against in rule.against
    )
    return Bound(rule, of_where, of_select, types, looked, tuple(parts.columns))


Nodes = dict[tuple[object, ...], Expr]


class _Parts:
    """Takes expressions apart by what they read. ``found``: by the name of a row the largest parts that read nothing
    else, in order. ``columns``: those of the event."""

    def __init__(self, rule: Rule, nodes: Nodes) -> None:
        self.found: dict[str, dict[Expr, None]] = {}
        self.columns: dict[str, None] = {}
        self._rule, self._nodes = rule, nodes

    def of(self, expr: Expr) -> Expr:
        same, rows = self._taken(expr)
        self._note([(same, rows)])
        return same

    def _note(self, parts: Sequence[tuple[Expr, set[str | None]]]) -> None:
        for part, rows in parts:
            alias = next(iter(rows)) if len(rows) == 1 else None
            if alias is not None:
                self.found.setdefault(alias, {})[part] = None

    def _taken(self, expr: Expr) -> tuple[Expr, set[str | None]]:
        """The node that stands for it, and which rows it reads; None is the event."""
        rows: set[str | None] = set()
        column, of = expr.column, None
        if column and (reference := _reference(column)) is not None:
            alias, column = _resolved(self._rule, reference)
            rows, of = {alias}, dict(self._rule.against)[alias]
        elif column:
            rows = {None}
            self.columns[column] = None
        parts = [self._taken(arg) for arg in expr.args]
        rows = rows.union(*(one for _, one in parts))
        if len(rows) > 1:
            self._note(parts)
        args = tuple(part for part, _ in parts)
        # A reference with ``own_events`` is to another row than one without.
        name = expr.op, column, repr(expr.value), tuple(map(id, args)), expr.type, of, of and self._rule.own_events
        return self._nodes.setdefault(name, Expr(expr.op, column, expr.value, args, expr.type)), rows


def _bound_to(rule: Rule, column: Column, expr: Expr, type_of: Callable[[str], ColumnType]) -> Expr:
    """What is computed for a column, in its type."""
    if expr.op == "lit":
        stored = None if expr.value is None else column.type.to_written(expr.value, f"select of {column.name!r}")
        return Expr("lit", value=stored, type=column.type)
    bound, type_ = bind_value(expr, type_of)
    if type_ != column.type:
        raise SchemaError(
            f"rule {rule.name!r}: {expr} is a {type_}, and {column.name!r} of {rule.into!r} a {column.type}: declare "
            f"the column as {type_}, or compute another value"
        )
    return bound


def _resolved(rule: Rule, reference: str) -> tuple[str, str]:
    """Of which of ``against`` a reference speaks, and the column."""
    aliases = dict(rule.against)
    if not aliases:
        raise SchemaError(f"rule {rule.name!r} has no against= for kivi.ref({reference!r}) to refer to")
    if "" in aliases:
        return "", reference
    alias, dot, column = reference.partition(".")
    if not dot or alias not in aliases:
        raise SchemaError(
            f"rule {rule.name!r}: write kivi.ref('NAME.column') with one of the names in against: "
            f"{', '.join(aliases)}; not {reference!r}"
        )
    return alias, column


def key_of(against: Against, table: TableSchema, event_time: str) -> TableSchema:
    """How events are grouped by the row that they are measured against: an aggregate's key and nothing else. Of slots
    the key holds the event's own."""

    def work_out() -> TableSchema:
        by = iter(against.by)
        groups = []
        for i, column in enumerate(table.key):
            slotted = against.kind == "slot" and table.group_by[i].slot is not None
            if slotted:
                groups.append(dataclasses.replace(table.group_by[i], source=event_time))
            else:
                groups.append(GroupKey(column.name, next(by)))
        return TableSchema(table.name, "aggregate", table.key, (), group_by=tuple(groups))

    return table.remembered(("rule's key", against, event_time), work_out)
