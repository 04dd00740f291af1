"""Matches equal the naive matcher over the events that a snapshot sees (R24, R26), wherever these lie.

Events come in disorder, with equal times, by batches and each as a commit, and are in pending, in blocks, in settled
files, some retracted. Histories differ by seed: how many partitions there are, how rare the rarest symbol is, how many
rows lie within ``within``, how much of it goes in columns, and whether what is far from candidates is left out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kivi
from kivi import col
from kivi.patterns.candidates import FAR_US, Candidates, Near
from tests.golden.driver import EmbeddedDriver
from tests.naive_patterns import COLUMNS, Case, Stream, event
from tests.seeds import seeds

S = 1_000_000
T0 = 1_774_000_000 * S


def check(snap: Any, rng: random.Random, within: Sequence[int | None]) -> int:
    """One pattern at random, over all events or some; how many matches it has."""
    case = Case(rng, within)
    low, high = sorted(rng.sample(range(200), 2))
    start, end = rng.choice([None, T0 + low * S]), rng.choice([None, T0 + high * S])
    where, selects = rng.choice([(None, lambda row: True), (col("host") == 1, lambda row: row["host"] == 1)])
    result = snap.match("calls", case.pattern, start, end, where)
    rows = [row for row in snap.scan("calls", start=start, end=end) if selects(row)]
    answer = case.answer(rows)
    assert list(result) == answer, (str(case.pattern), result.explain())
    return len(answer)


@pytest.mark.parametrize("seed", range(6))
def test_matches_equal_the_naive_matcher_r26(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert matched(seed, monkeypatch) > 100


@pytest.mark.story
@pytest.mark.hypothesis
@pytest.mark.parametrize("seed", seeds(6, night=206))
def test_matches_of_more_streams_r26(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    matched(seed, monkeypatch)


def matched(seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """A history, with what is far from candidates left out, and every third seed without; how many matches it had."""
    rng = random.Random(seed)
    monkeypatch.setattr("kivi.store.patterns._ROWS_MIN", 0 if seed % 3 else 2**62)
    monkeypatch.setattr("kivi.store.patterns._CANDIDATES_MAX", 0.7)
    monkeypatch.setattr("kivi.store.patterns._SPARE", [0, 1, 16][seed // 3 % 3])
    monkeypatch.setattr("kivi.patterns.candidates._WIDER", 2 + seed % 5)
    monkeypatch.setattr("kivi.patterns.automaton._TOGETHER_STEPS", rng.choice([1, 3, 64]))
    stream, unit = Stream.of(rng), rng.choice([S, S // 7])  # many rows are within a match, or few
    within: list[int | None] = [1, 3 * unit - 1, 3 * unit, 3 * unit + 1, 10 * S, None]
    driver = EmbeddedDriver(None, block_rows=64)
    db = driver.db
    db.create_event_table("calls", event_time="ts", columns=COLUMNS)
    steps: list[Callable[[], Any]] = [db.consolidate, lambda: driver.store.settle(64), lambda: None]
    found = 0
    for i in range(4):
        span = rng.choice([1, 60, 120])  # a batch of late events goes back so far
        moments = [T0 + (30 * i + rng.randrange(60 - span, 60)) * unit for _ in range(rng.choice([1, 15, 40]))]
        events = [stream.event(rng, moment) for moment in moments]
        if rng.random() < 0.3:
            with db.appender("calls", each=True) as appender:
                for one in events:
                    appender.append(**one)
        else:
            db.append("calls", events)
        old = db.snapshot()
        if i == 2:
            with db.transaction() as tx:
                tx.retract("calls", where=col("x") == rng.randrange(5), start=T0 + 40 * unit)
        rng.choice(steps)()
        for snap in (old, db.snapshot()):
            found += sum(check(snap, rng, within) for _ in range(20))
    driver.close()
    return found


def test_reading_over_and_over_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that fail late, each from its own beginning, and matches that overlap."""
    monkeypatch.setattr("kivi.patterns.matching.READ_MAX", 100_000)
    monkeypatch.setattr("kivi.patterns.matching.ROWS_MAX", 20_000)
    count = {"n": kivi.count()}
    late = {"B": col("x") == 3, "C": (col("x") == 3) & (col("f") < 1)}
    with kivi.open() as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        db.append("calls", [{"host": 1, "ts": T0 + i, "x": i % 5, "f": 0.0} for i in range(1_000)])
        with db.snapshot() as snap:
            for text, define, skip in (("A+ B C", late, "past_last_row"), ("A+", {}, "to_next_row")):
                with pytest.raises(kivi.ResourceExhausted, match="shorter.* within"):
                    list(snap.match("calls", kivi.pattern(text, define=define, measures=count, skip=skip)))
                bounded = kivi.pattern(text, define=define, measures=count, skip=skip, within=15)
                assert len(snap.match("calls", bounded)) == (0 if define else 1_000)


