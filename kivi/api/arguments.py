"""The arguments of the public methods, once for all databases.

``kivi.open``, ``kivi.connect`` and ``kivi.aio.connect`` give the same methods. Each class here is the arguments of some
of them: names, order, defaults, and whatever can be said against them before any table is known. ``takes`` gives a
method those arguments. What depends on the table is checked by ``bound``, against its schema, and comes out in stored
form: a client may do that twice, when the schema that it remembers turns out to be old.
"""

from __future__ import annotations

import datetime as dt
import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Protocol, TypeGuard, TypeVar, cast

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.changes import COMMIT_TS, REMOVED, RETRACTED, Changes, check_retractions
from kivi.model.declarations import TimeSlot, parse_duration_us
from kivi.model.expressions import Expr, bind
from kivi.model.given import flag, is_among, listed
from kivi.model.levels import level_names
from kivi.model.names import check_name, column_names, is_name, is_text, name_list
from kivi.model.orders import order_of
from kivi.model.patterns import matched_schema
from kivi.model.questions import Group, Windows, question_of, seen_schema, windows_of
from kivi.model.roles import check_role
from kivi.model.rollups import rolled_outputs, rollup_of
from kivi.model.scans import Scan
from kivi.model.schema import OperatorCall, TableSchema
from kivi.model.slots import Slot
from kivi.model.subscriptions import Durable, Query, Terms
from kivi.model.types import ColumnType, shown

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "NO_ARGUMENTS",
    "AggregateArguments",
    "AlterAggregateArguments",
    "AlterTableArguments",
    "AppenderArguments",
    "BatchScanArguments",
    "ChangesArguments",
    "GetArguments",
    "GetNowArguments",
    "LevelsArguments",
    "OrderedScanArguments",
    "QuestionArguments",
    "RollupArguments",
    "ScanArguments",
    "SnapshotArguments",
    "SqlArguments",
    "SubscribeArguments",
    "SummaryArguments",
    "TailArguments",
    "TransactionArguments",
    "ViewArguments",
    "check_batch",
    "check_commit_ts",
    "check_limit",
    "check_names",
    "check_order",
    "check_rows",
    "check_token",
    "check_ttl",
    "directory",
    "drops_late",
    "move_id",
    "node_name",
    "stage_ids",
    "summary_arguments",
    "table_name",
    "takes",
    "type_of",
    "windows_arguments",
]

P = ParamSpec("P")
S = TypeVar("S")
A = TypeVar("A")
R = TypeVar("R")

_MOMENT: Final = ColumnType("timestamp")
_FLOAT: Final = ColumnType("float64")
_PATIENCE_S_MAX: Final = 1e8  # three years: more is too much for some clocks
POINTS_MAX: Final = 10_000


