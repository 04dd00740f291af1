"""What a table is: column types, operators as they are declared, and the three kinds of table.

A schema is plain immutable data. It validates and converts single values between the form a caller
uses and the *stored form* that every room below works with:

============== ===================================== ==============================
type           a caller gives and gets               stored form
============== ===================================== ==============================
bool           bool                                  bool
int64          int                                   int, -2**63 .. 2**63-1
float64        float (int accepted), finite          float, -0.0 normalised to 0.0
decimal(p, s)  decimal.Decimal (int, str accepted)   int, unscaled: value * 10**s
string         str                                   str, valid UTF-8
bytes          bytes                                 bytes
timestamp      aware UTC datetime, or int            int, microseconds since 1970 UTC
============== ===================================== ==============================

A *value column* holds what was put. A *delta column* has one operator (SUM, MIN, MAX), fixed in the
schema for the life of the table; ``count()`` is SUM of 1 and exists only as a way to write it.

Nothing here does I/O or knows where a table lives.
"""

from __future__ import annotations

import ast
import datetime as dt
import decimal
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from kivi.errors import InvalidArgument, OutOfRange, SchemaError

__all__ = [
    "INT64_MAX",
    "INT64_MIN",
    "Column",
    "ColumnType",
    "GroupKey",
    "Measure",
    "OperatorCall",
    "TableSchema",
    "TimeSlot",
    "aggregate_schema",
    "event_table_schema",
    "parse_duration_us",
    "row_table_schema",
    "time_slot",
]

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
_DECIMAL: Final = re.compile(r"decimal\(\s*([0-9]{1,4})\s*,\s*([0-9]{1,4})\s*\)\Z")
_DURATION: Final = re.compile(r"([0-9]{1,100})\s*(us|ms|s|m|h|d)\Z")
_UNITS_US: Final = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}

_DURATION_MAX_US: Final = 2**62
"""146,000 years. A moment and a duration, both in microseconds, then add up within 64 bits."""

_EXACT: Final = decimal.Context(
    prec=decimal.MAX_PREC,
    Emax=decimal.MAX_EMAX,
    Emin=decimal.MIN_EMIN,
    traps=[decimal.InvalidOperation],
)
"""Rounds nothing. The caller's own context may have any precision and any traps, and must not change a value."""

_DECIMAL_DIGITS_MAX: Final = 40
"""No decimal column holds a number that is this long, and one with an exponent of a million is never written out."""

TypeName = Literal["bool", "int64", "float64", "decimal", "string", "bytes", "timestamp"]


def parse_duration_us(value: str | int | dt.timedelta, what: str = "duration") -> int:
    """``"5m"``, ``"30d"``, ``"250ms"``, a timedelta or an int of microseconds -> microseconds, 1 to 2**62."""
    if isinstance(value, dt.timedelta):
        micros = value // dt.timedelta(microseconds=1)
    elif isinstance(value, int) and not isinstance(value, bool):
        micros = value
    elif isinstance(value, str) and (match := _DURATION.match(value.strip())):
        micros = int(match[1]) * _UNITS_US[match[2]]
    else:
        raise InvalidArgument(f"{what} {shown(value)} is not a duration: write it like '5m', '1h' or '30d'")
    if micros <= 0:
        raise InvalidArgument(f"{what} {shown(value)} must be greater than zero")
    if micros > _DURATION_MAX_US:
        raise InvalidArgument(f"{what} {shown(value)} is too long: at most 2**62 microseconds, 53,375,995 days")
    return micros


