"""A row that many operations were done to: folded at once, as if one by one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kivi
from kivi.delta.ops import Barrier, RowOp, apply_op, fold
from kivi.encoding.base_rows import Version
from kivi.model.declarations import row_table_schema

TABLE = row_table_schema(
    "t",
    key={"id": "int64"},
    columns={
        "n": kivi.sum("int64"),
        "load": kivi.sum("float64"),
        "fee": kivi.sum("decimal(10,2)"),
        "most": kivi.max("int64"),
        "v": "int64",
    },
)
NUMBERS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(-1e300, 1e300) | st.sampled_from([0.1, 1e16, -1e16, 1.0])
DELTAS: list[st.SearchStrategy[dict[int, Any]]] = [
    st.fixed_dictionaries({0: NUMBERS}),
    st.fixed_dictionaries({1: FLOATS}),
    st.fixed_dictionaries({2: st.integers(-9_999, 9_999)}),
    st.fixed_dictionaries({3: NUMBERS}),
    st.fixed_dictionaries({0: NUMBERS, 3: NUMBERS}),
]
OTHERS = st.one_of(
    st.builds(lambda v: RowOp(Barrier.PATCH, {4: v}, {}), NUMBERS),
    st.builds(lambda v, n: RowOp(Barrier.PATCH, {4: v}, {0: n}), NUMBERS, NUMBERS),
    st.builds(lambda n: RowOp(Barrier.PATCH, {0: n}, {}), st.one_of(NUMBERS, st.none())),
    st.just(RowOp(Barrier.DELETE, {}, {})),
    st.builds(lambda n: RowOp(Barrier.RESTART, {0: n}, {}), NUMBERS),
)
BASES = st.one_of(
    st.none(),
    st.builds(lambda n, x, most: Version(10, True, (n, x, 5, most, 7)), NUMBERS, FLOATS, NUMBERS),
    st.builds(lambda n, x, most: Version(10, True, (n, x, 5, most, 7)), NUMBERS, FLOATS, NUMBERS),
    st.just(Version(10, True, (None, None, None, None, None))),
    st.just(Version(10, False, ())),
)


@st.composite
def histories(draw: st.DrawFn, kind: int) -> list[tuple[int, RowOp]]:
    """Of one kind of delta, as a hot row has them; sometimes with something else among them."""
    deltas = DELTAS[kind].map(lambda cells: RowOp(Barrier.PATCH, {}, cells))
    ops = draw(st.lists(deltas, min_size=7, max_size=25))
    if draw(st.booleans()):
        ops.insert(draw(st.integers(0, len(ops))), draw(OTHERS | st.sampled_from(DELTAS).flatmap(_as_patch)))
    first = draw(st.sampled_from([11, 11, 12, 5]))
    steps = draw(st.lists(st.integers(0, 2), min_size=len(ops), max_size=len(ops)))
    return list(zip(itertools.accumulate(steps, initial=first), ops, strict=False))


def _as_patch(cells: st.SearchStrategy[dict[int, Any]]) -> st.SearchStrategy[RowOp]:
    return cells.map(lambda deltas: RowOp(Barrier.PATCH, {}, deltas))


@pytest.mark.parametrize("kind", range(len(DELTAS)))
@given(st.data(), BASES, st.sampled_from([0, 0, 1, 9, -7]))
def test_a_long_history_folds_to_what_its_operations_do_one_after_the_other(
    kind: int, data: st.DataObject, base: Version | None, behind: int
) -> None:
    ops = data.draw(histories(kind))
    upto = ops[-1][0] - behind
    wanted = base
    for cts, op in ops:
        if (base.cts if base is not None else 0) < cts <= upto:
            wanted = apply_op(TABLE, wanted, cts, op)
    found = fold(TABLE, base, ops, upto)
    assert repr(found) == repr(wanted), "to the last bit"
