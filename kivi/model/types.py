"""Column types, and single values between the form a caller uses and the *stored form*.

Every room works with values in stored form; only what faces a caller converts, here:

============== ===================================== ==============================
type           a caller gives and gets               stored form
============== ===================================== ==============================
bool           bool                                  bool
int64          int                                   int, -2**63 .. 2**63-1
float64        float (or int that is one), finite    float, -0.0 normalised to 0.0
decimal(p, s)  decimal.Decimal (int, str accepted)   int, unscaled: value * 10**s
string         str                                   str, valid UTF-8
bytes          bytes                                 bytes
timestamp      aware UTC datetime, or int            int, microseconds since 1970 UTC, of the years 1 to 9999
quantiles(s)   gets a ``Quantiles``                  bytes, the state of a measure
list(type)     gets a list                           bytes, the state of a measure
top(type, k)   gets a ``Top``                        bytes, the state of a measure
============== ===================================== ==============================

The last three are what some measures of an aggregate are read as, and nothing that a caller declares or gives.

Going in, a value of another type is a SchemaError, one that does not fit is InvalidArgument, and neither a decimal nor
an integer nor a moment is ever rounded. Coming out, a sum that has outgrown its column is OutOfRange, and kept exactly.
Whole columns go the same way in ``kivi.arrow``, by the same rules.

**Invariant.** A timestamp that is written is one that a ``datetime`` holds (``to_written``), so that every reader can
make one of it. What only asks, a literal, a bound or the key of a row that is read or deleted, may be any 64 bits
(``to_stored``): a store that was written before the rule may hold others, which are found, read as Arrow and deleted.
"""

from __future__ import annotations

import datetime as dt
import decimal
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from kivi.errors import DataLoss, InvalidArgument, OutOfRange, SchemaError
from kivi.model.given import is_bool, shown
from kivi.model.quantiles import Quantiles
from kivi.model.values import Top, list_of

__all__ = [
    "INT64_MAX", "INT64_MIN", "LIKELY_US", "MOMENT_MAX_US", "MOMENT_MIN_US", "ColumnType", "check_moment",
    "check_unit", "check_whole_us", "is_float", "shown",
]  # fmt: skip

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
MOMENT_MIN_US: Final = -62_135_596_800_000_000
MOMENT_MAX_US: Final = 253_402_300_799_999_999
"""What a ``datetime`` holds, in microseconds since 1970: the years 1 to 9999."""
LIKELY_US: Final = (631_152_000_000_000, 4_102_444_800_000_000)
"""The years 1990 to 2099, in microseconds since 1970: of what programs measure."""
_UNITS_US: Final = {"seconds": 1_000_000, "milliseconds": 1_000, "microseconds": 1}
_DECIMAL: Final = re.compile(r"decimal\(\s*([0-9]{1,4})\s*,\s*([0-9]{1,4})\s*\)\Z")

_EXACT: Final = decimal.Context(
    prec=decimal.MAX_PREC,
    Emax=decimal.MAX_EMAX,
    Emin=decimal.MIN_EMIN,
    traps=[decimal.InvalidOperation],
)
"""Rounds nothing. The caller's own context may have any precision and any traps, and must not change a value."""

_DECIMAL_DIGITS_MAX: Final = 40
"""No decimal column holds a number that is this long, and one with an exponent of a million is never written out."""