def shown(value: object) -> str:
    """A value in an error's sentence: short, however long the value is, and never an error of its own."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to write out very long ones
        return f"an integer of {value.bit_length()} bits"
    try:
        text = str(value) if isinstance(value, decimal.Decimal) else repr(value)
    except Exception:  # an object of the caller's
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"


def check_name(name: object, what: str) -> str:
    if not isinstance(name, str) or not _NAME.match(name):
        raise SchemaError(
            f"{what} name {shown(name)} must be letters, digits and '_', not begin with a digit, at most 128"
        )
    return name


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A column's type. ``precision`` and ``scale`` are 0 except for decimals."""

    name: TypeName
    precision: int = 0
    scale: int = 0

    @staticmethod
    def parse(text: object) -> ColumnType:
        """``"int64"``, ``"decimal(12,2)"`` ... -> ColumnType. Raises SchemaError."""
        if isinstance(text, ColumnType):
            return text
        if isinstance(text, str):
            bare = text.strip().lower()
            if bare in ("bool", "int64", "float64", "string", "bytes", "timestamp"):
                return ColumnType(bare)  # type: ignore[arg-type]
            if match := _DECIMAL.match(bare):
                precision, scale = int(match[1]), int(match[2])
                if not 1 <= precision <= 18 or scale > precision:
                    raise SchemaError(f"{text!r}: a decimal has 1 to 18 digits, and a scale of at most that")
                return ColumnType("decimal", precision, scale)
        raise SchemaError(
            f"{shown(text)} is not a column type: use bool, int64, float64, decimal(p,s), string, bytes or timestamp"
        )

    def __str__(self) -> str:
        return f"decimal({self.precision},{self.scale})" if self.name == "decimal" else self.name

    @property
    def is_integer(self) -> bool:
        """Stored as an exact integer: summed in 128 bits."""
        return self.name in ("int64", "decimal")

    @property
    def stored_min(self) -> int:
        return -(10**self.precision) + 1 if self.name == "decimal" else INT64_MIN

    @property
    def stored_max(self) -> int:
        return 10**self.precision - 1 if self.name == "decimal" else INT64_MAX

    # -- one value ------------------------------------------------------------------------------

    def to_stored(self, value: Any, what: str = "value") -> Any:
        """A caller's value in stored form; None stays None. Raises InvalidArgument (SchemaError for a wrong type)."""
        if value is None:
            return None
        return _TO_STORED[self.name](self, value, what)

    def from_stored(self, value: Any, what: str = "value") -> Any:
        """Stored form as the caller sees it. Raises OutOfRange for a sum that has outgrown its type."""
        if value is None:
            return None
        match self.name:
            case "int64":
                if not INT64_MIN <= value <= INT64_MAX:
                    raise OutOfRange(
                        f"{what} is {value}, which does not fit in 64 bits; it is kept exactly", column=what
                    )
                return value
            case "decimal":
                if not self.stored_min <= value <= self.stored_max:
                    raise OutOfRange(f"{what} does not fit in {self}; it is kept exactly", column=what)
                return decimal.Decimal(value).scaleb(-self.scale, _EXACT)
            case "float64":
                if not math.isfinite(value):
                    raise OutOfRange(f"{what} has left the finite numbers", column=what)
                return value
            case "timestamp":
                try:
                    return _EPOCH + dt.timedelta(microseconds=value)
                except OverflowError:
                    raise OutOfRange(f"{what} is {value} us, outside the years 1 to 9999", column=what) from None
            case _:
                return value


def _bad(what: str, value: object, type_: ColumnType) -> SchemaError:
    return SchemaError(f"{what} is {shown(value)} ({type(value).__name__}), which is not a {type_}")


def _to_bool(type_: ColumnType, value: Any, what: str) -> bool:
    kind = type(value)
    if kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")):  # bool_ before NumPy 2
        return bool(value)
    raise _bad(what, value, type_)


def _as_int(value: Any) -> int | None:
    """Python and NumPy integers, not booleans, not floats."""
    if isinstance(value, (bool, float)) or not hasattr(value, "__index__"):
        return None
    try:
        return int(value.__index__())
    except TypeError:  # a NumPy array has the method too, and only some arrays are integers
        return None


def _to_int64(type_: ColumnType, value: Any, what: str) -> int:
    number = _as_int(value)
    if number is None:
        raise _bad(what, value, type_)
    if not INT64_MIN <= number <= INT64_MAX:
        raise InvalidArgument(f"{what} is {shown(number)}, which does not fit in 64 bits")
    return number


