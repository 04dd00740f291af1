"""Which events an aggregate cannot have: those that fail when they are tried one after the other, each beside those
before it that did not, as an append of these and of it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kivi
from kivi.arrow.records import event_batch
from kivi.delta.derive import Derivation
from kivi.errors import KiviError
from kivi.store.late_deltas import beyond, each_in_time, few_in_time

WITH_FLOATS: dict[str, dict[str, Any]] = {
    "a": {"group_by": ["k"], "measures": {"s": kivi.sum("x"), "n": kivi.count()}},
    "b": {"group_by": [kivi.time_slot("ts", "1d")], "measures": {"mean": kivi.avg("x"), "most": kivi.max("x")}},
    "c": {"group_by": ["y"], "measures": {"s": kivi.sum(kivi.col("x") * kivi.col("y"), where=kivi.col("k") > 0)}},
    "d": {
        "group_by": ["k", kivi.time_slot("ts", "10s")],
        "measures": {"s": kivi.sum("y"), "spread": kivi.stddev("x")},
        "retention": "1h",
    },
}
FLOATS = st.sampled_from([None, 0.0, 1.0, -1.0, 4e307, -4e307, 1e308, -1e308, 1.7e308, 1.7976931348623157e308])
EVENTS = st.lists(
    st.fixed_dictionaries(
        {"ts": st.integers(0, 3).map(lambda i: i * 10_000_000), "k": st.integers(0, 2), "x": FLOATS,
         "y": st.sampled_from([None, 1.0, 2.0, -1.0, 1e308])}
    ),
    max_size=30,
)  # fmt: skip


@pytest.fixture(scope="module")
def tables() -> Any:
    with kivi.open(background=False) as db:
        columns = {"ts": "timestamp", "k": "int64", "x": "float64", "y": "float64"}
        db.create_event_table("e", event_time="ts", columns=columns)
        for name, declared in WITH_FLOATS.items():
            db.create_aggregate(name, source="e", **declared)
        yield [db.store.table(name) for name in ("e", *WITH_FLOATS)]


def tried(aggregates: Any, floors: Any, source: Any, events: list[dict[str, Any]], given: int) -> list[bool]:
    """One after the other, through the road that has no columns."""
    out, good = [False] * len(events), events[:given]
    for i in range(given, len(events)):
        try:
            few_in_time(aggregates, floors, event_batch(source, [*good, events[i]]))
        except KiviError:
            out[i] = True
        else:
            good.append(events[i])
    return out


@given(EVENTS, st.integers(0, 3), st.sets(st.sampled_from(range(4)), min_size=1), st.booleans())
def test_r25_those_fail_that_cannot_stand_beside_those_before_them(
    tables: Any, events: list[dict[str, Any]], given: int, chosen: set[int], is_late: bool
) -> None:
    source, *declared = tables
    aggregates = [declared[i] for i in sorted(chosen)]
    floors = {tables[-1].id: 20_000_000} if is_late else {}
    fails = tried(aggregates, floors, source, events, 0)
    given = min(given, fails.index(True) if any(fails) else len(events))
    derivation = Derivation(event_batch(source, events))
    assert beyond(aggregates, floors, derivation, given).tolist() == tried(aggregates, floors, source, events, given)


@given(EVENTS, st.integers(1, 4))
def test_events_of_several_commits_are_together_with_those_of_their_own(
    tables: Any, events: list[dict[str, Any]], size: int
) -> None:
    source, *aggregates = tables
    commits = np.arange(len(events)) // size
    derivation = Derivation(event_batch(source, events), commits=commits)
    out = beyond(aggregates, {}, derivation)
    of_each = [tried(aggregates, {}, source, events[at : at + size], 0) for at in range(0, len(events), size)]
    assert out.tolist() == [one for each in of_each for one in each]
    each_in_time(aggregates, {}, derivation.taken(np.flatnonzero(~out)))  # whom nothing is too much