TypeName = Literal["bool", "int64", "float64", "decimal", "string", "bytes", "timestamp", "quantiles", "list", "top"]
STATES: Final = frozenset({"quantiles", "list", "top"})
"""Types whose stored form is the state of a measure."""
_STATE: Final = re.compile(r"(quantiles|list|top)\((.*)\)\Z")


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A column's type. ``precision`` and ``scale`` are 0 except for decimals; quantiles have a scale; a top shows
    ``scale`` values. ``of``: the type of what a list or top holds, as text."""

    name: TypeName
    precision: int = 0
    scale: int = 0
    of: str = ""

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

    @staticmethod
    def read(text: str) -> ColumnType:
        """``parse``, and the types of states: of a column that is there."""
        if match := _STATE.match(text):
            if match[1] == "quantiles":
                return ColumnType("quantiles", 0, int(match[2]))
            if match[1] == "list":
                return ColumnType("list", of=match[2])
            inner, _, shown = match[2].rpartition(", ")
            return ColumnType("top", 0, int(shown), inner)
        return ColumnType.parse(text)

    def __str__(self) -> str:
        match self.name:
            case "decimal":
                return f"decimal({self.precision},{self.scale})"
            case "quantiles":
                return f"quantiles({self.scale})"
            case "list":
                return f"list({self.of})"
            case "top":
                return f"top({self.of}, {self.scale})"
        return self.name

    @property
    def is_state(self) -> bool:
        """Whether its stored form is the state of a measure."""
        return self.name in STATES

    def advice(self, name: str) -> str:
        """What to name in a predicate or an order instead of the state ``name``."""
        return f"name quantile({name}, 0.99)" if self.name == "quantiles" else "it is only read"

    @property
    def is_integer(self) -> bool:
        """Stored as an exact integer: summed in 128 bits."""
        return self.name in ("int64", "decimal")

    @property
    def stored_min(self) -> int:
        if self.name == "timestamp":
            return MOMENT_MIN_US
        return -(10**self.precision) + 1 if self.name == "decimal" else INT64_MIN

    @property
    def stored_max(self) -> int:
        if self.name == "timestamp":
            return MOMENT_MAX_US
        return 10**self.precision - 1 if self.name == "decimal" else INT64_MAX

    # -- one value ------------------------------------------------------------------------------

    def to_stored(self, value: Any, what: str = "value") -> Any:
        """A caller's value in stored form; None stays None. Raises InvalidArgument (SchemaError for a wrong type)."""
        if value is None:
            return None
        return _TO_STORED[self.name](self, value, what)

    def to_written(self, value: Any, what: str = "value") -> Any:
        """``to_stored`` of a value that is written. Raises InvalidArgument also for a time that no datetime holds."""
        stored = self.to_stored(value, what)
        return check_moment(stored, what) if self.name == "timestamp" and stored is not None else stored

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
                    raise OutOfRange(
                        f"{what} is {value} us, outside the years 1 to 9999: read it with to_arrow(), or name other "
                        "columns in columns=",
                        column=what,
                    ) from None
            case "quantiles":
                return Quantiles.from_state(self.scale, value)
            case "list":
                return [ColumnType.parse(self.of).from_stored(item, what) for item in list_of(self.of, value)]
            case "top":
                of = ColumnType.parse(self.of)
                return Top.from_state(of.name, of.from_stored, self.scale, value)
            case _:
                return value

    def from_stored_all(self, values: Sequence[Any], what: str = "value") -> list[Any]:
        """``from_stored`` of each."""
        if self.name == "timestamp":
            epoch, delta = _EPOCH, dt.timedelta
            try:
                return [epoch + delta(0, 0, value) for value in values]
            except (OverflowError, TypeError):  # the latter: one is None
                pass
        try:
            if self.name == "quantiles" and None not in values:
                return Quantiles.from_states(self.scale, values)
            return [self.from_stored(value, what) for value in values]
        except DataLoss as error:
            raise DataLoss(f"column {what!r}: {error}") from None


def _bad(what: str, value: object, type_: ColumnType) -> SchemaError:
    hint = ": give an aware datetime, or whole microseconds since 1970" if type_.name == "timestamp" else ""
    return SchemaError(f"{what} is {shown(value)} ({type(value).__name__}), which is not a {type_}{hint}")


def _to_bool(type_: ColumnType, value: Any, what: str) -> bool:
    if not is_bool(value):
        raise _bad(what, value, type_)
    return bool(value)


def _as_int(value: Any) -> int | None:
    """Python and NumPy integers, not booleans, not floats."""
    if isinstance(value, (bool, float)) or not hasattr(value, "__index__"):
        return None
    try:
        return int(value.__index__())
    except TypeError:  # a NumPy array has the method too, and only some arrays are integers
        return None