def _to_float64(type_: ColumnType, value: Any, what: str) -> float:
    if isinstance(value, float) or (number := _as_int(value)) is not None:
        try:
            result = float(value)
        except OverflowError:
            raise InvalidArgument(f"{what} is too large for a float64") from None
        if not math.isfinite(result):
            raise InvalidArgument(f"{what} is {value!r}: NaN and infinities are not accepted")
        return result + 0.0  # -0.0 + 0.0 is 0.0
    del number
    raise _bad(what, value, type_)


def _to_decimal(type_: ColumnType, value: Any, what: str) -> int:
    try:
        if isinstance(value, decimal.Decimal):
            number = value
        elif isinstance(value, str):
            number = decimal.Decimal(value, _EXACT)
        elif (integer := _as_int(value)) is not None:
            number = decimal.Decimal(integer)
        else:
            raise _bad(what, value, type_)
    except decimal.InvalidOperation:
        raise _bad(what, value, type_) from None
    if not number.is_finite():
        raise InvalidArgument(f"{what} is {shown(value)}: NaN and infinities are not accepted")
    if number.is_zero():
        return 0
    if number.adjusted() >= _DECIMAL_DIGITS_MAX:
        raise InvalidArgument(f"{what} is {shown(value)}, which does not fit in {type_}")
    scaled = number.scaleb(type_.scale, _EXACT)
    if scaled != scaled.to_integral_value(context=_EXACT):
        raise InvalidArgument(f"{what} is {shown(value)}, which has more than {type_.scale} digits after the point")
    unscaled = int(scaled)
    if not type_.stored_min <= unscaled <= type_.stored_max:
        raise InvalidArgument(f"{what} is {shown(value)}, which does not fit in {type_}")
    return unscaled


def _to_string(type_: ColumnType, value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _bad(what, value, type_)
    text = str.__str__(value)  # the characters: a subclass, such as a text Enum, may say something else in str()
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what} is not valid Unicode text") from None
    return text


def _to_bytes(type_: ColumnType, value: Any, what: str) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise _bad(what, value, type_)


def _to_timestamp(type_: ColumnType, value: Any, what: str) -> int:
    if isinstance(value, dt.datetime):
        if value.utcoffset() is None:
            raise InvalidArgument(f"{what} is a datetime without a time zone: use an aware one, in UTC")
        return (value - _EPOCH) // dt.timedelta(microseconds=1)
    number = _as_int(value)
    if number is None:
        raise _bad(what, value, type_)
    if not INT64_MIN <= number <= INT64_MAX:
        raise InvalidArgument(f"{what} is {shown(number)}, which does not fit in 64 bits")
    return number


_TO_STORED: Final = {
    "bool": _to_bool,
    "int64": _to_int64,
    "float64": _to_float64,
    "decimal": _to_decimal,
    "string": _to_string,
    "bytes": _to_bytes,
    "timestamp": _to_timestamp,
}


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """``kivi.sum("int64")`` in a table's columns (a type), ``kivi.sum("resp_time_us")`` in measures (a column)."""

    operator: Literal["sum", "count", "min", "max"]
    argument: str | None = None

    def __str__(self) -> str:
        return f"{self.operator}({self.argument or ''})"


@dataclass(frozen=True, slots=True)
class TimeSlot:
    """A group key: the start of the fixed-width slot, aligned to the epoch, that a timestamp column falls in."""

    column: str
    width_us: int
    name: str


def time_slot(column: str, width: str | int | dt.timedelta, name: str = "slot") -> TimeSlot:
    """``kivi.time_slot("ts", "5m", name="slot")``: group by 5-minute slots [start, start + 5 min) of ``ts``."""
    return TimeSlot(column, parse_duration_us(width, "slot width"), name)


