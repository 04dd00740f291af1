"""Between stored-form Python values and the messages of kivi.v1: pure, used by the clients and by the server.

Values, keys, rows, predicates and table definitions each have one ``to_`` and one ``from_`` function.
Decoding here trusts the *shape* of a message, which protobuf guarantees, and nothing about its
contents: what a stranger sent is checked against the schema by the server.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.declarations import TimeSlot
from kivi.model.expressions import COMPARISONS, TEXT, Expr
from kivi.model.expressions.nodes import TUPLES, check_shape
from kivi.model.orders import Order
from kivi.model.questions import Group, Question, Stored, Windows, question_of, windows_of
from kivi.model.rollups import Rollup, rollup_of
from kivi.model.schema import Alteration, Column, GroupKey, Measure, TableSchema
from kivi.model.slots import Slot
from kivi.model.types import ColumnType
from kivi.wire.frames import NONE, Bodies
from kivi.wire.v1 import types_pb2 as pb

__all__ = [
    "OPERATOR_NAMES",
    "fill_values",
    "from_expr",
    "from_table",
    "from_values",
    "to_columns",
    "to_expr",
    "to_table",
]


# -- values -----------------------------------------------------------------------------------------

_LONG_BYTES: Final = 256  # a value of more is a body, where it may be
_IN_BODY: Final = frozenset({"string_body", "bytes_body"})
_FIELD_OF: Final[dict[type, str]] = {
    int: "int_value",
    str: "string_value",
    float: "float_value",
    bytes: "bytes_value",
    bool: "bool_value",
}


def fill_values(target: Any, values: Iterable[Any], bodies: list[Any] | None = None) -> None:
    """Appends stored-form values to a repeated Value field; those that are long to ``bodies``, if there are such."""
    for value in values:
        if value is None:
            target.add()
        else:
            kind = type(value)
            if kind is int:
                target.add(int_value=value)
            elif bodies is not None and kind in (str, bytes) and len(value) > _LONG_BYTES:
                body = value.encode() if kind is str else value
                target.add(**{"string_body" if kind is str else "bytes_body": len(body)})
                bodies.append(body)
            else:
                target.add(**{_FIELD_OF[kind]: value})


def from_values(values: Iterable[pb.Value], bodies: Bodies = NONE) -> list[Any]:
    """``bodies`` are those of long values. Raises InvalidArgument if they are not there, or no text."""
    out: list[Any] = []
    for value in values:
        kind = value.WhichOneof("kind")
        if kind is None:
            out.append(None)
        elif kind in _IN_BODY:
            out.append(_long_value(kind, bodies.take(getattr(value, kind))))
        else:
            out.append(getattr(value, kind))
    return out


def _long_value(kind: str, body: memoryview) -> str | bytes:
    if kind == "bytes_body":
        return bytes(body)
    try:
        return str(body, "utf-8")
    except UnicodeDecodeError:
        raise InvalidArgument("a string's body is not UTF-8") from None


# -- expressions ------------------------------------------------------------------------------------

_OPS: Final[dict[str, pb.Expr.Op]] = {
    "==": pb.Expr.OP_EQ,
    "!=": pb.Expr.OP_NE,
    "<": pb.Expr.OP_LT,
    "<=": pb.Expr.OP_LE,
    ">": pb.Expr.OP_GT,
    ">=": pb.Expr.OP_GE,
    "isin": pb.Expr.OP_IS_IN,
    "is_null": pb.Expr.OP_IS_NULL,
    "and": pb.Expr.OP_AND,
    "or": pb.Expr.OP_OR,
    "not": pb.Expr.OP_NOT,
    "col": pb.Expr.OP_COLUMN,
    "lit": pb.Expr.OP_LITERAL,
    "+": pb.Expr.OP_ADD,
    "-": pb.Expr.OP_SUBTRACT,
    "*": pb.Expr.OP_MULTIPLY,
    "/": pb.Expr.OP_DIVIDE,
    "neg": pb.Expr.OP_NEGATE,
    "coalesce": pb.Expr.OP_COALESCE,
    "case": pb.Expr.OP_CASE,
    "startswith": pb.Expr.OP_STARTS_WITH,
    "contains": pb.Expr.OP_CONTAINS,
    "matches": pb.Expr.OP_MATCHES,
    "within_km": pb.Expr.OP_WITHIN_KM,
    "part": pb.Expr.OP_TIME_PART,
    "quad": pb.Expr.OP_QUAD,
    "under": pb.Expr.OP_UNDER,
    "covers": pb.Expr.OP_COVERS,
    "prev": pb.Expr.OP_PREV,
    "next": pb.Expr.OP_NEXT,
}
_NAMES: Final = {number: name for name, number in _OPS.items()}
_SINGLE: Final = COMPARISONS | {"prev", "next"}
"""Of a column and one value."""


def to_expr(expr: Expr) -> pb.Expr:
    """A bound expression as a message."""
    out = pb.Expr(op=_OPS[expr.op], column=expr.column, args=map(to_expr, expr.args))
    if expr.op in TUPLES:
        fill_values(out.values, expr.value)
    elif _is_single(expr):
        fill_values(out.values, (expr.value,))
    if expr.op == "lit":
        out.type = str(expr.type)
    return out


def from_expr(message: pb.Expr) -> Expr:
    """A message as an expression, to be bound again: literals are what was sent, and values do not know their types."""
    op = _NAMES.get(message.op)
    if op is None:
        raise InvalidArgument(f"{message.op} is not an operator of a predicate")
    values = from_values(message.values)
    type_ = ColumnType.parse(message.type) if op == "lit" else None
    expr = Expr(op, message.column, tuple(values) if op in TUPLES else None, tuple(map(from_expr, message.args)), type_)
    if _is_single(expr):
        if len(values) != 1:
            raise InvalidArgument(f"{op!r} takes one value, not {len(values)}")
        expr = replace(expr, value=values[0])
    check_shape(expr)
    return expr


def _is_single(expr: Expr) -> bool:
    """Whether its value is one literal."""
    return expr.op == "lit" or expr.op in TEXT or bool(expr.column and expr.op in _SINGLE)


# -- table definitions ------------------------------------------------------------------------------


def as_dict(message: Any) -> dict[str, Any]:
    """What a message has, as plain values under its fields' names; None for what it may lack and does."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            found[field.name] = [as_dict(one) for one in value] if field.message_type else list(value)
        elif field.has_presence and not message.HasField(field.name):
            found[field.name] = None
        else:
            found[field.name] = as_dict(value) if field.message_type else value
    return found