def test_what_is_far_from_candidates_is_not_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    """By time and by partition, where definitions look no further than the match, or at few rows; else by partition."""
    monkeypatch.setattr("kivi.store.patterns._ROWS_MIN", 0)
    driver = EmbeddedDriver(None, block_rows=64)
    driver.db.create_event_table("calls", event_time="ts", columns=COLUMNS)
    rng = random.Random(5)
    rows = [{**event(rng, T0 + i * S), "host": i % 10, "x": 9 if i == 501 else i % 5} for i in range(1_000)]
    rows[501] |= {"app": "far away"}
    driver.db.append("calls", rows)
    driver.db.consolidate()
    driver.store.settle(64)
    rare = col("x") == 9
    asked: list[tuple[str, dict[str, Any], dict[str, Any], int, str]] = [
        ("A B C", {"B": rare}, {"partition_by": ["host"], "within": 30 * S}, 7, "candidates of B: 1"),
        ("A B C", {"B": col("app").startswith("far")}, {"partition_by": ["host"], "within": 30 * S}, 7, "of B: 1"),
        ("A B C", {"B": col("app").matches("^far")}, {"partition_by": ["host"], "within": 30 * S}, 7, "of B: 1"),
        (
            "A B C",
            {"B": col("x") - kivi.prev("x") > 4},
            {"partition_by": ["host"], "within": 30 * S},
            7,
            "candidates of B: 1",
        ),
        ("A B C", {"B": kivi.prev("x") <= col("x") - 8}, {"within": 5 * S}, 11, "candidates of B: 1"),
        ("A B", {"B": kivi.prev("x") - col("x") > 9}, {"within": 5 * S}, 0, "candidates of B: 0"),
        ("A B C", {"B": rare & (col("f") < 9)}, {"within": 5 * S}, 11, "candidates of B: 1"),
        (
            "A B",
            {"A": kivi.prev("x") == 1, "B": rare},
            {"partition_by": ["host"], "within": 1},
            7,
            "candidates of B: 1",
        ),
        ("A B", {"B": rare}, {"partition_by": ["host"]}, 3, "candidates of B: 1"),
        ("A+ B", {"B": rare}, {"partition_by": ["host"]}, 100, "their partitions"),
        ("A (B | C)", {"B": rare, "C": col("x") == 8}, {"partition_by": ["host"], "within": 1}, 1, "of B | C: 1"),
        ("A (B | C)", {"B": rare}, {"within": 1}, 1_000, "everything was read"),
        ("A B?", {"B": rare}, {"within": 1}, 1_000, "everything was read"),
        ("A B", {"A": col("x") < 9, "B": col("x") >= 0}, {"within": 1}, 1_000, "so everything was read"),
        ("A", {"A": col("x") == 77}, {"within": 1}, 0, "candidates of A: 0"),
    ]
    with driver.db.snapshot() as snap:
        for text, define, more, matched, says in asked:
            pattern = kivi.pattern(text, define=define, measures={"n": kivi.count()}, **more)
            told = snap.match("calls", pattern).explain()
            assert f"of which {matched:,} were matched" in told, told
            assert says in told, told
    driver.close()


