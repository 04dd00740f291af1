"""The keys of many runs in order, or numbered in that order: what gathering, combining and scans have in common.

Keys of one width are read as words of 64 bits, and what varies in these becomes one integer per row, its *code*, in
the same order: by mixed radix (of the words (7, 17:50), (7, 17:55), (9, 17:50) the second has two digits, since slots
are multiples of their length), or else by the bits that vary (a digit in a text is 4 of 8). Then, by what the codes are
like (decision 0014 has what each takes):

* Where their range is small, *a table of it*, however many runs there are. Nothing is sorted, and sums are added by
  number (``np.add.at``), so no column is put in order first.
* Where it is not, *sorting*, with the number of the row in the low bits so that no index is sorted along. Runs are
  sorted already, so the stable sort merges them; NumPy's default sort, with its vector instructions, is slower there.
  Rows in no order at all are left to it.

Keys in which more varies are sorted as byte strings by NumPy, and keys of several widths by Arrow.

Pure: no I/O and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.delta.runs import Array, DeltaRun, whole

__all__ = ["NumberedKeys", "SortedKeys", "Window", "numbered", "numbered_keys", "sorted_keys"]

Window = tuple[DeltaRun, range]
"""Some rows of a run."""

_WORDS_MAX: Final = 16
_SPAN_MAX: Final = 2**64
_SAMPLE: Final = 64
_STEPS: Final = 8
"""So often a smaller step is looked for: 63 of them, each for 64 rows, took 100 times as long as rows at random."""
_SPARSE: Final = 16
_SPARSE_RUNS: Final = 8
"""Up to so many codes for each row a table is faster than sorting: rows of runs, which are in order, sort faster."""


class SortedKeys:
    """Rows of several runs by key: ``order`` is stable, ``first`` marks where another key begins.

    Rows are numbered one run after the other; ``listed`` and ``array`` give the keys of some.
    """

    __slots__ = ("_arrow", "_strings", "first", "order")

    def __init__(self, order: Array, first: Array, strings: Array | None, arrow: Any) -> None:
        self.order = order
        self.first = first
        self._strings = strings
        self._arrow = arrow

    def listed(self, rows: Array) -> list[bytes]:
        if self._strings is not None:
            return whole(self._strings[rows])
        return self._arrow.take(pa.array(rows)).to_pylist()  # type: ignore[no-any-return]

    def array(self, rows: Array) -> Any:
        """As a LargeBinaryArray."""
        return self._arrow.take(pa.array(rows)) if self._strings is None else _as_arrow(self._strings[rows])


class NumberedKeys(NamedTuple):
    """Rows of several runs by the number of their key: ``group_of`` each row its own, in the order of the keys.

    ``last`` is the last row of each key, rows being numbered one run after the other; ``keys`` a LargeBinaryArray.
    """

    group_of: Array
    last: Array
    keys: Any


def sorted_keys(windows: Sequence[Window]) -> SortedKeys:
    """The windows' rows by key; ``windows`` have at least one row."""
    if len(windows) == 1 and windows[0][0].distinct:
        run, rows = windows[0]
        every = np.arange(len(rows))
        strings = None if run.uniform is None else run.uniform[rows.start : rows.stop]
        return SortedKeys(every, np.ones(len(rows), np.bool_), strings, run.keys.slice(rows.start, len(rows)))
    strings = _strings(windows)
    if strings is not None:
        coded = _coded(strings)
        if coded is not None:
            return SortedKeys(*_ordered(*coded, merged=True), strings, None)
        order = np.argsort(strings, kind="stable")
        ordered = strings[order]
        return SortedKeys(order, _begins(ordered[1:] != ordered[:-1]), strings, None)
    joined = pa.concat_arrays([run.keys.slice(rows.start, len(rows)) for run, rows in windows])
    indices = pc.array_sort_indices(joined)
    taken = joined.take(indices)
    changes = pc.not_equal(taken.slice(1), taken.slice(0, len(taken) - 1)).to_numpy(zero_copy_only=False)
    return SortedKeys(indices.to_numpy().astype(np.int64), _begins(changes), None, joined)


def numbered_keys(windows: Sequence[Window]) -> NumberedKeys:
    """The windows' rows by the number of their key; ``windows`` have at least one row."""
    strings = _strings(windows)
    coded = None if strings is None else _coded(strings)
    if strings is not None and coded is not None:
        group_of, last = numbered(*coded, merged=True)
        return NumberedKeys(group_of, last, _as_arrow(strings[last]))
    found = sorted_keys(windows)
    group_of, last = _by_order(found.order, found.first)
    return NumberedKeys(group_of, last, found.array(last))


def numbered(codes: Array, span: int, *, merged: bool = False) -> tuple[Array, Array]:
    """Rows by their codes, which are below ``span``: (group of each row, last row of each group), groups in the order
    of their codes. ``merged``: the rows are some runs, each of which is in order."""
    rows = len(codes)
    if span > (_SPARSE_RUNS if merged else _SPARSE) * rows + 1_024:
        return _by_order(*_ordered(codes.view(np.uint64), span, merged=merged))
    codes = codes.view(np.int64)
    if 3 * span <= rows:  # a table of last rows is in the processor's cache: half the time
        place = np.full(span, -1, np.int64)
        place[codes] = np.arange(rows)  # of a place that is assigned several times the last one stays
        met = place >= 0
        return (np.cumsum(met) - 1)[codes], place[met]
    used = np.zeros(span, np.bool_)
    used[codes] = True
    number = np.cumsum(used, dtype=np.int32)
    groups = int(number[-1])
    number -= 1
    group_of = number[codes].astype(np.int64)
    last = np.zeros(groups, np.int64)
    last[group_of] = np.arange(rows)  # of a place that is assigned several times the last one stays
    return group_of, last


