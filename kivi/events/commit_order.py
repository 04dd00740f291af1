"""Events that lie sorted by event time, given in commit order, in bounded memory.

Each *source* (a row group) is read when the order comes to its first event, and its names are sorted then, once. What
is later than the next source's first event waits where it lies. Where events come about in the order of their time,
little waits: the late ones, until their commits' turn. Where sources lie across each other so much that more waits than
``budget`` bytes, the later half is let go of, and its sources are read again when the order comes to it.

Names are compared as one number, (CTS - first) * 2**bits + position, in windows of CTS in which it has 63 bits. Sorting
these with the row of each in the bits that are left takes a tenth of the time of sorting rows by them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kivi.arrow.columns import picked
from kivi.arrow.dictionaries import together
from kivi.encoding.event_names import POSITION, STAMP

__all__ = ["Source", "in_commit_order"]

_BATCH_ROWS: Final = 65_536
_WORTH: Final = 131_072
"""So many events are put in order together."""

Codes = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Source:
    """Events of some commits. ``read`` gives them as a batch with ``STAMP`` and ``POSITION``, in any order.

    Text may come in codes.
    """

    first_cts: int
    last_cts: int
    position_max: int
    read: Callable[[], Any]


def in_commit_order(
    sources: Sequence[Source],
    columns: Sequence[str],
    *,
    first_cts: int,
    last_cts: int,
    reverse: bool = False,
    budget: int = 32 << 20,
) -> Iterator[Any]:
    """Record batches of at most 65,536 rows of the events with first_cts <= CTS <= last_cts, by (CTS, position).

    They have these ``columns``, at least one, of those that sources have.
    """
    if not sources:
        return
    bits = max(source.position_max for source in sources).bit_length()
    low = max(first_cts, min(source.first_cts for source in sources))
    high = min(last_cts, max(source.last_cts for source in sources))
    step = 1 << (62 - bits)
    windows = range(low, high + 1, step)
    for start in reversed(windows) if reverse else windows:
        window = _Window(start, min(high, start + step - 1), bits, reverse, budget, list(columns))
        for batch in window.run(sources):
            for at in range(0, batch.num_rows, _BATCH_ROWS):
                yield batch.slice(at, _BATCH_ROWS)


@dataclass(frozen=True, slots=True)
class _Part:
    """What was read of a source, and not given yet: these rows of ``events``, in the order of ``codes``."""

    origin: int
    codes: Codes
    rows: Rows
    events: Any

    @property
    def nbytes(self) -> int:
        return int(self.events.nbytes) + self.codes.nbytes + self.rows.nbytes

    def split(self, bound: int) -> tuple[_Part, _Part]:
        """What is below a code, and the rest."""
        at = int(np.searchsorted(self.codes, bound))
        return self._slice(0, at), self._slice(at, len(self.codes))

    def _slice(self, start: int, stop: int) -> _Part:
        """In memory of their own if they are less than half of the events."""
        codes, rows = self.codes[start:stop], self.rows[start:stop]
        if 2 * len(rows) >= self.events.num_rows:
            return _Part(self.origin, codes, rows, self.events)
        return _Part(self.origin, codes, np.arange(len(rows), dtype=np.int32), picked(self.events, rows))


class _Window:
    """Some commits. In reverse all codes are negative, so that the last event comes first.

    Of no source does anything wait from the code on from which it is yet to be read.
    """

    def __init__(self, first: int, last: int, bits: int, reverse: bool, budget: int, columns: list[str]) -> None:
        self._first, self._last, self._bits, self._reverse, self._budget = first, last, bits, reverse, budget
        self._columns = columns
        self._sources: list[Source] = []
        self._from: dict[int, int] = {}
        self._unread: list[tuple[int, int]] = []
        self._waiting: list[_Part] = []

    def run(self, sources: Sequence[Source]) -> Iterator[Any]:
        self._sources = [one for one in sources if one.last_cts >= self._first and one.first_cts <= self._last]
        for number, source in enumerate(self._sources):
            self._read_from(number, self._least(source))
        fresh = 0
        while self._unread or self._waiting:
            bound = self._next()
            if not self._unread or fresh >= _WORTH or self._nbytes() > self._budget:
                if (given := self._given(bound)) is not None:
                    yield given
                fresh = 0
                if self._nbytes() > self._budget and self._let_go():
                    continue
            if self._unread:
                least, number = heapq.heappop(self._unread)
                del self._from[number]
                fresh += self._read(number, least)

    def _read_from(self, number: int, code: int) -> None:
        """What the source has from this code on is yet to be read."""
        if number not in self._from or code < self._from[number]:
            self._from[number] = code
            heapq.heappush(self._unread, (code, number))

    def _next(self) -> int:
        """A bound of the codes of all that is yet to be read."""
        while self._unread and self._from.get(self._unread[0][1]) != self._unread[0][0]:
            heapq.heappop(self._unread)  # it is read from an earlier one on
        return self._unread[0][0] if self._unread else 1 << 62

    def _nbytes(self) -> int:
        return sum(part.nbytes for part in self._waiting)

    def _least(self, source: Source) -> int:
        """A bound of the codes of a source."""
        if self._reverse:
            return -((min(source.last_cts, self._last) - self._first + 1) << self._bits)
        return (max(source.first_cts, self._first) - self._first) << self._bits

    def _read(self, number: int, least: int) -> int:
        """Adds what a source has from this code on. How many events."""
        events = self._sources[number].read()
        stamps = events.column(STAMP).to_numpy()
        inside = (stamps >= np.uint64(self._first)) & (stamps <= np.uint64(self._last))
        codes = (stamps - np.uint64(self._first)).astype(np.int64) << self._bits
        codes += events.column(POSITION).to_numpy()
        if self._reverse:
            codes = -codes
        inside &= codes >= least
        events = events.select(self._columns)
        if not inside.all():
            codes, events = codes[inside], picked(events, np.flatnonzero(inside))
        if len(codes):
            self._waiting.append(_Part(number, *_sorted(codes), events))
        return len(codes)

    def _given(self, bound: int) -> Any:
        """What waits below the bound, in order, or None; the rest waits on."""
        ready, waiting = list[_Part](), list[_Part]()
        for part in self._waiting:
            for found, left in zip((ready, waiting), part.split(bound), strict=True):
                found += [left] if len(left.codes) else []
        self._waiting = waiting
        if not ready:
            return None
        starts = np.cumsum([0, *(part.events.num_rows for part in ready)], dtype=np.int32)
        rows = np.concatenate([part.rows + start for part, start in zip(ready, starts, strict=False)])
        events = together([part.events for part in ready])
        rows = rows[_sorted(np.concatenate([part.codes for part in ready]))[1]]
        whole = len(rows) == events.num_rows and (rows[1:] > rows[:-1]).all()
        return events if whole else picked(events, rows)

    def _let_go(self) -> bool:
        """Lets go of the later half of what waits, which is then to be read again. False: it is one event."""
        codes = np.concatenate([part.codes for part in self._waiting])
        kept = (len(codes) + 1) // 2
        if kept == len(codes):
            return False
        bound = int(np.partition(codes, kept)[kept])
        waiting, self._waiting = self._waiting, []
        for part in waiting:
            held, gone = part.split(bound)
            self._waiting += [held] if len(held.codes) else []
            if len(gone.codes):
                self._read_from(part.origin, int(gone.codes[0]))
        return True


def _sorted(codes: Codes) -> tuple[Codes, Rows]:
    """Codes that are distinct, in order; and the row that each was in."""
    count = len(codes)
    rows = np.arange(count, dtype=np.int32)
    if (codes[1:] > codes[:-1]).all():
        return codes, rows
    least, bits = int(codes.min()), (count - 1).bit_length()
    if (int(codes.max()) - least).bit_length() + bits > 63:
        order = np.argsort(codes)
        return codes[order], order.astype(np.int32)
    packed = (codes - least) << bits
    packed |= rows
    packed.sort()
    return (packed >> bits) + least, (packed & ((1 << bits) - 1)).astype(np.int32)