Operator = Literal["sum", "min", "max"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column. ``operator`` is None for a value column; ``counts`` marks a SUM declared as count()."""

    name: str
    type: ColumnType
    operator: Operator | None = None

    def describe(self) -> str:
        return f"{self.operator}({self.type})" if self.operator else str(self.type)


@dataclass(frozen=True, slots=True)
class GroupKey:
    """One key column of an aggregate: a source column as it is, or (slot_us > 0) the slot it falls in."""

    name: str
    source: str
    slot_us: int = 0


@dataclass(frozen=True, slots=True)
class Measure:
    """One delta column of an aggregate: ``operator`` over ``source``; count() has no source."""

    name: str
    operator: Literal["sum", "count", "min", "max"]
    source: str | None


@dataclass(frozen=True, slots=True)
class TableSchema:
    """The definition of one table. ``id`` is its generation: never reused, so a dropped table's rows are never read."""

    name: str
    kind: Literal["row", "event", "aggregate"]
    key: tuple[Column, ...]
    columns: tuple[Column, ...]
    id: int = 0
    state: Literal["ready", "building"] = "ready"
    created_ts: int = 0
    history_us: int | None = None
    event_time: str | None = None
    retention_us: int | None = None
    source: str | None = None
    source_id: int = 0
    complete_since_us: int | None = None
    group_by: tuple[GroupKey, ...] = ()
    measures: tuple[Measure, ...] = ()
    derived: tuple[tuple[str, str], ...] = ()
    by_name: dict[str, Column] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Key columns and columns."""
    index_of: dict[str, int] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Where a column is among ``columns``; key columns are nowhere."""

    def __post_init__(self) -> None:
        for column in (*self.key, *self.columns):
            if column.name in self.by_name:
                raise SchemaError(f"table {self.name!r} names the column {column.name!r} twice")
            self.by_name[column.name] = column
        self.index_of.update((column.name, i) for i, column in enumerate(self.columns))

    # -- lookups --------------------------------------------------------------------------------

    @property
    def key_names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.key)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Every name a read returns, in order: key columns, columns, derived expressions."""
        return (*self.by_name, *(name for name, _ in self.derived))

    def column(self, name: str) -> Column:
        try:
            return self.by_name[name]
        except KeyError:
            known = ", ".join(self.by_name)
            raise SchemaError(f"table {self.name!r} has no column {name!r}; it has {known}") from None

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
        out = []
        for column, value in zip(self.key, key, strict=False):
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

    def _settable(self, name: str) -> Column:
        column = self.column(name)
        if column in self.key:
            raise SchemaError(f"{name!r} is a key column of {self.name!r}: give it in the key tuple")
        return column

    def _writable(self) -> None:
        if self.kind == "aggregate":
            raise InvalidArgument(f"{self.name!r} is an aggregate of {self.source!r}: append events there instead")
        if self.kind == "event":
            raise InvalidArgument(f"{self.name!r} is an event table: use append()")

    def stored_put(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Named column values for put and insert, in stored form; None is null."""
        self._writable()
        return {name: self._settable(name).type.to_stored(value, f"column {name!r}") for name, value in values.items()}

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
            if value is not None:
                out[name] = column.type.to_stored(value, f"delta of {name!r}")
        return out

    def check_guardable(self, column: str | None) -> None:
        """A guard names a non-key column, or None for the row's existence."""
        if self.kind == "event":
            raise InvalidArgument(f"{self.name!r} is an event table: it has no rows to guard")
        if column is not None:
            self._settable(column)

    def output_columns(self, columns: Iterable[str] | None) -> tuple[str, ...]:
        """The names a read returns, checked; None is all of them."""
        if columns is None:
            return self.output_names
        if isinstance(columns, str):
            raise InvalidArgument(f"columns is a list of names, not the string {columns!r}")
        known = self.output_names
        out = tuple(dict.fromkeys(columns))
        for name in out:
            if name not in known:
                raise SchemaError(f"table {self.name!r} has no column {name!r}; it has {', '.join(known)}")
        return out

    def row_from_stored(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """One row as a caller sees it. Raises OutOfRange for a sum that has outgrown its column."""
        by_name = self.by_name
        return {
            name: by_name[name].type.from_stored(value, name) if name in by_name else value
            for name, value in row.items()
        }

    def description(self) -> dict[str, Any]:
        """What describe() returns: plain data, for people and programs."""
        out: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind,
            "state": self.state,
            "key": {column.name: str(column.type) for column in self.key},
            "columns": {column.name: column.describe() for column in self.columns},
            "history_us": self.history_us,
            "created_ts": self.created_ts,
            "id": self.id,
        }
        if self.kind == "event":
            out |= {"event_time": self.event_time, "retention_us": self.retention_us}
        if self.kind == "aggregate":
            out["source"] = self.source
            out["complete_since_us"] = self.complete_since_us
            out["group_by"] = [
                {"name": g.name, "source": g.source, "slot_us": g.slot_us} if g.slot_us else g.name
                for g in self.group_by
            ]
            out["measures"] = {m.name: str(OperatorCall(m.operator, m.source)) for m in self.measures}
            out["derived"] = dict(self.derived)
        return out

    # -- JSON: the form in the catalog, on the wire and in describe() ---------------------------

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind,
            "id": self.id,
            "state": self.state,
            "created_ts": self.created_ts,
            "key": [[c.name, str(c.type)] for c in self.key],
            "columns": [[c.name, str(c.type), c.operator] for c in self.columns],
        }
        if self.history_us is not None:
            out["history_us"] = self.history_us
        if self.kind == "event":
            out["event_time"] = self.event_time
            if self.retention_us is not None:
                out["retention_us"] = self.retention_us
        if self.kind == "aggregate":
            out["source"] = self.source
            out["source_id"] = self.source_id
            out["complete_since_us"] = self.complete_since_us
            out["group_by"] = [[g.name, g.source, g.slot_us] for g in self.group_by]
            out["measures"] = [[m.name, m.operator, m.source] for m in self.measures]
            out["derived"] = [list(pair) for pair in self.derived]
        return out

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> TableSchema:
        return TableSchema(
            name=data["name"],
            kind=data["kind"],
            id=int(data["id"]),
            state=data["state"],
            created_ts=int(data["created_ts"]),
            key=tuple(Column(n, ColumnType.parse(t)) for n, t in data["key"]),
            columns=tuple(Column(n, ColumnType.parse(t), op) for n, t, op in data["columns"]),
            history_us=data.get("history_us"),
            event_time=data.get("event_time"),
            retention_us=data.get("retention_us"),
            source=data.get("source"),
            source_id=int(data.get("source_id", 0)),
            complete_since_us=data.get("complete_since_us"),
            group_by=tuple(GroupKey(n, s, int(w)) for n, s, w in data.get("group_by", ())),
            measures=tuple(Measure(n, o, s) for n, o, s in data.get("measures", ())),
            derived=tuple((n, e) for n, e in data.get("derived", ())),
        )

    def to_json(self) -> bytes:
        return json.dumps(self.to_dict(), separators=(",", ":")).encode()

    @staticmethod
    def from_json(data: bytes) -> TableSchema:
        return TableSchema.from_dict(json.loads(data))


