"""Combining: which settled files to write again as others. Pure; ``kivi.events.settling`` does it.

Files are sorted by event time, so a question reads of each file that meets its time the row groups that do. What has to
stay small is how many files have events of a moment: the *depth* there, at most ``DEPTH_MAX`` once nothing is left to
do. New files of events that came in time lie beside the others, and late ones across them; where files lie too deep the
smallest are combined, so that an event is written again about once each time that the late events of its time have
doubled. And small neighbours, as they come when a table is idle again and again, become one file.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeVar

import numpy as np

__all__ = ["DEPTH_MAX", "combinable", "depth", "portions", "too_deep"]

DEPTH_MAX: Final = 12
_TOGETHER: Final = 8
_NEIGHBOURS: Final = 16


class Spanning(Protocol):
    """A file, as far as it is looked at here."""

    @property
    def rows(self) -> int: ...

    @property
    def time_min(self) -> int: ...

    @property
    def time_max(self) -> int: ...


File = TypeVar("File", bound=Spanning)


def too_deep(files: Sequence[File], file_rows: int) -> list[File]:
    """Files to combine because too many have one moment; empty if there is no such moment.

    ``file_rows``: of a file as large as they become.
    """
    deepest = _deepest([file for file in files if not _is_of_a_moment(file, file_rows)])
    return sorted(deepest, key=lambda file: file.rows)[:_TOGETHER] if len(deepest) > DEPTH_MAX else []


def depth(files: Sequence[Spanning]) -> int:
    """How many files have events of one moment, at most."""
    return len(_deepest(files))


def combinable(files: Sequence[File], file_rows: int) -> list[File]:
    """Small neighbours to combine, or what lies too deep; empty if there is nothing to do."""
    if deepest := too_deep(files, file_rows):
        return deepest
    small: list[File] = []
    for file in sorted(files, key=lambda file: file.time_min):
        if 2 * file.rows > file_rows or (small and _tier(file) > _tier(small[0])):
            small = []
        if 2 * file.rows <= file_rows:
            small.append(file)
        if len(small) == _NEIGHBOURS:
            return small
    return []


def _is_of_a_moment(file: Spanning, file_rows: int) -> bool:
    """Whether it is full of events of one moment: nothing separates it from others of that moment."""
    return file.time_min == file.time_max and 2 * file.rows >= file_rows


def _tier(file: Spanning) -> int:
    return (max(1, file.rows).bit_length() - 1) // 4


def _deepest(files: Sequence[File]) -> list[File]:
    """The files at a moment that is met by the most."""
    begins = sorted(files, key=lambda file: file.time_min)
    best: list[File] = []
    there: list[File] = []
    for file in begins:
        there = [other for other in there if other.time_max >= file.time_min]
        there.append(file)
        if len(there) > len(best):
            best = list(there)
    return best


def portions(times: Any, file_rows: int) -> list[tuple[int, int]]:
    """Rows [start, stop) of files to make of events with these times, an array of integers that is sorted.

    Those far outside the shortest span that has half of the events are files of their own: of events that came late,
    or from a clock that runs ahead. None has more than ``file_rows``.
    """
    rows = len(times)
    if not rows:
        return []
    half = (rows - 1) // 2
    spans = times[half:].astype(np.float64) - times[: rows - half]
    first = int(spans.argmin())
    low, high = times[first] - spans[first], times[first + half] + spans[first]
    edges = [0, int(np.searchsorted(times, low)), int(np.searchsorted(times, high, "right")), rows]
    out = []
    for begins, ends in itertools.pairwise(edges):
        files = -(-(ends - begins) // file_rows)
        bounds = [begins + (ends - begins) * i // files for i in range(files + 1)] if files else []
        out += list(itertools.pairwise(bounds))
    return out
