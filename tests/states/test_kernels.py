"""The kernels of states against plain Python: integers as bytes, and reducing states of which some are busy."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi.errors import DataLoss
from kivi.model import varints
from kivi.model.states import State
from kivi.model.types import ColumnType
from kivi.states.distinct import DistinctKind
from kivi.states.kinds import offsets_of
from kivi.states.quantiles import counted

UNSIGNED = st.integers(0, 63).flatmap(lambda bits: st.integers(0, 2 ** (bits + 1) - 1))


@given(st.lists(st.lists(UNSIGNED, max_size=6), max_size=6))
def test_integers_as_bytes_are_those_of_the_definition(sequences: list[list[int]]) -> None:
    values = np.array([value for each in sequences for value in each], np.uint64)
    offsets = offsets_of(np.array([len(each) for each in sequences], np.int64))
    encoded = varints.encode(values, offsets)
    assert encoded == [varints.encode_one(each) for each in sequences]
    decoded, where = varints.decode(encoded)
    assert decoded.tolist() == values.tolist()
    assert where.tolist() == offsets.tolist()


@pytest.mark.parametrize("damaged", [[b"\x05", b"\x85"], [b"\x80" * 10 + b"\x01"]])
def test_bytes_that_are_no_integers_are_damage(damaged: list[bytes]) -> None:
    with pytest.raises(DataLoss):
        varints.decode(damaged)


@pytest.mark.parametrize("busy", [0, 1, 3, 5])
@pytest.mark.parametrize("with_counts", [False, True])
def test_states_are_counted_the_same_in_a_table_and_sorted(busy: int, with_counts: bool) -> None:
    random = np.random.default_rng(busy)
    lengths = [4_000 if i % 5 < busy else int(random.integers(0, 4)) for i in range(20)]
    lengths[7] = 0
    rows = random.permutation(np.repeat(np.arange(20), lengths))
    codes = random.integers(-3_000, 3_000, len(rows)).astype(np.int32)
    counts = random.integers(-2, 3, len(rows)) if with_counts else None
    expected: Counter[tuple[int, int]] = Counter()
    for row, code, count in zip(rows, codes, np.ones(len(rows), int) if counts is None else counts, strict=True):
        expected[int(row), int(code)] += int(count)
    found, sums, offsets = counted(codes, counts, rows, 20)
    in_rows = np.repeat(np.arange(20), np.diff(offsets)).tolist()
    got = list(zip(zip(in_rows, found.tolist(), strict=True), sums.tolist(), strict=True))
    assert got == sorted((key, count) for key, count in expected.items() if count)


@pytest.mark.parametrize("busy", [0, 1, 5])
def test_registers_are_the_same_in_a_table_and_sorted(busy: int) -> None:
    kind = DistinctKind(State(5, "distinct", ColumnType("int64"), None, 10))
    random = np.random.default_rng(busy)
    lengths = np.array([700 if i % 5 < busy else int(random.integers(0, 4)) for i in range(20)])
    registers = random.integers(0, 2**10, int(lengths.sum()))
    ranks = random.integers(1, 56, len(registers))
    rows = np.repeat(np.arange(20), lengths).tolist()
    expected: dict[tuple[int, int], int] = {}
    for key, rank in zip(zip(rows, registers.tolist(), strict=True), ranks.tolist(), strict=True):
        expected[key] = max(rank, expected.get(key, 0))
    (items,), offsets = kind.reduce(((registers * 64 + ranks).astype(np.int32),), offsets_of(lengths))
    in_rows = np.repeat(np.arange(20), np.diff(offsets)).tolist()
    assert list(zip(in_rows, items.tolist(), strict=True)) == [
        (row, register * 64 + rank) for (row, register), rank in sorted(expected.items())
    ]
