"""``quad``: the cell of a position in a quad-tree of degrees, as a path from the whole down.

Each level halves latitude and longitude, and adds one digit: 0 north-west, 1 north-east, 2 south-west, 3 south-east. So
a cell has every position whose path begins with its own, and cells are a hierarchy that needs no table. A cell of depth
d is 180 / 2**d degrees high and 360 / 2**d wide: 5 km by 10 km at the equator for d = 12. A position on an edge lies in
the cell south and east of it.

One position and a column of them go through the same operations, as in ``positions``.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kivi.errors import InvalidArgument
from kivi.model.expressions.positions import is_position
from kivi.model.types import shown

__all__ = ["cell_bounds", "cells_of", "checked_depth", "quad_of"]

Array = np.ndarray[Any, np.dtype[Any]]

_DEPTH_MAX: Final = 24
"""A metre or two."""
_DIGITS: Final = frozenset("0123")


def checked_depth(value: tuple[Any, ...]) -> int:
    """Raises InvalidArgument for what is none."""
    depth = value[0] if len(value) == 1 else None
    if not isinstance(depth, int) or isinstance(depth, bool) or not 1 <= depth <= _DEPTH_MAX:
        raise InvalidArgument(f"the depth of a quad is a number from 1 to {_DEPTH_MAX}, not {shown(depth)}")
    return depth


def quad_of(lat: float, lon: float, depth: int) -> str | None:
    """The path of a position; None: it is no position."""
    if not is_position(lat, lon):
        return None
    down, right = (int(each) for each in _places(lat, lon, depth))
    last = (1 << depth) - 1
    down, right = min(down, last), min(right, last)
    return "".join(str((down >> i & 1) * 2 + (right >> i & 1)) for i in reversed(range(depth)))


def cells_of(lats: Array, lons: Array, depth: int) -> Array:
    """``quad_of`` of each, all of which are positions; ASCII bytes."""
    last = (1 << depth) - 1
    down, right = (np.minimum(each.astype(np.int64), last) for each in _places(lats, lons, depth))
    levels = np.arange(depth - 1, -1, -1)
    digits = ((down[:, None] >> levels & 1) * 2 + (right[:, None] >> levels & 1) + ord("0")).astype(np.uint8)
    return np.ascontiguousarray(digits).view(f"S{depth}").reshape(len(lats))


def _places(lat: Any, lon: Any, depth: int) -> tuple[Any, Any]:
    """How many cells north and west of a position there are, or of columns of them; cut towards 0."""
    cells = float(1 << depth)
    return (90.0 - lat) * (cells / 180.0), (lon + 180.0) % 360.0 * (cells / 360.0)


def cell_bounds(path: str) -> tuple[tuple[float, float], list[tuple[float, float]]] | None:
    """The latitudes of a cell, and ranges of its longitudes from -360 to 360, or a little beyond; None: it is none."""
    if not _DIGITS.issuperset(path) or len(path) > _DEPTH_MAX:
        return None
    north, west, height, width = 90.0, -180.0, 180.0, 360.0
    for digit in map(int, path):
        height, width = height / 2, width / 2
        north, west = north - height * (digit // 2), west + width * (digit % 2)
    slack = 1e-9
    turns = [(west + turn - slack, west + width + turn + slack) for turn in (-360.0, 0.0, 360.0)]
    return (north - height - slack, north + slack), turns
