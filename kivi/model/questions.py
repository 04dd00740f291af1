"""Questions: what nobody declared beforehand, asked of a table's events, or of an aggregate's rows.

A question says which events (a range of event time, a predicate), how they are grouped, and what is measured of each
group. Its answer is what an aggregate with those groups and measures would hold over the same events; so it is checked
like a declaration, and its *target* is the schema of such an aggregate::

    group_by=["app", time_slot("ts", "1h")]     key columns of the target
    measures={"n": count()}                     columns of the target
    derived={"p99": "quantile(latency, 0.99)"}  computed of a row of the target
    having, order_by, limit, offset             of the rows, once they are there

Unlike the key of an aggregate a group may be null: null is a value of its own there, as in SQL, and comes last.

*Windows* are one more key column, ``window_start``. A tumbling window is a slot. Sliding windows are made of *panes*,
slots as long as what size and slide have in common, whose states are combined for each window. A session is made of the
events of a group of which none comes more than the gap after the one before. ``window_end`` is where a window ends,
exclusive; of a session it is the time of its last event.

Asked of an aggregate, groups are its key columns, or slots made of its slots, and measures are ``kivi.combine`` of its
measures: its rows are combined, as a rollup does it.

``Question`` is data, in stored form.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.changes import COMMIT_TIME, COMMIT_TS, check_not_hidden
from kivi.model.declarations import TimeSlot, derived_columns, grouped
from kivi.model.expressions import Expr, bind, bind_value, names
from kivi.model.given import is_among
from kivi.model.levels import flat_measure
from kivi.model.measuring import TIMED, measured, observed_columns
from kivi.model.names import check_disjoint, check_name, name_list
from kivi.model.orders import Order, order_of
from kivi.model.rollups import aligned, derived_from, stored_slot
from kivi.model.schema import Column, GroupKey, Measure, OperatorCall, TableSchema
from kivi.model.slots import Slot, parse_duration_us
from kivi.model.types import ColumnType, shown

__all__ = [
    "COMMIT_TIME",
    "SESSION",
    "WINDOW_END",
    "WINDOW_START",
    "Group",
    "Question",
    "Stored",
    "Windows",
    "asked_of",
    "question_of",
    "seen_schema",
    "windows_of",
]

WINDOW_START: Final = "window_start"
WINDOW_END: Final = "window_end"
SESSION: Final = "\0session"
"""The column of the events that says when the session of each begins."""
_COMPUTED: Final = "\0computed "
_MOMENT: Final = ColumnType("timestamp")
_FLOAT: Final = ColumnType("float64")

Group = str | TimeSlot | tuple[str, Expr]
Stored = Callable[[ColumnType, Any, str], Any]


@dataclass(frozen=True, slots=True)
class Windows:
    """``size`` of tumbling windows, and of sliding ones, which begin every ``slide_us``; or the gap of sessions."""

    size: Slot | None = None
    slide_us: int | None = None
    session_us: int | None = None

    @property
    def pane(self) -> Slot | None:
        """The slots whose states are combined to windows; None: sessions."""
        if self.size is None or self.slide_us is None:
            return self.size
        return Slot.parse(math.gcd(self.size.count, self.slide_us))

    def __str__(self) -> str:
        if self.size is None:
            return f"sessions with gaps up to {Slot.parse(self.session_us or 1).width}"
        every = "" if self.slide_us is None else f" every {Slot.parse(self.slide_us).width}"
        return f"windows of {self.size}{every}"


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a table. ``computed``: group columns that are expressions, bound, by the name of their source.

    ``start_us`` (inclusive) and ``end_us`` (exclusive) bound the event time, of an aggregate where its slots begin;
    None is no bound. ``having`` is bound; ``order``: (column of the answer, whether from the largest down). ``columns``
    are those of the answer, in order. ``cells``: of an aggregate, the places of the columns that are combined.
    """

    target: TableSchema
    columns: tuple[str, ...]
    group_by: tuple[Group, ...] = ()
    computed: tuple[tuple[str, Expr], ...] = ()
    measures: tuple[Measure, ...] = ()
    start_us: int | None = None
    end_us: int | None = None
    having: Expr | None = None
    order: Order = ()
    offset: int = 0
    windows: Windows | None = None
    cells: tuple[int, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that are given, ordered by, or asked about."""
        asked = sorted(names(self.having)) if self.having is not None else ()
        return tuple(dict.fromkeys((*self.columns, *(name for name, _ in self.order), *asked)))

    @property
    def is_timed(self) -> bool:
        """Whether it measures something that depends on the total order of events."""
        return any(measure.operator in TIMED for measure in self.target.measures)

    def type_of(self, name: str) -> ColumnType:
        """Of a column of the answer. Raises SchemaError."""
        return _type_of(self.target, self.windows, name)


def seen_schema(schema: TableSchema) -> TableSchema:
    """A table as questions see it: as shown, and an event table has the columns ``_commit_ts`` and ``_commit_time``."""
    shown = schema.shown
    if schema.kind != "event":
        return shown
    hidden = [
        Column(name, type_)
        for name, type_ in ((COMMIT_TS, ColumnType("int64")), (COMMIT_TIME, _MOMENT))
        if name not in schema.by_name
    ]
    return schema.remembered(seen_schema, lambda: replace(shown, columns=(*shown.columns, *hidden)))


def windows_of(
    size: str | int | dt.timedelta | None,
    slide: str | int | dt.timedelta | None = None,
    session: str | int | dt.timedelta | None = None,
    tz: str | None = None,
) -> Windows:
    """Raises SchemaError, InvalidArgument."""
    if (size is None) == (session is None):
        raise InvalidArgument('windows have a size, like size="5m", or are sessions, like session="30m"')
    if size is None or session is not None:
        if slide is not None or tz is not None:
            raise InvalidArgument("slide and tz are of windows that have a size")
        assert session is not None
        return Windows(session_us=parse_duration_us(session, "session"))
    slot = Slot.parse(size, tz)
    if slide is None:
        return Windows(slot)
    slide_us = parse_duration_us(slide, "slide")
    if not slot.is_fixed:
        raise InvalidArgument(f"windows of {slot} cannot slide: their lengths differ, so leave slide out")
    if slide_us > slot.count:
        raise InvalidArgument(f"with slide={slide!r} above size={size!r} some events would be in no window")
    return Windows(slot) if slide_us == slot.count else Windows(slot, slide_us)


def question_of(
    schema: TableSchema,
    group_by: Iterable[Group] = (),
    measures: Mapping[str, OperatorCall] | None = None,
    derived: Mapping[str, str] | None = None,
    *,
    start: Any = None,
    end: Any = None,
    having: Expr | None = None,
    order_by: str | Iterable[str] = (),
    offset: int = 0,
    columns: Iterable[str] | None = None,
    windows: Windows | None = None,
    stored: Stored = ColumnType.to_stored,
) -> Question:
    """What a caller asks of a table, checked. ``stored`` is as of ``bind``. Raises SchemaError, InvalidArgument."""
    if schema.kind in ("row", "view"):
        raise InvalidArgument(f"{schema.name!r} is no event table and no aggregate: scan its rows")
    groups = (group_by,) if isinstance(group_by, (str, TimeSlot)) else tuple(group_by)
    if windows is not None and not isinstance(windows, Windows):
        raise InvalidArgument(f"windows are asked for by snapshot.windows(...), not {shown(windows)}")
    for name in measures or ():
        check_name(name, "measure")
    check_not_hidden("the question", (*(measures or ()), *(derived or ())))
    of = _of_events if schema.kind == "event" else _of_rows
    target, computed, calls, cells = of(schema, groups, measures, derived, windows, stored)
    check_disjoint(schema.name, _names(target, windows))
    bounds = [_bound(schema, what, moment) for what, moment in (("start", start), ("end", end))]
    outputs = _outputs(target, windows, columns)
    order = order_of(order_by, lambda name: _type_of(target, windows, name))
    if having is not None:
        having = bind(having, lambda name: _type_of(target, windows, name), stored)
    asked = Question(
        target, outputs, groups, computed, calls, bounds[0], bounds[1], having, order, offset, windows, cells
    )
    for name in asked.needed:
        asked.type_of(name)
    return asked


def _names(target: TableSchema, windows: Windows | None) -> list[str]:
    """Of the columns that there are."""
    ends = () if windows is None or windows.size is None else (WINDOW_END,)  # of sessions it is a measure
    columns = (column.name for column in target.columns)
    return [*target.key_names, *columns, *(name for name, _ in target.derived), *ends]


def _bound(schema: TableSchema, what: str, moment: Any) -> int | None:
    if moment is None:
        return None
    if schema.kind == "event":
        return int(schema.stored_bound(moment)[0])
    stored = stored_slot(schema)
    if stored is None:
        raise InvalidArgument(f"{what} is for aggregates with a time slot in their key, and {schema.name!r} has none")
    return aligned(schema, stored[2], what, moment)


# -- of events --------------------------------------------------------------------------------------


Target = tuple[TableSchema, tuple[tuple[str, Expr], ...], tuple[Measure, ...], tuple[int, ...]]


def _of_events(
    schema: TableSchema,
    group_by: Sequence[Group],
    measures: Mapping[str, OperatorCall] | None,
    derived: Mapping[str, str] | None,
    windows: Windows | None,
    stored: Stored,
) -> Target:
    if not measures:
        raise SchemaError("a question of events needs at least one measure, like measures={'n': kivi.count()}")
    source, seen = seen_schema(schema), seen_schema(schema)
    computed: list[tuple[str, Expr]] = []
    plain: list[tuple[str, str | TimeSlot]] = []
    for item in group_by:
        if isinstance(item, (str, TimeSlot)):
            plain.append((item if isinstance(item, str) else item.name, item))
            continue
        name, expression = _pair(item)
        bound, type_ = bind_value(expression, lambda column: seen.column(column).type, stored)
        computed.append((_COMPUTED + name, bound))
        source = replace(source, columns=(*source.columns, Column(_COMPUTED + name, type_)))
        plain.append((name, _COMPUTED + name))
    groups, keys = grouped("the question", source, [item for _, item in plain])
    groups = [replace(group, name=name) for group, (name, _) in zip(groups, plain, strict=True)]
    keys = [replace(key, name=name) for key, (name, _) in zip(keys, plain, strict=True)]
    if windows is not None:
        groups.append(_window_group(windows, schema.event_time or ""))
        keys.append(Column(WINDOW_START, _MOMENT))
    columns, built = measured(seen, measures)
    observed = observed_columns(seen, built)
    if windows is not None and windows.session_us is not None:
        columns.append(Column(WINDOW_END, _MOMENT, "max"))
        built.append(Measure(WINDOW_END, "max", schema.event_time))
    target = TableSchema(
        schema.name,
        "aggregate",
        tuple(keys),
        tuple(columns),
        source=schema.name,
        source_id=schema.id,
        group_by=tuple(groups),
        measures=tuple(built),
        observes=observed,
        event_time=schema.event_time,
        derived=derived_columns((*keys, *columns), derived),
    )
    return target, tuple(computed), tuple(call.as_measure(name) for name, call in measures.items()), ()


def _pair(item: Any) -> tuple[str, Expr]:
    match item:
        case (str(name), Expr() as expression) if isinstance(item, (tuple, list)):
            check_not_hidden("the question", [name])
            return check_name(name, "group key"), expression
    raise SchemaError(
        "group_by has names of columns, kivi.time_slot(...), and pairs like ('slow', kivi.col('us') > 1000), not "
        f"{shown(item)}"
    )


def _window_group(windows: Windows, source: str) -> GroupKey:
    pane = windows.pane
    return GroupKey(WINDOW_START, SESSION) if pane is None else GroupKey.of_slot(WINDOW_START, source, pane)


# -- of rows of an aggregate ------------------------------------------------------------------------


def _of_rows(
    schema: TableSchema,
    group_by: Sequence[Group],
    measures: Mapping[str, OperatorCall] | None,
    derived: Mapping[str, str] | None,
    windows: Windows | None,
    stored: Stored,
) -> Target:
    groups, keys = [], []
    for item in group_by:
        group, type_ = _row_group(schema, item)
        groups.append(group)
        keys.append(Column(group.name, type_))
    if windows is not None:
        slot = stored_slot(schema)
        if windows.pane is None or slot is None:
            why = "sessions are made of events" if windows.pane is None else f"{schema.name!r} has no time slot"
            raise InvalidArgument(f"{why}: ask the event table {schema.source!r}")
        groups.append(GroupKey.of_slot(WINDOW_START, slot[1].source, _nested(schema, slot[2], windows.pane)))
        keys.append(Column(WINDOW_START, _MOMENT))
    calls = measures or {column.name: OperatorCall("combine", column.name) for column in schema.shown_columns}
    columns, built, cells = [], [], []
    for name, call in calls.items():
        flat_measure("the question", schema, name, call)
        i = schema.index_of.get(call.argument or "")
        if i is None:
            raise SchemaError(
                f"{call.argument!r} is no measure of {schema.name!r}: it has {', '.join(schema.index_of)}"
            )
        cells.append(i)
        columns.append(replace(schema.columns[i], name=name))
        built.append(replace(schema.measures[i], name=name))
    if derived is None and not measures:
        known = {column.name for column in (*keys, *columns)}
        derived = {name: text for name, text in schema.derived if derived_from(schema, name) <= known}
    target = dataclasses.replace(
        schema,
        key=tuple(keys),
        columns=tuple(columns),
        measures=tuple(built),
        group_by=tuple(groups),
        derived=derived_columns((*keys, *columns), derived),
        alterations=(),
        retention_us=None,
    )
    asked = tuple(call.as_measure(name) for name, call in calls.items())
    return target, (), asked, tuple(cells)


def _row_group(schema: TableSchema, item: Group) -> tuple[GroupKey, ColumnType]:
    name: object = item.column if isinstance(item, TimeSlot) else item
    found = next((group for group in schema.group_by if is_among(name, (group.name,))), None)
    if found is None:
        keys = ", ".join(schema.key_names)
        raise SchemaError(f"group_by: {shown(name)} is no key column of {schema.name!r}: it has {keys}")
    if not isinstance(item, TimeSlot):
        return found, schema.by_name[found.name].type
    if found.slot is None and schema.by_name[found.name].type != _MOMENT:
        raise SchemaError(f"group_by: time_slot needs a timestamp, and {name!r} of {schema.name!r} is none")
    slot = item.slot if found.slot is None else _nested(schema, found.slot, item.slot)
    return GroupKey.of_slot(item.name, found.source, slot), _MOMENT


def _nested(schema: TableSchema, stored: Slot, slot: Slot) -> Slot:
    if not stored.nests_in(slot):
        raise InvalidArgument(f"{slot} is not made of whole slots of {schema.name!r}, which are {stored} long")
    return slot


# -- of the answer ----------------------------------------------------------------------------------


def _type_of(target: TableSchema, windows: Windows | None, name: str) -> ColumnType:
    if name == WINDOW_END and windows is not None:
        return _MOMENT
    if name in target.by_name:
        return target.by_name[name].type
    target.output_columns([name])
    return _FLOAT


def _outputs(target: TableSchema, windows: Windows | None, columns: Iterable[str] | None) -> tuple[str, ...]:
    if columns is not None:
        return tuple(dict.fromkeys(name_list(columns, "columns")))
    rest = [name for name in target.output_names if name not in target.key_names and name != WINDOW_END]
    return (*target.key_names, *((WINDOW_END,) if windows is not None else ()), *rest)


# -- of an aggregate that answers -------------------------------------------------------------------


def asked_of(
    aggregate: TableSchema, target: TableSchema, among: Iterable[int]
) -> tuple[list[tuple[int, Slot | None]], list[int]] | None:
    """How rows of an aggregate become rows of the target: of each key column of that the place in the aggregate's key,
    and the slots that it is cut to; of each measure the place of the aggregate's column, one of ``among``. None: they
    cannot."""
    keys: list[tuple[int, Slot | None]] = []
    for group in target.group_by:
        found = [_key_place(i, stored, group) for i, stored in enumerate(aggregate.group_by)]
        places = [place for place in found if place is not None]
        if not places:
            return None
        keys.append(min(places, key=lambda place: place[1] is not None))
    known = {(replace(aggregate.measures[i], name=""), replace(aggregate.columns[i], name="")): i for i in among}
    cells = [
        known.get((replace(measure, name=""), replace(column, name="")))
        for column, measure in zip(target.columns, target.measures, strict=True)
    ]
    whole = [i for i in cells if i is not None]
    return (keys, whole) if len(whole) == len(cells) else None


def _key_place(i: int, stored: GroupKey, wanted: GroupKey) -> tuple[int, Slot | None] | None:
    if stored.source != wanted.source:
        return None
    if stored.slot == wanted.slot:
        return i, None
    if wanted.slot is not None and (stored.slot is None or stored.slot.nests_in(wanted.slot)):
        return i, wanted.slot
    return None