def is_float(value: object) -> bool:
    """Of Python or NumPy, whose float16 and float32 are no floats of Python."""
    kind = type(value)
    return isinstance(value, float) or (kind.__module__ == "numpy" and kind.__name__ in ("float16", "float32"))


def _to_int64(type_: ColumnType, value: Any, what: str) -> int:
    number = _as_int(value)
    if number is None:
        raise _bad(what, value, type_)
    if not INT64_MIN <= number <= INT64_MAX:
        raise InvalidArgument(f"{what} is {shown(number)}, which does not fit in 64 bits")
    return number


def _to_float64(type_: ColumnType, value: Any, what: str) -> float:
    if not is_float(value) and (value := _as_int(given := value)) is None:
        raise _bad(what, given, type_)
    try:
        result = float(value)
    except OverflowError:
        raise InvalidArgument(f"{what} is too large for a float64") from None
    if not math.isfinite(result):
        raise InvalidArgument(f"{what} is {value!r}: NaN and infinities are not accepted")
    if result != value:
        raise InvalidArgument(
            f"{what} is {shown(value)}, which has more digits than a float64 keeps: round it with float(), or keep it "
            "in a column of int64 or decimal"
        )
    return result + 0.0  # -0.0 + 0.0 is 0.0


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


def check_moment(value: int, what: str) -> int:
    """Raises InvalidArgument for a time that no ``datetime`` holds.

    One value of the year 58,000, which is nanoseconds taken for microseconds, would be in the way of every reader of
    its column; as an event's time the clock of every alert would stand there.
    """
    if not MOMENT_MIN_US <= value <= MOMENT_MAX_US:
        raise InvalidArgument(
            f"{what} is {value} us, outside the years 1 to 9999: give a datetime, or whole microseconds since 1970"
        )
    return value


def check_whole_us(value: object, what: str) -> None:
    """Raises InvalidArgument for a datetime or timedelta with nanoseconds, which those of pandas may have."""
    if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):
        raise InvalidArgument(f"{what} is {value}, which is not a whole number of microseconds")


def check_unit(times: Iterable[Any], what: str, of: str = "microseconds") -> None:
    """Raises InvalidArgument for whole numbers that must be seconds or milliseconds, where they are microseconds.

    That is where all of them, but nulls, are of 1990 to 2099 so: as microseconds they are of January and February 1970.
    ``of``: what they are, if not microseconds.
    It is asked of what was written as text, by programs that do not know kivi. A time that is one of those can be
    written as a date there.
    """
    given = [time for time in times if time is not None]
    if not given or not all(type(time) is int for time in given):
        return
    for unit, us in _UNITS_US.items():
        if us > _UNITS_US[of] and LIKELY_US[0] <= us * min(given) and us * max(given) < LIKELY_US[1]:
            moment = _EPOCH + dt.timedelta(microseconds=us * given[0])
            raise InvalidArgument(
                f"{what} has {given[0]}: that is {moment:%Y-%m-%d} in {unit}, but whole numbers are {of} since "
                f"1970; multiply by {us // _UNITS_US[of]:,}, or write times as text, like {moment:%Y-%m-%dT%H:%M:%SZ}"
            )


def _to_timestamp(type_: ColumnType, value: Any, what: str) -> int:
    if isinstance(value, dt.datetime):
        if value != value:  # pandas has a datetime that is none
            raise InvalidArgument(f"{what} is {value}, which is no moment: null is None")
        check_whole_us(value, what)
        if value.utcoffset() is None:
            raise InvalidArgument(f"{what} is a datetime without a time zone: use an aware one, in UTC")
        return (value - _EPOCH) // dt.timedelta(microseconds=1)
    return _to_int64(type_, value, what)


def _to_state(type_: ColumnType, value: Any, what: str) -> Any:
    raise SchemaError(f"{what} is {shown(value)}, and a {type_} is made of events alone")


_TO_STORED: Final = {
    "bool": _to_bool,
    "int64": _to_int64,
    "float64": _to_float64,
    "decimal": _to_decimal,
    "string": _to_string,
    "bytes": _to_bytes,
    "timestamp": _to_timestamp,
    **dict.fromkeys(STATES, _to_state),
}
