"""Lateness of events: how long after its event time an event is committed.

Where a lateness is asked for, "auto" stands for what 0.999 of the events of the last days kept to.
"""

from __future__ import annotations

import datetime as dt
from typing import Any, Final, NamedTuple

from kivi.errors import InvalidArgument
from kivi.model.given import is_among, shown
from kivi.model.slots import parse_duration_us

__all__ = ["AUTO_US", "DAYS", "LatenessDay", "lateness_us"]

AUTO_US: Final = -1
"""Stands for "auto" where a lateness is a number of microseconds."""
DAYS: Final = 8
"""So many days are told of, the one that is not over included."""


class LatenessDay(NamedTuple):
    """Of the events that were committed on a day (UTC, counted from 1970-01-01): how many they are, and quantiles of
    commit time minus event time, in microseconds, within 1 %. An event of the future counts as not late at all."""

    day: int
    events: int
    p50_us: int
    p99_us: int
    p999_us: int
    max_us: int

    def described(self) -> tuple[str, dict[str, int]]:
        """As ``describe`` has it: the date, and the rest by name."""
        known = self._asdict()
        return (dt.date(1970, 1, 1) + dt.timedelta(days=known.pop("day"))).isoformat(), known


def lateness_us(value: Any) -> int:
    """A lateness in microseconds, from 0 on; AUTO_US for "auto". Raises InvalidArgument."""
    if is_among(value, ("auto",)):
        return AUTO_US
    if isinstance(value, bool) or not isinstance(value, (str, int, dt.timedelta)):
        raise InvalidArgument(f"lateness is a duration like '5s', or 'auto', not {shown(value)}")
    return parse_duration_us(value, "lateness", 0)
