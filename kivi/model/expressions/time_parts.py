"""Parts of a timestamp: what a calendar and a clock on the wall show, in UTC or in a time zone.

Every moment of 64 bits has them, by the Gregorian calendar, which is reckoned on before 1582 and after the year 9999. A
year before the first one is 0 or less. What a zone's clock shows is that of ``kivi.model.slots``: hours of a slot and
of an expression are the same ones. One moment and a column of them go through the same integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kivi.errors import InvalidArgument
from kivi.model.expressions.nodes import TIME_PARTS
from kivi.model.slots import known_zone, offsets_of
from kivi.model.types import shown

__all__ = ["checked_part", "part_of", "parts_of"]

Array = np.ndarray[Any, np.dtype[Any]]

_DAY_S = 86_400


def checked_part(value: tuple[Any, ...]) -> tuple[str, str]:
    """(part, zone). Raises InvalidArgument for what is none, SchemaError for a zone that is not known."""
    if len(value) != 2 or value[0] not in TIME_PARTS or not isinstance(value[1], (str, type(None))):
        raise InvalidArgument(f"{shown(value)} is no part of a timestamp: {', '.join(TIME_PARTS)}, and a time zone")
    return value[0], known_zone(value[1]) if value[1] else ""


def part_of(name: str, zone: str, moment: int) -> int:
    """Of a moment, in microseconds since 1970 UTC."""
    since, offsets = offsets_of(zone)
    offset_us = int(offsets[np.searchsorted(since, moment, side="right") - 1])
    return int(_part(name, moment // 1_000_000 + offset_us // 1_000_000))


def parts_of(name: str, zone: str, moments: Array) -> Array:
    """``part_of`` of each; int64 both."""
    since, offsets = offsets_of(zone)
    local: Array = moments // 1_000_000
    if len(since) > 1 or offsets[0]:
        at = np.searchsorted(since, moments, side="right") - 1
        local = local + offsets[at] // 1_000_000
    part: Array = _part(name, local)
    return part


def _part(name: str, second: Any) -> Any:
    """Of seconds on a zone's clock, since 1970: an integer, or a column of them."""
    match name:
        case "second":
            return second % 60
        case "minute":
            return second // 60 % 60
        case "hour":
            return second // 3_600 % 24
        case "weekday":
            return (second // _DAY_S + 3) % 7  # 1970 began on a Thursday
    # Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms": years that begin in March, in eras of 400.
    day = second // _DAY_S + 719_468
    era, day = day // 146_097, day % 146_097
    year = (day - day // 1_460 + day // 36_524 - day // 146_096) // 365
    day = day - (365 * year + year // 4 - year // 100)
    month = (5 * day + 2) // 153
    if name == "day":
        return day - (153 * month + 2) // 5 + 1
    since_january = (month + 2) % 12
    if name == "month":
        return since_january + 1
    return year + 400 * era + (since_january < 2)