# -- building schemas from what a caller wrote ------------------------------------------------------


def _value_column(name: object, declared: object, what: str) -> Column:
    if isinstance(declared, OperatorCall):
        raise SchemaError(f"{what} {name!r} is declared as {declared}: an operator is not allowed here")
    return Column(check_name(name, what), ColumnType.parse(declared))


def _delta_column(name: str, call: OperatorCall, type_: ColumnType) -> Column:
    if call.operator in ("sum", "count"):
        if type_.name not in ("int64", "float64", "decimal"):
            raise SchemaError(f"column {name!r}: {call.operator} needs int64, float64 or decimal, not {type_}")
        return Column(name, type_, "sum")
    if type_.name not in ("int64", "float64", "decimal", "timestamp"):
        raise SchemaError(f"column {name!r}: {call.operator} needs a number or a timestamp, not {type_}")
    return Column(name, type_, "min" if call.operator == "min" else "max")


def row_table_schema(
    name: str, key: Mapping[str, object], columns: Mapping[str, object], history: str | int | dt.timedelta | None = None
) -> TableSchema:
    """The schema of a row table. Raises SchemaError, InvalidArgument."""
    if not key:
        raise SchemaError(f"table {name!r} needs at least one key column")
    built = []
    for column_name, declared in columns.items():
        check_name(column_name, "column")
        if isinstance(declared, OperatorCall):
            argument = "int64" if declared.operator == "count" else declared.argument
            built.append(_delta_column(column_name, declared, ColumnType.parse(argument)))
        else:
            built.append(_value_column(column_name, declared, "column"))
    _check_disjoint(name, [*key, *columns])
    return TableSchema(
        name=check_name(name, "table"),
        kind="row",
        key=tuple(_value_column(n, t, "key column") for n, t in key.items()),
        columns=tuple(built),
        history_us=None if history is None else parse_duration_us(history, "history"),
    )


