"""Events that lie sorted by event time, given in commit order, in bounded memory.

Each *source* (a row group) is read when the order comes to its first event, and what is later than the next source's
first event waits. Where events come about in the order of their time, little waits: the late ones, until their commits'
turn. Where sources lie across each other so much that more waits than ``budget`` bytes, the later half is let go of,
and its sources are read again when the order comes to it.

Names are compared as one number, (CTS - first) * 2**bits + position, in windows of CTS in which it has 63 bits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kivi.encoding.event_names import POSITION, STAMP

__all__ = ["Source", "in_commit_order"]

_BATCH_ROWS: Final = 65_536
_WORTH: Final = 8_192
"""So many events are worth a batch of their own."""

Codes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Source:
    """Events of some commits. ``read`` gives them as a batch with ``STAMP`` and ``POSITION``, in any order."""

    first_cts: int
    last_cts: int
    position_max: int
    read: Callable[[], Any]


@dataclass(slots=True)
class _Waiting:
    """What was read of a source and has not been given: in order."""

    source: int
    codes: Codes
    events: Any
    held: int

    def take(self, rows: int) -> Any:
        """The first so many, which wait no longer."""
        taken = self.events.slice(0, rows)
        self.codes, self.events = self.codes[rows:], self.events.slice(rows)
        if 2 * self.events.nbytes < self.held:
            self.let_go(len(self.codes))
        return taken

    def let_go(self, rows: int) -> None:
        """Keeps the first so many, in memory of their own."""
        self.codes = self.codes[:rows].copy()
        self.events = self.events.take(pa.array(np.arange(rows)))
        self.held = self.events.nbytes


def in_commit_order(
    sources: Sequence[Source], *, first_cts: int, last_cts: int, reverse: bool = False, budget: int = 64 << 20
) -> Iterator[Any]:
    """Record batches of at most 65,536 rows of the events with first_cts <= CTS <= last_cts, by (CTS, position)."""
    if not sources:
        return
    bits = max(source.position_max for source in sources).bit_length()
    low = max(first_cts, min(source.first_cts for source in sources))
    high = min(last_cts, max(source.last_cts for source in sources))
    step = 1 << (62 - bits)
    windows = range(low, high + 1, step)
    for start in reversed(windows) if reverse else windows:
        window = _Window(start, min(high, start + step - 1), bits, reverse, budget)
        for batch in window.run(sources):
            for at in range(0, batch.num_rows, _BATCH_ROWS):
                yield batch.slice(at, _BATCH_ROWS)


class _Window:
    """Some commits. In reverse all codes are negative, so that the last event comes first."""

    def __init__(self, first: int, last: int, bits: int, reverse: bool, budget: int) -> None:
        self._first, self._last, self._bits, self._reverse, self._budget = first, last, bits, reverse, budget
        self._sources: list[Source] = []
        self._from: dict[int, int] = {}
        self._unread: list[tuple[int, int]] = []
        self._waiting: list[_Waiting] = []

    def run(self, sources: Sequence[Source]) -> Iterator[Any]:
        self._sources = [one for one in sources if one.last_cts >= self._first and one.first_cts <= self._last]
        for number, source in enumerate(self._sources):
            self._read_from(number, self._least(source))
        pressed = False
        while self._unread or self._waiting:
            bound = self._next()
            ready = [int(np.searchsorted(one.codes, bound)) for one in self._waiting]
            pressed = pressed or 2 * self._nbytes() > self._budget
            if sum(ready) and (sum(ready) >= _WORTH or not self._unread or pressed):
                yield self._given(ready)
                pressed = False
            if not self._unread:
                continue
            least, number = heapq.heappop(self._unread)
            del self._from[number]
            self._read(number, least)
            if self._nbytes() > self._budget and sum(len(one.codes) for one in self._waiting) > 1:
                self._let_go()
                pressed = True

    def _read_from(self, number: int, code: int) -> None:
        """What the source has from this code on is yet to be read: none of that waits."""
        if number not in self._from or code < self._from[number]:
            self._from[number] = code
            heapq.heappush(self._unread, (code, number))

    def _next(self) -> int:
        """A bound of the codes of all that is yet to be read."""
        while self._unread and self._from.get(self._unread[0][1]) != self._unread[0][0]:
            heapq.heappop(self._unread)  # it is read from an earlier one on
        return self._unread[0][0] if self._unread else 1 << 62

    def _nbytes(self) -> int:
        return sum(one.held for one in self._waiting)

    def _least(self, source: Source) -> int:
        """A bound of the codes of a source."""
        if self._reverse:
            return -((min(source.last_cts, self._last) - self._first + 1) << self._bits)
        return (max(source.first_cts, self._first) - self._first) << self._bits

    def _read(self, number: int, least: int) -> None:
        events = self._sources[number].read()
        stamps = events.column(STAMP).to_numpy()
        inside = (stamps >= np.uint64(self._first)) & (stamps <= np.uint64(self._last))
        if not inside.all():
            events = events.take(pa.array(np.flatnonzero(inside)))
            stamps = stamps[inside]
        codes = (stamps - np.uint64(self._first)).astype(np.int64) << self._bits
        codes += events.column(POSITION).to_numpy()
        if self._reverse:
            codes = -codes
        if len(codes) > 1 and (codes[1:] < codes[:-1]).any():
            order = np.argsort(codes, kind="stable")
            codes, events = codes[order], events.take(pa.array(order))
        given = int(np.searchsorted(codes, least))
        if given < len(codes):
            self._waiting.append(_Waiting(number, codes, events, events.nbytes))
            self._waiting[-1].take(given)

    def _given(self, ready: list[int]) -> Any:
        codes = [one.codes[:rows] for one, rows in zip(self._waiting, ready, strict=True) if rows]
        parts = [one.take(rows) for one, rows in zip(self._waiting, ready, strict=True) if rows]
        self._waiting = [one for one in self._waiting if len(one.codes)]
        if len(parts) == 1:
            return parts[0]
        every = np.concatenate(codes)
        order = np.argsort(every, kind="stable")  # quick where runs are in order, as these are
        return pa.concat_batches(parts).take(pa.array(order))

    def _let_go(self) -> None:
        """Lets go of the later half of what waits, which is then to be read again."""
        every = np.concatenate([one.codes for one in self._waiting])
        middle = int(np.partition(every, len(every) // 2)[len(every) // 2])
        for one in self._waiting:
            kept = int(np.searchsorted(one.codes, middle))
            if kept < len(one.codes):
                self._read_from(one.source, int(one.codes[kept]))
                one.let_go(kept)
        self._waiting = [one for one in self._waiting if len(one.codes)]
