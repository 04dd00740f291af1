"""Windows over delta runs whose keys end in a time: panes put together to sliding windows, pieces to whole sessions.

::

    panes of a minute         (a, 17:00) (a, 17:01) (a, 17:02)
    windows of three, each    (a, 16:58) (a, 16:59) (a, 17:00) (a, 17:01) (a, 17:02)
    under its beginning        00         00+01      00+01+02   01+02      02

**Sliding windows.** Every event was looked at once, when it entered its pane; states are combined from there on. Rows
are in order of their groups and then of time, so a window is a few rows one after the other, and windows are in the
order of both their first rows and their last ones: which these are is counted, and nothing is sorted. Blocks of rows
grow by doubling, those of 2 rows from those of 1, of 4 from 2, and a window of 13 rows is a block of 1, of 4 and of 8,
so that a row takes part in about 2 log n combinations and not in n, whatever the measure is: no inverse is needed.

**Sessions.** Of each chunk of events the *pieces* of sessions are known, each under the time of its first event and
with that of its last. Two pieces are of one session if no more than the gap lies between them, or if they overlap: more
events only fill gaps. So sorting pieces by their beginnings, with the latest end so far, finds the sessions whatever
the chunks were.

Sums of floats are added block by block, piece by piece, in the order of time. Pure: no I/O and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from kivi.delta.combine import combine, finite_sums, most_of
from kivi.delta.rolling import CTS
from kivi.delta.runs import Array, Cells, DeltaRun, RunColumn, neutral_of, ufunc_of
from kivi.delta.states import States
from kivi.encoding.base_rows import is_wide
from kivi.encoding.keys import large_binary
from kivi.errors import OutOfRange
from kivi.model.schema import Column, TableSchema
from kivi.model.types import INT64_MAX, INT64_MIN
from kivi.states.kinds import ByGroup, stretches

__all__ = ["session_starts", "sessions", "slid"]

_TIME: Final = 8
"""Bytes of the time that a key ends in."""
_ROWS: Final = 65_536
_STATES_ROWS: Final = 1_024
"""Panes that are put together at once, numbers and states."""
_SIGN: Final = np.uint64(1 << 63)

Check = Callable[[int], None]
"""Is told how many bytes are held, and raises if these are too many."""


# -- keys that end in a time ------------------------------------------------------------------------


def _parts(keys: Any) -> tuple[Array, Array]:
    """The bytes of keys one after the other, as a copy, and where each ends."""
    offsets = np.frombuffer(keys.buffers()[1], np.int64, len(keys) + 1, 8 * keys.offset)
    data = np.frombuffer(keys.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    return data.copy(), offsets[1:] - offsets[0]


def _words(data: Array, ends: Array) -> Array | None:
    """Of keys of one width the times as they stand in their bytes, to read or write in place; None: of other keys."""
    width, rest = divmod(len(data), max(1, len(ends)))
    if rest or not width or not (ends == np.arange(width, len(data) + 1, width)).all():
        return None
    return np.ndarray((len(ends),), ">u8", data, width - _TIME, (width,))


def _times(keys: Any) -> Array:
    data, ends = _parts(keys)
    words = _words(data, ends)
    if words is None:
        words = data[ends[:, None] + np.arange(-_TIME, 0)].view(">u8")[:, 0]
    return np.asarray((words.astype(np.uint64) ^ _SIGN).view(np.int64))


def _with_times(keys: Any, times: Array) -> Any:
    """The same keys with other times."""
    data, ends = _parts(keys)
    signed = times.view(np.uint64) ^ _SIGN
    if (words := _words(data, ends)) is not None:
        words[:] = signed
    else:
        data[ends[:, None] + np.arange(-_TIME, 0)] = signed.astype(">u8").view(np.uint8).reshape(-1, _TIME)
    return large_binary(np.concatenate(([0], ends)), data)


def _heads(keys: Any) -> Array:
    """The number of each key's group, which is what stands before the time. Keys are in order."""
    data, ends = _parts(keys)
    kept = np.ones(len(data), np.bool_)
    kept[(ends[:, None] + np.arange(-_TIME, 0)).ravel()] = False
    offsets = np.concatenate(([0], ends - _TIME * np.arange(1, len(ends) + 1)))
    codes: Array = large_binary(offsets, data[kept]).dictionary_encode().indices.to_numpy()
    return codes