def _numbers(enum: Any) -> dict[Any, Any]:
    """What messages call KIND_ROW is ``row`` elsewhere. What is not specified has no name."""
    return {name.partition("_")[2].lower(): number for name, number in enum.items() if number}


_KINDS: Final = _numbers(pb.Table.Kind)
_KIND_NAMES: Final = {number: name for name, number in _KINDS.items()}
_OPERATORS: Final = _numbers(pb.Column.Operator)
OPERATOR_NAMES: Final = {number: name for name, number in _OPERATORS.items()}
_MEASURES: Final = _numbers(pb.Measure.Kind)
del _MEASURES["other"]
_MEASURE_NAMES: Final = {number: name for name, number in _MEASURES.items()}


def to_groups(groups: Sequence[GroupKey]) -> list[pb.GroupKey]:
    return [pb.GroupKey(name=g.name, source=g.source, slot_us=g.slot_us, width=g.width, tz=g.tz) for g in groups]


def to_rollup(rollup: Rollup) -> pb.Rollup:
    step = rollup.step
    return pb.Rollup(
        by=rollup.by,
        step="" if step is None else step.width,
        tz="" if step is None else step.zone,
        start_us=rollup.start_us,
        end_us=rollup.end_us,
        last_us=rollup.last_us,
        measures=rollup.measures,
    )


def from_rollup(schema: TableSchema, rollup: pb.Rollup) -> Rollup:
    """Checked against the table. Raises SchemaError, InvalidArgument."""
    return rollup_of(
        schema,
        rollup.by,
        Slot.parse(rollup.step, rollup.tz or None) if rollup.step else None,
        start=rollup.start_us if rollup.HasField("start_us") else None,
        end=rollup.end_us if rollup.HasField("end_us") else None,
        last=rollup.last_us if rollup.HasField("last_us") else None,
        measures=rollup.measures or None,
    )


