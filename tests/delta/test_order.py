"""Keys in order and by number, however that is done: as a stable sort of their bytes in plain Python does it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi.delta.derive import run_from_rows
from kivi.delta.order import Window, _coded, _strings, numbered, numbered_keys, sorted_keys
from kivi.delta.runs import DeltaRun
from tests.delta.test_runs import SUMS


def run_of(keys: Sequence[bytes], cts: int = 1) -> DeltaRun:
    return run_from_rows(SUMS, [(key, cts, {}) for key in sorted(keys)])


def check(windows: Sequence[Window]) -> None:
    """``sorted_keys`` and ``numbered_keys`` of the windows are what Python says."""
    keys = [key for run, rows in windows for key in run.keys.to_pylist()[rows.start : rows.stop]]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    found = sorted_keys(windows)
    assert found.order.tolist() == order
    assert found.first.tolist() == [i == 0 or keys[order[i]] != keys[order[i - 1]] for i in range(len(order))]
    assert found.array(found.order).to_pylist() == found.listed(found.order) == [keys[i] for i in order]
    distinct = sorted(set(keys))
    number = {key: i for i, key in enumerate(distinct)}
    group_of, last, named = numbered_keys(windows)
    assert group_of.tolist() == [number[key] for key in keys]
    assert last.tolist() == [max(i for i, other in enumerate(keys) if other == key) for key in distinct]
    assert named.to_pylist() == distinct


def whole(runs: Sequence[DeltaRun]) -> list[Window]:
    return [(run, range(run.rows)) for run in runs]


_TEXTS = st.lists(st.sampled_from([b"a", b"`", b"\0", b"7", b"\xff"]), min_size=3, max_size=3).map(b"".join)


@given(st.data(), st.integers(1, 70))
def test_keys_of_one_width_are_sorted_as_their_bytes_whatever_varies_in_them(data: st.DataObject, width: int) -> None:
    """As integers where that is possible: the order is that of a stable sort of the bytes."""
    places = data.draw(st.lists(st.integers(0, width - 1), max_size=4))
    parts = []
    for cts in range(data.draw(st.integers(1, 4))):
        some = set()
        for _ in range(data.draw(st.integers(1, 6))):
            key = bytearray(b"customer-" * 8)[:width]
            for at in places:
                key[at : at + 3] = data.draw(_TEXTS)[: width - at]
            some.add(bytes(key))
        parts.append(run_of(list(some), cts + 1))
    check(whole(parts))


@pytest.mark.parametrize("width", [8, 9, 13, 16, 59, 128, 131])
def test_each_bit_of_a_key_counts(width: int) -> None:
    base = (b"customer-" * 15)[:width]
    keys = {base}
    for at in (0, width // 2, width - 1):
        keys |= {base[:at] + bytes([base[at] ^ 1 << bit]) + base[at + 1 :] for bit in range(8)}
    ordered = sorted(keys)
    check(whole([run_of(some) for some in (ordered[::2], ordered[1::2], [base])]))


TOP = 2**64 - 1


def words(rng: random.Random, columns: Sequence[Sequence[int]]) -> bytes:
    return b"".join(rng.choice(column).to_bytes(8, "big") for column in columns)


@pytest.mark.parametrize(
    ("columns", "span"),
    [
        ([range(40)], 40),
        ([[9]], 1),
        ([[0, TOP]], 2),
        ([range(5, 50, 5)], 9),
        ([range(6, 600, 6), range(0, 100, 10)], 99 * 10),  # slots are multiples of their length
        ([range(2**63, 2**63 + 30), [2**63 + 7 + i * 300_000_000 for i in range(12)]], 30 * 12),
        ([[7], range(3, 8), [1], [2, 2**40]], 5 * 2),
        ([[0, 1, TOP]], 2**64),
        ([[7], [0, 1, TOP]], 2**64),  # a span that no word holds: nothing is multiplied by it
        ([[7], [8], [0, 1, TOP], [9]], 2**64),
        ([[0, 1, 2**32 - 1], [0, 1, 2**32 - 1]], 2**64),
        ([[0, 1, 2**32 - 1], [0, 1, 2**32]], None),
        ([[2**62 + (1 << 40 - i // 64) for i in range(1_500)] + [0]], None),  # a smaller divisor in each sample
        ([[0] * 500 + [6] * 500 + [10]], 6),  # the first say nothing of how far apart the others are
        ([[i * 2**32 for i in range(70)] + [2**37 + 1]], 69 * 2**32 + 1),
        ([[0, 1, 2**62], [0, 1]], (2**62 + 1) * 2),  # too sparse for a table, and for the number of a row beside it
        ([[0, 1, 2**63], [0, 1]], None),  # of which only few bits vary, at that
        ([[0, 1, TOP], range(8)], None),
        ([range(0, TOP, TOP // 99), range(0, TOP, TOP // 7)], None),  # more than 64 bits
    ],
)
def test_integers_of_every_range(columns: Sequence[Sequence[int]], span: int | None) -> None:
    rng = random.Random(1)
    runs = [run_of(list({words(rng, columns) for _ in range(rng.choice([1, 5, 700]))}), cts) for cts in range(1, 7)]
    every = [b"".join(c[i % len(c)].to_bytes(8, "big") for c in columns) for i in range(200)]
    runs += [run_of(list({*every, *(b"".join(end(c).to_bytes(8, "big") for c in columns) for end in (min, max))}))]
    windows = whole(runs)
    check(windows)
    check(windows[:1])
    check([(run, range(len(rows) // 3, len(rows))) for run, rows in windows if len(rows) > 1] or windows)
    strings = _strings(windows)
    assert strings is not None
    coded = _coded(strings)
    if span is not None:
        assert coded is not None
        assert coded[1] == span
    if coded is not None:  # in the order of the keys, and below what they say
        keys = [key for run in runs for key in run.keys.to_pylist()]
        codes: list[Any] = coded[0].tolist()
        assert max(codes) < coded[1]
        pairs = sorted(zip(keys, codes, strict=True))
        assert all((a[0] < b[0]) == (a[1] < b[1]) for a, b in itertools.pairwise(pairs))


_WORDS = st.one_of(
    st.just([2**63 + 7]),
    st.just([0, 1, TOP]),
    st.lists(st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, TOP - 1, TOP]), min_size=1, max_size=4),
    st.builds(
        lambda low, step, n: [low + i * step for i in range(n)],
        st.integers(0, 99),
        st.integers(1, 2**50),
        st.integers(1, 9),
    ),
    st.lists(st.integers(0, TOP), min_size=1, max_size=4),
)
"""What a word of a key may be: always the same, the ends of its range, multiples, anything."""


@given(st.data(), st.lists(_WORDS, min_size=1, max_size=5))
def test_integers_of_any_range_behind_each_other(data: st.DataObject, columns: list[list[int]]) -> None:
    keys = st.tuples(*(st.sampled_from(column) for column in columns))
    drawn = data.draw(st.lists(st.sets(keys, min_size=1, max_size=12), min_size=1, max_size=4))
    check(whole([run_of([b"".join(part.to_bytes(8, "big") for part in key) for key in some]) for some in drawn]))


def test_keys_of_several_widths() -> None:
    rng = random.Random(2)
    check(whole([run_of(list({rng.randbytes(rng.randrange(4)) for _ in range(50)}), cts) for cts in range(1, 5)]))
    check(whole([run_of([b"%03d" % i for i in range(9)]), run_of([b"%02d" % i for i in range(9)])]))


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("span", [1, 50, 20_000, 2**40, 2**62])
def test_rows_by_their_codes(span: int, merged: bool) -> None:
    """In no order at all, too."""
    codes = np.random.default_rng(3).integers(0, span, 2_000)
    distinct, inverse = np.unique(codes, return_inverse=True)
    group_of, last = numbered(codes, span, merged=merged)
    assert (group_of == inverse).all()
    assert (codes[last] == distinct).all()
    assert (last == [np.flatnonzero(inverse == i)[-1] for i in range(len(distinct))]).all()
    none, of_none = numbered(codes[:0], span, merged=merged)
    assert not len(none) and not len(of_none)