@pytest.mark.parametrize("column", ["x", "f", "price"])
@pytest.mark.parametrize("settled", [False, True])
def test_a_delta_is_looked_for_where_values_differ_so_much(
    column: str, settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a value that grows, nearly each is so much more than the least one that there ever was."""
    monkeypatch.setattr("kivi.store.patterns._ROWS_MIN", 0)
    for module in ("settled_files", "file_writing"):
        monkeypatch.setattr(f"kivi.events.{module}.GROUP_ROWS", 64)
    driver, jump = EmbeddedDriver(None, block_rows=64), 110 * 64  # the row before it is in the block before
    driver.db.create_event_table("calls", event_time="ts", columns=COLUMNS)
    rows = [{"host": i % 3, "ts": T0 + i * S, column: i + 1_000 * (i >= jump)} for i in range(10_000)]
    driver.db.append("calls", rows)
    driver.db.consolidate()
    if settled:
        driver.store.settle(10_000)
    jumps = kivi.pattern("A B C", partition_by=["host"], within=6 * S, measures={"to": kivi.last(f"B.{column}")},
                         define={"B": col(column) - kivi.prev(column) >= 900})  # fmt: skip
    with driver.db.snapshot() as snap:
        found = snap.match("calls", jumps)
        assert sorted(row["to"] for row in found) == [jump + i + 1_000 for i in range(3)]
        told = found.explain()
        read = re.search(r"candidates of B: [\d,]+, found in ([\d,]+) of 10,000 events", told)
        assert read is not None, told
        assert int(read[1].replace(",", "")) <= 3 * 64, told
    driver.close()


VALUES = {
    "x": st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1),
    "f": st.floats(-4, 4) | st.sampled_from([0.1, 0.3, 1 / 3, 2.0**53, 1e16]) | st.floats(-1e308, 1e308),
    "price": st.integers(-(10**9) + 1, 10**9 - 1).map(lambda cents: Decimal(cents).scaleb(-2)),
}
EVENTS = st.lists(st.fixed_dictionaries({name: st.none() | of for name, of in VALUES.items()}), min_size=3, max_size=9)


@pytest.mark.story
@given(st.randoms(use_true_random=False), EVENTS)
def test_deltas_have_all_the_candidates_that_they_need_r26(rng: random.Random, values: list[dict[str, Any]]) -> None:
    """Sums and differences of columns, of rows beside and of literals, as floats round them."""
    known = {name: [row[name] for row in values if row[name] is not None] or [1] for name in VALUES}

    def value(name: str, depth: int) -> Any:
        if depth and rng.random() < 0.6:
            left, right = value(name, depth - 1), value(name, depth - 1)
            return rng.choice([left + right, left - right, -left])
        own = [col(name), kivi.prev(name), kivi.next(name)]
        return rng.choice([*own, kivi.col(name) - kivi.prev(name), kivi.prev(name) + rng.choice(known[name])])

    def delta() -> Any:
        name = rng.choice([*VALUES])
        left, right = value(name, rng.randrange(3)), rng.choice([value(name, 1), rng.choice(known[name])])
        return rng.choice([left > right, left >= right, left < right, left <= right, left == right])

    driver = EmbeddedDriver(None, block_rows=2)
    driver.db.create_event_table("calls", event_time="ts", columns=COLUMNS)
    driver.db.append("calls", [{"ts": T0 + i, **row} for i, row in enumerate(values)])
    if rng.random() < 0.7:
        driver.db.consolidate()
    with driver.db.snapshot() as snap:
        for _ in range(12):
            asked = kivi.pattern("A B C", within=rng.choice([2, 5, 50]), define={"B": delta()}, skip="to_next_row",
                                 measures={"at": kivi.first("ts")})  # fmt: skip
            answers = []
            for least in (0, 2**62):
                with patch("kivi.store.patterns._ROWS_MIN", least), patch("kivi.store.patterns._CANDIDATES_MAX", 2):
                    answers.append(list(snap.match("calls", asked)))
            assert answers[0] == answers[1], str(asked)
    driver.close()


@given(
    st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 5)), max_size=12),
    st.lists(st.tuples(st.integers(-60, 60), st.integers(0, 7)), max_size=40),
    st.one_of(st.none(), st.integers(0, 30)),
    st.sampled_from(["none", "plain", "coded"]),
)
def test_what_is_near_candidates_is_what_lies_within_reach_of_one(
    of: list[tuple[int, int]], rows: list[tuple[int, int]], reach: int | None, column: str
) -> None:
    times, values = (np.array([each[i] for each in of], np.int64) for i in (0, 1))
    candidates = Candidates.at(times, None if column == "none" else pa.array(values))
    near = Near.to(candidates, np.full(candidates.places, FAR_US if reach is None else reach))
    given_values = pa.array([value for _, value in rows], pa.int64())
    asked = {"none": None, "plain": given_values, "coded": given_values.dictionary_encode()}[column]
    found = near.rows(np.array([at for at, _ in rows], np.int64), asked)
    assert found.tolist() == [
        i
        for i, (at, value) in enumerate(rows)
        if any((column == "none" or value == v) and (reach is None or abs(at - t) <= reach) for t, v in of)
    ]


@given(st.integers(0, 2**32), st.lists(st.integers(0, 12), min_size=1, max_size=12))
def test_small_patterns_equal_the_naive_matcher_r26(seed: int, moments: list[int]) -> None:
    rng = random.Random(seed)
    with kivi.open() as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        db.append("calls", [event(rng, T0 + moment) for moment in moments])
        with db.snapshot() as snap:
            rows = list(snap.scan("calls"))
            for _ in range(5):
                case = Case(rng, [None, 1, 3, 7])
                assert list(snap.match("calls", case.pattern)) == case.answer(rows), str(case.pattern)
