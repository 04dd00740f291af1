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
_WORTH: Final = 262_144
"""So many events are put in order together."""

Codes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Source:
    """Events of some commits. ``read`` gives them as a batch with ``STAMP`` and ``POSITION``, in any order."""

    first_cts: int
    last_cts: int
    position_max: int
    read: Callable[[], Any]


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
    """Some commits. In reverse all codes are negative, so that the last event comes first.

    What was read and not given waits in ``_events``, with the code of each and the number of its source. Of no source
    does anything wait from the code on from which it is yet to be read.
    """

    def __init__(self, first: int, last: int, bits: int, reverse: bool, budget: int) -> None:
        self._first, self._last, self._bits, self._reverse, self._budget = first, last, bits, reverse, budget
        self._sources: list[Source] = []
        self._from: dict[int, int] = {}
        self._unread: list[tuple[int, int]] = []
        self._events: list[Any] = []
        self._codes: list[Codes] = []
        self._origins: list[Codes] = []

    def run(self, sources: Sequence[Source]) -> Iterator[Any]:
        self._sources = [one for one in sources if one.last_cts >= self._first and one.first_cts <= self._last]
        for number, source in enumerate(self._sources):
            self._read_from(number, self._least(source))
        fresh = 0
        while self._unread or self._codes:
            bound = self._next()
            if not self._unread or fresh >= _WORTH or 2 * self._nbytes() > self._budget:
                if (given := self._given(bound)).num_rows:
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
        return sum(events.nbytes for events in self._events)

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
        if not inside.all():
            codes, events = codes[inside], events.take(pa.array(np.flatnonzero(inside)))
        if len(codes):
            self._wait(codes, np.full(len(codes), number), events)
        return len(codes)

    def _wait(self, codes: Codes, origins: Codes, events: Any) -> None:
        self._codes.append(codes)
        self._origins.append(origins)
        self._events.append(events)

    def _sorted(self) -> tuple[Codes, Codes, Any]:
        """All that waits, in order; nothing does then."""
        codes, origins = np.concatenate(self._codes), np.concatenate(self._origins)
        events = pa.concat_batches(self._events)
        self._codes, self._origins, self._events = [], [], []
        if (codes[1:] < codes[:-1]).any():
            order = np.argsort(codes, kind="stable")  # quick where most are in order, as these are
            codes, origins, events = codes[order], origins[order], events.take(pa.array(order))
        return codes, origins, events

    def _given(self, bound: int) -> Any:
        """What waits below the bound, in order; the rest waits on."""
        codes, origins, events = self._sorted()
        ready = int(np.searchsorted(codes, bound))
        if ready < len(codes):
            left = events.slice(ready)
            if ready:
                left = left.take(pa.array(np.arange(left.num_rows)))  # in memory of its own
            self._wait(codes[ready:], origins[ready:], left)
        return events.slice(0, ready)

    def _let_go(self) -> bool:
        """Lets go of the later half of what waits, which is then to be read again. False: it is one event."""
        codes, origins, events = self._sorted()
        kept = (len(codes) + 1) // 2
        numbers, first = np.unique(origins[kept:], return_index=True)
        for number, at in zip(numbers.tolist(), first.tolist(), strict=True):
            self._read_from(number, int(codes[kept + at]))
        self._wait(codes[:kept], origins[:kept], events.take(pa.array(np.arange(kept))))
        return kept < len(codes)