def to_order(order: Order) -> list[str]:
    return [f"-{name}" if down else name for name, down in order]


def to_question(question: Question) -> pb.Question:
    computed = {name: to_expr(expression) for name, expression in question.computed}
    windows = None
    if question.windows is not None:
        size = question.windows.size
        windows = pb.Windows(
            size="" if size is None else size.width,
            tz="" if size is None else size.zone,
            slide_us=question.windows.slide_us,
            session_us=question.windows.session_us,
        )
    return pb.Question(
        groups=[_to_group(item, question, computed) for item in question.group_by],
        measures=to_measures(question.measures),
        derived=[pb.Derived(name=name, expression=text) for name, text in question.target.derived],
        start_us=question.start_us,
        end_us=question.end_us,
        having=None if question.having is None else to_expr(question.having),
        order_by=to_order(question.order),
        offset=question.offset,
        columns=question.columns,
        windows=windows,
    )


def _to_group(item: Group, question: Question, computed: Mapping[str, pb.Expr]) -> pb.Question.Group:
    if isinstance(item, str):
        return pb.Question.Group(name=item, source=item)
    if isinstance(item, TimeSlot):
        return pb.Question.Group(name=item.name, source=item.column, slot=item.slot.width, tz=item.slot.zone)
    source = next(group.source for group in question.target.group_by if group.name == item[0])
    return pb.Question.Group(name=item[0], expression=computed[source])


def from_question(schema: TableSchema, question: pb.Question, stored: Stored) -> Question:
    """Checked against the table; ``stored`` checks literals. Raises SchemaError, InvalidArgument."""
    measures = from_measures(question.measures)
    _check_twice("a question", [m.name for m in measures])
    return question_of(
        schema,
        [_from_group(group) for group in question.groups],
        {m.name: m.call for m in measures},
        {d.name: d.expression for d in question.derived},
        start=question.start_us if question.HasField("start_us") else None,
        end=question.end_us if question.HasField("end_us") else None,
        having=from_expr(question.having) if question.HasField("having") else None,
        order_by=list(question.order_by),
        offset=question.offset,
        columns=question.columns or None,
        windows=_from_windows(question.windows) if question.HasField("windows") else None,
        stored=stored,
    )


