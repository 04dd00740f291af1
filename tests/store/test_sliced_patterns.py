"""Patterns over more events than may be held are matched slice by slice, and the answer is the same, row by row."""

from __future__ import annotations

import random

import pytest

import kivi
from kivi import col
from kivi.errors import ResourceExhausted
from tests.golden.driver import EmbeddedDriver
from tests.naive_patterns import COLUMNS, Case, event

S = 1_000_000
T0 = 1_774_000_000 * S
ROWS = 600


def driver_with_events(rng: random.Random) -> EmbeddedDriver:
    """Events in settled files, in blocks and in memory, with gaps between some of them."""
    driver = EmbeddedDriver(None, block_rows=64)
    driver.db.create_event_table("calls", event_time="ts", columns=COLUMNS)
    for part in range(3):
        moments = [T0 + rng.randrange(ROWS) * S + 200 * S * rng.randrange(2) for _ in range(ROWS // 3)]
        driver.db.append("calls", [event(rng, moment) for moment in moments])
        if part < 2:
            driver.db.consolidate()
        if part == 0:
            driver.store.settle(64)
    return driver


@pytest.mark.parametrize("seed", range(2))
def test_slices_are_the_whole(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kivi.store.patterns._ROWS_MIN", 0 if seed else 2**62)
    monkeypatch.setattr("kivi.store.patterns._CANDIDATES_MAX", 0.7)
    rng = random.Random(seed)
    driver, sliced, matches = driver_with_events(rng), 0, 0
    whole = driver.store.questions.bytes_max
    with driver.db.snapshot() as snap:
        for _ in range(40):
            pattern = Case(rng, [1, 3 * S, 10 * S]).pattern
            bounds = rng.choice([(None, None), (T0 + 100 * S, T0 + 300 * S), (T0 + 50 * S, None)])
            where = rng.choice([None, col("host") == 1])
            expected = list(snap.match("calls", pattern, *bounds, where=where))
            driver.store.questions.bytes_max = rng.choice([5_000, 10_000])
            try:
                result = snap.match("calls", pattern, *bounds, where=where)
                assert list(result) == expected, (str(pattern), result.explain())
                sliced += "slices of time" in result.explain()
                matches += len(expected)
                assert list(snap.match("calls", pattern, *bounds, where=where, limit=3)) == expected[:3]
            except ResourceExhausted:  # it looks at rows that may be anywhere, or one slice depends on all before it
                pass
            finally:
                driver.store.questions.bytes_max = whole
    assert sliced >= 6
    assert matches > 300
    driver.close()


def test_what_cannot_be_sliced_is_refused() -> None:
    """Without a within, or with one as long as all of it."""
    driver = driver_with_events(random.Random(5))
    driver.store.questions.bytes_max = 2_000
    measures = {"n": kivi.count()}
    with driver.db.snapshot() as snap:
        for within in (None, 10**4 * S):
            with pytest.raises(ResourceExhausted, match="shorter"):
                list(snap.match("calls", kivi.pattern("A B", within=within, measures=measures)))
    driver.close()
