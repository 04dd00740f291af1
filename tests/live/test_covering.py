"""Covers: which keys of a run anybody follows."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from kivi.delta.runs import Cells, DeltaRun
from kivi.live.covering import Cover


def random_key(rng: random.Random, width: int | None) -> bytes:
    length = width if width is not None else rng.randrange(4)
    return bytes(rng.choice((0, 1, 2, 255)) for _ in range(length))


@pytest.mark.parametrize("width", [3, None])
def test_a_cover_is_the_union_of_its_ranges(width: int | None) -> None:
    rng = random.Random(7)
    for _ in range(500):
        ranges = []
        for _ in range(rng.randrange(5)):
            start, end = (rng.choice((None, random_key(rng, None))) for _ in range(2))
            ranges.append((start, end))
        keys = sorted({random_key(rng, width) for _ in range(rng.choice((5, 200)))})
        run = DeltaRun(pa.array(keys, pa.large_binary()), 1, (Cells(np.zeros(len(keys), np.int64)),))
        wanted = [
            key
            for key in keys
            if any((low is None or key >= low) and (high is None or key < high) for low, high in ranges)
        ]
        cover = Cover(ranges)
        assert cover.keys(run) == wanted
        assert [key for key in keys if key in cover] == wanted


def test_neighbours_become_one() -> None:
    assert Cover([(b"b", b"c"), (b"a", b"b"), (b"c", None)])._starts == [b"a"]
    assert Cover([(None, None), (b"a", b"b")]).everything
    assert not Cover([]).everything and b"" not in Cover([])