def event_table_schema(
    name: str,
    event_time: str,
    columns: Mapping[str, object],
    retention: str | int | dt.timedelta | None = None,
) -> TableSchema:
    """The schema of an append-only event table; ``event_time`` names one of its timestamp columns."""
    built = tuple(_value_column(n, t, "column") for n, t in columns.items())
    by_name = {c.name: c for c in built}
    if event_time not in by_name or by_name[event_time].type.name != "timestamp":
        raise SchemaError(
            f"event table {name!r}: event_time must name one of its timestamp columns, not {event_time!r}"
        )
    return TableSchema(
        name=check_name(name, "table"),
        kind="event",
        key=(),
        columns=built,
        event_time=event_time,
        retention_us=None if retention is None else parse_duration_us(retention, "retention"),
    )


def aggregate_schema(
    name: str,
    source: TableSchema,
    group_by: Sequence[str | TimeSlot],
    measures: Mapping[str, OperatorCall],
    derived: Mapping[str, str] | None = None,
    history: str | int | dt.timedelta | None = None,
) -> TableSchema:
    """The schema of an aggregate table over the event table ``source``. Raises SchemaError, InvalidArgument."""
    if source.kind != "event":
        raise SchemaError(
            f"aggregate {name!r}: its source {source.name!r} is a {source.kind} table, not an event table"
        )
    if not group_by or not measures:
        raise SchemaError(f"aggregate {name!r} needs at least one group key and one measure")
    groups, keys = [], []
    for item in group_by:
        if isinstance(item, TimeSlot):
            column = source.column(item.column)
            if column.type.name != "timestamp":
                raise SchemaError(f"aggregate {name!r}: time_slot needs a timestamp, {item.column!r} is {column.type}")
            groups.append(GroupKey(check_name(item.name, "group key"), item.column, item.width_us))
        else:
            column = source.column(item)
            groups.append(GroupKey(item, item))
        keys.append(Column(groups[-1].name, column.type))
    columns, built = [], []
    for measure_name, call in measures.items():
        check_name(measure_name, "measure")
        if not isinstance(call, OperatorCall):
            raise SchemaError(f"measure {measure_name!r} must be kivi.sum, count, min or max, not {call!r}")
        if call.operator == "count":
            if call.argument is not None:
                source.column(call.argument)
            type_ = ColumnType("int64")
        else:
            if call.argument is None:
                raise SchemaError(f"measure {measure_name!r}: {call.operator} needs a column of {source.name!r}")
            type_ = source.column(call.argument).type
        if type_.name == "decimal" and call.operator == "sum":
            type_ = ColumnType("decimal", 18, type_.scale)
        columns.append(_delta_column(measure_name, call, type_))
        built.append(Measure(measure_name, call.operator, call.argument))
    _check_disjoint(name, [*(k.name for k in keys), *measures, *(derived or {})])
    expressions = []
    for derived_name, text in (derived or {}).items():
        check_name(derived_name, "derived column")
        parse_expression(text, {c.name for c in (*keys, *columns) if c.type.name in ("int64", "float64", "decimal")})
        expressions.append((derived_name, text))
    return TableSchema(
        name=check_name(name, "table"),
        kind="aggregate",
        key=tuple(keys),
        columns=tuple(columns),
        history_us=None if history is None else parse_duration_us(history, "history"),
        source=source.name,
        source_id=source.id,
        group_by=tuple(groups),
        measures=tuple(built),
        derived=tuple(expressions),
    )


