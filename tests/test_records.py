"""Rows as dicts, by columns."""

from __future__ import annotations

import pytest

from kivi.arrow.row_dicts import records


def test_rows_have_the_columns_in_order_whatever_these_are_called() -> None:
    names = ["a", "from", "", "v0", "c1", "it's", 'a"b', "x: 1}", "\n", "\u00e9", "\\"]
    rows = records(names, [range(i, i + 3) for i in range(len(names))])
    assert rows == [dict(zip(names, range(i, i + len(names)), strict=True)) for i in range(3)]
    assert [list(row) for row in rows] == [names] * 3


def test_of_many_columns_of_none_and_of_no_rows() -> None:
    names = [f"column {i}" for i in range(1_000)]
    assert records(names, [[i] for i in range(1_000)]) == [{name: i for i, name in enumerate(names)}]
    assert records([], []) == []
    assert records(["a", "b"], [[], []]) == []


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        records(["a", "b"], [[1, 2], [1]])
