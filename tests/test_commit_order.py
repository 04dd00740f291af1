"""Sorted by event time, given in commit order: against sorting everything, whatever may wait in memory; and which files
are combined, over simulated streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kivi.encoding.event_names import POSITION, STAMP, EventNames
from kivi.events.combining import DEPTH_MAX, combinable, portions
from kivi.events.commit_order import Source, in_commit_order

Name = tuple[int, int]


def source(events: list[Name], reads: list[int]) -> Source:
    def read() -> Any:
        reads.append(len(events))
        stamps = pa.array([cts for cts, _ in events], pa.uint64())
        positions = pa.array([position for _, position in events], pa.int64())
        texts = pa.array([f"{cts}/{position}" for cts, position in events], pa.string())
        texts = texts.dictionary_encode() if events[0][0] % 3 else texts  # as files have it: in codes, or not
        return pa.RecordBatch.from_arrays([texts, stamps, positions], ["text", STAMP, POSITION])

    stamps = [cts for cts, _ in events]
    return Source(min(stamps), max(stamps), max(position for _, position in events), read)


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=20), max_size=8),
    st.integers(0, 32),
    st.integers(0, 32),
    st.booleans(),
    st.sampled_from([1, 200, 1_000, 1 << 20]),
    st.sampled_from([0, 2**40, 2**62]),
)
@example([[(1, 0)], [(1, 1)], [(1, 2)]], 1, 1, False, 1, 0)
def test_the_order_is_that_of_the_names(
    groups: list[list[Name]], first: int, last: int, reverse: bool, budget: int, base: int
) -> None:
    seen = set[Name]()
    distinct = list[list[Name]]()
    for group in groups:
        distinct.append([(base + cts, at) for cts, at in {*group} - seen])
        seen |= {*group}
    every = sorted(((base + cts, at) for cts, at in seen), reverse=reverse)
    reads = list[int]()
    given_ = in_commit_order(
        [source(group, reads) for group in distinct if group], ["text", STAMP, POSITION],
        first_cts=base + first, last_cts=base + last, reverse=reverse, budget=budget,
    )  # fmt: skip
    found = [tuple(row.values()) for batch in given_ for row in batch.to_pylist()]
    assert found == [(f"{cts}/{at}", cts, at) for cts, at in every if base + first <= cts <= base + last]


def test_what_comes_in_order_is_read_once_and_what_lies_across_is_let_go_of() -> None:
    in_order, across = list[int](), list[int]()
    sources = [source([(cts, 0) for cts in range(at, at + 100)], in_order) for at in range(0, 2_000, 100)]
    assert (
        sum(batch.num_rows for batch in in_commit_order(sources, [STAMP], first_cts=0, last_cts=9_999, budget=4_000))
        == 2_000
    )
    assert len(in_order) == 20
    sources = [source([(cts, 0) for cts in range(at, 2_000, 20)], across) for at in range(20)]
    batches = list(in_commit_order(sources, [STAMP], first_cts=0, last_cts=9_999, budget=4_000))
    stamps = np.concatenate([batch.column(STAMP).to_numpy() for batch in batches])
    assert stamps.tolist() == list(range(2_000))
    assert 20 < len(across) < 20 * 64
    assert max(batch.nbytes for batch in batches) < 16_000


@given(
    st.sets(st.tuples(st.integers(1, 9), st.integers(0, 5))),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), unique=True),
)
def test_events_in_any_order_are_found_by_name(named: set[Name], events: list[Name]) -> None:
    names = EventNames(
        np.array([cts for cts, _ in sorted(named)], np.uint64), np.array([at for _, at in sorted(named)], np.int64)
    )
    stamps, positions = (np.array([name[i] for name in events], (np.uint64, np.int64)[i]) for i in (0, 1))
    assert names.rows_among(stamps, positions).tolist() == [i for i, name in enumerate(events) if name in named]


# -- which files are combined ---------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    times: Any = field(hash=False, compare=False)

    @property
    def rows(self) -> int:
        return len(self.times)

    @property
    def time_min(self) -> int:
        return int(self.times[0])

    @property
    def time_max(self) -> int:
        return int(self.times[-1])


def depth(files: list[File], moment: int) -> int:
    return sum(file.time_min <= moment <= file.time_max for file in files)


def stream(
    late: float, lag: Any, *, rows: int = 1_000, runs: int = 40, span_s: int = 3_000
) -> tuple[list[File], float]:
    """The files that are left, and how many times an event was written."""
    rng, files, written = np.random.default_rng(3), list[File](), 0
    for run in range(runs):
        times = (run + rng.random(rows)) * 3_000
        times = np.sort(np.where(rng.random(rows) < late, times - lag(rng, run, rows), times)).astype(np.int64)
        made = [File(times[start:stop]) for start, stop in portions(times, rows)]
        while True:
            written += sum(file.rows for file in made)
            files += made
            if not (inputs := combinable(files, rows)):
                break
            files = [file for file in files if not any(file is one for one in inputs)]
            times = np.sort(np.concatenate([file.times for file in inputs]))
            made = [File(times[start:stop]) for start, stop in portions(times, rows)]
    assert sum(file.rows for file in files) == rows * runs
    return files, written / rows / runs


LAGS = {
    "exponential, 6 h": lambda rng, run, rows: rng.exponential(6 * 3600, rows),
    "uniform, a day": lambda rng, run, rows: rng.random(rows) * 86_400,
    "months": lambda rng, run, rows: rng.random(rows) * 86_400 * 90,
}


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("late", [0.0, 0.0001, 0.05, 0.15, 0.5])
def test_an_event_is_written_at_most_three_times_and_few_files_have_a_moment(late: float, lag: str) -> None:
    files, written = stream(late, LAGS[lag])
    assert written <= 3.0
    for file in files:
        assert depth(files, file.time_min) <= DEPTH_MAX


def test_a_clock_that_runs_ahead_widens_no_other_file() -> None:
    files, written = stream(0.001, lambda rng, run, rows: np.full(rows, -86_400.0 * 365))
    assert written < 1.2
    assert sum(file.rows for file in files if file.time_max - file.time_min > 86_400) < 1_000


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=60), st.integers(1, 20))
def test_combining_comes_to_an_end(parts: list[list[int]], file_rows: int) -> None:
    """Many events of one moment, most of all, which no cut of time separates."""
    files = [File(np.sort(np.array(part))) for part in parts]
    for _ in range(1_000):
        if not (inputs := combinable(files, file_rows)):
            return
        files = [file for file in files if not any(file is one for one in inputs)]
        times = np.sort(np.concatenate([file.times for file in inputs]))
        files += [File(times[start:stop]) for start, stop in portions(times, file_rows)]
    raise AssertionError("it goes on and on")