def _by_order(order: Array, first: Array) -> tuple[Array, Array]:
    """(group of each row, last row of each group), of rows in a stable order."""
    group_of = np.empty(len(order), np.int64)
    group_of[order] = np.cumsum(first) - 1
    return group_of, order[np.append(first[1:], True)] if len(order) else order


def _ordered(codes: Array, span: int, *, merged: bool) -> tuple[Array, Array]:
    """The stable order of rows by their codes, unsigned and below ``span``, and where another code begins."""
    rows = len(codes)
    index_bits = max(0, rows - 1).bit_length()
    if (span - 1).bit_length() + index_bits > 64:
        order = np.argsort(codes, kind="stable")
        ordered = codes[order]
        return order, _begins(ordered[1:] != ordered[:-1])
    shift = np.uint64(index_bits)
    packed = codes << shift
    packed |= np.arange(rows, dtype=np.uint64)
    packed.sort(kind="stable" if merged else None)
    ordered = packed >> shift
    packed &= np.uint64((1 << index_bits) - 1)
    return packed.view(np.int64), _begins(ordered[1:] != ordered[:-1])


def _begins(changes: Array) -> Array:
    first = np.ones(len(changes) + 1, np.bool_)
    first[1:] = changes
    return first


# -- codes ----------------------------------------------------------------------------------------


def _coded(strings: Array) -> tuple[Array, int] | None:
    """Codes of byte strings of one width, and what these are below; None if what varies does not fit 64 bits."""
    return _by_radix(_words(strings)) or _by_bits(_words(strings))


def _by_radix(words: Sequence[Array]) -> tuple[Array, int] | None:
    """Overwrites the words."""
    codes, span = None, 1
    for word in words:
        word -= word.min()
        digits, most = _digits(word)
        span *= most + 1
        if span > _SPAN_MAX:
            return None
        if codes is None or span == most + 1:  # nothing has varied before; this may be 2**64, which no word can hold
            codes = digits
        elif most:
            codes *= np.uint64(most + 1)
            codes += digits
    return None if codes is None else (codes, span)


def _digits(values: Array) -> tuple[Array, int]:
    """The unsigned values by a common divisor, most often the greatest; and the greatest of them."""
    step = int(np.gcd.reduce(values[:_SAMPLE]))
    for _ in range(_STEPS):
        if step == 1:
            break
        digits = values // np.uint64(step) if step else values
        others = values[digits * np.uint64(step) != values]
        if not len(others):
            return digits, int(digits.max())
        step = math.gcd(step, int(np.gcd.reduce(others[:_SAMPLE])))
    return values, int(values.max())


def _by_bits(words: Sequence[Array]) -> tuple[Array, int] | None:
    if not words:
        return None
    bits = 0
    codes = np.zeros(len(words[0]), np.uint64)
    for word in words:
        varying = int(np.bitwise_or.reduce(word ^ word[0]))
        bits += varying.bit_count()
        if bits > 64:
            return None
        for shift, width in _stretches(varying):
            part = word >> np.uint64(shift)
            part &= np.uint64((1 << width) - 1)
            if width < 64:
                codes <<= np.uint64(width)
            codes |= part
    return codes, 1 << bits


def _stretches(mask: int) -> list[tuple[int, int]]:
    """(place of the lowest bit, how many) of each stretch of ones, the highest first."""
    found = []
    while mask:
        low = (mask & -mask).bit_length() - 1
        above = (mask >> low) + 1
        width = (above & -above).bit_length() - 1
        found.append((low, width))
        mask &= ~(((1 << width) - 1) << low)
    return found[::-1]


def _strings(windows: Sequence[Window]) -> Array | None:
    """The windows' keys as NumPy byte strings, if all are of one width."""
    parts = [run.uniform[rows.start : rows.stop] for run, rows in windows if run.uniform is not None]
    if len(parts) < len(windows) or len({part.itemsize for part in parts}) > 1:
        return None
    return np.concatenate(parts)


def _words(strings: Array) -> list[Array]:
    """Byte strings of one width as columns of integers in the same order; none if they are short or long."""
    width, rows = strings.itemsize, len(strings)
    count, rest = divmod(width, 8)
    if not count or count > _WORDS_MAX:
        return []

    def at(offset: int) -> Array:
        return np.ndarray((rows,), ">u8", strings, offset, (width,)).astype(np.uint64)

    words = [at(8 * i) for i in range(count)]
    if rest:
        words.append(at(width - 8) & np.uint64((1 << 8 * rest) - 1))
    return words


def _as_arrow(strings: Array) -> Any:
    """NumPy byte strings as a LargeBinaryArray of values of their width."""
    offsets = np.arange(len(strings) + 1, dtype=np.int64) * strings.itemsize
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(strings), [None, pa.py_buffer(offsets), pa.py_buffer(strings.view(np.uint8))]
    )
