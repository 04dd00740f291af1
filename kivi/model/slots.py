"""Time slots: which slot [start, end) a moment falls in. Durations, and calendar units in a time zone.

Every slot begins where the one before it ends, and ``start`` of a moment is the greatest beginning that is not later:

* **Fixed width, no zone** ("5m"): multiples of the width since 1970-01-01 UTC.
* **Calendar units** ("1d", "2w", "1month", "1quarter", "1year"): slots begin at local midnight. Days are counted from
  1970-01-01, weeks from Monday, 1969-12-29, months from January 1970, so that quarters and years begin where everybody
  expects. A day has 23 or 25 hours where the clock is changed. Where the clock skips a midnight, the day begins at the
  jump; where it shows one twice, at the first. Without a zone the calendar is that of UTC.
* **Hours and less in a zone** ("1h", "15m"; the width divides 24 hours): a slot begins when the local clock shows a
  multiple of its width since midnight, or is set forward past one. So zones half an hour off UTC have hours that begin
  at their own full hour. When a clock is set back, its repeated hour is a slot of its own, since the clock shows the
  full hour again; where it is set back to half past (Lord Howe), the hour it is in lasts 90 minutes.

A zone's changes are found by asking ``zoneinfo`` (of the machine, or the package tzdata) every six days from 1970 to
2300: in no zone do two lie closer. The tz database promises nothing for earlier moments, whose local times are reckoned
with the offset of 1970; later ones with that of 2300. A rule that a country changes applies to what is derived after
the database was updated.

Pure but for reading the tz database, once per zone.
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import re
from dataclasses import dataclass
from typing import Any, Final, Literal
from zoneinfo import ZoneInfo

import numpy as np

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.given import is_among
from kivi.model.types import INT64_MIN, check_whole_us, shown

__all__ = ["MOMENT_MAX_US", "Slot", "known_zone", "offsets_of", "parse_duration_us"]

Array = np.ndarray[Any, np.dtype[Any]]

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

_CALENDAR: Final = re.compile(r"([0-9]{1,100})\s*(w|weeks?|mo|months?|q|quarters?|y|years?)\Z")
_MONTHS: Final = {"w": 1, "m": 1, "q": 3, "y": 12}  # weeks are not of months, and no longer
_DAY_US: Final = 86_400_000_000
_MONDAY: Final = -3  # 1969-12-29, in days from 1970-01-01
_YEARS_MAX: Final = 1_000  # of a calendar slot
MOMENT_MAX_US: Final = 2**62
_PROBE_S: Final = 6 * 86_400
_PROBED_TO_S: Final = int(dt.datetime(2300, 1, 1, tzinfo=dt.UTC).timestamp())
_BEFORE_US: Final = -(2**63)


def parse_duration_us(value: str | int | dt.timedelta, what: str = "duration", least: int = 1) -> int:
    """``"5m"``, ``"30d"``, ``"250ms"``, a timedelta or an int of microseconds -> microseconds, ``least`` to 2**62.

    Raises InvalidArgument.
    """
    if isinstance(value, dt.timedelta):
        check_whole_us(value, what)
        micros = value // dt.timedelta(microseconds=1)
    elif isinstance(value, int) and not isinstance(value, bool):
        micros = value
    elif isinstance(value, str) and (match := _DURATION.match(value.strip())):
        micros = int(match[1]) * _UNITS_US[match[2]]
    elif least == 0 and is_among(value, ("0",)):
        micros = 0
    else:
        raise InvalidArgument(f"{what} {shown(value)} is not a duration: write it like '5m', '1h' or '30d'")
    if micros < least:
        raise InvalidArgument(f"{what} {shown(value)} must {'be greater than zero' if least else 'not be negative'}")
    if micros > _DURATION_MAX_US:
        raise InvalidArgument(f"{what} {shown(value)} is too long: at most 2**62 microseconds, 53,375,995 days")
    return micros


@dataclass(frozen=True, slots=True)
class Slot:
    """A partition of time into slots; see the page. Get one with ``Slot.parse``.

    ``count`` of ``unit`` is the width; ``phase``, of days, the day that they are counted from; ``zone`` an IANA name,
    empty for UTC. ``us`` without a zone is a fixed width.
    """

    unit: Literal["us", "day", "month"]
    count: int
    phase: int = 0
    zone: str = ""

    @staticmethod
    def parse(width: str | int | dt.timedelta, tz: str | None = None) -> Slot:
        """``"5m"``, ``"1d"``, ``"2w"``, ``"1month"``, ``"1quarter"``, ``"1year"``, a timedelta, or microseconds.

        Raises InvalidArgument for what is no width, SchemaError for a zone that is not known and for hours that do not
        divide the day of one.
        """
        zone = "" if tz is None else known_zone(tz)
        if isinstance(width, str) and (match := _CALENDAR.match(width.strip())):
            count, unit = int(match[1]), match[2][0]
            months = count * _MONTHS[unit]
            if not 1 <= months <= _YEARS_MAX * 12:
                raise InvalidArgument(f"slot width {shown(width)} must be greater than zero, and at most 1,000 years")
            return Slot("month", months, 0, zone) if unit != "w" else Slot("day", 7 * count, _MONDAY, zone)
        if isinstance(width, str) and not _DURATION.match(width.strip()):
            raise InvalidArgument(
                f"slot width {shown(width)} is not a duration: write it like '5m', '1h' or '30d', or by calendar like "
                "'1w', '1month', '1quarter' or '1year'"
            )
        micros = parse_duration_us(width, "slot width")
        if not zone:
            return Slot("us", micros)
        if micros % _DAY_US == 0:
            if micros // _DAY_US > _YEARS_MAX * 366:
                raise InvalidArgument(f"slot width {shown(width)} in a time zone must be at most {_YEARS_MAX:,} years")
            return Slot("day", micros // _DAY_US, 0, zone)
        if _DAY_US % micros:
            raise SchemaError(
                f"slots of {shown(width)} in {zone!r} would not begin at midnight: use a width that divides 24 hours "
                "(15m, 1h, 6h), or whole days; without tz= every width is possible"
            )
        return Slot("us", micros, 0, zone)

    # -- in words -------------------------------------------------------------------------------

    @property
    def is_fixed(self) -> bool:
        """Whether every slot is ``count`` microseconds long, counted from 1970-01-01 UTC."""
        return self.unit == "us" and not self.zone

    @property
    def width(self) -> str:
        """As ``parse`` takes it: "5m", "1month"."""
        if self.unit == "month":
            name, months = next((n, m) for n, m in (("year", 12), ("quarter", 3), ("month", 1)) if self.count % m == 0)
            return f"{self.count // months}{name}"
        if self.unit == "day":
            return f"{self.count // 7}w" if self.phase else f"{self.count}d"
        name, micros = next((n, us) for n, us in reversed(_UNITS_US.items()) if self.count % us == 0)
        return f"{self.count // micros}{name}"

    @property
    def nominal_us(self) -> int:
        """About how long a slot is; of slots of which one nests in the other, the finer one's is less."""
        return self.count * {"us": 1, "day": _DAY_US, "month": 30 * _DAY_US}[self.unit]

    def __str__(self) -> str:
        return f"{self.width} in {self.zone}" if self.zone else self.width

    # -- which slot -----------------------------------------------------------------------------

    def starts(self, moments: Array) -> Array:
        """Where the slots of these moments begin; int64 microseconds since 1970 UTC, both.

        Raises OverflowError where a slot begins before the first moment of 64 bits, and, by calendar or in a zone, for
        moments more than 2**62 microseconds from 1970.
        """
        if self.is_fixed:
            slots = np.floor_divide(moments, self.count)
            if len(slots) and int(slots.min()) * self.count < INT64_MIN:
                raise OverflowError("a slot begins before time")
            starts: Array = slots * self.count
            return starts
        if not len(moments):
            return moments
        first, last = int(moments.min()), int(moments.max())
        start = self.start(first)
        if last < self.end(start):  # as those of one commit mostly are
            return np.full(len(moments), start, np.int64)
        if last > MOMENT_MAX_US:
            raise OverflowError("a calendar reaches 2**62 microseconds from 1970")
        return self._calendar_starts(moments)

    def _calendar_starts(self, moments: Array) -> Array:
        table = _table(self)
        if len(table.since) == 1:
            first: Array = table.offsets[0]
            return self._local_starts(moments + first) - first
        at = np.searchsorted(table.since, moments, side="right") - 1
        offsets = table.offsets[at]
        local = self._local_starts(moments + offsets)
        starts: Array = np.where(local > table.local[at], local - offsets, table.starts[at])
        return starts

    def start(self, moment: int) -> int:
        """Where the slot of one moment begins. Raises OverflowError, as ``starts``."""
        if self.is_fixed:
            start = moment // self.count * self.count
            if start < INT64_MIN:
                raise OverflowError("a slot begins before time")
            return start
        table = _table(self)
        start, end = table.last  # moments that come one at a time are mostly of one slot
        if start <= moment < end:
            return start
        if not -MOMENT_MAX_US <= moment <= MOMENT_MAX_US:
            raise OverflowError("a calendar reaches 2**62 microseconds from 1970")
        start = int(self._calendar_starts(np.array([moment], np.int64))[0])
        table.last = (start, self.end(start))
        return start

    def end(self, start: int) -> int:
        """Where the slot that begins at ``start`` ends, which is where the next one begins."""
        if self.is_fixed:
            return start + self.count
        table = _table(self)
        at = int(np.searchsorted(table.since, start, side="right")) - 1
        offset = int(table.offsets[at])
        local = max(int(self._local_starts(np.array([start + offset], np.int64))[0]), int(table.local[at]))
        while True:
            end = self._next_local(local) - int(table.offsets[at])
            if at + 1 == len(table.since) or end < table.since[at + 1]:
                return end
            at += 1
            if table.starts[at] == table.since[at]:
                return int(table.since[at])
            local = int(table.local[at])

    def nests_in(self, coarser: Slot) -> bool:
        """Whether each of these slots lies within one of ``coarser``, for every moment there is."""
        return self == coarser or _nests(self, coarser)

    def _local_starts(self, local: Array) -> Array:
        """The beginnings of slots on a clock that is never changed."""
        if self.unit == "us":
            return local - np.mod(local, self.count)
        days = np.floor_divide(local, _DAY_US)
        if self.unit == "day":
            days -= np.mod(days - self.phase, self.count)
            return days * _DAY_US
        months = days.astype("M8[D]").astype("M8[M]").astype(np.int64)
        return _month_starts(months - np.mod(months, self.count))

    def _next_local(self, local: int) -> int:
        if self.unit == "us":
            return local + self.count
        if self.unit == "day":
            return local + self.count * _DAY_US
        month = np.array([local // _DAY_US], "M8[D]").astype("M8[M]").astype(np.int64)
        return int(_month_starts(month + self.count)[0])


def _month_starts(months: Array) -> Array:
    return months.astype("M8[M]").astype("M8[D]").astype(np.int64) * _DAY_US


# -- zones ----------------------------------------------------------------------------------------


def known_zone(tz: str) -> str:
    if not isinstance(tz, str) or not tz:
        raise SchemaError(f"tz is the IANA name of a time zone, like 'Europe/Madrid', not {shown(tz)}")
    try:
        ZoneInfo(tz)
    except (KeyError, ValueError, OSError):  # a name that is not known, no name at all, a folder of names
        raise SchemaError(f"there is no time zone {tz!r}: give an IANA name, like 'Europe/Madrid' or 'UTC'") from None
    return "" if tz == "UTC" else tz


@functools.lru_cache(maxsize=64)
def _offsets(zone: str) -> list[tuple[int, int]]:
    """(since, offset from UTC), both in microseconds: every change of the zone's clock. The first is since ever."""
    if not zone:
        return [(_BEFORE_US, 0)]
    known = ZoneInfo(zone)

    def offset_s(second: int) -> int:
        offset = dt.datetime.fromtimestamp(second, known).utcoffset()
        assert offset is not None
        return offset // dt.timedelta(seconds=1)

    last = offset_s(0)
    found = [(_BEFORE_US, last * 1_000_000)]
    for second in range(0, _PROBED_TO_S, _PROBE_S):
        low, high = second, second + _PROBE_S
        if (after := offset_s(high)) == last:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if offset_s(middle) == last else (low, middle)
        found.append((high * 1_000_000, after * 1_000_000))
        last = after
    return found


@functools.lru_cache(maxsize=64)
def offsets_of(zone: str) -> tuple[Array, Array]:
    """Since when a zone's clock is how far ahead of UTC, both int64 microseconds; the first is since ever."""
    since, offsets = zip(*_offsets(zone), strict=True)
    return np.array(since, np.int64), np.array(offsets, np.int64)


class _Table:
    """Of one partition: ``since`` when the clock is ``offsets`` ahead of UTC, and the slot that each change falls in,
    by where it ``starts`` and by its beginning on the clock then (``local``)."""

    __slots__ = ("last", "local", "offsets", "since", "starts")

    def __init__(self, slot: Slot) -> None:
        changes = _offsets(slot.zone)
        local, starts = [_BEFORE_US], [_BEFORE_US]
        for (_, before), (moment, after) in itertools.pairwise(changes):
            wall, now = moment + before, moment + after  # what the clock would have shown, and what it shows
            last, new = map(int, slot._local_starts(np.array([wall - 1, now], np.int64)))
            # The slot until now may have begun before the clock was changed the last time.
            begun, start = (last, last - before) if last > local[-1] else (local[-1], starts[-1])
            if slot.unit == "us":
                begins = new == now or (after > before and new >= wall)
            else:
                begins, new = new > begun, max(new, begun)  # no day begins twice
            local.append(new)
            starts.append(moment if begins else start)
        self.since, self.offsets = offsets_of(slot.zone)
        self.local = np.array(local, np.int64)
        self.starts = np.array(starts, np.int64)
        self.last = (0, 0)  # the slot that was asked for last, [start, end)


@functools.lru_cache(maxsize=256)
def _table(slot: Slot) -> _Table:
    return _Table(slot)


# -- nesting --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _nests(finer: Slot, coarser: Slot) -> bool:
    if finer.zone != coarser.zone and not finer.is_fixed:
        return False
    if finer.zone == coarser.zone:
        return _nests_on_one_clock(finer, coarser)
    # A fixed width in a zone: all that the zone's slots begin at must be multiples of it.
    width, table = finer.count, _table(coarser)
    begun = table.since[1:][table.starts[1:] == table.since[1:]]
    unit = coarser.count if coarser.unit == "us" else _DAY_US
    return unit % width == 0 and not np.mod(table.offsets, width).any() and not np.mod(begun, width).any()


def _nests_on_one_clock(finer: Slot, coarser: Slot) -> bool:
    if coarser.unit == "us":
        if finer.unit == "us":
            return coarser.count % finer.count == 0
        days, rest = divmod(coarser.count, _DAY_US)  # a fixed width of whole days, in UTC
        return not rest and finer.unit == "day" and days % finer.count == 0 and not finer.phase % finer.count
    if finer.unit == "month" or coarser.unit == "month":
        if finer.unit == coarser.unit:
            return coarser.count % finer.count == 0
        return finer.unit != "month" and (finer.count == 1 if finer.unit == "day" else _DAY_US % finer.count == 0)
    if finer.unit == "day":
        return coarser.count % finer.count == 0 and (coarser.phase - finer.phase) % finer.count == 0
    days, rest = divmod(finer.count, _DAY_US)
    if rest or not days:
        return _DAY_US % finer.count == 0
    return coarser.count % days == 0 and not coarser.phase % days
