"""Keys of aggregates without their slots, and with other ones, beside the plain encoding of the values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi.encoding.key_slots import KeySlot
from kivi.encoding.keys import encode_key, key_width
from kivi.model.types import ColumnType

SLOT, INT, TEXT = ColumnType("timestamp"), ColumnType("int64"), ColumnType("string")
VALUES: dict[str, Any] = {"int64": st.integers(-3, 3), "string": st.text(alphabet="a\0é", max_size=4)}
SIDES = [[], [INT], [TEXT], [TEXT, INT]]


@pytest.mark.parametrize("before", SIDES, ids=str)
@pytest.mark.parametrize("after", SIDES, ids=str)
@given(data=st.data())
def test_slots_are_read_left_out_and_replaced(
    before: list[ColumnType], after: list[ColumnType], data: st.DataObject
) -> None:
    types = [*before, SLOT, *after]
    place = len(before)
    slot = KeySlot(tuple(types), place, key_width(types[:place]), key_width(types[place + 1 :]))
    moments = st.integers(-(2**62), 2**62)
    of_each = st.tuples(*(VALUES[each.name] for each in before), moments, *(VALUES[each.name] for each in after))
    rows = data.draw(st.lists(of_each, max_size=6))
    skip = data.draw(st.integers(0, 2))
    keys = pa.array([b"left out"] * skip + [encode_key(types, row) for row in rows], pa.large_binary()).slice(skip)
    others = np.array(data.draw(st.lists(moments, min_size=len(rows), max_size=len(rows))), np.int64)

    def with_slot(row: Any, moment: int) -> bytes:
        return encode_key(types, [*row[:place], moment, *row[place + 1 :]])

    assert slot.slots(keys).tolist() == [row[place] for row in rows]
    names = [encode_key(types[:place] + types[place + 1 :], row[:place] + row[place + 1 :]) for row in rows]
    assert slot.without(keys).to_pylist() == names
    assert slot.moved(keys, others).to_pylist() == list(map(with_slot, rows, others.tolist()))
    assert slot.moved(keys, np.array([7])).to_pylist() == [with_slot(row, 7) for row in rows]
