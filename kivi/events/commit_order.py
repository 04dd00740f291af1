"""Events that lie sorted by event time, given in commit order, in bounded memory.

Each *source* (a row group) is read when the order comes to its first event, and its names are sorted then, once; the
next one is read in another thread meanwhile. What is later than the next source's first event waits where it lies.
Where events come about in the order of their time, little waits: the late ones, until their commits' turn. Where
sources lie across each other so much that more waits than ``budget`` bytes, the later half is let go of, and its
sources are read again when the order comes to it.

Names are compared as one number, (CTS - first) * 2**bits + position, in windows of CTS in which it has 63 bits. Sorting
these with the row of each in the bits that are left takes a tenth of the time of sorting rows by them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kivi.arrow.columns import picked
from kivi.arrow.dictionaries import gathered, together
from kivi.encoding.event_names import POSITION, STAMP
from kivi.runtime.ahead import begin

__all__ = ["Source", "in_commit_order"]

_BATCH_ROWS: Final = 65_536
_WORTH: Final = 65_536
"""So many events are put in order together."""
_SMALL_ROWS: Final = 16_384

_DENSE: Final = 4
"""Where so many codes there are for each event, the place of each is written down instead of sorting."""
Codes = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Source:
    """Events of some commits. ``read`` gives them as a batch with ``STAMP`` and ``POSITION``, in any order.

    Text may come in codes. ``waits``: for a network perhaps, so it is not read ahead.
    """

    first_cts: int
    last_cts: int
    position_max: int
    read: Callable[[], Any]
    waits: bool = False


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
            batch = batch.select(columns)
            for at in range(0, batch.num_rows, _BATCH_ROWS):
                yield batch.slice(at, _BATCH_ROWS)


@dataclass(frozen=True, slots=True)
class _Part:
    """What was read of a source, and not given yet: these rows of ``events``, in the order of ``codes``."""

    origin: int
    codes: Codes
    rows: Rows
    events: Any
    nbytes: int

    @classmethod
    def of(cls, origin: int, codes: Codes, rows: Rows, events: Any) -> _Part:
        """In memory of its own if it has less than half of the events."""
        if 2 * len(rows) < events.num_rows:
            codes, rows, events = codes.copy(), np.arange(len(rows), dtype=np.int32), picked(events, rows)
        return cls(origin, codes, rows, events, int(events.nbytes) + codes.nbytes + rows.nbytes)

    def split(self, bound: int) -> tuple[_Part | None, _Part | None]:
        """What is below a code, and the rest; None: nothing."""
        at = int(np.searchsorted(self.codes, bound))
        if at == len(self.codes):
            return self, None
        if not at:
            return None, self
        ready = _Part(self.origin, self.codes[:at], self.rows[:at], self.events, self.nbytes)
        return ready, _Part.of(self.origin, self.codes[at:], self.rows[at:], self.events)

    def in_order(self) -> Any:
        """The events alone, in order."""
        first, last = int(self.rows[0]), int(self.rows[-1])
        if last - first + 1 == len(self.rows) and _ascends(self.rows):
            return self.events.slice(first, len(self.rows))
        return picked(self.events, self.rows)


class _Window:
    """Some commits. In reverse all codes are negative, so that the last event comes first.

    Of no source does anything wait from the code on from which it is yet to be read.
    """

    def __init__(self, first: int, last: int, bits: int, reverse: bool, budget: int, columns: list[str]) -> None:
        self._first, self._last, self._bits, self._reverse, self._budget = first, last, bits, reverse, budget
        self._columns = [name for name in columns if name not in (STAMP, POSITION)] or [STAMP]
        self._naming = [name for name in columns if name not in self._columns]
        self._sources: list[Source] = []
        self._from: dict[int, int] = {}
        self._unread: list[tuple[int, int]] = []
        self._waiting: list[_Part] = []
        self._ahead: tuple[int, Future[_Part | None]] | None = None

    def run(self, sources: Sequence[Source]) -> Iterator[Any]:
        self._sources = [one for one in sources if one.last_cts >= self._first and one.first_cts <= self._last]
        for number, source in enumerate(self._sources):
            self._read_from(number, self._least(source))
        fresh = 0
        try:
            while self._unread or self._waiting:
                bound = self._next()
                if not self._unread or fresh >= _WORTH or self._nbytes() > self._budget:
                    yield from self._given(bound)
                    fresh = 0
                    if self._nbytes() > self._budget and self._let_go():
                        continue
                if self._unread:
                    fresh += self._read()
        finally:
            if self._ahead is not None:
                self._ahead[1].cancel()

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

    def _read(self) -> int:
        """Adds what the next source has from where it is yet to be read on. How many events."""
        least, number = heapq.heappop(self._unread)
        del self._from[number]
        if self._ahead is not None and self._ahead[0] == number:
            part, self._ahead = self._ahead[1].result(), None
        else:
            part = self._sorted(number)
        self._next()
        if self._ahead is None and self._unread and not self._sources[following := self._unread[0][1]].waits:
            self._ahead = following, begin(partial(self._sorted, following))
        if part is not None:
            _, part = part.split(least)
        if part is None:
            return 0
        self._waiting.append(part)
        return len(part.codes)

    def _sorted(self, number: int) -> _Part | None:
        """What a source has of this window."""
        source = self._sources[number]
        events = source.read()
        stamps, positions = events.column(STAMP).to_numpy(), events.column(POSITION).to_numpy()
        rows = np.arange(len(stamps), dtype=np.int32)
        if source.first_cts < self._first or source.last_cts > self._last:
            inside = (stamps >= np.uint64(self._first)) & (stamps <= np.uint64(self._last))
            stamps, positions, rows = stamps[inside], positions[inside], rows[inside]
        if not len(rows):
            return None
        codes = (stamps - np.uint64(self._first)).view(np.int64) << self._bits
        codes += positions
        if self._reverse:
            codes = -codes
        if not _ascends(codes):
            order = _order(codes)
            codes, rows = codes[order], rows[order]
        return _Part.of(number, codes, rows, events.select(self._columns))

    def _given(self, bound: int) -> Iterable[Any]:
        """What waits below the bound, in order; the rest waits on."""
        split = [part.split(bound) for part in self._waiting]
        ready = sorted((part for part, _ in split if part is not None), key=lambda part: int(part.codes[0]))
        self._waiting = [part for _, part in split if part is not None]
        if not ready:
            return []
        codes = np.concatenate([part.codes for part in ready])
        if _ascends(codes):
            return gathered((self._named(part.in_order(), part.codes) for part in ready), _SMALL_ROWS)
        ready = [_Part.of(part.origin, part.codes, part.rows, part.events) for part in ready]
        starts = np.cumsum([0, *(part.events.num_rows for part in ready)], dtype=np.int32)
        rows = np.concatenate([part.rows + start for part, start in zip(ready, starts, strict=False)])
        order = _order(codes)
        events = picked(_joined([part.events for part in ready]), rows[order])
        return [self._named(events, codes[order] if self._naming else codes)]

    def _named(self, events: Any, codes: Codes) -> Any:
        """With the names of the events, as far as they are asked for."""
        codes = -codes if self._reverse and self._naming else codes
        for name in self._naming:
            if name == STAMP:
                column = pa.array((codes >> self._bits).view(np.uint64) + np.uint64(self._first))
            else:
                column = pa.array(codes & ((1 << self._bits) - 1))
            events = events.append_column(name, column)
        return events

    def _let_go(self) -> bool:
        """Lets go of the later half of what waits, which is then to be read again. False: it is one event."""
        codes = np.concatenate([part.codes for part in self._waiting])
        kept = (len(codes) + 1) // 2
        if kept == len(codes):
            return False
        bound = int(np.partition(codes, kept)[kept])
        split = [(part.origin, *part.split(bound)) for part in self._waiting]
        self._waiting = [_Part.of(held.origin, held.codes, held.rows, held.events) for _, held, _ in split if held]
        for origin, _, gone in split:
            if gone is not None:
                self._read_from(origin, int(gone.codes[0]))
        return True


def _joined(batches: Sequence[Any]) -> Any:
    """One after the other. Codes of text have 32 bits, as they were read, where it has codes in all of them."""
    if all(batch.schema.equals(batches[0].schema) for batch in batches):
        return pa.concat_batches(batches)
    return together(batches)


def _ascends(codes: Codes | Rows) -> bool:
    return bool((codes[1:] > codes[:-1]).all())


def _order(codes: Codes) -> Any:
    """Where the least of the codes is, and so on; they are distinct."""
    least, bits = int(codes.min()), (len(codes) - 1).bit_length()
    beyond = int(codes.max()) - least + 1
    if beyond <= _DENSE * len(codes):
        places = np.full(beyond, -1, np.int32)
        places[codes - least] = np.arange(len(codes), dtype=np.int32)
        return places[places >= 0]
    if beyond.bit_length() + bits > 63:
        return np.argsort(codes)
    packed = (codes - least) << bits
    packed |= np.arange(len(codes))
    packed.sort()
    packed &= (1 << bits) - 1
    return packed
