"""An index of keys does what a dictionary does, whatever falls into one place, and however wide keys become."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi.delta import key_index
from kivi.delta.key_index import KeyIndex
from kivi.encoding.keys import encode_key
from kivi.model.types import ColumnType

TYPES = [ColumnType("string"), ColumnType("int64")]
KEYS = st.tuples(st.text(alphabet="a\0é", max_size=9), st.integers(-2, 300)).map(lambda key: encode_key(TYPES, key))
NEAR, FAR = (
    numbers.map(lambda n: encode_key(TYPES[1:], (n,)))
    for numbers in (st.integers(-9, 50), st.integers(-(2**40), 2**40))
)
"""Of one word; some that were near each other are not any more when others have come, or are all of one word."""
BATCHES = st.lists(
    st.tuples(st.booleans(), st.one_of(*(st.lists(of, max_size=12) for of in (NEAR, NEAR, FAR, KEYS)))), max_size=12
)


@pytest.mark.parametrize("hashed", [True, False], ids=["hashed", "all in one place"])
@given(batches=BATCHES, skip=st.integers(0, 3))
def test_numbers_are_those_of_a_dictionary(hashed: bool, batches: list[tuple[bool, list[bytes]]], skip: int) -> None:
    factors = key_index._FACTORS if hashed else np.zeros_like(key_index._FACTORS)
    with patch.object(key_index, "_FACTORS", factors), patch.object(key_index, "_FIRST", 2):
        index, model = KeyIndex(), dict[bytes, int]()
        for adds, keys in batches:
            array = pa.array([b"left out"] * skip + keys, pa.large_binary()).slice(skip)
            if adds:
                for i, key in enumerate([key for key in keys if key not in model]):
                    model.setdefault(key, index.last + 1 + i)
            found = index.add(array) if adds else index.find(array)
            assert found.tolist() == [model.get(key, 0) for key in keys]


def test_thousands_of_keys_keep_their_numbers_while_the_table_grows() -> None:
    index, known = KeyIndex(), dict[bytes, int]()
    for start in (0, 2_000, 5_000):
        keys = [encode_key(TYPES, (f"{n % 7}", n)) for n in range(start, start + 3_000)]
        for key, number in zip(keys, index.add(pa.array(keys, pa.large_binary())).tolist(), strict=True):
            assert known.setdefault(key, number) == number
    assert index.find(pa.array(list(known), pa.large_binary())).tolist() == list(known.values())
    assert len(set(known.values())) == len(known) == 8_000
