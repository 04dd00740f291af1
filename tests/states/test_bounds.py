"""R20: what each measure promises, against brute force on hard data: skewed, constant, negative, nulls only, tied."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import kivi
from kivi.arrow.columns import arrow_type
from kivi.model.measuring import measured
from kivi.model.quantiles import Quantiles, accuracy_of, codes_of, rank_of, scale_of, value_of
from kivi.model.schema import Column, OperatorCall, TableSchema
from kivi.model.types import ColumnType
from kivi.states.hashing import hashed
from kivi.states.kinds import Observed, offsets_of
from kivi.states.registry import kind_of

QS = (0, 0.5, 0.9, 0.99, 0.999, 1)


def column_of(call: OperatorCall, type_: str) -> Column:
    columns = (Column("x", ColumnType.parse(type_)), Column("y", ColumnType("int64")))
    source = TableSchema("events", "event", (), columns, event_time="ts")
    return measured(source, {"m": call}, checked=False)[0][0]


def states(
    call: OperatorCall, type_: str, groups: list[Any], parts: int = 1, **seen: Any
) -> tuple[Column, list[bytes]]:
    """The state of each group of stored values, each combined of so many parts."""
    column = column_of(call, type_)
    assert column.state is not None
    kind = kind_of(column.state)
    out = []
    for values in groups:
        whole = pa.array(values, arrow_type(column.state.value)) if isinstance(values, list) else values
        made = []
        for i, index in enumerate(np.array_split(np.arange(len(values)), parts)):
            chosen = whole.take(pa.array(index)) if isinstance(values, list) else whole[index]
            items = kind.of_events(Observed(chosen, **{name: array[index] for name, array in seen.items()}))
            made.append((i + 1, kind.encode(*kind.reduce(items, np.array([0, len(index)])))[0]))
        out.append(kind.combined(made) if any(state for _, state in made) else b"")
    return column, out


# -- quantiles ----------------------------------------------------------------------------------------------

CHANCE = np.random.default_rng(7)
SHAPES: dict[str, Callable[[int], Any]] = {
    "log-normal": lambda n: CHANCE.lognormal(11, 1, n),
    "very skewed": lambda n: CHANCE.lognormal(0, 40, n),
    "pareto": lambda n: CHANCE.pareto(0.5, n) * 1e-9,
    "constant": lambda n: np.full(n, 123_456.0),
    "zeros": np.zeros,
    "negative": lambda n: -CHANCE.lognormal(3, 2, n),
    "around zero": lambda n: CHANCE.normal(0, 1, n) * 10.0 ** CHANCE.integers(-300, 300, n),
    "two values": lambda n: CHANCE.choice([-1e-300, 1e300], n),
    "subnormal": lambda n: CHANCE.integers(-3, 4, n) * 5e-324,
    "bounds": lambda n: 2.0 ** CHANCE.integers(-40, 40, n),
    "extremes": lambda n: CHANCE.choice([-np.finfo(float).max, 0, np.finfo(float).max], n),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("accuracy", [0.001, 0.01, 0.1])
def test_quantiles_are_within_their_accuracy_of_the_nearest_rank(shape: str, accuracy: float) -> None:
    for count in (1, 2, 10, 999, 1_000, 3_000):
        values = SHAPES[shape](count)
        column, (state,) = states(kivi.quantiles("x", accuracy), "float64", [values], parts=3)
        found = column.type.from_stored(state)
        assert found.count == count
        in_order = np.sort(values)
        for q in QS:
            exact = float(in_order[max(1, math.ceil(Fraction(str(q)) * count)) - 1])
            assert abs(found.quantile(q) - exact) <= accuracy * abs(exact), (q, count)
        for bound in (*in_order[:: max(1, count // 5)], 0.0, 1.0):
            with np.errstate(over="ignore"):
                low, high = sorted([bound * (1 - accuracy), bound * (1 + accuracy)])
            assert np.mean(values < low) <= found.fraction_below(float(bound)) <= np.mean(values <= high)


def test_integers_and_decimals_have_the_quantiles_of_their_values() -> None:
    whole = np.array([0, 1, -1, 2**63 - 1, -(2**63), 2**53 + 1, 1_000], np.int64)
    column, (state,) = states(kivi.quantiles("x", 0.01), "int64", [whole])
    for i, exact in enumerate(sorted(whole.tolist()), 1):
        assert column.type.from_stored(state).quantile(i / 7 - 0.01) == pytest.approx(exact, rel=0.01, abs=0)
    column, (state,) = states(kivi.quantiles("x", 0.01), "decimal(9,2)", [np.array([150, 99_999], np.int64)])
    assert column.type.from_stored(state).quantile(0) == pytest.approx(1.5, rel=0.01)


def test_the_scale_keeps_its_promise_and_buckets_hold_their_bounds() -> None:
    for accuracy in (0.5, 0.1, 0.02, 0.01, 0.001, 0.0001):
        scale = scale_of(accuracy)
        assert accuracy_of(scale) <= accuracy
        assert accuracy_of(scale - 1) > accuracy
        values = CHANCE.lognormal(0, 30, 5_000)
        codes = codes_of(values, scale)
        errors = [abs(value_of(code, scale) - v) / v for code, v in zip(codes.tolist(), values.tolist(), strict=True)]
        assert max(errors) <= accuracy
        assert (np.diff(codes[np.argsort(values)]) >= 0).all()
    assert [rank_of(q, 10) for q in (0, 0.1, 0.9, 0.91, 1)] == [1, 1, 9, 10, 10]


@pytest.mark.parametrize("scale", [0, 3, 6, 7, 8])
@pytest.mark.parametrize("more", [[], [0.0], [-0.0], [5e-324], [-1.5]])
def test_many_values_have_the_codes_that_each_has_by_itself(scale: int, more: list[float]) -> None:
    bounds = 2.0 ** (np.arange(-3 * 2**scale, 3 * 2**scale) / 2**scale)
    ends = [np.finfo(np.float64).tiny, np.finfo(np.float64).max, 1.0, 2.0**60, 3.0]
    some = np.concatenate([bounds, np.nextafter(bounds, 0), np.nextafter(bounds, 9), ends, more])
    values = np.concatenate([some, np.exp2(CHANCE.uniform(-1_000, 1_000, 20_000))])
    by_itself = [codes_of(values[at : at + 100], scale) for at in range(0, len(values), 100)]
    assert (codes_of(values, scale) == np.concatenate(by_itself)).all()


# -- distinct -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "sizes"), [(0.01, (100, 3_000, 60_000)), (0.05, (50, 1_000, 30_000))])
def test_distinct_counts_within_their_error(error: float, sizes: tuple[int, ...]) -> None:
    """Root mean square within the stated error over 200 sets of each size; at most 0.5 % beyond three times that."""
    column = column_of(kivi.distinct("x", error), "int64")
    assert column.state is not None
    kind = kind_of(column.state)
    for size in sizes:
        sets, wrong = 200, []
        for _ in range(0, sets, 50):
            values = CHANCE.integers(-(2**63), 2**63 - 1, (50, size))
            (items,) = kind.of_events(Observed(values.ravel()))
            made = kind.encode(*kind.reduce((items,), offsets_of(np.full(50, size))))
            wrong += [found / size - 1 for found in kind.values(made)]
        errors = np.abs(wrong)
        assert math.sqrt(float(np.mean(errors**2))) <= error
        assert np.count_nonzero(errors > 3 * error) <= 0.005 * sets


def test_values_that_look_alike_are_told_apart() -> None:
    """Sequences, texts with a common beginning, and texts of zeros: what a weak hash would put together."""
    for type_, values in (
        ("int64", np.arange(50_000) << 20),
        ("string", [f"/api/v1/customers/{i}" for i in range(20_000)]),
        ("bytes", [bytes(i) for i in range(3_000)]),
        ("float64", np.arange(50_000) / 7),
    ):
        column, (state,) = states(kivi.distinct("x", 0.01), type_, [values], parts=2)
        assert column.state is not None
        (found,) = kind_of(column.state).values([state])
        assert found == pytest.approx(len(values), rel=0.03)
    assert hashed(np.array([0.0])) == hashed(np.array([-0.0]))


# -- moments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        [0], [5], [-1, 1], [2**63 - 1] * 3, [-(2**63)] * 5, [2**63 - 1, -(2**63)], [10**18 + i for i in range(100)],
        [(-1) ** i * 3**i for i in range(39)],
        pytest.param(
            np.repeat(range(-5, 6), [8, 17, 9, 7, 8, 12, 7, 14, 16, 8, 12]).tolist(), id="just above the middle of two"
        ),
    ],
    ids=str,
)  # fmt: skip
def test_moments_of_integers_are_those_of_fractions(values: list[int]) -> None:
    n, numbers = len(values), [Fraction(v) for v in values]
    mean = sum(numbers, Fraction()) / n
    spread = sum(((v - mean) ** 2 for v in numbers), Fraction())
    for call, exact in (
        (kivi.avg("x"), mean),
        (kivi.var("x"), spread / (n - 1) if n > 1 else None),
        (kivi.var("x", population=True), spread / n),
    ):
        column, made = states(call, "int64", [np.array(values, np.int64)], parts=min(3, n))
        assert column.state is not None
        (found,) = kind_of(column.state).values(made)
        assert found == (None if exact is None else float(exact))  # the float64 that is nearest
    with localcontext(Context(prec=80)):
        for population, below in ((True, n), (False, n - 1)):
            column, made = states(kivi.stddev("x", population=population), "int64", [np.array(values, np.int64)])
            assert column.state is not None
            nearest = (
                float((Decimal(spread.numerator) / (Decimal(spread.denominator) * below)).sqrt()) if below else None
            )
            assert kind_of(column.state).values(made)[0] == nearest


def test_moments_of_floats_are_their_sums_in_order() -> None:
    values = np.array([1e16, 1.0, 1.0, -1e16, 3.5])
    column, made = states(kivi.avg("x"), "float64", [values])
    total = 0.0
    for value in values.tolist():
        total += value
    assert column.state is not None
    assert kind_of(column.state).values(made) == [total / 5]


# -- winners and the most frequent --------------------------------------------------------------------------


@pytest.mark.parametrize("type_", ["int64", "string"])
def test_winners_among_ties(type_: str) -> None:
    """Of equals the first by (time, commit, position) wins argmax and argmin; last is the last by the same order."""
    for _ in range(30):
        n = int(CHANCE.integers(1, 30))
        times, stamps = CHANCE.integers(0, 3, n), CHANCE.integers(1, 4, n).astype(np.uint64)
        by, places = CHANCE.integers(-2, 2, n), CHANCE.permutation(n)
        values: Any = [f"v{i}" for i in range(n)] if type_ == "string" else np.arange(n)
        order = sorted(range(n), key=lambda i: (times[i], stamps[i], places[i]))
        for call, winner in (
            (kivi.first("x"), order[0]),
            (kivi.last("x"), order[-1]),
            (kivi.argmax("x", by="y"), min(order, key=lambda i: -by[i])),
            (kivi.argmin("x", by="y"), min(order, key=lambda i: by[i])),
        ):
            for parts in (1, 3):
                column, made = states(call, type_, [values], parts, by=by, times=times, places=places, stamps=stamps)
                assert column.state is not None
                assert kind_of(column.state).values(made) == [values[winner]]


def test_largest_and_smallest_with_ties_and_extremes() -> None:
    for values in (np.array([3, 1, 3, 2, 3]), np.array([-(2**63), 2**63 - 1, 0, 2**63 - 1]), np.zeros(0, np.int64)):
        for call, expected in (
            (kivi.largest("x", 3), sorted(values.tolist(), reverse=True)[:3]),
            (kivi.smallest("x", 2), sorted(values.tolist())[:2]),
        ):
            column, (state,) = states(call, "int64", [values], parts=2)
            assert column.type.from_stored(state) == expected


@pytest.mark.parametrize("most", [1, 5, 40])
def test_top_beyond_its_limit_counts_those_with_the_least_hashes_exactly(most: int) -> None:
    values = [f"/{int(v)}" for v in CHANCE.zipf(1.3, 3_000) % 60]
    counts = Counter(values)
    assert len(counts) > most
    column, (state,) = states(kivi.top("x", most, most=most), "string", [values], parts=4)
    found = column.type.from_stored(state)
    hashes = dict(zip(counts, hashed(pa.array(list(counts))).tolist(), strict=True))
    kept = sorted(counts, key=hashes.__getitem__)[:most]
    assert dict(found) == {value: counts[value] for value in kept}
    assert list(found) == sorted(found, key=lambda item: (-item[1], item[0]))
    assert (found.exact, found.count, found.others) == (False, 3_000, 3_000 - sum(counts[v] for v in kept))


def test_r20_a_weight_is_as_many_observations() -> None:
    """To the bit; one of 0 or less is none, and one beyond 2**40 that."""
    random = np.random.default_rng(11)
    for count in (1, 40, 5_000):
        values, weights = random.integers(-500, 500, count), random.integers(-2, 6, count)
        column, plain = column_of(kivi.quantiles("x"), "int64"), np.repeat(values, weights.clip(0))
        assert column.state is not None
        kind = kind_of(column.state)
        expected = kind.encode(*kind.reduce(kind.of_events(Observed(plain)), np.array([0, len(plain)])))
        column = column_of(kivi.weighted_quantiles("x", by="y"), "int64")
        assert column.state is not None
        kind = kind_of(column.state)
        items = kind.of_events(Observed(values, by=weights))
        assert kind.encode(*kind.reduce(items, np.array([0, count]))) == expected
    (code,), (kept,) = kind.of_events(Observed(np.array([3]), by=np.array([2**62])))
    assert (code, kept) == (codes_of(np.array([3.0]), 6)[0], 2**40)


def test_no_values_at_all() -> None:
    """A state of nothing but nulls is empty, and reads as null, nothing or 0."""
    for call, read in (
        (kivi.quantiles("x"), Quantiles(6, [], [])), (kivi.distinct("x"), 0), (kivi.avg("x"), None),
        (kivi.stddev("x"), None), (kivi.first("x"), None), (kivi.argmax("x", by="y"), None),
        (kivi.largest("x", 2), []), (kivi.top("x", 2), []),
    ):  # fmt: skip
        column = column_of(call, "int64")
        assert column.state is not None
        found = column.type.from_stored(kind_of(column.state).values([b""])[0])
        assert (list(found) if column.type.name == "top" else found) == read
