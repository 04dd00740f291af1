"""The rule by itself: the paper's example, its edges, and the exactness of the limit."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apm_demo.rule import Totals, is_anomaly, limit_us, previous_slot_us, slot_us

FIVE_MINUTES = 300_000_000


def us(hour: int, minute: int, second: int = 0) -> int:
    moment = dt.datetime(2024, 3, 1, hour, minute, second, tzinfo=dt.UTC)
    return int(moment.timestamp()) * 1_000_000


def totals(rows: dict[tuple[int, int], tuple[int, int]]):
    def of(endpoint_id: int, slot: int) -> Totals | None:
        found = rows.get((endpoint_id, slot))
        return None if found is None else Totals(*found)

    return of


def test_the_papers_example() -> None:
    """Endpoint 251: 10 and 20 ms in [17:50, 17:55), then 121 ms at 17:55:03; its average is 15 ms, and 121 > 30."""
    known = totals({(251, us(17, 50)): (10_000 + 20_000, 2)})
    assert is_anomaly(251, us(17, 55, 3), 121_000, FIVE_MINUTES, known)


@pytest.mark.parametrize(
    ("endpoint_id", "ts", "resp_time_us", "expected"),
    [
        (251, us(17, 55, 3), 30_000, False),  # exactly twice is not slower than twice
        (251, us(17, 55, 3), 30_001, True),
        (251, us(17, 59, 59), 30_001, True),  # the end of the same slot
        (251, us(17, 54, 59), 121_000, False),  # in [17:50, 17:55) itself: nothing is known of the slot before
        (251, us(18, 0), 121_000, False),  # one slot later: the slot before had no invocations
        (252, us(17, 55, 3), 121_000, False),  # another endpoint
    ],
)
def test_the_edges_of_the_rule(endpoint_id: int, ts: int, resp_time_us: int, expected: bool) -> None:
    known = totals({(251, us(17, 50)): (30_000, 2)})
    assert is_anomaly(endpoint_id, ts, resp_time_us, FIVE_MINUTES, known) is expected


def test_the_width_of_the_slots_is_an_argument() -> None:
    known = totals({(251, us(17, 54)): (30_000, 2)})
    assert is_anomaly(251, us(17, 55, 3), 121_000, 60_000_000, known)
    assert not is_anomaly(251, us(17, 55, 3), 121_000, FIVE_MINUTES, known)


def test_nothing_is_known() -> None:
    assert limit_us(None) is None
    assert limit_us(Totals(0, 0)) is None


@given(st.integers(0, 10**15), st.integers(1, 10**9), st.integers(0, 10**16))
def test_the_limit_separates_exactly(total: int, count: int, resp_time_us: int) -> None:
    """In whole numbers ``t > limit`` and ``t > 2 * average`` are the same, with no float between them."""
    limit = limit_us(Totals(total, count))
    assert limit is not None
    assert (resp_time_us > limit) == (resp_time_us * count > 2 * total)


@given(st.integers(0, 2**50), st.sampled_from([1, 5_000_000, FIVE_MINUTES, 3_600_000_000]))
def test_slots_tile_time(ts: int, width: int) -> None:
    assert slot_us(ts, width) <= ts < slot_us(ts, width) + width
    assert slot_us(ts, width) % width == 0
    assert previous_slot_us(ts, width) + width == slot_us(ts, width)