def _check_disjoint(table: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SchemaError(f"table {table!r} names the column {name!r} twice")
        seen.add(name)


# -- derived columns: read-time arithmetic ----------------------------------------------------------

_ALLOWED_NODES: Final = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult, ast.Div,
    ast.USub, ast.UAdd, ast.Name, ast.Load, ast.Constant,
)  # fmt: skip
_EXPRESSION_DEPTH_MAX: Final = 100


def parse_expression(text: str, names: set[str]) -> ast.expr:
    """``"sum_resp_time / invocations"`` -> its syntax tree: + - * /, parentheses, numbers and ``names`` only.

    At most 1,000 characters and 100 operations deep, so that evaluating it never exhausts the stack. SchemaError.
    """
    if not isinstance(text, str) or len(text) > 1_000:
        raise SchemaError(f"a derived column is an expression of at most 1000 characters, not {shown(text)}")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise SchemaError(f"{text!r} is not an arithmetic expression") from None
    if _depth(tree.body) > _EXPRESSION_DEPTH_MAX:
        raise SchemaError(f"{text!r} is nested too deeply: at most {_EXPRESSION_DEPTH_MAX} operations")
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED_NODES):
            raise SchemaError(f"{text!r}: only + - * /, numbers and columns are allowed")
        if isinstance(node, ast.Constant) and (
            isinstance(node.value, bool) or not isinstance(node.value, (int, float))
        ):
            raise SchemaError(f"{text!r}: {node.value!r} is not a number")
        if isinstance(node, ast.Constant) and not _is_float64(node.value):
            raise SchemaError(f"{text!r}: a number in it is too large for a float64")
        if isinstance(node, ast.Name) and node.id not in names:
            raise SchemaError(f"{text!r} names {node.id!r}, which is not a numeric column; known are {sorted(names)}")
    return tree.body


def _depth(tree: ast.AST) -> int:
    """Level by level: a tree that is too deep cannot be measured by recursion."""
    level, depth = [tree], 0
    while level := [child for node in level for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]:
        depth += 1
    return depth


def _is_float64(number: Any) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def evaluate_expression(node: ast.expr, row: Mapping[str, Any]) -> float | None:
    """The expression over one row of caller-form values: a float, or None when an operand is null or a divisor 0.

    Raises OverflowError for what leaves the finite numbers, on the way or at the end.
    """
    match node:
        case ast.Constant(value=value):
            return float(value)  # type: ignore[arg-type]
        case ast.Name(id=name):
            value = row[name]
            return None if value is None else float(value)
        case ast.UnaryOp(op=op, operand=operand):
            inner = evaluate_expression(operand, row)
            return None if inner is None else (-inner if isinstance(op, ast.USub) else inner)
        case ast.BinOp(left=left_node, op=op, right=right_node):
            left, right = evaluate_expression(left_node, row), evaluate_expression(right_node, row)
            if left is None or right is None:
                return None
            match op:
                case ast.Add():
                    result = left + right
                case ast.Sub():
                    result = left - right
                case ast.Mult():
                    result = left * right
                case _:
                    if right == 0:
                        return None
                    result = left / right
            if not math.isfinite(result):
                raise OverflowError("the result is too large for a float64")
            return result
    raise SchemaError("not an arithmetic expression")
