"""Which events sums of floats can have: each, in their order, that leaves all sums finite besides those before it that
they have.

A sum that has left the finite numbers never comes back to them, so events can be derived from if and only if no sum
leaves these on its way from the first of them to the last. Some order has to decide which one was too much, and the
events have one.

Few cells can be left at all, and these are found in columns: rounding never makes a larger sum of a smaller addend, so
where the sizes of all addends of a cell add up to a finite number, so do any of them with their signs. Only the events
of the other cells are gone through one by one.

Pure: no I/O and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kivi.delta.runs import Array

__all__ = ["Addends", "overflowing"]


class Addends(NamedTuple):
    """What one measure adds up: of some events, by their numbers, ascending, the cell that each goes to and its
    value."""

    events: Array
    cells: Array
    values: Array


def overflowing(measures: Sequence[Addends], count: int, given: int = 0) -> Array:
    """Which of so many events are too much for a sum of some measure. The first ``given`` are there, and stay."""
    out = np.zeros(count, np.bool_)
    risky, cells = list[Addends](), 0
    for events, of, values in measures:
        if len(events):
            sizes = np.bincount(of, weights=np.abs(values))
            kept = np.flatnonzero(~np.isfinite(sizes)[of])
            risky.append(Addends(events[kept], of[kept] + cells, values[kept]))
            cells += len(sizes)
    if not sum(len(each.events) for each in risky):
        return out
    events, of, values = (np.concatenate(parts) for parts in zip(*risky, strict=True))
    order = np.argsort(events, kind="stable")
    events, listed, addends = events[order], of[order].tolist(), values[order].tolist()
    starts = np.flatnonzero(np.diff(events, prepend=-1))
    totals = dict.fromkeys(listed, 0.0)
    for event, (first, end) in zip(events[starts].tolist(), pairwise([*starts.tolist(), len(listed)]), strict=True):
        more = {listed[i]: totals[listed[i]] + addends[i] for i in range(first, end)}
        if event < given or all(map(math.isfinite, more.values())):
            totals |= more
        else:
            out[event] = True
    return out
