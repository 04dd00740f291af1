"""When is an invocation an anomaly? The rule, and nothing else: no store, no clock, no I/O.

    An invocation is an anomaly if it was slower than twice the average of its endpoint in the previous slot.

Slots have a fixed width and are aligned to the epoch, as ``kivi.time_slot`` aligns them. With slots of five minutes,
an invocation at 17:55:03 belongs to [17:55, 18:00) and is measured against [17:50, 17:55): if endpoint 251 took 10 and
20 ms then, its average is 15 ms, and 121 ms is an anomaly, as everything above 30 ms would be. An endpoint that was
not called in the previous slot has no average, and then nothing is an anomaly.

The rule is about the slots' width as much as about the factor: the demonstration runs it with short slots, because it
lasts seconds, and the test of the example above runs it with five minutes. The width is an argument.

Response times are whole microseconds, so there is an exact whole number that separates: with a sum ``s`` of ``n``
invocations, ``t > 2 * s / n`` holds for a whole ``t`` exactly if ``t > floor(2 * s / n)``. ``limit_us`` is that number.
It is what a join in Spark compares with; no float is involved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

__all__ = ["FACTOR", "Totals", "is_anomaly", "limit_us", "previous_slot_us", "slot_us"]

FACTOR: Final = 2


class Totals(NamedTuple):
    """What an aggregate row says of one endpoint in one slot."""

    sum_us: int
    invocations: int


def slot_us(ts_us: int, width_us: int) -> int:
    """The start of the slot that a moment falls in; both in microseconds since the epoch."""
    return ts_us - ts_us % width_us


def previous_slot_us(ts_us: int, width_us: int) -> int:
    """The start of the slot before."""
    return slot_us(ts_us, width_us) - width_us


def limit_us(previous: Totals | None) -> int | None:
    """The slowest response that is not an anomaly after a slot with these totals; None: nothing is one."""
    if previous is None or previous.invocations == 0:
        return None
    return FACTOR * previous.sum_us // previous.invocations


def is_anomaly(
    endpoint_id: int,
    ts_us: int,
    resp_time_us: int,
    width_us: int,
    totals: Callable[[int, int], Totals | None],
) -> bool:
    """The rule for one invocation; ``totals(endpoint_id, slot_us)`` is asked for the previous slot only."""
    limit = limit_us(totals(endpoint_id, previous_slot_us(ts_us, width_us)))
    return limit is not None and resp_time_us > limit
