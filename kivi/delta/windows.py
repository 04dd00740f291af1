"""Windows over delta runs whose keys end in a time: panes put together to sliding windows, pieces to whole sessions.

::

    panes of a minute         (a, 17:00) (a, 17:01) (a, 17:02)
    windows of three, each    (a, 16:58) (a, 16:59) (a, 17:00) (a, 17:01) (a, 17:02)
    under its beginning        00         00+01      00+01+02   01+02      02

**Sliding windows.** Every event was looked at once, when it entered its pane; states are combined from there on. Where
a window has few panes, or begins seldom, each pane's row is copied to the windows that it is in. Of many panes windows
grow by doubling: those of 2 panes from those of 1, of 4 from 2, and a window of 13 is 8 + 4 + 1 panes, so that a row
takes part in about 2 log n combinations and not in n.

**Sessions.** Of each chunk of events the *pieces* of sessions are known, each under the time of its first event and
with that of its last. Two pieces are of one session if no more than the gap lies between them, or if they overlap: more
events only fill gaps. So sorting pieces by their beginnings, with the latest end so far, finds the sessions whatever
the chunks were.

Sums of floats are added pane by pane, piece by piece, in the order of time. Pure: no I/O and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kivi.delta.combine import combine
from kivi.delta.rolling import CTS
from kivi.delta.runs import Array, Cells, DeltaRun
from kivi.encoding.keys import large_binary
from kivi.errors import OutOfRange
from kivi.model.schema import TableSchema
from kivi.model.types import INT64_MAX, INT64_MIN

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


# -- sliding ----------------------------------------------------------------------------------------


def slid(
    target: TableSchema, run: DeltaRun, size_us: int, slide_us: int, check: Check
) -> Iterator[Callable[[], DeltaRun]]:
    """The windows [w, w + size), w a multiple of ``slide_us``, that some pane lies in, in parts. ``run`` has rows of
    panes, as long as the greatest common divisor of both, and keys that end in their beginnings.

    A part is the windows from one key on up to another, and is made of the panes from the one up to ``size_us`` behind
    the other. So what is held besides panes is a part, which a processor's cache holds. Each part is a call, which any
    thread may make.

    Raises OutOfRange for windows that would begin before time or end after it, and for sums of floats.
    """
    if not run.rows:
        return
    times = _times(run.keys)
    if int(times.min()) < INT64_MIN + size_us:
        raise OutOfRange("the first windows would begin before time: bound the question by start")
    if int(times.max()) > INT64_MAX - size_us:
        raise OutOfRange("the last windows would end after time: bound the question by end")
    has_states = any(column.state is not None for column in target.columns)
    rows = max(_STATES_ROWS if has_states else _ROWS, 4 * size_us // math.gcd(size_us, slide_us))
    for at in range(0, run.rows, rows):
        low = run.key_at(at) if at else None
        high = run.key_at(at + rows) if at + rows < run.rows else None
        upto = run.rows if high is None else run.lower(_later(high, size_us))
        yield partial(_part, target, _slice(run, slice(at, upto)), size_us, slide_us, check, low, high)


def _part(
    target: TableSchema, run: DeltaRun, size_us: int, slide_us: int, check: Check, low: bytes | None, high: bytes | None
) -> DeltaRun:
    windows = _windows(target, run, size_us, slide_us, check)
    rows = windows.slice_range(low, high)
    return _slice(windows, slice(rows.start, rows.stop))


def _slice(run: DeltaRun, part: slice) -> DeltaRun:
    keys = run.keys.slice(part.start, part.stop - part.start)
    return DeltaRun(keys, CTS, tuple(cells.take(part) for cells in run.columns))


def _later(key: bytes, size_us: int) -> bytes:
    """The key of the same group so much later."""
    time = int.from_bytes(key[-_TIME:], "big") + size_us
    return key[:-_TIME] + min(time, 2**64 - 1).to_bytes(_TIME, "big")


def _windows(target: TableSchema, run: DeltaRun, size_us: int, slide_us: int, check: Check) -> DeltaRun:
    pane_us = math.gcd(size_us, slide_us)
    panes, copies = size_us // pane_us, -(-size_us // slide_us)
    if copies > 2 * panes.bit_length():
        return _doubled(target, run, pane_us, panes, slide_us, check)
    times = _times(run.keys)
    last = times // slide_us * slide_us
    check(copies * run.nbytes)
    starts = [last - copy * slide_us for copy in range(copies)]
    return combine(target, [_moved(run, each, each + size_us > times) for each in starts])


def _doubled(target: TableSchema, run: DeltaRun, pane_us: int, panes: int, slide_us: int, check: Check) -> DeltaRun:
    """``power`` has, under each moment, the panes of so much time from there on; ``found`` those of the bits so far."""
    power, covered, found = run, 0, None
    for bit in range(panes.bit_length()):
        if bit:
            power = _joined(target, power, power, pane_us << (bit - 1), check)
        if panes >> bit & 1:
            found = power if found is None else _joined(target, found, power, covered * pane_us, check)
            covered |= 1 << bit
    assert found is not None
    times = _times(found.keys)
    return _moved(found, times, times % slide_us == 0)


def _joined(target: TableSchema, first: DeltaRun, second: DeltaRun, after_us: int, check: Check) -> DeltaRun:
    """Each moment's row of ``first``, and behind it that of ``second`` so much later."""
    times = _times(second.keys)
    moved = _moved(second, times - after_us, np.ones(second.rows, np.bool_))
    check(first.nbytes + moved.nbytes)
    return combine(target, [first, moved])


def _moved(run: DeltaRun, times: Array, kept: Array) -> DeltaRun:
    """Some rows under other times; their keys are in order, and may be there twice."""
    if not kept.all():
        index = np.flatnonzero(kept)
        columns = tuple(cells.take(index) for cells in run.columns)
        run, times = DeltaRun(run.keys.take(pa.array(index)), CTS, columns), times[index]
    moved = DeltaRun(_with_times(run.keys, times), CTS, run.columns)
    moved.distinct = False
    return moved


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
