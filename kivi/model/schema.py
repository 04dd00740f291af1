"""Schemas of tables: columns, their operators, and the four kinds of table.

A schema is plain immutable data: what the catalog stores and every room is handed. Row tables have keys and are
written by put, insert, delete and delta; event tables have neither keys nor rows to change, only appends; an
aggregate table is written by the appends to its source, so its schema also says how to group and what to measure; and a
secondary view has the rows of a row table under another key, and is written by what writes those.

A *value column* holds what was put. A *delta column* has one operator (SUM, MIN, MAX), fixed in the
schema for the life of the table; ``count()`` is SUM of 1 and exists only as a way to write it.

A schema checks what a caller hands in for it (keys, values, deltas, guards, names) and gives it in stored form
(``kivi.model.types``). How one is made from what a caller declares is in ``kivi.model.declarations``.

Nothing here does I/O or knows where a table lives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from kivi.errors import InvalidArgument, OutOfRange, ResourceExhausted, SchemaError
from kivi.model.derived_columns import parse_expression
from kivi.model.expressions import Expr, from_plain, to_plain
from kivi.model.lateness import LatenessDay
from kivi.model.slots import Slot
from kivi.model.states import State
from kivi.model.types import INT64_MAX, INT64_MIN, ColumnType, check_moment, shown

__all__ = [
    "ALTERATIONS_MAX",
    "COLUMNS_MAX",
    "Alteration",
    "Column",
    "GroupKey",
    "Measure",
    "OperatorCall",
    "TableSchema",
]

_FEW: Final = 16  # names are looked up faster in a tuple
COLUMNS_MAX: Final = 32_767
"""Columns besides the key: a log record numbers them in 16 bits (``kivi.mvcc.record``)."""
ALTERATIONS_MAX: Final = 127
"""A base row numbers the layout that it was written in with 7 bits (``kivi.encoding.base_rows``)."""

Operator = str
"""sum, min, max; of a state the name of its kind."""
T = TypeVar("T")
_MEMO_MAX: Final = 256
_INTEGERS: Final = {int}
_COUNTED: Final = frozenset({"int64", "timestamp"})  # kept as what counts them, and given as that too


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """``kivi.sum("int64")`` in a table's columns (a type), ``kivi.sum("resp_time_us")`` in measures (a column).

    ``expression`` is a source that is computed; ``where`` selects the events that are observed; ``options`` are a
    measure's own, such as ("accuracy", 0.01).
    """

    operator: str
    argument: str | None = None
    expression: Expr | None = None
    where: Expr | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        parts = [str(part) for part in (self.argument, self.expression) if part is not None]
        parts += [f"{name}={value!r}" for name, value in self.options]
        parts += [f"where={self.where}"] if self.where is not None else []
        return f"{self.operator}({', '.join(parts)})"

    def as_measure(self, name: str) -> Measure:
        """The measure that this declares; nothing is checked."""
        expression, where = (None if e is None else json.dumps(to_plain(e)) for e in (self.expression, self.where))
        return Measure(name, self.operator, self.argument, expression, where, self.options)


@dataclass(frozen=True, slots=True)
class Column:
    """One column. ``operator`` is None for a value column. ``state``: of a measure that is no single number."""

    name: str
    type: ColumnType
    operator: Operator | None = None
    state: State | None = None

    def describe(self) -> str:
        return str(self.type) if self.operator is None or self.type.is_state else f"{self.operator}({self.type})"

    def to_plain(self) -> list[Any]:
        plain = [self.name, str(self.type), self.operator]
        return plain if self.state is None else [*plain, self.state.to_plain()]

    @staticmethod
    def from_plain(data: list[Any]) -> Column:
        name, type_, operator, *state = data
        return Column(name, ColumnType.read(type_), operator, State.from_plain(state[0]) if state else None)


@dataclass(frozen=True, slots=True)
class GroupKey:
    """One key column of an aggregate: a source column as it is, or the start of the slot that it falls in.

    Slots of a fixed width have ``slot_us``; those by calendar or in a time zone ``width`` and ``tz`` (``Slot.parse``).
    """

    name: str
    source: str
    slot_us: int = 0
    width: str = ""
    tz: str = ""

    @staticmethod
    def of_slot(name: str, source: str, slot: Slot) -> GroupKey:
        """The key column of the slots of a timestamp column."""
        if slot.is_fixed:
            return GroupKey(name, source, slot.count)
        return GroupKey(name, source, 0, slot.width, slot.zone)

    @property
    def slot(self) -> Slot | None:
        """The slots it is made of; None: the source column as it is."""
        return _slot(self.slot_us, self.width, self.tz)

    def description(self) -> str | dict[str, Any]:
        """For people and programs, in ``describe``."""
        if self.width:
            return {"name": self.name, "source": self.source, "slot": self.width, "tz": self.tz or "UTC"}
        return {"name": self.name, "source": self.source, "slot_us": self.slot_us} if self.slot_us else self.name

    def to_plain(self) -> list[Any]:
        """For the catalog, which has known fixed widths alone for longer."""
        return [self.name, self.source, self.slot_us, *((self.width, self.tz) if self.width else ())]


@functools.lru_cache(maxsize=256)
def _slot(slot_us: int, width: str, tz: str) -> Slot | None:
    if width:
        return Slot.parse(width, tz or None)
    return Slot.parse(slot_us) if slot_us else None


@dataclass(frozen=True, slots=True)
class Measure:
    """One column of an aggregate: ``operator`` over the column ``source`` or an ``expression``; count() has neither.

    Events that ``where`` does not select, and those where the source is null, are not observed. Both are as text, the
    JSON of ``kivi.model.expressions.to_plain``. ``options``: as they were given, ``by`` among them.
    """

    name: str
    operator: str
    source: str | None
    expression: str | None = None
    where: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def call(self) -> OperatorCall:
        """What was declared."""
        expression, where = (
            None if text is None else from_plain(json.loads(text)) for text in (self.expression, self.where)
        )
        return OperatorCall(self.operator, self.source, expression, where, self.options)

    @property
    def by(self) -> str | None:
        """The column that argmax and argmin compare, or that has the weights."""
        return dict(self.options).get("by")

    def to_plain(self) -> list[Any]:
        """Without what is as it is by default."""
        plain: list[Any] = [self.name, self.operator, self.source]
        rest = [self.expression, self.where, list(map(list, self.options))]
        return plain + rest if any(rest) else plain

    @staticmethod
    def from_plain(data: list[Any]) -> Measure:
        name, operator, source, *rest = data
        expression, where, options = rest or (None, None, ())
        return Measure(name, operator, source, expression, where, tuple(map(tuple, options)))


@dataclass(frozen=True, slots=True)
class Alteration:
    """Columns that were added to a table, behind the ``columns`` that it had until then.

    Columns are only ever added at the end, so whatever was stored before is read as what it is, without the new ones:
    a value column is null there, a delta column has its identity. Snapshots below ``cts`` do not see them.

    ``state``: the measures that were added to an aggregate are *building* while older events are summed for them, and
    *failed* if that was given up; nobody sees the columns of either. *unseen* are those of a later alteration than a
    snapshot sees (``TableSchema.at``). ``derived``: so many derived columns there were; ``more``: those to come with
    measures that are still building. ``backfilled``: the measures have all events that were remembered then, which
    are those at ``floor_us`` or later, None: all; otherwise only events committed after ``cts``.
    """

    columns: int
    derived: int = 0
    cts: int = 0
    state: Literal["ready", "building", "failed", "unseen"] = "ready"
    backfilled: bool = True
    floor_us: int | None = None
    more: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def from_plain(data: list[Any]) -> Alteration:
        *_, more = data
        return dataclasses.replace(Alteration(*data[:-1]), more=tuple(map(tuple, more)))


@dataclass(frozen=True, slots=True)
class TableSchema:
    """The definition of one table. ``id`` is its generation: never reused, so what was dropped is never read.

    An overwritten table goes on as a new generation of the same definition. ``origin_id`` is then the first one's id:
    by it callers and stages name the table, whichever generation it has (``origin``).
    """

    name: str
    kind: Literal["row", "event", "aggregate", "view"]
    key: tuple[Column, ...]
    columns: tuple[Column, ...]
    id: int = 0
    state: Literal["ready", "building"] = "ready"
    created_ts: int = 0
    origin_id: int = 0
    history_us: int | None = None
    event_time: str | None = None
    retention_us: int | None = None
    index: tuple[str, ...] = ()
    """Of an event table: columns by whose values events are looked for, whatever these are like."""
    shard_by: tuple[str, ...] = ()
    """Of an event table and its aggregates: the columns that say on which nodes of a cluster an event, a row lies."""
    local_us: int | None = None
    cold: str | None = None
    """Of an event table: settled files whose events are all older than ``local_us`` move to the object store there."""
    expires: str | None = None
    """Of an event table: the timestamp column that says until when each event is there."""
    source: str | None = None
    source_id: int = 0
    unique: bool = False
    """Of a view: no two rows of its source may come under one key."""
    declared_source: str | None = None
    """The aggregate that this one was declared over; ``source`` is the event table that both are of."""
    complete_since_us: int | None = None
    group_by: tuple[GroupKey, ...] = ()
    measures: tuple[Measure, ...] = ()
    observes: tuple[tuple[str, str], ...] = ()
    derived: tuple[tuple[str, str], ...] = ()
    alterations: tuple[Alteration, ...] = ()
    """In order: each has the columns up to those of the next one."""
    role: str = ""
    """What the table is of, for consoles that show it (``kivi.model.roles``)."""
    by_name: dict[str, Column] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Key columns and columns, but for those that nobody sees (``Alteration``)."""
    index_of: dict[str, int] = field(default_factory=dict, init=False, compare=False, repr=False)
    """The place of each column among ``columns``; key columns have none."""
    counted: bool = field(default=False, init=False, compare=False, repr=False)
    """Whether all of the key's columns are kept as integers that callers may give as such."""
    has_time_in_key: bool = field(default=False, init=False, compare=False, repr=False)
    memo: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Facts that follow from this definition and take long to work out, by their names (``remembered``)."""

    def __post_init__(self) -> None:
        if len(self.columns) > COLUMNS_MAX:
            raise ResourceExhausted(
                f"table {self.name!r} would have {len(self.columns):,} columns besides its key, beyond the limit "
                f"columns_max = {COLUMNS_MAX:,}: use several tables",
                limit="columns_max",
                maximum=COLUMNS_MAX,
            )
        if len(self.alterations) > ALTERATIONS_MAX:
            raise ResourceExhausted(
                f"table {self.name!r} was altered {ALTERATIONS_MAX} times, which is the limit alterations_max: add "
                "several columns at once, or copy it to a new table",
                limit="alterations_max",
                maximum=ALTERATIONS_MAX,
            )
        shown = {i: column for i, column in enumerate(self.columns) if self.is_shown(i)}
        for column in (*self.key, *shown.values()):
            if column.name in self.by_name:
                raise SchemaError(f"table {self.name!r} names the column {column.name!r} twice")
            self.by_name[column.name] = column
        self.index_of.update((column.name, i) for i, column in shown.items())
        object.__setattr__(self, "counted", all(column.type.name in _COUNTED for column in self.key))
        object.__setattr__(self, "has_time_in_key", any(column.type.name == "timestamp" for column in self.key))

    # -- lookups --------------------------------------------------------------------------------

    @property
    def is_plain(self) -> bool:
        """Whether all that an aggregate measures are sums, counts and extremes of columns, of every event."""
        return self.remembered(
            "is plain",
            lambda: (
                all(c.state is None for c in self.columns)
                and all(m.expression is None and m.where is None for m in self.measures)
            ),
        )

    def source_type(self, name: str) -> ColumnType:
        """The type of a source's column, of an aggregate whose expressions, predicates or states observe it."""
        types: dict[str, ColumnType] = self.remembered(
            "source types", lambda: {column: ColumnType.parse(text) for column, text in self.observes}
        )
        return types[name]

    @property
    def origin(self) -> int:
        """The id of the table's first generation: the same for as long as it is not dropped."""
        return self.origin_id or self.id

    def alteration_of(self, i: int) -> Alteration | None:
        """The alteration that column ``i`` came with; None if the table had it from the beginning."""
        return next((one for one in reversed(self.alterations) if one.columns <= i), None)

    def is_shown(self, i: int) -> bool:
        """Whether readers see column ``i``."""
        alteration = self.alteration_of(i)
        return alteration is None or alteration.state == "ready"

    @property
    def is_building(self) -> bool:
        """Whether it is an aggregate that is being built, or to which measures are being added."""
        return self.state == "building" or any(one.state == "building" for one in self.alterations)

    @property
    def shown_columns(self) -> tuple[Column, ...]:
        return tuple(self.columns[i] for i in self.index_of.values())

    @property
    def shown_measures(self) -> tuple[Measure, ...]:
        return tuple(self.measures[i] for i in self.index_of.values()) if self.measures else ()

    @property
    def shown(self) -> TableSchema:
        """The table as its readers see it: without the columns that nobody sees, and as one that was never altered.

        Whatever is asked of a table is checked against this, and made from this; only what finds the columns in stored
        rows and events goes by the definition itself.
        """
        if not self.alterations:
            return self
        return self.remembered(
            "shown",
            lambda: dataclasses.replace(self, columns=self.shown_columns, measures=self.shown_measures, alterations=()),
        )

    @property
    def altered_ts(self) -> int:
        """The CTS of the newest commit that changed what readers see of the definition: snapshots from it on see it."""
        return max([self.created_ts, *(one.cts for one in self.alterations if one.state == "ready")])

    def at(self, ts: int) -> TableSchema:
        """The definition as a snapshot at ``ts`` sees it: later columns are stored, and not seen."""
        later = [i for i, one in enumerate(self.alterations) if one.cts > ts and one.state == "ready"]
        if not later:
            return self
        first = later[0]

        def work_out() -> TableSchema:
            unseen = tuple(
                dataclasses.replace(one, state="unseen") if i >= first and one.state == "ready" else one
                for i, one in enumerate(self.alterations)
            )
            derived = self.derived[: self.alterations[first].derived]
            return dataclasses.replace(self, alterations=unseen, derived=derived)

        return self.remembered(("at", first), work_out)

    @property
    def measures_since(self) -> dict[str, dict[str, int] | None]:
        """Of each measure since when it is complete; None: as the aggregate is, from its beginning.

        ``{"commit_ts": c}``: it has the events committed after c. ``{"event_time_us": t}``: it has the events from t
        on (microseconds since 1970 UTC); those before had been forgotten when it was added.
        """
        out: dict[str, dict[str, int] | None] = {}
        for i in self.index_of.values():
            added = self.alteration_of(i)
            since: dict[str, int] | None = None
            if added is not None and not added.backfilled:
                since = {"commit_ts": added.cts}
            elif added is not None and added.floor_us is not None and added.floor_us != self.complete_since_us:
                since = {"event_time_us": added.floor_us}
            out[self.columns[i].name] = since
        return out

    @property
    def forgets_rows(self) -> bool:
        """Whether it is an aggregate with ``retention``: some snapshots do not see its rows of old slots any more."""
        return self.retention_us is not None and self.kind == "aggregate"

    @property
    def key_names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.key)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Every name a read returns, in order: key columns, columns, derived expressions."""
        known: tuple[str, ...] | None = self.memo.get("output names")
        return known or self.remembered("output names", lambda: (*self.by_name, *(name for name, _ in self.derived)))

    def first_outputs(self, count: int) -> tuple[str, ...] | None:
        """Which ``count`` names a read returned when there were no more; None: as many as now, or there never were."""
        if count == len(self.output_names):
            return None

        def work_out() -> tuple[str, ...] | None:
            for one in self.alterations:
                before = self.at(one.cts - 1)
                if one.state == "ready" and len(before.output_names) == count:
                    return before.output_names
            return None

        return self.remembered(("first outputs", count), work_out)

    def remembered(self, what: Any, work_out: Callable[[], T]) -> T:
        """``work_out()``, once: it must depend on nothing but this definition and ``what``."""
        try:
            known: T = self.memo[what]
        except KeyError:
            if len(self.memo) >= _MEMO_MAX:  # every choice of columns that callers read is one
                self.memo.clear()
            known = self.memo[what] = work_out()
        return known

    def column(self, name: str) -> Column:
        try:
            return self.by_name[name]
        except (KeyError, TypeError):
            known = ", ".join(self.by_name)
            raise SchemaError(f"table {self.name!r} has no column {shown(name)}; it has {known}") from None

    def expression_of(self, name: str) -> str | None:
        """The text of a derived column, or ``name`` itself where that is an expression over an aggregate's columns.

        A read may name a derived column that was not declared by its text, like ``quantile(latency, 0.99)``. None of
        any other name. Raises SchemaError for a text that is no expression.
        """
        declared: dict[str, str] = self.remembered("derived", lambda: dict(self.derived))
        if (text := declared.get(name)) is not None:
            return text
        if self.kind != "aggregate" or name in self.by_name or name.isidentifier():
            return None
        types = {column: known.type for column, known in self.by_name.items()}
        self.remembered(("expression", name), lambda: parse_expression(name, types))
        return name

    # -- what callers hand in and get back --------------------------------------------------------

    def stored_key(self, key: object, *, partial: bool = False) -> tuple[Any, ...]:
        """A caller's row key (a tuple in column order) in stored form; ``partial`` allows a prefix.

        Raises SchemaError for a wrong shape or type, InvalidArgument for null.
        """
        if not self.key:
            raise SchemaError(f"event table {self.name!r} has no row keys: scan it, or read its aggregates")
        if not isinstance(key, (tuple, list)):
            raise SchemaError(f"a key of {self.name!r} is a tuple of {', '.join(self.key_names)}, not {shown(key)}")
        if len(key) != len(self.key) and not (partial and len(key) <= len(self.key)):
            raise SchemaError(
                f"a key of {self.name!r} has {len(self.key)} columns ({', '.join(self.key_names)}): {shown(key)}"
            )
        if self.counted and {*map(type, key)} == _INTEGERS and min(key) >= INT64_MIN and max(key) <= INT64_MAX:
            return tuple(key)
        out = []
        for column, value in zip(self.key, key, strict=False):
            if type(value) is int and column.type.name in _COUNTED and INT64_MIN <= value <= INT64_MAX:
                out.append(value)  # most are: worth a short way
                continue
            if value is None:
                raise InvalidArgument(f"key column {column.name!r} of {self.name!r} must not be null")
            out.append(column.type.to_stored(value, f"key column {column.name!r}"))
        return tuple(out)

    def stored_bound(self, key: object) -> tuple[Any, ...]:
        """A bound of a scan in stored form: a key or its first columns; for events, (event time,)."""
        if self.kind != "event":
            return self.stored_key(key, partial=True)
        values = key if isinstance(key, (tuple, list)) else (key,)
        if len(values) != 1 or values[0] is None:
            raise InvalidArgument(
                f"a bound of event table {self.name!r} is its event time, (moment,), not {shown(key)}"
            )
        return (self.column(self.event_time or "").type.to_stored(values[0], f"bound of {self.event_time!r}"),)

    def caller_bounds(self, bounds: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Bounds of scans as the caller writes them: ``stored_bound`` backwards.

        Without those that cannot be told, as a moment that no datetime holds: they are where to cut, which is anywhere.
        """
        columns = self.key if self.kind != "event" else (self.column(self.event_time or ""),)
        types, told = [column.type for column in columns], list[tuple[Any, ...]]()
        for bound in bounds:
            with contextlib.suppress(OutOfRange):
                told.append(tuple(type_.from_stored(value) for type_, value in zip(types, bound, strict=False)))
        return told

    def _settable(self, name: str) -> Column:
        column = self.column(name)
        if name not in self.index_of:
            raise SchemaError(f"{name!r} is a key column of {self.name!r}: give it in the key tuple")
        return column

    def _writable(self) -> None:
        if self.kind == "aggregate":
            raise InvalidArgument(f"{self.name!r} is an aggregate of {self.source!r}: append events there instead")
        if self.kind == "event":
            raise InvalidArgument(f"{self.name!r} is an event table: use append()")
        if self.kind == "view":
            raise InvalidArgument(f"{self.name!r} is a view of {self.source!r}: write there, and it follows")

    def check_written_key(self, key: tuple[Any, ...]) -> None:
        """Raises InvalidArgument for a key in stored form that no row may be written under: a time that no datetime
        holds. A row that has such a one from before is read and deleted by it."""
        for column, value in zip(self.key, key, strict=True) if self.has_time_in_key else ():
            if column.type.name == "timestamp":
                check_moment(value, f"key column {column.name!r}")

    def stored_put(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Named column values for put and insert, in stored form; None is null."""
        self._writable()
        return {name: self._settable(name).type.to_written(value, f"column {name!r}") for name, value in values.items()}

    def stored_delta(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Named deltas, in stored form. Nulls are left out, since every operator skips them."""
        self._writable()
        if not values:
            raise InvalidArgument(f"a delta on {self.name!r} names no column: give at least one, like balance=+21")
        out = {}
        for name, value in values.items():
            column = self._settable(name)
            if column.operator is None:
                raise SchemaError(f"{name!r} of {self.name!r} is a value column without an operator: use put()")
            if type(value) is int and column.type.name == "int64" and INT64_MIN <= value <= INT64_MAX:
                out[name] = value
            elif value is not None:
                out[name] = column.type.to_written(value, f"delta of {name!r}")
        return out

    def check_overwritable(self) -> None:
        """Raises InvalidArgument for an aggregate or a view, whose content follows from its source."""
        if self.kind == "view":
            raise InvalidArgument(
                f"{self.name!r} is a view of {self.source!r} and is not overwritten by itself: overwrite "
                f"{self.source!r}, and its views hold the new rows in the same commit"
            )
        if self.kind == "aggregate":
            raise InvalidArgument(
                f"{self.name!r} is an aggregate of {self.source!r} and is not overwritten by itself: overwrite "
                f"{self.source!r}, and its aggregates hold the sums of the new events in the same commit"
            )

    def check_guardable(self, column: str | None) -> None:
        """A guard names a non-key column, or None for the row's existence."""
        if self.kind == "event":
            raise InvalidArgument(f"{self.name!r} is an event table: it has no rows to guard")
        if column is not None:
            self._settable(column)

    def output_columns(self, columns: Iterable[str] | None) -> tuple[str, ...]:
        """The names a read returns, checked; None is all of them. ``expression_of`` says what else they may be."""
        if columns is None:
            return self.output_names
        if isinstance(columns, str):
            raise InvalidArgument(f"columns is a list of names, not the string {shown(columns)}")
        known = self.output_names
        try:
            out = tuple(dict.fromkeys(columns))
        except TypeError:
            raise InvalidArgument(f"columns is a list of names, not {shown(columns)}") from None
        names = known if len(out) <= _FEW else frozenset(known)
        for name in out:
            if name not in names and (not isinstance(name, str) or self.expression_of(name) is None):
                raise SchemaError(f"table {self.name!r} has no column {shown(name)}; it has {', '.join(known)}")
        return out

    def output_type(self, name: str) -> ColumnType:
        """The type a read returns for a column; derived columns are float64. Raises SchemaError if there is none."""
        return ColumnType("float64") if self.expression_of(name) is not None else self.column(name).type

    def row_from_stored(self, row: Mapping[str, Any], names: Iterable[str] | None = None) -> dict[str, Any]:
        """One row as a caller sees it, or these columns of it. Raises OutOfRange for a sum that has outgrown its
        column."""
        by_name = self.by_name
        return {
            name: by_name[name].type.from_stored(row[name], name) if name in by_name else row[name]
            for name in (row if names is None else names)
        }

    def description(self) -> dict[str, Any]:
        """The answer of ``describe``: plain data, for people and programs."""
        out: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind,
            "state": self.state,
            "key": {column.name: str(column.type) for column in self.key},
            "columns": {column.name: column.describe() for column in self.shown_columns},
            "history_us": self.history_us,
            "created_ts": self.created_ts,
            "id": self.origin,
        }
        out |= {"role": self.role} if self.role else {}
        out |= {"shard_by": list(self.shard_by)} if self.shard_by else {}
        if self.kind == "event":
            out |= {"event_time": self.event_time, "retention_us": self.retention_us}
            out |= {"index": list(self.index)} if self.index else {}
            out |= {} if self.cold is None else {"local_us": self.local_us, "cold": self.cold}
            out |= {} if self.expires is None else {"expires": self.expires}
        if self.kind == "view":
            out |= {"source": self.source, "unique": self.unique}
        if self.kind == "aggregate":
            out["source"] = self.source
            out["retention_us"] = self.retention_us
            out["complete_since_us"] = self.complete_since_us
            if self.declared_source is not None:
                out["declared_source"] = self.declared_source
            out["group_by"] = [group.description() for group in self.group_by]
            out["measures"] = {m.name: str(m.call) for m in self.shown_measures}
            out["measures_since"] = self.measures_since
            out["derived"] = dict(self.derived)
        return out

    def described(
        self, statistics: Mapping[str, Any], backups: Iterable[str] = (), lateness: Iterable[LatenessDay] = ()
    ) -> dict[str, Any]:
        """``description`` with what is known about its contents: an aggregate is complete from its floor on.

        ``backups``: those that hold retracted events. ``lateness``: of events, by day.
        """
        out = {**self.description(), "statistics": statistics}
        if self.kind == "event":
            out["retracted_in_backups"] = list(backups)
            out["lateness"] = dict(day.described() for day in lateness)
        if self.kind == "aggregate":
            out["complete_since_us"] = statistics.get("complete_since_us", self.complete_since_us)
        return out

    # -- JSON: the form in the catalog ----------------------------------------------------------

    def to_json(self) -> bytes:
        """Without what is as it is by default."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        out = {name: value for name, value in out.items() if name in _WRITTEN or value != _DEFAULTS[name]}
        out["key"] = [(c.name, str(c.type)) for c in self.key]
        out["columns"] = [c.to_plain() for c in self.columns]
        out |= {n: list(map(dataclasses.astuple, out[n])) for n in ("alterations",) if n in out}
        out |= {name: [each.to_plain() for each in out[name]] for name in ("group_by", "measures") if name in out}
        return json.dumps(out, separators=(",", ":")).encode()

    @staticmethod
    def from_json(data: bytes) -> TableSchema:
        known = json.loads(data)
        known["key"] = tuple(Column(name, ColumnType.parse(type_)) for name, type_ in known["key"])
        known["columns"] = tuple(map(Column.from_plain, known["columns"]))
        known["group_by"] = tuple(GroupKey(*group) for group in known.get("group_by", ()))
        known["measures"] = tuple(map(Measure.from_plain, known.get("measures", ())))
        known["derived"] = tuple(map(tuple, known.get("derived", ())))
        known |= {name: tuple(known.get(name, ())) for name in ("index", "shard_by")}
        known["alterations"] = tuple(map(Alteration.from_plain, known.get("alterations", ())))
        return TableSchema(**known)


_WRITTEN: Final = frozenset({"name", "kind", "id", "state", "created_ts", "key", "columns"})
_DEFAULTS: Final = {field.name: field.default for field in dataclasses.fields(TableSchema)}