def takes(
    build: Callable[P, A], none: A | None = None
) -> Callable[[Callable[[S, A], R]], Callable[Concatenate[S, P], R]]:
    """``@takes(ScanArguments)``: the method is called with the arguments of ``ScanArguments``, and gets one.

    They are checked where the method is called, also if it is a coroutine or a generator. ``none`` is what it gets
    where it is called without any, again and again: nobody may change it.
    """
    parameters = inspect.signature(build).parameters.values()
    flags = {each.name: place for place, each in enumerate(parameters) if each.annotation == "bool"}

    def decorate(method: Callable[[S, A], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            for name, place in flags.items():
                if name in kwargs:
                    kwargs[name] = flag(kwargs[name], name)
                elif place < len(args):
                    flag(args[place], name)
            try:
                arguments = build(*args, **kwargs) if none is None or args or kwargs else none
            except TypeError as error:  # such as an unknown name: of what was called, and not of how it is built
                text = re.sub(rf"^{build.__name__}(\.__init__)?\(\)", f"{method.__name__}()", str(error))
                raise TypeError(text) from None
            return method(self, arguments)

        plain = inspect.signature(method)
        itself = next(iter(plain.parameters.values()))
        call.__signature__ = plain.replace(parameters=[itself, *parameters])  # type: ignore[attr-defined]
        return call

    return decorate


def type_of(schema: TableSchema, name: str) -> ColumnType:
    """``schema.output_type``, for readers of expressions."""
    return schema.output_type(name)


# -- reads --------------------------------------------------------------------------------------------


def _columns(columns: Iterable[str] | None) -> Sequence[str] | None:
    if columns is None:
        return None
    names = name_list(columns, "columns")
    if not names:
        raise InvalidArgument("columns names no column: leave it out to read all of them")
    return names


@dataclass(slots=True)
class GetArguments:
    """Of ``get_many``."""

    table: str
    keys: Iterable[Sequence[Any]]
    columns: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if type(self.keys) is not tuple:  # one key comes in a tuple
            keys = listed(self.keys)
            if keys is None:
                raise InvalidArgument(f"keys are given as a list of tuples, not {shown(self.keys)}")
            self.keys = keys
        if self.columns is not None:
            self.columns = _columns(self.columns)

    def bound(self, schema: TableSchema) -> tuple[list[tuple[Any, ...]], tuple[str, ...]]:
        """The keys in stored form, and the names of what is read. Raises SchemaError, InvalidArgument."""
        names = schema.output_columns(self.columns)
        return [schema.stored_key(key) for key in self.keys], names


@dataclass(slots=True)
class GetNowArguments(GetArguments):
    """Of a database's ``get_many``. ``max_staleness``: a time span, "5s" for example."""

    _: KW_ONLY
    max_staleness: str | int | dt.timedelta | None = None

    @property
    def max_staleness_us(self) -> int | None:
        return staleness_us(self.max_staleness)


@dataclass(slots=True)
class Selection:
    """Which rows of a table, and what of them: of ``scan`` and of ``subscribe``. ``end`` is exclusive."""

    table: str
    prefix: Sequence[Any] = ()
    start: Sequence[Any] | None = None
    end: Sequence[Any] | None = None
    where: Expr | None = None
    columns: Sequence[str] | None = None

    @property
    def has_prefix(self) -> bool:
        """0 and "" are no key, and refused as 1 and "a" are: they are not the prefix of everything."""
        return self.prefix is not None and (not isinstance(self.prefix, (tuple, list)) or bool(self.prefix))

    def seen(self, schema: TableSchema) -> TableSchema:
        """The table with the columns that may be named."""
        return schema

    def scan(self, schema: TableSchema, **more: Any) -> Scan:
        """Checked against the schema, in stored form; ``more`` as it is. Raises SchemaError, InvalidArgument."""
        seen = self.seen(schema)
        return Scan(
            prefix=schema.stored_bound(self.prefix) if self.has_prefix else (),
            start=None if self.start is None else schema.stored_bound(self.start),
            end=None if self.end is None else schema.stored_bound(self.end),
            where=None if self.where is None else bind(self.where, lambda name: type_of(seen, name)),
            columns=None if self.columns is None else seen.output_columns(self.columns),
            **more,
        )


@dataclass(slots=True)
class ScanArguments(Selection):
    """What a scan reads."""

    limit: int | None = None
    reverse: bool = False

    def __post_init__(self) -> None:
        self.columns = _columns(self.columns)
        _number_or_none(self.limit, "limit is a number of rows")

    def bound(self, schema: TableSchema) -> Scan:
        """Checked against the schema, in stored form. Raises SchemaError, InvalidArgument."""
        return self.scan(schema, limit=self.limit, reverse=bool(self.reverse))

    def arrow_schema(self, schema: TableSchema) -> pa.Schema:
        """Of the batches that the scan gives."""
        from kivi.arrow.columns import arrow_schema

        seen = self.seen(schema)
        return arrow_schema(seen, schema.output_names if self.columns is None else seen.output_columns(self.columns))


@dataclass(slots=True)
class OrderedScanArguments(ScanArguments):
    """Of ``scan`` and ``scan_batches``: rows in an order, from the ``offset``-th on. Of events the hidden columns may
    be named. ``any_order``: events may come as they lie, if nothing else asks for an order."""

    order_by: str | Sequence[str] = ()
    offset: int = 0
    any_order: bool = False

    def __post_init__(self) -> None:
        ScanArguments.__post_init__(self)
        self.order_by = check_order(self.order_by)
        _number(self.offset, "offset is a number of rows")
        if self.order_by and self.reverse:
            raise InvalidArgument('reverse is for rows in key order: write order_by="-column" for the largest first')

    def seen(self, schema: TableSchema) -> TableSchema:
        return seen_schema(schema)

    def bound(self, schema: TableSchema) -> Scan:
        order = order_of(self.order_by, self.seen(schema).output_type) if self.order_by else ()
        more = {"order": order, "offset": self.offset, "any_order": bool(self.any_order)}
        return self.scan(schema, limit=self.limit, reverse=bool(self.reverse), **more)


@dataclass(slots=True)
class BatchScanArguments(OrderedScanArguments):
    """Of ``scan_batches``. ``shards``: only rows of these, a bit for each of the shards 0 to 63 of a sharded table."""

    _: KW_ONLY
    shards: int | None = None

    def __post_init__(self) -> None:
        OrderedScanArguments.__post_init__(self)
        check_shards(self.shards)

    def bound(self, schema: TableSchema) -> Scan:
        return replace(OrderedScanArguments.bound(self, schema), shards=self.shards)


@dataclass(slots=True)
class WholeArguments(OrderedScanArguments):
    """Of ``to_arrow``, ``to_pandas`` and ``to_polars``, where most do not care in which order events come."""

    any_order: bool = True


@dataclass(slots=True)
class QuestionArguments:
    """Of ``query``; ``kivi.model.questions`` says what they mean. ``start`` and ``end`` bound the event time;
    ``end`` is exclusive."""

    table: str
    start: Any = None
    end: Any = None
    where: Expr | None = None
    group_by: Iterable[Group] = ()
    measures: Mapping[str, OperatorCall] | None = None
    having: Expr | None = None
    order_by: str | Sequence[str] = ()
    limit: int | None = None
    offset: int = 0
    _: KW_ONLY
    derived: Mapping[str, str] | None = None
    columns: Sequence[str] | None = None
    windows: Windows | None = None

    def __post_init__(self) -> None:
        table_name(self.table)
        self.group_by = _groups(self.group_by, "column names, kivi.time_slot and named expressions")
        self.measures = _measures(self.measures)
        _check_derived(self.derived)
        self.order_by = check_order(self.order_by)
        self.columns = _columns(self.columns)
        _number_or_none(self.limit, "limit is a number of rows")
        _number(self.offset, "offset is a number of rows")

    def bound(self, schema: TableSchema) -> Scan:
        """Checked against the schema, in stored form. Raises SchemaError, InvalidArgument."""
        question = question_of(
            schema,
            self.group_by,
            self.measures,
            self.derived,
            start=self.start,
            end=self.end,
            having=self.having,
            order_by=self.order_by,
            offset=self.offset,
            columns=self.columns,
            windows=self.windows,
        )
        seen = seen_schema(schema)
        where = None if self.where is None else bind(self.where, lambda name: type_of(seen, name))
        return Scan(where=where, limit=self.limit, question=question)

    def arrow_schema(self, schema: TableSchema) -> pa.Schema:
        """Of the answer."""
        import pyarrow as pa

        from kivi.arrow.columns import arrow_field

        question = self.bound(schema).question
        assert question is not None
        return pa.schema([arrow_field(name, question.type_of(name)) for name in question.columns])


def _groups(given: Any, what: str) -> tuple[Any, ...]:
    """One group, or several. Raises SchemaError."""
    groups = (given,) if isinstance(given, (str, TimeSlot)) else listed(given)
    if groups is None:
        raise SchemaError(f"group_by takes {what}, not {shown(given)}")
    return groups


def windows_arguments(
    table: str,
    size: str | int | dt.timedelta | None = None,
    slide: str | int | dt.timedelta | None = None,
    start: Any = None,
    end: Any = None,
    where: Expr | None = None,
    group_by: Iterable[Group] = (),
    measures: Mapping[str, OperatorCall] | None = None,
    having: Expr | None = None,
    order_by: str | Sequence[str] = (),
    limit: int | None = None,
    offset: int = 0,
    *,
    session: str | int | dt.timedelta | None = None,
    tz: str | None = None,
    derived: Mapping[str, str] | None = None,
    columns: Sequence[str] | None = None,
) -> QuestionArguments:
    """Of ``windows``: those of ``query``, and what the windows are."""
    windows = windows_of(size, slide, session, tz)
    first = (table, start, end, where, group_by, measures, having, order_by, limit, offset)
    return QuestionArguments(*first, derived=derived, columns=columns, windows=windows)


@dataclass(slots=True)
class SummaryArguments(QuestionArguments):
    """Of ``summary``. ``names``: of the measures in its row, which are no columns and may be any text."""

    names: tuple[str, ...] = ()

    def row(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The row, out of the answer's only one."""
        return dict(zip(self.names, found.values(), strict=True))


def summary_arguments(
    table: str,
    measures: Mapping[str, OperatorCall],
    start: Any = None,
    end: Any = None,
    where: Expr | None = None,
) -> SummaryArguments:
    """Of ``summary``. ``start`` and ``end`` bound the event time; ``end`` is exclusive."""
    if not isinstance(measures, Mapping):
        raise SchemaError(f"measures map names to kivi.sum, kivi.count and the like, and are not {shown(measures)}")
    names = tuple(_text(name, "a measure of a summary is named by a text", 1) for name in measures)
    if not all(map(is_name, names)):
        measures = {f"m{i}": call for i, call in enumerate(measures.values())}
    return SummaryArguments(table, start, end, where, measures=measures, names=names)


def check_order(order_by: object) -> tuple[str, ...]:
    """One column, or several, each with a "-" in front for the largest first. Raises InvalidArgument."""
    given = tuple(order_by) if isinstance(order_by, Sequence) and not isinstance(order_by, str) else (order_by,)
    for term in given:
        if not isinstance(term, str) or not term.strip("-"):
            raise InvalidArgument(f'order_by names columns, like ["-slowest", "endpoint_id"], not {shown(term)}')
    return given


def retract_arguments(table: str, where: Expr | None = None, start: Any = None, end: Any = None) -> ScanArguments:
    """Of ``retract``. ``start`` and ``end`` bound the event time; ``end`` is exclusive. ``where`` may name the hidden
    columns of events."""
    return OrderedScanArguments(table, start=start, end=end, where=where)


@dataclass(slots=True)
class RollupArguments:
    """Of ``rollup``; ``kivi.model.rollups`` says what they mean."""

    table: str
    by: Iterable[str] = ()
    step: str | int | dt.timedelta | None = None
    start: int | dt.datetime | None = None
    end: int | dt.datetime | None = None
    prefix: Sequence[Any] = ()
    where: Expr | None = None
    measures: Iterable[str] | None = None
    _: KW_ONLY
    tz: str | None = None
    last: str | int | dt.timedelta | None = None

    def __post_init__(self) -> None:
        table_name(self.table)
        for name in ("by", "measures"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, name_list(value, name))  # which may be read only once

    def bound(self, schema: TableSchema) -> Scan:
        """Checked against the schema, in stored form. Raises SchemaError, InvalidArgument."""
        moments = (self.start, self.end, self.last)
        rollup = rollup_of(schema, self.by, self.step, self.tz, *moments, self.measures)
        return Selection(self.table, self.prefix, where=self.where).scan(schema, rollup=rollup)

    def arrow_schema(self, schema: TableSchema) -> pa.Schema:
        """Of the result."""
        from kivi.arrow.columns import arrow_schema

        rollup = self.bound(schema).rollup
        assert rollup is not None
        return arrow_schema(schema, rolled_outputs(schema, rollup))


_ROLLUP: Final = tuple(each.name for each in fields(RollupArguments) if each.name != "table")


@dataclass(slots=True)
class SqlArguments:
    """Of ``sql``. ``batch``: the parameters in columns."""

    text: str
    parameters: Sequence[Any] | Mapping[str, Any] | None = None
    batch: pa.RecordBatch | None = field(init=False)

    def __post_init__(self) -> None:
        from kivi.sql.engine import check_text
        from kivi.sql.parameters import to_batch

        check_text(self.text)
        self.batch = to_batch(self.parameters)


@dataclass(slots=True)
class ChangesArguments(ScanArguments):
    """Of ``changes`` and ``change_batches``: those of a scan, and ``kivi.model.changes.Changes``."""

    _: KW_ONLY
    since: int
    commit_ts: bool = True
    skip: int = 0
    take: int | None = None
    remembered_at: int | None = None
    partial: bool = False
    removed: bool = False
    retractions: str = "fail"
    shards: int | None = None

    def __post_init__(self) -> None:
        ScanArguments.__post_init__(self)
        check_shards(self.shards)
        check_retractions(self.retractions)
        _number(self.since, "since is a commit timestamp")
        _number(self.skip, "skip is a number of events")
        _number_or_none(self.take, "take is a number of events")
        _number_or_none(self.remembered_at, "remembered_at is a commit timestamp")

    def bound(self, schema: TableSchema) -> Scan:
        changes = Changes(
            self.since,
            bool(self.commit_ts),
            self.skip,
            self.take,
            self.remembered_at,
            bool(self.partial),
            bool(self.removed),
            self.retractions,
        )
        return replace(ScanArguments.bound(self, schema), changes=changes, shards=self.shards)

    def arrow_schema(self, schema: TableSchema) -> pa.Schema:
        import pyarrow as pa

        found = ScanArguments.arrow_schema(self, schema)
        found = found.append(pa.field(COMMIT_TS, pa.int64())) if self.commit_ts else found
        found = found.append(pa.field(REMOVED, pa.bool_())) if self.removed else found
        return found.append(pa.field(RETRACTED, pa.bool_())) if self.retractions == "deliver" else found


class Scanning(Protocol):
    """Arguments of which a scan can be made."""

    def bound(self, schema: TableSchema) -> Scan: ...


@dataclass(slots=True)
class SubscribeArguments(Selection):
    """Of ``subscribe``: an order besides, and when to be told. ``until_time`` is exclusive."""

    order_by: Sequence[str] = ()
    limit: int | None = None
    offset: int = 0
    _: KW_ONLY
    interval_ms: float = 100
    heartbeat_ms: float = 1_000.0
    since: int | None = None
    rows: Sequence[dict[str, Any]] | None = None
    skip: int = 0
    from_time: int | dt.datetime | None = None
    until_time: int | dt.datetime | None = None
    name: str | None = None
    user: str = ""
    expires_in: str | int | dt.timedelta = "30d"
    unseen: bool = False
    retractions: str = "fail"
    rollup: Mapping[str, Any] | None = None
    last: str | int | dt.timedelta | None = None
    ttl_us: int = field(init=False)
    matching: Scanning | None = field(init=False, default=None)
    """Of ``subscribe_matches``."""
    lateness_us: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        table_name(self.table)
        if self.name is not None:
            check_names(self.user, self.name)
        elif plain_text(self.user, "user") or self.unseen:
            raise InvalidArgument("user and unseen are of durable subscriptions, which have a name")
        self.ttl_us = parse_duration_us(self.expires_in, "expires_in")
        self.columns = _columns(self.columns)
        self._check_rollup()
        self.order_by = check_order(self.order_by)
        _number_or_none(self.limit, "limit is a number of rows")
        _number(self.offset, "offset is a number of rows")
        _number(self.skip, "skip is a number of events")
        _number_or_none(self.since, "since is a commit timestamp")
        _check_ms("interval_ms", self.interval_ms, 0)
        _check_ms("heartbeat_ms", self.heartbeat_ms, 10)
        self.interval_ms = round(self.interval_ms)
        # Its store hears of a durable one when it is heard of itself, which is before it expires.
        self.heartbeat_ms = max(10, round(min(self.heartbeat_ms, self.ttl_us / 4_000)))
        check_retractions(self.retractions)
        if self.rows is not None:
            if self.since is None:
                raise InvalidArgument("rows are those that the query gave at since: give that, too")
            if not isinstance(self.rows, Sequence) or not all(isinstance(row, dict) for row in self.rows):
                raise InvalidArgument(f"rows are a list of dicts, as live.rows has them, not {shown(self.rows)}")

    def _check_rollup(self) -> None:
        if self.rollup is None:
            if self.last is not None:
                raise InvalidArgument("last is the range of a rollup: give rollup=dict(by=[...], step=...) too")
            return
        if not isinstance(self.rollup, Mapping):
            raise InvalidArgument(f"rollup is a dict of the arguments of snapshot.rollup, not {shown(self.rollup)}")
        if unknown := [name for name in self.rollup if name not in _ROLLUP]:
            raise InvalidArgument(f"rollup has {', '.join(_ROLLUP)}, and no {unknown[0]!r}")
        others = (self.has_prefix or None, self.start, self.end, self.where, self.columns)
        if any(other is not None for other in others):
            raise InvalidArgument("prefix, start, end, where and measures of a rollup are given in rollup=dict(...)")
        self.rollup = dict(self.rollup)
        if self.last is not None:
            if "last" in self.rollup:
                raise InvalidArgument("last is given twice")
            self.rollup["last"] = self.last
        read = RollupArguments(self.table, **self.rollup)  # names may be read only once, and are more often
        self.rollup = {name: getattr(read, name) for name in self.rollup}

    @property
    def until_us(self) -> int | None:
        """Raises InvalidArgument for a moment without a time zone."""
        return _MOMENT.to_stored(self.until_time, "until_time")  # type: ignore[no-any-return]

    def terms(self, schema: TableSchema) -> Terms:
        """Raises InvalidArgument."""
        if self.retractions != "fail" and not self.of_events(schema):
            raise InvalidArgument(
                f"retractions={self.retractions!r} is for events as they come: a subscription to rows, to a rollup or "
                f"to an order of events is told what a retraction changes, so leave it out"
            )
        return Terms(
            self.of_events(schema),
            self.interval_ms / 1_000,
            self.heartbeat_ms / 1_000,
            self.since,
            self.skip,
            self.until_us,
            None if self.name is None else Durable(self.user, self.name, self.ttl_us, bool(self.unseen)),
            self.retractions,
            self.lateness_us,
        )

    @property
    def all_columns(self) -> bool:
        """Whether it is of all columns, those that are added later, too."""
        return self.matching is None and self.columns is None and (self.rollup or {}).get("measures") is None

    def shown(self, schema: TableSchema) -> TableSchema:
        """What the rows of its updates are rows of."""
        match = None if self.matching is None else self.matching.bound(schema).match
        return schema if match is None else matched_schema(schema, match)

    def of_events(self, schema: TableSchema) -> bool:
        """Whether it is about events as they come, and not about a state: an order or a limit makes it one."""
        return schema.kind == "event" and not (self.order_by or self.limit is not None or self.offset)

    def bound(self, schema: TableSchema) -> Query:
        """Raises SchemaError, InvalidArgument."""
        if self.matching is not None:
            return Query.of(schema, self.matching.bound(schema), (), None, 0)
        if schema.kind != "event" and not (self.from_time is None and self.until_time is None):
            raise InvalidArgument(f"{schema.name!r} is no event table: from_time and until_time bound event times")
        if self.rollup is not None:
            scan = RollupArguments(self.table, **self.rollup).bound(schema)
            return Query.of(schema, scan, self.order_by, self.limit, self.offset)
        if schema.kind == "event" and self.has_prefix:
            raise InvalidArgument(f"event table {schema.name!r} has no row keys: use where")
        start = self.start if self.from_time is None else (self.from_time,)
        end = self.end if self.until_time is None else (self.until_time,)
        scan = Selection(self.table, self.prefix, start, end, self.where, self.columns).scan(schema)
        return Query.of(schema, scan, self.order_by, self.limit, self.offset)


@dataclass(slots=True)
class TailArguments:
    """Of ``tail_points``."""

    table: str
    since: int = 0
    rows: int = 500_000
    _: KW_ONLY
    upto: int | None = None
    most: int = 1_000
    shards: int | None = None

    def __post_init__(self) -> None:
        check_shards(self.shards)
        table_name(self.table)
        _number(self.since, "since is a commit timestamp")
        check_rows(self.rows)
        _number_or_none(self.upto, "upto is a commit timestamp")
        _number(self.most, f"most is a number of points up to {POINTS_MAX}", below=POINTS_MAX + 1)


# -- transactions and snapshots -----------------------------------------------------------------------


def _number(value: object, rule: str, least: int = 0, below: int = 2**63) -> int:
    """A whole number in [least, below). Raises InvalidArgument, with the ``rule`` that it breaks."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < below:
        raise InvalidArgument(f"{rule}, not {shown(value)}")
    return value


def _number_or_none(value: object, rule: str, least: int = 0, below: int = 2**63) -> int | None:
    return None if value is None else _number(value, rule, least, below)


def check_shards(shards: object) -> None:
    """Raises InvalidArgument for what cannot be a set of shards."""
    _number_or_none(shards, "shards is a set of the shards 0 to 63, a bit for each of them", 1, 1 << 64)


def check_limit(limit: object) -> None:
    """Raises InvalidArgument for what is no number of rows, and not None."""
    _number_or_none(limit, "limit is a number of rows")


def _is_real(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_ms(name: str, value: object, least: int) -> None:
    """Of a time in milliseconds, up to an hour: no thread can wait for just any. Raises InvalidArgument."""
    if not _is_real(value) or not least <= value <= 3_600_000:
        raise InvalidArgument(f"{name} is a number from {least} to 3,600,000, not {shown(value)}")


def _text(value: object, rule: str, least: int = 0) -> str:
    """Raises InvalidArgument, with the ``rule`` that it breaks, for what is no text of that length."""
    if not is_text(value) or len(value) < least:
        raise InvalidArgument(f"{rule}, not {shown(value)}")
    return value


def check_commit_ts(value: object, what: str) -> int:
    """Raises InvalidArgument."""
    return _number(value, f"{what} is a commit timestamp")


def check_token(token: object) -> str:
    """A request token. Raises InvalidArgument."""
    return _text(token, "a token is a string", 1)


def check_place(place: object) -> int | None:
    """Of which member of a token. Raises InvalidArgument."""
    return _number_or_none(place, "a place is a number from 0 on, or None for the first member", below=2**32)


def table_name(name: object) -> str:
    """Raises InvalidArgument for what cannot be one."""
    return _text(name, "a table is named by a string")


def node_name(node: object) -> str:
    """Raises InvalidArgument for what cannot name a node of a cluster."""
    return _text(node, "a node is named by its address or number, as a text")


def move_id(move: object) -> str:
    """Raises InvalidArgument for what cannot be the id of a move of shards."""
    return _text(move, "a move of shards is named by the id that move_shards returned")


def stage_ids(ids: object) -> list[bytes]:
    """A list of ids that ``stage`` returned. Raises InvalidArgument."""
    stages = listed(ids)
    if stages is None:
        raise InvalidArgument(f"stages are given as a list of what stage() returned, not {shown(ids)}")
    for one in stages:
        if not isinstance(one, bytes):
            raise InvalidArgument(f"a stage is named by the bytes that stage() returned, not {shown(one)}")
    return list(stages)


def drops_late(late: object) -> bool:
    """Of appends, whatever appends. Raises InvalidArgument."""
    if not is_among(late, ("fail", "drop")):
        raise InvalidArgument(
            f'late is "fail" or "drop", not {shown(late)}: "fail" refuses an append with events below the retention '
            'floor, "drop" leaves these events out and counts them'
        )
    return late == "drop"


def check_keep(keep: object) -> int | None:
    """How many backups stay. Raises InvalidArgument."""
    return _number_or_none(keep, "keep is a number of backups from 1 on, or None for all", 1, 2**31)


def check_move(shards: object, to: object, source: object, copy: object) -> None:
    """Arguments of ``move_shards``, but for what only a node knows. Raises InvalidArgument."""
    for name, value in (("shards", shards), ("to", to), ("source", source)):
        if not (isinstance(value, str) and value) and not (name == "source" and value is None):
            raise InvalidArgument(
                f"{name} is a text, like '0-15' for shards and an address for nodes, not {shown(value)}"
            )
    if flag(copy, "copy") and source is not None:
        raise InvalidArgument("with copy=True nobody gives the shards up: leave source out")


def check_rebalance(copies: object, away_from: object, keep: object, dry_run: object) -> None:
    """Arguments of ``rebalance_shards``, but for what only a node knows. Raises InvalidArgument."""
    if copies is not None and (not isinstance(copies, int) or isinstance(copies, bool) or not 1 <= copies < 2**31):
        raise InvalidArgument(f"copies is how many nodes are to hold each shard, 1 or more, not {shown(copies)}")
    for name, nodes in (("away_from", away_from), ("keep", [] if keep is None else keep)):
        if isinstance(nodes, str) or not isinstance(nodes, Sequence) or not all(isinstance(one, str) for one in nodes):
            raise InvalidArgument(f"{name} is a list of nodes, each by its address or number, not {shown(nodes)}")
    flag(dry_run, "dry_run")


def directory(path: object) -> str:
    """A path as text. Raises InvalidArgument."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise InvalidArgument(f"a directory is named by a path, not {shown(path)}")
    try:
        right = b"\0" not in os.fsencode(path)  # a name of the file system may have bytes that are no text
    except UnicodeEncodeError:
        right = False
    if not right:
        raise InvalidArgument(f"a directory is named by a path, and {shown(path)} is none")
    return os.fsdecode(path)


def endpoint_name(endpoint: object) -> str:
    """The endpoint of a server, or those of a cluster's nodes. Raises InvalidArgument."""
    text = _text(endpoint, "a server's endpoint is a text, 'host:port'", 1)
    for one in map(str.strip, text.split(",")):
        if "://" in one and one.startswith("http"):
            raise InvalidArgument(f"{one!r} is no endpoint, but a URL: write 'host:port' alone")
        if ":" not in one:  # gRPC would take port 443
            raise InvalidArgument(f"{one!r} is no endpoint: name its port too, as in '{one or 'localhost'}:7420'")
        port = re.search(r"^[^:]*:(\d+)$|\]:(\d+)$", one)
        if port is not None and not 1 <= int(port[1] or port[2]) <= 65_535:  # gRPC would take it modulo 65,536
            raise InvalidArgument(f"{one!r} is no endpoint: a port is a number from 1 to 65,535")
    return text


def client_timeout_s(timeout: object) -> float | None:
    """For how many seconds a client waits for an answer; None for ever. Raises InvalidArgument."""
    seconds = patience_s(timeout)
    if seconds is not None and seconds <= 0:
        raise InvalidArgument(
            f"timeout is a number of seconds greater than zero, or None to wait for ever, and not {shown(timeout)}"
        )
    return seconds


def reads_fresh(read: object) -> bool:
    """Of ``connect``. Raises InvalidArgument."""
    if not is_among(read, ("any", "fresh")):
        raise InvalidArgument(f'read is "any" or "fresh", not {shown(read)}')
    return read == "fresh"


def patience_s(timeout: object, what: str = "timeout") -> float | None:
    """For how many seconds somebody waits; None for ever. Raises InvalidArgument."""
    if timeout is None:
        return None
    if not _is_real(timeout) or not (timeout <= 0 or timeout > 0):
        raise InvalidArgument(f"{what} is a number of seconds, or None to wait for ever, and not {shown(timeout)}")
    if timeout == math.inf:
        return None
    return float(min(max(timeout, -_PATIENCE_S_MAX), _PATIENCE_S_MAX))  # an int may be more than a float can be


def check_ttl(ttl_s: object) -> None:
    """How long a snapshot lasts, or None. Raises InvalidArgument."""
    if ttl_s is not None and not (_is_real(ttl_s) and 0 < ttl_s < math.inf):
        raise InvalidArgument(f"ttl_s is a number of seconds, not {shown(ttl_s)}")


def check_work(fn: object) -> None:
    """Of ``run``. Raises InvalidArgument."""
    if not callable(fn):
        raise InvalidArgument(f"run() takes a function of a transaction, not {shown(fn)}")


def check_done(result: object) -> None:
    """Of a function that ``run`` has called: one that is async has done nothing yet. Raises InvalidArgument."""
    if inspect.iscoroutine(result):
        result.close()
        raise InvalidArgument("run() takes a function that is not async: an async one is for a client of kivi.aio")


def check_awaitable(result: object) -> None:
    """Of a function that the asyncio client's ``run`` has called. Raises InvalidArgument."""
    if not inspect.isawaitable(result):
        raise InvalidArgument(
            f"run() of a client of kivi.aio takes an async function, and this one gave {shown(result)}"
        )


def plain_text(value: object, what: str) -> str:
    """Raises InvalidArgument for what is no text."""
    return _text(value, f"{what} is a text")


def check_names(user: object, name: object) -> None:
    """Of a durable subscription. Raises InvalidArgument."""
    for what, value, least in (("name", name, 1), ("user", user, 0)):
        if not is_text(value) or not least <= len(value.encode()) <= 256:
            raise InvalidArgument(f"the {what} of a durable subscription is a text of {least} to 256 bytes")


def check_rows(rows: object) -> int:
    """Of ``split_points``. Raises InvalidArgument."""
    return _number(rows, "rows is a number of rows from 1 on", 1)


def staleness_us(value: str | int | dt.timedelta | None) -> int | None:
    """Microseconds. Raises InvalidArgument for what is no time span, or a negative one."""
    return None if value is None else parse_duration_us(value, "max_staleness", 0)


def check_batch(batch: object) -> None:
    """Raises InvalidArgument unless it is a batch token, or None."""
    match batch:
        case None:
            return
        case (scope, int(sequence)) if isinstance(batch, tuple) and not isinstance(sequence, bool):
            if is_text(scope) and 0 <= sequence < 2**63:
                return
    raise InvalidArgument(f"a batch token is (scope, number from 0), not {shown(batch)}")


@dataclass(slots=True)
class TransactionArguments:
    """Of ``transaction``. ``token`` and ``batch`` make its commit happen once, however often it is tried. ``deferred``:
    an insert of a row that is there fails at the commit."""

    token: str | None = None
    batch: tuple[str, int] | None = None
    min_snapshot: int | None = None
    deferred: bool = False

    def __post_init__(self) -> None:
        if self.token is not None:
            check_token(self.token)
        check_batch(self.batch)
        _number_or_none(self.min_snapshot, "min_snapshot is a commit timestamp")


NO_ARGUMENTS: Final = TransactionArguments()


@dataclass(slots=True)
class AppenderArguments:
    """Of ``appender``."""

    table: str
    linger_ms: float = 5
    max_events: int = 10_000
    late: str = "fail"
    each: bool = False

    def __post_init__(self) -> None:
        _check_ms("linger_ms", self.linger_ms, 0)
        if not _is_real(self.max_events) or not 1 <= self.max_events < math.inf:
            raise InvalidArgument(f"max_events is a number from 1 on, not {shown(self.max_events)}")
        drops_late(self.late)


@dataclass(slots=True)
class SnapshotArguments:
    """Of ``snapshot``. ``as_of``: a commit timestamp, or a moment."""

    as_of: int | dt.datetime | None = None
    min_snapshot: int | None = None
    _: KW_ONLY
    ttl_s: float | None = None
    max_staleness: str | int | dt.timedelta | None = None

    def __post_init__(self) -> None:
        if self.max_staleness is not None and self.as_of is not None:
            raise InvalidArgument("a snapshot as of a moment is as old as it is: give as_of or max_staleness")
        staleness_us(self.max_staleness)
        if self.as_of is not None and not isinstance(self.as_of, dt.datetime):
            _number(self.as_of, "as_of is a commit timestamp or a datetime")
        _number_or_none(self.min_snapshot, "min_snapshot is a commit timestamp")
        check_ttl(self.ttl_s)

    @property
    def max_staleness_us(self) -> int | None:
        return staleness_us(self.max_staleness)

    @property
    def as_of_ts(self) -> int | None:
        return None if isinstance(self.as_of, dt.datetime) else self.as_of

    @property
    def as_of_us(self) -> int | None:
        """The moment, in microseconds since 1970 UTC. Raises InvalidArgument for one without a time zone."""
        return int(_MOMENT.to_stored(self.as_of, "as_of")) if isinstance(self.as_of, dt.datetime) else None


# -- definitions --------------------------------------------------------------------------------------


@dataclass(slots=True)
class AggregateArguments:
    """Of ``create_aggregate``. The table ``source`` has the last word: ``kivi.model.levels.declared_schema``."""

    name: str
    source: str
    group_by: Sequence[str | TimeSlot]
    measures: Mapping[str, OperatorCall] | None = None
    derived: Mapping[str, str] | None = None
    history: str | int | dt.timedelta | None = None
    progress: Callable[[int, int], None] | None = None
    _: KW_ONLY
    retention: str | int | dt.timedelta | None = None

    def __post_init__(self) -> None:
        table_name(self.name)
        table_name(self.source)
        self.measures = _measures(self.measures)
        _check_derived(self.derived)
        _check_progress(self.progress)
        self.history, self.retention = _kept(self.history, "history"), _kept(self.retention, "retention")
        self.group_by = _groups(self.group_by, "column names and kivi.time_slot")
        for group in self.group_by:
            if not isinstance(group, (str, TimeSlot)):
                raise SchemaError(f"group_by takes column names and kivi.time_slot, not {shown(group)}")


@dataclass(slots=True)
class LevelsArguments:
    """Of ``create_aggregates``. ``levels``: the columns of each. ``slots``: their widths, as text."""

    name: str
    source: str
    levels: Sequence[Sequence[str]]
    slots: Sequence[str]
    measures: Mapping[str, OperatorCall] | None = None
    derived: Mapping[str, str] | None = None
    history: str | int | dt.timedelta | None = None
    tz: str | None = None
    progress: Callable[[int, int], None] | None = None
    retention: str | int | dt.timedelta | Mapping[str, str | int | dt.timedelta] | None = None

    def __post_init__(self) -> None:
        table_name(self.source)
        table_name(self.name)
        levels, slots = listed(self.levels), listed(self.slots)
        if levels is None or slots is None:
            what = "levels" if levels is None else "slots"
            raise SchemaError(f"{what} is a list, like levels=['customer', ['customer', 'server']], slots=['5m']")
        self.levels = tuple(_level(level) for level in levels)
        self.slots = tuple(_width(slot, self.tz) for slot in slots)
        if not self.levels or not self.slots:
            raise SchemaError("create_aggregates needs at least one of levels and one of slots")
        if isinstance(self.retention, Mapping):
            self.retention = {_width(slot, self.tz): kept for slot, kept in self.retention.items()}
            if unknown := self.retention.keys() - {*self.slots}:
                raise InvalidArgument(
                    f"retention is a duration, or a dict with one for some of slots={list(self.slots)}: "
                    f"{min(unknown)!r} is none of these"
                )
        else:
            self.retention = _kept(self.retention, "retention")
        self.history = _kept(self.history, "history")
        self.measures = _measures(self.measures)
        _check_derived(self.derived)
        _check_progress(self.progress)

    @property
    def names(self) -> list[str]:
        """Of the aggregates. Raises SchemaError where two are the same."""
        return level_names(self.name, self.levels, self.slots)


def _kept(value: Any, what: str) -> int | None:
    """Microseconds. Raises InvalidArgument."""
    return None if value is None else parse_duration_us(value, what)


def _level(level: object) -> tuple[str, ...]:
    columns = (level,) if isinstance(level, str) else listed(level) or ()
    if not columns or not all(isinstance(column, str) for column in columns):
        raise SchemaError(f"a level is a column or a list of columns, not {shown(level)}")
    return columns


def _width(slot: object, tz: str | None) -> str:
    """A width in words, which the aggregate's name ends with. Raises InvalidArgument, SchemaError."""
    parsed = Slot.parse(cast("Any", slot), tz)
    return slot.replace(" ", "") if isinstance(slot, str) else parsed.width


def _check_derived(derived: object) -> None:
    """Raises SchemaError for what does not map texts to texts, and is not None."""
    right = derived is None or isinstance(derived, Mapping)
    if not right or not all(is_text(text) for pair in (derived or {}).items() for text in pair):  # type: ignore[attr-defined]
        raise SchemaError(
            f"derived maps names to expressions, as in {{'avg': 'total / calls'}}, and is {shown(derived)}"
        )


def _check_progress(progress: object) -> None:
    """Raises InvalidArgument for what cannot be called: by then something has been made."""
    if progress is not None and not callable(progress):
        raise InvalidArgument(f"progress is a function of (done_rows, total_rows), not {shown(progress)}")


def _measures(measures: Mapping[str, OperatorCall] | None) -> Mapping[str, OperatorCall] | None:
    """None is for all measures of a source that is an aggregate."""
    if measures is None:
        return None
    if not isinstance(measures, Mapping):
        raise SchemaError(f"measures map names to kivi.sum, kivi.count and the like, and are not {shown(measures)}")
    for measure, call in measures.items():
        check_name(measure, "measure")
        if not isinstance(call, OperatorCall):
            raise SchemaError(f"measure {measure!r} must be kivi.sum, kivi.count or the like, not {shown(call)}")
    return measures


@dataclass(slots=True)
class ViewArguments:
    """Of ``create_view``. The table ``source`` has the last word: ``kivi.model.views.view_schema``."""

    name: str
    source: str
    key: Sequence[str]
    columns: Sequence[str] | None = None
    unique: bool = False

    def __post_init__(self) -> None:
        table_name(self.source)
        check_name(self.name, "view")
        self.key = column_names(f"view {self.name!r}", "key", self.key)
        if self.columns is not None:
            self.columns = column_names(f"view {self.name!r}", "columns", self.columns)


@dataclass(slots=True)
class AlterTableArguments:
    """Of ``alter_table``. The table has the last word: ``declarations.with_columns``."""

    name: str
    add_columns: Mapping[str, object] | None = None
    _: KW_ONLY
    role: str | None = None

    def __post_init__(self) -> None:
        table_name(self.name)
        if self.role is not None:
            check_role(self.role)
        columns: object = self.add_columns
        if columns is None and self.role is None:
            raise InvalidArgument(f"nothing to alter of {self.name!r}: name columns to add, or a role")
        if columns is not None and not isinstance(columns, Mapping):
            raise SchemaError(f"add_columns maps the names of new columns to types, and is {shown(columns)}")


@dataclass(slots=True)
class AlterAggregateArguments:
    """Of ``alter_aggregate``. The aggregate has the last word: ``declarations.with_measures``."""

    name: str
    add_measures: Mapping[str, OperatorCall]
    backfill: bool = True
    derived: Mapping[str, str] | None = None
    progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        table_name(self.name)
        measures: object = self.add_measures
        if not isinstance(measures, Mapping):
            raise SchemaError(f"add_measures maps names to kivi.sum, count, min or max, and is {shown(measures)}")
        _measures(self.add_measures)
        _check_derived(self.derived)
        _check_progress(self.progress)