def _goes_on(keys: Any) -> Array:
    """Of each key but the first, whether it is of the same group as the one before. Keys are in order."""
    data, ends = _parts(keys)
    if _words(data, ends) is None:
        codes = _heads(keys)
        return np.asarray(codes[1:] == codes[:-1])
    width = len(data) // len(ends)
    if width == _TIME:
        return np.ones(len(ends) - 1, np.bool_)
    heads = np.ndarray((len(ends),), f"S{width - _TIME}", data, 0, (width,))
    return np.asarray(heads[1:] == heads[:-1])


# -- sliding ----------------------------------------------------------------------------------------


def slid(
    target: TableSchema, run: DeltaRun, size_us: int, slide_us: int, check: Check
) -> Iterator[Callable[[], DeltaRun]]:
    """The windows [w, w + size), w a multiple of ``slide_us``, that some pane lies in, in parts. ``run`` has rows of
    panes, as long as the greatest common divisor of both, and keys that end in their beginnings.

    A part is some windows one after the other, and is made of the panes from the first one's on to the last one's. So
    what is held besides panes is a part, which a processor's cache holds. Each part is a call, which any thread may
    make.

    Raises OutOfRange for windows that would begin before time or end after it, and for sums of floats.
    """
    if not run.rows:
        return
    times = _times(run.keys)
    if int(times.min()) < INT64_MIN + size_us:
        raise OutOfRange("the first windows would begin before time: bound the question by start")
    if int(times.max()) > INT64_MAX - size_us:
        raise OutOfRange("the last windows would end after time: bound the question by end")
    if run.rows > INT64_MAX // (size_us // slide_us + 1):
        check(INT64_MAX)
    spans = _Spans.of(times, _goes_on(run.keys), size_us, slide_us)
    has_states = any(column.state is not None for column in target.columns)
    panes = size_us // math.gcd(size_us, slide_us)
    rows = max(_STATES_ROWS if has_states else _ROWS, min(4 * panes, run.rows))
    windows = int(spans.begun[-1])
    step = max(1, min(rows, rows * windows // run.rows))
    for low in range(0, windows, step):
        yield partial(_part, target, run, spans, slide_us, range(low, min(low + step, windows)), check)


class _Spans(NamedTuple):
    """The consecutive rows that each window is made of. Windows are numbered in the order of their keys.

    Of each row, ``latest`` says which multiple of the slide is the last that begins no later; ``begun`` how many
    windows have this row or an earlier one as their first, and ``ended`` as their last.
    """

    latest: Array
    begun: Array
    ended: Array

    @staticmethod
    def of(times: Array, goes_on: Array, size_us: int, slide_us: int) -> _Spans:
        """``goes_on``: of each row but the first, whether it is of the same group as the one before."""
        latest, missed = times // slide_us, (times - size_us) // slide_us  # the last that ends before the row
        after, upto = missed.copy(), latest.copy()
        np.maximum(missed[1:], latest[:-1], out=after[1:], where=goes_on)  # whose first row is the one before
        np.minimum(latest[:-1], missed[1:], out=upto[:-1], where=goes_on)  # whose last row is a later one
        return _Spans(latest, np.cumsum(latest - after), np.cumsum(upto - missed))

    def rows(self, windows: range) -> tuple[Array, Array]:
        """The first row of each window, and the one behind its last."""
        return _numbered(self.begun, windows), _numbered(self.ended, windows) + 1


def _numbered(counted: Array, windows: range) -> Array:
    """The row of each of the windows, where ``counted`` says how many are of each row or an earlier one."""
    low, high = np.searchsorted(counted, [windows.start, windows.stop - 1], "right")
    counts = np.diff(np.minimum(counted[low : high + 1], windows.stop), prepend=windows.start)
    return np.repeat(np.arange(low, high + 1), counts)


def _part(target: TableSchema, run: DeltaRun, spans: _Spans, slide_us: int, windows: range, check: Check) -> DeltaRun:
    first, beyond = spans.rows(windows)
    starts = spans.latest[first] - (spans.begun[first] - 1 - np.arange(windows.start, windows.stop))
    keys = _with_times(run.keys.take(pa.array(first)), starts * slide_us)
    rows = slice(int(first[0]), int(beyond[-1]))
    check((rows.stop - rows.start + 2 * len(windows)) * run.nbytes // run.rows)
    blocks = _Blocks(first - rows.start, beyond - first, check)
    columns = [
        blocks.over(target, column, cells.take(rows)) for column, cells in zip(target.columns, run.columns, strict=True)
    ]
    return DeltaRun(keys, CTS, tuple(columns))


class _Blocks:
    """Windows over rows, so many from each ``first`` one on, put together of blocks of 1, 2, 4 ... rows."""

    def __init__(self, first: Array, lengths: Array, check: Check) -> None:
        self._first, self._lengths, self._check = first, lengths, check
        self._longest = int(lengths.max())
        self._steps = list(self._blocks())

    def _blocks(self) -> Iterator[tuple[int, Array, Array]]:
        """(half a block's rows, which windows have such a block, with which row it begins), in the order of time."""
        at = self._first.copy()
        for bit in range(self._longest.bit_length()):
            has = np.flatnonzero(self._lengths >> bit & 1)
            yield (1 << bit) >> 1, has, at[has]
            at[has] += 1 << bit

    def over(self, target: TableSchema, column: Column, cells: RunColumn) -> RunColumn:
        """The column of the windows. Raises OutOfRange for sums of floats."""
        if isinstance(cells, States):
            return self._states(cells)
        if is_wide(column):
            if cells.high is None and most_of(cells.values) * self._longest <= INT64_MAX:
                return Cells(self._numbers(np.add, cells.values, 0))
            low, high = cells.limbs()
            return Cells.of_limbs(self._numbers(np.add, low, 0), self._numbers(np.add, high, 0))
        if column.operator == "sum":
            with np.errstate(over="ignore", invalid="ignore"):
                return finite_sums(target, column, self._numbers(np.add, cells.values, 0.0))
        pick, neutral = ufunc_of(column), neutral_of(column)
        if cells.valid is None:
            return Cells(self._numbers(pick, cells.values, neutral))
        found = self._numbers(pick, np.where(cells.valid, cells.values, neutral), neutral)
        seen = self._numbers(np.logical_or, cells.valid, False)
        return Cells(found) if seen.all() else Cells(np.where(seen, found, 0), None, seen)

    def _numbers(self, ufunc: np.ufunc, block: Array, neutral: float) -> Array:
        found = np.full(len(self._first), neutral, block.dtype)
        for half, has, rows in self._steps:
            if half:
                block = ufunc(block[:-half], block[half:])
            found[has] = ufunc(found[has], block[rows])
        return found

    def _states(self, block: States) -> States:
        windows = len(self._first)
        if self._longest <= 2 * self._longest.bit_length():  # a few at once are fewer steps
            self._check(self._longest * block.nbytes)
            index = stretches(self._first, self._lengths)
            return block.take(index).grouped(ByGroup(np.repeat(np.arange(windows), self._lengths), windows))
        found = States.none(block.kind, windows)
        for half, has, rows in self._steps:
            if half:
                count = len(block) - half
                pairs = States.joined([block.take(slice(0, count)), block.take(slice(half, None))])
                block = pairs.grouped(ByGroup(np.tile(np.arange(count), 2), count))
            pairs = States.joined([found, block.take(rows)])
            self._check(block.nbytes + pairs.nbytes)
            found = pairs.grouped(ByGroup(np.concatenate([np.arange(windows), has]), windows))
        return found


# -- sessions ---------------------------------------------------------------------------------------


def session_starts(group_of: Array, times: Array, gap_us: int) -> Array:
    """When the piece of a session begins that each event is in, among these events."""
    order = np.lexsort((times, group_of))
    groups, moments = group_of[order], times[order]
    begins = _begins(groups, moments[1:], moments[:-1], gap_us)
    starts = np.empty_like(times)
    starts[order] = moments[begins][np.cumsum(begins) - 1]
    return starts


def _begins(groups: Array, times: Array, before: Array, gap_us: int) -> Array:
    """Where a session begins: ``before`` is up to when the one before each but the first has events."""
    begins = np.ones(len(groups), np.bool_)
    late = (times > before) & ((times.view(np.uint64) - before.view(np.uint64)) > np.uint64(gap_us))
    begins[1:] = (groups[1:] != groups[:-1]) | late
    return begins


def sessions(target: TableSchema, run: DeltaRun, end: int, gap_us: int) -> DeltaRun:
    """Pieces put together to sessions. Column ``end`` is the time of the last event."""
    if not run.rows:
        return run
    ends = run.columns[end]
    assert isinstance(ends, Cells)
    groups, starts = _heads(run.keys).astype(np.int64), _times(run.keys)
    distinct, rank = np.unique(ends.values, return_inverse=True)
    latest = np.maximum.accumulate(groups * len(distinct) + rank) - groups * len(distinct)
    begins = _begins(groups, starts[1:], distinct[latest[:-1]], gap_us)
    if begins.all():
        return run
    first = np.flatnonzero(begins)[np.cumsum(begins) - 1]
    pieces = DeltaRun(run.keys.take(pa.array(first)), CTS, run.columns)
    pieces.distinct = False
    return combine(target, [pieces])