def _check_twice(what: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise SchemaError(f"{what} names a measure twice: {', '.join(names)}")


def _from_group(group: pb.Question.Group) -> Group:
    if group.HasField("expression"):
        return group.name, from_expr(group.expression)
    if group.slot:
        return TimeSlot(group.source, Slot.parse(group.slot, group.tz or None), group.name)
    return group.source


def _from_windows(windows: pb.Windows) -> Windows:
    slide_us = windows.slide_us if windows.HasField("slide_us") else None
    session_us = windows.session_us if windows.HasField("session_us") else None
    return windows_of(windows.size or None, slide_us, session_us, windows.tz or None)


def to_measures(measures: Sequence[Measure]) -> list[pb.Measure]:
    return [
        pb.Measure(
            name=m.name,
            kind=_MEASURES.get(m.operator, pb.Measure.KIND_OTHER),
            source=m.source or "",
            operator="" if m.operator in _MEASURES else m.operator,
            expression=m.expression or "",
            where=m.where or "",
            options=json.dumps(m.options) if m.options else "",
        )
        for m in measures
    ]


def from_measures(measures: Iterable[pb.Measure]) -> tuple[Measure, ...]:
    """Raises SchemaError, InvalidArgument for what is no measure; whether it fits a table is for the table to say."""
    out = []
    for m in measures:
        operator = m.operator if m.kind == pb.Measure.KIND_OTHER else _MEASURE_NAMES.get(m.kind)
        if not operator:
            raise SchemaError(f"measure {m.name!r} does not say what it measures")
        options = _options(m)
        out.append(Measure(m.name, operator, m.source or None, m.expression or None, m.where or None, options))
    return tuple(out)


def _options(message: pb.Measure) -> tuple[tuple[str, Any], ...]:
    if not message.options:
        return ()
    try:
        return tuple((str(name), value) for name, value in json.loads(message.options))
    except (ValueError, TypeError, RecursionError):
        raise InvalidArgument(f"the options of measure {message.name!r} are no list of pairs") from None


def _state(column: Column) -> str:
    return column.operator if column.operator and column.operator not in _OPERATORS else ""


def to_columns(columns: Iterable[Column]) -> list[pb.Column]:
    return [
        pb.Column(name=c.name, type=str(c.type), operator=_OPERATORS.get(c.operator or ""), state=_state(c))
        for c in columns
    ]


def _to_alterations(schema: TableSchema) -> list[pb.Alteration]:
    """Those that readers see, of columns that they see."""
    return [
        pb.Alteration(
            columns=sum(schema.is_shown(i) for i in range(one.columns)),
            derived=one.derived,
            commit_ts=one.cts,
            only_later=not one.backfilled,
            event_time_us=one.floor_us,
        )
        for one in schema.alterations
        if one.state == "ready"
    ]


def _from_alteration(one: pb.Alteration) -> Alteration:
    floor_us = one.event_time_us if one.HasField("event_time_us") else None
    return Alteration(one.columns, one.derived, one.commit_ts, backfilled=not one.only_later, floor_us=floor_us)


def to_table(schema: TableSchema) -> pb.Table:
    return pb.Table(
        name=schema.name,
        kind=_KINDS[schema.kind],
        id=schema.origin,
        state=pb.Table.STATE_BUILDING if schema.state == "building" else pb.Table.STATE_READY,
        created_ts=schema.created_ts,
        key=[pb.Column(name=c.name, type=str(c.type)) for c in schema.key],
        columns=to_columns(schema.shown_columns),
        history_us=schema.history_us,
        event_time=schema.event_time or "",
        retention_us=schema.retention_us,
        local_us=schema.local_us,
        cold=schema.cold,
        index=schema.index,
        expires=schema.expires,
        shard_by=schema.shard_by,
        role=schema.role,
        source=schema.source or "",
        source_id=schema.source_id,
        unique=schema.unique,
        declared_source=schema.declared_source or "",
        group_by=to_groups(schema.group_by),
        measures=to_measures(schema.shown_measures),
        derived=[pb.Derived(name=name, expression=text) for name, text in schema.derived],
        complete_since_us=schema.complete_since_us,
        alterations=_to_alterations(schema),
    )


def from_table(table: pb.Table) -> TableSchema:
    if table.kind not in _KIND_NAMES:
        raise SchemaError(f"table {table.name!r} does not say what kind of table it is")
    return TableSchema(
        name=table.name,
        kind=_KIND_NAMES[table.kind],
        key=tuple(Column(c.name, ColumnType.parse(c.type)) for c in table.key),
        columns=tuple(
            Column(c.name, ColumnType.read(c.type), OPERATOR_NAMES.get(c.operator) or c.state or None)
            for c in table.columns
        ),
        id=table.id,
        state="building" if table.state == pb.Table.STATE_BUILDING else "ready",
        created_ts=table.created_ts,
        history_us=table.history_us if table.HasField("history_us") else None,
        event_time=table.event_time or None,
        retention_us=table.retention_us if table.HasField("retention_us") else None,
        local_us=table.local_us if table.HasField("local_us") else None,
        cold=table.cold if table.HasField("cold") else None,
        index=tuple(table.index),
        expires=table.expires if table.HasField("expires") else None,
        shard_by=tuple(table.shard_by),
        role=table.role,
        source=table.source or None,
        source_id=table.source_id,
        unique=table.unique,
        declared_source=table.declared_source or None,
        group_by=tuple(GroupKey(g.name, g.source, g.slot_us, g.width, g.tz) for g in table.group_by),
        measures=from_measures(table.measures),
        derived=tuple((d.name, d.expression) for d in table.derived),
        complete_since_us=table.complete_since_us if table.HasField("complete_since_us") else None,
        alterations=tuple(map(_from_alteration, table.alterations)),
    )
